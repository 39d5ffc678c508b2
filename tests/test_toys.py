"""The toys: their makers write the committed bytes again, but for models and samples, which take minutes."""

import pytest
from helpers import ROOT, read_rows
from transformers import AutoModelForCausalLM

from toy import common, make, sums

TOYS = ROOT / "toy"


def test_committed_rows_are_written_as_the_same_bytes(tmp_path):
    files = sorted(TOYS.rglob("*.jsonl.gz"))
    assert len(files) > 10
    for path in files:
        common.write_rows(tmp_path / "rows.jsonl.gz", read_rows(path))
        assert (tmp_path / "rows.jsonl.gz").read_bytes() == path.read_bytes(), path


TASKS = {"bouquets": make.BOUQUETS, "tales": make.TALES, "low_entropy": make.LOW_ENTROPY}


@pytest.mark.parametrize("name", TASKS)
def test_the_scores_of_the_committed_pairs_are_the_judges(name):
    rows = read_rows(TOYS / name / "preferences_test.jsonl.gz")
    assert len(rows) == 512
    for row in rows:
        for side in ("chosen", "rejected"):
            assert row[f"score_{side}"] == round(TASKS[name].judge(row["prompt"], row[side]), 5)
        assert row["score_chosen"] >= row["score_rejected"] + 0.01


def test_a_seed_needs_a_folder_of_its_own():
    with pytest.raises(SystemExit, match="--seed needs --tasks tales, stories or shell_game, and another"):
        make.main(seed=1)


def test_the_shell_game_is_the_committed_one(tmp_path, monkeypatch):
    """The committed policy replaces the training, which takes minutes."""
    policy = AutoModelForCausalLM.from_pretrained(TOYS / "shell_game" / "policy").eval()
    monkeypatch.setattr(make, "train_language_model", lambda *_, **__: policy)
    make.make_shell_game(tmp_path)
    files = ["problems_train.jsonl.gz", "problems_test.jsonl.gz"]
    names = ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in [*files, *(f"policy/{name}" for name in names)]:
        assert (tmp_path / name).read_bytes() == (TOYS / "shell_game" / name).read_bytes(), name


def test_the_sums_are_the_committed_ones_and_no_pair_of_numbers_is_in_both_files(tmp_path):
    sums.main(tmp_path)
    pairs = {}
    for path in sorted((TOYS / "sums").iterdir()):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
        if path.suffix == ".jsonl":
            numbers = [[int(number) for number in row["problem"].split(" + ")] for row in read_rows(path)]
            assert [sum(pair) for pair in numbers] == [row["answer"] for row in read_rows(path)]
            pairs[path.stem] = {tuple(sorted(pair)) for pair in numbers}
    assert len(pairs["held_out"]) == 64 and not pairs["held_out"] & pairs["train"]


@pytest.mark.parametrize("kind", sums.KINDS)
def test_every_kind_of_sums_has_three_separate_parts_and_right_answers(kind, tmp_path):
    sums.main(tmp_path, kind, tuning=32)
    parts = [read_rows(tmp_path / f"{name}.jsonl") for name in ("train", "tuning", "held_out")]
    problems = [{row["problem"] for row in part} for part in parts]
    assert len(problems[0]) >= 100 and [len(part) for part in problems[1:]] == [32, 64]
    assert not problems[0] & (problems[1] | problems[2]) and not problems[1] & problems[2]
    for row in [row for part in parts for row in part]:
        a, sign, b = row["problem"].split()
        assert row["answer"] == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
