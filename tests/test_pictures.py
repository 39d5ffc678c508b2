"""paper/pictures.py: what is drawn is what the csvs say."""

import sys
from itertools import product

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
from paper import curves, figure2, pictures  # noqa: E402

OTHERS = ("figure8", "time", "instances", "tasks", "stories")  # with a test of their own
NAMES = sorted(path.stem.removesuffix("_arms") for path in pictures.RESULTS.glob("*_arms.csv"))


@pytest.fixture
def figures():
    """A function: {name: figure} of what is drawn for a name."""
    yield lambda name: pictures.figures_of(name, pictures.RESULTS)
    pictures.plt.close("all")


def of_lines(axes, marker: str) -> set[float]:
    """The x of all points of a marker."""
    lines = [line for line in axes.get_lines() if line.get_marker() == marker]
    return {float(x) for line in lines for x in line.get_xdata()}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHERS])
def test_dots_are_runs_squares_are_means_and_dotted_lines_the_score_before(name, figures):
    figure = figures(name)[name]
    shown = pictures.shown_of(name)
    lines = [line for line in pictures.read(pictures.RESULTS, f"{name}_arms") if line["metric"] in shown]
    rows = pictures.select(pictures.read(pictures.RESULTS, name), phase="reported")
    assert len(figure.axes) == len({line["panel"] for line in lines})
    scales = {}
    for axes in figure.axes:
        panel = axes.get_title()
        scales.setdefault(panel.rpartition(", ")[0], set()).add(axes.get_xlim())
        of_panel = pictures.select(lines, panel=panel)
        runs = {row[key] for row in pictures.select(rows, panel=panel) for key in shown if key in row}
        before = {line["mean"] for line in of_panel if line["arm"] == "untrained"}
        dotted = {line.get_xdata()[0] for line in axes.get_lines() if line.get_linestyle() == ":"}
        assert of_lines(axes, "o") == runs
        assert of_lines(axes, "s") == {line["mean"] for line in of_panel} - before
        assert dotted == before
    assert {len(found) for found in scales.values()} == {1}
    assert len(scales) == (2 if name == "figure5" else 1)


def test_runs_beyond_the_scale_are_written_at_its_edge(figures):
    """Of figure 6 the last quarter has a run at -1.4, and the other 39 scores are above -0.15."""
    (axes,) = figures("figure6")["figure6"].axes
    low, _ = axes.get_xlim()
    assert -0.3 < low < 0
    rows = pictures.select(pictures.read(pictures.RESULTS, "figure6"), phase="reported")
    beyond = [f"{score:.2g}" for score in sorted(row["judge"] for row in rows) if score < low]
    mean = "-0.27"  # of the last quarter, which is beyond it too
    assert [text.get_text().strip() for text in axes.texts] == [f"{', '.join(beyond)}; mean {mean}"]
    assert beyond[0] == "-1.4"


def test_figure_8_is_over_powers_of_two(figures):
    whole, large = figures("figure8")["figure8"].axes
    lines = [line for line in pictures.read(pictures.RESULTS, "figure8_arms") if line["arm"] != "untrained"]
    means = {line["mean"] for line in lines if line["metric"] in ("eval/reward", "judge")}
    assert {float(line.get_ydata()[0]) for line in whole.get_lines() if line.get_marker() == "s"} == means
    for axes, ticks in ((whole, [1, 4, 16, 32, 64]), (large, [16, 32, 64])):
        assert axes.get_xscale() == "log" and axes.get_xticks().tolist() == ticks


def test_instances_are_lines_of_means_over_their_seeds(figures):
    rows = pictures.select(pictures.read(pictures.RESULTS, "instances"), phase="reported")
    for axes in figures("instances")["instances"].axes:
        for i, line in enumerate(axes.get_lines()[:5], 1):
            for place, arm in enumerate(("offline", "offline + humanline", "online"), 1):
                runs = pictures.select(rows, panel=f"{axes.get_title()} {i}", arm=arm)
                mean = np.mean([row["judge"] for row in runs])
                assert len(runs) == 2 and line.get_ydata()[place] == pytest.approx(mean)


def test_tasks_have_a_mark_for_every_run_in_the_order_of_offlines_scores(figures):
    rows = pictures.select(pictures.read(pictures.RESULTS, "tasks"), phase="reported")
    before = pictures.select(pictures.read(pictures.RESULTS, "tasks_arms"), arm="untrained")
    drawn = 0
    for axes in figures("tasks")["tasks"].axes:
        script = axes.get_title()
        names = [label.get_text() for label in axes.get_yticklabels()][:-1]
        for line in axes.get_lines():
            label = line.get_label()
            if label.startswith("_"):
                continue
            scores = {row["panel"]: row["judge"] for row in rows if row["arm"] == label}
            if label == "before training":
                scores = {row["panel"]: row["mean"] for row in before}
            expected = [scores[name.replace("task", script)] for name in names]
            assert line.get_xdata().tolist() == expected
            if label == "offline":
                assert expected == sorted(expected, reverse=True)
            drawn += len(expected) * (label != "before training")
    assert drawn == len(rows)


def test_stories_are_paths_of_means_and_a_mark_for_the_end_of_every_run():
    """A run that collapsed has none."""
    rows = []
    for i, arm in product(range(4), ("offline", "online")):
        row = {"panel": f"KTO {i}", "arm": arm}
        for step in (0, 120, 30):
            row |= {f"kl@{step}": step * (i + 1) / 10, f"judge@{step}": i / 4 + step / 200}
        rows.append(row)
    rows.append({"panel": "KTO 4", "arm": "online", "failed": "diverged"})
    (axes,) = pictures.draw_stories(rows).axes
    assert axes.get_title() == "KTO"
    assert [container.get_label() for container in axes.containers] == ["offline", "online"]
    for container in axes.containers:
        path, *_ = container.lines
        assert path.get_xdata().tolist() == [0, 7.5, 30]
        assert path.get_ydata().tolist() == [0.375, 0.525, 0.975]
    ends = [line.get_xdata().tolist() for line in axes.get_lines() if line.get_linestyle() == "None"]
    assert ends.count([12, 24, 36, 48]) == 2
    pictures.plt.close("all")


def test_time_has_a_line_for_every_run_that_ends_at_its_seconds(figures):
    rows = pictures.read(pictures.RESULTS, "time_arms")
    drawn = [line.get_xdata()[-1] for axes in figures("time")["time"].axes for line in axes.get_lines()]
    assert sorted(drawn) == sorted(row["all_seconds"] for row in rows)


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


def test_the_dots_of_figure_2_are_the_widest_differences_of_its_csv():
    """And the legend says them: the Kolmogorov-Smirnov distances from what people perceive."""
    drawn = figure2.read_curves(pictures.RESULTS / "figure2.csv")
    cumulative = {curve: y for panel, curve, _, y in drawn if panel == "tokens"}
    perceived = cumulative.pop(figure2.PERCEIVED)
    expected = {}
    for curve, y in cumulative.items():
        if "sampling" not in curve:
            expected[curve] = max((y - perceived).tolist(), key=abs)
    assert len(expected) == 4
    right = figure2.draw(drawn, figure2.BOUNDS).axes[2]
    dots = [line.get_ydata()[1] for line in right.get_lines() if line.get_marker() == "o"]
    assert dots == list(expected.values())
    _, *told = [text.get_text() for text in right.get_legend().get_texts()]
    assert told == [f"{curve}: {abs(gap):.2f}" for curve, gap in expected.items()]
    pictures.plt.close("all")
