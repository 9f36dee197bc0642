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
from .maths import exp
from .softmax_row import (
    Sums,
    label_logit,
    mapped,
    norm_with_label,
    others,
    row_of,
    squares_add,
    sums_add,
    total_weight,
    unmasked,
    weight_sum,
    with_spread,
)
from .tile import (
    counted,
    emit,
    labels_of,
    load_block,
    load_classes,
    load_label,
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
    k = (tl.full((), k0, ACC), tl.full((), k1, ACC), tl.full((), k2, ACC), tl.full((), k3, ACC))
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    live = labels.live
    weights = weights_of(p_weight, p_factor, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    zero = tl.zeros((ROWS,), ACC)
    x_label = load_label(p_x, labels.y, x_at, live, ACC)
    o_c = tl.arange(0, BLOCK)
    if WHOLE:
        x = load_block(p_x, o_c, x_at, live, C, ACC)
    late = zero + 1.0  # multiplies differences of u: LogitNorm's u are large, their differences not
    if NORM:
        squares = zero
        unit = zero
        if WHOLE:
            squares, unit = squares_add(squares, unit, others(x, o_c, labels.y))
        else:
            for start in range(0, C, BLOCK):
                x = load_block(p_x, start + o_c, x_at, live, C, ACC)
                squares, unit = squares_add(squares, unit, others(x, start + o_c, labels.y))
        rest = unit * tl.sqrt(squares)
        late = 1.0 / (k[0] * (norm_with_label(rest, unmasked(x_label)) + k[1]))
    u_label = label_logit(x_label, p_shift, labels, k, SCALED, CAPPED)

    sums = Sums(zero - float("inf"), zero, zero, zero, zero)
    if WHOLE:
        sums = sums_add(sums, x, o_c, labels, late, k, p_weight, p_shift, C, SCALED, CAPPED, SMOOTH, NORM, ACC)
    else:
        for start in range(0, C, BLOCK):
            x = load_block(p_x, start + o_c, x_at, live, C, ACC)
            sums = sums_add(sums, x, start + o_c, labels, late, k, p_weight, p_shift, C, SCALED, CAPPED, SMOOTH, NORM, ACC)
    r = row_of(sums.m, sums.d, u_label, late, weights.w, C, total_weight(p_weight_sum, C, ACC), 1.0)
    if SMOOTH:
        r = with_spread(r, sums, u_label, weights.mass)
    result = FORMULA(k, r, OPTIONS)
    emit(p_loss, p_partial, p_saved, rows, labels, weights, result.loss, result.extra, REDUCTION)
    d = sums.d
    save(p_saved, rows, count, 0, sums.m, live)
    save(p_saved, rows, count, 1, d, live)
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
    k = (tl.full((), k0, ACC), tl.full((), k1, ACC), tl.full((), k2, ACC), tl.full((), k3, ACC))
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
        length = norm_with_label(rest, unmasked(x_label))
        late = 1.0 / (k[0] * (length + k[1]))
    u_label = label_logit(x_label, p_shift, labels, k, SCALED, CAPPED)
    up, main = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, EXTRA)
    r = row_of(m, d, u_label, late, weights.w, C, total_weight(p_weight_sum, C, ACC), main)
    result = FORMULA(k, r, OPTIONS)
    live = counted(labels, weights, result.loss + result.extra, REDUCTION)
    slope = up * result.slope
    label = up * result.label
    drag = zero
    if NORM:  # the norm's own part of the gradient, along x; at the label the two parts all but cancel
        moment = saved(p_saved, rows, count, 3, live)
        x_label = unmasked(x_label)
        wide = length + k[1]
        per_length = tl.where(length > 0, 1.0 / tl.where(length > 0, length, 1.0), 0.0)
        along = (rest * per_length) * (rest / wide) + k[1] / wide + (moment * per_length) * (x_label / wide)
        label *= tl.where(length == 0, 1.0, along)
        drag = slope * ((moment - x_label) * per_length) * (late / wide)
    slope = tl.where(d == 0, slope * 0.0, slope / tl.where(d == 0, 1.0, d))  # no other class: nothing to push
    base = tl.where(m == -float("inf"), 0.0, m)
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = load_block(p_x, o_c, x_at, live, C, ACC)
        u, du = mapped(x, load_classes(p_shift, o_c, C, 0.0, ACC), k[1], k[2], SCALED, CAPPED)
        g = slope[:, None] * exp((u - base[:, None]) * late[:, None])
        if SMOOTH:
            g -= (up * result.pull)[:, None] * load_classes(p_weight, o_c, C, 1.0, ACC)
        g = tl.where(o_c[None, :] == labels.y[:, None], label[:, None], g) * du * late[:, None]
        if NORM:
            g -= tl.where(o_c[None, :] == labels.y[:, None], 0.0, drag[:, None] * unmasked(x))
        store_block(p_grad, o_c, grad_at, rows.exists, C, tl.where(live[:, None], g, 0.0))


def launch_forward(formula: Formula, call: Any, x: Tensor, loss: Tensor, statistics: Tensor | None) -> None:
    twice = formula.arguments(*call.scalars).features["NORM"]
    forward_pass(forward, formula, call, x, loss, statistics, twice, p_weight_sum=weight_sum(formula, call))


def launch_backward(formula: Formula, call: Any, x: Tensor, statistics: Tensor, up: Tensor, grad: Tensor) -> None:
    backward_pass(backward, formula, call, x, statistics, up, grad, p_weight_sum=weight_sum(formula, call))
