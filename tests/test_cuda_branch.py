"""What only CUDA runs, without a GPU: main of each script on a pretended one (cuda_worker.py)."""

import gzip
import inspect
import json
from collections import Counter
from itertools import islice

import pytest
import torch
from conftest import PAIRS, ROOT, TOY, finish, metrics, start_ranks
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 2
COMMON = ["--num-steps", str(STEPS), "--k", "1", "--micro-batch-tokens", "60", "--checkpoint-every", "2"]
COMMON += ["--dtype", "auto", "--warmup-fraction", "0", "--eval-samples", "2", "--max-new-tokens", "16"]
GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters  # else, in torch 2.11, a loop is chosen
UNITS = 5  # of FSDP: two blocks, embedding, head, root


@pytest.fixture(scope="module")
def grouped(tmp_path_factory) -> str:
    """The toy policy, whose two heads share their keys and values."""
    folder = tmp_path_factory.mktemp("grouped")
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy")
    size = model.config.head_dim
    for layer in model.model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.weight = torch.nn.Parameter(linear.weight[:size].clone())
    model.config.num_key_value_heads = 1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("script", ["dpo", "kto", "grpo", "grpo_math"])
def test_a_run_on_a_pretended_gpu(script, grouped, tmp_path):
    """Both ranks of it end well, and its numbers are the CPU's in bfloat16."""
    if script == "grpo_math":
        flags = ["--prompts-per-step", "4", "--group-size", "4", "--sample-every", "1"]
        with gzip.open(ROOT / "toy" / "shell_game" / "problems_train.jsonl.gz", "rt") as file:
            (tmp_path / "data.jsonl").write_text("".join(islice(file, 16)))
    else:
        flags = ["--model", grouped, "--reward-model", f"{TOY}/reward_model", "--engine", "hf"]
        flags += ["--batch-size", "16", "--lr", "1e-3", "--adam-eps", "1e-2"]
        with open(PAIRS) as file:
            (tmp_path / "data.jsonl").write_text("".join(islice(file, 32)))
    flags += ["--dataset", f"{tmp_path}/data.jsonl", "--eval-dataset", f"{tmp_path}/data.jsonl", *COMMON]
    gpu = [*flags, "--output-dir", f"{tmp_path}/gpu"]
    cpu = [*flags, "--dtype", "bfloat16", "--output-dir", f"{tmp_path}/cpu"]
    started = [
        start_ranks(2, [gpu], "cuda_worker.py", f"{script}_humanline"),
        start_ranks(2, [cpu], "worker.py", f"{script}_humanline"),
    ]
    outputs = [finish(processes) for processes in started]
    for processes, of_ranks in zip(started, outputs):
        for process, output in zip(processes, of_ranks):
            assert process.exitcode == 0, output[-3000:]

    for output in outputs[0]:  # of each rank
        facts = Counter(json.loads(output.splitlines()[-1]))
        assert facts["backend cpu:gloo,cuda:nccl"] == facts["device set"] == 1
        assert not facts["cuDNN"]
        # The trial with sequences one behind the other has two layers a model, and no other was needed.
        assert facts["trials of attention"] == (4 if GROUPED else 0)
        passes = facts["d_weight"]
        assert passes > STEPS  # some step has several
        assert facts["d_hidden"] == passes and facts["logits"] > 2 * passes  # twice for each, and the rest
        if GROUPED:
            assert facts["attention backward"] == 2 * passes  # two layers
            assert facts["attention"] > 2 * passes
        if script != "grpo_math":  # between rounds it waits in the host's memory
            assert facts["reward model's weights"] > 0 and facts["reward model's on the GPU"] == 0
        assert facts["gradients of a unit"] == UNITS * passes
        # DCP makes a step without gradients, before it writes a checkpoint; not in torch 2.11.
        assert facts["fused AdamW"] == STEPS + GROUPED
        assert facts["syncs"] == STEPS
        synced = [name for name in facts if name.startswith("reference")]
        assert synced == ["reference torch.bfloat16, policy torch.float32"]

    of_gpu = metrics(tmp_path / "gpu", without_perf=True)
    of_cpu = metrics(tmp_path / "cpu", without_perf=True)
    assert len(of_gpu) == STEPS and (tmp_path / "gpu" / "final" / "model.safetensors").exists()
    assert of_gpu[0]["grad_norm"] > 0
    compared = 1 if script == "grpo_math" else STEPS  # then its samples may differ
    for found, expected in zip(of_gpu[:compared], of_cpu):
        assert found == pytest.approx(expected, rel=0.02, abs=0.02)
