"""Row losses to one number: none / mean / sum / above_zero, weights, ignored rows, normalizer. Plain PyTorch, once.

    none        s_n L_n, shaped like the labels, 0 at ignored rows
    sum         sum of s_n L_n
    mean        sum of s_n L_n / sum of s_n w_n        over live rows
    above_zero  the same over live rows with L_n > 0

with s_n = sample_weight and w_n the row's mass (its class weight, or 1). A divisor of zero gives 0, connected to the graph; any
other divides, one below zero or NaN too.
The fused kernels do this themselves, in the same call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .check import Problem


class RowLoss(NamedTuple):
    """What a reference returns for R rows."""

    value: Tensor  # (R) row loss, class weights included
    mass: Tensor | None = None  # (R) the row's share of the mean's divisor; None is 1. 0 drops the row
    extra: Tensor | None = None  # (R) a second term that is averaged without class weights (z-loss)


def weighted(w: Tensor | float, value: Tensor) -> Tensor:
    """w value, and 0 where w is 0, be the value infinite; NaN shows."""
    if not isinstance(w, Tensor):
        w = torch.full_like(value, w)
    return torch.where((w == 0) & ~value.isnan(), 0, w * value)


def reduce(loss: RowLoss, live: Tensor | None, problem: Problem) -> Tensor:
    """Reduce `loss` over the rows that are `live` (None: all)."""
    value, extra = loss.value, loss.extra
    s = torch.ones_like(value) if problem.sample_weight is None else problem.sample_weight.reshape(-1)
    counted = s if live is None else torch.where(live, s, 0)
    mass = counted if loss.mass is None else counted * loss.mass
    # An ignored row is out by selection, not by a factor: 0 * NaN is NaN.
    if live is not None:
        value = torch.where(live, value, 0)
        extra = extra if extra is None else torch.where(live, extra, 0)
    total = value if extra is None else value + extra
    if problem.reduction == "none":
        return weighted(s, total).reshape(problem.shape)
    if problem.reduction == "sum":
        return weighted(s, total).sum()
    if problem.reduction == "above_zero":
        above = ~(s * total <= 0)  # keeps NaN rows, so that they show
        value = torch.where(above, value, 0)
        extra = extra if extra is None else torch.where(above, extra, 0)
        mass, counted = torch.where(above, mass, 0), torch.where(above, counted, 0)
    mean = _divide(weighted(s, value).sum(), mass.sum(), problem.normalizer)
    if extra is None:
        return mean
    return mean + _divide(weighted(s, extra).sum(), counted.sum(), problem.normalizer)


def _divide(total: Tensor, mass: Tensor, normalizer: float | Tensor | None) -> Tensor:
    if isinstance(normalizer, float):
        return total / normalizer
    if normalizer is not None:
        mass = normalizer.to(total)
    mass = mass.detach()
    some = mass != 0
    return total * some / torch.where(some, mass, 1)
