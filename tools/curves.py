"""Draws learning curves: any metric of any runs against the number of optimizer steps made.

    pip install -r paper/requirements.txt
    python paper/curves.py "runs/ours-*" runs/theirs --metric loss --metric grad_norm --smooth 8
    python paper/curves.py --reference  # the pictures of docs/curves.md

Each folder or quoted pattern is a line, the mean over its runs. The band around it is the 95% interval of
Student's t for this mean, at each step. The band says how well the mean is known, not how much the runs
differ, and is very wide for two runs. A single run has no band.
"""

import csv
import glob
import gzip
import json
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from scipy import stats

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

plt.style.use("tableau-colorblind10")
ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"  # the logs of default runs, and of broken ones
PICTURES = ROOT / "docs"
SCRIPTS = {  # {script: its default learning rate and k}
    "dpo": "lr 1e-3, k 16",
    "kto": "lr 3e-4, k 32",
    "grpo": "lr 3e-4, k 32",
    "grpo_math": "lr 1e-4, S 64, k 16",
}
FAULTS = {  # {end of a log's name: (the fault, last step to draw)}
    "late": ("sync after the update", 64),
    "never": ("reference never synced", 160),
    "lr": ("learning rate ten times too large", 160),
}
PANELS = {  # {metric: label}
    "reward": "eval/reward",
    "loss": "loss",
    "humanline/log_ratio_abs_mean": "mean |log-ratio|, nats",
    "grad_norm": "grad_norm",
}


def curve(folder: str | Path, key: str) -> dict[int, float]:
    """Returns {number of optimizer steps made: value} of a run, with evaluations before and after training.

    A run that was killed or still trains has the values that its metrics.jsonl holds. Raises ValueError if
    the run has no such metric.
    """
    folder = Path(folder)
    if not (folder / "args.json").exists():
        raise ValueError(f"{folder} is no run: it has no args.json")
    num_steps = json.loads((folder / "args.json").read_text())["num_steps"]
    evaluations = {}  # {steps made: {metric: (mean, standard error)}}
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
        evaluations = {0: summary["before"], num_steps: summary["after"]}
    points = {}
    known = set().union(*evaluations.values())
    steps = 0
    if (folder / "metrics.jsonl").exists():
        for line in (folder / "metrics.jsonl").read_text(errors="replace").splitlines(keepends=True):
            if line.endswith("}\n"):  # a killed run may have written a part of its last line
                found = json.loads(line)
                steps = found["step"] + 1
                known |= found.keys() - {"step"}
                if key in found:
                    points[found["step"]] = found[key]  # of the policy before the update of this step
    for step, values in evaluations.items():
        # While a run is extended, summary.json has the evaluation after the former last step.
        if key in values and step <= steps:
            points.setdefault(step, values[key][0])
    if not points:
        raise ValueError(f"{folder} has no metric {key}, only {', '.join(sorted(known)) or 'none yet'}")
    return dict(sorted(points.items()))


def collect(folders: list, key: str, smooth: int = 1) -> tuple[list[int], np.ndarray]:
    """Returns the steps at which all runs have a value, and the values (runs, steps).

    Each value is a mean over the last `smooth` steps, so none depends on later steps.
    """
    runs = [curve(folder, key) for folder in folders]
    steps = sorted(set(runs[0]).intersection(*runs))
    if not steps:
        raise ValueError(f"{key}: no step is in all of the runs {', '.join(map(str, folders))}")
    values = np.empty((len(runs), len(steps)))
    for i, points in enumerate(runs):
        for j, now in enumerate(steps):
            recent = [value for step, value in points.items() if now - smooth < step <= now]
            values[i, j] = np.mean(recent)
    return steps, values


def interval(values: np.ndarray) -> np.ndarray:
    """Returns half the width of Student's 95% interval for the mean over axis 0; nan for one value."""
    if len(values) == 1:
        return np.full(values.shape[1:], np.nan)
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


def draw_band(axes, label: str, steps: list[int], values: np.ndarray, over: str = "seeds"):
    """Draws the mean of values (runs, steps) and its band. The band of fractions stays within [0, 1]."""
    runs = len(values)
    if runs > 1:
        label = f"{label} ({runs} {over})"
    mean = values.mean(0)
    (line,) = axes.plot(steps, mean, label=label)
    if runs == 1:
        return
    half = interval(values)
    low, high = mean - half, mean + half
    if values.min() >= 0 and values.max() <= 1:
        low, high = low.clip(0, 1), high.clip(0, 1)
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def print_means(label: str, key: str, steps: list[int], values: np.ndarray):
    """Prints the mean over the curve and the last value, each with its standard error over runs."""
    texts = []
    for numbers in (values.mean(1), values[:, -1]):
        error = f" ± {stats.sem(numbers):.3f}" if len(values) > 1 else ""
        texts.append(f"{numbers.mean():.3f}{error}")
    whole, end = texts
    print(f"{key}, {label}, runs: {len(values)}; mean over the curve {whole}, at step {steps[-1]} {end}")


def draw(panels, curves: dict[str, list], keys: list[str], smooth: int = 1):
    """Draws a panel for each metric, with a line and a band for each label."""
    for axes, key in zip(panels, keys):
        for label, folders in curves.items():
            steps, values = collect(folders, key, smooth)
            draw_band(axes, label, steps, values)
            print_means(label, key, steps, values)
        axes.set(xlabel="optimizer step", ylabel=key)
    panels[0].legend()


def reference_lines(name: str, metric: str, last: int) -> list[tuple]:
    """Returns the lines (steps, values) of a log of docs/reference, up to a step.

    The rewards of default runs are those of three seeds in paper/results/learning.csv. Mathematics has the
    accuracy of its training samples instead.
    """
    if metric == "reward" and name in ("dpo", "kto", "grpo"):
        with (ROOT / "paper" / "results" / "learning.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if (row["script"], row["arm"]) == (name, "humanline")]
        key = "score"
    else:
        key = {"reward": "rewards/accuracy" if name == "grpo_math" else "eval/reward"}.get(metric, metric)
        with gzip.open(REFERENCE / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) | {"seed": 1} for line in file]
    lines = {}  # {seed: [(step, value), ...]}
    for row in rows:
        if key in row and int(row["step"]) <= last:
            lines.setdefault(row["seed"], []).append((int(row["step"]), float(row[key])))
    return [tuple(zip(*points)) for points in lines.values()]


def draw_row(axes, name: str, last: int, **style):
    """Draws a log of docs/reference into a row of panels, one for each metric."""
    for ax, (metric, label) in zip(axes, PANELS.items()):
        for steps, values in reference_lines(name, metric, last):
            ax.plot(steps, values, **style)
        ax.set(xlabel="optimizer step", ylabel=label)


def draw_reference():
    """Draws the pictures of docs/curves.md: default runs, and broken ones in front of default ones."""
    figure, axes = plt.subplots(len(SCRIPTS), len(PANELS), figsize=(15, 11), layout="constrained")
    for row, (script, settings) in zip(axes, SCRIPTS.items()):
        draw_row(row, script, 320, lw=1)
        row[0].set_title(f"{script}_humanline.py, {settings}")
    axes[-1, 0].set_ylabel("rewards/accuracy")
    figure.savefig(PICTURES / "curves.png", dpi=90)
    for script in ("dpo", "grpo"):
        figure, axes = plt.subplots(len(FAULTS), len(PANELS), figsize=(15, 8.5), layout="constrained")
        for row, (fault, (title, last)) in zip(axes, FAULTS.items()):
            draw_row(row, script, last, color="0.65", lw=2.5)
            draw_row(row, f"{script}_{fault}", last, color="#D55E00", lw=1.2)
            row[0].set_title(f"{script}: {title}")
        figure.savefig(PICTURES / f"broken_{script}.png", dpi=90)


def main(
    runs: tyro.conf.Positional[list[str]] = [],  # noqa: B006
    metric: tyro.conf.UseAppendAction[list[str]] = [],  # noqa: B006
    label: tyro.conf.UseAppendAction[list[str]] = [],  # noqa: B006
    smooth: int = 1,
    out: Path = Path("curves.png"),
    reference: bool = False,
):
    """Draws the curves.

    Args:
        runs: the lines: a folder, or a quoted pattern for the folders of several seeds.
        metric: a metric of metrics.jsonl (default: eval/accuracy); repeat it for further panels.
        label: the label of the first line, instead of its folder; repeat it for the other lines.
        smooth: number of steps over which each point is averaged.
        out: file of the picture.
        reference: draw the pictures of docs/curves.md, and no other runs.
    """
    if reference:
        draw_reference()
        return
    keys = metric or ["eval/accuracy"]
    curves = {}
    for name, pattern in zip(label or runs, runs):
        curves[name] = sorted(glob.glob(pattern)) or [pattern]
    try:
        if not len(curves) == len(runs) == len(label or runs):
            raise ValueError(f"{len(runs)} lines need {len(runs)} different labels: repeat --label")
        if not runs or smooth < 1:
            raise ValueError("name at least one run, and let --smooth be at least 1")
        figure, panels = plt.subplots(1, len(keys), figsize=(1.5 + 5.5 * len(keys), 4), squeeze=False)
        draw(panels[0], curves, keys, smooth)
        figure.tight_layout()
        figure.savefig(out, dpi=110)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"wrote {out}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
