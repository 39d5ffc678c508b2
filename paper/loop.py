"""Writes docs/loop.svg: one training step of humanline as a picture.

python paper/loop.py    # the README and docs/humanline.md show it
"""

from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).resolve().parents[1] / "docs" / "loop.svg"
WIDTH, HEIGHT = 1000, 330
PLAIN, LINE, MODEL = "#f4f4f4", "#fbd9c5", "#d5e8f5"  # grey, the two lines of humanline in orange, blue
BOXES = {  # {name: (x, y, width, height, colour, lines of text)}
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


def box(x: int, y: int, width: int, height: int, colour: str, texts: tuple) -> str:
    """Returns a box with centred lines of text, the first one bold."""
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{colour}" stroke="#333"/>'
    ]
    first = y + height / 2 - 9 * (len(texts) - 1) + 5
    for number, text in enumerate(texts):
        weight = ' font-weight="bold"' if number == 0 else ""
        place = f'x="{x + width / 2}" y="{first + 18 * number}"'
        parts.append(f'<text {place} text-anchor="middle"{weight}>{escape(text)}</text>')
    return "\n".join(parts)


def arrow(points: list[tuple]) -> str:
    """Returns a line with an arrowhead at its end."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="#333" stroke-width="1.5" marker-end="url(#head)"/>'


def main():
    """Writes the picture."""
    marker = '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    marker += 'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="#333"/></marker>'
    title = "One step. Its order matters: a sync after the update would make both models equal."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="14" '
        'font-family="Helvetica, Arial, sans-serif" fill="#111">',
        f"<defs>{marker}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="white"/>',  # for pages with a dark background
        f'<text x="20" y="28" font-size="15">{title}</text>',
        *(arrow(points) for points in ARROWS),
        *(box(*values) for values in BOXES.values()),
        '<text x="457" y="57" text-anchor="middle" font-size="12">next step</text>',
        '<text x="537" y="278" text-anchor="middle" font-size="12">copies all weights</text>',
        "</svg>",
    ]
    OUT.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
