"""--no-humanline against TRL's DPOTrainer: the same loss curve on the same full batch."""

import gzip
import json

import pytest
from conftest import TOY, metrics, run_ranks, trl_settings
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

LR, BETA, STEPS, PAIRS = 1e-3, 0.5, 5, 16


@pytest.mark.filterwarnings("ignore")
def test_loss_curve_of_dpo_trainer(tmp_path):
    rows = [json.loads(line) for line in gzip.open(TOY / "preferences_train.jsonl.gz", "rt")][:PAIRS]
    chats = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in rows
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    ours = ["--no-humanline", "--dataset", str(tmp_path / "pairs.jsonl"), "--batch-size", str(PAIRS)]
    ours += ["--lr", str(LR), "--num-steps", str(STEPS), "--warmup-fraction", "0", "--beta", str(BETA)]
    ours += ["--adam-eps", "1e-8", "--weight-decay", "0", "--max-grad-norm", "1.0", "--eval-dataset", ""]
    run_ranks(1, [[*ours, "--output-dir", str(tmp_path / "ours")]])

    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TOY / "policy"),
        args=DPOConfig(beta=BETA, max_length=None, **trl_settings(tmp_path / "trl", PAIRS, STEPS, LR)),
        train_dataset=Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(TOY / "policy"),
    )
    trainer.train()
    theirs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(theirs) == STEPS
    for mine, other in zip(metrics(tmp_path / "ours"), theirs):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4, rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert mine["rewards/margins"] == pytest.approx(other["rewards/margins"], abs=1e-3)
