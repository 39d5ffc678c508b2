"""Measures a run on the stories: how much the judge's score rose, and how far from the initial policy (KL).

    python paper/frontier.py runs/some_run   # writes runs/some_run/frontier.json

The file has the following values for the initial policy, each checkpoint that was kept, and final/, by the
number of steps. They are means over samples for the test prompts.

judge     the hidden judge's score: VADER's sentiment, mean over a completion's sentences (toy/stories.py)
finished  fraction of the samples that end with an EOS token
trigrams  number of different word trigrams, divided by the number of all word trigrams
fluency   log-prob of a token under the initial policy, in nats
kl        KL(policy, initial policy) of a completion, in nats, from samples with temperature 1

All values but kl are of samples with the settings of the scripts' evaluations: temperature 0.7, top-p 0.95.
"""

import json
import sys
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
import torch.distributed.checkpoint as dcp
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import utils  # noqa: E402
from support import run  # noqa: E402
from toy import stories  # noqa: E402

DRAWS = 2  # samples per prompt before the first and after the last step; for other checkpoints one


def completion_logps(model, tokenizer, prompts: list[str], completions: list[list[int]]):
    """Computes the log-probs of completions, and their mask, (B, T) each.

    The completions are token ids as they were sampled, because their text might be tokenized in another way.
    """
    examples = []
    for prompt, ids in zip(prompts, completions):
        examples.append(utils.Example(prompt, tokenizer(prompt).input_ids, ids))
    input_ids, mask = utils.pad_batch(examples, model.device)
    return utils.token_logps(model, input_ids, mask), mask


@torch.no_grad()
def measure(model, initial, tokenizer, prompts: list[str]) -> dict[str, float]:
    """Samples from a model and returns its values by name."""
    torch.manual_seed(0)
    completions = stories.sample_ids(model, tokenizer, prompts, temperature=0.7, top_p=0.95)
    rows = stories.as_rows(tokenizer, prompts, completions)
    logps, mask = completion_logps(initial, tokenizer, prompts, completions)
    point = {
        "judge": fmean(stories.judge_story(*row) for row in rows),
        "finished": fmean(finished for *_, finished in rows),
        "trigrams": stories.distinct_trigrams([text for _, text, _ in rows]),
        "fluency": ((logps * mask).sum() / mask.sum()).item(),
    }
    completions = stories.sample_ids(model, tokenizer, prompts)
    own, mask = completion_logps(model, tokenizer, prompts, completions)
    others, _ = completion_logps(initial, tokenizer, prompts, completions)
    point["kl"] = ((own - others) * mask).sum(1).mean().item()
    return point


def main(folder: tyro.conf.Positional[Path]):
    """Writes frontier.json.

    Args:
        folder: folder of a run on the stories.
    """
    torch.set_num_threads(1)  # as in training, because other sums could give other samples
    args = json.loads((folder / "args.json").read_text())
    policy = ROOT / args["model"]
    prompts = pd.read_json(policy.parent / "prompts_test.jsonl.gz", lines=True).prompt.tolist()
    tokenizer = AutoTokenizer.from_pretrained(policy)
    initial = AutoModelForCausalLM.from_pretrained(policy).eval()
    model = AutoModelForCausalLM.from_pretrained(folder / "final").eval()
    points = {
        0: measure(initial, initial, tokenizer, prompts * DRAWS),
        args["num_steps"]: measure(model, initial, tokenizer, prompts * DRAWS),
    }
    for checkpoint in folder.glob("checkpoints/step-*"):
        step = int(checkpoint.name.removeprefix("step-"))
        if step not in points:
            dcp.load({"policy": model.state_dict()}, checkpoint_id=checkpoint)  # fills the weights in place
            points[step] = measure(model, initial, tokenizer, prompts)
    run.write_file(folder / "frontier.json", json.dumps(dict(sorted(points.items())), indent=2))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
