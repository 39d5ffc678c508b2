"""Runs the scripts for real, in one or several ranks, and reads what they wrote."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"  # real data, where there is any
TOY = ROOT / "toy" / "bouquets"
PAIRS = str(ROOT / "tests" / "pairs.jsonl")  # the first 128 pairs of the toy, for short runs
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(ranks, runs, worker="worker.py", script="dpo_humanline") -> list[subprocess.Popen]:
    """Starts tests/<worker> in every rank; it runs main of `script` once for each argument list of `runs`."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {
        "OMP_NUM_THREADS": "1"
    }
    env |= {"PORTS": json.dumps([free_port() for _ in runs]), "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    env["SCRIPT"] = script
    command = [sys.executable, str(ROOT / "tests" / worker), json.dumps(runs)]
    return [
        subprocess.Popen(
            command,
            env=env | ({"RANK": str(r), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(r)} if ranks > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(ranks)
    ]


def run_ranks(ranks, runs, worker="worker.py", script="dpo_humanline", timeout=280) -> str:
    """Output of rank 0; every rank must succeed."""
    processes = start_ranks(ranks, runs, worker, script)
    outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output[-3000:]
    return outputs[0]


def metrics(folder: Path, without_perf: bool = False) -> list[dict]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not (without_perf and k.startswith("perf/"))} for line in lines]


@pytest.fixture(scope="module")
def one_rank():
    """A process group of one in this process, for functions that use collectives."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def tied_policy(tmp_path_factory) -> str:
    """The toy policy with its head tied to the embedding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("tied")
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy")
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(folder)
    return str(folder)
