"""Several machines: ranks that would train with something else, or see another disk, say what differs."""

import os
import shutil
import subprocess
import sys
import time

from conftest import PAIRS, ROOT, TOY, finish, free_port, metrics, start_ranks

FLAGS = ["--num-steps", "2", "--batch-size", "8", "--eval-samples", "0", "--checkpoint-every", "1"]


def machines(tmp_path, first: list, second: list) -> str:
    """What rank 0 says of a run of two machines, with other flags on each, that must end in a minute."""
    folders = [tmp_path / "first", tmp_path / "second"]
    runs = []
    for folder, flags in zip(folders, (first, second)):
        folder.mkdir(exist_ok=True)
        runs.append([str(folder), *FLAGS, *map(str, flags)])
    started = time.monotonic()
    processes = start_ranks(2, runs, "machine_worker.py")
    processes[0].join(60)
    took = time.monotonic() - started
    processes[1].kill()  # as torchrun does
    outputs = finish(processes)
    assert processes[0].exitcode == 1 and "Traceback" not in outputs[0] and took < 60, outputs[0][-3000:]
    return outputs[0][outputs[0].index("error: ") :]


def on_one_disk(tmp_path) -> list:
    return ["--output-dir", tmp_path / "shared", "--dataset", PAIRS]


def test_other_flags(tmp_path):
    flags = on_one_disk(tmp_path)
    message = machines(tmp_path, flags, [*flags, "--lr", "5e-4"])
    assert message == "error: --lr is 0.0005 on rank 1, but 0.001 on rank 0\n"
    assert not (tmp_path / "shared").exists()


def test_other_weights_at_the_same_path(tmp_path):
    from safetensors.torch import load_file, save_file

    for machine in ("first", "second"):
        shutil.copytree(TOY / "policy", tmp_path / machine / "policy")
    file = tmp_path / "second/policy/model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, file, {"format": "pt"})
    flags = [*on_one_disk(tmp_path), "--model", "policy", "--dtype", "float32", "--max-new-tokens", "8"]
    message = machines(tmp_path, flags, flags)
    assert message.startswith("error: the checksum of --model's weights is ") and "on rank 1" in message


def test_other_data_at_the_same_path(tmp_path):
    lines = open(PAIRS).read().splitlines(keepends=True)
    for machine, rows in (("first", lines), ("second", lines[1:])):
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "pairs.jsonl").write_text("".join(rows))
    flags = [*on_one_disk(tmp_path), "--dataset", "pairs.jsonl"]
    message = machines(tmp_path, flags, flags)
    assert message.startswith("error: the hash of --dataset's rows is ") and "on rank 1" in message


def test_no_disk_in_common(tmp_path):
    flags = ["--dataset", PAIRS, "--output-dir", "run"]
    message = machines(tmp_path, flags, flags)
    assert message == "error: --output-dir run is not on a disk that all machines see\n"
    assert len(metrics(tmp_path / "first/run")) == 1  # the first checkpoint comes after the first step


def test_a_resume_from_a_folder_that_both_machines_have_of_their_own(tmp_path):
    """It would load half of each checkpoint."""
    flags = ["--dataset", PAIRS, "--output-dir", tmp_path / "run"]
    (process,) = start_ranks(1, [[*FLAGS, *map(str, flags)]])
    finish([process])
    assert process.exitcode == 0
    for machine in ("first", "second"):
        shutil.copytree(tmp_path / "run", tmp_path / machine / "run")
    shutil.rmtree(tmp_path / "second/run/checkpoints/step-2")
    flags = ["--resume", "run", "--num-steps", "4"]
    before = (tmp_path / "first/run/metrics.jsonl").read_text()
    assert "error: the list of checkpoints is ['step-1'] on rank 1, but" in machines(tmp_path, flags, flags)
    assert (tmp_path / "first/run/metrics.jsonl").read_text() == before


def test_the_same_data_at_other_paths_are_refused(tmp_path):
    """Paths are compared as all other flags are."""
    shutil.copy(PAIRS, tmp_path / "copy.jsonl")
    flags = on_one_disk(tmp_path)
    message = machines(tmp_path, flags, [*flags, "--dataset", tmp_path / "copy.jsonl"])
    assert message == f"error: --dataset is {tmp_path / 'copy.jsonl'} on rank 1, but {PAIRS} on rank 0\n"


def test_two_agents_of_torchrun_train_as_two_ranks_do(tmp_path):
    port = free_port()
    agents = []
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for rank in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "dpo_humanline.py", *FLAGS]
        command += ["--output-dir", str(tmp_path / "run")]
        agents.append(subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True))
    errors = [agent.communicate(timeout=200)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], errors
    processes = start_ranks(2, [[*FLAGS, "--output-dir", str(tmp_path / "ranks")]])
    finish(processes)
    assert metrics(tmp_path / "run", True) == metrics(tmp_path / "ranks", True)
    final = [(tmp_path / name / "final/model.safetensors").read_bytes() for name in ("run", "ranks")]
    assert final[0] == final[1]


def test_a_checkpoint_without_a_rank_s_file_is_not_whole(tmp_path):
    finish(start_ranks(2, [[*FLAGS, *map(str, on_one_disk(tmp_path))]]))
    (tmp_path / "shared/checkpoints/step-2/__1_0.distcp").unlink()
    processes = start_ranks(2, [["--resume", str(tmp_path / "shared"), "--num-steps", "3"]])
    output = finish(processes)[0]
    assert "skipped" in output and "resumes from" in output and "step-1" in output
