"""paper/miniature.py and paper/trials.py: real runs of a figure, and the judges."""

import gzip
import json
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from test_paper_figures import conversation, plain_logps
from test_study import PLANS

sys.path.insert(0, str(ROOT))
from paper import miniature, pictures, study, trials  # noqa: E402
from toy import make  # noqa: E402

# --- real runs ---

TINY = """
import sys; sys.path.insert(0, ".")
from paper import miniature, study, trials
short = "--num-steps 2 --eval-samples 8"
arms = trials.arms("DPO", "dpo", (1e-3, 1e30), {"humanline": ""}, short)
arms += trials.arms("DPO", "dpo", (1e-3,), {"offline": "--no-humanline"}, short)
miniature.PLANS["tiny"] = study.Plan(arms)
miniature.main("tiny", 2, write=WRITE)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A figure of runs of two steps, in a repository of its own; the folder, and what was printed."""
    folder = tmp_path_factory.mktemp("tiny")
    for path in [*trials.CODE[:6], "toy", "paper"]:
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, folder / path)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "all")
    done = start(folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def git(folder, *words) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def start(folder, write: bool = False):
    command = [sys.executable, "-c", TINY.replace("WRITE", str(write))]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_figure_is_tuned_run_and_written_and_a_collapse_is_a_result(tiny):
    folder, printed = tiny
    assert "tiny: 9 runs, about " in printed  # 3 untrained, 2 to tune, 4 reported
    rows = pictures.read(folder / "runs/results", "tiny")
    keys = ("phase", "arm", "seed", "lr")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        ("tuning", "humanline", 1, 1e-3),
        ("tuning", "humanline", 1, 1e30),
        ("reported", "humanline", 11, 1e-3),
        ("reported", "humanline", 12, 1e-3),
        ("reported", "offline", 11, 1e-3),
        ("reported", "offline", 12, 1e-3),
    ]
    for row in rows:
        assert ("failed" in row) == ("eval/reward" not in row) == (row["lr"] == 1e30)
    head = git(folder, "log", "-1", "--format=%h")
    assert {row["commit"] for row in rows} == {head}
    assert (folder / "runs/results/tiny.png").read_bytes()[:4] == b"\x89PNG"
    lines = pictures.read(folder / "runs/results", "tiny_arms")
    (mean,) = [line["mean"] for line in lines if (line["arm"], line["metric"]) == ("offline", "judge")]
    assert mean == pytest.approx(np.mean([row["judge"] for row in rows[-2:]]))
    assert not git(folder, "status", "--porcelain", "paper/results")  # paper/results is as it was


def test_the_judge_of_a_row_is_the_hidden_one_and_a_command_repeats_its_numbers(tiny):
    folder, _ = tiny
    row = pictures.read(folder / "runs/results", "tiny")[-1]
    program, *words = shlex.split(row["command"])
    assert program == "python"
    again = [sys.executable, *words, "--output-dir", "runs/again"]
    subprocess.run(again, cwd=folder, check=True, capture_output=True)
    after = trials.read_summary(folder / "runs/again")["after"]
    for key, (mean, _) in after.items():
        assert row[key] == mean
    samples = json.loads((folder / "runs/again/outputs.json").read_text())
    scores = [make.judge_bouquet(sample["instruction"], sample["output"]) for sample in samples]
    assert row["judge"] == pytest.approx(np.mean(scores) - (1 - after["eval/finished"][0]))


def test_a_second_call_runs_nothing_and_writes_where_it_is_told_and_changed_code_is_refused(tiny):
    folder, _ = tiny
    files = list((folder / "runs/miniature").rglob("*.json*"))
    before = [file.stat().st_mtime_ns for file in files]
    assert start(folder, write=True).returncode == 0
    assert [file.stat().st_mtime_ns for file in files] == before
    for file in ("tiny.csv", "tiny_arms.csv", "tiny.png"):
        written = (folder / "paper/results" / file).read_bytes()
        assert written == (folder / "runs/results" / file).read_bytes()
    with (folder / "utils.py").open("a") as file:
        file.write("\n")
    refused = start(folder)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert "commit the changes first" in refused.stderr


def test_a_plan_is_counted_as_it_is_run():
    counts = {name: miniature.count_runs(plan) for name, plan in PLANS.items()}
    for name, plan in study.FIGURES.items():
        rows = pictures.read(pictures.RESULTS, name)
        assert counts[name] == len(rows) + 3 * len({arm.panel for arm in plan.arms})
    assert counts["clipping"] == 6 + 60  # nothing is tuned
    assert counts["instances"] == 3 * 12 + 3 * 18 + 60  # tuned on two panels more
    assert counts["tasks"] == 50 + 5 * 64 + 120  # tuned on five tasks more, the untrained evaluated once
    assert counts["stories"] == 3 * 14 + 2 * (33 + 35 + 30) + 120


def test_every_toys_tales_are_judged_by_its_own_judge():
    """Values by hand, from the words of one sentence; the tastes of two instances are other numbers."""
    sentence = "the shiny drum helps the small dog kindly ."
    scores = []
    for instance in (0, 3, 12):
        folder = f"runs/instances/{instance}/tales" if instance else "toy/tales"
        score = trials.judge_of(f"{folder}/policy")("about drum", sentence)
        taste = make.another_instance(instance).taste["drum"]
        assert score == pytest.approx(
            np.mean([taste[word] for word in ("shiny", "helps", "small", "kindly")])
        )
        scores.append(score)
    assert len(set(scores)) == 3
    six = " ".join([sentence] * 6)
    assert trials.judge_of("toy/tales/policy")("about drum", six) == pytest.approx(
        scores[0] - 1.5
    )  # too many
    assert trials.judge_of("toy/low_entropy/policy")("about drum", six) == pytest.approx(scores[0])


def test_the_quarters_hold_the_rows_of_their_log_probs(tmp_path):
    toy = ROOT / "toy" / "bouquets"
    with gzip.open(toy / "preferences_test.jsonl.gz", "rt") as file:
        rows = file.read().splitlines()[:40]
    left_out = json.dumps({"prompt": "for king", "chosen": "rose", "rejected": "rose"})
    (tmp_path / "pairs.jsonl").write_text("\n".join([*rows[:3], left_out, *rows[3:]]))
    command = [sys.executable, ROOT / "paper/quartiles.py", "--model", toy / "policy"]
    command += ["--dataset", tmp_path / "pairs.jsonl", "--out", tmp_path / "out"]
    subprocess.run(command, capture_output=True, check=True)
    quarters = []
    for i in (1, 2, 3, 4):
        lines = (tmp_path / "out" / f"quartile{i}.jsonl").read_text().splitlines()
        quarters.append([json.loads(line) for line in lines])
    assert [len(quarter) for quarter in quarters] == [10] * 4
    places = [[rows.index(json.dumps(row)) for row in quarter] for quarter in quarters]
    assert sorted(sum(places, [])) == list(range(40))
    assert all(quarter == sorted(quarter) for quarter in places)
    averages = []
    for quarter in quarters:
        turns = [conversation(toy / "policy", row["prompt"], row["chosen"]) for row in quarter]
        averages.append([np.mean(plain_logps(toy / "policy", *turn)) for turn in turns])
    for low, high in zip(averages, averages[1:]):
        assert max(low) <= min(high)
