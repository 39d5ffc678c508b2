"""Tests paper/variants.py: each method against its formula on random tensors, its gradients, and a run."""

import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, metrics
from scipy import stats
from worker import run_here

import dpo_humanline
import grpo_math_humanline as script
from paper import variants
from paper.variants import LAST, VARIANTS, humanline_sampling

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
    function, replacement = VARIANTS[name]
    log_ratio = log_ratio.clone().requires_grad_()
    LAST.mask = mask
    clipped = replacement(None, log_ratio) if function == "clip_log_ratio" else log_ratio
    loss_function = replacement if function == "grpo_loss" else script.grpo_loss
    loss = loss_function(clipped, log_ratio, advantages, BETA, epsilon)
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


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "sampling"])
def test_on_policy_every_variant_has_the_scripts_gradient(name, batch):
    """At ratio 1 no bound is reached, and each gradient is the policy gradient."""
    log_ratio, mask, advantages = batch
    on_policy = (torch.zeros_like(log_ratio), mask, advantages)
    _, gradient = objective(name, on_policy)
    expected = -(advantages[:, None] * mask).numpy()
    np.testing.assert_allclose(gradient, expected, atol=1e-14)


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


# === The command ===
def test_what_does_not_exist_is_refused():
    for words in ([], ["ppo", "grpo_humanline"], ["cispo", "cispo"]):
        with pytest.raises(
            SystemExit, match=r"error: name a variant \(trust-region, no-clipping, sampling, clip-"
        ):
            variants.main(words)
    with pytest.raises(SystemExit, match="error: dpo_humanline has no grpo_loss"):
        variants.main(["cispo", "dpo_humanline"])


def train(variant: str, script_name: str, folder, *flags) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "paper/variants.py", variant, script_name, *flags]
    return subprocess.run([*command, "--output-dir", folder], capture_output=True, text=True)


SHORT = "--batch-size 4 --lr 1e-2 --warmup-fraction 0 --checkpoint-every 0 --engine hf".split()
SHORT += ["--eval-dataset", ""]


@pytest.mark.parametrize(("k", "in_sync"), [("1", [0, 1, 2, 3, 4, 5, 6]), ("3", [0, 3, 6]), ("0", [0])])
def test_a_trust_region_syncs_after_every_kth_update_and_clips_nothing(k, in_sync, tmp_path):
    """All log-ratios are 0 where the reference is the policy. Bounds of ±1e-9 would clip all other tokens."""
    bounds = ["--log-epsilon-P=-1e-9", "--log-epsilon-R=1e-9"]
    done = train(
        "trust-region", "dpo_humanline", tmp_path / "run", "--k", k, "--num-steps", "7", *SHORT, *bounds
    )
    assert done.returncode == 0, done.stderr
    steps = metrics(tmp_path / "run")
    assert [step["step"] for step in steps if step["humanline/log_ratio_abs_mean"] == 0] == in_sync
    for step in steps:
        if step["step"] not in in_sync:
            assert step["humanline/clipped_low"] + step["humanline/clipped_high"] > 0.9
            assert abs(step["rewards/chosen"]) > 0.01  # with clipping it would be below 1e-7


def test_a_trust_region_is_for_offline_data(tmp_path):
    for name in ("dpo_humanline", "grpo_math_humanline"):
        online = ["--online"] if name == "dpo_humanline" else []
        done = train("trust-region", name, tmp_path / name, *online, "--engine", "hf")
        assert done.returncode == 1 and done.stderr.count("error: trust-region is for offline data") == 1


def test_without_clipping_training_is_as_with_infinite_bounds_and_the_metrics_have_the_bounds(tmp_path):
    flags = ["--k", "2", "--num-steps", "4", *SHORT]
    done = train("no-clipping", "dpo_humanline", tmp_path / "run", *flags)
    assert done.returncode == 0, done.stderr
    unbounded = [
        *flags,
        "--log-epsilon-P=-inf",
        "--log-epsilon-R=inf",
        "--output-dir",
        tmp_path / "unbounded",
    ]
    found, expected = metrics(tmp_path / "run", True), metrics(run_here(dpo_humanline, *unbounded), True)
    clipped = ("humanline/clipped_low", "humanline/clipped_high")
    assert sum(step[key] for step in found for key in clipped) > 0
    for step, other in zip(found, expected, strict=True):
        assert step | dict.fromkeys(clipped, 0) == other | dict.fromkeys(clipped, 0)


def test_a_run_trains_with_the_variant(tmp_path):
    """In the first step after sampling the gradient is the script's, and then it is the variant's."""
    flags = ["--no-humanline", "--engine", "hf", "--num-steps", "2", "--sample-every", "2", "--lr", "1e-3"]
    flags += ["--warmup-fraction", "0", "--eval-samples", "0", "--checkpoint-every", "0", "--output-dir"]
    first, second = metrics(run_here(script, *flags, tmp_path / "grpo"))
    done = train("cispo", "grpo_math_humanline", tmp_path / "cispo", *flags[:-1])
    assert done.returncode == 0, done.stderr
    its_first, its_second = metrics(tmp_path / "cispo")
    assert its_first["grad_norm"] == pytest.approx(first["grad_norm"])
    assert its_second["grad_norm"] != pytest.approx(second["grad_norm"], rel=1e-3)
