"""What every driver shares: which rows a program has, where they lie, what they weigh, how their losses leave.

A tensor (N, C, *) is seen as `outer` indices times S inner positions times C classes, and a program has ROWS neighbouring
positions of one outer index. `at` holds a tensor's strides: three of the outer dimensions, of the positions, of the classes;
and a power of two that divides C and all of them but the classes' (the compiler itself only looks for 16).
Blocks are [ROWS, BLOCK]; whether lanes run across classes or across positions follows from the strides.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .maths import weighted

NONE = tl.constexpr(0)
SUM = tl.constexpr(1)
MEAN = tl.constexpr(2)
ABOVE_ZERO = tl.constexpr(3)

LEFT_OUT = tl.constexpr(-1.0)  # in the place of a row's sum of exponentials: the reduction left the row out


@triton.jit
def numbers(k0, k1, k2, k3, ACC: tl.constexpr):
    """A formula's numbers, which the host has in float64."""
    return tl.full((), k0, ACC), tl.full((), k1, ACC), tl.full((), k2, ACC), tl.full((), k3, ACC)


class Rows(NamedTuple):
    """The rows of a program, all [ROWS] but the first."""

    outer: Any  # index of the outer dimensions
    position: Any  # inner position
    exists: Any
    number: Any  # row number: index of labels, sample weights, row losses


@triton.jit
def rows_of(S, ROWS: tl.constexpr):
    i_tile = tl.program_id(0)
    tiles = (S + ROWS - 1) // ROWS
    i_outer = (i_tile // tiles).to(tl.int64)
    o_s = (i_tile % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return Rows(i_outer, o_s, o_s < S, i_outer * S + o_s)


@triton.jit
def row_pointers(p, at, outer, rows):
    """[ROWS] pointers to class 0; `outer` holds the sizes of the two inner ones of the outer dimensions."""
    i_0 = rows.outer // outer[1] // outer[0]
    i_1 = rows.outer // outer[1] % outer[0]
    i_2 = rows.outer % outer[1]
    offset = (i_0 * at[0] + i_1 * at[1] + i_2 * at[2]) + rows.position * at[3]
    return p + (offset // at[5] * at[5] if at[5] > 1 else offset)


@triton.jit
def class_pointers(p_rows, o_c, at):
    return p_rows[:, None] + o_c.to(tl.int64)[None, :] * at[4]


@triton.jit
def inside(o_c, at, C):
    """[1, BLOCK]"""
    return (o_c < (C // at[5] * at[5] if at[5] > 1 else C))[None, :]


@triton.jit
def load_block(p_rows, o_c, at, read, C, ACC: tl.constexpr):
    """[ROWS, BLOCK] logits; -inf past the last class and in rows that are not to be read."""
    return tl.load(class_pointers(p_rows, o_c, at), read[:, None] & inside(o_c, at, C), other=-float("inf")).to(ACC)


@triton.jit
def store_block(p_rows, o_c, at, exists, C, value):
    tl.store(class_pointers(p_rows, o_c, at), value.to(p_rows.dtype.element_ty), exists[:, None] & inside(o_c, at, C))


@triton.jit
def load_label(p_rows, y, at, read, ACC: tl.constexpr):
    """[ROWS] logits of the labels."""
    return tl.load(p_rows + y * at[4], read, other=0.0).to(ACC)


@triton.jit
def load_classes(p, o_c, C, default, ACC: tl.constexpr):
    """[1, BLOCK] of a (C) vector, or `default` when there is none."""
    if p is None:
        return tl.full((1, 1), default, ACC)
    else:
        return tl.load(p + o_c, o_c < C, other=default).to(ACC)[None, :]


@triton.constexpr_function
def is_half(p):
    """Whether what a pointer points to has half precision."""
    return p.dtype.element_ty.primitive_bitwidth == 16


@triton.jit
def are_labels(o_c, y):
    """[ROWS, BLOCK]"""
    return o_c[None, :] == y.to(tl.int32)[:, None]


class Labels(NamedTuple):
    """All [ROWS]."""

    y: Any  # the label, 0 where it is none
    live: Any  # rows that count; the others are never read
    bad: Any  # rows whose label is no class: the loss is NaN, the gradient 0


@triton.jit
def labels_of(p_y, rows, ignore, C, LABELS: tl.constexpr):
    """Without LABELS, y is a mask of the rows that count, or absent."""
    if p_y is None:
        return Labels(rows.number * 0, rows.exists, rows.exists & (rows.number < 0))
    else:
        y = tl.load(p_y + rows.number, rows.exists, other=0).to(tl.int64)
        live = rows.exists & (y != ignore)
        inside = live & (y >= 0) & (y < C)
        if LABELS:
            return Labels(tl.where(inside, y, 0), inside, live & (inside == 0))
        else:
            return Labels(y * 0, live, live & (rows.number < 0))


class Weights(NamedTuple):
    """All [ROWS]."""

    w: Any  # class weight and factor of the label: multiplies the loss
    mass: Any  # share of the mean's divisor, before the sample weight
    s: Any  # sample weight


@triton.jit
def weights_of(p_weight, p_factor, p_sample, rows, labels, ACC: tl.constexpr):
    one = (labels.y * 0 + 1).to(ACC)
    mass = one
    if p_weight is not None:
        mass = tl.load(p_weight + labels.y, labels.live, other=0.0).to(ACC)
    w = mass
    if p_factor is not None:
        w = mass * tl.load(p_factor + labels.y, labels.live, other=0.0).to(ACC)
    s = one
    if p_sample is not None:
        s = tl.load(p_sample + rows.number, labels.live, other=0.0).to(ACC)
    return Weights(w, mass, s)


@triton.jit
def emit(p_loss, p_partial, p_saved, rows, labels, weights, loss, extra, REDUCTION: tl.constexpr):
    """Row losses to memory, or their sums to this program's place: sum, mass, extra sum, extra mass."""
    nan = float("nan")
    if REDUCTION == NONE:
        total = tl.where(labels.live, weighted(weights.s, loss + extra), 0.0)
        tl.store(p_loss + rows.number, tl.where(labels.bad, nan, total), rows.exists)
        if p_saved is not None:  # nothing is divided
            o_two = tl.arange(0, 2)
            tl.store(p_saved + o_two, tl.full((2,), 1.0, p_saved.dtype.element_ty), o_two + tl.program_id(0) * 2 < 2)
    else:
        left_in = counted(labels, weights, loss + extra, REDUCTION)
        s = tl.where(left_in, weights.s, 0.0)
        store_sum(p_partial, 0, tl.where(labels.bad, nan, tl.where(left_in, weighted(s, loss), 0.0)))
        store_sum(p_partial, 1, tl.where(left_in, s * weights.mass, 0.0))
        store_sum(p_partial, 2, tl.where(left_in, weighted(s, extra), 0.0))
        store_sum(p_partial, 3, s)


@triton.jit
def store_sum(p_partial, j, values):
    """The sum of [ROWS] numbers to this program's place j."""
    tl.store(p_partial + j * tl.num_programs(0) + tl.program_id(0), tl.sum(values, 0).to(tl.float64))


@triton.jit
def save(p_saved, rows, count, k, value, live):
    """Statistic k of every row; behind the two divisors."""
    if p_saved is not None:
        tl.store(_place(p_saved, rows, count, k), tl.where(live, value, 0.0), rows.exists)


@triton.jit
def saved(p_saved, rows, count, k, live):
    return tl.load(_place(p_saved, rows, count, k), live, other=0.0)


@triton.jit
def save_class(p_saved, rows, count, k, i, live):
    """A class among the statistics. Its bits, in float32: as a number it would be rounded from 2^24 classes on."""
    if p_saved is not None:
        if p_saved.dtype.element_ty == tl.float64:
            save(p_saved, rows, count, k, i.to(tl.float64), live)
        else:
            save(p_saved, rows, count, k, i.to(tl.float32, bitcast=True), live)


@triton.jit
def saved_class(p_saved, rows, count, k, live):
    value = saved(p_saved, rows, count, k, live)
    if p_saved.dtype.element_ty == tl.float64:
        i = value.to(tl.int32)
    else:
        i = value.to(tl.int32, bitcast=True)
    return i


@triton.jit
def _place(p_saved, rows, count, k):
    return p_saved + 2 + k * tl.cast(count, tl.int64) + rows.number


@triton.jit
def upstream(p_grad, p_saved, rows, labels, weights, REDUCTION: tl.constexpr, EXTRA: tl.constexpr):
    """[ROWS] factors of the row gradients, and the factor of the main term beside an extra term with a divisor of its own."""
    if REDUCTION == NONE:
        return tl.load(p_grad + rows.number, labels.live, other=0.0) * weights.s, 1.0
    else:
        g = tl.load(p_grad)
        main = tl.load(p_saved)
        extra = tl.load(p_saved + 1)
        if EXTRA:
            # A second term whose divisor is 0 has next to no share.
            each = tl.where(extra != 0, _inverse(extra), 1e-30 * _inverse(main))
            return g * each * weights.s, tl.where(extra != 0, extra * _inverse(main), 1e30)
        else:
            return g * _inverse(main) * weights.s, 1.0


@triton.jit
def _inverse(divisor):
    return tl.where(divisor != 0, 1.0 / tl.where(divisor != 0, divisor, 1.0), 0.0)


@triton.jit
def counted(labels, weights, total, REDUCTION: tl.constexpr):
    """Rows that the reduction leaves in; NaN is one of them, so that it shows."""
    if REDUCTION == ABOVE_ZERO:
        return labels.live & ((weights.s * total <= 0) == 0)
    else:
        return labels.live


@triton.jit
def finish(
    p_partial, p_loss, p_saved, p_normalizer, n, normalizer: tl.float64,
    REDUCTION: tl.constexpr, NORMALIZED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: adds the n partial sums in a fixed order, divides, and leaves the divisors for backward."""
    o = tl.arange(0, BLOCK)
    sums = tl.zeros((4, BLOCK), tl.float64)
    o_k = tl.arange(0, 4)
    for start in range(0, n, BLOCK):
        m = ((start + o) < n)[None, :]
        sums += tl.load(p_partial + o_k[:, None] * n + (start + o)[None, :], m, other=0.0)
    each = tl.sum(sums, 1)
    total, mass = tl.sum(tl.where(o_k == 0, each, 0.0), 0), tl.sum(tl.where(o_k == 1, each, 0.0), 0)
    extra, extra_mass = tl.sum(tl.where(o_k == 2, each, 0.0), 0), tl.sum(tl.where(o_k == 3, each, 0.0), 0)
    if REDUCTION == SUM:
        mass = tl.full((), 1.0, tl.float64)
        extra_mass = mass
    elif p_normalizer is not None:
        mass = tl.load(p_normalizer).to(tl.float64)
        extra_mass = mass
    elif NORMALIZED:
        mass = tl.full((), normalizer, tl.float64)
        extra_mass = mass
    result = _divide(total, mass) + _divide(extra, extra_mass)
    tl.store(p_loss, result.to(p_loss.dtype.element_ty))
    if p_saved is not None:
        tl.store(p_saved, mass.to(p_saved.dtype.element_ty))
        tl.store(p_saved + 1, extra_mass.to(p_saved.dtype.element_ty))


@triton.jit
def _divide(total, mass):
    """0 when nothing counts, unless a NaN is to show."""
    some = mass != 0
    return tl.where(some, total / tl.where(some, mass, 1.0), tl.where(total == total, 0.0, total))
