"""One rank: loads models with the script. Compares them with transformers' own, compares ways to sum their
gradients, or measures memory."""

import json
import os
import threading

import torch
import torch.distributed as dist
from conftest import parse_args
from transformers import AutoModelForCausalLM
from worker import argument_lists

import dpo_humanline as script
import utils
from support import run


def load(folder: str, dtype: str):
    """Policy and reference; the reference has the dtype in which both compute. Attention is theirs."""
    utils.choose_attention = lambda *args: ""
    args = parse_args(script, ["--model", folder, "--dataset", "none.jsonl", "--dtype", dtype])
    args.max_length = args.max_prompt_length = args.max_new_tokens = 16
    return script.load_models(args, torch.device("cpu"), 100)


@torch.no_grad()
def compare(folder: str) -> None:
    """Both models have an unsharded fp32 model's parameters and logits, bit for bit, also after a sync."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if getattr(plain.config, "attn_logit_softcapping", None):
        plain.set_attn_implementation("eager")
    policy, reference = load(folder, "float32")
    input_ids = torch.randint(0, plain.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    assert {p.dtype for p in [*policy.parameters(), *reference.parameters()]} == {torch.float32}
    assert not policy.training and not reference.training
    assert not any(p.requires_grad for p in reference.parameters())
    for factor in (1.0, 1.25):
        for parameter in plain.parameters():
            parameter.mul_(factor)
        for parameter in policy.parameters():
            parameter.to_local().mul_(factor)
        if factor > 1:
            script.sync_reference(reference, policy)
        for name, model in (("policy", policy), ("reference", reference)):
            plain.requires_grad_(name == "policy")  # on some processors mamba's logits depend on it
            for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(parameter.full_tensor(), expected), f"{name} {folder} {factor}"
            assert torch.equal(model(input_ids).logits, plain(input_ids).logits), f"{name} {folder} {factor}"
    half, reference = load(folder, "bfloat16")
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert torch.equal(half(input_ids).logits, reference(input_ids).logits)


def memory(folder: str) -> None:
    """Prints the peak of the summed memory of all ranks while they load, in bytes beyond what they had."""
    load(f"{folder}-small", "bfloat16")  # imports, and what is allocated once
    pids, readings, done = run.gather(os.getpid()), [], threading.Event()

    def read():  # pages that ranks share count once
        rollups = [open(f"/proc/{pid}/smaps_rollup").read() for pid in pids]
        readings.append(sum(int(text.partition("\nPss:")[2].split()[0]) for text in rollups) * 1024)

    def watch():
        while not done.wait(0.02):
            read()

    read()
    dist.barrier()
    if dist.get_rank() == 0:
        threading.Thread(target=watch).start()
    models = load(folder, "bfloat16")
    dist.barrier()
    done.set()
    parameters = sum(p.numel() for p in models[0].parameters())
    print(json.dumps({"peak": max(readings) - readings[0], "parameters": parameters}))


def compare_sums(shard_size: str) -> None:
    """Gradients that are summed in every pass, over all ranks or over shards, or in the last pass alone."""
    args = parse_args(script, ["--shard-size", shard_size])
    policy, _ = script.load_models(args, torch.device("cpu"), 100)
    passes = []
    for number in range(3):
        ids = [5 + (7 * place + 3 * dist.get_rank() + number) % 20 for place in range(12 + dist.get_rank())]
        passes.append(utils.pad_batch([utils.Example("", ids[:3], ids[3:])], "cpu"))
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


if __name__ == "__main__":
    for task, argument in argument_lists():
        run.setup(script.Args(model="any", dataset="any", dtype="float32"), batch_size=64)
        globals()[task](argument)
        dist.destroy_process_group()
