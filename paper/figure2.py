"""The paper's Figure 2 with a real policy's tokens: how people see probabilities, and what humanline keeps.

    python paper/figure2.py --out paper/results/figure2.png         # trains DPO on the toy first, once
    python paper/figure2.py --run runs/FOLDER --out figure2.png     # of a finished run on pairs

Left: the capacity function Ω⁺ (eq. 3) at γ = 0.61, the median of Tversky and Kahneman (1992) for gains, and
at γ = 1.
Middle: the weights ω (eq. 4) of sequences sampled from the policy at temperature 1. An outcome is z = log
π_θ/π_ref of a sequence, where π_θ is the run's final/ and π_ref the model that it began with; outcomes are
equally wide bins of z.
Right: cumulative distributions of the log π_θ/π_ref of tokens: of samples of the policy; of these as people
perceive them; of held-out pairs; and of those tokens of the pairs to which humanline sampling (eq. 5, the
run's κ and M) and humanline clipping (κ → ∞) leave a gradient. All prompts are pooled. z_0 is below all
outcomes: all are gains, and one function weighs them, as in the paper's figure. The numbers that are drawn
are in a csv of the same name.

The paper's figure is a drawing of the idea; this is a measurement, and need not look like it.
"""

import csv
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import numpy as np
import torch
import tyro
from tokens import open_run
from transformers import AutoModelForCausalLM, GenerationConfig

import utils
from run import exit_on_error, fail

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
GAMMA = 0.61
RATIO = r"$\log\,\pi_\theta/\pi_{\mathrm{ref}}$"
# Okabe and Ito's: every eye can tell them apart.
BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
GREY = "#BBBBBB"


def capacity(a, gamma: float = GAMMA):
    """Equation 3: the perceived for an objective cumulative probability."""
    a = np.clip(a, 0.0, 1.0)
    this = a**gamma
    other = (1 - a) ** gamma
    return this / (this + other) ** (1 / gamma)


def weights(p, omega=capacity) -> np.ndarray:
    """Equation 4: the weights of outcomes with probabilities p (n,), least positive first; their sum is Ω⁺(Σ
    p)."""
    best_first = np.asarray(p)[::-1]
    as_good_or_better = np.append(np.cumsum(best_first)[::-1], 0.0)  # (n + 1,)
    perceived = omega(as_good_or_better)
    return perceived[:-1] - perceived[1:]


def log_ratios(policy, reference, examples: list, pad_id: int) -> tuple:
    """log π_θ/π_ref of every completion token and the mask, (N, T) float64."""
    input_ids, mask = utils.pad_batch(examples, pad_id, policy.device)
    with torch.no_grad():
        logps = utils.token_logps(policy, input_ids, mask)
        ref_logps = utils.token_logps(reference, input_ids, mask)
    return (logps - ref_logps).double(), mask.double()


def kept(script, args, log_ratio, mask, clip: str):
    """The log-ratios of the tokens to which humanline sampling or clipping leaves a gradient, (n,)."""
    log_ratio = log_ratio.clone().requires_grad_()
    keys = [(args.seed, row) for row in range(len(mask))]
    settings = replace(args, humanline=True, clip=clip)
    clipped = script.clip_log_ratio(settings, log_ratio, mask, keys)
    (clipped * mask).sum().backward()
    return log_ratio.detach()[log_ratio.grad != 0]


def cumulative(values, grid) -> np.ndarray:
    """The share of the values (n,) that are at most each of the grid (m,)."""
    return np.searchsorted(np.sort(values), grid, side="right") / len(values)


def trained_run() -> Path:
    """runs/figure2, trained if it is not there or not finished."""
    run = ROOT / "runs" / "figure2"
    if not (run / "summary.json").exists():
        flags = ["--output-dir", str(run), "--engine", "hf"]
        if (run / "args.json").exists():
            flags = ["--resume", str(run)]
        subprocess.run([sys.executable, ROOT / "dpo_humanline.py", *flags], check=True)
    return run


@dataclass
class Measured:
    """Of a run: its script and flags, and log-ratios in nats."""

    script: object
    args: object
    outcomes: np.ndarray  # of sampled sequences (N,)
    samples: torch.Tensor  # of their tokens (n,)
    better: torch.Tensor  # of tokens of the better completions of held-out pairs
    worse: torch.Tensor
    offline: torch.Tensor  # of both (2N, T)
    offline_mask: torch.Tensor


def measure(run: Path, rows: int) -> Measured:
    script, args, (_, _, device) = open_run(run)
    if hasattr(args, "sample_every") or not args.eval_dataset:
        fail(f"--run {run}: figure 2 needs a run with pairs as --eval-dataset")
    _, _, tokens = script.load_config(args)
    sizes = range(1000)  # numbers of completions that a row may have
    groups, _ = script.load_groups(
        args,
        "--eval-dataset",
        args.eval_dataset,
        args.eval_split,
        tokens,
        sizes,
    )
    groups = [group for group in groups if len(group) > 1][:rows]
    if not groups:
        fail(f"--run {run}: --eval-dataset {args.eval_dataset} has no pairs")
    policy = load_model(args, run, str(run / "final"), device)
    reference = load_model(args, run, args.model, device)

    args.temperature = 1.0  # what the policy is literally capable of
    args.top_p = 1.0
    policy.generation_config = GenerationConfig()
    prompts = [group[0].prompt_ids for group in groups]
    completions, _ = utils.generate(policy, prompts, args, tokens, (args.seed, 2))
    samples = []
    better = []
    worse = []
    for group, completion_ids in zip(groups, completions):
        samples.append(group[0]._replace(completion_ids=completion_ids))
        better.append(max(group, key=lambda x: x.reward))
        worse.append(min(group, key=lambda x: x.reward))
    on_policy, mask = log_ratios(policy, reference, samples, tokens.pad_id)
    offline, offline_mask = log_ratios(policy, reference, better + worse, tokens.pad_id)
    inside = offline_mask.bool()
    half = len(groups)
    return Measured(
        script,
        args,
        outcomes=(on_policy * mask).sum(-1).numpy(),
        samples=on_policy[mask.bool()],
        better=offline[:half][inside[:half]],
        worse=offline[half:][inside[half:]],
        offline=offline,
        offline_mask=offline_mask,
    )


def load_model(args, run: Path, name: str, device):
    with exit_on_error(f"--run {run}: {name}"):
        model = utils.load_pretrained(
            AutoModelForCausalLM,
            name,
            dtype=torch.float32,
            trust_remote_code=args.trust_remote_code,
        )
        return model.to(device).eval()


class Panel:
    """Axes, and what is drawn on them: (panel, curve, x, y)."""

    def __init__(self, axes, name: str, drawn: list):
        self.axes = axes
        self.name = name
        self.drawn = drawn

    def note(self, curve: str, x, y):
        for a, b in zip(x, y):
            self.drawn.append((self.name, curve, a, b))

    def line(self, curve: str, x, y, **style):
        self.axes.plot(x, y, label=curve, **style)
        self.note(curve, x, y)

    def bars(self, curve: str, x, y, shift: float, width: float, color: str):
        self.axes.bar(x + shift * width, y, 0.4 * width, label=curve, color=color)
        self.note(curve, x, y)


def draw_capacity(panel: Panel):
    a = np.linspace(0, 1, 101)
    panel.line("γ = 1: objective", a, capacity(a, 1.0), color="black", linestyle="--")
    panel.line(f"γ = {GAMMA}: people, median", a, capacity(a), color="black")
    panel.axes.set(
        title="Capacity function (eq. 3)",
        xlabel="probability of an outcome as good or better, a",
        ylabel="as it is perceived, Ω⁺(a; γ)",
        aspect="equal",
    )


def draw_weights(panel: Panel, outcomes: np.ndarray, bins: int):
    count, edges = np.histogram(outcomes, bins)
    centres = (edges[1:] + edges[:-1]) / 2
    width = edges[1] - edges[0]
    p = count / len(outcomes)
    perceived = weights(p)
    panel.bars("objective, p", centres, p, -0.2, width, GREY)
    panel.bars("perceived, ω", centres, perceived, 0.2, width, "black")
    panel.axes.set(
        title=f"Weights at γ = {GAMMA} (eq. 4)",
        xlabel=f"outcome z = {RATIO} of a sampled sequence, nats",
        ylabel=f"probability (bins of {width:.2g} nats)",
    )
    means = f"the mean outcome is {p @ centres:.2f} nats, perceived {perceived @ centres:.2f}"
    print(f"{len(outcomes)} sequences: {means}")


def draw_tokens(panel: Panel, measured: Measured):
    args = measured.args
    better = measured.better
    worse = measured.worse
    every = np.concatenate([measured.samples, better, worse])
    lowest, highest = np.quantile(every, [0.005, 0.995])
    grid = np.linspace(lowest, highest, 151)
    objective = cumulative(measured.samples, grid)
    perceived = 1 - capacity(1 - objective)

    def curve(name: str, y, **style):
        panel.line(name, grid, y, linewidth=1.8, **style)
        print_distance(name, grid, y, perceived)

    both = cumulative(np.concatenate([better, worse]), grid)
    print_distance("held-out data, both", grid, both, perceived)
    curve("samples of the policy", objective, color="black", linestyle="--")
    curve("the same, as perceived", perceived, color="black")
    curve("held-out data, better", cumulative(better, grid), color=BLUE)
    curve("held-out data, worse", cumulative(worse, grid), color=RED)
    kinds = [
        (f"sampling, κ = {args.kappa:g}", "sample", "-"),
        ("clipping, κ → ∞", "clip", ":"),
    ]
    for name, clip, style in kinds:
        with exit_on_error("humanline sampling at the run's bounds, κ and M", ValueError):
            tokens = kept(measured.script, args, measured.offline, measured.offline_mask, clip)
        share = len(tokens) / (len(better) + len(worse))
        label = f"both, {name}: {share:.0%} kept"
        curve(label, cumulative(tokens, grid), color=GREEN, linestyle=style)
    for bound in (args.log_epsilon_P, args.log_epsilon_R):
        panel.axes.axvline(bound, color=GREY, linewidth=0.8, zorder=0)
    panel.axes.set(
        title="Token log-ratios",
        xlabel=f"{RATIO} of a token, nats (grey: humanline's bounds)",
        ylabel="share of tokens at or below",
    )


def print_distance(name: str, grid, y, perceived):
    """From the perceived distribution: the widest of the shares, and the area between, in nats."""
    distance = np.abs(y - perceived)
    area = np.trapezoid(distance, grid)
    print(f"{name}: from the perceived {distance.max():.3f} at most, {area:.2f} nats on average")


def main(out: Path, run: Path | None = None, rows: int = 512, bins: int = 16):
    """Draws the figure.

    Args:
        out: The picture; the csv is put beside it.
        run: A finished run on pairs; without it, runs/figure2, a run of dpo_humanline.py on the toy.
        rows: Held-out pairs, and samples.
        bins: Of the outcomes of sequences.
    """
    if rows < 1 or bins < 2:
        raise SystemExit(f"error: --rows is {rows} and --bins {bins}; they must be at least 1 and 2")
    measured = measure(run or trained_run(), rows)
    figure, axes = plt.subplots(1, 3, figsize=(17, 4.6), width_ratios=(1, 1.15, 1.3))
    left, middle, right = axes
    drawn = []
    draw_capacity(Panel(left, "capacity", drawn))
    draw_weights(Panel(middle, "weights", drawn), measured.outcomes, bins)
    draw_tokens(Panel(right, "tokens", drawn), measured)
    left.legend(frameon=False, fontsize=9)
    middle.legend(frameon=False, fontsize=9)
    right.legend(
        frameon=False,
        fontsize=9,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    figure.tight_layout()
    table = out.with_suffix(".csv")
    with exit_on_error(f"--out {out}", (OSError, ValueError)):
        figure.savefig(out, dpi=110)
        with table.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("panel", "curve", "x", "y"))
            for panel, curve, x, y in drawn:
                writer.writerow((panel, curve, f"{x:.5g}", f"{y:.5g}"))
    print(f"wrote {out} and {table}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
