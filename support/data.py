"""From the rows of a file to token ids.

To read another kind of file, extend `read_rows`. To read other columns, edit `encode_row` in the script. If
you build Examples in another way, make their ids arrays ("i"), and end completion_ids with an EOS token,
unless the completion is truncated.

A group is the tuple of a row's Examples: one for each completion, or one with the prompt alone.
"""

import gzip
import json
from array import array
from contextlib import suppress
from itertools import islice
from pathlib import Path

import jinja2
import pyarrow.parquet
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from support import run
from utils import Example, InputError

# === Rows ===
# The rows of a file, and their groups. The files are read in pieces, and the groups hold token ids, so that
# a large data set needs little memory.

CHUNK = 2000  # rows that a rank encodes before the ranks exchange their groups


class SkipRow(Exception):
    """Raised to skip a row, with the reason. InputError means a malformed row, and ends the run."""


def read_rows(name: str, split: str):
    """Yields the rows of a .jsonl, .jsonl.gz or .parquet file, or of a Hub data set.

    The name of a Hub data set may end with :CONFIGURATION.

    split: the split of a Hub data set; a file has none.
    """
    if name.endswith((".jsonl", ".jsonl.gz")):
        open_file = gzip.open if name.endswith(".gz") else open
        with open_file(name, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip():
                        yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise InputError(f"{name}, line {number}: {error}") from None
    elif name.endswith(".parquet"):
        for batch in pyarrow.parquet.ParquetFile(name).iter_batches(CHUNK):
            yield from batch.to_pylist()
    else:
        import datasets  # not at the top of the file, because the import takes a second

        path, _, config = name.partition(":")
        try:
            rows = datasets.load_dataset(path, config or None, split=split)
        except ValueError as error:  # which lists the splits or the configurations that exist
            raise InputError(f"{name}, split {split!r}: {str(error).splitlines()[0]}") from None
        yield from rows


@run.file_errors()
def load_groups(args, tokenizer, eos_ids: set[int], name: str, split: str, encode_row) -> list[tuple]:
    """Reads and tokenizes a data set, and prints a summary. The ranks share the work, and all get all groups.

    encode_row: a function of a row (and of the first three arguments) that returns its group.

    Returns:
        The groups in the order of the rows.
    """
    groups = []
    skipped = {}  # {reason: row numbers}
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = enumerate(read_rows(name, split), 1)
    # One iterator for all chunks, because the bar closes when an iterator of its own ends.
    rows = iter(tqdm(rows, f"reading {name}", leave=False, unit=" rows", delay=2, disable=not run.is_main()))
    while chunk := list(islice(rows, CHUNK * world)):  # every rank reads all rows, and encodes its share
        results = []
        for number, row in chunk[rank::world]:
            try:
                group = encode_row(args, tokenizer, eos_ids, split_conversations(row))
                results.append((number, group))
            except (SkipRow, InputError) as error:
                results.append((number, error))
            except Exception as error:
                error.add_note(f"{name}, row {number}")
                raise
        for number, result in sorted(sum(run.gather(results), [])):
            if isinstance(result, InputError):  # on all ranks
                raise InputError(f"{name}, row {number}: {result}")
            if isinstance(result, SkipRow):
                skipped.setdefault(str(result), []).append(number)
            else:
                groups.append(result)
    # Truncated completions have no EOS token.
    completions = [example.completion_ids for group in groups for example in group if example.completion_ids]
    truncated = sum(ids[-1] not in eos_ids for ids in completions)
    summary = f"{name}: {len(groups)} of {len(groups) + sum(map(len, skipped.values()))} rows"
    for reason, numbers in skipped.items():
        summary += f"; {len(numbers)} skipped, the first is row {numbers[0]}: {reason}"
    summary += f"; {truncated} of {len(completions)} completions truncated by --max-length"
    if not groups:
        raise InputError(summary)
    run.print_main(summary)
    return groups


def split_conversations(row):
    """Returns a row of two conversations with the columns of other pairs.

    {"chosen": [Q, A], "rejected": [Q, B]}, where Q stands for one or more messages, A and B for the answers,
    becomes {"prompt": [Q], "chosen": [A], "rejected": [B]}.
    """
    if not isinstance(row, dict):
        raise InputError("a line must be one JSON object, {…}")
    chosen = row.get("chosen")
    if not isinstance(chosen, list) or len(chosen) < 2:
        return row
    prompt, rejected = chosen[:-1], row.get("rejected") or []
    if rejected and rejected[:-1] != prompt:
        raise InputError("chosen and rejected must both be the prompt and one more message")
    return row | {"prompt": prompt, "chosen": chosen[-1:], "rejected": rejected[-1:]}


def read_prompt(row) -> str | list:
    """Returns the prompt of a row. Raises InputError if it has none, or a part of it in another column."""
    (prompt,) = read_columns(row, "prompt")
    for column in ("system", "input", "history", "tools"):  # of other formats, such as Alpaca's
        if row.get(column):
            raise InputError(f"the column {column!r} would be ignored: make it part of the prompt")
    return prompt


def read_columns(row, *columns: str) -> list:
    """Returns the values of some columns. Raises InputError if a row has no value in one of them."""
    for column in columns:
        if row.get(column) is None:
            raise InputError(f"no value for {column!r} in the columns {', '.join(row)}")
    return [row[column] for column in columns]


def check_groups(name: str, groups: list[tuple], size: int, needed: int):
    """Raises InputError unless all rows of a data set have `size` Examples, and are enough for a step."""
    sizes = {len(group) for group in groups}
    if sizes != {size} or len(groups) < needed:
        raise InputError(
            f"--dataset {name}: {len(groups)} rows with {sizes} completions (or a prompt alone), but a step "
            f"needs {needed} rows with {size}; docs/data.md shows the columns of each script"
        )


# === Tokens ===


@run.file_errors()
def load_tokenizer(args):
    """Loads --model's tokenizer. Returns it and the set of EOS ids: the ids of all tokens that end a turn."""
    tokenizer = AutoTokenizer.from_pretrained(
        args.model,
        trust_remote_code=args.trust_remote_code,
        # If mistral_common is installed (with vLLM), the default reads Mistral's own tokenizer file, which
        # has no chat template.
        mistral_format=False,
    )
    config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    run.check_positions(args, config)  # before minutes of reading the data
    # Chat models often end a turn with another token than the tokenizer's EOS, for example Llama 3's
    # <|eot_id|>. Their generation config, or else their model config, lists it.
    ids = config.get_text_config().eos_token_id
    with suppress(OSError):  # not every model has a generation config
        ids = GenerationConfig.from_pretrained(args.model).eos_token_id or ids
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
    if args.eos_token:
        tokenizer.eos_token = args.eos_token
    if tokenizer.eos_token not in tokenizer.get_vocab():
        raise InputError(f"the tokenizer has no token {tokenizer.eos_token}: set one with --eos-token")
    eos_ids = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}
    if tokenizer.chat_template:
        # Warns if an answer ends with no EOS token, for example a base model's whose template is ChatML.
        answer = render(tokenizer, as_messages("Text") + as_messages("Text", "assistant"))
        end = answer.rpartition("Text")[2].strip()
        if not eos_ids.issuperset(tokenizer(end, add_special_tokens=False).input_ids[:1]):
            run.print_main(f"warning: answers end with {end!r}, which is no EOS token: pass --eos-token")
    return tokenizer, eos_ids


def encode(args, tokenizer, eos_ids: set[int], prompt: str | list, completions=(), row=None) -> tuple:
    """Tokenizes a prompt and its completions.

    A completion's ids end with its first EOS token, unless they are truncated to --max-length.

    row: the row of the data set, if a reward function gets it.

    Returns one Example for each completion; if there are none, one Example with the prompt alone. Raises
    SkipRow if the prompt is too long, or if the chat template loses a part of a conversation.
    """
    before, *endings = render_conversation(tokenizer, prompt, completions)
    prompt_ids, *all_ids = tokenize(tokenizer, [before, *(before + ending for ending in endings)])
    if not 0 < len(prompt_ids) <= min(args.max_prompt_length, args.max_length - 1):
        raise SkipRow("prompt empty, or too long for --max-prompt-length and --max-length")
    prompt_only = Example(prompt, array("i", prompt_ids), row=row)
    examples = []
    for ids, ending in zip(all_ids, endings):
        # Each conversation is tokenized as a whole, and split after the prompt's ids.
        completion_ids = ids[len(prompt_ids) :]
        if prompt_ids + completion_ids != ids:
            # One token spans the end of the prompt and the start of the completion, for example a token for
            # two line breaks. Then the completion is tokenized alone.
            completion_ids = tokenizer(ending, add_special_tokens=False).input_ids
        # It ends with its first EOS token. Without a template, this is the one that is added here. With a
        # template, the text after its own (often a line break) is removed, because the model stops before it.
        completion_ids = truncate_after_eos([*completion_ids, tokenizer.eos_token_id], eos_ids)
        example = prompt_only._replace(completion_ids=array("i", completion_ids))
        examples.append(example.truncate(args.max_length))
    return tuple(examples) or (prompt_only,)


def tokenize(tokenizer, texts: list[str]) -> list[list[int]]:
    """Returns the ids of each text, without the EOS token that some tokenizers append to every text."""
    encoded = tokenizer(
        texts,
        add_special_tokens=not tokenizer.chat_template,  # a chat template has already written them
        return_special_tokens_mask=True,  # 1 at the tokens that are not in the text
    )
    for ids, mask in zip(encoded.input_ids, encoded.special_tokens_mask):
        # removes such tokens from the end
        while mask and mask.pop():
            ids.pop()
    return encoded.input_ids


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
    before = render_checked(tokenizer, messages, add_generation_prompt=True)
    endings = []
    for completion in completions:
        conversation = render_checked(tokenizer, messages + as_messages(completion, "assistant"))
        if not conversation.startswith(before):  # then the template usually fails for every row
            raise InputError(
                "the chat template renders a prompt differently when an answer follows: "
                "pass another --chat-template (docs/data.md)"
            )
        endings.append(conversation[len(before) :])
    return [before, *endings]


def as_messages(value: str | list, role: str = "user") -> list[dict]:
    """Returns the messages of a prompt or a completion. A text becomes one message of the role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if any(message.get("tool_calls") for message in value):
        raise InputError(
            "a message has tool_calls, which many chat templates drop: write them as its content"
        )
    # Arrow fills absent keys with None, at which templates would fail.
    return [{key: part for key, part in message.items() if part is not None} for message in value]


def render(tokenizer, messages: list[dict], **options) -> str:
    """Renders messages with the chat template."""
    # Llama 3's template writes the date. A run that is resumed on another day must read the same tokens.
    return tokenizer.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024", **options)


def render_checked(tokenizer, messages: list[dict], **options) -> str:
    """Renders messages, and raises SkipRow if the template refuses, changes or drops one of them.

    For example, Gemma 2's template refuses a system message, and some drop the thought of an answer.
    """
    try:
        text = render(tokenizer, messages, **options)
    except jinja2.TemplateError as error:
        raise SkipRow(f"the chat template refuses it: {error}") from None
    if not all(message["content"].strip() in text for message in messages):
        raise SkipRow("the chat template changes or drops the content of a message")
    return text
