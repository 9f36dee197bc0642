"""LogitNorm's norm of a row: its sum of squares, and its part of the gradient. softmax_row.py has the row itself."""

import triton
import triton.language as tl

from .softmax_row import Slopes
from .tile import are_labels


@triton.jit
def unmasked(x):
    """A masked class takes no part in the norm."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def others(x, o_c, y):
    """The logits that the norm takes beside the label's."""
    return tl.where(are_labels(o_c, y), 0.0, unmasked(x))


@triton.jit
def inverse_of(length):
    """1 / length, and 0 where a length is so small that it would overflow: such a row is one of zeros."""
    SMALLEST: tl.constexpr = 1e-300 if length.dtype == tl.float64 else 1e-37
    some = length > SMALLEST
    return tl.where(some, 1.0 / tl.where(some, length, 1.0), 0.0)


@triton.jit
def squares_add(squares, unit, x):
    """Sum of squares of a row in units of its largest |x_j| so far, which neither overflows nor vanishes."""
    largest = tl.maximum(unit, tl.max(tl.abs(x), 1))
    inverse = inverse_of(largest)
    part = x * inverse[:, None]
    step = unit * inverse
    return squares * step * step + tl.sum(part * part, 1), largest


@triton.jit
def norm_with_label(rest, x_label):
    unit = tl.maximum(rest, tl.abs(x_label))
    inverse = inverse_of(unit)
    a = rest * inverse
    b = x_label * inverse
    return unit * tl.sqrt(a * a + b * b)


@triton.jit
def squares_merged(squares, unit, more, more_unit):
    """The sum of squares of both."""
    largest = tl.maximum(unit, more_unit)
    inverse = inverse_of(largest)
    a = unit * inverse
    b = more_unit * inverse
    return squares * a * a + more * b * b, largest


@triton.jit
def late_of(rest, x_label, k):
    """What multiplies the logits; k = (temperature, eps)."""
    return 1.0 / (k[0] * (norm_with_label(rest, unmasked(x_label)) + k[1]))


@triton.jit
def with_norm(s, slope, x_label, rest, moment, late, k):
    """The slopes with the norm's own part of the gradient at the label, where the two all but cancel, and its factor of the
    other logits, which is subtracted."""
    x_label = unmasked(x_label)
    length = norm_with_label(rest, x_label)
    wide = length + k[1]
    per_length = inverse_of(length)
    along = (rest * per_length) * (rest / wide) + k[1] / wide + (moment * per_length) * (x_label / wide)
    label = s.label * tl.where(length == 0, 1.0, along)
    return Slopes(s.base, s.others, s.pull, label), slope * ((moment - x_label) * per_length) * (late / wide)
