"""KTO: loss and z_0 by hand, the same numbers for every layout, data, the four variants, resume."""

import gzip
import json
import math
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED, finish, metrics, refused, run_ranks, start_ranks, tokens_of, trl_settings
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer

from kto_humanline import Args, kto_loss, load_groups, make_group, mismatch, read_row
from utils import Example, encode_group, token_logps

TOY = ROOT / "toy" / "tales"
RUN = ["--num-steps", "4", "--warmup-fraction", "0", "--batch-size", "16", "--k", "2", "--eval-dataset", ""]
RUN += ["--checkpoint-every", "0"]


def toy_rows(count: int) -> list[dict]:
    return [json.loads(line) for line in gzip.open(TOY / "preferences_train.jsonl.gz", "rt")][:count]


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def paired(tmp_path_factory):
    return write(tmp_path_factory.mktemp("kto") / "pairs.jsonl", toy_rows(64))


@pytest.fixture(scope="module")
def unpaired(tmp_path_factory):
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen" if i % 3 else "rejected"], "label": bool(i % 3)}
        for i, row in enumerate(toy_rows(64))
    ]
    return write(tmp_path_factory.mktemp("kto") / "unpaired.jsonl", rows)


def test_loss_equals_equation_7_by_hand_and_gradient_finite_differences():
    generator = torch.Generator().manual_seed(0)
    log_ratio = 2 * torch.randn(4, 5, dtype=torch.float64, generator=generator)
    mask = (torch.arange(5) < torch.tensor([5, 3, 1, 4])[:, None]).double()
    desirable = torch.tensor([True, False, True, False])
    clipped = log_ratio.clamp(-1.5, 1.5)
    loss, rewards = kto_loss(clipped, mask, desirable, 0.7, 0.25, 1.1, 0.9)
    for i, row in enumerate(log_ratio.tolist()):
        r = sum(min(max(x, -1.5), 1.5) for x, m in zip(row, mask[i]) if m)
        sigmoid = 1 / (1 + math.exp(-0.25 * (r - 0.7) * (1 if desirable[i] else -1)))
        assert loss[i].item() == pytest.approx((1.1 if desirable[i] else 0.9) * (1 - sigmoid), rel=1e-12)
        assert rewards[i].item() == pytest.approx(0.25 * r, rel=1e-12)
    variable = log_ratio.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: kto_loss(x.clamp(-1.5, 1.5), mask, desirable, 0.7, 0.25, 1.1, 0.9)[0].sum(),
        variable,
        eps=1e-7,
    )
    kto_loss(variable.clamp(-1.5, 1.5), mask, desirable, 0.7, 0.25, 1.1, 0.9)[0].sum().backward()
    outside = variable.abs() > 1.5
    assert (variable.grad[outside] == 0).all() and (variable.grad[~outside & mask.bool()] != 0).all()


def test_desirable_and_undesirable_are_symmetric():
    log_ratio, mask = torch.randn(3, 4, dtype=torch.float64), torch.ones(3, 4)
    yes, no = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    desirable, _ = kto_loss(log_ratio, mask, yes, 0.0, 0.5, 1.0, 1.0)
    undesirable, _ = kto_loss(-log_ratio, mask, no, 0.0, 0.5, 1.0, 1.0)
    assert torch.equal(desirable, undesirable)


def test_mismatch_takes_the_completion_of_the_next_example_with_another_prompt():
    pairs = [Example(row, "", [row], [10 * row + i], 1.0 - i) for row in (1, 2, 3) for i in (0, 1)]
    found = [(x.prompt_ids, x.completion_ids) for x in mismatch(pairs, 2)]
    assert found == [([1], [20]), ([1], [21]), ([2], [30]), ([2], [31]), ([3], [10]), ([3], [11])]
    singles = [Example(0, "", [prompt], [i]) for i, prompt in enumerate((1, 1, 2, 3))]
    found = [(x.prompt_ids, x.completion_ids) for x in mismatch(singles, 1)]
    assert found == [([1], [2]), ([1], [2]), ([2], [3]), ([3], [0])]
    assert mismatch(pairs[:2], 2) == [] and mismatch(singles[:2], 1) == [] and mismatch(singles[:1], 1) == []


def test_a_round_makes_the_best_desirable_and_the_worst_undesirable():
    samples = [Example(1, "", [1], [10 + i], reward) for i, reward in enumerate((0.3, 0.9, 0.1))]
    pair = make_group(Args(reward_threshold=0.5), samples)
    assert [(x.completion_ids, x.reward) for x in pair] == [([11], 1.0), ([12], 0.0)]
    assert make_group(Args(reward_threshold=0.81), samples) == ()


def test_z_0_by_hand(paired, tmp_path):
    """Step 1 at k=1: the reference is the initial policy, the policy one update on; a batch is all rows."""
    flags = ["--dataset", paired, "--eval-dataset", "", "--batch-size", "128", "--warmup-fraction", "0"]
    flags += ["--k", "1", "--lr", "0.003", "--log-epsilon-P", "-0.3", "--log-epsilon-R", "0.3", "--num-steps"]
    two_steps = [*flags, "2", "--output-dir", f"{tmp_path}/run"]
    one_step = [*flags, "1", "--output-dir", f"{tmp_path}/one"]
    run_ranks(1, [two_steps, one_step], script="kto_humanline")
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    tokens = tokens_of(tokenizer, {tokenizer.eos_token_id})
    groups = []
    for number, row in enumerate(toy_rows(64), 1):
        group, _ = encode_group(Args(), tokens, number, *read_row(row))
        groups.append(group)
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
        ids = torch.tensor([x.prompt_ids + other.completion_ids])
        mask = torch.zeros(ids.shape)
        mask[:, len(x.prompt_ids) :] = 1
        with torch.no_grad():
            log_ratio = token_logps(policy, ids, mask) - token_logps(reference, ids, mask)
        total += log_ratio.clamp(-0.3, 0.3).sum().item()
    first, second = metrics(tmp_path / "run")
    assert first["kto/z_0"] == 0
    assert second["kto/z_0"] == pytest.approx(max(total / 128, 0), rel=1e-6, abs=1e-9)


JOBS = [("paired", "--humanline"), ("unpaired", "--humanline"), ("paired", "--no-humanline")]
LAYOUTS = [(1, "0", JOBS), (1, "1", JOBS), (2, "120", JOBS[:2])]  # ranks, --micro-batch-tokens
EXACT = ["--max-grad-norm", "1e9"]  # the norm is rounded to fp32, and so is what is clipped by it
SAME = ["kto/z_0", "loss", "rewards/chosen", "rewards/rejected", "humanline/log_ratio_abs_mean"]


@pytest.fixture(scope="module")
def run_layout(paired, unpaired, tmp_path_factory):
    """Makes {(data, flag): metrics} of a layout."""

    def run(ranks, size, jobs):
        files, batch = {"paired": paired, "unpaired": unpaired}, []
        for data, flag in jobs:
            batch.append([*RUN, *EXACT, flag, "--dataset", files[data], "--micro-batch-tokens", size])
            batch[-1] += ["--output-dir", str(tmp_path_factory.mktemp("layout") / "run")]
        run_ranks(ranks, batch, script="kto_humanline")
        return {job: metrics(arguments[-1]) for job, arguments in zip(jobs, batch)}

    return run


@pytest.fixture(scope="module")
def layouts(run_layout):
    """The whole batch in a pass, one sequence, four of the toy's."""
    return [run_layout(*layout) for layout in LAYOUTS]


def agree(expected, steps):
    for a, b in zip(expected, steps, strict=True):
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-6)
        for key in SAME:
            assert b[key] == pytest.approx(a[key], rel=1e-9, abs=1e-12), (key, a["step"])


def test_z_0_loss_and_gradient_norm_agree_for_all_layouts(layouts):
    whole, *others = layouts
    for layout in others:
        for job, steps in layout.items():
            agree(whole[job], steps)


@pytest.mark.parametrize("layout", [(2, "60", JOBS), (4, "1", JOBS[:2])])
def test_more_layouts_agree(layouts, run_layout, layout):
    for job, steps in run_layout(*layout).items():
        agree(layouts[0][job], steps)


def test_kto_losses_of_trl_where_its_kl_batch_is_ours(tmp_path):
    """With two examples of different prompts there is one way to mismatch them, and both take it. With more,
    TRL pairs a prompt with the completion before it in the order of the data set, and this script with the
    next other prompt."""
    rows = toy_rows(40)
    other = next(row for row in rows if row["prompt"] != rows[0]["prompt"])
    chats = [(rows[0]["prompt"], rows[0]["chosen"], True), (other["prompt"], other["rejected"], False)]
    data = [
        {
            "prompt": [{"role": "user", "content": p}],
            "completion": [{"role": "assistant", "content": c}],
            "label": y,
        }
        for p, c, y in chats
    ]
    ours = ["--no-humanline", "--dataset", write(tmp_path / "two.jsonl", data), "--batch-size", "2"]
    ours += ["--num-steps", "5", "--warmup-fraction", "0", "--lr", "1e-3", "--beta", "0.5"]
    ours += ["--adam-eps", "1e-8", "--weight-decay", "0", "--lambda-D", "1.1", "--lambda-U", "0.9"]
    ours += ["--eval-dataset", "", "--output-dir", str(tmp_path / "ours")]
    run_ranks(1, [ours], script="kto_humanline")
    settings = trl_settings(tmp_path / "trl", batch=2, steps=5, lr=1e-3)
    trainer = KTOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TOY / "policy"),
        ref_model=AutoModelForCausalLM.from_pretrained(TOY / "policy"),
        args=KTOConfig(beta=0.5, desirable_weight=1.1, undesirable_weight=0.9, **settings),
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(TOY / "policy"),
    )
    trainer.train()
    theirs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(theirs) == 5
    for mine, other in zip(metrics(tmp_path / "ours"), theirs):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)


def test_a_batch_with_one_prompt_stops_and_says_so(tmp_path):
    rows = [row for row in toy_rows(400) if row["prompt"] == "about cat"][:8]
    run = [*RUN, "--dataset", write(tmp_path / "one.jsonl", rows), "--output-dir", str(tmp_path / "run")]
    message = refused(run, script="kto_humanline")
    assert "step 0: the batch has one prompt" in message and "--batch-size" in message


@pytest.mark.parametrize("label", ["true", None, -1, 0.5])
def test_labels_that_are_not_booleans_are_named(tmp_path, label, capsys):
    rows = [{"prompt": "about cat", "completion": "the", "label": value} for value in (True, label)]
    tokens = tokens_of(AutoTokenizer.from_pretrained(TOY / "policy"), {5})
    with pytest.raises(SystemExit):
        load_groups(Args(), "--dataset", write(tmp_path / "bad.jsonl", rows), "train", tokens, (1, 2))
    error = capsys.readouterr().err
    assert f"bad.jsonl, line 2: label must be true or false, not {label!r}" in error


def test_one_class_only_trains(tmp_path):
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in toy_rows(32)]
    run = [*RUN, "--dataset", write(tmp_path / "good.jsonl", rows), "--output-dir", str(tmp_path / "run")]
    run_ranks(1, [run], script="kto_humanline")
    steps = metrics(tmp_path / "run")
    assert steps[-1]["rewards/chosen"] > 0 and not {"rewards/rejected", "rewards/margins"} & steps[-1].keys()


ONLINE = ["--online", "--engine", "hf", "--round-prompts", "12", "--max-new-tokens", "40"]
ONLINE += ["--eval-samples", "4"]


def test_online_splits_best_and_worst_and_resumes(paired, tmp_path, monkeypatch):
    run = [*RUN[:-1], "2", *ONLINE, "--dataset", paired, "--eval-dataset", paired, "--output-dir"]
    run_ranks(1, [[*run, f"{tmp_path}/one"]], script="kto_humanline")
    run_ranks(2, [[*run, f"{tmp_path}/two"]], script="kto_humanline")
    steps = metrics(tmp_path / "one", True)
    assert len(steps) == 4 and steps[-1]["rollout/round"] >= 3
    for a, b in zip(steps, metrics(tmp_path / "two", True), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["rollout/reward_mean"] == a["rollout/reward_mean"]
    monkeypatch.setenv("KILL", "kto_loss 5")  # the first is the evaluation, the fifth step 3
    (killed,) = start_ranks(1, [[*run, f"{tmp_path}/cut"]], "killing_worker.py", "kto_humanline")
    finish([killed])
    assert killed.exitcode == -9 and len(metrics(tmp_path / "cut")) == 3
    run_ranks(1, [["--resume", f"{tmp_path}/cut"]], script="kto_humanline")
    assert metrics(tmp_path / "cut", True) == steps
    for file in ("summary.json", "final/model.safetensors"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()


@pytest.mark.skipif(not SHARED.exists(), reason="no real data beside the checkout")
def test_real_unpaired_data_trains_on_two_ranks(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    rows = (SHARED / "preferences" / "unpaired.jsonl").open().readlines()[:64]
    (tmp_path / "unpaired.jsonl").write_text("".join(rows))
    run = ["--model", str(SHARED / "model-stories260K"), "--dataset", str(tmp_path / "unpaired.jsonl")]
    run += ["--chat-template", str(template), "--max-prompt-length", "128", "--max-length", "256"]
    run += ["--batch-size", "8"]
    run += ["--num-steps", "2", "--beta", "0.25", "--lr", "1e-4", "--warmup-fraction", "0", "--k", "1"]
    output = run_ranks(1, [[*run, "--output-dir", str(tmp_path / "one")]], script="kto_humanline")
    run += ["--micro-batch-tokens", "1"]
    run_ranks(2, [[*run, "--output-dir", str(tmp_path / "two")]], script="kto_humanline")
    assert " rows, " in output and re.search(r"dropped; \d+ .*: lines \d", output)
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for key in ("loss", "grad_norm", "kto/z_0"):
            assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-12)
