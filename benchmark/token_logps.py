"""Time and peak memory of `token_logps` against the textbook log-softmax of full logits: forward and backward.

    python benchmark/token_logps.py                  # V 32,000, 8 sequences of 450 tokens, on the CPU or the first GPU
    python benchmark/token_logps.py --vocab 128256 --hidden 1024

Each side runs in a process of its own. On the CPU the peak is the resident set above what the model and the imports
take; on CUDA it is `max_memory_allocated` above the model.
"""

import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils import Example, pad_batch, token_logps  # noqa: E402


@dataclass
class Args:
    vocab: int = 32000
    """vocabulary size"""
    hidden: int = 256
    """hidden size of a two-layer Llama"""
    batch: int = 8
    """sequences"""
    prompt: int = 150
    """prompt tokens of each"""
    completion: int = 300
    """completion tokens of each"""
    repeats: int = 3
    """timed forward and backward passes; the fastest is reported"""
    side: Literal["both", "token_logps", "full logits"] = "both"
    """measure both in a process each, or one in this process"""


def full_logps(model, input_ids, mask):
    logits = model(input_ids).logits.float()
    logps = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(logps, (1, 0)) * mask


def measure(args: Args) -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=args.vocab, num_hidden_layers=2, **sizes)).to(device)
    ids = torch.randint(3, args.vocab, (args.batch, args.prompt + args.completion)).tolist()
    examples = [Example(0, "", row[: args.prompt], row[args.prompt :]) for row in ids]
    input_ids, mask = pad_batch(examples, 0, device)
    logps = token_logps if args.side == "token_logps" else full_logps
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = []
    for _ in range(args.repeats):
        model.zero_grad()
        start = time.perf_counter()
        total = logps(model, input_ids, mask).sum()
        total.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak
    return {"seconds": min(seconds), "GiB": (peak - before) / 2**30, "sum": total.item(), "grad_norm": norm}


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.side != "both":
        print(json.dumps(measure(args)))
        sys.exit()
    print(f"{'':12} {'seconds':>8} {'GiB':>8} {'sum of log-probs':>18} {'gradient norm':>14}")
    for side in ("full logits", "token_logps"):
        flags = [f"--{k}={v}" for k, v in (asdict(args) | {"side": side}).items()]
        result = json.loads(subprocess.run([sys.executable, __file__, *flags], capture_output=True, check=True).stdout)
        print(
            f"{side:12} {result['seconds']:8.2f} {result['GiB']:8.2f} {result['sum']:18.3f} {result['grad_norm']:14.5f}"
        )
