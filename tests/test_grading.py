"""Grading: the library's verdicts, rewards by hand, and workers that neither end the run nor make it wait."""

import math
import multiprocessing.forkserver
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, SHARED, read_rows
from transformers import AutoTokenizer

import grpo_math_humanline as script
from support import grading
from support.data import SkipRow
from support.grading import grade, grade_all, start_grader
from utils import Example, InputError

# In each line a gold answer and right answers; ⏎ is a line break.
ORDINARY = r"""
5 | 5 | $5$ | \[5\] | **5** | 5.0 | x=5 | 5=x | x_1 = 5 | \theta=5 | f(2)=5 | area = 5 | AB = 5 | \boxed{x=5}
5 | \fbox{5} | x = 2 + 3 = 5 | 2 + 3 = 5 | \frac{10}{2} | \boxed{5\text{ cm}} | 5 cm | 5 \text{ cm}^2
5 | 5^\circ | 5\% | $x = \boxed{5}$ | The answer is 5. This is since 3 + 1 = 4. | The answer (in cm) is 5.
5 | The answer is 5 miles per hour. | Answer: 5 | The answer is⏎\[⏎5⏎\] | ## Answer⏎5
5 | So there are 5 apples in total. | answer: 5 apples | 5 dollars | <answer>5
5 | First \boxed{4}, which is too small; then it must be \boxed{5}. | \boxed{5}, and no more | 5 + 73, so⏎A: 5
36 | The answer is **\$36**. | **\$36** | The answer is $36. | \boxed{\$36} | So she pays $36 in total.
-5 | –5 | −5 | x=−5 | The answer is –5.
24000 | \(24{,}000\) | 24,000 | 24\,000 | 24 000 | 24,\!000 | The answer is 24,000 meters.
\frac{7}{4} | 1 3/4 | 1\frac34 | 7/4 | 1.75 | The answer is 1 3/4.
\frac{1}{2} | ½ | 0.5 | \frac12
\frac{1}{3} | 0.333333 | 2/6
\frac{12}{5,\!525} | \frac{12}{5525} | 12/5525
\frac\pi 4 | \frac{\pi}{4} | \pi/4 | \frac\pi4
5040 | The coefficient is \boxed{5040}x^3. | $\boxed{5040}x^3$
1+2i | The answer is **1+2i**. | 2i+1
x=5 | The final answer is \(x=5\) | 5 | $x = 5$
y = 2x + 3 | 2x+3 | y=2x+3 | y = 2(x+1)+1 = 2x+3
x^2 - 1 | (x-1)(x+1) | y = x^2-1
5x - 7y = 4 | 4 = 5x - 7y | 5x - 7y - 4 = 0
[0,1) | x \in [0,1) | 0 \le x < 1
1,-2 | -2, 1 | \{1,-2\} | 1 \text{ and } -2 | $1$ and $-2$ | x = 1 or x = -2 | \boxed{1}, \boxed{-2}
1,-2 | \boxed{1} and \boxed{-2}
1,1,-2 | 1,1,-2 | -2, 1, 1
(3, \frac{\pi}{2}) | (3, \pi/2) | (r,\theta) = (3, \frac{\pi}{2})
\begin{pmatrix} 1 \\ -2 \end{pmatrix} | **\begin{pmatrix} 1 \\ -2 \end{pmatrix}**
\begin{pmatrix} 1 \\ -2 \end{pmatrix} | \[⏎\begin{pmatrix}⏎1 \\⏎-2⏎\end{pmatrix}⏎\]
\text{(C)} | C | (C) | **C** | The correct answer is **C**. | \boxed{\text{C}}
\text{Evelyn} | evelyn | The answer is Evelyn. | **Evelyn** | \boxed{\text{Evelyn}}
\text{no solution} | No solution. | \boxed{\text{no solution}}
4210_5 | 4210_{5} | 4210
"""
# In each line a gold answer and what must not be worth more than a wrong answer.
EXPLOITS = r"""
5 | 5 or 4 | 4 or 5 | The answer is 4 or 5. | The answer is $4$ or $5$. | The answer is either 4 or 5.
5 | A: 5 or 4 | #### 4, 5 | \boxed{4} or \boxed{5} | \boxed{4}, \boxed{5} | \boxed{4} and \boxed{5}
5 | $\boxed{4}$ or $\boxed{5}$ | \boxed{4}\boxed{5} | \boxed{5} or \boxed{4} | \boxed{4 \text{ or } 5}
5 | \boxed{4, 5} | x=4 or x=5 | \boxed{4;5} | \boxed{5 \pm 1} | \boxed{\pm 5} | The answer is 4 or maybe 5.
5 | The answer is $4$ or perhaps $5$. | \boxed{4 \lor 5} | \boxed{4 \to 5} | \boxed{4, \ldots, 5} | \{5\}
5 | [5] | $[5]$ | \boxed{[5]} | [5, 4] | (5, 5) | 5, 5 | \{4, 5\} | 1, 2, 3, 4, 5 | \boxed{[4,5]}
5 | \boxed{4 \cup 5} | 4=5 | 5=4 | \boxed{4=5} | x=4=5 | x=5=4 | 4=5=5 | x+y=5 | 2x=5 | x \ne 5 | x \le 5
5 | \boxed{3+2=5=4} | 5 \text{ is wrong} | 5 is wrong | \boxed{5 \text{ (or 4)}}
5 | \boxed{5 \text{ isn't right}} | \boxed{5 \text{ or not}} | 5' | $5'$
5 | <answer>5</answer> no, <answer>4</answer> | <answer>4</answer> <answer>5</answer>
5 | <answer>4 or 5</answer> | The answer is not 5. | 5x | 5! | \boxed{5i} | \boxed{5 4}
5 | \boxed{\begin{pmatrix} 5 \\ 5 \end{pmatrix}} | <answer></answer> 5
\frac{1}{2} | [\frac12] | \left[\frac{1}{2}\right] | \frac13=\frac12 | $\frac12$, $\frac13$
\frac{1}{2} | \frac12 \text{ or } \frac13
\text{A} | A or B | A, B | AB | \text{A or B} | A, B, C, D | \boxed{A} or \boxed{B}
\text{tea} | eat | ate | $ate$ | \text{eat}
2x+3 | y=2x+4=2x+3 | 2x+4=2x+3 | 2x+3=0 | \{2x+3\}
y=2x+3 | y = 2x+4 = 2x+3 | y=2x+3=5 | 2x+4
5x - 7y = 4 | 4 | 5x - 7y | x = 4 | y = 4
x^2 + y^2 = 13 | 13 | x^2 + y^2
1, 2 | 1 | 2 | 1, 2, 3 | \boxed{1} or \boxed{3}
"""
GOOD = "<think>\n3 4\n</think>\n<answer>\n4\n</answer>"
ENDLESS = "9^{9^{9^{9}}}"
BOMBS = [ENDLESS, r"\sum_{n=1}^{10^{12}} \frac{1}{n^2+\sin n}", "(" * 10**5 + "5" + ")" * 10**5]
ODD = ["", " \n ", "\0\1\0", "\ud800\udfff", "\\" * 10001, r"\boxed{" * 20000, r"\frac{0}{0}", "3" * 4301]

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def grader():
    pool = start_grader()
    yield pool
    pool.stop()
    pool.join()


def accepted(pairs: list[tuple]) -> list[tuple]:
    """Returns the (gold answer, text) that are right, graded in this process."""
    return [(gold, text) for gold, text in pairs if grade(gold, text, "")]


# --- verdicts ---


@pytest.mark.parametrize(("table", "paid", "count"), [(ORDINARY, 71, 108), (EXPLOITS, 25, 95)])
def test_the_counts_of_docs_grpo_math(table, paid, count):
    pairs = []
    for line in table.strip().split("\n"):
        gold, *texts = line.split(" | ")
        pairs += [(gold, text.replace("⏎", "\n")) for text in texts]
    assert (len(accepted(pairs)), len(pairs)) == (paid, count)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the MATH problems")
@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_answers_and_solutions_of_math500_are_right_and_other_answers_wrong(count):
    rows = random.Random(1).sample(read_rows(SHARED / "math" / "math500_test.jsonl"), count)
    assert len(accepted([(row["answer"], row["solution"]) for row in rows])) >= count - 1
    right, wrong = [], []
    for row in rows:
        gold = row["answer"]
        other = re.sub(r"\d", lambda digit: str((int(digit[0]) + 3) % 10), gold, count=1)
        right.append((gold, f"<answer>\n\\boxed{{{gold}}}\n</answer>"))
        wrong += [(gold, f"<answer>\n\\boxed{{{other}}}\n</answer>")] * (other != gold)
    assert accepted(right) == right and accepted(wrong) == []


@pytest.mark.parametrize("echo", ["17+25", "17.0+25", "(17+25)", "x = 17+25", "6*7", "42+0", "17+25 = 17+25"])
def test_a_number_that_is_still_to_be_computed_is_no_answer(echo):
    """A policy learns at once to repeat "What is 17 + 25?"."""
    for text in (echo, f"\\boxed{{{echo}}}", f"<answer>\n{echo}\n</answer>"):
        assert grade("42", text, "What is 17 + 25?") is False


@pytest.mark.parametrize(
    "text", ["17 + 25 = 42", "**42**.", r"\frac{84}{2}", r"\boxed{42}", "x = 42", "$42$"]
)
def test_a_computed_number_is_an_answer(text):
    assert grade("42", text, "What is 17 + 25?") is True
    assert grade("43", text, "What is 17 + 26?") is False


LIBRARY = [
    ("5", "--5"),
    (r"10\%", "10"),
    ("101_2", "101"),
    ("(1,2)", r"\{1,2\}"),
    ("7", r"7 \text{ dollars}"),
]
LIBRARY += [
    ("4, 5", r"\boxed{4} is one, the other is \boxed{5}"),
    ("5", r"\boxed{4}, no, it is" + " " * 60 + r"\boxed{5}"),
]
REFUSED = [("7", "7 dollars"), ("3", r"\boxed 3"), ("10", r"10\%"), ("5", r"\boxed{4}, no, \boxed{5}")]


def test_the_verdicts_of_docs_grpo_math():
    assert accepted(LIBRARY + REFUSED) == LIBRARY


def test_a_power_of_ten_is_read_as_python_writes_it_and_is_no_answer():
    for gold in ("1e5", "1e+05", "100000"):
        assert accepted([(gold, "100000"), (gold, "10000")]) == [(gold, "100000")]
    assert accepted([("100000", "1e5"), ("5", "5e0"), ("5", "x = 0.5e1")]) == []


def test_grade_leaves_no_timer_behind():
    """A notebook in which `grade` was called died five CPU seconds later."""
    assert grade("5", "\\boxed{5}", "What is 2+3?") is True
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


# --- rewards ---

FORMATS = [
    (GOOD, 1, 1),
    (GOOD + "\nand more", 0, 1),
    (GOOD.replace("</think>\n", "</think>"), 0, 0.5),
    (GOOD.replace("\n</answer>", ""), 0, 0.75),
    (GOOD + "\n</answer>", 1, 0.75),
    ("<think> 3 </think><answer> 4 </answer>", 0, 0),
]


@pytest.mark.parametrize(("text", "layout", "tags"), FORMATS)
def test_format_and_tag_count_rewards_by_hand(text, layout, tags):
    assert script.format_reward(text) == layout
    assert script.tag_count_reward(text) == tags


def test_a_reward_is_eight_of_accuracy_one_of_format_and_one_of_tags(grader):
    five = GOOD.replace("4\n</a", "5\n</a")
    texts = [GOOD, five, "4", "", GOOD.replace("\n</answer>", ""), five]
    samples = [Example("", [1], text=text, answer=answer) for text, answer in zip(texts, "444555")]
    graded, rewards, stopped = script.grade_samples(grader, [samples[:3], samples[3:]])
    assert [sample.reward for sample in graded] == [10, 2, 8, 0, 0.75, 10] and stopped == 0
    assert [sample.text for sample in graded] == texts
    assert [sample.correct for sample in graded] == rewards["accuracy"].tolist() == [1, 0, 1, 0, 0, 1]


def number(gold, text, problem):
    return {"half": np.float32(0.5), "tensor": torch.tensor(True), "nan": math.nan}[text]


@pytest.mark.parametrize(("text", "reward"), [("half", 4), ("tensor", 8)])
def test_a_grader_may_give_a_part_of_the_points_as_any_number(grader, monkeypatch, text, reward):
    monkeypatch.setattr(script, "GRADE", number)
    (sample,), _, _ = script.grade_samples(grader, [[Example("", [1], text=text)]])
    assert type(sample.reward) is float and sample.reward == reward


def test_rewards_that_are_not_finite_are_refused(grader, monkeypatch):
    monkeypatch.setattr(script, "GRADE", number)
    with pytest.raises(InputError, match="1 finite numbers"):
        script.grade_samples(grader, [[Example("", [1], text="nan")]])


# --- gold answers ---


def problems(answers: list) -> list:
    """Returns groups with these gold answers."""
    return [(Example(f"problem {number}", [], answer=answer),) for number, answer in enumerate(answers)]


def test_gold_answers_without_a_value_are_dropped_and_counted(grader, capsys):
    groups = problems(["5", "", "\\boxed{}", "so \\boxed{5}.", r"\frac\pi 4", " "])
    assert script.keep_gradable(grader, "x.jsonl", groups) == [groups[0], groups[3], groups[4]]
    assert "x.jsonl: 3 of 6 gold answers can be graded" in capsys.readouterr().out


def fail_for_seven(gold, text, problem):
    """Fails for one of many gold answers, and gives no verdict on an empty one."""
    if gold == "7":
        raise RuntimeError("no connection")
    return text == gold if gold else None


@pytest.mark.parametrize(
    ("function", "answer", "why"),
    [(fail_for_seven, "7", "no connection"), (grade, ENDLESS, "ProcessExpired")],
)
def test_a_gold_answer_that_fails_is_named_and_ends_the_run(grader, monkeypatch, function, answer, why):
    """It was dropped without a word, and the next start trained on other problems."""
    monkeypatch.setattr(grading, "TIME_LIMIT", 1.0)
    monkeypatch.setattr(script, "GRADE", function)
    with pytest.raises(InputError, match=f"(?s)x.jsonl: .*{re.escape(answer)}.*problem 2.*{why}"):
        script.keep_gradable(grader, "x.jsonl", problems(["5", "", answer, "8"]))
    graded, _, stopped = script.grade_samples(grader, [[Example("", [], text="8", answer=answer)]])
    assert graded[0].correct == 0 and stopped == 1  # in training it is a wrong answer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(script.TOY["model"])


def read_problem(tokenizer, **columns) -> tuple:
    """Returns the group of a row with these columns."""
    args = script.Args(system_prompt="")
    return script.encode_row(args, tokenizer, {tokenizer.eos_token_id}, {"problem": "4 2", **columns})


LISTS = [["4", "5"], [4], [], [["4"]], {"value": 4}, {}, [{"value": 4}], ("4",), b"4"]
PROSE = ["Adding 2 and 3 gives 5.", "First we add.\n\nThen $x = 5$.", "The answer is 5", "We\nsee it."]


@pytest.mark.parametrize("columns", [{"answer": x} for x in LISTS] + [{"solution": x} for x in LISTS + PROSE])
def test_answers_that_no_completion_can_equal_are_skipped(tokenizer, columns):
    with pytest.raises(SkipRow, match="answer is neither a text nor a number|solution has no .boxed"):
        read_problem(tokenizer, **columns)


ANSWERS = [  # a gold answer, an answer that is paid, and one that is not
    ("He has 3 * 24 = <<3*24=72>>72.\n#### 72", "72", "73"),  # GSM8K
    ("We get $\\boxed{72}$.", "72", "73"),  # MATH
    ("We get $\\fbox{72}$.", "72", "73"),
    ("<answer> 72 </answer>", "72", "73"),
    ("72", "72", "73"),
    ("$\\frac{1}{2}$", "0.5", "0.6"),
    (72, "72", "73"),
    (72.0, "72", "73"),
    (-0.5, "-1/2", "1/2"),
    (0.00005, "0.00005", "0.0005"),
    (1e22, "1" + "0" * 22, "1" + "0" * 21),
]
TEXTS = [(r"\text{Evelyn}", "Evelyn", "Eve"), ("no solution", "No solution.", "0"), ("5 or 7", "7, 5", "5")]


@pytest.mark.parametrize(
    ("column", "answer", "right", "wrong"),
    [("answer", *case) for case in ANSWERS + TEXTS] + [("solution", *case) for case in ANSWERS],
)
def test_texts_and_numbers_are_answers(tokenizer, column, answer, right, wrong):
    gold = read_problem(tokenizer, **{column: answer})[0].answer
    assert (grade(gold, right, ""), grade(gold, wrong, "")) == (True, False)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the MATH problems")
@pytest.mark.parametrize("column", ["answer", "solution"])
def test_all_problems_of_math500_stay(grader, tokenizer, column):
    rows = read_rows(SHARED / "math" / "math500_test.jsonl")[::5]
    found = [read_problem(tokenizer, **{column: row[column]}) for row in rows]
    assert script.keep_gradable(grader, "math", found) == found


# --- limits, and what comes from a worker ---


class TwoArguments(Exception):
    """It cannot be unpickled, and broke the pool."""

    def __init__(self, one, two):
        super().__init__(one)


def misbehave(gold, text, problem):
    """Does what its text names, and grades other texts."""
    if text == "exit":  # the run ended with status 0 and without a word
        exit()
    if text == "interrupt":
        raise KeyboardInterrupt
    if text == "not unpicklable":
        raise TwoArguments(1, 2)
    if text == "die":
        os._exit(0)
    if text == "wait":
        time.sleep(1000)
    if text == "memory":  # above the limit
        return len(bytearray(2**33))
    if text == "recursion":
        return misbehave(gold, text, problem)
    return {"function": len, "text": "right", "list": [1]}.get(text, text == gold)


def test_whatever_a_grader_does_is_no_verdict_and_the_pool_goes_on(grader, capsys, monkeypatch):
    monkeypatch.setattr(grading, "TIME_LIMIT", 0.2)
    texts = "exit interrupt die wait memory recursion function text list".split() + ["not unpicklable"]
    found = grade_all(grader, misbehave, [("5", text, "") for text in [*texts, "5", "6"]])
    assert found == [None] * 10 + [1.0, 0.0] and type(found[-1]) is float
    told = capsys.readouterr().out
    assert told.startswith("10 answers could not be graded; the first: Traceback") and "SystemExit" in told


def grade_slowly(gold, text, problem):
    time.sleep(1)
    return text == gold


def end_all_processes():
    pids = [process.pid for process in multiprocessing.active_children()]
    for pid in [*pids, multiprocessing.forkserver._forkserver._forkserver_pid]:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            os.kill(pid, number)


def grade_through_signals(verdicts):
    """Is a process that grades while signals come and after they came."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.cpu_count = lambda: 4
    pool = start_grader()
    jobs = [("5", text, "") for text in "5678"]
    grade_all(pool, grade, jobs)
    end_all_processes()  # of a pool without work
    time.sleep(1)
    threading.Timer(0.5, end_all_processes).start()
    for verdict in grade_all(pool, grade_slowly, jobs):
        verdicts.put(verdict)
    pool.stop()
    pool.join()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_signal_for_all_processes_of_a_run_changes_no_verdict():
    """Ctrl-C, a lost terminal, torchrun and Slurm reach the workers, too. Right answers became wrong."""
    context = multiprocessing.get_context("spawn")
    verdicts = context.SimpleQueue()
    process = context.Process(target=grade_through_signals, args=(verdicts,))
    process.start()
    process.join(120)
    assert process.exitcode == 0 and [verdicts.get() for _ in range(4)] == [1, 0, 0, 0]


RAISES = """
import os
import torch.distributed as dist
from support.grading import grade, grade_all, start_grader
os.cpu_count = lambda: 8
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
pool = start_grader()
grade_all(pool, grade, [("5", str(number), "") for number in range(40)])
print("graded", flush=True)
raise ValueError("an error in a loss")
"""


@pytest.mark.slow
def test_an_error_in_the_script_ends_it_without_waiting_for_workers():
    """It took three seconds for each of the eight workers."""
    process = subprocess.Popen(
        [sys.executable, "-c", RAISES], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout.readline() == "graded\n"
    started = time.monotonic()
    _, told = process.communicate(timeout=60)
    assert time.monotonic() - started < 15
    assert process.returncode == 1 and told.endswith("ValueError: an error in a loss\n")


def run_programs(gold, text, problem):
    """Returns whether `timeout` and a signal end programs that would run for a minute."""
    name = text.removeprefix("SIG")
    late = subprocess.run(["timeout", f"--signal={name}", "0.2", "sleep", "60"], timeout=5).returncode
    program = subprocess.Popen(["sleep", "60"])
    program.send_signal(signal.Signals[text])
    return late == 124 and program.wait(5) == -signal.Signals[text]


def test_signals_end_the_programs_of_a_grader(grader):
    """Programs inherited the workers' mask, and ran until the limit of wall-clock time."""
    names = ["SIGTERM", "SIGHUP", "SIGINT"]
    assert grade_all(grader, run_programs, [("", name, "") for name in names]) == [1, 1, 1]


def test_bombs_cost_the_time_limit_and_not_the_run(grader, monkeypatch):
    monkeypatch.setattr(grading, "TIME_LIMIT", 1.0)
    found = grade_all(grader, grade, [("5", text, "") for text in [*BOMBS, *ODD, "5", "6"]])
    assert found[: len(BOMBS)] == [None] * len(BOMBS) and not any(found[:-2])
    assert found[-2:] == [1, 0]  # an answer that waits behind them loses nothing


def test_each_answer_is_graded_once_and_verdicts_keep_their_order(grader, monkeypatch):
    """A hostile answer that is sampled eight times must not cost eight time limits."""
    jobs, schedule = [], grader.schedule

    def counted(function, arguments, **more):
        jobs.append(arguments[1])
        return schedule(function, arguments, **more)

    monkeypatch.setattr(grader, "schedule", counted)
    samples = [("5", "5", ""), ("5", "6", ""), ("5", "5", ""), ("6", "5", "")]
    assert grade_all(grader, grade, samples) == [1, 0, 1, 0]
    assert jobs == [samples[0], samples[1], samples[3]]
