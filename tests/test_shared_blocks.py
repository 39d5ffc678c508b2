"""Blocks between `# --- shared: NAME` and `# --- end shared: NAME` are the same bytes in every script that has them."""

import re

import pytest
from conftest import ROOT

SCRIPTS = sorted(ROOT.glob("*_humanline.py"))
BLOCK = re.compile(r"^# --- shared: ([^\n]+)\n(.*?)^# --- end shared: \1\n", re.M | re.S)


def blocks(text: str) -> dict[str, str]:
    found = {name: body for name, body in BLOCK.findall(text)}
    opened, closed = (re.findall(rf"^# --- {word}: (.+)$", text, re.M) for word in ("shared", "end shared"))
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


def test_shared_blocks_are_byte_identical():
    assert not drift({path.name: path.read_text() for path in SCRIPTS})


def test_every_block_has_siblings_and_the_loop_is_shared_by_all():
    names = [set(blocks(path.read_text())) for path in SCRIPTS]
    assert len(SCRIPTS) == 4
    assert {"fail", "load_rows", "rollout", "humanline", "setup", "files"} <= set.intersection(*names)
    assert all(sum(block in name for name in names) >= 2 for block in set.union(*names))


def test_drift_is_named_by_block_and_file():
    text = SCRIPTS[0].read_text()
    (name, body), *_ = blocks(text).items()
    changed = text.replace(body, body + "# x\n")
    assert drift({"a.py": text, "b.py": changed}) == [f"block {name!r} of b.py differs from a.py"]
    with pytest.raises(AssertionError, match="pair up"):
        blocks(text.replace(f"# --- end shared: {name}\n", ""))
