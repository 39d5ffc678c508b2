"""Bad input ends the run with one paragraph that names the flag or the file, says what to do, and leaves no trace.

The tests are for every script, but for those marked otherwise, and differ in the words and numbers given first.
Most runs get a model folder without weights: a message about anything else came before a model was loaded.
"""

import gzip
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import datasets
import pytest
import torch.distributed as dist
import tyro
from conftest import ROOT, SCRIPTS, TOY
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer


class Words(NamedTuple):
    """What a script calls things."""

    pair: int  # how much a pair adds to --batch-size
    four_pairs: str
    left: str  # one of what it trains on
    filtered: str  # what --min-avg-logp drops


WORDS = {
    "dpo_humanline": Words(1, "4 pairs", "pair", "pairs"),
    "kto_humanline": Words(2, "8 examples", "example", "rows"),
    "grpo_humanline": Words(2, "4 groups of 2", "group", "groups"),
}
RANGES = {  # flags with values out of range
    "--k": (0, -1),
    "--log-epsilon-P": (0, 1.5, "nan"),
    "--log-epsilon-R": (0, -1.5, "nan"),
    "--lr": (0, -1e-3, "nan", "inf"),
    "--warmup-fraction": (-0.1, 1.1, "nan"),
    "--batch-size": (0, -2),
    "--micro-batch-size": (0, -1),
    "--num-steps": (0,),
    "--max-length": (0,),
    "--max-prompt-length": (0,),
    "--max-grad-norm": (0, "nan"),
    "--adam-eps": (0,),
    "--weight-decay": (-1, "nan"),
    "--checkpoint-every": (-1,),
    "--seed": (-1,),
    "--temperature": (-1, "nan"),
    "--top-p": (0, 1.1, "nan"),
}
OWN_RANGES = {
    "dpo_humanline": {"--beta": (0, -0.1, "nan", "inf")},
    "kto_humanline": {"--beta": (0, -0.1, "nan", "inf"), "--lambda-D": (0, "nan"), "--lambda-U": (0, -1, "inf")},
    "grpo_humanline": {"--beta": (-0.1, "nan", "inf"), "--epsilon": (0, "nan", "inf"), "--group-size": (0, 1)},
}
ROWS = [
    {"prompt": f"for {who}", "chosen": "rose iris", "rejected": "holly"} for who in ("king", "queen", "duke", "boy")
]
USER = {"role": "user", "content": "for king"}
ROSE, IRIS = ({"role": "assistant", "content": flower} for flower in ("rose", "iris"))

dpo_alone = pytest.mark.parametrize("script", ["dpo_humanline"], indirect=True)
kto_alone = pytest.mark.parametrize("script", ["kto_humanline"], indirect=True)


@pytest.fixture(scope="module", params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture(scope="module")
def words(script) -> Words:
    return WORDS[script.__name__]


def main(script, *arguments) -> None:
    """The script in this process; its process group is gone afterwards."""
    try:
        script.main(tyro.cli(script.Args, args=[str(argument) for argument in arguments]))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def contents(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copy_policy(folder, *without):
    shutil.copytree(TOY / "policy", folder, ignore=shutil.ignore_patterns(*without))
    return folder


@pytest.fixture(autouse=True)
def one_process_without_network(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)  # a local file too is reported to the Hub
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def weightless(tmp_path_factory):
    """The toy policy without its weights: tokenizer and data load, the model does not."""
    return copy_policy(tmp_path_factory.mktemp("models") / "weightless", "model.safetensors")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "good.jsonl"
    path.write_text(lines(*ROWS))
    return path


@pytest.fixture
def dataset(tmp_path):
    """Writes a data set, compressed if its name ends with .gz."""

    def write(content: str | bytes, name: str = "data.jsonl"):
        content = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return tmp_path / name

    return write


@pytest.fixture
def message(capsys, script):
    """Runs the script with exactly these arguments; it must fail, and this is what it says, in one paragraph."""

    def run(*arguments) -> str:
        with pytest.raises(SystemExit) as stop:
            main(script, *arguments)
        assert stop.value.code == 1
        text = capsys.readouterr().err.partition("error: ")[2]
        assert text.strip() and "\n\n" not in text.strip()
        return text

    return run


@pytest.fixture
def refused(message, words, weightless, good, tmp_path):
    """Like `message`, for a run that is fine but for `arguments`, and that must write nothing."""

    def run(*arguments) -> str:
        fine = {"--model": weightless, "--dataset": good, "--output-dir": tmp_path / "run"}
        fine |= {"--batch-size": 2 * words.pair, "--num-steps": 2, "--eval-samples": 0}
        before = contents(tmp_path)
        text = message(*(part for pair in fine.items() for part in pair), *arguments)
        assert contents(tmp_path) == before
        return text

    return run


# --- data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--dataset", "--eval-dataset"])
def test_missing_file_is_named(refused, tmp_path, flag):
    assert f"{flag} {tmp_path}/absent.jsonl: no such file" in refused(flag, tmp_path / "absent.jsonl")


def test_folder_or_text_file_in_place_of_data_is_refused(refused, dataset, tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    for path in (tmp_path, tmp_path / "folder.jsonl", dataset("hello\n", "notes.txt")):
        assert f"--dataset {path} is not a .json, .jsonl or .parquet file" in refused("--dataset", path)


@pytest.mark.parametrize(
    "name, content",
    [("e.json", ""), ("e.jsonl", ""), ("e.jsonl.gz", ""), ("e.parquet", ""), ("e.jsonl", "\n\n"), ("e.json", "[]")],
)
def test_empty_file_is_called_empty(refused, dataset, name, content):
    path = dataset(content, name)
    assert re.search(rf"--dataset {path} (is empty|has no rows)", refused("--dataset", path))


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.json", "b.json.gz"])
def test_broken_json_names_file_and_line(refused, dataset, name):
    path = dataset(lines(*ROWS) + '{"prompt": "for king", chosen}\n' + lines(*ROWS), name)
    assert f"--dataset {path}, line 5 is not JSON" in refused("--dataset", path)


def test_broken_json_array_names_file_and_line(refused, dataset):
    path = dataset("[\n" + ",\n".join(lines(row).strip() for row in ROWS) + ',\n{"prompt" "for king"}\n]\n', "b.json")
    assert f"--dataset {path}, line 6 is not JSON" in refused("--dataset", path)


@pytest.mark.parametrize("line", ["[1, 2]", '"text"', "5", "null"])
def test_line_that_is_not_an_object_is_named(refused, dataset, line):
    path = dataset(lines(*ROWS) + line + "\n")
    assert re.search(rf"--dataset {path}(,|:) (line|row) 5", refused("--dataset", path))


@pytest.mark.parametrize(
    "name, damage",
    [
        ("d.jsonl.gz", lambda packed: b"plain text"),
        ("d.jsonl.gz", lambda packed: packed[:-12]),
        ("d.parquet", lambda packed: b"plain text"),
    ],
)
def test_damaged_file_is_named_and_not_called_bad_json(refused, tmp_path, name, damage):
    (tmp_path / name).write_bytes(damage(gzip.compress(lines(*ROWS).encode() * 99)))
    text = refused("--dataset", tmp_path / name)
    assert f"--dataset {tmp_path / name}" in text and "not JSON" not in text


@pytest.mark.parametrize(
    "row, missing",
    [
        ({"prompt": "for king", "chosen": "rose"}, "rejected"),
        ({"chosen": "rose", "rejected": "iris"}, "prompt"),
        ({"chosen": [ROSE], "rejected": [IRIS]}, "prompt"),
        ({"prompt": "for king", "completion": "rose"}, "chosen"),
        ({"question": "for king", "answer": "rose"}, "prompt"),
    ],
)
def test_missing_column_is_named_with_the_columns_there_are(refused, dataset, row, missing):
    text = refused("--dataset", dataset(lines(row, row)))
    assert f"row 1 has no {missing!r}; the columns are {', '.join(row)}" in text


def test_column_missing_from_one_row_names_the_row(refused, dataset):
    row = {"prompt": "for girl", "chosen": "rose"}
    assert "row 5 has no 'rejected'" in refused("--dataset", dataset(lines(*ROWS, row)))


@pytest.mark.parametrize(
    "change",
    [
        {"chosen": 5},
        {"rejected": True},
        {"prompt": 1.5},
        {"prompt": {"text": "for king"}},
        {"chosen": [{"role": "assistant", "content": [{"type": "text", "text": "rose"}]}]},
        {"prompt": [{"role": "user", "content": None}]},
        {"chosen": [{"role": "assistant", "content": 5}]},
        {"prompt": ["for king"]},
        {"chosen": ["rose"], "rejected": ["iris"]},
        {"prompt": [{"role": None, "content": "for king"}]},
        {"prompt": [{"content": "for king"}]},
        {"chosen": [{"content": "rose"}], "rejected": [{"content": "iris"}]},
    ],
    ids=json.dumps,
)
def test_content_or_role_that_is_not_a_string_names_the_line(refused, dataset, change):
    path = dataset(lines(ROWS[0] | change))
    assert f"--dataset {path}, line 1: " in refused("--dataset", path)


def test_one_number_among_strings_names_its_line(refused, dataset):
    path = dataset(lines(*ROWS, ROWS[0] | {"chosen": 5}))
    assert f"--dataset {path}, line 5: content must be a string, not int" in refused("--dataset", path)


@dpo_alone  # KTO's are in test_kto.py
@pytest.mark.parametrize("label", ["false", None, 0.5])
def test_label_that_is_not_a_truth_value_is_refused(refused, dataset, label):
    rows = [{"prompt": "for king", "completion": c, "label": ok} for c, ok in (("rose", label), ("iris", label))]
    assert "label must be" in refused("--dataset", dataset(lines(*rows)), "--batch-size", 1)


def test_no_row_left_says_how_many_were_dropped_and_why(refused, words, dataset):
    rows = [ROWS[0] | {"rejected": "rose iris"}, ROWS[0] | {"chosen": " "}, ROWS[0] | {"rejected": ""}]
    text = refused("--dataset", dataset(lines(*rows)))
    assert f"no {words.left} is left" in text and "3 dropped" in text
    assert re.search("equal.*': 1", text) and "'empty completion': 2" in text


@dpo_alone
def test_no_unpaired_row_with_a_partner_says_how_many_had_none(refused, dataset):
    rows = [{"prompt": f"for {who}", "completion": "rose", "label": True} for who in ("king", "queen", "duke")]
    text = refused("--dataset", dataset(lines(*rows)))
    assert "no pair is left" in text and "3 dropped" in text


def test_conversation_without_a_chat_template_names_the_flag(refused, dataset, tmp_path):
    model = copy_policy(tmp_path / "plain", "chat_template.jinja", "model.safetensors")
    row = {"prompt": [USER], "chosen": [ROSE], "rejected": [IRIS]}
    assert "--chat-template" in refused("--model", model, "--dataset", dataset(lines(row)))


def test_empty_prompt_with_nothing_before_the_completion_is_not_trained_on(refused, words, dataset, tmp_path):
    model = copy_policy(tmp_path / "plain", "chat_template.jinja", "model.safetensors")
    path = dataset(lines(ROWS[0] | {"prompt": ""}))
    assert f"no {words.left} is left to train on; 1 dropped" in refused("--model", model, "--dataset", path)


def test_data_set_smaller_than_a_batch_says_both_numbers(refused, words):
    text = refused("--batch-size", 8 * words.pair)
    assert words.four_pairs in text and f"--batch-size {8 * words.pair}" in text


@kto_alone
def test_batch_with_half_a_pair_is_refused(refused):
    assert refused("--batch-size", 5).startswith("--batch-size 5 is odd")


def test_lengths_too_small_for_anything_say_what_was_dropped(refused, words):
    text = refused("--max-prompt-length", 1, "--max-length", 2)
    assert f"no {words.left} is left" in text and "'prompt longer than --max-prompt-length 1': 4" in text


# --- flags ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag, values", RANGES.items())
def test_value_out_of_range_names_flag_value_and_range(refused, flag, values):
    for value in values:
        assert re.search(rf"^{flag} is {value}.*; it must be ", refused(f"{flag}={value}"))


def test_value_out_of_range_of_a_flag_of_the_script_alone_is_named_too(refused, script):
    for flag, values in OWN_RANGES[script.__name__].items():
        test_value_out_of_range_names_flag_value_and_range(refused, flag, values)


def test_k_below_one_names_the_flag(refused):
    assert refused("--k", 0) == "--k is 0; it must be at least 1\n"


def test_sampling_bound_below_the_ratio_bound_is_refused(refused):
    assert "--M-R" in refused("--clip", "sample", "--M-R", 0.1)


@pytest.mark.parametrize("bound", ["--log-epsilon-P=-inf", "--log-epsilon-R=inf"])
def test_infinite_bound_with_sampling_is_refused(refused, bound):
    assert "--clip sample" in refused("--clip", "sample", bound)


@pytest.mark.parametrize("longest", [624, 625])
def test_max_length_not_above_max_prompt_length_names_both(refused, longest):
    text = refused("--max-length", longest)
    assert f"--max-length {longest}" in text and "--max-prompt-length 625" in text


@pytest.mark.parametrize(
    "world, batch, micro, working", [(1, 6, 4, [1, 2, 3, 6]), (2, 12, 5, [1, 2, 3, 6]), (4, 8, 3, [1, 2])]
)
def test_batch_that_ranks_and_microbatches_do_not_divide_lists_what_works(
    refused, script, monkeypatch, world, batch, micro, working
):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    text = refused("--batch-size", batch, "--micro-batch-size", micro)
    assert f"{world} ranks" in text and f"these --micro-batch-size work: {working}" in text
    for value in working:
        script.validate(script.Args(batch_size=batch, micro_batch_size=value), world)
    multiple = int(re.search(r"a multiple of (\d+) as --batch-size", text)[1])
    script.validate(script.Args(batch_size=multiple, micro_batch_size=micro), world)


def test_batch_smaller_than_the_ranks_says_that_no_microbatch_works(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    text = refused("--batch-size", 2)
    assert "these --micro-batch-size work: none" in text and "a multiple of 4" in text


def test_mistyped_flag_is_refused(script, capsys):
    with pytest.raises(SystemExit) as stop:
        main(script, "--lerning-rate", 1)
    assert stop.value.code != 0 and "--lerning-rate" in capsys.readouterr().err


# --- model, tokenizer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--model", "--reward-model"])
def test_unknown_model_path_names_the_flag(refused, tmp_path, flag):
    for path in (tmp_path / "absent", "absent", tmp_path):
        assert f"{flag} {path}: neither a model folder (with a config.json)" in refused(flag, path)


def test_model_folder_without_config_is_refused(refused, tmp_path):
    model = copy_policy(tmp_path / "model", "config.json")
    assert f"--model {model}: neither a model folder (with a config.json)" in refused("--model", model)


@pytest.mark.parametrize("config", ["{", "{}", '{"model_type": "no-such-model"}'])
def test_model_with_a_broken_config_is_named(refused, tmp_path, config):
    model = copy_policy(tmp_path / "model")
    (model / "config.json").write_text(config)
    assert f"--model {model} cannot be loaded: " in refused("--model", model)


@pytest.mark.parametrize("without", ["tokenizer*", "model.safetensors"])
def test_model_without_tokenizer_or_weights_is_named(refused, tmp_path, without):
    model = copy_policy(tmp_path / "model", without)
    assert f"--model {model}" in refused("--model", model)


def test_model_with_damaged_weights_is_named(refused, tmp_path):
    model = copy_policy(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"damaged")
    assert f"--model {model}" in refused("--model", model)


@pytest.mark.parametrize("flag", ["--pad-token", "--eos-token"])
def test_token_outside_the_vocabulary_names_the_flag(refused, flag):
    assert f"{flag} '<|absent|>' is not in the vocabulary" in refused(flag, "<|absent|>")


def test_tokenizer_without_end_of_turn_names_the_flag(refused, tmp_path):
    model = copy_policy(tmp_path / "model", "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    assert "--eos-token" in refused("--model", model)


def test_missing_chat_template_file_is_named(refused, tmp_path):
    assert f"--chat-template {tmp_path}/t.jinja: no such file" in refused("--chat-template", tmp_path / "t.jinja")


@pytest.mark.parametrize("template", ["{% for m in %}", "{{ raise_exception('no') }}", "{{ 1 + 'a' }}"])
def test_chat_template_that_cannot_render_is_blamed(refused, tmp_path, template):
    (tmp_path / "t.jinja").write_text(template)
    text = refused("--chat-template", tmp_path / "t.jinja")
    assert "chat template" in text or "--chat-template" in text


def test_reward_model_with_several_outputs_is_refused(refused, good, tmp_path):
    config = AutoConfig.from_pretrained(TOY / "reward_model")
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "judge")
    shutil.copytree(
        TOY / "policy", tmp_path / "judge", dirs_exist_ok=True, ignore=lambda *_: ["config.json", "model.safetensors"]
    )
    evaluated = ("--eval-dataset", good, "--eval-samples", 2)
    text = refused("--model", TOY / "policy", *evaluated, "--reward-model", tmp_path / "judge")
    assert f"--reward-model {tmp_path / 'judge'}" in text and "3 outputs" in text


def test_min_avg_logp_that_leaves_too_little_says_how_many(refused, words):
    assert f"--min-avg-logp 0.0 leaves 0 {words.filtered}" in refused("--model", TOY / "policy", "--min-avg-logp", 0)


# --- output folder, resume -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, script, words, good):
    """Arguments and folder of a finished run with one checkpoint."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    arguments = ["--model", TOY / "policy", "--dataset", good, "--batch-size", 2 * words.pair, "--num-steps", 2]
    arguments += ["--checkpoint-every", 2, "--output-dir", folder]
    main(script, *arguments)
    return arguments, folder


def test_folder_that_holds_a_run_is_refused_and_stays_as_it_is(message, run_folder):
    arguments, folder = run_folder
    before = contents(folder)
    assert f"--output-dir {folder} already holds a run; continue it with --resume" in message(*arguments)
    assert contents(folder) == before and len(before) > 5


def test_resume_with_other_settings_says_which_and_changes_nothing(message, script, run_folder):
    arguments, folder = run_folder
    before = contents(folder)
    text = message(*arguments, "--resume", "--lr", 0.5, "--log-epsilon-P=-2", "--no-humanline")
    assert f"--lr was {script.Args.lr}, is 0.5" in text and "--log-epsilon-P was -1.5, is -2.0" in text
    assert "--humanline was True, is False" in text
    assert "--beta" not in text and "--k" not in text
    assert contents(folder) == before


def test_resume_without_output_dir_is_refused(message):
    assert "--output-dir" in message("--resume")


def test_resume_where_there_is_nothing_is_refused(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "absent", tmp_path / "empty"):
        text = refused("--resume", "--output-dir", folder)
        assert text.startswith("--resume: ") and f"'{folder}' holds no run to resume" in text
        assert not (tmp_path / "absent").exists()


def test_resume_of_a_folder_with_broken_args_is_refused(refused, tmp_path):
    (tmp_path / "args.json").write_text("{")
    assert str(tmp_path) in refused("--resume", "--output-dir", tmp_path)


def test_output_dir_that_is_a_file_is_refused(refused, good):
    assert f"--output-dir {good}" in refused("--output-dir", good)


# --- a loss that is not finite -------------------------------------------------------------------------------------


def spoil(folder, parameter, row=slice(None)):
    """The toy policy with NaN in (one row of) a parameter."""
    copy_policy(folder)
    weights = load_file(folder / "model.safetensors")
    weights[parameter][row] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_non_finite_loss_names_step_and_row_and_the_last_checkpoint_still_resumes(message, words, dataset, tmp_path):
    tokenizer, folder = AutoTokenizer.from_pretrained(TOY / "policy"), tmp_path / "run"
    nettle = tokenizer.convert_tokens_to_ids("nettle")
    model = spoil(tmp_path / "model", "model.embed_tokens.weight", nettle)
    people = "king queen duke boy prince cook baker smith girl clerk pupil twin".split()
    rows = [ROWS[0] | {"prompt": f"for {who}"} for who in people]
    rows[8]["chosen"] = "nettle rose"
    arguments = ["--model", model, "--dataset", dataset(lines(*rows)), "--batch-size", 2 * words.pair]
    arguments += ["--num-steps", 6, "--checkpoint-every", 1, "--seed", 2, "--output-dir", folder]
    text = message(*arguments)
    step = int(re.match(r"step (\d+): the loss is nan", text)[1])
    assert step > 0 and "rows of --dataset: [9]." in text and str(folder) in text
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert [json.loads(line)["step"] for line in metrics.splitlines()] == list(range(step))
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {f"step-{n + 1}" for n in range(step)}
    assert not (folder / "final").exists()
    checkpoints = contents(folder / "checkpoints")
    assert message(*arguments, "--resume").startswith(f"step {step}: the loss is nan")
    assert contents(folder / "checkpoints") == checkpoints
    assert (folder / "metrics.jsonl").read_bytes() == metrics  # the same timings: no step was done again


def test_learning_rate_that_blows_up_names_step_and_rows(message, words, good, tmp_path):
    huge = ["--lr", 1e18, "--warmup-fraction", 0, "--batch-size", 2 * words.pair, "--num-steps", 9]
    text = message("--model", TOY / "policy", "--dataset", good, *huge, "--output-dir", tmp_path / "run")
    assert re.match(r"step 1: the loss is (nan|inf).*rows of --dataset: \[\d, \d\].*lower --lr", text)


def test_model_that_gives_nan_is_refused_before_it_is_sampled(message, words, good, tmp_path):
    model = spoil(tmp_path / "model", "lm_head.weight")
    arguments = ["--model", model, "--dataset", good, "--eval-dataset", good, "--batch-size", 2 * words.pair]
    text = message(*arguments, "--num-steps", 2, "--output-dir", tmp_path / "run")
    assert "--eval-dataset: not finite at rows [1, 2, 3, 4]" in text


# --- as a command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, arguments, said",
    [
        ("dpo_humanline", ["--dataset", "broken.jsonl"], "--dataset broken.jsonl, line 2 is not JSON"),
        ("kto_humanline", ["--model", "nobody/no-such-model"], "--model nobody/no-such-model cannot be loaded"),
    ],
)
def test_command_fails_with_the_message_alone(weightless, tmp_path, name, arguments, said):
    (tmp_path / "broken.jsonl").write_text(lines(ROWS[0]) + '{"prompt"\n')
    command = [sys.executable, ROOT / f"{name}.py", "--model", weightless, *arguments]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: {said}") and ended.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["broken.jsonl"]
