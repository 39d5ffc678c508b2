"""The DPO loss, humanline clipping and humanline sampling against computations by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta as beta_distribution

from dpo_humanline import beta_draws, dpo_loss, humanline_sampling


def batch(pairs=3, length=6, scale=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_ratio = scale * torch.randn(2 * pairs, length, dtype=torch.float64, generator=generator)
    mask = (torch.arange(length) < torch.tensor([6, 4, 1, 2, 6, 3])[: 2 * pairs, None]).double()
    return log_ratio, mask


def loss_by_hand(log_ratio, mask, beta, low=-math.inf, high=math.inf):
    """Equation 6 in python floats."""
    rows, pairs = log_ratio.tolist(), len(log_ratio) // 2
    rewards = []
    for row, row_mask in zip(rows, mask.tolist()):
        clipped = [min(max(x, low), high) for x, m in zip(row, row_mask) if m]
        rewards.append(beta * sum(clipped))
    return [math.log1p(math.exp(-(rewards[i] - rewards[pairs + i]))) for i in range(pairs)]


@pytest.mark.parametrize("bounds", [(-math.inf, math.inf), (-1.5, 1.5), (-0.5, 2.0)])
def test_loss_equals_the_equation_by_hand(bounds):
    log_ratio, mask = batch()
    loss, rewards = dpo_loss(log_ratio.clamp(*bounds), mask, beta=0.1)
    assert loss.tolist() == pytest.approx(loss_by_hand(log_ratio, mask, 0.1, *bounds), rel=1e-12)
    expected = 0.1 * (log_ratio.clamp(*bounds) * mask).sum(-1)
    assert rewards.tolist() == pytest.approx(expected.tolist(), rel=1e-12)


@pytest.mark.parametrize("bounds", [(-math.inf, math.inf), (-1.5, 1.5)])
def test_gradient_equals_finite_differences(bounds):
    log_ratio, mask = batch()
    assert torch.autograd.gradcheck(
        lambda x: dpo_loss(x.clamp(*bounds), mask, 0.5)[0].sum(), log_ratio.clone().requires_grad_(), eps=1e-7
    )


def test_infinite_bounds_are_the_plain_loss():
    log_ratio, mask = batch()
    clipped, _ = dpo_loss(log_ratio.clamp(-math.inf, math.inf), mask, 1.0)
    assert torch.equal(clipped, dpo_loss(log_ratio, mask, 1.0)[0])


def test_gradient_is_exactly_zero_outside_the_bounds_and_only_there():
    log_ratio, mask = batch()
    log_ratio.requires_grad_()
    dpo_loss(log_ratio.clamp(-1.5, 1.5), mask, 1.0)[0].sum().backward()
    outside = (log_ratio < -1.5) | (log_ratio > 1.5)
    assert outside[mask.bool()].any() and (~outside)[mask.bool()].any()
    assert (log_ratio.grad[outside] == 0).all()
    assert (log_ratio.grad[~outside & mask.bool()] != 0).all()


def test_tokens_outside_the_mask_change_nothing():
    log_ratio, mask = batch()
    noise = torch.where(mask.bool(), log_ratio, torch.full_like(log_ratio, 7.0))
    assert torch.equal(dpo_loss(log_ratio, mask, 1.0)[0], dpo_loss(noise, mask, 1.0)[0])


def test_a_log_ratio_of_zero_is_a_token_like_any_other():
    log_ratio, mask = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True), torch.ones(2, 3)
    loss, _ = dpo_loss(log_ratio, mask, 1.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert (log_ratio.grad[0] == -0.5).all() and (log_ratio.grad[1] == 0.5).all()


LOW, HIGH, M = -1.5, 1.5, 10.0


def draws(shape, kappa):
    mask = torch.ones(shape, dtype=torch.float64)
    keys = [(0, row) for row in range(shape[0])]
    B_P = beta_draws(mask, keys, 0, kappa, math.exp(LOW) / M)
    B_R = beta_draws(mask, keys, 1, kappa, math.exp(-HIGH) / M)
    return B_P, B_R


def kept(log_ratio, B_P, B_R):
    """1 where a token keeps its gradient, else 0; no token may change its value. A draw of 0 rejects none."""
    log_ratio = log_ratio.clone().requires_grad_()
    sampled = humanline_sampling(log_ratio, B_P, B_R, M)
    assert torch.equal(sampled, log_ratio)
    return torch.autograd.grad(sampled.sum(), log_ratio)[0]


def test_humanline_sampling_tends_to_the_accept_set_of_clipping():
    """Theorem 4.3: as κ grows, the kept tokens are those with ε_P <= ratio <= ε_R."""
    log_ratio = torch.linspace(-3, 3, 4001, dtype=torch.float64)[None]
    wanted = ((log_ratio >= LOW) & (log_ratio <= HIGH)).double()
    disagreement = []
    for kappa in (1e2, 1e4, 1e6, 1e8):
        found = kept(log_ratio, *draws(log_ratio.shape, kappa))
        disagreement.append((found != wanted).double().mean().item())
    assert disagreement == sorted(disagreement, reverse=True)
    assert disagreement[0] > 0.02 and disagreement[-1] < 1e-3


@pytest.mark.parametrize("kappa", [20.0, 100.0])
@pytest.mark.parametrize("log_ratio", [-1.8, -1.2, 0.0, 1.4, 2.0])
def test_accept_rate_matches_the_beta_distribution(kappa, log_ratio):
    values = torch.full((8, 25000), log_ratio, dtype=torch.float64)
    (B_P, B_R), none = draws(values.shape, kappa), torch.zeros_like(values)
    ratio, mean_P, mean_R = math.exp(log_ratio), math.exp(LOW) / M, math.exp(-HIGH) / M
    kept_P = beta_distribution.cdf(ratio / M, kappa * mean_P, kappa * (1 - mean_P))  # P(M B_P <= ratio)
    kept_R = beta_distribution.cdf(1 / ratio / M, kappa * mean_R, kappa * (1 - mean_R))
    for found, wanted in ((kept(values, B_P, none), kept_P), (kept(values, none, B_R), kept_R)):
        tolerance = 5 * math.sqrt(wanted * (1 - wanted) / 200000) + 1e-9
        assert found.mean().item() == pytest.approx(wanted, abs=tolerance)
    assert kept(values, B_P, B_R).mean().item() == pytest.approx(kept_P * kept_R, abs=0.006)


def test_rejected_tokens_keep_their_value_and_lose_their_gradient():
    log_ratio = torch.tensor([[-3.0, 0.0, 3.0]], dtype=torch.float64)
    (B_P, B_R), none = draws((1, 3), 1e8), torch.zeros(1, 3)
    assert kept(log_ratio, B_P, B_R).tolist() == [[0.0, 1.0, 0.0]]
    assert kept(log_ratio, B_P, none).tolist() == [[0.0, 1.0, 1.0]]
    assert kept(log_ratio, none, B_R).tolist() == [[1.0, 1.0, 0.0]]


def test_draws_depend_on_their_key_and_stream_alone():
    wide = beta_draws(torch.ones(2, 9), [(1, 2), (1, 3)], 0, 50.0, 0.1)
    narrow = beta_draws(torch.ones(1, 4), [(1, 3)], 0, 50.0, 0.1)
    assert torch.equal(wide[1:, :4], narrow) and not torch.equal(wide[0], wide[1])
    other = beta_draws(torch.ones(1, 4), [(1, 3)], 1, 50.0, 0.1)
    assert not torch.equal(narrow, other)
    assert np.isclose(beta_draws(torch.ones(1, 20000), [(7,)], 0, 50.0, 0.1).mean(), 0.1, atol=0.002)
