"""Grading: other spellings of an answer are right, what only looks equal is wrong, nothing ends a run."""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

import utils
from support import grading
from support.grading import grade, start_grader

# In each line a gold answer and completions.
RIGHT = r"""
90 | 90° | $90°$ | \boxed{90°} | 90 ° | The answer is 90°.
90^\circ | 90°
18 | €18 | $18 | £18 | 18 € | \boxed{€18} | \boxed{\$18} | The answer is €18. | #### $18
x^2 + 3x | x² + 3x | $x²+3x$ | \boxed{x²+3x}
x^{10} | x¹⁰
2^{-1} | 2⁻¹
42 | ４２ | $４２$ | \boxed{４２}
1,024 | １，０２４
2\sqrt{3} | 2√3
3 | \approx 3 | $\approx 3$ | ≈ 3 | \boxed{\approx 3} | x \approx 3 | The answer is \approx 3.
\sqrt{2} | \sqrt{2} \approx 1.414 | \approx 1.414214
3 | \phantom{4}3 | \boxed{\phantom{0}3}
5 | - \boxed{5} | $17 - \boxed{5}$ | \boxed{5\mbox{ cm}^2}
-5 | \boxed{-5} | $\boxed{-5}$
1, 2, \ldots | \boxed{1, 2, \ldots}
5 | \boxed{5~\text{cm}} | \boxed{5 \text{ cm}^2} | \boxed{f(3) = 5}
45^\circ | \boxed{45\degree}
50\% | \boxed{50\,\%}
(3,4) | \boxed{\bigl(3,4\bigr)}
(0,\infty) | \boxed{(0,∞)}
3i | \boxed{3\mathrm{i}} | \boxed{3\,i}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \boxed{M = \begin{pmatrix} 1 \\ 2 \end{pmatrix}}
2n+1 | \boxed{N = 2n+1}
1,234 | \boxed{N = 1,234} | \boxed{N = 1234}
60 | \boxed{\angle ABC = 60} | \boxed{\angle ABC = 60^\circ}
5 | \boxed{\text{5 ways}} | \boxed{\text{5}}
(1,234) | \boxed{(1,234)}
\begin{pmatrix} 1 & \phantom -2 \end{pmatrix} | \boxed{\begin{pmatrix} 1 & 2 \end{pmatrix}}
\frac{1}{3} | 0.\overline{3} | 0.\bar{3} | .\overline{3} | $0.\overline3$ | \boxed{0.3\overline{3}}
\frac{1}{6} | 0.1\overline{6}
\frac{41}{333} | 0.\overline{123}
0.\overline{3} | \frac{1}{3} | 1/3 | 0.\overline{33} | 0.\overline{3}
x | x | $x$
AB | AB
\text{Evelyn} | evelyn | EVELYN
3 | La réponse est $3$. | Die Antwort ist \boxed{3}. | 答案是 \boxed{3}。
"""
WRONG = r"""
3 | \phantom{3} | \boxed{\phantom{3}} | $\phantom{3}$ | \boxed{4\phantom{3}} | \hphantom{3} | \phantom 3
3 | \cancel{3} | \approx 4 | x \approx 4 | ３.５ | 3² | 0.\overline{3}
x | X | $X$ | \boxed{X}
2xy | 2XY | 2Xy | 2xY
x+1 | X+1
y = 2x | Y = 2X | y = 2X
x² + 1 | X² + 1
\frac{11}{2} | 1½
\frac{12}{2} | ½
90 | 9° | 90°+1
18 | €19 | €1.8 | 1€8
\frac{1}{3} | 0.\overline{4} | 0.3 | 0.\overline{34}
\frac{1}{6} | 0.\overline{16}
0.\overline{3} | 0.3 | 0.33
\sqrt{2} | \approx 1.414
\pi | \approx 3.14
5 | $-\boxed{5}$ | x = -\boxed{5} | -\boxed{5}
5 | \boxed{5 \mbox{ or 4}} | \boxed{5 \textbf{ or 4}} | \boxed{5 \text{ OR 4}}
10 | \boxed{10 _2} | \boxed{10_{(2)}}
1.41 | \boxed{1.41\ldots}
\theta | \boxed{\Theta}
2\pi | \boxed{2\Pi}
3 | \boxed{3\mathrm{i}}
0 | The answer is not 0. | \boxed{not 0} | \boxed{\text{not } 0}
5 | \boxed{\text{5 or 6}} | \boxed{\text{5, 6}} | \boxed{\text{6 ways}}
42 | \boxed{42 \text{ and 43}} | \boxed{42\text{, 43}}
\frac{1}{2} | \boxed{5\frac{1}{2}~\text{cm}} | \boxed{\log_e \frac{1}{2}}
\frac{1}{2} | \boxed{\frac{1}{2}\text{ is wrong, 7}}
5 | So $x=5$. Then the total is $12~\text{cm}$.
"""


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def grader():
    pool = start_grader()
    yield pool
    pool.stop()
    pool.join()


@pytest.mark.parametrize("asked", [r".3\overline{25}", r"0.3\overline{25}", r"x = .3\overline{25}"])
def test_a_decimal_of_the_problem_is_a_copy_with_or_without_its_leading_zero(asked, grader):
    problem = f"What common fraction is equivalent to ${asked}$?"
    answers = (r".3\overline{25}", r"\boxed{0.3\overline{25}}", r"\frac{161}{495}")
    copies = [(r"\frac{161}{495}", answer, problem) for answer in answers]
    assert grading.grade_all(grader, grade, copies) == [False, False, True]


PROBLEM = "What is $17 + 25$? Tom has 5 apples, $x + 3 = 8$, and 50% of \\$12 + \\$5."
COPIES = {
    ("5", r"\boxed{x = 5}"): True,
    ("5", "$n=5$"): True,
    ("x = 5", r"\boxed{5}"): True,
    ("42", r"\boxed{17 + 25 = 42}"): True,
    ("42", r"\boxed{17 + 25\text{ apples}}"): False,
    ("42", r"\boxed{((17 + 25))}"): False,
    ("42", r"\boxed{((42))}"): True,
    ("42", r"\boxed{\$17 + \$25}"): False,
    ("17", r"\boxed{\$12 + \$5}"): False,
    ("0.5", r"\boxed{50\%}"): False,
}


def test_an_echo_with_a_unit_is_a_copy_and_the_gold_answer_with_a_name_is_none(grader):
    verdicts = grading.grade_all(grader, grade, [(*pair, PROBLEM) for pair in COPIES])
    assert dict(zip(COPIES, verdicts)) == COPIES


def jobs(text: str) -> list[tuple]:
    """(gold, completion, no problem) of RIGHT or WRONG."""
    found = []
    for line in text.strip().split("\n"):
        gold, *completions = line.split(" | ")
        found += [(gold, completion, "") for completion in completions]
    return found


def verdicts(grader, found: list[tuple]) -> dict:
    return dict(zip(found, grading.grade_all(grader, grade, found)))


def test_other_spellings_of_a_right_answer_are_right(grader):
    lost = [job[:2] for job, verdict in verdicts(grader, jobs(RIGHT)).items() if not verdict]
    assert lost == []


def test_what_only_looks_like_a_right_answer_is_wrong(grader):
    paid = [job[:2] for job, verdict in verdicts(grader, jobs(WRONG)).items() if verdict is not False]
    assert paid == []


@pytest.mark.parametrize(
    ("problem", "gold", "echo"),
    [
        (r"Express $0.\overline{3}$ as a common fraction.", r"\frac{1}{3}", r"0.\overline{3}"),
        (r"Write $0.1\overline{6}$ as a fraction.", r"\frac{1}{6}", r"\boxed{0.1\overline{6}}"),
        (r"Simplify $\frac{10}{4}$.", r"\frac{5}{2}", r"\frac{10}{4}"),
        (r"Find $\binom{5}{2}$.", "10", r"\binom{5}{2}"),
        (r"Write $0.5$ as a fraction.", r"\frac{1}{2}", "0.5"),
        ("What is 2² + 1?", "5", "2² + 1"),
    ],
)
def test_a_number_of_the_problem_in_its_other_form_is_no_answer(grader, problem, gold, echo):
    found = [(gold, echo, problem), (gold, gold, problem)]
    assert list(verdicts(grader, found).values()) == [False, True]


# --- what grading raises ---

MANY = "3" * 4301  # digits, more than Python turns into an integer


@pytest.mark.parametrize("text", [f"The answer is 1/{MANY}", f"\\boxed{{\\frac{{1}}{{{MANY}}}}}", MANY])
def test_an_answer_of_many_digits_is_not_right_and_ends_nothing(grader, text):
    """A sample ended the run, and a resumed run drew the same sample again."""
    found = verdicts(grader, [("5", text, "What is 1/3?"), ("5", "5", "")])
    assert [bool(verdict) for verdict in found.values()] == [False, True]


def too_deep(gold, text, problem):
    return too_deep(gold, text, problem)


def too_large(gold, text, problem):
    return bytearray(2**40)


def mistaken(gold, text, problem):
    return {"right": True}[text]


def exits(gold, text, problem):
    os._exit(3)


def not_picklable(gold, text, problem):
    return lambda: True


@pytest.mark.parametrize("function", [too_deep, too_large, mistaken, exits, not_picklable])
def test_whatever_a_grader_raises_is_no_verdict_and_is_said_once(grader, capfd, function):
    grading.print_once.cache_clear()
    found = [("5", text, "") for text in ("4", "5")]
    for _ in range(2):
        assert grading.grade_all(grader, function, found) == [None, None]
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("an answer that could")]
    assert len(lines) == len(set(lines)) <= 2
    assert grading.grade_all(grader, grade, [("5", "5", "")]) == [True]


def test_a_grader_that_cannot_be_sent_to_a_worker_gives_no_verdict(grader):
    assert grading.grade_all(grader, lambda gold, text, problem: True, [("5", "5", "")]) == [None]


def test_workers_that_died_without_an_answer_are_replaced_or_told_in_one_line():
    """It was a RuntimeError, "Unexpected error within the Pool", where pebble does not replace the worker."""
    pool = start_grader()
    os.kill(pool.schedule(os.getpid).result(), signal.SIGKILL)  # as the system does if memory runs out
    for _ in range(20):
        try:
            assert grading.grade_all(pool, grade, [("5", "5", "")]) == [True]
        except utils.InputError as error:
            assert re.match("the workers of the grader have ended; .* --resume", str(error))
    pool.stop()
    pool.join()


def test_a_temporary_folder_with_a_long_name_is_named(tmp_path):
    """It was a BrokenProcessPool behind "AF_UNIX path too long"."""
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    code = "from support import grading, run\nwith run.exit_on_input_error():\n    grading.start_grader()"
    environment = os.environ | {"TMPDIR": str(folder)}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"error: TMPDIR {folder}: ") and "path too long" in ended.stderr
