"""A row as the softmax family sees it: its map, its running sums, and what a formula gets and gives.

u_j = scale softcap(x_j) + shift_j           (LogitNorm: u = late x, late = 1 / (temperature (|x| + eps)))
a = lse_{j != y}(u) - u_y                    nothing cancels: p_y = sigmoid(-a), 1 - p_y = sigmoid(a)
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .maths import exp, exp_below_zero, log, log1p, tanh, weighted
from .tile import are_labels, load_classes


class SoftmaxRow(NamedTuple):
    """All [ROWS]."""

    a: Any  # log odds against the label
    hit: Any  # p_y
    miss: Any  # 1 - p_y
    nll: Any  # -log p_y
    nll_miss: Any  # -log(1 - p_y)
    lse: Any  # over all classes
    spread: Any  # sum_j w_j (lse - u_j), for smoothing; in backward not there
    w: Any  # class weight and factor of the label
    classes: Any  # C
    weight_sum: Any  # sum of the class weights, or C
    main: Any  # backward: factor of everything but the extra term, whose divisor differs


class SoftmaxResult(NamedTuple):
    loss: Any
    extra: Any  # a term that is averaged without class weights
    slope: Any  # coefficient of the softmax over the other classes
    pull: Any  # coefficient of the class weights
    label: Any  # derivative at the label


@triton.jit
def through_a(r, value, slope):
    """Every loss that sees the row only through a: L = w f(a), with f(a) = value and f'(a) = slope."""
    w_slope = weighted(r.w, slope)
    return SoftmaxResult(weighted(r.w, value), 0.0, w_slope, 0.0, -w_slope)


@triton.jit
def mapped(x, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """u, without its shift, and du/dx."""
    u = x
    du = tl.full(x.shape, 1.0, x.dtype)
    if CAPPED:
        t, dt = tanh(x * (1.0 / cap))
        masked = x == -float("inf")  # stays masked
        u = tl.where(masked, x, cap * t)
        du = tl.where(masked, 1.0, dt)
    if SCALED:
        u = u * scale
        du = du * scale
    return u, du


@triton.jit
def mapped_classes(x, o_c, k, p_shift, C, SCALED: tl.constexpr, CAPPED: tl.constexpr, ACC: tl.constexpr):
    """u and du/dx of a block."""
    u, du = mapped(x, k[1], k[2], SCALED, CAPPED)
    if p_shift is not None:
        u += load_classes(p_shift, o_c, C, 0.0, ACC)
    return u, du


class Sums(NamedTuple):
    """Running sums over the other classes, all [ROWS]."""

    m: Any  # the largest u
    d: Any  # sum of exp(u - m)
    moment: Any  # LogitNorm: sum of exp(late (x - m)) x
    spread: Any  # smoothing: sum of w (m - u)
    seen: Any  # and of w


@triton.jit
def sums_add(
    s, x, o_c, labels, late, k, p_weight, p_shift, C,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr, NORM: tl.constexpr,
    ROUGH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """With one block more; logits past the last class are -inf."""
    u, _ = mapped_classes(x, o_c, k, p_shift, C, SCALED, CAPPED, ACC)
    label = are_labels(o_c, labels.y)
    u = tl.where(label, -float("inf"), u)
    m = tl.maximum(s.m, tl.max(u, 1))
    base = tl.where(m == -float("inf"), 0.0, m)
    shrink = exp((s.m - base) * late)
    e = exp_below_zero((u - base[:, None]) * late[:, None], ROUGH)
    d = s.d * shrink + tl.sum(e, 1)
    moment = s.moment
    spread = s.spread
    seen = s.seen
    if NORM:
        moment = moment * shrink + tl.sum(tl.where(u == -float("inf"), 0.0, e * x), 1)
    if SMOOTH:
        w = tl.where(label | (o_c >= C)[None, :], 0.0, load_classes(p_weight, o_c, C, 1.0, ACC))
        step = tl.where(seen != 0, base - tl.where(s.m == -float("inf"), 0.0, s.m), 0.0)
        spread = spread + step * seen + tl.sum(tl.where(w == 0, 0.0, w * (base[:, None] - u)), 1)
        seen = seen + tl.sum(w, 1)
    return Sums(m, d, moment, spread, seen)


@triton.jit
def sums_merged(a, b, late):
    """The sums over the classes of both."""
    m = tl.maximum(a.m, b.m)
    base = tl.where(m == -float("inf"), 0.0, m)
    a_shrink = exp((a.m - base) * late)
    b_shrink = exp((b.m - base) * late)
    a_step = tl.where(a.seen != 0, base - tl.where(a.m == -float("inf"), 0.0, a.m), 0.0)
    b_step = tl.where(b.seen != 0, base - tl.where(b.m == -float("inf"), 0.0, b.m), 0.0)
    spread = (a.spread + a_step * a.seen) + (b.spread + b_step * b.seen)
    return Sums(m, a.d * a_shrink + b.d * b_shrink, a.moment * a_shrink + b.moment * b_shrink, spread, a.seen + b.seen)


@triton.jit
def row_of(m, d, u_label, late, w, C, weight_sum, main):
    """The formula's view of a row, from the statistics that backward has too."""
    log_d = log(d)
    a = tl.where(u_label == float("inf"), float("nan"), (m - u_label) * late + log_d)  # as the softmax of +inf
    e = exp(-tl.abs(a))
    tail = log1p(e)
    inverse = 1.0 / (1.0 + e)
    against = a >= 0
    nll = tl.where(a > 0, a, 0.0) + tail
    nll_miss = tl.where(a < 0, -a, 0.0) + tail
    lse = tl.where(a > 0, nll_miss + (m + log_d), nll + u_label)
    hit = tl.where(against, e, 1.0) * inverse
    miss = tl.where(against, 1.0, e) * inverse
    return SoftmaxRow(a, hit, miss, nll, nll_miss, lse, 1.0, w, C, weight_sum, main)


@triton.jit
def with_spread(r, sums, u_label, mass):
    """The row with its spread, from the sums over the other classes."""
    base = tl.where(sums.m == -float("inf"), u_label, sums.m)
    rest = tl.where(r.a > 0, log(sums.d) + r.nll_miss, (u_label - base) + r.nll)  # lse - m, by what does not cancel
    spread = sums.spread + tl.where(sums.seen != 0, sums.seen * rest, 0.0)
    spread += tl.where(mass == 0, 0.0, mass * r.nll)
    return SoftmaxRow(r.a, r.hit, r.miss, r.nll, r.nll_miss, r.lse, spread, r.w, r.classes, r.weight_sum, r.main)


@triton.jit
def label_logit(x_label, p_shift, labels, k, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """u_y from x_y."""
    u, _ = mapped(x_label, k[1], k[2], SCALED, CAPPED)
    if p_shift is not None:
        u += tl.load(p_shift + labels.y, labels.live, other=0.0)
    return u


@triton.jit
def forward_result(
    sums, x_label, labels, weights, late, k, p_shift, p_weight_sum, C,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """What the formula makes of a row."""
    u_label = label_logit(x_label, p_shift, labels, k, SCALED, CAPPED)
    r = row_of(sums.m, sums.d, u_label, late, weights.w, C, total_weight(p_weight_sum, C, ACC), 1.0)
    if SMOOTH:
        r = with_spread(r, sums, u_label, weights.mass)
    return FORMULA(k, r, OPTIONS)


@triton.jit
def backward_result(
    m, d, x_label, labels, weights, main, late, k, p_shift, p_weight_sum, C,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The same from what was saved."""
    u_label = label_logit(x_label, p_shift, labels, k, SCALED, CAPPED)
    return FORMULA(k, row_of(m, d, u_label, late, weights.w, C, total_weight(p_weight_sum, C, ACC), main), OPTIONS)


class Slopes(NamedTuple):
    """The gradient of a row, all [ROWS]."""

    base: Any  # m
    others: Any  # factor of exp(u - base)
    pull: Any  # factor of the class weights, which is subtracted
    label: Any  # dL/du at the label


@triton.jit
def slopes_of(result, m, d, up):
    others = up * result.slope
    others = tl.where(d == 0, others * 0.0, others / tl.where(d == 0, 1.0, d))  # no other class: nothing to push
    return Slopes(tl.where(m == -float("inf"), 0.0, m), others, up * result.pull, up * result.label)


@triton.jit
def slopes_where(live, s):
    """Of the rows that count; of the others 0."""
    return Slopes(
        tl.where(live, s.base, 0.0), tl.where(live, s.others, 0.0), tl.where(live, s.pull, 0.0), tl.where(live, s.label, 0.0)
    )


@triton.jit
def gradient_of(
    s, x, o_c, labels, late, k, p_weight, p_shift, C,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr, ROUGH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK] dL/dx, but for the part of the norm."""
    u, du = mapped_classes(x, o_c, k, p_shift, C, SCALED, CAPPED, ACC)
    g = s.others[:, None] * exp_below_zero((u - s.base[:, None]) * late[:, None], ROUGH)
    if SMOOTH:
        g -= s.pull[:, None] * load_classes(p_weight, o_c, C, 1.0, ACC)
    return tl.where(are_labels(o_c, labels.y), s.label[:, None], g) * du * late[:, None]


@triton.jit
def total_weight(p_weight_sum, C, ACC: tl.constexpr):
    if p_weight_sum is None:
        return tl.cast(C, ACC)
    else:
        return tl.load(p_weight_sum)


def weight_sum(formula: Formula, call: Any) -> Tensor | None:
    """The sum of the class weights where smoothing asks for it."""
    smooth = formula.arguments(*call.scalars).features["SMOOTH"]
    return call.weight.sum() if call.weight is not None and smooth else None


def features(**changed: bool) -> dict[str, Any]:
    """The constants of the family's kernels: what a loss does not use is not compiled."""
    return {"SCALED": False, "CAPPED": False, "SMOOTH": False, "NORM": False, "EXTRA": False, **changed}
