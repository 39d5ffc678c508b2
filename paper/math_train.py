"""Writes math_train.jsonl, the training set of Table 2: the 12,000 problems of MATH that are not in MATH500.

    python paper/math_train.py
    python paper/math_train.py --math simplescaling/openaimath
    python paper/math_train.py --math train.jsonl.gz test.jsonl --math500 test.jsonl

The second command reads the data set that the authors' recipes name (kawine/open-r1-humanline). The third
command reads files, for example those in math_splits of openai/prm800k. MATH has the MIT licence. Its first
copy on the Hub was taken down in January 2025 after a DMCA notice, which may happen to other copies.
"""

import gzip
import json
from pathlib import Path

import datasets
import tyro


def read(name: str) -> list[dict]:
    """Returns the rows of a .jsonl or .jsonl.gz file, or of all configurations and splits of a data set.

    name: a file, a Hub name or a folder.
    """
    rows = []
    if name.endswith((".jsonl", ".jsonl.gz")):
        with (gzip.open if name.endswith(".gz") else open)(name, "rt", encoding="utf-8") as file:
            rows += map(json.loads, file)
    else:
        for config in datasets.get_dataset_config_names(name):
            for split in datasets.load_dataset(name, config).values():
                rows += split
    return [{"problem": row["problem"], "solution": row["solution"]} for row in rows]


def key(row: dict) -> str:
    """Returns the problem's text without differences in white space."""
    return " ".join(row["problem"].split())


def main(
    math: tuple[str, ...] = ("EleutherAI/hendrycks_math",),
    math500: str = "HuggingFaceH4/MATH-500",
    out: Path = Path("math_train.jsonl"),
):
    """Writes the file.

    Args:
        math: MATH: files or Hub names.
        math500: MATH500, the problems that are left out.
        out: the .jsonl file, with columns problem and solution, in the order of --math.
    """
    held_out = {key(row) for row in read(math500)}
    kept = [row for name in math for row in read(name) if key(row) not in held_out]
    if len(held_out) != 500 or len(kept) != 12_000:
        counts = f"{len(held_out)} problems in {math500}, and {len(kept)} others in {' '.join(math)}"
        raise SystemExit(f"error: {counts}; these must be 500 and 12000: name another copy of the data")
    out.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    print(f"{out}: {len(kept)} problems")


if __name__ == "__main__":
    tyro.cli(main)
