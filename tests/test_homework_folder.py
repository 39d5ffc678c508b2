"""The checks of homework/ pass on right files and fail on wrong ones, each for its own reason."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
from helpers import ROOT

RIGHT = """
import copy

import torch
from toy import dpo_loss, token_logps


def clip(log_ratio, low=-1.5, high=1.5):
    return log_ratio.clamp(low, high)


def training_step(step, k, policy, reference, optimizer, ids, low=-1.5, high=1.5):
    logps = token_logps(policy, ids)
    with torch.no_grad():
        ref_logps = token_logps(reference, ids)
    loss = dpo_loss(clip(logps - ref_logps, low, high))
    loss.backward()
    if step % k == 0:
        reference.load_state_dict(policy.state_dict())
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""
# The parts of this file that the variants replace.
CLIP = "    return log_ratio.clamp(low, high)\n"
FORWARD = "    logps = token_logps(policy, ids)\n"
NO_GRAD = "    with torch.no_grad():\n        ref_logps = token_logps(reference, ids)\n"
LOSS = "    loss = dpo_loss(clip(logps - ref_logps, low, high))\n"
BACKWARD = "    loss.backward()\n"
COPY = "        reference.load_state_dict(policy.state_dict())\n"
SYNC = f"    if step % k == 0:\n{COPY}"
UPDATE = "    optimizer.step()\n"
CLEAR = "    optimizer.zero_grad()\n"
PAIRS = "        for r, p in zip(reference.parameters(), policy.parameters()):\n            "

RIGHT_ONES = {  # {name: what replaces what}
    "the right file": {},
    "where": {
        CLIP: "    x = log_ratio\n    return torch.where(x < low, low, torch.where(x > high, high, x))\n"
    },
    "minimum and maximum": {
        CLIP: "    low, high = torch.tensor([low, high], dtype=log_ratio.dtype)\n"
        "    return log_ratio.minimum(high).maximum(low)\n"
    },
    "a copy of each tensor": {
        COPY: "        for r, p in zip(reference.state_dict().values(), policy.state_dict().values()):\n"
        "            r.copy_(p)\n"
    },
    "a deepcopy of the state": {
        COPY: COPY.replace("policy.state_dict()", "copy.deepcopy(policy.state_dict())")
    },
    "detach": {NO_GRAD: "    ref_logps = token_logps(reference, ids).detach()\n"},
    "gradients cleared before backward, too": {BACKWARD: CLEAR + BACKWARD},
    "sync before backward": {SYNC: "", BACKWARD: SYNC + BACKWARD},
}
WRONG_ONES = {  # {name: (the check that is meant for it, what replaces what)}
    "no clip": (1, {CLIP: "    return log_ratio\n"}),
    "soft clip": (1, {CLIP: "    return high * torch.tanh(log_ratio / high)\n"}),
    "fixed bounds": (1, {CLIP: "    return log_ratio.clamp(-1.5, 1.5)\n"}),
    "one-sided clip": (1, {CLIP: "    return log_ratio.clamp(max=high)\n"}),
    "zero beyond the bounds": (
        1,
        {CLIP: "    return log_ratio * ((log_ratio >= low) & (log_ratio <= high))\n"},
    ),
    "clip of the ratio": (1, {CLIP: "    return log_ratio.exp().clamp(low, high)\n"}),
    "clip in place": (1, {CLIP: "    return log_ratio.clamp_(low, high)\n"}),
    "clip with a straight-through gradient": (
        2,
        {CLIP: "    return log_ratio + (log_ratio.clamp(low, high) - log_ratio).detach()\n"},
    ),
    "clip without any gradient": (
        2,
        {CLIP: "    with torch.no_grad():\n        return log_ratio.clamp(low, high)\n"},
    ),
    "clip of the sum": (
        3,
        {
            CLIP: "    total = log_ratio.sum(-1, keepdim=True)\n"
            "    return log_ratio + (total.clamp(low, high) - total) / log_ratio.shape[-1]\n"
        },
    ),
    "clip that is not used": (4, {LOSS: "    loss = dpo_loss(logps - ref_logps)\n"}),
    "clip of the policy's log-probs": (
        4,
        {LOSS: "    loss = dpo_loss(clip(logps, low, high) - ref_logps)\n"},
    ),
    "ratio upside down": (4, {LOSS: "    loss = dpo_loss(-clip(ref_logps - logps, low, high))\n"}),
    "ratio and sign upside down": (4, {LOSS: "    loss = dpo_loss(clip(ref_logps - logps, low, high))\n"}),
    "gradients never cleared": (4, {CLEAR: ""}),
    "sync after the update": (5, {SYNC: "", UPDATE: UPDATE + SYNC}),
    "sync every k + 1 steps": (5, {SYNC: SYNC.replace("step % k", "step % (k + 1)")}),
    "sync in step k - 1": (5, {SYNC: SYNC.replace("step % k", "(step + 1) % k")}),
    "no sync": (5, {SYNC: ""}),
    "sync in every step": (5, {SYNC: COPY[4:]}),
    "sync before the forward pass": (5, {SYNC: "", FORWARD: SYNC + FORWARD}),
    "sync in the wrong direction": (5, {COPY: "        policy.load_state_dict(reference.state_dict())\n"}),
    "moving average": (5, {COPY: f"{PAIRS}r.data.lerp_(p.data, 0.9)\n"}),
    "shared tensors": (6, {COPY: f"{PAIRS}r.data = p.data\n"}),
    "assigned tensors": (6, {COPY: COPY.replace("())", "(), assign=True)")}),
    "gradient of the reference": (7, {NO_GRAD: "    ref_logps = token_logps(reference, ids)\n"}),
    "another name for the policy": (8, {COPY: "        reference = policy\n"}),
    "deepcopy into a local name": (8, {COPY: "        reference = copy.deepcopy(policy)\n"}),
    "parameters without buffers": (8, {COPY: f"{PAIRS}r.data.copy_(p.data)\n"}),
    "first parameter alone": (8, {COPY: "        reference.table.data.copy_(policy.table.data)\n"}),
}


def variant(edits: dict[str, str]) -> str:
    """Returns the right file after edits."""
    source = RIGHT
    for old, new in edits.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


@pytest.fixture(scope="module")
def checks():
    """The module of the checks. While it is in use, `toy` is the homework's and not the project's folder."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("toy", "two_lines", "test_homework"):
            spec = spec_from_file_location(name, ROOT / "homework" / f"{name}.py")
            module = module_from_spec(spec)
            patch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        yield module


def failures(checks, source: str, monkeypatch) -> dict[int, str]:
    """Returns {number of a check: its message} of the checks that a file fails."""
    student = ModuleType("two_lines")
    exec(source, student.__dict__)
    monkeypatch.setattr(checks, "two_lines", student)
    failed = {}
    for name, check in vars(checks).items():
        if name.startswith("test_"):
            try:
                check()
            except Exception as error:
                failed[int(name.split("_")[1])] = f"{type(error).__name__}: {error}"
    return failed


@pytest.mark.parametrize("name", RIGHT_ONES)
def test_a_right_file_passes(name, checks, monkeypatch):
    assert failures(checks, variant(RIGHT_ONES[name]), monkeypatch) == {}


@pytest.mark.parametrize("name", WRONG_ONES)
def test_a_wrong_file_fails_with_a_sentence(name, checks, monkeypatch):
    number, edits = WRONG_ONES[name]
    failed = failures(checks, variant(edits), monkeypatch)
    assert failed.get(number, "").startswith("AssertionError: ") and failed[number].endswith((".", "?"))


def test_the_folder_fails_as_it_is_and_passes_when_it_is_solved(tmp_path):
    """Without any plugin of pytest, and outside of the repository."""
    folder = shutil.copytree(ROOT / "homework", tmp_path / "homework")
    for source, result in (((folder / "two_lines.py").read_text(), "8 failed"), (RIGHT, "8 passed")):
        (folder / "two_lines.py").write_text(source)
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": ""}
        command = [sys.executable, "-m", "pytest", "homework"]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert re.search(r"=+ (.*) in ", run.stdout.splitlines()[-1])[1] == result, run.stdout
        unwritten = run.stdout.count("NotImplementedError: ") >= 8
        assert unwritten == (result == "8 failed")
