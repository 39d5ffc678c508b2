"""Runs a script on the draws of the board, and prints its score beside the methods that are there.

    python -m lab.board my_dpo.py --lr 3e-4 --tune  # the three draws for tuning
    python -m lab.board my_dpo.py --lr 3e-4         # the twelve draws to report
    python -m lab.board paper/variants.py hypo dpo_humanline --no-humanline --lr 3e-4
    python -m lab.board --table                     # writes the table of lab/board/README.md

The words are a script and its flags; lab/board/README.md has the rules. Each draw gives a row of
lab/board/mine.csv, and runs/board.png shows the judge against KL over the steps. A row of the same command,
commit and file is not made again.
"""

import hashlib
import math
import re
import shlex
import sys
from dataclasses import dataclass

import pandas as pd
import tyro

from lab import compare, run
from lab.steps import METRICS, STEPS

FOLDER = compare.LAB / "board"
TUNING, REPORTED = (3, 4, 5), tuple(range(31, 43))
LIMITS = (20, math.inf)  # maxima of the mean KL, in nats, of the two numbers
LEAST_TRIGRAMS = 0.25  # a method with a smaller share of distinct trigrams repeats itself
BEFORE = "before training"  # a method with a learning rate of 1e-30
# CPU time of plain DPO's training, divided by the CPU time of scoring, which is the same work in all runs:
# {whether the run is online: ratio}. The ratio of a run may be twice as large.
PLAIN = {False: 1.4, True: 7.3}

FIXED = "--model toy/stories/policy --engine hf --dtype float32 --seed 21 --num-steps 120"
FIXED += " --checkpoint-every 0 --max-prompt-length 32 --max-length 96 --max-new-tokens 48"
FIXED += " --generation-batch-size 512"
REFUSED = "--dataset --dataset-split --reward-model --eval-dataset --eval-split --eval-every --eval-samples"
REFUSED += " --batch-size --chat-template --eos-token --output-dir --resume"
REFUSED = {word for word in f"{FIXED} {REFUSED}".split() if word.startswith("--")}

COLUMNS = "name draw words file command commit processor torch transformers seconds core scoring".split()
COLUMNS += [f"{metric}@{step}" for step in STEPS for metric in METRICS]


@dataclass
class Args:
    tune: bool = False  # run the draws for tuning, which choose setting and step
    draws: int = 0  # run only the first draws; 0: all
    name: str = ""  # the method, if it has several settings; empty: the script and its flags
    jobs: int = 0  # runs at a time; 0: as many as there are cores
    table: bool = False  # only write the table of the page


# === Runs ===
def check(words: list[str]):
    """Ends the program if the words are not a script and flags of its own."""
    if not words or not words[0].endswith(".py") or not (run.ROOT / words[0]).exists():
        raise SystemExit(f"error: name a script that exists, and then its flags, not {shlex.join(words)!r}")
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    if fixed := sorted(given & REFUSED):
        raise SystemExit(f"error: {', '.join(fixed)}: the board sets this; leave it out")


def plan(words: list[str], draw: int, name: str) -> dict:
    """Returns the first columns of a row, with the command of its run."""
    data = f"--dataset lab/board/{draw}/preferences_train.jsonl.gz"
    if "--online" in words:
        data = f"--dataset lab/board/{draw}/prompts_train.jsonl.gz --reward-model runs/board/{draw}"
    command = f"python -m lab.steps {shlex.join(words)} {FIXED} {data}"
    version = hashlib.sha256((run.ROOT / words[0]).read_bytes()).hexdigest()[:12]
    return {"name": name, "draw": draw, "words": shlex.join(words), "file": version, "command": command}


def make(runs: list[dict], online: bool, jobs: int) -> pd.DataFrame:
    """Makes the runs that mine.csv lacks, and returns the rows of all. A run that fails has no row."""
    at = run.commit(edited=True)
    runs = [line | {"commit": at} for line in runs]
    key = ["name", "command", "commit", "file"]
    made = {tuple(row[key]): row for _, row in read("mine").iterrows()}
    rows, left = [], []
    for line in runs:
        row = made.get(tuple(line[name] for name in key))
        left.append(line) if row is None or at.endswith("+") else rows.append(row)
    for row in run.make_rows(left, at, jobs=jobs):
        if not row["failed"] and f"judge@{STEPS[-1]}" not in row:
            row["failed"] = "error: its last step has no score; each step must end with checkpoint.end_step"
        elif not row["failed"] and row["core"] > (limit := 2 * PLAIN[online] * row["scoring"]):
            row["failed"] = f"error: {row['core']:.0f} s of CPU time; the limit is {limit:.0f} s"
        if row["failed"]:
            print(f"draw {row['draw']} does not count: {row['failed']}", file=sys.stderr)
            continue
        rows.append(pd.Series(row).reindex(COLUMNS))
        file = FOLDER / "mine.csv"
        rows[-1].to_frame().T.to_csv(file, mode="a", header=not file.exists(), index=False)
    return pd.DataFrame(rows, columns=COLUMNS).infer_objects()


# === Numbers ===
def read(*names: str) -> pd.DataFrame:
    """Reads csvs of the board. Of several rows of one setting and draw, the last one counts."""
    files = [file for name in names if (file := FOLDER / f"{name}.csv").exists()]
    tables = [pd.read_csv(file, dtype={"commit": str, "file": str}) for file in files]
    rows = pd.concat([table for table in tables if len(table)] or [pd.DataFrame(columns=COLUMNS)])
    return rows.drop_duplicates(["name", "words", "file", "draw"], keep="last")


def of_track(rows: pd.DataFrame, online: bool) -> pd.DataFrame:
    """Returns the rows of the track, fixed data or online."""
    return rows[rows.words.str.contains("--online") == online]


def choose(tuned: pd.DataFrame, limit: float) -> tuple[str, int] | None:
    """Returns the words and the step with the best mean judge on the draws for tuning, within the limit."""
    found = []
    for words, rows in tuned.groupby("words"):
        if set(rows.draw) == set(TUNING):
            means = rows.mean(numeric_only=True)
            within = [step for step in STEPS if means[f"kl@{step}"] <= limit]
            found += [(means[f"judge@{step}"], words, step) for step in within]
    return max(found)[1:] if found else None


def chosen_rows(rows: pd.DataFrame, limit: float) -> tuple[pd.DataFrame, tuple[str, int] | None]:
    """Returns the reported rows of a method's setting, and what its tuning has chosen, None if there is none.

    A method without tuning has its last setting.
    """
    reported = rows[rows.draw.isin(REPORTED)]
    reported = reported[reported.file == reported.file.iloc[-1]]  # the last version of the script
    tuned = rows[rows.draw.isin(TUNING) & (rows.file == reported.file.iloc[-1])]
    best = choose(tuned, limit)
    return reported[reported.words == (best[0] if best else reported.words.iloc[-1])], best


def at_choice(rows: pd.DataFrame, limit: float) -> tuple[pd.DataFrame, str]:
    """Returns the metrics of a method by draw, at the setting and step of its tuning, and a note on these.

    A method without tuning has its last step, if this is within the limit.
    """
    chosen, best = chosen_rows(rows, limit)
    words, step = best or ("", STEPS[-1])
    chosen = chosen.set_index("draw")
    table = chosen[[f"{metric}@{step}" for metric in METRICS] + ["core"]].astype(float)
    table.columns = [*METRICS, "core"]
    if best:
        return table, f"step {step} of {words}, as the tuning has chosen"
    return table[: None if table.kl.mean() <= limit else 0], f"step {step}, because nothing was tuned"


def cell(values: pd.Series) -> str:
    """Returns a mean with its 95% interval over draws."""
    mean, half = values.mean(), compare.half_interval(values)
    interval = f" [{mean - half:.2f}, {mean + half:.2f}]" if half >= 0 else ""
    return f"{mean:.2f}{interval}".replace("-", "−") if len(values) else "–"


HEAD = ["method", "settings", "at ≤ 20 nats", "at any distance", "kl", "finished", "trigrams", "core s"]


def line_of(name: str, rows: pd.DataFrame) -> tuple:
    """Returns whether a method repeats itself, minus its number, and the cells of its line."""
    near, far = (at_choice(rows, limit)[0] for limit in LIMITS)
    near = near[: None if len(near) >= len(far) else 0]  # some draws of a choice give no number
    means = far.mean()
    settings = len(rows[rows.draw.isin(TUNING)].drop_duplicates(["words", "file"]))
    others = [f"{means.kl:z.1f}", f"{means.finished:.2f}", f"{means.trigrams:.2f}", f"{means.core:.0f}"]
    cells = [name, str(settings), cell(near.judge), cell(far.judge), *(others if len(far) else "––––")]
    return means.trigrams < LEAST_TRIGRAMS, -near.judge.mean() if len(near) else math.inf, cells


def methods(rows: pd.DataFrame, online: bool) -> dict[str, pd.DataFrame]:
    """Returns the rows of each method of a track with all draws. Methods that repeat themselves come last."""
    found = {
        name: one
        for name, one in of_track(rows, online).groupby("name")
        if one.draw.isin(REPORTED).any() and set(chosen_rows(one, math.inf)[0].draw) == set(REPORTED)
    }
    return dict(sorted(found.items(), key=lambda item: line_of(*item)[:2]))


# === Output ===
def show(lines: list[list[str]]):
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())


def show_tuning(rows: pd.DataFrame, name: str):
    """Prints the means at each step, and what all settings of the method choose."""
    means = rows.mean(numeric_only=True)
    lines = [["step", *METRICS]]
    lines += [[str(step), *(f"{means[f'{metric}@{step}']:z.2f}" for metric in METRICS)] for step in STEPS]
    show(lines)
    known = read("mine")
    known = known[(known.name == name) & (known.file == rows.file.iloc[-1]) & known.draw.isin(TUNING)]
    for limit in LIMITS:
        if best := choose(known, limit):
            where = f"at ≤ {limit} nats" if limit < math.inf else "at any distance"
            print(f"{where}, the best is step {best[1]} of {best[0]}")


def show_report(rows: pd.DataFrame, name: str, others: dict[str, pd.DataFrame]):
    """Prints the method between its neighbours, and its differences to them and to others of mine.csv."""
    repeats, number, mine = line_of(name, rows)
    listed = {other: line_of(other, one) for other, one in others.items() if other != name}
    alike = {other: line[1] for other, line in listed.items() if line[0] == repeats}
    above = [other for other in alike if alike[other] <= number][-1:]
    below = [other for other in alike if alike[other] > number][:1]
    my_others = sorted(set(read("mine").name) & set(listed) - {*above, *below})
    before = [BEFORE] if BEFORE in listed and BEFORE not in above + below else []
    lines = [listed[other][2] for other in before + above] + [["your run", *mine[1:]]]
    show([HEAD, *lines, *(listed[other][2] for other in below)])
    for limit, title in zip(LIMITS, HEAD[2:]):
        own, note = at_choice(rows, limit)
        print(f"{title}: {note if len(own) else f'no number, because there are no rows of {note}'}")
        for other in above + below + my_others:
            leads = (own.judge - at_choice(others[other], limit)[0].judge).dropna()
            if len(leads) > 1:
                found = compare.paired(leads)
                words = f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}], p = {found.p:.1g}"
                print(f"  your run − {other}: {words.replace('-0.', '−0.')} ({len(leads)} draws)")


def draw_board(rows: pd.DataFrame, name: str, others: dict[str, pd.DataFrame]):
    """Draws judge against KL over the steps, means over draws: the method, and the others in grey."""
    figure, ax = compare.plt.subplots(figsize=(6.8, 4), layout="constrained")

    def draw(rows, **style):
        means = rows.mean(numeric_only=True)
        kl, judge = ([means[f"{metric}@{step}"] for step in STEPS] for metric in ("kl", "judge"))
        ax.plot(kl, judge, "o-", markersize=4, **style)
        return kl[-1], judge[-1]

    for other, one in others.items():
        if other != name:
            end = draw(chosen_rows(one, math.inf)[0], color="0.75")
            ax.annotate(other, end, fontsize=6, color="0.5")
    draw(rows, color=compare.COLORS[0], linewidth=2, label=f"{name}, {len(rows)} draws")
    ax.axvline(LIMITS[0], color="black", linestyle=":")
    steps = f"steps {', '.join(map(str, STEPS))}"
    ax.set(xlabel="KL from the initial policy, nats", ylabel="hidden judge's score", title=steps)
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)
    return figure


def table(rows: pd.DataFrame) -> str:
    """Returns the tables of both tracks, in Markdown."""
    text = ""
    for online, title in ((False, "Fixed data"), (True, "Online: own samples and the reward model")):
        found = methods(rows, online)
        lines = [line_of(name, one) for name, one in found.items()]
        body = [line[2] for line in lines if not line[0]]
        if repeating := [line[2] for line in lines if line[0]]:
            body += [["*These repeat themselves:*", *[""] * (len(HEAD) - 1)], *repeating]
        if body:
            rule = ["---"] * len(HEAD)
            text += f"### {title}\n\n"
            text += "".join(f"| {' | '.join(cells)} |\n" for cells in (HEAD, rule, *body)) + "\n"
    return text or "No method has been reported yet.\n\n"


def write_table():
    """Writes the table between the two marks of the page."""
    page = FOLDER / "README.md"
    begin, end = "<!-- python -m lab.board --table -->\n\n", "<!-- end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}{table(read('board'))}{end}{after}", encoding="utf-8")


# === Command ===
def main(args: Args, words: list[str]):
    if args.table:
        return write_table()
    check(words)
    name = args.name or re.sub(r"paper/variants\.py |_humanline|\.py", "", shlex.join(words))
    chosen = (TUNING if args.tune else REPORTED)[: args.draws or None]
    online = "--online" in words
    rows = make([plan(words, draw, name) for draw in chosen], online, args.jobs)
    if rows.empty:
        raise SystemExit("error: no run has ended well")
    others = methods(read("board", "mine"), online)
    if args.tune:
        show_tuning(rows, name)
    else:
        mine = read("mine")
        ours = pd.concat([mine[mine.name == name], rows])  # also the draws of its other choice
        show_report(ours.drop_duplicates(["words", "file", "draw"], keep="last"), name, others)
    picture = run.ROOT / "runs" / "board.png"
    picture.parent.mkdir(exist_ok=True)
    compare.save(draw_board(rows, name, others), picture)


if __name__ == "__main__":
    main(*tyro.cli(Args, description=__doc__, return_unknown_args=True))
