"""Losses as a user would write them with PyTorch: no guards, no options, the default arguments.

They stand wherever a speed-up is claimed. Other losses have none: their references take up to 40 times as long as such a
formula would, as they have every option and guard, so they are compared with but not timed. Half precision logits are computed
in float32, as autocast does for log_softmax and cross_entropy. Classes are dimension 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EAGER: dict[str, Callable[..., Tensor]] = {}


def eager(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the formula of the loss `name`."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        EAGER[name] = function
        return function

    return add


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _at_label(values: Tensor, y: Tensor) -> Tensor:
    return values.gather(1, y.unsqueeze(1)).squeeze(1)


@eager("cross_entropy")
def cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    return -_at_label(F.log_softmax(_full(x), dim=1), y).mean()


@eager("focal")
def focal(x: Tensor, y: Tensor) -> Tensor:
    logp = _at_label(F.log_softmax(_full(x), dim=1), y)
    return -((1 - logp.exp()) ** 2 * logp).mean()


@eager("logit_norm")
def logit_norm(x: Tensor, y: Tensor) -> Tensor:
    x = _full(x)
    return F.cross_entropy(x / (x.norm(dim=1, keepdim=True) + 1e-7) / 0.04, y)


def _margin_errors(x: Tensor, y: Tensor) -> Tensor:
    label = y.unsqueeze(1)
    return F.relu(x - x.gather(1, label) + 1).scatter(1, label, 0.0)


@eager("multi_margin")
def multi_margin(x: Tensor, y: Tensor) -> Tensor:
    return _margin_errors(_full(x), y).mean(dim=1).mean()


@eager("hem")
def hem(x: Tensor, y: Tensor) -> Tensor:
    errors = _margin_errors(_full(x), y)
    kept = errors >= errors.detach().mean(dim=1, keepdim=True)
    loss = (errors * kept).sum(dim=1) / kept.sum(dim=1)
    return loss.sum() / (loss > 0).sum()


@eager("dice")
def dice(x: Tensor, y: Tensor) -> Tensor:
    p = F.softmax(_full(x), dim=1)
    t = F.one_hot(y, x.shape[1]).movedim(-1, 1).to(p.dtype)
    over = [d for d in range(x.dim()) if d != 1]
    return (1 - 2 * (p * t).sum(over) / (p + t).sum(over)).mean()


@eager("dice_ce")
def dice_ce(x: Tensor, y: Tensor) -> Tensor:
    return dice(x, y) + F.cross_entropy(_full(x), y)


@eager("entropy")
def entropy(x: Tensor) -> Tensor:
    logp = F.log_softmax(_full(x), dim=1)
    return -(logp.exp() * logp).sum(dim=1).mean()


@eager("linear_cross_entropy")
def linear_cross_entropy(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(_full(F.linear(h, w)), y)


@eager("linear_hem")
def linear_hem(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return hem(F.linear(h, w), y)
