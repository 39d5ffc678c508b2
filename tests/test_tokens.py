"""The page of tools/tokens.py computes what the scripts compute, and shows every text as it is.

apt-get install chromium
"""

import importlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, metrics, read_rows, run_ranks, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.run import load_args
from tools import tokens

TALES = ["--model", "toy/tales/policy", "--reward-model", "toy/tales/reward_model", "--dtype", "float64"]
TALES += "--batch-size 8 --round-prompts 12 --samples-per-prompt 4 --max-new-tokens 24".split()
MATH = "--prompts-per-step 2 --group-size 4 --sample-every 4 --k 2 --max-new-tokens 16".split()
RUNS = {  # {name: (script, flags, steps of the page: those that begin no round)}
    "dpo": ("dpo_humanline", [*TALES, "--k", "4"], [2, 4, 6, 7]),
    "dpo online": ("dpo_humanline", [*TALES, "--online", "--k", "0"], [2, 6]),
    "kto": ("kto_humanline", [*TALES, "--k", "4", "--max-grad-norm", "1e9"], [2, 4, 6, 7]),
    "grpo plain": ("grpo_humanline", [*TALES, "--no-humanline", "--log-epsilon-P", "-0.5"], [2, 4, 6, 7]),
    "math": ("grpo_math_humanline", MATH, [2, 6]),
}
FLAGS = "--num-steps 7 --checkpoint-every 2 --keep-checkpoints 100 --eval-samples 0 --engine hf --lr 1e-2"
FLAGS = [*FLAGS.split(), "--warmup-fraction", "0", "--eval-dataset", ""]


def browse(page, fragment: str = "") -> str:
    """Returns the document that a browser makes of a page."""
    if not shutil.which("chromium") and not os.environ.get("REQUIRE_CHROMIUM"):
        pytest.skip("apt-get install chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command = ["chromium", *flags, f"{page.as_uri()}#{fragment}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def numbers(dom: str) -> dict[str, str]:
    """Returns the numbers of the batch that a document shows."""
    return dict(re.findall(r'data-name="([^"]+)">([^<]+)<', dom))


def replay(script, args, step: dict) -> tuple[dict, list[float]]:
    """Computes the metrics of a step of the page, and the push on each token, with autograd."""
    rows = [row for group in step["groups"] for row in group["rows"]]
    if hasattr(script, "dpo_loss"):  # the chosen completions first
        rows = rows[::2] + rows[1::2]
    x, mask = padded([row["x"] for row in rows])
    clipped = script.clip_log_ratio(args, x.requires_grad_())
    A = torch.tensor([row["A"] for row in rows], dtype=torch.float64)
    found = {name: mean(values, mask) for name, values in script.clipping_metrics(args, x).items()}
    if hasattr(script, "dpo_loss"):
        chosen, rejected = script.implicit_rewards(clipped, mask, args.beta)
        losses = script.dpo_loss(clipped, mask, args.beta)
        found |= {"loss": losses.mean(), "rewards/margins": (chosen - rejected).mean()}
    elif hasattr(script, "kto_loss"):
        others, others_mask = padded(step["mismatched"])
        z_0 = (script.clip_log_ratio(args, others) * others_mask).sum(-1).mean().clamp(min=0)
        margins = script.kto_margins(clipped, mask, A > 0, z_0, args.beta)
        losses = script.kto_loss(margins, A > 0, args.lambda_D, args.lambda_U)
        found |= {"loss": losses.mean(), "kto/z_0": z_0}
    else:
        own = script.grpo_metrics(clipped, x, A, args.epsilon)["grpo/clip_fraction"]
        found["loss"] = mean(script.grpo_loss(clipped, x, A, args.beta, args.epsilon), mask)
        found["grpo/clip_fraction"] = mean(own, mask)
        losses = script.grpo_loss(
            clipped, x, A, 0.0, args.epsilon
        )  # the page's push is without the KL penalty
    (gradient,) = torch.autograd.grad(losses.sum(), x)
    pushes = {id(row): -gradient[i][mask[i].bool()] for i, row in enumerate(rows)}
    shown = [row for group in step["groups"] for row in group["rows"] if "texts" in row]
    return found, torch.cat([pushes[id(row)] for row in shown]).tolist()


def padded(rows: list[list[float]]):
    """Returns rows of numbers as a tensor, and its mask."""
    sequences = [torch.tensor(row, dtype=torch.float64) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(sequences, True), pad([torch.ones_like(sequence) for sequence in sequences], True)


def mean(values, mask):
    return (values * mask).sum() / mask.sum()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs all scripts for seven steps, with a checkpoint every two."""
    folder = tmp_path_factory.mktemp("tokens")
    rows = read_rows(ROOT / "toy" / "tales" / "preferences_test.jsonl.gz")[:48]
    pairs = write_rows(folder / "pairs.jsonl", rows)
    problems = write_rows(
        folder / "problems.jsonl", read_rows(ROOT / "toy/shell_game/problems_test.jsonl.gz")[:16]
    )
    for name, (script, flags, _) in RUNS.items():
        dataset = problems if script.startswith("grpo_math") else pairs
        run_ranks(
            1, [[*flags, *FLAGS, "--dataset", dataset, "--output-dir", f"{folder}/{name}"]], script=script
        )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_sliders_change_the_numbers_to_what_the_script_computes(folder, name, monkeypatch):
    monkeypatch.chdir(ROOT)
    module, _, expected_steps = RUNS[name]
    tokens.main(folder / name)
    page = folder / name / "tokens.html"
    data = json.loads(re.search('id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    assert [step["step"] for step in data["steps"]] == expected_steps
    script = importlib.import_module(module)
    args = load_args(script.Args, str(folder / name), script.__file__)
    (last,) = [step for step in data["steps"] if step["step"] == 6]
    line = metrics(folder / name)[6]
    for key, value in replay(script, args, last)[0].items():
        assert value.item() == pytest.approx(line[key], rel=1e-4, abs=1e-6), key
    for bound in (0.3, 1.5):
        dom = browse(page, f"step=6&bound={bound}")
        shown = numbers(dom)
        args = replace(args, humanline=True, log_epsilon_P=-bound, log_epsilon_R=bound)
        if name == "grpo plain":  # asymmetric bounds keep their quotient
            args = replace(args, log_epsilon_P=-bound / 3)
        found, pushes = replay(script, args, last)
        assert shown == {key: f"{value:.4f}" for key, value in found.items()}
        titles = re.findall(r"push (-?[0-9.]+)", dom[: dom.index("<script")])
        assert [float(push) for push in titles] == pytest.approx(pushes, abs=6e-5)
        assert float(shown["humanline/clipped_low"]) + float(shown["humanline/clipped_high"]) > 0 or bound > 1


HARD = (
    'مرحبا بالعالم 🕷️🙂\n\n<b>bold</b> "a & b" </script><script>document.title = "run"</script> '
    + "long " * 400
)


@pytest.fixture
def byte_tokenizer():
    """A tokenizer whose tokens are bytes, so that an emoji is several of them."""
    vocabulary = {text: number for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_texts_are_shown_as_they_are(byte_tokenizer, tmp_path):
    ids = byte_tokenizer(HARD).input_ids
    texts = tokens.spell(byte_tokenizer, ids)
    assert "".join(texts) == HARD and len(texts) == len(ids) and "🙂" in texts
    row = {"title": "<i>", "A": 1, "texts": texts, "x": [0.1] * len(ids)}
    steps = [{"step": 3, "log": {}, "groups": [{"prompt": HARD, "rows": [row, row]}]}]
    page = tmp_path / "page.html"
    page.write_text(tokens.page("<title>", {"kind": "dpo", "beta": 1, "low": -1, "high": 1}, steps))
    dom = browse(page)
    body = dom[: dom.index("<script")]
    shown = "".join(
        re.findall("<span[^>]*>([^<]*)</span>", body.partition('class="tokens"')[2].partition("</div>")[0])
    )
    escaped = HARD.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "⏎\n")
    assert shown.replace("·", "") == escaped
    assert "<b>bold" not in body and "<title>&lt;title&gt;</title>" in dom


def test_words_get_the_spaces_between_them():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy" / "tales" / "policy")
    ids = tokenizer("the small queen . <|end|>").input_ids
    assert tokens.spell(tokenizer, ids) == ["the", " small", " queen", " .", " <|end|>"]


@pytest.mark.slow
def test_a_run_without_checkpoints_ends_in_one_line(folder):
    shutil.rmtree(folder / "dpo" / "checkpoints")
    args = folder / "dpo" / "args.json"  # as of a run of paper/variants.py
    args.write_text(args.read_text().replace('"dpo_humanline"', '"sampling-dpo_humanline"'))
    command = ["python", "tools/tokens.py", "--run", str(folder / "dpo")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and "train with --checkpoint-every N" in ended.stderr.splitlines()[-1]
