"""Everything around the algorithm: errors, flags, ranks, models, the run's folder, checkpoints and logs.

The algorithms are in the scripts. Nothing here is part of the method.
"""

import hashlib
import json
import math
import os
import resource
import shlex
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import transformers
import tyro
from filelock import FileLock
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from utils import InputError, mean_and_error


def is_main() -> bool:
    """Returns whether this is rank 0, which alone logs and prints (other ranks print only errors)."""
    return os.environ.get("RANK", "0") == "0"


def print_main(text: str):
    """Prints on rank 0 only, above the progress bar if there is one."""
    if is_main():
        with tqdm.external_write_mode():  # clears the bar, and draws it again
            print(text, flush=True)  # a log file then shows how far the run is


# === Errors ===
# A mistake in the flags, files or rows that users make often is an InputError, which ends a run with one line
# and exit status 1. Every other exception keeps its traceback.


@contextmanager
def exit_on_input_error():
    """Ends the run with one line on stderr if an InputError is raised inside; with torchrun, one per rank.

    Notes that were added to the error, for example the file and the line, stand before its message.
    """
    try:
        yield
    except InputError as error:
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()  # otherwise gloo's threads abort the process when it exits
        raise SystemExit(": ".join(["error", *getattr(error, "__notes__", []), str(error)])) from None


@contextmanager
def library_errors(place: str):
    """Turns an exception that a library raises about a file of the user into an InputError.

    place: what the library was reading, for example "--model X". The message starts with it.
    """
    try:
        yield
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise InputError(f"{place}: {type(error).__name__}: {first_line}") from error


# === Flags ===


def parse_args(Args, file: str, doc: str, toy: dict, toy_online: dict, paper: dict, flags=None):
    """Parses the flags, whose defaults are those of --resume, with --model the paper's, else the toy's.

    Args:
        Args: the dataclass of the script.
        file, doc: `__file__` and `__doc__` of the script.
        toy, toy_online: the toy's settings, and further ones for --online.
        paper: {(online, humanline): what differs in this variant of the paper from the defaults of Args}.
        flags: a list of flags; None: those of the command line.
    """
    # The first pass only looks for the flags that choose the defaults of the second.
    given, _ = tyro.cli(Args, args=flags, add_help=False, return_unknown_args=True)
    online = getattr(given, "online", False)
    if given.resume:
        default = load_args(Args, given.resume, file)
    elif given.model:
        default = Args(**paper.get((online, given.humanline), {}))
    else:
        default = Args(**toy | (toy_online if online else {}))
    args = tyro.cli(Args, args=flags, default=default, description=doc)
    print_main(f"settings: {vars(args)}")
    return args


def save_args(args, folder: Path, file: str):
    """Writes args.json, from which --resume takes the settings of the run."""
    if is_main():
        write_file(folder / "args.json", json.dumps(vars(args) | {"script": Path(file).stem}, indent=2))


def load_args(Args, folder: str, file: str):
    """Reads the settings that `save_args` wrote."""
    saved = json.loads(Path(folder, "args.json").read_text())
    if saved.pop("script") != Path(file).stem:
        raise InputError(f"--resume {folder}: it is not a run of {Path(file).name}")
    return Args(**saved)


def check_flags(args, batch_size: int, score):
    """Raises InputError for the mistakes that would appear after minutes of loading, or never."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if not args.log_epsilon_P < 0 < args.log_epsilon_R:
        raise InputError("--log-epsilon-P must be negative and --log-epsilon-R positive")
    if not args.dataset:
        raise InputError(f"--model {args.model} needs a --dataset")
    if getattr(args, "online", False) and not (args.reward_model or score):
        raise InputError("--online needs a --reward-model")
    if batch_size % world or world % (args.shard_size or world):
        raise InputError(f"{world} ranks must divide the batch of {batch_size}, and --shard-size the ranks")
    if not args.resume and args.output_dir and Path(args.output_dir, "args.json").exists():
        raise InputError(f"--output-dir {args.output_dir} holds a run; to resume it, pass it as --resume")


# === Ranks and signals ===
# A run is one process or several ranks (torchrun), on one machine or on several.


def setup(args, batch_size: int, score=None):
    """Checks the flags, starts the process group and resolves --dtype auto in `args`.

    Args:
        batch_size: the number of sequences or pairs in a step.
        score: a function that replaces --reward-model.

    Returns:
        Rank, world size and device.
    """
    check_flags(args, batch_size, score)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        # Sequence lengths vary, which fragments GPU memory. This variable must be set before CUDA starts.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN would compile a plan for every new length
        backend = "cpu:gloo,cuda:nccl"  # gloo is for Python objects (`gather`)
    else:
        device = torch.device("cpu")
        backend = "gloo"
        if "OMP_NUM_THREADS" not in os.environ:
            # As torchrun does, because more threads sum in another order, and would give other results.
            torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # not started by torchrun: a process group of one rank needs no address
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    transformers.utils.logging.disable_progress_bar()
    if args.dtype == "auto":
        args.dtype = "bfloat16" if device.type == "cuda" else "float32"
    return dist.get_rank(), dist.get_world_size(), device


def gather(value) -> list:
    """Returns the values of all ranks, on every rank."""
    ranks_values = [None] * dist.get_world_size()
    dist.all_gather_object(ranks_values, value)
    return ranks_values


def broadcast(value):
    """Returns rank 0's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def share(items: list, part: int, parts: int) -> list:
    """Returns one of the parts of a list. Their sum is the list."""
    first, end = (len(items) * number // parts for number in (part, part + 1))
    return items[first:end]


class Signals:
    """Records SIGINT and SIGTERM, so that `end_step` can write a checkpoint after the current step.

    A second signal ends the process at once. torchrun kills its ranks 30 seconds after it received a signal.
    If steps take longer, start it with `--shutdown-timeout SECONDS`.
    """

    def __init__(self):
        self.received = 0  # the number of the last signal of this rank
        signal.signal(signal.SIGINT, self.record)
        signal.signal(signal.SIGTERM, self.record)

    def record(self, number: int, frame):
        self.received = number
        self.release()
        if is_main():  # not by print, which must not be called while another print is running
            os.write(2, b"\nstopping after this step, with a checkpoint (again: at once, without)\n")

    def release(self):
        """From here on, signals end the process at once again."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# === Models ===
# Other code relies on the order of a model's parameters (TransformersEngine.update), on their names
# (VllmEngine.update, `export`) and on a head that is one nn.Linear (`token_logps`). Adapters such as LoRA
# change all three, so training, sampling or export would fail.


def storage_dtype(args) -> torch.dtype:
    """Returns the storage dtype of all models but the policy: bf16 if --dtype is, else fp32.

    The policy is always stored in fp32, because in bf16 most updates would be lost by rounding.
    """
    return torch.bfloat16 if args.dtype == "bfloat16" else torch.float32


def load_pretrained(auto_class, name: str, dtype, trust_remote_code: bool):
    """Loads a model from safetensors files.

    transformers only warns about a weight that the files lack, and initializes it at random. Here this is an
    InputError.

    Args:
        auto_class: for example AutoModelForCausalLM.
        dtype: a dtype, or "auto": that of the files' first weight.
    """
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    config.dtype = None  # otherwise "auto" would be config.json's dtype, which may not be the files'
    model, info = auto_class.from_pretrained(
        name,
        config=config,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        use_safetensors=True,
    )
    for weight, _ in model.named_parameters():  # missing buffers are computed
        if weight in info["missing_keys"]:
            raise InputError(f"the files of {name} have no {weight}")
    if hasattr(model, "peft_config"):
        raise InputError(f"{name} is an adapter: merge it into its model (docs/elsewhere.md)")
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa would ignore the softcap (Gemma 2, as in the paper)
    return model


def check_positions(config, longest: int):
    """Raises InputError if a model has too few positions for sequences of `longest` tokens."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if longest > positions:
        raise InputError(
            f"{config.name_or_path}: {longest} tokens, but the model has {positions} positions: "
            "lower --max-new-tokens, --max-prompt-length or --max-length"
        )


# === Folder and checkpoints ===
# The run's folder, which one run at a time may use, and its checkpoints, from which a run resumes bit for
# bit. What a new algorithm carries from step to step belongs in `Progress`, or if it is tensors, in
# `training_state`.


@dataclass
class Progress:
    """The state of a run besides its weights and the optimizer's state."""

    data_hash: str  # from `hash_data`; a resumed run must train on the same data
    step: int = 0  # completed optimizer steps
    round: int = 0  # number of rounds sampled (grpo_math: stays 0)
    pool: list = field(default_factory=list)  # sampled groups that no step has used yet


def write_file(path: Path, text: str):
    """Writes a text file atomically: a killed run leaves the old file or the new one, and never a part."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def open_folder(args, file: str) -> Path:
    """Creates or opens the run's folder and locks it until this process ends."""
    default = f"runs/{Path(file).stem}__{args.seed}__{time.time_ns() // 10**6}"
    folder = Path(broadcast(args.resume or args.output_dir or default))  # by rank 0's clock
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        open_folder.lock = FileLock(folder / ".lock", timeout=0)  # without a name it would be released
        open_folder.lock.acquire()  # raises Timeout if another process uses the folder
        shutil.rmtree(folder / "checkpoints/unfinished", ignore_errors=True)  # left by a killed run
    dist.barrier()
    return folder


def hash_data(args, groups: list[tuple]) -> str:
    """Returns a hash of all token ids, by which a resumed run finds out whether its data has changed.

    Raises InputError if a rank (on another machine) has other data or other flags.
    """
    ids = [example.prompt_ids + example.completion_ids for group in groups for example in group]
    data_hash = hashlib.sha256(b"".join(ids)).hexdigest()  # the bytes of arrays
    own = (data_hash, vars(args))
    if gather(own) != [own] * dist.get_world_size():
        raise InputError("the ranks have different rows in --dataset, or different flags")
    return data_hash


def find_checkpoints(folder: Path) -> list[Path]:
    """Returns all checkpoints of a run, newest first."""
    return sorted(folder.glob("checkpoints/step-*"), reverse=True)


def end_step(args, folder: Path, policy, reference, optimizer, progress: Progress, signals: Signals):
    """Writes a checkpoint every --checkpoint-every steps, and after the last. Ends the run after a signal.

    The last one is for a finished run that is resumed with a larger --num-steps.
    """
    step = progress.step
    every = args.checkpoint_every
    signal_number = max(gather(signals.received))  # all ranks must stop after the same step
    if signal_number or (every > 0 and (step % every == 0 or step == args.num_steps)):
        save_checkpoint(args, folder, policy, reference, optimizer, progress)
    if signal_number:
        command = f"python {sys.argv[0]} --resume {shlex.quote(str(folder))}"
        print_main(f"\nstopped after {step} steps; to resume: {command}")
        # With the status that a shell expects. Not sys.exit, which would wait for grpo_math's grader.
        os._exit(128 + signal_number)


def training_state(policy, reference, optimizer, progress: Progress) -> dict:
    """Returns what a checkpoint holds: sharded tensors and plain objects, by name.

    If the optimizer has made no step, get_optimizer_state_dict first creates its moments. AdamW's settings
    are not saved, because they are flags.
    """
    return {
        "policy": policy.state_dict(),
        "reference": reference.state_dict(),
        "progress": vars(progress),
        "moments": dcp_state.get_optimizer_state_dict(policy, optimizer)["state"],
    }


def save_checkpoint(args, folder: Path, policy, reference, optimizer, progress: Progress):
    """Writes a checkpoint, then removes all but the newest --keep-checkpoints."""
    checkpoint = folder / "checkpoints" / f"step-{progress.step:06}"  # in the order of names
    # The folder gets its name only when it is complete, so a run that is killed here leaves no partial
    # checkpoint.
    unfinished = checkpoint.with_name("unfinished")
    dcp.save(training_state(policy, reference, optimizer, progress), checkpoint_id=unfinished)
    if is_main():
        unfinished.rename(checkpoint)
        if args.keep_checkpoints > 0:
            for old in find_checkpoints(folder)[args.keep_checkpoints :]:
                shutil.rmtree(old)
    dist.barrier()  # a rank that exits after a signal could make torchrun end rank 0 before the renaming
    if not all(gather(checkpoint.exists())):  # every machine has written its part to a disk of its own
        raise InputError(f"--output-dir {folder} is not on a disk that all machines see")


def load_checkpoint(args, folder: Path, policy, reference, optimizer, groups: list[tuple]) -> Progress:
    """Restores weights, optimizer and progress from the newest checkpoint, on any number of ranks.

    Raises InputError if the data has changed since, or if the ranks have different data.

    Returns:
        The progress of the run. For a new run, it is that of step 0.
    """
    data_hash = hash_data(args, groups)
    progress = Progress(data_hash)
    checkpoints = broadcast(find_checkpoints(folder))
    if not checkpoints:
        return progress
    state = training_state(policy, reference, optimizer, progress)
    moments = {"moments": state.pop("moments")}
    dcp.load(state, checkpoint_id=checkpoints[0])  # in place
    # Partial, because a weight that never had a gradient (a vision tower's) has no moments in the checkpoint.
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(moments, checkpoint_id=checkpoints[0], planner=planner)
    if progress.data_hash != data_hash:
        raise InputError("--resume: the rows of --dataset or their tokens have changed since the checkpoint")
    print_main(f"{progress.step} steps are done: resumes from {checkpoints[0]}")
    return progress


def export(folder: Path, policy, tokenizer, eos_ids: set[int]):
    """Writes the policy as a Hugging Face folder, in the dtype of --model's files.

    The policy is cast, and cannot be trained afterwards.
    """
    policy.to(policy.config.dtype)  # also because save_pretrained writes the model's dtype into config.json
    # Gathers the shards, on rank 0 alone.
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(policy, options=options)
    if is_main():
        for name in policy.all_tied_weights_keys:  # the files have a tied head only as the embedding
            weights.pop(name, None)
        # The model's own sampling settings are not those of this training, and transformers refuses to save
        # some of them (a temperature without do_sample).
        policy.generation_config = transformers.GenerationConfig(
            eos_token_id=sorted(eos_ids),
            pad_token_id=tokenizer.pad_token_id,
        )
        policy.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


# === Logs ===
# Metrics of a step, their files, and the report at the end. Every metric is a plain number in a dict, {name:
# number}; a new one in the script's `metrics` appears in metrics.jsonl and TensorBoard without any change
# here. `step`, `loss`, `grad_norm` and `perf/step_time` must be among them.


def perf_metrics(started: float, tokens: int) -> dict[str, float]:
    """Returns the time and throughput of a step that began at `started`, and the peak memory.

    The peak is the largest of all ranks, in GiB: allocated CUDA memory or, on the CPU, resident memory. It is
    counted from the start of the process. vLLM resets the peak of CUDA memory when it starts.
    """
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, Linux KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    seconds = time.perf_counter() - started
    return {
        "perf/peak_memory": max(gather(peak)),
        "perf/step_time": seconds,
        "perf/tokens_per_second": tokens / seconds,
    }


def print_plan(args, folder: Path, policy, tokenizer, groups: list[tuple]):
    """Prints the model, the run's folder, and the first prompt and completion as the policy reads them."""
    print_main(f"{args.model}: {policy.num_parameters():,} parameters, {args.dtype}; files: {folder}")
    first = groups[0][0]
    print_main(f"the first prompt:\n{tokenizer.decode(first.prompt_ids)}")
    print_main(f"its first completion:\n{tokenizer.decode(first.completion_ids)}")


class Log:
    """Writes metrics.jsonl, samples.jsonl and TensorBoard's files, and shows a run's progress, on rank 0.

    An evaluation is the script's Evaluation, of which this class reads the samples and the values, {name: a
    tensor with one number for each pair, example or sample}.
    """

    def __init__(self, args, folder: Path, start: int, before):
        """start: the number of completed steps. Lines of later steps, which are repeated, are removed.

        before: the evaluation before training, with which later evaluations are compared.
        """
        self.folder = folder
        self.before = before
        # In a log file, a line at most every ten seconds.
        self.bar = tqdm(total=args.num_steps, initial=start, mininterval=10, disable=not is_main())
        if is_main():
            self.writer = SummaryWriter(folder, purge_step=start)
            for name in ("metrics.jsonl", "samples.jsonl"):
                keep_steps_before(start, folder / name)
        if start == 0:
            self.write_tensorboard(self.write_evaluation(0, before), 0)

    def write_evaluation(self, step: int, evaluation) -> dict[str, float]:
        """Prints an evaluation after `step` updates and writes its samples. Returns its means.

        The caller writes the means, in a step together with the step's metrics.
        """
        # Both evaluations are of the same rows. The error of their mean change is usually smaller than the
        # errors of both means, because the rows differ more than the change of each.
        before, after = self.before.values, evaluation.values
        changes = {name: after[name] - before[name] for name in after}
        self.summary = {  # `report` writes the last evaluation's
            "before": mean_and_error(before),
            "after": mean_and_error(after),
            "change": mean_and_error(changes),
        }
        means = {}
        line = f"after {step} steps"
        for name, (change, error, _) in self.summary["change"].items():
            means[name] = self.summary["after"][name][0]
            line += f", {name} {means[name]:.3f} ({change:+.3f} ± {error:.3f})"
        print_main(line)
        for sample in evaluation.samples:
            line = {
                "step": step,
                "prompt": sample.question,
                "sample": sample.text,
                "reward": sample.reward,
                "finished": sample.finished,
                "tokens": len(sample.completion_ids),
            }
            append_line(self.folder / "samples.jsonl", line)
        return means

    def write(self, metrics):
        """Writes the metrics of a step."""
        append_line(self.folder / "metrics.jsonl", metrics)
        self.write_tensorboard(metrics, metrics["step"])
        self.bar.set_postfix(loss=metrics["loss"], grad_norm=metrics["grad_norm"], refresh=False)
        self.bar.update()

    def write_tensorboard(self, metrics, step: int):
        if is_main():
            for name, number in metrics.items():
                self.writer.add_scalar(name, number, step)
            self.writer.flush()  # so that a killed run loses no step

    def report(self, step: int, after):
        """Writes summary.json, and prints the first samples. after: the evaluation after training."""
        self.bar.close()
        self.write_tensorboard(self.write_evaluation(step, after), step)
        if is_main():
            write_file(self.folder / "summary.json", json.dumps(self.summary, indent=2))
        for first, last in zip(self.before.samples[:4], after.samples):
            print_main(f"\nprompt: {last.question}\nbefore: {first.text}\nafter: {last.text}")
        print_main(f"\nwrote {self.folder}")


def append_line(path: Path, line: dict):
    """Appends a line to a .jsonl file, on rank 0."""
    if is_main():
        with path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def keep_steps_before(start: int, path: Path):
    """Removes all lines from a .jsonl file but those of earlier steps."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        write_file(path, "".join(line for line in lines if json.loads(line)["step"] < start))
