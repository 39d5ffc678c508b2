"""Quarters of a preference data set by the average token log-prob of the chosen completion under a model (Figure 6).

    torchrun --nproc-per-node 4 paper/quartiles.py --model meta-llama/Meta-Llama-3-8B-Instruct \
        --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" --out runs/quartiles

Writes quartile1.jsonl (the lowest) to quartile4.jsonl, their rows as they are and in their order. The flags are those
of dpo_humanline.py, which reads the data and computes the log-probs; rows that it would drop are dropped.
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


@dataclass
class Args(dpo.Args):
    out: Path = Path("runs/quartiles")  # folder for the four files


@dpo.blame("reading or writing", OSError)
def main(args: Args) -> None:
    if not args.model or not args.dataset:
        dpo.fail("it needs --model and --dataset")
    dpo.check_flags(args, args.batch_size)
    rank, _, device = dpo.setup()
    if args.dtype == "auto":
        args.dtype = "bfloat16" if device.type == "cuda" else "float64"
    half = args.dtype == "bfloat16"
    config, _, tokens = dpo.load_config(args)
    groups = dpo.load_groups(args, "--dataset", args.dataset, args.dataset_split, tokens, (2,), {})
    dtypes = getattr(torch, args.dtype), torch.bfloat16 if half else torch.float32
    _, reference = dpo.load_models(args, config, *dtypes, device)
    logps, mask = utils.completion_logps(reference, [chosen for chosen, _ in groups], tokens.pad_id)  # (B, T)
    averages = logps.sum(-1) / mask.sum(-1)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        rows = dpo.load_rows("--dataset", args.dataset, args.dataset_split)
        order, groups_each = averages.argsort(stable=True).tolist(), len(groups) / 4
        for i in range(4):
            mine = sorted(order[round(i * groups_each) : round((i + 1) * groups_each)])
            lines = "".join(json.dumps(rows[groups[j][0].row], ensure_ascii=False) + "\n" for j in mine)
            utils.write(args.out / f"quartile{i + 1}.jsonl", lines)
            low, high = averages[mine].min(), averages[mine].max()
            print(f"quartile {i + 1}: {len(mine)} rows, average token log-prob from {low:.3f} to {high:.3f} nats")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
