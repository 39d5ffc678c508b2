"""Bad input ends a run with one line that names file, row or flag, with exit code 1, and nothing is lost.

For every script, but where one is named. Most runs get a model without weights: a message about anything else
came before a model was read. Why single rows are left out is in test_data.py.
"""

import importlib
import json
import re
import shutil
from dataclasses import fields, replace

import pytest
from helpers import SCRIPTS, TOY, run_here, write_rows
from helpers import refused as in_a_process
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import utils
from support import run

PEOPLE = "king queen duke boy prince cook baker smith girl clerk pupil twin".split()
ROWS = [{"prompt": f"for {who}", "chosen": "rose iris", "rejected": "holly"} for who in PEOPLE]


@pytest.fixture(scope="module", params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


def contents(folder) -> dict:
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {path: content for path, content in files.items() if (path.name, content) != (".lock", b"")}


def copy_policy(folder, *without):
    shutil.copytree(TOY / "policy", folder, ignore=shutil.ignore_patterns(*without))
    return folder


def spoil(folder, parameter, row=slice(None)):
    """The toy policy with NaN in (one row of) a parameter."""
    copy_policy(folder)
    weights = load_file(folder / "model.safetensors")
    weights[parameter][row] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def one_process_without_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A data set of four pairs; beside it the toy policy without its weights."""
    folder = tmp_path_factory.mktemp("good")
    copy_policy(folder / "weightless", "model.safetensors")
    write_rows(folder / "good.jsonl", ROWS[:4])
    return folder / "good.jsonl"


@pytest.fixture
def message(capsys, script):
    """Runs the script with exactly these arguments; it must fail, and this is the one line that it says."""

    def fails(*arguments) -> str:
        with pytest.raises(SystemExit) as stop:
            run_here(script, *arguments)
        assert stop.value.code == 1
        del stop  # its frames hold the lock of the folder, as the process would
        said = capsys.readouterr().err
        assert said.count("error: ") == 1, said
        text, _, behind = said.partition("error: ")[2].partition("\n")
        assert re.fullmatch(r"(.*\d+%.*\n?)?", behind)  # at most the progress bar, once more
        return text

    return fails


@pytest.fixture
def refused(message, good, tmp_path):
    """Like `message`, for a run that is fine but for `arguments`, and that must write nothing."""

    def fails(*arguments) -> str:
        fine = {"--model": good.parent / "weightless", "--dataset": good, "--output-dir": tmp_path / "run"}
        fine |= {"--batch-size": 4, "--max-new-tokens": 4, "--eval-samples": 0}
        before = contents(tmp_path)
        text = message(*(part for flag in fine.items() for part in flag), *arguments)
        assert contents(tmp_path) == before
        return text

    return fails


# --- data ---


@pytest.mark.parametrize("value", [None, (1, -2), ["a"], [], {}, 3, 0.5, True], ids=repr)
def test_a_flag_of_ones_own_may_have_any_type(script, value):
    """A range was expected of all flags but texts."""
    args = script.Args(model="m", dataset="d")
    args.own = value
    run.check_flags(args, 8)


# --- flags ---


POSITIVE = "batch_size eval_samples_per_problem generation_batch_size group_size max_grad_norm max_length"
POSITIVE += " max_new_tokens prompts_per_step round_prompts sample_every samples_per_prompt temperature top_p"
POSITIVE += " vllm_tensor_parallel"
AT_MOST_1 = ["top_p", "warmup_fraction", "vllm_memory"]


@pytest.mark.parametrize("script", [*SCRIPTS, "grpo_math_humanline"], indirect=True)
def test_every_number_has_a_range(script):
    args = script.Args(model="any", dataset="any")
    for field in fields(args):
        wrong = [0, 1, float("nan")] if field.name == "log_epsilon_P" else [-1, float("nan")]
        wrong += [0] * (field.name in POSITIVE.split()) + [1.5] * (field.name in AT_MOST_1)
        wrong += [1] * (field.name == "group_size")
        for value in wrong * (field.type in (int, float)):
            flag = field.name.replace("_", "-")
            with pytest.raises(utils.InputError, match=f"^--{flag} {value} is out of range$"):
                run.check_flags(replace(args, **{field.name: value}), 4)


def test_flags_that_cannot_be_are_named(refused, message, script, good, monkeypatch):
    assert refused("--k", -1) == "--k -1 is out of range"
    assert refused("--online") == "--online needs a --reward-model"
    assert message("--model", good.parent) == f"--model {good.parent} needs a --dataset"
    monkeypatch.setenv("WORLD_SIZE", "4")
    for batch in (10, 2):
        told = refused("--batch-size", batch)
        assert told == f"the number of ranks, 4, does not divide the batch of {batch}"
    for flag in ("--shard-size", "--vllm-tensor-parallel"):
        for size in (3, 8):
            told = refused("--batch-size", 8, flag, size)
            assert told == f"{flag} {size} does not divide the number of ranks, 4"


# --- model, tokenizer ---


BROKEN = [("config.json", None), ("config.json", "{"), ("config.json", '{"model_type": "none-such"}')]
BROKEN += [("tokenizer*", None), ("model.safetensors", None), ("model.safetensors", "damaged")]


@pytest.mark.parametrize(("without", "written"), BROKEN)
def test_a_broken_model_is_named(refused, tmp_path, without, written):
    model = copy_policy(tmp_path / "model", without)
    if written:
        (model / without).write_text(written)
    assert refused("--model", model).startswith(f"--model {model}: ")


@pytest.mark.parametrize("flag", ["--model", "--reward-model"])
def test_an_absent_model_names_its_flag(refused, tmp_path, flag):
    for path in (tmp_path / "absent", "absent", tmp_path):
        assert f"{flag} {path}: " in refused("--model", TOY / "policy", flag, path)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("llama", {"num_labels": 3}, "it has 3 outputs"),
        ("gpt2", {"num_labels": 1, "n_positions": 20}, "21 tokens, but the model has 20 positions"),
    ],
)
def test_a_reward_model_that_cannot_judge_is_named(refused, good, tmp_path, kind, settings, said):
    judge = tmp_path / "judge"
    config = AutoConfig.for_model(kind, vocab_size=101, hidden_size=8, num_attention_heads=2, **settings)
    config.num_hidden_layers = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    AutoTokenizer.from_pretrained(TOY / "reward_model").save_pretrained(judge)
    # Samples of 16 tokens stand behind prompts of 5.
    flags = ["--max-new-tokens", 16, "--eval-dataset", good, "--eval-samples", 2]
    told = refused("--model", TOY / "policy", "--reward-model", judge, *flags)
    assert f"{judge}: {said}" in told


# --- output folder, resume ---


def test_resume_where_there_is_no_run_is_refused_and_leaves_no_trace(message, tmp_path, good):
    for folder in (tmp_path / "absent", good):
        assert message("--resume", folder).startswith(f"--resume {folder}: ")
    for text in (None, "", "{", "[]", "null", '{"no_such_flag": 1}'):
        if text is not None:
            (tmp_path / "args.json").write_text(text)
        before = contents(tmp_path)
        assert message("--resume", tmp_path).startswith(f"--resume {tmp_path}: ")
        assert contents(tmp_path) == before


def test_an_output_folder_that_cannot_be_is_named(refused, good):
    for path in (good, good / "run", "/dev/null/run", "/proc/run", good.with_name("x" * 300)):
        told = refused("--model", TOY / "policy", "--output-dir", path)
        assert str(path) in told and re.search("exists|Not a dir|No such file|too long", told)


# --- numbers that are not finite ---


def test_a_loss_that_is_not_finite_names_the_step_and_the_last_checkpoint_resumes(script, tmp_path):
    nettle = AutoTokenizer.from_pretrained(TOY / "policy").convert_tokens_to_ids("nettle")
    model, folder = spoil(tmp_path / "model", "model.embed_tokens.weight", nettle), tmp_path / "run"
    rows = [row | {"chosen": "nettle rose"} if row is ROWS[8] else row for row in ROWS]
    arguments = ["--model", model, "--dataset", write_rows(tmp_path / "data.jsonl", rows), "--seed", 2]
    arguments += ["--batch-size", 4, "--num-steps", 6, "--max-new-tokens", 4]
    arguments += ["--checkpoint-every", 1, "--output-dir", folder]
    told = in_a_process([str(argument) for argument in arguments], script=script.__name__)
    step = int(re.match(r"error: step (\d+): loss nan", told)[1])
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert step > 0 and [json.loads(line)["step"] for line in metrics.splitlines()] == list(range(step))
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {f"step-{n}" for n in (step - 1, step) if n} and not (folder / "final").exists()
    checkpoints = contents(folder / "checkpoints")
    told = in_a_process(["--resume", str(folder)], script=script.__name__)
    assert told.startswith(f"error: step {step}: loss nan")
    assert contents(folder / "checkpoints") == checkpoints
    assert (folder / "metrics.jsonl").read_bytes() == metrics  # the same timings: no step was done again


@pytest.mark.parametrize("samples", [0, 4])
def test_a_model_that_gives_nan_is_refused_before_it_trains(message, good, tmp_path, samples):
    model = spoil(tmp_path / "model", "lm_head.weight")
    arguments = ["--model", model, "--dataset", good, "--eval-dataset", good, "--eval-samples", samples]
    arguments += ["--batch-size", 4, "--max-new-tokens", 4, "--output-dir", tmp_path / "run"]
    told = message(*arguments)
    assert "not finite" in told and told.startswith("sampling: " if samples else "eval/")
