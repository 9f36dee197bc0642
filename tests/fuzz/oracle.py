"""What the losses are, written from their papers' formulas in plain PyTorch, apart from the package: nothing here imports it.

A loss sees only the rows that count, in the dtype it is given: float64 for the truth, float32 for what plain PyTorch gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

INF = float("inf")


class Terms(NamedTuple):
    """A row's loss, its share of a mean's divisor, and a second term that a mean divides without class weights."""

    value: Tensor  #: (R)
    mass: Tensor  #: (R)
    extra: Tensor | None = None  #: (R)


class Rows(NamedTuple):
    x: Tensor  #: (R, C) logits of the rows that count
    y: Tensor | None = None  #: (R) labels
    soft: Tensor | None = None  #: (R, C) probabilities in their place
    weight: Tensor | None = None  #: (C)

    def at_label(self, values: Tensor) -> Tensor:
        assert self.y is not None
        return values.gather(1, self.y[:, None])[:, 0] if values.dim() == 2 else values[self.y]

    def weighted(self, value: Tensor) -> Terms:
        """value times the label's class weight, which is also the mass; a weight of 0 is stronger than an infinite loss."""
        if self.weight is None:
            return Terms(value, torch.ones_like(value))
        mass = self.at_label(self.weight)
        return Terms(torch.where(mass == 0, 0, value) * mass, mass)


# Softmax ----------------------------------------------------------------------------------------------------------------------


def _times(q: Tensor, logp: Tensor) -> Tensor:
    """sum_j q_j log p_j where no mass times no probability is 0."""
    return (q * torch.where(q == 0, 0, logp)).sum(dim=1)


def cross_entropy(
    r: Rows, *, label_smoothing: float = 0.0, temperature: float = 1.0, softcap: float | None = None, z_loss: float = 0.0,
    bias: Tensor | None = None,
) -> Terms:  # fmt: skip
    u = r.x
    if softcap is not None:
        masked = u == -INF
        u = torch.where(masked, u, softcap * torch.tanh(torch.where(masked, 0, u) / softcap))
    u = u / temperature + (0 if bias is None else bias)
    logp, classes = torch.log_softmax(u, dim=1), u.shape[1]
    w = torch.ones_like(u[0]) if r.weight is None else r.weight
    extra = z_loss * torch.logsumexp(u, dim=1) ** 2 if z_loss else None
    if r.soft is not None:
        q = w * ((1 - label_smoothing) * r.soft + label_smoothing / classes)
        return Terms(-_times(q, logp), torch.ones_like(u[:, 0]), extra)
    assert r.y is not None
    onehot = torch.nn.functional.one_hot(r.y, classes).to(u)
    q = w * ((1 - label_smoothing) * onehot + label_smoothing / classes)
    return Terms(-_times(q, logp), w[r.y], extra)


def logit_adjusted(r: Rows, *, class_counts: Tensor, tau: float = 1.0) -> Terms:
    counts = class_counts.to(r.x)
    prior = torch.where(counts > 0, tau * torch.log(counts.clamp(min=1e-30) / counts.sum()), -INF)
    return cross_entropy(r, bias=prior)


def logit_norm(r: Rows, *, temperature: float = 0.04, eps: float = 1e-7) -> Terms:
    masked = r.x == -INF
    x = torch.where(masked, 0, r.x)
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    scale = 1 / (temperature * (norm + eps))
    u = torch.where(masked, r.x * scale.detach(), x * scale)  # the gradient of a masked label is that of a softmax
    return r.weighted(-r.at_label(torch.log_softmax(u, dim=1)))


def focal(r: Rows, *, gamma: float = 2.0, alpha: Tensor | None = None) -> Terms:
    return target(r, kind="focal", gamma=gamma, alpha=alpha)


def target(
    r: Rows, *, kind: str, gamma: float = 2.0, q: float = 0.7, tau: float = 1.0, n: float = 1.0, a: float = 1.0, b: float = 1.0,
    floor: float = -4.0, alpha: Tensor | None = None,
) -> Terms:  # fmt: skip
    logp = r.at_label(torch.log_softmax(r.x, dim=1))
    p = logp.exp()
    missed = -torch.expm1(logp)
    values: dict[str, Callable[[], Tensor]] = {
        "ce": lambda: -logp,
        "focal": lambda: -(missed.clamp(min=1e-300 if missed.dtype == torch.float64 else 1e-37) ** gamma) * logp,
        "gce": lambda: -torch.expm1(q * logp) / q,
        "mae": lambda: missed,
        "sumexp": lambda: torch.expm1(-logp),
        "compsum": lambda: -logp if tau == 1 else torch.expm1((tau - 1) * logp) / (1 - tau),
        "dco": lambda: -torch.log(-torch.expm1(n * torch.log1p(-p.clamp(max=1 - torch.finfo(p.dtype).eps)))),
        "sce": lambda: -a * logp - b * floor * missed,
    }
    value = values[kind]()
    return r.weighted(value if alpha is None else value * r.at_label(alpha.to(value)))


# Margins ----------------------------------------------------------------------------------------------------------------------


def multi_margin(r: Rows, **own: Any) -> Terms:
    return hem(r, threshold=False, above_zero=False, **own)


def hem(
    r: Rows, *, margin: float | Tensor = 1.0, power: float = 1.0, delta: float = 1e-4, margin_index: str = "logit",
    threshold: bool = True, above_zero: bool = True,
) -> Terms:  # fmt: skip
    assert r.y is not None
    if isinstance(margin, Tensor) and margin_index == "label":
        margin = margin[r.y][:, None]
    raw = (r.x - r.at_label(r.x)[:, None]) + margin
    others = torch.arange(r.x.shape[1]) != r.y[:, None]
    positive = others & (raw > 0)
    base = torch.where(positive, raw, 1)
    error = base**power
    if power < 1 and delta > 0:
        error = torch.where(base < delta, delta ** (power - 1) * base, error)
    error = torch.where(positive, error, 0)
    fixed = error.detach()
    kept = error > 0
    if threshold:
        kept = fixed >= torch.minimum(fixed.mean(dim=1), fixed.amax(dim=1))[:, None]
    divisor = kept.sum(dim=1).clamp(min=1) if above_zero else r.x.shape[1]
    return r.weighted(torch.where(kept, error, 0).sum(dim=1) / divisor)


# Without labels ---------------------------------------------------------------------------------------------------------------


def _entropy(x: Tensor) -> Tensor:
    logp = torch.log_softmax(x, dim=1)
    return -_times(logp.exp(), logp)


def _below(x: Tensor, value: Tensor, max_entropy: float | None) -> Terms:
    """Rows at or above the limit count neither in the loss nor in its divisor."""
    if max_entropy is None:
        return Terms(value, torch.ones_like(value))
    kept = _entropy(x.detach()) < max_entropy
    return Terms(torch.where(kept, value, 0), kept.to(value))


def _order(x: Tensor) -> Tensor:
    return x.detach().sort(dim=1, descending=True, stable=True).indices


def entropy(r: Rows, *, max_entropy: float | None = None) -> Terms:
    return _below(r.x, _entropy(r.x), max_entropy)


def tta(r: Rows, *, k: int = 5, skip: int = 5, lam: float = 1.0, form: str = "nl", max_entropy: float | None = None) -> Terms:
    value = -r.x.gather(1, _order(r.x)[:, :1])[:, 0] + lam * _negatives(r.x, k, skip, form)
    return _below(r.x, value, max_entropy)


def sparse_cl(r: Rows, *, weight: str = "one", max_entropy: float | None = None) -> Terms:
    top = _order(r.x)[:, :1]
    factor = torch.softmax(r.x.detach(), dim=1).gather(1, top) if weight == "prob" else 1
    return _below(r.x, -(factor * r.x.gather(1, top))[:, 0], max_entropy)


def knl(r: Rows, *, k: int = 5, skip: int = 5, form: str = "nl", max_entropy: float | None = None) -> Terms:
    return _below(r.x, _negatives(r.x, k, skip, form), max_entropy)


def _negatives(x: Tensor, k: int, skip: int, form: str) -> Tensor:
    ranks = _order(x)[:, skip + 1 : skip + 1 + k]
    if form == "logit":
        values = x.gather(1, ranks)
        return torch.where(values == -INF, 0, values).sum(dim=1)
    return -torch.log1p(-torch.softmax(x, dim=1).gather(1, ranks)).sum(dim=1)


def adr(
    r: Rows, *, top: int, phi: str = "entropy", scope: str = "sample", norm: str = "l2", form: str = "gauss",
    detach_phi: bool = False,
) -> Terms:  # fmt: skip
    p, classes = torch.softmax(r.x, dim=1), r.x.shape[1]
    largest = p.gather(1, _order(r.x)[:, :top])
    spread = (largest if norm == "l1" else largest**2).sum(dim=1)
    if phi == "entropy":
        unsure = _entropy(r.x) / math.log(max(classes, 2))
    else:
        unsure = classes / max(classes - 1, 1) * (p * (1 - p)).sum(dim=1)
    if scope == "batch":
        unsure = unsure.mean().expand_as(spread)
    if detach_phi:
        unsure = unsure.detach()
    sure = unsure.detach() < 1e-4  # there the exponential has won long ago
    unsure = torch.where(sure, 1, unsure)
    power = top / 2 if form == "gauss" else top
    value = torch.exp(-top / 2 * math.log(2 * math.pi) - power * unsure.log() - spread / (2 * unsure))
    return Terms(torch.where(sure, 0, value), torch.ones_like(value))


def cross_entropy_adr(r: Rows, *, top: int, gamma: float = 0.05, **own: Any) -> Terms:
    theirs = {k: own.pop(k) for k in ("phi", "scope", "norm", "form", "detach_phi") if k in own}
    ce, more = cross_entropy(r, **own), gamma * adr(r, top=top, **theirs).value
    return ce._replace(extra=more if ce.extra is None else ce.extra + more)


ROWS: dict[str, Callable[..., Terms]] = {
    f.__name__: f
    for f in (cross_entropy, logit_adjusted, logit_norm, focal, target, multi_margin, hem, entropy, tta, sparse_cl, knl, adr)
}
ROWS["cross_entropy_adr"] = cross_entropy_adr


# From rows to a loss ----------------------------------------------------------------------------------------------------------


def loss(
    name: str, x: Tensor, y: Tensor | None = None, *, soft: Tensor | None = None, live: Tensor,
    weight: Tensor | str | None = None, sample_weight: Tensor | None = None, reduction: str = "mean",
    normalizer: float | None = None, **own: Any,
) -> Tensor:  # fmt: skip
    """The loss of logits (N, C, *); `live` (N, *) are the positions that count."""
    classes = x.shape[1]
    if isinstance(weight, str):  # sparse-CL has an option of that name
        own, weight = {**own, "weight": weight}, None
    shape, live = live.shape, live.reshape(-1)
    rows = [t if t is None else t.movedim(1, -1).reshape(-1, classes)[live] for t in (x, soft)]
    labels = None if y is None else y.reshape(-1)[live].long()
    s = (torch.ones(shape, dtype=x.dtype) if sample_weight is None else sample_weight.to(x.dtype)).reshape(-1)[live]
    images = torch.arange(shape[0]).repeat_interleave(math.prod(shape[1:]))[live]
    r = Rows(rows[0], labels, rows[1], weight)
    if not len(s):
        return torch.where(x.isfinite(), x, 0).sum() * 0 + torch.zeros(shape if reduction == "none" else (), dtype=x.dtype)
    if name in ("dice", "dice_ce"):
        assert reduction in ("mean", "sum")
        ours = {k: own.pop(k) for k in ("smooth", "over", "absent") if k in own}
        factors = own.pop("dice_weight", 1.0), own.pop("ce_weight", 1.0)
        region = _dice(r if name == "dice" else r._replace(weight=None), s, images, shape[0], reduction, **ours)
        if name == "dice" or factors[1] == 0:  # 0 times an infinite cross-entropy is nothing
            return factors[0] * region
        return factors[0] * region + factors[1] * _reduced(cross_entropy(r, **own), s, reduction, None)
    terms = ROWS[name](r, **own)
    if reduction == "none":
        total = s * (terms.value if terms.extra is None else terms.value + terms.extra)
        return torch.zeros(len(live), dtype=x.dtype).masked_scatter(live, torch.where(s == 0, 0, total)).reshape(shape)
    return _reduced(terms, s, reduction, normalizer)


def _reduced(terms: Terms, s: Tensor, reduction: str, normalizer: float | None) -> Tensor:
    value, mass, extra = terms
    kept = s != 0
    value = torch.where(kept, value, 0)
    extra = torch.zeros_like(value) if extra is None else torch.where(kept, extra, 0)
    if reduction == "sum":
        return (s * (value + extra)).sum()
    if reduction == "above_zero":
        above = ~(s * (value + extra) <= 0)
        value, extra, mass, s = (torch.where(above, t, 0) for t in (value, extra, mass, s))
    return _quotient((s * value).sum(), (s * mass).sum(), normalizer) + _quotient((s * extra).sum(), s.sum(), normalizer)


def _quotient(total: Tensor, mass: Tensor, normalizer: float | None) -> Tensor:
    divisor = mass.detach() if normalizer is None else torch.tensor(normalizer, dtype=total.dtype)
    return torch.where(divisor == 0, 0, total / torch.where(divisor == 0, 1, divisor))


def _dice(
    r: Rows, s: Tensor, images: Tensor, count: int, reduction: str, smooth: float = 0.0, over: str = "batch",
    absent: str = "literal",
) -> Tensor:  # fmt: skip
    assert r.y is not None
    classes = r.x.shape[1]
    p = torch.softmax(r.x, dim=1)
    t = torch.nn.functional.one_hot(r.y, classes).to(p)
    group = torch.zeros_like(images) if over == "batch" else images
    means, present_images = [], 0
    for g in range(1 if over == "batch" else count):
        here = (group == g)[:, None] * s[:, None]
        hit, size, labelled = (here * t * p).sum(0), (here * (t + p)).sum(0), (here * t).sum(0)
        present = labelled > 0
        if not bool(present.any()):
            continue
        losses = 1 - (2 * hit + smooth) / torch.where(size + smooth == 0, 1, size + smooth)
        losses = torch.where(size + smooth == 0, 0, losses)
        if absent == "zero":
            losses = torch.where(present, losses, 0)
        w = torch.ones_like(losses) if r.weight is None else r.weight
        w = torch.where(present, w, 0) if absent == "exclude" else w
        if reduction == "sum":
            means.append((w * losses).sum())
        elif w.sum() != 0:
            means.append((w * losses).sum() / w.sum())
            present_images += 1
    total = sum(means, torch.zeros((), dtype=p.dtype)) + 0 * torch.where(r.x.isfinite(), r.x, 0).sum()
    return total if reduction == "sum" else total / max(present_images, 1)
