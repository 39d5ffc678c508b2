"""Rewards enter at one door: whatever SCORE does, all ranks train on the same finite numbers, or none."""

import math

import numpy as np
import pandas
import pytest
import torch
from conftest import PAIRS, TOY, finish, metrics, run_ranks, start_ranks

import grpo_math_humanline
from support import grading, sampling
from utils import Example, InputError

FIVE = [1.5, -2.0, 0.1, 1e9 + 0.1, 0.0]


# --- what is accepted, and what is refused ---


@pytest.mark.parametrize(
    "values",
    [
        FIVE,
        tuple(FIVE),
        np.array(FIVE),
        np.array(FIVE[::-1])[::-1],  # its strides are negative
        torch.tensor(FIVE, dtype=torch.float64, requires_grad=True),
        [torch.tensor(number, dtype=torch.float64) for number in FIVE],
        [np.float64(number) for number in FIVE],
        pandas.Series(FIVE, index=[4, 3, 2, 1, 0]),
    ],
    ids=["list", "tuple", "array", "strides", "gradient", "tensors", "numbers", "series"],
)
def test_rewards_keep_all_their_digits_in_any_container(values):
    rewards = sampling.as_rewards("SCORE", values, 5)
    assert rewards.dtype == torch.float64 and rewards.tolist() == FIVE
    assert not rewards.requires_grad and rewards.device.type == "cpu"


@pytest.mark.parametrize(
    "values",
    [
        [True, False, True],
        [1, 0, 1],
        np.array([1, 0, 1], dtype=np.uint8),
        torch.tensor([1, 0, 1]),
        torch.tensor([True, False, True]),
        torch.tensor([1.0, 0.0, 1.0], dtype=torch.bfloat16),
        torch.tensor([1.0, 0.0, 1.0], dtype=torch.float16),
        np.array([1, 0, 1], dtype=object),
    ],
    ids=["bools", "ints", "uint8", "int64", "bool", "bf16", "fp16", "object"],
)
def test_rewards_of_any_dtype_become_float64(values):
    assert sampling.as_rewards("SCORE", values, 3).tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, math.nan, 1.0], "1 are not finite: [nan]"),
        (torch.tensor([1.0, math.inf, -math.inf]), "2 are not finite: [inf, -inf]"),
        ([1.0, 1e200, 1.0], "1 are not finite: [1e+200]"),  # its square overflows, and all advantages are 0
        ([1.0, None, 1.0], "returned a list"),
        (np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]), "returned a MaskedArray"),
        ([1.0, 2.0], "the shape is [2]"),
        ([1.0] * 4, "the shape is [4]"),
        ([], "the shape is [0]"),
        (torch.ones(3, 1), "the shape is [3, 1]"),
        (1.0, "the shape is []"),
        (None, "returned a NoneType"),
        ({"a": 1.0}, "returned a dict"),
        ((number for number in (1.0, 2.0, 3.0)), "returned a generator"),
        (["high", "low", "low"], "returned a list"),
        (["1", "0", "1"], "returned a list"),
        ("101", "returned a str"),
        ([np.datetime64("2026-01-01")] * 3, "returned a list"),
        ([[1.0], [2.0, 3.0], 4.0], "returned a list"),
        ([10**400, 1, 1], "returned a list"),
        ([1 + 2j, 1, 1], "returned a list"),
        (torch.tensor([1 + 2j, 1, 1]), "returned a Tensor"),
    ],
)
def test_rewards_that_are_not_one_finite_number_for_each_sample_are_refused(values, said):
    with pytest.raises(InputError) as caught:
        sampling.as_rewards("SCORE", values, 3)
    message = str(caught.value)
    assert message.startswith("SCORE ") and said in message and "\n" not in message


def test_what_a_function_raises_is_one_line_and_its_traceback_is_printed(capsys):
    def judge(samples):
        raise KeyError("no such\ncolumn")

    with pytest.raises(InputError) as caught:
        sampling.function_scores(judge, [Example("", [1])])
    assert str(caught.value) == r"SCORE raised KeyError('no such\ncolumn')"
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "in judge" in printed


def test_a_function_cannot_change_the_samples():
    """Its list was the ranks' own on rank 0, so a sort there gave the rewards to other samples."""

    def sort(samples):
        samples.sort(key=lambda sample: sample.text)
        samples[0].completion_ids.clear()
        samples[0].row["points"] = 0
        return [0.0] * len(samples)

    samples = [Example("", [1], [2], text=text, row={"points": 1}) for text in "ba"]
    sampling.function_scores(sort, samples)
    assert [sample.text for sample in samples] == ["b", "a"]
    assert all(sample.completion_ids == [2] and sample.row == {"points": 1} for sample in samples)


# --- rewards of mathematics ---


@pytest.mark.parametrize(("verdict", "reward"), [(True, 8), (False, 0), (None, 0), (0.5, 4), (np.True_, 8)])
def test_a_grader_may_give_a_part_of_the_points(one_rank, monkeypatch, verdict, reward):
    """One half was rewarded like a right answer."""
    monkeypatch.setattr(grading, "grade_all", lambda grader, function, jobs: [verdict] * len(jobs))
    (sample, _), _, _ = grpo_math_humanline.grade_samples(None, [[Example("", [1], text="4")] * 2])
    assert sample.reward == reward


def test_a_verdict_that_is_not_finite_is_refused(one_rank, monkeypatch):
    monkeypatch.setattr(grading, "grade_all", lambda grader, function, jobs: [math.nan] * len(jobs))
    with pytest.raises(InputError, match="the reward accuracy did not return 2 finite numbers"):
        grpo_math_humanline.grade_samples(None, [[Example("", [1], text="4")] * 2])


# --- whole runs ---

RUN = ["--online", "--model", str(TOY / "policy"), "--dataset", PAIRS, "--eval-dataset", PAIRS]
RUN += [
    "--engine",
    "hf",
    "--eval-samples",
    "2",
    "--round-prompts",
    "8",
    "--batch-size",
    "8",
    "--num-steps",
    "3",
]
RUN += ["--max-new-tokens", "8", "--checkpoint-every", "0", "--k", "2"]


@pytest.fixture
def score(monkeypatch, tmp_path):
    def choose(name: str):
        monkeypatch.setenv("SCORE", name)
        monkeypatch.setenv("COUNT", str(tmp_path / "calls"))

    return choose


def end(ranks: int, flags: list[str]) -> list[str]:
    """Runs that must end with exit status 1; what each rank printed. As torchrun does, it ends the others."""
    processes = start_ranks(ranks, [flags], "scoring_worker.py", "grpo_humanline")
    processes[0].join(200)
    for process in processes[1:]:
        process.kill()
    outputs = finish(processes)
    assert processes[0].exitcode == 1, outputs[0][-3000:]
    return outputs


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["nan", "exits"])
def test_a_function_that_misbehaves_ends_the_run_in_one_line(score, tmp_path, ranks, name):
    score(name)
    output = end(ranks, [*RUN, "--output-dir", str(tmp_path / "run")])[0]
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: SCORE ")


@pytest.mark.parametrize("name", ["random", "slow", "sorts"])
def test_two_ranks_train_on_the_rewards_of_rank_0(score, tmp_path, name):
    score(name)
    run_ranks(2, [[*RUN, "--output-dir", str(tmp_path / "run")]], "scoring_worker.py", "grpo_humanline")
    assert len(metrics(tmp_path / "run")) == 3
    assert set((tmp_path / "calls").read_text().splitlines()) == {"rank 0"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_function_that_fails_once_costs_no_step(score, tmp_path, ranks):
    """The steps since the last checkpoint were lost. A resumed run is as if SCORE had not failed."""
    score("length")
    flags = [*RUN, "--round-prompts", "2", "--batch-size", "4"]  # a round for each step
    run_ranks(
        ranks, [[*flags, "--output-dir", str(tmp_path / "whole")]], "scoring_worker.py", "grpo_humanline"
    )
    score("fails_in_the_third_call")
    output = end(ranks, [*flags, "--output-dir", str(tmp_path / "cut")])[0]
    assert "in fails_in_the_third_call" in output  # the traceback
    assert "error: SCORE raised ConnectionError('no answer\\nfrom the judge')" in output
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-1"]
    score("length")
    run_ranks(ranks, [["--resume", str(tmp_path / "cut")]], "scoring_worker.py", "grpo_humanline")
    assert metrics(tmp_path / "cut", True) == metrics(tmp_path / "whole", True)
    for file in ("summary.json", "final/model.safetensors"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
