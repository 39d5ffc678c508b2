"""Tests paper/pictures.py: the pictures show the numbers of the csv files."""

import re

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from test_study import reported

from paper import loop, pictures, study

# These have their own tests. `chat` has no picture.
OTHERS = ["figure8", "time", "instances", "tasks", "stories", "baselines", "hypo"]
OTHERS += ["sums", "gap", "controls", "chat"]
NAMES = sorted(path.stem.removesuffix("_arms") for path in pictures.RESULTS.glob("*_arms.csv"))


@pytest.fixture
def axes_of():
    """Returns a function that draws the picture of a name and returns its panels."""
    yield lambda name: pictures.figures_of(name, pictures.RESULTS)[name].axes
    pictures.plt.close("all")


def of_lines(axes, marker: str) -> set[float]:
    """Returns the x of all points with a marker."""
    lines = [line for line in axes.get_lines() if line.get_marker() == marker]
    return {float(x) for line in lines for x in line.get_xdata()}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHERS])
def test_dots_are_runs_squares_are_means_and_dotted_lines_the_score_before(name, axes_of):
    shown = pictures.shown_of(name)
    lines = [line for line in pictures.read(pictures.RESULTS, f"{name}_arms") if line["metric"] in shown]
    drawn = axes_of(name)
    assert {axes.get_title() for axes in drawn} == {line["panel"] for line in lines}
    for axes in drawn:
        of_panel = pictures.select(lines, panel=axes.get_title())
        rows = pictures.select(reported(name), panel=axes.get_title())
        before = {line["mean"] for line in of_panel if line["arm"] == "untrained"}
        assert of_lines(axes, "o") == {row[key] for row in rows for key in shown if key in row}
        assert of_lines(axes, "s") == {line["mean"] for line in of_panel} - before
        assert {line.get_xdata()[0] for line in axes.get_lines() if line.get_linestyle() == ":"} == before


@pytest.mark.parametrize(
    ("name", "key", "along"), [("figure8", "mean", 1), ("instances", "mean", 1), ("time", "all_seconds", 0)]
)
def test_every_number_of_a_csv_is_drawn(name, key, along, axes_of):
    metrics = ("judge", "eval/reward") if name == "figure8" else ("judge", None)
    drawn = set()
    for axes in axes_of(name):
        for line in axes.get_lines():
            drawn |= set(map(float, line.get_data()[along]))
    for line in pictures.read(pictures.RESULTS, f"{name}_arms"):
        if line["arm"] != "untrained" and line.get("metric") in metrics:
            assert line[key] in drawn, line


def test_tasks_have_a_mark_for_every_run_in_the_order_of_offlines_scores(axes_of):
    rows = reported("tasks")
    drawn = axes_of("tasks")
    assert len(drawn) * 20 == len({row["panel"] for row in rows})
    for axes in drawn:
        *names, _ = [text.get_text() for text in axes.get_yticklabels()]
        panels = [name.replace("task", axes.get_title()) for name in names]
        marks = {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()}
        of_script = [row for row in rows if row["panel"] in panels]
        for arm in {row["arm"] for row in of_script}:
            scores = {row["panel"]: row["judge"] for row in of_script if row["arm"] == arm}
            assert marks[arm] == [scores[panel] for panel in panels]
        assert len(panels) == 20 and marks["offline"] == sorted(marks["offline"], reverse=True)


def test_stories_are_paths_of_means_and_a_mark_for_the_end_of_every_run(axes_of):
    for axes in axes_of("stories"):
        rows = [row for row in reported("stories") if row["panel"].startswith(f"{axes.get_title()} ")]
        ends = [list(line.get_xdata()) for line in axes.get_lines() if line.get_linestyle() == "None"]
        assert {container.get_label() for container in axes.containers} == {row["arm"] for row in rows}
        for container in axes.containers:
            of_arm = pictures.select(rows, arm=container.get_label(), failed=None)
            path, *_ = container.lines
            for found, name in zip(path.get_data(), ("kl", "judge")):
                for mean, step in zip(found, range(0, 121, 15), strict=True):
                    assert mean == pytest.approx(np.mean([row[f"{name}@{step}"] for row in of_arm]))
            assert [row["kl"] for row in of_arm] in ends


@pytest.mark.parametrize("studies", [("stories", "baselines"), ("hypo",)])
def test_a_frontier_has_a_mark_for_the_mean_end_of_every_arm_and_a_faint_one_for_every_tuned_setting(
    studies, axes_of
):
    rows, tuning = [], []
    for name in studies:
        rows += reported(name)
        tuning += pictures.select(pictures.read(pictures.RESULTS, name), phase="tuning")
    drawn = axes_of(studies[-1])
    (legend,) = drawn[0].figure.legends
    labels = {pictures.FRONTIER_MARKS[row["arm"]][0] for row in rows}
    assert {text.get_text() for text in legend.get_texts()} == labels
    for axes in drawn:
        of_script = [row for row in rows if row["panel"].startswith(f"{axes.get_title()} ")]
        arms = {pictures.FRONTIER_MARKS[row["arm"]][0]: row["arm"] for row in of_script}
        assert {container.get_label() for container in axes.containers} == {*arms}
        for container in axes.containers:
            of_arm = pictures.select(of_script, arm=arms[container.get_label()], failed=None)
            mark, *_ = container.lines
            for found, name in zip(mark.get_data(), ("kl", "judge")):
                assert found[0] == pytest.approx(np.mean([row[name] for row in of_arm]))
        faint = [line for line in axes.get_lines() if line.get_alpha() == 0.25]
        settings = {}
        for row in tuning:
            if row["panel"].startswith(f"{axes.get_title()} ") and "failed" not in row:
                setting = (row["arm"], re.sub(r"stories/\d+|--seed \d+", "", row["command"]))
                settings.setdefault(setting, []).append((row["kl"], row["judge"]))
        means = sorted(tuple(np.mean(ends, axis=0)) for ends in settings.values())
        drawn_means = sorted((line.get_xdata()[0], line.get_ydata()[0]) for line in faint)
        np.testing.assert_allclose(drawn_means, means)


@pytest.mark.parametrize(
    ("name", "over", "steps"),
    [
        ("sums", "5 kinds", [16, 32]),
        ("gap", "5 kinds", [16, 32]),
        ("controls", "6 games", [*range(32, 257, 32)]),
    ],
)
def test_curves_are_means_over_kinds_or_games_from_the_untrained_model_on(name, over, steps, axes_of):
    """A game of controls has two seeds or ten, and counts once."""
    table = pd.DataFrame(reported(name))
    lines = pictures.select(pictures.read(pictures.RESULTS, f"{name}_arms"), metric="eval/accuracy")
    before = {line["panel"]: line["mean"] for line in pictures.select(lines, arm="untrained")}
    table["eval/accuracy@0"] = table.panel.map(before)
    columns = [f"eval/accuracy@{step}" for step in (0, *steps)]
    (axes,) = axes_of(name)
    arms = list(dict.fromkeys(table.arm))
    assert [line.get_label() for line in axes.get_lines()] == [f"{arm} ({over})" for arm in arms]
    for arm, line in zip(arms, axes.get_lines()):
        means = table[table.arm == arm].groupby("panel")[columns].mean().mean()
        np.testing.assert_allclose(line.get_data(), ([0, *steps], means))


def test_differences_are_a_dot_and_an_interval_for_every_cell_of_the_readmes_table(axes_of):
    lines = study.differences(pictures.reported_rows(pictures.RESULTS))
    (axes,) = axes_of("differences")
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == [table_row.label for table_row in study.README_TABLE]
    drawn = 0
    for container, column in zip(axes.containers, ("default", "control", "online"), strict=True):
        dots, _, (bars,) = container.lines
        cells = pictures.select(lines, column=column)
        for x, y, bar, line in zip(*dots.get_data(), bars.get_segments(), cells, strict=True):
            assert labels[round(y)] == line["row"]
            assert (x, *bar[:, 0]) == pytest.approx([line[key] for key in ("difference", "low", "high")])
            drawn += 1
    assert drawn == len(lines) == 18
    hollow = [dot.get_xdata()[0] for dot in axes.get_lines() if dot.get_markerfacecolor() == "white"]
    assert sorted(hollow) == sorted(line["difference"] for line in lines if line["post_hoc"])
    assert len(hollow) == 2
    grey = axes.patches[0].get_bbox()
    assert (grey.x0, grey.x1) == (-0.05, 0.05)


def test_the_picture_of_the_loop_is_what_its_script_draws(tmp_path, monkeypatch):
    """Another version of matplotlib may place letters a pixel further."""
    committed = plt.imread(loop.OUT)
    monkeypatch.setattr(loop, "OUT", tmp_path / "loop.png")
    loop.main()
    assert abs(plt.imread(loop.OUT) - committed).mean() < 0.01
