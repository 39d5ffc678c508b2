"""Draws the paper's Figure 2 with the tokens of a real policy: how people see probabilities.

    python dpo_humanline.py --engine hf --output-dir runs/figure2   # or any finished run on pairs
    python paper/figure2.py runs/figure2 --out figure2.png
    python paper/figure2.py paper/results/figure2.csv --out figure2.png  # the picture again, from its numbers

Left: the capacity function Ω⁺ (eq. 3) at γ = 0.61, the median of Tversky and Kahneman (1992) for gains, and
at γ = 1.

Middle: the weights ω (eq. 4) of sequences that are sampled from the policy with temperature 1. An outcome is
z = log π_θ/π_ref of a sequence. Here π_θ is the run's final/, and π_ref is the initial model. The outcomes
are in bins of equal width.

Right: the distribution of the tokens' log π_θ/π_ref, for the samples of the policy, for held-out pairs, and
for those tokens of the pairs to which humanline clipping leaves a gradient. Each curve is the cumulative
distribution minus that of the samples as people perceive them. A dot marks the widest difference, the
Kolmogorov-Smirnov distance. All prompts are pooled.

z_0 is below all outcomes. So all of them are gains and one function weighs them, as in the paper's figure.
That figure is a drawing of the idea. This one is a measurement, and need not look like it. A csv of the same
name has the cumulative distributions, also of humanline sampling (eq. 5).
"""

import csv
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import utils  # noqa: E402
from paper import variants  # noqa: E402
from paper.tokens import held_out_groups, open_run  # noqa: E402
from paper.trials import write_csv  # noqa: E402
from support import data, sampling  # noqa: E402
from support.run import exit_on_input_error, library_errors  # noqa: E402
from utils import InputError  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

GAMMA = 0.61
BINS = 16  # for the outcomes of sequences
BOUNDS = (-1.5, 1.5)  # humanline's bounds in the run of paper/results
RATIO = r"$\log\,\pi_\theta/\pi_{\mathrm{ref}}$"
# Okabe and Ito's colours, which colour-blind people can tell apart
BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
GREY = "#BBBBBB"
PERCEIVED = "the same, as perceived"
STYLES = {  # {beginning of a curve's name: its style}
    "γ = 1": {"color": "black", "linestyle": "--"},
    "γ": {"color": "black"},
    "objective": {"color": GREY},
    "perceived": {"color": "black"},
    "samples of the policy": {"color": "black", "linestyle": "--"},
    "held-out data, better": {"color": BLUE},
    "held-out data, worse": {"color": RED},
    "both, clipping": {"color": GREEN},
}


def capacity(a, gamma: float = GAMMA):
    """Computes equation 3: the perceived cumulative probability for an objective one."""
    a = np.clip(a, 0.0, 1.0)
    this = a**gamma
    other = (1 - a) ** gamma
    return this / (this + other) ** (1 / gamma)


def weights(p, omega=capacity) -> np.ndarray:
    """Computes equation 4: the weights of outcomes with probabilities p (n,). Their sum is Ω⁺(Σ p).

    The outcomes are sorted, the least positive first.
    """
    best_first = np.asarray(p)[::-1]
    as_good_or_better = np.append(np.cumsum(best_first)[::-1], 0.0)  # (n + 1,)
    perceived = omega(as_good_or_better)
    return perceived[:-1] - perceived[1:]


def cumulative(values, grid) -> np.ndarray:
    """Returns the fraction of the values (n,) that are at most x, for each x of the grid (m,)."""
    return np.searchsorted(np.sort(values), grid, side="right") / len(values)


# === Measurement ===
def measure(run: Path, rows: int) -> tuple[dict, tuple]:
    """Samples from the policy of a run and computes log-ratios.

    Returns:
        {name: log-ratios in nats}, of sequences for "outcomes" and otherwise of tokens; and the run's bounds.
    """
    script, args, device, tokenizer, eos_ids = open_run(run)
    groups = held_out_groups(script, args, tokenizer, eos_ids, rows)
    if len(groups[0]) == 1:
        raise InputError(f"{run}: --eval-dataset has no pairs")
    longest = data.longest_sequence(args, groups)
    policy, _ = script.load_models(replace(args, model=str(run / "final")), device, longest)
    _, reference = script.load_models(args, device, longest)
    # Temperature 1 and top-p 1, because the samples must have the policy's own probabilities
    unchanged = replace(args, engine="hf", reward_model="", temperature=1.0, top_p=1.0)
    sampler = sampling.Sampler(unchanged, tokenizer, eos_ids, device, longest)
    prompt_samples, _ = sampler.sample(policy, [group[0] for group in groups], 1, (args.seed, 2))

    def log_ratios(examples: list) -> tuple:
        """Returns the log-ratios (N, T) and the mask (N, T)."""
        logps, mask = utils.completion_logps(policy, examples, args.micro_batch_tokens)
        ref_logps, _ = utils.completion_logps(reference, examples, args.micro_batch_tokens)
        return logps - ref_logps, mask

    on_policy, on_mask = log_ratios([sample for (sample,) in prompt_samples])
    pairs = [group[0] for group in groups] + [group[-1] for group in groups]
    offline, mask = log_ratios(pairs)
    better, worse = offline.chunk(2)
    better_mask, worse_mask = mask.bool().chunk(2)
    input_ids, _ = utils.pad_batch(pairs, "cpu")
    humanline = replace(args, humanline=True)
    measured = {
        "outcomes": (on_policy * on_mask).sum(-1).numpy(),  # (N,)
        "samples": on_policy[on_mask.bool()].numpy(),
        "better": better[better_mask].numpy(),
        "worse": worse[worse_mask].numpy(),
        "sampling": kept(variants.humanline_sampling, humanline, offline, mask, input_ids),
        "clipping": kept(script.clip_log_ratio, humanline, offline, mask, input_ids),
    }
    return measured, (args.log_epsilon_P, args.log_epsilon_R)


def kept(clip_log_ratio, args, log_ratio, mask, input_ids) -> np.ndarray:
    """Returns the log-ratios of the tokens to which sampling or clipping leaves a gradient, (n,)."""
    variants.LAST.step, variants.LAST.input_ids, variants.LAST.mask = (args.seed, 0), input_ids, mask
    log_ratio = log_ratio.clone().requires_grad_()
    (clip_log_ratio(args, log_ratio) * mask).sum().backward()
    return log_ratio.detach()[log_ratio.grad != 0].numpy()


# === Picture ===
def curves_of(measured: dict) -> list[tuple]:
    """Makes the curves of the csv, (panel, name, x, y) each, and prints their distances."""
    a = np.linspace(0, 1, 101)
    count, edges = np.histogram(measured["outcomes"], BINS)
    centres = (edges[1:] + edges[:-1]) / 2
    p = count / len(measured["outcomes"])
    perceived = weights(p)
    means = f"the mean outcome is {p @ centres:.2f} nats, perceived {perceived @ centres:.2f}"
    print(f"{len(measured['outcomes'])} sequences: {means}")
    drawn = [
        ("capacity", "γ = 1: objective", a, capacity(a, 1.0)),
        ("capacity", f"γ = {GAMMA}: people, median", a, capacity(a)),
        ("weights", "objective, p", centres, p),
        ("weights", "perceived, ω", centres, perceived),
    ]
    both = np.concatenate([measured["better"], measured["worse"]])
    lowest, highest = np.quantile(np.concatenate([measured["samples"], both]), [0.005, 0.995])
    grid = np.linspace(lowest, highest, 151)
    objective = cumulative(measured["samples"], grid)
    perceived = 1 - capacity(1 - objective)
    tokens = [
        ("samples of the policy", objective),
        (PERCEIVED, perceived),
        ("held-out data, better", cumulative(measured["better"], grid)),
        ("held-out data, worse", cumulative(measured["worse"], grid)),
    ]
    for name, limit in (("sampling", "κ = 100"), ("clipping", "κ → ∞")):
        values = measured[name]
        label = f"both, {name}, {limit}: {len(values) / len(both):.0%} kept"
        tokens.append((label, cumulative(values, grid)))
    for name, y in [("held-out data, both", cumulative(both, grid)), *tokens]:
        distance = np.abs(y - perceived)
        area = np.trapezoid(distance, grid)
        print(f"{name}: at most {distance.max():.3f} from the perceived samples, on average {area:.2f} nats")
    return drawn + [("tokens", name, grid, y) for name, y in tokens]


def style_of(curve: str) -> dict:
    """Returns the style of a curve; {} for a curve that is only in the csv."""
    for start, style in STYLES.items():
        if curve.startswith(start):
            return style
    return {}


def draw_distances(ax, curves: dict):
    """Draws cumulative distributions {name: (x, y)} minus the perceived one, with a dot at the widest gap."""
    grid, perceived = curves[PERCEIVED]
    ax.axhline(0, color="black", linewidth=1.8, label="samples of the policy, as perceived: 0")
    for curve, (_, y) in curves.items():
        style = style_of(curve)
        if not style:
            continue
        gap = y - perceived
        widest = np.abs(gap).argmax()
        ax.plot(grid, gap, linewidth=1.8, label=f"{curve}: {abs(gap[widest]):.2f}", **style)
        x = grid[widest]
        ax.plot([x, x], [0, gap[widest]], "o:", markevery=[1], color=style["color"], linewidth=1)


def draw(drawn: list[tuple], bounds: tuple):
    """Draws the three panels. The right one shows humanline's bounds."""
    figure, axes = plt.subplots(1, 3, figsize=(17, 4.6), width_ratios=(1, 1.15, 1.3))
    left, middle, right = axes
    tokens = {}
    shift = -0.2
    for panel, curve, x, y in drawn:
        if panel == "tokens":
            tokens[curve] = (x, y)
        elif panel == "weights":
            width = x[1] - x[0]
            middle.bar(x + shift * width, y, 0.4 * width, label=curve, **style_of(curve))
            shift = -shift
        else:
            left.plot(x, y, label=curve, **style_of(curve))
    draw_distances(right, tokens)
    left.set(
        title="Capacity function (eq. 3)",
        xlabel="probability of an outcome as good or better, a",
        ylabel="as it is perceived, Ω⁺(a; γ)",
        aspect="equal",
    )
    middle.set(
        title=f"Weights at γ = {GAMMA} (eq. 4)",
        xlabel=f"outcome z = {RATIO} of a sampled sequence, nats",
        ylabel=f"probability (bins of {width:.2g} nats)",
    )
    for bound in bounds:
        right.axvline(bound, color=GREY, linewidth=0.8, zorder=0)
    right.set(
        title="How far tokens are from those that people perceive",
        xlabel=f"{RATIO} of a token, nats (grey: humanline's bounds)",
        ylabel="share of tokens at or below, minus the perceived",
    )
    left.legend(frameon=False, fontsize=9)
    middle.legend(frameon=False, fontsize=9)
    title = "Kolmogorov-Smirnov distance (the dot)"
    place = dict(loc="center left", bbox_to_anchor=(1, 0.5), alignment="left")
    right.legend(title=title, frameon=False, fontsize=9, title_fontsize=9, **place)
    figure.tight_layout()
    return figure


def read_curves(table: Path) -> list[tuple]:
    """Reads the curves that `curves_of` has made."""
    points = {}
    with library_errors(f"{table}"), open(table, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            points.setdefault((row["panel"], row["curve"]), []).append((float(row["x"]), float(row["y"])))
    return [(*names, *np.array(values).T) for names, values in points.items()]


def main(run: tyro.conf.Positional[Path], out: Path = Path("figure2.png"), rows: int = 512):
    """Draws the figure.

    Args:
        run: folder of a finished run on pairs, or the csv of such a run.
        out: file of the picture; the csv is written beside it.
        rows: number of held-out pairs, and of samples.
    """
    if run.suffix == ".csv":
        with library_errors(f"--out {out}"):
            draw(read_curves(run), BOUNDS).savefig(out, dpi=110)
        print(f"wrote {out}")
        return
    measured, bounds = measure(run, rows)
    drawn = curves_of(measured)
    lines = []
    for panel, curve, x, y in drawn:
        lines += [{"panel": panel, "curve": curve, "x": f"{a:.5g}", "y": f"{b:.5g}"} for a, b in zip(x, y)]
    table = out.with_suffix(".csv")
    with library_errors(f"--out {out}"):
        draw(drawn, bounds).savefig(out, dpi=110)
        write_csv(table, lines)
    print(f"wrote {out} and {table}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with exit_on_input_error():
        tyro.cli(main, description=__doc__)
