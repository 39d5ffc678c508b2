"""One rank: runs main of the script named by SCRIPT for each argument list, the first ones to load libraries.
Prints the resident memory in GiB before the last one's models, and the peak."""

import ctypes
import importlib
import json
import os
import sys
from pathlib import Path

from conftest import parse_args

import run

if __name__ == "__main__":
    # M_MMAP_THRESHOLD: larger tensors go back to the system when they are freed.
    ctypes.CDLL(None).mallopt(-3, 2**16)
    script = importlib.import_module(os.environ["SCRIPT"])
    before = []
    open_folder = script.open_folder

    def measured(*arguments):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        before.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**30)
        return open_folder(*arguments)

    script.open_folder = measured
    for port, arguments in zip(json.loads(os.environ["PORTS"]), json.loads(sys.argv[1])):
        os.environ["MASTER_PORT"] = str(port)
        script.main(parse_args(script, arguments))
    print(json.dumps({"before": before[-1], "peak": run.peak_memory(run.torch.device("cpu"))}))
