"""The commands of paper/*.sh: every line is a run of the paper, with the paper's settings and published
figure."""

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

# The paper's scores: LC-WR, WR, length. Table 3 by objective, online, humanline; Table 4 (Gemma2-9B's
# completions) by objective, humanline; Table 5 with standard errors, and learning rate and β; Table 6 by the
# bounds.
SCORES_3 = {
    ("kto", False, False): ("17.40", "14.13", "1658"),
    ("kto", False, True): ("22.19", "14.70", "1407"),
    ("kto", True, False): ("22.45", "19.47", "1744"),
    ("kto", True, True): ("22.79", "18.78", "1663"),
    ("dpo", False, False): ("18.07", "16.07", "1767"),
    ("dpo", False, True): ("24.82", "20.18", "1637"),
    ("dpo", True, False): ("24.96", "22.99", "1828"),
    ("dpo", True, True): ("26.84", "23.64", "1774"),
    ("grpo", False, False): ("15.52", "12.61", "1648"),
    ("grpo", False, True): ("25.24", "18.11", "1488"),
    ("grpo", True, False): ("25.05", "18.82", "1529"),
    ("grpo", True, True): ("26.10", "21.57", "1647"),
}
SCORES_4 = {
    ("kto", False): ("18.10", "15.28", "1698"),
    ("kto", True): ("22.18", "20.30", "1836"),
    ("dpo", False): ("18.63", "15.44", "1690"),
    ("dpo", True): ("26.26", "21.91", "1642"),
    ("grpo", False): ("12.64", "10.84", "1696"),
    ("grpo", True): ("24.24", "18.99", "1587"),
}
SCORES_5 = {
    "27b-baseline": ("45.90", "1.54", "35.45", None, None),
    "27b-offline-llama-data": ("48.59", "1.58", "32.36", 2.5e-6, 0.3),
    "27b-offline-humanline-llama-data": ("56.27", "1.67", "44.49", 2.5e-6, 0.3),
    "27b-offline-gemma-data": ("56.58", "1.68", "45.17", 2.5e-6, 0.1),
    "27b-offline-humanline-gemma-data": ("67.45", "1.64", "61.37", 2.5e-6, 0.1),
    "27b-online": ("66.49", "1.48", "74.22", 2.5e-6, 0.1),
}
SCORES_6 = {
    (-2.0, 1.5): ("23.33", "1.35", "1663"),
    (-1.5, 1.5): ("24.82", "1.36", "1637"),
    (-1.0, 1.5): ("24.37", "1.33", "1588"),
    (-1.0, 2.0): ("22.55", "1.31", "1619"),
    (-1.0, 3.0): ("23.98", "1.33", "1636"),
}
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
ARMORM = {
    "online": True,
    "reward_model": "RLHFlow/ArmoRM-Llama3-8B-v0.1",
    "trust_remote_code": True,
}

# Not settings of training: what a run leaves, how it is evaluated, and what fits.
APART = {"output_dir", "checkpoint_every", "gradient_checkpointing", "micro_batch_tokens", "vllm_memory"}
APART |= {"eval_dataset", "eval_samples", "max_prompt_length"}

Expected = namedtuple("Expected", "settings published")  # a run's settings, and what its comment must say
Run = namedtuple("Run", "comment line words name args idle")
PARSED = {}  # {line: script, arguments, flags that repeat a default}, for a line stands in several tests


def expect(script: str, published, **settings) -> Expected:
    """What is not named has its default with --model."""
    assert published
    defaults = asdict(importlib.import_module(f"{script}_humanline").Args())
    assert settings.keys() <= defaults.keys()
    return Expected({"script": f"{script}_humanline"} | defaults | settings, published)


def on_llama(method: str, online: bool, humanline: bool, published=None, **changes) -> Expected:
    """A run of Table 3, or one like it."""
    lr, beta, norm, own = TABLE_3[method, online, humanline]
    settings = TABLE_1 | {
        "model": LLAMA,
        "dataset": LLAMA_DATA,
        "humanline": humanline,
        "lr": lr,
        "beta": beta,
        "dataset_split": "train[:10000]",
        "max_grad_norm": norm,
        "batch_size": 32 if method == "dpo" else 64,
    }
    if method == "kto":
        settings |= {"lambda_D": own, "lambda_U": 1.0}
    if method == "grpo":
        settings["epsilon"] = own
    if online:
        settings |= ARMORM | {"dataset_split": "train[:14000]"}
    if published is None:
        lc, wr, length = SCORES_3[method, online, humanline]
        error = "no standard error"
        if (method, online, humanline) == ("dpo", False, True):
            error = "± 1.36"
        published = [lc, error, f"WR {wr}", f"length {length}"]
    return expect(method, published, **settings | changes)


def on_gemma(name: str) -> Expected:
    lc, error, wr, lr, beta = SCORES_5[name]
    settings = TABLE_1 | {
        "model": GEMMA,
        "dataset_split": "train[:10000]",
        "batch_size": 32,
        "max_grad_norm": 1.0,
    }
    settings |= {"dataset": LLAMA_DATA if name.endswith("llama-data") else GEMMA_DATA, "lr": lr, "beta": beta}
    settings |= {"humanline": "humanline" in name}
    if name == "27b-baseline":  # one step that changes nothing
        settings |= {"dataset": LLAMA_DATA, "humanline": True, "num_steps": 1, "lr": 1e-30, "beta": 0.1}
    if name == "27b-online":
        settings |= ARMORM | {"dataset_split": "train[:14000]"}
    return expect("dpo", [lc, f"± {error}", f"WR {wr}", "length not given"], **settings)


def on_math(humanline: bool, sample_every: int, k: int) -> Expected:
    data = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "dataset": "math_train.jsonl"}
    data["system_prompt"] = SYSTEM_PROMPT
    same = sample_every == 1 or (humanline and k != 1)
    told = ["MATH500 pass@1 0.593 ± 0.019"] if same else ["no number"]
    return expect("grpo_math", told, **TABLE_2 | data, humanline=humanline, sample_every=sample_every, k=k)


METHODS = ("dpo", "kto", "grpo")
UNTOLD = ["o number in the text"]
MAIN = [(False, False), (False, True), (True, False)]  # offline, offline + humanline, online
ABLATIONS = [{"sync": "none"}, {"clip": "none"}, {"clip": "sample"}]
TRUST_REGION = {"clip": "none", "sync": "after_step"}
QUARTERS = [f"runs/quartiles/quartile{i}.jsonl" for i in (1, 2, 3, 4)]


def main_runs(method: str) -> list[Expected]:
    """Offline, offline + humanline, online."""
    return [on_llama(method, *variant) for variant in MAIN]


def humanline_run(method: str, **changes) -> Expected:
    """Offline + humanline with other settings, of which the paper gives no number."""
    return on_llama(method, False, True, UNTOLD, **changes)


def expected_table_1() -> list[Expected]:
    runs = []
    for method in METHODS:
        runs.append(on_llama(method, False, True))
        runs.append(on_llama(method, True, True))
    return runs


def expected_table_4() -> list[Expected]:
    runs = []
    for (method, humanline), (lc, wr, length) in SCORES_4.items():
        told = [lc, "no standard error", f"WR {wr}", f"length {length}"]
        runs.append(on_llama(method, False, humanline))
        runs.append(on_llama(method, False, humanline, told, dataset=GEMMA_DATA))
    return runs


def expected_table_6() -> list[Expected]:
    runs = []
    for (low, high), (lc, error, length) in SCORES_6.items():
        told = [lc, f"± {error}", f"length {length}"]
        runs.append(on_llama("dpo", False, True, told, log_epsilon_P=low, log_epsilon_R=high))
    return runs


def expected_figure_5() -> list[Expected]:
    runs = []
    for method in METHODS:
        runs += main_runs(method)
        runs += [humanline_run(method, **ablation) for ablation in ABLATIONS]
    return runs


def expected_figure_6() -> list[Expected]:
    runs = [on_llama("dpo", False, True)]
    for quarter in QUARTERS:
        runs.append(humanline_run("dpo", dataset=quarter, num_steps=78, dataset_split="train"))
    return runs


def expected_figure_11() -> list[Expected]:
    runs = []
    for method in METHODS:
        told = ["no seconds in the text"] if method == "grpo" else UNTOLD
        for variant in MAIN:
            runs += [on_llama(method, *variant, told, seed=seed) for seed in (1, 2, 3, 4, 5)]
    return runs


MATH_BASELINES = [on_math(False, 1, 16), on_math(False, 64, 16)]
EXPECTED = {
    "table1": expected_table_1(),
    "table2": MATH_BASELINES + [on_math(True, 64, k) for k in (1, 12, 16, 20, 24)],
    "table3": [on_llama(*key) for key in TABLE_3],
    "table4": expected_table_4(),
    "table5": [on_gemma(name) for name in SCORES_5],
    "table6": expected_table_6(),
    "figure1": [*main_runs("dpo"), *main_runs("kto"), *main_runs("grpo")],
    "figure5": expected_figure_5(),
    "figure6": expected_figure_6(),
    "figure7": MATH_BASELINES + [on_math(True, 64, k) for k in (1, 16, 20)],
    "figure8": [
        on_llama("grpo", False, True),
        *(humanline_run("grpo", k=k) for k in (2, 4, 8, 16, 32, 64)),
    ],
    "figure10": [
        *main_runs("dpo"),
        *(humanline_run(method, k=32, **TRUST_REGION) for method in METHODS),
        humanline_run("dpo", k=1024, **TRUST_REGION),
    ],
    "figure11": expected_figure_11(),
}
RATIOS = {
    (False, False): "unit",
    (False, True): "2x offline, under 1/6 of online",
    (True, False): "over 12x offline",
}


def lines_of(text: str) -> list[tuple[str, str]]:
    """(comment, line) of every command: the comment stands directly above it."""
    found, comment = [], []
    for line in text.splitlines():
        if line.startswith("#"):
            comment.append(line[1:].strip())
            continue
        if line:
            found.append((" ".join(comment), line))
        comment = []
    return found


def runs_of(name: str, text: str, folder, monkeypatch) -> list[Run]:
    """The runs of a file, parsed as torchrun and the script parse them. What else it does is known."""
    runs = []
    for comment, line in lines_of(text):
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
        runs.append(Run(comment, line, commands[0], *PARSED[line]))
    return runs


def fits(expected: Expected, settings: dict) -> bool:
    for key, value in expected.settings.items():
        if key not in APART and settings[key] != value:
            return False
    return True


def check(name: str, text: str, folder, monkeypatch) -> list[Run]:
    """An AssertionError or a SystemExit if the file is not the paper's table or figure."""
    kind, number = re.fullmatch(r"(table|figure)(\d+)", name).groups()
    header = " ".join(line.strip("# ") for line in text.split("\n\n")[0].splitlines())
    assert header.startswith(f"{kind.title()} {number} of ") and "arXiv 2509.24207v2" in header
    for needed in (
        "runs/NAME",
        "outputs.json",
        "docs/alpaca_eval.md",
        "None of these runs has been made at this scale",
    ):
        assert needed in header
    runs = runs_of(name, text, folder, monkeypatch)
    settings = [{"script": run.name} | asdict(run.args) for run in runs]
    left = list(EXPECTED[name])
    for run, found in zip(runs, settings):
        fitting = [expected for expected in left if fits(expected, found)]
        assert fitting, f"{name}: no run of the paper, or one that it has once: {run.line}"
        left.remove(fitting[0])
        missing = [told for told in fitting[0].published if told not in run.comment]
        assert not missing, f"{name}: the comment of {run.line} lacks {missing}"
        scores = re.findall(r"LC-WR ([\d.]+)", run.comment)
        assert scores == [told for told in fitting[0].published[:1] if re.fullmatch(r"[\d.]+", told)]
        assert re.search(r"\b[48] GPUs", run.comment) and ("stated" in run.comment or name == "figure11")
        check_run(name, run)
    assert not left, f"{name}: {len(left)} runs are missing, the first: {left[0].settings}"
    return runs


def check_run(name: str, run: Run) -> None:
    """How a run is evaluated, and what it needs."""
    args, table_5 = run.args, name == "table5"
    ranks = "8" if table_5 else "4"
    assert run.words[:3] == ["torchrun", "--nproc-per-node", ranks] and f"{ranks} GPUs" in run.comment
    assert (
        args.gradient_checkpointing
        and args.output_dir.startswith("runs/")
        and args.output_dir.count("/") == 1
    )
    assert args.checkpoint_every == 0 or args.num_steps % args.checkpoint_every == 0  # the last step has one
    if name == "figure11":
        assert args.eval_dataset == "" and args.checkpoint_every == 0 and run.line.startswith("time ")
        if run.name == "grpo_humanline":
            assert RATIOS[args.online, args.humanline] in run.comment
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
def test_a_file_has_the_runs_of_its_table_or_figure_with_the_papers_settings_and_scores(
    name, tmp_path, monkeypatch
):
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
    lines = [line for _, line in lines_of(file.read_text())]
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
        ("table3", "LC-WR 18.07", "LC-WR 18.70"),
        ("table3", "WR 20.18; ", ""),
        ("table3", "4 GPUs", "GPUs"),
        ("table3", "--gradient-checkpointing", "--gradient-checkpointing \\\n   "),
        ("table3", "--gradient-checkpointing", "--gradient-checkpointing --beta 0.1"),
        ("table3", "--model meta-llama/Meta-Llama-3-8B-Instruct", "$RUN"),
        ("table1", " --temperature 0.7", ""),
        ("table2", "0.593 ± 0.019", "0.593"),
        ("table5", "± 1.67", ""),
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


def test_a_missing_line_or_comment_is_noticed(tmp_path, monkeypatch):
    text = (ROOT / "paper" / "table6.sh").read_text()
    blocks = text.strip().split("\n\n")
    with pytest.raises(AssertionError, match="missing"):
        check("table6", "\n\n".join(blocks[:-1]), tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match="lacks"):
        check("table6", "\n\n".join([*blocks[:-1], blocks[-1].splitlines()[-1]]), tmp_path, monkeypatch)
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
