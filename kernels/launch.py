"""From tensors to a kernel launch: where the rows lie, what the kernels of every family are told, and the last reduction."""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .tile import finish
from .tuning import FINISH, Tile, most_registers, region_tile, tile

NUMBERS = 8  #: a loss has at most so many in `Arguments.numbers`
REDUCTIONS = {"none": 0, "sum": 1, "mean": 2, "above_zero": 3}


class Geometry(NamedTuple):
    """Some tensors (N, C, *) as outer indices x positions x classes, see tile.py."""

    outer: tuple[int, int]
    programs: int  #: outer indices
    positions: int
    classes: int
    rows: int
    at: tuple[tuple[Any, ...], ...]  #: strides of each tensor, and what divides them


def geometry(*tensors: Tensor, split: bool = False) -> Geometry | None:
    """The common geometry of tensors of one shape, or None when their rows take more than four dimensions.

    With `split`, the first dimension is an outer one of its own: programs do not cross images.
    """
    shape = tensors[0].shape
    if len(shape) == 1:
        shape = (1, *shape)
        strides = [(0, *t.stride()) for t in tensors]
    else:
        strides = [t.stride() for t in tensors]
    sizes: list[int] = []
    steps: list[tuple[int, ...]] = []
    rows = 1
    for d, size in enumerate(shape):
        if d == 1:
            continue
        rows *= size
        if size == 1 and not (split and d == 0):
            continue
        step = tuple(s[d] for s in strides)
        if len(sizes) > split and all(before == now * size for before, now in zip(steps[-1], step, strict=True)):
            sizes[-1] *= size
            steps[-1] = step
        else:
            sizes.append(size)
            steps.append(step)
    if len(sizes) > 4:
        return None
    missing = 4 - len(sizes)
    sizes[int(split) : int(split)] = [1] * missing
    steps[int(split) : int(split)] = [(0,) * len(tensors)] * missing
    lanes_along_classes = all(s[1] == 1 for s in strides)
    unit = math.gcd(16, shape[1], *(s for step in steps for s in step)) if lanes_along_classes else 1
    at = tuple((*(step[i] for step in steps), strides[i][1], tl.constexpr(unit)) for i in range(len(tensors)))
    return Geometry((sizes[1], sizes[2]), sizes[0] * sizes[1] * sizes[2], sizes[3], shape[1], rows, at)


def block_of(g: Geometry, x: Tensor, *, twice: bool = False, crowded: bool = False, region: bool = False) -> Tile:
    position, classes = g.at[0][3], g.at[0][4]
    across = g.positions == 1 or abs(classes) <= abs(position)
    if region:
        return region_tile(g.positions, g.classes, across)
    return tile(g.positions, g.classes, across, x.element_size(), twice=twice, crowded=crowded)


def grid(g: Geometry, block: Tile) -> tuple[int]:
    return (g.programs * triton.cdiv(g.positions, block.rows),)


def accumulate(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def partial_sums(call: Any, x: Tensor, programs: int) -> Tensor | None:
    """(4, programs) places for the sums of each program; None when rows are not reduced."""
    return None if call.reduction == "none" else x.new_empty((4, programs), dtype=torch.float64)


def launch(
    kernel: Any, programs: tuple[int, ...], num_warps: int, crowded: bool = False, num_stages: int = 3, **known: Any
) -> None:
    """Launch `kernel` with those of the known arguments that it has."""
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if crowded and compiled_for() == "cuda":
        options["maxnreg"] = most_registers(num_warps)
    kernel[programs](**{name: known[name] for name in kernel.arg_names}, **options)


def compiled_for() -> str | None:
    """Name of the compiler's backend, "cuda", "hip" or "xpu"; None for the interpreter."""
    return None if triton.knobs.runtime.interpret else _backend(triton.runtime.driver.active)


@cache
def _backend(driver: Any) -> str:
    return driver.get_current_target().backend


def is_turing() -> bool:
    """Whether a multiprocessor has 64 KiB of shared memory alone (sm_75)."""
    return compiled_for() == "cuda" and triton.runtime.driver.active.get_current_target().arch < 80


def shared(formula: Formula, call: Any, x: Tensor, g: Geometry, block: Tile) -> dict[str, Any]:
    """What the kernels of every family may ask for, by the names of their parameters."""
    k, options, features = formula.arguments(*call.scalars)
    numbers = (*map(float, k), *[0.0] * NUMBERS)[:NUMBERS]
    return {
        "p_x": x, "p_y": call.y, "p_weight": call.weight, "p_shift": call.shift, "p_factor": call.factor,
        "p_sample": call.sample_weight, "outer": g.outer, "S": g.positions, "C": g.classes, "count": g.rows,
        "x_at": g.at[0], "ignore": call.ignore_index, **{f"k{i}": number for i, number in enumerate(numbers)},
        "FORMULA": formula.row, "OPTIONS": options, **features, "REDUCTION": REDUCTIONS[call.reduction],
        "ROWS": block.rows, "BLOCK": block.block, "WHOLE": block.block >= g.classes, "ACC": accumulate(x),
        "num_warps": block.warps, "crowded": block.crowded,
    }  # fmt: skip


def reduced(call: Any, partial: Tensor | None, loss: Tensor, saved: Tensor | None) -> None:
    """Add the partial sums (4, programs) to the loss and its divisors."""
    if partial is None:
        return
    normalizer = call.normalizer
    given = isinstance(normalizer, Tensor)
    if given:  # it may be anywhere, a kernel reads its own device
        normalizer = normalizer.to(loss.device)
    finish[(1,)](
        partial, loss, saved, normalizer if given else None, partial.shape[1],
        float(normalizer) if normalizer is not None and not given else 1.0, REDUCTIONS[call.reduction],
        normalizer is not None, FINISH, num_warps=4,
    )  # fmt: skip


def forward_pass(
    kernel: Any,
    formula: Formula,
    call: Any,
    x: Tensor,
    loss: Tensor,
    statistics: Tensor | None,
    twice: bool = False,
    **more: Any,
) -> None:
    """The forward of a family whose one kernel emits the losses of rows; `more` are the arguments of that family alone."""
    g = geometry(x)
    block = block_of(g, x, twice=twice)
    programs = grid(g, block)
    partial = partial_sums(call, x, *programs)
    known = shared(formula, call, x, g, block) | more
    launch(kernel, programs, p_loss=loss, p_saved=statistics, p_partial=partial, **known)
    reduced(call, partial, loss, statistics)


def backward_pass(
    kernel: Any, formula: Formula, call: Any, x: Tensor, statistics: Tensor, up: Tensor, grad: Tensor, **more: Any
) -> None:
    """Its backward."""
    g = geometry(x, grad)
    block = block_of(g, x)
    known = shared(formula, call, x, g, block) | more
    launch(kernel, grid(g, block), p_saved=statistics, p_up=up, p_grad=grad, grad_at=g.at[1], **known)
