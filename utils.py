"""Log-probability and evaluation helpers shared by the four humanline scripts: token ids, token log-probs,
models and engines that sample, rewards, statistics.

B sequences, T tokens, N completion tokens (in rewards and statistics: samples), V vocabulary, D hidden size.
Log-probs are in nats. A mask is 1 at completion tokens, else 0. No function here reads a script's flags.
"""

import gc
import math
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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


def gather(value) -> list:
    """The value of every rank, on every rank."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    return of_ranks


# === Token ids ===
class Example(NamedTuple):
    """A prompt, alone or with one completion: a row's, or a sample of the policy."""

    prompt: str | list  # text, or messages
    prompt_ids: list[int]
    completion_ids: list[int] = []  # ends with an end-of-turn token, unless it was cut
    reward: float = math.nan  # a score; chosen 1, rejected 0
    text: str = ""  # of a sample
    finished: bool = True  # the sample ended by itself
    answer: str = ""  # gold answer of a math problem

    @property
    def length(self):
        """In tokens."""
        return len(self.prompt_ids) + len(self.completion_ids)

    def cut(self, max_length: int):
        """With a completion that is cut so that prompt and completion have at most max_length tokens."""
        return self._replace(completion_ids=self.completion_ids[: max_length - len(self.prompt_ids)])


class CannotTrain(Exception):
    """Why a row is left out. Other exceptions end the run: there the file, or the template, is to blame."""


def load_tokenizer(
    name: str,
    chat_template: str = "",
    eos_token: str = "",
    trust_remote_code: bool = False,
):
    """A model's tokenizer, and the ids of all tokens that end a turn.

    chat_template: a Jinja file instead of the model's own. eos_token: instead of the tokenizer's own.
    """
    # With mistral_common installed, transformers would read Mistral's own file, which has no template.
    tokenizer = AutoTokenizer.from_pretrained(
        name,
        trust_remote_code=trust_remote_code,
        mistral_format=False,
    )
    if chat_template:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    if eos_token:
        tokenizer.eos_token = eos_token
    if tokenizer.eos_token not in tokenizer.get_vocab():
        raise ValueError(f"its tokenizer has no end of turn ({tokenizer.eos_token}): name one, --eos-token")
    # Chat models often end a turn with another token than the tokenizer's: Llama 3's <|eot_id|>.
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).get_text_config()
    ids = config.eos_token_id or []
    with suppress(OSError):  # not every model has one
        ids = GenerationConfig.from_pretrained(name).eos_token_id or ids
    if isinstance(ids, int):
        ids = [ids]
    return tokenizer, {tokenizer.eos_token_id, *ids}


# Where other formats (Alpaca's, LLaMA-Factory's) have text that belongs to the prompt.
NOT_READ = ("input", "system", "system_prompt", "history", "context", "documents", "images", "tools")


def check_columns(row):
    """Raises ValueError if a row has text where no script looks for it."""
    for column in NOT_READ:
        if row.get(column):
            raise ValueError(f"its column {column!r} would be ignored: make it part of the prompt")


def as_messages(prompt: str | list) -> list[dict]:
    """A text is the user's one message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = []
    for message in prompt:
        # Arrow gives every message the keys of all, with nulls, which a template may take for values.
        messages.append({key: value for key, value in message.items() if value is not None})
    return messages


def render(tokenizer, messages: list[dict], **options) -> str:
    """The messages in the chat template. Llama's writes the date: always this one, so that runs repeat."""
    return tokenizer.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024", **options)


def encode(
    tokenizer,
    eos_ids: set[int],
    prompt: str | list,
    completion: str | None = None,
) -> tuple:
    """Token ids of a prompt, and of its completion up to and with the end of turn ([] without completion).

    They are the ids of the whole conversation in the chat template, cut where the prompt's end. A tokenizer
    without a template takes texts, which it joins. Raises CannotTrain, or ValueError if the template is to
    blame: what is wrong here would train on wrong tokens, and no metric would show it.
    """
    messages = as_messages(prompt)
    if not messages[-1]["content"].strip():
        raise CannotTrain("prompt empty")
    if tokenizer.chat_template or isinstance(prompt, list):
        before = render(tokenizer, messages, add_generation_prompt=True)
        whole = before
        if completion is not None:
            messages = [*messages, {"role": "assistant", "content": completion}]
            whole = render(tokenizer, messages)
        check_rendering(before, whole, messages)
        special = False  # the template has written them
    else:
        before = prompt
        whole = prompt + (completion or "")
        special = True

    whole.encode()  # an error if there is half a character, which no tokenizer reads
    prompt_ids = tokenizer(before, add_special_tokens=special).input_ids
    ids = tokenizer(whole, add_special_tokens=special).input_ids
    # Some tokenizers append an end of turn to every text. It is taken off, and added below, unless it stands
    # in the prompt's text (behind it may be white space that the token swallows).
    if prompt_ids[-1:] == [tokenizer.eos_token_id] and not before.rstrip().endswith(tokenizer.eos_token):
        prompt_ids.pop()
        ids.pop()

    if mostly_unknown(tokenizer, ids):
        raise CannotTrain("most of its tokens are unknown to the tokenizer")
    if completion is None:
        return prompt_ids, []
    completion_ids = ids[len(prompt_ids) :]
    # A token may span both, such as one for two line breaks. Then the completion is tokenized alone, if both
    # still decode to the same text.
    if prompt_ids + completion_ids != ids:
        completion_ids = tokenizer(whole[len(before) :], add_special_tokens=False).input_ids
        if tokenizer.decode(prompt_ids + completion_ids) != tokenizer.decode(ids):
            raise CannotTrain("a token spans prompt and completion")
    if not completion_ids or completion_ids[0] in eos_ids:
        raise CannotTrain("the tokenizer drops its text")  # callers refuse empty completions
    # A text without a template gets its end here. A template has one, and what it writes behind that is not
    # the model's to say.
    return prompt_ids, until_end([*completion_ids, tokenizer.eos_token_id], eos_ids)


def until_end(ids: list[int], eos_ids: set[int]) -> list[int]:
    """Up to and with the first end of turn, if there is one."""
    for length, token in enumerate(ids, 1):
        if token in eos_ids:
            return ids[:length]
    return ids


def mostly_unknown(tokenizer, ids: list[int]) -> bool:
    return 2 * ids.count(tokenizer.unk_token_id) > len(ids)


def check_rendering(before: str, whole: str, messages: list[dict]):
    """ValueError if an answer changes a prompt's rendering; CannotTrain if the text of a message is lost."""
    if not whole.startswith(before):
        raise ValueError(
            "the chat template renders a prompt differently once it is answered: pass --chat-template"
        )
    rendered = "".join(whole.split())  # templates may strip white space
    for message in messages:
        if "".join(message["content"].split()) not in rendered:
            raise CannotTrain("the chat template changes the text of a message")


def decode_completion(tokenizer, prompt: Example, ids: list[int]) -> str:
    """The text of a sample, without special tokens.

    Behind a prompt without a template it is what the ids add to the prompt's text: SentencePiece alone would
    take the space in front of a text away.
    """
    prompt_ids = [] if tokenizer.chat_template else prompt.prompt_ids
    before, whole = tokenizer.batch_decode([prompt_ids, prompt_ids + ids], skip_special_tokens=True)
    return whole[len(before) :]


# === Token log-probs ===
def pad_rows(rows, device, value=0, side: str = "right"):
    """(B, T): rows of numbers, padded with `value`."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, True, value, side).to(device)


def pad_batch(examples: list[Example], device):
    """input_ids (B, T) int64, padded on the right with 0, and mask (B, T) fp32."""
    ids = [example.prompt_ids + example.completion_ids for example in examples]
    masks = [[0.0] * len(example.prompt_ids) + [1.0] * len(example.completion_ids) for example in examples]
    return pad_rows(ids, device), pad_rows(masks, device)


def matmul_fp32(a, b):
    """a @ b in fp32 or wider. Of bf16 factors a GPU makes exact products, and sums them in fp32."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    dtype = torch.promote_types(a.dtype, torch.float32)
    return a.to(dtype) @ b.to(dtype)


BLOCK = 2048  # tokens of the vocabulary whose logits are computed at once


def head_logits(hidden, weight, bias, start, softcap, temperature):
    """A block of the head's logits / temperature, (N, BLOCK): columns `start` and following."""
    block = slice(start, start + BLOCK)
    z = matmul_fp32(hidden, weight[block].T)
    if bias is not None:
        z += bias[block]
    if softcap:  # Gemma 2: softcap · tanh(z / softcap)
        return z.div_(softcap).tanh_().mul_(softcap / temperature)
    if temperature != 1:
        z.div_(temperature)
    return z


def locate(targets, start, size):
    """(N, 1) each: the targets' columns in a block, or the nearest ones; and whether they are in it."""
    columns = (targets - start)[:, None]
    nearest = columns.clamp(0, size - 1)
    return nearest, nearest == columns


MAX_KEPT = 2**28  # logits of a pass that may stay in memory for the backward pass, 1 GiB in fp32


class HeadLogps(torch.autograd.Function):
    """log softmax(z)[target], (N,), of the logits z = head(hidden) / temperature, (N, V), in fp32 or wider.

    z would be the largest tensor of a pass by far. Here it never is one: it comes in blocks of BLOCK columns,
    which the backward pass computes again if there are more than MAX_KEPT. (Blocks of the N tokens
    would each add to the whole d_weight, and round in bf16.) With L = log Σ_v exp z_v,

        log softmax(z)[target] = z[target] - L
        its gradient in z      = onehot(target) - exp(z - L)
    """

    @staticmethod
    def forward(ctx, hidden, targets, weight, bias, softcap, temperature):
        # hidden (N, D), targets (N,), weight (V, D), bias (V,) or None
        ctx.settings = (softcap, temperature)
        ctx.kept = []  # blocks
        N = len(hidden)
        keep = ctx.needs_input_grad[0] and N * len(weight) <= MAX_KEPT
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        L = hidden.new_full((N, 1), -math.inf, dtype=dtype)  # of the blocks so far
        z_target = torch.full_like(L, math.nan)  # it stays so if a token is not in the vocabulary
        for start in range(0, len(weight), BLOCK):
            z = head_logits(hidden, weight, bias, start, *ctx.settings)
            L_block = z.logsumexp(-1, keepdim=True)
            L = torch.logaddexp(L, L_block)
            columns, inside = locate(targets, start, z.shape[1])
            z_target = torch.where(inside, z.gather(1, columns), z_target)
            if keep:
                ctx.kept.append(z)
            del z  # or two blocks would be in memory at once
        ctx.save_for_backward(hidden, targets, weight, bias, L)
        return (z_target - L).sum(-1)  # not [:, 0], a view: FSDP2 warns of those

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
            if softcap:
                slope = 1 - (z * (temperature / softcap)) ** 2  # of tanh
            columns, inside = locate(targets, start, z.shape[1])
            # The gradient in head(hidden) before softcap and temperature:
            # d_raw = (onehot - softmax) · d_logps / temperature [· slope]. In place, since one more tensor of
            # this size would double the peak of the backward pass (with softcap `slope` is such a tensor).
            d_raw = z.sub_(L).exp_().mul_(-scaled)
            d_raw.scatter_add_(1, columns, torch.where(inside, scaled, 0))
            if softcap:
                d_raw.mul_(slope)
            if bias is not None:
                d_bias[block] = d_raw.sum(0)
            d_raw = d_raw.to(weight.dtype)  # bf16 factors again
            d_hidden += matmul_fp32(d_raw, weight[block])
            d_weight[block] = matmul_fp32(d_raw.T, hidden)
            del z, d_raw
        return d_hidden.to(hidden.dtype), None, d_weight, d_bias, None, None


@torch.compiler.disable  # lengths are other ones in every pass
def loop_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    starts,
    **options,
):
    """Causal attention within each of the sequences that stand in one row, (1, heads, ΣT, head size).

    transformers calls it with `starts`, which `pack` has put beside the token ids. A model that is called in
    another way than by `token_logps` gets a TypeError for want of them.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # it takes half a second

    lengths = starts.diff().tolist()
    outputs = []
    for q, k, v in zip(*(states.split(lengths, dim=2) for states in (query, key, value))):
        output, _ = sdpa_attention_forward(module, q, k, v, None, **options)
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def varlen_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    starts,
    longest,
    **options,
):
    """The same by one kernel for all sequences, which CUDA has for bf16 and most head sizes."""
    output = varlen_attn(
        query[0].transpose(0, 1),  # (ΣT, heads, head size)
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        starts,
        starts,
        longest,
        longest,
        scale=options["scaling"],
        window_size=(-1, 0),  # causal
        enable_gqa=True,
    )
    return output[None], None


PACKED = {"varlen": varlen_attention, "loop": loop_attention}


def pack(input_ids, selected):
    """The sequences one behind the other, without padding: a model's inputs, (1, ΣT).

    Also returns which tokens these are, (B, T): what stands before the last selected one of a sequence, which
    itself predicts none.
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    # (B,): the place of the last selected token, which is the number of those before it. These are read.
    lengths = (positions * selected).amax(1)
    starts = F.pad(lengths.cumsum(0), (1, 0))  # (B + 1,), with the end
    read = positions < lengths[:, None]
    inputs = {
        "input_ids": input_ids[read][None],
        "position_ids": positions[read][None],
        "starts": starts.int(),
        "longest": lengths.max().item(),
    }
    return inputs, read


def token_logps(
    model,
    input_ids,
    mask,
    temperature: float = 1.0,
):
    """log π(y_t | x, y_<t) of every completion token, (B, T) in fp32 or wider, 0 where mask is 0.

    The model runs with another forward of its head (an `nn.Linear`), which returns N log-probs in place of
    logits. No (B, T, V) tensor exists, and while the head runs, FSDP2 has gathered its weight. Logits are
    fp32: bf16 ones near 16 are 0.125 apart, and log-ratios of order 1e-3.

    Args:
        input_ids: (B, T), padded on the right.
        mask: (B, T), 1 at the tokens to score; a sequence's first token has no prediction.
        temperature: that of sampling where it belongs to the policy that is trained (grpo_math), else 1.
    """
    selected = mask.bool()
    if selected[:, 0].any():
        raise ValueError("the first token of a sequence has no prediction; prepend one")
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    targets = input_ids[selected]  # (N,)
    inputs = {"input_ids": input_ids}
    predicting = selected.roll(-1, 1)  # a token is predicted one place before
    if model.config._attn_implementation in PACKED:
        inputs, read = pack(input_ids, selected)
        predicting = predicting[read][None]

    def head_logps(hidden):  # (B, T, D) -> (N,)
        tensors = (hidden[predicting], targets, head.weight, head.bias)
        return HeadLogps.apply(*tensors, softcap, temperature)

    head.forward = head_logps
    if softcap:
        # Or the model would apply it to the log-probs. By vars, since some configs refuse None.
        vars(config)["final_logit_softcapping"] = None
    try:
        logps = model(**inputs, use_cache=False).logits  # (N,)
    finally:
        del head.forward
        if softcap:
            vars(config)["final_logit_softcapping"] = softcap
    zeros = torch.zeros_like(mask, dtype=logps.dtype)
    return zeros.masked_scatter(selected, logps)


@torch.no_grad()
def choose_attention(model, longest: int) -> str:
    """Sets the fastest attention with which `token_logps` agrees with the model's own forward pass.

    They are compared on two equal sequences of 16 tokens: in both, the log-probs of the first 8 must be those
    of 8 tokens alone. They are not
        - if packed sequences see each other: the second would see all of the first;
        - if a token sees later ones: the other 8.
    First come the attentions that need no padding, then the model's own. Returns a line for the log: the
    attention that is set, and why none before it was. Raises ValueError if all fail.

    longest: tokens of a sequence in training.
    """
    for name, function in PACKED.items():
        transformers.AttentionInterface.register(name, function)  # here: it takes a second
    config = model.config.get_text_config()
    # The model would apply such a factor to what its head returns, in `token_logps` the log-probs. In bf16
    # the limit below may be too wide to show it.
    for factor in ("logits_scaling", "logit_scale", "lm_head_multiplier"):
        if getattr(config, factor, None) not in (None, 1):
            raise ValueError(f"its logits have a factor, {factor}, which `token_logps` cannot apply")
    text = torch.arange(1, 17, device=model.device) % config.vocab_size
    half = text[:8]
    logits = model(input_ids=half[None], use_cache=False).logits[0]  # (8, V)
    expected = -F.cross_entropy(logits[:-1].float(), half[1:], reduction="none")  # (7,)

    own = model.config._attn_implementation
    window = getattr(config, "sliding_window", None) or longest  # the packed ones have none
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    # Linear attention and the like carry a state along a row, from one packed sequence into the next. Layers
    # of unknown kinds are treated as if they did.
    may_carry_state = other_layers or model._is_stateful
    # Packing replaces sdpa alone, in models that hand `starts` on and have no window or state.
    implementations = ["loop", own]
    reasons = ""
    if own != "sdpa" or not model._supports_attention_backend or longest > window or may_carry_state:
        implementations = [own]
        reasons = "; packing is ruled out by a window, a state or the model's code"
    elif logits.is_cuda and logits.dtype == torch.bfloat16:
        implementations = ["varlen", "loop", own]
    input_ids = text.expand(2, 16)
    mask = torch.ones(2, 16, device=model.device)
    mask[:, 0] = 0
    limit = 0.3 if logits.dtype == torch.bfloat16 else 1e-4  # nats; two bf16 passes differ too
    for implementation in implementations:
        model.set_attn_implementation(implementation)
        try:
            logps = token_logps(model, input_ids, mask)
        except (RuntimeError, TypeError) as error:  # no kernel for the head size; `starts` not handed on
            reasons += f"; {implementation}: {error}"
            continue
        difference = (logps[:, 1:8] - expected).abs().mean()  # of (2, 7)
        if not difference > limit:  # nan is for the evaluation to report
            return implementation + reasons
        reasons += f"; {implementation}: {difference:.4f} nats off"
    raise ValueError(f"a log-prob depends on later tokens, on noise, or on a factor of the logits{reasons}")


def make_micro_batches(lengths: list[int], ranks: int, max_tokens: int = 16384):
    """Splits sequences (or pairs) into forward passes of even work, pass i for rank i % ranks.

    All ranks have as many passes, because FSDP gathers weights in all of them together. Where there are fewer
    sequences than passes some are empty. In training none is: a batch is a multiple of `ranks`, and the next
    sequence goes to the lightest pass.

    Args:
        lengths: of the sequences, in tokens.
        max_tokens: of a pass, without padding, unless one sequence is longer; 0: any.

    Returns:
        The positions in `lengths` that are in each pass.
    """
    limit = max_tokens or math.inf
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    count = 0
    while True:
        count += ranks
        micro_batches = [[] for _ in range(count)]
        tokens = [0] * count
        for i in longest_first:
            lightest = tokens.index(min(tokens))
            micro_batches[lightest].append(i)
            tokens[lightest] += lengths[i]
        if all(total <= limit or len(batch) == 1 for total, batch in zip(tokens, micro_batches)):
            return micro_batches


@torch.no_grad()
def completion_logps(model, examples: list[Example]):
    """`token_logps` of all examples, by all ranks together, and the mask, (B, T) float64 each, on the CPU."""
    world = dist.get_world_size()
    input_ids, mask = pad_batch(examples, model.device)
    logps = torch.zeros_like(mask, dtype=torch.float64)
    lengths = [example.length for example in examples]
    for indices in make_micro_batches(lengths, world)[dist.get_rank() :: world]:
        # A rank with nothing to do must still take part in gathering weights: it reads some example.
        rows = indices or [0]
        longest = max(lengths[i] for i in rows)
        values = token_logps(model, input_ids[rows, :longest], mask[rows, :longest])
        logps[indices, :longest] = values[: len(indices)].double()
    dist.all_reduce(logps)
    return logps.cpu(), mask.double().cpu()


# === Sampling ===
def max_positions(config):
    """Tokens that a model can read, by its configuration."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


def check_positions(config, longest: int, max_new_tokens: int):
    """Raises ValueError if a model cannot read `longest` tokens, of which it samples `max_new_tokens`.

    Learned positions end at max_position_embeddings. Dynamic and long RoPE change for a whole pass if one
    sequence in it is longer than the original positions. With other RoPE training may go beyond, and samples
    end at the last position, so that `max_new_tokens` alone must fit.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = str(rope)  # it may be {"full_attention": {"rope_type": ...}, ...}
    positions = max_positions(config)
    tokens = longest
    if "dynamic" in kinds or "longrope" in kinds:
        positions = rope.get("original_max_position_embeddings") or positions
    elif rope:
        tokens = max_new_tokens
    if tokens > positions:
        flags = "--max-new-tokens, --max-prompt-length, --max-length"
        raise ValueError(f"{tokens} tokens, and it has {positions} positions: lower {flags}")


def load_pretrained(auto, name: str, **options):
    """A model from safetensors files. Raises ValueError if weights are missing: transformers would only warn,
    and train on random ones.
    """
    model, info = auto.from_pretrained(
        name,
        output_loading_info=True,
        use_safetensors=True,
        **options,
    )
    missing = dict(model.named_parameters()).keys() & info["missing_keys"]  # buffers are computed
    if missing:
        raise ValueError(f"its files have no {min(missing)}")
    model.dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}  # for run.export
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # the others ignore it (Gemma 2)
    return model


def checksum(model) -> int:
    """Of the first numbers of every weight, for ranks to compare what they have read."""
    return sum(torch.hash_tensor(weight.flatten()[:1000]).item() for weight in model.parameters())


CHECKED = 8  # samples of every round and evaluation whose log-probs the policy must have too


@contextmanager
def unchanged_process(device):
    """vLLM changes the whole process, sampling torch's random states: they are changed back behind this."""
    environment = dict(os.environ)
    precision = torch.get_float32_matmul_precision()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield
    torch.set_float32_matmul_precision(precision)
    os.environ.clear()
    os.environ.update(environment)


# Two engines with the same methods: `update` takes the policy's weights, `generate` samples. `Sampler` below
# calls them.
class TransformersEngine:
    """A whole copy of the policy on every rank, for transformers' `generate`."""

    ranks = 1  # that share an engine

    def __init__(self, sampler):
        self.model = load_pretrained(
            AutoModelForCausalLM,
            sampler.model,
            dtype=sampler.dtype,
            trust_remote_code=sampler.trust_remote_code,
        )
        self.model.to(sampler.device)
        self.batch_size = sampler.batch_size
        self.max_new_tokens = sampler.max_new_tokens
        self.max_length = sampler.max_length
        self.model.generation_config = GenerationConfig(  # none of the model's own settings
            do_sample=True,
            temperature=sampler.temperature,
            top_p=sampler.top_p,
            top_k=0,
            remove_invalid_values=True,  # NaN is for check_engine to report
            eos_token_id=list(sampler.eos_ids),
            pad_token_id=0,
        )

    def update(self, weights):
        for target, (_, weight) in zip(self.model.parameters(), weights, strict=True):
            target.copy_(weight)

    def generate(self, batches: list[tuple]) -> list[list[tuple]]:
        """[(token ids, [])] for each batch (prompts, random seed)."""
        device = self.model.device
        outputs = []
        for prompts, seed in tqdm(batches, "sampling", leave=False, disable=dist.get_rank() != 0):
            padded = pad_rows(prompts, device, -1, "left")
            width = padded.shape[1]
            torch.manual_seed(seed)
            ids = self.model.generate(
                padded.clamp(0),
                attention_mask=(padded >= 0).long(),
                max_length=min(width + self.max_new_tokens, self.max_length),
            )
            outputs.append([(completion, []) for completion in ids[:, width:].tolist()])
        return outputs


class VllmEngine:
    """vLLM in this process, for each rank or so many ranks. On a GPU it sleeps while the policy trains."""

    batch_size = 1  # it makes its own batches

    def __init__(self, sampler):
        # It logs much, reports its use to its makers, and asks for the rank without torchrun too.
        defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "RANK": "0", "LOCAL_RANK": "0"}
        os.environ.update(defaults | os.environ)  # what is set already wins
        from vllm import LLM, SamplingParams, _custom_ops

        self.sleeps = sampler.device.type == "cuda"
        if self.sleeps:
            memory = {"gpu_memory_utilization": sampler.vllm_memory, "enable_sleep_mode": True}
            memory["max_num_batched_tokens"] = 4096  # of a prefill: more would cost cache
        else:
            _custom_ops._supports_onednn = False  # its packed weights would stay the old ones
            memory = {"kv_cache_memory_bytes": 2**30, "enforce_eager": True}
        self.llm = LLM(
            sampler.model,
            dtype=sampler.dtype,
            trust_remote_code=sampler.trust_remote_code,
            max_model_len=sampler.max_length,
            tensor_parallel_size=sampler.vllm_tensor_parallel,
            skip_tokenizer_init=True,
            load_format="dummy",  # `update` brings the weights
            hf_overrides={"head_dtype": "float32"},  # logits as exact as token_logps'
            generation_config="vllm",  # none of the model's own settings
            logprobs_mode="raw_logprobs",  # before temperature and nucleus
            distributed_executor_backend="external_launcher",  # in this process
            **memory,
        )
        self.llm.llm_engine.engine_core._finalizer.detach()  # it would destroy our process group
        gc.unfreeze()  # vLLM froze all objects, ours too, which would never be collected
        self.ranks = sampler.vllm_tensor_parallel
        self.params = SamplingParams(
            max_tokens=sampler.max_new_tokens,
            temperature=sampler.temperature,
            top_p=sampler.top_p,
            ignore_eos=True,  # vLLM's own; ours are the stop tokens
            stop_token_ids=list(sampler.eos_ids),
            detokenize=False,
        )

    def update(self, weights):
        self.llm.wake_up(tags=["weights"])  # does nothing if it is awake
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()

    def generate(self, batches: list[tuple]) -> list[list[tuple]]:
        """[(token ids, log-probs)] for each batch ([prompt], random seed)."""
        requests = []
        params = []
        for i, (prompts, seed) in enumerate(batches):
            requests.append({"prompt_token_ids": list(prompts[0])})
            own = self.params.clone()
            own.seed = seed
            # Log-probs (0: of the sampled tokens alone) for `check_engine`, which reads the first CHECKED
            # samples of all. They are dealt out in turn, so they are among the first of each engine. Of all
            # samples log-probs would double the time.
            own.logprobs = 0 if i < CHECKED else None
            params.append(own)
        outputs = []
        for result in self.llm.generate(requests, params, use_tqdm=dist.get_rank() == 0):
            output = result.outputs[0]
            ids = list(output.token_ids)
            logps = [found[token].logprob for token, found in zip(ids, output.logprobs or [])]
            outputs.append([(ids, logps)])
        if self.sleeps:
            self.llm.sleep(level=2)
        return outputs


@dataclass
class Sampler:
    """Samples of the policy, and their rewards."""

    model: str  # folder or Hub name
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_ids: set[int]
    dtype: torch.dtype  # of the engine and the reward model
    device: torch.device
    engine: str  # vllm, hf, or auto: vLLM where installed
    max_length: int  # of prompt and completion, tokens
    max_new_tokens: int
    temperature: float
    top_p: float
    batch_size: int  # sequences, for hf
    vllm_memory: float  # share of a GPU's
    vllm_tensor_parallel: int  # GPUs that share an engine
    trust_remote_code: bool
    reward_model: str = ""  # folder or Hub name of a classifier with one output

    def __post_init__(self):
        self.running = None  # the engine, which starts when it is needed first
        if self.reward_model:
            self.judge = load_reward_model(self.reward_model, self.dtype, self.trust_remote_code)
            check_positions(self.judge[0].config, self.max_length, 0)  # 0: it samples nothing

    @torch.no_grad()
    def sample(self, policy, prompts: list[Example], count: int, seed: tuple):
        """`count` samples for every prompt, on all ranks together, and all of them on every rank.

        Returns:
            A list for each prompt, and metrics. Raises ValueError if the engine's model is not the policy.
        """
        started = time.perf_counter()
        repeated = [prompt for prompt in prompts for _ in range(count)]
        with unchanged_process(self.device):
            if self.running is None:
                engine = TransformersEngine
                if self.engine == "vllm" or (self.engine == "auto" and find_spec("vllm")):
                    engine = VllmEngine
                self.max_length = min(self.max_length, max_positions(policy.config))
                self.running = engine(self)
            # One gathered parameter at a time: never a second whole model.
            named = policy.named_parameters()
            self.running.update((name, parameter.full_tensor()) for name, parameter in named)
            outputs = self.generate([prompt.prompt_ids for prompt in repeated], seed)
        samples = []
        for prompt, (ids, _) in zip(repeated, outputs):
            text = decode_completion(self.tokenizer, prompt, ids)
            finished = ids[-1] in self.eos_ids
            samples.append(prompt._replace(completion_ids=ids, reward=math.nan, text=text, finished=finished))
        reported = [logps for _, logps in outputs[:CHECKED]]
        difference = self.check_engine(policy, samples[:CHECKED], reported)
        if self.reward_model:
            model, tokenizer = self.judge
            model.to(self.device)
            rewards = reward_scores(model, tokenizer, samples).tolist()
            model.to("cpu")  # while the policy trains
            samples = [sample._replace(reward=reward) for sample, reward in zip(samples, rewards)]

        metrics = {"rollout/logp_diff_mean": difference}
        for name, values in sample_statistics(samples).items():
            metrics[f"rollout/{name}_mean"] = values.mean().item()
        metrics["perf/rollout_time"] = time.perf_counter() - started
        by_prompt = [samples[i : i + count] for i in range(0, len(samples), count)]
        return by_prompt, metrics

    def generate(self, prompts: list[list[int]], seed: tuple) -> list[tuple]:
        """(token ids up to and with the end of turn, log-probs) of every prompt, of all ranks.

        A batch of prompts has its own random seed, so that samples do not depend on the number of ranks.
        """
        ranks = self.running.ranks  # of an engine
        engines = dist.get_world_size() // ranks
        size = self.running.batch_size
        batches = []  # (prompts, random seed)
        for first in range(0, len(prompts), size):
            sequence = np.random.SeedSequence((*seed, first))
            batch_seed = int(sequence.generate_state(1)[0])
            batches.append((prompts[first : first + size], batch_seed))
        own = self.running.generate(batches[dist.get_rank() // ranks :: engines])
        of_engines = gather(own)[::ranks]  # all ranks of one have the same
        outputs = []
        for i in range(len(batches)):
            # Engine e had the batches e, e + engines, ...
            for ids, logps in of_engines[i % engines][i // engines]:
                # hf has padding behind the end. vLLM's ids stop there, so that their log-probs are as many.
                outputs.append((until_end(ids, self.eos_ids), logps))
        return outputs

    def check_engine(self, policy, samples: list[Example], reported) -> float:
        """Mean |log-prob of the engine - the policy's| over the samples' tokens, in nats.

        reported: the log-probs from `generate`; hf has none, and its model is asked for them here.
        """
        input_ids, mask = pad_batch(samples, policy.device)
        logps = token_logps(policy, input_ids, mask)[mask.bool()]
        of_engine = torch.tensor(sum(reported, []), device=policy.device)  # vLLM's
        if not len(of_engine):
            of_engine = token_logps(self.running.model, input_ids, mask)[mask.bool()]
        difference = (logps - of_engine).abs().mean().item()
        limit = 0.1 if self.dtype == torch.bfloat16 else 1e-4
        if not difference <= limit:  # nan neither
            raise ValueError(f"the engine's model is not the policy, or not finite: {difference} nats apart")
        return difference


# === Rewards ===
def load_reward_model(name: str, dtype, trust_remote_code: bool = False):
    """A classifier with one output, on the CPU, and its tokenizer."""
    model = load_pretrained(
        AutoModelForSequenceClassification,
        name,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    outputs = model.config.num_labels
    if outputs != 1 and not trust_remote_code:  # ArmoRM's code has its own `score`
        raise ValueError(f"it has {outputs} outputs; it must have one")
    tokenizer = AutoTokenizer.from_pretrained(
        name,
        trust_remote_code=trust_remote_code,
        mistral_format=False,
    )
    return model, tokenizer


def reward_input(tokenizer, sample: Example) -> str:
    """What a reward model reads: the conversation in its chat template, if it has one.

    A completion that is not finished stands without the end of its turn.
    """
    messages = as_messages(sample.prompt)
    if tokenizer.chat_template:
        messages.append({"role": "assistant", "content": sample.text})
        return render(tokenizer, messages, continue_final_message=not sample.finished)
    text = "\n".join(message["content"] for message in messages) + sample.text
    if sample.finished:
        text += tokenizer.eos_token or ""
    return text


@torch.no_grad()
def reward_scores(model, tokenizer, samples: list[Example]):
    """A reward model's one output, or its own code's `score` (ArmoRM), (N,) float64 on the CPU."""
    texts = [reward_input(tokenizer, sample) for sample in samples]
    encoded = tokenizer(texts, add_special_tokens=not tokenizer.chat_template).input_ids
    if any(mostly_unknown(tokenizer, ids) for ids in encoded):
        raise ValueError("--reward-model: most tokens of a sample are unknown to its tokenizer")
    shortest_first = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    pad_id = model.config.get_text_config().pad_token_id
    size = max(1, 16384 // max(map(len, encoded)))
    if pad_id is None:  # without one the model cannot find the last token of a padded row
        size = 1
    rank = dist.get_rank()
    world = dist.get_world_size()
    scores = torch.zeros(len(encoded), dtype=torch.float64, device=model.device)
    for first in range(rank * size, len(encoded), world * size):
        indices = shortest_first[first : first + size]
        rows = [encoded[i] for i in indices]
        input_ids = pad_rows(rows, model.device, pad_id or 0)
        attention_mask = pad_rows([[1] * len(row) for row in rows], model.device)
        output = model(input_ids=input_ids, attention_mask=attention_mask)
        score = getattr(output, "score", output.logits)  # (b,) or (b, 1)
        scores[indices] = score.double().view(len(indices))
    dist.all_reduce(scores)
    if not scores.isfinite().all():
        raise ValueError("the scores of --reward-model are not finite")
    return scores.cpu()


# === Statistics ===
def sample_statistics(samples: list[Example]):
    """Length in tokens, whether finished, and reward if there is one, (N,) float64 each."""
    statistics = {
        "length": [len(sample.completion_ids) for sample in samples],
        "finished": [sample.finished for sample in samples],
    }
    if not math.isnan(samples[0].reward):
        statistics["reward"] = [sample.reward for sample in samples]
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in statistics.items()}


def win_rate(rewards, baseline):
    """1 where a reward is above the baseline's, 0.5 where they tie, else 0. Float64."""
    return (torch.sign(rewards - baseline).double() + 1) / 2


def means(metrics: dict[str, torch.Tensor]):
    """{name: (mean, standard error)}; the error is the sample deviation / √n, 0 for one value.

    Raises ValueError if a value is not finite.
    """
    pairs = {}
    for name, values in metrics.items():
        values = values.double()
        if not values.isfinite().all():
            raise ValueError(f"{name} is not finite: look at model and data, or lower --lr")
        n = len(values)
        deviation = values.std(correction=min(1, n - 1))
        pairs[name] = (values.mean().item(), deviation.item() / math.sqrt(n))
    return pairs
