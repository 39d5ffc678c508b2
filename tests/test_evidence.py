"""docs/replication.md and paper/studies.md: every number of our results follows from the csvs."""

import re
import sys

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from conftest import ROOT
from scipy.stats import ttest_1samp

sys.path.insert(0, str(ROOT))
from paper import learning, pictures, study  # noqa: E402

CLAIMS = (ROOT / "docs/replication.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
STUDIES = (ROOT / "paper/studies.md").read_text(encoding="utf-8")
NAMES = sorted(path.stem.removesuffix("_arms") for path in pictures.RESULTS.glob("*_arms.csv"))
NUMBER = r"[−-]?\d*\.\d+"
INTERVAL = rf"({NUMBER}) \[({NUMBER}),\s+({NUMBER})\]"  # a difference and its 95% interval
HALF = rf"({NUMBER}) ± ({NUMBER})"  # a mean and half of its interval

# Comparisons of two arms that were chosen after the runs: (panel, first, second, metric).
POST_HOC = {
    "figure1": [("DPO", "offline + humanline", "offline", "judge")],
    "figure6": [("DPO", "quartile 1", "quartile 4", "eval/reward")],
    "figure8": [("GRPO", "k=1", "k=16", "eval/reward")],
    "dpo": [("DPO", "online + humanline, k=16", "online", "judge")],
    "syncing": [
        ("GRPO offline", "k=16, clip, ε 0.15", "no sync, clip, ε 2", "judge"),
        ("GRPO offline", "k=16, clip, ε 0.15", "no sync, none, ε 2", "judge"),
        ("GRPO offline", "k=16, clip, ε 0.15", "k=16, none, ε 0.15", "judge"),
        ("GRPO offline", "no sync, clip, ε 2", "no sync, none, ε 2", "judge"),
    ],
}


def reported(name: str) -> list[dict]:
    return pictures.select(pictures.read(pictures.RESULTS, name), phase="reported")


def rounds_to(word: str, value: float) -> bool:
    """Whether a number as it is written is the value, to as many places."""
    places = len(word.partition(".")[2])
    return abs(float(word.replace("−", "-")) - value) <= 0.5000001 * 10.0**-places


def means_of(name: str) -> tuple[list[float], list[tuple]]:
    """The numbers of a csv's arms, tests and tuning, and (mean, half of the interval) of its arms."""
    known = tuning_means(name)
    halves = []
    for line in pictures.read(pictures.RESULTS, f"{name}_arms"):
        if "high" in line:
            halves.append((line["mean"], (line["high"] - line["low"]) / 2))
        known += [value for value in line.values() if isinstance(value, float)]
    if (pictures.RESULTS / f"{name}_tests.csv").exists():
        for line in pictures.read(pictures.RESULTS, f"{name}_tests"):
            known += [value for value in line.values() if isinstance(value, float)]
    return known, halves


def tuning_means(name: str) -> list[float]:
    """Of every choice of an arm, over the seeds and tasks of the tuning."""
    rows = pictures.select(pictures.read(pictures.RESULTS, name), phase="tuning") if name != "time" else []
    scores = {}
    for row in rows:
        choice = re.sub(r"--seed \d+|--out \S+|(instances|stories)/\d+", "", row["command"])
        scores.setdefault((row["arm"], choice), []).append(row.get("judge", np.nan))
    return [np.mean(of_choice) for of_choice in scores.values()]


def of_times() -> list[float]:
    """Medians, least and most of the seconds of a timed arm."""
    table = pd.DataFrame(pictures.read(pictures.RESULTS, "time_arms"))
    by_arm = table.groupby(["panel", "arm"])[["seconds", "all_seconds"]]
    return by_arm.agg(["min", "median", "max"]).to_numpy().ravel().tolist()


def of_four_tasks(script: str) -> tuple:
    """The mean lead of humanline over offline without the fourth task."""
    leads = []
    for i in (1, 2, 3, 5):
        arms = ("offline + humanline", "offline")
        first, second = (study.values(reported("instances"), f"{script} {i}", arm, "judge") for arm in arms)
        leads.append(first.mean() - second.mean())
    return np.mean(leads), *ttest_1samp(leads, 0).confidence_interval()


def of_one_rate(panel: str) -> tuple:
    """What clipping is worth at a rate, paired by seed."""
    arms = ("clipping", "no clipping")
    first, second = (study.values(reported("clipping"), panel, arm, "judge") for arm in arms)
    return np.mean(first - second), *ttest_1samp(first - second, 0).confidence_interval()


def of_syncing_at_the_narrow_epsilon() -> tuple:
    rows = []
    for row in reported("syncing"):
        if row["arm"].endswith("ε 0.15"):
            rows.append(row | {"arm": row["arm"].partition(",")[0]})
    line = study.welch(rows, "GRPO offline", "k=16", "no sync", "judge")
    return line["difference"], line["low"], line["high"]


def of_a_doubling() -> tuple:
    """What the reward loses with each doubling of k from 16 on."""
    rows = []
    for row in reported("figure8"):
        k = int(row["arm"].removeprefix("k="))
        if k >= 16:
            rows.append({"reward": row["eval/reward"], "doublings": np.log2(k)})
    fit = smf.ols("reward ~ doublings", pd.DataFrame(rows)).fit()
    return fit.params["doublings"], *fit.conf_int().loc["doublings"]


def intervals() -> list[tuple]:
    """(difference, low, high) of planned tests, and of what was compared after the runs."""
    found = []
    for name in NAMES:
        lines = [study.welch(reported(name), *pair) for pair in POST_HOC.get(name, [])]
        if (pictures.RESULTS / f"{name}_tests.csv").exists():
            lines += pictures.read(pictures.RESULTS, f"{name}_tests")
        found += [(line["difference"], line["low"], line["high"]) for line in lines]
    failing = "k=16, clip, ε 2"
    for line in study.syncing_test([row for row in reported("syncing") if row["arm"] != failing]):
        found.append((line["difference"], line["low"], line["high"]))
    found += [of_four_tasks("KTO"), of_four_tasks("GRPO"), of_one_rate("lr 2e-3"), of_one_rate("lr 4e-3")]
    found += [of_syncing_at_the_narrow_epsilon(), of_a_doubling()]
    return found + [(-middle, -high, -low) for middle, low, high in found]


def stray(text: str, names: list[str], differences: list[tuple]) -> list[str]:
    """What a text says of our results that no csv of these names has: intervals, a ± b, other decimals."""
    known, halves = of_times(), []
    for name in names:
        numbers, pairs = means_of(name)
        known += numbers
        halves += pairs
    found = []
    for words in re.findall(INTERVAL, text):
        if not any(all(map(rounds_to, words, triple)) for triple in differences):
            found.append("{} [{}, {}]".format(*words))
    text = re.sub(INTERVAL, "", text)
    for words in re.findall(HALF, text):
        if not any(all(map(rounds_to, words, pair)) for pair in halves):
            found.append("{} ± {}".format(*words))
    for word in re.findall(rf"(?<![\w.]){NUMBER}", re.sub(HALF, "", text)):
        if not any(rounds_to(word, value) for value in known):
            found.append(word)
    return found


def cells_of_results(text: str) -> list[str]:
    """Of every row of its tables, the cells that are between a claim and its outcome."""
    cells = []
    for line in text.splitlines():
        if line.startswith("| ") and "---" not in line:
            cells += line.strip("| ").split(" | ")[1:-1]
    return cells


@pytest.fixture(scope="module")
def differences() -> list[tuple]:
    return intervals()


def test_every_row_of_a_study_is_in_its_csv(differences):
    paper = r"\d\d\.\d\d( → \d\d\.\d\d)?|(?<=[εβ] )[\d.]+"  # LC-WR, and settings
    checked = 0
    for part in re.split(r"^#+ ", STUDIES, flags=re.MULTILINE):
        heading = re.match(r"`(\w+)`", part)
        if heading:
            for cell in cells_of_results(part):
                assert not stray(re.sub(paper, "", cell), [heading[1]], differences), cell
                checked += bool(re.search(NUMBER, cell))
    assert checked >= 60


def test_every_claim_is_in_the_csv_that_its_row_leads_to(differences):
    links = dict(re.findall(r"^\[(\w+)\]: \S+?#(\w+)$", CLAIMS, re.MULTILINE))
    checked = 0
    for line in CLAIMS.splitlines():
        link = re.search(r"\]\[(\w+)\] \|$", line)
        if link and link[1] in links:
            *_, here, verdict, _ = line.strip("| ").split(" | ")
            assert verdict in ("holds", "open", "reversed", "on a par", "not run"), line
            numbers = re.sub(r"(?<=KTO )0\.28|(?<=GRPO )0\.20|DPO 0\.008, GRPO −0\.0001", "", here)
            assert not stray(numbers, [links[link[1]]], differences), line
            checked += 1
    assert checked >= 12


@pytest.mark.parametrize("text", [CLAIMS, STUDIES, README], ids=["replication.md", "studies.md", "README"])
def test_every_interval_of_the_text_follows_from_a_csv(text, differences):
    halves = [pair for name in NAMES for pair in means_of(name)[1]]
    for words in re.findall(INTERVAL, text):
        assert any(all(map(rounds_to, words, triple)) for triple in differences), words
    for words in re.findall(HALF, text):
        assert any(all(map(rounds_to, words, pair)) for pair in halves), words


def test_a_number_that_is_in_no_csv_is_noticed(differences):
    line = pictures.read(pictures.RESULTS, "figure1_arms")[0]
    half = line["high"] - line["mean"]
    right = f"{line['mean']:.2f} ± {half:.2f}, 0.254 [0.244, 0.264]"
    wrong = f"{line['mean']:.2f} ± {half + 0.3:.2f}"
    assert stray(right, ["figure1", "dpo"], differences) == []
    assert stray(f"0.254 [0.244, 0.275], {wrong}, 0.5555", ["figure1"], differences) == [
        "0.254 [0.244, 0.275]",
        wrong,
        "0.5555",
    ]


def test_what_else_the_claims_say_follows_from_the_csvs():
    """The share of time, and the trust region's differences."""
    table = pd.DataFrame(pictures.read(pictures.RESULTS, "time_arms"))
    median = table.groupby(["panel", "arm"]).all_seconds.median()
    for script, share in (("KTO", "0.28"), ("GRPO", "0.20")):
        assert rounds_to(share, median[script, "offline + humanline, k=32"] / median[script, "online"])
    for script, difference in (("DPO", "0.008"), ("GRPO", "−0.0001")):
        arms = ("trust region", "offline + humanline")
        line = study.welch(reported("figure10"), script, *arms, "judge")
        assert rounds_to(difference, line["difference"]) and line["p_equivalent"] < 0.05


def test_the_learning_curves_are_of_the_planned_runs_from_the_first_step_to_the_last():
    table = pd.read_csv(pictures.RESULTS / "learning.csv")
    seeds = table.seed.nunique()
    planned = {line: (script, arm, seed) for script, arm, seed, line in learning.runs(seeds)}
    assert set(table.command) == set(planned) and seeds >= 2
    for line, points in table.groupby("command"):
        ((script, arm, seed),) = set(zip(points.script, points.arm, points.seed))
        assert (script, arm, seed) == planned[line]
        assert points.step.tolist() == list(range(0, 321, 32))
        assert points.judge.notna().tolist() == [False] * 10 + [True]


def test_the_curves_of_math_are_those_of_the_study():
    table = pd.DataFrame(learning.math_rows())
    for arm, points in table[table.step > 0].groupby("arm"):
        (name,) = [name for name, label in learning.MATH.items() if label == arm]
        (line,) = pictures.select(pictures.read(pictures.RESULTS, "stale_arms"), arm=name, metric="curve")
        assert points.seed.nunique() == 10
        assert points.score.mean() == pytest.approx(line["mean"])
