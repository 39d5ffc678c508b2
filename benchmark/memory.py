# ruff: noqa: E402 (imports take their share of the half minute)
"""Will it fit? The peak memory of one GPU, estimated from shapes: without a GPU, without weights or data.

    python benchmark/memory.py --model llama-3-8b --ranks 4 --micro-batch-size 2 --gradient-checkpointing
    python benchmark/memory.py --script grpo_math --model qwen2.5-1.5b --ranks 4 --micro-batch-size 8 --json

--model and --reward-model: a folder, of which config.json is read, or llama-3-8b, qwen2.5-1.5b, gemma-2-27b,
llama-26m or toy.
Nothing is downloaded. All flags but those of `Own` are the script's, and default to the paper's settings.
One step of the script runs on fake tensors as one of --ranks ranks, and torch's FSDPMemTracker adds up what is alive:
the script's own sharding, log-probs and loss, sequences of --max-length tokens, and gradients from the pass before
where a step takes several. "auto" is bfloat16 for --dtype and vLLM for --engine, as on CUDA.

Not modelled: the CUDA context and libraries; NCCL's buffers; fragmentation; workspaces of kernels; a forward pass that
gathers the next unit early; what vLLM keeps asleep; activations of the reward model, of evaluation, of KTO's z_0 and of
transformers' sampling, of which weights and cache are counted; loading, checkpoints and export.
"""

import time

STARTED = time.perf_counter()

import contextlib
import importlib
import json
import math
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from unittest.mock import patch

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CPU, GIB, aten = torch.device("cpu"), 2**30, torch.ops.aten
SHAPE = ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
SHAPE += ["num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"]
PRESETS = {
    "llama-3-8b": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192, False),
    "qwen2.5-1.5b": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 32768, True),
    "gemma-2-27b": ("gemma2", 256000, 4608, 36864, 46, 32, 16, 128, 8192, True),
    "llama-26m": ("llama", 32000, 384, 1024, 8, 6, 6, 64, 2048, True),  # for step.py on a CPU
}


@dataclass
class Own:
    script: Literal["dpo", "kto", "grpo", "grpo_math"] = "dpo"  # <script>_humanline.py
    ranks: int = 4  # GPUs
    completion_share: float = 0.5  # of a sequence's tokens
    gpu_memory: float = 80.0  # GiB of a GPU, for vLLM's share of it
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # print one JSON object, in GiB


class Stand(TorchDispatchMode):
    """Stands in for values that fake tensors lack: a mask selects `count` rows, a number is 1, a truth False."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.index.Tensor and args[1][0].dtype == torch.bool:
            return args[0].new_empty((self.count, *args[0].shape[args[1][0].ndim :]))
        if func is aten.masked_scatter_backward.default:
            return args[0].new_empty(args[2])
        if func is aten._local_scalar_dense.default:
            return int(args[0].dtype != torch.bool)
        if func is aten.logsumexp.default:  # holds a copy of its input, unseen in a single operator
            return (args[0] - args[0].amax(args[1], keepdim=True)).exp_().sum(*args[1:])
        return func(*args, **(kwargs or {}))


def parse(flags: list[str]):
    """Our flags; the script's, checked as in a run of that many ranks; the script."""
    own, rest = tyro.cli(Own, args=flags, add_help=False, return_unknown_args=True)
    if {"-h", "--help"} & set(rest):
        with contextlib.suppress(SystemExit):
            tyro.cli(Own, args=["--help"], description=__doc__)
    script = importlib.import_module(f"{own.script}_humanline")
    with contextlib.redirect_stdout(sys.stdout if {"-h", "--help"} & set(rest) else sys.stderr):
        args = script.parse_args(rest)
    if own.ranks < 1 or not 0 < own.completion_share < 1:
        script.fail("--ranks must be at least 1, and --completion-share between 0 and 1")
    own.batch_size = args.prompts_per_step * args.group_size if own.script == "grpo_math" else args.batch_size
    args.dataset, args.output_dir = "any", ""  # not read
    with patch.dict(os.environ, WORLD_SIZE=str(own.ranks)):
        script.check_flags(args, own.batch_size)
    return own, args, script


def read_config(script, flag: str, name: str, trust_remote_code: bool):
    """The configuration of a folder or a preset, with dropout off and Gemma 2's attention as in the scripts."""
    name = script.TOY[flag[2:].replace("-", "_")] if name == "toy" else name
    if name in PRESETS:
        config = AutoConfig.for_model(**dict(zip(SHAPE, PRESETS[name])))
    elif (Path(name) / "config.json").exists():
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    else:
        script.fail(f"{flag} {name} is neither a folder with a config.json nor one of {', '.join(PRESETS)}, toy")
    text = config.get_text_config()
    for key in [key for key, value in text.to_dict().items() if "drop" in key and isinstance(value, float)]:
        setattr(text, key, 0.0)
    if getattr(text, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"
    return config


def train(own: Own, args, script, config, stored: torch.dtype) -> tuple[dict, list[int]]:
    """Bytes by part at the peak of a training step, and the elements of each of the model's parameters. stored: dtype
    of the reference."""
    compute = getattr(torch, "bfloat16" if args.dtype == "auto" else args.dtype)
    each, T, most = 2 if own.script == "dpo" else 1, args.max_length, (args.micro_batch_size, args.micro_batch_tokens)
    passes = script.utils.make_passes([each * T] * own.batch_size, own.ranks, *most)
    B = each * max(map(len, passes))
    fake, stand = FakeTensorMode(), Stand(B * min(T - 1, max(1, round(T * own.completion_share))))
    token_logps = script.utils.token_logps
    if own.script == "grpo_math":
        token_logps = partial(token_logps, temperature=args.temperature)

    def build(dtype):
        with fake, no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=args.trust_remote_code)
        model.tie_weights()
        return script.shard_model(args, model, compute, CPU)

    def update():
        torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).full_tensor().item()
        script.sync_reference(reference, policy)
        optimizer.step()

    def snapshot(when):
        return {getattr(kind, "name", kind): count for kind, count in tracker.get_tracker_snapshot(when)[CPU].items()}

    policy, reference = build(torch.float32).train(), build(stored).eval().requires_grad_(False)
    if args.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, fused=True)  # as on CUDA
    with fake, stand:
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        update()  # makes the moments
        if len(passes) == own.ranks:
            optimizer.zero_grad()
        input_ids, mask, numbers = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T), torch.zeros(B)
    tracker = FSDPMemTracker(policy, optimizer)
    tracker.track_inputs([parameter.to_local() for parameter in reference.parameters()])
    # Fake positions might be those of packed sequences: attention would get a mask, and keys repeated for its heads.
    unpacked = patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    propagate = ShardingPropagator.propagate_op_sharding_non_cached

    def unseen(*schema):  # DTensor works out shapes with tensors of the whole parameter
        with _disable_current_modes():
            return propagate(*schema)

    with fake, tracker, stand, unpacked, patch.object(ShardingPropagator, propagate.__name__, unseen):
        with torch.no_grad():
            ref_logps = token_logps(reference, input_ids, mask)
        logps = token_logps(policy, input_ids, mask)
        kept = snapshot("current")["ACT"]
        log_ratio = logps - ref_logps
        clipped = log_ratio.clamp(args.log_epsilon_P, args.log_epsilon_R)
        if own.script == "dpo":
            loss, _ = script.dpo_loss(clipped, mask, args.beta)
        elif own.script == "kto":
            loss, _ = script.kto_loss(clipped, mask, numbers.bool(), 0.0, args.beta, args.lambda_D, args.lambda_U)
        else:
            loss, *_ = script.grpo_loss(clipped, log_ratio, numbers, args.beta, args.epsilon)
        loss.sum().backward()
        update()
    peak = snapshot("peak")
    local = [s[key].to_local() for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    moments = sum(moment.numel() * moment.element_size() for moment in local)
    parts = {
        "parameters": peak["SHARDED_PARAM"],
        "gradients": peak["SHARDED_GRAD"],
        "Adam moments": moments,
        "reference": peak["INP"],
        "activations": min(kept, peak["ACT"]),  # for the backward pass
        "gathered units": sum(peak[k] for k in ("UNSHARDED_PARAM", "UNSHARDED_GRAD", "ALL_GATHER", "REDUCE_SCATTER")),
    }
    parts["head, temporaries"] = peak["Total"] - sum(parts.values())  # logits, a block computed again, gradients
    return parts, [parameter.numel() for parameter in policy.parameters()]


def estimate(own: Own, args, script) -> dict[str, dict[str, float]]:
    """{phase: {part: GiB}}: a training step and, if the run samples, sampling."""
    config = read_config(script, "--model", args.model, args.trust_remote_code)
    stored = torch.bfloat16 if args.dtype in ("auto", "bfloat16") else torch.float32  # reference, engine, reward model
    if name := getattr(args, "reward_model", ""):
        judge = read_config(script, "--reward-model", name, args.trust_remote_code)
        judge.num_labels = 1
        with torch.device("meta"), no_init_weights():
            judge = AutoModelForSequenceClassification.from_config(judge, trust_remote_code=args.trust_remote_code)
    dist.init_process_group("fake", rank=0, world_size=own.ranks, store=FakeStore())
    training, sizes = train(own, args, script, config, stored)
    dist.destroy_process_group()
    if name:
        training["reward model"] = judge.num_parameters() * stored.itemsize
    phases, whole = {"training": training}, sum(sizes) * stored.itemsize
    if own.script == "grpo_math" or args.online or args.eval_dataset and args.eval_samples:
        kept = ("parameters", "Adam moments", "reference", "reward model")
        sampling = {name: training[name] for name in kept if name in training} | {"gathered units": 4 * max(sizes)}
        if args.engine == "hf":
            text = config.get_text_config()
            length = min(args.max_prompt_length + args.max_new_tokens, getattr(text, SHAPE[-2], None) or math.inf)
            heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            cache = 2 * text.num_hidden_layers * heads * width * length * args.generation_batch_size * stored.itemsize
            training["engine"], sampling["engine"] = whole, whole + cache
        else:  # asleep while training
            sampling["engine"] = int(args.vllm_memory * own.gpu_memory * GIB)
            if sampling["engine"] < whole:
                share = whole / GIB / own.gpu_memory
                print(f"warning: the weights alone are {share:.2f} of a GPU; raise --vllm-memory", file=sys.stderr)
        phases["sampling"] = sampling
    return {phase: {name: count / GIB for name, count in parts.items()} for phase, parts in phases.items()}


def main(flags: list[str]) -> None:
    phases = estimate(*parse(flags))
    peaks = {phase: sum(parts.values()) for phase, parts in phases.items()}
    worst, seconds = max(peaks, key=peaks.get), time.perf_counter() - STARTED
    if "--json" in flags:
        print(json.dumps({"parts": phases[worst], "peak": peaks[worst], "phases": phases, "seconds": seconds}))
        return
    print(f"{'GiB per GPU':20}" + "".join(f"{phase:>10}" for phase in phases))
    for name in dict.fromkeys(name for parts in phases.values() for name in parts):
        print(f"{name:20}" + "".join(f"{parts.get(name, 0):10.2f}" for parts in phases.values()))
    print(f"{'peak':20}" + "".join(f"{peak:10.2f}" for peak in peaks.values()))
    print(f"{seconds:.0f} s; --help says what is not modelled")


if __name__ == "__main__":
    main(sys.argv[1:])
