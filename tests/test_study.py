"""paper/study.py and what is committed of it: the plans' arms, how they are tuned, their statistics."""

import importlib
import re
import shlex
import sys

import numpy as np
import pytest
from conftest import ROOT, parse_args
from scipy import stats
from statsmodels.stats.multitest import multipletests

sys.path.insert(0, str(ROOT))
from paper import miniature, pictures, study, trials  # noqa: E402

PLANS = study.FIGURES | study.STUDIES
ABOUT = {  # the only settings in which the arms of a panel may differ, besides what is tuned
    "figure1": {"humanline", "online", "epsilon", "dataset"},
    "figure5": {"clip", "sync", "variant"},
    "figure5_dpo": {"clip"},
    "figure6": {"dataset"},
    "figure7": {"humanline", "sample_every", "k", "epsilon"},
    "figure8": {"k"},
    "figure10": {"clip", "sync", "k"},
    "table6": {"log_epsilon_P", "log_epsilon_R"},
    "clipping": {"clip"},
    "stale": {"humanline", "epsilon", "sample_every", "variant"},
    "syncing": {"sync", "k", "clip", "epsilon"},
    "parity": {"humanline", "online", "k", "dataset"},
    "instances": {"humanline", "online", "epsilon", "dataset"},
    "dpo": {"humanline", "online", "k", "dataset", "beta"},
    "tasks": {"humanline", "epsilon", "k", "beta"},
    "stories": {"humanline", "epsilon", "k", "beta", "online", "dataset", "reward_model", "round_prompts"}
    | {"samples_per_prompt"},
}


# --- plans ---


def settings(arm, more: str = "") -> dict:
    """What the script makes of an arm's command."""
    line = trials.command(arm, arm.lrs[0], 21, more)
    script, flags = re.search(r"(\w+_humanline)(?:\.py)? (.*)", line).groups()
    args = parse_args(importlib.import_module(script), shlex.split(flags))
    assert (args.lr, args.seed) == (arm.lrs[0], 21)
    return vars(args) | {"lr": 0, "variant": arm.variant}


@pytest.mark.parametrize("name", PLANS)
def test_the_arms_of_a_panel_differ_only_in_what_the_plan_is_about(name):
    plan = PLANS[name]
    panels = {}
    for arm in plan.arms:
        if plan.instances and arm.panel.split()[1] != "11":  # the others differ in their folder alone
            continue
        of_options = [settings(arm, f"{option} {plan.data[1]}") for option in arm.options]
        panels.setdefault((arm.panel, arm.script), []).append(of_options)
    assert len({panel for panel, _ in panels}) == len(panels)
    for of_arms in panels.values():
        first = of_arms[0][0]
        for place, of_options in enumerate(of_arms):
            assert of_options not in of_arms[:place], "two arms are the same run"
            for other in of_options:
                assert {key for key in first if first[key] != other[key]} <= ABOUT[name]


def test_tuning_and_report_share_no_prompt_and_no_problem(tmp_path):
    def made(file: str) -> list[str]:
        line = trials.PREPARE[file].replace("mkdir -p runs", f"mkdir -p {tmp_path}/runs")
        trials.shell(line.replace(f"> {file}", f"> {tmp_path}/{file}")).check_returncode()
        return (tmp_path / file).read_text().splitlines()

    problems = trials.shell("zcat toy/shell_game/problems_test.jsonl.gz").stdout.splitlines()
    parts = [(made("runs/problems_tuning.jsonl"), problems[:128])]  # the report's are the first of the test
    for toy in ("tales", "low_entropy"):
        parts.append((made(f"runs/{toy}_tuning.jsonl"), made(f"runs/{toy}_report.jsonl")))
    for part in parts:
        tuning, report = ({line.partition('", "')[0] for line in lines} for lines in part)
        assert tuning and report and not tuning & report


def test_grids_grow_until_the_best_rate_is_inside_and_a_collapse_counts_as_untrained(monkeypatch):
    """Runs are replaced by a table of scores: 3e-5 is the best rate of one arm, and the other, whose runs
    collapse above 1e-4, does best with its second option."""
    best = {"low": 3e-5, "second": 1e-4}

    def rows_of(runs, at):
        rows = []
        for arm, lr, seed, more in runs:
            row = {"panel": arm.panel, "arm": arm.name, "lr": lr, "seed": seed, "failed": ""}
            row["judge"] = -abs(np.log10(lr / best[arm.name])) + 0.5 * ("--k 2" in more)
            if arm.name == "second" and lr > 1e-4:
                del row["judge"]
                row["failed"] = "diverged"
            rows.append(row)
        return rows

    monkeypatch.setattr(trials, "rows_of", rows_of)
    low = trials.Arm("A", "low", "grpo", "", (3e-4, 1e-3))
    second = trials.Arm("A", "second", "grpo", "", (1e-4, 3e-4), options=("", "--k 2"))
    fixed = trials.Arm("A", "fixed", "grpo", "", (1e-3,))
    data = ("--tuning", "--report")
    plan = study.Plan([low, second, fixed], ("judge",), data=data, tuning_seeds=(1, 2, 3), test=len)
    found, rows = miniature.tune(plan, {"A": {"judge": -3.0}}, "commit")
    assert found == {("grpo", "low"): (3e-5, ""), ("grpo", "second"): (1e-4, "--k 2")}
    tried = {arm: sorted({row["lr"] for row in rows if row["arm"] == arm}) for arm in ("low", "second")}
    assert tried == {"low": [1e-5, 3e-5, 1e-4, 3e-4, 1e-3], "second": [3e-5, 1e-4, 3e-4]}
    assert {row["judge"] for row in rows if row["failed"]} == {-3.0}
    assert {row["seed"] for row in rows} == {1, 2, 3}
    both = [arm._replace(panel=panel) for panel in "AB" for arm in (low, second)]
    assert miniature.tune(plan._replace(arms=both), {}, "commit")[0] == found
    last = low._replace(then=("--k 2", "--k 3"))  # tried at 3e-5 alone
    found, rows = miniature.tune(plan._replace(arms=[last]), {}, "commit")
    assert found == {("grpo", "low"): (3e-5, " --k 2")}
    assert len(rows) == 3 * 7
    fixed_grids, _ = miniature.tune(plan._replace(test=None), {}, "commit")  # a figure's do not grow
    assert fixed_grids == {("grpo", "low"): (3e-4, ""), ("grpo", "second"): (1e-4, "--k 2")}


# --- statistics ---

SAMPLES = {  # None: the run collapsed
    ("A", "ours"): [0.30, 0.34, 0.29, 0.36, 0.31],
    ("A", "online"): [0.33, 0.31, 0.35, 0.30, 0.32],
    ("A", "other"): [0.10, 0.22, 0.15, 0.12, 0.30],
    ("B", "ours"): [2.0, 2.1, 2.2, 2.3],
    ("B", "three"): [1.0, None, 1.2, 1.1],
}
WHOLE = {key: np.array([number for number in numbers if number]) for key, numbers in SAMPLES.items()}


def sample_rows() -> list[dict]:
    """Those of SAMPLES, and one for tuning, which counts for nothing."""
    rows = [{"panel": "A", "arm": "ours", "phase": "tuning", "lr": 1.0, "judge": 99.0}]
    for (panel, arm), numbers in SAMPLES.items():
        for number in numbers:
            row = {"panel": panel, "arm": arm, "phase": "reported", "lr": 1.0, "judge": number}
            if number is None:
                row["failed"] = "diverged"
                del row["judge"]
            rows.append(row)
    return rows


def by_hand(first: np.ndarray, second: np.ndarray) -> tuple:
    """Difference, its standard error and Welch's degrees of freedom."""
    a, b = first.var(ddof=1) / len(first), second.var(ddof=1) / len(second)
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return first.mean() - second.mean(), (a + b) ** 0.5, freedom


def test_a_figures_intervals_and_tests_are_those_of_the_formulas():
    table = {(line["panel"], line["arm"]): line for line in study.compare(sample_rows(), "judge")}
    raw = {}
    for key, numbers in WHOLE.items():
        line = table[key]
        half = stats.t.ppf(0.975, len(numbers) - 1) * numbers.std(ddof=1) / len(numbers) ** 0.5
        ends = (numbers.mean() - half, numbers.mean(), numbers.mean() + half)
        assert (line["low"], line["mean"], line["high"]) == pytest.approx(ends)
        assert (line["runs"], line["collapsed"]) == (len(SAMPLES[key]), len(SAMPLES[key]) - len(numbers))
        if key[1] == "ours":
            assert "p" not in line and not line["against"]
            continue
        difference, error, freedom = by_hand(numbers, WHOLE[key[0], "ours"])
        raw[key] = 2 * stats.t.sf(abs(difference) / error, freedom)
        assert (line["difference"], line["p"]) == pytest.approx((difference, raw[key]))
        assert line["against"] == "ours"
    _, corrected, *_ = multipletests([*raw.values()], method="holm")
    assert [table[key]["p_holm"] for key in raw] == pytest.approx(corrected)


@pytest.mark.parametrize("second", ["online", "other"])
def test_welch_and_equivalence(second):
    difference, error, freedom = by_hand(WHOLE["A", "ours"], WHOLE["A", second])
    line = study.welch(sample_rows()[1:], "A", "ours", second, "judge")
    half = stats.t.ppf(0.975, freedom) * error
    assert line["difference"] == pytest.approx(difference)
    assert (line["low"], line["high"]) == pytest.approx((difference - half, difference + half))
    assert line["p"] == pytest.approx(2 * stats.t.sf(abs(difference) / error, freedom))
    above = stats.t.sf((difference + 0.05) / error, freedom)  # that it is below -0.05
    below = stats.t.sf((0.05 - difference) / error, freedom)
    assert line["p_equivalent"] == pytest.approx(max(above, below))
    assert (line["p_equivalent"] < 0.05) == (second == "online")


def test_clipping_is_paired_by_seed_and_averaged_over_rates():
    scores = np.random.default_rng(0).normal(size=(2, 2, 8))  # by rate, arm, seed
    rows = []
    for panel, arms in zip(("lr 2e-3", "lr 4e-3"), scores):
        for arm, numbers in zip(("clipping", "no clipping"), arms):
            rows += [{"panel": panel, "arm": arm, "judge": number} for number in numbers]
    (line,) = study.clipping_test(rows)
    test = stats.ttest_rel(*scores.mean(0))
    low, high = test.confidence_interval()
    assert line["difference"] == pytest.approx(scores[:, 0].mean() - scores[:, 1].mean())
    assert (line["low"], line["high"], line["p"]) == pytest.approx((low, high, test.pvalue))


def of_twelve_tasks(last: str = study.PAPERS_EPSILON) -> tuple[list[dict], np.ndarray]:
    """Rows of three arms, and their scores (arms, tasks)."""
    scores = np.random.default_rng(2).normal((0.2, 0.4, -0.1), (0.3, 0.1, 0.6), (12, 3)).T
    rows = []
    for arm, of_arm in zip(("offline", "offline + humanline", last), scores):
        rows += [{"panel": f"GRPO {i}", "arm": arm, "judge": score} for i, score in enumerate(of_arm, 11)]
    return rows, scores


def test_tasks_are_paired_by_task_and_an_arms_worst_quarter_is_its_own():
    rows, (offline, humanline, papers) = of_twelve_tasks()
    for row in rows[24:]:
        rows.append(row | {"arm": study.UNCLIPPED, "judge": row["judge"] ** 2})
    of_kto = [row | {"panel": row["panel"].replace("GRPO", "KTO")} for row in rows]
    more = study.tasks_test(rows + of_kto)
    assert [line["panel"] for line in more] == ["GRPO"] * 2 + ["KTO"] * 2 + ["GRPO"] * 4
    assert max(line["p_holm"] / line["p"] for line in more[:4]) == 4
    lines = study.tasks_test(rows)
    keys = [(line["panel"], line["first"], line["second"], line["metric"]) for line in lines]
    assert keys == [
        ("GRPO", "offline + humanline", second, metric)
        for second in ("offline", "offline, ε 0.5", "offline, no clip")
        for metric in ("judge", "judge, worst quarter")
    ]
    for i, other in enumerate((offline, papers, papers**2)):
        mean, worst = lines[2 * i : 2 * i + 2]
        test = stats.ttest_rel(humanline, other)
        assert mean["difference"] == pytest.approx((humanline - other).mean())
        assert (mean["low"], mean["high"]) == pytest.approx(tuple(test.confidence_interval()))
        assert mean["p"] == pytest.approx(test.pvalue)
        assert mean["p_signed_rank"] == pytest.approx(stats.wilcoxon(humanline - other).pvalue)
        lowest = [sum(sorted(numbers)[:3]) / 3 for numbers in (humanline, other)]  # of twelve
        assert worst["difference"] == pytest.approx(lowest[0] - lowest[1])
    _, corrected, *_ = multipletests([line["p"] for line in lines[:2]], method="holm")
    assert [line["p_holm"] for line in lines[:2]] == pytest.approx(corrected)
    assert not any("p_holm" in line for line in lines[2:])


def test_the_bootstrap_of_the_worst_quarter_is_that_of_scipy():
    """Its percentiles, over tasks with both of their scores, to what two sets of draws differ by."""
    _, (offline, humanline, _) = of_twelve_tasks()

    def statistic(first, second, axis=-1):
        lowest = [np.sort(scores, axis=axis)[..., :3].mean(-1) for scores in (first, second)]
        return lowest[0] - lowest[1]

    found = stats.bootstrap(
        (humanline, offline), statistic, paired=True, method="percentile", n_resamples=20_000, rng=1
    )
    line = study.worst_quarters("GRPO", "first", "second", (humanline, offline))
    interval = found.confidence_interval
    assert (line["low"], line["high"]) == pytest.approx((interval.low, interval.high), abs=0.02)
    below = (found.bootstrap_distribution <= 0).mean()
    assert line["p"] == pytest.approx(2 * min(below, 1 - below), abs=0.005)
    same = study.worst_quarters("GRPO", "first", "second", (offline, offline))
    assert (same["difference"], same["p"]) == (0, 1)


def test_stories_are_paired_by_task_and_compared_at_equal_kl():
    rows, (offline, humanline, online) = of_twelve_tasks("online")
    for row in rows:  # a path of three points: two of the online runs end at 10 nats
        far = 10 if row["arm"] == "online" and int(row["panel"].split()[1]) in (12, 13) else 20
        row |= {"kl@0": 0, "judge@0": 0.0, "kl@30": far / 2, "judge@30": row["judge"] / 4}
        row |= {"kl@60": far, "judge@60": row["judge"]}
    lines = study.stories_test(rows)
    for line, first, second in zip(lines, (humanline, online), (offline, humanline)):
        test = stats.ttest_rel(first, second)
        assert line["difference"] == pytest.approx((first - second).mean())
        assert (line["low"], line["high"]) == pytest.approx(tuple(test.confidence_interval()))
        sides = [stats.ttest_1samp(first - second, end, alternative=side).pvalue for end, side in SIDES]
        assert line["p_equivalent"] == pytest.approx(max(sides))
    _, corrected, *_ = multipletests([line["p"] for line in lines[:2]], method="holm")
    assert [line["p_holm"] for line in lines[:2]] == pytest.approx(corrected)
    both, _, far, online_far = lines[2:]
    assert (both["metric"], far["metric"], far["instances"]) == ("judge at 5 nats", "judge at 15 nats", 12)
    assert both["difference"] == pytest.approx((humanline - offline).mean() / 8)  # half way to a quarter
    assert far["difference"] == pytest.approx((humanline - offline).mean() * 5 / 8)
    assert online_far["instances"] == 10
    rows[-1]["kl@60"] = 14  # a third
    assert len(study.stories_test(rows)) == 5
    assert np.isnan(study.judge_at({"judge": 0.1}, 5.0))  # of a run that collapsed
    back = {"kl@0": 0, "judge@0": 0.0, "kl@15": 6, "judge@15": 0.6, "kl@120": 4, "judge@120": 0.9}
    assert study.judge_at(back, 5.0) == pytest.approx(0.5)  # when it was first there


SIDES = ((-0.05, "greater"), (0.05, "less"))


def test_main_effects_are_differences_of_means_in_a_balanced_design():
    generator = np.random.default_rng(1)
    rows = []
    for arm in study.PARTS:
        rows += [{"panel": "GRPO offline", "arm": arm, "judge": generator.normal()} for _ in range(3)]

    def mean(word: str) -> float:
        return np.mean([row["judge"] for row in rows if word in row["arm"].split(", ")])

    for line in study.syncing_test(rows):
        assert line["difference"] == pytest.approx(mean(line["first"]) - mean(line["second"]))


# --- what is committed ---


def as_planned(command: str) -> str:
    """A committed command in today's words: --clip had three values, and variants.py was for one script."""
    command = command.replace("--clip none", "--no-clip")
    command = re.sub(
        r"python (\w+)\.py (.*) --clip sample", r"python paper/variants.py sampling \1 \2", command
    )
    return re.sub(r"variants\.py (\S+) --", r"variants.py \1 grpo_math_humanline --", command)


@pytest.mark.parametrize("name", PLANS)
def test_committed_runs_are_those_of_the_plan_at_the_best_rates_of_their_grids(name):
    plan = PLANS[name]
    rows = pictures.read(pictures.RESULTS, name)
    by_choice = {}  # {(script, arm): {(rate, option): scores}}
    reported = []
    for phase, arms, seeds, data in (
        ("tuning", plan.tuned or plan.arms, plan.tuning_seeds, plan.data[0]),
        ("reported", plan.arms, plan.seeds, plan.data[1]),
    ):
        planned = {(arm.panel, arm.name): arm for arm in arms}
        for row in [row for row in rows if row["phase"] == phase]:
            arm = planned[row["panel"], row["arm"]]
            seed = int(row["seed"])
            assert seed in seeds
            options = [*arm.options, *(f"{option} {more}" for option in arm.options for more in arm.then)]
            (option,) = [
                option
                for option in options
                if as_planned(row["command"]) == trials.command(arm, row["lr"], seed, f"{option} {data}")
            ]
            choices = by_choice.setdefault((arm.script, arm.name), {})
            if phase == "tuning":
                score = row.get(plan.metrics[0], -np.inf)
                choices.setdefault((row["lr"], option), []).append(score)
            else:
                reported.append((arm.panel, arm.name, seed))
                best = max(choices, key=lambda choice: np.mean(choices[choice]), default=(arm.lrs[0], ""))
                assert (row["lr"], option) == best
    assert reported == [(arm.panel, arm.name, seed) for arm in plan.arms for seed in plan.seeds]


def same(line: dict, saved: dict) -> bool:
    for key, value in line.items():
        other = saved.get(key, "" if isinstance(value, str) else np.nan)
        if other != value and other != pytest.approx(value, nan_ok=True):
            return False
    return True


@pytest.mark.parametrize("name", PLANS)
def test_committed_statistics_are_those_of_the_committed_rows(name):
    plan = PLANS[name]
    rows = [row for row in pictures.read(pictures.RESULTS, name) if row["phase"] == "reported"]
    if plan.instances:
        rows = study.over_instances(rows)
    saved = [line for line in pictures.read(pictures.RESULTS, f"{name}_arms") if line["arm"] != "untrained"]
    for metric in plan.metrics:
        of_metric = [line for line in saved if line["metric"] == metric]
        for line, other in zip(study.compare(rows, metric), of_metric, strict=True):
            keys = ("panel", "arm", "lr", "runs", "collapsed", "mean", "low", "high")
            if not plan.test:
                keys = (*keys, "against", "p", "p_holm")
            assert same({key: line[key] for key in keys if key in line}, other)
    if plan.test:
        tests = pictures.read(pictures.RESULTS, f"{name}_tests")
        for line, other in zip(plan.test(rows), tests, strict=True):
            assert same(line, other)


def test_committed_times_are_of_the_reported_runs_and_until_half_of_onlines_steps():
    rows = pictures.read(pictures.RESULTS, "time")
    lines = [re.sub(r" --eval-every \d+", "", row["command"]) for row in miniature.timed_rows(3)]
    assert list(dict.fromkeys(row["command"] for row in rows)) == [
        f"{line} --eval-every 16" for line in lines
    ]
    saved = pictures.read(pictures.RESULTS, "time_arms")
    for line, other in zip(miniature.seconds_to_target(rows), saved, strict=True):
        assert line.pop("seconds") == other.get("seconds", "")
        assert same(line, other)
