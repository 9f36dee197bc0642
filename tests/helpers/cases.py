"""Inputs for tests, made from a LossSpec: plain rows, nasty rows, shapes, memory layouts, and how to run a loss on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pylosses
from pylosses.spec import BACKENDS, LOSSES, LossSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TARGET_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)
IGNORE = -100
INF, NAN = float("inf"), float("nan")

LABELLED = [spec for spec in LOSSES.values() if spec.inputs == "labelled"]
UNLABELLED = [spec for spec in LOSSES.values() if spec.inputs == "unlabelled"]


def name_of(value: Any) -> str | None:
    """Readable test ids."""
    if isinstance(value, LossSpec):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return None


def backends_of(spec: LossSpec, *, reference: bool = True) -> list[Any]:
    """The backends that have this loss. C++ kernels that are not here are skipped with the reason; those of GPUs are left out:
    tests/interpreted has a process of its own for Triton, tests/test_cuda.py an emulator."""
    found = []
    for backend in BACKENDS:
        if backend == "reference" and not reference or spec.why_not(backend) is not None:
            continue
        status = pylosses.backends()[backend]
        if backend in ("triton", "cuda") and not status.available:
            continue
        marks = () if status.available else pytest.mark.skip(reason=f"{backend}: {status.reason}")
        found.append(pytest.param(backend, marks=marks, id=backend))
    return found


def row_by_row(spec: LossSpec, sample: int = 0) -> bool:
    """Whether the loss of a row depends on that row alone."""
    return spec.family in ("softmax", "margin", "entropy", "select") and spec.samples[sample].get("scope") != "batch"


def grid(specs: list[LossSpec], *, reference: bool = True, rows: bool = False) -> list[Any]:
    """(spec, sample number, backend) for every loss, argument sample and backend that has it; `rows`: only losses of rows."""
    return [
        pytest.param(spec, i, *backend.values, marks=backend.marks, id=f"{spec.name}{i}-{backend.id}")
        for spec in specs
        for i in range(len(spec.samples))
        for backend in backends_of(spec, reference=reference)
        if row_by_row(spec, i) or not rows
    ]


# Rows ------------------------------------------------------------------------------------------------------------------------


def _plain(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return 3 * _normal(g, 13, 37), _labels(g, 13, 37)


def _peaked(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Confident rows: the label, or in every third row another class, leads by 15 to 30 nats."""
    x, y = _normal(g, 16, 33), _labels(g, 16, 33)
    leader = torch.where(torch.arange(16) % 3 == 0, (y + 5) % 33, y)
    return x.scatter_add(1, leader[:, None], torch.linspace(15, 30, 16, dtype=torch.float64)[:, None]), y


def _saturated(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return 1e4 * _normal(g, 9, 19).sign(), _labels(g, 9, 19)


def _tied(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of equal logits and rows with two or three different values."""
    x, y = _normal(g, 12, 17).mul(1.5).round(), _labels(g, 12, 17)
    x[:3] = torch.tensor([0.0, 2.5, -7.0], dtype=torch.float64)[:, None]
    return x, y


def _masked(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Classes at -inf; row 0 keeps the label alone, row 1 has its label masked."""
    x, y = 2 * _normal(g, 12, 21), _labels(g, 12, 21)
    hidden = torch.rand(12, 21, generator=g) < 0.4
    hidden[0] = True
    hidden = hidden.scatter(1, y[:, None], False)
    hidden[1, y[1]] = True
    hidden[1, (y[1] + 1) % 21] = False
    return x.masked_fill(hidden, -INF), y


def _offset(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """A common offset of +-1e4 that a log-sum-exp must not lose digits to."""
    sign = torch.where(torch.arange(10) % 2 == 0, 1e4, -1e4).double()
    return 2 * _normal(g, 10, 23) + sign[:, None], _labels(g, 10, 23)


def _ignored(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ignored rows, two of which hold NaN and infinities."""
    x, y = 2 * _normal(g, 14, 11), _labels(g, 14, 11)
    y[::3] = IGNORE
    x[0], x[3, 4], x[6, 2] = NAN, NAN, INF
    return x, y


def _special(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """NaN at the label or a competitor, +inf at a competitor or the label, a row of -inf; ordinary rows between them."""
    x, y = 2 * _normal(g, 20, 13), _labels(g, 20, 13)
    rival = (y + 3) % 13
    x[0, y[0]], x[2, rival[2]] = NAN, NAN
    x[4, rival[4]] = x[6, y[6]] = INF
    x[8] = -INF
    return x, y


def _classes(n: int, c: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda g: (2 * _normal(g, n, c), _labels(g, n, c))


def _eighths(n: int, c: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Many classes, logits multiples of 1/8: sums of margin errors are exact, so few errors lie near their mean by chance."""
    return lambda g: ((16 * _normal(g, n, c)).round() / 8, _labels(g, n, c))


def _normal(g: torch.Generator, n: int, c: int) -> Tensor:
    return torch.randn(n, c, generator=g, dtype=torch.float64)


def _labels(g: torch.Generator, n: int, c: int) -> Tensor:
    return torch.randint(0, c, (n,), generator=g)


#: kind -> rows (R, C) in float64 with labels (R)
KINDS: dict[str, Callable[[torch.Generator], tuple[Tensor, Tensor]]] = {
    "plain": _plain,
    "peaked": _peaked,
    "saturated": _saturated,
    "tied": _tied,
    "masked": _masked,
    "offset": _offset,
    "ignored": _ignored,
    "special": _special,
    "one_class": _classes(5, 1),
    "two_classes": _classes(7, 2),
    "three_classes": _classes(7, 3),
    "wide": _eighths(3, 4099),
    "huge": _eighths(2, 32000),
}

#: kinds that only some tests ask for
RARE: dict[str, Callable[[torch.Generator], tuple[Tensor, Tensor]]] = {"split": _eighths(2, 70001)}


class Case(NamedTuple):
    """A loss with everything it is called with."""

    spec: LossSpec
    inputs: tuple[Tensor, ...]  #: positional arguments
    arguments: dict[str, Any]  #: keyword arguments
    classes: int

    def double(self) -> Case:
        """The same values in float64: the call whose reference result is the truth."""
        arguments = {k: _double(v) for k, v in self.arguments.items()}
        return self._replace(inputs=tuple(map(_double, self.inputs)), arguments=arguments)

    def shaped(self, *rows: int) -> Case:
        """The R rows arranged as (N, d1, ..., dK) positions: (R, C) -> (N, C, d1, ..., dK), in fresh contiguous memory."""
        x, *rest = self.inputs
        x = x.reshape(*rows, x.shape[1]).movedim(-1, 1).contiguous()
        return self._replace(inputs=(x, *(t.reshape(rows) for t in rest)))

    def but(self, **arguments: Any) -> Case:
        return self._replace(arguments={**self.arguments, **arguments})


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def case(spec: LossSpec, sample: int = 0, kind: str = "plain", dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """Rows of `kind` for `spec`, rounded to `dtype`; per-class arguments are rounded to the dtype of the statistics."""
    x, y = (KINDS | RARE)[kind](torch.Generator().manual_seed(1000 * seed + sum(map(ord, kind))))
    x = x.to(dtype)
    arguments = arguments_of(spec, sample, x.shape[1], dtype)
    if spec.inputs == "unlabelled":
        return Case(spec, (x.nan_to_num(0.0, 0.0, 0.0) if kind == "ignored" else x,), arguments, x.shape[1])
    if spec.family == "margin":
        y = torch.where(undecided(x.double(), y, arguments), IGNORE, y)
    return Case(spec, (x, y), arguments, x.shape[1])


def arguments_of(spec: LossSpec, sample: int, classes: int, dtype: torch.dtype) -> dict[str, Any]:
    """Sample arguments, tensors in the dtype that the library will compute with; numbers of classes fitted to few classes."""
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    arguments = {k: v.to(statistics) if isinstance(v, Tensor) else v for k, v in spec.sample(sample, classes).items()}
    return fitted(spec, arguments, classes)


def takes(spec: LossSpec, argument: str) -> bool:
    """Whether the public function of the loss has an argument of this name."""
    return argument in inspect.signature(getattr(pylosses, spec.function)).parameters


def fitted(spec: LossSpec, arguments: dict[str, Any], classes: int) -> dict[str, Any]:
    """The arguments with no more classes selected than there are."""
    if "top" in arguments:  # ADR: 1 <= top <= C
        return {**arguments, "top": min(arguments["top"], classes)}
    if spec.name in ("knl", "tta"):  # the prediction, skip others, one to push down
        return {**arguments, "skip": max(min(arguments.get("skip", 5), classes - 2), 0)}
    return arguments


def undecided(x: Tensor, y: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Rows (R) of a margin loss where rounding in float32 may decide which errors are kept: such flips are no fault.

    An error exactly at zero or at the threshold stays a test when nothing rounds: raw errors that are multiples of 1/64.
    """
    eps = torch.finfo(torch.float32).eps
    power, delta, margin = (arguments.get(k, d) for k, d in (("power", 1.0), ("delta", 1e-4), ("margin", 1.0)))
    safe = y.clamp(min=0)
    if isinstance(margin, Tensor):
        margin = margin.double()[safe][:, None] if arguments.get("margin_index") == "label" else margin.double()
    distance = x - x.gather(1, safe[:, None])
    raw = (distance + margin).masked_fill(x == -INF, -INF).scatter(1, safe[:, None], -INF)
    slack = 4 * eps * (distance.abs() + margin).nan_to_num(0.0, 0.0, 0.0)  # of raw
    base = raw.clamp(min=0)
    errors = base**power
    if power < 1 and delta > 0:
        errors = torch.where(base < delta, delta ** (power - 1) * base, errors)
    exact = raw.isinf() | (raw * 64 == (raw * 64).round())
    undecided = (raw.abs() <= slack) & ~exact
    if power < 1:
        undecided |= (raw - delta).abs() <= slack
    if arguments.get("threshold", True):
        mean = errors.mean(dim=1, keepdim=True)
        summed = exact.all(dim=1, keepdim=True) & (power == 1)
        undecided |= ((errors - mean).abs() <= 32 * eps * mean) & (mean > 0) & ~summed
    return undecided.any(dim=1)


# Shapes and memory layouts ---------------------------------------------------------------------------------------------------


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors equal to x, an (N, C) or (N, C, H, W) tensor, in memory of another form."""
    yield "contiguous", x.contiguous()
    yield "unaligned", _inside(x, [0] * x.dim(), extra=1)
    yield "padded_rows", _inside(x, [0] * (x.dim() - 1) + [3])
    yield "every_second", _strided(x)
    order = list(reversed(range(x.dim())))
    yield "transposed", x.permute(order).contiguous().permute(order)
    if x.dim() == 4:
        yield "channels_last", x.contiguous(memory_format=torch.channels_last)
        yield "swapped_space", x.transpose(2, 3).contiguous().transpose(2, 3)
        yield "class_first", x.transpose(0, 1).contiguous().transpose(0, 1)
        yield "class_slice", _inside(x, [0, 2, 0, 0])


def _inside(x: Tensor, margin: list[int], extra: int = 0) -> Tensor:
    """x as the corner of a bigger tensor, `extra` elements after an aligned address; the rest is NaN and never to be read."""
    shape = [n + m for n, m in zip(x.shape, margin, strict=True)]
    count = torch.Size(shape).numel()
    big = torch.full((count + extra,), NAN, dtype=x.dtype)[extra:].view(shape)
    view = big[tuple(slice(n) for n in x.shape)]
    return view.copy_(x)


def _strided(x: Tensor) -> Tensor:
    big = torch.full([2 * n for n in x.shape], NAN, dtype=x.dtype)
    return big[(slice(1, None, 2),) * x.dim()].copy_(x)


# Losses with inputs of their own ---------------------------------------------------------------------------------------------


def _linear(g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    y = _labels(g, 6, 9)
    y[2] = IGNORE
    return _normal(g, 6, 5).to(dtype), _normal(g, 9, 5).to(dtype), y


def _vectors(count: int) -> Callable[[torch.Generator, torch.dtype], tuple[Tensor, ...]]:
    return lambda g, dtype: tuple(_normal(g, 6, 5).to(dtype) for _ in range(count))


#: public function -> its positional arguments. A new loss with inputs = "own" needs a line here.
OWN_INPUTS: dict[str, Callable[[torch.Generator, torch.dtype], tuple[Tensor, ...]]] = {
    "linear_cross_entropy": _linear,
    "linear_hem_loss": _linear,
    "linear_loss": _linear,
    "info_nce_loss": _vectors(2),
    "feature_contrastive_loss": _vectors(3),
    "contrastive_margin_loss": _vectors(3),
    "confidence_scores": _vectors(1),
}


def own_case(spec: LossSpec, sample: int, dtype: torch.dtype) -> Case:
    inputs = OWN_INPUTS[spec.function](torch.Generator().manual_seed(7), dtype)
    classes = 9 if spec.family == "linear" else inputs[0].shape[1]
    return Case(spec, inputs, arguments_of(spec, sample, classes, dtype), classes)


# Running ---------------------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    loss: Tensor
    grads: tuple[Tensor | None, ...]  #: one for each floating point positional input


def run(case: Case, backend: str | None = "reference", upstream: Tensor | None = None) -> Result:
    """Loss and gradients for an upstream gradient (default: ones). The inputs keep their memory layout and are not touched."""
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in case.inputs]
    loss = getattr(pylosses, case.spec.function)(*leaves, backend=backend, **case.arguments)
    wanted = [t for t in leaves if t.requires_grad]
    up = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    return Result(loss.detach(), torch.autograd.grad(loss, wanted, up))


def finest(case: Case) -> Case:
    """The case with reduction "none", or "sum" where the terms of a loss have no common "none"."""
    return case.but(reduction="sum" if case.spec.name == "dice_ce" else "none")


def upstream_for(case: Case) -> Tensor:
    """A random upstream gradient for this case's loss, exact in float32."""
    x = case.inputs[0]
    shape = x.shape[:1] + x.shape[2:] if x.dim() > 1 else ()
    if case.spec.family == "region":  # losses of classes
        shape = (case.classes,)
        if case.arguments.get("over") == "image":
            shape = (x.shape[0] if x.dim() > 1 else 1, case.classes)
    if case.arguments.get("reduction", case.spec.default_reduction) != "none":
        shape = ()
    return torch.randn(shape, generator=torch.Generator().manual_seed(11)).double()


def shift_reason(spec: LossSpec, arguments: dict[str, Any]) -> str | None:
    """Why a common offset of the logits changes this loss (and its gradient rows do not sum to zero), or None."""
    if spec.name == "logit_norm":
        return "it divides by the norm of the logits"
    if arguments.get("softcap") is not None:
        return "softcap bends the logits"
    if arguments.get("z_loss", 0.0) != 0:
        return "z-loss holds the log-partition itself"
    if spec.name in ("sparse_cl", "tta") or arguments.get("form") == "logit":
        return "it is a sum of raw logits"
    return None
