"""Tests tools/: estimates of memory, timed steps, faults that the check of a GPU finds, and curves."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers import PAIRS, ROOT, metrics, run_ranks
from transformers import AutoModelForCausalLM

import utils
from support import run
from tools import cuda_check, curves, memory, step

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


# === step ===
RUN = ["--model", "toy", "--pairs", "8", "--lr", "1e-3", "--beta", "0.5", "--max-grad-norm", "1"]
RUN += ["--rounds", "1", "--steps", "1"]


def measure(monkeypatch, *flags) -> dict[str, list[dict]]:
    """Measures steps. Returns {arm: the metrics of its steps}."""
    found = {}
    run_arm = step.run_arm

    def keep(own, kind, checkout, *rest):
        name = kind if checkout == ROOT else "other"
        found[name] = run_arm(own, kind, checkout, *rest)
        return found[name]

    monkeypatch.setattr(step, "run_arm", keep)
    monkeypatch.setattr(step, "__spec__", step.__spec__)
    step.measure(*step.parse([*RUN, *flags]))
    return found


def test_an_arm_is_the_script_with_its_flags(monkeypatch, tmp_path):
    monkeypatch.setattr(step, "launch", lambda ranks, words, folder: words)
    own, _, flags = step.parse([*RUN, "--script", "kto"])
    for arm, added in (("offline", ["--no-humanline"]), ("k=4", ["--humanline", "--k=4"])):
        script, *words = step.run_arm(own, arm, Path("/old"), flags, tmp_path)
        assert script == "/old/kto_humanline.py" and words[: len(flags)] == flags
        assert words[len(flags) :] == [f"--output-dir={tmp_path}", *added]


@pytest.fixture
def other_checkout(tmp_path):
    """Returns a checkout in which DPO's loss is doubled."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "support", tmp_path / "support")
    loss = "-F.logsigmoid(chosen - rejected)"
    text = (tmp_path / "dpo_humanline.py").read_text()
    assert text.count(loss) == 1
    (tmp_path / "dpo_humanline.py").write_text(text.replace(loss, f"2 * {loss}"))
    return str(tmp_path)


@pytest.mark.slow
def test_trl_trains_on_the_same_tokens_and_another_checkout_runs_its_own_code(
    monkeypatch, capsys, other_checkout
):
    """The first gradient depends on every token, mask and weight. The second loss depends on the update."""
    arms = measure(monkeypatch, "--arms", "k=1", "--trl", "--against", other_checkout)
    ours, theirs, trl = arms["k=1"], arms["other"], arms["TRL 4"]
    assert trl[0]["grad_norm"] == pytest.approx(ours[0]["grad_norm"], rel=1e-5) and ours[0]["grad_norm"] > 0.1
    for step_of_trl, step_of_ours in zip(trl, ours, strict=True):
        assert step_of_trl["loss"] == pytest.approx(step_of_ours["loss"], rel=1e-3)
    assert theirs[0]["loss"] == pytest.approx(2 * ours[0]["loss"], rel=1e-6)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names = ["| k=1", f"| k=1 in {other_checkout}", "| TRL, 4 pairs"]
    assert [line.split(" | ")[0] for line in table[1:]] == names
    assert " | 1.000 | 1.000 |" in table[1]


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
