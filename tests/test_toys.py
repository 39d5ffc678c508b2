"""Tests the makers of the toys: they write the committed bytes again, and have no circle of imports."""

import subprocess
import sys

import pytest
from conftest import ROOT, read_rows
from transformers import AutoModelForCausalLM

from toy import common, make

TOYS = ROOT / "toy"
FILES = sorted(str(path.relative_to(TOYS)) for path in TOYS.rglob("*.jsonl.gz"))


@pytest.mark.parametrize("name", FILES)
def test_committed_rows_are_written_as_the_same_bytes(name, tmp_path):
    common.write_rows(tmp_path / "rows.jsonl.gz", read_rows(TOYS / name))
    assert (tmp_path / "rows.jsonl.gz").read_bytes() == (TOYS / name).read_bytes()


def test_the_shell_game_is_the_committed_one(tmp_path, monkeypatch):
    """The committed policy replaces the training, which takes minutes."""
    policy = AutoModelForCausalLM.from_pretrained(TOYS / "shell_game" / "policy").eval()
    monkeypatch.setattr(make, "train_language_model", lambda *_, **__: policy)
    make.make_shell_game(tmp_path)
    files = ["problems_train.jsonl.gz", "problems_test.jsonl.gz", "policy/model.safetensors"]
    for name in [
        *files,
        "policy/tokenizer.json",
        "policy/tokenizer_config.json",
        "policy/chat_template.jinja",
    ]:
        assert (tmp_path / name).read_bytes() == (TOYS / "shell_game" / name).read_bytes(), name


def test_no_module_of_the_toys_imports_another_one_but_common():
    for module, other in (("stories", "make"), ("make", "stories")):
        code = f"import sys, toy.{module}; assert 'toy.common' in sys.modules; "
        code += f"assert 'toy.{other}' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
