"""Answers that `grade` reads and compares per second, by number of workers, and what an endless answer costs.

    python benchmark/grading.py math500_test.jsonl
    python benchmark/grading.py math500_test.jsonl --workers 1 2 4 8

The file is json lines with the fields answer and solution, such as MATH500's (openai/prm800k, math_splits/test.jsonl).
The solutions are graded as completions, then the bare answers; every one is right. All times are by the clock.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils import gold_answers, grade, start_grader  # noqa: E402


@dataclass
class Args:
    data: tyro.conf.Positional[str]
    """json lines with the fields answer and solution"""
    workers: list[int] = field(default_factory=lambda: [1, 2])
    """numbers of workers to try"""
    time_limit: float = 2.0
    """CPU seconds for one answer"""
    endless: int = 4
    """endless answers of the last measurement"""


def timed(function, *arguments):
    start = time.perf_counter()
    return function(*arguments), time.perf_counter() - start


def main(args: Args) -> None:
    rows = [json.loads(line) for line in Path(args.data).read_text().splitlines()]
    answers, solutions = ([row[name] for row in rows] for name in ("answer", "solution"))
    print("workers  start s  golds/s  dropped  solutions/s  wrong  answers/s  wrong  s per endless answer and worker")
    for workers in args.workers:
        pool = start_grader(workers, args.time_limit)
        _, start = timed(gold_answers, pool, {i: {"answer": "0"} for i in range(workers)})
        golds, parsing = timed(gold_answers, pool, dict(enumerate(rows)))
        kept = list(golds)
        line = f"{workers:7} {start:8.1f} {len(set(answers)) / parsing:8.0f} {len(rows) - len(kept):8}"
        for texts in (solutions, answers):
            pairs = {(texts[i], golds[i]) for i in kept}  # a repeated one is graded once
            (grades, _), seconds = timed(grade, pool, *zip(*pairs))
            line += f" {len(pairs) / seconds:{12 if texts is solutions else 10}.0f} {grades.count(0):6}"
        endless = [f"9^{{9^{{9^{{{9 + i}}}}}}}" for i in range(args.endless)]
        (_, stopped), seconds = timed(grade, pool, endless, ["5"] * args.endless)
        assert stopped == args.endless, "an answer that was to be endless came to an end"
        print(f"{line} {seconds * workers / args.endless:9.1f}", flush=True)
        pool.stop()
        pool.join()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
