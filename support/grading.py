"""Grading the answers of mathematics: whether the answer in a text equals the gold answer.

As in Open-R1, math_verify compares answers. It gets one expression, the one that `extract_answer` finds, as
a box. Only if a text (or its box) has formulas and no "the answer is", math_verify chooses the last formula.
Left alone, it would look for a part of a text that it can parse, and read "4 or maybe 5" as 5. A policy
would learn to exploit this.

To grade other answers, replace GRADE in grpo_math_humanline.py.
"""

import logging
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import unicodedata
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from multiprocessing import forkserver

import torch.distributed as dist

from support import run

# === Workers ===
# Processes with limits of time and memory, in which `grade` runs.

TIME_LIMIT = 5.0  # CPU seconds for grading one answer
print_once = lru_cache(partial(print, flush=True))  # a second call with the same text prints nothing


def start_grader():
    """Starts worker processes for grading.

    Some answers, for example 9^{9^{9^9}}, let sympy compute forever, use up the memory or crash. Then only
    the worker ends, and a new one replaces it.
    """
    from pebble import ProcessPool

    # A fork could inherit locks that threads of CUDA and gloo hold.
    context = multiprocessing.get_context("forkserver")
    # Every worker imports the main script, and with it these modules, which takes seconds. The fork server
    # imports them once, and workers inherit them. (transformers imports lazily, so the module of
    # AutoModelForCausalLM is named.)
    context.set_forkserver_preload(["torch", "transformers.models.auto.modeling_auto", "math_verify"])
    # The fork server opens a socket in TMPDIR, whose path must be shorter than about 80 characters.
    with run.library_errors(f"TMPDIR {tempfile.gettempdir()}: the workers of the grader cannot start"):
        forkserver.ensure_running()
    cores = os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    workers = max(1, min(cores, 8))
    # A worker is replaced after 1000 answers, because the parser's caches grow.
    return ProcessPool(workers, max_tasks=1000, initializer=start_worker, context=context)


def start_worker():
    """Sets the memory limit of a worker."""
    logging.disable(logging.WARNING)  # math_verify warns that its own time limit is off
    resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))  # 4 GiB, of which the imports take an eighth


def grade_all(grader, function, jobs: list[tuple]) -> list:
    """Returns the verdict of a function for every (gold answer, text, problem). The ranks share the work.

    The verdict is also None if the function raised an exception, or if its worker reached a limit or crashed.
    A text of the policy must never end the run: a resumed run would sample the same text again.

    function: `grade` or another one with its arguments.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    distinct = list(dict.fromkeys(jobs))
    verdicts = []
    # A worker that dies while it grades fails this answer alone. But pebble's whole pool is broken if a
    # worker cannot start, for example for lack of memory, or dies while no worker grades.
    with run.library_errors("the workers of the grader have ended; to start them again, pass --resume"):
        # Seconds of wall-clock time, far above TIME_LIMIT. They end a worker that waits for something: it
        # uses no CPU time, so TIME_LIMIT would never end it.
        futures = [grader.schedule(function, job, timeout=20 * TIME_LIMIT) for job in distinct[rank::world]]
        for future in futures:
            try:
                verdicts.append(future.result())
            except BrokenProcessPool:
                raise
            except Exception as error:
                verdicts.append(None)
                cause = f"{type(error).__name__}{error.args[:1]}"
                print_once(f"an answer could not be graded: {cause:.200}")
    ranks_verdicts = run.gather(verdicts)
    # Rank r has graded the jobs r, r + world, r + 2 · world and so on.
    by_job = {job: ranks_verdicts[i % world][i // world] for i, job in enumerate(distinct)}
    return [by_job[job] for job in jobs]


# Words and commands of LaTeX, which are no variables. Greek letters are variables.
GREEK = r"(?i:gamma|delta|theta|lambda|xi|pi|sigma|upsilon|phi|psi|omega)(?![A-Za-z])"
WORDS = rf"\\(?:text|mathrm|mbox|begin|end)\{{[^{{}}]*\}}|\\(?!{GREEK})[A-Za-z]+"
NAME = r"^\s*\\?[A-Za-z]+(?:_\w+|\([^()]*\))?\s*="  # M = or f(2) =
BASE = r"\d *_[ {(]*(\w+)"  # of a number, as in 10_2
OPEN = r"\\phantom|\\[lcd]?dots|\.\.\.|\bnot\b"  # what an answer does not print, leaves open or denies
SIGN_BEFORE_BOX = r"(?:^|[=$])\s*-\\boxed\{[^{}]*\}[^{}]*$"


def grade(gold: str, text: str, problem: str) -> bool | None:
    """Returns whether the answer in a text equals the gold answer; None if the gold answer has no value.

    Runs in a worker.
    """
    from math_verify import verify
    from sympy import And, Eq

    # After TIME_LIMIT seconds of CPU time, the signal SIGPROF ends this worker. It has no handler, because
    # Python would run one only after the current operation, which may be an endless multiplication. CPU time
    # makes the verdict independent of the machine's load. The next call sets the timer again.
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
    gold_value, value = parse_answer(gold), parse_answer(text)
    gold_formula, formula = answer_formula(gold), answer_formula(text)
    if gold_value is None:
        return None
    # An answer that stands in the problem is refused as a copy, unless it is the gold answer's text, or sympy
    # parses both to the same expression (==). If the gold answer is 90, 90^\circ is right. If it is 42,
    # 17 + 25 is refused, and so is 0.75 if it is \frac{3}{4}. 10/4 == \frac{5}{2} holds only because sympy
    # has reduced it, which the digits show: those of the value (5, 2) are not those of the formula (10, 4).
    digits, value_digits = [re.findall(r"\d+", text) for text in (formula.replace(",", ""), str(value))]
    has_computed = sorted(digits) != sorted(value_digits)  # sympy sorts sets
    if (value != gold_value or has_computed) and is_copied(gold_formula, formula, problem):
        return False
    # math_verify ignores case, but X is another variable than x: no letter of the answer may stand in the
    # gold answer in its other case alone. Words may, and so may the answer's name, unless the gold answer has
    # one.
    ignored = WORDS if "=" in gold_formula else f"{NAME}|{WORDS}"
    gold_letters, letters = [re.sub(ignored, "", latex) for latex in (gold_formula, formula)]
    if any(letter not in gold_letters and letter.swapcase() in gold_letters for letter in letters):
        return False
    # It also ignores bases, although 10_2 is not 10, the dots of 1.41\ldots, \phantom, of which `rewrite`
    # leaves nested braces, and the sign of -\boxed{5}.
    bases = re.findall(BASE, formula)
    if bases and bases != re.findall(BASE, gold_formula):
        return False
    if {*re.findall(OPEN, formula)} - {*re.findall(OPEN, gold_formula)} or re.search(SIGN_BEFORE_BOX, text):
        return False
    # Of an equation, math_verify would compare one side alone. Here every side must equal the gold answer,
    # unless the gold answer is an equation itself. Names such as x and f(2) are skipped. So x = 4 is 4. And x
    # = 4 = 5, for sympy (x = 4) and (4 = 5), is neither 4 nor 5.
    values = [value]
    if isinstance(value, And | Eq) and not isinstance(gold_value, Eq):
        sides = [side for equation in value.atoms(Eq) for side in equation.args]
        sides = [side for side in sides if not (side.is_Symbol or side.is_Function)]
        values = sides or [value]  # x = y has only names, and 0 ≤ x < 1 no equation
    options = dict(allow_set_relation_comp=True, timeout_seconds=None)  # 0 ≤ x < 1 equals [0, 1)
    return all(verify(gold_value, each, **options) and is_same_number(gold_value, each) for each in values)


# === Answers ===
# The answer in a text.

# Words before an answer without a box: "The answer is 5", "Answer: 5", "A: 5" and "#### 5". "answer" may be
# followed by up to 30 characters of the same sentence, then by " is", " are", a colon or a line break: "The
# answer (in cm) is 5".
ANSWER_IS = r"(?i:answer)[^.\n]{0,30}?(?: is| are|[:\n])|\bA:|####"
# A number, maybe in dollars (`rewrite` has made "$$" of "$") or with a unit.
NUMBER = r"(-?\$*\d[\d.,/]*)(?: [a-z]+)?"
# Words with which a sentence takes back its result.
TAKES_BACK = r"(?i)\b(?:or|not|if|maybe|perhaps|either|neither|between|than|could|guess|wrong|incorrect)\b"


def extract_answer(text: str) -> str:
    """Returns the LaTeX of the answer in a text, in a box or, of a text with formulas, between "$$".

    If there is an <answer> tag, only the text in the last one counts. The answer is the first that exists of
        1. the content of the last box,
        2. the sentence after the last "answer is" (ANSWER_IS; also inside a box),
        3. the last formula, which math_verify finds by itself,
        4. the result that the last sentence states (`stated_result`), or else the complete text.
    2, 3 and 4 also apply to the content of a box.
    """
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    before, box, after = text.rpartition("\\boxed")
    # Neighboring boxes are one answer: \boxed{4} or \boxed{5} -> 4,5. extract_boxed_content would also join
    # boxes up to 70 characters apart. Therefore everything before the last box is removed, unless a box may
    # end right before it, as in "\boxed{4}$, and $\boxed{5}".
    may_follow_box = "}" in before[-9:]  # "}$, and $" has 9 characters
    if not may_follow_box:  # also if there is no box: then `after` is the whole text
        text = box + after
    text = extract_boxed_content(text, "last")  # returns the text if it has no box
    *introductions, text = re.split(ANSWER_IS, text)
    is_introduced = bool(introductions)
    if is_introduced:
        text = re.split(r"\.\s|\n\n", text.strip())[0]
    text = text.strip(" \n:*").rstrip(".*")  # ": **5.**" -> "5"
    text = rewrite(text)
    # math_verify parses all of a box, but only the last formula ("$$" twice) of another text.
    if is_introduced:
        return f"\\boxed{{{text}}}"
    if text.count("$$") < 2:  # no formula; also the content of a box
        return f"\\boxed{{{stated_result(text)}}}"
    return text


# Parts of an answer that math_verify would misread, and what replaces them, in this order.
REWRITES = {
    # \(x = 5.\) -> $$x = 5$$. Each mark of a formula, \( \) \[ \] $ or $$, becomes $$, and a full stop before
    # it is removed. After a backslash it is no such mark: \$ is a currency, \\[ breaks a line of a matrix.
    r"(?:\.\s*|(?<!\\))(?:\\[()\[\]]|\$\$?)": "$$",
    # 90° -> 90^\circ, €18 -> 18 and √3 -> \sqrt{3}.
    r"°|\\degree(?![A-Za-z])": r"^\\circ ",
    "∞": r"\\infty ",
    "∪": r"\\cup ",
    # A space that does not break, and parentheses of another size, print nothing. So does a space before %.
    r"(?<!\\)~": r"\\ ",
    r"\\[bB]igg?[lrm]?(?![A-Za-z])": "",
    r"\\,(?=\\%)": "",
    # 3\mathrm{i} and 3\,i -> 3i.
    r"\\(?:mathrm|text)\{([ei])\}": r"\1",
    r"(?<=\d)(?:\\,| )(?=i(?![A-Za-z]))": "",
    r"[€£¥](?!\d)|(?<!\d)[€£¥]": "",
    r"√ ?(\d+|[a-z])": r"\\sqrt{\1}",
    # \approx 3 -> 3, at the start of an answer or of a formula.
    r"(?:^|(?<=\$\$)) *(?:\\approx|≈)": "",
    # 0.1\overline{6} -> 0.166666666. Eight times the period are more digits than `is_same_number` compares.
    r"(?<=\.)(\d*)\\(?:overline|bar) ?\{?(\d+)\}?": r"\1" + r"\2" * 8,
    # \phantom{3} and \phantom - print nothing.
    r"\\phantom *(?:\{[^{}]*\}|[^{])": "",
    # 24{,}000 -> 24000, and the same for 24\,000 and 24 000.
    r"(?<=\d)(?:,\\!|\\[,; ]|\{,\}| )(?=\d{3}(?!\d))": "",
    # N = 1,234 -> N = 1234. Otherwise it would be a name with its value, and another number.
    r"(= *-?\d{1,3}),(\d{3})$": r"\1\2",
    # \angle ABC = 60 -> ABC = 60.
    r"\\angle *(?=[A-Z]+ *=)": "",
    # \text{5 ways} -> 5 ways.
    r"^\\text\{(\d[^{}]*)\}$": r"\1",
    # \frac\pi 4 -> \frac{\pi} 4.
    r"(?<=frac)\\(?!sqrt)[a-z]+": r"{\g<0>}",
    # AB = 5 -> \text{AB} = 5. Otherwise it would be an equation for A and B.
    r"(?<![\\A-Za-z])[A-Za-z]{2,}(?= ?=)": r"\\text{\g<0>}",
    # no solution -> \text{no solution}. Otherwise the words would be products of letters.
    r"^[A-Za-z ]{3,}$": r"\\text{\g<0>}",
    # 5 \text{ or 4} -> 5 { or 4}. math_verify drops text after a number as its unit. Text with "or", "is" or
    # "not" before another word is no unit, and must stay. This undoes the rule above: "a or b" is the set of
    # a and b.
    r"\\(?:text[a-z]*|mbox)(?=\{[^{}]*\b(?i:or|is|isn't|not)\b[^{}]*\w)": "",
    # 5 \text{ and 4} -> 5,{ and 4}. A text with a digit is no unit either, but another answer.
    r"(?<=[\w)}\]]) *\\(?:text[a-z]*|mbox)(?=\{[^{}]*\d)": ",",
}


def rewrite(text: str) -> str:
    """Makes other forms of characters plain (４ -> 4, x² -> x^{2}), and applies all REWRITES to a text."""
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+", r"^{\g<0>}", text)
    text = unicodedata.normalize("NFKC", text)
    for pattern, replacement in REWRITES.items():
        text = re.sub(pattern, replacement, text)
    return text


def stated_result(text: str) -> str:
    """Returns what the last sentence of a plain text states, if it states the result of a computation.

    "17 + 25 is 42." and "So, 17 + 25 = 42." give "17 + 25 = 42", in which both sides will be compared with
    the gold answer. "The sum is 42." gives "42". All other texts are returned unchanged.
    """
    sentence = re.split(r"(?<=[.!?])\s|\n", text.strip())[-1].strip(" .*!")
    computation, *results = re.split(r"=|\b(?:is|are|equals)\b", sentence)
    result = re.fullmatch(NUMBER, results[0].strip()) if len(results) == 1 else None
    if not result or re.search(TAKES_BACK, sentence):
        return text
    # "So, 17 + 25 " -> "17 + 25 ": without everything up to the last word
    numbers = re.sub(r"^.*[A-Za-z]{2}[,:]?(?: |$)", "", computation)
    if re.search(r"[A-Za-z]", numbers):  # an equation for an unknown number
        return text
    return f"{numbers} = {result[1]}" if numbers.strip() else result[1]


@lru_cache  # the samples of a problem have the same gold answer
def parse_answer(text: str):
    """Returns the value of the answer in a text, or None if it has none.

    The value is an object of sympy, or a string if math_verify cannot parse the answer.
    """
    from math_verify import LatexExtractionConfig, parse

    # [value, LaTeX]; [LaTeX] if it cannot be parsed; [] if there is none. `grade` has set the time limit. If
    # the answer cannot be parsed, a part of it, such as a fraction, or an earlier formula must not take its
    # place.
    answer = extract_answer(text)
    found = parse(answer, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)
    if not found:
        return None
    # math_verify accepts [5] and \{5\} as 5, so lists and sets of one number get no value here. A bracket
    # before \begin is that of a matrix.
    opening = r"\[(?! *\\begin)|\\\{"  # [ or \{
    if re.match(rf"(?:{opening})[^,]*$", str(found[-1])):
        return None
    return found[0]


# === Copies and numbers ===
# What `grade` checks besides math_verify's verdict.

# What two spellings of a formula may differ in: units, currencies, white space, braces, the size of fractions
# and parentheses.
UNITS = r"\\text\{[^{}]*\}(?:\^\{?\d\}?)?|\\?[$%]"
SPELLING = rf"{UNITS}|\\q?quad|\s|[{{}}]|\\left|\\right|\\displaystyle|\\[!,; ]|(?<=\\)[dt](?=frac|binom)"


def answer_formula(text: str) -> str:
    """Returns the LaTeX of the answer in a text: the content of the box, or the last formula."""
    latex = extract_answer(text)
    return latex.split("$$")[-2] if latex.count("$$") > 1 else latex[len("\\boxed{") : -1]


def is_copied(gold: str, answer: str, problem: str) -> bool:
    """Returns whether an answer stands in the problem, but is not the gold answer's text. All are LaTeX."""
    formulas = []
    for formula in (gold, answer, rewrite(problem)):
        formula = re.sub(SPELLING, "", formula)
        formula = re.sub(r"(?<!\d)\.(?=\d)", "0.", formula)  # .5 -> 0.5
        formulas.append(re.sub(r"\\times|\\cdot", "*", formula).strip(".+"))
    gold, answer, problem = formulas
    # In 17 + 25 = 42 only one side is copied. In x = 17 + 25 the only side with a digit or a command is.
    sides = [side.strip(".+") for side in answer.split("=") if re.search(r"\d|\\", side)]
    sides = [re.sub(r"^\(+(.*?)\)+$", r"\1", side) for side in sides]  # (17 + 25) -> 17 + 25
    # A side does not count if it is only a part of a longer number.
    copied = [re.search(rf"(?<![\d.]){re.escape(side)}(?!\.?\d)", problem) is not None for side in sides]
    is_gold = bool({answer, *sides} & {gold, *gold.split("=")})  # 5, x = 5
    return not is_gold and bool(sides) and all(copied)


def is_same_number(gold_value, value) -> bool:
    """Returns whether two numbers that math_verify found equal really are: math_verify rounds to 6 decimals.

    Rational numbers must be equal exactly, and others to 5 digits. The same holds for the numbers in tuples,
    sets and intervals. Returns True for everything else.
    """
    from sympy import Expr, FiniteSet, Float, Interval, Tuple

    if isinstance(gold_value, Tuple | FiniteSet | Interval) and type(gold_value) is type(value):
        parts = [gold_value.args, value.args]
        if isinstance(value, FiniteSet):  # sympy sorts 1.41 and √2 differently
            parts = [sorted(args, key=lambda number: str(number.evalf(4))) for args in parts]
        return all(is_same_number(*pair) for pair in zip(*parts))
    numbers = (gold_value, value)
    if not all(isinstance(number, Expr) and number.is_number and number.is_real for number in numbers):
        return True
    if not gold_value.has(Float) and not value.has(Float):
        gold_value, value = gold_value.doit(), value.doit()
        if gold_value.is_Rational and value.is_Rational:
            return gold_value == value
    return abs(gold_value.evalf() - value.evalf()) <= 1e-5 * abs(gold_value.evalf())
