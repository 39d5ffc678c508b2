"""What the benchmarks share: the repository, its scripts, and their flags."""

import importlib
import sys
from pathlib import Path

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
        toy_online=getattr(script, "TOY_ONLINE", None),
        flags=flags,
    )
