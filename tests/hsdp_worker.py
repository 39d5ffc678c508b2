"""One of four ranks, two copies of two shards: gradients that are summed in every pass, or in the last."""

import json
import os
import sys

import torch
from conftest import parse_args

import dpo_humanline
import utils

if __name__ == "__main__":
    (flags,) = json.loads(sys.argv[1])
    os.environ["MASTER_PORT"] = str(json.loads(os.environ["PORTS"])[0])
    args = parse_args(dpo_humanline, flags)
    rank, _, device = dpo_humanline.setup(args)
    policy, _ = dpo_humanline.load_models(args, torch.float32, device)
    passes = []
    for number in range(3):
        ids = [5 + (7 * place + 3 * rank + number) % 20 for place in range(12 + rank)]
        passes.append(utils.pad_batch([utils.Example("", ids[:3], ids[3:])], device))
    of_ways = []
    for shards, copies in ((True, True), (True, False), (False, False)):  # in every pass
        for number, (input_ids, mask) in enumerate(passes, 1):
            last = number == len(passes)
            policy.set_requires_gradient_sync(shards or last)
            policy.set_requires_all_reduce(copies or last)
            utils.token_logps(policy, input_ids, mask).sum().backward()
        of_ways.append([parameter.grad.full_tensor().clone() for parameter in policy.parameters()])
        policy.zero_grad()
    for way in of_ways[1:]:
        for gradient, expected in zip(way, of_ways[0]):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)  # stored in fp32
    assert any(gradient.abs().max() > 0 for gradient in of_ways[0])
