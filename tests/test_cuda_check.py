"""benchmark/cuda_check.py on the machine of the tests: all is right, and what is made wrong is found."""

import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec

from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import cuda_check  # noqa: E402

SYNC = '        if args.humanline and args.sync == "before_step"'
WRONG = [  # file, text, what takes its place
    # Not in the few tokens that a script tries at its start.
    ("utils.py", "(selected, logps)", "(selected, logps * (1.001 if len(logps) > 64 else 1))"),
    ("dpo_humanline.py", "        optimizer.step()\n", ""),  # the update goes before the sync
    ("dpo_humanline.py", SYNC, f"        optimizer.step()\n{SYNC}"),
    ("kto_humanline.py", "    signals = run.Signals()", '    raise RuntimeError("broken")'),
]


def check(root, *rows) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code of the check in a copy of the repository, and {row: (verdict, figure)}.

    It has more time than by default, for other tests run beside it.
    """
    command = [sys.executable, str(root / "benchmark" / "cuda_check.py"), "--limit", "1400"]
    if rows:
        command += ["--only", *rows]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    line = r"^\| (.+?) \| (ok|WRONG|not here|not run) \| (.*) \| \d+ \|$"
    found = {name: (verdict, figure) for name, verdict, figure in re.findall(line, ended.stdout, re.M)}
    assert found, ended.stdout + ended.stderr
    return ended.returncode, found


def test_all_is_right_here():
    code, rows = check(ROOT)
    missing = {name for name, (verdict, _) in rows.items() if verdict == "not here"}
    assert code == 0 and all(verdict == "ok" for name, (verdict, _) in rows.items() if name not in missing), (
        rows
    )
    assert all(name.endswith("vllm") for name in missing) and len(missing) == (0 if find_spec("vllm") else 4)
    assert rows.keys() == cuda_check.all_rows().keys()


def test_what_is_wrong_is_found_and_the_rest_still_runs(tmp_path):
    ignored = shutil.ignore_patterns(".git", "runs", ".pytest_cache")
    root = shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)
    for file, old, new in WRONG:
        text = (root / file).read_text()
        assert text.count(old) == 1, file
        (root / file).write_text(text.replace(old, new))
    code, rows = check(root, "log-probs, float32", "sync, float32", "kto, float32", "grpo, float32")
    assert code == 1
    right = [name for name, (verdict, _) in rows.items() if verdict == "ok"]
    assert right == [f"grpo, float32, {cuda_check.RANKS} ranks in parts"], rows
    assert "broken" in rows[f"kto, float32, {cuda_check.RANKS} ranks in parts"][1]
    assert "not the policy of the last sync" in rows["sync, float32"][1]


def test_a_row_that_time_ends_is_not_run_and_not_wrong(tmp_path):
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    runs = cuda_check.Runs(tmp_path, cuda_check.all_runs(tmp_path), ends=time.monotonic() + 1)
    hangs = lambda runs: runs.launch(str(tmp_path / "hangs.py"), 1, tmp_path / "log")
    row, names = cuda_check.all_rows()["sync, float32"]
    late = [cuda_check.judge(runs, hangs, []), cuda_check.judge(runs, row, names)]
    assert all(verdict == "not run" for verdict, _ in late) and time.monotonic() < runs.ends + 10
    runs.ends = time.monotonic() + 100
    (tmp_path / "fails.py").write_text("raise ValueError('broken')")
    assert runs.launch(str(tmp_path / "fails.py"), 1, tmp_path / "log") == "ValueError: broken"
