"""What --resume answers to a folder that is not a run's, and to a run of another version."""

import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PAIRS, ROOT, metrics, read_rows, refused, run_ranks, start_ranks
from conftest import finish as finish_ranks

from support import run

RUN = ["--num-steps", "2", "--batch-size", "8", "--eval-samples", "0", "--eval-dataset", ""]
RUN += ["--dataset", PAIRS, "--checkpoint-every", "1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parent") / "runs"
    run_ranks(1, [[*RUN, "--output-dir", str(folder / "one")]])
    return folder


@pytest.mark.parametrize("inside", ["", "one/final", "one/checkpoints/step-2", "one/args.json", "none"])
def test_a_folder_that_is_not_the_run_s_says_what_to_pass(runs, inside):
    before = {path for path in runs.rglob("*")}
    said = refused(["--resume", str(runs / inside)])
    hint = "no args.json; pass the folder of one run, as in runs/NAME"
    assert said == f"error: --resume {runs / inside}: {hint}\n"
    assert {path for path in runs.rglob("*")} == before


def test_another_example_is_told_from_other_data(runs, tmp_path):
    """A field that was added to utils.Example made --resume blame the data alone."""
    folder = shutil.copytree(runs / "one", tmp_path / "run")
    shutil.copytree(ROOT / "support", tmp_path / "support")
    text = (ROOT / "utils.py").read_text()
    field = '    text: str = ""  # the completion\n'
    assert text.count(field) == 1
    (tmp_path / "utils.py").write_text(text.replace(field, f"    weight: float = 1.0\n{field}"))
    shutil.copy(ROOT / "dpo_humanline.py", tmp_path)

    command = [sys.executable, tmp_path / "dpo_humanline.py", "--resume", folder, "--num-steps", "3"]
    command += ["--model", ROOT / "toy/bouquets/policy"]
    ended = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "--resume: --dataset, its tokens or the fields of utils.Example have changed" in ended.stderr


def test_lines_that_a_disk_has_damaged_are_dropped(runs, tmp_path):
    folder = shutil.copytree(runs / "one", tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe{"step": 0\n\0\0\0\n{"note": 1}\n[1]\nnull\n5\n{"step": null}\n')
    run_ranks(1, [["--resume", str(folder), "--num-steps", "3"]])
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2]


def test_an_offline_run_keeps_the_size_of_its_rounds(runs, tmp_path):
    """As all runs do: one rule, whether rounds were drawn or not."""
    folder = shutil.copytree(runs / "one", tmp_path / "run")
    said = refused(["--resume", str(folder), "--round-prompts", "16"])
    assert said.startswith("error: --round-prompts cannot be changed by --resume")


@pytest.mark.parametrize("name", ["a run", "it's", "ünï"])
def test_the_command_after_a_signal_can_be_pasted(tmp_path, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dpo_humanline.py", "--k", "16", "--online"])

    class Ended(Exception):
        pass

    def leave(code):
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", leave)
    signals = run.Signals.__new__(run.Signals)  # without its handlers
    signals.received, signals.agreed = 15, 2  # another signal came after the ranks had agreed
    with pytest.raises(Ended, match="130"):
        signals.exit_if_received(tmp_path / name, 7)
    command = capsys.readouterr().out.partition("to resume: ")[2].strip()
    assert shlex.split(command) == ["python", "dpo_humanline.py", "--resume", str(tmp_path / name)]


def test_a_full_disk_says_how_much_was_free(tmp_path):

    folder = tmp_path / "run"
    (process,) = start_ranks(1, [[*RUN, "--num-steps", "2000", "--output-dir", str(folder)]])
    while not (folder / "checkpoints/step-1").exists() and process.is_alive():
        time.sleep(0.002)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (200_000, 200_000))
    (output,) = finish_ranks([process])
    assert process.exitcode == 1 and "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"error: {folder}/checkpoints/step-" in line and " MB were free): " in line
    free = float(line.partition(" MB were free)")[0].rpartition("(")[2].replace(",", ""))
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free / 1e6, rel=0.2)


def test_a_resume_with_fewer_steps_reports_the_steps_that_are_done(runs, tmp_path):
    """Its evaluation was said to be of step 1."""
    folder = shutil.copytree(runs / "one", tmp_path / "run")
    flags = ["--num-steps", "1", "--eval-dataset", PAIRS, "--eval-samples", "2", "--max-new-tokens", "4"]
    output = run_ranks(1, [["--resume", str(folder), *flags]])
    assert "\nafter 2 steps, eval/loss " in output and "\nafter 1 steps" not in output
    assert {sample["step"] for sample in read_rows(folder / "samples.jsonl")} == {2}
