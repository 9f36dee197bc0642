"""Named shapes from real use, and inputs of that shape for a loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pylosses.spec import LossSpec


@dataclass(frozen=True)
class Shape:
    """A problem size with a name."""

    name: str
    sizes: tuple[int, ...]
    kind: str  #: "rows" (N, C), "pixels" (N, C, *), "contrastive" (N, D) or "linear" (N, V, D)
    what: str = ""

    @property
    def text(self) -> str:
        return f"({', '.join(map(str, self.sizes))})"

    @property
    def logits(self) -> int:
        """How many logits a loss of this shape sees."""
        if self.kind == "contrastive":
            return self.sizes[0] ** 2
        return self.sizes[0] * self.sizes[1] if self.kind == "linear" else math.prod(self.sizes)

    @property
    def classes(self) -> int:
        return self.sizes[0] if self.kind == "contrastive" else self.sizes[1]

    @property
    def rows(self) -> int:
        return self.logits // self.classes

    def fewer_rows(self, most_logits: int) -> Shape:
        """The same classes with as many rows (positions) as `most_logits` allows; for comparisons in float64."""
        first, *rest = self.sizes
        if self.kind == "contrastive":
            return Shape(self.name, (min(first, math.isqrt(most_logits)), *rest), self.kind)
        if self.kind == "linear":
            return Shape(self.name, (max(4, min(first, most_logits // rest[0])), *rest), self.kind)
        sizes = [first, *rest]
        while math.prod(sizes) > most_logits:  # halve the longest dimension that is not the classes
            longest = max((d for d in range(len(sizes)) if d != 1), key=lambda d: sizes[d])
            if sizes[longest] <= 4:
                break
            sizes[longest] //= 2
        return Shape(self.name, tuple(sizes), self.kind)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("cifar", (128, 10), "rows", "CIFAR-10 batch"),
        Shape("imagenet", (256, 1000), "rows", "ImageNet batch"),
        Shape("llama", (2048, 32000), "rows", "tokens x Llama 2 vocabulary"),
        Shape("llama3", (2048, 128256), "rows", "tokens x Llama 3 vocabulary"),
        Shape("gemma", (512, 256000), "rows", "tokens x Gemma vocabulary"),
        Shape("cityscapes", (4, 19, 512, 1024), "pixels", "street scenes"),
        Shape("ade20k", (8, 150, 256, 256), "pixels", "scenes of 150 classes"),
        Shape("camvid", (12, 12, 360, 480), "pixels", "road scenes"),
        Shape("medical3d", (1, 4, 96, 96, 96), "pixels", "volume patch"),
        Shape("contrastive", (1024, 512), "contrastive", "pairs x features"),
        Shape("linear", (2048, 32000, 1024), "linear", "tokens x vocabulary x features"),
        Shape("linear-easy", (2048, 32000, 1024), "linear", "the same, with a margin loss in one token of ten"),
        Shape("linear-rows", (4096, 32000, 64), "linear", "many tokens"),
        Shape("llama-quick", (320, 32000), "rows", "tokens x Llama 2 vocabulary, short"),
        Shape("cityscapes-quick", (1, 19, 512, 1024), "pixels", "one street scene"),
        Shape("linear-quick", (1024, 10000, 128), "linear", "tokens x vocabulary x features, short"),
    )
}

#: Classes from 10 to 256k for the curve of time, and vocabularies for the curve of the memory of a linear layer with its loss.
SWEEP = tuple(Shape(f"classes-{c}", (64, c), "rows") for c in (10, 100, 1000, 4096, 16384, 65536, 256000))
VOCABULARIES = tuple(Shape(f"vocabulary-{v}", (1024, v, 64), "linear") for v in (4096, 8192, 16384, 32768, 65536, 131072))

#: Families and functions that are not timed, and why.
NOT_TIMED = {
    "metric": "a number from a few scores, not a loss of logits",
    "utility_perturbation": "picks inputs by rank, not a loss",
}


def find(name: str) -> list[Shape]:
    """Shapes by name, "sweep" or "vocabularies" for those of a curve, or sizes such as 256x1000."""
    curves = {"sweep": SWEEP, "vocabularies": VOCABULARIES}
    if name in SHAPES:
        return [SHAPES[name]]
    if name in curves:
        return list(curves[name])
    sizes = name.split("x")
    if len(sizes) >= 2 and all(size.isdecimal() and int(size) > 0 for size in sizes):
        return [Shape(name, tuple(map(int, sizes)), "rows" if len(sizes) == 2 else "pixels")]
    raise ValueError(f"unknown shape {name!r}; the shapes are: {', '.join([*SHAPES, *curves])}, or sizes such as 256x1000")


def fits(spec: LossSpec, shape: Shape) -> bool:
    """Whether a loss takes inputs of this kind of shape."""
    if spec.family in NOT_TIMED or spec.name in NOT_TIMED:
        return False
    kinds = {"linear": ("linear",), "contrastive": ("contrastive",), "region": ("pixels",)}
    return shape.kind in kinds.get(spec.family, ("rows", "pixels"))


def inputs(spec: LossSpec, shape: Shape, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Positional arguments of a loss, always the same for the same shape."""
    generator = torch.Generator().manual_seed(shape.logits)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device=device, dtype=dtype)

    def labels(count: tuple[int, ...]) -> Tensor:
        return torch.randint(0, shape.classes, count, generator=generator).to(device)

    if shape.kind == "linear":
        n, v, d = shape.sizes
        h, w, y = normal(n, d), normal(v, d) / math.sqrt(d), labels((n,))
        if shape.name == "linear-easy":  # nine tokens of ten have logits of about 4 at the label and below 1 elsewhere
            easy = torch.arange(n, device=device) % 10 > 0
            h[easy] = 4 * w[y[easy]]
        return h, w, y
    if shape.kind == "contrastive":
        return tuple(normal(*shape.sizes) for _ in range(2 if spec.name == "info_nce" else 3))
    x = normal(*shape.sizes)
    return (x, labels(shape.sizes[:1] + shape.sizes[2:])) if spec.inputs == "labelled" else (x,)
