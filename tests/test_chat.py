"""Tests toy/chat.py, which makes pairs for a chat model, and paper/chat.py, which measures a run on them."""

import gzip
import json
from statistics import fmean

import numpy as np
import pytest
import torch
from conftest import PAIRS, TOY, read_rows, write_rows
from scipy import stats
from test_paper_figures import conversation, plain_logps
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker import run_here

import dpo_humanline
from paper import chat as measured
from toy import chat


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def spread(rows: list[dict], folder, monkeypatch, kind: str, file) -> list[dict]:
    """Returns all rows that toy/chat.py writes of a file, in the order of their prompts."""
    monkeypatch.setattr(chat, "PARTS", {"tuning": 1, "held_out": 1})
    chat.main(kind, file, folder)
    parts = [read_rows(folder / f"{part}.jsonl") for part in ("tuning", "held_out", "train")]
    assert [len(part) for part in parts] == [1, 1, len(rows) - 2]
    return sorted(sum(parts, []), key=lambda row: row["prompt"][-1]["content"])


def test_polite_pairs_have_their_input_and_no_prompt_twice(tmp_path, monkeypatch):
    rows = []
    for i, (given, chosen) in enumerate([("", "Yes."), ("a\nb", "Yes, I think."), ("c", "Of course.")]):
        rows.append({"instruction": f"Q{i}?", "input": given, "output": "Yes.", "chosen": chosen})
        rows[-1]["rejected"] = "Yes, genius."
    skipped = [
        rows[0] | {"chosen": "Another answer to the same question."},
        rows[0] | {"instruction": "Equal answers", "rejected": "Yes."},
        rows[0] | {"instruction": "No answer", "rejected": ""},
        rows[0] | {"instruction": "Too long", "chosen": "very " * 200},
    ]
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps(rows + skipped))
    expected = []
    for row, question in zip(rows, ("Q0?", "Q1?\na\nb", "Q2?\nc")):
        pair = {key: [assistant(row[key])] for key in ("chosen", "rejected")}
        expected.append({"prompt": [user(question)], **pair})
    assert spread(expected, tmp_path / "out", monkeypatch, "polite", file) == expected


def test_harmless_pairs_are_conversations_that_differ_in_their_last_answer(tmp_path, monkeypatch):
    two = "\n\nHuman: Hi: {0}\n\nAssistant: Hello.\n\nHuman: {0}?\n\nAssistant: {1}"
    rows = [{"chosen": two.format(i, "A"), "rejected": two.format(i, "B\n\nC: c")} for i in range(3)]
    skipped = [
        {"chosen": two.format("x", "A"), "rejected": two.format("y", "B")},
        {"chosen": two.format("z", ""), "rejected": two.format("z", "B")},
        # the beginning of another conversation
        {"chosen": "\n\nHuman: Hi: 0\n\nAssistant: A", "rejected": "\n\nHuman: Hi: 0\n\nAssistant: B"},
        {"chosen": "\n\nAssistant: A\n\nAssistant: A", "rejected": "\n\nAssistant: A\n\nAssistant: B"},
    ]
    file = tmp_path / "test.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows + skipped).encode()))
    expected = []
    for i in range(3):
        prompt = [user(f"Hi: {i}"), assistant("Hello."), user(f"{i}?")]
        expected.append({"prompt": prompt, "chosen": [assistant("A")], "rejected": [assistant("B\n\nC: c")]})
    assert spread(expected, tmp_path / "out", monkeypatch, "harmless", file) == expected


def test_a_file_that_is_missing_or_a_pointer_is_said(tmp_path):
    with pytest.raises(SystemExit, match="error: .*none.json does not exist: get it from the repository"):
        chat.main("polite", tmp_path / "none.json", tmp_path)
    pointer = tmp_path / "test.jsonl.gz"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(SystemExit, match="error: .* is a pointer of Git LFS: git lfs pull"):
        chat.main("harmless", pointer, tmp_path)


@pytest.mark.parametrize("longest", [6, 24])  # all samples are cut off, or none
def test_the_kl_is_plain_transformers_and_answers_are_greedy(longest, tmp_path, monkeypatch, one_rank):
    monkeypatch.setattr(measured, "ANSWERS", 3)
    rows = []
    for row in read_rows(PAIRS)[:24]:
        pair = {key: [assistant(row[key])] for key in ("chosen", "rejected")}
        rows.append({"prompt": [user(row["prompt"])], **pair})
    folder = tmp_path / "run"
    flags = ["--model", TOY / "policy", "--dataset", write_rows(tmp_path / "train.jsonl", rows[8:])]
    flags += ["--eval-dataset", write_rows(tmp_path / "held_out.jsonl", rows[:8]), "--eval-samples", 6]
    flags += ["--temperature", 1, "--top-p", 1, "--max-new-tokens", longest, "--engine", "hf", "--lr", 1e-3]
    flags += ["--num-steps", 3, "--batch-size", 4, "--output-dir", folder, "--no-humanline"]
    run_here(dpo_humanline, *flags)
    measured.main(folder)
    made = json.loads((folder / "chat.json").read_text())

    samples = [row for row in read_rows(folder / "samples.jsonl") if row["step"] == 3]
    assert len(samples) == 6 and {row["finished"] for row in samples} == {longest == 24}
    ratios = []
    for row in samples:
        ids, start = conversation(TOY / "policy", row["prompt"], row["sample"])
        ids = ids if row["finished"] else ids[:-1]
        assert len(ids) - start == row["tokens"]
        policy, initial = (sum(plain_logps(path, ids, start)) for path in (folder / "final", TOY / "policy"))
        ratios.append(policy - initial)
    assert made["kl"] == pytest.approx(fmean(ratios), abs=1e-4) and abs(made["kl"]) > 0.01
    assert made["kl error"] == pytest.approx(stats.sem(ratios), abs=1e-4)
    summary = json.loads((folder / "summary.json").read_text())["after"]
    errors = {f"{name} error": error for name, (_, error, _) in summary.items()}
    assert {"eval/loss error", "eval/accuracy error", "eval/length error"} <= {*errors}
    assert made == {key: made[key] for key in ("kl", "kl error", "answers")} | errors

    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    expected = []
    for row in samples[:3]:
        ids, start = conversation(TOY / "policy", row["prompt"], "")
        answers = []
        for path in (TOY / "policy", folder / "final"):
            model = AutoModelForCausalLM.from_pretrained(path)
            found = model.generate(torch.tensor([ids[:start]]), do_sample=False, max_new_tokens=64)
            answers.append(tokenizer.decode(found[0, start:], skip_special_tokens=True))
        expected.append([row["prompt"], *answers])
    assert made["answers"] == expected
    assert not np.array_equal([row[1] for row in expected], [row[2] for row in expected])

    write_rows(tmp_path / "held_out.jsonl", rows[1:8])
    with pytest.raises(SystemExit, match="error: .*samples.jsonl has other prompts than"):
        measured.main(folder)
