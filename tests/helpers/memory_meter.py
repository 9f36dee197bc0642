"""How many bytes does a loss hold at most? Lines of JSON ask and answer, in a process with malloc_counter.c preloaded."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import sys
from collections.abc import Callable

import torch
from cases import Case, arguments_of, layouts

import pylosses
from pylosses.spec import LOSSES

_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


def made(name: str, sample: int, shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    spec = LOSSES[name]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g).to(dtype)
    y = torch.randint(0, shape[1], shape[:1] + shape[2:], generator=g, dtype=torch.int16)
    inputs = (x, y) if spec.inputs == "labelled" else (x,)
    return Case(spec, inputs, arguments_of(spec, sample, shape[1], dtype), shape[1])


def measure(counter: ctypes.CDLL, asked: dict) -> dict[str, int]:
    """Bytes held at most by the value alone, and by forward and backward together."""
    torch.set_num_threads(asked["threads"])
    c = made(asked["loss"], asked["sample"], tuple(asked["shape"]), getattr(torch, asked["dtype"]))
    x = next(x for layout, x in layouts(c.inputs[0]) if layout == asked["layout"])
    leaf = x.detach().requires_grad_()

    def call(x: torch.Tensor) -> torch.Tensor:
        return getattr(pylosses, c.spec.function)(x, *c.inputs[1:], backend=asked["backend"], **c.arguments)

    def train() -> None:
        (grad,) = torch.autograd.grad(call(leaf), leaf)
        assert grad.shape == x.shape

    parts: dict[str, Callable[[], object]] = {"value": lambda: call(x)}
    if c.spec.family != "score":
        parts["training"] = train
    return {part: counted(counter, action) for part, action in parts.items()}


def counted(counter: ctypes.CDLL, action: Callable[[], object]) -> int:
    """Bytes held at most during `action`, the second time: what is made once is made the first time."""
    action()
    counter.counter_start()
    action()
    return counter.counter_most()


def control(counter: ctypes.CDLL, how: str) -> dict[str, int]:
    """Bytes counted while 1 MiB is taken by other ways than torch's, or while it is not."""
    size = 2**20
    ways: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "torch": lambda: torch.empty(size, dtype=torch.uint8),
        "malloc": lambda: _libc.free(_libc.malloc(size)),
        "mmap": lambda: mmap.mmap(-1, size).close(),
    }
    return {"bytes": counted(counter, ways[how])}


def main() -> None:
    gc.disable()  # garbage of before must not be given back while bytes are counted
    counter = ctypes.CDLL(sys.argv[1])
    counter.counter_most.restype = ctypes.c_longlong
    for line in sys.stdin:
        asked = json.loads(line)
        answer = control(counter, asked["control"]) if "control" in asked else measure(counter, asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
