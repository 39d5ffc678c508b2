"""Learning curves of the toys' default runs beside their fair baselines: a csv, and a picture for each script.

    pip install -r paper/requirements.txt
    python paper/learning.py              # into runs/results
    python paper/learning.py --write      # over those of paper/results

learning.csv has a row for each evaluation of each run: the reward model's score (math: accuracy) of samples
for the held-out prompts. A run's last row has the hidden judge's score as well, which no run sees. In a
picture a thin line is a run, a thick one the mean over seeds. Step 0 is the score before training.
"""

import sys
from pathlib import Path

import matplotlib
import pandas as pd
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paper import curves, trials  # noqa: E402

# By script, each arm's flags. The first is the default run. Rates beside it are the best of their arm
# (figure1, syncing, stale); where none is named, the default's.
ARMS = {
    "dpo": {
        "humanline": "",
        "offline, lr 3e-3": "--no-humanline --lr 3e-3",
        "offline, lr 1e-3": "--no-humanline",
    },
    "kto": {
        "humanline": "",
        "offline, lr 3e-4": "--no-humanline",
        "offline, lr 1e-3": "--no-humanline --lr 1e-3",
    },
    "grpo": {
        "humanline": "",
        "offline, ε 2": "--no-humanline --epsilon 2",
        "offline, ε 2, lr 1e-3": "--no-humanline --epsilon 2 --lr 1e-3",
        "offline, ε 0.5": "--no-humanline --epsilon 0.5",
    },
    "grpo_math": {
        "S=64, humanline": "",
        "S=64, ε 0.8": "--no-humanline --epsilon 0.8",
        "S=1, lr 3e-4": "--no-humanline --sample-every 1 --lr 3e-4",
    },
}
SEEDS = range(trials.FIRST_SEED, trials.FIRST_SEED + 3)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito's, for the colour-blind
UNITS = {"eval/reward": "reward model's score", "eval/accuracy": "accuracy, share of problems"}


def runs() -> list[tuple]:
    """(script, arm, seed, command), one seed of all after the other."""
    found = []
    for seed in SEEDS:
        for script, arms in ARMS.items():
            for arm, flags in arms.items():
                line = f"python {script}_humanline.py --engine hf --checkpoint-every 0 --eval-every 32"
                found.append((script, arm, seed, f"{line} --seed {seed} {flags}".strip()))
    return found


def rows_of(script: str, arm: str, seed: int, line: str, at: str) -> list[dict]:
    """Of a finished run, a row for each evaluation."""
    folder = trials.folder_of(line, at)
    metric = "eval/accuracy" if script == "grpo_math" else "eval/reward"
    base = {"command": line, "seed": seed, "commit": at, "script": script, "arm": arm, "metric": metric}
    rows = []
    for step, score in sorted(curves.curve(folder, metric).items()):
        rows.append(base | {"step": step, "score": score})
    rows[-1]["judge"] = trials.judged(folder)
    return rows


def draw(of_script: pd.DataFrame, path: Path):
    figure, ax = plt.subplots(figsize=(5.6, 3.2), layout="constrained")
    for color, (arm, of_arm) in zip(COLORS, of_script.groupby("arm", sort=False)):
        scores = of_arm.pivot(index="step", columns="seed", values="score")
        ax.plot(scores.index, scores, color=color, linewidth=0.6, alpha=0.6)
        ax.plot(scores.index, scores.mean(axis=1), color=color, linewidth=2.2, label=arm)
    ax.set(xlabel="optimizer step", ylabel=UNITS[of_script.metric.iloc[0]], xlim=(0, None))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(write: bool = False):
    """Makes the runs that runs/miniature does not have yet, then the files.

    Args:
        write: Replace the files of paper/results; else they are written into runs/results.
    """
    out = trials.RESULTS if write else trials.ROOT / "runs" / "results"
    at = trials.commit()
    planned = runs()
    print(f"{len(planned)} runs of about a minute on a core; results: {out / 'learning.csv'}", flush=True)
    trials.run_all([line for *_, line in planned], at)
    rows = []
    for run in planned:
        rows += rows_of(*run, at)
    trials.write_csv(out / "learning.csv", rows)
    for script, of_script in pd.DataFrame(rows).groupby("script", sort=False):
        draw(of_script, out / f"learning_{script}.png")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
