"""Losses of a linear layer's output on a GPU: the logits are tiles of Triton kernels (kernels/linear.py), never in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import triton
from .autograd import Call, twice
from .plain import is_batch


def fused(call: Call, h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """The loss of `call` on the logits h w^T + b, differentiable once."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (h, w, b)):
        return Tiles.apply(h, w, b, call)
    return triton.product_forward(call, h, w, b)[0]


class Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, b: Tensor | None, call: Call) -> Tensor:
        loss, saved = triton.product_forward(call, h, w, b)
        # The labels and weights are saved too, so that changing them in place before backward is an error.
        ctx.save_for_backward(h, w, b, saved, *(t for t in call.tensors() if t is not None))
        ctx.call = call
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, w, b, saved = ctx.saved_tensors[:4]
        wanted = ctx.needs_input_grad[:3]
        if is_batch(grad):
            from .linear_fused import Factors, stored_gradients

            found = stored_gradients(ctx.call, Factors(h, w, b, None, None), (*wanted, False, False), grad)
            return *found[:3], None
        if torch.is_grad_enabled():  # create_graph=True
            return *Once.apply(h, w, b, saved, grad, ctx.call, wanted), None
        return *triton.product_backward(ctx.call, h, w, b, saved, grad, wanted), None


class Once(torch.autograd.Function):
    """Gradients that may be part of a graph but not be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        w: Tensor,
        b: Tensor | None,
        saved: Tensor,
        grad: Tensor,
        call: Call,
        wanted: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, ...]:
        return triton.product_backward(call, h, w, b, saved, grad, wanted)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise twice("triton")
