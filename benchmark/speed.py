"""Tokens per second, MFU and peak memory of DPO steps, on a model of random weights.

    python benchmark/speed.py                                  # Qwen2.5-1.5B's shape, on all GPUs
    python benchmark/speed.py --hidden 64 --layers 2 --heads 2 --intermediate 192 --vocab 512 --length 64

MFU: tokens/s x FLOPs per token / (GPUs x peak FLOP/s). FLOPs per token: 8 for each weight of the decoder (2 in the
policy's forward pass, 4 in its backward pass, 2 in the reference's forward pass), the head's for completion tokens
only, and 8 x layers x hidden size x length for causal attention. What is computed a second time does not count. The
peak is the data sheet's in dense bf16, or else that of a matrix product measured here.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

ROOT = Path(__file__).resolve().parents[1]
PEAK = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}


@dataclass
class Args:
    hidden: int = 1536  # hidden size of a Qwen2 with a tied head
    layers: int = 28  # decoder blocks
    heads: int = 12  # of attention
    kv_heads: int = 2  # of keys and values
    intermediate: int = 8960  # size of the feed-forward layers
    vocab: int = 151936  # rows of the embedding
    length: int = 1024  # tokens of a sequence, half of them completion
    micro_batch_size: int = 4  # pairs per pass of one rank; a step takes two passes
    steps: int = 6  # optimizer steps; the first two are not timed
    ranks: int = 0  # processes; 0: one for each GPU


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


def flops_per_token(args: Args, weights: int) -> float:
    """Of a training step, for a model of so many weights, those of the tied head included."""
    head = args.hidden * args.vocab
    return 8 * (weights - head) + 8 * head / 2 + 8 * args.layers * args.hidden * args.length


def peak_flops(device: torch.device) -> float:
    """FLOP/s in dense bf16."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    if known := [peak for key, peak in PEAK.items() if key in name]:
        return known[0]
    size, seconds = 8192 if device.type == "cuda" else 512, []
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(5):
        started = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for it
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def measure(args: Args, folder: Path, seconds: float = 600) -> dict:
    """{tokens_per_second, mfu, peak: GiB of a rank, flags: for memory.py}. `folder` gets model, pairs and run. A
    RuntimeError says what went wrong."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = args.ranks or max(1, torch.cuda.device_count())
    sizes = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "intermediate_size": args.intermediate}
    sizes |= {"num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads, "vocab_size": args.vocab}
    with device:
        model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes, tie_word_embeddings=True), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    flops = flops_per_token(args, sum(parameter.numel() for parameter in model.parameters()))
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()

    tokenizer, half = AutoTokenizer.from_pretrained(ROOT / "toy" / "bouquets" / "policy"), args.length // 2
    tokenizer.save_pretrained(folder / "model")
    words, rows = sorted(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)), []
    for _ in range(2 * ranks * args.micro_batch_size):  # the template adds three tokens to a prompt
        texts = [" ".join(random.choices(words, k=k)) for k in (half - 3, args.length, args.length)]
        rows.append(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts))))
    (folder / "pairs.jsonl").write_text("\n".join(rows))

    flags = f"--model {folder}/model --dtype bfloat16 --max-length {args.length} --max-prompt-length {half}"
    flags += f" --batch-size {len(rows)} --micro-batch-size {args.micro_batch_size}"
    run = f"--dataset {folder}/pairs.jsonl --output-dir {folder}/run --num-steps {args.steps} --checkpoint-every 0"
    if wrong := launch(f"{ROOT}/dpo_humanline.py {flags} {run}", ranks, folder / "run.log", seconds):
        raise RuntimeError(wrong)
    steps = list(map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()))
    speed = median(step["perf/tokens_per_second"] for step in steps[2:])
    found = {"tokens_per_second": speed, "mfu": speed * flops / (ranks * peak_flops(device))}
    return found | {"peak": steps[-1]["perf/peak_memory"], "flags": f"{flags} --ranks {ranks}"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(measure(tyro.cli(Args, description=__doc__), Path(folder)))
