"""The commands of paper/*.sh: every call is a run of the paper, with the paper's settings."""

import importlib
import re
import subprocess
from collections import namedtuple
from dataclasses import asdict

import pytest
from conftest import PAIRS, ROOT, TOY, run_ranks
from safetensors.torch import load_file
from test_commands import TABLE_1, TABLE_3, parse

FILES = sorted(path.stem for path in (ROOT / "paper").glob("*.sh"))
REF = "https://raw.githubusercontent.com/tatsu-lab/alpaca_eval/main/results/gpt4_1106_preview/model_outputs.json"
LLAMA, LLAMA_DATA = "meta-llama/Meta-Llama-3-8B-Instruct", "princeton-nlp/llama3-ultrafeedback-armorm"
GEMMA, GEMMA_DATA = "google/gemma-2-27b-it", "princeton-nlp/gemma2-ultrafeedback-armorm"
SYSTEM_PROMPT = (ROOT / "paper" / "math_system_prompt.txt").read_text().strip()

# What a file does before its runs: the data, unless it is there; and Figure 6's quarters.
GET_REF = ["curl", "-fL", "-o", "ref.json", REF]
TO_LINES = "import json; [print(json.dumps(row)) for row in json.load(open('ref.json'))]"
TO_LINES = ["python", "-c", TO_LINES]
MAKE_MATH = ["python", "paper/math_train.py"]
QUARTILES = ["torchrun", "--nproc-per-node", "4", "paper/quartiles.py", "--model", LLAMA]
QUARTILES += ["--dataset", LLAMA_DATA, "--dataset-split", "train[:10000]", "--out", "runs/quartiles"]

TABLE_5 = {  # Table 5's learning rate and β; the first is not trained
    "27b-baseline": (1e-30, 0.1),
    "27b-offline-llama-data": (2.5e-6, 0.3),
    "27b-offline-humanline-llama-data": (2.5e-6, 0.3),
    "27b-offline-gemma-data": (2.5e-6, 0.1),
    "27b-offline-humanline-gemma-data": (2.5e-6, 0.1),
    "27b-online": (2.5e-6, 0.1),
}
BOUNDS = [(-2.0, 1.5), (-1.5, 1.5), (-1.0, 1.5), (-1.0, 2.0), (-1.0, 3.0)]  # Table 6's
TABLE_2 = {"adam_eps": 1e-8, "weight_decay": 0, "warmup_fraction": 0.1, "lr": 1e-6, "max_grad_norm": 1.0}
TABLE_2 |= {"prompts_per_step": 32, "group_size": 8, "max_new_tokens": 2048, "top_p": 1.0, "temperature": 0.7}
TABLE_2 |= {"log_epsilon_P": -1.5, "log_epsilon_R": 1.5, "num_steps": 1600}
ARMORM = {"online": True, "reward_model": "RLHFlow/ArmoRM-Llama3-8B-v0.1", "trust_remote_code": True}

# Not settings of training: what a run leaves, how it is evaluated, and what fits.
APART = {"output_dir", "checkpoint_every", "gradient_checkpointing", "micro_batch_tokens", "vllm_memory"}
APART |= {"eval_dataset", "eval_samples", "max_prompt_length"}

Run = namedtuple("Run", "words settings")
PARSED = {}  # {words: Run}, for a run stands in several files and tests


# --- what the paper has ---


def expect(script: str, variant: str = "", **settings) -> dict:
    """The settings of a run. What is not named has its default with --model."""
    defaults = asdict(importlib.import_module(f"{script}_humanline").Args())
    assert settings.keys() <= defaults.keys()
    return {"script": f"{script}_humanline", "variant": variant} | defaults | settings


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


def humanline_run(method: str, **changes) -> dict:
    """Offline + humanline with other settings."""
    return on_llama(method, False, True, **changes)


METHODS = ("dpo", "kto", "grpo")
VARIANTS = [(False, False), (False, True), (True, False)]  # offline, offline + humanline, online
MAIN = [on_llama(method, *variant) for method in METHODS for variant in VARIANTS]
ABLATIONS = [{"sync": "none"}, {"clip": False}, {"variant": "sampling"}]
REGION = {"clip": False, "sync": "after_step"}
QUARTERS = [f"runs/quartiles/quartile{i}.jsonl" for i in (1, 2, 3, 4)]
MATH = [on_math(False, 1, 16), on_math(False, 64, 16)]
EXPECTED = {
    "table1": [on_llama(method, online, True) for method in METHODS for online in (False, True)],
    "table2": MATH + [on_math(True, 64, k) for k in (1, 12, 16, 20, 24)],
    "table3": [on_llama(*key) for key in TABLE_3],
    "table4": [
        on_llama(method, False, humanline, dataset=dataset)
        for method in METHODS
        for humanline in (False, True)
        for dataset in (LLAMA_DATA, GEMMA_DATA)
    ],
    "table5": [on_gemma(name) for name in TABLE_5],
    "table6": [humanline_run("dpo", log_epsilon_P=low, log_epsilon_R=high) for low, high in BOUNDS],
    "figure1": MAIN,
    "figure5": MAIN + [humanline_run(method, **ablation) for method in METHODS for ablation in ABLATIONS],
    "figure6": [
        humanline_run("dpo"),
        *(humanline_run("dpo", dataset=x, num_steps=78, dataset_split="train") for x in QUARTERS),
    ],
    "figure7": MATH + [on_math(True, 64, k) for k in (1, 16, 20)],
    "figure8": [humanline_run("grpo", k=k) for k in (1, 2, 4, 8, 16, 32, 64)],
    "figure10": [
        *MAIN[:3],
        *(humanline_run(method, k=32, **REGION) for method in METHODS),
        humanline_run("dpo", k=1024, **REGION),
    ],
    "figure11": [run | {"seed": seed} for run in MAIN for seed in (1, 2, 3, 4, 5)],
}


# --- what the files start ---


STAND_INS = """
note() { printf '%s\\0' "$@" '' >> calls; }
torchrun() { note torchrun "$@"; }
python() { note python "$@"; }
curl() { note curl "$@"; }
"""


def calls_of(text: str, folder) -> tuple[list[list[str]], str]:
    """Every call that a file makes, and what bash says. Functions stand in the places of torchrun, python and
    curl that write down how they were called."""
    (folder / "paper").symlink_to(ROOT / "paper")
    command = ["bash", "-c", STAND_INS + text]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert not done.stdout
    calls = (folder / "calls").read_text().split("\0\0")[:-1]
    return [call.split("\0") for call in calls], done.stderr


def runs_of(name: str, text: str, folder, monkeypatch) -> list[Run]:
    """The runs of a file, parsed as torchrun and the script parse them. What else it does is known."""
    calls, errors = calls_of(text, folder)
    before = {
        "table2": [MAKE_MATH],
        "figure7": [MAKE_MATH],
        "figure11": [],
        "figure6": [GET_REF, TO_LINES, QUARTILES],
    }
    before = before.get(name, [GET_REF, TO_LINES])
    assert calls[: len(before)] == before
    calls = calls[len(before) :]
    assert errors.count("real\t") == (len(calls) if name == "figure11" else 0)  # figure 11 is of time
    assert name == "figure11" or not errors
    return [parse_run(words, folder, monkeypatch) for words in calls]


def parse_run(words: list[str], folder, monkeypatch) -> Run:
    key = tuple(words)
    if key not in PARSED:
        variant = ""
        if words[3] == "paper/variants.py":
            variant, script = words[4:6]
            words = [*words[:3], f"{script}.py", *words[6:]]
        script, args = parse(words, folder, monkeypatch)
        PARSED[key] = Run(words, {"script": script, "variant": variant} | asdict(args))
    return PARSED[key]


def check(name: str, text: str, folder, monkeypatch):
    """An AssertionError or a SystemExit if the file is not the paper's table or figure."""
    left = list(EXPECTED[name])
    for run in runs_of(name, text, folder, monkeypatch):
        fitting = []
        for expected in left:
            if all(key in APART or run.settings[key] == value for key, value in expected.items()):
                fitting.append(expected)
        assert fitting, f"{name}: no run of the paper, or one that it has once: {run.words}"
        left.remove(fitting[0])
        check_run(name, run)
    assert not left, f"{name}: {len(left)} runs are missing, the first: {left[0]}"


def check_run(name: str, run: Run):
    """How a run is evaluated, and what it needs."""
    args = run.settings
    assert run.words[:3] == ["torchrun", "--nproc-per-node", "8" if name == "table5" else "4"]
    assert args["gradient_checkpointing"] and re.fullmatch(r"runs/[^/]+", args["output_dir"])
    every = args["checkpoint_every"]
    assert every == 0 or args["num_steps"] % every == 0  # the last step has one
    evaluation = (args["eval_dataset"], args["eval_samples"], args["max_prompt_length"])
    if args["script"] == "grpo_math_humanline":
        assert evaluation == ("HuggingFaceH4/MATH-500", 500, 1024)
    else:
        assert evaluation == (("", 256, 625) if name == "figure11" else ("ref.jsonl", 805, 625))
        split = re.fullmatch(r"train\[:(\d+)\]", args["dataset_split"])
        rows = int(split[1]) if split else 2500  # of a quarter
        assert rows >= (12 * 1024 if args["online"] else 32 * args["num_steps"])
    assert name != "figure11" or every == 0
    assert args["vllm_memory"] == (0.5 if name == "table5" else 0.3)
    flags = [word for word in run.words if word.startswith("--")]
    assert len(flags) == len(set(flags))
    if name == "table1":  # it names what is the default
        online = {"round_prompts", "samples_per_prompt", "reward_threshold"}
        keys = [key for key in (*TABLE_1, "batch_size") if args["online"] or key not in online]
        assert {f"--{key.replace('_', '-')}" for key in keys} <= set(flags)


def text_of(name: str) -> str:
    return (ROOT / "paper" / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_has_the_runs_of_its_table_or_figure_with_the_papers_settings(name, tmp_path, monkeypatch):
    assert FILES == sorted(EXPECTED)
    check(name, text_of(name), tmp_path, monkeypatch)


def test_a_folder_is_one_run_in_all_files(tmp_path, monkeypatch):
    """So that a run that stands in two files is not made twice, and two runs do not meet in one folder."""
    folders, settings = {}, {}
    for name in FILES:
        (tmp_path / name).mkdir()
        for run in runs_of(name, text_of(name), tmp_path / name, monkeypatch):
            folder = run.settings["output_dir"]
            key = repr(run.settings | {"output_dir": ""})
            assert folders.setdefault(folder, key) == key, run.words
            assert settings.setdefault(key, folder) == folder, run.words
    assert (
        len(folders) == 12 + 7 + 6 + 6 + 4 + 9 + 4 + 6 + 4 + 45
    )  # tables 3, 2, 4 to 6, figures 5, 6, 8, 10, 11


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("table3", "--no-humanline", "--no-humanlin"),
        ("table3", "--lr 2.5e-6", "--lr 2.5e-5"),
        ("table3", "--gradient-checkpointing", "--gradient-checkpointing --beta 0.2"),
        ("table1", " --temperature 0.7", ""),
        ("table6", "torchrun", "# torchrun"),
        ("figure11", "1 2 3 4 5;", "1 2 3 4 4;"),
        ("figure11", "time torchrun", "torchrun"),
    ],
)
def test_a_mangled_file_is_noticed(name, right, wrong, tmp_path, monkeypatch):
    text = text_of(name)
    assert right in text
    with pytest.raises((AssertionError, SystemExit)):
        check(name, text.replace(right, wrong, 1), tmp_path, monkeypatch)


def test_the_baselines_step_changes_no_weight(tmp_path):
    """Table 5's untrained model: the run that stands for it."""
    flags = ["--model", str(TOY / "policy"), "--dataset", PAIRS, "--batch-size", "8", "--engine", "hf"]
    flags += ["--num-steps", "1", "--lr", "1e-30", "--eval-dataset", PAIRS, "--eval-samples", "8"]
    run_ranks(1, [[*flags, "--max-new-tokens", "8", "--output-dir", str(tmp_path / "run")]])
    folders = (TOY / "policy", tmp_path / "run" / "final")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys() and (tmp_path / "run" / "outputs.json").exists()
    assert all((before[key] == after[key]).all() for key in before)
