"""docs/humanline.ipynb is docs/humanline.md, has its outputs, and runs with results in the page's ranges."""

import json
import math
import re
import resource

import nbformat
import pandas as pd
import pytest
from conftest import LAUNCHER, metrics

from docs import make_notebook


def code_cells(notebook) -> list:
    """Returns the cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_outputs(notebook):
    """Checks that all cells ran in order without errors, and that all but definitions have outputs."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert cell.outputs or cell.source.startswith("import "), cell.source
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr", output
    pictures = sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert pictures == sum("plt.subplots" in cell.source for cell in cells) == 6


def test_the_notebook_is_the_page():
    """After a change of the page: python docs/make_notebook.py."""
    sides = [make_notebook.read_page(), nbformat.read(make_notebook.NOTEBOOK, 4)]
    page, notebook = ([(cell.cell_type, cell.source, cell.metadata) for cell in side.cells] for side in sides)
    assert notebook == page


def test_the_notebook_has_its_outputs_and_is_small():
    check_outputs(nbformat.read(make_notebook.NOTEBOOK, 4))
    assert make_notebook.NOTEBOOK.stat().st_size < 1_000_000


def ranges(text: str) -> list[tuple]:
    """Returns the ranges "0.1 to 0.2" of a text."""
    found = re.findall(r"(−?\d+(?:\.\d+)?) to (−?\d+(?:\.\d+)?)", " ".join(text.split()))
    return [tuple(float(end.replace("−", "-")) for end in ends) for ends in found]


def results(runs) -> dict[str, list[float]]:
    """Returns the values that the page gives ranges of, by its sections. Checks those without a range."""
    after = {path.parent.name: json.loads(path.read_text())["after"] for path in runs.glob("*/summary.json")}
    for line in metrics(runs / "sync-after"):
        assert line["loss"] == pytest.approx(math.log(2)) and not line["humanline/log_ratio_abs_mean"]
    wide, tight = (pd.DataFrame(metrics(runs / name)) for name in ("wide", "tight"))
    assert not tight["grpo/clip_fraction"].any()
    margins_norms_and_losses = []
    for name in ("fixed", "humanline"):
        means = pd.DataFrame(metrics(runs / name)).tail(20).mean()
        margins_norms_and_losses += means[["rewards/margins", "grad_norm", "loss"]].tolist()
    outside = tight["humanline/clipped_low"] + tight["humanline/clipped_high"]
    accuracies = [after[name]["eval/accuracy"][0] for name in ("sync-after", "sync-before")]
    return {
        "### Three": [after[name]["eval/reward"][0] for name in ("offline", "humanline", "online")],
        "### 1. ": [metrics(runs / "sync-before")[1]["loss"], *accuracies],
        "### 2. ": margins_norms_and_losses,
        "### 3. ": [wide["grpo/clip_fraction"][-32:].mean(), outside[-32:].mean()],
        "### 4. ": [metrics(runs / name)[0]["grad_norm"] for name in ("perceived", "concentrated")],
    }


@pytest.mark.slow
def test_the_notebook_runs_offline_in_eight_minutes(tmp_path, monkeypatch):
    """The runs have seed 1. The page's ranges are over more seeds, and another processor rounds otherwise."""
    for name in (*LAUNCHER, "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = make_notebook.read_page()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    make_notebook.execute(notebook, tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time, because other tests run beside this one. The cells use one core.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 480
    check_outputs(notebook)
    for heading, found in results(tmp_path / "runs" / "lesson").items():
        page = make_notebook.PAGE.read_text(encoding="utf-8")
        (text,) = re.findall(rf"^{re.escape(heading)}.*?(?=^##)", page, re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for value, (low, high) in zip(found, ranges(prose), strict=True):
            slack = (high - low) / 2
            assert low - slack <= value <= high + slack, (heading, found, ranges(prose))
