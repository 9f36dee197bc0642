"""What the losses with positional arguments of their own share: checks of vectors, safe norms, plain reductions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import check
from ..check import ACCUMULATE, Problem
from ..choice import BackendError, choose
from ..plain import is_eager, plain
from ..spec import LossSpec

REDUCTIONS = ("none", "sum", "mean")

NO_PROBLEM = Problem(torch.empty(0), None, None, None, None, None, -100, "mean", None, False, 0, torch.Size(), torch.float32)


def fused_or_reference(spec: LossSpec, x: Tensor, backend: str | None) -> str:
    """The backend of a loss that runs on the linear driver: "cpu", or "reference" also where torch traces."""
    asked = "reference" if backend is None and not is_eager() else backend
    chosen = choose(spec, NO_PROBLEM._replace(x=x), asked, None)
    return chosen if len(x) else "reference"


def only_reference(spec: LossSpec, backend: str | None) -> None:
    """Refuse a backend that was asked for and has no kernel of this loss, with the reason of the table of losses."""
    chosen = choose(spec, NO_PROBLEM, backend, None)
    if chosen != "reference":
        raise BackendError(f"backend {chosen!r} cannot run {spec.function}: only the plain reference is wired in")


def vectors(**tensors: Tensor) -> list[Tensor]:
    """The given (N, D) tensors, checked to agree, in the dtype of the arithmetic: float32, or float64 if one is."""
    eager = is_eager()
    first, like = next(iter(tensors.items()))
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a Tensor of shape (N, D), got {type(value).__name__}")
        if eager:
            value = tensors[name] = plain(name, value)
        if value.dtype not in ACCUMULATE:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {value.dtype}")
        if value.dim() != 2 or value.shape[1] == 0:
            raise ValueError(f"{name} must have shape (N, D) with D at least 1, got {tuple(value.shape)}")
        if value.shape != like.shape:
            raise ValueError(f"{name} must have shape {tuple(like.shape)} like {first}, got {tuple(value.shape)}")
        if value.device != like.device:
            raise ValueError(f"{name} must be on {like.device} like {first}, got {value.device}")
    dtype = torch.float64 if any(v.dtype == torch.float64 for v in tensors.values()) else torch.float32
    return [value.to(dtype) for value in tensors.values()]


def temperature_of(value: Any, like: Tensor) -> float | Tensor:
    """A temperature above zero: a number, or a 0-d tensor that may be learned."""
    if not isinstance(value, Tensor):
        return check.number("temperature", value, above=0.0)
    if value.dim() != 0 or not value.is_floating_point():
        raise ValueError(
            f"temperature must be a number or a 0-d floating point tensor, got shape {tuple(value.shape)} and {value.dtype}"
        )
    if value.device.type == "cpu" and is_eager() and not bool(value > 0):
        raise ValueError(f"temperature must be greater than 0, got {value.item()}")
    return value.to(like.dtype)


def norms(x: Tensor) -> Tensor:
    """(N, 1) Euclidean norms of (N, D) rows, with derivative 0 at a zero row."""
    # Rows are scaled to size 1 first, so that squares neither overflow nor vanish; the factor cancels, hence the detach.
    size = x.detach().abs().amax(dim=1, keepdim=True)
    zero = size == 0
    scaled = torch.where(zero, 1, x / torch.where(zero, 1, size))
    return size * scaled.square().sum(dim=1, keepdim=True).sqrt()


def unit(x: Tensor) -> Tensor:
    """(N, D) rows divided by their norms; a zero row stays zero and has gradient 0."""
    length = norms(x)
    zero = length == 0
    return torch.where(zero, 0, x / torch.where(zero, 1, length))


def full_precision(x: Tensor) -> torch.autocast:
    """A context in which matrix products are not cast down by autocast."""
    return torch.autocast(x.device.type, enabled=False)


def reduced(value: Tensor, reduction: str) -> Tensor:
    """(N) row losses to "none", "sum" or "mean"; the mean of no rows is 0."""
    if reduction == "none":
        return value
    return value.sum() if reduction == "sum" else value.sum() / max(len(value), 1)
