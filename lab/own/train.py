"""Makes one run of the study: trains a script on pairs of a behaviour, and scores the final model.

    python -m lab.own.train likelihood brief tuning dpo_humanline --no-humanline --lr 2e-5 --output-dir runs/x

The words are an arm, a behaviour, a part of the held-out prompts and a script. All others are flags of the
script. The arms `likelihood` and `likelihood_alone` change the loss of DPO; `reward` is GRPO's, whose reward
is 1 for a sample that shows the behaviour. All others change nothing.
"""

import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from lab.own import make, score
from tools.scripts import parse_args


def chosen_nll(log_ratio, mask):
    """Computes the mean of -log π/π_ref over the tokens of each chosen text, (P,).

    The initial policy is the reference, so the gradient is that of the mean of -log π.
    """
    return -log_ratio.sum(-1).chunk(2)[0] / mask.sum(-1).chunk(2)[0]


def with_likelihood(dpo_loss, log_ratio, mask, beta):
    """Adds the likelihood of the chosen text, with weight 1, to DPO's loss (RPO, arXiv 2404.19733)."""
    return dpo_loss(log_ratio, mask, beta) + chosen_nll(log_ratio, mask)


def main(arm: str, behaviour: str, part: str, script_name: str, *flags: str):
    script = import_module(script_name)
    if arm == "likelihood":
        script.dpo_loss = partial(with_likelihood, script.dpo_loss)
    elif arm == "likelihood_alone":
        script.dpo_loss = lambda log_ratio, mask, beta: chosen_nll(log_ratio, mask)
    elif arm == "reward":
        shows = make.BEHAVIOURS[behaviour]
        script.SCORE = lambda samples: [float(shows(sample.text)) for sample in samples]
    script.__file__ = str(Path(script.__file__).with_stem(f"{arm}-{script_name}"))  # only it resumes the run
    args = parse_args(script, list(flags))
    script.main(args)
    score.main(Path(args.output_dir), behaviour, part)


if __name__ == "__main__":
    main(*sys.argv[1:])
