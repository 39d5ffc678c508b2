"""Draws learning curves: any metric of any runs against the number of optimizer steps made.

    pip install -r lab/requirements.txt
    python -m tools.curves "runs/ours-*" runs/theirs --metric loss --metric grad_norm --smooth 8
    python -m tools.curves --reference  # the pictures of docs/curves.md, from docs/reference

Each folder or quoted pattern is a line, the mean over its runs. The band around it is the 95% interval of
Student's t for this mean, at each step. A single run has no band.
"""

import glob
import json
from pathlib import Path

import matplotlib
import pandas as pd
import tyro
from scipy import stats

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = {  # {script: its default learning rate and k}
    "dpo": "lr 1e-3, k 16",
    "kto": "lr 3e-4, k 32",
    "grpo": "lr 3e-4, k 32",
    "grpo_math": "lr 1e-4, S 64, k 16",
}
FAULTS = {  # {end of a log's name: (the fault, last step to draw)}
    "late": ("sync after the update", 64),
    "never": ("reference never synced, at the same rate", 160),
    "lr": ("learning rate ten times too large", 160),
}
STYLES = {  # {label: how its lines are drawn, in the pictures with faults}
    "default runs": {"color": "0.65", "lw": 2.5},
    "one broken run": {"color": "#D55E00", "lw": 1.2},
}
PANELS = ("eval/reward", "loss", "humanline/log_ratio_abs_mean", "grad_norm")


def curve(folder: Path, metric: str) -> pd.Series:
    """Returns the values of a run by the number of steps made, with evaluations before and after training."""
    if not (folder / "metrics.jsonl").exists():
        raise SystemExit(f"error: {folder} has no metrics.jsonl; pass the folder of a run")
    steps = pd.read_json(folder / "metrics.jsonl", lines=True, precise_float=True).set_index("step")
    values = steps[metric].dropna() if metric in steps else pd.Series(dtype=float)
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
        for step, when in ((0, "before"), (len(steps), "after")):
            if metric in summary[when]:
                values[step] = summary[when][metric][0]
    if values.empty:
        raise SystemExit(f"error: {folder} has no metric {metric}")
    return values.sort_index()


def draw(ax, label: str, runs: list[pd.Series], smooth: int):
    """Draws the mean of runs at their common steps with its band, and prints the last mean."""
    table = pd.concat(runs, axis=1, join="inner").rolling(smooth, min_periods=1).mean()
    mean, count = table.mean(axis=1), table.shape[1]
    (line,) = ax.plot(mean.index, mean, label=f"{label} ({count} runs)" if count > 1 else label)
    words = f"{mean.iloc[-1]:.3f}"
    if count > 1:
        half = stats.t.ppf(0.975, count - 1) * table.sem(axis=1)
        ax.fill_between(mean.index, mean - half, mean + half, color=line.get_color(), alpha=0.2)
        words += f" ± {half.iloc[-1]:.3f}"
    print(f"{ax.get_ylabel()}, {label}: {words} at step {mean.index[-1]}")


def draw_log(axes, name: str, last: int, **style):
    """Draws a log of docs/reference into a row of panels. Default runs have the rewards of three seeds."""
    log = pd.read_json(ROOT / f"docs/reference/{name}.jsonl.gz", lines=True).set_index("step").loc[:last]
    learning = pd.read_csv(ROOT / "lab/learning/learning.csv").query("script == @name and arm == 'humanline'")
    for ax, metric in zip(axes, PANELS):
        metric = "rewards/accuracy" if name == "grpo_math" and metric == "eval/reward" else metric
        if metric == "eval/reward" and len(learning):
            rewards = learning.pivot(index="step", columns="seed", values="score").loc[:last]
            ax.plot(rewards.index, rewards, **style)
        else:
            values = log[metric].dropna()
            ax.plot(values.index, values, **style)
        ax.set(xlabel="optimizer step", ylabel=metric)


def draw_reference():
    """Draws the pictures of docs/curves.md: default runs, and broken ones in front of default ones."""
    figure, axes = plt.subplots(len(REFERENCE), len(PANELS), figsize=(15, 11), layout="constrained")
    for row, (script, settings) in zip(axes, REFERENCE.items()):
        draw_log(row, script, 320, lw=1, color="C0")
        row[0].set_title(f"{script}_humanline.py, {settings}")
    figure.savefig(ROOT / "docs/curves.png", dpi=90)
    for script in ("dpo", "grpo"):
        figure, axes = plt.subplots(len(FAULTS), len(PANELS), figsize=(15, 8.5), layout="constrained")
        for row, (fault, (title, last)) in zip(axes, FAULTS.items()):
            for name, style in zip((script, f"{script}_{fault}"), STYLES.values()):
                draw_log(row, name, last, **style)
            row[0].set_title(f"{script}: {title}")
        lines = [Line2D([], [], label=label, **style) for label, style in STYLES.items()]
        figure.legend(handles=lines, loc="outside upper right", ncols=2)
        figure.savefig(ROOT / f"docs/broken_{script}.png", dpi=90)


def main(
    runs: tyro.conf.Positional[tuple[str, ...]] = (),
    metric: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    smooth: int = 1,
    out: Path | None = None,
    reference: bool = False,
):
    """Draws the curves.

    Args:
        runs: the lines: a folder, or a quoted pattern for the folders of several seeds.
        metric: a metric of metrics.jsonl (default: eval/accuracy); repeat it for further panels.
        smooth: number of values over which each point is averaged.
        out: file of the picture; none: curves.png in the folder of the last run.
        reference: draw the pictures of docs/curves.md, and no other runs.
    """
    if reference:
        return draw_reference()
    if not runs:
        raise SystemExit("error: pass the folder of a run")
    metrics = metric or ("eval/accuracy",)
    figure, panels = plt.subplots(1, len(metrics), figsize=(1.5 + 5.5 * len(metrics), 4), squeeze=False)
    for ax, name in zip(panels[0], metrics):
        ax.set(xlabel="optimizer step", ylabel=name)
        for pattern in runs:
            folders = [Path(folder) for folder in sorted(glob.glob(pattern))] or [Path(pattern)]
            draw(ax, pattern, [curve(folder, name) for folder in folders], smooth)
        ax.legend()
    figure.tight_layout()
    out = out or folders[-1] / "curves.png"
    figure.savefig(out, dpi=110)
    print(f"wrote {out}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
