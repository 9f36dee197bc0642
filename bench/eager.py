"""Losses as a user would write them with PyTorch: no guards, no options, the default arguments.

Half precision logits are computed in float32, as autocast does for log_softmax and cross_entropy. Classes are dimension 1.
The references of pylosses take 1.2 to 40 times as long as most of these, as they have every option and guard, so only where
one takes about as long (linear losses of its own, InfoNCE, the contrastive margin) does it stand in, under its own name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pylosses.spec import PerClass


@dataclass(frozen=True)
class Eager:
    """An eager formula and the arguments under which ours computes the same number."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)


EAGER: dict[str, Eager] = {}


def eager(name: str, /, **arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the formula of the loss `name`. `arguments` go to ours and, where the formula needs them, to the formula."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        EAGER[name] = Eager(function, arguments)
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


@eager("target", kind="gce", q=0.7)
def generalized_cross_entropy(x: Tensor, y: Tensor, kind: str, q: float) -> Tensor:
    p = _at_label(F.softmax(_full(x), dim=1), y)
    return ((1 - p**q) / q).mean()


@eager("logit_norm")
def logit_norm(x: Tensor, y: Tensor) -> Tensor:
    x = _full(x)
    return F.cross_entropy(x / (x.norm(dim=1, keepdim=True) + 1e-7) / 0.04, y)


@eager("logit_adjusted", class_counts=PerClass(1.0, 1000.0))
def logit_adjusted(x: Tensor, y: Tensor, class_counts: Tensor) -> Tensor:
    x = _full(x)
    prior = (class_counts.to(x.dtype) / class_counts.sum()).log()
    return F.cross_entropy(x + prior.view(-1, *[1] * (x.dim() - 2)), y)


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


def _entropies(x: Tensor) -> Tensor:
    logp = F.log_softmax(x, dim=1)
    return -(logp.exp() * logp).sum(dim=1)


@eager("entropy")
def entropy(x: Tensor) -> Tensor:
    return _entropies(_full(x)).mean()


@eager("sparse_cl")
def sparse_cl(x: Tensor) -> Tensor:
    return -_full(x).max(dim=1).values.mean()


@eager("knl")
def knl(x: Tensor) -> Tensor:
    x = _full(x)
    negatives = x.topk(11, dim=1).indices[:, 6:]  # the top 1 and the 5 next to it are skipped
    p = F.softmax(x, dim=1).gather(1, negatives)
    return -torch.log1p(-p).sum(dim=1).mean()


@eager("tta")
def tta(x: Tensor) -> Tensor:
    return sparse_cl(x) + knl(x)


@eager("adr", top=5)
def adr(x: Tensor, top: int) -> Tensor:
    x = _full(x)
    p = F.softmax(x, dim=1)
    phi = _entropies(x) / math.log(x.shape[1])
    largest = p.topk(top, dim=1).values.square().sum(dim=1)
    return ((2 * math.pi * phi) ** (-top / 2) * torch.exp(-largest / (2 * phi))).mean()


@eager("cross_entropy_adr", top=5)
def cross_entropy_adr(x: Tensor, y: Tensor, top: int) -> Tensor:
    return F.cross_entropy(_full(x), y) + 0.05 * adr(x, top)


@eager("feature_contrastive")
def feature_contrastive(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    a, b, c = (F.normalize(_full(t), dim=1) for t in (anchor, positive, negative))
    similarity = torch.cat([a @ a.T, (a * c).sum(dim=1, keepdim=True)], dim=1)
    y = torch.arange(len(a), device=a.device)
    similarity = similarity.scatter(1, y.unsqueeze(1), (a * b).sum(dim=1, keepdim=True))
    return F.cross_entropy(similarity / 0.1, y, reduction="sum")


@eager("linear_cross_entropy")
def linear_cross_entropy(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(_full(F.linear(h, w)), y)


@eager("linear_hem")
def linear_hem(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return hem(F.linear(h, w), y)


@eager("confidence_scores")
def confidence_scores(x: Tensor) -> tuple[Tensor, ...]:
    x = _full(x)
    p = F.softmax(x, dim=1)
    top = p.topk(min(100, x.shape[1]), dim=1).values
    gen = -(top**0.1 * (1 - top) ** 0.1).sum(dim=1)
    return p.amax(dim=1), x.amax(dim=1), torch.logsumexp(x, dim=1), gen, -_entropies(x), x.argmax(dim=1)
