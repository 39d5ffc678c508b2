"""One rank: runs main of the script named by SCRIPT for each argument list, and notes the examples of every
batch that the loop pads, prompt ids and completion ids, in batches.json of the run's folder."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from conftest import parse_args

import utils

if __name__ == "__main__":
    script = importlib.import_module(os.environ["SCRIPT"])
    for port, arguments in zip(json.loads(os.environ["PORTS"]), json.loads(sys.argv[1])):
        os.environ["MASTER_PORT"] = str(port)
        args = parse_args(script, arguments)
        batches = []

        def pad_batch(examples, *rest, seen=batches):
            seen.append([x._asdict() for x in examples])
            return utils.pad_batch(examples, *rest)

        # For the script, not for what utils itself calls.
        script.utils = SimpleNamespace(**vars(utils) | {"pad_batch": pad_batch})
        script.main(args)
        (Path(args.output_dir) / "batches.json").write_text(json.dumps(batches))
