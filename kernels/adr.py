"""The adaptive discriminative regularizer, alone or beside cross-entropy: of the largest classes and the uncertainty phi.

    phi = H / log C or C / (C - 1) sum p (1 - p), of the row or, with BATCH, its mean over the rows that count
    T = sum of p^2 or p over the `top` largest classes            L = F(T, phi), see losses/adr.py

Two kernels each way: one over the logits, and one over the rows (adr_rows.py), before or after the mean of phi. Both losses see
the logits in the same read. Saved per row: how it counts (0 not live, 1 counted, 2 left out by above_zero), rest (see
entropy.py), mu or the sum of squares, the selected e^(x - m) but the first (or their squares), the first class and the last
selected one, phi; with cross-entropy its m, d and Q.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .adr_rows import ALONE, HARD, SOFT, losses, slopes
from .entropy import below_largest, ended, merged, moments_of, no_moments
from .formula import Formula
from .launch import block_of, geometry, grid, launch, partial_sums, reduced, shared
from .maths import exp, exp_below_zero, log, log1p
from .select import NOWHERE, at_rank, behind, best_add, last_of, no_best, ranked
from .soft import load_targets, soft_gradient, soft_loss, soft_slopes, soft_sums_add
from .softmax_row import Sums, backward_result, features, forward_result, gradient_of, slopes_of, sums_add, weight_sum
from .tile import (
    is_half,
    labels_of,
    load_block,
    load_label,
    numbers,
    row_pointers,
    rows_of,
    save,
    save_class,
    saved,
    saved_class,
    store_block,
    upstream,
    weights_of,
)
from .tuning import ROWS_ALONE


@triton.jit
def statistics(
    p_x, p_y, p_soft, p_weight, p_shift, p_sample, p_weight_sum, p_ce, p_saved,
    outer, S, C, count, x_at, soft_at, ignore,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    FORMULA: tl.constexpr, CE_OPTIONS: tl.constexpr, CE: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr,
    VARIANCE: tl.constexpr, L1: tl.constexpr, COUNT: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of the rows; with cross-entropy also its row losses p_ce (2, rows): the loss and its extra term."""
    k = numbers(k0, k1, k2, k3, ACC)
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, CE == HARD)
    live = labels.live
    p_x = row_pointers(p_x, x_at, outer, rows)
    zero = tl.zeros((ROWS,), ACC)
    if CE == SOFT:
        p_soft = row_pointers(p_soft, soft_at, outer, rows)
    s = no_moments(ROWS, ACC)
    best = no_best(COUNT, KEEP, ROWS, ACC)
    sums = Sums(zero - float("inf"), zero, zero, zero, zero)
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = load_block(p_x, o_c, x_at, live, C, ACC)
        s = merged(s, moments_of(x, is_half(p_x)))
        best = best_add(best.value, best.at, x, o_c)
        if CE == HARD:
            sums = sums_add(
                sums, x, o_c, labels, zero + 1.0, k, p_weight, p_shift, C, SCALED, CAPPED, SMOOTH, False, is_half(p_x), ACC
            )
        if CE == SOFT:
            q = load_targets(p_soft, o_c, soft_at, live, p_weight, k[0], C, ACC)
            sums = soft_sums_add(sums, x, q, o_c, k, p_shift, C, SCALED, CAPPED, is_half(p_x), ACC)
    s = ended(s)
    d = 1.0 + s.rest
    best = ranked(best.value, best.at, COUNT, KEEP)
    e = exp(best.value - tl.where(s.m == -float("inf"), 0.0, s.m)[:, None])
    e = tl.where(tl.arange(0, KEEP)[None, :] > 0, e, 0.0)  # without the first, whose 1 would swallow the others
    if not L1:
        e = e * e
    if VARIANCE:
        second = s.square
        phi = (s.rest * (1.0 + d) - s.square) / (d * d) * (C / tl.maximum(C - 1, 1).to(ACC))
    else:
        second = s.moment / d
        phi = (log1p(s.rest) - second) / tl.where(C > 1, log(tl.maximum(C, 2).to(ACC)), 1.0)
    save(p_saved, rows, count, 0, tl.where(live, 1.0, 0.0), rows.exists)
    save(p_saved, rows, count, 1, s.rest + (s.moment - s.moment), live)
    save(p_saved, rows, count, 2, second, live)
    save(p_saved, rows, count, 3, tl.sum(e, 1), live)
    save_class(p_saved, rows, count, 4, at_rank(best.at, 0, KEEP), live)
    save_class(p_saved, rows, count, 5, last_of(best.at, COUNT, KEEP), live)
    save(p_saved, rows, count, 6, phi + (s.moment - s.moment), live)
    if CE != ALONE:
        weights = weights_of(p_weight if CE == HARD else None, None, p_sample, rows, labels, ACC)
        if CE == HARD:
            x_label = load_label(p_x, labels.y, x_at, live, ACC)
            result = forward_result(
                sums, x_label, labels, weights, 1.0, k, p_shift, p_weight_sum, C,
                FORMULA, CE_OPTIONS, SCALED, CAPPED, SMOOTH, ACC,
            )  # fmt: skip
            loss = result.loss
            extra = zero + result.extra
        else:
            loss, lse = soft_loss(sums)
            extra = k[3] * lse * lse
            save(p_saved, rows, count, 9, sums.seen, live)
        tl.store(p_ce + rows.number, tl.where(live, loss, 0.0), rows.exists)
        tl.store(p_ce + count + rows.number, tl.where(live, extra, 0.0), rows.exists)
        save(p_saved, rows, count, 7, sums.m, live)
        save(p_saved, rows, count, 8, sums.d, live)


@triton.jit
def above(e, rest, squares, d):
    """d^2 (p - sum p^2), from a sum of e^2 without the first class. One that all but ties with it by how far it is behind."""
    near = e > 0.5
    apart = tl.where(near, e - 1.0, e) * d[:, None]
    return apart + tl.where(near, (rest - squares)[:, None], -(1.0 + squares)[:, None])


@triton.jit
def backward(
    p_x, p_y, p_soft, p_weight, p_shift, p_sample, p_weight_sum, p_saved, p_slopes, p_mean_slope, p_up, p_grad,
    outer, S, C, count, x_at, soft_at, grad_at, ignore,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    FORMULA: tl.constexpr, CE_OPTIONS: tl.constexpr, CE: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr,
    VARIANCE: tl.constexpr, L1: tl.constexpr, BATCH: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = numbers(k0, k1, k2, k3, ACC)
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, CE == HARD)
    mark = saved(p_saved, rows, count, 0, rows.exists)
    left_in = mark == 1
    live = left_in
    if BATCH:  # a row that is left out still moves the mean
        live = mark != 0
        by_phi = tl.where(live, tl.load(p_mean_slope), 0.0)
    else:
        by_phi = tl.load(p_slopes + rows.number, live, other=0.0)
    by_t = tl.load(p_slopes + count + rows.number, live, other=0.0)
    weights = weights_of(p_weight if CE == HARD else None, None, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    p_grad = row_pointers(p_grad, grad_at, outer, rows)
    rest = saved(p_saved, rows, count, 1, live)
    second = saved(p_saved, rows, count, 2, live)
    others = saved(p_saved, rows, count, 3, live)
    i_first = saved_class(p_saved, rows, count, 4, live)
    i_last = saved_class(p_saved, rows, count, 5, live)
    m = load_label(p_x, i_first.to(tl.int64), x_at, live & (i_first < NOWHERE), ACC)
    last = load_label(p_x, i_last.to(tl.int64), x_at, live & (i_last < NOWHERE), ACC)
    d = 1.0 + rest
    if CE != ALONE:
        ce_m = saved(p_saved, rows, count, 7, live)
        ce_d = saved(p_saved, rows, count, 8, live)
        up, main = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, True)
        up = tl.where(left_in, up, 0.0)
        if CE == HARD:
            x_label = load_label(p_x, labels.y, x_at, live, ACC)
            result = backward_result(
                ce_m, ce_d, x_label, labels, weights, main, 1.0, k, p_shift, p_weight_sum, C,
                FORMULA, CE_OPTIONS, SCALED, CAPPED, ACC,
            )  # fmt: skip
            s = slopes_of(result, ce_m, ce_d, up)
        else:
            p_soft = row_pointers(p_soft, soft_at, outer, rows)
            s = soft_slopes(ce_m, tl.where(live, ce_d, 1.0), saved(p_saved, rows, count, 9, live), up, main, k, True)
    inverse = 1.0 / d
    if VARIANCE:  # phi's derivative, but for what the classes do not share: -2 C / (C - 1) (p - sum p^2)
        by_phi *= -2.0 * C / tl.maximum(C - 1, 1).to(ACC) * inverse * inverse
    else:
        by_phi /= tl.where(C > 1, log(tl.maximum(C, 2).to(ACC)), 1.0)
    if L1:  # T's: [selected] - T
        by_t *= inverse
    else:  # 2 ([selected] p - T)
        by_t *= 2.0 * inverse * inverse
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = load_block(p_x, o_c, x_at, live, C, ACC)
        inside = behind(x, o_c, last, i_last) == 0
        z = below_largest(x, m)
        e = exp_below_zero(z, is_half(p_x))
        p = e * inverse[:, None]
        direction = above(e, rest, second, d) if VARIANCE else second[:, None] - z
        pull = tl.where(inside, (rest - others)[:, None] if L1 else above(e, rest, others, d), -(1.0 + others)[:, None])
        g = p * (by_phi[:, None] * direction + by_t[:, None] * pull)
        g += (rest - rest)[:, None]
        if CE != ALONE:
            if CE == HARD:
                one = tl.full((ROWS,), 1.0, ACC)
                ce = gradient_of(s, x, o_c, labels, one, k, p_weight, p_shift, C, SCALED, CAPPED, SMOOTH, is_half(p_x), ACC)
            else:
                q = load_targets(p_soft, o_c, soft_at, live, p_weight, k[0], C, ACC)
                ce = soft_gradient(s, x, q, o_c, k, p_shift, C, SCALED, CAPPED, is_half(p_x), ACC)
            g += tl.where((up == 0)[:, None], 0.0, ce)
        store_block(p_grad, o_c, grad_at, rows.exists, C, tl.where(live[:, None], g, 0.0))


def _known(formula: Formula, call: Any, x: Tensor, g: Any, block: Any) -> dict[str, Any]:
    known = shared(formula, call, x, g, block)
    mode = ALONE if known["CE_OPTIONS"] is None else HARD if call.soft is None else SOFT
    known |= {"CE": mode.value, "DENSITY": formula.entry, "gamma": known["k4"], "p_soft": call.soft}
    return known | {"p_weight_sum": weight_sum(formula, call), "soft_at": g.at[-1]}


def _per_row(known: dict[str, Any]) -> tuple[tuple[int], dict[str, Any]]:
    """The launch of a kernel over the rows alone."""
    return (triton.cdiv(known["count"], ROWS_ALONE),), known | {"ROWS": ROWS_ALONE, "num_warps": 4, "crowded": True}


def _mean_phi(known: dict[str, Any], statistics: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The mean of phi over the live rows and their number, on the device."""
    if not known["BATCH"]:
        return None, None
    count = known["count"]
    mark, phi = statistics[2 : 2 + count], statistics[2 + 6 * count : 2 + 7 * count]
    live = mark.ne(0).sum().clamp(min=1)
    return phi.sum(dtype=torch.float64).div(live).to(phi.dtype), live


def launch_forward(formula: Formula, call: Any, x: Tensor, loss: Tensor, saved_rows: Tensor | None) -> None:
    soft = () if call.soft is None else (call.soft,)
    g = geometry(x, *soft)
    block = block_of(g, x, crowded=True)
    known = _known(formula, call, x, g, block)
    if saved_rows is None:  # the kernel over the rows reads them
        saved_rows = loss.new_empty(2 + g.rows * formula.saved)
    ce = None if known["CE"] == ALONE.value else loss.new_empty((2, g.rows))
    launch(statistics, grid(g, block), p_ce=ce, p_saved=saved_rows, **known)
    programs, rows = _per_row(known)
    partial = partial_sums(call, x, *programs)
    mean, _ = _mean_phi(known, saved_rows)
    launch(losses, programs, p_ce=ce, p_mean=mean, p_loss=loss, p_saved=saved_rows, p_partial=partial, **rows)
    reduced(call, partial, loss, saved_rows)


def launch_backward(formula: Formula, call: Any, x: Tensor, saved_rows: Tensor, up: Tensor, grad: Tensor) -> None:
    soft = () if call.soft is None else (call.soft,)
    g = geometry(x, grad, *soft)
    both = formula.arguments(*call.scalars).features["CE_OPTIONS"] is not None  # two gradients: fewer numbers a lane
    block = block_of(g, x, twice=both and x.element_size() < 8, crowded=True)
    known = _known(formula, call, x, g, block)
    by = saved_rows.new_empty((2, g.rows))
    programs, rows = _per_row(known)
    mean, live = _mean_phi(known, saved_rows)
    launch(slopes, programs, p_mean=mean, p_saved=saved_rows, p_up=up, p_slopes=by, **rows)
    total = None if live is None else by[0].sum(dtype=torch.float64).div(live).to(by.dtype)
    known |= {"p_saved": saved_rows, "p_slopes": by, "p_mean_slope": total, "p_up": up, "p_grad": grad, "grad_at": g.at[1]}
    launch(backward, grid(g, block), **known)


def regularizer_features(top: float, variance: float, batch: float, l1: float, **more: Any) -> dict[str, Any]:
    count = int(top)
    keep = max(2, 1 << (count - 1).bit_length())
    own = {"VARIANCE": bool(variance), "BATCH": bool(batch), "L1": bool(l1), "COUNT": count, "KEEP": keep, "CE_OPTIONS": None}
    return features() | own | more
