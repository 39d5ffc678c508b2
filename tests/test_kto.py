"""The KTO script: loss and z_0 by hand and against TRL, the same numbers for every layout, labels, rounds."""

import json
import math

import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    agree,
    full_logps,
    metrics,
    read_rows,
    run_here,
    run_layouts,
    toy_rows,
    trl_settings,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import kto_humanline
from kto_humanline import Args, encode_row, kto_loss, kto_margins, mismatch, sequence_log_ratio
from support.data import load_tokenizer
from utils import Example, InputError, pad_batch

TOY = ROOT / "toy" / "tales"
RUN = ["--num-steps", "4", "--warmup-fraction", "0", "--batch-size", "16", "--k", "2", "--eval-dataset", ""]
RUN += ["--checkpoint-every", "0"]
ROWS = read_rows(TOY / "preferences_train.jsonl.gz")[:128]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, unpaired = tmp_path_factory.mktemp("kto"), []
    for i, row in enumerate(ROWS[:64]):
        text = row["chosen" if i % 3 else "rejected"]
        unpaired.append({"prompt": row["prompt"], "completion": text, "label": i % 3 > 0})
    paired = write_rows(folder / "pairs.jsonl", ROWS[:64])
    return {"paired": paired, "unpaired": write_rows(folder / "unpaired.jsonl", unpaired)}


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
    from trl import KTOConfig, KTOTrainer  # takes seconds, which ranks that import this file save

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
    config = KTOConfig(beta=0.5, desirable_weight=1.1, undesirable_weight=0.9, **settings)
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    rows = Dataset.from_list(chats)
    trainer = KTOTrainer(policy, reference, config, train_dataset=rows, processing_class=tokenizer)
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


def test_a_batch_has_no_half_pair(files, one_rank):
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    with pytest.raises(InputError, match="--batch-size 5 must be a multiple of 2"):
        kto_humanline.load_data(Args(dataset=files["paired"], batch_size=5), tokenizer, {5})


def test_mismatched_sequences_are_at_most_as_long_as_any_other():
    """A short prompt with another's completion was longer than --max-length."""
    pairs = []
    for prompt, length in ((1, 3), (2, 30)):
        pairs.append(tuple(Example("", [prompt] * length, [kind] * (33 - length)) for kind in (7, 8)))
    assert [x.length for x in mismatch(pairs, 33)] == [6, 6, 33, 33]


def mean_log_ratio(log_ratio, mask):
    return (log_ratio * mask).sum(-1) / mask.sum(-1)


@pytest.mark.parametrize("rewards", [sequence_log_ratio, mean_log_ratio], ids=["sums", "means"])
def test_z_0_of_a_step_by_hand(files, tmp_path, monkeypatch, rewards):
    """Step 1 at k = 1: the reference is the initial policy, the policy one update on; a batch is all rows.

    means: an edit of `sequence_log_ratio` changes the margins and z_0, which would have other units.
    """
    monkeypatch.setattr(kto_humanline, "sequence_log_ratio", rewards)
    flags = [*RUN, "--dataset", files["paired"], "--batch-size", "128", "--k", "1", "--lr", "0.003"]
    flags += ["--log-epsilon-P", "-0.3", "--log-epsilon-R", "0.3", "--num-steps", "2"]
    folder = run_here(kto_humanline, *flags, "--checkpoint-every", "1", "--output-dir", tmp_path / "run")
    one_step = run_here(kto_humanline, *flags[:-1], "1", "--output-dir", tmp_path / "one")
    tokenizer, eos_ids = load_tokenizer(Args(model=str(TOY / "policy"), max_length=128))
    groups = [encode_row(Args(), tokenizer, eos_ids, row) for row in ROWS[:64]]
    order = np.random.default_rng((1, 1)).permutation(64)  # epoch 1: a batch is the whole set
    batch = [member for i in order for member in groups[i]]
    mixed = []
    for i, x in enumerate(batch):
        same_half = batch[i % 2 :: 2]
        others = same_half[i // 2 + 1 :] + same_half[: i // 2]
        other = next(y for y in others if y.prompt_ids != x.prompt_ids)
        mixed.append(x._replace(completion_ids=other.completion_ids))
    ids, mask = pad_batch(mixed, "cpu")
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(f).double() for f in (one_step / "final", TOY / "policy")
    )
    with torch.no_grad():
        log_ratio = full_logps(policy, ids, mask) - full_logps(reference, ids, mask)
    clipped = log_ratio.clamp(-0.3, 0.3) * mask
    sums = clipped.sum(1)
    if rewards is mean_log_ratio:
        sums = sums / mask.sum(1)
    first, second = metrics(folder)
    assert (log_ratio.abs() > 0.3).any() and first["kto/z_0"] == 0
    assert second["kto/z_0"] == pytest.approx(max(sums.mean().item(), 0), rel=1e-6, abs=1e-9)
    assert second["kto/z_0"] > 0


# === Runs ===

LAYOUTS = [(1, "0"), (2, "120")]  # ranks, --micro-batch-tokens: the whole batch, four sequences
EXACT = ["--max-grad-norm", "1e9"]  # the norm is rounded to fp32, and so is what is clipped by it
SAME = ["kto/z_0", "loss", "rewards/chosen", "rewards/rejected", "humanline/log_ratio_abs_mean"]


@pytest.mark.slow
def test_z_0_loss_and_gradient_norm_agree_for_all_layouts(files, tmp_path):
    jobs = {name: [*RUN, *EXACT, "--dataset", path] for name, path in files.items()}
    for expected, other in run_layouts(tmp_path, jobs, LAYOUTS, "kto_humanline").values():
        agree(expected, other, [*SAME, "grad_norm"], rel=1e-6, abs=1e-6)  # gradients are stored in fp32


def test_one_class_only_trains(tmp_path):
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in ROWS[:32]]
    data = write_rows(tmp_path / "good.jsonl", rows)
    steps = metrics(run_here(kto_humanline, *RUN, "--dataset", data, "--output-dir", tmp_path / "run"))
    assert steps[-1]["rewards/chosen"] > 0 and "rewards/rejected" not in steps[-1]


def test_a_round_makes_the_best_desirable_and_the_worst_undesirable(files, tmp_path):
    flags = [*RUN, "--online", "--engine", "hf", "--round-prompts", "12", "--max-new-tokens", "40"]
    flags += ["--eval-samples", "4", "--dataset", files["paired"], "--eval-dataset", files["paired"]]
    steps = metrics(run_here(kto_humanline, *flags, "--output-dir", tmp_path / "run"), True)
    assert [step.get("rollout/round") for step in steps] == [1, 2, None, 3]  # 12 pairs a round, 8 a step
    assert [step["humanline/log_ratio_abs_mean"] == 0 for step in steps] == [True, True, False, True]
    assert all({"rewards/chosen", "rewards/rejected"} <= set(step) for step in steps)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"eval/loss", "eval/reward", "eval/win_rate"} <= set(summary["after"])
