"""Scores a run on a toy with the judge that no run sees.

    python -m lab.score runs/some_run    # writes runs/some_run/score.json

On stories the file has the following means over two samples of each test prompt. On other toys it has only
`judge`, of the samples of the run's last evaluation.

judge     the hidden judge's score (toy/README.md); on stories VADER's sentiment, a mean over sentences
finished  share of samples that end with an EOS token
trigrams  number of different word trigrams, divided by the number of all word trigrams
kl        KL(policy, initial policy) of a completion in nats, from samples with temperature 1

All values but kl are of samples with temperature 0.7 and top-p 0.95, as in the scripts' evaluations.
"""

import json
import re
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

import utils
from toy import make, stories

ROOT = Path(__file__).resolve().parents[1]


def logps_of(model, tokenizer, prompts: list[str], completions: list[list[int]]):
    """Returns the log-probs of completions (ids as they were sampled) and their mask, (B, T) each."""
    examples = []
    for prompt, ids in zip(prompts, completions):
        examples.append(utils.Example(prompt, tokenizer(prompt).input_ids, ids))
    input_ids, mask = utils.pad_batch(examples, model.device)
    return utils.token_logps(model, input_ids, mask), mask


@torch.no_grad()
def score_story(model, initial, tokenizer, prompts: list[str]) -> dict[str, float]:
    """Samples from a model, and returns its values by name."""
    torch.manual_seed(0)
    completions = stories.sample_ids(model, tokenizer, prompts, temperature=0.7, top_p=0.95)
    rows = stories.as_rows(tokenizer, prompts, completions)
    found = {
        "judge": fmean(stories.judge_story(*row) for row in rows),
        "finished": fmean(finished for *_, finished in rows),
        "trigrams": stories.distinct_trigrams([text for _, text, _ in rows]),
    }
    completions = stories.sample_ids(model, tokenizer, prompts)
    own, mask = logps_of(model, tokenizer, prompts, completions)
    others, _ = logps_of(initial, tokenizer, prompts, completions)
    return found | {"kl": ((own - others) * mask).sum(1).mean().item()}


def judge_of(model: str):
    """Returns the judge of a policy's toy; for runs/instances/3/tales/policy that of instance 3."""
    if "shell_game" in model:
        return make.judge_shell_game
    if "bouquets" in model:
        return make.judge_bouquet
    instance = re.search(r"instances/(\d+)/", model)
    return make.another_instance(int(instance[1]) if instance else 0).judge


def score_samples(folder: Path, model: str) -> dict[str, float]:
    """Returns the judge's mean score of the last evaluation's samples. An unfinished sample costs 1."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["step"] == lines[-1]["step"] and not line["greedy"]]
    judge = judge_of(model)
    found = fmean(judge(line["prompt"], line["sample"]) for line in last)
    if "shell_game" not in model:  # the judge of the shell game gives 0 to an unfinished sample
        found -= 1 - fmean(line["finished"] for line in last)
    return {"judge": found}


def main(folder: tyro.conf.Positional[Path]):
    """Writes score.json into the folder of a run."""
    torch.set_num_threads(1)  # as in training, because other sums could give other samples
    model = json.loads((folder / "args.json").read_text())["model"]
    if "stories" in model:
        prompts = pd.read_json(ROOT / model / "../prompts_test.jsonl.gz", lines=True).prompt.tolist()
        tokenizer = AutoTokenizer.from_pretrained(ROOT / model)
        models = [
            AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder / "final", ROOT / model)
        ]
        found = score_story(*models, tokenizer, prompts * 2)
    else:
        found = score_samples(folder, model)
    (folder / "score.json").write_text(json.dumps(found))
    print(found)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
