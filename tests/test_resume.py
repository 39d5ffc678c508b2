"""A run killed at any moment and resumed continues as if nothing had happened."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import PAIRS, ROOT, finish, free_port, metrics, read_pool, run_ranks, start_ranks

from run import Progress, save_checkpoint
from utils import Example

STEPS = 14
RUN = ["--num-steps", str(STEPS), "--k", "3", "--batch-size", "8", "--checkpoint-every", "5"]
RUN += ["--eval-samples", "2"]
RUN += ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--max-new-tokens", "12", "--warmup-fraction", "0.5"]


def kill_when(ranks, arguments, moment, worker="worker.py"):
    """SIGKILL for every rank as soon as `moment()` is true."""
    processes = start_ranks(ranks, [arguments], worker)
    deadline = time.time() + 120
    while not moment() and any(process.is_alive() for process in processes) and time.time() < deadline:
        time.sleep(0.002)
    for process in processes:
        process.kill()
    finish(processes)
    killed = [process for process in processes if process.exitcode == -signal.SIGKILL]
    assert killed, "it ended before it could be killed"


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


def same(folder, whole):
    assert metrics(folder, without_perf=True) == metrics(whole, without_perf=True)
    for file in ("summary.json", "final/model.safetensors"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file


@pytest.mark.parametrize(("ranks", "at"), [(1, 6), (1, 13), (2, 7)])
def test_killed_and_resumed_equals_uninterrupted(uninterrupted, tmp_path, ranks, at):
    folder = tmp_path / "run"
    kill_when(ranks, [*RUN, "--output-dir", str(folder)], lambda: lines(folder) >= at)
    run_ranks(ranks, [["--resume", str(folder)]])
    same(folder, uninterrupted[ranks])


def test_a_write_that_is_interrupted_leaves_no_checkpoint_that_loads(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    arguments = [*RUN, "--output-dir", str(folder)]
    torn = folder / "checkpoints" / "unfinished-step-10"
    whole = folder / "checkpoints" / "step-10"
    kill_when(2, arguments, lambda: (torn / "__0_0.distcp").exists() or whole.exists())
    assert (folder / "checkpoints" / "step-5" / "state.json").exists()
    run_ranks(2, [["--resume", str(folder)]])
    same(folder, uninterrupted[2])
    assert not torn.exists() and (whole / "state.json").exists()


@pytest.mark.parametrize(("ranks", "size"), [(2, "0"), (4, "2")])
def test_a_run_resumes_on_another_number_of_ranks(uninterrupted, tmp_path, ranks, size):
    folder, whole = tmp_path / "run", uninterrupted[1]
    kill_when(ranks, [*RUN, "--shard-size", size, "--output-dir", str(folder)], lambda: lines(folder) >= 7)
    run_ranks(1, [["--resume", str(folder), "--shard-size", "0"]])
    for a, b in zip(metrics(whole), metrics(folder), strict=True):
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=1e-5)


def test_more_steps_extend_a_finished_run_even_in_a_folder_that_was_moved(uninterrupted, tmp_path):
    more = ["--num-steps", "18", "--warmup-fraction", "0.389"]  # the 7 steps of warmup that the first run had
    run_ranks(1, [[*RUN, *more, "--output-dir", str(tmp_path / "whole")]])
    shutil.copytree(uninterrupted[1], tmp_path / "run")
    run_ranks(1, [["--resume", str(tmp_path / "run"), *more]])
    same(tmp_path / "run", tmp_path / "whole")
    for run in ("run", "whole"):
        assert {path.name for path in (tmp_path / run / "checkpoints").iterdir()} == {"step-10", "step-15"}


def test_flags_beside_resume_win_and_are_said_and_recorded(uninterrupted, tmp_path):
    folder = shutil.copytree(uninterrupted[1], tmp_path / "run")
    flags = ["--lr", "1e-4", "--num-steps", "12", "--checkpoint-every", "6"]  # recorded with a checkpoint
    output = run_ranks(1, [["--resume", str(folder), *flags]])
    said = next(line for line in output.splitlines() if line.startswith(f"the settings of {folder}; "))
    assert said.count("--") == 4 + str(folder).count("--")
    assert all(f" {flag}" in said for flag in ("--lr 1e-4", "--num-steps 12", f"--resume {folder}"))
    before, after = (json.loads((f / "args.json").read_text()) for f in (uninterrupted[1], folder))
    assert after == before | {"lr": 1e-4, "num_steps": 12, "checkpoint_every": 6}
    assert [step["lr"] for step in metrics(folder)][8:] == [1e-3, 1e-3, 1e-4, 1e-4]


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGINT), (1, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_signal_lets_the_step_finish_and_the_run_goes_on_from_there(uninterrupted, tmp_path, ranks, number):
    """A process as users start it, and the signal as a terminal sends it: to the whole process group."""
    folder, launch = tmp_path / "run", ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *([*launch, "--master-port", str(free_port())] if ranks > 1 else [])]
    command += [ROOT / "dpo_humanline.py", *RUN, "--output-dir", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **pipes) as process:
        while lines(folder) < 2 and process.poll() is None:
            time.sleep(0.002)
        os.killpg(process.pid, number)
        output, errors = process.communicate(timeout=120)
    done = lines(folder)
    assert [line for line in output.splitlines() if line.startswith("stopped")] == [
        f"stopped after {done} steps; to go on: --resume {folder}"
    ]
    assert 2 <= done < STEPS and (folder / "checkpoints" / f"step-{done}" / "state.json").exists()
    # No traceback but that of torchrun, which ends with its own code.
    assert 'dpo_humanline.py", line' not in errors
    assert process.returncode == (128 + number if ranks == 1 else 1)
    run_ranks(ranks, [["--resume", str(folder)]])
    same(folder, uninterrupted[ranks])


def test_a_checkpoint_holds_reference_moments_and_position(uninterrupted):
    folder = uninterrupted[2] / "checkpoints" / "step-10"
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {name.split(".")[0] for name in names} == {"policy", "optimizer", "reference"}
    assert any(name.startswith("reference.lm_head") for name in names)
    assert any(name.endswith("exp_avg_sq") for name in names)
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 10 and state["last_sync"] == 9


# --- what is in a checkpoint, and which ones stay ---


@pytest.fixture
def save(one_rank, tmp_path, monkeypatch):
    """Writes a checkpoint with a pool, and next to no weights."""
    monkeypatch.setattr("run.training_state", lambda *_: {"weight": torch.ones(2)})

    def run(step, pool=(), keep=0):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        save_checkpoint(folder, None, None, None, Progress(step=step, pool=list(pool)), {}, keep)
        return folder

    return run


def test_the_pool_of_a_checkpoint_is_exact(save):
    turns = [{"role": "system", "content": ""}, {"role": "user", "content": "ünïcode \n\0 \U0001f339"}]
    few = [Example(2**40, "", [1], [], reward) for reward in (math.nan, math.inf, -0.0, 1e-320, 1 / 3)]
    odd = [Example(1, turns, [1, 2], [3], 0.1 + 0.2, "text", False), Example(2, turns[1:], [7], [8, 9])]
    for pool in ([], [tuple(few)], [tuple(odd), (odd[1],)], [(x,) for x in odd]):
        assert repr(read_pool(save(5, pool))) == repr(pool)  # nan is not nan


@pytest.mark.parametrize(("keep", "stay"), [(1, {15}), (2, {10, 15}), (0, {5, 10, 15})])
def test_the_newest_checkpoints_stay(save, tmp_path, keep, stay):
    def left():
        return {int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir()}

    for step in (5, 10, 15):
        save(step, keep=keep)
    assert left() == stay
    (tmp_path / "checkpoints" / "step-99").mkdir()  # damaged: the run went on from step 15
    save(20, keep=keep)
    assert left() == {20, 99} | {1: set(), 2: {15}, 0: stay}[keep]
