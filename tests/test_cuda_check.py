"""Tests benchmark/cuda_check.py: on the machine of the tests everything is right, and faults are found."""

import json
import math
import re
import shutil
import subprocess
import sys
import time

import cuda_check
import cuda_rows
import pytest
import torch
import torch.distributed as dist
import varlen_kernel
from conftest import ROOT, run_ranks
from safetensors.torch import save_file

import utils
from support import run


def check(root, *rows) -> tuple[int, dict[str, tuple[str, str]]]:
    """Runs the check in a copy of the repository. Returns its exit status and {row: (verdict, figure)}.

    The check has more time than by default, because other tests run beside it.
    """
    command = [sys.executable, str(root / "benchmark" / "cuda_check.py"), "--limit", "1400"]
    command += ["--only", *(rows or [""])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    line = r"^\| (.+?) \| (ok|WRONG|not here|not run) \| (.*) \| \d+ \|$"
    found = {name: (verdict, figure) for name, verdict, figure in re.findall(line, ended.stdout, re.M)}
    assert found, ended.stdout + ended.stderr
    assert all(len(line) <= 120 for line in ended.stdout.splitlines()), ended.stdout  # as in docs/
    return ended.returncode, found


def test_all_is_right_here():
    code, rows = check(ROOT)
    assert code == 0 and rows.keys() == cuda_check.all_rows().keys()
    for name, (row, _) in cuda_check.all_rows().items():
        if isinstance(row, str):
            assert rows[name] == ("not here", row)
        else:
            assert rows[name][0] == "ok", rows


def test_what_is_wrong_is_found_and_the_rest_still_runs(tmp_path):
    ignored = shutil.ignore_patterns(".git", "runs", ".pytest_cache")
    root = shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)
    file = root / "grpo_humanline.py"
    factor = "set_gradient_divide_factor({}.0)"
    assert file.read_text().count(factor.format(1)) == 1
    file.write_text(file.read_text().replace(factor.format(1), factor.format(2)))
    code, rows = check(root, "grpo, float32", "dpo, float32", "cuDNN")
    grpo, dpo = (rows[f"{name}, float32, {cuda_check.RANKS} ranks in parts"] for name in ("grpo", "dpo"))
    assert code == 1 and dpo[0] == "ok" and rows["cuDNN's plans"] == ("not here", "a GPU")
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


def test_packages_that_are_found_through_the_users_path_stay_found(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "from_the_user.py").write_text("")
    (tmp_path / "imports.py").write_text("import from_the_user, utils")
    runs = cuda_check.Runs(tmp_path, {}, ends=time.monotonic() + 200)
    command = str(tmp_path / "imports.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    assert runs.launch(command, 1, tmp_path / "log") == ""
    monkeypatch.delenv("PYTHONPATH")
    assert "No module named 'from_the_user'" in runs.launch(command, 1, tmp_path / "log")


@pytest.mark.parametrize("other, weight", [(1.0, 1.0), (1.0, 1.1), (1.001, 1.0)])
def test_rows_that_compare_runs(other, weight, tmp_path):
    """The runs differ in the loss of the second step, or in a weight."""
    plan = dict.fromkeys(("a-float32", "b", "c"), ("all", "dpo", ""))
    runs = cuda_check.Runs(tmp_path, plan, ends=math.inf)
    for name, factor, number in (("a-float32", 1.0, 1.0), ("b", other, weight), ("c", other, weight)):
        same = {"grad_norm": 2, "humanline/log_ratio_abs_mean": 0}
        steps = [{"step": 0, "loss": 1} | same, {"step": 1, "loss": factor} | same]
        (tmp_path / f"{name}.result").write_text("\n".join(map(json.dumps, steps)))
        (tmp_path / name / "final").mkdir(parents=True)
        save_file({"w": torch.tensor([number])}, tmp_path / name / "final" / "model.safetensors")
    compared, _ = cuda_check.judge(runs, cuda_check.same, ["a-float32", "b"])
    resumed, _ = cuda_check.judge(runs, cuda_check.resume, ["a-float32", "b", "c"])
    assert compared == ("ok" if other == 1 else "WRONG")
    assert resumed == ("ok" if other == weight == 1 else "WRONG")


# === Faults in a part ===
LOOP, PRODUCT, SETUP = utils.ATTENTION["loop"], utils.matmul_fp32, run.setup
BUILD = cuda_rows.build


def off_by_a_tenth(*args, **options):
    output, _ = LOOP(*args, **options)
    return 1.1 * output, None


def other_product(a, b):
    return PRODUCT(a, b) * (1.05 if a.dtype == torch.bfloat16 else 1)


def setup_with_tf32(*arguments):
    torch.set_float32_matmul_precision("high")
    return SETUP(*arguments)


SECONDS = iter((1.0, 2.0))
NOTHING = [torch.zeros(1)]
WRONG = {
    "attention": (utils, "ATTENTION", utils.ATTENTION | {"loop": off_by_a_tenth}, "are off by"),
    "head": (utils, "matmul_fp32", other_product, "bf16 off fp32 by"),
    "precision": (run, "setup", setup_with_tf32, "'products in': 'high'"),
    "sync": (cuda_rows.DPO, "sync_reference", lambda *models: None, "the reference is .* nats off"),
    "launches": (cuda_rows, "run_pass", lambda *args: NOTHING, "has seen none"),
    "compiled": (cuda_rows.DPO, "decoder_blocks", lambda model: [], "0 graphs"),
    "plans": (cuda_rows, "run_passes", lambda *args: (next(SECONDS), None), "loop 2.0.* attention 1.0"),
}


@pytest.mark.parametrize("row", WRONG)
def test_a_part_that_is_wrong_is_found(row, monkeypatch):
    place, name, instead, told = WRONG[row]
    monkeypatch.setattr(place, name, instead)
    try:
        with pytest.raises(ValueError, match=told):
            getattr(cuda_rows, row)()
    finally:
        torch.set_float32_matmul_precision("highest")
        if dist.is_initialized():
            dist.destroy_process_group()


def test_parts_as_on_a_gpu():
    """Rows that need a GPU run on the pretended GPU of cuda_worker.py, which gives the figures."""
    names = ["precision", "sync", "plans", "head", "segments", "attention"]
    output = run_ranks(1, [names], "cuda_worker.py", "cuda_rows")
    figures = json.loads(output.splitlines()[-1])
    assert list(figures) == names
    assert "highest, cuDNN's attention False, expandable segments T" in figures["precision"]
    assert figures["attention"].startswith("varlen is chosen; sdpa 1.000 s")
    assert figures["segments"].startswith("2.00 GiB reserved for 1.00")


@pytest.mark.slow
def test_blocks_with_the_kernel_for_all_sequences_compile_once_and_whole(monkeypatch):
    """Each block is one graph, without breaks and without a fixed length."""

    def build(dtype):
        model = BUILD(dtype)
        model.set_attn_implementation("varlen")
        return model

    varlen_kernel.register()
    monkeypatch.setattr(cuda_rows, "build", build)
    torch._dynamo.reset()
    assert "; 1 graphs, then 0 more; " in cuda_rows.compiled()
