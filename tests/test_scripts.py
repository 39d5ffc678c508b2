"""What is true of all four scripts: their shape, settings and loop, an edited loss, and a real chat model."""

import ast
import hashlib
import importlib
import inspect
import json
import math
import os
import random
import re
import shutil
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    ALL_SCRIPTS,
    PAIRS,
    ROOT,
    SCRIPTS,
    TOY,
    full_logps,
    metrics,
    parse_args,
    read_rows,
    run_here,
    run_ranks,
    write_rows,
)
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import dpo_humanline
import grpo_humanline
import kto_humanline
import utils
from support import data
from utils import Example

# === Shape ===

# Functions and classes that are each script's own. All others of one name are the same.
OWN = set("Args Evaluation load_data encode_row group_advantages sample_round evaluate main".split())
FUNCTION = ast.FunctionDef | ast.ClassDef


def read(name: str) -> str:
    return (ROOT / f"{name}.py").read_text()


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_grep_finds_the_two_lines_of_the_paper(name):
    """So that a reader finds them at once."""
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


def test_the_end_of_a_step_is_the_same_in_all_scripts():
    block = r"# Humanline syncs after backward.*?checkpoint\.end_step\(\*state\)\n"
    first, *others = [re.findall(block, read(name), re.DOTALL) for name in ALL_SCRIPTS]
    assert len(first) == 1 and others == [first] * 3


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


# === The loop ===
# Runs on two ranks: which policy the reference is at every step, bit for bit, and every step by hand.

COMMON = """--num-steps 5 --warmup-fraction 0.4 --lr 1e-2 --adam-eps 1e-2 --max-grad-norm 0.1 --dtype float64
    --log-epsilon-P=-0.1 --log-epsilon-R 0.05 --micro-batch-tokens 60 --checkpoint-every 3 --engine hf
    --max-new-tokens 8 --temperature 0.8 --weight-decay 0.1 --eval-dataset="""
PAIRED = f"--dataset {PAIRS} --reward-threshold 0 --samples-per-prompt 2 --model"
FLAGS = {
    "dpo_humanline": f"{PAIRED} {TOY}/policy --batch-size 6 --round-prompts 15 --beta 2",
    "kto_humanline": f"{PAIRED} TIED --batch-size 10 --round-prompts 14",
    "grpo_humanline": f"{PAIRED} {TOY}/policy --batch-size 10 --round-prompts 14 --beta 0.1",
    "grpo_math_humanline": "--dataset PROBLEMS --sample-every 3 --prompts-per-step 2 --group-size 5 --beta 1",
}
# So many steps before was the policy what the reference is. Rounds begin at steps 0 and 2, 0 and 4, 0 and 3.
AGES = {
    "--k 3": [0, 1, 2, 3, 1],
    "--no-humanline --online": [0, 1, 0, 1, 2],
    "--online --k 2 --round-prompts 24": [0, 1, 2, 1, 0],
}
AGES = dict.fromkeys(SCRIPTS, AGES) | {"dpo_humanline": {"--k 1": [0, 1, 1, 1, 1]} | AGES}
AGES["grpo_math_humanline"] = {
    "--no-humanline --k 1": [0, 1, 2, 0, 1],
    "--k 0": [0, 1, 2, 0, 1],
    "--k 2": [0, 1, 2, 1, 2],
}


def digest(model) -> str:
    content = hashlib.sha256()
    for weight in model.parameters():
        content.update(weight.detach().full_tensor().numpy().tobytes())
    return content.hexdigest()


def record_run(script, arguments):
    """Runs main, and notes what every step begins with, and how often each sync communicates.

    Rewards are random, and other ones on every rank. A run that is resumed has lost its last checkpoint.
    """
    args, steps, syncs, models = parse_args(script, arguments), [], [], {}
    load, sync = script.load_models, script.sync_reference

    def load_models(*arguments):
        models.update(zip(("policy", "reference"), load(*arguments)))
        return tuple(models.values())

    def sync_reference(*models):
        with CommDebugMode() as communication:
            sync(*models)
        syncs.append(communication.get_total_counts())

    def make_micro_batches(*arguments):
        step = {"batch": inspect.currentframe().f_back.f_locals["batch"], "random": random.random()}
        with CommDebugMode() as communication:
            step |= {name: digest(model) for name, model in models.items()}
        assert communication.get_total_counts() > 0  # the counter does count
        steps.append(step)
        return utils.make_micro_batches(*arguments)

    # for the loop alone, not for what utils itself calls
    script.utils = SimpleNamespace(**vars(utils) | {"make_micro_batches": make_micro_batches})
    script.load_models, script.sync_reference = load_models, sync_reference
    script.format_reward = lambda text: random.random()
    if getattr(args, "online", False):
        script.SCORE = lambda samples: [random.random() for _ in samples]
    folder, rank = Path(args.output_dir), os.environ["RANK"]
    if args.resume and rank == "0":
        shutil.rmtree(folder / "checkpoints/step-000005")
    script.main(args)
    script.load_models, script.sync_reference = load, sync
    torch.save((steps, syncs), folder / f"{'resumed' if args.resume else 'whole'} {rank}")


@pytest.fixture(scope="module", params=ALL_SCRIPTS)
def recorded(request, tmp_path_factory, tied_policy):
    """All runs of a script, of which the last one is resumed: its module and [(folder, args, ages), ...]."""
    script, runs, starts = importlib.import_module(request.param), [], []
    problems = read_rows(ROOT / "toy" / "shell_game" / "problems_train.jsonl.gz")[:40]
    paths = {"PROBLEMS": write_rows(tmp_path_factory.mktemp("data") / "problems.jsonl", problems)}
    paths["TIED"] = tied_policy
    for flags, ages in AGES[request.param].items():
        folder = tmp_path_factory.mktemp("loop")
        words = f"{FLAGS[request.param]} {COMMON} {flags} --output-dir {folder}".split()
        starts.append([paths.get(word, word) for word in words])
        runs.append((folder, parse_args(script, starts[-1]), ages))
    run_ranks(2, [*starts, ["--resume", str(folder)]], record_run, request.param)
    return script, runs


def read_record(folder: Path, title="whole") -> tuple:
    """Returns the steps and the syncs. The steps are the same on both ranks, but for random numbers."""
    (steps, syncs), (others, _) = (
        torch.load(folder / f"{title} {rank}", weights_only=False) for rank in "01"
    )
    assert [step | {"random": 0} for step in steps] == [step | {"random": 0} for step in others]
    return steps, syncs


def test_the_reference_is_the_policy_of_the_expected_step(recorded):
    for folder, args, ages in recorded[1]:
        steps, syncs = read_record(folder)
        found = [[step["reference"] == other["policy"] for other in steps] for step in steps]
        assert found == [[t - age == i for i in range(5)] for t, age in enumerate(ages)], args
        assert not any(syncs)  # a sync communicates nothing


def test_a_resumed_run_goes_on_bit_for_bit(recorded):
    """With the moments, the reference, the pool and the random numbers that it had before step 3."""
    folder, *_ = recorded[1][-1]
    assert read_record(folder, "resumed")[0] == read_record(folder)[0][3:]


def step_by_hand(script, args, policy, reference, batch: list[tuple]):
    """Returns the loss and the mean |log-ratio|, computed in the textbook way in one batch."""

    def log_ratios(examples):
        input_ids, mask = utils.pad_batch(examples, "cpu")
        temperature = 1.0 if hasattr(args, "online") else args.temperature
        with torch.no_grad():
            ref_logps = full_logps(reference, input_ids, mask, temperature)
        log_ratio = full_logps(policy, input_ids, mask, temperature) - ref_logps
        clipped = log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R) if args.humanline else log_ratio
        return log_ratio, clipped, mask

    examples = [example for group in batch for example in group]
    if script is dpo_humanline:
        examples = examples[::2] + examples[1::2]
    log_ratio, clipped, mask = log_ratios(examples)
    if script is dpo_humanline:
        loss = script.dpo_loss(clipped, mask, args.beta).mean()
    elif script is kto_humanline:
        _, mixed, _ = log_ratios(script.mismatch(batch, args.max_length))
        z_0 = mixed.sum(-1).mean().clamp(min=0).item()
        desirable = torch.tensor([example.desirable for example in examples])
        margins = script.kto_margins(clipped, mask, desirable, z_0, args.beta)
        loss = script.kto_loss(margins, desirable, args.lambda_D, args.lambda_U).mean()
    else:
        rewards = torch.tensor([[example.reward for example in group] for group in batch]).double()
        A = script.group_advantages(rewards).flatten()
        losses = grpo_humanline.grpo_loss(clipped, log_ratio, A, args.beta, args.epsilon)
        loss = (losses * mask).sum() / mask.sum()
    return loss, log_ratio.abs().sum() / mask.sum()


def test_every_step_by_hand(recorded):
    """On one rank, with AdamW of a model in fp32 and gradients in float64."""
    script, runs = recorded
    for folder, args, ages in runs:
        weights = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        optimizer = torch.optim.AdamW(weights.parameters(), eps=args.adam_eps, weight_decay=args.weight_decay)
        policies, logged = [], metrics(folder)
        for t, step in enumerate(read_record(folder)[0]):
            policies.append(deepcopy(weights).double())
            models = policies[t], policies[t - ages[t]]
            loss, log_ratio = step_by_hand(script, args, *models, step["batch"])
            loss.backward()
            for weight, parameter in zip(weights.parameters(), policies[t].parameters()):
                weight.grad = parameter.grad.float()
            norm = torch.nn.utils.clip_grad_norm_(weights.parameters(), args.max_grad_norm)
            lr = optimizer.param_groups[0]["lr"] = args.lr * (1 if t else 0.5)
            optimizer.step()
            found = [logged[t][name] for name in ("loss", "grad_norm", "humanline/log_ratio_abs_mean", "lr")]
            by_hand = [loss.item(), norm.item(), log_ratio.item(), lr]
            assert found == pytest.approx(by_hand, rel=1e-5, abs=1e-7), (args, t)
        assert max(step["humanline/clipped_low"] * step["humanline/clipped_high"] for step in logged) > 0
        assert max(step["grad_norm"] for step in logged) > args.max_grad_norm
        final = AutoModelForCausalLM.from_pretrained(folder / "final")
        for weight, found in zip(weights.parameters(), final.parameters(), strict=True):
            assert torch.allclose(weight, found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_round_has_the_next_prompts_and_truncates_samples_after_they_are_scored(name):
    """A sequence that was too long kept all its tokens, or was given an end that the policy did not write."""
    asked = []

    def sample(policy, prompts, count, seed):
        asked.append((seed, {prompt.prompt for prompt in prompts}))
        completions = ([10] * 9 + [5], [11, 5], [12] * 9 + [5], [13, 5])
        samples = [Example("x", [1, 2], ids, reward=float(-number)) for number, ids in enumerate(completions)]
        return [samples for _ in prompts], {}

    script, sampler = importlib.import_module(name), SimpleNamespace(sample=sample)
    args = script.Args(max_length=6, round_prompts=2, samples_per_prompt=4)
    prompts = [(Example(text, [1, 2]),) for text in "abcd"]
    for number in (1, 2):
        groups, _ = script.sample_round(args, sampler, None, prompts, number)
        assert [[x.completion_ids for x in group] for group in groups] == [[[10] * 4, [13, 5]]] * 2
        assert [[x.reward for x in group] for group in groups] == [[0, -3]] * 2
    assert asked == [((1, 1), asked[0][1]), ((1, 2), set("abcd") - asked[0][1])]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_round_whose_rewards_are_all_equal_is_passed_over(name):
    """It ended the run, also after good rounds, if few samples got a reward."""
    asked = []

    def sample(policy, prompts, count, seed):
        asked.append((seed, {prompt.prompt for prompt in prompts}))
        rewards = [0.0, 0.0, 0.0, float(seed[1] == 4)]
        return [[Example("x", [1, 2], [5], reward=reward) for reward in rewards] for _ in prompts], {}

    script, sampler = importlib.import_module(name), SimpleNamespace(sample=sample)
    args = script.Args(round_prompts=2, samples_per_prompt=4)
    prompts = [(Example(text, [1, 2]),) for text in "abcd"]
    groups, metrics = script.sample_round(args, sampler, None, prompts, 2)
    assert [[x.reward for x in group] for group in groups] == [[1, 0]] * 2
    assert metrics == {"rollout/round": 4, "rollout/filtered": 0}
    assert [seed for seed, _ in asked] == [(1, 2), (1, 3), (1, 4)]
    assert asked[1][1] | asked[2][1] == set("abcd")  # each round has the next prompts
    with pytest.raises(SystemExit, match="rounds 5 to 14: no prompt's rewards differ enough"):
        script.sample_round(args, sampler, None, prompts, 5)


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
    # bf16 takes minutes where the CPU has no instructions for it
    output = run_ranks(1, [run], script="grpo_math_humanline", timeout=900)
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
