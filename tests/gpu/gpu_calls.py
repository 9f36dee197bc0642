"""What the kernels of a GPU backend get of a public call, without running them."""

from __future__ import annotations

import torch

import pylosses
from pylosses.autograd import Call
from pylosses.spec import LOSSES


def call_of(
    name: str, x: torch.Tensor, sample: int = 0, *, backend: str, reduction: str | None = None, soft: bool = False
) -> Call:
    """The call of a loss with sample arguments on logits x, for a backend that takes x; labels are random, of int64."""
    caught: list[Call] = []
    spec = LOSSES[name]
    statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
    arguments = {k: v.to(statistics) if isinstance(v, torch.Tensor) else v for k, v in spec.sample(sample, x.shape[1]).items()}
    arguments["reduction"] = reduction or spec.default_reduction
    inputs = [x]
    if spec.inputs == "labelled":
        shape = x.shape[:1] + x.shape[2:]
        generator = torch.Generator().manual_seed(1)
        inputs.append(
            torch.rand(x.shape, generator=generator) if soft else torch.randint(0, x.shape[1], shape, generator=generator)
        )
    keep = pylosses.call.fused
    try:
        pylosses.call.fused = lambda call, problem: caught.append(call)
        getattr(pylosses, spec.function)(*inputs, backend=backend, **arguments)
    finally:
        pylosses.call.fused = keep
    return caught[0]


def nasty(shape, dtype):
    """Rows of large logits and ordinary rows in turn."""
    x = 30 * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    x[..., ::2] /= 10 if len(shape) == 4 else 1
    x[::2] /= 10 if len(shape) == 2 else 1
    return x.to(dtype)


def arguments_of(name, sample, x):
    sampled = LOSSES[name].sample(sample, x.shape[1])
    statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
    return {k: v.to(statistics).double() if isinstance(v, torch.Tensor) else v for k, v in sampled.items()}


def truth(name, sample, call, x, up):
    spec = LOSSES[name]
    leaf = torch.where(x.isnan(), 0, x).double().requires_grad_()
    inputs = [t for t in (leaf, call.y, call.soft) if t is not None]
    arguments = arguments_of(name, sample, x) | {"reduction": call.reduction, "backend": "reference"}
    loss = getattr(pylosses, spec.function)(*inputs, **arguments)
    return loss.detach(), torch.autograd.grad(loss, leaf, up.double())[0]
