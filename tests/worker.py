"""One rank: runs main of the script named by SCRIPT once for each argument list given as JSON."""

import importlib
import json
import os
import signal
import sys
from types import SimpleNamespace

import torch.distributed as dist
from conftest import parse_args

import utils
from support import run


def argument_lists():
    """Those of the runs of this rank, one after the other, each with a port of its own."""
    for port, arguments in zip(json.loads(os.environ["PORTS"]), json.loads(sys.argv[1])):
        os.environ["MASTER_PORT"] = str(port)
        yield arguments


def main():
    script = importlib.import_module(os.environ["SCRIPT"])
    for arguments in argument_lists():
        with run.exit_on_input_error():
            script.main(parse_args(script, arguments))


def run_here(script, *arguments):
    """main of a script in this process; returns the last argument, the run's folder."""
    if dist.is_initialized():  # by another library, in an earlier test
        dist.destroy_process_group()
    try:
        with run.exit_on_input_error():
            script.main(parse_args(script, [str(argument) for argument in arguments]))
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if dist.is_initialized():
            dist.destroy_process_group()
    return arguments[-1]


def note_batches(script, monkeypatch) -> list:
    """The examples of every batch that a script's loop pads from now on, not of those that utils pads."""
    batches = []

    def pad_batch(examples, device):
        batches.append(examples)
        return utils.pad_batch(examples, device)

    monkeypatch.setattr(script, "utils", SimpleNamespace(**vars(utils) | {"pad_batch": pad_batch}))
    return batches


if __name__ == "__main__":
    main()
