"""Keeps a run: flags, errors, signals, the folder and its lock, checkpoints, logs. No algorithm is here."""

import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, get_origin, get_type_hints

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import tyro
from filelock import FileLock
from torch.utils.tensorboard import SummaryWriter
from transformers import GenerationConfig

import utils

# === Flags ===
# Types of flags, with the least and the largest value, which `check_flags` reads.
Positive = Annotated[float, 1e-30, 1e30]
NonNegative = Annotated[float, 0, 1e30]
Share = Annotated[float, 0, 1]
PositiveShare = Annotated[float, 1e-30, 1]
Count = Annotated[int, 1, 1e16]
CountOr0 = Annotated[int, 0, 1e16]
AtLeast2 = Annotated[int, 2, 1e16]
Above0 = Annotated[float, 1e-30, math.inf]
Below0 = Annotated[float, -math.inf, -1e-30]


def parse_args(Args, file: str, doc: str, toy: dict, toy_online=None, flags=None):
    """Flags over the settings of --resume's run, of the toy where no --model is named, or of the paper.

    Args is a script's dataclass, file and doc are its `__file__` and `__doc__`; flags: sys.argv's by default.
    """
    if flags is None:
        flags = sys.argv[1:]
    with suppress(AttributeError):  # a terminal that lacks a letter shows its code
        sys.stdout.reconfigure(errors="backslashreplace")
    named, _ = tyro.cli(Args, args=flags, add_help=False, return_unknown_args=True)
    if named.resume:
        source = f"the settings of {named.resume}"
        default = load_args(Args, Path(named.resume), file)
    elif named.model:
        source = "the paper's settings"
        default = Args()
    else:
        source = "the embedded toy and its settings"
        default = Args(**toy)
        if toy_online and named.online:
            default = Args(**toy | toy_online)
    args = tyro.cli(Args, args=flags, default=default, description=doc)
    if os.environ.get("RANK", "0") == "0":
        print(f"{source};", *flags)
    return args


def check_flags(args, batch_size: int):
    """Ends the run with the name of a flag that is out of range, or does not fit another one.

    batch_size: what a step shares out over the ranks, sequences or pairs.
    """
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        if get_origin(hint) is Annotated:
            low, high = hint.__metadata__
            if not low <= value <= high:
                fail(f"--{name.replace('_', '-')} is {value}; it must be from {low} to {high}")
    if not args.dataset:
        fail(f"--model {args.model} needs a --dataset")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world % (args.shard_size or 1) or batch_size % world:
        fail(f"{world} ranks must be a multiple of --shard-size, and a batch of {batch_size} of them")
    if args.clip == "sample":
        for bound in (args.log_epsilon_P, -args.log_epsilon_R):
            mean = math.exp(bound) / args.M  # of the Beta draws
            if args.M < 1 or not 0 < args.kappa * mean < args.kappa:
                fail("--clip sample needs bounds that are finite and not 0, and --M of at least 1")
    if getattr(args, "online", False):
        if not args.reward_model or args.temperature == 0:
            fail("--online needs --reward-model and --temperature above 0")
    if args.output_dir:
        folder = Path(args.output_dir)
        parts = ("args.json", "metrics.jsonl", "summary.json", "final", "checkpoints")
        if args.resume or any((folder / part).exists() for part in parts):
            fail(f"--output-dir {folder} holds a run, or --resume names one: --resume {folder}")


# === Errors and signals ===
def fail(message: str):
    """Ends the run with one line on stderr and exit code 1. Every rank comes here; rank 0 prints."""
    if os.environ.get("RANK", "0") != "0":
        # Rank 0 must print first, and torchrun ends the others as soon as one has ended.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(30)
    try:
        print(f"error: {message}", file=sys.stderr, flush=True)
    except OSError:  # nobody reads it any more, and at its end Python would try again
        sys.stderr = None
        print(f"error: {message}", flush=True)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()  # or gloo's threads abort the process
    raise SystemExit(1)


@contextmanager
def exit_on_error(place: str, kind: type = Exception):
    """An exception inside ends the run with a line that names the place."""
    try:
        yield
    except kind as error:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        line = lines[0]
        if "Traceback" in str(error):  # of another rank, or of a remote file
            line = lines[-1]
        fail(f"{place}: {line}")


def max_over_ranks(value, device):
    maximum = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
    return maximum.item()


class Signals:
    """SIGINT and SIGTERM.

    The first one while `training` is noted, for `main` to end after the step and a checkpoint. Any other one
    ends the process at once.
    """

    def __init__(self):
        self.training = False
        self.received = 0  # number of the signal
        self.received_at = -math.inf  # seconds
        signal.signal(signal.SIGINT, self.handle)
        signal.signal(signal.SIGTERM, self.handle)

    def of_any_rank(self, device) -> int:
        """0, or a signal that some rank has received: all ranks must stop after the same step."""
        return int(max_over_ranks(self.received, device))

    def handle(self, number: int, frame):
        if self.training and not self.received:
            self.received = number
            self.received_at = time.monotonic()
        elif time.monotonic() - self.received_at > 1:  # torchrun sends it twice
            print(f"\nstopped by signal {number}", flush=True)
            os._exit(128 + number)


# === Folder and checkpoints ===
@dataclass
class Progress:
    """What a checkpoint holds beside weights and optimizer state."""

    step: int = 0  # optimizer steps made
    last_sync: int = 0  # the reference is the policy as it was when this step began
    last_round: int = 0  # the pool was sampled when this step began
    round: int = 0  # rounds of samples drawn
    rollout: dict = field(default_factory=dict)  # metrics of the last round
    pool: list = field(default_factory=list)  # its groups that wait for a step


def open_folder(args, file, device):
    """The run's folder, the same on all ranks, and rank 0's lock on it, which lasts as long as the object."""
    name = args.resume or args.output_dir
    if not name:
        started = max_over_ranks(time.time(), device)  # the clocks of the ranks may differ
        name = f"runs/{Path(file).stem}__{args.seed}__{int(1000 * started)}"
    folder = Path(name)
    lock = FileLock(folder / ".lock", timeout=0)
    if dist.get_rank() == 0:
        with exit_on_error(f"--output-dir {folder} (does another process use it?)"):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        if args.track:
            with exit_on_error("--track"):
                import wandb  # here, since only this flag needs it

                # Before a SummaryWriter is made, whose values W&B reads. A resume goes on in the same run.
                wandb.init(
                    project="humanline",
                    id=folder.name,
                    resume="allow",
                    config=vars(args),
                    sync_tensorboard=True,
                )
    return folder, lock


def save_args(args, folder, file):
    """Writes the settings with which a later --resume goes on."""
    saved = asdict(args) | {"script": Path(file).stem, "resume": "", "output_dir": ""}
    if dist.get_rank() == 0:
        write(folder / "args.json", json.dumps(saved, indent=2))


def load_args(Args, folder, file):
    """The settings that `save_args` wrote."""
    with exit_on_error(f"--resume {folder}"):
        saved = json.loads((folder / "args.json").read_text())
        if saved.pop("script", "") != Path(file).stem:
            raise ValueError(f"it is not a run of {Path(file).name}")
        defaults = vars(Args())
        for flag in defaults | saved:
            value = saved.get(flag)
            if type(value) is not type(defaults.get(flag)):
                raise ValueError(f"another version wrote {flag} {value!r}; go on with that version")
        return Args(**saved)


def find_checkpoints(folder):
    """The newest first."""
    paths = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(paths, key=lambda path: int(path.name[5:]), reverse=True)


def newest_checkpoint(folder: Path, hashes: dict):
    """The newest checkpoint that is whole, or None. Ends the run if its data, or other ranks', are others."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, hashes)
    if any(other != hashes for other in of_ranks):
        fail("the ranks read different data; give all machines the same files")
    for checkpoint in find_checkpoints(folder / "checkpoints"):
        try:
            state = json.loads((checkpoint / "state.json").read_text())
            old_hashes = state["hashes"]
            for name, size in state["sizes"].items():
                if (checkpoint / name).stat().st_size != size:
                    raise ValueError(f"{name} is cut")
        except Exception as error:
            if dist.get_rank() == 0:
                print(f"skipped {checkpoint} (damaged: {error})")
            continue
        for name, value in hashes.items():
            if old_hashes.get(name, value) != value:
                fail(f"--resume {folder}: {name}, or its tokens, changed; bring it back")
        return checkpoint
    if (folder / "metrics.jsonl").exists():
        fail(f"--resume {folder}: it has no whole checkpoint; begin anew in another folder")
    return None


def training_state(policy, reference, optimizer):
    weights, moments = dcp_state.get_state_dict(policy, optimizer)
    reference_weights = dcp_state.get_model_state_dict(reference)
    return {"policy": weights, "optimizer": moments, "reference": reference_weights}


@exit_on_error("no checkpoint was written", BaseException)
def save_checkpoint(folder, policy, reference, optimizer, progress, hashes, keep):
    """Writes all that a run needs to go on exactly, then removes all but the newest `keep` (0: none).

    hashes: of the data sets, which a later resume compares.
    """
    # The folder gets its name when it is whole, so that a run which is killed here leaves no half checkpoint.
    unfinished = folder.with_name(f"unfinished-{folder.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    dcp.save(training_state(policy, reference, optimizer), checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        sizes = {path.name: path.stat().st_size for path in unfinished.iterdir()}
        state = vars(progress) | {"hashes": hashes, "sizes": sizes}
        (unfinished / "state.json").write_text(json.dumps(state))
        unfinished.rename(folder)
        if keep:
            checkpoints = find_checkpoints(folder.parent)
            this = checkpoints.index(folder)  # damaged ones of later steps may stand before it
            for old in checkpoints[this + keep :]:
                shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


@exit_on_error("--resume: the checkpoint does not fit --model, or is damaged", BaseException)
def load_checkpoint(args, folder, policy, reference, optimizer):
    """Restores weights and optimizer in place, on any number of ranks."""
    saved = training_state(policy, reference, optimizer)
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = [name for name in names if name.startswith("policy.")]
    if len(weights) != len(saved["policy"]):
        raise ValueError("it has other weights")
    dcp.load(saved, checkpoint_id=folder)
    dcp_state.set_state_dict(
        policy,
        optimizer,
        model_state_dict=saved["policy"],
        optim_state_dict=saved["optimizer"],
    )
    dcp_state.set_model_state_dict(reference, saved["reference"])
    state = json.loads((folder / "state.json").read_text())
    del state["hashes"], state["sizes"]
    progress = Progress(**state)
    for i, group in enumerate(progress.pool):
        progress.pool[i] = tuple(utils.Example(*values) for values in group)
    if dist.get_rank() == 0:
        print(f"{progress.step} of {args.num_steps} steps are done: goes on from {folder}")
    return progress


@exit_on_error("final/ was not written")
def export(folder, policy, tokens, dtype):
    """Writes the policy as a Hugging Face folder, in `dtype`."""
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(policy.to(dtype), options=options)
    if dist.get_rank() == 0:
        tokenizer = tokens.tokenizer
        policy.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=sorted(tokens.eos_ids),
            pad_token_id=tokenizer.pad_token_id,
        )
        policy.save_pretrained(f"{folder}/", state_dict=weights)  # the slash: an error if it is a file
        tokenizer.save_pretrained(folder)


def stop(signal_number, steps, folder):
    """Ends a run that has received a signal and written a checkpoint."""
    if dist.get_rank() == 0:
        print(f"\nstopped after {steps} steps; to go on: --resume {folder}", flush=True)
    os._exit(128 + signal_number)


# === Logs ===
def perf_metrics(started, tokens, device):
    """Of a step that began at `started` and read `tokens` tokens; memory of the rank that needs most."""
    peak = max_over_ranks(peak_memory(device), device)
    seconds = time.perf_counter() - started
    return {
        "perf/peak_memory": peak,
        "perf/step_time": seconds,
        "perf/tokens_per_second": tokens / seconds,
    }


def mean_over_ranks(sums):
    """{name: Σ value·weight / Σ weight} of all ranks, from each rank's two sums; none where Σ weight is 0."""
    totals = torch.stack(list(sums.values()))  # (M, 2); every rank has the same names in one order
    dist.all_reduce(totals)
    means = {}
    for name, (total, weight) in zip(sums, totals.tolist()):
        if weight > 0:
            means[name] = total / weight
    return means


def write(path, text):
    """Replaces a file as a whole: a reader, or a run that is killed, never sees half of it."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


class Log:
    """metrics.jsonl, and the same in TensorBoard. What an earlier run wrote from `start` on is removed.

    `before`: the first evaluation, for TensorBoard's step 0.
    """

    def __init__(self, folder: Path, start: int, before: dict):
        path = folder / "metrics.jsonl"
        kept = ""
        if path.exists():
            for line in path.read_text(errors="replace").splitlines(keepends=True):
                with suppress(ValueError, TypeError, KeyError):  # a line that is cut, or damaged
                    if json.loads(line)["step"] < start:
                        kept += line
        write(path, kept)
        self.file = path.open("a", buffering=1)
        self.writer = SummaryWriter(folder, purge_step=start)
        self.steps = start  # that are made
        if start == 0:
            self.write_evaluation(before)

    def write(self, metrics: dict):
        self.file.write(json.dumps(metrics) + "\n")
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, metrics["step"])
        self.writer.flush()  # a killed run has all steps there
        self.steps = metrics["step"] + 1

    def write_evaluation(self, statistics: dict):
        for key, (mean, _) in statistics.items():
            self.writer.add_scalar(key, mean, self.steps)


def peak_memory(device) -> float:
    """GiB since the process began: CUDA allocations, or resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    units = 2**30 if sys.platform == "darwin" else 2**20  # bytes or KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units


def report(log, folder, before, after, samples_before, samples_after):
    """Prints what training changed; writes summary.json, and outputs.json for AlpacaEval."""
    # What is written is written before it is printed: a terminal may be gone.
    log.write_evaluation(after)
    log.writer.close()
    write(folder / "summary.json", json.dumps({"before": before, "after": after}, indent=2))
    outputs = []
    for sample in samples_after:
        outputs.append({"instruction": question(sample), "output": sample.text, "generator": folder.name})
    if outputs:
        write(folder / "outputs.json", json.dumps(outputs, indent=2, ensure_ascii=False))
    if after:
        print(f"\n{'mean ± standard error':24}{'before':>20}{'after':>20}")
    for key, (mean, error) in after.items():
        first_mean, first_error = before[key]
        print(f"{key:24}{first_mean:10.3f} ± {first_error:7.3f}{mean:10.3f} ± {error:7.3f}")
    for first, last in list(zip(samples_before, samples_after))[:4]:
        print(f"\nprompt: {question(last)}")
        for when, sample in (("before", first), ("after", last)):
            score = "" if math.isnan(sample.reward) else f"  [reward {sample.reward:.2f}]"
            print(f"{when}: {sample.text}{score}")
    print(f"\nwrote {folder}")


def question(sample: utils.Example) -> str:
    """The prompt, or its last message."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return sample.prompt[-1]["content"]
