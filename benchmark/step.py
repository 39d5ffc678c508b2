"""How long does a training step take, how near is that to the machine's limit, and how far from TRL's trainers?

    python benchmark/step.py                                 # DPO: offline, humanline at k=1 and at k=16
    python benchmark/step.py --script kto --ranks 2 --trl    # and TRL's KTOTrainer, on two ranks each
    python benchmark/step.py --model gemma-2-27b --length 1250 --arms k=1 --gradient-checkpointing --json
    python benchmark/step.py --model MODEL --dataset DATA --max-length 1024

All flags but those of `Own` are the script's. Without --dataset: random weights in the shape of --model (a preset of
memory.py, toy, or a folder's config.json), and random words in the lengths of 16 real pairs; with it, that model and
the first rows of that data. Every step of every arm has the same batch: 16 pairs, 4 in a pass.

Every arm (step_arm.py) is a process of its own, or torchrun's, that waits before each step for this one's word: one
arm computes at a time. They take turns: a round to warm up, then --steps rounds. All stay in memory. Ours run the
script's own `main`. TRL's trainer gets the same token ids, passes, dtype and optimizer's settings; it orders and pads
the batch its own way, its z_0 (KTO) is that of a pass, and its ratio (GRPO) is to the policy itself.

efficiency: the FLOPs that the real tokens need / (seconds x ranks x FLOP/s of a matrix product in the same dtype and
    threads, measured while all arms wait, before and after the rounds; median). They need 8 for each weight of the
    decoder (2 in the policy's forward pass, 4 in its backward pass, 2 in the reference's forward pass), completion
    tokens 8 for each of the head's too; KTO 12, as if z_0's passes were as long as the batch. Weights of matrix
    products count, and all experts. Attention does not, and nothing is taken off for work that an arm can skip.
mfu, on CUDA: with 8 x layers x width x length for a token's causal attention, to the data sheet's dense bf16.
padding: 1 - real tokens / positions that the policy's decoder saw, in z_0's pass too; at least 0.
sync: the time in `sync_reference` / that of the step. GiB: a rank's peak since it began (CUDA: allocations, else
    resident memory). time, memory: relative to the first arm's, time as the median over rounds.
"""

import contextlib
import importlib
import itertools
import json
import os
import platform
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from statistics import median
from typing import Annotated, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]
from memory import read_config  # noqa: E402
from step_arm import Arm, start  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PEAK = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}  # FLOP/s
# Tokens of prompt, chosen, rejected: the first 16 pairs of LLaMA-Factory's data/dpo_en_demo.json with at most 512 in a
# sequence, by the SentencePiece tokenizer of 32,000 that mistral_common ships, and Zephyr's chat template.
LENGTHS = [40, 357, 121, 26, 440, 155, 193, 64, 150, 50, 13, 78, 162, 2, 80, 55, 386, 244, 28, 272, 33, 64, 45, 24]
LENGTHS += [35, 278, 56, 54, 62, 85, 190, 39, 111, 43, 23, 178, 105, 211, 263, 113, 46, 42, 74, 64, 115, 113, 211, 331]


@dataclass
class Own:
    script: Literal["dpo", "kto", "grpo"] = "dpo"  # <script>_humanline.py
    arms: tuple[str, ...] = ("offline", "k=1", "k=16")  # offline: --no-humanline; k=N: humanline, synced every N steps
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
    script, each = importlib.import_module(f"{own.script}_humanline"), 1 if own.script == "dpo" else 2
    defaults = {"dtype": "bfloat16", "model": "qwen2.5-1.5b"} if DEVICE == "cuda" else {"dtype": "float32"}
    defaults = {"model": "llama-26m", "warmup-fraction": 0, "batch-size": 16 * each} | defaults
    defaults["micro-batch-size"] = max(1, min(4, 16 // max(1, own.ranks))) * each
    rest = [*(f"--{name}={value}" for name, value in defaults.items()), *rest]
    args = script.parse_args(rest)
    if min(own.ranks, own.steps) < 1 or 0 < own.length < 8 or args.online or args.dtype == "auto":
        script.fail("--ranks and --steps are at least 1, --length 8; --online and --dtype auto are not for this")
    if not all(re.fullmatch(r"offline|k=[1-9]\d*", name) for name in own.arms):
        script.fail(f"--arms {' '.join(own.arms)}: they are offline or k=N")
    if own.trl and args.batch_size % (own.ranks * (args.micro_batch_size or 1)):
        script.fail("--trl: the batch must be a multiple of ranks x --micro-batch-size")
    with patch.dict(os.environ, WORLD_SIZE=str(own.ranks)):
        script.check_flags(args, args.batch_size)
    return own, args, script, rest


def make_work(own: Own, args, script, folder: Path) -> list[str]:
    """Writes a model of random weights, and pairs of random words. Returns the flags to use them."""
    config = read_config(script, "--model", args.model, args.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy" / "bouquets" / "policy")
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    del model
    torch.cuda.empty_cache()
    tokenizer.save_pretrained(folder / "model")
    words, draw = sorted(filter(str.isalpha, tokenizer.get_vocab())), random.Random(0)
    half, rows = own.length // 2, []
    lengths = itertools.cycle([half, own.length - half, own.length - half] if half else LENGTHS)
    for _ in range(args.batch_size // (1 if own.script == "dpo" else 2)):
        texts = [" ".join(draw.choices(words, k=next(lengths) - more)) for more in (3, 1, 1)]  # the template's own
        rows.append(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts))))
    (folder / "made.jsonl").write_text("\n".join(rows))
    made = [f"--model={folder}/model", f"--dataset={folder}/made.jsonl"]
    return [*made, f"--max-length={own.length or 512}", f"--max-prompt-length={own.length or 512}"]


def read_batch(own: Own, args, script, folder: Path) -> tuple:
    """Writes the rows of a batch, and their groups of `Example`s. Returns the `Example`s and the model's config."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (config, _, tokens), sizes = script.load_config(args), {"dpo": (2,), "kto": (1, 2), "grpo": range(2, 1000)}
    groups = script.load_groups(args, "--dataset", args.dataset, args.dataset_split, tokens, sizes[own.script], {})
    dist.destroy_process_group()
    if own.script == "grpo":
        size = args.group_size or len(groups[0])
        groups = [made for group in groups if (made := script.make_group(group, size, args.reward_threshold))]
    needed = args.batch_size // (1 if own.script == "dpo" else len(groups[0]))
    if len(groups) < needed:
        script.fail(f"--dataset {args.dataset}: {len(groups)} rows are left, and a batch takes {needed}")
    rows = script.load_rows("--dataset", args.dataset, args.dataset_split)
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(rows[group[0].row]) for group in groups[:needed]))
    (folder / "tokens.json").write_text(json.dumps(groups[:needed]))
    return [x for group in groups[:needed] for x in group], config


def needed_flops(config, lengths: list[int], completion_tokens: int, kto: bool) -> tuple[float, float]:
    """Of a step: without attention, and causal attention's."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head, text, each = model.get_output_embeddings().weight, config.get_text_config(), 12 if kto else 8
    parts = [part for part in model.modules() if not isinstance(part, torch.nn.Embedding)]
    weights = [p.numel() for part in parts for p in part.parameters(recurse=False) if p.ndim > 1 and p is not head]
    width = (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) * text.num_attention_heads
    attention = text.num_hidden_layers * width * sum(length**2 for length in lengths)
    return each * (sum(weights) * sum(lengths) + head.numel() * completion_tokens), each * attention


def matmul_rates(dtype: torch.dtype) -> list[float]:
    """FLOP/s of some products."""
    size, rates = 8192 if DEVICE == "cuda" else 1024, []
    a = torch.randn(size, size, device=DEVICE).to(dtype)
    for _ in range(15):
        started = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for it
        rates.append(2 * size**3 / (time.perf_counter() - started))
    return rates


def take_turns(own: Own, args, flags: list[str], folder: Path) -> tuple[list[Arm], float]:
    """All arms with their steps, the first of which warms up; and the median FLOP/s of a matrix product."""
    arms, names, dtype = [], [*own.arms, *(["TRL"] if own.trl else [])], getattr(torch, args.dtype)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/socket")
        server.listen()
        server.settimeout(1)
        try:
            for name in names:  # loading takes more memory than waiting
                arms.append(start(name, own.script, own.ranks, flags, folder, server))
            for arm in arms:
                arm.step()
            rates = matmul_rates(dtype)
            for arm in arms * own.steps:
                arm.step()
            rates += matmul_rates(dtype)
        finally:
            for file in [file for arm in arms for file in arm.files]:
                file.close()  # ends the arm
            for arm in arms:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    arm.process.wait(30)
                arm.process.kill()
    return arms, median(rates)


def measure(flags: list[str]) -> dict:
    """What --json prints. A RuntimeError says which arm failed, and why."""
    own, args, script, flags = parse(flags)
    found, threads = machine() | vars(own) | {"model": args.model}, int(os.environ.get("OMP_NUM_THREADS", 1))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if not args.dataset:
            flags += make_work(own, args, script, folder)
            args = script.parse_args(flags)
        examples, config = read_batch(own, args, script, folder)
        flags += [f"--dataset={folder}/rows.jsonl", "--eval-dataset=", "--checkpoint-every=0"]
        arms, rate = take_turns(own, args, flags, folder)
    lengths, completion = [x.length for x in examples], sum(len(x.completion_ids) for x in examples)
    flops, attention = needed_flops(config, lengths, completion, own.script == "kto")
    found |= {name: getattr(args, name) for name in ("dtype", "batch_size", "micro_batch_size")}
    found |= {"threads": threads, "tokens": sum(lengths), "completion_tokens": completion}
    found |= {"flops": flops, "flops_per_second": rate, "arms": {}}
    for arm in arms:
        steps, first = arm.steps[1:], arms[0].steps[1:]
        total = {key: sum(step[key] for step in steps) for key in ("seconds", "sync", "positions", "real", "idle")}
        seconds = [step["seconds"] for step in steps]
        speed = 1 / (median(seconds) * own.ranks)
        told = {"seconds": seconds, "tokens_per_second": sum(lengths) / median(seconds)}
        told |= {"efficiency": flops * speed / rate, "padding": max(0, 1 - total["real"] / total["positions"])}
        if DEVICE == "cuda":
            known = [peak for name, peak in PEAK.items() if name in found["device"]]
            told["mfu"] = (flops + attention) * speed / [*known, rate][0]
        told |= {"sync": total["sync"] / total["seconds"], "idle": total["idle"], "peak": steps[-1]["peak"]}
        told["time"] = median(step["seconds"] / other["seconds"] for step, other in zip(steps, first))
        told["memory"] = steps[-1]["peak"] / first[-1]["peak"]
        told |= {key: [step[key] for step in arm.steps] for key in ("loss", "grad_norm", "started", "ended")}
        found["arms"][arm.name] = told
    return found


def machine() -> dict:
    """The device, the commit, and versions."""
    device, info = platform.processor(), Path("/proc/cpuinfo")
    if DEVICE == "cuda":
        device = torch.cuda.get_device_name()
    elif info.exists() and (name := re.search(r"model name\s*: (.*)", info.read_text())):
        device = name[1]
    commit = subprocess.run("git describe --always --dirty".split(), cwd=ROOT, capture_output=True, text=True).stdout
    found = {name: packages[0] for name, packages in packages_distributions().items()}
    versions = {name: version(found[name]) for name in ("torch", "transformers", "trl", "vllm") if name in found}
    return {"device": device, "commit": commit.strip(), "versions": versions}


def show(found: dict) -> None:
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    print("{script}, {model}, {dtype}: {tokens:,} tokens, {completion_tokens:,} of completions".format(**found))
    told = "{ranks} x {threads} threads of {device}, commit {commit}".format(**found)
    print(f"{told}, {versions}; matrix product {found['flops_per_second'] / 1e9:,.0f} GFLOP/s\n")
    columns = ["efficiency", *(["mfu"] if DEVICE == "cuda" else []), "padding", "sync"]
    print(f"| | seconds (min to max) | tokens/s | {' | '.join(columns)} | GiB | time | memory |")
    print(f"|{'---|' * (6 + len(columns))}")
    for name, arm in found["arms"].items():
        name = {"offline": name, "TRL": f"TRL's {found['script'].upper()}Trainer"}.get(name, f"humanline {name}")
        cells = [name, "{:.2f} ({:.2f} to {:.2f})".format(*(f(arm["seconds"]) for f in (median, min, max)))]
        cells += [f"{arm['tokens_per_second']:,.0f}", *(f"{arm[column]:.1%}" for column in columns)]
        print(f"| {' | '.join(cells)} | {arm['peak']:.2f} | {arm['time']:.3f} | {arm['memory']:.2f} |")


def main(flags: list[str]) -> None:
    with contextlib.redirect_stdout(sys.stdout if {"-h", "--help"} & set(flags) else sys.stderr):
        try:
            found = measure(flags)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
    print(json.dumps(found)) if "--json" in flags else show(found)


if __name__ == "__main__":
    main(sys.argv[1:])
