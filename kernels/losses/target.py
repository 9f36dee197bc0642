"""The losses of the target probability p = p_y alone: L = w f(a)."""

import triton
import triton.language as tl

from ..formula import Arguments, Formula
from ..maths import exp, expm1, log, log1p
from ..softmax_row import features, through_a
from .focal import with_gamma

CE, FOCAL, GCE, MAE, SUMEXP, COMPSUM, DCO, SCE = (tl.constexpr(i) for i in range(8))


@triton.jit
def row(k, r, OPTIONS: tl.constexpr):
    """OPTIONS = (kind,); k = (gamma | q | 1 - tau | n | a, -b floor)."""
    KIND: tl.constexpr = OPTIONS[0]
    if KIND == FOCAL:
        return with_gamma(k[0], r)
    elif KIND == GCE:  # (1 - p^q) / q
        return through_a(r, -expm1(-k[0] * r.nll) / k[0], exp(-k[0] * r.nll) * r.miss)
    elif KIND == MAE:
        return through_a(r, r.miss, r.hit * r.miss)
    elif KIND == SUMEXP:
        odds = exp(r.a)
        return through_a(r, odds, odds)
    elif KIND == COMPSUM:  # ((1 + e^a)^(1 - tau) - 1) / (1 - tau)
        return through_a(r, expm1(k[0] * r.nll) / k[0], r.miss * exp(k[0] * r.nll))
    elif KIND == DCO:  # -log(1 - (1 - p)^n)
        all_miss = exp(-k[0] * r.nll_miss)
        some = -expm1(-k[0] * r.nll_miss)
        value = tl.where(some > 0.5, -log1p(-all_miss), -log(some))
        faint = r.hit < 1e-30  # where p is lost to underflow, 1 - (1 - p)^n is n p
        slope = k[0] * r.hit * all_miss / some
        return through_a(r, tl.where(faint, r.nll - log(k[0]), value), tl.where(faint, r.miss, slope))
    elif KIND == SCE:  # -a log p - b floor (1 - p)
        forward = tl.where(k[0] == 0, 0.0, k[0] * r.nll)
        return through_a(r, forward + k[1] * r.miss, k[0] * r.miss + k[1] * r.hit * r.miss)
    else:
        return through_a(r, r.nll, r.miss)


def arguments(kind: float, gamma: float, q: float, tau: float, n: float, a: float, b: float, floor: float) -> Arguments:
    numbers = {1: (gamma,), 2: (q,), 5: (1 - tau,), 6: (n,), 7: (a, -b * floor)}.get(int(kind), ())
    return Arguments(numbers, (0 if kind == 5 and tau == 1 else int(kind),), features())


FORMULA = Formula("softmax", row, 2, arguments)
