"""Splits a preference data set into quarters by the average log-prob of the chosen tokens (Figure 6).

    torchrun --nproc-per-node 4 paper/quartiles.py --model meta-llama/Meta-Llama-3-8B-Instruct \
        --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" \
        --out runs/quartiles

Writes quartile1.jsonl (the lowest log-probs) to quartile4.jsonl. The rows are unchanged and in their order.
The flags are those of dpo_humanline.py, which reads the data and computes the log-probs. Rows that it skips
are skipped here too.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import dpo_humanline as dpo  # noqa: E402
import utils  # noqa: E402
from support import data, run  # noqa: E402


@dataclass
class Args(dpo.Args):
    out: str = "runs/quartiles"  # folder for the four files


def main(args: Args):
    """Writes the four files."""
    args.max_new_tokens = 1  # nothing is sampled
    _, _, device = run.setup(args)
    tokenizer, eos_ids = data.load_tokenizer(args)
    dpo.SCORE = len  # any function: then examples keep their rows
    groups, _ = dpo.load_data(args, tokenizer, eos_ids)
    chosen = [pair[0] for pair in groups]
    _, reference = dpo.load_models(args, device)
    logps, mask = utils.completion_logps(reference, chosen, args.micro_batch_tokens)
    averages = logps.sum(1) / mask.sum(1)  # (B,)
    if dist.get_rank() == 0:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        for i, quarter in enumerate(averages.argsort(stable=True).tensor_split(4), 1):
            rows = [chosen[j].row for j in sorted(quarter.tolist())]
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            run.write_file(out / f"quartile{i}.jsonl", "".join(lines))
            bounds = f"from {averages[quarter].min():.3f} to {averages[quarter].max():.3f} nats"
            print(f"quartile {i}: {len(lines)} rows with an average token log-prob {bounds}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
