"""Grading: right answers in every form are right, wrong and hostile ones are wrong, and nothing outlives the run."""

import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, SHARED

import utils
from utils import grade, parse_answers, start_grader

MATH = SHARED / "math"
LAYOUT = "<think>\nIt is 17 or \\boxed{18}.\n</think>\n<answer>\n%s\n</answer>"
FORMS = ["%s", "\n\n%s\n", "$%s$", "$$\n%s\n$$", "\\boxed{%s}", "The answer is $\\boxed{%s}$."]
FORMS += ["So $1+1=2$ and thus $%s$.", *[LAYOUT % form for form in FORMS]]
GOLDS = [r"\frac{1}{2}", r"(3, \frac{\pi}{2})", r"\text{Evelyn}", "4210_5", "12", "-7.5", r"3\sqrt{13}", "1,-2"]
GOLDS += [r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", "y = 2x + 3", r"(-\infty, 2) \cup (3, \infty)", r"11\text{ cm}^2"]
ENDLESS = "9^{9^{9^{9}}}"
TIMES_OUT = {
    "tower": ENDLESS,
    "Python's tower": "the answer is 9**9**9**9",
    "factorial": "10^{10^{10}}!",
    "binomial": r"\binom{10^{10}}{10^9}",
    "sum": r"\sum_{n=1}^{10^{12}} \frac{1}{n^2+\sin n}",
    "integral": r"\int \frac{\sin(x^x)\ln(\tan x)}{\sqrt{1+x^7}} dx",
    "parentheses": "(" * 10**5 + "5" + ")" * 10**5,
    "braces": "{" * 10**5 + "5" + "}" * 10**5,
    "digits": "7" * (3 * 10**6),
}
ENDS = {
    "empty": "",
    "blank": " \n ",
    "NUL": "\0\1\0",
    "surrogates": "\ud800\udfff",
    "no bytes of text": "".join(map(chr, range(256))) * 20,
    "backslashes": "\\" * 10001,
    "boxes": r"\boxed{" * 20000,
    "not a number": r"\frac{0}{0}",
    "infinite": r"\frac{1}{0}",
    "everything": r"(-\infty, \infty)",
    "no quantity": "x",
}


@pytest.fixture(scope="module")
def pool():
    pool = start_grader(workers=2, time_limit=2.0)
    yield pool
    pool.stop()
    pool.join()


def rows(name: str) -> list[dict]:
    if not MATH.exists():
        pytest.skip("needs the MATH problems")
    return [json.loads(line) for line in (MATH / name).read_text().splitlines()]


def wrong(pool, completions, golds) -> list[tuple]:
    """The (completion, gold) pairs that are graded 0."""
    return [pair for pair, value in zip(zip(completions, golds), grade(pool, completions, golds)[0]) if value == 0]


def test_a_right_answer_is_right_in_every_form(pool):
    assert parse_answers(pool, GOLDS) == GOLDS
    pairs = [(form.replace("%s", gold), gold) for form in FORMS for gold in GOLDS]
    assert wrong(pool, *zip(*pairs)) == []


def test_a_wrong_answer_is_wrong_in_every_form(pool):
    pairs = [(form.replace("%s", other), gold) for form in FORMS for gold, other in zip(GOLDS, GOLDS[1:] + GOLDS[:1])]
    assert wrong(pool, *zip(*pairs)) == pairs


@pytest.mark.parametrize(
    ("gold", "completion", "value"),
    [
        ("3", "<answer>2</answer> no, <answer>3</answer>", 1),
        ("2", "<answer>2</answer> no, <answer>3</answer>", 0),
        ("3", "<answer></answer> 3", 0),
        ("3", "<answer>3", 0),
        ("3", "\\boxed{2}, \\boxed{3}", 1),
        ("2", "\\boxed{2}, \\boxed{3}", 0),
        ("3", "\\boxed{3} or perhaps 4", 1),
        ("3", "\\boxed{3", 0),
        ("3", "3, 4, 5", 0),
        ("3", "1 2 3", 0),
        ("3", "\\boxed{3, 4}", 0),
        ("3", "3 \\text{ or } 4", 0),
        ("3", "$3$, $4$ or $5$", 0),
        ("3", "$3$ $4$ $5$", 0),
        ("3", "the answer is $3$, and the year is $2025$", 1),
        ("3", "3x", 0),
        ("3", "3\u00b2", 0),
        ("3", "x = 3", 1),
        ("3", "The answer is 3.", 1),
        ("3, 4", "\\{4, 3\\}", 1),
        ("(3, 4)", "(4, 3)", 0),
        ("\\frac{1}{3}", "0.333333", 1),
        ("\\frac{1}{3}", "0.333", 0),
        ("\\frac{1}{3}", "2/6", 1),
        ("x^2 - 1", "(x-1)(x+1)", 1),
        ("1,234", "1234", 1),
        ("\\$18.90", "18.9", 1),
        ("\\text{no solution}", "no solution", 1),
    ],
)
def test_a_completion_has_one_answer(pool, gold, completion, value):
    assert grade(pool, [completion], [gold]) == ([value], 0)


def test_gold_answers_that_cannot_be_graded_are_none(pool):
    golds = ["", " ", "\\frac{1}{", "\\frac{0}{0}", "\\sqrt{2} + \\frac \\pi 2", ENDLESS, "No box here"]
    golds += ["so \\boxed{5}."]
    assert parse_answers(pool, golds) == [None] * 5 + [ENDLESS, "No box here", "so \\boxed{5}."]
    assert wrong(pool, ["5", "$5$"], ["It is \\boxed{4}, or \\boxed{5}."] * 2) == []


def test_hostile_answers_cost_the_time_limit_and_not_the_run(pool, monkeypatch):
    monkeypatch.setattr(pool, "time_limit", 0.5)
    hostile = [*TIMES_OUT.values(), *ENDS.values()]
    start = time.monotonic()
    grades, stopped = grade(pool, [*hostile, "5", "6"], ["5"] * len(hostile) + ["5", "6"])
    assert grades == [0.0] * len(hostile) + [1.0, 1.0]  # whoever waits behind them loses nothing
    assert stopped == len(TIMES_OUT)
    assert time.monotonic() - start < 60


def test_memory_is_limited(pool):
    with pytest.raises(MemoryError):
        pool.schedule(bytearray, (2**31,)).result()
    pool.schedule(bytearray, (2**29,)).result()


def test_nothing_is_executed(pool, tmp_path):
    target = tmp_path / "made"
    calls = [
        f"__import__('os').system('touch {target}')",
        f"open('{target}', 'w')",
        f'exec("open({str(target)!r}, 1)")',
    ]
    places = ["%s", "\\text{%s}", "5 + %s", "x = %s", "\\sum_{n=0}^{\\infty} \\frac{\\text{%s}}{n!}", "x_{%s}"]
    texts = [form % (place % call) for form in ("%s", "$%s$", "\\boxed{%s}") for place in places for call in calls]
    for gold in ("5", "\\pi", "x < 3"):
        grade(pool, texts, [gold] * len(texts))
    parse_answers(pool, texts)
    assert not target.exists()


def test_each_pair_is_graded_once(pool, monkeypatch):
    jobs, schedule = [], pool.schedule
    monkeypatch.setattr(pool, "schedule", lambda f, args, **more: jobs.append(args[:2]) or schedule(f, args, **more))
    completions = ["5", "<answer>5</answer>", "6", "<think>6</think><answer>5</answer>", "5"]
    assert grade(pool, completions, ["5", "5", "5", "5", "6"]) == ([1, 1, 0, 1, 0], 0)
    assert jobs == [("5", "5"), ("5", "6"), ("6", "5")]


def test_two_ranks_equal_one(pool, monkeypatch):
    completions, golds = map(list, zip(*itertools.product([*GOLDS, ""], GOLDS), (ENDLESS, "5")))
    monkeypatch.setattr(pool, "time_limit", 1.0)
    alone = grade(pool, completions, golds)
    own, sent, barrier = threading.local(), [None, None], threading.Barrier(2, timeout=100)

    def all_gather_object(parts, part):
        sent[own.rank] = part
        barrier.wait()
        parts[:] = sent

    def on_rank(rank):
        own.rank = rank
        return grade(pool, completions, golds)

    ranks = {"get_rank": lambda: own.rank, "get_world_size": lambda: 2, "is_initialized": lambda: True}
    monkeypatch.setattr(utils, "dist", SimpleNamespace(**ranks, all_gather_object=all_gather_object))
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(on_rank, range(2))) == [alone, alone]
    assert [len(part) for part in sent] == [len(completions) // 2 + 1, len(completions) // 2]


def test_workers_end_when_the_run_is_killed():
    def running(process: str) -> bool:
        stat = Path(f"/proc/{process}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    code = f"""
import os, time
from utils import _judge, start_grader
pool = start_grader(workers=2, time_limit=1.0)
server = pool.schedule(os.getppid).result()
pool.schedule(_judge, ({ENDLESS!r}, None, 1.0))
print(server, open(f"/proc/{{server}}/task/{{server}}/children").read(), flush=True)
time.sleep(600)
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    processes = run.stdout.readline().split()
    assert len(processes) == 3 and all(map(running, processes))
    run.send_signal(signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 60
    while any(map(running, processes)):
        assert time.monotonic() < deadline, "workers outlived the run"
        time.sleep(0.1)


def test_math500_gold_answers_equal_themselves(pool):
    problems = rows("math500_test.jsonl")
    answers = [row["answer"] for row in problems]
    assert parse_answers(pool, answers) == answers
    for form in ("%s", LAYOUT % "$%s$"):
        assert wrong(pool, [form.replace("%s", answer) for answer in answers], answers) == []
    assert wrong(pool, [row["solution"] for row in problems], answers) == []  # boxed, in prose


def test_math500_wrong_answers_are_wrong(pool):
    answers = [row["answer"] for row in rows("math500_test.jsonl")]
    others = [next(o for o in answers[i + 1 :] + answers if o != answer) for i, answer in enumerate(answers)]
    equal = [("x=5", "5")]  # a value, and an equation for it
    pairs = [pair for pair in zip(others, answers) if pair not in equal]
    assert len(pairs) == 499 and wrong(pool, *zip(*pairs)) == pairs
    # another first digit, except that of an exponent or of a base
    pairs = [(re.sub(r"\d", lambda m: str((int(m[0]) + 3) % 10), answer, count=1), answer) for answer in answers]
    pairs = [pair for pair in pairs if pair[0] != pair[1]]
    assert len(pairs) == 489 and wrong(pool, *zip(*pairs)) == pairs


def test_gold_answers_of_training_problems(pool):
    problems = rows("prm800k_split_train_sample512.jsonl")
    golds = parse_answers(pool, [row["solution"] for row in problems])
    assert golds.count(None) == 0
    assert wrong(pool, [row["answer"] for row in problems], golds) == []
