"""worker.py on a pretended GPU: runs main of a script as on CUDA, or rows of benchmark/cuda_rows.py.

A tensor "on the GPU" is an `OnGpu`: it says so, and has its numbers on the CPU. What CUDA would refuse is
refused, of its own kernels two are done by other means, and what the test looks at is printed as JSON.
"""

import contextlib
import importlib
import inspect
import json
import math
import os
import sys
from collections import Counter
from operator import attrgetter
from unittest.mock import patch

import torch
import torch.distributed as dist
from conftest import ROOT, parse_args
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoConfig, modeling_utils

import utils

GPU = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
CPU = torch.device("cpu")
aten = torch.ops.aten
attention = torch.ops.torch_attn
# They take tensors of both devices.
ACROSS = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::index", "aten::index_put_")
COUNTED = {  # {operator: name}
    "aten::_fused_adamw_": "fused AdamW",
    "c10d::_reduce_scatter_base_": "gradients of a unit",
    "torch_attn::_varlen_attn": "attention",
    "torch_attn::_varlen_attn_backward": "attention backward",
}
facts = Counter()
vocabulary = []  # its size
samplers = []


class OnGpu(torch.Tensor):
    """Says that it is on the GPU. To C++ it is on the CPU, without which nothing could be done with it."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def to(self, *args, **kwargs):
        named = [x for x in [*args, *kwargs.values()] if isinstance(x, str | torch.device | torch.Tensor)]
        if any(torch.device(getattr(x, "device", x)) == CPU for x in named):
            return self.cpu().to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def cpu(self):
        with torch._C._DisableTorchDispatch():
            return self.detach().clone()  # a new tensor, and no OnGpu

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def new_tensor(self, data, **options):
        return torch.tensor(data, **{"dtype": self.dtype, "device": GPU} | options)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def on_gpu(tensor):
    if isinstance(tensor, OnGpu | AsyncCollectiveTensor):  # which has one inside
        return tensor
    return torch.Tensor._make_subclass(OnGpu, tensor, tensor.requires_grad)


class Gpu(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """The operator's result, on the device where CUDA would have it. Raises where CUDA would, or should."""
    name = func._schema.name
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if any(isinstance(x, DTensor | AsyncCollectiveTensor) for x in tensors):
        return NotImplemented  # they ask again for the tensor inside
    ours = [x for x in tensors if isinstance(x, OnGpu)]
    others = [x for x in tensors if not isinstance(x, OnGpu) and x.ndim > 0]
    if ours and others and name not in ACROSS:
        raise RuntimeError(f"{name}: tensors on cuda and on the CPU")
    device = kwargs.get("device")
    if device == CPU and torch._C._current_graph_task_id() != -1:
        device = GPU  # a derivative in C++ makes zeros where its inputs seem to be
    result_on_gpu = bool(ours) if device is None else device.type == "cuda"
    if result_on_gpu and device is not None:
        kwargs = kwargs | {"device": CPU}
    if ours:
        if name in COUNTED:
            facts[COUNTED[name]] += 1
        check(name, args)
    with torch._C._DisableTorchDispatch():
        result = KERNELS.get(name + "." + func._overloadname, func)(*args, **kwargs)
    return tree_map_only(torch.Tensor, on_gpu, result) if result_on_gpu else result


def check(name: str, args):
    if name in ("aten::mm", "aten::addmm"):
        dtypes = {x.dtype for x in args if isinstance(x, torch.Tensor)}
        if dtypes != {torch.bfloat16}:
            raise RuntimeError(f"{name} of {dtypes}: a GPU is slow there")
    if name == "aten::_fused_adamw_":
        dtypes = {x.dtype for x in tree_leaves(args[:4])}
        if dtypes != {torch.float32}:
            raise RuntimeError(f"AdamW on {dtypes}")


# === Kernels that are CUDA's alone ===
def product(a, b, out_dtype):
    if (a.dtype, b.dtype, out_dtype) != (torch.bfloat16, torch.bfloat16, torch.float32):
        raise RuntimeError(f"a product of {a.dtype} and {b.dtype} in {out_dtype}")
    V = vocabulary[-1]
    kind = "logits"
    if b.shape[1] != V:
        kind = "d_hidden" if a.shape[1] == V else "d_weight"
    facts[kind] += 1
    return a.float() @ b.float()


def weights_of(query, key, scale):
    """Causal attention of a sequence, (heads, T, T) in fp32, and its keys for every head of the queries."""
    q, k = query.float().transpose(0, 1), key.float().transpose(0, 1)
    k = k.repeat_interleave(len(q) // len(k), 0)
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    scores = scale * (q @ k.transpose(1, 2))
    return scores.masked_fill(future, -math.inf).softmax(-1), q, k


def attend(query, key, value, starts, starts_k, longest, longest_k, is_causal, scale, window_size, *rest):
    """torch_attn::_varlen_attn, by a loop over the sequences."""
    check_attention(query, key, value, starts, longest)
    check_attention(query, key, value, starts_k, longest_k)
    assert is_causal and list(window_size) == [-1, 0], "not causal"
    output = torch.empty_like(query)
    ends = starts.tolist()
    for begin, end in zip(ends, ends[1:]):
        part = slice(begin, end)
        P, q, _ = weights_of(query[part], key[part], scale)
        v = value[part].float().transpose(0, 1).repeat_interleave(len(P) // value.shape[1], 0)
        output[part] = (P @ v).transpose(0, 1).to(output.dtype)
    lse = torch.zeros(query.shape[1], len(query))  # not read
    return output, lse, torch.zeros(2, dtype=torch.uint64)


def check_attention(query, key, value, starts, longest):
    """What the kernel takes for granted, and would read wrong numbers without."""
    heads, size = query.shape[1:]
    for x in (query, key, value):
        assert x.dtype == torch.bfloat16, f"attention in {x.dtype}"
        assert x.ndim == 3 and x.stride(2) == 1, "a head's numbers are not next to each other"
        assert len(x) == len(query) and x.shape[2] == size and heads % x.shape[1] == 0, (
            "not tokens, heads, size"
        )
    assert starts.dtype == torch.int32 and starts.is_contiguous(), f"starts are {starts.dtype}"
    assert starts[0] == 0 and starts[-1] == len(query), f"{starts[-1]} of {len(query)} tokens"
    lengths = starts.diff()
    assert lengths.min() >= 0 and lengths.max() == longest, f"the longest has {lengths.max()}, not {longest}"


def attend_backward(d_out, query, key, value, output, lse, starts, _, *rest):
    """Of softmax(P) with S = scale · q kᵀ: dS = P · (dP - Σ P dP), dP = d_out vᵀ."""
    rest = dict(zip(NAMES, rest))
    gradients = [torch.zeros(x.shape) for x in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    ends = starts.tolist()
    for begin, end in zip(ends, ends[1:]):
        part = slice(begin, end)
        P, q, k = weights_of(query[part], key[part], rest["scale"])
        v = value[part].float().transpose(0, 1).repeat_interleave(groups, 0)
        d_o = d_out[part].float().transpose(0, 1)
        d_P = d_o @ v.transpose(1, 2)
        d_S = rest["scale"] * P * (d_P - (P * d_P).sum(-1, keepdim=True))
        for gradient, wide in zip(gradients, (d_S @ k, d_S.transpose(1, 2) @ q, P.transpose(1, 2) @ d_o)):
            heads = wide.unflatten(0, (gradient.shape[1], -1)).sum(1)  # queries that share a key
            gradient[part] = heads.transpose(0, 1)
    return tuple(gradient.to(query.dtype) for gradient in gradients)


NAMES = [argument.name for argument in attention._varlen_attn_backward.default._schema.arguments][8:]
KERNELS = {
    "aten::mm.dtype": product,
    "torch_attn::_varlen_attn.default": attend,
    "torch_attn::_varlen_attn_backward.default": attend_backward,
}


# === What the scripts call ===
def varlen_attn(*args, **kwargs):
    values = inspect.signature(VARLEN_ATTN).bind(*args, **kwargs).arguments  # of this version of torch
    for name in ("max_q", "max_k"):
        assert type(values[name]) is int, f"{name} is {type(values[name])}: the GPU would be waited for"
    return VARLEN_ATTN(*args, **kwargs)


VARLEN_ATTN = utils.varlen_attn


def pad_batch(*args):
    input_ids, mask = PAD_BATCH(*args)
    assert (input_ids.dtype, mask.dtype) == (torch.int64, torch.float32), f"a mask in {mask.dtype}"
    return input_ids, mask


PAD_BATCH = utils.pad_batch


def init_process_group(backend, **options):
    facts[f"backend {backend}"] += 1
    INIT("cpu:gloo,cuda:gloo", **options)


INIT = dist.init_process_group


def set_device(device):
    assert device == GPU
    facts["device set"] += 1


def move(params, buffers, device):
    """FSDP2's, for tensors whose class changes."""
    for tensor in [*params, *buffers]:
        if tensor.device != device:
            moved = tensor.detach().to(device)
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)


class Stream(torch.cpu.Stream):
    def synchronize(self):
        pass


STREAM = Stream()


@contextlib.contextmanager
def pretended(script):
    """CUDA's interfaces, and a look at the scripts' calls."""
    cuda = dict(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        device_count=lambda: 8,
        current_device=lambda: GPU.index,
        is_current_stream_capturing=lambda: False,
        set_device=set_device,
        max_memory_allocated=lambda: 2**30,
        get_rng_state=lambda device: torch.get_rng_state(),
        set_rng_state=lambda state, device: torch.set_rng_state(state),
        manual_seed_all=lambda seed: None,
        Stream=Stream,
        Event=torch.cpu.Event,
        stream=contextlib.nullcontext,
        current_stream=lambda device=None: STREAM,
    )
    load_models = script.load_models
    make_sampler = script.make_sampler
    sync = script.sync_reference

    def load_and_count(args, *rest):
        vocabulary.append(AutoConfig.from_pretrained(args.model).vocab_size)
        models = load_models(args, *rest)
        facts["trials of attention"] = facts.pop("attention", 0)
        return models

    def make_and_keep_sampler(*args):
        samplers.append(make_sampler(*args))
        return samplers[-1]

    def sync_reference(reference, policy):
        sync(reference, policy)
        facts["syncs"] += 1
        for theirs, ours in zip(reference.parameters(), policy.parameters(), strict=True):
            theirs, ours = theirs.to_local(), ours.to_local()
            assert theirs.is_cuda and ours.is_cuda
            facts[f"reference {theirs.dtype}, policy {ours.dtype}"] += 1
            assert torch.equal(theirs, ours.to(theirs.dtype))
        for model in (reference, policy):
            assert all(buffer.is_cuda for buffer in model.buffers())

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        stack.enter_context(patch.object(script, "load_models", load_and_count))
        stack.enter_context(patch.object(script, "make_sampler", make_and_keep_sampler))
        stack.enter_context(patch.object(script, "sync_reference", sync_reference))
        stack.enter_context(patch.object(utils, "varlen_attn", varlen_attn))
        stack.enter_context(patch.object(utils, "pad_batch", pad_batch))
        stack.enter_context(patch.object(dist, "init_process_group", init_process_group))
        for outer, inner in ((DTensor, "_local_tensor"), (AsyncCollectiveTensor, "elem")):
            for name in ("device", "is_cuda"):
                of_inner = property(attrgetter(f"{inner}.{name}"))
                stack.enter_context(patch.object(outer, name, of_inner, create=True))
        stack.enter_context(patch.object(_fsdp_init, "_move_states_to_device", move))
        swap = torch.__future__.set_swap_module_params_on_conversion
        swap(True)  # as `move` does
        stack.callback(swap, False)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=GPU) becomes an operator
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(Gpu())
        yield


class Engine(utils.TransformersEngine):
    """What cuda_rows.py calls of vLLM's. Awake it holds 8 GiB, asleep half of one."""

    held = 0

    def __init__(self, sampler):
        super().__init__(sampler)
        self.llm = self
        self.sleep(level=2)

    @classmethod
    def wake_up(cls):
        cls.held = 2**33

    @classmethod
    def sleep(cls, level):
        cls.held = 2**29


@contextlib.contextmanager
def small_rows():
    """benchmark/cuda_rows.py at toy size, as if there were a GPU, with 1 s for every time."""
    import cuda_rows as rows  # here, since it asks for the device

    small = dict(CUDA=True, MODEL="toy", LENGTH=64, HEAD=(256, 64, 10_000))
    small["timed"] = lambda function, *args: (1.0, function(*args))
    with patch.multiple(rows, **small):
        yield rows


def run_rows(names):
    """Rows of it on the pretended GPU. Prints their figures."""
    cuda = dict(
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        max_memory_reserved=lambda: 2**31,
        mem_get_info=lambda: (2**35 - Engine.held, 2**35),
    )

    def snapshot():
        set_by_setup = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True"
        return {"allocator_settings": {"expandable_segments": set_by_setup}}

    def build_on_gpu(dtype):
        # It would ask torch.tensor([]), which needs CUDA.
        with patch.object(modeling_utils, "get_torch_context_manager_or_global_device", lambda: GPU):
            return build(dtype)

    with (
        pretended(importlib.import_module("dpo_humanline")),
        patch.multiple(torch.cuda, **cuda),
        patch.object(torch.cuda.memory, "_snapshot", snapshot),
        patch.object(utils, "VllmEngine", Engine),
        patch(f"{__name__}.check", lambda name, args: None),  # rows compare with fp32
        small_rows() as rows,
    ):
        vocabulary.append(rows.HEAD[2])
        build = rows.build
        rows.DEVICE = GPU
        rows.build = build_on_gpu
        figures = {}
        for name in names:
            figures[name] = getattr(rows, name)()
    print(json.dumps(figures))


def run_compiled():
    """Compiled blocks with the kernel for all sequences, on the CPU a loop. Prints the row's figure."""
    varlen._varlen_attn.register_kernel("cpu")(attend)
    varlen._varlen_attn_backward.register_kernel("cpu")(attend_backward)
    with small_rows() as rows:
        build = rows.build

        def build_varlen(dtype):
            model = build(dtype)
            model.set_attn_implementation("varlen")
            return model

        with patch.object(rows, "build", build_varlen):
            print(rows.compiled())


if __name__ == "__main__":
    if os.environ["SCRIPT"] == "cuda_rows":
        sys.path.insert(0, f"{ROOT}/benchmark")
        (names,) = json.loads(sys.argv[1])
        if names == ["compiled"]:
            run_compiled()
        else:
            run_rows(names)
        sys.exit()
    script = importlib.import_module(os.environ["SCRIPT"])
    for port, arguments in zip(json.loads(os.environ["PORTS"]), json.loads(sys.argv[1])):
        os.environ["MASTER_PORT"] = str(port)
        facts.clear()
        torch.backends.cuda.enable_cudnn_sdp(True)
        with pretended(script):
            script.main(parse_args(script, arguments))
            if samplers[-1].reward_model:
                weights = list(samplers[-1].judge[0].parameters())
                facts["reward model's weights"] = len(weights)
                facts["reward model's on the GPU"] = sum(weight.is_cuda for weight in weights)
        facts["cuDNN"] = torch.backends.cuda.cudnn_sdp_enabled()
        print(json.dumps(facts))
