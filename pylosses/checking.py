"""The engine of ``pylosses check``: every loss on every backend against the float64 reference.

A case is one call: a shape, a dtype and sample arguments, on rows that hurt (confident, wrong, tied, masked by -inf, offset,
ignored). The truth is the reference in float64 on the same numbers; "plain" is the reference in the dtype under test, that is
what plain PyTorch gives. Loss and gradient (random upstream gradient) are compared for each kind of row on its own, so that
large rows do not hide small ones:

    error = max |result - truth| / max(|truth|, tiny)             over the rows of one kind
    a fused backend is right when   error <= 2 * plain error + floor

tiny is the dtype's smallest number with all its digits: float16 gradients of confident rows lie far below it, where nobody's
has a relative error worth the name (0 for 1e-8 would be one of 100 %).

The reference cannot be its own witness: it is right when its float32 and half results agree with its float64 result.
"""

from __future__ import annotations

import inspect
import math
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda, functional, triton
from .check import ACCUMULATE
from .choice import backends
from .spec import BACKENDS, LOSSES, LossSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: What rounding alone may cost, by the dtype of the statistics, relative to the largest value of the kind of row.
FLOOR = {torch.float32: 4e-6, torch.float64: 1e-12}

#: The float64 truth is itself rounded: this much of the largest value of the whole case, and of its probabilities of up to 1.
TRUTH_FLOOR = 256 * torch.finfo(torch.float64).eps

#: How far the reference may be from its own float64 result, relative to the largest value of the case. Half gradients are
#: rounded to half once, so they may differ by their own step.
REFERENCE_BOUND = {
    torch.float32: 1e-4,
    torch.bfloat16: 1e-4 + torch.finfo(torch.bfloat16).eps,
    torch.float16: 1e-4 + torch.finfo(torch.float16).eps,
}

#: An error of plain PyTorch from which on it has not one digit right: a case with it is judged, and shown only if it fails.
NO_DIGIT = 0.1

#: (shape of the logits, dtype of the labels, ignore_index)
SHAPES = (
    ((28, 37), torch.int64, -100),
    ((14, 1000), torch.int16, -1),
    ((2, 19, 5, 7), torch.uint8, 255),
    ((7, 3), torch.int32, -100),
    ((3, 1), torch.int64, -100),
)
#: Triton's interpreter takes a thousand times as long as a kernel: it gets fewer classes, still more than a block of the region
#: family, and shapes in turns, two cases for each dtype and sample arguments.
INTERPRETED_SHAPES = (SHAPES[0], ((7, 300), torch.int16, -1), *SHAPES[2:])
INTERPRETED = "two cases for each dtype and sample arguments, the shapes in turns, where compiled kernels get all"
FEW_CLASSES = 10  #: below it sample arguments such as top=5 may not fit, and the case is left out

#: Kinds of rows; the reduced cases keep to those whose loss is finite.
KINDS = ("ordinary", "confident", "wrong", "tied", "masked", "offset", "ignored")
FINITE_KINDS = ("ordinary", "tied", "offset", "ignored")


class Check(NamedTuple):
    """One line of the table: a loss on a backend and device."""

    spec: LossSpec
    backend: str
    device: str
    skipped: str | None  #: why there is nothing to check

    @property
    def interpreted(self) -> bool:
        return self.backend == "triton" and triton.interpreted()


class Outcome(NamedTuple):
    """What came out of a check: its worst case."""

    check: Check
    cases: int
    error: float  #: ours
    plain: float  #: plain PyTorch's at that dtype
    allowed: float
    where: str  #: dtype, shape, arguments, quantity and kind of row
    problem: str | None  #: an exception or a broken promise, which fails the check whatever the errors are

    @property
    def passed(self) -> bool:
        return self.problem is None and self.error <= self.allowed

    @property
    def verdict(self) -> str:
        if self.check.skipped is not None:
            return "skipped"
        return "ok" if self.passed else "FAILED"


class Case(NamedTuple):
    """One call of a loss."""

    text: str
    inputs: tuple[Tensor, ...]
    arguments: dict[str, Any]
    kinds: tuple[str, ...] | None  #: of each row of the logits; None when the result has no rows


def plan(losses: list[LossSpec] | None = None, names: list[str] | None = None, devices: list[str] | None = None) -> list[Check]:
    """Every check of `losses` on the backends `names` and on `devices` (None: all that are here)."""
    devices = devices or (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    checks = []
    for spec in losses or list(LOSSES.values()):
        for device in devices:
            for name in names or _backends_for(device):
                checks.append(Check(spec, name, device, _why_not(spec, name)))
    return checks


def _backends_for(device: str) -> list[str]:
    """Available backends that take tensors of `device`; on the CPU "triton" does when interpreted, "cuda" when emulated."""
    other = {"cpu": ("cuda",), "cuda": ("cpu",)}.get(device.partition(":")[0], ("cpu", "cuda"))
    wrong = () if device == "cpu" and cuda.emulated() else other
    return [name for name in BACKENDS if name not in wrong and backends()[name].available]


def _why_not(spec: LossSpec, name: str) -> str | None:
    status = backends()[name]
    return spec.why_not(name) if status.available else status.reason


def perform(check: Check) -> Outcome:
    """Run all cases of `check` and keep the worst."""
    worst = Outcome(check, 0, 0.0, 0.0, 0.0, "", None)
    if check.skipped is not None:
        return worst
    count = 0
    for dtype in DTYPES:
        if check.backend == "reference" and dtype not in REFERENCE_BOUND:
            continue  # float64 is the truth
        for case in cases(check.spec, dtype, check.device, check.interpreted):
            try:
                verdict = _compare(check, case, dtype)
            except Exception as error:  # whatever a loss raises is a failed check, not the end of all checks
                return worst._replace(cases=count, where=case.text, problem=f"{type(error).__name__}: {error}")
            if verdict is None:
                continue
            count += 1
            if verdict.problem is not None:
                return verdict._replace(cases=count)
            if not worst.where or _severity(verdict) > _severity(worst):
                worst = verdict
    if count == 0:
        return worst._replace(problem="no case could be run")
    return worst._replace(cases=count)


def _severity(outcome: Outcome) -> float:
    if outcome.passed and outcome.plain > NO_DIGIT:
        return 0.0  # as good as plain PyTorch, which says nothing there
    return outcome.error / outcome.allowed if outcome.allowed > 0 else outcome.error


def _compare(check: Check, case: Case, dtype: torch.dtype) -> Outcome | None:
    """The worst quantity and kind of row of one case; None when its arguments do not fit its few classes."""
    function = function_of(check.spec)
    gradient = check.backend == "reference" or check.spec.family != "score"  # kernels give scores, not their gradients
    inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in case.inputs)
    exact = tuple(t.double() if t.is_floating_point() else t for t in inputs)
    try:
        truth = evaluate(function, exact, case.arguments, "reference", gradient)
    except ValueError:
        if case.kinds is not None and case.inputs[0].shape[1] < FEW_CLASSES:
            return None
        raise
    before = tuple(t.clone() for t in inputs)
    result = evaluate(function, inputs, case.arguments, check.backend, gradient)
    changed = any(not torch.equal(_bits(a), _bits(b)) for a, b in zip(before, inputs, strict=True))
    problem = "the input was modified" if changed else _wrong_dtype(check.spec, result, dtype)
    plain = result
    if check.backend != "reference":
        plain = evaluate(function, inputs, case.arguments, "reference", gradient)

    worst: Outcome | None = None
    for quantity, expected in truth.items():
        expected = _in_range_of(result[quantity].dtype, expected)
        size = _largest(expected)
        for kind, rows in _groups(case, quantity, expected):
            scale = _largest(expected[rows]) if check.backend != "reference" else size
            scale = max(scale or size or 1.0, torch.finfo(result[quantity].dtype).smallest_normal)
            error = _difference(result[quantity][rows], expected[rows]) / scale
            by_plain = _difference(plain[quantity][rows], expected[rows]) / scale
            if check.backend == "reference":
                allowed = REFERENCE_BOUND[dtype]
            else:
                allowed = 2 * by_plain + FLOOR[ACCUMULATE[dtype]] + TRUTH_FLOOR * max(size, 1.0) / scale
            where = f"{_short(dtype)} {case.text}: {quantity}{f', {kind} rows' if kind else ''}"
            outcome = Outcome(check, 1, error, by_plain, allowed, where, problem)
            if worst is None or _severity(outcome) > _severity(worst):
                worst = outcome
    return worst


def evaluate(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], arguments: dict[str, Any], backend: str, gradient: bool = True
) -> dict[str, Tensor]:
    """Every floating point result of one call and, if `gradient`, that of every floating point input, by name."""
    leaves = [t.detach().requires_grad_(gradient) if t.is_floating_point() else t for t in inputs]
    if "backend" in inspect.signature(function).parameters:
        arguments = {**arguments, "backend": backend}
    returned = function(*leaves, **arguments)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    names = getattr(returned, "_fields", None) or [f"output {i}" if i else "loss" for i in range(len(outputs))]
    named = dict(zip(names, outputs, strict=True))
    found = {name: value for name, value in named.items() if isinstance(value, Tensor) and value.is_floating_point()}
    differentiable = [value for value in found.values() if value.requires_grad]
    if differentiable:
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        upstream = [_upstream(value) for value in differentiable]
        grads = torch.autograd.grad(differentiable, wanted, upstream, allow_unused=True)
        for i, grad in enumerate(grads):
            if grad is not None:
                found["gradient" if len(wanted) == 1 else f"gradient {i}"] = grad
    return {name: value.detach() for name, value in found.items()}


def _upstream(value: Tensor) -> Tensor:
    """A random upstream gradient: the same numbers whatever the dtype, away from 0, and exact in every dtype."""
    generator = torch.Generator().manual_seed(value.numel())
    size = torch.randint(4, 17, value.shape, generator=generator) / 8
    sign = 1 - 2 * torch.randint(0, 2, value.shape, generator=generator)
    return (size * sign).to(value)


def function_of(spec: LossSpec) -> Callable[..., Any]:
    """The public function of a loss; one that was registered at run time lives next to its reference."""
    found = getattr(functional, spec.function, None)
    return found or getattr(sys.modules[spec.reference.__module__], spec.function)


def cases(spec: LossSpec, dtype: torch.dtype, device: str, interpreted: bool = False) -> Iterator[Case]:
    """All cases of a loss, or those for an interpreter; floating point inputs hold numbers that `dtype` represents."""
    shapes = INTERPRETED_SHAPES if interpreted else SHAPES
    reductions: dict[str, tuple[str, ...]] = {spec.default_reduction: FINITE_KINDS}
    if spec.family != "region":  # a loss of the whole batch has no rows
        reductions["none"] = KINDS
    for index in range(len(spec.samples)):
        if spec.inputs == "own":
            yield _own_case(spec, index, device)
            continue
        turn = len(DTYPES) * index + DTYPES.index(dtype)
        # the reduced case among the shapes with many classes, which all arguments fit; the other among all
        taken = {(turn % 3, next(iter(reductions))), ((turn + 1) % len(shapes), next(reversed(reductions)))}
        for i, (shape, label_dtype, ignore) in enumerate(shapes):
            for reduction, kinds in reductions.items():
                if not interpreted or (i, reduction) in taken:
                    yield _row_case(spec, index, shape, label_dtype, ignore, reduction, kinds, dtype, device)


def _row_case(
    spec: LossSpec,
    index: int,
    shape: tuple[int, ...],
    label_dtype: torch.dtype,
    ignore: int,
    reduction: str,
    kinds: tuple[str, ...],
    dtype: torch.dtype,
    device: str,
) -> Case:
    classes = shape[1]
    positions = shape[:1] + shape[2:]
    count = math.prod(positions)
    row_kinds = tuple(kinds[i % len(kinds)] for i in range(count))
    if spec.inputs != "labelled":
        row_kinds = tuple("ordinary" if kind == "ignored" else kind for kind in row_kinds)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.name} {index} {shape} {reduction}".encode()))
    labels = torch.randint(0, classes, (count,), generator=generator)
    logits = torch.stack([_row(kind, classes, int(label), generator) for kind, label in zip(row_kinds, labels, strict=True)])
    labels[torch.tensor([kind == "ignored" for kind in row_kinds])] = ignore
    x = logits.reshape(positions + (classes,)).movedim(-1, 1).contiguous().to(dtype)
    y = labels.reshape(positions).to(label_dtype)

    arguments = _sample(spec, index, classes, device)
    text = _described(shape, spec.samples[index], f"reduction={reduction}")
    arguments["reduction"] = reduction
    if spec.inputs == "labelled":
        arguments["ignore_index"] = ignore
        return Case(text, (x.to(device), y.to(device)), arguments, row_kinds)
    return Case(text, (x.to(device),), arguments, row_kinds)


def _row(kind: str, classes: int, label: int, generator: torch.Generator) -> Tensor:
    """The logits (C) of one row."""
    x = 3 * torch.randn(classes, generator=generator, dtype=torch.float64)
    if kind == "confident":
        x[label] = 25 + x.max()
    elif kind == "wrong":
        x[(label + 1) % classes] = 20 + x.max()
    elif kind == "tied":
        x = x.div(2).round()
    elif kind == "masked":
        masked = torch.rand(classes, generator=generator) < 0.3
        masked[label] = False
        x[masked] = -torch.inf
    elif kind == "offset":
        x = 256 + 4 * x.round()  # exact in every dtype
    elif kind == "ignored":
        x[:] = torch.nan  # an ignored row is never read
    return x


#: What the positional arguments of losses with inputs of their own hold: B rows, D features, C classes.
_B, _D, _C = 12, 16, 23


def _own_case(spec: LossSpec, index: int, device: str) -> Case:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{spec.name} {index}".encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    makers: dict[str, Callable[[], Tensor]] = {
        "target": lambda: torch.randint(0, _C, (_B,), generator=generator),
        "linear_weight": lambda: normal(_C, _D),
        "score_in": lambda: 1 + normal(40),
        "score_out": lambda: normal(30),
        "clean_conf": lambda: normal(40).sigmoid(),
        "adv_conf": lambda: normal(40).sigmoid(),
        "confidence": lambda: normal(40).sigmoid(),
        "clean_correct": lambda: normal(40) > -1,
        "adv_correct": lambda: normal(40) > 0,
        "correct": lambda: normal(40) > -1,
        "utility": lambda: normal(_B, _D),
    }
    parameters = inspect.signature(function_of(spec)).parameters
    names = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    arguments = _sample(spec, index, _C, device)
    if "noise" in parameters:  # drawn noise would differ between dtypes
        arguments["noise"] = normal(_B, _D).float().to(device)
    inputs = tuple(makers.get(name, lambda: normal(_B, _D))().to(device) for name in names if name not in arguments)
    text = _described(tuple(inputs[0].shape) if inputs else (), spec.samples[index])
    return Case(text, inputs, arguments, None)


def _sample(spec: LossSpec, index: int, classes: int, device: str) -> dict[str, Any]:
    """Sample arguments whose tensors are exact in float32, so that every dtype means the same numbers."""
    arguments = spec.sample(index, classes)
    return {k: v.float().to(device) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in arguments.items()}


def _described(shape: tuple[int, ...], sample: Any, *more: str) -> str:
    words = [f"{name}={value if isinstance(value, (int, float, str)) else '(C)'}" for name, value in sample.items()]
    return " ".join([str(tuple(shape)).replace(" ", ""), *words, *more])


def _groups(case: Case, quantity: str, expected: Tensor) -> Iterator[tuple[str, Any]]:
    """(kind, index) of the parts of `expected` that are compared on their own."""
    kinds = case.kinds
    if kinds is None or expected.dim() == 0:
        yield "", ...
        return
    positions = expected.shape
    if quantity == "gradient":
        positions = expected.shape[:1] + expected.shape[2:]
    for kind in dict.fromkeys(kinds):
        rows = torch.tensor([k == kind for k in kinds], device=expected.device).reshape(positions)
        if quantity == "gradient":
            rows = rows.unsqueeze(1).expand_as(expected)
        yield kind, rows


def _in_range_of(dtype: torch.dtype, truth: Tensor) -> Tensor:
    """The truth with what `dtype` cannot hold as infinity."""
    return torch.where(truth.abs() > torch.finfo(dtype).max, truth.sign() * torch.inf, truth)


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _difference(result: Tensor, truth: Tensor) -> float:
    """max |result - truth|; infinite when an inf or NaN is in the wrong place."""
    result, truth = result.double(), truth.double()
    finite = truth.isfinite()
    other = ~finite
    if not torch.equal(result.isfinite(), finite) or not torch.equal(result[other].nan_to_num(), truth[other].nan_to_num()):
        return math.inf
    if not torch.equal(result.isnan(), truth.isnan()):
        return math.inf
    return float((result[finite] - truth[finite]).abs().max()) if bool(finite.any()) else 0.0


def _wrong_dtype(spec: LossSpec, result: dict[str, Tensor], dtype: torch.dtype) -> str | None:
    """A result that has not the promised dtype, in words."""
    if spec.module is None:  # a helper, not a loss
        return None
    for name, value in result.items():
        expected = dtype if name.startswith("gradient") else ACCUMULATE[dtype]
        if value.dtype != expected:
            return f"{name} has dtype {value.dtype}, expected {expected} for {dtype} input"
    return None


def _bits(value: Tensor) -> Tensor:
    """Comparable with NaN equal to itself."""
    if not value.is_floating_point():
        return value
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.view(integers[value.element_size()])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
