"""Draws the pictures of paper/results from its csv files.

    pip install -r paper/requirements.txt
    python paper/pictures.py figure8 clipping   # without a name: all pictures that have csv files

In a panel, a dot is a run, a square the mean over seeds, a bar the 95% interval of the mean, and a dotted
line the score before training. Panels that are compared share one scale. A few runs far away do not set the
scale. They are a triangle at the edge, with their values beside it, and with the mean if it is also outside.
Bars end at the edge.
"""

import csv
import re
import sys
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import tyro
from cycler import cycler

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from paper import curves, study  # noqa: E402
from paper.trials import write_csv  # noqa: E402

RESULTS = ROOT / "paper" / "results"
UNITS = {
    "eval/reward": "reward model's score",
    "judge": "hidden judge's score",
    "eval/accuracy": "accuracy at the end, share of problems",
    "curve": "accuracy, mean over training, share of problems",
}
SHARES = ("eval/accuracy", "curve")
MEANING = "dot: a run; square, bar: mean, 95% interval; dotted: before training"
TEST = "p: Welch's test against the first arm by the {}, Holm over the figure's tests of it"
TEXT = "command commit panel arm phase failed processor metric against first second".split()
AT_STEP = "eval/accuracy@"  # columns of the evaluations during training: "eval/accuracy@32"


def read(folder: Path, name: str) -> list[dict]:
    """Reads the rows of a csv, without empty cells. All columns but those in TEXT are numbers."""
    rows = []
    with (folder / f"{name}.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            rows.append({key: value if key in TEXT else float(value) for key, value in line.items() if value})
    return rows


def reported_rows(folder: Path) -> dict[str, list[dict]]:
    """Returns the reported rows of the studies in the README's table, {study: rows}."""
    names = dict.fromkeys(name for table_row in study.README_TABLE for name in table_row.studies)
    return {name: select(read(folder, name), phase="reported") for name in names}


def shown_of(name: str) -> tuple[str, str]:
    """Returns the two metrics that a picture shows."""
    in_mathematics = name in ("figure7", "stale", "sums", "gap", "controls")
    return ("curve", "eval/accuracy") if in_mathematics else ("eval/reward", "judge")


def draw(name: str, folder: Path = RESULTS):
    """Writes NAME.png, and for some names further pictures, beside the csv files.

    The README's numbers link to the lines of differences.csv, which is made of several studies.
    """
    if name == "differences":
        write_csv(folder / "differences.csv", study.differences(reported_rows(folder)))
    for picture, figure in figures_of(name, folder).items():
        figure.savefig(folder / f"{picture}.png", dpi=110)
        plt.close(figure)


def figures_of(name: str, folder: Path) -> dict:
    """Draws all pictures of a name. Returns {name of the picture: figure}."""
    if name == "time":
        return {name: draw_time(read(folder, name))}
    if name == "chat":
        return {}  # a table is enough
    if name == "differences":
        return {name: draw_differences(study.differences(reported_rows(folder)))}
    rows = [row for row in read(folder, name) if row["phase"] == "reported"]
    lines = [line for line in read(folder, f"{name}_arms") if line["metric"] in shown_of(name)]
    if name == "figure8":
        return {name: draw_sweep(rows, lines)}
    if name == "instances":
        return {name: draw_instances(rows, lines)}
    if name == "tasks":
        return {name: draw_tasks(rows, lines)}
    if name == "stories":
        return {name: draw_stories(rows)}
    if name == "baselines":
        return {name: draw_frontier(read(folder, "stories") + read(folder, name))}
    if name == "hypo":
        return {name: draw_frontier(read(folder, name), ("DPO",))}
    if name in ("sums", "gap", "controls"):
        over = "games" if name == "controls" else "kinds"
        return {name: draw_curves(study.over_seeds(rows), lines, over)}
    tests = []
    if (folder / f"{name}_tests.csv").exists():
        tests = read(folder, f"{name}_tests")
    figures = {name: draw_arms(name, rows, lines, tests)}
    if any(column.startswith(AT_STEP) for row in rows for column in row):
        figures[f"{name}_curves"] = draw_curves(rows, lines)
    if name == "dpo":
        figures["dpo_kl"] = draw_divergence(rows)
    return figures


def select(rows: list[dict], **wanted) -> list[dict]:
    """Returns the rows that have all these values. None selects rows without a value."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


# === Arms side by side ===
def draw_arms(name: str, rows: list[dict], lines: list[dict], tests: list[dict]):
    """Draws a panel for each part of the figure, with a row for each arm."""
    shown = shown_of(name)
    panels = list(dict.fromkeys(line["panel"] for line in lines))
    most = max(len(arms_of(lines, panel)) for panel in panels)
    size = (max(1 + 3.4 * len(panels), 6), 1.9 + 0.42 * most)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for ax, panel in zip(axes[0], panels):
        compared = [other for other in panels if scale_of(other) == scale_of(panel)]
        ends = limits(
            [row for row in rows if row["panel"] in compared],
            [line for line in lines if line["panel"] in compared],
            shown,
        )
        draw_panel(ax, panel, select(lines, panel=panel), select(rows, panel=panel), shown, *ends)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=7)
    figure.supxlabel(explanation(name, lines, tests), fontsize=7)
    return figure


def scale_of(panel: str) -> str:
    """Returns what panels with the same scale have in common.

    For example, "KTO, lr 1e-3" and "KTO, lr 2e-3" have one scale. All panels without a comma have one scale.
    """
    script, comma, _ = panel.partition(", ")
    return script if comma else ""


def explanation(name: str, lines: list[dict], tests: list[dict]) -> str:
    """Returns the text below the panels: the meaning of the marks, and up to six tests of a study."""
    first, _ = shown_of(name)
    text = f"score of samples for the evaluation prompts\n{MEANING}"
    if first in SHARES:
        text = f"accuracy on held-out problems\n{MEANING}; bars within [0, 1]"
    if any("p_holm" in line for line in lines):
        text += f"\n{TEST.format(UNITS[first].removesuffix(', share of problems'))}"
    if len(tests) <= 6:
        for test in tests:
            difference = f"{test['difference']:.3f} [{test['low']:.3f}, {test['high']:.3f}]"
            text += f"\n{test['panel']}, {test['first']} - {test['second']}: {difference}"
    if name == "figure6":
        text += "\nquartile 1: the chosen completions that are least likely under the initial policy"
    return text


def arms_of(lines: list[dict], panel: str) -> list[str]:
    """Returns the names of a panel's arms."""
    names = dict.fromkeys(line["arm"] for line in select(lines, panel=panel))
    return [name for name in names if name != "untrained"]


def limits(rows: list[dict], lines: list[dict], shown: tuple) -> tuple[float, float]:
    """Returns the ends of the scale: the middle 90% of all runs, the scores before training, and a margin."""
    values = [row[metric] for row in rows for metric in shown if metric in row]
    before = [line["mean"] for line in select(lines, arm="untrained")]
    low, high = np.quantile(values, (0.05, 0.95))
    low, high = min([low, *before]), max([high, *before])
    margin = 0.15 * (high - low)
    return low - margin, high + margin


def draw_panel(ax, panel: str, lines: list[dict], rows: list[dict], shown: tuple, low: float, high: float):
    """Draws a panel on the scale from low to high, with both metrics of each arm."""
    names = arms_of(lines, panel)
    labels = dict.fromkeys(names, "")
    for line in lines:
        metric = line["metric"]
        place = shown.index(metric)
        color = f"C{place}"
        if line["arm"] == "untrained":
            ax.axvline(line["mean"], color=color, linestyle=":", linewidth=1)
            continue
        height = names.index(line["arm"]) + 0.3 * place
        runs = [row[metric] for row in select(rows, arm=line["arm"]) if metric in row]
        ax.plot(runs, [height] * len(runs), "o", color=color, alpha=0.3, markersize=3)
        mark_outside(ax, runs, line.get("mean"), height, (low, high), color)
        if "mean" in line:
            legend = UNITS[metric] if line["arm"] == names[0] else None  # only once
            ax.plot([line["mean"]], [height], "s", color=color, markersize=4, label=legend)
        if "low" in line:
            ends = [line["low"], line["high"]]
            if metric in SHARES:
                ends = np.clip(ends, 0, 1)
            ax.plot(ends, [height] * 2, color=color, linewidth=1.5)
        if place == 0:
            labels[line["arm"]] = label_of(line)
    ax.set_yticks(range(len(names)), labels.values(), fontsize=7)
    ax.tick_params(axis="x", labelsize=7)
    ax.set(title=panel, xlim=(low, high), ylim=(len(names) - 0.4, -0.4))
    ax.grid(axis="x", alpha=0.3)


def mark_outside(ax, runs: list[float], mean: float | None, height: float, ends: tuple, color: str):
    """Draws a triangle at each edge of the scale that runs exceed, with their values.

    The mean stands there too if it is beyond the edge.
    """
    for edge, sign, marker, side in zip(ends, (-1, 1), "<>", ("left", "right")):
        values = sorted(value for value in runs if sign * (value - edge) > 0)
        if values:
            ax.plot([edge], [height], marker, color=color, markersize=5, clip_on=False)
            text = ", ".join(f"{value:.2g}" for value in values)
            if sign * (mean - edge) > 0:
                text += f"; mean {mean:.2g}"
            ax.annotate(f"    {text}    ", (edge, height), fontsize=6, ha=side, va="bottom", color=color)


def label_of(line: dict) -> str:
    """Returns the label of an arm: its learning rate, how many runs collapsed, and p."""
    label = f"{line['arm']}\nlr {line['lr']:g}"
    if line.get("collapsed"):
        label += f", {line['collapsed']:.0f} of {line['runs']:.0f} collapsed"
    if "p_holm" in line:
        label += f"\np = {line['p_holm']:.2g}"
    return label


# === Scores over steps, k, tasks, KL or time ===
def draw_curves(rows: list[dict], lines: list[dict], over: str = "seeds"):
    """Draws the accuracy on held-out problems during training, with a curve for each arm."""
    untrained = select(lines, arm="untrained", metric="eval/accuracy")
    before = {line["panel"]: line["mean"] for line in untrained}
    figure, ax = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    ax.set_prop_cycle(cycler(linestyle=("-", "--")) * cycler(color=plt.cm.tab10.colors))
    for arm in dict.fromkeys(row["arm"] for row in rows):
        values = []
        for row in select(rows, arm=arm, failed=None):
            points = {int(key.removeprefix(AT_STEP)): row[key] for key in row if key.startswith(AT_STEP)}
            values.append([before[row["panel"]], *points.values()])
            steps = [0, *points]
        if values:
            curves.draw_band(ax, arm, steps, np.array(values), over)
            ax.lines[-1].set_linewidth(3 if "humanline" in arm else 1.5)
    ax.set(xlabel="optimizer step", ylabel="accuracy, share of held-out problems")
    ax.set_title(f"line, band: mean over {over} and its 95% interval, within [0, 1]", fontsize=8)
    figure.legend(fontsize=7, loc="outside right upper")
    return figure


def draw_sweep(rows: list[dict], lines: list[dict]):
    """Draws figure8: scores over k, and on the right only those from k = 16 on, with a scale of their own."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", width_ratios=(5, 3))
    for ax, smallest in zip(axes, (1, 16)):
        ticks = {}
        for line in lines:
            metric = line["metric"]
            place = shown_of("figure8").index(metric)
            color = f"C{place}"
            if line["arm"] == "untrained":
                if smallest == 1:
                    ax.axhline(line["mean"], color=color, linestyle=":", linewidth=1)
                continue
            k = int(line["arm"].removeprefix("k="))
            if k < smallest:
                continue
            ticks[k] = f"{k}\nlr {line['lr']:g}"
            x = k * 2 ** (0.1 * place)  # the second metric stands beside the first
            ax.plot([x], [line["mean"]], "s", color=color, markersize=4, label=UNITS[metric])
            ax.vlines(x, line["low"], line["high"], color=color)
            scores = [row[metric] for row in select(rows, arm=line["arm"])]
            ax.plot([x] * len(scores), scores, "o", color=color, alpha=0.3, markersize=3)
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(ticks), ticks.values(), fontsize=7)
        ax.grid(axis="y", alpha=0.3)
        ax.set_xlabel("k, optimizer steps between syncs")
    axes[0].set_ylabel("score of samples for the evaluation prompts")
    axes[1].set_title("the same from 16 on", fontsize=8)
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels())))
    axes[0].legend(handles.values(), handles, fontsize=7)
    figure.supxlabel(MEANING, fontsize=7)
    return figure


def draw_instances(rows: list[dict], lines: list[dict]):
    """Draws the judge's score by arm. A line joins the means of an instance of the task."""
    ticks = (-2, -1, -0.4, -0.2, 0, 0.2, 0.4, 0.6)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained", sharey=True)
    for ax, script in zip(axes, ("KTO", "GRPO")):
        panels = dict.fromkeys(row["panel"] for row in rows if row["panel"].startswith(f"{script} "))
        arms = ("untrained", "offline", "offline + humanline", "online")
        table = []  # (instances, arms)
        for panel in panels:
            panel_lines = select(lines, panel=panel, metric="judge")
            table.append([select(panel_lines, arm=arm)[0]["mean"] for arm in arms])
        places = range(len(arms))
        for instance, scores in enumerate(table, 1):
            marker = f"{'os^vD'[instance - 1]}-"
            ax.plot(places, scores, marker, alpha=0.7, markersize=4, linewidth=1, label=f"task {instance}")
        table = np.array(table)
        half = curves.interval(table)
        ax.errorbar(places, table.mean(0), yerr=half, fmt="s", color="black", markersize=5, capsize=3)
        names = [arm.replace("offline + humanline", "offline +\nhumanline") for arm in arms]
        ax.set_xticks(places, names, fontsize=8)
        ax.set_title(script)
        ax.grid(axis="y", alpha=0.3)
        ax.set_yscale("symlog", linthresh=0.6, linscale=1.5)  # because one task ends far below the others
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes[0].set_ylabel(UNITS["judge"])
    axes[0].legend(fontsize=7)
    meaning = "mark: a task's runs; black, bar: mean of the tasks, 95% interval; beyond ±0.6 a log scale"
    figure.supxlabel(meaning, fontsize=7)
    return figure


# {arm: its mark and one of Okabe and Ito's colours, which colour-blind people can tell apart}
ARM_MARKS = {
    "before training": ("|", "black"),
    "offline, ε 0.5": ("v", "#E69F00"),
    "offline, ε 0.15": ("v", "#E69F00"),
    "offline": ("o", "#0072B2"),
    "offline, no clip": ("^", "#CC79A7"),
    "offline + humanline": ("s", "#D55E00"),
    "online": ("D", "#009E73"),
}


def draw_tasks(rows: list[dict], lines: list[dict]):
    """Draws the judge's score by task, sorted by offline's scores, and below it the means over tasks."""
    scripts = list(dict.fromkeys(row["panel"].split()[0] for row in rows))
    size = (1 + 5 * len(scripts), 7)
    figure, axes = plt.subplots(
        1, len(scripts), figsize=size, layout="constrained", squeeze=False, sharex=True
    )
    before = {line["panel"]: line["mean"] for line in select(lines, arm="untrained")}
    for ax, script in zip(axes[0], scripts):
        scores = {"before training": {}}  # {arm: {panel: score}}
        for row in rows:
            if row["panel"].startswith(f"{script} "):
                scores["before training"][row["panel"]] = before[row["panel"]]
                scores.setdefault(row["arm"], {})[row["panel"]] = row["judge"]
        draw_script(ax, script, scores)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8)
    return figure


def draw_script(ax, script: str, scores: dict[str, dict]):
    """Draws the panel of a script. scores: {arm: {panel: score}}."""
    panels = sorted(scores["offline"], key=scores["offline"].get, reverse=True)
    bottom = len(panels) + 0.7
    for place, panel in enumerate(panels):
        ends = [scores[arm][panel] for arm in ("offline", "offline + humanline")]
        ax.plot(ends, [place] * 2, color="0.75", linewidth=2, zorder=1)
    for arm, (marker, color) in ARM_MARKS.items():
        if arm in scores:
            values = np.array([scores[arm][panel] for panel in panels])
            ax.plot(values, range(len(panels)), marker, color=color, markersize=6, label=arm)
            half = curves.interval(values)
            ax.errorbar(values.mean(), bottom, xerr=half, fmt=marker, color=color, capsize=3)
            bottom += 0.5
    ax.axhline(len(panels) - 0.3, color="0.6", linewidth=0.8)
    names = [f"task {panel.split()[1]}" for panel in panels]
    ax.set_yticks([*range(len(panels)), len(panels) + 1.3], [*names, "mean, 95%"], fontsize=7)
    ax.set_ylim(bottom, -0.7)
    ax.set(title=script, xlabel=UNITS["judge"])
    ax.grid(axis="x", alpha=0.3)


def draw_stories(rows: list[dict]):
    """Draws the judge's score against KL: means of the arms at each checkpoint, and the end of each run."""
    scripts = list(dict.fromkeys(row["panel"].split()[0] for row in rows))
    size = (1 + 5 * len(scripts), 4.3)
    figure, axes = plt.subplots(
        1, len(scripts), figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    for ax, script in zip(axes[0], scripts):
        for arm, (marker, color) in ARM_MARKS.items():
            runs = []
            for row in select(rows, arm=arm):
                if row["panel"].startswith(f"{script} "):
                    runs.append(row)
            finished = [row for row in runs if "failed" not in row]
            if finished:
                kls, scores = path_of(finished)
                half = curves.interval(scores)
                ends = (kls[:, -1], scores[:, -1])
                ax.errorbar(
                    kls.mean(0),
                    scores.mean(0),
                    yerr=half,
                    fmt=f"{marker}-",
                    color=color,
                    label=arm,
                    capsize=2,
                )
                ax.plot(*ends, marker, color=color, alpha=0.3, markersize=4)
        ax.set(title=script, xlabel="KL from the initial policy, nats a completion")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    axes[0, 0].set_ylabel("judge: VADER's sentiment, mean over sentences")
    meaning = (
        "line: mean of the draws before training and at each checkpoint, 95% interval; faint: end of a run"
    )
    figure.supxlabel(meaning, fontsize=7)
    return figure


FRONTIER_MARKS = {  # {arm: its label, mark and colour}
    "offline, ε 0.15": ("offline, humanline's ε and β", "<", "#E69F00"),
    "offline, paper's ε and β": ("offline, paper's ε and β", "v", "#E69F00"),
    "offline": ("offline, tuned (GRPO: not its β)", "o", "#0072B2"),
    "offline, no clip, tuned β": ("offline, tuned with β", "^", "#0072B2"),
    "no reference": ("offline, no reference", "X", "#CC79A7"),
    "HyPO": ("HyPO, tuned", "h", "#CC79A7"),
    "humanline, paper's ε and β": ("humanline, paper's ε and β, k = 1", "P", "#D55E00"),
    "humanline, paper's β, k = 1's rate": ("humanline, paper's β, DPO's rate for k = 1", "p", "#D55E00"),
    "offline + humanline": ("humanline, tuned (GRPO: not its β)", "s", "#D55E00"),
    "humanline, tuned β": ("humanline, tuned with β", "*", "#D55E00"),
    "online": ("online, tuned", "D", "#009E73"),
}


def draw_frontier(rows: list[dict], scripts: tuple[str, ...] = ("GRPO", "KTO", "DPO")):
    """Draws the judge's score against KL at the ends of runs: the arms' means, and faint those of tuning."""
    size = (2 + 3 * len(scripts), 4.6)
    figure, axes = plt.subplots(
        1, len(scripts), figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    axes = axes[0]
    for ax, script in zip(axes, scripts):
        for arm, (label, marker, color) in FRONTIER_MARKS.items():
            settings = {}  # {command without draw and seed: runs}
            for row in select(rows, arm=arm, failed=None):
                if row["panel"].startswith(f"{script} "):
                    setting = re.sub(r"stories/\d+|--seed \d+", "", row["command"])
                    settings.setdefault((row["phase"], setting), []).append((row["kl"], row["judge"]))
            for (phase, _), ends in settings.items():
                kls, scores = np.array(ends).T
                if phase == "tuning":
                    ax.plot(kls.mean(), scores.mean(), marker, color=color, alpha=0.25, markersize=5)
                    continue
                error = {"xerr": curves.interval(kls), "yerr": curves.interval(scores)}
                style = dict(color=color, label=label, capsize=2, markersize=8, markeredgecolor="black")
                ax.errorbar(kls.mean(), scores.mean(), fmt=marker, **error, **style)
        ax.set(title=script, xlabel="KL from the initial policy at the end, nats", xscale="log")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("judge: VADER's sentiment, mean over sentences")
    handles = {}  # {label: handle}; no panel has all arms
    for ax in axes:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(scripts), fontsize=8)
    meaning = "mark with bars: mean of twelve draws, 95% interval; faint: a setting tried on two draws, mean"
    figure.supxlabel(meaning, fontsize=7)
    return figure


def path_of(rows: list[dict]) -> tuple:
    """Returns KL and the judge's score at each checkpoint, (runs, checkpoints) each."""
    steps = sorted(int(key.removeprefix("kl@")) for key in rows[0] if key.startswith("kl@"))
    columns = []
    for name in ("kl", "judge"):
        columns.append(np.array([[row[f"{name}@{step}"] for step in steps] for row in rows]))
    return tuple(columns)


DIFFERENCE_COLORS = {  # {column of the README's table: (its label, colour)}
    "default": ("a default clip or β", "#E69F00"),
    "control": ("a simple control", "#0072B2"),
    "online": ("online", "#009E73"),
}


def draw_differences(lines: list[dict]):
    """Draws the README's table: humanline minus other arms, with intervals. The grey is within ±MARGIN.

    A dot is hollow if its arms were chosen after the runs.
    """
    rows = list(dict.fromkeys(line["row"] for line in lines))
    figure, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
    ax.axvspan(-study.MARGIN, study.MARGIN, color="0.9")
    ax.axvline(0, color="black", linewidth=1)
    for place, (column, (label, color)) in enumerate(DIFFERENCE_COLORS.items()):
        cells = select(lines, column=column)
        heights = [rows.index(line["row"]) + 0.22 * (place - 1) for line in cells]
        means = [line["difference"] for line in cells]
        ends = [[line["difference"] - line["low"], line["high"] - line["difference"]] for line in cells]
        ax.errorbar(
            means, heights, xerr=np.transpose(ends), fmt="o", color=color, label=f"minus {label}", capsize=3
        )
        for x, y, line in zip(means, heights, cells):
            if line["post_hoc"]:
                ax.plot(x, y, "o", color=color, markerfacecolor="white", zorder=3)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3, fontsize=9)
    meaning = "humanline's mean score minus that of another arm, 95% interval (last two rows: accuracy)"
    marks = f"right of 0: humanline is ahead; grey: within ±{study.MARGIN}; hollow: chosen after the runs"
    figure.supxlabel(f"{meaning}\n{marks}", fontsize=9)
    return figure


def draw_divergence(rows: list[dict]):
    """Draws the judge's score of every run that did not collapse against its KL from the initial policy."""
    figure, ax = plt.subplots(figsize=(5.5, 4), layout="constrained")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        runs = [row for row in select(rows, arm=arm) if "kl" in row]
        ax.plot([row["kl"] for row in runs], [row["judge"] for row in runs], "o", label=arm, alpha=0.7)
    ax.set(xlabel="mean log π/π_0 of the samples, nats", ylabel=UNITS["judge"])
    ax.set_title("dot: a run", fontsize=8)
    ax.legend(fontsize=7)
    return figure


def draw_time(rows: list[dict]):
    """Draws the score of each run against its seconds of training. The colour is the arm's."""
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.7), layout="constrained")
    for ax, panel in zip(axes, panels):
        panel_rows = select(rows, panel=panel)
        for place, arm in enumerate(dict.fromkeys(row["arm"] for row in panel_rows)):
            label = arm
            for seed in dict.fromkeys(row["seed"] for row in panel_rows):
                points = select(panel_rows, arm=arm, seed=seed)
                seconds = [row["seconds"] for row in points]
                scores = [row["score"] for row in points]
                color = plt.cm.tab10.colors[place]
                ax.plot(seconds, scores, color=color, alpha=0.7, linewidth=1, label=label)
                label = None  # only once
        metric = panel_rows[0]["metric"]
        title = "math" if metric in SHARES else panel
        ax.set(title=title, xlabel="seconds of training", ylabel=UNITS[metric].replace(" at the end", ""))
        ax.legend(fontsize=7)
    figure.supxlabel("line: a run, without the seconds of its evaluations", fontsize=7)
    return figure


KNOWN = sorted(path.stem.removesuffix("_arms") for path in RESULTS.glob("*_arms.csv"))
KNOWN.append("differences")


def main(names: tyro.conf.Positional[list[Literal[*KNOWN]]] = KNOWN):
    """Writes pictures.

    Args:
        names: figures, tables or studies, or differences (the README's table); without a name: all.
    """
    for name in names:
        draw(name)
        print(f"wrote {RESULTS / name}.png")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
