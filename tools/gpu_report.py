"""What the Triton kernels become on each GPU, without one: registers, spills, shared memory, modelled traffic and time.

    python tools/gpu_report.py [--quick] [FILE]         writes bench/results/gpu_report.md; exit 1 when a kernel spills

Nothing here was measured. Times are modelled bytes over the bandwidth of the data sheet.
"""

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

from ahead import Launch, Resources, call_of, compiling, resources  # noqa: E402

from pylosses import triton as backend  # noqa: E402
from pylosses.spec import LOSSES  # noqa: E402

#: architecture -> (name, data-sheet bandwidth in GB/s, registers and threads of a multiprocessor, shared memory in bytes)
DEVICES = {
    "sm_80": ("A100", 2039, 65536, 2048, 167936),
    "sm_90": ("H100", 3350, 65536, 2048, 233472),
    "sm_100": ("B200", 8000, 65536, 2048, 233472),
    "gfx942": ("MI300X", 5300, None, None, None),
}
ROWS = ((64, 32000), (256, 1000))
PIXELS = ((2, 19, 64, 64),)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def occupancy(found: Resources, warps: int, arch: str) -> str:
    """Share of a multiprocessor's threads, limited by registers (allocated by 256 a warp) and shared memory."""
    _, _, registers, threads, shared = DEVICES[arch]
    if registers is None:
        return "-"
    per_warp = -(-found.registers * 32 // 256) * 256
    blocks = min(threads // (32 * warps), registers // (per_warp * warps), shared // max(found.shared + 1024, 1), 32)
    return f"{100 * blocks * 32 * warps // threads} %"


def bytes_per_logit(launch: Launch, x: torch.Tensor) -> float | None:
    """Modelled: how often the kernel reads and writes each logit's place."""
    if "p_x" not in launch.arguments:
        return None
    forward = not launch.name.endswith("backward")
    whole = launch.arguments["WHOLE"]
    twice = launch.name.startswith(("margin", "region")) or launch.arguments.get("NORM", False)
    reads = 1 if whole or not (forward and twice or launch.name == "region.backward") else 2
    if launch.name == "margin.forward" and not launch.arguments["THRESHOLD"]:
        reads = 1
    if not launch.arguments.get("READ", True) and not forward:
        reads = 0
    return (reads + (not forward)) * x.element_size()


def rows_of_report(quick: bool) -> tuple[list[str], int]:
    lines, spills = [], 0
    for arch, (device, bandwidth, *_) in DEVICES.items():
        for spec in LOSSES.values():
            if spec.why_not("triton") is not None:
                continue
            shapes = PIXELS if spec.family == "region" else ROWS + PIXELS
            for shape in shapes[:1] if quick else shapes:
                for dtype in DTYPES[:1] if quick else DTYPES:
                    x = torch.zeros(shape, dtype=dtype)
                    call = call_of(spec.name, x)
                    with compiling(arch) as launches:
                        loss, saved = backend.forward(call, x, True)
                        backend.backward(call, x, saved, loss)
                    for launch in launches:
                        if launch.name == "tile.finish" and spec.name != "cross_entropy":
                            continue
                        found = resources(launch)
                        spills += found.spilled > 0
                        each = bytes_per_logit(launch, x)
                        time = "-" if each is None else f"{each * 4096 * 32000 / bandwidth / 1e6:.2f} ms"
                        cells = [spec.name, launch.name, "x".join(map(str, shape)), str(dtype)[6:], f"{device} ({arch})"]
                        cells += [launch.warps, *found[:3], occupancy(found, launch.warps, arch), each or "-", time]
                        lines.append(f"| {' | '.join(map(str, cells))} |")
        print(f"{arch}: {len(lines)} kernels, {spills} with spills", file=sys.stderr, flush=True)
    return lines, spills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one shape and dtype of each loss")
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "bench" / "results" / "gpu_report.md")
    options = parser.parse_args()
    lines, spills = rows_of_report(options.quick)
    head = (
        "# Triton kernels on GPUs: **modelled, not measured**\n\n"
        "Compiled ahead of time by `make gpu-report`, with the specialisation of the shapes shown; no GPU took part.\n"
        "Registers, spills and shared memory are the assembler's, occupancy follows from them; bytes per logit are the\n"
        "traffic model that the executed PTX is held to (tests/test_triton.py); time is that traffic for 4096 x 32000\n"
        "logits over the bandwidth of the data sheet.\n\n"
        "| loss | kernel | shape | dtype | device | warps | registers | spilled bytes | shared bytes | occupancy "
        "| bytes per logit | modelled time |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text(head + "\n".join(lines) + "\n")
    print(f"{options.file}: {len(lines)} kernels, {spills} with spills")
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main())
