"""Measures how far tokens' log π_θ/π_ref go in training, and how many are beyond humanline's bounds, by k.

    pip install -r paper/requirements.txt
    python paper/assumptions.py                    # GRPO and DPO on stories, and SmolLM2 on sums
    python paper/assumptions.py "DPO, stories"     # some of them

Proposition 4.1 assumes, among others, that the likelihood ratio of a token has a finite bound M (humanline
sampling in variants.py has M = 10). The files assumptions.csv and .png have for each run and k, over the
tokens of all steps: the fraction beyond ±1.5 and beyond ±log 10, and the quantile 0.999 of |log π_θ/π_ref|,
to 0.05 nats. They are written into runs/results, or with --write into paper/results.
"""

import json
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paper import study, trials  # noqa: E402
from paper.pictures import plt  # noqa: E402
from paper.variants import EDGES  # noqa: E402

KS = (1, 4, 16, 64)
# Humanline's arms with its tuned learning rates, on data of the tuning. Only k differs.
STORY = {name: study.of_story(arm, 1) for name, arm in study.RECORDED.items() if name != "sums"}
RUNS = {
    "GRPO, stories": (STORY["grpo"], 3e-4),
    "DPO, stories": (STORY["dpo"], 3e-4),
    "SmolLM2, sums": (study.of_sums(study.RECORDED["sums"], "plus", "tuning"), 1e-5),
}
NAMES = list(RUNS)


def columns(counts: np.ndarray) -> dict:
    """Returns the columns of a row from the counts of log-ratios between EDGES."""
    sizes = np.abs(EDGES[:-1] + EDGES[1:]) / 2  # of the log-ratios, by bin
    order = np.argsort(sizes)
    below = np.cumsum(counts[order]) / counts.sum()
    return {
        "tokens": int(counts.sum()),
        "beyond": counts[sizes > 1.5].sum() / counts.sum(),
        "beyond_log_10": counts[sizes > np.log(10)].sum() / counts.sum(),
        "quantile_999": sizes[order][np.searchsorted(below, 0.999)],
    }


def draw(rows: list[dict]):
    """Draws the fraction beyond the bounds and the quantile against k, with a line for each run."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    for ax, key in zip(axes, ("beyond", "quantile_999")):
        for name in dict.fromkeys(row["run"] for row in rows):
            points = [(row["k"], row[key]) for row in rows if row["run"] == name]
            ax.plot(*zip(*points), "o-", label=name)
        ax.set_xscale("log", base=2)
        ax.set(xticks=KS, xticklabels=KS, xlabel="k, optimizer steps between syncs")
        ax.grid(alpha=0.3)
    axes[0].set_yscale("symlog", linthresh=1e-6)  # a fraction may be 0
    axes[0].set_ylim(0, 0.2)
    axes[0].set_ylabel("fraction of tokens beyond ±1.5")
    axes[1].set_ylabel("quantile 0.999 of |log-ratio|, nats")
    axes[1].axhline(1.5, color="black", linestyle=":")
    axes[0].legend(fontsize=8)
    return figure


def main(names: tyro.conf.Positional[list[Literal[*RUNS]]] = NAMES, write: bool = False):
    """Makes the runs, and writes the table and the picture.

    Args:
        names: runs; without a name: all.
        write: replace the files in paper/results, instead of writing into runs/results.
    """
    at = trials.commit()
    rows = []
    for name in names:
        arm, lr = RUNS[name]
        lines = [trials.command(arm, lr, 1, f"--k {k}") for k in KS]
        trials.run_all(lines, at)
        for k, line in zip(KS, lines):
            counts = json.loads((trials.folder_of(line, at) / "log_ratios.json").read_text())
            row = {"command": line, "commit": at, "processor": trials.processor(), "run": name, "k": k}
            rows.append(row | columns(np.array(counts)))
    out = trials.RESULTS if write else trials.ROOT / "runs" / "results"
    trials.write_csv(out / "assumptions.csv", rows)
    draw(rows).savefig(out / "assumptions.png", dpi=110)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
