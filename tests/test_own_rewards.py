"""Runs the examples of docs/grpo.md and docs/grpo_math.md: a reward and a grader as Python functions."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, metrics, read_rows, write_rows

FLAGS = [
    "--engine",
    "hf",
    "--num-steps",
    "2",
    "--checkpoint-every",
    "0",
    "--eval-samples",
    "8",
    "--output-dir",
    "run",
]


def run_with_example(folder, script: str, page: str, name: str, old: str, *flags):
    """Puts the page's code block with `name` in place of `old` in a copy of the script, and runs the copy."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE
    )
    (block,) = (block for block in blocks if name in block)
    text = (ROOT / script).read_text()
    found = re.findall(old, text, re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    (folder / script).write_text(
        text.replace(found[0], block).replace("__file__).resolve().parent", f'"{ROOT}/x").parent')
    )
    shutil.copy(ROOT / "utils.py", folder)
    shutil.copytree(ROOT / "support", folder / "support")
    command = [sys.executable, script, *flags, *FLAGS]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return metrics(folder / "run"), read_rows(folder / "run" / "samples.jsonl")


def test_a_function_gives_the_rewards_of_online_grpo(tmp_path):
    flags = ["--online", "--reward-model", "", "--round-prompts", "64", "--max-new-tokens", "20"]
    steps, samples = run_with_example(
        tmp_path, "grpo_humanline.py", "grpo.md", "SCORE = short", r"^SCORE = None\n", *flags
    )
    for sample in samples:
        assert sample["reward"] == pytest.approx(sample["finished"] - 0.1 * sample["tokens"], abs=1e-6)
    assert len({sample["reward"] for sample in samples}) > 1 and steps[0]["grad_norm"] > 0


def test_a_function_reads_another_column_of_the_row(tmp_path):
    words = [["rose"], ["iris", "lily"], ["fern", "rose", "tulip"], ["daisy"]]
    rows = [{"prompt": f"for {name}", "words": w} for name, w in zip(("king", "queen", "boy", "girl"), words)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    flags = ["--online", "--model", str(ROOT / "toy/bouquets/policy"), "--dataset", data]
    flags += ["--eval-dataset", data, "--round-prompts", "4", "--batch-size", "4", "--max-new-tokens", "12"]
    _, samples = run_with_example(
        tmp_path, "grpo_humanline.py", "grpo.md", "SCORE = has_words", r"^SCORE = None\n", *flags
    )
    by_prompt = {row["prompt"]: row["words"] for row in rows}
    for sample in samples:
        assert sample["reward"] == sum(word in sample["sample"] for word in by_prompt[sample["prompt"]])
    assert any(sample["reward"] for sample in samples)


def test_a_function_grades_in_grpo_math(tmp_path):
    flags = ["--prompts-per-step", "4", "--model", ROOT / "toy/shell_game/policy", "--system-prompt", ""]
    rows = read_rows(ROOT / "toy/shell_game/problems_train.jsonl.gz")[:16]
    text = "".join(f'{{"problem": "{row["problem"]}", "answer": "{row["answer"]}"}}\n' for row in rows)
    (tmp_path / "data.jsonl").write_text(text)
    flags += ["--dataset", "data.jsonl", "--eval-dataset", "data.jsonl", "--max-new-tokens", "16"]
    _, samples = run_with_example(
        tmp_path, "grpo_math_humanline.py", "grpo_math.md", "GRADE =", r"^GRADE = .*?\n", *map(str, flags)
    )
    # No sample of the toy ends with "= N", so nothing is right, and only the format is rewarded.
    assert len(samples) == 16 and max(sample["reward"] for sample in samples) <= 2
