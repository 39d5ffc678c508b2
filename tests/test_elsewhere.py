"""docs/elsewhere.md: the trainer to paste into TRL, run as it stands, trains as dpo_humanline.py does."""

import re

import numpy as np
import pytest
from conftest import ROOT, TOY, metrics, run_ranks, trl_settings, write_rows
from datasets import Dataset
from test_trl import toy_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig

LR, STEPS, PAIRS = 3e-3, 5, 8  # a step
BOUNDS = (-0.15, 0.1)


def theirs(rows: list[dict], k: int, folder) -> list[dict]:
    """What TRL logs with the pasted trainer, on the same pairs in the same order, two passes an update."""
    order = np.random.default_rng((1, 0)).permutation(len(rows))  # draw_batch, seed 1
    chats = []
    for i in order:
        chat = {"prompt": [{"role": "user", "content": rows[i]["prompt"]}]}
        for side in ("chosen", "rejected"):
            chat[side] = [{"role": "assistant", "content": rows[i][side]}]
        chats.append(chat)
    page = (ROOT / "docs/elsewhere.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "DPOTrainer" in block)
    pasted = {}
    exec(block, pasted)
    settings = trl_settings(folder, batch=PAIRS // 2, steps=STEPS, lr=LR)
    settings |= dict(gradient_accumulation_steps=2, train_sampling_strategy="sequential")
    policy, reference = (AutoModelForCausalLM.from_pretrained(TOY / "policy") for _ in range(2))
    config = DPOConfig(**settings, beta=0.5, max_length=None)
    data = {"train_dataset": Dataset.from_list(chats)}
    data["processing_class"] = AutoTokenizer.from_pretrained(TOY / "policy")
    trainer = pasted["HumanlineDPOTrainer"](policy, reference, config, **data, k=k, bounds=BOUNDS)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("k", [1, 2])
def test_the_trainer_to_paste_trains_as_the_script_does(k, tmp_path):
    rows = toy_rows(TOY, STEPS * PAIRS)
    data = write_rows(tmp_path / "data.jsonl", rows)
    flags = f"--dataset {data} --eval-dataset= --batch-size {PAIRS} --num-steps {STEPS} --k {k} --lr {LR}"
    flags += " --beta 0.5 --warmup-fraction 0 --adam-eps 1e-8 --weight-decay 0 --max-grad-norm 1"
    flags += f" --log-epsilon-P={BOUNDS[0]} --log-epsilon-R={BOUNDS[1]} --dtype float32 --checkpoint-every 0"
    run_ranks(1, [[*flags.split(), "--output-dir", str(tmp_path / "ours")]])
    ours = metrics(tmp_path / "ours")
    assert max(line["humanline/clipped_low"] for line in ours) > 0.05  # the bounds bite
    for mine, other in zip(ours, theirs(rows, k, tmp_path / "theirs"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["rewards/margins"] == pytest.approx(other["rewards/margins"], abs=1e-4)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
