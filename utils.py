"""Log-probability and evaluation helpers, shared by the four humanline scripts.

The central function is `token_logps`: a script trains on the log-probs that it returns. The sections:

    Examples and micro-batches   what a batch is made of, and how it is divided over ranks and forward passes
    Log-probs                    `token_logps`, and `completion_logps` for evaluations
    Statistics and checks        means of a step's metrics and of evaluations
    Packing and attention        how `token_logps` computes without padding
    Head log-probs               how `token_logps` computes without keeping all logits

The last two only save time and memory. Loading, data, sampling and checkpoints are in support/, whose modules
import this one.

Notation: B sequences of T tokens, N completion tokens (in statistics: N samples), a vocabulary of V tokens,
hidden size D. Log-probs are in nats. A mask is 1 at completion tokens and 0 elsewhere.
"""

import contextlib
import heapq
import inspect
import math
from array import array
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence


class InputError(SystemExit):
    """Raised if a flag, file, row, model or disk cannot be used, or if a number is not finite.

    It ends the program with one line and exit status 1. Every other exception keeps its traceback.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.code = f"error: {text}"  # Python prints it on stderr


# === Examples and micro-batches ===
# Splitting a batch over ranks and forward passes, and padding. Losses must be sums over sequences or tokens
# that are divided by a global count, because micro-batches hold different numbers of both.


class Example(NamedTuple):
    """A prompt with at most one completion, read from a data set or sampled from the policy.

    All scripts share this class, because samplers, checkpoints and engines handle it. A field that a script
    does not use keeps its default.
    """

    # of all
    prompt: str | list  # text or messages
    prompt_ids: array  # of ints ("i"), which need a quarter of a list's memory
    completion_ids: array = array("i")  # ends with an EOS token, unless it was truncated
    row: dict | None = None  # the row of the data set, for reward functions
    # of rows with scores or labels, and of samples
    reward: float | None = None  # the completion's reward, or its score in a data set; None: unknown
    desirable: bool | None = None  # KTO's label; None: unknown
    # of samples
    text: str = ""  # the completion
    finished: bool = True  # whether the sample ended with an EOS token, before any truncation
    # of math problems
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
        room = max(0, max_length - len(self.prompt_ids))
        return self._replace(completion_ids=self.completion_ids[:room])


def make_micro_batches(lengths: list[int], ranks: int, max_tokens: int):
    """Splits sequences (or pairs) into micro-batches of similar token counts. Number i is for rank i % ranks.

    All ranks get the same number of micro-batches, because FSDP gathers weights on all ranks together. If
    there are fewer sequences than ranks, as in a small evaluation, some micro-batches are empty.

    Args:
        lengths: the number of tokens of each sequence.
        max_tokens: the maximum for a micro-batch, without padding; 0: unlimited. A longer sequence is a
            micro-batch of its own.

    Returns:
        For each micro-batch, the indices of its sequences.
    """
    limit = max_tokens or sum(lengths)
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])

    def distribute(count):
        """Returns `count` micro-batches, or None if one of them would exceed the limit.

        Each sequence, the longest first, goes to the micro-batch that has the fewest tokens so far.
        """
        micro_batches = [[] for _ in range(count)]
        heap = [(0, number) for number in range(count)]  # (tokens, number of the micro-batch), smallest first
        for i in longest_first:
            tokens, smallest = heap[0]
            tokens += min(lengths[i], limit)  # a longer sequence fills a micro-batch of its own
            if tokens > limit:
                return None
            micro_batches[smallest].append(i)
            heapq.heapreplace(heap, (tokens, smallest))
        return micro_batches

    count = ranks
    while (micro_batches := distribute(count)) is None:  # one for each sequence is always enough
        count += ranks
    return micro_batches


def pad_batch(examples: list[Example], device):
    """Returns input_ids (B, T) int64, padded on the right with 0, and mask (B, T) fp32."""
    ids = [example.prompt_ids + example.completion_ids for example in examples]
    masks = [[0.0] * len(example.prompt_ids) + [1.0] * len(example.completion_ids) for example in examples]
    return pad_rows(ids, device).long(), pad_rows(masks, device)


def pad_rows(rows, device, value=0, side: str = "right"):
    """Pads rows of numbers with `value`. Returns a (B, T) tensor."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side).to(device)


# === Log-probs ===
# The log-probs of completion tokens. You may rewrite `token_logps`: tests/test_utils.py compares it with the
# two lines in its docstring.


def token_logps(model, input_ids, mask, temperature: float = 1.0):
    """Computes log π(y_t | x, y_<t) of completion tokens.

    Returns the same as these two lines, with less memory and without padding. To do so, it replaces the
    forward of the model's head during the call.

        logits = model(input_ids).logits[:, :-1].transpose(1, 2).float() / temperature  # (B, V, T - 1)
        return mask * F.pad(-F.cross_entropy(logits, input_ids[:, 1:], reduction="none"), (1, 0))

    Logits are fp32 or wider, because bf16 logits near 16 are spaced 0.125 apart, while log-ratios are of
    order 1e-3 if the reference is synced before every update (`--k 1`).

    Args:
        input_ids: (B, T), padded on the right.
        mask: (B, T), 1 at the tokens to score. The first token of a sequence cannot be scored. A sequence
            whose mask is all 0 is allowed: its log-probs are 0, and its gradient is 0.
        temperature: divides the logits. It must be 1, except for a policy that is trained at its sampling
            temperature (grpo_math).

    Returns:
        (B, T) in fp32 or wider; 0 where the mask is 0.
    """
    selected = mask.bool()  # (B, T)
    targets = input_ids[selected]  # (N,)
    # The hidden state at t - 1 predicts token t. The last token predicts nothing.
    predicting = F.pad(selected[:, 1:], (0, 1))  # (B, T)
    inputs = {"input_ids": input_ids}  # no mask: padding is on the right, and causal attention never sees it
    if model.config._attn_implementation in ATTENTION:  # one of those that keep packed sequences apart
        inputs, predicting = pack(input_ids, predicting)  # (1, ΣT) each, with the N targets in the same order

    head = model.get_output_embeddings()  # an nn.Linear
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def head_logps(hidden):  # (B, T, D), packed (1, ΣT, D) -> (N,)
        tensors = (hidden[predicting], targets, head.weight, head.bias)
        return HeadLogps.apply(*tensors, softcap, temperature)

    with replaced_head(model, head_logps):
        logps = model(**inputs, use_cache=False).logits  # (N,): what the head has returned
    zeros = torch.zeros_like(mask, dtype=logps.dtype)
    return zeros.masked_scatter(selected, logps)  # (B, T)


@contextlib.contextmanager
def replaced_head(model, function):
    """Lets the model's head return `function(hidden)`, and lets the model apply no softcap to the result.

    The head must still be called as a module, because FSDP2 gathers its weight in the module's hooks. The
    softcap (Gemma 2) is set through vars(), because some configs reject None.
    """
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    head.forward = function
    if softcap:
        vars(config)["final_logit_softcapping"] = None
    try:
        yield
    finally:
        del head.forward  # the head has its class's forward again
        if softcap:
            vars(config)["final_logit_softcapping"] = softcap


@torch.no_grad()
def completion_logps(model, examples: list[Example], max_tokens: int):
    """Computes `token_logps` of all examples without gradients, on all ranks together. All get the result.

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


# === Statistics and checks ===
# Means of a step's metrics and of evaluations, and what refuses wrong numbers.


class Means:
    """Weighted means of a step's metrics, over all micro-batches and ranks."""

    def __init__(self):
        self.sums = {}  # {name: (sum of value · weight, sum of weights)}

    def add(self, values, weights=None):
        """Adds the values of a micro-batch.

        Args:
            values: {name: one value for each sequence, pair or token}.
            weights: a tensor of the same shape; a mask selects the values to average. None: all.
        """
        for name, value in values.items():
            # With other shapes, broadcasting would count values several times; `view_as` refuses them.
            weight = torch.ones_like(value) if weights is None else weights.view_as(value)
            total = (value.detach() * weight).sum()
            sums = torch.stack([total.double(), weight.sum().double()])
            self.sums[name] = self.sums.get(name, 0) + sums

    def reduce(self) -> dict[str, float]:
        """Returns the means over all ranks. Metrics whose weights are all 0 are omitted.

        All ranks must have added the same names in the same order.
        """
        totals = torch.stack(list(self.sums.values()))  # (names, 2)
        dist.all_reduce(totals)
        pairs = zip(self.sums, totals.cpu())
        return {name: (total / weight).item() for name, (total, weight) in pairs if weight > 0}


def clipping_metrics(log_ratio, log_epsilon_P: float, log_epsilon_R: float):
    """Returns for each token whether its log-ratio is beyond a humanline bound, and |log-ratio|.

    With --no-humanline, which clips nothing, tokens beyond a bound are counted all the same.
    """
    return {
        "humanline/clipped_low": (log_ratio < log_epsilon_P).double(),
        "humanline/clipped_high": (log_ratio > log_epsilon_R).double(),
        "humanline/log_ratio_abs_mean": log_ratio.abs(),
    }


class Evaluation(NamedTuple):
    """What a script's `evaluate` returns."""

    values: dict  # {name: one value for each pair, example, group, problem or sample}
    samples: list  # one sample for the prompt of each of the first --eval-samples rows
    answers: list = []  # a greedy answer to each of these prompts; in mathematics none
    logps: torch.Tensor | None = None  # (B, T) nats, of the held-out completions

    @property
    def counted(self) -> list:
        """The texts that are scored and shown: samples if they have rewards, else greedy answers."""
        scored = self.samples and self.samples[0].reward is not None
        return self.samples if scored else self.answers


def above(values, baseline):
    """Returns 1 where a value is above the baseline, 0.5 where both are equal, else 0 (float64)."""
    return (torch.sign(values - baseline).double() + 1) / 2


def mean_and_error(values: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """Returns {name: (mean, standard error, n)} of {name: n values}. The error of one value is nan."""
    statistics = {}
    for name, numbers in values.items():
        error = numbers.double().std() / math.sqrt(len(numbers))
        statistics[name] = (numbers.double().mean().item(), error.item(), len(numbers))
    return statistics


def check_finite(metrics: dict):
    """Raises InputError if a step's loss or gradient norm is not finite."""
    loss, grad_norm = metrics["loss"], metrics["grad_norm"]
    if not math.isfinite(loss + grad_norm):
        raise InputError(f"step {metrics['step']}: loss {loss}, gradient norm {grad_norm}; lower --lr")


# === Packing and attention ===
# `token_logps` packs the sequences of a micro-batch into one row without padding, (1, ΣT), where the model's
# attention can keep them apart. At startup `choose_attention` checks packing against the model's own forward
# pass, and refuses an attention that is wrong. Packing only saves time: to train without it, let
# `attention_candidates` return the model's own attention alone.
#
# `pack` passes the lengths under the names that transformers' flash attention expects.


def pack(input_ids, predicting):
    """Concatenates padded sequences (B, T) into one row without padding, (1, ΣT).

    Each sequence ends with the last position that predicts a target, because the tokens after this position
    need no forward pass. Without a target it keeps one token, because an attention kernel may refuse a
    sequence of length 0.

    Returns:
        The model's inputs, and `predicting` for the row, (1, ΣT).
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    # The last position that predicts, counted from 1, is the length. Elsewhere the product is 0.
    lengths = ((positions + 1) * predicting).amax(1).clamp(min=1)  # (B,)
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
    return inputs, predicting[kept][None]


# Options that transformers' layers pass to every attention, and that change no result here.
NEUTRAL = {"position_ids", "use_cache", "output_router_logits", "cu_seq_lens_k", "max_length_k"}


def check_plain(attention_mask, longest: int, dropout=0.0, sliding_window=None, **options):
    """Raises TypeError if a layer asks for more than causal attention, which packing would ignore.

    For example for a softcap or sinks. transformers passes no causal mask to implementations that it does not
    know, so a mask is a bias of the model's own (Doge). `choose_attention` catches the error, and the model
    keeps its own attention.

    longest: the length of the longest sequence, which must fit into the layer's window.
    """
    unknown = [name for name, value in options.items() if value is not None and name not in NEUTRAL]
    fits = sliding_window is None or longest <= sliding_window
    if attention_mask is not None or dropout or unknown or not fits:
        raise TypeError(f"packed attention has no mask, dropout, short window or options {unknown}")


# Grouped-query attention. torch 2.11, which some GPU machines have, lacks this option of its kernel. There
# `varlen_attention` repeats keys and values instead.
SHARED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_attention(
    module, query, key, value, attention_mask, cu_seq_lens_q, max_length_q, scaling, **options
):
    """Computes causal attention for packed sequences in one kernel (CUDA, bf16, most head sizes).

    query, key, value: (1, heads, ΣT, head size). transformers passes the lengths on from the inputs that
    `pack` returns. A plain call of the model has no lengths, and raises TypeError.
    """
    check_plain(attention_mask, max_length_q, **options)
    if not SHARED_HEADS:
        queries = query.shape[1] // key.shape[1]  # query heads of a key head
        key = key.repeat_interleave(queries, 1)
        value = value.repeat_interleave(queries, 1)
    output = varlen_attn(
        query[0].transpose(0, 1),  # (ΣT, heads, head size)
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1, 0),  # causal
        **SHARED_HEADS,
    )
    return output[None], None  # (1, ΣT, heads, head size)


@torch.compiler.disable  # the lengths differ in every micro-batch, so every call would compile again
def loop_attention(
    module, query, key, value, attention_mask, cu_seq_lens_q, max_length_q, scaling, **options
):
    """Computes the same as `varlen_attention` with one SDPA call for each sequence."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # this import takes 0.5 s

    check_plain(attention_mask, max_length_q, **options)
    lengths = cu_seq_lens_q.diff().tolist()
    outputs = []
    for q, k, v in zip(*(states.split(lengths, dim=2) for states in (query, key, value))):
        # Without a mask sdpa is causal.
        output, _ = sdpa_attention_forward(module, q, k, v, None, scaling=scaling)
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


ATTENTION = {"varlen": varlen_attention, "loop": loop_attention}


def attention_candidates(model, longest: int, dtype) -> list[str]:
    """Returns the attention implementations to try, fastest first. The model's own comes last.

    The packed implementations replace only sdpa, and only in models that pass further inputs on to the
    attention. They apply no window, so every sequence must fit into the model's window. A state that is
    carried along the row (linear attention, Mamba) would leak from one sequence into the next.
    """
    own = model.config._attn_implementation  # "eager" for models with a softcap of the attention
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or math.inf
    # Layers of unknown types are treated as if they carried a state.
    other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    may_carry_state = other_layers or model._is_stateful
    if own != "sdpa" or not model._supports_attention_backend or longest > window or may_carry_state:
        return [own]
    if model.device.type == "cuda" and dtype == torch.bfloat16:
        return ["varlen", "loop", own]
    return ["loop", own]


@torch.no_grad()
def choose_attention(model, longest: int, dtype) -> str:
    """Sets the fastest attention with which `token_logps` agree with the model's own forward pass.

    Three mistakes must show: the second sequence sees the first one, a token sees later ones, or the model
    does more with its head's output than `HeadLogps` (a factor of the logits: Cohere, Granite). So the trial
    scores two copies of 16 tokens, and compares their first 8 tokens with a forward pass of these 8 alone.

    Args:
        longest: the maximum length of a sequence that is scored, samples included, in tokens.
        dtype: the dtype in which the model computes. Its logits do not show it, because some models always
            return them in fp32.

    Returns:
        The name of the attention.
    """
    for name, function in ATTENTION.items():
        # Not done when this file is imported, because loading AttentionInterface takes a second.
        transformers.AttentionInterface.register(name, function)
    tokens = torch.arange(1, 17, device=model.device) % model.config.get_text_config().vocab_size
    first_8 = tokens[:8]
    logits = model(input_ids=first_8[None], use_cache=False).logits[0]  # (8, V)
    expected = -F.cross_entropy(logits[:-1].float(), first_8[1:], reduction="none")  # (7,)
    # The mean difference that passes, in nats. Two correct forward passes differ too, in fp32 by up to 2e-4
    # (SmolLM2, whose activations are large), and in bf16 by more. If the second sequence attends to the
    # first, its log-probs are 0.34 to 2.3 nats off on the policies of the toys.
    limit = {torch.bfloat16: 0.3, torch.float32: 1e-3}.get(dtype, 1e-4)
    input_ids = tokens.expand(2, 16)
    mask = torch.ones(2, 16, device=model.device)
    mask[:, 0] = 0
    found = {}
    for name in attention_candidates(model, longest, dtype):
        model.set_attn_implementation(name)
        try:
            logps = token_logps(model, input_ids, mask)
        except (RuntimeError, TypeError) as error:
            # The kernel does not support the head size, the model's code does not pass the lengths on, or it
            # asks for more than `check_plain` allows.
            found[name] = error
            continue
        found[name] = (logps[:, 1:8] - expected).abs().mean(1).max()  # of the worse sequence
        if found[name] <= limit:
            return name
    raise InputError(
        "--model: no attention gives the log-probs of a plain forward pass, because of later tokens, dropout "
        f"or a factor of the logits: {found}"
    )


# === Head log-probs ===
# The log-softmax of the head's logits at the target tokens, without all logits in memory. To change it, start
# from the one-line equivalent in `HeadLogps`; the rest is memory and precision. Keep the result in fp32 or
# wider, because in bf16 log-probs near 2 are spaced 0.016 apart.

# The number of logits that are computed at once: in fp32 8 MiB, which stay in a CPU's cache, or 512 MiB on a
# GPU. With smaller blocks a GPU would wait for the CPU, which launches about 20 operators for each block.
CPU_BLOCK = 2**21
GPU_BLOCK = 2**27


class HeadLogps(torch.autograd.Function):
    """Computes `-F.cross_entropy(z, targets, reduction="none")`, (N,), without all of z in memory.

    Here z = head(hidden) / temperature or, with a softcap, z = softcap · tanh(head(hidden) / softcap) /
    temperature. These logits z (N, V) would be by far the largest tensor of a micro-batch. They are computed
    in blocks of columns (`head_blocks`), in fp32 or wider, and computed again in backward. With
    L = log Σ_v exp z_v,

        log-prob of the target = z[target] - L
        its gradient w.r.t. z  = onehot(target) - exp(z - L)

    The blocks divide the vocabulary and not the N tokens: then each block owns its rows of d_weight. Blocks
    of tokens would each add to all of d_weight, which rounds in bf16.
    """

    @staticmethod
    def forward(ctx, hidden, targets, weight, bias, softcap, temperature):
        # hidden (N, D), targets (N,), weight (V, D), bias (V,) or None
        ctx.settings = softcap, temperature
        L_blocks = []  # (N, 1) each
        z_target = math.nan  # stays nan for a target beyond the head's rows
        for _, columns, inside, z in head_blocks(hidden, targets, weight, bias, *ctx.settings):
            L_blocks.append(z.logsumexp(-1, keepdim=True))
            z_target = torch.where(inside, z.gather(1, columns), z_target)  # (N, 1)
            del z  # frees this block before the next one is computed
        L = torch.stack(L_blocks).logsumexp(0)  # (N, 1)
        ctx.save_for_backward(hidden, targets, weight, bias, L)
        return (z_target - L).sum(-1)  # (N,); FSDP2 would warn that [:, 0] is a view

    @staticmethod
    def backward(ctx, d_logps):
        *inputs, L = ctx.saved_tensors
        hidden, _, weight, bias = inputs
        softcap, temperature = ctx.settings
        scaled = d_logps[:, None] / temperature  # (N, 1)
        d_hidden = 0  # then (N, D)
        d_weight = torch.empty_like(weight)
        d_bias = None if bias is None else torch.empty_like(bias)
        for rows, columns, inside, z in head_blocks(*inputs, *ctx.settings):
            if softcap:  # here, because z = softcap / temperature · tanh is overwritten below
                slope = 1 - (z * (temperature / softcap)) ** 2  # 1 - tanh²
            # The gradient w.r.t. the raw logits, before softcap and temperature:
            #     d_raw = (onehot(target) - softmax) · d_logps / temperature [· slope]
            # It is computed in place, which saves another tensor of a block's size.
            d_raw = z.sub_(L).exp_().mul_(-scaled)
            d_raw.scatter_add_(1, columns, torch.where(inside, scaled, 0))
            if softcap:
                d_raw.mul_(slope)
            if bias is not None:
                d_bias[rows] = d_raw.sum(0)
            d_raw = d_raw.to(weight.dtype)  # the weight's dtype, for the fast matmul
            d_hidden += matmul_fp32(d_raw, weight[rows])
            d_weight[rows] = matmul_fp32(d_raw.T, hidden)
            del z, d_raw
        return d_hidden.to(hidden.dtype), None, d_weight, d_bias, None, None


def head_blocks(hidden, targets, weight, bias, softcap, temperature):
    """Yields the logits in blocks of columns, with the targets' places in each block.

    Every block but the last has a multiple of 256 columns, and at most CPU_BLOCK or GPU_BLOCK logits, unless
    256 columns have more.

    Yields:
        rows: the slice of the vocabulary, which is the head's rows and the columns of the logits.
        columns, inside: the column of each target within the block, and whether the target is inside the
            block, (N, 1) each. The column of a target outside is clamped to the block.
        z: the logits / temperature, (N, columns), in fp32 or wider.
    """
    block = CPU_BLOCK if hidden.device.type == "cpu" else GPU_BLOCK
    size = max(256, block // max(1, len(hidden)) // 256 * 256)  # there may be no hidden state
    for start in range(0, len(weight), size):
        rows = slice(start, start + size)
        z = matmul_fp32(hidden, weight[rows].T)
        if bias is not None:
            z += bias[rows]
        if softcap:  # Gemma 2: softcap · tanh(z / softcap)
            z.div_(softcap).tanh_().mul_(softcap)
        if temperature != 1:
            z.div_(temperature)
        columns = (targets - start)[:, None]
        clamped = columns.clamp(0, z.shape[1] - 1)
        yield rows, clamped, clamped == columns, z
        del z  # the caller has dropped it too, so its memory is free for the next block


def matmul_fp32(a, b):
    """Computes a @ b with results in fp32 or wider."""
    are_bf16 = a.dtype == b.dtype == torch.bfloat16
    if are_bf16 and a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)  # exact products of bf16 numbers, summed in fp32
    dtype = torch.promote_types(a.dtype, torch.float32)
    # For speed alone, because many CPUs have units for bf16 (docs/performance.md): "bf16" rounds the factors
    # to bf16, which changes nothing here, and sums in fp32. It holds for all fp32 products of the process.
    settings = torch.backends.mkldnn.matmul
    precision = settings.fp32_precision
    if are_bf16:
        settings.fp32_precision = "bf16"
    product = a.to(dtype) @ b.to(dtype)
    settings.fp32_precision = precision
    return product
