"""Log-probability and evaluation helpers shared by the four humanline scripts.

B sequences, T tokens, N completion tokens, V vocabulary, D hidden size. Log-probs are in nats. A mask is 1 at
completion tokens, else 0.
"""

import contextlib
import gc
import heapq
import math
import os
import re
import time
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import chat_template_utils

DIVERGED = "not finite: look at the model and the data, or lower --lr or --max-grad-norm"


# === Token ids ===
class Example(NamedTuple):
    row: int  # of the data set, from 1
    prompt: str | list  # text, or messages if there is a chat template
    prompt_ids: list[int]
    completion_ids: list[int] = []  # ends with the end-of-turn token, unless it was cut
    reward: float = 0.0  # a score; chosen 1, rejected 0; nan for a sample without
    text: str = ""  # of a sample
    finished: bool = True  # a sample that ended by itself
    answer: str = ""  # gold, of a math problem

    @property
    def length(self):
        return len(self.prompt_ids) + len(self.completion_ids)

    def to_train(self, max_length):
        """A sample without texts, cut at `max_length` tokens."""
        completion_ids = self.completion_ids[: max_length - len(self.prompt_ids)]
        return self._replace(prompt="", completion_ids=completion_ids, text="", answer="")


class Tokens(NamedTuple):
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_ids: set[int]  # every id that ends a turn
    pad_id: int  # any will do
    vocab_size: int  # rows of the model's embedding


def load_tokens(args, config):
    """The tokenizer with --chat-template and --eos-token. Raises ValueError if they do not fit the model."""
    text_config = config.get_text_config()
    vocab_size = text_config.vocab_size
    rope = getattr(text_config, "rope_parameters", None) or {"rope_type": "none"}
    kinds = re.findall("none|dynamic|longrope", str(rope))  # some models have one for each type of layer
    positions = rope.get("original_max_position_embeddings") or max_positions(text_config)
    longest = max(args.max_length, args.max_prompt_length + args.max_new_tokens)
    # Learned positions end there. Beyond, one long sequence changes dynamic or long RoPE for its whole pass.
    if kinds and longest > positions:
        raise ValueError(
            f"--max-length, --max-new-tokens: {longest} tokens, and it has {positions} positions"
        )

    tokenizer = load_tokenizer(args.model, args.trust_remote_code)
    if args.chat_template:
        template = Path(args.chat_template).read_text(encoding="utf-8", errors="replace")
        tokenizer.chat_template = template or " "  # an empty one is a template that loses all text
    if args.eos_token:
        tokenizer.eos_token = args.eos_token
    if tokenizer.eos_token_id is None or tokenizer.eos_token not in tokenizer.get_vocab():
        raise ValueError(
            f"its vocabulary has no end-of-turn token {args.eos_token!r}: name one with --eos-token"
        )
    check_ids(tokenizer, [tokenizer.eos_token_id], vocab_size)

    # Chat models often end a turn with another token than the tokenizer's; their configurations name it.
    configs = [text_config]
    with contextlib.suppress(OSError):  # not every model has a generation config
        configs.append(GenerationConfig.from_pretrained(args.model))
    eos_ids = {tokenizer.eos_token_id}
    for source in configs:
        ids = source.eos_token_id
        if isinstance(ids, int):
            eos_ids.add(ids)
        elif ids:
            eos_ids.update(ids)
    pad_id = tokenizer.pad_token_id
    if pad_id is None or pad_id >= vocab_size:
        pad_id = tokenizer.eos_token_id
    return Tokens(tokenizer, eos_ids, pad_id, vocab_size)


def max_positions(text_config):
    mpt = getattr(text_config, "max_seq_len", None)  # MPT's name
    return getattr(text_config, "max_position_embeddings", mpt) or math.inf


def load_tokenizer(name, trust_remote_code):
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, mistral_format=False)


def check_ids(tokenizer, ids: list[int], vocab_size):
    """Raises ValueError if an id is beyond the rows of the embedding."""
    largest = max(ids, default=0)
    if largest >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(f"token {token!r} has the id {largest}, and the embedding has {vocab_size} rows")


class FixedDate(datetime):
    """Templates that write the date would make a run depend on its day."""

    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


chat_template_utils.datetime = FixedDate  # which `strftime_now` in a template calls


def render(tokenizer, messages, **options):
    """The messages in the chat template. Raises ValueError if it refuses them."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        raise ValueError(f"the chat template cannot render it: {error}") from error


def show_tokens(tokens, example):
    """Prints what ends a turn, how a prompt ends, and how its completion begins and ends, in tokens."""
    parts = {
        "end of turn": sorted(tokens.eos_ids),
        "a prompt ends": example.prompt_ids[-8:],
        "its completion begins": example.completion_ids[:8],
        "and ends": example.completion_ids[-4:],
    }
    for name, ids in parts.items():
        if ids and dist.get_rank() == 0:
            print(f"{name}:", *map(repr, tokens.tokenizer.convert_ids_to_tokens(ids)))


def encode_prompt(tokenizer, prompt: str | list):
    """Prompt ids, the same for training, sampling and evaluation."""
    if isinstance(prompt, list):
        text = render(tokenizer, prompt, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids
    ids = tokenizer(prompt).input_ids
    # Some tokenizers add an end of turn, which belongs after the completion.
    if ids[-1:] == [tokenizer.eos_token_id] and not prompt.endswith(tokenizer.eos_token):
        return ids[:-1]
    return ids


def encode_completion(tokens, prompt: str | list, prompt_ids: list[int], completion: str) -> tuple:
    """Completion ids up to and with the end of turn, and ""; or [] and why they cannot train.

    They are what follows the prompt's ids in those of the whole text. The end of turn is added where the
    template writes none. Raises ValueError if the template changes the prompt.
    """
    tokenizer, eos_ids = tokens.tokenizer, tokens.eos_ids
    if isinstance(prompt, str):
        answer = completion
        text_ids = tokenizer(prompt + completion).input_ids
    else:
        before = render(tokenizer, prompt, add_generation_prompt=True)
        text = render(tokenizer, [*prompt, {"role": "assistant", "content": completion}])
        if not text.startswith(before):
            raise ValueError(
                "the chat template renders a prompt differently once it is answered: pass --chat-template"
            )
        answer = text[len(before) :]
        text_ids = tokenizer(text, add_special_tokens=False).input_ids

    ids = strip_prompt(tokenizer, text_ids, prompt_ids, answer)
    end = next((i for i, token in enumerate(ids, 1) if token in eos_ids), None)
    if end is None:
        return [*ids, tokenizer.eos_token_id], ""
    rest = [token for token in ids[end:] if token not in eos_ids]
    if tokenizer.decode(rest).strip():
        return [], "end of turn inside the completion"
    return ids[:end], ""


def strip_prompt(tokenizer, text_ids: list[int], prompt_ids: list[int], answer: str):
    """The answer's ids in those of the whole text, or by itself if a token spans prompt and answer."""
    if text_ids[: len(prompt_ids)] == prompt_ids:
        return text_ids[len(prompt_ids) :]
    # SentencePiece puts a space in front of a text, but not behind a character with which nothing merges.
    for anchor in ("\n", "a", ""):
        anchor_ids = tokenizer(anchor, add_special_tokens=False).input_ids
        ids = tokenizer(anchor + answer, add_special_tokens=False).input_ids
        if ids[: len(anchor_ids)] == anchor_ids:
            return ids[len(anchor_ids) :]


def keeps_text(text, messages):
    """Whether a rendering has the text of every message, but for white space."""
    text = "".join(text.split())
    for message in messages:
        content = "".join(message["content"].split())
        if content not in text:
            return False
        text = text.replace(content, "", 1)  # a message that is repeated must be there twice
    return True


# What a data set may have beside a message's content, and a template may write or not.
OTHER_PARTS = ["tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"]


def encode_group(args, tokens, row, prompt, completions: list, rewards: list[float]):
    """The examples of a row and "", or () and the reason if it cannot train.

    Without completions there is one example, the prompt. Prompt and completions are texts or lists of
    messages. Raises ValueError if the row is malformed.
    """
    tokenizer = tokens.tokenizer
    if isinstance(prompt, list) and not tokenizer.chat_template:
        raise ValueError("a conversation needs a chat template: --chat-template FILE")
    messages = to_messages("user", prompt)
    answers = [to_messages("assistant", completion) for completion in completions]
    if tokenizer.chat_template:
        prompt = messages
    example = Example(row, prompt, encode_prompt(tokenizer, prompt))

    longest = min(args.max_prompt_length, args.max_length - 1)
    last_turn = messages[-1]["content"] if messages else ""
    if not last_turn.strip() or not 0 < len(example.prompt_ids) <= longest:
        return (), f"prompt empty or longer than {longest} tokens (raise --max-prompt-length, --max-length)"
    if messages[-1]["role"] == "assistant":
        return (), "prompt ends with an assistant message"
    texts = []
    for answer in answers:
        if [message["role"] for message in answer] != ["assistant"] or not answer[0]["content"].strip():
            return (), "completion empty or not one assistant message"
        texts.append(answer[0]["content"])
    for answer in answers or [[]]:
        conversation = messages + answer
        if any(message.get(part) for message in conversation for part in OTHER_PARTS):
            return (), "with tool calls or reasoning beside a message's content"
        if tokenizer.chat_template and not keeps_text(render(tokenizer, conversation), conversation):
            return (), "text changed by the chat template"
    repeated = [text for text in texts if text.startswith(last_turn)]
    if repeated and " " in last_turn.strip():
        return (), "completion that repeats its prompt"

    group = []
    all_ids = [*example.prompt_ids]
    for text, reward in zip(texts, rewards):
        ids, problem = encode_completion(tokens, prompt, example.prompt_ids, text)
        if problem:
            return (), problem
        cut = ids[: args.max_length - len(example.prompt_ids)]
        group.append(example._replace(completion_ids=cut, reward=float(reward)))
        all_ids += cut
    check_ids(tokenizer, all_ids, tokens.vocab_size)
    if 2 * all_ids.count(tokenizer.unk_token_id) > len(all_ids):
        return (), "mostly unknown to the tokenizer of --model (without one: the toy's)"
    if len(group) == 2 and group[0].completion_ids == group[1].completion_ids:
        return (), "chosen equals rejected"
    return tuple(group or [example]), ""


def to_messages(role, content: str | list):
    """A text as one message, or messages as they are. A ValueError if they are no strings."""
    if not isinstance(content, list):
        content = [{"role": role, "content": content}]
    messages = []
    for message in content:
        valid = isinstance(message, dict)
        for key in ("role", "content"):
            valid = valid and isinstance(message.get(key), str)
        if not valid:
            start = str(message)[:80]
            raise ValueError(f"a message must have a role and a content that are strings, not {start}")
        # Arrow gives every message the keys of all, with nulls, which a template may take for values.
        messages.append({key: value for key, value in message.items() if value is not None})
    return messages


# === Token log-probs ===
def pad_batch(examples: list[Example], pad_id: int, device):
    """input_ids (B, T) int64, padded on the right with any valid id, and mask (B, T) fp32."""
    rows = []
    mask = torch.zeros(len(examples), max(x.length for x in examples))
    for i, x in enumerate(examples):
        ids = [*x.prompt_ids, *x.completion_ids]
        rows.append(torch.tensor(ids, dtype=torch.long))
        mask[i, len(x.prompt_ids) : x.length] = 1
    input_ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    return input_ids.to(device), mask.to(device)


class HeadLogps(torch.autograd.Function):
    """log softmax(z)[target] (N,) for z = head(hidden) / temperature (N, V), in fp32 or wider.

    z would be the largest tensor of a pass by far, so the vocabulary comes in blocks of `block_size` rows.
    The forward pass saves L = log Σ exp z, and the backward pass has
        d z = d_logps · (onehot(target) - exp(z - L)).
    Blocks of z are kept for it in up to `keep_bytes`; the others are computed again.
    """

    @staticmethod
    def block(hidden, weight, bias, start, block_size, softcap, temperature):
        """Logits (N, block_size) from row `start` of the vocabulary on."""
        rows = slice(start, start + block_size)
        block_bias = None if bias is None else bias[rows].to(hidden.dtype)
        logits = F.linear(hidden, weight[rows].to(hidden.dtype), block_bias)
        if softcap:  # Gemma 2: softcap · tanh(logits / softcap)
            return logits.div_(softcap).tanh_().mul_(softcap / temperature)
        return logits.div_(temperature)

    @staticmethod
    def locate(targets, start, size):
        """Columns of the targets in a block, and whether they are in it, (N, 1) each."""
        columns = (targets - start)[:, None]
        nearest = columns.clamp(0, size - 1)
        return nearest, nearest == columns

    @staticmethod
    def forward(ctx, hidden, targets, weight, bias, block_size, softcap, temperature, keep_bytes):
        # hidden (N, D), targets (N,), weight (V, D), bias (V,)
        ctx.settings = (block_size, softcap, temperature)
        ctx.kept = {}
        kept_bytes = 0
        states = hidden.to(torch.promote_types(weight.dtype, torch.float32))
        log_sum = states.new_full((len(states), 1), -math.inf)
        target_logits = states.new_zeros(len(states), 1)
        for start in range(0, len(weight), block_size):
            logits = HeadLogps.block(states, weight, bias, start, *ctx.settings)
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(-1, keepdim=True))  # of the blocks so far
            columns, inside = HeadLogps.locate(targets, start, logits.shape[1])
            target_logits = torch.where(inside, logits.gather(1, columns), target_logits)
            kept_bytes += logits.nbytes
            if kept_bytes <= keep_bytes:
                ctx.kept[start] = logits
            del logits  # or two blocks would be in memory at once
        ctx.save_for_backward(hidden, targets, weight, bias, log_sum)
        return (target_logits - log_sum).sum(-1)  # a sum over one column: FSDP2 warns of views

    @staticmethod
    def backward(ctx, d_logps):
        hidden, targets, weight, bias, log_sum = ctx.saved_tensors
        block_size, softcap, temperature = ctx.settings
        d_logits_at_target = d_logps[:, None] / temperature
        states = hidden.to(d_logps.dtype)
        d_hidden = torch.zeros_like(states)
        d_weight = torch.empty_like(weight)
        d_bias = None if bias is None else torch.empty_like(bias)
        for start in range(0, len(weight), block_size):
            rows = slice(start, start + block_size)
            logits = ctx.kept.pop(start, None)
            if logits is None:
                logits = HeadLogps.block(states, weight, bias, start, *ctx.settings)
            if softcap:
                slope = 1 - (logits * (temperature / softcap)) ** 2  # of tanh
            columns, inside = HeadLogps.locate(targets, start, logits.shape[1])
            # d z of the block, in place: another tensor of its size would double the backward pass's peak.
            d_logits = logits.sub_(log_sum).exp_().mul_(-d_logits_at_target)
            d_logits.scatter_add_(1, columns, torch.where(inside, d_logits_at_target, 0))
            if softcap:
                d_logits.mul_(slope)
            d_hidden.addmm_(d_logits, weight[rows].to(states.dtype))
            d_weight[rows] = d_logits.T @ states
            if bias is not None:
                d_bias[rows] = d_logits.sum(0)
            del logits, d_logits
        return d_hidden.to(hidden.dtype), None, d_weight, d_bias, None, None, None, None


def packed_attention(module, query, key, value, attention_mask, sequence_lengths=None, **options):
    """Causal attention within each of the sequences that stand in one row, (1, heads, ΣT, head size)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # it takes half a second

    if sequence_lengths is None:  # not called by `token_logps`
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    queries = query.split(sequence_lengths, dim=2)
    keys = key.split(sequence_lengths, dim=2)
    values = value.split(sequence_lengths, dim=2)
    outputs = []
    for q, k, v in zip(queries, keys, values):
        output, _ = sdpa_attention_forward(module, q, k, v, None, **options)
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


@torch.no_grad()
def choose_attention(args, model):
    """Lets `token_logps` leave out padding, where a trial shows that this changes nothing.

    Raises ValueError if `token_logps` of a text, beside another, differs from the logits of its first half.
    """
    transformers.AttentionInterface.register("packed", packed_attention)  # here: it takes a second
    example = Example(0, "", [1], list(range(2, 17)))
    input_ids, mask = pad_batch([example, example], 0, model.device)  # (2, 16)
    input_ids %= model.config.get_text_config().vocab_size
    half = input_ids[0, :8]
    logits = model(input_ids=half[None], use_cache=False).logits[0].float()  # (8, V)
    expected = -F.cross_entropy(logits[:-1], half[1:], reduction="none")  # (7,)
    limit = 0.1 if args.dtype == "bfloat16" else 1e-4  # nats, on average
    implementations = [model.config._attn_implementation]
    if may_pack(args, model):
        implementations.insert(0, "packed")
    for implementation in implementations:
        model.set_attn_implementation(implementation)
        difference = token_logps(model, input_ids, mask)[:, 1:8] - expected  # (2, 7)
        if not difference.abs().mean() > limit:  # nan is for the evaluation to report
            return
    raise ValueError("a token's log-prob depends on later tokens, on noise, or on a factor of the logits")


def may_pack(args, model):
    """Whether tokens of a sequence meet in plain causal attention alone.

    Linear attention and state-space layers would carry one sequence into the next, and `packed_attention` has
    no sliding window.
    """
    config = model.config.get_text_config()
    longest = args.max_prompt_length + max(args.max_length, args.max_new_tokens)
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    window = getattr(config, "sliding_window", None) or longest
    if other_layers or longest > window or model.config._attn_implementation != "sdpa":
        return False
    return model._supports_attention_backend and not model._is_stateful


def pack_inputs(input_ids, selected) -> tuple:
    """Model inputs (1, ΣT) without padding, and which tokens in them predict the selected ones (1, ΣT).

    Right of the last token that predicts one nothing is read.
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    lengths = (positions * selected).amax(1)  # the last selected token itself need not be read
    read = positions < lengths[:, None]
    predicting = selected.roll(-1, 1)
    inputs = {
        "input_ids": input_ids[read][None],
        "position_ids": positions[read][None],
        "sequence_lengths": lengths.tolist(),
    }
    return inputs, predicting[read][None]


def token_logps(model, input_ids, mask, temperature: float = 1.0, max_logits: int = 2**23):
    """log π(y_t | x, y_<t) of every completion token, (B, T) in fp32 or wider, 0 where mask is 0.

    The model runs with another forward of its head (an `nn.Linear`), which returns the N log-probs in place
    of logits: no (B, T, V) tensor exists, and FSDP2 has the head's weight gathered. Logits are fp32, since
    bf16 ones of 16 are 0.125 apart, and log-ratios of order 1e-3.

    input_ids: (B, T), padded on the right. mask: (B, T), 1 at the tokens to score. max_logits: held at once.
    Raises ValueError if the first token of a sequence is to be scored.
    """
    selected = mask.bool()
    if selected[:, 0].any():
        raise ValueError("the first token of a sequence has no prediction; prepend one")
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    targets = input_ids[selected]  # (N,)
    if model.config._attn_implementation == "packed":
        inputs, predicting = pack_inputs(input_ids, selected)
    else:
        inputs = {"input_ids": input_ids}
        predicting = selected.roll(-1, 1)  # a token is predicted one place before
    block_size = max(1, max_logits // max(1, len(targets)))
    softcap = getattr(config, "final_logit_softcapping", None)

    def head_forward(hidden):  # (B, T, D) -> (N,)
        keep_bytes = 0  # of logits for the backward pass; in bf16 a GPU computes them again for little
        if torch.is_grad_enabled() and hidden.dtype.itemsize > 2:
            keep_bytes = 0.8 * 2**30
        tensors = (hidden[predicting], targets, head.weight, head.bias)
        return HeadLogps.apply(*tensors, block_size, softcap, temperature, keep_bytes)

    head.forward = head_forward
    if softcap:
        vars(config)["final_logit_softcapping"] = None  # or the model would apply it to the log-probs
    try:
        logps = model(**inputs, use_cache=False).logits  # (N,)
    finally:
        del head.forward
        if softcap:
            vars(config)["final_logit_softcapping"] = softcap
    return torch.zeros_like(mask, dtype=logps.dtype).masked_scatter(selected, logps)


def make_passes(lengths: list[int], ranks: int, max_tokens: int = 16384):
    """Splits sequences into forward passes of even work: positions in `lengths`, pass i for rank i % ranks.

    A pass has at most `max_tokens` tokens (0: any), or one sequence that is longer. All ranks have as many
    passes, because FSDP gathers weights in all of them together; with fewer sequences than ranks some are
    empty.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    limit = max_tokens or math.inf
    needed = min(max(1, sum(lengths) / limit), len(lengths))
    count = ranks * math.ceil(needed / ranks)
    while True:
        passes = [[] for _ in range(count)]
        heap = [(0, number) for number in range(count)]  # (tokens, pass), the lightest pass first
        for i in longest_first:
            tokens, number = heapq.heappop(heap)
            passes[number].append(i)
            heapq.heappush(heap, (tokens + lengths[i], number))
        if all(tokens <= limit or len(passes[number]) == 1 for tokens, number in heap):
            return passes
        count += ranks


@torch.no_grad()
def completion_logps(model, examples: list[Example], pad_id: int):
    """log π(y | x) of every example, its completion tokens' sum, (N,) float64 on the CPU."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    sums = torch.zeros(len(examples), dtype=torch.float64, device=model.device)
    passes = make_passes([x.length for x in examples], world)
    for mine in passes[rank::world]:
        # A rank with nothing to do must still take part in gathering weights: it reads some example.
        batch = [examples[i] for i in mine or [0]]
        input_ids, mask = pad_batch(batch, pad_id, model.device)
        logps = token_logps(model, input_ids, mask).double()
        sums[mine] = logps.sum(-1)[: len(mine)]
    dist.all_reduce(sums)
    return sums.cpu()


# === Models for sampling ===
def load_pretrained(auto, name: str, **options):
    """A model from safetensors files.

    Raises ValueError if weights, buffers aside, are missing, unexpected or of another shape: transformers
    would only warn.
    """
    model, info = auto.from_pretrained(
        name,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        use_safetensors=True,
        **options,
    )
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # the others ignore it (Gemma 2)
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    problems = []
    for kind in ("missing", "unexpected", "mismatched"):
        keys = []
        for entry in info[f"{kind}_keys"]:
            key = entry if isinstance(entry, str) else entry[0]  # mismatched ones come with their shapes
            if key.rpartition(".")[2] not in buffers:
                keys.append(key)
        if keys:
            problems.append(f"{len(keys)} {kind}, such as {sorted(keys)[0]}")
    if problems:
        raise ValueError(
            f"its weights are not those of its config.json as {auto.__name__} ({'; '.join(problems)})"
        )
    return model


def start_engine(args, dtype, device, max_length):
    """vLLM or a whole transformers model, in this process. Its weights are right after `update_engine`."""
    if args.engine == "vllm" or (args.engine == "auto" and find_spec("vllm")):
        return start_vllm(args, dtype, device, max_length)
    options = {"dtype": dtype, "trust_remote_code": args.trust_remote_code}
    model = load_pretrained(AutoModelForCausalLM, args.model, **options)
    model.generation_config = GenerationConfig()  # none of the model's own settings
    return model.to(device).eval()


def start_vllm(args, dtype, device, max_length):
    """vLLM in this process, one for each rank."""
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, _custom_ops

    if device.type == "cpu":
        _custom_ops._supports_onednn = False  # its packed weights would stay the old ones
        memory = {"kv_cache_memory_bytes": 2**30, "enforce_eager": True}
    else:
        memory = {"gpu_memory_utilization": args.vllm_memory, "enable_sleep_mode": True}
    engine = LLM(
        args.model,
        dtype=dtype,
        trust_remote_code=args.trust_remote_code,
        max_model_len=max_length,
        skip_tokenizer_init=True,
        load_format="dummy",  # update_engine brings the weights
        hf_overrides={"head_dtype": "float32"},  # logits as exact as token_logps'
        generation_config="vllm",  # none of the model's own settings
        logprobs_mode="raw_logprobs",  # before temperature and nucleus
        distributed_executor_backend="external_launcher",  # in this process
        **memory,
    )
    engine.llm_engine.engine_core._finalizer.detach()  # it would destroy our process group
    gc.unfreeze()  # vLLM froze it
    return engine


@torch.no_grad()
def update_engine(engine, policy):
    """Copies the policy into the engine, one gathered parameter at a time: never a second whole model."""
    weights = ((name, parameter.full_tensor()) for name, parameter in policy.named_parameters())
    if isinstance(engine, torch.nn.Module):
        for target, (_, weight) in zip(engine.parameters(), weights, strict=True):
            target.copy_(weight)
        return
    asleep = engine.llm_engine.is_sleeping()
    if asleep:
        engine.wake_up(tags=["weights"])
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    if asleep:
        engine.wake_up(tags=["kv_cache"])
    engine.reset_prefix_cache()


# === Sampling ===
@torch.no_grad()
def generate(engine, prompts: list[list[int]], args, tokens, seed):
    """Samples a completion of every prompt, on all ranks, and gives all of them to every rank.

    A batch of prompts has its own random seed, so that samples do not depend on the number of ranks.

    Returns:
        Token ids up to and with the end of turn; and vLLM's log-probs of the first 8, for a check.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    if isinstance(engine, torch.nn.Module):
        batch_size = args.generation_batch_size
        generate_batches = generate_with_transformers
    else:
        batch_size = 1
        generate_batches = generate_with_vllm
    batches = {}  # {position of its first prompt: prompts}
    seeds = {}
    for first in range(rank * batch_size, len(prompts), world * batch_size):
        batches[first] = prompts[first : first + batch_size]
        seeds[first] = int(np.random.SeedSequence((*seed, first)).generate_state(1)[0])
    own_samples = generate_batches(engine, batches, seeds, args, tokens)
    parts = [None] * world
    dist.all_gather_object(parts, own_samples)
    samples = {}
    for part in parts:
        samples |= part
    ids, logps = [], []
    for first in sorted(samples):
        for sample_ids, sample_logps in samples[first]:
            ids.append(sample_ids)
            logps.append(sample_logps)
    return ids, logps


def generate_with_vllm(engine, batches, seeds, args, tokens):
    """{first: [(token ids, log-probs)]}."""
    from vllm import SamplingParams

    requests, params = [], []
    for first, prompts in batches.items():
        requests.append({"prompt_token_ids": list(prompts[0])})
        logprobs = 0 if first < 8 else None  # those of all samples would take as long as sampling
        params.append(
            SamplingParams(
                seed=seeds[first],
                logprobs=logprobs,
                max_tokens=args.max_new_tokens,
                temperature=args.temperature,
                top_p=args.top_p,
                ignore_eos=True,  # vLLM's own; ours are the stop tokens
                stop_token_ids=list(tokens.eos_ids),
                detokenize=False,
            )
        )
    results = engine.generate(requests, params, use_tqdm=dist.get_rank() == 0)
    samples = {}
    for first, result in zip(batches, results, strict=True):
        output = result.outputs[0]
        ids = list(output.token_ids)
        logps = [step[token].logprob for token, step in zip(ids, output.logprobs or [])]
        samples[first] = [(ids, logps)]
    return samples


def generate_with_transformers(engine, batches, seeds, args, tokens):
    """{first: [(token ids, None)]}."""
    device = engine.device
    options = {
        "max_new_tokens": args.max_new_tokens,
        "do_sample": args.temperature > 0,
        "top_k": 0,
        "eos_token_id": list(tokens.eos_ids),
        "pad_token_id": tokens.pad_id,
    }
    if args.temperature > 0:
        options |= {"temperature": args.temperature, "top_p": args.top_p}
    generators = [device] if device.type == "cuda" else []
    samples = {}
    bar = tqdm(
        batches.items(), "sampling with transformers", unit="batch", leave=False, disable=dist.get_rank() != 0
    )
    for first, prompts in bar:
        rows = [torch.tensor(ids, device=device) for ids in prompts]
        ones = [torch.ones_like(row) for row in rows]
        input_ids = pad_sequence(rows, batch_first=True, padding_side="left", padding_value=tokens.pad_id)
        attention_mask = pad_sequence(ones, batch_first=True, padding_side="left")
        with torch.random.fork_rng(generators):
            torch.manual_seed(seeds[first])
            output = engine.generate(input_ids=input_ids, attention_mask=attention_mask, **options)
        samples[first] = []
        completions = output[:, input_ids.shape[1] :]
        for ids in completions.tolist():
            end = next((i for i, token in enumerate(ids, 1) if token in tokens.eos_ids), len(ids))
            samples[first].append((ids[:end], None))
    return samples


@torch.no_grad()
def engine_difference(engine, policy, examples: list[Example], engine_logps: list, pad_id: int):
    """Mean |log-prob of the engine - the policy's| over the examples' tokens, in nats."""
    input_ids, mask = pad_batch(examples, pad_id, policy.device)
    logps = token_logps(policy, input_ids, mask)[mask.bool()]
    if isinstance(engine, torch.nn.Module):
        reported = token_logps(engine, input_ids, mask)[mask.bool()]
    else:
        values = []
        for sample_logps in engine_logps[: len(examples)]:
            values += sample_logps
        reported = logps.new_tensor(values)
    return (logps - reported).abs().mean().item()


def load_reward_model(name, dtype, device, trust_remote_code):
    """A classifier with one output, and its tokenizer. Raises ValueError if it has more."""
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    model = load_pretrained(AutoModelForSequenceClassification, name, **options).to(device).eval()
    if model.config.num_labels != 1 and not trust_remote_code:  # ArmoRM's code has its own `score`
        raise ValueError(f"the model has {model.config.num_labels} outputs, and a reward model has one")
    return model, load_tokenizer(name, trust_remote_code)


def reward_input(tokenizer, sample: Example):
    """What a reward model reads: prompt and completion, in its chat template if it has one.

    A completion that is not finished stands without the end of its turn.
    """
    if tokenizer.chat_template:
        messages = to_messages("user", sample.prompt) + to_messages("assistant", sample.text)
        try:
            return render(tokenizer, messages, continue_final_message=not sample.finished)
        except ValueError:  # the template does not keep the end of the text
            return render(tokenizer, messages)
    prompt = sample.prompt
    if isinstance(prompt, list):
        prompt = "\n".join(message["content"] for message in prompt)
    if sample.finished and tokenizer.eos_token:
        return prompt + sample.text + tokenizer.eos_token
    return prompt + sample.text


@torch.no_grad()
def reward_scores(model, tokenizer, samples: list[Example]):
    """A reward model's one output, or its own code's `score` (ArmoRM), (N,) float64 on the CPU."""
    config = model.config.get_text_config()
    encoded = []
    for sample in samples:
        text = reward_input(tokenizer, sample)
        ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids
        check_ids(tokenizer, ids, config.vocab_size)
        encoded.append(ids)
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))  # little padding
    longest = len(encoded[order[-1]])
    if config.pad_token_id in range(config.vocab_size):
        padding = config.pad_token_id  # by which the model finds the last token
        size = max(1, 16384 // longest)
    else:
        padding = 0
        size = 1
    scores = torch.zeros(len(encoded), dtype=torch.float64, device=model.device)
    for first in range(dist.get_rank() * size, len(order), dist.get_world_size() * size):
        batch = order[first : first + size]
        rows = [torch.tensor(encoded[i], device=model.device) for i in batch]
        ones = [torch.ones_like(row) for row in rows]
        input_ids = pad_sequence(rows, batch_first=True, padding_value=padding)
        attention_mask = pad_sequence(ones, batch_first=True)
        output = model(input_ids=input_ids, attention_mask=attention_mask)
        score = output.score if hasattr(output, "score") else output.logits  # (b,) or (b, 1)
        scores[batch] = score.double().view(len(batch))
    dist.all_reduce(scores)
    return scores.cpu()


class Sampler:
    """Samples of the policy, and their rewards."""

    def __init__(self, args, config, tokens, dtype, device):
        self.args = args
        self.tokens = tokens
        self.dtype = dtype
        self.device = device
        self.engine = None  # starts when it is needed first
        self.reward_model = None
        self.metrics = {}  # of the last call of `sample`
        positions = max_positions(config.get_text_config())
        self.max_length = min(args.max_prompt_length + args.max_new_tokens, positions)
        if args.engine == "vllm" and not find_spec("vllm"):
            raise ValueError("--engine vllm needs vllm; see the README")
        name = getattr(args, "reward_model", "")
        if name:
            try:
                self.reward_model = load_reward_model(name, dtype, device, args.trust_remote_code)
            except Exception as error:
                raise ValueError(f"--reward-model {name}: {error}") from error

    def sample(self, policy, prompts: list[Example], count: int, seed):
        """`count` samples per prompt. Raises ValueError if the engine differs or a value is not finite."""
        started = time.perf_counter()
        if self.engine is None:
            self.engine = start_engine(self.args, self.dtype, self.device, self.max_length)
        update_engine(self.engine, policy)
        repeated = [prompt for prompt in prompts for _ in range(count)]
        ids, logps = self.generate([prompt.prompt_ids for prompt in repeated], seed)
        texts = self.tokens.tokenizer.batch_decode(ids, skip_special_tokens=True)
        samples = []
        for prompt, completion_ids, text in zip(repeated, ids, texts):
            sample = prompt._replace(completion_ids=completion_ids, text=text, reward=math.nan)
            samples.append(sample._replace(finished=completion_ids[-1] in self.tokens.eos_ids))
        difference = self.check_engine(policy, samples[:8], logps)
        if self.reward_model:
            samples = self.score(samples)
        self.metrics = {"rollout/logp_diff_mean": difference}
        for name, values in sample_statistics(samples).items():
            self.metrics[f"rollout/{name}_mean"] = values.mean().item()
        self.metrics["perf/rollout_time"] = time.perf_counter() - started
        return [samples[first : first + count] for first in range(0, len(samples), count)]

    def generate(self, prompts: list[list[int]], seed):
        try:
            ids, logps = generate(self.engine, prompts, self.args, self.tokens, seed)
        except RuntimeError as error:
            if re.search("probability tensor|device-side assert", str(error)):
                raise ValueError(f"the policy's probabilities are {DIVERGED}") from error
            raise
        if not isinstance(self.engine, torch.nn.Module) and self.device.type == "cuda":
            self.engine.sleep(level=2)  # gives its memory back to training
        return ids, logps

    def check_engine(self, policy, samples: list[Example], engine_logps: list):
        """Raises ValueError if the engine's log-probs are not the policy's."""
        difference = engine_difference(self.engine, policy, samples, engine_logps, self.tokens.pad_id)
        if not math.isfinite(difference):
            raise ValueError(f"the policy's log-probs are {DIVERGED}")
        limit = 0.1 if self.args.dtype == "bfloat16" else 1e-4
        if difference > limit:
            name = self.args.engine
            raise ValueError(f"--engine {name} samples another model: log-probs differ by {difference} nats")
        return difference

    def score(self, samples: list[Example]):
        """The samples with their rewards."""
        name = self.args.reward_model
        model, tokenizer = self.reward_model
        try:
            rewards = reward_scores(model, tokenizer, samples)
        except (ArithmeticError, IndexError, RuntimeError) as error:
            raise ValueError(f"--reward-model {name}: {error}") from error
        if not rewards.isfinite().all():
            raise ValueError(f"the scores of --reward-model {name} are {DIVERGED}")
        return [sample._replace(reward=reward) for sample, reward in zip(samples, rewards.tolist())]

    def evaluate(self, policy, prompts: list[Example], initial: dict):
        """Statistics of one sample per prompt, and the samples. Wins are against `initial`."""
        chosen = prompts[: self.args.eval_samples]
        if not chosen:
            return {}, []
        samples = [group[0] for group in self.sample(policy, chosen, 1, (self.args.seed, 0))]
        baseline = initial.setdefault("samples", samples)
        statistics = sample_statistics(samples)
        if "reward" in statistics:
            initial_rewards = torch.tensor([sample.reward for sample in baseline], dtype=torch.float64)
            statistics["win_rate"] = win_rate(statistics["reward"], initial_rewards)
        return {f"eval/{name}": values for name, values in statistics.items()}, samples


# === Statistics ===
def sample_statistics(samples: list[Example]) -> dict:
    """Length in tokens, whether finished, and reward if there is one, (N,) float64 each."""
    columns = {
        "length": [len(sample.completion_ids) for sample in samples],
        "finished": [sample.finished for sample in samples],
    }
    if not math.isnan(samples[0].reward):
        columns["reward"] = [sample.reward for sample in samples]
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}


def win_rate(rewards, baseline):
    """1 where a reward is above the baseline's, 0.5 where they tie, else 0. Float64."""
    wins = (rewards > baseline).double()
    ties = (rewards == baseline).double()
    return wins + 0.5 * ties


def means(metrics: dict[str, torch.Tensor]):
    """Means and standard errors (sample deviation / √n; 0 for one value).

    Raises ValueError if a value is not finite.
    """
    pairs = {}
    for name, values in metrics.items():
        if not values.isfinite().all():
            raise ValueError(f"{name} {DIVERGED}")
        values = values.double()
        deviation = values.std(correction=min(1, len(values) - 1))
        pairs[name] = (values.mean().item(), deviation.item() / math.sqrt(len(values)))
    return pairs
