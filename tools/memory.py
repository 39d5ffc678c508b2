"""Estimates the peak memory per GPU of a run from shapes, without a GPU, weights or data.

    python -m tools.memory --model llama-3-8b --ranks 4 --micro-batch-tokens 5000 --gradient-checkpointing

--model and --reward-model are a folder or a Hub name, of which only config.json is read, or llama-3-8b,
qwen2.5-1.5b, gemma-2-27b, llama-26m or toy. All flags but those of `Own` are the script's, with the paper's
settings as defaults. "auto" means bfloat16 for --dtype and vLLM for --engine, as on CUDA. One step runs on
fake tensors, as one of --ranks ranks, with the script's own sharding, log-probs and loss. All sequences have
--max-length tokens. If a step has several micro-batches, this is one with the gradients of an earlier one.
torch's FSDPMemTracker adds up the tensors that are alive.

The estimate does not include the CUDA context and libraries, NCCL's buffers, fragmentation, workspaces of
kernels, a unit that is gathered early, the memory of a sleeping vLLM, loading, checkpoints and export. It
includes the weights of the reward model, and weights and cache of transformers' sampling, but not their
activations, nor those of evaluation and of KTO's z_0.
"""

import contextlib
import math
import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal
from unittest.mock import patch

import pandas as pd
import torch
import torch.distributed as dist
import tyro
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, masking_utils
from transformers.initialization import no_init_weights

import utils
from support import run
from tools.scripts import load_script, parse_args

CPU = torch.device("cpu")
GIB = 2**30
aten = torch.ops.aten
SHAPE = """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings tie_word_embeddings""".split()
PRESETS = {
    "llama-3-8b": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192, False),
    "qwen2.5-1.5b": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 32768, True),
    "gemma-2-27b": ("gemma2", 256000, 4608, 36864, 46, 32, 16, 128, 8192, True),
    "llama-26m": ("llama", 32000, 384, 1024, 8, 6, 6, 64, 2048, True),  # the default of step.py on a CPU
}


@dataclass
class Own:
    script: Literal["dpo", "kto", "grpo", "grpo_math"] = "dpo"  # <script>_humanline.py
    ranks: int = 1  # number of GPUs
    completion_share: float = 0.5  # fraction of a sequence's tokens that belong to the completion
    gpu_memory: float = 80.0  # GiB of a GPU; vLLM uses --vllm-memory of it


class Stand(TorchDispatchMode):
    """Gives fake tensors values: a mask selects `count` rows, a number is 1, and a truth value is False."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.index.Tensor and args[1][0].dtype == torch.bool:
            tensor, (mask, *_) = args[:2]
            return tensor.new_empty((self.count, *tensor.shape[mask.ndim :]))
        if func is aten.masked_scatter_backward.default:
            return args[0].new_empty(args[2])
        if func is aten._local_scalar_dense.default:
            return int(args[0].dtype != torch.bool)
        if func is aten.logsumexp.default:  # it copies its input, which the tracker does not see
            tensor, dim = args[:2]
            shifted = tensor - tensor.amax(dim, keepdim=True)
            return shifted.exp_().sum(*args[1:])
        return func(*args, **(kwargs or {}))


def parse(flags: list[str]):
    """Parses the flags. Returns our own, the script's, and the script."""
    own, rest = tyro.cli(Own, args=flags, description=__doc__, return_unknown_args=True)
    script = load_script(own.script)
    args = parse_args(script, rest)
    own.batch_size = getattr(args, "batch_size", None) or args.prompts_per_step * args.group_size  # grpo_math
    if args.dtype == "auto":
        args.dtype = "bfloat16"
    return own, args, script


def read_config(script, flag: str, name: str, trust_remote_code: bool):
    """Returns the config of a folder, Hub name or preset, without dropout. Gemma 2 gets eager attention."""
    if name == "toy":
        name = script.TOY[flag.removeprefix("--").replace("-", "_")]
    if name in PRESETS:
        config = AutoConfig.for_model(**dict(zip(SHAPE, PRESETS[name])))
    else:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    for key, value in text.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(text, key, 0.0)
    if getattr(text, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"
    return config


def train(own: Own, args, script, config, reference_dtype: torch.dtype) -> tuple[dict, list[int]]:
    """Makes a step. Returns its peak memory, {part: bytes}, and the sizes of the model's parameters."""
    sides = 2 if own.script == "dpo" else 1  # sequences per item of the batch
    T = args.max_length
    lengths = [sides * T] * own.batch_size
    micro_batches = utils.make_micro_batches(lengths, own.ranks, args.micro_batch_tokens)
    B = sides * max(len(indices) for indices in micro_batches)
    completion_tokens = min(T - 1, max(1, round(T * own.completion_share)))
    fake = FakeTensorMode()
    stand = Stand(B * completion_tokens)

    policy = build_model(args, script, config, torch.float32, fake).train()
    reference = build_model(args, script, config, reference_dtype, fake).eval().requires_grad_(False)
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, fused=True)  # as on CUDA

    def update():
        torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).full_tensor().item()
        script.sync_reference(reference, policy)
        optimizer.step()

    with fake, stand:
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        update()  # creates Adam's moments
        if len(micro_batches) == own.ranks:
            optimizer.zero_grad()
        input_ids = torch.zeros(B, T, dtype=torch.long)
        mask = torch.zeros(B, T)
    tracker = FSDPMemTracker(policy, optimizer)
    tracker.track_inputs([parameter.to_local() for parameter in reference.parameters()])

    def snapshot(when: str) -> dict[str, int]:
        """Returns {kind of memory: bytes}."""
        kinds = tracker.get_tracker_snapshot(when)[CPU]
        return {getattr(kind, "name", kind): count for kind, count in kinds.items()}

    token_logps = utils.token_logps
    if own.script == "grpo_math":
        token_logps = partial(token_logps, temperature=args.temperature)
    with fake, tracker, stand, without_checks():
        with torch.no_grad():
            ref_logps = token_logps(reference, input_ids, mask)
        logps = token_logps(policy, input_ids, mask)
        activations = snapshot("current")["ACT"]
        fake_loss(own, args, script, logps - ref_logps, mask).backward()
        update()

    parts = peak_parts(snapshot("peak"), activations, optimizer)
    return parts, [parameter.numel() for parameter in policy.parameters()]


def build_model(args, script, config, dtype: torch.dtype, fake: FakeTensorMode):
    """Builds a model of fake tensors, sharded by the script."""
    with fake, no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=args.trust_remote_code
        )
    model.tie_weights()
    return script.shard_model(args, model, CPU)


def peak_parts(peak: dict[str, int], activations: int, optimizer) -> dict[str, int]:
    """Returns {part: bytes} at the peak."""
    moments = 0
    for state in optimizer.state.values():
        moments += state["exp_avg"].to_local().nbytes + state["exp_avg_sq"].to_local().nbytes
    gathered = ("UNSHARDED_PARAM", "UNSHARDED_GRAD", "ALL_GATHER", "REDUCE_SCATTER")
    parts = {
        "parameters": peak["SHARDED_PARAM"],
        "gradients": peak["SHARDED_GRAD"],
        "Adam moments": moments,
        "reference": peak["INP"],
        "activations": min(activations, peak["ACT"]),  # kept for backward
        "gathered units": sum(peak[kind] for kind in gathered),
    }
    # The rest: logits, activations of a block that backward computes again, and gradients of activations
    parts["head, temporaries"] = peak["Total"] - sum(parts.values())
    return parts


@contextlib.contextmanager
def without_checks():
    """Switches off what needs the values of tensors, and what CUDA would not allocate."""
    # transformers would take fake positions for packed sequences, and make a mask and repeated keys.
    unpacked = patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    product = patch.object(utils, "matmul_fp32", matmul_on_cuda)
    blocks = patch.object(utils, "CPU_BLOCK", utils.GPU_BLOCK)  # fake tensors are on the CPU
    propagate = ShardingPropagator.propagate_op_sharding_non_cached

    def unseen(*schema):  # DTensor finds shapes with tensors that have the size of the whole parameter
        with _disable_current_modes():
            return propagate(*schema)

    with unpacked, product, blocks, patch.object(ShardingPropagator, propagate.__name__, unseen):
        yield


def matmul_on_cuda(a, b):
    """Returns the product, without copies of bf16 factors in fp32."""
    return a.new_empty(len(a), b.shape[1], dtype=torch.promote_types(a.dtype, torch.float32))


def fake_loss(own: Own, args, script, log_ratio, mask):
    """Computes the script's loss of a micro-batch of equal examples."""
    clipped = log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)
    numbers = torch.zeros(len(mask))
    if own.script == "dpo":
        losses = script.dpo_loss(clipped, mask, args.beta)
    elif own.script == "kto":
        margins = script.kto_margins(clipped, mask, numbers.bool(), 0.0, args.beta)
        losses = script.kto_loss(margins, numbers.bool(), args.lambda_D, args.lambda_U)
    else:
        losses = script.grpo_loss(clipped, log_ratio, numbers, args.beta, args.epsilon)
    return losses.sum()


def estimate(own: Own, args, script) -> dict[str, dict[str, float]]:
    """Returns {phase: {part: GiB}} for a training step and, if the run samples, for sampling."""
    config = read_config(script, "--model", args.model, args.trust_remote_code)
    dtype = run.storage_dtype(args)
    reward_model = None
    if getattr(args, "reward_model", ""):
        reward_model = build_reward_model(args, script)
    dist.init_process_group("fake", rank=0, world_size=own.ranks, store=FakeStore())
    training, sizes = train(own, args, script, config, dtype)
    dist.destroy_process_group()
    phases = {"training": training}
    if own.script == "grpo_math" or args.online or (args.eval_dataset and args.eval_samples):
        while_sampling = {name: training[name] for name in ("parameters", "Adam moments", "reference")}
        if reward_model:  # while the policy trains, it is on the CPU
            while_sampling["reward model"] = reward_model.num_parameters() * dtype.itemsize
        while_sampling["gathered units"] = 4 * max(sizes)
        weights = sum(sizes) * dtype.itemsize
        if args.engine == "hf":
            training["engine"] = weights
            while_sampling["engine"] = weights + cache_bytes(args, config, dtype)
        else:  # vLLM sleeps while the policy trains
            weights //= args.vllm_tensor_parallel
            while_sampling["engine"] = max(weights, int(args.vllm_memory * own.gpu_memory * GIB))
        phases["sampling"] = while_sampling
    gib = {}
    for phase, parts in phases.items():
        gib[phase] = {name: count / GIB for name, count in parts.items()}
    return gib


def build_reward_model(args, script):
    """Builds the reward model without weights."""
    trust = args.trust_remote_code
    config = read_config(script, "--reward-model", args.reward_model, trust)
    config.num_labels = 1
    with torch.device("meta"), no_init_weights():
        return AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust)


def cache_bytes(args, config, dtype: torch.dtype) -> int:
    """Returns the bytes of keys and values while transformers samples a batch."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or math.inf
    length = min(args.max_prompt_length + args.max_new_tokens, positions)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    values = text.num_hidden_layers * heads * head_size * length * args.generation_batch_size
    return 2 * values * dtype.itemsize


def main(flags: list[str]):
    table = pd.DataFrame(estimate(*parse(flags))).fillna(0).sort_index()
    table.loc["peak"] = table.sum()
    print(f"GiB per GPU:\n{table.round(2)}")


if __name__ == "__main__":
    main(sys.argv[1:])
