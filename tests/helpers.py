"""What test files share: whole runs of the scripts in one or several ranks, and readers of what a run wrote.

A worker is a function `worker(script, arguments)` that every rank calls, once for each argument list.
`run_main` is the usual one. A test file may have its own, which a rank imports by its name.
"""

import atexit
import contextlib
import gzip
import importlib
import itertools
import json
import multiprocessing.forkserver
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.run import parse_args as parse_torchrun

import utils
from support import grading, run, sampling

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"  # real data, where there is any
TOY = ROOT / "toy" / "bouquets"
PAIRS = str(ROOT / "tests" / "pairs.jsonl")  # the first 128 pairs of the toy, for short runs
SCRIPTS = ["dpo_humanline", "kto_humanline", "grpo_humanline"]
ALL_SCRIPTS = [*SCRIPTS, "grpo_math_humanline"]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # the variables that torchrun sets

# === Processes ===
# Ranks are forks of a server that has imported the scripts once, because imports take ten times as long as a
# short run. CUDA and vLLM do not survive a fork: with them, every rank is a new interpreter.

# A rank binds its port a while after the port was chosen. So all ports are below 32768, from which on the
# system chooses its own, and every pytest process has its own thousand. It begins there at a port of its own,
# because several sessions of pytest may run at once.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw")) % 10
FIRST_PORT = 22_000 if find_spec("vllm") else 12_000
PORTS = itertools.count(FIRST_PORT + 1_000 * WORKER + 97 * os.getpid() % 900)


def free_port() -> int:
    for port in PORTS:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@cache
def context():
    """Returns the way to start ranks."""
    if find_spec("vllm") or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    modules = ["math_verify", "helpers", "transformers.models.llama.modeling_llama"]
    server.set_forkserver_preload([*ALL_SCRIPTS, *modules])
    return server


def server_address() -> dict:
    """Returns where ranks find the fork server, which also forks their grading workers."""
    state = vars(multiprocessing.forkserver._forkserver)
    return {key: state[key] for key in state if key.endswith(("_address", "_authkey")) and state[key]}


def start_rank(worker, script: str, runs: list, ports: list, environment: dict, output: str, server: dict):
    """Is the life of a rank: writes its output into a file, and calls the worker for each argument list."""
    if server:  # a server of the rank's own would take longer than a short run
        vars(multiprocessing.forkserver._forkserver).update(server, ensure_running=lambda: None)
        multiprocessing.forkserver.ensure_running = lambda: None
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(file, standard)
    sys.argv = [f"{script}.py"]
    try:
        for port, arguments in zip(ports, runs):
            os.environ["MASTER_PORT"] = str(port)
            worker(importlib.import_module(script), arguments)
    finally:
        # A fork ends without these calls, and would wait forever for what they end.
        atexit._run_exitfuncs()


def run_main(script, arguments: list):
    """Runs main of a script, as its command does."""
    script.main(parse_args(script, arguments))


def start_ranks(ranks: int, runs: list, worker=run_main, script="dpo_humanline") -> list:
    """Starts the ranks of a run. runs: argument lists, one after the other."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    env["MASTER_ADDR"] = "127.0.0.1"
    ports = [free_port() for _ in runs]
    processes = []
    for rank in range(ranks):
        own = {}
        if ranks > 1:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        descriptor, output = tempfile.mkstemp(suffix=".rank")
        os.close(descriptor)
        arguments = (worker, script, runs, ports, env | own, output, server_address())
        processes.append(context().Process(target=start_rank, args=arguments, name=output))
        processes[-1].start()
    return processes


def finish(processes, timeout=280) -> list[str]:
    """Returns the outputs of ranks that have ended. Kills all ranks, and fails if the time was over."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    outputs = []
    for process in processes:
        process.kill()
        process.join()
        outputs.append(Path(process.name).read_text())
        Path(process.name).unlink()
    ends = "\n".join(output[-3000:] for output in outputs)
    assert not late, f"ranks {late} took more than {timeout} s:\n{ends}"
    return outputs


def run_ranks(ranks: int, runs: list, worker=run_main, script="dpo_humanline", timeout=280) -> str:
    """Returns the output of rank 0. Every rank must succeed."""
    processes = start_ranks(ranks, runs, worker, script)
    outputs = finish(processes, timeout)
    codes = [process.exitcode for process in processes]
    assert codes == [0] * ranks, "\n".join([f"exit codes {codes}", *(output[-3000:] for output in outputs)])
    return outputs[0]


def refused(arguments: list, worker=run_main, script="dpo_humanline") -> str:
    """Returns what a run of one rank says that must end with one line."""
    (process,) = start_ranks(1, [arguments], worker, script)
    (output,) = finish([process])
    assert process.exitcode == 1 and "Traceback" not in output, output[-3000:]
    return output[output.index("error: ") :]


def run_killed(moment: str, script, arguments: list):
    """Is a worker, as partial(run_killed, "function n"): ends rank 0 with SIGKILL in call n of a function.

    "function late": rank 1 calls the function two seconds after the others.
    """
    name, number = moment.split()
    rank = os.environ.get("RANK", "0")
    owners = [script, utils, sampling, sampling.Sampler, grading]
    owners += [module for name, module in sys.modules.items() if name.startswith("support.")]
    owner = next(owner for owner in [*owners, torch.distributed.checkpoint] if hasattr(owner, name))
    original = getattr(owner, name)
    calls = []

    def disturbed(*arguments, **keywords):
        if number == "late" and rank == "1":
            time.sleep(2)
        calls.append(name)
        result = original(*arguments, **keywords)  # dies after the work, before anything is made of it
        if str(len(calls)) == number and rank == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, disturbed)
    run_main(script, arguments)


def kill_and_resume(folder: Path, whole: Path, flags: list, moment: str, script="dpo_humanline", ranks=1):
    """Runs into a new folder until rank 0 is killed, and resumes: all must be as in the run `whole`."""
    killed = partial(run_killed, moment)
    processes = start_ranks(ranks, [[*flags, "--output-dir", str(folder)]], killed, script)
    processes[0].join(timeout=120)
    for other in processes[1:]:
        other.kill()
    finish(processes)
    assert processes[0].exitcode == -9 and len(metrics(folder)) < len(metrics(whole))
    run_ranks(ranks, [["--resume", str(folder)]], script=script)
    assert metrics(folder, True) == metrics(whole, True)
    for file in ("summary.json", "final/model.safetensors"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file


# === Runs in this process ===


def parse_args(script, flags: list[str]):
    """Returns the settings of an imported script, from flags as in a shell.

    A model of the tests has few positions, so its lengths come first, unless the flags have others.
    """
    if "--model" in flags and Path(flags[flags.index("--model") + 1]).is_dir() and "--resume" not in flags:
        flags = ["--max-prompt-length", "64", "--max-length", "128", *flags]
    return run.parse_args(
        script.Args,
        file=script.__file__,
        doc=script.__doc__,
        toy=script.TOY,
        toy_online=getattr(script, "TOY_ONLINE", {}),
        paper=getattr(script, "PAPER", {}),
        flags=flags,
    )


def run_here(script, *arguments):
    """Runs main of a script in this process. Returns the last argument, the run's folder."""
    if dist.is_initialized():  # by another library, in an earlier test
        dist.destroy_process_group()
    try:
        run_main(script, [str(argument) for argument in arguments])
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if dist.is_initialized():
            dist.destroy_process_group()
    return arguments[-1]


def note_batches(script, monkeypatch) -> list:
    """Returns a list that gets the examples of every batch that a script's loop pads from now on."""
    batches = []

    def pad_batch(examples, device):
        batches.append(examples)
        return utils.pad_batch(examples, device)

    monkeypatch.setattr(script, "utils", SimpleNamespace(**vars(utils) | {"pad_batch": pad_batch}))
    return batches


def run_edited(folder: Path, old: str, new: str, *flags) -> subprocess.CompletedProcess:
    """Runs a copy of dpo_humanline.py with an edit, as its user would, for two steps on two pairs."""
    text = (ROOT / "dpo_humanline.py").read_text()
    assert text.count(old) == 1
    (folder / "edited.py").write_text(text.replace(old, new))
    shutil.copy(ROOT / "utils.py", folder)
    shutil.copytree(ROOT / "support", folder / "support")
    answers = {"chosen": "rose iris", "rejected": "iris"}
    rows = [{"prompt": f"for {name}"} | answers for name in ("king", "queen")]
    data = write_rows(folder / "data.jsonl", rows)
    command = [sys.executable, folder / "edited.py", "--model", TOY / "policy", "--dataset", data, *flags]
    command += "--engine hf --batch-size 2 --num-steps 2 --max-new-tokens 4 --eval-samples 2".split()
    command += "--max-prompt-length 64 --max-length 128".split()
    return subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)


def run_layouts(folder: Path, jobs: dict, layouts: list[tuple], script="dpo_humanline") -> dict:
    """Runs jobs, {name: flags}, under several layouts. Returns {name: metrics under every layout}.

    A layout: ranks, --micro-batch-tokens and what may follow it, and the names of its jobs, if not all. A
    run's folder is LAYOUT/NAME.
    """
    starts = defaultdict(list)  # {ranks: argument lists}
    for number, (ranks, size, *names) in enumerate(layouts):
        for name in names or jobs:
            layout = ["--micro-batch-tokens", *size.split(), "--output-dir", f"{folder}/{number}/{name}"]
            starts[ranks].append([*jobs[name], *layout])
    for ranks, runs in starts.items():
        run_ranks(ranks, runs, script=script, timeout=560)
    found = defaultdict(list)
    for number, (_, _, *names) in enumerate(layouts):
        for name in names or jobs:
            found[name].append(metrics(folder / str(number) / name, True))
    return found


# === Files and numbers ===


def metrics(folder, without_perf: bool = False) -> list[dict]:
    """Returns the lines of a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not (without_perf and k.startswith("perf/"))} for line in lines]


def read_rows(path) -> list[dict]:
    """Returns the rows of a .jsonl or .jsonl.gz file."""
    open_file = gzip.open if str(path).endswith(".gz") else open
    with open_file(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_rows(path: Path, rows) -> str:
    """Writes a .jsonl file. Returns its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def agree(steps: list[dict], others: list[dict], keys=(), rel=1e-5, abs=1e-12):
    """Asserts that two runs have logged the same; keys: the metrics to compare, by default all."""
    for a, b in zip(steps, others, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() & set(keys or a):
            assert b[key] == pytest.approx(a[key], rel=rel, abs=abs), (key, a["step"])


def read_checkpoint(folder: Path, step: int) -> dict:
    """Returns what a run's checkpoint holds, by name."""
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(folder / "checkpoints" / f"step-{step:06}", file.name)
        return torch.load(file.name, weights_only=False)


def read_pool(folder: Path, step: int) -> list[tuple]:
    """Returns the groups that wait in a run's checkpoint."""
    return read_checkpoint(folder, step)["progress"][0]["pool"]


def full_logps(model, input_ids, mask, temperature=1.0):
    """Computes `token_logps` in the textbook way: all logits, log-softmax, gather."""
    logits = model(input_ids).logits / temperature
    logps = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(logps, (1, 0)) * mask


def toy_rows(toy: Path, count: int) -> list[dict]:
    """Returns the first pairs of a toy, without their scores."""
    rows = read_rows(toy / "preferences_train.jsonl.gz")[:count]
    return [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]


def trl_settings(folder, batch: int, steps: int, lr: float) -> dict:
    """Returns what the scripts do, as flags of TRL's trainers."""
    settings = dict(output_dir=str(folder), per_device_train_batch_size=batch, max_steps=steps)
    settings |= dict(learning_rate=lr, lr_scheduler_type="constant", weight_decay=0.0, adam_epsilon=1e-8)
    settings |= dict(max_grad_norm=1.0, logging_steps=1, bf16=False, use_cpu=True, disable_tqdm=True)
    return settings | dict(gradient_checkpointing=False, report_to="none", save_strategy="no")


# === Commands in pages and shell files ===

STAND_INS = {"N": "2", "FLAGS": ""}  # what a reader replaces
# Bash finds no program where PATH is empty, and gives the words of every command to this function.
NOTED = r"""
enable -n cd exec kill source .
command_not_found_handle() { printf '%s\n' "$@" '' >> commands; }
"""


def starts_of_scripts(code: str) -> list[list[str]]:
    """Returns the words of every command in shell code that starts a *_humanline.py."""
    with tempfile.TemporaryDirectory() as folder:
        command = [shutil.which("bash"), "-c", f"{NOTED}\n{code}\nwait"]
        subprocess.run(command, cwd=folder, env={"PATH": "/nowhere"}, capture_output=True)
        noted = Path(folder, "commands")
        commands = noted.read_text().split("\n\n") if noted.exists() else []
    starts = []
    for command in commands:
        words = [STAND_INS.get(word, word) for word in command.split("\n")]
        if words[0] in ("torchrun", "python") and any(word.endswith("_humanline.py") for word in words):
            starts.append([word for word in words if word])
    return starts


def commands_of(page: str) -> list[tuple[str, list[str]]]:
    """Returns (page, words) of the commands in blocks of shell code and in code within the text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```bash(?: \.noeval)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", prose):
        if code.startswith(("torchrun ", "python ", "for ")):
            blocks.append(code)
    return [(page, words) for block in blocks for words in starts_of_scripts(block)]


def parse_command(words: list[str], folder: Path, monkeypatch) -> tuple:
    """Returns the script and its arguments."""
    world, (script, *flags) = 1, words[1:]
    if words[0] == "torchrun":
        launch = parse_torchrun(words[1:])
        script, flags = launch.training_script, launch.training_script_args
        world = int(launch.nnodes.split(":")[-1]) * int(launch.nproc_per_node)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", launch.nproc_per_node)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    name = (ROOT / script).stem.removeprefix("my_")  # a reader's copy
    module = importlib.import_module(name)
    if "--help" in flags:
        with pytest.raises(SystemExit) as stop:
            parse_args(module, flags)
        assert not stop.value.code
        return name, None
    if "--resume" in flags:  # of a run that its reader has
        (folder / "args.json").write_text(json.dumps(asdict(module.Args(**module.TOY)) | {"script": name}))
        flags[flags.index("--resume") + 1] = str(folder)
    return name, parse_args(module, flags)
