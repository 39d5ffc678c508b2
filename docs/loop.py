"""Draws docs/loop.png: one training step of humanline as a picture.

pip install -r lab/requirements.txt
python docs/loop.py  # the README and docs/humanline.md show the picture
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

OUT = Path(__file__).with_name("loop.png")
PLAIN, LINE, MODEL = "#f4f4f4", "#fbd9c5", "#d5e8f5"  # grey, the two lines of humanline in orange, blue
BOXES = {  # {name: (x, y, width, height, colour, lines of text)}, in hundredths of an inch
    "batch": (20, 120, 130, 84, PLAIN, ("batch", "data set, or", "samples of", "the policy")),
    "policy": (190, 50, 180, 56, MODEL, ("policy", "log-probs")),
    "reference": (190, 218, 180, 56, MODEL, ("reference", "log-probs, no gradient")),
    "ratio": (400, 134, 120, 56, PLAIN, ("log-ratio", "of every token")),
    "clip": (552, 134, 118, 56, LINE, ("1. clipping", "to [-1.5, 1.5]")),
    "loss": (702, 134, 130, 56, PLAIN, ("loss", "DPO, KTO, GRPO")),
    "backward": (864, 134, 106, 56, PLAIN, ("backward", "gradient")),
    "sync": (705, 218, 265, 56, LINE, ("2. syncing, every k steps", "reference ← policy")),
    "update": (
        545,
        50,
        425,
        56,
        PLAIN,
        ("update", "optimizer.step(): the policy moves, the reference stays"),
    ),
}
HEAD = {"arrowstyle": "-|>", "color": "#333", "shrinkA": 0, "shrinkB": 0}
ARROWS = [  # points of each arrow
    [(150, 150), (170, 150), (170, 78), (190, 78)],
    [(150, 174), (170, 174), (170, 246), (190, 246)],
    [(370, 78), (460, 78), (460, 134)],
    [(370, 236), (460, 236), (460, 190)],
    [(520, 162), (552, 162)],
    [(670, 162), (702, 162)],
    [(832, 162), (864, 162)],
    [(917, 190), (917, 218)],
    [(970, 246), (985, 246), (985, 78), (970, 78)],
    [(545, 64), (370, 64)],
    [(705, 262), (370, 262)],
]


def draw_box(ax, x: int, y: int, width: int, height: int, colour: str, texts: tuple):
    """Draws a box with centred lines of text, the first one bold."""
    ax.add_patch(FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=8", fc=colour, ec="#333"))
    first = y + height / 2 - 9 * (len(texts) - 1)
    for number, text in enumerate(texts):
        weight = "bold" if number == 0 else "normal"
        ax.text(x + width / 2, first + 18 * number, text, ha="center", va="center", weight=weight)


def main():
    """Draws the picture."""
    plt.rcParams["font.size"] = 9
    figure = plt.figure(figsize=(10, 3))
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, 1000), ylim=(300, 0))
    ax.axis("off")
    title = "One step. The sync comes before the update: with k = 1, the reference stays one update behind."
    ax.text(20, 24, title, fontsize=10)
    for *line, start, end in ARROWS:
        ax.plot(*zip(*line, start), color="#333", lw=1.1)
        ax.annotate("", end, start, arrowprops=HEAD)
    for values in BOXES.values():
        draw_box(ax, *values)
    ax.text(457, 57, "next step", ha="center", fontsize=8)
    ax.text(537, 278, "copies all weights", ha="center", fontsize=8)
    figure.savefig(OUT, dpi=130)


if __name__ == "__main__":
    main()
