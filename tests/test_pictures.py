"""paper/pictures.py: what is drawn is what the csvs say."""

import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
from paper import curves, pictures  # noqa: E402

NAMES = sorted(path.stem.removesuffix("_arms") for path in pictures.RESULTS.glob("*_arms.csv"))


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, in the place of files: {name: figure}."""
    found = {}
    monkeypatch.setattr(pictures, "save", lambda figure, name: found.setdefault(name, figure))
    yield found
    pictures.plt.close("all")


def of_lines(axes, marker: str) -> set[float]:
    """The x of all points of a marker."""
    points = set()
    for line in axes.get_lines():
        if line.get_marker() == marker:
            points |= {float(x) for x in line.get_xdata()}
    return points


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("figure8", "time", "instances")])
def test_dots_are_runs_squares_are_means_and_dotted_lines_the_score_before(name, figures):
    pictures.draw(name)
    figure = figures[name]
    shown = pictures.SHOWN.get(name, ("eval/reward", "judge"))
    lines = [line for line in pictures.read(f"{name}_arms") if line["metric"] in shown]
    rows = [row for row in pictures.read(name) if row["phase"] == "reported"]
    assert len(figure.axes) == len({line["panel"] for line in lines})
    scales = {}
    for axes in figure.axes:
        scales.setdefault(axes.get_title().rpartition(", ")[0], set()).add(axes.get_xlim())
    assert {len(found) for found in scales.values()} == {1}
    assert len(scales) == (2 if name == "figure5" else 1)
    for axes in figure.axes:
        panel = axes.get_title()
        runs = {row[key] for row in rows if row["panel"] == panel for key in shown if key in row}
        assert of_lines(axes, "o") == runs
        means = {}  # {whether it is of the untrained policy: means}
        for line in lines:
            if line["panel"] == panel:
                means.setdefault(line["arm"] == "untrained", set()).add(line["mean"])
        assert of_lines(axes, "s") == means[False]
        dotted = {line.get_xdata()[0] for line in axes.get_lines() if line.get_linestyle() == ":"}
        assert dotted == means[True]


def test_runs_beyond_the_scale_are_written_at_its_edge(figures):
    """Of figure 6 the last quarter has a run at -1.4, and the other 39 scores are above -0.15."""
    pictures.draw("figure6")
    (axes,) = figures["figure6"].axes
    low, _ = axes.get_xlim()
    assert -0.3 < low < 0
    scores = sorted(row["judge"] for row in pictures.read("figure6") if row["phase"] == "reported")
    beyond = [f"{score:.2g}" for score in scores if score < low]
    mean = "-0.27"  # of the last quarter, which is beyond it too
    assert [text.get_text().strip() for text in axes.texts] == [f"{', '.join(beyond)}; mean {mean}"]
    assert beyond[0] == "-1.4"


def test_figure_8_is_over_powers_of_two(figures):
    pictures.draw("figure8")
    whole, large = figures["figure8"].axes
    lines = [line for line in pictures.read("figure8_arms") if line["arm"] != "untrained"]
    means = {line["mean"] for line in lines if line["metric"] in ("eval/reward", "judge")}
    drawn = {float(line.get_ydata()[0]) for line in whole.get_lines() if line.get_marker() == "s"}
    assert drawn == means
    for axes, ticks in ((whole, [1, 4, 16, 32, 64]), (large, [16, 32, 64])):
        assert axes.get_xscale() == "log"
        assert axes.get_xticks().tolist() == ticks


def test_instances_are_lines_of_means_over_their_seeds(figures):
    arms = ("offline", "offline + humanline", "online")
    rows, lines = [], []
    for script, plus in (("KTO", 0), ("GRPO", 10)):
        for instance in (1, 2):
            panel = f"{script} {instance}"
            lines.append({"panel": panel, "arm": "untrained", "metric": "judge", "mean": plus - instance})
            for place, arm in enumerate(arms):
                for seed in (0, 1):
                    score = plus + instance + place + seed
                    rows.append({"panel": panel, "arm": arm, "judge": score})
    pictures.draw_instances(rows, lines)
    kto, grpo = figures["instances"].axes
    for axes, plus in ((kto, 0), (grpo, 10)):
        one, two = (line.get_ydata().tolist() for line in axes.get_lines()[:2])
        assert one == [plus - 1, plus + 1.5, plus + 2.5, plus + 3.5]
        assert two == [plus - 2, plus + 2.5, plus + 3.5, plus + 4.5]


@pytest.mark.parametrize("scale", [1, 2])
def test_the_band_of_shares_ends_at_one(scale):
    """As the shares themselves do; other numbers have the whole interval."""
    figure, axes = pictures.plt.subplots()
    values = scale * np.array([[0.9, 0.5], [1.0, 0.5], [1.0, 0.5]])
    curves.draw_band(axes, "arm", [1, 2], values)
    (band,) = axes.collections
    high = band.get_paths()[0].vertices[:, 1].max()
    upper = values[:, 0].mean() + curves.interval(values)[0]
    assert upper > scale
    assert high == pytest.approx(1 if scale == 1 else upper)
    pictures.plt.close(figure)
