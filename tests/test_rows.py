"""What is read beside tokens: splits, folders, other columns, labels, and the row that rewards see."""

import datetime
import json
import shutil

import datasets
import pytest
import torch
from conftest import TOY, metrics, read_pool, write_rows
from worker import run_here

import dpo_humanline
import grpo_humanline
import grpo_math_humanline
import kto_humanline
from support import data
from utils import InputError

PAIR = {"prompt": "for king", "chosen": "rose iris", "rejected": "iris"}
LABELLED = {"prompt": "for king", "completion": "rose iris", "label": True}
SCORED = {"prompt": "for king", "completions": ["rose iris", "iris"], "scores": [1.0, 0.0]}


@pytest.fixture
def load(tmp_path, one_rank):
    """Reads rows with a script's `load_data` and the toy's tokenizer."""

    def read(script, rows, **flags):
        name = write_rows(tmp_path / "rows.jsonl", rows)
        args = script.Args(model=str(TOY / "policy"), dataset=name, batch_size=2, **flags)
        return script.load_data(args, *data.load_tokenizer(args))

    return read


# --- files ---


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_file_has_no_splits(one_rank, tmp_path, split):
    """--dataset-split train[:4] beside a file was ignored."""
    name = write_rows(tmp_path / "rows.jsonl", [PAIR] * 3)
    assert len(list(data.read_rows(name, split))) == 3
    for other in ("train[:4]", "validation"):
        with pytest.raises(InputError, match="rows.jsonl is a file, .* remove --dataset-split"):
            list(data.read_rows(name, other))


def test_a_folder_is_refused(one_rank, tmp_path):
    """load_dataset gave the rows that the folder had at an earlier time."""
    write_rows(tmp_path / "rows.jsonl", [PAIR])
    with pytest.raises(InputError, match="convert it to one .jsonl, .jsonl.gz or .parquet file"):
        list(data.read_rows(str(tmp_path), "train"))


# --- messages and columns ---


@pytest.mark.parametrize("value", [0, False, "a", 5])
def test_a_weight_of_zero_is_a_value(load, value):
    """Keys with 0 and False were removed as if they were null."""
    messages = [{"role": "user", "content": "for king", "train": value}]
    with pytest.raises(InputError, match="only role, content, name here: remove 'train' from them"):
        load(dpo_humanline, [PAIR | {"prompt": messages}])


@pytest.mark.parametrize(
    ("script", "row", "reader"),
    [
        (dpo_humanline, LABELLED, "kto_humanline.py"),
        (dpo_humanline, SCORED, "grpo_humanline.py"),
        (kto_humanline, SCORED, "grpo_humanline.py"),
        (grpo_humanline, LABELLED, "kto_humanline.py"),
        (dpo_humanline, {"question": "1 + 1?", "answer": "2"}, "grpo_math_humanline.py"),
    ],
)
def test_rows_of_another_script_name_it(load, script, row, reader):
    rows = [row, row | {"prompt": "for queen"}] if "prompt" in row else [row]
    with pytest.raises(InputError, match=reader):
        load(script, rows)


@pytest.mark.parametrize("missing", [{}, {"label": None}])
def test_a_completion_without_a_label_is_named(load, missing):
    """It was a KeyError with a traceback."""
    with pytest.raises(InputError, match="no value for 'label' in the columns prompt, completion"):
        load(kto_humanline, [{"prompt": "for king", "completion": "rose"} | missing])


def test_labels_are_counted(load, capsys):
    """64 rows that were all true trained without a word."""
    other = LABELLED | {"prompt": "for queen"}
    load(kto_humanline, [LABELLED, other, other | {"label": False}])
    assert "labels: 2 true, 1 false (KTO expects both)\n" in capsys.readouterr().out
    load(kto_humanline, [LABELLED, other])
    assert "labels: 2 true, 0 false (KTO expects both)\n" in capsys.readouterr().out


# --- rewards that see the row ---


def test_a_row_has_only_values_that_a_checkpoint_can_hold(one_rank, tmp_path):
    day = datetime.date(2026, 1, 2)
    rows = [PAIR | {"day": day, "raw": b"ab", "tests": [{"in": 1, "out": None}], "nan": float("nan")}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    ((_, row),) = data.read_rows(str(tmp_path / "rows.parquet"), "train")
    held = data.json_row(row)
    assert held["day"] == "2026-01-02" and held["raw"] == "b'ab'" and held["tests"] == rows[0]["tests"]
    assert repr(json.loads(json.dumps(held))) == repr(held)  # as in a checkpoint


def test_rows_are_kept_only_where_a_function_gives_the_rewards(load, monkeypatch):
    row = PAIR | {"test_case": {"flowers": 2}}
    groups, _ = load(grpo_humanline, [row])
    assert [example.row for example in groups[0]] == [None, None]
    monkeypatch.setattr(grpo_humanline, "SCORE", lambda samples: None)
    for rows in ([row], [SCORED | row], [{"prompt": "for king", "test_case": {"flowers": 2}}]):
        groups, _ = load(grpo_humanline, rows, online=True)
        assert all(example.row == rows[0] for example in groups[0])
    tokenizer, eos_ids = data.load_tokenizer(dpo_humanline.Args(model=str(TOY / "policy")))
    problem = {"problem": "for king", "answer": 5, "level": "Level 5"}
    args = grpo_math_humanline.Args(system_prompt="")
    (example,) = grpo_math_humanline.encode_row(args, tokenizer, eos_ids, problem)
    assert example.row["level"] == "Level 5"


def test_a_function_sees_the_row_and_a_resume_keeps_it(tmp_path, monkeypatch):
    rows = []
    for number, name in enumerate(["king", "queen", "clerk", "king queen"]):
        rows.append({"prompt": f"for {name}", "wanted": number, "day": datetime.date(2026, 1, 1 + number)})
    path = str(tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).to_parquet(path)
    seen = []

    def score(samples):
        seen.extend((sample.prompt, sample.row["wanted"], sample.row["day"]) for sample in samples)
        return torch.arange(len(samples), dtype=torch.float64) % 2

    monkeypatch.setattr(grpo_humanline, "SCORE", score)
    flags = ["--model", TOY / "policy", "--dataset", path, "--online", "--engine", "hf", "--num-steps", "4"]
    flags += ["--batch-size", "2", "--round-prompts", "4", "--samples-per-prompt", "2", "--eval-samples", "0"]
    flags += ["--max-new-tokens", "4", "--checkpoint-every", "2", "--keep-checkpoints", "0"]
    run_here(grpo_humanline, *flags, "--output-dir", tmp_path / "whole")
    assert set(seen) == {(row["prompt"], row["wanted"], str(row["day"])) for row in rows}
    pool = read_pool(tmp_path / "whole" / "checkpoints" / "step-2")
    assert len(pool) == 2 and {type(example.row["wanted"]) for group in pool for example in group} == {int}
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(cut / "checkpoints" / "step-4")
    shutil.rmtree(cut / "final")
    (cut / "summary.json").unlink()
    run_here(grpo_humanline, "--resume", cut)
    assert metrics(cut, True) == metrics(tmp_path / "whole", True)
