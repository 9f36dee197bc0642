"""The softmax family: the passes over a row. softmax_row.py has the row itself.

A formula turns a `SoftmaxRow` into a `SoftmaxResult`; the driver writes
    dL/du_j = slope exp(u_j - lse_{k != y}(u)) - pull w_j   (j != y),      dL/du_y = label.
Forward reads a row once (LogitNorm twice when it takes several blocks), backward once, and saves m = max_{j != y} u_j and
d = sum_{j != y} exp(u_j - m), separately: their sum would lose the digits of d in a row of large logits.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .launch import backward_pass, forward_pass
from .norm import late_of, others, squares_add, with_norm
from .softmax_row import (
    Sums,
    backward_result,
    forward_result,
    gradient_of,
    slopes_of,
    slopes_where,
    sums_add,
    weight_sum,
)
from .tile import (
    LEFT_OUT,
    counted,
    emit,
    is_half,
    labels_of,
    load_block,
    load_label,
    numbers,
    row_pointers,
    rows_of,
    save,
    saved,
    store_block,
    upstream,
    weights_of,
)


@triton.jit
def forward(
    p_x, p_y, p_weight, p_shift, p_factor, p_sample, p_weight_sum, p_loss, p_saved, p_partial,
    outer, S, C, count, x_at, ignore,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr,
    NORM: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = numbers(k0, k1, k2, k3, ACC)
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    live = labels.live
    weights = weights_of(p_weight, p_factor, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    zero = tl.zeros((ROWS,), ACC)
    o_c = tl.arange(0, BLOCK)
    if WHOLE:  # the row stays in registers
        x = load_block(p_x, o_c, x_at, live, C, ACC)
    late = zero + 1.0  # multiplies differences of u: LogitNorm's u are large, their differences not
    if NORM:
        x_label = load_label(p_x, labels.y, x_at, live, ACC)
        squares = zero
        unit = zero
        for start in range(0, BLOCK if WHOLE else C, BLOCK):
            if not WHOLE:
                x = load_block(p_x, start + o_c, x_at, live, C, ACC)
            squares, unit = squares_add(squares, unit, others(x, start + o_c, labels.y))
        rest = unit * tl.sqrt(squares)
        late = late_of(rest, x_label, k)
    sums = Sums(zero - float("inf"), zero, zero, zero, zero)
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        if not WHOLE:
            x = load_block(p_x, start + o_c, x_at, live, C, ACC)
        sums = sums_add(
            sums, x, start + o_c, labels, late, k, p_weight, p_shift, C, SCALED, CAPPED, SMOOTH, NORM, is_half(p_x), ACC
        )
    if not NORM:  # not before the loop, through which it would take a register
        x_label = load_label(p_x, labels.y, x_at, live, ACC)
    result = forward_result(
        sums, x_label, labels, weights, late, k, p_shift, p_weight_sum, C,
        FORMULA, OPTIONS, SCALED, CAPPED, SMOOTH, ACC,
    )  # fmt: skip
    emit(p_loss, p_partial, p_saved, rows, labels, weights, result.loss, result.extra, REDUCTION)
    d = sums.d
    save(p_saved, rows, count, 0, sums.m, live)
    save(p_saved, rows, count, 1, tl.where(counted(labels, weights, result.loss + result.extra, REDUCTION), d, LEFT_OUT), live)
    if NORM:
        save(p_saved, rows, count, 2, rest, live)
        save(p_saved, rows, count, 3, tl.where(d == 0, 0.0, sums.moment / tl.where(d == 0, 1.0, d)), live)


@triton.jit
def backward(
    p_x, p_y, p_weight, p_shift, p_factor, p_sample, p_weight_sum, p_saved, p_up, p_grad,
    outer, S, C, count, x_at, grad_at, ignore,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr,
    NORM: tl.constexpr, EXTRA: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = numbers(k0, k1, k2, k3, ACC)
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    live = labels.live
    weights = weights_of(p_weight, p_factor, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    p_grad = row_pointers(p_grad, grad_at, outer, rows)
    zero = tl.zeros((ROWS,), ACC)
    m = saved(p_saved, rows, count, 0, live)
    d = saved(p_saved, rows, count, 1, live)
    x_label = load_label(p_x, labels.y, x_at, live, ACC)
    late = zero + 1.0
    if NORM:
        rest = saved(p_saved, rows, count, 2, live)
        late = late_of(rest, x_label, k)
    up, main = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, EXTRA)
    result = backward_result(
        m, d, x_label, labels, weights, main, late, k, p_shift, p_weight_sum, C,
        FORMULA, OPTIONS, SCALED, CAPPED, ACC,
    )  # fmt: skip
    live = live & ((d < 0) == 0)
    s = slopes_of(result, m, d, up)
    if NORM:
        s, drag = with_norm(s, up * result.slope, x_label, rest, saved(p_saved, rows, count, 3, live), late, k)
        drag = tl.where(live, drag, 0.0)
        late = tl.where(live, late, 1.0)
    s = slopes_where(live, s)  # the others' logits are -inf, whose exponential is 0
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = load_block(p_x, o_c, x_at, live, C, ACC)
        g = gradient_of(s, x, o_c, labels, late, k, p_weight, p_shift, C, SCALED, CAPPED, SMOOTH, is_half(p_x), ACC)
        if NORM:
            g -= drag[:, None] * others(x, o_c, labels.y)
        if SMOOTH:  # class weights may be infinite
            g = tl.where(live[:, None], g, 0.0)
        store_block(p_grad, o_c, grad_at, rows.exists, C, g)


def launch_forward(formula: Formula, call: Any, x: Tensor, loss: Tensor, statistics: Tensor | None) -> None:
    twice = formula.arguments(*call.scalars).features["NORM"]
    forward_pass(forward, formula, call, x, loss, statistics, twice, p_weight_sum=weight_sum(formula, call))


def launch_backward(formula: Formula, call: Any, x: Tensor, statistics: Tensor, up: Tensor, grad: Tensor) -> None:
    backward_pass(backward, formula, call, x, statistics, up, grad, p_weight_sum=weight_sum(formula, call))
