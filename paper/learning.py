"""Learning curves of the toys' default runs beside fair baselines: a csv, and a picture for each script.

    pip install -r paper/requirements.txt
    python paper/learning.py              # into runs/results
    python paper/learning.py --write      # over those of paper/results

learning.csv has a row for each evaluation of each run: the reward model's score of samples for the held-out
prompts. A run's last row has the hidden judge's score as well, which no run sees. The curves of math are
those of stale.csv, whose humanline arm is the default run in float32. In a picture a thin line is a run, a
thick one the mean over seeds. Step 0 is the score before training.
"""

import sys
from pathlib import Path

import matplotlib
import pandas as pd
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paper import curves, pictures, trials  # noqa: E402

# By script, each arm's flags. The first is the default run. Others have their arm's best rate by the hidden
# judge (figure1, instances), but GRPO's, whose default is worse for humanline too (parity, syncing).
ARMS = {
    "dpo": {"humanline": "", "offline, lr 3e-3": "--no-humanline --lr 3e-3"},
    "kto": {"humanline": "", "offline": "--no-humanline"},
    "grpo": {
        "humanline": "",
        "offline, ε 2": "--no-humanline --epsilon 2",
        "offline, ε 0.5": "--no-humanline --epsilon 0.5",
    },
}
MATH = {  # arms of stale.csv
    "humanline, k=16": "S=64, humanline",
    "ε 0.8": "S=64, ε 0.8",
    "ε 0.2": "S=64, ε 0.2",
    "CISPO": "S=64, CISPO",
    "S = 1": "S=1",
}
SEEDS = range(trials.FIRST_SEED, trials.FIRST_SEED + 3)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")  # Okabe and Ito's, for the colour-blind


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
    base = {"command": line, "seed": seed, "commit": at, "script": script, "arm": arm}
    points = curves.curve(folder, "eval/reward")
    rows = [base | {"step": step, "score": points[step]} for step in sorted(points)]
    rows[-1]["judge"] = trials.judged(folder)
    return rows


def math_table() -> pd.DataFrame:
    """The same rows of stale.csv."""
    arms = pictures.read(trials.RESULTS, "stale_arms")
    (before,) = [line["mean"] for line in arms if (line["arm"], line["metric"]) == ("untrained", "curve")]
    reported = [row for row in pictures.read(trials.RESULTS, "stale") if row["phase"] == "reported"]
    rows = []
    for name, arm in MATH.items():
        for row in pictures.select(reported, arm=name):
            base = {"arm": arm, "seed": row["seed"]}
            rows.append(base | {"step": 0, "score": before})
            at_step = [key for key in row if key.startswith(pictures.AT_STEP)]
            for key in at_step:
                rows.append(base | {"step": int(key.removeprefix(pictures.AT_STEP)), "score": row[key]})
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame, unit: str, path: Path):
    figure, ax = plt.subplots(figsize=(5.6, 3.2), layout="constrained")
    for color, (arm, of_arm) in zip(COLORS, table.groupby("arm", sort=False)):
        scores = of_arm.pivot(index="step", columns="seed", values="score")
        ax.plot(scores.index, scores, color=color, linewidth=0.6, alpha=0.5)
        ax.plot(scores.index, scores.mean(axis=1), color=color, linewidth=2.2, label=arm)
    ax.set(xlabel="optimizer step", ylabel=unit, xlim=(0, None))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_all(out: Path):
    for script, table in pd.read_csv(out / "learning.csv").groupby("script"):
        draw(table, "reward model's score", out / f"learning_{script}.png")
    draw(math_table(), "accuracy, share of problems", out / "learning_grpo_math.png")


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
    draw_all(out)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
