"""What a rank does first: it takes an environment, an output file and arguments, then runs a worker."""

import atexit
import multiprocessing.forkserver
import os
import runpy
import sys


def start_worker(worker: str, arguments: str, environment: dict, output: str, server: dict) -> None:
    if server:  # of its own, a rank would start one anew, which takes longer than a short run
        vars(multiprocessing.forkserver._forkserver).update(server, ensure_running=lambda: None)
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(file, standard)
    sys.argv = [worker, arguments]
    try:
        runpy.run_path(worker, run_name="__main__")
    finally:
        # A fork leaves without them, and waits for ever for what they would have ended.
        atexit._run_exitfuncs()
