"""A run that ends at any moment, or is finished, goes on as if nothing had happened."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PAIRS, ROOT, TOY, finish, free_port, metrics, read_pool, refused, run_ranks, start_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from support.run import Progress, save_checkpoint
from utils import Example

STEPS = 14
RUN = ["--num-steps", str(STEPS), "--k", "3", "--batch-size", "8", "--checkpoint-every", "5"]
RUN += ["--eval-samples", "2", "--max-new-tokens", "12", "--dataset", PAIRS, "--eval-dataset", PAIRS]
DPO = [*RUN, "--warmup-fraction", "0"]
KTO = [*RUN, "--model", str(TOY / "policy"), "--reward-model", str(TOY / "reward_model")]
KTO += ["--lr", "1e-3", "--warmup-fraction", "0.5"]
MATH = ["--num-steps", "6", "--sample-every", "3", "--prompts-per-step", "4", "--group-size", "4", "--k", "2"]
MATH += ["--checkpoint-every", "2", "--eval-samples", "4"]
FLAGS = {
    "dpo_humanline": DPO,
    "kto_humanline": KTO,
    "grpo_humanline": [*KTO, "--online", "--round-prompts", "10", "--temperature", "1"],
    "grpo_math_humanline": MATH,
}
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT


def lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def same(folder, whole):
    assert metrics(folder, without_perf=True) == metrics(whole, without_perf=True)
    for file in ("summary.json", "final/model.safetensors"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Makes, once, the run that nothing ended; returns its folder."""

    @cache
    def folder(script="dpo_humanline", ranks=1):
        folder = tmp_path_factory.mktemp(script) / "run"
        run_ranks(ranks, [[*FLAGS[script], "--output-dir", str(folder)]], script=script)
        return folder

    return folder


KILLS = [("dpo", 1, KILL), ("dpo", 2, KILL), ("kto", 1, INT), ("kto", 2, KILL)]
KILLS += [("grpo", 1, TERM), ("grpo", 2, INT), ("grpo_math", 2, TERM)]


@pytest.mark.parametrize(("method", "ranks", "number"), KILLS)
def test_a_run_ended_at_any_moment_goes_on_as_if_nothing_was(uninterrupted, tmp_path, method, ranks, number):
    """KILL and TERM come to all ranks, as from a scheduler, INT to one: all end after the same step."""
    script, folder = f"{method}_humanline", tmp_path / "run"
    whole = uninterrupted(script, ranks)
    processes = start_ranks(ranks, [[*FLAGS[script], "--output-dir", str(folder)]], script=script)
    moment = random.Random(f"{script} {ranks} {number} {os.environ.get('MOMENTS', '')}")
    first = moment.randint(1, len(metrics(whole)) - 2)
    while lines(folder) < first and processes[0].is_alive():
        time.sleep(0.001)
    time.sleep(moment.uniform(0, 0.3))
    for process in processes[: 1 if number == INT else ranks]:
        if process.is_alive():
            os.kill(process.pid, number)
    outputs = finish(processes, timeout=100)
    codes = [process.exitcode for process in processes]
    assert codes in ([0] * ranks, [-9 if number == KILL else 128 + number] * ranks), outputs
    if codes[0] > 0:
        assert re.search(rf" steps; to resume: python .* --resume {folder}\n", outputs[0])
    if list(folder.glob("checkpoints/step-*")):
        run_ranks(ranks, [["--resume", str(folder)]], script=script)
        same(folder, whole)
    else:  # killed before the first one
        assert "it has no complete checkpoint" in refused(["--resume", str(folder)], script=script)


def test_a_write_that_is_interrupted_leaves_no_checkpoint_that_loads(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    torn = folder / "checkpoints" / "unfinished"
    whole = folder / "checkpoints" / "step-10"
    processes = start_ranks(2, [[*DPO, "--output-dir", str(folder)]])
    while not (folder / "checkpoints" / "step-5").exists() and processes[0].is_alive():
        time.sleep(0.001)
    while not (torn / "__0_0.distcp").exists() and not whole.exists() and processes[0].is_alive():
        time.sleep(0.001)
    for process in processes:
        process.kill()
    finish(processes)
    assert (folder / "checkpoints" / "step-5" / "progress.json").exists()
    run_ranks(2, [["--resume", str(folder)]])
    same(folder, uninterrupted(ranks=2))
    assert not torn.exists() and (whole / "progress.json").exists()


@pytest.mark.parametrize(("ranks", "size"), [(2, "0"), (4, "2")])
def test_a_run_goes_on_on_another_number_of_ranks(uninterrupted, tmp_path, ranks, size):
    first = [*DPO, "--num-steps", "7", "--shard-size", size, "--output-dir", str(tmp_path / "run")]
    run_ranks(ranks, [first])
    run_ranks(1, [["--resume", str(tmp_path / "run"), "--shard-size", "0", "--num-steps", str(STEPS)]])
    for a, b in zip(metrics(uninterrupted()), metrics(tmp_path / "run"), strict=True):
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=1e-5)


def test_a_finished_run_goes_on_even_in_a_folder_that_was_moved(uninterrupted, tmp_path):
    folder = tmp_path / "moved"
    run_ranks(1, [[*DPO, "--num-steps", "6", "--output-dir", str(tmp_path / "run")]])
    (tmp_path / "run").rename(folder)
    before = metrics(folder)
    output = run_ranks(1, [["--resume", str(folder), "--num-steps", str(STEPS)]])
    same(folder, uninterrupted())
    assert f"6 steps are done: resumes from {folder}/checkpoints/step-6\n" in output
    assert metrics(folder)[:6] == before  # with the seconds that each took: no step was done again
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-10", "step-14"}


def test_a_run_that_failed_before_its_first_step_goes_on(tmp_path):
    flags = [*DPO, "--online", "--round-prompts", "20", "--num-steps", "1", "--output-dir", str(tmp_path)]
    assert "no prompt's rewards differ" in refused([*flags, "--reward-threshold", "99"])
    run_ranks(1, [["--resume", str(tmp_path), "--reward-threshold", "0.01"]])
    assert lines(tmp_path) == 1


def test_a_run_without_checkpoints_writes_none_and_cannot_go_on(tmp_path):
    folder = tmp_path / "run"
    run_ranks(1, [[*DPO, "--checkpoint-every", "0", "--num-steps", "3", "--output-dir", str(folder)]])
    assert lines(folder) == 3 and not (folder / "checkpoints").exists()
    said = refused(["--resume", str(folder), "--num-steps", "6"])
    assert said.startswith(f"error: --resume {folder}: it has no complete checkpoint") and lines(folder) == 3


def load(folder, name: str) -> tuple:
    """All weights of a checkpoint's policy, one behind the other, and AdamW's two moments of them."""
    dcp_to_torch_save(folder / name, folder / f"{name}.pt")
    state = torch.load(folder / f"{name}.pt", weights_only=False)
    parts = []
    for key in state["policy"]:
        moments = state["optimizer"]["state"][key]
        parts.append([state["policy"][key], moments["exp_avg"], moments["exp_avg_sq"]])
    return [torch.cat([part.flatten() for part in column]).double() for column in zip(*parts)]


def test_flags_beside_resume_win_are_said_and_are_recorded(tmp_path):
    """The step after the resume is AdamW's by hand: its gradient is what the moments show."""
    folder = tmp_path / "run"
    run_ranks(1, [[*DPO, "--num-steps", "2", "--output-dir", str(folder)]])
    before = json.loads((folder / "args.json").read_text())
    lr, eps, decay = 1e-2, 0.3, 0.5
    flags = ["--lr", str(lr), "--adam-eps", str(eps), "--weight-decay", str(decay), "--num-steps", "3"]
    output = run_ranks(1, [["--resume", str(folder), *flags]])
    assert f"the settings of {folder}; flags: --resume {folder} {' '.join(flags)}" in output.splitlines()
    changed = {"lr": lr, "adam_eps": eps, "weight_decay": decay, "num_steps": 3}
    assert json.loads((folder / "args.json").read_text()) == before | changed

    weights, m, v = load(folder / "checkpoints", "step-2")
    found, next_m, next_v = load(folder / "checkpoints", "step-3")
    gradient = (next_m - 0.9 * m) / 0.1
    assert torch.allclose(next_v, 0.999 * v + 0.001 * gradient**2, rtol=1e-4, atol=1e-12)
    update = next_m / (1 - 0.9**3) / ((next_v / (1 - 0.999**3)).sqrt() + eps)
    assert (found - (weights - lr * decay * weights - lr * update)).abs().max() < 1e-6
    assert (found - weights).abs().max() > 1e-3


def test_a_signal_under_torchrun_lets_the_step_finish_and_says_how_to_go_on(tmp_path):
    """Processes as users start them, and the signal as a terminal sends it: to the whole process group."""
    folder, launch = tmp_path / "run", ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "--master-port", str(free_port())]
    command += [ROOT / "dpo_humanline.py", *DPO, "--output-dir", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **pipes) as process:
        while lines(folder) < 2 and process.poll() is None:
            time.sleep(0.002)
        os.killpg(process.pid, INT)
        output, errors = process.communicate(timeout=120)
    done = lines(folder)
    (stopped,) = [line for line in output.splitlines() if line.startswith("stopped")]
    command = f"torchrun --nproc-per-node 2 {ROOT / 'dpo_humanline.py'} --resume {folder}"
    assert stopped == f"stopped after {done} steps; to resume: {command}"
    assert "(ignore torchrun's traceback)" in output
    assert 2 <= done < STEPS and (folder / "checkpoints" / f"step-{done}" / "progress.json").exists()
    # No traceback but that of torchrun, which ends with its own code.
    assert 'dpo_humanline.py", line' not in errors and process.returncode == 1


def test_ranks_that_outlive_torchrun_keep_the_folder_and_can_be_ended(tmp_path):
    folder, launch = tmp_path / "run", ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "--master-port", str(free_port())]
    command += [ROOT / "dpo_humanline.py", *DPO, "--num-steps", "5000", "--output-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while lines(folder) < 2 and process.poll() is None:
            time.sleep(0.002)
        own = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [int(pid) for pid in own if b"dpo_humanline.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        process.kill()
    assert len(ranks) == 2
    done = lines(folder)
    said = refused(["--resume", str(folder)])
    assert said.startswith(f"error: {folder} (does another process use it?): Timeout: ")
    assert lines(folder) > done  # they go on
    for rank in ranks:
        os.kill(rank, signal.SIGTERM)
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        time.sleep(0.01)
    done = lines(folder)
    run_ranks(1, [["--resume", str(folder), "--num-steps", str(done + 1)]])
    assert lines(folder) == done + 1


def test_no_rank_takes_what_rank_0_writes_for_an_older_run(tmp_path, monkeypatch):
    """Metrics without a checkpoint are a run that cannot go on, so all ranks must have looked for them before
    rank 0 writes some."""
    monkeypatch.setenv("KILL", "find_checkpoints late")
    arguments = [*DPO, "--num-steps", "2", "--eval-dataset", "", "--output-dir", str(tmp_path / "run")]
    run_ranks(2, [arguments], "killing_worker.py")
    assert lines(tmp_path / "run") == 2


# --- what is in a checkpoint, and which ones stay ---


@pytest.fixture
def save(one_rank, tmp_path, monkeypatch):
    """Writes a checkpoint with a pool, and next to no weights."""
    monkeypatch.setattr("support.run.training_state", lambda *_: {"weight": torch.ones(2)})

    def save(step, pool=(), keep=2):
        progress = Progress(data_hash="", step=step, pool=list(pool))
        save_checkpoint(SimpleNamespace(keep_checkpoints=keep), tmp_path, None, None, None, progress)
        return tmp_path / "checkpoints" / f"step-{step}"

    return save


def test_the_pool_of_a_checkpoint_is_exact(save):
    turns = [{"role": "system", "content": ""}, {"role": "user", "content": "ünïcode \n\0 \U0001f339"}]
    few = [Example("", [1], [], reward) for reward in (math.nan, math.inf, -0.0, 1e-320, 1 / 3)]
    odd = [Example(turns, [1, 2], [3], 0.1 + 0.2, True, "text", False, "7"), Example(turns[1:], [7], [8, 9])]
    for pool in ([], [tuple(few)], [tuple(odd), (odd[1],)], [(example,) for example in odd]):
        assert repr(read_pool(save(5, pool))) == repr(pool)  # nan is not nan


def test_the_newest_checkpoints_stay(save, tmp_path):
    for step, keep in ((5, 0), (10, 0), (15, 0)):
        save(step, keep=keep)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3
    save(15)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-10", "step-15"}
    for damaged in ("step-98", "step-99"):  # the run went on from step 15
        (tmp_path / "checkpoints" / damaged).mkdir()
    assert save(20).exists() and (tmp_path / "checkpoints" / "step-15").exists()


def test_a_resumed_run_is_one_run_in_tensorboard(tmp_path):
    folder = tmp_path / "tracked"
    short = ["--dataset", PAIRS, "--eval-dataset", f"{TOY}/prompts_test.jsonl.gz", "--eval-samples", "8"]
    run_ranks(1, [[*short, "--num-steps", "3", "--output-dir", str(folder)]])
    run_ranks(1, [["--resume", str(folder), "--num-steps", "5"]])
    before, after, _ = json.loads((folder / "summary.json").read_text()).values()
    events = EventAccumulator(str(folder)).Reload()
    values = {(event.step, event.value) for event in events.Scalars("eval/reward")}
    assert values == {(0, np.float32(before["eval/reward"][0])), (5, np.float32(after["eval/reward"][0]))}
    for key in ("loss", "grad_norm", "rewards/margins"):
        found = [event.value for event in events.Scalars(key)]
        assert found == pytest.approx([step[key] for step in metrics(folder)], rel=1e-6)


@pytest.mark.parametrize("flag", ["--batch-size", "--seed", "--round-prompts"])
def test_a_resume_that_would_skip_or_repeat_rows_is_refused_in_one_line(uninterrupted, flag, tmp_path):
    script = "grpo_humanline" if flag == "--round-prompts" else "dpo_humanline"  # the first one is online
    folder = shutil.copytree(uninterrupted(script), tmp_path / "run")
    before = (folder / "args.json").read_bytes()
    said = refused(["--resume", str(folder), flag, "16", "--num-steps", "20"], script=script)
    assert said == f"error: {flag} cannot be changed by --resume: the rows of the next steps depend on it\n"
    assert (folder / "args.json").read_bytes() == before
