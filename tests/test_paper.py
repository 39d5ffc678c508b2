"""Tests paper/: the commands of the paper's runs, variants against their formulas, and the data and judge."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import tyro
from helpers import (
    ALL_SCRIPTS,
    PAIRS,
    ROOT,
    SHARED,
    TOY,
    commands_of,
    metrics,
    parse_command,
    read_rows,
    refused,
    run_here,
    run_ranks,
    write_rows,
)
from scipy import stats
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo_humanline
import grpo_math_humanline as script
import utils
from paper import math_train, quartiles, variants
from paper.variants import LAST, VARIANTS, humanline_sampling

# === Commands ===
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
ARMORM = {"online": True, "reward_model": "runs/armorm", "trust_remote_code": True}

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
KINDS = [(False, False), (False, True), (True, False)]  # offline, offline + humanline, online
MAIN = [on_llama(method, *variant) for method in METHODS for variant in KINDS]
OFFLINE = [key for key in TABLE_3 if not key[1]]
NO_BOUNDS = {"log_epsilon_P": -math.inf, "log_epsilon_R": math.inf}
ABLATIONS = [{"k": 0}, NO_BOUNDS, {"variant": "sampling"}]
REGION = {"variant": "trust-region"}
QUARTERS = [f"runs/quartiles/quartile{i}.jsonl" for i in (1, 2, 3, 4)]
MATH_RUNS = [on_math(False, 1, 16), on_math(False, 64, 16)]
EXPECTED = {
    "table2": MATH_RUNS + [on_math(True, 64, k) for k in (1, 12, 16, 20, 24)],
    "table3": [on_llama(*key) for key in TABLE_3],
    "table4": [on_llama(*method, dataset=data) for method in OFFLINE for data in (LLAMA_DATA, GEMMA_DATA)],
    "table5": [
        on_gemma(dataset=LLAMA_DATA, lr=1e-30, num_steps=1),  # one step that changes nothing
        *(on_gemma(humanline=humanline) for humanline in (False, True)),
        *(on_gemma(humanline=humanline, dataset=LLAMA_DATA, beta=0.3) for humanline in (False, True)),
        on_gemma(humanline=False, dataset_split="train[:14000]", **ARMORM),
    ],
    "table6": [humanline_run("dpo", log_epsilon_P=low, log_epsilon_R=high) for low, high in BOUNDS],
    "figure5": [humanline_run(method, **ablation) for method in METHODS for ablation in ABLATIONS],
    "figure6": [
        humanline_run("dpo"),
        *(humanline_run("dpo", dataset=x, num_steps=78, dataset_split="train") for x in QUARTERS),
    ],
    "figure7": MATH_RUNS + [on_math(True, 64, k) for k in (1, 16, 20)],
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
    # the commands that make data and the reward model
    programs = {"table2": ["python"], "figure7": ["python"], "figure11": ["python"]}
    programs |= dict.fromkeys(("table3", "table5", "figure10"), ["curl", "python", "python"])
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
    script, args = parse_command(words, folder, monkeypatch)
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


def test_the_lines_of_paper_readme_are_runs_of_table_3(tmp_path, monkeypatch):
    lines = [words for _, words in commands_of("paper/README.md")]
    found = [without(parse_run(words, tmp_path, monkeypatch), APART) for words in lines]
    wanted = [without(run, APART) for run in EXPECTED["table3"]]
    assert found and all(run in wanted for run in found)


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


# === Variants ===
BETA, EPSILON = 0.01, 0.2
B, T = 6, 9


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(0)
    log_ratio = torch.randn(B, T, dtype=torch.float64)  # ratios from 0.1 to 12
    mask = (torch.arange(T) < torch.randint(2, T + 1, (B, 1))).double()
    return log_ratio * mask, mask, torch.tensor([1.0, -1, 0.5, -2, 1, -0.3], dtype=torch.float64)


def objective(name: str, batch, epsilon=EPSILON):
    """Returns the script's loss with a variant and its gradient by token, (B, T) each."""
    log_ratio, mask, advantages = batch
    log_ratio = log_ratio.clone().requires_grad_()
    LAST.mask = mask
    LAST.logps = -1.5 * mask + log_ratio.detach() / 2  # the policy's; the others are this minus log_ratio
    functions = {"clip_log_ratio": lambda args, log_ratio: log_ratio, "grpo_loss": script.grpo_loss}
    functions |= VARIANTS[name]
    clipped = functions["clip_log_ratio"](None, log_ratio)
    loss = functions["grpo_loss"](clipped, log_ratio, advantages, BETA, epsilon)
    (loss * mask).sum().backward()
    return (loss.detach() * mask).numpy(), (log_ratio.grad * mask).numpy()


def by_hand(batch) -> tuple:
    """Returns for each token log-ratio, mask, advantage, ratio, KL penalty and its gradient, by numpy."""
    x, mask, advantages = (tensor.numpy() for tensor in batch)
    A = np.broadcast_to(advantages[:, None], x.shape)
    return x, mask, A, np.exp(x), BETA * (np.exp(-x) + x - 1), BETA * (1 - np.exp(-x))


CLIPS = {"clip-higher-1.28": 1.28, "clip-higher-1.5": 1.5, "gspo": 1 + EPSILON}


@pytest.mark.parametrize("name", CLIPS)
def test_the_ratio_is_clipped(name, batch):
    x, mask, A, ratio, kl, kl_slope = by_hand(batch)
    if name == "gspo":
        # A sequence has one ratio. Each of its N tokens has the loss of this ratio and 1 / N of its gradient.
        ratio = np.exp((x * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True))  # (B, 1)
    loss, gradient = objective(name, batch)
    gone = np.where(A > 0, ratio > CLIPS[name], ratio < 1 - EPSILON)
    bounded = np.clip(ratio, 1 - EPSILON, CLIPS[name])
    np.testing.assert_allclose(loss, mask * (kl - np.minimum(A * ratio, A * bounded)), atol=1e-14)
    np.testing.assert_allclose(gradient, mask * (kl_slope - ~gone * A * ratio), atol=1e-14)
    assert 0 < gone[mask > 0].mean() < 1


@pytest.mark.parametrize("name", ["cispo", "icepop"])
def test_the_gradient_is_weighed_by_the_ratio(name, batch):
    """CISPO's weight is at most 5. IcePop's weight is 0 outside of 0.5 to 5."""
    x, mask, A, ratio, kl, kl_slope = by_hand(batch)
    loss, gradient = objective(name, batch, epsilon=1e9)
    assert (ratio > 5)[mask > 0].any() and (ratio < 0.5)[mask > 0].any()
    weight, value = np.minimum(ratio, 5), np.minimum(ratio, 5) * x
    if name == "icepop":
        weight, value = np.where((ratio >= 0.5) & (ratio <= 5), ratio, 0), ratio
    np.testing.assert_allclose(loss, mask * (kl - A * value), atol=1e-14)
    np.testing.assert_allclose(gradient, mask * (kl_slope - weight * A), atol=1e-14)


def test_without_a_reference_the_gradient_is_that_of_the_log_prob(batch):
    x, mask, A, *_ = by_hand(batch)
    loss, gradient = objective("no-reference", batch)
    np.testing.assert_allclose(loss, -mask * A, atol=1e-14)
    np.testing.assert_allclose(gradient, -mask * A, atol=1e-14)


def test_m2po_removes_the_largest_of_what_a_clip_could_stop_until_the_mean_square_is_004(batch):
    log_ratio, *rest = batch
    batch = (log_ratio / 3, *rest)
    x, mask, A, ratio, kl, kl_slope = by_hand(batch)
    loss, gradient = objective("m2po", batch, epsilon=1e9)
    stoppable = ((A > 0) & (ratio > 1)) | ((A < 0) & (ratio < 1))
    among = mask * stoppable
    order = [divmod(i, T) for i in np.argsort(-np.where(among > 0, x**2, -1).ravel())]
    kept = among.copy()
    for i, j in order:
        if (x**2 * kept).sum() / max(kept.sum(), 1) <= 0.04:
            break
        kept[i, j] = 0
    assert 0 < kept.sum() < among.sum() < mask.sum()
    gone = among - kept
    np.testing.assert_allclose(loss, mask * (kl - A * ratio), atol=1e-14)
    np.testing.assert_allclose(gradient, mask * (kl_slope - (1 - gone) * A * ratio), atol=1e-14)


def test_dppo_stops_tokens_whose_probability_has_moved_by_more_than_delta(batch):
    """As in verl's `compute_policy_loss_dppo_tv`: by the difference of probabilities, not by the ratio."""
    x, mask, A, ratio, kl, kl_slope = by_hand(batch)
    loss, gradient = objective("dppo", batch, epsilon=0.15)
    new = np.exp(-1.5 * mask + x / 2)
    old = new / ratio
    valid = np.where(A > 0, new - old <= 0.15, new - old >= -0.15)
    np.testing.assert_allclose(loss, mask * (kl - A * ratio), atol=1e-14)
    np.testing.assert_allclose(gradient, mask * (kl_slope - valid * A * ratio), atol=1e-14)
    beyond = np.where(A > 0, ratio > 1.2, ratio < 0.8)
    assert 0 < valid[mask > 0].mean() < 1 and (valid & beyond)[mask > 0].any()


def test_drpo_weighs_a_gradient_by_how_far_the_probability_has_moved(batch):
    """The weight is 1 - sign(A) (π_θ - π_old) / δ, which is negative beyond δ (2606.09821)."""
    x, mask, A, ratio, kl, kl_slope = by_hand(batch)
    loss, gradient = objective("drpo", batch, epsilon=0.15)
    new = np.exp(-1.5 * mask + x / 2)
    old = new / ratio
    penalty = np.abs(A) * (new - old) ** 2 / old / 0.3  # π_old (r - 1)² = (π_θ - π_old)² / π_old
    np.testing.assert_allclose(loss, mask * (kl - A * ratio + penalty), atol=1e-13)
    weight = 1 - np.sign(A) * (new - old) / 0.15
    assert (weight < 0)[mask > 0].any() and (weight > 1)[mask > 0].any()
    np.testing.assert_allclose(gradient, mask * (kl_slope - weight * A * ratio), atol=1e-13)


def share_of_positive_tokens(x, mask, A, ratio, low, high) -> float:
    """Returns the left side of BAPO's equation 8, literally."""
    old = np.exp(-1.5 * mask + x / 2) / ratio
    above = np.abs(np.minimum(ratio * A, np.clip(ratio, 0, high) * A))
    all_tokens = np.abs(np.minimum(ratio * A, np.clip(ratio, low, high) * A))
    return (mask * old * above)[A > 0].sum() / (mask * old * all_tokens).sum()


@pytest.mark.parametrize(("target", "ends"), [(0.3, "at once"), (0.39, "high"), (0.99, "limit")])
def test_bapo_moves_the_upper_bound_and_then_the_lower_one_until_positive_tokens_have_their_share(
    target, ends, batch, monkeypatch
):
    x, mask, A, ratio, kl, kl_slope = by_hand(batch)
    monkeypatch.setitem(VARIANTS, "bapo", {"grpo_loss": partial(variants.bapo, target=target)})
    loss, gradient = objective("bapo", batch)
    bounds = [(0.6, high) for high in np.arange(1.2, 3.01, 0.05)]
    bounds += [(low, 3.0) for low in np.arange(0.62, 0.91, 0.02)]  # Algorithm 1
    reached = [pair for pair in bounds if share_of_positive_tokens(x, mask, A, ratio, *pair) >= target]
    low, high = reached[0] if reached else bounds[-1]
    moved = {"at once": (0.6, 1.2), "limit": (0.9, 3.0)}
    if ends in moved:
        assert (low, high) == pytest.approx(moved[ends])
    else:
        assert low == 0.6 and 1.2 < high < 3.0
    gone = np.where(A > 0, ratio > high, ratio < low)
    bounded = np.clip(ratio, low, high)
    np.testing.assert_allclose(loss, mask * (kl - np.minimum(A * ratio, A * bounded)), atol=1e-12)
    np.testing.assert_allclose(gradient, mask * (kl_slope - ~gone * A * ratio), atol=1e-12)


def test_oapl_regresses_the_log_ratio_of_a_sample_on_its_optimal_advantage(batch):
    """(β_2 log π(y|x)/π_old(y|x) - A*)², as a mean over samples but for the mean length."""
    x, mask, *_ = by_hand(batch)
    log_ratio, mask_tensor, _ = batch
    rewards = torch.tensor([[10.0, 0, 2], [1.0, 1, 9]], dtype=torch.float64)  # two problems, G = 3
    advantages = variants.optimal_advantages(rewards).flatten()
    r = rewards.numpy() / 10
    expected = r - np.log(np.exp(r).mean(1, keepdims=True))  # β_1 = 1
    np.testing.assert_allclose(advantages.numpy(), expected.ravel(), atol=1e-14)

    loss, gradient = objective("oapl", (log_ratio, mask_tensor, advantages))
    residuals = BETA * (x * mask).sum(1) - expected.ravel()
    lengths = mask.sum(1)
    mean = loss.sum() / mask.sum()  # the script's mean over tokens
    assert mean == pytest.approx((residuals**2).mean() / lengths.mean())
    slopes = 2 * residuals * BETA
    np.testing.assert_allclose(gradient, mask * slopes[:, None], atol=1e-14)


def test_hypo_counts_a_reference_that_prefers_the_rejected_completion_as_neutral(batch):
    log_ratio, mask, _ = batch
    P, beta = B // 2, 0.3
    ref_logps = torch.linspace(-3, -0.1, B * T, dtype=torch.float64).view(B, T).flip(0) * mask
    ref_logps[0] = -9 * mask[0]  # here the reference prefers the rejected completion
    LAST.logps = ref_logps + log_ratio
    x = log_ratio.clone().requires_grad_()
    losses = variants.hypo(x, mask, beta)
    losses.sum().backward()
    new, old = LAST.logps.numpy().sum(1), ref_logps.numpy().sum(1)
    margins, of_reference = new[:P] - new[P:], old[:P] - old[P:]
    assert (of_reference > 0).any() and (of_reference < 0).any()
    z = beta * (margins - np.maximum(0, of_reference))
    np.testing.assert_allclose(losses.detach().numpy(), np.log1p(np.exp(-z)), atol=1e-13)
    slopes = -beta / (1 + np.exp(z))
    np.testing.assert_allclose(x.grad[:P].numpy(), mask[:P].numpy() * slopes[:, None], atol=1e-13)
    np.testing.assert_allclose(x.grad[P:].numpy(), -mask[P:].numpy() * slopes[:, None], atol=1e-13)
    plain = dpo_humanline.dpo_loss(log_ratio, mask, beta)
    neutral = torch.as_tensor(of_reference > 0)
    assert torch.allclose(losses.detach()[neutral], plain[neutral])
    assert torch.equal(variants.hypo(log_ratio, mask, beta), plain)  # an evaluation


def test_vcpo_multiplies_the_rate_by_the_root_of_the_share_of_effective_samples(batch, one_rank, monkeypatch):
    """√((Σ w)² / (B Σ w²)), w: the product of a sequence's ratios. A batch comes in two micro-batches."""
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    monkeypatch.setattr(variants, "register_optimizer_step_pre_hook", optimizer.register_step_pre_hook)
    monkeypatch.setattr(variants.run, "perf_metrics", dict)
    monkeypatch.setattr(LAST, "args", SimpleNamespace(humanline=False))
    copy = SimpleNamespace(**vars(script))
    variants.vcpo_rate(copy)
    for log_ratio in (batch[0], 2 * batch[0][:3]):  # the second batch has no sequences of the first
        for rows in (slice(0, 2), slice(2, None)):
            copy.clip_log_ratio(LAST.args, log_ratio[rows])
        weight.grad = torch.ones_like(weight)
        before = weight.item()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        w = np.exp(log_ratio.numpy().sum(1))
        share = w.sum() ** 2 / (len(w) * (w**2).sum())
        assert before - weight.item() == pytest.approx(0.1 * np.sqrt(share), rel=1e-12)
        found = {"lr": before - weight.item(), "vcpo/effective_share": share}
        assert variants.run.perf_metrics() == pytest.approx(found, rel=1e-12)
    assert variants.effective_share(torch.tensor([700.0, 700, -700])) == pytest.approx(2 / 3)  # no overflow


def test_a_moving_average_takes_a_part_of_the_policys_weights_at_each_sync(one_rank, monkeypatch):
    copy = SimpleNamespace()
    for humanline, k in ((False, 1), (True, 0)):
        monkeypatch.setattr(LAST, "args", SimpleNamespace(online=False, humanline=humanline, k=k))
        with pytest.raises(utils.InputError, match="ema needs humanline and a --k above 0"):
            variants.OTHERS["ema-0.03"](copy)
    monkeypatch.setattr(LAST, "args", SimpleNamespace(online=False, humanline=True, k=1))
    variants.OTHERS["ema-0.03"](copy)
    policy, reference, rounded = (fully_shard(torch.nn.Linear(3, 2).double()) for _ in range(3))
    expected = reference.weight.full_tensor().detach().numpy().copy()
    for step in range(3):
        policy.weight.data.add_(step + 1.0)
        copy.sync_reference(reference, policy)
        expected = 0.97 * expected + 0.03 * policy.weight.full_tensor().detach().numpy()
    np.testing.assert_allclose(reference.weight.full_tensor().detach().numpy(), expected, atol=1e-14)
    assert torch.equal(copy.clip_log_ratio(None, torch.tensor([-9.0, 9.0])), torch.tensor([-9.0, 9.0]))
    with pytest.raises(utils.InputError, match="ema: bf16 would lose small changes"):
        copy.sync_reference(rounded.bfloat16(), policy)


# === Humanline sampling ===
IDS = torch.arange(B * T).view(B, T)


def sample(log_ratio, mask, input_ids, number=7, kappa=100.0) -> tuple:
    """Returns the log-ratios after humanline sampling, and which tokens keep their gradient."""
    LAST.step, LAST.mask, LAST.input_ids = (1, number), mask, input_ids
    x = log_ratio.clone().requires_grad_()
    result = humanline_sampling(SimpleNamespace(log_epsilon_P=-1.5, log_epsilon_R=1.5), x, kappa)
    result.sum().backward()
    return result.detach(), x.grad.bool()


@pytest.mark.parametrize("r", [-2.5, -1.0, 1.2, 2.0])
def test_sampling_keeps_values_and_gradients_as_often_as_equation_5_says(r):
    """A token with ratio e^r keeps its gradient if B_P ≤ e^r / M and B_R ≤ 1 / (e^r M)."""
    log_ratio = torch.full((100, 400), r).double()
    result, kept = sample(log_ratio, torch.ones(100, 400), torch.arange(40_000).view(100, 400))
    assert torch.equal(result, log_ratio)
    chance = 1.0
    for x in (r, -r):
        mean = math.exp(-1.5) / 10  # M = 10, κ = 100
        chance *= stats.beta(100 * mean, 100 * (1 - mean)).cdf(math.exp(x) / 10)
    deviation = math.sqrt(chance * (1 - chance) / 40_000)
    assert 0.001 < chance < 0.999
    assert kept.double().mean().item() == pytest.approx(chance, abs=5 * deviation)


def test_theorem_4_3_with_large_kappa_the_kept_tokens_are_those_within_the_bounds(batch):
    log_ratio, mask, _ = batch
    _, kept = sample(log_ratio, mask, IDS, kappa=1e8)
    inside = (log_ratio >= -1.5) & (log_ratio <= 1.5)
    assert torch.equal(kept, inside) and not inside.all()


def test_draws_depend_on_step_and_tokens_and_not_on_the_micro_batch(batch):
    log_ratio, mask, _ = batch
    _, kept = sample(log_ratio, mask, IDS)
    rows = [4, 1]  # in another micro-batch, with less padding
    longest = int(mask[rows].sum(1).max())
    part = [tensor[rows, :longest] for tensor in (log_ratio, mask, IDS)]
    assert torch.equal(sample(*part)[1], kept[rows, :longest])
    assert not torch.equal(sample(*part, number=8)[1], kept[rows, :longest])


# === Metrics ===
STOPPED = {"clip-higher-1.28": 0.2, "gspo": 0.2, "icepop": 1e9, "m2po": 1e9, "dppo": 0.15, "bapo": 0.2}


@pytest.mark.parametrize("name", [*STOPPED, "cispo", "oapl"])
def test_the_clip_fraction_is_that_of_the_variant(name, batch, monkeypatch):
    """It is 1 where a token has an advantage but no gradient, and not where the script's ε would clip."""
    log_ratio, mask, advantages = batch
    epsilon = STOPPED.get(name, 1e9)
    _, gradient = objective(name, batch, epsilon)
    *_, kl_slope = by_hand(batch)
    rest = 0 if name == "oapl" else mask.numpy() * kl_slope  # the gradient without that of the policy's term
    own = np.isclose(gradient, rest, rtol=0, atol=1e-12) & (mask.numpy() > 0)
    copy = SimpleNamespace(**{key: getattr(script, key) for key in ("clip_log_ratio", "grpo_loss")})
    vars(copy).update(VARIANTS[name], grpo_metrics=script.grpo_metrics)
    monkeypatch.setattr(LAST, "args", SimpleNamespace(beta=BETA, humanline=False))
    variants.count_stopped_tokens(copy)
    found = copy.grpo_metrics(log_ratio, log_ratio, advantages, epsilon)
    assert np.array_equal(found["grpo/clip_fraction"].numpy() * mask.numpy() > 0, own)
    assert own.any() == (name in STOPPED)
    assert torch.equal(found["grpo/kl"], script.k3(log_ratio))  # the others are the script's


# === The command ===
def test_what_cannot_run_is_refused(monkeypatch):
    for name in ALL_SCRIPTS:  # the command names the variant there
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "__file__", module.__file__)
    for words in ([], ["ppo", "grpo_humanline"], ["cispo", "cispo"]):
        with pytest.raises(
            SystemExit, match=r"error: name a variant \(trust-region, vcpo-rate, ema-0.1, ema-0.03, no-clipp"
        ):
            variants.main(words)
    for name, script_name, function in (("cispo", "dpo", "grpo_loss"), ("hypo", "grpo", "dpo_loss")):
        with pytest.raises(SystemExit, match=f"{script_name}_humanline has no {function}, which {name}"):
            variants.main([name, f"{script_name}_humanline"])
    for words in (["kto_humanline", "--no-humanline"], ["grpo_math_humanline"]):
        with pytest.raises(SystemExit, match="vcpo-rate is for GRPO with --no-humanline"):
            variants.main(["vcpo-rate", *words])
    for words in (["dpo_humanline", "--online"], ["grpo_math_humanline"]):
        for name, label in (("trust-region", "trust-region"), ("ema-0.1", "ema")):
            with pytest.raises(SystemExit, match=f"{label} is for offline data"):
                variants.main([name, *words, "--engine", "hf", "--num-steps", "1"])


def run_variant(name: str, script, arguments: list):
    """Is a worker, as partial(run_variant, name): runs a script with a variant, as the command does."""
    variants.main([name, script.__name__, *arguments])


def train(variant: str, script_name: str, folder, *flags) -> list[dict]:
    """Returns the metrics of a run."""
    run_ranks(1, [[*flags, "--output-dir", str(folder)]], partial(run_variant, variant), script_name)
    return metrics(folder)


SHORT = "--batch-size 4 --lr 1e-2 --warmup-fraction 0 --checkpoint-every 0 --engine hf".split()
SHORT += ["--dataset", PAIRS, "--eval-dataset", ""]


@pytest.mark.slow
def test_a_trust_region_syncs_after_every_kth_update_and_clips_nothing(tmp_path):
    """All log-ratios are 0 where the reference is the policy. Bounds of ±1e-9 would clip all other tokens."""
    bounds = ["--log-epsilon-P=-1e-9", "--log-epsilon-R=1e-9"]
    flags = ["--k", "3", "--num-steps", "7", *SHORT, *bounds]
    steps = train("trust-region", "dpo_humanline", tmp_path / "run", *flags)
    in_sync = [step["step"] for step in steps if step["humanline/log_ratio_abs_mean"] == 0]
    assert in_sync == [0, 3, 6]
    for step in steps:
        if step["step"] not in in_sync:
            assert step["humanline/clipped_low"] + step["humanline/clipped_high"] > 0.9
            assert abs(step["rewards/chosen"]) > 0.01  # with clipping it would be below 1e-7


@pytest.mark.slow
def test_without_clipping_training_is_as_with_infinite_bounds_and_the_metrics_have_the_bounds(tmp_path):
    flags = ["--k", "2", "--num-steps", "4", *SHORT]
    train("no-clipping", "dpo_humanline", tmp_path / "run", *flags)
    unbounded = [*flags, "--log-epsilon-P=-inf", "--log-epsilon-R=inf", "--output-dir", tmp_path / "all"]
    found, expected = metrics(tmp_path / "run", True), metrics(run_here(dpo_humanline, *unbounded), True)
    clipped = ("humanline/clipped_low", "humanline/clipped_high")
    assert sum(step[key] for step in found for key in clipped) > 0
    for step, other in zip(found, expected, strict=True):
        assert step | dict.fromkeys(clipped, 0) == other | dict.fromkeys(clipped, 0)


@pytest.mark.slow
def test_a_run_trains_with_the_variant(tmp_path):
    """In the first step after sampling the gradient is the script's, and then it is the variant's."""
    flags = ["--no-humanline", "--engine", "hf", "--num-steps", "2", "--sample-every", "2", "--lr", "1e-3"]
    flags += ["--warmup-fraction", "0", "--eval-samples", "0", "--checkpoint-every", "0"]
    flags += ["--epsilon", "1e-3"]  # most tokens are beyond it in the second step
    first, second = metrics(run_here(script, *flags, "--output-dir", tmp_path / "grpo"))
    its_first, its_second = train("bapo", "grpo_math_humanline", tmp_path / "bapo", *flags)
    assert its_first["grad_norm"] == pytest.approx(first["grad_norm"])
    assert its_second["grad_norm"] != pytest.approx(second["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_vcpo_slows_old_samples_by_as_much_on_two_ranks_and_after_a_resume(tmp_path):
    flags = ["--no-humanline", "--engine", "hf", "--num-steps", "4", "--sample-every", "4", "--lr", "3e-3"]
    flags += ["--warmup-fraction", "0", "--eval-samples", "0", "--checkpoint-every", "4", "--epsilon", "1e9"]
    flags += ["--max-new-tokens", "32"]
    steps = train("vcpo-rate", "grpo_math_humanline", tmp_path / "one", *flags)
    rates = [step["lr"] for step in steps]
    assert rates[0] == 3e-3 and max(rates[1:]) < 2.99e-3  # the first step's samples are fresh
    assert rates == pytest.approx([3e-3 * step["vcpo/effective_share"] ** 0.5 for step in steps])
    worker = partial(run_variant, "vcpo-rate")
    run_ranks(2, [[*flags, "--output-dir", str(tmp_path / "two")]], worker, "grpo_math_humanline")
    assert [step["lr"] for step in metrics(tmp_path / "two")] == pytest.approx(rates, rel=1e-3)
    resume = ["--resume", str(tmp_path / "one"), "--num-steps", "6"]
    run_ranks(1, [resume], worker, "grpo_math_humanline")
    *_, fresh, old = metrics(tmp_path / "one")
    assert fresh["lr"] == 3e-3 and old["lr"] == pytest.approx(3e-3 * old["vcpo/effective_share"] ** 0.5)


@pytest.mark.slow
def test_oapl_and_hypo_train(tmp_path):
    """OAPL's gradient differs from the script's in the first step; HyPO's does from DPO's."""
    flags = ["--no-humanline", "--engine", "hf", "--num-steps", "2", "--sample-every", "2", "--lr", "1e-3"]
    flags += ["--eval-samples", "0", "--checkpoint-every", "0", "--beta", "1e-3"]
    losses = [step["loss"] for step in train("oapl", "grpo_math_humanline", tmp_path / "oapl", *flags)]
    assert all(0 < loss < 1 for loss in losses)  # squares of rewards in [0, 1], over the mean length
    flags = ["--no-humanline", "--num-steps", "2", *SHORT]
    first, _ = train("hypo", "dpo_humanline", tmp_path / "hypo", *flags)
    assert first["loss"] > math.log(2) + 1e-3  # DPO's first loss is log 2; pessimistic pairs have more
    resume = ["--resume", str(tmp_path / "hypo"), "--num-steps", "3"]
    assert "it is not a run of dpo_humanline.py" in refused(resume)
    run_ranks(1, [resume], partial(run_variant, "hypo"))
    assert len(metrics(tmp_path / "hypo")) == 3


# === quartiles.py ===
def make_quartiles(script, arguments: list):
    """Is a worker: splits a data set as the command does."""
    quartiles.main(tyro.cli(quartiles.Args, args=arguments))


@pytest.mark.slow
def test_quartiles_are_the_rows_by_the_average_log_prob_of_the_chosen_tokens(tmp_path):
    """On two ranks, which share the rows."""
    rows = [row | {"note": number} for number, row in enumerate(read_rows(PAIRS)[:34])]
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    flags = ["--model", str(TOY / "policy"), "--dataset", data, "--out", str(tmp_path)]
    flags += ["--max-prompt-length", "64", "--max-length", "128"]
    run_ranks(2, [flags], make_quartiles)
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy", dtype=torch.float64)

    def average(row) -> float:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]
        prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), return_tensors="pt").input_ids
        with torch.no_grad():
            logps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        return logps[len(tokenizer(prompt).input_ids) - 1 :].mean().item()

    ranked = sorted(rows, key=average)
    for i, (first, last) in enumerate([(0, 9), (9, 18), (18, 26), (26, 34)], start=1):
        wanted = sorted(ranked[first:last], key=lambda row: row["note"])
        assert read_rows(tmp_path / f"quartile{i}.jsonl") == wanted


# === math_train.py ===
REAL = SHARED / "math"
PROBLEMS = []
for number in range(12_500):
    PROBLEMS.append({"problem": f"What is {number} + 1?", "solution": f"It is $\\boxed{{{number + 1}}}$."})
# with other white space, which must not matter
PROBLEMS500 = [row | {"problem": f" {row['problem']}\n", "answer": "?"} for row in PROBLEMS[::25]]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Returns a function that runs the program, and returns the written rows or the error message."""
    monkeypatch.chdir(tmp_path)
    for module in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)

    def run(math, math500="test.jsonl", out="math_train.jsonl"):
        try:
            math_train.main(math, math500, tmp_path / out)
        except SystemExit as stop:
            assert stop.code.startswith("error: ") and not (tmp_path / "math_train.jsonl").exists()
            return stop.code
        return read_rows(tmp_path / out)

    return run


def test_every_configuration_and_split_of_a_data_set_is_read(tmp_path, made):
    """The data set is like EleutherAI/hendrycks_math: a configuration and two splits for each subject."""
    folder = tmp_path / "hendrycks_math"
    card = "---\nconfigs:\n"
    for i, subject in enumerate(("algebra", "geometry", "precalculus")):
        (folder / subject).mkdir(parents=True)
        card += f"- config_name: {subject}\n  data_files:\n"
        rows = PROBLEMS[i::3]
        for split, part in {"train": rows[:1000], "test": rows[1000:]}.items():
            file = f"{subject}/{split}-00000-of-00001.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), folder / file)
            card += f"  - split: {split}\n    path: {subject}/{split}-*\n"
    (folder / "README.md").write_text(card + "---\n")
    rows = made((str(folder),), write_rows(tmp_path / "test.jsonl", PROBLEMS500))
    wanted = {row["problem"]: row["solution"] for i, row in enumerate(PROBLEMS) if i % 25}
    assert len(rows) == 12_000 and {row["problem"]: row["solution"] for row in rows} == wanted


@pytest.mark.skipif(not REAL.is_dir(), reason=f"no real data in {REAL}")
def test_the_real_files(made):
    train, test = str(REAL / "prm800k_split_train_12000.jsonl.gz"), str(REAL / "math500_test.jsonl")
    wanted = [{"problem": row["problem"], "solution": row["solution"]} for row in read_rows(train)]
    assert made((test, train), test) == wanted


@pytest.mark.parametrize(
    ("math", "math500", "message"),
    [
        (PROBLEMS[:-1], PROBLEMS500, "11999 others in train.jsonl; these must be 500 and 12000"),
        (PROBLEMS + PROBLEMS[1:2], PROBLEMS500, "12001 others"),
        (PROBLEMS, PROBLEMS500[:-1] + PROBLEMS500[:1], "499 problems in test.jsonl"),
    ],
)
def test_anything_but_12000_problems_is_refused(tmp_path, made, math, math500, message):
    write_rows(tmp_path / "train.jsonl", math)
    write_rows(tmp_path / "test.jsonl", math500)
    assert message in made(("train.jsonl",))


# === alpaca_eval ===
WORDS = "queen clerk baker king prince duke cook smith".split()
ANSWER = {"output": "aster", "generator": "gpt4_1106_preview"}
REFERENCE = [{"instruction": f"for {word}\n"} | ANSWER for word in WORDS]


@pytest.mark.slow
def test_a_run_samples_every_prompt_of_alpaca_eval_and_its_outputs_have_the_packages_form(tmp_path):
    (tmp_path / "ref.json").write_text(json.dumps(REFERENCE))
    files = [path.read_text() for path in sorted((ROOT / "paper").glob("*.sh"))]
    (line,) = {line for text in files for line in text.splitlines() if line.endswith("> ref.jsonl")}
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(line, shell=True, cwd=tmp_path, env=env, check=True)  # of the paper's runs
    data = str(tmp_path / "ref.jsonl")
    run = ["--model", str(TOY / "policy"), "--dataset", PAIRS, "--eval-dataset", data]
    run += ["--num-steps", "1", "--batch-size", "8", "--max-new-tokens", "16"]
    run_ranks(1, [[*run, "--output-dir", str(tmp_path / "mine")]])
    subprocess.run([sys.executable, ROOT / "paper/alpaca_eval/outputs.py", tmp_path / "mine"], check=True)
    outputs = json.loads((tmp_path / "mine" / "outputs.json").read_text())
    assert [row["instruction"] for row in outputs] == [row["instruction"] for row in REFERENCE]
    assert all(row["generator"] == "mine" and row["output"] for row in outputs)
