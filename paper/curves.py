"""Learning curves: any metric of any runs against the optimizer step. Seeds are one line with a band.

    pip install -r paper/requirements.txt
    python paper/curves.py "runs/ours-*" runs/theirs --metric loss --metric grad_norm --smooth 8

A name or quoted pattern is a line: the mean over its runs. The band is the 95% interval of Student's t for
that mean, step by step. It says how well the mean is known, not how far seeds spread, and is very wide for
two of them. A single run has no band.
"""

import glob
import json
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from scipy import stats

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

plt.style.use("tableau-colorblind10")


def curve(folder: str | Path, key: str) -> dict[int, float]:
    """{optimizer steps done: value} of a run, with the evaluations before the first step and after the last.

    A run that goes on, or was killed, has what its metrics.jsonl holds. A ValueError if it has no such
    metric.
    """
    folder = Path(folder)
    if not (folder / "args.json").exists():
        raise ValueError(f"{folder}: no run is here (no args.json of one)")
    num_steps = json.loads((folder / "args.json").read_text())["num_steps"]
    evaluations = {}  # {steps done: {metric: (mean, standard error)}}
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
        evaluations = {0: summary["before"], num_steps: summary["after"]}
    points = {}
    known = set().union(*evaluations.values())
    steps = 0
    if (folder / "metrics.jsonl").exists():
        for line in (folder / "metrics.jsonl").read_text(errors="replace").splitlines(keepends=True):
            if line.endswith("}\n"):  # a killed run's last may be cut
                found = json.loads(line)
                steps = found["step"] + 1
                known |= found.keys() - {"step"}
                if key in found:
                    points[steps] = found[key]
    for step, values in evaluations.items():
        if key in values and step <= steps:  # the last is not one yet of a run that is extended
            points.setdefault(step, values[key][0])
    if not points:
        raise ValueError(f"{folder}: no metric {key}; it has {', '.join(sorted(known)) or 'none yet'}")
    return dict(sorted(points.items()))


def collect(folders: list, key: str, smooth: int = 1) -> tuple[list[int], np.ndarray]:
    """The steps that all runs have a value at, and these values (runs, steps).

    Each is the mean over those of the last `smooth` steps: nothing comes from the future.
    """
    runs = [curve(folder, key) for folder in folders]
    steps = sorted(set(runs[0]).intersection(*runs))
    if not steps:
        raise ValueError(f"{key}: the runs {', '.join(map(str, folders))} have no step in common")
    values = np.empty((len(runs), len(steps)))
    for i, points in enumerate(runs):
        for j, now in enumerate(steps):
            recent = [value for step, value in points.items() if now - smooth < step <= now]
            values[i, j] = np.mean(recent)
    return steps, values


def interval(values: np.ndarray) -> np.ndarray:
    """Half the width of the 95% interval of Student's t for the mean over axis 0; nan for one value."""
    if len(values) == 1:
        return np.full(values.shape[1:], np.nan)
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


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


def tell(label: str, key: str, steps: list[int], values: np.ndarray):
    """Prints the mean over the curve and its end, ± standard error over runs."""
    texts = []
    for of_runs in (values.mean(1), values[:, -1]):
        error = f" ± {stats.sem(of_runs):.3f}" if len(values) > 1 else ""
        texts.append(f"{of_runs.mean():.3f}{error}")
    whole, end = texts
    print(f"{key}, {label}, runs: {len(values)}; mean over the curve {whole}, at step {steps[-1]} {end}")


def draw(panels, curves: dict[str, list], keys: list[str], smooth: int = 1):
    """A panel for each metric, in it a line for each label, the mean over its runs, with its band."""
    for axes, key in zip(panels, keys):
        for label, folders in curves.items():
            steps, values = collect(folders, key, smooth)
            draw_band(axes, label, steps, values)
            tell(label, key, steps, values)
        axes.set(xlabel="optimizer step", ylabel=key)
    panels[0].legend()


def main(
    runs: tyro.conf.Positional[list[str]],
    metric: tyro.conf.UseAppendAction[list[str]] = [],  # noqa: B006
    label: tyro.conf.UseAppendAction[list[str]] = [],  # noqa: B006
    smooth: int = 1,
    out: Path = Path("curves.png"),
):
    """Draws the curves.

    Args:
        runs: A line each: a folder, or a quoted pattern of the folders of several seeds.
        metric: A metric of metrics.jsonl (eval/accuracy if none is named); again for another panel.
        label: Of a line, instead of its name; again for the next.
        smooth: Every point is the mean over so many steps up to it.
        out: The picture.
    """
    keys = metric or ["eval/accuracy"]
    curves = {}
    for name, pattern in zip(label or runs, runs):
        curves[name] = sorted(glob.glob(pattern)) or [pattern]
    try:
        if not len(curves) == len(runs) == len(label or runs):
            raise ValueError(f"{len(runs)} runs need as many different names, by --label")
        if not runs or smooth < 1:
            raise ValueError("name at least one run, and a --smooth of at least 1")
        figure, panels = plt.subplots(1, len(keys), figsize=(1.5 + 5.5 * len(keys), 4), squeeze=False)
        draw(panels[0], curves, keys, smooth)
        figure.tight_layout()
        figure.savefig(out, dpi=110)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"wrote {out}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
