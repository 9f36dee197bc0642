"""A tile of the logits x = h W^T + b of a linear layer, made by a program and forgotten: its rows, its product, its gradient's.

Rows that count come first in an order that the host leaves on the device, so nothing waits for their number: programs behind it
have nothing to do, and the features of other rows are never read. Classes are split into parts, whose results the kernels over
the rows (linear_softmax.py, linear_margin.py) add in a fixed order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tile import Labels, Rows, labels_of, rows_of


@triton.jit
def ordered_rows(p_order, p_count, start, ROWS: tl.constexpr):
    """Rows start ... of those that count; `exists` where there is one."""
    o = start + tl.arange(0, ROWS)
    exists = o < tl.load(p_count)
    return Rows(0, o, exists, tl.load(p_order + o, exists, other=0).to(tl.int64))


@triton.jit
def their_labels(p_y, rows):
    """Rows that count have a label that is a class."""
    y = tl.load(p_y + rows.number, rows.exists, other=0).to(tl.int64)
    return Labels(y, rows.exists, rows.exists == 0)


@triton.jit
def load_rows(p, at, number, exists, start, D, STEP: tl.constexpr, TYPE: tl.constexpr):
    """[len(number), STEP] features of rows of h or W; 0 where there are none."""
    o_d = start + tl.arange(0, STEP)
    p = p + number.to(tl.int64)[:, None] * at[0] + o_d[None, :] * at[1]
    return tl.load(p, exists[:, None] & (o_d < D)[None, :], other=0.0).to(TYPE)


@triton.jit
def logits_of(
    p_h, p_w, p_b, h_at, w_at, rows, o_c, C, D,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK]; -inf past the last class and in rows that do not count."""
    x = tl.zeros((ROWS, BLOCK), ACC)
    for start in range(0, D, STEP):
        h = load_rows(p_h, h_at, rows.number, rows.exists, start, D, STEP, TYPE)
        w = load_rows(p_w, w_at, o_c, o_c < C, start, D, STEP, TYPE)
        x = tl.dot(h, tl.trans(w), x, input_precision=PRECISION, out_dtype=ACC)
    if p_b is not None:
        x += tl.load(p_b + o_c, o_c < C, other=0.0).to(ACC)[None, :]
    return tl.where(rows.exists[:, None] & (o_c < C)[None, :], x, -float("inf"))


class Split(NamedTuple):
    """A matrix as the sum of two of a smaller type, in units of the largest of each row: nothing under- or overflows."""

    high: Any
    low: Any
    unit: Any


@triton.jit
def split(g, TYPE: tl.constexpr):
    if g.dtype == TYPE:
        return Split(g, g, 1.0)
    else:
        unit = tl.max(tl.abs(g), 1)
        unit = tl.where((unit > 0) & (unit < float("inf")), unit, 1.0)
        g = g / unit[:, None]
        high = g.to(TYPE)
        return Split(high, (g - high.to(g.dtype)).to(TYPE), unit[:, None])


@triton.jit
def times(g, b, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """The matrix that was split, times b."""
    if b.dtype == ACC:
        return tl.dot(g.high, b, input_precision=PRECISION, out_dtype=ACC)
    else:
        return tl.dot(g.high, b, tl.dot(g.low, b, out_dtype=ACC), out_dtype=ACC) * g.unit


@triton.jit
def part_of(i_part, each, end):
    """Where part i begins and ends."""
    first = i_part * each
    return first, tl.minimum(first + each, end)


@triton.jit
def place(p_parts, i_part, j, K: tl.constexpr, number, count):
    """Where part i leaves its number j of K of each row."""
    return p_parts + tl.cast(i_part * K + j, tl.int64) * count + number


@triton.jit
def label_logits(
    p_h, p_w, p_b, p_y, p_label, h_at, w_at, C, D, count, ignore,
    ROWS: tl.constexpr, STEP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """x_y of every row, so that tiles need not look for it."""
    rows = rows_of(count, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    sums = tl.zeros((ROWS, STEP), ACC)
    for start in range(0, D, STEP):
        h = load_rows(p_h, h_at, rows.number, labels.live, start, D, STEP, ACC)
        sums += h * load_rows(p_w, w_at, labels.y, labels.live, start, D, STEP, ACC)
    x = tl.sum(sums, 1)
    if p_b is not None:
        x += tl.load(p_b + labels.y, labels.live, other=0.0).to(ACC)
    tl.store(p_label + rows.number, x, rows.exists)
