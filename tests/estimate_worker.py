"""One process: runs benchmark/memory.py for each argument list, with --json; presets get two layers."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmark"))
import memory  # noqa: E402

if __name__ == "__main__":
    layers = memory.SHAPE.index("num_hidden_layers")
    memory.PRESETS = {name: (*s[:layers], 2, *s[layers + 1 :]) for name, s in memory.PRESETS.items()}
    for arguments in json.loads(sys.argv[1]):
        memory.main([*arguments, "--json"])
