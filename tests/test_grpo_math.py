"""The GRPO script for mathematics: rounds of S steps, rewards, the same numbers for every layout."""

import json
import statistics

import pytest
import torch
from helpers import (
    ROOT,
    agree,
    full_logps,
    metrics,
    read_checkpoint,
    read_pool,
    read_rows,
    run_here,
    run_layouts,
    write_rows,
)
from transformers import AutoModelForCausalLM

import grpo_math_humanline
from grpo_math_humanline import group_advantages
from utils import Example, pad_batch

SCRIPT = "grpo_math_humanline"
TOY = ROOT / "toy" / "shell_game"
POLICY = TOY / "policy"
RUN = "--engine hf --prompts-per-step 4 --group-size 4 --num-steps 5 --sample-every 3 --k 2".split()
RUN += "--warmup-fraction 0 --eval-samples 4 --checkpoint-every 0 --lr 2e-3 --log-epsilon-P -0.3".split()
RUN += "--log-epsilon-R 0.2 --beta 0.01".split()
SAME = ["loss", "grad_norm", "grpo/ratio_mean", "grpo/clip_fraction", "grpo/kl", "humanline/clipped_low"]
SAME += ["rollout/length_mean", "rollout/accuracy_mean", "rollout/tag_count_mean", "rewards/mean"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The first 64 problems of the toy."""
    path = tmp_path_factory.mktemp("math") / "problems.jsonl"
    return write_rows(path, read_rows(TOY / "problems_train.jsonl.gz")[:64])


def test_advantages_have_the_sample_standard_deviation_and_a_small_constant():
    rewards = [10.0, 2.0, 2.0, 9.75]
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    by_hand = [(reward - mean) / (deviation + 1e-4) for reward in rewards]
    groups = torch.tensor([rewards, [2.0] * 4, [0.1] * 4], dtype=torch.float64)
    advantages = group_advantages(groups).tolist()
    assert advantages[0] == pytest.approx(by_hand, rel=1e-12)
    assert advantages[1:] == [[0] * 4, [0] * 4]


# === Rounds of S steps ===

VARIANTS = {"humanline": [], "offline": ["--no-humanline"], "clip only": ["--k", "0"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(data, folder):
    """{variant: metrics}, on one rank with the whole batch in a pass."""
    files = ["--dataset", data, "--eval-dataset", data]
    jobs = {name: [*RUN, *flags, *files] for name, flags in VARIANTS.items()}
    return {name: steps for name, (steps,) in run_layouts(folder, jobs, [(1, "0")], SCRIPT).items()}


@pytest.mark.slow
def test_ranks_and_layouts_agree_and_sample_the_same(runs, data, tmp_path):
    """Two ranks have two sequences in a micro-batch."""
    expected = runs["humanline"]
    jobs = {"humanline": [*RUN, "--dataset", data, "--eval-dataset", data]}
    for steps in run_layouts(tmp_path, jobs, [(2, "60")], SCRIPT)["humanline"]:
        agree(expected, steps, SAME)
    assert any(step["humanline/clipped_low"] > 0 for step in expected)
    assert any(step["grpo/kl"] > 0 for step in expected)


def test_the_accuracy_of_a_step_is_that_of_its_own_samples(runs):
    """Those of a round are the mean of its steps'."""
    steps = runs["humanline"]
    own = [step["rewards/accuracy"] for step in steps]
    assert statistics.mean(own[:3]) == pytest.approx(steps[0]["rollout/accuracy_mean"])
    assert statistics.mean(own[3:]) == pytest.approx(steps[3]["rollout/accuracy_mean"])
    assert len(set(own)) > 1


@pytest.mark.parametrize(
    ("variant", "since_sync"),
    [("humanline", [0, 1, 2, 1, 2]), ("offline", [0, 1, 2, 0, 1]), ("clip only", [0, 1, 2, 0, 1])],
)
def test_the_reference_follows_k_or_is_the_policy_at_sampling_time(runs, variant, since_sync):
    """Samples are drawn at steps 0 and 3. With k = 2 they change nothing about the reference."""
    steps = runs[variant]
    assert [step["step"] for step in steps if "rollout/accuracy_mean" in step] == [0, 3]
    same = [step["humanline/log_ratio_abs_mean"] == 0 for step in steps]
    assert same == [steps == 0 for steps in since_sync]


@pytest.mark.slow
def test_every_s_draws_the_same_problems_in_the_same_order(data, tmp_path):
    flags = [*RUN, "--eval-samples", "0", "--checkpoint-every", "1", "--keep-checkpoints", "0"]
    flags += ["--dataset", data, "--num-steps", "4"]
    for s in ("2", "4"):
        folder = tmp_path / s
        run_here(grpo_math_humanline, *flags, "--sample-every", s, "--output-dir", folder)

    def waiting(s, step):
        return [example.prompt for group in read_pool(tmp_path / s, step) for example in group]

    assert len(waiting("4", 1)) == 3 * 16 and len(set(waiting("4", 1))) > 3 and waiting("2", 2) == []
    assert waiting("2", 1) == waiting("4", 1)[:16] and waiting("2", 3) == waiting("4", 3)


def test_log_probs_are_taken_at_the_sampling_temperature_and_samples_are_truncated_without_an_eos(
    data, tmp_path
):
    """Step 1 against forward passes of policy and reference in transformers, with logits divided by T."""
    flags = [*RUN, "--temperature", "0.5", "--k", "1", "--dataset", data, "--eval-samples", "0"]
    flags += ["--sample-every", "2", "--num-steps", "2", "--checkpoint-every", "1", "--max-new-tokens", "8"]
    folder = run_here(grpo_math_humanline, *flags, "--output-dir", tmp_path / "run")
    policy, reference = (AutoModelForCausalLM.from_pretrained(POLICY) for _ in range(2))
    policy.load_state_dict(read_checkpoint(folder, 1)["policy"])
    examples = [example for group in read_pool(folder, 1) for example in group]
    assert len(examples) == 16 and max(len(example.completion_ids) for example in examples) == 8
    input_ids, mask = pad_batch(examples, "cpu")
    with torch.no_grad():
        logps, ref_logps = (full_logps(x.double(), input_ids, mask, 0.5) for x in (policy, reference))
    mean = (logps - ref_logps).abs().sum() / mask.sum()
    first, second = metrics(folder)
    assert mean > 0 and second["humanline/log_ratio_abs_mean"] == pytest.approx(mean.item(), rel=1e-5)
    assert first["rollout/finished_mean"] < 1


def test_samples_of_problems_are_truncated_after_they_are_graded(one_rank, monkeypatch):
    """The first sample of a problem is too long for --max-length."""
    monkeypatch.setattr("support.grading.grade_all", lambda grader, grade, jobs: [True] * len(jobs))

    class Sampler:
        def sample(self, policy, prompts, count, seed):
            completions = ([10] * 9 + [5], [11, 5])
            return [[Example("x", [1, 2], ids, text="4", answer="4") for ids in completions]], {}

    args = grpo_math_humanline.Args(max_length=6, prompts_per_step=1, group_size=2, num_steps=1)
    problem = (Example("x", [1, 2], answer="4"),)
    (group,), _ = grpo_math_humanline.sample_round(args, Sampler(), None, None, [problem], 0)
    assert [x.completion_ids for x in group] == [[10] * 4, [11, 5]] and all(x.correct for x in group)


def test_evaluation_is_pass_at_1_over_problems(runs, folder):
    summary = json.loads((folder / "0" / "humanline" / "summary.json").read_text())
    accuracy, error, count = summary["before"]["eval/accuracy"]
    assert 0 < accuracy < 1 and accuracy * 16 == round(accuracy * 16) and error > 0
    names = {"accuracy", "format", "tag_count", "reward", "finished", "length", "kl"}
    assert set(summary["after"]) == {f"eval/{name}" for name in names}
    means = {name: summary["after"][f"eval/{name}"][0] for name in names}
    assert means["reward"] == pytest.approx(8 * means["accuracy"] + means["format"] + means["tag_count"])


def test_problems_without_a_gold_answer_are_left_out_and_counted(tmp_path, capsys):
    rows = [{"problem": "2 45 15 34 24 45", "answer": answer} for answer in ["5"] * 8 + ["", " "]]
    flags = [*RUN, "--num-steps", "1", "--eval-samples", "0"]
    flags += ["--dataset", write_rows(tmp_path / "p.jsonl", rows), "--output-dir"]
    run_here(grpo_math_humanline, *flags, tmp_path / "run")
    assert "p.jsonl: 8 of 10 gold answers can be graded" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="8 rows"):
        run_here(grpo_math_humanline, *flags, tmp_path / "none", "--prompts-per-step", "9")
    assert not (tmp_path / "none").exists()
