"""Learning curves: any metric of any runs against the optimizer step. Seeds of the same flags are one line with a band.

    pip install -r paper/requirements.txt
    python paper/curves.py runs/* --metric eval/accuracy --metric grpo/clip_fraction --smooth 8 --out curves.png

A line is the mean over seeds; its band is the 95% interval of Student's t for that mean, step by step. It says how well
the mean is known, not how far seeds spread, and is very wide for two of them. A single run has no band.
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

    A run that goes on, or was killed, has what its metrics.jsonl holds. A ValueError if it has no such metric."""
    folder = Path(folder)
    path, summary = folder / "metrics.jsonl", {"before": {}, "after": {}}
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    lines = [json.loads(line) for line in lines if line.endswith("}\n")]  # a killed run's last may be cut
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
    points = {line["step"] + 1: line[key] for line in lines if key in line}
    if key in summary["before"]:
        points = {0: summary["before"][key][0]} | points
    steps = lines[-1]["step"] + 1 if lines else 0
    if key in summary["after"] and steps == read_args(folder)["num_steps"]:  # else it is being extended
        points.setdefault(steps, summary["after"][key][0])
    if not points:
        known = {name for line in lines for name in line} | summary["before"].keys()
        told = f"it has {', '.join(sorted(known - {'step'}))}" if known else "it has none yet"
        raise ValueError(f"{folder}: no metric {key}; {told}")
    return points


def read_args(folder: str | Path) -> dict:
    """The flags of a run. A ValueError if the folder holds none."""
    try:
        args = json.loads((Path(folder) / "args.json").read_text())
        assert {"script", "seed", "num_steps"} <= args.keys()
    except Exception:
        raise ValueError(f"{folder}: no run is here (no args.json of one)") from None
    return args


def smoothed(points: dict[int, float], steps: int) -> dict[int, float]:
    """At every point the mean over the points of the last `steps` steps, so that nothing comes from the future."""
    return {now: float(np.mean([v for s, v in points.items() if now - steps < s <= now])) for now in points}


def collect(folders: list, key: str, smooth: int = 1) -> tuple[list[int], np.ndarray]:
    """The steps that all runs have a value at, and these values (runs, steps)."""
    runs = [smoothed(curve(folder, key), smooth) for folder in folders]
    steps = sorted(set(runs[0]).intersection(*runs))
    if not steps:
        raise ValueError(f"{key}: the runs {', '.join(map(str, folders))} have no step in common")
    return steps, np.array([[run[step] for step in steps] for run in runs])


def interval(values: np.ndarray) -> np.ndarray:
    """Half the width of the 95% interval of Student's t for the mean over axis 0; nan for one value."""
    if len(values) == 1:
        return np.full(values.shape[1:], np.nan)
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


def draw(axes, curves: dict[str, list], key: str, smooth: int = 1) -> None:
    """A line for each label, the mean over its runs, with its band."""
    for label, folders in curves.items():
        steps, values = collect(folders, key, smooth)
        mean, half = values.mean(0), interval(values)
        (line,) = axes.plot(steps, mean, label=f"{label} ({len(folders)} seeds)" if len(folders) > 1 else label)
        if len(folders) > 1:
            axes.fill_between(steps, mean - half, mean + half, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="optimizer step", ylabel=key)


def by_flags(folders: list) -> dict[str, list]:
    """{label: runs with the same flags but for the seed}, in the order given. A label is what sets it apart: the script
    where there are several, and the flags in which groups of the same script differ."""
    groups, taken = {}, {}
    for folder in folders:
        args = read_args(folder)
        arm = json.dumps({key: value for key, value in args.items() if key not in NOT_THE_ARM}, sort_keys=True)
        if (twin := taken.setdefault((arm, args["seed"]), folder)) != folder:
            raise ValueError(f"{twin} and {folder} have the same flags and seed: leave one out")
        groups.setdefault(arm, []).append(folder)
    arms = {arm: json.loads(arm) for arm in groups}
    several, labels = len({args["script"] for args in arms.values()}) > 1, []
    for args in arms.values():
        siblings = [other for other in arms.values() if other["script"] == args["script"]]
        differ = [key for key in args if any(other.get(key) != args[key] for other in siblings)]
        parts = [args["script"]] if several or not differ else []
        labels.append(", ".join(parts + [f"{key}={args[key]}" for key in differ]))
    short = [re.sub(r"=[^ ,]*/", "=", label) for label in labels]  # without folders
    return dict(zip(short if len(set(short)) == len(short) else labels, groups.values()))


def tell(curves: dict[str, list], key: str, smooth: int) -> None:
    """Prints the mean over the curve and its end for each label, ± standard error over runs."""
    for label, folders in curves.items():
        steps, values = collect(folders, key, smooth)
        told = f"{key}, {label}, {len(folders)} run{'s' * (len(folders) > 1)}:"
        for what, numbers in (("mean over the curve", values.mean(1)), (f"at step {steps[-1]}", values[:, -1])):
            error = f" ± {stats.sem(numbers):.3f}" if len(numbers) > 1 else ""
            told += f" {what} {numbers.mean():.3f}{error},"
        ends = [max(curve(folder, key)) for folder in folders]
        print(told.rstrip(",") + (f" (they end at steps {ends})" if len(set(ends)) > 1 else ""))


def main(
    runs: tyro.conf.Positional[list[str]],
    metric: tyro.conf.UseAppendAction[list[str]] = [],  # noqa: B006
    label: tyro.conf.UseAppendAction[list[str]] = [],  # noqa: B006
    smooth: int = 1,
    out: Path = Path("curves.png"),
) -> None:
    """Draws the curves.

    Args:
        runs: Folders of runs, or patterns of them.
        metric: A metric of metrics.jsonl (eval/accuracy if none is named); again for another panel.
        label: Of a line, instead of its flags; again for the next, in the order in which lines are drawn.
        smooth: Every point is the mean over so many steps up to it.
        out: The picture.
    """
    folders, keys = [], metric or ["eval/accuracy"]
    for pattern in runs:
        found = sorted(glob.glob(pattern)) or [pattern]
        folders += [folder for folder in found if folder not in folders]
    try:
        if not folders or smooth < 1:
            raise ValueError("name at least one run" if not folders else f"--smooth is {smooth}; it must be at least 1")
        curves = by_flags(folders)
        if label and not len(set(label)) == len(label) == len(curves):
            raise ValueError(f"--label: {len(set(label))} names for {len(curves)} lines: {'; '.join(curves)}")
        curves = dict(zip(label or curves, curves.values()))
        figure, panels = plt.subplots(1, len(keys), figsize=(1.5 + 5.5 * len(keys), 4), squeeze=False)
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
