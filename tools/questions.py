"""Counts right answers before and after a run, because training on own pairs can cost what a model knew.

    python -m tools.questions runs/mine  # a few minutes on a CPU with a model of 135M parameters

The 40 questions of tools/questions.jsonl have one-word answers. A model's answer is greedy, has at most 30
tokens, and is right if an accepted word stands in it, in lower case or capitals. The run's folder gets
questions.json, which tools.compare shows: {"before": [1, 0, …], "after": [1, 1, …]}, with 1 for each right
answer.
"""

import importlib
import json
import re
from pathlib import Path
from statistics import fmean

import torch
import tyro
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

import utils
from support import data, run

QUESTIONS = Path(__file__).with_suffix(".jsonl")


def is_right(words: list[str], answer: str) -> bool:
    """Returns whether one of the accepted words, in lower case, stands in an answer as a whole word."""
    return any(re.search(rf"\b{re.escape(word)}\b", answer.lower()) for word in words)


@torch.no_grad()
def generate(model, eos_ids: set[int], prompts: list, batch_size: int, **settings) -> list[list[int]]:
    """Returns the token ids of an answer to each prompt, with the EOS token if there is one.

    prompts: the token ids of the prompts.
    settings: those of transformers' GenerationConfig.
    """
    model.generation_config = GenerationConfig(eos_token_id=list(eos_ids), pad_token_id=0, **settings)
    answers = []
    for start in tqdm(range(0, len(prompts), batch_size), "answering", leave=False):
        batch = prompts[start : start + batch_size]
        input_ids = utils.pad_rows(batch, model.device, side="left").long()
        mask = utils.pad_rows([[1] * len(prompt) for prompt in batch], model.device, side="left")
        rows = model.generate(input_ids, attention_mask=mask)[:, input_ids.shape[1] :]
        answers += [data.truncate_after_eos(ids, eos_ids) for ids in rows.tolist()]
    return answers


def main(folder: tyro.conf.Positional[Path]):
    """Asks the initial and the final model of a run.

    Args:
        folder: the folder of a finished run.
    """
    if not (folder / "final").exists():
        raise utils.InputError(f"{folder}: no final/; pass the folder of a run that has ended")
    name = json.loads((folder / "args.json").read_text())["script"]
    script = importlib.import_module(name.rpartition("-")[2])  # behind the name of a variant
    args = run.load_args(script.Args, str(folder), f"{name}.py")
    args.dtype = args.dtype.replace("auto", "float32")
    # The run's own limits of prompts and samples are not those of the questions.
    args.max_prompt_length, args.max_new_tokens = args.max_length - 1, 1
    tokenizer, eos_ids = data.load_tokenizer(args)
    questions = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    prompts = [data.encode(args, tokenizer, eos_ids, row["prompt"])[0].prompt_ids for row in questions]
    texts = {}
    right = {}
    for when, path in (("before", args.model), ("after", folder / "final")):
        options = {"dtype": run.storage_dtype(args), "trust_remote_code": args.trust_remote_code}
        model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
        answers = generate(model, eos_ids, prompts, 32, do_sample=False, max_new_tokens=30)
        texts[when] = tokenizer.batch_decode(answers, skip_special_tokens=True)
        right[when] = [int(is_right(row["answers"], text)) for row, text in zip(questions, texts[when])]
    for row, was, now, text in zip(questions, right["before"], right["after"], texts["after"]):
        if was and not now:
            print(f"{row['prompt']}\n    no longer right: {text}")
    run.write_file(folder / "questions.json", json.dumps(right))
    change = torch.tensor(right["after"]) - torch.tensor(right["before"])
    mean, error, count = utils.mean_and_error({"change": change})["change"]
    before, after = fmean(right["before"]), fmean(right["after"])
    words = f"{before:.2f} before, {after:.2f} after, {mean:.2f} ± {error:.2f} change"
    print(f"right answers of {count}: {words}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
