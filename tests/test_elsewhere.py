"""docs/elsewhere.md: the trainers for TRL train as our scripts do, and the script of the page runs."""

import re
import runpy
import warnings

import numpy as np
import pytest
import torch
from conftest import ROOT, TOY, metrics, read_rows, run_ranks, trl_settings, write_rows
from datasets import Dataset
from test_trl import toy_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, KTOConfig

from contrib.trl_humanline import TRL, HumanlineDPOTrainer, HumanlineKTOTrainer

LR, STEPS, PAIRS = 3e-3, 5, 8  # a step
BOUNDS = (-0.15, 0.1)
TALES = ROOT / "toy" / "tales"
PAGE = (ROOT / "docs" / "elsewhere.md").read_text()


def ours(script, folder, rows, k, batch_size, *flags):
    """What the script logs."""
    data = write_rows(folder / "data.jsonl", rows)
    common = (
        f"--dataset {data} --eval-dataset= --batch-size {batch_size} --num-steps {STEPS} --k {k} --lr {LR}"
    )
    common += " --beta 0.5 --warmup-fraction 0 --adam-eps 1e-8 --weight-decay 0 --max-grad-norm 1"
    common += f" --log-epsilon-P={BOUNDS[0]} --log-epsilon-R={BOUNDS[1]} --dtype float32 --checkpoint-every 0"
    run_ranks(1, [[*common.split(), *flags, "--output-dir", str(folder / "ours")]], script=script)
    return metrics(folder / "ours")


def theirs(trainer, config, folder, toy, rows, k, batch_size, passes, **settings):
    """What TRL logs with our trainer, on the same rows in the same order, in several passes an update."""
    chats = []
    for row in rows:
        chat = {"prompt": [{"role": "user", "content": row["prompt"]}]}
        for key in row.keys() & {"chosen", "rejected", "completion"}:
            chat[key] = [{"role": "assistant", "content": row[key]}]
        chats.append(row | chat)
    common = trl_settings(folder / "theirs", batch=batch_size // passes, steps=STEPS, lr=LR)
    common |= dict(gradient_accumulation_steps=passes, train_sampling_strategy="sequential")
    policy, reference = (AutoModelForCausalLM.from_pretrained(toy / "policy") for _ in range(2))
    arguments = {"train_dataset": Dataset.from_list(chats)}
    arguments["processing_class"] = AutoTokenizer.from_pretrained(toy / "policy")
    arguments |= dict(k=k, log_epsilon_P=BOUNDS[0], log_epsilon_R=BOUNDS[1])
    settings = config(**common, beta=0.5, max_length=None, **settings)
    trainer = trainer(policy, reference, settings, **arguments)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def assert_equal(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        for name in ("log_ratio_abs_mean", "clipped_low", "clipped_high"):
            assert mine[f"humanline/{name}"] == pytest.approx(other[f"humanline/{name}"], abs=1e-5), name
    assert max(line["humanline/clipped_low"] for line in ours) > 0.05  # the bounds bite


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("k", [1, 2])
def test_dpo_trains_as_the_script_does(k, tmp_path):
    rows = toy_rows(TOY, STEPS * PAIRS)
    mine = ours("dpo_humanline", tmp_path, rows, k, PAIRS)
    order = np.random.default_rng((1, 0)).permutation(len(rows))  # draw_batch, seed 1
    rows = [rows[i] for i in order]
    other = theirs(HumanlineDPOTrainer, DPOConfig, tmp_path, TOY, rows, k, PAIRS, passes=2)
    assert_equal(mine, other)
    for line, entry in zip(mine, other):
        assert line["rewards/margins"] == pytest.approx(entry["rewards/margins"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_kto_trains_as_the_script_does_where_its_mismatched_pairs_are_ours(tmp_path):
    """Two examples of different prompts can be mismatched in one way only, and both take it."""
    one, *rest = toy_rows(TALES, 40)
    two = next(row for row in rest if row["prompt"] != one["prompt"])
    rows = [
        {"prompt": one["prompt"], "completion": one["chosen"], "label": True},
        {"prompt": two["prompt"], "completion": two["rejected"], "label": False},
    ]
    flags = ["--model", f"{TALES}/policy", "--lambda-D", "1.1", "--lambda-U", "0.9"]
    mine = ours("kto_humanline", tmp_path, rows, 2, 2, *flags)
    weights = dict(desirable_weight=1.1, undesirable_weight=0.9)
    other = theirs(HumanlineKTOTrainer, KTOConfig, tmp_path, TALES, rows, 2, 2, passes=1, **weights)
    assert_equal(mine, other)


def page_script():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "HumanlineGRPOTrainer" in block)
    return block


def test_the_whole_script_of_the_page_runs_as_it_stands(tmp_path, monkeypatch):
    """On the toy: with another model, other rows and fewer steps. The file lies beside it, as at its user."""
    words = sorted({row["prompt"].split()[-1] for row in read_rows(TALES / "preferences_train.jsonl.gz")})
    rows = [{"prompt": [{"role": "user", "content": f"about {word}"}], "answer": "small"} for word in words]
    text = page_script()
    for old, new in (
        (r'^NAME = ".*"$', f"NAME = {str(TALES / 'policy')!r}"),
        (r"^rows = \[\n.*?^\]$", f"rows = {rows!r}"),
        (r"max_steps=\d+", "max_steps=8, use_cpu=True, report_to='none'"),
        (r"max_completion_length=\d+", "max_completion_length=24"),
        (r"learning_rate=[-e\d]+", "learning_rate=3e-3"),
    ):
        text, count = re.subn(old, lambda _, new=new: new, text, flags=re.DOTALL | re.MULTILINE)
        assert count == 1, old
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "trl_humanline.py").write_text((ROOT / "contrib" / "trl_humanline.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        names = runpy.run_path("train.py")
    assert not [warning for warning in warned if "humanline" in str(warning.message)]

    logged = [entry for entry in names["trainer"].state.log_history if "loss" in entry]
    moved = [entry["humanline/log_ratio_abs_mean"] for entry in logged]
    assert len(moved) == 8 and moved[0] == 0 and min(moved[1:]) > 0  # one generation, eight updates
    assert moved[4] > moved[1] and moved[5] < moved[4]  # k = 4: the sync before update 4 is seen in update 5
    assert logged[0]["reward"] > 0 and logged[0]["grad_norm"] > 0
    ids = torch.arange(6, 30)[None]
    merged, base = (AutoModelForCausalLM.from_pretrained(name) for name in ("merged", TALES / "policy"))
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    assert (merged(ids).logits - base(ids).logits).abs().max() > 0.1
    assert (merged(ids).logits - names["merged"](ids).logits).abs().max() < 1e-5
    AutoTokenizer.from_pretrained("merged")


def test_the_script_is_short_and_the_page_names_one_version():
    lines = [line for line in page_script().splitlines() if line.strip()]
    assert len(lines) <= 35
    assert set(re.findall(r"(?:TRL |trl==)(\d+\.\d+)", PAGE)) == {TRL}
