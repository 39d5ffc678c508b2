"""Chat templates of real models, those in TRL's package.

Two tokenizers stand for the two kinds there are: bytes, as in Llama 3 and Qwen, and pieces whose first one
depends on what stands before it, as in Llama 2 and Mistral.
"""

from importlib.resources import files

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from support import data

TEMPLATES = files("trl") / "chat_templates"
NAMES = sorted(path.name for path in TEMPLATES.iterdir() if path.name.endswith(".jinja"))
QUESTION, ANSWER = "What is the capital of France?", "It is Paris, as ever.\nNo other."
PROMPT = [{"role": "user", "content": QUESTION}]


def bytes_or_pieces(kind: str, template: str | None) -> PreTrainedTokenizerFast:
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end_header_id|>", "<bos>"]
    if kind == "bytes":
        vocab = {token: i for i, token in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "?I"])}
        raw = Tokenizer(models.BPE(vocab=vocab, merges=[("?", "I")]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = decoders.ByteLevel()
    else:
        letters = ["▁", "\n", *map(chr, range(33, 127))]
        merges = [("▁", letter) for letter in letters[1:]]
        vocab = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
        raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        raw.decoder = decoders.Metaspace()
    tokens = {"bos_token": "<s>", "eos_token": "<|im_end|>", "additional_special_tokens": special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **tokens)
    tokenizer.chat_template = template
    return tokenizer


def encode(tokenizer, prompt, completion=None):
    completions = [] if completion is None else [completion]
    prompt_ids, all_completion_ids = data.encode(tokenizer, {tokenizer.eos_token_id}, prompt, completions)
    return prompt_ids, sum(all_completion_ids, [])


# DeepSeek's and Nemotron's render an answered prompt in another way; the others want parts, not texts.
REFUSED = ("deepseek", "nemotron", "idefics", "llava", "smolvlm")


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("name", NAMES)
def test_under_any_template_tokens_are_those_of_the_whole_conversation(name, kind):
    tokenizer = bytes_or_pieces(kind, (TEMPLATES / name).read_text())
    if name.startswith(REFUSED):
        with pytest.raises(Exception, match="once it is answered|changes or drops|no attribute 'text'"):
            encode(tokenizer, PROMPT, ANSWER)
        return
    prompt_ids, ids = encode(tokenizer, PROMPT, ANSWER)
    assert prompt_ids == encode(tokenizer, PROMPT)[0] == encode(tokenizer, QUESTION)[0]
    text = data.render(tokenizer, [*PROMPT, {"role": "assistant", "content": ANSWER}])
    whole = tokenizer(text, add_special_tokens=False).input_ids
    *before_end, end = prompt_ids + ids
    assert before_end == whole[: len(before_end)] and end == tokenizer.eos_token_id
    assert ANSWER in tokenizer.decode(ids)


def test_an_end_that_the_tokenizer_adds_does_not_end_the_prompt():
    tokenizer = bytes_or_pieces("bytes", None)
    end = tokenizer.eos_token
    single = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)])
    tokenizer._tokenizer.post_processor = processors.Sequence([tokenizer._tokenizer.post_processor, single])
    assert tokenizer(QUESTION).input_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(encode(tokenizer, QUESTION)[0]) == QUESTION
    prompt_ids, ids = encode(tokenizer, QUESTION, ANSWER)
    assert tokenizer.decode([*prompt_ids, *ids]) == QUESTION + ANSWER + end  # "?I" would be a token
