"""Quarters of a preference data set by the average log-prob of the chosen completion's tokens (Figure 6).

    torchrun --nproc-per-node 4 paper/quartiles.py --model meta-llama/Meta-Llama-3-8B-Instruct \
        --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" \
        --out runs/quartiles

Writes quartile1.jsonl (the lowest) to quartile4.jsonl, their rows as they are and in their order. The flags
are those of dpo_humanline.py, which reads the data and computes the log-probs; rows that it would drop are
dropped.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import dpo_humanline as dpo  # noqa: E402
import utils  # noqa: E402
from run import check_flags, exit_on_error, fail, write  # noqa: E402


@dataclass
class Args(dpo.Args):
    out: Path = Path("runs/quartiles")  # folder for the four files


@exit_on_error("reading or writing", OSError)
def main(args: Args):
    if not args.model or not args.dataset:
        fail("it needs --model and --dataset")
    check_flags(args, args.batch_size)
    rank, _, device = dpo.setup(args)
    reference_dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    config, _, tokens = dpo.load_config(args)
    groups, _ = dpo.load_groups(args, "--dataset", args.dataset, args.dataset_split, tokens, (2,))
    _, reference = dpo.load_models(args, config, reference_dtype, device)
    chosen = [pair[0] for pair in groups]
    logps = utils.completion_logps(reference, chosen, tokens.pad_id)  # (B,)
    averages = logps / torch.tensor([len(x.completion_ids) for x in chosen])  # (B,)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        rows = dpo.load_rows("--dataset", args.dataset, args.dataset_split)
        order = averages.argsort(stable=True).tolist()
        for i in range(4):
            first = round(i * len(groups) / 4)
            end = round((i + 1) * len(groups) / 4)
            quarter = sorted(order[first:end])
            text = ""
            for j in quarter:
                text += json.dumps(rows[chosen[j].row], ensure_ascii=False) + "\n"
            write(args.out / f"quartile{i + 1}.jsonl", text)
            low = averages[quarter].min()
            high = averages[quarter].max()
            bounds = f"average token log-prob from {low:.3f} to {high:.3f} nats"
            print(f"quartile {i + 1}: {len(quarter)} rows, {bounds}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
