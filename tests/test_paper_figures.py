"""The pictures of paper/: learning curves, Figure 2, pages of tokens. Their numbers by other computations."""

import csv
import gzip
import html
import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import tyro
from conftest import PAIRS, ROOT, metrics, read_pool, run_ranks
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(ROOT / "paper"))
import curves  # noqa: E402
import figure2  # noqa: E402
import tokens  # noqa: E402
from curves import by_flags, collect, curve, draw, plt  # noqa: E402

import dpo_humanline  # noqa: E402

SHORT = "--num-steps 6 --warmup-fraction 0 --k 4 --eval-samples 4 --max-new-tokens 8 --engine hf"
SHORT += " --keep-checkpoints 0"
SPAN = r'<span class="t( cut)?( eps)?" style="background:(#\w{6})" title="([^"]*)">([^<]*)</span>'
NUMBERS = r"log π_θ (\S+), log π_ref (\S+), log-ratio (\S+) nats, id (\d+)"
NUMBERS += r"(, humanline clips it)?(, 1 ± ε clips it)?"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of short runs. grpo-four ends where grpo-1's reference was synced, before its fifth step."""
    folder = tmp_path_factory.mktemp("runs")
    data = folder / "tales.jsonl"
    with gzip.open(ROOT / "toy" / "tales" / "preferences_train.jsonl.gz", "rt") as file:
        rows = [next(file) for _ in range(64)]
    data.write_text("".join(rows))
    tales = f"{SHORT} --dataset {data} --eval-dataset {data} --batch-size 16 --lr 1e-2"
    each = f"{tales} --eval-every 2 --checkpoint-every 3"
    arms = {
        "grpo-1": f"{each} --seed 1",
        "grpo-2": f"{each} --seed 2",
        "grpo-3": f"{each} --seed 3",
        "grpo-plain": f"{each} --no-humanline",
        "grpo-four": f"{tales} --num-steps 4 --checkpoint-every 0",
    }
    start(folder, "grpo", arms)
    start(folder, "kto", {"kto": f"{tales} --k 8 --checkpoint-every 6"})
    pairs = f"--dataset {PAIRS} --eval-dataset {PAIRS}"
    start(folder, "dpo", {"dpo": f"{SHORT} {pairs} --lr 3e-2 --k 8 --checkpoint-every 6"})
    rounds = "--sample-every 4 --prompts-per-step 2 --temperature 0.7"
    start(folder, "grpo_math", {"math": f"{SHORT} {rounds} --lr 1e-2 --checkpoint-every 2"})
    return folder


def start(folder, script: str, arms: dict[str, str]):
    """Runs of {folder's name: flags}."""
    starts = [[*flags.split(), "--output-dir", str(folder / name)] for name, flags in arms.items()]
    run_ranks(1, starts, script=f"{script}_humanline")


def seeds_of(runs) -> list:
    return [runs / f"grpo-{seed}" for seed in (1, 2, 3)]


def losses(folder) -> list[float]:
    return [line["loss"] for line in metrics(folder)]


def evaluated(folder, key: str) -> float:
    """A mean after training."""
    summary = json.loads((folder / "summary.json").read_text())
    return summary["after"][key][0]


def change_args(folder, **changes):
    args = json.loads((folder / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps(args | changes))


def refused(program, arguments: list[str], capfd) -> str:
    """The one line with which a command ends."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        tyro.cli(program, args=arguments)
    code = stop.value.code
    message = capfd.readouterr().err
    if isinstance(code, str):  # the interpreter prints it, and exits with 1
        message = code
    else:
        assert code == 1, message
    assert message.startswith("error: "), message
    assert len(message.splitlines()) == 1, message
    return message


# --- curves ---


def test_a_curve_is_what_the_run_wrote(runs):
    lines = metrics(runs / "grpo-1")
    margins = curve(runs / "grpo-1", "eval/margin")
    assert margins == {0: 0.0} | {step: lines[step - 1]["eval/margin"] for step in (2, 4, 6)}
    assert margins[6] == evaluated(runs / "grpo-1", "eval/margin")
    assert margins[6] != 0
    expected = {line["step"] + 1: line["loss"] for line in lines}
    assert curve(runs / "grpo-1", "loss") == expected
    without_eval_every = runs / "dpo"
    last = evaluated(without_eval_every, "eval/margin")
    assert curve(without_eval_every, "eval/margin") == {0: 0.0, 6: last}


def test_a_run_that_goes_on_has_the_curve_so_far(runs, tmp_path):
    whole = curve(runs / "grpo-1", "eval/margin")
    killed = shutil.copytree(runs / "grpo-1", tmp_path / "killed")
    (killed / "summary.json").unlink()
    text = (killed / "metrics.jsonl").read_text()
    last_line = text.rindex("\n", 0, -1)
    (killed / "metrics.jsonl").write_text(text[: last_line + 20])  # the sixth line is cut
    assert curve(killed, "eval/margin") == {2: whole[2], 4: whole[4]}
    extended = shutil.copytree(runs / "dpo", tmp_path / "extended")
    change_args(extended, num_steps=12)
    assert list(curve(extended, "eval/margin")) == [0]  # the old end is no evaluation of what goes on


def test_a_band_is_the_t_interval_over_seeds(runs):
    figure, axes = plt.subplots()
    seeds = seeds_of(runs)
    draw(axes, {"humanline": seeds, "plain": [runs / "grpo-plain"]}, "loss")
    values = np.array([losses(folder) for folder in seeds])
    mean = values.mean(0)
    several, one = axes.get_lines()
    assert several.get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(several.get_ydata(), mean, rtol=1e-12)
    np.testing.assert_allclose(one.get_ydata(), losses(runs / "grpo-plain"), rtol=1e-12)
    (band,) = axes.collections  # a single run has none
    error = values.std(0, ddof=1) / math.sqrt(3)
    low, high = stats.t.interval(0.95, df=2, loc=mean, scale=error)
    corners = band.get_paths()[0].vertices
    for step in range(1, 7):
        ends = corners[corners[:, 0] == step, 1]
        assert ends.min() == pytest.approx(low[step - 1], rel=1e-9)
        assert ends.max() == pytest.approx(high[step - 1], rel=1e-9)
    plt.close(figure)


def test_smoothing_is_the_mean_of_the_last_steps(runs):
    whole = losses(runs / "grpo-1")
    steps, values = collect([runs / "grpo-1"], "loss", 3)
    expected = [np.mean(whole[max(0, step - 3) : step]) for step in steps]
    assert values[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_runs_of_unequal_lengths_share_their_common_steps(runs):
    steps, values = collect([runs / "grpo-1", runs / "grpo-four"], "loss")
    assert steps == [1, 2, 3, 4]
    assert values[0].tolist() == values[1].tolist()  # the same flags and seed: the same run


def test_runs_that_differ_in_the_seed_are_one_line(runs, tmp_path):
    seeds = [str(folder) for folder in seeds_of(runs)]
    plain = str(runs / "grpo-plain")
    assert by_flags([plain, *seeds]) == {"humanline=False": [plain], "humanline=True": seeds}
    assert by_flags(seeds) == {"grpo_humanline": seeds}
    mixed = by_flags([*seeds, plain, str(runs / "dpo")])
    assert list(mixed) == [
        "grpo_humanline, humanline=True",
        "grpo_humanline, humanline=False",
        "dpo_humanline",
    ]
    twin = shutil.copytree(seeds[0], tmp_path / "twin")
    with pytest.raises(ValueError, match="grpo-1 and .*twin have the same flags and seed: leave one out"):
        by_flags([seeds[0], str(twin)])


def test_the_command_draws_and_tells_the_numbers(runs, tmp_path, capsys):
    patterns = [str(runs / "grpo-[1-3]"), str(runs / "grpo-plain")]
    out = tmp_path / "curves.png"
    curves.main(patterns, ["eval/margin", "loss"], ["ours", "theirs"], 1, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    *lines, _ = capsys.readouterr().out.splitlines()
    ends = [curve(folder, "eval/margin")[6] for folder in seeds_of(runs)]
    error = np.std(ends, ddof=1) / math.sqrt(3)
    assert lines[0].startswith("eval/margin, ours, 3 runs: mean over the curve ")
    assert lines[0].endswith(f"at step 6 {np.mean(ends):.3f} ± {error:.3f}")
    keys = [line.partition(",")[0] for line in lines]
    assert keys == ["eval/margin", "eval/margin", "loss", "loss"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "name at least one run"),
        ("nowhere-*", "nowhere-*: no run is here"),
        ("RUNS/grpo-1 --metric eval/acuracy", "no metric eval/acuracy; it has eval/accuracy, eval/finished"),
        ("RUNS/grpo-1 RUNS/grpo-plain --label a", "--label: 1 names for 2 lines: humanline=True; humanline"),
        ("RUNS/grpo-1 --smooth 0", "--smooth is 0"),
        ("RUNS/grpo-1 --out /nowhere/x.png", "/nowhere/x.png"),
    ],
)
def test_bad_input_of_curves_is_one_line(runs, capfd, arguments, message):
    words = arguments.replace("RUNS", str(runs)).split()
    assert message in refused(curves.main, words, capfd)


def test_a_command_that_fails_says_so_to_the_shell(tmp_path):
    command = [sys.executable, ROOT / "paper" / "curves.py", "nowhere-*"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == "error: nowhere-*: no run is here (no args.json of one)\n"


# --- Figure 2 ---


def test_capacity_function_at_known_points():
    """Published values of w at γ = 0.61, to their two decimals, and by logarithms to all."""
    known = {0.01: 0.06, 0.1: 0.19, 0.5: 0.42, 0.9: 0.71, 0.99: 0.91}
    for a, published in known.items():
        perceived = float(figure2.capacity(a))
        both = a**0.61 + (1 - a) ** 0.61
        logarithm = 0.61 * math.log(a) - math.log(both) / 0.61
        assert perceived == pytest.approx(math.exp(logarithm), rel=1e-12)
        assert round(perceived, 2) == published
    ends = np.array([0.0, 1.0])
    assert figure2.capacity(ends).tolist() == [0.0, 1.0]
    a = np.linspace(0, 1, 11)
    np.testing.assert_allclose(figure2.capacity(a, 1.0), a, rtol=1e-12)


def test_weights_of_the_papers_gamble():
    """§3: +$50 with 60% and +$100 with 20%; perceived 0.8 and 0.3 give 0.5 and 0.3."""
    perceived = {0.8: 0.8, 0.2: 0.3, 0.0: 0.0}

    def omega(a):
        return np.array([perceived[round(x, 9)] for x in a])

    weights = figure2.weights([0.6, 0.2], omega)
    assert weights.tolist() == pytest.approx([0.5, 0.3], abs=1e-12)


def test_weights_sum_to_one_and_lift_both_ends():
    p = np.random.default_rng(0).dirichlet(np.ones(9))
    weights = figure2.weights(p)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert (weights > 0).all()
    np.testing.assert_allclose(figure2.weights(p, lambda a: a), p, rtol=1e-9)
    even = figure2.weights(np.full(10, 0.1))
    assert even[0] > 0.1
    assert even[-1] > 0.1
    assert even[2:-1].max() < 0.1  # Ω⁺ crosses the diagonal near 0.34


def test_sampling_keeps_tokens_as_often_as_equation_5_says():
    """A token of ratio r stays if B_P ≤ r / M and B_R ≤ 1 / (r M), of independent Beta variables."""
    mask = torch.ones(100, 400, dtype=torch.float64)
    args = dpo_humanline.Args()
    for r in (-2.5, -1.0, 1.2, 2.0):
        kept = figure2.kept(dpo_humanline, args, r * mask, mask, "sample")
        share = len(kept) / mask.numel()
        chance = 1.0
        bounds = [(r, args.log_epsilon_P), (-r, -args.log_epsilon_R)]
        for log_ratio, bound in bounds:
            mean = math.exp(bound) / args.M
            a = args.kappa * mean
            b = args.kappa * (1 - mean)
            chance *= stats.beta(a, b).cdf(math.exp(log_ratio) / args.M)
        assert 0.001 < chance < 0.999
        variance = chance * (1 - chance) / mask.numel()
        deviation = math.sqrt(variance)
        assert share == pytest.approx(chance, abs=5 * deviation)


def test_clipping_is_the_limit_of_sampling():
    mask = torch.ones(100, 400, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(mask.shape, dtype=torch.float64, generator=generator)
    log_ratio = 6 * draws - 3
    inside = (log_ratio >= -1.5) & (log_ratio <= 1.5)
    clipped = figure2.kept(dpo_humanline, dpo_humanline.Args(), log_ratio, mask, "clip")
    assert clipped.tolist() == log_ratio[inside].tolist()
    limit = dpo_humanline.Args(kappa=1e12)
    sampled = figure2.kept(dpo_humanline, limit, log_ratio, mask, "sample")
    assert sampled.tolist() == clipped.tolist()


def plain_logps(folder, ids: list[int], first: int, temperature: float = 1.0) -> list[float]:
    """Log-probs of ids[first:] by transformers, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    logps = (logits / temperature).log_softmax(-1)
    targets = torch.tensor(ids[1:])[:, None]
    token_logps = logps[:-1].gather(1, targets)[:, 0]
    return token_logps[first - 1 :].tolist()


def conversation(folder, prompt: str, completion: str) -> tuple[list[int], int]:
    """Token ids by the toys' chat template, and where the completion begins."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = tokenizer(f"<|user|> {prompt} <|end|> <|assistant|>").input_ids
    after = tokenizer(f"{completion} <|end|>").input_ids
    return before + after, len(before)


@pytest.fixture(scope="module")
def figure(runs, tmp_path_factory) -> tuple:
    """Figure 2 of the DPO run's first 8 pairs: its path, and {(panel, curve): [(x, y)]}."""
    path = tmp_path_factory.mktemp("figure2") / "figure2.png"
    figure2.main(path, runs / "dpo", 8)
    drawn = {}
    lines = path.with_suffix(".csv").read_text().splitlines()
    for row in csv.DictReader(lines):
        drawn.setdefault((row["panel"], row["curve"]), []).append((float(row["x"]), float(row["y"])))
    return path, drawn


@pytest.fixture(scope="module")
def ratios(runs) -> dict[str, list[float]]:
    """Log-ratios of the tokens of these pairs, by transformers."""
    toy = ROOT / "toy" / "bouquets" / "policy"
    found = {"chosen": [], "rejected": []}
    with open(PAIRS) as file:
        rows = [json.loads(next(file)) for _ in range(8)]
    for row in rows:
        for side in found:
            ids, first = conversation(toy, row["prompt"], row[side])
            logps = plain_logps(runs / "dpo" / "final", ids, first)
            ref_logps = plain_logps(toy, ids, first)
            for logp, ref_logp in zip(logps, ref_logps, strict=True):
                found[side].append(logp - ref_logp)
    return found


def check_cumulative(points: list[tuple], values: list[float]):
    """Points are written with 5 digits: x may stand on either side of a value."""
    values = np.array(values)
    for x, y in points:
        left = np.mean(values <= x - 1e-4)
        right = np.mean(values <= x + 1e-4)
        assert min(abs(y - left), abs(y - right)) < 1e-4


def test_figure_2_draws_what_plain_transformers_finds(figure, ratios):
    path, drawn = figure
    assert path.read_bytes().startswith(b"\x89PNG")
    check_cumulative(drawn["tokens", "held-out data, better"], ratios["chosen"])
    check_cumulative(drawn["tokens", "held-out data, worse"], ratios["rejected"])
    every = ratios["chosen"] + ratios["rejected"]
    inside = [z for z in every if -1.5 <= z <= 1.5]
    assert 0 < len(inside) < len(every)
    share = f"{len(inside) / len(every):.0%}"
    check_cumulative(drawn["tokens", f"both, clipping, κ → ∞: {share} kept"], inside)


def test_figure_2_draws_perceived_distributions(figure):
    _, drawn = figure
    objective = drawn["tokens", "samples of the policy"]
    perceived = drawn["tokens", "the same, as perceived"]
    assert len(objective) == len(perceived)
    for (x, p), (same, y) in zip(objective, perceived):
        assert x == same
        expected = 1 - figure2.capacity(1 - p)
        assert y == pytest.approx(expected, abs=2e-3)  # 5 digits, and steep at the ends
    for name in ("objective, p", "perceived, ω"):
        total = sum(y for _, y in drawn["weights", name])
        assert total == pytest.approx(1, abs=1e-4)


def test_figure_2_repeats_and_refuses_a_run_without_pairs(figure, runs, tmp_path, capfd):
    path, _ = figure
    figure2.main(tmp_path / "again.png", runs / "dpo", 8)
    again = (tmp_path / "again.csv").read_text()
    assert again == path.with_suffix(".csv").read_text()
    run = str(runs / "math")
    words = ["--out", str(tmp_path / "no.png"), "--run", run]
    error = refused(figure2.main, words, capfd)
    assert error.startswith(f"error: --run {run}: figure 2 needs a run with pairs")


# --- tokens ---


def read_page(path) -> list[list[dict]]:
    """The completions of a page, as their tokens."""
    completions = []
    for block in re.findall(r'<div class="tokens">(.*?)</div>', path.read_text(), re.DOTALL):
        completions.append([read_span(span) for span in block.split("<wbr>")])
    return completions


def read_span(span: str) -> dict:
    """A token: its numbers as they are told, its marks, its colour."""
    cut, eps, colour, title, text = re.fullmatch(SPAN, span).groups()
    numbers = re.fullmatch(NUMBERS, html.unescape(title)).groups()
    logp, ref_logp, log_ratio, token, *marks = numbers
    assert list(map(bool, marks)) == [bool(cut), bool(eps)]
    return {
        "logp": float(logp),
        "ref_logp": float(ref_logp),
        "log_ratio": float(log_ratio),
        "id": int(token),
        "cut": bool(cut),
        "eps": bool(eps),
        "colour": colour,
        "text": html.unescape(text),
    }


def column(completion: list[dict], key: str) -> list:
    return [token[key] for token in completion]


@pytest.mark.parametrize(
    ("script", "run", "synced"), [("dpo", "dpo", 0), ("kto", "kto", 0), ("grpo", "grpo-1", 4)]
)
def test_a_page_has_the_log_probs_of_plain_transformers(runs, tmp_path, script, run, synced):
    """The run's final/ is the policy of step 6; the reference is the toy's, or the policy after 4 steps."""
    run = runs / run
    task = "bouquets" if script == "dpo" else "tales"
    toy = ROOT / "toy" / task / "policy"
    before = runs / "grpo-four" / "final" if synced else toy
    data = ROOT / "tests" / "pairs.jsonl" if script == "dpo" else runs / "tales.jsonl"
    tokens.main(run, 6, 3, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    completions = read_page(tmp_path / "page.html")
    sums = re.findall(r"Σ log-ratio (\S+) nats", text)
    expected = []  # prompt, completion
    for line in data.read_text().splitlines()[:3]:
        row = json.loads(line)
        expected.append((row["prompt"], row["chosen"]))
        expected.append((row["prompt"], row["rejected"]))
    assert len(completions) == len(sums) == 6
    for completion, total, turn in zip(completions, sums, expected):
        prompt, words = turn
        ids, first = conversation(toy, prompt, words)
        assert column(completion, "id") == ids[first:]
        assert " ".join(column(completion, "text")) == f"{words} <|end|>"
        policy = np.array(plain_logps(run / "final", ids, first))
        reference = np.array(plain_logps(before, ids, first))
        log_ratio = policy - reference
        assert column(completion, "logp") == pytest.approx(policy, abs=1e-3)
        assert column(completion, "ref_logp") == pytest.approx(reference, abs=1e-3)
        assert (abs(log_ratio) > 0.05).any()
        assert float(total) == pytest.approx(log_ratio.sum(), abs=0.02)
    k = 4 if synced else 8
    assert f"after 6 optimizer steps; the reference is the policy after {synced} (k = {k})" in text


def test_marks_and_colours_are_those_of_the_log_ratios(runs, tmp_path):
    tokens.main(runs / "grpo-1", 3, 12, tmp_path / "page.html")
    every = []
    completions = read_page(tmp_path / "page.html")
    assert len(completions) == 24
    for number, completion in enumerate(completions):
        for token in completion:
            r = token["log_ratio"]
            clipped = r < math.log(0.85)
            if number % 2 == 0:  # chosen, A = 1
                clipped = r > math.log(1.15)
            red, green, blue = bytes.fromhex(token["colour"][1:])  # orange below zero, blue above
            assert red >= blue if r < 0 else red <= blue
            if abs(r) >= 0.02:
                assert (red, green, blue) != (255, 255, 255)
            if abs(r) < 0.005:
                assert min(red, green, blue) >= 253
            assert token["cut"] == (abs(r) > 1.5)
            assert token["eps"] == clipped
        every += completion
    cut_marks, eps_marks = np.array(column(every, "cut")), np.array(column(every, "eps"))
    cut, eps, alone = cut_marks.mean(), eps_marks.mean(), (cut_marks & ~eps_marks).mean()
    assert 0 < alone < cut < 1
    assert 0 < eps < 1
    text = (tmp_path / "page.html").read_text()
    assert f"({cut:.1%} here, {alone:.1%} it alone)" in text
    assert f"removes its gradient ({eps:.1%})" in text


def test_a_run_without_humanline_has_nothing_struck_out(runs, tmp_path):
    plain = shutil.copytree(runs / "grpo-plain", tmp_path / "plain")
    change_args(plain, eval_dataset="")
    tokens.main(plain, 0, 3, tmp_path / "page.html")
    every = []
    for completion in read_page(tmp_path / "page.html"):
        every += completion
    assert max(map(abs, column(every, "log_ratio"))) > 1.5
    assert not any(column(every, "cut"))
    text = (tmp_path / "page.html").read_text()
    assert "this run does not clip" in text
    assert "the reference is the policy after 0." in text
    assert "The first 3 of the training data" in text  # it holds out none


def test_a_page_of_math_shows_the_samples_that_wait(runs, tmp_path, capfd):
    tokens.main(runs / "math", 2, 4, tmp_path / "page.html")
    examples = []
    for group in read_pool(runs / "math" / "checkpoints" / "step-2")[:4]:
        examples += group
    completions = read_page(tmp_path / "page.html")
    ended = shutil.copytree(runs / "math", tmp_path / "ended")  # its final/ becomes the policy of step 2
    shutil.rmtree(ended / "checkpoints" / "step-4")
    shutil.rmtree(ended / "checkpoints" / "step-6")
    words = ["--resume", str(ended), "--num-steps", "2"]
    run_ranks(1, [words], script="grpo_math_humanline")
    toy = ROOT / "toy" / "shell_game" / "policy"
    shown = [column(completion, "id") for completion in completions]
    assert shown == [x.completion_ids for x in examples]
    for completion, x in list(zip(completions, examples))[:3]:
        ids = [*x.prompt_ids, *x.completion_ids]
        first = len(x.prompt_ids)
        policy = plain_logps(ended / "final", ids, first, 0.7)
        reference = plain_logps(toy, ids, first, 0.7)
        assert column(completion, "logp") == pytest.approx(policy, abs=1e-3)
        assert column(completion, "ref_logp") == pytest.approx(reference, abs=1e-3)
    error = refused(tokens.main, [str(runs / "math"), "--step", "4"], capfd)  # it ends a round
    assert "has no samples left and the run holds out no pairs: name a --step within a round" in error


def test_a_page_loads_nothing_and_escapes_what_tokens_say(runs, tmp_path):
    tokens.main(runs / "grpo-1", 0, 2, tmp_path / "page.html")  # 0: the newest
    text = (tmp_path / "page.html").read_text()
    assert "after 6 optimizer steps" in text
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link|<iframe", text)
    assert "<|" not in text
    assert "&lt;|end|&gt;</span>" in text  # the end of a turn is seen
    token = {"logp": -1.0, "ref_logp": -1.0, "log_ratio": 0.0, "clipped": 0.0, "id": 7}
    token |= {"cut": False, "eps": False, "text": '<b>"&'}
    assert "<b>" not in tokens.completion_html("x", [token], 1.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("RUNS/grpo-four", "RUNS/grpo-four has no checkpoints: run it with --checkpoint-every"),
        ("RUNS/grpo-1 --step 5", "--step 5: the checkpoints of RUNS/grpo-1 are 3, 6; keep more"),
        ("RUNS/grpo-1 --rows 0", "--rows is 0; it must be at least 1"),
        ("RUNS", "RUNS: no run is here"),
        ("RUNS/dpo --out /nowhere/page.html", "--out /nowhere/page.html: "),
    ],
)
def test_bad_input_of_tokens_is_one_line(runs, capfd, arguments, message):
    words = arguments.replace("RUNS", str(runs)).split()
    error = refused(tokens.main, words, capfd)
    expected = message.replace("RUNS", str(runs))
    assert error.startswith(f"error: {expected}")


def test_a_damaged_checkpoint_is_one_line(runs, tmp_path, capfd):
    broken = shutil.copytree(runs / "grpo-1", tmp_path / "broken")
    (weights,) = (broken / "checkpoints" / "step-6").glob("*.distcp")
    weights.write_bytes(weights.read_bytes()[:1000])
    error = refused(tokens.main, [str(broken), "--out", str(tmp_path / "page.html")], capfd)
    assert error.startswith(f"error: {broken}/checkpoints/step-6 is damaged, or another model's: ")
