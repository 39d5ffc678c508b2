"""math_train.jsonl, Table 2's training set: the 12,000 problems of MATH that are not in MATH500.

    python paper/math_train.py
    python paper/math_train.py --math simplescaling/openaimath
    python paper/math_train.py --math train.jsonl.gz test.jsonl --math500 test.jsonl

The second is the data set that the authors' recipes name (kawine/open-r1-humanline), the third takes files,
such as math_splits of openai/prm800k. (Tried with the real problems in files, and with folders laid out as
the first; not with the Hub.) MATH is under the MIT licence; its first copy on the Hub,
hendrycks/competition_math, was taken down in January 2025 after a DMCA notice, which may happen to other
copies.
"""

import gzip
import json
from pathlib import Path

import datasets
import tyro


def read(flag: str, names: tuple[str, ...]) -> list[dict]:
    """The rows of json lines (also .gz), or of all parts of a data set (a Hub name or a folder)."""
    rows = []
    for name in names:
        try:
            if name.endswith((".jsonl", ".jsonl.gz")):
                with (gzip.open if name.endswith(".gz") else open)(name, "rt", encoding="utf-8") as file:
                    rows += map(json.loads, file)
            else:
                for config in datasets.get_dataset_config_names(name):
                    for split in datasets.load_dataset(name, config).values():
                        rows += split
        except Exception as error:  # as many kinds as there are ways to have no data
            reason = str(error).strip().split("\n")[0]
            raise SystemExit(f"error: {flag} {name}: {type(error).__name__}: {reason}") from None
    for row in rows:
        valid = isinstance(row, dict)
        for key in ("problem", "solution"):
            valid = valid and isinstance(row.get(key), str)
        if not valid:
            raise SystemExit(
                f"error: {flag} {' '.join(names)}: every row needs the texts problem and solution"
            )
    return rows


def main(
    math: tuple[str, ...] = ("EleutherAI/hendrycks_math",),
    math500: str = "HuggingFaceH4/MATH-500",
    out: Path = Path("math_train.jsonl"),
):
    """Writes it, or says why not.

    Args:
        math: MATH: files, or a Hub name, of which all configurations and splits are read.
        math500: MATH500, the problems to leave out.
        out: json lines with problem and solution, in the order of --math.
    """
    held_out = {" ".join(row["problem"].split()) for row in read("--math500", (math500,))}
    if len(held_out) != 500:
        raise SystemExit(f"error: --math500 {math500}: {len(held_out)} problems, not 500")
    rows = read("--math", math)
    kept = [row for row in rows if " ".join(row["problem"].split()) not in held_out]
    if len(kept) != 12_000:
        told = f"{len(rows)} problems, of which {len(kept)} are not in MATH500; it must be 12000"
        raise SystemExit(f"error: --math {' '.join(math)}: {told}: name another copy of MATH")
    lines = []
    for row in kept:
        lines.append(json.dumps({"problem": row["problem"], "solution": row["solution"]}) + "\n")
    try:
        out.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"error: --out {out}: {error.strerror}") from None
    print(f"{out}: {len(kept)} problems; {len(rows) - len(kept)} of {len(rows)} are in MATH500")


if __name__ == "__main__":
    tyro.cli(main)
