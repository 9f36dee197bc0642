"""The margin family: what its formulas get and give, and the passes over a row.

    raw_j = (x_j - x_y) + mu_j,   e_j = h(raw_j) for j != y,   threshold t = mean_j e_j, a constant for the gradient
    h(r) = r^power for r >= delta, delta^(power - 1) r below it (power < 1 only), 0 for r <= 0

A formula turns a `MarginRow` into a `MarginResult`; the driver writes
    dL/dx_j = factor h'(raw_j)   (j kept),      dL/dx_y = -(sum of the others).
A threshold asks for two passes over the errors: forward reads a row once when one block holds it, else twice, unless no error
is above zero. Saves the threshold, the factor (0 in a row without errors, to which backward only writes zeros) and the sum of
slopes.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .launch import backward_pass, forward_pass
from .maths import above, power
from .tile import (
    are_labels,
    counted,
    emit,
    labels_of,
    load_block,
    load_classes,
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

LINEAR, SQUARED, ROOT, GENERAL = (tl.constexpr(i) for i in range(4))


class MarginRow(NamedTuple):
    """All [ROWS]."""

    kept_sum: Any  # sum of kept errors
    kept_count: Any  # how many classes were kept
    w: Any  # class weight of the label
    classes: Any  # C


class MarginResult(NamedTuple):
    loss: Any
    factor: Any  # of each kept slope


@triton.jit
def errors_of(raw, k, POWER: tl.constexpr):
    """h of raw errors, NaN shows; and h' where h > 0. k = (margin, power, delta, slope below delta)."""
    positive = tl.maximum(raw, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if POWER == LINEAR:
        return positive, tl.full(raw.shape, 1.0, raw.dtype)
    elif POWER == SQUARED:
        return positive * positive, 2.0 * positive
    else:
        none = raw <= 0
        safe = tl.where(none, 1.0, raw)
        if POWER == ROOT:
            e = tl.sqrt(safe)
            slope = 0.5 / e
        else:
            e = power(safe, k[1])
            slope = k[1] * power(safe, k[1] - 1.0)
        below = raw < k[2]
        e = tl.where(below, k[3] * safe, e)
        return tl.where(none, 0.0, e), tl.where(below, k[3], slope)


@triton.jit
def raw_errors(p_x, x_at, o_c, read, labels, x_label, p_shift, mu, C, OF_LABEL: tl.constexpr, ACC: tl.constexpr):
    return raw_of(load_block(p_x, o_c, x_at, read, C, ACC), o_c, labels, x_label, p_shift, mu, C, OF_LABEL, ACC)


@triton.jit
def raw_of(x, o_c, labels, x_label, p_shift, mu, C, OF_LABEL: tl.constexpr, ACC: tl.constexpr):
    """[ROWS, BLOCK]; -inf at the label, at masked classes and past the last class."""
    out = (x == -float("inf")) | are_labels(o_c, labels.y)
    return tl.where(out, -float("inf"), unmasked_raw(x, o_c, x_label, p_shift, mu, C, OF_LABEL, ACC))


@triton.jit
def unmasked_raw(x, o_c, x_label, p_shift, mu, C, OF_LABEL: tl.constexpr, ACC: tl.constexpr):
    """The same where it is kept, if it is not the label's: one that is masked is -inf, or NaN if the label is masked too."""
    margin = mu[:, None]
    if p_shift is not None and not OF_LABEL:
        margin = load_classes(p_shift, o_c, C, 0.0, ACC)
    return (x - x_label[:, None]) + margin


@triton.jit
def threshold(total, largest, C):
    """The mean error, but not more than the largest, over which rounding may lift it."""
    mean = total / C
    t = above(mean.to(largest.dtype), mean)  # e >= t exactly when e >= mean
    return tl.where(t < largest, t, largest)


@triton.jit
def kept_of(raw, t, k, POWER: tl.constexpr):
    """Sum and count of the errors that reach the threshold, and the sum of their slopes; NaN shows."""
    e, slope = errors_of(raw, k, POWER)
    out = e < least_of(t)[:, None]
    total = tl.sum(tl.where(out, 0.0, e), 1)
    count = tl.sum(tl.where(out, 0.0, tl.full(e.shape, 1.0, e.dtype)), 1)
    if POWER == LINEAR:
        return total, count, count
    else:
        return total, count, tl.sum(tl.where(out, 0.0, slope), 1)


@triton.jit
def least_of(t):
    """The least error that is kept: an error of 0 never is."""
    SMALLEST: tl.constexpr = 5e-324 if t.dtype == tl.float64 else 1e-45
    return tl.where(t > 0, t, SMALLEST)


@triton.jit
def gradient_of(raw, t, factor, rest, k, POWER: tl.constexpr):
    """[ROWS, BLOCK] dL/dx, but for the label's; `rest` where an error is not kept."""
    e, slope = errors_of(raw, k, POWER)
    return tl.where(e >= least_of(t)[:, None], factor[:, None] * slope, rest[:, None])


@triton.jit
def margin_of(p_shift, labels, k, OF_LABEL: tl.constexpr, ACC: tl.constexpr):
    """[ROWS] the margin that all classes of a row share."""
    if p_shift is not None and OF_LABEL:
        return tl.load(p_shift + labels.y, labels.live, other=0.0).to(ACC)
    else:
        return labels.y.to(ACC) * 0.0 + k[0]


@triton.jit
def forward(
    p_x, p_y, p_weight, p_shift, p_factor, p_sample, p_loss, p_saved, p_partial,
    outer, S, C, count, x_at, ignore,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr, POWER: tl.constexpr, OF_LABEL: tl.constexpr, THRESHOLD: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = numbers(k0, k1, k2, k3, ACC)
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    live = labels.live
    weights = weights_of(p_weight, p_factor, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    x_label = load_label(p_x, labels.y, x_at, live, ACC)
    mu = margin_of(p_shift, labels, k, OF_LABEL, ACC)
    zero = tl.zeros((ROWS,), ACC)
    nan = x_label != x_label
    t = zero
    read = live
    o_c = tl.arange(0, BLOCK)
    if WHOLE:  # the errors stay in registers
        raw = raw_errors(p_x, x_at, o_c, live, labels, x_label, p_shift, mu, C, OF_LABEL, ACC)
    if THRESHOLD:
        total = tl.zeros((ROWS,), tl.float64)
        largest = zero
        for start in range(0, BLOCK if WHOLE else C, BLOCK):
            if not WHOLE:
                raw = raw_errors(p_x, x_at, start + o_c, live, labels, x_label, p_shift, mu, C, OF_LABEL, ACC)
            e, _ = errors_of(raw, k, POWER)
            total += tl.sum(e, 1).to(tl.float64)
            largest = tl.maximum(largest, tl.max(e, 1))
        nan = nan | (total != total)
        t = threshold(total, largest, C)
        read = live & (largest > 0)
    kept = zero
    kept_count = zero
    slopes = zero
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        if not WHOLE:
            raw = raw_errors(p_x, x_at, start + o_c, read, labels, x_label, p_shift, mu, C, OF_LABEL, ACC)
        more, more_count, more_slopes = kept_of(raw, t, k, POWER)
        kept += more
        kept_count += more_count
        slopes += more_slopes
    nan = nan | (kept != kept)
    none = kept_count == 0
    bad = tl.where(nan | (none & (x_label == -float("inf"))), float("nan"), 0.0)  # a row of -inf has no margin to speak of
    result = FORMULA(MarginRow(kept + bad, kept_count, weights.w, C), OPTIONS)
    emit(p_loss, p_partial, p_saved, rows, labels, weights, result.loss, zero, REDUCTION)
    save(p_saved, rows, count, 0, t, live)
    save(p_saved, rows, count, 1, tl.where(none, 0.0, result.factor) + bad, live)
    save(p_saved, rows, count, 2, slopes, live)


@triton.jit
def backward(
    p_x, p_y, p_weight, p_shift, p_factor, p_sample, p_saved, p_up, p_grad,
    outer, S, C, count, x_at, grad_at, ignore,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    POWER: tl.constexpr, OF_LABEL: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = numbers(k0, k1, k2, k3, ACC)
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    weights = weights_of(p_weight, p_factor, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    p_grad = row_pointers(p_grad, grad_at, outer, rows)
    t = saved(p_saved, rows, count, 0, labels.live)
    factor = saved(p_saved, rows, count, 1, labels.live)
    slopes = saved(p_saved, rows, count, 2, labels.live)
    up, _ = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, False)
    nan = factor != factor
    live = counted(labels, weights, factor, REDUCTION) & (factor != 0) & (nan == 0)  # the others are not even read
    x_label = load_label(p_x, labels.y, x_at, live, ACC)
    mu = margin_of(p_shift, labels, k, OF_LABEL, ACC)
    rest = tl.where(nan, float("nan"), 0.0)
    factor = tl.where(live, factor * up, rest)
    at_label = tl.where(live, -(factor * slopes), rest)
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = load_block(p_x, o_c, x_at, live, C, ACC)
        g = gradient_of(unmasked_raw(x, o_c, x_label, p_shift, mu, C, OF_LABEL, ACC), t, factor, rest, k, POWER)
        store_block(p_grad, o_c, grad_at, rows.exists, C, tl.where(are_labels(o_c, labels.y), at_label[:, None], g))


def launch_forward(formula: Formula, call: Any, x: Tensor, loss: Tensor, statistics: Tensor | None) -> None:
    forward_pass(forward, formula, call, x, loss, statistics, twice=True)


def launch_backward(formula: Formula, call: Any, x: Tensor, statistics: Tensor, up: Tensor, grad: Tensor) -> None:
    backward_pass(backward, formula, call, x, statistics, up, grad)
