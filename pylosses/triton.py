"""The Triton backend: tensors in, launches of `pylosses.kernels`, tensors out. Imports Triton at the first call."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .check import ACCUMULATE, label_shape

if TYPE_CHECKING:
    from .autograd import Call


def absent() -> str | None:
    """Why the backend cannot run at all here, or None; does not import Triton."""
    if not _installed():
        return "Triton is not installed (pip install 'pylosses[triton]')"
    if interpreted() or torch.cuda.is_available() or torch.xpu.is_available():
        return None
    return "no GPU is present, and Triton's interpreter, which runs kernels on the CPU, is off (TRITON_INTERPRET=1 turns it on)"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's interpreter is on; Triton reads the switch when it is imported."""
    loaded = sys.modules.get("triton")
    if loaded is not None and hasattr(loaded, "knobs"):
        return bool(loaded.knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on", "y", "yes")


def why_not(device: torch.device) -> str | None:
    """Why the backend does not take tensors of `device`, or None."""
    if device.type in ("cuda", "xpu") and not interpreted() or device.type == "cpu" and interpreted():
        return None
    if device.type == "cpu":
        return "input is on the CPU; the triton backend takes GPU tensors, or CPU tensors under TRITON_INTERPRET=1"
    return (
        f"input is on {device}; the triton backend {'is interpreted and takes CPU' if interpreted() else 'takes GPU'} tensors"
    )


def kernels() -> tuple[str, ...]:
    """Names of the formulas in kernels/losses."""
    folder = Path(import_module("pylosses.kernels").__path__[0]) / "losses"
    return tuple(sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__"))


@cache
def _kernel(name: str, soft: bool = False) -> tuple[Any, Any]:
    """(the formula, the module of its family); `soft`: for class probabilities as targets."""
    formula = import_module("pylosses.kernels.formula").formula_of(name)
    family = "soft" if soft and formula.family == "softmax" else formula.family
    return formula, import_module(f"pylosses.kernels.{family}")


def statistics(kernel: str) -> int:
    """How many numbers a row `kernel` saves for backward."""
    return _kernel(kernel)[0].saved


def new_saved(call: Call, x: Tensor) -> Tensor:
    """Room for what backward needs: two divisors, K statistics of every row, and the region family's classes."""
    formula, family = _kernel(call.kernel)
    shape = x.shape
    rows = 1
    for size in label_shape(shape):
        rows = rows * size
    more = family.saved_more(formula, call, shape) if formula.family == "region" else 0
    return x.new_empty(2 + rows * formula.saved + more, dtype=ACCUMULATE[x.dtype])


def loss_shape(call: Call, x: Tensor) -> tuple[int, ...]:
    """The shape of the loss: with reduction "none" that of the labels, or of the classes in the region family."""
    if call.reduction != "none":
        return ()
    formula, family = _kernel(call.kernel)
    return family.loss_shape(formula, call, x.shape) if formula.family == "region" else label_shape(x.shape)


def forward(call: Call, x: Tensor, save: bool) -> tuple[Tensor, Tensor | None]:
    """Loss and, if `save`, what backward needs: two divisors, then K statistics of every row."""
    formula, family = _kernel(call.kernel, call.soft is not None)
    loss = x.new_empty(loss_shape(call, x), dtype=ACCUMULATE[x.dtype])
    saved = new_saved(call, x) if save else None
    if x.numel() == 0:
        loss.zero_()
        return loss, saved if saved is None else saved.zero_()
    call, x = _readable(call, x)
    with _on(x.device):
        family.launch_forward(formula, call, x, loss, saved)
    return loss, saved


def backward(call: Call, x: Tensor, saved: Tensor, grad: Tensor) -> Tensor:
    """Gradient with respect to x, in x's dtype and memory format."""
    formula, family = _kernel(call.kernel, call.soft is not None)
    result = torch.empty_like(x)
    if x.numel() == 0:
        return result
    call, x = _readable(call, x)
    written = _writable(call, x, result)
    with _on(x.device):
        family.launch_backward(formula, call, x, saved, grad.resolve_neg().to(saved.dtype).contiguous(), written)
    return result if written is result else result.copy_(written)


def product_forward(call: Call, h: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Loss of the logits h w^T + b, which are never in memory, and what backward needs."""
    formula, linear, layer, dtype = _layer(call, h, w, b)
    rows = len(layer.h)
    loss = h.new_empty(h.shape[:-1] if call.reduction == "none" else (), dtype=dtype)
    saved = h.new_empty(2 + rows * (formula.saved + 1), dtype=dtype)
    if rows == 0:
        return loss.zero_(), saved.zero_()
    with _on(h.device):
        linear.launch_forward(formula, call, layer, loss, saved)
    return loss, saved


def product_backward(
    call: Call, h: Tensor, w: Tensor, b: Tensor | None, saved: Tensor, grad: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """The wanted gradients of h, w and b, each in the dtype of its tensor."""
    formula, linear, layer, dtype = _layer(call, h, w, b)
    if len(layer.h) == 0:
        return tuple(torch.zeros_like(t) if t is not None and want else None for t, want in zip((h, w, b), wanted, strict=True))
    with _on(h.device):
        found = linear.launch_backward(formula, call, layer, saved, grad.resolve_neg().to(dtype).contiguous(), wanted)
    tensors = zip(found, (h, w, b), strict=True)
    return tuple(None if g is None or t is None else g.to(t.dtype).view(t.shape) for g, t in tensors)


def _layer(call: Call, h: Tensor, w: Tensor, b: Tensor | None) -> tuple[Any, Any, Any, torch.dtype]:
    """(formula, kernels.linear, the layer with its features as rows, dtype of the statistics)."""
    linear = import_module("pylosses.kernels.linear")
    rows = linear.Layer(h.reshape(h.shape[:-1].numel(), h.shape[-1]), w, b)
    return _kernel(call.kernel)[0], linear, rows, torch.float64 if torch.float64 in (h.dtype, w.dtype) else torch.float32


def _walked(call: Call, *tensors: Tensor) -> bool:
    """Whether the kernels can walk the rows of these tensors, and of the class probabilities, as they lie."""
    soft = () if call.soft is None else (call.soft,)
    return import_module("pylosses.kernels.launch").geometry(*tensors, *soft) is not None


def _readable(call: Call, x: Tensor) -> tuple[Call, Tensor]:
    """The same, with copies of what is spread over more dimensions than the kernels walk."""
    if _walked(call, x):
        return call, x
    return call._replace(soft=call.soft if call.soft is None else call.soft.contiguous()), x.contiguous()


def _writable(call: Call, x: Tensor, result: Tensor) -> Tensor:
    """Where the kernel writes the gradient: the result itself, if it can."""
    if result.dtype == torch.bfloat16 and interpreted():  # Triton's interpreter truncates to bfloat16
        result = result.float()
    return result if _walked(call, x, result) else torch.empty_like(x, memory_format=torch.contiguous_format)


def _on(device: torch.device) -> Any:
    """Launches go to the current device: make it the tensors' own. The interpreter computes with numpy, which warns of inf."""
    if device.type == "cpu":
        return import_module("numpy").errstate(all="ignore")
    return torch.cuda.device(device) if device.type == "cuda" else torch.xpu.device(device)
