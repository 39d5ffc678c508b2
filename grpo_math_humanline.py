"""Humanline GRPO with verifiable rewards: sampling every S steps, around a reference synced every k steps.

"Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207), §5.2.2 and equation 1. Two lines make it
humanline: `grep -n "# humanline [cs]" grpo_math_humanline.py`.

    python grpo_math_humanline.py  # one process, the embedded toy, a minute
    torchrun --nproc-per-node 4 grpo_math_humanline.py --model ... --dataset ...

Differs from the paper in (docs/grpo_math.md):
    - The loss is the mean over the completion tokens of the global batch, not a mean of means.
    - The KL penalty is against the reference of the ratio, as in C.1.4, not against a fixed initial policy.
    - Log-probs in training have the temperature of sampling.
    - The gradient norm is one norm over all shards and ranks, not one for each rank.
    - Completion masks say which tokens count; the paper's listing counts log-ratios that are not exactly 0.
    - Answers that cannot be graded within limits count as wrong, and such problems are dropped.

B sequences, T tokens. Log-probs are in nats. A mask is 1 at completion tokens, else 0.
"""

import gzip
import hashlib
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

import utils
from run import (
    Above0,
    AtLeast2,
    Below0,
    Count,
    CountOr0,
    Log,
    NonNegative,
    Positive,
    PositiveShare,
    Progress,
    Share,
    Signals,
    check_flags,
    exit_on_error,
    export,
    fail,
    load_checkpoint,
    mean_over_ranks,
    newest_checkpoint,
    open_folder,
    parse_args,
    perf_metrics,
    report,
    save_args,
    save_checkpoint,
    stop,
)

# === Args ===
SYSTEM_PROMPT = """Reason step by step before you answer. Write in this format, each tag on a line of its own:
<think>\nyour reasoning\n</think>\n<answer>\nthe final answer\n</answer>"""

WEIGHTS = {"accuracy": 8.0, "format": 1.0, "tag_count": 1.0}  # of the three rewards (Table 2)


@dataclass
class Args:
    # algorithm
    beta: NonNegative = 1e-4  # weight of the KL penalty (from the authors' code)
    epsilon: Positive = 0.2  # the ratio is clipped to 1 ± ε (from the authors' code)
    group_size: AtLeast2 = 8  # G (Table 2)
    sample_every: Count = 64  # S, steps between rounds; 1 is online (Figure 7: 1 and 64)
    # humanline
    humanline: bool = True  # --no-humanline: no clipping; the reference is the policy that sampled
    k: Count = 16  # optimizer steps between syncs of the reference (Table 2: 12 to 24; 1 collapses)
    log_epsilon_P: Below0 = -1.5  # bounds of a token's log π_θ/π_ref, nats (Tables 1, 2)
    log_epsilon_R: Above0 = 1.5
    clip: Literal["clip", "sample", "none"] = "clip"  # sample: humanline sampling (eq. 5)
    sync: Literal["before_step", "after_step", "none"] = "before_step"  # after_step: Figure 10
    kappa: Positive = 100.0  # of the Beta draws (k in Theorem 4.3's proof); → ∞ is clipping
    M: Positive = 10.0  # M_P = M_R of eq. 5
    # optimization
    num_steps: Count = 1600  # optimizer steps (paper: 1600)
    prompts_per_step: Count = 32  # problems per step, over all ranks (paper: 32)
    micro_batch_tokens: CountOr0 = 8192  # most tokens in a forward pass of a rank; 0: any
    lr: Positive = 1e-6  # AdamW's learning rate (paper: 1e-6)
    warmup_fraction: Share = 0.1  # share of the steps (Tables 1, 2)
    weight_decay: NonNegative = 0.0  # of AdamW (Table 2)
    adam_eps: Positive = 1e-8  # AdamW's ε (Table 2)
    max_grad_norm: Positive = 1.0  # global gradient norm (Table 2)
    # data
    dataset: str = ""  # problems with an answer or a solution: file or Hub name
    dataset_split: str = "train"  # Hub split, such as train[:10000]
    eval_dataset: str = ""  # held out, in the same formats; empty: none
    eval_split: str = "test"  # Hub split
    system_prompt: str = SYSTEM_PROMPT  # first message; empty: none
    max_prompt_length: Count = 512  # tokens; rows with a longer prompt are dropped
    max_length: Count = 2560  # tokens; what is cut here has no end of turn
    # model
    model: str = ""  # folder or Hub name; empty: the toy and its settings
    chat_template: str = ""  # Jinja file
    eos_token: str = ""  # that ends a turn; empty: the tokenizer's
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bf16, CPU fp32, toy fp64
    gradient_checkpointing: bool = False  # less memory, more time
    shard_size: CountOr0 = 0  # ranks that share a copy (HSDP), such as those of a machine; 0: all
    trust_remote_code: bool = False  # run a model's own Python code
    # sampling
    max_new_tokens: Count = 2048  # tokens (paper: 2048)
    temperature: Positive = 0.7  # of sampling, and of the log-probs in training (paper: 0.7)
    top_p: PositiveShare = 1.0  # nucleus sampling (Table 2)
    engine: Literal["auto", "vllm", "hf"] = "auto"  # auto: vLLM where installed
    vllm_memory: PositiveShare = 0.3  # share of a GPU's memory
    generation_batch_size: Count = 32  # sequences, for hf
    # run
    seed: CountOr0 = 1  # of data order and sampling
    output_dir: str = ""  # default runs/<script>__<seed>__<time>
    resume: str = ""  # folder of a run; flags beside it win
    track: bool = False  # log to W&B too (pip install wandb)
    checkpoint_every: CountOr0 = 100  # steps; 0: never
    keep_checkpoints: CountOr0 = 2  # the newest stay; 0: all
    eval_every: CountOr0 = 0  # steps; 0: only before and after training
    eval_samples: CountOr0 = 256  # held-out prompts; 0: none
    eval_samples_per_problem: Count = 4  # for pass@1


# What the toy needs instead.
FOLDER = Path(__file__).resolve().parent / "toy" / "shell_game"
TOY = dict(
    model=f"{FOLDER}/policy",
    dataset=f"{FOLDER}/problems_train.jsonl.gz",
    eval_dataset=f"{FOLDER}/problems_test.jsonl.gz",
    system_prompt="",
    num_steps=256,
    prompts_per_step=16,
    lr=3e-4,
    temperature=1.0,
    max_new_tokens=32,
    generation_batch_size=256,
)


# === Loss ===
def grpo_loss(clipped, log_ratio, advantages, beta: float, epsilon: float):
    """Equation 1 for every token: β·k3 - min(A·ratio, A·clamp(ratio, 1-ε, 1+ε)).

    Args:
        clipped: (B, T) humanline-clipped log π_θ/π_ref in nats, for the ratio.
        log_ratio: (B, T) the same before clipping, for the KL estimate k3 = π_ref/π_θ + log π_θ/π_ref - 1.
        advantages: (B,).

    Returns:
        The loss of every token (B, T). Detached: ratio, k3, and where the clip to 1 ± ε removes the gradient.
    """
    A = advantages.unsqueeze(-1)  # (B, 1)
    ratio = clipped.exp()  # (B, T)
    k3 = (-log_ratio).exp() + log_ratio - 1  # (B, T)
    loss = beta * k3 - torch.minimum(A * ratio, A * ratio.clamp(1 - epsilon, 1 + epsilon))
    too_high = (A > 0) & (ratio > 1 + epsilon)
    too_low = (A < 0) & (ratio < 1 - epsilon)
    return loss, ratio.detach(), k3.detach(), too_high | too_low


def group_advantages(rewards):
    """(R - mean) / (std + 1e-4) within the group, with the sample's std (Open-R1); 0 where all are equal."""
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    values = torch.tensor(rewards, dtype=torch.float64)
    return ((values - values.mean()) / (values.std() + 1e-4)).tolist()


def clip_log_ratio(args, log_ratio, mask, keys: list[tuple]):
    """What the loss sees of log π_θ/π_ref, (B, T). A row's key seeds the draws of humanline sampling."""
    if not args.humanline or args.clip == "none":
        return log_ratio
    if args.clip == "clip":
        return log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)  # humanline clipping (§5.1, Figure 4)
    mean_P = math.exp(args.log_epsilon_P) / args.M
    mean_R = math.exp(-args.log_epsilon_R) / args.M
    B_P = beta_draws(mask, keys, 0, args.kappa, mean_P)
    B_R = beta_draws(mask, keys, 1, args.kappa, mean_R)
    return humanline_sampling(log_ratio, B_P, B_R, args.M)


def humanline_sampling(log_ratio, B_P, B_R, M: float):
    """Equation 5: a token with ratio < M·B_P or 1/ratio < M·B_R keeps its value and loses its gradient."""
    too_low = log_ratio.exp() < M * B_P
    too_high = (-log_ratio).exp() < M * B_R
    return torch.where(too_low | too_high, log_ratio.detach(), log_ratio)


def beta_draws(mask, keys: list[tuple], stream: int, kappa: float, mean: float):
    """Draws of Beta(κ·mean, κ·(1 - mean)) as in Theorem 4.3, (B, T).

    Row i's depend on keys[i] and the stream alone: they are the same on any number of ranks and passes.
    """
    a = kappa * mean
    b = kappa * (1 - mean)
    draws = []
    for key in keys:
        generator = np.random.default_rng((*key, stream))
        draws.append(generator.beta(a, b, mask.shape[1]))  # a longer T only appends
    return torch.as_tensor(np.stack(draws), dtype=mask.dtype, device=mask.device)


@torch.no_grad()
def sync_reference(reference, policy):
    """π_ref ← π_θ. Both are sharded alike, so every rank copies its own shards, without communication."""
    targets = [parameter.to_local() for parameter in reference.parameters()]
    sources = [parameter.to_local() for parameter in policy.parameters()]
    torch._foreach_copy_(targets, sources)


# === Data ===
def load_data(args, tokens, counts, eval_counts):
    """Groups to train on, held-out groups (none without --eval-dataset), and the hashes of both data sets.

    counts: numbers of completions that a row may have; (0,): prompts alone are read.
    """
    name = args.dataset
    groups, digest = load_groups(args, "--dataset", name, args.dataset_split, tokens, counts)
    hashes = {f"--dataset {name}": digest}
    held_out = []
    if args.eval_dataset:
        name = args.eval_dataset
        held_out, digest = load_groups(args, "--eval-dataset", name, args.eval_split, tokens, eval_counts)
        hashes[f"--eval-dataset {name}"] = digest
    utils.show_tokens(tokens, groups[0][0])
    return groups, held_out, hashes


def load_groups(args, flag: str, name: str, split: str, tokens, counts):
    """Reads and tokenizes a data set, and prints which rows cannot train.

    A group is the examples of a row, such as (chosen, rejected), or (prompt,).

    Returns:
        The groups, and a hash of the data, for a later resume to compare.
    """
    rows = load_rows(flag, name, split)
    groups = []
    notes = defaultdict(list)  # {note: row numbers}
    content = hashlib.sha256()
    for number, row in rows.items():
        with exit_on_error(f"{flag} {name}, line {number}"):
            group, note = encode_row(args, number, row, tokens, counts)
        ids = [(x.prompt_ids, x.completion_ids) for x in group]
        content.update(repr((row, ids)).encode())
        if group:
            groups.append(group)
        if note:
            notes[note].append(number)

    summary = f"{flag} {name}: {len(groups)} rows, {len(rows) - len(groups)} dropped"
    for note, numbers in notes.items():
        more = " …" if len(numbers) > 9 else ""
        summary += f"; {len(numbers)} {note}: lines {', '.join(map(str, numbers[:9]))}{more}"
    if not groups:
        fail(f"{summary}; none is left")
    for group in groups:
        if len(group) != len(groups[0]):
            first = groups[0][0].row
            fail(f"{flag} {name}, line {group[0].row}: not as many completions as in line {first}")
    if dist.get_rank() == 0:
        print(summary)
    return groups, content.hexdigest()


def encode_row(args: Args, number: int, row: dict, tokens, counts):
    """A problem and its gold answer as a group of one, and a note or "". Raises ValueError if it has none.

    There are no completions, so that `counts`, which the other scripts need, is not used.
    """
    if not isinstance(row, dict):
        row = {}
    prompt = row.get("problem")
    if prompt is None:
        raise ValueError(f"it needs a problem; the columns are {', '.join(row)}")
    if args.system_prompt:
        system = {"role": "system", "content": args.system_prompt}
        prompt = [system, {"role": "user", "content": prompt}]
    answer = gold_answer(row)
    group, note = utils.encode_group(args, tokens, number, prompt, [], [])
    if not answer:
        return (), "without an answer"
    return tuple(x._replace(answer=answer) for x in group), note


def gold_answer(row: dict):
    """The `answer` of a row, or its `solution` if that has a \\boxed{…}, else "". A ValueError if it has no
    such column or they are not strings (an answer may be a number)."""
    answer, solution = row.get("answer"), row.get("solution")
    if answer is None and solution is None:
        raise ValueError(f"it has no answer or solution; the columns are {', '.join(row)}")
    if type(answer) is float:
        answer = np.format_float_positional(answer, trim="-") if math.isfinite(answer) else ""
    if type(answer) is int:
        answer = str(answer)
    if not isinstance(answer, str | None) or not isinstance(solution, str | None):
        raise ValueError("answer and solution must be strings")
    if answer is None and "\\boxed" in solution:
        return solution
    return answer or ""


def keep_gradable(grader, flag, name, groups):
    """The groups whose gold answer has a value within the limits. Ends the run if there is none."""
    verdicts = judge_all(grader, [(group[0].answer, None) for group in groups])
    kept = [group for group, gradable in zip(groups, verdicts) if gradable]
    dropped = [str(group[0].row) for group, gradable in zip(groups, verdicts) if not gradable]
    summary = f"{flag} {name}: {len(kept)} have an answer that can be graded"
    if dropped:
        summary += f", {len(dropped)} have not, the first in lines {', '.join(dropped[:9])}"
    if not kept:
        fail(summary)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(summary)
    return kept


def load_rows(flag: str, name: str, split: str):
    """{row number: row} of a file or a Hub data set, from 1."""
    with exit_on_error(f"{flag} {name}"):
        if name.endswith(".parquet"):
            rows = pyarrow.parquet.read_table(name).to_pylist()
        elif name.removesuffix(".gz").endswith((".json", ".jsonl")):
            open_file = gzip.open if name.endswith(".gz") else open
            with open_file(name, "rt", encoding="utf-8-sig") as file:
                text = file.read()
            if not text.lstrip().startswith("["):
                return parse_lines(flag, name, text)
            rows = json.loads(text)
        elif Path(name).exists() or name.count("/") != 1:
            raise ValueError("no .json, .jsonl (or .gz), .parquet file or Hub name")
        else:
            import datasets  # here, since it takes a second

            datasets.disable_progress_bars()
            rows = datasets.load_dataset(name, split=split)
        return dict(enumerate(rows, 1))


def parse_lines(flag: str, name: str, text: str):
    """{line number: row} of JSON lines; empty ones are left out."""
    rows = {}
    for number, line in enumerate(text.split("\n"), 1):
        with exit_on_error(f"{flag} {name}, line {number} is not JSON"):
            if line.strip():
                rows[number] = json.loads(line)
    return rows


def draw_batch(groups: list, number: int, size: int, seed: int) -> list:
    """Batch `number` (step or round) of endless, newly shuffled epochs. What fills no batch is skipped."""
    batches_per_epoch = len(groups) // size
    epoch, batch = divmod(number, batches_per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(groups))
    return [groups[i] for i in order[batch * size : (batch + 1) * size]]


# === Models ===
def setup(args):
    """Starts the process group and resolves --dtype auto. Returns rank, world size and device."""
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # as torchrun does, so that numbers are the same without it
    # Without torchrun there is no address to meet at.
    store = None if "RANK" in os.environ else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    transformers.utils.logging.disable_progress_bar()
    if args.dtype == "auto":
        cpu_dtype = "float64" if args.model == TOY["model"] else "float32"
        args.dtype = "bfloat16" if device.type == "cuda" else cpu_dtype
    # For the fp32 head of token_logps: TF32 has more bits than bf16, so products of bf16 factors stay exact.
    precision = "high" if args.dtype == "bfloat16" else "highest"
    torch.set_float32_matmul_precision(precision)
    return rank, world, device


def load_config(args):
    """The model's configuration without dropout and router noise, the dtype of its files, and its tokens."""
    with exit_on_error(f"--model {args.model}"):
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
        tokens = utils.load_tokens(args, config)
    text_config = config.get_text_config()
    for key, value in text_config.to_dict().items():
        if isinstance(value, float) and ("drop" in key or "jitter" in key):
            setattr(text_config, key, 0.0)  # noise would part the policy from the reference
    return config, config.dtype or torch.float32, tokens


def shard_model(args, model, compute_dtype: torch.dtype, device):
    """Shards the model in place with FSDP2: decoder blocks, an untied embedding and head, the rest as root.

    With --shard-size (HSDP) so many ranks share a copy, and their groups have equal copies.
    """
    world = dist.get_world_size()
    shard_size = args.shard_size or world
    if shard_size == world:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    else:
        shape = (world // shard_size, shard_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    block_names = model._no_split_modules or ()
    units = [module for module in model.modules() if type(module).__name__ in block_names]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:  # a tied weight belongs to both, and so to the root
        units += [embedding, head]
    # Gradients are summed over ranks in fp32 at least: bf16 would lose those of many ranks.
    reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    precision = MixedPrecisionPolicy(compute_dtype, reduce_dtype)
    for module in [*units, model]:
        # By default the root stays gathered after a forward, for the backward pass. The reference has none:
        # it would go on with the gathered copy, and miss the next sync.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        # The loss is divided by the global batch already, so gradients are sums over ranks, not means.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def load_models(args, config, reference_dtype: torch.dtype, device) -> tuple:
    """Policy, in fp32, and reference, in `reference_dtype`; both compute in --dtype."""
    compute_dtype = getattr(torch, args.dtype)
    config.dtype = None  # so that "auto" is the files' dtype
    with exit_on_error(f"--model {args.model}"):
        policy = utils.load_pretrained(
            AutoModelForCausalLM,
            args.model,
            config=config,
            dtype="auto",
            trust_remote_code=args.trust_remote_code,
        )
    with no_init_weights():  # memory that is not written to yet costs nothing
        reference = AutoModelForCausalLM.from_config(
            policy.config,
            dtype=reference_dtype,
            trust_remote_code=args.trust_remote_code,
        )
    reference.tie_weights()
    computed_buffers = dict(reference.named_non_persistent_buffers())

    # The files are memory-mapped, in pages that all ranks share. Sharding moves a rank's shards to its
    # device, and casting comes after it, so that a rank never holds the whole model in fp32.
    policy = shard_model(args, policy, compute_dtype, device).to(torch.float32)
    reference = shard_model(args, reference, compute_dtype, device).to(reference_dtype)
    # Both get the files' buffers, but those that are computed, such as rotary frequencies, in full precision.
    for name, buffer in dict(policy.named_buffers()).items():
        values = computed_buffers.get(name, buffer).to(device)
        policy.get_buffer(name).data = values
        reference.get_buffer(name).data = values
    sync_reference(reference, policy)
    policy.train()
    reference.eval().requires_grad_(False)
    with exit_on_error(f"--model {args.model}"):
        utils.choose_attention(args, policy)
        utils.choose_attention(args, reference)
    return policy, reference


def make_optimizer(args, policy, device):
    return torch.optim.AdamW(
        policy.parameters(),
        lr=args.lr,
        eps=args.adam_eps,
        weight_decay=args.weight_decay,
        fused=device.type == "cuda",  # the default there needs memory for one more moment
    )


def make_scheduler(args, optimizer, step: int):
    """Linear warmup, then constant, from optimizer step `step` on."""
    settings = dict(lr=args.lr, initial_lr=args.lr, eps=args.adam_eps, weight_decay=args.weight_decay)
    for group in optimizer.param_groups:
        group.update(settings)  # a checkpoint brings its own; the flags win
    warmup = max(1, round(args.warmup_fraction * args.num_steps))

    def factor(n: int) -> float:
        return min(1.0, (n + 1) / warmup)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch=step - 1)


# === Rounds and evaluation ===
# math_verify grades, as in Open-R1. It reads one expression well, and these rules hand it one. A policy
# learns to offer several answers, or to hide one in something longer, where that pays: these are wrong.
TIME_LIMIT = 5.0  # CPU seconds for one answer


def start_grader(workers=0):
    """A pool of processes: an answer that never ends, eats memory or crashes takes one with it."""
    from pebble import ProcessPool

    context = multiprocessing.get_context("forkserver")  # a fork would inherit threads of CUDA and gloo
    imports = ["torch", "transformers.models.auto.modeling_auto", "math_verify"]
    context.set_forkserver_preload(imports)  # what a worker needs to import this file, once
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    workers = workers or max(1, min(cores, 8))
    return ProcessPool(workers, max_tasks=1000, initializer=start_worker, context=context)


def start_worker():
    """Limits the memory of a worker to 2 GiB more than its imports take."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    statm = Path("/proc/self/statm")
    if statm.exists():  # Linux
        pages = int(statm.read_text().split()[0])
        limit = pages * resource.getpagesize() + 2 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def judge_all(grader, jobs):
    """`judge` of each distinct job (gold, answer), shared out over the ranks; None where it was stopped. A
    RuntimeError if a worker was killed idle."""
    from pebble import ProcessExpired

    rank, world = 0, 1
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    own = list(dict.fromkeys(jobs))[rank::world]
    # The other timeout is in seconds of the clock, for workers that sleep, or wait for a core.
    futures = [grader.schedule(judge, (*job, TIME_LIMIT), timeout=20 * TIME_LIMIT) for job in own]
    of_sympy = (
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        NotImplementedError,
        RecursionError,
    )
    verdicts = {}
    for job, future in zip(own, futures):
        try:
            verdicts[job] = future.result()
        except (ProcessExpired, TimeoutError, MemoryError, *of_sympy):
            verdicts[job] = None
    parts = [verdicts] * world
    if world > 1:
        dist.all_gather_object(parts, verdicts)
    for part in parts:
        verdicts = verdicts | part
    return [verdicts[job] for job in jobs]


def judge(gold: str, answer: str | None, time_limit: float):
    """In a worker: whether the answer equals the gold answer. Without an answer: whether the gold answer has
    a value, which others can be compared with. time_limit: CPU seconds."""
    from math_verify import verify
    from sympy import Eq, FiniteSet, Set, pi

    # SIGPROF has no handler, which Python would run only after a long multiplication: the kernel ends the
    # process. The timer counts CPU time, or a busy machine would change verdicts.
    signal.setitimer(signal.ITIMER_PROF, time_limit)
    try:
        golds = read_answer(gold, True)
        if answer is None:  # 9^{9^{9^9}} equals itself unevaluated, and ends the process when it is compared
            verify(golds, pi, timeout_seconds=None)
            answers = [side if isinstance(side, str) else side.doit() for side in golds]
        else:
            answers = read_answer(answer, False)
        if not golds or not answers:
            return False
        if len(golds) > 1:  # x^2 + y^2 = 13
            return len(answers) > 1 and verify(Eq(*golds[:2]), Eq(*answers[:2]), timeout_seconds=None)
        for side in answers:  # each: 4 = 5 is neither, and x = 2 + 3 = 5 is 5
            if isinstance(side, FiniteSet) and not isinstance(golds[0], Set):
                return False
            if not verify(golds, side, allow_set_relation_comp=True, timeout_seconds=None):
                return False
        return True
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# What stands before the last box, unless the text begins with a box or has boxes joined by a comma, `or`,
# `and`: those are several answers, of which math_verify makes a set. (Where a solution of MATH boxes several
# in its sentences, its answer is the last.)
BEFORE_BOX = r"(?s)\A(?!\W*\\f?box|.*\S\} ?(?:,|;|or|and)? ?\\f?box).*(?=\\(?:boxed|fbox))"
# Without a box, the last place that names the answer: `the answer (in cm) is …`, `**Answer:** …`, `A: …`,
# `#### …`. The answer is display math or ends with the line or the sentence.
MARK = r"(?s:.*)(?:(?i:answer)\b[^.:=\n]{0,50}?(?:\bis\b|[:=\n])|\bA:|####)[\s:*]*"
ANSWER = MARK + r"((?s:\\\[.+?\\\]|\$\$.+?\$\$)|.+?)[.*]*\s*(?:\n|\.\s|$)"
# Math in dollars or words, but not in braces: here math_verify must look for the answer itself.
PROSE = (
    r"\$|\\[(\[]"
    r"|(?<![\\A-Za-z])(?:[A-Za-z]{2,}\s+[A-Za-z]{2,}|(?:therefore|thus|exactly|simply) -?\d)(?![^{}]*\})"
)
# math_verify drops words after a number as a unit; `2 \text{ is wrong}`, `2 or maybe 3` have no unit.
HEDGE = (
    r"\A[^\n]{,60}(?:(?:\b\w|\d|[})])\s*\\(?:text|mbox)\w*\{(?!\s*(?:or|and)\s*\})[^}]*"
    r"(?:\b(?:or|is|are|not|wrong)\b|['(])|\bor [a-z]{2}|\bis (?:not|wrong))[^\n]{,60}\Z"
)
TIDY = {  # what math_verify reads otherwise or not at all
    "</?(?:think|answer)>": "",  # a tag without its other half
    r"(?<=\d)(?:,\\!|\\[,; ]|[ \u00a0\u202f~]|\{,\})(?=\d{3}(?!\d))": "",  # 24{,}000
    r"\\!\s*|\\\$|~|(?<!\\)\\[;:]|(?<![\w)])\*\*|\*\*(?![\w(-])": "",  # spaces, \$36, **bold** but not 2**3
    r"[.,;\s]+(?=\\[\])]|\$\$)": "",  # \[ x. \]
    r"(?<=\d):00\b": "",  # 05:00 is no division by zero
    "[‐-―−]": "-",  # dashes, and a true minus
    "½": r"\\frac12",
    r"(?<![\w.^/])(\d+) (\d+) ?/ ?(\d+)": r"\1\\frac{\2}{\3}",  # 1 3/4
    r"(\\[td]?frac)\s*(\\[a-z]+|\w)\s*(\w)(?!\w)": r"\1{\2}{\3}",  # \frac\pi 4
    r"(?<=[\w)}])'+(?![a-z])": r"^{\\prime}",  # 2' is not 2
    r"^\s*(?:\\approx|=)?\s*|[\s.,:;]+$": "",
    r"(?s)^(?:\$+|\\[(\[])\s*((?:(?!\$|\\[()\[\]]).)*?)[\s.,;]*(?:\$+|\\[)\]])$": r"\1",  # nothing but $x$
    r"(?<![\\A-Za-z])(?:m?\\angle ?|\\triangle ?)?([A-Z]+|[A-Za-z]{3,})(?=\s*=)": r"\\text{\1}",  # AB = 5
    r"(?<!\w)\([\\a-z]+(?:, ?[\\a-z]+)+\)\s*=\s*": "",  # (x,y) = (1,2)
    r"(?<=\d) (?:[a-z]{4,}|cm|ft|in)(?:\^\{?\d\}?)?$": "",  # 42 dollars
    r"^((?!inf)[A-Za-z ]{3,})$": r"\\text{\1}",  # a word is no product of letters: tea is not eat
    r"^(?:\\left ?)?\[(?!\\begin)([^,]*?)(?:\\right ?)?\]$": r"\\{\1\\}",  # [2] is not 2
}


@lru_cache(256)
def read_answer(text: str, is_gold: bool):
    """In a worker: what a text answers, in math_verify's objects (sympy's, or a string that it cannot parse).

    First the part that counts is found: between <answer> tags, in the last box, behind the last "answer is".
    Then it is rewritten as math_verify reads it, and parsed.

    Returns:
        [] for none, [value], also of `x = value`, or [left, right] of an equation.
    """
    from latex2sympy2_extended.math_normalization import extract_boxed_content
    from math_verify import LatexExtractionConfig, parse
    from sympy import And, Eq, Symbol
    from sympy.core.function import AppliedUndef

    if text.count("</answer>") > 1:
        return []
    if "<answer>" in text and "</answer>" in text:
        text = text.partition("</answer>")[0].rpartition("<answer>")[2]
    exact = is_gold  # nothing stands around the answer
    last = re.match(ANSWER, text)
    if "\\boxed" in text or "\\fbox" in text:
        text = extract_boxed_content(re.sub(BEFORE_BOX, "", text), "last")
        exact = True
    elif last and not is_gold:
        text = last[1]
    for pattern, new in TIDY.items():
        text = re.sub(pattern, new, text)
    if not is_gold and re.search(HEDGE, text):
        return []
    if exact or not re.search(PROSE, text):
        found = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)
    else:
        found = parse(text, parsing_timeout=None)
    sides = []
    if found and isinstance(found[0], And | Eq):
        for equation in found[0].atoms(Eq):
            sides += equation.args
    values = [side for side in sides if not isinstance(side, Symbol | AppliedUndef)]
    return values or sides or found[:1]


def format_reward(text):
    """1 for <think>⏎…⏎</think>⏎<answer>⏎…⏎</answer> alone, else 0."""
    thinking, _, answer = text.partition("\n</think>\n<answer>\n")
    return float(thinking.startswith("<think>\n") and answer.endswith("\n</answer>"))


def tag_count_reward(text):
    """A quarter for each of the four tags, with its line breaks, that occurs exactly once (Open-R1)."""
    tags = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
    return sum(text.count(tag) == 1 for tag in tags) / 4


def math_rewards(grader, samples: list[utils.Example]):
    """{accuracy, format, tag_count: (N,) float64}, each from 0 to 1, and how many could not be graded."""
    verdicts = judge_all(grader, [(sample.answer, sample.text) for sample in samples])
    rewards = {
        "accuracy": [verdict is True for verdict in verdicts],
        "format": [format_reward(sample.text) for sample in samples],
        "tag_count": [tag_count_reward(sample.text) for sample in samples],
    }
    rewards = {name: torch.tensor(values, dtype=torch.float64) for name, values in rewards.items()}
    return rewards, verdicts.count(None)


def score(grader, groups: list):
    """The samples with their weighted rewards; all rewards by name, (N,); how many could not be graded."""
    samples = [x for group in groups for x in group]
    rewards, stopped = math_rewards(grader, samples)
    totals = sum(WEIGHTS[name] * values for name, values in rewards.items())  # (N,)
    scored = [x._replace(reward=total) for x, total in zip(samples, totals.tolist())]
    size = len(groups[0])
    return [tuple(scored[i : i + size]) for i in range(0, len(scored), size)], rewards, stopped


def sample_problems(args: Args, sampler, grader, policy, problems: list[tuple], progress: Progress):
    """Fills the pool with groups of the policy's graded samples for the problems of the next S steps."""
    drawn = []
    for step in range(progress.step, min(progress.step + args.sample_every, args.num_steps)):
        batch = draw_batch(problems, step, args.prompts_per_step, args.seed)
        drawn += [group[0] for group in batch]
    progress.round = progress.step + 1  # the seed of this round's samples; 0 is the evaluation's
    progress.last_round = progress.step
    with exit_on_error(f"sampling at step {progress.step}", ValueError):
        samples = sampler.sample(policy, drawn, args.group_size, (args.seed, progress.round))
    started = time.perf_counter()
    groups, rewards, stopped = score(grader, samples)
    for group in groups:
        progress.pool.append(tuple(x.to_train(args.max_length) for x in group))
    progress.rollout = {f"reward/{name}": values.mean().item() for name, values in rewards.items()}
    progress.rollout |= sampler.metrics
    progress.rollout["rollout/grading_stopped"] = stopped
    progress.rollout["perf/grading_time"] = time.perf_counter() - started


@exit_on_error("evaluation", ValueError)
def evaluate(args: Args, policy, sampler, grader, held_out: list[tuple]):
    """{metric: (mean, standard error over problems)}, pass@1 among them, and a sample of each problem."""
    problems = [group[0] for group in held_out[: args.eval_samples]]
    if not problems:
        return {}, []
    count = args.eval_samples_per_problem
    groups, values, _ = score(grader, sampler.sample(policy, problems, count, (args.seed, 0)))
    statistics = utils.sample_statistics([x for group in groups for x in group])
    values["finished"] = statistics["finished"]
    values["length"] = statistics["length"]
    by_problem = {f"eval/{name}": value.view(-1, count).mean(1) for name, value in values.items()}
    return utils.means(by_problem), [group[0] for group in groups]


# === Training ===
def clipping_metrics(args, log_ratio, mask):
    """Of the completion tokens: the shares beyond a bound, and |log-ratio|."""
    return {
        "humanline/clipped_low": ((log_ratio < args.log_epsilon_P).double(), mask),
        "humanline/clipped_high": ((log_ratio > args.log_epsilon_R).double(), mask),
        "humanline/log_ratio_abs_mean": (log_ratio.detach().abs(), mask),
    }


def grpo_metrics(mask, ratio, k3, removed):
    """{name: (values, weights)} of the completion tokens of a pass."""
    return {
        "grpo/ratio_mean": (ratio, mask),
        "grpo/kl": (k3, mask),
        "grpo/clip_fraction": (removed.double(), mask),
    }


def check_finite(bar: tqdm, step: int, losses, grad_norm: float, rows: list[int]):
    """Ends the run before an update that is not finite, and names the rows that may be the cause."""
    total = losses.sum().item()
    if math.isfinite(total + grad_norm):
        return
    bad = {row for row, loss in zip(rows, losses.tolist()) if not math.isfinite(loss)}
    suspects = sorted(bad or set(rows))
    bar.close()  # or the message would stand behind it
    cause = f"step {step}: loss {total}, gradient norm {grad_norm}; the update was not made"
    fail(f"{cause}: look at rows {suspects} of --dataset, or lower --lr or --max-grad-norm")


@exit_on_error("reading or writing", OSError)
def main(args: Args):
    groups_per_step = args.prompts_per_step
    batch_size = groups_per_step * args.group_size
    check_flags(args, batch_size)
    signals = Signals()
    rank, world, device = setup(args)
    reference_dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32  # of storage

    # data
    config, final_dtype, tokens = load_config(args)
    groups, held_out, hashes = load_data(args, tokens, (0,), (0,))  # a group is one problem
    grader = start_grader()
    groups = keep_gradable(grader, "--dataset", args.dataset, groups)
    if held_out:
        held_out = keep_gradable(grader, "--eval-dataset", args.eval_dataset, held_out)
    if len(groups) < groups_per_step:
        fail(f"--dataset {args.dataset}: {len(groups)} rows are left, and a batch takes {groups_per_step}")

    # models
    output_dir, lock = open_folder(args, __file__, device)  # lock: held as long as this name
    checkpoint = newest_checkpoint(output_dir, hashes)
    with exit_on_error("sampling"):
        sampler = utils.Sampler(args, config, tokens, reference_dtype, device)
    policy, reference = load_models(args, config, reference_dtype, device)
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    # Before a checkpoint is loaded: the report compares with the initial policy, also on resume.
    before, samples_before = evaluate(args, policy, sampler, grader, held_out)

    # optimizer
    optimizer = make_optimizer(args, policy, device)
    progress = Progress()
    if checkpoint:
        progress = load_checkpoint(args, checkpoint, policy, reference, optimizer)
    else:
        save_args(args, output_dir, __file__)
    if any(len(group) != args.group_size for group in progress.pool):
        fail("--group-size: samples in groups of another size wait for a step; keep it")
    scheduler = make_scheduler(args, optimizer, progress.step)
    log = Log(output_dir, progress.step, before) if rank == 0 else None
    sync = args.sync if args.humanline else "none"

    steps = range(progress.step, args.num_steps)
    bar = tqdm(steps, initial=progress.step, total=args.num_steps, disable=rank != 0)
    for step in bar:
        started = time.perf_counter()

        # the batch: groups of the round's samples
        if len(progress.pool) < groups_per_step:
            signals.training = False  # a signal does not wait for sampling, which may take long
            sample_problems(args, sampler, grader, policy, groups, progress)
            if sync == "none":
                sync_reference(reference, policy)  # the policy at sampling time
                progress.last_sync = step
        batch = progress.pool[:groups_per_step]
        progress.pool = progress.pool[groups_per_step:]
        signals.training = True  # from here a signal waits for the end of the step
        examples = [x for group in batch for x in group]
        rewards = torch.tensor([x.reward for x in examples], dtype=torch.float64).view(-1, args.group_size)
        by_group = [group_advantages(group) for group in rewards.tolist()]
        advantages = torch.tensor(by_group, dtype=torch.float64, device=device).flatten()  # (batch_size,)
        # Nothing was updated since the last sync, so both models have the same log-probs.
        in_sync = progress.last_sync == step

        # the gradient of the mean loss over the completion tokens of all ranks and passes
        completion_tokens = sum(len(x.completion_ids) for x in examples)
        lengths = [x.length for x in examples]
        passes = utils.make_passes(lengths, world, args.micro_batch_tokens)[rank::world]
        losses = torch.zeros(batch_size, dtype=torch.float64, device=device)  # 0: of other ranks
        sums = defaultdict(float)
        for number, mine in enumerate(passes, 1):  # mine: positions among the examples
            # FSDP2 sums gradients over the ranks: on the CPU in the last pass, since once is enough; on CUDA
            # in every pass, since until then a rank holds the gradients of the whole model.
            policy.set_requires_gradient_sync(device.type == "cuda" or number == len(passes))
            input_ids, mask = utils.pad_batch([examples[i] for i in mine], tokens.pad_id, device)  # (B, T)

            if not in_sync:  # before the policy's pass, which keeps its activations
                with torch.no_grad():
                    ref_logps = utils.token_logps(reference, input_ids, mask, args.temperature)  # (B, T)
            logps = utils.token_logps(policy, input_ids, mask, args.temperature)  # (B, T)
            if in_sync:
                ref_logps = logps.detach()
            log_ratio = logps - ref_logps  # (B, T)
            clipped = clip_log_ratio(args, log_ratio, mask, [(args.seed, step, i) for i in mine])
            A = advantages[mine].to(logps.dtype)  # (B,)
            token_losses, ratio, k3, removed = grpo_loss(clipped, log_ratio, A, args.beta, args.epsilon)
            ((token_losses * mask).sum() / completion_tokens).backward()

            losses[mine] = (token_losses.detach() * mask).sum(-1).double() / completion_tokens
            pass_metrics = grpo_metrics(mask, ratio, k3, removed) | clipping_metrics(args, log_ratio, mask)
            for key, (values, weights) in pass_metrics.items():
                total = (values * weights).sum()
                sums[key] += torch.stack([total, weights.sum()]).double()
        dist.all_reduce(losses)
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        grad_norm = norm.full_tensor().item()  # before clipping, of all shards
        check_finite(bar, step, losses, grad_norm, [x.row for x in examples])

        # the update: a reference that is synced right before it is one step behind afterwards
        metrics = {"step": step, "loss": losses.sum().item(), "grad_norm": grad_norm}
        metrics["lr"] = scheduler.get_last_lr()[0]
        metrics["humanline/steps_since_sync"] = step - progress.last_sync
        if sync == "before_step" and step % args.k == 0:
            sync_reference(reference, policy)  # humanline syncing (§5.1, Figure 3): before the update
            progress.last_sync = step
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if sync == "after_step" and (step + 1) % args.k == 0:
            sync_reference(reference, policy)  # trust-region syncing (Figure 10): after the update
            progress.last_sync = step + 1
        progress.step = step + 1

        # metrics
        metrics |= mean_over_ranks(sums)
        metrics["rewards/mean"] = rewards.mean().item()
        metrics["rewards/std"] = rewards.std().item()
        ties = rewards.amax(1) == rewards.amin(1)
        metrics["grpo/zero_advantage_groups"] = ties.double().mean().item()
        metrics |= perf_metrics(started, sum(lengths), device)
        metrics |= progress.rollout
        metrics["rollout/age_steps"] = step - progress.last_round
        if args.eval_every and progress.step % args.eval_every == 0:
            now, _ = evaluate(args, policy, sampler, grader, held_out)
            metrics |= {name: mean for name, (mean, _) in now.items()}
        bar.set_postfix(loss=metrics["loss"], accuracy=metrics["reward/accuracy"], refresh=False)
        if log:
            log.write(metrics)

        # checkpoint
        stopped_by = signals.of_any_rank(device)
        is_due = args.checkpoint_every and progress.step % args.checkpoint_every == 0
        if is_due or stopped_by:
            folder = output_dir / "checkpoints" / f"step-{progress.step}"
            save_checkpoint(folder, policy, reference, optimizer, progress, hashes, args.keep_checkpoints)
            save_args(args, output_dir, __file__)  # not before: a resume whose flags fail leaves the old ones
        if stopped_by:
            stop(stopped_by, progress.step, output_dir)
    signals.training = False

    after, samples_after = evaluate(args, policy, sampler, grader, held_out)
    export(output_dir / "final", policy, tokens, final_dtype)
    if log:
        report(log, output_dir, before, after, samples_before, samples_after)
    grader.stop()
    grader.join()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args(Args, __file__, __doc__, TOY))
