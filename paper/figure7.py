"""The curves of Figure 7 from finished runs: mean and range over seeds of a metric against the optimizer step.

    pip install matplotlib
    python paper/figure7.py --out docs/shell_game.png \
        --curves "S=1" "runs/s1-*" "S=64" "runs/s64-*" "S=64 + humanline" "runs/hum-*"
"""

import glob
import json
from pathlib import Path

import matplotlib
import numpy as np
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def curve(folder: str, key: str) -> dict[int, float]:
    """{optimizer steps done: value} of a run, with the evaluation before the first step."""
    summary = json.loads((Path(folder) / "summary.json").read_text())
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    points = {line["step"] + 1: line[key] for line in lines if key in line}
    return {0: summary["before"][key][0]} | points if key in summary["before"] else points


def main(out: Path, curves: dict[str, str], key: str = "eval/accuracy") -> None:
    """Args:
    out: the picture.
    curves: label and glob pattern of run folders, one for each seed; all runs of a label have the same steps.
    key: a metric of metrics.jsonl.
    """
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for label, pattern in curves.items():
        runs = [curve(folder, key) for folder in sorted(glob.glob(pattern))]
        if not runs:
            raise SystemExit(f"error: --curves {label}: no folder matches {pattern}")
        steps, values = list(runs[0]), np.array([list(run.values()) for run in runs])  # (seeds, steps)
        (line,) = axes.plot(steps, values.mean(0), label=f"{label} ({len(runs)} seeds)")
        axes.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.15)
        for what, numbers in (("mean over the curve", values.mean(1)), ("end", values[:, -1])):
            error = numbers.std(ddof=1) / np.sqrt(len(numbers)) if len(numbers) > 1 else float("nan")
            print(f"{label}: {what} {numbers.mean():.3f} ± {error:.3f}")
    axes.set(xlabel="optimizer step", ylabel=key)
    axes.legend(loc="lower right")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    tyro.cli(main)
