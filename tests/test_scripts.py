"""What is true of all four scripts: their shape, their settings, an edited loss, and a real chat model."""

import ast
import importlib
import json
import math
import re
from dataclasses import asdict

import pytest
import torch
from helpers import (
    ALL_SCRIPTS,
    ROOT,
    SCRIPTS,
    full_logps,
    metrics,
    parse_args,
    read_rows,
    run_here,
    run_ranks,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import dpo_humanline
import kto_humanline
import utils
from support import data

# === Shape ===

# Functions and classes that are each script's own. All others of one name are the same.
OWN = set("Args Evaluation load_data encode_row group_advantages sample_round evaluate main".split())
FUNCTION = ast.FunctionDef | ast.ClassDef


def read(name: str) -> str:
    return (ROOT / f"{name}.py").read_text()


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_grep_finds_the_two_lines_of_the_paper(name):
    """docs/dpo.md has the command."""
    assert read(name).count("# humanline clipping") == read(name).count("# humanline syncing") == 1


def test_functions_of_one_name_are_the_same_in_all_scripts():
    first = {}  # {name: (script, source)}
    for script in ALL_SCRIPTS:
        for node in ast.parse(read(script)).body:
            if isinstance(node, FUNCTION) and node.name not in OWN:
                start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                source = read(script).splitlines()[start - 1 : node.end_lineno]
                where, known = first.setdefault(node.name, (script, source))
                assert known == source, f"{node.name} differs in {where} and {script}"


# === Settings ===


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_the_toy_has_its_own_settings_and_flags_win(name):
    script = importlib.import_module(name)
    for data_set in ({}, {"dataset": "data.jsonl"}):  # the toy's settings apply whatever the data
        flags = [part for key, value in data_set.items() for part in (f"--{key}", value)]
        args = asdict(parse_args(script, ["--k", "5", *flags]))
        assert args.items() >= (script.TOY | {"k": 5} | data_set).items() and args["dtype"] == "float64"
    if name in SCRIPTS:
        assert parse_args(script, ["--online"]).dataset.endswith("prompts_train.jsonl.gz")


# === Edits of a loss ===


def mean_log_ratio(log_ratio, mask):
    return (log_ratio * mask).sum(-1) / mask.sum(-1)


def normalized_dpo_loss(log_ratio, mask, beta):
    chosen, rejected = (beta * mean_log_ratio(log_ratio, mask)).chunk(2)
    return -(chosen - rejected).sigmoid().log()


def normalized_kto_margins(log_ratio, mask, desirable, z_0, beta):
    """Leaves z_0 out, which an evaluation does not have."""
    rewards = beta * mean_log_ratio(log_ratio, mask)
    return torch.where(desirable, rewards, -rewards)


@pytest.mark.parametrize(
    ("script", "loss", "group"),  # group: the examples of a batch that are a group of the script's
    [(dpo_humanline, normalized_dpo_loss, 2), (kto_humanline, normalized_kto_margins, 1)],
)
def test_a_replaced_loss_is_that_of_training_and_of_evaluation(script, loss, group, tmp_path, monkeypatch):
    """On the same pairs, which are all one batch, an evaluation has the loss of its step."""
    monkeypatch.setattr(script, loss.__name__.removeprefix("normalized_"), loss)
    rows = read_rows(script.TOY["dataset"])[:12]
    rows[0]["chosen"] = rows[0]["chosen"].split()[0]  # where the two kinds of loss differ most
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    flags = ["--dataset", path, "--eval-dataset", path]
    flags += ["--no-humanline", "--batch-size", 24 // group, "--eval-every", "1", "--eval-samples", "0"]
    flags += ["--num-steps", "3", "--warmup-fraction", "0", "--checkpoint-every", "0"]
    steps = metrics(run_here(script, *flags, "--output-dir", tmp_path / "run"))
    assert ["eval/loss" in step for step in steps] == [False, True, True]
    for step in steps[1:]:
        assert step["eval/loss"] == pytest.approx(step["loss"], rel=1e-9)
    assert len({step["loss"] for step in steps}) == 3

    toy = script.TOY["model"]
    tokenizer, eos_ids = data.load_tokenizer(script.Args(model=toy, max_length=128))
    pairs = [script.encode_row(script.Args(), tokenizer, eos_ids, row) for row in rows]
    examples = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
    input_ids, mask = utils.pad_batch(examples, "cpu")
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(name).double() for name in (tmp_path / "run" / "final", toy)
    )
    with torch.no_grad():
        log_ratio = full_logps(policy, input_ids, mask) - full_logps(reference, input_ids, mask)
    arguments = () if group == 2 else (torch.arange(24) < 12, 0.0)
    by_hand = loss(log_ratio, mask, *arguments, script.TOY["beta"])
    if group == 1:
        by_hand = script.kto_loss(by_hand, arguments[0], script.Args.lambda_D, script.Args.lambda_U)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["after"]["eval/loss"][0] == pytest.approx(by_hand.mean().item(), rel=1e-6)


def test_the_pages_example_of_another_loss_runs():
    """IPO's loss of two pairs by hand."""
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    (code,) = re.findall(r"```python\n(def dpo_loss\(log_ratio, mask.*?)\n```", pages, re.S)
    scope = dict(vars(dpo_humanline))
    exec(code, scope)
    log_ratio, mask = torch.tensor([[0.5, 0.25], [-0.25, 1.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert scope["dpo_loss"](log_ratio, mask, 0.1).item() == pytest.approx((0.75 + 0.25 - 5) ** 2)


# === SmolLM2-135M-Instruct on the CPU ===

QUESTIONS = {  # {question: (better answer, worse answer)}
    "What is the capital of Italy?": ("The capital of Italy is Rome.", "Milan, I think."),
    "How many legs has a spider?": ("A spider has eight legs.", "Six."),
    "Name a red fruit.": ("A strawberry is red.", "Bananas are a fruit."),
    "Is ice colder than steam?": ("Yes, ice is colder.", "No."),
    "Which planet is closest to the sun?": ("Mercury is the closest planet.", "Pluto is."),
    "What do bees make?": ("Bees make honey.", "They sting."),
}
SUMS = ROOT / "toy" / "sums"
COMMON_FLAGS = ["--dtype", "bfloat16", "--engine", "hf", "--warmup-fraction", "0", "--max-new-tokens", "16"]
COMMON_FLAGS += ["--lr", "1e-6", "--checkpoint-every", "0"]


@pytest.fixture(scope="module")
def flags(smollm2, tmp_path_factory) -> list[str]:
    """Flags of a short run on six questions. A small random classifier scores samples."""
    folder = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=49152, num_labels=1, pad_token_id=2, **shape)
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder / "reward")
    rows = [dict(prompt=q, chosen=better, rejected=worse) for q, (better, worse) in QUESTIONS.items()]
    path = write_rows(folder / "pairs.jsonl", rows)
    flags = ["--model", smollm2, "--reward-model", folder / "reward"]
    flags += ["--dataset", path, "--eval-dataset", path]
    flags += ["--eval-samples", "2", "--batch-size", "4", "--round-prompts", "6", "--samples-per-prompt", "2"]
    return [*map(str, [*flags, "--reward-threshold", "0", *COMMON_FLAGS])]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "online"), [("dpo", False), ("grpo", True)])
def test_a_script_trains_smollm2(script, online, flags, tmp_path):
    variant = ["--online"] if online else []
    run = [*flags, *variant, "--num-steps", "2", "--output-dir", str(tmp_path / "run")]
    run_ranks(1, [run], script=f"{script}_humanline")
    first, second = metrics(tmp_path / "run")
    # Policy and reference are equal at step 0 and where a round begins. With k = 1 they are one update apart
    # at step 1.
    assert first["humanline/log_ratio_abs_mean"] == 0
    if "rollout/round" not in second:
        assert 0 < second["humanline/log_ratio_abs_mean"] < 0.1
    assert 0 < first["grad_norm"] < math.inf
    if script == "dpo":
        assert first["loss"] == pytest.approx(math.log(2))


@pytest.mark.slow
def test_the_math_script_trains_smollm2_and_its_final_folder_is_a_model(smollm2, tmp_path):
    flags = ["--chat-template", SUMS / "one_example.jinja", "--system-prompt", "", "--eval-samples", "4"]
    flags += ["--dataset", SUMS / "train.jsonl", "--eval-dataset", SUMS / "held_out.jsonl", "--k", "1"]
    flags += ["--eval-samples-per-problem", "2", "--prompts-per-step", "4", "--group-size", "4"]
    flags += ["--num-steps", "2", "--sample-every", "2", "--temperature", "1", "--model", smollm2]
    run = [*map(str, [*flags, *COMMON_FLAGS, "--output-dir", tmp_path / "run"])]
    output = run_ranks(1, [run], script="grpo_math_humanline")
    assert "1474 of 1474 gold answers can be graded" in output and "134,515,008 parameters" in output
    assert any(step["rewards/accuracy"] > 0 for step in metrics(tmp_path / "run"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    question = [{"role": "user", "content": "What is 7 + 8?"}]
    options = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = tokenizer.apply_chat_template(question, **options)
    logps = []
    for folder in (tmp_path / "run" / "final", smollm2):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logps.append(model(**inputs).logits[0, -1].log_softmax(-1))
    assert 0 < (logps[0] - logps[1]).abs().max() < 0.1  # two updates of 1e-6 have moved it a little
