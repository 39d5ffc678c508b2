"""Tests the pages: links lead somewhere, commands have flags that exist, and numbers follow from the csvs.

Sentences and headings are free. A number is a link with a name (lab/numbers.py), or a cell in a column of a
study's table.
"""

import ast
import re
import shlex
import subprocess
import tomllib
from functools import cache
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from helpers import ROOT, commands_of, parse_command

from lab import compare, numbers


def tracked(*patterns: str) -> list[str]:
    """Returns the files of the repository that match, new ones included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


PAGES = tracked("*.md")
STUDIES = [page for page in PAGES if re.fullmatch(r"lab/\w+/README\.md", page)]


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def prose(page: str) -> str:
    """Returns the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)


# === Links ===
def anchors(page: str) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(target: str, page: Path) -> bool:
    """Returns whether a link leads to no file, or to no heading of it or, in a csv, to no line."""
    name, _, anchor = target.partition("#")
    file = (ROOT / page.parent / name).resolve() if name else ROOT / page
    if not file.exists():
        return True
    if file.suffix == ".csv":
        return anchor not in {"", *(f"L{number}" for number, _ in enumerate(file.open(), 1))}
    return bool(anchor) and file.suffix == ".md" and anchor not in anchors(str(file.relative_to(ROOT)))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)|^\[[^\]^]+\]: (\S+)", prose(page), re.MULTILINE)
    targets = [inline or listed for inline, listed in links]
    assert [target for target in targets if "://" not in target and broken(target, Path(page))] == []


def test_every_page_that_code_names_exists():
    lost = []
    for name in tracked("*.py", "*.sh", "*.toml"):
        named = re.findall(r"\b(?:docs|lab)/\w+(?:/README)?\.md(?:#[\w-]+)?", read(name))
        named = [target for target in named if "NAME" not in target]
        lost += [(name, target) for target in named if broken(target, Path("README.md"))]
    assert lost == []


@cache
def names_of(file: str) -> set[str]:
    """Returns the functions, classes, methods (as Class.method) and constants that a file defines."""
    names = set()
    for node in ast.parse(read(file)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_the_guide_to_changes_names_functions_that_exist():
    known = {name for file in tracked("*.py") if "/" not in file for name in names_of(file)}
    known |= {name for file in tracked("support/*.py") for name in names_of(file)}
    _, _, section = read("CONTRIBUTING.md").partition("\n## Where a change goes\n")
    rows = [
        line.strip("| ").split(" | ") for line in section.partition("\n## ")[0].splitlines() if "|" in line
    ]
    named = {name for row in rows[2:] for name in re.findall(r"`([\w.]+)`", row[1])}
    assert named and named - known == set()


# === Commands ===
COMMANDS = [found for page in PAGES for found in commands_of(page)]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_script_takes_the_flags_of_a_command(page, words, tmp_path, monkeypatch, capsys):
    try:
        parse_command(words, tmp_path, monkeypatch)
    except SystemExit:
        pytest.fail(f"{page}: {shlex.join(words)}\n{''.join(capsys.readouterr())}")


def test_every_page_of_a_script_has_commands():
    pages = {f"docs/{script}.md" for script in ("dpo", "kto", "grpo", "grpo_math")}
    assert pages | {"README.md", "paper/README.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.parametrize("file", [path.relative_to(ROOT).as_posix() for path in ROOT.glob("lab/*/*.csv")])
def test_every_row_names_a_command_and_the_commit_at_which_it_repeats(file):
    rows = pd.read_csv(ROOT / file)
    assert "command" not in rows or rows[["command", "commit"]].notna().all(None)


# === Numbers ===
# Without a link these pages have only settings and, for each page, the paper's numbers and a few others.
RESULTS = ("README.md", "docs/results.md", "docs/replication.md", "docs/first_run.md", "docs/curves.md")
SETTINGS = r"[βε],?(?: of)? \(?\d*\.\d+(?:,? (?:and|or|not) \d*\.\d+)?|§[\d.]+|±\d*\.\d+|p <\s0\.05|95%"
SETTINGS += r"|Python 3\.\d+|\d\.\d+B\b|0\.1 (?:to 135 )?million"
NOT_RESULTS = {
    "docs/results.md": "0.1 0.0025",  # β of GRPO and KTO
    "docs/replication.md": "+9.72 +4.79 +6.75 +0.19 −0.26 −0.14 +0.34 +1.05 0.593 0.1 4.1",
    "docs/first_run.md": "0.1 0.2 0.5 1.000",
    "docs/curves.md": "0.525 0.50 0.55 0.01 0.1",  # losses of equal models, and limits
}


def plain(text: str) -> str:
    """Returns a page's text without code, targets of links and emphasis."""
    targets = r"\]\([^()]*(?:\([^()]*\)[^()]*)*\)|^\[[^]\n]+\]: [^\n]*$"
    return re.sub(rf"^```.*?^```|`[^`\n]*`|{targets}|[*\\]", "", text, flags=re.MULTILINE | re.DOTALL)


def unlinked(page: str, text: str) -> list[str]:
    """Returns the decimals and percentages of a text that are no link, no setting and not the paper's."""
    text = plain(numbers.LINKED.sub("", text))
    found = re.findall(r"(?<![\w.])[−+]?(?:\d*\.\d+|\d+%)", re.sub(SETTINGS, "", text))
    return [number for number in found if number not in NOT_RESULTS.get(page, "").split()]


@pytest.mark.parametrize("page", PAGES)
def test_a_linked_number_and_its_interval_are_those_of_its_name(page):
    wrong = numbers.wrong_numbers(read(page))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", RESULTS)
def test_every_number_is_linked_that_is_no_setting_and_not_the_papers(page):
    assert unlinked(page, read(page)) == [], "link it as lab/numbers.py says, or extend NOT_RESULTS"


@pytest.mark.parametrize("page", PAGES)
def test_a_linked_number_leads_to_the_line_of_its_name(page):
    assert numbers.with_lines(ROOT / page) == read(page), "python -m lab.numbers"


def test_the_numbers_are_recomputed_from_the_runs():
    found, committed = numbers.table_of_numbers(), pd.read_csv(numbers.CSV)
    assert found.name.tolist() == committed.name.tolist(), "python -m lab.numbers"
    pd.testing.assert_frame_equal(found, committed, rtol=1e-6, check_dtype=False)


def test_a_wrong_digit_is_named():
    name = "rate: game, lr 3e-4: humanline − no clip"
    text = f'[−0.103](lab/numbers.csv#L1 "{name}") [−0.116, −0.091], **[−0.10](numbers.csv "{name}")**'
    assert numbers.wrong_numbers(text) == [] and unlinked("README.md", text + " at ε 0.2") == []
    (wrong,) = numbers.wrong_numbers(text.replace("0.116", "0.117"))
    assert "−0.117 is not of -0.1035 [-0.1158, -0.09111]" in wrong and name in wrong
    for right, other in (("0.103", "0.013"), ("[−0.10]", "[0.10]"), ("−0.091", "0.091")):
        assert len(numbers.wrong_numbers(text.replace(right, other))) == 1
    assert unlinked("README.md", text + " and 0.103, 4%") == ["0.103", "4%"]
    with pytest.raises(KeyError, match="the arms of rate, game, lr 3e-4 are"):
        numbers.look_up("rate: game, lr 3e-4: humanline − no clipping")


# === Numbers of the studies' pages ===
def test_the_line_that_readme_prints_is_that_of_its_csv():
    """The command is that of README, whose default seed is 1."""
    printed = re.search(r"^eval/reward (.*) n = (\d+)$", read("README.md"), re.MULTILINE)
    row = pd.read_csv(ROOT / "lab/real_run/first_run.csv").iloc[0]
    columns = ("before", "before_error", "after", "after_error", "change", "change_error")
    assert row.metric == "eval/reward" and row.seed == 1
    assert printed[1].replace("±", " ").split() == [f"{row[name]:.3f}" for name in columns], "first_run.csv"
    assert printed[2] == f"{row.n}"


def tables_of(page: str) -> list[tuple[list[str], list[list[str]]]]:
    """Returns (head, rows) of all tables of a page."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", prose(page), re.MULTILINE):
        head, _, *rows = [line.strip().strip("|").split("|") for line in block.splitlines()]
        found.append(([cell.strip() for cell in head], [[cell.strip() for cell in row] for row in rows]))
    return found


def cells_of_columns(page: str) -> list[tuple[str, ...]]:
    """Returns (row, column, number, ±) of the cells below a `column`. The row names "ARM" or "GROUP: ARM"."""
    found = []
    for head, lines in tables_of(page):
        columns = {i: cell.strip("`") for i, cell in enumerate(head) if cell.startswith("`")}
        for line, (i, column) in product(lines, columns.items()):
            if shown := re.match(r"[*+]*([−\d.,e-]+)(?: ± ([\d.]+))?", line[i]):
                found.append((line[0], column, shown[1].replace(",", ""), shown[2]))
    return found


def wrong_cells(page: str, study: str) -> list[str]:
    """Returns the cells below a `column` of the csv that are not the mean of the arm that the row names."""
    wrong = []
    for name, column, shown, half in cells_of_columns(page):
        rows = compare.read(study)
        group, _, arm = name.rpartition(": ")
        chosen = rows[rows.group == group] if group else rows
        if arm == "before training":
            of_groups = [compare.before_training(study, group, column) for group in chosen.group.unique()]
            value = of_groups[0]
        elif arm in set(chosen.arm) and column in chosen:
            runs = chosen[chosen.arm == arm]
            value = runs.groupby("panel")[column].mean().mean()
            if half:
                measured = compare.half_interval(compare.scores(study, runs.group.iloc[0], column)[arm])
        else:
            wrong.append(f"{page}: no arm {name}, or no column {column}, in {study}.csv")
            continue
        if not numbers.rounds_to(value, shown) or (half and not numbers.rounds_to(measured, half)):
            wrong.append(
                f"{page}: {name}, {column} is {value:.4g} in {study}.csv, not {shown}, or its ± not {half}"
            )
    return wrong


@pytest.mark.parametrize("page", STUDIES)
def test_the_tables_of_a_study_have_the_means_of_its_arms(page):
    assert wrong_cells(page, Path(page).parent.name) == []


# === Requirements ===
@pytest.mark.parametrize("name", ["requirements-vllm.txt", "requirements-vllm-cpu.txt"])
def test_vllms_requirements_differ_in_what_vllm_wants_alone(name):
    """vLLM 0.32 wants one torch, and a transformers that requirements.txt does not allow."""
    lines = [(ROOT / file).read_text().splitlines() for file in (name, "requirements.txt")]
    packages, ours = [[line for line in text if not line.startswith("#")] for text in lines]
    other = [line for line in packages if line not in ours]
    assert [line.split(">")[0].split("=")[0] for line in other] == ["torch", "transformers", name[13:-4]]


def test_the_version_is_the_same_in_all_files():
    (cited,) = re.findall(r"^version: (.*)$", read("CITATION.cff"), re.MULTILINE)
    declared = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert re.findall(r"^## (\d\S+)", read("CHANGELOG.md"), re.MULTILINE)[0] == cited == declared
