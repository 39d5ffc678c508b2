"""What a run prints and keeps, so that a user knows what it does and whether it went well."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import PAIRS, ROOT, TOY, metrics, read_rows, run_ranks
from worker import run_here

import dpo_humanline
import grpo_math_humanline
import utils
from support import data, run

EVALUATED = ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--eval-samples", "4", "--max-new-tokens", "4"]
SHORT = [*EVALUATED, "--engine", "hf", "--num-steps", "4", "--batch-size", "8", "--checkpoint-every", "0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with two evaluations in between, as in a log file. Returns its folder and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    command = [sys.executable, ROOT / "dpo_humanline.py", *SHORT, "--eval-every", "2", "--output-dir", folder]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done


def test_a_run_begins_with_what_it_will_do(finished):
    folder, done = finished
    assert f"model: {TOY / 'policy'}, 112,320 parameters, float64; files: {folder}\n" in done.stdout
    assert "\nhumanline: k 16, log-ratios clipped to [-1.5, 1.5]\n" in done.stdout
    assert "\ntraining: 4 steps of 8 rows; 128 rows, 0.2 epochs\n" in done.stdout
    assert done.stdout.count("\nattention: ") == 1  # both models have the same one
    assert "the first prompt (5 tokens):\n<|user|> for " in done.stdout
    assert re.search(r"the first completion \(\d+ tokens\):\n.* <\|end\|>\n", done.stdout)


def test_a_log_file_has_lines_and_no_bar(finished):
    _, done = finished
    assert "\r" not in done.stdout + done.stderr and "it/s" not in done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("step ")] == [
        f"step {number} of 4" for number in (1, 2, 3, 4)
    ]


def test_samples_of_every_evaluation_are_kept_and_unfinished_ones_are_marked(finished):
    folder, done = finished
    samples = read_rows(folder / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 4 + [2] * 4 + [4] * 4
    assert {*samples[0]} == {"step", "prompt", "sample", "reward", "finished", "tokens"}
    assert [sample["prompt"] for sample in samples[:4]] == [row["prompt"] for row in read_rows(PAIRS)[:4]]
    assert all(sample["tokens"] == 4 and not sample["finished"] for sample in samples)  # a bouquet has 9
    assert done.stdout.count("  [unfinished]\n") == 8


def test_a_resumed_run_keeps_the_samples_of_the_steps_before(tmp_path):
    flags = [*SHORT, "--eval-every", "1", "--checkpoint-every", "2", "--num-steps", "2"]
    run_ranks(1, [[*flags, "--output-dir", str(tmp_path / "run")]])
    run_ranks(1, [["--num-steps", "4", "--resume", str(tmp_path / "run")]])
    steps = [sample["step"] for sample in read_rows(tmp_path / "run" / "samples.jsonl")]
    assert steps == [number for number in range(5) for _ in range(4)]


def test_a_part_of_a_line_does_not_end_a_resume(tmp_path):
    """A full disk leaves it, and it may end with a brace, like a complete line."""
    flags = [*SHORT, "--checkpoint-every", "2", "--num-steps", "2", "--output-dir", str(tmp_path / "run")]
    run_ranks(1, [flags])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"step": 1, "sample": "def f(): return {}')
    run_ranks(1, [["--num-steps", "3", "--resume", str(tmp_path / "run")]])
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]
    assert {sample["step"] for sample in read_rows(tmp_path / "run" / "samples.jsonl")} == {0, 3}


def test_a_run_without_evaluation_prints_no_table(tmp_path, capsys):
    run_here(dpo_humanline, *SHORT, "--eval-dataset", "", "--output-dir", tmp_path / "run")
    said = capsys.readouterr().out
    assert "mean ± standard error" not in said and f"wrote {tmp_path / 'run'}" in said


def test_equal_rewards_of_all_problems_show_in_the_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(
        grpo_math_humanline, "WEIGHTS", dict.fromkeys(("accuracy", "format", "tag_count"), 0.0)
    )
    flags = ["--engine", "hf", "--num-steps", "1", "--prompts-per-step", "2", "--eval-samples", "0"]
    run_here(grpo_math_humanline, *flags, "--checkpoint-every", "0", "--output-dir", tmp_path / "run")
    assert metrics(tmp_path / "run")[0]["grpo/zero_advantage_groups"] == 1


@pytest.mark.parametrize("words", ["dpo_humanline.py", "paper/variants.py no-clipping dpo_humanline"])
def test_ctrl_c_is_answered_at_once_and_ends_the_run_after_the_step(tmp_path, words):
    """A variant is resumed by its own command: its script alone would go on with humanline."""
    script, *variant = words.split()
    command = [sys.executable, ROOT / script, *variant, "--num-steps", "100000", "--eval-samples", "0"]
    command += ["--eval-dataset", "", "--output-dir", tmp_path / "run", "--checkpoint-every", "0"]
    process = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    path = tmp_path / "run" / "metrics.jsonl"
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=120)
    assert "\nstopping after this step, with a checkpoint\n" in errors and process.returncode == 130
    done = len(metrics(tmp_path / "run"))
    command = f"python {ROOT / words} --resume {tmp_path / 'run'}"
    assert f"stopped after {done} steps; to resume: {command}\n" in said and "torchrun" not in said


@pytest.mark.parametrize("late", ["s.release(); KILL", "KILL; s.release()"])
def test_after_the_last_step_a_signal_ends_the_process(late):
    """Also a signal that came after the ranks had last agreed, which was forgotten."""
    code = "import os, signal; from support import run; s = run.Signals(); "
    code += late.replace("KILL", "os.kill(os.getpid(), signal.SIGTERM)")
    done = subprocess.run([sys.executable, "-c", code + "; print('alive')"], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGTERM and done.stdout == b""


def test_a_local_rank_without_a_gpu_is_told_in_one_line(monkeypatch):
    def set_device(device):
        raise RuntimeError("CUDA error: invalid device ordinal\nmore lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setenv("LOCAL_RANK", "3")
    args = dpo_humanline.Args(**dpo_humanline.TOY)
    message = "the GPU of local rank 3: RuntimeError: CUDA error: invalid device ordinal"
    with pytest.raises(utils.InputError, match=f"^{message}$"):
        run.setup(args, args.batch_size)


def test_bars_are_for_terminals_and_for_rank_0(monkeypatch):
    terminal = SimpleNamespace(isatty=lambda: True)
    assert run.hide_bar()  # the tests' stderr is a file
    monkeypatch.setattr(sys, "stderr", terminal)
    assert not run.hide_bar()
    monkeypatch.setenv("RANK", "1")
    assert run.hide_bar()


def test_a_file_of_another_kind_is_named_with_what_to_do(tmp_path):
    for name in ("data.csv", "data.json"):
        (tmp_path / name).write_text("a,b\n1,2\n")
        with pytest.raises(utils.InputError, match="convert it to one .jsonl"):
            list(data.read_rows(str(tmp_path / name), "train"))


def test_the_flags_of_other_trainers_are_answered_with_ours(capsys):
    names = {"--learning-rate": "--lr", "--max_steps=3": "--num-steps", "--bf16": "--dtype bfloat16"}
    names |= {"--num_generations": "--samples-per-prompt", "--max-completion-length": "--max-new-tokens"}
    names |= {"--reward-funcs": "--reward-model", "--report-to": "not needed"}
    names |= {"--sync-ref-model": "--k", "--loss_type=ipo": "replaced by an edit"}
    names |= {"--use-peft": "not supported"}
    for flag, ours in names.items():
        with pytest.raises(utils.InputError, match=f"^{flag}: this flag is {ours}.* here$"):
            run.parse_args(dpo_humanline.Args, "", "", {}, {}, {}, ["--k", "1", flag, "3"])


@pytest.mark.parametrize("flags", [["--humanline", "False"], ["--humanline=False"], ["--online", "true"]])
def test_a_switch_with_a_value_is_answered_with_its_other_form(flags):
    with pytest.raises(utils.InputError, match="switches take no value; .* --no-humanline$"):
        run.parse_args(dpo_humanline.Args, "", "", {}, {}, {}, flags)


def test_a_hint_hides_no_flag_and_names_flags_that_exist():
    scripts = [importlib.import_module(f"{name}_humanline") for name in ("dpo", "kto", "grpo", "grpo_math")]
    fields = {name for script in scripts for name in script.Args.__dataclass_fields__}
    assert not {f"--{name}".replace("_", "-") for name in fields} & run.OTHER_NAMES.keys()
    for ours in run.OTHER_NAMES.values():
        for flag in re.findall(r"--([\w-]+)", ours):
            assert flag.replace("-", "_") in fields


def test_memory_is_that_of_one_gpu_by_default():
    from memory import Own

    assert Own().ranks == 1 and torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])


@pytest.mark.parametrize("script", ["dpo", "kto", "grpo"])
def test_the_reference_curves_begin_as_a_default_run_does(script, tmp_path):
    """docs/curves.md: step 0 agrees to four digits on every machine."""
    reference = read_rows(ROOT / "docs" / "reference" / f"{script}.jsonl.gz")
    assert [row["step"] for row in reference] == list(range(320))
    flags = ["--engine", "hf", "--num-steps", "1", "--checkpoint-every", "0", "--eval-dataset", ""]
    output_dir = tmp_path / "run"
    run_ranks(1, [[*flags, "--output-dir", str(output_dir)]], script=f"{script}_humanline")
    (first,) = metrics(output_dir, True)
    for key, value in first.items():
        if key != "lr":  # the warmup depends on --num-steps
            assert value == pytest.approx(reference[0][key], rel=1e-3, abs=1e-9), key


def test_the_reference_curve_of_math_is_a_whole_run():
    reference = read_rows(ROOT / "docs" / "reference" / "grpo_math.jsonl.gz")
    assert [row["step"] for row in reference] == list(range(256))
    assert reference[-1]["rewards/accuracy"] > 0.8 > 0.4 > reference[0]["rewards/accuracy"]
