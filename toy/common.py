"""Trains models, samples from them, and writes files that are the same bytes each time, for all toys."""

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


def completion_loss(model, batch, prompt_lengths: list[int]) -> torch.Tensor:
    """Computes the mean -log p of the completions' tokens in a batch of token ids, padded on the right."""
    logps = model(**batch).logits[:, :-1].log_softmax(-1)  # (B, T - 1, V)
    mask = batch["attention_mask"][:, 1:].float()
    for row, length in zip(mask, prompt_lengths):
        row[: length - 1] = 0
    return -(logps.gather(2, batch["input_ids"][:, 1:, None]).squeeze(2) * mask).sum() / mask.sum()


@torch.inference_mode()
def sample_ids(
    model, tokenizer, prompts: list[str], max_new_tokens: int, temperature=1.0, top_p=1.0, batch_size=1024
) -> list[list[int]]:
    """Samples a completion for each prompt. Returns its token ids up to the first EOS token, inclusive."""
    how = {"temperature": temperature, "top_p": top_p, "top_k": 0, "max_new_tokens": max_new_tokens}
    rows = []
    for start in range(0, len(prompts), batch_size):
        chunk = prompts[start : start + batch_size]
        batch = tokenizer(chunk, padding=True, padding_side="left", return_tensors="pt")
        ids = model.generate(**batch, do_sample=True, **how)[:, batch["input_ids"].shape[1] :]
        for row in ids.tolist():
            finished = tokenizer.eos_token_id in row
            rows.append(row[: row.index(tokenizer.eos_token_id) + 1] if finished else row)
    return rows


def as_rows(tokenizer, prompts: list[str], completions: list[list[int]]) -> list[tuple]:
    """Decodes completions. Returns rows (prompt, completion, finished).

    Special tokens but the last EOS token stay in the text.
    """
    rows = []
    for prompt, ids in zip(prompts, completions):
        finished = ids[-1] == tokenizer.eos_token_id
        rows.append((prompt, tokenizer.decode(ids[:-1] if finished else ids), finished))
    return rows


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
