"""Counts what a micro-batch launches. On a GPU a step of a small model waits for the CPU that launches it."""

import random
from collections import Counter

import pytest
import torch
import varlen_kernel
from conftest import TOY, parse_args
from step import PAIRS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

import dpo_humanline
import utils

# At 7ba5b41, torch 2.13 and the loop: 15,777 and 13,847.
CEILINGS = {  # {name: (layers, vocabulary, operators)}
    "the layers and vocabulary of Qwen2.5-1.5B": (28, 151_936, 10_780),
    "the layers and vocabulary of SmolLM2-135M": (30, 49_152, 11_530),
}


class Count(TorchDispatchMode):
    """Counts operators, views included, because a view also takes the CPU's time."""

    def __init__(self):
        super().__init__()
        self.operators = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def settings_of_a_gpu(monkeypatch):
    monkeypatch.setattr(utils, "CPU_BLOCK", utils.GPU_BLOCK)
    varlen_kernel.register()
    AttentionInterface.register("varlen", utils.varlen_attention)


def shrunk_pairs(count: int) -> list[utils.Example]:
    """Returns chosen and rejected completions of the benchmark's pairs, with a sixteenth of their tokens."""
    draw = random.Random(0)
    examples = []
    for side in (1, 2):
        for lengths in PAIRS[:count]:
            prompt_ids, completion_ids = (
                draw.choices(range(5, 30), k=lengths[i] // 16 + 2) for i in (0, side)
            )
            examples.append(utils.Example("", prompt_ids, completion_ids))
    return examples


def count_operators(layers: int, vocabulary: int) -> Counter:
    """Counts the second micro-batch, because FSDP prepares itself during the first one."""
    args = parse_args(
        dpo_humanline, ["--model", str(TOY / "policy"), "--dataset", "any", "--dtype", "float32"]
    )
    shape = dict(vocab_size=vocabulary, num_hidden_layers=layers, hidden_size=64, intermediate_size=128)
    shape |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    models = []
    for _ in range(2):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape), dtype=torch.float32)
        dpo_humanline.shard_model(args, model, torch.device("cpu")).eval().set_attn_implementation("varlen")
        models.append(model)
    policy, reference = models
    input_ids, mask = utils.pad_batch(shrunk_pairs(2), "cpu")
    for _ in range(2):
        with Count() as count:
            with torch.no_grad():
                ref_logps = utils.token_logps(reference, input_ids, mask)
            logps = utils.token_logps(policy, input_ids, mask)
            log_ratio = dpo_humanline.clip_log_ratio(args, logps - ref_logps)
            losses = dpo_humanline.dpo_loss(log_ratio, mask, args.beta)
            losses.sum().backward()
    assert count.operators["torch_attn::_varlen_attn"] == 2 * layers
    return count.operators


@pytest.mark.parametrize("name", CEILINGS)
def test_a_micro_batch_launches_few_operators(name, settings_of_a_gpu, one_rank):
    layers, vocabulary, ceiling = CEILINGS[name]
    operators = count_operators(layers, vocabulary)
    assert operators.total() <= ceiling, operators.most_common(20)
    assert operators.total() > 0.9 * ceiling  # otherwise the ceiling has become too high to hold anything


def test_the_heads_operators_do_not_grow_with_the_vocabulary(settings_of_a_gpu):
    """8 pairs of Qwen2.5-1.5B have 2,464 scored tokens. At 7ba5b41 their head launched 3,012 operators."""
    counts = []
    with torch.device("meta"):
        for vocabulary in (32_000, 151_936):
            hidden = torch.empty(2464, 64, requires_grad=True)
            weight = torch.empty(vocabulary, 64, requires_grad=True)
            targets = torch.empty(2464, dtype=torch.long)
            with Count() as count:
                utils.HeadLogps.apply(hidden, targets, weight, None, None, 1.0).sum().backward()
            counts.append(count.operators.total())
    assert counts[0] < 60 and counts[1] < 130
