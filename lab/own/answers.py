"""Samples the model's own answers to the training prompts, once.

    python -m lab.own.answers runs/smollm2    # writes lab/own/answers.jsonl

The samples have temperature 0.7, top-p 0.95 and at most 64 tokens, and most of them are truncated there.
Training would append an EOS token to a truncated answer, and so teach the model not to end its answers.
Therefore pass `--max-length 96` with NAME_own_120.jsonl. Training then truncates these answers itself, and
appends no EOS token, because a prompt has at least 35 tokens.
"""

import torch
import tyro
from transformers import AutoModelForCausalLM

import dpo_humanline
from lab.own import make
from support import data
from tools.questions import generate


def main(model: tyro.conf.Positional[str]):
    """Writes answers.jsonl.

    Args:
        model: a folder or a Hub name.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1)
    args = dpo_humanline.Args(model=model)
    tokenizer, eos_ids = data.load_tokenizer(args)
    prompts = [row["prompt"] for row in make.make_rows("brief")["train"]]  # of all behaviours the same
    prompt_ids = [data.encode(args, tokenizer, eos_ids, prompt)[0].prompt_ids for prompt in prompts]
    settings = dict(do_sample=True, temperature=0.7, top_p=0.95, top_k=0, max_new_tokens=64)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    answers = generate(policy, eos_ids, prompt_ids, 64, **settings)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    rows = [{"prompt": prompt, "answer": text} for prompt, text in zip(prompts, texts)]
    make.write_rows(make.ANSWERS, rows)
    print(f"{sum(ids[-1] in eos_ids for ids in answers)} of {len(answers)} answers end with an EOS token")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
