"""The C++ backend: tensors in, pointers down to `pylosses._cpu`, tensors out."""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import pool
from .check import ACCUMULATE, bad_label, label_shape
from .plain import is_plain
from .pool import DEVICE

if TYPE_CHECKING:
    from .autograd import Call

_cpu: Any = None
absent: str | None = None  #: why the kernels cannot be used, or None
try:
    _cpu = import_module("pylosses._cpu")
except ImportError as error:
    if "PYLOSSES_ISA" in str(error):
        raise ValueError(str(error)) from None
    try:
        absent = import_module("pylosses._build").REASON
    except ImportError:
        pass
    absent = absent or f"the C++ kernels could not be imported ({error})"

pool.attach(_cpu)

_DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_INDEX = {torch.uint8: 0, torch.int16: 1, torch.int32: 2, torch.int64: 3}
_REDUCTION = {"none": 0, "sum": 1, "mean": 2, "above_zero": 3}
_LOSSES: dict[str, tuple[int, int, int, str]] = {} if _cpu is None else _cpu.losses()  # see csrc/losses/list.h


def isa() -> str:
    """The instruction set the kernels were chosen for."""
    return "none" if _cpu is None else _cpu.isa()


def kernels() -> tuple[str, ...]:
    """Names of the formulas in csrc/losses/list.h."""
    return tuple(_LOSSES)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _description(call: Call, x: Tensor) -> tuple[Any, ...]:
    """The arguments that forward and backward share, in the order of csrc/cpu/bindings.cpp."""
    y, soft = call.y, call.soft
    normalizer = -math.inf  # none
    if call.normalizer is not None:
        normalizer = float(call.normalizer)
        normalizer = math.inf if normalizer == -math.inf else normalizer  # a tensor may hold anything
    return (
        _LOSSES[call.kernel][0],
        _DTYPE[x.dtype],
        x.data_ptr(),
        x.shape,
        x.stride(),
        _pointer(y),
        -1 if y is None else _INDEX[y.dtype],
        call.ignore_index,
        _pointer(soft),
        -1 if soft is None else _DTYPE[soft.dtype],
        () if soft is None else soft.stride(),
        _pointer(call.weight),
        _pointer(call.shift),
        _pointer(call.factor),
        _pointer(call.sample_weight),
        call.scalars,
        _REDUCTION[call.reduction],
        normalizer,
        torch.get_num_threads(),
    )


def forward(call: Call, x: Tensor, save: bool) -> tuple[Tensor, Tensor | None]:
    """Loss and, if `save`, what backward needs."""
    # Zeros: an op that is traced must give the same bits each time, also where nothing is written.
    saved = new_saved(call, x).zero_() if save else None
    return _forward(call, x, _pointer(saved), 0, ()), saved


def forward_ahead(call: Call, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss, what backward needs and, where it can be known so early, the gradient for an upstream gradient of 1; into `out`.

    Writing it while the logits are in the cache saves backward from reading them again.
    """
    saved = pool.new_bytes(saved_bytes(call, x))
    if not is_known_early(call):
        return _forward(call, x, saved.data_ptr(), 0, ()), saved, None
    gradient = pool.new_gradient(x) if out is None else out
    return _forward(call, x, saved.data_ptr(), gradient.data_ptr(), gradient.stride()), saved, gradient


def _forward(call: Call, x: Tensor, saved: int, gradient: int, stride: tuple[int, ...]) -> Tensor:
    loss = torch.empty(loss_shape(call, x), dtype=ACCUMULATE[x.dtype], device=DEVICE)
    bad = _cpu.forward(*_description(call, x), loss.data_ptr(), saved, gradient, stride)
    if bad >= 0:
        assert call.y is not None
        raise bad_label(call.y, bad, x.shape[1 if x.dim() > 1 else 0], call.ignore_index)
    return loss


def backward(call: Call, x: Tensor, saved: Tensor, grad: Tensor, out: Tensor | None = None) -> Tensor:
    """Gradient with respect to x, in x's dtype and memory format; into `out` if given."""
    result = pool.new_gradient(x) if out is None else out
    dtype = ACCUMULATE[x.dtype]
    if grad.dtype != dtype or grad.dim() > 0:
        grad = grad.to(dtype).contiguous()
    if not is_plain(grad):  # a lazy sign, zeros without memory
        grad = grad.clone()
    _cpu.backward(*_description(call, x), grad.data_ptr(), saved.data_ptr(), result.data_ptr(), result.stride())
    return result


def scores(x: Tensor, temperature: float, gamma: float, most: int) -> tuple[Tensor, ...]:
    """The fields of `ConfidenceScores`, shaped like labels of x; `most` classes enter gen."""
    shape = label_shape(x.shape)
    dtypes = [ACCUMULATE[x.dtype]] * 5 + [torch.int64]
    found = [torch.empty(shape, dtype=dtype, device=DEVICE) for dtype in dtypes]
    pointers = [score.data_ptr() for score in found]
    classes = x.shape[1] if x.dim() > 1 else x.shape[0]
    logits = _DTYPE[x.dtype], x.data_ptr(), x.shape, x.stride()
    _cpu.scores(*logits, torch.get_num_threads(), temperature, gamma, min(most, classes), pointers)
    return tuple(found)


def is_known_early(call: Call) -> bool:
    """May forward write the gradient for an upstream gradient of 1?"""
    forbidden_by = _LOSSES[call.kernel][2]  # -1: nothing, -2: anything, else the number of a scalar
    return call.reduction in ("mean", "sum") and (forbidden_by == -1 or (forbidden_by >= 0 and not call.scalars[forbidden_by]))


def _is_region(call: Call) -> bool:
    return _LOSSES[call.kernel][3] == "region"


def _by_image(call: Call) -> bool:
    """Of a region loss: is each image an area of its own? Its scalars end with those of dice.py."""
    return call.scalars[-2] != 0


def loss_shape(call: Call, x: Tensor) -> torch.Size:
    """The shape of the loss: that of the labels with reduction "none", or one number a class for a region loss."""
    if call.reduction != "none":
        return torch.Size()
    if not _is_region(call):
        return label_shape(x.shape)
    classes = x.shape[1:2] if x.dim() > 1 else x.shape
    return torch.Size((x.shape[0] if x.dim() > 1 else 1, *classes)) if _by_image(call) else classes


def new_saved(call: Call, x: Tensor) -> Tensor:
    """Memory for what backward needs, from torch: it may be traced."""
    return torch.empty(saved_bytes(call, x), dtype=torch.uint8, device=DEVICE)


def saved_bytes(call: Call, x: Tensor) -> int:
    """What backward needs: two divisors, K statistics of every row, bits (margin) or class sums (region)."""
    classes = x.shape[1 if x.dim() > 1 else 0]
    rows = x.numel() // classes
    numbers = _LOSSES[call.kernel][1] + (call.kernel == "cross_entropy" and call.soft is not None)  # the mass of soft targets
    size = (2 + rows * numbers) * ACCUMULATE[x.dtype].itemsize
    if call.kernel == "hem":
        # Whole pairs of bytes for each row, or W bits a class for each vector of W = 2 to 16 rows, in whole bytes.
        size += max((classes + 15) // 16 * 2 * rows, (rows + 15) // 16 * 2 * classes + rows // 2)
    if _is_region(call):
        areas = 1
        if _by_image(call) and x.dim() > 1:  # images of fewer than 64 rows save nothing, see csrc/cpu/region.h
            areas = x.shape[0] if rows >= 64 * x.shape[0] else 1
        size += 8 + 16 * areas * classes
        if call.kernel == "dice_ce" and (call.scalars[1:3] != (1.0, 0.0) or call.shift is not None):
            size += 2 * rows * ACCUMULATE[x.dtype].itemsize  # cross-entropy has a softmax of its own
    return (size + 127) // 64 * 64  # whole cache lines: a stack of them stays aligned
