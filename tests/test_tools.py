"""Tests tools/: estimates of memory, faults that the check of a GPU finds, and curves."""

import json
import re
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import PAIRS, metrics, run_ranks
from transformers import AutoModelForCausalLM

import utils
from support import run
from tools import cuda_check, curves, memory

PARAMETERS = {  # published
    "llama-3-8b": 8_030_261_248,
    "qwen2.5-1.5b": 1_543_714_304,
    "gemma-2-27b": 27_227_128_320,
}
GIB = 2**30


# === memory ===
def estimate(*flags) -> dict:
    """Returns {phase: {part: GiB}} of a run, with presets of two layers."""
    layers = memory.SHAPE.index("num_hidden_layers")
    two_layers = {name: (*s[:layers], 2, *s[layers + 1 :]) for name, s in memory.PRESETS.items()}
    with patch.object(memory, "PRESETS", two_layers):
        return memory.estimate(*memory.parse([str(flag) for flag in flags]))


def sizes(config) -> list:
    """Returns the shapes of a model's parameters."""
    with torch.device("meta"):
        return [parameter.shape for parameter in AutoModelForCausalLM.from_config(config).parameters()]


@pytest.mark.parametrize("preset", PARAMETERS)
def test_presets_have_the_published_parameters_and_gemma_eager_attention(preset):
    config = memory.read_config(cuda_check.DPO, "--model", preset, False)
    assert sum(shape.numel() for shape in sizes(config)) == PARAMETERS[preset]
    assert (config._attn_implementation == "eager") == preset.startswith("gemma")


@pytest.mark.slow
def test_sampling_has_the_engine_and_the_reward_model():
    online = ["--online", "--reward-model", "llama-3-8b", "--ranks", 4]
    found = estimate("--script", "kto", "--model", "llama-3-8b", *online, "--vllm-memory", 0.5)
    layer = 2 * 4096 * 5120 + 3 * 4096 * 14336 + 2 * 4096
    reward_model = 128256 * 4096 + 2 * layer + 2 * 4096  # its head is 1 x 4096
    assert found["sampling"]["reward model"] == 2 * reward_model / GIB
    assert found["sampling"]["engine"] == 40 and "engine" not in found["training"]
    assert "sampling" in estimate("--script", "grpo_math", "--ranks", 2)


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
