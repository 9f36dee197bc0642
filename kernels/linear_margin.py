"""The margin family over the tiles of linear.py; margin.py has the errors. A threshold asks for two passes over the tiles, the
second of which leaves out rows without an error.

Saved per row as in margin.py (a threshold of NaN marks a row of NaN), and the logit of the label behind it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .launch import partial_sums, reduced
from .linear import ordered, over_classes, over_rows
from .linear_tile import logits_of, ordered_rows, part_of, place, their_labels
from .margin import MarginRow, errors_of, gradient_of, kept_of, margin_of, raw_of, threshold
from .tile import are_labels, counted, emit, labels_of, numbers, rows_of, save, saved, upstream, weights_of
from .tuning import ROWS_ALONE

SLOPES = 4  #: numbers of a row that its gradient takes
PARTS = tl.constexpr(4)


@triton.jit
def tiles(
    p_h, p_w, p_b, p_y, p_order, p_count, p_shift, p_label, p_saved, p_parts, h_at, w_at, C, D, count, each,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    POWER: tl.constexpr, OF_LABEL: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """p_parts (parts, 4, rows): with KEEP sum, count and slopes of the errors that reach the threshold, else the sum of all
    errors and the largest; and last whether there was a NaN."""
    k = numbers(k0, k1, k2, k3, ACC)
    rows = ordered_rows(p_order, p_count, tl.program_id(0) * ROWS, ROWS)
    labels = their_labels(p_y, rows)
    x_label = tl.load(p_label + rows.number, rows.exists, other=0.0)
    mu = margin_of(p_shift, labels, k, OF_LABEL, ACC)
    first, last = part_of(tl.program_id(1), each, C * tl.max(rows.exists.to(tl.int32), 0))
    t = tl.zeros((ROWS,), ACC)
    total = tl.zeros((ROWS,), tl.float64)
    largest = t  # or the count
    slopes = t
    if KEEP:
        t = saved(p_saved, rows, count, 0, rows.exists)  # 0 when there is none
    for start in range(first, last, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = logits_of(p_h, p_w, p_b, h_at, w_at, rows, o_c, C, D, ROWS, BLOCK, STEP, TYPE, PRECISION, ACC)
        raw = raw_of(x, o_c, labels, x_label, p_shift, mu, C, OF_LABEL, ACC)
        if KEEP:
            more, more_count, more_slopes = kept_of(raw, t, k, POWER)
            total += more.to(tl.float64)
            largest += more_count
            slopes += more_slopes
        else:
            e, _ = errors_of(raw, k, POWER)
            total += tl.sum(e, 1).to(tl.float64)
            largest = tl.maximum(largest, tl.max(e, 1))
    p = place(p_parts, tl.program_id(1), 0, PARTS, rows.number, count)
    tl.store(p, total, rows.exists)
    tl.store(p + count, largest.to(tl.float64), rows.exists)
    tl.store(p + 2 * count, slopes.to(tl.float64), rows.exists)
    tl.store(p + 3 * count, (total != total).to(tl.float64), rows.exists)


@triton.jit
def thresholds(p_y, p_parts, p_saved, p_some, parts, C, count, ignore, ROWS: tl.constexpr, ACC: tl.constexpr):
    """The mean errors, and which rows have an error."""
    rows = rows_of(count, ROWS)
    live = labels_of(p_y, rows, ignore, C, True).live
    total = tl.zeros((ROWS,), tl.float64)
    largest = total
    nan = total
    for i in range(parts):
        p = place(p_parts, i, 0, PARTS, rows.number, count)
        total += tl.load(p, live, other=0.0)
        largest = tl.maximum(largest, tl.load(p + count, live, other=0.0))
        nan += tl.load(p + 3 * count, live, other=0.0)
    t = threshold(total, largest.to(ACC), C)
    save(p_saved, rows, count, 0, tl.where(nan > 0, float("nan"), t), live)
    tl.store(p_some + rows.number, (live & (largest > 0) & (nan == 0)).to(tl.int8), rows.exists)


@triton.jit
def losses(
    p_y, p_weight, p_factor, p_sample, p_label, p_parts, p_some, p_loss, p_saved, p_partial, parts, C, count, ignore,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr, THRESHOLD: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Row losses, from the kept errors of all parts."""
    rows = rows_of(count, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    live = labels.live
    weights = weights_of(p_weight, p_factor, p_sample, rows, labels, ACC)
    x_label = tl.load(p_label + rows.number, live, other=0.0)
    bad = x_label != x_label
    read = live
    if THRESHOLD:
        t = saved(p_saved, rows, count, 0, live)
        bad = bad | (t != t)
        read = live & (tl.load(p_some + rows.number, rows.exists, other=0) != 0)
    kept = tl.zeros((ROWS,), tl.float64)
    kept_count = kept
    slopes = kept
    for i in range(parts):
        p = place(p_parts, i, 0, PARTS, rows.number, count)
        kept += tl.load(p, read, other=0.0)
        kept_count += tl.load(p + count, read, other=0.0)
        slopes += tl.load(p + 2 * count, read, other=0.0)
        bad = bad | (tl.load(p + 3 * count, read, other=0.0) > 0)
    none = kept_count == 0
    bad = tl.where(bad | (none & (x_label == -float("inf"))), float("nan"), 0.0).to(ACC)
    result = FORMULA(MarginRow(kept.to(ACC) + bad, kept_count.to(ACC), weights.w, C), OPTIONS)
    emit(p_loss, p_partial, p_saved, rows, labels, weights, result.loss, tl.zeros((ROWS,), ACC), REDUCTION)
    save(p_saved, rows, count, 1, tl.where(none, 0.0, result.factor) + bad, live)
    save(p_saved, rows, count, 2, slopes.to(ACC), live)


@triton.jit
def slopes(
    p_y, p_weight, p_sample, p_label, p_saved, p_up, p_slopes, C, count, ignore,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(4, rows) what `gradient` asks for: factor, threshold, derivative at the label, logit of the label."""
    rows = rows_of(count, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    weights = weights_of(p_weight, None, p_sample, rows, labels, ACC)
    factor = saved(p_saved, rows, count, 1, labels.live)
    up, _ = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, False)
    some = counted(labels, weights, factor, REDUCTION) & (factor * up != 0)
    factor = factor * up
    tl.store(p_slopes + rows.number, tl.where(some, factor, 0.0), rows.exists)
    tl.store(p_slopes + count + rows.number, tl.where(some, saved(p_saved, rows, count, 0, some), 0.0), rows.exists)
    label = -(factor * saved(p_saved, rows, count, 2, some))
    tl.store(p_slopes + 2 * count + rows.number, tl.where(some, label, 0.0), rows.exists)
    x_label = tl.load(p_label + rows.number, some, other=0.0)
    tl.store(p_slopes + 3 * count + rows.number, tl.where(some, x_label, 0.0), rows.exists)


@triton.jit
def gradient(p_slopes, rows, count, labels, x, o_c, k, p_weight, p_shift, C, FEATURES: tl.constexpr, ACC: tl.constexpr):
    """[ROWS, BLOCK] dL/dx; 0 where a row or class does not exist. FEATURES = (POWER, OF_LABEL)."""
    p = p_slopes + rows.number
    factor = tl.load(p, rows.exists, other=0.0)
    t = tl.load(p + count, rows.exists, other=0.0)
    label = tl.load(p + 2 * count, rows.exists, other=0.0)
    x_label = tl.load(p + 3 * count, rows.exists, other=0.0)
    mu = margin_of(p_shift, labels, k, FEATURES[1], ACC)
    raw = raw_of(x, o_c, labels, x_label, p_shift, mu, C, FEATURES[1], ACC)
    g = gradient_of(raw, t, factor, factor - factor, k, FEATURES[0])  # 0, or NaN in a row of NaN
    g = tl.where(are_labels(o_c, labels.y), label[:, None], g)
    return tl.where(rows.exists[:, None] & (o_c < C)[None, :], g, 0.0)


def constants(known: dict[str, Any]) -> tuple[Any, ...]:
    """FEATURES of `gradient`."""
    return known["POWER"], known["OF_LABEL"]


def weight_sum(formula: Formula, call: Any) -> None:
    """What the softmax family asks for."""


def forward(formula: Formula, call: Any, known: dict[str, Any], loss: Tensor) -> None:
    statistics, count = known["p_saved"], known["count"]
    some = None
    if known["THRESHOLD"]:
        parts = over_classes(known, tiles, PARTS.value, torch.float64, KEEP=False)
        some = statistics.new_empty(count, dtype=torch.int8)
        over_rows(known, thresholds, p_parts=parts, parts=len(parts), p_some=some)
        known |= ordered(some.ne(0))
    else:
        statistics[2 : 2 + count].zero_()
    parts = over_classes(known, tiles, PARTS.value, torch.float64, KEEP=True)
    partial = partial_sums(call, statistics, triton.cdiv(count, ROWS_ALONE))
    over_rows(known, losses, p_parts=parts, parts=len(parts), p_some=some, p_loss=loss, p_partial=partial)
    reduced(call, partial, loss, statistics)
