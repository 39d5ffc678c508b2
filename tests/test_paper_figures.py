"""The pictures of paper/: learning curves, Figure 2, pages of tokens. Their numbers by other computations."""

import html
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
import tyro
from conftest import PAIRS, ROOT, metrics, read_rows, run_ranks, write_rows
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from paper import curves, figure2, tokens
from paper.curves import collect, curve, plt

SHORT = "--num-steps 6 --warmup-fraction 0 --k 4 --eval-samples 4 --max-new-tokens 8 --engine hf"
SHORT += " --keep-checkpoints 0"
SPAN = r'<span class="t( cut)?( eps)?" style="background:(#\w{6})" title="([^"]*)">([^<]*)</span>'
NUMBERS = r"log π_θ (\S+), log π_ref (\S+), log-ratio (\S+) nats, id (\d+)"
NUMBERS += r"(, humanline clips it)?(, 1 ± ε clips it)?"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of short runs. grpo-four ends where grpo-1's reference was synced, before its fifth step."""
    folder = tmp_path_factory.mktemp("runs")
    rows = read_rows(ROOT / "toy" / "tales" / "preferences_train.jsonl.gz")[:64]
    data = write_rows(folder / "tales.jsonl", rows)
    tales = f"{SHORT} --dataset {data} --eval-dataset {data} --batch-size 16 --lr 1e-2"
    each = f"{tales} --eval-every 2 --checkpoint-every 3"
    arms = {f"grpo-{seed}": f"{each} --seed {seed}" for seed in (1, 2, 3)}
    arms["plain"] = f"{each} --no-humanline"
    arms["four"] = f"{tales} --num-steps 4 --checkpoint-every 0"
    start(folder, "grpo", arms)
    start(folder, "kto", {"kto": f"{tales} --k 8 --checkpoint-every 6"})
    pairs = f"--dataset {PAIRS} --eval-dataset {PAIRS}"
    start(folder, "dpo", {"dpo": f"{SHORT} {pairs} --lr 3e-2 --k 8 --checkpoint-every 6"})
    return folder


def start(folder, script: str, arms: dict[str, str]):
    """Runs of {folder's name: flags}."""
    starts = [[*flags.split(), "--output-dir", str(folder / name)] for name, flags in arms.items()]
    run_ranks(1, starts, script=f"{script}_humanline")


def seeds_of(runs) -> list:
    return [runs / f"grpo-{seed}" for seed in (1, 2, 3)]


def losses(folder) -> list[float]:
    return [line["loss"] for line in metrics(folder)]


def margin_after(folder) -> float:
    return json.loads((folder / "summary.json").read_text())["after"]["eval/margin"][0]


def refused(program, arguments: list[str], capfd) -> str:
    """The one line with which a command ends."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        tyro.cli(program.main, args=arguments)
    message = stop.value.code
    if message == 1:  # else the interpreter prints it, and exits with 1
        message = capfd.readouterr().err
    assert message.startswith("error: ") and len(message.splitlines()) == 1, message
    return message


# --- curves ---


def test_a_curve_is_what_the_run_wrote(runs):
    lines = metrics(runs / "grpo-1")
    margins = curve(runs / "grpo-1", "eval/margin")
    assert margins == {0: 0.0} | {step: lines[step - 1]["eval/margin"] for step in (2, 4, 6)}
    assert margins[6] == margin_after(runs / "grpo-1") != 0
    assert curve(runs / "grpo-1", "loss") == {line["step"] + 1: line["loss"] for line in lines}
    without_eval_every = runs / "dpo"
    assert curve(without_eval_every, "eval/margin") == {0: 0.0, 6: margin_after(without_eval_every)}


def test_a_run_that_goes_on_has_the_curve_so_far(runs, tmp_path):
    whole = curve(runs / "grpo-1", "eval/margin")
    killed = shutil.copytree(runs / "grpo-1", tmp_path / "killed")
    (killed / "summary.json").unlink()
    text = (killed / "metrics.jsonl").read_text()
    (killed / "metrics.jsonl").write_text(text[: text.rindex("\n", 0, -1) + 20])  # the sixth line is cut
    assert curve(killed, "eval/margin") == {2: whole[2], 4: whole[4]}
    extended = shutil.copytree(runs / "dpo", tmp_path / "extended")
    args = json.loads((extended / "args.json").read_text())
    (extended / "args.json").write_text(json.dumps(args | {"num_steps": 12}))
    assert list(curve(extended, "eval/margin")) == [0]  # the old end is no evaluation of what goes on


def test_a_band_is_the_t_interval_over_seeds(runs):
    figure, axes = plt.subplots()
    seeds = seeds_of(runs)
    curves.draw([axes], {"humanline": seeds, "plain": [runs / "plain"]}, ["loss"])
    values = np.array([losses(folder) for folder in seeds])
    mean = values.mean(0)
    several, one = axes.get_lines()
    assert several.get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(several.get_ydata(), mean, rtol=1e-12)
    np.testing.assert_allclose(one.get_ydata(), losses(runs / "plain"), rtol=1e-12)
    (band,) = axes.collections  # a single run has none
    low, high = stats.t.interval(0.95, df=2, loc=mean, scale=values.std(0, ddof=1) / math.sqrt(3))
    corners = band.get_paths()[0].vertices
    for step in range(1, 7):
        ends = corners[corners[:, 0] == step, 1]
        assert (ends.min(), ends.max()) == pytest.approx((low[step - 1], high[step - 1]), rel=1e-9)
    plt.close(figure)


def test_smoothing_is_the_mean_of_the_last_steps_and_unequal_runs_share_their_common_ones(runs):
    whole = losses(runs / "grpo-1")
    steps, values = collect([runs / "grpo-1", runs / "four"], "loss", 3)
    assert steps == [1, 2, 3, 4]
    expected = [np.mean(whole[max(0, step - 3) : step]) for step in steps]
    assert values[0].tolist() == pytest.approx(expected, rel=1e-12)
    assert values[0].tolist() == values[1].tolist()  # the same flags and seed: the same run


def test_the_command_draws_and_tells_the_numbers(runs, tmp_path, capsys):
    patterns = [str(runs / "grpo-[1-3]"), str(runs / "plain")]
    out = tmp_path / "curves.png"
    curves.main(patterns, ["eval/margin", "loss"], ["ours", "theirs"], 1, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    *lines, _ = capsys.readouterr().out.splitlines()
    ends = [margin_after(folder) for folder in seeds_of(runs)]
    error = np.std(ends, ddof=1) / math.sqrt(3)
    assert lines[0].startswith("eval/margin, ours, runs: 3; mean over the curve ")
    assert lines[0].endswith(f"at step 6 {np.mean(ends):.3f} ± {error:.3f}")
    starts = [tuple(line.split(", ")[:2]) for line in lines]
    assert starts == [(key, label) for key in ("eval/margin", "loss") for label in ("ours", "theirs")]


# --- Figure 2 ---


def test_capacity_function_at_known_points():
    """Published values of w at γ = 0.61, to their two decimals, and by logarithms to all."""
    known = {0.0: 0.0, 0.01: 0.06, 0.1: 0.19, 0.5: 0.42, 0.9: 0.71, 0.99: 0.91, 1.0: 1.0}
    for a, published in known.items():
        perceived = float(figure2.capacity(a))
        assert round(perceived, 2) == published
        if 0 < a < 1:
            logarithm = 0.61 * math.log(a) - math.log(a**0.61 + (1 - a) ** 0.61) / 0.61
            assert perceived == pytest.approx(math.exp(logarithm), rel=1e-12)
    a = np.linspace(0, 1, 11)
    np.testing.assert_allclose(figure2.capacity(a, 1.0), a, rtol=1e-12)


def test_weights_of_the_papers_gamble_and_of_even_outcomes():
    """§3: +$50 with 60% and +$100 with 20%; perceived 0.8 and 0.3 give 0.5 and 0.3."""
    perceived = {0.8: 0.8, 0.2: 0.3, 0.0: 0.0}
    omega = lambda a: np.array([perceived[round(x, 9)] for x in a])
    assert figure2.weights([0.6, 0.2], omega).tolist() == pytest.approx([0.5, 0.3], abs=1e-12)
    even = figure2.weights(np.full(10, 0.1))
    assert even.sum() == pytest.approx(1, abs=1e-9) and (even > 0).all()
    assert min(even[0], even[-1]) > 0.1 > even[2:-1].max()  # Ω⁺ crosses the diagonal near 0.34


def plain_logps(folder, ids: list[int], first: int) -> list[float]:
    """Log-probs of ids[first:] by transformers, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logps[:-1].gather(1, torch.tensor(ids[1:])[:, None])[first - 1 :, 0].tolist()


def conversation(folder, prompt: str, completion: str) -> tuple[list[int], int]:
    """Token ids by the toys' chat template, and where the completion begins."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = tokenizer(f"<|user|> {prompt} <|end|> <|assistant|>").input_ids
    after = tokenizer(f"{completion} <|end|>").input_ids
    return before + after, len(before)


def check_cumulative(points: list[tuple], values: list[float]):
    """Points are written with 5 digits: x may stand on either side of a value."""
    for x, y in points:
        ends = np.mean(np.array(values) <= x - 1e-4), np.mean(np.array(values) <= x + 1e-4)
        assert min(abs(y - end) for end in ends) < 1e-4


def test_figure_2_draws_what_plain_transformers_finds_and_repeats(runs, tmp_path):
    """Of the DPO run's first 8 pairs."""
    out = tmp_path / "figure2.png"
    figure2.main(runs / "dpo", out, 8)
    assert out.read_bytes().startswith(b"\x89PNG")
    text = out.with_suffix(".csv").read_text()
    figure2.main(runs / "dpo", out, 8)
    assert out.with_suffix(".csv").read_text() == text
    drawn = {}  # {(panel, curve): [(x, y)]}
    for line in text.splitlines()[1:]:
        panel, curve, x, y = re.fullmatch(r'(\w+),"?(.*?)"?,([^,]+),([^,]+)', line).groups()
        drawn.setdefault((panel, curve), []).append((float(x), float(y)))

    toy = ROOT / "toy" / "bouquets" / "policy"
    ratios = {"chosen": [], "rejected": []}
    for row in read_rows(PAIRS)[:8]:
        for side, found in ratios.items():
            ids, first = conversation(toy, row["prompt"], row[side])
            logps = plain_logps(runs / "dpo" / "final", ids, first)
            found += np.subtract(logps, plain_logps(toy, ids, first)).tolist()
    check_cumulative(drawn["tokens", "held-out data, better"], ratios["chosen"])
    check_cumulative(drawn["tokens", "held-out data, worse"], ratios["rejected"])
    every = ratios["chosen"] + ratios["rejected"]
    inside = [z for z in every if -1.5 <= z <= 1.5]
    assert 0 < len(inside) < len(every)
    share = f"{len(inside) / len(every):.0%}"
    check_cumulative(drawn["tokens", f"both, clipping, κ → ∞: {share} kept"], inside)

    perceived = drawn["tokens", "the same, as perceived"]
    for (x, p), (same, y) in zip(drawn["tokens", "samples of the policy"], perceived, strict=True):
        assert x == same
        assert y == pytest.approx(1 - figure2.capacity(1 - p), abs=2e-3)  # 5 digits, and steep at the ends
    for name in ("objective, p", "perceived, ω"):
        assert sum(y for _, y in drawn["weights", name]) == pytest.approx(1, abs=1e-4)


# --- tokens ---


def read_page(path) -> list[list[dict]]:
    """The completions of a page, as their tokens: numbers as they are told, marks, colour."""
    completions = []
    for block in re.findall(r'<div class="tokens">(.*?)</div>', path.read_text(), re.DOTALL):
        completions.append([])
        for span in block.split("<wbr>"):
            cut, eps, colour, title, text = re.fullmatch(SPAN, span).groups()
            *numbers, told_cut, told_eps = re.fullmatch(NUMBERS, html.unescape(title)).groups()
            assert (bool(told_cut), bool(told_eps)) == (bool(cut), bool(eps))
            token = dict(zip(("logp", "ref_logp", "log_ratio", "id"), map(float, numbers)))
            token |= {"cut": bool(cut), "eps": bool(eps), "colour": colour, "text": html.unescape(text)}
            completions[-1].append(token)
    return completions


def column(completion: list[dict], key: str) -> list:
    return [token[key] for token in completion]


@pytest.mark.parametrize(
    ("script", "run", "synced"), [("dpo", "dpo", 0), ("kto", "kto", 0), ("grpo", "grpo-1", 4)]
)
def test_a_page_has_the_log_probs_of_plain_transformers(runs, tmp_path, script, run, synced):
    """The run's final/ is the policy of step 6; the reference is the toy's, or the policy after 4 steps."""
    toy = ROOT / "toy" / ("bouquets" if script == "dpo" else "tales") / "policy"
    before = runs / "four" / "final" if synced else toy
    data = PAIRS if script == "dpo" else runs / "tales.jsonl"
    tokens.main(runs / run, 6, 3, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    sums = re.findall(r"Σ log-ratio (\S+) nats", text)
    expected = []  # prompt, completion
    for row in read_rows(data)[:3]:
        expected += [(row["prompt"], row["chosen"]), (row["prompt"], row["rejected"])]
    for completion, total, turn in zip(read_page(tmp_path / "page.html"), sums, expected, strict=True):
        ids, first = conversation(toy, *turn)
        assert column(completion, "id") == ids[first:]
        assert " ".join(column(completion, "text")) == f"{turn[1]} <|end|>"
        policy = np.array(plain_logps(runs / run / "final", ids, first))
        reference = np.array(plain_logps(before, ids, first))
        assert column(completion, "logp") == pytest.approx(policy, abs=1e-3)
        assert column(completion, "ref_logp") == pytest.approx(reference, abs=1e-3)
        assert (abs(policy - reference) > 0.05).any()
        assert float(total) == pytest.approx((policy - reference).sum(), abs=0.02)
    k = 4 if synced else 8
    flat = " ".join(text.split())
    assert f"after 6 optimizer steps; the reference is the policy after {synced} (k = {k})" in flat


def test_marks_and_colours_are_those_of_the_log_ratios(runs, tmp_path):
    tokens.main(runs / "grpo-1", 3, 12, tmp_path / "page.html")
    completions = read_page(tmp_path / "page.html")
    assert len(completions) == 24
    for number, completion in enumerate(completions):
        for token in completion:
            r = token["log_ratio"]
            red, green, blue = bytes.fromhex(token["colour"][1:])  # orange below zero, blue above
            assert red >= blue if r < 0 else red <= blue
            assert green < 255 or abs(r) < 0.02
            assert token["cut"] == (abs(r) > 1.5)
            chosen = number % 2 == 0  # A = 1
            assert token["eps"] == (r > math.log(1.15) if chosen else r < math.log(0.85))
    cut, eps = (np.mean(column(sum(completions, []), key)) for key in ("cut", "eps"))
    assert 0 < cut < 1 and 0 < eps < 1
    text = (tmp_path / "page.html").read_text()
    assert f"({cut:.1%} here)" in text and f"removes its gradient ({eps:.1%})" in text
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link|<iframe", text)  # it loads nothing
    assert "<|" not in text and "&lt;|end|&gt;</span>" in text  # and escapes what tokens say


# --- bad input ---


def test_bad_input_is_one_line(runs, tmp_path, capfd):
    for program, arguments, message in (
        (curves, "nowhere-*", "nowhere-*: no run is here"),
        (curves, "RUNS/four --metric eval/acuracy", "no metric eval/acuracy; it has eval/accuracy, eval/fin"),
        (curves, "RUNS/four RUNS/plain --label a", "2 runs need as many different names"),
        (tokens, "RUNS", "no run is here"),
        (tokens, "RUNS/grpo-1 --step 5", "checkpoints there are step-3, step-6;"),
        (tokens, "RUNS/dpo --out /nowhere/page.html", "--out /nowhere/page.html: "),
    ):
        assert message in refused(program, arguments.replace("RUNS", str(runs)).split(), capfd)
    broken = shutil.copytree(runs / "dpo", tmp_path / "broken")
    (weights,) = (broken / "checkpoints" / "step-6").glob("*.distcp")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "step-6 is damaged, or another model's: " in refused(tokens, [str(broken)], capfd)
    args = json.loads((broken / "args.json").read_text())
    (broken / "args.json").write_text(json.dumps(args | {"eval_dataset": ""}))
    for program in (tokens, figure2):
        assert "the run has no completions as --eval-dataset" in refused(program, [str(broken)], capfd)
