"""The GRPO script for mathematics: advantages, rounds of S steps, rewards."""

import json
import statistics

import pytest
import torch
from helpers import ROOT, metrics, read_pool, read_rows, run_here, write_rows

import grpo_math_humanline
from grpo_math_humanline import group_advantages
from utils import Example

TOY = ROOT / "toy" / "shell_game"
RUN = "--engine hf --prompts-per-step 4 --group-size 4 --num-steps 5 --sample-every 3 --k 2".split()
RUN += "--warmup-fraction 0 --eval-samples 4 --checkpoint-every 0 --lr 2e-3".split()


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


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    """The folder of a run that samples at steps 0 and 3."""
    files = ["--dataset", data, "--eval-dataset", data]
    return run_here(grpo_math_humanline, *RUN, *files, "--output-dir", tmp_path_factory.mktemp("run"))


def test_the_accuracy_of_a_step_is_that_of_its_own_samples(folder):
    """Those of a round are the mean of its steps'."""
    steps = metrics(folder)
    own = [step["rewards/accuracy"] for step in steps]
    assert statistics.mean(own[:3]) == pytest.approx(steps[0]["rollout/accuracy_mean"])
    assert statistics.mean(own[3:]) == pytest.approx(steps[3]["rollout/accuracy_mean"])
    assert len(set(own)) > 1


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


def test_samples_of_problems_are_truncated_after_they_are_graded(one_rank, monkeypatch):
    """The first sample of a problem is too long for --max-length."""
    monkeypatch.setattr("support.grading.grade_all", lambda grader, grade, jobs: [True] * len(jobs))

    class Sampler:
        def sample(self, policy, prompts, count, seed):
            completions = ([10] * 9 + [5], [11, 5])
            return [[Example("x", [1, 2], ids, text="4", answer="4") for ids in completions]], {}

        def end_after_signal(self):
            pass

    args = grpo_math_humanline.Args(max_length=6, prompts_per_step=1, group_size=2, num_steps=1)
    problem = (Example("x", [1, 2], answer="4"),)
    (group,), _ = grpo_math_humanline.sample_round(args, Sampler(), None, None, [problem], 0)
    assert [x.completion_ids for x in group] == [[10] * 4, [11, 5]] and all(x.correct for x in group)


def test_evaluation_is_pass_at_1_over_problems(folder):
    summary = json.loads((folder / "summary.json").read_text())
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
