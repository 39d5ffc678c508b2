"""The two lines of humanline, for you to write. No other file of this folder is to be changed.

pytest homework  # from the folder above; eight checks
"""

import torch

from toy import dpo_loss, token_logps


def clip(log_ratio, low: float = -1.5, high: float = 1.5):
    """Clips every log-ratio to [low, high]. This is line 1.

    A log-ratio within the bounds keeps its value and its gradient. Beyond a bound it takes the value of this
    bound, and has no gradient.

    Args:
        log_ratio: a tensor of any shape, log π_θ - log π_ref of each token in nats. It is not changed.
        low, high: the bounds in nats. Either may be infinite.

    Returns:
        A tensor of the same shape.
    """
    raise NotImplementedError("clip")


def training_step(
    step: int, k: int, policy, reference, optimizer, ids, low: float = -1.5, high: float = 1.5
) -> float:
    """Makes one training step of DPO with humanline. Line 2 is the sync in it.

    The step computes the log-probs of all tokens under both models, the clipped log-ratios, DPO's loss and
    its gradient, and then updates the policy. In the steps 0, k, 2k and so on, the reference takes over
    everything that the policy knows. Find out where in the step this must happen: the reference of step t
    has to be the policy as it was at the beginning of the latest such step before t.

    Args:
        step: the number of this step, from 0.
        k: the number of steps between two syncs.
        policy, reference: two models of the class toy.Bigram. They stay separate, and the reference is never
            trained.
        optimizer: an optimizer of the policy's parameters, whose gradients are None or 0 at the beginning.
        ids: tokens, as `toy.make_batch` returns them. `token_logps` and `dpo_loss` of toy.py take them.
        low, high: the bounds of `clip`.

    Returns:
        The loss before the update.
    """
    raise NotImplementedError("training_step")
