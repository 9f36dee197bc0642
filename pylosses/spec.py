"""The one table of losses.

Each file in ``pylosses/losses`` registers a `LossSpec`. Tests, the README's table, ``pylosses check`` and ``pylosses bench``
are generated from `LOSSES`; nothing else in the project lists losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: The backends in the order in which they are described; `reference` exists for every loss.
BACKENDS = ("reference", "cpu", "cuda", "triton")

#: The families in the order in which tables show them.
FAMILIES = ("softmax", "margin", "entropy", "select", "region", "contrastive", "linear", "score", "metric")

#: Why a fused backend has no kernels for a family. A loss adds its own reasons in `LossSpec.missing`.
NO_KERNELS: dict[str, dict[str, str]] = {
    "cpu": {"metric": "a metric is computed once, in plain PyTorch"},
    "cuda": {family: f"the {family} family has no CUDA kernels yet" for family in ("contrastive", "linear", "score")}
    | {"metric": "a metric is computed once, in plain PyTorch"},
    "triton": {family: f"the {family} family has no Triton kernels yet" for family in ("contrastive", "score")}
    | {"metric": "a metric is computed once, in plain PyTorch"},
}


class Pack(NamedTuple):
    """A loss's own arguments as the fused kernels take them."""

    scalars: tuple[float, ...] = ()  #: in the order of the formula's struct in csrc/losses/<kernel>.h
    shift: Tensor | None = None  #: (C) added to the logit of each class: a bias, a log prior, a margin
    factor: Tensor | None = None  #: (C) row factor chosen by the label that does not enter the mean's divisor


@dataclass(frozen=True)
class PerClass:
    """A sample argument that is a (C) tensor, drawn uniformly from [low, high] with a fixed seed."""

    low: float
    high: float

    def tensor(self, classes: int) -> Tensor:
        generator = torch.Generator().manual_seed(classes)
        return self.low + (self.high - self.low) * torch.rand(classes, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class LossSpec:
    """What everybody may know about a loss without calling it."""

    name: str  #: stem of its files: pylosses/losses/<name>.py, and csrc/kernels when it has its own formula
    function: str  #: public function
    module: str | None  #: public nn.Module
    family: str  #: one of FAMILIES
    inputs: str  #: "labelled" (input, target), "unlabelled" (input), or "own" (its own positional arguments)
    reference: Callable[..., Any]  #: the plain PyTorch witness
    paper: str
    samples: tuple[Mapping[str, Any], ...] = ({},)  #: argument sets that tests and checks run
    kernel: str | None = None  #: name of the fused formula in csrc/losses/list.h and kernels/losses
    pack: Callable[..., Pack] | None = None  #: (problem, checked own arguments) -> Pack, for losses with a kernel
    beyond: Callable[..., str | None] = lambda **own: None  #: (checked own arguments) -> why no kernel takes them, or None
    inferred: bool = False  #: the formula was reconstructed, not printed in a source
    default_reduction: str = "mean"
    missing: Mapping[str, str] = field(default_factory=dict)  #: backend, or "parallel" -> why it does not run there

    def sample(self, index: int, classes: int) -> dict[str, Any]:
        """Sample arguments number `index`, with per-class tensors made for `classes` classes."""
        arguments = self.samples[index]
        return {k: v.tensor(classes) if isinstance(v, PerClass) else v for k, v in arguments.items()}

    def why_not(self, backend: str) -> str | None:
        """Why this loss has no kernel on `backend`, or None when it has one."""
        if backend == "reference":
            return None
        known = NO_KERNELS.get(backend, {})
        return self.missing.get(backend) or known.get(self.family)


#: A kernel keeps at most so many largest classes of a row.
MOST_SELECTED = 64

LOSSES: dict[str, LossSpec] = {}


def register(spec: LossSpec) -> LossSpec:
    """Add `spec` to the table; a second spec of that name is a mistake."""
    if spec.name in LOSSES:
        raise ValueError(f"a loss named {spec.name!r} is already registered")
    LOSSES[spec.name] = spec
    return spec
