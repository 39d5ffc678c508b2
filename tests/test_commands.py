"""Every command of the README and the docs that starts a script: torchrun and the script take its flags."""

import importlib
import json
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import ROOT, parse_args
from torch.distributed.run import parse_args as parse_torchrun

from support.run import check_flags

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "toy/README.md",
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
