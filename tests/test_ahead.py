"""Is a gradient that forward wrote ahead the one that backward would compute, whatever happens between the two?"""

import pytest
import torch

import pylosses
from pylosses import cpu
from pylosses.spec import LOSSES

pytestmark = pytest.mark.skipif(cpu.absent is not None, reason=f"no C++ kernels: {cpu.absent}")

SPECS = [s for s in LOSSES.values() if s.kernel and s.inputs != "own" and s.why_not("cpu") is None]
SHAPES = [pytest.param((33, 70), id="rows"), pytest.param((3, 7, 5, 9), id="pixels"), pytest.param((9, 5000), id="long")]


def made(spec, shape, dtype, **more):
    """A function from logits to the loss, and logits."""
    generator = torch.Generator().manual_seed(len(spec.name))
    x = (3 * torch.randn(shape, generator=generator)).to(dtype)
    labels = torch.randint(0, shape[1], shape[:1] + shape[2:], generator=generator)
    labels.view(-1)[::6] = -100
    arguments = spec.sample(0, shape[1]) | more
    function = getattr(pylosses, spec.function)
    inputs = (labels,) if spec.inputs == "labelled" else ()
    return lambda v: function(v, *inputs, **arguments, backend="cpu"), x


def gradient(loss, x, factor, ahead, monkeypatch):
    with monkeypatch.context() as patch:
        if not ahead:
            patch.setattr(cpu, "is_known_early", lambda call, told: False)
        v = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(v), v, torch.tensor(factor, dtype=loss(v).dtype))
    return grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_ahead_is_what_backward_computes(spec, shape, dtype, monkeypatch):
    reductions = ("mean", "sum") if spec.default_reduction == "mean" else (spec.default_reduction,)
    for reduction in reductions:
        loss, x = made(spec, shape, dtype, reduction=reduction)
        for factor in (1.0, 0.37):
            ahead = gradient(loss, x, factor, True, monkeypatch)
            later = gradient(loss, x, factor, False, monkeypatch)
            size = later.double().abs().max().item()
            ulp = torch.finfo(dtype).eps
            assert (ahead.double() - later.double()).abs().max().item() <= 4 * ulp * size + torch.finfo(dtype).tiny


def test_loss_scaling_does_not_lose_half_gradients():
    """A float16 gradient of a mean is tiny; scaled by 65536 it is not, and must not come from the tiny one."""
    x = torch.randn(4096, 64, dtype=torch.float16).requires_grad_()
    y = torch.arange(4096) % 64
    (pylosses.cross_entropy(x, y) * 65536).backward()
    v = x.detach().double().requires_grad_()
    (torch.nn.functional.cross_entropy(v, y) * 65536).backward()
    small = v.grad.abs() < 16  # where the unscaled gradient has no normal float16
    assert small.any()
    assert ((x.grad.double() - v.grad).abs()[small] <= 2**-10 * v.grad.abs()[small] + 1e-6).all()


def test_second_backward_after_the_first_was_changed():
    x = torch.randn(64, 100, requires_grad=True)
    y = torch.arange(64)
    loss = pylosses.cross_entropy(x, y)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    expected = first.clone()
    first.fill_(7)
    (second,) = torch.autograd.grad(loss, x, retain_graph=True)
    (third,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-9)
    assert torch.equal(second, third) and second.data_ptr() != third.data_ptr()


def test_logits_changed_in_place_are_noticed():
    x = torch.randn(64, 100, requires_grad=True)
    v = x * 1
    loss = pylosses.cross_entropy(v, torch.arange(64))
    v += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_is_written_without_a_graph():
    x = torch.randn(64, 100, requires_grad=True)
    called = []
    original, cpu.forward_ahead = cpu.forward_ahead, lambda *a: called.append(a) or original(*a)
    try:
        with torch.no_grad():
            pylosses.cross_entropy(x, torch.arange(64))
        pylosses.cross_entropy(x.detach(), torch.arange(64))
        assert not called
        pylosses.cross_entropy(x, torch.arange(64))
        assert called
    finally:
        cpu.forward_ahead = original
