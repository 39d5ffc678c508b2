"""Nothing is silently wrong and nothing is lost: weights, folders, checkpoints and disks.

Runs are real processes; what is broken here is broken on disk, never in the code.
"""

import json
import os
import resource
import shutil
import time

import pytest
import torch
from conftest import PAIRS, TOY, finish, metrics, refused, run_ranks, start_ranks
from filelock import FileLock
from safetensors.torch import load_file, save_file
from test_resume import lines, same

SHORT = ["--num-steps", "2", "--batch-size", "4", "--eval-samples", "0", "--checkpoint-every", "0"]
SHORT += ["--k", "2", "--dtype", "float64", "--max-new-tokens", "8", "--dataset", PAIRS]
RUN = ["--num-steps", "12", "--k", "3", "--batch-size", "8", "--checkpoint-every", "4", "--eval-samples", "2"]
RUN += ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--max-new-tokens", "12"]


def changed_policy(folder, weights=lambda found: found, **config):
    """The toy policy with other weights, or another config."""
    shutil.copytree(TOY / "policy", folder)
    path = folder / "model.safetensors"
    save_file(weights(load_file(path)), path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    return str(folder)


def contents(folder) -> dict:
    """The bytes of all files but the lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(1, [[*RUN, "--output-dir", str(folder)]])
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    """Of the whole run, to break."""
    return shutil.copytree(whole, tmp_path / "run")


def without(part):
    return lambda found: {key: value for key, value in found.items() if part not in key}


def narrower(found):
    return found | {"lm_head.weight": found["lm_head.weight"][:-1].contiguous()}


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        (without("lm_head"), "its files have no lm_head.weight"),
        (narrower, "its files have lm_head.weight as ["),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_named(tmp_path, weights, named):
    model = changed_policy(tmp_path / "model", weights)
    said = refused([*SHORT, "--model", model, "--output-dir", str(tmp_path / "run")])
    assert said.startswith(f"error: --model {model}: ") and named in said
    assert not (tmp_path / "run" / "args.json").exists()


def test_buffers_of_old_files_and_tied_heads_are_no_fault(tmp_path, tied_policy):
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    model = changed_policy(tmp_path / "old", lambda found: found | old)
    runs = []
    for i, name in enumerate([str(TOY / "policy"), model, tied_policy]):
        runs.append([*SHORT, "--model", name, "--output-dir", str(tmp_path / str(i))])
    run_ranks(1, runs)
    assert metrics(tmp_path / "0", True) == metrics(tmp_path / "1", True)
    assert len(metrics(tmp_path / "2")) == 2


def test_a_folder_in_use_or_with_a_run_is_refused_and_stays_as_it_is(copy):
    before = contents(copy)
    with FileLock(copy / ".lock"):
        said = refused(["--resume", str(copy)])
    assert said.startswith(f"error: {copy} (does another process use it?): ") and "lock" in said
    assert f"--output-dir {copy} holds a run" in refused([*RUN, "--output-dir", str(copy)])
    assert contents(copy) == before


def test_a_run_is_resumed_by_the_script_and_the_version_that_made_it(copy):
    said = refused(["--resume", str(copy)], script="kto_humanline")
    assert said == f"error: --resume {copy}: it is not a run of kto_humanline.py\n"
    settings = json.loads((copy / "args.json").read_text())
    (copy / "args.json").write_text(json.dumps(settings | {"speed": 3}))
    assert "an unexpected keyword argument 'speed'" in refused(["--resume", str(copy)])
    (copy / "args.json").unlink()
    assert "args.json" in refused(["--resume", str(copy)])


def test_an_offline_run_goes_on_online(copy):
    flags = ["--resume", str(copy), "--online", "--num-steps", "14", "--checkpoint-every", "0"]
    run_ranks(1, [[*flags, "--max-new-tokens", "12", "--engine", "hf"]])
    assert [step.get("rollout/round") for step in metrics(copy)] == [None] * 12 + [1, None]


def test_a_resume_that_fails_leaves_the_folder_as_it_was(copy, whole, tmp_path):
    before = contents(copy)
    model = changed_policy(tmp_path / "small", without("layers.1."), num_hidden_layers=1)
    assert refused(["--resume", str(copy), "--model", model]).startswith("error: --resume: ")
    rows = open(PAIRS).read().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(rows[1:]))
    said = refused(["--resume", str(copy), "--dataset", str(tmp_path / "rows.jsonl")])
    assert said.startswith(
        "error: --resume: --dataset, its tokens or the fields of utils.Example have changed"
    )
    assert contents(copy) == before
    (tmp_path / "rows.jsonl").write_text("".join(rows))  # the same content under another name
    run_ranks(1, [["--resume", str(copy), "--dataset", str(tmp_path / "rows.jsonl")]])
    same(copy, whole)


def cut(path, share=0.5):
    os.truncate(path, int(path.stat().st_size * share))


DAMAGES = {
    "an empty shard": lambda step: cut(step / "__0_0.distcp", 0),
    "a cut shard": lambda step: cut(step / "__0_0.distcp"),
    "no metadata": lambda step: (step / ".metadata").unlink(),
    "metadata overwritten": lambda step: (step / ".metadata").write_bytes(bytes(999)),
    "cut progress": lambda step: cut(step / "progress.json"),
    "no progress": lambda step: (step / "progress.json").unlink(),
    "a shard of zeros": lambda step: (step / "__0_0.distcp").write_bytes(bytes(99999)),
    "an empty folder": lambda step: (shutil.rmtree(step), step.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_checkpoint_that_can_be_read_is_taken(copy, damage):
    older, newer = copy / "checkpoints" / "step-8", copy / "checkpoints" / "step-12"
    shutil.copytree(older, copy / "checkpoints" / "step-99.bak")
    DAMAGES[damage](newer)
    output = run_ranks(1, [["--resume", str(copy), "--num-steps", "9"]])
    assert f"skipped {newer} (damaged: " in output and f"resumes from {older}\n" in output


def test_a_run_goes_on_from_a_whole_checkpoint_alone(copy, whole):
    cut(copy / "checkpoints" / "step-12" / "__0_0.distcp")
    output = run_ranks(1, [["--resume", str(copy)]])
    assert f"8 steps are done: resumes from {copy}/checkpoints/step-8\n" in output
    same(copy, whole)
    for step in (copy / "checkpoints").iterdir():
        cut(step / "__0_0.distcp")
    assert f"--resume {copy}: it has no complete checkpoint" in refused(["--resume", str(copy)])
    assert lines(copy) == 12


@pytest.mark.parametrize("left", ["half a line more", "nothing"])
def test_metrics_have_whole_lines_after_a_resume(copy, left):
    path = copy / "metrics.jsonl"
    before = path.read_text()
    path.write_text(before + before[:30] if left == "half a line more" else "")
    kept = 12 if left == "half a line more" else 0
    run_ranks(1, [["--resume", str(copy), "--num-steps", "14", "--checkpoint-every", "0"]])
    assert [step["step"] for step in metrics(copy)] == [*range(kept), 12, 13]


def test_a_disk_that_is_full_ends_all_ranks_and_the_last_checkpoint_resumes(tmp_path):
    folder = tmp_path / "run"
    flags = ["--num-steps", "2000", "--output-dir", str(folder)]
    processes = start_ranks(2, [[*RUN, *flags]])
    while not (folder / "checkpoints" / "step-4").exists() and processes[0].is_alive():
        time.sleep(0.002)
    for process in processes:  # bytes of a file, too few for a shard
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (200_000, 200_000))
    output, other = finish(processes)
    assert [process.exitcode for process in processes] == [1, 1]
    assert "could not be written" in output + other and "Traceback" not in output + other
    run_ranks(1, [["--resume", str(folder), "--num-steps", "12"]])
    assert lines(folder) == 12


def test_a_file_in_the_place_of_final_is_told(copy):
    shutil.rmtree(copy / "final")
    (copy / "final").write_text("")
    (process,) = start_ranks(1, [["--resume", str(copy)]])
    (output,) = finish([process])
    assert process.exitcode == 1 and f"{copy / 'final'}" in output
