"""Tests the commands of paper/*.sh: each one is a run of the paper, with the paper's settings."""

import importlib
import math
import re
import subprocess
from dataclasses import asdict

import pytest
from conftest import ROOT
from test_commands import COMMANDS, parse

FILES = sorted(path.stem for path in (ROOT / "paper").glob("*.sh"))
LLAMA, LLAMA_DATA = "meta-llama/Meta-Llama-3-8B-Instruct", "princeton-nlp/llama3-ultrafeedback-armorm"
GEMMA, GEMMA_DATA = "google/gemma-2-27b-it", "princeton-nlp/gemma2-ultrafeedback-armorm"
SYSTEM_PROMPT = (ROOT / "paper" / "math_system_prompt.txt").read_text().strip()

QUARTILES = ["torchrun", "--nproc-per-node", "4", "paper/quartiles.py", "--model", LLAMA]
QUARTILES += ["--dataset", LLAMA_DATA, "--dataset-split", "train[:10000]", "--out", "runs/quartiles"]

TABLE_1 = dict(k=1, log_epsilon_P=-1.5, log_epsilon_R=1.5, temperature=0.7, top_p=0.95, max_new_tokens=2048)
TABLE_1 |= dict(num_steps=312, adam_eps=1e-5, weight_decay=1e-2, warmup_fraction=0.1)
TABLE_1 |= dict(round_prompts=1024, samples_per_prompt=8, reward_threshold=0.01)

# Table 3: {(script, online, humanline): (learning rate, β, maximum gradient norm, λ_D or ε)}
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

BOUNDS = [(-2.0, 1.5), (-1.5, 1.5), (-1.0, 1.5), (-1.0, 2.0), (-1.0, 3.0)]  # of Table 6
TABLE_2 = {"adam_eps": 1e-8, "weight_decay": 0, "warmup_fraction": 0.1, "lr": 1e-6, "max_grad_norm": 1.0}
TABLE_2 |= {"prompts_per_step": 32, "group_size": 8, "max_new_tokens": 2048, "top_p": 1.0, "temperature": 0.7}
TABLE_2 |= {"log_epsilon_P": -1.5, "log_epsilon_R": 1.5, "num_steps": 1600}
ARMORM = {"online": True, "reward_model": "RLHFlow/ArmoRM-Llama3-8B-v0.1", "trust_remote_code": True}

# Settings that the paper does not have: evaluation, and what the memory needs
NEEDS = {"gradient_checkpointing": True, "vllm_memory": 0.3, "max_prompt_length": 625}
NEEDS |= {"eval_dataset": "ref.jsonl", "eval_samples": 805}
WITHOUT_REF = {"eval_dataset": "", "eval_samples": 256}
OF_MATH = {"eval_dataset": "HuggingFaceH4/MATH-500", "eval_samples": 500, "max_prompt_length": 1024}
APART = {"words", "output_dir", "checkpoint_every", "micro_batch_tokens"}  # settings of what a run writes


def expect(script: str, variant: str = "", **settings) -> dict:
    """Returns the expected settings of a run. Settings that are not named have their defaults."""
    defaults = asdict(importlib.import_module(f"{script}_humanline").Args())
    assert settings.keys() <= defaults.keys()
    return {"script": f"{script}_humanline", "variant": variant} | defaults | NEEDS | settings


def on_llama(method: str, online: bool, humanline: bool, **changes) -> dict:
    """Returns the settings of a run of Table 3, with changes."""
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


def on_gemma(**changes) -> dict:
    """Returns the settings of a run of Table 5, with changes."""
    settings = TABLE_1 | {"model": GEMMA, "dataset": GEMMA_DATA, "dataset_split": "train[:10000]"}
    settings |= {"batch_size": 32, "lr": 2.5e-6, "beta": 0.1, "max_grad_norm": 1.0, "vllm_memory": 0.5}
    return expect("dpo", **settings | changes)


def on_math(humanline: bool, sample_every: int, k: int) -> dict:
    """Returns the settings of a run of Table 2."""
    data = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "dataset": "math_train.jsonl"}
    data |= {"system_prompt": SYSTEM_PROMPT, "humanline": humanline, "sample_every": sample_every, "k": k}
    return expect("grpo_math", **TABLE_2 | OF_MATH | data)


def humanline_run(method: str, **changes) -> dict:
    """Returns the settings of offline + humanline, with changes."""
    return on_llama(method, False, True, **changes)


METHODS = ("dpo", "kto", "grpo")
VARIANTS = [(False, False), (False, True), (True, False)]  # offline, offline + humanline, online
MAIN = [on_llama(method, *variant) for method in METHODS for variant in VARIANTS]
OFFLINE = [key for key in TABLE_3 if not key[1]]
NO_BOUNDS = {"log_epsilon_P": -math.inf, "log_epsilon_R": math.inf}
ABLATIONS = [{"k": 0}, NO_BOUNDS, {"variant": "sampling"}]
REGION = {"variant": "trust-region"}
QUARTERS = [f"runs/quartiles/quartile{i}.jsonl" for i in (1, 2, 3, 4)]
MATH = [on_math(False, 1, 16), on_math(False, 64, 16)]
EXPECTED = {
    "table1": [on_llama(method, online, True) for method in METHODS for online in (False, True)],
    "table2": MATH + [on_math(True, 64, k) for k in (1, 12, 16, 20, 24)],
    "table3": [on_llama(*key) for key in TABLE_3],
    "table4": [on_llama(*method, dataset=data) for method in OFFLINE for data in (LLAMA_DATA, GEMMA_DATA)],
    "table5": [
        on_gemma(dataset=LLAMA_DATA, lr=1e-30, num_steps=1),  # one step that changes nothing
        *(on_gemma(humanline=humanline) for humanline in (False, True)),
        *(on_gemma(humanline=humanline, dataset=LLAMA_DATA, beta=0.3) for humanline in (False, True)),
        on_gemma(humanline=False, dataset_split="train[:14000]", **ARMORM),
    ],
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
    "figure11": [run | {"seed": seed} | WITHOUT_REF for run in MAIN for seed in (1, 2, 3, 4, 5)],
}


STAND_INS = """
note() { printf '%s\\0' "$@" '' >> calls; }
torchrun() { note torchrun "$@"; }
python() { note python "$@"; }
curl() { note curl "$@"; }
"""


def calls_of(name: str, folder) -> list[list[str]]:
    """Returns the words of the runs that a file starts, and checks the other commands of the file.

    Functions replace torchrun, python and curl. They write their arguments into a file.
    """
    (folder / "paper").symlink_to(ROOT / "paper")
    command = ["bash", "-c", STAND_INS + (ROOT / "paper" / f"{name}.sh").read_text()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    calls = [call.split("\0") for call in (folder / "calls").read_text().split("\0\0")[:-1]]
    programs = {"table2": ["python"], "figure7": ["python"], "figure11": []}  # the commands that make data
    programs["figure6"] = ["curl", "python", "torchrun"]
    before = programs.get(name, ["curl", "python"])
    assert [call[0] for call in calls[: len(before)]] == before
    assert name != "figure6" or calls[2] == QUARTILES
    calls = calls[len(before) :]
    assert not done.stderr or name == "figure11"  # there `time` prints the seconds
    return calls


def parse_run(words: list[str], folder, monkeypatch) -> dict:
    """Parses the words of a run as torchrun and the script do. Returns its settings."""
    variant = ""
    if words[3] == "paper/variants.py":
        variant, script = words[4:6]
        words = [*words[:3], f"{script}.py", *words[6:]]
    script, args = parse(words, folder, monkeypatch)
    return {"script": script, "variant": variant, "words": words} | asdict(args)


def without(run: dict, keys: set[str]) -> dict:
    return {key: value for key, value in run.items() if key not in keys}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[dict]]:
    """Returns {file: its runs}."""
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in EXPECTED:
            folder = tmp_path_factory.mktemp(name)
            found[name] = [parse_run(words, folder, monkeypatch) for words in calls_of(name, folder)]
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_has_the_runs_of_its_table_or_figure_with_the_papers_settings(name, runs):
    assert FILES == sorted(EXPECTED)
    wanted = [without(run, APART) for run in EXPECTED[name]]
    for run in runs[name]:
        assert without(run, APART) in wanted, f"no run of the paper, or one too many: {run['words']}"
        wanted.remove(without(run, APART))
        assert run["words"][:3] == ["torchrun", "--nproc-per-node", "8" if name == "table5" else "4"]
        assert re.fullmatch(r"runs/[^/]+", run["output_dir"])
        every = run["checkpoint_every"]
        # The last step has a checkpoint, but for the runs whose time is measured.
        assert every == 0 or name != "figure11" and run["num_steps"] % every == 0
        if split := re.fullmatch(r"train\[:(\d+)\]", run["dataset_split"]):
            assert int(split[1]) >= (12 * 1024 if run["online"] else 32 * run["num_steps"])
    assert not wanted, f"{len(wanted)} runs are missing, the first: {wanted[0]}"


def test_the_lines_of_paper_readme_are_the_runs_of_table_3(tmp_path, monkeypatch):
    lines = [words for page, words in COMMANDS if page == "paper/README.md"]
    found = [without(parse_run(words, tmp_path, monkeypatch), APART) for words in lines]
    wanted = [without(run, APART) for run in EXPECTED["table3"]]
    assert len(found) == len(wanted) and all(run in found for run in wanted)


def test_a_folder_is_one_run_in_all_files(runs):
    """A run in two files must not be made twice, and two different runs must not have the same folder."""
    folders, settings = {}, {}
    for run in sum(runs.values(), []):
        folder = run["output_dir"]
        key = repr(without(run, {"words", "output_dir"}))
        assert folders.setdefault(folder, key) == key, run["words"]
        assert settings.setdefault(key, folder) == folder, run["words"]
    # Tables 3, 2, 4, 5 and 6, and figures 5, 6, 8, 10 and 11
    assert len(folders) == 12 + 7 + 6 + 6 + 4 + 9 + 4 + 6 + 4 + 45
