"""One rank: runs dpo_humanline.main once for each argument list given as JSON."""

import json
import os
import sys

import tyro

import dpo_humanline

if __name__ == "__main__":
    for port, arguments in zip(json.loads(os.environ["PORTS"]), json.loads(sys.argv[1])):
        os.environ["MASTER_PORT"] = str(port)
        dpo_humanline.main(tyro.cli(dpo_humanline.Args, args=arguments))
