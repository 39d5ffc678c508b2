"""Everything around the algorithm: errors, flags, ranks, signals, models, the run's folder and its logs.

The algorithms are in the scripts. Nothing here is part of the method.
"""

import _signal
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
import tyro
from filelock import FileLock
from torch.distributed.tensor import DTensor
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


@contextmanager
def file_errors():
    """Turns an OSError into an InputError, for example because a file or a model is not there."""
    try:
        yield
    except OSError as error:
        raise InputError(str(error).strip().partition("\n")[0]) from error


# === Flags ===

# Flags that a resume cannot change: those on which the rows of a step depend, the folder, and the optimizer's
# settings, which a checkpoint holds. Each script has some of them.
FIXED_BY_RESUME = {"batch_size", "group_size", "prompts_per_step", "round_prompts", "seed", "output_dir"}
FIXED_BY_RESUME |= {"weight_decay", "adam_eps"}
# The least value of flags of which a smaller one would be an error after minutes of loading, or learn nothing
LEAST = dict.fromkeys(("batch_size", "prompts_per_step", "round_prompts", "generation_batch_size"), 1)
LEAST |= {"sample_every": 1, "eval_samples_per_problem": 1, "group_size": 2, "samples_per_prompt": 2}
LEAST |= dict.fromkeys(("max_grad_norm", "temperature"), 1e-9)


def parse_args(Args, file: str, doc: str, toy: dict, toy_online: dict, paper: dict, flags=None):
    """Parses the flags. The others have the values of the run that is resumed, the paper's, or the toy's.

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
        doc += "\nThe defaults below are those of the toy. With --model NAME, --help shows those of a model."
    args = tyro.cli(Args, args=flags, default=default, description=doc)
    changed = {name for name, value in vars(args).items() if value != getattr(default, name)}
    if given.resume and changed & FIXED_BY_RESUME:
        raise InputError(f"--resume cannot change {', '.join(sorted(changed & FIXED_BY_RESUME))}")
    if others := sorted(vars(args).items() - vars(Args()).items()):
        words = ", ".join(f"{name} {value}" for name, value in others)
        print_main(f"settings that differ from the defaults: {words}")
    return args


def save_args(args, folder: Path, file: str):
    """Writes args.json, from which --resume takes the settings of the run, with the versions that made it."""
    if is_main():
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        saved = vars(args) | {"script": Path(file).stem, "versions": versions}
        write_file(folder / "args.json", json.dumps(saved, indent=2))


def load_args(Args, folder: str, file: str):
    """Reads the settings that `save_args` wrote."""
    path = Path(folder, "args.json")
    if not path.exists():
        raise InputError(f"--resume {folder}: no args.json; pass the folder of a run, for example runs/NAME")
    saved = json.loads(path.read_text())
    saved.pop("versions", None)
    if saved.pop("script") != Path(file).stem:
        raise InputError(f"--resume {folder}: it is not a run of {Path(file).name}")
    return Args(**saved)


def check_flags(args):
    """Raises InputError for the mistakes that would appear after minutes of loading, or never."""
    for name, value in vars(args).items():
        # Smaller numbers mean nothing, and some would be ignored: with --k -1 no sync would ever be due.
        least = LEAST.get(name, 0)
        if isinstance(value, int | float) and value < least and name != "log_epsilon_P":
            raise InputError(f"--{name.replace('_', '-')} {value}: it must be at least {least}")
    if not args.log_epsilon_P < 0 < args.log_epsilon_R:
        raise InputError("--log-epsilon-P must be negative and --log-epsilon-R positive")
    if not args.dataset:
        raise InputError(f"--model {args.model} needs a --dataset")
    world = int(os.environ.get("WORLD_SIZE", 1))
    # completions in a step; grpo_math counts prompts instead, and dpo and kto have no --group-size
    group_size = getattr(args, "group_size", 1)
    batch_size = getattr(args, "batch_size", 0) or args.prompts_per_step * group_size
    if batch_size % world or batch_size % group_size:
        raise InputError(f"the batch of {batch_size} must be a multiple of --group-size and of {world} ranks")
    if args.shard_size and world % args.shard_size:
        raise InputError(f"--shard-size {args.shard_size}: {world} ranks are no multiple of it")
    if args.eval_every and not args.eval_dataset:
        raise InputError("--eval-every needs an --eval-dataset")
    if args.track and not find_spec("wandb"):
        raise InputError("--track needs the package wandb, which is not installed")
    if args.engine == "vllm" and not find_spec("vllm"):
        raise InputError("--engine vllm needs the package vllm, which is not installed")
    if not args.resume and args.output_dir and Path(args.output_dir, "args.json").exists():
        raise InputError(f"--output-dir {args.output_dir} holds a run: pass another, or --resume this one")


def will_sample(args) -> bool:
    """Returns whether a run samples, in training or in evaluations."""
    # grpo_math always samples, and has no flag --online.
    return getattr(args, "online", True) or bool(args.eval_dataset and args.eval_samples)


def longest_sequence(args) -> int:
    """Returns the number of tokens that no training sequence and no sample of a run will exceed."""
    sampled = args.max_prompt_length + args.max_new_tokens if will_sample(args) else 0
    return max(args.max_length, sampled)


# === Ranks and signals ===
# A run is one process or several ranks (torchrun), on one machine or on several.


def setup(args):
    """Checks the flags, starts the process group and resolves --dtype auto in `args`.

    Returns:
        Rank, world size and device.
    """
    check_flags(args)
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
    set_seed(args.seed)  # for weights that an edited script initializes
    transformers.utils.logging.disable_progress_bar()
    if args.dtype == "auto":
        args.dtype = "bfloat16" if device.type == "cuda" else "float32"
    return dist.get_rank(), dist.get_world_size(), device


def set_seed(*numbers: int):
    """Seeds the random numbers of Python, NumPy and torch from several numbers, such as a seed and a step."""
    transformers.set_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


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
    return items[len(items) * part // parts : len(items) * (part + 1) // parts]


# Terminals, torchrun and Slurm send these signals to all processes of a run.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Records SIGINT, SIGTERM and SIGHUP, so that a run can save a checkpoint and end (checkpoint.py).

    Further signals within two seconds of the first one count as the same: a terminal or a scheduler sends one
    to every process, and torchrun sends another to its ranks. A later one ends the process at once.

    torchrun kills its ranks 30 seconds after it received a signal. If steps take longer, start it with
    `--shutdown-timeout SECONDS`.
    """

    def __init__(self):
        self.received = 0  # the number of the signal that this rank has received
        self.deadline = math.inf  # from this time on, in seconds, a signal ends the process at once
        self.handle(self.record)
        # A reward function may start processes, which a signal must end as usual. A signal that reaches a
        # process before `release` waits. The functions of `_signal` are written in C. In one in Python,
        # another handler, such as a time limit's, may raise an exception, and the signals would stay blocked.
        os.register_at_fork(
            before=partial(_signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS),
            after_in_parent=partial(_signal.pthread_sigmask, signal.SIG_UNBLOCK, SIGNALS),
            after_in_child=self.release,
        )

    def release(self):
        """Lets signals end this process, which a reward function has forked."""
        self.handle(signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def handle(self, handler):
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started by nohup
            signal.signal(number, handler)

    def record(self, number: int, frame):
        if time.monotonic() > self.deadline:
            os._exit(128 + number)  # the status that a shell expects
        if not self.received:
            self.received = number
            self.deadline = time.monotonic() + 2
            if number == signal.SIGHUP:  # the terminal is gone, so writing to it would raise an exception
                for output in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            if is_main():  # not by print, which must not be called while another print is running
                os.write(2, b"\nstopping after this step or evaluation, with a checkpoint (again: at once)\n")


# === Models ===
# Other code relies on the order of a model's parameters (`sync_reference`), on their names (the engines,
# `export`) and on a head that is one nn.Linear (`token_logps`). Adapters such as LoRA
# change all three, so training, sampling or export would fail.


def storage_dtype(args) -> torch.dtype:
    """Returns the storage dtype of all models but the policy: bf16 if --dtype is, else fp32.

    The policy is always stored in fp32, because in bf16 most updates would be lost by rounding.
    """
    return torch.bfloat16 if args.dtype == "bfloat16" else torch.float32


@file_errors()
def load_pretrained(args, auto_class, name: str, dtype):
    """Loads a model from safetensors files.

    transformers only warns about a weight that the files lack, and initializes it at random. Here this is an
    InputError, and so are too few positions for the sequences of the run.

    Args:
        auto_class: for example AutoModelForCausalLM.
        dtype: a dtype, or "auto": that of the files' first weight.
    """
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    check_positions(args, config)
    if getattr(config, "quantization_config", None):  # copies in fp32 would lose the scales
        raise InputError(f"{name} is quantized: pass its weights in bf16 or fp32")
    config.dtype = None  # otherwise "auto" would be config.json's dtype, which may not be the files'
    model, info = auto_class.from_pretrained(
        name,
        config=config,
        dtype=dtype,
        trust_remote_code=args.trust_remote_code,
        output_loading_info=True,
        use_safetensors=True,
    )
    missing = info["missing_keys"] & dict(model.named_parameters()).keys()  # missing buffers are computed
    if missing or hasattr(model, "peft_config"):
        raise InputError(f"{name} is an adapter (merge it into its model), or lacks weights: {missing}")
    own, lost = type(model).__name__, sorted(info["unexpected_keys"])
    # From the files of a model that also reads images (Qwen3.5), transformers loads the text model without a
    # word. It is said once, for the policy, which alone is loaded in the dtype of the files.
    if dtype == "auto" and (lost or own not in (config.architectures or [own])):
        print_main(
            f"only a {own} is trained and written, of the {config.architectures} in {name}: not {lost}"
        )
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa would ignore the softcap (Gemma 2, as in the paper)
    model.file_dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}  # for `export`
    return model


def full_weights(model):
    """Yields (name, full tensor) of the weights and buffers that a model's files hold, one at a time.

    All ranks must consume it to its end together, because each weight is gathered from their shards.
    """
    for name, weight in model.state_dict().items():
        if name not in model.all_tied_weights_keys:  # the files have a tied head only as the embedding
            yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight


def decoder_blocks(model) -> list:
    """Returns the decoder layers, whose classes transformers lists in `_no_split_modules`."""
    names = model._no_split_modules or ()
    # `fully_shard` puts "FSDP" before the class names.
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def check_positions(args, config):
    """Raises InputError if a model has too few positions for the sequences of the run."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if longest_sequence(args) > positions:
        raise InputError(
            f"{config.name_or_path}: {longest_sequence(args)} tokens, but only {positions} positions: "
            "lower --max-length, --max-prompt-length or --max-new-tokens"
        )


# === Folder ===
# The run's folder, which one run at a time may use, and what is written into it besides checkpoints and logs.


def write_file(path: Path, text: str):
    """Writes a text file atomically: a killed run leaves the old file or the new one, and never a part."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


@file_errors()
def open_folder(args, file: str) -> Path:
    """Creates or opens the run's folder and locks it until this process ends."""
    default = f"runs/{Path(file).stem}__{args.seed}__{time.time_ns() // 10**6}"
    folder = Path(broadcast(args.resume or args.output_dir or default))  # by rank 0's clock
    if is_main():
        folder.mkdir(parents=True, exist_ok=True)
        open_folder.lock = FileLock(folder / ".lock", timeout=0)  # held by the name, until the process ends
        open_folder.lock.acquire()  # raises Timeout if another process uses the folder
        shutil.rmtree(folder / "checkpoints/unfinished", ignore_errors=True)  # left by a killed run
    dist.barrier()
    if not folder.exists():  # each machine would write its part of a checkpoint to a disk of its own
        raise InputError(f"--output-dir {folder} is not on a disk that all machines see")
    return folder


def export(folder: Path, policy, tokenizer, eos_ids: set[int]):
    """Writes the policy as a Hugging Face folder, each tensor in the dtype in which it was loaded.

    The policy is cast, and cannot be trained afterwards.
    """
    weights = {}
    for name, weight in full_weights(policy):
        if is_main():
            weights[name] = weight.to("cpu", policy.file_dtypes[name])
    policy.to(policy.config.dtype)  # only because save_pretrained writes the model's dtype into config.json
    if is_main():
        # The model's own sampling settings are not those of this training, and transformers refuses to save
        # some of them (a temperature without do_sample).
        policy.generation_config = transformers.GenerationConfig(
            eos_token_id=sorted(eos_ids),
            pad_token_id=tokenizer.pad_token_id,
        )
        # FSDP2 has put a class of its own before the model's. With --trust-remote-code, save_pretrained would
        # write this class into config.json, and copy torch's code instead of the model's.
        policy.__class__ = type(policy).__bases__[1]
        policy.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


# === Logs ===
# Metrics of a step, their files, and the report at the end. Every metric is a plain number in a dict, {name:
# number}; a new one in the script's `metrics` appears in metrics.jsonl and TensorBoard without any change
# here.


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
    """Prints the model, the number of syncs, the data, and the first example as the policy reads it."""
    first = groups[0][0]
    epochs = args.num_steps * groups_per_step / len(groups)  # online more, because some prompts give no group
    # Not counted: the sync at step 0, when both models are equal, and one in the last step.
    syncs = len(range(args.k, args.num_steps - 1, args.k)) if args.k else 0
    method = "no humanline"
    if args.humanline:
        method = f"humanline: k {args.k}, {syncs} syncs change the reference"
        # grpo_math has no such flag. Its rounds sync with k = 0 alone.
        if getattr(args, "online", args.k == 0):
            method += ", besides one at the start of each round"
    print_main(
        f"model: {args.model}, {policy.num_parameters():,} parameters, {args.dtype}\n"
        f"{method}\n"
        f"data: {len(groups):,} rows; {args.num_steps} steps of {groups_per_step}: {epochs:.1f} epochs\n"
        f"files: {folder}\n"
        f"the first prompt:\n{tokenizer.decode(first.prompt_ids)}"
    )
    if first.completion_ids:
        print_main(f"its first completion:\n{tokenizer.decode(first.completion_ids)}")


class Log:
    """Writes a run's files and shows its progress, on rank 0.

    The files: args.json, metrics.jsonl, samples.jsonl, summary.json and TensorBoard's.
    """

    def __init__(self, args, file: str, folder: Path, start: int, before, evaluation_time, names: list[str]):
        """Opens the files.

        Args:
            file: `__file__` of the script.
            start: the number of completed steps. Lines of later steps, which are repeated, are removed.
            before: the evaluation before training.
            evaluation_time: the seconds that this evaluation took.
            names: the metrics that stand beside the progress bar.
        """
        save_args(args, folder, file)
        self.folder = folder
        self.before = before
        self.names = names
        self.shown = {}  # {name: the newest value}
        self.args = args
        self.evaluation_time = evaluation_time  # None when `print_estimate` has used it
        # In a log file, a line at most every ten seconds.
        interval = 0.1 if sys.stderr.isatty() else 10
        self.bar = tqdm(total=args.num_steps, initial=start, mininterval=interval, disable=not is_main())
        if is_main():
            if args.track:
                import wandb  # an extra package

                id_file = folder / "wandb_id"  # a resumed run continues its W&B run
                options = {"id": id_file.read_text() if id_file.exists() else None, "resume": "allow"}
                options |= {"config": vars(args), "sync_tensorboard": True}
                write_file(id_file, wandb.init(project="humanline", name=folder.name, **options).id)
            self.writer = SummaryWriter(folder, purge_step=start)
            (folder / "summary.json").unlink(missing_ok=True)  # of a finished run that is resumed
            for name in ("metrics.jsonl", "samples.jsonl"):
                keep_steps_before(start, folder / name)
        if start == 0:
            self.write_tensorboard(0, self.write_evaluation(0, before))

    def write(self, metrics):
        """Writes the metrics of a step."""
        append_line(self.folder / "metrics.jsonl", metrics)
        self.write_tensorboard(metrics["step"], metrics)
        if self.evaluation_time is not None and "perf/rollout_time" not in metrics:
            self.print_estimate(metrics["step"], metrics["perf/step_time"])
        self.shown |= {name: metrics[name] for name in self.names if name in metrics}
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update()

    def print_estimate(self, step: int, step_time: float):
        """Prints how long the rest of the run takes, after the first step that did not sample."""
        left = range(step + 1, self.args.num_steps)
        evaluations = 1  # after training
        if self.args.eval_every:
            evaluations += sum(number % self.args.eval_every == 0 for number in left)
        minutes = (evaluations * self.evaluation_time + len(left) * step_time) / 60
        words = f"time: {self.evaluation_time:.0f} s an evaluation, {step_time:.1f} s a step"
        online = getattr(self.args, "online", True)  # grpo_math, which has no such flag, always samples
        print_main(f"{words}, so about {minutes:.0f} min for the rest{' without sampling' * online}")
        self.evaluation_time = None

    def write_tensorboard(self, step: int, metrics):
        if is_main():
            for name, number in metrics.items():
                self.writer.add_scalar(name, number, step)
            self.writer.flush()  # so that a killed run loses no step

    def write_evaluation(self, step: int, evaluation) -> dict[str, float]:
        """Writes the texts of an evaluation after `step` updates. Returns its means, to be written."""
        for greedy, samples in ((True, evaluation.answers), (False, evaluation.samples)):
            for sample in samples:
                line = {
                    "step": step,
                    "prompt": sample.question,
                    "sample": sample.text,
                    "greedy": greedy,
                    "reward": sample.reward,
                    "finished": sample.finished,
                    "tokens": len(sample.completion_ids),
                }
                append_line(self.folder / "samples.jsonl", line)
        return {name: numbers.mean().item() for name, numbers in evaluation.values.items()}

    def report(self, step: int, after):
        """Prints answers and a table of what training has changed, and writes summary.json.

        after: the evaluation after training.
        """
        self.bar.close()
        self.write_tensorboard(step, self.write_evaluation(step, after))
        if not is_main():
            return
        # Both evaluations are of the same rows. The error of their mean change is usually smaller than the
        # errors of both means, because the rows differ more than the change of each.
        before = self.before
        change = {name: after.values[name] - before.values[name] for name in after.values}
        tables = {"before": before.values, "after": after.values, "change": change}
        summary = {title: mean_and_error(values) for title, values in tables.items()}
        write_file(self.folder / "summary.json", json.dumps(summary, indent=2))
        pairs = list(zip(before.counted, after.counted))
        pairs.sort(key=lambda pair: pair[0].finished + pair[1].finished, reverse=True)  # whole texts first
        for first, last in pairs[:4]:
            print(f"\nprompt: {last.question}")
            for title, sample in (("before", first), ("after", last)):
                reward = "" if sample.reward is None else f"  [reward {sample.reward:.2f}]"
                unfinished = "" if sample.finished else "  [truncated at --max-new-tokens]"
                print(f"{title}: {sample.text}{reward}{unfinished}")
        print(f"\n{'mean ± standard error':24}{'before':>20}{'after':>20}{'change':>20}")
        for name in after.values:
            rows = [table[name] for table in summary.values()]  # (mean, error, n) each
            columns = [f"{mean:10.3f} ± {error:7.3f}" for mean, error, _ in rows]
            print(f"{name:24}{''.join(columns)}   n = {rows[0][2]}")
        print(f"\nwrote {self.folder}")


def append_line(path: Path, line: dict):
    """Appends a line to a .jsonl file, on rank 0."""
    if is_main():
        with path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def keep_steps_before(start: int, path: Path):
    """Removes all lines from a .jsonl file but those of earlier steps."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # A run that was killed leaves a part of a line.
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < start]
    write_file(path, "".join(kept))
