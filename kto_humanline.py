"""Humanline KTO: alignment from good and bad completions, against a reference one step behind the policy.

"Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207), equation 7. Two lines make KTO humanline:
`grep -n "# humanline [cs]" kto_humanline.py`; the reference point z_0 is clipped like the loss.

    python kto_humanline.py  # one process, the embedded toy, a minute
    torchrun --nproc-per-node 4 kto_humanline.py --model ... --dataset ...

Differs from the paper in (docs/kto.md):
    - There is one reference point z_0 for each optimizer step, not for each microbatch.
    - z_0 takes a completion of another prompt, on pairs the same half; the authors' code, the next example.
    - z_0 is the mean over all of these; the paper's listing leaves out those of exactly 0.
    - The gradient norm is one norm over all shards and ranks, not one for each rank.
    - Completion masks say which tokens count; the paper's listing counts log-ratios that are not exactly 0.

B sequences, T tokens. Log-probs are in nats. A mask is 1 at completion tokens, else 0.
"""

import gzip
import hashlib
import json
import math
import os
import time
from collections import defaultdict
from dataclasses import dataclass
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
@dataclass
class Args:
    # algorithm
    beta: Positive = 0.25  # KTO's β (paper: 0.25)
    lambda_D: Positive = 1.1  # weight of desirable examples (Table 3)
    lambda_U: Positive = 1.0  # weight of undesirable examples (Table 3)
    # humanline
    humanline: bool = True  # --no-humanline: no clipping, no syncing
    k: Count = 1  # optimizer steps between syncs of the reference (paper: 1)
    log_epsilon_P: Below0 = -1.5  # bounds of a token's log π_θ/π_ref, nats (Tables 1, 2)
    log_epsilon_R: Above0 = 1.5
    clip: Literal["clip", "sample", "none"] = "clip"  # sample: humanline sampling (eq. 5)
    sync: Literal["before_step", "after_step", "none"] = "before_step"  # after_step: Figure 10
    kappa: Positive = 100.0  # of the Beta draws (k in Theorem 4.3's proof); → ∞ is clipping
    M: Positive = 10.0  # M_P = M_R of eq. 5
    # optimization
    num_steps: Count = 312  # optimizer steps (paper: 312, 20K examples once)
    batch_size: Count = 64  # examples per step, over all ranks; a pair is two (Table 1)
    micro_batch_tokens: CountOr0 = 8192  # most tokens in a forward pass of a rank; 0: any
    lr: Positive = 5e-6  # AdamW's learning rate (paper: 5e-6, online 2.5e-6)
    warmup_fraction: Share = 0.1  # share of the steps (Tables 1, 2)
    weight_decay: NonNegative = 1e-2  # of AdamW (Table 1)
    adam_eps: Positive = 1e-5  # AdamW's ε (paper: 1e-5)
    max_grad_norm: Positive = 4.0  # global gradient norm (paper: 4, online 0.1; --no-humanline 1, 0.5)
    # data
    dataset: str = ""  # examples or pairs: file or Hub name; formats in docs/kto.md
    dataset_split: str = "train"  # Hub split, such as train[:10000]
    eval_dataset: str = ""  # held out, in the same formats, or prompts; empty: none
    eval_split: str = "test"  # Hub split
    max_prompt_length: Count = 625  # tokens; rows with a longer prompt are dropped (from the authors' code)
    max_length: Count = 1250  # tokens; what is cut here has no end of turn (from the authors' code)
    # model
    model: str = ""  # folder or Hub name; empty: the toy and its settings
    chat_template: str = ""  # Jinja file
    eos_token: str = ""  # that ends a turn; empty: the tokenizer's
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bf16, CPU fp32, toy fp64
    gradient_checkpointing: bool = False  # less memory, more time
    shard_size: CountOr0 = 0  # ranks that share a copy (HSDP), such as those of a machine; 0: all
    trust_remote_code: bool = False  # run a model's own Python code
    # online
    online: bool = False  # rounds of samples (Algorithm 1)
    reward_model: str = ""  # classifier with one output
    round_prompts: Count = 1024  # prompts per round (Table 1)
    samples_per_prompt: AtLeast2 = 8  # best and worst make a pair (Table 1)
    reward_threshold: NonNegative = 0.01  # τ, least difference in a pair (Table 1)
    # sampling
    max_new_tokens: Count = 2048  # tokens (paper: 2048)
    temperature: NonNegative = 0.7  # of sampling (Table 1)
    top_p: PositiveShare = 0.95  # nucleus sampling (Table 1)
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


# What the toy needs instead.
FOLDER = Path(__file__).resolve().parent / "toy" / "tales"
TOY = dict(
    model=f"{FOLDER}/policy",
    reward_model=f"{FOLDER}/reward_model",
    dataset=f"{FOLDER}/preferences_train.jsonl.gz",
    eval_dataset=f"{FOLDER}/preferences_test.jsonl.gz",
    num_steps=320,
    lr=3e-4,
    max_grad_norm=1.0,
    k=32,
    beta=2.5,
    max_new_tokens=64,
    generation_batch_size=256,
)
TOY_ONLINE = dict(dataset=f"{FOLDER}/prompts_train.jsonl.gz", lr=1e-4)


# === Loss ===
def kto_loss(log_ratio, mask, desirable, z_0: float, beta: float, lambda_D: float, lambda_U: float):
    """Equation 7 on (humanline-clipped) token log-ratios: λ_y · (1 - σ(β·±(r - z_0))) with r = Σ_t log_ratio.

    Args:
        log_ratio: (B, T) log π_θ/π_ref in nats.
        mask: (B, T), 1 at completion tokens.
        desirable: (B,) bool.
        z_0: reference point in nats.

    Returns:
        λ_y - v(x, y) of each example (B,), and the rewards β·r (B,), detached.
    """
    r = (log_ratio * mask).sum(-1)  # (B,)
    gain = torch.where(desirable, r - z_0, z_0 - r)
    weight = torch.where(desirable, r.new_tensor(lambda_D), r.new_tensor(lambda_U))
    return weight * (1 - torch.sigmoid(beta * gain)), beta * r.detach()


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


@torch.no_grad()
def reference_point(args, policy, reference, mismatched: list[utils.Example], pad_id: int) -> float:
    """z_0 = max(0, mean of Σ_t log_ratio over mismatched pairs) of the global batch, in nats.

    Its log-ratios are clipped as in the loss. (Humanline sampling only stops gradients, and here are none.)
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.zeros((), dtype=torch.float64, device=policy.device)
    passes = utils.make_passes([x.length for x in mismatched], world, args.micro_batch_tokens)
    for mine in passes[rank::world]:  # none is empty: a batch is a multiple of the ranks
        examples = [mismatched[i] for i in mine]
        input_ids, mask = utils.pad_batch(examples, pad_id, policy.device)  # (B, T)
        logps = utils.token_logps(policy, input_ids, mask)  # (B, T)
        log_ratio = logps - utils.token_logps(reference, input_ids, mask)
        if args.humanline and args.clip == "clip":
            log_ratio.clamp_(args.log_epsilon_P, args.log_epsilon_R)
        total += (log_ratio * mask).sum()
    dist.all_reduce(total)
    return max(total.item() / len(mismatched), 0.0)  # in this order nan stays nan


# === Data ===
WANTED = "it needs a prompt with completion and label, or with chosen and rejected"
COMPLETION_COLUMNS = {"chosen", "rejected", "completion", "completions"}  # of all scripts' formats


def read_row(row: dict) -> tuple:
    """Prompt, completions and their rewards: 1 if desirable, else 0."""
    if "label" in row:
        label, completion = row["label"], row.get("completion")
        if label not in (True, False):
            raise ValueError(f"label must be true or false, not {label!r}")
        completions = [] if completion is None else [completion]
        return row.get("prompt"), completions, [float(label)]
    return read_pair(row)


def read_pair(row: dict) -> tuple:
    """Prompt, [chosen, rejected] without those that are missing, and the rewards 1 and 0.

    The messages with which two conversations both begin are the prompt, or follow those of a `prompt` column.
    """
    prompt = row.get("prompt", row.get("instruction"))
    chosen = row.get("chosen")
    rejected = row.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared = 0
        longest = min(len(chosen), len(rejected)) - 1  # at least the answer is no part of the prompt
        while shared < longest and chosen[shared] == rejected[shared]:
            shared += 1
        if shared > 0:
            beginning = chosen[:shared]
            if isinstance(prompt, list) and prompt != chosen[: len(prompt)]:
                is_end = prompt[-shared:] == beginning  # such as a user turn behind a system message
                beginning = prompt if is_end else prompt + beginning
            prompt, chosen, rejected = beginning, chosen[shared:], rejected[shared:]
    completions = [completion for completion in (chosen, rejected) if completion is not None]
    return prompt, completions, [1.0, 0.0]


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


def encode_row(args, number: int, row: dict, tokens, counts) -> tuple:
    """A row's group, and a note or "". Raises ValueError if it does not have one of `counts` completions."""
    if not isinstance(row, dict):
        row = {}
    prompt, completions, rewards = read_row(row)
    if counts == (0,):  # prompts alone are read
        completions = []
        valid = True
    elif completions:
        valid = len(completions) == len(rewards) and len(completions) in counts
    else:
        valid = 0 in counts and not COMPLETION_COLUMNS & row.keys()
    if prompt is None or not valid:
        raise ValueError(f"{WANTED}; the columns are {', '.join(row)}")
    return utils.encode_group(args, tokens, number, prompt, completions, rewards)


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


def mismatch(examples: list[utils.Example], group_size: int):
    """(x, y') for z_0: every prompt with the completion of the next example that has another prompt.

    Two pairs (x1: a, b), (x2: c, d) give x1: c, x1: d, x2: a, x2: b. Returns [] if there is one prompt.
    """
    mismatched = []
    for i, example in enumerate(examples):
        for distance in range(group_size, len(examples), group_size):
            other = examples[(i + distance) % len(examples)]
            if other.prompt_ids != example.prompt_ids:
                mismatched.append(example._replace(completion_ids=other.completion_ids))
                break
    return mismatched


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
def best_and_worst(group: list[utils.Example], threshold: float) -> tuple:
    """Algorithm 1: the best and the worst completion; () if tokens are equal, or rewards closer than τ."""
    best = max(group, key=lambda x: x.reward)
    worst = min(reversed(group), key=lambda x: x.reward)  # of equal ones the last
    if best.reward == worst.reward or best.reward - worst.reward < threshold:
        return ()
    if best.completion_ids == worst.completion_ids:
        return ()
    return best, worst


def make_group(args: Args, candidates: list[utils.Example]) -> tuple:
    """The best and the worst of one prompt's samples, the one desirable, the other not (C.1.2); or ()."""
    pair = best_and_worst(candidates, args.reward_threshold)
    if not pair:
        return ()
    best, worst = pair
    return best._replace(reward=1.0), worst._replace(reward=0.0)


def sample_round(args, sampler, policy, groups, progress: Progress, samples_per_prompt: int):
    """Algorithm 1: adds groups of the policy's samples for the prompts of the next round to the pool."""
    size = min(args.round_prompts, len(groups))
    prompts = [group[0] for group in draw_batch(groups, progress.round, size, args.seed)]
    progress.round += 1
    progress.last_round = progress.step
    with exit_on_error(f"round {progress.round}", ValueError):
        samples = sampler.sample(policy, prompts, samples_per_prompt, (args.seed, progress.round))
    new_groups = []
    for candidates in samples:
        group = make_group(args, [x.to_train(args.max_length) for x in candidates])
        if group:
            new_groups.append(group)
    # None is left, or (in GRPO's larger groups) all rewards of each are equal.
    if all(group[0].reward == group[-1].reward for group in new_groups):
        reason = "no prompt's rewards differ; raise --temperature, lower --reward-threshold"
        fail(f"round {progress.round}: {reason}")
    filtered = 1 - len(new_groups) / len(prompts)
    progress.rollout = sampler.metrics | {"rollout/round": progress.round, "rollout/filtered": filtered}
    progress.pool += new_groups


@exit_on_error("evaluation", ValueError)
def evaluate(args: Args, policy, sampler, held_out: list[tuple], first: dict):
    """{metric: (mean, standard error)}, and samples. `first` keeps the first call's log-probs and samples.

    Losses and margins are against the initial policy, without clipping, for z_0 = 0.
    """
    values = {}
    examples = [x for group in held_out for x in group if x.completion_ids]  # none if there are only prompts
    if examples:
        logps = utils.completion_logps(policy, examples, sampler.tokens.pad_id)  # (B,)
        desirable = torch.tensor([x.reward > 0 for x in examples])
        log_ratio = (logps - first.setdefault("logps", logps)).unsqueeze(-1)  # (B, 1): sums of tokens
        one = torch.ones_like(log_ratio)
        lambdas = (args.lambda_D, args.lambda_U)
        losses, rewards = kto_loss(log_ratio, one, desirable, 0.0, args.beta, *lambdas)  # (B,) each
        gain = torch.where(desirable, rewards, -rewards)
        values["eval/loss"] = losses
        values["eval/accuracy"] = utils.win_rate(gain, 0)
        values["eval/margin"] = gain
    prompts = [group[0] for group in held_out]
    statistics, samples = sampler.evaluate(policy, prompts, first)
    return utils.means(values | statistics), samples


# === Training ===
def clipping_metrics(args, log_ratio, mask):
    """Of the completion tokens: the shares beyond a bound, and |log-ratio|."""
    return {
        "humanline/clipped_low": ((log_ratio < args.log_epsilon_P).double(), mask),
        "humanline/clipped_high": ((log_ratio > args.log_epsilon_R).double(), mask),
        "humanline/log_ratio_abs_mean": (log_ratio.detach().abs(), mask),
    }


def example_metrics(logps, rewards, mask, desirable, z_0: float, beta: float):
    """{name: (values, weights)} of the examples of a pass, chosen being the desirable ones."""
    completion_logps = (logps.detach() * mask).sum(-1)  # (B,)
    gain = torch.where(desirable, rewards - beta * z_0, beta * z_0 - rewards)
    chosen = desirable.to(rewards.dtype)
    return {
        "rewards/accuracies": (utils.win_rate(gain, 0), torch.ones_like(gain)),
        "rewards/chosen": (rewards, chosen),
        "rewards/rejected": (rewards, 1 - chosen),
        "logps/chosen": (completion_logps, chosen),
        "logps/rejected": (completion_logps, 1 - chosen),
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
    check_flags(args, args.batch_size)
    signals = Signals()
    rank, world, device = setup(args)
    reference_dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32  # of storage

    # data
    config, final_dtype, tokens = load_config(args)
    counts = (0,) if args.online else (1, 2)  # completions of a row
    groups, held_out, hashes = load_data(args, tokens, counts, (0, 1, 2))
    group_size = 2 if args.online else len(groups[0])  # a pair is two examples that stay in one step
    groups_per_step = args.batch_size // group_size
    if args.batch_size % group_size:
        fail(f"--batch-size {args.batch_size} is odd, and the pairs stay together")
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
    first_evaluation = {}  # its log-probs and samples
    before, samples_before = evaluate(args, policy, sampler, held_out, first_evaluation)

    # optimizer
    optimizer = make_optimizer(args, policy, device)
    progress = Progress()
    if checkpoint:
        progress = load_checkpoint(args, checkpoint, policy, reference, optimizer)
    else:
        save_args(args, output_dir, __file__)
    scheduler = make_scheduler(args, optimizer, progress.step)
    log = Log(output_dir, progress.step, before) if rank == 0 else None
    sync = args.sync if args.humanline else "none"
    lambdas = (args.lambda_D, args.lambda_U)

    steps = range(progress.step, args.num_steps)
    bar = tqdm(steps, initial=progress.step, total=args.num_steps, disable=rank != 0)
    for step in bar:
        started = time.perf_counter()

        # the batch: groups of the data set, or of the round's samples
        if args.online:
            while len(progress.pool) < groups_per_step:
                signals.training = False  # a signal does not wait for sampling, which may take long
                sample_round(args, sampler, policy, groups, progress, args.samples_per_prompt)
                sync_reference(reference, policy)  # Algorithm 1: the policy at the start of the round
                progress.last_sync = step
            batch = progress.pool[:groups_per_step]
            progress.pool = progress.pool[groups_per_step:]
        else:
            batch = draw_batch(groups, step, groups_per_step, args.seed)
        examples = [x for group in batch for x in group]
        # Nothing was updated since the last sync, so both models have the same log-probs.
        in_sync = progress.last_sync == step
        mismatched = mismatch(examples, group_size)
        if not mismatched:
            fail(f"step {step}: the batch has one prompt, and z_0 needs two; raise --batch-size")
        z_0 = 0.0 if in_sync else reference_point(args, policy, reference, mismatched, tokens.pad_id)
        signals.training = True  # from here a signal waits for the end of the step

        # the gradient of the mean loss over the examples of all ranks and passes
        lengths = [x.length for x in examples]
        passes = utils.make_passes(lengths, world, args.micro_batch_tokens)[rank::world]
        losses = torch.zeros(args.batch_size, dtype=torch.float64, device=device)  # 0: of other ranks
        sums = defaultdict(float)
        for number, mine in enumerate(passes, 1):  # mine: positions among the examples
            # FSDP2 sums gradients over the ranks: on the CPU in the last pass, since once is enough; on CUDA
            # in every pass, since until then a rank holds the gradients of the whole model.
            policy.set_requires_gradient_sync(device.type == "cuda" or number == len(passes))
            part = [examples[i] for i in mine]
            input_ids, mask = utils.pad_batch(part, tokens.pad_id, device)  # (B, T)
            desirable = torch.tensor([x.reward > 0 for x in part], device=device)  # (B,)

            if not in_sync:  # before the policy's pass, which keeps its activations
                with torch.no_grad():
                    ref_logps = utils.token_logps(reference, input_ids, mask)  # (B, T)
            logps = utils.token_logps(policy, input_ids, mask)  # (B, T)
            if in_sync:
                ref_logps = logps.detach()
            log_ratio = logps - ref_logps  # (B, T)
            clipped = clip_log_ratio(args, log_ratio, mask, [(args.seed, step, i) for i in mine])
            example_losses, rewards = kto_loss(clipped, mask, desirable, z_0, args.beta, *lambdas)  # (B,)
            (example_losses.sum() / args.batch_size).backward()

            # One bad row makes z_0, and so all losses, not finite: then the rewards tell which row it is.
            to_check = example_losses.detach() if math.isfinite(z_0) else rewards
            losses[mine] = to_check.double() / args.batch_size
            pass_metrics = example_metrics(logps, rewards, mask, desirable, z_0, args.beta)
            pass_metrics |= clipping_metrics(args, log_ratio, mask)
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
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        metrics["kto/z_0"] = z_0
        metrics |= perf_metrics(started, sum(lengths), device)
        if progress.rollout:
            metrics |= progress.rollout | {"rollout/age_steps": step - progress.last_round}
        if args.eval_every and progress.step % args.eval_every == 0:
            now, _ = evaluate(args, policy, sampler, held_out, first_evaluation)
            metrics |= {name: mean for name, (mean, _) in now.items()}
        bar.set_postfix(loss=metrics["loss"], accuracy=metrics["rewards/accuracies"], refresh=False)
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

    after, samples_after = evaluate(args, policy, sampler, held_out, first_evaluation)
    export(output_dir / "final", policy, tokens, final_dtype)
    if log:
        report(log, output_dir, before, after, samples_before, samples_after)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args(Args, __file__, __doc__, TOY, TOY_ONLINE))
