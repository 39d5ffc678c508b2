"""utils.py: log-probs against log_softmax of all logits, packing, micro-batches, statistics."""

import random
import shutil
from array import array

import pytest
import torch
import torch.nn.functional as F
from helpers import PAIRS, TOY, metrics, note_batches, parse_args, run_here, run_ranks
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mamba2Config, Mamba2ForCausalLM

import dpo_humanline
import utils
from utils import Example, HeadLogps, choose_attention, make_micro_batches, pad_batch, token_logps

SEQUENCES = [([1, 2, 3], [4, 5, 6, 7, 5]), ([9, 8], [7]), ([1], [30, 31, 32, 33, 34, 35, 36, 5])]
EXAMPLES = [Example("", *sequence) for sequence in SEQUENCES]
LONGEST = 48  # tokens of a sequence
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(intermediate_size=48, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GPT2 = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
GPT2 |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)


def build(kind: str, sizes: dict, dtype=torch.float64):
    """Returns a tiny random model of a kind."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=dtype).eval()


def plain_logps(model, input_ids, mask, temperature=1.0):
    """The two lines of `token_logps`' docstring, in the model's dtype."""
    logits = model(input_ids, use_cache=False).logits[:, :-1].transpose(1, 2) / temperature  # (B, V, T - 1)
    return mask * F.pad(-F.cross_entropy(logits, input_ids[:, 1:], reduction="none"), (1, 0))


# --- examples and micro-batches ---


def test_a_completion_is_truncated_to_the_room_behind_the_prompt():
    example = Example("", array("i", [1, 2, 3]), array("i", [4, 5, 6]))
    assert example.length == 6
    assert example.truncate(5).completion_ids == array("i", [4, 5])
    assert example.truncate(2).completion_ids == array("i")


def test_a_batch_is_padded_on_the_right():
    examples = [Example("", array("i", [1, 2]), array("i", [3])), Example("", array("i", [4]))]
    input_ids, mask = pad_batch(examples, "cpu")
    assert input_ids.dtype == torch.int64 and input_ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert mask.dtype == torch.float32 and mask.tolist() == [[0, 0, 1], [0, 0, 0]]


def one_by_one(lengths, ranks, max_tokens) -> list[list[int]]:
    """Tries every number of micro-batches. Each sequence goes to the one with the fewest tokens so far."""
    count = ranks
    while True:
        micro_batches = [[] for _ in range(count)]
        loads = [0] * count
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            smallest = loads.index(min(loads))
            loads[smallest] += lengths[i]
            micro_batches[smallest].append(i)
        if all(len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens for part in micro_batches):
            return micro_batches
        count += ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_micro_batches_are_the_fewest_that_fit(ranks):
    draw = random.Random(ranks)
    for _ in range(150):
        lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 40))]
        max_tokens = draw.randint(1, 200)  # some sequences are longer
        found = make_micro_batches(lengths, ranks, max_tokens)
        assert sorted(sum(found, [])) == list(range(len(lengths)))
        assert found == one_by_one(lengths, ranks, max_tokens)


def test_without_a_limit_there_is_one_micro_batch_for_each_rank():
    assert make_micro_batches([5, 3, 3], 1, 0) == [[0, 1, 2]]
    assert make_micro_batches([5, 3, 3], 2, 0) == [[0], [1, 2]]
    assert sorted(make_micro_batches([7, 9], 4, 0)) == [[], [], [0], [1]]
    assert make_micro_batches([], 2, 0) == make_micro_batches([], 2, 100) == [[], []]


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_get_even_work(ranks):
    draw = random.Random(ranks)
    for _ in range(20):
        lengths = [int(20 + draw.gammavariate(2, 150)) for _ in range(8 * ranks)]
        loads = [sum(lengths[i] for i in part) for part in make_micro_batches(lengths, ranks, 0)]
        assert len(loads) == ranks and max(loads) <= 1.05 * sum(lengths) / ranks


# --- log-probs ---

MODELS = {
    "a head of its own": ("llama", SIZES),
    "tied": ("llama", SIZES | dict(tie_word_embeddings=True)),
    "softcapped": ("gemma2", SIZES | dict(final_logit_softcapping=3.0, head_dim=8)),
    "absolute positions": ("gpt2", GPT2),
    "a head with a bias": ("phi", SIZES),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dtype", "temperature", "block"),  # of 256 columns or all
    [(torch.float32, 1.0, 1024), (torch.float64, 1.0, 256), (torch.float64, 0.7, 1024)],
)
def test_values_and_gradients_are_those_of_the_two_lines(name, dtype, temperature, block, monkeypatch):
    monkeypatch.setattr(utils, "CPU_BLOCK", 14 * block)  # 14 tokens of completions
    kind, sizes = MODELS[name]
    model = build(kind, sizes | dict(vocab_size=700), dtype)
    input_ids, mask = pad_batch(EXAMPLES, "cpu")
    logps = token_logps(model, input_ids, mask, temperature)
    expected = plain_logps(model, input_ids, mask, temperature)
    assert logps.dtype == dtype and logps.shape == mask.shape
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(logps, expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((logps * weights).sum(), model.parameters())
    expected = torch.autograd.grad((expected * weights).sum(), model.parameters())
    for gradient, wanted in zip(gradients, expected):
        torch.testing.assert_close(gradient, wanted, rtol=100 * tolerance, atol=10 * tolerance)


def test_logits_are_fp32_when_the_model_is_bf16():
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy", dtype=torch.bfloat16)
    input_ids, mask = pad_batch(EXAMPLES, "cpu")
    with torch.no_grad():
        hidden = model.model(input_ids).last_hidden_state
        logits = hidden.float() @ model.lm_head.weight.float().T
        expected = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
        logps = token_logps(model, input_ids, mask)
    torch.testing.assert_close(logps[:, 1:], expected * mask[:, 1:], rtol=1e-6, atol=1e-6)


def test_the_head_never_sees_prompt_tokens(monkeypatch):
    model = build("gpt2", GPT2 | dict(vocab_size=700))
    sizes = []
    matmul = utils.matmul_fp32

    def spy(hidden, columns):
        sizes.append((len(hidden), columns.shape[1]))
        return matmul(hidden, columns)

    monkeypatch.setattr(utils, "matmul_fp32", spy)
    monkeypatch.setattr(utils, "CPU_BLOCK", 14 * 256)
    with torch.no_grad():
        token_logps(model, *pad_batch(EXAMPLES, "cpu"))
    assert sizes == [(14, 256), (14, 256), (14, 188)]  # 14 tokens of completions


def test_the_head_and_the_softcap_are_restored_also_after_an_error():
    model = build(*MODELS["softcapped"])
    input_ids = torch.tensor([[1, 2, 3]])
    expected = model(input_ids).logits
    token_logps(model, input_ids, torch.tensor([[0, 1, 1]]))
    with pytest.raises(IndexError):  # a token beyond the vocabulary
        token_logps(model, torch.tensor([[1, 64]]), torch.tensor([[0, 1]]))
    torch.testing.assert_close(model(input_ids).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("attention", ["sdpa", "loop"])  # with padding, or packed
@pytest.mark.parametrize("empty", [(0,), (1, 2), (0, 1, 2)])
def test_a_sequence_whose_mask_is_all_0_has_no_effect(attention, empty):
    """An edited script may filter overlong samples in this way."""
    model = build("llama", SIZES)
    input_ids, mask = pad_batch(EXAMPLES, "cpu")
    mask[list(empty)] = 0
    expected = plain_logps(model, input_ids, mask)
    choose_attention(model, 16, torch.float32)
    model.set_attn_implementation(attention)
    logps = token_logps(model, input_ids, mask)
    torch.testing.assert_close(logps, expected, rtol=1e-9, atol=1e-9)
    assert (logps[list(empty)] == 0).all()
    gradients = torch.autograd.grad(logps.square().sum(), model.parameters())
    expected = torch.autograd.grad(expected.square().sum(), model.parameters())
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("max_tokens", [0, 9])
def test_log_probs_of_examples_do_not_depend_on_their_micro_batches(max_tokens, one_rank):
    model = build("llama", SIZES)
    expected = plain_logps(model, *pad_batch(EXAMPLES, "cpu"))
    logps, mask = utils.completion_logps(model, EXAMPLES, max_tokens)
    assert logps.dtype == mask.dtype == torch.float64
    torch.testing.assert_close(logps, expected.double(), rtol=1e-9, atol=1e-9)


# --- packing ---

ORDINARY = {  # models that pack
    "llama": SIZES,
    "qwen2": SIZES | dict(tie_word_embeddings=True),
    "qwen3": SIZES | dict(head_dim=8),
    "gemma": SIZES | dict(head_dim=8),
    "gemma3_text": SIZES | dict(head_dim=8),
    "mistral": SIZES | dict(sliding_window=LONGEST),
    "ministral3": SIZES | dict(head_dim=8),
    "phi": SIZES,
    "phi3": SIZES,
    "olmo2": SIZES,
    "olmo3": SIZES | dict(sliding_window=LONGEST),
    "smollm3": SIZES,
    "starcoder2": SIZES,
    "gpt_neox": SIZES,
    "gpt2": GPT2,
    "mixtral": SIZES | dict(num_local_experts=4),
    "qwen3_moe": SIZES | EXPERTS,
}
PADDED = {  # models that do not
    "a short window": ("mistral", SIZES | dict(sliding_window=LONGEST - 1)),
    "a convolution": ("lfm2", SIZES | dict(layer_types=["conv", "full_attention"])),
    "a recurrence": ("qwen3_next", SIZES | EXPERTS),
    "attention of its own": ("bloom", dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
    "lengths that are lost": ("nemotron", SIZES),
    "sinks": ("gpt_oss", SIZES | dict(num_local_experts=4, head_dim=8)),
    "a softcap": ("gemma2", SIZES | dict(head_dim=8)),
    "a bias as a mask": ("doge", SIZES),
}


def count_positions(model, note) -> None:
    """Calls `note` with the number of positions of every forward pass of the decoder."""

    def count(_, args, inputs):
        note((args[0] if args else inputs["input_ids"]).numel())

    model.base_model.register_forward_pre_hook(count, with_kwargs=True)


@pytest.mark.parametrize("kind", ORDINARY)
def test_packed_values_and_gradients_are_those_of_each_sequence_alone(kind):
    experts = kind in ("mixtral", "qwen3_moe")  # they have no float64
    model = build(kind, ORDINARY[kind], torch.float32 if experts else torch.float64)
    alone = [plain_logps(model, *pad_batch([x], "cpu")) for x in EXAMPLES]
    width = max(logps.shape[1] for logps in alone)
    expected = torch.cat([F.pad(logps, (0, width - logps.shape[1])) for logps in alone])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * weights).sum(), model.parameters(), allow_unused=True)

    choose_attention(model, LONGEST, torch.float32)
    assert model.config._attn_implementation == "loop"
    if kind in ("llama", "gpt2"):
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    positions = []
    count_positions(model, positions.append)
    logps = token_logps(model, *pad_batch(EXAMPLES, "cpu"))
    assert positions == [sum(x.length - 1 for x in EXAMPLES)]  # the last token of a sequence predicts none
    fp32_norms = kind in ("gemma", "gemma3_text")
    tolerance = 1e-4 if experts else 1e-6 if fp32_norms else 1e-9
    torch.testing.assert_close(logps, expected, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad((logps * weights).sum(), model.parameters(), allow_unused=True)
    for gradient, other in zip(gradients, wanted):
        torch.testing.assert_close(gradient, other, rtol=100 * tolerance, atol=tolerance)


@pytest.mark.parametrize("what", PADDED)
def test_other_models_keep_their_own_attention_and_their_numbers(what):
    kind, sizes = PADDED[what]
    model = build(kind, sizes, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # Doge's bias and GPT-OSS's sinks have an effect
            parameter.add_(torch.randn_like(parameter) * 0.2)
    own = model.config._attn_implementation
    input_ids, mask = pad_batch(EXAMPLES, "cpu")
    expected = plain_logps(model, input_ids, mask)
    choose_attention(model, LONGEST, torch.float32)
    assert model.config._attn_implementation == own and own not in utils.ATTENTION
    torch.testing.assert_close(token_logps(model, input_ids, mask), expected, rtol=1e-4, atol=1e-4)


OPTIONS = {
    "attention_mask": torch.zeros(1, 1, 1, 1),
    "softcap": 5.0,
    "s_aux": torch.zeros(4),
    "position_bias": torch.zeros(1),
    "sliding_window": 8,  # of the layers alone; the config has none
    "is_causal": True,
    "dropout": 0.1,
    "an_option_of_next_year": 1,
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("attention", utils.ATTENTION)
def test_packed_attention_refuses_what_it_would_ignore(attention, option):
    """Doge's bias, which it passes as a mask, was dropped: log-probs were 0.73 nats off."""
    lengths = torch.tensor([0, 9, 12], dtype=torch.int32)
    settings = dict(attention_mask=None, scaling=0.5, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)
    settings |= dict(max_length_q=9, max_length_k=9, position_ids=torch.arange(12)[None], use_cache=False)
    settings |= dict(sliding_window=9, dropout=0.0, s_aux=None)
    states = torch.randn(1, 4, 12, 8)
    module = torch.nn.Module()
    with pytest.raises(TypeError, match="packed attention has no"):
        settings[option] = OPTIONS[option]
        utils.ATTENTION[attention](module, states, states, states, **settings)


@pytest.mark.parametrize("option", ["attention_mask", "an_option_of_next_year"])
def test_a_model_that_passes_such_an_option_is_padded(option):
    """A layer that adds it, as an edited model would."""
    model = build("llama", SIZES)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, options: (
                args,
                options | {option: distance_bias(options["position_embeddings"])},
            ),
            with_kwargs=True,
        )
    input_ids, mask = pad_batch(EXAMPLES, "cpu")
    expected = plain_logps(model, input_ids, mask)
    assert choose_attention(model, LONGEST, torch.float32) == "sdpa"
    torch.testing.assert_close(token_logps(model, input_ids, mask), expected, rtol=1e-9, atol=1e-9)


def distance_bias(position_embeddings):
    """Returns a causal bias that prefers near tokens, (1, 1, T, T)."""
    positions = torch.arange(position_embeddings[0].shape[1])
    distance = (positions[:, None] - positions).double()
    return (-0.1 * distance).masked_fill(distance < 0, -torch.inf)[None, None]


@pytest.mark.parametrize("attention", utils.ATTENTION)
def test_a_packed_model_does_not_run_without_where_its_sequences_start(attention):
    model = build("llama", SIZES)
    choose_attention(model, LONGEST, torch.float32)
    model.set_attn_implementation(attention)
    with pytest.raises(TypeError, match="cu_seq_lens_q"):
        model(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))


# --- the trial at startup ---


def test_a_kernel_that_lacks_a_head_size_is_left_for_the_next(monkeypatch):
    def lacks(*arguments, **options):
        raise RuntimeError("no head size of 8")

    model = build("llama", SIZES)
    monkeypatch.setattr(utils, "attention_candidates", lambda *_: ["varlen", "loop", "sdpa"])
    monkeypatch.setitem(utils.ATTENTION, "varlen", lacks)
    assert choose_attention(model, LONGEST, torch.float32) == "loop"
    model.set_attn_implementation("sdpa")
    monkeypatch.setitem(utils.ATTENTION, "loop", lacks)
    assert choose_attention(model, LONGEST, torch.float32) == "sdpa"


def test_an_attention_that_sees_the_other_sequence_is_left(monkeypatch):
    def whole_row(module, query, key, value, mask, scaling, **options):
        keys, values = (states.repeat_interleave(2, 1) for states in (key, value))
        output = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)
        return output.transpose(1, 2), None

    model = build("llama", SIZES)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)  # a random model hardly looks at other tokens
        model.lm_head.weight.mul_(20)
    monkeypatch.setitem(utils.ATTENTION, "loop", whole_row)
    assert choose_attention(model, LONGEST, torch.float32) == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "factor"), [("granite", dict(logits_scaling=4.0)), ("cohere", dict(logit_scale=0.0625))]
)
def test_a_model_that_multiplies_its_logits_is_refused(kind, factor, dtype):
    """The model would multiply the log-probs that its head returns."""
    model = build(kind, SIZES | factor, dtype)
    with pytest.raises(utils.InputError, match="--model: .* a factor"):
        choose_attention(model, LONGEST, torch.float32)


def test_the_trial_allows_the_noise_of_the_dtype_in_which_a_model_computes(one_rank):
    """Mamba 2's head returns fp32 logits in bf16 too, and the model was refused as if it had dropout."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8, chunk_size=8)
    model = Mamba2ForCausalLM(Mamba2Config(**sizes, num_heads=4, head_dim=16, n_groups=1)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)
    assert choose_attention(model.bfloat16(), LONGEST, torch.bfloat16) == "eager"
    with pytest.raises(utils.InputError, match="no attention gives the log-probs of a plain forward pass"):
        choose_attention(model, LONGEST, torch.float32)


# --- the head ---

TOLERANCES = {  # {dtype: (nats, relative error of a gradient's norm)}
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-5, 1e-4),
    torch.bfloat16: (2e-5, 6e-3),
}
V = 1000


def draw_head(dtype, tokens: int):
    """Returns hidden states, weight, bias and d_logps."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, 32), (V, 32), (V,), (tokens,)]
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("block", "bias", "softcap", "temperature"),  # several blocks, or one
    [(2**18, False, None, 1.0), (2**18, True, 5.0, 0.7), (2**27, True, 5.0, 0.7)],
)
def test_a_target_that_occurs_500_times_has_an_exact_gradient(
    dtype, block, bias, softcap, temperature, monkeypatch
):
    """In bf16, a sum of 500 rounded gradients would be off by far more than one rounding."""
    monkeypatch.setattr(utils, "CPU_BLOCK", block)
    hidden, weight, b, d_logps = draw_head(dtype, 600)
    targets = torch.cat([torch.full((500,), 777), torch.arange(100)])
    factors = [hidden, weight, b] if bias else [hidden, weight]
    for factor in factors:
        factor.requires_grad_()
    logps = HeadLogps.apply(hidden, targets, weight, b if bias else None, softcap, temperature)
    found = torch.autograd.grad(logps, factors, d_logps.to(logps.dtype))

    logits = hidden.double() @ weight.double().T + (b.double() if bias else 0)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    expected = -F.cross_entropy(logits / temperature, targets, reduction="none")
    nats, error = TOLERANCES[dtype]
    torch.testing.assert_close(logps.double(), expected, rtol=0, atol=nats)
    for gradient, exact in zip(found, torch.autograd.grad(expected, factors, d_logps.double())):
        assert gradient.dtype == dtype
        assert (gradient.double() - exact.double()).norm() <= error * exact.double().norm()
        if len(gradient) == V:  # the rows of the head, of which 777 is the repeated target
            repeated = gradient[777].double() - exact[777].double()
            assert repeated.norm() <= error * exact[777].double().norm()


@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, 2.0)])
def test_the_heads_gradient_is_that_of_finite_differences(bias, softcap, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (260, 4), (260,)]  # hidden, weight, bias
    hidden, weight, b = (torch.randn(*s, generator=generator).double().requires_grad_() for s in shapes)
    targets = torch.tensor([0, 4, 255, 256, 259, 259])

    def logps(hidden, weight, b):
        return HeadLogps.apply(hidden, targets, weight, b if bias else None, softcap, 0.7)

    monkeypatch.setattr(utils, "CPU_BLOCK", 0)  # blocks of 256 and 4 columns
    assert torch.autograd.gradcheck(logps, (hidden, weight, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_loses_nothing_to_the_bf16_units_of_a_cpu(dtype):
    """A result in bf16 would be off by 0.25, and so would be products of rounded fp32 numbers."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((300, 576), (576, 2048)))
    precision = torch.backends.mkldnn.matmul.fp32_precision
    product = utils.matmul_fp32(a, b)
    assert product.dtype == torch.float32
    assert (product.double() - a.double() @ b.double()).abs().max() < 5e-4
    assert torch.backends.mkldnn.matmul.fp32_precision == precision


def test_a_second_backward_pass_gives_the_same():
    hidden, weight, _, d_logps = draw_head(torch.float64, 20)
    factors = [hidden.requires_grad_(), weight.requires_grad_()]
    logps = HeadLogps.apply(hidden, torch.arange(20), weight, None, None, 1.0)
    first = torch.autograd.grad(logps, factors, d_logps, retain_graph=True)
    second = torch.autograd.grad(logps, factors, d_logps)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


# --- statistics and checks ---


def test_means_are_those_of_all_micro_batches(one_rank):
    """A mean of the micro-batches' means would be (2 + 10) / 2."""
    means = utils.Means()
    means.add({"x": torch.tensor([1.0, 2.0, 3.0])})
    means.add({"x": torch.tensor([10.0])})
    mask = torch.tensor([[0.0, 1.0, 1.0]])
    means.add({"tokens": torch.tensor([[5.0, 1.0, 2.0]]), "none": torch.ones(1, 3)}, mask)
    means.add({"never": torch.ones(2)}, torch.tensor([False, False]))  # omitted, not nan
    assert means.reduce() == {"x": 4.0, "tokens": 1.5, "none": 1.0}


@pytest.mark.parametrize(
    ("values", "weights"),
    [((4, 7), (4, 1)), ((4,), (4, 7)), ((4, 1), (4, 7)), ((4, 7), (7,)), ((4, 7), ())],
)
def test_a_mean_whose_weights_have_another_shape_is_refused(values, weights):
    """Losses of sequences with a mask of tokens broadcast: each was counted for every token."""
    with pytest.raises(RuntimeError, match="shape"):
        utils.Means().add({"edited/metric": torch.ones(values)}, torch.ones(weights))


def test_ties_are_half_a_win():
    found = utils.above(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 4.0, 1.0]))
    assert found.tolist() == [1, 0.5, 0, 1]
    statistics = utils.mean_and_error({"above": found})
    # The deviation of 1, 0.5, 0, 1 by hand: the squares of 0.375, 0.125, 0.625, 0.375 over 3.
    assert statistics["above"] == pytest.approx((0.625, (0.6875 / 3) ** 0.5 / 2, 4))


@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_refused(metric, number):
    step = {"step": 3, "loss": 1.0, "grad_norm": 2.0}
    utils.check_finite(step)
    with pytest.raises(utils.InputError, match="step 3: .* lower --lr"):
        utils.check_finite(step | {metric: number})


# --- in a run ---

FLAGS = ["--dataset", PAIRS, "--num-steps", "2", "--batch-size", "8", "--eval-samples", "0"]
FLAGS += ["--checkpoint-every", "0", "--eval-dataset", ""]


def test_neither_model_computes_padding(tmp_path, monkeypatch):
    """In every micro-batch both read the sequences of `pad_batch` alone, without its padding."""
    batches = note_batches(dpo_humanline, monkeypatch)
    read = {"policy": [], "reference": []}
    load = dpo_humanline.load_models

    def load_models(*arguments):
        models = load(*arguments)
        for who, model in zip(read, models):
            count_positions(model, read[who].append)
        return models

    monkeypatch.setattr(dpo_humanline, "load_models", load_models)
    run_here(dpo_humanline, *FLAGS, "--micro-batch-tokens", "60", "--output-dir", tmp_path / "run")
    needed = [sum(x.length - 1 for x in batch) for batch in batches]  # a last token predicts none
    assert len(needed) > 4 and read["policy"] == read["reference"] == needed


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_and_routers_are_those_of_evaluation(checkpointing, tmp_path):
    """PhiMoE's router draws noise in training; a dropout would too. The policy is still the reference."""
    model = build("phimoe", SIZES | {"router_jitter_noise": 0.2, "num_local_experts": 4}, torch.float32)
    model.config.attention_dropout = 0.3
    model.save_pretrained(tmp_path / "policy")
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(tmp_path / "policy")
    flags = [*FLAGS, "--model", tmp_path / "policy", "--dtype", "float32", "--lr", "0"]
    flags += ["--max-prompt-length", "40", "--max-length", "60", "--max-new-tokens", "8"]
    flags += ["--gradient-checkpointing"] if checkpointing else []
    run_here(dpo_humanline, *flags, "--output-dir", tmp_path / "run")
    for line in metrics(tmp_path / "run"):
        assert line["humanline/log_ratio_abs_mean"] < 1e-6 and line["grad_norm"] > 0
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert final.config.router_jitter_noise == 0.2 and final.config.attention_dropout == 0.3


@pytest.mark.slow
def test_a_model_with_weights_that_get_no_gradient_resumes_bit_for_bit(tmp_path):
    """An expert that no token reaches has no moments."""
    experts = dict(moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=16)
    build("ernie4_5_moe", SIZES | experts, torch.float32).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(tmp_path / "model")
    flags = [*FLAGS, "--model", str(tmp_path / "model"), "--dtype", "float32", "--lr", "1e-3"]
    flags += ["--num-steps", "4", "--max-length", "64", "--checkpoint-every", "2"]
    flags += ["--max-new-tokens", "8", "--max-prompt-length", "16"]
    run_ranks(2, [[*flags, "--output-dir", str(tmp_path / "run")]])
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    shutil.rmtree(max((tmp_path / "cut" / "checkpoints").iterdir()))  # as if killed before step 4
    run_ranks(2, [["--resume", str(tmp_path / "cut")]])
    assert metrics(tmp_path / "cut", True) == metrics(tmp_path / "run", True)
    weights = [(tmp_path / name / "final/model.safetensors").read_bytes() for name in ("cut", "run")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_compiled_blocks_give_the_same_and_are_compiled_once(one_rank):
    """Also inside of blocks that are computed again in backward."""
    args = parse_args(dpo_humanline, ["--dtype", "float32"])
    torch._dynamo.reset()
    models = []
    for args.compile in (False, True):
        args.gradient_checkpointing = args.compile
        policy, _ = dpo_humanline.load_models(args, torch.device("cpu"))  # with the loop
        models.append(policy)
    draw = random.Random(0)
    graphs = []
    for step in range(6):
        examples = []
        for _ in range(4 + step):
            ids = [draw.randrange(5, 30) for _ in range(draw.randrange(6, 40))]
            examples.append(Example("", ids[:3], ids[3:]))
        input_ids, mask = pad_batch(examples, "cpu")
        results = []
        for model in models:
            logps = token_logps(model, input_ids, mask)
            F.softplus(logps).mean().backward()
            gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
            results.append([logps.detach(), *gradients])
            model.zero_grad()
        for plain, compiled in zip(*results):
            torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[-1] == graphs[1]
