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
from pathlib import Path
from typing import NamedTuple

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.run import write_file  # noqa: E402

HELD_OUT = 64  # problems


class Kind(NamedTuple):
    problem: str  # of numbers a and b
    first: range  # the values of a
    second: range  # the values of b
    example: tuple[int, int]  # a and b of the solved problem, which is in no file


KINDS = {
    "plus": Kind("{a} + {b}", range(10, 50), range(10, 50), (14, 6)),
    "plus_small": Kind("{a} + {b}", range(1, 21), range(1, 21), (6, 14)),
    "plus_large": Kind("{a} + {b}", range(10, 100), range(10, 100), (14, 6)),
    "plus_tens": Kind("{a}0 + {b}0", range(10, 50), range(10, 50), (5, 6)),
    "minus": Kind("{a} - {b}", range(11, 41), range(1, 10), (45, 2)),
    "times": Kind("{a} * {b}", range(3, 7), range(11, 61), (3, 5)),
}


def main(folder: tyro.conf.Positional[Path], kind: str = "plus", tuning: int = 0, seed: int = 1):
    """Writes the problems of a kind and the chat template into a folder.

    train.jsonl and held_out.jsonl have columns problem and answer, and so has tuning.jsonl, if its number of
    problems is not 0.
    """
    text, first, second, example = KINDS[kind]
    both_orders = first == second  # a + b and b + a are one pair
    pairs = list(itertools.combinations_with_replacement(first, 2)) if both_orders else []
    pairs = [pair for pair in pairs or itertools.product(first, second) if set(pair) != set(example)]
    rng = random.Random(seed)
    rng.shuffle(pairs)
    parts = {"held_out": pairs[:HELD_OUT], "tuning": pairs[HELD_OUT : HELD_OUT + tuning]}
    parts["train"] = pairs[HELD_OUT + tuning :]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        numbers = []
        for a, b in part:
            orders = [(a, b), (b, a)] if both_orders and a != b else [(a, b)]
            numbers += orders if name == "train" else [rng.choice(orders)]
        rng.shuffle(numbers)
        problems = [text.format(a=a, b=b) for a, b in numbers]
        rows = [{"problem": problem, "answer": eval(problem)} for problem in problems]
        if rows:
            write_file(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
            print(f"{name}.jsonl: {len(rows)} problems")
    write_file(folder / "one_example.jinja", template(text.format(a=example[0], b=example[1])))


def template(problem: str) -> str:
    """Returns ChatML with one solved problem before the messages."""
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    example = turn.format("user", problem) + turn.format("assistant", f"{problem} = {eval(problem)}")
    message = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    return (
        f"{example}{{% for message in messages %}}{message}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
