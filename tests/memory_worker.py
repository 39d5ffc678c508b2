"""One rank: runs main of the script named by SCRIPT for each argument list, the first ones to load libraries.
Prints the resident memory in GiB before the last one's models, and the peak."""

import ctypes
import importlib
import json
import os
import re
from pathlib import Path

import torch
import worker


def resident(name: str) -> float:
    """VmRSS: now, VmHWM: the peak, GiB."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 2**20


if __name__ == "__main__":
    # M_MMAP_THRESHOLD: larger tensors go back to the system when they are freed.
    ctypes.CDLL(None).mallopt(-3, 2**16)
    # A page counts when it is written, on a GPU when it is allocated: so write what HeadLogps allocates.
    torch.empty_like = torch.zeros_like
    script = importlib.import_module(os.environ["SCRIPT"])
    before = []
    load_models = script.load_models

    def measured(*arguments):
        before.append(resident("VmRSS"))
        return load_models(*arguments)

    script.load_models = measured
    worker.main()
    print(json.dumps({"before": before[-1], "peak": resident("VmHWM")}))
