"""docs/humanline.ipynb is docs/humanline.md, has its outputs, and runs with results in the page's ranges."""

import json
import math
import re
import resource
import textwrap

import nbformat
import pandas as pd
import pytest
from conftest import LAUNCHER, metrics

from docs import make_notebook


def check_outputs(notebook):
    """Checks that the cells ran in order without errors, and that all but definitions have outputs."""
    cells = make_notebook.cells_with_outputs(notebook)
    counts = [cell.execution_count for cell in cells]
    assert counts == sorted(counts) and None not in counts
    for cell in cells:
        assert cell.outputs or cell.source.startswith(("import os", "def load_models")), cell.source
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr", output
    pictures = sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert pictures == sum("plt.subplots" in cell.source for cell in cells) == 4


def test_the_notebook_is_the_page():
    """After a change of the page: python docs/make_notebook.py."""
    sides = [make_notebook.read_page(), nbformat.read(make_notebook.NOTEBOOK, 4)]
    page, notebook = ([(cell.cell_type, cell.source, cell.metadata) for cell in side.cells] for side in sides)
    assert notebook == page


def test_the_notebook_has_its_outputs_and_is_small():
    notebook = nbformat.read(make_notebook.NOTEBOOK, 4)
    check_outputs(notebook)
    for cell in notebook.cells:
        assert not (make_notebook.is_exercise(cell) and cell.outputs), "the answer stands below the question"
    assert make_notebook.NOTEBOOK.stat().st_size < 1_000_000


def ranges(text: str) -> list[tuple]:
    """Returns the ranges "0.1 to 0.2" of a text."""
    found = re.findall(r"(−?\d+(?:\.\d+)?) to (−?\d+(?:\.\d+)?)", " ".join(text.split()))
    return [tuple(float(end.replace("−", "-")) for end in ends) for ends in found]


# Faults of exercise 1, as edits of its solution, and the step at which the page says that they show
CLIP = "clipped = log_ratio.clamp(-bound, bound)"
SYNC = "        if step % k == 0:\n            reference.load_state_dict(policy.state_dict())  # line 2\n"
UPDATE = "        optimizer.step()\n"
EDITS = {13: [(CLIP, "clipped = log_ratio")], 5: [(SYNC, "")], 1: [(SYNC, ""), (UPDATE, UPDATE + SYNC)]}
LAST_CELL = """
import json

values = {"first": [distances[8], distances[9], beyond[8]], "stopped": stopped, "tight": train_grpo(0.1)[1]}
values["rose"] = (better > worse).double().mean().item()
values["late"] = losses
values["shown"] = []
for edited in EDITED:
    try:
        exec(edited)
    except AssertionError as error:
        values["shown"].append(str(error))
Path("runs/lesson/values.json").write_text(json.dumps(values))
"""


def prepare(notebook):
    """Runs each exercise, which must fail, before its solution. Adds a cell that writes what was found."""
    cells = [cell for cell in notebook.cells if make_notebook.is_exercise(cell)]
    stubs = [cell.source for cell in cells]
    make_notebook.solve(notebook)
    first = cells[0].source.replace(
        'train("grpo", f"grpo_humanline.py {sixteen_steps}")', "'runs/lesson/grpo'"
    )
    edited = []
    for edits in EDITS.values():
        edited.append(first)
        for old, new in edits:
            assert edited[-1].count(old) == 1
            edited[-1] = edited[-1].replace(old, new)
    for cell, stub in zip(cells, stubs):
        attempt = f"try:\n{textwrap.indent(stub, '    ')}\n"
        cell.source = f"{attempt}except AssertionError as error:\n    print('fails', error)\n{cell.source}"
    notebook.cells.append(nbformat.v4.new_code_cell(LAST_CELL.replace("EDITED", repr(edited))))
    return cells


def results(runs) -> dict[str, list[float]]:
    """Returns the values that the page gives ranges of, by its sections. Checks those without a range."""
    after = {path.parent.name: json.loads(path.read_text())["after"] for path in runs.glob("*/summary.json")}
    values = json.loads((runs / "values.json").read_text())
    assert values["late"] == pytest.approx([math.log(2)] * 16, abs=1e-12) and values["tight"] == 0
    assert [message.split(":")[0] for message in values["shown"]] == [f"step {step}" for step in EDITS]
    margins_norms_and_losses = []
    for name in ("fixed", "humanline"):
        means = pd.DataFrame(metrics(runs / name)).tail(20).mean()
        margins_norms_and_losses += means[["rewards/margins", "grad_norm", "loss"]].tolist()
    return {
        "## 1. ": values["first"],
        "### Three": [after[name]["eval/reward"][0] for name in ("offline", "humanline", "online")],
        "### 1. ": [values["stopped"]],
        "### 2. ": [values["rose"]],
        "### 3. ": margins_norms_and_losses,
    }


@pytest.mark.slow
def test_the_notebook_runs_offline_in_eight_minutes(tmp_path, monkeypatch):
    """The runs have seed 1. The page's ranges are over more seeds, and another processor rounds otherwise."""
    for name in (*LAUNCHER, "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = make_notebook.read_page()
    exercises = prepare(notebook)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    make_notebook.execute(notebook, tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time, because other tests run beside this one. The cells use one core.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 480
    for cell in exercises:
        assert re.search("^fails ", cell.outputs[0].text, re.MULTILINE), cell.source
    for heading, found in results(tmp_path / "runs" / "lesson").items():
        page = make_notebook.PAGE.read_text(encoding="utf-8")
        (text,) = re.findall(rf"^{re.escape(heading)}.*?(?=^##)", page, re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for value, (low, high) in zip(found, ranges(prose), strict=True):
            slack = (high - low) / 2
            assert low - slack <= value <= high + slack, (heading, found, ranges(prose))
