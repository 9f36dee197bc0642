"""Cross-entropy with smoothing eps and z-loss: q_j = w_j ((1 - eps) [j = y] + eps / C), Q = sum q,

    L = sum_j q_j (lse - u_j) + z lse^2,      dL/du_j = p_j (Q + 2 z lse) - q_j.

At the label p_y Q - q_y is written as sum_{j != y} q_j - Q (1 - p_y), which does not cancel.
"""

import triton
import triton.language as tl

from ..formula import Arguments, Formula
from ..maths import weighted
from ..softmax_row import SoftmaxResult, features


@triton.jit
def row(k, r, OPTIONS: tl.constexpr):
    """k = (eps, scale, cap, z), OPTIONS = (eps > 0, z > 0)."""
    if OPTIONS[0]:
        each = k[0] / r.classes
        hit = (1.0 - k[0]) * r.w
        q = hit + each * r.weight_sum
        loss = weighted(hit, r.nll) + each * r.spread
        label = r.main * (each * (r.weight_sum - r.w) - q * r.miss)
        pull = r.main * each
    else:
        q = r.w
        loss = weighted(r.w, r.nll)
        label = -(r.main * q * r.miss)
        pull = 0.0
    slope = r.main * q * r.miss
    extra = 0.0
    if OPTIONS[1]:
        extra = k[3] * r.lse * r.lse
        slope += 2.0 * k[3] * r.lse * r.miss
        label += 2.0 * k[3] * r.lse * r.hit
    return SoftmaxResult(loss, extra, slope, pull, label)


def arguments(label_smoothing: float, temperature: float, softcap: float, z_loss: float) -> Arguments:
    smooth, extra = label_smoothing > 0, z_loss > 0
    used = features(SCALED=temperature != 1, CAPPED=softcap > 0, SMOOTH=smooth, EXTRA=extra)
    return Arguments((label_smoothing, 1 / temperature, softcap, z_loss), (smooth, extra), used)


FORMULA = Formula("softmax", row, 3, arguments)
