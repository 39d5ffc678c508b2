"""Every evaluation is a line with its change, and the last table has the mean change of the rows."""

import importlib
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import PAIRS, TOY, metrics, read_rows, run_ranks
from worker import run_here

import dpo_humanline
import grpo_math_humanline
import utils
from support import run

SHORT = ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--eval-samples", "4", "--max-new-tokens", "4"]
SHORT += ["--engine", "hf", "--num-steps", "4", "--batch-size", "8", "--checkpoint-every", "0"]
CHANGED = r" (-?[\d.]+) \(([+-][\d.]+) ± ([\d.]+)\)"


@pytest.fixture
def evaluations(monkeypatch) -> list:
    """The evaluations of the run that follows."""
    found = []
    evaluate = dpo_humanline.evaluate

    def noted(*arguments):
        found.append(evaluate(*arguments))
        return found[-1]

    monkeypatch.setattr(dpo_humanline, "evaluate", noted)
    return found


def test_a_change_is_that_of_each_row(evaluations, tmp_path, capsys):
    run_here(dpo_humanline, *SHORT, "--eval-every", "2", "--output-dir", tmp_path / "run")
    said = capsys.readouterr().out
    assert [len(found.values["eval/loss"]) for found in evaluations] == [128] * 3
    lines = [line for line in said.splitlines() if line.startswith("after ")]
    assert [line.split(",")[0] for line in lines] == [f"after {step} steps" for step in (0, 2, 4)]
    assert "±" not in lines[0]  # nothing has changed yet
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    before = evaluations[0].values
    for line, found in zip(lines[1:], evaluations[1:]):
        for name, values in found.values.items():
            change = (values - before[name]).double()
            error = change.std().item() / math.sqrt(len(change))
            numbers = [float(number) for number in re.search(name + CHANGED, line).groups()]
            assert numbers == pytest.approx([values.mean().item(), change.mean().item(), error], abs=6e-4)
            if found is evaluations[-1]:
                assert summary["change"][name] == pytest.approx([change.mean().item(), error, len(change)])
                (row,) = re.findall(rf"^{name} .*$", said, re.M)
                assert row.endswith(f"{change.mean():10.3f} ± {error:7.3f}   n = {len(change)}")
    margins = [summary[when]["eval/margin"][0] for when in ("before", "after", "change")]
    assert margins[2] == pytest.approx(margins[1] - margins[0])
    # The error of the difference of two independent means, which the table had to be read with.
    independent = math.hypot(summary["before"]["eval/loss"][1], summary["after"]["eval/loss"][1])
    assert 0 < summary["change"]["eval/loss"][1] <= independent + 1e-12


def test_the_means_of_metrics_are_those_of_the_line(tmp_path):
    output = run_ranks(2, [[*SHORT, "--eval-every", "2", "--output-dir", str(tmp_path / "run")]])
    (line,) = [line for line in output.splitlines() if line.startswith("after 2 steps")]
    step = metrics(tmp_path / "run")[2]
    for name in ("eval/loss", "eval/accuracy", "eval/margin", "eval/length"):
        assert f"{name} {step[name]:.3f} (" in line
    samples = read_rows(tmp_path / "run/samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 4 + [2] * 4 + [4] * 4


def test_a_line_does_not_break_a_progress_bar(tmp_path, monkeypatch, capsys):
    """On a terminal, the bar is cleared before the line and drawn again behind it."""
    monkeypatch.setattr(run, "hide_bar", lambda: False)
    run_here(dpo_humanline, *SHORT, "--eval-every", "2", "--output-dir", tmp_path / "run")
    captured = capsys.readouterr()
    assert "\nafter 2 steps, eval/loss " in captured.out
    frames = captured.err.split("\r")
    drawn = [frame for frame in frames if "/4 [" in frame]
    assert drawn and all("after" not in frame for frame in frames)
    assert any(frame and not frame.strip() for frame in frames)  # the bar was cleared, with spaces
    assert "loss=" in drawn[-1] and "grad_norm=" in drawn[-1]


def test_in_mathematics_the_accuracy_stands_beside_the_loss(tmp_path, capsys):
    flags = ["--engine", "hf", "--num-steps", "1", "--prompts-per-step", "2", "--eval-samples", "0"]
    run_here(grpo_math_humanline, *flags, "--checkpoint-every", "0", "--output-dir", tmp_path / "run")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1 of 1: ")]
    (step,) = metrics(tmp_path / "run")
    accuracy = float(re.search(r"rewards/accuracy=([\d.]+)", line)[1])
    assert accuracy == pytest.approx(step["rewards/accuracy"], abs=1e-3)


def test_an_evaluation_that_is_not_finite_ends_all_ranks_with_one_line(one_rank, tmp_path, monkeypatch):
    """Not rank 0 alone, whose writing the others do not see."""
    monkeypatch.setenv("RANK", "1")
    broken = SimpleNamespace(values={"eval/loss": torch.tensor([1.0, math.nan])}, samples=[])
    with pytest.raises(utils.InputError, match="^eval/loss is not finite"):
        run.Log(SimpleNamespace(num_steps=1), tmp_path, 0, broken)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "humanline: k 16, log-ratios clipped to [-1.5, 1.5]"),
        (["--k", "0", "--log-epsilon-P=-inf"], "humanline: k 0, log-ratios clipped to [-inf, 1.5]"),
        (["--no-humanline"], "humanline: off"),
    ],
)
def test_the_first_screen_says_whether_humanline_is_on(tmp_path, capsys, flags, said):
    flags = [*SHORT, *flags, "--eval-dataset", "", "--num-steps", "1"]
    run_here(dpo_humanline, *flags, "--output-dir", tmp_path / "run")
    assert said in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("dpo_humanline", ["--num-steps", "32"], "training: 32 steps of 8 rows; 128 rows, 2.0 epochs"),
        ("kto_humanline", ["--num-steps", "24"], "training: 24 steps of 4 rows; 128 rows, 0.8 epochs"),
        (
            "grpo_humanline",
            ["--online", "--num-steps", "8"],
            "training: 8 steps of 4 rows; 128 rows",
        ),
    ],
)
def test_the_plan_counts_epochs(script, flags, said, tmp_path, monkeypatch, capsys):
    """The run ends where the plan is complete."""
    module = importlib.import_module(script)

    def stop(*_):
        raise utils.InputError("planned")

    monkeypatch.setattr(module, "evaluate", stop)
    models = ["--model", TOY / "policy", "--reward-model", TOY / "reward_model"]
    with pytest.raises(SystemExit):
        run_here(module, *SHORT, *models, *flags, "--output-dir", tmp_path / "run")
    assert said in capsys.readouterr().out.splitlines()


def test_words_of_a_run_reach_a_file_at_once(monkeypatch):
    """In a batch system, a log file is all that shows how far the run is."""
    flushed = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=lambda _: None, flush=lambda: flushed.append(1)))
    run.print_main("words")
    assert flushed


def test_a_run_without_an_output_stream_goes_on(monkeypatch):
    """With ">&-" Python has no sys.stdout, and print does nothing."""
    monkeypatch.setattr(sys, "stdout", None)
    run.print_main("words")
