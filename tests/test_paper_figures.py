"""Tests the pictures of paper/ (learning curves, Figure 2, pages of tokens), with numbers computed again."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
import tyro
from conftest import PAIRS, ROOT, metrics, read_rows, run_ranks, write_rows
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from paper import curves, figure2, tokens
from paper.curves import collect, curve
from support.run import exit_on_input_error

SHORT = "--num-steps 6 --warmup-fraction 0 --k 4 --eval-samples 4 --max-new-tokens 8 --engine hf"
SHORT += " --keep-checkpoints 0"
TOKEN = r"log π_θ (\S+), log π_ref (\S+), log-ratio (\S+) nats, id (\d+)"  # the text of a token in a page
TOKEN += r"(, clipped by humanline)?(, clipped by 1 ± ε)?"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Makes short runs. "four" ends with the policy that becomes grpo-1's reference in the fifth step."""
    folder = tmp_path_factory.mktemp("runs")
    rows = read_rows(ROOT / "toy" / "tales" / "preferences_train.jsonl.gz")[:64]
    data = write_rows(folder / "tales.jsonl", rows)
    tales = f"{SHORT} --dataset {data} --eval-dataset {data} --batch-size 16 --lr 1e-2"
    each = f"{tales} --eval-every 2 --checkpoint-every 3"
    arms = {f"grpo-{seed}": f"{each} --seed {seed}" for seed in (1, 2, 3)}
    arms["plain"] = f"{each} --no-humanline"
    arms["four"] = f"{tales} --num-steps 4 --checkpoint-every 0"
    pairs = f"{SHORT} --dataset {PAIRS} --eval-dataset {PAIRS} --lr 3e-2"
    scripts = {"grpo": arms, "kto": {"kto": f"{tales} --k 8 --checkpoint-every 6"}}
    scripts["dpo"] = {"dpo": f"{pairs} --k 8 --checkpoint-every 6"}
    for script, of_script in scripts.items():
        starts = [[*flags.split(), "--output-dir", f"{folder}/{name}"] for name, flags in of_script.items()]
        run_ranks(1, starts, script=f"{script}_humanline")
    return folder


def margin_after(folder) -> float:
    return json.loads((folder / "summary.json").read_text())["after"]["eval/margin"][0]


def refused(program, arguments: list[str], capfd) -> str:
    """Returns the one line with which a command ends."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop, exit_on_input_error():
        tyro.cli(program.main, args=arguments)
    message = stop.value.code
    if message == 1:  # otherwise the interpreter prints the message
        message = capfd.readouterr().err
    if dist.is_initialized():
        dist.destroy_process_group()
    assert message.startswith("error: ") and len(message.splitlines()) == 1, message
    return message


def test_a_curve_is_what_the_run_wrote_so_far(runs, tmp_path):
    lines = metrics(runs / "grpo-1")
    whole = curve(runs / "grpo-1", "eval/margin")
    assert whole == {0: 0.0, 6: margin_after(runs / "grpo-1")} | {s: lines[s]["eval/margin"] for s in (2, 4)}
    assert whole[6] != whole[4] != 0
    assert curve(runs / "grpo-1", "loss") == {line["step"]: line["loss"] for line in lines}
    assert curve(runs / "dpo", "eval/margin") == {0: 0.0, 6: margin_after(runs / "dpo")}  # no --eval-every
    killed = shutil.copytree(runs / "grpo-1", tmp_path / "killed")
    (killed / "summary.json").unlink()
    text = (killed / "metrics.jsonl").read_text()
    incomplete = text[: text.index('{"step": 4') + 20]  # a part of the fifth line
    (killed / "metrics.jsonl").write_text(incomplete)
    assert curve(killed, "eval/margin") == {2: whole[2]}
    extended = shutil.copytree(runs / "dpo", tmp_path / "extended")
    args = json.loads((extended / "args.json").read_text())
    (extended / "args.json").write_text(json.dumps(args | {"num_steps": 12}))
    assert list(curve(extended, "eval/margin")) == [0]  # summary.json is that of the run before its extension


def test_the_interval_is_students_over_seeds():
    values = np.array([[0.9, 0.5], [1.0, 0.4], [1.0, 0.6]])
    _, high = stats.t.interval(0.95, df=2, loc=0, scale=values.std(0, ddof=1) / math.sqrt(3))
    np.testing.assert_allclose(curves.interval(values), high, rtol=1e-12)
    assert np.isnan(curves.interval(values[:1])).all()


def test_smoothing_is_the_mean_of_the_last_steps_and_unequal_runs_share_their_common_ones(runs):
    whole = [line["loss"] for line in metrics(runs / "grpo-1")]
    steps, values = collect([runs / "grpo-1", runs / "four"], "loss", 3)
    assert steps == [0, 1, 2, 3]
    expected = [np.mean(whole[max(0, step - 2) : step + 1]) for step in steps]
    assert values[0].tolist() == pytest.approx(expected, rel=1e-12)
    assert values[0].tolist() == values[1].tolist()  # the same flags and seed: the same run


def test_the_command_draws_and_tells_the_numbers(runs, tmp_path, capsys):
    patterns = [str(runs / "grpo-[1-3]"), str(runs / "plain")]
    curves.main(patterns, ["eval/margin", "loss"], ["ours", "theirs"], 1, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()
    told = capsys.readouterr().out.splitlines()[0]
    ends = [margin_after(runs / f"grpo-{seed}") for seed in (1, 2, 3)]
    assert told.endswith(f"at step 6 {np.mean(ends):.3f} ± {stats.sem(ends):.3f}")


def test_capacity_and_weights_at_known_points():
    """The first values are published values of w at γ = 0.61, rounded to two decimals.

    The next are those of the gamble in §3: +$50 with 60% and +$100 with 20%. Perceived probabilities of 0.8
    and 0.3 give weights of 0.5 and 0.3.
    """
    known = {0.0: 0.0, 0.01: 0.06, 0.1: 0.19, 0.5: 0.42, 0.9: 0.71, 0.99: 0.91, 1.0: 1.0}
    for a, published in known.items():
        assert round(float(figure2.capacity(a)), 2) == published
    perceived = {0.8: 0.8, 0.2: 0.3, 0.0: 0.0}
    omega = lambda a: np.array([perceived[round(x, 9)] for x in a])
    assert figure2.weights([0.6, 0.2], omega).tolist() == pytest.approx([0.5, 0.3], abs=1e-12)
    even = figure2.weights(np.full(10, 0.1))
    assert even.sum() == pytest.approx(1, abs=1e-9) and (even > 0).all()
    assert min(even[0], even[-1]) > 0.1 > even[2:-1].max()  # Ω⁺ crosses the diagonal near 0.34


def plain_logps(folder, ids: list[int], first: int) -> list[float]:
    """Computes the log-probs of ids[first:] with transformers, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logps[:-1].gather(1, torch.tensor(ids[1:])[:, None])[first - 1 :, 0].tolist()


def conversation(folder, prompt: str, completion: str) -> tuple[list[int], int]:
    """Returns token ids in the toys' chat template, and where the completion begins."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = tokenizer(f"<|user|> {prompt} <|end|> <|assistant|>").input_ids
    after = tokenizer(f"{completion} <|end|>").input_ids
    return before + after, len(before)


def check_cumulative(points: list[tuple], values: list[float]):
    """Checks a cumulative distribution. Its points have 5 digits, so x may be on either side of a value."""
    for x, y in points:
        ends = np.mean(np.array(values) <= x - 1e-4), np.mean(np.array(values) <= x + 1e-4)
        assert min(abs(y - end) for end in ends) < 1e-4


def test_figure_2_draws_what_plain_transformers_finds_and_repeats(runs, tmp_path):
    """The figure is that of the DPO run's first 8 pairs."""
    texts = []
    for name in ("one", "two"):
        figure2.main(runs / "dpo", tmp_path / f"{name}.png", 8)
        texts.append((tmp_path / f"{name}.csv").read_text())
    assert texts[0] == texts[1]
    drawn = {name: list(zip(x, y)) for _, name, x, y in figure2.read_curves(tmp_path / "one.csv")}

    toy = ROOT / "toy" / "bouquets" / "policy"
    ratios = {"chosen": [], "rejected": []}
    for row in read_rows(PAIRS)[:8]:
        for side, found in ratios.items():
            ids, first = conversation(toy, row["prompt"], row[side])
            logps = plain_logps(runs / "dpo" / "final", ids, first)
            found += np.subtract(logps, plain_logps(toy, ids, first)).tolist()
    check_cumulative(drawn["held-out data, better"], ratios["chosen"])
    check_cumulative(drawn["held-out data, worse"], ratios["rejected"])
    every = ratios["chosen"] + ratios["rejected"]
    inside = [z for z in every if -1.5 <= z <= 1.5]
    assert 0 < len(inside) < len(every)
    share = f"{len(inside) / len(every):.0%}"
    check_cumulative(drawn[f"both, clipping, κ → ∞: {share} kept"], inside)

    for name in ("objective, p", "perceived, ω"):
        assert sum(y for _, y in drawn[name]) == pytest.approx(1, abs=1e-4)


def page_of(run, step: int, rows: int, path) -> tuple[str, list[list[tuple]]]:
    """Writes a page. Returns its text, and the tokens of its completions as the page shows them."""
    tokens.main(run, step, rows, path)
    text = path.read_text()
    _, *blocks = text.split('<div class="tokens">')
    return text, [re.findall(TOKEN, block) for block in blocks]


@pytest.mark.parametrize(
    ("script", "run", "synced"), [("dpo", "dpo", 0), ("kto", "kto", 0), ("grpo", "grpo-1", 4)]
)
def test_a_page_has_the_log_probs_of_plain_transformers(runs, tmp_path, script, run, synced):
    """The policy is the run's final/. The reference is the toy's policy, or the policy after 4 steps."""
    toy = ROOT / "toy" / ("bouquets" if script == "dpo" else "tales") / "policy"
    before = runs / "four" / "final" if synced else toy
    expected = []  # (prompt, completion, whether it is chosen)
    for row in read_rows(PAIRS if script == "dpo" else runs / "tales.jsonl")[:6]:
        expected += [(row["prompt"], row["chosen"], True), (row["prompt"], row["rejected"], False)]
    text, completions = page_of(runs / run, 6, 6, tmp_path / "page.html")
    titles = {"dpo": ("chosen", "rejected"), "kto": ("desirable", "undesirable")}
    titles["grpo"] = ("reward 1, A = +1.00", "reward 0, A = -1.00")
    assert re.findall("<h2>(.*?);", text) == [*titles[script]] * 6
    for completion, (*turn, chosen) in zip(completions, expected, strict=True):
        logps, ref_logps, log_ratios, shown = np.array([token[:4] for token in completion], float).T
        ids, first = conversation(toy, *turn)
        assert shown.tolist() == ids[first:]
        policy = np.array(plain_logps(runs / run / "final", ids, first))
        reference = np.array(plain_logps(before, ids, first))
        assert logps == pytest.approx(policy, abs=1e-3)
        assert ref_logps == pytest.approx(reference, abs=1e-3)
        assert log_ratios == pytest.approx(policy - reference, abs=2e-3)
        assert (abs(policy - reference) > 0.05).any()
        cut, eps = np.array([token[4:] for token in completion], bool).T
        assert (cut == (abs(log_ratios) > 1.5)).all()
        removed = log_ratios > math.log(1.15) if chosen else log_ratios < math.log(0.85)  # A is 1 or -1
        assert (eps == (removed & (script == "grpo"))).all()
    cut, eps = np.array([token[4:] for token in sum(completions, [])], bool).mean(0)
    assert 0 < cut < 1 and f"({cut:.1%} here)" in text
    assert script != "grpo" or 0 < eps < 1 and f"removes its gradient ({eps:.1%} here)" in text
    assert f"reference is the policy after {synced} (k =" in text.replace("\n", " ")
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link|<iframe", text)  # it loads nothing
    assert "<|" not in text  # the text of tokens is escaped


def test_bad_input_is_one_line(runs, tmp_path, capfd):
    for program, arguments, message in (
        (curves, "nowhere-*", "nowhere-* is no run"),
        (
            curves,
            "RUNS/four --metric eval/acuracy",
            "no metric eval/acuracy, only eval/accuracy, eval/finished",
        ),
        (curves, "RUNS/four RUNS/plain --label a", "2 lines need 2 different labels"),
        (tokens, "RUNS", "RUNS is no run: FileNotFoundError"),
        (
            tokens,
            "RUNS/grpo-1 --step 5",
            "the checkpoints of RUNS/grpo-1 are step-3, step-6; --keep-checkpoints 0",
        ),
        (tokens, "RUNS/dpo --out /nowhere/page.html", "--out /nowhere/page.html: "),
    ):
        arguments = arguments.replace("RUNS", str(runs)).split()
        assert message.replace("RUNS", str(runs)) in refused(program, arguments, capfd)
    broken = shutil.copytree(runs / "dpo", tmp_path / "broken")
    (weights,) = broken.glob("checkpoints/step-6/*.distcp")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "step-6 is damaged, or of another model: " in refused(tokens, [str(broken)], capfd)
    args = json.loads((broken / "args.json").read_text())
    (broken / "args.json").write_text(json.dumps(args | {"eval_dataset": ""}))
    for program in (tokens, figure2):
        assert "the --eval-dataset of the run has no completions" in refused(program, [str(broken)], capfd)
