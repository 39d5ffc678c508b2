"""Compares two runs: a table of differences, a verdict, their answers side by side, and a picture.

    pip install -r lab/requirements.txt
    python -m tools.compare runs/mine runs/humanline

Both runs need the same held-out prompts. The program prints the table, the verdict and a few answers. It
writes compare.html, with all answers and the picture, into the second run's folder. The page loads nothing.

    eval/reward           the count of SCORE in greedy answers, or the reward model's score of samples
    right answers         from `python -m tools.questions runs/mine`, if both runs have it
    eval/finished, …      share of these texts that end with an EOS token; tokens

Of a run on mathematics these are of the first sample of each problem, and not of all samples.

The errors of these differences are paired by prompt or question. The other values are means of summary.json,
whose difference has the error of independent means, which is too large because both runs have the same rows.
"""

import base64
import html
import io
import json
from pathlib import Path
from typing import NamedTuple

import matplotlib
import pandas as pd
import torch
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from tools.curves import curve  # noqa: E402
from utils import InputError, mean_and_error  # noqa: E402

PANELS = ("logps/chosen", "logps/rejected", "eval/reward", "eval/kl")
LEAST_PROMPTS = 30  # with fewer, a standard error is itself too uncertain
STYLE = """body {font: 15px/1.45 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em}
table {border-collapse: collapse; width: 100%; table-layout: fixed}
th:first-child {width: 16%}
td, th {border: 1px solid #ccc; padding: .4em; text-align: left}
td {vertical-align: top; white-space: pre-wrap}
img {max-width: 100%}
.cut {color: #a00}"""
COLUMNS = {"eval/finished": "finished", "eval/length": "tokens"}  # {name: column of samples.jsonl}
OTHERS = ("eval/kl", "eval/accuracy")  # the loss and the margin depend on β and other flags


class Run(NamedTuple):
    """What a finished run has left in its folder."""

    folder: Path
    summary: dict  # {"before" or "after": {name: [mean, standard error, n]}}
    before: pd.DataFrame  # the texts of the first evaluation that are counted, a row for each prompt
    after: pd.DataFrame  # the same of the last evaluation
    right: dict  # {"before" or "after": 1 for each right answer to tools/questions.jsonl}; {}: not asked


def read_run(folder: Path) -> Run:
    """Reads a run. Raises InputError if it has not ended, or has no held-out texts."""
    if not (folder / "summary.json").exists():
        raise InputError(f"{folder}: no summary.json; pass the folder of a run that has ended")
    summary = json.loads((folder / "summary.json").read_text())
    if not (folder / "samples.jsonl").read_text().strip():
        raise InputError(f"{folder}: no answers; train with --eval-dataset and --eval-samples")
    texts = pd.read_json(folder / "samples.jsonl", lines=True, dtype={"prompt": str, "sample": str})
    # A reward model scores the samples; a function, or nothing, leaves them without rewards.
    samples = texts[~texts.greedy]
    counted = samples if samples.reward.notna().any() else texts[texts.greedy]
    before, after = (counted[counted.step == step].reset_index(drop=True) for step in (0, counted.step.max()))
    if len(before) != len(after):
        raise InputError(f"{folder}: {len(before)} texts before training and {len(after)} after it")
    asked = folder / "questions.json"
    right = json.loads(asked.read_text()) if asked.exists() else {}
    return Run(folder, summary, before, after, right)


def differences(first: Run, second: Run) -> pd.DataFrame:
    """Returns a table: name, and mean and error of the first run, of the second, and of second - first."""
    pairs = {}  # {name: the values of both runs, by prompt or question}
    if first.after.reward.notna().all() and second.after.reward.notna().all():
        pairs["eval/reward"] = first.after.reward, second.after.reward
    if first.right and second.right:
        pairs["right answers"] = first.right["after"], second.right["after"]
        pairs["… before training"] = first.right["before"], second.right["before"]
    pairs |= {name: (first.after[key], second.after[key]) for name, key in COLUMNS.items()}
    rows = []
    for name, (one, other) in pairs.items():
        one, other = (torch.tensor(list(values), dtype=torch.float64) for values in (one, other))
        found = mean_and_error({0: one, 1: other, 2: other - one})
        rows.append((name, *found[0][:2], *found[1][:2], *found[2][:2]))
    one, other = first.summary["after"], second.summary["after"]
    for name in [name for name in OTHERS if name in one and name in other]:
        (mean, error, *_), (other_mean, other_error, *_) = one[name], other[name]
        spread = (error**2 + other_error**2) ** 0.5
        rows.append((name, mean, error, other_mean, other_error, other_mean - mean, spread))
    columns = ["name", "first", "first_error", "second", "second_error", "difference", "error"]
    return pd.DataFrame(rows, columns=columns).set_index("name")


def verdict(first: Run, second: Run, table: pd.DataFrame) -> str:
    """Applies the rule of docs/first_run.md to the rewards of two runs."""
    count = len(first.after)
    if "eval/reward" not in table.index:
        return "no verdict: without SCORE or --reward-model nothing is counted, so read the answers"
    if count < LEAST_PROMPTS:
        return f"no verdict: {count} prompts are too few; pass at least {LEAST_PROMPTS}"
    difference, error = table.loc["eval/reward", ["difference", "error"]]
    if abs(difference) <= 2 * error:
        least = f"; a difference must be above {2 * error:.2f}, two standard errors" if error else ""
        return f"no difference of scores is seen with {count} prompts, so keep the simpler run{least}"
    better, other = (second, first) if difference > 0 else (first, second)
    said = f"{better.folder} scores {abs(difference):.2f} ± {error:.2f} more than {other.folder}"
    kl, other_kl = (run.summary["after"]["eval/kl"][0] for run in (better, other))
    if kl > 2 * max(other_kl, 1):
        said += f", but went {kl:.1f} nats from the initial model and not {other_kl:.1f}: ask tools.questions"
    if better.right:
        before, after = (torch.tensor(better.right[when]).double() for when in ("before", "after"))
        change, error, _ = mean_and_error({"change": after - before})["change"]
        if change < -2 * error:
            said += f", but its right answers fell from {before.mean():.2f} to {after.mean():.2f}"
    return said


def draw(first: Run, second: Run) -> bytes:
    """Returns a picture (PNG) of log-probs, reward and KL over the steps of both runs."""
    names = [name for name in PANELS if all(has(run.folder, name) for run in (first, second))]
    figure, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 3.2), layout="constrained")
    for ax, name in zip(axes, names):
        for run in (first, second):
            values = curve(run.folder, name)
            ax.plot(values.index, values, label=str(run.folder), marker="o" if len(values) < 9 else "")
        ax.set(xlabel="optimizer step", title=name)
    axes[0].legend(fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def has(folder: Path, name: str) -> bool:
    """Returns whether a run has a metric."""
    try:
        return not curve(folder, name).empty
    except SystemExit:
        return False


def page(first: Run, second: Run, table: pd.DataFrame, said: str, picture: bytes) -> str:
    """Returns compare.html."""
    title = html.escape(f"{first.folder} and {second.folder}")
    rows = []
    for i, prompt in enumerate(first.after["prompt"]):
        texts = [run.iloc[i] for run in (first.before, first.after, second.after)]
        cells = "".join(f"<td>{cell(text)}</td>" for text in texts)
        rows.append(f"<tr><td>{html.escape(prompt)}</td>{cells}</tr>")
    heads = ["prompt", "before training", str(first.folder), str(second.folder)]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    encoded = base64.b64encode(picture).decode()
    return f"""<!doctype html><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>
<h1>{title}</h1><p><b>{html.escape(said)}</b></p><pre>{html.escape(as_text(first, second, table))}</pre>
<img src="data:image/png;base64,{encoded}" alt="log-probs, reward and KL over the steps">
<table><tr>{head}</tr>{"".join(rows)}</table>
"""


def cell(text) -> str:
    """Returns a text with its reward, marked if it was truncated."""
    words = html.escape(text["sample"])
    if not text.finished:
        words += ' <span class="cut">[truncated]</span>'
    return words if pd.isna(text.reward) else f"{words}\n<b>{text.reward:.2f}</b>"


def as_text(first: Run, second: Run, table: pd.DataFrame) -> str:
    """Returns the table as it is printed."""
    lines = [f"first: {first.folder}\nsecond: {second.folder}\n"]
    lines.append(f"{'mean ± standard error':24}{'first':>20}{'second':>20}{'second - first':>20}")
    for name, row in table.iterrows():
        numbers = row.tolist()
        columns = [f"{mean:10.3f} ± {error:7.3f}" for mean, error in zip(numbers[::2], numbers[1::2])]
        lines.append(f"{name:24}{''.join(columns)}")
    return "\n".join(lines)


def main(first: tyro.conf.Positional[Path], second: tyro.conf.Positional[Path], answers: int = 4):
    """Prints the comparison, and writes compare.html.

    Args:
        first: the folder of a run, such as the control.
        second: the folder of another run.
        answers: number of prompts whose answers are printed.
    """
    runs = first, second = read_run(first), read_run(second)
    if first.after["prompt"].tolist() != second.after["prompt"].tolist():
        raise InputError("the runs have other held-out prompts: train both with the same --eval-dataset")
    if first.after.greedy[0] != second.after.greedy[0]:
        raise InputError("one run is scored by a reward model, and the other is not")
    table = differences(*runs)
    said = verdict(*runs, table)
    differ = first.after["sample"] != second.after["sample"]
    for i in differ[differ].index[:answers]:
        print(f"prompt: {first.after['prompt'][i]}\nbefore: {first.before['sample'][i]}")
        print("".join(f"{run.folder}: {run.after['sample'][i]}\n" for run in runs))
    print(f"{as_text(*runs, table)}\n\n{differ.sum()} of {len(differ)} texts differ\nverdict: {said}")
    out = second.folder / "compare.html"
    out.write_text(page(*runs, table, said, draw(*runs)), encoding="utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
