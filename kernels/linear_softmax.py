"""The softmax family over the tiles of linear.py; softmax_row.py has the row.

Saved per row as in softmax.py, and the logit of the label behind what the formula itself saves.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .launch import partial_sums, reduced
from .linear import over_classes, over_rows
from .linear_tile import logits_of, ordered_rows, part_of, place, their_labels
from .norm import late_of, others, squares_add, squares_merged, with_norm
from .softmax_row import (
    Slopes,
    Sums,
    backward_result,
    forward_result,
    gradient_of,
    slopes_of,
    sums_add,
    sums_merged,
    weight_sum,
)
from .tile import LEFT_OUT, counted, emit, labels_of, numbers, rows_of, save, saved, upstream, weights_of
from .tuning import ROWS_ALONE

__all__ = ["SLOPES", "constants", "forward", "gradient", "slopes", "weight_sum"]

SLOPES = 6  #: numbers of a row that its gradient takes
SUMS = tl.constexpr(5)


@triton.jit
def norm_tiles(
    p_h, p_w, p_b, p_y, p_order, p_count, p_parts, h_at, w_at, C, D, count, each,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """LogitNorm's sum of squares and its unit, p_parts (parts, 2, rows)."""
    rows = ordered_rows(p_order, p_count, tl.program_id(0) * ROWS, ROWS)
    labels = their_labels(p_y, rows)
    first, last = part_of(tl.program_id(1), each, C * tl.max(rows.exists.to(tl.int32), 0))
    squares = tl.zeros((ROWS,), ACC)
    unit = squares
    for start in range(first, last, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = logits_of(p_h, p_w, p_b, h_at, w_at, rows, o_c, C, D, ROWS, BLOCK, STEP, TYPE, PRECISION, ACC)
        squares, unit = squares_add(squares, unit, others(x, o_c, labels.y))
    tl.store(place(p_parts, tl.program_id(1), 0, 2, rows.number, count), squares, rows.exists)
    tl.store(place(p_parts, tl.program_id(1), 1, 2, rows.number, count), unit, rows.exists)


@triton.jit
def norm_rows(p_y, p_parts, p_saved, parts, C, count, ignore, ROWS: tl.constexpr, ACC: tl.constexpr):
    """The norm of the logits but the label's."""
    rows = rows_of(count, ROWS)
    live = labels_of(p_y, rows, ignore, C, True).live
    squares = tl.zeros((ROWS,), ACC)
    unit = squares
    for i in range(parts):
        p = place(p_parts, i, 0, 2, rows.number, count)
        squares, unit = squares_merged(squares, unit, tl.load(p, live, other=0.0), tl.load(p + count, live, other=0.0))
    save(p_saved, rows, count, 2, unit * tl.sqrt(squares), live)


@triton.jit
def row_late(p_saved, p_label, rows, count, live, k, NORM: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr):
    """[ROWS] what multiplies differences of u."""
    if NORM:
        return late_of(saved(p_saved, rows, count, 2, live), tl.load(p_label + rows.number, live, other=0.0), k)
    else:
        return tl.full((ROWS,), 1.0, ACC)


@triton.jit
def tiles(
    p_h, p_w, p_b, p_y, p_order, p_count, p_weight, p_shift, p_label, p_saved, p_parts, h_at, w_at, C, D, count, each,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The sums over the other classes, p_parts (parts, 5, rows)."""
    k = numbers(k0, k1, k2, k3, ACC)
    rows = ordered_rows(p_order, p_count, tl.program_id(0) * ROWS, ROWS)
    labels = their_labels(p_y, rows)
    late = row_late(p_saved, p_label, rows, count, rows.exists, k, NORM, ROWS, ACC)
    first, last = part_of(tl.program_id(1), each, C * tl.max(rows.exists.to(tl.int32), 0))
    zero = tl.zeros((ROWS,), ACC)
    s = Sums(zero - float("inf"), zero, zero, zero, zero)
    for start in range(first, last, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = logits_of(p_h, p_w, p_b, h_at, w_at, rows, o_c, C, D, ROWS, BLOCK, STEP, TYPE, PRECISION, ACC)
        s = sums_add(s, x, o_c, labels, late, k, p_weight, p_shift, C, SCALED, CAPPED, SMOOTH, NORM, False, ACC)
    p = place(p_parts, tl.program_id(1), 0, SUMS, rows.number, count)
    tl.store(p, s.m, rows.exists)
    tl.store(p + count, s.d, rows.exists)
    tl.store(p + 2 * count, s.moment, rows.exists)
    tl.store(p + 3 * count, s.spread, rows.exists)
    tl.store(p + 4 * count, s.seen, rows.exists)


@triton.jit
def losses(
    p_y, p_weight, p_shift, p_factor, p_sample, p_weight_sum, p_label, p_parts, p_loss, p_saved, p_partial,
    parts, C, count, ignore, k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr,
    NORM: tl.constexpr, REDUCTION: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Row losses, from the sums of all parts."""
    k = numbers(k0, k1, k2, k3, ACC)
    rows = rows_of(count, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    live = labels.live
    weights = weights_of(p_weight, p_factor, p_sample, rows, labels, ACC)
    late = row_late(p_saved, p_label, rows, count, live, k, NORM, ROWS, ACC)
    zero = tl.zeros((ROWS,), ACC)
    s = Sums(zero - float("inf"), zero, zero, zero, zero)
    for i in range(parts):
        p = place(p_parts, i, 0, SUMS, rows.number, count)
        more = Sums(
            tl.load(p, live, other=0.0), tl.load(p + count, live, other=0.0), tl.load(p + 2 * count, live, other=0.0),
            tl.load(p + 3 * count, live, other=0.0), tl.load(p + 4 * count, live, other=0.0),
        )  # fmt: skip
        s = sums_merged(s, more, late)
    x_label = tl.load(p_label + rows.number, live, other=0.0)
    result = forward_result(
        s, x_label, labels, weights, late, k, p_shift, p_weight_sum, C, FORMULA, OPTIONS, SCALED, CAPPED, SMOOTH, ACC
    )
    emit(p_loss, p_partial, p_saved, rows, labels, weights, result.loss, result.extra, REDUCTION)
    save(p_saved, rows, count, 0, s.m, live)
    left_in = counted(labels, weights, result.loss + result.extra, REDUCTION)
    save(p_saved, rows, count, 1, tl.where(left_in, s.d, LEFT_OUT), live)
    if NORM:
        save(p_saved, rows, count, 3, tl.where(s.d == 0, 0.0, s.moment / tl.where(s.d == 0, 1.0, s.d)), live)


@triton.jit
def slopes(
    p_y, p_weight, p_shift, p_factor, p_sample, p_weight_sum, p_label, p_saved, p_up, p_slopes,
    C, count, ignore, k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, NORM: tl.constexpr,
    EXTRA: tl.constexpr, REDUCTION: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(6, rows) what `gradient` asks for: the slopes, late and the norm's drag; zeros where a row does not count."""
    k = numbers(k0, k1, k2, k3, ACC)
    rows = rows_of(count, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    live = labels.live
    weights = weights_of(p_weight, p_factor, p_sample, rows, labels, ACC)
    late = row_late(p_saved, p_label, rows, count, live, k, NORM, ROWS, ACC)
    m = saved(p_saved, rows, count, 0, live)
    d = saved(p_saved, rows, count, 1, live)
    x_label = tl.load(p_label + rows.number, live, other=0.0)
    up, main = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, EXTRA)
    result = backward_result(
        m, d, x_label, labels, weights, main, late, k, p_shift, p_weight_sum, C, FORMULA, OPTIONS, SCALED, CAPPED, ACC
    )
    live = live & ((d < 0) == 0)
    s = slopes_of(result, m, d, up)
    drag = tl.zeros((ROWS,), ACC)
    if NORM:
        rest = saved(p_saved, rows, count, 2, live)
        s, drag = with_norm(s, up * result.slope, x_label, rest, saved(p_saved, rows, count, 3, live), late, k)
    some = live & ((s.others != 0) | (s.pull != 0) | (s.label != 0))
    tl.store(p_slopes + rows.number, tl.where(some, s.base, 0.0), rows.exists)
    tl.store(p_slopes + count + rows.number, tl.where(some, s.others, 0.0), rows.exists)
    tl.store(p_slopes + 2 * count + rows.number, tl.where(some, s.pull, 0.0), rows.exists)
    tl.store(p_slopes + 3 * count + rows.number, tl.where(some, s.label, 0.0), rows.exists)
    tl.store(p_slopes + 4 * count + rows.number, tl.where(some, late, 0.0), rows.exists)
    tl.store(p_slopes + 5 * count + rows.number, tl.where(some, drag, 0.0), rows.exists)


@triton.jit
def gradient(p_slopes, rows, count, labels, x, o_c, k, p_weight, p_shift, C, FEATURES: tl.constexpr, ACC: tl.constexpr):
    """[ROWS, BLOCK] dL/dx; 0 where a row or class does not exist. FEATURES = (SCALED, CAPPED, SMOOTH, NORM)."""
    p = p_slopes + rows.number
    s = Slopes(
        tl.load(p, rows.exists, other=0.0), tl.load(p + count, rows.exists, other=0.0),
        tl.load(p + 2 * count, rows.exists, other=0.0), tl.load(p + 3 * count, rows.exists, other=0.0),
    )  # fmt: skip
    late = tl.load(p + 4 * count, rows.exists, other=0.0)
    g = gradient_of(s, x, o_c, labels, late, k, p_weight, p_shift, C, FEATURES[0], FEATURES[1], FEATURES[2], False, ACC)
    if FEATURES[3]:
        g -= tl.load(p + 5 * count, rows.exists, other=0.0)[:, None] * others(x, o_c, labels.y)
    return tl.where(rows.exists[:, None] & (o_c < C)[None, :], g, 0.0)


def constants(known: dict[str, Any]) -> tuple[Any, ...]:
    """FEATURES of `gradient`."""
    return known["SCALED"], known["CAPPED"], known["SMOOTH"], known["NORM"]


def forward(formula: Formula, call: Any, known: dict[str, Any], loss: Tensor) -> None:
    statistics = known["p_saved"]
    if known["NORM"]:
        parts = over_classes(known, norm_tiles, 2, statistics.dtype)
        over_rows(known, norm_rows, p_parts=parts, parts=len(parts))
    parts = over_classes(known, tiles, SUMS.value, statistics.dtype)
    partial = partial_sums(call, statistics, triton.cdiv(known["count"], ROWS_ALONE))
    more = {"p_loss": loss, "p_partial": partial, "p_weight_sum": weight_sum(formula, call)}
    over_rows(known, losses, p_parts=parts, parts=len(parts), **more)
    reduced(call, partial, loss, statistics)
