"""The DPO loss and humanline clipping by hand; a loss that is changed is changed in the evaluation too."""

import json
import math

import pytest
import torch
from conftest import metrics, read_rows, write_rows
from test_token_logps import full_logps
from transformers import AutoModelForCausalLM
from worker import run_here

import dpo_humanline
import kto_humanline
import utils
from dpo_humanline import clip_log_ratio, dpo_loss, implicit_rewards
from support.data import load_tokenizer


def batch():
    generator = torch.Generator().manual_seed(0)
    log_ratio = 2 * torch.randn(6, 6, dtype=torch.float64, generator=generator)
    mask = (torch.arange(6) < torch.tensor([6, 4, 1, 2, 6, 3])[:, None]).double()
    return log_ratio, mask


def loss_by_hand(log_ratio, mask, beta, low=-math.inf, high=math.inf):
    """Equation 6 in python floats."""
    rewards = []
    for row, row_mask in zip(log_ratio.tolist(), mask.tolist()):
        clipped = [min(max(x, low), high) for x, m in zip(row, row_mask) if m]
        rewards.append(beta * sum(clipped))
    pairs = len(rewards) // 2
    return [math.log1p(math.exp(-(rewards[i] - rewards[pairs + i]))) for i in range(pairs)]


@pytest.mark.parametrize("bounds", [(-math.inf, math.inf), (-1.5, 1.5), (-0.5, 2.0)])
def test_loss_equals_the_equation_by_hand_and_its_gradient_finite_differences(bounds):
    log_ratio, mask = batch()
    args = dpo_humanline.Args(log_epsilon_P=bounds[0], log_epsilon_R=bounds[1])
    clipped = clip_log_ratio(args, log_ratio)
    loss = dpo_loss(clipped, mask, beta=0.1)
    assert loss.tolist() == pytest.approx(loss_by_hand(log_ratio, mask, 0.1, *bounds), rel=1e-12)
    expected = 0.1 * (log_ratio.clamp(*bounds) * mask).sum(-1)
    rewards = torch.cat(implicit_rewards(clipped, mask, 0.1))
    assert rewards.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    variable = log_ratio.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: dpo_loss(clip_log_ratio(args, x), mask, 0.5).sum(), variable, eps=1e-7
    )


def test_without_humanline_nothing_is_clipped():
    log_ratio, _ = batch()
    assert clip_log_ratio(dpo_humanline.Args(humanline=False), log_ratio) is log_ratio


def test_a_log_ratio_of_zero_is_a_token_like_any_other():
    log_ratio, mask = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True), torch.ones(2, 3)
    loss = dpo_loss(log_ratio, mask, 1.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert (log_ratio.grad[0] == -0.5).all() and (log_ratio.grad[1] == 0.5).all()


# --- training and evaluation have one loss ---


def mean_log_ratio(log_ratio, mask):
    return (log_ratio * mask).sum(-1) / mask.sum(-1)


def normalized_dpo_loss(log_ratio, mask, beta):
    rewards = beta * mean_log_ratio(log_ratio, mask)
    chosen, rejected = rewards.chunk(2)
    return -(chosen - rejected).sigmoid().log()


def normalized_kto_margins(log_ratio, mask, desirable, z_0, beta):
    """Without z_0, which an evaluation does not have."""
    rewards = beta * mean_log_ratio(log_ratio, mask)
    return torch.where(desirable, rewards, -rewards)


@pytest.mark.parametrize(
    ("script", "loss", "group"),  # how many examples of a batch are a group of the script's
    [(dpo_humanline, normalized_dpo_loss, 2), (kto_humanline, normalized_kto_margins, 1)],
)
def test_a_replaced_loss_is_that_of_training_and_of_evaluation(script, loss, group, tmp_path, monkeypatch):
    """On the same pairs, which are all one batch: an evaluation has the loss of its step."""
    monkeypatch.setattr(script, loss.__name__.removeprefix("normalized_"), loss)
    rows = read_rows(script.TOY["dataset"])[:12]
    rows[0]["chosen"] = rows[0]["chosen"].split()[0]  # where the two kinds of loss differ most
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    flags = ["--dataset", data, "--eval-dataset", data]
    flags += ["--no-humanline", "--batch-size", 24 // group, "--eval-every", "1", "--eval-samples", "0"]
    flags += ["--num-steps", "3", "--warmup-fraction", "0", "--checkpoint-every", "0"]
    steps = metrics(run_here(script, *flags, "--output-dir", tmp_path / "run"))
    assert ["eval/loss" in step for step in steps] == [False, True, True]
    for step in steps[1:]:
        assert step["eval/loss"] == pytest.approx(step["loss"], rel=1e-9)
    assert len({step["loss"] for step in steps}) == 3

    toy = script.TOY["model"]
    tokenizer, eos_ids = load_tokenizer(script.Args(model=toy))
    pairs = [script.encode_row(script.Args(), tokenizer, eos_ids, row) for row in rows]
    examples = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
    input_ids, mask = utils.pad_batch(examples, "cpu")
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(name).double() for name in (tmp_path / "run" / "final", toy)
    )
    with torch.no_grad():
        log_ratio = full_logps(policy, input_ids, mask) - full_logps(reference, input_ids, mask)
    arguments = () if group == 2 else (torch.arange(24) < 12, 0.0)
    by_hand = loss(log_ratio, mask, *arguments, script.TOY["beta"])
    if group == 1:
        by_hand = script.kto_loss(by_hand, arguments[0], script.Args.lambda_D, script.Args.lambda_U)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["after"]["eval/loss"][0] == pytest.approx(by_hand.mean().item(), rel=1e-6)
