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

import pytest
from conftest import LAUNCHER, ROOT, metrics, parse_args
from torch.distributed.run import parse_args as parse_torchrun

from run import check_flags

PAGES = [ROOT / "README.md", ROOT / "paper" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STAND_INS = {"N": "2", "FLAGS": ""}  # what a reader replaces

TABLE_1 = dict(k=1, log_epsilon_P=-1.5, log_epsilon_R=1.5, temperature=0.7, top_p=0.95, max_new_tokens=2048)
TABLE_1 |= dict(num_steps=312, adam_eps=1e-5, weight_decay=1e-2, warmup_fraction=0.1)
TABLE_1 |= dict(round_prompts=1024, samples_per_prompt=8, reward_threshold=0.01)

# Table 3: learning rate, β, maximal gradient norm, and λ_D or ε; by script, online, humanline.
TABLE_3 = {
    ("kto", False, False): (5e-6, 0.25, 1.0, 1.1),
    ("kto", False, True): (5e-6, 0.25, 4.0, 1.1),
    ("kto", True, False): (2.5e-6, 0.25, 0.5, 1.1),
    ("kto", True, True): (2.5e-6, 0.25, 0.1, 1.1),
    ("dpo", False, False): (5e-6, 0.1, 1.0, None),
    ("dpo", False, True): (5e-6, 0.1, 1.0, None),
    ("dpo", True, False): (2.5e-6, 0.1, 0.5, None),
    ("dpo", True, True): (2.5e-6, 0.1, 1.0, None),
    ("grpo", False, False): (5e-6, 0.01, 1.0, 0.5),
    ("grpo", False, True): (5e-6, 0.01, 1.0, 0.15),
    ("grpo", True, False): (5e-6, 0.01, 1.0, 0.15),
    ("grpo", True, True): (5e-6, 0.01, 0.5, 0.15),
}


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
    pages = [page for page, _ in COMMANDS]
    assert {"README.md", "paper/README.md"} <= set(pages)
    assert {f"docs/{script}.md" for script in ("dpo", "kto", "grpo", "grpo_math")} <= set(pages)
    assert len(COMMANDS) > 30


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_script_takes_the_flags_of_a_command(page, words, tmp_path, monkeypatch, capsys):
    try:
        parse(words, tmp_path, monkeypatch)
    except SystemExit:
        pytest.fail(f"{page}: {shlex.join(words)}\n{''.join(capsys.readouterr())}")


def test_the_commands_for_llama_are_the_runs_of_table_3(tmp_path, monkeypatch):
    found = []
    for page, words in COMMANDS:
        if page == "paper/README.md":
            name, args = parse(words, tmp_path, monkeypatch)
            method = name.removesuffix("_humanline")
            own = getattr(args, {"kto": "lambda_D", "grpo": "epsilon"}.get(method, ""), None)
            run = (method, args.online, args.humanline)
            found.append((run, (args.lr, args.beta, args.max_grad_norm, own)))
            assert asdict(args).items() >= TABLE_1.items()
            assert args.batch_size == (32 if method == "dpo" else 64)
            assert bool(args.reward_model) == args.online and args.eval_samples == 805
    assert sorted(found, key=str) == sorted(TABLE_3.items(), key=str)


@pytest.mark.parametrize(
    "command",
    [
        "torchrun dpo_humanline.py --no-such-flag",
        "torchrun --nproc-per-node 3 dpo_humanline.py",
        "python dpo_humanline.py --online --model mine",
        "python dpo_humanline.py --clip sample",
        'RUN=(--lr 1e-5\n  --k -1)\npython kto_humanline.py "${RUN[@]}"',
    ],
)
def test_a_wrong_command_is_noticed(command, tmp_path, monkeypatch):
    (words,) = starts_of_scripts(command)
    with pytest.raises(SystemExit) as stop:
        parse(words, tmp_path, monkeypatch)
    assert stop.value.code


def test_each_of_the_two_lines_can_be_left_out(tmp_path, monkeypatch):
    for flags, clip, sync in (("--no-clip", False, "before_step"), ("--sync none --clip", True, "none")):
        (words,) = starts_of_scripts(f"for k in 1; do torchrun grpo_humanline.py --k $k {flags}; done")
        _, args = parse(words, tmp_path, monkeypatch)
        assert (args.k, args.humanline, args.clip, args.sync) == (1, True, clip, sync)


# --- the exercises of docs/humanline.md ---


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
    (folder / "paper").mkdir()
    for path in (ROOT / "paper").glob("*.py"):
        shutil.copy(path, folder / "paper")
    for toy in ("bouquets", "tales"):
        shutil.copytree(ROOT / "toy" / toy, folder / "toy" / toy)
    if number == 1:
        step = "        optimizer.step()\n"
        sync = '        if args.humanline and args.sync == "before_step" and step % args.k == 0:\n'
        edit(folder, "dpo_humanline.py", "my_dpo_humanline.py", (step, ""), (sync, step + sync))
    if number == 4:
        bound = ("M=10.0", "M=4.5")
        draw = (
            "beta(kappa * mean, kappa * (1 - mean), log_ratio.shape[1])",
            "beta(0.61, 1, log_ratio.shape[1])",
        )
        edit(folder, "paper/variants.py", "paper/my_concentrated.py", bound)
        edit(folder, "paper/variants.py", "paper/my_perceived.py", bound, draw)


def mean_of(folder: Path, steps: int, *keys: str) -> float:
    """Over the last steps, the sum of metrics."""
    lines = metrics(folder)[-steps:]
    return sum(line[key] for line in lines for key in keys) / len(lines)


def found_by(number: int, runs: Path) -> list[float]:
    """What the page gives ranges of, in its order; what it gives without one is checked here."""
    if number == 1:
        for line in metrics(runs / "sync-after"):
            assert line["loss"] == pytest.approx(math.log(2)) and not line["humanline/log_ratio_abs_mean"]
        ends = [
            json.loads((runs / name / "summary.json").read_text()) for name in ("sync-after", "sync-before")
        ]
        accuracies = [end["after"]["eval/accuracy"][0] for end in ends]
        return [metrics(runs / "sync-before")[1]["loss"], *accuracies]
    if number == 2:
        return [mean_of(runs / name, 20, "loss") for name in ("fixed", "synced")]
    if number == 3:
        assert not any(line["grpo/clip_fraction"] for line in metrics(runs / "tight"))
        both = ("humanline/clipped_low", "humanline/clipped_high")
        return [mean_of(runs / "wide", 32, "grpo/clip_fraction"), mean_of(runs / "tight", 32, *both)]
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
    number = r"(\d+(?:\.\d+)?)"
    ranges = re.findall(f"{number} to {number}", expected.replace("\n", " "))
    assert len(found) == len(ranges)
    for value, ends in zip(found, ranges):
        low, high = (float(end) for end in ends)
        slack = (high - low) / 2
        assert low - slack <= value <= high + slack, (found, ranges)
