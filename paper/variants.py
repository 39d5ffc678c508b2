"""Other methods in a script, each a replacement of one of its functions.

    python paper/variants.py sampling grpo_humanline --k 16
    torchrun paper/variants.py cispo grpo_math_humanline --sample-every 64 --no-humanline --epsilon 1e9

The first word is a name of VARIANTS, the second a script, the rest are its flags. What is not replaced is the
script's own: in GRPO the loss is a mean over the tokens of the batch, with its KL penalty, and without
humanline the reference is the policy that sampled. `--no-humanline --epsilon 1e9` goes with those that bring
their own bound.
"""

import math
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import run  # noqa: E402
import utils  # noqa: E402

LAST = SimpleNamespace(step=0, input_ids=None, mask=None)  # of the pass that calls a replacement


def remember_passes(script):
    """Keeps in LAST what `clip_log_ratio` is not given."""
    draw_batch, pad_batch = script.draw_batch, utils.pad_batch

    def remember_step(groups, number, size, seed):
        LAST.step = (seed, number)
        return draw_batch(groups, number, size, seed)

    def remember_pass(examples, device):
        LAST.input_ids, LAST.mask = pad_batch(examples, device)
        return LAST.input_ids, LAST.mask

    script.draw_batch, utils.pad_batch = remember_step, remember_pass


def humanline_sampling(args, log_ratio, kappa=100.0, M=10.0):
    """Equation 5 in place of clipping: a token with ratio < M·B_P or 1/ratio < M·B_R loses its gradient.

    kappa: of the Beta draws (k in Theorem 4.3's proof); → ∞ is clipping. M: M_P = M_R.
    """
    too_low = log_ratio.exp() < M * beta_draws(log_ratio, 0, kappa, math.exp(args.log_epsilon_P) / M)
    too_high = (-log_ratio).exp() < M * beta_draws(log_ratio, 1, kappa, math.exp(-args.log_epsilon_R) / M)
    return torch.where(too_low | too_high, log_ratio.detach(), log_ratio)


def beta_draws(log_ratio, stream, kappa, mean):
    """Draws of Beta(κ·mean, κ·(1 - mean)) as in Theorem 4.3, (B, T).

    A row's depend on the seed, the step (online: the round) and its tokens alone: they are the same on any
    number of ranks and passes. After a resume in the middle of a round they are others.
    """
    draws = []
    for ids, row_mask in zip(LAST.input_ids, LAST.mask):
        content = ids[: int(row_mask.nonzero().max()) + 1].cpu().numpy().tobytes()  # without padding
        generator = np.random.default_rng((*LAST.step, stream, crc32(content)))
        draws.append(generator.beta(kappa * mean, kappa * (1 - mean), log_ratio.shape[1]))
    return torch.as_tensor(np.stack(draws), dtype=log_ratio.dtype, device=log_ratio.device)


def clip_higher(clipped_log_ratio, log_ratio, advantages, beta, epsilon, upper):
    """DAPO (2503.14476, eq. 10): the ratio's upper bound is another than 1 + ε."""
    A = advantages.unsqueeze(-1)
    ratio = clipped_log_ratio.exp()
    loss = penalty(log_ratio, beta) - torch.minimum(A * ratio, A * ratio.clamp(1 - epsilon, upper))
    removed = ((A > 0) & (ratio > upper)) | ((A < 0) & (ratio < 1 - epsilon))
    return loss, ratio.detach(), penalty(log_ratio, 1).detach(), removed


def cispo(clipped_log_ratio, log_ratio, advantages, beta, epsilon, upper=5.0):
    """MiniMax-M1 (2506.13585, eq. 4): no token loses its gradient; the ratio is a weight of at most `upper`.

    log π_θ/π_ref has the gradient of log π_θ, since π_ref is constant. upper: as in TRL's documentation.
    """
    ratio = clipped_log_ratio.exp()
    weight = ratio.clamp(max=upper).detach() * advantages.unsqueeze(-1)
    loss = penalty(log_ratio, beta) - weight * clipped_log_ratio
    return loss, ratio.detach(), penalty(log_ratio, 1).detach(), torch.zeros_like(ratio, dtype=torch.bool)


def penalty(log_ratio, beta):
    """The script's KL estimate, β·k3."""
    return beta * ((-log_ratio).exp() + log_ratio - 1)


def icepop(args, log_ratio, lowest=0.5, highest=5.0):
    """IcePop (Ling team, Ring-1T): a token whose ratio is outside [0.5, 5] has no gradient.

    There the ratio is of training to inference engine, here of policy to the one that sampled.
    """
    ratio = log_ratio.exp()
    return torch.where((ratio < lowest) | (ratio > highest), log_ratio.detach(), log_ratio)


def gspo(args, log_ratio):
    """GSPO (2507.18071, eq. 7): a sequence's one ratio is the geometric mean of its tokens', and --epsilon's.

    Here a mean over tokens follows, there one over sequences: longer ones weigh more here.
    """
    lengths = LAST.mask.sum(-1, keepdim=True)
    return ((log_ratio * LAST.mask).sum(-1, keepdim=True) / lengths).expand_as(log_ratio)


def m2po(clipped_log_ratio, log_ratio, advantages, beta, epsilon, limit=0.04):
    """M2PO (2510.01161, Algorithm 1): of the tokens that a clip could stop, those with the largest
    |log ratio| lose their gradient, as many as bring the mean square of the others to 0.04.

    A clip could stop ratios above 1 where A > 0, below 1 where A < 0. Over the tokens of a pass, which is the
    batch on the toy. The authors' code (Infini-AI-Lab/M2PO, af54a3e) chooses among the same tokens, but clips
    them, at a bound of 1 - 0.3 or lower and 1 + 0.5 or higher.
    """
    A = advantages.unsqueeze(-1)
    ratio = clipped_log_ratio.exp()
    squares = clipped_log_ratio.detach() ** 2
    stoppable = A * clipped_log_ratio.detach() > 0
    ordered = squares[stoppable].sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
    kept = ordered[means <= limit]
    largest = kept[-1] if len(kept) else 0.0
    removed = stoppable & (squares > largest)
    loss = penalty(log_ratio, beta) - A * torch.where(removed, ratio.detach(), ratio)
    return loss, ratio.detach(), penalty(log_ratio, 1).detach(), removed


VARIANTS = {  # {name: (the script's function, what replaces it)}
    "sampling": ("clip_log_ratio", humanline_sampling),
    "clip-higher-1.28": ("grpo_loss", partial(clip_higher, upper=1.28)),
    "clip-higher-1.5": ("grpo_loss", partial(clip_higher, upper=1.5)),
    "cispo": ("grpo_loss", cispo),
    "icepop": ("clip_log_ratio", icepop),
    "gspo": ("clip_log_ratio", gspo),
    "m2po": ("grpo_loss", m2po),
}


def main(words: list[str]):
    if len(words) < 2 or words[0] not in VARIANTS or not words[1].endswith("_humanline"):
        raise SystemExit(f"error: name one of {', '.join(VARIANTS)}, then a script, without .py")
    function, replacement = VARIANTS[words[0]]
    script = import_module(words[1])
    if not hasattr(script, function):
        raise SystemExit(f"error: {words[1]} has no {function}")
    remember_passes(script)
    setattr(script, function, replacement)
    toy_online = getattr(script, "TOY_ONLINE", {})
    arguments = (script.Args, script.__file__, script.__doc__, script.TOY, toy_online)
    script.main(run.parse_args(*arguments, flags=words[2:]))


if __name__ == "__main__":
    main(sys.argv[1:])
