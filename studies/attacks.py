"""Projected gradient descent (PGD) against a classifier: weaker than AutoAttack, which the published numbers are of."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def pgd(model: nn.Module, x: Tensor, y: Tensor, *, norm: str, radius: float, steps: int, seed: int) -> Tensor:
    """Images within `radius` of `x` ("linf" or "l2") and in [0, 1] that the model should get wrong.

    A random start and `steps` steps of 2.5 / steps of the radius up the cross-entropy; rows that are still right are attacked
    once more down the distance of the label's logit to the largest other one, which no flat softmax hides.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    found = _ascend(model, x, y, _cross_entropy, norm, radius, steps, generator)
    with torch.no_grad():
        left = model(found).argmax(dim=1) == y
    if left.any():
        found[left] = _ascend(model, x[left], y[left], _other_minus_label, norm, radius, steps, generator)
    return found


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    # the plain one in float64: the gradient of a confident row must not vanish
    return nn.functional.cross_entropy(logits.double(), y, reduction="sum")


def _other_minus_label(logits: Tensor, y: Tensor) -> Tensor:
    label = logits.gather(1, y[:, None])
    return (logits.scatter(1, y[:, None], -torch.inf).amax(dim=1, keepdim=True) - label).sum()


def _ascend(model, x, y, objective, norm, radius, steps, generator):  # noqa: ANN001, ANN202
    offset = torch.empty_like(x).uniform_(-1, 1, generator=generator) * radius
    offset = _within(x, offset, norm, radius)
    for _ in range(steps):
        offset.requires_grad_()
        (gradient,) = torch.autograd.grad(objective(model(x + offset), y), offset)
        direction = gradient.sign() if norm == "linf" else gradient / _length(gradient)
        offset = _within(x, offset.detach() + 2.5 / steps * radius * direction, norm, radius)
    return x + offset


def _within(x: Tensor, offset: Tensor, norm: str, radius: float) -> Tensor:
    if norm == "linf":
        offset = offset.clamp(-radius, radius)
    else:
        offset = offset * (radius / _length(offset)).clamp(max=1)
    return (x + offset).clamp(0, 1) - x


def _length(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1).clamp(min=1e-12).reshape(-1, *[1] * (x.dim() - 1))
