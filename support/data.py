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
import unicodedata
from contextlib import suppress
from functools import cache
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

    split: the split of a Hub data set. A file has none, so it must be a default of the flags.
    """
    if os.path.exists(name) and split not in ("train", "test"):
        raise InputError(
            f"{name} is a file, which has no split {split}: remove --dataset-split, --eval-split"
        )
    if name.endswith((".jsonl", ".jsonl.gz")):
        open_file = gzip.open if name.endswith(".gz") else open
        with run.library_errors(name), open_file(name, "rt", encoding="utf-8-sig") as file:
            rows = file.readlines()
    elif os.path.exists(name) and not name.endswith(".parquet"):
        # Also folders, because load_dataset may read older rows of the same folder from its cache.
        raise InputError(
            f"{name}: convert it to one .jsonl, .jsonl.gz or .parquet file, for example with pandas"
        )
    else:
        import datasets  # not at the top of the file, because the import takes a second

        with run.library_errors(name):
            if name.endswith(".parquet"):  # in memory, because load_dataset would read its cache
                table = pyarrow.parquet.read_table(name)
                # `Dataset`, because `table.to_pylist()` would leave a column of Arrow's JSON type as text.
                # Without its metadata the table has no images, which `Dataset` would decode with Pillow.
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
UNREAD_COLUMNS = """
    input system system_prompt history context documents passage tools functions choices options
    image images audio audios video videos
""".split()


def check_row(row):
    """Raises InputError if a row is not a dict, or if a part of its prompt would not be read."""
    if not isinstance(row, dict):
        raise InputError("a row must be an object with named columns")
    for column in UNREAD_COLUMNS:
        if row.get(column):
            raise InputError(f"the column {column!r} would be ignored: make it part of the prompt")
    if row.get("prompt") and row.get("instruction"):
        raise InputError("'instruction' beside 'prompt' would be ignored: make it part of the prompt")


def require_columns(row, *columns: str):
    """Raises InputError if a row has no value in one of the columns."""
    for column in columns:
        if row.get(column) is None:
            raise InputError(f"no value for {column!r} in the columns {', '.join(row)}")


def json_row(row) -> dict:
    """Returns a row as reward functions see it (Example.row).

    Values that JSON does not have, such as dates, become texts, because checkpoints hold samples as JSON.
    """
    return json.loads(json.dumps(row, default=str))


class SkipRow(Exception):
    """Raised to skip a row, with the reason. InputError means a malformed row, and ends the run."""


def check_prompt(args, prompt_ids: list[int]):
    """Raises SkipRow if a prompt has too many tokens."""
    if len(prompt_ids) > args.max_prompt_length:
        raise SkipRow("prompt longer than --max-prompt-length")
    if len(prompt_ids) >= args.max_length:
        raise SkipRow("prompt leaves no room for a completion in --max-length")


def summarize_groups(eos_ids: set[int], groups: list[tuple], skipped: list[tuple]) -> str:
    """Describes a data set: how many rows it has, how many were skipped and why, and what was truncated.

    groups: for each kept row, the tuple of its Examples. skipped: [(line number, SkipRow), ...].
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


def longest_sequence(args, groups: list[tuple], online: bool = False) -> int:
    """Returns the number of tokens that no training sequence and no sample of a run will exceed.

    `run.check_positions` refuses models with fewer positions.

    online: whether the run trains on samples.
    """
    examples = [example for group in groups for example in group]
    longest_prompt = max(len(example.prompt_ids) for example in examples)
    longest_completion = max(len(example.completion_ids) for example in examples)
    # KTO joins each prompt with a completion of another prompt.
    trained = min(args.max_length, longest_prompt + longest_completion)
    # A run that does not sample may have a model with fewer positions than --max-new-tokens.
    if online or (args.eval_dataset and args.eval_samples):
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
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=trust)
        ids = config.get_text_config().eos_token_id  # a number or a list
        try:
            generation = GenerationConfig.from_pretrained(args.model)
            if generation.eos_token_id is not None:
                ids = generation.eos_token_id
        except OSError as error:  # not every model has a generation config
            # transformers raises this error alone (without a context) if the model has no such file, and in
            # the context of another error if it could not look, for example without a connection. Then the
            # file's EOS ids are unknown, and samples would not end. Offline, a file that is not in the cache
            # counts as missing.
            if error.__context__ and not is_offline_mode():
                raise
    ids = ids if isinstance(ids, list) else [ids]
    if any(not isinstance(token, int | None) for token in ids):
        raise InputError(f"--model {args.model}: its eos_token_id {ids} is no token id")
    if args.chat_template:
        with run.library_errors("--chat-template"):
            tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
        if not tokenizer.chat_template.strip():  # otherwise texts would be joined without a template
            raise InputError(f"--chat-template {args.chat_template} is empty")
    if args.eos_token:
        tokenizer.eos_token = args.eos_token
    if tokenizer.eos_token not in tokenizer.get_vocab():
        raise InputError(f"the tokenizer has no token {tokenizer.eos_token}: set one with --eos-token")
    eos_ids = {tokenizer.eos_token_id, *ids} - {None}
    warn_about_end(tokenizer, eos_ids)
    return tokenizer, eos_ids


def warn_about_end(tokenizer, eos_ids: set[int]):
    """Warns if the chat template ends an answer with another token than an EOS token.

    Samples would not end there. For example, base models whose template is ChatML often have another EOS
    token than <|im_end|>.
    """
    messages = [{"role": role, "content": "Text"} for role in ("user", "assistant")]
    with suppress(InputError):  # a template that fails here may work with the messages of the rows
        end = render(tokenizer, messages).rpartition("Text")[2].strip()
        first = tokenizer(end, add_special_tokens=False).input_ids[:1]
        if not eos_ids.issuperset(first):
            run.print_main(
                f"warning: the chat template ends an answer with {end!r}, which does not end a sample, "
                "because it is no EOS token; set it with --eos-token"
            )


def encode(tokenizer, eos_ids: set[int], prompt: str | list, completions=()) -> tuple[list, list]:
    """Tokenizes a prompt and its completions. Returns the prompt's ids, and the ids of each completion.

    Each conversation, a prompt with a completion, is tokenized as a whole and split after the prompt's ids. A
    completion's ids include its EOS token.

    Raises SkipRow if a text cannot be tokenized exactly, and InputError if the format or the template is
    wrong.
    """
    before, *endings = render_conversation(tokenizer, prompt, completions)
    texts = [before, *(before + ending for ending in endings)]
    prompt_ids, *conversation_ids = tokenize(tokenizer, texts)
    all_completion_ids = []
    for ids, ending in zip(conversation_ids, endings):
        completion_ids = ids[len(prompt_ids) :]
        if prompt_ids + completion_ids != ids:
            # One token spans the end of the prompt and the start of the completion, for example a token for
            # two line breaks. Then the completion is tokenized alone. `keeps_text` finds the space that some
            # tokenizers put before it.
            completion_ids = tokenizer(ending, add_special_tokens=False).input_ids
        # A completion without a template has no EOS yet. With a template, the text after the first EOS (often
        # a line break) is not part of the completion, because the model stops before it.
        completion_ids = truncate_after_eos([*completion_ids, tokenizer.eos_token_id], eos_ids)
        all_completion_ids.append(completion_ids)
    # The prompt, then each conversation. `keeps_text` ignores EOS tokens and the white space beside them, so
    # an EOS token that was appended, or a line break that was cut off, is no difference.
    for text, completion_ids in zip(texts, [[], *all_completion_ids]):
        if not keeps_text(tokenizer, text, prompt_ids + completion_ids):
            raise SkipRow(
                "its tokens are not its text: unknown characters, or a completion spells an EOS token"
            )
        if len(completion_ids) == 1:  # it was an EOS token
            raise SkipRow("completion empty")
    return prompt_ids, all_completion_ids


def tokenize(tokenizer, texts: list[str]) -> list[list[int]]:
    """Returns the ids of each text, without the EOS token that some tokenizers append to every text."""
    with run.library_errors("the tokenizer"):
        encoded = tokenizer(
            texts,
            add_special_tokens=not tokenizer.chat_template,  # a chat template has already written them
            return_special_tokens_mask=True,  # 1 at the tokens that the tokenizer has added
        )
    for ids, mask in zip(encoded.input_ids, encoded.special_tokens_mask):
        if mask[-1:] == [1] and ids[-1] == tokenizer.eos_token_id:
            ids.pop()
    return encoded.input_ids


def keeps_text(tokenizer, text: str, ids: list[int]) -> bool:
    """Returns whether token ids decode to their text.

    They do not if tokens are unknown, if the tokenizer loses or changes characters, or if its class is not
    the one that the model was trained with. Characters that Unicode defines as the same count as the same,
    for example é as one or as two characters (NFC).

    Added tokens, special ones and others, are ignored if they are among the ids, because a tokenizer may add
    some to a text. White space beside these tokens and at the ends of the text is ignored too, because
    SentencePiece adds a space there, and some special tokens absorb it.
    """
    texts = [text, tokenizer.decode(ids, clean_up_tokenization_spaces=False)]
    present = set(ids)
    for token, token_id in added_tokens(tokenizer):
        if token_id in present and token.strip():
            texts = ["".join(map(str.strip, text.split(token))) for text in texts]
    expected, decoded = (unicodedata.normalize("NFC", text.strip()) for text in texts)
    return expected == decoded


@cache
def added_tokens(tokenizer) -> list[tuple[str, int]]:
    """Returns the tokens that are found before the rest of a text is split, special ones and others.

    The longest stands first, because a token may contain another one. The unknown token is not among them,
    because it stands for characters that are lost. GPT-2's is its EOS token, too, and stays.
    """
    unknown = {tokenizer.unk_token} - {tokenizer.bos_token, tokenizer.eos_token}
    added = [item for item in tokenizer.get_added_vocab().items() if item[0] not in unknown]
    return sorted(added, key=lambda item: -len(item[0]))


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
    messages = as_messages(prompt)
    if not messages or not messages[-1]["content"].strip():
        raise SkipRow("prompt empty")
    if messages[-1]["role"] == "assistant":
        raise InputError("a prompt must not end with a message of the assistant")
    answers = [as_answer(completion) for completion in completions]
    if not all(answer["content"].strip() for answer in answers):
        raise SkipRow("completion empty")
    if not tokenizer.chat_template:
        if any(isinstance(text, list) for text in (prompt, *completions)):
            raise InputError("messages need a chat template, and the tokenizer has none: --chat-template")
        return [prompt, *completions]
    before = render(tokenizer, messages, add_generation_prompt=True)
    check_rendered(before, messages)
    endings = []
    for answer in answers:
        conversation = render(tokenizer, [*messages, answer])
        if not conversation.startswith(before):  # then the template usually fails for every row
            raise InputError(
                f"the chat template ends a prompt with {before[-20:]!r}, but not once it is answered: "
                "pass another --chat-template (docs/data.md)"
            )
        endings.append(conversation[len(before) :])
        # Of the conversation, because a template may begin the answer's thought in the prompt.
        check_rendered(conversation, [*messages, answer])
    return [before, *endings]


ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = ("role", "content", "name")  # of a message
EMPTY = (None, "", [], {})  # keys with these values change nothing; 0 and False may mean something


def as_messages(value: str | list, role: str = "user") -> list[dict]:
    """Returns the messages of a prompt or a completion. A text becomes one message of the role.

    Raises InputError if the value is neither a text nor a list of messages.
    """
    if isinstance(value, str):
        if re.match(r"\s*\[\s*\{\s*['\"](?:role|content)['\"]", value):
            raise InputError("a text holds messages as JSON or as Python prints them: store them as lists")
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise InputError(f"a prompt or completion must be a text or a list of messages, not {value!r:.40}")
    messages = []
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise InputError(f"every message must have a role: one of {', '.join(ROLES)}")
        # Arrow fills the keys that a message lacks with null.
        message = {key: part for key, part in message.items() if key == "content" or part not in EMPTY}
        for key in message:
            if key not in KEYS:
                raise InputError(f"messages have only {', '.join(KEYS)} here: remove {key!r} from them")
        if not isinstance(message.get("content"), str):
            raise InputError("every message must have a text as its 'content'")
        messages.append(message)
    return messages


def as_answer(completion: str | list) -> dict:
    """Returns the message of a completion, which is a text or a list with one message of the assistant."""
    messages = as_messages(completion, "assistant")
    if [message["role"] for message in messages] != ["assistant"]:
        raise InputError(f"a completion must be one message of the assistant, not {completion!r:.40}")
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
    """Raises SkipRow if a rendered text lacks a message's text or name. A template may strip its ends.

    A text that stands in several messages must be rendered as often. This also holds for a text that is a
    part of another message.
    """
    for key in ("content", "name"):
        texts = [str(message[key]).strip() for message in messages if key in message]
        for text in texts:
            if rendered.count(text) < sum(other.count(text) for other in texts):
                raise SkipRow(f"the chat template changes or drops the {key} of a message")
