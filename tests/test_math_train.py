"""paper/math_train.py: the 12,000 problems of MATH that are not in MATH500, or one line that says why not."""

import gzip
import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, SHARED

REAL = SHARED / "math"


def problem(number: int) -> dict:
    return {
        "problem": f"What is {number} + 1?",
        "solution": f"It is $\\boxed{{{number + 1}}}$.",
        "level": "1",
    }


MATH = [problem(number) for number in range(12_500)]
# White space is no matter.
MATH500 = [row | {"problem": f" {row['problem']}\n", "answer": "?"} for row in MATH[::25]]


def write(path, rows):
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def math_train(folder, *flags, out="math_train.jsonl"):
    """The rows written, or what the program says that must stop with an error."""
    command = [sys.executable, str(ROOT / "paper" / "math_train.py"), *flags, "--out", out]
    env = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode == 0:
        return [json.loads(line) for line in (folder / out).read_text().splitlines()]
    assert done.returncode == 1 and not (folder / "math_train.jsonl").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_every_configuration_and_split_of_a_data_set_is_read(tmp_path):
    """Of one like EleutherAI/hendrycks_math: for each subject a configuration with both splits."""
    folder = tmp_path / "hendrycks_math"
    card = "---\nconfigs:\n"
    for i, subject in enumerate(("algebra", "geometry", "precalculus")):
        (folder / subject).mkdir(parents=True)
        card += f"- config_name: {subject}\n  data_files:\n"
        rows = MATH[i::3]
        for split, part in {"train": rows[:1000], "test": rows[1000:]}.items():
            file = f"{subject}/{split}-00000-of-00001.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), folder / file)
            card += f"  - split: {split}\n    path: {subject}/{split}-*\n"
    (folder / "README.md").write_text(card + "---\n")
    rows = math_train(tmp_path, "--math", str(folder), "--math500", write(tmp_path / "test.jsonl", MATH500))
    wanted = {row["problem"]: row["solution"] for i, row in enumerate(MATH) if i % 25}
    assert len(rows) == 12_000 and {row["problem"]: row["solution"] for row in rows} == wanted


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real data in {REAL}")
def test_the_real_files(tmp_path):
    train, test = str(REAL / "prm800k_split_train_12000.jsonl.gz"), str(REAL / "math500_test.jsonl")
    rows = math_train(tmp_path, "--math", test, train, "--math500", test)
    with gzip.open(train, "rt") as file:
        wanted = [json.loads(line) for line in file]
    assert rows == [{"problem": row["problem"], "solution": row["solution"]} for row in wanted]


@pytest.mark.parametrize(
    ("math", "math500", "told"),
    [
        (MATH[:-1], MATH500, "11999 others in train.jsonl; it must be 500 and 12000"),
        (MATH + MATH[1:2], MATH500, "12001 others"),
        (MATH, MATH500[:-1] + MATH500[:1], "499 problems in test.jsonl"),
        ([*MATH[:-1], {"question": "?"}], MATH500, "train.jsonl: KeyError: 'problem'"),
        (["a pointer"], MATH500, "train.jsonl: TypeError"),
    ],
)
def test_anything_but_12000_problems_is_refused(math, math500, told, tmp_path):
    write(tmp_path / "train.jsonl", math)
    write(tmp_path / "test.jsonl", math500)
    assert told in math_train(tmp_path, "--math", "train.jsonl", "--math500", "test.jsonl")


def test_what_cannot_be_read_or_written_is_named(tmp_path):
    write(tmp_path / "test.jsonl", MATH500)
    write(tmp_path / "train.jsonl.gz", MATH)
    flags = ("--math500", "test.jsonl", "--math", "train.jsonl.gz")
    assert "none.jsonl: FileNotFoundError" in math_train(tmp_path, "--math500", "none.jsonl")
    assert "EleutherAI/hendrycks_math: " in math_train(tmp_path, *flags[:2])  # offline
    assert "--out none/x: " in math_train(tmp_path, *flags, out="none/x")
