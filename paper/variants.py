"""Baselines for stale samples, each a replacement of one function of grpo_math_humanline.py.

    python paper/variants.py cispo --sample-every 64 --lr 3e-4 --seed 21

The first word is a name of VARIANTS, the rest are the script's flags. What is not replaced is the script's
own: the loss is a mean over the tokens of the batch, with its KL penalty, and without humanline the reference
is the policy that sampled. `--no-humanline --epsilon 1e9` goes with those that bring their own bound.
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import grpo_math_humanline as script  # noqa: E402
from run import parse_args  # noqa: E402


def clip_higher(clipped, log_ratio, advantages, beta, epsilon, upper):
    """DAPO (2503.14476, eq. 10): the ratio's upper bound is another than 1 + ε."""
    A = advantages.unsqueeze(-1)
    ratio = clipped.exp()
    loss = penalty(log_ratio, beta) - torch.minimum(A * ratio, A * ratio.clamp(1 - epsilon, upper))
    removed = ((A > 0) & (ratio > upper)) | ((A < 0) & (ratio < 1 - epsilon))
    return loss, ratio.detach(), penalty(log_ratio, 1).detach(), removed


def cispo(clipped, log_ratio, advantages, beta, epsilon, upper=5.0):
    """MiniMax-M1 (2506.13585, eq. 4): no token loses its gradient; the ratio is a weight of at most `upper`.

    log π_θ/π_ref has the gradient of log π_θ, since π_ref is constant. upper: as in TRL's documentation.
    """
    ratio = clipped.exp()
    loss = penalty(log_ratio, beta) - ratio.clamp(max=upper).detach() * advantages.unsqueeze(-1) * clipped
    return loss, ratio.detach(), penalty(log_ratio, 1).detach(), torch.zeros_like(ratio, dtype=torch.bool)


def penalty(log_ratio, beta):
    """The script's KL estimate, β·k3."""
    return beta * ((-log_ratio).exp() + log_ratio - 1)


def icepop(args, log_ratio, mask, keys, lowest=0.5, highest=5.0):
    """IcePop (Ling team, Ring-1T): a token whose ratio is outside [0.5, 5] has no gradient.

    There the ratio is of training to inference engine, here of policy to the one that sampled.
    """
    ratio = log_ratio.exp()
    return torch.where((ratio < lowest) | (ratio > highest), log_ratio.detach(), log_ratio)


def gspo(args, log_ratio, mask, keys):
    """GSPO (2507.18071, eq. 7): a sequence's one ratio is the geometric mean of its tokens', and --epsilon's.

    Here a mean over tokens follows, there one over sequences: longer ones weigh more here.
    """
    mean = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    return mean.expand_as(log_ratio)


def m2po(clipped, log_ratio, advantages, beta, epsilon, limit=0.04):
    """M2PO (2510.01161, Algorithm 1): of the tokens that a clip could stop, those with the largest
    |log ratio| lose their gradient, as many as bring the mean square of the others to 0.04.

    A clip could stop ratios above 1 where A > 0, below 1 where A < 0. Over the tokens of a pass, which is the
    batch on the toy. The authors' code (Infini-AI-Lab/M2PO, af54a3e) chooses among the same tokens, but clips
    them, at a bound of 1 - 0.3 or lower and 1 + 0.5 or higher.
    """
    A = advantages.unsqueeze(-1)
    ratio = clipped.exp()
    squares = clipped.detach() ** 2
    stoppable = A * clipped.detach() > 0
    ordered = squares[stoppable].sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
    kept = ordered[means <= limit]
    largest = kept[-1] if len(kept) else 0.0
    removed = stoppable & (squares > largest)
    loss = penalty(log_ratio, beta) - A * torch.where(removed, ratio.detach(), ratio)
    return loss, ratio.detach(), penalty(log_ratio, 1).detach(), removed


VARIANTS = {  # {name: (the script's function, what replaces it)}
    "clip-higher-1.28": ("grpo_loss", partial(clip_higher, upper=1.28)),
    "clip-higher-1.5": ("grpo_loss", partial(clip_higher, upper=1.5)),
    "cispo": ("grpo_loss", cispo),
    "icepop": ("clip_log_ratio", icepop),
    "gspo": ("clip_log_ratio", gspo),
    "m2po": ("grpo_loss", m2po),
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in VARIANTS:
        raise SystemExit(f"error: the first word must be one of {', '.join(VARIANTS)}")
    name, *flags = sys.argv[1:]
    setattr(script, *VARIANTS[name])
    script.main(parse_args(script.Args, script.__file__, script.__doc__, script.TOY, flags=flags))
