"""Plans the paper's figures in miniature, and the studies: their arms, seeds, tuning and tests.

A figure compares every arm of a panel with the first one, without the runs that collapsed. A study asks a
question that the figures could not answer. It was fixed before it was run, its tuning and its report share no
prompt, and it has its own tests. A collapsed run of a study has the score of the untrained policy.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import statsmodels.formula.api as smf
from scipy.stats import ttest_1samp, wilcoxon
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW, ttost_paired

from paper.trials import CHATS, GAMES, INSTANCES, KINDS, STORIES, TASKS, Arm, arms

PAPERS_EPSILON = "offline, ε 0.5"  # Table 3's ε without humanline
NARROW = "offline, ε 0.15"  # Table 3's ε with humanline
UNCLIPPED = "offline, no clip"
MARGIN = 0.05  # arms are on a par if their judge's scores differ by less than this
LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # the learning rates with which grids grow
LONG_LADDER = (1e-6, 3e-6, *LADDER)


class Plan(NamedTuple):
    arms: list[Arm]
    # Arms are tuned by the first metric. In a figure, a user would see this metric after training.
    metrics: tuple[str, ...] = ("eval/reward", "judge", "clipped", "grad_norm_max")
    seeds: range = range(11, 16)  # of the reported runs
    tuning_seeds: tuple[int, ...] = (1,)
    data: tuple[str, str] = ("", "")  # further flags of the tuning runs and of the reported runs
    tuned: list[Arm] = []  # arms of the same scripts and names, which are tuned instead of `arms`
    before_seeds: tuple[int, ...] = (1, 2, 3)  # of the evaluations of the untrained policy
    instances: bool = False  # whether panels are instances of a task, "GRPO 11"; means are over instances
    test: Callable[[list[dict]], list[dict]] | None = None  # of a study: makes its tests of the reported rows
    more_seeds: dict[str, range] = {}  # further reported seeds of a panel
    rivals: tuple[str, ...] = ()  # arms of which only the best one of the tuning is reported
    # When the best learning rate of a study's arm is at an end of the grid, the grid grows: by arm, until the
    # best rate is inside; once, for all arms alike; or never.
    grows: Literal["by arm", "once", "never"] = "by arm"
    ladder: tuple[float, ...] = LADDER
    lowest_is_best: bool = False  # of the first metric
    rate_of: dict[str, str] = {}  # {arm: another arm, whose tuned learning rate it takes}
    # The arms in `gated` run only if `gate` returns True for the rows of all others.
    gated: tuple[str, ...] = ()
    gate: Callable[[list[dict]], bool] | None = None


# === Statistics ===
def values(rows: list[dict], panel: str, arm: str, metric: str) -> np.ndarray:
    """Returns a metric of the runs of an arm that did not collapse, in the order of their seeds."""
    arm_rows = [row for row in rows if (row["panel"], row["arm"]) == (panel, arm)]
    return np.array([row[metric] for row in arm_rows if metric in row])


def holm(lines: list[dict]) -> list[dict]:
    """Adds p_holm to all lines: p times the number of hypotheses that are left, never decreasing."""
    corrected = 0.0
    for i, line in enumerate(sorted(lines, key=lambda line: line["p"])):
        corrected = max(corrected, min(1.0, line["p"] * (len(lines) - i)))
        line["p_holm"] = corrected
    return lines


def compare(rows: list[dict], metric: str) -> list[dict]:
    """Returns a line for each arm: the mean over seeds, its 95% t interval, and a test against the first arm.

    The test is Welch's, against the first arm of the panel. Holm's correction is over all tests of this
    metric in this figure.
    """
    runs_of = {}  # {(panel, arm): runs}
    first_of = {}  # {panel: its first arm}
    for row in rows:
        if row["phase"] == "reported":
            runs_of.setdefault((row["panel"], row["arm"]), []).append(row)
            first_of.setdefault(row["panel"], row["arm"])
    table = []
    for (panel, name), runs in runs_of.items():
        first = first_of[panel]
        scores = DescrStatsW(values(runs, panel, name, metric))
        base = DescrStatsW(values(runs_of[panel, first], panel, first, metric))
        line = {"panel": panel, "arm": name, "lr": runs[0]["lr"], "metric": metric, "runs": len(runs)}
        line["collapsed"] = sum(bool(row.get("failed")) for row in runs)
        line["mean"] = scores.mean if scores.nobs else np.nan
        line["low"], line["high"] = scores.tconfint_mean() if scores.nobs > 1 else (np.nan, np.nan)
        line["against"] = "" if name == first else first
        if name != first and min(scores.nobs, base.nobs) > 1:
            line["difference"] = scores.mean - base.mean
            _, p, _ = CompareMeans(scores, base).ttest_ind(usevar="unequal")
            line["p"] = np.nan_to_num(p, nan=1.0)  # p is nan if both arms have one and the same score
        table.append(line)
    holm([line for line in table if "p" in line])
    return table


def effect(panel: str, first: str, second: str, mean: float, interval: tuple, p: float) -> dict:
    """Returns the line of a test of first - second."""
    low, high = interval
    line = {"panel": panel, "first": first, "second": second, "metric": "judge"}
    return line | {"difference": mean, "low": low, "high": high, "p": p}


def welch(rows: list[dict], panel: str, first: str, second: str, metric: str) -> dict:
    """Returns the line of Welch's test, with its 95% interval.

    p_equivalent is the larger p of two one-sided tests. If it is below 0.05, the difference is within
    ±MARGIN.
    """
    arms = [DescrStatsW(values(rows, panel, arm, metric)) for arm in (first, second)]
    means = CompareMeans(*arms)
    _, p, _ = means.ttest_ind(usevar="unequal")
    equivalent, *_ = means.ttost_ind(-MARGIN, MARGIN, usevar="unequal")
    interval = means.tconfint_diff(usevar="unequal")
    line = effect(panel, first, second, arms[0].mean - arms[1].mean, interval, p)
    return line | {"metric": metric, "p_equivalent": equivalent}


def pairs_test(rows: list[dict], pairs: list[tuple], metrics: tuple = ("judge",)) -> list[dict]:
    """Returns the lines of Welch's tests of all pairs, (panel, first arm, second arm), for all metrics."""
    return [welch(rows, *pair, metric) for metric in metrics for pair in pairs]


def paired(panel: str, first: str, second: str, differences: np.ndarray) -> dict:
    """Returns the line of a paired t test of the differences first - second."""
    found = ttest_1samp(differences, 0)
    return effect(panel, first, second, differences.mean(), found.confidence_interval(), found.pvalue)


def clipping_test(rows: list[dict]) -> list[dict]:
    """Compares clipping with no clipping: the mean over both learning rates, paired by seed."""
    differences = 0
    for panel in ("lr 2e-3", "lr 4e-3"):
        clipping, without = (values(rows, panel, arm, "judge") for arm in NO_CLIP)
        differences = differences + (clipping - without) / 2
    return [paired("both rates", "clipping", "no clipping", differences)]


def syncing_test(rows: list[dict]) -> list[dict]:
    """Estimates the main effects of syncing, clipping and ε on the judge's score, by least squares."""
    data = []
    for row in rows:
        if row["arm"] in PARTS:
            sync, clip, epsilon = row["arm"].split(", ")
            data.append({"judge": row["judge"], "sync": sync, "clip": clip, "epsilon": epsilon})
    formula = "judge ~ C(sync, Treatment('no sync')) + C(clip, Treatment('none')) + C(epsilon)"
    fit = smf.ols(formula, pd.DataFrame(data)).fit()
    lines = []
    for first, second in (("k=16", "no sync"), ("clip", "none"), ("ε 0.5", "ε 0.15"), ("ε 2", "ε 0.15")):
        (key,) = [key for key in fit.params.index if key.endswith(f"[T.{first}]")]
        interval = fit.conf_int().loc[key]
        lines.append(effect("GRPO offline", first, second, fit.params[key], interval, fit.pvalues[key]))
    return lines


def instances_test(rows: list[dict]) -> list[dict]:
    """Compares humanline - offline and online - humanline, paired by instance. A score is a mean over seeds.

    Holm's correction is over the first comparison of both scripts.
    """
    gains = []
    rests = []
    for script in ("KTO", "GRPO"):
        means = {}
        for arm in MAIN:
            means[arm] = np.array([values(rows, f"{script} {i}", arm, "judge").mean() for i in INSTANCES])
        humanline, offline, online = means.values()
        gains.append(paired(script, "offline + humanline", "offline", humanline - offline))
        rests.append(paired(script, "online", "offline + humanline", online - humanline))
    return holm(gains) + rests


def worst(scores: np.ndarray) -> np.ndarray:
    """Returns the mean of the lowest quarter of the scores, rounded down, along the last axis."""
    return np.sort(scores)[..., : scores.shape[-1] // 4].mean(-1)


def worst_quarters(panel: str, first: str, second: str, scores: tuple, draws: int = 20_000) -> dict:
    """Compares the worst quarters of two arms, by a bootstrap over instances.

    Each arm has its own worst quarter, because the instances that are worst for one arm would flatter the
    other. The bootstrap draws instances with the scores of both arms. Its interval is one of percentiles, and
    p is twice the fraction of draws on the other side of 0.
    """
    count = len(scores[0])
    drawn = np.random.default_rng(0).integers(count, size=(draws, count))
    differences = worst(scores[0][drawn]) - worst(scores[1][drawn])
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    p = min(1.0, 2 * (1 + beyond) / (1 + draws))
    mean = worst(scores[0]) - worst(scores[1])
    line = effect(panel, first, second, mean, np.quantile(differences, (0.025, 0.975)), p)
    return line | {"metric": "judge, worst quarter"}


def over_seeds(rows: list[dict]) -> list[dict]:
    """Returns a row for each arm of a panel. Numbers that all of its seeds have become their means.

    The other columns are those of a collapsed seed, if there is one.
    """
    seeds_of = {}  # {(panel, arm): rows}
    for row in rows:
        seeds_of.setdefault((row["panel"], row["arm"]), []).append(row)
    made = []
    for seeds in seeds_of.values():
        means = {}
        for key, value in seeds[0].items():
            if isinstance(value, float) and all(key in row for row in seeds):
                means[key] = fmean(row[key] for row in seeds)
        made.append(max(seeds, key=lambda row: bool(row.get("failed"))) | means)
    return made


def over_instances(rows: list[dict]) -> list[dict]:
    """Returns a row for each arm and instance, without the instance's name: "GRPO 11" becomes "GRPO"."""
    return [row | {"panel": row["panel"].split()[0]} for row in over_seeds(rows)]


def both_tests(rows: list[dict], panel: str, first: str, second: str) -> list[dict]:
    """Compares the means over instances, with the signed-rank test beside them, and the worst quarters."""
    scores = [values(rows, panel, arm, "judge") for arm in (first, second)]
    mean = paired(panel, first, second, scores[0] - scores[1])
    mean["p_signed_rank"] = wilcoxon(*scores).pvalue
    return [mean, worst_quarters(panel, first, second, scores)]


def tasks_test(rows: list[dict]) -> list[dict]:
    """Compares humanline - offline, paired by instance, with Holm's correction over all scripts.

    Further lines without a correction compare GRPO's humanline with the paper's ε and with no clip.
    """
    rows = over_instances(rows)
    lines = []
    for script in dict.fromkeys(row["panel"] for row in rows):
        lines += both_tests(rows, script, "offline + humanline", "offline")
    holm(lines)
    for other in (PAPERS_EPSILON, UNCLIPPED):
        lines += both_tests(rows, "GRPO", "offline + humanline", other)
    return lines


AT_KL = (5.0, 15.0)  # nats per completion
FEWEST = 10  # instances in which both arms reach a KL; fewer would be selected by what is compared


def judge_at(row: dict, kl: float) -> float:
    """Returns the judge's score of a run when it first reached a KL from the initial policy.

    The score is interpolated between two checkpoints. It is nan if the run collapsed or never reached the KL.
    """
    steps = sorted(int(key.partition("@")[2]) for key in row if key.startswith("kl@"))
    for step, following in pairwise(steps):
        kls = [row[f"kl@{step}"], row[f"kl@{following}"]]
        if kls[1] >= kl:
            return np.interp(kl, kls, [row[f"judge@{step}"], row[f"judge@{following}"]])
    return np.nan


def on_a_par(rows: list[dict], panel: str, first: str, second: str, metric="judge", margin=MARGIN) -> dict:
    """Returns the line of a paired t test, with the p-values of a signed-rank and an equivalence test."""
    scores = [values(rows, panel, arm, metric) for arm in (first, second)]
    line = paired(panel, first, second, scores[0] - scores[1]) | {"metric": metric}
    line["p_signed_rank"] = wilcoxon(*scores).pvalue
    line["p_equivalent"], *_ = ttost_paired(*scores, -margin, margin)
    return line


def stories_test(rows: list[dict]) -> list[dict]:
    """Compares humanline - offline and online - humanline for each script, paired by instance.

    Holm's correction is over all of these lines. If p_equivalent is below 0.05, the difference is within
    ±MARGIN. Further lines without a correction compare the arms at equal KL, in the instances in which both
    arms reach it.
    """
    rows = over_instances(rows)
    pairs = []
    for script in dict.fromkeys(row["panel"] for row in rows):
        pairs += [(script, "offline + humanline", "offline"), (script, "online", "offline + humanline")]
    lines = []
    for panel, *both in pairs:
        lines.append(on_a_par(rows, panel, *both))
    holm(lines)
    for kl in AT_KL:
        for panel, *both in pairs:
            both_rows = [[row for row in rows if (row["panel"], row["arm"]) == (panel, arm)] for arm in both]
            first, second = (np.array([judge_at(row, kl) for row in arm_rows]) for arm_rows in both_rows)
            differences = (first - second)[np.isfinite(first - second)]
            if len(differences) >= FEWEST:
                line = paired(panel, *both, differences) | {"metric": f"judge at {kl:g} nats"}
                lines.append(line | {"instances": len(differences)})
    return lines


def baselines_test(rows: list[dict]) -> list[dict]:
    """Compares humanline with offline at the paper's ε and β, and with the tuned baselines, paired by draw.

    Holm's correction is over the first three lines, one for each script. If p_equivalent is below 0.05, the
    difference is within ±MARGIN.
    """
    rows = over_instances(rows)
    pairs = [(script, PAPERS_HUMANLINE, PAPERS_OFFLINE) for script in ("GRPO", "KTO", "DPO")]
    pairs += [("GRPO", PAPERS_HUMANLINE, other) for other in (TUNED_BETA, NO_REFERENCE)]
    pairs += [("GRPO", HUMANLINE_BETA, other) for other in (TUNED_BETA, NO_REFERENCE)]
    pairs += [("DPO", OWN_RATE, PAPERS_OFFLINE)]
    lines = []
    for panel, *both in pairs:
        lines.append(on_a_par(rows, panel, *both))
    holm(lines[:3])
    return lines


def tests_of(rows: list[dict], panel: str, pairs: tuple, metric: str = "judge") -> list[dict]:
    """Compares pairs of arms, paired by instance (means over seeds), with Holm's correction.

    If p_equivalent is below 0.05, the difference is within ±MARGIN.
    """
    rows = over_instances(rows)
    lines = []
    for both in pairs:
        lines.append(on_a_par(rows, panel, *both, metric))
    return holm(lines)


def controls_test(rows: list[dict]) -> list[dict]:
    """Compares humanline with its controls and with the best rival, paired by game (means over seeds).

    Holm's correction is over the first four lines. If p_equivalent is below 0.05, the difference is within
    ±GAME_MARGIN.
    """
    rows = over_instances(rows)
    (rival,) = {row["arm"] for row in rows if row["arm"] in RIVALS}
    pairs = [(STALE_HUMANLINE, NO_CLIP_ARM), (STALE_HUMANLINE, SYNC_ALONE), (CLIP_ALONE, NO_CLIP_ARM)]
    pairs += [(STALE_HUMANLINE, rival), (STALE_HUMANLINE, "ε 0.2"), ("S = 1", STALE_HUMANLINE)]
    lines = []
    for both in pairs:
        lines.append(on_a_par(rows, "game", *both, "curve", GAME_MARGIN))
    holm(lines[:4])
    return lines


def has_gap(rows: list[dict]) -> bool:
    """Returns whether online is ahead of ε 0.2 by at least GAP, with its interval above 0."""
    line = on_a_par(over_instances(rows), "sums", "online", "ε 0.2", "late")
    return line["difference"] >= GAP and line["low"] > 0


def gap_test(rows: list[dict]) -> list[dict]:
    """Compares the arms of `gap`, paired by kind (means over seeds).

    Holm's correction is over the three planned tests. If `has_gap` is False, there is only online - ε 0.2.
    `clipped` is the fraction of the tokens of no clip beyond ±1.5, over the runs that did not collapse.
    """
    lines = [on_a_par(over_instances(rows), "sums", "online", "ε 0.2", "late")]
    if has_gap(rows):
        lines = tests_of(rows, "sums", GAP_PAIRS, "late") + lines
        lines.append(on_a_par(over_instances(rows), "sums", "online", "humanline", "late"))
        shares = [row["clipped"] for row in rows if row["arm"] == "no clip" and not row.get("failed")]
        lines[2]["clipped"] = fmean(shares) if shares else np.nan
    return lines


# === The README's table ===
class Difference(NamedTuple):
    label: str
    studies: tuple[str, ...]  # their reported rows
    panel: str
    metric: str
    # Humanline and the arm that it is compared with, or () where that arm was not run
    default: tuple  # a default clip or β
    control: tuple  # a simple control: a tuned clip or β, or no clip
    online: tuple
    post_hoc: tuple[str, ...] = ()  # columns that were chosen after the runs


def differences(rows_of: dict[str, list[dict]]) -> list[dict]:
    """Returns a line for each cell of the README's table: humanline minus another arm, with a 95% interval.

    Arms are paired by instance. `clipped` is the share of tokens beyond the bounds in humanline's arm. `runs`
    names the csv files with the runs of both arms and their commands. `post_hoc` is 1 if the arms were chosen
    after the runs.

    rows_of: {study: its reported rows}.
    """
    lines = []
    for table_row in README_TABLE:
        rows = over_instances([row for name in table_row.studies for row in rows_of[name]])
        for column in ("default", "control", "online"):
            both = getattr(table_row, column)
            if not both:
                continue
            line = on_a_par(rows, table_row.panel, *both, table_row.metric)
            shares = values(rows, table_row.panel, both[0], "clipped")
            head = {"row": table_row.label, "column": column, "runs": " and ".join(table_row.studies)}
            is_post_hoc = int(column in table_row.post_hoc)
            lines.append(head | line | {"clipped": shares.mean(), "post_hoc": is_post_hoc})
    return lines


# === Figures ===
DPO = (3e-4, 1e-3, 3e-3)  # learning rates
KTO = (1e-4, 3e-4, 1e-3)
GRPO = (1e-4, 3e-4, 1e-3)
ONLINE = "--online --no-humanline"
MAIN = {"offline + humanline": "", "offline": "--no-humanline", "online": ONLINE}
WIDE = MAIN | {"offline": "--no-humanline --epsilon 0.5"}  # GRPO's offline arm has a wider clip (Table 3)
NO_CLIP = {"clipping": "", "no clipping": "no-clipping"}
CLIPS = {"clipping": "", "sampling (eq. 5)": "sampling", "no clipping": "no-clipping"}
NO_SYNC = CLIPS | {"clipping, no syncing": "--k 0"}
REGION = {"offline + humanline": "", "trust region": "trust-region"}
QUARTERS = {f"quartile {i}": f"--dataset runs/quartiles_toy/quartile{i}.jsonl" for i in (1, 2, 3, 4)}
INTERVALS = {"k=1": "--k 1", "k=4": "--k 4", "k=16": "--k 16", "k=32": "", "k=64": "--k 64"}
BOUNDS = {"[-1.5, 1.5]": ""}
for low, high in ((-2.0, 1.5), (-1.0, 1.5), (-1.0, 2.0), (-1.0, 3.0)):
    BOUNDS[f"[{low}, {high}]"] = f"--log-epsilon-P {low} --log-epsilon-R {high}"
ROUNDS = {
    "S=64 + humanline, k=16": "",
    "S=64 + humanline, k=20": "--k 20",
    "S=64 + humanline, k=1": "--k 1",
    "S=64": "--no-humanline",
    "S=64, ε 0.5": "--no-humanline --epsilon 0.5",
    "online, S=1": "--no-humanline --sample-every 1",
}
CURVE = "--eval-every 32 --eval-samples 128"
TALES = (
    "--model toy/tales/policy --reward-model toy/tales/reward_model "
    "--dataset toy/tales/preferences_train.jsonl.gz --eval-dataset toy/tales/preferences_test.jsonl.gz "
    "--generation-batch-size 256 --max-new-tokens 64 "
    "--num-steps 320 --beta 10 --adam-eps 1e-2 --k 16"
)
FIGURE_ARMS = {
    "figure1": [
        *arms("DPO", "dpo", DPO, MAIN),
        *arms("KTO", "kto", KTO, MAIN),
        *arms("GRPO", "grpo", GRPO, WIDE),
    ],
    "figure5": [
        *arms("GRPO, lr 1e-3", "grpo", (1e-3,), NO_SYNC),
        *arms("GRPO, lr 2e-3", "grpo", (2e-3,), CLIPS),
        *arms("GRPO, lr 4e-3", "grpo", (4e-3,), CLIPS),
        *arms("KTO, lr 1e-3", "kto", (1e-3,), NO_SYNC),
        *arms("KTO, lr 2e-3", "kto", (2e-3,), CLIPS),
    ],
    "figure5_dpo": [
        *arms("DPO on tales, lr 3e-4", "dpo", (3e-4,), NO_CLIP, TALES),
        *arms("DPO on tales, lr 1e-3", "dpo", (1e-3,), NO_CLIP, TALES),
    ],
    "figure6": arms("DPO", "dpo", (1e-3, 3e-3), QUARTERS),
    "figure7": arms("GRPO", "grpo_math", (3e-4, 1e-3), ROUNDS, CURVE),
    "figure8": arms("GRPO", "grpo", GRPO, INTERVALS),
    "figure10": [*arms("DPO", "dpo", DPO, REGION), *arms("GRPO", "grpo", GRPO, REGION)],
    "table6": arms("DPO on tales", "dpo", (3e-4, 1e-3), BOUNDS, TALES),
}
FIGURES = {name: Plan(made) for name, made in FIGURE_ARMS.items()}
FIGURES["figure7"] = FIGURES["figure7"]._replace(  # by the curve, because several rates may end near 1
    metrics=("curve", "eval/accuracy", "judge", "clipped", "grad_norm_max")
)

# === Studies ===
FAST = "--dtype float32"  # a step takes half the time of the toys' float64
LOW_KTO = (3e-5, 1e-4, 3e-4)
ON_TALES = ("--eval-dataset runs/tales_tuning.jsonl", "--eval-dataset runs/tales_report.jsonl")
ON_LOW_ENTROPY = (
    "--eval-dataset runs/low_entropy_tuning.jsonl",
    "--eval-dataset runs/low_entropy_report.jsonl",
)

STALE = {  # S is 64 in all arms but the last. With ε 1e9, only the variant's own bound remains.
    "humanline, k=16": "",
    "ε 0.2": "--no-humanline",
    "ε 0.5": "--no-humanline --epsilon 0.5",
    "ε 0.8": "--no-humanline --epsilon 0.8",
    "clip-higher 1.28": "clip-higher-1.28 --no-humanline",
    "clip-higher 1.5": "clip-higher-1.5 --no-humanline",
    "CISPO": "cispo --no-humanline --epsilon 1e9",
    "IcePop": "icepop --no-humanline --epsilon 1e9",
    "GSPO": "gspo --no-humanline",
    "M2PO": "m2po --no-humanline --epsilon 1e9",
    "S = 1": "--no-humanline --sample-every 1",
}
STALE_ARMS = {arm.name: arm for arm in arms("S = 64", "grpo_math", GRPO, STALE, f"{FAST} {CURVE}")}
# The paper's ε is for sequences of thousands of tokens. Here they have about ten.
GSPO = ("--epsilon 4e-4", "--epsilon 0.05", "--epsilon 0.2")
STALE_ARMS["GSPO"] = STALE_ARMS["GSPO"]._replace(options=GSPO)
STALE_PAIRS = [("S = 64", "humanline, k=16", other) for other in list(STALE)[1:]]

# Old samples again, with controls and with recent rivals, on several games. Tuning is on the first one.
STALE_HUMANLINE = "humanline, k=16"
SYNC_ALONE = "syncing alone, k=16"
NO_CLIP_ARM = "no clip"
CLIP_ALONE = "clipping alone"
RIVALS = ("CISPO", "IcePop", "GSPO", "M2PO", "OAPL", "DPPO", "BAPO")
GAME_MARGIN = 0.02  # of accuracy
GAME_LRS = (3e-5, 1e-4, 3e-4, 1e-3)
CONTROLS = {name: STALE[name] for name in (STALE_HUMANLINE, "ε 0.2", "S = 1", *RIVALS[:4])}
CONTROLS |= {
    SYNC_ALONE: "no-clipping",  # as with infinite bounds, but tokens beyond ±1.5 are counted
    NO_CLIP_ARM: "--no-humanline --epsilon 1e9",
    CLIP_ALONE: "--k 0 --epsilon 1e9",  # so that ε does not shield ±1.5
    "OAPL": "oapl --no-humanline --epsilon 1e9",
    "DPPO": "dppo --no-humanline",
    "BAPO": "bapo --no-humanline --epsilon 1e9",
}
CONTROL_OPTIONS = {  # OAPL's β_2, and the ε of GSPO and DPPO: the published value and another one
    "GSPO": ("--epsilon 0.05", "--epsilon 0.2"),
    "OAPL": ("--beta 1e-3", "--beta 0.03"),
    "DPPO": ("--epsilon 0.15", "--epsilon 0.05"),
}
GAME_SETTINGS = (
    "--system-prompt '' --num-steps 256 --prompts-per-step 16 --temperature 1.0 --max-new-tokens 32 "
    "--generation-batch-size 256"
)
CONTROL_ARMS = []
for arm in arms("game", "grpo_math", GAME_LRS, CONTROLS, f"{FAST} {CURVE}"):
    CONTROL_ARMS.append(arm._replace(options=CONTROL_OPTIONS.get(arm.name, ("",))))


def of_game(arm: Arm, i: int) -> Arm:
    """Returns an arm on shell game i. Game 0 is the committed one, whose settings are the script's."""
    flags = arm.flags
    if i:
        folder = f"runs/games/{i}/shell_game"
        flags = (
            f"--model {folder}/policy --dataset {folder}/problems_train.jsonl.gz "
            f"--eval-dataset {folder}/problems_test.jsonl.gz {GAME_SETTINGS} {arm.flags}"
        )
    return arm._replace(panel=f"{arm.panel} {i}", flags=flags)


SYNC = {"no sync": "--k 0", "k=16": "--k 16"}
CLIP = {"clip": "", "none": "no-clipping"}
EPSILON = {"ε 0.15": "", "ε 0.5": "--epsilon 0.5", "ε 2": "--epsilon 2"}
PARTS = {}  # all combinations of syncing, clipping and ε
for names in product(SYNC, CLIP, EPSILON):
    PARTS[", ".join(names)] = f"{CLIP[names[1]]} {SYNC[names[0]]} {EPSILON[names[2]]}"

PARITY = {
    "offline + humanline, k=16": "--k 16",
    "offline + humanline, k=32": "",  # the default
    "online": ONLINE,
    "online + humanline": "--online",
}
PARITY_PAIRS = [(panel, arm, "online") for panel in ("GRPO", "KTO") for arm in PARITY if arm != "online"]

# Instances are tuned on the committed toy. With --model they do not start with its settings, so these are
# flags.
MAIN_ARMS = [*arms("KTO", "kto", LOW_KTO, MAIN, FAST), *arms("GRPO", "grpo", GRPO, WIDE, FAST)]
SETTINGS = "--num-steps 320 --k 32 --max-new-tokens 64 --generation-batch-size 256"
KTO_BETA = "--beta 2.5"


def of_instance(arm: Arm, i: int) -> Arm:
    """Returns an arm on instance i of the tales."""
    folder = f"runs/instances/{i}/tales"
    rows = "prompts_train" if "--online" in arm.flags else "preferences_train"
    flags = (
        f"--model {folder}/policy --reward-model {folder}/reward_model "
        f"--dataset {folder}/{rows}.jsonl.gz --eval-dataset {folder}/preferences_test.jsonl.gz "
        f"{SETTINGS} {KTO_BETA if arm.script == 'kto' else ''} {arm.flags}"
    )
    return arm._replace(panel=f"{arm.panel} {i}", flags=flags)


# More instances, with one run of each arm. No run reads a reward model.
TASK_LRS = (1e-4, 3e-4, 1e-3, 3e-3)
CLIP_EPSILONS = ("--epsilon 0.15", "--epsilon 0.5", "--epsilon 2")
KTO_BETAS = ("--beta 0.25", "--beta 2.5")


def combined(*groups: tuple[str, ...]) -> tuple[str, ...]:
    """Returns all combinations of one choice from each group, as flags."""
    return tuple(" ".join(flags) for flags in product(*groups))


OFFLINE = {"offline": "--no-humanline"}
HUMANLINE = {"offline + humanline": ""}
TASK_KS = ("--k 16", "--k 32")
TUNED_TASK_ARMS = [
    *arms("GRPO", "grpo", TASK_LRS, OFFLINE, FAST, CLIP_EPSILONS),
    *arms("GRPO", "grpo", TASK_LRS, HUMANLINE, FAST, combined(TASK_KS, CLIP_EPSILONS)),
    *arms("KTO", "kto", TASK_LRS, OFFLINE, FAST, KTO_BETAS),
    *arms("KTO", "kto", TASK_LRS, HUMANLINE, FAST, combined(TASK_KS, KTO_BETAS)),
]
# This arm was added after the report, because the largest ε was the best in the tuning.
TUNED_TASK_ARMS += arms("GRPO", "grpo", TASK_LRS, {UNCLIPPED: "--no-humanline --epsilon 1e9"}, FAST)
OF_PAPER = {PAPERS_EPSILON: "--no-humanline --epsilon 0.5"}
TASK_ARMS = [*TUNED_TASK_ARMS, *arms("GRPO", "grpo", (3e-4,), OF_PAPER, FAST)]


def of_task(arm: Arm, i: int) -> Arm:
    """Returns an arm on instance i of the tales, without a reward model."""
    folder = f"runs/instances/{i}/tales"
    flags = (
        f"--model {folder}/policy --dataset {folder}/preferences_train.jsonl.gz "
        f"--eval-dataset {folder}/preferences_test.jsonl.gz "
        f"--num-steps 320 --max-new-tokens 64 --generation-batch-size 256 {arm.flags}"
    )
    return arm._replace(panel=f"{arm.panel} {i}", flags=flags)


# Stories, with a real language model. A larger sampling batch than the default only saves time.
STORY_LRS = (1e-4, 3e-4, 1e-3)
STORY_KS = ("--k 1", "--k 4", "--k 16")
CHECKPOINTS = "--checkpoint-every 15 --keep-checkpoints 0"
STORY_OPTIONS = {  # the paper's ε or β, two others, and further ones where the best was at an end
    "grpo": (*CLIP_EPSILONS, "--epsilon 0.04"),
    "kto": ("--beta 0.25", "--beta 0.08", "--beta 0.8", "--beta 0.025", "--beta 0.008", "--beta 0.0025"),
    "dpo": ("--beta 0.1", "--beta 0.03", "--beta 0.3", "--beta 0.01"),
}
STORY_ARMS = []
for script, options in STORY_OPTIONS.items():
    common = (script.upper(), script, STORY_LRS)
    ks = STORY_KS
    if script == "dpo":
        ks += ("--k 64",)  # because 16, the largest k, was the best
    (humanline,) = arms(*common, HUMANLINE, FAST, combined(ks, options[:1]))
    if script == "grpo":  # first ε 2 was the best, then 8; an ε of 1e9 clips nothing
        STORY_ARMS += arms(*common, OFFLINE, FAST, (*CLIP_EPSILONS, "--epsilon 8", "--epsilon 1e9"))
    else:
        STORY_ARMS += arms(*common, OFFLINE, FAST, options)
    STORY_ARMS += [humanline._replace(then=options[1:])]
    STORY_ARMS += arms(*common, {"online": ONLINE}, FAST)
    if script == "grpo":
        STORY_ARMS += arms(*common, {NARROW: "--no-humanline"}, FAST, options[:1])


def of_story(arm: Arm, i: int) -> Arm:
    """Returns an arm on draw i of the stories. Online, it has prompts and a reward model."""
    folder = f"runs/stories/{i}/stories"
    data = f"--dataset {folder}/preferences_train.jsonl.gz"
    if "--online" in arm.flags:
        data = f"--dataset {folder}/prompts_train.jsonl.gz --reward-model {folder}/reward_model"
        data += " --round-prompts 512 --samples-per-prompt 4"
    flags = (
        f"--model {folder}/policy {data} --num-steps 120 --max-prompt-length 32 --max-length 96 "
        f"--max-new-tokens 48 --generation-batch-size 512 {arm.flags}"
    )
    return arm._replace(panel=f"{arm.panel} {i}", flags=flags)


# Baselines on the same draws. The first arms have the paper's ε and β, and the learning rate that `stories`
# tuned for offline and for humanline with this script. GRPO's humanline arm is also the tuned one of
# `stories`.
PAPERS_HUMANLINE = "humanline, paper's ε and β"
PAPERS_OFFLINE = "offline, paper's ε and β"
OWN_RATE = "humanline, paper's β, k = 1's rate"  # DPO; added after the report
TUNED_BETA = "offline, no clip, tuned β"
HUMANLINE_BETA = "humanline, tuned β"
NO_REFERENCE = "no reference"
TUNED_RATES = {"grpo": (3e-4, 1e-4), "kto": (3e-4, 3e-4), "dpo": (3e-4, 3e-4)}  # humanline, offline
BASELINE_LRS = (1e-4, 3e-4)
BASELINE_BETAS = ("--beta 0", "--beta 0.001", "--beta 0.01", "--beta 0.1")
BASELINE_ARMS = []
for script, (humanline_lr, offline_lr) in TUNED_RATES.items():
    panel = script.upper()
    offline = "--no-humanline --epsilon 0.5" if script == "grpo" else "--no-humanline"
    BASELINE_ARMS += arms(panel, script, (humanline_lr,), {PAPERS_HUMANLINE: "--k 1"}, FAST)
    BASELINE_ARMS += arms(panel, script, (offline_lr,), {PAPERS_OFFLINE: offline}, FAST)
# The rate of DPO's humanline arm was tuned with k = 16. In the tuning of `stories`, 1e-4 was the best for
# k = 1.
BASELINE_ARMS += arms("DPO", "dpo", (1e-4,), {OWN_RATE: "--k 1"}, FAST)
TUNED_BASELINES = [
    *arms("GRPO", "grpo", BASELINE_LRS, {HUMANLINE_BETA: "--k 1"}, FAST, BASELINE_BETAS),
    *arms("GRPO", "grpo", BASELINE_LRS, {TUNED_BETA: "--no-humanline --epsilon 1e9"}, FAST, BASELINE_BETAS),
    *arms("GRPO", "grpo", BASELINE_LRS, {NO_REFERENCE: "no-reference --no-humanline"}, FAST),
]


# HyPO, a control of DPO. The other arms have the settings of `stories`.
HYPO_PAIRS = (("offline + humanline", "HyPO"), ("HyPO", "offline"))
HYPO_BETAS = ("--beta 0.01", "--beta 0.03", "--beta 0.1")
HYPO_ARMS = [
    *arms("DPO", "dpo", BASELINE_LRS, {"HyPO": "hypo --no-humanline"}, FAST, HYPO_BETAS),
    *arms("DPO", "dpo", (3e-4,), {"offline + humanline": "--k 16 --beta 0.1"}, FAST),
    *arms("DPO", "dpo", (3e-4,), {"offline": "--no-humanline --beta 0.03"}, FAST),
]


# Runs that record their tokens' log-ratios (paper/assumptions.py)
RECORDED = {}
for script, flags in (("grpo", "--epsilon 0.15"), ("dpo", "--beta 0.1")):
    (RECORDED[script],) = arms(script.upper(), script, (), {"humanline": f"log-ratios {FAST} {flags}"})
(RECORDED["sums"],) = arms("sums", "grpo_math", (), {"humanline": "last-number-log-ratios --sample-every 16"})


# Sums, with a chat model that people know: SmolLM2-135M-Instruct (toy/smollm2.py). Samples are used for 16
# steps. Answers are graded by the number behind the last "=", exactly.
SUMS_LRS = (3e-6, 1e-5, 3e-5)
SUMS_ARMS = [
    *arms("sums", "grpo_math", SUMS_LRS, {"ε 0.2": "last-number --no-humanline --sample-every 16"}),
    *arms(
        "sums",
        "grpo_math",
        SUMS_LRS,
        {"no clip": "last-number --no-humanline --sample-every 16 --epsilon 1e9"},
    ),
    *arms(
        "sums", "grpo_math", SUMS_LRS, {"humanline": "last-number --sample-every 16"}, "", ("--k 1", "--k 4")
    ),
    *arms("sums", "grpo_math", SUMS_LRS, {"online": "last-number --no-humanline --sample-every 1"}),
]


SUMS_PAIRS = (("humanline", "ε 0.2"), ("humanline", "no clip"), ("online", "humanline"))


def of_sums(arm: Arm, kind: str, part: str) -> Arm:
    """Returns an arm on a kind of problems (toy/sums.py), evaluated on a part of them: tuning or held_out."""
    folder = f"runs/sums/{kind}"
    samples = 4 if part == "tuning" else 2
    flags = (
        f"--model runs/smollm2 --dtype bfloat16 --system-prompt '' "
        f"--chat-template {folder}/one_example.jinja "
        f"--dataset {folder}/train.jsonl --eval-dataset {folder}/{part}.jsonl --eval-samples 64 "
        f"--eval-samples-per-problem {samples} --eval-every 16 --num-steps 32 --prompts-per-step 4 --beta 0 "
        "--temperature 1.0 --max-prompt-length 60 --max-new-tokens 18 --max-length 80 "
        f"--generation-batch-size 64 {arm.flags}"
    )
    return arm._replace(panel=f"{arm.panel} {kind}", flags=flags)


# Sums with one round of samples for all steps. Online has the learning rate that `sums` tuned.
OLD = "last-number --sample-every 32"
GAP = 0.10  # of accuracy, between online and ε 0.2
GAP_ARMS = arms(
    "sums",
    "grpo_math",
    SUMS_LRS[1:],
    {
        "ε 0.2": f"{OLD} --no-humanline",
        "no clip": f"{OLD} --no-humanline --epsilon 1e9",
        "humanline": f"{OLD} --k 8",
    },
)
ONE_RATE = {
    "clipping alone": f"{OLD} --k 0 --epsilon 1e9",
    "online": "last-number --no-humanline --sample-every 1",
}
GAP_ARMS += arms("sums", "grpo_math", SUMS_LRS[1:2], ONE_RATE)
GAP_PAIRS = (("humanline", "ε 0.2"), ("humanline", "no clip"), ("clipping alone", "no clip"))


# DPO on pairs for a chat model (toy/chat.py), with SmolLM2-135M-Instruct
CHAT_LRS = (1e-6, 5e-6, 2e-5)
CHAT_FLAGS = {"offline": "--no-humanline", "humanline, k=1": "--k 1", "humanline, k=16": "--k 16"}
CHAT_ARMS = arms("chat", "dpo", CHAT_LRS, CHAT_FLAGS)


def of_chat(arm: Arm, kind: str, part: str) -> Arm:
    """Returns an arm on a kind of pairs, evaluated on a part of them: tuning or held_out."""
    folder = f"runs/chat/{kind}"
    flags = (
        f"--model runs/smollm2 --dtype bfloat16 --dataset {folder}/train.jsonl "
        f"--eval-dataset {folder}/{part}.jsonl --num-steps 90 --batch-size 16 --max-length 256 "
        f"--eval-samples 64 --temperature 1 --top-p 1 "
        f"--max-new-tokens 64 --generation-batch-size 64 {arm.flags}"
    )
    return arm._replace(panel=f"{arm.panel} {kind}", flags=flags)


LOW_ENTROPY = (
    "--model toy/low_entropy/policy --reward-model toy/low_entropy/reward_model "
    f"{FAST} --num-steps 320 --adam-eps 1e-2 --max-new-tokens 80 --generation-batch-size 256"
)
PAIRS = "--dataset toy/low_entropy/preferences_train.jsonl.gz"
PROMPTS = "--dataset toy/low_entropy/prompts_train.jsonl.gz --online"
DPO_FLAGS = {
    "offline": f"{PAIRS} --no-humanline",
    "offline + humanline, k=1": f"{PAIRS} --k 1",
    "offline + humanline, k=16": f"{PAIRS} --k 16",
    "online": f"{PROMPTS} --no-humanline",
    "online + humanline, k=16": f"{PROMPTS} --k 16",
}
BETAS = ("--beta 0.3", "--beta 1", "--beta 10")
DPO_PAIRS = []
for arm in ("offline + humanline, k=1", "offline + humanline, k=16"):
    DPO_PAIRS += [("DPO", arm, "offline"), ("DPO", "online", arm)]


def planned(arms: list[Arm], seeds: int, test: Callable, metrics=("judge", "eval/reward"), **more) -> Plan:
    """Returns the plan of a study with so many reported seeds and three for tuning."""
    return Plan(arms, metrics, range(21, 21 + seeds), (1, 2, 3), test=test, **more)


STUDIES = {
    "instances": planned(
        [of_instance(arm, i) for i in INSTANCES for arm in MAIN_ARMS],
        seeds=2,
        test=instances_test,
        data=(ON_TALES[0], ""),
        tuned=MAIN_ARMS,
    ),
    "clipping": planned(
        [*arms("lr 2e-3", "grpo", (2e-3,), NO_CLIP), *arms("lr 4e-3", "grpo", (4e-3,), NO_CLIP)],
        seeds=15,
        test=clipping_test,
        data=ON_TALES,
    ),
    "stale": planned(
        [*STALE_ARMS.values()],
        seeds=10,
        test=lambda rows: holm(pairs_test(rows, STALE_PAIRS, ("eval/accuracy", "curve"))),
        metrics=("curve", "eval/accuracy"),
        data=("--eval-dataset runs/problems_tuning.jsonl", ""),  # the report has the first of the test set
    ),
    "syncing": planned(
        [
            *arms("GRPO offline", "grpo", GRPO, PARTS, FAST),
            *arms("GRPO offline", "grpo", (1e-5, 3e-5, 1e-4), {"k=1": "--k 1"}, FAST),
        ],
        seeds=8,
        test=syncing_test,
        data=ON_TALES,
    ),
    "dpo": planned(
        [arm._replace(options=BETAS) for arm in arms("DPO", "dpo", DPO, DPO_FLAGS, LOW_ENTROPY)],
        seeds=10,
        test=lambda rows: holm(pairs_test(rows, DPO_PAIRS)),
        data=ON_LOW_ENTROPY,
    ),
    "parity": planned(
        [*arms("GRPO", "grpo", GRPO, PARITY, FAST), *arms("KTO", "kto", LOW_KTO, PARITY, FAST)],
        seeds=15,
        test=lambda rows: pairs_test(rows, PARITY_PAIRS),
        data=ON_TALES,
    ),
    "tasks": Plan(
        [of_task(arm, i) for arm in TASK_ARMS for i in TASKS],
        metrics=("judge",),
        seeds=range(21, 22),
        tuned=[of_task(arm, i) for i in INSTANCES for arm in TUNED_TASK_ARMS],
        test=tasks_test,
        before_seeds=(21,),
        instances=True,
    ),
    "stories": Plan(
        [of_story(arm, i) for arm in STORY_ARMS for i in STORIES[2:]],
        metrics=("judge", "kl", "finished", "trigrams", "fluency"),
        seeds=range(21, 22),
        data=("", CHECKPOINTS),
        tuned=[of_story(arm, i) for i in STORIES[:2] for arm in STORY_ARMS],
        test=stories_test,
        before_seeds=(21,),
        instances=True,
    ),
    "baselines": Plan(
        [of_story(arm, i) for arm in BASELINE_ARMS + TUNED_BASELINES for i in STORIES[2:]],
        metrics=("judge", "kl", "finished", "trigrams", "fluency"),
        seeds=range(21, 22),
        tuned=[of_story(arm, i) for i in STORIES[:2] for arm in TUNED_BASELINES],
        test=baselines_test,
        before_seeds=(21,),
        instances=True,
        grows="once",
        ladder=LONG_LADDER,
    ),
    "hypo": Plan(
        [of_story(arm, i) for arm in HYPO_ARMS for i in STORIES[2:]],
        metrics=("judge", "kl", "finished", "trigrams", "fluency"),
        seeds=range(21, 22),
        tuned=[of_story(arm, i) for i in STORIES[:2] for arm in HYPO_ARMS],
        test=partial(tests_of, panel="DPO", pairs=HYPO_PAIRS),
        before_seeds=(21,),
        instances=True,
        grows="once",
        ladder=LONG_LADDER,
    ),
    "controls": Plan(
        [of_game(arm, i) for i in (0, *GAMES) for arm in CONTROL_ARMS],
        metrics=("curve", "eval/accuracy", "eval/finished", "clipped", "grad_norm_max"),
        seeds=range(21, 23),
        more_seeds={"game 0": range(23, 31)},
        tuning_seeds=(1, 2, 3),
        data=("--eval-dataset runs/problems_tuning.jsonl", ""),  # the report has the first of the test set
        tuned=[of_game(arm, 0) for arm in CONTROL_ARMS],
        rivals=RIVALS,
        test=controls_test,
        before_seeds=(21,),
        instances=True,
        grows="once",
        ladder=LONG_LADDER,
    ),
    "sums": Plan(
        [of_sums(arm, kind, "held_out") for arm in SUMS_ARMS for kind in KINDS[1:]],
        metrics=("late", "eval/accuracy", "eval/finished"),
        seeds=range(21, 23),
        tuned=[of_sums(arm, kind, "tuning") for kind in KINDS[:1] for arm in SUMS_ARMS],
        test=partial(tests_of, panel="sums", pairs=SUMS_PAIRS, metric="late"),
        before_seeds=(21,),
        instances=True,
        grows="once",
        ladder=LONG_LADDER,
    ),
    "gap": Plan(
        [of_sums(arm, kind, "held_out") for arm in GAP_ARMS for kind in KINDS[1:]],
        metrics=("late", "eval/accuracy", "eval/finished", "clipped"),
        seeds=range(21, 23),
        tuned=[of_sums(arm, KINDS[0], "tuning") for arm in GAP_ARMS],
        test=gap_test,
        before_seeds=(21,),
        instances=True,
        grows="never",
        rate_of={"clipping alone": "no clip"},
        gated=("no clip", "humanline", "clipping alone"),
        gate=has_gap,
    ),
    "chat": Plan(
        [of_chat(arm, kind, "held_out") for kind in CHATS for arm in CHAT_ARMS],
        metrics=("eval/loss", "eval/accuracy", "kl", "eval/length", "eval/finished", "clipped"),
        seeds=range(21, 22),
        more_seeds={"chat polite": range(22, 24)},
        tuned=[of_chat(arm, "polite", "tuning") for arm in CHAT_ARMS],
        before_seeds=(21,),
        grows="once",
        ladder=(2.5e-7, *CHAT_LRS, 1e-4),
        lowest_is_best=True,
    ),
}

TUNED = "offline + humanline"
README_TABLE = [
    Difference(
        "GRPO, stories (12 sets)",
        ("stories", "baselines"),
        "GRPO",
        "judge",
        (PAPERS_HUMANLINE, PAPERS_OFFLINE),
        (HUMANLINE_BETA, TUNED_BETA),
        (TUNED, "online"),
    ),
    Difference(
        "KTO, stories (12 sets)",
        ("stories", "baselines"),
        "KTO",
        "judge",
        (PAPERS_HUMANLINE, PAPERS_OFFLINE),
        (TUNED, "offline"),
        (TUNED, "online"),
    ),
    Difference(
        "DPO, stories (12 sets), k = 16",
        ("stories", "baselines"),
        "DPO",
        "judge",
        (TUNED, PAPERS_OFFLINE),
        (TUNED, "offline"),
        (TUNED, "online"),
        post_hoc=("default",),
    ),
    Difference(
        "GRPO, tales (20 tasks)",
        ("tasks",),
        "GRPO",
        "judge",
        (TUNED, PAPERS_EPSILON),
        (TUNED, "offline"),
        (),
        post_hoc=("default",),
    ),
    Difference("KTO, tales (20 tasks)", ("tasks",), "KTO", "judge", (), (TUNED, "offline"), ()),
    Difference(
        "shell game, S = 64 (6 games)",
        ("controls",),
        "game",
        "curve",
        (STALE_HUMANLINE, "ε 0.2"),
        (STALE_HUMANLINE, NO_CLIP_ARM),
        (STALE_HUMANLINE, "S = 1"),
    ),
    Difference(
        "SmolLM2, S = 16 (5 kinds), k = 1",
        ("sums",),
        "sums",
        "late",
        ("humanline", "ε 0.2"),
        ("humanline", "no clip"),
        ("humanline", "online"),
    ),
]
