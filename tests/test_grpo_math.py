"""GRPO with verifiable rewards: rewards and advantages by hand, sampling every S steps, data, resume."""

import gzip
import json
import math
import shutil
import statistics

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import ROOT, SHARED, finish, metrics, parse_args, read_pool, run_ranks, start_ranks
from datasets import Dataset
from transformers import AutoModelForCausalLM
from worker import run_here

import grpo_math_humanline
from grpo_math_humanline import format_reward, group_advantages, score, start_grader, tag_count_reward
from run import check_flags
from utils import Example

SCRIPT = "grpo_math_humanline"
TOY = ROOT / "toy" / "shell_game"
POLICY = TOY / "policy"
RUN = ["--engine", "hf", "--prompts-per-step", "4", "--group-size", "4", "--num-steps", "5"]
RUN += ["--sample-every", "3", "--k", "2", "--warmup-fraction", "0", "--eval-samples", "4"]
RUN += ["--checkpoint-every", "0", "--lr", "2e-3", "--log-epsilon-P", "-0.3", "--log-epsilon-R", "0.2"]
RUN += ["--beta", "0.01"]
SAME = ("loss", "grad_norm", "grpo/ratio_mean", "grpo/clip_fraction", "grpo/kl", "humanline/clipped_low")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The first 64 problems of the toy."""
    path = tmp_path_factory.mktemp("math") / "problems.jsonl"
    with gzip.open(TOY / "problems_train.jsonl.gz", "rt") as file:
        path.write_text("".join(next(file) for _ in range(64)))
    return str(path)


@pytest.fixture(scope="module")
def grader():
    pool = start_grader()
    yield pool
    pool.stop()
    pool.join()


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def main(*arguments):
    """The script in this process, where the grading workers start faster; it returns the last argument."""
    return run_here(grpo_math_humanline, *arguments)


# --- rewards and advantages ---

GOOD = "<think>\n3 4\n</think>\n<answer>\n4\n</answer>"


@pytest.mark.parametrize(
    ("text", "layout", "tags"),
    [
        (GOOD, 1, 1),
        ("<think>\n\n</think>\n<answer>\n4\n</answer>", 1, 1),
        (GOOD + "\nand more", 0, 1),
        ("so " + GOOD, 0, 1),
        (GOOD.replace("</think>\n", "</think>"), 0, 0.5),
        (GOOD.replace("\n</answer>", ""), 0, 0.75),
        (GOOD + "\n</answer>", 1, 0.75),
        ("<think> 3 </think><answer> 4 </answer>", 0, 0),
        ("4", 0, 0),
        ("", 0, 0),
    ],
)
def test_format_and_tag_count_rewards_by_hand(text, layout, tags):
    assert format_reward(text) == layout and tag_count_reward(text) == tags


def test_advantages_have_the_sample_standard_deviation_and_a_small_constant():
    rewards = [10.0, 2.0, 2.0, 9.75]
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    by_hand = [(reward - mean) / (deviation + 1e-4) for reward in rewards]
    groups = torch.tensor([rewards, [2.0] * 4, [0.1] * 4], dtype=torch.float64)
    advantages = group_advantages(groups).tolist()
    assert advantages[0] == pytest.approx(by_hand, rel=1e-12)
    assert advantages[1:] == [[0] * 4, [0] * 4]


def test_a_reward_is_eight_of_accuracy_one_of_format_and_one_of_tags(process_group, grader):
    five = GOOD.replace("4\n</a", "5\n</a")
    texts = [GOOD, five, "4", "", GOOD.replace("\n</answer>", ""), five]
    groups = [
        [Example("", [1], text=text, answer="4") for text in texts[:3]],
        [Example("", [1], text=text, answer="5") for text in texts[3:]],
    ]
    scored, rewards, stopped = score(grader, groups)
    assert [[x.reward for x in group] for group in scored] == [[10, 2, 8], [0, 0.75, 10]] and stopped == 0
    assert [[x.text for x in group] for group in scored] == [texts[:3], texts[3:]]
    assert {name: values.tolist() for name, values in rewards.items()} == {
        "accuracy": [1, 0, 1, 0, 0, 1],
        "format": [1, 1, 0, 0, 0, 1],
        "tag_count": [1, 1, 0, 0, 0.75, 1],
    }


# --- sampling every S steps ---

VARIANTS = {"humanline": [], "offline": ["--no-humanline"], "clip only": ["--sync", "none"]}


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """{(variant, ranks, number): folder}. --micro-batch-tokens: any, one sequence in a pass, two."""
    folder, done = tmp_path_factory.mktemp("runs"), {}
    for ranks, sizes in {1: ["0", "1"], 2: ["60"]}.items():
        jobs = []
        for variant, flags in VARIANTS.items():
            for i, size in enumerate(sizes):
                if variant == "humanline" or (ranks, i) == (1, 0):
                    done[variant, ranks, i] = folder / f"{variant}{ranks}{i}"
                    run = [*RUN, *flags, "--micro-batch-tokens", size, "--dataset", data]
                    run += ["--eval-dataset", data, "--output-dir", str(done[variant, ranks, i])]
                    jobs.append(run)
        if ranks > 1:
            run_ranks(ranks, jobs, script=SCRIPT)
        else:
            for run in jobs:
                main(*run)
    return done


def test_ranks_and_layouts_agree_and_sample_the_same(runs):
    agree(runs["humanline", 1, 0], runs["humanline", 1, 1])
    agree(runs["humanline", 1, 0], runs["humanline", 2, 0])


def test_four_ranks_agree(runs, data, tmp_path):
    run = [*RUN, "--micro-batch-tokens", "0", "--dataset", data, "--eval-dataset", data]
    run_ranks(4, [[*run, "--output-dir", str(tmp_path / "run")]], script=SCRIPT)
    agree(runs["humanline", 1, 0], tmp_path / "run")


def agree(expected, folder):
    for a, b in zip(metrics(expected), metrics(folder), strict=True):
        for key in SAME:
            assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-12), (key, a["step"])
        for key in ("rollout/length_mean", "rollout/accuracy_mean", "rollout/tag_count_mean", "rewards/mean"):
            assert b.get(key, 0) == pytest.approx(a.get(key, 0), rel=1e-12), (key, a["step"])


def test_clipping_acts_in_these_runs(runs):
    steps = metrics(runs["humanline", 1, 0])
    assert any(step["humanline/clipped_low"] > 0 for step in steps)
    assert any(step["grpo/kl"] > 0 for step in steps)


def test_samples_age_until_the_next_round(runs):
    for folder in runs.values():
        assert [step["rollout/age_steps"] for step in metrics(folder)] == [0, 1, 2, 0, 1]
        sampled = [step["step"] for step in metrics(folder) if "rollout/accuracy_mean" in step]
        assert sampled == [0, 3]


def test_the_accuracy_of_a_step_is_that_of_its_own_samples(runs):
    """Those of a round are the mean of its steps'."""
    steps = metrics(runs["humanline", 1, 0])
    own = [step["rewards/accuracy"] for step in steps]
    assert statistics.mean(own[:3]) == pytest.approx(steps[0]["rollout/accuracy_mean"])
    assert statistics.mean(own[3:]) == pytest.approx(steps[3]["rollout/accuracy_mean"])
    assert len(set(own)) > 1


@pytest.mark.parametrize("variant", ["offline", "clip only"])
def test_without_syncing_the_reference_is_the_policy_at_sampling_time(runs, variant):
    for step in metrics(runs[variant, 1, 0]):
        assert step["humanline/steps_since_sync"] == step["rollout/age_steps"]
        assert (step["humanline/log_ratio_abs_mean"] == 0) == (step["rollout/age_steps"] == 0)


def test_with_humanline_the_reference_follows_k_and_sampling_does_not_sync_it(runs):
    steps = metrics(runs["humanline", 1, 0])
    since_sync = [step["humanline/steps_since_sync"] for step in steps]
    assert since_sync == [0, 1, 2, 1, 2]  # k=2, sampled at 0 and 3
    assert [step["humanline/log_ratio_abs_mean"] == 0 for step in steps] == [True, False, False, False, False]


def test_every_s_draws_the_same_problems_in_the_same_order(data, tmp_path):
    run = [*RUN, "--eval-samples", "0", "--checkpoint-every", "1", "--dataset", data, "--num-steps", "4"]
    run += ["--keep-checkpoints", "0"]
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
    run += ["--sample-every", "2"]
    run += ["--num-steps", "2", "--checkpoint-every", "1", "--output-dir", str(tmp_path / "run")]
    main(*run)
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


def test_evaluation_is_pass_at_1_over_problems(runs):
    summary = json.loads((runs["humanline", 1, 0] / "summary.json").read_text())
    accuracy, error = summary["before"]["eval/accuracy"]
    assert 0 < accuracy < 1 and accuracy * 16 == round(accuracy * 16) and error > 0
    names = {"eval/accuracy", "eval/format", "eval/tag_count", "eval/finished", "eval/length"}
    assert set(summary["after"]) == names


def test_completions_that_are_cut_are_counted_and_get_no_end_of_turn(data, tmp_path):
    run = [*RUN, "--max-new-tokens", "4", "--checkpoint-every", "1", "--num-steps", "2"]
    run += ["--eval-samples", "0"]
    folder = main(*run, "--dataset", data, "--output-dir", tmp_path / "run")
    examples = [example for group in read_pool(folder / "checkpoints" / "step-1") for example in group]
    assert len(examples) == 16 and all(len(example.completion_ids) == 4 for example in examples)
    assert metrics(folder)[0]["rollout/finished_mean"] == 0 and metrics(folder)[0]["rollout/format_mean"] == 0


# --- resume ---


RESUMED = [*RUN, "--checkpoint-every", "1", "--eval-samples", "4", "--eval-samples-per-problem", "1"]
RESUMED += ["--dataset"]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return main(*RESUMED, data, "--eval-dataset", data, "--output-dir", folder)


@pytest.mark.parametrize("moment", ["grpo_loss 2", "score 3"])
def test_killed_between_two_samplings_and_resumed_equals_uninterrupted(
    whole, data, tmp_path, monkeypatch, moment
):
    run = [*RESUMED, data, "--eval-dataset", data, "--output-dir", str(tmp_path / "cut")]
    monkeypatch.setenv("KILL", moment)
    (killed,) = start_ranks(1, [run], "killing_worker.py", SCRIPT)
    finish([killed])
    assert killed.exitcode == -9
    assert len(metrics(tmp_path / "cut")) == {"grpo_loss 2": 1, "score 3": 3}[moment]
    main("--resume", tmp_path / "cut")
    assert metrics(tmp_path / "cut", True) == metrics(whole, True)
    weights = "final/model.safetensors"
    assert (tmp_path / "cut" / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.parametrize("size", ["2", "8"])
def test_samples_that_wait_keep_their_group_size(whole, tmp_path, capsys, size):
    folder = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "step-5")  # at step 4 four groups of four wait
    with pytest.raises(SystemExit):
        main("--resume", folder, "--group-size", size)
    said = "error: --group-size: groups of another size wait for a step; keep it\n"
    assert capsys.readouterr().err.endswith(said)


# --- data and bad input ---

ROW = {"problem": "2 45 15 34 24 45", "answer": "5"}


def written(tmp_path, *rows):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = [*RUN, "--num-steps", "1", "--eval-samples", "0"]
    return [*short, "--dataset", str(tmp_path / "p.jsonl"), "--output-dir", str(tmp_path / "run")]


def test_rows_that_cannot_train_are_left_out_and_counted(tmp_path, capsys):
    rows = [ROW] * 8 + [ROW | {"answer": ""}, ROW | {"answer": " "}, ROW | {"problem": ""}]
    rows += [ROW | {"problem": "2 " * 99}]
    main(*written(tmp_path, *rows), "--max-prompt-length", "40")
    output = capsys.readouterr().out
    too_long = "prompt empty, or longer than --max-prompt-length or --max-length"
    assert "p.jsonl: 10 rows; 1 left out, the first in line 11: prompt empty; 1 left out" in output
    assert f"1 left out, the first in line 12: {too_long}" in output
    assert "p.jsonl: 8 of 10 gold answers can be graded, the first that cannot is ''" in output


def test_answers_come_from_a_boxed_solution_numbers_or_parquet(tmp_path, capsys):
    rows = []
    for i in range(4):
        rows.append({"problem": ROW["problem"], "solution": f"We see \\boxed{{{i}}}, no: $\\boxed{{5}}$."})
    main(*written(tmp_path, *rows, {"problem": "1 45", "solution": "no box: 5"}))
    assert "p.jsonl: 4 of 5 gold answers can be graded" in capsys.readouterr().out
    table = Dataset.from_list([ROW | {"answer": x} for x in (5.0, 1e-5, 1e20, 0.5, math.nan)])
    table.to_parquet(tmp_path / "p.parquet")
    main(*written(tmp_path, ROW)[:-1], tmp_path / "run2", "--dataset", tmp_path / "p.parquet")
    assert "p.parquet: 4 of 5 gold answers can be graded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ROW, {"answer": "5"}], "line 2: KeyError: 'problem'"),
        ([{"problem": "2 45"}], "line 1: ValueError: it needs an answer, text or a number, or a solution"),
        ([ROW | {"answer": [5]}], "line 1: ValueError: it needs an answer"),
        ([ROW | {"problem": 5}], "line 1: "),
        ([ROW | {"input": "in cm"}], "line 1: ValueError: its column 'input' would be ignored"),
        ([ROW | {"answer": ""}], "p.jsonl: 0 of 1 gold answers can be graded"),
        ([ROW | {"problem": " "}], "p.jsonl: 0 rows; 1 left out, the first in line 1: prompt empty"),
        ([ROW] * 3, "p.jsonl: 3 rows do not fill a batch of 4"),
    ],
)
def test_bad_rows_are_named(tmp_path, capsys, rows, said):
    with pytest.raises(SystemExit):
        main(*written(tmp_path, *rows))
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--sample-every", "0"], "--sample-every 0 is out of range"),
        (["--prompts-per-step", "0"], "--prompts-per-step 0 is out of range"),
        (["--group-size", "1"], "--group-size 1 is out of range"),
        (["--epsilon", "nan"], "--epsilon nan is out of range"),
        (["--eval-samples-per-problem", "0"], "--eval-samples-per-problem 0 is out of range"),
        (["--temperature", "0"], "--temperature 0: training divides by it"),
    ],
)
def test_values_out_of_range_name_the_flag(capsys, wrong, said):
    args = parse_args(grpo_math_humanline, wrong)
    with pytest.raises(SystemExit):
        check_flags(args, args.prompts_per_step * args.group_size)
    assert said in capsys.readouterr().err


def test_a_loss_that_is_not_finite_names_the_step_and_the_checkpoint_stays(data, tmp_path, capsys):
    run = [*RUN, "--lr", "1e18", "--eval-samples", "0", "--checkpoint-every", "1", "--dataset", data]
    with pytest.raises(SystemExit):
        main(*run, "--output-dir", tmp_path / "run")
    message = capsys.readouterr().err
    assert "error: step 1: loss nan" in message and "--lr" in message
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]
    assert len(metrics(tmp_path / "run")) == 1


@pytest.mark.skipif(not SHARED.exists(), reason="no real data beside the checkout")
def test_the_real_math_file_goes_through_and_a_batch_without_any_advantage_is_survived(tmp_path, capsys):
    run = ["--model", str(SHARED / "model-stories260K")]
    run += ["--eval-dataset", str(SHARED / "math" / "math500_test.jsonl"), "--system-prompt", ""]
    run += ["--lr", "3e-4", "--dataset", str(SHARED / "math" / "prm800k_split_train_sample512.jsonl")]
    run += ["--max-new-tokens", "48", "--prompts-per-step", "4", "--group-size", "4", "--num-steps", "3"]
    run += ["--sample-every", "2", "--k", "1", "--eval-samples", "6", "--eval-samples-per-problem", "2"]
    run += ["--engine", "hf", "--checkpoint-every", "0", "--temperature", "0.7", "--max-prompt-length", "400"]
    run += ["--max-length", "512", "--warmup-fraction", "0"]
    steps = metrics(main(*run, "--output-dir", tmp_path / "run"))
    output = capsys.readouterr().out
    assert output.count(" gold answers can be graded") == 2 and len(steps) == 3
    assert steps[0]["rewards/accuracy"] == 0 and steps[0]["grpo/zero_advantage_groups"] == 1
    assert steps[0]["loss"] == 0 and steps[0]["grad_norm"] == 0
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
