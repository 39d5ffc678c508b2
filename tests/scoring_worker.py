"""worker.py with one of the functions below as SCORE, named by the variable SCORE."""

import os
import sys
import time
from pathlib import Path

import torch
import worker

import grpo_humanline

CALLS = []


def length(samples):
    return [float(len(sample.text)) for sample in samples]


def fails_in_the_third_call(samples):
    """The second call belongs to the first round, because the first one is the evaluation's."""
    CALLS.append(samples)
    if len(CALLS) == 3:
        raise ConnectionError("no answer\nfrom the judge")
    return length(samples)


def exits(samples):
    sys.exit()


def random(samples):
    return torch.rand(len(samples), generator=torch.Generator().manual_seed(os.getpid()))


def slow(samples):
    time.sleep(3)
    return length(samples)


def nan(samples):
    return [float("nan"), *length(samples)[1:]]


def sorts(samples):
    """Changes its list, and the samples in it, on rank 0 alone."""
    samples.sort(key=lambda sample: sample.text)
    samples[0].completion_ids.clear()
    return length(samples)


def column(samples):
    return [float(sample.row["points"]) for sample in samples]


if __name__ == "__main__":
    function = globals()[os.environ["SCORE"]]

    def counted(samples):
        with Path(os.environ["COUNT"]).open("a") as file:
            file.write(f"rank {os.environ.get('RANK', 0)}\n")
        return function(samples)

    grpo_humanline.SCORE = counted
    worker.main()
