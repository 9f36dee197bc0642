"""The C++ backend: tensors in, pointers down to `pylosses._cpu`, tensors out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .check import ACCUMULATE, bad_label, label_shape

if TYPE_CHECKING:
    from .autograd import Call

_cpu: Any = None
absent: str | None = None  #: why the kernels cannot be used, or None
try:
    _cpu = import_module("pylosses._cpu")
except ImportError as error:
    try:
        absent = import_module("pylosses._build").REASON
    except ImportError:
        pass
    absent = absent or f"the C++ kernels could not be imported ({error})"

_DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_INDEX = {torch.uint8: 0, torch.int16: 1, torch.int32: 2, torch.int64: 3}
_REDUCTION = {"none": 0, "sum": 1, "mean": 2, "above_zero": 3}
_LOSSES: dict[str, tuple[int, int]] = {} if _cpu is None else _cpu.losses()  # name -> (id, saved statistics per row)


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
    normalizer = -1.0  # none
    if call.normalizer is not None:
        normalizer = float(call.normalizer)
        normalizer = normalizer if normalizer > 0 else 0.0  # a tensor may hold anything: what is no divisor counts nothing
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
    """Loss and, if `save`, what backward needs: two divisors, then K statistics of every row."""
    dtype = ACCUMULATE[x.dtype]
    shape = x.shape
    loss = torch.empty(label_shape(shape) if call.reduction == "none" else (), dtype=dtype)
    saved = None
    if save:
        rows = 1 if len(shape) == 1 else x.numel() // shape[1]
        saved = torch.empty(2 + rows * statistics(call.kernel), dtype=dtype)
    bad = _cpu.forward(*_description(call, x), loss.data_ptr(), _pointer(saved))
    if bad >= 0:
        assert call.y is not None
        raise bad_label(call.y, bad, shape[1] if len(shape) > 1 else shape[0], call.ignore_index)
    return loss, saved


def backward(call: Call, x: Tensor, saved: Tensor, grad: Tensor) -> Tensor:
    """Gradient with respect to x, in x's dtype and memory format."""
    result = torch.empty_like(x)
    if grad.dtype != saved.dtype or grad.dim() > 0:
        grad = grad.to(saved.dtype).contiguous()
    _cpu.backward(*_description(call, x), grad.data_ptr(), saved.data_ptr(), result.data_ptr(), result.stride())
    return result


def statistics(kernel: str) -> int:
    """How many numbers a row `kernel` saves for backward."""
    return _LOSSES[kernel][1]
