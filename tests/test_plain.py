"""Is the answer right, or a clear refusal, where something stands between the call and plain strided memory on one device?

Another default device, a tracer, a lazy sign, a layout that is not strided, a wrapper, a batch of gradients, a forward-mode
derivative: kernels get pointers and see nothing of these.
"""

import pytest
import torch
from cases import LABELLED, UNLABELLED, backends_of, case, finest, grid, own_case, run
from tolerance import close

import pylosses
from pylosses.spec import LOSSES

ALL = grid(LABELLED + UNLABELLED)
FIRST = [p for p in ALL if p.values[1] == 0]
OWN = [
    pytest.param(s, i, *b.values, id=f"{s.name}{i}-{b.id}", marks=b.marks)
    for s in LOSSES.values()
    if s.family in ("linear", "contrastive") and s.module is not None and s.name != "utility_perturbation"
    for i in range(len(s.samples))
    for b in backends_of(s)
]
CE, SCORES = backends_of(LOSSES["cross_entropy"]), backends_of(LOSSES["confidence_scores"])


def same(found, wanted):
    """The same bits, loss and gradients."""
    assert torch.equal(found.loss, wanted.loss)
    assert all(torch.equal(a, b) for a, b in zip(found.grads, wanted.grads, strict=True))


# Another default device ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
def test_default_device(spec, sample, backend):
    """CPU logits stay on the CPU, whatever torch's default device is."""
    c = case(spec, sample, "plain")
    for c in (c, finest(c), c.shaped(13, 1)):
        wanted = run(c, backend)
        with torch.device("meta"):
            same(run(c, backend), wanted)


@pytest.mark.parametrize(("spec", "sample", "backend"), OWN)
def test_default_device_of_losses_with_own_inputs(spec, sample, backend):
    c = own_case(spec, sample, torch.float32)
    for c in (c, c.but(reduction="none")):
        wanted = run(c, backend)
        with torch.device("meta"):
            same(run(c, backend), wanted)


@pytest.mark.parametrize("reduction", ["mean", "above_zero", "none"])
@pytest.mark.parametrize("arguments", [{}, {"linear_bias": torch.ones(40), "sample_weight": torch.rand(200)}])
@pytest.mark.parametrize("loss", ["linear_cross_entropy", "linear_hem_loss"])
def test_default_device_of_blocks(loss, arguments, reduction):
    """Several blocks, rows that are ignored and rows without a loss between others."""
    g = torch.Generator().manual_seed(0)
    h, w = torch.randn(200, 8, generator=g), 4 * torch.randn(40, 8, generator=g)
    y = torch.where(torch.arange(200) % 3 == 0, (h @ w.T).argmax(dim=1), torch.arange(200) % 40)
    y[::7] = -100

    def found():
        leaves = h.clone().requires_grad_(), w.clone().requires_grad_()
        value = getattr(pylosses, loss)(*leaves, y, reduction=reduction, workspace=0, **arguments)
        return value, *torch.autograd.grad(value.sum(), leaves)

    wanted = found()
    with torch.device("meta"):
        assert all(torch.equal(a, b) for a, b in zip(found(), wanted, strict=True))


@pytest.mark.parametrize("backend", SCORES)
def test_default_device_of_scores(backend):
    x = torch.randn(6, 5)
    wanted = pylosses.confidence_scores(x, backend=backend)
    torch.set_default_device("meta")
    try:
        found = pylosses.confidence_scores(x, backend=backend)
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
