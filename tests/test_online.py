"""Online rounds: sampling, pairing, references, evaluation, resume."""

import json

import pytest
import torch
from conftest import (
    PAIRS,
    ROOT,
    SHARED,
    TOY,
    finish,
    metrics,
    parse_args,
    read_pool,
    refused,
    run_ranks,
    start_ranks,
)
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import dpo_humanline
from dpo_humanline import best_and_worst
from run import check_flags
from utils import Example, load_reward_model, means, reward_scores, win_rate

RUN = ["--online", "--engine", "hf", "--dataset", PAIRS, "--eval-dataset", PAIRS, "--eval-samples", "4"]
RUN += ["--k", "3", "--round-prompts", "10", "--batch-size", "8", "--num-steps", "7"]
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


def test_two_ranks_sample_the_same_rounds(run, run_on_two):
    for one, two in zip(metrics(run, True), metrics(run_on_two, True), strict=True):
        assert one.keys() == two.keys()
        for key in one:
            exact = 1e-9 if key.startswith("rollout/") and "logp_diff" not in key else 1e-5
            assert two[key] == pytest.approx(one[key], rel=exact, abs=1e-5), (key, one["step"])
    assert (run_on_two / "summary.json").exists()


def test_leftover_pairs_go_into_the_next_round(run):
    """Ten prompts a round, at most ten pairs, eight of them a step: the rest is trained on later."""
    steps = metrics(run)
    pairs, used = 0, 0
    for line in steps:
        if used + 8 > pairs:
            filtered = {s["rollout/round"]: s["rollout/filtered"] for s in steps[: line["step"] + 1]}
            pairs = sum(round((1 - share) * 10) for share in filtered.values())
        used += 8
        assert used <= pairs
    assert [line["rollout/round"] for line in steps] == sorted(line["rollout/round"] for line in steps)
    assert pairs - used < 8 + 10


def test_a_round_sets_the_reference_to_the_policy_and_k_goes_on(run):
    steps, last = metrics(run), 0
    for t, line in enumerate(steps):
        if t and line["rollout/round"] != steps[t - 1]["rollout/round"]:
            last = t
            assert line["humanline/log_ratio_abs_mean"] == 0
        assert line["humanline/steps_since_sync"] == t - last
        if t % 3 == 0:
            last = t


def test_without_humanline_the_reference_is_the_round_start(tmp_path):
    run_ranks(1, [[*RUN, "--no-humanline", "--round-prompts", "40", "--output-dir", str(tmp_path / "run")]])
    steps, start = metrics(tmp_path / "run"), 0
    for t, line in enumerate(steps):
        start = t if t and line["rollout/round"] != steps[t - 1]["rollout/round"] else start
        assert line["humanline/steps_since_sync"] == t - start
    assert steps[-1]["rollout/round"] >= 2


def test_optimizer_and_schedule_carry_on_across_rounds(run):
    assert len({line["lr"] for line in metrics(run)}) == 1  # no warmup in this run, and no restart
    state = json.loads((run / "checkpoints" / "step-6" / "state.json").read_text())
    assert state["step"] == 6 and state["round"] > 3


def test_evaluation_by_sampling_is_logged_and_summarised(run):
    steps, summary = metrics(run), json.loads((run / "summary.json").read_text())
    assert [line["step"] for line in steps if "eval/reward" in line] == [2, 5]
    assert summary["before"]["eval/win_rate"] == [0.5, 0.0]
    names = {"eval/reward", "eval/win_rate", "eval/length", "eval/finished", "eval/margin"}
    assert set(summary["after"]) >= names
    outputs = json.loads((run / "outputs.json").read_text())
    assert len(outputs) == 4 and set(outputs[0]) == {"instruction", "output", "generator"}
    assert outputs[0]["instruction"].startswith("for ") and outputs[0]["output"].split()


def test_best_and_worst_by_hand():
    ids = [[10], [11], [12], [20], [21, 22, 23, 24, 25], [26], [30], [31], [32], [40], [40], [41]]
    rewards = [0.1, 0.9, 0.3, 0.0, 0.5, -0.5, 0.2, 0.3, 0.4, 0.0, 1.0, 1.0]
    samples = []
    for i, (completion_ids, reward) in enumerate(zip(ids, rewards)):
        samples.append(Example(i // 3, "x", [1, 2], completion_ids, reward, text="y").to_train(5))
    groups = [samples[first : first + 3] for first in range(0, 12, 3)]
    made = [best_and_worst(group, 0.5) for group in groups]
    assert [[x.completion_ids for x in pair] for pair in made] == [[[11], [10]], [[21, 22, 23], [26]], [], []]
    assert [[x.row for x in pair] for pair in made] == [[0, 0], [1, 1], [], []]
    equal = [x._replace(reward=1.0) for x in groups[0]]
    assert best_and_worst(equal, 0.0) == ()


def test_win_rate_counts_ties_half():
    wins = win_rate(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 4.0, 1.0]))
    assert wins.tolist() == [1, 0.5, 0, 1]
    found = means({"wins": wins, "one": wins[:1]})
    assert found["wins"] == pytest.approx((0.625, torch.tensor([1, 0.5, 0, 1]).std().item() / 2))
    assert found["one"] == (1, 0)


MOMENTS = {
    "sampling": "generate 4",
    "scoring": "reward_scores 4",
    "mid-round training": "dpo_loss 6",
    "checkpoint": "save 2",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_in_a_round_and_resumed_equals_uninterrupted(run, tmp_path, monkeypatch, moment):
    monkeypatch.setenv("KILL", MOMENTS[moment])
    arguments = [*RUN, "--checkpoint-every", "1", "--output-dir", str(tmp_path / "run")]
    (killed,) = start_ranks(1, [arguments], "killing_worker.py")
    finish([killed])
    assert killed.exitcode == -9
    monkeypatch.delenv("KILL")
    run_ranks(1, [["--resume", str(tmp_path / "run")]])
    assert metrics(tmp_path / "run", True) == metrics(run, True)
    assert (tmp_path / "run" / "summary.json").read_text() == (run / "summary.json").read_text()


def test_two_ranks_killed_and_resumed(run_on_two, tmp_path, monkeypatch):
    monkeypatch.setenv("KILL", "dpo_loss 7")
    arguments = [*RUN, "--micro-batch-tokens", "60", "--checkpoint-every", "1"]
    arguments += ["--output-dir", str(tmp_path / "run")]
    processes = start_ranks(2, [arguments], "killing_worker.py")
    processes[0].join(timeout=120)
    processes[1].kill()
    finish(processes)
    assert processes[0].exitcode == -9
    monkeypatch.delenv("KILL")
    run_ranks(2, [["--resume", str(tmp_path / "run")]])
    assert metrics(tmp_path / "run", True) == metrics(run_on_two, True)


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [(["--temperature", "0"], "--temperature above 0"), (["--reward-model", ""], "--reward-model")],
)
def test_online_needs_different_samples_and_a_judge(wrong, flag, capsys):
    with pytest.raises(SystemExit):
        check_flags(parse_args(dpo_humanline, ["--online", *wrong]), 8)
    assert flag in capsys.readouterr().err


def test_a_sampler_with_stale_weights_stops_the_run(tmp_path):
    worker = tmp_path / "stale_worker.py"
    lines = [
        "import runpy, sys, utils",
        "update, calls = utils.update_engine, []",
        "utils.update_engine = lambda *a: calls.append(1) or (update(*a) if len(calls) < 3 else None)",
        f"sys.argv[0] = {str(ROOT / 'tests' / 'worker.py')!r}",
        "runpy.run_path(sys.argv[0], run_name='__main__')",
    ]
    worker.write_text("\n".join(lines))
    message = refused([*RUN, "--output-dir", str(tmp_path / "run")], worker=str(worker))
    assert "samples another model: log-probs differ by" in message and "--engine" in message


@pytest.mark.skipif(not SHARED.exists(), reason="no real data beside the checkout")
def test_a_real_model_and_real_prompts_go_through_a_round(tmp_path):
    questions = (SHARED / "mt_bench" / "question.jsonl").read_text().splitlines()
    prompts = [{"prompt": json.loads(line)["turns"][0]} for line in questions]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "model-stories260K")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    judge = LlamaForSequenceClassification(LlamaConfig(vocab_size=512, num_labels=1, **sizes))
    judge.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")  # no chat template and no pad token
    run = ["--online", "--engine", "hf", "--model", str(SHARED / "model-stories260K"), "--lr", "1e-3"]
    run += ["--reward-model", str(tmp_path / "rm"), "--dataset", str(tmp_path / "prompts.jsonl")]
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
    model, tokenizer = load_reward_model(str(TOY / "reward_model"), torch.float32, torch.device("cpu"), False)
    samples = [
        Example(1, "for king", [], text="rose lily", finished=True),
        Example(2, "for queen", [], text="fern", finished=False),
        Example(3, "for boy", [], text="aster iris tulip daisy", finished=True),
    ]
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
        assert reward_scores(model, tokenizer, samples).tolist() == pytest.approx(expected, abs=1e-5)


def test_the_score_of_a_reward_model_with_its_own_code_is_used(one_rank):
    class Output:
        logits, score = torch.zeros(2, 19), torch.tensor([0.25, -1.0])

    model, tokenizer = load_reward_model(str(TOY / "reward_model"), torch.float32, torch.device("cpu"), False)
    model.forward = lambda **inputs: Output
    samples = [Example(1, "for king", [], text="rose"), Example(2, "for boy", [], text="iris")]
    scores = reward_scores(model, tokenizer, samples)
    assert sorted(scores.tolist()) == [-1, 0.25]
