"""One rank that runs dpo_humanline.main for real and notes, at every step, what policy and reference are.

It wraps three functions of the script: the record is taken inside the step, before the policy's forward pass,
with additional no-grad forward passes through both models. They would leave a root unit gathered and stale if
it were not resharded.
"""

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from conftest import parse_args
from torch.distributed.tensor.debug import CommDebugMode
from worker import argument_lists

import dpo_humanline
import utils
from utils import Example, pad_batch, token_logps

PROBE = pad_batch([Example("", [1, 7, 2], [9, 10, 11, 5]), Example("", [1, 8, 2], [20, 21, 5])], "cpu")
SYNC = dpo_humanline.sync_reference
LOAD_MODELS = dpo_humanline.load_models


def digest(tensors) -> str:
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().contiguous().numpy().tobytes())
    return content.hexdigest()


def watch(record: list) -> None:
    models = {}

    def load_models(*arguments):
        models.update(zip(("policy", "reference"), LOAD_MODELS(*arguments)))
        return tuple(models.values())

    def recording_token_logps(model, input_ids, mask):
        if model is models["policy"]:
            step = {"syncs": 0, "sync_collectives": 0}
            for kind, each in models.items():
                with torch.no_grad(), CommDebugMode() as communication:
                    step[f"{kind}_logps"] = digest([token_logps(each, *PROBE)])
                step[f"{kind}_weights"] = digest(weight.full_tensor() for weight in each.parameters())
                step["forward_collectives"] = communication.get_total_counts()
            record.append(step)
        return token_logps(model, input_ids, mask)

    def counting_sync(reference, policy):
        with torch.no_grad():
            token_logps(policy, *PROBE)  # leaves the root as a forward leaves it
            token_logps(reference, *PROBE)
        with CommDebugMode() as communication:
            SYNC(reference, policy)
        record[-1]["syncs"] += 1
        record[-1]["sync_collectives"] += communication.get_total_counts()

    # For the loop alone, not for what utils itself calls.
    dpo_humanline.utils = SimpleNamespace(**vars(utils) | {"token_logps": recording_token_logps})
    dpo_humanline.sync_reference = counting_sync
    dpo_humanline.load_models = load_models


if __name__ == "__main__":
    for arguments in argument_lists():
        args = parse_args(dpo_humanline, arguments)
        steps = []
        watch(steps)
        dpo_humanline.main(args)
        if os.environ.get("RANK", "0") == "0":
            (Path(args.output_dir) / "record.json").write_text(json.dumps(steps))
