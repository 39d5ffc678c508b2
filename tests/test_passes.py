"""Passes of even work, and sequences packed without padding: `make_passes`, `choose_attention`."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PAIRS, SCRIPTS, TOY, metrics, parse_args, run_ranks
from test_token_logps import EXAMPLES, full_logps
from transformers import AutoConfig, AutoModelForCausalLM

import utils
from utils import Example, choose_attention, make_passes, pad_batch, token_logps

ARGS = SimpleNamespace(max_prompt_length=16, max_length=32, max_new_tokens=8, dtype="float32")
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
        passes = make_passes(lengths, ranks, max_tokens)
        assert sorted(i for part in passes for i in part) == list(range(32))
        assert len(passes) % ranks == 0 and all(passes)
        assert passes == make_passes(lengths, ranks, max_tokens)
        for part in passes:
            assert not max_tokens or len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_get_even_work(ranks):
    for seed in range(20):
        lengths = lengths_of(8 * ranks, seed)
        loads = [sum(lengths[i] for i in part) for part in make_passes(lengths, ranks, 0)]
        assert len(loads) == ranks and max(loads) <= 1.05 * sum(lengths) / ranks


def test_a_few_passes_suffice():
    """No more than a twentieth over what the tokens need, and one more for every rank."""
    for seed in range(20):
        lengths = lengths_of(200, seed)
        assert len(make_passes(lengths, 2, 8192)) <= 1.05 * sum(lengths) / 8192 + 2


def test_fewer_positions_than_ranks_leave_passes_empty():
    assert sorted(make_passes([7, 9], 4)) == [[], [], [0], [1]]
    assert make_passes([5000], 1, 100) == [[0]]


# --- packing ---


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_packed_values_and_gradients_are_those_of_each_sequence_alone(name, checkpointing):
    model = build(name, SHAPES[name])
    alone = [full_logps(model, *pad_batch([x], 0, "cpu")) for x in EXAMPLES]
    width = max(logps.shape[1] for logps in alone)
    expected = torch.cat([torch.nn.functional.pad(logps, (0, width - logps.shape[1])) for logps in alone])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * weights).sum(), model.parameters())

    choose_attention(ARGS, model)
    assert model.config._attn_implementation == "packed"
    if checkpointing:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    positions = []
    count_positions(model, positions.append)
    logps = token_logps(model, *pad_batch(EXAMPLES, 0, "cpu"))
    assert positions == [sum(x.length - 1 for x in EXAMPLES)]  # the last token of a sequence predicts none
    tolerance = {"mixtral": 1e-4, "gemma": 1e-6}.get(name, 1e-9)  # Gemma's norms are in fp32
    torch.testing.assert_close(logps, expected, rtol=tolerance, atol=tolerance)
    for gradient, other in zip(torch.autograd.grad((logps * weights).sum(), model.parameters()), wanted):
        torch.testing.assert_close(gradient, other, rtol=100 * tolerance, atol=tolerance)


def test_a_sequence_does_not_see_the_one_before_it():
    model = build("llama", SIZES)
    choose_attention(ARGS, model)
    one, other = ([Example(1, "", [first] * 9, [3, 4]), EXAMPLES[0]] for first in (5, 6))
    a, b = (token_logps(model, *pad_batch(part, 0, "cpu")).detach() for part in (one, other))
    assert torch.equal(a[1], b[1]) and not torch.equal(a[0], b[0])


def test_a_packed_model_that_is_called_by_itself_reads_every_row_as_a_sequence():
    model = build("llama", SIZES)
    input_ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    expected = model(input_ids).logits
    choose_attention(ARGS, model)
    torch.testing.assert_close(model(input_ids).logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("what", PADDED)
def test_other_models_stay_padded(what):
    model = build(*PADDED[what])
    before = model.config._attn_implementation
    choose_attention(ARGS, model)
    assert model.config._attn_implementation == before != "packed"


def test_gemma_2_stays_padded_and_eager(tmp_path):
    build("gemma2", SIZES | {"head_dim": 8}).save_pretrained(tmp_path)
    model = utils.load_pretrained(AutoModelForCausalLM, str(tmp_path))
    choose_attention(ARGS, model)
    assert model.config._attn_implementation == "eager"


# --- in a run ---


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("layout", [[], ["--micro-batch-tokens", "60"]])
def test_the_policy_computes_no_padding_and_the_reference_only_where_it_differs(
    script, layout, tmp_path, monkeypatch
):
    """Once k = 2 steps have passed, the reference is the policy in no step; in the first, it is."""
    module = __import__(script)
    monkeypatch.setattr(module, "utils", SimpleNamespace(**vars(utils)))
    calls, step, inside = [], [0], module.load_models

    def load(*arguments):
        models = inside(*arguments)
        for who, model in zip(("policy", "reference"), models):
            assert model.config._attn_implementation == "packed"
            count_positions(model, lambda n, who=who: calls.append((step[0], who, n)))
        return models

    class Bar:
        """Counts steps from 1; outside of the loop it is 0."""

        def __init__(self, steps, **_):
            self.steps = steps

        def __iter__(self):
            for number in self.steps:
                step[0] = number + 1
                yield number
            step[0] = 0

        def set_postfix(self, **_):
            pass

    monkeypatch.setattr(module, "load_models", load)
    monkeypatch.setattr(module, "tqdm", Bar)
    lengths = count_needed(module, monkeypatch, step)
    run = ["--eval-dataset", "", "--batch-size", "8", "--k", "2", "--checkpoint-every", "0"]
    run += [*layout, "--num-steps", "3", "--output-dir", str(tmp_path / "run")]
    module.main(parse_args(module, run))
    for number in (1, 2, 3):
        by_policy = sum(n for at, who, n in calls if (at, who) == (number, "policy"))
        by_reference = sum(n for at, who, n in calls if (at, who) == (number, "reference"))
        assert by_policy == sum(lengths[number])
        assert by_reference == (0 if number == 1 else by_policy)
    passes = len([1 for at, who, _ in calls if (at, who) == (2, "policy")])
    assert (passes > 2) == bool(layout)  # KTO's z_0 has its own


def count_needed(module, monkeypatch, step) -> dict:
    """{step: positions that the sequences of its passes need}."""
    found, pad = {}, module.utils.pad_batch

    def pad_and_count(examples, *rest):
        found.setdefault(step[0], []).append(sum(x.length - 1 for x in examples))
        return pad(examples, *rest)

    monkeypatch.setattr(module.utils, "pad_batch", pad_and_count)
    return found


def test_ranks_and_budgets_do_not_change_the_numbers(tmp_path):
    run = ["--dataset", PAIRS, "--eval-dataset", "", "--batch-size", "12", "--num-steps", "4", "--k", "1"]
    run += ["--checkpoint-every", "0", "--model", str(TOY / "policy"), "--lr", "1e-3", "--beta", "1"]
    run += ["--output-dir"]
    sizes = {"whole": "0", "fives": "150", "two ranks": "140"}  # --micro-batch-tokens: a pair has 28
    runs = [["--micro-batch-tokens", size, *run, str(tmp_path / name)] for name, size in sizes.items()]
    run_ranks(1, runs[:2])
    run_ranks(2, runs[2:])
    expected = metrics(tmp_path / "whole")
    for name in sizes:
        for a, b in zip(expected, metrics(tmp_path / name), strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
