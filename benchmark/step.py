"""How long does a training step take, how near is that to the machine's limit, how far from TRL's trainers?

    python benchmark/step.py                                 # DPO: offline, humanline at k=1 and at k=16
    python benchmark/step.py --script kto --ranks 2 --trl    # and TRL's KTOTrainer, on two ranks each
    python benchmark/step.py --arms k=1 --against ../old     # and the same arm of another checkout
    python benchmark/step.py --model gemma-2-27b --length 1250 --arms k=1 --gradient-checkpointing --json
    python benchmark/step.py --model MODEL --dataset DATA --max-length 1024

All flags but those of `Own` are the script's. Without --dataset: random weights in the shape of --model (a
preset of memory.py, toy, or a folder's config.json), and random words in the lengths of 16 real pairs; with
it, that model and the first rows of that data. Every step of every arm has the same batch: 16 pairs, 4 in a
pass (--micro-batch-tokens 0, the default here: as many tokens as that takes).

Every arm (step_arm.py) is a process of its own, or torchrun's, that waits before each step for this one's
word: one arm computes at a time. They take turns: a round to warm up, then --steps rounds. All stay in
memory. Ours run the script's own `main`. --against DIR: arms of DIR, by its own step_arm.py, each right after
the same arm of this checkout. TRL's trainer gets the same token ids, as many passes, the same dtype and
optimizer's settings; it orders and pads the batch its own way, its z_0 (KTO) is that of a pass, and its ratio
(GRPO) is to the policy itself.

efficiency: the FLOPs that the real tokens need / (seconds x ranks x FLOP/s of a matrix product in the same
    dtype and threads, measured while all arms wait, before and after the rounds; median). They need 8 for
    each weight of the decoder (2 in the policy's forward pass, 4 in its backward pass, 2 in the reference's
    forward pass), completion tokens 8 for each of the head's too; KTO 12, as if z_0's passes were as long as
    the batch. Weights of matrix products count, and all experts. Attention does not, and nothing is taken off
    for work that an arm can skip.
mfu, on CUDA: with 8 x layers x width x length for a token's causal attention, to the data sheet's dense bf16.
padding: 1 - real tokens / positions that the policy's decoder saw, in z_0's pass too; at least 0.
sync: the time in `sync_reference` / that of the step. GiB: a rank's peak since it began (CUDA: allocations,
    else resident memory). time, memory: relative to the first arm's, time as the median over rounds.
"""

import contextlib
import itertools
import json
import math
import os
import platform
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.metadata import packages_distributions, version
from pathlib import Path
from statistics import median
from typing import Annotated, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from memory import read_config  # noqa: E402
from scripts import ROOT, load_script, parse_args  # noqa: E402
from step_arm import Arm, start  # noqa: E402

import utils  # noqa: E402
from run import check_flags, fail  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PEAK = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}  # FLOP/s
# Tokens of prompt, chosen, rejected: the first 16 pairs of LLaMA-Factory's data/dpo_en_demo.json with at most
# 512 in a sequence, by the SentencePiece tokenizer of 32,000 that mistral_common ships, and Zephyr's chat
# template.
LENGTHS = """
40 357 121  26 440 155  193 64 150  50 13 78  162 2 80  55 386 244  28 272 33  64 45 24
35 278 56  54 62 85  190 39 111  43 23 178  105 211 263  113 46 42  74 64 115  113 211 331
"""
LENGTHS = [int(length) for length in LENGTHS.split()]


@dataclass
class Own:
    script: Literal["dpo", "kto", "grpo"] = "dpo"  # <script>_humanline.py
    arms: tuple[str, ...] = ("offline", "k=1", "k=16")  # --no-humanline; humanline, synced every N steps
    against: str = ""  # folder of another checkout, whose arms run too
    trl: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # and TRL's trainer
    ranks: int = torch.cuda.device_count() or 1  # processes of an arm
    steps: int = 5  # timed steps of an arm
    length: int = 0  # tokens of every sequence, half of them prompt; 0: the real pairs'
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # print one JSON object


def parse(flags: list[str]):
    """Our flags; the script's, checked as in a run; the script; and what to start it with."""
    own, rest = tyro.cli(Own, args=flags, add_help=False, return_unknown_args=True)
    if {"-h", "--help"} & set(rest):
        with contextlib.suppress(SystemExit):
            tyro.cli(Own, args=["--help"], description=__doc__)
    script = load_script(own.script)
    defaults = {
        "model": "llama-26m",
        "dtype": "float32",
        "warmup-fraction": 0,
        "batch-size": 16 * sequences_per_item(own),
        "micro-batch-tokens": 0,
    }
    if DEVICE == "cuda":
        defaults |= {"model": "qwen2.5-1.5b", "dtype": "bfloat16"}
    flags = [f"--{name}={value}" for name, value in defaults.items()] + rest
    args = parse_args(script, flags)
    if min(own.ranks, own.steps) < 1 or 0 < own.length < 8 or args.online or args.dtype == "auto":
        fail("--ranks and --steps are at least 1, --length 8; --online and --dtype auto are not for this")
    for name in own.arms:
        if not re.fullmatch(r"offline|k=[1-9]\d*", name):
            fail(f"--arms {' '.join(own.arms)}: they are offline or k=N")
    if own.against and not (Path(own.against) / "benchmark" / "step_arm.py").exists():
        fail(f"--against {own.against}: it has no benchmark/step_arm.py")
    with patch.dict(os.environ, WORLD_SIZE=str(own.ranks)):
        check_flags(replace(args, dataset="any"), args.batch_size)  # without one the work is made up
    return own, args, script, flags


def sequences_per_item(own: Own) -> int:
    """--batch-size counts pairs in DPO, else sequences: how many of them is a pair?"""
    return 1 if own.script == "dpo" else 2


def make_work(own: Own, args, script, folder: Path) -> list[str]:
    """Writes a model of random weights, and pairs of random words. Returns the flags to use them."""
    config = read_config(script, "--model", args.model, args.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy" / "bouquets" / "policy")
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    del model
    torch.cuda.empty_cache()
    tokenizer.save_pretrained(folder / "model")

    words = sorted(filter(str.isalpha, tokenizer.get_vocab()))
    draw = random.Random(0)
    half = own.length // 2
    lengths = LENGTHS
    if half:
        lengths = [half, own.length - half, own.length - half]
    lengths = itertools.cycle(lengths)
    rows = []
    for _ in range(args.batch_size // sequences_per_item(own)):
        row = {}
        for column, added in (("prompt", 3), ("chosen", 1), ("rejected", 1)):  # by the chat template
            count = next(lengths) - added
            row[column] = " ".join(draw.choices(words, k=count))
        rows.append(json.dumps(row))
    (folder / "made.jsonl").write_text("\n".join(rows))
    longest = own.length or 512
    return [
        f"--model={folder}/model",
        f"--dataset={folder}/made.jsonl",
        f"--max-length={longest}",
        f"--max-prompt-length={longest}",
    ]


def read_batch(own: Own, args, script, folder: Path) -> tuple[list, object]:
    """Writes the rows of a batch. Returns their groups of `Example`s, and the model's config."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config, _, tokens = script.load_config(args)
    sizes = {"dpo": (2,), "kto": (1, 2), "grpo": range(2, 1000)}[own.script]
    groups, _ = script.load_groups(args, "--dataset", args.dataset, args.dataset_split, tokens, sizes)
    dist.destroy_process_group()
    if own.script == "grpo":
        script.resolve_group_size(args, len(groups[0]))
        candidates = [script.make_group(args, group) for group in groups]
        groups = [group for group in candidates if group]
    needed = args.batch_size
    if own.script != "dpo":
        needed = args.batch_size // len(groups[0])
    if len(groups) < needed:
        fail(f"--dataset {args.dataset}: {len(groups)} rows are left, and a batch takes {needed}")
    groups = groups[:needed]
    rows = script.load_rows("--dataset", args.dataset, args.dataset_split)
    lines = [json.dumps(rows[group[0].row]) for group in groups]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return groups, config


def cut_batch(own: Own, args, groups: list) -> tuple[int, int]:
    """Most tokens of a pass, and the passes of a step on all ranks together."""
    lengths = []
    for group in groups:
        lengths += [x.length for x in group]
    if own.script == "dpo":  # pairs stay together
        lengths = [chosen.length + rejected.length for chosen, rejected in groups]
    pairs = args.batch_size / sequences_per_item(own)
    share = sum(lengths) / math.ceil(pairs / 4)
    tokens = args.micro_batch_tokens or math.ceil(1.05 * share)  # passes cannot be quite even
    passes = utils.make_passes(lengths, own.ranks, tokens)
    return tokens, len(passes)


def needed_flops(config, lengths: list[int], completion_tokens: int, kto: bool) -> tuple[float, float]:
    """Of a step: without attention, and causal attention's."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings().weight
    weights = 0  # of the decoder's matrix products
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim > 1 and parameter is not head:
                weights += parameter.numel()
    text = config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = head_size * text.num_attention_heads
    squares = sum(length**2 for length in lengths)
    attention = text.num_hidden_layers * width * squares
    each = 12 if kto else 8
    products = weights * sum(lengths) + head.numel() * completion_tokens
    return each * products, each * attention


def matmul_rates(dtype: torch.dtype) -> list[float]:
    """FLOP/s of some products."""
    size = 8192 if DEVICE == "cuda" else 1024
    a = torch.randn(size, size, device=DEVICE).to(dtype)
    rates = []
    for _ in range(15):
        started = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for it
        rates.append(2 * size**3 / (time.perf_counter() - started))
    return rates


def take_turns(own: Own, args, flags: list[str], folder: Path) -> tuple[list[Arm], float]:
    """All arms with their steps, the first of which warms up; and the median FLOP/s of a matrix product."""
    order = []  # name, kind, checkout
    for kind in own.arms:
        order.append((kind, kind, ROOT))
        if own.against:
            order.append((f"{kind} in {own.against}", kind, Path(own.against).resolve()))
    if own.trl:
        order.append(("TRL", "TRL", ROOT))
    dtype = getattr(torch, args.dtype)
    arms = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/socket")
        server.listen()
        server.settimeout(1)
        try:
            for number, (name, kind, root) in enumerate(order):  # loading takes more memory than waiting
                arms.append(start(name, kind, root, own, flags, folder / str(number), server))
            for arm in arms:
                arm.step()
            rates = matmul_rates(dtype)
            for _ in range(own.steps):
                for arm in arms:
                    arm.step()
            rates += matmul_rates(dtype)
        finally:
            for arm in arms:
                for file in arm.files:
                    file.close()  # ends the arm
            for arm in arms:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    arm.process.wait(30)
                arm.process.kill()
    return arms, median(rates)


def measure(flags: list[str]) -> dict:
    """What --json prints. A RuntimeError says which arm failed, and why."""
    own, args, script, flags = parse(flags)
    threads = int(os.environ.get("OMP_NUM_THREADS", 1))
    torch.set_num_threads(threads)
    result = machine() | vars(own) | {"model": args.model, "threads": threads}
    if own.against:
        result["against_commit"] = describe_commit(Path(own.against))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not args.dataset:
            flags += make_work(own, args, script, folder)
            args = parse_args(script, flags)
        groups, config = read_batch(own, args, script, folder)
        pass_tokens, passes = cut_batch(own, args, groups)
        if own.trl and args.batch_size % passes:
            fail(f"--trl: a batch of {args.batch_size} in {passes} equal passes? See --micro-batch-tokens")
        saved = {"pass_size": args.batch_size // passes, "groups": groups}
        (folder / "tokens.json").write_text(json.dumps(saved))
        flags += [f"--dataset={folder}/rows.jsonl", "--eval-dataset=", "--checkpoint-every=0"]
        flags += [f"--micro-batch-tokens={pass_tokens}"]
        arms, rate = take_turns(own, args, flags, folder)
    lengths, completion_tokens = [], 0
    for group in groups:
        lengths += [x.length for x in group]
        completion_tokens += sum(len(x.completion_ids) for x in group)
    flops, attention = needed_flops(config, lengths, completion_tokens, own.script == "kto")
    result |= {
        "dtype": args.dtype,
        "batch_size": args.batch_size,
        "micro_batch_tokens": pass_tokens,
        "passes": passes,
        "tokens": sum(lengths),
        "completion_tokens": completion_tokens,
        "flops": flops,
        "flops_per_second": rate,
        "arms": {},
    }
    for arm in arms:
        row = summarize(arm, arms[0])
        steps_per_second = 1 / median(row["seconds"]) / own.ranks
        row["tokens_per_second"] = sum(lengths) / median(row["seconds"])
        row["efficiency"] = flops * steps_per_second / rate
        if DEVICE == "cuda":
            known = [peak for device, peak in PEAK.items() if device in result["device"]]
            limit = known[0] if known else rate
            row["mfu"] = (flops + attention) * steps_per_second / limit
        result["arms"][arm.name] = row
    return result


def summarize(arm: Arm, first: Arm) -> dict:
    """Of the timed steps; time and memory relative to the first arm's. Losses and times of all steps."""
    steps = arm.steps[1:]
    first_steps = first.steps[1:]
    seconds = [step["seconds"] for step in steps]
    positions = sum(step["positions"] for step in steps)
    real = sum(step["real"] for step in steps)
    ratios = []
    for step, other in zip(steps, first_steps, strict=True):
        ratios.append(step["seconds"] / other["seconds"])
    row = {
        "seconds": seconds,
        "padding": max(0, 1 - real / positions),
        "sync": sum(step["sync"] for step in steps) / sum(seconds),
        "idle": sum(step["idle"] for step in steps),
        "peak": steps[-1]["peak"],
        "time": median(ratios),
        "memory": steps[-1]["peak"] / first_steps[-1]["peak"],
    }
    for key in ("loss", "grad_norm", "started", "ended"):
        row[key] = [step[key] for step in arm.steps]
    return row


def machine() -> dict:
    """The device, the commit, and versions."""
    device = platform.processor()
    info = Path("/proc/cpuinfo")
    if DEVICE == "cuda":
        device = torch.cuda.get_device_name()
    elif info.exists():
        names = re.findall(r"model name\s*: (.*)", info.read_text())
        if names:
            device = names[0]
    packages = packages_distributions()
    versions = {}
    for name in ("torch", "transformers", "trl", "vllm"):
        if name in packages:
            versions[name] = version(packages[name][0])
    return {"device": device, "commit": describe_commit(ROOT), "versions": versions}


def describe_commit(root: Path) -> str:
    """The commit of a checkout, "" if it is none."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()


def show(result: dict):
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    print(
        "{script}, {model}, {dtype}: {tokens:,} tokens, {completion_tokens:,} of completions".format(**result)
    )
    where = "{ranks} x {threads} threads of {device}, commit {commit}".format(**result)
    if result["against"]:
        where += " against {against_commit}".format(**result)
    print(f"{where}, {versions}; matrix product {result['flops_per_second'] / 1e9:,.0f} GFLOP/s\n")
    shares = ["efficiency", "padding", "sync"]
    if DEVICE == "cuda":
        shares.insert(1, "mfu")
    print(f"| | seconds (min to max) | tokens/s | {' | '.join(shares)} | GiB | time | memory |")
    print(f"|{'---|' * (6 + len(shares))}")
    for name, arm in result["arms"].items():
        if name == "TRL":
            name = f"TRL's {result['script'].upper()}Trainer"
        elif name.startswith("k="):
            name = f"humanline {name}"
        seconds = arm["seconds"]
        cells = [name, f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"]
        cells.append(f"{arm['tokens_per_second']:,.0f}")
        cells += [f"{arm[share]:.1%}" for share in shares]
        cells += [f"{arm['peak']:.2f}", f"{arm['time']:.3f}", f"{arm['memory']:.2f}"]
        print(f"| {' | '.join(cells)} |")


def main(flags: list[str]):
    wants_help = {"-h", "--help"} & set(flags)
    output = sys.stdout if wants_help else sys.stderr
    with contextlib.redirect_stdout(output):
        try:
            result = measure(flags)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
    if "--json" in flags:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main(sys.argv[1:])
