"""What the scripts share stands between markers and is the same bytes everywhere; a script is short enough to read.

`# --- shared: NAME` and `# --- end shared: NAME` may be indented. A script of your own beside the four (named
*_humanline.py) is held to the blocks that it has.
"""

import ast
import re
from collections import Counter

import pytest
from conftest import ROOT

SIBLINGS = [ROOT / f"{name}_humanline.py" for name in ("dpo", "kto", "grpo", "grpo_math")]
OTHERS = [path for path in sorted(ROOT.glob("*_humanline.py")) if path not in SIBLINGS]
BLOCK = re.compile(r"^ *# --- shared: ([^\n]+)\n(.*?)^ *# --- end shared: \1\n", re.M | re.S)
CEILINGS = {  # lines, characters
    "dpo_humanline.py": (700, 38_000),
    "kto_humanline.py": (750, 41_000),
    "grpo_humanline.py": (750, 41_000),
    "grpo_math_humanline.py": (700, 38_000),
    "utils.py": (800, 46_000),
}


def blocks(text: str) -> dict[str, str]:
    found = {name: body for name, body in BLOCK.findall(text)}
    opened, closed = (re.findall(rf"^ *# --- {word}: (.+)$", text, re.M) for word in ("shared", "end shared"))
    assert opened == closed == list(found), f"markers do not pair up: {opened} and {closed}"
    return found


def drift(texts: dict[str, str]) -> list[str]:
    """Block and file of everything that differs from the first file that has the block."""
    first, differing = {}, []
    for file, text in texts.items():
        for name, body in blocks(text).items():
            owner, expected = first.setdefault(name, (file, body))
            if body != expected:
                differing.append(f"block {name!r} of {file} differs from {owner}")
    return differing


def unguarded(text: str) -> Counter:
    """The lines outside of all blocks, white space at their ends aside."""
    return Counter(line.strip() for line in BLOCK.sub("", text).splitlines() if line.strip())


def in_all(texts: list[str]) -> list[str]:
    """Lines outside of blocks that all of these texts have."""
    first, *rest = map(unguarded, texts)
    for lines in rest:
        first &= lines
    return sorted(first.elements())


def test_shared_blocks_are_byte_identical():
    assert not drift({path.name: path.read_text() for path in SIBLINGS + OTHERS})


def test_every_block_has_a_sibling_and_most_of_the_loop_is_shared_by_all():
    names = [set(blocks(path.read_text())) for path in SIBLINGS]
    everywhere = {
        "imports",
        "flags",
        "humanline",
        "data",
        "models",
        "settings",
        "setup",
        "prepare",
        "forward",
        "step",
        "log",
    }
    assert everywhere <= set.intersection(*names)
    assert all(sum(block in name for name in names) >= 2 for block in set.union(*names))


def test_few_lines_are_the_same_in_all_scripts_and_outside_of_blocks():
    lines = in_all([path.read_text() for path in SIBLINGS])
    assert len(lines) < 40, lines


def test_drift_is_named_by_block_and_file_and_seen_in_unguarded_copies():
    text = SIBLINGS[0].read_text()
    for name, body in blocks(text).items():
        assert drift({"a.py": text, "b.py": text.replace(body, body + "# x\n")}) == [
            f"block {name!r} of b.py differs from a.py"
        ]
    with pytest.raises(AssertionError, match="pair up"):
        blocks(text.replace("# --- end shared: forward\n", "# ---\n"))
    copied = [path.read_text() + "copied = 1\n" * 40 for path in SIBLINGS]
    assert len(in_all(copied)) >= 40


@pytest.mark.parametrize("name", CEILINGS)
def test_a_file_is_short_enough_for_one_sitting(name):
    text = (ROOT / name).read_text()
    assert (text.count("\n") <= CEILINGS[name][0], len(text) <= CEILINGS[name][1]) == (True, True)
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert max(node.end_lineno - node.lineno + 1 for node in functions) <= 220


@pytest.mark.parametrize("path", SIBLINGS, ids=lambda path: path.name)
def test_the_two_lines_of_the_paper_are_two_lines(path):
    lines = re.findall(r"# humanline [cs]\w+", path.read_text())
    assert lines == ["# humanline clipping", "# humanline syncing"]
