"""What to run first on a new machine, above all on its first GPU: is all right there, and how fast is it?

    python benchmark/cuda_check.py                      # on all GPUs; without one on the CPU, two processes
    python benchmark/cuda_check.py --only sync speed    # rows whose names begin so

Prints a table, in under eight minutes (--limit). "not here" is what the machine lacks. Exit code 1 if a row
is WRONG, or "not run" because the time was over. Most rows read short runs of the scripts on the toys. Runs
share processes, and a row's seconds are those of all it waited for.
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
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
import tyro
from scripts import ROOT, load_script, parse_args
from step import machine
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
)

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
    "parts": ("one", 128),
    "ranks": ("all", 256 // RANKS),
}
K = {"float32": 1, "bfloat16": 3}  # steps between syncs
# Another layout adds the same numbers in another order; in bf16 the gradient of each pass is rounded, to
# 2^-9.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
MODEL, LENGTH = ("qwen2.5-1.5b", 1024) if CUDA else ("toy", 64)
# Two passes of four pairs on every rank.
STEP = f"--script dpo --model {MODEL} --dtype bfloat16 --ranks {GPUS} --batch-size {8 * GPUS}"
STEP += f" --micro-batch-tokens {4 * 2 * LENGTH}"


@dataclass
class Args:
    only: tuple[str, ...] = ("",)  # beginnings of the names of rows
    limit: float = 470  # seconds for everything; a process that takes half of them hangs
    plan: str = ""  # for the check itself: a file with the runs that a process of it makes


class OutOfTime(Exception):
    pass


def need(holds: bool, problem: str):
    if not holds:
        raise ValueError(problem)


# --- runs ---


@dataclass
class Runs:
    folder: Path
    plan: dict[str, tuple[str, str, str]]  # {name: (process, script, flags)}
    limit: float  # seconds for everything
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """That are left."""
        return self.started + self.limit - time.monotonic()

    def logs(self, name: str) -> list[Path]:
        """Of a run, one for each rank; [] if it has not begun."""
        return sorted(self.folder.glob(f"{name}.[0-9]"))

    def launch(self, command: str, ranks: int, log: Path) -> str:
        """Runs a Python command, under torchrun if there are several ranks. Returns what went wrong, or "".

        Raises OutOfTime if the time for everything is over first.
        """
        longest = self.limit / 2
        seconds = min(longest, self.seconds())
        if seconds < 1:
            raise OutOfTime
        words = [sys.executable]
        if ranks > 1:
            words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words += command.split()
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with log.open("w") as file:
            process = subprocess.Popen(
                words,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                failed = process.wait(seconds)
            except subprocess.TimeoutExpired:
                if seconds < longest:
                    raise OutOfTime from None
                return f"no end after {seconds:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        return last_line(log.read_text()) if failed else ""


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def all_runs(folder: Path) -> dict[str, tuple[str, str, str]]:
    """Six steps of every script in two dtypes and three layouts, the same stopped after three and resumed;
    and three steps with samples."""
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
                offline = (
                    f"--dtype {dtype} --k {k} --micro-batch-tokens {tokens} --engine hf --eval-samples 0"
                )
                offline += " --keep-checkpoints 0 --checkpoint-every"
                whole = f"{flags}/{name} {offline} {every} --num-steps 6"
                half = f"{flags}/{name}-half {offline} 3 --num-steps 3"
                plan[name] = (process, script, whole)
                plan[f"{name}-half"] = (process, script, half)
                again = "again" if process == "one" else process
                plan[f"{name}-again"] = (again, script, f"--resume {folder}/{name}-half --num-steps 6")
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
        torch.set_float32_matmul_precision("highest")  # what a process begins with
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
    """Of a run, which is made now, before all that share its process. A RuntimeError says what ended it."""
    if not runs.logs(name):
        make_process(runs, name)
    texts = [log.read_text() for log in runs.logs(name)]
    if last_line(texts[0]) != "done":
        errors = [last_line(text) for text in texts if "Traceback" in text or "error: " in text]
        if not errors and runs.seconds() < 1:
            raise OutOfTime
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
    due = [name]
    for key, run in runs.plan.items():
        if run[0] == process and key != name and not runs.logs(key):
            due.append(key)
    plan = []
    for key in due:
        _, script, flags = runs.plan[key]
        plan.append((str(runs.folder / key), script, flags))
    file = runs.folder / f"{process}.json"
    file.write_text(json.dumps(plan))
    ranks = RANKS if process == "all" else 1
    problem = runs.launch(f"{__file__} --plan {file}", ranks, file.with_suffix(".log"))
    need(bool(runs.logs(name)), f"{name} did not begin: {problem}")


# --- rows: each returns a figure, or raises what is wrong ---


def log_probs(runs: Runs, dtype: str) -> str:
    """token_logps and its gradient against all logits in fp64, in bf16 from the same hidden states."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    configs = [
        LlamaConfig(**sizes),
        Qwen2Config(**sizes, tie_word_embeddings=True),
        PhiConfig(**sizes),  # its head has a bias
        Gemma2Config(**sizes, head_dim=32, final_logit_softcapping=3.0),
    ]
    precision = "high" if dtype == "bfloat16" else "highest"  # as the scripts do
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(0)
    examples = []
    for n in (1, 7, 30):
        examples.append(utils.Example(0, "", list(range(n)), list(range(3 * n, 9 * n))))
    device = torch.device("cuda") if CUDA else torch.device("cpu")
    input_ids, mask = utils.pad_batch(examples, 0, device)
    worst = worst_gradient = 0.0
    for config in configs:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).to(device)
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
    """The largest relative difference of loss, gradient norm and log-ratios in pairs of runs, where 0.1 is
    the least size.

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


def differing(weights: dict, others: dict) -> list[str]:
    """Names of the weights that are not the others, cast to their dtype."""
    names = []
    for name, weight in weights.items():
        if not torch.equal(weight, others[name].to(weight.dtype)):
            names.append(name)
    return names


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
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        for key in a:
            worst = max(worst, abs(a[key] - b[key]))
    need(first == second, f"metrics differ by {worst:.0e}")
    need(final_bytes(runs, whole) == final_bytes(runs, half), "the final weights differ")
    return "metrics and final weights equal bit for bit"


def final_bytes(runs: Runs, name: str) -> list[bytes]:
    files = sorted((runs.folder / name / "final").glob("*.safetensors"))
    return [file.read_bytes() for file in files]


def export(runs: Runs, name: str) -> str:
    """final/ has the last checkpoint's weights, and to transformers alone the run's own margin."""
    start = metrics(runs, name)[0]
    folder = runs.folder / name
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    names = differing(model.state_dict(), saved(runs, name, 6)["policy"])
    need(not names, f"other weights than the last checkpoint's: {names}")
    margins = []
    for line in (runs.folder / "dpo.jsonl").read_text().splitlines():
        row = json.loads(line)
        chosen = completion_logp(model, tokenizer, row["prompt"], row["chosen"])
        rejected = completion_logp(model, tokenizer, row["prompt"], row["rejected"])
        margins.append(chosen - rejected)
    initial = start["logps/chosen"] - start["logps/rejected"]
    margin = sum(margins) / len(margins) - initial
    args = json.loads((folder / "args.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    evaluated = summary["after"]["eval/margin"][0] / args["beta"]
    difference = abs(margin - evaluated)
    need(difference < 1e-3, f"its margin is {margin:.4f} nats, and was {evaluated:.4f}")
    return f"weights bit for bit, margin {evaluated:.3f} nats to {difference:.0e}"


@torch.no_grad()
def completion_logp(model, tokenizer, prompt: str, completion: str) -> float:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    before = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(text, return_tensors="pt").input_ids
    first = len(tokenizer(before).input_ids)
    logps = model(ids).logits[0, first - 1 : -1].log_softmax(-1)
    return logps.gather(1, ids[0, first:, None]).sum().item()


def sampling(runs: Runs, name: str) -> str:
    """Rounds of samples. The script itself stops where the engine's log-probs are not the policy's."""
    steps = metrics(runs, name)
    need(len(steps) == 3 and all(step["grad_norm"] > 0 for step in steps), "a step has no gradient")
    worst = max(step["rollout/logp_diff_mean"] for step in steps)
    return f"three steps, rollout/logp_diff_mean {worst:.0e} nats"


def step_time(runs: Runs) -> str:
    """Four steps of DPO, humanline at k = 1."""
    log = runs.folder / "step.log"
    flags = f"--json --arms k=1 --steps 4 --length {LENGTH} {STEP}"
    problem = runs.launch(f"{ROOT}/benchmark/step.py {flags}", 1, log)
    need(not problem, problem)
    arm = json.loads(last_line(log.read_text()))["arms"]["k=1"]
    (runs.folder / "step.json").write_text(json.dumps(arm))
    limit = f"MFU {arm['mfu']:.1%}" if CUDA else f"efficiency {arm['efficiency']:.1%}"
    return f"{MODEL}, {LENGTH} tokens: {arm['tokens_per_second']:,.0f} tokens/s, {limit}"


def memory(runs: Runs) -> str:
    """The peak that step_time met, against memory.py's estimate."""
    measured = runs.folder / "step.json"
    if not measured.exists() and runs.seconds() < 1:
        raise OutOfTime
    need(measured.exists(), "the row speed has met no peak")
    peak = json.loads(measured.read_text())["peak"]
    log = runs.folder / "memory.log"
    flags = f"--json {STEP} --max-length {LENGTH} --max-prompt-length {LENGTH // 2}"
    problem = runs.launch(f"{ROOT}/benchmark/memory.py {flags}", 1, log)
    need(not problem, problem)
    estimate = json.loads(last_line(log.read_text()))["peak"]
    if not CUDA:
        return f"{peak:.2f} GiB resident, {estimate:.2f} GiB estimated for a GPU; not compared"
    figure = f"{peak:.2f} GiB, {peak / estimate:.2f} of the estimate (0.80 to 1.25)"
    need(0.8 < peak / estimate < 1.25, figure)
    return figure


def all_rows() -> dict[str, tuple]:
    """{name: (function of the runs and these names, names)}; in its place a text, what the machine lacks."""
    rows = {}
    ranks = f"{RANKS} ranks" if RANKS > 1 else "more ranks"
    for dtype in K:
        rows[f"log-probs, {dtype}"] = (partial(log_probs, dtype=dtype), [])
        pairs = []  # one rank, several
        for script in SCRIPTS:
            whole = f"{script}-{dtype}-whole"
            pairs += [whole, f"{script}-{dtype}-ranks"]
            rows[f"{script}, {dtype}, microbatches"] = (same, [whole, f"{script}-{dtype}-parts"])
        rows[f"all scripts, {dtype}, {ranks}"] = (same, pairs)
        rows[f"sync, {dtype}"] = (sync, [f"dpo-{dtype}-whole"])
        layout = "ranks" if dtype == "bfloat16" and RANKS > 1 else "whole"
        name = f"dpo-{dtype}-{layout}"
        rows[f"resume, {dtype}"] = (resume, [name, f"{name}-half", f"{name}-again"])
    pairs = []
    for script in ("dpo", "kto", "grpo"):
        pairs += [f"{script}-{dtype}-whole" for dtype in K]
    rows["bfloat16 against float32"] = (same, pairs)
    rows["export"] = (export, ["dpo-float32-whole"])
    for script in SCRIPTS:
        rows[f"{script}, sampling with hf"] = (sampling, [f"{script}-hf"])
    rows["speed"] = (step_time, [])
    rows["memory"] = (memory, [])
    for script in SCRIPTS:
        rows[f"{script}, sampling with vllm"] = (sampling, [f"{script}-vllm"])
    for name in rows:
        if name.endswith("more ranks"):
            rows[name] = ("it needs 2 GPUs", [])
        elif name.endswith("vllm") and not find_spec("vllm"):
            rows[name] = ("vLLM is not installed", [])
    return rows


def check(args: Args, folder: Path) -> bool:
    """Prints the rows. Returns whether none is WRONG or not run."""
    rows = {name: row for name, row in all_rows().items() if name.startswith(args.only)}
    needed = set()
    for _, names in rows.values():
        needed |= set(names)
    plan = {name: run for name, run in all_runs(folder).items() if name in needed}
    runs = Runs(folder, plan, args.limit)
    here = machine()
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    print(f"{RANKS} x {here['device']}, {versions}, commit {here['commit']}\n")
    print("| check | | | seconds |\n|---|---|---|---|", flush=True)
    failed = False
    for name, (row, names) in rows.items():
        started = time.monotonic()
        if isinstance(row, str):
            verdict, text = "not here", row
        else:
            verdict, text = judge(runs, name, row, names)
        failed = failed or verdict in ("WRONG", "not run")
        print(f"| {name} | {verdict} | {text} | {time.monotonic() - started:.0f} |", flush=True)
    return not failed


def judge(runs: Runs, name: str, row, names: list[str]) -> tuple[str, str]:
    """ok, WRONG or not run; and the figure, or what is wrong."""
    try:
        return "ok", row(runs, *names)
    except OutOfTime:
        return "not run", f"{runs.limit:.0f} seconds are over; --limit, or --only '{name}'"
    except Exception as error:
        return "WRONG", last_line(str(error))


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.plan:
        make(Path(args.plan))
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not check(args, Path(folder)))
