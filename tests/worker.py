"""Transition: names that files which are not merged yet import from here, and workers that are files."""

import importlib
import json
import os
import runpy
import sys

from helpers import note_batches, parse_args, run_here, run_main  # noqa: F401


def run_file(name: str, script, arguments):
    os.environ["SCRIPT"] = script.__name__
    sys.argv = [name, json.dumps([arguments])]
    runpy.run_path(os.path.join(os.path.dirname(__file__), name), run_name="__main__")


def argument_lists():
    yield from json.loads(sys.argv[1])


def main():
    for arguments in argument_lists():
        run_main(importlib.import_module(os.environ["SCRIPT"]), arguments)
