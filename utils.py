"""Log-probability and evaluation helpers shared by the four humanline scripts.

B sequences, T tokens, V vocabulary, D hidden size. Log-probs are in nats. A mask is 1 at completion tokens, else 0.
"""

import contextlib
import gc
import heapq
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

DIVERGED = "not finite: look at the model and the data, or lower --lr or --max-grad-norm"

# --- token ids ---


class Example(NamedTuple):
    row: int  # of the data set, from 1
    prompt: str | list  # text, or messages if there is a chat template
    prompt_ids: list[int]
    completion_ids: list[int] = []  # ends with the end-of-turn token, unless it was cut
    reward: float = 0.0  # a score; chosen 1, rejected 0; nan for a sample without
    text: str = ""  # of a sample
    finished: bool = True  # a sample that ended by itself

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def to_train(self, longest: int) -> "Example":
        """A sample without texts, cut at `longest` tokens."""
        return self._replace(prompt="", completion_ids=self.completion_ids[: longest - len(self.prompt_ids)], text="")


class Tokens(NamedTuple):
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_ids: set[int]  # every id that ends a turn
    pad_id: int  # any will do
    rows: int  # of the model's embedding


def load_tokens(args, config) -> Tokens:
    """The tokenizer, with the flags' template and end of turn. A ValueError if the model cannot have them."""
    text_config = config.get_text_config()
    rows, positions = text_config.vocab_size, getattr(text_config, "max_position_embeddings", None) or math.inf
    longest = max(args.max_length, args.max_prompt_length + args.max_new_tokens)
    if getattr(text_config, "rope_parameters", None) is None and longest > positions:
        raise ValueError(f"--max-length, --max-new-tokens: {longest} tokens, and it has {positions} positions")
    how = {"trust_remote_code": args.trust_remote_code, "mistral_format": False}
    tokenizer = AutoTokenizer.from_pretrained(args.model, **how)
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8", errors="replace")
    tokenizer.eos_token = args.eos_token or tokenizer.eos_token
    if tokenizer.eos_token_id is None or tokenizer.eos_token not in tokenizer.get_vocab():
        raise ValueError(f"its vocabulary has no end-of-turn token {args.eos_token!r}: name one with --eos-token")
    check_ids(tokenizer, [tokenizer.eos_token_id], rows)
    eos_ids, sources = {tokenizer.eos_token_id}, [text_config]
    with contextlib.suppress(OSError):
        sources += [GenerationConfig.from_pretrained(args.model)]
    for ids in (source.eos_token_id for source in sources):
        eos_ids |= {ids} if isinstance(ids, int) else set(ids or ())
    pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None and i < rows)
    return Tokens(tokenizer, eos_ids, pad_id, rows)


def check_ids(tokenizer, ids: list[int], rows: int) -> None:
    """A ValueError if an id is beyond the rows of the embedding."""
    if (largest := max(ids, default=0)) >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(f"token {token!r} has the id {largest}, and the embedding has {rows} rows")


def render(tokenizer, messages: list, **how) -> str:
    try:
        how["strftime_now"] = lambda form: time.strftime(form, time.gmtime(1722e6))  # not the day of the run
        return tokenizer.apply_chat_template(messages, tokenize=False, **how)
    except Exception as error:
        raise ValueError(f"the chat template cannot render it: {error}") from error


def show_tokens(tokens: Tokens, example: Example) -> None:
    """Prints what ends a turn, how a prompt ends, and its completion begins and ends, in tokens."""
    parts = sorted(tokens.eos_ids), example.prompt_ids[-8:], example.completion_ids[:8], example.completion_ids[-4:]
    for name, ids in zip(("end of turn", "a prompt ends", "its completion begins", "and ends"), parts):
        if ids and dist.get_rank() == 0:
            print(f"{name}:", *map(repr, tokens.tokenizer.convert_ids_to_tokens(ids)))


def encode_prompt(tokenizer, prompt) -> list[int]:
    """Prompt ids, for training, sampling and evaluation."""
    if isinstance(prompt, str):
        ids, end = tokenizer(prompt).input_ids, tokenizer.eos_token
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] and not prompt.endswith(end) else ids
    return tokenizer(render(tokenizer, prompt, add_generation_prompt=True), add_special_tokens=False).input_ids


def encode_completion(tokens: Tokens, prompt, prompt_ids: list[int], completion: str) -> tuple:
    """Completion ids up to and with the end of turn (added where the template writes none), and why they cannot train,
    or "". They are what follows the prompt's ids in those of the whole text, if it begins so."""
    tokenizer, eos_ids, before, whole = tokens.tokenizer, tokens.eos_ids, prompt, None
    if isinstance(prompt, list):
        before = render(tokenizer, prompt, add_generation_prompt=True)
        whole = render(tokenizer, [*prompt, {"role": "assistant", "content": completion}])
        if not whole.startswith(before):
            raise ValueError("the chat template renders a prompt differently once it is answered: pass --chat-template")
        turn, text, completion = whole[len(render(tokenizer, prompt)) :], completion, whole[len(before) :]
        if "".join(text.split()) not in "".join(turn.split()):  # <think> may be before
            return [], "completion changed by the chat template"
    ids, start = tokenizer(whole or prompt + completion, add_special_tokens=whole is None).input_ids, prompt_ids
    for first in ("\n", ""):  # if a token spans both (alone, SentencePiece would put a space in front)
        if ids[: len(start)] != start:
            start, ids = (tokenizer(text, add_special_tokens=False).input_ids for text in (first, first + completion))
    ids = ids[len(start) :]
    end = next((i for i, token in enumerate(ids) if token in eos_ids), None)
    if end is None:
        return [*ids, tokenizer.eos_token_id], ""
    if tokenizer.decode([token for token in ids[end + 1 :] if token not in eos_ids]).strip():
        return [], "end of turn inside the completion"
    return ids[: end + 1], ""


def encode_group(args, tokens: Tokens, row: int, prompt, completions: list, rewards: list[float]):
    """The examples of a row, (prompt,) without completions, () if it cannot train; and why it cannot, or a note, or "".
    A ValueError if it is wrong."""
    template = tokens.tokenizer.chat_template
    if isinstance(prompt, list) and not template:
        raise ValueError("a conversation needs a chat template: --chat-template FILE")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    answers = [c if isinstance(c, list) else [{"role": "assistant", "content": c}] for c in completions]
    for message in itertools.chain(messages, *answers):
        if not isinstance(message, dict) or {type(message.get(key)) for key in ("role", "content")} != {str}:
            raise ValueError(f"a message must have a role and a content that are strings, not {str(message)[:80]}")
    turns = [message["content"] for message in messages]
    texts = [answer[0]["content"] if [m["role"] for m in answer] == ["assistant"] else None for answer in answers]
    prompt = messages if template else prompt
    example = Example(row, prompt, encode_prompt(tokens.tokenizer, prompt))
    longest = min(args.max_prompt_length, args.max_length - 1)
    if not "".join(turns[-1:]).strip() or not 0 < len(example.prompt_ids) <= longest:
        return (), f"prompt empty or longer than {longest} tokens (--max-prompt-length)"
    if not all(text and text.strip() for text in texts):
        return (), "completion empty or not one assistant message"
    if " " in turns[-1].strip() and any(text.startswith(turns[-1]) for text in texts):
        raise ValueError("a completion repeats its prompt; cut the prompt off it")
    room, group = args.max_length - len(example.prompt_ids), []
    for text, reward in zip(texts, rewards):
        ids, problem = encode_completion(tokens, prompt, example.prompt_ids, text)
        if problem:
            return (), problem
        group.append(example._replace(completion_ids=ids[:room], reward=float(reward)))
    check_ids(tokens.tokenizer, [*example.prompt_ids, *(i for x in group for i in x.completion_ids)], tokens.rows)
    if len(group) == 2 and group[0].completion_ids == group[1].completion_ids:
        return (), "chosen equals rejected"
    spelt = any(token in text for token in tokens.tokenizer.all_special_tokens for text in [*turns, *texts])
    return tuple(group or [example]), "kept, though special tokens are spelt in its text" if spelt else ""


# --- token log-probabilities ---


def pad_batch(examples: list[Example], pad_id: int, device: torch.device):
    """input_ids (B, T) int64, padded on the right with any valid id, and mask (B, T) fp32."""
    ids = [torch.tensor([*x.prompt_ids, *x.completion_ids], dtype=torch.long) for x in examples]
    mask = torch.zeros(len(examples), max(x.length for x in examples))
    for row, x in zip(mask, examples):
        row[len(x.prompt_ids) : x.length] = 1
    return pad_sequence(ids, batch_first=True, padding_value=pad_id).to(device), mask.to(device)


class HeadLogps(torch.autograd.Function):
    """Log-probs (N,) of the targets under an output head, in fp32 or wider. The vocabulary comes in blocks of `size`
    rows. Their logits are kept for the backward pass in up to `room` bytes, or computed again."""

    @staticmethod
    def block(kept, first, wide, targets, weight, bias, size, softcap, temperature):
        """The block's rows, its logits (N, size), and where and whether the targets are in it, (N, 1) each."""
        rows, logits = slice(first, first + size), kept.pop(first, None)
        if logits is None:
            logits = F.linear(wide, weight[rows].to(wide.dtype), bias if bias is None else bias[rows].to(wide.dtype))
            logits = logits.div_(softcap).tanh_().mul_(softcap / temperature) if softcap else logits.div_(temperature)
        place = (targets - first).clamp(0, logits.shape[1] - 1)[:, None]
        return rows, logits, place, place == targets[:, None] - first

    @staticmethod
    def forward(ctx, hidden, targets, weight, bias, room, *how):  # (N, D), (N,), (V, D), (V,)
        wide = hidden.to(torch.promote_types(weight.dtype, torch.float32))
        total, chosen = wide.new_full((len(wide), 1), -math.inf), wide.new_zeros(len(wide), 1)
        ctx.kept, ctx.how = {}, how
        for first in range(0, len(weight), how[0]):
            _, logits, place, inside = HeadLogps.block({}, first, wide, targets, weight, bias, *how)
            total = torch.logaddexp(total, logits.logsumexp(-1, keepdim=True))
            chosen = torch.where(inside, logits.gather(1, place), chosen)
            room -= logits.nbytes
            if room >= 0:
                ctx.kept[first] = logits
            del logits  # before the next
        ctx.save_for_backward(hidden, targets, weight, bias, total)
        return (chosen - total).sum(-1)  # no view: FSDP2 warns

    @staticmethod
    def backward(ctx, d_logps):
        (hidden, targets, weight, bias, total), (size, softcap, temperature) = ctx.saved_tensors, ctx.how
        wide, d_logps, d_bias = hidden.to(d_logps.dtype), d_logps[:, None] / temperature, []
        d_hidden, d_weight = torch.zeros_like(wide), torch.empty_like(weight)
        for first in range(0, len(weight), size):
            rows, logits, place, inside = HeadLogps.block(ctx.kept, first, wide, targets, weight, bias, *ctx.how)
            slope = 1 - (logits * (temperature / softcap)) ** 2 if softcap else None
            d_logits = logits.sub_(total).exp_().mul_(-d_logps).scatter_add_(1, place, inside * d_logps)
            d_logits = d_logits.mul_(slope) if softcap else d_logits
            d_hidden.addmm_(d_logits, weight[rows].to(wide.dtype))
            d_weight[rows] = d_logits.T @ wide
            d_bias += [] if bias is None else [d_logits.sum(0)]
            del logits, d_logits
        d_bias = torch.cat(d_bias).to(weight.dtype) if d_bias else None
        return d_hidden.to(hidden.dtype), None, d_weight, d_bias, None, None, None, None


def packed_attention(module, query, key, value, attention_mask, **how):
    """Causal attention within each of the sequences that `token_logps` put one behind the other."""
    lengths = pack.lengths if query.shape[::2] == (1, sum(pack.lengths)) else [query.shape[2]]
    parts = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)))
    return torch.cat([sdpa_attention_forward(module, *part, None, **how)[0] for part in parts], 1), None


def pack(args, model) -> None:
    """`token_logps` computes no padding from now on, if tokens meet in plain attention alone."""
    config, longest = model.config.get_text_config(), args.max_prompt_length + max(args.max_length, args.max_new_tokens)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    window = getattr(config, "sliding_window", None) or longest
    if not kinds and longest <= window and model.config._attn_implementation == "sdpa":
        if model._supports_attention_backend and not model._is_stateful:
            transformers.AttentionInterface.register("packed", packed_attention)
            model.set_attn_implementation("packed")
    pack.lengths = []


def token_logps(model, input_ids, mask, temperature: float = 1.0, max_logits: int = 2**23):
    """log π(y_t | x, y_<t) of every completion token, (B, T) in fp32 or wider, 0 where mask is 0.

    During the call the model's head (an `nn.Linear`) returns these: inside the model's forward, where FSDP2 has its
    weight gathered. bf16 logits of 16 are 0.125 apart, log-ratios of order 1e-3, so logits are fp32.
    input_ids: (B, T), padded on the right. mask: (B, T), 1 at the tokens to score. max_logits: held at once. A
    ValueError if the first token of a sequence is to be scored, or the model rescales its logits."""
    selected = mask.bool()
    if selected[:, 0].any():
        raise ValueError("the first token of a sequence has no prediction; prepend one")
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling", "logits_soft_cap", "lm_head_multiplier", "output_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"models with config.{name} (here {getattr(config, name)}) are not supported")
    targets, predicting, inputs = input_ids[selected], selected.roll(-1, 1), {"input_ids": input_ids}
    if model.config._attn_implementation == "packed":
        places = torch.arange(mask.shape[1], device=mask.device).expand_as(selected)
        lengths = (places * selected).amax(1)  # up to the last token that predicts
        real = places < lengths[:, None]
        inputs = {"input_ids": input_ids[real][None], "position_ids": places[real][None]}
        predicting, pack.lengths = predicting[real][None], lengths.tolist()
    softcap = getattr(config, "final_logit_softcapping", None)
    how = max(1, max_logits // max(1, len(targets))), softcap, temperature

    def head_forward(hidden):  # (B, T, D) -> (N,)
        keep = torch.is_grad_enabled() and hidden.dtype.itemsize > 2  # a GPU does it again for little
        return HeadLogps.apply(hidden[predicting], targets, head.weight, head.bias, keep * 0.8 * 2**30, *how)

    head.forward = head_forward
    if softcap:
        config.final_logit_softcapping = None  # applied above, not to log-probs again
    try:
        flat = model(**inputs, use_cache=False).logits  # (N,)
    finally:
        del head.forward
        if softcap:
            config.final_logit_softcapping = softcap
    return torch.zeros_like(mask, dtype=flat.dtype).masked_scatter(selected, flat)


def make_passes(lengths: list[int], ranks: int, most: int = 0, tokens: int = 16384) -> list[list[int]]:
    """Positions for each forward pass: even work, at most `most` with `tokens` tokens in all (0: any), or one that is
    longer. Pass i is rank i % ranks'; some are empty if there are fewer positions than that."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    least = max(1, len(order) / (most or math.inf), sum(lengths) / (tokens or math.inf))
    count = ranks * math.ceil(min(least, len(order)) / ranks)
    while True:
        passes, lightest = [[] for _ in range(count)], [(False, 0, number) for number in range(count)]
        for i in order:
            _, load, number = heapq.heappop(lightest)
            passes[number].append(i)
            heapq.heappush(lightest, (len(passes[number]) == most, load + lengths[i], number))
        if not tokens or all(len(part) < 2 or sum(lengths[i] for i in part) <= tokens for part in passes):
            return passes
        count += ranks


@torch.no_grad()
def completion_logps(model, examples: list[Example], pad_id: int):
    """`token_logps` of a data set: log-probs and mask, (N, T) float64, on the CPU."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), model.device
    lengths = torch.tensor([len(x.completion_ids) for x in examples])
    mask = torch.arange(lengths.max()) < lengths[:, None]  # (N, T)
    logps = torch.zeros(mask.shape, dtype=torch.float64, device=device)
    for mine in make_passes([x.length for x in examples], world)[rank::world]:
        input_ids, chosen = pad_batch([examples[i] for i in mine or [0]], pad_id, device)
        found = token_logps(model, input_ids, chosen)[chosen.bool()].double()
        for i, values in zip(mine, found.split(lengths[mine or [0]].tolist())):
            logps[i, : len(values)] = values
    dist.all_reduce(logps)
    return logps.cpu(), mask.double()


def data_quality(args, reference, groups: list[tuple], needed: int) -> list[tuple]:
    """Prints the quartiles of the average token log-prob of every group's first example (Figure 6), and drops those
    below --min-avg-logp. A ValueError if fewer than `needed` are left."""
    logps, mask = completion_logps(reference, [group[0] for group in groups], 0)
    averages = logps.sum(-1) / mask.sum(-1)
    kept = [group for group, value in zip(groups, averages.tolist()) if not value < args.min_avg_logp]
    if dist.get_rank() == 0:
        told = " ".join(f"{averages.quantile(q):.2f}" for q in (0, 0.25, 0.5, 0.75, 1))
        told += f"; {len(groups) - len(kept)} rows below --min-avg-logp dropped" * (len(kept) < len(groups))
        print(f"average token log-prob under the initial policy, nats, min q1 median q3 max: {told}")
    if len(kept) < needed:
        raise ValueError(f"{len(kept)} rows are left, and a batch takes {needed}")
    return kept


# --- generation ---


def load_whole(auto, name: str, **how):
    """A model from safetensors files. A ValueError names weights that are missing, unexpected or mismatched (buffers
    aside), with which transformers would go on."""
    how |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    model, info = auto.from_pretrained(name, **how)
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # the others ignore it (Gemma 2)
    buffers, told = {key.rpartition(".")[2] for key, _ in model.named_buffers()}, []
    for what in ("missing", "unexpected", "mismatched"):
        keys = {key if isinstance(key, str) else key[0] for key in info[f"{what}_keys"]}
        if keys := sorted(key for key in keys if key.rpartition(".")[2] not in buffers):
            told.append(f"{len(keys)} {what}: {' '.join(keys[:3])}{' …' * (len(keys) > 3)}")
    if told:
        raise ValueError(f"its weights are not those of its config.json as {auto.__name__} ({'; '.join(told)})")
    return model


def start_engine(args, dtype: torch.dtype, device, max_length: int):
    """vLLM or an unsharded transformers model, in this process; its weights are right after `update_engine`."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    name, how = args.engine, {"dtype": dtype, "trust_remote_code": args.trust_remote_code}
    if name == "auto" and find_spec("vllm"):
        from vllm.platforms import current_platform

        name = "vllm" if current_platform.device_type == device.type else "hf"
    if name != "vllm":
        model = load_whole(AutoModelForCausalLM, args.model, **how).to(device).eval()
        model.generation_config = GenerationConfig()
        return model
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "RANK": "0", "LOCAL_RANK": "0"} | os.environ
    from vllm import LLM, _custom_ops

    if device.type == "cpu":
        _custom_ops._supports_onednn = False  # its weights stay old
        how |= {"kv_cache_memory_bytes": 2**30, "enforce_eager": True}
    else:
        how |= {"gpu_memory_utilization": args.vllm_memory, "enable_sleep_mode": True}
    engine = LLM(
        args.model,
        max_model_len=max_length,
        skip_tokenizer_init=True,
        load_format="dummy",  # update_engine brings weights
        hf_overrides={"head_dtype": "float32"},  # logits as exact as token_logps'
        generation_config="vllm",  # none of the model's own
        logprobs_mode="raw_logprobs",  # before temperature and nucleus
        distributed_executor_backend="external_launcher",  # in this process
        **how,
    )
    engine.llm_engine.engine_core._finalizer.detach()  # it would destroy our process group
    gc.unfreeze()  # vLLM froze it
    return engine


@torch.no_grad()
def update_engine(engine, policy) -> None:
    """Copies the policy into the engine, one gathered parameter at a time."""
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


@torch.no_grad()
def generate(engine, prompts: list[list[int]], args, tokens: Tokens, seed: tuple):
    """Token ids up to and with the end of turn for every prompt, the same for any number of ranks, and vLLM's
    log-probs of the first 8."""
    rank, world, hf = dist.get_rank(), dist.get_world_size(), isinstance(engine, torch.nn.Module)
    size, ends = args.generation_batch_size if hf else 1, list(tokens.eos_ids)
    found = {first: prompts[first : first + size] for first in range(rank * size, len(prompts), world * size)}
    seeds = {first: int(np.random.SeedSequence((*seed, first)).generate_state(1)[0]) for first in found}
    if not hf:
        from vllm import SamplingParams

        how = {"max_tokens": args.max_new_tokens, "temperature": args.temperature, "top_p": args.top_p}
        how |= {"ignore_eos": True, "stop_token_ids": ends, "detokenize": False}
        params = [SamplingParams(seed=seeds[i], logprobs=0 if i < 8 else None, **how) for i in found]
        requests = [{"prompt_token_ids": list(rows[0])} for rows in found.values()]
        for first, result in zip(found, engine.generate(requests, params, use_tqdm=rank == 0), strict=True):
            ids = list(result.outputs[0].token_ids)
            logps = [step[token].logprob for token, step in zip(ids, result.outputs[0].logprobs or [])]
            found[first] = [(ids, logps)]
    else:
        how = {"do_sample": args.temperature > 0, "max_new_tokens": args.max_new_tokens, "top_k": 0}
        how |= {"eos_token_id": ends, "pad_token_id": tokens.pad_id}
        how |= {"temperature": args.temperature, "top_p": args.top_p} if args.temperature > 0 else {}
        left = {"batch_first": True, "padding_side": "left"}
        for first in tqdm(found, "sampling with transformers", unit="batch", leave=False, disable=rank != 0):
            rows = [torch.tensor(ids, device=engine.device) for ids in found[first]]
            input_ids = pad_sequence(rows, padding_value=tokens.pad_id, **left)
            attention_mask = pad_sequence([torch.ones_like(ids) for ids in rows], **left)
            with torch.random.fork_rng([engine.device] if engine.device.type == "cuda" else []):
                torch.manual_seed(seeds[first])
                output = engine.generate(input_ids=input_ids, attention_mask=attention_mask, **how)
            rows = output[:, input_ids.shape[1] :].tolist()
            cuts = [next((i for i, token in enumerate(ids, 1) if token in ends), None) for ids in rows]
            found[first] = [(ids[:cut], None) for ids, cut in zip(rows, cuts)]
    parts = [None] * world
    dist.all_gather_object(parts, found)
    batches = sorted((first, batch) for part in parts for first, batch in part.items())
    return tuple(map(list, zip(*[sample for _, batch in batches for sample in batch])))


@torch.no_grad()
def engine_difference(engine, policy, examples: list[Example], engine_logps, pad_id: int) -> tuple:
    """Mean and maximum of |log-prob of the engine - the policy's|, in nats."""
    input_ids, mask = pad_batch(examples, pad_id, policy.device)
    logps = token_logps(policy, input_ids, mask)[mask.bool()]
    if isinstance(engine, torch.nn.Module):
        reported = token_logps(engine, input_ids, mask)[mask.bool()]
    else:
        reported = logps.new_tensor([*itertools.chain(*engine_logps)])
    difference = (logps - reported).abs()
    return difference.mean().item(), difference.max().item()


def load_reward_model(name: str, dtype: torch.dtype, device, trust_remote_code: bool):
    """A classifier with one output (else a ValueError), and its tokenizer."""
    how = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    model = load_whole(AutoModelForSequenceClassification, name, **how).to(device).eval()
    if model.config.num_labels != 1 and not trust_remote_code:  # ArmoRM's code has its own `score`
        raise ValueError(f"the model has {model.config.num_labels} outputs, and a reward model has one")
    return model, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, mistral_format=False)


@torch.no_grad()
def reward_scores(model, tokenizer, samples: list[tuple]) -> torch.Tensor:
    """A reward model's one output, or its own code's `score` (ArmoRM), (N,) float64 on the CPU. samples: (prompt,
    completion text, finished), by its chat template if it has one; an unfinished one without the end of its turn."""
    encoded, config = [], model.config.get_text_config()
    for prompt, completion, finished in samples:
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            messages = [*messages, {"role": "assistant", "content": completion}]
            try:
                text = render(tokenizer, messages, continue_final_message=not finished)
            except ValueError:
                text = render(tokenizer, messages)
        else:
            text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
            text += completion + (tokenizer.eos_token or "") * finished
        encoded.append(tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids)
        check_ids(tokenizer, encoded[-1], config.vocab_size)
    scores = torch.zeros(len(encoded), dtype=torch.float64, device=model.device)
    padding = config.pad_token_id if config.pad_token_id in range(config.vocab_size) else None
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    size = 1 if padding is None else max(1, 16384 // len(encoded[order[-1]]))
    for first in range(dist.get_rank() * size, len(order), dist.get_world_size() * size):
        batch = order[first : first + size]
        ids = [torch.tensor(encoded[i], device=model.device) for i in batch]
        attention_mask = pad_sequence([torch.ones_like(part) for part in ids], batch_first=True)
        input_ids = pad_sequence(ids, batch_first=True, padding_value=padding or 0)
        output = model(input_ids=input_ids, attention_mask=attention_mask)
        score = output.score if hasattr(output, "score") else output.logits  # (b,) or (b, 1)
        scores[batch] = score.double().view(len(batch))
    dist.all_reduce(scores)
    return scores.cpu()


class Sampler:
    """Completions of the policy, and their rewards."""

    def __init__(self, args, config, tokens: Tokens, dtype: torch.dtype, device):
        self.args, self.tokens, self.dtype, self.device = args, tokens, dtype, device
        self.engine, self.judge, self.metrics = None, None, {}  # metrics: of the last call
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
        self.max_length = min(args.max_prompt_length + args.max_new_tokens, positions)
        if args.engine == "vllm" and not find_spec("vllm"):
            raise ValueError("--engine vllm needs vllm; see the README")
        if name := getattr(args, "reward_model", ""):
            try:
                self.judge = load_reward_model(name, dtype, device, args.trust_remote_code)
            except Exception as error:
                raise ValueError(f"--reward-model {name}: {error}") from error

    def sample(self, policy, prompts: list[Example], count: int, seed: tuple) -> list[list]:
        """`count` samples for each prompt. A ValueError if the engine differs or anything is not finite."""
        args, started = self.args, time.perf_counter()
        if self.engine is None:
            self.engine = start_engine(args, self.dtype, self.device, self.max_length)
        repeated = [prompt for prompt in prompts for _ in range(count)]
        update_engine(self.engine, policy)
        try:
            ids, logps = generate(self.engine, [x.prompt_ids for x in repeated], args, self.tokens, seed)
        except RuntimeError as error:
            if re.search("probability tensor|device-side assert", str(error)):
                raise ValueError(f"the policy's probabilities are {DIVERGED}") from error
            raise
        if not isinstance(self.engine, torch.nn.Module) and self.device.type == "cuda":
            self.engine.sleep(level=2)
        few = [prompt._replace(completion_ids=part) for prompt, part in zip(repeated[:8], ids)]
        mean, largest = engine_difference(self.engine, policy, few, logps, self.tokens.pad_id)
        if not math.isfinite(largest):
            raise ValueError(f"the policy's log-probs are {DIVERGED}")
        if (mean if args.dtype == "bfloat16" else 100 * largest) > 0.1:
            raise ValueError(f"--engine {args.engine} samples another model: log-probs differ by {mean} to {largest}")
        texts = self.tokens.tokenizer.batch_decode(ids, skip_special_tokens=True)
        finished, rewards = [part[-1] in self.tokens.eos_ids for part in ids], [math.nan] * len(ids)
        if self.judge:
            try:
                rewards = reward_scores(*self.judge, list(zip([x.prompt for x in repeated], texts, finished))).tolist()
            except (ArithmeticError, IndexError, RuntimeError) as error:
                raise ValueError(f"--reward-model {args.reward_model}: {error}") from error
            if not all(map(math.isfinite, rewards)):
                raise ValueError(f"the scores of --reward-model {args.reward_model} are {DIVERGED}")
        columns = zip(repeated, ids, rewards, texts, finished)
        samples = [x._replace(completion_ids=i, reward=r, text=t, finished=f) for x, i, r, t, f in columns]
        self.metrics = {f"rollout/{name}_mean": v.mean().item() for name, v in sample_statistics(samples).items()}
        self.metrics |= {"rollout/logp_diff_mean": mean, "rollout/logp_diff_max": largest}
        self.metrics["perf/rollout_time"] = time.perf_counter() - started
        return [samples[first : first + count] for first in range(0, len(samples), count)]

    def evaluate(self, policy, prompts: list[Example], initial: dict) -> tuple[dict, list]:
        """Samples for the first prompts, and statistics; wins are against `initial`."""
        if not (prompts := prompts[: self.args.eval_samples]):
            return {}, []
        samples = [group[0] for group in self.sample(policy, prompts, 1, (self.args.seed, 0))]
        statistics = sample_statistics(samples, initial.setdefault("samples", samples))
        return {f"eval/{name}": values for name, values in statistics.items()}, samples


def sample_statistics(samples: list[Example], baseline: list[Example] | None = None) -> dict:
    """Length in tokens, whether finished, reward and wins, (N,) each."""
    columns = {"length": [len(s.completion_ids) for s in samples], "finished": [s.finished for s in samples]}
    if not math.isnan(samples[0].reward):
        columns["reward"] = [s.reward for s in samples]
        if baseline:
            columns["win_rate"] = [float(win_rate(s.reward, b.reward)) for s, b in zip(samples, baseline, strict=True)]
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}


def win_rate(rewards, baseline):
    """1 where a reward is above the baseline's, 0.5 where they tie."""
    return (rewards > baseline) + 0.5 * (rewards == baseline)


def means(metrics: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """Means and standard errors (sample deviation / √n; 0 for one value). A ValueError if one is not finite."""
    if bad := [key for key, values in metrics.items() if not values.isfinite().all()]:
        raise ValueError(f"{', '.join(bad)} {DIVERGED}")
    errors = {key: v.double().std(correction=min(1, len(v) - 1)) / math.sqrt(len(v)) for key, v in metrics.items()}
    return {key: (values.double().mean().item(), errors[key].item()) for key, values in metrics.items()}


def write(path: Path, text: str) -> None:
    """Replaces a file as a whole."""
    path.with_name(f"{path.name}.tmp").write_text(text, encoding="utf-8")
    path.with_name(f"{path.name}.tmp").replace(path)


def peak_memory(device) -> float:
    """GiB since the process began: CUDA allocations, or resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


class Log:
    """metrics.jsonl, and the same in TensorBoard, from step `start` on."""

    def __init__(self, folder: Path, start: int):
        path = folder / "metrics.jsonl"
        lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
        write(path, "".join(line for line in lines if line.endswith("}\n") and json.loads(line)["step"] < start))
        self.file = path.open("a", buffering=1)
        self.writer = SummaryWriter(folder, purge_step=start)

    def write(self, metrics: dict) -> None:
        self.file.write(json.dumps(metrics) + "\n")
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, metrics["step"])


def report(folder: Path, before: dict, after: dict, samples_before: list, samples_after: list) -> None:
    """Prints what training changed; writes summary.json and outputs.json."""
    write(folder / "summary.json", json.dumps({"before": before, "after": after}, indent=2))
    print(f"\n{'mean ± standard error':24}{'before':>20}{'after':>20}" if after else "\nnothing was evaluated")
    for key in after:
        print(f"{key:24}" + "".join(f"{mean:10.3f} ± {error:7.3f}" for mean, error in (before[key], after[key])))
    questions = [x.prompt if isinstance(x.prompt, str) else x.prompt[-1]["content"] for x in samples_after]
    for question, *samples in list(zip(questions, samples_before, samples_after))[:4]:
        print(f"\nprompt: {question}")
        for when, sample in zip(("before", "after"), samples):
            print(f"{when}: {sample.text}" + ("" if math.isnan(sample.reward) else f"  [reward {sample.reward:.2f}]"))
    rows = [dict(instruction=q, output=s.text, generator=folder.name) for q, s in zip(questions, samples_after)]
    if rows:
        write(folder / "outputs.json", json.dumps(rows, indent=2, ensure_ascii=False))
    print(f"\nwrote {folder}")


# --- grading ---
# math_verify runs in processes: an answer that never ends, eats memory or crashes takes one with it.
_TIDY = {  # what math_verify reads otherwise
    r"(?s)\A.*(?=.{20}\\(?:boxed|fbox))": "",
    r"(?<!\w)\*\*|\*\*(?!\w)|\\! ?|[\u200b-\u200d\u2060\ufeff]": "",
    "[‐-―−]": "-",
    r"(?:(?<!\\)\\(?:[,;: ]|q?quad\b)|~|[^\S\n])+": " ",
    r"(?<=\d) (?=(?:\d{3} )*\d{3}(?!\d))": "",
    r"(?<![\w.^/])(\d+) (\d+) ?/ ?(\d+)": r"\1\\frac{\2}{\3}",
    r"(?<![\w.])([\d.]+)[eE]\+?(-?\d+)(?!\w)": r"\1\\times 10^{\2}",
    r"≈|\\approx": "=",
}
_GLUED = r"(?:[\d*/^_]|(?:\S ?|^)[+-]|times|cdot|div) ?$"  # to a box, from both sides
_GLUED_ON = r"[A-Za-z(\d]| ?(?:\d{3}\b|[+*/!]|-[\d\\]|\^(?!\{?\\)|\\(?:times|cdot|div|sqrt|pi))"
_IS = r"(?s:.*)(?:(?i:answer)\b[^.:=\n]{0,50}?(?:\bis\b|[:=])|\bA:)[\s:]*(.+?)\.?\s*(?:\n|\.\s|$)"
_SHORT = r"[A-Za-z) ]+|(?:\\[A-Za-z]+|[^A-Za-z$*]|\b[A-Za-z]\b|or|and)+"  # a word, or nothing but math
_PROSE = r"(?<!\\)(\$|\\[(\[])|(?i:answer)|(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}"
_NAME = r"\s*(?:\\?[A-Za-z]|\\?[A-Za-z]{3,}|\\text\{[^}]*\})(?:_\w|_\{\w+\})?(?:\(\w\))?\s*"  # x, x_1, f(2)


def start_grader(workers: int = 0, time_limit: float = 5.0):
    """A pool of processes. time_limit: CPU seconds for one answer."""
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    from pebble import ProcessPool

    context = multiprocessing.get_context("forkserver")  # a fork would inherit threads of CUDA and gloo
    context.set_forkserver_preload(["torch", "transformers.models.auto.modeling_auto", "datasets", "math_verify"])
    pool = ProcessPool(workers or max(1, min(cores, 8)), max_tasks=1000, initializer=_start_worker, context=context)
    pool.time_limit = time_limit
    return pool


def gold_answers(pool, rows: dict[int, dict]) -> dict[int, str]:
    """{row number: gold answer}: `answer`, or `solution` with a \\boxed{…}; without those that math_verify cannot read
    or finds unequal to themselves. A ValueError if a row has neither."""
    golds = {}
    for number, row in rows.items():
        answer, solution = row.get("answer"), row.get("solution")
        if answer is None and solution is None:
            raise ValueError(f"line {number}: it has no answer or solution; the columns are {', '.join(row)}")
        if type(answer) is float:
            answer = np.format_float_positional(answer, trim="-") if math.isfinite(answer) else ""
        answer = str(answer) if type(answer) is int else answer
        if not isinstance(answer, str | None) or not isinstance(solution, str | None):
            raise ValueError(f"line {number}: answer and solution must be strings")
        golds[number] = answer if answer is not None else solution if "\\boxed" in solution else ""
    equal = _judge_all(pool, [(gold, None) for gold in golds.values()])
    return {number: gold for (number, gold), verdict in zip(golds.items(), equal) if verdict}


def format_reward(text: str) -> float:
    """1 for <think>⏎…⏎</think>⏎<answer>⏎…⏎</answer> alone, else 0."""
    thinking, _, answer = text.partition("\n</think>\n<answer>\n")
    return float(thinking.startswith("<think>\n") and answer.endswith("\n</answer>"))


def tag_count_reward(text: str) -> float:
    """A quarter for each of the four tags, with its line breaks, that occurs exactly once (Open-R1)."""
    return sum(text.count(tag) == 1 for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")) / 4


def math_rewards(pool, completions: list[str], golds: list[str]) -> tuple[dict, int]:
    """{accuracy, format, tag_count: (N,)} from 0 to 1, float64, and the second result of `grade`."""
    accuracies, stopped = grade(pool, completions, golds)
    rewards = {"accuracy": accuracies, "format": map(format_reward, completions)}
    rewards["tag_count"] = map(tag_count_reward, completions)
    return {name: torch.tensor(list(values), dtype=torch.float64) for name, values in rewards.items()}, stopped


def grade(pool, completions: list[str], golds: list[str]) -> tuple[list[float], int]:
    """1 for completions whose answer equals the gold answer (of `gold_answers`), else 0, and how many are 0 because
    grading was stopped. A RuntimeError if a worker was killed idle."""
    inside = [completion.rpartition("</answer>")[0].rpartition("<answer>")[1:] for completion in completions]
    answers = [answer if tag else completion for (tag, answer), completion in zip(inside, completions)]
    verdicts = _judge_all(pool, list(zip(golds, answers, strict=True)))
    return [float(verdict or 0) for verdict in verdicts], verdicts.count(None)


def _judge_all(pool, jobs: list[tuple]) -> list[bool | None]:
    """`_judge` of each distinct job, shared out over the ranks; None where it was stopped."""
    from pebble import ProcessExpired

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    distinct, own = list(dict.fromkeys(jobs)), []
    limit = pool.time_limit
    for future in [pool.schedule(_judge, (*job, limit), timeout=20 * limit) for job in distinct[rank::world]]:
        try:
            own.append(future.result())
        except (ProcessExpired, TimeoutError, MemoryError, RecursionError, TypeError, ValueError):
            own.append(None)
    parts = [own] * world
    if world > 1:
        dist.all_gather_object(parts, own)
    verdicts = {job: verdict for r in range(world) for job, verdict in zip(distinct[r::world], parts[r], strict=True)}
    return [verdicts[job] for job in jobs]


def _start_worker():
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if os.path.exists("/proc/self/statm"):  # Linux
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # 2 GiB more than the imports take


def _judge(gold: str, answer: str | None, time_limit: float) -> bool:
    """In a worker: whether the answer (None: the gold answer) equals the gold answer."""
    from math_verify import verify

    signal.setitimer(signal.ITIMER_PROF, time_limit)  # no handler: the kernel ends us
    try:
        a, equation = _read_answer(gold, True)
        b, other = (a, equation) if answer is None else _read_answer(answer, False)
        if a is None or b is None or equation != other:
            return False
        size = abs(a.doit().evalf(3)) if a != b and getattr(a, "is_number", False) else 1
        digits = 6 + max(0, math.ceil(-math.log10(min(max(size, 1e-300), 1))) - 1)  # 6 from the first that is not 0
        return verify(a, b, digits, 9 + digits, timeout_seconds=None)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@lru_cache(256)
def _read_answer(text: str, is_gold: bool) -> tuple:
    """In a worker: the answer in a text, a sympy object or None, and whether it is an equation."""
    from latex2sympy2_extended.math_normalization import extract_boxed_content
    from math_verify import LatexExtractionConfig, parse
    from sympy import Eq

    for pattern, new in _TIDY.items():
        text = re.sub(pattern, new, text)
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start >= 0:
        before, box, text = text[:start], text[start:], extract_boxed_content(text[start:], "last")
        after = box.partition(text or "}")[2].lstrip()[1:]
        if not is_gold and (re.search(_GLUED, before) or re.match(_GLUED_ON, after)):
            return None, False
    elif not is_gold:
        if (last := re.match(_IS, text)) and re.fullmatch(_SHORT, last[1]):
            text = last[1]
        elif re.search(_PROSE, re.sub(r"\{[^{}]*\}", "", text)):
            text = [*parse(text, extraction_mode="first_match", parsing_timeout=None), text, text][1]
    text = re.sub(r"^\(?([A-Z])[).]*$", r"\1", text.strip("\n ,:;=").rstrip(". "))
    text = re.sub(rf"(?:^(?:(?i:so|thus|hence|therefore),? )?|(?<=,)|(?<=or )|(?<=or }})){_NAME}(?:=|\\in\b)", "", text)
    text = re.sub(rf"(?<![<>!])={_NAME}$", "", text)  # 5 = x
    if re.search(r"(?:^|[=(,])\s*-?[\d.]+\s+\d", text):
        return None, False
    if re.fullmatch(r"(?!inf)[A-Za-z ]{3,}", text) and not re.search(r"\b(or|and)\b", text):
        text = f"\\text{{{text}}}"
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    found = [*parse(f"\\boxed{{{text}}}", config, "no_fallback", "first_match", None), None][0]
    parts = getattr(found, "_unsorted_args", 2 * found.args) if getattr(found, "is_FiniteSet", False) else ()
    return (found if len(set(parts)) == len(parts) else None), hasattr(found, "has") and found.has(Eq)
