"""From the rows of a file to token ids.

To read another kind of file, extend `read_rows`. To read other columns, edit `encode_row` in the script. If
you build Examples in another way, make their ids arrays ("i"), and end completion_ids with an EOS token,
unless the completion is truncated.

A group is the tuple of a row's Examples: one for each completion, or one with the prompt alone.
"""

import gzip
import hashlib
import json
import os
import re
import unicodedata
from array import array
from contextlib import suppress
from functools import cache
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


def read_rows(name: str, split: str):
    """Yields (number, row) of a .jsonl, .jsonl.gz or .parquet file, or of a Hub data set, counted from 1.

    The name of a Hub data set may end with :CONFIGURATION.

    The number of a row of a .jsonl file is the number of its line.

    split: the split of a Hub data set; a file has none.
    """
    with run.library_errors(name):
        if name.endswith((".jsonl", ".jsonl.gz")):
            rows = read_lines(name)
        elif name.endswith(".parquet"):
            rows = read_parquet(name)
        else:
            import datasets  # not at the top of the file, because the import takes a second

            path, _, config = name.partition(":")
            rows = enumerate(datasets.load_dataset(path, config or None, split=split), 1)
        hidden = not run.is_main()
        yield from tqdm(rows, f"reading {name}", leave=False, unit=" rows", delay=2, disable=hidden)


def read_lines(name: str):
    """Yields (number, row) of the lines of a .jsonl or .jsonl.gz file. Empty lines are no rows."""
    open_file = gzip.open if name.endswith(".gz") else open
    with open_file(name, "rt", encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"row {number} is no JSON: {error}") from error
                yield number, row


def read_parquet(name: str):
    """Yields (number, row) of a .parquet file."""
    import datasets

    number = 0
    for batch in pyarrow.parquet.ParquetFile(name).iter_batches(CHUNK):
        table = pyarrow.Table.from_batches([batch])
        # Dataset decodes columns of Arrow's JSON type, which `table.to_pylist()` leaves as text. Without its
        # metadata the table has no images, which Dataset would decode too.
        for row in datasets.Dataset(table.replace_schema_metadata()).to_list():
            number += 1
            yield number, row


def encode_rows(name: str, split: str, encode) -> tuple[list, list]:
    """Encodes all rows of a data set. The ranks of a machine share the work, and all get all groups.

    Ranks of other machines do not share it, because they may have another file of this name, by mistake. This
    is an InputError.

    encode: a function that returns the group of a row, or raises SkipRow.

    Returns:
        The groups in the order of the rows, and [(row number, reason), ...] of the skipped rows.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    rank = int(os.environ.get("LOCAL_RANK", 0)) % ranks  # without torchrun, it may be set alone
    if ranks > 1:
        machine, _ = dist.new_subgroups(ranks)
    groups = []
    skipped = []
    rows = read_rows(name, split)
    while True:
        results = []  # of this rank's rows; the ranks take turns
        for number, row in islice(rows, rank, CHUNK * ranks, ranks):
            try:
                results.append((number, encode(row)))
            except Exception as error:
                results.append((number, error))
        parts = [results] * ranks
        if ranks > 1:
            dist.all_gather_object(parts, results, machine)
            parts[rank] = results  # whose exceptions have a traceback
        in_order = sorted(sum(parts, []), key=lambda part: part[0])
        if not in_order:  # no row is left
            if dist.is_initialized() and len(set(run.gather(hash_groups(groups)))) > 1:
                raise InputError(f"{name} has other rows on another machine")
            return groups, skipped
        for number, result in in_order:
            if isinstance(result, SkipRow):
                skipped.append((number, str(result)))
            elif isinstance(result, Exception):
                result.add_note(f"{name}, row {number}")
                raise result
            else:
                groups.append(result)


def hash_groups(groups: list[tuple]) -> str:
    """Returns a hash of the tokens, scores, labels and answers of a data set."""
    content = hashlib.sha256()
    for group in groups:
        for example in group:
            content.update(example.prompt_ids + example.completion_ids)  # the bytes of an array
            content.update(repr((example.reward, example.desirable, example.answer)).encode())
    return content.hexdigest()


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


def print_summary(name: str, eos_ids: set[int], groups: list[tuple], skipped: list[tuple]):
    """Prints how many rows a data set has, how many were skipped and why, and what was truncated.

    Raises InputError if no row is left.

    skipped: [(row number, reason), ...].
    """
    summary = f"{name}: {len(groups)} of {len(groups) + len(skipped)} rows"
    numbers_by_reason = {}
    for number, reason in skipped:
        numbers_by_reason.setdefault(reason, []).append(number)
    for reason, numbers in numbers_by_reason.items():
        summary += f"; {len(numbers)} skipped, the first is row {numbers[0]}: {reason}"
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
    eos_ids = {tokenizer.eos_token_id, *ids} - {None}
    if tokenizer.chat_template:
        warn_about_end(tokenizer, eos_ids)
    return tokenizer, eos_ids


def warn_about_end(tokenizer, eos_ids: set[int]):
    """Warns if the chat template ends an answer with another token than an EOS token.

    Samples would not end there. For example, base models whose template is ChatML often have another EOS
    token than <|im_end|>.
    """
    messages = as_messages("Text") + as_messages("Text", "assistant")
    end = render(tokenizer, messages).rpartition("Text")[2].strip()
    first_id = tokenizer(end, add_special_tokens=False).input_ids[:1]
    if not eos_ids.issuperset(first_id):
        run.print_main(
            f"warning: the chat template ends an answer with {end!r}, which is no EOS token, so samples do "
            "not end there: pass --eos-token"
        )


def encode(args, tokenizer, eos_ids: set[int], prompt: str | list, completions=()) -> list[Example]:
    """Tokenizes a prompt and its completions.

    A completion's ids include its EOS token, unless they are truncated to --max-length.

    Returns one Example for each completion; if there are none, one Example with the prompt alone. The
    Examples have no texts, because training reads only token ids. Raises SkipRow if the prompt is too long,
    or if the tokens of a conversation are not its text.
    """
    # 1. Each conversation, a prompt with a completion, is tokenized as a whole.
    try:
        before, *endings = render_conversation(tokenizer, prompt, completions)
    except jinja2.TemplateError as error:  # for example, Gemma 2's template takes no system message
        raise SkipRow(f"the chat template refuses it: {error}") from None
    texts = [before, *(before + ending for ending in endings)]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:  # half of a character beyond U+FFFF, which tokenizers do not take
        raise SkipRow("its text is not valid Unicode") from None
    prompt_ids, *all_ids = tokenize(tokenizer, texts)
    if not 0 < len(prompt_ids) <= min(args.max_prompt_length, args.max_length - 1):
        raise SkipRow("prompt empty, or too long for --max-prompt-length and --max-length")
    all_completion_ids = []
    for ids, ending in zip(all_ids, endings):
        # 2. It is split after the prompt's ids.
        completion_ids = ids[len(prompt_ids) :]
        if prompt_ids + completion_ids != ids:
            # One token spans the end of the prompt and the start of the completion, for example a token for
            # two line breaks. Then the completion is tokenized alone.
            completion_ids = tokenizer(ending, add_special_tokens=False).input_ids
        # 3. The completion ends with its first EOS token. Without a template, it has none yet. With a
        # template, the text after the first one (often a line break) is removed, because the model stops
        # before it.
        all_completion_ids.append(truncate_after_eos([*completion_ids, tokenizer.eos_token_id], eos_ids))
    # 4. The tokens must be the text.
    for text, completion_ids in zip(texts, [[], *all_completion_ids]):
        if not is_text(tokenizer, text, prompt_ids + completion_ids):
            raise SkipRow(
                "its tokens are not its text: unknown characters, a special token that is split, "
                "or an EOS token before its end"
            )
    prompt_only = Example("", array("i", prompt_ids))
    examples = [prompt_only._replace(completion_ids=array("i", ids)) for ids in all_completion_ids]
    return [example.truncate(args.max_length) for example in examples or [prompt_only]]


def tokenize(tokenizer, texts: list[str]) -> list[list[int]]:
    """Returns the ids of each text, without the EOS token that some tokenizers append to every text."""
    encoded = tokenizer(
        texts,
        add_special_tokens=not tokenizer.chat_template,  # a chat template has already written them
        return_special_tokens_mask=True,  # 1 at the tokens that are not in the text
    )
    for ids, mask in zip(encoded.input_ids, encoded.special_tokens_mask):
        while mask and mask.pop():
            ids.pop()
    return encoded.input_ids


def is_text(tokenizer, text: str, ids: list[int]) -> bool:
    """Returns whether token ids decode to their text, and every added token that it spells is one id.

    The text and the decoded ids are compared between the added tokens (such as <s> and <|im_end|>), because
    the tokenizer and `encode` add some of them to the ids. White space beside these tokens is ignored,
    because SentencePiece adds a space there and some of the tokens absorb it. Characters that Unicode defines
    as the same count as the same, for example é as one or as two characters (NFC).
    """
    pattern, added_ids = added_tokens(tokenizer)
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    pieces = []
    for whole in (text, decoded):
        stripped = map(str.strip, pattern.split(unicodedata.normalize("NFC", whole)))
        pieces.append([piece for piece in stripped if piece])
    spelled = len(pattern.findall(decoded))
    return pieces[0] == pieces[1] and spelled == sum(token in added_ids for token in ids)


@cache  # because a tokenizer may have thousands of them
def added_tokens(tokenizer) -> tuple[re.Pattern, set[int]]:
    """Returns a pattern that finds the added tokens in a text, and their ids.

    A tokenizer finds these tokens before it splits the rest of a text. Tokens of white space are left out
    (Gemma's are ▁▁, ▁▁▁, …), and so is the token for unknown characters, unless it is also the BOS or EOS
    token (GPT-2).
    """
    tokens = {*tokenizer.get_added_vocab()} - {tokenizer.unk_token}
    tokens |= {tokenizer.bos_token or "", tokenizer.eos_token}
    tokens = [token for token in tokens if token.replace("▁", " ").strip()]
    longest_first = sorted(tokens, key=len, reverse=True)  # one may contain another
    pattern = re.compile("|".join(map(re.escape, longest_first)))
    return pattern, {*tokenizer.convert_tokens_to_ids(longest_first)}


def truncate_after_eos(ids: list[int], eos_ids: set[int]) -> list[int]:
    """Removes everything after the first EOS token, if there is one."""
    for length, token in enumerate(ids, 1):
        if token in eos_ids:
            return ids[:length]
    return ids


# === Conversations ===
# The text of a prompt and its completions, as the chat template renders it.


# Takes the place of the function of this name that transformers gives to templates. Llama 3's template reads
# `date_string` instead.
FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%m', '07')"
    " | replace('%b', 'Jul') | replace('%B', 'July') | replace('%Y', '2024') }}{%- endmacro -%}"
)


def render_conversation(tokenizer, prompt: str | list, completions) -> list[str]:
    """Returns the text of a prompt, and for each completion what follows when it answers the prompt.

    A tokenizer without a chat template takes only texts, which are concatenated.
    """
    if not tokenizer.chat_template:
        if isinstance(prompt, list):
            raise InputError("messages need a chat template, and the tokenizer has none: --chat-template")
        return [prompt, *completions]
    messages = as_messages(prompt)
    if messages[-1]["role"] == "assistant":
        raise InputError("the prompt ends with a message of the assistant, and another one would follow")
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
    """Returns the messages of a prompt or a completion. A text becomes one message of the role.

    Raises InputError if a message has other parts, for example `tool_calls`, which many templates would drop.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = []
    for message in value:
        keys = [key for key, part in message.items() if part]  # Arrow fills keys with null
        if not {"role", "content"}.issuperset(keys):
            raise InputError(f"a message has {', '.join(keys)}, but only its role and content are read")
        messages.append({"role": message["role"], "content": message["content"]})
    return messages


def render(tokenizer, messages: list[dict], **options) -> str:
    """Renders messages with the chat template.

    Some templates write the day's date. It is fixed here, so that a run that is resumed on another day reads
    the same tokens.
    """
    template = FIXED_DATE + tokenizer.get_chat_template()  # of several named ones, the default
    options |= {"chat_template": template, "date_string": "26 Jul 2024", "tokenize": False}
    return tokenizer.apply_chat_template(messages, **options)
