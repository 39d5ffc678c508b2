"""Measures single parts for cuda_check.py. A row returns a figure, or raises an error that says the fault.

The model has random weights, on a GPU 1.5 billion. A pass is forward and backward of eight sequences.
"""

import contextlib
import random
import time
from statistics import median

import torch
import torch.distributed as dist
from memory import read_config
from scripts import load_script, parse_args
from transformers import AutoModelForCausalLM

import utils
from support import data, run, sampling

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
MODEL, LENGTH = ("qwen2.5-1.5b", 1024) if CUDA else ("toy", 64)
HEAD = (8192, 1536, 151_936) if CUDA else (256, 64, 10_000)  # tokens, hidden size, vocabulary
DPO = load_script("dpo")


def need(holds: bool, problem: str):
    """Raises ValueError if a condition does not hold."""
    if not holds:
        raise ValueError(problem)


def build(dtype: torch.dtype):
    """Builds a model with the attention that the scripts choose, which `chosen` names with the reasons."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in `run.setup`
    config = read_config(DPO, "--model", MODEL, False)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.chosen = utils.choose_attention(model, LENGTH)
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


# === Attention ===
def attention() -> str:
    """Compares the attention that the scripts choose in bf16 with slower ones, and with fp32 and padding."""
    names = ["sdpa", "loop", "varlen"] if CUDA else ["sdpa", "loop"]
    batches = draw_batches(6)
    model = build(torch.bfloat16)
    exact = build(torch.float32)
    exact.load_state_dict(model.state_dict())
    exact.set_attn_implementation("sdpa")  # with padding, as in transformers
    expected = run_pass(exact, batches[-1])
    need(model.chosen == names[-1], f"{model.chosen}, and not {names[-1]}")
    times = {}
    off = {}  # log-probs, nats, and gradients
    figure = f"{model.chosen} is chosen"
    for name in names:
        model.set_attn_implementation(name)
        times[name], results = run_passes(model, batches)
        off[name] = nats, error = compare(results, expected)
        figure += f"; {name} {times[name]:.3f} s, {nats:.0e} nats off"
        need(nats < 1.5 * off["sdpa"][0] and error < 1.5 * off["sdpa"][1], f"they are off by {off}")
    need(not CUDA or times["varlen"] < 1.1 * times["loop"], figure)
    return figure


def plans() -> str:
    """Compares the loop with and without cuDNN's attention, which compiles a plan for most new lengths."""
    model = build(torch.bfloat16)
    model.set_attn_implementation("loop")
    times = {}
    for on in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(on)
        times[on], _ = run_passes(model, draw_batches(5))
    figure = f"loop {times[False]:.3f} s a pass, with cuDNN's attention {times[True]:.3f} s"
    need(times[False] < 1.1 * times[True], figure)
    return figure


# === The process ===
@contextlib.contextmanager
def started_script(*flags):
    """Starts DPO on the toy, in the default dtype of this machine, and loads its models."""
    args = parse_args(DPO, ["--dtype", "auto", *flags])
    _, _, device = run.setup(args, args.batch_size)
    policy, reference = DPO.load_models(args, device, longest=64)
    yield args, device, policy, reference
    dist.destroy_process_group()


def process_state(policy) -> dict:
    """Returns the settings that vLLM could change, and the error of RoPE's cosines at 4,096 positions."""
    state = {"products in": torch.get_float32_matmul_precision()}
    if CUDA:
        state["cuDNN's attention"] = torch.backends.cuda.cudnn_sdp_enabled()
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        state["expandable segments"] = settings["expandable_segments"]
    rope = policy.base_model.rotary_emb
    positions = torch.arange(4096, device=policy.device)
    found, _ = rope(torch.zeros(1, device=policy.device), positions[None])
    cosines = torch.outer(positions.double(), rope.inv_freq.double()).cos()
    error = (found[0, :, : cosines.shape[1]] - cosines).abs().max().item()
    state["RoPE off by"] = f"{error:.0e}"  # with TF32: 1
    need(error < 1e-3, str(state))
    return state


def precision() -> str:
    """Checks that products are in full fp32, and the settings of a GPU."""
    with started_script() as (_, _, policy, _):
        state = process_state(policy)
    expected = ["highest", False, True]  # without a GPU only the first
    need(list(state.values())[:-1] == expected[: len(state) - 1], str(state))
    return ", ".join(f"{name} {value}" for name, value in state.items())


@torch.no_grad()
def sync() -> str:
    """Checks that after a sync the reference's next pass is the policy's."""
    with started_script() as (_, _, policy, reference):
        for weight in policy.parameters():
            weight.to_local().mul_(1.1)  # changes log-probs by about 1
        DPO.sync_reference(reference, policy)
        ours, theirs = (utils.token_logps(model, *draw_batches(1)[0]) for model in (policy, reference))
        nats = (ours - theirs).abs().max().item()
    need(nats < 1e-3, f"the reference is {nats:.0e} nats off the policy")
    return f"the reference is {nats:.0e} nats off the policy"


def engine() -> str:
    """Checks that vLLM changes no setting, sleeps without memory, and wakes with the policy's weights."""
    with started_script("--engine", "vllm", "--max-new-tokens", "24") as (args, device, policy, _):
        tokenizer, eos_ids = data.load_tokenizer(args)
        prompts = [utils.Example("rose", data.encode(tokenizer, eos_ids, "rose")[0])] * 16
        sampler = sampling.Sampler(args, tokenizer, eos_ids, device, longest=64)
        before = process_state(policy)
        start = used()
        sampler.sample(policy, prompts, 1, (1, 0))  # raises if the engine has another model
        asleep = used() - start
        if CUDA:
            sampler.engine.llm.wake_up()
            awake = used() - start
            sampler.engine.llm.sleep(level=2)
        _, metrics = sampler.sample(policy, prompts, 1, (1, 1))
        again = used() - start
        after = process_state(policy)
    need(after == before, f"{after}, and before vLLM {before}")
    figure = f"all as before, {metrics['rollout/logp_diff_mean']:.0e} nats off"
    if CUDA:
        figure += f"; awake {awake:.1f} GiB, asleep {asleep:.1f}, again {again:.1f}"
        need(max(asleep, again) < 0.4 * awake, figure)
    return figure


def used() -> float:
    """Returns the used memory of the GPU in GiB."""
    if not CUDA:
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


# === Head, launches, compiled blocks, memory ===
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
    seconds = {}
    results = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        factors = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        timed(run_head, targets, *factors)
        seconds[name], results[name] = timed(run_head, targets, *factors)
    nats, error = compare(results["bf16"], results["fp32"])
    figure = ", ".join(f"{name} {1000 * time:.0f} ms" for name, time in seconds.items())
    figure += f"; bf16 off fp32 by {nats:.0e} nats, its gradients by {error:.0e}"
    need(nats < 1e-4 and error < 1e-2, figure)
    need(not CUDA or seconds["bf16"] < 1.1 * seconds["fp32"], figure)
    return figure


def launches() -> str:
    """Counts the kernels (on a CPU: operators) of a pass, and measures the time until all are launched."""
    model = build(torch.bfloat16 if CUDA else torch.float32)
    batch = draw_batches(1)[0]
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
    need(count > 0, "the profiler has seen none")
    return f"{count:,} in a pass of {seconds:.3f} s, of which the CPU launches for {host:.3f} s"


def compiled() -> str:
    """Checks that blocks with --compile give the same, and are not compiled again for other lengths."""
    model = build(torch.bfloat16 if CUDA else torch.float32)
    batches = draw_batches(10)
    plain_seconds, plain = run_passes(model, batches)
    for block in DPO.decoder_blocks(model):
        block.compile(dynamic=True)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    run_passes(model, batches[:2])
    graphs = counters["unique_graphs"]
    seconds, results = run_passes(model, batches)
    again = counters["unique_graphs"] - graphs
    nats, error = compare(results, plain)
    figure = f"{seconds:.3f} s a pass, without {plain_seconds:.3f}; {graphs} graphs, then "
    figure += f"{again} more; {nats:.0e} nats apart, gradients {error:.0e}"
    allowed = 2e-2 if CUDA else 1e-4
    need(graphs > 0 and again == 0 and nats < allowed and error < 5 * allowed, figure)
    return figure


def segments() -> str:
    """Compares the reserved memory for passes of different lengths, with and without growing segments."""
    model = build(torch.bfloat16)
    held = []
    for setting in ("False", "True"):
        model.zero_grad()
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{setting}")
        torch.cuda.reset_peak_memory_stats()
        run_passes(model, draw_batches(10))
        held.append(torch.cuda.max_memory_reserved() / 2**30)
    needed = torch.cuda.max_memory_allocated() / 2**30
    figure = f"{held[1]:.2f} GiB reserved for {needed:.2f}, with fixed segments {held[0]:.2f}"
    need(held[1] < 1.02 * held[0], figure)
    return figure
