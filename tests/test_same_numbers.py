"""The loss and the gradient norm of a step do not depend on ranks or passes; a repeated run is the same."""

import subprocess
import sys

import pytest
from conftest import PAIRS, ROOT, agree, metrics, run_layouts

VARIANTS = {"k1": ["--k", "1"], "k3": ["--k", "3"], "offline": ["--no-humanline"]}
TOY_RUN = ["--num-steps", "8", "--dataset", PAIRS, "--eval-dataset", "", "--warmup-fraction", "0.25"]
TOY_RUN += ["--checkpoint-every", "0"]
PAIR = 28  # tokens of every pair of the toy
# Ranks and --micro-batch-tokens. There are repetitions, and the last is HSDP, two copies of two shards.
LAYOUTS = [(1, f"{8 * PAIR}"), (1, "0"), (1, "0"), (2, f"{4 * PAIR}"), (2, "0"), (2, "0"), (4, f"{4 * PAIR}")]
LAYOUTS += [(4, f"{4 * PAIR} --shard-size 2")]
SAME = ["loss", "grad_norm", "humanline/clipped_low", "humanline/log_ratio_abs_mean", "rewards/margins"]


@pytest.fixture(scope="module")
def toy_runs(tmp_path_factory):
    jobs = {name: [*TOY_RUN, *flags] for name, flags in VARIANTS.items()}
    return run_layouts(tmp_path_factory.mktemp("same"), jobs, LAYOUTS)


def test_one_two_and_four_ranks_and_all_layouts_agree_on_the_toy(toy_runs):
    for expected, *others in toy_runs.values():
        for steps in others:
            agree(expected, steps, SAME)
    assert len({steps[-1]["loss"] for steps, *_ in toy_runs.values()}) == 3


def test_the_same_run_on_the_same_layout_repeats_bit_for_bit(toy_runs):
    for steps in toy_runs.values():
        assert steps[1] == steps[2] and steps[4] == steps[5]


def test_torchrun_starts_two_ranks_that_are_those_of_the_same_layout(toy_runs, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = [ROOT / "dpo_humanline.py", *TOY_RUN, *VARIANTS["k3"], "--output-dir", tmp_path / "run"]
    subprocess.run([*torchrun, *run], check=True, capture_output=True, timeout=280)
    assert metrics(tmp_path / "run", True) == toy_runs["k3"][4]
