"""Tests the pages: links lead somewhere, commands have flags that exist, and numbers follow from the csvs.

Sentences and headings are free. lab/claims.py says how numbers are checked, and is the only file to change
when a new number appears.
"""

import ast
import re
import shlex
import subprocess
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import ROOT, commands_of, parse_command

from lab import claims, compare


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
    links = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]^]+\]: (\S+)", prose(page), re.MULTILINE)
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
    named = {name for row in rows[2:] for name in re.findall(r"`([\w.]+)`", row[2])}
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
def number(word: str) -> float:
    return float(word.replace("−", "-"))


def fits(words: tuple[str, ...], known: np.ndarray) -> bool:
    """Returns whether a row of known numbers rounds to the words. known: (N,) or (N, words)."""
    places = np.array([len(word.partition(".")[2]) for word in words])
    off = np.abs(known.reshape(-1, len(words)) - [number(word) for word in words])
    return bool((off <= 0.5000001 * 10.0**-places).all(1).any())


@cache
def all_halves() -> np.ndarray:
    studies = (*claims.STUDIES, *claims.MINIATURES)
    found = [line for study in studies for line in claims.halves(study)]
    return np.array(found + claims.special_halves())


def wrong_intervals(text: str) -> list[str]:
    """Returns the intervals and means with half intervals of a text that no study has."""
    text = claims.plain(text)
    wrong = []
    for pattern, known in ((claims.INTERVAL, claims.intervals()), (claims.HALF, all_halves())):
        for match in re.finditer(pattern, text):
            if not fits(match.groups(), known):
                wrong.append(match[0])
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_interval_is_the_difference_of_two_arms_or_the_half_interval_of_an_arm(page):
    outputs = r"^eval/\S+ .*$"  # what a run prints has standard errors
    text = re.sub(outputs, "", read(page), flags=re.MULTILINE)
    text = re.sub(r"<!-- python -m lab.board --table -->.*<!-- end -->", "", text, flags=re.DOTALL)
    assert wrong_intervals(text) == []  # test_board.py makes the board's table again


def wrong_links(text: str) -> list[str]:
    """Returns the intervals that differ from the line of the csv to which their first number links."""
    linked = r"\[\**([−+]?[\d.]+)\**\]\((?:\.\./)*(lab/\S+\.csv)#L(\d+)\)"
    link = rf"{linked}\S* \[({claims.NUMBER}), ({claims.NUMBER})\]"
    wrong = []
    for match in re.finditer(link, text):
        line = pd.read_csv(ROOT / match[2]).iloc[int(match[3]) - 2]
        words = (match[1].replace("+", ""), match[4], match[5])
        if not fits(words, line[["difference", "low", "high"]].to_numpy(float)):
            wrong.append(match[0])
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_a_number_that_links_to_a_line_of_a_csv_is_of_this_line(page):
    assert wrong_links(read(page)) == []


def test_the_table_of_differences_is_recomputed_from_the_runs():
    committed = pd.read_csv(compare.LAB / "differences.csv")
    pd.testing.assert_frame_equal(compare.table_of_differences(), committed, rtol=1e-9)


def count(word: str, text: str) -> int:
    """Returns how often a text has a number with this sign. A share, 0.65, may be written 65%."""
    spellings = [word]
    if re.fullmatch(r"0\.\d\d", word):
        spellings.append(f"{int(word[2:])}%")
    return sum(len(re.findall(rf"(?<![\w.−]){re.escape(one)}(?!\d|\.\d|e-|%)", text)) for one in spellings)


def without_intervals(page: str) -> str:
    """Returns the text of a page in which claims are looked for."""
    return re.sub(f"{claims.INTERVAL}|{claims.HALF}", "", claims.plain(read(page)))


def unmet(text_of: dict[str, str]) -> list[str]:
    """Returns a line for each claim that no page has, or that a page has less often than it is claimed."""
    wrong = []
    needed = {}  # {page: numbers}
    for claim in claims.CLAIMS:
        page, source, words = claim.page, claim.source, claim.words()
        needed.setdefault(page, Counter()).update(words)
        missing = [word for word in words if not count(word, text_of[page])]
        if missing:
            wrong.append(f"{page}: {source} has {', '.join(missing)} (lab/claims.py)")
    for page, numbers in needed.items():
        for word, times in numbers.items():
            if count(word, text_of[page]) < times:
                wrong.append(f"{page}: {word} follows {times} times from the csvs (lab/claims.py)")
    return wrong


def test_every_claim_of_the_ledger_is_on_its_page():
    wrong = unmet({page: without_intervals(page) for page in PAGES})
    assert not wrong, "\n".join(wrong)


def test_a_wrong_digit_is_named_with_page_and_csv():
    text_of = {page: without_intervals(page) for page in PAGES}
    (wrong, _) = claims.ends_of_the_default_run()
    text = text_of["docs/dpo.md"].replace(wrong, "0.999")
    said = "\n".join(unmet(text_of | {"docs/dpo.md": text}))
    assert f"docs/dpo.md: learning.csv has {wrong}" in said
    assert wrong_intervals("0.254 [0.244, 0.264] and 0.254 [0.244, 0.275]") == ["0.254 [0.244, 0.275]"]


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


def cells_of_columns(page: str) -> list[tuple[str, str, str]]:
    """Returns (arm, column, number) of the cells below a `column` of the csv. arm: "ARM" or "GROUP: ARM"."""
    found = []
    for head, lines in tables_of(page):
        columns = {i: cell.strip("`") for i, cell in enumerate(head) if cell.startswith("`")}
        for line, (i, column) in product(lines, columns.items()):
            if shown := re.match(r"[*+]*([−\d.,e-]+)", line[i]):
                found.append((line[0], column, shown[1].replace(",", "")))
    return found


def wrong_cells(page: str, study: str) -> list[str]:
    """Returns the cells below a `column` of the csv that are not the mean of the arm that the row names."""
    rows = compare.read(study)
    wrong = []
    for name, column, shown in cells_of_columns(page):
        group, _, arm = name.rpartition(": ")
        chosen = rows[rows.group == group] if group else rows
        source = f"{study}.csv"
        if arm == "before training":
            source = "lab/untrained.csv"
            of_arm = [compare.before_training(study, group, column) for group in chosen.group.unique()]
            known = np.array(of_arm)
        elif arm in set(chosen.arm) and column in chosen:
            known = np.array([chosen[chosen.arm == arm].groupby("panel")[column].mean().mean()])
        else:
            wrong.append(f"{page}: no arm {name}, or no column {column}, in {source}")
            continue
        if not (claims.powers(*known) == [shown] if "e" in shown else fits((shown,), known)):
            wrong.append(f"{page}: {name}, {column} is {known[0]:.4g} in {source}, not {shown}")
    return wrong


@pytest.mark.parametrize("page", STUDIES)
def test_the_tables_of_a_study_have_the_means_of_its_arms(page):
    study = Path(page).parent.name
    if study in claims.STUDIES:
        assert wrong_cells(page, study) == []


# === Requirements ===
@pytest.mark.parametrize("name", ["requirements-vllm.txt", "requirements-vllm-cpu.txt"])
def test_vllms_requirements_differ_in_what_vllm_wants_alone(name):
    """vLLM 0.32 wants one torch, and a transformers that requirements.txt does not allow."""
    lines = [(ROOT / file).read_text().splitlines() for file in (name, "requirements.txt")]
    packages, ours = [[line for line in text if not line.startswith("#")] for text in lines]
    other = [line for line in packages if line not in ours]
    assert [line.split(">")[0].split("=")[0] for line in other] == ["torch", "transformers", name[13:-4]]
