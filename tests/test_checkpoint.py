"""support/checkpoint.py: a run that ends at any moment loses nothing, and resumes exactly."""

import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    PAIRS,
    ROOT,
    TOY,
    finish,
    free_port,
    metrics,
    read_checkpoint,
    run_main,
    run_ranks,
    start_ranks,
)

import grpo_humanline
import grpo_math_humanline
import utils
from support import checkpoint, grading
from utils import Example, InputError

STEPS = 14
RUN = f"--num-steps {STEPS} --k 3 --batch-size 8 --checkpoint-every 5 --eval-samples 2 --max-new-tokens 12"
DPO = [*RUN.split(), "--dataset", PAIRS, "--eval-dataset", PAIRS, "--warmup-fraction", "0"]
LABELLED = [
    *RUN.split(),
    "--dataset",
    PAIRS,
    "--eval-dataset",
    PAIRS,
    "--model",
    str(TOY / "policy"),
]
LABELLED += ["--reward-model", str(TOY / "reward_model"), "--lr", "1e-3", "--warmup-fraction", "0.5"]
MATH = "--num-steps 6 --sample-every 3 --prompts-per-step 4 --group-size 4 --k 2 --checkpoint-every 2"
FLAGS = {
    "dpo_humanline": DPO,
    "kto_humanline": LABELLED,
    "grpo_humanline": [*LABELLED, "--online", "--round-prompts", "10", "--temperature", "1"],
    "grpo_math_humanline": [*MATH.split(), "--eval-samples", "4"],
}
KILL, TERM, INT, HUP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def lines(folder) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def assert_same(folder, whole):
    assert metrics(folder, without_perf=True) == metrics(whole, without_perf=True)
    for file in ("summary.json", "final/model.safetensors"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file


def steps_saved(folder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint.find_checkpoints(folder)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Makes, once, the run that nothing ended. Returns its folder."""

    @cache
    def folder(script="dpo_humanline", ranks=1):
        folder = tmp_path_factory.mktemp(script) / "run"
        run_ranks(ranks, [[*FLAGS[script], "--output-dir", str(folder)]], script=script)
        return folder

    return folder


@pytest.fixture
def copy(uninterrupted, tmp_path):
    """A copy of the whole DPO run, to break."""
    return shutil.copytree(uninterrupted(), tmp_path / "run")


# === Ends from outside ===

slow = pytest.mark.slow
KILLS = [("dpo", 1, TERM)]
for case in [("dpo", 2, KILL), ("dpo", 2, INT), ("kto", 1, INT), ("grpo", 1, TERM), ("grpo_math", 2, TERM)]:
    KILLS.append(pytest.param(*case, marks=slow))


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
    outputs = finish(processes, timeout=200)
    codes = [process.exitcode for process in processes]
    assert codes in ([0] * ranks, [-9 if number == KILL else 128 + number] * ranks), outputs
    if codes[0] > 0:
        assert f" steps; to resume, pass --resume {folder}\n" in outputs[0]
        assert steps_saved(folder)[0] == lines(folder)
    run_ranks(ranks, [["--resume", str(folder)]], script=script)
    assert_same(folder, whole)


@pytest.mark.slow
def test_a_write_that_is_interrupted_leaves_no_checkpoint_that_loads(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    torn = folder / "checkpoints" / "unfinished"
    processes = start_ranks(2, [[*DPO, "--output-dir", str(folder)]])
    while 5 not in steps_saved(folder) and processes[0].is_alive():
        time.sleep(0.001)
    while not (torn / "__0_0.distcp").exists() and 10 not in steps_saved(folder) and processes[0].is_alive():
        time.sleep(0.001)
    for process in processes:
        process.kill()
    finish(processes)
    assert 5 in steps_saved(folder)
    run_ranks(2, [["--resume", str(folder)]])
    assert_same(folder, uninterrupted(ranks=2))
    assert not torn.exists()


@pytest.mark.slow
def test_a_signal_under_torchrun_lets_the_step_finish_and_says_how_to_resume(tmp_path):
    """Processes as users start them, and the signal as a terminal sends it: to the whole process group."""
    folder, launch = tmp_path / "run", ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "--master-port", str(free_port())]
    command += [ROOT / "dpo_humanline.py", *DPO, "--output-dir", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **pipes) as process:
        while lines(folder) < 2 and process.poll() is None:
            time.sleep(0.002)
        os.killpg(process.pid, INT)
        output, errors = process.communicate(timeout=200)
    done = lines(folder)
    assert f"stopped after {done} steps; to resume, pass --resume {folder}" in output.splitlines()
    assert 2 <= done < STEPS and steps_saved(folder)[0] == done
    assert 'dpo_humanline.py", line' not in errors  # no traceback but that of torchrun


@pytest.mark.slow
def test_a_second_signal_ends_a_run_within_its_step(tmp_path):
    """The first one was followed by minutes of sampling, and every further one was swallowed."""
    folder = tmp_path / "run"
    (process,) = start_ranks(1, [[*DPO, "--output-dir", str(folder)]], run_with_endless_step)
    while lines(folder) < 2 and process.is_alive():
        time.sleep(0.002)
    time.sleep(0.5)
    os.kill(process.pid, INT)
    time.sleep(2.5)
    os.kill(process.pid, INT)
    (output,) = finish([process], timeout=30)
    assert process.exitcode == 128 + INT and "stopping after this step" in output


@pytest.mark.parametrize("number", [TERM, HUP])
def test_a_scheduler_and_torchrun_may_both_send_a_signal(number, tmp_path):
    """Slurm sends one to every process, and torchrun another to its ranks: no checkpoint was written."""
    folder = tmp_path / "run"
    (process,) = start_ranks(1, [[*DPO, "--num-steps", "5000", "--output-dir", str(folder)]])
    while lines(folder) < 2 and process.is_alive():
        time.sleep(0.002)
    for _ in range(3):
        os.kill(process.pid, number)
        time.sleep(0.02)
    (output,) = finish([process])
    assert process.exitcode == 128 + number and steps_saved(folder)[0] == lines(folder)


def run_with_judge(script, arguments):
    """Is a worker: in call SIGNAL_AT of the judge, Ctrl-C also ends its programs, so their samples get 0."""
    calls = []

    def judge(*arguments):
        calls.append(arguments)
        if str(len(calls)) == os.environ.get("SIGNAL_AT"):
            signal.raise_signal(INT)
            return [0.0] * len(arguments[-1])
        if script is grpo_math_humanline:
            return grade_all(*arguments)
        return [len(set(sample.text)) for sample in arguments[0]]

    grade_all = grading.grade_all
    if script is grpo_math_humanline:
        grading.grade_all = judge
    else:
        script.SCORE = judge
    run_main(script, arguments)


JUDGED = "--num-steps 4 --eval-every 2 --eval-samples 2 --k 2 --max-new-tokens 12 --checkpoint-every 0"
JUDGES = {  # the flags, and the checkpoint that a signal leaves in this call of the judge
    # an evaluation, a round, an evaluation after two steps, a round, an evaluation after training
    "dpo_humanline": (
        "--online --batch-size 4 --round-prompts 8 --temperature 1",
        {2: [], 3: [2], 5: [4]},
    ),
    # the gold answers of two files, an evaluation, a round, and so on
    "grpo_math_humanline": ("--sample-every 2 --prompts-per-step 4 --group-size 4", {6: [2]}),
}


@pytest.mark.parametrize("script", JUDGES)
def test_a_reward_that_was_under_way_when_a_signal_came_is_not_used(script, tmp_path, monkeypatch):
    """Its zeros entered the step, the pool and the checkpoint. The last evaluation ended with status 0."""
    whole = tmp_path / "whole"
    flags = [*JUDGED.split(), *JUDGES[script][0].split(), "--output-dir"]
    run_ranks(1, [[*flags, str(whole)]], run_with_judge, script)
    for call, saved in JUDGES[script][1].items():
        folder = tmp_path / str(call)
        monkeypatch.setenv("SIGNAL_AT", str(call))
        (process,) = start_ranks(1, [[*flags, str(folder)]], run_with_judge, script)
        finish([process])
        assert process.exitcode == 128 + INT and steps_saved(folder) == saved
        monkeypatch.delenv("SIGNAL_AT")
        run_ranks(1, [["--resume", str(folder)]], run_with_judge, script)
        assert_same(folder, whole)


def run_with_endless_step(script, arguments):
    def clip_log_ratio(args, log_ratio):
        deadline = time.monotonic() + (100 if lines(run_folder(arguments)) >= 2 else 0)
        while time.monotonic() < deadline:
            pass
        return log_ratio

    script.clip_log_ratio = clip_log_ratio
    run_main(script, arguments)


def run_folder(arguments):
    flag = "--output-dir" if "--output-dir" in arguments else "--resume"
    return checkpoint.Path(arguments[arguments.index(flag) + 1])


# === Errors in the loop (the loop has one exit) ===


def run_with_error(script, arguments):
    """Is a worker: in the step or round that ERROR names, an edited function raises."""
    where, kind = os.environ["ERROR"].split()
    error = {"ValueError": ValueError, "SystemExit": SystemExit}[kind](0)
    folder = run_folder(arguments)

    def clip_log_ratio(args, log_ratio):
        if where == "metric" and lines(folder) == 7:
            raise error
        return original(args, log_ratio)

    class HeadLogps(utils.HeadLogps):
        @staticmethod
        def backward(ctx, *gradients):
            if where in ("backward", f"backward{os.environ.get('RANK')}") and lines(folder) == 7:
                raise error
            return utils_head.backward(ctx, *gradients)

    def judge(samples):
        if where == "judge" and lines(folder) >= 7:
            raise error
        if where == "equal" and lines(folder) >= 7:
            return [1.0] * len(samples)
        return [len(set(sample.text)) for sample in samples]

    class AdamW(torch.optim.AdamW):
        def step(self):
            if where == "update" and lines(folder) == 7:
                with torch.no_grad():  # a part of the update
                    self.param_groups[0]["params"][0].mul_(2)
                raise error
            super().step()

    original, script.clip_log_ratio = script.clip_log_ratio, clip_log_ratio
    utils_head, utils.HeadLogps = utils.HeadLogps, HeadLogps
    torch.optim.AdamW = AdamW
    if script is grpo_humanline:
        script.SCORE = judge
        at = arguments.index("--reward-model")
        del arguments[at : at + 2]
    run_main(script, arguments)


@pytest.mark.slow
def test_an_error_of_one_rank_alone_ends_all_ranks(tmp_path, monkeypatch):
    """If it was not rank 0's, the rank waited half an hour, and said nothing."""
    for bad in "01":
        monkeypatch.setenv("ERROR", f"backward{bad} ValueError")
        folder = tmp_path / bad
        flags = [*DPO, "--eval-samples", "0", "--output-dir", str(folder)]
        processes = start_ranks(2, [flags], run_with_error)
        outputs = finish(processes, timeout=100)
        assert [process.exitcode for process in processes] == [1, 1], outputs
        assert "ValueError" in outputs[int(bad)] and steps_saved(folder) == [5]


@pytest.mark.slow
def test_an_error_within_an_update_saves_no_step(tmp_path, monkeypatch, uninterrupted):
    """Its weights belong to no step. The checkpoint before it resumes."""
    monkeypatch.setenv("ERROR", "update ValueError")
    folder = tmp_path / "run"
    (process,) = start_ranks(1, [[*DPO, "--output-dir", str(folder)]], run_with_error)
    finish([process])
    assert process.exitcode == 1 and steps_saved(folder) == [5]
    run_ranks(1, [["--resume", str(folder)]])
    assert_same(folder, uninterrupted())


# === Resuming ===


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_ranks(uninterrupted, tmp_path):
    flags = [*DPO, "--num-steps", "7", "--shard-size", "1", "--output-dir", str(tmp_path / "run")]
    run_ranks(2, [flags])
    run_ranks(1, [["--resume", str(tmp_path / "run"), "--shard-size", "0", "--num-steps", str(STEPS)]])
    for a, b in zip(metrics(uninterrupted()), metrics(tmp_path / "run"), strict=True):
        assert (b["loss"], b["grad_norm"]) == pytest.approx((a["loss"], a["grad_norm"]), rel=1e-5)


@pytest.mark.slow
def test_a_finished_run_goes_on_even_in_a_folder_that_was_moved(uninterrupted, tmp_path):
    folder = tmp_path / "moved"
    run_ranks(1, [[*DPO, "--num-steps", "6", "--output-dir", str(tmp_path / "run")]])
    (tmp_path / "run").rename(folder)
    before = metrics(folder)
    output = run_ranks(1, [["--resume", str(folder), "--num-steps", str(STEPS)]])
    assert_same(folder, uninterrupted())
    assert f"6 steps are done: resumes from {folder}/checkpoints/step-000006\n" in output
    assert metrics(folder)[:6] == before  # with the seconds that each took: no step was done again
    assert steps_saved(folder) == [14, 10]


def weights_and_moments(folder, step: int) -> list:
    """Returns all weights of a checkpoint's policy, one behind the other, and AdamW's two moments of them."""
    state = read_checkpoint(folder, step)
    parts = []
    for name in state["policy"]:
        moments = state["optimizer"]["state"][name]
        parts.append([state["policy"][name], moments["exp_avg"], moments["exp_avg_sq"]])
    return [torch.cat([part.flatten() for part in column]).double() for column in zip(*parts)]


def test_flags_beside_resume_win_and_are_recorded(tmp_path):
    """The step after the resume is AdamW's by hand: its gradient is what the moments show."""
    folder = tmp_path / "run"
    run_ranks(1, [[*DPO, "--num-steps", "2", "--output-dir", str(folder)]])
    before = json.loads((folder / "args.json").read_text())
    assert {"torch", "transformers"} == before["versions"].keys()
    lr, eps, decay = 1e-2, before["adam_eps"], before["weight_decay"]
    run_ranks(1, [["--resume", str(folder), "--lr", str(lr), "--num-steps", "3"]])
    changed = {"lr": lr, "num_steps": 3, "resume": str(folder)}
    assert json.loads((folder / "args.json").read_text()) == before | changed

    weights, m, v = weights_and_moments(folder, 2)
    found, next_m, next_v = weights_and_moments(folder, 3)
    gradient = (next_m - 0.9 * m) / 0.1
    assert torch.allclose(next_v, 0.999 * v + 0.001 * gradient**2, rtol=1e-4, atol=1e-12)
    update = next_m / (1 - 0.9**3) / ((next_v / (1 - 0.999**3)).sqrt() + eps)
    assert (found - (weights - lr * decay * weights - lr * update)).abs().max() < 1e-6
    assert (found - weights).abs().max() > 1e-3


class OddAdamW(torch.optim.AdamW):
    """Keeps a moment in bf16, a number beside the tensors, and a setting that changes, as Prodigy's d."""

    def step(self, closure=None):
        super().step()
        group = self.param_groups[0]
        group["d"] = group.get("d", 1.0) * 1.5
        for weight in group["params"]:
            state = self.state[weight]
            state["calls"] = state.get("calls", 0) + 1
            state["trace"] = torch.full_like(weight, state["calls"] / 3, dtype=torch.bfloat16)


def run_with_odd_optimizer(script, arguments):
    torch.optim.AdamW = OddAdamW
    run_main(script, arguments)


def test_the_state_of_another_optimizer_comes_back_as_it_was(tmp_path):
    """Schedule-free's counters were reset, and states in bf16 became fp32."""
    folder = tmp_path / "run"
    flags = [*DPO, "--num-steps", "3", "--eval-dataset", "", "--output-dir", str(folder)]
    run_ranks(1, [flags], run_with_odd_optimizer)
    run_ranks(1, [["--resume", str(folder), "--num-steps", "5"]], run_with_odd_optimizer)
    optimizer = read_checkpoint(folder, 5)["optimizer"]
    assert optimizer["param_groups"][0]["d"] == pytest.approx(1.5**5)
    for state in optimizer["state"].values():
        assert state["calls"] == 5 and state["trace"].dtype == torch.bfloat16


class PartialAdamW(torch.optim.AdamW):
    """Trains the last weight alone, whose update has noise."""

    def __init__(self, weights, **settings):
        super().__init__(list(weights)[-1:], **settings)

    def step(self, closure=None):
        self.param_groups[0]["params"][0].grad.to_local().mul_(torch.rand(()) + random.random())
        super().step()


class LearnedBeta(torch.optim.AdamW):
    """Also trains a number that is no weight of the policy."""

    def __init__(self, weights, **settings):
        super().__init__([*weights, torch.nn.Parameter(torch.zeros(()))], **settings)


class LateAdamW(torch.optim.AdamW):
    """Creates a further state in its second step."""

    def step(self, closure=None):
        if weight := next(iter(self.state), None) is not None:
            weight = self.param_groups[0]["params"][0]
            self.state[weight].setdefault("average", weight.detach().clone())
        super().step()


def run_with_optimizer(script, arguments):
    torch.optim.AdamW = globals()[os.environ["OPTIMIZER"]]
    run_main(script, arguments)


def test_a_step_leaves_no_gradient_behind_and_a_resumed_one_draws_the_same_numbers(tmp_path, monkeypatch):
    """Gradients of weights that the optimizer lacks added up, and the resumed run drew the first numbers."""
    monkeypatch.setenv("OPTIMIZER", "PartialAdamW")
    flags = [*DPO, "--eval-dataset", "", "--checkpoint-every", "2", "--lr", "1e-6", "--num-steps"]
    run_ranks(1, [[*flags, "4", "--output-dir", str(tmp_path / "whole")]], run_with_optimizer)
    run_ranks(1, [[*flags, "2", "--output-dir", str(tmp_path / "run")]], run_with_optimizer)
    run_ranks(1, [["--resume", str(tmp_path / "run"), "--num-steps", "4"]], run_with_optimizer)
    assert metrics(tmp_path / "run", True) == metrics(tmp_path / "whole", True)
    norms = [step["grad_norm"] for step in metrics(tmp_path / "whole")]
    assert max(norms) < 1.5 * min(norms)


@pytest.mark.parametrize(("optimizer", "steps"), [("LearnedBeta", 1), ("LateAdamW", 3)])
def test_a_state_that_cannot_be_restored_ends_the_run(optimizer, steps, tmp_path, monkeypatch):
    """It ended at the first checkpoint, a hundred steps later, or was lost without a word."""
    monkeypatch.setenv("OPTIMIZER", optimizer)
    folder = tmp_path / "run"
    flags = [*DPO, "--eval-dataset", "", "--num-steps", "3"]
    runs = [[*flags, "--output-dir", str(folder)], ["--resume", str(folder), "--num-steps", "4"]]
    (process,) = start_ranks(1, runs, run_with_optimizer)
    (output,) = finish([process])
    assert process.exitcode == 1 and lines(folder) == steps
    assert {"LearnedBeta": "KeyError", "LateAdamW": "has no place for"}[optimizer] in output


def run_with_average(script, arguments):
    """Is a worker: a user's edit adds a tensor to the checkpoint, which begins at -7."""
    original = checkpoint.training_state

    def training_state(policy, reference, optimizer, progress):
        return original(policy, reference, optimizer, progress) | {"average": torch.tensor(-7.0)}

    checkpoint.training_state = training_state
    run_main(script, arguments)


@pytest.mark.slow
def test_what_a_checkpoint_lacks_is_named(copy):
    """The tensor kept its initial value without a word."""
    (process,) = start_ranks(1, [["--resume", str(copy), "--num-steps", "15"]], run_with_average)
    (output,) = finish([process])
    assert process.exitcode == 1 and "Missing key in checkpoint state_dict: average" in output


def contents(folder) -> dict:
    """Returns the bytes of all files but the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in files}


# === What stays on the disk ===


@pytest.fixture
def save(one_rank, tmp_path, monkeypatch):
    """Writes a checkpoint with a pool, and no weights."""
    monkeypatch.setattr(checkpoint, "training_state", lambda *state: {"progress": (vars(state[3]),)})
    empty = torch.nn.Module()

    def save(step, pool=(), keep=2):
        progress = checkpoint.Progress(step=step, pool=list(pool))
        args = SimpleNamespace(keep_checkpoints=keep)
        checkpoint.save_checkpoint(args, tmp_path, empty, empty, None, progress)

    return save


def test_the_pool_of_a_checkpoint_is_exact(save, tmp_path):
    turns = [{"role": "system", "content": ""}, {"role": "user", "content": "ünïcode \n\0 \U0001f339"}]
    few = [Example("", [1], [], reward=reward) for reward in (math.nan, math.inf, -0.0, 1e-320, 1 / 3)]
    odd = [Example(turns, [1, 2], [3], {1: {2}}, 0.1 + 0.2, True, "text", False), Example(turns, [7], [8, 9])]
    for step, pool in enumerate(([], [tuple(few)], [tuple(odd), (odd[1],)]), 1):
        save(step, pool)
        assert repr(read_checkpoint(tmp_path, step)["progress"][0]["pool"]) == repr(pool)  # nan is not nan


def test_a_finished_run_without_checkpoints_is_not_begun_anew(one_rank, tmp_path):
    """Its curves were gone, and it trained from step 0."""
    assert checkpoint.load_checkpoint(tmp_path, None, None, None).step == 0  # a run that was killed early
    (tmp_path / "summary.json").touch()
    with pytest.raises(InputError, match="the run has ended, and its checkpoints are not there any more"):
        checkpoint.load_checkpoint(tmp_path, None, None, None)


def test_the_newest_checkpoints_stay(save, tmp_path):
    for step in (5, 10, 15):
        save(step, keep=0)
    assert steps_saved(tmp_path) == [15, 10, 5]
    save(100)
    assert steps_saved(tmp_path) == [100, 15]


def test_nothing_complete_is_deleted_before_its_successor_has_its_name(save, tmp_path, monkeypatch):
    """On a network disk the rename failed, and the checkpoint before was gone already."""
    save(5, keep=1)
    before = contents(tmp_path)

    original = checkpoint.Path.rename

    def fail(path, target):
        if target.name.startswith("step-"):
            raise OSError("stale file handle")
        return original(path, target)

    monkeypatch.setattr(checkpoint.Path, "rename", fail)
    with pytest.raises(OSError, match="stale"):
        save(10, keep=1)
    kept = {path: content for path, content in contents(tmp_path).items() if "unfinished" not in str(path)}
    assert kept == before


@pytest.mark.slow
def test_a_disk_that_is_full_ends_all_ranks_and_the_last_checkpoint_resumes(tmp_path):
    folder = tmp_path / "run"
    flags = [*DPO, "--num-steps", "2000", "--checkpoint-every", "4", "--output-dir", str(folder)]
    processes = start_ranks(2, [flags])
    while 4 not in steps_saved(folder) and processes[0].is_alive():
        time.sleep(0.002)
    for process in processes:  # bytes of a file, too few for a shard
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (200_000, 200_000))
    finish(processes)
    assert [process.exitcode for process in processes] == [1, 1]
    done = steps_saved(folder)[0]
    run_ranks(1, [["--resume", str(folder), "--num-steps", str(done + 2)]])
    assert lines(folder) == done + 2
