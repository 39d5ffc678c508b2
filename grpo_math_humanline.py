"""Humanline GRPO with verifiable rewards: sampling every S steps, around a reference synced every k steps.

"Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207), §5.2.2 and equation 1. Two lines make it
humanline: `grep -n "# humanline [cs]" grpo_math_humanline.py`.

    python grpo_math_humanline.py  # one process, the embedded toy, a minute
    torchrun --nproc-per-node 4 grpo_math_humanline.py --model ... --dataset ...

Differs from equation 1 as the paper's online GRPO does (C.1.4):
    - The loss is the mean over the completion tokens of the global batch, not a mean of means.
    - The KL penalty is against the ratio's reference, not against a fixed policy.
Differs from the paper in (docs/grpo_math.md):
    - Log-probs in training have the temperature of sampling.
    - The gradient norm is one norm over all ranks; in the authors' code each has its own (docs/dpo.md, 8).
    - Answers that cannot be graded within limits count as wrong, and such problems are dropped.

B sequences, T tokens. Log-probs are in nats. A mask is 1 at completion tokens, else 0. An Example is a prompt
with one completion, a group the G examples of one prompt.
"""

import gzip
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
from typing import Literal, NamedTuple

import numpy as np
import pyarrow.parquet
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

import run
import utils

# === Args ===
SYSTEM_PROMPT = """Reason step by step before you answer. Write in this format, each tag on a line of its own:
<think>\nyour reasoning\n</think>\n<answer>\nthe final answer\n</answer>"""

WEIGHTS = {"accuracy": 8.0, "format": 1.0, "tag_count": 1.0}  # of the three rewards (Table 2)


@dataclass
class Args:
    # algorithm
    beta: float = 1e-4  # weight of the KL penalty (from the authors' code)
    epsilon: float = 0.2  # the ratio is clipped to 1 ± ε (from the authors' code)
    group_size: int = 8  # G, samples of a problem (Table 2)
    sample_every: int = 64  # S, steps between rounds; 1 is online (Figure 7: 1 and 64)
    # humanline
    humanline: bool = True  # --no-humanline: no clipping, no syncing but at the start of a round
    k: int = 16  # optimizer steps between syncs of the reference (Table 2: 12 to 24; 1 collapses)
    log_epsilon_P: float = -1.5  # bounds of a token's log π_θ/π_ref, nats (Tables 1, 2)
    log_epsilon_R: float = 1.5
    clip: bool = True  # --no-clip: syncing alone
    sync: Literal["before_step", "after_step", "none"] = "before_step"  # after_step: Figure 10
    # optimization
    num_steps: int = 1600  # optimizer steps (paper: 1600)
    prompts_per_step: int = 32  # problems per step, over all ranks (paper: 32)
    micro_batch_tokens: int = 8192  # most tokens in a forward pass of a rank; 0: any
    lr: float = 1e-6  # AdamW's learning rate (paper: 1e-6)
    warmup_fraction: float = 0.1  # share of the steps (Tables 1, 2)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # after warmup (paper: constant)
    weight_decay: float = 0.0  # of AdamW (Table 2)
    adam_eps: float = 1e-8  # AdamW's ε (Table 2)
    max_grad_norm: float = 1.0  # global gradient norm (Table 2)
    # data
    dataset: str = ""  # problems with an answer or a solution: file or Hub name
    dataset_split: str = "train"  # Hub split, such as train[:10000]
    eval_dataset: str = ""  # held out, in the same formats; empty: none
    eval_split: str = "test"  # Hub split
    system_prompt: str = SYSTEM_PROMPT  # first message; empty: none
    max_prompt_length: int = 512  # tokens; rows with a longer prompt are dropped
    max_length: int = 2560  # tokens; what is cut here has no end of turn
    # model
    model: str = ""  # folder or Hub name; empty: the toy and its settings
    chat_template: str = ""  # Jinja file
    eos_token: str = ""  # that ends a turn; empty: the tokenizer's
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bf16, CPU fp32, toy fp64
    gradient_checkpointing: bool = False  # less memory, more time
    compile: bool = False  # of every block, by torch.compile: a minute at first, then faster on a GPU
    shard_size: int = 0  # ranks that share a copy (HSDP), such as those of a machine; 0: all
    trust_remote_code: bool = False  # run a model's own Python code
    # sampling
    max_new_tokens: int = 2048  # tokens (paper: 2048); training reads those up to --max-length
    temperature: float = 0.7  # of sampling, and of the log-probs in training (paper: 0.7)
    top_p: float = 1.0  # nucleus sampling (Table 2)
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
    eval_samples_per_problem: int = 4  # for pass@1


# What the toy needs instead.
FOLDER = Path(__file__).resolve().parent / "toy" / "shell_game"
TOY = dict(
    model=f"{FOLDER}/policy",
    dataset=f"{FOLDER}/problems_train.jsonl.gz",
    eval_dataset=f"{FOLDER}/problems_test.jsonl.gz",
    dtype="float64",  # so that any number of ranks and passes gives the same digits
    system_prompt="",
    num_steps=256,
    prompts_per_step=16,
    lr=1e-4,
    temperature=1.0,
    max_new_tokens=32,
    generation_batch_size=256,
)


# === Loss ===
def grpo_loss(clipped_log_ratio, log_ratio, advantages, beta: float, epsilon: float):
    """Equation 1 for every token: β·k3 - min(A·ratio, A·clamp(ratio, 1-ε, 1+ε)).

    Args:
        clipped_log_ratio: (B, T) humanline-clipped log π_θ/π_ref in nats, for the ratio.
        log_ratio: (B, T), for the KL estimate k3 = π_ref/π_θ + log π_θ/π_ref - 1, which is not clipped (C.2).
        advantages: (B,).

    Returns:
        The loss of every token (B, T), which main averages. Detached: ratio, k3, and where the clip to 1 ± ε
        removes the gradient.
    """
    A = advantages.unsqueeze(-1)  # (B, 1)
    ratio = clipped_log_ratio.exp()  # (B, T)
    k3 = (-log_ratio).exp() + log_ratio - 1  # (B, T)
    loss = beta * k3 - torch.minimum(A * ratio, A * ratio.clamp(1 - epsilon, 1 + epsilon))
    removed_above = (A > 0) & (ratio > 1 + epsilon)
    removed_below = (A < 0) & (ratio < 1 - epsilon)
    return loss, ratio.detach(), k3.detach(), removed_above | removed_below


def group_advantages(rewards):
    """(R - mean) / (std + 1e-4) within each group, with the sample's std (Open-R1); 0 where all are equal.

    rewards: (groups, G).
    """
    rewards = rewards - rewards[:, :1]  # changes no advantage, but makes those of equal rewards exactly 0
    mean = rewards.mean(1, keepdim=True)
    deviation = rewards.std(1, keepdim=True)
    return (rewards - mean) / (deviation + 1e-4)


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
    """A problem and its gold answer, as a group of one. Change it to read other columns.

    Raises utils.CannotTrain if the row is to be left out, and another exception if it is malformed.
    """
    utils.check_columns(row)  # an error for text in other columns, such as "system" (utils.NOT_READ)
    prompt = row["problem"]
    if args.system_prompt:
        system = {"role": "system", "content": args.system_prompt}
        prompt = [system, {"role": "user", "content": prompt}]
    prompt_ids, _ = utils.encode(tokenizer, eos_ids, prompt)
    if not 0 < len(prompt_ids) <= min(args.max_prompt_length, args.max_length - 1):
        raise utils.CannotTrain("prompt empty, or longer than --max-prompt-length or --max-length")
    return (utils.Example(prompt, prompt_ids, answer=gold_answer(row)),)


def gold_answer(row) -> str:
    """The `answer` of a row, text or a number, or its `solution` with a box, or "". Raises ValueError."""
    answer, solution = row.get("answer"), row.get("solution")
    if answer is None and isinstance(solution, str):
        answer = solution if "\\boxed" in solution else ""
    if type(answer) is float:  # str would write 1e-05
        answer = np.format_float_positional(answer, trim="-") if math.isfinite(answer) else ""
    if type(answer) not in (str, int):
        raise ValueError("it needs an answer, text or a number, or a solution")
    return str(answer)


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
    )


# === Grading ===
# math_verify grades, as in Open-R1, but is given one expression: where it searches a text for what it can
# read, "4 or maybe 5" is 5, and a policy learns what pays.
TIME_LIMIT = 5.0  # CPU seconds for one answer
ANSWER_IS = r"(?i:answer)[^.\n]{0,30}?(?: is| are|[:\n])|\bA:|####"  # before an answer without a box
REWRITTEN = {  # what math_verify reads otherwise, or not at all
    r"(?:\.\s*|(?<!\\))(?:\\[()\[\]]|\$\$?)": "$$",  # one mark for formulas, and no full stop in them
    r"(?<=\d)(?:,\\!|\\[,; ]|\{,\}| )(?=\d{3}(?!\d))": "",  # 24{,}000 and 24\,000
    r"(?<=frac)\\(?!sqrt)[a-z]+": r"{\g<0>}",  # \frac\pi 4
    # A word is no product of letters, or AB = 5 would be an equation for A and B.
    r"(?<![\\A-Za-z])[A-Za-z]{2,}(?= ?=)|^[A-Za-z ]{3,}$": r"\\text{\g<0>}",
    # Text behind a number is dropped as its unit, but not that of 5 \text{ (or 4)}.
    r"\\text(?=\{[^{}]*\b(?:or|is|not)[^{}]*\w)": "",
}


def start_grader():
    """A pool of processes: an answer that never ends, eats memory or crashes takes one of them with it."""
    from pebble import ProcessPool

    context = multiprocessing.get_context("forkserver")  # a fork would inherit threads of CUDA and gloo
    # A worker imports this file; what that needs is imported once, before the forks.
    context.set_forkserver_preload(["torch", "transformers.models.auto.modeling_auto", "math_verify"])
    cores = os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    # A worker ends after 1000 answers, since the parser's caches grow.
    return ProcessPool(min(cores, 8) or 1, max_tasks=1000, initializer=start_worker, context=context)


def start_worker():
    logging.disable(logging.WARNING)  # math_verify's, that its own time limit is off
    resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))  # bytes, of which imports take one eighth


@lru_cache  # the samples of a problem have one gold answer
def read_answer(text: str):
    """What stands in the last <answer>; there in the last box, or behind the last "answer is", or in the last
    formula, or else all of it: an object of sympy, a string that math_verify cannot parse, or None."""
    from latex2sympy2_extended.math_normalization import extract_boxed_content
    from math_verify import LatexExtractionConfig, parse

    text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    before, box, behind = text.rpartition("\\boxed")
    if "}" not in before[-9:]:  # else it may be \boxed{4} or \boxed{5}, which is the set of both
        text = box + behind
    text = extract_boxed_content(text, "last")  # without a box all of it
    *introduction, text = re.split(ANSWER_IS, text)
    if introduction:
        text = re.split(r"\.\s|\n\n", text.strip())[0]  # its sentence
    text = text.strip(" \n:*").rstrip(".*")
    for pattern, new in REWRITTEN.items():
        text = re.sub(pattern, new, text)
    if introduction or text.count("$$") < 2:
        text = f"\\boxed{{{text}}}"
    found = parse(text, [LatexExtractionConfig()], parsing_timeout=None)  # [value, its LaTeX], or []
    if not found or re.match(r"(?:\[(?! *\\begin)|\\{)[^,]*$", str(found[-1])):  # [5] and {5} are not 5
        return None
    return found[0]


def judge(gold: str, text: str) -> bool | None:
    """In a worker: whether the answer in a text equals the gold answer; None if that cannot be read."""
    from math_verify import verify
    from sympy import And, Eq

    # No handler: Python would run one after a long multiplication only. The kernel ends the process, after so
    # much CPU time, since a busy machine must not change verdicts.
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
    gold, answer = read_answer(gold), read_answer(text)
    if gold is None:
        return None
    sides = []
    if isinstance(answer, And | Eq) and not isinstance(gold, Eq):  # x = 4 = 5 is x = 4 and 4 = 5
        sides = [side for equation in answer.atoms(Eq) for side in equation.args]
        sides = [side for side in sides if not (side.is_Symbol or side.is_Function)]  # x and f(2) are names
    return all(verify(gold, x, allow_set_relation_comp=True, timeout_seconds=None) for x in sides or [answer])


def judge_all(grader, jobs: list[tuple]):
    """`judge` of every (gold, text), shared out over the ranks; None where it was stopped."""
    from pebble import ProcessExpired

    rank, world = dist.get_rank(), dist.get_world_size()
    distinct = list(dict.fromkeys(jobs))
    # The other timeout is in seconds of the clock, for workers that sleep, or wait for a core.
    futures = [grader.schedule(judge, job, timeout=20 * TIME_LIMIT) for job in distinct[rank::world]]
    verdicts = []
    for future in futures:
        try:
            verdicts.append(future.result())
        except (ProcessExpired, TimeoutError, MemoryError):
            verdicts.append(None)
    of_ranks = utils.gather(verdicts)
    by_job = {job: of_ranks[i % world][i // world] for i, job in enumerate(distinct)}
    return [by_job[job] for job in jobs]


def keep_gradable(grader, name: str, groups):
    """The groups whose gold answer has a value within the limits. Ends the run if there is none."""
    golds = [group[0].answer for group in groups]
    verdicts = judge_all(grader, [(gold, "\\pi") for gold in golds])  # with itself it might not be computed
    dropped = [gold for gold, verdict in zip(golds, verdicts) if verdict is None]
    kept = [group for group in groups if group[0].answer not in dropped]
    summary = f"{name}: {len(kept)} of {len(groups)} gold answers can be graded"
    if dropped:
        summary += f", the first that cannot is {dropped[0]!r:.60}"
    if not kept:
        run.fail(summary)
    run.say(summary)
    return kept


def format_reward(text: str) -> float:
    """1 for <think>⏎…⏎</think>⏎<answer>⏎…⏎</answer> alone, else 0."""
    thinking, _, answer = text.partition("\n</think>\n<answer>\n")
    return float(thinking.startswith("<think>\n") and answer.endswith("\n</answer>"))


def tag_count_reward(text: str) -> float:
    """A quarter for each of the four tags, with its line breaks, that occurs exactly once (Open-R1)."""
    tags = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
    return sum(text.count(tag) == 1 for tag in tags) / 4


def score(grader, groups):
    """The groups with their weighted rewards; all rewards by name, (N,); how many could not be graded."""
    samples = [sample for group in groups for sample in group]
    verdicts = judge_all(grader, [(sample.answer, sample.text) for sample in samples])
    rewards = {
        "accuracy": [verdict is True for verdict in verdicts],
        "format": [format_reward(sample.text) for sample in samples],
        "tag_count": [tag_count_reward(sample.text) for sample in samples],
    }
    rewards = {name: torch.tensor(values, dtype=torch.float64) for name, values in rewards.items()}
    totals = sum(WEIGHTS[name] * values for name, values in rewards.items()).tolist()
    samples = [sample._replace(reward=total) for sample, total in zip(samples, totals)]
    size = len(groups[0])
    groups = [samples[i : i + size] for i in range(0, len(samples), size)]
    return groups, rewards, verdicts.count(None)


# === Rounds and evaluation ===
def sample_problems(args, sampler, grader, policy, problems: list[tuple], progress: run.Progress):
    """Fills the pool with the policy's graded samples for the next S steps' problems. Returns metrics."""
    drawn = []
    for step in range(progress.step, min(progress.step + args.sample_every, args.num_steps)):
        batch = draw_batch(problems, step, args.prompts_per_step, args.seed)
        drawn += [group[0] for group in batch]
    progress.round = progress.step + 1  # the seed of this round's samples; 0 is the evaluation's
    with run.exit_on_error(f"sampling at step {progress.step}", ValueError):
        samples, metrics = sampler.sample(policy, drawn, args.group_size, (args.seed, progress.round))
    started = time.perf_counter()
    groups, rewards, stopped = score(grader, samples)
    for group in groups:
        progress.pool.append([sample.cut(args.max_length) for sample in group])
    for name, values in rewards.items():
        metrics[f"rollout/{name}_mean"] = values.mean().item()
    metrics["rollout/grading_stopped"] = stopped
    metrics["perf/grading_time"] = time.perf_counter() - started
    return metrics


class Evaluation(NamedTuple):
    statistics: dict  # {name: (mean, standard error)}
    samples: list  # one for each of the first --eval-samples prompts


@run.exit_on_error("evaluation", ValueError)
def evaluate(args, policy, sampler, grader, held_out: list[tuple]) -> Evaluation:
    """Of the policy's samples for held-out problems; eval/accuracy is pass@1, errors are over problems."""
    problems = [group[0] for group in held_out[: args.eval_samples]]
    if not problems:
        return Evaluation({}, [])
    count = args.eval_samples_per_problem
    by_problem, _ = sampler.sample(policy, problems, count, (args.seed, 0))
    groups, values, _ = score(grader, by_problem)
    statistics = utils.sample_statistics([sample for group in groups for sample in group])
    values["finished"] = statistics["finished"]
    values["length"] = statistics["length"]
    by_problem = {f"eval/{name}": value.view(-1, count).mean(1) for name, value in values.items()}
    return Evaluation(utils.means(by_problem), [group[0] for group in groups])


# === Training ===
def clipping_metrics(args, log_ratio):
    """For each token: whether it is beyond a bound, and |log-ratio|, (B, T)."""
    return {
        "humanline/clipped_low": (log_ratio < args.log_epsilon_P).double(),
        "humanline/clipped_high": (log_ratio > args.log_epsilon_R).double(),
        "humanline/log_ratio_abs_mean": log_ratio.abs(),
    }


def grpo_metrics(losses, ratio, k3, removed):
    """For each token, (B, T)."""
    return {
        "loss": losses,
        "grpo/ratio_mean": ratio,
        "grpo/kl": k3,
        "grpo/clip_fraction": removed.double(),
    }


@run.exit_on_error("reading or writing", OSError)
def main(args: Args):
    run.check_flags(args, args.prompts_per_step * args.group_size)
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
    grader = start_grader()
    groups = keep_gradable(grader, args.dataset, groups)
    if held_out:
        held_out = keep_gradable(grader, args.eval_dataset, held_out)
    groups_per_step = args.prompts_per_step
    if len(groups) < groups_per_step:
        run.fail(f"--dataset {args.dataset}: {len(groups)} rows do not fill a batch of {groups_per_step}")

    # models
    with run.exit_on_error(f"--model {args.model}"):
        policy, reference = load_models(args, frozen_dtype, device)
        sampler = make_sampler(args, tokenizer, eos_ids, frozen_dtype, device)
    # Fused, since CUDA's default (foreach) needs a copy of one of Adam's moments. Rate, ε and decay are set
    # before every step.
    optimizer = torch.optim.AdamW(policy.parameters(), fused=device.type == "cuda")
    lr_factor = run.lr_schedule(args, optimizer)  # of a step, from 1: its share of --lr

    # run
    output_dir = run.open_folder(args, __file__)
    checkpoint = run.newest_checkpoint(output_dir)
    before = evaluate(args, policy, sampler, grader, held_out)  # of the initial policy, also on resume
    progress = run.load_checkpoint(checkpoint, policy, reference, optimizer, run.hash_data(groups))
    if any(len(group) != args.group_size for group in progress.pool):
        run.fail("--group-size: groups of another size wait for a step; keep it")
    run.save_args(args, output_dir, __file__)
    log = run.Log(output_dir, progress.step, before)
    signals = run.Signals()  # one ends the run after the step, with a checkpoint

    steps = range(progress.step, args.num_steps)
    bar = tqdm(steps, initial=progress.step, total=args.num_steps, disable=rank != 0)
    for step in bar:
        started = time.perf_counter()
        metrics = {"step": step}

        # the batch: groups of the round's samples
        if len(progress.pool) < groups_per_step:
            metrics |= sample_problems(args, sampler, grader, policy, groups, progress)
            progress.last_round = step
            if not args.humanline or args.sync == "none":
                sync_reference(reference, policy)  # the policy at sampling time
                progress.last_sync = step
        batch = progress.pool[:groups_per_step]
        progress.pool = progress.pool[groups_per_step:]
        metrics["rollout/age_steps"] = step - progress.last_round

        examples = [example for group in batch for example in group]
        rewards = torch.tensor([example.reward for example in examples], dtype=torch.float64, device=device)
        rewards = rewards.view(groups_per_step, args.group_size)
        advantages = group_advantages(rewards).flatten()  # (B of the step,)
        # Nothing was updated since the last sync, so both models have the same log-probs.
        in_sync = progress.last_sync == step

        # the gradient of the mean loss over the completion tokens of all ranks and passes
        completion_tokens = sum(len(example.completion_ids) for example in examples)
        lengths = [example.length for example in examples]
        # this rank's passes; every rank has as many
        micro_batches = utils.make_micro_batches(lengths, world, args.micro_batch_tokens)[rank::world]
        means = run.Means()
        for number, indices in enumerate(micro_batches, 1):
            # Gradients are summed over ranks in every pass, so that only shards stay. On a CPU in the last:
            # fp32 shards would round, and a toy in fp64 is to have the same digits on any number of ranks.
            policy.set_requires_gradient_sync(device.type == "cuda" or number == len(micro_batches))
            policy.set_requires_all_reduce(number == len(micro_batches))  # over the copies of HSDP
            input_ids, mask = utils.pad_batch([examples[i] for i in indices], device)  # (B, T)

            if not in_sync:  # first, since the policy's pass keeps its activations
                with torch.no_grad():
                    ref_logps = utils.token_logps(reference, input_ids, mask, args.temperature)  # (B, T)
            logps = utils.token_logps(policy, input_ids, mask, args.temperature)  # (B, T)
            if in_sync:
                ref_logps = logps.detach()
            log_ratio = logps - ref_logps  # (B, T)
            clipped_log_ratio = clip_log_ratio(args, log_ratio)  # (B, T)
            A = advantages[indices].to(logps.dtype)  # (B,)
            token_values = grpo_loss(clipped_log_ratio, log_ratio, A, args.beta, args.epsilon)
            losses, ratio, k3, removed = token_values  # (B, T) each
            ((losses * mask).sum() / completion_tokens).backward()

            means.add(grpo_metrics(losses, ratio, k3, removed), mask)
            means.add(clipping_metrics(args, log_ratio), mask)
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        metrics["grad_norm"] = norm.full_tensor().item()  # before clipping, of all shards
        metrics |= means.over_ranks()
        metrics["rewards/mean"] = rewards.mean().item()
        correct = rewards >= WEIGHTS["accuracy"]  # format and tag count are 2 at most
        metrics["rewards/accuracy"] = correct.double().mean().item()
        all_equal = rewards.amax(1) == rewards.amin(1)
        metrics["grpo/zero_advantage_groups"] = all_equal.double().mean().item()
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
            metrics |= run.evaluation_means(evaluate(args, policy, sampler, grader, held_out))
        bar.set_postfix(loss=metrics["loss"], accuracy=metrics["rewards/accuracy"], refresh=False)
        log.write(metrics)
        stopped_by = signals.of_any_rank()
        if stopped_by or run.checkpoint_is_due(args, progress.step):
            run.save_checkpoint(args, output_dir, policy, reference, optimizer, progress)
        if stopped_by:
            run.stop(stopped_by, progress.step, output_dir)

    after = evaluate(args, policy, sampler, grader, held_out)
    run.export(output_dir / "final", policy, tokenizer, eos_ids)
    run.report(log, before, after)
    grader.stop()
    grader.join()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(run.parse_args(Args, __file__, __doc__, TOY, {}))
