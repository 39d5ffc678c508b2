"""Computes the numbers that pages link, and leads each link to its line of lab/numbers.csv.

    python -m lab.numbers  # after a change of a page or a csv: names each number that differs from its line

A page has a number as a link with the name in quotes:

    [−0.103](numbers.csv "rate: game, lr 3e-4: humanline − no clip") [−0.116, −0.091]

The program adds the path and the line. An interval, ± or "of N" behind the link belongs to it. Names, whose
groups and arms `python -m lab.compare STUDY` prints:

    STUDY: GROUP: FIRST − SECOND       difference of two arms with its 95% interval, as lab/compare.py has it
    STUDY: GROUP: ARM                  mean of an arm, ± half of its interval
    STUDY: GROUP: before training      the untrained policy's mean
    STUDY: GROUP: FIRST > SECOND       the number of instances on which the first scores more, "18 of 20"
    STUDY: GROUP: ARM; METRIC          another metric than the study's own, also of differences
    STUDY: GROUP: ARM; METRIC; least   the least run, or the greatest

"GROUP: " may be left out if a study has one group. Other numbers have a function below, which returns
{name: number}. The csv has the linked numbers alone, new ones at its end. After a merge with a conflict in
it, take either side and run the program.
"""

import os
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from lab import compare
from lab.compare import LAB, before_training, path_of, read, scores
from lab.frontier import report

HUMANLINE = "offline + humanline"
PAPERS = ("humanline, paper's ε and β", "offline, paper's ε and β")
TUNED_BETA = ("humanline, tuned β", "offline, no clip, tuned β")
CSV = LAB / "numbers.csv"
# The link of a number, and what belongs to it
LINK = re.compile(r'\[([^][]+)\]\([\w./]*numbers\.csv(?:#L\d+)? "([^"]+)"\)')
NUMBER = r"[−+]?\d*\.?\d+"
LINKED = re.compile(LINK.pattern + rf"(?:\s+\[({NUMBER}),\s+({NUMBER})\]|\s+±\s+({NUMBER})|\s+of\s+(\d+))?")
FUNCTIONS = []  # (csvs, function that returns {name: number})


class Number(NamedTuple):
    value: float
    low: float = np.nan
    high: float = np.nan
    p: float = np.nan
    source: str = ""


def reads(*csvs: str) -> Callable:
    """Registers a function of numbers with the csvs that it reads."""

    def register(function):
        FUNCTIONS.append((csvs, function))
        return function

    return register


# === Numbers without a function of their own ===
@cache
def look_up(name: str) -> Number:
    """Computes the number of a name. Raises KeyError for a name that says no number."""
    if name in listed():
        return listed()[name]
    study, _, rest = name.partition(": ")
    what, metric, extreme, *_ = [*rest.split("; "), "", ""]
    group, _, arms = what.rpartition(": ")
    try:
        source = " ".join(path_of(part).relative_to(LAB).as_posix() for part in study.split(" and "))
        groups = list(read(study).group.unique())
    except ValueError:
        raise KeyError(f"{name!r}: no study {study}, and no function of lab/numbers.py") from None
    if not group and len(groups) == 1:
        (group,) = groups
    if group not in groups:
        raise KeyError(f"{name!r}: the groups of {study} are {groups}")
    if metric and metric not in read(study):
        raise KeyError(f"{name!r}: {study}.csv has no column {metric}")
    if arms == "before training":
        return Number(before_training(study, group, metric), source="untrained.csv")
    table = scores(study, group, metric)
    named = re.split(" − | > ", arms)
    if len(named) > 2 or not set(named) <= set(table):
        raise KeyError(f"{name!r}: the arms of {study}, {group} are {list(table)}")
    if " − " in arms:
        found = compare.difference(study, group, *named, metric)
        return Number(*found[:4], source)
    if " > " in arms:
        return Number((table[named[0]] > table[named[1]]).sum(), 0, len(table), source=source)
    values = table[arms]
    if extreme:
        rows = read(study).query("group == @group and arm == @arms")[metric]
        return Number({"least": rows.min(), "greatest": rows.max()}[extreme], source=source)
    half = compare.half_interval(values)
    return Number(values.mean(), values.mean() - half, values.mean() + half, source=source)


@cache
def listed() -> dict[str, Number]:
    """Returns the numbers of all functions."""
    numbers = {}
    for csvs, function in FUNCTIONS:
        source = " ".join(path_of(csv).relative_to(LAB).as_posix() for csv in csvs)
        for name, found in function().items():
            values = found[:4] if isinstance(found, tuple) else (found,)
            numbers[name] = Number(*values)._replace(source=source)
    return numbers


# === Numbers with a function ===
PLANNED = {  # the planned tests whose p-values a page has: (group, first, second, metric, margin)
    "sums": [
        ("sums", "humanline", "ε 0.2"),
        ("sums", "humanline", "no clip"),
        ("sums", "online", "humanline"),
    ],
    "rate": [
        ("game, lr 3e-4", "humanline", "no clip", "curve"),
        ("game, lr 3e-4", "clipping alone, no ε", "no clip", "curve"),
        ("game, lr 1e-4", "humanline, no ε", "no clip", "curve", 0.02),  # a test of equivalence
        ("DPO, lr 3e-4", "humanline", "syncing alone", "judge"),
        ("DPO, lr 1e-3", "humanline", "syncing alone", "judge"),
    ],
}


@reads("sums", "rate")
def holms_p() -> dict:
    found = {}
    for study, tests in PLANNED.items():
        lines = [compare.difference(study, *test) for test in tests]
        p = [line.p if len(test) < 5 else line.p_equivalent for test, line in zip(tests, lines)]
        for (group, first, second, *_), corrected in zip(tests, compare.holm(p)):
            found[f"Holm's p, {study}: {group}: {first} − {second}"] = corrected
    return found


@reads("baselines", "controls")
def thirty_comparisons() -> dict:
    """Of humanline with the default clip or β on stories, GRPO and KTO, and in shell games."""
    leads = []
    for study, group, (first, second) in (
        ("baselines", "GRPO", PAPERS),
        ("baselines", "KTO", PAPERS),
        ("controls", "game", ("humanline, k=16", "ε 0.2")),
    ):
        table = scores(study, group)
        leads.append(table[first] - table[second])
    means = [lead.mean() for lead in leads]
    assert [(lead > 0).sum() for lead in leads] == [12, 12, 6]  # the pages say "all thirty"
    return {
        "thirty comparisons: least mean lead": min(means),
        "thirty comparisons: greatest mean lead": max(means),
    }


@reads("controls")
def recovered_accuracy() -> dict:
    """Shares of the final accuracy that old samples cost, in shell games."""
    ends = scores("controls", "game", "eval/accuracy").mean()
    arms = ("humanline, k=16", "no clip", "syncing alone, k=16")
    shares = (ends[[*arms]] - ends["ε 0.2"]) / (ends["S = 1"] - ends["ε 0.2"])
    return {f"controls: share that {arm} recovers": shares[arm] for arm in arms}


@reads("clipping", "figure5_dpo")
def clipping_at_two_rates() -> dict:
    """Clipping − no clipping, paired by seed, as a mean over two rates."""
    found = {}
    for name, study, panels in (
        ("clipping, both rates", "clipping", ["lr 2e-3", "lr 4e-3"]),
        ("figure5_dpo, both rates", "figure5_dpo", ["DPO on tales, lr 3e-4", "DPO on tales, lr 1e-3"]),
    ):
        tables = [scores(study, panel) for panel in panels]
        leads = [table["clipping"] - table["no clipping"] for table in tables]
        found[f"{name}: clipping − no clipping"] = compare.paired(sum(leads) / len(leads))
        for panel, lead in zip(panels, leads):
            found[f"{study}, {panel}, paired by seed: clipping − no clipping"] = compare.paired(lead)
    return found


@reads("instances")
def without_one_task() -> dict:
    """Leads without the task that gives three fifths of the lead."""
    found = {}
    for group in ("KTO", "GRPO"):
        table = scores("instances", group).drop("4")
        lead = compare.paired(table[HUMANLINE] - table["offline"])
        found[f"instances without task 4: {group}: {HUMANLINE} − offline"] = lead
    return found


def effects(*without: str) -> list[tuple]:
    """Returns the main effects of syncing, clipping and ε (0.5, 2) in `syncing`, by least squares."""
    rows = read("syncing")
    rows = rows[(rows.arm != "k=1") & ~rows.arm.isin(without)]
    parts = rows.arm.str.split(", ", expand=True)
    columns = [parts[0] == "k=16", parts[1] == "clip", parts[2] == "ε 0.5", parts[2] == "ε 2"]
    A = np.column_stack([np.ones(len(rows)), *columns]).astype(float)
    y = rows.judge.to_numpy()
    weights, *_ = np.linalg.lstsq(A, y, rcond=None)
    freedom = len(y) - A.shape[1]
    errors = np.sqrt(np.diag(np.linalg.inv(A.T @ A)) * ((y - A @ weights) ** 2).sum() / freedom)
    half = stats.t.ppf(0.975, freedom) * errors
    return [*zip(weights, weights - half, weights + half)][1:]


@reads("syncing")
def effects_of_parts() -> dict:
    """Main effects, with and without an arm that fails, and of syncing at ε 0.15."""
    parts = ("syncing", "clipping", "ε 0.5", "ε 2")
    found = {f"syncing, effect: {part}": effect for part, effect in zip(parts, effects())}
    for part, effect in zip(parts, effects("k=16, clip, ε 2")):
        found[f"syncing, effect without one arm: {part}"] = effect
    rows = read("syncing")
    rows = rows[rows.arm.str.endswith("ε 0.15")]
    synced = rows.arm.str.startswith("k=16")
    return found | {"syncing, ε 0.15: syncing": compare.welch(rows[synced].judge, rows[~synced].judge)}


def worst_quarter(arm_scores: np.ndarray) -> np.ndarray:
    """Returns the mean of the lowest quarter of the scores along the last axis."""
    return np.sort(arm_scores)[..., : arm_scores.shape[-1] // 4].mean(-1)


@reads("tasks")
def worst_quarters() -> dict:
    """Differences of each arm's own worst quarter, by a bootstrap over tasks with both arms' scores."""
    found = {}
    pairs = [("GRPO", arm) for arm in ("offline", "offline, ε 0.5", "offline, no clip")]
    for group, second in [*pairs, ("KTO", "offline")]:
        arms = [scores("tasks", group)[arm].to_numpy() for arm in (HUMANLINE, second)]
        drawn = np.random.default_rng(0).integers(20, size=(20_000, 20))
        draws = worst_quarter(arms[0][drawn]) - worst_quarter(arms[1][drawn])
        lead = worst_quarter(arms[0]) - worst_quarter(arms[1])
        name = f"tasks, worst quarter: {group}: {HUMANLINE} − {second}"
        found[name] = (lead, *np.quantile(draws, (0.025, 0.975)))
    return found


def score_at(row: pd.Series, nats: float) -> float:
    """Returns the judge's score of a run of `stories` when it first reached a KL, between two checkpoints."""
    steps = range(0, 121, 15)
    for step, following in zip(steps, steps[1:]):
        if row[f"kl@{following}"] >= nats:
            kls = [row[f"kl@{step}"], row[f"kl@{following}"]]
            return np.interp(nats, kls, [row[f"judge@{step}"], row[f"judge@{following}"]])
    return np.nan


@reads("stories")
def at_equal_distance() -> dict:
    """GRPO's arms of `stories` at a KL of 5 nats."""
    rows = read("stories").query("group == 'GRPO'")
    rows = rows.assign(score=rows.apply(score_at, axis=1, nats=5))
    table = rows.pivot(index="instance", columns="arm", values="score")
    lead = compare.paired((table[HUMANLINE] - table["offline"]).dropna())
    return {f"stories at 5 nats: GRPO: {HUMANLINE} − offline": lead}


@reads("baselines")
def at_equal_shares() -> dict:
    """GRPO's lead on stories at equal shares of texts that end, by a regression."""
    judge, ended = (scores("baselines", "GRPO", column) for column in ("judge", "finished"))
    lead, more = (table[TUNED_BETA[0]] - table[TUNED_BETA[1]] for table in (judge, ended))
    fit = stats.linregress(more, lead)
    half = fit.intercept_stderr * stats.t.ppf(0.975, len(lead) - 2)
    name = "baselines where equally many texts end: GRPO: " + " − ".join(TUNED_BETA)
    return {name: (fit.intercept, fit.intercept - half, fit.intercept + half)}


@reads("sums")
def gain_of_the_last_steps() -> dict:
    """By how much more humanline gains than ε 0.2 from step 16 to step 32."""
    gains = scores("sums", "sums", "eval/accuracy@32") - scores("sums", "sums", "eval/accuracy@16")
    return {
        "sums, from step 16 to 32: humanline − ε 0.2": compare.paired(gains["humanline"] - gains["ε 0.2"])
    }


@reads("stories")
def tuned_settings() -> dict:
    counts = read("stories", "tuning").groupby(["panel", "arm"]).size()
    return {
        f"stories, tuned settings: {group}: {arm}": counts[f"{group} 1", arm]
        for group in ("KTO", "DPO")
        for arm in (HUMANLINE, "offline")
    }


@reads("chat")
def chat() -> dict:
    """Means over the seeds of a phase, arm and rate, and minutes of a run."""
    rows = read("chat", "").query("panel == 'chat polite'")
    found = {"log 2": np.log(2)}
    for (phase, arm, lr), runs in rows.groupby(["phase", "arm", "lr"]):
        for metric in ("eval/loss", "eval/accuracy", "kl"):
            found[f"chat polite, {phase}: {arm}, lr {lr:.0e}; {metric}".replace("e-0", "e-")] = runs[
                metric
            ].mean()
    minutes = rows.seconds / 60
    return found | {"chat polite: least minutes": minutes.min(), "chat polite: most minutes": minutes.max()}


@reads("first_run")
def first_runs() -> dict:
    """Accuracy after ten steps at 5e-6, and where README's commands end: three seeds, two processors."""
    rows = pd.read_csv(path_of("first_run"))
    ten = rows[(rows.metric == "eval/accuracy") & rows.command.str.contains("--num-steps 10")].after
    found = {"first_run: accuracy after ten steps": ten.item()}
    toys = rows[rows.metric.eq("eval/reward") & rows.command.str.contains(" grpo_humanline.py")]
    arms = toys.command.str.extract(r"py (.*?) --seed")[0]
    for flags, name in (
        ("--k 16", "humanline"),
        ("--no-humanline", "default"),
        ("--no-humanline --epsilon 1e9", "no-clip"),
    ):
        ends = toys[arms == flags].after
        found |= {f"toy/{name}/least": ends.min(), f"toy/{name}/greatest": ends.max()}
    return found


@reads("own")
def own_pairs() -> dict:
    """The share of answers with the behaviour, and others: of tuning by setting, of the report by arm."""
    rows = pd.read_csv(path_of("own"))
    tuning = rows.panel == "brief"
    passes, rate = rows.instance[tuning].str.extract(r"(\d) passes (\S+)").T.to_numpy()
    arms = rows.arm.str.replace(" ", "_")
    rows["name"] = "own/" + rows.panel.str.replace(" ", "/") + "/" + arms
    rows.loc[tuning, "name"] = "own/" + arms[tuning] + "/" + passes + "/" + rate
    found = {}
    for name, runs in rows.groupby("name"):
        found |= {f"{name}/{metric}": runs[metric].mean() for metric in ("share", "share_256", "right", "kl")}
        found |= {f"{name}/share/least": runs.share.min(), f"{name}/share/greatest": runs.share.max()}
    return found


@reads("real_run")
def real_run() -> dict:
    curves = pd.read_csv(path_of("real_run")).pivot(index="step", columns="seed", values="accuracy")
    ends = curves.iloc[-1]
    found = {f"real_run: end of seed {seed}": end for seed, end in ends.items()}
    found |= {"real_run: before": curves.iloc[0].mean(), "real_run: end": ends.mean()}
    return found | {"real_run: least end": ends.min(), "real_run: greatest end": ends.max()}


@reads("learning")
def learning() -> dict:
    """Rewards at step 320 of default runs."""
    rows = pd.read_csv(path_of("learning")).query("step == 320")
    found = {}
    for (script, arm), runs in rows.groupby(["script", "arm"]):
        found[f"learning: {script}: {arm}"] = runs.score.mean()
        found[f"learning: {script}: {arm}; least"] = runs.score.min()
        found[f"learning: {script}: {arm}; greatest"] = runs.score.max()
    return found


@reads("time")
def times() -> dict:
    """Medians of seconds: of all steps, of online's, and to the mean that online has at half its steps."""
    table = pd.read_csv(path_of("time"))
    found, ends = {}, {}
    for (panel, arm), rows in table.groupby(["panel", "arm"]):
        online = table[(table.panel == panel) & table.arm.isin(("S = 1", "online"))]
        target = online.score[online.step == online.step.max() // 2].mean()
        reached = rows[rows.score >= target].groupby("seed").seconds.min()
        ends[panel, arm] = rows.groupby("seed").seconds.max().median()
        found[f"time: {panel}: {arm}: all steps"] = ends[panel, arm]
        found[f"time: {panel}: {arm}: to online's score"] = reached.median()
    for panel in ("GRPO", "KTO"):
        share = ends[panel, "offline + humanline, k=32"] / ends[panel, "online"]
        found[f"time: {panel}: offline + humanline, k=32 / online"] = share
    return found


@reads("table6")
def bounds() -> dict:
    """Holm's p of other bounds against humanline's."""
    table = scores("table6", "DPO on tales")
    others = [arm for arm in table if arm != "[-1.5, 1.5]"]
    p = [compare.welch(table[arm], table["[-1.5, 1.5]"]).p for arm in others]
    return {f"Holm's p, table6: {arm}": value for arm, value in zip(others, compare.holm(p))}


@reads("assumptions")
def shares_beyond_the_bounds() -> dict:
    rows = pd.read_csv(path_of("assumptions"))
    return {f"assumptions: {row.run}: k = {row.k}": row.beyond for row in rows.itertuples()}


@reads("frontier")
def score_against_distance() -> dict:
    """Means of arms with their intervals, and the differences and p-values of the tests."""
    return report.numbers()


# === Pages ===
def pages() -> list[Path]:
    """Returns all pages of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=LAB.parent, capture_output=True, text=True, check=True).stdout
    return [LAB.parent / name for name in names.splitlines() if (LAB.parent / name).exists()]


def linked_names() -> list[str]:
    """Returns the names of all linked numbers: as they stand in the csv, then the new ones."""
    linked = {name for page in pages() for _, name in LINK.findall(page.read_text(encoding="utf-8"))}
    listed = [name for name in pd.read_csv(CSV).name if name in linked] if CSV.exists() else []
    return listed + sorted(linked - set(listed))


def table_of_numbers() -> pd.DataFrame:
    """Computes a line for each linked number."""
    rows = [(name, *look_up(name)) for name in linked_names()]
    return pd.DataFrame(rows, columns=["name", *Number._fields])


def with_lines(page: Path) -> str:
    """Returns the text of a page in which each link of a number leads to the line of its name."""
    lines = {name: number for number, name in enumerate(pd.read_csv(CSV).name, 2)}
    target = os.path.relpath(CSV, page.parent)
    return LINK.sub(
        lambda match: f'[{match[1]}]({target}#L{lines.get(match[2])} "{match[2]}")',
        page.read_text(encoding="utf-8"),
    )


def rounds_to(value: float, shown: str) -> bool:
    """Returns whether a value is the number that a page shows, such as 0.40, +0.40, −3, 96% or 3e-7."""
    word = shown.strip("*+").replace("−", "-")
    if not re.fullmatch(r"-?\d*\.?\d+(e-\d+)?%?", word):
        return False
    if "e" in word:
        return f"{value:.0e}".replace("e-0", "e-") == word
    if word.endswith("%"):
        word, value = word[:-1], 100 * value
    return abs(float(word) - value) <= 0.5000001 * 10.0 ** -len(word.partition(".")[2])


def wrong_numbers(text: str) -> list[str]:
    """Returns a line for each linked number of a text that, with its interval, is not that of its name."""
    wrong = []
    for match in LINKED.finditer(text):
        shown, name, low, high, half, count = match.groups()
        line = look_up(name)
        parts = [(shown, line.value), (low, line.low), (high, line.high), (count, line.high)]
        parts.append((half, (line.high - line.low) / 2))
        off = [part for part, value in parts if part and not rounds_to(value, part)]
        if off:
            computed = f"{line.value:.4g} [{line.low:.4g}, {line.high:.4g}]"
            wrong.append(f"{', '.join(off)} is not of {computed}, {name!r}")
    return wrong


def main():
    table_of_numbers().to_csv(CSV, index=False)
    for page in pages():
        page.write_text(with_lines(page), encoding="utf-8")
        for wrong in wrong_numbers(page.read_text(encoding="utf-8")):
            print(f"{page.relative_to(LAB.parent)}: {wrong}")


if __name__ == "__main__":
    main()
