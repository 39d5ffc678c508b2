"""Checks a new machine, above all its first GPU: is everything right, and how fast is it?

    python benchmark/cuda_check.py                      # on all GPUs, or with two processes on the CPU
    python benchmark/cuda_check.py --only sync head     # rows whose names begin with sync or head

Prints the rows one by one, and at the end a table for docs/performance.md. This takes less than eight minutes
(--limit). A row is "not here" if the machine lacks what it needs, and "not run" if there was no time left.
The exit status is 1 if a row is WRONG or "not run".

A row measures one part (cuda_rows.py) or reads short runs of the scripts on the toys. Several runs share a
process, so the seconds of a row are those of all runs that it waited for.
"""

import contextlib
import gc
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import cuda_rows
import torch
import tyro
from cuda_rows import CUDA, need
from safetensors.torch import load_file
from scripts import ROOT, load_script, machine, parse_args

GPUS = torch.cuda.device_count() or 1
RANKS = max(n for n in (1, 2, 4, 8) if n <= (GPUS if CUDA else 2))
MEASURED = {  # {row: (function of cuda_rows.py, its process, what it needs)}
    "precision": ("precision", "parts", ""),  # the first, because the allocator reads its settings once
    "sync": ("sync", "parts", ""),
    "attention in bf16": ("attention", "parts", ""),
    "cuDNN's plans": ("plans", "parts", "a GPU"),
    "head in bf16": ("head", "parts", ""),
    "launches": ("launches", "parts", ""),
    "--compile": ("compiled", "parts", ""),
    "expandable segments": ("segments", "parts", "a GPU"),
    "vLLM asleep and awake": ("engine", "engine", "vLLM"),
}
SCRIPTS = {  # {script: flags of a step's batch}
    "dpo": "--batch-size 32 --beta 1",
    "kto": "--batch-size 16",
    "grpo": "--batch-size 16",
    "grpo_math": "--prompts-per-step 4 --group-size 4 --sample-every 2",
}
# Another layout sums in another order. In bf16 the gradient of each micro-batch is rounded to 2^-9.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass
class Args:
    only: tuple[str, ...] = ("",)  # only rows whose names begin with one of these words
    limit: float = 470  # seconds for all rows
    plan: str = ""  # internal: a file with the runs that this process makes


@dataclass
class Runs:
    folder: Path
    plan: dict[str, tuple[str, str, str]]  # {name: (process, script, flags)}
    ends: float  # when the time is over, by time.monotonic

    def launch(self, command: str, ranks: int, log: Path) -> str:
        """Runs a Python command, with torchrun for several ranks. Returns the error, or ""."""
        words = [sys.executable, *command.split()]
        if ranks > 1:
            words[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
        with log.open("w") as file:
            options = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(words, env=environment, **options)
        try:
            failed = process.wait(self.ends - time.monotonic())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also its ranks
        errors = re.findall(r"(?:^|\r)([\w.]*[eE]rror: .*)", log.read_text(), re.M) or ["no message"]
        return errors[0] if failed else ""

    def result(self, name: str) -> str:
        """Returns a figure or metrics.jsonl. If it is not there yet, makes all runs of its process."""
        files = {key: self.folder / f"{key}.result" for key in self.plan}
        process = self.plan[name][0]
        if not files[name].exists():
            due = [key for key in self.plan if self.plan[key][0] == process and not files[key].exists()]
            due.sort(key=lambda key: key != name)
            plan = self.folder / f"{process}.json"
            plan.write_text(json.dumps({str(self.folder / key): self.plan[key][1:] for key in due}))
            ranks = {"all": RANKS, "again": RANKS, "shared": 2}.get(process, 1)
            problem = self.launch(f"{__file__} --plan {plan}", ranks, plan.with_suffix(".log"))
            failed = [key for key in due if not files[key].exists()]
            for key in failed[:1]:  # the runs after the first failed one have not started
                files[key].write_text(f"error: {problem}")
        text = files[name].read_text()
        need(not text.startswith("error: "), text.removeprefix("error: "))
        return text


def make(plan: Path):
    """Makes several runs in this process, on every rank. The first run that fails ends the process."""
    for number, (path, (script, flags)) in enumerate(json.loads(plan.read_text()).items()):
        # Each run has its own store. Its port is the same in all ranks, and the system gives it to nobody.
        port = 32000 + (os.getppid() + number) % 768
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": ""}
        try:
            if script:
                module = load_script(script)
                args = parse_args(module, flags.split())
                module.main(args)
                text = (Path(args.output_dir or args.resume) / "metrics.jsonl").read_text()
            else:
                text = getattr(cuda_rows, flags)()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # sys.exit could wait for other ranks
        if os.environ.get("RANK", "0") == "0":
            Path(f"{path}.result").write_text(text)
        gc.collect()
    sys.exit()  # after os._exit, engines on the CPU would leave shared memory, and the next engine would fail


def all_runs(folder: Path) -> dict[str, tuple[str, str, str]]:
    """Returns the plan of all runs: {name: (process, script or "" for a part, flags or the part)}.

    Each script makes six steps in two dtypes and layouts. Some runs stop after three and are resumed.
    """
    plan = {name: (process, "", name) for name, process, _ in MEASURED.values()}
    for script, batch in SCRIPTS.items():
        data = folder / f"{script}.jsonl"
        with gzip.open(load_script(script).TOY["dataset"], "rt") as file:
            data.write_text("".join(next(file) for _ in range(32)))
        flags = f"{batch} --dataset {data} --eval-dataset {data} --warmup-fraction 0 --engine hf"
        for dtype in TOLERANCE:
            name = f"{script}-{dtype}"
            steps = f"{flags} --eval-samples 0 --dtype {dtype} --k 2 --checkpoint-every 3 --output-dir"
            parts = f"--micro-batch-tokens {256 // RANKS} --num-steps"
            plan[name] = ("one", script, f"{steps} {folder}/{name} --micro-batch-tokens 0 --num-steps 6")
            plan[f"{name}-parts"] = ("all", script, f"{steps} {folder}/{name}-parts {parts} 6")
            plan[f"{name}-half"] = ("all", script, f"{steps} {folder}/{name}-half {parts} 3")
            plan[f"{name}-again"] = ("again", script, f"--resume {folder}/{name}-half --num-steps 6")
    online = "--online --round-prompts 32 --batch-size 16 --num-steps 3 --eval-samples 16 --max-new-tokens 24"
    for name, gpus in (("vllm", 1), ("shared", 2)):
        flags = f"{online} --engine vllm --vllm-tensor-parallel {gpus} --output-dir {folder}/{name}"
        plan[name] = (name, "dpo", flags)
    return plan


# === Rows: each returns a figure, or raises an exception that says what is wrong ===
def metrics(runs: Runs, name: str) -> list[dict]:
    """Returns the metrics of all steps of a run, without times."""
    steps = []
    for line in runs.result(name).splitlines():
        step = json.loads(line)
        steps.append({key: value for key, value in step.items() if not key.startswith("perf/")})
    return steps


def same(runs: Runs, name: str, other: str) -> str:
    """Compares the first three steps of two runs, by differences relative to the larger number, at least 0.1.

    Later the ratio of a token may be on the other side of 1 ± ε, where the gradient jumps.
    """
    allowed = TOLERANCE[name.split("-")[1]]
    worst = 0.0
    for a, b in list(zip(metrics(runs, name), metrics(runs, other), strict=True))[:3]:
        for key in ("loss", "humanline/log_ratio_abs_mean", "grad_norm"):
            if key != "grad_norm" or a["step"] == 0:
                worst = max(worst, abs(a[key] - b[key]) / max(abs(a[key]), abs(b[key]), 0.1))
    figure = f"loss, gradient norm and log-ratios differ by {worst:.0e} (at most {allowed:.0e})"
    need(worst < allowed, figure)
    return figure


def resume(runs: Runs, whole: str, half: str, again: str) -> str:
    """Compares a run of six steps with a run that was stopped after three and resumed."""
    first = metrics(runs, whole)
    metrics(runs, half)
    second = metrics(runs, again)
    need(first == second, f"the last step's metrics are {second[-1]}, and not {first[-1]}")
    weights, others = (load_file(runs.folder / name / "final/model.safetensors") for name in (whole, half))
    names = [name for name in weights if not weights[name].equal(others[name])]
    need(not names, f"the final weights differ: {names}")
    return "metrics and final weights equal bit for bit"


def sampling(runs: Runs, name: str) -> str:
    """Reads the rounds of a run. The script itself compares the engine's log-probs with the policy's."""
    nats = [step["rollout/logp_diff_mean"] for step in metrics(runs, name) if "rollout/round" in step]
    return f"{len(nats)} rounds of samples, {max(nats):.0e} nats off"


def lacking(needs: str) -> str:
    """Returns what a row needs if this machine lacks it, else "". Without a GPU, two processes are enough."""
    vllm = bool(find_spec("vllm"))
    here = {"": True, "a GPU": CUDA, "vLLM": vllm, "vLLM and two GPUs": vllm and (not CUDA or GPUS > 1)}
    return "" if here[needs] else needs


def all_rows() -> dict[str, tuple]:
    """Returns {row: (function of the runs and names, names)}, with what the machine lacks as function."""
    rows = {}
    for row, (name, _, needs) in MEASURED.items():
        rows[row] = (lacking(needs) or Runs.result, [name])
    for dtype in TOLERANCE:
        for script in SCRIPTS:
            name = f"{script}-{dtype}"
            rows[f"{script}, {dtype}, {RANKS} ranks in parts"] = (same, [name, f"{name}-parts"])
        name = f"dpo-{dtype}"
        rows[f"resume, {dtype}"] = (resume, [f"{name}-parts", f"{name}-half", f"{name}-again"])
    rows["DPO online with vLLM"] = (lacking("vLLM") or sampling, ["vllm"])
    rows["tensor parallel 2"] = (lacking("vLLM and two GPUs") or sampling, ["shared"])
    return rows


def judge(runs: Runs, row, names: list[str]) -> tuple[str, str]:
    """Returns ok, WRONG, not run or not here, and the figure or the error."""
    if isinstance(row, str):
        return "not here", row
    try:
        return "ok", row(runs, *names)
    except Exception as error:
        if time.monotonic() > runs.ends:
            return "not run", "the time is over: raise --limit, or run --only this row"
        return "WRONG", str(error).strip().replace("\n", " ")


def check(args: Args, folder: Path) -> bool:
    """Prints the rows and the table. Returns whether no row is WRONG or not run."""
    rows = {name: row for name, row in all_rows().items() if name.startswith(args.only)}
    needed = {name for row, names in rows.values() if callable(row) for name in names}
    plan = {name: run for name, run in all_runs(folder).items() if name in needed}
    runs = Runs(folder, plan, time.monotonic() + args.limit)
    here = machine()
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    table = [f"{GPUS} x {here['device']}, {versions}, commit {here['commit']}"]
    table += ["", "| check | | | seconds |", "|---|---|---|---|"]
    for name, (row, names) in rows.items():
        started = time.monotonic()
        verdict, text = judge(runs, row, names)
        table.append(f"| {name} | {verdict} | {text} | {time.monotonic() - started:.0f} |")
        print(table[-1], file=sys.stderr, flush=True)
    print("", *table, sep="\n")
    return not any("| WRONG |" in line or "| not run |" in line for line in table)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.plan:
        make(Path(args.plan))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not check(args, Path(folder)))
