"""Online rounds: sampling, pairing, references, evaluation, resume."""

import json

import pytest
import torch
from conftest import (
    PAIRS,
    SHARED,
    TOY,
    agree,
    finish,
    metrics,
    read_pool,
    read_rows,
    run_edited,
    run_ranks,
    start_ranks,
    write_rows,
)
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification
from worker import run_here

import dpo_humanline
from support.sampling import TransformersEngine, load_reward_model, reward_scores
from utils import Example, above, mean_and_error

RUN = ["--online", "--engine", "hf", "--dataset", PAIRS, "--eval-dataset", PAIRS, "--eval-samples", "4"]
RUN += ["--k", "3", "--round-prompts", "20", "--batch-size", "8", "--num-steps", "7"]
RUN += ["--max-new-tokens", "12", "--checkpoint-every", "3", "--eval-every", "3", "--warmup-fraction", "0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("online") / "run"
    run_ranks(1, [[*RUN, "--output-dir", str(folder)]])
    return folder


@pytest.fixture(scope="module")
def run_on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("online") / "two"
    run_ranks(2, [[*RUN, "--micro-batch-tokens", "60", "--output-dir", str(folder)]])
    return folder


def sampled(steps) -> list[str]:
    """Metrics of samples alone, the same whatever engine draws them."""
    return [key for key in steps[0] if key.startswith("rollout/") and "logp_diff" not in key]


def test_two_ranks_sample_the_same_rounds(run, run_on_two):
    steps, of_two = metrics(run, True), metrics(run_on_two, True)
    agree(steps, of_two, sampled(steps), rel=1e-9)
    agree(steps, of_two, abs=1e-5)
    assert (run_on_two / "summary.json").exists()


def test_what_a_round_leaves_over_is_trained_on_before_the_next_one(run):
    """Twenty prompts give twenty pairs, and a step takes eight: 20 12, 24 16 8, 20 12, and 4 are left."""
    steps = metrics(run)
    assert [line.get("rollout/round") for line in steps] == [1, None, 2, None, None, 3, None]
    assert all(line.get("rollout/filtered", 0) == 0 for line in steps)
    pools = {step: read_pool(run / "checkpoints" / f"step-{step}") for step in (6, 7)}
    assert len(pools[6]) == 12 and pools[7] == pools[6][8:]
    assert len({line["lr"] for line in steps}) == 1  # no warmup in this run, and no restart


def test_a_round_sets_the_reference_to_the_policy_and_k_goes_on(run):
    """Rounds begin at 0, 2 and 5. With k = 3 the reference is the policy before the updates of 0, 3 and 6."""
    steps, ages = metrics(run), [0, 1, 0, 1, 1, 0, 1]
    assert [line["humanline/log_ratio_abs_mean"] == 0 for line in steps] == [age == 0 for age in ages]


def test_without_humanline_the_reference_is_the_round_start(tmp_path):
    run_ranks(1, [[*RUN, "--no-humanline", "--num-steps", "5", "--output-dir", str(tmp_path / "run")]])
    steps, ages = metrics(tmp_path / "run"), [0, 1, 0, 1, 2]
    assert [line["humanline/log_ratio_abs_mean"] == 0 for line in steps] == [age == 0 for age in ages]


def test_evaluation_by_sampling_is_logged_and_summarised(run):
    steps, summary = metrics(run), json.loads((run / "summary.json").read_text())
    assert [line["step"] for line in steps if "eval/reward" in line] == [3, 6]
    assert summary["before"]["eval/win_rate"] == [0.5, 0.0, 4]
    names = {"eval/reward", "eval/win_rate", "eval/length", "eval/finished", "eval/margin"}
    assert set(summary["after"]) >= names
    samples = read_rows(run / "samples.jsonl")
    assert all(sample["sample"].split() for sample in samples)
    assert [sample["prompt"] for sample in samples[-4:]] == [row["prompt"] for row in read_rows(PAIRS)[:4]]


def test_ties_are_half_a_win():
    found = above(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 4.0, 1.0]))
    assert found.tolist() == [1, 0.5, 0, 1]
    found = mean_and_error({"above": found, "one": found[:1]})
    assert found["above"] == pytest.approx((0.625, torch.tensor([1, 0.5, 0, 1]).std().item() / 2, 4))
    assert found["one"] == (1, 0, 1)


@pytest.mark.parametrize(
    ("ranks", "moment"),
    [
        (1, "sample_round 2"),
        (1, "reward_scores 3"),
        (2, "dpo_loss 7"),  # in the middle of a round
    ],
)
def test_killed_in_a_round_and_resumed_equals_uninterrupted(run, run_on_two, kill_and_resume, ranks, moment):
    whole, size = {1: (run, "8192"), 2: (run_on_two, "60")}[ranks]
    flags = [*RUN, "--micro-batch-tokens", size, "--checkpoint-every", "1"]
    kill_and_resume(whole, flags, moment, ranks=ranks)


def test_a_sampler_with_stale_weights_stops_the_run(tmp_path, monkeypatch, capsys):
    update, calls = TransformersEngine.update, []

    def update_twice(*arguments):
        calls.append(arguments)
        if len(calls) < 3:
            update(*arguments)

    monkeypatch.setattr(TransformersEngine, "update", update_twice)
    with pytest.raises(SystemExit):
        run_here(dpo_humanline, *RUN, "--output-dir", tmp_path / "run")
    assert "the engine's model is not the policy, or not finite: " in capsys.readouterr().err


@pytest.mark.skipif(not SHARED.exists(), reason="no real data beside the checkout")
def test_a_real_model_and_real_prompts_go_through_a_round(tmp_path):
    questions = read_rows(SHARED / "mt_bench" / "question.jsonl")
    prompts = write_rows(tmp_path / "prompts.jsonl", ({"prompt": row["turns"][0]} for row in questions))
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "model-stories260K")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    judge = LlamaForSequenceClassification(LlamaConfig(vocab_size=512, num_labels=1, **sizes))
    judge.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")  # no chat template and no pad token
    run = ["--online", "--engine", "hf", "--model", str(SHARED / "model-stories260K"), "--lr", "1e-3"]
    run += ["--reward-model", str(tmp_path / "rm"), "--dataset", prompts]
    run += ["--eos-token", "<s>", "--max-prompt-length", "60", "--max-new-tokens", "150"]
    run += ["--max-length", "200", "--round-prompts", "6", "--samples-per-prompt", "4", "--batch-size", "4"]
    run += ["--num-steps", "1", "--temperature", "1", "--reward-threshold", "1e-6"]
    run_ranks(1, [[*run, "--checkpoint-every", "1", "--output-dir", str(tmp_path / "run")]])
    (line,) = metrics(tmp_path / "run")
    assert 0 < line["rollout/finished_mean"] <= 1 and line["rollout/logp_diff_mean"] < 1e-4
    for x in (x for pair in read_pool(tmp_path / "run" / "checkpoints" / "step-1") for x in pair):
        ids = x.completion_ids
        assert not {1, 2} & set(ids[:-1])  # nothing goes on after the end of the story
        assert ids[-1] in (1, 2) or len(ids) == min(150, 200 - len(x.prompt_ids))
    final = json.loads((tmp_path / "run" / "final" / "generation_config.json").read_text())
    assert 1 in final["eos_token_id"]


def test_reward_scores_render_the_conversation_and_read_the_last_token(one_rank):
    """Against one forward pass per conversation. Unfinished completions have no end of turn."""
    model, tokenizer = load_reward_model(dpo_humanline.Args(reward_model=str(TOY / "reward_model")))
    samples = [
        Example("for king", [], text="rose lily", finished=True),
        Example("for queen", [], text="fern", finished=False),
        Example("for boy", [], text="aster iris tulip daisy", finished=True),
    ]
    for part in ("end", "<", "|"):  # of the end of a turn, which is not there
        samples.append(Example("for king", [], text=part, finished=False))
    expected = []
    for sample in samples:
        text = f"<|user|> {sample.prompt} <|end|> <|assistant|> {sample.text}"
        if sample.finished:
            text += " <|end|>"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            expected.append(model(input_ids=ids).logits.item())
    for pad_id in (model.config.pad_token_id, None):  # a reward model without a pad token is handled
        model.config.pad_token_id = pad_id
        scores = reward_scores(model, tokenizer, torch.device("cpu"), "", samples)
        assert scores.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_score_of_a_reward_model_with_its_own_code_is_used(one_rank):
    class Output:
        logits, score = torch.zeros(2, 19), torch.tensor([0.25, -1.0])

    model, tokenizer = load_reward_model(dpo_humanline.Args(reward_model=str(TOY / "reward_model")))
    model.forward = lambda **inputs: Output
    samples = [Example("for king", [], text="rose"), Example("for boy", [], text="iris")]
    scores = reward_scores(model, tokenizer, torch.device("cpu"), "", samples)
    assert sorted(scores.tolist()) == [-1, 0.25]


# --- engines that several ranks share ---


def test_ranks_that_share_an_engine_sample_what_single_ranks_do(run, tmp_path):
    """Four ranks, two engines of two ranks each: no prompt is lost or drawn twice."""
    run_ranks(4, [[*RUN, "--output-dir", str(tmp_path / "shared")]], "sharing_worker.py")
    steps = metrics(run, True)
    agree(steps, metrics(tmp_path / "shared", True), sampled(steps), rel=1e-9)


def test_an_engine_of_another_rank_than_the_first_is_checked_too(tmp_path):
    flags = ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--eval-samples", "8", "--engine", "hf"]
    flags += ["--generation-batch-size", "4", "--max-new-tokens", "12"]
    flags += ["--batch-size", "4", "--num-steps", "3", "--lr", "1e-2"]
    processes = start_ranks(2, [[*flags, "--output-dir", str(tmp_path / "run")]], "stale_worker.py")
    processes[0].join(120)
    processes[1].kill()  # as torchrun does
    output = finish(processes)[0]
    assert processes[0].exitcode == 1 and "error: sampling: the engine's model is not the policy" in output
    assert len(metrics(tmp_path / "run")) == 3  # the evaluation before training was right


def test_samples_are_scored_by_a_program_instead_of_a_reward_model(tmp_path):
    """The edit that support/sampling.py names: here the reward is the length of the text."""
    line = "    optimizer = torch.optim.AdamW(\n"
    score = "    sampler.score = lambda samples: torch.tensor([len(x.text) for x in samples]).double()\n"
    ended = run_edited(tmp_path, line, score + line, "--eval-dataset", PAIRS, "--eval-samples", "4")
    assert ended.returncode == 0, ended.stderr
    (run,) = (tmp_path / "runs").iterdir()
    samples = [sample for sample in read_rows(run / "samples.jsonl") if sample["step"] == 2]
    mean = sum(len(sample["sample"]) for sample in samples) / len(samples)
    assert json.loads((run / "summary.json").read_text())["after"]["eval/reward"][0] == pytest.approx(mean)
