"""The linear losses: are they the row loss of h W^T + b, with all gradients, though the logits are never stored?"""

import contextlib
import functools
import shutil
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch
from cases import DTYPES, IGNORE, INF, LABELLED, NAN, arguments_of, name_of
from resident import allocations, peak, reset_peak, resident
from tolerance import agree, close
from torch import Tensor

import pylosses
from pylosses import cpu, linear_fused
from pylosses.autograd import Call
from pylosses.choice import _PREFERRED
from pylosses.linear_fused import WORKSPACE

if cpu.absent is not None:
    pytest.skip(f"cpu: {cpu.absent}", allow_module_level=True)

SPECS = [spec for spec in LABELLED if spec.family in ("softmax", "margin")]
SAMPLES = [pytest.param(spec, i, id=f"{spec.name}{i}") for spec in SPECS for i in range(len(spec.samples))]
REDUCTIONS = ("mean", "sum", "above_zero", "none")
TINY = 1  # bytes of workspace: the smallest blocks
N, D = 40, 7  # three blocks of the smallest size
MANY, FEW = 1030, 19  # classes: gradient in the place of the logits, and beside it


def inputs(classes: int, dtype: torch.dtype = torch.float64, rows: int = N) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features with NaN at ignored rows, head, bias, labels; a third of the rows is so confident that HEM has no loss."""
    g = torch.Generator().manual_seed(classes)
    h, w, b = (torch.randn(*shape, generator=g).double() for shape in ((rows, D), (classes, D), (classes,)))
    y = torch.randint(0, classes, (rows,), generator=g)
    # One more feature, of class 0 alone: its rows win by about ten. By more, the softmax losses of plain PyTorch would be zero.
    h, w = torch.cat([h, torch.zeros(rows, 1)], 1), torch.cat([w, torch.zeros(classes, 1)], 1)
    w[0], b[0] = 0, 0
    w[0, -1] = 22.0
    h[::3, -1], y[::3] = 1.0, 0
    if rows > 5:
        y[[2, 5, rows - 1]] = IGNORE
        h[[2, 5, rows - 1]] = NAN
    return h.to(dtype), w.to(dtype), b.to(dtype), y


def plain(spec, h: Tensor, w: Tensor, b: Tensor | None, y: Tensor, **arguments: Any) -> Tensor:
    """The formula: a matrix product and the row loss's reference, ignored rows out of reach."""
    arguments.pop("workspace", None)
    live = (y != arguments.get("ignore_index", IGNORE)) if not y.is_floating_point() else torch.ones(len(h), dtype=torch.bool)
    x = torch.where(live[:, None], h, 0) @ w.t()
    return getattr(pylosses, spec.function)(x if b is None else x + b, y, backend="reference", **arguments)


def fused(spec, h: Tensor, w: Tensor, b: Tensor | None, y: Tensor, **arguments: Any) -> Tensor:
    return pylosses.linear_loss(h, w, y, loss=spec.name, linear_bias=b, **{"workspace": TINY, "backend": "cpu", **arguments})


def gradients(loss: Tensor, leaves: list[Tensor], seed: int = 5) -> tuple[Tensor, ...]:
    up = torch.randn(loss.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(loss.dtype)
    return torch.autograd.grad(loss, leaves, up, retain_graph=True)


@pytest.fixture(params=[TINY, WORKSPACE], ids=["blocks", "stored"])
def workspace(request) -> int:
    """Blocks of rows, and logits that fit."""
    return request.param


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def compare(spec, tensors: tuple[Tensor, ...], y: Tensor, arguments: dict[str, Any]) -> None:
    """Loss and all gradients, random upstream gradient, float64."""
    mine, theirs = leaves(*tensors), leaves(*tensors)
    got, wanted = fused(spec, *mine, y, **arguments), plain(spec, *theirs, y, **arguments)
    close("loss", got, wanted, rtol=1e-12)
    for name, a, e in zip(
        ("input", "linear_weight", "linear_bias"), gradients(got, mine), gradients(wanted, theirs), strict=True
    ):
        close(name, a, e, rtol=1e-11)
    assert float(wanted.detach().abs().sum()) > 0


@pytest.mark.parametrize("classes", [MANY, FEW])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("spec", "sample"), SAMPLES)
def test_every_loss_and_reduction(spec, sample, reduction, classes, workspace):
    *tensors, y = inputs(classes)
    compare(
        spec,
        tuple(tensors),
        y,
        {**arguments_of(spec, sample, classes, torch.float64), "reduction": reduction, "workspace": workspace},
    )


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize(
    ("reduction", "normalizer"),
    [(r, None) for r in REDUCTIONS] + [(r, n) for r in ("mean", "above_zero") for n in (17.0, torch.tensor(9.0))],
)
def test_weights_and_divisors(reduction, z_loss, normalizer, workspace):
    """Class and sample weights with the z-term, whose divisor is another; rows that do not count above zero among them."""
    *tensors, y = inputs(MANY)
    g = torch.Generator().manual_seed(3)
    s = torch.rand(N, generator=g).double() * (torch.rand(N, generator=g) > 0.3)
    arguments = {
        "weight": torch.rand(MANY, generator=g).double() + 0.1,
        "sample_weight": s,
        "normalizer": normalizer,
        "workspace": workspace,
    }
    cross_entropy = next(spec for spec in SPECS if spec.name == "cross_entropy")
    compare(cross_entropy, tuple(tensors), y, {**arguments, "z_loss": z_loss, "reduction": reduction})
    if z_loss == 0:
        hem = next(spec for spec in SPECS if spec.name == "hem")
        compare(hem, tuple(tensors), y, {**arguments, "reduction": reduction})


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("which", ["weight", "sample_weight", "sample_weight that sums to 0"])
@pytest.mark.parametrize("reduction", ["mean", "above_zero"])
def test_weights_below_zero(reduction, which, label_smoothing, z_loss, workspace):
    """The quotient; a term whose divisor is exactly 0 counts nothing, beside one that has a divisor."""
    g = torch.Generator().manual_seed(2)
    h, w = (torch.randn(n, D, generator=g, dtype=torch.float64) for n in (40, 9))
    y = torch.arange(40) % 9
    y[3] = IGNORE
    weight = torch.arange(1.0, 10.0, dtype=torch.float64)
    sample_weight = torch.ones(40, dtype=torch.float64)
    if which == "weight":
        weight -= 7
    else:
        sample_weight[0] = -38.0 if "0" in which else -60.0
    options = {"weight": weight, "sample_weight": sample_weight, "label_smoothing": label_smoothing, "z_loss": z_loss}
    found = []
    for backend in ("cpu", "reference"):
        some = leaves(h, w)
        loss = pylosses.linear_cross_entropy(*some, y, backend=backend, reduction=reduction, workspace=workspace, **options)
        found.append((loss.detach(), *torch.autograd.grad(loss, some)))
    for what, got, wanted in zip(("loss", "gradient of h", "gradient of w"), *found, strict=True):
        close(what, got, wanted, rtol=1e-11)


@pytest.mark.parametrize("upstream", [INF, NAN])
def test_upstream_that_is_not_finite_stays_out_of_ignored_rows(upstream, workspace):
    h, w, y = torch.randn(4, D, requires_grad=True), torch.randn(FEW, D), torch.tensor([0, IGNORE, 2, IGNORE])
    loss = pylosses.linear_cross_entropy(h, w, y, workspace=workspace)
    (grad,) = torch.autograd.grad(loss, h, torch.tensor(upstream))
    assert bool((grad[1::2] == 0).all()) and not bool(grad[::2].isfinite().any())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_probabilities(reduction, workspace):
    h, w, b, _ = inputs(MANY)
    t = torch.randn(N, MANY, generator=torch.Generator().manual_seed(4)).double().softmax(dim=1)
    spec = next(spec for spec in SPECS if spec.name == "cross_entropy")
    arguments = {
        "reduction": reduction,
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "weight": torch.rand(MANY).double(),
        "workspace": workspace,
    }
    compare(spec, (h.nan_to_num(0.5), w, b), t, arguments)
    got = fused(spec, h.nan_to_num(0.5).view(2, 20, -1), w, b, t.view(2, 20, MANY), **arguments)
    close("(2, 20, D)", got.reshape(-1), fused(spec, h.nan_to_num(0.5), w, b, t, **arguments).reshape(-1), rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("loss", ["cross_entropy", "hem", "logit_norm"])
def test_precision(loss, dtype, workspace):
    """The project's rule of agreement for all gradients: truth in float64, and plain PyTorch that stores float32 logits."""
    spec = next(spec for spec in SPECS if spec.name == loss)
    h, w, b, y = inputs(MANY, dtype)
    y = torch.where(near_the_threshold(h, w, b, y), IGNORE, y) if loss == "hem" else y
    found = []
    mine = functools.partial(fused, workspace=workspace)
    for run, kind in ((mine, dtype), (plain_stored, dtype), (plain, torch.float64)):
        x = leaves(*(t.to(kind) for t in (h, w, b)))
        result = run(spec, *x, y)
        found.append((result, *gradients(result, x)))
    for name, got, theirs, truth in zip(("loss", "input", "linear_weight", "linear_bias"), *found, strict=True):
        agree(name, got, theirs, truth, row=None if name == "loss" else truth.dim() - 1)


def plain_stored(spec, h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As `plain`, with products of half precision tensors in float32."""
    kind = torch.float64 if h.dtype == torch.float64 else torch.float32
    return plain(spec, h.to(kind), w.to(kind), b.to(kind), y)


def near_the_threshold(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Rows of HEM where rounding may decide what is kept."""
    x = h.double().nan_to_num(0.0) @ w.double().t() + b.double()
    errors = (x - x.gather(1, y.clamp(min=0)[:, None]) + 1).clamp(min=0).scatter(1, y.clamp(min=0)[:, None], 0)
    mean = errors.mean(dim=1, keepdim=True)
    return ((errors - mean).abs() < 1e-4 * mean).any(dim=1)


@pytest.mark.parametrize("wanted", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_only_what_needs_a_gradient(reduction, wanted, monkeypatch):
    """A frozen head, detached features, a frozen bias: no gradient, and no product done for one."""
    h, w, b, y = inputs(MANY)
    spec = next(spec for spec in SPECS if spec.name == "focal")
    every = leaves(h, w, b)
    expected = gradients(fused(spec, *every, y, reduction=reduction), every)
    made = []
    mine = [t.detach().clone().requires_grad_(bool(need)) for t, need in zip((h, w, b), wanted, strict=True)]
    add = linear_fused.Gradients.add
    monkeypatch.setattr(
        linear_fused.Gradients, "add", lambda self, *rest: made.append((self.h, self.w, self.b)) or add(self, *rest)
    )
    loss = fused(spec, *mine, y, reduction=reduction)
    assert loss.requires_grad == any(wanted)
    if any(wanted):
        needing = [t for t in mine if t.requires_grad]
        got = gradients(loss, needing)
        for a, e in zip(got, [e for e, need in zip(expected, wanted, strict=True) if need], strict=True):
            assert torch.equal(a, e)
    for parts in made:
        assert [part is not None for part in parts] == [bool(need) for need in wanted]
    assert bool(made) == any(wanted)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", ["cross_entropy", "hem"])
def test_second_backward(loss, reduction, workspace):
    """retain_graph: another upstream gradient, and the first gradients are left alone."""
    h, w, b, y = inputs(MANY, torch.float32)
    spec = next(spec for spec in SPECS if spec.name == loss)
    x = leaves(h, w, b)
    result = fused(spec, *x, y, reduction=reduction, workspace=workspace)
    first = gradients(result, x, seed=1)
    kept = [t.clone() for t in first]
    second, again = gradients(result, x, seed=2), gradients(result, x, seed=1)
    same = functools.partial(close, "gradient", rtol=0 if workspace == TINY else 1e-6)  # of stored logits up to rounding
    for a, b_, c, d in zip(first, kept, again, second, strict=True):
        assert torch.equal(a, b_) and not torch.equal(a, d)
        same(a, c)
    fresh = leaves(h, w, b)
    result = fused(spec, *fresh, y, reduction=reduction, workspace=workspace)
    for a, e in zip(second, gradients(result, fresh, seed=2), strict=True):
        same(a, e)


def test_changed_in_place(workspace):
    """Backward of a second kind would see other labels or another head: torch's own error."""
    h, w, b, y = inputs(FEW)
    x = leaves(h, w, b)
    loss = fused(SPECS[0], *x, y, reduction="none", workspace=workspace)
    y[0] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", ["cross_entropy", "hem"])
@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_counts(rows, loss, reduction, workspace):
    """An empty batch, and one of ignored rows that hold NaN: 0, with zero gradients."""
    h, w = torch.full((rows, D), NAN, requires_grad=True), torch.randn(FEW, D, requires_grad=True)
    b = torch.zeros(FEW, requires_grad=True)
    spec = next(spec for spec in SPECS if spec.name == loss)
    got = fused(spec, h, w, b, torch.full((rows,), IGNORE), reduction=reduction, workspace=workspace)
    assert got.shape == ((rows,) if reduction == "none" else ()) and not got.any()
    for leaf, grad in zip((h, w, b), gradients(got, [h, w, b]), strict=True):
        assert grad.shape == leaf.shape and not grad.any()


@pytest.mark.parametrize("path", ["cpu", "reference", "func", "compile"])
def test_features_of_ignored_rows_count_nowhere(path):
    """Be they NaN: neither in the gradient of the weight nor in their own."""
    h, w, y = torch.randn(6, D), torch.randn(FEW, D), torch.tensor([0, IGNORE, 2, 1, IGNORE, 0])
    few, some = h[y != IGNORE], y[y != IGNORE]
    h[y == IGNORE] = NAN

    def loss(h, w, y):
        return pylosses.linear_cross_entropy(h, w, y, backend=path if path in ("cpu", "reference") else None)

    if path == "func":
        grads = torch.func.grad(loss, (0, 1))(h, w, y)
    else:
        mine = leaves(h, w)
        run = torch.compile(loss, backend="aot_eager") if path == "compile" else loss
        grads = torch.autograd.grad(run(*mine, y), mine)
    theirs = leaves(few, w)
    wanted = torch.autograd.grad(loss(*theirs, some), theirs)
    close("weight", grads[1], wanted[1], rtol=1e-5)
    close("features", grads[0][y != IGNORE], wanted[0], rtol=1e-5)
    assert not grads[0][y == IGNORE].any()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 1, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_leading_dimensions(shape, reduction, workspace):
    g = torch.Generator().manual_seed(1)
    h, w = torch.randn(*shape, D, generator=g).double(), torch.randn(FEW, D, generator=g).double()
    y, s = torch.randint(0, FEW, shape, generator=g), torch.rand(shape, generator=g).double()
    mine, flat = leaves(h, w), leaves(h.reshape(-1, D), w)
    arguments = {"loss": "hem", "reduction": reduction, "workspace": workspace, "backend": "cpu"}
    got = pylosses.linear_loss(*mine, y, sample_weight=s, **arguments)
    wanted = pylosses.linear_loss(*flat, y.reshape(-1), sample_weight=s.reshape(-1), **arguments)
    assert got.shape == (shape if reduction == "none" else ())
    assert torch.equal(got.reshape(-1), wanted.reshape(-1))
    for a, e in zip(gradients(got, mine), gradients(wanted, flat), strict=True):
        assert torch.equal(a.reshape(e.shape), e)


def test_strided_inputs(workspace):
    """Features between others, as in a causal language model's shift, and a transposed head."""
    h, w, y = torch.randn(3, 9, D).double(), torch.randn(D, FEW).double(), torch.randint(0, FEW, (3, 9))
    x, head = leaves(h, w)
    y[0, 4] = IGNORE
    got = pylosses.linear_cross_entropy(x[:, :-1], head.t(), y[:, 1:], workspace=workspace)
    wanted = torch.nn.functional.cross_entropy((x[:, :-1] @ head).reshape(-1, FEW), y[:, 1:].reshape(-1))
    close("loss", got, wanted, rtol=1e-13)
    for a, e in zip(torch.autograd.grad(got, (x, head)), torch.autograd.grad(wanted, (x, head)), strict=True):
        close("gradient", a, e, rtol=1e-12)


@pytest.mark.parametrize("kinds", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float64")], ids=str)
def test_mixed_dtypes(kinds, workspace):
    """Each gradient has the dtype of its tensor; the arithmetic that of the widest, at least float32."""
    h, w, _, y = inputs(MANY)
    x, head = h.to(getattr(torch, kinds[0])).requires_grad_(), w.to(getattr(torch, kinds[1])).requires_grad_()
    widest = torch.float64 if "float64" in kinds else torch.float32
    wide = leaves(x.double(), head.double())
    found = []
    for loss, of in (
        (pylosses.linear_cross_entropy(x, head, y, workspace=workspace), (x, head)),
        (plain(SPECS[0], x.to(widest), head.to(widest), None, y), (x, head)),
        (plain(SPECS[0], *wide, None, y), wide),
    ):
        found.append((loss, *torch.autograd.grad(loss, of)))
    assert [t.dtype for t in found[0]] == [widest, x.dtype, head.dtype]
    for name, got, theirs, truth in zip(("loss", "input", "linear_weight"), *found, strict=True):
        agree(name, got, theirs, truth, row=None if name == "loss" else 1)


def test_small_upstream_in_half_precision(workspace):
    """Gradients below float16's range for an upstream gradient of 1 are there when a loss is scaled."""
    h, w = torch.randn(32, D).half().requires_grad_(), torch.randn(MANY, D).half().requires_grad_()
    y = torch.randint(0, MANY, (32,))
    loss = pylosses.linear_cross_entropy(h, w, y, normalizer=1e9, workspace=workspace)
    (loss * 1e9).backward()
    wide, head = leaves(h.detach().double(), w.detach().double())
    wanted = torch.autograd.grad(torch.nn.functional.cross_entropy(wide @ head.t(), y, reduction="sum"), (wide, head))
    close("input", h.grad, wanted[0], rtol=1e-3)
    close("linear_weight", w.grad, wanted[1], rtol=1e-3)


def test_autocast():
    """Autocast changes nothing: products stay in float32, in forward and in a backward under it."""
    h, w, b, y = inputs(FEW, torch.float32)
    expected = leaves(h, w, b)
    loss = fused(SPECS[0], *expected, y, reduction="none")
    loss.sum().backward()
    x = leaves(h, w, b)
    with torch.autocast("cpu", torch.bfloat16):
        under = fused(SPECS[0], *x, y, reduction="none")
        under.sum().backward()
    assert torch.equal(under, loss)
    assert all(torch.equal(a.grad, e.grad) for a, e in zip(x, expected, strict=True))


@pytest.mark.parametrize("loss", ["cross_entropy", "hem"])
def test_the_same_bits(loss, threads, workspace):
    """Twice the same, and the caller's tensors are not touched."""
    threads(2)
    h, w, b, y = inputs(MANY, torch.float32, rows=200)
    spec = next(spec for spec in SPECS if spec.name == loss)
    copies = [t.clone() for t in (h, w, b, y)]
    runs = []
    for _ in range(3):
        x = leaves(h, w, b)
        result = fused(spec, *x, y, workspace=max(workspace, 2**18))
        runs.append([result, *gradients(result, x)])
    for other in runs[1:]:
        assert all(torch.equal(a, e) for a, e in zip(other, runs[0], strict=True))
    for t, copy in zip((h, w, b, y), copies, strict=True):
        torch.testing.assert_close(t, copy, rtol=0, atol=0, equal_nan=True)


def test_nan_shows(workspace):
    """A row with NaN features makes the loss NaN; with "none" that row alone, and its own gradient."""
    h, w, b, y = inputs(MANY)
    y[y == IGNORE] = 3
    for spec in SPECS:
        arguments = arguments_of(spec, 0, MANY, torch.float64)
        x = leaves(h, w, b)
        for reduction in ("mean", "sum", "above_zero"):
            assert fused(spec, *x, y, **{**arguments, "reduction": reduction, "workspace": workspace}).isnan(), spec.name
        rows = fused(spec, *x, y, **{**arguments, "reduction": "none", "workspace": workspace})
        assert rows.isnan().tolist() == h.isnan().any(dim=1).tolist()
        (grad,) = torch.autograd.grad(rows.sum(), x[0])
        assert grad.isnan().any(dim=1).tolist() == h.isnan().any(dim=1).tolist()


# Who runs, and what it refuses ------------------------------------------------------------------------------------------------


def test_backends():
    """ "cpu" and the default never make the logits; "reference" does."""
    h, w, b, y = inputs(FEW)
    made = []
    original = linear_fused.Product.made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_fused.Product, "made", lambda *given: made.append(1) or original(*given))
        for backend, count in ((None, 0), ("cpu", 0), ("reference", 1)):
            made.clear()
            pylosses.linear_cross_entropy(h, w, y, linear_bias=b, backend=backend, workspace=TINY)
            assert len(made) == count, backend


def test_what_needs_the_reference():
    """A learned class bias is not the kernels' business: the reference computes it, and "cpu" says why it cannot."""
    h, w, _, y = inputs(FEW)
    bias = torch.zeros(FEW, dtype=torch.float64, requires_grad=True)
    pylosses.linear_cross_entropy(h, w, y, bias=bias).backward()
    assert bias.grad.abs().sum() > 0
    with pytest.raises(pylosses.BackendError, match="bias requires a gradient"):
        pylosses.linear_cross_entropy(h, w, y, bias=bias, backend="cpu")


def test_double_backward(workspace):
    h, w, b, y = inputs(FEW)
    x = leaves(h, w, b)
    for reduction in REDUCTIONS:
        loss = fused(SPECS[0], *x, y, reduction=reduction, workspace=workspace)
        grads = torch.autograd.grad(loss.sum(), x, create_graph=True)
        fresh = leaves(h, w, b)
        for a, e in zip(
            grads,
            torch.autograd.grad(fused(SPECS[0], *fresh, y, reduction=reduction, workspace=workspace).sum(), fresh),
            strict=True,
        ):
            assert torch.equal(a.detach(), e)
        with pytest.raises(RuntimeError, match='double backward.*backend="reference"'):
            grads[1].square().sum().backward()
    x[0] = x[0].detach().nan_to_num(0.0)
    loss = fused(SPECS[0], *x, y, backend="reference")
    (grad,) = torch.autograd.grad(loss, x[1], create_graph=True)
    grad.square().sum().backward()
    assert x[1].grad.abs().sum() > 0


def test_torch_func():
    """torch.func takes the path that stores the logits."""
    h, w, _, y = inputs(FEW)
    h = h.nan_to_num(0.0)
    got = torch.func.grad(lambda w: pylosses.linear_cross_entropy(h, w, y))(w)
    (wanted,) = torch.autograd.grad(pylosses.linear_cross_entropy(h, (x := leaves(w)[0]), y), x)
    close("gradient", got, wanted, rtol=1e-12)


def test_compile():
    """So does torch.compile, in one graph."""
    h, w, b, y = inputs(FEW)
    x, z = leaves(h.nan_to_num(0.0), w, b), leaves(h.nan_to_num(0.0), w, b)
    compiled = torch.compile(pylosses.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    got, wanted = compiled(x[0], x[1], y, linear_bias=x[2]), pylosses.linear_cross_entropy(z[0], z[1], y, linear_bias=z[2])
    close("loss", got, wanted, rtol=1e-13)
    for a, e in zip(torch.autograd.grad(got, x), torch.autograd.grad(wanted, z), strict=True):
        close("gradient", a, e, rtol=1e-12)


def test_no_features():
    """D = 0: the bias alone makes the logits."""
    h, w, b = (
        torch.empty(4, 0, requires_grad=True),
        torch.empty(FEW, 0, requires_grad=True),
        torch.randn(FEW, requires_grad=True),
    )
    y = torch.arange(4)
    got = pylosses.linear_cross_entropy(h, w, y, linear_bias=b)
    close("loss", got, torch.nn.functional.cross_entropy(b.expand(4, FEW), y), rtol=1e-6)
    assert [g.shape for g in torch.autograd.grad(got, (h, w, b))] == [(4, 0), (FEW, 0), (FEW,)]


def test_checkpoint():
    h, w, _, y = inputs(FEW)
    x, z = leaves(w), leaves(w)
    torch.utils.checkpoint.checkpoint(lambda w: pylosses.linear_hem_loss(h, w, y), *x, use_reentrant=False).backward()
    pylosses.linear_hem_loss(h, *z, y).backward()
    assert torch.equal(x[0].grad, z[0].grad)


def test_bad_label():
    y = torch.zeros(2, 3, dtype=torch.uint8)
    y[1, 2] = FEW
    with pytest.raises(IndexError, match=rf"target\[1, 2\] is {FEW}, outside \[0, {FEW}\)"):
        pylosses.linear_cross_entropy(torch.randn(2, 3, D), torch.randn(FEW, D), y)


@pytest.mark.parametrize("workspace", [-1, 1.5, None])
def test_bad_workspace(workspace):
    with pytest.raises((TypeError, ValueError), match="workspace"):
        pylosses.linear_cross_entropy(
            torch.randn(3, D), torch.randn(FEW, D), torch.zeros(3, dtype=torch.long), workspace=workspace
        )


# Blocks -----------------------------------------------------------------------------------------------------------------------


KERNELS = {
    "cross_entropy": ("cross_entropy", (0.1, 1.0, 0.0, 0.1)),
    "capped": ("cross_entropy", (0.1, 0.7, 3.0, 0.1)),
    "focal": ("focal", (2.0,)),
    "target": ("target", (2.0, 2.0, 0.7, 1.0, 1.0, 1.0, 1.0, -4.0)),
    **{f"hem{power}": ("hem", (1.0, power, 1e-4, 0.0, 1.0, 1.0)) for power in (1.0, 0.5, 2.0, 1.5)},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_kernels_may_write_over_the_logits(kernel, dtype):
    """The driver lets the row kernels write the gradient where the logits are: the same bits as beside them."""
    name, scalars = KERNELS[kernel]
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(33, 4099, generator=g).to(dtype), torch.randint(0, 4099, (33,), generator=g)
    weight = torch.rand(4099, generator=g).to(dtype)
    call = Call("cpu", name, y, None, weight, None, None, None, scalars, IGNORE, "none", None)
    _, saved = cpu.forward(call, x, True)
    up = torch.randn(33, generator=g).to(dtype)
    beside, over = cpu.backward(call, x, saved, up), x.clone()
    assert torch.equal(cpu.backward(call, over, saved, up, out=over), beside) and beside.abs().sum() > 0
    call = call._replace(reduction="mean")
    if cpu.is_known_early(call, cpu.sizes(call, dtype)):
        over = x.clone()
        assert torch.equal(cpu.forward_ahead(call, over, out=over)[2], cpu.forward_ahead(call, x)[2])


def test_block_sizes():
    """As many rows as fit, up to what the products gain from, in equal blocks; never fewer than sixteen."""
    rows = linear_fused._block_rows
    for n in (1, 15, 16, 17, 2048, 8192, 100003):
        for classes in (2, 1000, 32000, 128256, 10**7):
            size = rows(n, classes, 1024, 4, 1, False, WORKSPACE)
            assert 1 <= size <= n
            assert size <= 16 or size * classes * 4 <= WORKSPACE
            assert size * -(-n // size) - n < size
    assert rows(2048, 32000, 1024, 4, 1, False, WORKSPACE) > 300
    assert rows(2048, 32000, 1024, 4, 1, False, 2**40) == 512
    assert rows(0, 10, 10, 4, 1, False, 1) == 1


def test_what_is_stored():
    """Logits with their gradient, and what is converted for them, up to the workspace; not where rows may save products."""
    h, w, half = torch.empty(100, 64), torch.empty(50, 64), torch.empty(50, 64, dtype=torch.bfloat16)
    assert linear_fused.fits(h, w, None, 2 * 4 * 5000, sparing=False)
    assert not linear_fused.fits(h, w, None, 2 * 4 * 5000 - 1, sparing=False)
    assert not linear_fused.fits(h, half, None, 2 * 4 * (5000 + 3200) - 1, sparing=False)
    assert linear_fused.fits(h, half, None, 2 * 4 * (5000 + 3200), sparing=True)
    assert not linear_fused.fits(torch.empty(10000, 64), w, None, WORKSPACE, sparing=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert not linear_fused.fits(h, w, None, WORKSPACE, sparing=False)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_hem_loss"])
def test_three_products(function, reduction):
    """Of stored logits: one product forward and two back; none of it for a head that is frozen."""
    h, w, y = big(64, 100)
    assert products(lambda: step(function, None, reduction, h, w, y)) == 3
    assert products(lambda: step(function, None, reduction, h, w, y, workspace=TINY)) > 3
    frozen = w.detach()
    loss = getattr(pylosses, function)(h, frozen, y, reduction="sum")
    assert products(lambda: torch.autograd.grad(loss, h)) == 1


def products(action) -> int:
    """Matrix products during `action`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        action()
    return sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm", "aten::addmm_"))


MEBIBYTE = 2**20


def big(rows: int, classes: int, features: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    h, w = torch.randn(rows, features, generator=g), torch.randn(classes, features, generator=g)
    return h.requires_grad_(), w.requires_grad_(), torch.randint(0, classes, (rows,), generator=g)


def step(function: str, backend: str | None, reduction: str, h: Tensor, w: Tensor, y: Tensor, **more: Any) -> None:
    loss = getattr(pylosses, function)(h, w, y, backend=backend, reduction=reduction, **more)
    torch.autograd.grad(loss, (h, w), torch.ones_like(loss))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_hem_loss"])
def test_no_allocation_is_logits_sized(function, reduction):
    """torch's allocator: nothing above the workspace in a step, and the measure sees the reference's logits."""
    h, w, y = big(512, 8000)
    logits, workspace = 512 * 8000 * 4, MEBIBYTE
    sizes, _ = allocations(lambda: step(function, None, reduction, h, w, y, workspace=workspace))
    assert max(sizes) <= workspace < logits / 8, f"{max(sizes)} bytes at once"
    sizes, _ = allocations(lambda: step(function, "reference", reduction, h, w, y))
    assert max(sizes) >= logits


@pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_preferred_backend_that_would_make_all_logits_is_passed_over(spec, monkeypatch):
    """As on a CUDA device, where "cuda" comes first and takes logits alone; "cpu" stands for Triton."""
    monkeypatch.setitem(_PREFERRED, "cpu", ("cuda", "cpu"))
    h, w, y = big(256, 4000)
    arguments, workspace = arguments_of(spec, 0, 4000, torch.float32), MEBIBYTE // 4
    more = {"loss": spec.name, "workspace": workspace, **arguments}
    with emulator.switched() as cuda:
        getattr(pylosses, spec.function)(torch.zeros(2, 4000), y[:2], **arguments)
        assert cuda.launches(), "logits that are there go to the first"
        cuda.reset()
        for reduction in ("mean", "none"):
            sizes, _ = allocations(lambda r=reduction: step("linear_loss", None, r, h, w, y, **more))
            assert max(sizes) <= workspace < 256 * 4000 * 4 / 8, f"{max(sizes)} bytes at once"
        assert not cuda.launches()


@contextlib.contextmanager
def memory_bound(most: int):
    reset_peak()
    before = resident()
    yield
    taken = peak() - before
    assert taken < most, f"{taken / MEBIBYTE:.0f} MiB were taken, {most / MEBIBYTE:.0f} are allowed"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process cannot be measured here")
@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_hem_loss"])
@pytest.mark.parametrize("shape", [(2048, 32000), (8192, 16000), (512, 128256)], ids=str)
def test_peak_of_the_process(function, shape):
    """Whatever the shape, a step takes the workspace, the gradients (16 features: a few MiB) and the products' own memory."""
    h, w, y = big(*shape)
    step(function, None, "mean", *big(64, 2000))  # whatever is made once is made here
    with memory_bound(96 * MEBIBYTE):
        step(function, None, "mean", h, w, y)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process cannot be measured here")
def test_peak_is_seen():
    """The measure works: stored logits break the bound."""
    h, w, y = big(2048, 32000)
    with pytest.raises(AssertionError, match="MiB were taken"), memory_bound(96 * MEBIBYTE):
        step("linear_cross_entropy", "reference", "mean", h, w, y)


# Causal language models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8], ids=name_of)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_hem_loss", "linear_loss"])
def test_shift(function, reduction, kind, workspace):
    """Features at a position meet the label at the next: the same as two slices, in the shape of the labels."""
    g = torch.Generator().manual_seed(2)
    h, w = torch.randn(3, 9, D, generator=g).double(), torch.randn(FEW, D, generator=g).double()
    y, s = torch.randint(0, FEW, (3, 9), generator=g).to(kind), torch.rand(3, 9, generator=g).double()
    ignore = 4 if kind == torch.uint8 else IGNORE
    y[1, 5] = ignore
    x, z = leaves(h, w), leaves(h, w)
    arguments = {"reduction": reduction, "workspace": workspace} | ({} if ignore == IGNORE else {"ignore_index": ignore})
    loss = getattr(pylosses, function)
    got = loss(*x, y, shift=True, sample_weight=s, **arguments)
    wanted = loss(z[0][:, :-1], z[1], y[:, 1:], sample_weight=s[:, 1:], **arguments)
    if reduction == "none":
        assert got.shape == y.shape and not got[:, -1].any()
        got = got[:, :-1]
    close("loss", got, wanted, rtol=1e-13)
    for a, e in zip(gradients(got, x), gradients(wanted, z), strict=True):
        close("gradient", a, e, rtol=1e-12)


def test_shift_of_labels_that_cannot_say_ignored():
    """uint8 labels hold no -100."""
    h, w, y = torch.randn(2, 5, D), torch.randn(FEW, D), torch.randint(0, FEW, (2, 5), dtype=torch.uint8)
    wanted = pylosses.linear_cross_entropy(h[:, :-1], w, y[:, 1:])
    close("loss", pylosses.linear_cross_entropy(h, w, y, shift=True), wanted, rtol=1e-6)


@pytest.mark.parametrize("length", [1, 2])
def test_shift_of_short_sequences(length):
    """One position predicts nothing: 0, with zero gradients."""
    h, w = torch.randn(4, length, D, requires_grad=True), torch.randn(FEW, D, requires_grad=True)
    loss = pylosses.linear_cross_entropy(h, w, torch.zeros(4, length, dtype=torch.long), shift=True)
    grads = torch.autograd.grad(loss, (h, w))
    assert (float(loss.detach()) > 0) == (length > 1) and all(bool(g.any()) == (length > 1) for g in grads)


def test_shift_copies_no_features():
    """torch's allocator: besides the gradients, nothing has the size of the features."""
    h, w = torch.randn(8, 512, 256, requires_grad=True), torch.randn(FEW, 256, requires_grad=True)
    y = torch.randint(0, FEW, (8, 512))
    sizes, _ = allocations(lambda: step("linear_cross_entropy", None, "mean", h, w, y, shift=True, workspace=2**19))
    assert sum(size >= h.nbytes for size in sizes) == 1, "the gradient of the features is the only one"


def test_shift_refuses():
    h, w = torch.randn(4, D), torch.randn(FEW, D)
    with pytest.raises(ValueError, match="shift needs class indices"):
        pylosses.linear_cross_entropy(h, w, torch.rand(4, FEW), shift=True)
    with pytest.raises(ValueError, match=r"shift needs a sequence.*got \(\)"):
        pylosses.linear_cross_entropy(h[0], w, torch.tensor(1), shift=True)
