"""Are the right classes selected, however many, tied, masked or few? For the losses that look at the largest logits."""

import pytest
import torch
from cases import INF, NAN, Case, Result, fitted, run, upstream_for
from test_backends_agree import compare

import pylosses
from pylosses.choice import BackendError
from pylosses.spec import LOSSES, MOST_SELECTED

if not pylosses.backends()["cpu"].available:
    pytest.skip(f"cpu: {pylosses.backends()['cpu'].reason}", allow_module_level=True)

SELECTING = {
    "sparse_cl": {},
    "sparse_cl_prob": {"weight": "prob"},
    "knl": {"k": 5, "skip": 5},
    "knl_logit": {"k": 5, "skip": 5, "form": "logit"},
    "tta": {"k": 3, "skip": 2, "lam": 0.7},
    "tta_filter": {"k": 3, "skip": 2, "max_entropy": 2.0},
    "tta_logit_filter": {"k": 4, "skip": 0, "form": "logit", "max_entropy": 2.0},
    "adr": {"top": 5},
    "adr_l1": {"top": 4, "norm": "l1"},
    "adr_variance_batch": {"top": 3, "phi": "variance", "scope": "batch"},
    "adr_literal_detached": {"top": 2, "form": "literal", "detach_phi": True},
    "cross_entropy_adr": {"top": 4, "gamma": 0.3},
    "cross_entropy_adr_options": {"top": 4, "label_smoothing": 0.1, "z_loss": 0.02, "temperature": 1.5, "softcap": 8.0},
    "cross_entropy_adr_batch": {"top": 3, "scope": "batch", "label_smoothing": 0.2},
}
BY_LENGTH = sorted(LOSSES, key=len, reverse=True)


def made(name: str, x: torch.Tensor, **arguments) -> Case:
    spec = LOSSES[next(loss for loss in BY_LENGTH if name.startswith(loss))]
    own = fitted(spec, {**SELECTING[name], **arguments}, x.shape[1])
    labels = torch.arange(x.shape[0]) % x.shape[1]
    return Case(spec, (x, labels) if spec.inputs == "labelled" else (x,), own, x.shape[1])


def both_ways(c: Case, what: str, reductions: tuple[str, ...] = ("none", "mean", "above_zero")) -> None:
    """By rows and as pixels; with the gradient written in forward where it can be (mean), and in backward (none)."""
    for reduction in reductions:
        compare(c.but(reduction=reduction), "cpu", f"{what}, {reduction}")
        compare(c.but(reduction=reduction).shaped(1, c.inputs[0].shape[0], 1), "cpu", f"{what} as pixels, {reduction}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("classes", [5, 40, 3001])
@pytest.mark.parametrize("name", SELECTING)
def test_ties_across_the_boundary(name, classes, dtype):
    """Three values in all: every rank that is first or last is one of many equals, and the lowest classes win."""
    g = torch.Generator().manual_seed(classes)
    x = torch.randint(0, 3, (12, classes), generator=g).to(dtype) / 2
    x[3] = 0.5
    both_ways(made(name, x), name)


def test_the_lowest_classes_win():
    """Closed form, so that kernel and reference cannot be wrong together."""
    for classes in (6, 100):
        x = torch.zeros(1, classes)
        x[0, 4] = 1.0
        want = torch.zeros(1, classes)
        want[0, 4], want[0, 1:3] = -1.0, 2.0  # ranks: 4, 0, 1, 2, 3, ...; one skipped, two selected
        for reduction in ("sum", "none"):
            leaf = x.clone().requires_grad_()
            pylosses.tta_loss(leaf, k=2, skip=1, lam=2.0, form="logit", reduction=reduction, backend="cpu").sum().backward()
            assert torch.equal(leaf.grad, want)


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_sorted_rows(name, order):
    """Rising rows enter every class into the ranking, falling ones only the first."""
    x = torch.linspace(-4, 4, 2500).repeat(3, 1) + torch.tensor([[0.0], [0.25], [-3.0]])
    both_ways(made(name, x if order == "rising" else x.flip(1).contiguous()), f"{name}, {order}")


@pytest.mark.parametrize("classes", [1, 2, 3, 6, 7, 10, 33])
@pytest.mark.parametrize("name", SELECTING)
def test_fewer_classes_than_selected(name, classes):
    g = torch.Generator().manual_seed(classes)
    both_ways(made(name, torch.randn(9, classes, generator=g)), name)


@pytest.mark.parametrize("classes", [9, 60])
@pytest.mark.parametrize("name", SELECTING)
def test_fewer_unmasked_classes_than_selected(name, classes):
    """Rows that keep 1, 2, ... classes: masked ones rank last and have no gradient."""
    g = torch.Generator().manual_seed(classes)
    x = torch.randn(8, classes, generator=g)
    c = made(name, x)
    for row in range(8):
        keep = torch.randperm(classes, generator=g)[: row + 1]
        if len(c.inputs) == 2:
            keep = torch.cat([keep, c.inputs[1][row : row + 1]])
        x[row] = torch.full((classes,), -INF).scatter(0, keep, x[row][keep])
    both_ways(made(name, x), name)


AT_THE_LIMIT = [
    ("tta", {"k": 40, "skip": 23}),
    ("tta", {"k": 63, "skip": 0, "form": "logit"}),
    ("knl", {"k": 1, "skip": 62}),
    ("adr", {"top": 64}),
    ("adr_l1", {"top": 64, "phi": "variance"}),
    ("cross_entropy_adr", {"top": 64}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("classes", [64, 65, 700])
@pytest.mark.parametrize(("name", "arguments"), AT_THE_LIMIT)
def test_as_many_as_a_kernel_keeps(name, arguments, classes, dtype):
    g = torch.Generator().manual_seed(classes)
    x = (2 * torch.randn(6, classes, generator=g)).to(dtype)
    x[1] = x[1].round()
    both_ways(made(name, x, **arguments), name)


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        ("tta_loss", {"k": 60, "skip": 4}, "1 + skip + k = 65"),
        ("knl_loss", {"k": 64, "skip": 0}, "1 + skip + k = 65"),
        ("adr_loss", {"top": 65}, "top = 65"),
        ("cross_entropy_adr", {"top": 65}, "top = 65"),
    ],
)
def test_more_than_a_kernel_keeps(function, arguments, reason):
    """The reference runs; asked for, the kernel says why it does not."""
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(0))
    inputs = (x, torch.tensor([1, 2, 3])) if function == "cross_entropy_adr" else (x,)
    loss = getattr(pylosses, function)
    with pytest.raises(BackendError, match=f"the {MOST_SELECTED} largest.*{reason.replace('+', '.')}"):
        loss(*inputs, backend="cpu", **arguments)
    assert torch.equal(loss(*inputs, **arguments), loss(*inputs, backend="reference", **arguments))


@pytest.mark.parametrize("gap", [5.0, 12.0, 25.0, 60.0])
@pytest.mark.parametrize("classes", [2, 20, 500])
@pytest.mark.parametrize("name", SELECTING)
def test_rows_that_few_classes_dominate(name, classes, gap):
    """Sums without the largest entry keep the digits that 1 - p needs; two classes lead in every second row."""
    x = torch.randn(8, classes, generator=torch.Generator().manual_seed(1))
    x[:, 1] += gap
    x[::2, 0] += gap
    both_ways(made(name, x), name, ("none", "mean"))  # whether e^-60 is above zero depends on the rounding of a log-softmax


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=["nan", "inf", "no_class"])
@pytest.mark.parametrize("classes", [7, 4500])
@pytest.mark.parametrize("name", SELECTING)
def test_rows_without_a_softmax(name, classes, bad):
    """NaN in loss and the whole gradient row, wherever the number is; dropped by the filter; through phi the whole batch."""
    x = torch.randn(4, classes, generator=torch.Generator().manual_seed(2))
    for place in (0, classes // 2, classes - 1):
        z = x.clone()
        z[2] = bad if bad == -INF else z[2].index_fill(0, torch.tensor(place), bad)
        c = made(name, z, reduction="none")
        hit = torch.tensor([c.arguments.get("scope") == "batch"] * 4)
        hit[2] = "max_entropy" not in c.arguments
        for shaped in (c, c.shaped(1, 4, 1)):
            got = run(shaped, "cpu")
            assert torch.equal(got.loss.reshape(-1).isnan(), hit)
            rows = got.grads[0].movedim(1, -1).reshape(4, classes)
            assert torch.equal(rows.isnan().all(dim=1), hit) and torch.equal(rows.isnan().any(dim=1), hit)


def soft(c: Case, backend: str, up: torch.Tensor) -> Result:
    x = c.inputs[0].detach().requires_grad_()
    loss = pylosses.cross_entropy_adr(x, c.inputs[1], backend=backend, **c.arguments)
    return Result(loss.detach(), torch.autograd.grad(loss, x, up.to(loss.dtype)))


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 6.0, "temperature": 0.7}, {"scope": "batch", "z_loss": 0.01, "label_smoothing": 0.1}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["float32", "float64", "bfloat16"])
def test_class_probabilities(dtype, options):
    """Soft targets beside ADR, by rows and as pixels, in both ways of the gradient."""
    from test_backends_agree import same_results

    for classes in (9, 50):
        g = torch.Generator().manual_seed(classes)
        x, t = (
            torch.randn(6, classes, generator=g).to(dtype),
            torch.softmax(torch.randn(6, classes, generator=g), dim=1).to(dtype),
        )
        for reduction in ("none", "mean"):
            arguments = {"top": 3, "gamma": 0.2, "reduction": reduction, "weight": torch.rand(classes, generator=g), **options}
            if dtype == torch.float64:
                arguments["weight"] = arguments["weight"].double()
            c = Case(LOSSES["cross_entropy_adr"], (x, t), arguments, classes)
            pixels = tuple(v.reshape(1, 6, 1, classes).movedim(-1, 1).contiguous() for v in (x, t))
            for shaped in (c, c._replace(inputs=pixels)):
                up = upstream_for(shaped)
                results = soft(shaped, "cpu", up), soft(shaped, "reference", up), soft(shaped.double(), "reference", up)
                same_results(shaped, f"soft targets, {reduction}", *results)


def test_the_gradient_does_not_depend_on_when_it_is_written():
    """Written in forward, or in backward from what was saved: the same numbers up to rounding, the same classes."""
    g = torch.Generator().manual_seed(5)
    for name in SELECTING:
        for classes in (12, 3000):
            c = made(name, 2 * torch.randn(5, classes, generator=g), reduction="sum")
            x = c.inputs[0].requires_grad_()
            loss = getattr(pylosses, c.spec.function)(*c.inputs, backend="cpu", **c.arguments)
            ahead, later = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
            assert torch.allclose(ahead, later, rtol=1e-5, atol=1e-7), name
