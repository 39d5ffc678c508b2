"""Measures the time and memory of a training step, beside another version of the scripts or TRL.

    python -m lab.step --arms k=1 --against ../old  # this checkout beside another one
    python -m lab.step                              # humanline with k=1 beside offline
    python -m lab.step --ranks 2 --trl              # also TRL's DPOTrainer, all on two ranks
    python -m lab.step --pairs 64 --together 16 --trl --trl-together 8 16 32  # on a GPU

All flags but those of `Own` are the script's; with --against both versions must have them. --model is a
preset of tools/scripts.py or a folder with a config.json. The model has this shape and random weights. The
data are one batch of random words with the lengths of 16 real pairs, so all steps are equal. A micro-batch
has 4 pairs (--together).

An arm runs its script as a user does, and its metrics.jsonl is read. The first step of a run is for warming
up. The arms take turns, A B A B, --rounds times. TRL's trainer gets the same token ids, dtype and settings of
the optimizer, and pads its micro-batches. TRL's GRPOTrainer draws samples of its own, so it has no arm.

seconds     of a step, median
GiB         peak of a rank since its start, median (CUDA: allocated memory; CPU: resident memory)
time        relative to the step of the first arm in the same round, median
memory      relative to the first arm
"""

import json
import math
import os
import random
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from support import data
from tools.scripts import (
    ROOT,
    SHAPE,
    describe_commit,
    describe_machine,
    launch,
    load_script,
    parse_args,
    read_config,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Tokens of prompt, chosen and rejected of 16 pairs: the first ones in LLaMA-Factory's data/dpo_en_demo.json
# with at most 512 tokens in a sequence. The tokens are those of Zephyr's chat template and the SentencePiece
# tokenizer with 32,000 tokens that comes with mistral_common.
PAIRS = """
40 357 121, 26 440 155, 193 64 150, 50 13 78, 162 2 80, 55 386 244, 28 272 33, 64 45 24,
35 278 56, 54 62 85, 190 39 111, 43 23 178, 105 211 263, 113 46 42, 74 64 115, 113 211 331
"""
PAIRS = [[int(count) for count in pair.split()] for pair in PAIRS.split(",")]


@dataclass
class Own:
    script: Literal["dpo", "kto", "grpo"] = "dpo"  # <script>_humanline.py
    arms: tuple[str, ...] = ("offline", "k=1")  # offline: --no-humanline; k=N: a sync every N steps
    against: str = ""  # folder of another checkout, whose scripts run too
    trl: bool = False  # TRL's trainer runs too (DPO and KTO)
    trl_together: tuple[int, ...] = ()  # pairs in a micro-batch of TRL, an arm for each; none: --together
    ranks: int = torch.cuda.device_count() or 1  # processes of a run
    rounds: int = 2  # runs of an arm
    steps: int = 2  # measured steps of a run
    pairs: int = 16  # pairs of a step
    together: int = 4  # pairs in a micro-batch
    longest: int = 512  # real pairs with a longer sequence are not used


def parse(flags: list[str]):
    """Parses the flags. Returns our own, the script's, and the flags to start the script with."""
    own, rest = tyro.cli(Own, args=flags, description=__doc__, return_unknown_args=True)
    model, dtype = ("qwen2.5-1.5b", "bfloat16") if DEVICE.type == "cuda" else ("llama-26m", "float32")
    batch = own.pairs if own.script == "dpo" else 2 * own.pairs
    flags = [f"--model={model}", f"--dtype={dtype}", f"--batch-size={batch}", "--warmup-fraction=0", *rest]
    return own, parse_args(load_script(own.script), flags), flags


def make_model(config, folder: Path) -> list[str]:
    """Saves a model with random weights and the toy's tokenizer. Returns the words of the tokenizer."""
    config.max_position_embeddings = max(config.max_position_embeddings, 512)  # more than the real pairs
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy" / "bouquets" / "policy")
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    if config.model_type == "qwen2":
        # In a folder of Qwen2, transformers reads the toy's tokenizer as Qwen2's, which drops its words. A
        # Llama with biases has the same layers.
        shape = {name: getattr(config, name) for name in (*SHAPE[1:], "eos_token_id", "pad_token_id")}
        config = AutoConfig.for_model("llama", **shape, attention_bias=True)
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sorted(filter(str.isalpha, tokenizer.get_vocab()))


def make_pairs(own: Own, words: list[str], file: Path) -> list[list[int]]:
    """Writes pairs of random words. Returns the numbers of tokens of prompt, chosen and rejected."""
    lengths = [[prompt, *sides] for prompt, *sides in PAIRS if prompt + max(sides) <= own.longest]
    pairs = list(islice(cycle(lengths), own.pairs))
    draw = random.Random(0)
    rows = []
    for pair in pairs:
        row = {}
        for column, count, added in zip(("prompt", "chosen", "rejected"), pair, (3, 1, 1)):
            row[column] = " ".join(draw.choices(words, k=count - added))  # the chat template adds the rest
        rows.append(json.dumps(row))
    file.write_text("\n".join(rows))
    return pairs


def run_arm(own: Own, kind: str, checkout: Path, flags: list[str], folder: Path) -> list[dict]:
    """Runs an arm in an empty folder. Returns the metrics of all steps."""
    words = [f"{checkout}/{own.script}_humanline.py"]
    if kind.startswith("TRL"):
        words = ["-m", __spec__.name, *kind.split(), own.script]
    words += [*flags, f"--output-dir={folder}"]
    if kind == "offline":
        words.append("--no-humanline")
    elif kind.startswith("k="):
        words += ["--humanline", f"--k={kind[2:]}"]
    return launch(own.ranks, words, folder)


def measure(own: Own, args, flags: list[str]):
    """Makes all runs, and prints the table."""
    threads = int(os.environ.get("OMP_NUM_THREADS", 1))
    arms = {}  # {name: (kind, checkout)}
    for kind in own.arms:
        arms[kind] = (kind, ROOT)
        if own.against:
            arms[f"{kind} in {own.against}"] = (kind, Path(own.against).resolve())
    for together in own.trl_together or [own.together]:
        if own.trl:
            arms[f"TRL, {together} pairs"] = (f"TRL {together}", ROOT)
            if own.pairs % (together * own.ranks):
                raise SystemExit("error: with --trl, --pairs must be a multiple of micro-batch times --ranks")
    config = read_config(args.model, args.trust_remote_code)
    runs = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = make_model(config, folder / "model")
        torch.cuda.empty_cache()
        pairs = make_pairs(own, words, folder / "pairs.jsonl")
        lengths = [prompt + side for prompt, *sides in pairs for side in sides]
        share = math.ceil(1.05 * sum(lengths) / math.ceil(own.pairs / own.together))  # not all are equal
        flags += [f"--model={folder}/model", f"--dataset={folder}/pairs.jsonl", "--eval-dataset="]
        flags += [f"--max-length={max(lengths)}", f"--max-prompt-length={max(lengths)}"]
        flags += [f"--micro-batch-tokens={share}", f"--num-steps={own.steps + 1}"]
        flags += ["--checkpoint-every=0", "--max-new-tokens=1", "--engine=hf"]
        for _ in range(own.rounds):
            for name, (kind, checkout) in arms.items():
                with tempfile.TemporaryDirectory(dir=folder) as output:
                    runs[name].append(run_arm(own, kind, checkout, flags, Path(output)))
                print(name, times_of(runs[name][-1]), file=sys.stderr)

    tokens, scored = sum(lengths), sum(chosen + rejected for _, chosen, rejected in pairs)
    print(f"{own.script}, {args.model}, {args.dtype}: {tokens:,} tokens, {scored:,} scored")
    print(f"{own.ranks} x {threads} threads of {describe_machine()}")
    if own.against:
        print(f"against commit {describe_commit(Path(own.against))}")
    print(f"\n| | seconds (min to max) | GiB | time | memory |\n|{'---|' * 5}")
    first_seconds, first_peak = seconds_and_peak(runs[own.arms[0]])
    for name in arms:
        seconds, peak = seconds_and_peak(runs[name])
        spread = f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        ratio = median(a / b for a, b in zip(seconds, first_seconds))
        print(f"| {name} | {spread} | {peak:.2f} | {ratio:.3f} | {peak / first_peak:.3f} |")


def times_of(steps: list[dict]) -> list[float]:
    """Returns the seconds of a run's measured steps."""
    return [step["perf/step_time"] for step in steps[1:]]


def seconds_and_peak(runs: list[list[dict]]) -> tuple[list[float], float]:
    """Returns the seconds of all steps of an arm, and its peak memory in GiB."""
    peak = median(steps[-1]["perf/peak_memory"] for steps in runs)
    return [seconds for steps in runs for seconds in times_of(steps)], peak


def trl_rows(script: str, prompt_ids, chosen_ids, rejected_ids) -> list[dict]:
    """Returns TRL's rows of a pair. For KTO's z_0, each completion takes the place of the other one."""
    if script == "dpo":
        return [{"prompt_ids": prompt_ids, "chosen_ids": chosen_ids, "rejected_ids": rejected_ids}]
    columns = ("prompt_ids", "completion_ids", "KL_completion_ids", "label")
    rows = (prompt_ids, chosen_ids, rejected_ids, True), (prompt_ids, rejected_ids, chosen_ids, False)
    return [dict(zip(columns, row)) for row in rows]


def train_with_trl(together: int, script: str, flags: list[str]):
    """Trains with TRL's trainer and the script's flags, and writes a metrics.jsonl like the script."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    args = parse_args(load_script(script), flags)
    Config = getattr(trl, f"{script.upper()}Config")
    BaseTrainer = getattr(trl, f"{script.upper()}Trainer")
    size = 2 * together if script == "kto" else together  # rows of a micro-batch
    tokenizer, eos_ids = data.load_tokenizer(args)
    rows = []
    for line in Path(args.dataset).read_text().splitlines():
        row = json.loads(line)
        pair = data.encode(args, tokenizer, eos_ids, row["prompt"], [row["chosen"], row["rejected"]])
        completions = [list(example.completion_ids) for example in pair]
        rows += trl_rows(script, list(pair[0].prompt_ids), *completions)
    of_all_ranks = size * int(os.environ.get("WORLD_SIZE", 1))
    named = ("weight_decay", "max_grad_norm", "beta", "gradient_checkpointing", "output_dir")
    kto = script == "kto"
    weights = dict(desirable_weight=args.lambda_D, undesirable_weight=args.lambda_U) if kto else {}
    settings = Config(
        **{name: getattr(args, name) for name in named},
        **weights,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=args.batch_size // of_all_ranks,
        max_steps=args.num_steps,
        max_length=None,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        adam_epsilon=args.adam_eps,
        bf16=args.dtype == "bfloat16",
        use_cpu=DEVICE.type == "cpu",
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.started = time.perf_counter()

        def on_log(self, _, state, __, logs, **___):
            if "loss" in logs and state.is_world_process_zero:
                now = time.perf_counter()
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
                if DEVICE.type == "cuda":
                    peak = torch.cuda.max_memory_allocated() / 2**30
                row = {"loss": logs["loss"], "grad_norm": logs["grad_norm"]}
                row |= {"perf/step_time": now - self.started, "perf/peak_memory": peak}
                with open(f"{args.output_dir}/metrics.jsonl", "a") as file:
                    file.write(json.dumps(row) + "\n")
                self.started = now

    class Trainer(BaseTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset  # instead of tokenizing it

    dtype = torch.float32 if args.dtype == "bfloat16" else getattr(torch, args.dtype)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    if sys.argv[1:2] == ["TRL"]:
        train_with_trl(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        measure(*parse(sys.argv[1:]))
