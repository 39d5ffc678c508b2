"""Tests paper/math_train.py: it writes the 12,000 problems of MATH that are not in MATH500, or one error."""

import pyarrow
import pyarrow.parquet
import pytest
from conftest import SHARED, read_rows, write_rows

from paper import math_train

REAL = SHARED / "math"
MATH = []
for number in range(12_500):
    MATH.append({"problem": f"What is {number} + 1?", "solution": f"It is $\\boxed{{{number + 1}}}$."})
# with other white space, which must not matter
MATH500 = [row | {"problem": f" {row['problem']}\n", "answer": "?"} for row in MATH[::25]]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Returns a function that runs the program, and returns the written rows or the error message."""
    monkeypatch.chdir(tmp_path)
    for module in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)

    def run(math, math500="test.jsonl", out="math_train.jsonl"):
        try:
            math_train.main(math, math500, tmp_path / out)
        except SystemExit as stop:
            assert stop.code.startswith("error: ") and not (tmp_path / "math_train.jsonl").exists()
            return stop.code
        return read_rows(tmp_path / out)

    return run


def test_every_configuration_and_split_of_a_data_set_is_read(tmp_path, made):
    """The data set is like EleutherAI/hendrycks_math: a configuration and two splits for each subject."""
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
    rows = made((str(folder),), write_rows(tmp_path / "test.jsonl", MATH500))
    wanted = {row["problem"]: row["solution"] for i, row in enumerate(MATH) if i % 25}
    assert len(rows) == 12_000 and {row["problem"]: row["solution"] for row in rows} == wanted


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real data in {REAL}")
def test_the_real_files(made):
    train, test = str(REAL / "prm800k_split_train_12000.jsonl.gz"), str(REAL / "math500_test.jsonl")
    wanted = [{"problem": row["problem"], "solution": row["solution"]} for row in read_rows(train)]
    assert made((test, train), test) == wanted


@pytest.mark.parametrize(
    ("math", "math500", "message"),
    [
        (MATH[:-1], MATH500, "11999 others in train.jsonl; these must be 500 and 12000"),
        (MATH + MATH[1:2], MATH500, "12001 others"),
        (MATH, MATH500[:-1] + MATH500[:1], "499 problems in test.jsonl"),
        ([*MATH[:-1], {"question": "?"}], MATH500, "train.jsonl: KeyError: 'problem'"),
        (["a pointer"], MATH500, "train.jsonl: TypeError"),
    ],
)
def test_anything_but_12000_problems_is_refused(tmp_path, made, math, math500, message):
    write_rows(tmp_path / "train.jsonl", math)
    write_rows(tmp_path / "test.jsonl", math500)
    assert message in made(("train.jsonl",))


def test_what_cannot_be_read_or_written_is_named(tmp_path, made):
    math = (write_rows(tmp_path / "train.jsonl", MATH),)
    assert "none.jsonl: FileNotFoundError" in made(math, "none.jsonl")
    write_rows(tmp_path / "test.jsonl", MATH500)
    assert "EleutherAI/hendrycks_math: " in made(("EleutherAI/hendrycks_math",))  # offline
    assert "--out " in made(math, out="none/x")
