"""The GRPO script: loss, gradient and advantages by hand and against TRL, rounds."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import ROOT, metrics, read_pool, read_rows, run_here, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_humanline
from grpo_humanline import Args, encode_row, group_advantages, grpo_loss, grpo_metrics, k3, make_group
from support.data import load_tokenizer
from utils import Example, pad_rows

TOY = ROOT / "toy" / "tales"
RUN = ["--num-steps", "4", "--warmup-fraction", "0", "--batch-size", "16", "--lr", "3e-3", "--beta", "0.1"]
RUN += ["--log-epsilon-P", "-0.4", "--log-epsilon-R", "0.3", "--checkpoint-every", "0", "--k", "2"]
RUN += ["--eval-dataset", ""]
GROUPS = ["--group-size", "4", "--dataset"]
ONLINE = ["--online", "--engine", "hf", "--round-prompts", "10", "--max-new-tokens", "40"]
ONLINE += ["--eval-samples", "4", "--num-steps", "5", "--batch-size", "32", "--checkpoint-every", "2"]
ONLINE += ["--k", "2", "--warmup-fraction", "0", "--eval-dataset", ""]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    """Files of tales: pairs, groups of four, the same with equal scores, prompts."""
    folder = tmp_path_factory.mktemp("grpo")
    rows = read_rows(TOY / "preferences_train.jsonl.gz")[:64]
    groups = []
    for one, two in zip(rows[::2], rows[1::2]):
        completions = [one["rejected"], two["chosen"], two["rejected"], one["chosen"]]
        scores = [one["score_rejected"], two["score_chosen"], two["score_rejected"], one["score_chosen"]]
        groups.append({"prompt": one["prompt"], "completions": completions, "scores": scores})
    prompts = [{"prompt": row["prompt"]} for row in rows]
    files = {
        "pairs": rows,
        "groups": groups,
        "ties": [row | {"scores": [0.5] * 4} for row in groups[::8]],
        "prompts": prompts,
    }
    return {name: write_rows(folder / f"{name}.jsonl", content) for name, content in files.items()}


# === Loss and advantages ===

LOW, HIGH, EPSILON, BETA = -1.5, 1.2, 0.15, 0.01
# nats: outside and inside of both clips, on both sides
RATIOS = (-2.0, -1.0, -0.2, -0.1, 0.0, 0.1, 0.2, 1.0, 1.4)


def loss_and_slope(log_ratio, A, low=LOW, high=HIGH, epsilon=EPSILON, beta=BETA):
    """Equation 1 for a token in python floats, and its derivative by log π_θ, case by case."""
    ratio = math.exp(min(max(log_ratio, low), high))
    bounded = min(max(ratio, 1 - epsilon), 1 + epsilon)
    k3 = math.exp(-log_ratio) + log_ratio - 1
    pessimistic = ratio if A * ratio <= A * bounded else bounded
    moves = low < log_ratio < high and pessimistic == ratio
    return beta * k3 - A * pessimistic, beta * (1 - math.exp(-log_ratio)) - A * ratio * moves


def test_loss_and_gradient_equal_equation_1_by_hand():
    log_ratio = torch.tensor([RATIOS] * 3, dtype=torch.float64, requires_grad=True)
    A = torch.tensor([1.3, -0.7, 0.0], dtype=torch.float64)
    clipped = log_ratio.clamp(LOW, HIGH)
    loss = grpo_loss(clipped, log_ratio, A, BETA, EPSILON)
    found = grpo_metrics(clipped, log_ratio, A, EPSILON)
    ratio, kl, stopped = (found[f"grpo/{name}"] for name in ("ratio_mean", "kl", "clip_fraction"))
    assert stopped.tolist() == [[x > 0.15 for x in RATIOS], [x < -0.17 for x in RATIOS], [False] * 9]
    loss.sum().backward()
    for i in range(3):
        for t, x in enumerate(RATIOS):
            wanted, slope = loss_and_slope(x, A[i].item())
            assert loss[i, t].item() == pytest.approx(wanted, rel=1e-12, abs=1e-15)
            assert log_ratio.grad[i, t].item() == pytest.approx(slope, rel=1e-12, abs=1e-15)
            assert ratio[i, t].item() == pytest.approx(math.exp(min(max(x, LOW), HIGH)), rel=1e-12)
            assert kl[i, t].item() == pytest.approx(math.exp(-x) + x - 1, rel=1e-12, abs=1e-15)


def test_k3_keeps_its_digits_near_0_in_fp32():
    assert k3(torch.tensor([1e-4, -3e-5])).tolist() == pytest.approx([5e-9, 4.5e-10], rel=0.01)


def test_advantages_by_hand():
    expected = [x / math.sqrt(3.5) for x in (-2, -1, 0, 3)]
    for rewards, wanted in (
        ([1, 2, 3, 6], expected),
        ([0.5, 0.1], [1, -1]),
        ([0, 1e-100], [-1, 1]),
        ([3e100, -3e100], [1, -1]),
    ):
        both = torch.tensor([rewards, rewards[::-1]], dtype=torch.float64)
        found = group_advantages(both).tolist()
        assert found == [pytest.approx(wanted, rel=1e-12), pytest.approx(wanted[::-1], rel=1e-12)]


def test_best_and_worst_make_a_group_of_two_and_a_larger_group_keeps_all():
    examples = [
        Example("x", [1], [10 + i], reward=reward) for i, reward in enumerate((0.1, 0.9, 0.9, 0.0, 0.0))
    ]
    pair = make_group(Args(group_size=2, reward_threshold=0.5), examples)
    assert [(x.completion_ids, x.reward) for x in pair] == [([11], 0.9), ([13], 0.0)]
    assert make_group(Args(group_size=2, reward_threshold=0.91), examples) == ()
    assert make_group(Args(group_size=2, reward_threshold=0.0), examples[:1] * 2) == ()
    whole = make_group(Args(group_size=5, reward_threshold=0.9), examples)
    assert [x.reward for x in whole] == [0.9, 0.9, 0.1, 0.0, 0.0]
    args = Args(model=str(TOY / "policy"), max_length=128, reward_threshold=2.0)
    row = {"prompt": "about cart", "chosen": "the cart", "rejected": "a cart"}  # it has no scores
    assert len(encode_row(args, *load_tokenizer(args), row)) == 2


# === A step of the script against other computations ===

HUMANLINE = ("--humanline", "--no-humanline")


@pytest.fixture(scope="module")
def two_steps(data, tmp_path_factory):
    """Two steps of GRPO over all 32 groups at k = 1.

    Returns what the second step logged, with and without humanline, and its policy and reference in float64.
    """
    folder = tmp_path_factory.mktemp("steps")
    flags = "--num-steps 2 --k 1 --batch-size 128 --group-size 4 --warmup-fraction 0 --lr 3e-3 --beta 0.1"
    flags += " --log-epsilon-P=-0.4 --log-epsilon-R 0.3 --checkpoint-every 0 --dataset"
    flags = [*flags.split(), data["groups"], "--eval-dataset", ""]
    logged = {}
    for flag in HUMANLINE:
        run = run_here(grpo_humanline, *flags, flag, "--output-dir", folder / flag)
        logged[flag] = metrics(run)[1]
    run_here(grpo_humanline, *flags, "--num-steps", "1", "--output-dir", folder / "one")
    policy = AutoModelForCausalLM.from_pretrained(folder / "one" / "final").double()
    return logged, policy, AutoModelForCausalLM.from_pretrained(TOY / "policy").double()


def padded_groups(path) -> dict:
    """Returns ids and masks of all sequences of groups of four, padded for TRL, and their advantages."""
    tokenizer, eos_ids = load_tokenizer(Args(model=str(TOY / "policy"), max_length=128))
    groups = [encode_row(Args(group_size=4), tokenizer, eos_ids, row) for row in read_rows(path)]
    examples = [example for group in groups for example in group]
    rewards = torch.tensor([[x.reward for x in group] for group in groups], dtype=torch.float64)
    inputs = {"advantages": group_advantages(rewards).flatten()}
    for name, side in (("prompt", "left"), ("completion", "right")):
        ids = [getattr(example, f"{name}_ids") for example in examples]
        inputs[f"{name}_ids"] = pad_rows(ids, "cpu", side=side).long()
        inputs[f"{name}_mask"] = pad_rows([[1] * len(row) for row in ids], "cpu", side=side)
    return inputs


def completion_logps(model, inputs):
    """Returns the log-probs of all completion tokens of `padded_groups`, (B, T)."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=seen).logits[:, inputs["prompt_ids"].shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]


@pytest.mark.parametrize("flag", HUMANLINE)
def test_loss_gradient_norm_and_metrics_of_a_step_by_hand(two_steps, data, flag):
    logged, policy, reference = two_steps
    inputs = padded_groups(data["groups"])
    mask = inputs["completion_mask"].bool()
    A = inputs["advantages"][:, None].expand_as(mask)[mask].tolist()
    logps = completion_logps(policy, inputs)[mask]
    with torch.no_grad():
        log_ratio = (logps - completion_logps(reference, inputs)[mask]).tolist()
    low, high = (-0.4, 0.3) if flag == "--humanline" else (-math.inf, math.inf)
    found = [loss_and_slope(*token, low, high, beta=0.1) for token in zip(log_ratio, A)]
    losses, slopes = zip(*found)
    count = len(found)
    policy.zero_grad()
    (logps * torch.tensor(slopes, dtype=torch.float64) / count).sum().backward()
    norm = math.sqrt(sum(parameter.grad.square().sum().item() for parameter in policy.parameters()))
    ratios = [math.exp(min(max(x, low), high)) for x in log_ratio]
    removed = sum(a > 0 and ratio > 1.15 or a < 0 and ratio < 0.85 for ratio, a in zip(ratios, A))
    by_hand = {
        "loss": sum(losses) / count,
        "grad_norm": norm,
        "grpo/ratio_mean": sum(ratios) / count,
        "grpo/clip_fraction": removed / count,
        "grpo/kl": sum(math.exp(-x) + x - 1 for x in log_ratio) / count,
        "humanline/clipped_low": sum(x < -0.4 for x in log_ratio) / count,
        "humanline/clipped_high": sum(x > 0.3 for x in log_ratio) / count,
        "humanline/log_ratio_abs_mean": sum(abs(x) for x in log_ratio) / count,
    }
    for key, value in by_hand.items():
        assert logged[flag][key] == pytest.approx(value, rel=1e-6), key
    assert by_hand["grpo/clip_fraction"] > 0.01 and by_hand["humanline/clipped_low"] > 0.01


@pytest.mark.filterwarnings("ignore")
def test_no_humanline_equals_trls_dapo_loss_with_the_same_old_log_probs(two_steps, data, tmp_path):
    """GRPOTrainer's own loss function on the same completions.

    Where the definitions differ: TRL multiplies k3 by the ratio unless use_bias_correction_kl is off; it
    divides by the sample standard deviation + 1e-4, so advantages are handed over; and its KL refers to a
    model of its own, while here one reference gives old and KL log-probs.
    """
    from datasets import Dataset

    trl = pytest.importorskip("trl")  # takes seconds, which ranks that import this file save

    logged, policy, reference = two_steps
    config = dict(loss_type="dapo", beta=0.1, epsilon=0.15, num_generations=4, use_bias_correction_kl=False)
    config |= dict(per_device_train_batch_size=128, use_cpu=True, bf16=False, report_to="none")
    trainer = trl.GRPOTrainer(
        model=policy,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(output_dir=str(tmp_path), gradient_checkpointing=False, **config),
        train_dataset=Dataset.from_list([{"prompt": "about cat"}] * 128),
        processing_class=AutoTokenizer.from_pretrained(TOY / "policy"),
    )
    trainer.current_gradient_accumulation_steps = 1
    inputs = padded_groups(data["groups"])
    with torch.no_grad():
        inputs["old_per_token_logps"] = inputs["ref_per_token_logps"] = completion_logps(reference, inputs)
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    policy.train().zero_grad()
    loss = trainer.compute_loss(policy, inputs)
    loss.backward()
    norm = math.sqrt(sum(parameter.grad.double().square().sum().item() for parameter in policy.parameters()))
    mine, theirs = logged["--no-humanline"], trainer._metrics["train"]
    assert mine["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert mine["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert mine["grpo/kl"] == pytest.approx(theirs["kl"][0], rel=1e-5)
    assert mine["grpo/clip_fraction"] == pytest.approx(theirs["clip_ratio/region_mean"][0], rel=1e-5)


def test_the_logged_loss_is_the_sum_that_backward_got(data, tmp_path, monkeypatch):
    """Dr. GRPO divides by a constant. Its loss was logged as the mean over tokens."""
    source = Path(grpo_humanline.__file__).read_text()
    assert source.count("/ completion_tokens") == 1
    edited = ModuleType("dr_grpo")
    edited.__file__ = grpo_humanline.__file__
    monkeypatch.setitem(sys.modules, "dr_grpo", edited)
    exec(source.replace("/ completion_tokens", "/ 1000"), vars(edited))
    flags = [*RUN, "--num-steps", "1", "--batch-size", "128", *GROUPS, data["groups"]]
    (step,) = metrics(run_here(edited, *flags, "--output-dir", tmp_path / "run"))
    inputs = padded_groups(data["groups"])
    lengths = inputs["completion_mask"].sum(1)  # at step 0 every ratio is 1
    assert step["loss"] == pytest.approx(-(inputs["advantages"] * lengths).sum().item() / 1000, rel=1e-6)


def test_ten_rounds_whose_rewards_are_all_equal_end_the_run(data, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_humanline, "SCORE", lambda samples: [1.0] * len(samples))
    flags = [*ONLINE, "--eval-samples", "0", "--dataset", data["prompts"]]
    flags += ["--reward-model", "", "--group-size", "4"]
    with pytest.raises(SystemExit, match="rounds 1 to 10: no prompt's rewards differ"):
        run_here(grpo_humanline, *flags, "--output-dir", tmp_path / "run")


# === Rounds ===


def test_a_round_keeps_all_samples_of_a_group(data, tmp_path):
    """Ten prompts a round: groups of 8 fill two batches of 32 and a half, which waits for the next round."""
    flags = [*ONLINE, "--dataset", data["prompts"], "--group-size", "8"]
    steps = metrics(run_here(grpo_humanline, *flags, "--output-dir", tmp_path / "run"))
    assert [step.get("rollout/round") for step in steps] == [1, None, 2, None, None]
    waiting = read_pool(tmp_path / "run", 4)
    assert [len(group) for group in waiting] == [8] * 4
    for group in waiting:
        rewards = [x.reward for x in group]
        assert len({x.prompt for x in group}) == 1 and len(set(rewards)) > 2
        assert rewards == sorted(rewards, reverse=True)


def test_a_round_keeps_the_best_and_the_worst_of_many_samples(data, tmp_path):
    flags = [*ONLINE, "--dataset", data["pairs"], "--batch-size", "8", "--num-steps", "3"]
    waiting = read_pool(run_here(grpo_humanline, *flags, "--output-dir", tmp_path / "run"), 2)
    assert waiting and all(best.reward > worst.reward for best, worst in waiting)


# === Evaluation ===


@pytest.mark.parametrize(("kind", "of_groups"), [("pairs", {"accuracy", "margin"}), ("prompts", set())])
def test_pairs_and_prompts_can_be_evaluated(data, tmp_path, kind, of_groups):
    run = [*RUN, "--num-steps", "1", "--engine", "hf", "--max-new-tokens", "20", "--eval-samples", "4"]
    run += ["--beta", "0", "--dataset", data["pairs"], "--eval-dataset", data[kind]]
    run_here(grpo_humanline, *run, "--output-dir", tmp_path / "run")
    after = json.loads((tmp_path / "run" / "summary.json").read_text())["after"]
    names = of_groups | {"reward", "win_rate", "length", "finished", "kl"}
    assert after.keys() == {f"eval/{name}" for name in names}
    assert after.get("eval/margin", [1])[0] > 0.1
