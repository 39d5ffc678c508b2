"""Whole runs on several ranks: any layout gives the same numbers, and machines must have a disk in common."""

import os
import subprocess
import sys

import pytest
from helpers import (
    PAIRS,
    ROOT,
    agree,
    finish,
    free_port,
    metrics,
    run_main,
    run_ranks,
    start_ranks,
)
from helpers import run_layouts as run_all_layouts

# === Layouts ===

RUN = ["--num-steps", "6", "--dataset", PAIRS, "--eval-dataset", "", "--warmup-fraction", "0.25"]
RUN += ["--k", "3", "--checkpoint-every", "0"]
PAIR = 28  # tokens of every pair of the toy
# Ranks and --micro-batch-tokens: the whole batch, which also runs twice, and uneven micro-batches.
LAYOUTS = [(1, "0"), (1, "0"), (1, f"{5 * PAIR}"), (2, "0"), (2, f"{5 * PAIR}")]
SAME = ["loss", "grad_norm", "humanline/clipped_low", "humanline/log_ratio_abs_mean", "rewards/margins"]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """The metrics of a run under each layout."""
    return run_all_layouts(tmp_path_factory.mktemp("same"), {"run": RUN}, LAYOUTS)["run"]


def test_one_and_two_ranks_and_all_micro_batches_agree(layouts):
    expected, *others = layouts
    assert [step["humanline/log_ratio_abs_mean"] > 0 for step in expected] == [False, *[True] * 5]
    for steps in others:
        agree(expected, steps, SAME)


def test_the_same_run_repeats_bit_for_bit(layouts):
    once, again, *_ = layouts
    assert once == again


@pytest.mark.slow
def test_four_ranks_agree_also_in_two_replicas_of_two_shards(layouts, tmp_path):
    run = [*RUN, "--micro-batch-tokens", f"{4 * PAIR}"]
    for name, flags in (("4", []), ("2 x 2", ["--shard-size", "2"])):
        run_ranks(4, [[*run, *flags, "--output-dir", str(tmp_path / name)]])
        agree(layouts[0], metrics(tmp_path / name, True), SAME)


@pytest.mark.slow
def test_three_ranks_agree_although_thirds_are_not_exact(tmp_path):
    """Gradients were means over ranks, times the number of ranks."""
    flags = [*RUN, "--batch-size", "12", "--num-steps", "3", "--k", "1"]
    for ranks in (1, 3):
        run_ranks(ranks, [[*flags, "--output-dir", f"{tmp_path}/{ranks}"]])
    agree(metrics(tmp_path / "1", True), metrics(tmp_path / "3", True), rel=1e-6)


@pytest.mark.slow
def test_torchrun_starts_the_two_ranks_of_the_same_layout(layouts, tmp_path):
    machines, port = 2, free_port()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    flags = [*RUN, "--output-dir", str(tmp_path / "run")]
    agents = []
    for machine in range(machines):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(machines)]
        command += ["--nproc-per-node", str(2 // machines), "--node-rank", str(machine)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "dpo_humanline.py", *flags]
        agents.append(subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True))
    errors = [agent.communicate(timeout=280)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * machines, errors
    assert metrics(tmp_path / "run", True) == layouts[3]


# === Machines ===
def run_on_machine(script, folders: list):
    """Runs main in the folder of this rank's machine."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.chdir(folders[int(os.environ["RANK"])])
    run_main(script, ["--dataset", PAIRS, "--output-dir", "run", "--num-steps", "2", "--eval-samples", "0"])


@pytest.mark.slow
def test_no_disk_in_common(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    processes = start_ranks(2, [folders], run_on_machine)
    outputs = finish(processes, timeout=60)
    assert "error: --output-dir run is not on a disk that all machines see\n" in outputs[1]
    assert all(process.exitcode for process in processes)
