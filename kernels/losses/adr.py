"""The density of ADR: F = (2 pi)^(-top / 2) phi^-A exp(-T / (2 phi)), A = top / 2 (gauss) or top (literal),

    dF/dphi = F (T / (2 phi^2) - A / phi),      dF/dT = -F / (2 phi),

by logarithms, in float64: log F has digits before the point that float32 would miss after it. 0 with its derivatives where even
F / phi^4 vanishes, so that powers of 1 / phi never overflow.
"""

import triton
import triton.language as tl

from ..adr import regularizer_features
from ..formula import Arguments, Formula
from ..maths import exp, log

HALF_LOG_2PI = tl.constexpr(0.9189385332046727)


@triton.jit
def density(t, phi, OPTIONS: tl.constexpr):
    """OPTIONS = (top, literal?, detached phi?); F, dF/dphi and dF/dT."""
    A: tl.constexpr = OPTIONS[0] * 1.0 if OPTIONS[1] else OPTIONS[0] * 0.5
    TINY: tl.constexpr = -708.39 if phi.dtype == tl.float64 else -87.33
    ACC: tl.constexpr = phi.dtype
    t = t.to(tl.float64)
    phi = phi.to(tl.float64)
    some = phi > 0
    safe = tl.where(some, phi, 1.0)
    log_phi = log(safe)
    log_f = -OPTIONS[0] * HALF_LOG_2PI - A * log_phi - t / (2.0 * safe)
    vanishes = (some == 0) | (log_f - 4.0 * log_phi < TINY)
    nan = (phi - phi) + (t - t)
    f = tl.where(vanishes, 0.0, exp(log_f)) + nan
    by_t = tl.where(vanishes, 0.0, -0.5 * exp(log_f - log_phi)) + nan
    by_phi = tl.where(vanishes, 0.0, exp(log_f - 2.0 * log_phi) * (0.5 * t - A * safe)) + nan
    if OPTIONS[2]:
        by_phi = by_phi * 0.0
    return f.to(ACC), by_phi.to(ACC), by_t.to(ACC)


def arguments(top: float, variance: float, batch: float, l1: float, literal: float, detach_phi: float) -> Arguments:
    options = int(top), bool(literal), bool(detach_phi)
    return Arguments((), options, regularizer_features(top, variance, batch, l1))


FORMULA = Formula("adr", None, 7, arguments, density)
