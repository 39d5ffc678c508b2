"""The KTO script: loss and z_0 by hand and against TRL, labels, rounds."""

import json
import math

import pytest
import torch
from helpers import (
    ROOT,
    metrics,
    read_rows,
    run_here,
    toy_rows,
    trl_settings,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import kto_humanline
from kto_humanline import Args, kto_loss, kto_margins, mismatch
from utils import Example, InputError

TOY = ROOT / "toy" / "tales"
RUN = ["--num-steps", "4", "--warmup-fraction", "0", "--batch-size", "16", "--k", "2", "--eval-dataset", ""]
RUN += ["--checkpoint-every", "0"]
ROWS = read_rows(TOY / "preferences_train.jsonl.gz")[:64]


@pytest.fixture
def pairs(tmp_path):
    return write_rows(tmp_path / "pairs.jsonl", ROWS)


# === Loss ===


def test_loss_equals_equation_7_by_hand_and_gradient_finite_differences():
    generator = torch.Generator().manual_seed(0)
    log_ratio = 2 * torch.randn(6, 6, dtype=torch.float64, generator=generator)
    mask = (torch.arange(6) < torch.tensor([6, 4, 1, 2, 6, 3])[:, None]).double()
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


@pytest.mark.filterwarnings("ignore")
def test_loss_curve_of_trls_trainer_where_its_kl_batch_is_ours(tmp_path):
    """With two examples of different prompts there is one way to mismatch them, and both take it. With more,
    TRL pairs a prompt with the completion before it in the order of the data set, and this script with the
    next other prompt."""
    from datasets import Dataset

    trl = pytest.importorskip("trl")  # takes seconds, which ranks that import this file save

    one, *rest = toy_rows(TOY, 40)
    two = next(row for row in rest if row["prompt"] != one["prompt"])
    rows = [
        {"prompt": one["prompt"], "completion": one["chosen"], "label": True},
        {"prompt": two["prompt"], "completion": two["rejected"], "label": False},
    ]
    flags = ["--no-humanline", "--dataset", write_rows(tmp_path / "rows.jsonl", rows), "--batch-size", "2"]
    flags += ["--beta", "0.5", "--lambda-D", "1.1", "--lambda-U", "0.9", "--lr", "1e-3", "--num-steps", "5"]
    flags += ["--warmup-fraction", "0", "--adam-eps", "1e-8", "--weight-decay", "0", "--max-grad-norm", "1"]
    ours = metrics(run_here(kto_humanline, *flags, "--eval-dataset", "", "--output-dir", tmp_path / "ours"))
    chats = []
    for row in rows:
        prompt = [{"role": "user", "content": row["prompt"]}]
        completion = [{"role": "assistant", "content": row["completion"]}]
        chats.append({"prompt": prompt, "completion": completion, "label": row["label"]})
    policy, reference = (AutoModelForCausalLM.from_pretrained(TOY / "policy") for _ in range(2))
    settings = trl_settings(tmp_path / "trl", 2, 5, 1e-3)
    config = trl.KTOConfig(beta=0.5, desirable_weight=1.1, undesirable_weight=0.9, **settings)
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    rows = Dataset.from_list(chats)
    trainer = trl.KTOTrainer(policy, reference, config, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    theirs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)


# === The reference point ===


def test_mismatch_takes_the_completion_of_the_next_example_with_another_prompt():
    pairs = [tuple(Example("", [row], [10 * row + i]) for i in (0, 1)) for row in (1, 2, 3)]
    found = [(x.prompt_ids, x.completion_ids) for x in mismatch(pairs, 99)]
    assert found == [([1], [20]), ([1], [21]), ([2], [30]), ([2], [31]), ([3], [10]), ([3], [11])]
    singles = [(Example("", [prompt], [i]),) for i, prompt in enumerate((1, 1, 2, 3))]
    found = [(x.prompt_ids, x.completion_ids) for x in mismatch(singles, 99)]
    assert found == [([1], [2]), ([1], [2]), ([2], [3]), ([3], [0])]
    with pytest.raises(InputError, match="a batch has one prompt alone, but z_0 needs two"):
        mismatch(singles[:2], 99)


def test_a_batch_has_no_half_pair(pairs, one_rank):
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    with pytest.raises(InputError, match="--batch-size 5 must be a multiple of 2"):
        kto_humanline.load_data(Args(dataset=pairs, batch_size=5), tokenizer, {5})


def test_mismatched_sequences_are_at_most_as_long_as_any_other():
    """A short prompt with another's completion was longer than --max-length."""
    pairs = []
    for prompt, length in ((1, 3), (2, 30)):
        pairs.append(tuple(Example("", [prompt] * length, [kind] * (33 - length)) for kind in (7, 8)))
    assert [x.length for x in mismatch(pairs, 33)] == [6, 6, 33, 33]


@pytest.mark.parametrize(("edit", "z_0"), [(None, 0.9), (lambda x, mask: (x * mask).mean(-1), 0.3)])
def test_z_0_is_the_mean_of_clipped_sums_or_of_what_an_edit_makes_of_them(monkeypatch, edit, z_0):
    if edit:
        monkeypatch.setattr(kto_humanline, "sequence_log_ratio", edit)
    logps = {
        "high": torch.tensor([[0, -1.0, -2.0], [0, -1.2, 0]]),
        "low": torch.tensor([[0, -3, -2.5], [0, -1, 0]]),
    }
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    monkeypatch.setattr(kto_humanline.utils, "completion_logps", lambda model, *rest: (logps[model], mask))
    assert kto_humanline.reference_point(Args(), "high", "low", []) == pytest.approx(z_0)
    assert kto_humanline.reference_point(Args(), "low", "high", []) == 0


# === Runs ===


def test_one_class_only_trains(tmp_path):
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in ROWS[:32]]
    data = write_rows(tmp_path / "good.jsonl", rows)
    steps = metrics(run_here(kto_humanline, *RUN, "--dataset", data, "--output-dir", tmp_path / "run"))
    assert steps[-1]["rewards/chosen"] > 0 and "rewards/rejected" not in steps[-1]


def test_a_round_makes_the_best_desirable_and_the_worst_undesirable(pairs, tmp_path):
    flags = [*RUN, "--online", "--engine", "hf", "--round-prompts", "12", "--max-new-tokens", "40"]
    flags += ["--eval-samples", "4", "--dataset", pairs, "--eval-dataset", pairs]
    steps = metrics(run_here(kto_humanline, *flags, "--output-dir", tmp_path / "run"), True)
    assert [step.get("rollout/round") for step in steps] == [1, 2, None, 3]  # 12 pairs a round, 8 a step
    assert all({"rewards/chosen", "rewards/rejected"} <= set(step) for step in steps)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"eval/loss", "eval/reward", "eval/win_rate"} <= set(summary["after"])
