"""Trains models, and writes files that are the same bytes each time, for all toys."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import torch


def optimize(model, steps: int, warmup: int, loss_at: Callable[[int], torch.Tensor], lr: float = 3e-3):
    """Minimizes `loss_at(step)` with AdamW, linear warmup and linear decay. Returns the model."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup) * (1 - step / steps)
        loss_at(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def save(folder: Path, model, tokenizer):
    """Saves a model and its tokenizer, whose class gets the name that transformers 4 knows too."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))


def write_rows(path: Path, rows: list[dict]):
    """Writes a .jsonl.gz file, without the time and the name that gzip would add."""
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as archive:
        archive.write("".join(json.dumps(row) + "\n" for row in rows).encode())
