"""Humanline KTO: alignment from single good and bad completions, against a reference one step behind the policy.

The paper is "Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207); KTO is its equation 7. Two lines make
the humanline variant: `grep -n "# humanline [cs]" kto_humanline.py` shows them.

    python kto_humanline.py                                   # one process, the embedded toy, about a minute
    torchrun --nproc-per-node 4 kto_humanline.py --model meta-llama/Meta-Llama-3-8B-Instruct ...  # see docs/kto.md

Differs from the paper in: z_0 is one value for the whole global batch, with mismatched prompts guaranteed; the gradient
norm is clipped globally, not per rank; masks are explicit; the defaults are the toy's. docs/kto.md has the reasons.

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
    encode_completion,
    encode_prompt,
    engine_difference,
    generate,
    load_reward_model,
    mean_and_se,
    pad_batch,
    reward_scores,
    sequence_logps,
    sleep_engine,
    start_engine,
    to_text,
    token_logps,
    update_engine,
    win_rate,
)

TOY = Path(__file__).resolve().parent / "toy" / "tales"

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
    dataset: str = str(TOY / "preferences_train.jsonl.gz")
    """examples, or pairs to split: a json, jsonl or parquet file (or .gz), or a Hub name; formats in docs/kto.md"""
    dataset_split: str = "train"
    """split of a Hub --dataset, such as train[:10000]"""
    eval_dataset: str | None = None
    """held-out data in the same formats, or prompts; empty: none; default: the toy's for the toy's --dataset"""
    eval_split: str = "test"
    """split of a Hub --eval-dataset"""
    max_prompt_length: int = 625
    """tokens; rows with a longer prompt are dropped (the authors' runs: 625)"""
    max_length: int = 1250
    """tokens of prompt and completion; a completion cut here gets no end-of-turn token (the authors' runs: 1250)"""
    min_avg_logp: float | None = None
    """nats per token; drop examples (pairs, by the desirable one) less likely under the initial policy (Figure 6)"""
    group_by_length: bool = True
    """microbatches of examples of similar length: less padding, the same numbers"""
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
    num_steps: int = 320
    """optimizer steps"""
    batch_size: int = 64
    """examples per optimizer step, over all ranks; a pair is two (Table 1: 64)"""
    micro_batch_size: int | None = None
    """examples per forward and backward pass of one rank; default batch_size / ranks: no accumulation"""
    lr: float = 3e-4
    """AdamW learning rate (Table 3: 5e-6)"""
    warmup_fraction: float = 0.1
    """share of the steps in which the learning rate rises linearly; then it is constant (Table 1: 0.1)"""
    weight_decay: float = 1e-2
    """AdamW weight decay (Table 1: 1e-2)"""
    adam_eps: float = 1e-5
    """AdamW epsilon (Table 1: 1e-5)"""
    max_grad_norm: float = 1.0
    """bound on the global gradient norm (Table 3: 1.0, 4.0 with humanline, online 0.5 and 0.1)"""

    # humanline
    humanline: bool = True
    """humanline clipping and syncing; --no-humanline is neither, whatever --clip and --sync say"""
    k: int = 32
    """optimizer steps between syncs of the reference (Table 1: 1)"""
    log_epsilon_P: float = -1.5
    """lower bound of a token's log π_θ/π_ref in nats, below 0 (Table 1: -1.5)"""
    log_epsilon_R: float = 1.5
    """upper bound of a token's log π_θ/π_ref in nats, above 0 (Table 1: 1.5)"""
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
    beta: float = 2.5
    """KTO's β (Table 3: 0.25)"""
    lambda_D: float = 1.1
    """weight of desirable examples (Table 3: 1.1)"""
    lambda_U: float = 1.0
    """weight of undesirable examples (Table 3: 1)"""

    # rollout
    online: bool = False
    """train on rounds of completions sampled from the policy (Algorithm 1); --dataset then gives the prompts only"""
    round_prompts: int = 1024
    """prompts per round (Table 1: 1024)"""
    samples_per_prompt: int = 8
    """completions per prompt, of which the best and the worst make a pair (Table 1: 8)"""
    reward_threshold: float = 0.01
    """τ; a pair needs at least this difference of rewards (Table 1: 0.01)"""
    engine: Literal["auto", "vllm", "hf"] = "auto"
    """what samples: vLLM, transformers, or vLLM where it is installed"""
    generation_batch_size: int = 256
    """sequences per batch of transformers' generate, on one rank; lower it for large models"""
    vllm_memory: float = 0.3
    """share of each GPU's memory for vLLM"""
    temperature: float = 0.7
    """sampling temperature (Table 1: 0.7)"""
    top_p: float = 0.95
    """probability mass of nucleus sampling (Table 1: 0.95)"""
    max_new_tokens: int = 64
    """tokens per sampled completion (Table 1: 2048)"""

    # evaluation
    eval_every: int = 0
    """optimizer steps between evaluations; 0: only before and after training"""
    eval_samples: int = 256
    """held-out prompts sampled for each evaluation; 0: none"""
    eval_outputs: str | None = None
    """file that receives the final completions in the format of the alpaca_eval command"""
    reward_model: str | None = None
    """classifier with one output that scores samples; empty: none; default: the toy's for the toy's --model"""


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
    positive = {"lr", "beta", "lambda_D", "lambda_U", "max_grad_norm", "adam_eps", "kappa", "M_P", "M_R"}
    at_least_1 = {"k", "num_steps", "batch_size", "micro_batch_size", "max_new_tokens", "pad_to_multiple_of"}
    at_least_1 |= {"max_prompt_length", "max_length", "round_prompts", "generation_batch_size"}
    at_least_0 = {"seed", "checkpoint_every", "eval_every", "eval_samples", "weight_decay", "temperature"}
    at_least_0 |= {"reward_threshold"}
    for name, value in asdict(args).items():
        for names, wanted, ok in (
            (positive, "a finite number above 0", lambda v: v > 0 and math.isfinite(v)),
            (at_least_1, "at least 1", lambda v: v >= 1),
            (at_least_0, "at least 0 and finite", lambda v: v >= 0 and math.isfinite(v)),
            ({"warmup_fraction"}, "a share of the steps, from 0 to 1", lambda v: 0 <= v <= 1),
            ({"top_p", "vllm_memory"}, "above 0 and at most 1", lambda v: 0 < v <= 1),
            ({"samples_per_prompt"}, "at least 2: the best and the worst make a pair", lambda v: v >= 2),
            ({"log_epsilon_P"}, "below 0, such as -1.5", lambda v: v < 0),
            ({"log_epsilon_R"}, "above 0, such as 1.5", lambda v: v > 0),
        ):
            if name in names and value is not None and not ok(value):
                fail(f"--{name.replace('_', '-')} is {value}; it must be {wanted}")
    if args.clip == "sample" and not (
        args.M_P > math.exp(args.log_epsilon_P) > 0 and args.M_R > math.exp(-args.log_epsilon_R) > 0
    ):
        fail("--clip sample: finite bounds, --M-P above exp(log_epsilon_P), --M-R above exp(-log_epsilon_R) needed")
    if args.online and not args.temperature:
        fail(f"--temperature 0 makes the --samples-per-prompt {args.samples_per_prompt} all the same; raise it")
    if args.online and args.min_avg_logp is not None:
        fail("--min-avg-logp filters a data set; with --online there is none to filter")
    if args.online and not args.reward_model:
        fail("--online needs a --reward-model to score the samples")
    for flag, package, wanted in (("--engine vllm", "vllm", args.engine == "vllm"), ("--track", "wandb", args.track)):
        if wanted and not find_spec(package):
            fail(f"{flag} needs {package}, which is not installed; see the README, or leave the flag out")
    if args.max_length <= args.max_prompt_length:
        fail(f"--max-length {args.max_length} must be above --max-prompt-length {args.max_prompt_length}; raise it")
    if args.batch_size % (world * (args.micro_batch_size or 1)):
        micro = [m for m in range(1, args.batch_size // world + 1) if args.batch_size % (world * m) == 0]
        fail(
            f"--batch-size {args.batch_size} is not a multiple of {world} ranks x --micro-batch-size "
            f"{args.micro_batch_size or 1}; with it, these --micro-batch-size work: {micro or 'none'}; with this "
            f"--micro-batch-size, a multiple of {world * (args.micro_batch_size or 1)} as --batch-size does"
        )
    if args.chat_template and not Path(args.chat_template).is_file():
        fail(f"--chat-template {args.chat_template}: no such file")
    for flag, name in (("--model", args.model), ("--reward-model", args.reward_model)):
        if name and not (Path(name) / "config.json").is_file():
            if Path(name).exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
                fail(f"{flag} {name}: neither a model folder (with a config.json) nor a Hub name (owner/name)")
    if args.eval_outputs and not Path(args.eval_outputs).absolute().parent.is_dir():
        fail(f"--eval-outputs {args.eval_outputs}: its folder does not exist; create it first")
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
        free += "gradient_checkpointing vllm_memory eval_outputs".split()  # none of these changes the numbers
        new = {name: value for name, value in asdict(args).items() if name not in free}
        differ = [f"--{n.replace('_', '-')} was {old.get(n)}, is {v}" for n, v in new.items() if old.get(n) != v]
        if differ:
            fail(f"--resume: {folder} was started with other settings ({'; '.join(differ)}); repeat its own")
    elif args.output_dir and any((folder / name).exists() for name in ("args.json", "metrics.jsonl", "final")):
        fail(f"--output-dir {folder} already holds a run; continue it with --resume, or name another folder")


# === Data ============================================================================================================


class Example(NamedTuple):
    row: int  # of the data set, counted from 1: the line of a json lines file
    prompt: str | list  # text, or messages if there is a chat template
    prompt_ids: list[int]
    completion_ids: list[int]  # ends with the end-of-turn token, unless it was cut at --max-length
    desirable: bool


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


# --- shared: read_preferences
def read_preferences(rows: list[dict], prompts_only: bool) -> list[tuple]:
    """(row number, prompt, chosen, rejected) from rows with `prompt`, `chosen` and `rejected`, or with conversations
    that share their beginning; (row number, prompt) from rows without completions if `prompts_only`."""
    preferences = []
    for number, row in enumerate(rows, 1):
        prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
        if isinstance(chosen, list) and isinstance(rejected, list):
            turns = min(len(chosen), len(rejected)) - 1
            shared = next((i for i in range(turns) if chosen[i] != rejected[i]), turns)
            if shared > 0:  # the shared messages are the prompt, and a `prompt` column only repeats them
                before = prompt if isinstance(prompt, list) and prompt != chosen[: len(prompt)] else []
                prompt, chosen, rejected = before + chosen[:shared], chosen[shared:], rejected[shared:]
        needed = {"prompt": prompt} if prompts_only else {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        if missing := [name for name, value in needed.items() if value is None]:
            raise ValueError(f"row {number} has no {missing[0]!r}; the columns are {', '.join(rows[0])}")
        preferences.append((number, *needed.values()))
    return preferences


def check_label(number: int, row: dict) -> bool:
    """The label of an unpaired row, which must be a boolean: "false" and -1 are true in Python."""
    if row["label"] not in (True, False):
        raise ValueError(f"row {number}: label must be true or false, not {row['label']!r}")
    return bool(row["label"])


# --- end shared: read_preferences


def load_groups(args: Args, flag: str, name: str, split: str, tokens: tuple, prompts_only=False):
    """Tokenized examples in groups that stay in one step: (desirable, undesirable) from a pair, (example,) from an
    unpaired row or a prompt; and a line about them. Rows that cannot train are dropped and counted."""
    (tokenizer, eos_ids, _), groups, dropped, number = tokens, [], Counter(), None
    rows = load_rows(flag, name, split)
    if prompts_only is None:  # only if there is nothing else
        prompts_only = not {"chosen", "completion"} & rows[0].keys()
    unpaired = {"prompt", "completion", "label"} <= rows[0].keys() and not prompts_only
    try:
        if unpaired:
            items = [(i, row["prompt"], {check_label(i, row): row["completion"]}) for i, row in enumerate(rows, 1)]
        else:
            items = [(i, prompt, dict(zip((True, False), c))) for i, prompt, *c in read_preferences(rows, prompts_only)]
        for number, prompt, completions in items:
            prompt, _ = to_text(tokenizer, prompt, "")
            texts = [] if prompts_only else [to_text(tokenizer, prompt, text)[1] for text in completions.values()]
            prompt_ids = encode_prompt(tokenizer, prompt)
            if None in texts:
                dropped["completion is not one assistant message"] += 1
            elif not all(text.strip() for text in texts):
                dropped["empty completion"] += 1
            elif not prompt_ids:
                dropped["empty prompt"] += 1
            elif len(prompt_ids) > args.max_prompt_length:
                dropped[f"prompt longer than --max-prompt-length {args.max_prompt_length}"] += 1
            else:
                ids = [encode_completion(tokenizer, prompt, text, eos_ids) for text in texts] or [[]]
                ids = [part[: args.max_length - len(prompt_ids)] for part in ids]
                if len(ids) == 2 and ids[0] == ids[1]:
                    dropped["chosen equals rejected"] += 1
                else:
                    labels = completions or {True: None}
                    groups.append(tuple(Example(number, prompt, prompt_ids, i, label) for i, label in zip(ids, labels)))
    except ValueError as error:
        fail(f"{flag} {name}" + f", line {number}" * (number is not None) + f": {error}")
    except (jinja2.TemplateError, TypeError) as error:
        fail(f"{flag} {name}, line {number}: the chat template cannot render it ({error}); pass --chat-template FILE")
    told = f"{sum(dropped.values())} dropped {dict(dropped) or ''}"
    if not groups:
        fail(f"{flag} {name}: no {'prompt' if prompts_only else 'example'} is left to train on; {told}")
    kind = "prompts" if prompts_only else "examples" if unpaired else "pairs, split into examples"
    return groups, f"{flag} {name}: {len(groups)} {kind}, {told}"


def example_sequences(examples: list[Example]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, completion ids) of every example."""
    return [(example.prompt_ids, example.completion_ids) for example in examples]


def mismatched_sequences(examples: list[Example]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids of x, completion ids of y') for z_0: y' is the completion of the next example, in the order of the
    global batch, whose prompt differs. Empty if all prompts are the same."""
    count, sequences = len(examples), []
    for i, example in enumerate(examples):
        others = (examples[(i + shift) % count] for shift in range(1, count))
        other = next((other for other in others if other.prompt_ids != example.prompt_ids), None)
        if other is None:
            return []
        sequences.append((example.prompt_ids, other.completion_ids))
    return sequences


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


def best_against_worst(args: Args, prompts: list[Example], ids: list[list[int]], rewards) -> list[tuple]:
    """Algorithm 1: the best and the worst completion of every prompt whose rewards differ by τ or more, as a desirable
    and an undesirable example (C.1.2: pairs first, then split)."""
    best, worst = rewards.view(len(prompts), -1).max(1), rewards.view(len(prompts), -1).min(1)
    groups = []
    for i, prompt in enumerate(prompts):
        if best.values[i] - worst.values[i] >= args.reward_threshold:
            group, room = ids[i * args.samples_per_prompt :], args.max_length - len(prompt.prompt_ids)
            chosen, rejected = group[best.indices[i]][:room], group[worst.indices[i]][:room]
            if chosen != rejected:
                desirable = prompt._replace(completion_ids=chosen, desirable=True)
                groups.append((desirable, prompt._replace(completion_ids=rejected, desirable=False)))
    return groups


# === Loss ============================================================================================================


def kto_loss(log_ratio, mask, desirable, z_0, beta: float, lambda_D: float, lambda_U: float):
    """Equation 7 on (humanline-clipped) token log-ratios.

    Args:
        log_ratio: (B, T) log π_θ/π_ref in nats.
        mask: (B, T), 1 at completion tokens.
        desirable: (B,) bool.
        z_0: reference point in nats, a number without gradient.

    Returns:
        λ_y - v(x, y) of every example (B,), and the rewards β·Σ_t log_ratio (B,), detached.
    """
    r = (log_ratio * mask).sum(-1)  # (B,)
    gain = torch.where(desirable, r - z_0, z_0 - r)
    weight = torch.where(desirable, r.new_tensor(lambda_D), r.new_tensor(lambda_U))
    return weight * (1 - torch.sigmoid(beta * gain)), beta * r.detach()


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
        args.eval_dataset = str(TOY / "preferences_test.jsonl.gz") if args.dataset == Args.dataset else ""
    if args.reward_model is None:
        args.reward_model = str(TOY / "reward_model") if args.model == Args.model else ""
    if args.online and args.dataset == Args.dataset:
        args.dataset = str(TOY / "prompts_train.jsonl.gz")
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
    groups, told = load_groups(args, "--dataset", args.dataset, args.dataset_split, tokens, prompts_only=args.online)
    say(told)
    eval_groups = []
    if args.eval_dataset:
        eval_groups, told = load_groups(args, "--eval-dataset", args.eval_dataset, args.eval_split, tokens, None)
        say(told)
    evaluated = [example for group in eval_groups for example in group if example.completion_ids]
    prompts = [group[0] for group in eval_groups[: args.eval_samples]]
    if args.eval_outputs and not prompts:
        fail("--eval-outputs needs prompts: give --eval-dataset and --eval-samples")
    everything = [example for group in groups for example in group]
    trained = max(sum(map(len, sequence)) for sequence in example_sequences(everything + evaluated))
    sampled = max((len(x.prompt_ids) for x in prompts + everything * args.online), default=-args.max_new_tokens)
    check_lengths(args, config, trained, sampled + args.max_new_tokens)
    per_group = 2 if args.online else len(groups[0])
    if args.batch_size % per_group:
        fail(f"--batch-size {args.batch_size} is odd, and a pair is two examples that stay in one step; make it even")
    if len(groups) * per_group < args.batch_size:
        fail(
            f"--dataset {args.dataset}: {len(groups) * per_group} examples are less than one --batch-size "
            f"{args.batch_size}; lower it"
        )
    if not args.online and len(classes := {example.desirable for group in groups for example in group}) == 1:
        say(
            f"warning: --dataset {args.dataset} has only {'un' * (False in classes)}desirable examples; the paper's "
            "data has as many of the one as of the other, weighted by --lambda-D and --lambda-U"
        )

    # --- models
    judge = engine = None
    if args.reward_model and (args.online or prompts):
        try:
            judge = load_reward_model(args.reward_model, reference_dtype, device, args.trust_remote_code)
        except Exception as error:
            fail(f"--reward-model {args.reward_model} cannot be used: {str(error).splitlines()[0]}")
    policy = load_sharded(args, config, mesh, torch.float32, compute_dtype).train()
    reference = load_sharded(args, config, mesh, reference_dtype, compute_dtype).eval().requires_grad_(False)
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    if args.online or prompts:
        longest = sampled + args.max_new_tokens
        longest = min(longest, getattr(config.get_text_config(), "max_position_embeddings", longest))
        options = {"max_length": longest, "memory_share": args.vllm_memory, "trust_remote_code": args.trust_remote_code}
        engine = start_engine(args.engine, args.model, dtype=reference_dtype, device=device, **options)
        say(f"sampling with {'transformers' if isinstance(engine, torch.nn.Module) else 'vLLM'}")

    # --- data quality (Figure 6)
    quartiles = {}
    if not args.online:
        examples = [example for group in groups for example in group]
        lengths = torch.tensor([len(example.completion_ids) for example in examples])
        quality = sequence_logps(reference, example_sequences(examples), pad_id, device) / lengths
        quantiles = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=quality.dtype)
        for side in sorted({example.desirable for example in examples}, reverse=True):
            values = quality[[example.desirable == side for example in examples]].quantile(quantiles).tolist()
            quartiles["desirable" if side else "undesirable"] = values
        for side, values in quartiles.items():
            values = " ".join(f"{value:.2f}" for value in values)
            say(f"average token log-prob of {side} under the initial policy, nats, min q1 median q3 max: {values}")
        say("  (the paper trained worse on its lowest quartile, -1.03 to -0.36: Figure 6; see --min-avg-logp)")
        if args.min_avg_logp is not None:
            kept = [group for group, average in zip(groups, quality[::per_group]) if average >= args.min_avg_logp]
            say(f"--min-avg-logp {args.min_avg_logp}: {len(groups) - len(kept)} of {len(groups)} rows dropped")
            if len(kept) * per_group < args.batch_size:
                fail(f"--min-avg-logp {args.min_avg_logp} leaves {len(kept)} rows, less than one batch; lower it")
            groups = kept

    # --- optimizer
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, eps=args.adam_eps, weight_decay=args.weight_decay)
    warmup = max(1, round(args.warmup_fraction * args.num_steps))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)

    # --- evaluation
    initial = {}  # log-probs and rewards of the initial policy, set by the first evaluation

    def evaluate() -> tuple[dict, list[str]]:
        """Means with standard errors, and completions. Gains and wins are against the initial policy, with z_0 = 0."""
        values, texts = {}, []
        if evaluated:
            logps = sequence_logps(policy, example_sequences(evaluated), pad_id, device)
            rewards = args.beta * (logps - initial.setdefault("logps", logps))
            if bad := {example.row for example, r in zip(evaluated, rewards.tolist()) if not math.isfinite(r)}:
                fail(f"--eval-dataset: not finite at rows {sorted(bad)[:20]}. Look at --model, or lower --lr")
            desirable = torch.tensor([example.desirable for example in evaluated])
            gains = torch.where(desirable, rewards, -rewards)
            values["eval/loss"] = torch.where(
                desirable, gains.new_tensor(args.lambda_D), gains.new_tensor(args.lambda_U)
            ) * torch.sigmoid(-gains)
            values |= {"eval/accuracy": win_rate(gains, torch.zeros_like(gains)), "eval/margin": gains}
        if prompts:
            _, texts, sampled, _ = sample(args, engine, policy, prompts, 1, (args.seed, 0), tokens, judge)
            values |= {f"eval/{key}": value for key, value in sampled.items()}
            if judge:
                values["eval/win_rate"] = win_rate(
                    values["eval/reward"], initial.setdefault("reward", sampled["reward"])
                )
        return {key: mean_and_se(value) for key, value in values.items()}, texts

    if rank == 0:  # from here on the folder holds a run that --resume continues
        (output_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        write(output_dir / "args.json", json.dumps(asdict(args), indent=2))
    before, texts_before = evaluate()

    # --- output folder, resume
    step, last_sync, round_number, pool, rollout = 0, 0, 0, [], {}  # pool: groups of this round, not yet trained on
    checkpoints = [path for path in (output_dir / "checkpoints").glob("step-*") if path.suffix != ".tmp"]
    if args.resume and checkpoints:
        newest = max(checkpoints, key=lambda path: int(path.name.removeprefix("step-")))
        state = load_checkpoint(newest, policy, reference, optimizer)
        step, last_sync, round_number, rollout = (state[key] for key in ("step", "last_sync", "round", "rollout"))
        pool = [tuple(Example(*example) for example in group) for group in state["pool"]]
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
        writer.add_text("average token log-prob quartiles", str(quartiles))
        metrics_file = (output_dir / "metrics.jsonl").open("a")

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    # --- training
    per_rank = args.batch_size // world
    micro_batch_size = args.micro_batch_size or per_rank
    bar = tqdm(total=args.num_steps, initial=step, disable=rank != 0, desc="kto_humanline", mininterval=1)
    while step < args.num_steps:
        started = clock()
        while args.online and 2 * len(pool) < args.batch_size:
            order = np.random.default_rng(args.seed).permutation(len(groups))
            contexts = [groups[i][0] for i in order[round_number * args.round_prompts :][: args.round_prompts]]
            if not contexts:
                break
            round_number += 1
            seed = (args.seed, round_number)
            ids, _, sampled, rollout = sample(
                args, engine, policy, contexts, args.samples_per_prompt, seed, tokens, judge
            )
            made = best_against_worst(args, contexts, ids, sampled["reward"])
            if not made:
                fail(
                    f"round {round_number}: no prompt has samples whose rewards differ by --reward-threshold "
                    f"{args.reward_threshold} (standard deviation of all: {sampled['reward'].std():.2g}). Lower it, "
                    "raise --temperature, or lower --lr if the policy has collapsed to one output"
                )
            rollout |= {"rollout/round": round_number, "rollout/filtered": 1 - len(made) / len(contexts)}
            pool += made
            sync_reference(reference, policy)  # Algorithm 1: the policy at the start of the round
            last_sync = step
        if args.online and 2 * len(pool) < args.batch_size:
            say(f"the prompts end after step {step}; {len(pool)} pairs are less than one batch and stay unused")
            break
        size = args.batch_size // per_group
        if args.online:
            batch, pool = pool[:size], pool[size:]
        else:
            epoch, position = divmod(step, len(groups) // size)
            order = np.random.default_rng((args.seed, epoch)).permutation(len(groups))
            batch = [groups[i] for i in order[position * size : (position + 1) * size]]
        batch = [example for group in batch for example in group]

        # z_0: one value for the whole global batch, before the first backward pass
        mismatched = mismatched_sequences(batch)
        if not mismatched:
            bar.close()
            fail(
                f"step {step}: all {len(batch)} examples of the batch have the same prompt; z_0 needs completions of "
                "other prompts; raise --batch-size or mix the data"
            )
        if args.group_by_length:
            batch.sort(key=lambda example: len(example.prompt_ids) + len(example.completion_ids))
            mismatched.sort(key=lambda sequence: len(sequence[0]) + len(sequence[1]))
        z_0 = torch.zeros((), dtype=torch.float64, device=device)
        for start in range(0, per_rank, micro_batch_size):
            part = mismatched[rank::world][start : start + micro_batch_size]
            input_ids, mask = pad_batch(part, pad_id, device, args.pad_to_multiple_of)
            with torch.no_grad():
                log_ratio = token_logps(policy, input_ids, mask) - token_logps(reference, input_ids, mask)
            if args.clip == "clip":
                log_ratio = log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)  # humanline clipping, of z_0 too
            z_0 += (log_ratio * mask).double().sum()
        dist.all_reduce(z_0)
        z_0 = max(z_0.item() / args.batch_size, 0.0)

        mine, own_rewards, sums = batch[rank::world], [], defaultdict(float)
        for start in range(0, per_rank, micro_batch_size):
            part = mine[start : start + micro_batch_size]
            # On CUDA every microbatch is reduced at once: whole gradients in fp32 would not fit beside a large model.
            policy.set_requires_gradient_sync(device.type == "cuda" or start + micro_batch_size == per_rank)
            input_ids, mask = pad_batch(example_sequences(part), pad_id, device, args.pad_to_multiple_of)  # (B, T)
            with torch.no_grad():
                ref_logps = token_logps(reference, input_ids, mask)  # (B, T)
            logps = token_logps(policy, input_ids, mask)  # (B, T)
            log_ratio = logps - ref_logps
            low = high = torch.zeros_like(mask)
            clipped = log_ratio
            if args.clip == "clip":
                low, high = log_ratio < args.log_epsilon_P, log_ratio > args.log_epsilon_R
                clipped = log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)  # humanline clipping (§5.1, Figure 4)
            elif args.clip == "sample":
                keys = [(args.seed, step, example.row, int(example.desirable)) for example in part]
                B_P = beta_draws(mask, [(*key, 0) for key in keys], args.kappa, math.exp(args.log_epsilon_P) / args.M_P)
                B_R = beta_draws(
                    mask, [(*key, 1) for key in keys], args.kappa, math.exp(-args.log_epsilon_R) / args.M_R
                )
                clipped, low, high = humanline_sampling(log_ratio, B_P, B_R, args.M_P, args.M_R)
            desirable = torch.tensor([example.desirable for example in part], device=device)  # (B,)
            loss, rewards = kto_loss(clipped, mask, desirable, z_0, args.beta, args.lambda_D, args.lambda_U)  # (B,)
            (loss.sum() / args.batch_size).backward()

            own_rewards.append(rewards)  # not the losses: through z_0 one bad row makes them all NaN
            gain = torch.where(desirable, rewards - args.beta * z_0, args.beta * z_0 - rewards)
            sequence = (logps * mask).sum(-1)
            for key, value in {
                "loss": loss,
                "rewards/desirable": rewards * desirable,
                "rewards/undesirable": rewards * ~desirable,
                "rewards/accuracies": (gain > 0) + 0.5 * (gain == 0),
                "logps/desirable": sequence * desirable,
                "logps/undesirable": sequence * ~desirable,
                "humanline/clipped_low": low * mask,
                "humanline/clipped_high": high * mask,
                "humanline/log_ratio_abs_mean": log_ratio.abs() * mask,
                "desirable": desirable,
                "completion_tokens": mask,
                "tokens": torch.tensor(
                    [len(prompt) + len(completion) for prompt, completion in example_sequences(part)]
                ),
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
        if not all(map(math.isfinite, (z_0, sums["loss"], grad_norm))):
            bad = [x.row for x, reward in zip(mine, torch.cat(own_rewards).tolist()) if not math.isfinite(reward)]
            rows = [None] * world
            dist.all_gather_object(rows, bad)
            rows = set(sum(rows, [])) or {example.row for example in batch}
            bar.close()
            fail(
                f"step {step}: the loss is {sums['loss'] / args.batch_size}, z_0 {z_0} and the gradient norm "
                f"{grad_norm}; rows of --dataset: {sorted(rows)}. The update was not made, and the last checkpoint in "
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
        real, scored, padded = (sums.pop(key) for key in ("tokens", "completion_tokens", "padded_tokens"))
        counts = {"desirable": sums.pop("desirable"), "humanline": scored}
        counts["undesirable"] = args.batch_size - counts["desirable"]
        metrics = {"step": step - 1, "kto/z_0": z_0}
        for key, value in sums.items():  # a batch without desirable examples has no mean of their rewards
            count = counts.get(key.split("/")[0], counts.get(key.split("/")[-1], args.batch_size))
            metrics |= {key: value / count} if count else {}
        for key in [key for key in metrics if key.endswith("desirable")]:  # under DPO's names too
            metrics[key.replace("undesirable", "rejected").replace("desirable", "chosen")] = metrics[key]
        if {"rewards/desirable", "rewards/undesirable"} <= metrics.keys():
            metrics["rewards/margins"] = metrics["rewards/desirable"] - metrics["rewards/undesirable"]
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
        bar.set_postfix(loss=f"{metrics['loss']:.3f}", accuracy=f"{metrics['rewards/accuracies']:.2f}", refresh=False)
        bar.update()
        if args.checkpoint_every and step % args.checkpoint_every == 0:
            state = {"step": step, "last_sync": last_sync, "scheduler": scheduler.state_dict()}
            state |= {"round": round_number, "pool": pool, "rollout": rollout}
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
        for pair, old, new in list(zip(prompts, texts_before, texts_after))[:4]:
            prompt = pair.prompt if isinstance(pair.prompt, str) else pair.prompt[-1]["content"]
            print(f"\nprompt: {prompt}\nbefore: {old}\nafter:  {new}")
        if args.eval_outputs:
            last = [pair.prompt if isinstance(pair.prompt, str) else pair.prompt[-1]["content"] for pair in prompts]
            rows = [{"instruction": i, "output": o, "generator": output_dir.name} for i, o in zip(last, texts_after)]
            write(Path(args.eval_outputs), json.dumps(rows, indent=2, ensure_ascii=False))
        print(f"\nwrote {output_dir}")
        writer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
