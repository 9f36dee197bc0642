"""Feature contrastive learning: the training step is the plain formula, value and gradient; its schedule; what it measures."""

import copy

import pytest
import torch
from torch import Tensor, nn

import pylosses
from pylosses import fcl

N, SHAPE, C = 7, (1, 4, 5), 3


class Network(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 6))
        self.head = nn.Linear(6, C)
        self.double()

    def embed(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(N, *SHAPE, generator=g, dtype=torch.float64)
    return x, torch.arange(N) % C, torch.randn(N, *SHAPE, generator=g, dtype=torch.float64)


def plain(model: Network, x: Tensor, y: Tensor, noise: Tensor, *, k, sigma, t, weight, reduction, form, utility=None):
    """Algorithm 1 by hand; the utility and the loss."""
    rows = []
    for i in range(N):
        xi = x[i : i + 1].clone().requires_grad_()
        rows.append(torch.autograd.grad(nn.functional.cross_entropy(model(xi), y[i : i + 1]), xi)[0][0].abs())
    u = torch.stack(rows) if utility is None else utility
    high, low = torch.zeros_like(x), torch.zeros_like(x)
    for i in range(N):
        order = u[i].flatten().argsort()
        high[i].view(-1)[order[-k:]] = sigma * noise[i].flatten()[order[-k:]]
        low[i].view(-1)[order[:k]] = sigma * noise[i].flatten()[order[:k]]
    z, zp, zn = model.embed(x), model.embed(x + low), model.embed(x + high)
    total = x.new_zeros(())
    for i in range(N):
        dropped = u[i].max() < 1e-12
        if form == "margin":
            total = total + ((z[i] - zp[i]) ** 2).sum()
            if not dropped:
                total = total + torch.relu(1.5 - (z[i] - zn[i]).norm()) ** 2
            continue
        cos = nn.functional.cosine_similarity
        others = [cos(z[i], z[j], dim=0) for j in range(N) if j != i] + ([] if dropped else [cos(z[i], zn[i], dim=0)])
        scores = torch.stack([cos(z[i], zp[i], dim=0), *others]) / t
        total = total - scores.log_softmax(0)[0]
    return u, nn.functional.cross_entropy(model(x), y, reduction=reduction) + weight * total


@pytest.mark.parametrize("given", ["gradient", "of the step", "of all steps"])
@pytest.mark.parametrize("form", ["softmax", "margin"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_step_is_the_plain_formula(form, reduction, given):
    x, y, noise = batch()
    u = None
    if given != "gradient":
        u = torch.rand(N, *SHAPE, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        u[2] *= 1e-13  # its high perturbation is dropped
        u[3] *= 1e-11
    model, expected = Network(), Network()
    step = fcl.FeatureContrastive(
        model, model.embed, k=4, sigma=0.7, temperature=0.3, weight=0.2, form=form, gamma=1.5, reduction=reduction,
        utility=u if given == "of all steps" else None,
    )  # fmt: skip
    loss, parts = step.step(x, y, noise=noise, utility=u if given == "of the step" else None)
    loss.backward()
    utility, wanted = plain(expected, x, y, noise, k=4, sigma=0.7, t=0.3, weight=0.2, reduction=reduction, form=form, utility=u)
    wanted.backward()
    torch.testing.assert_close(parts.utility, utility, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=0)
    for p, e in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, e.grad, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(parts.classification + parts.weight * parts.contrastive, loss.detach())
    assert x.grad is None and not x.requires_grad


@pytest.mark.parametrize(
    "warmup, weights",
    [
        (0, [0.4] * 5),
        (4, [0.0, 0.1, 0.2, 0.3, 0.4, 0.4]),
        ((2, 4), [0.0, 0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.4]),
        ((2, 0), [0.0, 0.0, 0.4, 0.4]),
    ],
)
def test_warm_up(warmup, weights):
    x, y, noise = batch()
    model = Network()
    step = fcl.FeatureContrastive(model, model.embed, k=4, weight=0.4, warmup=warmup)
    seen = []
    for i in range(len(weights)):
        if i == 3:  # goes on after a checkpoint
            state = copy.deepcopy(step.state_dict())
            step = fcl.FeatureContrastive(model, model.embed, k=4, weight=0.4, warmup=warmup)
            step.load_state_dict(state)
        loss, parts = step.step(x, y, noise=noise)
        assert (parts.contrastive == 0) == (parts.weight == 0)
        seen.append(parts.weight)
    assert seen == pytest.approx(weights)


def test_a_loss_of_the_catalogue_and_its_utility():
    x, y, noise = batch()
    model = Network()
    hem = lambda logits, target, reduction: pylosses.hem_loss(logits, target, margin=2.0, reduction=reduction)
    step = fcl.FeatureContrastive(model, model.embed, k=4, loss=hem, reduction="sum")
    _, parts = step.step(x, y, noise=noise)
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(hem(model(x), y, "sum"), x)
    torch.testing.assert_close(parts.utility, gradient.abs(), rtol=1e-10, atol=0)


def test_the_noise_comes_from_the_generator():
    x, y, _ = batch()
    model = Network()

    def loss(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return fcl.FeatureContrastive(model, model.embed, k=4, generator=generator).step(x, y)[0]

    assert torch.equal(loss(1), loss(1)) and not torch.equal(loss(1), loss(2))


def test_sensitivity_is_the_jacobians_norm():
    x, _, noise = batch()
    model = Network()
    jacobian = torch.stack([torch.autograd.functional.jacobian(model.embed, x[i : i + 1])[0, :, 0] for i in range(N)])
    torch.testing.assert_close(fcl.sensitivity(model.embed, x), jacobian.square().sum(dim=1).sqrt(), rtol=1e-10, atol=0)
    moved = (model.embed(x + noise) - model.embed(x)).norm(dim=1)
    torch.testing.assert_close(fcl.sensitivity(model.embed, x, noise), moved.detach())


@pytest.mark.parametrize("blank", [None, 0])
def test_discrete_utility_takes_each_token_away(blank):
    torch.manual_seed(0)
    table, head = nn.Embedding(11, 8).double(), nn.Linear(8, C).double()
    model = lambda tokens: head(torch.tanh(table(tokens)).mean(dim=1))
    tokens, target = torch.randint(1, 11, (5, 6)), torch.arange(5) % C
    got = fcl.discrete_utility(model, tokens, target, blank=blank)
    loss = lambda sequence, label: nn.functional.cross_entropy(model(sequence[None]), label[None])
    for n in range(5):
        for i in range(6):
            rest = [int(t) for j, t in enumerate(tokens[n]) if j != i]
            if blank is not None:
                rest.insert(i, blank)
            wanted = (loss(torch.tensor(rest), target[n]) - loss(tokens[n], target[n])).abs()
            torch.testing.assert_close(got[n, i], wanted.detach(), rtol=1e-9, atol=1e-12)
    assert not got.requires_grad


@pytest.mark.parametrize(
    "error, message, call",
    [
        (TypeError, "input must be a floating Tensor.*int64", lambda s: s.step(torch.ones(2, 3, dtype=torch.long), None)),
        (ValueError, "form must be one of 'softmax', 'margin', got 'cosine'", lambda s: made(form="cosine")),
        (ValueError, "warmup", lambda s: made(warmup=(-1, 2))),
        (ValueError, "perturbation must have", lambda s: fcl.sensitivity(s.embed, torch.ones(2, 3), torch.ones(3))),
        (ValueError, "tokens must have shape", lambda s: fcl.discrete_utility(s.model, torch.ones(3), torch.ones(3))),
    ],
)  # fmt: skip
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call(made())


def made(**more) -> fcl.FeatureContrastive:
    model = Network()
    return fcl.FeatureContrastive(model, model.embed, **more)
