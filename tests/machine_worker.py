"""One rank of a machine of its own: it works in its own folder, with its own flags."""

import importlib
import json
import os
import sys

from conftest import parse_args

if __name__ == "__main__":
    script = importlib.import_module(os.environ["SCRIPT"])
    folder, *flags = json.loads(sys.argv[1])[int(os.environ["RANK"])]
    os.chdir(folder)
    os.environ["MASTER_PORT"] = str(json.loads(os.environ["PORTS"])[0])
    script.main(parse_args(script, flags))
