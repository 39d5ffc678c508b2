"""Nothing is silently wrong and nothing is lost: weights, data, folders, checkpoints, disks and kills.

Runs are real processes; what is broken here is broken on disk or by a signal, never in the code.
"""

import gzip
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import PAIRS, ROOT, TOY, finish, free_port, metrics, refused, run_ranks, start_ranks
from safetensors.torch import load_file, save_file

SHORT = ["--num-steps", "2", "--batch-size", "4", "--eval-samples", "0", "--checkpoint-every", "0"]
SHORT += ["--k", "2", "--dtype", "float64"]
SHORT += ["--dataset", PAIRS, "--max-new-tokens", "8", "--engine", "hf"]
RUN = ["--num-steps", "12", "--k", "3", "--batch-size", "8", "--checkpoint-every", "4", "--eval-samples", "2"]
RUN += ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--max-new-tokens", "12", "--engine", "hf"]


def changed_policy(folder, weights=lambda found: found, **config):
    """The toy policy with other weights, or another config."""
    shutil.copytree(TOY / "policy", folder)
    path = folder / "model.safetensors"
    save_file(weights(load_file(path)), path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    return str(folder)


def same(folder, whole):
    assert metrics(folder, without_perf=True) == metrics(whole, without_perf=True)
    for file in ("summary.json", "final/model.safetensors"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(1, [[*RUN, "--output-dir", str(folder)]])
    return folder


# --- weights ---


def without(part):
    return lambda found: {key: value for key, value in found.items() if part not in key}


def renamed(found):
    return {key.replace("up_proj", "upward"): value for key, value in found.items()}


def narrower(found):
    return found | {"lm_head.weight": found["lm_head.weight"][:-1].contiguous()}


@pytest.mark.parametrize(
    ("weights", "config", "named"),
    [
        (without("mlp.down_proj"), {}, "missing, such as model.layers.0.mlp.down_proj.weight"),
        (without("lm_head"), {}, "1 missing, such as lm_head.weight"),
        (renamed, {}, "unexpected, such as model.layers.0.mlp.upward.weight"),
        (narrower, {}, "1 mismatched, such as lm_head.weight"),
        (dict, {"num_hidden_layers": 5}, "missing, such as model.layers."),
        (dict, {"num_hidden_layers": 1}, "unexpected, such as model.layers.1."),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_named(tmp_path, weights, config, named):
    model = changed_policy(tmp_path / "model", weights, **config)
    said = refused([*SHORT, "--model", model, "--output-dir", str(tmp_path / "run")])
    assert said.startswith(f"error: --model {model}: its weights are not those of its config.json")
    assert named in said
    assert not (tmp_path / "run" / "args.json").exists()


def test_a_classifier_is_no_policy_and_a_causal_model_is_no_judge(tmp_path):
    said = refused([*SHORT, "--model", str(TOY / "reward_model")])
    assert "missing, such as lm_head.weight" in said and "unexpected, such as score.weight" in said
    for labels in ({}, {"num_labels": 1}):
        model = changed_policy(tmp_path / f"judge{len(labels)}", **labels)
        evaluated = ["--reward-model", model, "--eval-dataset", PAIRS]
        said = refused([*SHORT, "--model", str(TOY / "policy"), *evaluated])
        assert f"--reward-model {model}: its weights" in said and "missing, such as score.weight" in said


def test_buffers_of_old_files_and_tied_heads_are_no_fault(tmp_path, tied_policy):
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    model = changed_policy(tmp_path / "old", lambda found: found | old)
    runs = []
    for i, name in enumerate([str(TOY / "policy"), model, tied_policy]):
        runs.append([*SHORT, "--model", name, "--output-dir", str(tmp_path / str(i))])
    run_ranks(1, runs)
    assert metrics(tmp_path / "0", True) == metrics(tmp_path / "1", True)
    assert len(metrics(tmp_path / "2")) == 2


# --- data ---


def test_other_content_under_the_same_name_and_time_is_another_run(tmp_path):
    rows = open(PAIRS).read().splitlines(keepends=True)
    path, runs = tmp_path / "pairs.jsonl", [str(tmp_path / name) for name in "ab"]
    command = [*SHORT, "--dataset", str(path), "--checkpoint-every", "1", "--output-dir"]
    for run, part in zip(runs, (rows[:60], rows[60:120])):
        path.write_text("".join(part))
        os.utime(path, (10**9, 10**9))
        run_ranks(1, [[*command, run]])
    assert [step["loss"] for step in metrics(runs[0])] != [step["loss"] for step in metrics(runs[1])]
    said = refused(["--resume", runs[0], "--num-steps", "4"])
    assert said.startswith(f"error: --resume {runs[0]}: --dataset {path}, or its tokens, changed")
    assert len(metrics(runs[0])) == 2
    run_ranks(1, [["--resume", runs[1], "--num-steps", "4"]])  # the same content
    path.rename(tmp_path / "moved.jsonl")
    run_ranks(1, [["--resume", runs[1], "--num-steps", "5", "--dataset", str(tmp_path / "moved.jsonl")]])
    assert len(metrics(runs[1])) == 5


# --- folders ---


def start(*arguments):
    """The script as users start it, in a process group of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, ROOT / "dpo_humanline.py", *map(str, arguments)], **pipes)


def lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_a_second_process_is_refused_and_the_first_one_loses_nothing(whole, tmp_path):
    folder, slow = tmp_path / "run", ["--num-steps", "3000", "--checkpoint-every", "50"]
    first = start(*RUN, *slow, "--output-dir", folder)
    try:
        while not (folder / "checkpoints" / "step-50").exists() and first.poll() is None:
            time.sleep(0.01)
        before = lines(folder)
        said = refused(["--resume", str(folder)])
        reason = r"\(does another process use it\?\): .*lock.*"
        assert re.fullmatch(rf"error: --output-dir {folder} {reason}\n", said)
        assert "already holds" not in refused([*RUN, "--output-dir", str(folder)])
        assert first.poll() is None and lines(folder) >= before
        os.killpg(first.pid, signal.SIGKILL)
    finally:
        first.kill()
        first.communicate()
    done = [step["step"] for step in metrics(folder)]
    assert done == list(range(len(done))) and len(done) >= 50
    # The lock went with the process.
    run_ranks(1, [["--resume", str(folder), "--num-steps", str(len(done) + 1)]])


def test_two_processes_that_begin_at_once_do_not_share_a_folder(tmp_path):
    arguments = [*RUN, "--num-steps", "400", "--output-dir", tmp_path / "run"]
    both = [start(*arguments) for _ in range(2)]
    outputs = [process.communicate(timeout=200)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], outputs
    assert [step["step"] for step in metrics(tmp_path / "run")] == list(range(400))


def test_checkpoints_without_the_settings_of_their_run_are_refused(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "args.json").unlink()
    assert f"--output-dir {folder} holds a run" in refused([*RUN, "--output-dir", str(folder)])
    assert "args.json" in refused(["--resume", str(folder)])


@pytest.mark.parametrize(("flag", "value"), [("speed", 3), ("k", "3")])
def test_flags_that_another_version_wrote_are_named(whole, tmp_path, flag, value):
    folder = shutil.copytree(whole, tmp_path / "run")
    settings = json.loads((folder / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps(settings | {flag: value}))
    reason = f"another version wrote {flag} {value!r}; go on with that version"
    assert refused(["--resume", str(folder)]) == f"error: --resume {folder}: {reason}\n"


@pytest.mark.parametrize("part", ["metrics.jsonl", "summary.json", "final"])
def test_a_folder_that_holds_any_part_of_a_run_is_not_begun_anew(whole, tmp_path, part):
    folder = tmp_path / "run"
    folder.mkdir()
    if part == "final":
        shutil.copytree(whole / part, folder / part)
    else:
        shutil.copy(whole / part, folder)
    before = contents(folder)
    assert f"--output-dir {folder} holds a run" in refused([*RUN, "--output-dir", str(folder)])
    assert contents(folder) == before


def contents(folder) -> dict:
    """The bytes of all files but the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in files}


def test_a_resume_that_fails_leaves_the_folder_as_it_was(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    before = contents(folder)
    model = changed_policy(tmp_path / "small", without("layers.1."), num_hidden_layers=1)
    said = refused(["--resume", str(folder), "--model", model])
    assert "the checkpoint does not fit --model" in said and contents(folder) == before
    run_ranks(1, [["--resume", str(folder)]])
    same(folder, whole)


def test_flags_with_which_a_resume_fails_are_not_kept(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    said = refused(["--resume", str(folder), "--lr", "1e30", "--num-steps", "14"])
    assert "the update was not made" in said
    run_ranks(1, [["--resume", str(folder)]])
    same(folder, whole)


def test_a_resume_says_where_it_goes_on(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    output = run_ranks(1, [["--resume", str(folder), "--num-steps", "8"]])
    assert f"12 of 8 steps are done: goes on from {folder / 'checkpoints' / 'step-12'}\n" in output


def test_a_run_without_checkpoints_is_not_begun_anew(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    before = contents(folder)
    assert f"--resume {folder}: it has no whole checkpoint" in refused(["--resume", str(folder)])
    assert contents(folder) == before


def test_a_run_is_resumed_by_the_script_that_made_it(whole):
    said = refused(["--resume", str(whole)], script="kto_humanline")
    assert said == f"error: --resume {whole}: it is not a run of kto_humanline.py\n"


# --- checkpoints ---


def cut(path, share=0.5):
    os.truncate(path, int(path.stat().st_size * share))


DAMAGES = {
    "an empty shard": lambda step: cut(step / "__0_0.distcp", 0),
    "a cut shard": lambda step: cut(step / "__0_0.distcp"),
    "no shard": lambda step: (step / "__0_0.distcp").unlink(),
    "no metadata": lambda step: (step / ".metadata").unlink(),
    "a cut state": lambda step: cut(step / "state.json"),
    "an empty state": lambda step: cut(step / "state.json", 0),
    "no state": lambda step: (step / "state.json").unlink(),
    "a state without hashes": lambda step: (step / "state.json").write_text('{"sizes": {}}'),
    "another state": lambda step: (step / "state.json").write_text("[1]"),
    "an empty folder": lambda step: (shutil.rmtree(step), step.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_resume_takes_the_newest_checkpoint_that_is_whole(whole, tmp_path, damage):
    folder = shutil.copytree(whole, tmp_path / "run")
    shutil.copytree(folder / "checkpoints" / "step-8", folder / "checkpoints" / "step-99.bak")
    DAMAGES[damage](folder / "checkpoints" / "step-12")
    output = run_ranks(1, [["--resume", str(folder)]])
    (skipped,) = [line for line in output.splitlines() if line.startswith("skipped")]
    assert skipped.startswith(f"skipped {folder / 'checkpoints' / 'step-12'} (damaged: ")
    same(folder, whole)


def test_no_checkpoint_that_is_whole_is_an_error_and_the_metrics_stay(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    for step in (folder / "checkpoints").iterdir():
        cut(step / "__0_0.distcp")
    assert f"--resume {folder}: it has no whole checkpoint" in refused(["--resume", str(folder)])
    assert lines(folder) == 12


def test_a_checkpoint_with_its_bytes_overwritten_is_told(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    for name in ("__0_0.distcp", ".metadata"):
        path = folder / "checkpoints" / "step-12" / name
        path.write_bytes(bytes(path.stat().st_size))
        said = refused(["--resume", str(folder)])
        assert said.startswith("error: --resume: the checkpoint does not fit --model, or is damaged: ")


def test_another_model_or_other_tokens_do_not_continue_a_run(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    model = changed_policy(tmp_path / "small", without("layers.1."), num_hidden_layers=1)
    said = refused(["--resume", str(folder), "--model", model])
    assert said.startswith("error: --resume: the checkpoint does not fit --model, or is damaged")
    template = (TOY / "policy" / "chat_template.jinja").read_text()
    (tmp_path / "own.jinja").write_text("<|end|> " + template)
    said = refused(["--resume", str(folder), "--chat-template", str(tmp_path / "own.jinja")])
    assert f"--dataset {PAIRS}, or its tokens, changed" in said and lines(folder) == 12


@pytest.mark.parametrize("damage", ["cut", "no JSON", "gone"])
def test_metrics_that_are_damaged_have_whole_lines_after_a_resume(whole, tmp_path, damage):
    folder = shutil.copytree(whole, tmp_path / "run")
    path = folder / "metrics.jsonl"
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 30)
    elif damage == "no JSON":
        lines_before = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines_before[:-1], "{12}\n"]))
    else:
        path.unlink()
    for steps in ("14", "16"):  # the second one begins at the same checkpoint
        run_ranks(1, [["--resume", str(folder), "--num-steps", steps, "--checkpoint-every", "0"]])
        kept = range(0 if damage == "gone" else 11)
        assert [step["step"] for step in metrics(folder)] == [*kept, *range(12, int(steps))]


# --- disks ---


# Bytes of a file: too few for a shard, and for the metrics as well.
@pytest.mark.parametrize("limit", [300_000, 2_000])
def test_a_disk_that_is_full_ends_with_one_line_and_the_last_checkpoint_resumes(whole, tmp_path, limit):
    folder = tmp_path / "run"
    flags = ["--num-steps", "2000", "--warmup-fraction", "0", "--keep-checkpoints", "0"]
    process = start(*RUN, *flags, "--output-dir", folder)
    while not (folder / "checkpoints" / "step-4").exists() and process.poll() is None:
        time.sleep(0.002)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "Traceback" not in output, output[-3000:]
    (told,) = re.findall(r"error: (.*)", output)
    assert told.startswith("no checkpoint was written: ") or "File too large" in told
    assert limit == 2_000 or told.startswith("no checkpoint")
    run_ranks(1, [["--resume", str(folder), "--num-steps", "12"]])
    same(folder, whole) if limit > 2_000 else None
    assert lines(folder) == 12


def test_one_rank_that_cannot_write_ends_all_of_them(tmp_path):
    folder = tmp_path / "run"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [sys.executable, *launch, ROOT / "dpo_humanline.py", *RUN, "--num-steps", "300"]
    command += ["--checkpoint-every", "100"]
    command += ["--output-dir", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while lines(folder) < 1 and process.poll() is None:
            time.sleep(0.002)
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints" / "step-100").write_text("")  # where rank 0, and no other, is to put one
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and lines(folder) == 100
    assert len(re.findall("error: no checkpoint was written", output)) == 1
    assert 'dpo_humanline.py", line' not in output  # no traceback but that of torchrun


def test_a_file_in_the_place_of_final_is_told(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(folder / "final")
    (folder / "final").write_text("")
    said = refused(["--resume", str(folder)])
    assert said.startswith("error: final/ was not written: ") and str(folder / "final") in said


# --- kills ---

KILLED = ["--num-steps", "8", "--k", "3", "--batch-size", "8", "--checkpoint-every", "3"]
KILLED += ["--eval-samples", "4"]
KILLED += ["--max-new-tokens", "12", "--engine", "hf"]
MATH = ["--num-steps", "6", "--sample-every", "3", "--prompts-per-step", "4", "--group-size", "4", "--k", "2"]
MATH += ["--checkpoint-every", "2", "--eval-samples", "4", "--engine", "hf"]
ONLINE = ["--online", "--round-prompts", "10", "--temperature", "1"]
SCRIPTS = {  # flags, and the first rows of which toy data
    "dpo_humanline": (KILLED, "bouquets/preferences"),
    "kto_humanline": (KILLED, "tales/preferences"),
    "grpo_humanline": ([*KILLED, *ONLINE], "tales/prompts"),
    "grpo_math_humanline": (MATH, "shell_game/problems"),
}
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
KILLS = list(itertools.product(list(SCRIPTS)[:3], (1, 2), (KILL, TERM, INT)))
KILLS += [("grpo_math_humanline", 1, KILL), ("grpo_math_humanline", 1, TERM), ("grpo_math_humanline", 2, INT)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Makes, once, the flags of a short run and the folder of the run that nothing ended."""
    made, data = {}, tmp_path_factory.mktemp("data")

    def run(script, ranks):
        if (script, ranks) not in made:
            flags, name = SCRIPTS[script]
            for flag, split in (("--dataset", "train"), ("--eval-dataset", "test")):
                path = data / f"{name.replace('/', '_')}_{split}.jsonl"
                with gzip.open(ROOT / "toy" / f"{name}_{split}.jsonl.gz", "rt") as rows:
                    path.write_text("".join(itertools.islice(rows, 64)))
                flags = [*flags, flag, str(path)]
            made[script, ranks] = flags, tmp_path_factory.mktemp(script) / "run"
            run_ranks(ranks, [[*flags, "--output-dir", str(made[script, ranks][1])]], script=script)
        return made[script, ranks]

    return run


@pytest.mark.parametrize(("script", "ranks", "number"), KILLS)
def test_a_run_ended_at_any_moment_goes_on_as_if_nothing_was(undisturbed, tmp_path, script, ranks, number):
    """KILL and TERM come to all ranks, as from a scheduler, INT to one of them. While they train all end
    together; while one samples it ends at once, and the others, whom a launcher would end, with an error."""
    (flags, whole), folder = undisturbed(script, ranks), tmp_path / "run"
    processes = start_ranks(ranks, [[*flags, "--output-dir", str(folder)]], script=script)
    moment = random.Random(f"{script} {ranks} {number} {os.environ.get('MOMENTS', '')}")
    first = moment.randint(0, 5)  # lines of metrics.jsonl
    while not ((folder / "args.json").exists() and lines(folder) >= first) and processes[0].is_alive():
        time.sleep(0.001)
    time.sleep(moment.uniform(0, 0.3))
    for process in processes[: 1 if number == INT and first else ranks]:
        if process.is_alive():
            os.kill(process.pid, number)
    outputs = finish(processes, timeout=100)
    codes = {0, -9 if number == KILL else 128 + number}
    assert processes[0].exitcode in codes and processes[-1].exitcode in codes | {1}, outputs
    if processes[0].exitcode > 0:
        at_once, later = f"\nstopped by signal {number}\n", f" steps; to go on: --resume {folder}\n"
        assert (at_once in outputs[0]) != (later in outputs[0])
    if list(folder.glob("checkpoints/step-*")):
        run_ranks(ranks, [["--resume", str(folder)]], script=script)
        same(folder, whole)
    elif lines(folder):
        assert "it has no whole checkpoint" in refused(["--resume", str(folder)], script=script)
