"""Tests without a GPU what only CUDA runs: main of each script on a pretended GPU (cuda_worker.py)."""

import inspect
import json
from collections import Counter

import pytest
from conftest import PAIRS, ROOT, TOY, finish, metrics, read_rows, start_ranks, write_rows
from torch.nn.attention.varlen import varlen_attn

STEPS = 2
COMMON = ["--num-steps", str(STEPS), "--k", "1", "--micro-batch-tokens", "60", "--checkpoint-every", "2"]
COMMON += ["--dtype", "auto", "--warmup-fraction", "0", "--eval-samples", "2", "--max-new-tokens", "16"]
# Whether query heads can share a key head. In torch 2.11 the key heads are repeated.
GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters
UNITS = 5  # units of FSDP: two blocks, embedding, head, root


@pytest.mark.parametrize("script", ["dpo", "kto", "grpo", "grpo_math"])
def test_a_run_on_a_pretended_gpu(script, tmp_path):
    """Both ranks end without an error, and the numbers are those of the CPU in bfloat16."""
    if script == "grpo_math":
        flags = ["--prompts-per-step", "4", "--group-size", "4", "--sample-every", "1"]
        rows = read_rows(ROOT / "toy" / "shell_game" / "problems_train.jsonl.gz")[:16]
    else:
        flags = ["--model", f"{TOY}/policy", "--reward-model", f"{TOY}/reward_model", "--engine", "hf"]
        flags += ["--batch-size", "16", "--lr", "1e-3", "--adam-eps", "1e-2"]
        rows = read_rows(PAIRS)[:32]
    data = write_rows(tmp_path / "data.jsonl", rows)
    flags += ["--dataset", data, "--eval-dataset", data, *COMMON]
    gpu = [*flags, "--output-dir", f"{tmp_path}/gpu"]
    cpu = [*flags, "--dtype", "bfloat16", "--output-dir", f"{tmp_path}/cpu"]
    started = [
        start_ranks(2, [gpu], "cuda_worker.py", f"{script}_humanline"),
        start_ranks(2, [cpu], "worker.py", f"{script}_humanline"),
    ]
    outputs = [finish(processes) for processes in started]
    for process, output in zip(sum(started, []), sum(outputs, [])):
        assert process.exitcode == 0, output[-3000:]

    for rank, output in enumerate(outputs[0]):
        facts = Counter(json.loads(output.splitlines()[-1]))
        assert facts["backend cpu:gloo,cuda:nccl"] == facts[f"device cuda:{rank}"] == 1
        assert not facts["cuDNN"]
        passes = facts["d_weight"]  # one for each micro-batch
        assert passes > STEPS  # some step has several micro-batches
        # The logits are those of policy, reference and evaluation.
        assert facts["d_hidden"] == passes and facts["logits"] > 2 * passes
        # Two layers of the policy and two of the reference; also evaluation and the trial of the attention.
        assert facts["attention"] > 4 * passes
        if script != "grpo_math":  # between rounds the reward model is on the CPU
            assert facts["reward model on cpu"] > 0 and facts["reward model on cuda"] == 0
        assert facts["gradients of a unit"] == UNITS * passes
        # DCP makes a step without gradients before it writes a checkpoint, but not in torch 2.11.
        assert facts["fused AdamW"] == STEPS + GROUPED
        assert facts["syncs"] == STEPS
        synced = [name for name in facts if name.startswith("reference")]
        assert synced == ["reference torch.bfloat16, policy torch.float32"]

    of_gpu = metrics(tmp_path / "gpu", without_perf=True)
    of_cpu = metrics(tmp_path / "cpu", without_perf=True)
    assert len(of_gpu) == STEPS and (tmp_path / "gpu" / "final" / "model.safetensors").exists()
    assert of_gpu[0]["grad_norm"] > 0
    compared = 1 if script == "grpo_math" else STEPS  # after a step, its samples may differ
    for found, expected in zip(of_gpu[:compared], of_cpu):
        assert found == pytest.approx(expected, rel=0.02, abs=0.02)
