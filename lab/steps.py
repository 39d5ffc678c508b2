"""Makes a run of the board: runs a script, and asks the hidden judge of stories at nine steps.

    python -m lab.steps dpo_humanline.py --k 16 --lr 3e-4 --model toy/stories/policy …  # as lab.board does

The words are a script and its flags. The script runs as by `python`, but after the steps STEPS its policy is
scored before the next step begins. The samples are those of `lab/score.py`, one for each prompt. They use
random numbers of their own, so the run stays the same. The run's folder gets score.json: judge, finished,
trigrams and kl, each as NAME@STEP, and the seconds of CPU time: `scoring`, and `core` for all else. If the
folder of --reward-model is missing, a reward model is trained on the draw first.
"""

import json
import resource
import runpy
import signal
import sys
import time
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.draws import make_reward_model
from lab.score import score_story
from support import checkpoint, run

STEPS = (8, 15, 30, 45, 60, 75, 90, 105, 120)
METRICS = ("judge", "kl", "finished", "trigrams")
LIMIT = 1800  # seconds of CPU time, so that an edit that never ends does not block the others


class Scores:
    """Scores the policy of a run after some of its steps."""

    def __init__(self):
        self.found = {}
        self.seconds = 0.0  # CPU time of scoring
        self.started = time.process_time()
        self.models = None

    def load(self, args):
        """Loads two copies of the initial policy, of which the first gets the weights of the policy."""
        self.models = [AutoModelForCausalLM.from_pretrained(args.model).eval() for _ in range(2)]
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        prompts = Path(args.dataset).with_name("prompts_test.jsonl.gz")
        self.prompts = pd.read_json(prompts, lines=True).prompt.tolist()

    def add(self, args, folder: Path, policy, step: int):
        started = time.process_time()
        if not self.models:
            self.load(args)
        own = self.models[0].state_dict()
        for name, weight in run.full_weights(policy):
            own[name].copy_(weight)
        with torch.random.fork_rng():
            values = score_story(*self.models, self.tokenizer, self.prompts)
        self.found |= {f"{name}@{step}": values[name] for name in METRICS}
        self.seconds += time.process_time() - started
        core = time.process_time() - self.started - self.seconds
        seconds = {"core": round(core, 1), "scoring": round(self.seconds, 1)}
        (folder / "score.json").write_text(json.dumps(self.found | seconds))


def end_at_limit(*unused):
    raise SystemExit(f"error: the run has taken more than {LIMIT} s of CPU time")


def main(script: str, *flags: str):
    """Runs a script with `checkpoint.end_step`, which ends each of its steps, replaced."""
    torch.set_num_threads(1)  # because other sums could give other samples
    signal.signal(signal.SIGXCPU, end_at_limit)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, resource.RLIM_INFINITY))
    if "--reward-model" in flags:
        draw, folder = (Path(flags[flags.index(flag) + 1]) for flag in ("--dataset", "--reward-model"))
        make_reward_model(draw.parent, folder)
    scores = Scores()
    end_step = checkpoint.end_step

    def score_and_end_step(args, folder, policy, reference, optimizer, progress, signals):
        if progress.step in STEPS:
            scores.add(args, folder, policy, progress.step)
        end_step(args, folder, policy, reference, optimizer, progress, signals)

    checkpoint.end_step = score_and_end_step
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
