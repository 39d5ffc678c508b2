"""Quarters of a preference data set by the average log-prob of the chosen completion's tokens (Figure 6).

    torchrun --nproc-per-node 4 paper/quartiles.py --model meta-llama/Meta-Llama-3-8B-Instruct \
        --dataset princeton-nlp/llama3-ultrafeedback-armorm --dataset-split "train[:10000]" \
        --out runs/quartiles

Writes quartile1.jsonl (the lowest) to quartile4.jsonl, prompts and completions as they are and in their
order. The flags are those of dpo_humanline.py, which reads the data and computes the log-probs; rows that it
would leave out are left out.
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
import run  # noqa: E402
import utils  # noqa: E402


@dataclass
class Args(dpo.Args):
    out: str = "runs/quartiles"  # folder for the four files


@run.exit_on_error("reading or writing", OSError)
def main(args: Args):
    if not args.model:
        run.fail("it needs --model and --dataset")
    args.max_new_tokens = 1  # nothing is sampled
    run.check_flags(args, args.batch_size)
    _, _, device = dpo.setup(args)
    tokenizer, eos_ids = utils.load_tokenizer(args.model, args.chat_template, args.eos_token)
    rows = []
    chosen = []
    for number, row in dpo.load_rows(args.dataset, args.dataset_split):
        with run.exit_on_error(f"{args.dataset}, line {number}"):
            try:
                best, _ = dpo.encode_row(args, tokenizer, eos_ids, row)
            except utils.CannotTrain:
                continue
        rows.append(row)
        chosen.append(best)
    reference_dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    _, reference = dpo.load_models(args, reference_dtype, device)
    logps, mask = utils.completion_logps(reference, chosen)
    averages = logps.sum(1) / mask.sum(1)  # (B,)
    if dist.get_rank() == 0:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        for i, quarter in enumerate(averages.argsort(stable=True).tensor_split(4), 1):
            lines = [json.dumps(rows[j], ensure_ascii=False) + "\n" for j in sorted(quarter.tolist())]
            run.write(out / f"quartile{i}.jsonl", "".join(lines))
            bounds = f"from {averages[quarter].min():.3f} to {averages[quarter].max():.3f} nats"
            print(f"quartile {i}: {len(lines)} rows, average token log-prob {bounds}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
