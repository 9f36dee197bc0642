"""Is it the same number? A provider that disagrees with the reference is shown as FAILED and never gets a time.

Two comparisons of loss and gradients:

    with the float64 reference, on the same classes but fewer rows, by the largest error
    with the eager formula (or the first provider that passed), at the full shape, by the mean error

The first is sharp, the second sees what only large inputs do: threads, tiles, offsets. Its mean tolerates the few rows where
rounding decides whether an error of a margin loss reaches its threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .providers import scalar

SMALL = 1 << 16  #: logits of the comparison in float64
CHUNK = 1 << 24  #: elements compared at a time, so that a comparison needs no memory worth mentioning

#: How far a loss or gradient may be from the float64 reference, relative to its largest value. A gradient is rounded to the
#: input's dtype, and libraries that round the loss to it as well are not wrong.
SHARP = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
#: The mean error at the full shape, relative to the mean value.
BROAD = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Outcome(NamedTuple):
    """Loss and gradients of one call."""

    loss: Tensor
    gradients: tuple[Tensor, ...]


def evaluate(call: Callable[..., Any], inputs: tuple[Tensor, ...], gradient: bool = True) -> Outcome:
    """Loss and, if asked for, gradients with respect to every floating point input."""
    leaves = [t.detach().requires_grad_(gradient) if t.is_floating_point() else t for t in inputs]
    loss = scalar(call(*leaves))
    if loss.requires_grad:
        loss.backward()
    return Outcome(loss.detach(), tuple(t.grad for t in leaves if t.requires_grad and t.grad is not None))


def fingerprint(tensors: tuple[Tensor, ...]) -> list[tuple[int, float]]:
    """Changes when an input is written to, also behind autograd's back; a sample of 4096 numbers of each tensor."""
    samples = [tensor.reshape(-1)[:: max(1, tensor.numel() // 4096)].double() for tensor in tensors]
    return [(tensor._version, float(sample.sum())) for tensor, sample in zip(tensors, samples, strict=True)]


def sharp(result: Outcome, truth: Outcome, dtype: torch.dtype) -> str | None:
    """Why the result disagrees with the float64 truth, or None."""
    return _compare(result, truth, SHARP[dtype], dtype, "largest", lambda values: values.abs().max())


def broad(result: Outcome, other: Outcome, dtype: torch.dtype) -> str | None:
    """Why the result disagrees with another provider's at the full shape, or None."""
    return _compare(result, other, BROAD[dtype], dtype, "mean", lambda values: values.abs().sum())


def _compare(
    result: Outcome, expected: Outcome, tolerance: float, dtype: torch.dtype, word: str, size: Callable[[Tensor], Tensor]
) -> str | None:
    if len(result.gradients) != len(expected.gradients):
        return f"{len(result.gradients)} gradients instead of {len(expected.gradients)}"
    pairs = [("loss", result.loss.reshape(1), expected.loss.reshape(1))]
    pairs += [("gradient", g, e) for g, e in zip(result.gradients, expected.gradients, strict=True)]
    numbers = torch.finfo(dtype)
    step = numbers.smallest_normal * numbers.eps  # float16 gradients of a large batch all but vanish
    for name, got, want in pairs:
        if got.shape != want.shape:
            return f"{name} has shape {tuple(got.shape)} instead of {tuple(want.shape)}"
        error, scale = _sizes(got, want, size)
        steps = got.numel() if word == "mean" else 1
        if not error <= tolerance * scale + steps * step:
            shown = f": {float(got):.6g} instead of {float(want):.6g}" if name == "loss" else ""
            return f"{word} error of the {name} is {error / scale if scale else error:.1e}, allowed {tolerance:.0e}{shown}"
    return None


def _sizes(got: Tensor, want: Tensor, size: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Size of got - want and of want in float64, chunk by chunk: the size of sizes is again a sum or a maximum."""
    errors, scales = [], []
    for a, b in zip(got.reshape(-1).split(CHUNK), want.reshape(-1).split(CHUNK), strict=True):
        b = b.double()
        errors.append(size(a.double() - b))
        scales.append(size(b))
    return float(size(torch.stack(errors))), float(size(torch.stack(scales)))
