"""paper/study.py: its arms, how it tunes, its tests by hand, and the committed results of it."""

import csv
import shlex
import sys

import numpy as np
import pytest
from conftest import ROOT
from scipy import stats
from test_commands import parse

sys.path.insert(0, str(ROOT))
from paper import miniature, study  # noqa: E402
from toy import make  # noqa: E402

RESULTS = ROOT / "paper" / "results"
ABOUT = {  # the only settings in which the arms of a panel may differ, besides what is tuned
    "clipping": {"clip"},
    "stale": {"humanline", "epsilon", "sample_every"},
    "syncing": {"sync", "k", "clip", "epsilon"},
    "parity": {"humanline", "online", "k", "dataset"},
    "instances": {"humanline", "online", "epsilon", "dataset"},
    "dpo": {"humanline", "online", "k", "dataset", "beta"},
}


@pytest.mark.parametrize("name", ABOUT)
def test_the_arms_of_a_panel_differ_only_in_what_the_study_is_about(name, tmp_path, monkeypatch):
    assert study.STUDIES.keys() == ABOUT.keys()
    plan = study.STUDIES[name]
    panels = {}
    for arm in plan.arms:
        for option in arm.options:
            line = miniature.command(arm, arm.lrs[0], 21, f"{option} {plan.data[1]}")
            *_, training = line.split("&& ")
            if arm.program:
                training = training.replace(arm.program, f"{arm.script}_humanline.py")
            _, _, args = parse(shlex.split(training), tmp_path, monkeypatch)
            assert args.seed == 21 and args.lr == arm.lrs[0]
            settings = vars(args) | {"lr": 0, "program": arm.program}
            panels.setdefault(arm.panel, []).append(settings)
    for first, *others in panels.values():
        seen = [first]
        for other in others:
            assert other not in seen, "two arms are the same run"
            assert {key for key in first if first[key] != other[key]} <= ABOUT[name] | {"program"}
            seen.append(other)


def test_an_instance_is_trained_with_the_settings_of_the_toy(tmp_path, monkeypatch):
    """Which a named --model does not bring: they are written out."""

    def settings(arm) -> dict:
        *_, training = miniature.command(arm, 3e-4, 21).split("&& ")
        _, _, args = parse(shlex.split(training), tmp_path, monkeypatch)
        return vars(args)

    of_toy = {(arm.script, arm.name): settings(arm) for arm in study.MAIN_ARMS}
    for arm in study.instance_arms():
        toy, instance = of_toy[arm.script, arm.name], settings(arm)
        different = {key for key in toy if toy[key] != instance[key]}
        assert different == {"model", "reward_model", "dataset", "eval_dataset"}
        assert toy["dtype"] == "float32"


def test_tuning_and_report_share_no_prompt_and_no_problem(tmp_path):
    pairs = [(f"runs/{toy}_tuning.jsonl", f"runs/{toy}_report.jsonl") for toy in ("tales", "low_entropy")]
    for files in (*pairs, ("runs/problems_tuning.jsonl",)):
        contents = []
        for file in files:
            line = miniature.PREPARE[file].replace("mkdir -p runs", f"mkdir -p {tmp_path}/runs")
            miniature.shell(line.replace(f"> {file}", f"> {tmp_path}/{file}")).check_returncode()
            contents.append((tmp_path / file).read_text().splitlines())
        if len(files) == 1:  # the report reads the first 128 of the test set
            everything = miniature.shell("zcat toy/shell_game/problems_test.jsonl.gz").stdout.splitlines()
            contents.append(everything[:128])
        tuning, report = ({line.partition('", "')[0] for line in lines} for lines in contents)
        assert tuning and report and not tuning & report


def test_every_toys_tales_are_judged_by_its_own_judge():
    """Values by hand, from the words of one sentence; the tastes of two instances are other numbers."""
    sentence = "the shiny drum helps the small dog kindly ."
    words = ("shiny", "helps", "small", "kindly")
    scores = []
    for instance in (0, 3, 12):
        folder = f"runs/instances/{instance}/tales" if instance else "toy/tales"
        score = miniature.judge_of_tales(f"{folder}/policy")("about drum", sentence)
        taste = make.another_instance(instance).taste["drum"]
        assert score == pytest.approx(np.mean([taste[word] for word in words]))
        scores.append(score)
    assert len(set(scores)) == 3
    assert make.another_instance(0).taste == make.TALE_TASTE
    six = " ".join([sentence] * 6)
    assert make.judge_tale("about drum", six) == pytest.approx(scores[0] - 1.5)  # three too many
    assert miniature.judge_of_tales("toy/low_entropy/policy")("about drum", six) == pytest.approx(scores[0])


PANEL = "GRPO"
SAMPLES = {
    "ours": [0.30, 0.34, 0.29, 0.36, 0.31],
    "online": [0.33, 0.31, 0.35, 0.30, 0.32],
    "other": [0.10, 0.22, 0.15, 0.12, 0.30],
}
ROWS = []
for arm, numbers in SAMPLES.items():
    ROWS += [{"panel": PANEL, "arm": arm, "judge": number} for number in numbers]


def by_hand(first: str, second: str) -> tuple:
    """Difference, its standard error and Welch's degrees of freedom."""
    a, b = np.array(SAMPLES[first]), np.array(SAMPLES[second])
    va, vb = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    return a.mean() - b.mean(), (va + vb) ** 0.5, freedom


@pytest.mark.parametrize("second", ["online", "other"])
def test_welch_and_equivalence(second):
    difference, error, freedom = by_hand("ours", second)
    line = study.welch(ROWS, PANEL, "ours", second, "judge")
    half = stats.t.ppf(0.975, freedom) * error
    assert line["difference"] == pytest.approx(difference)
    assert (line["low"], line["high"]) == pytest.approx((difference - half, difference + half))
    assert line["p"] == pytest.approx(2 * stats.t.sf(abs(difference) / error, freedom))
    above = stats.t.sf((difference + 0.05) / error, freedom)  # that it is below -0.05
    below = stats.t.sf((0.05 - difference) / error, freedom)
    assert line["p_equivalent"] == pytest.approx(max(above, below))
    assert (line["p_equivalent"] < 0.05) == (second == "online")


def test_clipping_is_paired_by_seed_and_averaged_over_rates():
    rows = []
    generator = np.random.default_rng(0)
    differences = np.zeros(8)
    for panel in ("lr 2e-3", "lr 4e-3"):
        for sign, arm in ((1, "clipping"), (-1, "no clipping")):
            numbers = generator.normal(size=8)
            differences += sign * numbers / 2
            rows += [{"panel": panel, "arm": arm, "judge": number} for number in numbers]
    (line,) = study.clipping_test(rows)
    error = differences.std(ddof=1) / 8**0.5
    half = stats.t.ppf(0.975, 7) * error
    assert line["difference"] == pytest.approx(differences.mean())
    assert (line["low"], line["high"]) == pytest.approx(
        (differences.mean() - half, differences.mean() + half)
    )
    assert line["p"] == pytest.approx(2 * stats.t.sf(abs(differences.mean() / error), 7))


def test_holm_is_over_all_of_a_studys_tests():
    lines = study.holm([{"p": 0.04}, {"p": 0.01}, {"p": 0.03}])
    assert [line["p_holm"] for line in lines] == pytest.approx([0.06, 0.03, 0.06])


def test_main_effects_are_differences_of_means_in_a_balanced_design():
    generator = np.random.default_rng(1)
    rows = []
    for arm in study.PARTS:
        rows += [{"panel": "GRPO offline", "arm": arm, "judge": generator.normal()} for _ in range(3)]

    def mean(word: str) -> float:
        return np.mean([row["judge"] for row in rows if word in row["arm"].split(", ")])

    effects = [line["difference"] for line in study.syncing_test(rows)]
    assert effects == pytest.approx(
        [
            mean("k=16") - mean("no sync"),
            mean("clip") - mean("none"),
            mean("ε 0.5") - mean("ε 0.15"),
            mean("ε 2") - mean("ε 0.15"),
        ]
    )


def test_grids_grow_until_the_best_rate_is_inside_and_a_collapse_counts_as_untrained(monkeypatch):
    """Runs are replaced by a table of scores: 3e-5 is the best rate of one arm, and the other, whose runs
    collapse above 1e-4, does best with its second option."""
    best = {"low": 3e-5, "second": 1e-4}

    def score(arm, lr: float, more: str) -> float:
        return -abs(np.log10(lr / best[arm.name])) + 0.5 * ("--k 2" in more)

    def run_rows(runs, at):
        rows = []
        for arm, lr, seed, more in runs:
            failed = "diverged" if arm.name == "second" and lr > 1e-4 else ""
            row = {"panel": arm.panel, "arm": arm.name, "lr": lr, "seed": seed, "failed": failed}
            rows.append(row if failed else row | {"judge": score(arm, lr, more)})
        return rows

    monkeypatch.setattr(miniature, "run_rows", run_rows)
    low = miniature.Arm("A", "low", "grpo", "", (3e-4, 1e-3))
    second = miniature.Arm("A", "second", "grpo", "", (1e-4, 3e-4), options=("", "--k 2"))
    fixed = miniature.Arm("A", "fixed", "grpo", "", (1e-3,))
    plan = study.Study([low, second, fixed], range(21, 23), ("judge",), ("--tuning", "--report"), None)
    found, rows = study.tune(plan, {"A": {"judge": -3.0}}, "commit")
    assert found == {low: (3e-5, ""), second: (1e-4, "--k 2")}
    tried = {arm: sorted({row["lr"] for row in rows if row["arm"] == arm}) for arm in ("low", "second")}
    assert tried == {"low": [1e-5, 3e-5, 1e-4, 3e-4, 1e-3], "second": [3e-5, 1e-4, 3e-4]}
    assert {row["judge"] for row in rows if row["failed"]} == {-3.0}
    assert {row["seed"] for row in rows} == {1, 2, 3}


def test_seconds_to_what_online_has_at_half_of_its_steps():
    def points(arm: str, seed: int, scores: list[float], pace: float) -> list[dict]:
        base = {"panel": "GRPO", "arm": arm, "seed": seed, "judge": seed / 100}
        return [base | {"step": 16 * i, "seconds": pace * i, "score": s} for i, s in enumerate(scores)]

    rows = points("online", 21, [0.0, 0.1, 0.25, 0.375, 0.4], 5.0) + points(
        "online", 22, [0, 0, 0.5, 0.5, 0.5], 6.0
    )
    rows += points("offline", 21, [0.0, 0.4, 0.2, 0.2, 0.2], 1.0) + points("offline", 22, [0.0] * 5, 1.0)
    table = study.seconds_to_target(rows)
    assert [line["target"] for line in table] == pytest.approx([0.375] * 4)  # at step 32 of 64
    assert [line["seconds"] for line in table] == [15.0, 12.0, 1.0, ""]
    assert [line["all_seconds"] for line in table] == [20.0, 24.0, 4.0, 4.0]
    assert [line["judge"] for line in table] == [0.21, 0.22, 0.21, 0.22]


def read_csv(name: str) -> list[dict]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


COMMITTED = [name for name in study.STUDIES if (RESULTS / f"{name}_tests.csv").exists()]


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_results_are_those_of_the_plan_and_its_tests_those_of_the_rows(name):
    plan = study.STUDIES[name]
    reported = []
    for row in read_csv(name):
        for key in plan.metrics:
            row[key] = float(row[key])
        if row["phase"] == "reported":
            reported.append(row)
    seeds = {}
    for row in reported:
        seeds.setdefault((row["panel"], row["arm"]), []).append(int(row["seed"]))
    assert seeds == {(arm.panel, arm.name): list(plan.seeds) for arm in plan.arms}
    for line, saved in zip(plan.test(reported), read_csv(f"{name}_tests"), strict=True):
        for key, value in line.items():
            same = (
                saved[key] == value if isinstance(value, str) else float(saved[key]) == pytest.approx(value)
            )
            assert same, (saved, line)
