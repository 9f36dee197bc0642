"""Softmax focal loss, p = p_y: L = -w (1 - p)^gamma log p,

f'(a) = (1 - p)^gamma (1 - p - gamma p log p): zero at p = 1, finite at p = 0 with p log p = 0.
"""

import triton
import triton.language as tl

from ..formula import Arguments, Formula
from ..maths import exp
from ..softmax_row import features, through_a


@triton.jit
def with_gamma(gamma, r):
    power = tl.where(gamma == 0, 1.0, exp(-(gamma * tl.where(gamma == 0, 0.0, r.nll_miss))))  # 0 must not meet inf
    power = tl.where(r.nll == r.nll, power, r.nll)
    p_nll = tl.where(r.nll == float("inf"), 0.0, r.hit * r.nll)
    return through_a(r, tl.where(power == 0, power, power * r.nll), power * (r.miss + gamma * p_nll))


@triton.jit
def row(k, r, OPTIONS: tl.constexpr):
    """k = (gamma,)."""
    return with_gamma(k[0], r)


FORMULA = Formula("softmax", row, 2, lambda gamma: Arguments((gamma,), (), features()))
