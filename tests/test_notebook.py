"""docs/humanline.ipynb is docs/humanline.md, its cells run, and its exercises fail until they are solved."""

import re

import nbformat
import pandas as pd
import pytest

from docs import make_notebook

CLAMP = ("return log_ratio  # line 1: change this", "return log_ratio.clamp(-1.5, 1.5)")
ONE_SIDED = (CLAMP[0], "return log_ratio.clamp(max=1.5)")  # which has the losses of the script
SYNC = "    if step % k == 0:\n        reference.load_state_dict(policy.state_dict())\n"
UPDATE = "    optimizer.step()"
BEFORE, AFTER = (UPDATE, f"{SYNC}{UPDATE}"), (UPDATE, f"{UPDATE}\n{SYNC[:-1]}")
KTO = [
    ("z_0 = 0.0", "z_0 = other_log_ratio.clamp(-1.5, 1.5).sum(-1).mean().clamp(min=0)"),
    ("- ref_logps).sum", "- ref_logps).clamp(-1.5, 1.5).sum"),
    ("margin = beta * z ", "margin = beta * torch.cat([z[:32] - z_0, z_0 - z[32:]]) "),
    BEFORE,
]
# The exercise, its edits, and what it says, or "" if it is solved. docs/solutions.md tells these steps.
GRPO_CHECK, KTO_CHECK = 'check(losses, "grpo")', 'check(losses, "kto")'
ATTEMPTS = [
    (GRPO_CHECK, [], "step 5: "),
    (GRPO_CHECK, [CLAMP, BEFORE], ""),
    (GRPO_CHECK, [BEFORE], "step 13: "),
    (GRPO_CHECK, [CLAMP], "step 5: "),
    (GRPO_CHECK, [ONE_SIDED, BEFORE], "your values and gradients: "),
    (GRPO_CHECK, [CLAMP, AFTER], "step 1: "),
    (KTO_CHECK, [], "step 1: "),
    (KTO_CHECK, KTO, ""),
    ("def weight", [], "autograd gives"),
    ("def weight", [("return margin", "return 1 / (1 + margin.exp())")], ""),
]
ATTEMPT = """
said = ""
try:
    exec({source!r})
except AssertionError as error:
    said = str(error)
assert said.startswith({says!r}) and bool(said) == bool({says!r}), said
"""


def skip_if_unchanged(name: str):
    """Skips a test if a hash of the committed notebook is that of the files now."""
    committed = nbformat.read(make_notebook.NOTEBOOK, 4).metadata
    if committed[name] == make_notebook.read_page().metadata[name]:
        pytest.skip("nothing has changed since the committed run")


def test_the_notebook_is_the_page():
    """After a change of the page: python docs/make_notebook.py."""
    sides = [make_notebook.read_page(), nbformat.read(make_notebook.NOTEBOOK, 4)]
    page, notebook = ([(cell.cell_type, cell.source, cell.metadata) for cell in side.cells] for side in sides)
    assert notebook == page


def test_the_notebook_has_outputs_without_warnings_and_exercises_have_none():
    notebook = nbformat.read(make_notebook.NOTEBOOK, 4)
    cells = make_notebook.cells_to_run(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)
    assert not any(cell.outputs for cell in notebook.cells if cell.cell_type == "code" and cell not in cells)
    drawn = [name for cell in cells for name in make_notebook.pictures(cell)]
    assert drawn == "push sync tokens lottery gamma".split()
    for name in drawn:
        for page in (make_notebook.PAGE, make_notebook.DOCS / "slides.md"):
            assert f"({name}.png)" in page.read_text(), (page, name)


def exercise(cells: list, name: str, edits: list) -> str:
    """Returns the source of an exercise after edits."""
    (cell,) = [cell for cell in cells if make_notebook.is_exercise(cell) and name in cell.source]
    source = cell.source
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


@pytest.mark.slow
def test_the_cells_run_and_the_exercises_fail_until_they_are_solved():
    skip_if_unchanged("hash")
    page = make_notebook.read_page()
    notebook = nbformat.from_dict(page)
    notebook.cells = make_notebook.cells_to_run(page)
    (loop,) = [cell.source for cell in notebook.cells if "def train(k)" in cell.source]
    sync = re.search(r"^ +if step % k == 0:\n.*\n", loop, re.MULTILINE)[0]
    late = loop.replace(sync, "").replace(f"{UPDATE}\n", f"{UPDATE}\n{sync}")
    assert late.index(sync) > late.index(UPDATE)
    exercises = [(exercise(page.cells, name, edits), says) for name, edits, says in ATTEMPTS]
    order = exercise(page.cells, "math.log(2)", [])
    for source, says in [*exercises, (order, "["), (f"{late}\n{order}", "")]:
        notebook.cells.append(nbformat.v4.new_code_cell(ATTEMPT.format(source=source, says=says)))
    make_notebook.execute(notebook)


def test_the_command_of_the_page_is_that_of_the_losses():
    page = " ".join(make_notebook.PAGE.read_text().replace("\\\n", " ").split())
    flags = make_notebook.SIXTEEN_STEPS
    assert f"python dpo_humanline.py {flags}" in page


@pytest.mark.slow
def test_the_losses_are_those_of_the_scripts(monkeypatch, tmp_path):
    skip_if_unchanged("hash_of_scripts")
    committed = pd.read_csv(make_notebook.LOSSES)
    monkeypatch.setattr(make_notebook, "LOSSES", tmp_path / "lesson.csv")
    make_notebook.write_losses()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "lesson.csv"), committed, atol=1e-5)
