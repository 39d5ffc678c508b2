"""The commands of paper/*.sh: every line is a run of the paper, with the paper's settings."""

import importlib
import os
import re
import shlex
import subprocess
from collections import namedtuple
from dataclasses import asdict

import pytest
from conftest import PAIRS, ROOT, TOY, metrics, run_ranks
from safetensors.torch import load_file
from test_commands import TABLE_1, TABLE_3, parse, starts_of_scripts, without_effect

FILES = sorted(path.stem for path in (ROOT / "paper").glob("*.sh"))
REF = "https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json"
BEFORE = {  # what a file does first: the shell's line, and the program that it starts
    f"[ -e ref.json ] || curl -fL -o ref.json {REF}": f"curl -fL -o ref.json {REF}",
    "[ -e math_train.jsonl ] || python paper/math_train.py": "python paper/math_train.py",
}
LLAMA, LLAMA_DATA = "meta-llama/Meta-Llama-3-8B-Instruct", "princeton-nlp/llama3-ultrafeedback-armorm"
SYSTEM_PROMPT = "$(cat paper/math_system_prompt.txt)"  # as a line has it, between double quotes
GEMMA, GEMMA_DATA = "google/gemma-2-27b-it", "princeton-nlp/gemma2-ultrafeedback-armorm"
QUARTILES = f"torchrun --nproc-per-node 4 paper/quartiles.py --model {LLAMA} --dataset {LLAMA_DATA} "
QUARTILES += "--dataset-split 'train[:10000]' --out runs/quartiles"

TABLE_5 = {  # Table 5's learning rate and β; the first is not trained
    "27b-baseline": (1e-30, 0.1),
    "27b-offline-llama-data": (2.5e-6, 0.3),
    "27b-offline-humanline-llama-data": (2.5e-6, 0.3),
    "27b-offline-gemma-data": (2.5e-6, 0.1),
    "27b-offline-humanline-gemma-data": (2.5e-6, 0.1),
    "27b-online": (2.5e-6, 0.1),
}
BOUNDS = [(-2.0, 1.5), (-1.5, 1.5), (-1.0, 1.5), (-1.0, 2.0), (-1.0, 3.0)]  # Table 6's
TABLE_2 = {
    "adam_eps": 1e-8,
    "weight_decay": 0,
    "warmup_fraction": 0.1,
    "lr": 1e-6,
    "max_grad_norm": 1.0,
    "prompts_per_step": 32,
    "group_size": 8,
    "max_new_tokens": 2048,
    "top_p": 1.0,
    "temperature": 0.7,
    "log_epsilon_P": -1.5,
    "log_epsilon_R": 1.5,
    "num_steps": 1600,
}
ARMORM = {"online": True, "reward_model": "RLHFlow/ArmoRM-Llama3-8B-v0.1", "trust_remote_code": True}

# Not settings of training: what a run leaves, how it is evaluated, and what fits.
APART = {"output_dir", "checkpoint_every", "gradient_checkpointing", "micro_batch_tokens", "vllm_memory"}
APART |= {"eval_dataset", "eval_samples", "max_prompt_length"}

Run = namedtuple("Run", "line words name args idle")
PARSED = {}  # {line: script, arguments, flags that repeat a default}, for a line stands in several tests


def expect(script: str, **settings) -> dict:
    """The settings of a run. What is not named has its default with --model."""
    defaults = asdict(importlib.import_module(f"{script}_humanline").Args())
    assert settings.keys() <= defaults.keys()
    return {"script": f"{script}_humanline"} | defaults | settings


def on_llama(method: str, online: bool, humanline: bool, **changes) -> dict:
    """A run of Table 3, or one like it."""
    lr, beta, norm, own = TABLE_3[method, online, humanline]
    settings = TABLE_1 | {"model": LLAMA, "dataset": LLAMA_DATA, "dataset_split": "train[:10000]"}
    settings |= {"humanline": humanline, "lr": lr, "beta": beta, "max_grad_norm": norm}
    settings["batch_size"] = 32 if method == "dpo" else 64
    if method == "kto":
        settings |= {"lambda_D": own, "lambda_U": 1.0}
    if method == "grpo":
        settings["epsilon"] = own
    if online:
        settings |= ARMORM | {"dataset_split": "train[:14000]"}
    return expect(method, **settings | changes)


def on_gemma(name: str) -> dict:
    lr, beta = TABLE_5[name]
    settings = TABLE_1 | {"model": GEMMA, "dataset_split": "train[:10000]", "batch_size": 32}
    settings |= {"max_grad_norm": 1.0, "lr": lr, "beta": beta, "humanline": "humanline" in name}
    settings["dataset"] = LLAMA_DATA if name.endswith("llama-data") else GEMMA_DATA
    if name == "27b-baseline":  # one step that changes nothing
        settings |= {"dataset": LLAMA_DATA, "humanline": True, "num_steps": 1}
    if name == "27b-online":
        settings |= ARMORM | {"dataset_split": "train[:14000]"}
    return expect("dpo", **settings)


def on_math(humanline: bool, sample_every: int, k: int) -> dict:
    data = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "dataset": "math_train.jsonl"}
    data |= {"system_prompt": SYSTEM_PROMPT, "humanline": humanline, "sample_every": sample_every, "k": k}
    return expect("grpo_math", **TABLE_2 | data)


METHODS = ("dpo", "kto", "grpo")
MAIN = [(False, False), (False, True), (True, False)]  # offline, offline + humanline, online
ABLATIONS = [{"sync": "none"}, {"clip": "none"}, {"clip": "sample"}]
TRUST_REGION = {"clip": "none", "sync": "after_step"}
QUARTERS = [f"runs/quartiles/quartile{i}.jsonl" for i in (1, 2, 3, 4)]


def main_runs(method: str) -> list[dict]:
    return [on_llama(method, *variant) for variant in MAIN]


def humanline_run(method: str, **changes) -> dict:
    """Offline + humanline with other settings."""
    return on_llama(method, False, True, **changes)


def expected_table_4() -> list[dict]:
    runs = []
    for method in METHODS:
        for humanline in (False, True):
            runs.append(on_llama(method, False, humanline))
            runs.append(on_llama(method, False, humanline, dataset=GEMMA_DATA))
    return runs


def expected_figure_5() -> list[dict]:
    runs = []
    for method in METHODS:
        runs += main_runs(method)
        runs += [humanline_run(method, **ablation) for ablation in ABLATIONS]
    return runs


def expected_figure_11() -> list[dict]:
    runs = []
    for method in METHODS:
        for variant in MAIN:
            runs += [on_llama(method, *variant, seed=seed) for seed in (1, 2, 3, 4, 5)]
    return runs


MATH_BASELINES = [on_math(False, 1, 16), on_math(False, 64, 16)]
EXPECTED = {
    "table1": [on_llama(method, online, True) for method in METHODS for online in (False, True)],
    "table2": MATH_BASELINES + [on_math(True, 64, k) for k in (1, 12, 16, 20, 24)],
    "table3": [on_llama(*key) for key in TABLE_3],
    "table4": expected_table_4(),
    "table5": [on_gemma(name) for name in TABLE_5],
    "table6": [humanline_run("dpo", log_epsilon_P=low, log_epsilon_R=high) for low, high in BOUNDS],
    "figure1": [*main_runs("dpo"), *main_runs("kto"), *main_runs("grpo")],
    "figure5": expected_figure_5(),
    "figure6": [
        on_llama("dpo", False, True),
        *(humanline_run("dpo", dataset=x, num_steps=78, dataset_split="train") for x in QUARTERS),
    ],
    "figure7": MATH_BASELINES + [on_math(True, 64, k) for k in (1, 16, 20)],
    "figure8": [on_llama("grpo", False, True), *(humanline_run("grpo", k=k) for k in (2, 4, 8, 16, 32, 64))],
    "figure10": [
        *main_runs("dpo"),
        *(humanline_run(method, k=32, **TRUST_REGION) for method in METHODS),
        humanline_run("dpo", k=1024, **TRUST_REGION),
    ],
    "figure11": expected_figure_11(),
}


def lines_of(text: str) -> list[str]:
    """Every command."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def runs_of(name: str, text: str, folder, monkeypatch) -> list[Run]:
    """The runs of a file, parsed as torchrun and the script parse them. What else it does is known."""
    runs = []
    for line in lines_of(text):
        if line in BEFORE or shlex.split(line) == shlex.split(QUARTILES):
            continue
        plain = line.replace(f'"{SYSTEM_PROMPT}"', "")
        assert not re.search(r"[$\\`(){};&|<>]", plain), f"{name}: not a complete line: {line}"
        start = line
        if name == "figure11":
            start = line.removeprefix("time ")
        commands = starts_of_scripts(start)
        assert len(commands) == 1 and commands[0][0] == "torchrun", f"{name}: not a run: {line}"
        if line not in PARSED:
            script, flags, args = parse(commands[0], folder, monkeypatch)
            PARSED[line] = (script, args, without_effect(script, flags, args))
        runs.append(Run(line, commands[0], *PARSED[line]))
    return runs


def fits(expected: dict, settings: dict) -> bool:
    return all(key in APART or settings[key] == value for key, value in expected.items())


def check(name: str, text: str, folder, monkeypatch) -> list[Run]:
    """An AssertionError or a SystemExit if the file is not the paper's table or figure."""
    runs, left = runs_of(name, text, folder, monkeypatch), list(EXPECTED[name])
    for run in runs:
        settings = {"script": run.name} | asdict(run.args)
        fitting = [expected for expected in left if fits(expected, settings)]
        assert fitting, f"{name}: no run of the paper, or one that it has once: {run.line}"
        left.remove(fitting[0])
        check_run(name, run)
    assert not left, f"{name}: {len(left)} runs are missing, the first: {left[0]}"
    return runs


def check_run(name: str, run: Run) -> None:
    """How a run is evaluated, and what it needs."""
    args, table_5 = run.args, name == "table5"
    ranks = "8" if table_5 else "4"
    assert run.words[:3] == ["torchrun", "--nproc-per-node", ranks]
    assert (
        args.gradient_checkpointing
        and args.output_dir.startswith("runs/")
        and args.output_dir.count("/") == 1
    )
    assert args.checkpoint_every == 0 or args.num_steps % args.checkpoint_every == 0  # the last step has one
    if name == "figure11":
        assert args.eval_dataset == "" and args.checkpoint_every == 0 and run.line.startswith("time ")
    elif run.name == "grpo_math_humanline":
        assert (args.eval_dataset, args.eval_samples, args.max_prompt_length) == (
            "HuggingFaceH4/MATH-500",
            500,
            1024,
        )
    else:
        assert (args.eval_dataset, args.eval_samples) == ("ref.json", 805)
    if run.name != "grpo_math_humanline":
        split = re.fullmatch(r"train\[:(\d+)\]", args.dataset_split)
        rows = int(split.group(1)) if split else 2500  # of a quarter
        assert rows >= (12 * 1024 if args.online else 32 * args.num_steps) and args.max_prompt_length == 625
    assert args.vllm_memory == (0.5 if table_5 else 0.3)
    flags = [word for word in run.words if word.startswith("--")]
    allowed = {"--seed"} if name == "figure11" else set()
    if name == "table1":
        online = {"round_prompts", "samples_per_prompt", "reward_threshold"}
        allowed = {f"--{key.replace('_', '-')}" for key in TABLE_1 if args.online or key not in online} | {
            "--batch-size"
        }
        assert allowed <= set(flags)
    assert set(run.idle) <= allowed, f"{name}: {run.line}: {', '.join(run.idle)}: the default is the same"
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_runs_of_its_table_or_figure_with_the_papers_settings(name, tmp_path, monkeypatch):
    check(name, (ROOT / "paper" / f"{name}.sh").read_text(), tmp_path, monkeypatch)


def test_every_table_and_figure_has_its_file():
    assert FILES == sorted(EXPECTED)


def test_a_folder_is_one_run_in_all_files(tmp_path, monkeypatch):
    """So that a run that stands in two files is not made twice, and two runs do not meet in one folder."""
    folders, settings = {}, {}
    for name in FILES:
        for run in runs_of(name, (ROOT / "paper" / f"{name}.sh").read_text(), tmp_path, monkeypatch):
            key = repr({"script": run.name} | asdict(run.args) | {"output_dir": ""})
            assert folders.setdefault(run.args.output_dir, key) == key, run.line
            assert settings.setdefault(key, run.args.output_dir) == run.args.output_dir, run.line
    assert (
        len(folders) == 12 + 7 + 6 + 6 + 4 + 9 + 4 + 6 + 4 + 45
    )  # tables 3, 2, 4, 5, 6; figures 5, 6, 8, 10, 11


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_bash_starts_what_the_lines_say(name, present, tmp_path):
    """With programs in the places of torchrun, python and curl that write down how they were called."""
    file = ROOT / "paper" / f"{name}.sh"
    subprocess.run(["bash", "-n", file], check=True)
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in ("torchrun", "python", "curl"):
        (programs / program).write_text(f'#!/bin/bash\nprintf "%s\\0" {program} "$@" "" >>{tmp_path}/calls\n')
        (programs / program).chmod(0o755)
    if present:
        (tmp_path / "ref.json").touch()
        (tmp_path / "math_train.jsonl").touch()
    (tmp_path / "paper").symlink_to(ROOT / "paper")
    system_prompt = (ROOT / "paper" / "math_system_prompt.txt").read_text().strip()
    env = os.environ | {"PATH": f"{programs}:/usr/bin:/bin"}
    done = subprocess.run(["bash", file], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert not done.stdout and (name == "figure11" or not done.stderr)
    calls = [call.split("\0") for call in (tmp_path / "calls").read_text().split("\0\0")[:-1]]
    lines = lines_of(file.read_text())
    wanted = [
        shlex.split(BEFORE.get(line, line).removeprefix("time "))
        for line in lines
        if not (present and line in BEFORE)
    ]
    for words in wanted:
        words[:] = [system_prompt if word == SYSTEM_PROMPT else word for word in words]
    assert calls == wanted


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("table3", "--no-humanline", "--no-humanlin"),
        ("table3", "--lr 2.5e-6", "--lr 2.5e-5"),
        ("table3", '"train[:10000]"', '"train[:10000]'),
        ("table3", "--gradient-checkpointing", "--gradient-checkpointing \\\n   "),
        ("table3", "--gradient-checkpointing", "--gradient-checkpointing --beta 0.1"),
        ("table3", "--model meta-llama/Meta-Llama-3-8B-Instruct", "$RUN"),
        ("table1", " --temperature 0.7", ""),
        ("figure11", "--seed 5", "--seed 4"),
        ("figure11", "time torchrun", "torchrun"),
    ],
)
def test_a_mangled_file_is_noticed(name, right, wrong, tmp_path, monkeypatch):
    text = (ROOT / "paper" / f"{name}.sh").read_text()
    head, _, rest = text.partition("\n\n")
    assert right in rest
    with pytest.raises((AssertionError, SystemExit, ValueError)):
        check(name, f"{head}\n\n{rest.replace(right, wrong, 1)}", tmp_path, monkeypatch)


def test_a_missing_or_repeated_line_is_noticed(tmp_path, monkeypatch):
    text = (ROOT / "paper" / "table6.sh").read_text()
    blocks = text.strip().split("\n\n")
    with pytest.raises(AssertionError, match="missing"):
        check("table6", "\n\n".join(blocks[:-1]), tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match="no run of the paper"):
        check("table6", "\n\n".join([*blocks, blocks[-1]]), tmp_path, monkeypatch)


SHORT = ["--model", str(TOY / "policy"), "--dataset", PAIRS, "--batch-size", "8", "--engine", "hf"]


def test_the_baselines_step_changes_no_weight(tmp_path):
    """Table 5's untrained model: the run that stands for it."""
    flags = ["--num-steps", "1", "--lr", "1e-30", "--eval-dataset", PAIRS, "--eval-samples", "8"]
    run_ranks(1, [[*SHORT, *flags, "--max-new-tokens", "8", "--output-dir", str(tmp_path / "run")]])
    before, after = (
        load_file(TOY / "policy" / "model.safetensors"),
        load_file(tmp_path / "run/final/model.safetensors"),
    )
    assert before.keys() == after.keys() and (tmp_path / "run" / "outputs.json").exists()
    assert all((before[key] == after[key]).all() for key in before)


def test_a_trust_region_that_never_syncs_is_offline(tmp_path):
    """Figure 10, to the letter: --k 1024 in fewer steps."""
    arms = {"offline": ["--no-humanline"], "letter": "--clip none --sync after_step --k 1024".split()}
    short = [*SHORT, "--num-steps", "3", "--lr", "1e-3"]
    run_ranks(1, [[*short, *flags, "--output-dir", str(tmp_path / arm)] for arm, flags in arms.items()])
    offline, letter = (metrics(tmp_path / arm, without_perf=True) for arm in arms)
    assert offline == letter and len(offline) == 3 and offline[0]["loss"] != offline[2]["loss"]
