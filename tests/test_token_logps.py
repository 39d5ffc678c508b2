"""token_logps against log_softmax of full logits."""

import pytest
import torch
from conftest import TOY
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, PhiConfig

import utils
from utils import Example, HeadLogps, choose_attention, pad_batch, token_logps

SEQUENCES = [([1, 2, 3], [4, 5, 6, 7, 5]), ([9, 8], [7]), ([1], [30, 31, 32, 33, 34, 35, 36, 5])]
EXAMPLES = [Example("", *sequence) for sequence in SEQUENCES]
SIZES = {"vocab_size": 700, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "softcapped": Gemma2Config(final_logit_softcapping=3.0, head_dim=16, num_key_value_heads=1, **SIZES),
    "absolute positions": GPT2Config(vocab_size=700, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    "a head with a bias": PhiConfig(**SIZES),
}


def full_logps(model, input_ids, mask, temperature=1.0):
    """The textbook way: all logits, log-softmax, gather."""
    logits = model(input_ids).logits / temperature
    logps = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(logps, (1, 0)) * mask


def load(name, tied):
    if name in CONFIGS:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    return AutoModelForCausalLM.from_pretrained(tied if name == "tied" else TOY / "policy")


@pytest.mark.parametrize("name", ["untied", "tied", *CONFIGS])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("block", [256, 1024])  # several blocks, or one
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_equal_log_softmax(name, temperature, block, dtype, tied_policy, monkeypatch):
    monkeypatch.setattr(utils, "CPU_BLOCK", 14 * block)  # 14 tokens of completions
    model = load(name, tied_policy).to(dtype)
    input_ids, mask = pad_batch(EXAMPLES, "cpu")
    logps = token_logps(model, input_ids, mask, temperature)
    expected = full_logps(model, input_ids, mask, temperature)
    assert logps.dtype == dtype and logps.shape == mask.shape
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(logps, expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((logps * weights).sum(), model.parameters())
    expected = torch.autograd.grad((expected * weights).sum(), model.parameters())
    for gradient, wanted in zip(gradients, expected):
        torch.testing.assert_close(gradient, wanted, rtol=100 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_the_heads_gradient_is_that_of_finite_differences(softcap, bias, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (260, 4), (260,)]  # hidden, weight, bias
    hidden, weight, b = (torch.randn(*s, generator=generator).double().requires_grad_() for s in shapes)
    targets = torch.tensor([0, 4, 255, 256, 259, 259])

    def logps(hidden, weight, b):
        return HeadLogps.apply(hidden, targets, weight, b if bias else None, softcap, 0.7)

    logits = hidden @ weight.T + (b if bias else 0)
    capped = softcap * torch.tanh(logits / softcap) if softcap else logits
    wanted = (capped / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    monkeypatch.setattr(utils, "CPU_BLOCK", 0)  # blocks of 256 and 4 columns
    for kept in (1559, 1560):  # of 6 · 260 logits
        values = logps(hidden, weight, b)
        assert bool(values.grad_fn.kept) == (kept == 1560)
        torch.testing.assert_close(values, wanted, rtol=1e-12, atol=1e-12)
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


def test_logits_are_fp32_when_the_model_is_bf16():
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy", dtype=torch.bfloat16)
    input_ids, mask = pad_batch(EXAMPLES, "cpu")
    with torch.no_grad():
        hidden = model.model(input_ids).last_hidden_state
        logits = hidden.float() @ model.lm_head.weight.float().T
        expected = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
        logps = token_logps(model, input_ids, mask)
    torch.testing.assert_close(logps[:, 1:], expected * mask[:, 1:], rtol=1e-6, atol=1e-6)


def test_the_head_never_sees_prompt_tokens_and_is_restored(monkeypatch):
    model = load("absolute positions", None)
    sizes, matmul = [], utils.matmul_fp32

    def spy(hidden, columns):
        sizes.append((len(hidden), columns.shape[1]))
        return matmul(hidden, columns)

    monkeypatch.setattr(utils, "matmul_fp32", spy)
    monkeypatch.setattr(utils, "CPU_BLOCK", 14 * 256)
    with torch.no_grad():
        token_logps(model, *pad_batch(EXAMPLES, "cpu"))
    assert sizes == [(14, 256), (14, 256), (14, 188)]  # 14 tokens of completions
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 700)


@pytest.mark.parametrize("attention", ["sdpa", "loop"])  # with padding, or packed
@pytest.mark.parametrize("empty", [(0,), (1, 2), (0, 1, 2)])
def test_a_sequence_whose_mask_is_all_0_has_no_effect(attention, empty):
    """An edited script may filter overlong samples in this way."""
    model = load("untied", None).double()
    input_ids, mask = pad_batch(EXAMPLES, "cpu")
    mask[list(empty)] = 0
    expected = full_logps(model, input_ids, mask)
    choose_attention(model, 16)
    model.set_attn_implementation(attention)
    logps = token_logps(model, input_ids, mask)
    torch.testing.assert_close(logps, expected, rtol=1e-9, atol=1e-9)
    assert (logps[list(empty)] == 0).all()
    gradients = torch.autograd.grad(logps.square().sum(), model.parameters())
    expected = torch.autograd.grad(expected.square().sum(), model.parameters())
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-9)


def test_an_unpredictable_first_token_is_refused():
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy")
    with pytest.raises(ValueError, match="first token"):
        token_logps(model, torch.tensor([[4, 5]]), torch.ones(1, 2))
