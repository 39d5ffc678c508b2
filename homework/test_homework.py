"""Eight checks of two_lines.py, worth five points each.

pytest homework  # from the folder above

A check that fails says what it expected and what your file did. Nothing in this file is to be changed.
"""

import math

import torch

import two_lines
from toy import Bigram, make_batch, token_logps

LOG_RATIOS = [-9.0, -2.0, -1.49, 0.0, 1.49, 2.0, 9.0]
BOUNDS = [(-1.5, 1.5), (-0.5, 2.5), (-math.inf, math.inf)]
NEVER = 10**9  # a k with which the steps 1, 2, ... have no sync


def log_ratios(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def within(value: float, low: float, high: float) -> float:
    """Returns what a log-ratio should become."""
    return min(max(value, low), high)


def weights_of(model) -> torch.Tensor:
    """Returns a copy of all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def two_equal_models() -> tuple:
    return Bigram(seed=1), Bigram(seed=1).requires_grad_(False)


def two_far_models() -> tuple:
    """Returns a policy and a reference with log-ratios beyond every bound of the checks, of both signs."""
    reference = Bigram(seed=77).requires_grad_(False)
    reference.table *= 4
    return Bigram(seed=1), reference


def make_steps(policy, reference, steps, k, lr=0.3, low=-1.5, high=1.5) -> tuple:
    """Makes steps. Returns the weights of both models at the beginning of each step, and the losses."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    policies, references, losses = [], [], []
    for step in steps:
        policies.append(weights_of(policy))
        references.append(weights_of(reference))
        ids = make_batch(step)
        losses.append(two_lines.training_step(step, k, policy, reference, optimizer, ids, low, high))
    return policies, references, losses


# === Line 1: the clip ===
def test_1_clip_has_the_right_values():
    for low, high in BOUNDS:
        x = log_ratios(LOG_RATIOS)
        clipped = two_lines.clip(x, low, high)
        assert isinstance(clipped, torch.Tensor), f"clip returned {clipped}, which is no tensor."
        expected = [within(value, low, high) for value in LOG_RATIOS]
        assert clipped.tolist() == expected, (
            f"With the bounds {low} and {high}, {LOG_RATIOS} should become {expected}. "
            f"It became {clipped.tolist()}."
        )
        assert x.tolist() == LOG_RATIOS, (
            "clip changed its argument. Others still need it, such as the KL penalty of GRPO."
        )


def test_2_clip_has_the_right_gradient():
    x = log_ratios(LOG_RATIOS).requires_grad_()
    clipped = two_lines.clip(x.clone())
    assert clipped.requires_grad, "The result of clip has no gradient at all, so nothing would be learned."
    (gradient,) = torch.autograd.grad(clipped.sum(), x)
    assert gradient.tolist() == [0, 0, 1, 1, 1, 0, 0], (
        f"The gradient should be 1 within ±1.5 and 0 beyond. At {LOG_RATIOS} it is {gradient.tolist()}."
    )


def test_3_each_token_is_clipped():
    x = log_ratios([[1.0, 1.0, 1.0], [4.0, -4.0, 0.125]]).requires_grad_()
    clipped = two_lines.clip(x.clone())
    assert clipped.shape == x.shape, f"The shape {tuple(x.shape)} became {tuple(clipped.shape)}."
    assert clipped.tolist() == [[1, 1, 1], [1.5, -1.5, 0.125]], (
        f"Each token should be clipped by itself, whatever the other tokens of its row are. "
        f"{x.tolist()} became {clipped.tolist()}."
    )
    (gradient,) = torch.autograd.grad(clipped.sum(), x)
    assert gradient.tolist() == [[1, 1, 1], [0, 0, 1]], (
        f"A token beyond a bound should lose its own gradient, and no other token's: {gradient.tolist()}."
    )


# === The step ===
def loss_and_update_by_hand(policy, reference, ids, low, high, lr, beta=0.5) -> tuple:
    """Returns DPO's loss and the change of the policy's weights, by DPO's formula for the push on a token."""
    logps = token_logps(policy, ids)
    x = (logps - token_logps(reference, ids)).detach()
    sums = [sum(within(value, low, high) for value in row) for row in x.tolist()]
    pairs = len(sums) // 2
    margins = [beta * (better - worse) for better, worse in zip(sums[:pairs], sums[pairs:])]
    loss = sum(math.log1p(math.exp(-margin)) for margin in margins) / pairs
    sizes = [beta / (1 + math.exp(margin)) / pairs for margin in margins]
    signed = log_ratios([*sizes, *(-size for size in sizes)])  # up in better completions, down in worse ones
    push = signed[:, None] * ((low <= x) & (x <= high))  # of each token
    assert (x < low).any() and (x > high).any()
    gradients = torch.autograd.grad((push * logps).sum(), [*policy.parameters()])
    return loss, lr * torch.cat([gradient.flatten() for gradient in gradients])


def test_4_a_step_uses_the_clipped_log_ratios():
    """Two steps without a sync, with tokens far beyond the bounds."""
    for low, high in [(-1.5, 1.5), (-0.4, 0.9)]:
        policy, reference = two_far_models()
        for step in (1, 2):
            expected, update = loss_and_update_by_hand(policy, reference, make_batch(step), low, high, lr=1.0)
            (before,), _, (loss,) = make_steps(policy, reference, [step], NEVER, 1.0, low, high)
            assert isinstance(loss, float), f"training_step should return a float. It returned {loss}."
            assert abs(loss - expected) < 1e-12, (
                f"With the bounds {low} and {high}, the loss of step {step} is {loss:.6f}. "
                f"DPO's loss of the clipped log-ratios is {expected:.6f}. What is clipped, and is it used?"
            )
            off = (weights_of(policy) - before - update).abs().max().item()
            assert off < 1e-12, (
                f"The loss of step {step} is right, but a weight is {off:.6f} away from where it should be. "
                "Do the gradients stop at the bounds, and does each step begin without old gradients?"
            )


# === Line 2: the sync ===
def test_5_the_reference_is_the_right_policy():
    for k in (1, 2, 3, 5):
        policies, references, losses = make_steps(*two_equal_models(), range(9), k)
        assert len({tuple(weights.tolist()) for weights in policies}) == 9, (
            f"k = {k}: two steps began with the same policy. Each step should change it."
        )
        for step, reference in enumerate(references):
            expected = max(0, step - 1) // k * k
            found = [s for s, policy in enumerate(policies) if torch.equal(reference, policy)]
            assert found == [expected], (
                f"k = {k}: when step {step} begins, the reference should be the policy with which step "
                f"{expected} began. It is "
                + (f"the one with which step {found[0]} began." if found else "none with which a step began.")
            )
        assert abs(losses[0] - math.log(2)) < 1e-12, (
            f"k = {k}: in step 0 both models are equal, so the loss should be log 2. It is {losses[0]}."
        )
        assert all(abs(loss - math.log(2)) > 1e-6 for loss in losses[1:]), (
            f"k = {k}: a later loss is log 2, so both models were equal when it was computed."
        )


def test_6_the_reference_is_a_separate_copy():
    policy, reference = two_equal_models()
    parameters = [*policy.parameters()]
    make_steps(policy, reference, range(3), k=2)
    assert all(now is before for now, before in zip(policy.parameters(), parameters, strict=True)), (
        "The policy has other parameters than before, so the optimizer no longer trains them."
    )
    memory = [{tensor.data_ptr() for tensor in model.state_dict().values()} for model in (policy, reference)]
    assert not memory[0] & memory[1], (
        "Policy and reference share memory, so an update of the policy changes the reference, too."
    )


def test_7_the_reference_gets_no_gradient():
    policy, reference = Bigram(seed=1), Bigram(seed=1)  # here, nothing prevents a gradient
    make_steps(policy, reference, range(3), k=1)
    assert all(parameter.grad is None for parameter in reference.parameters()), (
        "backward computed a gradient for the reference. This costs time and memory, and nobody needs it."
    )
    assert all(parameter.requires_grad for parameter in policy.parameters()), (
        "A parameter of the policy can no longer be trained."
    )


def test_8_a_sync_copies_everything():
    policy, (_, reference) = Bigram(seed=1), two_far_models()
    reference.bias += 1
    reference.scale *= 3
    make_steps(policy, reference, [0], k=4, lr=0.0)
    assert torch.equal(weights_of(policy), weights_of(Bigram(seed=1))), (
        "The learning rate was 0, and the policy has changed."
    )
    copied = reference.state_dict()
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, copied[name]), (
            f"After the sync of step 0, `{name}` of the reference should equal the policy's."
        )
