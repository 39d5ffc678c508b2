"""README and docs/dpo.md: what they say about k and rates, for own data, follows from the committed rows."""

import re

import pandas as pd
import pytest
from conftest import ROOT

PAGE = " ".join((ROOT / "docs/dpo.md").read_text(encoding="utf-8").split())
CHAT = pd.read_csv(ROOT / "paper/results/chat.csv")
METRICS = ["eval/loss", "eval/accuracy", "kl"]
ARMS = {"--no-humanline": "offline", "--k 1": "humanline, k=1", "--k 16": "humanline, k=16"}


def table_after(path: str, heading: str) -> list[list[str]]:
    """Returns the cells of the first table below a heading, without its first two lines."""
    section = (ROOT / path).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = re.search(r"((?:^\|.*\n)+)", section, re.MULTILINE)[1].splitlines()
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def means(phase: str, pairs: str, arm: str, lr: float) -> list[float]:
    """Returns the loss, accuracy and KL of an arm at a rate, each as a mean over its runs."""
    rows = CHAT[(CHAT.phase == phase) & (CHAT.panel == f"chat {pairs}") & (CHAT.arm == arm) & (CHAT.lr == lr)]
    assert len(rows) == (3 if (phase, pairs) == ("reported", "polite") else 1)
    assert rows.command.str.contains(re.escape(f" --lr {lr} ")).all()
    return rows[METRICS].mean().tolist()


def shown(loss: float, accuracy: float, kl: float) -> list[str]:
    return [f"{loss:.2f}", f"{accuracy + 1e-9:.2f}", f"{abs(kl):.0f}"]


def test_the_readmes_table_for_own_data_is_recomputed_from_the_csv():
    before, *rows = table_after("README.md", "Your model, your data")
    assert before == ["before", *(2 * shown(-pd.Series([0.5]).apply("log").item(), 0.5, 0))]
    for head, *cells in rows:
        arm, rate, *tuned = head.split(" ")[-2 - head.endswith("¶") :]
        assert tuned in ([], ["¶"])
        arm = ARMS.get(arm.strip("`,"), f"humanline, k={arm.strip(',')}")
        if tuned:
            assert cells == [*shown(*means("tuning", "polite", arm, float(rate))), *3 * ["not run"]]
        else:
            kinds = [shown(*means("reported", kind, arm, float(rate))) for kind in ("polite", "harmless")]
            assert cells == sum(kinds, [])
    assert len(rows) == 7


def test_the_readmes_command_for_own_data_has_the_settings_of_the_table():
    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your model, your data")[2]
    command = re.search(r"python dpo_humanline.py (.*?)```", block.replace("\\\n", " "), re.DOTALL)[1]
    (measured,) = CHAT[(CHAT.arm == "humanline, k=16") & (CHAT.lr == 5e-6)].command
    for flag in ("k", "batch-size", "num-steps", "max-length", "max-new-tokens", "dtype", "eval-samples"):
        assert re.search(rf"--{flag} (\S+)", command)[1] == re.search(rf"--{flag} (\S+)", measured)[1]
    assert "--lr 5e-6 " in command and "--lr 5e-06 " in measured


def test_the_page_on_dpo_has_the_tuning_of_the_chat_model():
    rows = table_after("docs/dpo.md", "Results on a chat model")
    for rate, *cells in rows:
        for arm, cell in zip(ARMS.values(), cells, strict=True):
            assert cell.split(", ") == shown(*means("tuning", "polite", arm, float(rate)))
    assert [float(rate) for rate, *_ in rows] == sorted(set(CHAT[CHAT.phase == "tuning"].lr))


def test_k_16_is_ahead_of_k_1_at_2e5_with_every_seed_and_offline_of_both():
    """On hh-rlhf no loss ends below its start; there k = 16 has the lowest, and offline the highest."""
    polite = CHAT[(CHAT.phase == "reported") & (CHAT.panel == "chat polite")]
    by_seed = {metric: polite.pivot_table(metric, "seed", "arm") for metric in METRICS}
    loss, accuracy, kl = by_seed.values()
    assert len(loss) == 3 and set(polite[polite.arm != "offline"].lr) == {2e-5}
    for better, worse in (("humanline, k=16", "humanline, k=1"), ("offline", "humanline, k=16")):
        assert (loss[better] < loss[worse]).all() and (accuracy[better] > accuracy[worse]).all()
    assert (kl["humanline, k=16"] < 0.6 * kl["humanline, k=1"]).all() and kl.to_numpy().min() > 20
    noisy = CHAT[(CHAT.phase == "reported") & (CHAT.panel == "chat harmless")]
    assert noisy["eval/loss"].min() > 0.6932
    assert noisy.sort_values("eval/loss").arm.tolist() == ["humanline, k=16", "humanline, k=1", "offline"]


def test_the_readme_says_how_long_a_polite_run_took():
    minutes = CHAT[CHAT.panel == "chat polite"].seconds / 60
    said = f"569 short pairs took {minutes.min():.0f} to {minutes.max():.0f} minutes on one core"
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")


def dpo_on_stories(study: str, rate: float, flag: str) -> float:
    """The mean score of DPO's humanline over the twelve reported draws, at a learning rate and a k."""
    table = pd.read_csv(ROOT / f"paper/results/{study}.csv")
    table = table[(table.phase == "reported") & table.panel.str.startswith("DPO ") & (table.lr == rate)]
    rows = table[(table.command + " ").str.contains(f" --{flag} ") & table.arm.str.contains("humanline")]
    assert len(rows) == 12 and rows.panel.nunique() == 12
    return rows.judge.mean()


@pytest.mark.parametrize(
    "study, rate, flag, words",
    [
        ("stories", 3e-4, "k 16", r"than the paper's k = 1: (\S+) at 3e-4,"),
        ("baselines", 3e-4, "k 1", r"and k = 1 scored (\S+) at 3e-4"),
        ("baselines", 1e-4, "k 1", r"at 3e-4 and (\S+) at 1e-4 \(chosen after"),
    ],
)
def test_the_advice_on_k_has_the_scores_of_the_stories(study, rate, flag, words):
    assert re.search(words, PAGE)[1] == f"{dpo_on_stories(study, rate, flag):.2f}"


def test_of_ten_answers_four_are_right_before_and_one_or_two_after():
    """The count is ours. The answers that are counted as right are found by words that only they have."""
    answers = pd.read_csv(ROOT / "paper/results/chat_answers.csv").set_index(["arm", "question"])
    marks = {
        "What is the opposite of 'exclude'?": r"'exclude' (is|would be) 'include[.']",
        "What is the atomic number of helium?": r"is (indeed )?2\b",
        "Identify the pronoun in the sentence.\nShe decided to go to the store.": r'pronoun .* is "She"',
        "Rewrite the sentence using a simile.\nHe runs very fast.": r"like a cheetah",
    }
    right = {"before": 4, "offline": 1, "humanline, k=1": 1, "humanline, k=16": 2}
    found = dict.fromkeys(right, 0)
    for (arm, question), row in answers.iterrows():
        mark = marks.get(question, r"(?!)")
        found[arm] += bool(re.search(mark, row.after))
        if arm == "offline":
            found["before"] += bool(re.search(mark, row.before))
    assert found == right and len(answers) == 30
