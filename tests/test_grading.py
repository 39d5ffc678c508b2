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
from utils import gold_answers, grade, start_grader

MATH = SHARED / "math"
LAYOUT = "<think>\nIt is 17 or \\boxed{18}.\n</think>\n<answer>\n%s\n</answer>"
FORMS = ["%s", "\n\n%s\n", "$%s$", "$$\n%s\n$$", "\\boxed{%s}", "The answer is $\\boxed{%s}$."]
FORMS += ["So $1+1=2$ and thus $%s$.", *[LAYOUT % form for form in FORMS]]
GOLDS = [r"\frac{1}{2}", r"(3, \frac{\pi}{2})", r"\text{Evelyn}", "4210_5", "12", "-7.5", r"3\sqrt{13}", "1,-2"]
GOLDS += [r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", "y = 2x + 3", r"(-\infty, 2) \cup (3, \infty)", r"11\text{ cm}^2"]
ENDLESS = "9^{9^{9^{9}}}"
# a gold answer and completions in each line; \n is a new line and \u200b a character
RIGHT = r"""
5 | 5 | 5. | x=5 | x = 5 | 5=x | y_1=5 | x_{12} = 5 | \theta=5 | \text{area}=5 | area = 5
5 | f(2)=5 | f(x)=5 | x \in \{5\} | \sqrt{25} | \frac{10}{2} | 5.0 | \boxed{x=5} | $x = \boxed{5}$ | \boxed{5}.
5 | 5\text{ cm} | 5 cm | 5 \text{ cm}^2 | \$5 | 5^\circ | 5\% | **5** | $5$ | \(5\) | \[5\] | The answer is 5.
5 | Answer: 5 | therefore x = 5 | Thus, $x=5$ | So x = 5.
2, 3 | x = 2 or x = 3 | x=2, x=3 | x = 2 \text{ or } x = 3
5 | \boxed{5}\text{ cm} | \boxed{5}^\circ | $x\equiv \boxed{5} \pmod 7$ | **\boxed{5}** | So\n- \boxed{5}
5 | \boxed{5} - and no more | A: 5
5 | The final answer is: **5** | So there are 5 apples in total. | The answer is $5$, not $4$.
5 | x - 5 = 0, so $x = 5$.
78 | A: 78 | 5 + 73, so\nA: 78 | Q: how many?\nA: 78. | Answer: 78 | answer: $78$
-5 | –5 | −5 | -5 | \u20115 | x=−5 | the answer is –5
5000 | 5 000 | 5\,000 | 5\ 000 | 5{,}000 | 5,000 | 5,\!000 | 5\u00a0000 | 5\u202f000 | 5\;000 | 5e3 | 5 \times 10^3
5000 | 5~000
1234567 | 1 234 567 | 1,234,567 | 1\,234\,567 | 1234567.0
100000 | 1e5 | 1E5 | 1e+5 | 10^5 | 1.0e5 | 1 \times 10^5 | The answer is 1e5.
150000 | 1.5\times 10^5 | 1.5 \cdot 10^{5} | 1.5×10^5 | 1.5e5
0.0015 | 1.5e-3 | 1.5 \times 10^{-3} | \frac{3}{2000}
0.0000001 | 1e-7 | 10^{-7} | 0.0000001 | \frac{1}{10^7}
1.2e-9 | 0.0000000012 | 1.2 \times 10^{-9}
\frac{7}{4} | 1 3/4 | 1\frac{3}{4} | 1 \frac{3}{4} | 1\frac34 | 7/4 | 1.75 | The answer is 1 3/4.
-\frac{7}{4} | -1 3/4 | –1\frac{3}{4} | -1.75
\frac{1}{3} | 0.333333 | 0.33333333 | 1/3 | \frac13
\frac{1}{30} | 0.0333333 | 1/30
\sqrt{2} | \sqrt2 | x = \sqrt{2} | 2^{1/2}
\text{A} | A | A) | A. | (A) | **A** | \text{(A)} | \boxed{A} | The answer is A | The answer is (A). | Answer: A
\text{A} | \textbf{A} | a
\text{(C)} | C | (C) | C) | The correct answer is **C**.
Evelyn | evelyn | \text{Evelyn} | Evelyn. | The answer is Evelyn. | $\text{Evelyn}$ | E\u200bvelyn
tea | tea | Tea | \text{tea} | \text{ tea }
\text{no solution} | no solution | No solution. | \text{No solution}
xy | yx | x \cdot y | xy
y = 2x + 3 | y=2x+3 | 2x+3 | 2x+3=y | $y = 3+2x$
2x + 3 | y = 2x+3 | f(x) = 2x+3 | 3 + 2x
x = 5 | 5 | x=5 | 5 = x
5x - 7y = 4 | 5x-7y=4 | 4 = 5x - 7y | 5x - 7y - 4 = 0 | 7y = 5x - 4
x < 5 | 5 > x | x<5 | x - 5 < 0
x \in [-2,7] | [-2,7] | x\in[-2,7]
1, 2 | 2, 1 | \{1,2\} | 1 \text{ and } 2 | 1 or 2 | $1$ and $2$ | x = 1, 2
1 \pm \sqrt{2} | 1 + \sqrt2, 1 - \sqrt2 | x = 1 \pm \sqrt 2
(1, 2) | (1,2) | (1, \frac{4}{2})
(5, 5) | (5,5) | \left(5, 5\right)
[1, 2] | [1,2] | \left[1, 2\right] | [1, 2.0]
\begin{pmatrix} 5 \\ 0 \end{pmatrix} | \begin{pmatrix}5\\0\end{pmatrix} | \begin{bmatrix} 10/2 \\ 0 \end{bmatrix}
4210_5 | 4210_{5} | 4210
\infty | \infty | infinity
50\% | 50% | 0.5 | 50 | \frac12
"""
WRONG = r"""
5 | 2x=5 | x^2=5 | x+y=5 | 6=5 | \boxed{4=5} | 5 or 4 | 5\approx 4 | \boxed{5} \times 10^3 | 1\boxed{5} | [5,5]
5 | x=2+3=6 | 2+3=5+1
5 | xy=5 | 5=6 | 4=5=5 | x=4=5 | x=5=4 | 2+2=5 | x + x = 5 | \sin x = 5 | x=5x | \frac{x}{2}=5 | 5 \in [1,9]
5 | x \neq 5 | x < 5
5 | 4 and 5 | 5, 4 | \{5, 4\} | \{5,5\} | 5, 5 | (5,5) | 5, \frac{10}{2} | x=5, 5 | x=5, y=5
5 | x = 5 or x = 4
5 | 5 \pm 1 | \pm 5 | 5 4 | 5\;4 | 5\quad 4 | 5 \text{ or } 4 | $5$ or $4$ | The answer is 5 or 4. | 5 / 4 | 5 \to 4
5 | 5! | 5i
5 | \boxed{5}^2 | -\boxed{5} | \boxed{5}x | \boxed{5}0 | \boxed{5} 000 | 2 \times \boxed{5} | \boxed{5}/2 | \boxed{5}!
5 | 3\cdot\boxed{5}
5 | \boxed{5}\sqrt{2} | \boxed{5} + 1 | 1,\!5 | \begin{pmatrix} 5 \\ 5 \end{pmatrix} | 5^\circ = 6^\circ | 5 = x = 4
5 | –5 | 5e1 | 5e-1
9 | 5 4 | 5\,4 | 5 \quad 4 | 4\n5
7/4 | 1, 3/4 | 13/4 | 3/4 | -1 3/4
0 | 0.0000001 | 1e-7 | 10^{-20}
0.0000001 | 0.0000002 | 2e-7 | 2\times 10^{-7} | 0 | 1.1e-7
10^{-20} | 10^{-21} | 2 \cdot 10^{-20} | 0 | 10^{-19}
0.00001234 | 0.00001243 | 0.000012
\frac{1}{3} | 0.333 | 0.33333 | 0.333334 | \frac{1}{3} = 0.4
\frac{1}{30} | 0.0333 | 0.03333
\sqrt{2} | 1.414 | \sqrt2 \approx 2 | \sqrt{2} = 1.414
tea | ate | eat | t e a s | \text{ate} | $ate$
ate | tea | eat | The answer is tea.
\text{A} | B | (B) | B) | A, B | A or B | The answer is B | AB
\text{no solution} | no | solution | a solution
Evelyn | Evelyne | Navin | n
y = 2x + 3 | y=2x+4 | 2x+4 | y + 2x = 3 | x = 2y + 3 | y = 2x + 3 = 4 | 3
x = 5 | x=4 | y=6 | x^2=5 | 2x = 5 | x = 4 = 5 | x < 5
5x - 7y = 4 | 4 | 5x - 7y | 5x - 7y = 5 | y = 4
x + y = 5 | 5 | x = 5 | x - y = 5
x < 5 | x > 5 | x \le 5 | 5 | x = 5
1, 2 | 1, 3 | 1 | 2 | 1, 2, 3 | [1,2] | 12 | 1, 2, 2 | 1.2 | 2x=1, 2
(1, 2) | [1,2] | (2,1) | (1,2] | 3
[1, 2] | (1,2) | [1,3] | 1, 2
5000 | 5 | 5 001 | 5.000 | 5e4 | 50 000
100000 | 1e6 | 1e-5 | 10^4
4210_5 | 4212_5 | 4211_5
78 | A: 87 | Answer: 7 8 | A: 78, 79
-5 | 5 | –6
50\% | 5 | 51\% | 0.05
\begin{pmatrix} 5 \\ 0 \end{pmatrix} | \begin{pmatrix}0\\5\end{pmatrix} | 5 | (5, 1)
3\sqrt{13} | 3\boxed{\sqrt{13}} | \sqrt{13}
\infty | -\infty | inf inity 5
"""
TIMES_OUT = {
    "tower": ENDLESS,
    "factorial": "10^{10^{10}}!",
    "binomial": r"\binom{10^{10}}{10^9}",
    "sum": r"\sum_{n=1}^{10^{12}} \frac{1}{n^2+\sin n}",
    "integral": r"\int \frac{\sin(x^x)\ln(\tan x)}{\sqrt{1+x^7}} dx",
    "parentheses": "(" * 10**5 + "5" + ")" * 10**5,
    "braces": "{" * 10**5 + "5" + "}" * 10**5,
    "digits": "7" * (3 * 10**6),
}
ENDS = {
    "Python's tower": "the answer is 9**9**9**9",
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


def parse_answers(pool, texts: list[str]) -> list[str | None]:
    """Each text, or None where it is no gold answer."""
    golds = gold_answers(pool, {i: {"answer": text} for i, text in enumerate(texts)})
    return [golds.get(i) for i in range(len(texts))]


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


def table(text: str) -> list[tuple]:
    """The (completion, gold) pairs of RIGHT or WRONG."""
    text = re.sub(r"\\u([0-9a-f]{4})", lambda m: chr(int(m[1], 16)), text)
    lines = [re.sub(r"\\n(?![a-z])", "\n", line).split(" | ") for line in text.strip().split("\n")]
    return [(completion.strip(" "), gold.strip()) for gold, *completions in lines for completion in completions]


def test_right_and_wrong_answers(pool):
    right, others = table(RIGHT), table(WRONG)
    golds = sorted({gold for _, gold in right + others})
    assert len(right) > 170 and len(others) > 170 and parse_answers(pool, golds) == golds
    assert wrong(pool, *zip(*right)) == []
    zeros = wrong(pool, *zip(*others))
    assert [pair for pair in others if pair not in zeros] == []


def test_big_integers_stay_exact(pool):
    numbers = [int("123456789" * 44 + "1234"), 10**30, 10**30 + 1]
    golds = gold_answers(pool, {i: {"answer": number} for i, number in enumerate(numbers)})
    assert list(golds.values()) == [str(number) for number in numbers]
    for add, value in ((0, 1), (1, 0), (-1, 0)):
        assert grade(pool, [str(number + add) for number in numbers], list(golds.values()))[0] == [value] * 3


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
