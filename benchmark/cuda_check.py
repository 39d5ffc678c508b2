"""What to run first on a new machine, above all on its first GPU: is all right there, and how fast is it?

    python benchmark/cuda_check.py                      # on all GPUs; without one on the CPU, two processes
    python benchmark/cuda_check.py --only sync speed    # rows whose names begin so

Prints a table, in under eight minutes (--limit). "not here" is what the machine lacks. Exit code 1 if a row
is WRONG, or "not run" because the time was over. Most rows read short runs of the scripts on the toys, which
share processes: a row's seconds are those of all it waited for.
"""

import contextlib
import copy
import gc
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
import tyro
from safetensors.torch import load_file
from scripts import ROOT, load_script, machine, parse_args
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PhiConfig, Qwen2Config

import utils

CUDA = torch.cuda.is_available()
GPUS = torch.cuda.device_count() or 1
RANKS = max(n for n in (1, 2, 4, 8) if n <= (GPUS if CUDA else 2))
SCRIPTS = {  # the toy's data, a step's batch, sampling
    "dpo": ("bouquets/preferences", "--batch-size 32 --beta 1", "--online --round-prompts 32"),
    "kto": ("tales/preferences", "--batch-size 16", "--online --round-prompts 16"),
    "grpo": ("tales/preferences", "--batch-size 16", "--online --round-prompts 16"),
    "grpo_math": ("shell_game/problems", "--prompts-per-step 4 --group-size 4", "--sample-every 2"),
}
LAYOUTS = {  # the process that makes its runs, --micro-batch-tokens
    "whole": ("one", 0),
    "parts": ("all", 256 // RANKS),
}
K = {"float32": 1, "bfloat16": 3}  # steps between syncs
# Another layout adds in another order; in bf16 the gradient of each pass is rounded, to 2^-9.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
MODEL, LENGTH = ("qwen2.5-1.5b", 1024) if CUDA else ("toy", 64)
# Two passes of four pairs on every rank.
STEP = f"--json --model {MODEL} --dtype bfloat16 --ranks {GPUS} --micro-batch-tokens {4 * 2 * LENGTH}"


@dataclass
class Args:
    only: tuple[str, ...] = ("",)  # beginnings of the names of rows
    limit: float = 470  # seconds for everything
    plan: str = ""  # for the check itself: a file with the runs that a process of it makes


def need(holds: bool, problem: str):
    if not holds:
        raise ValueError(problem)


def last_line(text: str) -> str:
    lines = text.strip().splitlines() or ["it said nothing"]
    return lines[-1].strip()


@dataclass
class Runs:
    folder: Path
    plan: dict[str, tuple[str, str, str]]  # {name: (process, script, flags)}
    ends: float  # when the time for everything is over, on the monotonic clock

    def logs(self, name: str) -> list[Path]:
        """Of a run, one for each rank; [] if it has not begun."""
        return sorted(self.folder.glob(f"{name}.[0-9]"))

    def launch(self, command: str, ranks: int, log: Path) -> str:
        """Runs a Python command, torchrun's if there are several ranks. Returns what went wrong, or ""."""
        words = [sys.executable]
        if ranks > 1:
            words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words += command.split()
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with log.open("w") as file:
            options = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(words, env=environment, **options)
        try:
            failed = process.wait(self.ends - time.monotonic())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        return last_line(log.read_text()) if failed else ""


def all_runs(folder: Path) -> dict[str, tuple[str, str, str]]:
    """Six steps of every script in two dtypes and layouts, stopped after three and resumed; and samples."""
    plan = {}
    for script, (toy, batch, sampling) in SCRIPTS.items():
        data = folder / f"{script}.jsonl"
        with gzip.open(ROOT / "toy" / f"{toy}_train.jsonl.gz", "rt") as file:
            rows = [next(file) for _ in range(32)]
        data.write_text("".join(rows))
        flags = f"{batch} --dataset {data} --eval-dataset {data} --warmup-fraction 0 --output-dir {folder}"
        every = 1 if script == "dpo" else 0
        for dtype, k in K.items():
            for layout, (process, tokens) in LAYOUTS.items():
                name = f"{script}-{dtype}-{layout}"
                offline = f"--dtype {dtype} --k {k} --micro-batch-tokens {tokens} --engine hf"
                offline += " --eval-samples 0 --keep-checkpoints 0 --checkpoint-every"
                whole = f"{flags}/{name} {offline} {every} --num-steps 6"
                half = f"{flags}/{name}-half {offline} 3 --num-steps 3"
                plan[name] = (process, script, whole)
                plan[f"{name}-half"] = (process, script, half)
                plan[f"{name}-again"] = ("again", script, f"--resume {folder}/{name}-half --num-steps 6")
        for engine, process in (("hf", "all"), ("vllm", f"{script}-vllm")):
            name = f"{script}-{engine}"
            online = f"{sampling} --engine {engine} --eval-samples 16 --max-new-tokens 24"
            plan[name] = (process, script, f"{flags}/{name} {online} --num-steps 3")
    return plan


def make(plan: Path):
    """In a process of several runs, on every rank: imports take longer than a run. What a run prints goes to
    a file, at last "done". A run that fails ends the process."""
    rank = os.environ.get("RANK", 0)
    for number, (log, script, flags) in enumerate(json.loads(plan.read_text())):
        # A store for each run, at a port that the system hands to nobody, the same in all ranks of torchrun.
        port = 32000 + (os.getppid() + number) % 768
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": ""}
        with (
            open(f"{log}.{rank}", "w") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
        ):
            try:
                module = load_script(script)
                module.main(parse_args(module, flags.split()))
                print("done")
            except Exception:
                traceback.print_exc()
                file.flush()
                os._exit(1)  # other ranks may wait
        gc.collect()
    os._exit(0)  # an engine could wait for something


def metrics(runs: Runs, name: str) -> list[dict]:
    """Of a run, which is made now, before all that share its process."""
    if not runs.logs(name):
        make_process(runs, name)
    texts = [log.read_text() for log in runs.logs(name)]
    if last_line(texts[0]) != "done":
        errors = [last_line(text) for text in texts if "Traceback" in text or "error: " in text]
        reason = errors[0] if errors else "it did not end"
        raise RuntimeError(f"{name}: {reason}")
    folder = runs.folder / name.replace("-again", "-half")
    steps = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        steps.append({key: value for key, value in step.items() if not key.startswith("perf/")})
    return steps


def make_process(runs: Runs, name: str):
    """Makes a run, and then those of its process that have not begun."""
    process = runs.plan[name][0]
    due = [key for key, run in runs.plan.items() if run[0] == process and not runs.logs(key)]
    due.sort(key=lambda key: key != name)
    plan = [(str(runs.folder / key), *runs.plan[key][1:]) for key in due]
    file = runs.folder / f"{process}.json"
    file.write_text(json.dumps(plan))
    ranks = RANKS if process in ("all", "again") else 1
    problem = runs.launch(f"{__file__} --plan {file}", ranks, file.with_suffix(".log"))
    need(bool(runs.logs(name)), f"{name} did not begin: {problem}")


# --- rows: each returns a figure, or raises what is wrong ---


def log_probs(runs: Runs, dtype: str) -> str:
    """token_logps and its gradient against all logits in fp64, in bf16 from the same hidden states."""
    sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=128)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    configs = [
        LlamaConfig(**sizes),
        Qwen2Config(**sizes, tie_word_embeddings=True),
        PhiConfig(**sizes),  # its head has a bias
        Gemma2Config(**sizes, head_dim=32, final_logit_softcapping=3.0),
    ]
    torch.manual_seed(0)
    examples = [utils.Example("", list(range(n)), list(range(3 * n, 9 * n))) for n in (1, 7, 30)]
    input_ids, mask = utils.pad_batch(examples, "cuda" if CUDA else "cpu")
    worst = worst_gradient = 0.0
    for config in configs:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).to(input_ids.device)
        exact = copy.deepcopy(model).double() if dtype == "float32" else model
        expected = plain_logps(exact, input_ids) * mask[:, 1:]
        logps = utils.token_logps(model, input_ids, mask)[:, 1:]
        weights = torch.rand_like(logps)
        expected_gradient = flat_gradient(exact, expected, weights)
        gradient = flat_gradient(model, logps, weights)
        difference = (gradient - expected_gradient).norm() / expected_gradient.norm()
        worst = max(worst, (logps - expected).abs().max().item())
        worst_gradient = max(worst_gradient, difference.item())
    figure = f"off by {worst:.0e} nats (at most 1e-04), "
    figure += f"gradient by {worst_gradient:.0e} (at most {TOLERANCE[dtype]:.0e})"
    need(worst < 1e-4 and worst_gradient < TOLERANCE[dtype], figure)
    return figure


def plain_logps(model, input_ids):
    """Log-probs of all tokens but the first, from all logits in fp64."""
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    head = model.get_output_embeddings()
    bias = None if head.bias is None else head.bias.double()
    logits = torch.nn.functional.linear(hidden.double(), head.weight.double(), bias)
    softcap = getattr(model.config, "final_logit_softcapping", None)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    targets = input_ids[:, 1:, None]
    return logits.log_softmax(-1).gather(2, targets)[..., 0]


def flat_gradient(model, logps, weights):
    parts = torch.autograd.grad((logps * weights).sum(), model.parameters())
    return torch.cat([part.flatten().double() for part in parts])


def same(runs: Runs, *names: str) -> str:
    """The largest relative difference in pairs of runs, where 0.1 is the least size.

    Noise that an update turns into other weights grows from step to step, so in bf16 it is the first three
    steps, between dtypes the first. There the gradient's norm is the first step's alone: later some token's
    ratio lies on the other side of 1 ± ε, where the gradient jumps.
    """
    dtypes = {name.split("-")[1] for name in names}
    allowed = max(TOLERANCE[dtype] for dtype in dtypes)
    worst = 0.0
    for first, second in zip(names[::2], names[1::2]):
        steps = list(zip(metrics(runs, first), metrics(runs, second), strict=True))
        if dtypes == {"bfloat16"}:
            steps = steps[:3]
        elif len(dtypes) > 1:
            steps = steps[:1]
        for t, (a, b) in enumerate(steps):
            keys = ["loss", "humanline/log_ratio_abs_mean"]
            if t == 0 or dtypes == {"float32"}:
                keys.append("grad_norm")
            for key in keys:
                size = max(abs(a[key]), abs(b[key]), 0.1)
                worst = max(worst, abs(a[key] - b[key]) / size)
    figure = f"loss, gradient norm and log-ratios differ by {worst:.0e} (at most {allowed:.0e})"
    need(worst < allowed, figure)
    return figure


def saved(runs: Runs, name: str, step: int) -> dict:
    """The tensors of a checkpoint."""
    file = runs.folder / "saved.pt"
    dcp_to_torch_save(runs.folder / name / "checkpoints" / f"step-{step}", file)
    return torch.load(file, map_location="cpu")


def final(runs: Runs, name: str) -> dict:
    """The tensors that the run exported."""
    return load_file(runs.folder / name / "final" / "model.safetensors")


def differing(weights: dict, others: dict) -> list[str]:
    """Names of the weights that are not the others, cast to their dtype."""
    return [name for name, weight in weights.items() if not weight.equal(others[name].to(weight.dtype))]


def sync(runs: Runs, name: str) -> str:
    """The reference is the policy of the last step that synced.

    In checkpoints bit for bit; and in the forward passes, for rewards are β times the difference of
    log-probs, and every batch has all pairs.
    """
    steps = metrics(runs, name)
    args = json.loads((runs.folder / name / "args.json").read_text())
    k, beta = args["k"], args["beta"]
    worst = 0.0
    for t in range(1, 6):
        synced = steps[(t - 1) // k * k]
        gain = steps[t]["logps/chosen"] - synced["logps/chosen"]
        worst = max(worst, abs(steps[t]["rewards/chosen"] / beta - gain))
    allowed = TOLERANCE[args["dtype"]]
    need(worst < allowed, f"it is not the policy of the last sync: rewards are off by {worst:.0e}")
    last = 5 // k * k
    names = differing(saved(runs, name, 6)["reference"], saved(runs, name, last)["policy"])
    need(not names, f"after step 5 it is not the policy of step {last}: {names}")
    return f"k = {k}: bit for bit in checkpoints, to {worst:.0e} nats in forward passes"


def resume(runs: Runs, whole: str, half: str, again: str) -> str:
    """Three steps, a checkpoint, three more from it, against six."""
    first = metrics(runs, whole)
    metrics(runs, half)
    second = metrics(runs, again)
    need(first == second, f"the last step's metrics are {second[-1]}, and not {first[-1]}")
    names = differing(final(runs, whole), final(runs, half))
    need(not names, f"the final weights differ: {names}")
    return "metrics and final weights equal bit for bit"


def export(runs: Runs, name: str) -> str:
    """final/ has the last checkpoint's weights."""
    metrics(runs, name)
    names = differing(final(runs, name), saved(runs, name, 6)["policy"])
    need(not names, f"other weights than the last checkpoint's: {names}")
    return "the last checkpoint's weights bit for bit"


def sampling(runs: Runs, name: str) -> str:
    """Rounds of samples. The script itself stops where the engine's log-probs are not the policy's."""
    steps = metrics(runs, name)
    need(len(steps) == 3 and all(step["grad_norm"] > 0 for step in steps), "a step has no gradient")
    differences = [step["rollout/logp_diff_mean"] for step in steps if "rollout/logp_diff_mean" in step]
    return f"three steps, rollout/logp_diff_mean {max(differences):.0e} nats"


def speed(runs: Runs) -> str:
    """Four steps of DPO, humanline at k = 1; and their peak against memory.py's estimate."""
    flags = f"--arms k=1 --rounds 1 --steps 4 --pairs {8 * GPUS} --length {LENGTH}"
    measured = printed(runs, f"step.py {STEP} {flags}")
    flags = f"--batch-size {8 * GPUS} --max-length {LENGTH} --max-prompt-length {LENGTH // 2}"
    estimate = printed(runs, f"memory.py {STEP} {flags}")["peak"]
    arm = measured["arms"]["k=1"]
    figure = (
        f"{MODEL}, {LENGTH} tokens: {arm['tokens_per_second']:,.0f} tokens/s, {arm['efficiency']:.1%} of "
    )
    figure += f"a matrix product's {measured['flops_per_second'] / 1e12:.2f} TFLOP/s; {arm['peak']:.2f} GiB"
    share = arm["peak"] / estimate
    if CUDA:
        figure += f", {share:.2f} of the estimate (0.80 to 1.25)"
    need(not CUDA or 0.8 < share < 1.25, figure)
    return figure


def printed(runs: Runs, command: str) -> dict:
    """What a benchmark prints with --json."""
    log = runs.folder / "log"
    problem = runs.launch(f"{ROOT}/benchmark/{command}", 1, log)
    need(not problem, problem)
    return json.loads(last_line(log.read_text()))


def all_rows() -> dict[str, tuple]:
    """{row: (function of the runs and these names, names)}; in its place a text, what the machine lacks."""
    rows = {}
    for dtype in K:
        rows[f"log-probs, {dtype}"] = (partial(log_probs, dtype=dtype), [])
        for script in SCRIPTS:
            pair = [f"{script}-{dtype}-whole", f"{script}-{dtype}-parts"]
            rows[f"{script}, {dtype}, {RANKS} ranks in parts"] = (same, pair)
        rows[f"sync, {dtype}"] = (sync, [f"dpo-{dtype}-whole"])
        name = f"dpo-{dtype}-parts"
        rows[f"resume, {dtype}"] = (resume, [name, f"{name}-half", f"{name}-again"])
    pairs = [f"{script}-{dtype}-whole" for script in ("dpo", "kto", "grpo") for dtype in K]
    rows["bfloat16 against float32"] = (same, pairs)
    rows["export"] = (export, ["dpo-float32-whole"])
    for script in SCRIPTS:
        rows[f"{script}, sampling with hf"] = (sampling, [f"{script}-hf"])
    rows["speed and memory"] = (speed, [])
    for script in SCRIPTS:
        row = sampling if find_spec("vllm") else "vLLM is not installed"
        rows[f"{script}, sampling with vllm"] = (row, [f"{script}-vllm"])
    return rows


def judge(runs: Runs, row, names: list[str]) -> tuple[str, str]:
    """ok, WRONG, not run or not here; and the figure, or what is wrong."""
    if isinstance(row, str):
        return "not here", row
    try:
        return "ok", row(runs, *names)
    except Exception as error:
        if time.monotonic() > runs.ends:
            return "not run", "the time is over; --limit, or --only this row"
        return "WRONG", last_line(str(error))


def check(args: Args, folder: Path) -> bool:
    """Prints the rows. Returns whether none is WRONG or not run."""
    rows = {name: row for name, row in all_rows().items() if name.startswith(args.only)}
    needed = {name for _, names in rows.values() for name in names}
    plan = {name: run for name, run in all_runs(folder).items() if name in needed}
    runs = Runs(folder, plan, time.monotonic() + args.limit)
    here = machine()
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    print(f"{RANKS} x {here['device']}, {versions}, commit {here['commit']}\n")
    print("| check | | | seconds |\n|---|---|---|---|", flush=True)
    verdicts = set()
    for name, (row, names) in rows.items():
        started = time.monotonic()
        verdict, text = judge(runs, row, names)
        verdicts.add(verdict)
        print(f"| {name} | {verdict} | {text} | {time.monotonic() - started:.0f} |", flush=True)
    return not verdicts & {"WRONG", "not run"}


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.plan:
        make(Path(args.plan))
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not check(args, Path(folder)))
