"""What to run first on a new machine, above all on its first GPU: is everything right there, and how fast is it?

    python benchmark/cuda_check.py                          # on all GPUs; without one on the CPU, with two processes
    python benchmark/cuda_check.py --only sync speed        # rows whose names begin so

Prints a table, in under eight minutes. Exit code 1 if a row is WRONG; "not here" is what the machine lacks. Most rows
read short runs of the scripts on the toys. Runs share processes, and a row's seconds are those of all it waited for.
"""

import contextlib
import copy
import gc
import gzip
import importlib
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
from step import ROOT, machine
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, LlamaConfig, PhiConfig, Qwen2Config

sys.path.insert(0, str(ROOT))
import utils  # noqa: E402

LIMIT, LONGEST = 470, 200  # seconds, for everything and for one process
CUDA = torch.cuda.is_available()
RANKS = max(n for n in (1, 2, 4, 8) if n <= (torch.cuda.device_count() if CUDA else 2))
SCRIPTS = {  # the toy's data, a step's batch, sampling
    "dpo": ("bouquets/preferences", "--batch-size 32 --beta 1", "--online --round-prompts 32"),
    "kto": ("tales/preferences", "--batch-size 16", "--online --round-prompts 16"),
    "grpo": ("tales/preferences", "--batch-size 16", "--online --round-prompts 16"),
    "grpo_math": ("shell_game/problems", "--prompts-per-step 4 --group-size 4", "--sample-every 2"),
}
K = {"float32": 1, "bfloat16": 3}  # steps between syncs
# Another layout adds the same numbers in another order; in bf16 each microbatch's gradient is rounded too, to 2^-9.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
GPUS = torch.cuda.device_count() or 1
MODEL, LENGTH = ("qwen2.5-1.5b", 1024) if CUDA else ("toy", 64)
STEP = f"--script dpo --model {MODEL} --dtype bfloat16 --ranks {GPUS} --batch-size {8 * GPUS} --micro-batch-size 4"


@dataclass
class Args:
    only: tuple[str, ...] = ("",)  # beginnings of the names of rows
    plan: str = ""  # for the check itself: a file with the runs that a process of it makes


def need(holds: bool, told: str) -> None:
    if not holds:
        raise ValueError(told)


# --- runs ---


def launch(command: str, ranks: int, log: Path, seconds: float) -> str:
    """Runs a Python command, under torchrun if there are several ranks. Returns what went wrong, or ""."""
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} " if ranks > 1 else ""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        how = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *f"{torchrun}{command}".split()], **how)
        try:
            return last_line(log.read_text()) if process.wait(max(1, seconds)) else ""
        except subprocess.TimeoutExpired:
            return f"no end after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks too


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


@dataclass
class Runs:
    folder: Path
    plan: dict[str, tuple[str, str, str]]  # {name: (process, script, flags)}
    deadline: float = field(default_factory=lambda: time.monotonic() + LIMIT)

    def seconds(self) -> float:
        """That a process may take now."""
        return min(LONGEST, self.deadline - time.monotonic())


def all_runs(folder: Path) -> dict[str, tuple[str, str, str]]:
    """Six steps of every script in two dtypes and three layouts; the same stopped after three and resumed; and three
    steps with samples."""
    plan = {}
    for script, (toy, batch, sampled) in SCRIPTS.items():
        data = folder / f"{script}.jsonl"
        with gzip.open(ROOT / "toy" / f"{toy}_train.jsonl.gz", "rt") as file:
            data.write_text("".join(next(file) for _ in range(32)))
        flags = f"{batch} --dataset {data} --eval-dataset {data} --warmup-fraction 0 --output-dir {folder}"
        for dtype, k in K.items():
            for layout, process, size in (("whole", "one", 0), ("parts", "one", 4), ("ranks", "all", 8 // RANKS)):
                name, again = f"{script}-{dtype}-{layout}", "again" if process == "one" else process
                offline = f"--dtype {dtype} --k {k} --micro-batch-size {size} --engine hf --eval-samples 0"
                offline += " --keep-checkpoints 0 --checkpoint-every"
                plan[name] = process, script, f"{flags}/{name} {offline} {int(script == 'dpo')} --num-steps 6"
                plan[f"{name}-half"] = process, script, f"{flags}/{name}-half {offline} 3 --num-steps 3"
                plan[f"{name}-again"] = again, script, f"--resume {folder}/{name}-half --num-steps 6"
        for engine, process in (("hf", "all"), ("vllm", f"{script}-vllm")):
            name, online = f"{script}-{engine}", f"{sampled} --engine {engine} --eval-samples 16 --max-new-tokens 24"
            plan[name] = process, script, f"{flags}/{name} {online} --num-steps 3"
    return plan


def make(plan: Path) -> None:
    """In a process of several runs, on every rank: imports take longer than a run. What a run prints goes to a file,
    at last "done". A run that fails ends the process."""
    for number, (log, script, flags) in enumerate(json.loads(plan.read_text())):
        # A store for each run, at a port that the system hands to nobody, the same in all children of torchrun.
        os.environ |= {"MASTER_PORT": f"{32000 + (os.getppid() + number) % 768}", "TORCHELASTIC_USE_AGENT_STORE": ""}
        torch.set_float32_matmul_precision("highest")  # what a process begins with
        with open(f"{log}.{os.environ.get('RANK', 0)}", "w") as file:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                try:
                    module = importlib.import_module(f"{script}_humanline")
                    module.main(module.parse_args(flags.split()))
                    print("done")
                except Exception:
                    traceback.print_exc()
                    file.flush()
                    os._exit(1)  # other ranks may wait
        gc.collect()
    os._exit(0)  # an engine could wait for something


def metrics(runs: Runs, name: str) -> list[dict]:
    """Of a run, which is made now, before all that share its process. A RuntimeError says what ended it."""
    (process, *_), logs = runs.plan[name], lambda key: sorted(runs.folder.glob(f"{key}.[0-9]"))
    if not logs(name):
        due = [key for key in runs.plan if runs.plan[key][0] == process and not logs(key)]
        plan = [(str(runs.folder / key), *runs.plan[key][1:]) for key in sorted(due, key=lambda key: key != name)]
        file, ranks = runs.folder / f"{process}.json", RANKS if process == "all" else 1
        file.write_text(json.dumps(plan))
        wrong = launch(f"{__file__} --plan {file}", ranks, file.with_suffix(".log"), runs.seconds())
        need(bool(logs(name)), f"{name} did not begin: {wrong}")
    said = [file.read_text() for file in logs(name)]
    if last_line(said[0]) != "done":
        wrong = [last_line(text) for text in said if "Traceback" in text or "error: " in text]
        raise RuntimeError(f"{name}: {[*wrong, 'it did not end'][0]}")
    lines = (runs.folder / name.replace("-again", "-half") / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in lines]


# --- rows: each returns a figure, or raises what is wrong ---


def log_probs(runs: Runs, dtype: str) -> str:
    """token_logps and its gradient against log_softmax of all logits in fp64, in bf16 from the same hidden states."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    configs = [LlamaConfig(**sizes), Qwen2Config(**sizes, tie_word_embeddings=True), PhiConfig(**sizes)]  # Phi: a bias
    configs += [Gemma2Config(**sizes, head_dim=32, final_logit_softcapping=3.0)]
    torch.set_float32_matmul_precision("high" if dtype == "bfloat16" else "highest")  # as the scripts do
    torch.manual_seed(0)
    examples = [utils.Example(0, "", list(range(n)), list(range(3 * n, 9 * n))) for n in (1, 7, 30)]
    input_ids, mask = utils.pad_batch(examples, 0, torch.device("cuda" if CUDA else "cpu"))
    largest = off = 0.0
    for config in configs:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).to(input_ids.device)
        exact = copy.deepcopy(model).double() if dtype == "float32" else model
        hidden = exact.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1].double()
        head, softcap = exact.get_output_embeddings(), getattr(config, "final_logit_softcapping", None)
        bias = None if head.bias is None else head.bias.double()
        logits = torch.nn.functional.linear(hidden, head.weight.double(), bias)
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        wanted = logits.log_softmax(-1).gather(2, input_ids[:, 1:, None])[..., 0] * mask[:, 1:]
        found = utils.token_logps(model, input_ids, mask)[:, 1:]
        weights, flat = torch.rand_like(found), []
        for side, logps in ((model, found), (exact, wanted)):
            parts = torch.autograd.grad((logps * weights).sum(), side.parameters())
            flat.append(torch.cat([part.flatten().double() for part in parts]))
        largest = max(largest, (found - wanted).abs().max().item())
        off = max(off, ((flat[0] - flat[1]).norm() / flat[1].norm()).item())
    told = f"off by {largest:.0e} nats (at most 1e-04), gradient by {off:.0e} (at most {TOLERANCE[dtype]:.0e})"
    need(largest < 1e-4 and off < TOLERANCE[dtype], told)
    return told


def same(runs: Runs, *names: str) -> str:
    """The largest relative difference of loss, gradient norm and log-ratios in pairs of runs, where 0.1 is the least
    size; between dtypes in the first step alone, after which each goes its own way."""
    worst, dtypes = 0.0, {name.split("-")[1] for name in names}
    allowed = max(TOLERANCE[dtype] for dtype in dtypes)
    for first, second in zip(names[::2], names[1::2]):
        steps = list(zip(metrics(runs, first), metrics(runs, second), strict=True))
        for a, b in steps if len(dtypes) == 1 else steps[:1]:
            for key in ("loss", "grad_norm", "humanline/log_ratio_abs_mean"):
                worst = max(worst, abs(a[key] - b[key]) / max(abs(a[key]), abs(b[key]), 0.1))
    told = f"loss, gradient norm and log-ratios differ by {worst:.0e} (at most {allowed:.0e})"
    need(worst < allowed, told)
    return told


def saved(runs: Runs, name: str, step: int) -> dict:
    dcp_to_torch_save(runs.folder / name / "checkpoints" / f"step-{step}", file := runs.folder / "saved.pt")
    return torch.load(file, map_location="cpu")


def sync(runs: Runs, name: str) -> str:
    """The reference is the policy of the last step that synced: in checkpoints bit for bit, and in the forward passes,
    for rewards are β times the difference of log-probs, and every batch has all pairs."""
    steps, args, worst = metrics(runs, name), json.loads((runs.folder / name / "args.json").read_text()), 0.0
    k, last = args["k"], 5 // args["k"] * args["k"]
    for t in range(1, 6):
        gain = steps[t]["logps/chosen"] - steps[(t - 1) // k * k]["logps/chosen"]
        worst = max(worst, abs(steps[t]["rewards/chosen"] / args["beta"] - gain))
    need(worst < TOLERANCE[args["dtype"]], f"it is not the policy of the last sync: rewards are off by {worst:.0e}")
    reference, policy = saved(runs, name, 6)["reference"], saved(runs, name, last)["policy"]
    differ = [key for key in reference if not torch.equal(reference[key], policy[key].to(reference[key].dtype))]
    need(not differ, f"after step 5 it is not the policy of step {last}: {differ}")
    return f"k = {k}: bit for bit in checkpoints, to {worst:.0e} nats in forward passes"


def resume(runs: Runs, whole: str, half: str, again: str) -> str:
    """Three steps, a checkpoint, three more from it, against six."""
    first, _, second = (metrics(runs, name) for name in (whole, half, again))
    off = max(abs(a[key] - b[key]) for a, b in zip(first, second, strict=True) for key in a)
    need(first == second, f"metrics differ by {off:.0e}")
    finals = [sorted((runs.folder / name / "final").glob("*.safetensors")) for name in (whole, half)]
    first, second = ([file.read_bytes() for file in files] for files in finals)
    need(first == second, "the final weights differ")
    return "metrics and final weights equal bit for bit"


def export(runs: Runs, name: str) -> str:
    """final/ has the last checkpoint's weights, and to transformers alone the margin that the run's evaluation had."""
    start, folder = metrics(runs, name)[0], runs.folder / name
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer, policy = AutoTokenizer.from_pretrained(folder / "final"), saved(runs, name, 6)["policy"]
    differ = [key for key, value in model.state_dict().items() if not torch.equal(value, policy[key].to(value.dtype))]
    need(not differ, f"other weights than the last checkpoint's: {differ}")
    margin = start["logps/rejected"] - start["logps/chosen"]
    for row in map(json.loads, (runs.folder / "dpo.jsonl").read_text().splitlines()):
        for side, sign in (("chosen", 1), ("rejected", -1)):
            turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
            text = tokenizer.apply_chat_template(turns, tokenize=False)
            ids, cut = tokenizer(text, return_tensors="pt").input_ids, len(tokenizer(prompt).input_ids)
            with torch.no_grad():
                logps = model(ids).logits[0, cut - 1 : -1].log_softmax(-1)
            margin += sign * logps.gather(1, ids[0, cut:, None]).sum().item() / 32
    args, summary = (json.loads((folder / file).read_text()) for file in ("args.json", "summary.json"))
    evaluated = summary["after"]["eval/margin"][0] / args["beta"]
    need(abs(margin - evaluated) < 1e-3, f"its margin is {margin:.4f} nats, and was {evaluated:.4f}")
    return f"weights bit for bit, margin {evaluated:.3f} nats to {abs(margin - evaluated):.0e}"


def sampling(runs: Runs, name: str) -> str:
    """Rounds of samples. The script itself stops where the engine's log-probs are not the policy's."""
    steps = metrics(runs, name)
    need(len(steps) == 3 and all(step["grad_norm"] > 0 for step in steps), "a step has no gradient")
    off = max(step["rollout/logp_diff_mean"] for step in steps)
    return f"three steps, rollout/logp_diff_mean {off:.0e} nats"


def step_time(runs: Runs) -> str:
    """Four steps of DPO, humanline at k = 1, with two passes of four pairs on every rank."""
    log, steps = runs.folder / "step.log", f"{ROOT}/benchmark/step.py --json --arms k=1 --steps 4 --length {LENGTH}"
    wrong = launch(f"{steps} {STEP}", 1, log, runs.seconds())
    need(not wrong, wrong)
    found = json.loads(last_line(log.read_text()))["arms"]["k=1"]
    (runs.folder / "step.json").write_text(json.dumps(found))
    limit = f"MFU {found['mfu']:.1%}" if CUDA else f"efficiency {found['efficiency']:.1%}"
    return f"{MODEL}, {LENGTH} tokens: {found['tokens_per_second']:,.0f} tokens/s, {limit}"


def memory(runs: Runs) -> str:
    """The peak that step_time met, against memory.py's estimate."""
    need((runs.folder / "step.json").exists(), "the row speed has met no peak")
    found, log = json.loads((runs.folder / "step.json").read_text()), runs.folder / "memory.log"
    limits = f"--max-length {LENGTH} --max-prompt-length {LENGTH // 2}"
    wrong = launch(f"{ROOT}/benchmark/memory.py --json {STEP} {limits}", 1, log, runs.seconds())
    need(not wrong, wrong)
    estimate = json.loads(last_line(log.read_text()))["peak"]
    if not CUDA:
        return f"{found['peak']:.2f} GiB resident, {estimate:.2f} GiB estimated for a GPU; not compared"
    told = f"{found['peak']:.2f} GiB, {found['peak'] / estimate:.2f} of the estimate (0.80 to 1.25)"
    need(0.8 < found["peak"] / estimate < 1.25, told)
    return told


def all_rows() -> dict[str, tuple]:
    """{name: (function of the runs and these names, names)}; text in place of a function is what the machine lacks."""
    rows, many = {}, f"{RANKS} ranks" if RANKS > 1 else "more ranks"
    for dtype in K:
        runs = [[f"{script}-{dtype}-{layout}" for layout in ("whole", "parts", "ranks")] for script in SCRIPTS]
        rows[f"log-probs, {dtype}"] = partial(log_probs, dtype=dtype), []
        for script, (whole, parts, _) in zip(SCRIPTS, runs):
            rows[f"{script}, {dtype}, microbatches"] = same, [whole, parts]
        rows[f"all scripts, {dtype}, {many}"] = same, [run[i] for run in runs for i in (0, 2)]
        rows[f"sync, {dtype}"] = sync, runs[0][:1]
        name = runs[0][2 if dtype == "bfloat16" and RANKS > 1 else 0]
        rows[f"resume, {dtype}"] = resume, [name, f"{name}-half", f"{name}-again"]
    rows["bfloat16 against float32"] = same, [f"{s}-{dtype}-whole" for s in ("dpo", "kto", "grpo") for dtype in K]
    rows["export"] = export, ["dpo-float32-whole"]
    rows |= {f"{script}, sampling with hf": (sampling, [f"{script}-hf"]) for script in SCRIPTS}
    rows |= {"speed": (step_time, []), "memory": (memory, [])}
    rows |= {f"{script}, sampling with vllm": (sampling, [f"{script}-vllm"]) for script in SCRIPTS}
    for name in rows:
        if name.endswith("more ranks") or name.endswith("vllm") and not find_spec("vllm"):
            rows[name] = "it needs 2 GPUs" if name.endswith("ranks") else "vLLM is not installed", []
    return rows


def check(args: Args, folder: Path) -> bool:
    """Prints the rows. Returns whether none is WRONG."""
    rows = {name: row for name, row in all_rows().items() if name.startswith(args.only)}
    plan = {name: run for name, run in all_runs(folder).items() if any(name in names for _, names in rows.values())}
    runs, wrong = Runs(folder, plan), 0
    here = machine()
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    print(f"{RANKS} x {here['device']}, {versions}, commit {here['commit']}\n")
    print("| check | | | seconds |\n|---|---|---|---|", flush=True)
    for name, (row, names) in rows.items():
        started = time.monotonic()
        try:
            verdict, told = ("not here", row) if isinstance(row, str) else ("ok", row(runs, *names))
        except Exception as error:
            verdict, told, wrong = "WRONG", last_line(str(error)), wrong + 1
        print(f"| {name} | {verdict} | {told} | {time.monotonic() - started:.0f} |", flush=True)
    return not wrong


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.plan:
        make(Path(args.plan))
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not check(args, Path(folder)))
