"""GRPO with verifiable rewards: rewards and advantages by hand, sampling every S steps, data, resume."""

import json
import shutil
import statistics

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, agree, metrics, read_pool, read_rows, run_layouts, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker import run_here

import grpo_math_humanline
from grpo_math_humanline import group_advantages

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


def main(*arguments):
    """The script in this process, where the grading workers start faster; it returns the last argument."""
    return run_here(grpo_math_humanline, *arguments)


def test_advantages_have_the_sample_standard_deviation_and_a_small_constant():
    rewards = [10.0, 2.0, 2.0, 9.75]
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    by_hand = [(reward - mean) / (deviation + 1e-4) for reward in rewards]
    groups = torch.tensor([rewards, [2.0] * 4, [0.1] * 4], dtype=torch.float64)
    advantages = group_advantages(groups).tolist()
    assert advantages[0] == pytest.approx(by_hand, rel=1e-12)
    assert advantages[1:] == [[0] * 4, [0] * 4]


# --- sampling every S steps ---

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


def test_ranks_and_layouts_agree_and_sample_the_same(runs, data, tmp_path):
    """The others have one sequence in a pass, and two ranks with two."""
    expected = runs["humanline"]
    jobs = {"humanline": [*RUN, "--dataset", data, "--eval-dataset", data]}
    for steps in run_layouts(tmp_path, jobs, [(1, "1"), (2, "60")], SCRIPT)["humanline"]:
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


def test_every_s_draws_the_same_problems_in_the_same_order(data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "support.run.shutil.rmtree", lambda *arguments, **options: None
    )  # keeps all checkpoints
    run = [*RUN, "--eval-samples", "0", "--checkpoint-every", "1", "--dataset", data, "--num-steps", "4"]
    for s in ("2", "4"):
        main(*run, "--sample-every", s, "--output-dir", tmp_path / s)

    def waiting(s, step):
        pool = read_pool(tmp_path / s / "checkpoints" / f"step-{step}")
        return [example.prompt for group in pool for example in group]

    assert len(waiting("4", 1)) == 3 * 16 and len(set(waiting("4", 1))) > 3 and waiting("2", 2) == []
    assert waiting("2", 1) == waiting("4", 1)[:16] and waiting("2", 3) == waiting("4", 3)


def test_log_probs_are_taken_at_the_sampling_temperature(data, tmp_path):
    """Step 1 against forward passes of policy and reference in transformers, with logits divided by T."""
    run = [*RUN, "--temperature", "0.5", "--k", "1", "--dataset", data, "--eval-samples", "0"]
    run += ["--sample-every", "2", "--num-steps", "2", "--checkpoint-every", "1", "--output-dir"]
    main(*run, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-1"
    policy, reference = (AutoModelForCausalLM.from_pretrained(POLICY) for _ in range(2))
    dcp.load({"policy": policy.state_dict()}, checkpoint_id=checkpoint)  # in place
    policy, reference = policy.double(), reference.double()
    values = []
    for group in read_pool(checkpoint):
        for x in group:
            ids = torch.tensor([x.prompt_ids + x.completion_ids])
            with torch.no_grad():
                new = (policy(ids).logits[0, :-1] / 0.5).log_softmax(-1)
                old = (reference(ids).logits[0, :-1] / 0.5).log_softmax(-1)
            difference = (new - old).gather(-1, ids[0, 1:, None])[len(x.prompt_ids) - 1 :]
            values += difference.flatten().abs().tolist()
    mean = statistics.mean(values)
    logged = metrics(tmp_path / "run")[1]["humanline/log_ratio_abs_mean"]
    assert mean > 0 and logged == pytest.approx(mean, rel=1e-5)


def test_evaluation_is_pass_at_1_over_problems(runs, folder):
    summary = json.loads((folder / "0" / "humanline" / "summary.json").read_text())
    accuracy, error, count = summary["before"]["eval/accuracy"]
    assert 0 < accuracy < 1 and accuracy * 16 == round(accuracy * 16) and error > 0
    names = {"accuracy", "format", "tag_count", "reward", "finished", "length"}
    assert set(summary["after"]) == {f"eval/{name}" for name in names}
    means = {name: summary["after"][f"eval/{name}"][0] for name in names}
    assert means["reward"] == pytest.approx(8 * means["accuracy"] + means["format"] + means["tag_count"])


def test_completions_that_are_cut_are_counted_and_get_no_end_of_turn(data, tmp_path):
    run = [*RUN, "--max-new-tokens", "4", "--checkpoint-every", "1", "--num-steps", "2", "--eval-samples"]
    folder = main(*run, "0", "--dataset", data, "--output-dir", tmp_path / "run")
    examples = [example for group in read_pool(folder / "checkpoints" / "step-1") for example in group]
    assert len(examples) == 16 and all(len(example.completion_ids) == 4 for example in examples)
    assert metrics(folder)[0]["rollout/finished_mean"] == 0 and metrics(folder)[0]["rollout/format_mean"] == 0


# --- resume ---


RESUMED = [*RUN, "--checkpoint-every", "1", "--eval-samples-per-problem", "1", "--dataset"]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return main(*RESUMED, data, "--eval-dataset", data, "--output-dir", folder)


@pytest.mark.parametrize("moment", ["grpo_loss 2", "grade_samples 3"])
def test_killed_between_two_samplings_and_resumed_equals_uninterrupted(whole, data, kill_and_resume, moment):
    kill_and_resume(whole, [*RESUMED, data, "--eval-dataset", data], moment, SCRIPT)


@pytest.mark.parametrize("flag", ["--group-size", "--prompts-per-step", "--seed"])
def test_flags_that_decide_which_rows_a_step_trains_on_stay_on_resume(whole, tmp_path, capsys, flag):
    """Otherwise rows would be skipped or repeated, and waiting groups would not fit."""
    folder = shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(SystemExit):
        main(flag, "8", "--resume", folder)
    said = f"error: {flag} cannot be changed by --resume: the rows of the next steps depend on it\n"
    assert capsys.readouterr().err == said


# --- data and bad input ---


def test_problems_without_a_gold_answer_are_left_out_and_counted(tmp_path, capsys):
    rows = [{"problem": "2 45 15 34 24 45", "answer": answer} for answer in ["5"] * 8 + ["", " "]]
    flags = [*RUN, "--num-steps", "1", "--eval-samples", "0"]
    flags += ["--dataset", write_rows(tmp_path / "p.jsonl", rows), "--output-dir"]
    main(*flags, tmp_path / "run")
    said = "p.jsonl: 8 of 10 gold answers can be graded, the first that cannot is ''"
    assert said in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(*flags, tmp_path / "none", "--prompts-per-step", "9")
    assert f"{said}; at least 9 are needed" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_loss_that_is_not_finite_names_the_step_and_the_checkpoint_stays(data, tmp_path, capsys):
    run = [*RUN, "--lr", "1e18", "--eval-samples", "0", "--checkpoint-every", "1", "--dataset", data]
    with pytest.raises(SystemExit):
        main(*run, "--output-dir", tmp_path / "run")
    message = capsys.readouterr().err
    assert "error: step 1: loss nan" in message and "--lr" in message
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]
    assert len(metrics(tmp_path / "run")) == 1


def test_a_problem_has_no_completion_that_could_be_shown(data, capsys):
    args = grpo_math_humanline.Args(system_prompt="")
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    grpo_math_humanline.load_groups(args, tokenizer, {tokenizer.eos_token_id}, data, "train")
    told = capsys.readouterr().out
    assert " rows\n" in told and "completion" not in told
