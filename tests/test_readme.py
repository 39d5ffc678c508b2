"""README: what its own-data section says about k, and its settings, follow from the committed rows."""

import re

import pandas as pd
from conftest import ROOT

README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def mean_score(study: str, rate: str, arm: str) -> float:
    """The mean score of DPO on the stories, over the reported draws, of an arm at a learning rate."""
    table = pd.read_csv(ROOT / f"paper/results/{study}.csv")
    rows = table[(table.phase == "reported") & table.panel.str.startswith("DPO ") & (table.arm == arm)]
    rates = rows.command.str.extract(r"--lr (\S+)", expand=False).unique()
    assert len(rows) == 12 and rates == [rate], (len(rows), rates)
    return rows.judge.mean()
