"""Compares benchmark/memory.py with arithmetic by hand, and with the resident memory of the scripts."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import memory
import pytest
import torch
from conftest import ROOT, TOY, run_ranks, write_rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from support import run

PARAMETERS = {  # published
    "llama-3-8b": 8_030_261_248,
    "qwen2.5-1.5b": 1_543_714_304,
    "gemma-2-27b": 27_227_128_320,
}
STATE = {"parameters": 4, "gradients": 4, "Adam moments": 8}  # bytes of a parameter
GIB = 2**30


def estimate(*flags) -> dict:
    """Estimates the memory of a run, with presets of two layers."""
    layers = memory.SHAPE.index("num_hidden_layers")
    two_layers = {name: (*s[:layers], 2, *s[layers + 1 :]) for name, s in memory.PRESETS.items()}
    with patch.object(memory, "PRESETS", two_layers):
        phases = memory.estimate(*memory.parse([str(flag) for flag in flags]))
    parts = max(phases.values(), key=lambda parts: sum(parts.values()))
    return {"parts": parts, "peak": sum(parts.values()), "phases": phases}


def sizes(config) -> list:
    """Returns the shapes of a model's parameters."""
    with torch.device("meta"):
        return [parameter.shape for parameter in AutoModelForCausalLM.from_config(config).parameters()]


def test_state_is_hand_arithmetic():
    """Each parameter is split along its first dimension, and rank 0 has the first and largest part."""
    shapes = sizes(AutoConfig.from_pretrained(TOY / "policy"))
    common = ["--model", "toy", "--micro-batch-tokens", 2500]  # one pair
    for ranks, dtype, size in ((1, "float32", 4), (4, "bfloat16", 2), (8, "bfloat16", 2)):
        found = estimate(*common, "--ranks", ranks, "--dtype", dtype)
        held = sum(-(-shape[0] // ranks) * shape[1:].numel() for shape in shapes)
        for name, count in (STATE | {"reference": size}).items():
            assert found["parts"][name] == count * held / GIB, name


def test_a_maximum_of_tokens_means_a_number_of_sequences_and_shards_are_within_a_machine():
    common = ["--model", "toy", "--ranks", 2, "--max-length", 100]
    four_pairs = estimate(*common, "--micro-batch-tokens", 800)["parts"]
    assert estimate(*common, "--micro-batch-tokens", 999)["parts"] == four_pairs  # a fifth pair does not fit
    assert estimate(*common, "--batch-size", 8)["parts"]["activations"] == four_pairs["activations"]
    larger = estimate(*common)["parts"]
    assert larger["activations"] > 2 * four_pairs["activations"]
    two_by_two = estimate(*common, "--ranks", 4, "--shard-size", 2)["parts"]
    assert two_by_two["Adam moments"] == larger["Adam moments"]


@pytest.mark.parametrize("preset", PARAMETERS)
def test_presets_have_the_published_number_of_parameters(preset):
    shapes = sizes(AutoConfig.for_model(**dict(zip(memory.SHAPE, memory.PRESETS[preset]))))
    assert sum(shape.numel() for shape in shapes) == PARAMETERS[preset]


def test_every_script_and_preset():
    online = ["--online", "--reward-model", "llama-3-8b"]
    two_sequences = ["--micro-batch-tokens", 2500, "--ranks", 4]
    share = ["--vllm-memory", 0.5, "--gpu-memory", 40, "--ranks", 4]
    vllm = estimate("--script", "kto", "--model", "llama-3-8b", *online, *share)
    hf = estimate("--script", "grpo", "--model", "qwen2.5-1.5b", *online, "--engine", "hf", *two_sequences)
    math = estimate("--script", "grpo_math", "--ranks", 2)
    gemma = estimate("--model", "gemma-2-27b", *two_sequences, "--gradient-checkpointing")
    assert vllm["phases"]["sampling"]["engine"] == 20 and "engine" not in vllm["phases"]["training"]
    layer = 2 * 4096 * 5120 + 3 * 4096 * 14336 + 2 * 4096
    reward_model = 128256 * 4096 + 2 * layer + 2 * 4096  # its head is 1 x 4096
    for found in (vllm, hf):
        assert found["phases"]["sampling"]["reward model"] == 2 * reward_model / GIB
    assert hf["phases"]["training"]["engine"] == 2 * hf["parts"]["parameters"]  # one of four ranks, in bf16
    # both, layers, heads, width, tokens, samples, bytes
    cache = 2 * 2 * 2 * 128 * (625 + 2048) * 32 * 2 / GIB
    assert hf["phases"]["sampling"]["engine"] - hf["phases"]["training"]["engine"] == pytest.approx(cache)
    assert math["peak"] > 0 and set(gemma["phases"]) == {"training"}


def test_llama_3_8b_on_four_gpus():
    """docs/performance.md has this peak."""
    flags = ["--model", "llama-3-8b", "--ranks", "4", "--gradient-checkpointing", "--json"]
    output = subprocess.check_output([sys.executable, ROOT / "benchmark" / "memory.py", *flags])
    found = json.loads(output)
    assert found["peak"] == pytest.approx(40.23, abs=0.1)


def test_what_is_refused(capsys):
    wrong = {"--micro-bach-tokens 2": "--micro-batch-tokens", "--model llama-3": "llama-3: pass a folder"}
    for flags, message in (
        wrong
        | {
            "--ranks 3": "the number of ranks, 3, does not divide the batch of 32",
            "--ranks 0": "--ranks must be at least 1",
        }
    ).items():
        with pytest.raises(SystemExit), run.exit_on_input_error():
            memory.main(flags.split())
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """Makes a Llama of 20 million parameters (16 in head and embedding), and pairs of 2 x 128 tokens."""
    folder = tmp_path_factory.mktemp("material")
    shape = dict(vocab_size=32000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    shape |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=5, pad_token_id=0)).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(folder / "model")
    words = {"prompt": (61, "rose"), "chosen": (100, "ivy"), "rejected": (100, "holly")}
    row = {column: " ".join([word] * count) for column, (count, word) in words.items()}
    write_rows(folder / "pairs.jsonl", [row] * 8)
    return folder


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "script, ranks, flags, visible",
    [
        ("dpo", 2, ["--batch-size=8", "--gradient-checkpointing"], ["Adam moments", "head, temporaries"]),
        ("grpo", 1, ["--batch-size=16", "--micro-batch-tokens=1024"], ["gradients", "activations"]),
    ],
)
def test_estimate_is_the_measured_peak(material, tmp_path, script, ranks, flags, visible):
    """If one of the visible parts were missing, the estimate would be too small."""
    common = [f"--dataset={material}/pairs.jsonl", "--num-steps=2", "--checkpoint-every=0", "--dtype=float32"]
    common += ["--max-length=128", "--max-prompt-length=64", "--max-new-tokens=64", *flags]
    first = [*common, "--model", f"{TOY}/policy", "--output-dir", f"{tmp_path}/first"]
    runs = [first, [*common, "--model", f"{material}/model", "--output-dir", f"{tmp_path}/second"]]
    measured = json.loads(run_ranks(ranks, runs, "memory_worker.py", f"{script}_humanline").splitlines()[-1])
    found = estimate("--script", script, "--ranks", ranks, "--model", f"{material}/model", *common)
    peak = measured["peak"] - measured["before"]
    assert found["peak"] == pytest.approx(peak, rel=0.1)
    for name in ("parameters", "reference", *visible):
        assert found["peak"] - found["parts"][name] < 0.9 * peak
