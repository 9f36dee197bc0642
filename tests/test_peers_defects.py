"""Do we have the defects that were seen in other libraries? One test for each that can show on a CPU."""

import pytest
import torch
from cases import LABELLED, UNLABELLED, Case, arguments_of, backends_of, case, finest, grid, run, takes
from tolerance import close

import pylosses
from pylosses.spec import LOSSES

ALL = grid(LABELLED + UNLABELLED)
CE = backends_of(LOSSES["cross_entropy"])
F = torch.nn.functional


def logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
def test_logits_are_not_overwritten(spec, sample, backend):
    """Defect: the gradient is written over the logits. Forward, backward and no_grad leave every bit, ignored rows too."""
    for shape in ("rows", "pixels"):
        c = case(spec, sample, "ignored")
        c = c.shaped(2, 7, 1) if shape == "pixels" else c
        before = [t.clone() for t in c.inputs]
        run(c, backend)
        with torch.no_grad():
            getattr(pylosses, spec.function)(*c.inputs, backend=backend, **c.arguments)
        with torch.inference_mode():
            getattr(pylosses, spec.function)(*c.inputs, backend=backend, **c.arguments)
        for old, new in zip(before, c.inputs, strict=True):
            assert torch.equal(old.nan_to_num(9.5), new.nan_to_num(9.5))


@pytest.mark.parametrize("backend", CE)
def test_two_losses_on_the_same_logits(backend):
    """Defect: the second loss on the same logits is silently wrong."""
    x, y = logits(5, 7).requires_grad_(), torch.tensor([0, 6, -100, 2, 2])
    both = pylosses.cross_entropy(x, y, backend=backend) + pylosses.hem_loss(x, y, backend=backend)
    (grad,) = torch.autograd.grad(both, x)
    alone = [torch.autograd.grad(f(x, y, backend=backend), x)[0] for f in (pylosses.cross_entropy, pylosses.hem_loss)]
    assert torch.equal(grad, alone[0] + alone[1])


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
def test_second_backward_is_the_same(spec, sample, backend):
    """Defect: a second backward multiplies the gradient again."""
    c = case(spec, sample, "plain")
    x = c.inputs[0].clone().requires_grad_()
    loss = getattr(pylosses, spec.function)(x, *c.inputs[1:], backend=backend, **c.arguments)
    first, second = (torch.autograd.grad(loss, x, torch.tensor(3.0), retain_graph=True)[0] for _ in range(2))
    close("the same upstream gradient", second, first, rtol=1e-6)  # the first may have been written in forward
    (third,) = torch.autograd.grad(loss, x, torch.tensor(1.5))
    close("half the upstream gradient", 2 * third, first, rtol=1e-6)


@pytest.mark.parametrize("backend", CE)
def test_float64_and_half_have_their_own_precision(backend):
    """Defect: float64 computed in float32; a bfloat16 loss in steps of 0.03."""
    x, y = logits(64, 100, seed=1).double(), torch.arange(64)
    close("float64", pylosses.cross_entropy(x, y, backend=backend), F.cross_entropy(x, y), rtol=1e-14)
    half = x.bfloat16()
    loss = pylosses.cross_entropy(half, y, backend=backend)
    assert loss.dtype == torch.float32
    close("bfloat16", loss, F.cross_entropy(half.double(), y), rtol=1e-6)


@pytest.mark.parametrize("backend", CE)
def test_bad_label_raises(backend):
    """Defect: loss 0 with a gradient row that sums to 1, +inf, or a read out of bounds."""
    for bad in (7, -1, 10**6, -(10**6)):
        with pytest.raises(IndexError, match=rf"target\[1\] is {bad}\b.*C=7"):
            pylosses.cross_entropy(logits(3, 7), torch.tensor([0, bad, 2]), backend=backend)


@pytest.mark.parametrize("classes", [1, 2, 3, 5, 7, 9, 15, 17, 31, 33, 63, 65, 127, 129, 255, 257])
@pytest.mark.parametrize(("spec", "sample", "backend"), grid(LABELLED, reference=False))
def test_padding_lanes_do_not_leak(spec, sample, backend, classes):
    """Defect: lanes beyond C filled with -inf come alive under softcap, scale or bias. C around every vector width."""
    g = torch.Generator().manual_seed(classes)
    x = torch.full((4, classes + 64), 1e4)  # what a leak would read
    x[:, :classes] = torch.randn(4, classes, generator=g, dtype=torch.float64).sub(30).mul(64).round().div(64)
    y = torch.randint(0, classes, (4,), generator=g)
    if spec.family == "margin":
        x[torch.arange(4), y] = -40.0  # every other class is an error
    c = finest(Case(spec, (x[:, :classes], y), arguments_of(spec, sample, classes, torch.float32), classes))
    if spec.name == "hem":
        c = c.but(threshold=False)  # an error near the mean may be kept or not, by rounding
    for what, form in (("rows", c), ("pixels", c.shaped(1, 4))):
        got, wanted = run(form, backend), run(form.double(), "reference")
        close(f"loss of {what}", got.loss, wanted.loss, rtol=2e-6, atol=1e-7)
        close(f"gradient of {what}", got.grads[0], wanted.grads[0], rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("backend", backends_of(LOSSES["cross_entropy"], reference=False))
@pytest.mark.parametrize("margin", [10.0, 17.0, 20.0, 30.0, 60.0])
def test_confident_rows_are_not_zero(backend, margin):
    """Defect: float32 cross-entropy gives exactly 0 loss and 0 target gradient past a margin of 17 nats."""
    x = torch.tensor([[margin, 0.0, 0.0]], requires_grad=True)
    loss = pylosses.cross_entropy(x, torch.tensor([0]), backend=backend)
    expected = torch.log1p(2 * torch.exp(torch.tensor(-margin, dtype=torch.float64)))
    close("loss", loss, expected, rtol=1e-5)
    (grad,) = torch.autograd.grad(loss, x)
    p = torch.exp(torch.tensor(-margin, dtype=torch.float64)) / (1 + 2 * torch.exp(torch.tensor(-margin, dtype=torch.float64)))
    close("gradient", grad[0], torch.stack([-2 * p, p, p]), rtol=1e-5)


@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_hem_loss", "linear_loss"])
def test_linear_fused_none(function):
    """Defect: reduction="none" of a linear-fused loss gives a wrong weight gradient. Random upstream, all three gradients."""
    h, w, b = (t.double().requires_grad_() for t in (logits(6, 4, seed=1), logits(5, 4, seed=2), logits(5, seed=3)))
    y, up = torch.tensor([0, 4, -100, 2, 1, 3]), logits(6, seed=4).double()
    row_loss = {"linear_cross_entropy": "cross_entropy", "linear_hem_loss": "hem_loss", "linear_loss": "focal_loss"}[function]
    loss = getattr(pylosses, function)(h, w, y, linear_bias=b, reduction="none")
    got = torch.autograd.grad(loss, (h, w, b), up)
    plain = getattr(pylosses, row_loss)(F.linear(h, w, b), y, reduction="none", backend="reference")
    wanted = torch.autograd.grad(plain, (h, w, b), up)
    for name, a, e in zip(("input", "linear_weight", "linear_bias"), got, wanted, strict=True):
        close(name, a, e, rtol=1e-12)


@pytest.mark.parametrize("backend", CE)
def test_gradient_accumulation_is_exact(backend):
    """Defect: the mean of micro-batch means, or ignored tokens in the divisor. `normalizer` gives the whole batch's mean."""
    x, y = logits(12, 9).requires_grad_(), torch.randint(0, 9, (12,), generator=torch.Generator().manual_seed(1))
    y[[0, 1, 2, 7]] = -100
    whole = pylosses.cross_entropy(x, y, backend=backend)
    close("torch", whole, F.cross_entropy(x, y), rtol=1e-6)
    count = (y != -100).sum()
    parts = [
        pylosses.cross_entropy(a, b, normalizer=count, backend=backend) for a, b in zip(x.split(5), y.split(5), strict=True)
    ]
    close("loss", sum(parts), whole, rtol=1e-6)
    close("gradient", torch.autograd.grad(sum(parts), x)[0], torch.autograd.grad(whole, x)[0], rtol=1e-6)


@pytest.mark.parametrize(("spec", "sample", "backend"), grid(LABELLED))
def test_all_ignored_is_zero(spec, sample, backend):
    """Defect: the mean over no rows is NaN."""
    c = case(spec, sample, "plain")
    got = run(c._replace(inputs=(c.inputs[0], torch.full_like(c.inputs[1], -100))), backend)
    assert float(got.loss) == 0 and not got.grads[0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_dice_of_a_large_image(dtype):
    """Defect: float16 Dice at 512x512 is NaN, or silently 1.0."""
    x = logits(1, 2, 512, 512).to(dtype).requires_grad_()
    y = (logits(1, 512, 512, seed=1) > 0).to(torch.uint8)
    loss = pylosses.dice_loss(x, y)
    p = torch.softmax(x.double(), dim=1)
    t = F.one_hot(y.long(), 2).movedim(-1, 1).double()
    expected = (1 - 2 * (p * t).sum((0, 2, 3)) / (p + t).sum((0, 2, 3))).mean()
    close("loss", loss, expected, rtol=1e-5)
    (grad,) = torch.autograd.grad(loss, x, torch.tensor(65536.0))
    assert grad.isfinite().all() and bool((grad != 0).any())


@pytest.mark.parametrize("backend", backends_of(LOSSES["focal"]))
def test_focal_is_one_softmax(backend):
    """Defect: C sigmoid focals, or a division by C. gamma=0 is cross-entropy; the value is -(1-p)^gamma log p."""
    x, y = logits(6, 21).double(), torch.arange(6)
    close("gamma 0", pylosses.focal_loss(x, y, gamma=0.0, backend=backend), F.cross_entropy(x, y), rtol=1e-13)
    p = torch.softmax(x, dim=1)[torch.arange(6), y]
    close("gamma 2", pylosses.focal_loss(x, y, backend=backend), (-((1 - p) ** 2) * p.log()).mean(), rtol=1e-13)


def test_dice_conventions_are_arguments():
    """Defect: the same inputs give four values in four libraries. Each convention is an argument, and none is another."""
    x, y = (
        logits(2, 4, 5, 5).double(),
        torch.randint(0, 3, (2, 5, 5), generator=torch.Generator().manual_seed(1)),
    )  # class 3 is absent
    p, t = torch.softmax(x, dim=1), F.one_hot(y, 4).movedim(-1, 1).double()

    def dice(dims, smooth=0.0):
        return 1 - (2 * (p * t).sum(dims) + smooth) / ((p + t).sum(dims) + smooth)

    batch = dice((0, 2, 3))
    close("literal", pylosses.dice_loss(x, y), batch.mean(), rtol=1e-12)
    close("zero", pylosses.dice_loss(x, y, absent="zero"), batch[:3].sum() / 4, rtol=1e-12)
    close("exclude", pylosses.dice_loss(x, y, absent="exclude"), batch[:3].mean(), rtol=1e-12)
    close("image", pylosses.dice_loss(x, y, over="image", smooth=1e-5), dice((2, 3), 1e-5).mean(), rtol=1e-12)


@pytest.mark.parametrize("spec", UNLABELLED, ids=lambda s: s.name)
def test_test_time_adaptation(spec):
    """Defects: a -inf logit gives NaN, an empty selection gives NaN, an (N, C, H, W) loss is not a scalar."""
    arguments = arguments_of(spec, 0, 8, torch.float32)
    x = logits(2, 8, 3, 3)
    x[:, 7] = -torch.inf
    x.requires_grad_()
    function = getattr(pylosses, spec.function)
    loss = function(x, **arguments)
    assert loss.shape == () and loss.isfinite()
    assert torch.autograd.grad(loss, x)[0].isfinite().all()
    if takes(spec, "max_entropy"):
        nothing = function(x, **(arguments | {"max_entropy": -1.0}))
        assert float(nothing.detach()) == 0
        assert not torch.autograd.grad(nothing, x)[0].any()


@pytest.mark.parametrize("backend", backends_of(LOSSES["logit_norm"]))
def test_logit_norm_normalises_the_classes(backend):
    """Defect: the norm of (N, C, H, W) runs over the wrong axis. And eps tames the gradient at zero logits."""
    x, y = logits(2, 6, 3, 4).double(), torch.randint(0, 6, (2, 3, 4), generator=torch.Generator().manual_seed(2))
    u = x / (0.04 * (x.norm(dim=1, keepdim=True) + 1e-7))
    close("pixels", pylosses.logit_norm_loss(x, y, backend=backend), F.cross_entropy(u, y), rtol=1e-12)
    zero = torch.zeros(1, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(pylosses.logit_norm_loss(zero, torch.tensor([1]), eps=1.0, backend=backend), zero)
    assert bool((grad.abs() <= 25.0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", backends_of(LOSSES["multi_margin"]))
def test_multi_margin_in_half_and_pixels(backend, dtype):
    """Defect: no half precision on the CPU, no N-d input, no ignore_index. Same value as torch's where torch has one."""
    x, y = logits(4, 9, 3, seed=6).to(dtype), torch.randint(0, 9, (4, 3), generator=torch.Generator().manual_seed(3))
    y[1, 1] = -100
    rows, labels = x.double().movedim(1, -1).reshape(-1, 9), y.reshape(-1)
    for power in (1, 2):
        expected = F.multi_margin_loss(rows[labels >= 0], labels[labels >= 0], p=power, margin=0.75)
        got = pylosses.multi_margin_loss(x, y, margin=0.75, power=float(power), backend=backend)
        close(f"power {power}", got, expected, rtol=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("index", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("backend", CE)
def test_narrow_targets(backend, index):
    """Defect: int64 targets only, eight times the memory of a mask. 255 is the usual ignored label of uint8 masks."""
    x = logits(2, 19, 8, 8)
    y = torch.randint(0, 19, (2, 8, 8), generator=torch.Generator().manual_seed(4))
    y[0, :2] = 255 if index == torch.uint8 else 300
    ignore = int(y[0, 0, 0])
    got = pylosses.cross_entropy(x, y.to(index), ignore_index=ignore, backend=backend)
    close("loss", got, F.cross_entropy(x, y, ignore_index=ignore), rtol=1e-6)


@pytest.mark.parametrize("backend", CE)
def test_drop_in_for_torch(backend):
    """Every option that torch has, with torch's meaning: weights, smoothing, ignored rows, soft targets, reductions."""
    x, y = logits(6, 5, 4).double(), torch.randint(0, 5, (6, 4), generator=torch.Generator().manual_seed(5))
    y[0, 0] = -100
    weight = torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0]).double()
    soft = torch.softmax(logits(6, 5, 4, seed=9).double(), dim=1)
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.2):
            for w in (None, weight):
                options = {"reduction": reduction, "label_smoothing": smoothing, "weight": w}
                for target in (y, soft):
                    got = pylosses.cross_entropy(x, target, backend=backend, **options)
                    wanted = F.cross_entropy(x, target, **options)
                    close(str(options), got, wanted, rtol=1e-12)
