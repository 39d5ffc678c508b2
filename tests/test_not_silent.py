"""What would go wrong without a word: lost text, wrong tokens, other attention, ranks with other data."""

import re

import pytest
import torch
from test_passes import SIZES, build
from transformers import AutoConfig, Phi3Config

import utils
from support import run
from utils import InputError

# --- three walls: what they stop would train on wrong tokens, and no metric would show it ---


# --- the model ---


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | more


BY_LAYER = {"full_attention": rope("dynamic"), "sliding_attention": rope("default")}
HALVES = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONG = {"original_max_position_embeddings": 1024, "rope_parameters": rope("longrope", **HALVES)}
# Llama 3.1's and YaRN's original positions are no limit: they are stretched for good.
STRETCH = {"original_max_position_embeddings": 256, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA = {"max_position_embeddings": 1024}
CONFIGS = {
    "learned": AutoConfig.for_model("gpt2", n_positions=1024),
    "long": Phi3Config(hidden_size=32, num_attention_heads=4, max_position_embeddings=4096, **LONG),
    "dynamic": AutoConfig.for_model("llama", rope_parameters=rope("dynamic"), **LLAMA),
    "of a layer": AutoConfig.for_model("gemma3_text", rope_parameters=BY_LAYER, **LLAMA),
    "stretched": AutoConfig.for_model("llama", rope_parameters=rope("llama3", **STRETCH), **LLAMA),
    "linear": AutoConfig.for_model("llama", rope_parameters=rope("linear"), **LLAMA),
    "rotary": AutoConfig.for_model("llama", **LLAMA),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_lengths_beyond_a_models_positions_are_an_error_with_both_numbers(kind):
    run.check_positions(CONFIGS[kind], longest=1024)
    with pytest.raises(InputError, match="1025 tokens.* the model has 1024 positions.*--max-new-tokens"):
        run.check_positions(CONFIGS[kind], longest=1025)
    run.check_positions(AutoConfig.for_model("bloom"), longest=10**6)  # it has no positions


def test_a_model_that_cannot_be_packed_is_not():
    """Doge's attention adds to its scores what depends on the values."""
    model = build("doge", SIZES | {"keep_window_size": 64})
    for name, parameter in model.named_parameters():
        if name.endswith(".A"):
            parameter.data.normal_()
    try:
        told = utils.choose_attention(model, 32)
        assert told.startswith(model.config._attn_implementation)
    except InputError as error:  # of transformers 5.16, whose Doge depends on padding too
        told = str(error)
    assert re.search(r"; loop: [\d.]+ nats off", told)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bert", {"is_decoder": False}),  # reads what it is to predict
        ("granite", {"logits_scaling": 8.0}),
        ("llama", {"attention_dropout": 0.5}),
    ],
)
def test_a_model_whose_log_probs_are_not_its_own_is_refused(name, settings):
    model = build(name, SIZES | settings).train()
    with pytest.raises(InputError, match="depend on later tokens, on noise|logits have a factor"):
        utils.choose_attention(model, 32)


@pytest.mark.parametrize("bias", [False, True])
def test_a_token_that_the_head_does_not_have_is_nan(bias, monkeypatch):
    monkeypatch.setattr(utils, "CPU_BLOCK", 3 * 256)
    hidden, weight = torch.randn(3, 4), torch.randn(600, 4)
    targets = torch.tensor([599, 600, 7])
    logps = utils.HeadLogps.apply(hidden, targets, weight, weight[:, 0] if bias else None, None, 1.0)
    assert logps.isnan().tolist() == [False, True, False]
