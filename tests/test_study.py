"""Tests paper/study.py and the committed csv files: the arms of the plans, their tuning, their statistics."""

import csv
import importlib
import json
import re
import shlex
import shutil
import threading
from functools import partial
from operator import itemgetter

import numpy as np
import pytest
from conftest import ROOT, parse_args
from scipy import stats
from statsmodels.stats.multitest import multipletests

from paper import miniature, pictures, study, trials

PLANS = study.FIGURES | study.STUDIES
COMMITTED = [name for name in PLANS if (pictures.RESULTS / f"{name}.csv").exists()]
ABOUT = {  # {plans: the only settings, besides the tuned ones, in which the arms of a panel may differ}
    "figure1 instances parity": "humanline online epsilon dataset k",
    "dpo tasks": "humanline online epsilon dataset k beta",
    "figure5 figure5_dpo figure10 clipping syncing": "variant k epsilon",
    "figure6": "dataset",
    "figure7 figure8 stale": "humanline sample_every k epsilon variant",
    "table6": "log_epsilon_P log_epsilon_R",
    "baselines hypo": "humanline epsilon k beta variant",
    "sums gap": "humanline sample_every epsilon k variant",
    "chat": "humanline k",
    "controls": "humanline sample_every epsilon k beta variant",  # OAPL's β_2 is --beta
    "stories": "humanline online epsilon dataset k beta reward_model round_prompts samples_per_prompt",
}


def settings(arm, more: str = "") -> dict:
    """Returns the settings that the script reads from an arm's command."""
    line = trials.command(arm, arm.lrs[0], 21, more)
    script, flags = re.search(r"(\w+_humanline)(?:\.py)? (.*)", line).groups()
    args = parse_args(importlib.import_module(script), shlex.split(flags))
    assert (args.lr, args.seed) == (arm.lrs[0], 21)
    return vars(args) | {"lr": 0, "variant": arm.variant}


@pytest.mark.parametrize("name", PLANS)
def test_the_arms_of_a_panel_differ_only_in_what_the_plan_is_about(name):
    plan = PLANS[name]
    _, _, first_instance = plan.arms[0].panel.partition(" ")
    (about,) = [keys.split() for names, keys in ABOUT.items() if name in names.split()]
    panels = {}
    for arm in plan.arms:
        if plan.instances and arm.panel.split()[1] != first_instance:
            continue  # the other instances only differ in their folder
        choices = [settings(arm, f"{option} {plan.data[1]}") for option in arm.options]
        panels.setdefault((arm.panel, arm.script), []).append((arm.lrs, choices))
    assert len({panel for panel, _ in panels}) == len(panels)
    for arms in panels.values():
        _, (first, *_) = arms[0]
        for place, (lrs, choices) in enumerate(arms):
            assert (lrs, choices) not in arms[:place], "two arms are the same run"
            for other in choices:
                assert {key for key in first if first[key] != other[key]} <= {*about}


@pytest.mark.parametrize("script", ["dpo", "kto", "grpo"])
def test_with_a_model_all_variants_of_a_study_have_the_settings_that_table_3_varies(script):
    """--model starts with other settings for each variant. A learning rate is part of every command."""
    module = importlib.import_module(f"{script}_humanline")
    varied = {key for paper in module.PAPER.values() for key in paper} - {"lr"}
    expected = {"max_grad_norm": 1.0, "epsilon": 0.15}
    for arm in trials.arms("", script, (1e-3,), study.MAIN | {"online + humanline": "--online"}, "--model m"):
        found = settings(arm)
        assert {key: found[key] for key in varied} == {key: expected[key] for key in varied}


def test_tuning_and_report_share_no_prompt_and_no_problem(tmp_path):
    def made(file: str) -> list[str]:
        line = trials.PREPARE[file].replace("mkdir -p runs", f"mkdir -p {tmp_path}/runs")
        trials.shell(line.replace(f"> {file}", f"> {tmp_path}/{file}")).check_returncode()
        return (tmp_path / file).read_text().splitlines()

    problems = trials.shell("zcat toy/shell_game/problems_test.jsonl.gz").stdout.splitlines()
    # The report has the first 128 problems of the test set.
    parts = [(made("runs/problems_tuning.jsonl"), problems[:128])]
    for toy in ("tales", "low_entropy"):
        parts.append((made(f"runs/{toy}_tuning.jsonl"), made(f"runs/{toy}_report.jsonl")))
    for part in parts:
        tuning, report = ({line.partition('", "')[0] for line in lines} for lines in part)
        assert tuning and report and not tuning & report


def test_the_seeds_of_an_instance_are_one_row_with_their_means():
    """A collapsed seed, which has the untrained score, is told by the row's other columns."""
    first = {"panel": "sums plus", "arm": "online", "seed": 21, "late": 0.5, "clipped": 0.1, "failed": ""}
    second = {"panel": "sums plus", "arm": "online", "seed": 22, "late": 0.25, "failed": "diverged"}
    other = {"panel": "sums minus", "arm": "online", "seed": 21, "late": 1.0, "failed": ""}
    rows = study.over_instances([first, second, other])
    assert rows == [second | {"panel": "sums", "late": 0.375}, other | {"panel": "sums"}]
    scores = study.values(rows, "sums", "online", "late")
    assert list(scores) == [0.375, 1.0]  # two kinds, not three runs


GAME_SIDES = ((-0.02, "greater"), (0.02, "less"))  # those of the games
UNPAIRED = ("parity", "dpo", "stale")
WELCH = partial(stats.ttest_ind, equal_var=False)
SIDES = ((-study.MARGIN, "greater"), (study.MARGIN, "less"))  # the two tests of equivalence


def reported(name: str) -> list[dict]:
    return pictures.select(pictures.read(pictures.RESULTS, name), phase="reported")


def scores_of(rows: list[dict], panel: str, arm: str, metric: str = "judge") -> np.ndarray:
    return np.array([row[metric] for row in pictures.select(rows, panel=panel, arm=arm) if metric in row])


def by_task(rows: list[dict], script: str, arm: str, metric: str = "judge") -> np.ndarray:
    """Returns the mean over seeds of an arm for each task of a script."""
    arm_rows = [row for row in rows if row["arm"] == arm and row["panel"].startswith(f"{script} ")]
    panels = dict.fromkeys(row["panel"] for row in arm_rows)
    return np.array([scores_of(arm_rows, panel, arm, metric).mean() for panel in panels])


def check(line: dict, first: np.ndarray, second: np.ndarray, test=stats.ttest_rel):
    """Compares the line of a test with scipy's result."""
    found = test(first, second)
    assert line["difference"] == pytest.approx(first.mean() - second.mean())
    assert (line["low"], line["high"]) == pytest.approx(tuple(found.confidence_interval()))
    assert line["p"] == pytest.approx(found.pvalue)


def check_holm(lines: list[dict], count: int):
    """Checks Holm's correction, which this number of the lines must have."""
    lines = [line for line in lines if "p_holm" in line]
    assert len(lines) == count
    if lines:
        _, corrected, *_ = multipletests([line["p"] for line in lines], method="holm")
        assert [line["p_holm"] for line in lines] == pytest.approx(corrected)


@pytest.mark.parametrize("name", study.FIGURES)
def test_a_figures_intervals_and_tests_are_those_of_scipy(name):
    """The last run is changed to one that collapsed."""
    metric = study.FIGURES[name].metrics[0]
    rows = pictures.read(pictures.RESULTS, name)
    del rows[-1][metric]
    rows[-1]["failed"] = "diverged"
    table = study.compare(rows, metric)
    first_of = {}  # {panel: the line of its first arm}
    for line in table:
        panel, arm = line["panel"], line["arm"]
        runs = pictures.select(rows, phase="reported", panel=panel, arm=arm)
        scores = scores_of(runs, panel, arm, metric)
        low, high = stats.ttest_1samp(scores, 0).confidence_interval()
        assert (line["low"], line["mean"], line["high"]) == pytest.approx((low, scores.mean(), high))
        assert (line["runs"], line["collapsed"]) == (len(runs), line is table[-1])
        first, base = first_of.setdefault(panel, (arm, scores))
        assert line["against"] == ("" if arm == first else first)
        if arm != first:
            assert line["difference"] == pytest.approx(scores.mean() - base.mean())
            assert line["p"] == pytest.approx(WELCH(scores, base).pvalue)
    check_holm(table, len(table) - len(first_of))


def compared(rows: list[dict], name: str, line: dict) -> list[np.ndarray]:
    """Returns the scores of both arms of a line, by seed or by task (means over seeds)."""
    arms = (line["first"], line["second"])
    if name == "clipping":  # the mean over both learning rates
        return [(scores_of(rows, "lr 2e-3", arm) + scores_of(rows, "lr 4e-3", arm)) / 2 for arm in arms]
    if name in UNPAIRED:
        return [scores_of(rows, line["panel"], arm, line["metric"]) for arm in arms]
    metric = {"sums": "late", "gap": "late", "controls": "curve"}.get(name, "judge")
    return [by_task(rows, line["panel"], arm, metric) for arm in arms]


HOLM = {"clipping": 0, "parity": 0, "dpo": 4, "stale": 20, "instances": 2, "tasks": 4, "stories": 6}
HOLM |= {"baselines": 3, "sums": 3, "controls": 4, "gap": 0, "hypo": 2}  # of 8, 3, 6, 1 and 2 tests


@pytest.mark.parametrize("name", HOLM)
def test_a_studys_tests_are_those_of_scipy(name):
    rows = reported(name)
    lines = study.STUDIES[name].test(rows)
    test = WELCH if name in UNPAIRED else stats.ttest_rel
    for line in lines:
        first, second = compared(rows, name, line)
        if line["metric"] == "judge, worst quarter":  # each arm has its own
            lowest = [np.mean(sorted(numbers)[:5]) for numbers in (first, second)]  # of twenty tasks
            assert line["difference"] == pytest.approx(lowest[0] - lowest[1])
        elif "nats" not in line["metric"]:
            check(line, first, second, test)
            if name in ("tasks", "stories", "baselines", "hypo", "sums", "gap", "controls"):
                assert line["p_signed_rank"] == pytest.approx(stats.wilcoxon(first - second).pvalue)
            if name in (*UNPAIRED, "stories", "baselines", "hypo", "sums", "gap", "controls"):
                ends = GAME_SIDES if name == "controls" else SIDES
                sides = [test(first - end, second, alternative=side).pvalue for end, side in ends]
                assert line["p_equivalent"] == pytest.approx(max(sides))
    check_holm(lines, HOLM[name])


def test_the_bootstrap_of_the_worst_quarter_is_that_of_scipy():
    """Both draw tasks with the scores of both arms. The tolerance is the difference of two sets of draws."""
    rows = reported("tasks")
    humanline, offline = (by_task(rows, "KTO", arm) for arm in ("offline + humanline", "offline"))

    def statistic(first, second, axis=-1):
        lowest = [np.sort(scores, axis=axis)[..., :5].mean(-1) for scores in (first, second)]
        return lowest[0] - lowest[1]

    how = {"paired": True, "method": "percentile", "n_resamples": 20_000, "rng": 1}
    found = stats.bootstrap((humanline, offline), statistic, **how)
    line = study.worst_quarters("KTO", "first", "second", (humanline, offline))
    assert (line["low"], line["high"]) == pytest.approx(tuple(found.confidence_interval), abs=0.02)
    below = (found.bootstrap_distribution <= 0).mean()
    assert line["p"] == pytest.approx(2 * min(below, 1 - below), abs=0.005)
    same = study.worst_quarters("KTO", "first", "second", (offline, offline))
    assert (same["difference"], same["p"]) == (0, 1)


def test_stories_are_compared_at_equal_kl_where_ten_tasks_went_so_far():
    rows = reported("stories")
    lines = [line for line in study.stories_test(rows) if line["metric"] != "judge"]
    for line in lines:
        kl = float(line["metric"].split()[2])
        at_kl = [row | {"judge": study.judge_at(row, kl)} for row in rows]
        first, second = (by_task(at_kl, line["panel"], line[arm]) for arm in ("first", "second"))
        both = np.isfinite(first) & np.isfinite(second)
        check(line, first[both], second[both])
        assert line["instances"] == both.sum() >= 10
    few = [row for row in rows if row["panel"] not in ("KTO 11", "KTO 12", "KTO 13")]  # nine tasks are left
    assert {line["panel"] for line in study.stories_test(few) if "instances" in line} == {"GRPO", "DPO"}
    path = {"kl@0": 0, "judge@0": 0.0, "kl@15": 6, "judge@15": 0.6, "kl@120": 4, "judge@120": 0.9}
    assert study.judge_at(path, 5.0) == pytest.approx(0.5)  # when the run first reached 5 nats
    assert np.isnan(study.judge_at(path, 7.0)) and np.isnan(study.judge_at({"judge": 0.1}, 5.0))


def test_main_effects_are_differences_of_means_in_a_balanced_design():
    rows = [row for row in reported("syncing") if row["arm"] in study.PARTS]

    def mean(word: str) -> float:
        return np.mean([row["judge"] for row in rows if word in row["arm"].split(", ")])

    for line in study.syncing_test(rows):
        assert line["difference"] == pytest.approx(mean(line["first"]) - mean(line["second"]))


FORMER = {  # {flags of the scripts: the variant that does the same now}
    "--clip none --sync after_step": "trust-region",
    "--clip none": "no-clipping",
    "--clip sample": "sampling",
}


def as_planned(command: str) -> str:
    """Returns a committed command in the present flags, which give the same settings.

    Once --clip had three values, --sync three others, and variants.py was for one script. All variants of a
    script started with the same settings, also with --model.
    """
    preparation, separator, line = command.rpartition("&& ")
    line = line.replace("--sync none", "--k 0")
    for flags, variant in FORMER.items():
        line = re.sub(rf"(\w+_humanline)\.py (.*) {flags}", rf"paper/variants.py {variant} \1 \2", line)
    line = re.sub(r"variants\.py (\S+) --", r"variants.py \1 grpo_math_humanline --", line)
    common = trials.COMMON[re.search(r"(\w+)_humanline", line)[1]] if "--model " in line else ""
    if not common or not re.search(rf"--seed \d+ {common}", line):
        line = line.replace(" --max-grad-norm 1", "")
        line = re.sub(r"--seed \d+", rf"\g<0> {common}".rstrip(), line)
    return preparation + separator + line


def test_a_plan_without_rows_is_said_to_be_one():
    studies = (ROOT / "paper/studies.md").read_text(encoding="utf-8")
    for name in set(PLANS) - set(COMMITTED):
        assert f"## `{name}`\n\n*Fixed before its runs, and not read before the last one.*" in studies


@pytest.mark.parametrize("name", COMMITTED)
def test_what_is_committed_is_what_the_plan_makes_of_the_committed_scores(name, tmp_path, monkeypatch):
    """Tunes, reports and compares again, from the committed scores of all runs.

    A grid grows until the best rate is inside. All planned runs are there, and no others. A collapsed run of
    a study has the score of the untrained policy.
    """
    plan = PLANS[name]
    committed = {}  # {(command, panel, arm, rate, seed): row}
    for row in pictures.read(pictures.RESULTS, name):
        key = (as_planned(row["command"]), *(row[column] for column in ("panel", "arm", "lr", "seed")))
        if "failed" in row:
            row = {column: value for column, value in row.items() if column not in plan.metrics}
        committed[key] = {"failed": ""} | row
    before = {}
    for line in pictures.select(pictures.read(pictures.RESULTS, f"{name}_arms"), arm="untrained"):
        before.setdefault(line["panel"], {})[line["metric"]] = line["mean"]

    def rows_of(runs, at):
        return [committed[trials.command(*run), run[0].panel, run[0].name, *run[1:3]] for run in runs]

    monkeypatch.setattr(trials, "commit", lambda: "")
    monkeypatch.setattr(trials, "untrained", lambda arms, *_: {arm.panel: before[arm.panel] for arm in arms})
    monkeypatch.setattr(trials, "rows_of", rows_of)
    kls = iter([row["kl"] for row in committed.values() if "kl" in row])
    monkeypatch.setattr(miniature, "divergence", lambda folder: next(kls))
    miniature.make_plan(name, plan, tmp_path)
    files = [name, f"{name}_arms"]
    if plan.test:
        files.append(f"{name}_tests")
    for file in files:
        check_same(file, tmp_path)


def check_same(file: str, folder):
    """Checks that a csv in the folder is the committed one. Its arms may have another order."""
    made, saved = (pictures.read(path, file) for path in (folder, pictures.RESULTS))
    if file.endswith("_arms") and file != "time_arms":
        for table in (made, saved):
            table.sort(key=itemgetter("metric", "panel", "arm"))
    for line, other in zip(made, saved, strict=True):
        assert line.keys() == other.keys()
        for key, value in line.items():
            same = other[key] if isinstance(value, str) else pytest.approx(other[key], nan_ok=True)
            assert value == same


def test_committed_times_are_of_the_reported_runs_and_until_half_of_onlines_steps(tmp_path):
    rows = pictures.read(pictures.RESULTS, "time")
    planned = [re.sub(r" --eval-every \d+", "", row["command"]) for row in miniature.timed_rows(3)]
    made = list(dict.fromkeys(row["command"] for row in rows))
    assert made == [f"{line} --eval-every 16" for line in planned]
    trials.write_csv(tmp_path / "time_arms.csv", miniature.seconds_to_target(rows))
    check_same("time_arms", tmp_path)


def made_up_game_rows(rng, rival="GSPO") -> list[dict]:
    """Reported rows of `controls` with random scores: game 0 has ten seeds, the others two."""
    names = [name for name in study.CONTROLS if name not in study.RIVALS or name == rival]
    rows = []
    for game in range(6):
        for name in names:
            for seed in range(21, 31 if game == 0 else 23):
                row = {"panel": f"game {game}", "arm": name, "seed": seed, "failed": ""}
                rows.append(row | {"curve": 0.7 + 0.1 * rng.standard_normal()})
    return rows


def test_controls_are_compared_by_game_with_holm_over_the_four_planned_tests():
    rows = made_up_game_rows(np.random.default_rng(0))
    lines = study.controls_test(rows)
    both = [(line["first"], line["second"]) for line in lines]
    H = study.STALE_HUMANLINE
    planned = [(H, "no clip"), (H, "syncing alone, k=16"), ("clipping alone", "no clip"), (H, "GSPO")]
    assert both == [*planned, (H, "ε 0.2"), ("S = 1", H)]
    for line in lines:
        scores = []
        for arm in (line["first"], line["second"]):
            games = [scores_of(rows, f"game {game}", arm, "curve").mean() for game in range(6)]
            scores.append(np.array(games))
        check(line, *scores)
        sides = [stats.ttest_rel(scores[0] - end, scores[1], alternative=side) for end, side in GAME_SIDES]
        assert line["p_equivalent"] == pytest.approx(max(found.pvalue for found in sides))
        assert line["p_signed_rank"] == pytest.approx(stats.wilcoxon(scores[0] - scores[1]).pvalue)
    check_holm(lines, 4)


def test_only_the_rival_that_is_best_in_the_tuning_is_reported():
    """Its best setting counts, as a mean over the tuning seeds; a collapsed run counts as untrained."""
    plan = study.STUDIES["controls"]
    scores = {"CISPO": (0.5, 0.6), "GSPO": (0.9, 0.2), "OAPL": (0.7, 0.4)}
    rows = []
    for arm, of_rates in scores.items():
        for lr, score in zip(("0.0001", "0.001"), of_rates):
            for seed in (1, 2, 3):
                row = {"arm": arm, "command": f"python x --lr {lr} --seed {seed}", "curve": score}
                rows.append(row | {"curve": score if (arm, seed) != ("GSPO", 3) else 0.1})
    assert np.mean([0.9, 0.9, 0.1]) < 0.7  # so OAPL is the best, though single runs of GSPO are above it
    names = {arm.name for arm in miniature.without_losers(plan, rows)}
    assert names == {"OAPL", *study.CONTROLS} - (set(study.RIVALS) - {"OAPL"})
    assert miniature.without_losers(study.STUDIES["sums"], rows) == study.STUDIES["sums"].arms


def make_of_made_up_rows(name: str, folder, monkeypatch, numbers_of=lambda *run: {}) -> list[dict]:
    """Writes all files of a study into a folder, without a run.

    Returns its rows. Their scores are random. numbers_of(arm, lr, seed, more) replaces some of them.
    """
    plan = study.STUDIES[name]
    rng = np.random.default_rng(1)
    made = []

    def rows_of(runs, at):
        rows = []
        for arm, lr, seed, more in runs:
            row = {"command": trials.command(arm, lr, seed, more), "seed": seed, "panel": arm.panel}
            row |= {"arm": arm.name, "phase": "reported" if seed > 10 else "tuning", "lr": lr, "failed": ""}
            numbers = {key: rng.random() for key in plan.metrics}
            if {"curve", "late"} & {*plan.metrics}:
                numbers |= {f"eval/accuracy@{step}": rng.random() for step in (32, 64)}
            rows.append(row | numbers | numbers_of(arm, lr, seed, more))
        made.extend(rows)
        return rows

    monkeypatch.setattr(trials, "commit", lambda: "")
    monkeypatch.setattr(trials, "rows_of", rows_of)
    miniature.make_plan(name, plan, folder)
    return made


def test_hypo_is_tuned_alone_and_all_arms_run_on_the_twelve_draws(tmp_path, monkeypatch):
    made = make_of_made_up_rows("hypo", tmp_path, monkeypatch)
    tuned = [row for row in made if row["phase"] == "tuning"]
    assert {row["arm"] for row in tuned} == {"HyPO"}
    reported_rows = pictures.select(pictures.read(tmp_path, "hypo"), phase="reported")
    arms = ("HyPO", "offline + humanline", "offline")
    assert {(row["panel"], row["arm"]) for row in reported_rows} == {
        (f"DPO {draw}", arm) for draw in range(11, 23) for arm in arms
    }
    lines = pictures.read(tmp_path, "hypo_tests")
    assert [(line["first"], line["second"]) for line in lines] == list(study.HYPO_PAIRS)
    for line in lines:
        scores = [by_task(reported_rows, "DPO", line[end]) for end in ("first", "second")]
        check(line, *scores)
    check_holm(lines, 2)
    (ax,) = pictures.figures_of("hypo", tmp_path)["hypo"].axes
    _, labels = ax.get_legend_handles_labels()
    assert len(labels) == 3 and "HyPO, tuned" in labels
    pictures.plt.close("all")


def test_the_first_game_has_ten_seeds_and_the_others_two(tmp_path, monkeypatch):
    """A whole study on made-up rows: 7 arms in each of six games, with the files that it writes."""
    made = make_of_made_up_rows("controls", tmp_path, monkeypatch)
    reported_rows = pictures.select(pictures.read(tmp_path, "controls"), phase="reported")
    seeds = {}
    for row in reported_rows:
        seeds.setdefault((row["panel"], row["arm"]), []).append(row["seed"])
    assert {panel for panel, _ in seeds} == {f"game {i}" for i in range(6)} and len(seeds) == 6 * 7
    for (panel, _), numbers in seeds.items():
        assert numbers == [*range(21, 31 if panel == "game 0" else 23)]
    tuning = [row for row in made if row["phase"] == "tuning"]
    assert {row["panel"] for row in tuning} == {"game 0"} and {row["seed"] for row in tuning} == {1, 2, 3}
    assert len(pictures.read(tmp_path, "controls_tests")) == 6
    figures = pictures.figures_of("controls", tmp_path)
    assert len(figures["controls"].axes[0].get_lines()) == 7
    pictures.plt.close("all")


@pytest.mark.parametrize("is_gap", [True, False])
def test_humanline_runs_on_old_sums_only_if_online_is_ahead(is_gap, tmp_path, monkeypatch):
    rng = np.random.default_rng(2)
    mean_of = {"online": 0.5, "ε 0.2": 0.3 if is_gap else 0.45}  # a gap of 0.10 is asked for

    def numbers_of(arm, lr, seed, more):
        if arm.name == "no clip" and seed == 22:
            return {"failed": "lower --lr"}
        late = mean_of.get(arm.name, 0.4) + 0.01 * rng.random()
        return {"late": late, "clipped": 0.02 + 0.001 * rng.random()}

    made = make_of_made_up_rows("gap", tmp_path, monkeypatch, numbers_of)
    tuned = pictures.select(made, phase="tuning")
    assert {row["arm"] for row in tuned} == {"ε 0.2", "no clip", "humanline"}
    assert {row["lr"] for row in tuned} == {1e-5, 3e-5} and len(tuned) == 6
    reported_rows = pictures.select(pictures.read(tmp_path, "gap"), phase="reported")
    names = dict.fromkeys(row["arm"] for row in reported_rows)
    assert len(reported_rows) == 10 * len(names)
    lines = pictures.read(tmp_path, "gap_tests")
    both = [(line["first"], line["second"]) for line in lines]
    if is_gap:
        assert list(names) == ["ε 0.2", "online", "no clip", "humanline", "clipping alone"]
        assert both == [*study.GAP_PAIRS, ("online", "ε 0.2"), ("online", "humanline")]
        check_holm(lines, 3)
        rates = {arm: {row["lr"] for row in reported_rows if row["arm"] == arm} for arm in names}
        assert rates["clipping alone"] == rates["no clip"] and len(rates["no clip"]) == 1
        # One run of each kind has collapsed.
        assert lines[2]["clipped"] == pytest.approx(0.0205, abs=0.0005)
    else:
        assert list(names) == ["ε 0.2", "online"] and both == [("online", "ε 0.2")]
    gap = lines[both.index(("online", "ε 0.2"))]
    check(gap, *(by_task(reported_rows, "sums", arm, "late") for arm in ("online", "ε 0.2")))
    assert study.has_gap(reported_rows) == is_gap
    assert set(pictures.figures_of("gap", tmp_path)) == {"gap"}
    pictures.plt.close("all")


def test_the_chat_arms_are_tuned_by_the_lowest_loss_and_the_grid_grows_for_all(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)

    def loss(arm, lr, *_):
        loss = abs(np.log(lr / 2e-5)) + 0.01 * rng.random()
        return {"eval/loss": loss, "answers": [["Q", "A", "B"]]}

    made = make_of_made_up_rows("chat", tmp_path, monkeypatch, loss)
    tuned = pictures.select(made, phase="tuning")
    assert {row["panel"] for row in tuned} == {"chat polite"}
    for arm in study.CHAT_FLAGS:
        assert {row["lr"] for row in tuned if row["arm"] == arm} == {1e-6, 5e-6, 2e-5, 1e-4}
    reported_rows = pictures.select(pictures.read(tmp_path, "chat"), phase="reported")
    assert {row["lr"] for row in reported_rows} == {2e-5}
    seeds = {}
    for row in reported_rows:
        seeds.setdefault((row["panel"], row["arm"]), []).append(row["seed"])
    assert set(map(tuple, seeds.values())) == {(21, 22, 23), (21,)} and len(seeds) == 6
    with (tmp_path / "chat_answers.csv").open(newline="") as file:
        answers = list(csv.DictReader(file))
    assert answers == [{"question": "Q", "arm": arm, "before": "A", "after": "B"} for arm in study.CHAT_FLAGS]
    assert not any("answers" in row for row in reported_rows)
    assert pictures.figures_of("chat", tmp_path) == {}
    untrained = pictures.select(made, arm="untrained")
    assert [row["panel"] for row in untrained] == ["chat polite", "chat harmless"]
    assert all("/held_out.jsonl" in row["command"] for row in untrained)


def test_kept_rows_are_not_made_again_and_a_row_is_kept_as_soon_as_its_run_ends(tmp_path, monkeypatch):
    (arm, *_) = study.CONTROL_ARMS
    started = []
    is_third_done = threading.Event()

    def start(line, folder):
        started.append(line)
        if "--seed 1 " in line:
            assert is_third_done.wait(60)  # no run waits for another one if a core is free
        if "--seed 3 " in line:
            is_third_done.set()
        if "--seed 4 " in line:
            raise SystemExit("the program ends")
        folder.mkdir(parents=True)
        (folder / "end.json").write_text("{}")

    def row_of(arm, lr, seed, more, at):
        line = trials.command(arm, lr, seed, more)
        return {"command": line, "commit": at, "panel": arm.panel, "arm": arm.name, "curve": seed / 3}

    monkeypatch.setattr(trials.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(trials, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(trials, "KEPT", tmp_path / "controls.jsonl")
    monkeypatch.setattr(trials, "start", start)
    monkeypatch.setattr(trials, "row_of", row_of)
    runs = [(arm, 1e-4, seed, "") for seed in (1, 2, 3, 4)]
    lines = [trials.command(*one) for one in runs]
    with pytest.raises(SystemExit, match="the program ends"):
        trials.rows_of(runs, "abc")
    kept = [json.loads(line)["command"] for line in trials.KEPT.read_text().splitlines()]
    assert kept == lines[:3] and started == lines
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    rows = trials.rows_of(runs[:3] * 2, "abc")
    assert [row["curve"] for row in rows] == [1 / 3, 2 / 3, 1.0] * 2  # to the last digit
    assert started == lines
    # Another arm with the same command has its own row without a run, and another commit its own run.
    other = arm._replace(name="other")
    trials.rows_of([(other, 1e-4, 2, ""), (arm, 1e-4, 2, "")], "def")
    trials.rows_of([(other, 1e-4, 2, ""), (arm, 1e-4, 2, "")], "def")
    assert started == [*lines, lines[1]] and len(trials.KEPT.read_text().splitlines()) == 5
