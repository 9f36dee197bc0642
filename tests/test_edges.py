"""What happens at the edges? Ignored rows, nothing to count, NaN, infinities, one class, ties, kinks: rule by rule."""

import mpmath
import pytest
import torch
from cases import (
    IGNORE,
    INF,
    LABELLED,
    NAN,
    UNLABELLED,
    Case,
    Result,
    arguments_of,
    backends_of,
    case,
    grid,
    name_of,
    row_by_row,
    run,
)
from tolerance import close

import pylosses
from pylosses.spec import LOSSES

ALL = grid(LABELLED + UNLABELLED)
ROWS = grid(LABELLED + UNLABELLED, rows=True)
LABELLED_ROWS = grid(LABELLED, rows=True)
SOFTMAX = grid([s for s in LABELLED if s.family == "softmax"])
MARGIN = grid([s for s in LABELLED if s.family == "margin"])
HEM = backends_of(LOSSES["hem"])


def parts(c: Case, keep: torch.Tensor) -> Case:
    """The case with some of its rows."""
    return c._replace(inputs=tuple(t[keep] for t in c.inputs))


def reductions(spec) -> tuple[str, ...]:
    return ("none", "sum", "mean", "above_zero") if spec.family != "region" else ("sum", "mean")


def run_for_logits(c: Case, backend: str) -> Result:
    """As `run`, with targets that are class probabilities left as they are."""
    x, *rest = c.inputs
    x = x.detach().requires_grad_()
    loss = getattr(pylosses, c.spec.function)(x, *rest, backend=backend, **c.arguments)
    return Result(loss.detach(), torch.autograd.grad(loss, x))


def zero_and_connected(what: str, loss: torch.Tensor, x: torch.Tensor) -> None:
    """The loss is 0 and its gradient zeros, through the graph."""
    assert loss.requires_grad, f"{what}: not connected to the graph"
    assert bool((loss == 0).all()), f"{what}: {loss}"
    loss.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert bool((x.grad == 0).all()), f"{what}: gradient {x.grad}"


# Rows that do not count ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "sample", "backend"), grid(LABELLED))
def test_ignored_rows_are_never_read(spec, sample, backend):
    """What stands in an ignored row, NaN included, changes no bit of the result; its gradient is exactly 0."""
    clean = case(spec, sample, "ignored")
    ignored = clean.inputs[1] == IGNORE
    clean.inputs[0][ignored] = 0.5
    for reduction in reductions(spec):
        wanted = run(clean.but(reduction=reduction), backend)
        assert wanted.loss.isfinite().all() and wanted.grads[0].isfinite().all()
        for junk in (NAN, INF, -INF, 1e30):
            x = clean.inputs[0].clone()
            x[ignored] = junk
            got = run(clean._replace(inputs=(x, clean.inputs[1])).but(reduction=reduction), backend)
            assert torch.equal(got.loss, wanted.loss), (reduction, junk)
            assert torch.equal(got.grads[0], wanted.grads[0]), (reduction, junk)
            assert bool((got.grads[0][ignored] == 0).all())
            if reduction == "none":
                assert bool((got.loss[ignored] == 0).all())


@pytest.mark.parametrize(("spec", "sample", "backend"), grid(LABELLED))
def test_ignored_rows_do_not_count(spec, sample, backend):
    """The result is that of the other rows alone."""
    c = case(spec, sample, "ignored", torch.float64)
    live = c.inputs[1] != IGNORE
    for reduction in reductions(spec):
        if reduction == "none":
            continue
        got, wanted = run(c.but(reduction=reduction), backend), run(parts(c, live).but(reduction=reduction), backend)
        close(f"{spec.function} {reduction}", got.loss, wanted.loss, rtol=1e-13)
        close(f"{spec.function} {reduction} gradient", got.grads[0][live], wanted.grads[0], rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name_of)
@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
def test_empty_batch(spec, sample, backend, dtype):
    """No rows: loss 0, gradient of the input's shape, in every shape that can be empty."""
    arguments = arguments_of(spec, sample, 8, dtype)
    for shape in ((0, 8), (0, 8, 2, 3), (2, 8, 0, 3), (2, 8, 0)):
        for reduction in reductions(spec):
            x = torch.zeros(shape, dtype=dtype, requires_grad=True)
            y = torch.zeros(shape[:1] + shape[2:], dtype=torch.int64)
            inputs = (x, y) if spec.inputs == "labelled" else (x,)
            loss = getattr(pylosses, spec.function)(*inputs, backend=backend, **(arguments | {"reduction": reduction}))
            assert loss.shape == (y.shape if reduction == "none" else ())
            assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            zero_and_connected(f"{spec.function} {shape} {reduction}", loss, x)


@pytest.mark.parametrize(("spec", "sample", "backend"), grid(LABELLED))
def test_everything_ignored(spec, sample, backend):
    """Loss 0 and gradient 0, where torch gives NaN; with NaN logits too."""
    arguments = arguments_of(spec, sample, 6, torch.float32)
    for x in (torch.randn(4, 6), torch.full((4, 6), NAN), torch.randn(2, 6, 3, 2), torch.randn(6)):
        for reduction in reductions(spec):
            x = x.detach().requires_grad_()
            y = torch.full(x.shape[:1] + x.shape[2:] if x.dim() > 1 else (), 255, dtype=torch.uint8)
            options = arguments | {"reduction": reduction, "ignore_index": 255}
            loss = getattr(pylosses, spec.function)(x, y, backend=backend, **options)
            zero_and_connected(f"{spec.function} {tuple(x.shape)} {reduction}", loss, x)


@pytest.mark.parametrize(("spec", "sample", "backend"), LABELLED_ROWS)
def test_no_weight_left(spec, sample, backend):
    """Weights that are all 0 leave nothing to divide by: 0, not NaN."""
    for zeros in ({"weight": torch.zeros(37)}, {"sample_weight": torch.zeros(13)}):
        c = case(spec, sample, "plain")
        if "weight" in zeros and (c.arguments.get("z_loss") or spec.name == "cross_entropy_adr"):
            continue  # the z-term and ADR are averaged without class weights
        for reduction in ("mean", "above_zero"):
            got = run(c.but(reduction=reduction, **zeros), backend)
            assert float(got.loss) == 0 and bool((got.grads[0] == 0).all()), (reduction, list(zeros))


@pytest.mark.parametrize("value", [0.0, -1.0, -2.5, INF, -INF, NAN])
@pytest.mark.parametrize("function", ["cross_entropy", "hem_loss"])
@pytest.mark.parametrize("backend", HEM)
def test_normalizer_of_any_value(backend, function, value):
    """A tensor divides as it is, and NaN shows; 0 gives 0. It is never taken for "no normalizer"."""
    x, y = torch.randn(4, 5, requires_grad=True), torch.arange(4)
    loss = getattr(pylosses, function)(x, y, reduction="mean", normalizer=torch.tensor(value), backend=backend)
    if value == 0:
        return zero_and_connected("normalizer 0", loss, x)
    (grad,) = torch.autograd.grad(loss, x)
    total = getattr(pylosses, function)(x, y, reduction="sum", backend=backend)
    (whole,) = torch.autograd.grad(total, x)
    close("loss", loss, total / value, rtol=1e-6)
    if value == value:
        close("gradient", grad, whole / value, rtol=1e-6)
    assert bool(grad.isnan().any()) == (value != value)


@pytest.mark.parametrize("shape", [(13,), (1, 13, 1)], ids=["rows", "pixels"])
@pytest.mark.parametrize("sum_is", ["below zero", "zero"])
@pytest.mark.parametrize("which", ["weight", "sample_weight"])
@pytest.mark.parametrize(("spec", "sample", "backend"), ROWS)
def test_weights_that_sum_to_nothing_or_less(spec, sample, backend, which, sum_is, shape):
    """Some weights are negative: the quotient, as torch has it, and 0 where the divisor is exactly 0."""
    c = case(spec, sample, "plain", torch.float64)
    if which == "weight" and spec.inputs == "unlabelled":
        pytest.skip("no labels, no class weights")
    y = c.inputs[1] if spec.inputs == "labelled" else torch.zeros(13, dtype=torch.int64)
    live = y != IGNORE
    if which == "sample_weight":
        s, w = torch.ones(13, dtype=torch.float64), None
        first = int(live.nonzero()[0])
        s[first] = 1.0 - float(live.sum()) if sum_is == "zero" else -50.0
        c = c.but(sample_weight=s.reshape(shape))
    else:
        s, w = torch.ones(13, dtype=torch.float64), torch.zeros(37, dtype=torch.float64)
        a, b = y[live].unique()[:2]
        w[a], w[b] = float((y == b).sum()), -float((y == a).sum())
        if sum_is != "zero":
            w = w.abs() - 5
        c = c.but(weight=w)
    c = c.shaped(*shape)
    for reduction in ("mean", "above_zero"):
        got = run(c.but(reduction=reduction), backend)
        if c.arguments.get("z_loss") or spec.name == "cross_entropy_adr" or c.arguments.get("max_entropy") is not None:
            wanted = run(c.but(reduction=reduction))  # two divisors, or one that depends on the rows
            close("loss", got.loss, wanted.loss, rtol=1e-9)
            close("gradient", got.grads[0], wanted.grads[0], rtol=1e-9)
            continue
        rows = run(c.but(reduction="none")).loss.reshape(13)
        weight = w if w is not None or spec.inputs == "unlabelled" else c.arguments.get("weight")
        mass = torch.where(live, s if weight is None else s * weight[y.clamp(min=0)], 0)
        counted = live if reduction == "mean" else live & (rows > 0)
        divisor = float(mass[counted].sum())
        share = counted.double() * (0.0 if divisor == 0 else 1 / divisor)
        close("loss", got.loss, (rows * share).sum(), rtol=1e-10)
        wanted = run(c.but(reduction="none"), upstream=share.reshape(shape))
        close("gradient", got.grads[0], wanted.grads[0], rtol=1e-10, atol=1e-18)


@pytest.mark.parametrize("over", ["batch", "image"])
@pytest.mark.parametrize("backend", backends_of(LOSSES["dice"]))
def test_class_weights_of_dice_that_sum_to_less_than_nothing(backend, over):
    x = torch.randn(2, 3, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = torch.arange(140).reshape(2, 70) % 3
    weight = torch.tensor([1.0, -5.0, 2.0], dtype=torch.float64)
    loss = pylosses.dice_loss(x, y, weight=weight, over=over, backend=backend)
    classes = pylosses.dice_loss(x, y, reduction="none", over=over, backend=backend)
    wanted = (weight * classes).sum(dim=-1).div(weight.sum()).mean()
    close("loss", loss, wanted, rtol=1e-12)
    close("gradient", torch.autograd.grad(loss, x)[0], torch.autograd.grad(wanted, x)[0], rtol=1e-10)


@pytest.mark.parametrize("upstream", [INF, -INF, NAN])
@pytest.mark.parametrize(("spec", "sample", "backend"), grid(LABELLED))
def test_upstream_that_is_not_finite_stays_out_of_ignored_rows(spec, sample, backend, upstream):
    """As a scaler of half precision gradients may send it."""
    c = case(spec, sample, "ignored")
    ignored = c.inputs[1] == IGNORE
    for reduction in reductions(spec):
        if reduction != "none":
            got = run(c.but(reduction=reduction), backend, torch.tensor(upstream))
            assert bool((got.grads[0][ignored] == 0).all()), reduction
            assert not bool(got.grads[0][~ignored].isfinite().all()), reduction


@pytest.mark.parametrize("unused", [INF, NAN])
@pytest.mark.parametrize(("spec", "sample", "backend"), LABELLED_ROWS)
def test_weight_of_an_absent_class_is_not_used(spec, sample, backend, unused):
    """1 / count of a class without samples is inf: it does not matter to rows of other classes."""
    c = case(spec, sample, "three_classes")
    if c.arguments.get("label_smoothing"):
        pytest.skip("smoothing gives every class mass")
    x, y = c.inputs
    y = torch.where(y == 1, 0, y)
    weight = torch.tensor([0.5, unused, 2.0])
    for reduction in ("none", "mean"):
        got = run(c._replace(inputs=(x, y)).but(weight=weight, reduction=reduction), backend)
        wanted = run(c._replace(inputs=(x, y)).but(weight=weight.nan_to_num(1.0, 1.0), reduction=reduction), backend)
        close("loss", got.loss, wanted.loss, rtol=1e-6)
        close("gradient", got.grads[0], wanted.grads[0], rtol=1e-6)


@pytest.mark.parametrize(("spec", "sample", "backend"), MARGIN)
def test_nothing_above_zero(spec, sample, backend):
    """Every row is safe by more than its margin: loss 0 and gradient exactly 0 for every reduction."""
    x = torch.full((5, 9), -50.0)
    y = torch.arange(5)
    x[y, y] = 50.0
    c = Case(spec, (x, y), arguments_of(spec, sample, 9, torch.float32), 9)
    for reduction in reductions(spec):
        got = run(c.but(reduction=reduction), backend)
        assert bool((got.loss == 0).all()) and bool((got.grads[0] == 0).all()), reduction


@pytest.mark.parametrize("shape", ["rows", "pixels"])
@pytest.mark.parametrize("classes", [3, 40])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.01}, {"softcap": 200.0}, {"soft": True}], ids=str)
@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy_adr", "cross_entropy_adr of a batch"])
@pytest.mark.parametrize("backend", backends_of(LOSSES["cross_entropy"], reference=False))
def test_what_is_above_zero_with_smoothing(backend, name, options, classes, shape):
    """The whole loss says which rows count, and backward takes forward's word: a weightless label, a label that leads by more
    than e^-x can tell from 0, and weights below 0, whose rows have losses of any sign."""
    options = dict(options)
    x = torch.zeros(6, classes)
    x[:, 0] = torch.tensor([1.0, 1.0, 150.0, -3.0, 2.0, 1.0])
    y = torch.tensor([0, 1, 0, 0, 2, IGNORE])
    weight = torch.ones(classes)
    weight[0], weight[2] = 0.0, -4.0
    if options.pop("soft", False):
        y = torch.nn.functional.one_hot(y.clamp(min=0), classes).float()
    if name != "cross_entropy":
        options |= {"top": 2, "gamma": 1e-3, "scope": "batch" if "batch" in name else "sample"}
    options |= {"label_smoothing": 0.1, "reduction": "above_zero"}
    c = Case(LOSSES[name.split()[0]], (x, y), options, classes)
    if shape == "pixels":
        c = c._replace(inputs=(x.t()[None], y.t()[None] if y.dim() > 1 else y[None]))
    for weighted in (c, c.but(weight=weight)):
        got, wanted = run_for_logits(weighted, backend), run_for_logits(weighted.double(), "reference")
        close("loss", got.loss, wanted.loss, rtol=1e-5)
        close("gradient", got.grads[0], wanted.grads[0], rtol=1e-5)


@pytest.mark.parametrize("backend", backends_of(LOSSES["cross_entropy"]))
def test_gradient_of_a_weightless_label_with_smoothing(backend):
    """q = (0, 1, 1) 0.1 / 3, p = (0.576, 0.212, 0.212): p sum q - q of the first row, over the one row that has a weight."""
    x = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], requires_grad=True)
    weight, y = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 1])
    loss = pylosses.cross_entropy(x, y, weight=weight, label_smoothing=0.1, reduction="above_zero", backend=backend)
    (grad,) = torch.autograd.grad(loss, x)
    close("gradient", grad[0], torch.tensor([0.0384, -0.0192, -0.0192]), rtol=1e-3)


@pytest.mark.parametrize(("spec", "sample", "backend"), LABELLED_ROWS)
def test_narrow_labels_do_not_wrap(spec, sample, backend):
    """ignore_index=-100 is 156 in 8 bits: label 156 of a uint8 target is a class, and 255 may be the ignored one."""
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(2))
    y = torch.tensor([156, 3, 156, 199, 0, 156])
    c = Case(spec, (x, y), arguments_of(spec, sample, 200, torch.float32), 200).but(reduction="none")
    wanted = run(c, backend)
    got = run(c._replace(inputs=(x, y.to(torch.uint8))), backend)
    assert torch.equal(got.loss, wanted.loss) and torch.equal(got.grads[0], wanted.grads[0])
    assert not torch.equal(wanted.grads[0][0], torch.zeros(200)) or spec.family == "margin"
    far = -100 - 2**32  # and -100 + 2**32 is no int32 label either
    got = run(c._replace(inputs=(x, y.to(torch.int32))).but(ignore_index=156 + 2**32), backend)
    assert torch.equal(got.loss, wanted.loss)
    got = run(c._replace(inputs=(x, y.to(torch.int16))).but(ignore_index=far), backend)
    assert torch.equal(got.loss, wanted.loss)


@pytest.mark.parametrize(("spec", "sample", "backend"), LABELLED_ROWS)
def test_ignore_index_may_be_a_class(spec, sample, backend):
    c = case(spec, sample, "three_classes").but(reduction="none", ignore_index=1)
    got = run(c, backend)
    ignored = c.inputs[1] == 1
    assert bool(ignored.any())
    assert bool((got.loss[ignored] == 0).all()) and bool((got.grads[0][ignored] == 0).all())
    moved = run(c._replace(inputs=(c.inputs[0], torch.where(ignored, IGNORE, c.inputs[1]))).but(ignore_index=IGNORE), backend)
    assert torch.equal(got.loss, moved.loss) and torch.equal(got.grads[0], moved.grads[0])


# NaN and infinities ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["rows", "pixels"])
@pytest.mark.parametrize("where", ["label", "rival", "everywhere"])
@pytest.mark.parametrize(("spec", "sample", "backend"), ROWS)
def test_nan_stays_in_its_row(spec, sample, backend, where, shape):
    """Row loss NaN, gradient row NaN throughout, all other rows as if it were not there, and a reduced loss NaN."""
    c = case(spec, sample, "plain").but(reduction="none")
    wanted = run(c.shaped(1, 13, 1) if shape == "pixels" else c, backend)
    x = c.inputs[0].clone()
    label = 0 if spec.inputs == "unlabelled" else int(c.inputs[1][4])
    if spec.inputs == "labelled" and label == IGNORE:
        pytest.skip("this row was dropped: rounding may decide its margin errors")
    x[4] = torch.where(torch.arange(37) == (label if where == "label" else (label + 7) % 37), NAN, x[4])
    if where == "everywhere":
        x[4] = NAN
    bad = c._replace(inputs=(x, *c.inputs[1:]))
    got = run(bad.shaped(1, 13, 1) if shape == "pixels" else bad, backend)
    loss, grad = got.loss.reshape(13), got.grads[0].movedim(1, -1).reshape(13, 37)
    loss0, grad0 = wanted.loss.reshape(13), wanted.grads[0].movedim(1, -1).reshape(13, 37)
    others = torch.arange(13) != 4
    assert torch.equal(loss[others], loss0[others]) and torch.equal(grad[others], grad0[others])
    if c.arguments.get("max_entropy") is not None:  # the filter drops NaN rows
        assert loss[4] == 0 and bool((grad[4] == 0).all())
        return
    assert loss[4].isnan(), f"a row with NaN has loss {loss[4]}"
    assert grad[4].isnan().all(), f"a row with NaN has gradient {grad[4]}"
    for reduction in ("sum", "mean", "above_zero"):
        assert run(bad.but(reduction=reduction), backend).loss.isnan(), reduction


@pytest.mark.parametrize(("spec", "sample", "backend"), SOFTMAX + grid([s for s in UNLABELLED if s.family == "entropy"]))
def test_masked_class_is_no_class(spec, sample, backend):
    """A class at -inf has gradient 0, and the rest is as if it did not exist."""
    for dtype in (torch.float64, torch.float32):
        c = case(spec, sample, "three_classes", dtype, seed=4).but(reduction="none")
        if c.arguments.get("label_smoothing", 0) > 0:
            pytest.skip("smoothing gives the masked class mass: +inf, tested below")
        x, *rest = c.inputs
        masked = c._replace(inputs=(torch.cat([x, torch.full_like(x[:, :1], -INF)], dim=1), *rest), classes=4)
        longer = {k: torch.cat([v, v[:1]]) for k, v in c.arguments.items() if isinstance(v, torch.Tensor)}
        got, wanted = run(masked.but(**longer), backend), run(c, backend)
        eps = torch.finfo(dtype).eps
        close("loss", got.loss, wanted.loss, rtol=8 * eps)
        close("gradient", got.grads[0][:, :3], wanted.grads[0], rtol=8 * eps)
        assert bool((got.grads[0][:, 3] == 0).all())


@pytest.mark.parametrize(("spec", "sample", "backend"), MARGIN)
def test_masked_class_is_no_error(spec, sample, backend):
    """Margin losses: a class at -inf has error 0 and gradient 0, but counts as a class, like one far below the margin."""
    c = case(spec, sample, "plain").but(reduction="none")
    x, y = c.inputs
    low = (torch.arange(37) % 3 == 0)[None] & (torch.arange(37)[None] != y[:, None])
    got = run(c._replace(inputs=(x.masked_fill(low, -INF), y)), backend)
    wanted = run(c._replace(inputs=(x.masked_fill(low, -1e4), y)), backend)
    close("loss", got.loss, wanted.loss, rtol=1e-6)
    close("gradient", got.grads[0], wanted.grads[0], rtol=1e-6)
    assert bool((got.grads[0][low] == 0).all())


@pytest.mark.parametrize("backend", backends_of(LOSSES["cross_entropy"]))
def test_masked_class_with_mass(backend):
    """Smoothing or a soft target that gives a masked class mass: +inf with a finite gradient; no mass: the class is out."""
    x = torch.tensor([[1.0, -INF, 0.5]], requires_grad=True)
    for target, options in (
        (torch.tensor([0]), {"label_smoothing": 0.1}),
        (torch.tensor([[0.5, 0.25, 0.25]]), {}),
    ):
        loss = pylosses.cross_entropy(x, target, backend=backend, **options)
        assert loss == INF
        assert torch.autograd.grad(loss, x)[0].isfinite().all()
    loss = pylosses.cross_entropy(x, torch.tensor([[0.25, 0.0, 0.75]]), backend=backend)
    shorter = torch.tensor([[1.0, 0.5]], requires_grad=True)
    wanted = pylosses.cross_entropy(shorter, torch.tensor([[0.25, 0.75]]), backend=backend)
    close("loss", loss, wanted, rtol=1e-6)
    grad = torch.autograd.grad(loss, x)[0]
    close("gradient", grad[:, [0, 2]], torch.autograd.grad(wanted, shorter)[0], rtol=1e-6)
    assert grad[0, 1] == 0
    weightless = pylosses.cross_entropy(
        x, torch.tensor([0]), label_smoothing=0.1, weight=torch.tensor([1.0, 0.0, 1.0]), backend=backend
    )
    assert weightless.isfinite()


@pytest.mark.parametrize("shape", ["rows", "pixels"])
@pytest.mark.parametrize("classes", [3, 40, 5000])
@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy_adr", "dice_ce"])
@pytest.mark.parametrize("backend", backends_of(LOSSES["cross_entropy"]))
def test_smoothing_where_the_label_alone_is_unmasked(backend, name, classes, shape):
    """The masked classes have mass: +inf, with a finite gradient."""
    x = torch.full((2, classes), -INF)
    x[:, 1] = torch.tensor([1.0, -7.0])
    c = Case(LOSSES[name], (x, torch.ones(2, dtype=torch.int64)), {"label_smoothing": 0.1}, classes)
    c = c.but(top=1) if name == "cross_entropy_adr" else c
    for reduction in ("mean",) if name == "dice_ce" else ("none", "mean", "above_zero"):
        got = run((c.shaped(1, 2) if shape == "pixels" else c).but(reduction=reduction), backend)
        assert bool((got.loss == INF).all()), got.loss
        assert bool(got.grads[0].isfinite().all()), got.grads[0]


@pytest.mark.parametrize("shape", ["rows", "pixels"])
@pytest.mark.parametrize("zero", ["weight", "sample_weight", "label_smoothing"])
@pytest.mark.parametrize(("spec", "sample", "backend"), LABELLED_ROWS)
def test_masked_label_without_weight(spec, sample, backend, zero, shape):
    """Zero mass times inf is 0; the gradient of the row is 0 too."""
    c = case(spec, sample, "three_classes")
    x, y = c.inputs
    x = x.scatter(1, y[:, None], -INF)
    rows = (1, 7, 1) if shape == "pixels" else (7,)
    c = c._replace(inputs=(x, y)).but(**{zero: torch.zeros(3) if zero == "weight" else torch.zeros(rows)})
    if zero == "label_smoothing":
        if spec.name not in ("cross_entropy", "cross_entropy_adr"):
            pytest.skip("no smoothing")
        c = c.but(label_smoothing=1.0, weight=torch.zeros(3).scatter(0, torch.tensor([2]), 1.0))
        c = c._replace(inputs=(x, torch.where(y == 2, 1, y)))
        c.inputs[0][:, 2] = 0.5
    second = c.arguments.get("z_loss") or spec.name == "cross_entropy_adr"
    for reduction in ("none", "sum", "mean", "above_zero"):
        got = run(c.shaped(*rows).but(reduction=reduction), backend)
        assert bool(got.loss.isfinite().all()), (reduction, got.loss)
        if zero != "label_smoothing" and not (second and zero == "weight"):
            assert bool((got.loss == 0).all()), (reduction, got.loss)
        if c.arguments.get("kind") != "sumexp" and c.arguments.get("power", 1.0) <= 1:  # their derivatives are unbounded too
            assert bool(got.grads[0].isfinite().all()), (reduction, got.grads[0])


def limit_at_zero(arguments: dict) -> float:
    """f(0) of target_loss."""
    kind = arguments["kind"]
    if kind == "gce":
        return 1 / arguments.get("q", 0.7)
    if kind == "mae":
        return 1.0
    if kind == "compsum" and arguments["tau"] > 1:
        return 1 / (arguments["tau"] - 1)
    return INF


@pytest.mark.parametrize(("spec", "sample", "backend"), SOFTMAX)
def test_masked_target_of_a_softmax_loss(spec, sample, backend):
    """+inf, or the limit of a bounded loss at p = 0, with a finite gradient; for cross-entropy p - onehot."""
    c = case(spec, sample, "three_classes").but(reduction="none")
    x, y = c.inputs
    x = x.scatter(1, y[:, None], -INF)
    got = run(c._replace(inputs=(x, y)), backend)
    value = limit_at_zero(c.arguments) if "kind" in c.arguments else INF
    for name in ("alpha", "weight"):
        if isinstance(c.arguments.get(name), torch.Tensor) and value < INF:
            value = value * c.arguments[name][y]
    close("loss", got.loss, torch.as_tensor(value).expand(7), rtol=1e-5)
    if c.arguments.get("kind") != "sumexp":  # its derivative is unbounded too
        assert got.grads[0].isfinite().all()
    if spec.name == "cross_entropy" and sample == 0:
        onehot = torch.nn.functional.one_hot(y, 3)
        close("gradient", got.grads[0], torch.softmax(x, dim=1) - onehot, rtol=1e-6)


@pytest.mark.parametrize(("spec", "sample", "backend"), MARGIN)
def test_infinities_of_a_margin_loss(spec, sample, backend):
    """Masked target: +inf. Competitor +inf: +inf. Label +inf: 0. Both +inf: NaN. Everything -inf: NaN. No NaN but there."""
    x = torch.tensor(
        [
            [-INF, 0.5, 0.25, -1.0],
            [0.0, INF, 0.25, -1.0],
            [INF, 0.5, 0.25, -1.0],
            [INF, INF, 0.25, -1.0],
            [-INF, -INF, -INF, -INF],
            [0.0, -INF, -INF, -INF],
        ]
    )
    c = Case(spec, (x, torch.zeros(6, dtype=torch.int64)), arguments_of(spec, sample, 4, torch.float32), 4)
    for shaped in (c, c.shaped(1, 2, 3)):
        got = run(shaped.but(reduction="none"), backend)
        expected = torch.tensor([INF, INF, 0.0, NAN, NAN, 0.0])
        close("loss", got.loss.reshape(6), expected, rtol=0.0)
        grad = got.grads[0].movedim(1, -1).reshape(6, 4)
        assert bool((grad[[2, 5]] == 0).all())
        assert bool(grad[[3, 4]].isnan().all())
        if c.arguments.get("power", 1.0) == 1:
            assert bool(grad[:2].isfinite().all()), grad[:2]


@pytest.mark.parametrize("where", ["label", "rival"])
@pytest.mark.parametrize(("spec", "sample", "backend"), SOFTMAX)
def test_plus_infinity_of_a_softmax_loss(spec, sample, backend, where):
    """NaN for that row, loss and gradient; the other rows are untouched."""
    c = case(spec, sample, "three_classes").but(reduction="none")
    if c.arguments.get("softcap") is not None:
        pytest.skip("softcap bounds the logits, +inf included")
    x, y = c.inputs
    wanted = run(c, backend)
    x = x.clone()
    x[2, (int(y[2]) + (where == "rival")) % 3] = INF
    got = run(c._replace(inputs=(x, y)), backend)
    others = torch.arange(7) != 2
    assert got.loss[2].isnan() and got.grads[0][2].isnan().all()
    assert torch.equal(got.loss[others], wanted.loss[others]) and torch.equal(got.grads[0][others], wanted.grads[0][others])


@pytest.mark.parametrize(("spec", "sample", "backend"), ROWS)
def test_row_of_minus_infinity(spec, sample, backend):
    """Nothing is left to predict: NaN (dropped where a filter drops NaN), and only in that row."""
    c = case(spec, sample, "three_classes").but(reduction="none")
    x = c.inputs[0].clone()
    wanted = run(c, backend)
    x[3] = -INF
    got = run(c._replace(inputs=(x, *c.inputs[1:])), backend)
    others = torch.arange(7) != 3
    assert torch.equal(got.loss[others], wanted.loss[others]) and torch.equal(got.grads[0][others], wanted.grads[0][others])
    if c.arguments.get("max_entropy") is not None:
        assert got.loss[3] == 0 and bool((got.grads[0][3] == 0).all())
    elif spec.family in ("softmax", "margin", "entropy") or spec.inputs == "labelled":
        assert got.loss[3].isnan()


@pytest.mark.parametrize("kind", ["saturated", "offset", "peaked", "tied"])
@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
def test_extreme_rows_stay_finite(spec, sample, backend, kind):
    """Logits of +-1e4, large offsets, ties: no NaN, no infinity in loss or gradient, in float32 and float16."""
    for dtype in (torch.float32, torch.float16):
        c = case(spec, sample, kind, dtype)
        if c.arguments.get("kind") == "sumexp" and kind in ("saturated", "peaked", "offset"):
            pytest.skip("1/p - 1 is unbounded: it overflows by its definition")
        if dtype == torch.float16 and (c.arguments.get("power", 1.0) > 1 and kind != "tied" or spec.name == "logit_norm"):
            continue  # squared errors, and 1/(T eps) at a zero row, exceed float16's largest number
        got = run(c, backend)
        assert got.loss.isfinite().all(), f"{dtype}: loss {got.loss}"
        assert got.grads[0].isfinite().all(), f"{dtype}: gradient not finite"


# One class, ties, kinks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
def test_one_class(spec, sample, backend):
    """Every supervised loss is 0 with gradient 0; so are entropy, ADR and k-NL; sparse-CL is minus the logit."""
    c = case(spec, sample, "one_class", torch.float64)
    for reduction in reductions(spec):
        got = run(c.but(reduction=reduction), backend)
        if c.arguments.get("z_loss"):
            continue  # lse^2 is not a comparison of classes
        x = c.inputs[0][:, 0]
        if spec.name == "sparse_cl" or spec.name == "tta":
            if c.arguments.get("max_entropy") is not None or reduction == "above_zero":
                continue
            expected = {"none": -x, "sum": -x.sum(), "mean": -x.mean()}[reduction]
            close("loss", got.loss, expected, rtol=1e-12)
            close("gradient", got.grads[0], torch.full_like(got.grads[0], -1.0 if reduction != "mean" else -0.2), rtol=1e-12)
            continue
        assert bool((got.loss == 0).all()), f"{reduction}: {got.loss}"
        assert bool((got.grads[0] == 0).all()), f"{reduction}: {got.grads[0]}"


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "above_zero"])
@pytest.mark.parametrize(("spec", "sample", "backend"), MARGIN)
def test_kink(spec, sample, backend, reduction):
    """relu'(0) = 0: raw errors of exactly 0 give no loss and no gradient."""
    classes = 5
    c = Case(spec, (), arguments_of(spec, sample, classes, torch.float64), classes)
    margin, y = c.arguments.get("margin", 1.0), torch.tensor([0, 3])
    if isinstance(margin, torch.Tensor):
        margin = torch.full((classes,), 0.5, dtype=torch.float64)
        c = c.but(margin=margin)
    x = torch.zeros(2, classes, dtype=torch.float64)
    x[torch.arange(2), y] = margin if isinstance(margin, float) else 0.5  # x_j - x_y + margin == 0 for every other class
    got = run(c._replace(inputs=(x, y)).but(reduction=reduction), backend)
    assert bool((got.loss == 0).all()) and bool((got.grads[0] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=name_of)
@pytest.mark.parametrize("backend", HEM)
def test_error_at_the_threshold_is_kept(backend, dtype):
    """Errors (0), 1, 2, 3, 4 of five classes have mean 2: 2, 3 and 4 are kept, by >=, in every dtype."""
    x = torch.tensor([[0.0, 0.0, 1.0, 2.0, 3.0]], dtype=dtype, requires_grad=True)
    loss = pylosses.hem_loss(x, torch.tensor([0]), margin=1.0, backend=backend)
    assert float(loss.detach()) == 3.0
    grad = torch.autograd.grad(loss, x)[0].double()
    close("gradient", grad, torch.tensor([[-1.0, 0.0, 1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64), rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("classes", [3, 32000, 128256])
@pytest.mark.parametrize("error", [0.1, 0.7])
@pytest.mark.parametrize("backend", HEM)
def test_equal_errors_are_all_kept(backend, classes, error):
    """A rounded mean may exceed every one of equal errors; then nothing would be kept and 0/0 follow."""
    x = torch.zeros(2, classes, requires_grad=True)
    loss = pylosses.hem_loss(x, torch.tensor([0, classes - 1]), margin=error, reduction="none", backend=backend)
    close("loss", loss, torch.full((2,), error), rtol=1e-4)
    grad = torch.autograd.grad(loss.sum(), x)[0]
    assert int((grad > 0).sum()) == 2 * (classes - 1)
    close("gradient", grad[0, 1:], torch.full((classes - 1,), 1 / (classes - 1)), rtol=1e-6)


@pytest.mark.parametrize("backend", HEM)
def test_root_near_zero(backend):
    """power 0.5: linear below delta, so the slope at a small error is delta^(p-1); delta=0 is the exact root."""
    x = torch.tensor([[0.0, -1.0 + 1e-6, -3.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0])
    loss = pylosses.hem_loss(x, y, power=0.5, delta=1e-4, backend=backend)
    assert float(loss) == pytest.approx(100 * 1e-6, rel=1e-6)
    assert torch.autograd.grad(loss, x)[0][0, 1] == pytest.approx(100.0, rel=1e-9)
    loss = pylosses.hem_loss(x, y, power=0.5, delta=0.0, backend=backend)
    assert float(loss) == pytest.approx(1e-3, rel=1e-6)
    assert float(torch.autograd.grad(loss, x)[0][0, 1]) == pytest.approx(500.0, rel=1e-6)


def test_ties_go_to_the_lowest_index():
    x = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0, 2.0]], requires_grad=True)
    grad = torch.autograd.grad(pylosses.sparse_cl_loss(x), x)[0]
    assert grad.tolist() == [[0, -1, 0, 0, 0, 0]]
    grad = torch.autograd.grad(pylosses.knl_loss(x, k=2, skip=1, form="logit"), x)[0]
    assert grad.tolist() == [[0, 0, 0, 1, 1, 0]]  # order 1 2 3 4 5 0: skip class 2 with the top, take 3 and 4
    assert pylosses.confidence_scores(x.detach()).prediction.tolist() == [1]
    first = torch.autograd.grad(pylosses.adr_loss(x, top=2, detach_phi=True), x)[0][0]
    assert first[1] == first[2] and first[1] != first[3], first
    high, low = pylosses.utility_perturbation(torch.ones(1, 4), 2, 1.0, noise=torch.ones(1, 4))
    assert high.tolist() == [[1, 1, 0, 0]] and low.tolist() == [[1, 1, 0, 0]]


# Precision -------------------------------------------------------------------------------------------------------------------


def exact_row(spec, arguments, x, y):
    """Loss and gradient of a loss that sees the row through p_y alone, with 200 digits."""
    mp = mpmath.MPContext()
    mp.dps = 200
    kind = arguments["kind"] if spec.name == "target" else "focal" if spec.name == "focal" else "ce"
    defaults = {"gamma": 2.0, "q": 0.7, "tau": 1.0, "n": 1.0, "a": 1.0, "b": 1.0, "floor": -4.0}
    value = {k: mp.mpf(float(arguments.get(k, d))) for k, d in defaults.items()}
    formula = {
        "ce": lambda p: -mp.log(p),
        "focal": lambda p: -((1 - p) ** value["gamma"]) * mp.log(p),
        "gce": lambda p: (1 - p ** value["q"]) / value["q"],
        "mae": lambda p: 1 - p,
        "sumexp": lambda p: 1 / p - 1,
        "compsum": lambda p: (p ** (value["tau"] - 1) - 1) / (1 - value["tau"]) if value["tau"] != 1 else -mp.log(p),
        "dco": lambda p: -mp.log(1 - (1 - p) ** value["n"]),
        "sce": lambda p: -value["a"] * mp.log(p) - value["b"] * value["floor"] * (1 - p),
    }[kind]
    factor = mp.mpf(1)
    for name in ("alpha", "weight"):
        if arguments.get(name) is not None:
            factor *= mp.mpf(float(arguments[name][y]))
    u = [mp.mpf(float(v)) for v in x]
    if "class_counts" in arguments:
        counts = [mp.mpf(float(v)) for v in arguments["class_counts"]]
        u = [v + mp.mpf(float(arguments.get("tau", 1.0))) * mp.log(s / sum(counts)) for v, s in zip(u, counts, strict=True)]
    others = [mp.exp(v) if j != y else mp.mpf(0) for j, v in enumerate(u)]
    a = mp.log(sum(others)) - u[y]
    p = 1 / (1 + mp.exp(a))
    slope = -mp.diff(formula, p, h=mp.mpf(10) ** -100 * min(p, 1 - p)) * p * (1 - p) * factor  # dL/da = f'(p) dp/da
    grad = [slope * e / sum(others) if j != y else -slope for j, e in enumerate(others)]
    return float(formula(p) * factor), [float(g) for g in grad]


TARGET_LOSSES = grid([s for s in LABELLED if s.name in ("cross_entropy", "focal", "target", "logit_adjusted")], reference=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize(("spec", "sample", "backend"), TARGET_LOSSES)
def test_confident_rows_keep_their_digits(spec, sample, backend, dtype):
    """The label leads (or trails) by up to 30 nats: loss and every entry of the gradient keep their relative precision."""
    c = case(spec, sample, "plain", dtype)
    if c.arguments.keys() & {"label_smoothing", "z_loss", "softcap"}:
        pytest.skip("with these options the row is not seen through p_y alone")
    lead = torch.tensor([0.0, 5.0, 12.0, 17.0, 20.0, 25.0, 30.0, -12.0, -25.0])
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(1)).mul(64).round().div(64)
    y = torch.arange(9) % 5
    x = (x + torch.nn.functional.one_hot(y, 5) * lead[:, None]).to(dtype)
    c = Case(spec, (x, y), arguments_of(spec, sample, 5, dtype), 5).but(reduction="none")
    truth = [exact_row(spec, c.arguments, row, int(label)) for row, label in zip(x, y, strict=True)]
    for shaped in (c, c.shaped(1, 3, 3)):
        got = run(shaped, backend)
        grads = got.grads[0].movedim(1, -1).reshape(9, 5).tolist()
        for r, (loss, grad) in enumerate(truth):
            near = {"rel": 128 * torch.finfo(dtype).eps, "abs": torch.finfo(dtype).tiny}
            assert float(got.loss.reshape(9)[r]) == pytest.approx(loss, **near), f"loss at a lead of {lead[r]}"
            assert grads[r] == pytest.approx(grad, **near), f"gradient at a lead of {lead[r]}"


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
def test_dtypes_out(spec, sample, backend):
    """Loss float32 for half and float32 input, float64 for float64; gradient in the input's dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        got = run(case(spec, sample, "plain", dtype), backend)
        assert got.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert got.grads[0].dtype == dtype


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
def test_float64_is_genuine(spec, sample, backend):
    """A change of 1e-9 in float64 logits changes the loss, by as little: float32 inside would not see it."""
    c = case(spec, sample, "plain", torch.float64).but(reduction="sum")
    step = 1e-9 * torch.linspace(1, 2, 13 * 37, dtype=torch.float64).reshape(13, 37)
    got, moved = run(c, backend), run(c._replace(inputs=(c.inputs[0] + step, *c.inputs[1:])), backend)
    assert bool((got.grads[0] != 0).any())
    assert 1e-13 < abs(float(moved.loss - got.loss)) < 1e-6 * max(1.0, abs(float(got.loss)))


@pytest.mark.parametrize("shape", ["rows", "pixels"])
@pytest.mark.parametrize("classes", [5, 40, 3000])
@pytest.mark.parametrize("temperature", [1e-6, 1e-10, 1e-15])
@pytest.mark.parametrize("backend", backends_of(LOSSES["logit_norm"]))
def test_logit_norm_with_a_tiny_temperature(backend, temperature, classes, shape):
    """u is so large that its rounding is beyond exp's range; the differences of x that it comes from are not rounded."""
    x = torch.randn(20, classes, generator=torch.Generator().manual_seed(5))
    c = Case(LOSSES["logit_norm"], (x, torch.arange(20) % 5), {"temperature": temperature, "reduction": "none"}, classes)
    c = c.shaped(1, 4, 5) if shape == "pixels" else c
    got, wanted = run(c, backend), run(c.double())
    close("loss", got.loss, wanted.loss, rtol=1e-5)
    close("gradient", got.grads[0], wanted.grads[0], rtol=1e-4)


@pytest.mark.parametrize("backend", backends_of(LOSSES["logit_norm"]))
def test_logit_norm_of_denormals(backend):
    x = torch.tensor([[1e-40, 0.0], [0.0, 1e-40], [1e-40, -3e-41]])
    c = Case(LOSSES["logit_norm"], (x, torch.tensor([0, 0, 1])), {"reduction": "none"}, 2)
    got, wanted = run(c, backend), run(c.double())
    close("loss", got.loss, torch.full((3,), 2.0).log(), rtol=1e-6)
    close("gradient", got.grads[0], wanted.grads[0], rtol=1e-5)


@pytest.mark.parametrize("backend", backends_of(LOSSES["logit_norm"]))
def test_logit_norm_of_zeros(backend):
    """A row of zeros has loss ln C and the exact gradient (p - onehot) / (T eps)."""
    x = torch.zeros(1, 4, requires_grad=True)
    loss = pylosses.logit_norm_loss(x, torch.tensor([1]), backend=backend)
    close("loss", loss, torch.tensor(4.0).log(), rtol=1e-6)
    wanted = (torch.full((1, 4), 0.25) - torch.tensor([[0.0, 1, 0, 0]])) / (0.04 * 1e-7)
    close("gradient", torch.autograd.grad(loss, x)[0], wanted, rtol=1e-5)


@pytest.mark.parametrize("absent", ["literal", "zero", "exclude"])
@pytest.mark.parametrize("lead", [60.0, 95.0, 110.0, 1e4])
def test_dice_of_a_vanishing_class(lead, absent):
    """An absent class whose probability is all but 0 divides by almost nothing: still a finite gradient, all but 0."""
    x = torch.tensor([[0.0, -lead], [lead, 0.0]], requires_grad=True)
    loss = pylosses.dice_loss(x, torch.tensor([0, 0]), absent=absent)
    (grad,) = torch.autograd.grad(loss, x)
    exists = absent == "literal" and lead < 1e4  # then its loss is 1; with no mass at all it is 0
    close("loss", loss, torch.tensor(0.5 if exists else 0.0), rtol=1e-6, atol=1e-20)
    assert bool((grad.abs() < 1e-20).all()), grad


def test_entropy_filter():
    """Kept strictly below; equality and NaN are dropped; nothing kept gives 0 with gradient 0."""
    x = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    equal = float(torch.tensor(2.0, dtype=torch.float64).log())
    zero_and_connected("equal", pylosses.entropy_loss(x, max_entropy=equal), x)
    rows = torch.tensor([[0.0, 9.0], [NAN, 0.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = pylosses.entropy_loss(rows, max_entropy=0.5)
    (grad,) = torch.autograd.grad(loss, rows)
    alone = pylosses.entropy_loss(rows[:1])
    close("loss", loss, alone, rtol=1e-12)
    assert bool((grad[1:] == 0).all()) and grad.isfinite().all()


@pytest.mark.parametrize("backend", backends_of(LOSSES["logit_adjusted"]))
def test_classes_without_samples(backend):
    """logit_adjusted masks the class, and its module warns; hem_margins counts it as one sample."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    counts = torch.tensor([10, 0, 5, 20])
    with pytest.warns(UserWarning, match="1 classes without samples"):
        module = pylosses.LogitAdjustedLoss(class_counts=counts, reduction="none", backend=backend)
    loss = module(x, torch.tensor([0, 2, 1]))
    assert loss[:2].isfinite().all() and loss[2] == INF
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert bool((grad[:2, 1] == 0).all()) and grad.isfinite().all()
    assert torch.equal(pylosses.hem_margins(torch.tensor([4, 0])), pylosses.hem_margins(torch.tensor([4, 1])))


def test_row_by_row_covers_the_families():
    """A new family must say whether its losses are row by row, or the tests above would pass it over."""
    assert {s.family for s in LABELLED + UNLABELLED} <= {"softmax", "margin", "entropy", "select", "region"}
    assert not row_by_row(LOSSES["dice"])
