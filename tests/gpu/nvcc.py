"""The CUDA kernels as nvcc compiles them: their PTX, what ptxas makes of it, and a loss as the PTX computes it.

The host code runs in the emulator of tests/cuda_on_cpu, whose hook hands every launch, with the bytes of its parameters, to the
PTX interpreter instead of running the fibers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import ptx
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cuda_on_cpu"))

import emulator  # noqa: E402
from emulator import Launch  # noqa: E402

from pylosses import cuda as backend  # noqa: E402
from pylosses.autograd import Call  # noqa: E402

NVCC = shutil.which("nvcc")
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float64: "double"}


def families() -> list[str]:
    """The translation units of csrc/cuda."""
    return sorted(file.stem for file in (ROOT / "csrc" / "cuda").glob("*.cu"))


def sources() -> list[Path]:
    """Everything that the kernels are compiled from."""
    csrc = ROOT / "csrc"
    return sorted(p for pattern in ("cuda/*", "losses/*", "cpu/problem.h") for p in csrc.glob(pattern))


def ptx_file(family: str, arch: str, dtype: torch.dtype | None = None) -> Path:
    """The PTX of csrc/cuda/<family>.cu for "sm_80", say; compiled unless it was, from the same sources.

    With `dtype`, of the kernels for such logits alone, which takes a quarter of the time.
    """
    text = (ROOT / "csrc" / "cuda" / f"{family}.cu").read_text()
    dtype = None if family == "finish" else dtype
    if dtype is not None:
        both = (f"template void {way}_{family}<{TYPES[dtype]}>(Run&, const Request&);" for way in ("forward", "backward"))
        text = f'#include "cuda/{family}.cuh"\nnamespace PYL_ISA {{ {" ".join(both)} }}\n'
    headers = [p for p in sources() if p.suffix in (".h", ".cuh")]
    known = hashlib.sha256(b"".join(p.read_bytes() for p in headers) + (text + arch).encode()).hexdigest()[:16]
    folder = ROOT / "build" / "cuda_ptx"
    name = f"{family}-{'all' if dtype is None else TYPES[dtype]}-{arch}"
    made = folder / f"{name}-{known}.ptx"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            unit, part = Path(work) / f"{family}.cu", Path(work) / "part.ptx"
            unit.write_text(text)
            command = [NVCC, "-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-ptx", f"-arch={arch.replace('sm', 'compute')}"]
            done = subprocess.run([*map(str, command), str(unit), "-o", str(part)], capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(done.stderr[-4000:])
            for old in folder.glob(f"{name}-*.ptx"):
                old.unlink(missing_ok=True)
            part.replace(made)
    return made


def built(arch: str) -> list[str]:
    """The PTX for `arch` in the module that was built, of each translation unit; none where the sources are newer."""
    tools = importlib.util.find_spec("triton")
    wheel = Path(str(tools.origin)).parent / "backends" / "nvidia" / "bin" if tools else Path()
    cuobjdump = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=str(wheel))
    found = importlib.util.find_spec("pylosses._cuda")
    if cuobjdump is None or found is None or found.origin is None:
        return []
    if any(p.stat().st_mtime > Path(found.origin).stat().st_mtime for p in sources()):
        return []
    text = subprocess.run([cuobjdump, "-ptx", found.origin], capture_output=True, text=True, check=True).stdout
    parts = [part for part in text.split("Fatbin ptx code:")[1:] if re.search(rf"^arch = {arch}$", part, re.M)]
    return [part[part.index(".version") :].partition("\nFatbin")[0] for part in parts]


@cache
def _built(arch: str) -> dict[str, str]:
    return {name: kernel for text in built(arch) for name, kernel in ptx.entries(text).items()}


@cache
def _compiled(arch: str, family: str, dtype: torch.dtype) -> dict[str, str]:
    return ptx.entries(ptx_file(family, arch, dtype).read_text())


def text_of(arch: str, kernel: str, dtype: torch.dtype) -> str:
    """The PTX of a kernel that a call on logits of `dtype` launches, by its mangled name: as it was built, or compiled now."""
    if kernel in _built(arch):
        return _built(arch)[kernel]
    likely = short(kernel).partition("_")[0]
    for family in sorted(families(), key=lambda f: (f != likely, f != "finish")):
        if kernel in _compiled(arch, family, dtype):
            return _compiled(arch, family, dtype)[kernel]
    raise KeyError(f"no PTX has a kernel {kernel}")


@cache
def _kernel(text: str) -> ptx.Kernel:
    return ptx.Kernel(text)


class Resources(NamedTuple):
    registers: int
    spilled: int  #: bytes
    shared: int  #: bytes
    stack: int  #: bytes of local memory, spills included


def resources(family: str, arch: str) -> dict[str, Resources]:
    """Mangled name -> what ptxas says of it."""
    ptxas = shutil.which("ptxas") or str(Path(str(NVCC)).resolve().parent / "ptxas")
    file = ptx_file(family, arch)
    log = subprocess.run(
        [ptxas, "-v", f"-arch={arch}", str(file), "-o", "/dev/null"], capture_output=True, text=True, check=True
    )
    found = {}
    for part in log.stderr.split("Compiling entry function")[1:]:
        name = re.match(r"\s*'([\w$]+)'", part)[1]  # type: ignore[index]
        stack, stores, loads = map(
            int,
            re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups(),  # type: ignore[union-attr]
        )
        shared = re.search(r"(\d+) bytes smem", part)
        registers = int(re.search(r"Used (\d+) registers", part)[1])  # type: ignore[index]
        found[name] = Resources(registers, stores + loads, int(shared[1]) if shared else 0, stack)
    return found


def short(name: str) -> str:
    """A kernel without its namespace and types: "softmax_rows"."""
    return re.search(r"pylosses_cuda\d+([a-z_]+)", name)[1]  # type: ignore[index]


#: kLanesShortlist of csrc/cuda/tuning.h: ranks that one read of a row gives a lane
SHORTLIST = int(re.search(r"kLanesShortlist = (\d+)", (ROOT / "csrc" / "cuda" / "tuning.h").read_text())[1])  # type: ignore[index]


def reads(launch: Launch, call: Call, x: Tensor) -> tuple[float, float]:
    """The traffic model: (least, most) times that a kernel reads each logit of a row that counts, besides a few single ones.

    They differ where it depends on the logits: rows without errors and rows that a filter leaves out are not read again.
    """
    kernel = short(launch.kernel)
    family, _, what = kernel.partition("_")
    if what == "gradient":
        filtered = family == "margin" or call.kernel in ("entropy", "tta") and call.scalars[-1] != 0
        return (0 if filtered else 1, 2 if family == "region" else 1)
    if kernel == "softmax_rows":
        return (2, 2) if call.kernel == "logit_norm" and not split(x) else (1, 1)  # split rows take a launch for each pass
    if kernel == "margin_rows":
        return (0, 1) if split(x) else (1, 2) if call.scalars[4] != 0 else (1, 1)
    if kernel == "select_rows":
        again = ranks_of(call) - 1
        if x.dim() > 2:  # a lane has the whole row
            again = min(again, x.shape[1]) // SHORTLIST
            return (1 + again, 1 + again)
        if x.shape[1] <= 1024:  # lanes have but a few classes each
            return (1, 1)
        classes, chunk = x.numel() / launch.grid[0], max(16 // x.element_size(), 4)  # of a block, of a vector
        share = chunk * (1 + ceil(classes / chunk / launch.block[0])) / classes  # of the one thread that looks again
        return (1, 1 + again * share)
    return (1, 1) if what in ("rows", "class_sums", "pixel_sums") else (0, 0)


def split(x: Tensor) -> bool:
    """Whether a row is shared by several blocks."""
    return x.dim() == 2 and x.shape[1] > 65536 and x.shape[0] < 256


def ranks_of(call: Call) -> int:
    """Ranks that a selection asks for: `Selection` of csrc/losses."""
    if call.kernel == "tta":
        _, factor, k, skip, *_ = call.scalars
        return int(1 + skip + k) if factor != 0 and k > 0 else 1
    return int(call.scalars[0 if call.kernel == "adr" else 6])


# Execution --------------------------------------------------------------------------------------------------------------------


class Memory(TorchDispatchMode):
    """Every tensor that is given, or that torch makes while this is on: the memory that a kernel may touch, and no other."""

    def __init__(self, *given: Tensor | None) -> None:
        super().__init__()
        self.tensors = [t for t in given if t is not None]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.tensors += [t for t in tree_leaves(made) if isinstance(t, Tensor)]
        return made

    def buffers(self) -> list[tuple[str, int, int]]:
        """(name, address, bytes) of each piece of memory."""
        found: dict[int, tuple[str, int, int]] = {}
        for t in self.tensors:
            storage = t.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), (place(t), storage.data_ptr(), storage.nbytes()))
        return list(found.values())


def place(t: Tensor) -> str:
    """The name of a tensor's memory in the traffic."""
    return f"{t.untyped_storage().data_ptr():x}"


class Run(NamedTuple):
    loss: Tensor
    saved: Tensor
    gradient: Tensor
    launches: list[tuple[Launch, dict[str, list[int]]]]  #: and of each, name of a tensor -> [bytes read, bytes written]


def execute(
    arch: str, launch: Launch, memory: Memory, dtype: torch.dtype, edit: Callable[[str], str] = lambda text: text
) -> dict[str, list[int]]:
    """Runs one launch of a call on logits of `dtype` by its PTX; what it read and wrote."""
    assert launch.block[1:] == (1, 1)
    kernel = _kernel(edit(text_of(arch, launch.kernel, dtype)))
    sim = ptx.Sim(kernel, launch.grid, launch.block[0], launch.parameters, memory.buffers(), smem=launch.shared)
    return sim.run().traffic


def run(arch: str, call: Call, x: Tensor, up: Tensor | None = None, edit: Callable[[str], str] = lambda text: text) -> Run:
    """Loss and gradient of a call, by the PTX for `arch`; `edit` may spoil it."""
    launches: list[tuple[Launch, dict[str, list[int]]]] = []
    memory = Memory(x, *call.tensors(), call.normalizer if isinstance(call.normalizer, Tensor) else None)

    def each(launch: Launch) -> None:
        launches.append((launch, execute(arch, launch, memory, x.dtype, edit)))

    with emulator.switched() as made, made.handing(each), memory:
        loss, saved = backend.forward(call, x, True)
        up = torch.ones_like(loss) if up is None else up.to(loss.dtype)
        memory.tensors.append(up)
        gradient = backend.backward(call, x, saved, up)
    return Run(loss, saved, gradient, launches)
