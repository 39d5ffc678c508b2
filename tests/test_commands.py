"""Every command of the README and the docs that starts a script: torchrun and the script take its flags.

The exercises of docs/humanline.md are run as they stand.
"""

import importlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
from conftest import LAUNCHER, ROOT, metrics, parse_args
from torch.distributed.run import parse_args as parse_torchrun

from run import check_flags

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "paper").rglob("README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
STAND_INS = {"N": "2", "FLAGS": ""}  # what a reader replaces

# Bash finds no program where PATH is empty, and gives the words of every command to this function.
NOTED = r"""
enable -n cd exec kill source .
command_not_found_handle() { printf '%s\n' "$@" '' >> commands; }
"""


def starts_of_scripts(code: str) -> list[list[str]]:
    """The words of every command in shell code that starts a *_humanline.py, stand-ins replaced."""
    with tempfile.TemporaryDirectory() as folder:
        command = [shutil.which("bash"), "-c", f"{NOTED}\n{code}\nwait"]
        subprocess.run(command, cwd=folder, env={"PATH": "/nowhere"}, capture_output=True)
        noted = Path(folder, "commands")
        commands = noted.read_text().split("\n\n") if noted.exists() else []
    starts = []
    for command in commands:
        words = [STAND_INS.get(word, word) for word in command.split("\n")]
        if words[0] in ("torchrun", "python") and any(word.endswith("_humanline.py") for word in words):
            starts.append([word for word in words if word])
    return starts


def commands_of(page) -> list[tuple[str, list[str]]]:
    """(where it stands, words), from the blocks of shell code and from `code` within the text."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", prose):
        if code.startswith(("torchrun ", "python ", "for ")):
            blocks.append(code)
    name = page.relative_to(ROOT).as_posix()
    return [(name, words) for block in blocks for words in starts_of_scripts(block)]


COMMANDS = [found for page in PAGES for found in commands_of(page)]


def parse(words: list[str], folder, monkeypatch):
    """The script and its arguments, checked as a run checks them first. A SystemExit if anything is wrong."""
    world, (script, *flags) = 1, words[1:]
    if words[0] == "torchrun":
        launch = parse_torchrun(words[1:])
        script, flags = launch.training_script, launch.training_script_args
        world = int(launch.nnodes.split(":")[-1]) * int(launch.nproc_per_node)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", launch.nproc_per_node)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    name = (ROOT / script).stem.removeprefix("my_")  # a reader's copy
    module = importlib.import_module(name)
    if "--help" in flags:
        with pytest.raises(SystemExit) as stop:
            parse_args(module, flags)
        assert not stop.value.code
        return name, None
    if "--resume" in flags:  # of a run that its reader has
        (folder / "args.json").write_text(json.dumps(asdict(module.Args(**module.TOY)) | {"script": name}))
        flags[flags.index("--resume") + 1] = str(folder)
    args = parse_args(module, flags)
    size = args.prompts_per_step * args.group_size if name == "grpo_math_humanline" else args.batch_size
    check_flags(args, size)
    return name, args


def test_commands_are_found_in_every_page_of_a_script():
    pages = {f"docs/{script}.md" for script in ("dpo", "kto", "grpo", "grpo_math")}
    assert pages | {"README.md", "paper/README.md"} <= {page for page, _ in COMMANDS}
    assert len(COMMANDS) > 30


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_script_takes_the_flags_of_a_command(page, words, tmp_path, monkeypatch, capsys):
    try:
        parse(words, tmp_path, monkeypatch)
    except SystemExit:
        pytest.fail(f"{page}: {shlex.join(words)}\n{''.join(capsys.readouterr())}")


def edit(folder: Path, source: str, copy: str, *changes: tuple[str, str]):
    """What an exercise says to do with a copy of a file."""
    text = (folder / source).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / copy).write_text(text)


def prepare(number: int, folder: Path):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for name in ("paper", "toy"):
        shutil.copytree(ROOT / name, folder / name)
    if number == 1:
        step = "        optimizer.step()\n"
        sync = "        if args.humanline and args.k > 0 and step % args.k == 0:\n"
        edit(folder, "dpo_humanline.py", "my_dpo_humanline.py", (step, ""), (sync, step + sync))
    if number == 4:
        bound = ("M=10.0", "M=4.5")
        draw = "beta(kappa * mean, kappa * (1 - mean), log_ratio.shape[1])"
        edit(folder, "paper/variants.py", "paper/my_concentrated.py", bound)
        perceived = (draw, "beta(0.61, 1, log_ratio.shape[1])")
        edit(folder, "paper/variants.py", "paper/my_perceived.py", bound, perceived)


def found_by(number: int, runs: Path) -> list[float]:
    """What the page gives ranges of, in its order; what it gives without one is checked here."""
    if number == 1:
        for line in metrics(runs / "sync-after"):
            assert line["loss"] == pytest.approx(math.log(2)) and not line["humanline/log_ratio_abs_mean"]
        found = [metrics(runs / "sync-before")[1]["loss"]]
        for name in ("sync-after", "sync-before"):
            summary = json.loads((runs / name / "summary.json").read_text())
            found.append(summary["after"]["eval/accuracy"][0])
        return found
    if number == 2:
        return [pd.DataFrame(metrics(runs / name)).loss[-20:].mean() for name in ("fixed", "synced")]
    if number == 3:
        wide, tight = (pd.DataFrame(metrics(runs / name)) for name in ("wide", "tight"))
        assert not tight["grpo/clip_fraction"].any()
        outside = tight["humanline/clipped_low"] + tight["humanline/clipped_high"]
        return [wide["grpo/clip_fraction"][-32:].mean(), outside[-32:].mean()]
    return [metrics(runs / name)[0]["grad_norm"] for name in ("perceived", "concentrated")]


@pytest.mark.slow
@pytest.mark.parametrize("exercise", [1, 2, 3, 4])
def test_an_exercise_comes_out_as_its_page_says(exercise, tmp_path):
    """Seed 1; the page's ranges are over five seeds, and another processor rounds otherwise."""
    page = (ROOT / "docs" / "humanline.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^### {exercise}\. (.*?)^##", page, re.MULTILINE | re.DOTALL)
    (block,) = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prepare(exercise, tmp_path)
    env = {key: value for key, value in os.environ.items() if key not in (*LAUNCHER, "PYTHONPATH")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(["bash", "-e", "-c", block], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = found_by(exercise, tmp_path / "runs")
    _, expected = text.split("*Expect:*")
    ranges = re.findall(r"(\d+(?:\.\d+)?) to (\d+(?:\.\d+)?)", expected.replace("\n", " "))
    for value, ends in zip(found, ranges, strict=True):
        low, high = (float(end) for end in ends)
        slack = (high - low) / 2
        assert low - slack <= value <= high + slack, (found, ranges)
