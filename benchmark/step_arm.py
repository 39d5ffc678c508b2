"""An arm of step.py: a training loop that waits before every step for the word of the process that measures, and what
that one holds of it.

Every rank runs: step_arm.py NAME SOCKET SCRIPT FLAGS. NAME is TRL, or else the script's own `main` runs. When it is
about to begin a step, a rank writes a line of JSON on what the last one took; it begins when it reads a line, and ends
when there is none.
"""

import contextlib
import importlib
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
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import utils  # noqa: E402

CUDA = torch.cuda.is_available()


# --- where it is measured ---


@dataclass
class Arm:
    name: str
    process: subprocess.Popen
    log: Path
    files: list = field(default_factory=list)  # to a rank each
    steps: list[dict] = field(default_factory=list)  # what all ranks told

    def hear(self) -> list[dict]:
        """Once all ranks wait. A RuntimeError in the arm's own words if one has ended."""
        lines = []
        with contextlib.suppress(OSError):
            lines = [file.readline() for file in self.files]
        if not all(lines) or not lines or self.process.poll() is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            said = self.log.read_text().strip()
            errors = re.findall(r"(?:error|\w+(?:Error|Exception)): .*", said) or said.split("\n")[-1:]
            raise RuntimeError(f"{self.name}: {errors[0]}")
        return list(map(json.loads, lines))

    def step(self) -> None:
        with contextlib.suppress(OSError):  # `hear` tells why
            for file in self.files:
                print("go", file=file, flush=True)
        ranks = self.hear()
        told = {key: value for rank in ranks for key, value in rank.items()}
        told |= {key: max(rank[key] for rank in ranks) for key in ("ended", "sync", "peak")}
        told |= {key: sum(rank[key] for rank in ranks) for key in ("positions", "real", "idle")}
        told["started"] = min(rank["started"] for rank in ranks)
        self.steps.append(told | {"seconds": told["ended"] - told["started"]})
        print(f"{self.name}: {self.steps[-1]['seconds']:.3f} s", file=sys.stderr)


def start(name: str, script: str, ranks: int, flags: list[str], folder: Path, server: socket.socket) -> Arm:
    """An arm whose ranks wait for their first step."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    what = ["--no-humanline"] if name == "offline" else ["--humanline", f"--k={name[2:]}"]
    what = [f"--dataset={folder}/tokens.json"] if name == "TRL" else what
    command = [sys.executable, *(torchrun if ranks > 1 else []), __file__]
    command += [name, server.getsockname(), script, *flags, *what, f"--output-dir={folder}/{name}"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    arm = Arm(name, process, folder / f"{name}.log")
    while len(arm.files) < ranks and process.poll() is None:
        with contextlib.suppress(TimeoutError), server.accept()[0] as peer:
            arm.files.append(peer.makefile("rw"))
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
        return utils.peak_memory(torch.device("cuda" if CUDA else "cpu"))
    return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 2**20


class Gate:
    """Stands in for the script's progress bar."""

    def __init__(self, address: str):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(address)
        self.file, self.told = peer.makefile("rw"), {}
        self.begin(0.0)

    def begin(self, idle: float) -> None:
        self.told = {"positions": 0, "real": 0, "sync": 0.0, "idle": idle, "started": clock()}

    def wait(self) -> None:
        self.told |= {"ended": clock(), "real": int(self.told["real"]), "peak": peak_memory()}
        busy = time.process_time()
        print(json.dumps(self.told), file=self.file, flush=True)
        if not self.file.readline():
            os._exit(0)
        self.begin(time.process_time() - busy)  # CPU seconds of the wait

    def __iter__(self):
        for step in itertools.count():
            self.wait()
            yield step

    def set_postfix(self, **_) -> None:
        pass

    def watch(self, policy, masked: bool) -> None:
        """Counts the positions that go through the policy's decoder; masked: and those that are not padding."""

        def count(_, args, inputs):
            ids = args[0] if args else inputs.get("input_ids", inputs.get("inputs_embeds"))
            self.told["positions"] += ids.shape[0] * ids.shape[1]
            if masked:
                self.told["real"] += inputs["attention_mask"].sum()

        policy.base_model.register_forward_pre_hook(count, with_kwargs=True)

    def note(self, metrics: dict) -> None:
        self.told |= {key: metrics[key] for key in ("loss", "grad_norm") if key in metrics}


def ours(script, args, gate: Gate) -> None:
    load_models, sync, pad_batch, write = script.load_models, script.sync_reference, utils.pad_batch, utils.Log.write

    def load(*how):
        models = load_models(*how)
        gate.watch(models[0], masked=False)
        return models

    def copy(*models):
        started = clock()
        sync(*models)
        gate.told["sync"] += clock() - started

    def pad(examples, *how):  # of a pass
        gate.told["real"] += sum(x.length for x in examples)
        return pad_batch(examples, *how)

    def log(self, metrics):
        gate.note(metrics)
        write(self, metrics)

    script.load_models, script.sync_reference, utils.pad_batch, utils.Log.write = load, copy, pad, log
    script.trange = lambda *_, **__: gate
    script.main(args)


def theirs(script, args, gate: Gate) -> None:
    """TRL's trainer on the token ids in --dataset, with the script's settings."""
    import trl
    from datasets import Dataset

    name, world = script.__name__.removesuffix("_humanline").upper(), int(os.environ.get("WORLD_SIZE", 1))
    size, half = args.micro_batch_size or args.batch_size // world, args.dtype == "bfloat16"
    how = {"per_device_train_batch_size": size, "gradient_accumulation_steps": args.batch_size // (size * world)}
    how |= {"learning_rate": args.lr, "lr_scheduler_type": "constant", "weight_decay": args.weight_decay}
    how |= {"adam_epsilon": args.adam_eps, "max_grad_norm": args.max_grad_norm, "beta": args.beta, "seed": args.seed}
    how |= {"bf16": half, "use_cpu": not CUDA, "gradient_checkpointing": args.gradient_checkpointing}
    how |= {"output_dir": args.output_dir, "save_strategy": "no", "report_to": "none", "logging_steps": 1}
    groups = [[utils.Example(*x) for x in group] for group in json.loads(Path(args.dataset).read_text())]
    ids, functions = {"prompt_ids": [group[0].prompt_ids for group in groups]}, {}
    methods = {"_prepare_dataset": lambda self, dataset, *_: dataset}  # it would tokenize
    if name == "DPO":
        ids |= {
            side: [pair[i].completion_ids for pair in groups] for i, side in enumerate(("chosen_ids", "rejected_ids"))
        }
        how["max_length"] = None
    elif name == "KTO":
        order = [x for side in itertools.zip_longest(*groups) for x in side if x]  # all chosen ones first, as it does
        passes = [order[first : first + size] for first in range(0, len(order), size)]
        others = [y.completion_ids for part in passes for y in [part[-1], *part[:-1]]]  # its mismatched pairs
        ids = {"prompt_ids": [x.prompt_ids for x in order], "completion_ids": [x.completion_ids for x in order]}
        ids |= {"KL_completion_ids": others, "label": [x.reward > 0 for x in order]}
        how |= {"max_length": None, "desirable_weight": args.lambda_D, "undesirable_weight": args.lambda_U}
    else:
        ids, methods = {"prompt": [str(number) for number in range(len(groups))]}, {}
        functions = {"rollout_func": partial(rollout, script, groups), "reward_funcs": lambda advantage, **_: advantage}
        how |= {"num_generations": len(groups[0]), "scale_rewards": "none", "loss_type": "dapo", "temperature": 1.0}
        how |= {"epsilon": args.epsilon, "use_bias_correction_kl": False}

    class Released(TrainerCallback):
        def on_step_begin(self, *_, **__):
            gate.wait()

        def on_log(self, *_, logs, **__):
            gate.note(logs)

    config = getattr(trl, f"{name}Config")(**how, max_steps=10**6, disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32 if half else getattr(torch, args.dtype)
    )
    trainer = type("Trainer", (getattr(trl, f"{name}Trainer"),), methods)(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict(ids),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[Released()],
        **functions,
    )
    gate.watch(trainer.model, masked=True)
    trainer.train()


def rollout(script, groups: list, numbers: list[str], _) -> dict:
    """What GRPOTrainer would sample for its prompts, which are numbers of groups, each once for every completion."""
    found = {"prompt_ids": [], "completion_ids": [], "advantage": [], "logprobs": None}
    for place, group in enumerate(groups[int(number)] for number in numbers):
        member = place % len(group)
        found["prompt_ids"].append(group[member].prompt_ids)
        found["completion_ids"].append(group[member].completion_ids)
        found["advantage"].append(script.group_advantages([x.reward for x in group])[member])
    return found


if __name__ == "__main__":
    name, address, kind, *flags = sys.argv[1:]
    gate, script = Gate(address), importlib.import_module(f"{kind}_humanline")
    (theirs if name == "TRL" else ours)(script, script.parse_args(flags), gate)
