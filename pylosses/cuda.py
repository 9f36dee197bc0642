"""The CUDA backend: tensors in, pointers down to `pylosses._cuda`, tensors out. Nothing waits for the device.

The kernels are compiled and tested on the CPU: `emulate(module)` lets a module with the same functions, built from the same
sources for the host (tests/cuda_on_cpu), take the place of `pylosses._cuda`; the backend then takes CPU tensors.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .check import ACCUMULATE
from .sizes import Facts, Sizes

if TYPE_CHECKING:
    from .autograd import Call

_cuda: Any = None
_missing: str | None = None  # why the module is not there
try:
    _cuda = import_module("pylosses._cuda")
except ImportError as error:
    try:
        _missing = import_module("pylosses._build").CUDA_REASON
    except (ImportError, AttributeError):
        pass
    _missing = _missing or f"the CUDA kernels could not be imported ({error})"

_DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_INDEX = {torch.uint8: 0, torch.int16: 1, torch.int32: 2, torch.int64: 3}
_REDUCTION = {"none": 0, "sum": 1, "mean": 2, "above_zero": 3}


def emulate(module: Any) -> Any:
    """Let `module` take the place of `pylosses._cuda`; returns the one that was there."""
    global _cuda
    before, _cuda = _cuda, module
    _losses.cache_clear()
    _sizes.cache_clear()
    _no_device.cache_clear()
    return before


def emulated() -> bool:
    """Whether the kernels run on the CPU."""
    return _cuda is not None and _cuda.emulated


def absent() -> str | None:
    """Why the backend cannot run at all here, or None."""
    return _missing if _cuda is None else _no_device()


@cache
def _no_device() -> str | None:
    try:
        return None if _cuda.devices() > 0 else "CUDA found no device"
    except RuntimeError as error:
        return str(error)


def why_not(device: torch.device) -> str | None:
    """Why the backend does not take tensors of `device`, or None."""
    if device.type == ("cpu" if emulated() else "cuda"):
        return None
    return f"input is on {device}; the cuda backend {'is emulated and takes CPU' if emulated() else 'takes CUDA'} tensors"


@cache
def _losses() -> dict[str, Facts]:
    return {} if _cuda is None else {name: Facts(*facts) for name, facts in _cuda.losses().items()}


def kernels() -> tuple[str, ...]:
    """Names of the formulas in csrc/losses/list.h."""
    return tuple(_losses())


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@lru_cache(maxsize=1024)
def _sizes(kernel: str, dtype: int, scalars: tuple[float, ...], soft: bool, shift: bool) -> Sizes:
    return Sizes(*_cuda.sizes(_losses()[kernel].number, dtype, scalars, soft, shift)).of_loss(kernel)


def sizes(call: Call, dtype: torch.dtype) -> Sizes:
    """What the kernels save and give."""
    return _sizes(call.kernel, _DTYPE[dtype], call.scalars, call.soft is not None, call.shift is not None)


def loss_shape(call: Call, x: Tensor) -> torch.Size:
    """The shape of the loss."""
    return torch.Size() if call.reduction != "none" else sizes(call, x.dtype).loss_shape(x)


def new_saved(call: Call, x: Tensor) -> Tensor:
    """Room for what backward needs, in whole doubles, which stay aligned in a stack."""
    dtype = ACCUMULATE[x.dtype]
    return x.new_empty((sizes(call, x.dtype).saved_bytes(x) + 7) // 8 * (8 // dtype.itemsize), dtype=dtype)


class _Prepared:
    """A call as the module takes it, with everything its pointers need alive."""

    def __init__(self, call: Call, x: Tensor) -> None:
        y, soft, weight = call.y, call.soft, call.weight
        number, given = -1.0, None
        if isinstance(call.normalizer, Tensor):
            given = call.normalizer.detach().to(device=x.device, dtype=torch.float64, non_blocking=True)
        elif call.normalizer is not None:
            number = max(float(call.normalizer), 0.0)
        # Smoothing needs the sum of the class weights.
        total = weight.sum() if weight is not None and sizes(call, x.dtype).weight_sum else None
        self.x, self.alive = x, (call, given, total)
        self.problem = _cuda.Problem(
            _losses()[call.kernel].number,
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
            _pointer(weight),
            _pointer(call.shift),
            _pointer(call.factor),
            _pointer(call.sample_weight),
            _pointer(total),
            call.scalars,
            _REDUCTION[call.reduction],
            number,
            _pointer(given),
        )

    def run(self, backward: bool, saves: bool, *pointers: Any) -> None:
        x = self.x
        workspace = x.new_empty(_cuda.workspace(self.problem, backward, saves) + 256, dtype=torch.uint8)
        device, stream = 0, 0
        if x.is_cuda:
            device, stream = x.get_device(), torch.cuda.current_stream(x.device).cuda_stream
        (_cuda.backward if backward else _cuda.forward)(self.problem, *pointers, workspace.data_ptr(), device, stream)


def forward(call: Call, x: Tensor, save: bool) -> tuple[Tensor, Tensor | None]:
    """Loss and, if `save`, what backward needs."""
    loss = x.new_empty(loss_shape(call, x), dtype=ACCUMULATE[x.dtype])
    saved = new_saved(call, x) if save else None
    if x.numel() == 0:
        loss.zero_()
        return loss, saved if saved is None else saved.zero_()
    call, x = _readable(call, x)
    _Prepared(call, x).run(False, save, loss.data_ptr(), _pointer(saved))
    return loss, saved


def backward(call: Call, x: Tensor, saved: Tensor, grad: Tensor) -> Tensor:
    """Gradient with respect to x, in x's dtype and memory format."""
    result = torch.empty_like(x)
    if x.numel() == 0:
        return result
    call, x = _readable(call, x)
    written = result
    if not _cuda.walks(result.shape, result.stride()):
        written = torch.empty_like(x, memory_format=torch.contiguous_format)
    up = grad.resolve_neg().to(saved.dtype).contiguous()
    pointers = up.data_ptr(), saved.data_ptr(), written.data_ptr(), written.stride()
    _Prepared(call, x).run(True, True, *pointers)
    return result if written is result else result.copy_(written)


def _readable(call: Call, x: Tensor) -> tuple[Call, Tensor]:
    """The same, with copies of what is spread over more dimensions than the kernels walk."""
    if not _cuda.walks(x.shape, x.stride()):
        x = x.contiguous()
    if call.soft is not None and not _cuda.walks(call.soft.shape, call.soft.stride()):
        call = call._replace(soft=call.soft.contiguous())
    return call, x
