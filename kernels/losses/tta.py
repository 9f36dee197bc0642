"""Sparse cross-logit, k-hard negative learning and their sum; ranks by descending logit, K = ranks skip + 1 ... skip + k:

    L = -v x_first + lam L_knl,   v = 0, 1 or p_first (a constant for the gradient)
    L_knl = -sum_K log(1 - p_j) (nl) or sum_K x_j (logit)

With W = sum_K p_j / (1 - p_j), the gradient of nl is [j in K] p_j / (1 - p_j) - p_j W.
"""

import triton
import triton.language as tl

from ..formula import Arguments, Formula
from ..maths import log1p
from ..select import SelectResult

NONE, ONE, PROB = (tl.constexpr(i) for i in range(3))


@triton.jit
def row(k, r, OPTIONS: tl.constexpr):
    """k = (lam, limit), OPTIONS = (v, skip, k, logit form?, filter?)."""
    inside = (r.rank > OPTIONS[1]) & (r.rank <= OPTIONS[1] + OPTIONS[2]) & (r.value > -float("inf"))
    if OPTIONS[3]:
        own = r.rest * 0.0
        loss = k[0] * tl.sum(tl.where(inside, r.value, 0.0), 1)
    else:
        p = tl.where(inside, r.p, 0.0)
        own = tl.sum(p / (1.0 - p), 1)
        loss = -(k[0] * tl.sum(log1p(-p), 1))
    if OPTIONS[0] == ONE:
        loss -= r.m
    elif OPTIONS[0] == PROB:
        loss -= r.m / (1.0 + r.rest)
    mass = tl.full(loss.shape, 1.0, loss.dtype)
    if OPTIONS[4]:
        kept = r.entropy < k[1]  # not a NaN row
        mass = tl.where(kept, 1.0, 0.0)
        loss = tl.where(kept, loss, 0.0)
    return SelectResult(loss, mass, own)


@triton.jit
def entry(k, p, own, rest, inside, first, OPTIONS: tl.constexpr):
    g = tl.where(first, 0.0, 0.0)
    if OPTIONS[0] == ONE:
        g = tl.where(first, -1.0, 0.0)
    elif OPTIONS[0] == PROB:
        g = tl.where(first, -1.0 / (1.0 + rest), 0.0)
    if OPTIONS[2] > 0:
        if OPTIONS[3]:
            g += tl.where(inside, k[0], 0.0)
        else:
            g += k[0] * (tl.where(inside, p / (1.0 - p), 0.0) - p * own)
    return g


def arguments(
    top: float, lambda_: float, count: float, skip: float, logit_form: float, limit: float, filter: float
) -> Arguments:
    k, skip = int(count), int(skip)
    options = int(top), skip, k, bool(logit_form), bool(filter)
    ranks = 1 + skip + k
    keep = 1 << (ranks - 1).bit_length()
    return Arguments((lambda_, limit), options, {"BEFORE": skip, "COUNT": ranks, "KEEP": max(keep, 2), "READ": k > 0})


FORMULA = Formula("select", row, 6, arguments, entry)
