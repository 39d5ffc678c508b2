"""worker.py with engines that two ranks share, as vLLM's do under --vllm-tensor-parallel 2."""

import torch.distributed as dist
import worker

from support import sampling

generate = sampling.TransformersEngine.generate


def generate_alike(self, batches):
    """Both ranks of an engine must have been given the same batches."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, batches)
    rank = dist.get_rank()
    assert of_ranks[rank] == of_ranks[rank - rank % 2] and of_ranks[0] != of_ranks[2]
    return generate(self, batches)


if __name__ == "__main__":
    sampling.TransformersEngine.ranks = 2
    sampling.TransformersEngine.generate = generate_alike
    worker.main()
