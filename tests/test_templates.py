"""Chat templates of real models (those in TRL's package) and what text in the data may do to them.

Two tokenizers stand for the two kinds there are: bytes, as in Llama 3 and Qwen, and pieces whose first one
depends on what stands before it, as in Llama 2 and Mistral.
"""

import json
from importlib.resources import files

import pytest
import torch
from conftest import PAIRS, TOY, refused, run_ranks, tokens_of
from test_reliability import SHORT, changed_policy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from utils import Example, encode_completion, encode_prompt, load_reward_model, render, reward_scores

TEMPLATES = files("trl") / "chat_templates"
FAMILIES = {  # template, what begins a turn, what ends one
    "qwen2_5": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|assistant|>", "<|end|>"),
}
QUESTION, ANSWER = "What is the capital of France?", "It is Paris, as ever.\nNo other."


def bytes_or_pieces(kind: str, family: str) -> PreTrainedTokenizerFast:
    begin, end = FAMILIES[family]
    special = ["<s>", "</s>", begin, end, "<|end_header_id|>", "<bos>"]
    if kind == "bytes":
        vocab = {token: i for i, token in enumerate(pre_tokenizers.ByteLevel.alphabet())}
        raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
    else:
        letters = "▁\n<>|_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz?.,0123456789"
        merges = [("▁", letter) for letter in letters[1:]]
        vocab = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
        raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        raw.decoder = decoders.Metaspace()
    tokens = {"bos_token": "<s>", "eos_token": end, "additional_special_tokens": special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **tokens)
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return tokenizer


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_is_the_end_of_the_conversation_as_the_model_reads_it(family, kind):
    tokenizer = bytes_or_pieces(kind, family)
    prompt = [{"role": "user", "content": QUESTION}]
    ids, problem = encode_completion(
        tokens_of(tokenizer, {tokenizer.eos_token_id}), prompt, encode_prompt(tokenizer, prompt), ANSWER
    )
    text = render(tokenizer, [*prompt, {"role": "assistant", "content": ANSWER}])
    whole = tokenizer(text, add_special_tokens=False).input_ids
    begin = len(encode_prompt(tokenizer, prompt))
    end = whole.index(tokenizer.eos_token_id, begin) + 1
    assert problem == "" and whole[:end] == encode_prompt(tokenizer, prompt) + ids
    assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids[:-1]).strip() == ANSWER


def test_an_end_that_the_tokenizer_adds_does_not_end_the_prompt():
    tokenizer = bytes_or_pieces("bytes", "gemma")
    tokenizer.chat_template, end = None, tokenizer.eos_token
    single = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)])
    tokenizer._tokenizer.post_processor = processors.Sequence([tokenizer._tokenizer.post_processor, single])
    assert tokenizer(QUESTION).input_ids[-1] == tokenizer.eos_token_id
    prompt = encode_prompt(tokenizer, QUESTION)
    ids, _ = encode_completion(tokens_of(tokenizer, {tokenizer.eos_token_id}), QUESTION, prompt, ANSWER)
    assert tokenizer.decode([*prompt, *ids]) == QUESTION + ANSWER + end


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_end_of_turn_spelt_inside_a_completion_is_a_problem(family, kind):
    tokenizer = bytes_or_pieces(kind, family)
    prompt, tokens = [{"role": "user", "content": QUESTION}], tokens_of(tokenizer, {tokenizer.eos_token_id})
    told = f"It is{FAMILIES[family][1]} Paris"
    ids = encode_prompt(tokenizer, prompt)
    assert encode_completion(tokens, prompt, ids, told) == ([], "end of turn inside the completion")
    nothing_behind = f"Paris{FAMILIES[family][1]}"
    assert encode_completion(tokens, prompt, ids, nothing_behind)[1] == ""


def test_a_template_that_loses_text_is_told():
    template = TEMPLATES / "idefics3.jinja"
    said = refused([*SHORT, "--model", str(TOY / "policy"), "--chat-template", str(template)])
    first = "lines 1, 2, 3, 4, 5, 6, 7, 8, 9 …"
    assert f"0 rows, 128 dropped; 128 text changed by the chat template: {first}; none is left" in said


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_what_a_template_raises_names_file_and_row(tmp_path, template, said):
    (tmp_path / "own.jinja").write_text(template)
    told = refused([*SHORT, "--model", str(TOY / "policy"), "--chat-template", str(tmp_path / "own.jinja")])
    assert told.startswith(f"error: --dataset {PAIRS}, line 1: the chat template cannot render it: ")
    assert said in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("drop", ["m.content[:-3]", "m.content.split()[0]", "m.content | upper"])
def test_a_judge_whose_template_changes_an_unfinished_message_still_scores(one_rank, drop):
    model, tokenizer = load_reward_model(str(TOY / "reward_model"), torch.float32, torch.device("cpu"), False)
    tokenizer.chat_template = "{% for m in messages %}{{ " + drop + " + ' ' + '<|end|>' }}{% endfor %}"
    sample = Example(1, "for king", [], text="rose iris lily", finished=False)
    scores = reward_scores(model, tokenizer, [sample])
    assert scores.isfinite().all()


# "end", "<" and "|" stand in the end of the turn too.
@pytest.mark.parametrize("completion", ["rose iris", "end", "<", "|"])
def test_an_unfinished_message_is_scored_without_the_end_of_its_turn(one_rank, completion):
    model, tokenizer = load_reward_model(str(TOY / "reward_model"), torch.float32, torch.device("cpu"), False)
    seen, forward = [], model.forward
    model.forward = lambda input_ids, **how: seen.append(input_ids) or forward(input_ids=input_ids, **how)
    for finished in (True, False):
        reward_scores(model, tokenizer, [Example(1, "for king", [], text=completion, finished=finished)])
    whole, cut = (ids[0].tolist() for ids in seen)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert cut == whole[: len(cut)] and whole[len(cut) :] == [end]


# --- tokens that the embedding does not have ---


def tokenizer_with(folder, **tokens):
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    tokenizer.add_special_tokens(tokens)
    tokenizer.save_pretrained(folder)
    return len(tokenizer) - 1


def test_a_token_beyond_the_embedding_is_named_with_its_row(tmp_path):
    model = changed_policy(tmp_path / "model")
    rows = [json.loads(line) for line in open(PAIRS).read().splitlines()[:8]]
    rows[5]["chosen"] += " <extra>"
    new = tokenizer_with(tmp_path / "model", additional_special_tokens=["<extra>"])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refused([*SHORT, "--model", model, "--dataset", str(tmp_path / "rows.jsonl")])
    assert f"line 6: token '<extra>' has the id {new}, and the embedding has {new} rows" in said


def test_an_end_of_turn_beyond_the_embedding_is_named(tmp_path):
    model = changed_policy(tmp_path / "model")
    new = tokenizer_with(tmp_path / "model", eos_token="<over>")
    said = refused([*SHORT, "--model", model])
    assert f"--model {model}: token '<over>' has the id {new}" in said


def test_a_padding_token_beyond_the_embedding_changes_nothing(tmp_path):
    model = changed_policy(tmp_path / "model")
    tokenizer_with(tmp_path / "model", pad_token="<padding>")
    runs = [
        [*SHORT, "--eval-dataset", PAIRS, "--eval-samples", "8", "--model", name]
        for name in (str(TOY / "policy"), model)
    ]
    run_ranks(1, [[*run, "--output-dir", str(tmp_path / str(i))] for i, run in enumerate(runs)])
    for file in ("final/model.safetensors", "summary.json"):
        assert (tmp_path / "0" / file).read_bytes() == (tmp_path / "1" / file).read_bytes()
