"""Cross-entropy with class probabilities t as targets, q_j = w_j ((1 - eps) t_j + eps / C), Q = sum q:

    L = sum_j q_j (lse - u_j) + z lse^2,      dL/du_j = p_j (Q + 2 z lse) - q_j.

One pass: with m the largest u so far, sum q (m - u) has no negative term and moves with m. Saves m, d = sum exp(u - m) and Q.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .launch import block_of, geometry, grid, launch, partial_sums, reduced, shared
from .maths import exp, exp_below_zero, log
from .softmax_row import Slopes, Sums, mapped_classes
from .tile import (
    class_pointers,
    counted,
    emit,
    inside,
    is_half,
    labels_of,
    load_block,
    load_classes,
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
def load_targets(p_soft, o_c, at, read, p_weight, eps, C, ACC: tl.constexpr):
    """[ROWS, BLOCK] weights q; 0 past the last class."""
    exists = read[:, None] & inside(o_c, at, C)
    q = tl.load(class_pointers(p_soft, o_c, at), exists, other=0.0).to(ACC)
    q = ((1.0 - eps) * q + eps / C) * load_classes(p_weight, o_c, C, 1.0, ACC)
    return tl.where(exists, q, 0.0)


@triton.jit
def soft_sums_add(
    s, x, q, o_c, k, p_shift, C, SCALED: tl.constexpr, CAPPED: tl.constexpr, ROUGH: tl.constexpr, ACC: tl.constexpr
):
    """The sums of softmax.py over all classes, with q in the place of the class weights."""
    u, _ = mapped_classes(x, o_c, k, p_shift, C, SCALED, CAPPED, ACC)
    m = tl.maximum(s.m, tl.max(u, 1))
    base = tl.where(m == -float("inf"), 0.0, m)
    d = s.d * exp(s.m - base) + tl.sum(exp_below_zero(u - base[:, None], ROUGH), 1)
    step = tl.where(s.seen == 0, 0.0, (base - tl.where(s.m == -float("inf"), 0.0, s.m)) * s.seen)
    spread = s.spread + step + tl.sum(tl.where(q == 0, 0.0, q * (base[:, None] - u)), 1)
    return Sums(m, d, s.moment, spread, s.seen + tl.sum(q, 1))


@triton.jit
def soft_loss(s):
    """sum q (lse - u), and lse."""
    rest = tl.where(s.m == -float("inf"), float("nan"), log(s.d))  # a row of -inf has no softmax
    return s.spread + tl.where(s.seen == 0, rest * 0.0, s.seen * rest), s.m + rest


@triton.jit
def soft_slopes(m, d, mass, up, main, k, EXTRA: tl.constexpr):
    """The gradient of a row; there is no label."""
    slope = main * mass
    if EXTRA:
        slope += 2.0 * k[3] * (m + log(d))
    return Slopes(m, slope * up / d, up * main, up)


@triton.jit
def soft_gradient(
    s, x, q, o_c, k, p_shift, C, SCALED: tl.constexpr, CAPPED: tl.constexpr, ROUGH: tl.constexpr, ACC: tl.constexpr
):
    u, du = mapped_classes(x, o_c, k, p_shift, C, SCALED, CAPPED, ACC)
    return (s.others[:, None] * exp_below_zero(u - s.base[:, None], ROUGH) - s.pull[:, None] * q) * du


@triton.jit
def forward(
    p_x, p_soft, p_weight, p_shift, p_sample, p_loss, p_saved, p_partial,
    outer, S, C, count, x_at, soft_at,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, EXTRA: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = numbers(k0, k1, k2, k3, ACC)
    rows = rows_of(S, ROWS)
    labels = labels_of(None, rows, 0, C, False)
    weights = weights_of(None, None, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    p_soft = row_pointers(p_soft, soft_at, outer, rows)
    zero = tl.zeros((ROWS,), ACC)
    sums = Sums(zero - float("inf"), zero, zero, zero, zero)
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = load_block(p_x, o_c, x_at, rows.exists, C, ACC)
        q = load_targets(p_soft, o_c, soft_at, rows.exists, p_weight, k[0], C, ACC)
        sums = soft_sums_add(sums, x, q, o_c, k, p_shift, C, SCALED, CAPPED, is_half(p_x), ACC)
    loss, lse = soft_loss(sums)
    extra = zero
    if EXTRA:
        extra = k[3] * lse * lse
    emit(p_loss, p_partial, p_saved, rows, labels, weights, loss, extra, REDUCTION)
    save(p_saved, rows, count, 0, sums.m, rows.exists)
    save(p_saved, rows, count, 1, sums.d, rows.exists)
    save(p_saved, rows, count, 2, sums.seen, rows.exists)


@triton.jit
def backward(
    p_x, p_soft, p_weight, p_shift, p_sample, p_saved, p_up, p_grad,
    outer, S, C, count, x_at, soft_at, grad_at,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, EXTRA: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = numbers(k0, k1, k2, k3, ACC)
    rows = rows_of(S, ROWS)
    labels = labels_of(None, rows, 0, C, False)
    weights = weights_of(None, None, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    p_soft = row_pointers(p_soft, soft_at, outer, rows)
    p_grad = row_pointers(p_grad, grad_at, outer, rows)
    m = saved(p_saved, rows, count, 0, rows.exists)
    d = saved(p_saved, rows, count, 1, rows.exists)
    mass = saved(p_saved, rows, count, 2, rows.exists)
    up, main = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, EXTRA)
    live = counted(labels, weights, d * 0.0 + 1.0, REDUCTION)  # a loss of 0 has no gradient of its own
    s = soft_slopes(m, d, mass, up, main, k, EXTRA)
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = load_block(p_x, o_c, x_at, live, C, ACC)
        q = load_targets(p_soft, o_c, soft_at, live, p_weight, k[0], C, ACC)
        g = soft_gradient(s, x, q, o_c, k, p_shift, C, SCALED, CAPPED, is_half(p_x), ACC)
        store_block(p_grad, o_c, grad_at, rows.exists, C, tl.where(live[:, None], g, 0.0))


def launch_forward(formula: Formula, call: Any, x: Tensor, loss: Tensor, statistics: Tensor | None) -> None:
    g = geometry(x, call.soft)
    block = block_of(g, x)
    programs = grid(g, block)
    partial = partial_sums(call, x, *programs)
    known = shared(formula, call, x, g, block) | {"p_soft": call.soft, "soft_at": g.at[1]}
    launch(forward, programs, p_loss=loss, p_saved=statistics, p_partial=partial, **known)
    reduced(call, partial, loss, statistics)


def launch_backward(formula: Formula, call: Any, x: Tensor, statistics: Tensor, up: Tensor, grad: Tensor) -> None:
    g = geometry(x, call.soft, grad)
    block = block_of(g, x)
    known = shared(formula, call, x, g, block) | {"p_soft": call.soft, "soft_at": g.at[1]}
    launch(backward, grid(g, block), p_saved=statistics, p_up=up, p_grad=grad, grad_at=g.at[2], **known)
