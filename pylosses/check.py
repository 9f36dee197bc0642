"""Every user-facing check and its message.

`labelled` and `unlabelled` turn a call's tensors into a `Problem`; the small helpers below check one argument each.
A message names the argument, what came and what was expected.
"""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .plain import TYPES, is_eager, plain

#: logits dtype -> dtype of statistics and losses
ACCUMULATE = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}
INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
REDUCTIONS = ("none", "sum", "mean", "above_zero")


class Problem(NamedTuple):
    """A checked call: what backends are chosen by and what kernels and references read."""

    x: Tensor  # (C), (N, C) or (N, C, *)
    y: Tensor | None  # labels, x's shape without the class dimension
    soft: Tensor | None  # class probabilities shaped like x
    weight: Tensor | None  # (C)
    sample_weight: Tensor | None  # shaped like the labels
    mask: Tensor | None  # bool, shaped like the labels: rows of a label-free loss that count
    ignore_index: int
    reduction: str
    normalizer: float | Tensor | None
    check_labels: bool
    classes: int
    shape: torch.Size  # of the labels, and of the loss with reduction "none"
    dtype: torch.dtype  # of statistics and losses
    eager: bool = True  # the call runs at once, unseen, and no tensor besides x is of a subclass


def labelled(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    sample_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    normalizer: float | Tensor | None,
    check_labels: bool,
    soft_targets: bool = False,
) -> Problem:
    """Check the tensors of a loss with labels (or, if `soft_targets`, with class probabilities)."""
    eager = is_eager()
    input, classes, shape, dtype = _logits(input, eager)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a Tensor, got {type(target).__name__}")
    if eager:
        target = plain("target", target)
        eager = type(target) in TYPES
    soft = None
    if target.dtype not in INDEX_DTYPES:
        if not (soft_targets and target.is_floating_point()):
            kinds = "uint8, int16, int32 or int64 class indices"
            if soft_targets:
                kinds += ", or floating point class probabilities"
            raise TypeError(f"target must be {kinds}, got {target.dtype}")
        soft = target
    expected = shape if soft is None else input.shape
    if target.shape != expected:
        raise ValueError(
            f"target must have shape {tuple(expected)} for input of shape {tuple(input.shape)}, got {tuple(target.shape)}"
        )
    same_device("target", target, input)
    if weight is not None:
        weight = per_class("weight", weight, classes, input, eager)
        eager = eager and type(weight) in TYPES
    if sample_weight is not None:
        sample_weight = _per_row("sample_weight", sample_weight, shape, input, eager).to(dtype)
        eager = eager and type(sample_weight) in TYPES
    ignore_index = label("ignore_index", ignore_index)
    normalizer = _reduction(reduction, normalizer, eager)
    y = None if soft is not None else target
    return Problem(
        input, y, soft, weight, sample_weight, None, ignore_index, reduction, normalizer, check_labels, classes, shape, dtype,
        eager,
    )  # fmt: skip


def unlabelled(
    input: Tensor,
    mask: Tensor | None,
    sample_weight: Tensor | None,
    reduction: str,
    normalizer: float | Tensor | None,
) -> Problem:
    """Check the tensors of a loss without labels."""
    eager = is_eager()
    input, classes, shape, dtype = _logits(input, eager)
    if mask is not None:
        mask = _per_row("mask", mask, shape, input, eager)
        eager = eager and type(mask) in TYPES
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be a bool tensor, got {mask.dtype}")
    if sample_weight is not None:
        sample_weight = _per_row("sample_weight", sample_weight, shape, input, eager).to(dtype)
        eager = eager and type(sample_weight) in TYPES
    normalizer = _reduction(reduction, normalizer, eager)
    return Problem(
        input, None, None, None, sample_weight, mask, -100, reduction, normalizer, False, classes, shape, dtype, eager
    )


def _logits(input: Tensor, eager: bool) -> tuple[Tensor, int, torch.Size, torch.dtype]:
    if not isinstance(input, Tensor):
        raise TypeError(f"input must be a Tensor of logits, got {type(input).__name__}")
    if eager:
        input = plain("input", input)
    dtype = ACCUMULATE.get(input.dtype)
    if dtype is None:
        raise TypeError(f"input must be float32, bfloat16, float16 or float64, got {input.dtype}")
    shape = input.shape
    if len(shape) == 0:
        raise ValueError("input must have shape (C), (N, C) or (N, C, d1, ...), got a 0-d tensor")
    classes = shape[1] if len(shape) > 1 else shape[0]
    if classes == 0:
        raise ValueError(f"input must have at least one class, got shape {tuple(shape)}")
    return input, classes, label_shape(shape), dtype


def label_shape(shape: torch.Size) -> torch.Size:
    """The shape of logits without their class dimension: that of labels, and of row losses."""
    dimensions = len(shape)
    if dimensions == 2:  # the quick way for short calls
        return shape[:1]
    return shape[:1] + shape[2:] if dimensions > 1 else shape[:0]


def _per_row(name: str, value: Tensor, shape: torch.Size, input: Tensor, eager: bool) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    if eager:
        value = plain(name, value)
    if value.shape != shape:
        raise ValueError(
            f"{name} must have shape {tuple(shape)} for input of shape {tuple(input.shape)}, got {tuple(value.shape)}"
        )
    same_device(name, value, input)
    return value


def _reduction(reduction: str, normalizer: Any, eager: bool) -> float | Tensor | None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    if normalizer is None:
        return None
    if reduction not in ("mean", "above_zero"):
        raise ValueError(f'normalizer replaces the divisor of "mean" or "above_zero"; it has no use with {reduction!r}')
    if isinstance(normalizer, Tensor):
        if eager:
            normalizer = plain("normalizer", normalizer)
        if normalizer.dim() != 0:
            raise ValueError(f"normalizer must be a number or a 0-d tensor, got shape {tuple(normalizer.shape)}")
        return normalizer.detach()
    if not isinstance(normalizer, (int, float)):
        raise TypeError(f"normalizer must be a number or a 0-d tensor, got {type(normalizer).__name__}")
    if not normalizer > 0:
        raise ValueError(f"normalizer must be positive, got {normalizer}")
    return float(normalizer)


def same_device(name: str, value: Tensor, input: Tensor) -> None:
    if value.device != input.device:
        raise ValueError(f"{name} must be on {input.device} like input, got {value.device}")


def per_class(name: str, value: Any, classes: int, input: Tensor, eager: bool) -> Tensor:
    """A (C) tensor in the dtype of input's statistics."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor of shape ({classes},), got {type(value).__name__}")
    if eager:
        value = plain(name, value)
    if value.shape != (classes,):
        raise ValueError(
            f"{name} must have shape ({classes},) for input of shape {tuple(input.shape)}, got {tuple(value.shape)}"
        )
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must hold real numbers, got {value.dtype}")
    same_device(name, value, input)
    return value.to(ACCUMULATE[input.dtype]).contiguous()


def number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None, most: float | None = None
) -> float:
    """A plain number within its range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if above is not None and not value > above:
        raise ValueError(f"{name} must be greater than {above:g}, got {value}")
    if least is not None and not value >= least:
        raise ValueError(f"{name} must be at least {least:g}, got {value}")
    if most is not None and not value <= most:
        raise ValueError(f"{name} must be at most {most:g}, got {value}")
    return float(value)


def integer(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """A plain integer within its range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} must be at least {least}{'' if most is None else f' and at most {most}'}, got {value}")
    return value


def label(name: str, value: Any) -> int:
    """An integer that labels can hold."""
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
            raise TypeError(f"{name} must be an integer, got {value if value is None else type(value).__name__}")
        value = index(value)  # NumPy's integers
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be an int64, at least -2^63 and below 2^63, got {value}")
    return value


def choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def bad_label(target: Tensor, position: int, classes: int, ignore_index: int) -> IndexError:
    """The error for the first label out of range, at flat `position` of `target`."""
    value = int(target.reshape(-1)[position])
    place = []
    rest = position
    for size in reversed(target.shape):
        place.append(rest % size)
        rest //= size
    where = f"target[{', '.join(map(str, reversed(place)))}]" if place else "target"
    return IndexError(
        f"{where} is {value}, outside [0, {classes}) for {classes} classes (C={classes}) and not ignore_index={ignore_index}"
    )
