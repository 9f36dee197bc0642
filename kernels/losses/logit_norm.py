"""LogitNorm: u = x / (temperature (|x| + eps)), L = w CE(u). The driver computes the norm and its part of the gradient."""

import triton
import triton.language as tl

from ..formula import Arguments, Formula
from ..softmax_row import features, through_a


@triton.jit
def row(k, r, OPTIONS: tl.constexpr):
    """k = (temperature, eps)."""
    return through_a(r, r.nll, r.miss)


def arguments(temperature: float, eps: float) -> Arguments:
    return Arguments((temperature, eps), (), features(NORM=True))


FORMULA = Formula("softmax", row, 4, arguments)
