"""Trains with another method, which replaces one or two functions of a script.

    python paper/variants.py sampling grpo_humanline --k 16
    torchrun paper/variants.py cispo grpo_math_humanline --sample-every 64 --no-humanline --epsilon 1e9

The first word is a variant: a name of VARIANTS or OTHERS. The second word is a script, without .py.
All other words are flags of the script. Everything else is the script's own. For example, the loss of GRPO
stays a mean over the tokens of the batch, with its KL penalty, and without humanline the reference stays the
policy that has sampled. Variants that bring their own bound need `--no-humanline`. For gspo, dppo, drpo and
clip-higher `--epsilon` is this bound. The others need `--epsilon 1e9`, so that no other bound is left.

To add a variant, write a function with the arguments and results of the script's function, and add both names
to VARIANTS. The metric grpo/clip_fraction counts the tokens whose policy gradient the variant stops.
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
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import utils  # noqa: E402
from grpo_humanline import k3  # noqa: E402
from support import run  # noqa: E402
from tools.scripts import parse_args  # noqa: E402

# The run's settings, and of the micro-batch that calls a replaced function: its step, its tokens, and their
# log-probs under the policy, (B, T). The step is (0, 0) until a batch is drawn, which a resume within a round
# does later.
LAST = SimpleNamespace(args=None, step=(0, 0), input_ids=None, mask=None, logps=None)


def remember_micro_batches(script):
    """Keeps in LAST what the replaced functions do not get as arguments."""
    draw_batch, pad_batch, token_logps = script.draw_batch, utils.pad_batch, utils.token_logps

    def draw_and_remember(groups, number, size, seed):
        LAST.step = (seed, number)
        return draw_batch(groups, number, size, seed)

    def pad_and_remember(examples, device):
        LAST.input_ids, LAST.mask = pad_batch(examples, device)
        return LAST.input_ids, LAST.mask

    def compute_and_remember(*arguments):
        logps = token_logps(*arguments)
        LAST.logps = logps.detach()  # a script asks for the policy's log-probs last
        return logps

    script.draw_batch, utils.pad_batch = draw_and_remember, pad_and_remember
    utils.token_logps = compute_and_remember


def count_stopped_tokens(script):
    """Makes grpo/clip_fraction the fraction of tokens with an advantage but no policy gradient."""
    grpo_metrics = script.grpo_metrics

    def metrics_with_stopped(clipped_log_ratio, log_ratio, advantages, epsilon):
        stopped = stopped_tokens(script, log_ratio, advantages, epsilon)
        metrics = grpo_metrics(clipped_log_ratio, log_ratio, advantages, epsilon)
        return metrics | {"grpo/clip_fraction": stopped.double()}

    script.grpo_metrics = metrics_with_stopped


def stopped_tokens(script, log_ratio, advantages, epsilon):
    """Returns which tokens have an advantage, but no gradient of the loss without its KL penalty, (B, T)."""
    constant = log_ratio.detach()  # the penalty is computed from it, so it has no gradient
    variable = constant.clone().requires_grad_()
    clipped = script.clip_log_ratio(LAST.args, variable)
    losses = script.grpo_loss(clipped, constant, advantages, LAST.args.beta, epsilon)
    (gradient,) = torch.autograd.grad((losses * LAST.mask).sum(), variable)
    return (gradient == 0) & (advantages.unsqueeze(-1) != 0)


# === Clipping ===
def no_clipping(args, log_ratio):
    """Leaves all log-ratios as they are: syncing alone. The metrics of clipping still count by the bounds."""
    return log_ratio


def humanline_sampling(args, log_ratio, kappa=100.0, M=10.0):
    """Applies equation 5 instead of clipping: ratio < M·B_P or 1/ratio < M·B_R removes a token's gradient.

    kappa: concentration of the Beta draws (k in the proof of Theorem 4.3). As κ → ∞ the same tokens
        lose their gradient as with clipping, but they keep their values.
    M: M_P and M_R.
    """
    too_low = log_ratio.exp() < M * beta_draws(log_ratio, 0, kappa, math.exp(args.log_epsilon_P) / M)
    too_high = (-log_ratio).exp() < M * beta_draws(log_ratio, 1, kappa, math.exp(-args.log_epsilon_R) / M)
    return torch.where(too_low | too_high, log_ratio.detach(), log_ratio)


def beta_draws(log_ratio, stream, kappa, mean):
    """Draws from Beta(κ·mean, κ·(1 - mean)) as in Theorem 4.3, (B, T).

    The draws of a sequence depend only on the seed, the step (online: the round) and its tokens. Therefore
    they are the same for any number of ranks and micro-batches. A run that is resumed within a round gets
    others.
    """
    draws = []
    for ids, row_mask in zip(LAST.input_ids, LAST.mask):
        content = ids[: int(row_mask.nonzero().max()) + 1].cpu().numpy().tobytes()  # without padding
        generator = np.random.default_rng((*LAST.step, stream, crc32(content)))
        draws.append(generator.beta(kappa * mean, kappa * (1 - mean), log_ratio.shape[1]))
    return torch.as_tensor(np.stack(draws), dtype=log_ratio.dtype, device=log_ratio.device)


def icepop(args, log_ratio, lowest=0.5, highest=5.0):
    """Applies IcePop (Ling team, Ring-1T): a token whose ratio is outside [0.5, 5] gets no gradient.

    In IcePop the ratio is between the training and the inference engine. Here it is between the policy and
    the policy that has sampled.
    """
    ratio = log_ratio.exp()
    return torch.where((ratio < lowest) | (ratio > highest), log_ratio.detach(), log_ratio)


def gspo(args, log_ratio):
    """Applies GSPO (2507.18071, eq. 7): all tokens of a sequence have one ratio, their geometric mean.

    --epsilon clips this ratio. In GSPO the loss is a mean over sequences. Here it is a mean over tokens, so
    longer sequences weigh more.
    """
    lengths = LAST.mask.sum(-1, keepdim=True)
    return ((log_ratio * LAST.mask).sum(-1, keepdim=True) / lengths).expand_as(log_ratio)


# === Losses of GRPO ===
def clip_higher(clipped_log_ratio, log_ratio, advantages, beta, epsilon, upper):
    """Computes DAPO's loss (2503.14476, eq. 10): the upper bound of the ratio is `upper`, not 1 + ε."""
    A = advantages.unsqueeze(-1)
    ratio = clipped_log_ratio.exp()
    return beta * k3(log_ratio) - torch.minimum(A * ratio, A * ratio.clamp(1 - epsilon, upper))


def cispo(clipped_log_ratio, log_ratio, advantages, beta, epsilon, upper=5.0):
    """Computes CISPO's loss (MiniMax-M1, 2506.13585, eq. 4): the ratio is a weight of at most `upper`.

    The weight has no gradient, and no token loses its gradient. log π_θ/π_ref has the gradient of log π_θ,
    because π_ref is constant. The default of `upper` is that of TRL's documentation.
    """
    ratio = clipped_log_ratio.exp()
    weight = ratio.clamp(max=upper).detach() * advantages.unsqueeze(-1)
    return beta * k3(log_ratio) - weight * clipped_log_ratio


def m2po(clipped_log_ratio, log_ratio, advantages, beta, epsilon, limit=0.04):
    """Computes M2PO's loss (2510.01161, Algorithm 1): the largest |log ratio| lose their gradient.

    They are chosen among the tokens that a clip could stop: those with a ratio above 1 where A > 0, and below
    1 where A < 0. As many lose their gradient as bring the mean square of the others down to `limit`. The
    mean is over a micro-batch, which is the whole batch on the toy.

    The authors' code (Infini-AI-Lab/M2PO, af54a3e) chooses among the same tokens. But it clips them, at a
    bound of 1 - 0.3 or lower and 1 + 0.5 or higher.
    """
    A = advantages.unsqueeze(-1)
    ratio = clipped_log_ratio.exp()
    squares = clipped_log_ratio.detach() ** 2
    stoppable = A * clipped_log_ratio.detach() > 0
    ordered = squares[stoppable].sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = ordered[means <= limit]
    largest = kept[-1] if len(kept) else 0.0
    removed = stoppable & (squares > largest)
    return beta * k3(log_ratio) - A * torch.where(removed, ratio.detach(), ratio)


def dppo(clipped_log_ratio, log_ratio, advantages, beta, epsilon):
    """Computes DPPO's loss with the binary total variation (2602.04879).

    A token loses its gradient if its probability has moved by more than δ in the direction of its advantage:
    π_θ - π_old > δ where A > 0, and π_old - π_θ > δ where A < 0. --epsilon is δ (paper: 0.15).

    The same is in verl (`compute_policy_loss_dppo_tv`), which also truncates the ratio at 20.
    """
    A = advantages.unsqueeze(-1)
    ratio = clipped_log_ratio.exp()
    change = LAST.logps.exp() - (LAST.logps - log_ratio.detach()).exp()
    removed = A.sign() * change > epsilon
    return beta * k3(log_ratio) - A * torch.where(removed, ratio.detach(), ratio)


def drpo(clipped_log_ratio, log_ratio, advantages, beta, epsilon):
    """Computes DRPO's loss (2606.09821): -A r + |A| π_old (r - 1)² / 2δ, where r is the ratio π_θ / π_old.

    The gradient of A r gets the weight 1 - sign(A) (π_θ - π_old) / δ. So a token whose probability has moved
    by δ in the direction of its advantage has no gradient, and beyond δ it moves back. --epsilon is δ (paper:
    12.5). The same is in the authors' code (Tencent-Hunyuan/UniRL, `_drpo_loss`, 17863c4).
    """
    A = advantages.unsqueeze(-1)
    ratio = clipped_log_ratio.exp()
    old = (LAST.logps - log_ratio.detach()).exp()
    return beta * k3(log_ratio) - A * ratio + A.abs() * old * (ratio - 1) ** 2 / (2 * epsilon)


def bapo(clipped_log_ratio, log_ratio, advantages, beta, epsilon, target=0.4):
    """Computes BAPO's loss (2510.18927, eq. 8 and Algorithm 1): each batch has its own bounds of the clip.

    Tokens with A > 0 are to bring the fraction `target` of the loss, where tokens weigh by their probability
    under the policy that has sampled. Until then, the upper bound grows from 1.2 to 3 in steps of 0.05, and
    afterwards the lower bound from 0.6 to 0.9 in steps of 0.02. (A higher lower bound stops more tokens with
    A < 0, but cannot raise the fraction.) A micro-batch, which is the whole batch on the toy, has one pair of
    bounds.

    The authors' code (WooooDyy/BAPO, 7287044) has no such weights, moves the lower bound first, and has other
    ranges.
    """
    A = advantages.unsqueeze(-1)
    ratio = clipped_log_ratio.exp()
    weights = (LAST.logps - log_ratio.detach()).exp() * A.abs() * LAST.mask
    low, high = 0.6, 1.2
    while positive_fraction(ratio.detach(), weights, A, low, high) < target:
        if high + 0.05 < 3.0 + 1e-9:  # against rounding
            high += 0.05
        elif low + 0.02 < 0.9 + 1e-9:
            low += 0.02
        else:
            break
    return beta * k3(log_ratio) - torch.minimum(A * ratio, A * ratio.clamp(low, high))


def positive_fraction(ratio, weights, A, low: float, high: float):
    """Returns the left side of BAPO's eq. 8: the fraction of the clipped loss that tokens with A > 0 have."""
    positive = (weights * ratio.clamp(max=high))[(A > 0).expand_as(ratio)].sum()
    negative = (weights * ratio.clamp(min=low))[(A < 0).expand_as(ratio)].sum()
    return positive / (positive + negative)


def optimal_advantages(rewards, beta_1=1.0, best=10.0):
    """Computes OAPL's advantages (2602.19362, eq. 2): A* = r - V*, with V* = β_1 log(mean of exp(r / β_1)).

    The mean is over the samples of a problem. r is the reward as a fraction of the best one, as in the paper,
    where right answers have 1. grpo_math's best reward is 10.

    rewards: (groups, G).
    """
    r = rewards / best
    value = beta_1 * ((r / beta_1).logsumexp(1, keepdim=True) - math.log(r.shape[1]))
    return r - value


def oapl(clipped_log_ratio, log_ratio, advantages, beta, epsilon):
    """Computes OAPL's loss (2602.19362, eq. 3): (β_2 log π_θ(y|x)/π_old(y|x) - A*)² of each sample y.

    --beta is β_2; there is no other penalty and no clip. Each token of a sample carries the loss over the
    length. So the script's mean over tokens is the mean over samples, divided by their mean length.
    """
    lengths = LAST.mask.sum(-1, keepdim=True)  # (B, 1)
    of_samples = (clipped_log_ratio * LAST.mask).sum(-1, keepdim=True)
    losses = (beta * of_samples - advantages.unsqueeze(-1)) ** 2
    return (losses / lengths).expand_as(log_ratio)


def no_reference(clipped_log_ratio, log_ratio, advantages, beta, epsilon):
    """Computes -A log π_θ, without the reference: no ratio, no clip, no KL penalty.

    The ratio of π_θ to a constant copy of itself is 1 and has the gradient of log π_θ, because the reference
    is constant.
    """
    ratio = (clipped_log_ratio - clipped_log_ratio.detach()).exp()
    return -advantages.unsqueeze(-1) * ratio


# === Loss of DPO ===
def hypo(log_ratio, mask, beta):
    """Computes HyPO's loss (2602.11902): -log σ(β (Δ_θ - max(0, Δ_ref))), without humanline.

    Δ is the log-prob of the chosen completion minus that of the rejected one. DPO's margin is Δ_θ - Δ_ref, to
    which this adds min(0, Δ_ref): a reference that prefers the rejected completion counts as neutral.
    Evaluations have DPO's loss, because LAST holds log-probs of training only.
    """
    chosen, rejected = (beta * (log_ratio * mask).sum(-1)).chunk(2)
    if not log_ratio.requires_grad:
        return -F.logsigmoid(chosen - rejected)
    ref_logps = (LAST.logps - log_ratio.detach()) * mask
    ref_chosen, ref_rejected = ref_logps.sum(-1).chunk(2)
    margin = chosen - rejected + beta * (ref_chosen - ref_rejected).clamp(max=0)
    return -F.logsigmoid(margin)


# === Syncing ===
def sync_after_update(script):
    """Changes syncing to a trust region (Figure 10): after every k-th update, and not before an update.

    With k = 1 policy and reference are always equal. Nothing is clipped. The sync is made when the next step
    draws its batch: nothing reads the reference in between, and a resumed run makes it too.
    """
    if getattr(LAST.args, "online", True):  # grpo_math, which has no such flag, always samples
        raise utils.InputError("trust-region is for offline data: an online round must sync when it starts")
    if not LAST.args.k:
        raise utils.InputError("trust-region needs a --k above 0, otherwise the reference never moves")
    load_models, draw_batch, sync_reference = script.load_models, script.draw_batch, script.sync_reference
    k = LAST.args.k
    models = []

    def load_and_remember(*arguments):
        models[:] = load_models(*arguments)
        return models

    def sync_and_draw(groups, number, size, seed):
        if number > 0 and k > 0 and number % k == 0:
            policy, reference = models
            sync_reference(reference, policy)
        return draw_batch(groups, number, size, seed)

    script.load_models, script.draw_batch = load_and_remember, sync_and_draw
    script.sync_reference = lambda reference, policy: None
    script.clip_log_ratio = no_clipping


def moving_average(script, weight: float):
    """Makes the reference a moving average (EMA-PG, 2602.04417): π_ref ← (1 - weight) π_ref + weight π_θ.

    The average is over weights, and takes the place of the humanline sync, so it is updated every k steps and
    before the policy. Nothing is clipped. In EMA-PG it is the reference of GRPO's KL penalty alone. Here it
    is the only reference that the script has, which suits DPO and KTO.
    """
    if getattr(LAST.args, "online", True):  # grpo_math, which has no such flag, always samples
        raise utils.InputError("ema is for offline data: an online round must sync when it starts")
    if not (LAST.args.humanline and LAST.args.k):
        raise utils.InputError("ema needs humanline and a --k above 0, otherwise the reference never moves")

    @torch.no_grad()
    def average(reference, policy):
        for target, source in zip(reference.parameters(), policy.parameters(), strict=True):
            if target.dtype == torch.bfloat16:
                raise utils.InputError("ema: bf16 would lose small changes; pass --dtype float32")
            target.to_local().lerp_(source.to_local(), weight)

    script.sync_reference, script.clip_log_ratio = average, no_clipping


# === The learning rate ===
def vcpo_rate(script):
    """Makes the learning rate of each update VCPO's: --lr times √(ESS / B), from the weights of B sequences.

    Source: 2602.17616, "ESS-guided step scaling". A sequence's weight is the product of its ratios π_θ/π_ref.
    Without humanline, the reference is the policy that has sampled the round. VCPO also multiplies gradients
    by these weights and has a baseline of its own. This variant has neither: its loss is the script's.
    VCPO's code adds 1e-8 to Σ w², which lowers the rate further where all weights are tiny.
    """
    if not hasattr(script, "grpo_loss") or LAST.args.humanline:
        raise utils.InputError("vcpo-rate is for GRPO with --no-humanline")
    log_weights = []  # of the sequences of this rank and step
    rate = {}  # of the last update
    clip_log_ratio, perf_metrics = script.clip_log_ratio, run.perf_metrics

    def collect_and_clip(args, log_ratio):
        log_weights.extend(log_ratio.detach().double().sum(-1).tolist())
        return clip_log_ratio(args, log_ratio)

    def scale(optimizer, *unused):
        if not log_weights:  # torch's own step, which creates Adam's moments for a resume
            return
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, log_weights)
        log_weights.clear()
        share = effective_share(torch.tensor(sum(gathered, []), dtype=torch.float64))
        for param_group in optimizer.param_groups:
            param_group["lr"] *= share**0.5  # the script sets the rate anew before each update
        rate.update({"lr": param_group["lr"], "vcpo/effective_share": share})

    script.clip_log_ratio = collect_and_clip
    run.perf_metrics = lambda *arguments: perf_metrics(*arguments) | rate  # the last metrics of a step
    register_optimizer_step_pre_hook(scale)


def effective_share(log_weights) -> float:
    """Returns ESS / B = (Σ w)² / (B Σ w²), from the log-weights of a batch, (B,): 1 if all are equal."""
    weights = (log_weights - log_weights.max()).exp()  # their scale cancels out
    return (weights.sum() ** 2 / (weights**2).sum() / len(weights)).item()


VARIANTS = {  # {name: {a function of the script: what replaces it}}
    "no-clipping": {"clip_log_ratio": no_clipping},
    "sampling": {"clip_log_ratio": humanline_sampling},
    "clip-higher-1.28": {"grpo_loss": partial(clip_higher, upper=1.28)},
    "clip-higher-1.5": {"grpo_loss": partial(clip_higher, upper=1.5)},
    "cispo": {"grpo_loss": cispo},
    "icepop": {"clip_log_ratio": icepop},
    "gspo": {"clip_log_ratio": gspo},
    "m2po": {"grpo_loss": m2po},
    "dppo": {"grpo_loss": dppo},
    "drpo": {"grpo_loss": drpo},
    "bapo": {"grpo_loss": bapo},
    "oapl": {"grpo_loss": oapl, "group_advantages": optimal_advantages},
    "hypo": {"dpo_loss": hypo},
    "no-reference": {"grpo_loss": no_reference},
}
OTHERS = {"trust-region": sync_after_update, "vcpo-rate": vcpo_rate}  # {name: what changes the script}
OTHERS |= {f"ema-{weight}": partial(moving_average, weight=weight) for weight in (0.1, 0.03)}


def main(words: list[str]):
    """Runs a script with a variant."""
    names = [*OTHERS, *VARIANTS]
    if len(words) < 2 or words[0] not in names or not words[1].endswith("_humanline"):
        raise SystemExit(f"error: name a variant ({', '.join(names)}), then a script, without .py")
    name, script_name, *flags = words
    script = import_module(script_name)
    # args.json and the run's folder name the variant, so that only it resumes the run.
    script.__file__ = str(Path(script.__file__).with_stem(f"{name}-{script_name}"))
    LAST.args = parse_args(script, flags)
    if name in OTHERS:
        OTHERS[name](script)
    else:
        replace_functions(script, name)
    script.main(LAST.args)


def replace_functions(script, name: str):
    """Replaces the functions of a script that the variant is about."""
    for function, replacement in VARIANTS[name].items():
        if not hasattr(script, function):
            raise utils.InputError(f"{script.__name__} has no {function}, which {name} would replace")
        setattr(script, function, replacement)
    remember_micro_batches(script)
    changes_gradient = {"clip_log_ratio", "grpo_loss"} & VARIANTS[name].keys()
    if changes_gradient and hasattr(script, "grpo_metrics"):
        count_stopped_tokens(script)


if __name__ == "__main__":
    main(sys.argv[1:])
