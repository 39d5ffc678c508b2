"""Measures the time and memory of a training step, beside another version of the scripts or TRL.

    python benchmark/step.py --arms k=1 --against ../old  # this checkout beside another one
    python benchmark/step.py                              # humanline with k=1 beside offline
    python benchmark/step.py --ranks 2 --trl              # also TRL's DPOTrainer, all on two ranks
    python benchmark/step.py --pairs 64 --together 16 --trl --trl-together 8 16 32  # on a GPU

All flags but those of `Own` are the script's; with --against both versions must have them. --model is a
preset of memory.py, toy, or a folder with a config.json. The model has this shape and random weights. The
data are one batch of random words with the lengths of 16 real pairs, so all steps are equal. A micro-batch
has 4 pairs (--together).

An arm runs its script as a user does, and its metrics.jsonl is read. The first step of a run is for warming
up. The arms take turns, A B A B, --rounds times. TRL's trainer gets the same token ids, dtype and settings of
the optimizer, and pads its micro-batches. With several --trl-together, each is an arm, and the fastest is
TRL's best. TRL's GRPOTrainer takes no token ids, because it draws samples of its own, so it has no arm.

seconds     of a step, median
CPU s       user and system time of a run from its start, all ranks, median
GiB         peak of a rank since its start, median (CUDA: allocated memory; CPU: resident memory)
time        relative to the step of the first arm in the same round, median
memory      relative to the first arm
efficiency  FLOPs / (seconds x ranks x FLOP/s of a matrix product in the same dtype and threads)

The product is measured before every round. A token needs 8 FLOPs per weight of the decoder: 2 in the
policy's forward pass, 4 in its backward pass, 2 in the reference's. A completion token also needs 8 per
weight of the head. KTO needs 12, as if z_0's passes were as long as the batch. Attention does not count.
"""

import contextlib
import json
import math
import os
import random
import re
import resource
import subprocess
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
from memory import SHAPE, read_config
from scripts import ROOT, describe_commit, load_script, machine, parse_args
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import utils
from support import data, run

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
    length: int = 0  # tokens of every sequence, half of them in the prompt; 0: the lengths of real pairs
    json: bool = False  # print a JSON object


def parse(flags: list[str]):
    """Parses the flags. Returns our own, the script's, and the flags to start the script with."""
    own, rest = tyro.cli(Own, args=flags, description=__doc__, return_unknown_args=True)
    for arm in own.arms:
        if not re.fullmatch(r"offline|k=[1-9]\d*", arm):
            raise utils.InputError(f"--arms {' '.join(own.arms)}: an arm is offline or k=N")
    own.trl_together = list(own.trl_together) or [own.together]
    uneven = [together for together in own.trl_together if own.pairs % (together * own.ranks)]
    if own.trl and (own.script == "grpo" or uneven):
        raise utils.InputError("--trl needs --script dpo or kto; --together x --ranks must divide --pairs")
    model, dtype = ("qwen2.5-1.5b", "bfloat16") if DEVICE.type == "cuda" else ("llama-26m", "float32")
    batch = own.pairs if own.script == "dpo" else 2 * own.pairs
    flags = [f"--model={model}", f"--dtype={dtype}", f"--batch-size={batch}", "--warmup-fraction=0"]
    flags += ["--micro-batch-tokens=0", *rest]  # 0: the tokens of --together pairs
    args = parse_args(load_script(own.script), flags)
    return own, args, flags


def make_model(config, positions: int, folder: Path) -> list[str]:
    """Saves a model with random weights and the toy's tokenizer. Returns the words of the tokenizer."""
    config.max_position_embeddings = max(config.max_position_embeddings, positions)
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
    half = own.length // 2
    lengths = [[prompt, *sides] for prompt, *sides in PAIRS if prompt + max(sides) <= own.longest]
    if own.length:
        lengths = [[half, own.length - half, own.length - half]]
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


def needed_flops(config, tokens: int, completion_tokens: int, kto: bool) -> float:
    """Returns the FLOPs that a step needs."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    decoder = model.base_model.num_parameters(exclude_embeddings=True)
    head = model.get_output_embeddings().weight.numel()
    return (12 if kto else 8) * (decoder * tokens + head * completion_tokens)


def matmul_rates(dtype: torch.dtype) -> list[float]:
    """Measures the FLOP/s of matrix products."""
    size = 8192 if DEVICE.type == "cuda" else 1024
    a = torch.randn(size, size, device=DEVICE).to(dtype)
    rates = []
    for _ in range(15):
        started = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the product
        rates.append(2 * size**3 / (time.perf_counter() - started))
    return rates


def run_arm(own: Own, kind: str, checkout: Path, flags: list[str], folder: Path) -> dict[str, list]:
    """Runs an arm in an empty folder. Returns {metric: values of all steps}."""
    command = [sys.executable]
    if own.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={own.ranks}"]
    if kind.startswith("TRL"):
        command += [__file__, *kind.split(), own.script]
    else:
        command.append(f"{checkout}/{own.script}_humanline.py")
    command += [*flags, f"--output-dir={folder}"]
    if kind == "offline":
        command.append("--no-humanline")
    elif kind.startswith("k="):
        command += ["--humanline", f"--k={kind[2:]}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        errors = re.findall(r"\w*[eE]rror: .*", ended.stderr) or [ended.stderr.strip()[-200:]]
        raise utils.InputError(f"{kind} in {checkout}: {errors[0]}")
    metrics = {"cpu": [after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime]}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        for name, value in json.loads(line).items():
            metrics.setdefault(name, []).append(value)
    return metrics


def measure(flags: list[str]) -> dict:
    """Makes all runs. Returns the object that --json prints."""
    own, args, flags = parse(flags)
    threads = int(os.environ.get("OMP_NUM_THREADS", 1))
    torch.set_num_threads(threads)
    arms = {}  # {name: (kind, checkout)}
    for kind in own.arms:
        arms[kind] = (kind, ROOT)
        if own.against:
            arms[f"{kind} in {own.against}"] = (kind, Path(own.against).resolve())
    for together in own.trl_together:
        if own.trl:
            arms[f"TRL, {together} pairs"] = (f"TRL {together}", ROOT)
    config = read_config(load_script(own.script), "--model", args.model, args.trust_remote_code)
    runs = {name: [] for name in arms}
    rates = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = make_model(config, max(own.length, 512), folder / "model")  # 512: more than the real pairs
        torch.cuda.empty_cache()
        pairs = make_pairs(own, words, folder / "pairs.jsonl")
        lengths = [prompt + side for prompt, *sides in pairs for side in sides]
        share = sum(lengths) / math.ceil(own.pairs / own.together)
        pass_tokens = args.micro_batch_tokens or math.ceil(1.05 * share)  # not all are equal
        flags += [f"--model={folder}/model", f"--dataset={folder}/pairs.jsonl", "--eval-dataset="]
        flags += [f"--max-length={max(lengths)}", f"--max-prompt-length={max(lengths)}"]
        flags += [f"--micro-batch-tokens={pass_tokens}", f"--num-steps={own.steps + 1}"]
        flags += ["--checkpoint-every=0", "--max-new-tokens=1", "--engine=hf"]
        for _ in range(own.rounds):
            rates += matmul_rates(getattr(torch, args.dtype))
            for name, (kind, checkout) in arms.items():
                with tempfile.TemporaryDirectory(dir=folder) as output:
                    metrics = run_arm(own, kind, checkout, flags, Path(output))
                runs[name].append(metrics)
                print(f"{name}: {metrics['perf/step_time']} s", file=sys.stderr)

    result = machine() | vars(own) | {"model": args.model, "dtype": args.dtype, "threads": threads}
    result["tokens"] = sum(lengths)
    result["completion_tokens"] = sum(chosen + rejected for _, chosen, rejected in pairs)
    if own.against:
        result["against_commit"] = describe_commit(Path(own.against))
    result["flops_per_second"] = median(rates)
    flops = needed_flops(config, result["tokens"], result["completion_tokens"], own.script == "kto")
    result["arms"] = {}
    for name in arms:
        row = summarize(runs[name], runs[own.arms[0]])
        seconds = median(row["seconds"])
        row["tokens_per_second"] = result["tokens"] / seconds
        row["efficiency"] = flops / (seconds * own.ranks * result["flops_per_second"])
        result["arms"][name] = row
    return result


def summarize(runs: list[dict], first_runs: list[dict]) -> dict:
    """Returns the row of an arm, with time and memory relative to the first arm."""
    seconds = []
    ratios = []
    for metrics, first in zip(runs, first_runs):
        times = metrics["perf/step_time"][1:]
        seconds += times
        ratios += [a / b for a, b in zip(times, first["perf/step_time"][1:])]
    peak = median(metrics["perf/peak_memory"][-1] for metrics in runs)
    return {
        "seconds": seconds,
        "cpu": median(metrics["cpu"][0] for metrics in runs),
        "peak": peak,
        "time": median(ratios),
        "memory": peak / median(metrics["perf/peak_memory"][-1] for metrics in first_runs),
        "loss": runs[0]["loss"],
        "grad_norm": runs[0]["grad_norm"],
    }


def show(result: dict):
    """Prints the table."""
    print("{script}, {model}, {dtype}: {tokens:,} tokens, {completion_tokens:,} scored".format(**result))
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    print("{ranks} x {threads} threads of {device}, commit {commit}".format(**result))
    if result["against"]:
        print("against commit {against_commit}".format(**result))
    print(f"{versions}; efficiency is of {result['flops_per_second'] / 1e9:,.0f} GFLOP/s\n")
    print("| | seconds (min to max) | tokens/s | efficiency | CPU s | GiB | time | memory |")
    print(f"|{'---|' * 8}")
    for name, arm in result["arms"].items():
        seconds = arm["seconds"]
        cells = [name, f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"]
        cells += [f"{arm['tokens_per_second']:,.0f}", f"{arm['efficiency']:.1%}"]
        cells += [f"{arm['cpu']:.1f}", f"{arm['peak']:.2f}", f"{arm['time']:.3f}", f"{arm['memory']:.3f}"]
        print(f"| {' | '.join(cells)} |")


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
        texts = [row["chosen"], row["rejected"]]
        prompt_ids, (chosen_ids, rejected_ids) = data.encode(tokenizer, eos_ids, row["prompt"], texts)
        rows += trl_rows(script, prompt_ids, chosen_ids, rejected_ids)
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


def main(flags: list[str]):
    if flags[:1] == ["TRL"]:
        return train_with_trl(int(flags[1]), flags[2], flags[3:])
    with contextlib.redirect_stdout(sys.stderr):  # for the line that `parse_args` prints
        result = measure(flags)
    if "--json" in flags:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    with run.exit_on_input_error():
        main(sys.argv[1:])
