"""Soft Dice of a class: with B = 2 hit + s and Z = B + missed + stray, L = (missed + stray) / Z, push = B / Z^2, pull = 2 / Z.

An absent class (hit + missed = 0) without smoothing has the constant loss 1, or 0 where not even a prediction has mass.
"""

import triton
import triton.language as tl

from ..formula import Arguments, Formula
from ..region_sums import ClassResult
from ..softmax_row import features

LITERAL, ZERO, EXCLUDE = (tl.constexpr(i) for i in range(3))
FAINTEST = tl.constexpr(-745.0)  # the logarithm of the smallest float64


@triton.jit
def classes(s, hit, missed, stray, largest, OPTIONS: tl.constexpr):
    """OPTIONS = (smooth > 0?, absent)."""
    both = 2.0 * hit + s
    size = both + missed + stray
    present = (hit + missed <= 0) == 0  # also when a position is NaN
    if OPTIONS[0]:
        constant = size == 0
        loss = size * 0.0
    else:
        constant = present == 0
        loss = tl.where(largest > FAINTEST, 1.0, 0.0).to(tl.float64)  # a position of NaN elsewhere does not change it
    safe = tl.where(constant, 1.0, size)
    loss = tl.where(constant, loss, (missed + stray) / safe)
    if OPTIONS[1] == ZERO:
        constant = constant | (present == 0)
        loss = tl.where(present, loss, 0.0)
    return ClassResult(loss, tl.where(constant, 0.0, 2.0 / safe), tl.where(constant, 0.0, both / safe / safe), present)


def region_features(by_image: float, absent: float, **more: object) -> dict:
    own = {"IMAGES": bool(by_image), "EXCLUDE": int(absent) == 2, "CE_OPTIONS": None, "NO_WEIGHT": False}
    return features() | own | more


def arguments(smooth: float, by_image: float, absent: float) -> Arguments:
    return Arguments((0.0, 1.0, 0.0, 0.0, 1.0, 0.0, smooth), (smooth > 0, int(absent)), region_features(by_image, absent))


FORMULA = Formula("region", None, 2, arguments, classes)
