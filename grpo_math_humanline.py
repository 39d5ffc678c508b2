"""Humanline GRPO with verifiable rewards: sampling every S steps, around a reference that follows every k steps.

The paper is "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207); this is its §5.2.2 with Figure 7, and
GRPO is its equation 1. Two lines make the humanline variant, and `grep -n "# humanline [cs]" grpo_math_humanline.py`
shows them.

    python grpo_math_humanline.py                             # one process, the embedded toy, S=64 with humanline
    torchrun --nproc-per-node 4 grpo_math_humanline.py --model Qwen/Qwen2.5-1.5B-Instruct ...  # see docs/grpo_math.md

Differs from the paper in: the gradient norm is clipped globally, not per rank; the token mean is over the whole global
batch; answers are graded under a time limit; the defaults are the toy's. docs/grpo_math.md has the list with reasons.

Shapes: B sequences, T tokens.
"""

import glob
import gzip
import json
import math
import os
import re
import resource
import shutil
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import datasets
import jinja2
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import transformers
import tyro
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from utils import (
    encode_prompt,
    engine_difference,
    generate,
    grade,
    mean_and_se,
    pad_batch,
    parse_answers,
    reward_scores,
    sleep_engine,
    start_engine,
    start_grader,
    token_logps,
    update_engine,
)

TOY = Path(__file__).resolve().parent / "toy" / "shell_game"
SYSTEM_PROMPT = """Reason step by step before you answer. Write in this format, each tag on a line of its own:
<think>
your reasoning
</think>
<answer>
the final answer
</answer>"""

# === Args ============================================================================================================


@dataclass
class Args:
    # experiment
    seed: int = 1
    """seed of the data order, of humanline sampling and of generation"""
    output_dir: str = ""
    """receives metrics.jsonl, checkpoints/, final/, summary.json ...; default runs/<script>__<seed>__<time>"""
    resume: bool = False
    """continue the run in --output-dir from its newest checkpoint (from step 0 if it has none yet)"""
    checkpoint_every: int = 100
    """optimizer steps between checkpoints of policy, reference and Adam moments; 0: never"""
    track: bool = False
    """log to Weights & Biases too (pip install wandb; its WANDB_PROJECT and WANDB_ENTITY apply)"""

    # data
    dataset: str = str(TOY / "problems_train.jsonl.gz")
    """problems with an answer or a \\boxed solution: a json, jsonl or parquet file (or .gz), or a Hub name"""
    dataset_split: str = "train"
    """split of a Hub --dataset, such as train[:10000]"""
    eval_dataset: str | None = None
    """held-out problems in the same formats; empty: none; default: the toy's for the toy's --dataset"""
    eval_split: str = "test"
    """split of a Hub --eval-dataset"""
    system_prompt: str | None = None
    """first message; empty: none; default: SYSTEM_PROMPT above, which asks for the tags; none for the toy's --model"""
    max_prompt_length: int = 512
    """tokens; problems with a longer prompt are dropped (the authors' runs: 512)"""
    max_length: int = 2560
    """tokens of prompt and completion; a completion cut here gets no end-of-turn token"""
    group_by_length: bool = True
    """microbatches of sequences of similar length: less padding, the same numbers"""
    pad_to_multiple_of: int = 1
    """tokens; round padded lengths up: the same numbers"""

    # model
    model: str = str(TOY / "policy")
    """initial policy and reference: a Hugging Face folder or Hub name"""
    chat_template: str | None = None
    """file with a Jinja chat template, in place of the tokenizer's"""
    eos_token: str | None = None
    """end-of-turn token, in place of the tokenizer's"""
    pad_token: str | None = None
    """pad token, in place of the tokenizer's; it is masked everywhere, so any token will do"""
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """compute dtype; auto: bfloat16 on CUDA, float64 on CPU. Parameters and Adam moments are float32 always"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    trust_remote_code: bool = False
    """run Python code that comes with a model"""

    # optimization
    num_steps: int = 256
    """optimizer steps"""
    prompts_per_step: int = 16
    """problems per optimizer step, over all ranks (Table 2: 32)"""
    group_size: int = 8
    """G, completions per problem: a step trains on prompts_per_step x group_size sequences (Table 2: 8)"""
    micro_batch_size: int | None = None
    """sequences per forward and backward pass of one rank; default: all those of a step: no accumulation"""
    lr: float = 3e-4
    """AdamW learning rate (Table 2: 1e-6)"""
    warmup_fraction: float = 0.1
    """share of the steps in which the learning rate rises linearly; then it is constant (Table 1: 0.1)"""
    weight_decay: float = 0.0
    """AdamW weight decay (Table 2: 0)"""
    adam_eps: float = 1e-8
    """AdamW epsilon (Table 2: 1e-8)"""
    max_grad_norm: float = 1.0
    """bound on the global gradient norm (Table 2: 1.0)"""

    # humanline
    humanline: bool = True
    """humanline clipping and syncing; --no-humanline is neither, whatever --clip and --sync say"""
    k: int = 16
    """optimizer steps between syncs of the reference (Table 2: 12 to 24; 1 collapses, §5.2.2)"""
    log_epsilon_P: float = -1.5
    """lower bound of a token's log π_θ/π_ref in nats, below 0 (Table 2: -1.5)"""
    log_epsilon_R: float = 1.5
    """upper bound of a token's log π_θ/π_ref in nats, above 0 (Table 2: 1.5)"""
    clip: Literal["clip", "sample", "none"] = "clip"
    """humanline clipping, humanline sampling (Definition 4.2) in its place, or neither"""
    sync: Literal["before_step", "after_step", "none"] = "before_step"
    """humanline syncing, trust-region syncing in its place (after the update, Figure 10), or neither"""
    kappa: float = 100.0
    """humanline sampling: concentration κ of the Beta draws; κ → ∞ accepts what clipping does (Theorem 4.3)"""
    M_P: float = 10.0
    """humanline sampling: bound on π_θ/π_ref, above exp(log_epsilon_P)"""
    M_R: float = 10.0
    """humanline sampling: bound on π_ref/π_θ, above exp(-log_epsilon_R)"""

    # algorithm
    beta: float = 1e-4
    """weight of the KL penalty (the authors' runs: 1e-4)"""
    epsilon: float = 0.2
    """the ratio is clipped to 1 ± ε (the authors' runs: 0.2)"""
    accuracy_weight: float = 8.0
    """weight of the accuracy reward: 1 for a right answer, else 0 (Table 2: 8)"""
    format_weight: float = 1.0
    """weight of the format reward: 1 for <think> and <answer> sections and nothing else, else 0 (Table 2: 1)"""
    tag_weight: float = 1.0
    """weight of the tag count reward: 1/4 for each of the four tags that occurs once (Table 2: 1)"""

    # rollout
    sample_every: int = 64
    """S, optimizer steps between rounds of sampling; 1 is online (Figure 7: 1 and 64)"""
    grading_time_limit: float = 5.0
    """CPU seconds for the grading of one answer; one that takes longer is wrong"""
    engine: Literal["auto", "vllm", "hf"] = "auto"
    """what samples: vLLM, transformers, or vLLM where it is installed"""
    generation_batch_size: int = 256
    """sequences per batch of transformers' generate, on one rank; lower it for large models"""
    vllm_memory: float = 0.3
    """share of each GPU's memory for vLLM"""
    temperature: float = 1.0
    """sampling temperature, and that of the log-probs in training (Table 2: 0.7)"""
    top_p: float = 1.0
    """probability mass of nucleus sampling (Table 2: 1.0)"""
    max_new_tokens: int = 32
    """tokens per sampled completion (Table 2: 2048)"""

    # evaluation
    eval_every: int = 0
    """optimizer steps between evaluations; 0: only before and after training"""
    eval_samples: int = 256
    """held-out problems sampled for each evaluation; 0: none"""
    eval_samples_per_problem: int = 4
    """completions of each of these problems, for pass@1"""


# --- shared: fail
def fail(message: str):
    """Ends the run with a message and exit code 1. Every rank meets the same error, and rank 0 prints it."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(30)  # torchrun ends this rank as soon as rank 0 is gone; one that failed alone speaks up after all
    print(f"error: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized() and dist.get_backend() == "gloo":  # its threads could abort the interpreter's exit
        dist.destroy_process_group()
    raise SystemExit(1)


# --- end shared: fail


def validate(args: Args, world: int) -> None:
    """Stops with a message that names the flag, its value and the fix, before anything is loaded."""
    positive = {"lr", "epsilon", "max_grad_norm", "adam_eps", "kappa", "M_P", "M_R", "temperature"}
    positive |= {"grading_time_limit"}
    at_least_1 = {"k", "num_steps", "micro_batch_size", "max_new_tokens", "pad_to_multiple_of", "prompts_per_step"}
    at_least_1 |= {"max_prompt_length", "max_length", "generation_batch_size", "sample_every"}
    at_least_1 |= {"eval_samples_per_problem"}
    at_least_0 = {"seed", "checkpoint_every", "eval_every", "eval_samples", "weight_decay", "beta"}
    at_least_0 |= {"accuracy_weight", "format_weight", "tag_weight"}
    for name, value in asdict(args).items():
        for names, wanted, ok in (
            (positive, "a finite number above 0", lambda v: v > 0 and math.isfinite(v)),
            (at_least_1, "at least 1", lambda v: v >= 1),
            (at_least_0, "at least 0 and finite", lambda v: v >= 0 and math.isfinite(v)),
            ({"warmup_fraction"}, "a share of the steps, from 0 to 1", lambda v: 0 <= v <= 1),
            ({"top_p", "vllm_memory"}, "above 0 and at most 1", lambda v: 0 < v <= 1),
            ({"group_size"}, "at least 2: an advantage is relative to the group", lambda v: v >= 2),
            ({"log_epsilon_P"}, "below 0, such as -1.5", lambda v: v < 0),
            ({"log_epsilon_R"}, "above 0, such as 1.5", lambda v: v > 0),
        ):
            if name in names and value is not None and not ok(value):
                fail(f"--{name.replace('_', '-')} is {value}; it must be {wanted}")
    if args.clip == "sample" and not (
        args.M_P > math.exp(args.log_epsilon_P) > 0 and args.M_R > math.exp(-args.log_epsilon_R) > 0
    ):
        fail("--clip sample: finite bounds, --M-P above exp(log_epsilon_P), --M-R above exp(-log_epsilon_R) needed")
    for flag, package, wanted in (("--engine vllm", "vllm", args.engine == "vllm"), ("--track", "wandb", args.track)):
        if wanted and not find_spec(package):
            fail(f"{flag} needs {package}, which is not installed; see the README, or leave the flag out")
    if args.max_length <= args.max_prompt_length:
        fail(f"--max-length {args.max_length} must be above --max-prompt-length {args.max_prompt_length}; raise it")
    batch_size = args.prompts_per_step * args.group_size
    if batch_size % (world * (args.micro_batch_size or 1)):
        micro = [m for m in range(1, batch_size // world + 1) if batch_size % (world * m) == 0]
        fail(
            f"--prompts-per-step {args.prompts_per_step} x --group-size {args.group_size} is not a multiple of {world} "
            f"ranks x --micro-batch-size {args.micro_batch_size or 1}; these --micro-batch-size work: "
            f"{micro or 'none'}; so does a product that is a multiple of {world * (args.micro_batch_size or 1)}"
        )
    if args.chat_template and not Path(args.chat_template).is_file():
        fail(f"--chat-template {args.chat_template}: no such file")
    if not (Path(args.model) / "config.json").is_file():
        if Path(args.model).exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", args.model):
            fail(f"--model {args.model}: neither a model folder (with a config.json) nor a Hub name (owner/name)")
    folder = Path(args.output_dir)
    if taken := next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None):
        fail(f"--output-dir {folder}: {taken} is a file; name a folder")
    if args.resume and not (args.output_dir and (folder / "args.json").is_file()):
        fail(
            f"--resume: --output-dir {args.output_dir!r} holds no run to resume (no args.json); correct one of the two"
        )
    if args.resume:
        try:
            old = json.loads((folder / "args.json").read_text())
        except ValueError as error:
            fail(f"--resume: {folder}/args.json cannot be read: {error}")
        free = "resume output_dir track checkpoint_every micro_batch_size pad_to_multiple_of group_by_length".split()
        free += "gradient_checkpointing vllm_memory".split()  # none of these changes the numbers
        new = {name: value for name, value in asdict(args).items() if name not in free}
        differ = [f"--{n.replace('_', '-')} was {old.get(n)}, is {v}" for n, v in new.items() if old.get(n) != v]
        if differ:
            fail(f"--resume: {folder} was started with other settings ({'; '.join(differ)}); repeat its own")
    elif args.output_dir and any((folder / name).exists() for name in ("args.json", "metrics.jsonl", "final")):
        fail(f"--output-dir {folder} already holds a run; continue it with --resume, or name another folder")


# === Data ============================================================================================================


class Problem(NamedTuple):
    row: int  # of the data set, counted from 1: the line of a json lines file
    prompt: str | list  # text, or messages if there is a chat template
    prompt_ids: list[int]
    gold: str  # its answer


class Example(NamedTuple):
    row: int
    prompt_ids: list[int]
    completion_ids: list[int]  # ends with the end-of-turn token, unless it was cut
    rewards: list[float]  # accuracy, format, tag count
    advantage: float


# --- shared: load_rows
def load_rows(flag: str, name: str, split: str) -> list[dict]:
    """Rows of a json, jsonl or parquet file (or .gz), or of a Hub data set."""
    path = Path(name)
    kind = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(Path(name.removesuffix(".gz")).suffix)
    if path.is_dir() or (path.exists() and kind is None):
        fail(f"{flag} {name} is not a .json, .jsonl or .parquet file (or one of these with .gz)")
    if not path.exists() and (kind or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name)):
        fail(f"{flag} {name}: no such file, and not a Hub name (owner/name)")
    if path.exists() and path.stat().st_size == 0:
        fail(f"{flag} {name} is empty")
    try:
        source = (
            {"path": kind, "data_files": glob.escape(name), "split": "train"}
            if kind
            else {"path": name, "split": split}
        )
        rows = list(datasets.load_dataset(**source))
    except Exception as error:
        try:  # the library's message names no line
            text = (gzip.open if name.endswith(".gz") else open)(path, "rt").read() if kind == "json" else "?"
        except (OSError, EOFError, ValueError) as wrong:
            fail(f"{flag} {name} cannot be read: {wrong}")
        if text.strip() in ("", "[]"):
            fail(f"{flag} {name} has no rows")
        array = ".jsonl" not in name and text.lstrip().startswith("[")
        for number, line in enumerate([text] if array else text.split("\n"), 1) if kind == "json" else ():
            try:
                if line.strip() and not isinstance(json.loads(line), list if array else dict):
                    fail(f"{flag} {name}, line {number} is not JSON: not an object")
            except json.JSONDecodeError as wrong:
                fail(f"{flag} {name}, line {number + wrong.lineno - 1} is not JSON: {wrong.msg}, column {wrong.colno}")
        fail(f"{flag} {name} cannot be loaded: {' '.join(str(error.__cause__ or error or type(error)).split())[:500]}")
    return rows or fail(f"{flag} {name} has no rows")


# --- end shared: load_rows


def load_problems(args: Args, flag: str, name: str, split: str, tokens: tuple, grader) -> tuple[list[Problem], str]:
    """Problems with tokenized prompts and answers that can be graded, and a line about them. Rows that cannot train are
    dropped and counted; none left is an error."""
    (tokenizer, _, _), problems, dropped, number = tokens, [], Counter(), None
    rows = load_rows(flag, name, split)
    try:
        for number, row in enumerate(rows, 1):
            problem, answer, solution = (row.get(column) for column in ("problem", "answer", "solution"))
            if problem is None or answer is None and solution is None:
                missing = "problem" if problem is None else "answer or solution"
                raise ValueError(f"the row has no {missing}; the columns are {', '.join(rows[0])}")
            if type(answer) in (int, float):  # written out: 1e-05 would be read as 1·e - 5
                answer = format(Decimal(str(answer)), "f") if math.isfinite(answer) else ""
            for column, value in (("problem", problem), ("answer", answer), ("solution", solution)):
                if not isinstance(value, str | None):
                    raise ValueError(f"{column} must be a string, not {type(value).__name__}")
            prompt = [{"role": "system", "content": args.system_prompt}] * bool(args.system_prompt)
            prompt += [{"role": "user", "content": problem}]
            if not tokenizer.chat_template:
                prompt = "\n\n".join(message["content"] for message in prompt)
            prompt_ids = encode_prompt(tokenizer, prompt)
            gold = answer if answer is not None else solution if "\\boxed" in solution else ""
            if not problem.strip():
                dropped["empty problem"] += 1
            elif len(prompt_ids) > args.max_prompt_length:
                dropped[f"prompt longer than --max-prompt-length {args.max_prompt_length}"] += 1
            elif not gold.strip():
                dropped["no answer"] += 1
            else:
                problems.append(Problem(number, prompt, prompt_ids, gold))
    except ValueError as error:
        fail(f"{flag} {name}, line {number}: {error}")
    except (jinja2.TemplateError, TypeError) as error:
        fail(
            f"{flag} {name}, line {number}: the chat template cannot render it ({error}); pass --chat-template "
            'FILE, or --system-prompt "" if it takes no system message'
        )
    golds = parse_answers(grader, [problem.gold for problem in problems])
    dropped["answer that cannot be parsed"] = golds.count(None)
    problems = [problem._replace(gold=gold) for problem, gold in zip(problems, golds) if gold is not None]
    told = f"{sum(dropped.values())} dropped {dict(+dropped) or ''}"
    if not problems:
        fail(f"{flag} {name}: no problem is left to train on; {told}")
    return problems, f"{flag} {name}: {len(problems)} problems, {told}"


def example_sequences(examples: list[Example]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, completion ids) of every example."""
    return [(example.prompt_ids, example.completion_ids) for example in examples]


# === Rollout =========================================================================================================


# --- shared: rollout
def sample(args: Args, engine, policy, prompts: list, count: int, seed: tuple, tokens: tuple, judge):
    """`count` completions of every prompt from the present policy, for training and evaluation alike.

    Returns:
        Completion ids, the `count` ones of a prompt in a row; their texts; a dict of their lengths (tokens), whether
        they finished by themselves, and, with a judge, rewards, float64 tensors (N·count,); and metrics.
    """
    started, (tokenizer, eos_ids, pad_id) = time.perf_counter(), tokens
    update_engine(engine, policy)
    repeated = [pair for pair in prompts for _ in range(count)]
    prompt_ids = [pair.prompt_ids for pair in repeated]
    sampling = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "top_p": args.top_p}
    sampling |= {"seed": seed, "eos_ids": eos_ids, "pad_id": pad_id, "batch_size": args.generation_batch_size}
    ids, logps = generate(engine, prompt_ids, **sampling)
    sleep_engine(engine)
    few = list(zip(prompt_ids, ids))[:8]
    mean, largest = engine_difference(policy, few, logps[:8], pad_id, next(policy.parameters()).device)
    if not ((mean < 0.1) if args.dtype == "bfloat16" else (largest < 1e-3)):
        fail(
            f"--engine {args.engine}: the log-probs of its samples differ from the policy's by {mean:.2g} on average, "
            f"{largest:.2g} at most (nats): it does not sample from the model that is trained"
        )
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    finished = [completion[-1] in eos_ids for completion in ids]
    values = {"length": torch.tensor([len(completion) for completion in ids]).double()}
    values["finished"] = torch.tensor(finished).double()
    if judge:
        values["reward"] = reward_scores(*judge, list(zip([pair.prompt for pair in repeated], texts, finished)))
        if not values["reward"].isfinite().all():
            fail(f"--reward-model {args.reward_model} gives scores that are not finite")
    metrics = {f"rollout/{key}_mean": value.mean().item() for key, value in values.items()}
    metrics |= {"rollout/logp_diff_mean": mean, "rollout/logp_diff_max": largest}
    return ids, texts, values, metrics | {"perf/rollout_time": time.perf_counter() - started}


# --- end shared: rollout


def format_reward(text: str) -> float:
    """1 for a section of thinking and one of an answer, each tag on a line of its own and nothing around them, else 0
    (Open-R1's format reward, which lets text follow)."""
    return float(bool(re.fullmatch(r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>", text, re.DOTALL)))


def tag_count_reward(text: str) -> float:
    """A quarter for each of the four tags, with its line breaks, that occurs exactly once (Open-R1)."""
    return sum(text.count(tag) == 1 for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")) / 4


def score(grader, problems: list[Problem], texts: list[str]) -> tuple[list[tuple[float, float, float]], int]:
    """Accuracy, format and tag count reward of every completion, each from 0 to 1, and how many could not be graded
    within the limits; `problems` repeats like `texts`."""
    accuracies, stopped = grade(grader, texts, [problem.gold for problem in problems])
    return [(right, format_reward(text), tag_count_reward(text)) for right, text in zip(accuracies, texts)], stopped


def group_advantages(rewards) -> torch.Tensor:
    """(R - mean) / (std + 1e-4) within each group, with the sample std (Open-R1); exactly 0 where all are equal.

    rewards: (prompts, G).
    """
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return advantages.masked_fill(equal, 0.0)


# === Loss ============================================================================================================


# --- shared: grpo_loss
def grpo_loss(clipped, log_ratio, advantages, beta: float, epsilon: float):
    """Equation 1 for every token: -min(A·ratio, A·clamp(ratio, 1-ε, 1+ε)) + β·k3.

    Args:
        clipped: (B, T) humanline-clipped log π_θ/π_ref in nats, for the ratio.
        log_ratio: (B, T) the same before clipping, for the KL estimate k3 = π_ref/π_θ - log π_ref/π_θ - 1.
        advantages: (B,).

    Returns:
        The loss of every token (B, T); and detached: the ratio, k3, and where the clip to 1 ± ε removes the gradient.
    """
    ratio, A = clipped.exp(), advantages.unsqueeze(-1)  # (B, T), (B, 1)
    k3 = (-log_ratio).exp() + log_ratio - 1  # (B, T)
    loss = beta * k3 - torch.minimum(A * ratio, A * ratio.clamp(1 - epsilon, 1 + epsilon))
    removed = (A > 0) & (ratio > 1 + epsilon) | (A < 0) & (ratio < 1 - epsilon)
    return loss, ratio.detach(), k3.detach(), removed


# --- end shared: grpo_loss


# --- shared: humanline
def humanline_sampling(log_ratio, B_P, B_R, M_P: float, M_R: float):
    """Equation 5: a token with ratio < M_P·B_P or 1/ratio < M_R·B_R keeps its value and loses its gradient.

    Args:
        log_ratio: (B, T) log π_θ/π_ref in nats.
        B_P, B_R: (B, T) independent Beta draws.

    Returns:
        log_ratio with the rejected tokens detached, and the two masks (B, T) of rejected tokens.
    """
    low, high = log_ratio.exp() < M_P * B_P, (-log_ratio).exp() < M_R * B_R
    return torch.where(low | high, log_ratio.detach(), log_ratio), low, high


def beta_draws(mask, keys: list[tuple], kappa: float, mean: float):
    """Draws of Beta(κ·mean, κ·(1 - mean)) as in Theorem 4.3, (B, T). Row i is seeded by keys[i] alone, so a token's
    draw does not depend on the rank or the microbatch it falls into."""
    draws = [np.random.default_rng(key).beta(kappa * mean, kappa * (1 - mean), mask.shape[1]) for key in keys]
    return torch.as_tensor(np.stack(draws), dtype=mask.dtype, device=mask.device)


@torch.no_grad()
def sync_reference(reference, policy) -> None:
    """π_ref ← π_θ, local shard to local shard: no gather, no communication."""
    torch._foreach_copy_([p.to_local() for p in reference.parameters()], [p.to_local() for p in policy.parameters()])


# --- end shared: humanline

# === main ============================================================================================================


# --- shared: setup
def setup() -> tuple[int, int, torch.device, dist.device_mesh.DeviceMesh]:
    """Rank, world size, device and mesh, under torchrun or as a single process."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if "OMP_NUM_THREADS" not in os.environ:  # as torchrun does for several ranks; small models gain nothing from more
        torch.set_num_threads(1)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    store = None if "RANK" in os.environ else dist.HashStore()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # what goes wrong is said once, by fail
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would call the Hub for local files too
    return rank, world, device, init_device_mesh(device.type, (world,))


def load_tokenizer(args: Args, config):
    """The policy's tokenizer with the command line's overrides, every id that ends a turn, and the padding id."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    except Exception as error:
        fail(f"--model {args.model}: its tokenizer cannot be loaded: {str(error).splitlines()[0]}")
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text()
    for name, token in (("eos_token", args.eos_token), ("pad_token", args.pad_token)):
        if token and token not in tokenizer.get_vocab():
            fail(f"--{name.replace('_', '-')} {token!r} is not in the vocabulary of {args.model}")
        elif token:
            setattr(tokenizer, name, token)
    if tokenizer.eos_token_id is None:
        fail(f"--model {args.model}: its tokenizer has no end-of-turn token; name one with --eos-token")
    eos_ids = {tokenizer.eos_token_id}
    try:
        generation = transformers.GenerationConfig.from_pretrained(args.model)
    except OSError:  # the model comes without one
        generation = config.get_text_config()
    for ids in (generation.eos_token_id, config.get_text_config().eos_token_id):
        eos_ids |= {ids} if isinstance(ids, int) else set(ids or ())
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return tokenizer, eos_ids, pad_id


def check_lengths(args: Args, config, trained: int, sampled: int) -> None:
    """Stops when sequences (tokens of the longest one to train on and to sample) have no position in the model."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if getattr(config.get_text_config(), "rope_parameters", None) is None and max(trained, sampled) > limit:
        fail(
            f"--model {args.model} has {limit} positions; the longest sequence has {trained} tokens and a sample up to "
            f"{sampled}: lower --max-prompt-length, --max-length or --max-new-tokens"
        )


def load_sharded(args: Args, config, mesh, dtype: torch.dtype, compute_dtype: torch.dtype):
    """The causal LM with parameters in `dtype`, sharded with FSDP2: each decoder block, then what is left, the root."""
    load = {"config": config, "dtype": dtype, "trust_remote_code": args.trust_remote_code}
    try:
        model = AutoModelForCausalLM.from_pretrained(args.model, **load)
    except Exception as error:
        fail(f"--model {args.model}: its weights cannot be loaded: {str(error).splitlines()[0]}")
    mixed_precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.promote_types(compute_dtype, torch.float32)
    )
    # The root is resharded too: left gathered by a no-grad forward, it would not see the sync that follows.
    shard = {"mesh": mesh, "mp_policy": mixed_precision, "reshard_after_forward": True}
    for module in [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]:
        fully_shard(module, **shard)
    fully_shard(model, **shard)
    for module in [m for m in model.modules() if isinstance(m, FSDPModule)]:
        module.set_gradient_divide_factor(1.0)  # gradients are summed over the ranks: the loss is normalised globally
        module.set_force_sum_reduction_for_comms(True)
    return model


# --- end shared: setup


# --- shared: files
def write(path: Path, text: str) -> None:
    """Replaces a file as a whole: whoever reads it, or resumes after a crash, sees the old text or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def training_state(policy, reference, optimizer) -> dict:
    weights, moments = dcp_state.get_state_dict(policy, optimizer)
    return {"policy": weights, "optimizer": moments, "reference": dcp_state.get_model_state_dict(reference)}


def save_checkpoint(folder: Path, policy, reference, optimizer, state: dict) -> None:
    """Writes policy, reference, Adam moments and `state` under a temporary name, which no resume looks at, and renames
    the folder once it is whole."""
    temporary = folder.with_name(folder.name + ".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()
    dcp.save(training_state(policy, reference, optimizer), checkpoint_id=temporary)
    if dist.get_rank() == 0:
        write(temporary / "state.json", json.dumps(state))
        temporary.rename(folder)
    dist.barrier()


def load_checkpoint(folder: Path, policy, reference, optimizer) -> dict:
    """Restores what save_checkpoint wrote, on any number of ranks, and returns its `state`."""
    tensors = training_state(policy, reference, optimizer)
    dcp.load(tensors, checkpoint_id=folder)
    moments = tensors["optimizer"]
    dcp_state.set_state_dict(policy, optimizer, model_state_dict=tensors["policy"], optim_state_dict=moments)
    dcp_state.set_model_state_dict(reference, tensors["reference"])
    return json.loads((folder / "state.json").read_text())


# --- end shared: files


def main(args: Args) -> None:
    # --- setup
    if args.eval_dataset is None:
        args.eval_dataset = str(TOY / "problems_test.jsonl.gz") if args.dataset == Args.dataset else ""
    if args.system_prompt is None:
        args.system_prompt = "" if args.model == Args.model else SYSTEM_PROMPT
    if not args.humanline:
        args.clip = args.sync = "none"
    if args.dtype == "auto":
        args.dtype = "bfloat16" if torch.cuda.is_available() else "float64"
    validate(args, int(os.environ.get("WORLD_SIZE", 1)))
    rank, world, device, mesh = setup()
    say = print if rank == 0 else lambda *_: None
    name = [args.output_dir or f"runs/{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"]
    dist.broadcast_object_list(name)
    output_dir = Path(name[0])
    compute_dtype = getattr(torch, args.dtype)
    reference_dtype = torch.bfloat16 if compute_dtype == torch.bfloat16 else torch.float32
    if compute_dtype == torch.bfloat16:  # the head's fp32 product: its bf16 factors are exact in TF32
        torch.set_float32_matmul_precision("high")

    # --- data
    try:
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    except Exception as error:
        fail(f"--model {args.model} cannot be loaded: {str(error).splitlines()[0]}")
    final_dtype = config.dtype or torch.float32
    for part in (config, config.get_text_config()):  # dropout off in policy and reference
        for key in [key for key, value in part.to_dict().items() if "drop" in key and isinstance(value, float)]:
            setattr(part, key, 0.0)
    tokens = tokenizer, eos_ids, pad_id = load_tokenizer(args, config)
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    grader = start_grader(max(1, min(cores, 8)), args.grading_time_limit)
    problems, told = load_problems(args, "--dataset", args.dataset, args.dataset_split, tokens, grader)
    say(told)
    prompts = []
    if args.eval_dataset:
        prompts, told = load_problems(args, "--eval-dataset", args.eval_dataset, args.eval_split, tokens, grader)
        say(told)
    if len(problems) < args.prompts_per_step:
        fail(
            f"--dataset {args.dataset}: {len(problems)} problems are less than one step's --prompts-per-step "
            f"{args.prompts_per_step}; lower it"
        )
    prompts = prompts[: args.eval_samples]
    longest = max(len(problem.prompt_ids) for problem in problems + prompts) + args.max_new_tokens
    check_lengths(args, config, min(longest, args.max_length), longest)

    # --- models
    policy = load_sharded(args, config, mesh, torch.float32, compute_dtype).train()
    reference = load_sharded(args, config, mesh, reference_dtype, compute_dtype).eval().requires_grad_(False)
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    longest = min(longest, getattr(config.get_text_config(), "max_position_embeddings", longest))
    options = {"max_length": longest, "memory_share": args.vllm_memory, "trust_remote_code": args.trust_remote_code}
    engine = start_engine(args.engine, args.model, dtype=reference_dtype, device=device, **options)
    say(f"sampling with {'transformers' if isinstance(engine, torch.nn.Module) else 'vLLM'}")

    # --- optimizer
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, eps=args.adam_eps, weight_decay=args.weight_decay)
    warmup = max(1, round(args.warmup_fraction * args.num_steps))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)

    # --- evaluation
    def evaluate() -> tuple[dict, list[str]]:
        """Pass@1 and the other rewards, as means over problems with standard errors over problems, and completions."""
        if not prompts:
            return {}, []
        n = args.eval_samples_per_problem
        _, texts, sampled, _ = sample(args, engine, policy, prompts, n, (args.seed, 0), tokens, None)
        rewards, _ = score(grader, [problem for problem in prompts for _ in range(n)], texts)
        rewards = torch.tensor(rewards, dtype=torch.float64)
        values = dict(zip(("eval/accuracy", "eval/format", "eval/tag_count"), rewards.T))
        values |= {"eval/truncated": 1 - sampled["finished"], "eval/length": sampled["length"]}
        return {key: mean_and_se(value.view(-1, n).mean(1)) for key, value in values.items()}, texts[::n]

    if rank == 0:  # from here on the folder holds a run that --resume continues
        (output_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        write(output_dir / "args.json", json.dumps(asdict(args), indent=2))
    before, texts_before = evaluate()

    # --- output folder, resume
    step, last_sync, sampled_at, pool, rollout = 0, 0, 0, [], {}  # pool: sampled, not yet trained on
    checkpoints = [path for path in (output_dir / "checkpoints").glob("step-*") if path.suffix != ".tmp"]
    if args.resume and checkpoints:
        newest = max(checkpoints, key=lambda path: int(path.name.removeprefix("step-")))
        state = load_checkpoint(newest, policy, reference, optimizer)
        step, last_sync, sampled_at, rollout = (state[key] for key in ("step", "last_sync", "sampled_at", "rollout"))
        pool = [Example(*example) for example in state["pool"]]
        scheduler.load_state_dict(state["scheduler"])
    if rank == 0:
        if (output_dir / "metrics.jsonl").exists():  # what came after the checkpoint is done again
            lines = (output_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
            write(output_dir / "metrics.jsonl", "".join(lines[:step]))
        if args.track:
            import wandb

            wandb.init(name=output_dir.name, config=asdict(args), sync_tensorboard=True)
        writer = SummaryWriter(output_dir, purge_step=step)
        writer.add_text("args", json.dumps(asdict(args), indent=2))
        metrics_file = (output_dir / "metrics.jsonl").open("a")

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    # --- training
    batch_size = args.prompts_per_step * args.group_size
    per_rank = batch_size // world
    micro_batch_size = args.micro_batch_size or per_rank
    weights = torch.tensor((args.accuracy_weight, args.format_weight, args.tag_weight), dtype=torch.float64)
    bar = tqdm(total=args.num_steps, initial=step, disable=rank != 0, desc="grpo_math_humanline", mininterval=1)
    while step < args.num_steps:
        started = clock()
        if not pool:
            drawn, sampled_at = [], step
            for at in range(step, min(step + args.sample_every, args.num_steps)):
                epoch, position = divmod(at, len(problems) // args.prompts_per_step)
                order = np.random.default_rng((args.seed, epoch)).permutation(len(problems))
                drawn += [problems[i] for i in order[position * args.prompts_per_step :][: args.prompts_per_step]]
            seed = (args.seed, 1 + step)
            ids, texts, _, rollout = sample(args, engine, policy, drawn, args.group_size, seed, tokens, None)
            started_grading = clock()
            drawn = [problem for problem in drawn for _ in range(args.group_size)]
            rewards, stopped = score(grader, drawn, texts)
            scores = torch.tensor(rewards, dtype=torch.float64) @ weights
            advantages = group_advantages(scores.view(-1, args.group_size)).flatten().tolist()
            for problem, part, *rest in zip(drawn, ids, rewards, advantages):
                part = part[: args.max_length - len(problem.prompt_ids)]
                pool.append(Example(problem.row, problem.prompt_ids, part, *rest))
            rollout["rollout/truncated"] = 1 - rollout.pop("rollout/finished_mean")
            rollout["rollout/grading_stopped"] = stopped
            rollout["perf/grading_time"] = clock() - started_grading
            if args.sync == "none":
                sync_reference(reference, policy)  # the policy at sampling time
                last_sync = step
        batch, pool = pool[:batch_size], pool[batch_size:]
        rewards = torch.tensor([example.rewards for example in batch], dtype=torch.float64)  # (B, 3)
        scores = (rewards @ weights).view(-1, args.group_size)  # (prompts, G)
        batch = list(enumerate(batch))  # the number seeds humanline sampling
        batch_tokens = sum(len(example.completion_ids) for _, example in batch)
        if args.group_by_length:
            batch.sort(key=lambda item: len(item[1].prompt_ids) + len(item[1].completion_ids))
        mine, losses, sums = batch[rank::world], [], defaultdict(float)
        for start in range(0, per_rank, micro_batch_size):
            numbers, part = zip(*mine[start : start + micro_batch_size])
            # On CUDA every microbatch is reduced at once: whole gradients in fp32 would not fit beside a large model.
            policy.set_requires_gradient_sync(device.type == "cuda" or start + micro_batch_size == per_rank)
            input_ids, mask = pad_batch(example_sequences(part), pad_id, device, args.pad_to_multiple_of)  # (B, T)
            with torch.no_grad():
                ref_logps = token_logps(reference, input_ids, mask, args.temperature)  # (B, T)
            logps = token_logps(policy, input_ids, mask, args.temperature)  # (B, T)
            log_ratio = logps - ref_logps
            low = high = torch.zeros_like(mask)
            clipped = log_ratio
            if args.clip == "clip":
                low, high = log_ratio < args.log_epsilon_P, log_ratio > args.log_epsilon_R
                clipped = log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)  # humanline clipping (§5.1, Figure 4)
            elif args.clip == "sample":
                keys = [(args.seed, step, number) for number in numbers]
                B_P = beta_draws(mask, [(*key, 0) for key in keys], args.kappa, math.exp(args.log_epsilon_P) / args.M_P)
                B_R = beta_draws(
                    mask, [(*key, 1) for key in keys], args.kappa, math.exp(-args.log_epsilon_R) / args.M_R
                )
                clipped, low, high = humanline_sampling(log_ratio, B_P, B_R, args.M_P, args.M_R)
            advantages = torch.tensor([example.advantage for example in part], dtype=logps.dtype, device=device)  # (B,)
            loss, ratio, k3, removed = grpo_loss(clipped, log_ratio, advantages, args.beta, args.epsilon)  # (B, T)
            ((loss * mask).sum() / batch_tokens).backward()

            losses.append((loss * mask).sum(-1).detach())
            for key, value in {
                "loss": loss * mask,
                "grpo/ratio_mean": ratio * mask,
                "grpo/clip_fraction": removed * mask,
                "grpo/kl": k3 * mask,
                "humanline/clipped_low": low * mask,
                "humanline/clipped_high": high * mask,
                "humanline/log_ratio_abs_mean": log_ratio.abs() * mask,
                "tokens": torch.tensor([len(x.prompt_ids) + len(x.completion_ids) for x in part]),
                "padded_tokens": torch.tensor(mask.numel()),
            }.items():
                sums[key] += value.detach().double().sum().to(device)
        totals = torch.stack(list(sums.values()))
        dist.all_reduce(totals)
        sums = dict(zip(sums, totals.tolist()))
        # The global norm, in float64 so that it does not depend on how the gradients are sharded.
        local = [p.grad.to_local() for p in policy.parameters() if p.grad is not None]
        squares = torch.stack([gradient.double().square().sum() for gradient in local]).sum()
        dist.all_reduce(squares)
        torch.nn.utils.clip_grads_with_norm_(policy.parameters(), args.max_grad_norm, squares.sqrt().float())
        grad_norm = squares.sqrt().item()
        if not math.isfinite(sums["loss"]) or not math.isfinite(grad_norm):
            bad = [x.row for (_, x), value in zip(mine, torch.cat(losses).tolist()) if not math.isfinite(value)]
            rows = [None] * world
            dist.all_gather_object(rows, bad if not math.isfinite(sums["loss"]) else [x.row for _, x in mine])
            bar.close()
            fail(
                f"step {step}: the loss is {sums['loss'] / batch_tokens} and the gradient norm {grad_norm}; rows of "
                f"--dataset: {sorted(set(sum(rows, [])))}. The update was not made, and the last checkpoint in "
                f"{output_dir} stays. Look at these rows, or lower --lr or --max-grad-norm"
            )

        reference_age, before_sync = step - last_sync, clock()
        if args.sync == "before_step" and step % args.k == 0:
            sync_reference(reference, policy)  # humanline syncing (§5.1, Figure 3): before the update
            last_sync = step
        sync_time, lr = clock() - before_sync, scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if args.sync == "after_step" and step % args.k == 0:
            sync_reference(reference, policy)  # trust-region syncing (Figure 10): after the update
            last_sync = step

        # --- log, checkpoint
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else memory
        worst = torch.tensor([clock() - started, sync_time, memory / 2**30], dtype=torch.float64, device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        step_time, sync_time, memory = worst.tolist()
        real, padded = (sums.pop(key) for key in ("tokens", "padded_tokens"))
        metrics = {"step": step - 1} | {key: value / batch_tokens for key, value in sums.items()}
        metrics |= dict(zip(("reward/accuracy", "reward/format", "reward/tag_count"), rewards.mean(0).tolist()))
        metrics |= {"rewards/mean": scores.mean().item(), "rewards/std": scores.std().item()}
        metrics["grpo/zero_advantage_groups"] = (scores.amax(1) == scores.amin(1)).double().mean().item()
        metrics["rollout/age_steps"] = step - 1 - sampled_at
        metrics |= {"humanline/steps_since_sync": reference_age, "grad_norm": grad_norm, "lr": lr}
        metrics |= {"perf/step_time": step_time, "perf/sync_time": sync_time, "perf/peak_memory": memory}
        metrics |= {"perf/tokens_per_second": real / step_time, "perf/padding_share": 1 - real / padded} | rollout
        if args.eval_every and step % args.eval_every == 0:
            metrics |= {key: mean for key, (mean, _) in evaluate()[0].items()}
        if rank == 0:
            metrics_file.write(json.dumps(metrics) + "\n")
            metrics_file.flush()
            for key, value in metrics.items():
                writer.add_scalar(key, value, step - 1)
        bar.set_postfix(loss=f"{metrics['loss']:.3f}", accuracy=f"{metrics['reward/accuracy']:.2f}", refresh=False)
        bar.update()
        if args.checkpoint_every and step % args.checkpoint_every == 0:
            state = {"step": step, "last_sync": last_sync, "scheduler": scheduler.state_dict()}
            state |= {"sampled_at": sampled_at, "pool": pool, "rollout": rollout}
            save_checkpoint(output_dir / "checkpoints" / f"step-{step}", policy, reference, optimizer, state)
    bar.close()

    # --- export, evaluation
    buffers = dict(policy.named_buffers())
    policy.to(final_dtype)
    for path, buffer in buffers.items():  # .to() rounds the rotary frequencies too, which are not parameters
        owner, _, leaf = path.rpartition(".")
        setattr(policy.get_submodule(owner), leaf, buffer)
    full = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(policy, options=full)
    if rank == 0:
        ends = {"eos_token_id": sorted(eos_ids), "pad_token_id": tokenizer.pad_token_id}
        policy.generation_config = transformers.GenerationConfig(bos_token_id=tokenizer.bos_token_id, **ends)
        policy.save_pretrained(output_dir / "final.tmp", state_dict=weights)
        tokenizer.save_pretrained(output_dir / "final.tmp")
        shutil.rmtree(output_dir / "final", ignore_errors=True)
        (output_dir / "final.tmp").rename(output_dir / "final")
    after, texts_after = evaluate()
    if rank == 0:
        write(output_dir / "summary.json", json.dumps({"before": before, "after": after}, indent=2))
        print(f"\n{'mean ± standard error':24}{'before':>19}{'after':>19}")
        for key in after:
            print(f"{key:24}" + "".join(f"{mean:10.3f} ± {error:6.3f}" for mean, error in (before[key], after[key])))
            writer.add_scalar(key, before[key][0], 0)
            writer.add_scalar(key, after[key][0], step)
        for problem, old, new in list(zip(prompts, texts_before, texts_after))[:4]:
            prompt = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]
            print(f"\nproblem: {prompt}\nbefore: {old!r}\nafter:  {new!r}")
        print(f"\nwrote {output_dir}")
        writer.close()
    grader.stop()
    grader.join()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
