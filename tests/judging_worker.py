"""worker.py, where a function gives other rewards in every call and on every rank."""

import os

import torch
import worker

import grpo_humanline

if __name__ == "__main__":
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    grpo_humanline.SCORE = lambda samples: torch.rand(len(samples), generator=generator)
    worker.main()
