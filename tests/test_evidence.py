"""docs/replication.md and paper/studies.md: every number of our results follows from the csvs."""

import re

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from conftest import ROOT
from scipy.stats import ttest_1samp
from test_study import reported

from paper import learning, pictures, study

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


def rounds_to(word: str, value: float) -> bool:
    """Whether a number as it is written is the value, to as many places."""
    places = len(word.partition(".")[2])
    return abs(float(word.replace("−", "-")) - value) <= 0.5000001 * 10.0**-places


def numbers_of(name: str) -> tuple[list[float], list[tuple]]:
    """The numbers of a csv's arms, tests and tuning, and (mean, half of the interval) of its arms."""
    lines = pictures.read(pictures.RESULTS, f"{name}_arms")
    halves = [(line["mean"], (line["high"] - line["low"]) / 2) for line in lines if "high" in line]
    if (pictures.RESULTS / f"{name}_tests.csv").exists():
        lines += pictures.read(pictures.RESULTS, f"{name}_tests")
    known = tuning_means(name) if name != "time" else []
    for line in lines:
        known += [value for value in line.values() if isinstance(value, float)]
    return known, halves


def tuning_means(name: str) -> list[float]:
    """Of every choice of an arm, over the seeds and tasks of the tuning."""
    scores = {}
    for row in pictures.select(pictures.read(pictures.RESULTS, name), phase="tuning"):
        choice = re.sub(r"--seed \d+|--out \S+|(instances|stories)/\d+", "", row["command"])
        scores.setdefault((row["arm"], choice), []).append(row.get("judge", np.nan))
    return [np.mean(of_choice) for of_choice in scores.values()]


def of_times() -> list[float]:
    """Medians, least and most of the seconds of a timed arm."""
    table = pd.DataFrame(pictures.read(pictures.RESULTS, "time_arms"))
    by_arm = table.groupby(["panel", "arm"])[["seconds", "all_seconds"]]
    return by_arm.agg(["min", "median", "max"]).to_numpy().ravel().tolist()


def lead(name: str, panel: str, *arms: str) -> np.ndarray:
    """The judge's score of an arm minus that of another one, by seed."""
    first, second = (study.values(reported(name), panel, arm, "judge") for arm in arms)
    return first - second


def paired_intervals() -> list[tuple]:
    """What clipping is worth at a rate, paired by seed; and humanline's lead without the fourth task."""
    leads = [lead("clipping", panel, "clipping", "no clipping") for panel in ("lr 2e-3", "lr 4e-3")]
    for script in ("KTO", "GRPO"):
        panels = [f"{script} {i}" for i in (1, 2, 3, 5)]
        tasks = [lead("instances", panel, "offline + humanline", "offline").mean() for panel in panels]
        leads.append(np.array(tasks))
    return [(numbers.mean(), *ttest_1samp(numbers, 0).confidence_interval()) for numbers in leads]


def of_syncing_at_the_narrow_epsilon() -> tuple:
    rows = []
    for row in reported("syncing"):
        if row["arm"].endswith("ε 0.15"):
            rows.append(row | {"arm": row["arm"].partition(",")[0]})
    line = study.welch(rows, "GRPO offline", "k=16", "no sync", "judge")
    return line["difference"], line["low"], line["high"]


def of_a_doubling() -> tuple:
    """What the reward loses with each doubling of k from 16 on."""
    rows = [(int(row["arm"].removeprefix("k=")), row["eval/reward"]) for row in reported("figure8")]
    table = pd.DataFrame(rows, columns=["k", "reward"])
    fit = smf.ols("reward ~ np.log2(k)", table[table.k >= 16]).fit()
    return fit.params["np.log2(k)"], *fit.conf_int().loc["np.log2(k)"]


@pytest.fixture(scope="module")
def differences() -> list[tuple]:
    """(difference, low, high) of planned tests, and of what was compared after the runs."""
    lines = []
    for name in NAMES:
        lines += [study.welch(reported(name), *pair) for pair in POST_HOC.get(name, [])]
        if (pictures.RESULTS / f"{name}_tests.csv").exists():
            lines += pictures.read(pictures.RESULTS, f"{name}_tests")
    failing = "k=16, clip, ε 2"
    lines += study.syncing_test([row for row in reported("syncing") if row["arm"] != failing])
    found = [(line["difference"], line["low"], line["high"]) for line in lines]
    found += [*paired_intervals(), of_syncing_at_the_narrow_epsilon(), of_a_doubling()]
    return found + [(-middle, -high, -low) for middle, low, high in found]


def is_among(words: tuple, known: list[tuple]) -> bool:
    return any(all(map(rounds_to, words, numbers)) for numbers in known)


def stray(text: str, name: str, differences: list[tuple]) -> list[str]:
    """What a text says of our results that this csv does not have: intervals, a ± b, other decimals."""
    known, halves = numbers_of(name)
    known += of_times()
    found = [words for words in re.findall(INTERVAL, text) if not is_among(words, differences)]
    text = re.sub(INTERVAL, "", text)
    found += [words for words in re.findall(HALF, text) if not is_among(words, halves)]
    for word in re.findall(rf"(?<![\w.]){NUMBER}", re.sub(HALF, "", text)):
        if not any(rounds_to(word, value) for value in known):
            found.append(word)
    return found


def test_every_row_of_a_study_is_in_its_csv(differences):
    paper = r"\d\d\.\d\d( → \d\d\.\d\d)?|(?<=[εβ] )[\d.]+"  # LC-WR, and settings
    checked = 0
    for part in re.split(r"^#+ ", STUDIES, flags=re.MULTILINE):
        heading = re.match(r"`(\w+)`", part)
        rows = re.findall(r"^\| (?!.*---).*", part, re.MULTILINE) if heading else []
        for row in rows:
            for cell in row.strip("| ").split(" | ")[1:-1]:  # between a claim and its outcome
                assert not stray(re.sub(paper, "", cell), heading[1], differences), cell
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
            assert not stray(numbers, links[link[1]], differences), line
            checked += 1
    assert checked >= 12


@pytest.mark.parametrize("text", [CLAIMS, STUDIES, README], ids=["replication.md", "studies.md", "README"])
def test_every_interval_of_the_text_follows_from_a_csv(text, differences):
    halves = [pair for name in NAMES for pair in numbers_of(name)[1]]
    for pattern, known in ((INTERVAL, differences), (HALF, halves)):
        for words in re.findall(pattern, text):
            assert is_among(words, known), words


def test_a_number_that_is_in_no_csv_is_noticed(differences):
    line = pictures.read(pictures.RESULTS, "figure1_arms")[0]
    right = f"{line['mean']:.2f} ± {line['high'] - line['mean']:.2f}, 0.254 [0.244, 0.264]"
    assert not stray(right, "figure1", differences)
    assert len(stray("0.254 [0.244, 0.275], 0.25 ± 9.75, 0.5555", "figure1", differences)) == 3


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
