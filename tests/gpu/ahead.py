"""Kernels compiled without a GPU, exactly as the launcher would compile them, and what the compiler made of them.

`compiling(target)` runs the host code of a loss on CPU tensors: each launch is compiled for `target` with the specialisation of
its own arguments, recorded, and handed to `execute` instead of a device.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what the kernels were tested with; later versions change the default

import gpu_calls
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

from pylosses import triton as backend
from pylosses.autograd import Call

TARGETS = {
    "sm_75": GPUTarget("cuda", 75, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Launch(NamedTuple):
    """One launch of a compiled kernel."""

    name: str  #: module and function of the kernel
    grid: tuple[int, ...]
    compiled: Any
    arguments: dict[str, Any]

    @property
    def warps(self) -> int:
        return self.compiled.metadata.num_warps

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of each parameter that the compiled kernel still has; tuples are taken apart."""
        for name, kind in self.compiled.src.signature.items():
            yield from ((name, value) for value in _flat(kind, self.arguments[name]))


def _flat(kind: Any, argument: Any) -> Iterator[Any]:
    if isinstance(kind, tuple):
        for each, value in zip(kind, argument, strict=True):
            yield from _flat(each, value)
    elif kind != "constexpr":
        yield argument


class _Driver:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling(
    target: str, execute: Callable[[Launch], None] = lambda launch: None, *, forget: bool = True
) -> Iterator[list[Launch]]:
    """Collects the launches inside the block; `forget`: each is compiled, whatever an earlier one left for its arguments."""
    found: list[Launch] = []
    launching = jit.JITFunction.run
    triton.runtime.driver.set_active(_Driver(TARGETS[target]))

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **known: Any) -> None:
        if forget:
            self.device_caches.clear()  # of the device: it may have been another target
        compiled = launching(self, *args, grid=grid, warmup=True, **known)
        arguments = dict(zip(self.arg_names, args, strict=False)) | {k: v for k, v in known.items() if k in self.arg_names}
        found.append(Launch(_name(self), grid, compiled, arguments))
        execute(found[-1])

    jit.JITFunction.run = run
    try:
        yield found
    finally:
        jit.JITFunction.run = launching


@contextmanager
def recording() -> Iterator[set[str]]:
    """The names of the kernels that are launched inside the block, which are not even compiled."""
    found: set[str] = set()
    launching = jit.JITFunction.run
    triton.runtime.driver.set_active(_Driver(TARGETS["sm_80"]))
    jit.JITFunction.run = lambda self, *args, **known: found.add(_name(self))
    try:
        yield found
    finally:
        jit.JITFunction.run = launching


def _name(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def kernels() -> set[str]:
    """Every kernel of the package: its @triton.jit functions that return nothing and that no other one calls."""
    functions: dict[str, ast.FunctionDef] = {}
    for file in (Path(__file__).parents[2] / "kernels").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "triton.jit" for d in node.decorator_list):
                functions[f"{file.stem}.{node.name}"] = node
    inner = [node for function in functions.values() for node in ast.walk(function)]
    called = {node.func.id for node in inner if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    returns = {name for name, f in functions.items() if any(isinstance(n, ast.Return) for n in ast.walk(f))}
    return {name for name in functions if name not in returns and name.rpartition(".")[2] not in called}


class Resources(NamedTuple):
    registers: int
    spilled: int  #: bytes
    shared: int  #: bytes
    loads: int  #: instructions on global memory in the code
    stores: int
    wide: int  #: of them 16 bytes a lane


def resources(launch: Launch) -> Resources:
    compiled = launch.compiled
    target = compiled.metadata.target
    shared = compiled.metadata.shared
    if target.backend == "cuda":
        ptx = compiled.asm["ptx"]
        log = _ptxas(ptx, target.arch)
        spilled = sum(map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()))
        loads, stores = len(re.findall(r"\bld\.global", ptx)), len(re.findall(r"\bst\.global", ptx))
        wide = len(re.findall(r"\b(?:ld|st)\.global[\w.:]*(?:\.v4\.b32|\.v2\.b64)", ptx))
        return Resources(int(re.search(r"Used (\d+) registers", log)[1]), spilled, shared, loads, stores, wide)
    text = compiled.asm["amdgcn"]
    number = {k: int(re.search(rf"\.{k}:\s*(\d+)", text)[1]) for k in ("vgpr_count", "vgpr_spill_count")}
    return Resources(
        number["vgpr_count"],
        4 * number["vgpr_spill_count"],  # scalar registers spill to lanes of vector registers, not to memory
        shared,
        len(re.findall(r"(?:global|buffer)_load", text)),
        len(re.findall(r"(?:global|buffer)_store", text)),
        len(re.findall(r"(?:global|buffer)_(?:load|store)_(?:dwordx4|b128)", text)),
    )


def _ptxas(ptx: str, arch: int) -> str:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    name = f"sm_{arch}{'a' if arch >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        for tool in ("ptxas-blackwell", "ptxas") if arch >= 100 else ("ptxas", "ptxas-blackwell"):  # as Triton does
            command = [tools / tool, "-v", f"--gpu-name={name}", source, "-o", Path(folder) / "kernel.cubin"]
            done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
            if done.returncode == 0:
                return done.stderr
    raise RuntimeError(done.stderr)


def call_of(name: str, x: torch.Tensor, sample: int = 0, *, reduction: str | None = None, soft: bool = False) -> Call:
    """`gpu_calls.call_of` of the Triton backend, as if a GPU were here."""
    real, interpreted = backend.absent, backend.interpreted
    try:
        backend.absent, backend.interpreted = (lambda: None), (lambda: True)
        return gpu_calls.call_of(name, x, sample, backend="triton", reduction=reduction, soft=soft)
    finally:
        backend.absent, backend.interpreted = real, interpreted


def layer_of(name: str, dtype: torch.dtype, rows: int, classes: int, features: int, sample: int = 0) -> tuple[Any, ...]:
    """The same for the loss of a linear layer's output: the call, features h, head w and bias b."""
    g = torch.Generator().manual_seed(6)
    given = [torch.randn(*size, generator=g).to(dtype) for size in ((rows, features), (classes, features), (classes,))]
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    return call_of(name, torch.zeros(rows, classes, dtype=statistics), sample), *given
