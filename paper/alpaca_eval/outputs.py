"""Writes the samples of a run's last evaluation in AlpacaEval's format, as outputs.json in the run's folder.

python paper/alpaca_eval/outputs.py runs/dpo-offline
"""

import json
import sys
from pathlib import Path


def main(folder: Path):
    if not (folder / "summary.json").exists():
        raise SystemExit(f"error: {folder} has no summary.json; pass the folder of a run that has ended")
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    outputs = []
    for sample in samples:
        if sample["step"] == samples[-1]["step"] and not sample["greedy"]:
            output = {"instruction": sample["prompt"], "output": sample["sample"], "generator": folder.name}
            outputs.append(output)
    (folder / "outputs.json").write_text(json.dumps(outputs, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
