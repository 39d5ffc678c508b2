"""Everything around the algorithm: errors, flags, ranks, models, the run's folder, checkpoints and logs.

The algorithms are in the scripts. Nothing here is part of the method.
"""

import atexit
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
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

from utils import Example, InputError, mean_and_error


def is_main() -> bool:
    """Returns whether this is rank 0, the only rank that writes logs, and that prints anything but
    errors and notes of the grader."""
    return os.environ.get("RANK", "0") == "0"


def print_main(text: str):
    """Prints on rank 0 only, above the progress bar if there is one."""
    if is_main():
        with tqdm.external_write_mode():  # clears the bar, and draws it again
            print(text, flush=True)  # a log file then shows how far the run is


def hide_bar() -> bool:
    """Returns whether progress bars are hidden: in a log file, and on all ranks but 0."""
    return not (is_main() and sys.stderr.isatty())


# === Errors ===
# Bad input and a full disk end a run with one line and exit status 1. (A flag that tyro cannot read ends it
# with tyro's message, from every rank, and 2.) Every other exception keeps its traceback: memory has run out
# in a step, or there is a bug, maybe in an edited loss. (`load_checkpoint` reports any exception of reading
# as damage.) A new check should raise InputError. A new call of a library that may fail because of the user's
# input belongs inside `library_errors`.


@contextmanager
def exit_on_input_error():
    """Ends the run with one line on stderr if an InputError is raised inside, on one rank or on all.

    Notes that were added to the error, for example the file and the line, stand before its message.
    """
    # Lets a terminal without UTF-8 print "±", as "\xb1". It is done here because every script begins with
    # this block. A notebook's stdout has no such method.
    with suppress(AttributeError):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except InputError as error:
        if not is_main():
            # This rank waits, so that an error that all ranks share is printed once, by rank 0: torchrun
            # sends SIGTERM to all ranks as soon as one exits. SIGTERM must end this wait, although `Signals`
            # may have replaced its handler. After 30 seconds rank 0 has evidently no error, and this rank
            # prints its own.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(30)
        message = ": ".join([*getattr(error, "__notes__", []), str(error)])
        tqdm.write(f"error: {message}", file=sys.stderr)  # clears the progress bar first
        if dist.is_initialized() and dist.get_backend() == "gloo":
            # Otherwise gloo's threads abort the process when it exits. The group of a run on GPUs stays,
            # because NCCL's shutdown may wait for ranks that are still in a collective.
            dist.destroy_process_group()
        raise SystemExit(1) from None


@contextmanager
def library_errors(place: str):
    """Turns an exception that a library raises about the user's input or disk into an InputError.

    Only calls of a library belong inside, or code that fails because of the input alone. A bug in our own
    code must keep its traceback.

    place: what the library was reading or writing, for example "--model X". The message starts with it.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise InputError(f"{place}: {type(error).__name__}: {first_line}") from error


@contextmanager
def unwrap_checkpoint_exception():
    """Raises the exception that a rank has raised, in place of the CheckpointException around it.

    torch.distributed.checkpoint wraps the exceptions of all ranks in a CheckpointException. It is no subclass
    of Exception, so `except Exception` would miss it. To catch it there by its name would be wrong as well,
    because the exception inside it may be a rank's KeyboardInterrupt.
    """
    try:
        yield
    except dcp.CheckpointException as error:
        exception, _ = next(iter(error.failures.values()))  # {rank: (exception, traceback)}
        raise exception from None


# === Flags ===
# Parsing and checking the flags of a script. A new flag is a new field of the script's Args. If it is a
# number that must be positive, or at most 1, add its name below. If it may be negative, `check_flags` needs
# an exception for it.


def parse_args(
    Args,
    file: str,
    doc: str,
    toy: dict,
    toy_online: dict,
    paper: dict,
    flags: list[str] | None = None,
):
    """Parses the flags, and prints where the values of flags that were not given come from.

    With --resume they are the resumed run's, with --model the paper's, and otherwise the toy's.

    Args:
        Args: the dataclass of the script.
        file, doc: `__file__` and `__doc__` of the script.
        toy, toy_online: the toy's settings, and further ones for --online.
        paper: {(online, humanline): what differs in this variant of the paper from the defaults of Args}; {}
            for grpo_math, whose defaults are those of all variants.
        flags: the command line; None: sys.argv.
    """
    if flags is None:
        flags = sys.argv[1:]
    refuse_other_names(flags)
    # The first pass only looks for the flags that choose the defaults of the second.
    given, _ = tyro.cli(Args, args=flags, add_help=False, return_unknown_args=True)
    online = getattr(given, "online", False)
    if given.resume:
        source = f"the settings of {given.resume}"
        default = load_args(Args, Path(given.resume), file)
    elif given.model:
        settings = paper.get((online, given.humanline), {})
        source = f"the paper's settings ({settings or 'the defaults'})"
        default = Args(**settings)
    else:
        source = "the settings of the embedded toy (with --model: the paper's)"
        if online:
            toy = toy | toy_online
        default = Args(**toy)
    # --help shows this description.
    description = f"{doc}\nThe defaults below are {source}."
    args = tyro.cli(Args, args=flags, default=default, description=description)
    if given.resume:
        for name in FIXED_BY_RESUME:  # of which each script has some
            if getattr(args, name, None) != getattr(default, name, None):
                raise InputError(
                    f"--{name.replace('_', '-')} cannot be changed by --resume: "
                    "the rows of the next steps depend on it"
                )
    print_main(f"{source}; flags: {shlex.join(flags)}")
    return args


# Flags of other trainers, and those of these scripts. Most users come from another trainer, and tyro alone
# would only say that it does not know the flag.
OTHER_NAMES = {
    "--learning-rate": "--lr",
    "--max-steps": "--num-steps",
    "--num-train-epochs": "--num-steps (epochs x rows / rows per step)",
    "--num-epochs": "--num-steps (epochs x rows / rows per step)",
    "--epochs": "--num-steps (epochs x rows / rows per step)",
    "--per-device-train-batch-size": "--batch-size (grpo_math: --prompts-per-step), over all ranks,",
    "--gradient-accumulation-steps": "--micro-batch-tokens",
    "--model-name-or-path": "--model",
    "--dataset-name": "--dataset",
    "--num-generations": "--samples-per-prompt or --group-size",
    "--max-completion-length": "--max-new-tokens",
    "--bf16": "--dtype bfloat16",
    "--reward-funcs": "--reward-model, or SCORE in grpo_humanline.py,",
    "--loss-type": "replaced by an edit of the loss",
    "--report-to": "not needed (TensorBoard)",
    "--sync-ref-model": "--k",
    "--use-peft": "not supported (docs/elsewhere.md)",
}


def refuse_other_names(flags: list[str]):
    """Raises InputError for a flag that has another name here, and for the value of a switch."""
    for flag in flags:
        name, _, value = flag.replace("_", "-").partition("=")
        if name in OTHER_NAMES:
            raise InputError(f"{flag}: this flag is {OTHER_NAMES[name]} here")
        # --humanline=False, or --humanline False, whose "False" is a flag of its own here
        if (value or name) in ("True", "False", "true", "false"):
            raise InputError(f"{flag}: switches take no value; write, for example, --no-humanline")


# Flags that --resume must not change. Which rows a step uses, and which sampled groups wait for one
# (`Progress.pool`), depend on them. Flags that only change how later samples are drawn may change.
FIXED_BY_RESUME = {"batch_size", "group_size", "prompts_per_step", "round_prompts", "seed"}
# Ranges of all four scripts' numbers. Those in POSITIVE must be positive, and those in AT_MOST_1 at most 1.
# `check_flags` names three exceptions. Every other number must be at least 0.
POSITIVE = {
    "log_epsilon_R",
    "batch_size",
    "prompts_per_step",
    "sample_every",
    "max_grad_norm",
    "max_length",
    "round_prompts",
    "max_new_tokens",
    "temperature",
    "top_p",
    "generation_batch_size",
    "vllm_tensor_parallel",
    "eval_samples_per_problem",
}
AT_MOST_1 = {"top_p", "warmup_fraction", "vllm_memory"}


def check_flags(args, batch_size: int, score=None):
    """Raises InputError if a flag is out of range or contradicts another one.

    score: a function that replaces --reward-model.
    batch_size: the number of sequences or pairs in a step, which must be divisible by the number of ranks.
    """
    for name, value in vars(args).items():
        if not isinstance(value, int | float):
            continue
        if name == "log_epsilon_P":  # the lower bound; the upper one, log_epsilon_R, must be positive
            valid = value < 0
        elif name in ("group_size", "samples_per_prompt"):  # one sample has no advantage, and makes no pair
            valid = value >= 2
        elif name in POSITIVE:
            valid = value > 0
        else:
            valid = value >= 0
        if name in AT_MOST_1:
            valid = valid and value <= 1
        if not valid:  # also if it is nan
            raise InputError(f"--{name.replace('_', '-')} {value} is out of range")
    check_folder("--model", args.model)
    check_folder("--reward-model", getattr(args, "reward_model", ""))
    if args.engine == "vllm" and not find_spec("vllm"):
        raise InputError("--engine vllm needs vllm, which is not installed")
    if not args.dataset:
        raise InputError(f"--model {args.model} needs a --dataset")
    if getattr(args, "online", False) and not (args.reward_model or score):
        raise InputError("--online needs a --reward-model")
    world = int(os.environ.get("WORLD_SIZE", 1))
    for name in ("shard_size", "vllm_tensor_parallel"):
        size = getattr(args, name) or 1  # --shard-size 0, all ranks, always divides
        if world % size:
            raise InputError(
                f"--{name.replace('_', '-')} {size} does not divide the number of ranks, {world}"
            )
    if batch_size % world:
        raise InputError(f"the number of ranks, {world}, does not divide the batch of {batch_size}")
    folder = args.output_dir
    if folder and args.resume:
        raise InputError("--output-dir cannot be changed by --resume: a resumed run stays in its folder")
    parts = ("args.json", "metrics.jsonl", "checkpoints", "final", "summary.json")
    if folder and any(os.path.exists(f"{folder}/{part}") for part in parts):
        raise InputError(f"--output-dir {folder} holds a run: to resume it, pass only --resume {folder}")


def save_args(args, folder: Path, file: str):
    """Writes args.json, from which --resume takes the settings of the run."""
    # --resume FOLDER will name the folder again. A saved --output-dir would be refused beside it.
    saved = vars(args) | {"script": Path(file).stem, "resume": "", "output_dir": ""}
    if is_main():
        write_file(folder / "args.json", json.dumps(saved, indent=2))


def load_args(Args, folder: Path, file: str):
    """Reads the settings that `save_args` wrote."""
    if not (folder / "args.json").exists():  # for example --resume runs, or --resume runs/NAME/final
        raise InputError(f"--resume {folder}: no args.json; pass the folder of one run, as in runs/NAME")
    with library_errors(f"--resume {folder}"):
        saved = json.loads((folder / "args.json").read_text())
        if saved.pop("script") != Path(file).stem:
            raise InputError(f"--resume {folder}: it is not a run of {Path(file).name}")
        return Args(**saved)  # a TypeError if another version of the script has written other flags


# === Ranks and signals ===
# A run is one process or several ranks (torchrun), on one machine or on several. SIGINT and SIGTERM end a run
# after the current step.


def setup(args, batch_size: int, score=None):
    """Checks the flags and starts the process group. Returns rank, world size and device.

    Raises InputError if the ranks were started with different flags. Resolves --dtype auto in `args`.
    """
    check_flags(args, batch_size, score)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        # Sequence lengths vary, which fragments GPU memory. This variable must be set before CUDA starts.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        with library_errors(f"the GPU of local rank {device.index}"):
            torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN would compile a plan for every new length
        backend = "cpu:gloo,cuda:nccl"  # gloo is for Python objects (`gather`)
    else:
        device = torch.device("cpu")
        backend = "gloo"
        if "OMP_NUM_THREADS" not in os.environ:
            # One thread for each rank, as torchrun sets it, because more threads sum in another order, and
            # would give other results. To use more cores, set OMP_NUM_THREADS.
            torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # not started by torchrun: a process group of one rank needs no address
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    check_ranks_agree({f"--{name.replace('_', '-')}": value for name, value in vars(args).items()})
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


def check_ranks_agree(values: dict):
    """Raises InputError, on every rank, if one of the values, {name: value}, differs between ranks."""
    ranks_values = gather(values)
    for name, first_value in ranks_values[0].items():
        for rank, rank_values in enumerate(ranks_values):
            if rank_values[name] != first_value:
                raise InputError(f"{name} is {rank_values[name]} on rank {rank}, but {first_value} on rank 0")


class Signals:
    """Records SIGINT and SIGTERM, so that the training loop can finish its step and write a checkpoint.

    A step ends with `received_by_any_rank`, in which the ranks agree on a signal, and `exit_if_received`,
    which acts on it. After the last step, signals end the process at once again.

    torchrun kills its ranks 30 seconds after it received a signal. If steps take longer, start it with
    `--shutdown-timeout SECONDS`.
    """

    def __init__(self):
        self.received = 0  # the number of the last signal of this rank
        self.agreed = 0  # a signal of some rank, on which all ranks act
        signal.signal(signal.SIGINT, self.record)
        signal.signal(signal.SIGTERM, self.record)

    def record(self, number: int, frame):
        self.received = number
        if is_main():  # not by print, which must not be called while another print is running
            os.write(2, b"\nstopping after this step, with a checkpoint\n")

    def release(self):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.received:  # after the ranks' last agreement
            signal.raise_signal(self.received)

    def received_by_any_rank(self) -> bool:
        """Returns whether some rank has received a signal: all ranks must stop after the same step."""
        self.agreed = max(gather(self.received))
        return self.agreed > 0

    def exit_if_received(self, folder: Path, step: int):
        """Ends the process after a signal, with the exit status that a shell expects."""
        if not self.agreed:
            return
        launcher = "python"
        if dist.is_torchelastic_launched():
            launcher = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
            print_main("(ignore torchrun's traceback)")
        command = f"{launcher} {sys.argv[0]} --resume {shlex.quote(str(folder))}"
        print_main(f"\nstopped after {step} steps; to resume: {command}")
        # Not sys.exit, which would wait for the threads of grpo_math's grader.
        os._exit(128 + self.agreed)


# === Models ===
# Loading models, and checking that all weights are there and that the sequences of a run are not too long.
# Other code relies on the order of a model's parameters (TransformersEngine.update), on their names
# (VllmEngine.update, `export`) and on a head that is one nn.Linear (`token_logps`). Adapters such as LoRA
# change all three, so training, sampling or export would fail.


def storage_dtype(args) -> torch.dtype:
    """Returns the storage dtype of all models but the policy: bf16 if --dtype is, else fp32.

    The policy is always stored in fp32, because in bf16 most updates would be lost by rounding.
    """
    return torch.bfloat16 if args.dtype == "bfloat16" else torch.float32


def load_pretrained(auto_class, name: str, dtype, trust_remote_code: bool, flag: str = "--model"):
    """Loads a model from safetensors files.

    transformers only warns about a weight that the files lack, and initializes it at random. Here this is an
    InputError, and so is a weight of another shape.

    Args:
        auto_class: for example AutoModelForCausalLM.
        dtype: a dtype, or "auto": that of the files' first weight.
        flag: the flag that has named the model, for error messages.
    """
    with library_errors(f"{flag} {name}"):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        config.dtype = None  # otherwise "auto" would be config.json's dtype, which may not be the files'
        model, info = auto_class.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, because transformers' first line names no weight
        )
    for weight, _ in model.named_parameters():  # missing buffers are computed
        if weight in info["missing_keys"]:
            raise InputError(f"{flag} {name}: its files have no {weight}")
    # Surplus weights may be layers that config.json does not count, or a part that is not trained, such as
    # the prediction head of DeepSeek-V3.
    surplus = sorted(info["unexpected_keys"])
    if surplus:
        print_main(f"{flag} {name}: {len(surplus)} weights of its files are not used: {surplus[0]} ...")
    for weight, shape, expected in info["mismatched_keys"]:
        raise InputError(f"{flag} {name}: its files have {weight} as {[*shape]} instead of {[*expected]}")
    check_ranks_agree({f"the checksum of {flag}'s weights": checksum(model)})
    # For `export`. Usually all weights have the dtype of the files' first weight. But some models with
    # experts keep their routers in fp32.
    model.dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa does not support the softcap (Gemma 2)
    return model


def check_folder(flag: str, name: str):
    """Raises InputError if a model is a misspelt path, or the folder of an adapter.

    Without this check, transformers would look for "runs/misspelt" on the Hub, which takes a minute if there
    is no connection. A name of the Hub, such as "openai/gpt-oss", has one slash, and is no path unless there
    is a folder "openai".
    """
    folder = Path(name)
    is_path = name.count("/") > 1 or ("/" in name and folder.parent.exists())
    if is_path and not folder.exists():
        raise InputError(f"{flag} {name}: there is no such folder")
    if name and (folder / "adapter_config.json").exists():
        raise InputError(f"{flag} {name} is an adapter: merge it into its model (docs/elsewhere.md)")


def checksum(model) -> int:
    """Hashes the first 1000 numbers of every weight, so that ranks can compare what they loaded.

    Ranks with other files under the same path would train on a mixture of two models, without an error. A
    difference behind these numbers is not found, but no rank has to read its files completely.
    """
    return sum(torch.hash_tensor(weight.flatten()[:1000]).item() for weight in model.parameters())


def check_positions(config, longest: int):
    """Raises InputError if a model has too few positions for sequences of `longest` tokens.

    "dynamic" and "longrope" RoPE change the rotations of a whole micro-batch if one sequence is longer than
    the original positions. Log-probs would then depend on the other sequences.
    """
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or math.inf
    rope = getattr(text_config, "rope_parameters", None) or {}
    # {"rope_type": ...}, or one such dict for each type of layer: {"full_attention": {...}, ...}
    for entry in (rope, *rope.values()):
        if isinstance(entry, dict) and entry.get("rope_type") in ("dynamic", "longrope"):
            positions = min(positions, entry.get("original_max_position_embeddings") or positions)
    if longest > positions:
        raise InputError(
            f"{config.name_or_path}: {longest} tokens, but the model has {positions} positions: "
            "lower --max-new-tokens, --max-prompt-length or --max-length"
        )


# === Folder and checkpoints ===
# The run's folder, which one run at a time may use, and its checkpoints, from which a run resumes bit for
# bit. What a new algorithm carries from step to step belongs in `Progress` if it is numbers, texts or lists,
# because `Progress` is saved as JSON. Tensors belong in `training_state`.


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
    with library_errors(f"{path} could not be written"):
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


def open_folder(args, file: str) -> Path:
    """Creates or opens the run's folder and locks it until this process ends."""
    started = broadcast(int(1000 * time.time()))  # by rank 0's clock
    folder = Path(args.resume or args.output_dir or f"runs/{Path(file).stem}__{args.seed}__{started}")
    with library_errors(f"--output-dir {folder}"):
        folder.mkdir(parents=True, exist_ok=True)  # on every machine
    if is_main():
        lock = FileLock(folder / ".lock", timeout=0)
        with library_errors(f"{folder} (does another process use it?)"):
            lock.acquire()
        # filelock releases a lock to which nothing refers. atexit refers to it until the process ends.
        atexit.register(lock.release)
        shutil.rmtree(folder / "checkpoints/unfinished", ignore_errors=True)  # left by a killed run
    dist.barrier()  # no rank looks for checkpoints before rank 0 has opened the folder
    return folder


def find_checkpoints(folder: Path) -> list[Path]:
    """Returns all checkpoints of a run, newest first."""
    names = [path.name.removeprefix("step-") for path in folder.glob("checkpoints/step-*")]
    numbers = [int(name) for name in names if name.isdecimal()]  # no copies such as "step-2 copy"
    return [folder / f"checkpoints/step-{number}" for number in sorted(numbers, reverse=True)]


def training_state(policy, reference, optimizer):
    """Returns the sharded tensors of a checkpoint, by name.

    If the optimizer has made no step, get_optimizer_state_dict first creates its moments, as zeros.
    """
    return {
        "policy": policy.state_dict(),
        "optimizer": dcp_state.get_optimizer_state_dict(policy, optimizer),
        "reference": reference.state_dict(),
    }


def checkpoint_is_due(args, step: int) -> bool:
    """Returns whether a checkpoint is due after `step` steps: every --checkpoint-every, and after the last.

    The last one is for a finished run that is resumed with a larger --num-steps.
    """
    every = args.checkpoint_every
    return every > 0 and (step % every == 0 or step == args.num_steps)


def save_checkpoint(args, folder: Path, policy, reference, optimizer, progress: Progress):
    """Writes a checkpoint, then removes all but the newest --keep-checkpoints."""
    # `Sampler.rewards` calls this before it ends the run. Before the first step there is nothing to save.
    if progress.step == 0:
        return
    checkpoint = folder / "checkpoints" / f"step-{progress.step}"
    # The folder gets its name only when it is complete, so a run that is killed here leaves no partial
    # checkpoint.
    unfinished = checkpoint.with_name("unfinished")
    state = training_state(policy, reference, optimizer)
    free = shutil.disk_usage(folder).free  # where a disk is full, the library's own message does not say so
    with library_errors(f"{checkpoint} could not be written ({free / 1e6:,.0f} MB were free)"):
        with unwrap_checkpoint_exception():
            dcp.save(state, checkpoint_id=unfinished)
        if is_main():
            (unfinished / "progress.json").write_text(json.dumps(vars(progress)))
            # A checkpoint of the same step is damaged, or it is the one from which this run has resumed, if
            # there were no rewards for the next step.
            shutil.rmtree(checkpoint, ignore_errors=True)
            unfinished.rename(checkpoint)
    if is_main() and args.keep_checkpoints:
        # Checkpoints of later steps are damaged: `load_checkpoint` has skipped them. The newest ones are
        # counted from this one, because otherwise this complete one could be removed.
        checkpoints = find_checkpoints(folder)
        kept = checkpoints.index(checkpoint) + args.keep_checkpoints
        for old in checkpoints[kept:]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()  # a rank that exits after a signal could make torchrun end rank 0 before the renaming
    # Every rank has written its part to its own disk. If machines do not share the disk, none has a complete
    # checkpoint. `load_checkpoint` would not notice this if both had copies of the folder.
    if not all(gather(checkpoint.exists())):
        raise InputError(f"--output-dir {folder} is not on a disk that all machines see")


def hash_data(groups: list[tuple], held_out: list[tuple]) -> str:
    """Returns the hash of the training data, with which a resumed run finds out whether the data has changed.

    Raises InputError if another rank has read other data, for training or for evaluation.
    """
    hashes = []
    for rows in (groups, held_out):
        content = hashlib.sha256()
        for group in rows:
            content.update(repr(group).encode())
        hashes.append(content.hexdigest())
    names = ("the hash of --dataset's rows", "the hash of --eval-dataset's rows")
    check_ranks_agree(dict(zip(names, hashes)))
    return hashes[0]  # the held-out data may change: a resumed run evaluates the initial policy again


def load_checkpoint(folder: Path, policy, reference, optimizer, data_hash: str) -> Progress:
    """Restores weights and optimizer from the newest checkpoint that can be read, on any number of ranks.

    Returns:
        The progress of the run. For a new run, it is that of step 0.
    """
    checkpoints = find_checkpoints(folder)
    # All ranks must resume from the same checkpoint.
    check_ranks_agree({"the list of checkpoints": [checkpoint.name for checkpoint in checkpoints]})
    for checkpoint in checkpoints:
        try:
            progress = restore(checkpoint, policy, reference, optimizer)
        except InputError:
            raise
        except Exception as error:  # reading a damaged file can raise anything
            print_main(f"skipped {checkpoint} (damaged: {error!r:.200})")
            continue
        if progress.data_hash != data_hash:
            raise InputError(
                "--resume: --dataset, its tokens or the fields of utils.Example "
                "have changed since the checkpoint"
            )
        print_main(f"{progress.step} steps are done: resumes from {checkpoint}")
        return progress
    # A run that has made a step must not start at step 0 again. It has left checkpoints, all of them damaged,
    # or, before its first one, metrics.jsonl. A run that ended before its first step has left neither.
    if checkpoints or (folder / "metrics.jsonl").exists():
        raise InputError(f"--resume {folder}: it has no complete checkpoint; start over in another folder")
    return Progress(data_hash)


def restore(checkpoint: Path, policy, reference, optimizer) -> Progress:
    """Loads a checkpoint into both models and the optimizer."""
    progress = Progress(**json.loads((checkpoint / "progress.json").read_text()))
    for i, group in enumerate(progress.pool):  # JSON has turned all tuples into lists
        progress.pool[i] = tuple(Example(*fields) for fields in group)
    state = training_state(policy, reference, optimizer)
    # dcp.load would ignore weights that --model or the checkpoint lacks, so these are compared first.
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    shapes = {f"policy.{name}": weight.shape for name, weight in state["policy"].items()}
    if shapes != {name: entry.size for name, entry in saved.items() if name.startswith("policy.")}:
        raise InputError("--resume: the checkpoint's weights are not those of --model")
    # AdamW's settings are those of the flags, so dcp.load must not overwrite them.
    param_groups = state["optimizer"].pop("param_groups")
    # dcp.load fills tensors that exist, so `training_state` has created the optimizer's, or they are those of
    # a checkpoint whose reading has failed. They become 0, as at step 0. allow_partial_load lets a weight
    # keep these zeros if the checkpoint has none of its tensors, because it never had a gradient.
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    for moments in state["optimizer"]["state"].values():
        for moment in moments.values():
            moment.zero_()
    with unwrap_checkpoint_exception():
        dcp.load(state, checkpoint_id=checkpoint, planner=planner)  # fills the weights in place
    state["optimizer"]["param_groups"] = param_groups
    dcp_state.set_optimizer_state_dict(policy, optimizer, state["optimizer"])
    return progress


def export(folder: Path, policy, tokenizer, eos_ids: set[int]):
    """Writes the policy as a Hugging Face folder, with each tensor in the dtype of --model's files.

    Rank 0 casts the policy, which cannot be used afterwards.
    """
    weights = {}
    for name, tensor in policy.state_dict().items():
        if name in policy.all_tied_weights_keys:  # the files have a tied head only as the embedding
            continue
        tensor = tensor.to(policy.dtypes[name])  # from `load_pretrained`
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()  # all ranks gather the shards together
        if not tensor.isfinite().all():
            raise InputError(f"final/ was not written: {name} is not finite in {tensor.dtype}")
        if is_main():
            weights[name] = tensor.cpu()
    if is_main():
        # The model's own sampling settings are not those of this training, and transformers refuses to save
        # some of them (a temperature without do_sample).
        policy.generation_config = transformers.GenerationConfig(
            eos_token_id=sorted(eos_ids),
            pad_token_id=tokenizer.pad_token_id,
        )
        # save_pretrained writes the model's current dtype into config.json, which would be float32.
        policy.to(policy.config.dtype)
        with library_errors(f"{folder} could not be written"):
            # The slash raises an error if there is a file of this name. transformers alone would only log
            # one, and the trained model would be lost.
            policy.save_pretrained(f"{folder}/", state_dict=weights)
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


def print_plan(args, folder: Path, policy, tokenizer, groups: list[tuple], groups_per_step: int):
    """Prints what a run will do, and the first prompt as the policy reads it."""
    parameters = policy.num_parameters()
    print_main(f"model: {args.model}, {parameters:,} parameters, {args.dtype}; files: {folder}")
    humanline = "off"
    if args.humanline:
        humanline = f"k {args.k}, log-ratios clipped to [{args.log_epsilon_P}, {args.log_epsilon_R}]"
    print_main(f"humanline: {humanline}")
    rows = f"{len(groups):,} rows"
    if not getattr(args, "online", False):  # online, some groups of a round are not used
        rows += f", {args.num_steps * groups_per_step / len(groups):.1f} epochs"
    print_main(f"training: {args.num_steps} steps of {groups_per_step} rows; {rows}")
    first = groups[0][0]
    print_main(f"the first prompt ({len(first.prompt_ids)} tokens):\n{tokenizer.decode(first.prompt_ids)}")
    if first.completion_ids:
        completion = tokenizer.decode(first.completion_ids)
        print_main(f"the first completion ({len(first.completion_ids)} tokens):\n{completion}")


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
        # A run may be resumed with fewer steps than it has made. It then reports the steps that it has made.
        self.num_steps = max(args.num_steps, start)
        self.before = before
        self.bar = tqdm(total=self.num_steps, initial=start, disable=hide_bar())
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
        self.summary = {  # `report` reads the last evaluation's
            "before": mean_and_error(before),
            "after": mean_and_error(after),
            "change": mean_and_error(changes),
        }
        means = {name: mean for name, (mean, _, _) in self.summary["after"].items()}
        line = f"after {step} steps"
        for name, (change, error, _) in self.summary["change"].items():
            since_start = f" ({change:+.3f} ± {error:.3f})" if step else ""
            line += f", {name} {means[name]:.3f}{since_start}"
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
        append_line(self.folder / "metrics.jsonl", metrics)  # created by the first step
        self.write_tensorboard(metrics, metrics["step"])
        numbers = f"loss={metrics['loss']:.3g}, grad_norm={metrics['grad_norm']:.3g}"
        if "rewards/accuracy" in metrics:  # in mathematics
            numbers += f", rewards/accuracy={metrics['rewards/accuracy']:.3g}"
        self.bar.set_postfix_str(numbers, refresh=False)
        self.bar.update()
        done = metrics["step"] + 1
        is_due = done == 1 or done % math.ceil(self.num_steps / 10) == 0
        if self.bar.disable and is_due:  # in a log file
            seconds = metrics["perf/step_time"]
            print_main(f"step {done} of {self.num_steps}: {numbers}, {seconds:.2f} s")

    def write_tensorboard(self, metrics, step: int):
        if not is_main():
            return
        with library_errors(f"{self.folder} could not be written"):
            for name, number in metrics.items():
                self.writer.add_scalar(name, number, step)
            self.writer.flush()  # so that a killed run loses no step

    def report(self, after):
        """Prints what training has changed, and writes summary.json. after: the evaluation after training."""
        self.bar.close()
        self.write_tensorboard(self.write_evaluation(self.num_steps, after), self.num_steps)
        if not is_main():
            return
        write_file(self.folder / "summary.json", json.dumps(self.summary, indent=2))
        if after.values:
            print(f"\n{'mean ± standard error':24}{'before':>20}{'after':>20}{'change':>20}")
        tables = self.summary.values()
        for name, (_, _, count) in self.summary["after"].items():
            columns = [f"{table[name][0]:10.3f} ± {table[name][1]:7.3f}" for table in tables]
            print(f"{name:24}{''.join(columns)}   n = {count}")
        for first, last in zip(self.before.samples[:4], after.samples):
            print(f"\nprompt: {last.question}")
            for name, sample in (("before", first), ("after", last)):
                reward = "" if sample.reward is None else f"  [reward {sample.reward:.2f}]"
                unfinished = "" if sample.finished else "  [unfinished]"
                print(f"{name}: {sample.text}{reward}{unfinished}")
        print(f"\nwrote {self.folder}")


def append_line(path: Path, line: dict):
    """Appends a line to a .jsonl file, on rank 0."""
    if is_main():
        with library_errors(f"{path} could not be written"), path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def keep_steps_before(start: int, path: Path):
    """Removes all lines from a .jsonl file but those of earlier steps."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a full disk may have left a part of a line
            if json.loads(line)["step"] < start:
                kept.append(f"{line}\n")
    write_file(path, "".join(kept))
