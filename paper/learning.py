"""Draws the learning curves of the toys' default runs beside fair baselines: a csv, and a picture per script.

    python paper/learning.py              # writes into runs/results
    python paper/learning.py --write      # replaces the files in paper/results

learning.csv has a row for each evaluation: the reward of samples for held-out prompts, from step 0 on. The
last row of a run also has the score of the hidden judge, which no run sees. The curves of grpo_math come from
stale.csv, whose humanline arm is the default run in float32. A thin line is a run, a thick line the mean over
seeds.
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

ARMS = {  # the learning rates of offline DPO and KTO are the best by the hidden judge (figure1, instances)
    "dpo": {"humanline": "", "offline, lr 3e-3": "--no-humanline --lr 3e-3"},
    "kto": {"humanline": "", "offline": "--no-humanline"},
    "grpo": {
        "humanline": "",
        "offline, ε 2": "--no-humanline --epsilon 2",
        "offline, ε 0.5": "--no-humanline --epsilon 0.5",
    },
}
MATH = {  # {arm of stale.csv: label}
    "humanline, k=16": "S=64, humanline",
    "ε 0.8": "S=64, ε 0.8",
    "ε 0.2": "S=64, ε 0.2",
    "CISPO": "S=64, CISPO",
    "S = 1": "S=1",
}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")  # Okabe and Ito's, for colour-blind people


def runs(seeds: int) -> list[tuple]:
    """Returns (script, arm, seed, command) of all runs, seed by seed."""
    found = []
    for seed in range(trials.FIRST_SEED, trials.FIRST_SEED + seeds):
        for script, arms in ARMS.items():
            for arm, flags in arms.items():
                line = f"python {script}_humanline.py --engine hf --checkpoint-every 0 --eval-every 32"
                found.append((script, arm, seed, f"{line} --seed {seed} {flags}".strip()))
    return found


def rows_of(script: str, arm: str, seed: int, line: str, at: str) -> list[dict]:
    """Returns a row for each evaluation of a finished run."""
    folder = trials.folder_of(line, at)
    base = {"command": line, "seed": seed, "commit": at, "script": script, "arm": arm}
    points = curves.curve(folder, "eval/reward")
    rows = [base | {"step": step, "score": points[step]} for step in sorted(points)]
    rows[-1]["judge"] = trials.judged(folder)
    return rows


def math_rows() -> list[dict]:
    """Returns a row for each evaluation of the runs in stale.csv."""
    arms = pictures.read(trials.RESULTS, "stale_arms")
    (before,) = pictures.select(arms, arm="untrained", metric="eval/accuracy")
    rows = []
    for row in pictures.read(trials.RESULTS, "stale"):
        if row["phase"] == "reported" and row["arm"] in MATH:
            points = {pictures.AT_STEP + "0": before["mean"]}
            points |= {key: row[key] for key in row if key.startswith(pictures.AT_STEP)}
            for key, score in points.items():
                step = int(key.removeprefix(pictures.AT_STEP))
                rows.append({"arm": MATH[row["arm"]], "seed": row["seed"], "step": step, "score": score})
    return rows


def draw(table: pd.DataFrame, unit: str, path: Path):
    """Draws the scores of all arms of a script."""
    figure, ax = plt.subplots(figsize=(6.8, 3), layout="constrained")
    for color, (arm, rows) in zip(COLORS, table.groupby("arm", sort=False)):
        scores = rows.pivot(index="step", columns="seed", values="score")
        ax.plot(scores.index, scores, color=color, linewidth=0.6, alpha=0.5)
        ax.plot(scores.index, scores.mean(axis=1), color=color, linewidth=2.2, label=arm)
    ax.set(xlabel="optimizer step", ylabel=unit, xlim=(0, None))
    ax.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(seeds: int = 3, write: bool = False):
    """Makes the runs that runs/miniature does not have yet, and then the files.

    Args:
        seeds: number of runs of an arm.
        write: replace the files in paper/results, instead of writing into runs/results.
    """
    out = trials.RESULTS if write else trials.ROOT / "runs" / "results"
    at = trials.commit()
    planned = runs(seeds)
    print(
        f"{len(planned)} runs of about a minute each on one core; results: {out / 'learning.csv'}", flush=True
    )
    trials.run_all([line for *_, line in planned], at)
    trials.write_csv(out / "learning.csv", [row for run in planned for row in rows_of(*run, at)])
    for script, table in pd.read_csv(out / "learning.csv").groupby("script"):
        draw(table, "reward model's score", out / f"learning_{script}.png")
    draw(pd.DataFrame(math_rows()), "accuracy, share of problems", out / "learning_grpo_math.png")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
