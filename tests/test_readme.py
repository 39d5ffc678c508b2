"""README: what it says about k, for own data, follows from the committed rows."""

import re

import pandas as pd
from conftest import ROOT

README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def dpo_on_stories(study: str, rate: float, flag: str) -> float:
    """The mean score of DPO's humanline over the twelve reported draws, at a learning rate and a k."""
    table = pd.read_csv(ROOT / f"paper/results/{study}.csv")
    table = table[(table.phase == "reported") & table.panel.str.startswith("DPO ") & (table.lr == rate)]
    rows = table[(table.command + " ").str.contains(f" --{flag} ") & table.arm.str.contains("humanline")]
    assert len(rows) == 12 and rows.panel.nunique() == 12
    return rows.judge.mean()


def test_the_advice_on_k_has_the_scores_of_the_stories():
    said = re.search(
        r"k = 16 scored (\S+) at 3e-4; the paper's k = 1 scored (\S+) at 3e-4 and (\S+) at 1e-4",
        README,
    )
    scores = [dpo_on_stories("stories", 3e-4, "k 16")]
    scores += [dpo_on_stories("baselines", rate, "k 1") for rate in (3e-4, 1e-4)]
    assert list(said.groups()) == [f"{score:.2f}" for score in scores]
