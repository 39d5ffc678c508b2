"""Faults that were found once, and whose tests a later shortening had removed.

Each test here holds one of them. A test may go only together with the behaviour that it holds: two tests that
look alike hold different faults.
"""

import importlib
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import (
    PAIRS,
    ROOT,
    SCRIPTS,
    TOY,
    agree,
    finish,
    metrics,
    parse_args,
    run_here,
    run_ranks,
    start_ranks,
    write_rows,
)
from test_passes import PADDED, build, count_positions
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
)

import dpo_humanline
import grpo_humanline
import grpo_math_humanline
import kto_humanline
import utils
from support import grading, run, sampling
from utils import Example

SHORT = ["--dataset", PAIRS, "--eval-dataset", "", "--num-steps", "2", "--batch-size", "4"]
SHORT += ["--max-prompt-length", "32", "--max-length", "64", "--max-new-tokens", "8"]
SHORT += ["--warmup-fraction", "0", "--checkpoint-every", "0"]
EVALUATED = [*SHORT, "--eval-dataset", PAIRS, "--eval-samples", "2"]
ALL_SCRIPTS = [*SCRIPTS, "grpo_math_humanline"]


def contents(folder) -> dict:
    """Returns the bytes of all files of a folder but its lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture
def refused(capsys):
    """Runs a script that must end with one line and exit status 1, and returns that line."""

    def fails(*arguments, script=dpo_humanline) -> str:
        with pytest.raises(SystemExit) as stop:
            run_here(script, *arguments)
        assert stop.value.code == 1
        del stop  # its frames hold the lock of the folder
        said = capsys.readouterr().err
        assert said.count("error: ") == 1 and "Traceback" not in said
        return said.partition("error: ")[2].partition("\n")[0]

    return fails


# --- what is printed ---


def check_report(printed: str, folder):
    """Asserts that the report has the mean and the error of every metric of summary.json."""
    before, after, change = json.loads((folder / "summary.json").read_text()).values()
    assert len(after) > 4
    for name, (mean, error, count) in after.items():
        (row,) = re.findall(rf"^{name} .*$", printed, re.M)
        numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", row)]
        assert numbers == pytest.approx([*before[name][:2], mean, error, *change[name][:2]], abs=6e-4)
        assert row.endswith(f"n = {count}")


def test_a_terminal_without_the_letters_of_a_report_gets_its_numbers(tmp_path, monkeypatch):
    """The ± of the report ended a finished run with UnicodeEncodeError."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    run_here(dpo_humanline, *EVALUATED, "--output-dir", tmp_path / "run")
    terminal.flush()
    check_report(terminal.buffer.getvalue().decode("ascii"), tmp_path / "run")


def test_a_command_under_an_ascii_locale_ends_with_its_report(tmp_path):
    command = [sys.executable, ROOT / "dpo_humanline.py", *EVALUATED, "--output-dir", tmp_path / "run"]
    env = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    ended = subprocess.run(command, env=env, capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    check_report(ended.stdout.decode("ascii"), tmp_path / "run")
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_an_error_with_other_letters_is_one_line_on_such_a_terminal(tmp_path, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=sys.__stderr__.errors)
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(SystemExit) as stop:
        run_here(dpo_humanline, *SHORT, "--dataset", tmp_path / "für.jsonl", "--output-dir", tmp_path / "run")
    terminal.flush()
    assert stop.value.code == 1
    assert re.fullmatch(r"error: .*f\\xfcr.jsonl: .*\n", terminal.buffer.getvalue().decode("ascii"))


# --- flags ---


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_a_mistyped_flag_is_refused(name, capsys):
    """The first pass over the flags lets unknown ones through."""
    with pytest.raises(SystemExit) as stop:
        parse_args(importlib.import_module(name), ["--lerning-rate", "1"])
    assert stop.value.code and "--lerning-rate" in capsys.readouterr().err


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_help_shows_the_defaults_that_would_apply(name, capsys):
    script = importlib.import_module(name)
    for flags, lr in (([], script.TOY["lr"]), (["--model", "mine"], script.Args.lr)):
        with pytest.raises(SystemExit):
            parse_args(script, [*flags, "--help"])
        told = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
        assert f"(default: {lr})" in told.split("--lr FLOAT ")[1].split(" --")[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is bfloat16 on CUDA")
@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ([], "float64"),
        (["--model", "mine", "--dataset", PAIRS], "float32"),
        (["--model", "mine", "--dataset", PAIRS, "--dtype", "float64"], "float64"),
    ],
)
def test_on_the_cpu_the_toy_computes_in_float64_and_another_model_in_float32(flags, dtype):
    args = parse_args(dpo_humanline, flags)
    try:
        run.setup(args, args.batch_size)
    finally:
        dist.destroy_process_group()
    assert args.dtype == dtype


@pytest.mark.parametrize(("engine", "taken"), [("hf", "TransformersEngine"), ("auto", "VllmEngine")])
def test_an_engine_that_is_asked_for_is_taken_although_vllm_is_installed(engine, taken, monkeypatch):
    monkeypatch.setattr(sampling, "find_spec", lambda name: True)
    for name in ("TransformersEngine", "VllmEngine"):
        engine_class = type(name, (), {"name": name, "__init__": lambda self, *arguments: None})
        monkeypatch.setattr(sampling, name, engine_class)
    args = dpo_humanline.Args(engine=engine)
    sampler = sampling.Sampler(args, SimpleNamespace(chat_template=None), set(), torch.device("cpu"), 64)
    sampler.start_engine()
    assert sampler.engine.name == taken


def test_shards_that_divide_the_ranks_are_accepted(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for size in (0, 1, 2, 4):
        run.check_flags(dpo_humanline.Args(dataset="any", shard_size=size), 8)


# --- sequences ---


def test_a_log_prob_of_exactly_zero_stays_in_the_mask(one_rank):
    """A mask that was made of the values' signs lost such a token."""
    config = AutoConfig.from_pretrained(TOY / "policy", vocab_size=1, pad_token_id=None, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config)  # one word, so every word is certain
    examples = [Example("", [0, 0], [0, 0, 0]), Example("", [0], [0])]
    logps, mask = utils.completion_logps(model, examples, 0)
    assert not logps.any() and mask.sum(1).tolist() == [3, 1]
    means = utils.Means()
    means.add({"loss": logps + 1}, mask)
    means.add({"loss": logps}, mask)
    assert means.reduce() == {"loss": 0.5}


def test_a_pass_of_an_evaluation_is_as_wide_as_its_own_longest_sequence(one_rank):
    """Padded models paid in every pass for the longest of all."""
    model = build(*PADDED["attention of its own"])
    examples = [Example("", [1], [2] * length) for length in (39, 9, 9, 9)]
    positions = []
    count_positions(model, positions.append)
    with torch.no_grad():
        utils.completion_logps(model, examples, 40)
    assert sorted(positions) == [30, 40]


class FixedSampler:
    """Gives each prompt the same samples, of which the first is the best, in the place of a policy."""

    def __init__(self, lengths):
        self.lengths = lengths

    def sample(self, policy, prompts, count, seed):
        samples = []
        for number in range(count):
            ids = [10 + number] * self.lengths[number % 2] + [5]
            samples.append(Example("x", [1, 2], ids, float(-number), text="4", answer="4"))
        return [samples for _ in prompts], {}


@pytest.mark.parametrize("script", [dpo_humanline, kto_humanline, grpo_humanline], ids=lambda x: x.__name__)
def test_samples_are_cut_after_they_are_scored_and_get_no_end_of_turn(script):
    """A sequence that is too long kept all its tokens, or was given an end that the policy did not write."""
    args = script.Args(max_length=6, round_prompts=2, samples_per_prompt=4)
    prompts = [(Example("x", [1, 2]),)] * 2
    groups, _ = script.sample_round(args, FixedSampler((9, 1)), None, prompts, 1)
    assert [[x.completion_ids for x in group] for group in groups] == [[[10] * 4, [13, 5]]] * 2
    assert [[x.reward for x in group] for group in groups] == [[0, -3]] * 2


def test_samples_of_problems_are_cut_after_they_are_graded(one_rank, monkeypatch):
    monkeypatch.setattr(grading, "grade_all", lambda grader, grade, jobs: [True] * len(jobs))
    args = grpo_math_humanline.Args(max_length=6, prompts_per_step=1, group_size=2, num_steps=1)
    problem = (Example("x", [1, 2], answer="4"),)
    (group,), _ = grpo_math_humanline.sample_round(args, FixedSampler((9, 1)), None, None, [problem], 0)
    assert [x.completion_ids for x in group] == [[10] * 4, [11, 5]] and all(x.correct for x in group)


def test_mismatched_sequences_are_at_most_as_long_as_any_other():
    """A short prompt with another's completion was longer than --max-length."""
    pairs = []
    for prompt, length in ((1, 3), (2, 30)):
        pairs.append(tuple(Example("", [prompt] * length, [kind] * (33 - length)) for kind in (7, 8)))
    found = kto_humanline.mismatch(pairs, 33)
    assert [x.length for x in found] == [6, 6, 33, 33] and max(map(len, pairs)) == 2


# --- models ---


def test_a_classifier_is_no_policy_and_a_causal_model_judges_nothing(one_rank, tmp_path):
    """Their missing heads would have random weights."""
    with pytest.raises(utils.InputError, match="its files have no lm_head.weight"):
        run.load_pretrained(AutoModelForCausalLM, str(TOY / "reward_model"), "auto", False)
    shutil.copytree(TOY / "policy", tmp_path / "judge")
    config = json.loads((tmp_path / "judge" / "config.json").read_text())
    for labels in ({}, {"num_labels": 1}):
        (tmp_path / "judge" / "config.json").write_text(json.dumps(config | labels))
        with pytest.raises(utils.InputError, match="--reward-model .*: its files have no score.weight"):
            sampling.load_reward_model(dpo_humanline.Args(reward_model=str(tmp_path / "judge")))


def test_weights_that_the_model_does_not_have_are_named(one_rank, tmp_path):
    """Files with more layers than config.json says make another model."""
    shutil.copytree(TOY / "policy", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("transformers").addHandler(handler)
    try:
        run.load_pretrained(AutoModelForCausalLM, str(tmp_path / "model"), "auto", False)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert re.search(r"model\.layers\.1\.mlp\.up_proj\.weight .*UNEXPECTED", said.getvalue())


def test_a_padding_token_beyond_the_embedding_changes_nothing(tmp_path):
    shutil.copytree(TOY / "policy", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    tokenizer.save_pretrained(tmp_path / "model")
    rows = AutoConfig.from_pretrained(TOY / "policy").vocab_size
    assert tokenizer.pad_token_id >= rows
    flags = [*EVALUATED, "--dtype", "float64", "--num-steps", "1", "--reward-model", TOY / "reward_model"]
    for name, model in (("with", tmp_path / "model"), ("without", TOY / "policy")):
        run_here(dpo_humanline, *flags, "--model", model, "--output-dir", tmp_path / name)
    for file in ("final/model.safetensors", "summary.json"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()


def test_a_last_step_that_diverges_says_so_and_its_checkpoint_stays(refused, tmp_path):
    """A weight of 1e6 is infinite in float16, in which some models are stored."""
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy", dtype=torch.float16)
    shutil.copytree(TOY / "policy", tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    flags = [*SHORT, "--model", tmp_path / "model", "--dtype", "float32", "--num-steps", "1", "--lr", "1e6"]
    told = refused(*flags, "--checkpoint-every", "1", "--output-dir", tmp_path / "run")
    assert re.fullmatch(r"final/ was not written: \S+ is not finite in torch.float16", told)
    assert (tmp_path / "run" / "checkpoints" / "step-1" / ".metadata").exists()
    assert not (tmp_path / "run" / "final").exists()


def test_what_a_library_changes_in_the_process_is_as_before():
    """vLLM's engine is tested where it is installed; this holds everywhere."""
    os.environ["GUARD"] = "as before"
    torch.manual_seed(3)
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    with sampling.preserve_process_state(torch.device("cpu")):
        del os.environ["GUARD"]
        os.environ["GUARD_2"] = "new"
        torch.rand(9)
        torch.set_float32_matmul_precision("medium")
    assert os.environ.pop("GUARD") == "as before" and "GUARD_2" not in os.environ
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == precision


# --- updates ---


def test_without_bounds_and_syncs_a_run_is_the_one_without_humanline(tmp_path):
    runs = {
        "unbounded": ["--log-epsilon-P=-inf", "--log-epsilon-R=inf", "--k", "0"],
        "plain": ["--no-humanline"],
    }
    for name, flags in runs.items():
        run_here(dpo_humanline, *SHORT, "--num-steps", "3", *flags, "--output-dir", tmp_path / name)
    found, expected = (metrics(tmp_path / name, without_perf=True) for name in runs)
    outside = {"humanline/clipped_low": 0, "humanline/clipped_high": 0}  # no token is
    assert found == [step | outside for step in expected]
    assert expected[2]["humanline/log_ratio_abs_mean"] > 0


def test_the_optimizer_goes_on_over_rounds(tmp_path):
    """Its moments began anew with every round."""
    flags = ["--online", "--engine", "hf", "--round-prompts", "6", "--samples-per-prompt", "4"]
    flags += ["--num-steps", "3", "--checkpoint-every", "3", "--output-dir", tmp_path / "run"]
    run_here(dpo_humanline, *SHORT, *flags)
    assert max(step.get("rollout/round", 0) for step in metrics(tmp_path / "run")) > 1
    dcp_to_torch_save(tmp_path / "run" / "checkpoints" / "step-3", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=False)["optimizer"]["state"]
    assert {moments["step"].item() for moments in state.values()} == {3}


def test_three_ranks_agree_with_one_although_thirds_are_not_exact(tmp_path):
    """Gradients were means over ranks, times the number of ranks."""
    flags = [*SHORT, "--batch-size", "12", "--num-steps", "3", "--k", "1", "--micro-batch-tokens", "0"]
    for ranks in (1, 3):
        run_ranks(ranks, [[*flags, "--output-dir", f"{tmp_path}/{ranks}"]])
    agree(metrics(tmp_path / "1", True), metrics(tmp_path / "3", True), rel=1e-6)


# --- folders and processes ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a finished run with a checkpoint."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return run_here(dpo_humanline, *SHORT, "--checkpoint-every", "1", "--output-dir", folder)


BAD = [("--lr", "nan"), ("--batch-size", "0"), ("--dataset", ""), ("--dataset", "absent.jsonl")]


@pytest.mark.parametrize(("flag", "value"), BAD)
def test_a_resume_with_bad_settings_is_refused_and_changes_nothing(whole, refused, flag, value):
    before = contents(whole)
    assert (value if value == "absent.jsonl" else flag) in refused("--resume", whole, flag, value)
    assert contents(whole) == before


@pytest.mark.parametrize("text", ["[1]", "null", '{"step": 2, "pool": [[["x"]]]}'])
def test_a_checkpoint_whose_progress_is_of_another_shape_is_damaged(whole, tmp_path, capsys, text):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "checkpoints" / "step-2" / "progress.json").write_text(text)
    run_here(dpo_humanline, "--resume", folder)
    said = capsys.readouterr().out
    assert f"skipped {folder}/checkpoints/step-2 (damaged: " in said and "/step-1\n" in said
    assert metrics(folder, without_perf=True) == metrics(whole, without_perf=True)


@pytest.mark.parametrize("metrics_are_there", [True, False])
def test_a_resume_with_damaged_checkpoints_alone_does_not_start_at_step_0(
    whole, tmp_path, refused, metrics_are_there
):
    """Without metrics.jsonl, step 0 would have been repeated over what the folder still has."""
    folder = shutil.copytree(whole, tmp_path / "run")
    for progress in folder.glob("checkpoints/*/progress.json"):
        progress.write_text("[1]")
    if not metrics_are_there:
        (folder / "metrics.jsonl").unlink()
    before = contents(folder)
    assert "it has no complete checkpoint" in refused("--resume", folder)
    assert contents(folder) == before


def test_a_rank_that_waits_for_the_message_of_rank_0_can_be_ended(tmp_path):
    """Otherwise it outlived its launcher by half a minute."""
    row = {"prompt": "for king", "chosen": "rose"}
    data = write_rows(tmp_path / "bad.jsonl", [row])
    first, second = start_ranks(2, [[*SHORT, "--dataset", data, "--output-dir", str(tmp_path / "run")]])
    first.join(60)
    assert first.exitcode == 1 and second.is_alive()
    os.kill(second.pid, signal.SIGTERM)  # as torchrun does
    started = time.monotonic()
    second.join(20)
    took = time.monotonic() - started
    said, silent = finish([first, second])
    assert second.exitcode == -signal.SIGTERM and took < 5
    assert "error: " in said and "error: " not in silent


def test_bad_data_end_the_math_command_with_one_line_and_at_once(tmp_path):
    """Its grading workers have started by then."""
    (tmp_path / "bad.jsonl").write_text('{"problem"\n')
    command = [sys.executable, ROOT / "grpo_math_humanline.py", "--dataset", tmp_path / "bad.jsonl"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.startswith(f"error: {tmp_path}/bad.jsonl, line 1: ")
    assert ended.stderr.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


# --- lost once with their guards, and brought back ---

MORE = ["--num-steps", "9"]


def test_ctrl_c_while_a_checkpoint_is_read_is_no_damage(whole, tmp_path, monkeypatch):
    """The run went on from an older checkpoint, as if the newest were broken."""
    folder = shutil.copytree(whole, tmp_path / "run")
    read_data = dcp.FileSystemReader.read_data

    def interrupted(self, *arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return read_data(self, *arguments)

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", interrupted)
    before = contents(folder)
    with pytest.raises(KeyboardInterrupt):
        run_here(dpo_humanline, "--resume", folder, "--num-steps", "3")
    assert contents(folder) == before


@pytest.mark.parametrize("part", ["metrics.jsonl", "checkpoints", "final", "summary.json"])
def test_a_folder_with_any_part_of_a_run_is_not_begun_anew(whole, refused, tmp_path, part):
    """Without args.json a run with other flags went on from the checkpoints, or wrote over the rest."""
    folder = tmp_path / "run"
    folder.mkdir()
    if (whole / part).is_dir():
        shutil.copytree(whole / part, folder / part)
    else:
        shutil.copy(whole / part, folder)
    before = contents(folder)
    assert f"--output-dir {folder} holds a run" in refused(*SHORT, "--lr", "1e-5", "--output-dir", folder)
    assert contents(folder) == before


@pytest.mark.parametrize("damage", ["gone", "without its last line break"])
def test_metrics_have_whole_lines_after_a_resume_whatever_was_left(whole, tmp_path, damage):
    folder = shutil.copytree(whole, tmp_path / "run")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").unlink()
    if damage != "gone":
        (folder / "metrics.jsonl").write_text(text.removesuffix("\n"))
    run_here(dpo_humanline, "--resume", folder, "--num-steps", "3")
    assert [step["step"] for step in metrics(folder)] == ([2] if damage == "gone" else [0, 1, 2])


@pytest.mark.parametrize("name", ["step-old9", "step-2 copy 2"])
def test_a_folder_beside_the_checkpoints_is_none(whole, tmp_path, name):
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "checkpoints" / name).mkdir()
    run_here(dpo_humanline, "--resume", folder, "--num-steps", "3")
    assert len(metrics(folder)) == 3


@pytest.mark.parametrize("keeps", ["m.content[:-3]", "m.content | upper", "m.content.split('</think>')[-1]"])
def test_a_reward_model_whose_template_changes_an_unfinished_sample_still_scores_it(one_rank, keeps):
    """Templates of thinking models drop the thought, and the run ended in mid-training."""
    args = dpo_humanline.Args(reward_model=str(TOY / "reward_model"))
    model, tokenizer = sampling.load_reward_model(args)
    tokenizer.chat_template = "{% for m in messages %}{{ " + keeps + " + ' ' + '<|end|>' }}{% endfor %}"
    sample = Example("for king", [], text="rose </think> iris lily", finished=False)
    tokenizer.unk_token = None  # upper case is unknown
    assert sampling.reward_scores(model, tokenizer, torch.device("cpu"), "\n", [sample]).isfinite().all()


@pytest.mark.parametrize(
    ("sizes", "said"), [({"n_positions": 4}, "4 positions"), ({"vocab_size": 8}, "index out of range")]
)
def test_a_sample_that_a_reward_model_cannot_read_is_told(one_rank, sizes, said):
    """It ended with an IndexError after the first round was sampled."""
    config = dict(vocab_size=101, n_positions=64, n_embd=8, n_layer=1, n_head=1, num_labels=1, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(GPT2Config(**config | sizes)).eval()
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    sample = Example("for king", [], text="rose iris lily", finished=True)
    with pytest.raises(utils.InputError, match=said):
        sampling.reward_scores(model, tokenizer, torch.device("cpu"), "\n", [sample])


def test_a_padding_token_beyond_a_reward_models_embedding_changes_nothing(one_rank):
    args = dpo_humanline.Args(reward_model=str(TOY / "reward_model"))
    model, tokenizer = sampling.load_reward_model(args)
    samples = [Example("for king", [], text=text) for text in ("rose", "rose iris lily")]
    expected = sampling.reward_scores(model, tokenizer, torch.device("cpu"), "", samples)
    model.config.pad_token_id = 999
    found = sampling.reward_scores(model, tokenizer, torch.device("cpu"), "", samples)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("script", [dpo_humanline, kto_humanline, grpo_humanline], ids=lambda x: x.__name__)
def test_one_sample_a_prompt_makes_no_pair_and_is_refused(script):
    args = script.Args(dataset="any", samples_per_prompt=1)
    with pytest.raises(utils.InputError, match="--samples-per-prompt 1 is out of range"):
        run.check_flags(args, 4)
