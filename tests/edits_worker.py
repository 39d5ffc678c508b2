"""worker.py with edits of dpo_humanline.py that make ranks differ: random batches, metrics of one rank."""

import numpy as np
import torch
import torch.distributed as dist
import worker

import dpo_humanline
import utils


def draw_at_random(groups, number, size, seed):
    """Draws other groups on every rank and in every run."""
    return [groups[i] for i in np.random.default_rng().permutation(len(groups))[:size]]


def batch_of_all_ranks(lengths, ranks, max_tokens):
    """All ranks must divide the same batch."""
    ranks_lengths = [None] * dist.get_world_size()
    dist.all_gather_object(ranks_lengths, lengths)
    assert ranks_lengths[0] == ranks_lengths[1]
    return make_micro_batches(lengths, ranks, max_tokens)


def metrics_of_one_rank(args, log_ratio):
    names = {0: {"extra/rank_0": 5.0}, 1: {"extra/rank_1": 7.0, "extra/more": 3.0}}[dist.get_rank()]
    extra = {name: torch.full_like(log_ratio, value) for name, value in names.items()}
    return extra | clipping_metrics(args, log_ratio)


if __name__ == "__main__":
    dpo_humanline.draw_batch = draw_at_random
    make_micro_batches, utils.make_micro_batches = utils.make_micro_batches, batch_of_all_ranks
    clipping_metrics, dpo_humanline.clipping_metrics = dpo_humanline.clipping_metrics, metrics_of_one_rank
    worker.main()
