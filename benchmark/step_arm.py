"""An arm of step.py: a training loop that waits before every step for a word of the process that measures,
and what that process holds of it.

Every rank runs: step_arm.py NAME SOCKET SCRIPT FLAGS. NAME is TRL, or else the script's own `main` runs. When
it is about to begin a step, a rank writes a line of JSON on what the last one took; it begins when it reads a
line, and ends when there is none.
"""

import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from scripts import load_script, parse_args
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import run
import utils

CUDA = torch.cuda.is_available()


# --- where it is measured ---


@dataclass
class Arm:
    name: str
    process: subprocess.Popen
    log: Path
    files: list = field(default_factory=list)  # to a rank each
    steps: list[dict] = field(default_factory=list)  # what all ranks have written

    def hear(self) -> list[dict]:
        """A line of each rank, once all wait. A RuntimeError in the arm's own words if one has ended."""
        lines = []
        with contextlib.suppress(OSError):
            lines = [file.readline() for file in self.files]
        if not lines or not all(lines) or self.process.poll() is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            raise RuntimeError(f"{self.name}: {self.last_words()}")
        return [json.loads(line) for line in lines]

    def last_words(self) -> str:
        """The first error of the log, or its last line."""
        text = self.log.read_text().strip()
        errors = re.findall(r"(?:error|\w+(?:Error|Exception)): .*", text)
        if errors:
            return errors[0]
        return text.split("\n")[-1]

    def step(self):
        with contextlib.suppress(OSError):  # `hear` says why
            for file in self.files:
                print("go", file=file, flush=True)
        ranks = self.hear()
        step = {}
        for rank in ranks:
            step |= rank
        for key in ("ended", "sync", "peak"):
            step[key] = max(rank[key] for rank in ranks)
        for key in ("positions", "real", "idle"):
            step[key] = sum(rank[key] for rank in ranks)
        step["started"] = min(rank["started"] for rank in ranks)
        step["seconds"] = step["ended"] - step["started"]
        self.steps.append(step)
        print(f"{self.name}: {step['seconds']:.3f} s", file=sys.stderr)


def start(
    name: str,
    kind: str,
    root: Path,
    own,
    flags: list[str],
    folder: Path,
    server: socket.socket,
) -> Arm:
    """An arm of the checkout `root` whose ranks wait for their first step.

    kind: TRL, offline or k=N. own: step.py's flags. folder: for what the arm writes; folder.log for what it
    prints.
    """
    command = [sys.executable]
    if own.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={own.ranks}"]
    command += [str(root / "benchmark" / "step_arm.py"), kind, server.getsockname(), own.script]
    command += [*flags, f"--output-dir={folder}"]
    if kind == "TRL":
        command.append(f"--dataset={folder.parent}/tokens.json")
    elif kind == "offline":
        command.append("--no-humanline")
    else:
        command += ["--humanline", f"--k={kind[2:]}"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    log = folder.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    arm = Arm(name, process, log)
    while len(arm.files) < own.ranks and process.poll() is None:
        with contextlib.suppress(TimeoutError):
            peer, _ = server.accept()
            arm.files.append(peer.makefile("rw"))
            peer.close()  # the file stays open
    arm.hear()
    return arm


# --- where it runs ---


def clock() -> float:
    """Seconds, the same clock in all processes of the machine, once the GPU is done."""
    if torch.cuda.is_initialized():  # not on the first GPU before the rank has its own
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory() -> float:
    """GiB. `ru_maxrss` begins with what the parent held when it started this process, VmHWM does not."""
    status = Path("/proc/self/status")
    if CUDA or not status.exists():
        device = torch.device("cuda") if CUDA else torch.device("cpu")
        return run.peak_memory(device)
    kilobytes = re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]
    return int(kilobytes) / 2**20


class Gate:
    """Stands in for the script's progress bar."""

    def __init__(self, address: str):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(address)
        self.file = peer.makefile("rw")
        self.begin(0.0)

    def begin(self, idle: float):
        self.step = {"positions": 0, "real": 0, "sync": 0.0, "idle": idle, "started": clock()}

    def wait(self):
        self.step["ended"] = clock()
        self.step["real"] = int(self.step["real"])
        self.step["peak"] = peak_memory()
        busy = time.process_time()
        print(json.dumps(self.step), file=self.file, flush=True)
        if not self.file.readline():
            os._exit(0)
        self.begin(time.process_time() - busy)  # CPU seconds of the wait

    def __iter__(self):
        for step in itertools.count():
            self.wait()
            yield step

    def set_postfix(self, **_):
        pass

    def close(self):
        pass

    def watch(self, policy, masked: bool):
        """Counts the positions that go through the policy's decoder; masked: and those that are not
        padding."""

        def count(_, args, inputs):
            ids = args[0] if args else inputs.get("input_ids", inputs.get("inputs_embeds"))
            self.step["positions"] += ids.shape[0] * ids.shape[1]
            if masked:
                self.step["real"] += inputs["attention_mask"].sum()

        policy.base_model.register_forward_pre_hook(count, with_kwargs=True)

    def note(self, metrics: dict):
        for key in ("loss", "grad_norm"):
            if key in metrics:
                self.step[key] = metrics[key]


def ours(script, args, gate: Gate):
    """The script's own main, with the gate in the place of its bar and clocks around its parts."""
    load_models = script.load_models
    sync_reference = script.sync_reference
    pad_batch = utils.pad_batch
    write = run.Log.write

    def watched_load(*arguments):
        models = load_models(*arguments)
        gate.watch(models[0], masked=False)
        return models

    def timed_sync(reference, policy):
        started = clock()
        sync_reference(reference, policy)
        gate.step["sync"] += clock() - started

    def counted_pad(examples, *rest):  # of a pass
        gate.step["real"] += sum(x.length for x in examples)
        return pad_batch(examples, *rest)

    def noted_write(log, metrics):
        gate.note(metrics)
        write(log, metrics)

    script.load_models = watched_load
    script.sync_reference = timed_sync
    script.tqdm = lambda *_, **__: gate
    utils.pad_batch = counted_pad
    run.Log.write = noted_write
    script.main(args)


def theirs(script, args, gate: Gate):
    """TRL's trainer on the tokens of --dataset, with the script's settings."""
    import trl
    from datasets import Dataset

    kind = script.__name__.removesuffix("_humanline").upper()
    saved = json.loads(Path(args.dataset).read_text())
    size = saved["pass_size"]
    groups = []
    for group in saved["groups"]:
        groups.append([utils.Example(*example) for example in group])
    describe = {"DPO": describe_dpo, "KTO": describe_kto, "GRPO": describe_grpo}[kind]
    columns, settings, functions = describe(script, args, groups, size)
    settings |= trainer_settings(args, size)

    class Released(TrainerCallback):
        def on_step_begin(self, *_, **__):
            gate.wait()

        def on_log(self, *_, logs, **__):
            gate.note(logs)

    trainer_class = getattr(trl, f"{kind}Trainer")
    if kind != "GRPO":
        prepared = {"_prepare_dataset": lambda self, dataset, *_: dataset}  # it would tokenize
        trainer_class = type("Trainer", (trainer_class,), prepared)
    dtype = torch.float32 if args.dtype == "bfloat16" else getattr(torch, args.dtype)
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype),
        args=getattr(trl, f"{kind}Config")(**settings),
        train_dataset=Dataset.from_dict(columns),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[Released()],
        **functions,
    )
    gate.watch(trainer.model, masked=True)
    trainer.train()


def trainer_settings(args, size: int) -> dict:
    """Of all of TRL's trainers. size: sequences or pairs of a pass."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": args.batch_size // (size * world),
        "learning_rate": args.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": args.weight_decay,
        "adam_epsilon": args.adam_eps,
        "max_grad_norm": args.max_grad_norm,
        "beta": args.beta,
        "seed": args.seed,
        "bf16": args.dtype == "bfloat16",
        "use_cpu": not CUDA,
        "gradient_checkpointing": args.gradient_checkpointing,
        "output_dir": args.output_dir,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "max_steps": 10**6,
        "disable_tqdm": True,
    }


def describe_dpo(script, args, groups: list, size: int) -> tuple[dict, dict, dict]:
    """Columns of the data set, settings of the trainer, and its functions."""
    columns = {
        "prompt_ids": [chosen.prompt_ids for chosen, _ in groups],
        "chosen_ids": [chosen.completion_ids for chosen, _ in groups],
        "rejected_ids": [rejected.completion_ids for _, rejected in groups],
    }
    return columns, {"max_length": None}, {}


def describe_kto(script, args, groups: list, size: int) -> tuple[dict, dict, dict]:
    order = []  # all chosen ones first, as it does
    for side in itertools.zip_longest(*groups):
        order += [example for example in side if example]
    others = []  # completions of its mismatched pairs
    for first in range(0, len(order), size):
        part = order[first : first + size]
        others += [example.completion_ids for example in (part[-1], *part[:-1])]
    columns = {
        "prompt_ids": [example.prompt_ids for example in order],
        "completion_ids": [example.completion_ids for example in order],
        "KL_completion_ids": others,
        "label": [example.reward > 0 for example in order],
    }
    settings = {
        "max_length": None,
        "desirable_weight": args.lambda_D,
        "undesirable_weight": args.lambda_U,
    }
    return columns, settings, {}


def describe_grpo(script, args, groups: list, size: int) -> tuple[dict, dict, dict]:
    columns = {"prompt": [str(number) for number in range(len(groups))]}
    settings = {
        "num_generations": len(groups[0]),
        "scale_rewards": "none",
        "loss_type": "dapo",
        "temperature": 1.0,
        "epsilon": args.epsilon,
        "use_bias_correction_kl": False,
    }
    functions = {
        "rollout_func": partial(rollout, script, groups),
        "reward_funcs": lambda advantage, **_: advantage,
    }
    return columns, settings, functions


def rollout(script, groups: list, numbers: list[str], _) -> dict:
    """What GRPOTrainer would sample for its prompts: numbers of groups, each once for every completion."""
    samples = {"prompt_ids": [], "completion_ids": [], "advantage": [], "logprobs": None}
    for place, number in enumerate(numbers):
        group = groups[int(number)]
        member = place % len(group)
        advantages = script.group_advantages([example.reward for example in group])
        samples["prompt_ids"].append(group[member].prompt_ids)
        samples["completion_ids"].append(group[member].completion_ids)
        samples["advantage"].append(advantages[member])
    return samples


if __name__ == "__main__":
    name, address, kind, *flags = sys.argv[1:]
    gate = Gate(address)
    script = load_script(kind)
    train = theirs if name == "TRL" else ours
    train(script, parse_args(script, flags), gate)
