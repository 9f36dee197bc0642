"""Peak memory of a language model's last layer against the vocabulary: ``python -m pylosses.bench.linear_memory [FILE]``.

Draws bench/results/linear_memory.png: what a training step of cross-entropy holds beyond its inputs and their gradients, with
logits stored, by torch's chunked function, and by ours. Counted in torch's allocator; all losses are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

import pylosses

from . import report
from .contest import extra_bytes
from .eager import linear_cross_entropy as stored
from .timing import memory_step

TOKENS, FEATURES = 1024, 256
VOCABULARIES = (4096, 8192, 16384, 32768, 65536, 131072)


def sides() -> dict[str, Callable[..., Tensor]]:
    """Name -> loss of (features, weight, labels), the stored logits first."""
    chunks = torch.nn.LinearCrossEntropyOptions()
    return {
        "F.linear + F.cross_entropy": stored,
        "F.linear_cross_entropy": F.linear_cross_entropy,
        "F.linear_cross_entropy, chunked": partial(F.linear_cross_entropy, options=chunks),
        "pylosses.linear_cross_entropy": pylosses.linear_cross_entropy,
    }


def measured(vocabulary: int) -> dict[str, int]:
    """Bytes by side."""
    g = torch.Generator().manual_seed(0)
    h, w = torch.randn(TOKENS, FEATURES, generator=g), torch.randn(vocabulary, FEATURES, generator=g) / FEATURES**0.5
    inputs: tuple[Tensor, ...] = (h, w, torch.randint(0, vocabulary, (TOKENS,), generator=g))
    gradients = [t.nbytes for t in inputs if t.is_floating_point()]
    found: dict[str, int] = {}
    wanted = None
    with pylosses.use_pool(0):
        for name, call in sides().items():
            loss = call(*inputs)
            wanted = loss if wanted is None else wanted
            torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=0)
            found[name] = extra_bytes(partial(memory_step, call, inputs, gradient=True), gradients)
    return found


def draw(found: dict[int, dict[str, int]], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name in sides():
        axes.plot(list(found), [found[v][name] / 2**20 for v in found], marker="o", label=name)
    axes.plot(list(found), [4 * TOKENS * v / 2**20 for v in found], "k:", label="size of the logits")
    axes.set(xscale="log", yscale="log", xlabel="vocabulary", ylabel="MiB beyond inputs and gradients")
    axes.set_xticks(list(found), [f"{v:,}" for v in found])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    record = report.Record.start({"device": "cpu", "threads": torch.get_num_threads()}, None, None)
    axes.set_title(f"Memory of a training step, {TOKENS} tokens x {FEATURES} features, float32\n{record.machine}", fontsize=10)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("bench/results/linear_memory.png"))
    options = parser.parse_args()
    found = {v: measured(v) for v in track(VOCABULARIES, description="vocabularies")}
    for vocabulary, bytes_ in found.items():
        print(f"{vocabulary:>7}  " + "  ".join(f"{name}: {n / 2**20:.1f} MiB" for name, n in bytes_.items()))
    options.file.parent.mkdir(parents=True, exist_ok=True)
    draw(found, options.file)
    print(options.file)


if __name__ == "__main__":
    main()
