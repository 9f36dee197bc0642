"""torch.library registration and fakes: used while torch.compile or torch.export trace and under torch.func transforms.

Two plain ops, `pylosses::forward` and `pylosses::backward`, carry every loss; the autograd formula is the Function below,
which dynamo and functorch both understand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import KERNELS, Call, twice
from .check import ACCUMULATE

_INPUTS = (
    "Tensor x, Tensor? y, Tensor? soft, Tensor? weight, Tensor? shift, Tensor? factor, Tensor? sample_weight, "
    "Tensor? normalizer, str backend, str kernel, float[] scalars, int ignore_index, str reduction"
)
torch.library.define("pylosses::forward", f"({_INPUTS}) -> (Tensor, Tensor)")
torch.library.define("pylosses::backward", f"(Tensor grad, Tensor saved, {_INPUTS}) -> Tensor")


def _call(
    y: Any, soft: Any, weight: Any, shift: Any, factor: Any, sample_weight: Any, normalizer: Any,
    backend: str, kernel: str, scalars: Sequence[float], ignore_index: int, reduction: str,
) -> Call:  # fmt: skip
    y, soft, weight, shift, factor, sample_weight = (
        t if t is None else t.resolve_neg() for t in (y, soft, weight, shift, factor, sample_weight)
    )
    return Call(
        backend, kernel, y, soft, weight, shift, factor, sample_weight, tuple(scalars), ignore_index, reduction, normalizer
    )


# Tensors with the negative bit come as they are: torch would resolve them by a copy, which inductor makes without the sign.
for _name in ("forward", "backward"):
    torch.library.impl(f"pylosses::{_name}", "Negative", torch.library.fallthrough_kernel)


@torch.library.impl("pylosses::forward", "CompositeExplicitAutograd")
def _forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    call = _call(*rest)
    return KERNELS[call.backend].forward(call, x.resolve_neg(), True)


@torch.library.register_fake("pylosses::forward")
def _forward_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    call = _call(*rest)
    kernels = KERNELS[call.backend]
    return x.new_empty(kernels.loss_shape(call, x), dtype=ACCUMULATE[x.dtype]), kernels.new_saved(call, x)


@torch.library.impl("pylosses::backward", "CompositeExplicitAutograd")
def _backward(grad: Tensor, saved: Tensor, x: Tensor, *rest: Any) -> Tensor:
    call = _call(*rest)
    return KERNELS[call.backend].backward(call, x.resolve_neg(), saved, grad.resolve_neg())


@torch.library.register_fake("pylosses::backward")
def _backward_fake(grad: Tensor, saved: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _looped(function: Callable[..., Any], batch: int, in_dims: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """vmap by a loop: each element of the batch is one call."""
    results = []
    for i in range(batch):
        one = [v.select(d, i) if isinstance(d, int) else v for v, d in zip(inputs, in_dims, strict=True)]
        results.append(function(*one))
    if isinstance(results[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])
    return torch.stack(results), 0


class Reverse(torch.autograd.Function):
    """A function without a forward-mode derivative."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(
            "forward-mode derivatives (torch.func.jvp, jacfwd and hessian, torch.autograd.forward_ad) are not supported by the "
            'fused backends; call the loss with backend="reference", or inside `with pylosses.use_backend("reference")`, which '
            "is plain PyTorch and has them"
        )


class Traced(torch.autograd.Function):
    """The ops with their gradient."""

    @staticmethod
    def forward(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.pylosses.forward(x, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], *inputs[:8])
        ctx.rest = inputs[8:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        # While dynamo traces there is no second derivative to guard against.
        once = torch.ops.pylosses.backward if torch.compiler.is_compiling() else TracedOnce.apply
        return once(grad, *ctx.saved_tensors, *ctx.rest), *(None,) * 12

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *inputs: Any) -> Any:
        return _looped(Traced.apply, info.batch_size, in_dims, inputs)


class Transformed(Traced):
    """The same with the word on forward-mode derivatives: dynamo traces no function that has one."""

    jvp = Reverse.jvp

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *inputs: Any) -> Any:
        return _looped(Transformed.apply, info.batch_size, in_dims, inputs)


class TracedOnce(Reverse):
    """Its gradient, which is not differentiable again."""

    @staticmethod
    def forward(grad: Tensor, saved: Tensor, *inputs: Any) -> Tensor:
        return torch.ops.pylosses.backward(grad, saved, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.backend = inputs[10]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise twice(ctx.backend)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *inputs: Any) -> Any:
        return _looped(TracedOnce.apply, info.batch_size, in_dims, inputs)


def traced(call: Call, x: Tensor) -> Tensor:
    """`autograd.fused` for everything that is not a plain eager call."""
    inputs = _inputs(call, x)
    if not torch.compiler.is_compiling():
        return Transformed.apply(*inputs)[0]
    if not (x.requires_grad and torch.is_grad_enabled()):
        return torch.ops.pylosses.forward(*inputs)[0]
    return Traced.apply(*inputs)[0]


def traced_backward(call: Call, x: Tensor, saved: Tensor, grad: Tensor) -> Tensor:
    """The gradient of an eager call for an upstream gradient that is not plain: a loop over the elements of a batch."""
    gradient = TracedOnce.apply(grad, saved, *_inputs(call, x))
    return gradient + nothing(call, x) if torch.is_grad_enabled() else gradient


def nothing(call: Call, x: Tensor) -> Tensor:
    """A zero that refuses to be differentiated: what is below a batch of torch.autograd.grad knows nothing of `TracedOnce`."""
    return Nothing.apply(x, call.backend)


class Nothing(Reverse):
    @staticmethod
    def forward(x: Tensor, backend: str) -> Tensor:
        return x.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.backend = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise twice(ctx.backend)


def _inputs(call: Call, x: Tensor) -> tuple[Any, ...]:
    """The inputs of the ops."""
    normalizer = call.normalizer
    if isinstance(normalizer, float):
        normalizer = torch.full((), normalizer, dtype=torch.float64, device=x.device)
    return (
        x, *call.tensors(), normalizer, call.backend, call.kernel, list(call.scalars), call.ignore_index, call.reduction,
    )  # fmt: skip
