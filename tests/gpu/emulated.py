"""A loss as its compiled PTX computes it: host code of the backend, kernels of `ahead.compiling`, run by `ptx.Sim`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ptx
import torch
from ahead import Launch, compiling
from torch import Tensor

from pylosses import triton as backend
from pylosses.autograd import Call


class Run(NamedTuple):
    loss: Tensor
    saved: Tensor
    gradient: Tensor
    traffic: list[tuple[Launch, dict[str, list[int]]]]  #: of each launch, argument -> [bytes read, bytes written]


def run(target: str, call: Call, x: Tensor, up: Tensor | None = None, edit: Callable[[str], str] = lambda text: text) -> Run:
    """Loss and gradient of a call, by the code compiled for `target`; `edit` may spoil the PTX."""
    traffic: list[tuple[Launch, dict[str, list[int]]]] = []
    with compiling(target, lambda launch: traffic.append((launch, execute(launch, edit)))):
        loss, saved = backend.forward(call, x, True)
        up = torch.ones_like(loss) if up is None else up.to(loss.dtype)
        gradient = backend.backward(call, x, saved, up)
    return Run(loss, saved, gradient, traffic)


def run_layer(
    target: str, call: Call, h: Tensor, w: Tensor, b: Tensor, up: Tensor, edit: Callable[[str], str] = lambda text: text
) -> tuple[Tensor, ...]:
    """What a linear layer's loss saves; the loss and the gradients of h, w and b."""
    with compiling(target, lambda launch: execute(launch, edit)):
        loss, saved = backend.product_forward(call, h, w, b)
        gradients = backend.product_backward(call, h, w, b, saved, up.to(loss.dtype), (True, True, True))
    return saved, loss, *gradients


def execute(launch: Launch, edit: Callable[[str], str] = lambda text: text) -> dict[str, list[int]]:
    """Run one launch on the memory of its tensors, every one of which may be touched and nothing else."""
    numbers: list[Any] = []
    buffers: dict[int, tuple[str, int, int]] = {}
    for name, argument in launch.parameters():
        if isinstance(argument, Tensor):
            storage = argument.untyped_storage()
            buffers.setdefault(storage.data_ptr(), (name, storage.data_ptr(), storage.nbytes()))
            argument = argument.data_ptr()
        numbers.append(argument)
    kernel = ptx.Kernel(edit(launch.compiled.asm["ptx"]))
    sim = ptx.Sim(kernel, launch.grid, 32 * launch.warps, numbers, buffers.values(), smem=launch.compiled.metadata.shared)
    sim.run()
    return sim.traffic
