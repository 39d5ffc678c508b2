"""Bad input ends the run with one line that names the flag or the file, and leaves no trace.

The tests are for every script, but for those marked otherwise, and differ in the numbers given first.
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

import datasets
import huggingface_hub
import pytest
import torch.distributed as dist
from conftest import PAIRS, ROOT, SCRIPTS, TOY, parse_args
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, GPT2Config

from utils import DIVERGED, encode_prompt

PAIR = {"dpo_humanline": 1, "kto_humanline": 2, "grpo_humanline": 2}  # how much a pair adds to --batch-size
RANGES = {  # flags with values out of range
    "--k": (0, -1),
    "--log-epsilon-P": (0, 1.5, "nan"),
    "--log-epsilon-R": (0, -1.5, "nan"),
    "--lr": (0, -1e-3, "nan", "inf"),
    "--warmup-fraction": (-0.1, 1.1, "nan"),
    "--batch-size": (0, -2),
    "--micro-batch-tokens": (-1,),
    "--num-steps": (0,),
    "--max-length": (0,),
    "--max-prompt-length": (0,),
    "--max-grad-norm": (0, "nan"),
    "--adam-eps": (0,),
    "--weight-decay": (-1, "nan"),
    "--kappa": (0, "nan", "inf"),
    "--M": (0, "nan", "inf"),
    "--checkpoint-every": (-1,),
    "--keep-checkpoints": (-1,),
    "--shard-size": (-1,),
    "--eval-every": (-1,),
    "--eval-samples": (-1,),
    "--max-new-tokens": (0,),
    "--generation-batch-size": (0,),
    "--vllm-memory": (0, 1.1, "nan"),
    "--round-prompts": (0,),
    "--samples-per-prompt": (1,),
    "--reward-threshold": (-1, "nan", "inf"),
    "--seed": (-1,),
    "--temperature": (-1, "nan"),
    "--top-p": (0, 1.1, "nan"),
}
OWN_RANGES = {
    "dpo_humanline": {"--beta": (0, -0.1, "nan", "inf")},
    "kto_humanline": {
        "--beta": (0, -0.1, "nan", "inf"),
        "--lambda-D": (0, "nan"),
        "--lambda-U": (0, -1, "inf"),
    },
    "grpo_humanline": {"--beta": (-0.1, "nan", "inf"), "--epsilon": (0, "nan", "inf"), "--group-size": (-1,)},
}
ROWS = [
    {"prompt": f"for {who}", "chosen": "rose iris", "rejected": "holly"}
    for who in ("king", "queen", "duke", "boy")
]
USER = {"role": "user", "content": "for king"}
ROSE, IRIS = ({"role": "assistant", "content": flower} for flower in ("rose", "iris"))

dpo_alone = pytest.mark.parametrize("script", ["dpo_humanline"], indirect=True)
grpo_alone = pytest.mark.parametrize("script", ["grpo_humanline"], indirect=True)
kto_alone = pytest.mark.parametrize("script", ["kto_humanline"], indirect=True)


@pytest.fixture(scope="module", params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture(scope="module")
def pair(script) -> int:
    return PAIR[script.__name__]


def main(script, *arguments) -> None:
    """The script in this process; its process group is gone afterwards."""
    try:
        script.main(parse_args(script, [str(argument) for argument in arguments]))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def contents(folder) -> dict:
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {path: content for path, content in files.items() if (path.name, content) != (".lock", b"")}


def copy_policy(folder, *without):
    shutil.copytree(TOY / "policy", folder, ignore=shutil.ignore_patterns(*without))
    return folder


@pytest.fixture(autouse=True)
def one_process_without_network(monkeypatch):
    for config in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
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
    """Runs the script with exactly these arguments; it must fail, and this is the one line that it says."""

    def run(*arguments) -> str:
        with pytest.raises(SystemExit) as stop:
            main(script, *arguments)
        assert stop.value.code == 1
        del stop  # its frames hold the lock of the folder, as the process would
        said = capsys.readouterr().err
        start = re.search("(^|\r)error: ", said, re.MULTILINE)  # no progress bar stands before it
        assert start, said
        text = said[start.end() :]
        assert text.strip() and text.count("\n") == 1 and text.endswith("\n")
        return text

    return run


@pytest.fixture
def refused(message, pair, weightless, good, tmp_path):
    """Like `message`, for a run that is fine but for `arguments`, and that must write nothing."""

    def run(*arguments) -> str:
        fine = {"--model": weightless, "--dataset": good, "--output-dir": tmp_path / "run"}
        fine |= {"--batch-size": 2 * pair, "--num-steps": 2, "--eval-samples": 0}
        before = contents(tmp_path)
        text = message(*(part for flag in fine.items() for part in flag), *arguments)
        assert contents(tmp_path) == before
        return text

    return run


# --- data ---


@pytest.mark.parametrize("flag", ["--dataset", "--eval-dataset"])
def test_missing_file_is_named(refused, tmp_path, flag):
    for name in ("absent.jsonl", "absent.jsonl.gz", "absent.parquet"):
        path = tmp_path / name
        assert re.match(rf"{flag} {path}: .*(No such file|{path})", refused(flag, path))


def test_model_without_data_is_refused(message, weightless, tmp_path):
    text = message("--model", weightless, "--output-dir", tmp_path / "run")
    assert text == f"--model {weightless} needs a --dataset\n"
    assert not contents(tmp_path)


def test_folder_or_text_file_in_place_of_data_is_refused(refused, dataset, tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    for path in (tmp_path, tmp_path / "folder.jsonl", dataset("hello\n", "notes.txt")):
        assert refused("--dataset", path).startswith(f"--dataset {path}: ")


@pytest.mark.parametrize(
    "name, content",
    [(f"e.{kind}", "") for kind in ("json", "jsonl", "jsonl.gz", "parquet")]
    + [("e.jsonl", "\n\n"), ("e.json", "[]")],
)
def test_empty_file_is_called_empty(refused, dataset, name, content):
    path = dataset(content, name)
    assert re.match(rf"--dataset {path}: (0 rows.* none is left|.*0 bytes)", refused("--dataset", path))


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.json", "b.json.gz"])
def test_broken_json_names_file_and_line(refused, dataset, name):
    path = dataset(lines(*ROWS) + '{"prompt": "for king", chosen}\n' + lines(*ROWS), name)
    assert f"--dataset {path}, line 5 is not JSON" in refused("--dataset", path)


def test_broken_json_array_names_file_and_line(refused, dataset):
    rows = ",\n".join(lines(row).strip() for row in ROWS)
    path = dataset(f'[\n{rows},\n{{"prompt" "for king"}}\n]\n', "b.json")
    assert re.match(rf"--dataset {path}: .*delimiter: line 6 column 11", refused("--dataset", path))


@pytest.mark.parametrize("line", ["[1, 2]", '"text"', "5", "null"])
def test_line_that_is_not_an_object_is_named(refused, dataset, line):
    path = dataset(lines(*ROWS) + line + "\n")
    assert re.match(rf"--dataset {path}, line 5: it needs .*; the columns are", refused("--dataset", path))


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


@pytest.mark.parametrize("flag", ["--dataset", "--eval-dataset"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "for king", "chosen": "rose"},
        {"chosen": [ROSE], "rejected": [IRIS]},
        {"prompt": "for king", "completion": "rose"},
        {"question": "for king", "answer": "rose"},
    ],
    ids=lambda row: "+".join(row),
)
def test_missing_column_is_named_with_the_columns_there_are(refused, dataset, flag, row):
    path = dataset(lines(row, row))
    told = rf"{flag} {path}, line 1: it needs .*; the columns are {', '.join(row)}\n"
    assert re.match(told, refused(flag, path))


@pytest.mark.parametrize("flag", ["--dataset", "--eval-dataset"])
def test_column_missing_from_one_row_names_the_row(refused, dataset, flag):
    path = dataset(lines(*ROWS, {"prompt": "for girl", "chosen": "rose"}))
    assert f"{flag} {path}, line 5: it needs " in refused(flag, path)


@dpo_alone
@pytest.mark.parametrize("flag", ["--dataset", "--eval-dataset"])
def test_rows_with_a_label_name_the_script_that_takes_them(refused, dataset, flag):
    rows = [{"prompt": "for king", "completion": "rose", "label": label} for label in (True, False)]
    text = refused(flag, dataset(lines(*rows)))
    assert "line 1: it needs a prompt, chosen and rejected" in text and "kto_humanline.py" in text


@pytest.mark.parametrize(
    "change",
    [
        {"chosen": 5},
        {"prompt": {"text": "for king"}},
        {"chosen": [{"role": "assistant", "content": [{"type": "text", "text": "rose"}]}]},
        {"prompt": [{"role": "user", "content": None}]},
        {"prompt": ["for king"]},
        {"chosen": ["rose"], "rejected": ["iris"]},
        {"prompt": [{"role": None, "content": "for king"}]},
        {"chosen": [{"content": "rose"}], "rejected": [{"content": "iris"}]},
    ],
    ids=json.dumps,
)
def test_content_or_role_that_is_not_a_string_names_the_line(refused, dataset, change):
    path = dataset(lines(ROWS[0] | change))
    assert f"--dataset {path}, line 1: " in refused("--dataset", path)


def test_one_message_in_place_of_a_list_says_that_it_must_be_one(refused, dataset):
    path = dataset(lines(*ROWS, {"prompt": "for king", "chosen": ROSE, "rejected": IRIS}))
    told = f"--dataset {path}, line 5: a message must have a role and a content that are"
    assert told in refused("--dataset", path)


@pytest.mark.parametrize("prompt", ["for king", [USER]])
def test_a_completion_that_repeats_its_prompt_is_dropped_and_named(refused, dataset, prompt):
    path = dataset(lines({"prompt": prompt, "chosen": "for king rose", "rejected": "for king iris"}))
    assert "0 rows, 1 dropped; 1 completion that repeats its prompt: lines 1" in refused("--dataset", path)


def test_columns_of_sharegpt_and_of_an_implicit_prompt_are_named(refused, dataset):
    turns = [{"from": "human", "value": "for king"}, {"from": "gpt", "value": "rose"}]
    assert "the columns are conversations\n" in refused("--dataset", dataset(lines({"conversations": turns})))
    texts = {
        "chosen": "\n\nHuman: for king\n\nAssistant: rose",
        "rejected": "\n\nHuman: for king\n\nAssistant: iris",
    }
    assert "the columns are chosen, rejected\n" in refused("--dataset", dataset(lines(texts)))


def test_no_row_left_says_how_many_were_dropped_and_why(refused, dataset):
    rows = [ROWS[0] | {"rejected": "rose iris"}, ROWS[0] | {"chosen": " "}, ROWS[0] | {"rejected": ""}]
    text = refused("--dataset", dataset(lines(*rows)))
    assert "0 rows, 3 dropped" in text and "none is left" in text
    assert "; 1 chosen equals rejected: lines 1; " in text
    assert "; 2 completion empty or not one assistant message: lines 2, 3;" in text


def test_conversation_without_a_chat_template_names_the_flag(refused, dataset, tmp_path):
    model = copy_policy(tmp_path / "plain", "chat_template.jinja", "model.safetensors")
    row = {"prompt": [USER], "chosen": [ROSE], "rejected": [IRIS]}
    assert "--chat-template" in refused("--model", model, "--dataset", dataset(lines(row)))


def test_empty_prompt_with_nothing_before_the_completion_is_not_trained_on(refused, dataset, tmp_path):
    model = copy_policy(tmp_path / "plain", "chat_template.jinja", "model.safetensors")
    path = dataset(lines(ROWS[0] | {"prompt": ""}))
    assert "0 rows, 1 dropped; 1 prompt empty" in refused("--model", model, "--dataset", path)


def test_data_set_smaller_than_a_batch_says_both_numbers(refused, pair, good):
    text = refused("--model", TOY / "policy", "--batch-size", 8 * pair)
    assert f"--dataset {good}: 4 rows are left, and a batch takes 8" in text


@kto_alone
def test_batch_with_half_a_pair_is_refused(refused):
    assert refused("--batch-size", 5).startswith("--batch-size 5 is odd")


@grpo_alone
@pytest.mark.parametrize("size", [1, 3])
def test_group_size_that_the_data_does_not_have_is_refused(refused, size):
    text = refused("--group-size", size, "--batch-size", 6)
    assert text.startswith(f"--group-size {size} must be 2 or more")


@grpo_alone
def test_groups_whose_scores_are_all_equal_leave_nothing_to_train_on(refused, dataset):
    row = {"prompt": "for king", "completions": ["rose", "iris", "holly"], "scores": [1, 1, 1]}
    path = dataset(lines(row) * 4)
    assert f"--dataset {path}" in refused("--model", TOY / "policy", "--dataset", path, "--group-size", 2)


def test_lengths_too_small_for_anything_say_what_was_dropped(refused):
    text = refused("--max-prompt-length", 1, "--max-length", 2)
    reason = "prompt empty or longer than 1 tokens (raise --max-prompt-length, --max-length)"
    assert f"; 4 {reason}: lines 1, 2, 3, 4; none is left" in text


@pytest.mark.parametrize("room", [-1, 0])
def test_prompts_that_leave_no_room_for_a_completion_are_dropped_and_counted(refused, weightless, room):
    tokenizer = AutoTokenizer.from_pretrained(weightless)
    messages = [[{"role": "user", "content": row["prompt"]}] for row in ROWS]
    (length,) = {len(encode_prompt(tokenizer, prompt)) for prompt in messages}
    reason = (
        f"prompt empty or longer than {length + room - 1} tokens (raise --max-prompt-length, --max-length"
    )
    told = f"0 rows, 4 dropped; 4 {reason}): lines 1, 2, 3, 4; none is left"
    assert told in refused("--max-length", length + room)
    assert refused("--max-length", length + 1).startswith("--model ")  # one token of room: all rows are kept


# --- flags ---


@pytest.mark.parametrize("flag, values", RANGES.items())
def test_value_out_of_range_names_flag_value_and_range(refused, flag, values):
    for value in values:
        assert re.match(rf"{flag} is {value}.*; it must be ", refused(f"{flag}={value}"))


def test_value_out_of_range_of_a_flag_of_the_script_alone_is_named_too(refused, script):
    for flag, values in OWN_RANGES[script.__name__].items():
        test_value_out_of_range_names_flag_value_and_range(refused, flag, values)


def test_sampling_bound_below_the_ratio_bound_is_refused(refused, script):
    for bounds in ((), ("--log-epsilon-P=-0.1",), ("--log-epsilon-R=0.1",)):
        assert "--M of at least 1" in refused("--clip", "sample", *bounds, "--M", 0.9 if bounds else 0.2)
    script.check_flags(script.Args(dataset="any", clip="sample", M=1.0), 8)


# At -1e-20 a Beta parameter would be 0, and 1e-320 is 0 in fp32.
def test_values_that_arithmetic_takes_for_zero_are_refused(refused):
    assert "--clip sample needs bounds" in refused("--clip", "sample", "--log-epsilon-P=-1e-20", "--M", 1)
    assert "--lr is 1e-320; it must be from" in refused("--lr", "1e-320")


@pytest.mark.parametrize("bound", ["--log-epsilon-P=-inf", "--log-epsilon-R=inf"])
def test_infinite_bound_with_sampling_is_refused(refused, bound):
    assert "--clip sample" in refused("--clip", "sample", bound)


@pytest.mark.parametrize("world, batch", [(2, 11), (4, 10), (4, 2)])
def test_batch_that_ranks_do_not_divide_says_so(refused, script, monkeypatch, world, batch):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    told = f"{world} ranks must be a multiple of --shard-size, and a batch of {batch} of them\n"
    assert refused("--batch-size", batch) == told
    script.check_flags(script.Args(dataset="any", micro_batch_tokens=5), 3 * world)


def test_ranks_that_are_no_whole_number_of_shards_are_refused(refused, script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for size in (3, 8):
        assert refused("--batch-size", 8, "--shard-size", size).startswith(
            "4 ranks must be a multiple of --shard-size, "
        )
    for size in (0, 1, 2, 4):
        script.check_flags(script.Args(dataset="any", shard_size=size), 8)


def test_mistyped_flag_is_refused(script, capsys):
    with pytest.raises(SystemExit) as stop:
        main(script, "--lerning-rate", 1)
    assert stop.value.code != 0 and "--lerning-rate" in capsys.readouterr().err


# --- model, tokenizer ---


@pytest.mark.parametrize("flag", ["--model", "--reward-model"])
def test_unknown_model_path_names_the_flag(refused, tmp_path, flag):
    for path in (tmp_path / "absent", "absent", tmp_path):
        assert f"{flag} {path}: " in refused(flag, path)


def test_model_folder_without_config_is_refused(refused, tmp_path):
    model = copy_policy(tmp_path / "model", "config.json")
    assert refused("--model", model).startswith(f"--model {model}: ")


@pytest.mark.parametrize("config", ["{", "{}", '{"model_type": "no-such-model"}'])
def test_model_with_a_broken_config_is_named(refused, tmp_path, config):
    model = copy_policy(tmp_path / "model")
    (model / "config.json").write_text(config)
    assert refused("--model", model).startswith(f"--model {model}: ")


@pytest.mark.parametrize("without", ["tokenizer*", "model.safetensors"])
def test_model_without_tokenizer_or_weights_is_named(refused, tmp_path, without):
    model = copy_policy(tmp_path / "model", without)
    assert f"--model {model}" in refused("--model", model)


def test_model_with_damaged_weights_is_named(refused, tmp_path):
    model = copy_policy(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"damaged")
    assert f"--model {model}" in refused("--model", model)


def test_token_outside_the_vocabulary_names_the_flag(refused):
    text = refused("--eos-token", "<|absent|>")
    assert "'<|absent|>'" in text and "--eos-token" in text


def test_tokenizer_without_end_of_turn_names_the_flag(refused, tmp_path):
    model = copy_policy(tmp_path / "model", "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    assert "--eos-token" in refused("--model", model)


def test_missing_chat_template_file_is_named(refused, tmp_path):
    assert f"{tmp_path}/t.jinja" in refused("--chat-template", tmp_path / "t.jinja")


@pytest.mark.parametrize("template", ["{% for m in %}", "{{ raise_exception('no') }}", "{{ 1 + 'a' }}"])
def test_chat_template_that_cannot_render_is_blamed(refused, tmp_path, template):
    (tmp_path / "t.jinja").write_text(template)
    text = refused("--chat-template", tmp_path / "t.jinja")
    assert "chat template" in text or "--chat-template" in text


def test_reward_model_with_several_outputs_is_refused(refused, good, tmp_path):
    config = AutoConfig.from_pretrained(TOY / "reward_model")
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(tmp_path / "judge")
    evaluated = ("--eval-dataset", good, "--eval-samples", 2)
    text = refused("--model", TOY / "policy", *evaluated, "--reward-model", tmp_path / "judge")
    assert f"--reward-model {tmp_path / 'judge'}" in text and "3 outputs" in text


# --- output folder, resume ---


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, script, pair, good):
    """Arguments and folder of a finished run with one checkpoint."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    arguments = ["--model", TOY / "policy", "--dataset", good, "--batch-size", 2 * pair, "--num-steps", 2]
    arguments += ["--checkpoint-every", 2, "--output-dir", folder]
    main(script, *arguments)
    return arguments, folder


def test_folder_that_holds_a_run_is_refused_and_stays_as_it_is(message, run_folder):
    arguments, folder = run_folder
    before = contents(folder)
    told = f"--output-dir {folder} holds a run, or --resume names one: --resume {folder}\n"
    assert message(*arguments) == told
    assert contents(folder) == before and len(before) > 5


@pytest.mark.parametrize(
    "flag", ["--lr=nan", "--batch-size=0", "--dataset=", "--dataset=absent.jsonl", "--model=absent"]
)
def test_resume_with_bad_settings_is_refused_and_changes_nothing(message, run_folder, flag):
    _, folder = run_folder
    before = contents(folder)
    assert flag.partition("=")[0] in message("--resume", folder, flag)
    assert contents(folder) == before


def test_resume_where_there_is_nothing_is_refused(message, tmp_path, good):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "absent", tmp_path / "empty", good):
        assert message("--resume", folder).startswith(f"--resume {folder}: ")
        assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"no_such_flag": 1}', '{"lr": 1}'])
def test_resume_of_a_folder_with_broken_args_is_refused(message, tmp_path, text):
    (tmp_path / "args.json").write_text(text)
    assert message("--resume", tmp_path).startswith(f"--resume {tmp_path}: ")
    assert contents(tmp_path) == {tmp_path / "args.json": text.encode()}


def test_output_dir_that_cannot_be_is_refused(refused, good):
    for path in (good, good / "run", "/dev/null/run", "/proc/run"):
        text = refused("--output-dir", path)
        assert text.startswith(f"--output-dir {path} (does another process use it?): ")
        assert re.search("File exists|Not a directory|No such file", text)
    assert "File name too long" in refused("--output-dir", good.with_name("x" * 300))


# --- a loss that is not finite ---


def spoil(folder, parameter, row=slice(None)):
    """The toy policy with NaN in (one row of) a parameter."""
    copy_policy(folder)
    weights = load_file(folder / "model.safetensors")
    weights[parameter][row] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_non_finite_loss_names_step_and_row_and_the_last_checkpoint_resumes(message, pair, dataset, tmp_path):
    tokenizer, folder = AutoTokenizer.from_pretrained(TOY / "policy"), tmp_path / "run"
    nettle = tokenizer.convert_tokens_to_ids("nettle")
    model = spoil(tmp_path / "model", "model.embed_tokens.weight", nettle)
    people = "king queen duke boy prince cook baker smith girl clerk pupil twin".split()
    rows = [ROWS[0] | {"prompt": f"for {who}"} for who in people]
    rows[8]["chosen"] = "nettle rose"
    arguments = ["--model", model, "--dataset", dataset(lines(*rows)), "--batch-size", 2 * pair]
    arguments += ["--num-steps", 6, "--checkpoint-every", 1, "--keep-checkpoints", 0, "--seed", 2]
    arguments += ["--output-dir", folder]
    text = message(*arguments)
    step = int(re.match(r"step (\d+): loss nan", text)[1])
    assert step > 0 and "the update was not made: look at rows [9] of --dataset" in text
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert [json.loads(line)["step"] for line in metrics.splitlines()] == list(range(step))
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {f"step-{n + 1}" for n in range(step)}
    assert not (folder / "final").exists()
    checkpoints = contents(folder / "checkpoints")
    assert message("--resume", folder).startswith(f"step {step}: loss nan")
    assert contents(folder / "checkpoints") == checkpoints
    assert (folder / "metrics.jsonl").read_bytes() == metrics  # the same timings: no step was done again


def test_learning_rate_that_blows_up_names_step_and_rows(message, pair, good, tmp_path):
    huge = ["--lr", 1e18, "--warmup-fraction", 0, "--batch-size", 2 * pair, "--num-steps", 9]
    text = message("--model", TOY / "policy", "--dataset", good, *huge, "--output-dir", tmp_path / "run")
    assert re.match(r"step 1: loss (nan|inf).*look at rows \[\d, \d\] of --dataset.*lower --lr", text)


@pytest.mark.parametrize("samples", [0, 4])
def test_model_that_gives_nan_is_refused_before_it_trains(message, pair, good, tmp_path, samples):
    model = spoil(tmp_path / "model", "lm_head.weight")
    arguments = ["--model", model, "--dataset", good, "--eval-dataset", good, "--batch-size", 2 * pair]
    arguments += ["--num-steps", 2, "--eval-samples", samples, "--max-new-tokens", 4]
    arguments += ["--output-dir", tmp_path / "run"]
    text = message(*arguments)
    assert text.startswith("evaluation: ") and DIVERGED in text


@dpo_alone
@pytest.mark.parametrize(("steps", "samples"), [(1, 0), (1, 4), (3, 0)])
def test_a_run_that_diverges_says_so_and_the_checkpoint_before_it_stays(message, tmp_path, steps, samples):
    arguments = ["--model", TOY / "policy", "--dataset", PAIRS, "--eval-dataset", PAIRS]
    arguments += ["--batch-size", 4, "--k", 9]
    arguments += ["--dtype", "float32", "--num-steps", steps, "--lr", 1e10, "--max-new-tokens", 4]
    arguments += ["--checkpoint-every", 1, "--eval-samples", samples, "--output-dir", tmp_path / "run"]
    text = message(*arguments)
    assert DIVERGED in text if steps == 1 else "the update was not made" in text
    assert (tmp_path / "run" / "checkpoints" / "step-1" / "state.json").exists()


@dpo_alone
def test_a_policy_that_cannot_be_sampled_says_that_it_diverged(message, pair, good, tmp_path):
    model = spoil(tmp_path / "model", "lm_head.weight")
    (tmp_path / "prompts.jsonl").write_text(lines(*({"prompt": row["prompt"]} for row in ROWS)))
    arguments = ["--model", model, "--dataset", good, "--eval-dataset", tmp_path / "prompts.jsonl"]
    arguments += ["--eval-samples", 4]
    arguments += ["--batch-size", 2 * pair, "--max-new-tokens", 4, "--output-dir", tmp_path / "run"]
    text = message(*arguments)
    assert text.startswith("evaluation: the policy's ") and DIVERGED in text


@dpo_alone
def test_a_mistake_in_a_loss_that_was_changed_has_its_traceback(script, pair, good, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "dpo_loss", lambda log_ratio, mask, beta: log_ratio @ mask)
    arguments = ["--model", TOY / "policy", "--dataset", good, "--eval-dataset", good, "--eval-samples", 0]
    with pytest.raises(RuntimeError, match="size mismatch|shapes"):
        main(script, *arguments, "--batch-size", 2 * pair, "--output-dir", tmp_path / "run")


@dpo_alone
def test_a_judge_with_too_few_positions_is_named(message, pair, good, tmp_path):
    sizes = {"vocab_size": 64, "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 1}
    config = GPT2Config(**sizes, num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(TOY / "policy").save_pretrained(tmp_path / "judge")
    arguments = ["--model", TOY / "policy", "--dataset", good, "--eval-dataset", good, "--eval-samples", 4]
    arguments += ["--batch-size", 2 * pair, "--reward-model", tmp_path / "judge", "--max-new-tokens", 8]
    text = message(*arguments, "--output-dir", tmp_path / "run")
    assert text.startswith(f"evaluation: --reward-model {tmp_path / 'judge'}: ")


# --- as a command ---


@pytest.mark.parametrize(
    "name, arguments, said",
    [
        ("dpo_humanline", ["--dataset", "broken.jsonl"], "--dataset broken.jsonl, line 2 is not JSON: "),
        (
            "kto_humanline",
            ["--model", "nobody/no-such-model", "--dataset", "broken.jsonl"],
            "--model nobody/no-such-model: ",
        ),
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
