"""One rank: runs main of the script named by SCRIPT once for each argument list given as JSON."""

import importlib
import json
import os
import sys

from conftest import parse_args

if __name__ == "__main__":
    script = importlib.import_module(os.environ["SCRIPT"])
    for port, arguments in zip(json.loads(os.environ["PORTS"]), json.loads(sys.argv[1])):
        os.environ["MASTER_PORT"] = str(port)
        script.main(parse_args(script, arguments))
