"""The paper's Figure 2 with a real policy's tokens: how people see probabilities, and what humanline keeps.

    python dpo_humanline.py --engine hf --output-dir runs/figure2   # or any run on pairs that has ended
    python paper/figure2.py runs/figure2 --out figure2.png
    python paper/figure2.py paper/results/figure2.csv --out figure2.png  # drawn anew from its numbers

Left: the capacity function Ω⁺ (eq. 3) at γ = 0.61, the median of Tversky and Kahneman (1992) for gains, and
at γ = 1. Middle: the weights ω (eq. 4) of sequences sampled from the policy at temperature 1. An outcome is
z = log π_θ/π_ref of a sequence, where π_θ is the run's final/ and π_ref the model that it began with, in
equally wide bins. Right: how far the tokens' log π_θ/π_ref are from those of samples of the policy as people
perceive them, as a difference of cumulative distributions: of the samples themselves, of held-out pairs, and
of those tokens of the pairs to which humanline clipping leaves a gradient. A dot is the widest difference,
the Kolmogorov-Smirnov distance. All prompts are pooled. z_0 is below all outcomes: all are gains, and one
function weighs them, as in the paper's figure, which is a drawing of the idea. This is a measurement, and
need not look like it. The cumulative distributions are in a csv of the same name, and that of humanline
sampling (eq. 5) too.
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
from run import exit_on_error, fail  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

GAMMA = 0.61
BINS = 16  # of the outcomes of sequences
BOUNDS = (-1.5, 1.5)  # humanline's, of the run in results/
RATIO = r"$\log\,\pi_\theta/\pi_{\mathrm{ref}}$"
# Okabe and Ito's: every eye can tell them apart.
BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
GREY = "#BBBBBB"
PERCEIVED = "the same, as perceived"
STYLES = {  # by how a curve's name begins
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
    """Equation 3: the perceived for an objective cumulative probability."""
    a = np.clip(a, 0.0, 1.0)
    this = a**gamma
    other = (1 - a) ** gamma
    return this / (this + other) ** (1 / gamma)


def weights(p, omega=capacity) -> np.ndarray:
    """Equation 4: of outcomes with probabilities p (n,), least positive first; their sum is Ω⁺(Σ p)."""
    best_first = np.asarray(p)[::-1]
    as_good_or_better = np.append(np.cumsum(best_first)[::-1], 0.0)  # (n + 1,)
    perceived = omega(as_good_or_better)
    return perceived[:-1] - perceived[1:]


def cumulative(values, grid) -> np.ndarray:
    """The share of the values (n,) that are at most each of the grid (m,)."""
    return np.searchsorted(np.sort(values), grid, side="right") / len(values)


# === Measured ===
def measure(run: Path, rows: int) -> tuple[dict, tuple]:
    """Log-ratios by name, in nats, of tokens but for the outcomes; and the run's bounds."""
    script, args, device, tokenizer, eos_ids = open_run(run)
    groups = held_out_groups(script, args, tokenizer, eos_ids, rows)
    if len(groups[0]) == 1:
        fail(f"{run}: --eval-dataset has no pairs")
    dtype = torch.float32
    with exit_on_error(f"{run}"):
        policy, _ = script.load_models(replace(args, model=str(run / "final")), dtype, device)
        _, reference = script.load_models(args, dtype, device)
        # Temperature 1 and the whole nucleus: what the policy is literally capable of.
        literal = replace(args, engine="hf", reward_model="", temperature=1.0, top_p=1.0)
        sampler = script.make_sampler(literal, tokenizer, eos_ids, dtype, device)
    policy.eval()
    by_prompt, _ = sampler.sample(policy, [group[0] for group in groups], 1, (args.seed, 2))

    def log_ratios(examples: list) -> tuple:
        """(N, T), and the mask."""
        logps, mask = utils.completion_logps(policy, examples)
        ref_logps, _ = utils.completion_logps(reference, examples)
        return logps - ref_logps, mask

    on_policy, on_mask = log_ratios([sample for (sample,) in by_prompt])
    pairs = [group[0] for group in groups] + [group[-1] for group in groups]
    offline, mask = log_ratios(pairs)
    better, worse = offline.chunk(2)
    better_mask, worse_mask = mask.bool().chunk(2)
    input_ids, _ = utils.pad_batch(pairs, "cpu")
    humanline = replace(args, humanline=True, clip=True)
    measured = {
        "outcomes": (on_policy * on_mask).sum(-1).numpy(),  # of sampled sequences (N,)
        "samples": on_policy[on_mask.bool()].numpy(),
        "better": better[better_mask].numpy(),  # of held-out pairs
        "worse": worse[worse_mask].numpy(),
        "sampling": kept(variants.humanline_sampling, humanline, offline, mask, input_ids),
        "clipping": kept(script.clip_log_ratio, humanline, offline, mask, input_ids),
    }
    return measured, (args.log_epsilon_P, args.log_epsilon_R)


def kept(clip_log_ratio, args, log_ratio, mask, input_ids) -> np.ndarray:
    """The log-ratios of the tokens to which humanline sampling or clipping leaves a gradient, (n,)."""
    variants.LAST.step, variants.LAST.input_ids, variants.LAST.mask = (args.seed, 0), input_ids, mask
    log_ratio = log_ratio.clone().requires_grad_()
    (clip_log_ratio(args, log_ratio) * mask).sum().backward()
    return log_ratio.detach()[log_ratio.grad != 0].numpy()


# === Drawn ===
def curves_of(measured: dict) -> list[tuple]:
    """(panel, curve, x, y) of all that is in the csv."""
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
        print(f"{name}: from the perceived {distance.max():.3f} at most, {area:.2f} nats on average")
    return drawn + [("tokens", name, grid, y) for name, y in tokens]


def style_of(curve: str) -> dict:
    """Of a curve that is drawn; {} of one that is in the csv alone."""
    for start, style in STYLES.items():
        if curve.startswith(start):
            return style
    return {}


def draw_distances(ax, curves: dict):
    """The cumulative distributions {name: (x, y)} minus the perceived one, with a dot where it is widest."""
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
    """What curves_of gave."""
    points = {}
    with exit_on_error(f"{table}"), open(table, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            points.setdefault((row["panel"], row["curve"]), []).append((float(row["x"]), float(row["y"])))
    return [(*names, *np.array(values).T) for names, values in points.items()]


def main(run: tyro.conf.Positional[Path], out: Path = Path("figure2.png"), rows: int = 512):
    """Draws the figure.

    Args:
        run: A finished run on pairs, or the csv of one.
        out: The picture; the csv is put beside it.
        rows: Held-out pairs, and samples.
    """
    if run.suffix == ".csv":
        with exit_on_error(f"--out {out}", (OSError, ValueError)):
            draw(read_curves(run), BOUNDS).savefig(out, dpi=110)
        print(f"wrote {out}")
        return
    measured, bounds = measure(run, rows)
    drawn = curves_of(measured)
    lines = []
    for panel, curve, x, y in drawn:
        lines += [{"panel": panel, "curve": curve, "x": f"{a:.5g}", "y": f"{b:.5g}"} for a, b in zip(x, y)]
    table = out.with_suffix(".csv")
    with exit_on_error(f"--out {out}", (OSError, ValueError)):
        draw(drawn, bounds).savefig(out, dpi=110)
        write_csv(table, lines)
    print(f"wrote {out} and {table}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
