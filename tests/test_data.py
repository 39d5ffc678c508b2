"""Tests support/data.py and the section Data of the scripts: from the rows of a file to token ids.

Training on a wrong token raises no error and shows in no metric. So a row is trained as a person who reads it
would expect, or it is skipped or refused with a reason.

`letters` is a tokenizer with one token per character, so that decoded ids show exactly what is trained on.
`bytes_or_pieces` are the two kinds of tokenizers that models have.
"""

import gzip
import importlib
import json
import re
import shutil
import unicodedata
from functools import cache
from importlib.resources import files
from pathlib import Path

import datasets
import pytest
import torch.distributed as dist
from helpers import (
    PAIRS,
    SCRIPTS,
    SHARED,
    TOY,
    read_rows,
    run_ranks,
    write_rows,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tqdm import tqdm
from transformers import (
    LlamaTokenizer,
    MistralConfig,
    PreTrainedTokenizerFast,
)

import dpo_humanline
import grpo_humanline
import grpo_math_humanline
import kto_humanline
from support import data, sampling
from utils import InputError

# === Tokenizers and rows ===

TURN = "<|{{ m.role }}|>{{ m.content }}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATE = "<s>{% for m in messages %}" + TURN + "</s>{% endfor %}" + PROMPT
BOS, EOS, END = 0, 1, 2  # ids of <s>, </s> and <|end|>
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def letters(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per character. It puts <s> before a text, as Llama's does."""
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


def bytes_or_pieces(kind: str, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of bytes, as in Llama 3 and Qwen, or of pieces, as in Llama 2 and Mistral.

    The first piece depends on what stands before it.
    """
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end_header_id|>", "<bos>"]
    if kind == "bytes":
        vocab = {token: i for i, token in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "?I"])}
        raw = Tokenizer(models.BPE(vocab=vocab, merges=[("?", "I")]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = decoders.ByteLevel()
    else:
        pieces = ["▁", "\n", *map(chr, range(33, 127))]
        merges = [("▁", piece) for piece in pieces[1:]]
        vocab = {token: i for i, token in enumerate([*pieces, *("".join(pair) for pair in merges)])}
        raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        raw.decoder = decoders.Metaspace()
    tokens = {"bos_token": "<s>", "eos_token": "<|im_end|>", "additional_special_tokens": special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **tokens)
    tokenizer.chat_template = template
    return tokenizer


def U(text: str) -> dict:
    return {"role": "user", "content": text}


def A(text: str) -> dict:
    return {"role": "assistant", "content": text}


def S(text: str) -> dict:
    return {"role": "system", "content": text}


PAIR = {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go."}
ROWS = [PAIR, {"prompt": "Bye", "chosen": "See you", "rejected": "Good"}]
LABELLED = {"prompt": "Hi", "completion": "a", "label": True}
SCORED = {"prompt": "Hi", "completions": ["a", "b"], "scores": [0.5, 0.1]}
PROBLEM = {"problem": "1+1?", "answer": "2"}
FINE = {dpo_humanline: PAIR, kto_humanline: LABELLED, grpo_humanline: SCORED, grpo_math_humanline: PROBLEM}


@pytest.fixture
def load(tmp_path, capsys, one_rank):
    """Returns the groups of rows (or of a file), and what a run says about them, also if it ends."""

    def read(rows, tokenizer=LETTERS, eos_ids=(EOS,), script=dpo_humanline, **args):
        if isinstance(rows, list):
            rows = write_rows(tmp_path / "rows.jsonl", rows)
        args = script.Args(**args)
        capsys.readouterr()
        try:
            online = getattr(args, "online", False)
            encode_row = script.encode_prompt if online else script.encode_row
            groups = data.load_groups(args, tokenizer, set(eos_ids), str(rows), "train", encode_row)
        except SystemExit as error:
            return [], error.code
        return groups, capsys.readouterr().out

    return read


def texts(group, tokenizer=LETTERS) -> list:
    """Returns the prompt, and what is trained of each completion."""
    assert all(x.prompt_ids == group[0].prompt_ids for x in group)
    return [tokenizer.decode(group[0].prompt_ids), *(tokenizer.decode(x.completion_ids) for x in group)]


def encode(tokenizer, prompt, *completions, eos_ids=None) -> list:
    """Returns the text of a prompt and those of its completions, after encoding and decoding."""
    args = dpo_humanline.Args(max_prompt_length=10_000, max_length=20_000)
    examples = data.encode(args, tokenizer, eos_ids or {tokenizer.eos_token_id}, prompt, completions)
    decoded = [tokenizer.decode(x.completion_ids) for x in examples]
    return [tokenizer.decode(examples[0].prompt_ids), *decoded[: len(completions)]]


def encode_ids(tokenizer, prompt, *completions) -> tuple:
    """Returns the ids of a prompt, and the ids of each completion, as lists."""
    args = dpo_humanline.Args(max_prompt_length=10_000, max_length=20_000)
    examples = data.encode(args, tokenizer, {tokenizer.eos_token_id}, prompt, completions)
    return [*examples[0].prompt_ids], *([*x.completion_ids] for x in examples[: len(completions)])


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_sample_has_the_space_that_the_data_has(kind):
    """The tokens of a text, as if they had been sampled, are the text again."""
    tokenizer = bytes_or_pieces(kind, None)
    for text in (" there was a girl.\nHer name", "\nthere", " (a girl) ", "!"):
        prompt_ids, ids = encode_ids(tokenizer, "Once upon a time,", text)
        assert sampling.decode_behind(tokenizer, prompt_ids, ids[:-1]) == text


# === Rows ===


@pytest.mark.parametrize(
    "row",
    [
        lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r, "source": "x", "margin": 2.0},
        lambda p, c, r: {"prompt": [U(p)], "chosen": [A(c)], "rejected": [A(r)], "input": "", "system": None},
        lambda p, c, r: {"prompt": p, "chosen": [A(c)], "rejected": [A(r)]},
        lambda p, c, r: {"chosen": [U(p), A(c)], "rejected": [U(p), A(r)]},
        lambda p, c, r: {"prompt": p, "chosen": [U(p), A(c)], "rejected": [U(p), A(r)]},
        lambda p, c, r: {"prompt": [U(p)], "chosen": [U(p), A(c)], "rejected": [U(p), A(r)]},
        lambda p, c, r: {"prompt": [U(p) | {"name": None, "tool_calls": None}], "chosen": c, "rejected": r},
    ],
)
def test_pairs_of_all_forms_are_the_same(load, row):
    pairs, told = load([row(*pair.values()) for pair in ROWS])
    assert [texts(pair) for pair in pairs] == [
        ["<s><|user|>Hi</s><|assistant|>", "Hello!</s>", "Go.</s>"],
        ["<s><|user|>Bye</s><|assistant|>", "See you</s>", "Good</s>"],
    ]
    assert told.endswith(": 2 of 2 rows; 0 of 4 completions truncated by --max-length\n")


def test_conversations_keep_all_turns_and_end_with_one_answer_each(load):
    turns = [S("Be brief"), U("Hi"), A("Yes?"), U("Why")]
    whole = {"chosen": [*turns, A("So")], "rejected": [*turns, A("No")]}
    explicit, _ = load([{"prompt": turns, "chosen": [A("So")], "rejected": [A("No")]}])
    begin = "<s><|system|>Be brief</s><|user|>Hi</s><|assistant|>Yes?</s><|user|>Why</s><|assistant|>"
    assert texts(explicit[0]) == [begin, "So</s>", "No</s>"]
    for row in (whole, whole | {"prompt": "Why"}, whole | {"prompt": turns}):
        assert load([row])[0] == explicit
    _, told = load([whole | {"rejected": [*turns[1:], A("No")]}])
    assert "row 1: chosen and rejected must both be the prompt and one more message" in told


@pytest.mark.parametrize("as_messages", [False, True])
def test_labels_and_scores_give_the_halves_of_pairs(load, as_messages):
    pairs, _ = load(ROWS)
    prompt, answer = (lambda p: [U(p)], lambda c: [A(c)]) if as_messages else (str, str)
    labelled, scored = [], []
    for p, *both in map(dict.values, ROWS):
        labelled += [{"prompt": prompt(p), "completion": answer(both[i]), "label": not i} for i in (0, 1)]
        scored.append({"prompt": prompt(p), "completions": [*map(answer, both)], "scores": [2.5, -1]})
    groups, _ = load(labelled, script=kto_humanline)
    plain = [x._replace(desirable=None, prompt="") for (x,) in groups]
    assert plain == [x._replace(prompt="") for pair in pairs for x in pair]
    assert [x.desirable for (x,) in groups] == [True, False] * 2
    for pair in load(ROWS, script=kto_humanline)[0]:
        assert [x.desirable for x in pair] == [True, False]
    for pair in load(ROWS, script=grpo_humanline)[0]:
        assert [x.reward for x in pair] == [1, 0]
    groups, _ = load(scored, script=grpo_humanline)
    assert [[x.reward for x in group] for group in groups] == [[2.5, -1]] * 2
    assert [texts(group) for group in groups] == [texts(pair) for pair in pairs]


def test_of_scored_groups_the_best_and_the_worst_or_all_are_read(load):
    rows = [SCORED | {"completions": ["a", "b", "c"], "scores": scores} for scores in ([1, 3, 2], [1] * 3)]
    groups, told = load(rows, script=grpo_humanline)
    assert [texts(group)[1:] for group in groups] == [["b</s>", "a</s>"]]
    assert "; 1 skipped, the first is row 2: its scores are equal" in told
    groups, _ = load(rows, script=grpo_humanline, group_size=3)
    assert [texts(group)[1:] for group in groups] == [["b</s>", "c</s>", "a</s>"]]


@pytest.mark.parametrize("group_size", [2, 3])
def test_scores_that_differ_by_rounding_have_no_advantage(load, group_size):
    scores = [0.3, 0.1 + 0.2, 0.3][:group_size]
    row = {"prompt": "Hi", "completions": ["a", "b", "c"][:group_size], "scores": scores}
    good = row | {"scores": [1.0, 0.5, 0.0][:group_size]}
    groups, _ = load([good, row], script=grpo_humanline, group_size=group_size)
    assert [group[0].reward for group in groups] == [1.0]


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.parquet"])
def test_file_kinds_give_the_same_pairs_and_row_numbers(load, tmp_path, name):
    rows = [{"prompt": [U(p)], "chosen": [A("a")], "rejected": [A("b")]} for p in ("Hi", "Bye", "é")]
    if name.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / name)
    else:
        text = "\ufeff" + "\r\n".join(json.dumps(row) for row in rows) + "\n\n"  # as Windows writes it
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    groups, told = load(tmp_path / name)
    assert groups == load(rows)[0] != [] and ": 3 of 3 rows; " in told


def test_a_configuration_of_a_data_set_follows_a_colon(tmp_path):
    card = "---\nconfigs:\n"
    for name in ("main", "socratic"):
        write_rows(tmp_path / f"{name}.jsonl", [{"problem": name}])
        card += f"- config_name: {name}\n  data_files: {name}.jsonl\n"
    (tmp_path / "README.md").write_text(card + "---\n")
    assert list(data.read_rows(f"{tmp_path}:socratic", "train")) == [{"problem": "socratic"}]
    with pytest.raises(InputError, match="split 'train_prefs': Unknown split"):
        list(data.read_rows(f"{tmp_path}:socratic", "train_prefs"))
    with pytest.raises(InputError, match="Config name is missing"):
        list(data.read_rows(str(tmp_path), "train"))


def test_a_problem_keeps_its_question_and_its_answer(load):
    rows = [PROBLEM | {"level": "Level 5"}, PROBLEM | {"problem": "2 " * 99}]
    groups, told = load(rows, script=grpo_math_humanline, system_prompt="", max_prompt_length=40)
    assert [(x.question, x.answer) for (x,) in groups] == [("1+1?", "2")]
    assert "1 skipped, the first is row 2: " in told
    rows = [
        {"question": "How many?", "answer": "He has 3 * 24 = <<3*24=72>>72.\n#### 72"},  # GSM8K
        {"problem": "How many?", "solution": "We get $\\boxed{72}$."},  # MATH
        {"problem": "How many?", "answer": 72},
    ]
    tokenizer = bytes_or_pieces("bytes")
    groups, _ = load(rows, tokenizer, [tokenizer.eos_token_id], script=grpo_math_humanline)
    assert [x.answer.strip() for (x,) in groups] == ["72", "We get $\\boxed{72}$.", "72"]
    assert all(x.question == "How many?" and x.prompt[0]["role"] == "system" for (x,) in groups)


def test_a_thought_that_the_template_has_opened_counts_for_the_rewards():
    """Without it the reward had a ceiling of 8.75, and a second <think> was paid."""
    tokenizer = bytes_or_pieces(
        "bytes", CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    )
    args = grpo_math_humanline.Args(system_prompt="")
    (problem,) = grpo_math_humanline.encode_row(args, tokenizer, {tokenizer.eos_token_id}, PROBLEM)
    assert problem.opening == "<think>\n"
    thinking = "so\n</think>\n<answer>\n2\n</answer>"
    rewards = []
    for text in (thinking, "<think>\n" + thinking):
        full = problem.opening + text
        rewards.append(grpo_math_humanline.format_reward(full) + grpo_math_humanline.tag_count_reward(full))
    assert rewards[0] == 2 and rewards[1] < 2
    args = grpo_math_humanline.Args()  # its system prompt spells the tags
    tokenizer.chat_template = CHATML
    (problem,) = grpo_math_humanline.encode_row(args, tokenizer, {tokenizer.eos_token_id}, PROBLEM)
    assert problem.opening == ""


# === Prompts alone ===

BROKEN = [  # completions that offline training skips or refuses
    {"chosen": "a", "rejected": "a"},
    {"chosen": "é", "rejected": "x" * 3000},
    {"chosen": "a"},
    {"chosen": 5, "rejected": [U("no answer")]},
    {"completion": "a", "label": None},
    {"completion": "é", "label": "maybe"},
    {"completions": ["a", "b"], "scores": [1, 1]},
    {"completions": ["a", "b"], "scores": [1]},
    {"completions": 5, "scores": None},
    {},
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_online_reads_prompts_whatever_completions_a_row_has(load, script):
    """Of 200 prompts 150 were dropped because of tied scores that were never used."""
    rows = [{"prompt": f"Hi {i}"} | completions for i, completions in enumerate(BROKEN)]
    groups, told = load(rows, script=importlib.import_module(script), online=True)
    assert [texts(group) for group in groups] == [
        [f"<s><|user|>Hi {i}</s><|assistant|>", ""] for i in range(len(BROKEN))
    ]
    assert f": {len(BROKEN)} of {len(BROKEN)} rows; " in told


@pytest.mark.parametrize("script", SCRIPTS)
def test_online_finds_the_prompt_of_conversations(load, script):
    row = {"chosen": [U("Hi"), A("a")]}
    groups, _ = load([row, row | {"prompt": "Bye"}], script=importlib.import_module(script), online=True)
    assert [texts(group) for group in groups] == [["<s><|user|>Hi</s><|assistant|>", ""]] * 2


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
def test_held_out_rows_keep_their_completions_or_have_none(tmp_path, one_rank, script, online):
    script = importlib.import_module(script)
    files = [
        write_rows(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate([ROWS, [PAIR, {"prompt": "A"}]])
    ]
    batch_size = 4 if script is kto_humanline else 2  # two groups
    args = script.Args(dataset=files[0], eval_dataset=files[1], batch_size=batch_size, online=online)
    groups, (pair, prompt), *_ = script.load_data(args, LETTERS, {EOS})
    assert [len(group) for group in groups] == ([1, 1] if online else [2, 2])
    assert texts(pair)[1:] == ["Hello!</s>", "Go.</s>"] and texts(prompt)[1:] == [""]


# === Bad input ===


@pytest.mark.parametrize(
    ("script", "row", "said"),
    [
        (
            dpo_humanline,
            {"question": "Hi", "chosen": "a", "rejected": "b"},
            "no value for 'prompt' in the columns question",
        ),
        (dpo_humanline, {"prompt": "Hi", "chosen": "a"}, "no value for 'rejected' in the columns prompt"),
        (kto_humanline, PAIR | {"rejected": None}, "no value for 'rejected' in the columns prompt"),
        (kto_humanline, LABELLED | {"label": None}, "label must be true or false"),
        (kto_humanline, LABELLED | {"label": "true"}, "label must be true or false"),
        (
            grpo_math_humanline,
            {"answer": "2"},
            "no problem (question) or answer (solution) in the columns ans",
        ),
        (dpo_humanline, PAIR | {"system": "Be brief"}, "the column 'system' would be ignored"),
    ],
)
def test_a_malformed_row_ends_the_run_with_file_and_row(load, script, row, said):
    """On all ranks, because they share the reading."""
    groups, told = load([FINE[script], row], script=script)
    assert groups == [] and re.search(f"^error: .*rows.jsonl, row 2: .*{re.escape(said)}", told), told


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.jsonl", None, "No such file"),
        ("absent.parquet", None, "No such file"),
        ("empty.jsonl", b"", "0 of 0 rows"),
        ("array.jsonl", b'[{"prompt": "Hi"}]', "row 1: a line must be one JSON object"),
        ("prompts.txt", b"Hi\n", ""),
    ],
)
def test_a_file_that_cannot_be_read_is_named(load, tmp_path, monkeypatch, name, content, said):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    groups, told = load(tmp_path / name)
    assert groups == [] and told.startswith("error: ") and str(tmp_path / name) in told and said in told
    assert "\n" not in told


def test_messages_need_a_template(load):
    _, told = load([PAIR | {"prompt": [U("Hi")]}], letters(template=None))
    assert "row 1: messages need a chat template, and the tokenizer has none: --chat-template" in told


def test_rows_that_do_not_fit_the_flags_say_both(tmp_path, one_rank):
    name = write_rows(tmp_path / "rows.jsonl", ROWS)
    for script, flags in ((dpo_humanline, {}), (grpo_humanline, {"group_size": 4})):
        args = script.Args(dataset=name, batch_size=16, **flags)
        with pytest.raises(
            InputError, match=f"--dataset {name}: 2 rows with .2. completions .*, but a step needs"
        ):
            script.load_data(args, LETTERS, {EOS})


def test_a_row_without_a_completion_does_not_train(tmp_path, one_rank):
    """KTO's labelled rows are single, too, so such a row ended the run in the step that drew it."""
    name = write_rows(tmp_path / "rows.jsonl", [LABELLED, {"prompt": "Hi", "response": "a", "label": True}])
    with pytest.raises(InputError, match=f"--dataset {name}: a row has neither a completion nor a pair"):
        kto_humanline.load_data(kto_humanline.Args(dataset=name, batch_size=2), LETTERS, {EOS})


def test_the_bar_counts_the_rows_of_all_chunks(load, monkeypatch):
    """It ended with the first one, so that a large data set was read in silence."""
    bars = []
    monkeypatch.setattr(data, "CHUNK", 1)
    monkeypatch.setattr(data, "tqdm", lambda *args, **options: bars.append(tqdm(*args, **options)) or bars[0])
    load([PAIR] * 3)
    assert bars[0].n == 3


# === Ranks ===


def load_shared(script, arguments):
    """Is a worker: writes what a rank has read into a file."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    name, folder = arguments
    data.CHUNK = 4
    args = script.Args(model=str(TOY / "policy"), max_prompt_length=64, max_length=128)
    tokenizer, eos_ids = data.load_tokenizer(args)
    counted = []

    def count(args, tokenizer, eos_ids, row):
        counted.append(row)
        return script.encode_row(args, tokenizer, eos_ids, row)

    groups = data.load_groups(args, tokenizer, eos_ids, name, "train", count)
    Path(folder, f"{rank}.txt").write_text(f"{len(counted)} {groups}")
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_share_the_rows(tmp_path, one_rank):
    """Rows keep their order, and every rank has encoded its part of them."""
    rows = read_rows(PAIRS)[:50]
    for number in (7, 33):
        rows[number]["prompt"] = "for " * 70
    name = write_rows(tmp_path / "rows.jsonl", rows)
    args = dpo_humanline.Args(model=str(TOY / "policy"), max_prompt_length=64, max_length=128)
    tokenizer, eos_ids = data.load_tokenizer(args)
    alone = data.load_groups(args, tokenizer, eos_ids, name, "train", dpo_humanline.encode_row)
    assert len(alone) == 48
    run_ranks(3, [[name, str(tmp_path)]], load_shared)
    shared = [(tmp_path / f"{rank}.txt").read_text().partition(" ") for rank in range(3)]
    assert [int(count) for count, _, _ in shared] == [17, 17, 16]
    assert {result for _, _, result in shared} == {str(alone)}


# === Where a completion begins and ends ===


def test_without_a_template_texts_are_joined_behind_one_bos(load):
    plain = letters(template=None)
    assert plain("x").input_ids[0] == BOS  # the tokenizer adds its own, and TEMPLATE writes another
    [pair], _ = load([PAIR], plain)
    assert texts(pair) == ["<s>Hi", "Hello!</s>", "Go.</s>"]


@pytest.mark.parametrize("end", ["</s>", "<|end|>", "<|end|>\n", "</s>\n \n", "<|end|>\n</s>", ""], ids=repr)
def test_a_completion_ends_with_the_end_of_turn_and_nothing_after(load, end):
    tokenizer = letters("{% for m in messages %}" + TURN + "{{ " + repr(end) + " }}{% endfor %}" + PROMPT)
    [pair], _ = load([PAIR], tokenizer, [EOS, END])
    first = "<|end|>" if end.startswith("<|end|>") else "</s>"
    assert texts(pair)[1:] == ["Hello!" + first, "Go." + first]


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("</s>{% endfor", "{% endfor"), None])
def test_a_truncated_completion_has_no_eos_token_and_every_other_ends_with_it(load, template):
    tokenizer = letters(template)
    prompt = len(load([PAIR], tokenizer)[0][0][0].prompt_ids)
    for room in range(1, 12):
        [pair], told = load([PAIR], tokenizer, max_length=prompt + room)
        for x, whole in zip(pair, ("Hello!</s>", "Go.</s>")):
            tokens = tokenizer(whole, add_special_tokens=False).input_ids
            assert [*x.completion_ids] == tokens[:room]
        assert f"; {(room < 4) + (room < 7)} of 2 completions truncated by --max-length\n" in told


def test_lengths_leave_room_for_a_token(load):
    length = len(load([PAIR])[0][0][0].prompt_ids)
    rows = [PAIR, PAIR | {"prompt": "Hi!"}, PAIR]
    for longest in ({"max_prompt_length": length}, {"max_length": length + 1}):
        groups, told = load(rows, **longest)
        assert len(groups) == 2 and "2 of 3 rows; 1 skipped, the first is row 2: prompt empty, or too" in told
    groups, told = load(rows, max_prompt_length=1)
    assert groups == [] and "0 of 3 rows; 3 skipped, the first is row 1: prompt empty, or too long" in told


def test_every_end_of_turn_of_the_model_is_known(tmp_path):
    shutil.copytree(TOY / "policy", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')

    def load(model, **flags):
        lengths = dict(max_prompt_length=64, max_length=128)  # the toy's positions
        return data.load_tokenizer(dpo_humanline.Args(model=str(model), **lengths, **flags))

    tokenizer, eos_ids = load(tmp_path / "model", eos_token="rose")
    assert eos_ids == {1, 7, tokenizer.convert_tokens_to_ids("rose")}
    assert load(TOY / "policy")[1] == {5}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"eos_token_id": [6, 7]}))
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.6}')
    assert load(tmp_path / "model")[1] == {5, 6, 7}
    (tmp_path / "model" / "generation_config.json").unlink()
    assert load(tmp_path / "model")[1] == {5, 6, 7}
    with pytest.raises(InputError, match="the tokenizer has no token <.absent.>: set one with --eos-token"):
        load(TOY / "policy", eos_token="<|absent|>")
    with pytest.raises(InputError, match="/absent"):
        load("/absent")


@pytest.mark.parametrize("unknown", [None, "<|im_end|>"])
@pytest.mark.parametrize("appended", ["<|im_end|>", "</s>"])
def test_what_the_tokenizer_appends_to_a_text_is_in_no_prompt(unknown, appended):
    """A </s> stood between prompt and completion if --eos-token named another token."""
    tokenizer = bytes_or_pieces("bytes", None)
    tokenizer.unk_token = unknown
    single = f"<s> $A {appended}"
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", appended)]
    post = processors.TemplateProcessing(single=single, special_tokens=ids)
    tokenizer.backend_tokenizer.post_processor = post
    assert tokenizer.decode(tokenizer("Why?").input_ids) == f"<s>Why?{appended}"
    # "?I" would be a token.
    assert encode(tokenizer, "Why?", "It is.") == ["<s>Why?", "It is.<|im_end|>"]
    assert encode(tokenizer, f"Why?{appended}", "It is.") == [f"<s>Why?{appended}", "It is.<|im_end|>"]


# === Tokens are the text ===

QUESTION, ANSWER = "Why is\nthe sky blue?", "Because \\frac{1}{2}\n\n  of it scatters."
NOT_ITS_TEXT = "its tokens are not its text: unknown characters, a special token that is split, or an EOS"


CHANGES = ["spaces", "backslashes", "line breaks", "runs of spaces", "case", "zero width", "digits"]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_tokenizer_may_choose_the_form_of_a_character(form):
    """Qwen's normalizes to NFC. Both forms are the same text by Unicode's definition."""
    tokenizer = bytes_or_pieces("bytes")
    tokenizer.backend_tokenizer.normalizer = getattr(normalizers, form)()
    for text in ("Zoe\u0308 naïve", "한국어"):
        prompt, answer = encode(tokenizer, text, text)
        assert unicodedata.normalize(form, text) in prompt and unicodedata.normalize(form, text) in answer


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("template", [CHATML, None])
def test_the_space_that_sentencepiece_adds_is_no_change(legacy, template):
    """legacy: also after every special token, as Llama 2's does."""
    tokenizer = bytes_or_pieces("pieces", template)
    raw = tokenizer.backend_tokenizer
    if legacy:
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        raw.pre_tokenizer = None
    answer = ANSWER if template else f" {ANSWER}"
    prompt, text = encode(tokenizer, QUESTION, answer)
    assert QUESTION in prompt and ANSWER in text


def test_a_special_token_may_absorb_the_white_space_beside_it():
    """Phi-3's do."""
    tokenizer = bytes_or_pieces("bytes")
    plain = encode(tokenizer, QUESTION, ANSWER)
    tokens = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in tokens["added_tokens"]:
        token["rstrip"] = token["lstrip"] = True
    raw = Tokenizer.from_str(json.dumps(tokens))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", bos_token="<s>")
    tokenizer.chat_template = CHATML
    expected = [plain[0].replace("<|im_end|>\n<|im", "<|im_end|><|im"), plain[1]]
    assert encode(tokenizer, QUESTION, ANSWER) == expected


def test_spaces_before_punctuation_are_no_change():
    """Some tokenizers' `decode` removes them by default, but their tokens keep them."""
    tokenizer = bytes_or_pieces("bytes")
    tokenizer.clean_up_tokenization_spaces = True
    assert len(encode(tokenizer, QUESTION, "Yes , it is . Do n't ask !")) == 2


def test_a_bos_token_that_is_also_the_unknown_token_is_no_change():
    """OPT's is one token for all."""
    tokenizer = bytes_or_pieces("bytes", None)
    end = tokenizer.eos_token
    tokenizer.bos_token = tokenizer.unk_token = end
    post = processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = post
    assert encode(tokenizer, "Who?", " Me.") == [f"{end}Who?", f" Me.{end}"]


def test_runs_of_spaces_may_be_added_tokens():
    """GPT-NeoX, Phi and OLMo have such tokens, and Gemma, whose rows with two spaces were skipped."""
    tokenizer = bytes_or_pieces("bytes")
    tokenizer.add_tokens(["  ", "    ", "\n\n"])
    gemma = bytes_or_pieces("pieces")
    gemma.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    gemma.backend_tokenizer.pre_tokenizer = None
    gemma.add_tokens([AddedToken("▁▁", normalized=True), "\n\n"])
    text = "def f():\n\n\n      return     1"
    assert gemma.convert_tokens_to_ids("▁▁") in gemma(text).input_ids
    for each in (tokenizer, gemma):
        assert encode(each, text, text)[1] == f"{text}<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, None])
def test_an_eos_token_that_a_completion_ends_with_is_its_end(template):
    tokenizer = bytes_or_pieces("bytes", template)
    whole, spelled = encode(tokenizer, "Weather?", "Cold.", "Cold.<|im_end|>")[1:]
    assert whole == spelled == "Cold.<|im_end|>"


# === Templates ===

TEMPLATES = files(pytest.importorskip("trl")) / "chat_templates"
NAMES = sorted(path.name for path in TEMPLATES.iterdir() if path.name.endswith(".jinja"))
CAPITAL, PARIS = "What is the capital of France?", "It is Paris, as ever.\nNo other."
# DeepSeek's and Nemotron's render an answered prompt in another way; the others want parts, not texts.
REFUSED = ("deepseek", "nemotron", "idefics", "llava", "smolvlm")


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("name", NAMES)
def test_under_any_template_tokens_are_those_of_the_whole_conversation(name, kind):
    tokenizer = bytes_or_pieces(kind, (TEMPLATES / name).read_text())
    if name.startswith(REFUSED):
        refused = "when an answer follows|changes or drops|no attribute 'text'"
        with pytest.raises((Exception, InputError), match=refused):
            encode_ids(tokenizer, CAPITAL, PARIS)
        return
    prompt_ids, ids = encode_ids(tokenizer, [U(CAPITAL)], PARIS)
    assert (prompt_ids,) == encode_ids(tokenizer, [U(CAPITAL)]) == encode_ids(tokenizer, CAPITAL)
    text = data.render(tokenizer, [U(CAPITAL), A(PARIS)])
    whole = tokenizer(text, add_special_tokens=False).input_ids
    *before_end, end = prompt_ids + ids
    assert before_end == whole[: len(before_end)] and end == tokenizer.eos_token_id
    assert PARIS in tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["qwen3_5_think.jinja", "qwen3_6.jinja"])
def test_a_thought_that_the_prompt_begins_is_part_of_the_completion(name):
    tokenizer = bytes_or_pieces("bytes", (TEMPLATES / name).read_text())
    thought = "<think>\nFrance.\n</think>\n\nParis."
    prompt, completion = encode(tokenizer, CAPITAL, thought)
    assert prompt.endswith("<think>\n")
    assert completion == thought.removeprefix("<think>\n") + tokenizer.eos_token


LOSSY = [
    "m.content | replace('\\\\', '')",
    "m.content | replace('\n', ' ')",
    "m.content | replace('  ', ' ')",
    "m.content | lower",
    "m.content.split('\n')[0]",
    "m.content | tojson",
]


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("lossy", LOSSY)
def test_a_template_that_changes_a_message_skips_the_row(lossy, role):
    """White space and backslashes were not compared."""
    template = CHATML.replace("{{ m.content }}", f"{{{{ ({lossy}) if m.role == '{role}' else m.content }}}}")
    prompt, answer = (ANSWER, "Yes") if role == "user" else ("Why?", ANSWER)
    assert len(encode(bytes_or_pieces("bytes"), prompt, answer)) == 2
    with pytest.raises(data.SkipRow, match="the chat template changes or drops the content of a message"):
        encode(bytes_or_pieces("bytes", template), prompt, answer)


KNOWN_ROLES = CHATML.replace("messages %}", "messages if m.role in ('user', 'assistant') %}")
LAST_TURN = CHATML.replace("in messages", "in messages[-1:]")
NO_THOUGHT = CHATML.replace("m.content }}", "m.content.split('</think>')[-1] }}")


@pytest.mark.parametrize(
    ("prompt", "answer", "template"),
    [
        ([S("Be brief"), U("Hi")], "Yes", KNOWN_ROLES),
        ([U("Hi"), {"role": "critic", "content": "Bad"}], "Yes", KNOWN_ROLES),
        ([U("Hi"), A("Yes?"), U("Why")], "So", LAST_TURN),
        ([U("Hi")], "<think>\nHm\n</think>\nYes", NO_THOUGHT),
        ([U("Hi")], "Yes", "<|im_start|><|im_end|>"),
    ],
)
def test_a_row_whose_text_the_template_loses_cannot_train(prompt, answer, template):
    with pytest.raises(data.SkipRow, match="the chat template changes or drops the content of a message"):
        encode(bytes_or_pieces("bytes", template), prompt, answer)


def test_a_row_that_the_template_refuses_is_skipped():
    """Gemma 2's ended the run at the first system message."""
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer = bytes_or_pieces("bytes", refusing + CHATML)
    assert len(encode(tokenizer, [U("Hi")], "Yes")) == 2
    with pytest.raises(data.SkipRow, match="the chat template refuses it: no system role"):
        encode(tokenizer, [S("Be brief"), U("Hi")], "Yes")


def test_a_process_without_torchrun_reads_all_rows(load, monkeypatch):
    """Of 2,000 rows the first was lost if a user chose a GPU by LOCAL_RANK alone."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert len(load([PAIR])[0]) == 1


def test_a_template_may_move_a_system_message_and_strip_the_ends_of_a_message():
    system_last = "{% for m in messages[1:] %}{{ m.content }}<|im_end|>{% endfor %}{{ messages[0].content }}"
    assert encode(bytes_or_pieces("bytes", system_last), [S("Be brief"), U("Hi")]) == ["Hi<|im_end|>Be brief"]
    tokenizer = bytes_or_pieces("bytes", CHATML.replace("m.content", "m.content | trim"))
    assert encode(tokenizer, f"\n{QUESTION}  ", f" {ANSWER}\n")[1] == f"{ANSWER}<|im_end|>"


def test_a_template_that_changes_the_prompt_once_answered_is_refused():
    """DeepSeek-R1-Distill's begins the answer with a thought, in the prompt alone."""
    thinking = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    changing = "{% if not add_generation_prompt %}for {% endif %}" + CHATML
    for template in (thinking, changing):
        with pytest.raises(InputError, match="renders a prompt differently when an answer follows"):
            encode(bytes_or_pieces("bytes", template), QUESTION, ANSWER)


def test_keys_that_arrow_fills_with_nulls_are_not_rendered():
    strict = "{% for m in messages if 'tool_calls' in m %}{{ raise_exception('one call only') }}{% endfor %}"
    tokenizer = bytes_or_pieces("bytes", strict + CHATML)
    null = {"tool_calls": None, "name": None}
    assert encode(tokenizer, [U("Hi") | null], "Yes") == encode(tokenizer, "Hi", "Yes")


def test_a_template_that_writes_the_date_writes_the_same_one_tomorrow():
    tokenizer = bytes_or_pieces("bytes", (TEMPLATES / "llama3_2.jinja").read_text())
    assert "Today Date: 26 Jul 2024" in data.render(tokenizer, [U("Hi")])


def test_of_several_named_templates_the_default_is_used():
    tokenizer = bytes_or_pieces("bytes", {"default": CHATML, "tool_use": "{{ tools }}"})
    assert encode(tokenizer, [U("Hi")], "Yes") == encode(bytes_or_pieces("bytes"), [U("Hi")], "Yes")


ENDS = [("<|im_end|>\n", False), ("", False), ("</s>", True), ("<|end_header_id|>\n<|im_end|>", True)]


# === Real tokenizers ===
# Those that mistral_common ships, with Mistral's and Zephyr's template, in three kinds: tekken (bytes,
# 131,072 tokens); SentencePiece as transformers converts it; SentencePiece as in the tokenizer.json files of
# Llama 2 and Zephyr, which begins the text after every special token with a space.

SOURCES = {
    "tekken": "tekken_240718.json",
    "sentencepiece": "mistral_instruct_tokenizer_240323.model.v3",
    "llama2": "tokenizer.model.v1",
}
ZEPHYR = (  # renders as zephyr-7b-beta's
    "{% for m in messages %}\n{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}"
    "\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
REAL = SHARED / "preferences" / "pairs.jsonl"
real = pytest.mark.skipif(not REAL.exists(), reason=f"the 299 real pairs are not at {REAL}")
TURNS = [S("Be brief."), U(CAPITAL), A("It is Paris."), U("Et de l'Italie?\n(en français)")]


def source(kind: str) -> str:
    return str(files("mistral_common") / "data" / SOURCES[kind])


def convert(kind: str, folder: Path):
    """Makes one of mistral_common's tokenizers transformers' own, with a chat template."""
    from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
    from transformers.integrations.mistral import convert_tekken_tokenizer

    if kind == "tekken":
        return convert_tekken_tokenizer(source(kind))  # with the template that mistral_common writes for it
    (folder / "tokenizer.model").write_bytes(Path(source(kind)).read_bytes())
    tokenizer = LlamaTokenizer.from_pretrained(folder, add_bos_token=True)
    (folder / "tokenizer.model").unlink()
    if kind == "sentencepiece":
        tokenizer.chat_template = convert_tokenizer_to_chat_template(source(kind))
        return tokenizer
    raw = tokenizer.backend_tokenizer
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.pre_tokenizer = None
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=ZEPHYR, **tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tokenizer of that kind, with the config of a model."""

    @cache
    def make(kind: str) -> Path:
        path = tmp_path_factory.mktemp(kind)
        tokenizer = convert(kind, path)
        MistralConfig(vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="module")
def real_tokenizer(folder):
    """A kind's tokenizer as the scripts load it, once."""
    return cache(lambda kind: data.load_tokenizer(dpo_humanline.Args(model=str(folder(kind))))[0])


def whole_ids(tokenizer, prompt, completion: str, begin: int) -> list[int]:
    """Returns the tokens of the whole conversation as transformers makes them.

    They end with the first EOS token at or after `begin`; those of a plain text, with one that is added.
    """
    if isinstance(prompt, str):
        return [*tokenizer(prompt + completion).input_ids, tokenizer.eos_token_id]
    ids = tokenizer.apply_chat_template([*prompt, A(completion)], tokenize=True, return_dict=False)
    return ids[: ids.index(tokenizer.eos_token_id, begin) + 1]


@real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "template"),
    [*((kind, "its own") for kind in SOURCES), ("tekken", "none"), ("sentencepiece", "none")],
)
def test_prompt_and_completion_are_the_whole_rendering_on_all_real_pairs(
    load, monkeypatch, real_tokenizer, kind, template
):
    tokenizer, rows = real_tokenizer(kind), read_rows(REAL)[::4]
    if template == "none":
        monkeypatch.setattr(tokenizer, "chat_template", None)
        for row in rows:
            turns = [f"{m['role'].title()}: {m['content']}" for m in row["prompt"]]
            row["prompt"] = "\n".join([*turns, "Assistant:\n"])
            row |= {key: row[key][0]["content"] for key in ("chosen", "rejected")}
    groups, told = load(rows, tokenizer, [2], max_prompt_length=20_000, max_length=40_000)
    assert "rows.jsonl: 75 of 75 rows;" in told
    for row, group in zip(rows, groups, strict=True):
        for example, completion in zip(group, (row["chosen"], row["rejected"]), strict=True):
            text = completion if isinstance(completion, str) else completion[0]["content"]
            whole = whole_ids(tokenizer, row["prompt"], text, len(example.prompt_ids))
            assert [*example.prompt_ids, *example.completion_ids] == whole
            assert tokenizer.decode(example.completion_ids).strip() == text.strip() + tokenizer.eos_token


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tekken", "sentencepiece"])
def test_tokens_are_those_of_mistrals_own_encoder(real_tokenizer, kind):
    """An oracle without templates. Runs of spaces are left out: transformers' conversion of SentencePiece
    splits them otherwise ("▁▁(" is ▁▁ and ( there, ▁ and ▁( here)."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    tokenizer, rows = real_tokenizer(kind), []
    encoder = MistralTokenizer.from_file(source(kind), mode=ValidationMode.finetuning)
    if REAL.exists():
        rows = [(row["prompt"], row["chosen"][0]["content"]) for row in read_rows(REAL)]
        rows = [row for row in rows if kind == "tekken" or "  " not in str(row)]
        assert len(rows) > 200
    for prompt, completion in [(TURNS, "Rome, bien sûr."), *rows]:
        prompt_ids, ids = encode_ids(tokenizer, prompt, completion)
        answered = ChatCompletionRequest(messages=[*prompt, A(completion)])
        assert prompt_ids + ids == encoder.encode_chat_completion(answered).tokens


@pytest.mark.slow
def test_a_folder_with_mistrals_own_file_has_the_tokens_of_its_tokenizer_json(folder, tmp_path):
    """With mistral_common installed, as vLLM has it, transformers would take tekken.json and no template."""
    for path in [*folder("tekken").iterdir(), Path(source("tekken"))]:
        (tmp_path / path.name.replace("tekken_240718", "tekken")).symlink_to(path)
    expected, _ = data.load_tokenizer(dpo_humanline.Args(model=str(folder("tekken"))))
    tokenizer, eos_ids = data.load_tokenizer(dpo_humanline.Args(model=str(tmp_path)))
    assert eos_ids == {2} and tokenizer.eos_token == "</s>"
    assert encode_ids(tokenizer, TURNS) == encode_ids(expected, TURNS)
