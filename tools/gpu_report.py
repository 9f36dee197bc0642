"""What the Triton and CUDA kernels become on GPUs, without one: registers, spills, shared memory, modelled traffic and time.

    python tools/gpu_report.py [--quick] [--jobs 2] [FILE]     writes docs/gpu_report.md; exit 1 when a kernel spills

Nothing here was measured. Times are modelled bytes over the bandwidth of the data sheet.
"""

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "cuda_on_cpu")]

import emulator  # noqa: E402
import gpu_calls  # noqa: E402
import nvcc  # noqa: E402
from ahead import Resources, call_of, compiling, layer_of, resources  # noqa: E402
from model import traffic  # noqa: E402

from pylosses import cuda  # noqa: E402
from pylosses import triton as backend  # noqa: E402
from pylosses.spec import LOSSES  # noqa: E402


class Device(NamedTuple):
    name: str
    bandwidth: int  #: GB/s, of the data sheet
    shared: int | None = None  #: bytes of a multiprocessor; None: its occupancy is not modelled


DEVICES = {
    "sm_80": Device("A100", 2039, 167936),
    "sm_90": Device("H100", 3350, 233472),
    "sm_100": Device("B200", 8000, 233472),
    "gfx942": Device("MI300X", 5300),
}
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32  # of a multiprocessor of all three NVIDIA devices

LONG, SHORT, PIXELS, MANY = (64, 32000), (256, 1000), (2, 19, 64, 64), (2, 150, 32, 32)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)

#: losses of a linear layer's output: rows, classes and features
LINEAR, LAYERS, LAYER = "linear ", ("cross_entropy", "logit_adjusted", "logit_norm", "hem"), (256, 8192, 512)


class Compiled(NamedTuple):
    """One configuration that the library ships."""

    arch: str
    loss: str
    sample: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def configurations(quick: bool) -> Iterator[Compiled]:
    """Every loss everywhere with its first arguments. What is rarer, on one architecture, since registers hardly differ between
    them: float64, many classes of pixels, and further arguments, which switch parts of a kernel on."""
    for arch in DEVICES:
        for spec in LOSSES.values():
            if spec.why_not("triton") is not None or spec.family == "linear":
                continue
            common = {(LONG, torch.bfloat16), (SHORT, torch.float32), (PIXELS, torch.bfloat16)}
            scarce = {(MANY, torch.bfloat16), (MANY, torch.float64), (LONG, torch.float64)}
            shapes = (PIXELS, MANY) if spec.family == "region" else (LONG, SHORT, PIXELS, MANY)
            for sample in range(1 if quick else len(spec.samples)):
                wanted = (
                    (common | scarce if arch == "sm_90" else common) if sample == 0 else scarce if arch == "sm_90" else set()
                )
                for shape, dtype in product(shapes, DTYPES):
                    if (shape, dtype) in (common if quick else wanted):
                        yield Compiled(arch, spec.name, sample, shape, dtype)
        for loss, dtype in product(LAYERS, DTYPES[1:2] if quick else (*DTYPES, torch.float16)):
            common = not quick and dtype in (torch.float32, torch.bfloat16)  # whose tiles fill the registers
            for sample in range(len(LOSSES[loss].samples) if common else 1):
                yield Compiled(arch, f"{LINEAR}{loss}", sample, LAYER, dtype)


class Line(NamedTuple):
    """What one configuration makes of a kernel."""

    kernel: str
    device: str
    what: str  #: loss, shape and dtype
    registers: int
    spilled: int
    shared: int
    occupancy: int | None = None  #: percent
    bytes: float | None = None  #: per logit, of kernels that read or write logits
    ms: float | None = None  #: modelled, for 4096 x 32000 logits


def modelled(each: float, arch: str) -> float:
    """Milliseconds that so many bytes a logit take."""
    return each * 4096 * 32000 / DEVICES[arch].bandwidth / 1e6


def occupancy(found: Resources | nvcc.Resources, warps: int, arch: str) -> int | None:
    """Percent of a multiprocessor's threads, limited by registers (allocated by 256 a warp) and shared memory."""
    shared = DEVICES[arch].shared
    if shared is None:
        return None
    per_warp = -(-found.registers * 32 // 256) * 256
    blocks = min(THREADS // (32 * warps), REGISTERS // (per_warp * warps), shared // (found.shared + 1024), BLOCKS)
    return 100 * blocks * 32 * warps // THREADS


def row(config: Compiled) -> list[Line]:
    """A line for each kernel of a configuration."""
    torch.set_num_threads(1)
    x = torch.zeros(config.shape if len(config.shape) != 3 else 0, dtype=config.dtype)
    with compiling(config.arch) as launches:
        if config.loss.startswith(LINEAR):
            call, *layer = layer_of(config.loss.removeprefix(LINEAR), config.dtype, *config.shape, config.sample)
            loss, saved = backend.product_forward(call, *layer)
            backend.product_backward(call, *layer, saved, loss, (True, True, True))
        else:
            call = call_of(config.loss, x, config.sample)
            loss, saved = backend.forward(call, x, True)
            backend.backward(call, x, saved, loss)
    lines = []
    for launch in launches:
        if launch.name == "tile.finish" and config.loss != "cross_entropy":
            continue  # the same for all
        found = resources(launch)
        what = f"{config.loss} {config.sample}, {'x'.join(map(str, config.shape))} {str(config.dtype)[6:]}"
        line = Line(launch.name, config.arch, what, *found[:3], occupancy(found, launch.warps, config.arch))
        if "p_x" in launch.arguments:
            model = traffic(launch)
            each = (model.reads + model.writes) * x.element_size()
            line = line._replace(bytes=each, ms=modelled(each, config.arch))
        lines.append(line)
    return lines


def assembled(unit: tuple[str, str]) -> dict[str, nvcc.Resources]:
    """Of every kernel of a family on an architecture."""
    return nvcc.resources(*unit)


def cuda_rows(pool: ProcessPoolExecutor, quick: bool) -> Iterator[Line]:
    """The same lines for CUDA C++: the host code tells the launches of a configuration, ptxas what each kernel takes."""
    units = [(family, arch) for arch in DEVICES if arch.startswith("sm_") for family in nvcc.families()]
    found: dict[tuple[str, str], nvcc.Resources] = {}
    for (_, arch), each in zip(units, pool.map(assembled, units), strict=True):
        found |= {(name, arch): of for name, of in each.items()}
    common = ((LONG, torch.bfloat16), (SHORT, torch.float32), (PIXELS, torch.bfloat16))
    rare = ((MANY, torch.float64), (SHORT, torch.float16), ((8, 128256), torch.bfloat16))
    shown = set()
    for arch, spec in product((a for a in DEVICES if a.startswith("sm_")), LOSSES.values()):
        if spec.inputs == "own" or spec.why_not("cuda") is not None:
            continue
        for shape, dtype in common if quick or arch != "sm_90" else common + rare:
            if spec.family == "region" and shape not in (PIXELS, MANY):
                continue
            launches: list[emulator.Launch] = []
            x = torch.zeros(shape, dtype=dtype)
            with emulator.switched() as made, made.handing(launches.append):
                call = gpu_calls.call_of(spec.name, x, backend="cuda")
                loss, saved = cuda.forward(call, x, True)
                cuda.backward(call, x, saved, loss)
            for launch in launches:
                kernel, of = nvcc.short(launch.kernel), found[launch.kernel, arch]
                reads = nvcc.reads(launch, call, x)[1]
                if not reads and (launch.kernel, arch) in shown:
                    continue  # the same for all losses
                shown.add((launch.kernel, arch))
                what = f"{spec.name}, {'x'.join(map(str, shape))} {str(dtype)[6:]}"
                line = Line(f"cuda.{kernel}", arch, what, *of[:3], occupancy(of, launch.block[0] // 32, arch))
                if reads:
                    each = (reads + kernel.endswith("_gradient")) * x.element_size()
                    line = line._replace(bytes=each, ms=modelled(each, arch))
                yield line
    for (name, arch), of in found.items():  # what no configuration launches must not spill either
        if (name, arch) not in shown and of.spilled:
            yield Line(f"cuda.{name}", arch, "not launched here", *of[:3])


HEAD = """# Triton and CUDA kernels on GPUs: **modelled, not measured**

Compiled ahead of time by `make gpu-report`; no GPU took part. A line is a kernel on a device with the range over all losses,
arguments, shapes and dtypes it was compiled for ("compiled": how many). Registers, spills and shared memory are the
assembler's, occupancy follows from them. Bytes per logit are the traffic model, which the executed PTX is held to
(tests/test_triton_ptx.py, tests/test_cuda_ptx.py); the kernels of a linear layer make their logits and read none. Modelled time
is that traffic of 4096 x 32000 logits over the bandwidth of the data sheet. Kernels named cuda.* are those of csrc/cuda, as
nvcc and ptxas compile them.

{count} kernels were compiled, {spills} of them spill.

| kernel | device | compiled | registers | shared bytes | occupancy % | bytes per logit | modelled ms |
|---|---|---|---|---|---|---|---|
"""


def table(lines: list[Line]) -> str:
    """A line for each kernel and device, the spills, if any, by configuration."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.kernel, line.device), []).append(line)
    text = [HEAD.format(count=len(lines), spills=sum(line.spilled > 0 for line in lines)).rstrip()]
    for (kernel, arch), its in sorted(groups.items(), key=lambda item: (item[0][0], list(DEVICES).index(item[0][1]))):
        names = ("registers", "shared", "occupancy", "bytes", "ms")
        cells = [kernel, f"{DEVICES[arch].name} ({arch})", str(len(its))]
        cells += [span([getattr(line, name) for line in its]) for name in names]
        text.append(f"| {' | '.join(cells)} |")
    text += [f"- {line.kernel} on {line.device} spills {line.spilled} bytes: {line.what}" for line in lines if line.spilled]
    return "\n".join(text) + "\n"


def span(values: list[float | None]) -> str:
    """The range of what is known."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = (str(value) if isinstance(value, int) else f"{value:.3g}" for value in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one shape, dtype and argument sample of each loss")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--only", choices=("triton", "cuda"), help="only the kernels of one backend")
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "docs" / "gpu_report.md")
    options = parser.parse_args()
    lines: list[Line] = []
    todo = [] if options.only == "cuda" else list(configurations(options.quick))
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for done, (config, found) in enumerate(zip(todo, pool.map(row, todo), strict=True), 1):
            lines += found
            if done % 25 == 0 or done == len(todo):
                print(f"{done} of {len(todo)} configurations ({config.arch})", file=sys.stderr, flush=True)
        if nvcc.NVCC is not None and options.only != "triton":
            lines += cuda_rows(pool, options.quick)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text(table(lines))
    spills = sum(line.spilled > 0 for line in lines)
    print(f"{options.file}: {len(lines)} kernels, {spills} with spills")
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main())
