"""Statistics of rows whose classes lie on several ranks, and the gradient of this rank's part.

A pass measures a few numbers of every row, by collectives of that size, and knows how each of them changes with a logit. The
losses in parallel.py are formulas of these numbers, which autograd differentiates; what comes back from it, one number for each
statistic and row, is all that a rank needs for the gradient of its own logits. So backward sends nothing, except the sum of the
gradient of a linear layer's input.

Rows are taken in blocks, and everything of a block is done before the next: its logits are read (or made, by a linear layer)
once in forward and once in backward, and nothing larger than `workspace` is held beside the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .check import label_shape
from .linear_fused import Factors, Gradients, _logits
from .losses.hem import _power
from .parallel_group import Group, Layout

_FEWEST_ROWS = 16
_HELD = 8  # numbers a logit of a block: the logits, their map, and what a pass makes of them

_Take = slice | Tensor  # which rows: a range, or their numbers


@dataclass
class Block:
    """Some rows, as this rank sees them."""

    x: Tensor  # (r, c) logits in the dtype of the statistics
    y: Tensor | None  # (r) labels among all C classes
    soft: Tensor | None  # (r, c) probabilities
    layout: Layout
    group: Group

    def __post_init__(self) -> None:
        if self.y is not None:
            self.mine = (self.y >= self.layout.start) & (self.y < self.layout.stop)
            self.place = torch.where(self.mine, self.y - self.layout.start, 0)[:, None]

    def label(self, values: Tensor) -> Tensor:
        """(r) values at the label where it is among this rank's classes, else 0."""
        if values.shape[1] == 0:
            return values.sum(dim=1)
        return torch.where(self.mine, values.gather(1, self.place)[:, 0], 0)

    def without_label(self, values: Tensor) -> Tensor:
        """`values` with -inf at the label."""
        if values.shape[1] == 0:
            return values
        return values.scatter(1, self.place, torch.where(self.mine[:, None], -torch.inf, values.gather(1, self.place)))

    def add_to_label(self, gradient: Tensor, values: Tensor) -> None:
        if gradient.shape[1] > 0:
            gradient.scatter_add_(1, self.place, torch.where(self.mine, values, 0)[:, None])


def _largest(values: Tensor) -> Tensor:
    """(r) maxima of (r, c); -inf without classes."""
    return values.amax(dim=1) if values.shape[1] > 0 else values.new_full((len(values),), -torch.inf)


Values = dict[str, Tensor]  # statistics of rows: (R) or (R, k)


@dataclass(frozen=True)
class Softmax:
    """Statistics of softmax(u), u = softcap(x) / temperature + shift, or u = x / (temperature (|x| + eps)).

    odds      log of the sum of e^u over all classes but the label, minus the label's u      if labelled
    lse       log of the sum of e^u over all classes, minus `peak`, which is a constant      differentiable if partition
    nll       sum of q_j (log of the sum of e^u - u_j), q = mass or mass (keep soft + spread)  if mass
    entropy   -sum of p log p                                                               if entropy
    variance  sum of p (1 - p)                                                              if variance
    top       (R, k) the largest u in descending order, the lowest class first among equals   if top
    chances   (R, k) their probabilities                                                    if top
    """

    labelled: bool = False
    partition: bool = False
    temperature: float = 1.0
    softcap: float | None = None
    shift: Tensor | None = None  # (c)
    eps: float | None = None  # divide by the norm too
    mass: Tensor | None = None  # (c)
    soft: tuple[float, float] | None = None  # keep, spread
    entropy: bool = False
    variance: bool = False
    top: int = 0

    @property
    def differentiable(self) -> tuple[str, ...]:
        return ("odds", "nll", "entropy", "variance", "top", "chances", *(("lse",) if self.partition else ()))

    def measure(self, block: Block) -> Values:
        found: Values = {}
        group, x = block.group, block.x
        if self.eps is not None:
            found["norm"] = _norm(block)
        u = self._mapped(x, found)
        others = block.without_label(u) if self.labelled else u
        (peak,) = group.max(_largest(others))
        empty = peak == -torch.inf
        found["peak"] = peak = torch.where(empty, 0, peak)
        e = torch.exp(others - peak[:, None])
        if self.labelled:
            given = [block.label(u)]
            if self.eps is not None:
                unmasked = _unmasked(x)
                given += [(e * unmasked).sum(dim=1), block.label(unmasked)]
            total, label, *rest = group.sum(e.sum(dim=1), *given)
            if rest:
                found["moment"] = torch.where(total > 0, rest[0] / total, 0) - rest[1]
            label = torch.where(label == torch.inf, torch.nan, label) - peak
            found["rest"] = total.log()
            found["odds"] = found["rest"] - label
            found["lse"] = torch.logaddexp(found["rest"], label)
        else:
            # The largest e is 1: in float64 its sum with the others is exact enough for the logarithm of a confident row.
            given = [e.sum(dim=1, dtype=torch.float64)]
            if self.entropy:
                given.append((e * _unmasked(u - peak[:, None])).sum(dim=1, dtype=torch.float64))
            total, *moment = group.sum(*given)
            lse = torch.where(empty, torch.nan, total.log())
            found["lse"] = lse.to(x.dtype)
            if self.entropy:
                found["entropy"] = (lse - moment[0] / total).to(x.dtype)  # both terms are positive: nothing cancels
        del e, others
        if self.mass is not None or self.variance:
            sums: Values = {}
            logp = u - peak[:, None] - found["lse"][:, None]
            if self.mass is not None:
                q = self._mass(block)
                sums["nll"] = torch.where(q == 0, 0, -q * logp).sum(dim=1)
                sums["quantity"] = q.expand_as(logp).sum(dim=1)
            if self.variance:
                sums["variance"] = -(logp.exp() * torch.expm1(logp)).sum(dim=1)
            found |= zip(sums, group.sum(*sums.values()), strict=True)
        if self.top:
            found["top"], found["places"] = _top(block, u, self.top)
            found["chances"] = (found["top"] - peak[:, None] - found["lse"][:, None]).exp()
        return found

    def gradient(self, block: Block, v: SimpleNamespace, up: SimpleNamespace) -> Tensor:
        x = block.x
        u = self._mapped(x, vars(v))
        u = u - v.peak[:, None]
        g = torch.zeros_like(u)
        if self.labelled:
            rest = torch.where(v.rest == -torch.inf, 0, v.rest)  # then there are no others, and all of e^u are 0
            g += up.odds[:, None] * torch.exp(block.without_label(u) - rest[:, None])
            block.add_to_label(g, -up.odds)
        if self.partition or self.mass is not None or self.entropy or self.variance or self.top:
            logp = u - v.lse[:, None]
            change = (up.lse if self.partition else torch.zeros_like(v.lse))[:, None]  # of the row for 1 of p
            if self.mass is not None:
                change = change + (up.nll * v.quantity)[:, None]
                g -= up.nll[:, None] * self._mass(block)
            if self.entropy:
                change = change - up.entropy[:, None] * (torch.where(logp == -torch.inf, 0, logp) + v.entropy[:, None])
            if self.variance:
                change = change - 2 * up.variance[:, None] * (torch.expm1(logp) + v.variance[:, None])
            if self.top:
                change = change - (up.chances * v.chances).sum(dim=1, keepdim=True)
                change = _add_at(change.expand_as(u).clone(), v.places, up.chances, block.layout)
            g += change * logp.exp()
        if self.top:
            _add_at(g, v.places, up.top, block.layout)
        if self.eps is not None:
            bend = up.odds * v.moment / torch.where(v.norm == 0, torch.inf, v.norm * (v.norm + self.eps))
            return self._scale(v.norm) * (g - torch.where(x == -torch.inf, 0, x * bend[:, None]))
        if self.softcap is not None:
            g *= torch.where(x == -torch.inf, 1, 1 - torch.tanh(x / self.softcap).square())
        return g / self.temperature

    def _mapped(self, x: Tensor, found: Values) -> Tensor:
        if self.eps is not None:
            return x * self._scale(found["norm"])
        if self.softcap is not None:
            x = torch.where(x == -torch.inf, x, self.softcap * torch.tanh(x / self.softcap))
        x = x / self.temperature if self.temperature != 1 else x
        return x if self.shift is None else x + self.shift

    def _scale(self, norm: Tensor) -> Tensor:
        assert self.eps is not None
        return (1 / (self.temperature * (norm + self.eps)))[:, None]

    def _mass(self, block: Block) -> Tensor:
        assert self.mass is not None
        if self.soft is None:
            return self.mass
        assert block.soft is not None
        keep, spread = self.soft
        return (keep * block.soft + spread) * self.mass


def _add_at(sums: Tensor, places: Tensor, values: Tensor, layout: Layout) -> Tensor:
    """`sums` (r, c) plus values (r, k) at those of the classes `places` (r, k) that this rank has."""
    if sums.shape[1] == 0:
        return sums
    here = (places >= layout.start) & (places < layout.stop)
    return sums.scatter_add_(1, torch.where(here, places - layout.start, 0), torch.where(here, values, 0))


def _unmasked(x: Tensor) -> Tensor:
    return torch.where(x == -torch.inf, 0, x)


def _norm(block: Block) -> Tensor:
    """(r) Euclidean norms over all ranks; squares of numbers of size 1, so that they neither overflow nor vanish."""
    x = _unmasked(block.x)
    (largest,) = block.group.max(_largest(x.abs()).clamp(min=0))
    size = torch.where(largest > 0, largest, 1)
    (squares,) = block.group.sum((x / size[:, None]).square().sum(dim=1))
    return torch.where(largest == 0, squares, size * squares.sqrt())  # 0, or NaN that the maximum did not show


def _top(block: Block, u: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of all ranks (r, count) with their classes: each rank sends its own candidates."""
    u = torch.where(u.isnan(), torch.inf, u)  # such a row has no loss anyway, but it must have an order
    candidates = u.new_full((len(u), count), -torch.inf)
    places = torch.full((len(u), count), block.layout.total, device=u.device)  # no class, and behind masked ones, its equals
    few = min(count, u.shape[1])
    if few:
        # Among equals at the end of the list the lowest classes are in it, which topk does not promise.
        last = u.topk(few, dim=1).values[:, -1:]
        equal = u == last
        room = few - (u > last).sum(dim=1, keepdim=True)
        chosen = (u > last) | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room))
        index = chosen.nonzero()[:, 1].view(len(u), few)
        candidates[:, :few], places[:, :few] = u.gather(1, index), index + block.layout.start
    values, classes = torch.cat(block.group.gather(candidates), dim=1), torch.cat(block.group.gather(places), dim=1)
    # By class first: the sort keeps the order of equals.
    order = classes.argsort(dim=1, stable=True)
    values, classes = values.gather(1, order), classes.gather(1, order)
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return values.gather(1, order), classes.gather(1, order)


@dataclass(frozen=True)
class Margin:
    """Statistics of the margin errors e_j = h(x_j - x_y + margin).

    kept   sum of the errors that reach their mean (or, without `threshold`, of all that are positive)
    count  how many these are
    bad    the row has a NaN, or no class
    """

    margin: float | Tensor  # or (c), or with `by_label` (C)
    by_label: bool
    power: float
    delta: float
    threshold: bool

    differentiable = ("kept",)

    def measure(self, block: Block) -> Values:
        group, x = block.group, block.x
        label, some = group.sum(block.label(x), (x != -torch.inf).sum(dim=1).to(x.dtype))
        raw = self._raw(block, label)
        errors = _power(raw, self.power, self.delta)
        total, nan = group.sum(errors.sum(dim=1), raw.isnan().any(dim=1).to(x.dtype))
        (largest,) = group.max(_largest(errors).clamp(min=0))
        mean = torch.minimum(total / block.layout.total, largest)  # rounding may lift the mean over all
        kept = self._kept(errors, mean)
        slopes = torch.where(kept, _slope(raw, self.power, self.delta), 0).sum(dim=1)
        found = group.sum(torch.where(kept, errors, 0).sum(dim=1), kept.sum(dim=1).to(x.dtype), slopes)
        bad = (nan > 0) | label.isnan() | (some == 0)
        return {"kept": found[0], "count": found[1], "slopes": found[2], "label": label, "mean": mean, "bad": bad}

    def gradient(self, block: Block, v: SimpleNamespace, up: SimpleNamespace) -> Tensor:
        raw = self._raw(block, v.label)
        kept = self._kept(_power(raw, self.power, self.delta), v.mean)
        g = up.kept[:, None] * torch.where(kept, _slope(raw, self.power, self.delta), 0)
        block.add_to_label(g, -up.kept * v.slopes)
        return g

    def _raw(self, block: Block, label: Tensor) -> Tensor:
        margin = self.margin
        if self.by_label:
            assert isinstance(margin, Tensor) and block.y is not None
            margin = margin[block.y][:, None]
        x = block.x
        return block.without_label(torch.where(x == -torch.inf, -torch.inf, x - label[:, None] + margin))

    def _kept(self, errors: Tensor, mean: Tensor) -> Tensor:
        return errors >= mean[:, None] if self.threshold else errors > 0


def _slope(raw: Tensor, power: float, delta: float) -> Tensor:
    """The derivative of `_power`."""
    positive = raw > 0
    if power == 1:
        return positive.to(raw.dtype)
    base = torch.where(positive, raw, 1)
    slope = power * base ** (power - 1)
    if power < 1 and delta > 0:
        slope = torch.where(base < delta, delta ** (power - 1), slope)
    return torch.where(positive, slope, 0)


Pass = Softmax | Margin


# Where the logits come from ---------------------------------------------------------------------------------------------------


class Logits:
    """This rank's logits (c), (N, c) or (N, c, *)."""

    def __init__(self, shape: torch.Size) -> None:
        self.rows = label_shape(shape).numel()

    def block(self, tensors: tuple[Tensor, ...], take: _Take, dtype: torch.dtype) -> Tensor:
        return pick(tensors[0], take).to(dtype)

    def gradients(self, tensors: tuple[Tensor, ...], wanted: tuple[bool, ...], dtype: torch.dtype) -> LogitsGradient:
        return LogitsGradient(tensors[0])


def _three(x: Tensor) -> Tensor:
    """(N, c, S) of (c), (N, c) or (N, c, *)."""
    if x.dim() == 1:
        return x[None, :, None]
    return x[:, :, None] if x.dim() == 2 else x.flatten(2)


def pick(x: Tensor, take: _Take) -> Tensor:
    """Rows (r, c) of this rank's part of logits or probabilities."""
    x = _three(x)
    if x.shape[2] == 1:
        return x[take, :, 0]
    index = _numbers(take, x.device)
    return x[index // x.shape[2], :, index % x.shape[2]]


def _numbers(take: _Take, device: torch.device) -> Tensor:
    return torch.arange(take.start, take.stop, device=device) if isinstance(take, slice) else take


class LogitsGradient:
    """The gradient of this rank's logits, in their dtype and memory format."""

    def __init__(self, x: Tensor) -> None:
        self.gradient = torch.zeros_like(x)
        self.view = _three(self.gradient)
        if self.view.data_ptr() != self.gradient.data_ptr():  # dimensions behind the classes that do not merge
            self.view = torch.zeros_like(self.view)

    def add(self, take: _Take, g: Tensor, tensors: tuple[Tensor, ...]) -> None:
        positions = self.view.shape[2]
        if positions == 1:
            self.view[take, :, 0] = g.to(self.view.dtype)
        else:
            index = _numbers(take, g.device)
            self.view[index // positions, :, index % positions] = g.to(self.view.dtype)

    def done(self, group: Group, tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        if self.view.data_ptr() != self.gradient.data_ptr():
            self.gradient.copy_(self.view.view(self.gradient.shape))
        return (self.gradient,)


class Head:
    """A linear layer: input (..., D), and this rank's part of its weight (c, D) and bias (c)."""

    def __init__(self, shape: torch.Size) -> None:
        self.rows = shape[:-1].numel()

    def block(self, tensors: tuple[Tensor, ...], take: _Take, dtype: torch.dtype) -> Tensor:
        h, w, b = tensors
        h = h.reshape(self.rows, h.shape[-1])[take].to(dtype)
        return _logits(h, w, None if b is None else b.to(dtype), out=h.new_empty(len(h), len(w)))

    def gradients(self, tensors: tuple[Tensor, ...], wanted: tuple[bool, ...], dtype: torch.dtype) -> HeadGradients:
        return HeadGradients(tensors, wanted, dtype)


class HeadGradients:
    """Those of the layer's tensors; that of its input is the sum over the ranks."""

    def __init__(self, tensors: tuple[Tensor, ...], wanted: tuple[bool, ...], dtype: torch.dtype) -> None:
        h, w, b = tensors
        self.factors, self.dtype = Factors(h, w, b, None, None), dtype
        self.sums = Gradients(self.factors, (*wanted, False, False), dtype)

    def add(self, take: _Take, g: Tensor, tensors: tuple[Tensor, ...]) -> None:
        h, w, _ = tensors
        if len(g):
            self.sums.add(g, h.reshape(-1, h.shape[-1])[take].to(self.dtype), take, w)

    def done(self, group: Group, tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        if self.sums.h is not None:
            group.add_up(self.sums.h)
        return self.sums.times(1.0, self.factors)[:3]


# One run ----------------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Passes over the rows of a call."""

    source: Logits | Head
    passes: tuple[Pass, ...]
    live: Tensor | None  # (K) the rows that count; None is all
    y: Tensor | None  # (K)
    soft: Tensor | None  # like the logits
    layout: Layout
    group: Group
    dtype: torch.dtype
    workspace: int

    def statistics(self, *tensors: Tensor | None) -> list[SimpleNamespace]:
        """What each pass measures of the K rows."""
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            names: list[list[str]] = []
            return _named(names, _Measure.apply(self, names, *tensors))
        return [SimpleNamespace(**part) for part in self.measure(tensors)]

    def measure(self, tensors: Any) -> list[Values]:
        """The same, without a graph."""
        parts: list[list[Values]] = [[] for _ in self.passes]
        for take, mine in self.blocks():
            block = self.block(tensors, take, mine)
            for found, p in zip(parts, self.passes, strict=True):
                found.append(p.measure(block))
        return [{name: torch.cat([part[name] for part in found]) for name in found[0]} for found in parts]

    def gradients(self, tensors: Any, wanted: Any, values: list[SimpleNamespace], ups: list[SimpleNamespace]) -> Any:
        # A row that nothing comes back for has no gradient, whatever its numbers are, and its logits are not needed again.
        coming = [t if t.dim() == 1 else t.abs().sum(dim=1) for up in ups for t in vars(up).values()]
        some = torch.stack(coming).ne(0).any(dim=0).nonzero()[:, 0]
        run = self
        if len(some) < len(coming[0]):
            live, y = some if self.live is None else self.live[some], None if self.y is None else self.y[some]
            run, values, ups = self._replace(live=live, y=y), _taken(values, some), _taken(ups, some)
        sums = self.source.gradients(tensors, wanted, self.dtype)
        for take, mine in run.blocks():
            block = run.block(tensors, take, mine)
            parts = zip(self.passes, _taken(values, mine), _taken(ups, mine), strict=True)
            first, *others = (p.gradient(block, v, up) for p, v, up in parts)
            for other in others:
                first += other
            sums.add(take, first, tensors)
        return sums.done(self.group, tensors)

    def block(self, tensors: Any, take: _Take, mine: slice) -> Block:
        y = None if self.y is None else self.y[mine]
        soft = None if self.soft is None else pick(self.soft, take).to(self.dtype)
        return Block(self.source.block(tensors, take, self.dtype), y, soft, self.layout, self.group)

    def blocks(self) -> Iterator[tuple[_Take, slice]]:
        """Which rows of the call, and which of the K; the same blocks on all ranks, and one at least."""
        count = self.source.rows if self.live is None else len(self.live)
        size = max(self.workspace // (self.dtype.itemsize * _HELD * self.layout.largest), _FEWEST_ROWS)
        for first in range(0, max(count, 1), size):
            mine = slice(first, min(first + size, count))
            yield mine if self.live is None else self.live[mine], mine


def _taken(parts: list[SimpleNamespace], rows: _Take) -> list[SimpleNamespace]:
    return [SimpleNamespace(**{name: t[rows] for name, t in vars(part).items()}) for part in parts]


def _named(names: list[list[str]], flat: Any) -> list[SimpleNamespace]:
    tensors = iter(flat)
    return [SimpleNamespace(**{name: next(tensors) for name in part}) for part in names]


class _Measure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, names: list[list[str]], *tensors: Any) -> tuple[Tensor, ...]:
        values = run.measure(tensors)
        names += [list(part) for part in values]
        flat = tuple(t for part in values for t in part.values())
        fixed = [t for p, part in zip(run.passes, values, strict=True) for n, t in part.items() if n not in p.differentiable]
        ctx.mark_non_differentiable(*fixed)
        ctx.save_for_backward(*tensors, *flat)
        ctx.run, ctx.names = run, names
        return flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *ups: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[2:]
        everything = ctx.saved_tensors  # once: reading them again is an error under a checkpoint
        tensors, saved = everything[: len(wanted)], everything[len(wanted) :]
        back = [
            SimpleNamespace(**{name: t for name, t in vars(part).items() if name in p.differentiable})
            for p, part in zip(ctx.run.passes, _named(ctx.names, ups), strict=True)
        ]
        return None, None, *ctx.run.gradients(tensors, wanted, _named(ctx.names, saved), back)
