"""Tokens are the model's own: the tokenizers that mistral_common ships, with Mistral's and Zephyr's template.

Three kinds: tekken (bytes, 131,072 tokens); SentencePiece as transformers converts it; SentencePiece as in
the tokenizer.json files of Llama 2 and Zephyr, which begins the text after every special token with a space.
"""

import importlib
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from conftest import SCRIPTS, SHARED, metrics, read_rows, write_rows
from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizers import normalizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaTokenizer,
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.integrations.mistral import convert_tekken_tokenizer
from worker import note_batches, run_here

import dpo_humanline
from support import data, sampling
from support.data import SkipRow
from utils import Example

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

    @cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        tokenizer = convert(kind, folder)
        shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        shape |= dict(num_key_value_heads=1, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2)
        torch.manual_seed(0)
        MistralForCausalLM(MistralConfig(**shape)).save_pretrained(folder)
        judge = MistralForSequenceClassification(MistralConfig(**shape, num_labels=1, pad_token_id=2))
        judge.save_pretrained(folder / "judge")
        for part in (folder, folder / "judge"):
            tokenizer.save_pretrained(part)
        return folder

    return make


@pytest.fixture(scope="module")
def load(model):
    """A kind's tokenizer as the scripts load it, once."""
    return cache(lambda kind: data.load_tokenizer(dpo_humanline.Args(model=str(model(kind))))[0])


def whole_ids(tokenizer, prompt, completion: str, begin: int) -> list[int]:
    """Tokens of the whole conversation as transformers makes them, up to and with the first end of turn at or
    after `begin`; or of the whole text, with one added."""
    if isinstance(prompt, str):
        return [*tokenizer(prompt + completion).input_ids, tokenizer.eos_token_id]
    messages = [*prompt, {"role": "assistant", "content": completion}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    return ids[: ids.index(tokenizer.eos_token_id, begin) + 1]


@real
@pytest.mark.parametrize(
    ("kind", "template"),
    [*((kind, "its own") for kind in SOURCES), ("tekken", "none"), ("sentencepiece", "none")],
)
def test_prompt_and_completion_are_the_whole_rendering_on_all_real_pairs(
    one_rank, capsys, monkeypatch, load, tmp_path, kind, template
):
    tokenizer, rows = load(kind), read_rows(REAL)
    if template == "none":
        monkeypatch.setattr(tokenizer, "chat_template", None)
        for row in rows:
            turns = [f"{m['role'].title()}: {m['content']}" for m in row["prompt"]]
            row["prompt"] = "\n".join([*turns, "Assistant:\n"])
            row |= {key: row[key][0]["content"] for key in ("chosen", "rejected")}
    data = write_rows(tmp_path / "rows.jsonl", rows)
    args = dpo_humanline.Args(max_prompt_length=20000, max_length=40000)
    groups = dpo_humanline.load_groups(args, tokenizer, {2}, data, "train")
    assert "rows.jsonl: 299 rows\n" in capsys.readouterr().out  # no row is skipped
    for row, group in zip(rows, groups, strict=True):
        for example, completion in zip(group, (row["chosen"], row["rejected"]), strict=True):
            text = completion if isinstance(completion, str) else completion[0]["content"]
            whole = whole_ids(tokenizer, row["prompt"], text, len(example.prompt_ids))
            assert example.prompt_ids + example.completion_ids == whole
            assert tokenizer.decode(example.completion_ids).strip() == text.strip() + tokenizer.eos_token


@pytest.mark.parametrize("kind", ["tekken", "sentencepiece"])
def test_tokens_are_those_of_mistrals_own_encoder(load, kind):
    """An oracle without templates. Runs of spaces are left out: transformers' conversion of SentencePiece
    splits them otherwise ("▁▁(" is ▁▁ and ( there, ▁ and ▁( here)."""
    tokenizer, rows = load(kind), []
    encoder = MistralTokenizer.from_file(source(kind), mode=ValidationMode.finetuning)
    if REAL.exists():
        rows = [(row["prompt"], row["chosen"][0]["content"]) for row in read_rows(REAL)]
        rows = [row for row in rows if kind == "tekken" or "  " not in str(row)]
        assert len(rows) > 200
    for prompt, completion in [(CONVERSATION, "Rome, bien sûr."), *rows]:
        prompt_ids, (ids,) = data.encode(tokenizer, {2}, prompt, [completion])
        answered = [*prompt, {"role": "assistant", "content": completion}]
        expected = encoder.encode_chat_completion(ChatCompletionRequest(messages=answered)).tokens
        assert prompt_ids + ids == expected


# --- plain texts ---


@pytest.mark.parametrize("kind", SOURCES)
def test_where_a_token_would_span_prompt_and_completion_nothing_comes_in_between(monkeypatch, load, kind):
    """SentencePiece begins a text of its own with a space: such a row is left out."""
    tokenizer = load(kind)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    for prompt in ("Where?\nAnswer:", "Where?</s>", "Q: Where?\nA: ", "[INST] Where? [/INST]"):
        for completion in ("It is Paris.", "(Paris)", '"Paris"', " Paris", "\nParis", ": Paris"):
            try:
                prompt_ids, (ids,) = data.encode(tokenizer, {2}, prompt, [completion])
            except SkipRow:
                prompt_ids, ids = tokenizer(prompt).input_ids, tokenizer(prompt + completion).input_ids
                assert kind != "tekken" and ids[: len(prompt_ids)] != prompt_ids
                continue
            assert prompt_ids == tokenizer(prompt).input_ids
            whole = tokenizer.decode(tokenizer(prompt + completion).input_ids)
            assert tokenizer.decode([*prompt_ids, *ids[:-1]]) == whole, (prompt, completion)


STORIES = SHARED / "model-stories260K"  # SentencePiece without a template


@pytest.mark.parametrize("kind", [*SOURCES, "stories"])
def test_a_reward_model_reads_a_sample_with_the_space_that_the_data_has(monkeypatch, load, kind):
    """The tokens of a text, as if they had been sampled, are the text again."""
    if kind == "stories" and not STORIES.exists():
        pytest.skip(f"no model in {STORIES}")
    tokenizer = AutoTokenizer.from_pretrained(STORIES) if kind == "stories" else load(kind)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    prompt = "Once upon a time,"
    for text in (" there was a girl.\nHer name was Zoë.", "\nthere was", " (a girl) ", "!"):
        prompt_ids, (ids,) = data.encode(tokenizer, {2}, prompt, [text])
        example = Example(prompt, prompt_ids)
        sampled = sampling.decode_completion(tokenizer, example, ids[:-1])
        assert sampled == (text.rstrip(" ") if kind == "stories" else text)  # its normalizer strips the end
        sample = example._replace(text=sampled)
        assert sampling.reward_input(tokenizer, "", sample) == f"{prompt}{sampled}</s>"
        assert sampling.reward_input(tokenizer, "\n", sample) == f"{prompt}\n{sampled}</s>"


# --- whole runs ---

SHORT = ["--num-steps", "3", "--k", "1", "--max-prompt-length", "120", "--max-length", "240"]
SHORT += ["--max-new-tokens", "6", "--engine", "hf", "--checkpoint-every", "0", "--eval-samples", "0"]
SHORT += ["--samples-per-prompt", "2", "--top-p", "1"]  # no sorting of 131,072 tokens


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
    tmp_path, monkeypatch, model, load, script, kind
):
    rows = sorted(read_rows(REAL), key=lambda row: len(str(row)))[:2]
    folder, tokenizer, script = model(kind), load(kind), importlib.import_module(script)
    batches, read = note_batches(script, monkeypatch), {}
    run = [*SHORT, "--model", folder, "--dataset", write_rows(tmp_path / "rows.jsonl", rows)]
    # all rows in every step
    run += ["--batch-size", "2" if script is dpo_humanline else "4"]
    judged_by = model("llama2") / "judge"  # also where the policy has another tokenizer
    online = ["--online", "--reward-model", judged_by, "--reward-threshold", "0"]
    for name, flags in {"offline": [], "online": online}.items():
        batches.clear()
        run_here(script, *run, *flags, "--output-dir", tmp_path / name)
        read[name] = [x for batch in batches for x in batch]
        steps = metrics(tmp_path / name)
        assert [line["step"] for line in steps] == [0, 1, 2] and steps[0]["grad_norm"] > 0

    begins, expected, logps = {}, set(), {"chosen": 0.0, "rejected": 0.0}
    for row in rows:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        begins[tuple(ids)] = row["prompt"]
        for side in logps:
            whole = whole_ids(tokenizer, row["prompt"], row[side][0]["content"], len(ids))
            expected.add(tuple(whole))
            logps[side] += summed_logps(folder, whole, len(ids)) / 2
    seen = [tuple(x.prompt_ids + x.completion_ids) for x in read["offline"]]
    seen = [ids for ids in seen if ids in expected]  # KTO's z_0 reads others too
    assert len(seen) == 3 * 4 and set(seen) == expected
    for side, told in logps.items():
        assert metrics(tmp_path / "offline")[0][f"logps/{side}"] == pytest.approx(told, rel=1e-5)

    judge, its = MistralForSequenceClassification.from_pretrained(judged_by), load("llama2")
    for x in read["online"]:
        assert tuple(x.prompt_ids) in begins and 0 < len(x.completion_ids) <= 6
        assert tokenizer.eos_token_id not in x.completion_ids[:-1]
    unfinished = [x for x in read["online"] if x.completion_ids[-1] != tokenizer.eos_token_id]
    for x in unfinished[:4]:
        text = tokenizer.decode(x.completion_ids, skip_special_tokens=True)
        prompt = begins[tuple(x.prompt_ids)]
        begin = len(its.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
        ids = whole_ids(its, prompt, text, begin)[:-1]
        assert judge(torch.tensor([ids])).logits.item() == pytest.approx(x.reward, abs=1e-5)


# --- what else a Mistral or Llama folder brings ---


def test_a_folder_with_mistrals_own_file_has_the_tokens_of_its_tokenizer_json(model, load, tmp_path):
    """With mistral_common installed, as vLLM has it, transformers would take tekken.json and no template."""
    for path in [*model("tekken").iterdir(), Path(source("tekken"))]:
        (tmp_path / path.name.replace("tekken_240718", "tekken")).symlink_to(path)
    tokenizer, eos_ids = data.load_tokenizer(dpo_humanline.Args(model=str(tmp_path)))
    assert eos_ids == {2} and tokenizer.eos_token == "</s>"
    expected = load("tekken")
    assert data.encode(tokenizer, eos_ids, CONVERSATION) == data.encode(expected, eos_ids, CONVERSATION)


def test_a_template_that_writes_the_date_writes_the_same_one_tomorrow(monkeypatch, load):
    """A resumed run compares the hash of its data's tokens."""
    template = (files("trl") / "chat_templates" / "llama3_2.jinja").read_text()
    monkeypatch.setattr(load("sentencepiece"), "chat_template", template)
    assert "Today Date: 26 Jul 2024" in data.render(load("sentencepiece"), CONVERSATION)
