"""Checkpoints, from which a run resumes bit for bit, on any number of ranks.

What a new algorithm carries from step to step belongs in `training_state`, or in `Progress` if it is numbers,
texts or lists. What is in neither, for example a scheduler or a second reference, does not survive a resume.
"""

import inspect
import os
import pickle
import shlex
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule

from support import data, run
from utils import InputError

# === State ===


@dataclass
class Progress:
    """The state of a run besides its weights and the optimizer's state."""

    data_hash: str  # from `data.hash_groups`; a resumed run must train on the same data
    step: int | None = 0  # completed optimizer steps; None during an update
    round: int = 0  # number of rounds sampled (grpo_math: stays 0)
    pool: list = field(default_factory=list)  # sampled groups that no completed step has used


def training_state(policy, reference, optimizer, progress: Progress) -> dict:
    """Returns what a checkpoint holds: sharded tensors and plain objects, by name.

    Resuming writes into these tensors in place. Of something that only returns copies, such as a scheduler's
    `state_dict()`, `load_checkpoint` must also call `load_state_dict`.

    If the optimizer has made no step, get_optimizer_state_dict first creates its moments.
    """
    return {
        "policy": policy.state_dict(),
        "reference": reference.state_dict(),
        "optimizer": get_optimizer_state_dict(policy, optimizer),
        "progress": (vars(progress),),  # a tuple, because torch would take a dict apart
    }


# === Saving ===

PATIENCE = timedelta(seconds=60)  # how long a rank that has failed waits for the others


@contextmanager
def save_at_exit(args, folder: Path, policy, reference, optimizer, progress: Progress):
    """Saves the last completed step, whatever ends the training loop inside: an error, a signal, or the end.

    After an error, the ranks can save only together, because each holds a part of the weights. If the error
    occurs on one rank alone, the others cannot leave their step, and no checkpoint is written.

    Yields:
        A function that the loop calls after every step. It saves every --checkpoint-every steps, and after
        the last one, from which a run can also continue with a larger --num-steps. After SIGINT or SIGTERM
        on any rank, it saves and ends all ranks.
    """
    save = partial(save_checkpoint, args, folder, policy, reference, optimizer, progress)
    # A group of its own, because an error may have interrupted an exchange of the default group. The group's
    # timeout holds for its creation, too, and rank 0 may come late, after a login of --track.
    dist.barrier()
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    signals = run.Signals()

    def end_step():
        signal_number = max(run.gather(signals.received))  # all ranks must stop after the same step
        every = args.checkpoint_every
        is_last = progress.step == args.num_steps
        if signal_number or is_last or (every > 0 and progress.step % every == 0):
            save()
        if signal_number:
            print_resume_command(folder, progress)
            # With the status that a shell expects. Not sys.exit, which would wait for grpo_math's grader.
            os._exit(128 + signal_number)

    try:
        yield end_step
    except BaseException as error:
        try:
            dist.monitored_barrier(group, PATIENCE)  # on ranks but 0 the group's timeout holds
        except RuntimeError:  # a rank did not come
            raise error from None
        if progress.step:  # neither 0 nor, within an update, None
            save()
            print_resume_command(folder, progress)
        if isinstance(error, SystemExit):  # of an edited function; a run must not end with status 0 here
            raise RuntimeError("a function of the training loop has called exit()") from error
        raise
    finally:
        signals.release()


def print_resume_command(folder: Path, progress: Progress):
    launcher = "python"
    if dist.is_torchelastic_launched():
        local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        launcher = f"torchrun --nproc-per-node {local_ranks}"
        if local_ranks < dist.get_world_size():
            launcher += f" --nnodes {dist.get_world_size() // local_ranks}"
    words = takewhile(lambda word: not word.startswith("-"), sys.argv)  # of paper/variants.py more than one
    command = shlex.join([*words, "--resume", str(folder)])
    run.print_main(f"\nstopped after {progress.step} steps; to resume: {launcher} {command}")


def save_checkpoint(args, folder: Path, policy, reference, optimizer, progress: Progress):
    """Writes a checkpoint, then removes all but the newest --keep-checkpoints.

    It writes none if the step has one already, or if a weight of the policy is not finite.
    """
    for module in [*policy.modules(), *reference.modules()]:
        if isinstance(module, FSDPModule):
            module.reshard()  # an error within a forward or backward pass leaves weights gathered
    checkpoint = folder / "checkpoints" / f"step-{progress.step:06}"  # in the order of names
    finite = all(bool(weight.to_local().isfinite().all()) for weight in policy.parameters())
    if not all(run.gather(finite)):
        run.print_main(f"no checkpoint of step {progress.step}: a weight is not finite (lower --lr)")
        return
    if run.broadcast(run.is_main() and checkpoint.exists()):
        return
    # The folder gets its name only when it is complete, so a run that is killed here leaves no partial
    # checkpoint, and still has the one before.
    unfinished = checkpoint.with_name("unfinished")
    dcp.save(training_state(policy, reference, optimizer, progress), checkpoint_id=unfinished)
    if run.is_main():
        unfinished.rename(checkpoint)
        if args.keep_checkpoints > 0:
            for old in find_checkpoints(folder)[args.keep_checkpoints :]:
                shutil.rmtree(old, ignore_errors=True)
    dist.barrier()  # a rank that exits after a signal could make torchrun end rank 0 before the renaming
    if not all(run.gather(checkpoint.exists())):  # every machine has written its part to a disk of its own
        raise InputError(f"--output-dir {folder} is not on a disk that all machines see")


def find_checkpoints(folder: Path) -> list[Path]:
    """Returns all checkpoints of a run, newest first."""
    return sorted(folder.glob("checkpoints/step-*"), reverse=True)


# === Resuming ===

# Settings of AdamW, which are flags or belong to the machine, so a resumed run does not read them.
ADAMW_SETTINGS = set(inspect.signature(torch.optim.AdamW).parameters)
UNREADABLE = (OSError, EOFError, RuntimeError, pickle.UnpicklingError)  # what reading a damaged file raises


def load_checkpoint(args, folder: Path, policy, reference, optimizer, groups: list[tuple]) -> Progress:
    """Restores weights, optimizer and progress from the newest checkpoint, on all ranks from the same one.

    Raises InputError if its files cannot be read, if it has other tensors than this run, or if the data has
    changed since.

    Returns:
        The progress of the run. Without a checkpoint, it is that of step 0.
    """
    data_hash = data.hash_groups(groups)
    progress = Progress(data_hash)
    checkpoints = run.broadcast(find_checkpoints(folder))
    if not checkpoints:
        return progress
    state = training_state(policy, reference, optimizer, progress)
    with_moments = read_state(checkpoints[0], state)
    vars(progress).update(*state["progress"])
    # `training_state` has created the moments of all weights, also of those that have had no gradient yet.
    for name, weight in policy.named_parameters():
        if f"optimizer.state.{name}" not in with_moments:
            optimizer.state.pop(weight, None)
    # Settings that other optimizers keep in param_groups, for example Prodigy's d, are part of their state.
    for group, saved in zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
        for name in saved.keys() - ADAMW_SETTINGS:
            group[name] = saved[name]
    if progress.data_hash != data_hash:
        raise InputError("--resume: the rows of --dataset or their tokens have changed since the checkpoint")
    run.print_main(f"{progress.step} steps are done: resumes from {checkpoints[0]}")
    return progress


def read_state(checkpoint: Path, state: dict) -> set[str]:
    """Reads a checkpoint into `state`, in place. Returns "optimizer.state.NAME" of each weight with moments.

    By default dcp.load refuses a checkpoint that lacks a tensor. A weight that never had a gradient (a vision
    tower's) has no moments, so this is allowed, and all other names are compared here.
    """
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    try:
        metadata = dcp.FileSystemReader(checkpoint).read_metadata()
        saved = metadata.state_dict_metadata.keys()
        planner.set_up_planner(state, metadata)
        with_moments = {name.rpartition(".")[0] for name in saved if name.startswith("optimizer.state.")}
        names = {
            name
            for name in planner.state_dict
            if not name.startswith("optimizer.state.") or name.rpartition(".")[0] in with_moments
        }
        if names != saved:
            raise InputError(f"not both in {checkpoint} and in this run: {', '.join(sorted(names ^ saved))}")
        dcp.load(state, checkpoint_id=checkpoint, planner=planner)
        return with_moments
    except (*UNREADABLE, dcp.CheckpointException) as error:
        causes = [cause for cause, _ in getattr(error, "failures", {0: (error, None)}).values()]
        if not all(isinstance(cause, UNREADABLE) for cause in causes):
            raise  # a mistake in an edited script
        raise InputError(
            f"{checkpoint} cannot be read ({causes[0]!r:.200}); "
            "to resume from the checkpoint before it, delete this folder"
        ) from error
