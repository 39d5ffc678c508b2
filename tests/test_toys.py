"""Tests toy/: the makers write the committed bytes again, but for models and samples, which take minutes."""

import gzip
import json
import random

import pytest
import torch
from helpers import ROOT, read_rows
from transformers import AutoModelForCausalLM

from toy import chat, make, stories, sums

TOYS = ROOT / "toy"
STORIES = TOYS / "stories"


# === toy/make.py and toy/sums.py ===
TASKS = {"bouquets": make.BOUQUETS, "tales": make.TALES}


@pytest.mark.parametrize("name", TASKS)
def test_the_scores_of_the_committed_pairs_are_the_judges(name):
    rows = read_rows(TOYS / name / "preferences_test.jsonl.gz")
    assert len(rows) == 512
    for row in rows:
        for side in ("chosen", "rejected"):
            assert row[f"score_{side}"] == round(TASKS[name].judge(row["prompt"], row[side]), 5)
        assert row["score_chosen"] >= row["score_rejected"] + 0.01
        assert row["prompt"] in TASKS[name].prompts()


def test_a_shell_game_is_won_by_a_finished_solution_with_the_last_place():
    assert make.follow_ball("2 45 15 34 24 45") == ["2", "2", "2", "4", "5"]
    work = "<think>\n2 2 2 4 5\n</think>\n<answer>\n{}\n</answer>"
    judged = [make.judge_shell_game("2 45 15 34 24 45", work.format(place)) for place in "54"]
    assert judged == [1, 0] and make.judge_shell_game("2 45", "2") == 0
    assert make.judge_shell_game("2 45 15 34 24 45", work.format(5), finished=False) == 0


def test_a_diligent_student_writes_every_place_and_few_students_are_diligent():
    """Tests `write_work` without slips, and `write_as_student`."""
    problem = "2 45 15 34 24 45"
    full = "<think>\n2 2 2 4\n</think>\n<answer>\n5\n</answer>"
    assert make.write_work(random.Random(0), problem) == full
    assert make.write_work(random.Random(0), problem, diligence=0) == full.replace("2 2 2 4", "")
    rng = random.Random(0)
    right = {True: [], False: []}  # {whether all places are written: scores}
    for _ in range(2000):
        text = make.write_as_student(rng, problem)
        places = text.split("</think>")[0].split()[1:]
        right[len(places) == 4].append(make.judge_shell_game(problem, text))
    assert len(right[True]) / 2000 == pytest.approx(0.06 + 0.94 * 0.3**4, abs=0.02)
    assert sum(right[True]) / len(right[True]) == pytest.approx(1 - 5 * 0.03 * 0.8, abs=0.08)
    assert sum(right[False]) / len(right[False]) < 0.3


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


# === toy/stories.py ===
def test_the_judge_is_vaders_mean_over_sentences():
    happy, sad = (stories.sentiment(text)["compound"] for text in ("She was happy.", "He was sad."))
    assert (happy, sad) == (0.5719, -0.4767)  # VADER 3.3.2
    assert stories.judge_story("A prompt that is sad", " She was happy.") == happy
    assert stories.judge_story("", " She was happy. He was sad.") == pytest.approx((happy + sad) / 2)
    cut = stories.judge_story("", " She was happy. He was sad", finished=False)
    assert cut == pytest.approx(happy / 2)  # the last sentence of an unfinished completion counts 0
    assert stories.judge_story("", "") == stories.judge_story("", " She was happy", finished=False) == 0


def test_sentences_and_trigrams():
    text = ' and "Hi!" said Tim. "Wow, a dog!" Tom ran... He fell! and cried.'
    wanted = ['and "Hi!" said Tim.', '"Wow, a dog!"', "Tom ran...", "He fell! and cried."]
    assert stories.sentences(text) == wanted
    assert stories.distinct_trigrams(["a b c", "A b, c.", "a b d"]) == pytest.approx(2 / 3)


def test_labels_agree_with_the_judge_as_often_as_the_scale_says():
    gaps = [random.Random(i).gauss(0, 0.4) for i in range(2000)]
    tau = stories.find_scale(gaps)
    assert torch.sigmoid(torch.tensor(gaps).abs() / tau).mean() == pytest.approx(0.8, abs=1e-6)
    answers = [("", " She was happy.", " He was sad.")] * 2000
    pairs = stories.label(random.Random(0), answers, tau=1.0486)  # the gap, so P(chosen) is sigmoid(1)
    chosen = sum(pair["chosen"] == " She was happy." for pair in pairs) / 2000
    assert chosen == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.03)


def test_the_splits_share_no_prompt_and_the_committed_scores_are_the_judges():
    prompts = {}
    for name in ("train", "test"):
        rows = read_rows(STORIES / f"preferences_{name}.jsonl.gz")
        prompts[name] = {row["prompt"] for row in rows}
        for row in rows[:100]:
            for side in ("chosen", "rejected"):
                assert row[f"score_{side}"] == round(stories.judge_story("", row[side]), 4)
    assert (len(prompts["train"]), len(prompts["test"])) == (1024, 256)
    assert not prompts["train"] & prompts["test"]


# === toy/chat.py ===
def message(role: str, text: str) -> dict:
    return {"role": role, "content": text}


def spread(folder, monkeypatch, kind: str, file) -> list[dict]:
    """Returns all rows that toy/chat.py writes of a file, in the order of their prompts."""
    monkeypatch.setattr(chat, "PARTS", {"tuning": 1, "held_out": 1})
    chat.main(kind, file, folder)
    rows = [row for part in ("tuning", "held_out", "train") for row in read_rows(folder / f"{part}.jsonl")]
    return sorted(rows, key=lambda row: row["prompt"][-1]["content"])


def test_polite_pairs_have_their_input_and_no_prompt_twice(tmp_path, monkeypatch):
    rows = []
    for i, (given, chosen) in enumerate([("", "Yes."), ("a\nb", "Yes, I think."), ("c", "Of course.")]):
        rows.append({"instruction": f"Q{i}?", "input": given, "chosen": chosen, "rejected": "Yes, genius."})
    skipped = [
        rows[0] | {"chosen": "Another answer to the same question."},
        rows[0] | {"instruction": "Equal answers", "rejected": "Yes."},
        rows[0] | {"instruction": "Too long", "chosen": "very " * 200},
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(rows + skipped))
    expected = []
    for row, question in zip(rows, ("Q0?", "Q1?\na\nb", "Q2?\nc")):
        pair = {key: [message("assistant", row[key])] for key in ("chosen", "rejected")}
        expected.append({"prompt": [message("user", question)], **pair})
    assert spread(tmp_path / "out", monkeypatch, "polite", tmp_path / "pairs.json") == expected


def test_harmless_pairs_are_conversations_that_differ_in_their_last_answer(tmp_path, monkeypatch):
    two = "\n\nHuman: Hi: {0}\n\nAssistant: Hello.\n\nHuman: {0}?\n\nAssistant: {1}"
    rows = [{"chosen": two.format(i, "A"), "rejected": two.format(i, "B\n\nC: c")} for i in range(3)]
    rows.append({"chosen": two.format("x", "A"), "rejected": two.format("y", "B")})  # is skipped
    file = tmp_path / "test.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    expected = []
    for i in range(3):
        prompt = [message("user", f"Hi: {i}"), message("assistant", "Hello."), message("user", f"{i}?")]
        answers = {"chosen": [message("assistant", "A")], "rejected": [message("assistant", "B\n\nC: c")]}
        expected.append({"prompt": prompt} | answers)
    assert spread(tmp_path / "out", monkeypatch, "harmless", file) == expected
