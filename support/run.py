"""Everything around the algorithm: errors, flags, ranks, signals, models, the run's folder and its logs.

The algorithms are in the scripts. Nothing here is part of the method.
"""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
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

# Flags that a resume cannot change: those on which the rows of a step depend, and the folder. Each script has
# some of them.
FIXED_BY_RESUME = {"batch_size", "group_size", "prompts_per_step", "round_prompts", "seed", "output_dir"}


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
    args = tyro.cli(Args, args=flags, default=default, description=doc)
    changed = {name for name in FIXED_BY_RESUME if getattr(args, name, "") != getattr(default, name, "")}
    if given.resume and changed:
        raise InputError(f"--resume cannot change {', '.join(sorted(changed))}")
    settings = [f"{field.name} {vars(args)[field.name]}" for field in fields(Args) if is_changed(args, field)]
    print_main(f"settings that differ from the defaults of {Path(file).name}: {', '.join(settings)}")
    return args


def is_changed(args, field) -> bool:
    """Returns whether a field of Args has another value than its default in the script."""
    return getattr(args, field.name) != field.default


def save_args(args, folder: Path, file: str):
    """Writes args.json, from which --resume takes the settings of the run, with the versions that made it."""
    if not is_main():
        return
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if shutil.which("git"):
        command = ["git", "-C", Path(file).parent, "rev-parse", "HEAD"]  # prints nothing outside of a clone
        versions["commit"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    saved = vars(args) | {"script": Path(file).stem, "versions": versions}
    write_file(folder / "args.json", json.dumps(saved, indent=2))


def load_args(Args, folder: str, file: str):
    """Reads the settings that `save_args` wrote."""
    path = Path(folder, "args.json")
    if not path.exists():
        raise InputError(f"--resume {folder}: no args.json; pass the folder of a run, for example runs/NAME")
    saved = json.loads(path.read_text())
    if saved.pop("script") != Path(file).stem:
        raise InputError(f"--resume {folder}: it is not a run of {Path(file).name}")
    saved.pop("versions", None)
    return Args(**saved)


# The least value of flags that may not be 0. A group of one sample has no advantage.
LEAST = dict.fromkeys(("group_size", "samples_per_prompt"), 2)
LEAST |= dict.fromkeys(("batch_size", "prompts_per_step", "round_prompts", "generation_batch_size"), 1)
LEAST |= dict.fromkeys(("sample_every", "max_new_tokens", "eval_samples_per_problem"), 1)
LEAST["vllm_tensor_parallel"] = 1


def check_flags(args, batch_size: int, score):
    """Raises InputError for the mistakes that would appear after minutes of loading, or never."""
    for name, value in vars(args).items():
        # Smaller numbers mean nothing, and some would be ignored: with --k -1 no sync would ever be due.
        least = LEAST.get(name, 0)
        if isinstance(value, int | float) and value < least and name != "log_epsilon_P":
            raise InputError(f"--{name.replace('_', '-')} {value}: it must be at least {least}")
    if not args.log_epsilon_P < 0 < args.log_epsilon_R:
        raise InputError("--log-epsilon-P must be negative and --log-epsilon-R positive")
    if args.max_grad_norm == 0:
        raise InputError("--max-grad-norm 0 would make every gradient 0; inf: no clipping")
    if args.temperature == 0:
        raise InputError("--temperature 0: for greedy sampling pass --top-p 1e-9")
    if not args.dataset:
        raise InputError(f"--model {args.model} needs a --dataset")
    online = getattr(args, "online", False)  # grpo_math has no such flag
    if online and not (args.reward_model or score):
        raise InputError("--online needs a --reward-model or a function as SCORE (docs/grpo.md)")
    if score and args.reward_model:
        raise InputError('SCORE and --reward-model are both set: set SCORE to None, or --reward-model ""')
    if score and not online and not (args.eval_dataset and args.eval_samples):
        raise InputError("SCORE has nothing to score without --online, or --eval-dataset and --eval-samples")
    if batch_size % getattr(args, "group_size", 1):
        raise InputError(f"--batch-size {batch_size} must be a multiple of --group-size {args.group_size}")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if batch_size % world or world % (args.shard_size or world):
        raise InputError(f"{world} ranks must divide the batch of {batch_size}, and --shard-size the ranks")
    if world % args.vllm_tensor_parallel:
        raise InputError(f"--vllm-tensor-parallel {args.vllm_tensor_parallel} must divide the {world} ranks")
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
    if gather(vars(args)) != [vars(args)] * dist.get_world_size():  # for example on another machine
        raise InputError("the ranks have different flags")
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
    """Records SIGINT and SIGTERM, so that a run can end after the current step (`checkpoint.save_at_exit`).

    A signal that comes two seconds later, or more, ends the process at once. An earlier one is the same
    again: a terminal or a scheduler sends one to every process, and torchrun sends another to its ranks.

    torchrun kills its ranks 30 seconds after it received a signal. If steps take longer, start it with
    `--shutdown-timeout SECONDS`.
    """

    numbers = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.received = 0  # the number of the signal that this rank has received
        self.time = math.inf  # of the first one, in seconds
        for number in self.numbers:
            signal.signal(number, self.record)
        # A reward function may start processes, which a signal must end as usual. Around a fork signals wait,
        # because Python forgets a signal that a new process receives before it has started.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers),
            after_in_child=self.release,
        )

    def record(self, number: int, frame):
        if time.monotonic() > self.time + 2:
            self.release()
            signal.raise_signal(number)
        if self.received:
            return
        self.received = number
        self.time = time.monotonic()
        if is_main():  # not by print, which must not be called while another print is running
            os.write(2, b"\nstopping after this step, with a checkpoint (again: at once, without)\n")

    def release(self):
        """From here on, signals end the process at once."""
        for number in self.numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)


# === Models ===
# Other code relies on the order of a model's parameters (`sync_reference`), on their names (the engines,
# `export`) and on a head that is one nn.Linear (`token_logps`). Adapters such as LoRA
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
    if getattr(config, "quantization_config", None):  # copies in fp32 would lose the scales
        raise InputError(f"{name} is quantized: pass its weights in bf16 or fp32")
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


# === Folder ===
# The run's folder, which one run at a time may use, and what is written into it besides checkpoints and logs.


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
        # FSDP2 has put a class of its own before the model's. With --trust-remote-code, save_pretrained would
        # write this class into config.json, and copy torch's code instead of the model's.
        policy.__class__ = type(policy).__bases__[1]
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


def print_plan(args, folder: Path, policy, tokenizer, groups: list[tuple], groups_per_step: int):
    """Prints the model, what humanline does, the data, and the first example as the policy reads it."""
    print_main(f"model: {args.model}, {policy.num_parameters():,} parameters, {args.dtype}")
    humanline = "off"
    if args.humanline:
        # The sync at step 0 copies equal weights, and no step follows a sync of the last step.
        syncs = len(range(args.k, args.num_steps - 1, args.k)) if args.k else 0
        advice = "" if syncs or not args.k else " (lower --k)"
        humanline = f"log-ratios clipped to [{args.log_epsilon_P}, {args.log_epsilon_R}]; "
        humanline += f"k {args.k}: {syncs} syncs change the reference{advice}"
    print_main(f"humanline: {humanline}")
    epochs = f"{args.num_steps * groups_per_step / len(groups):.1f} epochs"
    if getattr(args, "online", False):  # some prompts give no group
        epochs = f"at least {epochs}"
    print_main(f"data: {len(groups):,} rows; {args.num_steps} steps of {groups_per_step}: {epochs}")
    print_main(f"files: {folder}")
    first = groups[0][0]
    print_main(f"the first prompt:\n{tokenizer.decode(first.prompt_ids)}")
    if first.completion_ids:
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
        self.shown = {}  # beside the bar
        # In a log file, a line at most every ten seconds.
        interval = 0.1 if sys.stderr.isatty() else 10
        self.bar = tqdm(total=args.num_steps, initial=start, mininterval=interval, disable=not is_main())
        if is_main():
            if args.track:
                import wandb  # an extra package

                wandb.init(project="humanline", name=folder.name, config=vars(args), sync_tensorboard=True)
            self.writer = SummaryWriter(folder, purge_step=start)
            for name in ("metrics.jsonl", "samples.jsonl"):
                keep_steps_before(start, folder / name)
            (folder / "summary.json").unlink(missing_ok=True)  # the result of an earlier end
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
        if step:  # the table at the end shows the evaluation before training
            print_main(f"after {step} steps: " + ", ".join(f"{name} {means[name]:.3f}" for name in means))
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
        """Writes the metrics of a step. Beside the bar stands what shows learning."""
        append_line(self.folder / "metrics.jsonl", metrics)
        self.write_tensorboard(metrics, metrics["step"])
        # Not the loss: after each sync it begins again where it began.
        if "rewards/accuracy" in metrics:  # mathematics (pairs have rewards/accuracies)
            self.shown["accuracy"] = metrics["rewards/accuracy"]
        elif "rollout/reward_mean" in metrics:  # the first step of an online round
            self.shown["reward"] = metrics["rollout/reward_mean"]
        elif {"logps/chosen", "logps/rejected"} <= metrics.keys() and "reward" not in self.shown:
            self.shown["chosen - rejected (nats)"] = metrics["logps/chosen"] - metrics["logps/rejected"]
        self.bar.set_postfix(self.shown, refresh=False)
        self.bar.update()

    def write_tensorboard(self, metrics, step: int):
        if is_main():
            for name, number in metrics.items():
                self.writer.add_scalar(name, number, step)
            self.writer.flush()  # so that a killed run loses no step

    def report(self, step: int, after):
        """Prints samples and a table of what training has changed, and writes summary.json.

        after: the evaluation after training.
        """
        self.bar.close()
        self.write_tensorboard(self.write_evaluation(step, after), step)
        if not is_main():
            return
        write_file(self.folder / "summary.json", json.dumps(self.summary, indent=2))
        for first, last in zip(self.before.samples[:4], after.samples):
            print(f"\nprompt: {last.question}")
            for name, sample in (("before", first), ("after", last)):
                reward = "" if sample.reward is None else f"  [reward {sample.reward:.2f}]"
                unfinished = "" if sample.finished else "  [truncated at --max-new-tokens]"
                print(f"{name}: {sample.text}{reward}{unfinished}")
        print(f"\n{'mean ± standard error':24}{'before':>20}{'after':>20}{'change':>20}")
        tables = self.summary.values()
        for name, (_, _, count) in self.summary["after"].items():
            columns = [f"{table[name][0]:10.3f} ± {table[name][1]:7.3f}" for table in tables]
            print(f"{name:24}{''.join(columns)}   n = {count}")
        print(f"\nwrote {self.folder}")


def append_line(path: Path, line: dict):
    """Appends a line to a .jsonl file, on rank 0."""
    if is_main():
        with path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def keep_steps_before(start: int, path: Path):
    """Removes all lines from a .jsonl file but those of earlier steps."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] < start:  # a full disk leaves a part of a line
            kept.append(line)
    write_file(path, "".join(kept))
