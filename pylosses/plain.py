"""What a kernel may read by pointer: plain strided memory, in a call that nothing traces or transforms.

What stands between a tensor and its numbers (a lazy sign, another layout, a wrapper) shows in its dispatch keys, what stands
between a call and its operations (a tracer, a mode, a transform) in those of the thread. Both are compared with the keys that
plain tensors and plain calls have, so that whatever else torch has, or will have, is not taken for plain.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

_KEYS = torch._C.DispatchKey.__members__
_keys, _keys_of_thread = torch._C._dispatch_keys, torch._C._dispatch_tls_local_include_set
_is_compiling = torch.compiler.is_compiling
_in_transform = torch._C._are_functorch_transforms_active
_is_legacy_batch = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(is_grads_batched=True)


def _all_but(*names: str) -> int:
    """The bits of the other dispatch keys."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(_KEYS[name]).raw_repr()
    return ~bits


_DEVICES = [name for name in _KEYS if f"Autograd{name}" in _KEYS and f"Sparse{name}" in _KEYS]
_AUTOGRAD = ["ADInplaceOrView", "AutogradOther", *(f"Autograd{name}" for name in _DEVICES)]
_STRANGE = _all_but(*_DEVICES, *_AUTOGRAD, *(name for name in _KEYS if name.startswith("Autocast")))
_STRANGE_THREAD = _all_but("BackendSelect", "ADInplaceOrView")

#: tensors that are refused: (what they are, whether one is, the way out)
_REFUSED = (
    ("nested", lambda t: t.is_nested, "torch.nested.to_padded_tensor(tensor, padding) makes one"),
    ("quantized", lambda t: t.is_quantized, "tensor.dequantize() makes one"),
    ("sparse or mkldnn", lambda t: t.layout is not torch.strided, "tensor.to_dense() makes one"),
)
TYPES = (Tensor, torch.nn.Parameter)


def is_eager() -> bool:
    """Does a call run at once, unseen: no tracer, dispatch mode, transform or forward-mode derivative around it?"""
    if _is_compiling():
        return False
    return not _keys_of_thread().raw_repr() & _STRANGE_THREAD and forward_ad._current_level < 0


def is_plain(value: Tensor) -> bool:
    """May a kernel read this tensor, and nothing else is asked of it (a forward-mode derivative)?"""
    return type(value) in TYPES and not _keys(value).raw_repr() & _STRANGE and forward_ad._current_level < 0


def is_batch(value: Tensor) -> bool:
    """Is this a batch, or another wrapper, whose numbers nobody can ask for? A quicker look than `is_plain`, for backward."""
    return type(value) not in TYPES or _in_transform() or _is_legacy_batch(value) or forward_ad._current_level >= 0


def plain(name: str, value: Tensor) -> Tensor:
    """An argument of an eager call in plain strided memory.

    Lazy tensors are made (a sign or conjugation that is only noted, zeros without memory, what a transform left behind), those
    of other layouts refused. A subclass stays what it is: the registered ops take it, if it knows them.
    """
    if not _keys(value).raw_repr() & _STRANGE:
        return value
    for kind, is_one, way_out in _REFUSED:
        if is_one(value):
            raise TypeError(f"{name} must be a dense strided tensor, got a {kind} one ({value.layout}); {way_out}")
    if type(value) not in TYPES:
        return value
    made = value.clone()
    if _keys(made).raw_repr() & _STRANGE:
        raise TypeError(f"{name} must be a plain tensor, got a wrapper that a transform or tracer left behind")
    return made
