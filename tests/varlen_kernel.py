"""A CPU kernel for torch's varlen_attn, which has one on CUDA alone: slow, and exact in the inputs' dtype."""

import torch
from torch.nn.attention import varlen


def attention_weights(query, key, starts, scale):
    """Returns the weights (heads, ΣT, ΣT) of causal attention within each sequence, and the heads' keys."""
    assert starts.dtype == torch.int32 and starts[0] == 0 and starts[-1] == len(query)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    positions = torch.arange(len(query))
    sequence = torch.searchsorted(starts, positions, right=True)
    seen = (sequence[:, None] == sequence) & (positions[:, None] >= positions)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(~seen, -torch.inf).softmax(-1), key


def attend(query, key, value, starts, starts_k, longest, longest_k, is_causal, scale, *rest):
    """Returns the output, lse (which `attend_backward` does not use) and the random state."""
    assert is_causal and starts_k is starts and longest == longest_k == starts.diff().max()
    weights, _ = attention_weights(query, key, starts, scale)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    output = like(query, torch.einsum("hqk,khd->qhd", weights, value))
    lse = torch.zeros(query.shape[1], len(query))
    return output, lse, torch.zeros(2, dtype=torch.uint64)


def attend_backward(
    d_output, query, given_key, given_value, output, lse, starts, starts_k, longest, longest_k, *settings
):
    """Returns the gradients of query, key and value."""
    _, _, scale, *_ = settings  # is_causal, random state, scale, window
    shape = given_key.shape
    weights, key = attention_weights(query, given_key, starts, scale)
    value = given_value.repeat_interleave(query.shape[1] // shape[1], 1)
    d_weights = torch.einsum("qhd,khd->hqk", d_output, value)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * scale
    d_query = torch.einsum("hqk,khd->qhd", d_scores, key)
    d_key = torch.einsum("hqk,qhd->khd", d_scores, query)
    d_value = torch.einsum("hqk,qhd->khd", weights, d_output)
    shared = (shape[0], shape[1], -1, shape[2])
    d_key = d_key.reshape(shared).sum(2)
    d_value = d_value.reshape(shared).sum(2)
    return like(query, d_query), like(given_key, d_key), like(given_value, d_value)


def like(tensor, values):
    """Returns the values with the strides of a tensor, as the CUDA kernel does."""
    return torch.empty_like(tensor).copy_(values)


def register():
    """From now on, varlen_attn runs on the CPU of this process."""
    varlen._varlen_attn.register_kernel("cpu")(attend)
    varlen._varlen_attn_backward.register_kernel("cpu")(attend_backward)
