"""Trains the runs of test_trl_humanline.py in one of two processes, and writes what was logged."""

import json
from pathlib import Path

import torch
from test_trl_humanline import LOGGED, RUNS, train_in, values
from worker import argument_lists

if __name__ == "__main__":
    for (folder,) in argument_lists():
        logged = {}
        for name, (kind, model, more) in RUNS.items():
            trainer = train_in(2, kind, model, Path(folder) / name, more)
            weights = torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])
            both = trainer.accelerator.gather(weights[None])
            logged[name] = {key: values(trainer, key) for key in LOGGED}
            logged[name]["equal weights"] = torch.equal(both[0], both[1])
        if trainer.accelerator.is_main_process:
            (Path(folder) / "logged.json").write_text(json.dumps(logged))
