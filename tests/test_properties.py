"""Do the laws of the losses hold for any input? Drawn by hypothesis, for every loss, argument sample and backend."""

import pytest
import torch
from cases import (
    IGNORE,
    LABELLED,
    NAN,
    UNLABELLED,
    Case,
    arguments_of,
    case,
    grid,
    row_by_row,
    run,
    shift_reason,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import close

ALL = grid(LABELLED + UNLABELLED)
ROWS = grid(LABELLED + UNLABELLED, rows=True)
LABELLED_ROWS = grid(LABELLED, rows=True)
MARGIN = grid([s for s in LABELLED if s.family == "margin"])
EXAMPLES = 12

sizes = st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 5, 8, 16, 17, 33, 40]))
seeds = st.integers(0, 10**6)
scales = st.sampled_from([0.0, 0.25, 2.0, 20.0, 1000.0])


def drawn(spec, sample: int, size: tuple[int, int], seed: int, scale: float, dtype=torch.float64) -> Case:
    """Rows with logits of the given scale, on a grid of 1/64 so that ties occur, and a few ignored labels."""
    n, c = size
    g = torch.Generator().manual_seed(seed)
    arguments = arguments_of(spec, sample, c, dtype)
    if arguments.get("kind") == "sumexp":
        scale = min(scale, 2.0)  # 1/p - 1 overflows by its definition
    x = (scale * torch.randn(n, c, generator=g, dtype=torch.float64) * 64).round().div(64).to(dtype)
    y = torch.randint(0, c, (n,), generator=g)
    y[torch.rand(n, generator=g) < 0.2] = IGNORE
    inputs = (x, y) if spec.inputs == "labelled" else (x,)
    return Case(spec, inputs, arguments, c)


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
@settings(max_examples=EXAMPLES)
@given(size=sizes, seed=seeds, scale=scales)
def test_gradient_rows_sum_to_zero(spec, sample, backend, size, seed, scale):
    """A common offset of the logits changes nothing, so each gradient row sums to 0."""
    c = drawn(spec, sample, size, seed, scale)
    if shift_reason(spec, c.arguments) is not None:
        return
    grad = run(c, backend).grads[0]
    assert bool((grad.sum(dim=1).abs() <= 1e-13 * (1 + grad.abs().sum(dim=1))).all()), grad.sum(dim=1)


@pytest.mark.parametrize(("spec", "sample", "backend"), ROWS)
@settings(max_examples=EXAMPLES)
@given(size=sizes, seed=seeds, scale=scales, offset=st.sampled_from([-1024.0, 0.5, 64.0, 8192.0]))
def test_common_offset_changes_nothing(spec, sample, backend, size, seed, scale, offset):
    """Logits on a grid of 1/64 plus a binary offset are exact, so the result changes by rounding alone."""
    c = drawn(spec, sample, size, seed, scale).but(reduction="none")
    if shift_reason(spec, c.arguments) is not None:
        return
    got = run(c._replace(inputs=(c.inputs[0] + offset, *c.inputs[1:])), backend)
    wanted = run(c, backend)
    close("loss", got.loss, wanted.loss, rtol=1e-12, atol=1e-11)
    close("gradient", got.grads[0], wanted.grads[0], rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
@settings(max_examples=EXAMPLES)
@given(size=sizes, seed=seeds, scale=st.sampled_from([0.25, 2.0, 20.0]))
def test_classes_may_be_renamed(spec, sample, backend, size, seed, scale):
    """Permuting logits, labels and per-class arguments together permutes the gradient and leaves the loss."""
    c = drawn(spec, sample, size, seed, scale)
    if spec.family == "select":  # of equal logits the lowest index wins, which is a class's name: draw distinct ones
        n, classes = size
        base = torch.randperm(classes, generator=torch.Generator().manual_seed(seed)).double() * scale / 4
        c = c._replace(inputs=(base + torch.arange(n)[:, None] / 64, *c.inputs[1:]))
    order = torch.randperm(c.classes, generator=torch.Generator().manual_seed(seed + 1))
    place = torch.argsort(order)  # old class -> new class
    x, *rest = c.inputs
    renamed = [torch.where(y == IGNORE, IGNORE, place[y.clamp(min=0)]) for y in rest]
    arguments = {k: v[order] if isinstance(v, torch.Tensor) and v.shape == (c.classes,) else v for k, v in c.arguments.items()}
    wanted = run(c, backend)
    got = run(c._replace(inputs=(x[:, order], *renamed), arguments=arguments), backend)
    close("loss", got.loss, wanted.loss, rtol=1e-12, atol=1e-13)
    close("gradient", got.grads[0], wanted.grads[0][:, order], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("spec", "sample", "backend"), LABELLED_ROWS)
@settings(max_examples=EXAMPLES)
@given(size=sizes, seed=seeds, scale=scales)
def test_reductions_are_sums_of_rows(spec, sample, backend, size, seed, scale):
    """sum adds the rows; mean divides by the counted weight; above_zero by that of the rows with a loss above zero."""
    c = drawn(spec, sample, size, seed, scale)
    if c.arguments.get("z_loss") or spec.name == "cross_entropy_adr":
        return  # their second term has a divisor of its own
    rows = run(c.but(reduction="none"), backend).loss
    live = c.inputs[1] != IGNORE
    weight = c.arguments.get("weight")
    mass = torch.where(live, torch.ones_like(rows) if weight is None else weight.double()[c.inputs[1].clamp(min=0)], 0)
    above = mass * (rows > 0)
    expected = {
        "sum": rows.sum(),
        "mean": rows.sum() / mass.sum() if mass.sum() > 0 else torch.zeros(()),
        "above_zero": rows.sum() / above.sum() if above.sum() > 0 else torch.zeros(()),
    }
    for reduction, value in expected.items():
        close(reduction, run(c.but(reduction=reduction), backend).loss, value, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize(("spec", "sample", "backend"), MARGIN)
@settings(max_examples=EXAMPLES)
@given(size=sizes, seed=seeds, safe=st.integers(1, 5))
def test_above_zero_does_not_see_safe_rows(spec, sample, backend, size, seed, safe):
    """Rows beyond their margin add neither to the loss nor to its divisor, and leave the gradient of the others alone."""
    c = drawn(spec, sample, size, seed, 2.0).but(reduction="above_zero")
    x, y = c.inputs
    more = torch.full((safe, c.classes), -200.0, dtype=torch.float64)
    labels = torch.arange(safe) % c.classes
    more[torch.arange(safe), labels] = 200.0
    got, wanted = run(c._replace(inputs=(torch.cat([x, more]), torch.cat([y, labels]))), backend), run(c, backend)
    close("loss", got.loss, wanted.loss, rtol=1e-13)
    close("gradient", got.grads[0][: len(x)], wanted.grads[0], rtol=1e-13)
    assert bool((got.grads[0][len(x) :] == 0).all())


@pytest.mark.parametrize(("spec", "sample", "backend"), grid(LABELLED))
@settings(max_examples=EXAMPLES)
@given(size=sizes, seed=seeds, scale=scales, where=st.sampled_from(["front", "back"]), junk=st.sampled_from([0.0, 1e30, NAN]))
def test_ignored_rows_may_be_added(spec, sample, backend, size, seed, scale, where, junk):
    c = drawn(spec, sample, size, seed, scale)
    if c.arguments.get("over") == "image":
        return  # each row is an image there; an ignored image does not count either, tested in test_edges
    x, y = c.inputs
    more, ignored = torch.full((3, c.classes), junk, dtype=torch.float64), torch.full((3,), IGNORE)
    pairs = ((x, more), (y, ignored)) if where == "back" else ((more, x), (ignored, y))
    got, wanted = run(c._replace(inputs=tuple(torch.cat(p) for p in pairs)), backend), run(c, backend)
    keep = slice(None, len(x)) if where == "back" else slice(3, None)
    close("loss", got.loss, wanted.loss, rtol=1e-13)
    close("gradient", got.grads[0][keep], wanted.grads[0], rtol=1e-12)


@pytest.mark.parametrize(("spec", "sample", "backend"), ROWS)
@settings(max_examples=EXAMPLES)
@given(size=sizes, seed=seeds, scale=scales)
def test_rows_do_not_see_each_other(spec, sample, backend, size, seed, scale):
    """A row alone gives what it gives in a batch: the same bits from a fused kernel."""
    c = drawn(spec, sample, size, seed, scale, torch.float32).but(reduction="none")
    together = run(c, backend)
    for r in range(size[0]):
        alone = run(c._replace(inputs=tuple(t[r : r + 1] for t in c.inputs)), backend)
        if backend == "reference":  # torch's own sums may round differently with the shape
            close("loss", alone.loss, together.loss[r : r + 1], rtol=1e-5, atol=1e-6)
            close("gradient", alone.grads[0], together.grads[0][r : r + 1], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(alone.loss, together.loss[r : r + 1])
            assert torch.equal(alone.grads[0], together.grads[0][r : r + 1])


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
@settings(max_examples=EXAMPLES)
@given(size=sizes, seed=seeds, scale=scales)
def test_same_input_same_bits(spec, sample, backend, size, seed, scale):
    c = drawn(spec, sample, size, seed, scale, torch.float32)
    first, second = run(c, backend), run(c, backend)
    assert torch.equal(first.loss, second.loss) and torch.equal(first.grads[0], second.grads[0])


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
@settings(max_examples=EXAMPLES)
@given(classes=st.sampled_from([2, 3, 17, 33]), seed=seeds, shape=st.sampled_from([(12, 1), (3, 4), (2, 3, 2), (1, 12)]))
def test_rows_and_pixels_are_the_same(spec, sample, backend, classes, seed, shape):
    """(N, C) rows and the same rows as (N, C, d1, ...) positions give the same loss and gradient."""
    c = drawn(spec, sample, (12, classes), seed, 2.0)
    if c.arguments.get("over") == "image":
        return  # a batch of images is not a batch of rows
    got, wanted = run(c.shaped(*shape), backend), run(c, backend)
    close("loss", got.loss, wanted.loss, rtol=1e-12)
    close("gradient", got.grads[0].movedim(1, -1).reshape(12, classes), wanted.grads[0], rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize(("spec", "sample", "backend"), LABELLED_ROWS)
@settings(max_examples=EXAMPLES)
@given(size=sizes, seed=seeds, factor=st.sampled_from([0.0, 0.5, 2.0, 3.25]))
def test_weights_scale_their_rows(spec, sample, backend, size, seed, factor):
    """With reduction "none", sample_weight multiplies a row's loss and gradient, and 1 changes no bit."""
    c = drawn(spec, sample, size, seed, 2.0).but(reduction="none")
    wanted = run(c, backend)
    ones = run(c.but(sample_weight=torch.ones(size[0], dtype=torch.float64)), backend)
    assert torch.equal(ones.loss, wanted.loss) and torch.equal(ones.grads[0], wanted.grads[0])
    got = run(c.but(sample_weight=torch.full((size[0],), factor, dtype=torch.float64)), backend)
    close("loss", got.loss, factor * wanted.loss, rtol=1e-13)
    close("gradient", got.grads[0], factor * wanted.grads[0], rtol=1e-13)


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
@settings(max_examples=4)
@given(seed=seeds, pieces=st.integers(2, 4))
def test_gradient_accumulation(spec, sample, backend, seed, pieces):
    """A batch cut into pieces, each divided by the whole batch's divisor, gives the gradient of the whole batch."""
    if not row_by_row(spec, sample) or spec.inputs == "unlabelled":
        return
    c = drawn(spec, sample, (12, 5), seed, 2.0).but(reduction="mean")
    if c.arguments.get("z_loss") or spec.name == "cross_entropy_adr":
        return  # two divisors
    x, y = c.inputs
    weight = c.arguments.get("weight")
    live = y != IGNORE
    mass = float(live.sum() if weight is None else weight[y[live]].sum())
    if mass == 0:
        return
    whole = run(c, backend)
    parts = [
        run(c._replace(inputs=(a, b)).but(normalizer=mass), backend)
        for a, b in zip(x.chunk(pieces), y.chunk(pieces), strict=True)
    ]
    close("loss", sum(p.loss for p in parts), whole.loss, rtol=1e-12)
    close("gradient", torch.cat([p.grads[0] for p in parts]), whole.grads[0], rtol=1e-12)


@pytest.mark.parametrize(("spec", "sample", "backend"), grid([s for s in LABELLED if s.family == "softmax"]))
@settings(max_examples=EXAMPLES)
@given(seed=seeds)
def test_raising_the_label_lowers_the_loss(spec, sample, backend, seed):
    """The gradient at the label is not positive, and a step along it does not raise the loss."""
    c = drawn(spec, sample, (6, 7), seed, 2.0).but(reduction="none")
    if c.arguments.get("label_smoothing") or shift_reason(spec, c.arguments) is not None:
        return  # smoothing, z-loss and norms have their optimum at a finite lead
    x, y = c.inputs
    live = y != IGNORE
    got = run(c, backend)
    label = got.grads[0].gather(1, y.clamp(min=0)[:, None])[:, 0]
    assert bool((label[live] <= 0).all())
    raised = x.scatter_add(1, y.clamp(min=0)[:, None], torch.full((6, 1), 0.125, dtype=torch.float64))
    after = run(c._replace(inputs=(raised, y)), backend).loss
    assert bool((after[live] <= got.loss[live] + 1e-12).all())


def test_case_grid_is_not_empty():
    """The laws above are asked of something."""
    assert len(ALL) >= 20 and len(MARGIN) >= 5
    assert case(LABELLED[0]).inputs[0].numel() > 0
