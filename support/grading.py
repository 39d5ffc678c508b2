"""Grading the answers of mathematics: whether the answer in a text equals the gold answer.

As in Open-R1 and TRL, math_verify compares the answers. To grade other answers, replace GRADE in
grpo_math_humanline.py.
"""

import logging
import multiprocessing
import os
import re
import resource
import signal
import traceback
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker

import torch.distributed as dist

from support import run
from utils import InputError

TIME_LIMIT = 5.0  # CPU seconds for grading one answer


def start_grader():
    """Starts worker processes for grading.

    Some answers, for example 9^{9^{9^9}}, let sympy compute forever, use up the memory or crash. Then only
    the worker ends, and a new one replaces it.
    """
    from pebble import CONSTS, ProcessPool

    # Workers survive the SIGTERM with which pebble stops them. So SIGKILL follows at once, and not after the
    # usual three seconds for each worker.
    CONSTS.term_timeout = 0
    # A fork could inherit locks that threads of CUDA and gloo hold.
    context = multiprocessing.get_context("forkserver")
    # Every worker imports the main script, and with it these modules, which takes seconds. The fork server
    # imports them once, and workers inherit them. (transformers imports lazily, so the module of
    # AutoModelForCausalLM is named.)
    context.set_forkserver_preload(["torch", "transformers.models.auto.modeling_auto", "math_verify"])
    # No worker may end by a signal before `start_worker` sets its handlers. So the server starts while these
    # signals are blocked, and its workers inherit the mask. The resource tracker starts first, because its
    # start unblocks them.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, run.SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, run.SIGNALS)
    workers = min(8, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))) or 1
    # A worker is replaced after 1000 answers, because the parser's caches grow.
    return ProcessPool(workers, max_tasks=1000, initializer=start_worker, context=context)


def start_worker():
    """Lets a worker survive the signals that a run handles, and sets its memory limit."""
    for number in run.SIGNALS:
        # The signal is not ignored, because programs that a grader starts would ignore it too, and then the
        # command `timeout` could not end them. They do not inherit a handler.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, run.SIGNALS)
    logging.disable(logging.WARNING)  # math_verify warns that its own time limit is off
    resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))  # 4 GiB, of which the imports take an eighth


def run_job(function, job: tuple, limit: float):
    """Runs a grading function in a worker. Returns its verdict (a float or None), or a traceback as a text.

    Exceptions themselves are not returned: SystemExit would end the run as if it were complete, and an object
    that cannot be unpickled would break the pool.
    """
    # After `limit` seconds of CPU time, the signal SIGPROF ends this worker. It has no handler, because
    # Python would run one only after the current operation, which may be an endless multiplication. CPU time
    # makes the verdict independent of the machine's load.
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        verdict = function(*job)
        return None if verdict is None else float(verdict)
    except BaseException:  # also exit()
        return traceback.format_exc(limit=-3)[-2000:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def grade_all(grader, function, jobs: list[tuple], dataset: str = "") -> list:
    """Returns the verdict of a function for every (gold answer, text, problem). The ranks share the work.

    A verdict is a float. It is None if the function returned None or raised an exception, or if its worker
    reached a limit or crashed. A text of the policy must never end the run, because a resumed run would
    sample the same text again.

    Args:
        function: `grade` or another one with its arguments.
        dataset: the data set whose gold answers are tried before training. Then a failure raises InputError.
            Otherwise a grader that fails now and then would drop different problems at every start.
    """
    distinct = list(dict.fromkeys(jobs))
    futures = [
        # The timeout is wall-clock time, far above TIME_LIMIT. It ends a worker that waits for something.
        grader.schedule(run_job, (function, job, TIME_LIMIT), timeout=20 * TIME_LIMIT)
        for job in run.share(distinct, dist.get_rank(), dist.get_world_size())
    ]
    results = []
    for future in futures:
        try:
            results.append(future.result())
        except BrokenProcessPool:  # the pool has no workers any more, for example for lack of memory
            raise
        except Exception as error:
            results.append(f"its worker reached a limit or crashed: {error!r}")
    verdicts = dict(zip(distinct, sum(run.gather(results), [])))
    failed = [job for job, verdict in verdicts.items() if isinstance(verdict, str)]
    if failed:
        if dataset:
            raise InputError(
                f"{dataset}: the grader failed on (gold answer, text, problem) {failed[0]}. It may return "
                f"None to drop a problem. {verdicts[failed[0]]}"
            )
        run.print_main(f"{len(failed)} answers could not be graded; the first: {verdicts[failed[0]]}")
    verdicts |= dict.fromkeys(failed)
    return [verdicts[job] for job in jobs]


def grade(gold: str, text: str, problem: str) -> bool | None:
    """Returns whether the answer in a text equals the gold answer; None if the gold answer has no value.

    `problem` is for functions of your own, and is not read here.
    """
    from math_verify import verify

    gold_value = parse_answer(gold)
    if gold_value is None:
        return None
    value = parse_answer(text)  # None, if there is no answer, is never equal
    answer = getattr(value, "rhs", value)  # 17 + 25 = 42 counts by its right side
    if answer != gold_value and is_echo(answer):
        return False
    return verify(gold_value, value, timeout_seconds=None)


def is_echo(value) -> bool:
    """Returns whether a value is a rational number that is not worked out, such as 17 + 25.

    It only repeats the problem. An irrational number may have any form, because it is never worked out.
    """
    return getattr(value, "is_number", False) and not value.is_Number and value.doit().is_Number


def parse_answer(text: str):
    """Returns the value of the answer in a text as an object of sympy, or None if it has none.

    If there is an <answer> tag, only the text in the last one counts. If this text has no box, all of it is
    put into one. This lets math_verify find a plain number. A formula within a sentence must have a box.
    """
    from math_verify import LatexExtractionConfig, parse

    text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    if "\\boxed" not in text:
        text = text.lstrip(" \n*$").rstrip(" \n*$.")  # **5**. -> 5
        text = f"\\boxed{{{text}}}"
    text = re.sub(r"(\d)e([+-]?\d+)", r"\1 \\cdot 10^{\2}", text)  # 5e-05, as Python writes a number
    config = LatexExtractionConfig(boxed_match_priority=0)
    found = parse(text, [config], extraction_mode="first_match", parsing_timeout=None)  # [value, LaTeX]
    return found[0] if found else None
