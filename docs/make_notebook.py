"""Makes docs/humanline.ipynb from docs/humanline.md.

    pip install -r tests/requirements.txt
    python docs/make_notebook.py         # runs the notebook: four minutes on two cores
    python docs/make_notebook.py --text  # after a change of the text alone: keeps the outputs

A block of the page that begins with ```python becomes a cell that runs. A block with `.noeval` behind its
language stays text. A cell with the tag "raises-exception" is an exercise. It runs with the code of its
solution, the first block of the text below it, and the notebook has the exercise instead, without outputs. A
copy of the repository runs the notebook, so that no files are left behind.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).resolve().parent
PAGE, NOTEBOOK = DOCS / "humanline.md", DOCS / "humanline.ipynb"


def read_page() -> nbformat.NotebookNode:
    """Returns the page as a notebook without outputs, with a text cell for each section."""
    notebook = jupytext.read(PAGE, fmt={"extension": ".md", "split_at_heading": True})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # jupytext's ids are random
    return notebook


def is_exercise(cell) -> bool:
    """Returns whether a cell has a gap that a student fills."""
    return "raises-exception" in cell.metadata.get("tags", ())


def cells_with_outputs(notebook: nbformat.NotebookNode) -> list:
    """Returns the cells that run and are no exercises."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and not is_exercise(cell)]


def solve(notebook: nbformat.NotebookNode):
    """Fills each exercise with its solution, the first block below it in a closed fold."""
    for number, cell in enumerate(notebook.cells):
        if is_exercise(cell):
            below = notebook.cells[number + 1].source
            cell.source = re.search(r"<summary>.*?^```python .noeval\n(.*?)\n```$", below, re.M | re.S)[1]


def execute(notebook: nbformat.NotebookNode, folder: Path):
    """Runs the notebook in a copy of the repository. The outputs are written into the notebook."""
    for path in DOCS.parent.glob("*.py"):
        shutil.copy(path, folder)
    for name in ("docs", "paper", "support", "toy"):
        shutil.copytree(DOCS.parent / name, folder / name)
    options = {"timeout": 600, "resources": {"metadata": {"path": str(folder / "docs")}}}
    # Jupyter continues after an exercise that raises. Here every error ends the run.
    NotebookClient(notebook, record_timing=False, force_raise_errors=True, **options).execute()


def main():
    """Writes the notebook."""
    notebook = read_page()
    if sys.argv[1:] == ["--text"]:
        run = nbformat.read(NOTEBOOK, 4)
    else:
        run = read_page()
        solve(run)
        with tempfile.TemporaryDirectory() as folder:
            execute(run, Path(folder))
    for new, old in zip(cells_with_outputs(notebook), cells_with_outputs(run), strict=True):
        assert new.source == old.source, f"run the notebook, because this cell has changed:\n{new.source}"
        new.update(outputs=old.outputs, execution_count=old.execution_count)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
