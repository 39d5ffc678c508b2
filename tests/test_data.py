"""From rows to token ids: what is read, what is left out, where a completion begins and ends.

`letters` is a tokenizer with one token per character, so that decoded ids show exactly what is trained on.
"""

import gzip
import json
import math
import re
import shutil

import datasets
import pytest
import torch
from conftest import TOY, write_rows
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import dpo_humanline
import grpo_humanline
import grpo_math_humanline
import kto_humanline
import utils
from support import data, run
from utils import Example, pad_batch, token_logps

pytestmark = pytest.mark.usefixtures("one_rank")

TURN = "<|{{ m.role }}|>{{ m.content }}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATE = "<s>{% for m in messages %}" + TURN + "</s>{% endfor %}" + PROMPT
BOS, EOS, END = 0, 1, 2  # ids of <s>, </s> and <|end|>


def letters(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per character. Called on text, it puts <s> first, as Llama's does."""
    special = ["<s>", "</s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocab = {token: i for i, token in enumerate([*special, "\n", *map(chr, range(32, 127))])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.decoder = decoders.Fuse()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": special[2:]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **tokens)
    tokenizer.chat_template = template
    return tokenizer


LETTERS = letters()
U, A, S = (
    lambda text, role=role: {"role": role, "content": text} for role in ("user", "assistant", "system")
)
PAIR = {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go."}
ROWS = [PAIR, {"prompt": "Bye", "chosen": "See you", "rejected": "Good"}]


@pytest.fixture
def load(tmp_path, capsys, monkeypatch):
    """Groups of rows (or of a file), and what is said about them, on stderr if the run ends."""
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)  # for all tests

    def read(rows, tokenizer=LETTERS, eos_ids=(EOS,), script=dpo_humanline, **args):
        if isinstance(rows, list):
            rows = write_rows(tmp_path / "rows.jsonl", rows)
        capsys.readouterr()
        try:
            with run.exit_on_input_error():
                groups = script.load_groups(script.Args(**args), tokenizer, set(eos_ids), str(rows), "train")
        except SystemExit:
            return [], capsys.readouterr().err
        return groups, capsys.readouterr().out

    return read


def texts(group, tokenizer=LETTERS) -> list:
    """The prompt, and what is trained of each completion."""
    assert all(x.prompt_ids == group[0].prompt_ids for x in group)
    return [tokenizer.decode(group[0].prompt_ids), *(tokenizer.decode(x.completion_ids) for x in group)]


# --- formats ---


@pytest.mark.parametrize(
    "row",
    [
        lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r},
        lambda p, c, r: {"instruction": p, "chosen": c, "rejected": r, "input": "", "system": None},
        lambda p, c, r: {"prompt": [U(p)], "chosen": [A(c)], "rejected": [A(r)]},
        lambda p, c, r: {"prompt": p, "chosen": [A(c)], "rejected": [A(r)]},
        lambda p, c, r: {"prompt": [U(p)], "chosen": c, "rejected": r},
        lambda p, c, r: {"chosen": [U(p), A(c)], "rejected": [U(p), A(r)]},
        lambda p, c, r: {"prompt": p, "chosen": [U(p), A(c)], "rejected": [U(p), A(r)], "score": 0.5},
        lambda p, c, r: {"prompt": [U(p)], "chosen": [U(p), A(c)], "rejected": [U(p), A(r)]},
        lambda p, c, r: {"prompt": [U(p) | {"name": None}], "chosen": [U(p), A(c)], "rejected": [U(p), A(r)]},
    ],
)
def test_paired_formats_give_the_same_pairs(load, row):
    pairs, told = load([row(*pair.values()) for pair in ROWS])
    assert [texts(pair) for pair in pairs] == [
        ["<s><|user|>Hi</s><|assistant|>", "Hello!</s>", "Go.</s>"],
        ["<s><|user|>Bye</s><|assistant|>", "See you</s>", "Good</s>"],
    ]
    assert told.endswith(": 2 rows\n")


@pytest.mark.parametrize("as_messages", [False, True])
def test_labels_and_scores_give_the_halves_of_pairs(load, as_messages):
    pairs, _ = load(ROWS)
    prompt, answer = (lambda p: [U(p)], lambda c: [A(c)]) if as_messages else (str, str)
    labelled, scored = [], []
    for p, *both in map(dict.values, ROWS):
        labelled += [{"prompt": prompt(p), "completion": answer(both[i]), "label": not i} for i in (0, 1)]
        scored.append({"prompt": prompt(p), "completions": [*map(answer, both)], "scores": [2.5, -1]})
    groups, told = load(labelled, script=kto_humanline)
    plain = lambda x: x._replace(prompt="", desirable=None)  # a text or messages
    assert [plain(x) for (x,) in groups] == [plain(x) for pair in pairs for x in pair]
    assert [x.desirable for (x,) in groups] == [True, False] * 2 and ": 4 rows\n" in told
    for pair in load(ROWS, script=kto_humanline)[0]:
        assert [x.desirable for x in pair] == [True, False]
    for pair in load(ROWS, script=grpo_humanline)[0]:
        assert [x.reward for x in pair] == [1, 0]
    groups, _ = load(scored, script=grpo_humanline)
    assert [[x.reward for x in group] for group in groups] == [[2.5, -1]] * 2
    assert [texts(group) for group in groups] == [texts(pair) for pair in pairs]


GOOD = {"prompt": "Hi", "completions": ["a", "b"], "scores": [0.5, 0.1]}


def test_of_scored_groups_the_best_and_the_worst_or_all_are_read(load):
    rows = [GOOD | {"completions": ["a", "b", "c"], "scores": scores} for scores in ([1, 3, 2], [1] * 3)]
    groups, told = load(rows, script=grpo_humanline)
    assert [texts(group)[1:] for group in groups] == [["b</s>", "a</s>"]]
    assert "; 1 skipped, the first in line 2: its scores are equal" in told
    groups, _ = load(rows, script=grpo_humanline, group_size=3)
    wanted = [["b</s>", "c</s>", "a</s>"], ["a</s>", "b</s>", "c</s>"]]
    assert [texts(group)[1:] for group in groups] == wanted


LABELLED = {"prompt": "Hi", "completion": "a", "label": True}
PROBLEM = {"problem": "1+1?", "answer": "2"}
FINE = {dpo_humanline: PAIR, kto_humanline: LABELLED, grpo_humanline: GOOD, grpo_math_humanline: PROBLEM}


@pytest.mark.parametrize(
    ("script", "row", "said"),
    [
        (grpo_humanline, GOOD | {"scores": None}, "no value for 'scores' in the columns"),
        (grpo_humanline, GOOD | {"scores": [1.0]}, "completions and scores must be two lists"),
        (grpo_humanline, GOOD | {"completions": "ab"}, "completions and scores must be two lists"),
        (grpo_humanline, GOOD | {"scores": [1.0, math.nan]}, "the score nan is not a finite number"),
        (grpo_humanline, GOOD | {"scores": [None, 1.0]}, "the score None is not a finite number"),
        (grpo_humanline, GOOD | {"scores": [1.0, "2"]}, "the score '2' is not a finite number"),
        (kto_humanline, LABELLED | {"label": "true"}, ""),
        (kto_humanline, LABELLED | {"label": 0.5}, "label must be true or false"),
        (
            kto_humanline,
            {"prompt": "Hi", "label": True},
            "no value for 'completion' in the columns prompt, label",
        ),
        (
            dpo_humanline,
            {"chosen": [U("Hi"), U("So")], "rejected": [U("Hi"), U("No")]},
            "a completion must be",
        ),
        (
            dpo_humanline,
            {"chosen": [U("Hi"), A("So")], "rejected": [U("Hi"), S("No")]},
            "a completion must be",
        ),
        (dpo_humanline, {"chosen": ["Hi", A("So")], "rejected": ["Hi", A("No")]}, "every message must have"),
        (dpo_humanline, {"chosen": [], "rejected": [A("No")]}, ""),
        (grpo_math_humanline, {"answer": "2"}, "no text in 'problem' or 'question', in the columns answer"),
        (grpo_math_humanline, {"problem": 5, "answer": "2"}, ""),
        (grpo_math_humanline, PROBLEM | {"input": "in cm"}, "the column 'input' would be ign"),
    ],
)
def test_a_malformed_row_is_named(load, script, row, said):
    groups, told = load([FINE[script], row], script=script)
    assert groups == [] and f"rows.jsonl, line 2: {said}" in told


def test_problems_that_cannot_train_are_left_out(load):
    rows = [PROBLEM | {"problem": problem} for problem in ("1+1?", " ", "2 " * 99)]
    groups, told = load(rows, script=grpo_math_humanline, system_prompt="", max_prompt_length=40)
    assert [(x.prompt, x.answer) for (x,) in groups] == [("1+1?", "2")]
    assert "1 skipped, the first in line 2: prompt empty; 1 skipped, the first in line 3: " in told


def test_messages_shared_over_several_turns_are_the_prompt_and_none_is_lost(load):
    turns = [S("Be brief"), U("Hi"), A("Yes?"), U("Why")]
    implicit = {"chosen": [*turns, A("So")], "rejected": [*turns, A("No")]}
    pairs = [load([row])[0] for row in (implicit, implicit | {"prompt": "Hi"}, implicit | {"prompt": turns})]
    explicit, _ = load([{"prompt": turns, "chosen": [A("So")], "rejected": [A("No")]}])
    assert pairs == [explicit] * 3
    whole = "<s><|system|>Be brief</s><|user|>Hi</s><|assistant|>Yes?</s><|user|>Why</s><|assistant|>"
    assert texts(explicit[0]) == [whole, "So</s>", "No</s>"]
    for prompt in ("You are a pirate", [U("Who")], [S("You are a pirate"), *turns]):
        _, told = load([implicit | {"prompt": prompt}])
        assert "line 1: " in told and "do not begin with the prompt" in told


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.parquet"])
def test_file_kinds_give_the_same_pairs_and_blank_lines_none(load, tmp_path, name):
    rows = [{"prompt": [U(row["prompt"])], "chosen": [A("a")], "rejected": [A("b")]} for row in ROWS]
    text = "\n" + "\r\n \n".join(json.dumps(row) for row in rows) + "\n\n"
    if name.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert load(tmp_path / name)[0] == load(rows)[0] != []


COLUMNS = "input system system_prompt history context documents images tools".split()


@pytest.mark.parametrize("script", [dpo_humanline, kto_humanline, grpo_humanline])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_that_would_be_ignored_ends_the_run_with_its_name(load, script, column):
    value = [["Hi", "Yes?"]] if column in ("history", "images", "tools") else "You are a pirate."
    groups, told = load([PAIR, PAIR | {column: value}], script=script)
    assert groups == [] and re.search(f"line 2: .*column '{column}' would be ignored", told)
    assert len(load([PAIR | {column: empty} for empty in (None, "", [])], script=script)[0]) == 3


# --- where a completion begins and ends ---


def test_without_a_template_texts_are_joined_behind_one_bos_and_conversations_are_an_error(load):
    plain = letters(template=None)
    assert plain("x").input_ids[0] == BOS  # the tokenizer adds its own, and TEMPLATE writes another
    [pair], _ = load([PAIR], plain)
    assert texts(pair) == ["<s>Hi", "Hello!</s>", "Go.</s>"] and pair[0].prompt == "Hi"
    _, told = load([PAIR | {"prompt": [U("Hi")]}], plain)
    assert "line 1: " in told and "--chat-template" in told


@pytest.mark.parametrize("end", ["</s>", "<|end|>", "<|end|>\n", "</s>\n \n", "<|end|>\n</s>", ""], ids=repr)
def test_completion_ends_with_the_end_of_turn_and_nothing_after(load, end):
    tokenizer = letters("{% for m in messages %}" + TURN + "{{ " + repr(end) + " }}{% endfor %}" + PROMPT)
    [pair], _ = load([PAIR], tokenizer, [EOS, END])
    first = "<|end|>" if end.startswith("<|end|>") else "</s>"
    assert texts(pair)[1:] == ["Hello!" + first, "Go." + first]


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("</s>{% endfor", "{% endfor"), None])
def test_cut_completion_has_no_end_of_turn_and_every_other_ends_with_it(load, template):
    tokenizer = letters(template)
    prompt = len(load([PAIR], tokenizer)[0][0][0].prompt_ids)
    for room in range(1, 12):
        [pair], _ = load([PAIR], tokenizer, max_length=prompt + room)
        for x, whole in zip(pair, ("Hello!</s>", "Go.</s>")):
            tokens = tokenizer(whole, add_special_tokens=False).input_ids
            assert x.completion_ids == tokens[:room]


def test_every_end_of_turn_of_the_model_is_known(tmp_path):
    shutil.copytree(TOY / "policy", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')

    def load(model, **flags):
        return data.load_tokenizer(dpo_humanline.Args(model=str(model), **flags))

    tokenizer, eos_ids = load(tmp_path / "model", eos_token="rose")
    assert eos_ids == {1, 7, tokenizer.convert_tokens_to_ids("rose")}
    assert load(TOY / "policy")[1] == {5}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"eos_token_id": [6, 7]}))
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.6}')
    assert load(tmp_path / "model")[1] == {5, 6, 7}
    (tmp_path / "model" / "generation_config.json").unlink()
    assert load(tmp_path / "model")[1] == {5, 6, 7}


def test_a_failed_connection_is_no_missing_generation_config(monkeypatch):
    """Then the EOS ids of the file were missing without a word. Not every model has the file."""
    from_pretrained = data.GenerationConfig.from_pretrained
    monkeypatch.setattr(data.GenerationConfig, "from_pretrained", lambda name: from_pretrained("some/model"))
    monkeypatch.setattr(data, "is_offline_mode", lambda: False)
    errors = []

    def download(*arguments, **options):
        raise errors.pop()

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", download)
    missing = RemoteEntryNotFoundError.__new__(RemoteEntryNotFoundError)  # its __init__ needs a response
    errors.append(missing)
    args = dpo_humanline.Args(model=str(TOY / "policy"))
    assert data.load_tokenizer(args)[1] == {5}
    errors.append(LocalEntryNotFoundError("no connection"))
    with pytest.raises(utils.InputError, match="^--model .*: OSError: We couldn't connect to"):
        data.load_tokenizer(args)


# --- what is left out ---


def test_rows_that_cannot_train_are_counted_by_reason_and_the_others_keep_their_order(load):
    good = [{"prompt": word, "chosen": "yes", "rejected": "no"} for word in ("one", "two", "three")]
    empty = [PAIR | {"chosen": ""}, PAIR | {"rejected": " \n"}]
    empty += [PAIR | {"chosen": [A("")], "rejected": [A("a")]}]
    rows = [empty[0], good[0], *empty[1:], PAIR | {"chosen": "Go."}, good[1]]
    rows += [PAIR | {"prompt": "x" * 30}, good[2]]
    pairs, told = load(rows, max_prompt_length=20, max_length=26)
    assert [x.prompt for x, _ in pairs] == ["one", "two", "three"]
    assert re.search(": 3 of 8 rows; (.*)\n", told)[1].split("; ") == [
        "3 skipped, the first in line 1: completion empty",
        "1 skipped, the first in line 5: chosen equals rejected",
        "1 skipped, the first in line 7: prompt longer than --max-prompt-length",
    ]
    groups, told = load([PAIR | {"prompt": prompt} for prompt in ("", " \n", [U("")])])
    assert groups == [] and "3 skipped, the first in line 1: prompt empty" in told


def test_lengths_leave_room_for_a_token(load):
    length = len(load([PAIR])[0][0][0].prompt_ids)
    rows = [PAIR, PAIR | {"prompt": "Hi!"}, PAIR]
    for longest in ({"max_prompt_length": length}, {"max_length": length + 1}):
        groups, told = load(rows, **longest)
        assert [x.prompt for x, _ in groups] == ["Hi", "Hi"] and "1 skipped, the first in line 2: " in told


# --- masks ---


def test_mask_is_one_at_completion_tokens_and_padding_changes_no_log_probability():
    sequences = [([3, 6, 7, 5, 4], [19, 20, 5]), ([4], [5]), ([5, 5], [5, 6, 5])]
    input_ids, mask = pad_batch([Example("", *sequence) for sequence in sequences], torch.device("cpu"))
    assert mask.tolist() == [[0] * 5 + [1] * 3, [0, 1] + [0] * 6, [0, 0, 1, 1, 1] + [0] * 3]
    assert input_ids.tolist() == [[3, 6, 7, 5, 4, 19, 20, 5], [4, 5] + [0] * 6, [5, 5, 5, 6, 5] + [0] * 3]
    assert (input_ids.dtype, mask.dtype) == (torch.int64, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy", dtype=torch.float64)
    with torch.no_grad():
        logps = token_logps(model, input_ids, mask)
        by_end = token_logps(model, torch.where(input_ids == 0, 5, input_ids), mask)
    assert torch.equal(logps, by_end) and [(row != 0).sum().item() for row in logps] == [3, 1, 3]
