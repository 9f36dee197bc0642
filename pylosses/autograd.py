"""One call of a fused kernel, with its gradient: for all losses and all fused backends.

`Fused` is the eager path: a plain `forward(ctx, ...)` calls the binding at once. `Traced` is the same over the registered
ops of compile.py; torch.compile, torch.export, torch.func and tensor subclasses take it. Both save the logits and row
statistics, never a second (N, C) tensor.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cpu, cuda, triton
from .check import Problem
from .plain import TYPES, is_batch


class Call(NamedTuple):
    """What a fused kernel gets besides the logits."""

    backend: str
    kernel: str
    y: Tensor | None
    soft: Tensor | None
    weight: Tensor | None
    shift: Tensor | None
    factor: Tensor | None
    sample_weight: Tensor | None
    scalars: tuple[float, ...]
    ignore_index: int
    reduction: str
    normalizer: float | Tensor | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.y, self.soft, self.weight, self.shift, self.factor, self.sample_weight


#: backend name -> module with forward(call, x, save) -> (loss, saved), backward(call, x, saved, grad), new_saved(call, x),
#: loss_shape(call, x) and, where forward can write the gradient too, forward_ahead(call, x) -> (loss, saved, gradient or None)
KERNELS: dict[str, Any] = {"cpu": cpu, "cuda": cuda, "triton": triton}


def fused(call: Call, problem: Problem) -> Tensor:
    """The reduced loss of `call` on the problem's logits, differentiable once."""
    x = problem.x
    if not (problem.eager and type(x) in TYPES):
        from .compile import traced

        return traced(call, x)
    if x.requires_grad and torch.is_grad_enabled():
        return _apply(x, call)
    return KERNELS[call.backend].forward(call, x, False)[0]


class Fused(torch.autograd.Function):
    """Eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call) -> Tensor:
        kernels = KERNELS[call.backend]
        if hasattr(kernels, "forward_ahead"):
            loss, saved, ctx.ahead = kernels.forward_ahead(call, x)
        else:
            loss, saved = kernels.forward(call, x, True)
            ctx.ahead = None
        # The labels and weights are saved too, so that changing them in place before backward is an error.
        ctx.save_for_backward(x, saved, *[t for t in call.tensors() if t is not None])
        ctx.call = call
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        x, saved = ctx.saved_tensors[:2]
        if is_batch(grad):
            from .compile import traced_backward

            return traced_backward(ctx.call, x, saved, grad), None
        if torch.is_grad_enabled():  # create_graph=True
            return Once.apply(x, grad, saved, ctx.call), None
        kernels = KERNELS[ctx.call.backend]
        # Handed out once: it is the caller's then. A second backward, or one at the same time, finds none and computes its own.
        gradient = ctx.__dict__.pop("ahead", None)
        if gradient is None:
            return kernels.backward(ctx.call, x, saved, grad), None
        factor = grad.item()  # waits for nothing: a gradient that is ready lies in host memory
        if factor == 1:
            return gradient, None
        if gradient.element_size() >= 4 and math.isfinite(factor):
            return gradient.mul_(factor), None
        # Halves are rounded once, after the factor; an infinite one must not make NaN of the zeros of ignored rows.
        return kernels.backward(ctx.call, x, saved, grad, out=gradient), None


#: `Fused.apply` without its look for torch.func, which the checks have had: 4 of 100 us of a small step
_apply = super(torch.autograd.Function, Fused).apply


class Once(torch.autograd.Function):
    """A gradient that may be part of a graph but not be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor, saved: Tensor, call: Call) -> Tensor:
        ctx.backend = call.backend
        return KERNELS[call.backend].backward(call, x, saved, grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise twice(ctx.backend)


def twice(backend: str) -> RuntimeError:
    return RuntimeError(
        f'double backward is not supported by the fused {backend!r} backend; call the loss with backend="reference", '
        "which is differentiable twice"
    )
