"""Passes of even work, and sequences packed without padding."""

import time

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, run_ranks
from test_token_logps import EXAMPLES, full_logps
from transformers import AutoConfig, AutoModelForCausalLM
from worker import note_batches, run_here

from utils import ATTENTION, PACKED, choose_attention, make_micro_batches, pad_batch, token_logps

LONGEST = 48  # tokens of a sequence
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
SHAPES = {
    "llama": SIZES,
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES | {"head_dim": 8},
    "gemma": SIZES | {"head_dim": 8},
    "mistral": SIZES | {"sliding_window": 48},
    "phi3": SIZES,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | NO_DROPOUT,
    "mixtral": SIZES | {"num_local_experts": 4},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
PADDED = {
    "a short window": ("mistral", SIZES | {"sliding_window": 47}),
    "a convolution": ("lfm2", SIZES | {"layer_types": ["conv", "full_attention"]}),
    "a recurrence": ("qwen3_next", SIZES | EXPERTS),
    "attention of its own": ("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
}


def build(name: str, sizes: dict):
    torch.manual_seed(0)
    experts = name in ("mixtral", "qwen3_next")  # they have no float64
    dtype = torch.float32 if experts else torch.float64
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=dtype)


def count_positions(model, note) -> None:
    """Calls `note` with the positions of every forward pass of the decoder."""

    def count(_, args, inputs):
        note((args[0] if args else inputs["input_ids"]).numel())

    model.base_model.register_forward_pre_hook(count, with_kwargs=True)


# --- passes ---


def lengths_of(count: int, seed: int) -> list[int]:
    return (20 + np.random.default_rng(seed).gamma(2, 150, count)).astype(int).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [0, 1, 300, 2000, 9000])
def test_passes_hold_every_position_once_within_their_limit(ranks, max_tokens):
    for seed in range(5):
        lengths = lengths_of(32, seed)
        passes = make_micro_batches(lengths, ranks, max_tokens)
        assert sorted(i for part in passes for i in part) == list(range(32))
        assert len(passes) % ranks == 0 and all(passes)
        assert passes == make_micro_batches(lengths, ranks, max_tokens)
        for part in passes:
            assert not max_tokens or len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_get_even_work(ranks):
    for seed in range(20):
        lengths = lengths_of(8 * ranks, seed)
        loads = [sum(lengths[i] for i in part) for part in make_micro_batches(lengths, ranks, 0)]
        assert len(loads) == ranks and max(loads) <= 1.05 * sum(lengths) / ranks


def test_a_few_passes_suffice():
    """No more than a twentieth over what the tokens need, and one more for every rank."""
    for seed in range(20):
        lengths = lengths_of(200, seed)
        assert len(make_micro_batches(lengths, 2, 8192)) <= 1.05 * sum(lengths) / 8192 + 2


def test_fewer_positions_than_ranks_leave_passes_empty():
    assert sorted(make_micro_batches([7, 9], 4, 0)) == [[], [], [0], [1]]
    assert make_micro_batches([5000], 1, 100) == [[0]]


def test_the_search_for_micro_batches_is_a_bisection():
    """One micro-batch more for each rank at a time, 60,000 sequences would take minutes."""
    lengths = [200 + 37 * i % 400 for i in range(60_000)]
    started = time.monotonic()
    found = make_micro_batches(lengths, 8, 8192)
    assert time.monotonic() - started < 60
    assert len(found) % 8 == 0 and max(sum(lengths[i] for i in part) for part in found) <= 8192
    assert len(found) <= 1.05 * sum(lengths) / 8192


# --- packing ---


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_packed_values_and_gradients_are_those_of_each_sequence_alone(name, checkpointing):
    model = build(name, SHAPES[name])
    alone = [full_logps(model, *pad_batch([x], "cpu")) for x in EXAMPLES]
    width = max(logps.shape[1] for logps in alone)
    expected = torch.cat([torch.nn.functional.pad(logps, (0, width - logps.shape[1])) for logps in alone])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * weights).sum(), model.parameters())

    choose_attention(model, LONGEST)
    assert model.config._attn_implementation in PACKED
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    positions = []
    count_positions(model, positions.append)
    logps = token_logps(model, *pad_batch(EXAMPLES, "cpu"))
    assert positions == [sum(x.length - 1 for x in EXAMPLES)]  # the last token of a sequence predicts none
    tolerance = {"mixtral": 1e-4, "gemma": 1e-6}.get(name, 1e-9)  # Gemma's norms are in fp32
    torch.testing.assert_close(logps, expected, rtol=tolerance, atol=tolerance)
    for gradient, other in zip(torch.autograd.grad((logps * weights).sum(), model.parameters()), wanted):
        torch.testing.assert_close(gradient, other, rtol=100 * tolerance, atol=tolerance)


def test_a_packed_model_does_not_run_without_where_its_sequences_start():
    model = build("llama", SIZES)
    choose_attention(model, LONGEST)
    for implementation in ATTENTION:
        model.set_attn_implementation(implementation)
        with pytest.raises(TypeError, match="cu_seq_lens_q"):
            model(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))


@pytest.mark.parametrize("what", PADDED)
def test_other_models_stay_padded(what):
    model = build(*PADDED[what])
    before = model.config._attn_implementation
    choose_attention(model, LONGEST)
    assert model.config._attn_implementation == before and before not in PACKED


# --- in a run ---


@pytest.mark.parametrize("script", SCRIPTS)
def test_neither_model_computes_padding(script, tmp_path, monkeypatch):
    """In every pass both read the sequences of `pad_batch` alone, without what it pads them with."""
    module = __import__(script)
    batches = note_batches(module, monkeypatch)
    read, load = {"policy": [], "reference": []}, module.load_models

    def load_models(*arguments):
        models = load(*arguments)
        for who, model in zip(read, models):
            assert model.config._attn_implementation in PACKED
            count_positions(model, read[who].append)
        return models

    monkeypatch.setattr(module, "load_models", load_models)
    monkeypatch.setattr(module, "reference_point", lambda *arguments: 0.0, raising=False)  # KTO's own passes
    flags = ["--eval-dataset", "", "--batch-size", "8", "--checkpoint-every", "0", "--num-steps", "2"]
    run_here(module, *flags, "--micro-batch-tokens", "60", "--output-dir", tmp_path / "run")
    needed = [sum(x.length - 1 for x in batch) for batch in batches]  # a last token predicts none
    assert len(needed) > 4 and read["policy"] == read["reference"] == needed


def test_copies_of_the_policy_need_one_sum_a_step():
    """On CUDA shards are summed in every pass, the copies of HSDP in the last one: the same gradient."""
    run_ranks(4, [["compare_sums", "2"]], "loading_worker.py")


def test_thousands_of_long_sequences_are_divided_in_a_second():
    """The search began again for every further micro-batch: 6000 of these took 20 s."""
    started = time.process_time()
    micro_batches = make_micro_batches([4097] * 6000, 4, 8192)
    assert time.process_time() - started < 2
    assert len(micro_batches) % 4 == 0 and 6000 <= len(micro_batches) < 6100
    assert all(len(indices) <= 1 for indices in micro_batches)
