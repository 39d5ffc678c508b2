"""What a resumed run sends to TensorBoard and, with --track, to W&B: files of both, without a network."""

import json

import numpy as np
import pytest
from conftest import PAIRS, TOY, metrics, refused, run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SHORT = ["--dataset", PAIRS, "--eval-dataset", f"{TOY}/prompts_test.jsonl.gz", "--eval-samples", "8"]


def test_a_resumed_run_is_one_run_in_tensorboard_and_in_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    folder = tmp_path / "tracked"
    run_ranks(1, [[*SHORT, "--track", "--num-steps", "3", "--output-dir", str(folder)]])
    run_ranks(1, [["--resume", str(folder), "--num-steps", "5"]])
    before, after = json.loads((folder / "summary.json").read_text()).values()
    events = EventAccumulator(str(folder)).Reload()
    values = {(event.step, event.value) for event in events.Scalars("eval/reward")}
    assert values == {(0, np.float32(before["eval/reward"][0])), (5, np.float32(after["eval/reward"][0]))}
    for key in ("loss", "grad_norm", "rewards/margins"):
        found = [event.value for event in events.Scalars(key)]
        assert found == pytest.approx([step[key] for step in metrics(folder)], rel=1e-6)
        values |= {(event.step, event.value) for event in events.Scalars(key)}

    # W&B's file of each process has its numbers as text.
    first, second = sorted(tmp_path.glob("wandb/offline-*/run-*.wandb"), key=lambda path: path.parent.name)
    assert first.name == second.name
    for step, value in values:
        assert str(np.float32(value)).encode() in (first if step < 3 else second).read_bytes()


def test_folders_of_one_name_are_two_runs_and_what_wandb_says_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = ["--dataset", PAIRS, "--eval-samples", "0", "--track", "--num-steps", "1"]
    for folder in ("lr:1/seed", "lr:2/seed"):
        run_ranks(1, [[*flags, "--output-dir", str(tmp_path / folder)]])
    assert len({path.name for path in tmp_path.glob("wandb/offline-*/run-*.wandb")}) == 2
    monkeypatch.setenv("WANDB_MODE", "none such")
    assert refused([*flags, "--output-dir", str(tmp_path / "run")]).startswith("error: --track: ")
