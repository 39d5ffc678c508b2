"""Compares the arms of a study: scores, differences with their intervals, and pictures.

    pip install -r lab/requirements.txt
    python -m lab.compare controls                        # all arms, and the difference of each pair
    python -m lab.compare stories --group GRPO --metric kl
    python -m lab.compare controls --draw                 # lab/controls/controls.png
    python -m lab.compare --draw                          # every picture that a page shows

A study is a csv, lab/NAME/NAME.csv or lab/miniatures/NAME.csv, with a row for each run. Its columns `panel`
and `arm` name what is compared. If the csv has a column `instance`, or if the study is in BY_INSTANCE, arms
are paired by instance (a task, a draw of the data, a game, a kind of problem), and seeds are averaged first.
Otherwise only seeds differ, and Welch's test compares the arms. "a and b" stands for the rows of two studies.
"""

from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
import tyro
from scipy import stats

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

LAB = Path(__file__).resolve().parent
# In these csvs, `panel` is "GROUP INSTANCE": "GRPO 11" is GRPO on the eleventh draw.
BY_INSTANCE = ("instances", "tasks", "stories", "baselines", "hypo", "controls", "sums", "gap")
METRICS = {"stale": "curve", "controls": "curve", "rate": "curve", "figure7": "curve"}
METRICS |= {"sums": "late", "gap": "late"}
MARGIN = 0.05  # arms are on a par if two one-sided tests place their difference within ±MARGIN


class Difference(NamedTuple):
    """The mean of first - second, its 95% interval, and p-values (t, signed ranks, equivalence)."""

    mean: float
    low: float
    high: float
    p: float
    p_signed_rank: float
    p_equivalent: float

    def __str__(self):
        words = f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}], p = {self.p:.2g}"
        if np.isfinite(self.p_signed_rank):
            words += f", signed ranks {self.p_signed_rank:.2g}"
        return f"{words}, on a par: p = {self.p_equivalent:.2g}".replace("-0.", "−0.")


# === Reading ===
def path_of(study: str) -> Path:
    """Returns the csv of a study."""
    (found,) = LAB.glob(f"*/{study}.csv")
    return found


@cache
def read(study: str, phase: str = "reported") -> pd.DataFrame:
    """Reads the rows of one phase ("": all), with the columns `group` and, if arms are paired, `instance`."""
    tables = []
    for name in study.split(" and "):
        table = pd.read_csv(path_of(name), dtype={"commit": str})
        if name in BY_INSTANCE:
            table[["group", "instance"]] = table.panel.str.split(" ", n=1, expand=True)
        else:
            table["group"] = table.panel
        tables.append(table)
    table = pd.concat(tables)
    return table[table.phase == phase] if phase and "phase" in table else table


def metric_of(study: str) -> str:
    """Returns the metric that a study is decided by."""
    return METRICS.get(study.split(" and ")[-1], "judge")


@cache
def scores(study: str, group: str, metric: str = "") -> pd.DataFrame:
    """Returns the scores of a group: a row for each instance, or for each seed, and a column for each arm."""
    table = read(study)
    unit = "instance" if "instance" in table else "seed"
    return table[table.group == group].pivot_table(metric or metric_of(study), unit, "arm")


def before_training(study: str, group: str, metric: str = "") -> float:
    """Returns the untrained policy's score, a mean over the reported instances."""
    table = pd.read_csv(LAB / "untrained.csv")
    panels = read(study).query("group == @group").panel.unique()
    rows = table[table.study.isin(study.split(" and ")) & table.panel.isin(panels)]
    return rows.score[rows.metric == (metric or metric_of(study))].mean()


# === Statistics ===
def half_interval(values: pd.Series) -> float:
    """Returns half the width of the 95% t interval of a mean, nan for a single value."""
    values = values.dropna()
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else np.nan


def paired(leads: pd.Series, margin: float = MARGIN) -> Difference:
    """Tests the mean of differences of instances (or of seeds)."""
    found = stats.ttest_1samp(leads, 0)
    above = stats.ttest_1samp(leads, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(leads, margin, alternative="less").pvalue
    # scipy has NaN if all differences are 0.
    ranks = stats.wilcoxon(leads).pvalue if leads.any() else 1.0
    p = found.pvalue if leads.any() else 1.0
    return Difference(leads.mean(), *found.confidence_interval(), p, ranks, max(above, below))


def welch(first: pd.Series, second: pd.Series, margin: float = MARGIN) -> Difference:
    """Tests the difference of two means over seeds."""
    first, second = first.dropna(), second.dropna()
    found = stats.ttest_ind(first, second, equal_var=False)
    above = stats.ttest_ind(first + margin, second, equal_var=False, alternative="greater").pvalue
    below = stats.ttest_ind(first - margin, second, equal_var=False, alternative="less").pvalue
    mean = first.mean() - second.mean()
    return Difference(mean, *found.confidence_interval(), found.pvalue, np.nan, max(above, below))


def difference(study: str, group: str, first: str, second: str, metric="", margin=MARGIN) -> Difference:
    """Compares two arms: paired by instance if the study has instances, else by Welch's test."""
    table = scores(study, group, metric)
    if table.index.name == "instance":
        return paired((table[first] - table[second]).dropna(), margin)
    return welch(table[first], table[second], margin)


def holm(p_values: list[float]) -> list[float]:
    """Returns p-values with Holm's correction: p times the number of hypotheses left, never decreasing."""
    order = np.argsort(p_values)
    products = np.array(p_values)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(np.minimum(products, 1))
    return corrected.tolist()


# === Pictures ===
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")  # Okabe and Ito's, for colour-blind people


def draw_arms(study: str):
    """Draws the score of every arm: a dot for each instance or seed, the mean, and its 95% interval."""
    groups = read(study).group.unique()
    size = (2.5 + 3.5 * len(groups), 1.5 + 0.35 * max(scores(study, group).shape[1] for group in groups))
    figure, axes = plt.subplots(1, len(groups), figsize=size, layout="constrained", squeeze=False)
    for ax, group in zip(axes[0], groups):
        table = scores(study, group)
        arms = table.mean().sort_values().index
        for place, arm in enumerate(arms):
            values = table[arm].dropna()
            ax.plot(values, [place] * len(values), "o", color=COLORS[0], alpha=0.3, markersize=4)
            half = half_interval(values)
            ax.errorbar(values.mean(), place, xerr=half, fmt="s", color="black", capsize=3)
        before = before_training(study, group)
        if np.isfinite(before):
            ax.axvline(before, color="0.5", linestyle=":")
        ax.set_yticks(range(len(arms)), arms, fontsize=8)
        ax.set(title=group, xlabel=metric_of(study))
        ax.grid(axis="x", alpha=0.3)
    unit = scores(study, groups[0]).index.name
    figure.supxlabel(f"dot: {unit}; square, bar: mean, 95% interval; dotted: before training", fontsize=8)
    return figure


def draw_curves(curves: dict[str, pd.DataFrame], unit: str):
    """Draws scores against steps: a thin line for each run, a thick one for the mean of an arm's runs.

    curves: {arm: its scores, a row for each step and a column for each run}.
    """
    figure, ax = plt.subplots(figsize=(6.8, 3), layout="constrained")
    for color, (arm, table) in zip(COLORS, curves.items()):
        ax.plot(table.index, table, color=color, linewidth=0.6, alpha=0.5)
        ax.plot(table.index, table.mean(axis=1), color=color, linewidth=2.2, label=arm)
    ax.set(xlabel="optimizer step", ylabel=unit, xlim=(0, None))
    ax.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    return figure


def draw_learning(script: str):
    """Draws the learning curves of a script's default run and of baselines."""
    table = pd.read_csv(path_of("learning")).query("script == @script")
    curves = {
        arm: rows.pivot(index="step", columns="seed", values="score")
        for arm, rows in table.groupby("arm", sort=False)
    }
    return draw_curves(curves, "reward model's score")


def curves_of_mathematics() -> dict[str, pd.DataFrame]:
    """Returns the curves of five arms of `stale`, from the untrained accuracy on."""
    table = read("stale")
    steps = [column for column in table if column.startswith("eval/accuracy@")]
    curves = {}
    for arm in ("humanline, k=16", "ε 0.8", "ε 0.2", "CISPO", "S = 1"):
        runs = table[table.arm == arm].set_index("seed")[steps].T
        runs.index = [int(step.partition("@")[2]) for step in steps]
        runs.loc[0] = before_training("stale", "S = 64", "eval/accuracy")
        curves[arm if arm == "S = 1" else f"S = 64, {arm}"] = runs.sort_index()
    return curves


def draw_real_run():
    """Draws the accuracy of SmolLM2-135M on held-out sums, three seeds."""
    table = pd.read_csv(path_of("real_run"))
    return draw_curves(
        {"three seeds": table.pivot(index="step", columns="seed", values="accuracy")}, "accuracy"
    )


def draw_distance():
    """Draws the judge's score of each run of `dpo` against its distance from the initial policy."""
    figure, ax = plt.subplots(figsize=(5.5, 4), layout="constrained")
    for arm, runs in read("dpo").groupby("arm", sort=False):
        ax.plot(runs.kl, runs.judge, "o", label=arm, alpha=0.7)
    ax.set(xlabel="mean log π/π_0 of the samples, nats", ylabel="hidden judge's score", title="dot: a run")
    ax.legend(fontsize=7)
    return figure


def draw_assumptions():
    """Draws how far log-ratios go, against k: the share of tokens beyond ±1.5, and their tail."""
    table = pd.read_csv(path_of("assumptions"))
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    labels = {"beyond": "share of tokens beyond ±1.5", "quantile_999": "quantile 0.999 of |log-ratio|, nats"}
    for ax, (column, label) in zip(axes, labels.items()):
        for run, rows in table.groupby("run", sort=False):
            ax.plot(rows.k, rows[column], "o-", label=run)
        ax.set_xscale("log", base=2)
        ax.set(
            xticks=table.k.unique(),
            xticklabels=table.k.unique(),
            xlabel="k, steps between syncs",
            ylabel=label,
        )
        ax.grid(alpha=0.3)
    axes[0].set_yscale("symlog", linthresh=1e-6)  # a share may be 0
    axes[0].set_ylim(0, 0.2)
    axes[0].legend(fontsize=8)
    axes[1].axhline(1.5, color="black", linestyle=":")
    return figure


PICTURES = {  # the pictures that pages show
    "learning/learning_dpo.png": lambda: draw_learning("dpo"),
    "learning/learning_kto.png": lambda: draw_learning("kto"),
    "learning/learning_grpo.png": lambda: draw_learning("grpo"),
    "learning/learning_grpo_math.png": lambda: draw_curves(curves_of_mathematics(), "accuracy"),
    "real_run/real_run.png": draw_real_run,
    "dpo/dpo_kl.png": draw_distance,
    "assumptions/assumptions.png": draw_assumptions,
    "controls/controls.png": lambda: draw_arms("controls"),
}


def save(figure, path: Path):
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"wrote {path.relative_to(LAB.parent)}")


# === Command ===
def show(study: str, groups: list[str], metric: str, margin: float):
    """Prints the mean of each arm, and the difference of each pair of arms."""
    rates = read(study).groupby(["group", "arm"]).lr.first() if "lr" in read(study) else None
    for group in groups:
        table = scores(study, group, metric)
        print(f"\n{group}: {metric}, over {len(table)} of {table.index.name}")
        print(f"  before training  {before_training(study, group, metric):.3f}")
        for arm, values in table.items():
            rate = "" if rates is None else f", lr {rates[group, arm]:g}"
            print(f"  {arm}{rate}  {values.mean():.3f} ± {half_interval(values):.3f}")
        for first, second in combinations(table, 2):
            print(f"  ({first}) − ({second})  {difference(study, group, first, second, metric, margin)}")


def main(
    study: tyro.conf.Positional[str] = "",
    group: str = "",
    metric: str = "",
    margin: float = MARGIN,
    draw: bool = False,
):
    """Prints or draws a study.

    Args:
        study: name of a csv in lab/; without a name, --draw makes the pictures that pages show.
        group: one group of panels (GRPO, KTO, …) instead of all.
        metric: column of the csv; "": the one that the study is decided by.
        margin: largest difference of arms that are on a par.
        draw: draw a picture instead of printing.
    """
    if draw and study:
        save(draw_arms(study), path_of(study).with_suffix(".png"))
    elif draw:
        for name, function in PICTURES.items():
            save(function(), LAB / name)
    else:
        groups = [group] if group else list(read(study).group.unique())
        show(study, groups, metric or metric_of(study), margin)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
