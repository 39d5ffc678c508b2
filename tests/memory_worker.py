"""One rank: runs main of the script named by SCRIPT for each argument list, the first ones to load libraries. Prints
the resident memory in GiB before the last one's models, and the peak."""

import ctypes
import importlib
import json
import os
import sys
from pathlib import Path

import utils

if __name__ == "__main__":
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: larger tensors go back to the system when they are freed
    script, before = importlib.import_module(os.environ["SCRIPT"]), []
    open_folder = script.open_folder

    def measured(*how):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        before.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**30)
        return open_folder(*how)

    script.open_folder = measured
    for port, arguments in zip(json.loads(os.environ["PORTS"]), json.loads(sys.argv[1])):
        os.environ["MASTER_PORT"] = str(port)
        script.main(script.parse_args(arguments))
    print(json.dumps({"before": before[-1], "peak": utils.peak_memory(utils.torch.device("cpu"))}))
