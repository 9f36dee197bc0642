"""The C++ backend: tensors in, pointers down to `pylosses._cpu`, tensors out."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import pool
from .check import ACCUMULATE, bad_label, label_shape
from .plain import is_plain
from .pool import DEVICE
from .sizes import Facts, Sizes

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
_LOSSES: dict[str, Facts] = {} if _cpu is None else {name: Facts(*facts) for name, facts in _cpu.losses().items()}


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
        _LOSSES[call.kernel].number,
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
    told = sizes(call, x.dtype)
    saved = pool.new_bytes(_whole_lines(told.saved_bytes(x)))
    if not is_known_early(call, told):
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


def scores(x: Tensor, temperature: float, gamma: float, most: int, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
    """The fields of `ConfidenceScores` that are `wanted`, shaped like labels of x; `most` classes enter gen."""
    shape = label_shape(x.shape)
    dtypes = [ACCUMULATE[x.dtype]] * 5 + [torch.int64]
    found = [torch.empty(shape, dtype=d, device=DEVICE) if w else None for d, w in zip(dtypes, wanted, strict=True)]
    pointers = [_pointer(score) for score in found]
    classes = x.shape[1] if x.dim() > 1 else x.shape[0]
    logits = _DTYPE[x.dtype], x.data_ptr(), x.shape, x.stride()
    _cpu.scores(*logits, torch.get_num_threads(), temperature, gamma, min(most, classes), pointers)
    return tuple(found)


@lru_cache(maxsize=1024)
def _sizes(kernel: str, dtype: int, scalars: tuple[float, ...], soft: bool, shift: bool) -> Sizes:
    return Sizes(*_cpu.sizes(_LOSSES[kernel].number, dtype, scalars, soft, shift)).of_loss(kernel)


def facts(kernel: str) -> Facts:
    """What is known of a formula."""
    return _LOSSES[kernel]


def sizes(call: Call, dtype: torch.dtype) -> Sizes:
    """What the kernels save and give."""
    return _sizes(call.kernel, _DTYPE[dtype], call.scalars, call.soft is not None, call.shift is not None)


def is_known_early(call: Call, told: Sizes) -> bool:
    """May forward write the gradient for an upstream gradient of 1?"""
    return told.ahead and call.reduction in ("mean", "sum")


def loss_shape(call: Call, x: Tensor) -> torch.Size:
    """The shape of the loss."""
    return torch.Size() if call.reduction != "none" else sizes(call, x.dtype).loss_shape(x)


def new_saved(call: Call, x: Tensor) -> Tensor:
    """Memory for what backward needs, from torch: it may be traced."""
    return torch.empty(_whole_lines(sizes(call, x.dtype).saved_bytes(x)), dtype=torch.uint8, device=DEVICE)


def _whole_lines(size: int) -> int:
    return (size + 127) // 64 * 64  # of the cache: a stack of them stays aligned
