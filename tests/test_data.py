"""From rows to token ids: what is read, what is dropped, where a completion begins and ends.

`letters` is a tokenizer with one token per character, so that decoded ids show exactly what is trained on.
"""

import contextlib
import gzip
import io
import json
import re
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from conftest import ROOT, SHARED, TOY, run_ranks, tokens_of
from tokenizers import Tokenizer, decoders, models, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import dpo_humanline
import kto_humanline
from dpo_humanline import Args
from utils import Example, encode_prompt, load_tokens, pad_batch, token_logps

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


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


@pytest.fixture(autouse=True)
def group_that_stays(monkeypatch):
    # An error would end it for all tests.
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)


def read(path, tokenizer, eos_ids=frozenset({EOS}), script=dpo_humanline, **args):
    """Groups of a file, and what is said about them."""
    sizes = (2,) if script is dpo_humanline else (1, 2)
    args = script.Args(**args)
    tokens = tokens_of(tokenizer, set(eos_ids))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        groups, digest = script.load_groups(args, "--dataset", str(path), "train", tokens, sizes)
    assert re.fullmatch("[0-9a-f]{64}", digest)
    return groups, said.getvalue()


@pytest.fixture
def load(tmp_path):
    """Like `read`, for rows."""

    def run(rows: list[dict], tokenizer=None, *rest, **args):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read(path, tokenizer or letters(), *rest, **args)

    return run


def texts(tokenizer, pair) -> tuple[str, str, str]:
    assert pair[0].prompt_ids == pair[1].prompt_ids and [x.reward for x in pair] == [1, 0]
    return tuple(map(tokenizer.decode, (pair[0].prompt_ids, *(x.completion_ids for x in pair))))


# --- formats ---

PAIRS = [("Hi", "Hello!", "Go."), ("Bye", "See you", "Good")]
U, A = (lambda text, role=role: message(role, text) for role in ("user", "assistant"))


@pytest.mark.parametrize(
    "row",
    [
        lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r},
        lambda p, c, r: {"prompt": [U(p)], "chosen": [A(c)], "rejected": [A(r)]},
        lambda p, c, r: {"prompt": p, "chosen": [A(c)], "rejected": [A(r)]},
        lambda p, c, r: {"prompt": [U(p)], "chosen": c, "rejected": r},
        lambda p, c, r: {"chosen": [U(p), A(c)], "rejected": [U(p), A(r)]},
        lambda p, c, r: {"prompt": p, "chosen": [U(p), A(c)], "rejected": [U(p), A(r)], "score_chosen": 0.5},
        lambda p, c, r: {"prompt": [U(p)], "chosen": [U(p), A(c)], "rejected": [U(p), A(r)]},
    ],
    ids=[
        "strings",
        "messages",
        "string+messages",
        "messages+string",
        "shared_prefix",
        "prompt_repeats_prefix",
        "messages_repeat",
    ],
)
def test_paired_formats_give_the_same_pairs(load, row):
    pairs, told = load([row(*pair) for pair in PAIRS])
    assert [texts(letters(), pair) for pair in pairs] == [
        ("<s><|user|>Hi</s><|assistant|>", "Hello!</s>", "Go.</s>"),
        ("<s><|user|>Bye</s><|assistant|>", "See you</s>", "Good</s>"),
    ]
    assert [(x.row, x.prompt) for pair in pairs for x in pair] == [(1, [U("Hi")])] * 2 + [(2, [U("Bye")])] * 2
    assert "2 rows, 0 dropped" in told


def as_string(text: str, role) -> str:
    return text


def as_messages(text: str, role) -> list[dict]:
    return [role(text)]


@pytest.mark.parametrize("kind", [as_string, as_messages])
def test_unpaired_rows_are_the_halves_of_pairs(load, kind):
    paired, _ = load([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS])
    rows = [(p, c, label) for p, *both in PAIRS for c, label in zip(both, (True, False))]
    rows = [{"prompt": kind(p, U), "completion": kind(c, A), "label": label} for p, c, label in rows]
    groups, told = load(rows, script=kto_humanline)
    assert [x._replace(row=(x.row + 1) // 2) for (x,) in groups] == [x for pair in paired for x in pair]
    assert [x.row for (x,) in groups] == [1, 2, 3, 4] and "4 rows, 0 dropped" in told


def test_messages_shared_over_several_turns_are_the_prompt(load):
    turns = [message("system", "Be brief"), U("Hi"), A("Yes?"), U("Why")]
    implicit = {"chosen": [*turns, A("So")], "rejected": [*turns, A("No")]}
    pairs = [load([row])[0] for row in (implicit, implicit | {"prompt": "Hi"}, implicit | {"prompt": turns})]
    explicit, _ = load([{"prompt": turns, "chosen": [A("So")], "rejected": [A("No")]}])
    assert pairs == [explicit] * 3
    whole = "<s><|system|>Be brief</s><|user|>Hi</s><|assistant|>Yes?</s><|user|>Why</s><|assistant|>"
    assert texts(letters(), explicit[0]) == (whole, "So</s>", "No</s>")


def test_a_user_turn_that_prompt_and_completions_share_is_there_once():
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    good, bad = ({"role": "assistant", "content": text} for text in ("good", "bad"))
    row = {"prompt": [system, user], "chosen": [user, good], "rejected": [user, bad]}
    assert dpo_humanline.read_pair(row) == ([system, user], [[good], [bad]], [1.0, 0.0])


def test_prompt_that_completions_do_not_repeat_is_never_lost(load):
    turns = [A("Yes?"), U("Why")]
    lost = {"prompt": [U("Hi")], "chosen": [*turns, A("So")], "rejected": [*turns, A("No")]}
    pairs, _ = load([lost, {"prompt": [U("Hi")], "chosen": [A("So")], "rejected": [A("No")]}])
    assert all(x.prompt[0] == U("Hi") for pair in pairs for x in pair)


def test_prompts_are_those_of_trl(load):
    trl = pytest.importorskip("trl.data_utils")
    explicit = [{"prompt": [U(p)], "chosen": [A(c)], "rejected": [A(r)]} for p, c, r in PAIRS]
    implicit = [{"chosen": [U(p), A(c)], "rejected": [U(p), A(r)]} for p, c, r in PAIRS]
    assert [trl.maybe_extract_prompt(row) for row in implicit] == explicit
    unpaired = list(trl.unpair_preference_dataset(datasets.Dataset.from_list(explicit)))
    assert load(explicit) == load(implicit)
    halves = [x for (x,) in load(unpaired, script=kto_humanline)[0]]
    pairs = [x for side in zip(*load(explicit)[0]) for x in side]  # TRL puts the chosen ones first
    assert [x[1:] for x in halves] == [x[1:] for x in pairs]


@pytest.mark.parametrize("name", ["r.json", "r.jsonl", "r.json.gz", "r.jsonl.gz", "r.parquet"])
def test_file_kinds_give_the_same_pairs(load, tmp_path, name):
    rows = [{"prompt": [U(p)], "chosen": [A(c)], "rejected": [A(r)]} for p, c, r in PAIRS]
    if name.startswith("r.jsonl"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        text = json.dumps(rows, indent=1)
    if name.endswith(".parquet"):
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    pairs, _ = read(tmp_path / name, letters())
    assert pairs == load(rows)[0] and len(pairs) == 2


@pytest.mark.parametrize("before", ["\n", " ", "\ufeff"], ids=["line break", "space", "byte order mark"])
@pytest.mark.parametrize("name", ["r.json", "r.jsonl"])
def test_what_stands_before_the_first_row_does_not_matter(load, tmp_path, before, name):
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]
    text = json.dumps(rows) if name == "r.json" else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_text(before + text, encoding="utf-8")
    assert [pair[0].prompt for pair in read(tmp_path / name, letters())[0]] == [[U("Hi")], [U("Bye")]]


def test_a_data_set_is_known_by_flag_name_and_content(tmp_path):
    """What a later resume compares."""
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]
    for name, some in (("whole", rows), ("copy", rows), ("part", rows[:1])):
        (tmp_path / f"{name}.json").write_text(json.dumps(some))
    whole, copy, part = (f"{tmp_path}/{name}.json" for name in ("whole", "copy", "part"))

    def load_data(held_out: str) -> tuple:
        args = Args(dataset=whole, eval_dataset=held_out)
        return dpo_humanline.load_data(args, tokens_of(letters(), {EOS}), (2,), (0, 2))

    groups, held_out, hashes = load_data(copy)
    assert [len(groups), len(held_out)] == [2, 2]
    assert list(hashes) == [f"--dataset {whole}", f"--eval-dataset {copy}"]
    digest = hashes[f"--dataset {whole}"]
    assert hashes[f"--eval-dataset {copy}"] == digest
    groups, held_out, hashes = load_data(part)
    assert [len(groups), len(held_out)] == [2, 1]
    assert hashes[f"--dataset {whole}"] == digest != hashes[f"--eval-dataset {part}"]
    assert load_data("")[1:] == ([], {f"--dataset {whole}": digest})


# --- where a completion begins and ends ---

ROW = {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go."}


def test_plain_text_is_followed_by_eos_when_there_is_no_template(load):
    [pair], _ = load([ROW], letters(template=None))
    assert texts(letters(), pair) == ("<s>Hi", "Hello!</s>", "Go.</s>") and pair[0].prompt == "Hi"


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "plain"])
def test_one_bos_however_many_would_write_it(load, template):
    tokenizer = letters(template)
    assert tokenizer("x").input_ids[0] == BOS  # the tokenizer adds its own, and TEMPLATE writes another
    [pair], _ = load([ROW], tokenizer)
    assert [x.prompt_ids.count(BOS) for x in pair] == [1, 1] and pair[0].prompt_ids[0] == BOS
    assert not any(BOS in x.completion_ids for x in pair)


@pytest.mark.parametrize(
    "end",
    ["</s>", "<|end|>", "<|end|>\n", "</s>\n \n", "<|end|>\n</s>", ""],
    ids=lambda end: repr(end) if end else "none",
)
def test_completion_ends_with_the_end_of_turn_and_nothing_after(load, end):
    tokenizer = letters("{% for m in messages %}" + TURN + "{{ " + repr(end) + " }}{% endfor %}" + PROMPT)
    [pair], _ = load([ROW], tokenizer, {EOS, END})
    first = "<|end|>" if end.startswith("<|end|>") else "</s>"
    assert texts(tokenizer, pair)[1:] == ("Hello!" + first, "Go." + first)


def test_eos_written_only_after_the_last_turn_is_not_trained_on(load):
    tokenizer = letters(
        "{% for m in messages %}"
        + TURN
        + "<|end|>\n{% endfor %}"
        + PROMPT.replace("{% endif", "{% else %}</s>{% endif")
    )
    [pair], _ = load([ROW], tokenizer, {EOS, END})  # the template of Phi-3
    assert texts(tokenizer, pair) == ("<|user|>Hi<|end|>\n<|assistant|>", "Hello!<|end|>", "Go.<|end|>")


def test_end_of_turn_inside_the_completion_drops_the_row_and_is_counted(load):
    [pair], told = load([ROW | {"chosen": "a</s>b"}, ROW, ROW | {"rejected": "a</s>b"}])
    assert pair[0].row == 2 and texts(letters(), pair)[1:] == ("Hello!</s>", "Go.</s>")
    assert told.endswith("1 rows, 2 dropped; 2 end of turn inside the completion: lines 1, 3\n")


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("</s>{% endfor", "{% endfor"), None])
def test_cut_completion_has_no_end_of_turn_and_every_other_ends_with_it(load, template):
    tokenizer = letters(template)
    prompt = len(load([ROW], tokenizer)[0][0][0].prompt_ids)
    for room in range(1, 12):
        [pair], _ = load([ROW], tokenizer, max_length=prompt + room)
        for x, whole in zip(pair, ("Hello!</s>", "Go.</s>")):
            tokens = tokenizer(whole, add_special_tokens=False).input_ids
            assert x.completion_ids == tokens[:room]
            assert x.completion_ids.count(EOS) == (1 if room >= len(tokens) else 0)


def test_template_that_changes_the_prompt_once_answered_is_refused(load, capsys):
    with pytest.raises(SystemExit):
        load([ROW], letters("{% if not add_generation_prompt %}Answered: {% endif %}" + TEMPLATE))
    said = capsys.readouterr().err
    assert "line 1" in said
    assert "renders a prompt differently once it is answered: pass --chat-template" in said


def test_every_end_of_turn_id_of_the_model_is_known(tmp_path):
    shutil.copytree(TOY / "policy", tmp_path / "model")
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    generation["eos_token_id"] = [1, 7]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    args = Args(model=str(tmp_path / "model"), eos_token="rose")
    tokens = load_tokens(args, AutoConfig.from_pretrained(args.model))
    assert tokens.eos_ids == {1, 7, 5, tokens.tokenizer.convert_tokens_to_ids("rose")} and tokens.pad_id == 0


def test_tokenizer_without_a_pad_token_pads_with_its_end_of_turn(tmp_path):
    shutil.copytree(TOY / "policy", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    args = Args(model=str(tmp_path / "model"))
    assert load_tokens(args, AutoConfig.from_pretrained(args.model)).pad_id == 5


# --- what is dropped ---


def test_dropped_rows_are_counted_by_reason_and_the_others_keep_order_and_line(load):
    good = [{"prompt": word, "chosen": "yes", "rejected": "no"} for word in ("one", "two", "three")]
    two_turns = [A("yes"), U("and?"), A("no")]
    rows = [
        good[0] | {"chosen": ""},
        good[0],
        good[0] | {"rejected": " \n"},
        good[0] | {"chosen": "no"},
        good[1],
        good[0] | {"prompt": "x" * 30},
        good[0] | {"chosen": two_turns},
        good[0] | {"rejected": [U("no")]},
        # equal once they are cut:
        good[0] | {"chosen": "the same beginning, then a", "rejected": "the same beginning, then b"},
        good[0] | {"chosen": [A("")]},
        good[2],
    ]
    for i, row in enumerate(rows):
        rows[i] = dict(row)
        for side in ("chosen", "rejected"):
            if isinstance(row[side], str):
                rows[i][side] = [A(row[side])]
    pairs, told = load(rows, max_prompt_length=20, max_length=26)
    assert [(x.row, x.prompt[0]["content"]) for x, _ in pairs] == [(2, "one"), (5, "two"), (11, "three")]
    assert "3 rows, 8 dropped" in told
    for reason, lines in {
        "completion empty or not one assistant message": [1, 3, 7, 8, 10],
        "chosen equals rejected": [4, 9],
        "prompt empty or longer than 20 tokens (raise --max-prompt-length, --max-length)": [6],
    }.items():
        named = re.escape(f"; {len(lines)} {reason}: lines {', '.join(map(str, lines))}")
        assert re.search(named + "[;\n]", told)


def test_prompt_of_exactly_the_longest_length_is_kept(load):
    length = len(load([ROW])[0][0][0].prompt_ids)
    pairs, _ = load([ROW, ROW | {"prompt": "Hi!"}, ROW], max_prompt_length=length)
    assert [x.row for x, _ in pairs] == [1, 3]


# --- prompts, masks ---


def examples(*sequences) -> list[Example]:
    return [Example(row, "", *sequence) for row, sequence in enumerate(sequences, 1)]


def test_mask_is_one_at_completion_tokens_whatever_the_pad_id():
    sequences = examples(([7, 5, 8], [9, 5]), ([7], [5]), ([5, 5], [5, 6, 5]))
    for pad_id in (0, 5, 9):
        input_ids, mask = pad_batch(sequences, pad_id, torch.device("cpu"))
        assert mask.tolist() == [[0, 0, 0, 1, 1], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1]]
        assert input_ids.tolist() == [[7, 5, 8, 9, 5], [7, 5, *[pad_id] * 3], [5, 5, 5, 6, 5]]


def test_padding_with_the_end_of_turn_id_changes_no_log_probability():
    model = AutoModelForCausalLM.from_pretrained(TOY / "policy", dtype=torch.float64)
    sequences = examples(([3, 6, 7, 5, 4], [19, 20, 5]), ([4], [5]), ([3, 6, 4], [21, 5]))
    with torch.no_grad():
        by_end = token_logps(model, *pad_batch(sequences, 5, torch.device("cpu")))
        by_pad = token_logps(model, *pad_batch(sequences, 0, torch.device("cpu")))
    assert torch.equal(by_end, by_pad)
    assert [(row != 0).sum().item() for row in by_end] == [3, 1, 2]  # the real end-of-turn tokens are scored


def test_log_probability_of_exactly_zero_stays_in_the_mask():
    config = AutoConfig.from_pretrained(TOY / "policy", vocab_size=1, pad_token_id=None, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config)  # one word, so every word is certain
    input_ids, mask = pad_batch(examples(([0, 0], [0, 0, 0]), ([0], [0])), 0, torch.device("cpu"))
    logps = token_logps(model, input_ids, mask)
    assert logps.shape == mask.shape and not logps.any()
    assert mask.sum(-1).tolist() == [3, 1]


# --- real data ---

real = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real data in {SHARED}")
CHATML = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"


@pytest.fixture
def stories(tmp_path):
    """The real tokenizer, which puts BOS first and has no template and no pad token, with a template."""
    template = "{{ bos_token }}" + CHATML + PROMPT.replace("|>{% e", "|>\n{% e")
    (tmp_path / "template.jinja").write_text(template)
    args = Args(model=str(SHARED / "model-stories260K"), chat_template=str(tmp_path / "template.jinja"))
    return load_tokens(args, AutoConfig.from_pretrained(args.model))


@real
@pytest.mark.parametrize(
    "name, script, rows",
    [("pairs", dpo_humanline, 299), ("pairs", kto_humanline, 299), ("unpaired", kto_humanline, 300)],
)
def test_every_real_row_is_kept_or_counted(stories, name, script, rows):
    tokenizer, eos_ids, pad_id, *_ = stories
    groups, told = read(SHARED / "preferences" / f"{name}.jsonl", tokenizer, eos_ids, script)
    kept, dropped = map(int, re.search(r"(\d+) rows, (\d+) dropped", told).groups())
    assert kept == len(groups) > 100 and kept + dropped == rows and pad_id == tokenizer.eos_token_id
    numbers = [group[0].row for group in groups]
    assert numbers == sorted(set(numbers))
    assert {len(group) for group in groups} == {2 if name == "pairs" else 1}
    for x in (x for group in groups for x in group):
        assert x.prompt_ids == encode_prompt(tokenizer, x.prompt)
        assert x.prompt_ids[0] == tokenizer.bos_token_id and x.prompt_ids.count(tokenizer.bos_token_id) == 1
        assert tokenizer.bos_token_id not in x.completion_ids
        cut = x.length == Args.max_length and x.completion_ids[-1] not in eos_ids
        ends = [] if cut else x.completion_ids[-1:]
        assert [token for token in x.completion_ids if token in eos_ids] == ends


def test_a_run_begins_with_tokens_and_ends_with_an_output_for_every_instruction(tmp_path):
    """An `instruction` is a prompt; outputs.json has them in their order."""
    path, data = tmp_path / "instructions.jsonl", str(ROOT / "tests" / "pairs.jsonl")
    words = ["king", "queen", "clerk"]
    rows = [{"instruction": f"for {word}", "output": "x"} for word in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--num-steps", "1", "--checkpoint-every", "0", "--dataset", data, "--eval-dataset", str(path)]
    output = run_ranks(1, [[*flags, "--output-dir", str(tmp_path / "run")]])
    assert f"--eval-dataset {path}: 3 rows, 0 dropped\n" in output
    outputs = json.loads((tmp_path / "run" / "outputs.json").read_text())
    assert [row["instruction"] for row in outputs] == [f"for {word}" for word in words]
    first = json.loads(Path(data).read_text().splitlines()[0])
    lines = [line for line in output.splitlines() if line.startswith(("end", "a prompt", "its", "and"))]
    said = dict(line.split(": ", 1) for line in lines)
    prompt = [repr(word) for word in ["<|user|>", *first["prompt"].split(), "<|end|>", "<|assistant|>"]]
    chosen = [repr(word) for word in first["chosen"].split()]
    assert said == {
        "end of turn": "'<|end|>'",
        "a prompt ends": " ".join(prompt),
        "its completion begins": " ".join(chosen[:8]),
        "and ends": " ".join([*chosen[-3:], "'<|end|>'"]),
    }
