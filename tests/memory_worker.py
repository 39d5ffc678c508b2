"""Runs main of the script SCRIPT for each argument list, on one rank. Only the last run is measured.

Prints the resident memory before the models of the last run are loaded, and the peak, in GiB.
"""

import ctypes
import importlib
import json
import os
import re
from pathlib import Path

import torch
import worker

import utils


def resident(name: str) -> float:
    """Returns VmRSS (the memory now) or VmHWM (the peak), in GiB."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 2**20


if __name__ == "__main__":
    # M_MMAP_THRESHOLD: the memory of larger tensors goes back to the system when they are freed.
    ctypes.CDLL(None).mallopt(-3, 2**16)
    # A page counts when it is written, but on a GPU when it is allocated. So HeadLogps writes here.
    torch.empty_like = torch.zeros_like
    utils.CPU_BLOCK = utils.GPU_BLOCK  # as in the estimate
    script = importlib.import_module(os.environ["SCRIPT"])
    before = []
    load_models = script.load_models

    def measured(*arguments):
        before.append(resident("VmRSS"))
        return load_models(*arguments)

    script.load_models = measured
    worker.main()
    print(json.dumps({"before": before[-1], "peak": resident("VmHWM")}))
