"""benchmark/cuda_check.py on the machine of the tests: all is right, and what is made wrong is found."""

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec

from conftest import ROOT

SYNC = '        if sync == "before_step"'
WRONG = [  # file, text, what takes its place
    ("utils.py", "masked_scatter(selected, flat)", "masked_scatter(selected, 1.001 * flat)"),
    ("dpo_humanline.py", "        optimizer.step()\n", ""),  # the update goes before the sync
    ("dpo_humanline.py", SYNC, f"        optimizer.step()\n{SYNC}"),
    ("kto_humanline.py", "    run = catch_signals()", '    raise RuntimeError("broken")'),
]


def check(root, *rows) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code of the check in a copy of the repository, and {row: (verdict, figure)}."""
    command = [sys.executable, str(root / "benchmark" / "cuda_check.py"), *(["--only", *rows] if rows else [])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=560)
    lines = re.findall(r"^\| (.+?) \| (ok|WRONG|not here) \| (.*) \| \d+ \|$", ended.stdout, re.M)
    assert lines, ended.stdout + ended.stderr
    return ended.returncode, {name: (verdict, figure) for name, verdict, figure in lines}


def test_all_is_right_here():
    code, rows = check(ROOT)
    missing = {name for name, (verdict, _) in rows.items() if verdict == "not here"}
    assert code == 0 and {verdict for verdict, _ in rows.values()} <= {"ok", "not here"}, rows
    assert all(name.endswith(("vllm", "more ranks")) for name in missing)
    assert len(missing) == (0 if find_spec("vllm") else 4) + 2 * ("all scripts, float32, more ranks" in rows)
    assert len(rows) == 28


def test_what_is_wrong_is_found_and_the_rest_still_runs(tmp_path):
    root = shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".git", "runs", ".pytest_cache"))
    for file, old, new in WRONG:
        text = (root / file).read_text()
        assert text.count(old) == 1, file
        (root / file).write_text(text.replace(old, new))
    code, rows = check(root, "log-probs, float32", "sync, float32", "kto, float32", "grpo, float32")
    assert code == 1 and [name for name in rows if rows[name][0] == "ok"] == ["grpo, float32, microbatches"], rows
    assert "broken" in rows["kto, float32, microbatches"][1]
    assert "not the policy of the last sync" in rows["sync, float32"][1]
