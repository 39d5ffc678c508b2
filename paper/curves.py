"""Learning curves: any metric of any runs against the optimizer step. Seeds are one line with a band.

    pip install -r paper/requirements.txt
    python paper/curves.py runs/* --metric eval/accuracy --metric grad_norm --smooth 8 --out curves.png

A line is the mean over seeds; its band is the 95% interval of Student's t for that mean, step by step. It
says how well the mean is known, not how far seeds spread, and is very wide for two of them. A single run has
no band.
"""

import glob
import json
import re
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from scipy import stats

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

plt.style.use("tableau-colorblind10")
NOT_THE_ARM = ("seed", "output_dir", "resume")  # flags that do not set two runs apart


def curve(folder: str | Path, key: str) -> dict[int, float]:
    """{optimizer steps done: value} of a run, with the evaluations before the first step and after the last.

    A run that goes on, or was killed, has what its metrics.jsonl holds. A ValueError if it has no such
    metric.
    """
    folder = Path(folder)
    lines = read_metrics(folder / "metrics.jsonl")
    summary = {"before": {}, "after": {}}
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
    points = {}
    if key in summary["before"]:
        points[0] = summary["before"][key][0]
    for line in lines:
        if key in line:
            points[line["step"] + 1] = line[key]
    steps = lines[-1]["step"] + 1 if lines else 0
    if key in summary["after"] and steps == read_args(folder)["num_steps"]:  # else it is being extended
        points.setdefault(steps, summary["after"][key][0])
    if not points:
        known = set(summary["before"])
        for line in lines:
            known |= line.keys()
        names = "it has none yet"
        if known:
            names = f"it has {', '.join(sorted(known - {'step'}))}"
        raise ValueError(f"{folder}: no metric {key}; {names}")
    return points


def read_metrics(path: Path) -> list[dict]:
    lines = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            if line.endswith("}\n"):  # a killed run's last may be cut
                lines.append(json.loads(line))
    return lines


def read_args(folder: str | Path) -> dict:
    """The flags of a run. A ValueError if the folder holds none."""
    try:
        args = json.loads((Path(folder) / "args.json").read_text())
        assert {"script", "seed", "num_steps"} <= args.keys()
    except Exception:
        raise ValueError(f"{folder}: no run is here (no args.json of one)") from None
    return args


def smoothed(points: dict[int, float], steps: int) -> dict[int, float]:
    """At every point the mean over those of the last `steps` steps: nothing comes from the future."""
    means = {}
    for now in points:
        recent = [value for step, value in points.items() if now - steps < step <= now]
        means[now] = float(np.mean(recent))
    return means


def collect(folders: list, key: str, smooth: int = 1) -> tuple[list[int], np.ndarray]:
    """The steps that all runs have a value at, and these values (runs, steps)."""
    runs = [smoothed(curve(folder, key), smooth) for folder in folders]
    steps = sorted(set(runs[0]).intersection(*runs))
    if not steps:
        raise ValueError(f"{key}: the runs {', '.join(map(str, folders))} have no step in common")
    rows = []
    for run in runs:
        rows.append([run[step] for step in steps])
    return steps, np.array(rows)


def interval(values: np.ndarray) -> np.ndarray:
    """Half the width of the 95% interval of Student's t for the mean over axis 0; nan for one value."""
    if len(values) == 1:
        return np.full(values.shape[1:], np.nan)
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


def draw(axes, curves: dict[str, list], key: str, smooth: int = 1):
    """A line for each label, the mean over its runs, with its band."""
    for label, folders in curves.items():
        steps, values = collect(folders, key, smooth)
        draw_band(axes, label, steps, values)
    axes.set(xlabel="optimizer step", ylabel=key)


def draw_band(axes, label: str, steps: list[int], values: np.ndarray):
    """A line, the mean of values (runs, steps), and its band; of shares within [0, 1], like themselves."""
    runs = len(values)
    if runs > 1:
        label = f"{label} ({runs} seeds)"
    mean = values.mean(0)
    (line,) = axes.plot(steps, mean, label=label)
    if runs == 1:
        return
    half = interval(values)
    low, high = mean - half, mean + half
    if values.min() >= 0 and values.max() <= 1:
        low, high = low.clip(0, 1), high.clip(0, 1)
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def by_flags(folders: list) -> dict[str, list]:
    """{label: runs with the same flags but for the seed}, in the order given."""
    groups = {}  # {flags as text: folders}
    first = {}  # {(flags, seed): folder}
    for folder in folders:
        args = read_args(folder)
        arm = {key: value for key, value in args.items() if key not in NOT_THE_ARM}
        text = json.dumps(arm, sort_keys=True)
        twin = first.setdefault((text, args["seed"]), folder)
        if twin != folder:
            raise ValueError(f"{twin} and {folder} have the same flags and seed: leave one out")
        groups.setdefault(text, []).append(folder)
    labels = flag_labels([json.loads(text) for text in groups])
    short = [re.sub(r"=[^ ,]*/", "=", label) for label in labels]  # without folders
    if len(set(short)) == len(short):
        labels = short
    return dict(zip(labels, groups.values()))


def flag_labels(arms: list[dict]) -> list[str]:
    """What sets each apart: the script where there are several, and flags in which arms of a script
    differ."""
    scripts = {args["script"] for args in arms}
    labels = []
    for args in arms:
        siblings = [other for other in arms if other["script"] == args["script"]]
        differing = []
        for key in args:
            if any(other.get(key) != args[key] for other in siblings):
                differing.append(f"{key}={args[key]}")
        if len(scripts) > 1 or not differing:
            differing.insert(0, args["script"])
        labels.append(", ".join(differing))
    return labels


def tell(curves: dict[str, list], key: str, smooth: int):
    """Prints the mean over the curve and its end for each label, ± standard error over runs."""
    for label, folders in curves.items():
        steps, values = collect(folders, key, smooth)
        runs = "run" if len(folders) == 1 else "runs"
        mean = mean_and_error(values.mean(1))
        last = mean_and_error(values[:, -1])
        text = (
            f"{key}, {label}, {len(folders)} {runs}: mean over the curve {mean}, at step {steps[-1]} {last}"
        )
        ends = [max(curve(folder, key)) for folder in folders]
        if len(set(ends)) > 1:
            text += f" (they end at steps {ends})"
        print(text)


def mean_and_error(values: np.ndarray) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{values.mean():.3f} ± {stats.sem(values):.3f}"


def main(
    runs: tyro.conf.Positional[list[str]],
    metric: tyro.conf.UseAppendAction[list[str]] = [],  # noqa: B006
    label: tyro.conf.UseAppendAction[list[str]] = [],  # noqa: B006
    smooth: int = 1,
    out: Path = Path("curves.png"),
):
    """Draws the curves.

    Args:
        runs: Folders of runs, or patterns of them.
        metric: A metric of metrics.jsonl (eval/accuracy if none is named); again for another panel.
        label: Of a line, instead of its flags; again for the next, in the order in which lines are drawn.
        smooth: Every point is the mean over so many steps up to it.
        out: The picture.
    """
    keys = metric or ["eval/accuracy"]
    folders = []
    for pattern in runs:
        for folder in sorted(glob.glob(pattern)) or [pattern]:
            if folder not in folders:
                folders.append(folder)
    try:
        if not folders:
            raise ValueError("name at least one run")
        if smooth < 1:
            raise ValueError(f"--smooth is {smooth}; it must be at least 1")
        curves = by_flags(folders)
        if label:
            names = list(dict.fromkeys(label))
            if not len(names) == len(label) == len(curves):
                raise ValueError(f"--label: {len(names)} names for {len(curves)} lines: {'; '.join(curves)}")
            curves = dict(zip(label, curves.values()))
        size = (1.5 + 5.5 * len(keys), 4)
        figure, panels = plt.subplots(1, len(keys), figsize=size, squeeze=False)
        for axes, key in zip(panels[0], keys):
            draw(axes, curves, key, smooth)
            tell(curves, key, smooth)
        panels[0][0].legend()
        figure.tight_layout()
        figure.savefig(out, dpi=110)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"wrote {out}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
