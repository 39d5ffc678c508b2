"""The head's log-probs in blocks: against float64, on other devices, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F

import utils
from utils import HeadLogps

TOLERANCES = {  # {dtype: (nats, relative error of a gradient's norm)}
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-5, 1e-4),
    torch.bfloat16: (2e-5, 6e-3),
}
V = 1000


def draw(dtype, tokens: int):
    """Returns hidden states, weight, bias and d_logps."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, 32), (V, 32), (V,), (tokens,)]
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kept", [0, 2**28])
@pytest.mark.parametrize("block", [2**18, utils.GPU_BLOCK])  # several blocks, or one
@pytest.mark.parametrize("bias, softcap, temperature", [(False, None, 1.0), (True, 5.0, 0.7)])
def test_a_target_that_occurs_500_times_has_an_exact_gradient(
    dtype, kept, block, bias, softcap, temperature, monkeypatch
):
    """In bf16, a sum of 500 rounded gradients would be off by far more than one rounding."""
    monkeypatch.setattr(utils, "CPU_BLOCK", block)
    hidden, weight, b, d_logps = draw(dtype, 600)
    targets = torch.cat([torch.full((500,), 777), torch.arange(100)])
    factors = [hidden, weight, b] if bias else [hidden, weight]
    for factor in factors:
        factor.requires_grad_()
    logps = HeadLogps.apply(hidden, targets, weight, b if bias else None, softcap, temperature)
    found = torch.autograd.grad(logps, factors, d_logps.to(logps.dtype))

    logits = hidden.double() @ weight.double().T + (b.double() if bias else 0)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    expected = -F.cross_entropy(logits / temperature, targets, reduction="none")
    nats, error = TOLERANCES[dtype]
    torch.testing.assert_close(logps.double(), expected, rtol=0, atol=nats)
    for gradient, exact in zip(found, torch.autograd.grad(expected, factors, d_logps.double())):
        assert gradient.dtype == dtype
        assert (gradient.double() - exact.double()).norm() <= error * exact.double().norm()
        if len(gradient) == V:  # the rows of the head, of which 777 is the repeated target
            repeated = gradient[777].double() - exact[777].double()
            assert repeated.norm() <= error * exact[777].double().norm()


def test_blocks_get_fewer_columns_if_there_are_more_tokens(monkeypatch):
    monkeypatch.setattr(utils, "CPU_BLOCK", 2**20)
    weight = torch.randn(3000, 4)
    for N, sizes in ((0, [3000]), (1, [3000]), (1000, [1024, 1024, 952]), (2**18, [256] * 11 + [184])):
        hidden, targets = torch.randn(N, 4), torch.zeros(N, dtype=torch.long)
        blocks = utils.head_blocks(hidden, targets, weight, None, None, 1.0)
        assert [z.shape[1] for *_, z in blocks] == sizes


@pytest.mark.parametrize("name", ["cuda", "mps", "xpu"])
def test_other_devices_than_the_cpu_have_large_blocks(name):
    """Only the name of the device is read. The tensor is on the CPU, because there may be no such device."""

    class Elsewhere(torch.Tensor):
        device = torch.device(name)

    hidden = torch.randn(1000, 4).as_subclass(Elsewhere)
    blocks = utils.head_blocks(hidden, torch.zeros(1000).long(), torch.randn(3000, 4), None, None, 1.0)
    assert [z.shape[1] for *_, z in blocks] == [3000]


def test_a_head_on_the_meta_device():
    """As in an estimate of memory: shapes and dtypes without numbers."""
    with torch.device("meta"):
        hidden, weight = (torch.empty(n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (7, 50))
        logps = HeadLogps.apply(hidden, torch.zeros(7, dtype=torch.long), weight, None, 5.0, 0.7)
        logps.sum().backward()
    assert logps.shape == (7,) and logps.dtype == torch.float32
    assert hidden.grad.shape == hidden.shape and weight.grad.dtype == torch.bfloat16


def test_a_second_backward_pass_gives_the_same(monkeypatch):
    """The first one has overwritten the blocks that were kept."""
    hidden, weight, _, d_logps = draw(torch.float64, 20)
    factors = [hidden.requires_grad_(), weight.requires_grad_()]
    logps = HeadLogps.apply(hidden, torch.arange(20), weight, None, None, 1.0)
    first = torch.autograd.grad(logps, factors, d_logps, retain_graph=True)
    second = torch.autograd.grad(logps, factors, d_logps)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [torch.sum, lambda logps: -F.logsigmoid(logps.sum())])
def test_a_gradient_penalty_is_refused(loss):
    """Its second derivative was silently wrong. A loss that is linear in the log-probs is refused, too."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    weight = torch.randn(30, 4, requires_grad=True)
    logps = HeadLogps.apply(torch.tanh(layer(torch.randn(3, 4))), torch.arange(3), weight, None, None, 1.0)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(loss(logps), layer.parameters(), create_graph=True)
    loss(logps).backward()
    assert layer.weight.grad.isfinite().all()
