"""What a run sends to TensorBoard and, with --track, to W&B: real files of both, without a network."""

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import PAIRS, TOY, metrics, run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from dpo_humanline import Args
from run import open_folder

SHORT = ["--dataset", PAIRS, "--eval-dataset", f"{TOY}/prompts_test.jsonl.gz", "--eval-samples", "8"]


def history(path: Path) -> dict:
    """{step: {name: value}} of a .wandb file: 7 bytes, then LevelDB's log format, blocks of 32 KiB."""
    raw = path.read_bytes()
    position, record, rows = 7, b"", {}
    while position + 7 <= len(raw):
        if 32768 - position % 32768 < 7:  # a header does not cross blocks
            position += 32768 - position % 32768
            continue
        _, size, kind = struct.unpack("<IHB", raw[position : position + 7])
        record += raw[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            row = {}
            for item in Record.FromString(record).history.item:
                row[item.key or item.nested_key[0]] = json.loads(item.value_json)
            record = b""
            if row:
                rows[row["global_step"]] = row
    return rows


def test_a_resumed_run_is_one_run_in_tensorboard_and_in_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    folder = tmp_path / "tracked"
    first = [*SHORT, "--track", "--num-steps", "3", "--checkpoint-every", "3", "--output-dir", str(folder)]
    run_ranks(1, [first])
    run_ranks(1, [["--resume", str(folder), "--num-steps", "5"]])
    lines = metrics(folder)
    before, after = json.loads((folder / "summary.json").read_text()).values()

    parts = [history(path) for path in sorted(tmp_path.glob("wandb/offline-*/run-tracked.wandb"))]
    assert [[step for step in part if "loss" in part[step]] for part in parts] == [[0, 1, 2], [3, 4]]
    tensorboard = EventAccumulator(str(folder)).Reload()
    for key in ("loss", "grad_norm", "rewards/margins"):
        expected = pytest.approx([line[key] for line in lines], rel=1e-6)
        assert [event.value for event in tensorboard.Scalars(key)] == expected
        assert [row[key] for part in parts for row in part.values() if key in row] == expected
    reward = {event.step: event.value for event in tensorboard.Scalars("eval/reward")}
    expected = {0: before["eval/reward"][0], 5: after["eval/reward"][0]}
    assert {step: reward[step] for step in expected} == pytest.approx(expected)
    assert parts[0][0]["eval/reward"] == pytest.approx(expected[0])
    assert parts[1][5]["eval/reward"] == pytest.approx(expected[5])


def test_without_wandb_a_tracked_run_ends_before_a_model_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    args = replace(Args(), track=True, output_dir=f"{tmp_path}/run")
    with pytest.raises(SystemExit):
        open_folder(args, "dpo_humanline.py", torch.device("cpu"))
    assert "error: --track: import of wandb" in capsys.readouterr().err
