"""benchmark/rollouts.py on the toy: the parts of an online step add up to it, and tokens are those of the samples."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, metrics

RUN = ["--num-steps", "4", "--eval-samples", "8"]
RUNS = {
    "dpo": [*RUN, "--batch-size", "8", "--round-prompts", "24", "--samples-per-prompt", "4"],
    "grpo_math": [*RUN, "--prompts-per-step", "4", "--sample-every", "2"],
}


@pytest.mark.parametrize("script", RUNS)
def test_the_parts_of_an_online_step(script, tmp_path):
    command = [sys.executable, ROOT / "benchmark" / "rollouts.py", "--script", script, "--engine", "hf", "--json"]
    command += [*RUNS[script], "--output-dir", tmp_path / "run"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["hf"]
    steps, rounds = metrics(tmp_path / "run"), found["rounds"]
    assert found["steps"] == 4 and len(rounds) == [step["rollout/age_steps"] for step in steps].count(0)
    assert rounds[0]["samples"] == {"dpo": 24 * 4, "grpo_math": 2 * 4 * 8}[script]
    told = steps[0]["rollout/length_mean"] * rounds[0]["samples"]
    assert rounds[0]["tokens"] == pytest.approx(told) and rounds[0]["seconds"] > 0
    assert found["tokens_per_second"] == rounds[0]["tokens"] / rounds[0]["seconds"]
    parts = {"sampling", "training", "weight update", "engine check", "rest of rounds", "sync"}
    assert parts | {{"dpo": "scoring", "grpo_math": "grading"}[script]} == found["shares"].keys()
    assert sum(found["shares"].values()) == pytest.approx(1) and min(found["shares"].values()) > 0
    assert found["shares"]["sampling"] > 0.1 and found["shares"]["training"] > 0.02
    whole = sum(step["perf/step_time"] for step in steps) / 4
    assert 0.4 * whole < sum(found["per_step"].values()) <= 1.001 * whole
