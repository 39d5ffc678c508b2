"""The pictures of paper/: learning curves, Figure 2, pages of tokens. Their numbers against other computations."""

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

SHORT = ["--num-steps", "6", "--warmup-fraction", "0", "--k", "4", "--eval-samples", "4", "--max-new-tokens", "8"]
SHORT += ["--engine", "hf", "--keep-checkpoints", "0"]
NEVER = ["--checkpoint-every", "0"]
SPAN = r'<span class="t( cut)?( eps)?" style="background:(#\w{6})" title="([^"]*)">([^<]*)</span>'
NUMBERS = r"log π_θ (\S+), log π_ref (\S+), log-ratio (\S+) nats, id (\d+)(, humanline clips it)?(, 1 ± ε clips it)?"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of short runs. grpo-four ends where the reference of grpo-1 was synced, before its fifth step."""
    folder = tmp_path_factory.mktemp("runs")
    with gzip.open(ROOT / "toy" / "tales" / "preferences_train.jsonl.gz", "rt") as file:
        (folder / "tales.jsonl").write_text("".join(next(file) for _ in range(64)))
    tales = [*SHORT, "--dataset", str(folder / "tales.jsonl"), "--eval-dataset", str(folder / "tales.jsonl")]
    tales += ["--batch-size", "16", "--lr", "1e-2"]
    each = [*tales, "--eval-every", "2", "--checkpoint-every", "3"]
    grpo = {f"grpo-{seed}": [*each, "--seed", str(seed)] for seed in (1, 2, 3)}
    grpo |= {"grpo-plain": [*each, "--no-humanline"], "grpo-four": [*tales, "--num-steps", "4", *NEVER]}
    kto = {"kto": [*tales, "--k", "8", "--checkpoint-every", "6"]}
    flowers = [*SHORT, "--dataset", PAIRS, "--eval-dataset", PAIRS, "--lr", "3e-2", "--k", "8"]
    dpo = {"dpo": [*flowers, "--checkpoint-every", "6"]}
    rounds = [*SHORT, "--lr", "1e-2", "--sample-every", "4", "--prompts-per-step", "2", "--temperature", "0.7"]
    checked = {"math": [*rounds, "--checkpoint-every", "2"]}
    for script, arms in (("grpo", grpo), ("kto", kto), ("dpo", dpo), ("grpo_math", checked)):
        starts = [[*flags, "--output-dir", str(folder / name)] for name, flags in arms.items()]
        run_ranks(1, starts, script=f"{script}_humanline")
    return folder


def refused(program, arguments: list[str], capfd) -> str:
    """The one line with which a command ends."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        tyro.cli(program, args=arguments)
    code, told = stop.value.code, capfd.readouterr().err
    told = code if isinstance(code, str) else told  # the interpreter prints it, and exits with 1
    assert (code == 1 or code == told) and told.startswith("error: ") and len(told.splitlines()) == 1, told
    return told


# --- curves ---


def test_a_curve_is_what_the_run_wrote(runs):
    lines, summary = metrics(runs / "grpo-1"), json.loads((runs / "grpo-1" / "summary.json").read_text())
    found = curve(runs / "grpo-1", "eval/margin")
    assert found == {0: 0.0} | {step: lines[step - 1]["eval/margin"] for step in (2, 4, 6)}
    assert found[6] == summary["after"]["eval/margin"][0] != 0
    assert curve(runs / "grpo-1", "loss") == {line["step"] + 1: line["loss"] for line in lines}
    after = json.loads((runs / "dpo" / "summary.json").read_text())["after"]  # without --eval-every
    assert curve(runs / "dpo", "eval/margin") == {0: 0.0, 6: after["eval/margin"][0]}


def test_a_run_that_goes_on_has_the_curve_so_far(runs, tmp_path):
    whole = curve(runs / "grpo-1", "eval/margin")
    killed = shutil.copytree(runs / "grpo-1", tmp_path / "killed")
    (killed / "summary.json").unlink()
    text = (killed / "metrics.jsonl").read_text()
    (killed / "metrics.jsonl").write_text(text[: text.rindex("\n", 0, -1) + 20])  # the sixth line is cut
    assert curve(killed, "eval/margin") == {step: whole[step] for step in (2, 4)}
    extended = shutil.copytree(runs / "dpo", tmp_path / "extended")
    args = json.loads((extended / "args.json").read_text())
    (extended / "args.json").write_text(json.dumps(args | {"num_steps": 12}))
    assert list(curve(extended, "eval/margin")) == [0]  # the old end is no evaluation of what goes on


def test_a_band_is_the_t_interval_over_seeds(runs):
    figure, axes = plt.subplots()
    seeds = [runs / f"grpo-{seed}" for seed in (1, 2, 3)]
    draw(axes, {"humanline": seeds, "plain": [runs / "grpo-plain"]}, "loss")
    values = np.array([[line["loss"] for line in metrics(folder)] for folder in seeds])
    several, one = axes.get_lines()
    assert several.get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(several.get_ydata(), values.mean(0), rtol=1e-12)
    np.testing.assert_allclose(one.get_ydata(), [line["loss"] for line in metrics(runs / "grpo-plain")], rtol=1e-12)
    (band,) = axes.collections  # a single run has none
    low, high = stats.t.interval(0.95, df=2, loc=values.mean(0), scale=values.std(0, ddof=1) / math.sqrt(3))
    corners = band.get_paths()[0].vertices
    for step in range(1, 7):
        ends = corners[corners[:, 0] == step, 1]
        assert (ends.min(), ends.max()) == pytest.approx((low[step - 1], high[step - 1]), rel=1e-9)
    plt.close(figure)


def test_smoothing_is_the_mean_of_the_last_steps(runs):
    losses = [line["loss"] for line in metrics(runs / "grpo-1")]
    steps, values = collect([runs / "grpo-1"], "loss", 3)
    assert values[0].tolist() == pytest.approx([np.mean(losses[max(0, s - 3) : s]) for s in steps], rel=1e-12)


def test_runs_of_unequal_lengths_share_their_common_steps(runs):
    steps, values = collect([runs / "grpo-1", runs / "grpo-four"], "loss")
    assert steps == [1, 2, 3, 4]
    assert values[0].tolist() == values[1].tolist()  # the same flags and seed: the same run


def test_runs_that_differ_in_the_seed_are_one_line(runs, tmp_path):
    seeds, plain = [str(runs / f"grpo-{seed}") for seed in (1, 2, 3)], str(runs / "grpo-plain")
    assert by_flags([plain, *seeds]) == {"humanline=False": [plain], "humanline=True": seeds}
    assert by_flags(seeds) == {"grpo_humanline": seeds}
    mixed = by_flags([*seeds, plain, str(runs / "dpo")])
    assert list(mixed) == ["grpo_humanline, humanline=True", "grpo_humanline, humanline=False", "dpo_humanline"]
    twin = shutil.copytree(seeds[0], tmp_path / "twin")
    with pytest.raises(ValueError, match="grpo-1 and .*twin have the same flags and seed: leave one out"):
        by_flags([seeds[0], str(twin)])


def test_the_command_draws_and_tells_the_numbers(runs, tmp_path, capsys):
    patterns, out = [str(runs / "grpo-[1-3]"), str(runs / "grpo-plain")], tmp_path / "curves.png"
    curves.main(patterns, ["eval/margin", "loss"], ["ours", "theirs"], 1, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out.splitlines()
    ends = [curve(runs / f"grpo-{seed}", "eval/margin")[6] for seed in (1, 2, 3)]
    assert told[0].startswith("eval/margin, ours, 3 runs: mean over the curve ")
    assert told[0].endswith(f"at step 6 {np.mean(ends):.3f} ± {np.std(ends, ddof=1) / math.sqrt(3):.3f}")
    assert [line.partition(",")[0] for line in told[:-1]] == ["eval/margin", "eval/margin", "loss", "loss"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "name at least one run"),
        (["nowhere-*"], "nowhere-*: no run is here"),
        (["RUNS/grpo-1", "--metric", "eval/acuracy"], "no metric eval/acuracy; it has eval/accuracy, eval/finished"),
        (["RUNS/grpo-1", "RUNS/grpo-plain", "--label", "a"], "--label: 1 names for 2 lines: humanline=True; humanline"),
        (["RUNS/grpo-1", "--smooth", "0"], "--smooth is 0"),
        (["RUNS/grpo-1", "--out", "/nowhere/x.png"], "/nowhere/x.png"),
    ],
)
def test_bad_input_of_curves_is_one_line(runs, capfd, arguments, told):
    assert told in refused(curves.main, [word.replace("RUNS", str(runs)) for word in arguments], capfd)


def test_a_command_that_fails_says_so_to_the_shell(tmp_path):
    command = [sys.executable, ROOT / "paper" / "curves.py", "nowhere-*"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, "error: nowhere-*: no run is here (no args.json of one)\n")


# --- Figure 2 ---


def test_capacity_function_at_known_points():
    """Published values of w at γ = 0.61, to their two decimals, and by logarithms to all."""
    for a, published in ((0.01, 0.06), (0.1, 0.19), (0.5, 0.42), (0.9, 0.71), (0.99, 0.91)):
        both = math.fsum((a**0.61, (1 - a) ** 0.61))
        assert figure2.capacity(a) == pytest.approx(math.exp(0.61 * math.log(a) - math.log(both) / 0.61), rel=1e-12)
        assert round(float(figure2.capacity(a)), 2) == published
    assert figure2.capacity(np.array([0.0, 1.0])).tolist() == [0.0, 1.0]
    a = np.linspace(0, 1, 11)
    np.testing.assert_allclose(figure2.capacity(a, 1.0), a, rtol=1e-12)


def test_weights_of_the_papers_gamble():
    """§3: +$50 with 60% and +$100 with 20%; perceived 0.8 and 0.3 give 0.5 and 0.3."""
    perceived = {0.8: 0.8, 0.2: 0.3, 0.0: 0.0}
    found = figure2.weights([0.6, 0.2], lambda a: np.array([perceived[round(x, 9)] for x in a]))
    assert found.tolist() == pytest.approx([0.5, 0.3], abs=1e-12)


def test_weights_sum_to_one_and_lift_both_ends():
    p = np.random.default_rng(0).dirichlet(np.ones(9))
    found = figure2.weights(p)
    assert found.sum() == pytest.approx(1, abs=1e-12) and (found > 0).all()
    np.testing.assert_allclose(figure2.weights(p, lambda a: a), p, rtol=1e-9)
    even = figure2.weights(np.full(10, 0.1))
    assert even[0] > 0.1 < even[-1] and even[2:-1].max() < 0.1  # Ω⁺ crosses the diagonal near 0.34


def test_sampling_keeps_tokens_as_often_as_equation_5_says_and_clipping_is_its_limit():
    """A token of ratio r stays if B_P ≤ r / M and B_R ≤ 1 / (r M), of independent Beta variables."""
    mask = torch.ones(100, 400, dtype=torch.float64)
    args = dpo_humanline.Args()
    for r in (-2.5, -1.0, 1.2, 2.0):
        stays = len(figure2.kept(dpo_humanline, args, r * mask, mask, "sample")) / mask.numel()
        chance = 1.0
        for sign, bound in ((1, args.log_epsilon_P), (-1, -args.log_epsilon_R)):
            mean = math.exp(bound) / args.M
            beta = stats.beta(args.kappa * mean, args.kappa * (1 - mean))
            chance *= beta.cdf(math.exp(sign * r) / args.M)
        assert 0.001 < chance < 0.999
        assert stays == pytest.approx(chance, abs=5 * math.sqrt(chance * (1 - chance) / mask.numel()))
    log_ratio = 6 * torch.rand(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 3
    clipped = figure2.kept(dpo_humanline, args, log_ratio, mask, "clip")
    assert clipped.tolist() == log_ratio[(log_ratio >= -1.5) & (log_ratio <= 1.5)].tolist()
    limit = figure2.kept(dpo_humanline, dpo_humanline.Args(kappa=1e12), log_ratio, mask, "sample")
    assert limit.tolist() == clipped.tolist()


def plain_logps(folder, ids: list[int], first: int, temperature: float = 1.0) -> list[float]:
    """Log-probs of ids[first:] by transformers, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logps = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    return [logps[i - 1, ids[i]].item() for i in range(first, len(ids))]


def conversation(folder, prompt: str, completion: str) -> tuple[list[int], int]:
    """Token ids by the toys' chat template, and where the completion begins."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = tokenizer(f"<|user|> {prompt} <|end|> <|assistant|>").input_ids
    return before + tokenizer(f"{completion} <|end|>").input_ids, len(before)


def test_figure_2_draws_what_plain_transformers_finds(runs, tmp_path, capfd):
    rows = 8
    figure2.main(tmp_path / "figure2.png", runs / "dpo", rows)
    text = (tmp_path / "figure2.csv").read_text()
    assert (tmp_path / "figure2.png").read_bytes().startswith(b"\x89PNG")
    drawn = {}
    for row in csv.DictReader(text.splitlines()):
        drawn.setdefault((row["panel"], row["curve"]), []).append((float(row["x"]), float(row["y"])))
    toy, ratios = ROOT / "toy" / "bouquets" / "policy", {"chosen": [], "rejected": []}
    for line in (ROOT / "tests" / "pairs.jsonl").read_text().splitlines()[:rows]:
        row = json.loads(line)
        for side, found in ratios.items():
            ids, first = conversation(toy, row["prompt"], row[side])
            pairs = zip(plain_logps(runs / "dpo" / "final", ids, first), plain_logps(toy, ids, first))
            found += [logp - ref_logp for logp, ref_logp in pairs]
    for name, side in (("better", "chosen"), ("worse", "rejected")):
        for x, y in drawn["tokens", f"held-out data, {name}"]:
            assert min(abs(y - np.mean(np.array(ratios[side]) <= x + d)) for d in (-1e-4, 1e-4)) < 1e-4
    inside = [z for side in ratios.values() for z in side if -1.5 <= z <= 1.5]
    every = ratios["chosen"] + ratios["rejected"]
    assert 0 < len(inside) < len(every)
    clipped = drawn["tokens", f"both, clipping, κ → ∞: {len(inside) / len(every):.0%} kept"]
    for x, y in clipped:
        assert min(abs(y - np.mean(np.array(inside) <= x + d)) for d in (-1e-4, 1e-4)) < 1e-4
    objective, human = drawn["tokens", "samples of the policy"], drawn["tokens", "the same, as perceived"]
    for (x, p), (same, y) in zip(objective, human):
        assert x == same and y == pytest.approx(
            1 - figure2.capacity(1 - p), abs=2e-3
        )  # 5 digits, and steep at the ends
    for name in ("objective, p", "perceived, ω"):
        assert sum(y for _, y in drawn["weights", name]) == pytest.approx(1, abs=1e-4)
    figure2.main(tmp_path / "again.png", runs / "dpo", rows)
    assert (tmp_path / "again.csv").read_text() == text
    error = refused(figure2.main, ["--out", str(tmp_path / "no.png"), "--run", str(runs / "math")], capfd)
    assert error.startswith(f"error: --run {runs / 'math'}: figure 2 needs a run with pairs")


# --- tokens ---


def read_page(path) -> list[list[dict]]:
    """The completions of a page, as their tokens."""
    found = []
    for block in re.findall(r'<div class="tokens">(.*?)</div>', path.read_text(), re.DOTALL):
        spans = []
        for span in block.split("<wbr>"):
            cut, eps, colour, title, text = re.fullmatch(SPAN, span).groups()
            logp, ref_logp, log_ratio, token, told_cut, told_eps = re.fullmatch(NUMBERS, html.unescape(title)).groups()
            numbers = {"logp": float(logp), "ref_logp": float(ref_logp), "log_ratio": float(log_ratio)}
            assert bool(cut) == bool(told_cut) and bool(eps) == bool(told_eps)
            spans.append(numbers | {"id": int(token), "cut": bool(cut), "eps": bool(eps), "colour": colour})
            spans[-1]["text"] = html.unescape(text)
        found.append(spans)
    return found


@pytest.mark.parametrize(("script", "run", "synced"), [("dpo", "dpo", 0), ("kto", "kto", 0), ("grpo", "grpo-1", 4)])
def test_a_page_has_the_log_probs_of_plain_transformers(runs, tmp_path, script, run, synced):
    """The run's final/ is the policy of step 6. The reference is the toy's, or the policy after four steps."""
    run, toy = runs / run, ROOT / "toy" / ("bouquets" if script == "dpo" else "tales") / "policy"
    before = runs / "grpo-four" / "final" if synced else toy
    tokens.main(run, 6, 3, tmp_path / "page.html")
    found, text = read_page(tmp_path / "page.html"), (tmp_path / "page.html").read_text()
    data = ROOT / "tests" / "pairs.jsonl" if script == "dpo" else runs / "tales.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()[:3]]
    assert len(found) == 6
    for i, (part, side) in enumerate(zip(found, ["chosen", "rejected"] * 3)):
        row = rows[i // 2]
        ids, first = conversation(toy, row["prompt"], row[side])
        assert [token["id"] for token in part] == ids[first:]
        assert " ".join(token["text"] for token in part) == f"{row[side]} <|end|>"
        policy = plain_logps(run / "final", ids, first)
        reference = plain_logps(before, ids, first)
        assert [token["logp"] for token in part] == pytest.approx(policy, abs=1e-3)
        assert [token["ref_logp"] for token in part] == pytest.approx(reference, abs=1e-3)
        assert any(abs(a - b) > 0.05 for a, b in zip(policy, reference))
        total = sum(a - b for a, b in zip(policy, reference))
        assert abs(float(re.findall(r"Σ log-ratio (\S+) nats", text)[i]) - total) < 0.02
    assert f"after 6 optimizer steps; the reference is the policy after {synced} (k = {4 if synced else 8})" in text


def test_marks_are_where_a_bound_or_the_clip_is_crossed(runs, tmp_path):
    tokens.main(runs / "grpo-1", 3, 12, tmp_path / "page.html")
    found = read_page(tmp_path / "page.html")
    for part, A in zip(found, [1, -1] * 12):
        for token in part:
            r = token["log_ratio"]
            assert token["cut"] == (abs(r) > 1.5)
            assert token["eps"] == (r > math.log(1.15) if A > 0 else r < math.log(0.85))
            level = [int(token["colour"][i : i + 2], 16) for i in (1, 3, 5)]
            assert level[0] >= level[2] if r < 0 else level[0] <= level[2]  # orange, blue
            assert (level == [255, 255, 255]) == (abs(r) < 0.005) or abs(r) < 0.02
    every = [token for part in found for token in part]
    cut, eps = (np.mean([token[mark] for token in every]) for mark in ("cut", "eps"))
    alone = np.mean([token["cut"] and not token["eps"] for token in every])
    assert 0 < alone < cut < 1 and 0 < eps < 1
    text = (tmp_path / "page.html").read_text()
    assert f"({cut:.1%} here, {alone:.1%} it alone)" in text and f"removes its gradient ({eps:.1%})" in text


def test_a_run_without_humanline_has_nothing_struck_out(runs, tmp_path):
    plain = shutil.copytree(runs / "grpo-plain", tmp_path / "plain")
    args = json.loads((plain / "args.json").read_text())
    (plain / "args.json").write_text(json.dumps(args | {"eval_dataset": ""}))
    tokens.main(plain, 0, 3, tmp_path / "page.html")
    every, text = [x for part in read_page(tmp_path / "page.html") for x in part], (tmp_path / "page.html").read_text()
    assert any(abs(token["log_ratio"]) > 1.5 for token in every) and not any(token["cut"] for token in every)
    assert "this run does not clip" in text and "the reference is the policy after 0." in text
    assert "The first 3 of the training data" in text  # it holds out none


def test_a_page_of_math_shows_the_samples_that_wait(runs, tmp_path, capfd):
    tokens.main(runs / "math", 2, 4, tmp_path / "page.html")
    pool = read_pool(runs / "math" / "checkpoints" / "step-2")[:4]
    examples = [x for group in pool for x in group]
    found = read_page(tmp_path / "page.html")
    assert [[token["id"] for token in part] for part in found] == [x.completion_ids for x in examples]
    ended = shutil.copytree(runs / "math", tmp_path / "ended")  # its final/ becomes the policy of step 2
    shutil.rmtree(ended / "checkpoints" / "step-4")
    shutil.rmtree(ended / "checkpoints" / "step-6")
    run_ranks(1, [["--resume", str(ended), "--num-steps", "2"]], script="grpo_math_humanline")
    toy = ROOT / "toy" / "shell_game" / "policy"
    for part, x in zip(found[:3], examples):
        ids, first = [*x.prompt_ids, *x.completion_ids], len(x.prompt_ids)
        policy, reference = plain_logps(ended / "final", ids, first, 0.7), plain_logps(toy, ids, first, 0.7)
        assert [token["logp"] for token in part] == pytest.approx(policy, abs=1e-3)
        assert [token["ref_logp"] for token in part] == pytest.approx(reference, abs=1e-3)
    error = refused(tokens.main, [str(runs / "math"), "--step", "4"], capfd)  # it ends a round
    assert "has no samples left and the run holds out no pairs: name a --step within a round" in error


def test_a_page_loads_nothing_and_escapes_what_tokens_say(runs, tmp_path):
    tokens.main(runs / "grpo-1", 0, 2, tmp_path / "page.html")  # 0: the newest
    text = (tmp_path / "page.html").read_text()
    assert "after 6 optimizer steps" in text
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link|<iframe", text)
    assert "<|" not in text and "&lt;|end|&gt;</span>" in text  # the end of a turn is seen
    token = {"logp": -1.0, "ref_logp": -1.0, "log_ratio": 0.0, "clipped": 0.0, "id": 7, "cut": False, "eps": False}
    assert "<b>" not in tokens.completion_html("x", [token | {"text": '<b>"&'}], 1.5)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["RUNS/grpo-four"], "RUNS/grpo-four has no checkpoints: run it with --checkpoint-every"),
        (["RUNS/grpo-1", "--step", "5"], "--step 5: the checkpoints of RUNS/grpo-1 are 3, 6; keep more"),
        (["RUNS/grpo-1", "--rows", "0"], "--rows is 0; it must be at least 1"),
        (["RUNS"], "RUNS: no run is here"),
        (["RUNS/dpo", "--out", "/nowhere/page.html"], "--out /nowhere/page.html: "),
    ],
)
def test_bad_input_of_tokens_is_one_line(runs, capfd, arguments, told):
    error = refused(tokens.main, [word.replace("RUNS", str(runs)) for word in arguments], capfd)
    assert error.startswith(f"error: {told.replace('RUNS', str(runs))}")


def test_a_damaged_checkpoint_is_one_line(runs, tmp_path, capfd):
    broken = shutil.copytree(runs / "grpo-1", tmp_path / "broken")
    (weights,) = (broken / "checkpoints" / "step-6").glob("*.distcp")
    weights.write_bytes(weights.read_bytes()[:1000])
    error = refused(tokens.main, [str(broken), "--out", str(tmp_path / "page.html")], capfd)
    assert error.startswith(f"error: {broken}/checkpoints/step-6 is damaged, or another model's: ")
