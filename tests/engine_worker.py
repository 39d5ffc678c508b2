"""One rank with an FSDP2 policy that vLLM and transformers sample; writes what it finds as JSON."""

import json
import os

import torch
import torch.distributed as dist
from conftest import TOY, parse_args, read_rows
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from worker import argument_lists

import dpo_humanline as script
import utils
from support import data, sampling


def process_state() -> dict:
    """What belongs to the whole process, and so to the trainer."""
    return {
        "environment": dict(os.environ),
        "precision of products": torch.get_float32_matmul_precision(),
        "cuDNN attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "random state of torch": torch.get_rng_state().tolist(),
    }


@torch.no_grad()
def add_noise(policy):
    noise = torch.Generator().manual_seed(3)
    rank, world = dist.get_rank(), dist.get_world_size()
    for parameter in policy.parameters():
        full = parameter.full_tensor()
        full += 0.05 * torch.randn(full.shape, generator=noise)
        parameter.to_local().copy_(torch.chunk(full, world)[rank])


def look(model: str, top_p: str) -> dict:
    policy = fully_shard(AutoModelForCausalLM.from_pretrained(model), reshard_after_forward=True)
    tokenizer, eos_ids = data.load_tokenizer(script.Args(model=model))
    prompts = []
    for row in read_rows(TOY / "prompts_test.jsonl.gz")[:64]:
        prompt_ids, _ = data.encode(tokenizer, eos_ids, row["prompt"])
        prompts.append(utils.Example(row["prompt"], prompt_ids))
    flags = ["--model", model, "--dataset", "none.jsonl", "--temperature", "0.7", "--top-p", top_p]
    flags += ["--max-prompt-length", "4096", "--max-new-tokens", "12"]  # more than the toy's positions
    samplers = {}
    for engine in ("vllm", "hf"):
        args = parse_args(script, [*flags, "--engine", engine])
        samplers[engine] = sampling.Sampler(args, tokenizer, eos_ids, torch.device("cpu"), 64)

    def sample(engine: str) -> dict:
        samples, metrics = samplers[engine].sample(policy, prompts, 1, (1, 2))
        ids = [sample.completion_ids for (sample,) in samples]
        return {"ids": ids, "difference": metrics["rollout/logp_diff_mean"]}

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(7)
    before = process_state()
    found = {"vllm": sample("vllm"), "hf": sample("hf")}
    after = process_state()
    found["changed"] = [name for name in before if str(before[name]) != str(after[name])]
    add_noise(policy)
    found["updated"] = sample("vllm")

    from vllm.usage.usage_lib import is_usage_stats_enabled

    return found | {"reports its use": is_usage_stats_enabled()}


if __name__ == "__main__":
    ((model, path, top_p),) = argument_lists()
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    store = None if world > 1 else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = look(model, top_p)
    if rank == 0:
        with open(path, "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
