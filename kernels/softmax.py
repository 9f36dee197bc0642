"""The softmax family: what its formulas get and give, and the passes over a row.

    u_j = scale softcap(x_j) + shift_j           (LogitNorm: u = late x, late = 1 / (temperature (|x| + eps)))
    a = lse_{j != y}(u) - u_y                    nothing cancels: p_y = sigmoid(-a), 1 - p_y = sigmoid(a)

A formula turns a `SoftmaxRow` into a `SoftmaxResult`; the driver writes
    dL/du_j = slope exp(u_j - lse_{k != y}(u)) - pull w_j   (j != y),      dL/du_y = label.
Forward reads a row once (LogitNorm twice when it takes several blocks), backward once, and saves m = max_{j != y} u_j and
d = sum_{j != y} exp(u_j - m), separately: their sum would lose the digits of d in a row of large logits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .launch import block_of, geometry, grid, launch, partial_sums, reduced, shared
from .maths import exp, log, log1p, tanh
from .tile import (
    counted,
    emit,
    labels_of,
    load_block,
    load_classes,
    load_label,
    row_pointers,
    rows_of,
    save,
    saved,
    store_block,
    upstream,
    weights_of,
)


class SoftmaxRow(NamedTuple):
    """All [ROWS]."""

    a: Any  # log odds against the label
    hit: Any  # p_y
    miss: Any  # 1 - p_y
    nll: Any  # -log p_y
    nll_miss: Any  # -log(1 - p_y)
    lse: Any  # over all classes
    spread: Any  # sum_j w_j (lse - u_j), for smoothing; in backward 1, since its sign alone matters there
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
    return SoftmaxResult(r.w * value, 0.0, r.w * slope, 0.0, -(r.w * slope))


@triton.jit
def mapped(x, shift, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """u and du/dx."""
    u = x
    du = tl.full(x.shape, 1.0, x.dtype)
    if CAPPED:
        t, dt = tanh(x / cap)
        masked = x == -float("inf")  # stays masked
        u = tl.where(masked, x, cap * t)
        du = tl.where(masked, 1.0, dt)
    if SCALED:
        u = u * scale
        du = du * scale
    return u + shift, du


@triton.jit
def unmasked(x):
    """A masked class takes no part in the norm."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def others(x, o_c, y):
    """The logits that the norm takes beside the label's."""
    return tl.where(o_c[None, :] == y[:, None], 0.0, unmasked(x))


@triton.jit
def squares_add(squares, unit, x):
    """Sum of squares of a row in units of its largest |x_j| so far, which neither overflows nor vanishes."""
    largest = tl.maximum(unit, tl.max(tl.abs(x), 1))
    inverse = tl.where(largest > 0, 1.0 / tl.where(largest > 0, largest, 1.0), 0.0)
    part = x * inverse[:, None]
    step = unit * inverse
    return squares * step * step + tl.sum(part * part, 1), largest


@triton.jit
def norm_with_label(rest, x_label):
    unit = tl.maximum(rest, tl.abs(x_label))
    inverse = tl.where(unit > 0, 1.0 / tl.where(unit > 0, unit, 1.0), 0.0)
    a = rest * inverse
    b = x_label * inverse
    return unit * tl.sqrt(a * a + b * b)


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
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr, NORM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    u, _ = mapped(x, load_classes(p_shift, o_c, C, 0.0, ACC), k[1], k[2], SCALED, CAPPED)
    other = (o_c[None, :] != labels.y[:, None]) & (o_c < C)[None, :]
    u = tl.where(other, u, -float("inf"))
    m = tl.maximum(s.m, tl.max(u, 1))
    base = tl.where(m == -float("inf"), 0.0, m)
    shrink = exp((s.m - base) * late)
    e = exp((u - base[:, None]) * late[:, None])
    d = s.d * shrink + tl.sum(e, 1)
    moment = s.moment
    spread = s.spread
    seen = s.seen
    if NORM:
        moment = moment * shrink + tl.sum(tl.where(u == -float("inf"), 0.0, e * x), 1)
    if SMOOTH:
        w = tl.where(other, load_classes(p_weight, o_c, C, 1.0, ACC), 0.0)
        step = tl.where(seen > 0, base - tl.where(s.m == -float("inf"), 0.0, s.m), 0.0)
        spread = spread + step * seen + tl.sum(tl.where(w == 0, 0.0, w * (base[:, None] - u)), 1)
        seen = seen + tl.sum(w, 1)
    return Sums(m, d, moment, spread, seen)


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
    spread = sums.spread + tl.where(sums.seen > 0, sums.seen * rest, 0.0)
    spread += tl.where(mass == 0, 0.0, mass * r.nll)
    return SoftmaxRow(r.a, r.hit, r.miss, r.nll, r.nll_miss, r.lse, spread, r.w, r.classes, r.weight_sum, r.main)


@triton.jit
def label_logit(x_label, p_shift, labels, k, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """u_y from x_y."""
    shift = 0.0
    if p_shift is not None:
        shift = tl.load(p_shift + labels.y, labels.live, other=0.0)
    u, _ = mapped(x_label, shift, k[1], k[2], SCALED, CAPPED)
    return u


@triton.jit
def total_weight(p_weight_sum, C, ACC: tl.constexpr):
    if p_weight_sum is None:
        return tl.cast(C, ACC)
    else:
        return tl.load(p_weight_sum)


@triton.jit
def forward(
    p_x, p_y, p_weight, p_shift, p_factor, p_sample, p_weight_sum, p_loss, p_saved, p_partial,
    outer, S, C, count, x_at, ignore,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr,
    NORM: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = (tl.full((), k0, ACC), tl.full((), k1, ACC), tl.full((), k2, ACC), tl.full((), k3, ACC))
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    live = labels.live
    weights = weights_of(p_weight, p_factor, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    zero = tl.zeros((ROWS,), ACC)
    x_label = load_label(p_x, labels.y, x_at, live, ACC)
    o_c = tl.arange(0, BLOCK)
    if WHOLE:
        x = load_block(p_x, o_c, x_at, live, C, ACC)
    late = zero + 1.0  # multiplies differences of u: LogitNorm's u are large, their differences not
    if NORM:
        squares = zero
        unit = zero
        if WHOLE:
            squares, unit = squares_add(squares, unit, others(x, o_c, labels.y))
        else:
            for start in range(0, C, BLOCK):
                x = load_block(p_x, start + o_c, x_at, live, C, ACC)
                squares, unit = squares_add(squares, unit, others(x, start + o_c, labels.y))
        rest = unit * tl.sqrt(squares)
        late = 1.0 / (k[0] * (norm_with_label(rest, unmasked(x_label)) + k[1]))
    u_label = label_logit(x_label, p_shift, labels, k, SCALED, CAPPED)

    sums = Sums(zero - float("inf"), zero, zero, zero, zero)
    if WHOLE:
        sums = sums_add(sums, x, o_c, labels, late, k, p_weight, p_shift, C, SCALED, CAPPED, SMOOTH, NORM, ACC)
    else:
        for start in range(0, C, BLOCK):
            x = load_block(p_x, start + o_c, x_at, live, C, ACC)
            sums = sums_add(sums, x, start + o_c, labels, late, k, p_weight, p_shift, C, SCALED, CAPPED, SMOOTH, NORM, ACC)
    r = row_of(sums.m, sums.d, u_label, late, weights.w, C, total_weight(p_weight_sum, C, ACC), 1.0)
    if SMOOTH:
        r = with_spread(r, sums, u_label, weights.mass)
    result = FORMULA(k, r, OPTIONS)
    emit(p_loss, p_partial, p_saved, rows, labels, weights, result.loss, result.extra, REDUCTION)
    d = sums.d
    save(p_saved, rows, count, 0, sums.m, live)
    save(p_saved, rows, count, 1, d, live)
    if NORM:
        save(p_saved, rows, count, 2, rest, live)
        save(p_saved, rows, count, 3, tl.where(d == 0, 0.0, sums.moment / tl.where(d == 0, 1.0, d)), live)


@triton.jit
def backward(
    p_x, p_y, p_weight, p_shift, p_factor, p_sample, p_weight_sum, p_saved, p_up, p_grad,
    outer, S, C, count, x_at, grad_at, ignore,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr,
    NORM: tl.constexpr, EXTRA: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = (tl.full((), k0, ACC), tl.full((), k1, ACC), tl.full((), k2, ACC), tl.full((), k3, ACC))
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    live = labels.live
    weights = weights_of(p_weight, p_factor, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    p_grad = row_pointers(p_grad, grad_at, outer, rows)
    zero = tl.zeros((ROWS,), ACC)
    m = saved(p_saved, rows, count, 0, live)
    d = saved(p_saved, rows, count, 1, live)
    x_label = load_label(p_x, labels.y, x_at, live, ACC)
    late = zero + 1.0
    if NORM:
        rest = saved(p_saved, rows, count, 2, live)
        length = norm_with_label(rest, unmasked(x_label))
        late = 1.0 / (k[0] * (length + k[1]))
    u_label = label_logit(x_label, p_shift, labels, k, SCALED, CAPPED)
    up, main = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, EXTRA)
    r = row_of(m, d, u_label, late, weights.w, C, total_weight(p_weight_sum, C, ACC), main)
    result = FORMULA(k, r, OPTIONS)
    live = counted(labels, weights, result.loss + result.extra, REDUCTION)
    slope = up * result.slope
    label = up * result.label
    drag = zero
    if NORM:  # the norm's own part of the gradient, along x; at the label the two parts all but cancel
        moment = saved(p_saved, rows, count, 3, live)
        x_label = unmasked(x_label)
        wide = length + k[1]
        per_length = tl.where(length > 0, 1.0 / tl.where(length > 0, length, 1.0), 0.0)
        along = (rest * per_length) * (rest / wide) + k[1] / wide + (moment * per_length) * (x_label / wide)
        label *= tl.where(length == 0, 1.0, along)
        drag = slope * ((moment - x_label) * per_length) * (late / wide)
    slope = tl.where(d == 0, slope * 0.0, slope / tl.where(d == 0, 1.0, d))  # no other class: nothing to push
    base = tl.where(m == -float("inf"), 0.0, m)
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = load_block(p_x, o_c, x_at, live, C, ACC)
        u, du = mapped(x, load_classes(p_shift, o_c, C, 0.0, ACC), k[1], k[2], SCALED, CAPPED)
        g = slope[:, None] * exp((u - base[:, None]) * late[:, None])
        if SMOOTH:
            g -= (up * result.pull)[:, None] * load_classes(p_weight, o_c, C, 1.0, ACC)
        g = tl.where(o_c[None, :] == labels.y[:, None], label[:, None], g) * du * late[:, None]
        if NORM:
            g -= tl.where(o_c[None, :] == labels.y[:, None], 0.0, drag[:, None] * unmasked(x))
        store_block(p_grad, o_c, grad_at, rows.exists, C, tl.where(live[:, None], g, 0.0))


def weight_sum(formula: Formula, call: Any) -> Tensor | None:
    """The sum of the class weights where smoothing asks for it."""
    smooth = formula.arguments(*call.scalars).features["SMOOTH"]
    return call.weight.sum() if call.weight is not None and smooth else None


def launch_forward(formula: Formula, call: Any, x: Tensor, loss: Tensor, statistics: Tensor | None) -> None:
    g = geometry(x)
    block = block_of(g, x, twice=formula.arguments(*call.scalars).features["NORM"])
    programs = grid(g, block)
    partial = partial_sums(call, x, *programs)
    known = shared(formula, call, x, g, block) | {"p_weight_sum": weight_sum(formula, call)}
    launch(forward, programs, p_loss=loss, p_saved=statistics, p_partial=partial, **known)
    reduced(call, partial, loss, statistics)


def launch_backward(formula: Formula, call: Any, x: Tensor, statistics: Tensor, up: Tensor, grad: Tensor) -> None:
    g = geometry(x, grad)
    block = block_of(g, x)
    known = shared(formula, call, x, g, block) | {"p_weight_sum": weight_sum(formula, call)}
    launch(backward, grid(g, block), p_saved=statistics, p_up=up, p_grad=grad, grad_at=g.at[1], **known)


def features(**changed: bool) -> dict[str, Any]:
    """The constants of the family's kernels: what a loss does not use is not compiled."""
    return {"SCALED": False, "CAPPED": False, "SMOOTH": False, "NORM": False, "EXTRA": False, **changed}
