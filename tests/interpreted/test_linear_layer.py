"""Losses of a linear layer's output through Triton's interpreter."""

import shutil
import zlib

import emulator
import faster  # noqa: F401
import pytest
import torch
from cases import DTYPES, IGNORE, arguments_of
from pylosses.kernels import linear
from resident import allocations
from test_linear import REDUCTIONS, SAMPLES, gradients, inputs, leaves, plain
from tolerance import agree, close

import pylosses
from pylosses import linear_fused
from pylosses.choice import _PREFERRED
from pylosses.spec import LOSSES

NAMES = ("input", "linear_weight", "linear_bias")


def turn(*case: object) -> int:
    return zlib.crc32(repr(case).encode())


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """So that each has several tiles."""
    monkeypatch.setattr(linear, "LINEAR_PROGRAMS", 3)


def compare(spec, tensors, y, arguments, wanted=(True, True, True)):
    """Loss and gradients by the rule of tolerance.py; only those `wanted` need a gradient."""
    results = []
    for dtype, run in ((None, fused), (None, plain), (torch.float64, plain)):
        given = leaves(*(t if dtype is None else t.to(dtype) for t in tensors))
        for leaf, want in zip(given, wanted, strict=False):
            leaf.requires_grad_(want)
        own = arguments
        if run is plain:  # half features have logits of float32
            statistics = torch.float64 if torch.float64 in (dtype, tensors[0].dtype) else torch.float32
            x = [t.to(statistics) for t in given]
            own = {k: v.double() if dtype and isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        loss = run(spec, *(given if run is fused else x), *((None,) if len(given) < 3 else ()), y, **own)
        results.append((loss, *gradients(loss, [leaf for leaf in given if leaf.requires_grad])))
    names = ["loss", *(name for name, want in zip(NAMES, wanted, strict=False) if want)]
    for name, got, by_plain, truth in zip(names, *results, strict=False):
        if got.dtype == torch.float64:  # plain products are as inexact as ours, and no truth
            close(f"{spec.function}: {name}", got, truth, rtol=1e-11)
            continue
        if name == "linear_bias":  # a row of its own
            got, by_plain, truth = got[None], by_plain[None], truth[None]
        agree(f"{spec.function}: {name}", got, by_plain, truth, row=1 if got.dim() == 2 else None)
    assert results[0][0].detach().abs().sum() > 0


def fused(spec, h, w, b, y, **arguments):
    return pylosses.linear_loss(h, w, y, loss=spec.name, linear_bias=b, backend="triton", **arguments)


@pytest.mark.parametrize(("spec", "sample"), SAMPLES)
def test_every_loss(spec, sample):
    """Several tiles of rows and of classes for the first arguments; dtype and reduction turn."""
    dtype = DTYPES[turn(spec.name, sample) % len(DTYPES)]
    classes, rows = (150, 70) if sample == 0 else (70, 9)
    *tensors, y = inputs(classes, dtype, rows)
    reduction = REDUCTIONS[turn(sample, spec.name) % len(REDUCTIONS)]
    compare(spec, tensors, y, arguments_of(spec, sample, classes, dtype) | {"reduction": reduction})


@pytest.mark.parametrize("name", ["cross_entropy", "hem"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_every_dtype(name, dtype):
    *tensors, y = inputs(70, dtype, 20)
    compare(LOSSES[name], tensors, y, {"reduction": "mean"})


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True), (False, False, True)])
def test_what_needs_no_gradient_gets_none(wanted):
    *tensors, y = inputs(40, torch.float32, 9)
    compare(LOSSES["cross_entropy"], tensors[: len(wanted)], y, {}, wanted)


def test_weights_and_divisors():
    *tensors, y = inputs(40, torch.float64, 9)
    g = torch.Generator().manual_seed(3)
    s, weight = torch.rand(9, generator=g).double(), torch.rand(40, generator=g).double() + 0.1
    arguments = {"weight": weight, "sample_weight": s, "z_loss": 0.1, "label_smoothing": 0.1}
    for more in ({"reduction": "mean"}, {"reduction": "mean", "normalizer": torch.tensor(9.0)}, {"reduction": "above_zero"}):
        compare(LOSSES["cross_entropy"], tensors, y, arguments | more)


def test_shapes_strides_and_mixed_dtypes():
    """Sequences, a transposed head, features of another dtype than the head, labels one position later."""
    h, w, b, y = inputs(40, torch.float32, 12)
    h, y = h.nan_to_num().view(3, 4, -1).bfloat16(), y.view(3, 4)
    head = w.t().contiguous().t()
    for dtype in (torch.bfloat16, torch.float32):
        results = []
        for backend in ("triton", "reference"):
            given = leaves(h, head.to(dtype), b)
            loss = pylosses.linear_cross_entropy(*given[:2], y, linear_bias=given[2], shift=True, backend=backend)
            results.append((loss, *gradients(loss, given)))
        for got, wanted in zip(*results, strict=True):
            assert got.shape == wanted.shape and got.dtype == wanted.dtype
            assert torch.allclose(got.float(), wanted.float(), rtol=0.01, atol=1e-6)


def test_nothing_counts():
    h, w, b, y = inputs(40, torch.float32, 9)
    for rows, labels in ((h, torch.full_like(y, IGNORE)), (h[:0], y[:0])):
        given = leaves(rows, w, b)
        loss = pylosses.linear_cross_entropy(*given[:2], labels, linear_bias=given[2], backend="triton")
        assert loss == 0 and all((g == 0).all() for g in torch.autograd.grad(loss, given))


def test_backward_twice_but_not_of_backward():
    *tensors, y = inputs(40, torch.float32, 9)
    given = leaves(*tensors)
    loss = fused(LOSSES["hem"], *given, y)
    first, second = gradients(loss, given), gradients(loss, given)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    (g,) = torch.autograd.grad(loss, given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        g.sum().backward()


def test_the_logits_are_never_stored(monkeypatch):
    monkeypatch.setattr(linear, "LINEAR_PROGRAMS", 1)
    *tensors, y = inputs(600, torch.float32, 130)
    given = leaves(*tensors)
    sizes, _ = allocations(lambda: fused(LOSSES["cross_entropy"], *given, y).backward())
    assert 4 * 600 * tensors[0].shape[1] <= max(sizes) < 4 * 130 * 600 / 8


@pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("name", ["cross_entropy", "hem"])
def test_the_default_of_a_cuda_device_never_makes_all_logits(name, monkeypatch):
    """With both backends there, one emulated and one interpreted. With probabilities as targets both would: the first runs."""
    monkeypatch.setitem(_PREFERRED, "cpu", _PREFERRED["cuda"])
    made, original = [], linear_fused.Product.made
    monkeypatch.setattr(linear_fused.Product, "made", lambda *given: made.append(1) or original(*given))
    h, w, b, y = inputs(40, torch.float64, 9)
    unfit = {"workspace": 0}  # small logits of a CPU tensor would be stored
    with emulator.switched() as cuda:
        for reduction in REDUCTIONS:
            given = leaves(h, w, b)
            loss = pylosses.linear_loss(*given[:2], y, loss=name, linear_bias=given[2], reduction=reduction, **unfit)
            wanted = plain(LOSSES[name], *given, y, reduction=reduction)
            for got, truth in zip((loss, *gradients(loss, given)), (wanted, *gradients(wanted, given)), strict=True):
                close(reduction, got, truth, rtol=1e-11)
        assert not made and not cuda.launches()
        if name == "cross_entropy":
            pylosses.linear_cross_entropy(h, w, torch.rand(9, 40).double(), **unfit)
            assert made and cuda.launches()


def test_bad_labels_and_bad_features_stay_in_their_rows():
    h, w, b, y = inputs(40, torch.float32, 9)
    h[4] = torch.nan
    for name in ("cross_entropy", "hem"):
        given = leaves(h, w)
        loss = fused(LOSSES[name], *given, b, y, reduction="none")
        assert loss.isnan().tolist() == [i == 4 for i in range(9)]
        g = torch.autograd.grad(loss, given[0], torch.ones(9))[0]
        assert g.isfinite().all(1).tolist() == [i != 4 for i in range(9)]
    with pytest.raises(IndexError, match="is 77"):
        fused(LOSSES["hem"], h, w, b, y.masked_fill(y == y[3], 77))
