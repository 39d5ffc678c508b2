"""From the rows of a file to token ids.

To read another kind of file, extend `read_rows`. To read other columns, edit `encode_row` in the script. If
you build Examples in another way, make their ids arrays ("i"), and end completion_ids with an EOS token,
unless the completion is truncated.
"""

import gzip
import json
import unicodedata
from array import array
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from support import run
from utils import Example, InputError

# === Rows ===


def read_rows(name: str, split: str):
    """Yields (number, row) of a .jsonl, .jsonl.gz or .parquet file, or of a Hub data set, counted from 1.

    split: the split of a Hub data set; a file has none.
    """
    with run.library_errors(name):
        if name.endswith((".jsonl", ".jsonl.gz")):
            open_file = gzip.open if name.endswith(".gz") else open
            with open_file(name, "rt", encoding="utf-8") as file:
                rows = [json.loads(line) for line in file if line.strip()]
        elif name.endswith(".parquet"):
            rows = pyarrow.parquet.read_table(name).to_pylist()
        else:
            import datasets  # not at the top of the file, because the import takes a second

            rows = datasets.load_dataset(name, split=split)
    # A bar for large files. Every row is tokenized before the next one is read.
    bar = tqdm(rows, f"reading {name}", leave=False, unit=" rows", delay=2, disable=not run.is_main())
    yield from enumerate(bar, 1)


def check_row(row):
    """Raises InputError if a part of a row's prompt stands in a column that no script reads.

    Alpaca's and LLaMA-Factory's formats have these columns. Other columns are ignored.
    """
    for column in ("system", "input"):
        if row.get(column):
            raise InputError(f"the column {column!r} would be ignored: make it part of the prompt")


def require_columns(row, *columns: str):
    """Raises InputError if a row has no value in one of the columns."""
    for column in columns:
        if row.get(column) is None:
            raise InputError(f"no value for {column!r} in the columns {', '.join(row)}")


class SkipRow(Exception):
    """Raised to skip a row, with the reason. InputError means a malformed row, and ends the run."""


def print_summary(name: str, eos_ids: set[int], groups: list[tuple], skipped: list[str]):
    """Prints how many rows a data set has, how many were skipped and why, and what was truncated.

    Raises InputError if no row is left.

    groups: for each kept row, the tuple of its Examples. skipped: for each other row, the reason.
    """
    summary = f"{name}: {len(groups)} of {len(groups) + len(skipped)} rows"
    for reason, count in Counter(skipped).items():
        summary += f"; {count} skipped: {reason}"
    # Truncated completions have no EOS token.
    completions = [example.completion_ids for group in groups for example in group if example.completion_ids]
    truncated = sum(ids[-1] not in eos_ids for ids in completions)
    summary += f"; {truncated} of {len(completions)} completions truncated by --max-length"
    if not groups:
        raise InputError(summary)
    run.print_main(summary)


def check_groups(name: str, groups: list[tuple], size: int, needed: int):
    """Raises InputError unless all rows of a data set have `size` Examples, and are enough for a step."""
    sizes = {len(group) for group in groups}
    if sizes != {size} or len(groups) < needed:
        raise InputError(
            f"--dataset {name}: {len(groups)} rows with {sizes} completions (or a prompt alone), but a step "
            f"needs {needed} rows with {size}; docs/data.md shows the columns of each script"
        )


def longest_sequence(args, groups: list[tuple]) -> int:
    """Returns the number of tokens that no training sequence and no sample of a run will exceed."""
    examples = [example for group in groups for example in group]
    longest_prompt = max(len(example.prompt_ids) for example in examples)
    longest_completion = max(len(example.completion_ids) for example in examples)
    # KTO joins each prompt with a completion of another prompt.
    trained = min(args.max_length, longest_prompt + longest_completion)
    # grpo_math always trains on samples, and has no flag --online.
    if getattr(args, "online", True) or (args.eval_dataset and args.eval_samples):
        return max(trained, longest_prompt + args.max_new_tokens)
    return trained


# === Tokens ===


def load_tokenizer(args):
    """Loads --model's tokenizer. Returns it and the set of EOS ids: the ids of all tokens that end a turn."""
    with run.library_errors(f"--model {args.model}"):
        tokenizer = AutoTokenizer.from_pretrained(
            args.model,
            trust_remote_code=args.trust_remote_code,
            # If mistral_common is installed (with vLLM), the default reads Mistral's own tokenizer file,
            # which has no chat template.
            mistral_format=False,
        )
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    # Chat models often end a turn with another token than the tokenizer's EOS, for example Llama 3's
    # <|eot_id|>. Their generation config, or else their model config, lists it.
    ids = config.get_text_config().eos_token_id
    with suppress(OSError):  # not every model has a generation config
        ids = GenerationConfig.from_pretrained(args.model).eos_token_id or ids
    if not isinstance(ids, list):
        ids = [ids]
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
    if args.eos_token:
        tokenizer.eos_token = args.eos_token
    if tokenizer.eos_token not in tokenizer.get_vocab():
        raise InputError(f"the tokenizer has no token {tokenizer.eos_token}: set one with --eos-token")
    return tokenizer, {tokenizer.eos_token_id, *ids} - {None}


def encode(args, tokenizer, eos_ids: set[int], prompt: str | list, completions=()) -> list[Example]:
    """Tokenizes a prompt and its completions.

    Each conversation, a prompt with a completion, is tokenized as a whole and split after the prompt's ids. A
    completion's ids include its EOS token, unless they are truncated to --max-length.

    Returns one Example for each completion; if there are none, one Example with the prompt alone. Raises
    SkipRow if the prompt is too long, or if the tokens of a conversation do not decode to its text.
    """
    before, *endings = render_conversation(tokenizer, prompt, completions)
    texts = [before, *(before + ending for ending in endings)]
    prompt_ids, *conversation_ids = tokenize(tokenizer, texts)
    if not 0 < len(prompt_ids) <= min(args.max_prompt_length, args.max_length - 1):
        raise SkipRow("prompt empty, or too long for --max-prompt-length and --max-length")
    all_completion_ids = []
    for ids, ending in zip(conversation_ids, endings):
        completion_ids = ids[len(prompt_ids) :]
        if prompt_ids + completion_ids != ids:
            # One token spans the end of the prompt and the start of the completion, for example a token for
            # two line breaks. Then the completion is tokenized alone.
            completion_ids = tokenizer(ending, add_special_tokens=False).input_ids
        # A completion without a template has no EOS yet. With a template, the text after the first EOS (often
        # a line break) is not part of the completion, because the model stops before it.
        all_completion_ids.append(truncate_after_eos([*completion_ids, tokenizer.eos_token_id], eos_ids))
    for text, completion_ids in zip(texts, [[], *all_completion_ids]):
        if not keeps_text(tokenizer, text, prompt_ids + completion_ids):
            raise SkipRow("its tokens are not its text: unknown characters, or it spells an EOS token")
    prompt_only = Example(prompt, array("i", prompt_ids))
    examples = [prompt_only._replace(completion_ids=array("i", ids)) for ids in all_completion_ids]
    return [example.truncate(args.max_length) for example in examples or [prompt_only]]


def tokenize(tokenizer, texts: list[str]) -> list[list[int]]:
    """Returns the ids of each text, without the EOS token that some tokenizers append to every text."""
    if tokenizer.chat_template:  # it has already written all special tokens
        return tokenizer(texts, add_special_tokens=False).input_ids
    all_ids = tokenizer(texts).input_ids
    return [ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids for ids in all_ids]


def keeps_text(tokenizer, text: str, ids: list[int]) -> bool:
    """Returns whether token ids decode to their text. White space, BOS and EOS tokens are ignored.

    Tokenizers add BOS tokens, `encode` adds EOS tokens, and SentencePiece adds spaces. Characters that
    Unicode defines as the same count as the same, for example é as one or as two characters (NFC).
    """
    texts = [text, tokenizer.decode(ids, clean_up_tokenization_spaces=False)]
    for token in (tokenizer.bos_token, tokenizer.eos_token):
        texts = [text.replace(token or " ", "") for text in texts]
    expected, decoded = ("".join(unicodedata.normalize("NFC", text).split()) for text in texts)
    return expected == decoded


def truncate_after_eos(ids: list[int], eos_ids: set[int]) -> list[int]:
    """Removes everything after the first EOS token, if there is one."""
    for length, token in enumerate(ids, 1):
        if token in eos_ids:
            return ids[:length]
    return ids


# === Conversations ===
# The text of a prompt and its completions, as the chat template renders it.


def render_conversation(tokenizer, prompt: str | list, completions) -> list[str]:
    """Returns the text of a prompt, and for each completion what follows when it answers the prompt.

    A tokenizer without a chat template takes only texts, which are concatenated.
    """
    if not tokenizer.chat_template:
        if isinstance(prompt, list):
            raise InputError("messages need a chat template, and the tokenizer has none: --chat-template")
        return [prompt, *completions]
    messages = as_messages(prompt)
    before = render(tokenizer, messages, add_generation_prompt=True)
    check_rendered(before, messages)
    endings = []
    for completion in completions:
        all_messages = messages + as_messages(completion, "assistant")
        conversation = render(tokenizer, all_messages)
        if not conversation.startswith(before):  # then the template usually fails for every row
            raise InputError(
                "the chat template renders a prompt differently when an answer follows: "
                "pass another --chat-template (docs/data.md)"
            )
        check_rendered(conversation, all_messages)
        endings.append(conversation[len(before) :])
    return [before, *endings]


def check_rendered(text: str, messages: list[dict]):
    """Raises SkipRow if a template loses a message: some drop a system prompt or the thought of an answer."""
    if not all(message["content"].strip() in text for message in messages):
        raise SkipRow("the chat template changes or drops the content of a message")


def as_messages(value: str | list, role: str = "user") -> list[dict]:
    """Returns the messages of a prompt or a completion. A text becomes one message of the role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = []
    for message in value:  # Arrow fills the keys that a message lacks with null
        messages.append({key: part for key, part in message.items() if part is not None})
    return messages


def render(tokenizer, messages: list[dict], **options) -> str:
    """Renders messages with the chat template.

    Llama's template writes the date. It is fixed here, so that a resumed run reads the same tokens.
    """
    return tokenizer.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024", **options)
