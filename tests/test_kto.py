"""KTO: loss and z_0 by hand, the same numbers for every layout, labels, rounds, resume."""

import math

import numpy as np
import pytest
import torch
from conftest import ROOT, agree, metrics, read_rows, refused, run_layouts, run_ranks, write_rows
from test_loss import batch
from transformers import AutoModelForCausalLM
from worker import run_here

import kto_humanline
import utils
from kto_humanline import Args, best_and_worst, encode_row, kto_loss, kto_margins, mismatch
from support.data import load_tokenizer
from utils import Example, pad_batch, token_logps

TOY = ROOT / "toy" / "tales"
RUN = ["--num-steps", "4", "--warmup-fraction", "0", "--batch-size", "16", "--k", "2", "--eval-dataset", ""]
RUN += ["--checkpoint-every", "0"]
ROWS = read_rows(TOY / "preferences_train.jsonl.gz")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, unpaired = tmp_path_factory.mktemp("kto"), []
    for i, row in enumerate(ROWS[:64]):
        text = row["chosen" if i % 3 else "rejected"]
        unpaired.append({"prompt": row["prompt"], "completion": text, "label": i % 3 > 0})
    paired = write_rows(folder / "pairs.jsonl", ROWS[:64])
    return {"paired": paired, "unpaired": write_rows(folder / "unpaired.jsonl", unpaired)}


def test_loss_equals_equation_7_by_hand_and_gradient_finite_differences():
    log_ratio, mask = batch()
    desirable = torch.tensor([True, False, True, False, False, True])
    clipped = log_ratio.clamp(-1.5, 1.5)
    margins = kto_margins(clipped, mask, desirable, 0.7, 0.25)
    loss = kto_loss(margins, desirable, 1.1, 0.9)
    for i, row in enumerate(log_ratio.tolist()):
        r = sum(min(max(x, -1.5), 1.5) for x, m in zip(row, mask[i]) if m)
        margin = 0.25 * (r - 0.7) * (1 if desirable[i] else -1)
        sigmoid = 1 / (1 + math.exp(-margin))
        assert margins[i].item() == pytest.approx(margin, rel=1e-12)
        assert loss[i].item() == pytest.approx((1.1 if desirable[i] else 0.9) * (1 - sigmoid), rel=1e-12)
    variable = log_ratio.clone().requires_grad_()

    def total(x):
        margins = kto_margins(x.clamp(-1.5, 1.5), mask, desirable, 0.7, 0.25)
        return kto_loss(margins, desirable, 1.1, 0.9).sum()

    assert torch.autograd.gradcheck(total, variable, eps=1e-7)
    total(variable).backward()
    outside = variable.abs() > 1.5
    assert (variable.grad[outside] == 0).all() and (variable.grad[~outside & mask.bool()] != 0).all()


def test_mismatch_takes_the_completion_of_the_next_example_with_another_prompt():
    pairs = [tuple(Example("", [row], [10 * row + i]) for i in (0, 1)) for row in (1, 2, 3)]
    found = [(x.prompt_ids, x.completion_ids) for x in mismatch(pairs, 99)]
    assert found == [([1], [20]), ([1], [21]), ([2], [30]), ([2], [31]), ([3], [10]), ([3], [11])]
    singles = [(Example("", [prompt], [i]),) for i, prompt in enumerate((1, 1, 2, 3))]
    found = [(x.prompt_ids, x.completion_ids) for x in mismatch(singles, 99)]
    assert found == [([1], [2]), ([1], [2]), ([2], [3]), ([3], [0])]
    for one_prompt in (pairs[:1], singles[:2], singles[:1]):
        with pytest.raises(utils.InputError, match="one prompt"):
            mismatch(one_prompt, 99)


def test_a_round_makes_the_best_desirable_and_the_worst_undesirable():
    samples = [Example("", [1], [10 + i], reward) for i, reward in enumerate((0.3, 0.9, 0.1))]
    pair = best_and_worst(samples, 0.5)
    assert [(x.completion_ids, x.reward) for x in pair] == [([11], 0.9), ([12], 0.1)]
    assert best_and_worst(samples, 0.81) == ()


def test_z_0_by_hand(files, tmp_path):
    """Step 1 at k=1: the reference is the initial policy, the policy one update on; a batch is all rows."""
    flags = [*RUN, "--dataset", files["paired"], "--batch-size", "128", "--k", "1", "--lr", "0.003"]
    flags += ["--log-epsilon-P", "-0.3", "--log-epsilon-R", "0.3", "--num-steps"]
    two_steps = [*flags, "2", "--output-dir", f"{tmp_path}/run"]
    one_step = [*flags, "1", "--output-dir", f"{tmp_path}/one"]
    run_ranks(1, [two_steps, one_step], script="kto_humanline")
    tokenizer, eos_ids = load_tokenizer(Args(model=str(TOY / "policy")))
    groups = [encode_row(Args(), tokenizer, eos_ids, row) for row in ROWS[:64]]
    order = np.random.default_rng((1, 1)).permutation(64)  # epoch 1: a batch is the whole set
    batch = [member for i in order for member in groups[i]]
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(f).double() for f in (tmp_path / "one/final", TOY / "policy")
    )
    total = 0.0
    for i, x in enumerate(batch):
        same_half = batch[i % 2 :: 2]
        others = same_half[i // 2 + 1 :] + same_half[: i // 2]
        other = next(y for y in others if y.prompt_ids != x.prompt_ids)
        ids, mask = pad_batch([x._replace(completion_ids=other.completion_ids)], "cpu")
        with torch.no_grad():
            log_ratio = token_logps(policy, ids, mask) - token_logps(reference, ids, mask)
        total += log_ratio.clamp(-0.3, 0.3).sum().item()
    first, second = metrics(tmp_path / "run")
    assert first["kto/z_0"] == 0
    assert second["kto/z_0"] == pytest.approx(max(total / 128, 0), rel=1e-6, abs=1e-9)


LAYOUTS = [(1, "0"), (1, "1"), (2, "120")]  # ranks, --micro-batch-tokens: the whole batch, one sequence, four
EXACT = ["--max-grad-norm", "1e9"]  # the norm is rounded to fp32, and so is what is clipped by it
SAME = ["kto/z_0", "loss", "rewards/chosen", "rewards/rejected", "humanline/log_ratio_abs_mean"]


def test_z_0_loss_and_gradient_norm_agree_for_all_layouts(files, tmp_path):
    jobs = {name: [*RUN, *EXACT, "--dataset", path] for name, path in files.items()}
    jobs["no humanline"] = [*jobs["paired"], "--no-humanline"]
    for expected, *others in run_layouts(tmp_path, jobs, LAYOUTS, "kto_humanline").values():
        for steps in others:
            agree(expected, steps, [*SAME, "grad_norm"], rel=1e-6, abs=1e-6)  # gradients are stored in fp32


def test_a_batch_with_one_prompt_stops_and_says_so(tmp_path):
    rows = [row for row in ROWS if row["prompt"] == "about cat"][:8]
    run = [*RUN, "--dataset", write_rows(tmp_path / "one.jsonl", rows), "--output-dir", str(tmp_path / "run")]
    message = refused(run, script="kto_humanline")
    assert "all rows have one prompt, but z_0 needs two" in message


def test_one_class_only_trains(tmp_path):
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in ROWS[:32]]
    data = write_rows(tmp_path / "good.jsonl", rows)
    steps = metrics(run_here(kto_humanline, *RUN, "--dataset", data, "--output-dir", tmp_path / "run"))
    assert steps[-1]["rewards/chosen"] > 0 and "rewards/rejected" not in steps[-1]


def test_online_splits_best_and_worst_and_resumes(files, tmp_path, kill_and_resume):
    run = [*RUN[:-1], "2", "--online", "--engine", "hf", "--round-prompts", "12", "--max-new-tokens", "40"]
    run += ["--eval-samples", "4", "--dataset", files["paired"], "--eval-dataset", files["paired"]]
    run_ranks(1, [[*run, "--output-dir", f"{tmp_path}/one"]], script="kto_humanline")
    run_ranks(2, [[*run, "--output-dir", f"{tmp_path}/two"]], script="kto_humanline")
    steps = metrics(tmp_path / "one", True)
    assert [step.get("rollout/round") for step in steps] == [1, 2, None, 3]  # 12 pairs a round, 8 a step
    assert [step["humanline/log_ratio_abs_mean"] == 0 for step in steps] == [True, True, False, True]
    agree(steps, metrics(tmp_path / "two", True), ["loss", "rollout/reward_mean"])
    # The first call is the evaluation, the fifth step 3.
    kill_and_resume(tmp_path / "one", run, "kto_loss 5", "kto_humanline")
