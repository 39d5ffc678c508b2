"""Studies of what the figures could not answer: arms, seeds, tuning and tests, fixed before they were run.

    python paper/miniature.py stale

An arm's learning rate, and what else is tuned, is the best mean of the primary metric over three tuning
seeds, on prompts or problems that the report does not use. Where the best rate is at an end of its grid, the
grid grows by one rate until it is not. A collapsed run counts as the untrained policy's score.
Written are paper/results/NAME.csv (a row per run), NAME_arms.csv (means, intervals), NAME_tests.csv (the
tests fixed here) and NAME.png.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
import statsmodels.formula.api as smf
from scipy.stats import ttest_1samp
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

from paper import miniature
from paper.miniature import GRPO, ONLINE, Arm, arms

TUNING_SEEDS = (1, 2, 3)
LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # by which grids grow
TUNING_TOPICS = "cat|dog|king|girl|boat|drum"  # half of each kind
SPLIT = "mkdir -p runs && zcat toy/tales/preferences_test.jsonl.gz | grep"
miniature.PREPARE |= {
    "runs/tales_tuning.jsonl": f"{SPLIT} -E '\"about ({TUNING_TOPICS})\"' > runs/tales_tuning.jsonl",
    "runs/tales_report.jsonl": f"{SPLIT} -vE '\"about ({TUNING_TOPICS})\"' > runs/tales_report.jsonl",
    "runs/problems_tuning.jsonl": (
        "mkdir -p runs && "
        "zcat toy/shell_game/problems_test.jsonl.gz | tail -n 244 > runs/problems_tuning.jsonl"
    ),
}
ON_TALES = ("--eval-dataset runs/tales_tuning.jsonl", "--eval-dataset runs/tales_report.jsonl")
ON_PROBLEMS = ("--eval-dataset runs/problems_tuning.jsonl", "")  # the report's are the first of the test set
CURVE = "--eval-every 32 --eval-samples 128"
OWN_BOUND = "--no-humanline --epsilon 1e9"
MARGIN = 0.05  # of the judge, within which arms are on a par


class Study(NamedTuple):
    arms: list[Arm]
    seeds: range  # of the report
    metrics: tuple[str, ...]  # the first is the primary one, by which arms are tuned
    data: tuple[str, str]  # flags of tuning and of reported runs
    test: Callable[[list[dict]], list[dict]]  # of the reported rows


# === Tests ===
def values(rows: list[dict], panel: str, arm: str, metric: str) -> np.ndarray:
    """Of an arm's reported runs, in the order of their seeds."""
    return np.array([row[metric] for row in rows if (row["panel"], row["arm"]) == (panel, arm)])


def welch(rows: list[dict], panel: str, first: str, second: str, metric: str) -> dict:
    """First - second, with Welch's 95% interval and test; and, for a margin, the larger p of two one-sided
    tests: below 0.05 the difference is within ±MARGIN."""
    means = CompareMeans(
        DescrStatsW(values(rows, panel, first, metric)),
        DescrStatsW(values(rows, panel, second, metric)),
    )
    low, high = means.tconfint_diff(usevar="unequal")
    _, p, _ = means.ttest_ind(usevar="unequal")
    equivalent, *_ = means.ttost_ind(-MARGIN, MARGIN, usevar="unequal")
    line = {"panel": panel, "first": first, "second": second, "metric": metric}
    line |= {"difference": means.d1.mean - means.d2.mean, "low": low, "high": high, "p": p}
    return line | {"p_equivalent": equivalent}


def holm(lines: list[dict]) -> list[dict]:
    """With p corrected over all of the lines."""
    _, corrected, *_ = multipletests([line["p"] for line in lines], method="holm")
    return [line | {"p_holm": p} for line, p in zip(lines, corrected)]


def clipping_test(rows: list[dict]) -> list[dict]:
    """Clipping - none on the mean over both rates, paired by seed."""
    differences = 0
    for panel in ("lr 2e-3", "lr 4e-3"):
        clipping, without = (values(rows, panel, arm, "judge") for arm in miniature.NO_CLIP)
        differences = differences + (clipping - without) / 2
    found = ttest_1samp(differences, 0)
    low, high = found.confidence_interval()
    line = {"panel": "both rates", "first": "clipping", "second": "no clipping", "metric": "judge"}
    line |= {"difference": differences.mean(), "low": low, "high": high, "p": found.pvalue}
    return [line]


def stale_test(rows: list[dict]) -> list[dict]:
    """Humanline against each other arm, at the end and on the mean of the curve."""
    first, *others = STALE
    lines = []
    for metric in ("eval/accuracy", "curve"):
        lines += [welch(rows, "S = 64", first, other, metric) for other in others]
    return holm(lines)


def syncing_test(rows: list[dict]) -> list[dict]:
    """Main effects of syncing, clipping and ε on the judge, by least squares."""
    data = []
    for row in rows:
        if row["arm"] in PARTS:
            sync, clip, epsilon = row["arm"].split(", ")
            data.append({"judge": row["judge"], "sync": sync, "clip": clip, "epsilon": epsilon})
    formula = "judge ~ C(sync, Treatment('no sync')) + C(clip, Treatment('none')) + C(epsilon)"
    fit = smf.ols(formula, pd.DataFrame(data)).fit()
    lines = []
    for name, (low, high) in fit.conf_int().iterrows():
        line = {"panel": "GRPO offline", "first": name, "metric": "judge", "difference": fit.params[name]}
        lines.append(line | {"low": low, "high": high, "p": fit.pvalues[name]})
    return lines


def parity_test(rows: list[dict]) -> list[dict]:
    """Each arm - online, as equivalence."""
    lines = []
    for panel in ("GRPO", "KTO"):
        for arm in PARITY:
            if arm != "online":
                lines.append(welch(rows, panel, arm, "online", "judge"))
    return lines


# === Arms ===
STALE = {  # S = 64 but for the last
    "humanline, k=16": "",
    "ε 0.2": "--no-humanline",
    "ε 0.5": "--no-humanline --epsilon 0.5",
    "ε 0.8": "--no-humanline --epsilon 0.8",
    "clip-higher 1.28": "--no-humanline",
    "clip-higher 1.5": "--no-humanline",
    "CISPO": OWN_BOUND,
    "IcePop": OWN_BOUND,
    "GSPO": "--no-humanline",
    "M2PO": OWN_BOUND,
    "S = 1": "--no-humanline --sample-every 1",
}


def stale_arms() -> list[Arm]:
    made = []
    for arm in arms("S = 64", "grpo_math", (1e-4, 3e-4, 1e-3), STALE, CURVE):
        variant = arm.name.lower().replace(" ", "-")
        if variant.startswith(("clip-higher", "cispo", "icepop", "gspo", "m2po")):
            arm = arm._replace(program=f"paper/variants.py {variant}")
        if arm.name == "GSPO":  # the paper's is for sequences of thousands of tokens; these have about ten
            arm = arm._replace(options=("--epsilon 4e-4", "--epsilon 0.05", "--epsilon 0.2"))
        made.append(arm)
    return made


PARTS = {}
for sync, flags in {"no sync": "--sync none", "k=16": "--k 16"}.items():
    for clip in ("clip", "none"):
        for epsilon in ("0.15", "0.5", "2"):
            PARTS[f"{sync}, {clip}, ε {epsilon}"] = f"{flags} --clip {clip} --epsilon {epsilon}"
PARITY = {
    "offline + humanline, k=16": "--k 16",
    "offline + humanline, k=32": "--k 32",
    "online": ONLINE,
    "online + humanline": "--online",
}

STUDIES = {
    "clipping": Study(
        arms=[
            *arms("lr 2e-3", "grpo", (2e-3,), miniature.NO_CLIP),
            *arms("lr 4e-3", "grpo", (4e-3,), miniature.NO_CLIP),
        ],
        seeds=range(21, 36),
        metrics=("judge", "eval/reward"),
        data=ON_TALES,
        test=clipping_test,
    ),
    "stale": Study(
        arms=stale_arms(),
        seeds=range(21, 31),
        metrics=("curve", "eval/accuracy"),  # at the end two rates may both be near 1
        data=ON_PROBLEMS,
        test=stale_test,
    ),
    "syncing": Study(
        arms=[
            *arms("GRPO offline", "grpo", GRPO, PARTS),
            *arms("GRPO offline", "grpo", (1e-5, 3e-5, 1e-4), {"k=1": "--k 1"}),
        ],
        seeds=range(21, 29),
        metrics=("judge", "eval/reward"),
        data=ON_TALES,
        test=syncing_test,
    ),
    "parity": Study(
        arms=[
            *arms("GRPO", "grpo", GRPO, PARITY),
            *arms("KTO", "kto", (3e-5, 1e-4, 3e-4), PARITY),
        ],
        seeds=range(21, 36),
        metrics=("judge", "eval/reward"),
        data=ON_TALES,
        test=parity_test,
    ),
}


# === Runs ===
def untrained(study: Study, panel: str, at: str) -> dict:
    """The csv's row of the untrained policy, and its scores: means over the tuning seeds."""
    arm = next(arm for arm in study.arms if arm.panel == panel)
    still = Arm(panel, "untrained", arm.script, "--num-steps 1", (1e-30,))
    _, data = study.data
    rows = miniature.run_rows([(still, 1e-30, seed, data) for seed in TUNING_SEEDS], at)
    scores = {}
    for metric in study.metrics:
        key = "eval/accuracy" if metric == "curve" else metric
        scores[metric] = float(np.mean([row[key] for row in rows]))
    return scores


def tune(study: Study, scores: dict, at: str) -> tuple:
    """{arm: (rate, option)} with the best mean of the primary metric, and the rows of all tuning runs.

    scores: of the untrained policy, {panel: {metric: score}}, for runs that collapse.
    """
    data, _ = study.data
    grids = {}
    for arm in study.arms:
        if len(arm.lrs) * len(arm.options) > 1:
            grids[arm] = list(arm.lrs)
    while True:
        runs = []
        for arm, lrs in grids.items():
            for lr in lrs:
                for option in arm.options:
                    runs += [(arm, lr, seed, f"{option} {data}") for seed in TUNING_SEEDS]
        rows = run_all(runs, scores, at)
        found = {}  # {arm: {(rate, option): scores}}
        for (arm, lr, _, more), row in zip(runs, rows):
            option = more.removesuffix(f" {data}")
            found.setdefault(arm, {}).setdefault((lr, option), []).append(row[study.metrics[0]])
        best = {}
        grown = False
        for arm, means in found.items():
            best[arm] = max(means, key=lambda choice: np.mean(means[choice]))
            wider = neighbour(best[arm][0], grids[arm])
            if wider:
                grids[arm].append(wider)
                grown = True
        if not grown:
            return best, rows


def neighbour(lr: float, grid: list[float]) -> float | None:
    """The ladder's next rate beyond the end of the grid at which lr is; None if it is at none."""
    i = LADDER.index(lr)
    if lr == max(grid) and i + 1 < len(LADDER):
        return LADDER[i + 1]
    if lr == min(grid) and i > 0:
        return LADDER[i - 1]
    return None


def run_all(runs: list[tuple], scores: dict, at: str) -> list[dict]:
    """The csv's rows; a collapsed run has the untrained policy's scores."""
    rows = miniature.run_rows(runs, at)
    return [row | scores[row["panel"]] if row["failed"] else row for row in rows]


def run_study(name: str, seeds: int = 0):
    """Makes the files of a study. seeds: reported runs of an arm, the first of the plan's; 0: all."""
    study = STUDIES[name]
    at = miniature.commit(name)
    panels = list(dict.fromkeys(arm.panel for arm in study.arms))
    scores = {panel: untrained(study, panel, at) for panel in panels}
    best, rows = tune(study, scores, at)
    _, data = study.data
    runs = []
    for arm in study.arms:
        lr, option = best.get(arm, (arm.lrs[0], ""))
        runs += [(arm, lr, seed, f"{option} {data}") for seed in study.seeds[: seeds or None]]
    reported = run_all(runs, scores, at)
    if miniature.commit(name) != at:
        miniature.fail(f"the code was changed and committed during the runs; go back to {at}, or start again")

    table = []
    for metric in study.metrics:
        for line in miniature.compare(reported, metric):
            # The tests are the plan's, in NAME_tests.csv.
            table.append({key: line[key] for key in line if key in miniature.INTERVAL})
        for panel in panels:
            line = {"panel": panel, "arm": "untrained", "metric": metric}
            table.append(line | {"mean": scores[panel][metric]})
    results = miniature.ROOT / "paper" / "results"
    miniature.write_csv(results / f"{name}.csv", rows + reported)
    miniature.write_csv(results / f"{name}_arms.csv", table)
    miniature.write_csv(results / f"{name}_tests.csv", study.test(reported))
    miniature.plot(results / f"{name}.png", reported, table, {})
