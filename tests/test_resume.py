"""A run killed at any moment and resumed continues as if nothing had happened."""

import json
import signal
import time

import pytest
import torch.distributed.checkpoint as dcp
from conftest import PAIRS, finish, metrics, run_ranks, start_ranks

STEPS = 14
RUN = ["--num-steps", str(STEPS), "--k", "3", "--batch-size", "8", "--checkpoint-every", "5", "--eval-samples", "8"]
RUN += ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--max-new-tokens", "12"]


def kill_when(ranks, arguments, moment, worker="worker.py"):
    """SIGKILL for every rank as soon as `moment()` is true."""
    processes = start_ranks(ranks, [arguments], worker)
    deadline = time.time() + 120
    while not moment() and any(process.is_alive() for process in processes) and time.time() < deadline:
        time.sleep(0.002)
    for process in processes:
        process.kill()
    finish(processes)
    assert any(process.exitcode == -signal.SIGKILL for process in processes), "it ended before it could be killed"


def lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """{ranks: folder of a whole run}"""
    folder = tmp_path_factory.mktemp("whole")
    for ranks in (1, 2):
        run_ranks(ranks, [[*RUN, "--output-dir", str(folder / str(ranks))]])
    return {ranks: folder / str(ranks) for ranks in (1, 2)}


@pytest.mark.parametrize(("ranks", "at"), [(1, "before the first step"), (1, 2), (1, 13), (2, 7)])
def test_killed_and_resumed_equals_uninterrupted(uninterrupted, tmp_path, ranks, at):
    whole = uninterrupted[ranks]
    folder = tmp_path / "run"
    arguments = [*RUN, "--output-dir", str(folder)]
    started = (folder / "args.json").exists
    kill_when(ranks, arguments, started if at == "before the first step" else lambda: lines(folder) >= at)
    run_ranks(ranks, [[*arguments, "--resume"]])
    assert metrics(folder, without_perf=True) == metrics(whole, without_perf=True)
    assert (folder / "summary.json").read_text() == (whole / "summary.json").read_text()
    weights = "final/model.safetensors"
    assert (folder / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.parametrize("ranks", [2])
def test_a_write_that_is_interrupted_leaves_no_checkpoint_that_loads(uninterrupted, tmp_path, ranks):
    whole = uninterrupted[ranks]
    folder = tmp_path / "run"
    arguments = [*RUN, "--output-dir", str(folder)]
    torn = folder / "checkpoints" / "step-10.tmp"
    kill_when(ranks, arguments, lambda: (torn / "__0_0.distcp").exists() or (folder / "checkpoints/step-10").exists())
    assert (folder / "checkpoints" / "step-5" / "state.json").exists()
    run_ranks(ranks, [[*arguments, "--resume"]])
    assert metrics(folder, without_perf=True) == metrics(whole, without_perf=True)
    assert not torn.exists() and (folder / "checkpoints" / "step-10" / "state.json").exists()


def test_a_run_resumes_on_another_number_of_ranks(uninterrupted, tmp_path):
    folder, whole = tmp_path / "run", uninterrupted[1]
    kill_when(2, [*RUN, "--output-dir", str(folder)], lambda: lines(folder) >= 7)
    run_ranks(1, [[*RUN, "--output-dir", str(folder), "--resume"]])
    for a, b in zip(metrics(whole), metrics(folder), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5) and b["grad_norm"] == pytest.approx(
            a["grad_norm"], rel=1e-5
        )


def test_a_checkpoint_holds_reference_moments_and_position(uninterrupted):
    folder = uninterrupted[2] / "checkpoints" / "step-10"
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {name.split(".")[0] for name in names} == {"policy", "optimizer", "reference"}
    assert any(name.startswith("reference.lm_head") for name in names)
    assert any(name.endswith("exp_avg_sq") for name in names)
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 10 and state["last_sync"] == 9
