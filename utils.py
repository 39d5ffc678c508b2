"""Log-probability and evaluation helpers shared by the four humanline scripts.

B sequences, T tokens, V vocabulary, D hidden size. Log-probabilities are in nats, in fp32 or, where the model
computes in it, fp64. A mask is 1 at completion tokens (the end-of-turn token included) and 0 elsewhere.
"""

import gc
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

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
    for message in [*turns, *(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])]:
        if not isinstance(message, dict):
            raise ValueError(f"a message must be an object with role and content, not {type(message).__name__}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"{key} must be a string, not {type(message.get(key)).__name__}")
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
    for end, token in enumerate(ids):
        if token in eos_ids and not tokenizer.decode([t for t in ids[end + 1 :] if t not in eos_ids]).strip():
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
#
# An engine is an unsharded transformers model or a vLLM engine; both live in the training process, one on every rank.


def start_engine(name: str, model_name: str, *, dtype, device, max_length: int, memory_share: float, trust_remote_code):
    """Starts the engine called `name`; "auto" is vLLM where it is installed for this device, else transformers.

    The process group must exist, all ranks call this together, and weights are right only after `update_engine`.

    Args:
        dtype: of weights and cache.
        max_length: tokens of prompt and completion.
        memory_share: share of the GPU's memory for vLLM's weights and cache (on the CPU the cache is 1 GiB).

    Returns:
        The engine.
    """
    if name == "hf" or (name == "auto" and not vllm_available(device)):
        load = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        model = AutoModelForCausalLM.from_pretrained(model_name, **load).to(device).eval()
        model.generation_config = GenerationConfig()  # no sampling defaults of the model's own, such as a penalty
        return model
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "RANK": "0", "LOCAL_RANK": "0"}
    os.environ |= {key: value for key, value in defaults.items() if key not in os.environ}
    from vllm import LLM, _custom_ops

    options = {"gpu_memory_utilization": memory_share, "enable_sleep_mode": True}
    if device.type == "cpu":
        _custom_ops._supports_onednn = False  # its prepacked copies of the weights would never be updated
        options = {"kv_cache_memory_bytes": 2**30, "enforce_eager": True}
    set_num_threads = torch.set_num_threads
    engine = LLM(
        model=model_name,
        trust_remote_code=trust_remote_code,
        skip_tokenizer_init=True,  # token ids in, token ids out
        load_format="dummy",  # update_engine brings the weights
        dtype=dtype,
        hf_overrides={"head_dtype": "float32"},  # logits as exact as token_logps computes them
        max_model_len=max_length,
        generation_config="vllm",  # none of the model's own sampling defaults
        logprobs_mode="raw_logprobs",  # of the model itself: before temperature and nucleus
        distributed_executor_backend="external_launcher",  # in this process; with one GPU each, ranks never wait
        tensor_parallel_size=1,
        disable_log_stats=True,
        **options,
    )
    torch.set_num_threads = set_num_threads  # vLLM disables it on the CPU
    engine.llm_engine.engine_core._finalizer.detach()  # it would destroy our process group together with the engine
    gc.unfreeze()  # vLLM exempts every object of the process from garbage collection
    sleep_engine(engine)
    return engine


def vllm_available(device: torch.device) -> bool:
    """Whether vLLM is installed and built for the device that trains."""
    if find_spec("vllm") is None:
        return False
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    from vllm.platforms import current_platform

    return current_platform.device_type == device.type


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


def sleep_engine(engine) -> None:
    """Frees vLLM's GPU memory until the next `update_engine`; nothing to do for transformers or on the CPU."""
    if not isinstance(engine, torch.nn.Module) and engine.llm_engine.vllm_config.model_config.enable_sleep_mode:
        engine.sleep(level=2)


def generate(
    engine,
    prompts: list[Sequence[int]],
    *,
    seed: Sequence[int],
    eos_ids: Sequence[int],
    pad_id: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    batch_size: int = 256,
) -> tuple[list[list[int]], list[list[float]]]:
    """Samples one completion for every prompt, shared out over the ranks. Rollouts and evaluation both come here.

    The completions do not depend on the number of ranks: with vLLM every request has a seed of its own, from (seed, its
    position); with transformers, batches are cut before they are dealt to the ranks and seeded likewise.

    Args:
        engine: from `start_engine`, updated.
        prompts: prompt ids, as training sees them.
        seed: integers, such as (seed, round).
        eos_ids: every id that ends a turn.
        max_new_tokens: tokens; a completion that reaches it without an end-of-turn token is returned as it is.
        temperature: 0 is greedy decoding.
        top_p: nucleus probability mass, in (0, 1].
        batch_size: sequences per transformers batch.

    Returns:
        In the order of `prompts`, on every rank: completion ids, up to and including the first end-of-turn token, and
        the log-probability, in nats, that the engine gives each of them (at temperature 1, before the nucleus cut).
    """
    size, found = (batch_size if isinstance(engine, torch.nn.Module) else 1), {}
    for first in range(dist.get_rank() * size, len(prompts), dist.get_world_size() * size):
        found[first] = prompts[first : first + size]
    seeds = {first: int(np.random.SeedSequence((*seed, first)).generate_state(1)[0]) for first in found}
    limits = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    if isinstance(engine, torch.nn.Module):
        for first, rows in found.items():
            found[first] = _generate_hf(engine, rows, seeds[first], eos_ids, pad_id, **limits)
    else:
        from vllm import SamplingParams

        limits["max_tokens"] = limits.pop("max_new_tokens")
        own = {"ignore_eos": True, "stop_token_ids": list(eos_ids), "detokenize": False, "logprobs": 0}
        params = [SamplingParams(seed=seed, **limits, **own) for seed in seeds.values()]
        requests = [{"prompt_token_ids": list(rows[0])} for rows in found.values()]
        for first, result in zip(found, engine.generate(requests, params, use_tqdm=False), strict=True):
            ids = list(result.outputs[0].token_ids)
            logps = [step[token].logprob for token, step in zip(ids, result.outputs[0].logprobs, strict=True)]
            found[first] = [(ids, logps)]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    batches = sorted((first, batch) for part in parts for first, batch in part.items())
    return tuple(map(list, zip(*[sample for _, batch in batches for sample in batch])))


@torch.no_grad()
def _generate_hf(model, prompts, seed, eos_ids, pad_id, *, max_new_tokens, temperature, top_p):
    device, width = next(model.parameters()).device, max(map(len, prompts))
    input_ids = torch.tensor([[pad_id] * (width - len(ids)) + [*ids] for ids in prompts], device=device)
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos_ids),
            pad_token_id=pad_id,
            **(sampling if temperature > 0 else {"do_sample": False, "temperature": None, "top_p": None}),
        )
    completions = []
    for ids in output[:, width:].tolist():
        end = next((i for i, token in enumerate(ids) if token in eos_ids), len(ids) - 1)
        completions.append(ids[: end + 1])
    samples = []
    for first in range(0, len(prompts), 16):  # 16 sequences at a time: their hidden states are in memory, not a cache
        part = list(zip(prompts, completions))[first : first + 16]
        logps, mask = token_logps_of(model, part, pad_id, device)
        samples += [(ids, row[chosen.bool()].tolist()) for (_, ids), row, chosen in zip(part, logps, mask)]
    return samples


def token_logps_of(model, sequences: list[Ids], pad_id: int, device: torch.device):
    """token_logps (B, T) and mask (B, T) of (prompt ids, completion ids) sequences."""
    input_ids, mask = pad_batch(sequences, pad_id, device)
    return token_logps(model, input_ids, mask), mask


@torch.no_grad()
def engine_difference(policy, sequences: list[Ids], engine_logps, pad_id: int, device) -> tuple[float, float]:
    """Mean and maximum of |log-prob of the engine - log-prob of the policy| over the tokens of a few samples, in nats.

    A sampler with stale weights, another temperature or another model shows here. Every rank computes the same.
    """
    logps, mask = token_logps_of(policy, sequences, pad_id, device)
    reported = torch.tensor([value for row in engine_logps for value in row], dtype=logps.dtype, device=device)
    difference = (logps[mask.bool()] - reported).abs()
    return difference.mean().item(), difference.max().item()


# --- reward model and statistics -----------------------------------------------------------------------------------


def load_reward_model(name: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool):
    """A sequence classifier with one output, and its tokenizer.

    Raises:
        ValueError: it has several outputs.
    """
    load = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    model = AutoModelForSequenceClassification.from_pretrained(name, **load).to(device).eval()
    if model.config.num_labels != 1 and not trust_remote_code:  # remote code such as ArmoRM's has its own `score`
        raise ValueError(f"the model has {model.config.num_labels} outputs, and a reward model has one")
    return model, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


@torch.no_grad()
def reward_scores(model, tokenizer, samples: list[tuple], batch_tokens: int = 16384) -> torch.Tensor:
    """Scores of a sequence-classification reward model, shared out over the ranks: its one output, or the `score` that
    a model with code of its own returns (ArmoRM).

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
            if not isinstance(prompt, str):
                prompt = "\n".join(message["content"] for message in prompt)
            encoded.append(tokenizer(prompt + completion + (tokenizer.eos_token or "") * finished).input_ids)
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]), reverse=True)
    scores = torch.zeros(len(encoded), dtype=torch.float64, device=device)
    config, start, turn = model.config.get_text_config(), 0, 0
    pad_id = config.pad_token_id if (config.pad_token_id or 0) >= 0 else None
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
        output = model(input_ids=input_ids, attention_mask=attention_mask.to(device))
        score = output.score if hasattr(output, "score") else output.logits  # (b,) or (b, 1)
        scores[batch] = score.double().view(len(batch))
    dist.all_reduce(scores)
    return scores.cpu()


def mean_and_se(values) -> tuple[float, float]:
    """Mean and standard error of the mean (sample standard deviation / √n; 0 for a single value, which has none)."""
    values = torch.as_tensor(values, dtype=torch.float64)
    return values.mean().item(), (values.std(correction=min(1, len(values) - 1)) / math.sqrt(len(values))).item()


def win_rate(rewards, baseline) -> torch.Tensor:
    """1 where a reward is higher than the baseline's for the same prompt, 0.5 where they tie, 0 where it is lower."""
    return (rewards > baseline) + 0.5 * (rewards == baseline)


# --- grading -------------------------------------------------------------------------------------------------------
#
# math_verify runs in worker processes: an answer that never ends, eats memory or crashes takes one worker with it.


def start_grader(workers: int, time_limit: float = 5.0):
    """A pool of processes for `parse_answers` and `grade`, started when first used. `stop` and `join` end it; where the
    script ends without them, in whatever way, the workers end too.

    time_limit: CPU seconds for one answer, so neither a busy machine nor a queue costs a right answer its grade.
    """
    from pebble import ProcessPool

    context = multiprocessing.get_context("forkserver")  # a plain fork would inherit the threads of CUDA and gloo
    # A worker imports the main script and this module: 0.2 s if the server holds what they import, else 6 s.
    context.set_forkserver_preload(["torch", "transformers.models.auto.modeling_auto", "datasets", "math_verify"])
    pool = ProcessPool(workers, max_tasks=1000, initializer=_start_worker, context=context)
    pool.time_limit = time_limit
    return pool


def parse_answers(pool, texts: list[str]) -> list[str | None]:
    """Gold answers for `grade`: each text, or None if math_verify cannot read it or finds it unequal to itself.

    texts: answers in LaTeX, or solutions whose last \\boxed{…} is the answer; the same on every rank.
    """
    return [text if equal else None for text, equal in zip(texts, _judge_all(pool, [(text, None) for text in texts]))]


def grade(pool, completions: list[str], golds: list[str]) -> tuple[list[float], int]:
    """1 for every completion whose answer equals its gold answer, 0 for the others, shared out over the ranks.

    A completion has one answer: the last <answer>…</answer>, else the whole; in it the last \\boxed{…}, else, if there
    is prose or $…$, \\(…\\), \\[…\\], the last that math_verify extracts ("answer is …" goes first), else all of it as
    LaTeX. So a list of candidates gains nothing: "1, 2, 3" is a set, equal to none of its members. Equality is that of
    math_verify: symbolic, or to 6 decimals; units, case, the base in 12_5 and "x =" do not count; 9% is 9 and 0.09.

    Args:
        golds: from `parse_answers`, without its None, one for each completion; all the same on every rank.

    Returns:
        The grades, the same for any number of workers and ranks, and how many are 0 because grading was stopped.

    Raises:
        RuntimeError: the pool broke, because something outside killed an idle worker.
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
