"""The pictures of paper/results, from its csvs alone.

    pip install -r paper/requirements.txt
    python paper/pictures.py figure8 clipping   # all that have csvs if none is named

In a panel a dot is a run, a square the mean over seeds, a bar its 95% interval, a dotted line the score
before training. Panels that are compared share one scale. A few far runs do not set it: a triangle at the
edge has their values beside it, and the mean if that is beyond; bars are cut there.
"""

import csv
import sys
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from cycler import cycler

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from paper import curves  # noqa: E402

RESULTS = ROOT / "paper" / "results"
UNITS = {
    "eval/reward": "reward model's score",
    "judge": "hidden judge's score",
    "eval/accuracy": "accuracy at the end, share of problems",
    "curve": "accuracy, mean over training, share of problems",
}
SHARES = ("eval/accuracy", "curve")
SHOWN = {"figure7": ("curve", "eval/accuracy"), "stale": ("curve", "eval/accuracy")}
NOTES = {"figure6": "\nquartile 1: the chosen completions that are least likely under the initial policy"}
MEANING = "dot: a run; square, bar: mean, 95% interval; dotted: before training"
TEST = "p: Welch's test against the first arm by the {}, Holm over the figure's tests of it"
TEXT = ("command", "commit", "panel", "arm", "phase", "failed", "metric", "against", "first", "second")
AT_STEP = "eval/accuracy@"  # columns of the evaluations during training: "eval/accuracy@32"


def read(name: str) -> list[dict]:
    """The rows of a csv with numbers as numbers, without empty cells."""
    rows = []
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            rows.append({key: value if key in TEXT else float(value) for key, value in line.items() if value})
    return rows


def draw(name: str):
    """Writes paper/results/NAME.png."""
    if name == "time":
        return draw_time(read("time"))
    rows = [row for row in read(name) if row["phase"] == "reported"]
    shown = SHOWN.get(name, ("eval/reward", "judge"))
    lines = [line for line in read(f"{name}_arms") if line["metric"] in shown]
    if name == "figure8":
        return draw_sweep(rows, lines, shown)
    if name == "instances":
        return draw_instances(rows, lines)
    draw_arms(name, rows, lines, shown)
    if name == "dpo":
        draw_divergence(rows)


def save(figure, name: str):
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    plt.close(figure)


# === Arms side by side ===
def draw_arms(name: str, rows: list[dict], lines: list[dict], shown: tuple):
    """A panel for each part of the figure, a line for each arm; and learning curves where there are any."""
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
        of_panel = [line for line in lines if line["panel"] == panel]
        draw_panel(ax, panel, of_panel, [row for row in rows if row["panel"] == panel], shown, *ends)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=7)
    figure.supxlabel(explanation(name, lines, shown), fontsize=7)
    save(figure, name)
    if any(column.startswith(AT_STEP) for row in rows for column in row):
        draw_curves(name, rows, lines)


def scale_of(panel: str) -> str:
    """Panels of one scale: those of "KTO, lr 1e-3" and "KTO, lr 2e-3"; without a comma all."""
    script, comma, _ = panel.partition(", ")
    return script if comma else ""


def explanation(name: str, lines: list[dict], shown: tuple) -> str:
    """What stands below the panels: what marks mean, and a study's tests if they are few."""
    text = f"score of samples for the evaluation prompts\n{MEANING}"
    if shown[0] in SHARES:
        text = f"accuracy on held-out problems\n{MEANING}; bars within [0, 1]"
    if any("p_holm" in line for line in lines):
        text += f"\n{TEST.format(UNITS[shown[0]].removesuffix(', share of problems'))}"
    if (RESULTS / f"{name}_tests.csv").exists():
        tests = read(f"{name}_tests")
        if len(tests) > 6:
            tests = []
        for test in tests:
            difference = f"{test['difference']:.3f} [{test['low']:.3f}, {test['high']:.3f}]"
            text += f"\n{test['panel']}, {test['first']} - {test['second']}: {difference}"
    return text + NOTES.get(name, "")


def arms_of(lines: list[dict], panel: str) -> list[str]:
    names = [line["arm"] for line in lines if line["panel"] == panel and line["arm"] != "untrained"]
    return list(dict.fromkeys(names))


def limits(rows: list[dict], lines: list[dict], shown: tuple) -> tuple[float, float]:
    """Of the scale: the middle 90% of all runs and the scores before training, and some more."""
    values = [row[metric] for row in rows for metric in shown if metric in row]
    before = [line["mean"] for line in lines if line["arm"] == "untrained"]
    low, high = np.quantile(values, (0.05, 0.95))
    low, high = min([low, *before]), max([high, *before])
    margin = 0.15 * (high - low)
    return low - margin, high + margin


def draw_panel(ax, panel: str, lines: list[dict], rows: list[dict], shown: tuple, low: float, high: float):
    names = arms_of(lines, panel)
    labels = dict.fromkeys(names, "")
    for line in lines:
        place = shown.index(line["metric"])
        color = f"C{place}"
        if line["arm"] == "untrained":
            ax.axvline(line["mean"], color=color, linestyle=":", linewidth=1)
            continue
        height = names.index(line["arm"]) + 0.3 * place
        runs = [row[line["metric"]] for row in rows if row["arm"] == line["arm"] and line["metric"] in row]
        ax.plot(runs, [height] * len(runs), "o", color=color, alpha=0.3, markersize=3)
        mark_outside(ax, runs, line.get("mean"), height, (low, high), color)
        if "mean" in line:
            legend = UNITS[line["metric"]] if line["arm"] == names[0] else None  # once
            ax.plot([line["mean"]], [height], "s", color=color, markersize=4, label=legend)
        if "low" in line:
            ends = [line["low"], line["high"]]
            if line["metric"] in SHARES:
                ends = np.clip(ends, 0, 1)
            ax.plot(ends, [height] * 2, color=color, linewidth=1.5)
        if place == 0:
            labels[line["arm"]] = label_of(line)
    ax.set_yticks(range(len(names)), labels.values(), fontsize=7)
    ax.tick_params(axis="x", labelsize=7)
    ax.set(title=panel, xlim=(low, high), ylim=(len(names) - 0.4, -0.4))
    ax.grid(axis="x", alpha=0.3)


def mark_outside(ax, runs: list[float], mean: float | None, height: float, ends: tuple, color: str):
    """A triangle at the edge of the scale for runs beyond it, their values, and the mean if it is there."""
    low, high = ends
    beyond = {
        (low, "<", "left"): lambda value: value < low,
        (high, ">", "right"): lambda value: value > high,
    }
    for (edge, marker, side), outside in beyond.items():
        values = sorted(value for value in runs if outside(value))
        if values:
            ax.plot([edge], [height], marker, color=color, markersize=5, clip_on=False)
            text = ", ".join(f"{value:.2g}" for value in values)
            if outside(mean):
                text += f"; mean {mean:.2g}"
            ax.annotate(f"    {text}    ", (edge, height), fontsize=6, ha=side, va="bottom", color=color)


def label_of(line: dict) -> str:
    label = f"{line['arm']}\nlr {line['lr']:g}"
    if line.get("collapsed"):
        label += f", {line['collapsed']:.0f} of {line['runs']:.0f} collapsed"
    if "p_holm" in line:
        label += f"\np = {line['p_holm']:.2g}"
    return label


# === Scores over an axis ===
def draw_curves(name: str, rows: list[dict], lines: list[dict]):
    """NAME_curves.png: accuracy of held-out problems during training, by arm."""
    for line in lines:
        if (line["arm"], line["metric"]) == ("untrained", "eval/accuracy"):
            before = line["mean"]
    figure, ax = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    ax.set_prop_cycle(cycler(linestyle=("-", "--")) * cycler(color=plt.cm.tab10.colors))
    for arm in dict.fromkeys(row["arm"] for row in rows):
        values = []
        for row in rows:
            if row["arm"] == arm and not row.get("failed"):
                points = {int(key.removeprefix(AT_STEP)): row[key] for key in row if key.startswith(AT_STEP)}
                values.append([before, *points.values()])
                steps = [0, *points]
        if values:
            curves.draw_band(ax, arm, steps, np.array(values))
            ax.lines[-1].set_linewidth(3 if "humanline" in arm else 1.5)
    ax.set(xlabel="optimizer step", ylabel="accuracy, share of held-out problems")
    ax.set_title("line, band: mean over seeds and its 95% interval, within [0, 1]", fontsize=8)
    figure.legend(fontsize=7, loc="outside right upper")
    save(figure, f"{name}_curves")


def draw_sweep(rows: list[dict], lines: list[dict], shown: tuple):
    """figure8: scores over k, in powers of two; on the right without the ends that set the scale."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", width_ratios=(5, 3))
    for ax, smallest in zip(axes, (1, 16)):
        ticks = {}
        for place, metric in enumerate(shown):
            color = f"C{place}"
            for line in lines:
                if line["metric"] != metric:
                    continue
                if line["arm"] == "untrained":
                    if smallest == 1:
                        ax.axhline(line["mean"], color=color, linestyle=":", linewidth=1)
                    continue
                k = int(line["arm"].removeprefix("k="))
                if k < smallest:
                    continue
                ticks[k] = f"{k}\nlr {line['lr']:g}"
                x = k * 2 ** (0.1 * place)  # beside the other metric's
                ax.plot([x], [line["mean"]], "s", color=color, markersize=4, label=UNITS[metric])
                ax.vlines(x, line["low"], line["high"], color=color)
                scores = [row[metric] for row in rows if row["arm"] == line["arm"]]
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
    save(figure, "figure8")


def draw_instances(rows: list[dict], lines: list[dict]):
    """instances.png: the judge's score by arm; a line joins the means of an instance of the task."""
    ticks = (-2, -1, -0.4, -0.2, 0, 0.2, 0.4, 0.6)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained", sharey=True)
    for ax, script in zip(axes, ("KTO", "GRPO")):
        means = instance_means(script, rows, lines)
        places = range(len(means))
        for instance, scores in enumerate(zip(*means.values()), 1):
            marker = f"{'os^vD'[instance - 1]}-"
            ax.plot(places, scores, marker, alpha=0.7, markersize=4, linewidth=1, label=f"task {instance}")
        table = np.array(list(means.values())).T  # (instances, arms)
        half = curves.interval(table)
        ax.errorbar(places, table.mean(0), yerr=half, fmt="s", color="black", markersize=5, capsize=3)
        names = [arm.replace("offline + humanline", "offline +\nhumanline") for arm in means]
        ax.set_xticks(places, names, fontsize=8)
        ax.set_title(script)
        ax.grid(axis="y", alpha=0.3)
        ax.set_yscale("symlog", linthresh=0.6, linscale=1.5)  # one task ends far below the others
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes[0].set_ylabel(UNITS["judge"])
    axes[0].legend(fontsize=7)
    meaning = "mark: a task's runs; black, bar: mean of the tasks, 95% interval; beyond ±0.6 a log scale"
    figure.supxlabel(meaning, fontsize=7)
    save(figure, "instances")


def instance_means(script: str, rows: list[dict], lines: list[dict]) -> dict[str, list[float]]:
    """{arm: the judge's mean score in each instance}."""
    means = {"untrained": []}
    panels = dict.fromkeys(row["panel"] for row in rows if row["panel"].startswith(f"{script} "))
    for line in lines:
        if line["panel"] in panels and (line["arm"], line["metric"]) == ("untrained", "judge"):
            means["untrained"].append(line["mean"])
    for arm in ("offline", "offline + humanline", "online"):
        means[arm] = []
        for panel in panels:
            scores = [row["judge"] for row in rows if (row["panel"], row["arm"]) == (panel, arm)]
            means[arm].append(float(np.mean(scores)))
    return means


def draw_divergence(rows: list[dict]):
    """dpo_kl.png: the judge's score of every whole run against its distance from the initial policy."""
    figure, ax = plt.subplots(figsize=(5.5, 4), layout="constrained")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        runs = [row for row in rows if row["arm"] == arm and "kl" in row]
        ax.plot([row["kl"] for row in runs], [row["judge"] for row in runs], "o", label=arm, alpha=0.7)
    ax.set(xlabel="mean log π/π_0 of the samples, nats", ylabel=UNITS["judge"])
    ax.set_title("dot: a run", fontsize=8)
    ax.legend(fontsize=7)
    save(figure, "dpo_kl")


def draw_time(rows: list[dict]):
    """time.png: each run's score against its seconds; arms by colour."""
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    size = (4 * len(panels), 3.7)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained")
    for ax, panel in zip(axes, panels):
        runs = {}  # {(arm, seed): [(seconds, score)]}
        for row in rows:
            if row["panel"] == panel:
                runs.setdefault((row["arm"], row["seed"]), []).append((row["seconds"], row["score"]))
                metric = row["metric"]
        arms = list(dict.fromkeys(arm for arm, _ in runs))
        labelled = set()
        for (arm, _), points in runs.items():
            label = None if arm in labelled else arm
            labelled.add(arm)
            color = plt.cm.tab10.colors[arms.index(arm)]
            ax.plot(*zip(*points), color=color, alpha=0.7, linewidth=1, label=label)
        title = "math" if metric in SHARES else panel
        ax.set(title=title, xlabel="seconds of training", ylabel=UNITS[metric].replace(" at the end", ""))
        ax.legend(fontsize=7)
    figure.supxlabel("line: a run, without the seconds of its evaluations", fontsize=7)
    save(figure, "time")


def main(names: tyro.conf.Positional[list[str]] = []):  # noqa: B006
    """Args:
    names: figures, tables or studies; all that have csvs if none is named.
    """
    known = sorted(path.stem.removesuffix("_arms") for path in RESULTS.glob("*_arms.csv"))
    for name in names:
        if name not in known:
            raise SystemExit(f"error: {name!r} has no csv in {RESULTS}; there are {', '.join(known)}")
    for name in names or known:
        draw(name)
        print(f"wrote {RESULTS / name}.png")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
