"""support/run.py: flags, errors, ranks, loading a model, and what a run prints and writes."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    ALL_SCRIPTS,
    PAIRS,
    ROOT,
    TOY,
    finish,
    metrics,
    parse_args,
    read_rows,
    refused,
    run_edited,
    run_here,
    run_ranks,
    start_ranks,
    write_rows,
)
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
)

import dpo_humanline
import grpo_humanline
import grpo_math_humanline
import kto_humanline
from support import run
from utils import Evaluation, Example, InputError

SCRIPTS = {module.__name__: module for module in (dpo_humanline, kto_humanline, grpo_humanline)}
SCRIPTS["grpo_math_humanline"] = grpo_math_humanline
EVALUATED = ["--dataset", PAIRS, "--eval-dataset", PAIRS, "--eval-samples", "4", "--max-new-tokens", "4"]
EVALUATED += ["--max-prompt-length", "64", "--max-length", "128"]  # the toys have 128 positions
SHORT = [*EVALUATED, "--engine", "hf", "--num-steps", "4", "--batch-size", "8", "--checkpoint-every", "0"]

SMALL = dict(max_prompt_length=64, max_length=128, max_new_tokens=64)  # the toys have 128 positions

# === Flags ===


def check(script, *flags):
    args = parse_args(script, [str(flag) for flag in flags])
    run.check_flags(args)


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        (dpo_humanline, ["--k", "-1"], "--k -1: it must be at least 0"),
        (grpo_math_humanline, ["--temperature", "0"], "--temperature 0.0: it must be at least 1e-09"),
        (dpo_humanline, ["--max-grad-norm", "0"], "--max-grad-norm 0.0: it must be at least 1e-09"),
        (grpo_math_humanline, ["--sample-every", "0"], "--sample-every 0: it must be at least 1"),
        (dpo_humanline, ["--samples-per-prompt", "1"], "--samples-per-prompt 1: it must be at least 2"),
        (dpo_humanline, ["--shard-size", "2"], "--shard-size 2: 1 ranks are no multiple of it"),
        (dpo_humanline, ["--eval-every", "3", "--eval-dataset="], "--eval-every needs an --eval-dataset"),
        (dpo_humanline, ["--track"], "--track needs the package wandb, which is not installed"),
        (dpo_humanline, ["--engine", "vllm"], "--engine vllm needs the package vllm, which is not"),
        (kto_humanline, ["--log-epsilon-P", "0.5"], "--log-epsilon-P must be negative and"),
        (dpo_humanline, ["--log-epsilon-R", "nan"], "--log-epsilon-P must be negative and"),
        (dpo_humanline, ["--model", "gpt2"], "--model gpt2 needs a --dataset"),
        (
            grpo_humanline,
            ["--batch-size", "30", "--group-size", "4"],
            "the batch of 30 must be a multiple of",
        ),
        (dpo_humanline, ["--output-dir", "USED"], "holds a run: pass another, or --resume this one"),
        (dpo_humanline, ["--resume", "USED/final"], "no args.json; pass the folder of a run"),
        (kto_humanline, ["--resume", "USED"], "it is not a run of kto_humanline.py"),
        (dpo_humanline, ["--resume", "USED", "--seed", "7"], "--resume cannot change seed"),
    ],
)
def test_a_common_mistake_in_the_flags_is_one_line_before_anything_is_loaded(
    script, flags, said, tmp_path, monkeypatch
):
    monkeypatch.setattr(run, "find_spec", lambda package: None)
    args = parse_args(dpo_humanline, ["--k", "3"])
    run.save_args(args, tmp_path, dpo_humanline.__file__)
    flags = [flag.replace("USED", str(tmp_path)) for flag in flags]
    with pytest.raises(InputError, match=re.escape(said)):
        check(script, *flags)


def test_ranks_must_divide_the_batch(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    check(dpo_humanline, "--batch-size", "8", "--shard-size", "2")
    with pytest.raises(InputError, match="the batch of 6 must be a multiple of --group-size and of 4 ranks"):
        check(dpo_humanline, "--batch-size", "6")


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_defaults_are_in_range_and_a_value_may_end_in_true(name):
    """--output-dir runs/humanline=True was refused as the value of a switch."""
    check(SCRIPTS[name], "--output-dir", "runs/humanline=True")


@pytest.mark.parametrize("flag", ["--learning-rate=1", "--humanline=False", "--k=x"])
def test_a_flag_that_does_not_exist_ends_the_run(flag, capsys):
    with pytest.raises(SystemExit):
        parse_args(dpo_humanline, [flag])
    assert re.search("Unrecognized|invalid|Error", capsys.readouterr().err)


def test_the_first_line_has_only_the_settings_that_differ_from_the_defaults(capsys):
    parse_args(dpo_humanline, ["--model", "m", "--dataset", "d", "--lr", "5e-6", "--k", "16"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "settings that differ from the defaults: dataset d, k 16, model m"


# === Errors ===


@pytest.mark.slow
def test_a_mistake_in_an_edited_loss_keeps_its_traceback(tmp_path):
    old = "    return -F.logsigmoid(chosen - rejected)\n"
    ended = run_edited(tmp_path, old, "    return -F.logsigmoid(chosen - rejected)[:, 0]\n")
    assert ended.returncode == 1 and "in dpo_loss" in ended.stderr
    assert "IndexError: too many indices" in ended.stderr


@pytest.mark.slow
def test_bad_input_is_one_line_without_a_traceback(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt"\n')
    ended = run_edited(tmp_path, "# === Loss ===", "# === Loss ===", "--dataset", path)
    assert (
        ended.returncode == 1 and ended.stderr.startswith(f"error: {path}") and ended.stderr.count("\n") == 1
    )
    assert not (tmp_path / "runs").exists()


def test_a_model_that_is_not_there_is_named(tmp_path):
    for flag in ("--model", "--reward-model"):
        flags = [*SHORT, "--model", str(TOY / "policy"), flag, str(tmp_path / "absent")]
        said = refused([*flags, "--output-dir", str(tmp_path / "run")])
        assert f"{tmp_path}/absent" in said


# === Ranks and signals ===


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_time_throughput_and_peak_of_a_step(one_rank, monkeypatch):
    """Tests `perf_metrics` on the CPU. The kernel's VmHWM is the peak memory in KiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = run.perf_metrics(time.perf_counter() - 2, tokens=600)
    assert 2 <= found["perf/step_time"] < 3
    assert found["perf/tokens_per_second"] == pytest.approx(600 / found["perf/step_time"])
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]
    assert found["perf/peak_memory"] == pytest.approx(int(peak) / 2**20, rel=0.05)


def test_a_share_of_a_list_is_its_part_in_order():
    for count in range(12):
        for parts in range(1, 6):
            shares = [run.share(list(range(count)), part, parts) for part in range(parts)]
            assert sum(shares, []) == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.slow
def test_a_signal_handler_acts_only_in_the_process_that_installed_it():
    """A judge's pool could not be terminated, because its processes took over the handler."""
    code = """
import multiprocessing, signal, time
from support import run
def endless():
    while True: time.sleep(0.1)
signals = run.Signals()
process = multiprocessing.get_context("fork").Process(target=endless)
process.start()
time.sleep(0.5)
process.terminate()
process.join(20)
assert process.exitcode == -signal.SIGTERM, process.exitcode
assert signal.getsignal(signal.SIGTERM) == signals.record and not signals.received
signal.raise_signal(signal.SIGTERM)
assert signals.received == signal.SIGTERM
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "stopping after this step" in done.stderr, done.stderr


# === Models ===


def changed_policy(folder, change) -> str:
    """Writes the toy policy with other weights."""
    shutil.copytree(TOY / "policy", folder)
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})
    return str(folder)


def test_a_weight_that_the_files_lack_is_named(tmp_path):
    """transformers initializes it at random, and only warns."""
    model = changed_policy(
        tmp_path / "m", lambda found: {k: v for k, v in found.items() if "lm_head" not in k}
    )
    with pytest.raises(InputError, match="lacks weights: .*lm_head.weight"):
        run.load_pretrained(dpo_humanline.Args(**SMALL), AutoModelForCausalLM, model, "auto")


def test_a_quantized_model_is_refused(tmp_path):
    """FP8 weights were trained without their scales, 3 nats beside the model."""
    shutil.copytree(TOY / "policy", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="is quantized: pass its weights in bf16 or fp32"):
        run.load_pretrained(dpo_humanline.Args(**SMALL), AutoModelForCausalLM, str(tmp_path / "m"), "auto")


def test_a_model_is_loaded_in_the_dtype_of_its_files(tmp_path):
    """Not in config.json's, which may be another one."""
    model = changed_policy(tmp_path / "m", lambda found: {k: v.bfloat16() for k, v in found.items()})
    loaded = run.load_pretrained(dpo_humanline.Args(**SMALL), AutoModelForCausalLM, model, "auto")
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}


def test_policy_and_reference_have_equal_weights_whatever_dtypes_the_files_have(tmp_path, one_rank):
    """With norms in fp32 beside weights in bf16, as in Qwen3.5, the policy's norms were rounded alone."""
    rounded = changed_policy(
        tmp_path / "m",
        lambda found: {k: v + 1e-4 if "norm" in k else v.bfloat16() for k, v in found.items()},
    )
    args = parse_args(dpo_humanline, ["--model", rounded, "--dtype", "float32"])
    args.max_length = args.max_prompt_length = args.max_new_tokens = 16
    policy, reference = dpo_humanline.load_models(args, torch.device("cpu"))
    expected = load_file(tmp_path / "m" / "model.safetensors")
    assert {weight.dtype for weight in expected.values()} == {torch.bfloat16, torch.float32}
    for model in (policy, reference):
        for name, weight in model.named_parameters():
            assert torch.equal(weight.full_tensor(), expected[name].float()), name


def test_the_tensors_of_a_model_keep_their_dtypes(tmp_path, one_rank):
    """A router's bias in fp32 became bf16, and then chose other experts."""
    settings = dict(num_attention_heads=2, num_key_value_heads=2, q_lora_rank=None, kv_lora_rank=8)
    settings |= dict(qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=0)
    settings |= dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1)
    settings |= dict(vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**settings, num_hidden_layers=1)).bfloat16()
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    buffer = model.get_buffer(name)
    buffer.data = torch.linspace(1, 1.001, len(buffer))
    model.save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(tmp_path / "m")
    args = parse_args(dpo_humanline, ["--model", str(tmp_path / "m"), "--dtype", "bfloat16"])
    args.max_new_tokens = 64
    policy, reference = dpo_humanline.load_models(args, torch.device("cpu"))
    run.export(tmp_path / "final", policy, AutoTokenizer.from_pretrained(tmp_path / "m"), {2})
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("m", "final"))
    assert (after[name].dtype, after["lm_head.weight"].dtype) == (torch.float32, torch.bfloat16)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name].float(), before[name].float()) for name in before)


def test_policy_and_reference_have_equal_buffers(tmp_path, one_rank):
    """In bf16, Falcon-H1's factors had two dtypes, and policy and reference differed at step 0."""
    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8)
    sizes |= dict(
        num_attention_heads=4, num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_state=8
    )
    FalconH1ForCausalLM(FalconH1Config(**sizes, mamba_d_head=8)).bfloat16().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(tmp_path)
    args = parse_args(dpo_humanline, ["--model", str(tmp_path), "--dtype", "bfloat16"])
    args.max_new_tokens = 64
    policy, reference = dpo_humanline.load_models(args, torch.device("cpu"))
    buffers = dict(policy.named_buffers())
    assert any(buffer.dtype == torch.bfloat16 for buffer in buffers.values())
    for name, buffer in reference.named_buffers():
        assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name


def test_what_is_not_trained_is_said(tmp_path, capsys):
    """The vision tower of Qwen3.5 was gone in final/, without a word."""
    shutil.copytree(TOY / "policy", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["architectures"] = ["LlamaForConditionalGeneration"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    for model, said in (
        (tmp_path / "m", "only a LlamaForCausalLM is trained and written"),
        (TOY / "policy", ""),
    ):
        run.load_pretrained(dpo_humanline.Args(**SMALL), AutoModelForCausalLM, str(model), "auto")
        out = capsys.readouterr().out
        assert said in out and bool(said) == bool(out)


def test_a_model_with_too_few_positions_says_what_to_lower():
    config = SimpleNamespace(max_position_embeddings=100, name_or_path="m")
    config.get_text_config = lambda: config
    run.check_positions(dpo_humanline.Args(max_length=100), config)  # nothing is sampled
    with pytest.raises(InputError, match="m: 101 tokens, but only 100 positions: lower --max-length"):
        run.check_positions(dpo_humanline.Args(max_length=101), config)
    assert run.longest_sequence(dpo_humanline.Args(online=True)) == 625 + 2048
    assert run.longest_sequence(grpo_math_humanline.Args()) == 512 + 2048


def test_the_final_folder_is_the_trained_policy_in_the_dtype_of_its_files(tmp_path, tied_policy):
    flags = [*SHORT, "--model", tied_policy, "--eval-dataset", "", "--dtype", "float32", "--lr", "1e-2"]
    folder = run_here(dpo_humanline, *flags, "--output-dir", tmp_path / "run")
    before, after = (
        load_file(f"{tied_policy}/model.safetensors"),
        load_file(folder / "final/model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name, weight in after.items():
        assert weight.dtype == before[name].dtype and weight.shape == before[name].shape
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "for king"}], return_tensors="pt")
    assert (
        AutoModelForCausalLM.from_pretrained(folder / "final").generate(**ids, max_new_tokens=3).shape[1] > 3
    )


# === What a run prints and writes ===


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with an evaluation in between. Returns its folder and what it printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    reward = ["--reward-model", str(TOY / "reward_model")]
    flags = [*SHORT, *reward, "--k", "2", "--eval-every", "2", "--output-dir", str(folder)]
    return folder, run_ranks(2, [flags])


def test_a_run_begins_with_what_it_will_do(finished):
    folder, said = finished
    assert f"\nmodel: {TOY / 'policy'}, 112,320 parameters, float64\n" in said
    assert "\nhumanline: k 2, 1 syncs change the reference\n" in said
    assert "\ndata: 128 rows; 4 steps of 8: 0.2 epochs\n" in said and f"\nfiles: {folder}\n" in said
    assert "\nthe first prompt:\n<|user|> for " in said and re.search(r"completion:\n.* <\|end\|>\n", said)


@pytest.mark.parametrize(
    ("k", "online", "said"),
    [
        (2, False, "humanline: k 2, 1 syncs change the reference\n"),
        (2, True, "humanline: k 2, 1 syncs change the reference, besides one at the start of each round\n"),
        (0, None, "humanline: k 0, 0 syncs change the reference, besides one at the start of each round\n"),
        (2, None, "humanline: k 2, 1 syncs change the reference\n"),
    ],
)
def test_the_plan_counts_the_syncs_of_a_loop_and_names_those_of_rounds(k, online, said, capsys):
    """online: None for grpo_math, which has no such flag, and whose rounds sync with k = 0 alone."""
    args = SimpleNamespace(model="X", dtype="float32", humanline=True, k=k, num_steps=4)
    if online is not None:
        args.online = online
    model = SimpleNamespace(num_parameters=lambda: 7)
    tokenizer = SimpleNamespace(decode=str)
    run.print_plan(args, "folder", model, tokenizer, [(Example("", [1]),)], 1)
    assert said in capsys.readouterr().out


def test_an_evaluation_is_compared_with_the_first_one_row_by_row(finished):
    folder, said = finished
    summary = json.loads((folder / "summary.json").read_text())
    assert {name for name in metrics(folder)[2] if name.startswith("eval/")} == set(summary["after"])
    names = list(summary["after"])
    assert names.index("eval/reward") < names.index("eval/accuracy")  # what samples are, before pairs
    for name, (mean, error, count) in summary["change"].items():
        assert mean == pytest.approx(summary["after"][name][0] - summary["before"][name][0], abs=1e-12)
        (row,) = re.findall(rf"^{name} .*$", said, re.M)
        assert row.endswith(f"{mean:10.3f} ± {error:7.3f}   n = {count}")
    # The error of the mean change, not that of two independent means
    independent = math.hypot(summary["before"]["eval/loss"][1], summary["after"]["eval/loss"][1])
    assert 0 < summary["change"]["eval/loss"][1] <= independent + 1e-12
    assert said.index("\nafter: ") < said.index("mean ± standard error")  # samples first


def test_samples_of_every_evaluation_are_kept_and_truncated_ones_are_marked(finished):
    folder, said = finished
    samples = read_rows(folder / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 8 + [2] * 8 + [4] * 8
    assert [sample["greedy"] for sample in samples] == 3 * ([True] * 4 + [False] * 4)
    assert {*samples[0]} == {"step", "prompt", "sample", "greedy", "reward", "finished", "tokens"}
    assert [sample["prompt"] for sample in samples[:4]] == [row["prompt"] for row in read_rows(PAIRS)[:4]]
    assert all(sample["tokens"] == 4 and not sample["finished"] for sample in samples)  # a bouquet has 9
    assert said.count("  [truncated at --max-new-tokens]\n") == 8


@pytest.mark.parametrize(
    ("metric_lines", "shown"),
    [
        ([{"loss": 1.0, "logps/chosen": -3.0}], {"logps/chosen": -3.0}),
        ([{"rollout/reward_mean": 0.3}, {"loss": 1.0}], {"rollout/reward_mean": 0.3}),
    ],
)
def test_the_bar_shows_what_the_script_names(metric_lines, shown, tmp_path):
    args = SimpleNamespace(num_steps=9, track=False, eval_every=3, online=False)
    names = ["rollout/reward_mean", "logps/chosen"]
    log = run.Log(args, "x.py", tmp_path, 1, Evaluation({}, []), 90.0, names)
    for step, line in enumerate(metric_lines):
        log.write({"step": step, "perf/step_time": 30.0} | line)
    log.bar.close()
    assert log.shown == shown


@pytest.mark.parametrize(
    ("online", "words"),
    [
        (False, "time: 90 s an evaluation, 18.0 s a step, so about 7 min for the rest\n"),  # 3 and 7
        (True, "time: 90 s an evaluation, 18.0 s a step, so about 6 min for the rest without sampling\n"),
    ],
)
def test_the_first_step_without_sampling_estimates_the_rest_of_the_run(online, words, tmp_path, capsys):
    args = SimpleNamespace(num_steps=9, track=False, eval_every=3, online=online)
    (tmp_path / "summary.json").touch()  # tools.compare would read it before the resumed run has ended
    log = run.Log(args, "x.py", tmp_path, 1, Evaluation({}, []), 90.0, [])
    assert not (tmp_path / "summary.json").exists()
    for step in (1, 2, 3):
        sampled = {"perf/rollout_time": 5.0} if online and step == 1 else {}
        log.write({"step": step, "perf/step_time": 18.0} | sampled)
    log.bar.close()
    assert capsys.readouterr().out == words


def test_a_resumed_run_is_one_run_in_the_files_of_metrics_and_in_tensorboard(tmp_path):
    folder = tmp_path / "run"
    run_ranks(1, [[*SHORT, "--eval-every", "1", "--num-steps", "3", "--output-dir", str(folder)]])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 1, "sample": "def f(): return {}')  # a full disk leaves a part of a line
    (folder / "summary.json").unlink()  # as in the folder of a killed run
    flags = ["--resume", str(folder), "--num-steps", "3", "--checkpoint-every", "3"]
    run_ranks(1, [flags])  # it has no checkpoint, so it begins anew
    run_ranks(1, [["--resume", str(folder), "--num-steps", "5"]])
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2, 3, 4]
    steps = [sample["step"] for sample in read_rows(folder / "samples.jsonl")]
    assert steps == [number for number in range(6) for _ in range(8)]
    events = EventAccumulator(str(folder)).Reload()
    for key in ("loss", "grad_norm", "rewards/margins"):
        found = {event.step: event.value for event in events.Scalars(key)}
        assert found == {step["step"]: pytest.approx(step[key], rel=1e-6) for step in metrics(folder)}
    after = json.loads((folder / "summary.json").read_text())["after"]
    assert events.Scalars("eval/loss")[-1].value == np.float32(after["eval/loss"][0])


@pytest.mark.slow
def test_track_sends_the_metrics_of_tensorboard_to_weights_and_biases(tmp_path):
    pytest.importorskip("wandb")
    command = [sys.executable, ROOT / "dpo_humanline.py", *SHORT, "--track", "--output-dir", tmp_path / "run"]
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    options = dict(cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    resume = [*command[:2], "--resume", tmp_path / "run", "--num-steps", "5"]
    for words in (command, resume):
        done = subprocess.run([*map(str, words)], **options)
        assert done.returncode == 0, done.stderr[-2000:]
    files = [*(tmp_path / "wandb").glob("offline-run-*/*.wandb")]
    assert len({file.stem for file in files}) == 1 < len(files)  # a resumed run is one run
    content = min(files, key=lambda file: file.parent.name).read_bytes()
    assert b"rewards/margins" in content and b"log_epsilon_P" in content


def test_another_process_cannot_use_the_folder_of_a_run(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", read_rows(PAIRS)[:16])
    flags = [*SHORT, "--dataset", rows, "--eval-dataset", "", "--num-steps", "100000"]
    (first,) = start_ranks(1, [[*flags, "--output-dir", str(tmp_path / "run")]])
    while not (tmp_path / "run/metrics.jsonl").exists():
        assert first.is_alive()
    (second,) = start_ranks(1, [["--resume", str(tmp_path / "run")]])
    (output,) = finish([second])
    assert second.exitcode == 1 and "could not be acquired" in output and ".lock" in output
    first.kill()
    finish([first])
