"""Writes the runs of the study: every setting of every arm on the draws for tuning, then what they choose.

    python -m lab.frontier.make first      # writes lab/frontier/first.txt: all settings on one draw
    python -m lab.run lab/frontier/first.txt    # writes the rows of lab/frontier/frontier.csv
    python -m lab.frontier.make second     # from these rows: the best settings on two more draws
    python -m lab.run lab/frontier/second.txt
    python -m lab.frontier.make fixed      # from these rows: the settings of tests A to C on the twelve draws
    python -m lab.run lab/frontier/fixed.txt
    python -m lab.frontier.make online     # the settings of test D (and run them, too)
    python -m lab.frontier.make rest       # the other choices, and the paper's own settings

Every arm has nine settings: three rates times three others. Its setting and its step are chosen together,
twice: among all steps with a mean KL of at most 20 nats, and without this limit.
"""

from functools import cache
from itertools import product
from typing import Literal

import pandas as pd
import tyro

from lab import board
from lab.compare import LAB

FOLDER = LAB / "frontier"
RATES = ("1e-4", "3e-4", "1e-3")
DPO, KTO, GRPO = (f"{name}_humanline.py" for name in ("dpo", "kto", "grpo"))
NORM = "--max-grad-norm 1"  # of all runs, because the scripts' defaults differ between arms
ARMS = {  # {(objective, arm): (words before the flags, the three settings beside the rate)}
    ("DPO", "plain"): (f"{DPO} --no-humanline", ["--beta 0.1", "--beta 0.03", "--beta 0.01"]),
    ("DPO", "clip only"): (f"{DPO} --k 0", ["--beta 0.1", "--beta 0.03", "--beta 0.01"]),
    ("DPO", "sync only"): (
        "paper/variants.py no-clipping dpo_humanline",
        ["--k 16 --beta 0.1", "--k 16 --beta 0.03", "--k 1 --beta 0.1"],
    ),
    ("DPO", "both"): (DPO, ["--k 16 --beta 0.1", "--k 16 --beta 0.03", "--k 1 --beta 0.1"]),
    ("DPO", "online"): (
        f"{DPO} --online --no-humanline",
        ["--beta 0.1", "--beta 0.03", "--beta 0.01"],
    ),
    ("KTO", "plain"): (
        f"{KTO} --no-humanline",
        ["--beta 0.25", "--beta 0.025", "--beta 0.0025"],
    ),
    ("KTO", "sync only"): (
        "paper/variants.py no-clipping kto_humanline",
        ["--k 16 --beta 0.25", "--k 16 --beta 0.025", "--k 1 --beta 0.25"],
    ),
    ("KTO", "both"): (
        f"{KTO}",
        ["--k 16 --beta 0.25", "--k 16 --beta 0.025", "--k 1 --beta 0.25"],
    ),
    ("KTO", "online"): (
        f"{KTO} --online --no-humanline",
        ["--beta 0.25", "--beta 0.025", "--beta 0.0025"],
    ),
    ("GRPO", "plain"): (
        f"{GRPO} --no-humanline",
        ["--epsilon 0.5 --beta 0.01", "--epsilon 1e9 --beta 0.01", "--epsilon 1e9 --beta 0"],
    ),
    ("GRPO", "sync only"): (
        "paper/variants.py no-clipping grpo_humanline --epsilon 0.15",
        ["--k 16 --beta 0.01", "--k 16 --beta 0", "--k 1 --beta 0.01"],
    ),
    ("GRPO", "both"): (
        f"{GRPO} --epsilon 0.15",
        ["--k 16 --beta 0.01", "--k 16 --beta 0", "--k 1 --beta 0.01"],
    ),
    ("GRPO", "online"): (
        f"{GRPO} --online --no-humanline",
        ["--epsilon 0.5 --beta 0.01", "--epsilon 1e9 --beta 0.01", "--epsilon 1e9 --beta 0"],
    ),
}
OBJECTIVES = ("DPO", "KTO", "GRPO")
PAPER = {  # the paper's own settings, which are not tuned
    ("DPO", "paper, plain"): f"{DPO} --no-humanline --beta 0.1 --lr 1e-4",
    ("DPO", "paper, humanline"): f"{DPO} --k 1 --beta 0.1 --lr 1e-4",
    ("KTO", "paper, plain"): f"{KTO} --no-humanline --beta 0.25 --lr 1e-4",
    ("KTO", "paper, humanline"): f"{KTO} --k 1 --beta 0.25 --lr 1e-4",
    ("GRPO", "paper, plain"): f"{GRPO} --no-humanline --epsilon 0.5 --beta 0.01 --lr 1e-4",
    ("GRPO", "paper, humanline"): f"{GRPO} --epsilon 0.15 --k 1 --beta 0.01 --lr 1e-4",
}
UNTRAINED = f"{DPO} --no-humanline --lr 1e-30"
TESTED = {  # the choices that the tests compare: {part: {arm: limits}}
    "fixed": {"plain": board.LIMITS, "sync only": board.LIMITS, "both": board.LIMITS[1:]},
    "online": {"online": board.LIMITS[1:]},
}


def settings(objective: str, arm: str) -> list[str]:
    """Returns the words of the nine settings of an arm, or of the one setting of the paper."""
    if (objective, arm) in PAPER:
        return [PAPER[objective, arm]]
    first, others = ARMS[objective, arm]
    return [f"{first} {other} --lr {rate}" for other, rate in product(others, RATES)]


@cache
def command(words: str, draw: int) -> str:
    """Returns the command of a setting on a draw."""
    return board.plan(f"{words} {NORM}".split(), draw, "")["command"]


def lines(objective: str, arm: str, words: str, draws) -> list[str]:
    """Returns the lines of lab.run for a setting on some draws."""
    return [f"{objective} | {arm} | {draw} | {command(words, draw)}" for draw in draws]


def ranked(rows: pd.DataFrame, draws, limit: float) -> list[tuple[float, str, int]]:
    """Returns (mean judge, setting, step) of each setting at its best step, the best setting first.

    rows: those of one arm, with the words of each row's setting in the column `words`
    limit: largest mean KL over the draws, in nats. Other steps do not count.

    The list has no setting that lacks a draw or has a broken run.
    """
    found = {}
    for words, group in rows[rows.instance.isin(draws)].groupby("words"):
        complete = set(group.instance) == set(draws)
        for step in board.STEPS:
            judges, kls = group[f"judge@{step}"], group[f"kl@{step}"]
            if complete and judges.notna().all() and kls.mean() <= limit:
                found[words] = max(found.get(words, (-1.0, "", 0)), (judges.mean(), words, step))
    return sorted(found.values(), reverse=True)


@cache
def rows_of(objective: str, arm: str, draws: tuple[int, ...]) -> pd.DataFrame:
    """Returns the rows of an arm on some draws, with the words of their settings in the column `words`.

    They are found by their commands, because a run of two arms has one row, under the other arm's name.
    """
    rows = pd.read_csv(FOLDER / "frontier.csv").drop_duplicates("command", keep="last")
    words_of = {}
    for words in settings(objective, arm):
        words_of |= {line.split(" | ", 3)[3]: words for line in lines(objective, arm, words, draws)}
    return rows[rows.command.isin(words_of)].assign(words=rows.command.map(words_of))


def chosen_settings(objective: str, arm: str, draws, count: int, limits=board.LIMITS) -> list[str]:
    """Returns the words of the `count` best settings on some draws within each limit, without repetitions."""
    rows = rows_of(objective, arm, draws)
    return sorted({words for limit in limits for _, words, _ in ranked(rows, draws, limit)[:count]})


def lines_of_tests(part: str) -> list[str]:
    """Returns the lines of lab.run for the runs on the twelve draws that some tests need."""
    found = lines("all", "before training", UNTRAINED, board.REPORTED)
    for arm, limits in TESTED[part].items():
        for objective in OBJECTIVES:
            for words in chosen_settings(objective, arm, board.TUNING, 1, limits):
                found += lines(objective, arm, words, board.REPORTED)
    return found


def lines_of(part: str) -> list[str]:
    """Returns the lines of lab.run for the runs of a part, each command once."""
    if part in TESTED:
        return once(lines_of_tests(part))
    first, *others = board.TUNING
    found = []
    for objective, arm in ARMS:
        if part == "first":
            chosen, draws = settings(objective, arm), [first]
        elif part == "second":
            chosen, draws = chosen_settings(objective, arm, (first,), 2), others
        else:
            chosen, draws = chosen_settings(objective, arm, board.TUNING, 1), board.REPORTED
        for words in chosen:
            found += lines(objective, arm, words, draws)
    if part == "rest":
        for (objective, arm), words in PAPER.items():
            found += lines(objective, arm, words, board.REPORTED)
        tested = {line.split(" | ", 3)[3] for other in TESTED for line in lines_of_tests(other)}
        found = [line for line in found if line.split(" | ", 3)[3] not in tested]
    return once(found)


def once(found: list[str]) -> list[str]:
    """Returns lines without those whose command another line before them has."""
    return list({line.split(" | ", 3)[3]: line for line in reversed(found)}.values())[::-1]


def check_complete(part: str):
    """Ends the program if runs of a part have no row, because a choice or a test needs all of them."""
    made = set(pd.read_csv(FOLDER / "frontier.csv").command)
    left = [line for line in lines_of(part) if line.split(" | ", 3)[3] not in made]
    if left:
        raise SystemExit(f"error: {len(left)} runs of the part {part!r} have no row yet")


def main(part: tyro.conf.Positional[Literal["first", "second", "fixed", "online", "rest"]]):
    """Writes the file of one part."""
    if part != "first":
        check_complete("first" if part == "second" else "second")
    text = lines_of(part)
    (FOLDER / f"{part}.txt").write_text(
        "\n".join([f"# Written by python -m lab.frontier.make {part}", *text, ""])
    )
    print(f"{FOLDER / part}.txt: {len(text)} runs")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
