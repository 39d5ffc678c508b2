"""What a resumed run sends to TensorBoard."""

import json

import numpy as np
import pytest
from conftest import PAIRS, TOY, metrics, run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SHORT = ["--dataset", PAIRS, "--eval-dataset", f"{TOY}/prompts_test.jsonl.gz", "--eval-samples", "8"]


def test_a_resumed_run_is_one_run_in_tensorboard(tmp_path):
    folder = tmp_path / "tracked"
    run_ranks(1, [[*SHORT, "--num-steps", "3", "--output-dir", str(folder)]])
    run_ranks(1, [["--resume", str(folder), "--num-steps", "5"]])
    before, after = json.loads((folder / "summary.json").read_text()).values()
    events = EventAccumulator(str(folder)).Reload()
    values = {(event.step, event.value) for event in events.Scalars("eval/reward")}
    assert values == {(0, np.float32(before["eval/reward"][0])), (5, np.float32(after["eval/reward"][0]))}
    for key in ("loss", "grad_norm", "rewards/margins"):
        found = [event.value for event in events.Scalars(key)]
        assert found == pytest.approx([step[key] for step in metrics(folder)], rel=1e-6)
