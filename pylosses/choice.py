"""Which backend runs a call, and why the others do not.

Asked for one (argument, `use_backend`, or PYLOSSES_BACKEND when pylosses is imported), it is used or an error gives the reason;
asked for none, the first backend with no reason against it runs, and `reference` never has one. The output of a linear layer,
which nobody has made yet, goes to a backend that never makes all of it, if one runs. That compiled kernels are missing is said
once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, SupportsIndex, overload

import torch

from . import cpu, cuda, triton
from .check import Problem
from .linear_fused import Product
from .spec import BACKENDS, LossSpec


class BackendError(RuntimeError):
    """The backend that was asked for cannot run this call."""


class BackendStatus(NamedTuple):
    """One line of `backends()`."""

    name: str
    available: bool
    reason: str  #: why it is (not) available


class BackendList(tuple[BackendStatus, ...]):
    """The backends in order; `backends()["cpu"]` finds one by name."""

    @overload
    def __getitem__(self, key: str | SupportsIndex) -> BackendStatus: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[BackendStatus, ...]: ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            for status in self:
                if status.name == key:
                    return status
            raise KeyError(key)
        return super().__getitem__(key)


def backends() -> BackendList:
    """Each backend with `available` and `reason`.

    >>> backends()["reference"].available
    True
    """
    found = [BackendStatus("reference", True, "plain PyTorch, runs everywhere")]
    for name in BACKENDS[1:]:
        reason = _absent(name)
        found.append(BackendStatus(name, reason is None, reason or _present(name)))
    return BackendList(found)


def _absent(name: str) -> str | None:
    """Why backend `name` cannot run at all here, or None."""
    if name == "cpu":
        return cpu.absent
    return cuda.absent() if name == "cuda" else triton.absent()


def _present(name: str) -> str:
    if name == "cpu":
        return f"C++ kernels, {cpu.isa()} instruction set"
    if name == "cuda":
        return "CUDA kernels, emulated on the CPU" if cuda.emulated() else "CUDA kernels"
    return "Triton kernels, interpreted on the CPU" if triton.interpreted() else "Triton kernels"


def why_not(name: str, spec: LossSpec, problem: Problem, obstacle: str | None) -> str | None:
    """Why backend `name` cannot run this call, or None. `obstacle` is what its arguments have against every fused kernel."""
    if name == "reference":
        return None
    reason = _absent(name) or spec.why_not(name)
    if reason is not None:
        return reason
    if name == "cpu" and not problem.x.is_cpu:
        return f"input is on {problem.x.device}; the cpu backend takes CPU tensors"
    if name in ("cuda", "triton"):
        reason = (cuda if name == "cuda" else triton).why_not(problem.x.device)
        if reason is not None:
            return reason
    if problem.x.layout is not torch.strided:
        return f"input has layout {problem.x.layout}; fused kernels take strided tensors"
    return obstacle


_PREFERRED = {"cpu": ("cpu",), "cuda": ("cuda", "triton"), "xpu": ("triton",)}
_asked: str | None = os.environ.get("PYLOSSES_BACKEND") or None


def choose(spec: LossSpec, problem: Problem, backend: str | None, obstacle: str | None) -> str:
    """The backend for this call."""
    asked = backend or _asked
    if asked:
        if asked not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {asked!r}")
        reason = why_not(asked, spec, problem, obstacle)
        if reason is not None:
            raise BackendError(f"backend {asked!r} cannot run {spec.function}: {reason}")
        return asked
    x, names = problem.x, _PREFERRED.get(problem.x.device.type, ())
    if isinstance(x, Product):  # first those that never make all logits
        names = tuple(sorted(names, key=lambda name: not x.stays_unmade(name, problem.soft is not None)))
    for name in names:
        if why_not(name, spec, problem, obstacle) is None:
            return name
    if obstacle is None:
        _say_that_reference_stands_in(spec, problem.x.device.type)
    return "reference"


_said: set[str] = set()  # types of devices


def _say_that_reference_stands_in(spec: LossSpec, device: str) -> None:
    """Warn, once, where a loss with compiled kernels runs without: the numbers are right, and nobody sees why it is slow."""
    if device in _said or torch.compiler.is_compiling():
        return
    absent = {name: _absent(name) for name in _PREFERRED.get(device, ()) if spec.why_not(name) is None}
    if absent and None not in absent.values():
        _said.add(device)
        warnings.warn(
            f"{spec.function} runs in plain PyTorch, some times slower than compiled kernels: "
            + "; ".join(f"backend {name!r} is not available: {reason}" for name, reason in absent.items())
            + '. Asking for it, with backend="reference", pylosses.use_backend("reference") or the environment variable '
            "PYLOSSES_BACKEND=reference, turns this warning off.",
            stacklevel=2,
        )


@contextmanager
def use_backend(backend: str | None) -> Iterator[None]:
    """Ask for one backend inside a ``with`` block, in all threads of the process.

    >>> import torch, pylosses
    >>> with pylosses.use_backend("reference"):
    ...     loss = pylosses.hem_loss(torch.randn(2, 3), torch.tensor([0, 2]))
    """
    global _asked
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    before, _asked = _asked, backend
    try:
        yield
    finally:
        _asked = before
