"""Tests paper/miniature.py and paper/trials.py: real runs of a figure, and the judges."""

import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, read_rows, write_rows
from test_paper_figures import conversation, plain_logps

from paper import pictures, trials
from toy import make

TINY = """
import sys; sys.path.insert(0, ".")
from paper import miniature, study, trials
short = "--num-steps 2 --eval-samples 8"
arms = trials.arms("DPO", "dpo", (1e-3, 1e30), {"humanline": ""}, short)
arms += trials.arms("DPO", "dpo", (1e-3,), {"offline": "--no-humanline"}, short)
miniature.PLANS["tiny"] = study.Plan(arms, before_seeds=(1,))
miniature.main("tiny", 2, write=WRITE)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Makes a figure with runs of two steps in another repository. Returns its folder and the output."""
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
    assert "tiny: 7 runs, about " in printed  # 1 untrained, 2 to tune, 4 reported
    rows = pictures.read(folder / "runs/results", "tiny")
    reported = [("reported", arm, seed, 1e-3) for arm in ("humanline", "offline") for seed in (11, 12)]
    tuning = [("tuning", "humanline", 1, lr) for lr in (1e-3, 1e30)]
    assert [(row["phase"], row["arm"], row["seed"], row["lr"]) for row in rows] == tuning + reported
    for row in rows:
        assert ("failed" in row) == ("eval/reward" not in row) == (row["lr"] == 1e30)
    head = git(folder, "log", "-1", "--format=%h")
    assert {row["commit"] for row in rows} == {head}
    assert (folder / "runs/results/tiny.png").read_bytes()[:4] == b"\x89PNG"
    assert not git(folder, "status", "--porcelain", "paper/results")  # paper/results is as it was


def test_the_judge_of_a_row_is_the_hidden_one_and_a_command_repeats_its_numbers(tiny):
    folder, _ = tiny
    row = pictures.read(folder / "runs/results", "tiny")[-1]
    program, *words = shlex.split(row["command"])
    assert program == "python"
    again = [sys.executable, *words, "--output-dir", "runs/again"]
    subprocess.run(again, cwd=folder, check=True, capture_output=True)
    after = trials.read_summary(folder / "runs/again")["after"]
    for key, (mean, *_) in after.items():
        assert row[key] == mean
    samples = trials.last_samples(folder / "runs/again")
    scores = [make.judge_bouquet(sample["prompt"], sample["sample"]) for sample in samples]
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


def test_every_toys_tales_are_judged_by_its_own_judge():
    """The expected values come from the words of one sentence. Each instance has its own values."""
    sentence = "the shiny drum helps the small dog kindly ."
    scores = {}
    for instance, toy in ((0, "toy"), (3, "runs/instances/3"), (12, "runs/instances/12")):
        taste = make.another_instance(instance).taste["drum"]
        expected = np.mean([taste[word] for word in ("shiny", "helps", "small", "kindly")])
        scores[toy] = trials.judge_of(f"{toy}/tales/policy")("about drum", sentence)
        assert scores[toy] == pytest.approx(expected)
    assert len(set(scores.values())) == 3
    six = " ".join([sentence] * 6)  # too many for tales
    for name, less in (("tales", 1.5), ("low_entropy", 0)):
        score = trials.judge_of(f"toy/{name}/policy")("about drum", six)
        assert score == pytest.approx(scores["toy"] - less)


def test_the_quarters_hold_the_rows_of_their_log_probs(tmp_path):
    toy = ROOT / "toy" / "bouquets"
    rows = read_rows(toy / "preferences_test.jsonl.gz")[:40]
    left_out = {"prompt": "for king", "chosen": "rose", "rejected": "rose"}
    data = write_rows(tmp_path / "pairs.jsonl", [*rows[:3], left_out, *rows[3:]])
    command = [sys.executable, ROOT / "paper/quartiles.py", "--model", toy / "policy"]
    command += ["--dataset", data, "--out", tmp_path / "out"]
    subprocess.run(command, capture_output=True, check=True)
    averages = []
    for row in rows:
        turn = conversation(toy / "policy", row["prompt"], row["chosen"])
        averages.append(np.mean(plain_logps(toy / "policy", *turn)))
    for i, quarter in enumerate(np.argsort(averages).reshape(4, 10), 1):
        found = read_rows(tmp_path / "out" / f"quartile{i}.jsonl")
        assert found == [rows[place] for place in sorted(quarter)]


def test_a_row_has_the_processors_own_name(monkeypatch):
    """An AMD and an Intel may have the same instructions, but rows in bf16 differ."""
    capability = trials.torch.backends.cpu.get_cpu_capability()
    for vendor in ("AMD EPYC 9R14", "Intel(R) Xeon(R) Processor"):
        info = f"processor\t: 0\nmodel\t\t: 143\nmodel name\t: {vendor}\n" * 2
        monkeypatch.setattr(trials, "cpu_info", lambda info=info: info)
        assert trials.processor() == f"{vendor}, model 143, {capability}"
    monkeypatch.setattr(trials, "cpu_info", lambda: "processor\t: 0\n")  # as on some ARM machines
    other = trials.platform.processor() or trials.platform.machine()
    assert trials.processor() == f"{other}, {capability}"


def test_data_that_cannot_be_made_ends_the_program_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "CACHE", tmp_path)
    line = trials.PREPARE["runs/chat/polite/"].replace(" runs/", f" {tmp_path}/")
    with pytest.raises(
        SystemExit, match=r"error: .*\.json does not exist.*\nerror: exit code 1: python toy/chat"
    ):
        trials.prepare(line, "abc")
    assert not list(tmp_path.iterdir())
