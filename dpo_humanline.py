"""Humanline DPO: preference optimization against a reference that follows the policy.

"Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207), equation 6. Two lines make DPO humanline:
`grep -n "# humanline [cs]" dpo_humanline.py`.

    python dpo_humanline.py  # one process, the embedded toy, half a minute
    torchrun --nproc-per-node 4 dpo_humanline.py --model ... --dataset ...

Differs from the paper in (docs/dpo.md, section 8):
    - The gradient norm is one norm over all ranks; in the authors' code each has its own (docs/dpo.md, 8).
    - Completion masks say which tokens count; the paper's listing counts log-ratios that are not exactly 0.
    - The reference copies the policy's shards in place, instead of loading a state dict.
    - The loss is the mean over the global batch, the same for any number of ranks and passes.

B sequences, T tokens. Log-probs are in nats. A mask is 1 at completion tokens, else 0. An Example is a prompt
with one completion, a group the examples of one prompt: here (chosen, rejected).
"""

import gzip
import json
import math
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow.parquet
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

import run
import utils


# === Args ===
@dataclass
class Args:
    # algorithm
    beta: float = 0.1  # DPO's β (paper: 0.1)
    # humanline
    humanline: bool = True  # --no-humanline: no clipping, no syncing but at the start of a round
    k: int = 1  # optimizer steps between syncs of the reference (paper: 1)
    log_epsilon_P: float = -1.5  # bounds of a token's log π_θ/π_ref, nats (Tables 1, 2)
    log_epsilon_R: float = 1.5
    clip: bool = True  # --no-clip: syncing alone
    sync: Literal["before_step", "after_step", "none"] = "before_step"  # after_step: Figure 10
    # optimization
    num_steps: int = 312  # optimizer steps (paper: 312, 10K pairs once)
    batch_size: int = 32  # pairs per step, over all ranks (Table 1)
    micro_batch_tokens: int = 8192  # most tokens in a forward pass of a rank; 0: any
    lr: float = 5e-6  # AdamW's learning rate (paper: 5e-6, online 2.5e-6)
    warmup_fraction: float = 0.1  # share of the steps (Tables 1, 2)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after warmup (paper: constant)
    weight_decay: float = 1e-2  # of AdamW (Table 1)
    adam_eps: float = 1e-5  # AdamW's ε (paper: 1e-5)
    max_grad_norm: float = 1.0  # global gradient norm (Table 3; online 0.5, online + humanline 1.0)
    # data
    dataset: str = ""  # pairs: file or Hub name; formats in docs/dpo.md
    dataset_split: str = "train"  # Hub split, such as train[:10000]
    eval_dataset: str = ""  # held out, in the same formats; empty: none
    eval_split: str = "test"  # Hub split
    max_prompt_length: int = 625  # tokens; rows with a longer prompt are dropped (from the authors' code)
    max_length: int = 1250  # tokens; what is cut here has no end of turn (from the authors' code)
    # model
    model: str = ""  # folder or Hub name; empty: the toy and its settings
    chat_template: str = ""  # Jinja file
    eos_token: str = ""  # that ends a turn; empty: the tokenizer's
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bf16, CPU fp32, toy fp64
    gradient_checkpointing: bool = False  # less memory, more time
    compile: bool = False  # of every block, by torch.compile: a minute at first, then faster on a GPU
    shard_size: int = 0  # ranks that share a copy (HSDP), such as those of a machine; 0: all
    trust_remote_code: bool = False  # run a model's own Python code
    # online
    online: bool = False  # rounds of samples (Algorithm 1)
    reward_model: str = ""  # classifier with one output
    round_prompts: int = 1024  # prompts per round (Table 1)
    samples_per_prompt: int = 8  # best and worst make a pair (Table 1)
    reward_threshold: float = 0.01  # τ, least difference in a pair (Table 1)
    # sampling
    max_new_tokens: int = 2048  # tokens (paper: 2048); training reads those up to --max-length
    temperature: float = 0.7  # of sampling (Table 1); log-probs in training are at 1
    top_p: float = 0.95  # nucleus sampling (Table 1)
    engine: Literal["auto", "vllm", "hf"] = "auto"  # auto: vLLM where installed
    vllm_memory: float = 0.3  # share of a GPU's memory
    vllm_tensor_parallel: int = 1  # GPUs that share an engine
    generation_batch_size: int = 32  # sequences, for hf
    # run
    seed: int = 1  # of data order and sampling
    output_dir: str = ""  # default runs/<script>__<seed>__<time>
    resume: str = ""  # folder of a run; flags beside it win
    checkpoint_every: int = 100  # steps; 0: never
    keep_checkpoints: int = 2  # the newest stay; 0: all
    eval_every: int = 0  # steps; 0: only before and after training
    eval_samples: int = 256  # held-out prompts; 0: none


# What the toy needs instead. The Adam ε keeps tokens that no pair disputes from drifting.
FOLDER = Path(__file__).resolve().parent / "toy" / "bouquets"
TOY = dict(
    model=f"{FOLDER}/policy",
    reward_model=f"{FOLDER}/reward_model",
    dataset=f"{FOLDER}/preferences_train.jsonl.gz",
    eval_dataset=f"{FOLDER}/preferences_test.jsonl.gz",
    dtype="float64",  # so that any number of ranks and passes gives the same digits
    num_steps=320,
    lr=1e-3,
    adam_eps=1e-2,
    k=16,
    beta=10.0,
    max_new_tokens=64,
    generation_batch_size=256,
)
TOY_ONLINE = dict(dataset=f"{FOLDER}/prompts_train.jsonl.gz")


# === Loss ===
def dpo_loss(log_ratio, mask, beta: float):
    """Equation 6 on (humanline-clipped) token log-ratios: -log σ(r_chosen - r_rejected), r = β·Σ_t log_ratio.

    Args:
        log_ratio: (B, T) log π_θ/π_ref in nats, of the chosen completions, then of the rejected ones.
        mask: (B, T), 1 at completion tokens.

    Returns:
        The loss of every pair (B/2,), and the rewards r (B,), detached.
    """
    rewards = beta * (log_ratio * mask).sum(-1)  # (B,)
    chosen, rejected = rewards.chunk(2)  # (B/2,) each
    return -F.logsigmoid(chosen - rejected), rewards.detach()


def clip_log_ratio(args, log_ratio):
    """log π_θ/π_ref for the loss (GRPO: for its ratio), (B, T): beyond a bound the bound, no gradient."""
    if not args.humanline or not args.clip:
        return log_ratio
    return log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)  # humanline clipping (§5.1, Figure 4)


@torch.no_grad()
def sync_reference(reference, policy):
    """π_ref ← π_θ. Both are sharded alike, so every rank copies its own shards, without communication."""
    targets = [parameter.to_local() for parameter in reference.parameters()]
    sources = [parameter.to_local() for parameter in policy.parameters()]
    torch._foreach_copy_(targets, sources)


# === Data ===
def load_rows(name: str, split: str):
    """Yields (line number, row) of a .jsonl, .jsonl.gz or .parquet file, or of a Hub data set."""
    if name.endswith((".jsonl", ".jsonl.gz")):
        open_file = gzip.open if name.endswith(".gz") else open
        with open_file(name, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                with run.exit_on_error(f"{name}, line {number}"):  # the caller's has no number for it
                    row = json.loads(line)
                yield number, row
    elif name.endswith(".parquet"):
        yield from enumerate(pyarrow.parquet.read_table(name).to_pylist(), 1)
    else:
        import datasets  # here, since it takes a second

        yield from enumerate(datasets.load_dataset(name, split=split), 1)


def encode_row(args, tokenizer, eos_ids, row):
    """(chosen, rejected) of a row, or (prompt,) of one without them. Change it to read other columns.

    Raises utils.CannotTrain if the row is to be left out, and another exception if it is malformed.
    """
    utils.check_columns(row)  # an error for text in other columns, such as "system" (utils.NOT_READ)
    prompt, completions = read_pair(row)
    return encode_group(args, tokenizer, eos_ids, prompt, completions, [1.0, 0.0])


def read_pair(row):
    """Prompt, and [chosen, rejected], or [] where the row has neither. With messages Q and A:

    {"prompt": "text", "chosen": "text", "rejected": "text"}
    {"prompt": [Q], "chosen": [A], "rejected": [A]}
    {"chosen": [Q, A], "rejected": [Q, A]}
    {"prompt": "text of Q", "chosen": [Q, A], "rejected": [Q, A]}  # UltraFeedback
    """
    prompt = row.get("prompt", row.get("instruction"))
    chosen = row.get("chosen")
    rejected = row.get("rejected")
    if isinstance(chosen, list):
        *history, last_chosen = chosen
        *rejected_history, last_rejected = rejected
        if history != rejected_history:
            raise ValueError("chosen and rejected must differ in their last message alone")
        texts = [message["content"] for message in history]
        if history and prompt not in (None, history, *texts):
            raise ValueError("chosen and rejected do not begin with the prompt")
        prompt = history or prompt
        chosen, rejected = [last_chosen], [last_rejected]  # as in the second form
    if prompt is None:
        raise ValueError(f"no prompt in the columns {', '.join(row)}")
    if chosen is None and rejected is None:
        return prompt, []
    if chosen == rejected:
        raise utils.CannotTrain("chosen equals rejected")
    return prompt, [chosen, rejected]


def encode_group(args, tokenizer, eos_ids, prompt, completions, rewards):
    """The examples of a prompt, one for each completion, or one without."""
    prompt_ids, _ = utils.encode(tokenizer, eos_ids, prompt)
    if not 0 < len(prompt_ids) <= min(args.max_prompt_length, args.max_length - 1):
        raise utils.CannotTrain("prompt empty, or longer than --max-prompt-length or --max-length")
    group = []
    for completion, reward in zip(completions, rewards):
        if isinstance(completion, list):
            (message,) = completion
            if message["role"] != "assistant":
                raise ValueError("a completion must be one message of the assistant")
            completion = message["content"]
        if not completion.strip():
            raise utils.CannotTrain("completion empty")
        _, completion_ids = utils.encode(tokenizer, eos_ids, prompt, completion)
        example = utils.Example(prompt, prompt_ids, completion_ids, float(reward))
        group.append(example.cut(args.max_length))
    return tuple(group) or (utils.Example(prompt, prompt_ids),)


def load_groups(args, tokenizer, eos_ids, name: str, split: str) -> list[tuple]:
    """The groups of a data set. Prints which rows are left out, and where the first one's turns end."""
    groups = []
    left_out = defaultdict(list)  # {reason: line numbers}
    with run.exit_on_error(name):
        for number, row in load_rows(name, split):
            with run.exit_on_error(f"{name}, line {number}"):
                try:
                    groups.append(encode_row(args, tokenizer, eos_ids, row))
                except utils.CannotTrain as reason:
                    left_out[str(reason)].append(number)
    counts = [f"{name}: {len(groups)} rows"]
    for reason, numbers in left_out.items():
        counts.append(f"{len(numbers)} left out, the first in line {numbers[0]}: {reason}")
    summary = "; ".join(counts)
    if not groups:
        run.fail(summary)
    first = groups[0][0]
    prompt_end = tokenizer.decode(first.prompt_ids[-8:])
    completion_end = tokenizer.decode(first.completion_ids[-8:])
    run.say(f"{summary}; a prompt ends {prompt_end!r}, its completion {completion_end!r}")
    return groups


def draw_batch(groups, number: int, size: int, seed: int):
    """Batch `number` (step or round) of endless, newly shuffled epochs. What fills no batch is skipped."""
    batches_per_epoch = len(groups) // size
    epoch, batch = divmod(number, batches_per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(groups))
    return [groups[i] for i in order[batch * size : (batch + 1) * size]]


# === Models ===
def setup(args):
    """Starts the process group and resolves --dtype auto. Returns rank, world size and device.

    Ends the run if the ranks have other flags or another script.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        # Lengths vary, and memory would be in pieces. It is read when CUDA starts.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for every new length of a sequence
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # as torchrun does, so that numbers are the same without it
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # without torchrun there is no address to meet at
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    run.compare_programs(args, __file__)
    transformers.utils.logging.disable_progress_bar()
    if args.dtype == "auto":
        args.dtype = "bfloat16" if device.type == "cuda" else "float32"
    return dist.get_rank(), dist.get_world_size(), device


def decoder_blocks(model):
    """The modules that transformers names as not to be split; `fully_shard` puts FSDP before the name."""
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def shard_model(args, model, device):
    """Shards the model in place with FSDP2: decoder blocks, an untied embedding and head, the rest as root.

    With --shard-size (HSDP) so many ranks share a copy, and each set of so many has an equal one.
    """
    world = dist.get_world_size()
    shard_size = args.shard_size or world
    if shard_size == world:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    else:
        shape = (world // shard_size, shard_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    units = decoder_blocks(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:  # a tied weight belongs to both, and so to the root
        units += [embedding, head]
    compute_dtype = getattr(torch, args.dtype)
    # Gradients are summed over ranks in fp32 at least: bf16 would lose those of many ranks.
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    precision = MixedPrecisionPolicy(compute_dtype, reduce_dtype)
    for module in [*units, model]:
        # By default the root stays gathered after a forward, for the backward pass. The reference has none:
        # its next forward would read the gathered copy, and miss a sync in between.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        # The loss is divided by the global batch already, so gradients are sums over ranks, not means.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # by plain sums, which every backend has
    return model


def load_models(args, frozen_dtype: torch.dtype, device):
    """Policy, stored in fp32, and reference, stored in `frozen_dtype`; both compute in --dtype."""
    config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    longest = max(args.max_length, args.max_prompt_length + args.max_new_tokens)
    utils.check_positions(config, longest, args.max_new_tokens)
    config.dtype = None  # so that "auto" is the files' dtype

    def load(dtype):
        model = utils.load_pretrained(
            AutoModelForCausalLM,
            args.model,
            config=config,
            dtype=dtype,
            trust_remote_code=args.trust_remote_code,
        )
        run.compare_ranks("the checksum of --model's weights", utils.checksum(model))
        return shard_model(args, model, device)

    # Weights in the files' dtype are memory-mapped, in pages that all ranks share. The policy is cast to fp32
    # after sharding, which moves a rank's shards to its device: no rank ever holds the whole model in fp32.
    policy = load("auto").to(torch.float32).eval()  # dropout would part it from the reference
    reference = load(frozen_dtype).eval().requires_grad_(False)
    for name, buffer in policy.named_buffers():
        # Gemma's embed_scale is rounded to the dtype of loading. Both models must have the same.
        buffer.copy_(reference.get_buffer(name))
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
        for block in decoder_blocks(policy):
            block.training = True  # not its children; in eval mode it would do nothing
    for model in (policy, reference):
        attention = utils.choose_attention(model, longest)
        if args.compile:
            for block in decoder_blocks(model):
                block.compile(dynamic=True)
    run.say(f"attention: {attention}")
    return policy, reference


def make_sampler(args, tokenizer, eos_ids, dtype, device):
    return utils.Sampler(
        model=args.model,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        dtype=dtype,
        device=device,
        engine=args.engine,
        max_length=args.max_prompt_length + args.max_new_tokens,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        batch_size=args.generation_batch_size,
        vllm_memory=args.vllm_memory,
        vllm_tensor_parallel=args.vllm_tensor_parallel,
        trust_remote_code=args.trust_remote_code,
        reward_model=args.reward_model,
    )


# === Rounds and evaluation ===
def best_and_worst(samples: list[utils.Example], threshold: float):
    """Algorithm 1: the completions with the most and the least reward; () if they differ by less than τ."""
    best = max(samples, key=lambda x: x.reward)
    worst = min(samples, key=lambda x: x.reward)
    difference = best.reward - worst.reward
    if difference == 0 or difference < threshold:
        return ()
    return best, worst


def make_group(args, samples: list[utils.Example]):
    """(chosen, rejected) of one prompt's samples, or ()."""
    return best_and_worst(samples, args.reward_threshold)


def sample_round(args, sampler, policy, groups: list[tuple], number: int):
    """Algorithm 1: round `number`, from 1, of the policy's samples for the next prompts.

    Returns:
        The groups of those prompts whose samples make one, and metrics.
    """
    size = min(args.round_prompts, len(groups))
    prompts = [group[0] for group in draw_batch(groups, number - 1, size, args.seed)]
    with run.exit_on_error(f"round {number}", ValueError):
        samples, metrics = sampler.sample(policy, prompts, args.samples_per_prompt, (args.seed, number))
    new_groups = []
    for of_prompt in samples:
        # They were rewarded as a whole, and are trained on up to --max-length.
        group = make_group(args, [sample.cut(args.max_length) for sample in of_prompt])
        if group:
            new_groups.append(group)
    if all(group[0].reward == group[-1].reward for group in new_groups):  # or if there is none
        run.fail(f"round {number}: no prompt's rewards differ; raise --temperature, lower --reward-threshold")
    metrics["rollout/round"] = number
    metrics["rollout/filtered"] = 1 - len(new_groups) / len(prompts)
    return new_groups, metrics


class Evaluation(NamedTuple):
    statistics: dict  # {name: (mean, standard error)}
    logps: torch.Tensor | None  # (2P, T) nats: of P held-out pairs' chosen completions, then rejected ones
    samples: list  # one for each of the first --eval-samples prompts


@run.exit_on_error("evaluation", ValueError)
def evaluate(args, policy, sampler, held_out: list[tuple], initial=None) -> Evaluation:
    """Of the policy on held-out pairs, without clipping, and on samples for held-out prompts.

    initial: the Evaluation of the initial policy: the reference of the pairs, and whom samples are to beat.
    """
    values = {}
    logps = None
    pairs = [group for group in held_out if len(group) == 2]
    if pairs:
        examples = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
        logps, mask = utils.completion_logps(policy, examples)  # (2P, T) each
        log_ratio = logps - (initial.logps if initial else logps)  # 0 before training
        losses, rewards = dpo_loss(log_ratio, mask, args.beta)  # (P,), (2P,)
        chosen, rejected = rewards.chunk(2)  # (P,) each
        values["eval/loss"] = losses
        values["eval/accuracy"] = utils.win_rate(chosen, rejected)
        values["eval/margin"] = chosen - rejected
    samples = []
    prompts = [group[0] for group in held_out[: args.eval_samples]]
    if prompts:
        by_prompt, _ = sampler.sample(policy, prompts, 1, (args.seed, 0))
        samples = [sample for (sample,) in by_prompt]
        for name, statistic in utils.sample_statistics(samples).items():
            values[f"eval/{name}"] = statistic  # length, finished, and reward if there is a reward model
        if args.reward_model:
            baseline = initial.samples if initial else samples
            rewards = utils.sample_statistics(baseline)["reward"]
            values["eval/win_rate"] = utils.win_rate(values["eval/reward"], rewards)
    return Evaluation(utils.means(values), logps, samples)


# === Training ===
def clipping_metrics(args, log_ratio):
    """For each token: whether it is beyond a bound, and |log-ratio|, (B, T)."""
    return {
        "humanline/clipped_low": (log_ratio < args.log_epsilon_P).double(),
        "humanline/clipped_high": (log_ratio > args.log_epsilon_R).double(),
        "humanline/log_ratio_abs_mean": log_ratio.abs(),
    }


def pair_metrics(losses, rewards, logps, mask):
    """For each pair, (B/2,)."""
    chosen, rejected = rewards.chunk(2)
    chosen_logps, rejected_logps = (logps * mask).sum(-1).chunk(2)
    return {
        "loss": losses,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": utils.win_rate(chosen, rejected),
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "logps/chosen": chosen_logps,
        "logps/rejected": rejected_logps,
    }


@run.exit_on_error("reading or writing", OSError)
def main(args: Args):
    run.check_flags(args, args.batch_size)
    rank, world, device = setup(args)
    frozen_dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32  # reference, engine, judge

    # data
    with run.exit_on_error(f"--model {args.model}"):
        tokenizer, eos_ids = utils.load_tokenizer(
            args.model, args.chat_template, args.eos_token, args.trust_remote_code
        )
    groups = load_groups(args, tokenizer, eos_ids, args.dataset, args.dataset_split)
    held_out = []
    if args.eval_dataset:
        held_out = load_groups(args, tokenizer, eos_ids, args.eval_dataset, args.eval_split)
    groups_per_step = args.batch_size  # a group is a pair
    if len(groups) < groups_per_step:
        run.fail(f"--dataset {args.dataset}: {len(groups)} rows do not fill a batch of {groups_per_step}")
    if not args.online and any(len(group) != 2 for group in groups):
        run.fail(f"--dataset {args.dataset}: a row has no chosen and rejected; prompts alone need --online")

    # models
    with run.exit_on_error(f"--model {args.model}"):
        policy, reference = load_models(args, frozen_dtype, device)
    with run.exit_on_error(f"--reward-model {args.reward_model}"):
        sampler = make_sampler(args, tokenizer, eos_ids, frozen_dtype, device)
    # Fused, since CUDA's default (foreach) needs a copy of one of Adam's moments. Rate, ε and decay are set
    # before every step.
    optimizer = torch.optim.AdamW(policy.parameters(), fused=device.type == "cuda")
    lr_factor = run.lr_schedule(args, optimizer)  # of a step, from 1: its share of --lr

    # run
    output_dir = run.open_folder(args, __file__)
    checkpoint = run.newest_checkpoint(output_dir)
    before = evaluate(args, policy, sampler, held_out)  # of the initial policy, also on resume
    progress = run.load_checkpoint(checkpoint, policy, reference, optimizer, run.hash_data(groups))
    run.save_args(args, output_dir, __file__)
    log = run.Log(output_dir, progress.step, before)
    signals = run.Signals()  # one ends the run after the step, with a checkpoint

    steps = range(progress.step, args.num_steps)
    bar = tqdm(steps, initial=progress.step, total=args.num_steps, disable=rank != 0)
    for step in bar:
        started = time.perf_counter()
        metrics = {"step": step}

        # the batch: pairs of the data set, or of the policy's own samples
        if args.online:
            while len(progress.pool) < groups_per_step:
                progress.round += 1
                new_groups, rollout = sample_round(args, sampler, policy, groups, progress.round)
                progress.pool += new_groups  # behind what is left of the last round
                metrics |= rollout
                sync_reference(reference, policy)  # Algorithm 1: at the round's start, humanline or not
                progress.last_round = step
                progress.last_sync = step
            batch = progress.pool[:groups_per_step]
            progress.pool = progress.pool[groups_per_step:]
            metrics["rollout/age_steps"] = step - progress.last_round  # of the batch's newest samples
        else:
            batch = draw_batch(groups, step, groups_per_step, args.seed)

        # the gradient of the mean loss over the pairs of all ranks and passes
        lengths = [chosen.length + rejected.length for chosen, rejected in batch]
        # this rank's passes; every rank has as many
        micro_batches = utils.make_micro_batches(lengths, world, args.micro_batch_tokens)[rank::world]
        means = run.Means()
        for number, indices in enumerate(micro_batches, 1):
            # Gradients are summed over ranks in every pass, so that only shards stay. On a CPU in the last:
            # fp32 shards would round, and a toy in fp64 is to have the same digits on any number of ranks.
            policy.set_requires_gradient_sync(device.type == "cuda" or number == len(micro_batches))
            policy.set_requires_all_reduce(number == len(micro_batches))  # over the copies of HSDP
            chosen = [batch[i][0] for i in indices]
            rejected = [batch[i][1] for i in indices]
            input_ids, mask = utils.pad_batch(chosen + rejected, device)  # (B, T)

            with torch.no_grad():  # first, since the policy's pass keeps its activations
                ref_logps = utils.token_logps(reference, input_ids, mask)  # (B, T)
            logps = utils.token_logps(policy, input_ids, mask)  # (B, T)
            log_ratio = logps - ref_logps  # (B, T)
            clipped_log_ratio = clip_log_ratio(args, log_ratio)  # (B, T)
            losses, rewards = dpo_loss(clipped_log_ratio, mask, args.beta)  # (B/2,), (B,)
            (losses.sum() / args.batch_size).backward()

            means.add(pair_metrics(losses, rewards, logps, mask), torch.ones_like(losses))
            means.add(clipping_metrics(args, log_ratio), mask)
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        metrics["grad_norm"] = norm.full_tensor().item()  # before clipping, of all shards
        metrics |= means.over_ranks()
        if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
            run.fail(f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; lower --lr")

        # the update, before it the sync, at steps 0, k, 2k: offline a loss sees a reference 1 to k behind
        metrics["humanline/steps_since_sync"] = step - progress.last_sync
        if args.humanline and args.sync == "before_step" and step % args.k == 0:
            sync_reference(reference, policy)  # humanline syncing (§5.1, Figure 3)
            progress.last_sync = step
        metrics["lr"] = args.lr * lr_factor(step + 1)
        for param_group in optimizer.param_groups:  # a checkpoint has other ones, but flags win
            param_group.update(lr=metrics["lr"], eps=args.adam_eps, weight_decay=args.weight_decay)
        optimizer.step()
        optimizer.zero_grad()
        if args.humanline and args.sync == "after_step" and (step + 1) % args.k == 0:
            sync_reference(reference, policy)  # trust-region syncing (Figure 10)
            progress.last_sync = step + 1
        progress.step = step + 1

        # metrics and checkpoint
        metrics |= run.perf_metrics(started, sum(lengths))
        if args.eval_every and progress.step % args.eval_every == 0:
            metrics |= run.evaluation_means(evaluate(args, policy, sampler, held_out, before))
        bar.set_postfix(loss=metrics["loss"], accuracy=metrics["rewards/accuracies"], refresh=False)
        log.write(metrics)
        stopped_by = signals.of_any_rank()
        if stopped_by or run.checkpoint_is_due(args, progress.step):
            run.save_checkpoint(args, output_dir, policy, reference, optimizer, progress)
        if stopped_by:
            run.stop(stopped_by, progress.step, output_dir)

    after = evaluate(args, policy, sampler, held_out, before)
    run.export(output_dir / "final", policy, tokenizer, eos_ids)
    run.report(log, before, after)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(run.parse_args(Args, __file__, __doc__, TOY, TOY_ONLINE))
