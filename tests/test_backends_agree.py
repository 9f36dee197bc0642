"""Do all backends give the same loss and gradient? By the rule of tolerance.py, over dtypes, rows, shapes and layouts."""

import shutil

import numpy as np
import pytest
import torch
from cases import (
    DTYPES,
    IGNORE,
    KINDS,
    LABELLED,
    TARGET_DTYPES,
    UNLABELLED,
    Case,
    Result,
    backends_of,
    case,
    finest,
    grid,
    layouts,
    name_of,
    row_by_row,
    run,
    undecided,
    upstream_for,
)
from tolerance import agree

import pylosses
from pylosses.spec import LOSSES

FUSED = grid(LABELLED + UNLABELLED, reference=False)
EVERY = grid(LABELLED + UNLABELLED)
HALF_AND_SINGLE = (torch.float32, torch.bfloat16)


def compare(c: Case, backend: str, what: str) -> None:
    """Loss and gradient of `backend` against the rule, with a random upstream gradient; the input must stay as it was."""
    __tracebackhide__ = True
    up = upstream_for(c)
    before = c.inputs[0].clone()
    got, plain, truth = run(c, backend, up), run(c, "reference", up), run(c.double(), "reference", up)
    assert torch.equal(before.nan_to_num(1.25), c.inputs[0].nan_to_num(1.25)), f"{what}: the input was modified"
    same_results(c, what, got, plain, truth)


def same_results(c: Case, what: str, got: Result, plain: Result, truth: Result) -> None:
    __tracebackhide__ = True
    agree(f"{what} loss", got.loss, plain.loss, truth.loss)
    row = 1 if c.inputs[0].dim() > 1 else 0
    grads = [result.grads[0] for result in (got, plain, truth)]
    if c.arguments.get("kind") == "sumexp":  # where 1/p - 1 overflows, so does its derivative: no number to agree on
        over = plain.loss.isinf() if plain.loss.dim() else plain.loss.isinf().expand(c.inputs[0].select(row, 0).shape)
        grads = [g.masked_fill(over.unsqueeze(row), 0) for g in grads]
    agree(f"{what} gradient", *grads, row=row)


def test_cpu_backend_is_built():
    """Without this, a build that silently failed would skip every test of the kernels."""
    if shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler on this machine")
    status = pylosses.backends()["cpu"]
    assert status.available, f"a C++ compiler is here but the cpu backend is not: {status.reason}"


@pytest.mark.parametrize("kind", KINDS)
def test_margin_rows_are_decided(kind):
    """The rows dropped because rounding may decide them are few, so the margin tests test something."""
    for spec in LABELLED:
        if spec.family == "margin":
            for sample in range(len(spec.samples)):
                for dtype in DTYPES:
                    y = case(spec, sample, kind, dtype).inputs[1]
                    drawn = KINDS[kind](torch.Generator().manual_seed(sum(map(ord, kind))))[1]
                    assert (y != IGNORE).sum() >= 0.6 * (drawn != IGNORE).sum(), (spec.name, sample, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("spec", "sample", "backend"), FUSED)
def test_rows(spec, sample, backend, kind, dtype):
    """Every kind of row, each row with its own upstream gradient."""
    c = finest(case(spec, sample, kind, dtype))
    if kind == "huge" and dtype == torch.float64 and c.arguments.get("smooth") == 1e-5:
        pytest.skip("the truth itself is 50 ulps off; test_regions.py compares with long double")
    if kind == "huge" and dtype == torch.float64 and c.arguments.get("kind") == "sumexp":
        pytest.skip("the truth itself may be 47 ulps off; test_float64_sums_of_many_classes compares with long double")
    by_image = c.arguments["reduction"] == "none" and c.arguments.get("over") == "image"
    if kind == "special" and not row_by_row(spec, sample) and not by_image:
        # What is summed over the batch is NaN almost everywhere: nothing is left to compare but where.
        got, truth = run(c, backend), run(c.double(), "reference")
        assert truth.loss.isnan().any() and torch.equal(got.loss.isnan(), truth.loss.isnan())
        assert torch.equal(got.grads[0].isnan(), truth.grads[0].isnan())
        return
    compare(c, backend, f"{spec.function}[{kind}]")


@pytest.mark.parametrize("backend", backends_of(LOSSES["target"], reference=False))
def test_float64_sums_of_many_classes(backend):
    """sum e^(x_j - x_y) over 32000 classes: 1 / p - 1 magnifies the rounding of a logarithm; here in long double."""
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("long double is float64 here")
    c = case(LOSSES["target"], 4, "huge", torch.float64).but(reduction="none")
    x, label = c.inputs[0].numpy().astype(np.longdouble), c.inputs[1].numpy()[:, None]
    e = np.exp(x - np.take_along_axis(x, label, 1))
    np.put_along_axis(e, label, 0, 1)
    got = run(c, backend, torch.ones(2, dtype=torch.float64))
    eps = np.finfo(np.float64).eps
    loss = e.sum(1)
    assert (np.abs(got.loss.numpy() - loss) <= 8 * eps * loss).all()
    np.put_along_axis(e, label, -loss[:, None], 1)
    assert (np.abs(got.grads[0].numpy() - e).max(1) <= 8 * eps * loss).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", ["plain", "peaked", "masked", "offset", "ignored", "two_classes", "wide"])
@pytest.mark.parametrize(("spec", "sample", "backend"), FUSED)
def test_pixels(spec, sample, backend, kind, dtype):
    """The same rows as pixels: the class dimension is not the last one."""
    c = finest(case(spec, sample, kind, dtype))
    rows = c.inputs[0].shape[0]
    compare(c.shaped(1, rows, 1), backend, f"{spec.function}[{kind} as one image]")
    if rows % 2 == 0:
        compare(c.shaped(2, 1, rows // 2), backend, f"{spec.function}[{kind} as two images]")


@pytest.mark.parametrize("weighted", ["unweighted", "sample_weight", "weight", "both"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "above_zero", "normalizer", "normalizer_tensor"])
@pytest.mark.parametrize(("spec", "sample", "backend"), grid(LABELLED, reference=False))
def test_reductions(spec, sample, backend, reduction, weighted):
    if spec.family == "region" and (reduction not in ("none", "sum", "mean") or (reduction, spec.name) == ("none", "dice_ce")):
        pytest.skip("a loss of classes has no rows to choose from or to count")
    for kind, dtype in (("ignored", torch.float32), ("plain", torch.float64), ("peaked", torch.bfloat16)):
        c = case(spec, sample, kind, dtype)
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        g = torch.Generator().manual_seed(3)
        if weighted in ("sample_weight", "both"):
            c = c.but(sample_weight=torch.rand(c.inputs[1].shape, generator=g).to(statistics))
        if weighted in ("weight", "both"):
            c = c.but(weight=torch.rand(c.classes, generator=g).to(statistics))
        if reduction == "normalizer":
            c = c.but(reduction="mean", normalizer=7.5)
        elif reduction == "normalizer_tensor":
            c = c.but(reduction="mean", normalizer=torch.tensor(0.375))
        else:
            c = c.but(reduction=reduction)
        compare(c, backend, f"{spec.function}[{kind} {weighted} {reduction}]")
        if kind == "ignored":
            weights = c.arguments.get("sample_weight")
            pixels = c.shaped(2, 7, 1)
            if weights is not None:
                pixels = pixels.but(sample_weight=weights.reshape(2, 7, 1))
            compare(pixels, backend, f"{spec.function}[{kind} pixels {weighted} {reduction}]")


@pytest.mark.parametrize(
    "rows", [(12,), (3, 4), (2, 3, 2), (1, 2, 2, 3), (1, 12), (12, 1), (1, 3, 1, 2, 2)], ids=lambda r: "x".join(map(str, r))
)
@pytest.mark.parametrize(("spec", "sample", "backend"), FUSED)
def test_shapes(spec, sample, backend, rows):
    """(N, C), (N, C, d1) ... (N, C, d1, ..., d4) of the same rows."""
    compare(finest(case(spec, sample, "masked")).shaped(*rows), backend, f"{spec.function}[{rows}]")


@pytest.mark.parametrize(("spec", "sample", "backend"), FUSED)
def test_one_row(spec, sample, backend):
    """(C) logits with a 0-d target."""
    for kind in ("plain", "peaked", "ignored"):
        c = case(spec, sample, kind)
        for r in (0, 1):
            compare(c._replace(inputs=tuple(t[r] for t in c.inputs)), backend, f"{spec.function}[{kind} row {r} alone]")


@pytest.mark.parametrize("shape", ["rows", "pixels"])
@pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=name_of)
@pytest.mark.parametrize(("spec", "sample", "backend"), EVERY)
def test_layouts(spec, sample, backend, dtype, shape):
    """Equal values in any memory layout: equal results, and a gradient with the strides of a dense input."""
    c = case(spec, sample, "masked", dtype).but(reduction="none" if spec.family in ("softmax", "margin") else "mean")
    if shape == "pixels":
        c = c.shaped(2, 3, 2)
    up = upstream_for(c)
    plain, truth = run(c, "reference", up), run(c.double(), "reference", up)
    for layout, x in layouts(c.inputs[0]):
        what = f"{spec.function}[{layout}]"
        got = run(c._replace(inputs=(x, *c.inputs[1:])), backend, up)
        same_results(c, what, got, plain, truth)
        dense = torch.empty_like(x).stride() == x.stride()
        if dense and backend != "reference":
            assert got.grads[0].stride() == x.stride(), f"{what}: gradient strides {got.grads[0].stride()}, input {x.stride()}"


@pytest.mark.parametrize("shape", ["rows", "pixels"])
@pytest.mark.parametrize(("spec", "sample", "backend"), FUSED)
def test_expanded(spec, sample, backend, shape):
    """Stride 0: one row seen by many labels, and one logit seen by all classes."""
    c = finest(case(spec, sample, "plain"))
    x, *rest = c.shaped(1, 13, 1).inputs if shape == "pixels" else c.inputs
    for base in (x[..., :1, :] if shape == "pixels" else x[:1], x[:, :1]):
        wide = c._replace(inputs=(base.expand(x.shape), *rest))
        if spec.family == "margin":  # ties meet drawn margins: keep the decided rows only
            flat = wide.inputs[0].movedim(1, -1).reshape(-1, c.classes).double()
            drop = undecided(flat, rest[0].reshape(-1), c.arguments).reshape(rest[0].shape)
            wide = wide._replace(inputs=(wide.inputs[0], torch.where(drop, IGNORE, rest[0])))
        compare(wide, backend, f"{spec.function}[expanded from {tuple(base.shape)}]")


@pytest.mark.parametrize("index", TARGET_DTYPES, ids=name_of)
@pytest.mark.parametrize(("spec", "sample", "backend"), grid(LABELLED))
def test_target_dtypes(spec, sample, backend, index):
    """Labels of any integer dtype, also in strided memory, give the bits that int64 labels give."""
    ignore = 255 if index == torch.uint8 else IGNORE
    c = case(spec, sample, "ignored").but(ignore_index=ignore)
    x, y = c.inputs
    y = torch.where(y == IGNORE, ignore, y)
    wanted = run(c._replace(inputs=(x, y)), backend)
    for narrow in (y.to(index), y.to(index).repeat_interleave(2)[::2]):
        got = run(c._replace(inputs=(x, narrow)), backend)
        assert torch.equal(got.loss, wanted.loss)
        assert torch.equal(got.grads[0], wanted.grads[0])
    x4, y4 = c._replace(inputs=(x, y)).shaped(2, 7, 1).inputs
    wanted = run(c._replace(inputs=(x4, y4)), backend)
    got = run(c._replace(inputs=(x4, y4.to(index).transpose(0, 1).contiguous().transpose(0, 1))), backend)
    assert torch.equal(got.loss, wanted.loss)
    assert torch.equal(got.grads[0], wanted.grads[0])


@pytest.mark.parametrize(("spec", "sample", "backend"), FUSED)
def test_thread_counts(spec, sample, backend, threads):
    """More threads than rows, fewer, and one: the rule holds, and a fixed number gives the same bits twice."""
    c = case(spec, sample, "plain", seed=5)
    for count in (1, 2, 3, 16):
        threads(count)
        for shaped in (c, c.shaped(1, 13, 1)):
            compare(shaped, backend, f"{spec.function}[{count} threads]")
            first, second = run(shaped, backend), run(shaped, backend)
            assert torch.equal(first.loss, second.loss) and torch.equal(first.grads[0], second.grads[0])


SOFT = grid([LOSSES["cross_entropy"]], reference=False)


def soft_case(sample: int, kind: str, dtype: torch.dtype, soft_dtype: torch.dtype) -> Case:
    """Class probabilities as targets: the first row is one-hot, the second has no mass at all."""
    c = case(LOSSES["cross_entropy"], sample, kind, dtype)
    x = c.inputs[0]
    soft = torch.softmax(3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(4)), dim=1)
    soft[0] = torch.nn.functional.one_hot(torch.tensor(1), x.shape[1])
    soft[1] = 0
    return c._replace(inputs=(x, soft.to(soft_dtype)))


def compare_soft(c: Case, backend: str, what: str) -> None:
    """As `compare`, with the gradient of the logits alone: a fused backend has none for the probabilities."""
    __tracebackhide__ = True
    up = upstream_for(c)

    def of(called: Case, by: str) -> Result:
        x = called.inputs[0].detach().requires_grad_()
        loss = pylosses.cross_entropy(x, called.inputs[1], backend=by, **called.arguments)
        return Result(loss.detach(), torch.autograd.grad(loss, x, up.to(loss.dtype)))

    same_results(c, what, of(c, backend), of(c, "reference"), of(c.double(), "reference"))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("soft_dtype", [None, torch.float32, torch.float64], ids=["same", "float32", "float64"])
@pytest.mark.parametrize("layout", ["rows", "pixels", "channels_last_target"])
@pytest.mark.parametrize(("spec", "sample", "backend"), SOFT)
def test_soft_targets(spec, sample, backend, layout, soft_dtype, dtype):
    """Class probabilities in their own dtype and layout."""
    for kind in ("plain", "peaked", "offset"):
        c = soft_case(sample, kind, dtype, soft_dtype or dtype).but(reduction="none")
        if layout != "rows":
            rows = c.inputs[0].shape[0]
            x, soft = (t.reshape(1, rows, 1, -1).movedim(-1, 1).contiguous() for t in c.inputs)
            if layout == "channels_last_target":
                soft = soft.contiguous(memory_format=torch.channels_last)
            c = c._replace(inputs=(x, soft))
        compare_soft(c, backend, f"soft targets[{kind}]")


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "above_zero"])
@pytest.mark.parametrize(("spec", "sample", "backend"), SOFT)
def test_soft_target_reductions(spec, sample, backend, reduction, weighted):
    """The divisors of soft targets; rows with a loss of exactly 0, or below it by a negative weight, are not above zero."""
    c = soft_case(sample, "plain", torch.float32, torch.float32).but(reduction=reduction)
    if weighted:
        g = torch.Generator().manual_seed(5)
        s = torch.rand(13, generator=g)
        s[3:5] = -s[3:5]
        c = c.but(weight=torch.rand(37, generator=g), sample_weight=s)
    compare_soft(c, backend, f"soft targets[{reduction}]")
