"""An optional pool of gradient buffers on the CPU.

A fresh buffer of hundreds of megabytes costs page faults and cleared pages, as much time as the loss itself. In a training loop
each step's gradient can take the memory of the last one, which died with `zero_grad(set_to_none=True)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import check

_LEAST = 8 << 20  # bytes: smaller buffers come from torch, whose allocator reuses them anyway
_limit = 0
_native: Any = None  # pylosses._cpu, where the memory lives


def new_gradient(x: Tensor) -> Tensor:
    """An uninitialised tensor like `x`, from the pool when it is on and `x` is large."""
    size = x.numel() * x.element_size()
    if not _limit or size < _LEAST or size > _limit:
        return torch.empty_like(x)
    flat = torch.frombuffer(_native.Buffer(size), dtype=x.dtype)
    return flat.as_strided(x.shape, torch.empty_like(x, device="meta").stride())


@contextmanager
def use_pool(limit: int = 2 << 30) -> Iterator[None]:
    """Inside a ``with`` block, released gradients of the C++ losses are kept and used again, up to `limit` bytes in all.

    Memory that a live tensor uses is never handed out. At the end of the block what the pool holds is freed. The environment
    variable PYLOSSES_POOL (bytes) turns the pool on for a whole process. It serves all threads.

    >>> with use_pool(1 << 30):
    ...     pass
    """
    global _limit
    before = _limit
    _set(check.integer("limit", limit, least=0))
    try:
        yield
    finally:
        _set(before)


def clear_pool() -> None:
    """Free the memory that the pool holds; tensors in use keep theirs."""
    if _native is not None:
        _native.clear_pool()


def _set(limit: int) -> None:
    global _limit
    if _native is not None:  # without the kernels there is nothing to pool
        _limit = limit
        _native.set_pool_limit(limit)


def attach(native: Any) -> None:
    """Called once, with the C++ module or None; turns the pool on if PYLOSSES_POOL asks for it."""
    global _native
    _native = native
    asked = os.environ.get("PYLOSSES_POOL", "")
    if asked and not asked.isdecimal():
        raise ValueError(f"PYLOSSES_POOL must be a number of bytes, got {asked!r}")
    if asked:
        _set(int(asked))
