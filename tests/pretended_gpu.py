"""A worker that runs main of a script on a pretended GPU, to test without a GPU what only CUDA runs.

A tensor "on the GPU" is an `OnGpu`, whose numbers are on the CPU. Operations that CUDA would refuse raise
errors, and CUDA's own kernels are replaced. What the test checks is printed as JSON.
"""

import contextlib
import inspect
import json
import os
from collections import Counter
from operator import attrgetter
from unittest.mock import patch

import torch
import torch.distributed as dist
from helpers import run_main
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import utils
from support import sampling

GPU = torch.device("cuda", 0)  # `run_on_gpu` sets that of the rank
CPU = torch.device("cpu")
# These operators take tensors of both devices.
ACROSS = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::index", "aten::index_put_")
COUNTED = {  # {operator: name}
    "aten::_fused_adamw_": "fused AdamW",
    "c10d::_reduce_scatter_base_": "gradients of a unit",
}
facts = Counter()
reward_models = []


class OnGpu(torch.Tensor):
    """A tensor that says that it is on the GPU. In C++ it is on the CPU, otherwise no operator would run."""

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
            return self.detach().clone()  # a new tensor, which is no OnGpu

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
    if isinstance(tensor, OnGpu | AsyncCollectiveTensor):  # an AsyncCollectiveTensor has an OnGpu inside
        return tensor
    return torch.Tensor._make_subclass(OnGpu, tensor, tensor.requires_grad)


class Gpu(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """Returns the operator's result on the device that CUDA would choose. Raises where CUDA would raise."""
    name = func._schema.name
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if any(isinstance(x, DTensor | AsyncCollectiveTensor) for x in tensors):
        return NotImplemented  # the operator is called again with the tensor inside
    ours = [x for x in tensors if isinstance(x, OnGpu)]
    others = [x for x in tensors if not isinstance(x, OnGpu) and x.ndim > 0]
    if ours and others and name not in ACROSS:
        raise RuntimeError(f"{name}: tensors on cuda and on the CPU")
    device = kwargs.get("device")
    if device == CPU and torch._C._current_graph_task_id() != -1:
        device = GPU  # a derivative in C++ makes zeros on the device where its inputs seem to be
    result_on_gpu = bool(ours) if device is None else device.type == "cuda"
    if result_on_gpu and device is not None:
        kwargs = kwargs | {"device": CPU}
    if ours:
        if name in COUNTED:
            facts[COUNTED[name]] += 1
        check(name, args)
    with torch._C._DisableTorchDispatch():
        result = (product if func is torch.ops.aten.mm.dtype else func)(*args, **kwargs)
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


# === Kernels that only CUDA has ===
def product(a, b, out_dtype):
    if (a.dtype, b.dtype, out_dtype) != (torch.bfloat16, torch.bfloat16, torch.float32):
        raise RuntimeError(f"a product of {a.dtype} and {b.dtype} in {out_dtype}")
    kind = "d_hidden"
    if not b.is_contiguous():  # transposed
        kind = "logits"
    if not a.is_contiguous():
        kind = "d_weight"
    facts[kind] += 1
    return a.float() @ b.float()


# === What the scripts call ===
def varlen_attn(*args, **options):
    """Computes the kernel's result in a loop over the sequences.

    Raises where the kernel would raise or read wrong numbers.
    """
    SIGNATURE.bind(*args, **options)
    query, key, value, starts, starts_k, longest, longest_k = args
    for x in (query, key, value):
        assert x.dtype == torch.bfloat16, f"attention in {x.dtype}"
        assert x.ndim == 3 and x.stride(2) == 1, "a head's numbers are not next to each other"
    assert starts.dtype == torch.int32 and starts.is_contiguous(), f"starts are {starts.dtype}"
    lengths = starts.diff().tolist()
    assert starts[0] == 0 and sum(lengths) == len(query), f"{sum(lengths)} of {len(query)} tokens"
    assert max(lengths) == longest and type(longest) is int, f"the longest has not {longest} tokens"
    assert starts_k is starts and longest_k == longest and options["window_size"] == (-1, 0)
    facts["attention"] += 1
    splits = [x.transpose(0, 1)[None].split(lengths, dim=2) for x in (query, key, value)]
    outputs = []
    for q, k, v in zip(*splits):  # (1, heads, T, size) each
        output = sdpa(q, k, v, is_causal=True, scale=options["scale"], enable_gqa="enable_gqa" in options)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


SIGNATURE = inspect.signature(utils.varlen_attn)  # of this version of torch


def init_process_group(backend, **options):
    facts[f"backend {backend}"] += 1
    INIT("cpu:gloo,cuda:gloo", **options)


INIT = dist.init_process_group


def move(params, buffers, device):
    """Moves the states of FSDP2 to a device, also if the class of a tensor changes."""
    for tensor in [*params, *buffers]:
        if tensor.device != device:
            moved = tensor.detach().to(device)
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)


def to_device(self, *args, **kwargs):
    """Is DTensor.to: a tensor on the pretended GPU is on "cuda" already."""
    if args == ("cuda",):
        return self
    return torch.Tensor.to(self, *args, **kwargs)


class Stream(torch.cpu.Stream):
    def synchronize(self):
        pass


STREAM = Stream()


@contextlib.contextmanager
def pretended(script):
    """Replaces CUDA's interfaces, and records the scripts' calls."""
    cuda = dict(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        device_count=lambda: 8,
        current_device=lambda: GPU.index,
        is_current_stream_capturing=lambda: False,
        set_device=lambda device: facts.update([f"device {device}"]),
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        max_memory_allocated=lambda: 2**30,
        max_memory_reserved=lambda: 2**31,
        get_rng_state=lambda device: torch.get_rng_state(),
        set_rng_state=lambda state, device: torch.set_rng_state(state),
        manual_seed_all=lambda seed: None,
        Stream=Stream,
        Event=torch.cpu.Event,
        stream=contextlib.nullcontext,
        current_stream=lambda device=None: STREAM,
    )
    load_reward_model = sampling.load_reward_model
    sync = script.sync_reference

    def load_and_keep_reward_model(args):
        model, tokenizer = load_reward_model(args)
        reward_models.append(model)
        return model, tokenizer

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
        stack.enter_context(
            patch.object(torch.accelerator, "current_accelerator", lambda *args, **kwargs: None)
        )
        stack.enter_context(patch.object(script, "sync_reference", sync_reference))
        stack.enter_context(patch.object(sampling, "load_reward_model", load_and_keep_reward_model))
        stack.enter_context(patch.object(utils, "varlen_attn", varlen_attn))
        stack.enter_context(patch.object(dist, "init_process_group", init_process_group))
        for outer, inner in ((DTensor, "_local_tensor"), (AsyncCollectiveTensor, "elem")):
            for name in ("device", "is_cuda"):
                of_inner = property(attrgetter(f"{inner}.{name}"))
                stack.enter_context(patch.object(outer, name, of_inner, create=True))
        stack.enter_context(patch.object(_fsdp_init, "_move_states_to_device", move))
        stack.enter_context(patch.object(DTensor, "to", to_device))
        swap = torch.__future__.set_swap_module_params_on_conversion
        swap(True)  # as `move` does
        stack.callback(swap, False)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=GPU) becomes an operator
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(Gpu())
        yield


def run_on_gpu(script, arguments: list):
    """Runs main, and prints how often each kernel ran and where the tensors were."""
    global GPU
    GPU = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.enable_cudnn_sdp(True)
    with pretended(script):
        run_main(script, arguments)
        for model in reward_models:
            for weight in model.parameters():
                facts[f"reward model on {weight.device.type}"] += 1
    facts["cuDNN"] = torch.backends.cuda.cudnn_sdp_enabled()
    print("\n" + json.dumps(facts))
