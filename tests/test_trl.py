"""--no-humanline against TRL's trainers: the same loss curve on the same full batch. GRPO: test_grpo.py."""

import gzip
import json
from functools import partial

import pytest
from conftest import ROOT, metrics, run_ranks, trl_settings
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

LR, STEPS = 1e-3, 5


def curves(folder, script, toy, data, flags, trainer, config):
    """What the script logs, and what TRL does with the same rows, texts as messages."""
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    ours = ["--no-humanline", "--dataset", str(folder / "data.jsonl"), "--batch-size", str(len(data)), *flags]
    ours += ["--lr", str(LR), "--num-steps", str(STEPS), "--warmup-fraction", "0", "--eval-dataset", ""]
    ours += ["--adam-eps", "1e-8", "--weight-decay", "0", "--max-grad-norm", "1.0"]
    run_ranks(1, [[*ours, "--output-dir", str(folder / "ours")]], script=script)

    chats = []
    for row in data:
        chat = {"prompt": [{"role": "user", "content": row["prompt"]}]}
        for key in row.keys() & {"chosen", "rejected", "completion"}:
            chat[key] = [{"role": "assistant", "content": row[key]}]
        chats.append(row | chat)
    policy, reference = (AutoModelForCausalLM.from_pretrained(toy / "policy") for _ in range(2))
    settings = config(**trl_settings(folder / "trl", batch=len(data), steps=STEPS, lr=LR))
    tokenizer = AutoTokenizer.from_pretrained(toy / "policy")
    trl = trainer(
        policy, reference, settings, train_dataset=Dataset.from_list(chats), processing_class=tokenizer
    )
    trl.train()
    theirs = [entry for entry in trl.state.log_history if "loss" in entry]
    return zip(metrics(folder / "ours"), theirs, strict=True)


def toy_rows(toy, count: int) -> list[dict]:
    rows = [json.loads(line) for line in gzip.open(toy / "preferences_train.jsonl.gz", "rt")][:count]
    return [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows]


@pytest.mark.filterwarnings("ignore")
def test_loss_curve_of_dpo_trainer(tmp_path):
    toy = ROOT / "toy" / "bouquets"
    config = partial(DPOConfig, beta=0.5, max_length=None)
    rows = toy_rows(toy, 16)
    for mine, other in curves(tmp_path, "dpo_humanline", toy, rows, ["--beta", "0.5"], DPOTrainer, config):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4, rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert mine["rewards/margins"] == pytest.approx(other["rewards/margins"], abs=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_loss_curve_of_kto_trainer_where_its_kl_batch_is_ours(tmp_path):
    """With two examples of different prompts there is one way to mismatch them, and both take it. With more,
    TRL pairs a prompt with the completion before it in the order of the data set, and this script with the
    next other prompt."""
    toy = ROOT / "toy" / "tales"
    one, *rest = toy_rows(toy, 40)
    two = next(row for row in rest if row["prompt"] != one["prompt"])
    rows = [
        {"prompt": one["prompt"], "completion": one["chosen"], "label": True},
        {"prompt": two["prompt"], "completion": two["rejected"], "label": False},
    ]
    flags = ["--beta", "0.5", "--lambda-D", "1.1", "--lambda-U", "0.9"]
    config = partial(KTOConfig, beta=0.5, desirable_weight=1.1, undesirable_weight=0.9)
    for mine, other in curves(tmp_path, "kto_humanline", toy, rows, flags, KTOTrainer, config):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)
