"""Grading: most ordinary answers are right, few exploits pay, and no answer outlives or ends the run."""

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, SHARED, read_rows

import grpo_math_humanline
import utils
from grpo_math_humanline import gold_answer, grade_samples, keep_gradable
from support import grading
from support.grading import grade, start_grader
from utils import Example

ENDLESS = "9^{9^{9^{9}}}"
# Ways to end a completion with an answer.
LAYOUTS = [
    "%s",
    "The answer is %s.",
    "So we are done. The answer is **%s**.",
    "The final answer is \\(%s\\)",
    "We have $x=3$, so $y=2x$. Therefore, the final answer is: $\\boxed{%s}$. I hope it is correct.",
    "Simplifying $3+4$, we get $\\boxed{%s}$.",
    "<think>\nIt is 17 or \\boxed{18}. The answer is 3.\n</think>\n<answer>\n%s\n</answer>",
    "<think>\nIt is 17 or \\boxed{18}.\n</think>\n<answer>\nThe answer is $\\boxed{%s}$.\n</answer>",
    "It follows from $1+1=2$.\n\n**Answer:** $%s$",
    "It follows.\n\n**Final Answer**\n\n\\[ \\boxed{%s} \\]",
    "Step 1: 3 + 4 = 7.\nA: %s",
    "We add 3 and 4.\n#### %s",
    "Adding $3$ and $4$, we get\n\\[\n%s.\n\\]",
    "So $1+1=2$ and thus $%s$.",
]
# In each line a gold answer and completions; ⏎ is a new line.
ORDINARY = r"""
5 | 5 | $5$ | \[5\] | **5** | 5.0 | x=5 | 5=x | x_1 = 5 | \theta=5 | f(2)=5 | area = 5 | AB = 5 | \boxed{x=5}
5 | \fbox{5}
5 | x = 2 + 3 = 5 | 2 + 3 = 5 | \frac{10}{2} | \boxed{5\text{ cm}} | 5 cm | 5 \text{ cm}^2 | 5^\circ | 5\%
5 | $x = \boxed{5}$
5 | The answer is 5. This is since 3 + 1 = 4. | The answer (in cm) is 5. | The answer is 5 miles per hour.
5 | Answer: 5
5 | The answer is⏎\[⏎5⏎\] | ## Answer⏎5 | So there are 5 apples in total. | answer: 5 apples | 5 dollars
5 | <answer>5
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
# What would be rewarded where several answers, or something around one, are not looked at.
EXPLOITS = r"""
5 | 5 or 4 | 4 or 5 | The answer is 4 or 5. | The answer is $4$ or $5$. | The answer is either 4 or 5.
5 | A: 5 or 4 | #### 4, 5
5 | \boxed{4} or \boxed{5} | \boxed{4}, \boxed{5} | \boxed{4} and \boxed{5} | $\boxed{4}$ or $\boxed{5}$
5 | \boxed{4}\boxed{5}
5 | \boxed{5} or \boxed{4} | \boxed{4 \text{ or } 5} | \boxed{4, 5} | x=4 or x=5 | \boxed{4;5}
5 | \boxed{5 \pm 1} | \boxed{\pm 5}
5 | The answer is 4 or maybe 5. | The answer is $4$ or perhaps $5$. | \boxed{4 \lor 5} | \boxed{4 \to 5}
5 | \boxed{4, \ldots, 5}
5 | \{5\} | [5] | $[5]$ | \boxed{[5]} | [5, 4] | (5, 5) | 5, 5 | \{4, 5\} | 1, 2, 3, 4, 5 | \boxed{[4,5]}
5 | \boxed{4 \cup 5}
5 | 4=5 | 5=4 | \boxed{4=5} | x=4=5 | x=5=4 | 4=5=5 | x+y=5 | 2x=5 | x \ne 5 | x \le 5 | \boxed{3+2=5=4}
5 | 5 \text{ is wrong} | 5 is wrong | \boxed{5 \text{ (or 4)}} | \boxed{5 \text{ isn't right}}
5 | \boxed{5 \text{ or not}} | 5' | $5'$
5 | <answer>5</answer> no, <answer>4</answer> | <answer>4</answer> <answer>5</answer>
5 | <answer>4 or 5</answer>
5 | The answer is not 5. | 5x | 5! | \boxed{5i} | \boxed{5 4} | \boxed{\begin{pmatrix} 5 \\ 5 \end{pmatrix}}
5 | <answer></answer> 5
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
BOMBS = {
    "tower": ENDLESS,
    "sum": r"\sum_{n=1}^{10^{12}} \frac{1}{n^2+\sin n}",
    "parentheses": "(" * 10**5 + "5" + ")" * 10**5,
    "digits": "7" * (3 * 10**6),
}
ODD = ["", " \n ", "\0\1\0", "\ud800\udfff", "\\" * 10001, r"\boxed{" * 20000, r"\frac{0}{0}"]


pytestmark = pytest.mark.usefixtures("one_rank")


def grade_all(grader, jobs):
    return grading.grade_all(grader, grade, jobs)


@pytest.fixture(scope="module")
def grader():
    pool = start_grader()
    yield pool
    pool.stop()
    pool.join()


def table(text: str) -> list[tuple]:
    """(gold, completion) of ORDINARY or EXPLOITS."""
    pairs = []
    for line in text.strip().split("\n"):
        gold, *completions = line.split(" | ")
        pairs += [(gold, completion.replace("⏎", "\n")) for completion in completions]
    return pairs


def verdicts(grader, pairs: list[tuple]) -> list:
    """Of (gold, completion), without a problem that could be copied."""
    return grade_all(grader, [(gold, text, "") for gold, text in pairs])


def rejected(grader, pairs: list[tuple]) -> list[tuple]:
    return [pair for pair, verdict in zip(pairs, verdicts(grader, pairs)) if not verdict]


def problems(name: str) -> list[dict]:
    path = SHARED / "math" / name
    if not path.exists():
        pytest.skip("needs the MATH problems")
    return read_rows(path)


# --- verdicts -----------------------------------------------------------------------------------------------


def test_nearly_all_ordinary_right_answers_are_right(grader):
    pairs = table(ORDINARY)
    lost = rejected(grader, pairs)
    assert len(pairs) == 108 and len(lost) <= 13, lost


def test_nearly_all_exploits_are_wrong(grader):
    pairs = table(EXPLOITS)
    wrong = rejected(grader, pairs)
    paid = [pair for pair in pairs if pair not in wrong]
    assert len(pairs) == 95 and len(paid) <= 10, paid


def test_right_answers_to_math_problems_are_right_in_nearly_every_layout(grader):
    rows = random.Random(1).sample(problems("math500_test.jsonl"), 40)
    pairs = [(row["answer"], layout.replace("%s", row["answer"])) for row in rows for layout in LAYOUTS]
    lost = rejected(grader, pairs)
    assert len(lost) <= 0.02 * len(pairs), lost


def test_wrong_answers_to_math_problems_are_wrong_in_every_layout(grader):
    answers = [row["answer"] for row in random.Random(2).sample(problems("math500_test.jsonl"), 40)]
    others = answers[1:] + answers[:1]
    digits = [re.sub(r"\d", lambda m: str((int(m[0]) + 3) % 10), answer, count=1) for answer in answers]
    pairs = []
    for number, answer in enumerate(answers):
        for layout in LAYOUTS[number % 2 :: 2]:
            for wrong in {others[number], digits[number]} - {answer}:
                pairs.append((answer, layout.replace("%s", wrong)))
    assert len(pairs) > 400 and rejected(grader, pairs) == pairs


def test_solutions_of_math_problems_have_their_answers(grader):
    rows = problems("prm800k_split_train_sample512.jsonl")
    lost = rejected(grader, [(row["answer"], row["solution"]) for row in rows])
    lost += rejected(grader, [(row["solution"], row["answer"]) for row in rows])
    assert len(lost) <= 0.003 * 2 * len(rows), lost


@pytest.mark.parametrize("name", ["theta", "upsilon", "omega"])
def test_a_greek_letter_is_not_the_other_case_of_it(grader, name):
    pairs = [(rf"\{name}", rf"\boxed{{\{answer}}}") for answer in (name, name.title())]
    assert verdicts(grader, pairs) == [True, False]


def test_big_integers_stay_exact_and_verdicts_in_the_order_of_the_pairs(grader):
    for number in (int("123456789" * 44 + "1234"), 10**30):
        gold = gold_answer({"answer": number})
        pairs = [(gold, str(number + add)) for add in (0, 1, 0, -1)]
        assert verdicts(grader, pairs) == [True, False, True, False]


# --- rewards ------------------------------------------------------------------------------------------------

GOOD = "<think>\n3 4\n</think>\n<answer>\n4\n</answer>"


@pytest.mark.parametrize(
    ("text", "layout", "tags"),
    [
        (GOOD, 1, 1),
        ("<think>\n\n</think>\n<answer>\n4\n</answer>", 1, 1),
        (GOOD + "\nand more", 0, 1),
        ("so " + GOOD, 0, 1),
        (GOOD.replace("</think>\n", "</think>"), 0, 0.5),
        (GOOD.replace("\n</answer>", ""), 0, 0.75),
        (GOOD + "\n</answer>", 1, 0.75),
        ("<think> 3 </think><answer> 4 </answer>", 0, 0),
    ],
)
def test_format_and_tag_count_rewards_by_hand(text, layout, tags):
    assert grpo_math_humanline.format_reward(text) == layout
    assert grpo_math_humanline.tag_count_reward(text) == tags


def test_a_reward_is_eight_of_accuracy_one_of_format_and_one_of_tags(grader):
    five = GOOD.replace("4\n</a", "5\n</a")
    texts = [GOOD, five, "4", "", GOOD.replace("\n</answer>", ""), five]
    samples = [Example("", [1], text=text, answer=answer) for text, answer in zip(texts, "444555")]
    scored, rewards, stopped = grade_samples(grader, [samples[:3], samples[3:]])
    assert [x.reward for x in scored] == [10, 2, 8, 0, 0.75, 10] and stopped == 0
    assert [x.text for x in scored] == texts
    assert [x.correct for x in scored] == [True, False, True, False, False, True]
    assert rewards["accuracy"].tolist() == [1, 0, 1, 0, 0, 1]
    assert rewards["format"].tolist() == [1, 1, 0, 0, 0, 1]
    assert rewards["tag_count"].tolist() == [1, 1, 0, 0, 0.75, 1]


# --- gold answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"answer": "5", "solution": "\\boxed{6}"}, "5"),
        ({"answer": 5}, "5"),
        ({"answer": 5.0}, "5"),
        ({"answer": 1e-5}, "0.00001"),
        ({"answer": float("nan")}, ""),
        ({"answer": None, "solution": "so \\boxed{6}."}, "so \\boxed{6}."),
        ({"solution": "so 6"}, ""),
    ],
)
def test_a_gold_answer_is_the_answer_or_the_boxed_solution(row, gold):
    assert gold_answer(row) == gold


@pytest.mark.parametrize("row", [{"level": 5}, {"answer": [5]}, {"answer": True}, {"solution": 5}])
def test_a_row_without_answer_or_with_another_type_is_refused(row):
    with pytest.raises(utils.InputError, match="a problem needs an answer"):
        gold_answer(row)


def test_gold_answers_without_a_value_are_dropped_and_counted(grader, capsys, monkeypatch):
    monkeypatch.setattr(grading, "TIME_LIMIT", 1.0)
    answers = ["5", "", ENDLESS, "so \\boxed{5}.", r"\frac\pi 4", " "]
    groups = [(Example("", [], answer=answer),) for answer in answers]
    assert keep_gradable(grader, "x.jsonl", groups, 1) == [groups[0], groups[3], groups[4]]
    assert "3 of 6 gold answers can be graded, the first that cannot is ''" in capsys.readouterr().out
    with pytest.raises(utils.InputError, match="^x.jsonl: 0 of 12 gold answers can be graded"):
        keep_gradable(grader, "x.jsonl", groups[1:2] * 12, 1)


# --- limits -------------------------------------------------------------------------------------------------


def test_bombs_cost_the_time_limit_and_not_the_run(grader, monkeypatch):
    monkeypatch.setattr(grading, "TIME_LIMIT", 1.0)
    texts = [*BOMBS.values(), *ODD, "5", "6"]
    group = tuple(Example("", [], text=text, answer="5") for text in texts)
    _, rewards, stopped = grade_samples(grader, [group])
    # An answer that waits behind them loses nothing.
    assert rewards["accuracy"].tolist() == [0.0] * (len(texts) - 2) + [1.0, 0.0]
    assert stopped == len(BOMBS)


def test_memory_is_limited(grader):
    with pytest.raises(MemoryError):
        grader.schedule(bytearray, (2**33,)).result()  # above the limit
    grader.schedule(bytearray, (2**28,)).result()  # and its copies on the way back


@pytest.mark.parametrize("pattern", [*grading.REWRITES, grading.ANSWER_IS])
def test_no_pattern_takes_more_than_linear_time(pattern):
    """The parser behind them may: it has its time limit."""
    units = [".", "5 ", "5,", "$", "{", "a", "a ", "answer ", "A:", "]."]
    units += ["\\text{", "\\text{or ", "\\frac", "\\ "]
    for unit in units:
        started = time.process_time()
        re.sub(pattern, "", unit * (200_000 // len(unit)))
        assert time.process_time() - started < 1, unit


def test_nothing_is_executed(grader, tmp_path):
    target = tmp_path / "made"
    calls = [f"__import__('os').system('touch {target}')", f"open('{target}', 'w')"]
    places = ["%s", "\\text{%s}", "5 + %s", "x = %s", "\\sum_{n=0}^{9} \\frac{\\text{%s}}{n!}", "x_{%s}"]
    forms = ["%s", "$%s$", "\\boxed{%s}"]
    texts = [form % (place % call) for form in forms for place in places for call in calls]
    verdicts(grader, [(gold, text) for gold in ("5", "x < 3") for text in texts])
    assert not target.exists()


def test_workers_end_when_the_run_is_killed():
    def running(process: str) -> bool:
        stat = Path(f"/proc/{process}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    code = f"""
import os, time
from support.grading import grade, start_grader
if __name__ == "__main__":
    pool = start_grader()
    server = pool.schedule(os.getppid).result()
    pool.schedule(grade, ("5", {ENDLESS!r}, ""))
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


# --- what a shortening of the tables had let go -------------------------------------------------------------

# Everything else in both tables must have its right verdict, whatever the tables' own limits are.
STILL_PAID = r"""
5 | 5, 5 | 5' | $5'$ | <answer>4</answer> <answer>5</answer>
y=2x+3 | y = 2x+4 = 2x+3
"""
STILL_LOST = r"""
5 | The answer is 5 miles per hour. | So there are 5 apples in total. | 5 dollars
36 | So she pays $36 in total.
-5 | –5 | The answer is –5.
\frac{7}{4} | 1 3/4 | The answer is 1 3/4.
\frac{1}{2} | ½
(3, \frac{\pi}{2}) | (r,\theta) = (3, \frac{\pi}{2})
"""
# Wrong answers near a right one: rounding, order, brackets, signs, bases, sides of an equation.
NEAR = r"""
\frac{1}{3} | 0.333 | 0.33333 | 0.333334 | \frac{1}{3} = 0.4
\frac{1}{30} | 0.0333 | 0.03333
\sqrt{2} | 1.414 | \sqrt{2} = 1.414
0 | 0.0000001 | 10^{-20} | 1e-7
0.0000001 | 0 | 1.1e-7 | 2e-7
10^{-20} | 0
5000 | 5 001 | 50 000 | 5 | 5.000 | 5e4
100000 | 10^4 | 1e6 | 1e-5
50\% | 0.05 | 5 | 51\%
7/4 | 13/4 | 3/4 | 1, 3/4 | -1 3/4
\infty | -\infty | inf inity 5
4210_5 | 4211_5 | 4212_5
-5 | 5 | –6
5 | –5 | 5e1 | 5e-1 | 1,\!5 | 2+2=5 | 2+3=5+1 | 4 and 5 | x=2+3=6 | 5 = x = 4 | 5^\circ = 6^\circ
5 | x=5x | x + x = 5 | x^2=5 | \frac{x}{2}=5 | 5 \in [1,9] | 5 / 4 | 5\;4 | 5 4 | x < 5
78 | A: 87 | A: 78, 79 | Answer: 7 8
3\sqrt{13} | \sqrt{13} | 3\boxed{\sqrt{13}}
1, 2 | 1, 3 | [1,2] | 2x=1, 2 | 1.2 | 12
(1, 2) | (2,1) | [1,2] | (1,2] | 3
[1, 2] | (1,2) | [1,3] | 1, 2
x < 5 | x > 5 | x \le 5 | x = 5 | 5
x = 5 | x=4 | x < 5 | 2x = 5 | x^2=5 | y=6
x + y = 5 | x - y = 5 | x = 5
y = 2x + 3 | 3 | y + 2x = 3 | x = 2y + 3 | 2x+4 | y=2x+4 | y = 2x + 3 = 4
5x - 7y = 4 | 5x - 7y = 5
\begin{pmatrix} 5 \\ 0 \end{pmatrix} | (5, 1) | 5 | \begin{pmatrix}0\\5\end{pmatrix}
\text{A} | B | (B) | B) | The answer is B
\text{no solution} | solution | no | a solution
Evelyn | Navin | n | Evelyne
ate | tea | eat | The answer is tea.
"""


def test_no_other_exploit_pays_and_no_other_right_answer_is_lost(grader):
    """The limits of the two tables would let five more exploits pay, whichever they are."""
    exploits, ordinary = table(EXPLOITS), table(ORDINARY)
    wrong = rejected(grader, exploits)
    paid = {pair for pair in exploits if pair not in wrong}
    assert paid <= set(table(STILL_PAID))
    assert set(rejected(grader, ordinary)) <= set(table(STILL_LOST))


def test_an_answer_that_is_nearly_right_is_wrong(grader):
    pairs = table(NEAR)
    wrong = rejected(grader, pairs)
    assert [pair for pair in pairs if pair not in wrong] == []


def test_a_large_number_as_an_answer_is_written_out(grader):
    gold = gold_answer({"answer": 1e20})
    assert gold == "100000000000000000000"
    assert verdicts(grader, [(gold, "10^{20}"), (gold, "10^{19}")]) == [True, False]


def test_each_answer_is_graded_once(grader, monkeypatch):
    """A hostile answer that is sampled eight times must not cost eight time limits."""
    jobs, schedule = [], grader.schedule

    def counted(function, args, **more):
        jobs.append(args)
        return schedule(function, args, **more)

    monkeypatch.setattr(grader, "schedule", counted)
    pairs = [("5", "5"), ("5", "6"), ("5", "5"), ("6", "5")]
    assert verdicts(grader, pairs) == [True, False, True, False]
    assert jobs == [("5", "5", ""), ("5", "6", ""), ("6", "5", "")]


def test_a_text_without_tags_has_no_reward_for_them():
    for text in ("4", "", "<think>4</answer>"):
        assert grpo_math_humanline.format_reward(text) == grpo_math_humanline.tag_count_reward(text) == 0


# --- copies of the problem, results in plain sentences, exact numbers ---


@pytest.mark.parametrize(
    "wrapped", ["%s", "$%s$", "\\boxed{%s}", "The answer is $%s$.", "<answer>\n%s\n</answer>"]
)
def test_a_part_of_the_problem_is_no_answer(grader, wrapped):
    """An echo was graded as right, because it has the value of the answer."""
    problems = {
        "What is 17 + 25?": ("42", "17 + 25"),
        r"Simplify $\sqrt{242}$.": (r"11\sqrt{2}", r"\sqrt{242}"),
        r"Express $\frac{3}{20}$ as a decimal.": ("0.15", r"\frac{3}{20}"),
        r"Find $\dbinom{31}{28}$.": ("4495", r"\binom{31}{28}"),
        r"Expand $(x - 1)(x+1)$.": ("x^2-1", "(x-1)(x+1)"),
        r"Write $0.75$ as a fraction.": (r"\frac{3}{4}", "0.75"),
    }
    jobs = [(gold, wrapped % echo, problem) for problem, (gold, echo) in problems.items()]
    assert grade_all(grader, jobs) == [False] * len(jobs)
    solutions = [(f"It is \\boxed{{{gold}}}.", echo, problem) for gold, echo, problem in jobs]
    assert grade_all(grader, solutions) == [False] * len(jobs)
    answers = [(gold, wrapped % gold, problem) for problem, (gold, _) in problems.items()]
    assert grade_all(grader, answers) == [True] * len(jobs)


@pytest.mark.parametrize(
    ("problem", "gold", "answer"),
    [
        ("Which is larger, $\\frac{3}{4}$ or $\\frac{2}{3}$?", r"\frac{3}{4}", r"\boxed{\frac{3}{4}}"),
        ("Which is larger, 3/4 or 2/3?", r"\frac{3}{4}", "3/4"),
        ("Is (A) 5, (B) 6 or (C) 7 prime?", r"\text{(C)}", "The answer is C."),
        ("Evelyn runs faster than Briana. Who wins?", r"\text{Evelyn}", "Evelyn"),
        ("Tom has 15 apples and eats 10.", "5", "5"),
        # The gold answer is a whole solution.
        (
            r"Is $\sqrt{2}$ or $2 - 1$ larger?",
            r"As $\sqrt{2} > 1$, it is \boxed{\sqrt{2}}.",
            r"\boxed{\sqrt{2}}",
        ),
        ("Write ten in base 2.", r"As $10_{10} = 8_{10} + 2_{10}$, it is \boxed{1010_2}.", r"\boxed{1010_2}"),
        ("How many dollars are $12.50 and $12.50?", "25", "The answer is $25."),
    ],
)
def test_an_answer_that_the_problem_names_is_right(grader, problem, gold, answer):
    assert grade_all(grader, [(gold, answer, problem)]) == [True]


def test_echoes_of_math_problems_pay_only_where_they_are_the_answer(grader):
    """One of the last three formulas of a problem, boxed, paid for 31 of 500 problems."""
    jobs = []
    for number, row in enumerate(problems("math500_test.jsonl")):
        for formula in re.findall(r"\$\$?(.+?)\$\$?", row["problem"], re.DOTALL)[-3:]:
            jobs.append((number, row["answer"], f"\\boxed{{{formula}}}", row["problem"]))
    verdicts = grade_all(grader, [job[1:] for job in jobs])
    paid = {number for (number, *_), verdict in zip(jobs, verdicts) if verdict}
    assert len(jobs) > 900 and len(paid) <= 2, paid


@pytest.mark.parametrize(
    ("gold", "text", "verdict"),
    [
        ("42", "17 + 25 is 42.", True),
        ("42", "So, 17 + 25 = 42.", True),
        ("56", "We multiply. Hence 8 * 7 equals 56.", True),
        ("42", "The sum is 42.", True),
        ("42", "So, 17 + 25 = 41 or 42.", False),
        ("42", "Maybe 17 + 25 = 42.", False),
        ("42", "So 41 = 42.", False),
        ("5", "So 2x = 5.", False),
        ("42", "17 + 25 is 42. No, 17 + 25 is 43.", False),
    ],
)
def test_the_result_of_a_plain_sentence_counts(grader, gold, text, verdict):
    assert grade_all(grader, [(gold, text, "What is the result?")]) == [verdict]


@pytest.mark.parametrize(
    ("gold", "text", "verdict"),
    [
        ("10^{-20}", "10^{-21}", False),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", False),
        ("0.0000001", "0.0000002", False),
        ("10", "10_2", False),
        ("1010_2", "1010_2", True),
        ("4210_5", "4210", True),
        (r"\frac{1}{3}", "0.333333", True),
        ("0.0000001", r"\frac{1}{10000000}", True),
        ("10^{-20}", r"\frac{1}{10^{20}}", True),
    ],
)
def test_numbers_are_compared_exactly_or_to_their_digits(grader, gold, text, verdict):
    assert grade_all(grader, [(gold, text, "")]) == [verdict]
