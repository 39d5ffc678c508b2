"""The page of tools/tokens.py computes what the scripts compute, and shows every text as it is.

apt-get install chromium
"""

import json
import os
import re
import shutil
import subprocess
from statistics import fmean

import pytest
import torch
from helpers import ROOT, metrics, read_rows, run_ranks, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import grpo_math_humanline as script
import utils
from support.run import load_args
from tools import tokens

TALES = ["--model", "toy/tales/policy", "--reward-model", "toy/tales/reward_model", "--dtype", "float64"]
TALES += "--batch-size 8 --round-prompts 12 --samples-per-prompt 4 --max-new-tokens 24 --k 4".split()
MATH = "--prompts-per-step 2 --group-size 4 --sample-every 4 --k 2 --max-new-tokens 16".split()
RUNS = {  # {script: flags, steps of the page: those that begin no round}
    "dpo": ([*TALES, "--online", "--sft-weight", "0.1"], [2]),
    "kto": (TALES, [2, 4, 6, 7]),
    "grpo_math": (MATH, [2, 6]),
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


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Runs three scripts for seven steps, with a checkpoint every two. Returns {script: its page}."""
    folder = tmp_path_factory.mktemp("tokens")
    rows = read_rows(ROOT / "toy" / "tales" / "preferences_test.jsonl.gz")[:48]
    pairs = write_rows(folder / "pairs.jsonl", rows)
    problems = write_rows(
        folder / "problems.jsonl", read_rows(ROOT / "toy/shell_game/problems_test.jsonl.gz")[:16]
    )
    for name, (flags, _) in RUNS.items():
        flags = [*flags, *FLAGS, "--dataset", problems if name == "grpo_math" else pairs]
        run_ranks(1, [[*flags, "--output-dir", f"{folder}/{name}"]], script=f"{name}_humanline")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name in RUNS:
            tokens.main(folder / name)
    return {name: folder / name / "tokens.html" for name in RUNS}


def steps_of(page) -> dict[int, dict]:
    """Returns {step: its data} of a page."""
    data = json.loads(re.search('id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    return {step["step"]: step for step in data["steps"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_page_has_the_log_ratios_of_the_steps(name, pages):
    steps = steps_of(pages[name])
    assert list(steps) == RUNS[name][1]
    for line in metrics(pages[name].parent):
        if step := steps.get(line["step"]):
            found = [abs(x) for group in step["groups"] for row in group["rows"] for x in row["x"]]
            expected = line["humanline/log_ratio_abs_mean"]
            assert fmean(found) == pytest.approx(expected, rel=1e-4) and expected > 1e-3
            clipped = [
                sum(abs(x) > 1.5 for row in group["rows"] for x in row["x"]) for group in step["groups"]
            ]
            assert clipped == sorted(clipped, reverse=True)


@pytest.mark.slow
def test_the_sliders_change_the_numbers_to_what_the_script_computes(pages):
    """In one script; the push on a token is computed with autograd."""
    page = pages["grpo_math"]
    args = load_args(script.Args, str(page.parent), script.__file__)
    step = steps_of(page)[6]
    rows = [row for group in step["groups"] for row in group["rows"]]
    pad = torch.nn.utils.rnn.pad_sequence
    sequences = [torch.tensor(row["x"], dtype=torch.float64) for row in rows]
    x = pad(sequences, True).requires_grad_()
    mask = pad([torch.ones_like(sequence) for sequence in sequences], True)
    A = torch.tensor([row["A"] for row in rows], dtype=torch.float64)

    def numbers(bound: float) -> dict[str, str]:
        clipped = x.clamp(-bound, bound)
        found = utils.clipping_metrics(x, -bound, bound)
        found["grpo/clip_fraction"] = script.grpo_metrics(clipped, x, A, args.epsilon)["grpo/clip_fraction"]
        found["loss"] = script.grpo_loss(clipped, x, A, args.beta, args.epsilon)
        return {name: f"{(values * mask).sum() / mask.sum():.4f}" for name, values in found.items()}

    for bound in (0.3, 1.5):
        dom = browse(page, f"step=6&bound={bound}")
        clipped = x.clamp(-bound, bound)
        assert dict(re.findall(r'data-name="([^"]+)">([^<]+)<', dom)) == numbers(bound)
        assert dict(re.findall(r'data-unbound="([^"]+)">([^<]+)<', dom)) == numbers(float("inf"))
        without_kl = script.grpo_loss(clipped, x, A, 0.0, args.epsilon)
        (gradient,) = torch.autograd.grad((without_kl * mask).sum(), x)
        titles = re.findall(r"push (-?[0-9.]+)", dom[: dom.index("<script")])
        assert [float(push) for push in titles] == pytest.approx(-gradient[mask.bool()], abs=6e-5)
        assert 0 < (gradient[mask.bool()] == 0).double().mean() < 1


@pytest.mark.slow
def test_a_page_of_dpo_has_the_loss_of_the_run_with_the_likelihood_term(pages):
    losses = {line["step"]: line["loss"] for line in metrics(pages["dpo"].parent)}
    dom = browse(pages["dpo"], "step=2&bound=1.5")
    assert float(re.search(r'data-name="loss">([^<]+)<', dom)[1]) == pytest.approx(losses[2], abs=6e-5)
    chosen = [row for group in steps_of(pages["dpo"])[2]["groups"] for row in group["rows"][:1]]
    assert fmean(row["nll"] for row in chosen) * 0.1 > 0.01  # so the term is a part of the loss


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


def test_a_struck_token_has_no_space_and_a_page_without_one_says_so(tmp_path):
    row = {"title": "a", "A": 1, "texts": ["the", " bear"], "x": [0.1, 2.0]}
    steps = [{"step": 3, "log": {}, "groups": [{"prompt": "", "rows": [row, row]}]}]
    page = tmp_path / "page.html"
    page.write_text(tokens.page("One pair", {"kind": "dpo", "beta": 1, "low": -1, "high": 1}, steps))
    dom = browse(page)
    assert re.findall(r'class="cut"[^>]*>([^<]*)<', dom) == ["bear", "bear"]
    assert ">One pair, step 3<" in dom and re.search(r'id="none"[^>]* hidden', dom)
    dom = browse(page, "bound=2.5")
    assert 'class="cut"' not in dom and not re.search(r'id="none"[^>]* hidden', dom)


def test_words_get_the_spaces_between_them():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy" / "tales" / "policy")
    ids = tokenizer("the small queen . <|end|>").input_ids
    assert tokens.spell(tokenizer, ids) == ["the", " small", " queen", " .", " <|end|>"]
