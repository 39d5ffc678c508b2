"""Keeps a run: flags, errors, signals, the folder and its lock, checkpoints, logs. No algorithm is here."""

import atexit
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import tyro
from filelock import FileLock
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import GenerationConfig, get_scheduler

import utils


def is_main() -> bool:
    """Whether this is rank 0, which alone prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def say(*words):
    """Prints on rank 0."""
    if is_main():
        print(*words, flush=True)


# === Flags ===
def parse_args(Args, file: str, doc: str, toy, toy_online, flags=None):
    """Flags over the settings of --resume's run, of the toy where no --model is named, or of the paper.

    Args is a script's dataclass, file and doc are its `__file__` and `__doc__`; flags: sys.argv's by default.
    """
    if flags is None:
        flags = sys.argv[1:]
    named, _ = tyro.cli(Args, args=flags, add_help=False, return_unknown_args=True)
    if named.resume:
        source = f"the settings of {named.resume}"
        default = load_args(Args, Path(named.resume), file)
    elif named.model:
        source = "the paper's settings"
        default = Args()
    else:
        source = "the embedded toy and its settings"
        if getattr(named, "online", False):
            toy = toy | toy_online
        default = Args(**toy)
    args = tyro.cli(Args, args=flags, default=default, description=doc)
    say(f"{source};", *flags)
    return args


# Least values. Of flags that are not here it is 0. A group of one has no advantage.
COUNTS = """k batch_size prompts_per_step sample_every round_prompts samples_per_prompt max_length
    max_new_tokens eval_samples_per_problem generation_batch_size vllm_tensor_parallel"""
LEAST = dict.fromkeys(COUNTS.split(), 1)
LEAST |= dict(group_size=2, max_grad_norm=1e-9, temperature=1e-9, top_p=1e-9, log_epsilon_P=-math.inf)
MOST = dict(top_p=1, warmup_fraction=1, vllm_memory=1, log_epsilon_P=-1e-9)


def check_flags(args, batch_size: int):
    """Ends the run with the name of a flag that is out of range, or does not fit another one.

    batch_size: what a step shares out over the ranks, sequences or pairs.
    """
    for name, value in vars(args).items():
        if not isinstance(value, str) and not LEAST.get(name, 0) <= value <= MOST.get(name, math.inf):
            fail(f"--{name.replace('_', '-')} {value} is out of range")
    if args.engine == "vllm" and not find_spec("vllm"):
        fail("--engine vllm needs vllm, which is not installed")
    if not args.dataset:
        fail(f"--model {args.model} needs a --dataset")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world % (args.shard_size or 1) or world % args.vllm_tensor_parallel or batch_size % world:
        flags = "--shard-size and --vllm-tensor-parallel"
        fail(f"{flags} must divide {world} ranks, and these a batch of {batch_size}")
    if getattr(args, "online", False) and not args.reward_model:
        fail("--online needs a --reward-model")
    folder = args.output_dir
    if folder and (args.resume or Path(folder, "args.json").exists()):
        fail(f"--output-dir {folder} holds a run, or --resume names one: --resume alone goes on")


# === Errors and signals ===
def fail(message: str):
    """Ends the run with one line on stderr and exit code 1. Every rank comes here; rank 0 prints."""
    if not is_main():
        # Rank 0 must print first, and torchrun ends the others as soon as one has ended, by a signal that
        # `Signals` would only note.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(30)
    tqdm.write(f"error: {message}", file=sys.stderr)  # on a line of its own, not behind a bar
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()  # or gloo's threads abort the process
    raise SystemExit(1)


@contextmanager
def exit_on_error(place: str, kind=(Exception, dcp.CheckpointException)):
    """An exception inside ends the run with a line that names the place. DCP's own is no `Exception`."""
    try:
        yield
    except kind as error:
        lines = str(error).strip().split("\n")
        number = -1 if "Traceback" in str(error) else 0  # a CheckpointException has one inside
        fail(f"{place}: {type(error).__name__}: {lines[number]}")


def compare_ranks(name: str, value):
    """Ends the run if a value is another one on another rank, perhaps of another machine, than on rank 0."""
    of_ranks = utils.gather(value)
    for rank, other in enumerate(of_ranks):
        if other != of_ranks[0]:
            fail(f"{name} is {other} on rank {rank}, and {of_ranks[0]} on rank 0")


def compare_programs(args, file: str):
    """Ends the run if ranks have another script, whose folder may be another one, or other flags."""
    compare_ranks("the script's hash", hashlib.sha256(Path(file).read_bytes()).hexdigest())
    folder = str(Path(file).resolve().parent)
    for name, value in vars(args).items():
        compare_ranks(f"--{name.replace('_', '-')}", str(value).replace(folder, ""))


class Signals:
    """From here on SIGINT and SIGTERM are noted. They do not end the process: `stop` does, after a step.

    Where steps are long torchrun needs `--shutdown-timeout SECONDS`, or kills its ranks after 30.
    """

    def __init__(self):
        self.received = 0  # number of the signal
        signal.signal(signal.SIGINT, self.note)
        signal.signal(signal.SIGTERM, self.note)

    def note(self, number: int, frame):
        self.received = number

    def of_any_rank(self) -> int:
        """0, or a signal that some rank has received: all ranks must stop after the same step."""
        return max(utils.gather(self.received))


# === Folder and checkpoints ===
@dataclass
class Progress:
    """What a checkpoint holds beside weights and optimizer state."""

    data_hash: str  # a resume must read the same data
    step: int = 0  # optimizer steps made
    last_sync: int = 0  # the reference is the policy as it was when this step began
    last_round: int = 0  # the last round was sampled when this step began
    round: int = 0  # rounds of samples drawn
    pool: list = field(default_factory=list)  # sampled groups that wait for a step


def hash_data(groups: list[tuple]) -> str:
    """Of all groups, the same on all ranks, or the run ends."""
    content = hashlib.sha256()
    for group in groups:
        content.update(repr(group).encode())
    compare_ranks("the hash of --dataset's tokens", content.hexdigest())
    return content.hexdigest()


def open_folder(args, file: str) -> Path:
    """The run's folder, the same on all ranks, which no other process may write to until this one ends."""
    started = int(1000 * max(utils.gather(time.time())))  # the clocks of the ranks may differ
    name = args.resume or args.output_dir or f"runs/{Path(file).stem}__{args.seed}__{started}"
    folder = Path(name)
    mark = folder / f".started-{started}"
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0)
        with exit_on_error(f"{folder} (does another process use it?)"):
            lock.acquire()
        atexit.register(lock.release)
        shutil.rmtree(folder / "checkpoints/unfinished", ignore_errors=True)  # of a run that was killed
        mark.touch()
    dist.barrier()
    # A checkpoint has files of every rank. Without a disk that all machines see it would be in pieces.
    compare_ranks(f"--output-dir {folder}, which must be on a disk that all machines see,", mark.exists())
    if is_main():
        mark.unlink()
    return folder


def save_args(args, folder: Path, file: str):
    """Writes the settings with which a later --resume goes on."""
    saved = vars(args) | {"script": Path(file).stem, "resume": "", "output_dir": ""}
    if is_main():
        write(folder / "args.json", json.dumps(saved, indent=2))


def load_args(Args, folder: Path, file: str):
    """The settings that `save_args` wrote."""
    with exit_on_error(f"--resume {folder}"):
        saved = json.loads((folder / "args.json").read_text())
        if saved.pop("script") != Path(file).stem:
            raise ValueError(f"it is not a run of {Path(file).name}")
        return Args(**saved)  # a TypeError if another version, with other flags, wrote it


def find_checkpoints(folder: Path) -> list[Path]:
    """The newest first."""
    return sorted(folder.glob("step-*[0-9]"), key=lambda path: int(path.name[5:]), reverse=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole. Ends the run if there is none, but steps were made."""
    for checkpoint in find_checkpoints(folder / "checkpoints"):
        try:
            Progress(**json.loads((checkpoint / "state.json").read_text()))
            for part in dcp.FileSystemReader(checkpoint).read_metadata().storage_data.values():
                if (checkpoint / part.relative_path).stat().st_size < part.offset + part.length:
                    raise ValueError(f"{part.relative_path} is cut")
            return checkpoint
        except Exception as error:
            say(f"skipped {checkpoint} (damaged: {error})")
    if (folder / "metrics.jsonl").exists():
        fail(f"--resume {folder}: it has no whole checkpoint; begin anew in another folder")
    return None


def training_state(policy, reference, optimizer):
    return {
        "policy": policy.state_dict(),
        "optimizer": dcp_state.get_optimizer_state_dict(policy, optimizer),
        "reference": reference.state_dict(),
    }


def checkpoint_is_due(args, step: int) -> bool:
    """After so many steps, or all of them, so that a longer run can go on from there."""
    every = args.checkpoint_every
    return every > 0 and (step % every == 0 or step == args.num_steps)


@exit_on_error("no checkpoint was written (is the disk full?)")
def save_checkpoint(args, output_dir: Path, policy, reference, optimizer, progress: Progress):
    """Writes all that a run needs to go on exactly, then removes all but the newest --keep-checkpoints."""
    folder = output_dir / "checkpoints" / f"step-{progress.step}"
    # The folder gets its name when it is whole, so that a run which is killed here leaves no half checkpoint.
    unfinished = folder.with_name("unfinished")
    dcp.save(training_state(policy, reference, optimizer), checkpoint_id=unfinished)
    if is_main():
        (unfinished / "state.json").write_text(json.dumps(vars(progress)))
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        unfinished.rename(folder)
        if args.keep_checkpoints:
            checkpoints = find_checkpoints(folder.parent)
            this = checkpoints.index(folder)  # damaged ones of later steps may stand before it
            for old in checkpoints[this + args.keep_checkpoints :]:
                shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


@exit_on_error("--resume")
def load_checkpoint(folder: Path | None, policy, reference, optimizer, data_hash: str) -> Progress:
    """Restores weights and optimizer in place, on any number of ranks. Without a folder the run is a new one.

    data_hash: of what this run reads.
    """
    # A barrier too: no rank still looks for metrics.jsonl when rank 0 begins to write it.
    compare_ranks("the newest whole checkpoint", str(folder))
    if folder is None:
        return Progress(data_hash)
    progress = Progress(**json.loads((folder / "state.json").read_text()))
    if progress.data_hash != data_hash:
        raise ValueError("--dataset, or its tokens, changed; bring it back")
    state = training_state(policy, reference, optimizer)
    saved_names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    names = {f"policy.{name}" for name in state["policy"]}
    if names != {name for name in saved_names if name.startswith("policy.")}:
        raise ValueError("it has other weights than --model")
    # A weight that never had a gradient has no moments in the checkpoint: they stay 0.
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=folder, planner=planner)  # weights in place, moments as copies
    dcp_state.set_optimizer_state_dict(policy, optimizer, state["optimizer"])
    for i, group in enumerate(progress.pool):
        progress.pool[i] = tuple(utils.Example(*values) for values in group)
    say(f"{progress.step} steps are done: goes on from {folder}")
    return progress


@exit_on_error("final/ was not written")
def export(folder: Path, policy, tokenizer, eos_ids: set[int]):
    """Writes the policy as a Hugging Face folder, each tensor in the dtype in which it was read."""
    weights = {}
    for name, tensor in policy.state_dict().items():
        tensor = tensor.to(policy.dtypes[name])
        if hasattr(tensor, "full_tensor"):  # it is sharded
            tensor = tensor.full_tensor()
        if not tensor.isfinite().all():
            raise ValueError(f"{name} is not finite in {tensor.dtype}")
        if is_main():
            weights[name] = tensor.cpu()
    if is_main():
        policy.generation_config = GenerationConfig(
            eos_token_id=sorted(eos_ids),
            pad_token_id=tokenizer.pad_token_id,
        )
        policy.to(policy.config.dtype)  # which config.json is to name
        policy.save_pretrained(f"{folder}/", state_dict=weights)  # the slash: an error if it is a file
        tokenizer.save_pretrained(folder)


def stop(signal_number: int, steps: int, folder: Path):
    """Ends a run that has received a signal and written a checkpoint."""
    say(f"\nstopped after {steps} steps; to go on: --resume {folder}\n(torchrun's traceback is no fault)")
    # At once, since engines and graders may have threads that others wait for.
    os._exit(128 + signal_number)


def lr_schedule(args, optimizer):
    """A function of a step, from 1, to its share of --lr: linear warmup, then --lr-schedule, by transformers.

    linear and cosine reach 0 one step behind the last, which still moves the policy.
    """
    warmup_steps = max(1, round(args.warmup_fraction * args.num_steps))
    name = args.lr_schedule.replace("constant", "constant_with_warmup")
    return get_scheduler(name, optimizer, warmup_steps, args.num_steps + 1).lr_lambdas[0]


# === Logs ===
class Means:
    """Weighted means over the passes of a step, and over all ranks."""

    def __init__(self):
        self.sums = {}  # {name: (Σ value·weight, Σ weight)}

    def add(self, values, weights):
        """Values of a pass by name, and their weights, of one shape."""
        for name, value in values.items():
            total = (value.detach() * weights).sum()
            pair = torch.stack([total, weights.sum()]).double()
            self.sums[name] = self.sums.get(name, 0) + pair

    def over_ranks(self) -> dict[str, float]:
        """Every rank has added the same names, in the same order. What has no weight is left out."""
        totals = torch.stack(list(self.sums.values()))  # (names, 2)
        dist.all_reduce(totals)
        pairs = zip(self.sums, totals.tolist())
        return {name: total / weight for name, (total, weight) in pairs if weight > 0}


def perf_metrics(started: float, tokens: int) -> dict[str, float]:
    """Of a step that began at `started` and read `tokens` tokens, and the memory of the rank that needs most.

    It is in GiB since the process began: CUDA allocations, or resident memory.
    """
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        unit = 2**30 if sys.platform == "darwin" else 2**20  # of bytes or KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    seconds = time.perf_counter() - started
    return {
        "perf/peak_memory": max(utils.gather(peak)),
        "perf/step_time": seconds,
        "perf/tokens_per_second": tokens / seconds,
    }


def write(path: Path, text: str):
    """Replaces a file as a whole: a reader, or a run that is killed, never sees half of it."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def evaluation_means(evaluation) -> dict[str, float]:
    """Of a script's Evaluation, without the standard errors."""
    return {name: mean for name, (mean, _) in evaluation.statistics.items()}


class Log:
    """metrics.jsonl, and the same in TensorBoard, on rank 0. What was written from `start` on is removed.

    before: the evaluation before training, TensorBoard's step 0.
    """

    def __init__(self, folder: Path, start: int, before):
        self.folder = folder
        self.steps = start  # that are made
        if not is_main():
            return
        self.path = folder / "metrics.jsonl"  # there from the first step on
        self.writer = SummaryWriter(folder, purge_step=start)
        if start:
            lines = self.path.read_text().splitlines(keepends=True)  # one for each step
            write(self.path, "".join(lines[:start]))
        else:
            self.write_points(evaluation_means(before))

    def write(self, metrics):
        """metrics: {name: number} of a step, `step` among them."""
        if is_main():
            with self.path.open("a") as file:
                file.write(json.dumps(metrics) + "\n")
            self.write_points(metrics)
            self.steps += 1

    def write_points(self, values):
        """Into TensorBoard."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, self.steps)
        self.writer.flush()  # a killed run has all steps there


def report(log: Log, before, after):
    """Prints what training changed; writes summary.json, and outputs.json for AlpacaEval.

    before, after: a script's evaluations: statistics {name: (mean, standard error)}, and samples.
    """
    if not is_main():
        return
    folder = log.folder
    log.write_points(evaluation_means(after))
    summary = {"before": before.statistics, "after": after.statistics}
    write(folder / "summary.json", json.dumps(summary, indent=2))
    outputs = []
    for sample in after.samples:
        outputs.append({"instruction": question(sample), "output": sample.text, "generator": folder.name})
    if outputs:
        write(folder / "outputs.json", json.dumps(outputs, indent=2, ensure_ascii=False))
    print(f"\n{'mean ± standard error':24}{'before':>20}{'after':>20}")
    for key, (mean, error) in after.statistics.items():
        first_mean, first_error = before.statistics[key]
        print(f"{key:24}{first_mean:10.3f} ± {first_error:7.3f}{mean:10.3f} ± {error:7.3f}")
    for first, last in zip(before.samples[:4], after.samples):
        print(f"\nprompt: {question(last)}")
        print(f"before: {first.text}  [reward {first.reward:.2f}]")
        print(f"after: {last.text}  [reward {last.reward:.2f}]")
    print(f"\nwrote {folder}")


def question(sample: utils.Example) -> str:
    """The prompt, or its last message."""
    return utils.as_messages(sample.prompt)[-1]["content"]
