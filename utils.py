"""Log-probability and evaluation helpers shared by the four humanline scripts.

B sequences, T tokens, V vocabulary, D hidden size. Log-probabilities are in nats, in fp32 or, where the model computes
in it, fp64. A mask is 1 at completion tokens (with the end-of-turn token) and 0 elsewhere.
"""

import contextlib
import gc
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
from dataclasses import asdict
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
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

DIVERGED = "not finite: look at the model and the data, or lower --lr or --max-grad-norm"

# --- token ids ---


class Example(NamedTuple):
    row: int  # of the data set, counted from 1: the line of a json lines file
    prompt: str | list  # text, or messages if there is a chat template
    prompt_ids: list[int]
    completion_ids: list[int] = []  # ends with the end-of-turn token, unless it was cut at --max-length
    reward: float = 0.0  # chosen or desirable 1, rejected or undesirable 0; or a score; nan for a sample without one
    text: str = ""  # of a sample
    finished: bool = True  # a sample that ended by itself

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def to_train(self, max_length: int) -> "Example":
        """A sample without its text, cut at `max_length` tokens."""
        return self._replace(completion_ids=self.completion_ids[: max_length - len(self.prompt_ids)], text="")


class Tokens(NamedTuple):
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_ids: set[int]  # every id that ends a turn
    pad_id: int  # masked everywhere, so any that the embedding has will do
    rows: int  # of the model's embedding
    special: re.Pattern  # finds text that spells a special token


def load_tokens(args, config) -> Tokens:
    """The policy's tokenizer, with the chat template and the end-of-turn token of the flags. A ValueError if the model
    does not have that token, or has fewer positions than sequences may have tokens."""
    text_config = config.get_text_config()
    rows = text_config.vocab_size
    positions = getattr(text_config, "max_position_embeddings", None) or math.inf
    longest = max(args.max_length, args.max_prompt_length + args.max_new_tokens)
    if getattr(text_config, "rope_parameters", None) is None and longest > positions:
        raise ValueError(f"--max-length or --max-new-tokens allows {longest} tokens, and it has {positions} positions")
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    if args.chat_template:
        try:
            tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ValueError(f"--chat-template {args.chat_template}: {error}") from error
    tokenizer.eos_token = args.eos_token or tokenizer.eos_token
    if tokenizer.eos_token_id is None or (args.eos_token or tokenizer.eos_token) not in tokenizer.get_vocab():
        raise ValueError(f"its vocabulary has no end-of-turn token {args.eos_token!r}: name one with --eos-token")
    check_ids(tokenizer, [tokenizer.eos_token_id], rows)
    generation = GenerationConfig.from_model_config(config)
    with contextlib.suppress(OSError):  # the model comes without one
        generation = GenerationConfig.from_pretrained(args.model)
    eos_ids = {tokenizer.eos_token_id}
    for ids in (generation.eos_token_id, text_config.eos_token_id):
        eos_ids |= {ids} if isinstance(ids, int) else set(ids or ())
    pad_id = tokenizer.pad_token_id
    if pad_id is None or pad_id >= rows:
        pad_id = tokenizer.eos_token_id
    names = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = re.compile("|".join(map(re.escape, names | set(tokenizer.all_special_tokens))))
    return Tokens(tokenizer, eos_ids, pad_id, rows, special)


def check_ids(tokenizer, ids: list[int], rows: int) -> None:
    """Raises a ValueError if a token id is beyond the rows of a model's embedding."""
    if (largest := max(ids, default=0)) >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(f"token {token!r} has the id {largest}, and the model's embedding has {rows} rows")


def hint(row: dict) -> str:
    """How to convert a row whose columns are not ours."""
    if "conversations" in row:
        return ' (ShareGPT: make each {"from": "human", "value": …} a message {"role": "user", "content": …})'
    if row.keys() == {"chosen", "rejected"} and {type(text) for text in row.values()} == {str}:
        return " (move what chosen and rejected share, up to the last turn's marker, such as Assistant:, to a prompt)"
    return ""


def to_text(tokenizer, prompt, completions: list):
    """A prompt as messages (as text if there is no chat template) and its completions as texts, None for one that is
    not one assistant message. Each comes as a string or a list of messages; a ValueError for anything else."""
    if isinstance(prompt, list) and not tokenizer.chat_template:
        raise ValueError("a conversation needs a chat template, and the tokenizer has none: pass --chat-template FILE")
    prompt_turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if any(isinstance(part, dict) for part in (prompt, *completions)):
        raise ValueError("messages must be a list, also where there is one: [{…}]")
    turns = [c if isinstance(c, list) else [{"role": "assistant", "content": c}] for c in completions]
    for message in itertools.chain(prompt_turns, *turns):
        if not isinstance(message, dict) or {type(message.get(key)) for key in ("role", "content")} != {str}:
            raise ValueError(f"a message must have a role and a content that are strings, not {str(message)[:80]}")
    texts = [turn[0]["content"] if [m["role"] for m in turn] == ["assistant"] else None for turn in turns]
    return prompt_turns if tokenizer.chat_template else prompt, texts


def render(tokenizer, messages: list, **how) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **how)
    except Exception as error:
        raise ValueError(f"the chat template cannot render it ({error}); see --chat-template") from error


def encode_prompt(tokenizer, prompt) -> list[int]:
    """Prompt token ids. Training, sampling and evaluation all get them here."""
    if isinstance(prompt, str):
        return tokenizer(prompt).input_ids
    return tokenizer(render(tokenizer, prompt, add_generation_prompt=True), add_special_tokens=False).input_ids


def encode_completion(tokens: Tokens, prompt, prompt_ids: list[int], completion: str) -> tuple[list[int], str]:
    """Completion token ids up to and with the end-of-turn token, which is added where the template writes none; and
    why they cannot train, or "". They are what follows the prompt's ids in those of the whole text, if it begins so. A
    ValueError if the template renders the prompt differently once it is answered."""
    tokenizer, eos_ids, before, whole = tokens.tokenizer, tokens.eos_ids, prompt, None
    if isinstance(prompt, list):
        before = render(tokenizer, prompt, add_generation_prompt=True)
        whole = render(tokenizer, [*prompt, {"role": "assistant", "content": completion}])
        if not whole.startswith(before):
            raise ValueError("the chat template renders a prompt differently once it is answered: pass --chat-template")
        completion, text = whole[len(before) :], completion
        if "".join(text.split()) not in "".join(completion.split()):
            return [], "completion changed by the chat template"
    ids = tokenizer(whole or prompt + completion, add_special_tokens=whole is None).input_ids
    if ids[: len(prompt_ids)] == prompt_ids:
        ids = ids[len(prompt_ids) :]
    else:
        ids = tokenizer(completion, add_special_tokens=False).input_ids
    end = next((i for i, token in enumerate(ids) if token in eos_ids), None)
    if end is None:
        return [*ids, tokenizer.eos_token_id], ""
    if tokenizer.decode([token for token in ids[end + 1 :] if token not in eos_ids]).strip():
        return [], "end of turn inside the completion"
    return ids[: end + 1], ""  # what a template writes after the end of the turn is never sampled


def encode_group(args, tokens: Tokens, row: int, prompt, completions: list, rewards: list[float]):
    """The examples of one row, (prompt,) if it has no completions, () if it cannot train; and what to count it under:
    why it cannot, or that it spells special tokens, or "". A ValueError if the row is wrong."""
    prompt, texts = to_text(tokens.tokenizer, prompt, completions)
    example = Example(row, prompt, encode_prompt(tokens.tokenizer, prompt))
    turns = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
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
    spelt = tokens.special.search("\n".join([*turns, *texts]))
    return tuple(group or [example]), "kept, though special tokens are spelt in its text" if spelt else ""


# --- token log-probabilities ---


def pad_batch(examples: list[Example], pad_id: int, device: torch.device):
    """input_ids (B, T) int64, padded on the right with any valid id, and mask (B, T) fp32."""
    ids = [torch.tensor([*x.prompt_ids, *x.completion_ids], dtype=torch.long) for x in examples]
    mask = torch.zeros(len(examples), max(x.length for x in examples))
    for row, x in zip(mask, examples):
        row[len(x.prompt_ids) : x.length] = 1
    return pad_sequence(ids, batch_first=True, padding_value=pad_id).to(device), mask.to(device)


def token_logps(model, input_ids, mask, temperature: float = 1.0, chunk_size: int = 1024):
    """log π(y_t | x, y_<t) of every completion token, without ever holding logits of shape (B, T, V).

    For the duration of the call the model's output head returns the log-probabilities of the completion tokens, in
    chunks whose logits are recomputed in the backward pass: inside the model's own forward, because that is where FSDP2
    has the head's weight gathered. Logits are in fp32 whatever the compute dtype: a bf16 logit of magnitude 16 is
    spaced 0.125 apart, the log-ratios of humanline syncing are of order 1e-3.

    model: a transformers causal LM, plain or wrapped with FSDP2, with an `nn.Linear` head (tied or not).
    input_ids: (B, T), padded on the right: in a causal model no real token sees padding.
    mask: (B, T), 1 at the tokens to score; a ValueError if that is the first of a sequence, which has no prediction.
    Returns (B, T) fp32, 0 where mask is 0; differentiable, exact. A ValueError if the model rescales its logits.
    """
    selected = mask.bool()
    if selected[:, 0].any():
        raise ValueError("token_logps: the first token of a sequence has no prediction; prepend a prompt or BOS token")
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling", "logits_soft_cap", "lm_head_multiplier", "output_multiplier"):
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
        recomputed = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([checkpoint(chunk_logps, *chunk, weight, bias, **recomputed) for chunk in chunks])

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


def length_batches(lengths: list[int], batch_tokens: int = 16384):
    """Positions, the longest sequences first, in batches of about `batch_tokens` padded tokens."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    while order:
        count = max(1, batch_tokens // lengths[order[0]])
        yield order[:count]
        order = order[count:]


@torch.no_grad()
def completion_logps(model, examples: list[Example], pad_id: int):
    """`token_logps` of a data set, shared out over the ranks: log-probs and mask of the completions alone, (N, T) each,
    float64 on the CPU, the same on every rank and for any number of them."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), next(model.parameters()).device
    lengths = torch.tensor([len(x.completion_ids) for x in examples])
    mask = torch.arange(lengths.max()) < lengths[:, None]  # (N, T)
    logps = torch.zeros(mask.shape, dtype=torch.float64, device=device)
    batches = list(length_batches([x.length for x in examples]))
    for first in range(0, len(batches), world):  # every rank makes as many passes, as FSDP requires
        batch = batches[min(first + rank, len(batches) - 1)]
        input_ids, chosen = pad_batch([examples[i] for i in batch], pad_id, device)
        found = token_logps(model, input_ids, chosen)[chosen.bool()].double()
        for i, values in zip(batch, found.split(lengths[batch].tolist())):
            logps[i, : len(values)] = values if first + rank < len(batches) else 0
    dist.all_reduce(logps)
    return logps.cpu(), mask.double()


def data_quality(args, reference, groups: list[tuple], names: tuple[str, str], needed: int) -> list[tuple]:
    """Prints the quartiles of the average token log-probs under the initial policy (Figure 6) of the first and the last
    example of every group (of examples with and without a reward, if they are alone), and drops the groups whose first
    one is below --min-avg-logp. A ValueError if fewer than `needed` are left."""
    examples = [x for group in groups for x in group]
    logps, mask = completion_logps(reference, examples, 0)
    averages = (logps.sum(-1) / mask.sum(-1)).view(len(groups), -1)
    parts = averages[:, 0], averages[:, -1]
    if averages.shape[1] == 1:
        good = torch.tensor([x.reward > 0 for x in examples])
        parts = averages[good, 0], averages[~good, 0]
    kept = [group for group, value in zip(groups, averages[:, 0].tolist()) if not value < args.min_avg_logp]
    if dist.get_rank() == 0:
        for name, values in zip(names, parts):
            told = " ".join(f"{values.quantile(q):.2f}" for q in (0, 0.25, 0.5, 0.75, 1)) if len(values) else "none"
            print(f"average token log-prob of {name} under the initial policy, nats, min q1 median q3 max: {told}")
        if len(parts[0]) and -1.03 <= parts[0].median() <= -0.36:
            print("  (the paper trained worse on its lowest quartile, -1.03 to -0.36: Figure 6; see --min-avg-logp)")
        if len(kept) < len(groups):
            print(f"--min-avg-logp {args.min_avg_logp}: {len(groups) - len(kept)} of {len(groups)} rows dropped")
    if len(kept) < needed:
        raise ValueError(f"{len(kept)} rows are left, and a batch takes {needed}; lower it")
    return kept


# --- generation ---
# An engine is an unsharded transformers model or a vLLM engine; both live in the training process, one on every rank.


def load_whole(auto, name: str, **how):
    """A model from safetensors files. A ValueError names weights that are missing, unexpected or mismatched, where
    transformers would go on with random ones; buffers, which a model computes, do not count."""
    how |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    model, info = auto.from_pretrained(name, **how)
    buffers, told = {key.rpartition(".")[2] for key, _ in model.named_buffers()}, []
    for what in ("missing", "unexpected", "mismatched"):
        keys = {key if isinstance(key, str) else key[0] for key in info[f"{what}_keys"]}
        if keys := sorted(key for key in keys if key.rpartition(".")[2] not in buffers):
            told.append(f"{len(keys)} {what}: {' '.join(keys[:3])}{' …' * (len(keys) > 3)}")
    if told:
        raise ValueError(f"its weights are not those of its config.json as {auto.__name__} ({'; '.join(told)})")
    return model


def start_engine(name: str, model_name: str, *, dtype, device, max_length: int, memory_share: float, trust_remote_code):
    """Starts the engine called `name` on all ranks; "auto" is vLLM where it is installed for this device, else
    transformers. Weights are right only after `update_engine`. `max_length`: tokens of prompt and completion.
    `memory_share`: of the GPU, for vLLM (on the CPU: a cache of 1 GiB)."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    if name == "auto" and find_spec("vllm"):
        from vllm.platforms import current_platform

        name = "vllm" if current_platform.device_type == device.type else "hf"
    if name != "vllm":
        load = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        model = load_whole(AutoModelForCausalLM, model_name, **load).to(device).eval()
        model.generation_config = GenerationConfig()  # no sampling defaults of the model's own, such as a penalty
        return model
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "RANK": "0", "LOCAL_RANK": "0"} | os.environ
    from vllm import LLM, _custom_ops

    options = {"gpu_memory_utilization": memory_share, "enable_sleep_mode": True}
    if device.type == "cpu":
        _custom_ops._supports_onednn = False  # its prepacked copies of the weights would never be updated
        options = {"kv_cache_memory_bytes": 2**30, "enforce_eager": True}
    options |= {"dtype": dtype, "max_model_len": max_length, "trust_remote_code": trust_remote_code}
    set_num_threads = torch.set_num_threads
    engine = LLM(
        model_name,
        skip_tokenizer_init=True,  # token ids in, token ids out
        load_format="dummy",  # update_engine brings the weights
        hf_overrides={"head_dtype": "float32"},  # logits as exact as token_logps computes them
        generation_config="vllm",  # none of the model's own sampling defaults
        logprobs_mode="raw_logprobs",  # of the model itself: before temperature and nucleus
        distributed_executor_backend="external_launcher",  # in this process; with one GPU each, ranks never wait
        **options,
    )
    torch.set_num_threads = set_num_threads  # vLLM disables it on the CPU
    engine.llm_engine.engine_core._finalizer.detach()  # it would destroy our process group together with the engine
    gc.unfreeze()  # vLLM exempts every object of the process from garbage collection
    return engine


@torch.no_grad()
def update_engine(engine, policy) -> None:
    """Wakes the engine and copies the FSDP2-sharded policy into it, one gathered parameter at a time."""
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


def generate(engine, prompts: list, *, seed: tuple, eos_ids, pad_id: int, batch_size=256, progress=None, **limits):
    """Samples one completion for every prompt, shared out over the ranks, the same for any number of them: every vLLM
    request has a seed of its own, and transformers' batches are cut and seeded before they are dealt.
    prompts: prompt ids. batch_size: sequences per transformers batch. progress: a tqdm bar of this rank's completions.
    limits: max_new_tokens; temperature, where 0 is greedy decoding; top_p, the nucleus, in (0, 1].
    Returns, in the order of `prompts`, on every rank: completion ids, up to and including the first end-of-turn token,
    and the log-probs that vLLM gives them (at temperature 1, before the nucleus cut; None from transformers)."""
    size, found = (batch_size if isinstance(engine, torch.nn.Module) else 1), {}
    for first in range(dist.get_rank() * size, len(prompts), dist.get_world_size() * size):
        found[first] = prompts[first : first + size]
    seeds = {first: int(np.random.SeedSequence((*seed, first)).generate_state(1)[0]) for first in found}
    if isinstance(engine, torch.nn.Module):
        for first, rows in found.items():
            found[first] = _generate_hf(engine, rows, seeds[first], eos_ids, pad_id, **limits)
            if progress is not None:
                progress.update(len(rows))
    else:
        from vllm import SamplingParams

        limits["max_tokens"] = limits.pop("max_new_tokens")
        own = {"ignore_eos": True, "stop_token_ids": list(eos_ids), "detokenize": False, "logprobs": 0}
        params = [SamplingParams(seed=seed, **limits, **own) for seed in seeds.values()]
        requests = [{"prompt_token_ids": list(rows[0])} for rows in found.values()]
        shown = progress and not progress.disable and (lambda rows=None, **_: progress if rows is None else rows)
        for first, result in zip(found, engine.generate(requests, params, use_tqdm=shown), strict=True):
            ids = list(result.outputs[0].token_ids)
            logps = [step[token].logprob for token, step in zip(ids, result.outputs[0].logprobs, strict=True)]
            found[first] = [(ids, logps)]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    batches = sorted((first, batch) for part in parts for first, batch in part.items())
    return tuple(map(list, zip(*[sample for _, batch in batches for sample in batch])))


@torch.no_grad()
def _generate_hf(model, prompts, seed, eos_ids, pad_id, *, max_new_tokens, temperature, top_p):
    device = next(model.parameters()).device
    prompts = [torch.tensor(ids, device=device) for ids in prompts]
    left = {"batch_first": True, "padding_side": "left"}
    inputs = {"input_ids": pad_sequence(prompts, padding_value=pad_id, **left)}
    inputs["attention_mask"] = pad_sequence([torch.ones_like(ids) for ids in prompts], **left)
    how = {"do_sample": temperature > 0, "max_new_tokens": max_new_tokens, "top_k": 0}
    how |= {"temperature": temperature, "top_p": top_p} if temperature > 0 else {"temperature": None, "top_p": None}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = model.generate(**inputs, **how, eos_token_id=list(eos_ids), pad_token_id=pad_id)
    samples = []
    for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
        end = next((i for i, token in enumerate(ids) if token in eos_ids), len(ids) - 1)
        samples.append((ids[: end + 1], None))
    return samples


@torch.no_grad()
def engine_difference(engine, policy, examples: list[Example], engine_logps, pad_id: int) -> tuple[float, float]:
    """Mean and maximum of |log-prob of the engine - of the policy| over the tokens of a few samples, in nats: a sampler
    with stale weights or another model shows here. Every rank computes the same."""
    input_ids, mask = pad_batch(examples, pad_id, next(policy.parameters()).device)
    logps = token_logps(policy, input_ids, mask)[mask.bool()]
    if isinstance(engine, torch.nn.Module):
        reported = token_logps(engine, input_ids, mask)[mask.bool()]
    else:
        reported = torch.tensor(list(itertools.chain(*engine_logps)), dtype=logps.dtype, device=logps.device)
    difference = (logps - reported).abs()
    return difference.mean().item(), difference.max().item()


# --- reward model ---


def load_reward_model(name: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool):
    """A sequence classifier with one output, and its tokenizer. Raises a ValueError if it has several outputs."""
    load = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    model = load_whole(AutoModelForSequenceClassification, name, **load).to(device).eval()
    if model.config.num_labels != 1 and not trust_remote_code:  # remote code such as ArmoRM's has its own `score`
        raise ValueError(f"the model has {model.config.num_labels} outputs, and a reward model has one")
    return model, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


@torch.no_grad()
def reward_scores(model, tokenizer, samples: list[tuple]) -> torch.Tensor:
    """Scores of a sequence-classification reward model, shared out over the ranks: its one output, or the `score` that
    a model with code of its own returns (ArmoRM). (N,) float64 on the CPU, the same on every rank.
    samples: (prompt, completion text, finished) with the prompt a string or a list of messages. The tokenizer's chat
    template renders the conversation if it has one; an unfinished completion without the end of its turn."""
    encoded, config = [], model.config.get_text_config()
    for prompt, completion, finished in samples:
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            messages = [*messages, {"role": "assistant", "content": completion}]
            try:
                text = render(tokenizer, messages, continue_final_message=not finished)
            except ValueError:
                if finished:
                    raise
                text = render(tokenizer, messages[:-1], add_generation_prompt=True) + completion  # drops nothing of it
        else:
            text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
            text += completion + (tokenizer.eos_token or "") * finished
        encoded.append(tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids)
        check_ids(tokenizer, encoded[-1], config.vocab_size)
    device = next(model.parameters()).device
    scores = torch.zeros(len(encoded), dtype=torch.float64, device=device)
    without_pad = config.pad_token_id is None or config.pad_token_id < 0
    batches = length_batches(list(map(len, encoded)))
    for batch in itertools.islice(batches, dist.get_rank(), None, dist.get_world_size()):
        if without_pad:  # the model reads the last token that is not padding, so padding must end no sequence
            last = {encoded[i][-1] for i in batch}
            config.pad_token_id = next(i for i in range(config.vocab_size) if i not in last)
        ids = [torch.tensor(encoded[i], device=device) for i in batch]
        attention_mask = pad_sequence([torch.ones_like(part) for part in ids], batch_first=True)
        input_ids = pad_sequence(ids, batch_first=True, padding_value=config.pad_token_id)
        output = model(input_ids=input_ids, attention_mask=attention_mask)
        score = output.score if hasattr(output, "score") else output.logits  # (b,) or (b, 1)
        scores[batch] = score.double().view(len(batch))
    dist.all_reduce(scores)
    return scores.cpu()


# --- sampling and scoring ---


class Sampler:
    """Completions of the present policy and their rewards. Rollouts and evaluation both come here."""

    def __init__(self, args, config, tokens: Tokens, dtype: torch.dtype, device: torch.device):
        """Loads the reward model, if one is named; the engine starts with the first sample. May raise a ValueError."""
        self.args, self.tokens, self.dtype, self.device = args, tokens, dtype, device
        self.engine, self.judge, self.metrics = None, None, {}  # metrics: of the last call, for the log
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
        self.max_length = min(args.max_prompt_length + args.max_new_tokens, positions)
        if args.engine == "vllm" and not find_spec("vllm"):
            raise ValueError("--engine vllm needs vllm, which is not installed; see the README, or leave the flag out")
        if name := getattr(args, "reward_model", ""):
            try:
                self.judge = load_reward_model(name, dtype, device, args.trust_remote_code)
            except Exception as error:
                raise ValueError(f"--reward-model {name}: {error}") from error

    def sample(self, policy, prompts: list[Example], count: int, seed: tuple) -> list[list[Example]]:
        """`count` samples for each prompt, from an engine that is checked to be the policy. A ValueError if it is
        not, or if anything is not finite."""
        args, started = self.args, time.perf_counter()
        if self.engine is None:
            where = {"dtype": self.dtype, "device": self.device, "max_length": self.max_length}
            options = {"memory_share": args.vllm_memory, "trust_remote_code": args.trust_remote_code}
            self.engine = start_engine(args.engine, args.model, **where, **options)
        repeated = [prompt for prompt in prompts for _ in range(count)]
        limits = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "top_p": args.top_p}
        limits |= {"eos_ids": self.tokens.eos_ids, "pad_id": self.tokens.pad_id}
        limits |= {"batch_size": args.generation_batch_size, "seed": seed}
        share = math.ceil(len(repeated) / dist.get_world_size())
        update_engine(self.engine, policy)
        name = "sampling with " + ("transformers" if isinstance(self.engine, torch.nn.Module) else "vLLM")
        with tqdm(desc=name, total=share, unit="sample", leave=False, disable=dist.get_rank() != 0) as bar:
            try:
                ids, logps = generate(self.engine, [x.prompt_ids for x in repeated], progress=bar, **limits)
            except RuntimeError as error:
                if not re.search("probability tensor|device-side assert", str(error)):
                    raise
                raise ValueError(f"the policy's probabilities are {DIVERGED}") from error
        if not isinstance(self.engine, torch.nn.Module) and self.device.type == "cuda":
            self.engine.sleep(level=2)  # frees vLLM's memory until the next update
        few = [prompt._replace(completion_ids=part) for prompt, part in zip(repeated[:8], ids)]
        mean, largest = engine_difference(self.engine, policy, few, logps[:8], self.tokens.pad_id)
        if not math.isfinite(largest):
            raise ValueError(f"the policy's log-probs are {DIVERGED}")
        if not (mean < 0.1 if args.dtype == "bfloat16" else largest < 1e-3):
            told = f"differ from the policy's by {mean:.2g} on average, {largest:.2g} at most (nats)"
            raise ValueError(f"--engine {args.engine}: the log-probs of its samples {told}: it samples another model")
        texts = self.tokens.tokenizer.batch_decode(ids, skip_special_tokens=True)
        finished, rewards = [part[-1] in self.tokens.eos_ids for part in ids], [math.nan] * len(ids)
        if self.judge:
            rewards = reward_scores(*self.judge, list(zip([x.prompt for x in repeated], texts, finished))).tolist()
            if not all(map(math.isfinite, rewards)):
                raise ValueError(f"the scores of --reward-model {args.reward_model} are {DIVERGED}")
        columns = zip(repeated, ids, rewards, texts, finished)
        samples = [x._replace(completion_ids=i, reward=r, text=t, finished=f) for x, i, r, t, f in columns]
        self.metrics = {f"rollout/{name}_mean": mean_and_se(v)[0] for name, v in sample_statistics(samples).items()}
        self.metrics |= {"rollout/logp_diff_mean": mean, "rollout/logp_diff_max": largest}
        self.metrics["perf/rollout_time"] = time.perf_counter() - started
        return [samples[first : first + count] for first in range(0, len(samples), count)]

    def evaluate(self, policy, prompts: list[Example], initial: dict) -> tuple[dict, list[Example]]:
        """One sample for each of the first --eval-samples prompts, and their statistics; wins are against the samples
        that the first call keeps in `initial`."""
        if not (prompts := prompts[: self.args.eval_samples]):
            return {}, []
        samples = [group[0] for group in self.sample(policy, prompts, 1, (self.args.seed, 0))]
        statistics = sample_statistics(samples, initial.setdefault("samples", samples))
        return {f"eval/{name}": values for name, values in statistics.items()}, samples


def sample_statistics(samples: list[Example], baseline: list[Example] | None = None) -> dict[str, torch.Tensor]:
    """Length in tokens, whether finished, and, with a reward model, reward and wins against a baseline, (N,) each."""
    columns = {"length": [len(s.completion_ids) for s in samples], "finished": [s.finished for s in samples]}
    if not math.isnan(samples[0].reward):
        columns["reward"] = [s.reward for s in samples]
        if baseline:
            columns["win_rate"] = [float(win_rate(s.reward, b.reward)) for s, b in zip(samples, baseline, strict=True)]
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}


def win_rate(rewards, baseline):
    """1 where a reward is higher than the baseline's for the same prompt, 0.5 where they tie, 0 where it is lower."""
    return (rewards > baseline) + 0.5 * (rewards == baseline)


def mean_and_se(values) -> tuple[float, float]:
    """Mean and standard error of the mean (sample standard deviation / √n; 0 for a single value, which has none)."""
    values = torch.as_tensor(values, dtype=torch.float64)
    return values.mean().item(), (values.std(correction=min(1, len(values) - 1)) / math.sqrt(len(values))).item()


def means(values: dict[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """`mean_and_se` of every metric. A ValueError if a value is not finite."""
    if bad := [key for key, value in values.items() if not value.isfinite().all()]:
        raise ValueError(f"{', '.join(bad)} {DIVERGED}")
    return {key: mean_and_se(value) for key, value in values.items()}


# --- logs and reports ---


def write(path: Path, text: str) -> None:
    """Replaces a file as a whole: whoever reads it, or resumes after a crash, sees the old text or the new one."""
    path.with_name(f"{path.name}.tmp").write_text(text)
    path.with_name(f"{path.name}.tmp").replace(path)


def peak_memory(device: torch.device) -> float:
    """GiB since the process began: CUDA allocations or, on the CPU, resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


class Log:
    """A line of metrics.jsonl for every step, the same in TensorBoard and, with --track, in Weights & Biases."""

    def __init__(self, args, folder: Path, start: int):
        """Drops the lines that a run which is resumed at step `start` wrote after that step."""
        path, run_id = folder / "metrics.jsonl", folder / "wandb_run_id"
        write(path, "".join(path.read_text().splitlines(keepends=True)[:start]) if path.exists() else "")
        self.file = path.open("a", buffering=1)
        if args.track:
            import wandb

            how = {"resume": "allow", "name": folder.name, "config": asdict(args), "sync_tensorboard": True}
            run = wandb.init(id=run_id.read_text() if run_id.exists() else None, **how)
            run_id.write_text(run.id)
        self.writer = SummaryWriter(folder, purge_step=start)
        self.writer.add_text("args", json.dumps(asdict(args), indent=2))

    def write(self, metrics: dict) -> None:
        self.file.write(json.dumps(metrics) + "\n")
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, metrics["step"])

    def close(self) -> None:
        self.file.close()
        self.writer.close()


def table(before: dict, after: dict) -> str:
    """The metrics before and after training, a line each."""
    lines = [f"{'mean ± standard error':24}{'before':>20}{'after':>20}"]
    for key in after:
        lines.append(f"{key:24}" + "".join(f"{mean:10.3f} ± {error:7.3f}" for mean, error in (before[key], after[key])))
    return "\n".join(lines) if after else "not evaluated: no --eval-dataset, or --eval-samples 0"


def report(args, folder: Path, before: dict, after: dict, samples_before: list, samples_after: list) -> None:
    """Prints what training changed; writes summary.json, a model card, and outputs.json for the alpaca_eval command."""
    script = Path(sys.modules[type(args).__module__].__file__).name
    card = f"---\nlibrary_name: transformers\ntags: [humanline]\n---\nTrained with `{script}` ([Humanline](https://arxiv.org"
    card += f"/abs/2509.24207)) from `{args.model}` on `{args.dataset}`, in {args.num_steps} steps.\n"
    card += f"```\n{table(before, after)}\n```\nSettings: `{json.dumps(asdict(args))}`\n"
    write(folder / "final" / "README.md", card)
    write(folder / "summary.json", json.dumps({"before": before, "after": after}, indent=2))
    print(f"\n{table(before, after)}")
    questions = [x.prompt if isinstance(x.prompt, str) else x.prompt[-1]["content"] for x in samples_after]
    shown = {q: samples for q, *samples in reversed(list(zip(questions, samples_before, samples_after)))}
    for question in list(dict.fromkeys(questions))[:4]:
        print(f"\nprompt: {question}")
        for when, sample in zip(("before", "after"), shown[question]):
            print(f"{when}: {sample.text}" + ("" if math.isnan(sample.reward) else f"  [reward {sample.reward:.2f}]"))
    rows = [dict(instruction=q, output=s.text, generator=folder.name) for q, s in zip(questions, samples_after)]
    if rows:
        write(folder / "outputs.json", json.dumps(rows, indent=2, ensure_ascii=False))
    print(f"\nwrote {folder}")


# --- grading ---
# math_verify runs in worker processes: an answer that never ends, eats memory or crashes takes one worker with it.


def start_grader(workers: int = 0, time_limit: float = 5.0):
    """A pool of processes, by default up to 8 that share the rank's cores, for `parse_answers` and `grade`. `stop` and
    `join` end it; where the script ends without them, in whatever way, the workers end too.

    time_limit: CPU seconds for one answer, so neither a busy machine nor a queue costs a right answer its grade.
    """
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    from pebble import ProcessPool

    context = multiprocessing.get_context("forkserver")  # a plain fork would inherit the threads of CUDA and gloo
    # A worker imports the main script and this module: 0.2 s if the server holds what they import, else 6 s.
    context.set_forkserver_preload(["torch", "transformers.models.auto.modeling_auto", "datasets", "math_verify"])
    pool = ProcessPool(workers or max(1, min(cores, 8)), max_tasks=1000, initializer=_start_worker, context=context)
    pool.time_limit = time_limit
    return pool


def gold_answers(pool, rows: dict[int, dict]) -> dict[int, str]:
    """{row number: gold answer for `grade`}: the `answer` of a row, text or a number, or its `solution` with the last
    \\boxed{…}; without those that math_verify cannot read or finds unequal to themselves.

    Raises a ValueError if a row has neither, or one is not text.
    """
    golds = {}
    for number, row in rows.items():
        answer, solution = row.get("answer"), row.get("solution")
        if answer is None and solution is None:
            raise ValueError(f"line {number}: it has no answer or solution; the columns are {', '.join(row)}")
        if type(answer) is float:  # written out: 1e-05 would be read as 1·e - 5
            answer = np.format_float_positional(answer, trim="-") if math.isfinite(answer) else ""
        answer = str(answer) if type(answer) is int else answer
        if not isinstance(answer, str | None) or not isinstance(solution, str | None):
            raise ValueError(f"line {number}: answer and solution must be strings")
        golds[number] = answer if answer is not None else solution if "\\boxed" in solution else ""
    parsed = parse_answers(pool, list(golds.values()))
    return {number: gold for number, gold in zip(golds, parsed) if gold is not None}


def parse_answers(pool, texts: list[str]) -> list[str | None]:
    """Gold answers for `grade`: each text, or None if math_verify cannot read it or finds it unequal to itself."""
    return [text if equal else None for text, equal in zip(texts, _judge_all(pool, [(text, None) for text in texts]))]


def format_reward(text: str) -> float:
    """1 for a section of thinking and one of an answer, each tag on a line of its own and nothing around them, else 0
    (Open-R1's format reward, which lets text follow)."""
    thinking, _, answer = text.partition("\n</think>\n<answer>\n")
    return float(thinking.startswith("<think>\n") and answer.endswith("\n</answer>"))


def tag_count_reward(text: str) -> float:
    """A quarter for each of the four tags, with its line breaks, that occurs exactly once (Open-R1)."""
    return sum(text.count(tag) == 1 for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")) / 4


def math_rewards(pool, completions: list[str], golds: list[str]) -> tuple[dict[str, torch.Tensor], int]:
    """{accuracy, format, tag_count: (N,)} from 0 to 1, float64, and the second result of `grade`."""
    accuracies, stopped = grade(pool, completions, golds)
    rewards = {"accuracy": accuracies, "format": map(format_reward, completions)}
    rewards["tag_count"] = map(tag_count_reward, completions)
    return {name: torch.tensor(list(values), dtype=torch.float64) for name, values in rewards.items()}, stopped


def grade(pool, completions: list[str], golds: list[str]) -> tuple[list[float], int]:
    """1 for every completion whose answer equals its gold answer, 0 for the others, shared out over the ranks.

    A completion has one answer: the last <answer>…</answer>, else the whole; in it the last \\boxed{…}, else, if there
    is prose or $…$, \\(…\\), \\[…\\], the last that math_verify extracts ("answer is …" goes first), else all of it as
    LaTeX. So a list of candidates gains nothing: "1, 2, 3" is a set, equal to none of its members. Equality is that of
    math_verify: symbolic, or to 6 decimals; units, case, the base in 12_5 and "x =" do not count; 9% is 9 and 0.09.

    golds: from `parse_answers`, without its None, one for each completion; all the same on every rank.

    Returns the grades, the same for any number of workers and ranks, and how many are 0 because grading was stopped.
    A RuntimeError if the pool broke, because something outside killed an idle worker.
    """
    inside = [completion.rpartition("</answer>")[0].rpartition("<answer>")[1:] for completion in completions]
    answers = [answer if tag else completion for (tag, answer), completion in zip(inside, completions)]
    verdicts = _judge_all(pool, list(zip(golds, answers, strict=True)))
    return [float(verdict or 0) for verdict in verdicts], verdicts.count(None)


def _judge_all(pool, jobs: list[tuple]) -> list[bool | None]:
    """`_judge` of each distinct job, shared out over the ranks; None where it took too long, too much or crashed."""
    from pebble import ProcessExpired

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    distinct, own = list(dict.fromkeys(jobs)), []
    clock = 20 * pool.time_limit  # seconds by the clock, should a worker sleep
    for future in [pool.schedule(_judge, (*job, pool.time_limit), timeout=clock) for job in distinct[rank::world]]:
        try:
            own.append(future.result())
        except (ProcessExpired, TimeoutError, MemoryError, RecursionError):
            own.append(None)
    parts = [own] * world
    if world > 1:
        dist.all_gather_object(parts, own)
    verdicts = {job: verdict for r in range(world) for job, verdict in zip(distinct[r::world], parts[r], strict=True)}
    return [verdicts[job] for job in jobs]


def _start_worker():
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # or it warns that its own time limit is off
    if not os.path.exists("/proc/self/statm"):  # no Linux: no limit of memory
        return
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + 2 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # 2 GiB more than the imports take


def _judge(gold: str, answer: str | None, time_limit: float) -> bool:
    """In a worker: whether the answer equals the gold answer or, with None, whether the gold answer equals itself."""
    from math_verify import verify

    signal.setitimer(signal.ITIMER_PROF, time_limit)  # Python has no handler for its signal, so the kernel ends us
    try:
        target = _read_answer(gold, True)
        return verify(target, target if answer is None else _read_answer(answer, False), timeout_seconds=None)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@lru_cache(256)
def _read_answer(text: str, is_gold: bool) -> list:
    """In a worker: the answer in a text, a list of one sympy object or of none."""
    from latex2sympy2_extended.math_normalization import extract_boxed_content
    from math_verify import LatexExtractionConfig, parse

    options = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": None}
    # math between delimiters, the word answer, or two words side by side outside braces
    prose = r"(?<!\\)(\$|\\[(\[])|(?i:answer)|(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}"
    boxed = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if boxed >= 0:
        text = extract_boxed_content(text[boxed:], "last")
    elif not is_gold and re.search(prose, re.sub(r"\{[^{}]*\}", "", text)):
        tight = re.sub(r"\s+(\\[)\]]|\$+\W*$)", r"\1", text)  # where math ends in a space, its unit is not recognized
        if found := parse(tight, **options):
            return found
    return parse(f"\\boxed{{{text.strip().rstrip('.,')}}}", [LatexExtractionConfig(boxed_match_priority=0)], **options)
