"""Machine instructions for each logit in the innermost loop of a kernel for NVIDIA, as nvdisasm shows them.

python tests/gpu/sass.py cross_entropy,hem:1 bfloat16 sm_90 50257       (":1": its second sample of arguments)
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import triton
from ahead import Launch, call_of, compiling, resources

from pylosses import triton as backend

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def per_logit(launch: Launch) -> list[Counter[str]]:
    """By operation; of each innermost loop that writes the gradient, or in forward reads logits; else of the whole kernel."""
    code, labels = _code(launch.compiled.asm["cubin"])
    numbers = launch.arguments["ROWS"] * launch.arguments["BLOCK"] / (32 * launch.warps)  # of a lane
    touches = "STG" if "p_grad" in launch.arguments else "LDG"
    back = [(labels[target], i) for i, (_, target) in enumerate(code) if target and labels[target] <= i]
    loops = [(first, last) for first, last in back if any(op == touches for op, _ in code[first : last + 1])]
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = [code[first : last + 1] for first, last in inner] or [code]
    return [Counter({op: n / numbers for op, n in Counter(op for op, _ in body if op != "NOP").items()}) for body in bodies]


def _code(cubin: bytes) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """(operation, the label that it branches to) of each instruction; the instruction behind each label."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(NVDISASM), "-c", file.name], capture_output=True, text=True, check=True).stdout
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w+)(.*)", line):
            target = re.search(r"`\((\.L_\w+)\)", found[2])
            code.append((found[1], target[1] if found[1] == "BRA" and target else ""))
    return code, labels


def launches_of(name: str, dtype: torch.dtype, target: str, classes: int, sample: int = 0) -> list[Launch]:
    """Kernels over the logits of long rows, as a training step launches them."""
    x = torch.zeros(1, dtype=dtype).expand(8, classes).contiguous()
    call = call_of(name, x, sample)
    with compiling(target) as launches:
        loss, saved = backend.forward(call, x, True)
        backend.backward(call, x, saved, loss)
    return [launch for launch in launches if "p_x" in launch.arguments]


def shown(name: str, dtype: torch.dtype, target: str, sample: int, classes: int) -> None:
    for launch in launches_of(name, dtype, target, classes, sample):
        each, found = per_logit(launch), resources(launch)
        tile = f"[{launch.arguments['ROWS']} x {launch.arguments['BLOCK']}] {launch.warps} warps"
        total = " + ".join(f"{sum(one.values()):.1f}" for one in each)
        print(f"{name:18} {launch.name:18} {total:14} {found.registers:3} registers, {found.spilled} bytes spilled, {tile}")
        for one in each:
            print("   ", " ".join(f"{op} {n:.2f}" for op, n in one.most_common() if n >= 0.05))


if __name__ == "__main__":
    names, dtype, target, *more = sys.argv[1:]
    for name in names.split(","):
        loss, _, sample = name.partition(":")
        shown(loss, getattr(torch, dtype), target, int(sample or 0), int(more[0]) if more else 128256)
