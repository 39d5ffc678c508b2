"""Humanline DPO: preference optimization against a reference that follows one step behind the policy.

"Humanline: Online Alignment as Perceptual Loss" (arXiv 2509.24207), equation 6, and the two lines that make it
humanline: `grep -n "# humanline [cs]" dpo_humanline.py`. docs/dpo.md says where it differs from the paper.

    python dpo_humanline.py  # one process, the embedded toy, half a minute
    torchrun --nproc-per-node 4 dpo_humanline.py --model ... --dataset ...

Blocks marked "shared" are the same in all four. B sequences (the chosen completions first, then the rejected
ones), T tokens; log-probs are in nats.
"""

# --- shared: imports
import gzip
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import datasets
import numpy as np
import pyarrow.parquet
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import transformers
import tyro
from filelock import FileLock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import trange
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

import utils

# --- end shared: imports
# === Args ===
# --- shared: ranges
Positive = Annotated[float, "finite and above 0", lambda v: 0 < v < 1e38]
NonNegative = Annotated[float, "finite and at least 0", lambda v: 0 <= v < 1e38]
Share = Annotated[float, "from 0 to 1", lambda v: 0 <= v <= 1]
PositiveShare = Annotated[float, "above 0 and at most 1", lambda v: 0 < v <= 1]
Count = Annotated[int, "at least 1", lambda v: v >= 1]
CountOr0 = Annotated[int, "at least 0", lambda v: v >= 0]
AtLeast2 = Annotated[int, "at least 2", lambda v: v >= 2]
Above0 = Annotated[float, "above 0", lambda v: v > 0]
Below0 = Annotated[float, "below 0, such as -1.5", lambda v: v < 0]
# --- end shared: ranges


@dataclass
class Args:
    # data
    dataset: str = ""  # pairs: file or Hub name; formats in docs/dpo.md
    eval_dataset: str = ""  # held out, in the same formats, or prompts; empty: none
    max_prompt_length: Count = 625  # tokens; pairs with a longer prompt are dropped (the authors')
    max_length: Count = 1250  # tokens; what is cut here has no end of turn (the authors')
    min_avg_logp: float = -math.inf  # nats per token; drop pairs whose chosen one is below it at first (Figure 6)
    # optimization
    num_steps: Count = 312  # optimizer steps (Table 1: 10K pairs, once)
    batch_size: Count = 32  # pairs per step, over all ranks (Table 1)
    micro_batch_size: CountOr0 = 0  # most pairs per rank and pass; 0: any
    micro_batch_tokens: CountOr0 = 8192  # most tokens per rank and pass; 0: any
    lr: Positive = 5e-6  # AdamW's learning rate (Table 3; online 2.5e-6)
    weight_decay: NonNegative = 1e-2  # of AdamW (Table 1)
    adam_eps: Positive = 1e-5  # AdamW's ε (Table 1)
    max_grad_norm: Positive = 1.0  # global gradient norm (Table 3; online 0.5, online + humanline 1.0)
    # algorithm
    beta: Positive = 0.1  # DPO's β (Table 3)
    k: Count = 1  # optimizer steps between syncs of the reference (Table 1)
    # --- shared: flags
    # humanline
    humanline: bool = True  # --no-humanline: no clipping, no syncing
    log_epsilon_P: Below0 = -1.5  # bounds of a token's log π_θ/π_ref, nats (Tables 1, 2)
    log_epsilon_R: Above0 = 1.5
    clip: Literal["clip", "sample", "none"] = "clip"  # sample: humanline sampling (eq. 5)
    sync: Literal["before_step", "after_step", "none"] = "before_step"  # after_step: Figure 10
    kappa: Positive = 100.0  # κ of eq. 5; κ → ∞ is clipping (Theorem 4.3)
    M: Positive = 10.0  # M of eq. 5
    # experiment
    seed: CountOr0 = 1  # of data order and sampling
    output_dir: str = ""  # default runs/<script>__<seed>__<time>
    resume: str = ""  # folder of a run; flags beside it win
    checkpoint_every: CountOr0 = 100  # steps; 0: never
    keep_checkpoints: CountOr0 = 2  # the newest stay; 0: all
    eval_every: CountOr0 = 0  # steps; 0: only before and after training
    eval_samples: CountOr0 = 256  # held-out prompts; 0: none
    warmup_fraction: Share = 0.1  # share of the steps (Tables 1, 2)
    # model, data
    model: str = ""  # folder or Hub name; empty: the toy and its settings
    chat_template: str = ""  # Jinja file
    eos_token: str = ""  # that ends a turn; empty: the tokenizer's
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"  # auto: bfloat16, on the CPU float64
    gradient_checkpointing: bool = False  # less memory, more time
    shard_size: CountOr0 = 0  # ranks that share a copy, as a machine's (HSDP); 0: all
    trust_remote_code: bool = False  # run a model's own Python code
    dataset_split: str = "train"  # Hub split, such as train[:10000]
    eval_split: str = "test"  # Hub split
    # sampling
    max_new_tokens: Count = 2048  # tokens (Tables 1, 2)
    engine: Literal["auto", "vllm", "hf"] = "auto"  # auto: vLLM where installed
    vllm_memory: PositiveShare = 0.3  # share of a GPU's memory
    generation_batch_size: Count = 32  # sequences, for hf
    # --- end shared: flags
    # --- shared: rounds
    temperature: NonNegative = 0.7  # of sampling (Table 1)
    top_p: PositiveShare = 0.95  # nucleus sampling (Table 1)
    online: bool = False  # rounds of samples (Algorithm 1)
    reward_model: str = ""  # classifier with one output
    round_prompts: Count = 1024  # prompts per round (Table 1)
    samples_per_prompt: AtLeast2 = 8  # best and worst make a pair (Table 1)
    reward_threshold: NonNegative = 0.01  # τ, least difference in a pair (Table 1)
    # --- end shared: rounds


# What the toy needs instead. The Adam ε keeps undisputed tokens from drifting.
FOLDER = Path(__file__).resolve().parent / "toy" / "bouquets"
TOY = dict(model=f"{FOLDER}/policy", reward_model=f"{FOLDER}/reward_model", generation_batch_size=256)
TOY |= dict(dataset=f"{FOLDER}/preferences_train.jsonl.gz", eval_dataset=f"{FOLDER}/preferences_test.jsonl.gz")
TOY |= dict(num_steps=320, lr=1e-3, adam_eps=1e-2, k=16, beta=10.0, max_new_tokens=64)
TOY_ONLINE = dict(dataset=f"{FOLDER}/prompts_train.jsonl.gz")


# === Loss ===
def dpo_loss(log_ratio, mask, beta: float):
    """Equation 6 on (humanline-clipped) token log-ratios.

    Args:
        log_ratio: (B, T) log π_θ/π_ref in nats, the chosen completions first, then the rejected ones in their order.
        mask: (B, T), 1 at completion tokens.

    Returns:
        The loss of every pair (B/2,), and the rewards β·Σ_t log_ratio (B,), detached.
    """
    rewards = beta * (log_ratio * mask).sum(-1)  # (B,)
    chosen, rejected = rewards.chunk(2)  # (B/2,) each
    return -torch.nn.functional.logsigmoid(chosen - rejected), rewards.detach()


# --- shared: humanline
def humanline_sampling(log_ratio, B_P, B_R, M: float):
    """Equation 5: a token with ratio < M·B_P or 1/ratio < M·B_R keeps its value and loses its gradient."""
    rejected = (log_ratio.exp() < M * B_P) | ((-log_ratio).exp() < M * B_R)
    return torch.where(rejected, log_ratio.detach(), log_ratio)


def beta_draws(mask, keys: list[tuple], kappa: float, mean: float):
    """Draws of Beta(κ·mean, κ·(1 - mean)) as in Theorem 4.3, (B, T): row i's depend on keys[i] alone."""
    draws = [np.random.default_rng(key).beta(kappa * mean, kappa * (1 - mean), mask.shape[1]) for key in keys]
    return torch.as_tensor(np.stack(draws), dtype=mask.dtype, device=mask.device)


@torch.no_grad()
def sync_reference(reference, policy) -> None:
    """π_ref ← π_θ, local shard to local shard, without communication."""
    torch._foreach_copy_([p.to_local() for p in reference.parameters()], [p.to_local() for p in policy.parameters()])


# --- end shared: humanline
# === Data ===
# --- shared: data
def fail(message: str):
    """Ends the run with exit code 1. Every rank comes here; rank 0 prints."""
    if os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(30)
    print(f"error: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized() and dist.get_backend() == "gloo":  # or its threads abort
        dist.destroy_process_group()
    raise SystemExit(1)


@contextmanager
def blame(place: str, kind: type = Exception):
    """An exception inside ends the run with a line that names the place."""
    try:
        yield
    except kind as error:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        fail(f"{place}: {lines[-1 if 'Traceback' in str(error) else 0]}")


def load_rows(flag: str, name: str, split: str) -> dict[int, dict]:
    """{row number: row} of a file or a Hub data set."""
    with blame(f"{flag} {name}"):
        if name.endswith(".parquet"):
            return dict(enumerate(pyarrow.parquet.read_table(name).to_pylist(), 1))
        if not name.removesuffix(".gz").endswith((".json", ".jsonl")):
            if Path(name).exists() or name.count("/") != 1:
                raise ValueError("no .json, .jsonl (or .gz), .parquet file or Hub name")
            return dict(enumerate(datasets.load_dataset(name, split=split), 1))
        with (gzip.open if name.endswith(".gz") else open)(name, "rt", encoding="utf-8-sig") as file:
            text = file.read()
        if text.lstrip().startswith("["):
            return dict(enumerate(json.loads(text), 1))
    rows = {}
    for number, line in enumerate(text.split("\n"), 1):
        with blame(f"{flag} {name}, line {number} is not JSON"):
            if line.strip():
                rows[number] = json.loads(line)
    return rows


def load_groups(args, flag: str, name: str, split: str, tokens, sizes, hashes: dict) -> list[tuple]:
    """A group is the examples of a row, such as (chosen, rejected), or (prompt,). `sizes`: numbers of completions to
    accept. Rows that cannot train are told. `hashes` gets that of the data."""
    groups, notes, rows, content = [], {}, load_rows(flag, name, split), hashlib.sha256()
    for number, row in rows.items():
        with blame(f"{flag} {name}, line {number}"):
            row = row if isinstance(row, dict) else {}
            prompt, completions, rewards = read_row(args, row)
            completions = completions if any(sizes) else []
            unread = any(sizes) and not completions and {"chosen", "rejected", "completion", "completions"} & row.keys()
            if prompt is None or unread or len(completions) not in sizes or len(completions) not in (0, len(rewards)):
                raise ValueError(f"{WANTED}; the columns are {', '.join(row)}")
            group, note = utils.encode_group(args, tokens, number, prompt, completions, rewards)
        content.update(repr((row, group)).encode())
        notes.setdefault(note, []).append(number)
        groups += [group] if group else []
    told = f"{flag} {name}: {len(groups)} rows, {len(rows) - len(groups)} dropped"
    for note in filter(None, notes):
        told += f"; {len(notes[note])} {note}: lines {str(notes[note][:9])[1:-1]}{' …' * (len(notes[note]) > 9)}"
    if not groups:
        fail(f"{told}; none is left")
    if flag == "--eval-dataset" and "instruction" in row and len(groups[: args.eval_samples]) < len(rows):
        told += "; AlpacaEval's length-controlled win rate is wrong without all: --eval-samples"
    if odd := [group[0].row for group in groups if len(group) != len(groups[0])]:
        fail(f"{flag} {name}, line {odd[0]}: not as many completions as in line {groups[0][0].row}")
    hashes[f"{flag} {name}"] = content.hexdigest()
    if dist.get_rank() == 0:
        print(told)
    return groups


def draw(rows: list, number: int, size: int, seed: int) -> list:
    """Batch `number` of endless epochs, each shuffled anew."""
    epoch, position = divmod(number, len(rows) // size)
    order = np.random.default_rng((seed, epoch)).permutation(len(rows))
    return [rows[i] for i in order[position * size : (position + 1) * size]]


# --- end shared: data
# --- shared: preferences
def split_conversations(row: dict) -> tuple:
    """Prompt, chosen and rejected. What both conversations begin with is the prompt, or follows a `prompt` column."""
    prompt, chosen, rejected = row.get("prompt", row.get("instruction")), row.get("chosen"), row.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list):
        turns = min(len(chosen), len(rejected)) - 1
        shared = next((i for i in range(turns) if chosen[i] != rejected[i]), turns)
        if shared > 0:
            before = prompt if isinstance(prompt, list) and prompt != chosen[: len(prompt)] else []
            prompt, chosen, rejected = before + chosen[:shared], chosen[shared:], rejected[shared:]
    return prompt, chosen, rejected


def best_and_worst(group: list[utils.Example], threshold: float) -> tuple:
    """Algorithm 1: the best and the worst completion; () if tokens or rewards are equal, or rewards closer than τ."""
    best, worst = max(group, key=lambda x: x.reward), min(reversed(group), key=lambda x: x.reward)
    if best.reward - worst.reward < threshold or best.reward == worst.reward:
        return ()
    return (best, worst) if best.completion_ids != worst.completion_ids else ()


# --- end shared: preferences

WANTED = "it needs a prompt, chosen and rejected (rows with a label train with kto_humanline.py)"


def read_row(args: Args, row: dict) -> tuple:
    """A row's prompt, completions, and their rewards."""
    prompt, chosen, rejected = split_conversations(row)
    return prompt, [completion for completion in (chosen, rejected) if completion is not None], [1.0, 0.0]


# --- shared: models
def setup() -> tuple[int, int, torch.device]:
    """Rank, world size, device."""
    rank, world, local = (int(os.environ.get(key, n)) for key, n in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:  # as torchrun does
        torch.set_num_threads(1)
    name = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(name, store=None if "RANK" in os.environ else dist.HashStore(), rank=rank, world_size=world)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    return rank, world, device


def load_config(args):
    """The model's configuration, with dropout off, its dtype, its tokens."""
    with blame(f"--model {args.model}"):
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
        tokens = utils.load_tokens(args, config)
    text = config.get_text_config()
    for key in [key for key, value in text.to_dict().items() if "drop" in key and isinstance(value, float)]:
        setattr(text, key, 0.0)
    return config, config.dtype or torch.float32, tokens


def shard_model(args, model, compute_dtype: torch.dtype, device):
    """FSDP2: each decoder block, an untied embedding and head, then what is left, the root."""
    world = dist.get_world_size()
    size = args.shard_size or world
    dims = slice(size == world, None)  # both for HSDP
    units = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    units += ends if ends[0].weight is not ends[1].weight else []
    mesh = init_device_mesh(device.type, (world // size, size)[dims], mesh_dim_names=("replicate", "shard")[dims])
    mixed = MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.promote_types(compute_dtype, torch.float32))
    # The root too: left gathered by a no-grad forward, it would miss the next sync.
    shard = {"mesh": mesh, "mp_policy": mixed, "reshard_after_forward": True}
    for module in [*units, model]:
        fully_shard(module, **shard)
        module.set_gradient_divide_factor(1.0)  # sums: the loss is normalised globally
        module.set_force_sum_reduction_for_comms(True)
    return model


def load_models(args, config, compute_dtype: torch.dtype, reference_dtype: torch.dtype, device) -> tuple:
    """Policy (fp32) and reference. The ranks share the files' pages, and cast their shards."""
    trust, config.dtype = {"trust_remote_code": args.trust_remote_code}, None  # "auto" is then the files' dtype
    with blame(f"--model {args.model}"):
        policy = utils.load_whole(AutoModelForCausalLM, args.model, config=config, dtype="auto", **trust)
    with no_init_weights():  # no memory yet
        reference = AutoModelForCausalLM.from_config(policy.config, dtype=reference_dtype, **trust)
    reference.tie_weights()
    buffers = dict(reference.named_non_persistent_buffers())  # the policy's have the files' dtype
    policy = shard_model(args, policy, compute_dtype, device).to(torch.float32)
    reference = shard_model(args, reference, compute_dtype, device).to(reference_dtype)
    for name, buffer in (dict(policy.named_buffers()) | buffers).items():
        policy.get_buffer(name).data = reference.get_buffer(name).data = buffer.to(device)
    sync_reference(reference, policy)
    for model in (policy, reference):
        utils.pack(args, model)
    return policy.train(), reference.eval().requires_grad_(False)


def training_state(policy, reference, optimizer) -> dict:
    weights, moments = dcp_state.get_state_dict(policy, optimizer)
    return {"policy": weights, "optimizer": moments, "reference": dcp_state.get_model_state_dict(reference)}


@blame("no checkpoint was written (disk full?)", BaseException)
def save_checkpoint(folder: Path, policy, reference, optimizer, state: dict, pool: list[tuple], keep: int) -> None:
    """Writes all that a run needs, named once it is whole; then only the newest `keep` stay."""
    unfinished, started = folder.with_name(f"unfinished-{folder.name}"), time.perf_counter()
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    dcp.save(training_state(policy, reference, optimizer), checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        rows = [{"group": [example._asdict() for example in group]} for group in pool]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), unfinished / "pool.parquet")
        sizes = {path.name: path.stat().st_size for path in unfinished.iterdir()}
        (unfinished / "state.json").write_text(json.dumps(state | {"sizes": sizes}))
        unfinished.rename(folder)
        whole = find_checkpoints(folder.parent)
        if len(whole) == 1:
            print(f"\ncheckpoint: {sum(sizes.values()) / 2**30:.3f} GiB, {time.perf_counter() - started:.1f} s")
        for old in whole[whole.index(folder) + keep :] if keep else ():
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def find_checkpoints(folder: Path) -> list[Path]:
    """The newest first."""
    found = {int(path.name[5:]): path for path in folder.glob("step-*") if path.name[5:].isdigit()}
    return [found[step] for step in sorted(found, reverse=True)]


def open_folder(args, hashes: dict) -> tuple:
    """The run's folder, locked, and its newest whole checkpoint and state, if any."""
    folder = [Path(args.resume or args.output_dir or f"runs/{Path(__file__).stem}__{args.seed}__{int(time.time())}")]
    lock = FileLock(folder[0] / ".lock", timeout=0)
    with blame(f"--output-dir {folder[0]} (does another process use it?)"):
        if dist.get_rank() == 0:
            (folder[0] / "checkpoints").mkdir(parents=True, exist_ok=True)
            lock.acquire()
        dist.broadcast_object_list(folder)
    folder = folder[0]
    for checkpoint in (found := find_checkpoints(folder / "checkpoints")):
        try:
            state = json.loads((checkpoint / "state.json").read_text())
            if cut := [name for name, size in state["sizes"].items() if (checkpoint / name).stat().st_size != size]:
                raise ValueError(f"{', '.join(cut)} cut")
        except Exception as error:
            if dist.get_rank() == 0:
                print(f"skipped {checkpoint} (damaged: {error})")
            continue
        if changed := [name for name in hashes if state["hashes"].get(name, hashes[name]) != hashes[name]]:
            fail(f"--resume {folder}: {changed[0]}, or its tokens, changed; bring it back")
        return folder, lock, checkpoint, state
    if found:
        fail(f"--resume {folder}: no checkpoint is whole; remove them")
    return folder, lock, None, {}


@blame("--resume: the checkpoint is another model's, or damaged (remove it)", BaseException)
def load_checkpoint(folder: Path, policy, reference, optimizer) -> None:
    """Restores it on any number of ranks."""
    saved = training_state(policy, reference, optimizer)
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert sum(name.startswith("policy.") for name in names) == len(saved["policy"]), "other weights"
    dcp.load(saved, checkpoint_id=folder)
    dcp_state.set_state_dict(policy, optimizer, model_state_dict=saved["policy"], optim_state_dict=saved["optimizer"])
    dcp_state.set_model_state_dict(reference, saved["reference"])


@blame("final/ was not written (disk full?)")
def export(folder: Path, policy, tokens: utils.Tokens, dtype: torch.dtype) -> None:
    """Writes a Hugging Face folder."""
    full = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(policy.to(dtype), options=full)
    if dist.get_rank() == 0:
        ends = {"eos_token_id": sorted(tokens.eos_ids), "pad_token_id": tokens.tokenizer.pad_token_id}
        policy.generation_config = GenerationConfig(bos_token_id=tokens.tokenizer.bos_token_id, **ends)
        policy.save_pretrained(f"{folder}/", state_dict=weights)  # a folder, or an error
        tokens.tokenizer.save_pretrained(folder)


# --- end shared: models
@blame("evaluation", ValueError)
def evaluate(args: Args, policy, sampler, held_out: list[tuple], initial: dict) -> tuple[dict, list]:
    """Means with standard errors, and samples. `initial` keeps what the first call finds, for comparison."""
    values = {}
    pairs = [group for group in held_out if group[0].completion_ids]  # none if there are only prompts
    if pairs:
        examples = [pair[side] for side in (0, 1) for pair in pairs]
        logps, mask = utils.completion_logps(policy, examples, sampler.tokens.pad_id)  # (B, T)
        loss, rewards = dpo_loss(logps - initial.setdefault("logps", logps), mask, args.beta)
        chosen, rejected = rewards.chunk(2)
        values["eval/loss"] = loss
        values["eval/accuracy"] = utils.win_rate(chosen, rejected)
        values["eval/margin"] = chosen - rejected
    statistics, samples = sampler.evaluate(policy, [group[0] for group in held_out], initial)
    return utils.means(values | statistics), samples


# --- shared: settings
def parse_args(flags: list[str] | None = None) -> Args:
    """Flags, over the settings of --resume's run, of the toy if no --model is named, or of the paper."""
    named, _ = tyro.cli(Args, args=flags, add_help=False, return_unknown_args=True)
    default, whose = Args(), "the paper's settings"
    if named.resume:
        whose = f"the settings of {named.resume}"
        with blame(f"--resume {named.resume}"):
            saved = json.loads((Path(named.resume) / "args.json").read_text())
            if saved.pop("script", "") != Path(__file__).stem:
                raise ValueError(f"it is not a run of {Path(__file__).name}")
            default = Args(**saved)
    elif not named.model:
        whose = "the embedded toy and its settings"
        default = Args(**TOY | (TOY_ONLINE if getattr(named, "online", False) else {}))
    args = tyro.cli(Args, args=flags, default=default, description=__doc__)
    if os.environ.get("RANK", "0") == "0":
        print(f"{whose};", *(sys.argv[1:] if flags is None else flags))
    return args


def check_flags(args, batch_size: int) -> None:
    """Fails with the flag's name."""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        text, holds = getattr(hint, "__metadata__", ("", lambda value: True))
        if not holds(value := getattr(args, name)):
            fail(f"--{name.replace('_', '-')} is {value}; it must be {text}")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world % (args.shard_size or 1) or batch_size % world:
        fail(f"{world} ranks must be a multiple of --shard-size, and a batch of {batch_size} of them")
    if args.clip == "sample" and (args.M < 1 or math.exp(args.log_epsilon_P - args.log_epsilon_R) == 0):
        fail("--clip sample needs finite bounds, and --M of at least 1")
    if getattr(args, "online", False) and not (args.reward_model and args.temperature and args.min_avg_logp < -1e9):
        fail("--online needs --reward-model and --temperature above 0, and no --min-avg-logp")
    folder = Path(args.output_dir)
    if args.output_dir and (args.resume or (folder / "args.json").exists() or any(folder.glob("checkpoints/*"))):
        fail(f"--output-dir {folder} holds a run, or --resume names one: --resume {folder}")


def catch_signals() -> dict:
    """SIGINT and SIGTERM end the run; the first while it trains after a step and a checkpoint."""
    run = {"training": False, "signal": 0, "since": -math.inf}

    def handler(number, _):
        if run["training"] and not run["signal"]:
            run["signal"], run["since"] = number, time.monotonic()
        elif time.monotonic() - run["since"] > 1:  # torchrun repeats it
            print(f"\nstopped by signal {number}", flush=True)
            os._exit(128 + number)

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    return run


# --- end shared: settings
@blame("reading or writing", OSError)
def main(args: Args) -> None:
    batch_size = groups_per_step = args.batch_size
    sizes, eval_sizes = (0,) if args.online else (2,), (0, 2)
    # --- shared: setup
    check_flags(args, batch_size)
    run = catch_signals()
    rank, world, device = setup()
    clip, sync = (args.clip, args.sync) if args.humanline else ("none", "none")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if device.type == "cuda" else "float64"
    compute_dtype, half = getattr(torch, args.dtype), args.dtype == "bfloat16"
    reference_dtype = torch.bfloat16 if half else torch.float32
    torch.set_float32_matmul_precision("high" if half else "highest")  # exact for bf16 factors
    config, final_dtype, tokens = load_config(args)
    held_out, hashes = [], {}
    groups = load_groups(args, "--dataset", args.dataset, args.dataset_split, tokens, sizes, hashes)
    if args.eval_dataset:
        held_out = load_groups(args, "--eval-dataset", args.eval_dataset, args.eval_split, tokens, eval_sizes, hashes)
    utils.show_tokens(tokens, groups[0][0])
    # --- end shared: setup
    # --- shared: build
    if len(groups) < groups_per_step:
        fail(f"--dataset {args.dataset}: {len(groups)} rows are left, and a batch takes {groups_per_step}")
    output_dir, lock, checkpoint, state = open_folder(args, hashes)
    with blame("sampling"):
        sampler = utils.Sampler(args, config, tokens, reference_dtype, device)
    policy, reference = load_models(args, config, compute_dtype, reference_dtype, device)
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    # --- end shared: build
    token_logps, evaluation = utils.token_logps, partial(evaluate, args, policy, sampler, held_out, {})
    samples_per_prompt = args.samples_per_prompt
    to_group = partial(best_and_worst, threshold=args.reward_threshold)

    if not args.online:
        with blame("--min-avg-logp", ValueError):
            groups = utils.data_quality(args, reference, groups, groups_per_step)
    # --- shared: prepare
    settings = {"lr": args.lr, "eps": args.adam_eps, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), **settings, fused=device.type == "cuda")
    if rank == 0:
        record = asdict(args) | {"script": Path(__file__).stem, "resume": "", "output_dir": ""}
        utils.write(output_dir / "args.json", json.dumps(record, indent=2))
    before, samples_before = evaluation()  # of θ_0, also on resume
    start, last_sync, last_round, round_number, pool, rollout = 0, 0, 0, 0, [], {}  # pool: groups to train on
    if checkpoint:
        load_checkpoint(checkpoint, policy, reference, optimizer)
        start, last_sync, last_round, round_number, rollout, *_ = state.values()  # as saved
        rows = pyarrow.parquet.read_table(checkpoint / "pool.parquet").to_pylist()
        pool = [tuple(utils.Example(**example) for example in row["group"]) for row in rows]
    for group in optimizer.param_groups:
        group.update(settings, initial_lr=args.lr)  # the flags win
    warmup = max(1, round(args.warmup_fraction * args.num_steps))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup), start - 1)
    log = utils.Log(output_dir, start) if rank == 0 else None
    bar = trange(start, args.num_steps, initial=start, total=args.num_steps, disable=rank != 0)
    for step in bar:
        started = time.perf_counter()
        # --- end shared: prepare
        # --- shared: round
        while args.online and len(pool) < groups_per_step:
            drawn = draw(groups, round_number, min(args.round_prompts, len(groups)), args.seed)
            prompts = [group[0] for group in drawn]
            round_number, last_round, run["training"] = round_number + 1, step, False
            with blame(f"round {round_number}", ValueError):
                samples = sampler.sample(policy, prompts, samples_per_prompt, (args.seed, round_number))
            made = []
            for candidates in samples:
                if group := to_group([x.to_train(args.max_length) for x in candidates]):
                    made.append(group)
            if not any(group[0].reward > group[-1].reward for group in made):
                fail(f"round {round_number}: no prompt's rewards differ; raise --temperature, lower --reward-threshold")
            rollout = sampler.metrics | {"rollout/round": round_number, "rollout/filtered": 1 - len(made) / len(drawn)}
            pool += made
            sync_reference(reference, policy)  # Algorithm 1: the policy at the start of the round
            last_sync = step
        batch = pool[:groups_per_step] if args.online else draw(groups, step, groups_per_step, args.seed)
        pool = pool[groups_per_step:]
        # --- end shared: round
        examples, batch_rows = [x for pair in batch for x in pair], [pair[0].row for pair in batch]
        lengths = [chosen.length + rejected.length for chosen, rejected in batch]
        # --- shared: microbatches
        run["training"] = True
        completion_tokens = sum(len(x.completion_ids) for x in examples)
        losses, sums = torch.zeros(batch_size, dtype=torch.float64, device=device), defaultdict(float)
        passes = utils.make_passes(lengths, world, args.micro_batch_size, args.micro_batch_tokens)[rank::world]
        for number, mine in enumerate(passes, 1):  # mine: positions in the batch
            # On CUDA every time: whole gradients might not fit.
            policy.set_requires_gradient_sync(device.type == "cuda" or number == len(passes))
            # --- end shared: microbatches
            part = [batch[i][side] for side in (0, 1) for i in mine]
            keys = [(args.seed, step, i, side) for side in (0, 1) for i in mine]
            # --- shared: forward
            input_ids, mask = utils.pad_batch(part, tokens.pad_id, device)  # (B, T)
            with torch.no_grad():
                ref_logps = token_logps(reference, input_ids, mask) if last_sync < step else None  # (B, T)
            logps = token_logps(policy, input_ids, mask)  # (B, T)
            log_ratio = clipped = logps - (logps.detach() if ref_logps is None else ref_logps)
            if clip == "clip":
                clipped = log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)  # humanline clipping (§5.1, Figure 4)
            elif clip == "sample":
                B_P = beta_draws(mask, [(*key, 0) for key in keys], args.kappa, math.exp(args.log_epsilon_P) / args.M)
                B_R = beta_draws(mask, [(*key, 1) for key in keys], args.kappa, math.exp(-args.log_epsilon_R) / args.M)
                clipped = humanline_sampling(log_ratio, B_P, B_R, args.M)
            # --- end shared: forward
            loss, rewards = dpo_loss(clipped, mask, args.beta)  # (B/2,), (B,)
            (loss.sum() / batch_size).backward()
            losses[mine] = loss.detach().double() / batch_size
            chosen, rejected = rewards.chunk(2)
            logps_summed = (logps.detach() * mask).sum(-1)
            sums["rewards/margins"] += (chosen - rejected).sum()
            sums["rewards/accuracies"] += utils.win_rate(chosen, rejected).sum()
            for side, rewards, logps in zip(("chosen", "rejected"), (chosen, rejected), logps_summed.chunk(2)):
                sums[f"rewards/{side}"] += rewards.sum()
                sums[f"logps/{side}"] += logps.sum()
            # --- shared: step
            sums["humanline/clipped_low"] += ((log_ratio < args.log_epsilon_P) * mask).sum()
            sums["humanline/clipped_high"] += ((log_ratio > args.log_epsilon_R) * mask).sum()
            sums["humanline/log_ratio_abs_mean"] += (log_ratio.detach().abs() * mask).sum()
        dist.all_reduce(losses)
        totals = torch.stack([value.double() for value in sums.values()])
        dist.all_reduce(totals)
        sums = dict(zip(sums, totals.tolist()))
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).full_tensor().item()
        loss = losses.sum().item()
        if not math.isfinite(loss + grad_norm):
            bad = {row for row, value in zip(batch_rows, losses.tolist()) if not math.isfinite(value)} or batch_rows
            bar.close()
            told = f"step {step}: loss {loss}, gradient norm {grad_norm}; the update was not made"
            fail(f"{told}: look at rows {sorted(set(bad))} of --dataset, or lower --lr or --max-grad-norm")
        metrics = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": scheduler.get_last_lr()[0]}
        metrics["humanline/steps_since_sync"] = step - last_sync
        if sync == "before_step" and step % args.k == 0:
            sync_reference(reference, policy)  # humanline syncing (§5.1, Figure 3): before the update
            last_sync = step
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if sync == "after_step" and (step + 1) % args.k == 0:
            sync_reference(reference, policy)  # trust-region syncing (Figure 10): after the update
            last_sync = step + 1
        maxima = torch.tensor([utils.peak_memory(device), run["signal"]], dtype=torch.float64, device=device)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        metrics["perf/peak_memory"], stopped_by = maxima.tolist()
        seconds, tokens_read = time.perf_counter() - started, sum(x.length for x in examples)
        metrics |= {key: total / completion_tokens for key, total in sums.items() if key.startswith("humanline/")}
        metrics |= {"perf/step_time": seconds, "perf/tokens_per_second": tokens_read / seconds}
        # --- end shared: step
        metrics |= {key: total / batch_size for key, total in sums.items() if key.startswith(("rewards/", "logps/"))}
        bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{metrics['rewards/accuracies']:.2f}", refresh=False)
        # --- shared: log
        metrics |= rollout | ({"rollout/age_steps": step - last_round} if rollout else {})
        if args.eval_every and (step + 1) % args.eval_every == 0:
            metrics |= {key: mean for key, (mean, _) in evaluation()[0].items()}
        if log:
            log.write(metrics)
        if stopped_by or args.checkpoint_every and (step + 1) % args.checkpoint_every == 0:
            state = dict(step=step + 1, last_sync=last_sync, last_round=last_round, round=round_number, rollout=rollout)
            folder, state = output_dir / "checkpoints" / f"step-{step + 1}", state | {"hashes": hashes}
            save_checkpoint(folder, policy, reference, optimizer, state, pool, args.keep_checkpoints)
        if stopped_by:
            if log:
                print(f"\nstopped after {step + 1} steps; to go on: --resume {output_dir}", flush=True)
            os._exit(128 + int(stopped_by))
    run["training"] = False
    after, samples_after = evaluation()
    export(output_dir / "final", policy, tokens, final_dtype)
    if log:
        utils.report(output_dir, before, after, samples_before, samples_after)
        log.writer.close()
    # --- end shared: log
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
