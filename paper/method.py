"""Draws docs/method.png: the method in one picture, with real numbers of runs of the toy.

    pip install -r paper/requirements.txt
    python paper/method.py

Left: humanline clipping of the tokens of one step. Right: humanline syncing with k = 1 and k = 4, as the
log-prob of one completion under policy and reference at each step.
"""

import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import matplotlib
import torch
import torch.distributed as dist

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import grpo_humanline as script  # noqa: E402
import utils  # noqa: E402
from paper.variants import defaults  # noqa: E402
from support import run  # noqa: E402

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#888888"  # colour-blind people can tell them apart
RATIO = r"$\log\,\pi_\theta/\pi_{\mathrm{ref}}$"
STEPS = 24


def follow(k: int) -> tuple:
    """Makes a run, with hooks that read its models.

    Returns:
        The log-prob of one completion under (policy, reference) before the update of each step, and the
        log-ratios of the last step's tokens.
    """
    points = []
    ratios = []
    models = []
    probes = []
    load_models, load_groups, clip = script.load_models, script.load_groups, script.clip_log_ratio
    draw_batch = script.draw_batch

    def keep_models(*arguments):
        models.extend(load_models(*arguments))
        return tuple(models)

    def keep_probe(*arguments):
        groups = load_groups(*arguments)
        probes.append(groups[0][0])
        return groups

    @torch.no_grad()
    def before_a_step(*arguments):
        probe = utils.pad_batch(probes[:1], models[0].device)
        points.append([utils.token_logps(model, *probe).sum().item() for model in models])
        ratios.clear()
        return draw_batch(*arguments)

    def keep_ratios(args, log_ratio):
        ratios.extend(log_ratio[log_ratio != 0].tolist())
        return clip(args, log_ratio)

    with tempfile.TemporaryDirectory() as folder:
        flags = ["--k", str(k), "--num-steps", str(STEPS), "--eval-samples", "0", "--lr", "1e-3"]
        flags += ["--warmup-fraction", "0", "--checkpoint-every", "0", "--output-dir", f"{folder}/run"]
        args = run.parse_args(script.Args, script.__file__, script.__doc__, **defaults(script), flags=flags)
        hooks = dict(load_models=keep_models, load_groups=keep_probe, clip_log_ratio=keep_ratios)
        with patch.multiple(script, **hooks, draw_batch=before_a_step):
            script.main(args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return points, ratios


def draw_clipping(ax, ratios: list[float]):
    """Draws each token's log-ratio before and after the clamp."""
    low, high = script.Args.log_epsilon_P, script.Args.log_epsilon_R
    edge = max(2.5, *(abs(ratio) for ratio in ratios))
    ax.axvspan(-edge, low, color=ORANGE, alpha=0.15, lw=0)
    ax.axvspan(high, edge, color=ORANGE, alpha=0.15, lw=0, label="clipped: no gradient")
    ax.plot([-edge, edge], [-edge, edge], ":", color=GREY, lw=1, label="without clipping")
    clipped = [min(max(ratio, low), high) for ratio in ratios]
    ax.plot(ratios, clipped, "o", color=BLUE, ms=4, alpha=0.4, mew=0, label="a token of this step")
    beyond = sum(ratio != after for ratio, after in zip(ratios, clipped))
    ax.set_title(f"Clipping: {beyond} of {len(ratios)} tokens are beyond ±{high}")
    ax.set_xlabel(f"{RATIO} of a token, nats, {STEPS - 1} updates after a sync")
    ax.set_ylabel("what the loss receives")
    ax.legend(loc="upper left", fontsize=8)


def draw_syncing(ax, points: list, k: int):
    """Draws the log-probs of the policy, and of the reference, which becomes the policy every k steps."""
    policy = [point[0] for point in points]
    reference = [point[1] for point in points]
    steps = range(len(points))
    ax.plot(steps, policy, "o-", color=BLUE, ms=3, lw=1.2, label="policy")
    ax.step(steps, reference, where="post", color=ORANGE, lw=1.5, label="reference")
    ax.fill_between(steps, policy, reference, step="post", color=GREY, alpha=0.2, lw=0)
    behind = "1 update" if k == 1 else f"1 to {k} updates"
    ax.set_title(f"Syncing, k = {k}: {behind} behind, after step 0")
    ax.set_ylabel("log p, nats")
    ax.legend(loc="upper left", fontsize=8)


def main():
    """Draws the picture."""
    plt.rcParams["axes.titlesize"] = 10.5
    figure, axes = plt.subplot_mosaic([["clip", "1"], ["clip", "4"]], figsize=(10, 4.6), layout="constrained")
    for k in (1, 4):
        points, ratios = follow(k)
        draw_syncing(axes[str(k)], points, k)
    axes["1"].sharex(axes["4"])
    axes["4"].set_xlabel("optimizer step")
    draw_clipping(axes["clip"], follow(STEPS)[1])
    figure.savefig(ROOT / "docs" / "method.png", dpi=130)


if __name__ == "__main__":
    main()
