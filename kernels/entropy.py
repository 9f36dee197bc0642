"""The entropy family, without labels: what its formulas get and give, and the passes over a row.

    m = max_j x_j,   rest = sum e^(x_j - m) without one class that has the largest logit,   mu = sum p_j (x_j - m)
    H = log(1 + rest) - mu                       both terms are positive, and small where H is: nothing cancels

A formula turns H into an `EntropyResult`; the driver writes dL/dx_j = -slope p_j ((x_j - m) - mu).
One read forward, one backward; filtered rows only write zeros. Saves m, d = 1 + rest, mu and the slope.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .launch import backward_pass, forward_pass
from .maths import exp_below_zero, log1p
from .tile import (
    Labels,
    Weights,
    counted,
    emit,
    is_half,
    labels_of,
    load_block,
    row_pointers,
    rows_of,
    save,
    saved,
    store_block,
    upstream,
    weights_of,
)


class EntropyResult(NamedTuple):
    loss: Any
    mass: Any  # 0 for a row that is filtered out
    slope: Any  # dL/dH


class Moments(NamedTuple):
    """Running sums of a row, all [ROWS]."""

    m: Any  # the largest logit
    rest: Any  # sum of e^(x - m), one largest logit left out
    moment: Any  # sum of e^(x - m) (x - m)
    square: Any  # sum of e^(2 (x - m)), the same one left out; for ADR


@triton.jit
def no_moments(ROWS: tl.constexpr, ACC: tl.constexpr):
    zero = tl.zeros((ROWS,), ACC)
    return Moments(zero - float("inf"), zero, zero, zero)


@triton.jit
def below_largest(x, m):
    """x - m for the largest logit m of a row; where e^(x - m) is 0 it is finite, so that their product is 0."""
    LOWEST: tl.constexpr = -750.0 if x.dtype == tl.float64 else -150.0
    return tl.maximum(x - m[:, None], LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def moments_of(x, ROUGH: tl.constexpr):
    """Of a block [ROWS, BLOCK]; -inf counts nothing."""
    m = tl.max(x, 1)
    z = below_largest(x, tl.where(m == -float("inf"), 0.0, m))
    e = exp_below_zero(z, ROUGH)
    ties = tl.sum((z == 0).to(x.dtype), 1)
    small = tl.where(z == 0, 0.0, e)
    return Moments(m, tl.sum(small, 1) + (ties - 1.0), tl.sum(e * z, 1), tl.sum(small * small, 1) + (ties - 1.0))


@triton.jit
def merged(a, b):
    """Moments of the classes of both; the class that stays left out is the larger side's."""
    m = tl.maximum(a.m, b.m)
    base = tl.where(m == -float("inf"), 0.0, m)
    a_step = tl.where(a.m == -float("inf"), 0.0, a.m - base)
    b_step = tl.where(b.m == -float("inf"), 0.0, b.m - base)
    a_factor = tl.where(a.m == -float("inf"), 0.0, exp_below_zero(a_step, False))
    b_factor = tl.where(b.m == -float("inf"), 0.0, exp_below_zero(b_step, False))
    a_sum = (1.0 + a.rest) * a_factor
    b_sum = (1.0 + b.rest) * b_factor
    a_square = (1.0 + a.square) * a_factor * a_factor
    b_square = (1.0 + b.square) * b_factor * b_factor
    first = a.m >= b.m
    moment = (a.moment * a_factor + a_step * a_sum) + (b.moment * b_factor + b_step * b_sum)
    return Moments(
        m, tl.where(first, a.rest + b_sum, b.rest + a_sum), moment, tl.where(first, a.square + b_square, b.square + a_square)
    )


@triton.jit
def ended(s):
    """A row of -inf has no softmax."""
    return Moments(s.m, tl.where(s.m == -float("inf"), float("nan"), s.rest), s.moment, s.square)


@triton.jit
def row_moments(p_x, x_at, read, C, STOP, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """The moments of whole rows, in one read; NaN where every class is masked."""
    all = no_moments(ROWS, ACC)
    for start in range(0, STOP, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        all = merged(all, moments_of(load_block(p_x, o_c, x_at, read, C, ACC), is_half(p_x)))
    return ended(all)


@triton.jit
def forward(
    p_x, p_y, p_sample, p_loss, p_saved, p_partial,
    outer, S, C, count, x_at, ignore, k0: tl.float64,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, False)
    weights = weights_of(None, None, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    s = row_moments(p_x, x_at, labels.live, C, BLOCK if WHOLE else C, ROWS, BLOCK, ACC)
    d = 1.0 + s.rest
    mu = s.moment / d
    result = FORMULA((tl.full((), k0, ACC),), log1p(s.rest) - mu, OPTIONS)
    kept = Labels(labels.y, labels.live & (result.mass != 0), labels.bad)
    emit(p_loss, p_partial, p_saved, rows, kept, Weights(weights.w, result.mass, weights.s), result.loss, d * 0.0, REDUCTION)
    save(p_saved, rows, count, 0, s.m, kept.live)
    save(p_saved, rows, count, 1, d, kept.live)
    save(p_saved, rows, count, 2, mu, kept.live)
    save(p_saved, rows, count, 3, result.slope, kept.live)


@triton.jit
def backward(
    p_x, p_y, p_sample, p_saved, p_up, p_grad,
    outer, S, C, count, x_at, grad_at, ignore,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, False)
    weights = weights_of(None, None, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    p_grad = row_pointers(p_grad, grad_at, outer, rows)
    slope = saved(p_saved, rows, count, 3, labels.live)
    live = counted(labels, weights, slope, REDUCTION) & (slope != 0)
    m = saved(p_saved, rows, count, 0, live)
    d = saved(p_saved, rows, count, 1, live)
    mu = saved(p_saved, rows, count, 2, live)
    up, _ = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, False)
    factor = tl.where(live, -slope * up / tl.where(live, d, 1.0), 0.0)
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = load_block(p_x, o_c, x_at, live, C, ACC)
        z = below_largest(x, m)
        g = factor[:, None] * (exp_below_zero(z, is_half(p_x)) * (z - mu[:, None]))
        store_block(p_grad, o_c, grad_at, rows.exists, C, g)


def launch_forward(formula: Formula, call: Any, x: Tensor, loss: Tensor, statistics: Tensor | None) -> None:
    forward_pass(forward, formula, call, x, loss, statistics)


def launch_backward(formula: Formula, call: Any, x: Tensor, statistics: Tensor, up: Tensor, grad: Tensor) -> None:
    backward_pass(backward, formula, call, x, statistics, up, grad)
