"""The paper's Figure 2 with a real policy's tokens: how people see probabilities, and which tokens humanline keeps.

    python paper/figure2.py --out paper/results/figure2.png                # trains DPO on the toy first, once
    python paper/figure2.py --run runs/FOLDER --out figure2.png            # of a finished run on pairs

Left: the capacity function Ω⁺ (eq. 3) at γ = 0.61, the median of Tversky and Kahneman (1992) for gains, and at γ = 1.
Middle: the weights ω (eq. 4) of sequences sampled from the policy at temperature 1. An outcome is z = log π_θ/π_ref of
a sequence, where π_θ is the run's final/ and π_ref the model that it began with; outcomes are equally wide bins of z.
Right: cumulative distributions of the log π_θ/π_ref of tokens: of samples of the policy; of these as people perceive
them; of held-out pairs; and of those tokens of the pairs to which humanline sampling (eq. 5, the run's κ and M) and
humanline clipping (κ → ∞) leave a gradient. All prompts are pooled. z_0 is below all outcomes: all are gains, and one
function weighs them, as in the paper's figure. The numbers that are drawn are in a csv of the same name.

The paper's figure is a drawing of the idea; this is a measurement, and need not look like it.
"""

import csv
import math
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch
import tyro
from tokens import open_run
from transformers import AutoModelForCausalLM, GenerationConfig

import utils

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
GAMMA = 0.61
RATIO = r"$\log\,\pi_\theta/\pi_{\mathrm{ref}}$"
BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#BBBBBB"  # Okabe and Ito's: every eye can tell them apart


def capacity(a, gamma: float = GAMMA):
    """Equation 3: the perceived for an objective cumulative probability."""
    a = np.clip(a, 0.0, 1.0)
    return a**gamma / (a**gamma + (1 - a) ** gamma) ** (1 / gamma)


def weights(p, omega=capacity) -> np.ndarray:
    """Equation 4: the weights of outcomes, least positive first, with probabilities p (n,); their sum is Ω⁺(Σ p)."""
    as_good_or_better = np.append(np.cumsum(np.asarray(p)[::-1])[::-1], 0.0)  # (n + 1,)
    perceived = omega(as_good_or_better)
    return perceived[:-1] - perceived[1:]


def log_ratios(policy, reference, examples: list, pad_id: int) -> tuple:
    """log π_θ/π_ref of every completion token and the mask, (N, T) float64."""
    (logps, mask), (ref_logps, _) = (utils.completion_logps(model, examples, pad_id) for model in (policy, reference))
    return logps - ref_logps, mask


def kept(script, args, log_ratio, mask, clip: str):
    """The log-ratios of the tokens to which humanline sampling or clipping leaves a gradient, (n,)."""
    log_ratio = log_ratio.clone().requires_grad_()
    if clip == "sample":
        draws = []
        for side, bound in enumerate((math.exp(args.log_epsilon_P), math.exp(-args.log_epsilon_R))):
            keys = [(args.seed, row, side) for row in range(len(mask))]
            draws.append(script.beta_draws(mask, keys, args.kappa, bound / args.M))
        clipped = script.humanline_sampling(log_ratio, *draws, args.M)
    else:
        clipped = log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)
    (clipped * mask).sum().backward()
    return log_ratio.detach()[log_ratio.grad != 0]


def cumulative(values, grid) -> np.ndarray:
    """The share of the values (n,) that are at most each of the grid (m,)."""
    return np.searchsorted(np.sort(values), grid, side="right") / len(values)


def trained_run() -> Path:
    """runs/figure2, trained if it is not there or not finished."""
    run = ROOT / "runs" / "figure2"
    if not (run / "summary.json").exists():
        how = ["--resume", str(run)] if (run / "args.json").exists() else ["--output-dir", str(run), "--engine", "hf"]
        subprocess.run([sys.executable, ROOT / "dpo_humanline.py", *how], check=True)
    return run


def measure(run: Path, rows: int) -> tuple:
    """Of a run: its script and flags; outcomes of sampled sequences (N,), and log-ratios of tokens (n,), in nats: of
    samples, and of the better and the worse completions of held-out pairs; and those of both as (2N, T) and mask."""
    script, args, (_, _, device) = open_run(run)
    if hasattr(args, "sample_every") or not args.eval_dataset:
        script.fail(f"--run {run}: figure 2 needs a run with pairs as --eval-dataset")
    _, _, tokens = script.load_config(args)
    data = (args.eval_dataset, args.eval_split, tokens, range(1000), {})
    groups = [group for group in script.load_groups(args, "--eval-dataset", *data) if len(group) > 1][:rows]
    if not groups:
        script.fail(f"--run {run}: --eval-dataset {args.eval_dataset} has no pairs")
    models = []
    for folder in (run / "final", args.model):
        with script.blame(f"--run {run}: {folder}"):
            how = {"dtype": torch.float32, "trust_remote_code": args.trust_remote_code}
            models.append(utils.load_whole(AutoModelForCausalLM, str(folder), **how).to(device).eval())
    args.temperature, args.top_p = 1.0, 1.0  # what the policy is literally capable of
    policy, reference = models
    policy.generation_config = GenerationConfig()
    ids, _ = utils.generate(policy, [group[0].prompt_ids for group in groups], args, tokens, (args.seed, 2))
    samples = [group[0]._replace(completion_ids=sample) for group, sample in zip(groups, ids)]
    better = [max(group, key=lambda x: x.reward) for group in groups]
    worse = [min(group, key=lambda x: x.reward) for group in groups]
    on_policy, mask = log_ratios(policy, reference, samples, tokens.pad_id)
    offline, offline_mask = log_ratios(policy, reference, better + worse, tokens.pad_id)
    sides = [part[inside.bool()] for part, inside in zip(offline.chunk(2), offline_mask.chunk(2))]
    return script, args, (on_policy * mask).sum(-1).numpy(), on_policy[mask.bool()], *sides, (offline, offline_mask)


def main(out: Path, run: Path | None = None, rows: int = 512, bins: int = 16) -> None:
    """Draws the figure.

    Args:
        out: The picture; the csv is put beside it.
        run: A finished run on pairs; without it, runs/figure2, a run of dpo_humanline.py on the toy.
        rows: Held-out pairs, and samples.
        bins: Of the outcomes of sequences.
    """
    if rows < 1 or bins < 2:
        raise SystemExit(f"error: --rows is {rows} and --bins {bins}; they must be at least 1 and 2")
    script, args, outcomes, on_policy, better, worse, offline = measure(run or trained_run(), rows)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(17, 4.6), width_ratios=(1, 1.15, 1.3))
    drawn = []  # (panel, curve, x, y)

    def line(axes, panel, name, x, y, **how):
        axes.plot(x, y, label=name, **how)
        drawn.extend((panel, name, a, b) for a, b in zip(x, y))

    a = np.linspace(0, 1, 101)
    line(left, "capacity", "γ = 1: objective", a, capacity(a, 1.0), color="black", linestyle="--")
    line(left, "capacity", f"γ = {GAMMA}: people, median", a, capacity(a), color="black")
    left.set(xlabel="probability of an outcome as good or better, a", ylabel="as it is perceived, Ω⁺(a; γ)")
    left.set(title="Capacity function (eq. 3)", aspect="equal")

    count, edges = np.histogram(outcomes, bins)
    p, centres, width = count / len(outcomes), (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    perceived = weights(p)
    for name, y, shift, colour in (("objective, p", p, -0.2, GREY), ("perceived, ω", perceived, 0.2, "black")):
        middle.bar(centres + shift * width, y, 0.4 * width, label=name, color=colour)
        drawn.extend(("weights", name, x, v) for x, v in zip(centres, y))
    middle.set(xlabel=f"outcome z = {RATIO} of a sampled sequence, nats")
    middle.set(ylabel=f"probability (bins of {width:.2g} nats)", title=f"Weights at γ = {GAMMA} (eq. 4)")

    every = np.concatenate([on_policy, better, worse])
    grid = np.linspace(*np.quantile(every, [0.005, 0.995]), 151)
    objective = cumulative(on_policy, grid)
    human = 1 - capacity(1 - objective)
    curves = {"samples of the policy": (objective, {"color": "black", "linestyle": "--"})}
    curves["the same, as perceived"] = (human, {"color": "black"})
    curves["held-out data, better"] = (cumulative(better, grid), {"color": BLUE})
    curves["held-out data, worse"] = (cumulative(worse, grid), {"color": RED})
    for name, clip, style in ((f"sampling, κ = {args.kappa:g}", "sample", "-"), ("clipping, κ → ∞", "clip", ":")):
        with script.blame("humanline sampling at the run's bounds, κ and M", ValueError):
            tokens = kept(script, args, *offline, clip)
        share = len(tokens) / (len(better) + len(worse))
        curves[f"both, {name}: {share:.0%} kept"] = (cumulative(tokens, grid), {"color": GREEN, "linestyle": style})

    def tell(name, y):
        """Both distances from the perceived distribution: the widest of the shares, and the area between, in nats."""
        apart = np.abs(y - human)
        print(f"{name}: from the perceived {apart.max():.3f} at most, {np.trapezoid(apart, grid):.2f} nats on average")

    tell("held-out data, both", cumulative(np.concatenate([better, worse]), grid))
    for name, (y, how) in curves.items():
        line(right, "tokens", name, grid, y, linewidth=1.8, **how)
        tell(name, y)
    for bound in (args.log_epsilon_P, args.log_epsilon_R):
        right.axvline(bound, color=GREY, linewidth=0.8, zorder=0)
    right.set(xlabel=f"{RATIO} of a token, nats (grey: humanline's bounds)", ylabel="share of tokens at or below")
    right.set(title="Token log-ratios")
    for axes in (left, middle):
        axes.legend(frameon=False, fontsize=9)
    right.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    print(f"{len(outcomes)} sequences: the mean outcome is {p @ centres:.2f} nats, perceived {perceived @ centres:.2f}")
    with script.blame(f"--out {out}", (OSError, ValueError)):
        figure.savefig(out, dpi=110)
        with out.with_suffix(".csv").open("w", newline="") as file:
            rows = [(panel, name, f"{x:.5g}", f"{y:.5g}") for panel, name, x, y in drawn]
            csv.writer(file, lineterminator="\n").writerows([("panel", "curve", "x", "y"), *rows])
    print(f"wrote {out} and {out.with_suffix('.csv')}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
