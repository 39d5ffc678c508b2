"""Tests tools/: estimates of memory, faults that the check of a GPU finds, and curves."""

import json
import re

import pytest
import torch
import torch.distributed as dist
from helpers import PAIRS, ROOT, metrics, run_ranks
from transformers import AutoModelForCausalLM

import utils
from support import run
from tools import cuda_check, curves, memory, scripts

PARAMETERS = {  # published
    "llama-3-8b": 8_030_261_248,
    "qwen2.5-1.5b": 1_543_714_304,
    "gemma-2-27b": 27_227_128_320,
}
GIB = 2**30


# === memory ===
@pytest.mark.parametrize("preset", PARAMETERS)
def test_presets_have_the_published_parameters(preset):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(scripts.read_config(preset))
    assert model.num_parameters() == PARAMETERS[preset]


@pytest.mark.parametrize("preset", PARAMETERS)
def test_the_page_has_the_calculated_peaks(preset, capsys):
    page = (ROOT / "docs" / "performance.md").read_text()
    rows = re.findall(rf"^\| {preset}, .*?(\d) GPUs \| ([\d,]+) .*\| ([\d.]+) \|$", page, re.M | re.I)
    assert rows
    for gpus, tokens, peak in rows:
        settings = dict(gpus=int(gpus), micro_batch_tokens=int(tokens.replace(",", "")))
        memory.main(preset, gradient_checkpointing=True, **settings)
        said = capsys.readouterr().out
        assert re.search(r"peak +(\S+)", said)[1] == peak and " fits on " in said


def test_an_engine_has_its_weights_and_its_cache(capsys):
    memory.main("llama-3-8b", gpus=4, engine="hf", sampled_tokens=1000)
    training, sampling = capsys.readouterr().out.split("sampling")
    weights = 2 * PARAMETERS["llama-3-8b"]
    keys_and_values = 2 * 32 * 8 * 128 * 1000  # layers, heads, their size, tokens
    assert f"engine            {weights / GIB:8.2f}" in training
    assert f"engine            {(weights + 2 * keys_and_values) / GIB:8.2f}" in sampling
    memory.main("llama-3-8b", gpus=4, gb=24, engine="vllm", vllm_memory=0.9)
    training, sampling = capsys.readouterr().out.split("sampling")
    assert "engine" not in training and f"engine            {0.9 * 24:8.2f}" in sampling
    assert "does not fit on 4 x 24 GB" in sampling


# === cuda_check ===
LOOP, PRODUCT, SETUP = utils.ATTENTION["loop"], utils.matmul_fp32, run.setup


def off_by_a_tenth(*args, **options):
    output, _ = LOOP(*args, **options)
    return 1.1 * output, None


def other_product(a, b):
    return PRODUCT(a, b) * (1.05 if a.dtype == torch.bfloat16 else 1)


def setup_with_tf32(*arguments):
    torch.set_float32_matmul_precision("high")
    return SETUP(*arguments)


WRONG = {
    "attention": (utils, "ATTENTION", utils.ATTENTION | {"loop": off_by_a_tenth}, "loop|are off by"),
    "head": (utils, "matmul_fp32", other_product, "bf16 off fp32 by"),
    "precision": (run, "setup", setup_with_tf32, "not in full fp32"),
    "sync": (cuda_check.DPO, "sync_reference", lambda *models: None, "the reference is .* nats off"),
}


@pytest.mark.parametrize("row", WRONG)
def test_a_part_that_is_wrong_is_found_and_is_right_here(row, monkeypatch):
    place, name, instead, told = WRONG[row]
    try:
        assert getattr(cuda_check, row)()
        monkeypatch.setattr(place, name, instead)
        with pytest.raises(AssertionError, match=told):
            getattr(cuda_check, row)()
    finally:
        torch.set_float32_matmul_precision("highest")
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("loss", [1.0, 1.001])
def test_a_layout_with_another_loss_is_wrong(loss, tmp_path, monkeypatch):
    same = {"grad_norm": 2, "humanline/log_ratio_abs_mean": 0}
    runs = iter(([{"step": 0, "loss": 1.0} | same], [{"step": 0, "loss": loss} | same]))
    monkeypatch.setattr(cuda_check, "start", lambda *_: next(runs))
    if loss == 1:
        assert "differ by" in cuda_check.same("dpo", tmp_path)
    else:
        with pytest.raises(AssertionError, match="differ by 1e-03"):
            cuda_check.same("dpo", tmp_path)


@pytest.mark.slow
def test_a_run_in_parts_and_its_launches_are_right_here(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        cuda_check.main(only=("launches", "dpo"))
    rows = re.findall(r"^\| (\S+).*\| ok \|", capsys.readouterr().out, re.MULTILINE)
    assert rows == ["launches", "dpo,"]


# === curves ===
def test_curves_have_what_runs_wrote_and_evaluations_at_both_ends(tmp_path, capsys):
    flags = ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--num-steps", "4", "--eval-every", "2"]
    flags += ["--batch-size", "16", "--eval-samples", "0", "--checkpoint-every", "0", "--engine", "hf"]
    folders = [tmp_path / f"run{seed}" for seed in (1, 2)]
    run_ranks(1, [[*flags, "--seed", folder.name[-1], "--output-dir", str(folder)] for folder in folders])
    after = [json.loads((f / "summary.json").read_text())["after"]["eval/margin"][0] for f in folders]
    margins = curves.curve(folders[0], "eval/margin")
    assert margins.to_dict() == {0: 0.0, 2: metrics(folders[0])[2]["eval/margin"], 4: after[0]}
    losses = curves.curve(folders[0], "loss")
    assert losses.tolist() == [line["loss"] for line in metrics(folders[0])]
    curves.main((f"{tmp_path}/run*",), ("eval/margin",), out=tmp_path / "curves.png")
    assert f"{sum(after) / 2:.3f} ± " in capsys.readouterr().out and (tmp_path / "curves.png").exists()
    with pytest.raises(SystemExit, match="has no metric eval/acuracy"):
        curves.curve(folders[0], "eval/acuracy")
