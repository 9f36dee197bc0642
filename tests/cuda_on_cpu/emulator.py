"""Builds the sources of csrc/cuda as host C++ and runs them on CPU tensors: backend "cuda" without a GPU. See README.md."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ORDERS = ("forward", "reverse", "random", "greedy", "greedy_reverse")
#: AddressSanitizer sees null pointers and the ends of objects by itself
SANITIZED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize=null,object-size,vptr", "-fno-sanitize-recover=all")
COMPILER = os.environ.get("CXX", "g++")


class Uint3(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in "xyz"]

    def __iter__(self) -> Iterator[int]:
        return iter((self.x, self.y, self.z))


class _Launch(ctypes.Structure):
    """`Launch` of on_cpu.h."""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("grid", Uint3),
        ("block", Uint3),
        ("shared", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("parameters", ctypes.c_int32),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
        ("sizes", ctypes.POINTER(ctypes.c_uint64)),
    ]


class Launch(NamedTuple):
    kernel: str  #: mangled name
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    device: int
    parameters: tuple[bytes, ...]  #: only of launches that a hook gets


# Building ---------------------------------------------------------------------------------------------------------------------


def kernel_sources() -> list[Path]:
    return [*sorted((ROOT / "csrc" / "cuda").glob("*.cu")), ROOT / "csrc" / "cuda" / "bindings.cpp"]


def build(
    name: str = "plain",
    flags: tuple[str, ...] = (),
    *,
    sources: list[Path] | None = None,
    edit: Callable[[str, str], str] | None = None,
    folder: Path | None = None,
) -> Path:
    """The emulator as a shared library: built where it is not, by one process at a time.

    `sources`: other files than csrc/cuda. `edit(file name, text)` may spoil the sources, which are then copied to `folder`.
    """
    csrc = ROOT / "csrc"
    sources = kernel_sources() if sources is None else sources
    if edit is not None:
        assert folder is not None
        csrc = _edited(folder / "csrc", edit)
    files = [csrc / f.relative_to(ROOT / "csrc") if f.is_relative_to(ROOT / "csrc") else f for f in sources]
    includes = [f"-I{csrc}", f"-I{HERE}", f"-I{sysconfig.get_path('include')}"]
    if any(f.name == "bindings.cpp" for f in files):
        import pybind11

        includes.append(f"-isystem{pybind11.get_include()}")
        files.append(HERE / "left_out.cpp")
    level = () if any(f.startswith("-O") for f in flags) else ("-O1",)
    command = [COMPILER, "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas", *includes]
    command += ["-include", str(HERE / "on_cpu.h"), "-x", "c++", "-c", *level, *flags]
    headers = [h for pattern in ("cuda/*.*h", "losses/*.h", "cpu/problem.h") for h in csrc.glob(pattern)]
    known = _digest([*files, *headers, *HERE.glob("*.h"), *HERE.glob("*.cpp")], command)
    target = (folder or ROOT / "build" / "cuda_on_cpu" / f"{name}-{known}") / f"{name}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(command, [*files, HERE / "fibers.cpp", HERE / "runtime.cpp"], flags, target)
            if folder is None:
                for old in target.parent.parent.glob(f"{name}-*"):
                    if old != target.parent:
                        shutil.rmtree(old)
    return target


def _edited(to: Path, edit: Callable[[str, str], str]) -> Path:
    for source in (ROOT / "csrc").rglob("*"):
        if source.is_file():
            copy = to / source.relative_to(ROOT / "csrc")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(edit(source.name, source.read_text()))
    return to


def _digest(files: list[Path], command: list[str]) -> str:
    found = hashlib.sha256("\0".join(command).encode())
    found.update(subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout + sys.version.encode())
    for file in sorted(files):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()[:16]


def _compile(command: list[str], files: list[Path], flags: tuple[str, ...], target: Path) -> None:
    def one(file: Path) -> str:
        made = str(target.parent / f"{file.stem}.o")
        # The bindings run once a call, and half of them is pybind11: plain and quick.
        given = [f for f in command if not f.startswith(("-O", "-fsanitize"))] if file.stem == "bindings" else command
        done = subprocess.run([*given, str(file), "-o", made], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{file.name} does not compile as host C++:\n{done.stderr[-6000:]}")
        return made

    slow = ("select", "bindings", "softmax", "region", "margin", "entropy")
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(one, sorted(files, key=lambda f: slow.index(f.stem) if f.stem in slow else len(slow))))
    made = target.with_suffix(".part")
    done = subprocess.run([COMPILER, "-shared", *flags, *objects, "-o", str(made)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-6000:])
    made.rename(target)


# Running ----------------------------------------------------------------------------------------------------------------------


class Emulator:
    """A library that `build` made: its Python module, and control over threads and the fake runtime."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self.control = ctypes.CDLL(str(library))
        self.names = _names(library, ctypes.cast(self.control.on_cpu_reset, ctypes.c_void_p).value or 0)
        self.hook: Any = None
        self.reset()

    @property
    def module(self) -> Any:
        """What `pylosses._cuda` is on a machine with a GPU."""
        return _module(self.path)

    def reset(self) -> None:
        self.control.on_cpu_reset()
        self.hook = None

    def order(self, name: str, seed: int = 0) -> None:
        self.control.on_cpu_order(ORDERS.index(name), seed)

    def devices(self, count: int) -> None:
        self.control.on_cpu_devices(count)

    def current_device(self) -> int:
        return self.control.on_cpu_current_device()

    def fail(self, function: str, error: int) -> None:
        """Let calls of a function of the runtime, or every "launch", fail with this error; 0: no more."""
        self.control.on_cpu_fail(function.encode(), error)

    def launches(self) -> list[Launch]:
        """Since the last reset."""
        count = self.control.on_cpu_launches(None, 0)
        found = (_Launch * count)()
        self.control.on_cpu_launches(found, count)
        return [self._launch(launch, ()) for launch in found]

    @contextlib.contextmanager
    def handing(self, execute: Callable[[Launch], None]) -> Iterator[None]:
        """Inside the block launches are handed to `execute` instead of being run."""
        failure: list[BaseException] = []

        def called(pointer: Any) -> None:
            launch = pointer.contents
            if failure:
                return  # what follows would compute with what the failed launch did not write
            try:
                values = (ctypes.string_at(launch.values[i], launch.sizes[i]) for i in range(launch.parameters))
                execute(self._launch(launch, tuple(values)))
            except BaseException as error:
                failure.append(error)

        self.hook = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Launch))(called)
        self.control.on_cpu_hook(self.hook)
        try:
            yield
        finally:
            self.control.on_cpu_hook(None)
        if failure:
            raise failure[0]

    def _launch(self, found: _Launch, values: tuple[bytes, ...]) -> Launch:
        name = self.names.get(found.kernel, hex(found.kernel))
        return Launch(name, tuple(found.grid), tuple(found.block), found.shared, found.stream, found.device, values)  # type: ignore[arg-type]


@cache
def _module(library: Path) -> Any:
    unique = hashlib.sha256(str(library).encode()).hexdigest()[:8]  # pybind11 gives one module for one name
    loader = importlib.machinery.ExtensionFileLoader(f"on_cpu_{unique}._cuda", str(library))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def _names(library: Path, of_reset: int) -> dict[int, str]:
    """Address of a function in this process -> its mangled name."""
    text = subprocess.run(["nm", "--defined-only", str(library)], capture_output=True, text=True, check=True).stdout
    places = {name: int(place, 16) for place, kind, name in map(str.split, text.splitlines()) if kind in "tTwW"}
    base = of_reset - places["on_cpu_reset"]
    return {base + place: name for name, place in places.items()}


@cache
def plain() -> Emulator:
    """The emulator of the sources as they are."""
    return Emulator(build())


@contextlib.contextmanager
def switched(emulator: Emulator | None = None) -> Iterator[Emulator]:
    """Inside the block backend "cuda" is the emulator and takes CPU tensors."""
    from pylosses import cuda

    emulator = emulator or plain()
    before = cuda.emulate(emulator.module)
    try:
        yield emulator
    finally:
        cuda.emulate(before)
        emulator.reset()
