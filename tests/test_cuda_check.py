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

SYNC = '        if sync == "before_step"'
WRONG = [  # file, text, what takes its place
    # Not in the few tokens that a script tries at its start.
    ("utils.py", "(selected, logps)", "(selected, logps * (1.001 if len(logps) > 64 else 1))"),
    ("dpo_humanline.py", "        optimizer.step()\n", ""),  # the update goes before the sync
    ("dpo_humanline.py", SYNC, f"        optimizer.step()\n{SYNC}"),
    ("kto_humanline.py", "    signals = Signals()", '    raise RuntimeError("broken")'),
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
    found = {}
    for name, verdict, figure in re.findall(line, ended.stdout, re.M):
        found[name] = (verdict, figure)
    assert found, ended.stdout + ended.stderr
    return ended.returncode, found


def test_all_is_right_here():
    code, rows = check(ROOT)
    verdicts = {verdict for verdict, _ in rows.values()}
    assert code == 0 and verdicts <= {"ok", "not here"}, rows
    missing = {name for name, (verdict, _) in rows.items() if verdict == "not here"}
    assert all(name.endswith(("vllm", "more ranks")) for name in missing)
    expected = 0
    if not find_spec("vllm"):
        expected += 4
    if "all scripts, float32, more ranks" in rows:
        expected += 2
    assert len(missing) == expected
    assert len(rows) == 28


def test_what_is_wrong_is_found_and_the_rest_still_runs(tmp_path):
    ignored = shutil.ignore_patterns(".git", "runs", ".pytest_cache")
    root = shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)
    for file, old, new in WRONG:
        text = (root / file).read_text()
        assert text.count(old) == 1, file
        (root / file).write_text(text.replace(old, new))
    names = ["log-probs, float32", "sync, float32", "kto, float32", "grpo, float32"]
    code, rows = check(root, *names)
    assert code == 1
    right = [name for name, (verdict, _) in rows.items() if verdict == "ok"]
    assert right == ["grpo, float32, microbatches"], rows
    assert "broken" in rows["kto, float32, microbatches"][1]
    assert "not the policy of the last sync" in rows["sync, float32"][1]


def test_a_row_for_which_no_time_is_left_is_not_run_and_not_wrong(tmp_path):
    plan = cuda_check.all_runs(tmp_path)
    runs = cuda_check.Runs(tmp_path, plan, limit=470, started=time.monotonic() - 470)
    row, names = cuda_check.all_rows()["sync, float32"]
    results = [
        cuda_check.judge(runs, "sync, float32", row, names),
        cuda_check.judge(runs, "speed", cuda_check.step_time, []),
        cuda_check.judge(runs, "memory", cuda_check.memory, []),
    ]
    for verdict, text in results:
        assert verdict == "not run"
        assert text.startswith("470 seconds are over; --limit, or --only '")


def test_a_process_that_time_ends_is_not_run_and_one_that_hangs_is_wrong(tmp_path):
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")

    def row(runs):
        problem = runs.launch(str(tmp_path / "hangs.py"), 1, tmp_path / "log")
        cuda_check.need(not problem, problem)

    late = cuda_check.Runs(tmp_path, {}, limit=100, started=time.monotonic() - 97)
    assert cuda_check.judge(late, "hangs", row, [])[0] == "not run"
    early = cuda_check.Runs(tmp_path, {}, limit=4)
    assert cuda_check.judge(early, "hangs", row, []) == ("WRONG", "no end after 2 s")
