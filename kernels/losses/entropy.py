"""Entropy of the softmax (TENT), and SAR's filter: rows with H >= limit are out, and so are NaN rows, which else show."""

import triton
import triton.language as tl

from ..entropy import EntropyResult
from ..formula import Arguments, Formula


@triton.jit
def row(k, entropy, OPTIONS: tl.constexpr):
    """k = (limit,), OPTIONS = (filter?,)."""
    if OPTIONS[0]:
        kept = entropy < k[0]
        return EntropyResult(tl.where(kept, entropy, 0.0), tl.where(kept, 1.0, 0.0), tl.where(kept, 1.0, 0.0))
    else:
        one = tl.full(entropy.shape, 1.0, entropy.dtype)
        return EntropyResult(entropy, one, one)


FORMULA = Formula("entropy", row, 4, lambda limit, filter: Arguments((limit,), (bool(filter),)))
