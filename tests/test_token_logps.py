"""token_logps against log_softmax of full logits."""

import pytest
import torch
from conftest import TOY
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from utils import Example, pad_batch, token_logps

SEQUENCES = [([1, 2, 3], [4, 5, 6, 7, 5]), ([9, 8], [7]), ([1], [30, 31, 32, 33, 34, 35, 36, 5])]
EXAMPLES = [Example(row, "", *sequence) for row, sequence in enumerate(SEQUENCES, 1)]


def full_logps(model, input_ids, mask, temperature=1.0):
    """The textbook way: all logits, log-softmax, gather."""
    logits = model(input_ids).logits / temperature
    logps = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(logps, (1, 0)) * mask


def tiny_gemma2():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma2Config(vocab_size=43, final_logit_softcapping=3.0, **sizes, **heads)
    return Gemma2ForCausalLM(config).eval()


def tiny_gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=43, n_embd=32, n_layer=2, n_head=2, n_positions=64)).eval()


MODELS = {
    "untied": lambda tied: AutoModelForCausalLM.from_pretrained(TOY / "policy"),
    "tied": lambda tied: AutoModelForCausalLM.from_pretrained(tied),
    "softcapped": lambda tied: tiny_gemma2(),
    "absolute positions": lambda tied: tiny_gpt2(),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_logits", [300, 1000, 2**26])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_equal_full_log_softmax(name, temperature, max_logits, dtype, tied_policy):
    model = MODELS[name](tied_policy).to(dtype)
    input_ids, mask = pad_batch(EXAMPLES, 0, "cpu")
    logps = token_logps(model, input_ids, mask, temperature, max_logits)
    expected = full_logps(model, input_ids, mask, temperature)
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
    input_ids, mask = pad_batch(EXAMPLES, 0, "cpu")
    with torch.no_grad():
        hidden = model.model(input_ids).last_hidden_state
        logits = hidden.float() @ model.lm_head.weight.float().T
        expected = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
        logps = token_logps(model, input_ids, mask)
    torch.testing.assert_close(logps[:, 1:], expected * mask[:, 1:], rtol=1e-6, atol=1e-6)
    # what bf16 logits would have cost
    bf16_logits = (hidden @ model.lm_head.weight.T).float()
    rounded = bf16_logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
    assert (rounded * mask[:, 1:] - logps[:, 1:]).abs().max() > 1e-3


def test_padding_changes_nothing():
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy")
    longest = Example(4, "", [1] * 24, [5] * 8)
    narrow = token_logps(model, *pad_batch(EXAMPLES, 5, "cpu"))
    wide = token_logps(model, *pad_batch([*EXAMPLES, longest], 5, "cpu"))[:3]
    torch.testing.assert_close(wide[:, : narrow.shape[1]], narrow, rtol=1e-6, atol=1e-6)
    assert wide.shape[1] == 32 and (wide[:, narrow.shape[1] :] == 0).all()


def test_the_head_never_sees_prompt_tokens_and_is_restored():
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy")
    sizes, linear = [], torch.nn.functional.linear

    def spy(hidden, weight, bias=None):
        if hidden.dim() == 2:  # of the head, not of the decoder
            sizes.append((len(hidden), len(weight)))
        return linear(hidden, weight, bias)

    torch.nn.functional.linear = spy
    try:
        with torch.no_grad():
            token_logps(model, *pad_batch(EXAMPLES, 0, "cpu"), max_logits=500)
    finally:
        torch.nn.functional.linear = linear
    assert {tokens for tokens, _ in sizes} == {14}  # of completions
    assert sum(rows for _, rows in sizes) == model.config.vocab_size
    assert all(14 * rows <= 500 for _, rows in sizes)
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, model.config.vocab_size)


def test_an_unpredictable_first_token_is_refused():
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy")
    with pytest.raises(ValueError, match="first token"):
        token_logps(model, torch.tensor([[4, 5]]), torch.ones(1, 2))
