"""High error margin and its ablations: the mean of the kept errors, or their sum over C."""

import triton
import triton.language as tl

from ..formula import Arguments, Formula
from ..margin import GENERAL, LINEAR, ROOT, SQUARED, MarginResult
from ..maths import weighted


@triton.jit
def row(r, OPTIONS: tl.constexpr):
    """OPTIONS = (divide by the kept errors?,)."""
    if OPTIONS[0]:
        divisor = tl.where(r.kept_count > 1, r.kept_count, 1.0)
    else:
        divisor = r.kept_count * 0.0 + r.classes
    return MarginResult(weighted(r.w, r.kept_sum) / divisor, r.w / divisor)


def arguments(margin: float, power: float, delta: float, of_label: float, threshold: float, above_zero: float) -> Arguments:
    kind = {1.0: LINEAR, 2.0: SQUARED, 0.5: ROOT}.get(power, GENERAL).value
    delta = delta if power < 1 else 0.0
    start = delta ** (power - 1) if delta > 0 else 0.0
    features = {"POWER": kind, "OF_LABEL": bool(of_label), "THRESHOLD": bool(threshold)}
    return Arguments((margin, power, delta, start), (bool(above_zero),), features)


FORMULA = Formula("margin", row, 3, arguments)
