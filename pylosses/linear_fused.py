"""Losses of a linear layer's output on the CPU, without ever holding all logits.

    x = h W^T + b      G = dL/dx      dh = G W      dW = G^T h      db = sum of the rows of G

Rows are taken in blocks. A matrix product makes the logits of a block, the row kernel turns them into their loss and, in the
same memory, into G, and the other products follow while G is hot: nothing is computed twice. So the gradients are ready when
forward ends, for an upstream gradient of 1; backward multiplies them by the one that comes. Only `reduction="none"`, where it
is a vector, and a second backward make the logits again, block by block.

Rows that cannot matter cost nothing: ignored rows are left out of the first product, and rows without a margin loss, whose G is
zero, of those behind it.

Some logits may be given instead of computed, a few in each row: that is how a contrastive loss has its own pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cpu, linear_triton
from .autograd import Call, twice
from .check import bad_label
from .parallel_group import ShardedHead
from .plain import TYPES, is_batch, is_eager, is_plain

#: Default bytes of a block. The products take some 15 MiB of their own.
WORKSPACE = 48 * 2**20

# Every block reads the head twice and its gradient once: 410 rows a block take 1.07 times as long as 512, 228 rows 1.2 times,
# 120 rows 1.5 times (2048 x 32000 x 1024, two threads).
_ROWS = 512
_FEWEST_ROWS = 16
_MANY_CLASSES = 1024
_SMALL = 2**20  # numbers: blocks of few classes have more rows, up to this size
_SMALL_PRODUCT = 2**24  # multiplications: in smaller products, finding the rows that cannot matter takes longer than their part
_PART = 2**22  # bytes of a head in half precision that are converted at a time


class Product(Tensor):
    """The logits h W^T + b while nobody has made them: shape and dtype, and no memory of their own."""

    h: Tensor  # (D), (N, D) or (N, ..., D)
    w: Tensor  # (C, D)
    b: Tensor | None  # (C)
    workspace: int
    given: tuple[Tensor, Tensor] | None  # (N, K) classes and their logits, in the place of the product's

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def made(self, ignored: Tensor | None) -> Tensor:
        """The logits. A NaN in the features of ignored rows must not reach the gradient of the weight."""
        h = self.h if ignored is None else self.h.masked_fill(ignored.unsqueeze(-1), 0)
        return made(h, self.w, self.b, self.given)

    def stays_unmade(self, backend: str, soft: bool) -> bool:
        """Whether `backend` has the loss of logits that are not there; `soft`: with class probabilities as targets."""
        return backend == "cpu" or (backend == "triton" and self.given is None and not soft)


def product(
    h: Tensor, w: Tensor, b: Tensor | None, workspace: int = WORKSPACE, given: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The logits (C), (N, C) or (N, C, ...), the classes second as the row losses have them: a `Product` where blocks can be
    made later, else the tensor."""
    if isinstance(w, ShardedHead):
        return w.logits(h)
    if not (is_eager() and all(is_plain(t) for t in (h, w, b) if t is not None)):
        return made(h, w, b, given)
    x = torch.empty((), dtype=_dtype(h, w), device=h.device).expand(*h.shape[:-1], len(w))
    x = (x.movedim(-1, 1) if x.dim() > 2 else x).as_subclass(Product)
    x.h, x.w, x.b, x.workspace, x.given = h, w, b, workspace, given
    return x


_BIASES = (*TYPES, type(None))


def fits(h: Tensor, w: Tensor, b: Tensor | None, workspace: int, sparing: bool) -> bool:
    """Whether the logits are best stored: they, their gradient and what is converted for them take at most `workspace`.

    `sparing`: there may be rows that blocks leave out, which is worth it in a large product.
    """
    if (
        not h.is_cpu
        or torch.is_autocast_enabled("cpu")
        or type(h) not in TYPES
        or type(w) not in TYPES
        or type(b) not in _BIASES
    ):
        return False
    rows, size = h.shape[:-1].numel(), w.numel()
    if sparing and rows * size > _SMALL_PRODUCT:
        return False
    dtype = _dtype(h, w)
    converted = (0 if h.dtype == dtype else h.numel()) + (0 if w.dtype == dtype else size)
    return dtype.itemsize * 2 * (rows * w.shape[0] + converted) <= workspace


def _dtype(h: Tensor, w: Tensor) -> torch.dtype:
    """Of logits, statistics and sums."""
    return torch.float64 if torch.float64 in (h.dtype, w.dtype) else torch.float32


def made(h: Tensor, w: Tensor, b: Tensor | None, given: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The logits as `product` shapes them, by operations of torch."""
    dtype = _dtype(h, w)
    if (
        h.dtype == w.dtype == dtype and b is None and not torch.is_autocast_enabled(h.device.type)
    ):  # the quick way for short calls
        x = torch.nn.functional.linear(h, w)
    else:
        with torch.autocast(h.device.type, enabled=False):
            x = torch.nn.functional.linear(h.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
    if given is not None:
        x = x.scatter(1, given[0], given[1].to(dtype))
    return x.movedim(-1, 1) if x.dim() > 2 else x


def fused_product(call: Call, x: Product) -> Tensor:
    """The reduced loss of `call` on the logits that x stands for, differentiable once."""
    if call.backend == "triton":
        return linear_triton.fused(call, x.h, x.w, x.b)
    factors = Factors(x.h, x.w, x.b, *(x.given or (None, None)))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in factors):
        return FusedProduct.apply(*factors, call, x.workspace)
    return _run(call, factors, _NOTHING, x.workspace)[0]


class Factors(NamedTuple):
    """What the logits are made of."""

    h: Tensor
    w: Tensor
    b: Tensor | None
    classes: Tensor | None  # (N, K) where `values` are in the place of the product's logits
    values: Tensor | None


_Wanted = tuple[bool, ...]  # which of the factors need a gradient
_NOTHING = (False,) * 5


class FusedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        factors, call, workspace = Factors(*inputs[:5]), *inputs[5:]
        wanted = _NOTHING if call.reduction == "none" else ctx.needs_input_grad[:5]
        loss, ctx.ahead = _run(call, factors, wanted, workspace)
        ctx.save_for_backward(*factors, *call.tensors())
        ctx.call, ctx.workspace = call, workspace
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factors = Factors(*ctx.saved_tensors[:5])
        wanted = ctx.needs_input_grad[:5]
        if is_batch(grad):
            return *stored_gradients(ctx.call, factors, wanted, grad), None, None
        # Handed out once: they are the caller's then. A second backward, also one at the same time, finds none.
        gradients = ctx.__dict__.pop("ahead", None)
        if torch.is_grad_enabled():  # create_graph=True
            return *Once.apply(*factors, grad, ctx.call, wanted, ctx.workspace), None, None
        return *_backward(ctx.call, factors, wanted, ctx.workspace, grad, gradients), None, None


class Once(torch.autograd.Function):
    """Gradients that may be part of a graph but not be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        grad, call, wanted, workspace = inputs[5:]
        return _backward(call, Factors(*inputs[:5]), wanted, workspace, grad, None)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise twice("cpu")


def _backward(
    call: Call, factors: Factors, wanted: _Wanted, workspace: int, grad: Tensor, gradients: Gradients | None
) -> tuple[Tensor | None, ...]:
    if call.reduction == "none":
        gradients, factor = _run(call, factors, wanted, workspace, grad.reshape(-1))[1], 1.0
    else:
        gradients, factor = gradients or _run(call, factors, wanted, workspace)[1], grad.item()
    return gradients.times(factor, factors)


def stored_gradients(call: Call, factors: Factors, wanted: _Wanted, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients for an upstream gradient that is not plain: from logits that are all made."""
    from .compile import nothing, traced

    again = torch.is_grad_enabled()  # create_graph=True
    leaves: list[Any] = [t if t is None else t.detach().requires_grad_(want) for t, want in zip(factors, wanted, strict=True)]
    h, w, b, classes, values = leaves
    with torch.enable_grad():
        loss = traced(call, made(h, w, b, None if classes is None else (classes, values)))
    found = iter(torch.autograd.grad(loss, [t for t in leaves if t is not None and t.requires_grad], grad))
    gradients = [next(found) if want else None for want in wanted]
    if again:
        gradients = [g if g is None or t is None else g + nothing(call, t) for g, t in zip(gradients, factors, strict=True)]
    return tuple(gradients)


class Rows(NamedTuple):
    """The rows of a call, one after the other."""

    h: Tensor  # (N, D)
    y: Tensor | None  # (N)
    soft: Tensor | None  # (N, C)
    sample_weight: Tensor | None  # (N)
    live: Tensor | None  # (K) the rows that are not ignored; None is all

    def living(self) -> int:
        return len(self.h) if self.live is None else len(self.live)

    def pick(self, first: int, last: int) -> slice | Tensor:
        """What picks these of the live rows: nothing is copied when all are live."""
        return slice(first, last) if self.live is None else self.live[first:last]

    def part(self, call: Call, take: slice | Tensor) -> Call:
        """`call` on some of the rows."""
        y, soft, s = (None if t is None else t[take] for t in (self.y, self.soft, self.sample_weight))
        return call._replace(y=y, soft=soft, sample_weight=s)

    def masses(self, weight: Tensor | None, counted: Tensor | None) -> tuple[float, float]:
        """What a mean over `counted` rows (None: all) divides by, with and without class weights."""
        s = self.h.new_ones(len(self.h), dtype=torch.float64) if self.sample_weight is None else self.sample_weight.double()
        s = s if counted is None else s[counted]
        count = float(s.sum())
        if weight is None or self.y is None:
            return count, count
        return float((s * weight[self.y if counted is None else self.y[counted]]).sum()), count


def _rows(call: Call, h: Tensor, classes: int) -> Rows:
    h = h.reshape(h.shape[:-1].numel(), h.shape[-1])
    soft = None if call.soft is None else (call.soft.movedim(1, -1) if call.soft.dim() > 2 else call.soft).reshape(-1, classes)
    s = None if call.sample_weight is None else call.sample_weight.reshape(-1)
    if call.y is None:
        return Rows(h, None, soft, s, None)
    y = call.y.reshape(-1).long()
    ignored = y == call.ignore_index
    outside = ((y < 0) | (y >= classes)) & ~ignored
    if bool(outside.any()):
        raise bad_label(call.y, int(outside.nonzero()[0]), classes, call.ignore_index)
    return Rows(h, y, soft, s, (~ignored).nonzero()[:, 0] if bool(ignored.any()) else None)


class Gradients:
    """Sums over the blocks, in the dtype of the statistics until backward knows the last factor: one rounding, no underflow."""

    def __init__(self, factors: Factors, wanted: _Wanted, dtype: torch.dtype) -> None:
        h, w, values = factors.h, factors.w, factors.values
        self.dtype = dtype
        self.h = torch.zeros(h.shape[:-1].numel(), h.shape[-1], dtype=dtype, device=h.device) if wanted[0] else None
        self.w = torch.empty(w.shape, dtype=dtype, device=w.device) if wanted[1] else None
        self.b = torch.zeros(len(w), dtype=dtype, device=w.device) if wanted[2] else None
        self.values = torch.zeros_like(values, dtype=dtype) if values is not None and wanted[4] else None
        self.fresh = True  # nothing was added
        self.factor = 1.0  # what is still to be multiplied

    def take_given(self, g: Tensor, classes: Tensor, rows: slice | Tensor) -> None:
        """The gradient of the logits that were given; the product had no part in them."""
        if self.values is not None:
            self.values[rows] = g.gather(1, classes)
        g.scatter_(1, classes, 0)

    def add(self, g: Tensor, h: Tensor, rows: slice | Tensor, w: Tensor) -> None:
        """Rows g (n, C) of the logits' gradient: those of the features h (n, D), which are the call's `rows`."""
        if self.b is not None:
            self.b += g.sum(dim=0)
        if self.w is not None:
            if self.fresh:
                torch.mm(g.t(), h, out=self.w)
            else:
                self.w.addmm_(g.t(), h)
        if self.h is not None:
            part = self.h[rows] if isinstance(rows, slice) else g.new_zeros(len(g), self.h.shape[1])
            for classes, head in _parts(w, self.dtype):  # none at all of a converted head without classes
                part.addmm_(g[:, classes], head)
            if not isinstance(rows, slice):
                self.h[rows] = part
        self.fresh = False

    def times(self, factor: float, factors: Factors) -> tuple[Tensor | None, ...]:
        """The gradients, each in the dtype and shape of its tensor. They are given away."""
        factor *= self.factor
        found: list[Tensor | None] = []
        if self.fresh and self.w is not None:
            self.w.zero_()
        for gradient, like in zip((self.h, self.w, self.b, None, self.values), factors, strict=True):
            if gradient is None or like is None:
                found.append(None)
                continue
            if not math.isfinite(factor):  # what nothing was added to stays 0, as in rows that are ignored
                gradient = torch.where(gradient == 0, 0, gradient * factor)
            elif factor != 1:
                gradient.mul_(factor)
            found.append(gradient.to(like.dtype).view(like.shape))
        return tuple(found)


class _Waiting:
    """Gradient rows at the front of a block's memory that wait for their products: of few rows these are slow."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.count = memory, 0
        self.parts: list[tuple[Tensor, slice | Tensor]] = []

    def add(self, g: Tensor, features: Tensor, rows: slice | Tensor) -> None:
        """Rows g, which lie behind those that wait already."""
        self.count += len(g)
        self.parts.append((features, rows))

    def taken(self) -> tuple[Tensor, Tensor, slice | Tensor]:
        """All of them, with their features and which rows of the call they are."""
        g, parts = self.memory[: self.count], self.parts
        self.count, self.parts = 0, []
        if len(parts) == 1:
            return g, *parts[0]
        rows = [torch.arange(r.start, r.stop, device=g.device) if isinstance(r, slice) else r for _, r in parts]
        return g, torch.cat([h for h, _ in parts]), torch.cat(rows)


def _parts(w: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The head in `dtype`: as it is, or so many classes at a time that a conversion stays small."""
    if w.dtype == dtype:
        yield slice(None), w
        return
    size = max(_PART // (w.shape[1] * dtype.itemsize or 1), 256)
    for first in range(0, len(w), size):
        yield slice(first, first + size), w[first : first + size].to(dtype)


def _logits(h: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> Tensor:
    """h w^T + b of a block, (n, D) x (C, D) -> (n, C), into `out`."""
    for classes, head in _parts(w, out.dtype):
        part = out[:, classes]
        if b is None:
            torch.mm(h, head.t(), out=part)
        else:
            torch.addmm(b[classes], h, head.t(), out=part)
    return out


def _block_rows(rows: int, classes: int, features: int, bytes_a_number: int, buffers: int, bits: bool, workspace: int) -> int:
    """Rows of a block: equal blocks, as large as `workspace` and the speed of the products ask for."""
    each = bytes_a_number * (buffers * classes + 2 * features) + (classes // 8 if bits else 0)
    most = max(min(workspace // each, max(_ROWS, _SMALL // classes)), _FEWEST_ROWS)
    blocks = -(-rows // most)
    return -(-rows // max(blocks, 1)) or 1


def _run(
    call: Call, factors: Factors, wanted: _Wanted, workspace: int, upstream: Tensor | None = None
) -> tuple[Tensor, Gradients]:
    """The loss and, of those `wanted`, the gradients for an upstream gradient of 1, or for the rows' `upstream`."""
    h, w, b, classes, values = factors
    dtype = _dtype(h, w)
    b = None if b is None else b.to(dtype)
    with torch.autocast("cpu", enabled=False):
        rows = _rows(call, h, len(w))
        call, rows = _with_one_divisor(call, rows, factors, workspace)
        gradients = Gradients(factors, wanted, dtype)
        told = cpu.sizes(call, dtype)
        at_once = cpu.is_known_early(call, told)  # the kernel writes loss and gradient of a block in one go
        if not at_once:
            reduced, call = call, call._replace(reduction="none", normalizer=None)
        # Kernels of many classes may write the gradient over the logits.
        in_place = not any(wanted) or len(w) >= _MANY_CLASSES
        size = _block_rows(
            rows.living(), len(w), h.shape[-1], dtype.itemsize, 1 if in_place else 2, told.a_logit > 0, workspace
        )
        memory = h.new_empty(1 if in_place else 2, min(size, rows.living()), len(w), dtype=dtype)
        losses, total = h.new_zeros(len(rows.h), dtype=dtype), 0.0
        sparse = cpu.facts(call.kernel).family == "margin"  # rows may have no gradient
        first, waiting = 0, _Waiting(memory[-1])
        while first < rows.living():
            last = min(first + size - waiting.count, rows.living())
            take = rows.pick(first, last)
            features = rows.h[take].to(dtype)
            x, g = (m[waiting.count : waiting.count + last - first] for m in (memory[0], memory[-1]))
            _logits(features, w, b, out=x)
            if classes is not None and values is not None:
                x.scatter_(1, classes[take], values[take].to(dtype))
            block = rows.part(call, take)
            first = last
            if at_once and any(wanted):
                total += float(cpu.forward_ahead(block, x, out=g)[0])
                if classes is not None:
                    gradients.take_given(g, classes[take], take)
                waiting.add(g, features, take)
            elif at_once:
                total += float(cpu.forward(block, x, False)[0])
            else:
                losses[take], saved = cpu.forward(block, x, any(wanted))
                if saved is not None:
                    up = _upstream(reduced.reduction, losses[take], upstream, take)
                    cpu.backward(block, x, saved, up, out=g)
                    if classes is not None:
                        gradients.take_given(g, classes[take], take)
                    waiting.add(*(_with_loss(g, features, losses, take) if sparse else (g, features, take)))
            if 2 * waiting.count > size or (first == rows.living() and waiting.count > 0):
                gradients.add(*waiting.taken(), w)
    if at_once:
        return h.new_tensor(total, dtype=dtype), gradients
    if reduced.reduction == "none":
        return losses.view(h.shape[:-1]), gradients
    return _reduced(reduced, losses, rows, gradients), gradients


def _with_one_divisor(call: Call, rows: Rows, factors: Factors, workspace: int) -> tuple[Call, Rows]:
    """The call with what its mean divides by, where the labels tell, as its normalizer: the same for every block."""
    two = cpu.sizes(call, _dtype(*factors[:2])).second_divisor and call.weight is not None and rows.y is not None
    if call.normalizer is not None or call.reduction not in ("mean", "above_zero"):
        return call, rows
    if call.reduction == "above_zero":
        if not two:
            return call, rows
        # A part has a divisor of its own, and both wait for the rows: one pass to see which count, and the rest is ignored.
        losses, _ = _run(call._replace(reduction="none"), factors, _NOTHING, workspace)
        call, rows = call._replace(reduction="mean"), rows._replace(live=(~(losses.reshape(-1) <= 0)).nonzero()[:, 0])
    mass, count = rows.masses(call.weight, rows.live)
    if two:  # one divisor goes into the class weights, which that part does not see
        if count == 0:  # the z-term counts nothing
            numbers = dict(zip(cpu.facts(call.kernel).own, call.scalars, strict=True))
            call = call._replace(scalars=tuple((numbers | {"z_loss": 0.0}).values()))
        else:
            assert call.weight is not None
            call, mass = call._replace(weight=call.weight * (count / mass if mass != 0 else 0.0)), count
    return call._replace(normalizer=mass), rows


def _upstream(reduction: str, losses: Tensor, upstream: Tensor | None, take: slice | Tensor) -> Tensor:
    """What multiplies the gradients of a block's rows."""
    if upstream is not None:
        return upstream[take]
    return (~(losses <= 0)).to(losses.dtype) if reduction == "above_zero" else torch.ones_like(losses)


def _with_loss(g: Tensor, h: Tensor, losses: Tensor, take: slice | Tensor) -> tuple[Tensor, Tensor, slice | Tensor]:
    """The rows with a margin loss: the gradient of the others is zero.

    Their order does not matter, so those from the end fill the gaps and few rows are moved. A row that is left out saves 4 C D
    operations and at most one copy of C numbers: cheaper at any number of features worth a product.
    """
    some = losses[take] != 0
    order = some.nonzero()[:, 0]
    count = len(order)
    if count == len(g):
        return g, h, take
    gaps = (~some[:count]).nonzero()[:, 0]
    movers = order[order >= count]
    for gap, mover in zip(gaps.tolist(), movers.tolist(), strict=True):
        g[gap].copy_(g[mover])
    order = torch.arange(count, device=g.device).index_copy_(0, gaps, movers)
    return g[:count], h[order], order + take.start if isinstance(take, slice) else take[order]


def _reduced(call: Call, losses: Tensor, rows: Rows, gradients: Gradients) -> Tensor:
    """The reduced loss; what the gradients must still be divided by is told to them."""
    mass = 1.0
    if call.reduction == "above_zero":
        counted = (~(losses <= 0)).nonzero()[:, 0]  # NaN counts, so that it shows
        mass, losses = rows.masses(call.weight, counted)[0], losses[counted]
    if call.normalizer is not None:
        mass = float(call.normalizer)
    total = losses.sum(dtype=torch.float64)
    gradients.factor = 1 / mass if mass != 0 else 0.0
    return (total / mass if mass != 0 else torch.where(total.isnan(), total, 0)).to(losses.dtype)
