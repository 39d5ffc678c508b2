"""Makes the draws of the board: other prompts and pairs of stories, for the one committed policy.

    python -m lab.draws 3 4 5 31 32 33 34 35 36 37 38 39 40 41 42  # writes lab/board/3, lab/board/4, …

A draw is a folder with 8,192 pairs of 1,024 prompts (`preferences_train`), these prompts for online runs
(`prompts_train`), and 256 others, for whose completions the judge is asked (`prompts_test`). The pairs lack
the judge's scores, because no run may read them. Another processor would make other files, because float32
rounds differently there, so they are committed.
"""

import multiprocessing
import random
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import tyro
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from support.data import read_rows
from toy import common, stories

ROOT = Path(__file__).resolve().parents[1]
POLICY = ROOT / "toy" / "stories" / "policy"


def make_draw(folder: Path):
    """Makes the draw whose seed is the name of the folder."""
    torch.set_num_threads(1)  # because sums in another order would change the files
    torch.manual_seed(int(folder.name))
    rng = random.Random(int(folder.name))
    base, tokenizer = stories.load_base()
    policy = AutoModelForCausalLM.from_pretrained(POLICY).eval()
    rows, prompts = stories.draw_texts(base, tokenizer, rng)
    prompts_of, pairs = stories.draw_pairs(policy, tokenizer, rng, rows, prompts)
    columns = ("prompt", "chosen", "rejected")
    without_scores = [{column: pair[column] for column in columns} for pair in pairs["train"]]
    folder.mkdir(parents=True, exist_ok=True)
    common.write_rows(folder / "preferences_train.jsonl.gz", without_scores)
    for split in ("train", "test"):
        rows = [{"prompt": prompt} for prompt in prompts_of[split]]
        common.write_rows(folder / f"prompts_{split}.jsonl.gz", rows)


def make_reward_model(draw: Path, folder: Path):
    """Trains a reward model on the labels of a draw, unless the folder has one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # two runs may want the same model
        if folder.exists():
            return
        torch.manual_seed(int(draw.name))
        tokenizer = AutoTokenizer.from_pretrained(POLICY)
        model = AutoModelForSequenceClassification.from_pretrained(POLICY, num_labels=1)
        pairs = list(read_rows(str(draw / "preferences_train.jsonl.gz"), ""))
        stories.train_reward_model(model, tokenizer, random.Random(int(draw.name)), pairs)
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        common.save(part, model, tokenizer)
        part.rename(folder)  # complete at every moment


def main(draws: tyro.conf.Positional[tuple[int, ...]], out: Path = ROOT / "lab" / "board"):
    """Makes draws.

    Args:
        draws: their seeds; 0 is the seed of toy/stories.
        out: folder of the draws.
    """
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(make_draw, [out / str(draw) for draw in draws]))  # raises their errors


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
