"""Makes docs/humanline.ipynb from docs/humanline.md, and the pictures of both and of docs/slides.md.

    pip install -r tests/requirements.txt
    python docs/make_notebook.py         # a minute if code has changed, else seconds
    python docs/make_notebook.py --text  # copies the text alone

A block of the page that begins with ```python becomes a cell. A block with `.noeval` behind its language
stays text. A cell with the tag "raises-exception" is an exercise, which is not run. A cell with the tag
"picture:NAME" draws docs/NAME.png, which the page shows below it. (If the picture is a page, chromium must be
there, and the notebook shows both, because GitHub shows no page within a page.)

The notebook keeps a hash of its cells and of the files that they read. While it is the same, this program
only copies the text. Otherwise it runs the cells, in a copy of the repository. Another hash is that of the
scripts. If they have changed, docs/lesson.csv is written anew: the losses of sixteen steps of each.
"""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
import pandas as pd
from nbclient import NotebookClient

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGE, NOTEBOOK, LOSSES = DOCS / "humanline.md", DOCS / "humanline.ipynb", DOCS / "lesson.csv"
SCRIPTS = ("dpo", "grpo", "kto")
SIXTEEN_STEPS = "--k 4 --num-steps 16 --lr 1e-3 --warmup-fraction 0 --dtype float64 --model toy/tales/policy"
SIXTEEN_STEPS += " --dataset toy/tales/preferences_train.jsonl.gz --max-prompt-length 64 --max-length 128"
READ_BY_CELLS = ["docs/lesson.csv", "tools/tokens.html", "tools/tokens.py"]
OF_LOSSES = [f"{name}_humanline.py" for name in SCRIPTS] + ["utils.py"]


# === The notebook ===
def read_page() -> nbformat.NotebookNode:
    """Returns the page as a notebook without outputs, with a text cell for each section."""
    notebook = jupytext.read(PAGE, fmt={"extension": ".md", "split_at_heading": True})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    hashes = {"hash": hash_files(READ_BY_CELLS, code), "hash_of_scripts": hash_files(OF_LOSSES, [])}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel} | hashes)
    drawn = [f"({name}.png)" for cell in notebook.cells for name in pictures(cell) if name != "tokens"]
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # jupytext's ids are random
        if cell.cell_type == "markdown":  # the notebook has these pictures as outputs
            lines = cell.source.split("\n")
            cell.source = "\n".join(line for line in lines if not line.endswith(tuple(drawn)))
    return notebook


def pictures(cell) -> list[str]:
    """Returns the names of the pictures that a cell draws."""
    tags = cell.metadata.get("tags", ())
    return [tag.removeprefix("picture:") for tag in tags if tag.startswith("picture:")]


def hash_files(names: list[str], texts: list[str]) -> str:
    """Returns a hash of the contents of files and of further texts."""
    contents = [(ROOT / name).read_text(encoding="utf-8") for name in names]
    return hashlib.sha256(json.dumps([*contents, *texts]).encode()).hexdigest()


def is_exercise(cell) -> bool:
    """Returns whether a cell has a gap that a student fills."""
    return "raises-exception" in cell.metadata.get("tags", ())


def cells_to_run(notebook: nbformat.NotebookNode) -> list:
    """Returns the code cells that are no exercises."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and not is_exercise(cell)]


def execute(notebook: nbformat.NotebookNode):
    """Runs a notebook in a copy of the repository. The outputs are written into the notebook."""
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", "runs", "__pycache__")
        copy = shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored)
        options = {"timeout": 600, "resources": {"metadata": {"path": str(copy / "docs")}}}
        NotebookClient(notebook, record_timing=False, force_raise_errors=True, **options).execute()


def write_losses():
    """Writes the losses of sixteen steps of the scripts, with which the page's cells compare theirs."""
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in SCRIPTS:
            output = f"{folder}/{name}"
            command = [sys.executable, f"{name}_humanline.py", *SIXTEEN_STEPS.split(), "--output-dir", output]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            losses[name] = pd.read_json(f"{output}/metrics.jsonl", lines=True)["loss"]
    pd.DataFrame(losses).round(6).to_csv(LOSSES, index_label="step")


# === Pictures ===
def write_pictures(notebook: nbformat.NotebookNode):
    """Writes the picture of each cell that has a tag of one."""
    for cell in notebook.cells:
        for name in pictures(cell):
            write_picture(DOCS / f"{name}.png", [output.get("data", {}) for output in cell.outputs])


def write_picture(file: Path, outputs: list[dict]):
    """Writes the picture of a cell's outputs, or a screenshot of the page that they show in a frame."""
    for output in outputs:
        if "image/png" in output:
            file.write_bytes(base64.b64decode(output["image/png"]))
        elif framed := re.search('srcdoc="(.*?)"', output.get("text/html", ""), re.DOTALL):
            with tempfile.NamedTemporaryFile("w", suffix=".html") as page:
                page.write(html.unescape(framed[1]))
                page.flush()
                flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
                flags += ["--window-size=1000,510", f"--screenshot={file}"]
                subprocess.run(["chromium", *flags, page.name], check=True, capture_output=True)


def main():
    """Writes the notebook, and what has changed of the losses, the outputs and the pictures."""
    old = nbformat.read(NOTEBOOK, 4)
    notebook = read_page()
    if sys.argv[1:] == ["--text"]:
        notebook.metadata = old.metadata  # with the hashes of the last run
    if old.metadata.get("hash_of_scripts") != notebook.metadata.hash_of_scripts:
        write_losses()
        notebook = read_page()
    if old.metadata.get("hash") != notebook.metadata.hash:
        old = nbformat.from_dict(notebook)
        old.cells = cells_to_run(old)
        execute(old)
        write_pictures(old)
    for new, cell in zip(cells_to_run(notebook), cells_to_run(old), strict=True):
        assert new.source == cell.source, f"without --text, because this cell has changed:\n{new.source}"
        new.update(outputs=cell.outputs, execution_count=cell.execution_count)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
