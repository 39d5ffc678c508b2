"""Checks a new machine, above all its first GPU: is everything right, and how fast is it?

    python -m tools.cuda_check                      # on 1, 2, 4 or 8 GPUs, or two processes on the CPU
    python -m tools.cuda_check --only sync head     # rows whose names begin with sync or head

Prints a table for docs/performance.md. The exit status is 1 if a row is WRONG. A row measures one part in
this process, or compares short runs of a script on its toy. The model of the parts has random weights, on a
GPU 1.5 billion. A pass is forward and backward of eight sequences.
"""

import gzip
import random
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import tyro
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import utils
from support import run
from tools.scripts import ROOT, describe_machine, launch, load_script, parse_args, read_config

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
RANKS = max(n for n in (1, 2, 4, 8) if n <= (torch.cuda.device_count() if CUDA else 2))
MODEL, LENGTH = ("qwen2.5-1.5b", 1024) if CUDA else (f"{ROOT}/toy/bouquets/policy", 64)
HEAD = (8192, 1536, 151_936) if CUDA else (256, 64, 10_000)  # tokens, hidden size, vocabulary
DPO = load_script("dpo")
SCRIPTS = {  # {script: flags of a step's batch}
    "dpo": "--batch-size 32 --beta 1",
    "kto": "--batch-size 16",
    "grpo": "--batch-size 16",
    "grpo_math": "--prompts-per-step 4 --group-size 4 --sample-every 2",
}
# Another layout sums in another order. In bf16 the gradient of each micro-batch is rounded to 2^-9.
TOLERANCE = 2e-2 if CUDA else 1e-4


# === Parts ===
def build(dtype: torch.dtype):
    """Builds a model with the attention that the scripts choose, which `chosen` names with the reasons."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in `run.setup`
    with DEVICE:
        model = AutoModelForCausalLM.from_config(read_config(MODEL), dtype=dtype)
    model.chosen = utils.choose_attention(model, LENGTH, dtype)
    return model


def draw_batches(count: int) -> list[tuple]:
    """Returns batches of random tokens, (input_ids, mask) each."""
    draw = random.Random(0)
    examples = []
    for _ in range(8 * count):
        ids = draw.choices(range(5, 30), k=draw.randrange(LENGTH // 4, LENGTH))
        examples.append(utils.Example("", ids[:3], ids[3:]))
    return [utils.pad_batch(examples[i::count], DEVICE) for i in range(count)]


def timed(function, *args) -> tuple:
    """Calls a function. Returns its seconds and the tensors that it returns."""
    started = time.perf_counter()
    tensors = function(*args)
    tensors[-1].sum().item()  # waits for the GPU
    return time.perf_counter() - started, tensors


def run_pass(model, batch: tuple) -> list:
    """Makes a pass. Returns the log-probs and all gradients."""
    model.zero_grad()
    logps = utils.token_logps(model, *batch)
    logps.sum().backward()
    return [logps.detach(), *[parameter.grad for parameter in model.parameters()]]


def run_passes(model, batches: list[tuple]) -> tuple:
    """Makes passes. Returns the median of their seconds without the first, and the results of the last."""
    seconds = []
    for batch in batches:
        time_of_pass, results = timed(run_pass, model, batch)
        seconds.append(time_of_pass)
    return median(seconds[1:]), results


def compare(results: list, others: list) -> tuple[float, float]:
    """Returns the mean difference of log-probs in nats, and the relative difference of all gradients."""
    nats = (results[0] - others[0]).abs().mean().item()
    off = sum((a - b).double().square().sum() for a, b in zip(results[1:], others[1:], strict=True))
    all_of_it = sum(gradient.double().square().sum() for gradient in others[1:])
    return nats, (off / all_of_it).sqrt().item()


def attention() -> str:
    """Compares the attention that the scripts choose in bf16 with slower ones, and with fp32 and padding."""
    names = ["sdpa", "loop", "varlen"] if CUDA else ["sdpa", "loop"]
    batches = draw_batches(6)
    model, exact = build(torch.bfloat16), build(torch.float32)
    exact.load_state_dict(model.state_dict())
    exact.set_attn_implementation("sdpa")  # with padding, as in transformers
    expected = run_pass(exact, batches[-1])
    assert model.chosen == names[-1], f"{model.chosen}, and not {names[-1]}"
    off = {}  # log-probs, nats, and gradients
    figure = f"{model.chosen} is chosen"
    for name in names:
        model.set_attn_implementation(name)
        seconds, results = run_passes(model, batches)
        off[name] = nats, error = compare(results, expected)
        figure += f"; {name} {seconds:.3f} s, {nats:.0e} nats off"
        assert nats < 1.5 * off["sdpa"][0] and error < 1.5 * off["sdpa"][1], f"they are off by {off}"
    return figure


def precision() -> str:
    """Checks that products are in full fp32, and that RoPE's cosines are right at 4,096 positions."""
    with_script(lambda *_: None)
    assert torch.get_float32_matmul_precision() == "highest", "products are not in full fp32"
    rope = build(DTYPE).base_model.rotary_emb
    positions = torch.arange(4096, device=DEVICE)
    found, _ = rope(torch.zeros(1, device=DEVICE), positions[None])
    cosines = torch.outer(positions.double(), rope.inv_freq.double()).cos()
    error = (found[0, :, : cosines.shape[1]] - cosines).abs().max().item()
    assert error < 1e-3, f"RoPE is off by {error:.0e}"  # with TF32: 1
    return f"products in full fp32, RoPE off by {error:.0e}"


def with_script(function):
    """Starts DPO on the toy in this process, and calls a function with its policy and its reference."""
    args = parse_args(DPO, ["--dtype", "auto"])
    _, _, device = run.setup(args)
    try:
        return function(*DPO.load_models(args, device))
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def off_after_a_sync(policy, reference) -> float:
    """Returns how far the reference's next pass is from the policy's after a sync, in nats."""
    for weight in policy.parameters():
        weight.to_local().mul_(1.1)  # changes log-probs by about 1
    DPO.sync_reference(reference, policy)
    (batch,) = draw_batches(1)
    ours, theirs = (utils.token_logps(model, *batch) for model in (policy, reference))
    return (ours - theirs).abs().max().item()


def sync() -> str:
    nats = with_script(off_after_a_sync)
    assert nats < 1e-3, f"the reference is {nats:.0e} nats off the policy"
    return f"the reference is {nats:.0e} nats off the policy"


def run_head(targets, hidden, weight) -> list:
    """Returns the log-probs, and the gradients of both factors."""
    logps = utils.HeadLogps.apply(hidden, targets, weight, None, None, 1.0)
    return [logps.detach(), *torch.autograd.grad(logps.sum(), [hidden, weight])]


def head() -> str:
    """Compares factors in bf16, whose products a GPU sums in fp32, with factors in fp32."""
    N, D, V = HEAD
    torch.manual_seed(0)
    hidden = torch.randn(N, D, device=DEVICE).bfloat16()
    weight = (torch.randn(V, D, device=DEVICE) / D**0.5).bfloat16()
    targets = torch.randint(V, (N,), device=DEVICE)
    seconds, results = {}, {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        factors = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        timed(run_head, targets, *factors)
        seconds[name], results[name] = timed(run_head, targets, *factors)
    nats, error = compare(results["bf16"], results["fp32"])
    figure = ", ".join(f"{name} {1000 * time:.0f} ms" for name, time in seconds.items())
    figure += f"; bf16 off fp32 by {nats:.0e} nats, its gradients by {error:.0e}"
    assert nats < 1e-4 and error < 1e-2, figure
    return figure


def launches() -> str:
    """Counts the kernels (on a CPU: operators) of a pass, and measures the time until all are launched."""
    model, (batch,) = build(DTYPE), draw_batches(1)
    run_pass(model, batch)
    started = time.perf_counter()
    results = run_pass(model, batch)
    host = time.perf_counter() - started
    results[-1].sum().item()  # waits for the GPU
    seconds = time.perf_counter() - started
    with torch.profiler.profile() as profile:
        run_pass(model, batch)
    word = "LaunchKernel" if CUDA else "aten::"
    count = sum(event.count for event in profile.key_averages() if word in event.key)
    return f"{count:,} in a pass of {seconds:.3f} s, of which the CPU launches for {host:.3f} s"


def compiled() -> str:
    """Checks that blocks with --compile give the same, and are not compiled again for other lengths."""
    model, batches = build(DTYPE), draw_batches(10)
    plain_seconds, plain = run_passes(model, batches)
    for block in run.decoder_blocks(model):
        block.forward = torch.compile(block.forward, dynamic=True)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    run_passes(model, batches[:2])
    graphs = counters["unique_graphs"]
    seconds, results = run_passes(model, batches)
    again = counters["unique_graphs"] - graphs
    nats, error = compare(results, plain)
    figure = f"{seconds:.3f} s a pass, without {plain_seconds:.3f}; {graphs} graphs, then {again} more; "
    figure += f"{nats:.0e} nats apart, gradients {error:.0e}"
    assert graphs > 0 and again == 0 and nats < TOLERANCE and error < 5 * TOLERANCE, figure
    return figure


# === Runs of the scripts ===
def start(script: str, flags: str, folder: Path, ranks: int) -> list[dict]:
    """Runs a script. Returns the metrics of all steps, without times."""
    steps = launch(ranks, [f"{ROOT}/{script}_humanline.py", *flags.split()], folder)
    return [{key: step[key] for key in step if not key.startswith("perf/")} for step in steps]


def flags_of(script: str, folder: Path) -> str:
    """Returns the flags of six steps on the toy's first rows."""
    rows = folder / f"{script}.jsonl"
    with gzip.open(load_script(script).TOY["dataset"], "rt") as file:
        rows.write_text("".join(next(file) for _ in range(32)))
    flags = f"{SCRIPTS[script]} --dataset {rows} --eval-dataset {rows} --warmup-fraction 0 --engine hf"
    dtype = str(DTYPE).removeprefix("torch.")
    return f"{flags} --eval-samples 0 --dtype {dtype} --k 2 --checkpoint-every 3 --num-steps 6"


def same(script: str, folder: Path) -> str:
    """Compares the first three steps of one process with those of all ranks in parts.

    Differences are relative to the larger number, at least 0.1. Later the ratio of a token may be on the
    other side of 1 ± ε, where the gradient jumps.
    """
    flags = flags_of(script, folder)
    whole = start(script, f"{flags} --output-dir {folder}/{script}", folder / script, 1)
    parts = folder / f"{script}-parts"
    size = f"--micro-batch-tokens {256 // RANKS} --output-dir {parts}"
    worst = 0.0
    for a, b in list(zip(whole, start(script, f"{flags} {size}", parts, RANKS), strict=True))[:3]:
        for key in ("loss", "humanline/log_ratio_abs_mean", "grad_norm"):
            if key != "grad_norm" or a["step"] == 0:
                worst = max(worst, abs(a[key] - b[key]) / max(abs(a[key]), abs(b[key]), 0.1))
    figure = f"loss, gradient norm and log-ratios differ by {worst:.0e} (at most {TOLERANCE:.0e})"
    assert worst < TOLERANCE, figure
    return figure


def resume(folder: Path) -> str:
    """Compares a run of six steps with one that ended after three and was resumed, on all ranks."""
    flags = flags_of("dpo", folder)
    whole = start("dpo", f"{flags} --output-dir {folder}/whole", folder / "whole", RANKS)
    half = folder / "half"
    start("dpo", f"{flags} --num-steps 3 --output-dir {half}", half, RANKS)
    again = start("dpo", f"--resume {half} --num-steps 6", half, RANKS)
    assert whole == again, f"the last step's metrics are {again[-1]}, and not {whole[-1]}"
    weights, others = (load_file(folder / name / "final/model.safetensors") for name in ("whole", "half"))
    names = [name for name in weights if not weights[name].equal(others[name])]
    assert not names, f"the final weights differ: {names}"
    return "metrics and final weights equal bit for bit"


def online(folder: Path) -> str:
    """Runs DPO with vLLM. The script itself compares the engine's log-probs with the policy's."""
    flags = "--online --round-prompts 32 --batch-size 16 --num-steps 3 --eval-samples 16 --max-new-tokens 24"
    steps = start("dpo", f"{flags} --engine vllm --output-dir {folder}/online", folder / "online", 1)
    nats = [step["rollout/logp_diff_mean"] for step in steps if "rollout/round" in step]
    return f"{len(nats)} rounds of samples, {max(nats):.0e} nats off"


def main(only: tuple[str, ...] = ("",)):
    """Prints the table.

    Args:
        only: only rows whose names begin with one of these words.
    """
    rows = {"precision": precision, "sync": sync, "attention in bf16": attention, "head in bf16": head}
    rows |= {"launches": launches, "compile": compiled}
    print(f"{RANKS} x {describe_machine()}\n\n| check | | | seconds |\n|---|---|---|---|")
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for script in SCRIPTS:
            rows[f"{script}, {RANKS} ranks in parts"] = partial(same, script, folder)
        rows["resume"] = partial(resume, folder)
        if find_spec("vllm"):
            rows["vLLM, DPO online"] = partial(online, folder)
        for name, row in rows.items():
            if name.startswith(only):
                started = time.monotonic()
                try:
                    verdict, text = "ok", row()
                except (Exception, utils.InputError) as error:
                    verdict, text, wrong = "WRONG", " ".join(str(error).split()), 1
                print(f"| {name} | {verdict} | {text} | {time.monotonic() - started:.0f} |", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
