"""One rank with an FSDP2 policy, a vLLM engine and a transformers engine; writes what it finds as JSON."""

import gzip
import json
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from conftest import TOY, tokens_of
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils import Example, encode_prompt, engine_difference, generate, start_engine, update_engine

if __name__ == "__main__":
    ((model, path),) = json.loads(sys.argv[1])
    os.environ["MASTER_PORT"] = str(json.loads(os.environ["PORTS"])[0])
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = None if world > 1 else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    policy = fully_shard(AutoModelForCausalLM.from_pretrained(model), reshard_after_forward=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line)["prompt"] for line in gzip.open(TOY / "prompts_test.jsonl.gz", "rt")][:64]
    prompts = [encode_prompt(tokenizer, [{"role": "user", "content": row}]) for row in rows]

    args = SimpleNamespace(model=model, trust_remote_code=False, vllm_memory=0.3, generation_batch_size=256)
    args.max_new_tokens = 12
    args.top_p = 0.95
    tokens = tokens_of(tokenizer, {tokenizer.eos_token_id})
    vllm, hf = (
        start_engine(SimpleNamespace(**vars(args), engine=name), torch.float32, torch.device("cpu"), 32)
        for name in ("vllm", "hf")
    )

    def look(engine, temperature=0.7):
        args.temperature = temperature
        ids, logps = generate(engine, prompts, args, tokens, (1, 2))
        few = [Example(0, "", *pair) for pair in zip(prompts[:8], ids)]
        return ids, engine_difference(engine, policy, few, logps, 0)

    report = {}
    for engine in (vllm, hf):
        update_engine(engine, policy)
    report["samples"], report["difference"] = look(vllm)
    report["greedy_vllm"], report["greedy_hf"] = look(vllm, 0.0)[0], look(hf, 0.0)[0]
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            full = parameter.full_tensor()
            full += 0.05 * torch.randn(full.shape, generator=noise)
            shards = torch.chunk(full, world) if full.shape[0] >= world else (full,)
            parameter.to_local().copy_(shards[rank])
    report["stale"], report["difference_when_stale"] = look(vllm)
    update_engine(vllm, policy)
    report["updated"], report["difference_after_update"] = look(vllm)
    if rank == 0:
        with open(path, "w") as file:
            json.dump(report, file)
    dist.barrier()
    dist.destroy_process_group()
