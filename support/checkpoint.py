"""Checkpoints, from which a run resumes bit for bit, on any number of ranks.

What a new algorithm carries from step to step belongs in `training_state`, or in `Progress` if it is numbers,
texts or lists. What is in neither, for example a scheduler or a second reference, does not survive a resume.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from support import run
from utils import InputError


@dataclass
class Progress:
    """The state of a run besides its weights and the optimizer's state."""

    step: int = 0  # completed optimizer steps
    round: int = 0  # number of rounds sampled (grpo_math: stays 0)
    pool: list = field(default_factory=list)  # sampled groups that no completed step has used


def training_state(policy, reference, optimizer, progress: Progress) -> dict:
    """Returns what a checkpoint holds: sharded tensors and plain objects, by name.

    If the optimizer has made no step, get_optimizer_state_dict first creates its moments.
    """
    return {
        "policy": policy.state_dict(),
        "reference": reference.state_dict(),
        "optimizer": get_optimizer_state_dict(policy, optimizer),
        "progress": (vars(progress),),  # a tuple, because torch would take a dict apart
    }


def find_checkpoints(folder: Path) -> list[Path]:
    """Returns all checkpoints of a run, newest first."""
    return sorted(folder.glob("checkpoints/step-*"), reverse=True)


def end_step(args, folder: Path, policy, reference, optimizer, progress: Progress, signals):
    """Saves a checkpoint if one is due, and ends the run after a signal.

    One is due every --checkpoint-every steps, and after the last step, from which a run can also continue
    with a larger --num-steps.
    """
    every = args.checkpoint_every
    if progress.step == args.num_steps or (every and progress.step % every == 0):
        save_checkpoint(args, folder, policy, reference, optimizer, progress)
    elif progress.step == 1:
        # What a checkpoint cannot hold, such as a weight outside of the policy, raises an exception at the
        # first step, and not a hundred steps later.
        training_state(policy, reference, optimizer, progress)
    end_after_signal(args, folder, policy, reference, optimizer, progress, signals)


def end_after_signal(args, folder: Path, policy, reference, optimizer, progress: Progress, signals):
    """Ends all ranks if one of them has received a signal, with a checkpoint of the completed steps."""
    signal_number = max(run.gather(signals.received))  # all ranks must stop after the same step
    if signal_number:
        if progress.step:
            save_checkpoint(args, folder, policy, reference, optimizer, progress)
        run.print_main(f"\nstopped after {progress.step} steps; to resume, pass --resume {folder}")
        # With the status that a shell expects. Not sys.exit, which would wait for grpo_math's grader.
        os._exit(128 + signal_number)


def save_checkpoint(args, folder: Path, policy, reference, optimizer, progress: Progress):
    """Writes a checkpoint if the step has none, then removes all but the newest --keep-checkpoints."""
    checkpoint = folder / "checkpoints" / f"step-{progress.step:06}"  # in the order of names
    if run.broadcast(checkpoint.exists()):
        return
    # The folder gets its name only when it is complete, so a run that is killed here leaves no partial
    # checkpoint, and still has the one before.
    unfinished = checkpoint.with_name("unfinished")
    dcp.save(training_state(policy, reference, optimizer, progress), checkpoint_id=unfinished)
    if run.is_main():
        unfinished.rename(checkpoint)
        if args.keep_checkpoints:
            for old in find_checkpoints(folder)[args.keep_checkpoints :]:
                shutil.rmtree(old, ignore_errors=True)
    dist.barrier()  # a rank that exits after a signal could make torchrun end rank 0 before the renaming


def load_checkpoint(folder: Path, policy, reference, optimizer) -> Progress:
    """Restores weights, optimizer and progress from the newest checkpoint, on all ranks from the same one.

    If it cannot be read, deleting its folder lets the run resume from the one before.

    Returns:
        The progress of the run. Without a checkpoint, it is that of step 0.

    Raises:
        InputError: a finished run has no checkpoint any more. It would begin anew, and erase its files.
    """
    progress = Progress()
    checkpoints = run.broadcast(find_checkpoints(folder))
    if not checkpoints and (folder / "summary.json").exists():
        raise InputError(f"--resume {folder}: the run has ended, and its checkpoints are not there any more")
    if checkpoints:
        # Both loads read in place. Weights must all be there. Moments may be missing, because a weight that
        # never had a gradient (a vision tower's) has none.
        state = training_state(policy, reference, optimizer, progress)
        moments = {"optimizer": state.pop("optimizer")}
        dcp.load(state, checkpoint_id=checkpoints[0])
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(moments, checkpoint_id=checkpoints[0], planner=planner)
        saved = {name for name in planner.metadata.state_dict_metadata if name.startswith("optimizer.")}
        # An optimizer that creates a state after its first step would silently begin it anew.
        if unread := saved - planner.state_dict.keys():
            raise InputError(f"--resume: the optimizer has no place for {sorted(unread)[:3]}")
        # The settings were read into copies. Some optimizers keep a state in them (schedule-free).
        for param_group, settings in zip(optimizer.param_groups, moments["optimizer"]["param_groups"]):
            param_group |= settings | {"params": param_group["params"]}
        progress = Progress(**state["progress"][0])
        run.print_main(f"{progress.step} steps are done: resumes from {checkpoints[0]}")
    return progress
