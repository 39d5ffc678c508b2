"""A mistake in edited code ends a run with Python's own traceback; bad input ends it with one line."""

import importlib
import traceback

import pytest
import torch
from conftest import SCRIPTS, TOY, run_edited, write_rows
from worker import run_here

from support import sampling

ROWS = [{"prompt": f"for {name}", "chosen": "rose iris", "rejected": "iris"} for name in ("king", "queen")]
SHORT = "--batch-size 2 --num-steps 2 --max-new-tokens 4 --eval-samples 2 --checkpoint-every 0".split()
LOSSES = {"dpo_humanline": "dpo_loss", "kto_humanline": "kto_loss", "grpo_humanline": "grpo_loss"}


@pytest.fixture
def run_with_mistake(tmp_path, monkeypatch):
    """Runs a script in which a function that its user has edited raises an exception. It must come out."""

    def run(script_name: str, owner, function: str, kind, *flags):
        def edited(*arguments, **keywords):
            raise kind("a mistake")

        script = importlib.import_module(script_name)
        monkeypatch.setattr(owner or script, function, edited)
        data = write_rows(tmp_path / "data.jsonl", ROWS)
        data = ["--dataset", data, "--eval-dataset", data, "--reward-model", TOY / "reward_model"]
        model = ["--model", TOY / "policy", "--output-dir", tmp_path / "run"]
        with pytest.raises(kind, match="a mistake") as raised:
            run_here(script, *model, *data, *SHORT, *flags)
        assert "edited" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        return raised.value

    return run


@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_mistake_in_a_loss_keeps_its_traceback(run_with_mistake, script, kind):
    run_with_mistake(script, None, LOSSES[script], kind)


@pytest.mark.parametrize("kind", [ValueError, KeyError, TypeError])
def test_a_mistake_in_encode_row_keeps_its_traceback_and_names_the_row(run_with_mistake, kind, tmp_path):
    error = run_with_mistake("dpo_humanline", None, "encode_row", kind)
    assert error.__notes__ == [f"{tmp_path / 'data.jsonl'}, line 1"]


@pytest.mark.parametrize("kind", [ValueError, KeyError])
@pytest.mark.parametrize("function", ["evaluate", "draw_batch", "clip_log_ratio"])
def test_a_mistake_in_another_function_keeps_its_traceback(run_with_mistake, function, kind):
    run_with_mistake("dpo_humanline", None, function, kind)


@pytest.mark.parametrize("kind", [ValueError, KeyError])
@pytest.mark.parametrize("function", ["sample_round", "best_and_worst"])
def test_a_mistake_in_a_round_keeps_its_traceback(run_with_mistake, function, kind):
    run_with_mistake("kto_humanline", None, function, kind, "--online")


@pytest.mark.parametrize("kind", [ValueError, KeyError])
@pytest.mark.parametrize(("owner", "function"), [(torch.optim.AdamW, "step"), (sampling, "reward_scores")])
def test_a_mistake_in_the_optimizer_or_in_the_scoring_keeps_its_traceback(
    run_with_mistake, owner, function, kind
):
    run_with_mistake("dpo_humanline", owner, function, kind)


def test_the_traceback_of_an_edited_script_ends_at_the_edited_line(tmp_path):
    old = "    return -F.logsigmoid(chosen - rejected)\n"
    ended = run_edited(tmp_path, old, "    return -F.logsigmoid(chosen - rejected)[:, 0]\n")
    assert ended.returncode == 1 and "Traceback" in ended.stderr and "in dpo_loss" in ended.stderr
    assert "IndexError: too many indices" in ended.stderr
    assert "return -F.logsigmoid(chosen - rejected)[:, 0]" in ended.stderr


def test_bad_input_is_one_line_without_a_traceback(tmp_path):
    ended = run_edited(tmp_path, "# === Loss ===", "# === Loss ===", "--max-length", "0")
    assert ended.returncode == 1
    assert ended.stderr == "error: --max-length 0 is out of range\n"


def test_a_command_with_a_broken_file_fails_with_the_message_alone(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt"\n')
    ended = run_edited(tmp_path, "# === Loss ===", "# === Loss ===", "--dataset", path)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"error: {path}, line 1: ")
    assert not (tmp_path / "runs").exists()
