"""Runs a library that was built with AddressSanitizer and UndefinedBehaviorSanitizer; a process of its own, see `checked`.

python sanitized.py LIBRARY: every kernel on rows that begin and end where their memory does, at any distance from an aligned
address; the dtype turns, or with PYLOSSES_GPU_TESTS=all every one is taken. The first access out of bounds, misaligned vector
or undefined behaviour ends the process. python sanitized.py LIBRARY wrong: a bound that is wrong on purpose.
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
    """Logits whose memory ends with the last of them, and begins up to three elements before the first."""
    import torch

    everything = os.environ.get("PYLOSSES_GPU_TESTS") == "all"
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for i, shape in enumerate(SHAPES):
        if shape[1] > 5000 and (spec.family == "region" or not everything and len(spec.name) % 2):
            continue
        for j, dtype in enumerate(dtypes):
            for offset in (0, 1, 3):
                if everything or (i + len(spec.name)) % 4 == j and (offset == (0, 1, 3)[i % 3]):
                    memory = torch.randn(torch.Size(shape).numel() + offset, generator=torch.Generator().manual_seed(1))
                    yield memory.to(dtype)[offset:].view(shape)


def main(library: str, wrong: bool) -> None:
    import torch

    sys.path.append(str(Path(__file__).parents[1] / "helpers"))
    from cases import arguments_of

    import pylosses
    from pylosses.spec import LOSSES

    torch.set_num_threads(1)
    count = 0
    seen: set[str] = set()
    with switched(Emulator(Path(library))) as made:
        if wrong:
            x, out = torch.randn(3, 37), torch.zeros(4096)
            told = made.module.losses()["entropy"][0], 0, x.data_ptr(), (3, 38), (37, 1)  # one class more than there is
            problem = made.module.Problem(*told, 0, -1, -100, 0, -1, (), 0, 0, 0, 0, 0, (0.0, 0.0), 2, -1.0, 0)
            made.module.forward(problem, out.data_ptr(), 0, out.data_ptr() + 256, 0, 0)
        for spec in LOSSES.values():
            if spec.inputs == "own" or spec.why_not("cuda") is not None or spec.kernel in seen:
                continue
            seen.add(spec.kernel)
            for x in cases(spec):
                classes = x.shape[1]
                arguments = arguments_of(spec, 0, classes, x.dtype)
                inputs = [x.requires_grad_()]
                if spec.inputs == "labelled":
                    inputs.append(torch.arange(x.numel() // classes).view(x.shape[:1] + x.shape[2:]) % classes)
                torch.autograd.grad(getattr(pylosses, spec.function)(*inputs, **arguments, backend="cuda"), x)
                count += 1
    print(f"{count} cases are clean")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["wrong"])
