"""A pool of large buffers on the CPU: gradients, and what backward needs.

A fresh buffer of hundreds of megabytes costs page faults and cleared pages, as much time as the loss itself; on a virtual
machine that gives free memory back to its host, ten times as much. In a training loop each step takes the memory of the last
one, so the peak of the process stays what it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import check

DEVICE = torch.device("cpu")  #: of every allocation for the C++ kernels: torch's default may be another
_LEAST = 8 << 20  # bytes: smaller buffers come from torch, whose allocator reuses them anyway
DEFAULT_LIMIT = 1 << 30
_limit = 0
_native: Any = None  # pylosses._cpu, where the memory lives


def new_gradient(x: Tensor) -> Tensor:
    """An uninitialised tensor like `x`, from the pool when it is on and `x` is large."""
    size = x.numel() * x.element_size()
    if not _is_pooled(size):
        return torch.empty_like(x)
    flat = torch.frombuffer(_native.Buffer(size), dtype=x.dtype)
    return flat.as_strided(x.shape, torch.empty_like(x, device="meta").stride())


def new_bytes(size: int) -> Tensor:
    """So many uninitialised bytes, from the pool when it is on and they are many."""
    if not _is_pooled(size):
        return torch.empty(size, dtype=torch.uint8, device=DEVICE)
    return torch.frombuffer(_native.Buffer(size), dtype=torch.uint8)


def _is_pooled(size: int) -> bool:
    return _LEAST <= size <= _limit


@contextmanager
def use_pool(limit: int) -> Iterator[None]:
    """Inside a ``with`` block, hold up to `limit` bytes of released buffers of the C++ losses for the next ones.

    Buffers are gradients and what backward needs; those below 8 MiB come from torch. 0 holds none. Outside, the limit is 1 GiB
    or what the environment variable PYLOSSES_POOL (bytes) says. Memory that a live tensor uses is never handed out. The pool
    serves all threads; `clear_pool` frees what it holds.

    >>> with use_pool(0):
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
    """Called once, with the C++ module or None."""
    global _native
    _native = native
    asked = os.environ.get("PYLOSSES_POOL", "")
    if asked and not asked.isdecimal():
        raise ValueError(f"PYLOSSES_POOL must be a number of bytes, got {asked!r}")
    _set(int(asked) if asked else DEFAULT_LIMIT)
