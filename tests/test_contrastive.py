"""The contrastive losses on the linear driver: the reference's numbers, though no matrix of similarities is stored."""

import pytest
import torch
from cases import DTYPES, name_of
from resident import allocations
from tolerance import agree, close
from torch import Tensor

import pylosses
from pylosses import cpu, linear_fused
from pylosses.linear_fused import WORKSPACE

if cpu.absent is not None:
    pytest.skip(f"cpu: {cpu.absent}", allow_module_level=True)

N, D = 37, 6
VALID = torch.arange(N) % 4 != 1
CALLS = {
    "info_nce": ("info_nce_loss", 2, {}),
    "one_way": ("info_nce_loss", 2, {"symmetric": False, "temperature": 0.5}),
    "smoothed": ("info_nce_loss", 2, {"label_smoothing": 0.1}),
    "feature": ("feature_contrastive_loss", 3, {}),
    "sharp_feature": ("feature_contrastive_loss", 3, {"temperature": 0.02}),
    "dropped": ("feature_contrastive_loss", 3, {"negative_valid": VALID, "temperature": 0.5}),
}
REDUCTIONS = ("none", "sum", "mean")


@pytest.fixture(autouse=True, params=["stored", "blocks"])
def how(request, monkeypatch):
    """Similarities that fit the workspace, and three blocks of rows, the last one of another size."""
    if request.param == "blocks":
        monkeypatch.setattr(linear_fused, "_SMALL", 0)
        monkeypatch.setattr(linear_fused, "_ROWS", 16)
        monkeypatch.setattr(linear_fused, "WORKSPACE", 0)
    return request.param


def vectors(count: int, rows: int = N, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random vectors, equal rows of which are alike; a zero vector in each."""
    g = torch.Generator().manual_seed(rows)
    base = torch.randn(rows, D, generator=g)
    found = [base + 0.7 * torch.randn(rows, D, generator=g) for _ in range(count)]
    for i, x in enumerate(found[:rows]):
        x[i] = 0
    return [x.to(dtype).requires_grad_() for x in found]


def step(call: str, backend: str | None, inputs: list[Tensor], reduction: str, **more) -> list[Tensor]:
    """Loss and gradients, by a random upstream gradient."""
    function, _, arguments = CALLS[call]
    loss = getattr(pylosses, function)(*inputs, backend=backend, reduction=reduction, **{**arguments, **more})
    up = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(loss.dtype)
    leaves = inputs + [v for v in more.values() if isinstance(v, Tensor) and v.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, leaves, up)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("call", CALLS)
def test_the_references_numbers(call, reduction):
    got, wanted = (step(call, b, vectors(CALLS[call][1]), reduction) for b in ("cpu", "reference"))
    for i, (a, e) in enumerate(zip(got, wanted, strict=True)):
        close(f"result {i}", a, e, rtol=1e-12)
        assert e.abs().sum() > 0


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("call", CALLS)
def test_a_learned_temperature(call, reduction):
    found = []
    for backend in ("cpu", "reference"):
        temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        found.append(step(call, backend, vectors(CALLS[call][1]), reduction, temperature=temperature))
    for i, (a, e) in enumerate(zip(*found, strict=True)):
        close(f"result {i}", a, e, rtol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("call", CALLS)
def test_precision(call, dtype):
    inputs = vectors(CALLS[call][1], dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    got, plain = (step(call, b, inputs, "mean") for b in ("cpu", "reference"))
    truth = step(call, "reference", wide, "mean")
    for i, (a, p, t) in enumerate(zip(got, plain, truth, strict=True)):
        agree(f"result {i}", a, p, t, row=1 if i else None)


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("call", ["info_nce", "smoothed", "feature"])
def test_few_rows(call, rows):
    for reduction in REDUCTIONS:
        inputs = [x.detach()[:rows].requires_grad_() for x in vectors(CALLS[call][1], 5)]
        got, wanted = (step(call, b, inputs, reduction) for b in (None, "reference"))
        for a, e in zip(got, wanted, strict=True):
            close(f"{rows} rows", a, e, rtol=1e-12)


def test_a_row_alone_with_a_dropped_negative():
    z = torch.ones(1, 3, requires_grad=True)
    loss = pylosses.feature_contrastive_loss(z, -z, z, negative_valid=torch.tensor([False]))
    assert float(loss.detach()) == 0 and not torch.autograd.grad(loss, z)[0].any()


def test_a_dropped_negative_is_never_read():
    *pair, negative = vectors(3)
    with torch.no_grad():
        negative[~VALID] = torch.nan
    for t in step("dropped", None, [*pair, negative], "mean"):
        assert t.isfinite().all()


def test_second_backward():
    inputs = vectors(3)
    loss = pylosses.feature_contrastive_loss(*inputs)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    kept = [t.clone() for t in first]
    second = torch.autograd.grad(2 * loss, inputs)
    for a, b, c in zip(first, kept, second, strict=True):
        assert torch.equal(a, b) and torch.equal(2 * a, c)


def test_changed_in_place():
    inputs = vectors(2)
    loss = pylosses.info_nce_loss(*inputs)
    with torch.no_grad():
        inputs[0] *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("call", ["info_nce", "feature"])
def test_many_upstream_gradients_at_once(call):
    function, count, _ = CALLS[call]
    inputs = vectors(count)
    loss = getattr(pylosses, function)(*inputs)
    up = torch.tensor([1.0, -2.0], dtype=torch.float64)
    single = torch.autograd.grad(loss, inputs, retain_graph=True)
    for g, e in zip(torch.autograd.grad(loss, inputs, up, is_grads_batched=True), single, strict=True):
        close("gradient", g, torch.stack([e, -2 * e]), rtol=1e-13)


@pytest.mark.parametrize("call", ["info_nce", "feature", "dropped"])
def test_autocast(call):
    expected = step(call, "cpu", vectors(CALLS[call][1], dtype=torch.float32), "mean")
    with torch.autocast("cpu", torch.bfloat16):
        under = step(call, "cpu", vectors(CALLS[call][1], dtype=torch.float32), "mean")
    assert all(torch.equal(a, e) for a, e in zip(under, expected, strict=True))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_norms_whose_squares_are_no_numbers(scale):
    inputs = [(x.detach() * scale).requires_grad_() for x in vectors(2, dtype=torch.float32)]
    got, wanted = (step("info_nce", b, inputs, "mean") for b in ("cpu", "reference"))
    for a, e in zip(got, wanted, strict=True):
        assert e.isfinite().all()
        close("result", a, e, rtol=1e-5)


@pytest.mark.parametrize("call", ["info_nce", "feature"])
def test_nan_shows(call):
    inputs = vectors(CALLS[call][1])
    with torch.no_grad():
        inputs[0][7, 0] = torch.nan
    loss, *grads = step(call, "cpu", inputs, "mean")
    assert loss.isnan() and grads[0][7].isnan().any()


def test_only_what_needs_a_gradient():
    anchor, positive, negative = (x.detach() for x in vectors(3))
    everything = step("feature", "cpu", vectors(3), "mean")
    for i, x in enumerate((anchor, positive, negative)):
        x.requires_grad_()
        loss = pylosses.feature_contrastive_loss(anchor, positive, negative, reduction="mean")
        up = torch.randn((), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        close("gradient", torch.autograd.grad(loss, x, up)[0], everything[1 + i], rtol=1e-13)
        x.requires_grad_(False)


def test_double_backward():
    """The fused path says what to do, and the reference does it."""
    inputs = vectors(2)
    (grad,) = torch.autograd.grad(pylosses.info_nce_loss(*inputs), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match='double backward.*backend="reference"'):
        grad.square().sum().backward()
    (grad,) = torch.autograd.grad(pylosses.info_nce_loss(*inputs, backend="reference"), inputs[:1], create_graph=True)
    grad.square().sum().backward()


@pytest.mark.parametrize("call", ["info_nce", "feature"])
def test_compile_and_func(call):
    """Where torch traces, the similarities are stored, and the numbers are the same."""
    function, count, _ = CALLS[call]
    inputs = vectors(count)
    loss = getattr(pylosses, function)
    close("compiled", torch.compile(loss, backend="aot_eager", fullgraph=True)(*inputs), loss(*inputs), rtol=1e-12)
    bare = [x.detach() for x in inputs]
    got = torch.func.grad(lambda a: loss(a, *bare[1:]))(bare[0])
    close("torch.func", got, torch.autograd.grad(loss(*inputs), inputs[:1])[0], rtol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("call", ["info_nce", "feature"])
def test_what_is_stored(call, reduction, how):
    """torch's allocator: the matrices that fit the workspace, else nothing near B x B; it sees the reference's matrix."""
    inputs = vectors(CALLS[call][1], rows=1500, dtype=torch.float32)
    matrix = 1500 * 1500 * 4
    with pylosses.use_pool(0):
        sizes, _ = allocations(lambda: step(call, "cpu", inputs, reduction))
    if how == "stored" and reduction != "none":
        assert sum(sizes) <= WORKSPACE
        assert sum(size >= matrix for size in sizes) == (3 if call == "info_nce" else 2)
    elif how == "blocks":
        assert max(sizes) < matrix / 16, f"{max(sizes)} bytes at once, the matrix has {matrix}"
        assert sum(sizes) < 2 * matrix  # blocks and vectors, however often
    sizes, _ = allocations(lambda: step(call, "reference", inputs, reduction))
    assert max(sizes) >= matrix
