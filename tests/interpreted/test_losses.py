"""The matrix of tests/test_backends_agree.py and test_golden.py through Triton's interpreter.

The dtype turns with the case, so that every loss with all its arguments meets every kind of row, in a minute or two. `make
proofs` runs the same tests, and many more, in all dtypes.
"""

import os
import zlib

import faster  # noqa: F401
import pytest
import torch
from cases import (
    DTYPES,
    INF,
    KINDS,
    LABELLED,
    NAN,
    UNLABELLED,
    Case,
    arguments_of,
    case,
    layouts,
    row_by_row,
    run,
    upstream_for,
)
from golden import calls, load
from test_backends_agree import compare, compare_soft, same_results, soft_case
from test_golden import check as check_golden

import pylosses
from pylosses import triton
from pylosses.autograd import Call
from pylosses.spec import LOSSES

#: `make proofs`; otherwise what all losses of a family share is tested with one of them
EVERYTHING = os.environ.get("PYLOSSES_GPU_TESTS") == "all"
ONE_OF_EACH = ("cross_entropy", "logit_norm", "hem", "entropy", "tta", "adr", "dice_ce")
LOSSES_HERE = [spec for spec in LABELLED + UNLABELLED if spec.why_not("triton") is None]
SAMPLES = [pytest.param(spec, i, id=f"{spec.name}{i}") for spec in LOSSES_HERE for i in range(len(spec.samples))]


def dtype_of(*case: object) -> torch.dtype:
    """Turns with the case."""
    return DTYPES[zlib.crc32(repr(case).encode()) % len(DTYPES)]


def test_the_interpreter_runs():
    status = pylosses.backends()["triton"]
    assert status.available and "interpreted" in status.reason
    assert set(triton.kernels()) == {spec.kernel for spec in LOSSES_HERE}


def kinds_for(spec, sample):
    """Every kind of row; rows of many blocks only once for a loss, or a family."""
    for kind in KINDS:
        if kind == "wide" and (sample > 0 or spec.family == "region"):
            continue
        if kind == "huge" and (sample > 0 or spec.name not in ("cross_entropy", "hem", "entropy", "tta", "adr")):
            continue
        if kind in ("special", "masked") and spec.family == "region" or kind == "special" and not row_by_row(spec, sample):
            continue  # with sums over the batch one NaN or infinity is everywhere
        yield kind


@pytest.mark.parametrize(("spec", "sample"), SAMPLES)
def test_rows(spec, sample):
    for kind in kinds_for(spec, sample):
        c = case(spec, sample, kind, dtype_of(spec.name, sample, kind))
        if spec.family != "region":
            c = c.but(reduction="none")
        compare(c, "triton", f"{spec.function}[{kind}]")


@pytest.mark.parametrize("layout", ["rows", "pixels"])
@pytest.mark.parametrize("spec", [s for s in LOSSES_HERE if s.family == "region"], ids=lambda s: s.name)
def test_region_of_several_blocks(spec, layout):
    """More classes than a block of the region family holds."""
    dtype = dtype_of(spec.name, layout)
    x, y = case(spec, 0, "wide", dtype).inputs
    c = Case(spec, (x[:, :300].clone(), y % 300), arguments_of(spec, 0, 300, dtype), 300)
    compare(c.shaped(1, 3, 1) if layout == "pixels" else c, "triton", f"{spec.function}[{layout}]")


@pytest.mark.parametrize(("spec", "sample"), SAMPLES)
def test_pixels_and_layouts(spec, sample):
    c = case(spec, sample, "plain", dtype_of(spec.name, sample)).but(reduction="mean")
    compare(c.shaped(1, 13, 1), "triton", f"{spec.function}[pixels]")
    if sample > 0 or not (EVERYTHING or spec.name in ONE_OF_EACH):
        return
    c = case(spec, sample, "tied", torch.float32).shaped(2, 3, 2)
    up = upstream_for(c)
    plain, truth = run(c, "reference", up), run(c.double(), "reference", up)
    for layout, x in layouts(c.inputs[0]):
        got = run(c._replace(inputs=(x, *c.inputs[1:])), "triton", up)
        same_results(c, f"{spec.function}[{layout}]", got, plain, truth)
        if torch.empty_like(x).stride() == x.stride():
            assert got.grads[0].stride() == x.stride()


@pytest.mark.parametrize("reduction", ["sum", "mean", "above_zero", "normalizer", "normalizer_tensor"])
@pytest.mark.parametrize("spec", LOSSES_HERE, ids=lambda s: s.name)
def test_reductions(spec, reduction):
    c = case(spec, 0, "ignored", dtype_of(spec.name, reduction))
    if spec.family == "region" and reduction not in ("sum", "mean"):
        pytest.skip("Dice is a ratio of sums: it has no number of rows to divide by")
    statistics = torch.float64 if c.inputs[0].dtype == torch.float64 else torch.float32
    c = c.but(sample_weight=torch.rand(14, generator=torch.Generator().manual_seed(3)).to(statistics))
    if spec.inputs == "labelled":
        c = c.but(weight=torch.rand(11, generator=torch.Generator().manual_seed(4)).to(statistics))
    divisors = {"normalizer": 7.5, "normalizer_tensor": torch.tensor(0.375)}
    if reduction in divisors:
        c = c.but(reduction="mean", normalizer=divisors[reduction])
    else:
        c = c.but(reduction=reduction)
    compare(c, "triton", f"{spec.function}[{reduction}]")


@pytest.mark.parametrize("name", ["cross_entropy"])
def test_soft_targets(name):
    for sample in range(len(LOSSES[name].samples)):
        for kind in ("plain", "peaked", "offset"):
            dtype = dtype_of(sample, kind)
            compare_soft(soft_case(sample, kind, dtype, dtype).but(reduction="none"), "triton", f"soft[{kind}]")


@pytest.mark.parametrize("golden", load(), ids=lambda c: c.id)
def test_golden(golden):
    """The golden float64 values."""
    for call in calls(golden):
        spec = next((s for s in LOSSES.values() if s.function == call.function), None)
        if spec in LOSSES_HERE:
            check_golden(golden, call, "triton", torch.float64, None)


def test_bad_labels():
    """On the CPU an error; on an accelerator, which the kernels cannot tell from here, NaN for the row and no gradient."""
    x, y = torch.randn(4, 5), torch.tensor([1, 7, -100, 2])
    with pytest.raises(IndexError, match="is 7"):
        pylosses.cross_entropy(x, y, backend="triton")
    for name, scalars in (("cross_entropy", (0.0, 1.0, 0.0, 0.0)), ("hem", (1.0, 1.0, 0.0, 0.0, 1.0, 1.0))):
        call = Call("triton", name, y, None, None, None, None, None, scalars, -100, "none", None)
        loss, saved = triton.forward(call, x, True)
        assert loss.isnan().tolist() == [False, True, False, False] and loss[2] == 0
        gradient = triton.backward(call, x, saved, torch.ones(4))
        assert (gradient[1:3] == 0).all() and gradient.isfinite().all()
        assert bool(triton.forward(call._replace(reduction="mean"), x, True)[0].isnan())


def test_many_kept_classes():
    """The longest list, ties, and fewer classes than ranks."""
    x = torch.randint(0, 9, (3, 300), generator=torch.Generator().manual_seed(0)).float()
    for wide in (x, x[:, :40]):
        leaf, other = wide.clone().requires_grad_(), wide.double().requires_grad_()
        got = pylosses.knl_loss(leaf, k=33, skip=30, backend="triton")
        truth = pylosses.knl_loss(other, k=33, skip=30, backend="reference")
        (g,), (t,) = torch.autograd.grad(got, leaf), torch.autograd.grad(truth, other)
        assert torch.allclose(got.double(), truth, rtol=1e-5) and torch.allclose(g.double(), t, atol=1e-7)


@pytest.mark.skipif(not EVERYTHING, reason="a minute a loss; tests/test_triton_ptx.py sees that classes are saved as bits")
@pytest.mark.parametrize("function", [pylosses.sparse_cl_loss, lambda x, **more: pylosses.adr_loss(x, top=1, **more)])
def test_classes_that_float32_cannot_count(function):
    """Where the largest logit is class 2^24 + 1, which is kept for backward: its gradient is not its neighbour's."""
    x = torch.zeros(1, 2**24 + 9)
    x[0, 2**24 + 1] = 20.0
    leaf = x.requires_grad_()
    function(leaf, backend="triton").backward()
    assert int(leaf.grad.abs().argmax()) == 2**24 + 1


def test_nan_and_inf_stay_in_their_rows():
    x = torch.randn(4, 6)
    x[1, 2], x[2, 3] = NAN, -INF
    loss = pylosses.cross_entropy(x, torch.tensor([0, 1, 3, 4]), reduction="none", backend="triton")
    assert loss.isnan().tolist() == [False, True, False, False] and loss[2] == INF
