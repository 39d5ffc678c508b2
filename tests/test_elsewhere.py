"""docs/elsewhere.md: the trainer to paste into TRL, run as it stands, trains as dpo_humanline.py does."""

import json
import re

import numpy as np
import pytest
from conftest import ROOT, metrics, run_ranks, trl_settings
from datasets import Dataset
from test_trl import toy_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig

TOY = ROOT / "toy" / "bouquets"
LR, STEPS, PAIRS = 3e-3, 5, 8  # a step
BOUNDS = (-0.15, 0.1)


def the_block() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/elsewhere.md").read_text(), re.DOTALL | re.M)
    (block,) = (block for block in blocks if "DPOTrainer" in block)
    return block


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return toy_rows(TOY, STEPS * PAIRS)


@pytest.fixture(scope="module")
def ours(rows, tmp_path_factory) -> dict:
    """{k: metrics of every step}"""
    folder = tmp_path_factory.mktemp("ours")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--dataset {folder}/data.jsonl --eval-dataset= --batch-size {PAIRS} --num-steps {STEPS}"
    flags += f" --lr {LR} --beta 0.5 --warmup-fraction 0 --adam-eps 1e-8 --weight-decay 0 --max-grad-norm 1"
    flags += f" --log-epsilon-P={BOUNDS[0]} --log-epsilon-R={BOUNDS[1]} --dtype float32 --checkpoint-every 0"
    starts = [[*flags.split(), "--k", str(k), "--output-dir", f"{folder}/{k}"] for k in (1, 2)]
    run_ranks(1, starts)
    return {k: metrics(folder / str(k)) for k in (1, 2)}


def theirs(block: str, rows: list[dict], k: int, folder) -> list[dict]:
    """What TRL logs with the pasted trainer, on the same pairs in the same order, two passes an update."""
    order = np.random.default_rng((1, 0)).permutation(len(rows))  # draw_batch, seed 1
    chats = []
    for i in order:
        chat = {"prompt": [{"role": "user", "content": rows[i]["prompt"]}]}
        for side in ("chosen", "rejected"):
            chat[side] = [{"role": "assistant", "content": rows[i][side]}]
        chats.append(chat)
    pasted = {}
    exec(block, pasted)
    settings = trl_settings(folder, batch=PAIRS // 2, steps=STEPS, lr=LR)
    settings |= dict(gradient_accumulation_steps=2, train_sampling_strategy="sequential")
    policy, reference = (AutoModelForCausalLM.from_pretrained(TOY / "policy") for _ in range(2))
    trainer = pasted["HumanlineDPOTrainer"](
        policy,
        reference,
        DPOConfig(**settings, beta=0.5, max_length=None),
        train_dataset=Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(TOY / "policy"),
        k=k,
        bounds=BOUNDS,
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("k", [1, 2])
def test_the_trainer_to_paste_trains_as_the_script_does(k, rows, ours, tmp_path):
    found = theirs(the_block(), rows, k, tmp_path)
    assert max(line["humanline/clipped_low"] for line in ours[k]) > 0.05  # the bounds bite
    for mine, other in zip(ours[k], found, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["rewards/margins"] == pytest.approx(other["rewards/margins"], abs=1e-4)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("line", [".clamp(*self.bounds)", "target.copy_(source)", "% self.k == 0"])
def test_without_one_of_its_lines_it_does_not(line, rows, ours, tmp_path):
    """Without the clamp, without the sync, and with a sync in every step where k is 2."""
    instead = {"target.copy_(source)": "pass", "% self.k == 0": ">= 0"}.get(line, "")
    block = the_block()
    assert block.count(line) == 1
    found = theirs(block.replace(line, instead), rows, 2, tmp_path)
    apart = [abs(mine["loss"] - other["loss"]) for mine, other in zip(ours[2], found, strict=True)]
    assert max(apart) > 1e-2
