"""From the rows of a file to token ids.

Training on a wrong token raises no error and shows in no metric. `encode` therefore refuses everything that
it cannot tokenize exactly.

To read another kind of file, extend `read_rows`. To read other columns, edit `encode_row` in the script. If
you build Examples in another way, end their completion_ids with an EOS token, unless the completion is
truncated.
"""

import gzip
import json
import os
import re
from pathlib import Path

import pyarrow.parquet
from huggingface_hub import is_offline_mode
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from support import run
from utils import InputError

# === Rows ===
# The rows of a file, and what is refused in them.


def read_rows(name: str, split: str):
    """Yields (number, row) of a .jsonl, .jsonl.gz or .parquet file, or of a Hub data set.

    The lines of a .jsonl file are numbered from 1, and so are the rows of other files.

    split: the split of a Hub data set; files have none.
    """
    if name.endswith((".jsonl", ".jsonl.gz")):
        open_file = gzip.open if name.endswith(".gz") else open
        with run.library_errors(name), open_file(name, "rt", encoding="utf-8-sig") as file:
            rows = file.readlines()
    elif os.path.isfile(name) and not name.endswith(".parquet"):
        raise InputError(f"{name}: convert it to .jsonl, .jsonl.gz or .parquet, for example with pandas")
    else:
        import datasets  # not at the top of the file, because the import takes a second

        with run.library_errors(name):
            if name.endswith(".parquet"):  # in memory, because load_dataset would read its cache
                table = pyarrow.parquet.read_table(name)
                # A Dataset decodes columns of JSON. Without the metadata it leaves images as they are, which
                # would need Pillow.
                rows = datasets.Dataset(table.replace_schema_metadata())
            else:
                rows = datasets.load_dataset(name, split=split)
    # A bar for large files. Every row is tokenized before the next one is read.
    bar = tqdm(rows, f"reading {name}", leave=False, unit=" rows", delay=2, disable=run.hide_bar())
    for number, row in enumerate(bar, 1):
        if isinstance(row, str):  # a line
            if not row.strip():
                continue
            with run.library_errors(f"{name}, line {number}"):
                row = json.loads(row)
        yield number, row


# Other formats keep parts of the prompt in these columns (Alpaca, LLaMA-Factory, TRL, vision models,
# choices). No script reads them, so a row that has a value there is refused. All other columns that a script
# does not read are ignored.
UNREAD_COLUMNS = ("input", "system", "system_prompt", "history", "context", "documents", "passage", "tools")
UNREAD_COLUMNS += ("functions", "image", "images", "audio", "audios", "video", "videos", "choices", "options")


def check_row(row):
    """Raises InputError if a row is not a dict, or if a part of its prompt would not be read."""
    if not isinstance(row, dict):
        raise InputError("a row must be an object with named columns")
    for column, value in row.items():
        if value and column in UNREAD_COLUMNS:
            raise InputError(f"the column {column!r} would be ignored: make it part of the prompt")
    if row.get("prompt") and row.get("instruction"):
        raise InputError("'instruction' beside 'prompt' would be ignored: make it part of the prompt")


def require_columns(row, *columns: str):
    """Raises InputError if a row has no value in one of the columns."""
    for column in columns:
        if row.get(column) is None:
            raise InputError(f"no value for {column!r} in the columns {', '.join(row)}")


class SkipRow(Exception):
    """Raised to skip a row, with the reason. InputError means a malformed row, and ends the run."""


def check_prompt(args, prompt_ids: list[int]):
    """Raises SkipRow if a prompt has no tokens or too many."""
    if not prompt_ids:
        raise SkipRow("prompt empty")
    if len(prompt_ids) > args.max_prompt_length:
        raise SkipRow("prompt longer than --max-prompt-length")
    if len(prompt_ids) >= args.max_length:
        raise SkipRow("prompt leaves no room for a completion in --max-length")


def summarize_groups(eos_ids: set[int], groups: list[tuple], skipped: list[tuple]) -> str:
    """Describes a data set: how many rows it has, how many were skipped and why, and what was truncated.

    skipped: [(line number, SkipRow), ...].
    """
    kept = f"{len(groups)} of {len(groups) + len(skipped)}" if skipped else len(groups)
    parts = [f"{kept} rows"]
    lines_by_reason = {}
    for number, error in skipped:
        lines_by_reason.setdefault(str(error), []).append(number)
    for reason, lines in lines_by_reason.items():
        parts.append(f"{len(lines)} skipped, the first in line {lines[0]}: {reason}")
    # Truncated completions have no EOS token.
    completions = [example.completion_ids for group in groups for example in group if example.completion_ids]
    truncated = sum(ids[-1] not in eos_ids for ids in completions)
    if truncated:
        parts.append(f"{truncated} of {len(completions)} completions truncated by --max-length")
    return "; ".join(parts)


def longest_sequence(args, groups: list[tuple]) -> int:
    """Returns the number of tokens that no training sequence and no sample of a run will exceed."""
    examples = [example for group in groups for example in group]
    longest_prompt = max(len(example.prompt_ids) for example in examples)
    longest_completion = max(len(example.completion_ids) for example in examples)
    # KTO joins each prompt with a completion of another prompt.
    trained = min(args.max_length, longest_prompt + longest_completion)
    # grpo_math, which has no --online, always samples. A run that does not sample may have a small model,
    # with fewer positions than --max-new-tokens.
    if getattr(args, "online", True) or (args.eval_dataset and args.eval_samples):
        return max(trained, longest_prompt + args.max_new_tokens)
    return trained


# === Tokens ===
# The tokenizer, and the token ids of a prompt and its completions.


def load_tokenizer(args):
    """Loads --model's tokenizer. Returns it and the set of EOS ids: the ids of all tokens that end a turn."""
    trust = args.trust_remote_code
    with run.library_errors(f"--model {args.model}"):
        tokenizer = AutoTokenizer.from_pretrained(
            args.model,
            trust_remote_code=trust,
            # If mistral_common is installed, the default reads Mistral's own tokenizer file, which has no
            # chat template.
            mistral_format=False,
        )
        # Chat models often end a turn with another token than the tokenizer's EOS, for example Llama 3's
        # <|eot_id|>. Their generation config, or else their model config, lists it.
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=trust).get_text_config()
        ids = config.eos_token_id  # a number or a list
        try:
            generation = GenerationConfig.from_pretrained(args.model)
            if generation.eos_token_id is not None:
                ids = generation.eos_token_id
        except OSError as error:  # not every model has a generation config
            # If another exception has led to this one, the file may exist: a failed connection, for example.
            # Without the file's EOS ids, samples would not end.
            if error.__context__ and not is_offline_mode():
                raise
    ids = ids if isinstance(ids, list) else [ids]
    if args.chat_template:
        with run.library_errors("--chat-template"):
            tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
        if not tokenizer.chat_template.strip():  # otherwise texts would be joined without a template
            raise InputError(f"--chat-template {args.chat_template} is empty")
    if args.eos_token:
        tokenizer.eos_token = args.eos_token
    if tokenizer.eos_token not in tokenizer.get_vocab():
        raise InputError(f"the tokenizer has no token {tokenizer.eos_token}: set one with --eos-token")
    return tokenizer, {tokenizer.eos_token_id, *ids} - {None}


def encode(tokenizer, eos_ids: set[int], prompt: str | list, completions=()) -> tuple[list, list]:
    """Tokenizes a prompt and its completions. Returns the prompt's ids, and the ids of each completion.

    Each conversation, a prompt with a completion, is tokenized as a whole and split after the prompt's ids. A
    completion's ids include its EOS token.

    Raises SkipRow if a text cannot be tokenized exactly, and InputError if the format or the template is
    wrong.
    """
    before, conversations = render_conversations(tokenizer, prompt, completions)
    eos_tokens = [token for token in tokenizer.convert_ids_to_tokens(list(eos_ids)) if token]
    for completion in completions:
        if any(token in as_answer(completion)["content"] for token in eos_tokens):
            raise SkipRow("a completion spells an EOS token, where it would end")
    prompt_ids, *conversation_ids = tokenize(tokenizer, [before, *conversations])
    if any(mostly_unknown(tokenizer, ids) for ids in (prompt_ids, *conversation_ids)):
        raise SkipRow("most of its tokens are unknown to the tokenizer")
    all_completion_ids = []
    for ids, conversation in zip(conversation_ids, conversations):
        completion_ids = split_completion(tokenizer, prompt_ids, ids, conversation[len(before) :])
        # The text is not blank (`render_conversations`). If no token precedes the EOS token, the tokenizer
        # has dropped the text. Some tokenizers, for example, remove all zero-width characters.
        if not completion_ids or completion_ids[0] in eos_ids:
            raise SkipRow("the tokenizer drops the text of a completion")
        # A completion without a template has no EOS yet. With a template, the text after the first EOS (often
        # a line break) is not part of the completion, because the model stops before it.
        completion_ids = truncate_after_eos([*completion_ids, tokenizer.eos_token_id], eos_ids)
        all_completion_ids.append(completion_ids)
    return prompt_ids, all_completion_ids


def tokenize(tokenizer, texts: list[str]) -> list[list[int]]:
    """Returns the ids of each text, without the EOS token that some tokenizers append to every text."""
    with run.library_errors("the tokenizer"):
        # A chat template has already written the special tokens.
        all_ids = tokenizer(texts, add_special_tokens=not tokenizer.chat_template).input_ids
    for text, ids in zip(texts, all_ids):
        # The tokenizer has appended an EOS token if the ids end with two, or with one that the text does not
        # end with. White space at the end of the text is ignored, because some EOS tokens absorb it.
        has_eos = ids[-1:] == [tokenizer.eos_token_id]
        if has_eos and (ids[-2:-1] == ids[-1:] or not text.rstrip().endswith(tokenizer.eos_token)):
            ids.pop()
    return all_ids


def split_completion(tokenizer, prompt_ids: list[int], ids: list[int], text: str) -> list[int]:
    """Returns the ids of a conversation that come after the prompt's. They are the ids of `text`.

    One token may span the end of the prompt and the start of the completion, for example a token for two line
    breaks. Then the completion is tokenized alone, provided that both parts still decode to the same text.
    """
    completion_ids = ids[len(prompt_ids) :]
    if prompt_ids + completion_ids != ids:
        completion_ids = tokenizer(text, add_special_tokens=False).input_ids
        if tokenizer.decode(prompt_ids + completion_ids) != tokenizer.decode(ids):
            raise SkipRow("a token spans prompt and completion")
    return completion_ids


def mostly_unknown(tokenizer, ids: list[int]) -> bool:
    """Returns whether more than half of the tokens are unknown. With a wrong tokenizer nearly all are."""
    return 2 * ids.count(tokenizer.unk_token_id) > len(ids)


def truncate_after_eos(ids: list[int], eos_ids: set[int]) -> list[int]:
    """Removes everything after the first EOS token, if there is one."""
    for length, token in enumerate(ids, 1):
        if token in eos_ids:
            return ids[:length]
    return ids


# === Conversations ===
# The text of a prompt and its completions, as the chat template renders it.


def render_conversations(tokenizer, prompt: str | list, completions) -> tuple[str, list[str]]:
    """Returns the text of a prompt, and the texts of the conversations: the prompt with each completion.

    A tokenizer without a chat template takes only texts, which are concatenated.
    """
    messages = as_messages(prompt)
    if not messages:
        raise SkipRow("prompt empty")
    if not messages[-1]["content"].strip():
        raise SkipRow("prompt empty")
    if messages[-1]["role"] == "assistant":
        raise InputError("a prompt must not end with a message of the assistant")
    answers = [as_answer(completion) for completion in completions]
    if not all(answer["content"].strip() for answer in answers):
        raise SkipRow("completion empty")
    if not tokenizer.chat_template:
        if not isinstance(prompt, str) or any(isinstance(completion, list) for completion in completions):
            raise InputError("messages need a chat template, and the tokenizer has none: --chat-template")
        return prompt, [prompt + answer["content"] for answer in answers]
    before = render(tokenizer, messages, add_generation_prompt=True)
    check_rendered(before, messages)
    conversations = []
    for answer in answers:
        answered = [*messages, answer]
        conversation = render(tokenizer, answered)
        if not conversation.startswith(before):  # then the template usually fails for every row
            raise InputError(
                "the chat template renders a prompt differently once it is answered: "
                "pass another --chat-template"
            )
        check_rendered(conversation, answered)
        conversations.append(conversation)
    return before, conversations


ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = ("role", "content", "name")  # of a message


def as_messages(prompt: str | list) -> list[dict]:
    """Returns the messages of a prompt; a text becomes one user message.

    Raises InputError if the prompt is neither a text nor a list of messages.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": plain_text(prompt)}]
    if not isinstance(prompt, list):
        raise InputError(f"a prompt must be a text or a list of messages, not {prompt!r:.40}")
    messages = []
    for message in prompt:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise InputError(f"every message must have a role: one of {', '.join(ROLES)}")
        # Arrow fills the keys that a message lacks with null.
        message = {key: part for key, part in message.items() if part or key in ("role", "content")}
        for key in message:
            if key not in KEYS:
                raise InputError(f"messages have only {', '.join(KEYS)} here: remove {key!r} from them")
        if not isinstance(message.get("content"), str):
            raise InputError("every message must have a text as its 'content'")
        messages.append(message)
    return messages


def plain_text(text: str) -> str:
    """Returns a text, or raises InputError if it holds messages that were encoded as a text."""
    if re.match(r"\s*\[\s*\{\s*['\"](?:role|content)['\"]", text):
        raise InputError("a text holds messages that were encoded as JSON or by Python: store them as lists")
    return text


def as_answer(completion: str | list) -> dict:
    """Returns the message of a completion, which is a text or a list with one message of the assistant."""
    if isinstance(completion, str):
        return {"role": "assistant", "content": plain_text(completion)}
    messages = as_messages(completion) if isinstance(completion, list) else []
    if [message["role"] for message in messages] != ["assistant"]:
        raise InputError(
            f"a completion must be a text or one message of the assistant, not {completion!r:.40}"
        )
    return messages[0]


def render(tokenizer, messages: list[dict], **options) -> str:
    """Renders messages with the chat template.

    Llama's template writes the date. It is fixed here, so that a resumed run reads the same tokens. A
    template that asks for the date by itself (`strftime_now`) gives other tokens tomorrow, and a resume is
    then refused.
    """
    with run.library_errors("the chat template"):
        return tokenizer.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024", **options)


def check_rendered(rendered: str, messages: list[dict]):
    """Raises SkipRow if a rendered conversation lacks the text of a message."""
    rest = squeeze(rendered)
    # Longest first, each at its own place: a short text may also be a part of a longer one.
    for text in sorted((squeeze(message["content"]) for message in messages), key=len, reverse=True):
        if text not in rest:
            raise SkipRow("the chat template changes the text of a message")
        rest = rest.replace(text, "\0", 1)


def squeeze(text: str) -> str:
    """Removes white space and backslashes, which templates may strip or add."""
    return "".join(text.split()).replace("\\", "")
