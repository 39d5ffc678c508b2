"""Scores a run on the held-out prompts of a behaviour.

    python -m lab.own.score runs/some_run brief tuning    # writes score.json and greedy.jsonl into it

It reads the folder's final model and its args.json. Of a folder without both, such as the initial model's, it
reads the model, and compares it with itself. The values of score.json:

share           share of greedy answers that show the behaviour
share_256       the same if an answer may have 256 tokens, in place of 64 as in all other values
right           share of right greedy answers, of 30 tokens, to other questions (tools/questions.jsonl)
finished        share of greedy answers that end with an EOS token
length          mean number of tokens of a greedy answer, of at most 64
different       number of different greedy answers, divided by the number of prompts
kl, kl_error    KL(model, initial model) of an answer in nats, and its standard error, from a sample for each
                prompt with temperature 1, top-p 1 and at most 64 tokens
logps_chosen    log-prob of the held-out chosen texts in nats, a sum over tokens and a mean over texts
logps_rejected  the same of the rejected texts, which are written in another style

Models compute in the run's --dtype, an untrained one in bf16. greedy.jsonl has the greedy answers to the
held-out prompts.
"""

import json
from array import array
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Literal

import torch
import tyro
from transformers import AutoModelForCausalLM
from tyro.conf import Positional

import dpo_humanline
import utils
from lab.own import make
from support import data
from tools.questions import QUESTIONS, generate, is_right

BATCH = 32


@torch.no_grad()
def sum_logps(model, examples: list[utils.Example]) -> torch.Tensor:
    """Returns the sum of the log-probs of each completion, (N,)."""
    batches = [examples[start : start + BATCH] for start in range(0, len(examples), BATCH)]
    return torch.cat([utils.token_logps(model, *utils.pad_batch(batch, "cpu")).sum(1) for batch in batches])


def main(
    folder: Positional[Path],
    behaviour: Positional[Literal["brief", "asks", "opens", "lists"]],
    part: Positional[Literal["tuning", "report"]],
):
    """Writes score.json and greedy.jsonl.

    Args:
        folder: the folder of a run or of a model.
        behaviour: what the run has been trained for.
        part: the part of the held-out prompts.
    """
    torch.set_num_threads(1)  # because other sums could give other answers
    file = folder / "args.json"
    saved = json.loads(file.read_text()) if file.exists() else {"model": str(folder)}
    args = SimpleNamespace(**vars(dpo_humanline.Args()) | saved)
    tokenizer, eos_ids = data.load_tokenizer(args)

    def encode(row: dict) -> tuple:
        completions = [row[key] for key in ("chosen", "rejected") if key in row]
        return data.encode(args, tokenizer, eos_ids, row["prompt"], completions)

    dtype = getattr(torch, saved.get("dtype", "bfloat16"))

    def load(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    final = folder / "final"
    model, initial = load(final if final.exists() else folder), load(args.model)

    def answer(prompts: list, new_tokens: int, **settings) -> list[list[int]]:
        return generate(model, eos_ids, prompts, BATCH, max_new_tokens=new_tokens, **settings)

    def decode(answers: list[list[int]]) -> list[str]:
        return tokenizer.batch_decode(answers, skip_special_tokens=True)

    rows = make.make_rows(behaviour)[part]
    chosen, rejected = zip(*map(encode, rows))
    prompt_ids = [example.prompt_ids for example in chosen]
    long = answer(prompt_ids, 256, do_sample=False)
    greedy = [ids[:64] for ids in long]
    texts = decode(greedy)
    shows = [make.BEHAVIOURS[behaviour](text) for text in texts]

    questions = make.read_rows(QUESTIONS)
    replies = decode(answer([encode(row)[0].prompt_ids for row in questions], 30, do_sample=False))
    right = [is_right(row["answers"], reply) for row, reply in zip(questions, replies)]

    torch.manual_seed(1)
    samples = answer(prompt_ids, 64, do_sample=True, temperature=1.0, top_p=1.0, top_k=0)
    samples = [row._replace(completion_ids=array("i", ids)) for row, ids in zip(chosen, samples)]
    log_ratio = sum_logps(model, samples) - sum_logps(initial, samples)  # (N,)

    score = {
        "share": fmean(shows),
        "share_256": fmean(map(make.BEHAVIOURS[behaviour], decode(long))),
        "right": fmean(right),
        "finished": fmean(ids[-1] in eos_ids for ids in greedy),
        "length": fmean(map(len, greedy)),
        "different": len(set(texts)) / len(texts),
        "kl": log_ratio.mean().item(),
        "kl_error": log_ratio.std().item() / len(samples) ** 0.5,
        "logps_chosen": sum_logps(model, chosen).mean().item(),
        "logps_rejected": sum_logps(model, rejected).mean().item(),
    }
    (folder / "score.json").write_text(json.dumps(score))
    triples = zip(rows, texts, shows)
    lines = [{"prompt": row["prompt"], "answer": text, "shows": shown} for row, text, shown in triples]
    make.write_rows(folder / "greedy.jsonl", lines)
    for name, value in score.items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
