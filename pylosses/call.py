"""One call of a loss, from arguments to the reduced result: check -> choose a backend -> fused kernel or plain reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import check, choice
from .autograd import Call, fused
from .check import Problem
from .linear_fused import Product, fused_product
from .parallel_group import Sharded
from .plain import TYPES
from .reduce import RowLoss, reduce
from .spec import LossSpec


class Rows(NamedTuple):
    """A problem as the references see it: one row per sample or position, classes last, ignored rows zeroed."""

    x: Tensor  # (R, C) in the dtype of the statistics
    y: Tensor | None  # (R) int64, 0 at ignored rows
    soft: Tensor | None  # (R, C)
    live: Tensor | None  # (R) bool, None when every row counts
    weight: Tensor | None  # (C)
    shape: torch.Size  # of the labels

    def label(self, values: Tensor) -> Tensor:
        """values[n, y_n] of an (R, C) tensor, or values[y_n] of a (C) tensor."""
        assert self.y is not None
        return values[self.y] if values.dim() == 1 else values.gather(1, self.y[:, None])[:, 0]

    def label_weight(self) -> Tensor | None:
        """(R) class weight of each row's label; None without weights."""
        return None if self.weight is None else self.label(self.weight)


def labelled(
    spec: LossSpec,
    input: Tensor,
    target: Tensor,
    own: dict[str, Any],
    *,
    weight: Tensor | None,
    sample_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    normalizer: float | Tensor | None,
    check_labels: bool,
    backend: str | None,
    vectors: dict[str, Tensor | None] | None = None,
    soft_targets: bool = False,
) -> Tensor:
    """Run a loss with labels. `own` holds its own checked arguments, `vectors` those that are (C) tensors or None."""
    problem = check.labelled(
        input, target, weight, sample_weight, ignore_index, reduction, normalizer, check_labels, soft_targets
    )
    if vectors:
        for name, value in vectors.items():
            if value is not None:
                value = check.per_class(name, value, problem.classes, input, problem.eager)
                if type(value) not in TYPES:
                    problem = problem._replace(eager=False)
            own[name] = value
    return _run(spec, problem, own, backend)


def unlabelled(
    spec: LossSpec,
    input: Tensor,
    own: dict[str, Any],
    *,
    mask: Tensor | None = None,
    sample_weight: Tensor | None = None,
    reduction: str,
    normalizer: float | Tensor | None,
    backend: str | None,
) -> Tensor:
    """Run a loss without labels."""
    return _run(spec, check.unlabelled(input, mask, sample_weight, reduction, normalizer), own, backend)


def _run(spec: LossSpec, problem: Problem, own: dict[str, Any], backend: str | None) -> Tensor:
    if isinstance(problem.x, Sharded):
        return problem.x.loss(spec, problem, own, backend)
    chosen = choice.choose(spec, problem, backend, _obstacle(spec, problem, own))
    unmade = problem.x if isinstance(problem.x, Product) else None
    if unmade is not None and not unmade.stays_unmade(chosen, problem.soft is not None):
        ignored = None if problem.y is None else problem.y.long() == problem.ignore_index
        problem, unmade = problem._replace(x=unmade.made(ignored)), None
    if chosen == "reference":
        return run_reference(spec, problem, own)
    assert spec.pack is not None and spec.kernel is not None
    if chosen != "cpu" and problem.y is not None and _labels_are_checked(problem):  # the C++ kernels look themselves
        _refuse(problem, _outside(problem.y.long(), problem))
    pack = spec.pack(problem, **own)
    y, s, ignore_index = problem.y, problem.sample_weight, problem.ignore_index
    if problem.mask is not None:  # a label-free kernel reads a mask as labels: 0 is ignored
        y, ignore_index = problem.mask.view(torch.uint8), 0
    call = Call(
        chosen,
        spec.kernel,
        y if y is None else y.contiguous(),
        problem.soft,
        problem.weight,
        pack.shift,
        pack.factor,
        s if s is None else s.contiguous(),
        pack.scalars,
        ignore_index,
        problem.reduction,
        problem.normalizer,
    )
    return fused(call, problem) if unmade is None else fused_product(call, unmade)


def _obstacle(spec: LossSpec, problem: Problem, own: dict[str, Any]) -> str | None:
    """Why this call is none for a fused kernel, or None."""
    if not problem.eager and not torch.compiler.is_compiling() and torch.jit.is_tracing():
        return "torch.jit.trace records PyTorch's own operations, which only the reference backend consists of"
    return learned(problem, own) or spec.beyond(**own)


def learned(problem: Problem, own: dict[str, Any]) -> str | None:
    """Which argument besides the logits wants a gradient, or None."""
    name = None
    if problem.soft is not None and problem.soft.requires_grad:
        name = "target"
    elif problem.weight is not None and problem.weight.requires_grad:
        name = "weight"
    elif problem.sample_weight is not None and problem.sample_weight.requires_grad:
        name = "sample_weight"
    for key, value in own.items():
        if value is not None and type(value) is not float and isinstance(value, Tensor) and value.requires_grad:
            name = key
    if name is None or not torch.is_grad_enabled():
        return None
    return f"{name} requires a gradient, which only the reference backend computes"


def run_reference(spec: LossSpec, problem: Problem, own: dict[str, Any]) -> Tensor:
    """The plain PyTorch path: rows -> spec.reference -> reduce."""
    rows, bad = _rows(problem)
    loss = spec.reference(rows, **own)
    if isinstance(loss, Tensor):  # losses over the whole batch (Dice) reduce themselves
        return loss if bad is None else loss + torch.where(bad.any(), torch.nan, 0.0)
    if bad is not None:
        loss = RowLoss(torch.where(bad, torch.nan, loss.value), loss.mass, loss.extra)
        rows = rows._replace(live=rows.live | bad if rows.live is not None else None)
    return reduce(loss, rows.live, problem)


def _outside(y: Tensor, problem: Problem) -> Tensor:
    """Where labels are neither classes nor ignored."""
    return ((y < 0) | (y >= problem.classes)) & (y != problem.ignore_index)


def _labels_are_checked(problem: Problem) -> bool:
    """Whether a bad label is an error at once; elsewhere looking would wait for the device, and its row is NaN."""
    return problem.eager and (problem.check_labels or problem.x.device.type == "cpu")


def _refuse(problem: Problem, outside: Tensor) -> None:
    assert problem.y is not None
    if bool(outside.any()):
        raise check.bad_label(problem.y, int(outside.reshape(-1).nonzero()[0]), problem.classes, problem.ignore_index)


def _class_last(x: Tensor, classes: int) -> Tensor:
    return (x.movedim(1, -1) if x.dim() > 2 else x).reshape(-1, classes)


def _rows(problem: Problem) -> tuple[Rows, Tensor | None]:
    """The problem's rows and, where labels cannot be checked without a sync, which of them have a bad label."""
    x = _class_last(problem.x, problem.classes).to(problem.dtype)
    live = bad = y = soft = None
    if problem.y is not None:
        y = problem.y.reshape(-1).long()
        outside = _outside(y, problem)
        live = (y != problem.ignore_index) & ~outside
        if _labels_are_checked(problem):
            _refuse(problem, outside)
            if bool(live.all()):
                live = None
        else:
            bad = outside
    elif problem.soft is not None:
        soft = _class_last(problem.soft, problem.classes).to(problem.dtype)
    elif problem.mask is not None:
        live = problem.mask.reshape(-1)
    if live is not None:  # an ignored row is never read: NaN there must not reach a gradient
        x = torch.where(live[:, None], x, 0)
        y = y if y is None else torch.where(live, y, 0)
    return Rows(x, y, soft, live, problem.weight, problem.shape), bad
