"""Makes problems with two small numbers, for SmolLM2-135M-Instruct.

    python toy/make.py --tasks sums                          # toy/sums: a + b of 10 to 49, as committed
    python toy/sums.py runs/sums/data --kind minus --tuning 32  # another kind, in three parts

Every pair of numbers stands in one of the files only. In an addition of the training file it stands in both
orders. The chat template one_example.jinja is SmolLM2's, without its system message, and with one solved
problem before each problem: without an example, the model answers in many different ways.
"""

import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.run import write_file  # noqa: E402


class Kind(NamedTuple):
    problem: Callable[[int, int], str]
    answer: Callable[[int, int], int]
    first: range  # the values of a
    second: range  # the values of b; of length 1 if problems have one number only
    example: tuple[int, int]  # a and b of the solved problem, which is in no file


def plus(a: int, b: int) -> str:
    return f"{a} + {b}"


def add(a: int, b: int) -> int:
    return a + b


ONE = range(1)  # for problems with one number
KINDS = {
    "plus": Kind(plus, add, range(10, 50), range(10, 50), (14, 6)),
    "plus_small": Kind(plus, add, range(1, 21), range(1, 21), (6, 14)),
    "plus_apart": Kind(plus, add, range(10, 30), range(30, 60), (14, 6)),
    "plus_large": Kind(plus, add, range(10, 100), range(10, 100), (14, 6)),
    "minus": Kind(lambda a, b: f"{a} - {b}", lambda a, b: a - b, range(11, 41), range(1, 10), (45, 2)),
    "plus_tens": Kind(
        lambda a, b: f"{10 * a} + {10 * b}",
        lambda a, b: 10 * (a + b),
        range(10, 50),
        range(10, 50),
        (5, 6),
    ),
    "double": Kind(lambda a, b: f"2 * {a}", lambda a, b: 2 * a, range(10, 301), ONE, (7, 0)),
    "half": Kind(lambda a, b: f"{2 * a} / 2", lambda a, b: a, range(5, 301), ONE, (4, 0)),
    "times": Kind(lambda a, b: f"{a} * {b}", lambda a, b: a * b, range(3, 7), range(11, 61), (3, 5)),
}


def make_sums(
    folder: Path, kind: str = "plus", held_out: int = 64, tuning: int = 0, seed: int = 1
) -> list[str]:
    """Writes the problems of a kind and the chat template.

    train.jsonl and held_out.jsonl have columns problem and answer, and so has tuning.jsonl, if its number of
    problems is not 0.

    Returns:
        A line for each file, with its number of rows.
    """
    problem, answer, first, second, example = KINDS[kind]
    both_orders = first == second  # a + b and b + a are one pair
    pairs = list(itertools.combinations_with_replacement(first, 2)) if both_orders else []
    pairs = [pair for pair in pairs or itertools.product(first, second) if set(pair) != set(example)]
    rng = random.Random(seed)
    rng.shuffle(pairs)
    parts = {"held_out": pairs[:held_out], "tuning": pairs[held_out : held_out + tuning]}
    parts["train"] = pairs[held_out + tuning :]
    folder.mkdir(parents=True, exist_ok=True)
    report = []
    for name, part in parts.items():
        numbers = []
        for a, b in part:
            orders = [(a, b), (b, a)] if both_orders and a != b else [(a, b)]
            numbers += orders if name == "train" else [rng.choice(orders)]
        rng.shuffle(numbers)
        rows = [{"problem": problem(a, b), "answer": answer(a, b)} for a, b in numbers]
        if rows:
            write_file(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
            report.append(f"{name}.jsonl: {len(rows)} problems")
    write_file(folder / "one_example.jinja", template(problem(*example), answer(*example)))
    return report


def template(problem: str, answer: int) -> str:
    """Returns ChatML with one solved problem before the messages."""
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    example = turn.format("user", problem) + turn.format("assistant", f"{problem} = {answer}")
    message = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    return (
        f"{example}{{% for message in messages %}}{message}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def main(folder: tyro.conf.Positional[Path], kind: str = "plus", tuning: int = 0, seed: int = 1):
    """Writes the problems of a kind into a folder."""
    print("\n".join(make_sums(folder, kind, tuning=tuning, seed=seed)))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
