"""Makes the csv and the picture of the README's run with SmolLM2, from its finished runs.

    python paper/real_run.py runs/sums1 runs/sums2 runs/sums3 --write    # seeds 1 to 3

real_run.csv has a row for each evaluation: pass@1 on the 64 held-out sums with two samples each, and its
standard error over sums, if summary.json has it. A thin line is a run, the thick line the mean of the runs.
"""

import json
import sys
from pathlib import Path

import matplotlib
import pandas as pd
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paper import trials  # noqa: E402


def rows_of(folder: Path) -> list[dict]:
    """Returns a row for each evaluation of a finished run."""
    args = json.loads((folder / "args.json").read_text())
    summary = trials.read_summary(folder)
    steps = trials.read_steps(folder)
    base = {
        "seed": args["seed"],
        "commit": trials.git("describe", "--always"),
        "processor": trials.processor(),
    }
    points = {step["step"]: step["eval/accuracy"] for step in steps if "eval/accuracy" in step}
    points[0], points[len(steps)] = (summary[when]["eval/accuracy"][0] for when in ("before", "after"))
    errors = {0: summary["before"]["eval/accuracy"][1], len(steps): summary["after"]["eval/accuracy"][1]}
    rows = []
    for step in sorted(points):
        rows.append(base | {"step": step, "accuracy": points[step], "standard_error": errors.get(step)})
    return rows


def draw(table: pd.DataFrame, path: Path):
    """Draws the accuracy of every run, and their mean, against the step."""
    figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
    curves = table.pivot(index="step", columns="seed", values="accuracy")
    ax.plot(curves.index, curves, color="#D55E00", alpha=0.5, linewidth=1)
    ax.plot(curves.index, curves.mean(axis=1), color="#D55E00", linewidth=3, label="mean of three seeds")
    ax.set(xlabel="optimizer step", ylabel="share of right answers", ylim=(0, 1))
    ax.set_xticks(curves.index)
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main(folders: tyro.conf.Positional[list[Path]], write: bool = False):
    """Writes real_run.csv and real_run.png.

    Args:
        folders: folders of finished runs of the README's command, with different seeds.
        write: replace the files in paper/results, instead of writing into runs/results.
    """
    out = trials.RESULTS if write else trials.ROOT / "runs" / "results"
    out.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame([row for folder in folders for row in rows_of(folder)])
    table.to_csv(out / "real_run.csv", index=False)
    draw(table, out / "real_run.png")
    print(table.pivot(index="step", columns="seed", values="accuracy"))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
