"""Makes docs/humanline.ipynb from docs/humanline.md.

    pip install -r tests/requirements.txt
    python docs/make_notebook.py         # runs the notebook: four minutes on two cores
    python docs/make_notebook.py --text  # after a change of the text alone: keeps the outputs

A block of the page that begins with ```python becomes a cell that runs. A block with `.noeval` behind its
language stays text. A copy of the repository runs the notebook, so that no files are left behind.
"""

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


def execute(notebook: nbformat.NotebookNode, folder: Path):
    """Runs the notebook in a copy of the repository. The outputs are written into the notebook."""
    for path in DOCS.parent.glob("*.py"):
        shutil.copy(path, folder)
    for name in ("docs", "paper", "support", "toy"):
        shutil.copytree(DOCS.parent / name, folder / name)
    resources = {"metadata": {"path": str(folder / "docs")}}
    NotebookClient(notebook, timeout=600, resources=resources, record_timing=False).execute()


def main():
    """Writes the notebook."""
    notebook = read_page()
    if sys.argv[1:] == ["--text"]:
        run_cells = [cell for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]
        new_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for new, old in zip(new_cells, run_cells, strict=True):
            assert new.source == old.source, f"run the notebook, because this cell has changed:\n{new.source}"
            new.update(outputs=old.outputs, execution_count=old.execution_count)
    else:
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
