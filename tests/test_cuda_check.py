"""benchmark/cuda_check.py on the machine of the tests: all is right, and what is made wrong is found."""

import json
import math
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, run_ranks
from safetensors.torch import save_file
from test_cuda_branch import GROUPED

import utils

sys.path.insert(0, str(ROOT / "benchmark"))
import cuda_check  # noqa: E402
import cuda_rows  # noqa: E402

SCRIPTS = ("kto", "grpo", "dpo")


def check(root, *rows) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code of the check in a copy of the repository, and {row: (verdict, figure)} of its table.

    It has more time than by default, for other tests run beside it.
    """
    command = [sys.executable, str(root / "benchmark" / "cuda_check.py"), "--limit", "1400"]
    if rows:
        command += ["--only", *rows]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    line = r"^\| (.+?) \| (ok|WRONG|not here|not run) \| (.*) \| \d+ \|$"
    found = {name: (verdict, figure) for name, verdict, figure in re.findall(line, ended.stdout, re.M)}
    assert found, ended.stdout + ended.stderr
    assert all(len(line) <= 120 for line in ended.stdout.splitlines()), ended.stdout  # as docs/ have
    return ended.returncode, found


def test_all_is_right_here():
    code, rows = check(ROOT)
    missing = {}
    for name, (row, _) in cuda_check.all_rows().items():
        if isinstance(row, str):
            missing[name] = ("not here", row)
    assert rows.items() >= missing.items() and rows.keys() == cuda_check.all_rows().keys()
    assert code == 0 and all(rows[name][0] == "ok" for name in rows.keys() - missing.keys()), rows


def test_what_is_wrong_is_found_and_the_rest_still_runs(tmp_path):
    ignored = shutil.ignore_patterns(".git", "runs", ".pytest_cache")
    root = shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)
    for script, old, new in (
        ("kto", "    signals = run.Signals()", '    raise RuntimeError("broken")'),
        ("grpo", "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)"),
    ):
        file = root / f"{script}_humanline.py"
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
    code, rows = check(root, "kto, float32", "grpo, float32", "dpo, float32", "cuDNN")
    kto, grpo, dpo = (rows[f"{name}, float32, {cuda_check.RANKS} ranks in parts"] for name in SCRIPTS)
    assert code == 1 and dpo[0] == "ok" and rows["cuDNN's plans"] == ("not here", "a GPU")
    assert kto[0] == "WRONG" and "broken" in kto[1]
    assert grpo[0] == "WRONG" and "differ by" in grpo[1]


def test_a_row_that_time_ends_is_not_run_and_not_wrong(tmp_path):
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    runs = cuda_check.Runs(tmp_path, cuda_check.all_runs(tmp_path), ends=time.monotonic() + 1)
    hangs = lambda runs: runs.launch(str(tmp_path / "hangs.py"), 1, tmp_path / "log")
    row, names = cuda_check.all_rows()["resume, float32"]
    late = [cuda_check.judge(runs, hangs, []), cuda_check.judge(runs, row, names)]
    assert all(verdict == "not run" for verdict, _ in late) and time.monotonic() < runs.ends + 10
    runs.ends = time.monotonic() + 100
    (tmp_path / "fails.py").write_text("raise ValueError('broken')")
    assert runs.launch(str(tmp_path / "fails.py"), 1, tmp_path / "log") == "ValueError: broken"


@pytest.mark.parametrize("other, weight", [(1.0, 1.0), (1.0, 1.1), (1.001, 1.0)])
def test_rows_that_compare_runs(other, weight, tmp_path):
    """Of runs that differ in the third step's loss, or in a weight."""
    plan = dict.fromkeys(("a-float32", "b", "c"), ("all", "dpo", ""))
    runs = cuda_check.Runs(tmp_path, plan, ends=math.inf)
    for name, factor, number in (("a-float32", 1.0, 1.0), ("b", other, weight), ("c", other, weight)):
        steps = []
        for step in range(3):
            loss = factor if step == 2 else 1
            steps.append(dict(step=step, loss=loss, grad_norm=2) | {"humanline/log_ratio_abs_mean": 0})
        (tmp_path / f"{name}.result").write_text("\n".join(map(json.dumps, steps)))
        (tmp_path / name / "final").mkdir(parents=True)
        save_file({"w": torch.tensor([number])}, tmp_path / name / "final" / "model.safetensors")
    verdicts = [
        cuda_check.judge(runs, cuda_check.same, ["a-float32", "b"])[0],
        cuda_check.judge(runs, cuda_check.resume, ["a-float32", "b", "c"])[0],
    ]
    expected = {(1.0, 1.0): ["ok", "ok"], (1.0, 1.1): ["ok", "WRONG"], (1.001, 1.0): ["WRONG", "WRONG"]}
    assert verdicts == expected[other, weight]


# === What is made wrong in a part ===
@pytest.fixture
def alone():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


LOOP, PRODUCT, SETUP = utils.PACKED["loop"], utils.matmul_fp32, cuda_rows.DPO.setup


def off_by_a_tenth(*args, **options):
    output, _ = LOOP(*args, **options)
    return 1.1 * output, None


def other_product(a, b):
    return PRODUCT(a, b) * (1.05 if a.dtype == torch.bfloat16 else 1)


def setup_with_tf32(args):
    torch.set_float32_matmul_precision("high")
    return SETUP(args)


def times(*seconds):
    """In place of `run_passes`: a median each."""
    left = list(seconds)
    return lambda *args: (left.pop(0), [torch.ones(1), torch.ones(1)])


WRONG = {
    "attention": (utils.PACKED, "loop", off_by_a_tenth, "are off by"),
    "head": (utils, "matmul_fp32", other_product, "bf16 off fp32 by"),
    "precision": (cuda_rows.DPO, "setup", setup_with_tf32, "'products in': 'high'"),
    "sync": (cuda_rows.DPO, "sync_reference", lambda *models: None, "the reference is .* nats off"),
    "compiled": (cuda_rows.DPO, "decoder_blocks", lambda model: [], "0 graphs"),
    "plans": (cuda_rows, "run_passes", times(1.0, 2.0), "loop 2.000 s a pass, with cuDNN's attention 1.000"),
}


@pytest.mark.parametrize("row", WRONG)
def test_a_part_that_is_wrong_is_found(row, monkeypatch, alone):
    place, name, instead, told = WRONG[row]
    if place is utils.PACKED:
        monkeypatch.setitem(place, name, instead)
    else:
        monkeypatch.setattr(place, name, instead)
    try:
        with pytest.raises(ValueError, match=told):
            getattr(cuda_rows, row)()
    finally:
        torch.set_float32_matmul_precision("highest")


def test_parts_as_on_a_gpu():
    """Every row that needs one is run on the pretended GPU of cuda_worker.py; the figures are its."""
    names = ["precision", "sync", "plans", "head", "segments", "engine"]
    if GROUPED:
        names.append("attention")
    output = run_ranks(1, [names], "cuda_worker.py", "cuda_rows")
    figures = json.loads(output.splitlines()[-1])
    assert list(figures) == names
    assert figures["precision"].startswith(
        "products in highest, cuDNN's attention False, expandable segments T"
    )
    assert not GROUPED or figures["attention"].startswith("varlen is chosen; sdpa 1.000 s")
    assert figures["engine"].endswith("awake 8.0 GiB, asleep 0.5, again 0.5")
    assert figures["segments"].startswith("2.00 GiB reserved for 1.00")


@pytest.mark.slow
@pytest.mark.skipif(not GROUPED, reason="the kernel of torch 2.11 lacks grouped heads, so it is not used")
def test_blocks_with_the_kernel_for_all_sequences_compile_once_and_whole():
    """One graph a block: nothing breaks it, and no length is written into it."""
    output = run_ranks(1, [["compiled"]], "cuda_worker.py", "cuda_rows")
    assert "; 1 graphs, then 0 more; " in output.splitlines()[-1]
