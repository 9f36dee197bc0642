"""Runs a library that was built with AddressSanitizer and UndefinedBehaviorSanitizer; a process of its own, see `checked`.

python sanitized.py LIBRARY: every loss and dtype on rows that begin and end where their memory does, at every distance from an
aligned address. The first access out of bounds, misaligned vector or undefined behaviour ends the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from emulator import COMPILER, Emulator, switched


def checked(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with AddressSanitizer, which has to be there before Python is."""
    preload = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    environment = os.environ | {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, env=environment)


#: rows of lanes, vectors with heads and tails, of a block, split; pixels, and pixels that a block walks
SHAPES = ((5, 1), (7, 13), (5, 131), (3, 1101), (2, 3, 3, 5), (1, 301, 1, 3), (2, 70003))


def cases(spec: Any) -> Any:
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for shape in SHAPES:
            if shape[1] > 65536 and (dtype not in (torch.float32, torch.bfloat16) or spec.family == "region"):
                continue
            count = torch.Size(shape).numel()
            for offset in (0, 1, 3) if shape[1] < 5000 else (1,):  # elements; the memory ends with the last one
                memory = torch.randn(count + offset, generator=torch.Generator().manual_seed(1)).to(dtype)
                yield memory[offset:].view(shape)


def main() -> None:
    import torch

    import pylosses
    from pylosses.spec import LOSSES

    torch.set_num_threads(1)
    count = 0
    seen: set[str] = set()
    with switched(Emulator(Path(sys.argv[1]))):
        for spec in LOSSES.values():
            if spec.inputs == "own" or spec.why_not("cuda") is not None or spec.kernel in seen:
                continue
            seen.add(spec.kernel)
            for x in cases(spec):
                classes = x.shape[1]
                arguments = spec.sample(0, classes)
                if "top" in arguments:
                    arguments["top"] = min(arguments["top"], classes)
                inputs = [x.requires_grad_()]
                if spec.inputs == "labelled":
                    labels = torch.arange(x.numel() // classes).view(x.shape[:1] + x.shape[2:]) % classes
                    inputs.append(labels)
                loss = getattr(pylosses, spec.function)(*inputs, **arguments, backend="cuda")
                torch.autograd.grad(loss, x)
                count += 1
    print(f"{count} cases are clean")


if __name__ == "__main__":
    main()
