"""Are the losses of classes right where their sums are cut, and the scores where rows are extreme?

Thread counts, images of odd sizes, pieces of an area, large half images, what is saved; scores on every dtype and layout.
"""

import time

import mpmath
import numpy as np
import pytest
import torch
from cases import (
    DTYPES,
    KINDS,
    LABELLED,
    Case,
    arguments_of,
    backends_of,
    case,
    grid,
    layouts,
    name_of,
    run,
    takes,
    upstream_for,
)
from tolerance import agree

import pylosses
from pylosses import cpu
from pylosses.autograd import Call
from pylosses.spec import LOSSES

REGION = grid([s for s in LABELLED if s.family == "region" and takes(s, "over")], reference=False)
DICE = backends_of(LOSSES["dice"], reference=False)
SCORES = backends_of(LOSSES["confidence_scores"], reference=False)


def drawn(spec, sample: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Case:
    """Logits of any shape; a tenth of the labels is ignored, and the last class has none.

    They are multiples of 1/64, so that their differences are exact: what those lose goes through the class sums to every row,
    and whether plain PyTorch is lucky in one row of thousands says nothing about a kernel.
    """
    g = torch.Generator().manual_seed(sum(shape))
    classes = shape[1]
    x = ((64 * scale * torch.randn(shape, generator=g)).round() / 64).to(dtype)
    y = torch.randint(0, max(classes - 1, 1), shape[:1] + shape[2:], generator=g)
    y[torch.rand(y.shape, generator=g) < 0.1] = -100
    return Case(spec, (x, y), arguments_of(spec, sample, classes, dtype), classes)


def compare(c: Case, backend: str, what: str) -> None:
    __tracebackhide__ = True
    up = upstream_for(c)
    got, plain, truth = run(c, backend, up), run(c, "reference", up), run(c.double(), "reference", up)
    agree(f"{what} loss", got.loss, plain.loss, truth.loss)
    agree(f"{what} gradient", got.grads[0], plain.grads[0], truth.grads[0], row=1)


#: around the 64 rows from which an image's coefficients are saved, the rows of a tile, and the rows of a piece
SHAPES = [
    (3, 5, 7, 9), (3, 5, 8, 8), (5, 4, 1, 1), (2, 19, 1, 257), (2, 19, 33, 125), (3, 40, 65), (2, 150, 31, 33), (700, 7),
    (1100, 33), (3, 600, 23),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("over", ["batch", "image"])
@pytest.mark.parametrize(("spec", "sample", "backend"), REGION)
def test_pieces_and_images(spec, sample, backend, over, shape):
    """Areas that are cut into pieces, or that are smaller than a vector."""
    for reduction in ("mean", "sum", "none"):
        if (spec.name, reduction) != ("dice_ce", "none"):
            compare(drawn(spec, sample, shape).but(over=over, reduction=reduction), backend, f"{spec.function}[{reduction}]")


@pytest.mark.parametrize("backend", DICE)
def test_float64_with_many_classes(backend):
    """A small `smooth` and 32000 classes cost plain PyTorch 50 ulps in float64; the truth here is computed in long double."""
    exact = np.longdouble
    if np.finfo(exact).eps > 1e-18:
        pytest.skip("long double is float64 here")
    c = case(LOSSES["dice"], 0, "huge", torch.float64).but(smooth=2.0**-17, over="image", reduction="sum")
    x, t = c.inputs[0].numpy().astype(exact), torch.nn.functional.one_hot(c.inputs[1], c.classes).numpy().astype(exact)
    e = np.exp(x - x.max(1, keepdims=True))
    p, s = e / e.sum(1, keepdims=True), exact(2.0**-17)
    loss = (1 - (2 * p * t + s) / (p + t + s)).sum()
    q = (2 * p * t + s) / (p + t + s) ** 2 - 2 * t / (p + t + s)
    gradient = p * (q - (p * q).sum(1, keepdims=True))
    got = run(c, backend)
    eps = np.finfo(np.float64).eps
    assert abs(got.loss.item() - loss) <= 8 * eps * loss
    assert (np.abs(got.grads[0].numpy() - gradient).max(1) <= 8 * eps * np.abs(gradient).max(1)).all()


@pytest.mark.parametrize("form", ["contiguous", "channels_last"])
@pytest.mark.parametrize("over", ["batch", "image"])
@pytest.mark.parametrize(("spec", "sample", "backend"), REGION)
def test_any_number_of_threads_gives_the_same_bits(spec, sample, backend, over, form, threads):
    for shape in ((3, 19, 67, 129), (5, 40, 3, 7), (2, 33, 61, 37)):
        c = drawn(spec, sample, shape).but(over=over)
        if form == "channels_last":
            c = c._replace(inputs=(c.inputs[0].contiguous(memory_format=torch.channels_last), c.inputs[1]))
        threads(1)
        wanted = run(c, backend)
        for count in (2, 3, 7):
            threads(count)
            got = run(c, backend)
            assert torch.equal(got.loss, wanted.loss) and torch.equal(got.grads[0], wanted.grads[0]), (shape, count)


@pytest.mark.parametrize("absent", ["literal", "zero", "exclude"])
@pytest.mark.parametrize("smooth", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize("over", ["batch", "image"])
@pytest.mark.parametrize("backend", DICE)
def test_options_together(backend, over, smooth, absent):
    """Class weights, sample weights and every option of Dice, with classes that no image has; as rows and as pixels."""
    spec, g = LOSSES["dice"], torch.Generator().manual_seed(1)
    for shape in ((11, 5), (9, 37), (3, 6, 9, 11)):
        for dtype in (torch.float32, torch.float64):
            c = drawn(spec, 0, shape, dtype, 12.0).but(over=over, smooth=smooth, absent=absent)
            w, s = (torch.rand(n, generator=g).to(dtype) for n in (c.classes, c.inputs[1].shape))
            w[1] = 0
            for reduction in ("mean", "sum", "none"):
                compare(c.but(weight=w, sample_weight=s, reduction=reduction), backend, f"dice_loss[{shape} {reduction}]")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 2.0},
        {"softcap": 4.0, "bias": "drawn", "label_smoothing": 0.2},
        {"temperature": 0.5, "z_loss": 1e-2, "weight": "drawn", "label_smoothing": 0.1},
        {"bias": "drawn", "weight": "drawn", "reduction": "sum"},
        {"ce_weight": 0.0, "dice_weight": 0.25},
        {"dice_weight": 0.0, "temperature": 3.0},
    ],
    ids=lambda o: "-".join(o),
)
@pytest.mark.parametrize("over", ["batch", "image"])
@pytest.mark.parametrize("backend", backends_of(LOSSES["dice_ce"], reference=False))
def test_cross_entropy_of_other_logits(backend, over, options):
    """Dice sees the logits as they are, cross-entropy with temperature, softcap and bias."""
    g = torch.Generator().manual_seed(2)
    for shape in ((12, 5), (12, 37), (3, 19, 13, 7), (2, 40, 1, 5)):
        for dtype in DTYPES:
            c = drawn(LOSSES["dice_ce"], 0, shape, dtype).but(over=over)
            statistics = torch.float64 if dtype == torch.float64 else torch.float32
            vectors = {k: torch.rand(c.classes, generator=g).to(statistics) for k, v in options.items() if v == "drawn"}
            compare(c.but(**options | vectors), backend, f"dice_ce_loss[{shape}]")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("backend", DICE)
def test_large_half_images(backend, dtype, threads):
    """Sums of more positions than float32 has digits for: the loss of 2^24 + 2^20 positions is not lost."""
    threads(2)
    x = torch.zeros(2, 2, 2176, 4096, dtype=dtype)
    y = torch.zeros(2, 2176, 4096, dtype=torch.uint8)
    y[1, -1, -1] = 1
    got = pylosses.dice_loss(x, y, reduction="none", backend=backend).double()
    n = y.numel()
    first, second = 1 - (n - 1) / ((n - 1) + n / 2), 1 - 1 / (1 + n / 2)
    assert got.tolist() == pytest.approx([first, second], rel=2e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("backend", DICE)
def test_nan_is_seen_by_every_row_of_its_area(backend, dtype):
    """One NaN makes the loss NaN and the gradient of every counted row of the same image; other images do not see it."""
    c = drawn(LOSSES["dice"], 0, (3, 5, 4, 6), dtype).but(over="image", reduction="none", smooth=1.0)
    x, y = c.inputs[0].clone(), c.inputs[1]
    wanted = run(c, backend)
    where = (y[1] >= 0).nonzero()[0]
    x[1, 2, where[0], where[1]] = float("nan")
    got = run(c._replace(inputs=(x, y)), backend)
    assert got.loss[1].isnan().all() and torch.equal(got.loss[[0, 2]], wanted.loss[[0, 2]])
    assert torch.equal(got.grads[0][[0, 2]], wanted.grads[0][[0, 2]])
    live = (y[1] >= 0).expand(5, 4, 6)
    assert got.grads[0][1][live].isnan().all() and bool((got.grads[0][1][~live] == 0).all())


@pytest.mark.parametrize("lead", [60.0, 95.0, 700.0, 1e4])
@pytest.mark.parametrize("absent", ["literal", "zero", "exclude"])
@pytest.mark.parametrize("backend", DICE)
def test_mass_below_float32(backend, absent, lead):
    """An absent class has loss 1 as long as float64 sees its probability, in areas of any size and layout."""
    for classes, rows in ((3, 2), (3, 5000), (40, 5), (40, 700)):
        x = torch.zeros(rows, classes)
        x[:, 1:] = -lead
        for over in ("batch", "image"):
            for shaped, y in (
                (x, torch.zeros(rows, dtype=torch.int64)),
                (x.T.reshape(1, classes, rows), torch.zeros(1, rows, dtype=torch.int64)),
            ):
                options = {"absent": absent, "over": over, "reduction": "none"}
                got, wanted = (pylosses.dice_loss(shaped, y, backend=b, **options) for b in (backend, "reference"))
                assert torch.allclose(got, wanted, rtol=0, atol=1e-6), (classes, rows, over)


@pytest.mark.parametrize("over", ["batch", "image"])
@pytest.mark.parametrize("backend", DICE)
def test_shapes_out(backend, over):
    """reduction "none" has a loss for each class, and the empty batch has zeros."""
    for shape in ((4,), (2, 4), (2, 4, 3), (2, 4, 0), (0, 4), (0, 4, 2)):
        x = torch.ones(shape, requires_grad=True)
        y = torch.zeros(shape[:1] + shape[2:] if len(shape) > 1 else (), dtype=torch.int64)
        got, wanted = (pylosses.dice_loss(x, y, over=over, reduction="none", backend=b) for b in (backend, "reference"))
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        assert torch.autograd.grad(got.sum(), x)[0].shape == x.shape
        if x.numel() == 0:
            assert bool((got == 0).all())


def test_tiny_images_save_no_coefficients():
    """For images of one row the coefficients of every class would be as many as the logits."""
    if cpu.absent is not None:
        pytest.skip(cpu.absent)
    call = Call("cpu", "dice", *(None,) * 6, (0.0, 1.0, 0.0), -100, "mean", None)
    assert cpu.new_saved(call, torch.empty(512, 256)).nbytes < 512 * 256
    assert cpu.new_saved(call, torch.empty(2, 19, 512, 512)).nbytes < 2 * 512 * 512 * 8 + 2 * 19 * 16 + 256


# Scores ----------------------------------------------------------------------------------------------------------------------

OPTIONS = [{}, {"gen_m": 1}, {"gen_m": 3}, {"temperature": 2.0, "gen_gamma": 0.5}, {"temperature": 0.25, "gen_m": 70}]


def same_scores(x: torch.Tensor, backend: str, what: str, **options) -> None:
    """Every score by the rule of tolerance.py. The truth is that of rows shifted by their largest logit, which is exact where
    a large offset would cost float64 digits."""
    __tracebackhide__ = True
    got, plain = (pylosses.confidence_scores(x, backend=b, **options) for b in (backend, "reference"))
    dim = 1 if x.dim() > 1 else 0
    top = x.double().amax(dim=dim, keepdim=True)
    top = torch.where(top.isfinite(), top, 0)
    truth = pylosses.confidence_scores(x.double() - top, backend="reference", **options)
    shift = top.squeeze(dim)
    truth = truth._replace(mls=truth.mls + shift, energy=truth.energy + shift)
    assert torch.equal(got.prediction, plain.prediction), what
    for name in ("msp", "mls", "energy", "gen", "neg_entropy"):
        values = [getattr(s, name) for s in (got, plain, truth)]
        if x.dtype == torch.float64:  # the reference's long sums: held to 64 roundings of one of them
            values[1] = values[2] + 32 * torch.finfo(torch.float64).eps * values[2].abs().clamp(min=1)
        agree(f"{what} {name}", *values)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "special"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "default")
@pytest.mark.parametrize("backend", SCORES)
def test_scores(backend, options, kind, dtype):
    x = KINDS[kind](torch.Generator().manual_seed(5))[0].to(dtype)
    if kind == "ignored":
        x = x.nan_to_num(0.0, 0.0, 0.0)
    same_scores(x, backend, f"{kind} rows", **options)
    if kind != "huge":
        same_scores(x.T[None].contiguous(), backend, f"{kind} pixels", **options)
        same_scores(x[0], backend, f"one {kind} row", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("backend", SCORES)
def test_score_layouts(backend, dtype):
    g = torch.Generator().manual_seed(6)
    for shape in ((3, 19, 5, 4), (3, 40, 5, 4), (14, 33), (14, 7)):
        for layout, x in layouts((4 * torch.randn(shape, generator=g)).to(dtype)):
            same_scores(x, backend, f"{layout} {shape}")
            same_scores(x, backend, f"{layout} {shape}", gen_m=5)


@pytest.mark.parametrize("classes", [5, 45])
@pytest.mark.parametrize("backend", SCORES)
def test_scores_of_special_rows(backend, classes):
    """NaN, infinities and masked rows, as the reference has them; of several NaN the first is the prediction."""
    inf, nan = float("inf"), float("nan")
    x = torch.randn(9, classes, generator=torch.Generator().manual_seed(7))
    x[0, 2:4], x[1, 3], x[2, 1:3], x[3], x[4, 1:] = nan, inf, inf, -inf, -inf
    x[5, 0], x[5, 4], x[6, 1:], x[7] = nan, inf, 2.0, 0.0
    for rows in (x, x.T.reshape(1, classes, 9)):
        for options in ({}, {"gen_m": 2}, {"temperature": 2.0}):
            got, wanted = (pylosses.confidence_scores(rows, backend=b, **options) for b in (backend, "reference"))
            for name, a, b in zip(got._fields, got, wanted, strict=True):
                assert torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6, equal_nan=True), (name, options, a, b)


def rows_to_select_from(classes: int) -> torch.Tensor:
    """Rows whose largest classes are hard to tell apart or lie in an unlucky order; -inf and ties around the last one."""
    g = torch.Generator().manual_seed(classes)
    x = 3 * torch.randn(12, classes, generator=g)
    x[1], x[2] = x[1].sort().values, x[2].sort(descending=True).values
    x[3] = x[3].round()  # many are equal
    x[4] = 0.25
    x[5, classes // 3 :] = -float("inf")
    x[6, 1:] = -float("inf")
    x[7] = 1e-40 * torch.arange(classes)  # below the normal range, on both sides of 0
    x[7, ::2] *= -1
    x[8] += 1000
    x[9] = -30 - x[9].abs()
    x[10, torch.randperm(classes, generator=g)[: classes // 2]] = x[10].max()  # several are the largest
    x[11] *= 20
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("classes", [7, 33, 130, 1000, 2049, 4500])
@pytest.mark.parametrize("backend", SCORES)
def test_gen_takes_the_largest_classes(backend, classes, dtype):
    """However many there are to choose, wherever they lie in the row, in whatever order they come."""
    x = rows_to_select_from(classes).to(dtype)
    for most in sorted({1, 2, classes // 10 + 1, classes // 2, classes - 1}):
        same_scores(x, backend, f"rows, {most} of {classes}", gen_m=most)
        if classes <= 1000:
            same_scores(x.T[None].contiguous(), backend, f"pixels, {most} of {classes}", gen_m=most)


@pytest.mark.parametrize("layout", ["rows", "pixels"])
@pytest.mark.parametrize("backend", SCORES)
def test_gen_costs_a_few_passes(backend, layout, threads):
    """The largest hundred are found in a few times what the other scores take; one by one, it took fifty times as long."""
    threads(1)
    x = torch.randn(512, 1000, generator=torch.Generator().manual_seed(10))  # more than branches are remembered for
    x = x if layout == "rows" else x.T[None].contiguous()

    def seconds(most: int) -> float:
        start = time.perf_counter()
        pylosses.confidence_scores(x, gen_m=most, backend=backend)
        return time.perf_counter() - start

    turns = [(seconds(100), seconds(1)) for _ in range(10)]
    selected, none = (min(times) for times in zip(*turns, strict=True))
    assert selected < 12 * none, (selected, none)


@pytest.mark.parametrize("backend", backends_of(LOSSES["confidence_scores"]))
def test_scores_asked_for(backend):
    """Each alone and several have the bits that they have among all; the others are None."""
    names = pylosses.ConfidenceScores._fields
    choices = [(name,) for name in names] + [("msp", "energy"), ["prediction", "gen"], {"neg_entropy", "mls"}, "gen", names]
    for shape in ((9, 7), (9, 45), (2, 7, 3), (5,)):
        x = 4 * torch.randn(shape, generator=torch.Generator().manual_seed(11))
        x.view(-1)[0] = 100.0  # what is beside it underflows
        for options in ({"gen_m": 3}, {"temperature": 2.0}):
            wanted = pylosses.confidence_scores(x, backend=backend, **options)
            for choice in choices:
                got = pylosses.confidence_scores(x, scores=choice, backend=backend, **options)
                for name in names:
                    one = getattr(got, name)
                    if name in ((choice,) if isinstance(choice, str) else choice):
                        assert torch.equal(one, getattr(wanted, name)), (name, choice, shape, options)
                    else:
                        assert one is None, (name, choice)


@pytest.mark.parametrize(
    ("wanted", "absent"),
    [
        (("mls", "prediction"), ("exp", "log", "sum", "topk", "softmax", "sigmoid")),
        (("energy",), ("topk", "softmax", "sigmoid")),
        (("msp",), ("topk", "softmax")),
        (("neg_entropy",), ("topk", "log1p")),
    ],
)
def test_scores_that_are_not_asked_for_are_not_traced(wanted, absent):
    """What a compiled call consists of."""
    graphs = []

    def keep(module, _inputs):
        graphs.append(module)
        return module

    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(12))
    torch.compiler.reset()
    got = torch.compile(lambda t: pylosses.confidence_scores(t, scores=wanted), fullgraph=True, backend=keep)(x)
    (graph,) = graphs
    assert "argmax" in graph.code and not any(word in graph.code for word in absent), graph.code
    for name, a, b in zip(got._fields, got, pylosses.confidence_scores(x, scores=wanted), strict=True):
        assert (a is None) == (name not in wanted) == (b is None)
        assert a is None or torch.allclose(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("backend", SCORES)
def test_gen_of_confident_rows(backend, dtype):
    """p^gamma (1 - p)^gamma with 60 digits: neither 1 - p of the leader nor p of the others is lost where exp gives 0."""
    mp = mpmath.MPContext()
    mp.dps = 60
    for lead in (1.0, 20.0, 40.0, 120.0, 400.0):
        for others in ([0.0, -3.0, 0.0, -200.0], [-1.0] * 40):
            u = [mp.mpf(v) for v in [lead, *others]]
            e = [mp.exp(v - u[0]) for v in u]
            p = [v / mp.fsum(e) for v in e]
            rest = [mp.fsum(e[:j] + e[j + 1 :]) / mp.fsum(e) for j in range(len(e))]
            wanted = -mp.fsum((a * b) ** mp.mpf("0.1") for a, b in zip(p, rest, strict=True))
            x = torch.tensor([lead, *others], dtype=dtype)
            for shaped in (x[None], x[None, :, None].expand(1, -1, 9)):
                got = pylosses.confidence_scores(shaped, backend=backend).gen
                assert got.flatten().tolist() == pytest.approx([float(wanted)] * got.numel(), rel=32 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("backend", SCORES)
def test_scores_choose_the_reference_for_a_gradient(backend):
    """Differentiable as ever; asked for a kernel, the reason is given; and traced calls give the same values."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(8))
    wanted = pylosses.confidence_scores(x, backend=backend)
    leaf = x.clone().requires_grad_()
    scores = pylosses.confidence_scores(leaf)
    assert scores.gen.requires_grad and torch.autograd.grad(scores.energy.sum(), leaf)[0].shape == x.shape
    with pytest.raises(pylosses.BackendError, match="input requires a gradient"):
        pylosses.confidence_scores(leaf, backend=backend)
    with torch.no_grad():
        assert torch.equal(pylosses.confidence_scores(leaf, backend=backend).gen, wanted.gen)
    mapped = torch.func.vmap(lambda row: pylosses.confidence_scores(row).msp)(x)
    assert torch.allclose(mapped, wanted.msp)
    compiled = torch.compile(lambda t: pylosses.confidence_scores(t).energy, fullgraph=True, backend="eager")(x)
    assert torch.allclose(compiled, wanted.energy)


@pytest.mark.parametrize("backend", SCORES)
def test_scores_do_not_depend_on_threads(backend, threads):
    g = torch.Generator().manual_seed(9)
    for shape in ((300, 500), (3, 19, 65, 33)):
        x = torch.randn(shape, generator=g)
        threads(1)
        wanted = pylosses.confidence_scores(x, backend=backend)
        for count in (2, 5):
            threads(count)
            got = pylosses.confidence_scores(x, backend=backend)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
