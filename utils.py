"""Log-probability and evaluation helpers shared by the four humanline scripts.

B sequences, T tokens, V vocabulary, D hidden size. Log-probabilities are in nats and fp32; a mask is 1 at completion
tokens (the end-of-turn token included) and 0 elsewhere.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForSequenceClassification, AutoTokenizer

# A prompt and a completion, as token ids.
Ids = tuple[Sequence[int], Sequence[int]]


# --- token ids ----------------------------------------------------------------------------------------------------


def to_text(tokenizer, prompt, completion):
    """Brings a prompt and a completion, each a string or a list of messages, into the tokenizer's form.

    Returns:
        The prompt as messages (as text if there is no chat template) and the completion as text, which is None if the
        completion is not one assistant message.

    Raises:
        ValueError: content that is not a string, or messages without a chat template.
    """
    turns = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    if isinstance(prompt, str) and tokenizer.chat_template:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and not tokenizer.chat_template:
        raise ValueError("a conversation needs a chat template, and the tokenizer has none: pass --chat-template FILE")
    for message in [*turns, *(prompt if isinstance(prompt, list) else [{"content": prompt}])]:
        if not isinstance(message.get("content"), str):
            raise ValueError(f"content must be a string, not {type(message.get('content')).__name__}")
    return prompt, turns[0]["content"] if [turn["role"] for turn in turns] == ["assistant"] else None


def encode_prompt(tokenizer, prompt) -> list[int]:
    """Prompt token ids. Training, sampling and evaluation all get them here."""
    if isinstance(prompt, str):
        return tokenizer(prompt).input_ids
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def encode_completion(tokenizer, prompt, completion: str, eos_ids: set[int]) -> list[int]:
    """Completion token ids up to and with the end-of-turn token, which is added where the template writes none.

    Raises:
        ValueError: the template does not render the prompt the same way once it is answered.
    """
    if isinstance(prompt, list):
        before = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        messages = [*prompt, {"role": "assistant", "content": completion}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        if not whole.startswith(before):
            raise ValueError("the chat template renders a prompt differently once it is answered: pass --chat-template")
        completion = whole[len(before) :]
    ids = tokenizer(completion, add_special_tokens=False).input_ids
    end = max((i for i, token in enumerate(ids) if token in eos_ids), default=-1)
    if end >= 0 and not tokenizer.decode(ids[end + 1 :]).strip():
        return ids[: end + 1]  # what a template writes after the end of the turn is never sampled
    return [*ids, tokenizer.eos_token_id]


# --- token log-probabilities ---------------------------------------------------------------------------------------


def pad_batch(sequences: list[Ids], pad_id: int, device: torch.device, multiple_of: int = 1):
    """Pads (prompt, completion) id sequences on the right, to the longest of them.

    Args:
        sequences: B pairs of prompt ids and completion ids.
        pad_id: any valid token id. It is never attended to and never scored, so it may equal the end-of-turn id.
        multiple_of: T is rounded up to a multiple of it.

    Returns:
        input_ids (B, T) int64 and mask (B, T) fp32, 1 at completion tokens.
    """
    length = max(len(prompt) + len(completion) for prompt, completion in sequences)
    length = math.ceil(length / multiple_of) * multiple_of
    input_ids = torch.full((len(sequences), length), pad_id, dtype=torch.long)
    mask = torch.zeros(len(sequences), length)
    for i, (prompt, completion) in enumerate(sequences):
        end = len(prompt) + len(completion)
        input_ids[i, :end] = torch.as_tensor([*prompt, *completion])
        mask[i, len(prompt) : end] = 1
    return input_ids.to(device), mask.to(device)


def token_logps(model, input_ids, mask, temperature: float = 1.0, chunk_size: int = 1024):
    """log π(y_t | x, y_<t) of every completion token, without ever holding logits of shape (B, T, V).

    For the duration of the call the model's output head selects the hidden states that predict completion tokens and
    returns their log-probabilities, `chunk_size` tokens at a time, each chunk's logits recomputed in the backward pass.
    It works inside the model's own forward because that is where FSDP2 has the head's weight gathered. Logits are
    computed in fp32 whatever the compute dtype: a bf16 logit of magnitude 16 is spaced 0.125 apart, the log-ratios of
    humanline syncing are of order 1e-3.

    Args:
        model: a transformers causal LM, plain or wrapped with FSDP2, with an `nn.Linear` head (tied or not).
        input_ids: (B, T), padded on the right. No attention mask is needed: in a causal model no real token sees them.
        mask: (B, T), 1 at the tokens to score. Column 0 must be 0: nothing predicts the first token.
        temperature: logits are divided by it, as a sampler does.
        chunk_size: tokens whose logits, (chunk_size, V) in fp32, exist at a time.

    Returns:
        (B, T) fp32, 0 where mask is 0. Differentiable; exact, not approximate.

    Raises:
        ValueError: the first token is marked as a completion token, or the model rescales its logits after the head.
    """
    selected = mask.bool()
    if selected[:, 0].any():
        raise ValueError("token_logps: the first token of a sequence has no prediction; prepend a prompt or BOS token")
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"token_logps: models with config.{name} (here {getattr(config, name)}) are not supported")
    softcap = getattr(config, "final_logit_softcapping", None)
    targets = input_ids[selected]  # (N,)

    def chunk_logps(hidden, targets, weight, bias):  # (n, D), (n,) -> (n,)
        logits = F.linear(hidden.to(weight.dtype), weight, bias)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        return -F.cross_entropy(logits / temperature, targets, reduction="none")

    def head_forward(hidden):  # (B, T, D) -> (N,)
        hidden = hidden[:, :-1][selected[:, 1:]]
        dtype = torch.promote_types(head.weight.dtype, torch.float32)
        weight, bias = head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
        chunks = zip(hidden.split(chunk_size), targets.split(chunk_size))
        return torch.cat(
            [checkpoint(chunk_logps, *c, weight, bias, use_reentrant=False, preserve_rng_state=False) for c in chunks]
        )

    head.forward = head_forward
    if softcap:
        config.final_logit_softcapping = None  # applied above, and must not be applied to log-probabilities again
    try:
        flat = model(input_ids=input_ids, use_cache=False).logits  # (N,)
    finally:
        del head.forward
        if softcap:
            config.final_logit_softcapping = softcap
    return torch.zeros_like(mask, dtype=flat.dtype).masked_scatter(selected, flat)


@torch.no_grad()
def sequence_logps(model, sequences: list[Ids], pad_id: int, device: torch.device, batch_tokens: int = 16384):
    """Summed completion log-probabilities of a whole data set, shared out over the ranks.

    Batches are cut from the length-sorted sequences before they are dealt to the ranks, so that the numbers do not
    depend on how many ranks there are. Every rank runs the same number of forward passes, as FSDP requires.

    Args:
        sequences: N pairs of prompt ids and completion ids.
        batch_tokens: padded tokens per forward pass, about.

    Returns:
        (N,) float64 on the CPU, in nats, the same on every rank.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i][0]) + len(sequences[i][1]), reverse=True)
    batches, start = [], 0
    while start < len(order):
        longest = sum(map(len, sequences[order[start]]))
        batches.append(order[start : start + max(1, batch_tokens // longest)])
        start += len(batches[-1])
    logps = torch.zeros(len(sequences), dtype=torch.float64, device=device)
    for first in range(0, len(batches), world):
        batch = batches[min(first + rank, len(batches) - 1)]
        sums = token_logps(model, *pad_batch([sequences[i] for i in batch], pad_id, device)).double().sum(-1)
        if first + rank < len(batches):
            logps[batch] = sums
    dist.all_reduce(logps)
    return logps.cpu()


# --- generation ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_weights(sampler, policy) -> None:
    """Copies the FSDP2-sharded policy into an unsharded model of the same architecture, one parameter at a time."""
    for target, source in zip(sampler.parameters(), policy.parameters(), strict=True):
        target.copy_(source.full_tensor())


@torch.no_grad()
def generate(
    model,
    prompts: list[Sequence[int]],
    *,
    seed: int,
    eos_ids: Sequence[int],
    pad_id: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    batch_size: int = 256,
) -> list[list[int]]:
    """Samples one completion for every prompt with transformers, shared out over the ranks.

    Prompts are cut into batches of `batch_size` before they are dealt to the ranks, and a batch's seed comes from
    (seed, the batch's position), so the completions do not depend on the number of ranks.

    Args:
        model: an unsharded causal LM, the same on every rank.
        prompts: prompt ids, as training sees them.
        eos_ids: every id that ends a turn.
        max_new_tokens: tokens; a completion that reaches it without an end-of-turn token is returned as it is.
        temperature: 0 is greedy decoding.
        top_p: nucleus probability mass, in (0, 1].

    Returns:
        Completion ids in the order of `prompts`, up to and including the first end-of-turn token, on every rank.
    """
    device = next(model.parameters()).device
    mine = {}
    for batch in range(dist.get_rank(), math.ceil(len(prompts) / batch_size), dist.get_world_size()):
        rows = prompts[batch * batch_size : (batch + 1) * batch_size]
        width = max(map(len, rows))
        input_ids = torch.tensor([[pad_id] * (width - len(row)) + [*row] for row in rows], device=device)
        attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(np.random.SeedSequence((seed, batch)).generate_state(1)[0]))
            output = model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                max_new_tokens=max_new_tokens,
                eos_token_id=list(eos_ids),
                pad_token_id=pad_id,
                **(sampling if temperature > 0 else {"do_sample": False}),
            )
        for i, ids in enumerate(output[:, width:].tolist()):
            ends = [t for t, token in enumerate(ids) if token in eos_ids]
            mine[batch * batch_size + i] = ids[: ends[0] + 1] if ends else ids
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    merged = {index: ids for part in parts for index, ids in part.items()}
    return [merged[i] for i in range(len(prompts))]


# --- reward model and statistics -----------------------------------------------------------------------------------


def load_reward_model(name: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool):
    """A sequence classifier with one output, and its tokenizer.

    Raises:
        ValueError: it has several outputs.
    """
    load = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    model = AutoModelForSequenceClassification.from_pretrained(name, **load).to(device).eval()
    if model.config.num_labels != 1:
        raise ValueError(f"the model has {model.config.num_labels} outputs, and a reward model has one")
    return model, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


@torch.no_grad()
def reward_scores(model, tokenizer, samples: list[tuple], batch_tokens: int = 16384) -> torch.Tensor:
    """Scores of a sequence-classification reward model with one output, shared out over the ranks.

    Args:
        model: an `AutoModelForSequenceClassification` with one label, the same on every rank.
        tokenizer: the reward model's own; its chat template renders the conversation when it has one.
        samples: (prompt, completion text, finished) with the prompt a string or a list of messages. An unfinished
            completion is rendered without the end of its turn.

    Returns:
        (N,) float64 on the CPU, in the order of `samples`, the same on every rank.
    """
    device = next(model.parameters()).device
    encoded = []
    for prompt, completion, finished in samples:
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            messages = [*messages, {"role": "assistant", "content": completion}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=not finished)
            encoded.append(tokenizer(text, add_special_tokens=False).input_ids)
        else:
            encoded.append(tokenizer(prompt + completion + (tokenizer.eos_token or "") * finished).input_ids)
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]), reverse=True)
    scores = torch.zeros(len(encoded), dtype=torch.float64, device=device)
    config, start, turn = model.config.get_text_config(), 0, 0
    pad_id = config.pad_token_id
    while start < len(order):
        batch = order[start : start + max(1, batch_tokens // len(encoded[order[start]]))]
        start, turn = start + len(batch), turn + 1
        if turn % dist.get_world_size() != dist.get_rank():
            continue
        if pad_id is None:  # the model reads the last token that is not padding, so padding must end no sequence
            last = {encoded[i][-1] for i in batch}
            config.pad_token_id = next(i for i in range(config.vocab_size) if i not in last)
        width = len(encoded[batch[0]])  # the longest comes first
        input_ids = torch.tensor(
            [encoded[i] + [config.pad_token_id] * (width - len(encoded[i])) for i in batch], device=device
        )
        attention_mask = torch.tensor([[1] * len(encoded[i]) + [0] * (width - len(encoded[i])) for i in batch])
        logits = model(input_ids=input_ids, attention_mask=attention_mask.to(device)).logits  # (b, 1)
        scores[batch] = logits[:, 0].double()
    dist.all_reduce(scores)
    return scores.cpu()


def mean_and_se(values) -> tuple[float, float]:
    """Mean and standard error of the mean (sample standard deviation / √n; nan for a single value)."""
    values = torch.as_tensor(values, dtype=torch.float64)
    return values.mean().item(), (values.std() / math.sqrt(len(values))).item()
