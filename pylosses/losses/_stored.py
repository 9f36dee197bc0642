"""Contrastive losses whose similarities fit the workspace: each is computed once, and the gradients are ready in forward.

Vectors become unit vectors, one product makes their similarities, the kernel of cross-entropy turns these into loss and
gradient, and further products bring it back to the vectors. Backward multiplies by the upstream gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import cpu, linear_fused
from ..autograd import Call, twice
from ..plain import is_batch
from ..pool import DEVICE
from ._own import NO_PROBLEM
from .cross_entropy import pack

_Gradients = tuple[Tensor | None, ...]
#: which inputs need a gradient -> the loss, and their gradients for an upstream gradient of 1
Compute = Callable[[Sequence[bool]], tuple[Tensor, _Gradients]]


class Units(NamedTuple):
    """The unit vectors of K batches, one batch after the other, and the norms that they were divided by.

    Those of zero vectors are infinity: they stay zero and have gradient 0.
    """

    unit: Tensor  # (K N, D)
    norm: Tensor  # (K N, 1)
    rows: int  # N

    def batches(self, x: Tensor) -> list[Tensor]:
        """Each batch of x (K N, D)."""
        return [x[first : first + self.rows] for first in range(0, x.shape[0], self.rows)]

    def gradients(self, grad: Tensor, temperature: float | Tensor, wanted: Sequence[bool]) -> _Gradients:
        """Of the batches and the temperature, from those of the unit vectors before they are divided by the temperature.

        `grad` becomes the gradients.
        """
        along = (self.unit * grad).sum(dim=1, keepdim=True)
        grad.addcmul_(self.unit, along, value=-1).div_(self.norm * temperature)
        found = [g if want else None for g, want in zip(self.batches(grad), wanted[:-1], strict=True)]
        # A similarity is the product of two unit vectors, both of which have its share.
        return *found, -along.sum() / (2 * temperature * temperature) if wanted[-1] else None


def units(*vectors: Tensor) -> Units:
    """In few operations, the bits of `unit` and `norms`."""
    x = torch.cat([v.detach() for v in vectors])
    scaled = x.abs()
    size = scaled.amax(dim=1, keepdim=True)
    zero = size == 0
    torch.div(x, size.masked_fill(zero, 1), out=scaled)
    norm = size * scaled.square_().sum(dim=1, keepdim=True).sqrt_()
    norm.masked_fill_(zero, torch.inf)
    return Units(x.div_(norm), norm, vectors[0].shape[0])


def fits(x: Tensor, matrices: int) -> bool:
    """Whether so many matrices of the similarities of x's rows fit the workspace."""
    return matrices * x.element_size() * x.shape[0] ** 2 <= linear_fused.WORKSPACE


def own_class(rows: int, divisor: float, label_smoothing: float = 0.0) -> Call:
    """Cross-entropy of the rows of similarities, row i with class i."""
    own = torch.arange(rows, device=DEVICE)
    scalars = pack(NO_PROBLEM, label_smoothing=label_smoothing, temperature=1.0, softcap=None, z_loss=0.0, bias=None).scalars
    return Call("cpu", "cross_entropy", own, None, None, None, None, None, scalars, -100, "mean", divisor)


def row_loss(call: Call, x: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The loss of the similarities x, and their gradient."""
    if not with_gradient:
        return cpu.forward(call, x, False)[0], None
    loss, _, gradient = cpu.forward_ahead(call, x)
    return loss, gradient


def _computed(compute: Compute, wanted: Sequence[bool]) -> tuple[Tensor, _Gradients]:
    """What `compute` gives: matrix products are not cast down by autocast."""
    if not torch.is_autocast_enabled("cpu"):
        return compute(wanted)
    with torch.autocast("cpu", enabled=False):
        return compute(wanted)


def ahead(compute: Compute, *inputs: Any) -> Tensor:
    """The loss, differentiable once with respect to those inputs that are tensors."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        return _apply(compute, *inputs)
    return _computed(compute, (False,) * len(inputs))[0]


class Ahead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, *inputs: Any) -> Tensor:
        ctx.compute, ctx.wanted = compute, ctx.needs_input_grad[1:]
        loss, ctx.ahead = _computed(compute, ctx.wanted)
        # Saved so that changing them in place before backward is an error.
        ctx.save_for_backward(*[t if isinstance(t, Tensor) else None for t in inputs])
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> _Gradients:
        inputs = ctx.saved_tensors
        # Handed out once: they are the caller's then. A second backward, also one at the same time, finds none.
        gradients = ctx.__dict__.pop("ahead", None) or _computed(ctx.compute, ctx.wanted)[1]
        if torch.is_grad_enabled():  # create_graph=True
            return None, *Once.apply(gradients, grad, *inputs)
        return None, *_times(gradients, grad)


#: `Ahead.apply` without its look for torch.func, which the checks have had
_apply = super(torch.autograd.Function, Ahead).apply


class Once(torch.autograd.Function):
    """Gradients that may be part of a graph but not be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradients: _Gradients, grad: Tensor, *inputs: Tensor | None) -> _Gradients:
        return _times(gradients, grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise twice("cpu")


def _times(gradients: _Gradients, grad: Tensor) -> _Gradients:
    """The gradients, which are given away, for an upstream gradient."""
    if is_batch(grad):
        return tuple(g if g is None else g * grad for g in gradients)
    factor = float(grad)
    if factor == 1:
        return gradients
    if not math.isfinite(factor):  # what has no part in the loss stays 0
        return tuple(g if g is None else torch.where(g == 0, 0, g * factor) for g in gradients)
    return tuple(g if g is None else g.mul_(factor) for g in gradients)
