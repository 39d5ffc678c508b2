"""Measures a run on the pairs of toy/chat.py: errors of the held-out values, KL, and ten answers.

    python paper/chat.py runs/some_run   # writes runs/some_run/chat.json

The KL between the policy and the initial one is the mean of log π(y) - log π_0(y), in nats, over the samples
y of the run's last evaluation. They must have been drawn with --temperature 1 and --top-p 1. A sample ends
after --max-new-tokens, so this is the KL of the first so many tokens. Their texts are tokenized again, so
about a tenth of them have other tokens than were sampled. The answers are greedy.
"""

import json
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import torch
import tyro
from scipy.stats import sem
from tqdm import tqdm
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import utils  # noqa: E402
from support import data, run  # noqa: E402

ANSWERS = 10  # of the initial and of the trained policy, to the first held-out prompts


@torch.no_grad()
def measure(model, tokenizer, eos_ids: set[int], prompts: list, samples: list[dict]) -> tuple[list, list]:
    """Returns log π(y) in nats of the sample y of each prompt, and greedy answers to the first prompts."""
    all_prompt_ids = [data.encode(tokenizer, eos_ids, prompt)[0] for prompt in prompts]
    logps = []
    for prompt_ids, sample in zip(tqdm(all_prompt_ids, leave=False), samples):
        ids = tokenizer(sample["sample"], add_special_tokens=False).input_ids
        if sample["finished"]:
            ids.append(tokenizer.eos_token_id)
        input_ids, mask = utils.pad_batch([utils.Example("", prompt_ids, ids)], model.device)
        logps.append((utils.token_logps(model, input_ids, mask) * mask).sum().item())
    first = {"input_ids": all_prompt_ids[:ANSWERS]}
    batch = tokenizer.pad(first, padding_side="left", return_tensors="pt")
    ids = model.generate(**batch, do_sample=False, max_new_tokens=64)[:, batch["input_ids"].shape[1] :]
    return logps, tokenizer.batch_decode(ids, skip_special_tokens=True)


def main(folder: tyro.conf.Positional[Path]):
    """Writes chat.json.

    Args:
        folder: folder of a run of dpo_humanline.py.
    """
    torch.set_num_threads(1)  # two threads beside busy cores took twenty times as long
    args = SimpleNamespace(**json.loads((folder / "args.json").read_text()))
    tokenizer, eos_ids = data.load_tokenizer(args)
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    samples = [line for line in lines if line["step"] == args.num_steps]
    rows = [json.loads(line) for line in (ROOT / args.eval_dataset).read_text().splitlines()]
    prompts = [row["prompt"] for row in rows[: len(samples)]]
    for prompt, sample in zip(prompts, samples, strict=True):
        if prompt[-1]["content"] != sample["prompt"]:
            raise SystemExit(f"error: {folder}/samples.jsonl has other prompts than {args.eval_dataset}")
    found = []
    for path in (ROOT / args.model, folder / "final"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        found.append(measure(model, tokenizer, eos_ids, prompts, samples))
    (initial, answers_before), (policy, answers_after) = found
    ratios = [own - other for own, other in zip(policy, initial)]
    columns = {"kl": fmean(ratios), "kl error": sem(ratios)}
    for name, (_, error, _) in json.loads((folder / "summary.json").read_text())["after"].items():
        columns[f"{name} error"] = error
    questions = [sample["prompt"] for sample in samples]
    columns["answers"] = list(zip(questions, answers_before, answers_after))
    run.write_file(folder / "chat.json", json.dumps(columns))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
