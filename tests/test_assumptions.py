"""Tests paper/assumptions.py: what it counts, and the commands of its runs."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, metrics
from worker import run_here

import dpo_humanline
from paper import assumptions, trials, variants

BOUNDS = SimpleNamespace(log_epsilon_P=-1.5, log_epsilon_R=1.5, humanline=True)


def test_the_columns_are_shares_and_a_quantile_of_the_tokens_log_ratios(monkeypatch):
    rng = np.random.default_rng(0)
    values = torch.as_tensor(rng.standard_t(3, size=(400, 50)))
    values[0, 0], values[0, 1] = 99.0, -99.0  # beyond the last bins
    mask = torch.ones(400, 50)
    mask[:, 40:] = 0
    monkeypatch.setattr(variants, "COUNTS", np.zeros_like(variants.COUNTS))
    monkeypatch.setattr(variants.LAST, "mask", mask[:200])
    clipped = variants.record_log_ratios(BOUNDS, values[:200])
    assert torch.equal(clipped, values[:200].clamp(-1.5, 1.5))
    variants.LAST.mask = mask[200:]
    with pytest.raises(IndexError):
        variants.record_log_ratios(BOUNDS, values[:200, :40])  # a mask of another micro-batch
    variants.record_log_ratios(BOUNDS, values[200:])

    sizes = values[:, :40].abs().flatten().numpy()
    row = assumptions.columns(variants.COUNTS)
    assert row["tokens"] == 16_000
    assert row["beyond"] == np.mean(sizes > 1.5)  # 1.5 is an edge of the bins
    assert row["beyond_log_10"] == pytest.approx(np.mean(sizes > np.log(10)), abs=0.002)
    assert row["quantile_999"] == pytest.approx(np.quantile(sizes, 0.999), abs=0.06)


def test_the_runs_differ_in_k_alone_and_train_with_humanline():
    for arm, lr in assumptions.RUNS.values():
        line = trials.command(arm, lr, 1, "--k 4").rpartition("&& ")[2]
        assert line.startswith(f"python paper/variants.py {arm.variant} {arm.script}_humanline ")
        assert line.endswith(" --k 4") and line.count("--k ") == 1
        assert "--no-humanline" not in line and f"--lr {lr:g} --seed 1" in line
        assert "clip_log_ratio" in variants.VARIANTS[arm.variant]


def test_the_picture_has_a_point_for_every_run_and_k():
    rows = []
    for name in assumptions.NAMES:
        for k in assumptions.KS:
            rows.append({"run": name, "k": k, "beyond": k / 1e5, "quantile_999": k / 10})
    left, right = assumptions.draw(rows).axes
    for ax, key in ((left, "beyond"), (right, "quantile_999")):
        lines = [line for line in ax.get_lines() if line.get_marker() == "o"]
        assert [line.get_label() for line in lines] == assumptions.NAMES
        for line in lines:
            of_run = [row for row in rows if row["run"] == line.get_label()]
            assert list(line.get_ydata()) == [row[key] for row in of_run]
    assumptions.plt.close("all")


def test_a_recorded_run_is_the_scripts_run_and_counts_every_token_once(tmp_path):
    flags = ["--engine", "hf", "--num-steps", "3", "--batch-size", "4", "--lr", "1e-2", "--k", "1"]
    flags += [
        "--warmup-fraction",
        "0",
        "--checkpoint-every",
        "0",
        "--eval-dataset",
        "",
        "--max-grad-norm",
        "1e9",
    ]
    command = [sys.executable, ROOT / "paper/variants.py", "log-ratios", "dpo_humanline", *flags]
    subprocess.run([*command, "--output-dir", tmp_path / "recorded"], check=True, capture_output=True)
    plain = metrics(run_here(dpo_humanline, *flags, "--output-dir", tmp_path / "plain"), True)
    recorded = metrics(tmp_path / "recorded", True)
    assert recorded == plain
    counts = np.array(json.loads((tmp_path / "recorded" / "log_ratios.json").read_text()))
    shares = [step["humanline/clipped_low"] + step["humanline/clipped_high"] for step in plain]
    row = assumptions.columns(counts)
    assert row["tokens"] < 3 * 8 * 64 and min(shares) < row["beyond"] < max(shares)
