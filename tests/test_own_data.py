"""Data as people have it: tool calls, reasoning, begun answers, Arrow's nulls and JSON, other columns.

A row is trained as a person who reads it would expect, or it is refused with a line that says why.
"""

import pytest
import torch
from test_data import bytes_or_pieces
from transformers import AutoConfig, AutoModelForCausalLM

import grpo_humanline
import grpo_math_humanline
import utils
from support import sampling

# --- messages ---


# --- columns ---


# --- truncation ---


# --- edits ---


def test_an_adapter_or_a_head_that_is_no_linear_layer_is_refused_early():
    settings = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=64, **settings))

    class Adapter(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden)

    head, adapter = model.lm_head, Adapter(16, 64, bias=False)
    model.lm_head = adapter
    with pytest.raises(utils.InputError, match="adapters .*see docs/elsewhere.md.* are not supported"):
        utils.choose_attention(model, 32)
    model.lm_head = head
    utils.choose_attention(model, 32)
    model.peft_config = {"default": None}
    with pytest.raises(utils.InputError, match="adapters .*see docs/elsewhere.md.* are not supported"):
        utils.choose_attention(model, 32)


# --- rounding ---


@pytest.mark.parametrize("script", [grpo_humanline, grpo_math_humanline])
def test_k3_keeps_its_digits_near_zero(script):
    """exp(-x) + x - 1 was off by 17% for log-ratios of 1e-3 in fp32, and 0 or negative for smaller ones."""
    log_ratio = torch.logspace(-5, -2, 200).repeat(2, 1)
    log_ratio[1] *= -1
    k3 = script.k3(log_ratio)
    exact = torch.expm1(-log_ratio.double()) + log_ratio.double()
    assert (k3 >= 0).all() and ((k3 - exact).abs() <= 2e-7 * log_ratio.abs() + 2e-2 * exact).all()
    plain = (-log_ratio).exp() + log_ratio - 1
    assert (plain - exact).abs().mean() > 3 * (k3 - exact).abs().mean()


# --- the format of an answer that the template has begun ---


# --- what a reward model reads ---


class NoModel(torch.nn.Module):
    """Scores every text with 0."""

    def __init__(self):
        super().__init__()
        self.config = AutoConfig.for_model("llama", max_position_embeddings=100, pad_token_id=0)
        self.embedding = torch.nn.Embedding(1000, 1)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask):
        return type("Output", (), {"logits": torch.zeros(len(input_ids), 1)})


def test_the_first_text_that_a_reward_model_reads_is_printed_once(one_rank, capsys):
    """Question and answer were glued together if the policy had a template and the reward model had none."""
    sample = utils.Example([{"role": "user", "content": "What is 2 + 2?"}], [1], text="Four.", finished=False)
    model, tokenizer = NoModel(), bytes_or_pieces("bytes", None)
    for _ in range(2):
        sampling.reward_scores(model, tokenizer, torch.device("cpu"), "\n", [sample, sample])
    assert capsys.readouterr().out == "the reward model reads 'What is 2 + 2?\\nFour.'\n"
    long = sample._replace(text="x" * 100)
    with pytest.raises(utils.InputError, match="114|115 tokens, but the model has 100 positions"):
        sampling.reward_scores(model, tokenizer, torch.device("cpu"), "\n", [long])


def test_a_reward_model_may_return_a_score_alone(one_rank):
    """ArmoRM's own code returns a score beside the logits, and another model's may have no logits."""

    class Scores(NoModel):
        def forward(self, input_ids, attention_mask):
            return type("Output", (), {"score": torch.ones(len(input_ids))})

    sample = utils.Example("What is 2 + 2?", [1], text="Four.")
    tokenizer = bytes_or_pieces("bytes", None)
    assert sampling.reward_scores(Scores(), tokenizer, torch.device("cpu"), "", [sample]).tolist() == [1]


def test_an_edit_that_returns_a_wrong_shape_is_told():
    said = "dpo_loss returned a tensor of shape \\(2, 2\\) instead of \\(2,\\)"
    with pytest.raises(ValueError, match=said):
        utils.check_shape("dpo_loss", torch.zeros(2, 2), (2,))
    utils.check_shape("dpo_loss", torch.zeros(2, 2), (2, 2))
