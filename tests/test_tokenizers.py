"""Tokens are the model's own: the tokenizers that mistral_common ships, with Mistral's and Zephyr's template.

Three kinds: tekken (bytes, 131,072 tokens); SentencePiece as transformers converts it; SentencePiece as in
the tokenizer.json files of Llama 2 and Zephyr, which begins the text after every special token with a space.
"""

import json
import math
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from conftest import SCRIPTS, SHARED, metrics, parse_args, run_ranks, tokens_of
from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizers import normalizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaTokenizer,
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.integrations.mistral import convert_tekken_tokenizer

import dpo_humanline
from utils import encode_completion, encode_prompt, load_tokens, render

SOURCES = {
    "tekken": "tekken_240718.json",
    "sentencepiece": "mistral_instruct_tokenizer_240323.model.v3",
    "llama2": "tokenizer.model.v1",
}
ZEPHYR = (  # zephyr-7b-beta's
    "{% for message in messages %}"
    "\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}"
    "\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}"
    "\n{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n' + message['content'] + eos_token }}"
    "\n{% endif %}"
    "\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
REAL = SHARED / "preferences" / "pairs.jsonl"
real = pytest.mark.skipif(not REAL.exists(), reason=f"the 299 real pairs are not at {REAL}")
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "It is Paris."},
    {"role": "user", "content": "Et de l'Italie?\n(en français)"},
]


def source(kind: str) -> str:
    return str(files("mistral_common") / "data" / SOURCES[kind])


def convert(kind: str, folder: Path):
    """One of mistral_common's tokenizers as transformers' own, with a chat template."""
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
def model(tmp_path_factory):
    """The folder of a tiny random policy with the tokenizer of that kind; judge/ in it has the same."""
    made = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = folder = tmp_path_factory.mktemp(kind)
            tokenizer = convert(kind, folder)
            shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
            shape |= dict(num_key_value_heads=1, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2)
            torch.manual_seed(0)
            MistralForCausalLM(MistralConfig(**shape)).save_pretrained(folder)
            judge = MistralForSequenceClassification(MistralConfig(**shape, num_labels=1, pad_token_id=2))
            judge.save_pretrained(folder / "judge")
            for part in (folder, folder / "judge"):
                tokenizer.save_pretrained(part)
        return made[kind]

    return make


@pytest.fixture(scope="module")
def load(model):
    """A kind's tokenizer as the scripts load it, once."""
    return cache(lambda kind: AutoTokenizer.from_pretrained(model(kind)))


def whole_ids(tokenizer, prompt, completion: str, begin: int) -> list[int]:
    """Tokens of the whole conversation as transformers makes them, up to and with the first end of turn at or
    after `begin`; or of the whole text, with one added."""
    if isinstance(prompt, str):
        return [*tokenizer(prompt + completion).input_ids, tokenizer.eos_token_id]
    messages = [*prompt, {"role": "assistant", "content": completion}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    return ids[: ids.index(tokenizer.eos_token_id, begin) + 1]


def read_pairs(capsys, tokenizer, name: Path) -> list[tuple]:
    """The groups of a file, none of them dropped or cut."""
    args = dpo_humanline.Args(max_prompt_length=20000, max_length=40000)
    tokens = tokens_of(tokenizer, {tokenizer.eos_token_id})
    groups, _ = dpo_humanline.load_groups(args, "--dataset", str(name), "", tokens, (2,))
    assert f"--dataset {name}: 299 rows, 0 dropped\n" in capsys.readouterr().out
    return groups


@real
@pytest.mark.parametrize(
    ("kind", "template"),
    [*((kind, "its own") for kind in SOURCES), ("tekken", "none"), ("sentencepiece", "none")],
)
def test_prompt_and_completion_are_the_whole_rendering_on_all_real_pairs(
    one_rank, capsys, monkeypatch, load, tmp_path, kind, template
):
    tokenizer, name = load(kind), REAL
    if template == "none":
        monkeypatch.setattr(tokenizer, "chat_template", None)
        name = tmp_path / "plain.jsonl"
        with name.open("w") as file:
            for row in map(json.loads, REAL.open()):
                turns = [f"{m['role'].title()}: {m['content']}" for m in row["prompt"]]
                texts = {key: row[key][0]["content"] for key in ("chosen", "rejected")}
                file.write(json.dumps({"prompt": "\n".join([*turns, "Assistant:\n"])} | texts) + "\n")
    groups = read_pairs(capsys, tokenizer, name)
    for row, group in zip(map(json.loads, name.open()), groups, strict=True):
        for example, completion in zip(group, (row["chosen"], row["rejected"]), strict=True):
            text = completion if isinstance(completion, str) else completion[0]["content"]
            whole = whole_ids(tokenizer, row["prompt"], text, len(example.prompt_ids))
            assert example.prompt_ids + example.completion_ids == whole, example.row
            assert tokenizer.decode(example.completion_ids).strip() == text.strip() + tokenizer.eos_token


@pytest.mark.parametrize("kind", ["tekken", "sentencepiece"])
def test_tokens_are_those_of_mistrals_own_encoder(load, kind):
    """An oracle without templates. Runs of spaces are left out: transformers' conversion of SentencePiece
    splits them otherwise ("▁▁(" is ▁▁ and ( there, ▁ and ▁( here)."""
    tokenizer, rows = load(kind), []
    encoder = MistralTokenizer.from_file(source(kind), mode=ValidationMode.finetuning)
    tokens = tokens_of(tokenizer, {2})
    if REAL.exists():
        rows = [(row["prompt"], row["chosen"][0]["content"]) for row in map(json.loads, REAL.open())]
    rows = [row for row in rows if kind == "tekken" or "  " not in str(row)]
    assert not REAL.exists() or len(rows) > 200
    for prompt, completion in [(CONVERSATION, "Rome, bien sûr."), *rows]:
        prompt_ids = encode_prompt(tokenizer, prompt)
        ids, _ = encode_completion(tokens, prompt, prompt_ids, completion)
        answered = [*prompt, {"role": "assistant", "content": completion}]
        expected = encoder.encode_chat_completion(ChatCompletionRequest(messages=answered)).tokens
        assert prompt_ids + ids == expected


@pytest.mark.parametrize("kind", SOURCES)
def test_where_a_token_would_span_prompt_and_completion_nothing_comes_in_between(monkeypatch, load, kind):
    """Then no completion has the tokens of the whole rendering. SentencePiece begins a text of its own with a
    space."""
    tokenizer = load(kind)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    tokens = tokens_of(tokenizer, {2})
    for prompt in ("Q: Where?\nA: ", "[INST] Where? [/INST]", "Where?\nAnswer:"):
        for completion in ("It is Paris.", "(Paris)", '"Paris"', " Paris", "\nParis", ": Paris"):
            before = encode_prompt(tokenizer, prompt)
            ids, problem = encode_completion(tokens, prompt, before, completion)
            whole = tokenizer.decode(tokenizer(prompt + completion).input_ids)
            assert problem == "" and tokenizer.decode([*before, *ids[:-1]]) == whole, (prompt, completion)


SHORT = ["--num-steps", "3", "--k", "1", "--max-prompt-length", "120", "--max-length", "240"]
SHORT += ["--max-new-tokens", "6"]
SHORT += ["--dtype", "float32", "--engine", "hf", "--checkpoint-every", "0", "--eval-samples", "0"]
SHORT += ["--samples-per-prompt", "2", "--top-p", "1"]  # no sorting of 131,072 tokens


@pytest.fixture(scope="module")
def short_pairs(tmp_path_factory) -> Path:
    """The two real pairs with the least text."""
    size = lambda row: len(str(row["prompt"] + row["chosen"] + row["rejected"]))
    rows = sorted(map(json.loads, REAL.open()), key=size)[:2]
    name = tmp_path_factory.mktemp("pairs") / "short.jsonl"
    name.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


@torch.no_grad()
def summed_logps(folder: Path, ids: list[int], begin: int) -> float:
    """Σ log π of the tokens from `begin` on under the policy of a folder, by plain transformers, in nats."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    logps = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logps[torch.arange(begin - 1, len(ids) - 1), ids[begin:]].sum().item()


@real
@pytest.mark.parametrize("kind", ["tekken", "llama2"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_three_steps_train_on_the_tokens_of_the_whole_rendering(
    tmp_path, model, load, short_pairs, script, kind
):
    folder, tokenizer = model(kind), load(kind)
    run = [*SHORT, "--model", str(folder), "--dataset", str(short_pairs)]
    # all rows in every step
    run += ["--batch-size", "2" if script == "dpo_humanline" else "4", "--output-dir"]
    judged_by = model("llama2") / "judge"  # also where the policy has another tokenizer
    online = ["--online", "--reward-model", str(judged_by), "--reward-threshold", "0"]
    runs = [[*run, str(tmp_path / "offline")], [*run, str(tmp_path / "online"), *online]]
    run_ranks(1, runs, "tokens_worker.py", script)
    for name in ("offline", "online"):
        assert [line["step"] for line in metrics(tmp_path / name)] == [0, 1, 2]
        assert all(math.isfinite(value) for line in metrics(tmp_path / name) for value in line.values())
        assert metrics(tmp_path / name)[0]["grad_norm"] > 0

    begins, whole = {}, {"chosen": [], "rejected": []}
    for row in map(json.loads, short_pairs.open()):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        begins[tuple(ids)] = row["prompt"]
        for key in whole:
            text = row[key][0]["content"]
            whole[key].append((len(ids), whole_ids(tokenizer, row["prompt"], text, len(ids))))

    def read(name: str) -> list[dict]:
        batches = json.loads((tmp_path / name / "batches.json").read_text())
        return [x for batch in batches for x in batch]

    expected = {tuple(ids) for rows in whole.values() for _, ids in rows}
    seen = [x for x in read("offline") if tuple(x["prompt_ids"] + x["completion_ids"]) in expected]
    assert len(seen) == 3 * 4 and {tuple(x["prompt_ids"] + x["completion_ids"]) for x in seen} == expected
    for key, rows in whole.items():
        told = sum(summed_logps(folder, ids, begin) for begin, ids in rows) / 2
        assert metrics(tmp_path / "offline")[0][f"logps/{key}"] == pytest.approx(told, rel=1e-5)

    judge, its = MistralForSequenceClassification.from_pretrained(judged_by), load("llama2")
    for x in read("online"):
        assert tuple(x["prompt_ids"]) in begins and 0 < len(x["completion_ids"]) <= 6
        assert tokenizer.eos_token_id not in x["completion_ids"][:-1]
    unfinished = [x for x in read("online") if x["completion_ids"][-1] != tokenizer.eos_token_id]
    for x in unfinished[: 4 if script != "kto_humanline" else 0]:  # KTO's reward is 1 or 0
        text = tokenizer.decode(x["completion_ids"], skip_special_tokens=True)
        prompt = begins[tuple(x["prompt_ids"])]
        begin = len(its.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
        ids = whole_ids(its, prompt, text, begin)[:-1]
        assert judge(torch.tensor([ids])).logits.item() == pytest.approx(x["reward"], abs=1e-5)


# --- what else a Mistral or Llama folder brings ---


def test_a_folder_with_mistrals_own_file_has_the_tokens_of_its_tokenizer_json(model, load, tmp_path):
    """With mistral_common installed, as vLLM has it, transformers would take tekken.json and no template."""
    for path in [*model("tekken").iterdir(), Path(source("tekken"))]:
        (tmp_path / path.name.replace("tekken_240718", "tekken")).symlink_to(path)
    args = parse_args(dpo_humanline, ["--model", str(tmp_path), "--dataset", "x"])
    tokens = load_tokens(args, AutoConfig.from_pretrained(tmp_path))
    assert tokens.eos_ids == {2} and tokens.tokenizer.eos_token == "</s>"
    assert encode_prompt(tokens.tokenizer, CONVERSATION) == encode_prompt(load("tekken"), CONVERSATION)


def test_a_template_that_writes_the_date_writes_the_same_one_tomorrow(monkeypatch, load):
    """A resumed run compares the hash of its data's tokens."""
    template = (files("trl") / "chat_templates" / "llama3_2.jinja").read_text()
    monkeypatch.setattr(load("sentencepiece"), "chat_template", template)
    assert "Today Date: 26 Jul 2024" in render(load("sentencepiece"), CONVERSATION)


def test_a_prompt_that_spells_the_end_of_a_turn_keeps_it(monkeypatch, load):
    tokenizer = load("sentencepiece")
    monkeypatch.setattr(tokenizer, "chat_template", None)
    prompt_ids = encode_prompt(tokenizer, "Where?</s>")
    ids, problem = encode_completion(tokens_of(tokenizer, {2}), "Where?</s>", prompt_ids, "Here.")
    assert problem == "" and [*prompt_ids, *ids[:-1]] == tokenizer("Where?</s>Here.").input_ids


def test_thinking_behind_a_marker_of_the_prompt_is_part_of_the_completion(model):
    """Qwen 3.5's template begins the thinking in the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model("sentencepiece"))
    tokenizer.chat_template = (files("trl") / "chat_templates" / "qwen3_5_think.jinja").read_text()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokens, told = tokens_of(tokenizer, {tokenizer.eos_token_id}), "<think>\nFrance.\n</think>\n\nParis."
    prompt_ids = encode_prompt(tokenizer, CONVERSATION[:2])
    ids, problem = encode_completion(tokens, CONVERSATION[:2], prompt_ids, told)
    assert problem == "" and tokenizer.decode(prompt_ids).endswith("<think>\n")
    assert tokenizer.decode(ids) == told.removeprefix("<think>\n") + "<|im_end|>"
