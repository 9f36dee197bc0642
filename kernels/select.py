"""The select family, without labels: the largest logits of a row, in order, beside the moments of entropy.py.

A program keeps a list of the COUNT largest (value, class) of each of its rows; a block's entries enter by replacing the worst,
as long as one is better. The lowest class wins among equal logits. A formula turns a `SelectRow` into a `SelectResult`, its
second function `entry` gives the gradient at each class. One read forward; backward reads once, or not at all when no softmax
is asked for. Saves whether the row counts, rest (see entropy.py), the formula's own number, and the classes that rank first,
before the selected and last of them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .entropy import ended, merged, moments_of, no_moments
from .formula import Formula
from .launch import backward_pass, forward_pass
from .maths import exp, exp_below_zero, log1p
from .tile import (
    Labels,
    Weights,
    counted,
    emit,
    is_half,
    labels_of,
    load_block,
    load_label,
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

NOWHERE = tl.constexpr(1 << 30)  # behind every class


class SelectRow(NamedTuple):
    """[ROWS], but for the ranked entries, which are [ROWS, KEEP]."""

    m: Any  # the largest logit
    rest: Any  # sum of e^(x - m) without it
    entropy: Any
    value: Any  # logits by rank; -inf where there is none
    p: Any  # their probabilities
    rank: Any  # [1, KEEP]


class SelectResult(NamedTuple):
    loss: Any
    mass: Any  # 0 for a row that is filtered out
    own: Any  # a number that `entry` will get


class Best(NamedTuple):
    """The list of a row, in no order, both [ROWS, KEEP]; places past COUNT hold +inf and never leave."""

    value: Any
    at: Any


@triton.jit
def no_best(COUNT: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr):
    o_k = tl.arange(0, KEEP)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    return Best(tl.where(o_k < COUNT, -float("inf"), float("inf")).to(ACC), o_k + NOWHERE)


@triton.jit
def best_add(best, at, x, o_c):
    """Let the entries of a block in. Blocks come in order, so a later class never beats an equal logit."""
    top = tl.max(x, 1)
    worst = tl.min(best, 1)
    while tl.max((top > worst).to(tl.int32), 0) > 0:
        i_top = tl.min(tl.where(x == top[:, None], o_c[None, :], NOWHERE), 1)
        i_worst = tl.max(tl.where(best == worst[:, None], at, -1), 1)
        out = (top > worst)[:, None] & (at == i_worst[:, None])
        best = tl.where(out, top[:, None], best)
        at = tl.where(out, i_top[:, None], at)
        x = tl.where(o_c[None, :] == i_top[:, None], -float("inf"), x)
        top = tl.max(x, 1)
        worst = tl.min(best, 1)
    return Best(best, at)


@triton.jit
def ranked(value, at, COUNT: tl.constexpr, KEEP: tl.constexpr):
    """The list in order, -inf past its end."""
    o_k = tl.arange(0, KEEP)[None, :]
    free = at < NOWHERE
    by_rank = tl.full(value.shape, -float("inf"), value.dtype)
    at_rank = tl.full(at.shape, NOWHERE, tl.int32)
    for rank in range(COUNT):
        top = tl.max(tl.where(free, value, -float("inf")), 1)
        i_top = tl.min(tl.where(free & (value == top[:, None]), at, NOWHERE), 1)
        by_rank = tl.where(o_k == rank, top[:, None], by_rank)
        at_rank = tl.where(o_k == rank, i_top[:, None], at_rank)
        free = free & (at != i_top[:, None])
    return Best(by_rank, at_rank)


@triton.jit
def at_rank(at, rank, KEEP: tl.constexpr):
    """[ROWS] classes of one rank."""
    o_k = tl.arange(0, KEEP)[None, :]
    return tl.sum(tl.where(o_k == rank, at, 0), 1)


@triton.jit
def last_of(at, before, KEEP: tl.constexpr):
    """[ROWS] the last class of ranks below `before` that exists, or NOWHERE."""
    o_k = tl.arange(0, KEEP)[None, :]
    some = (at < NOWHERE) & (o_k < before)
    rank = tl.max(tl.where(some, o_k, -1), 1)
    found = tl.sum(tl.where(o_k == rank[:, None], at, 0), 1)
    return tl.where(rank < 0, NOWHERE, found)


@triton.jit
def behind(x, o_c, value, at):
    """Whether entries rank after the entry (value, at) of their row."""
    return (x < value[:, None]) | ((x == value[:, None]) & (o_c[None, :] > at[:, None]))


@triton.jit
def forward(
    p_x, p_y, p_sample, p_loss, p_saved, p_partial,
    outer, S, C, count, x_at, ignore, k0: tl.float64, k1: tl.float64,
    FORMULA: tl.constexpr, OPTIONS: tl.constexpr, BEFORE: tl.constexpr, COUNT: tl.constexpr, KEEP: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, False)
    weights = weights_of(None, None, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    s = no_moments(ROWS, ACC)
    best = no_best(COUNT, KEEP, ROWS, ACC)
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = load_block(p_x, o_c, x_at, labels.live, C, ACC)
        s = merged(s, moments_of(x, is_half(p_x)))
        best = best_add(best.value, best.at, x, o_c)
    s = ended(s)
    d = 1.0 + s.rest
    best = ranked(best.value, best.at, COUNT, KEEP)
    p = exp(best.value - tl.where(s.m == -float("inf"), 0.0, s.m)[:, None]) / d[:, None]
    row = SelectRow(s.m, s.rest, log1p(s.rest) - s.moment / d, best.value, p, tl.arange(0, KEEP)[None, :])
    result = FORMULA((tl.full((), k0, ACC), tl.full((), k1, ACC)), row, OPTIONS)
    kept = Labels(labels.y, labels.live & (result.mass != 0), labels.bad)
    weights = Weights(weights.w, result.mass, weights.s)
    loss = tl.where(d + s.moment == d + s.moment, result.loss, float("nan"))  # a row that has no softmax
    emit(p_loss, p_partial, p_saved, rows, kept, weights, loss, d * 0.0, REDUCTION)
    above_zero = counted(kept, weights, loss, REDUCTION)
    lost = tl.where(loss == loss, s.rest, loss)
    save(p_saved, rows, count, 0, tl.where(above_zero, 1.0, 0.0), rows.exists)
    save(p_saved, rows, count, 1, lost, kept.live)
    save(p_saved, rows, count, 2, result.own, kept.live)
    save_class(p_saved, rows, count, 3, at_rank(best.at, 0, KEEP), kept.live)
    save_class(p_saved, rows, count, 4, at_rank(best.at, BEFORE, KEEP), kept.live)
    save_class(p_saved, rows, count, 5, last_of(best.at, COUNT, KEEP), kept.live)


@triton.jit
def backward(
    p_x, p_y, p_sample, p_saved, p_up, p_grad,
    outer, S, C, count, x_at, grad_at, ignore, k0: tl.float64, k1: tl.float64,
    ENTRY: tl.constexpr, OPTIONS: tl.constexpr, READ: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = (tl.full((), k0, ACC), tl.full((), k1, ACC))
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, False)
    live = labels.live & (saved(p_saved, rows, count, 0, labels.live) != 0)
    weights = weights_of(None, None, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    p_grad = row_pointers(p_grad, grad_at, outer, rows)
    rest = saved(p_saved, rows, count, 1, live)
    own = saved(p_saved, rows, count, 2, live)
    i_first = saved_class(p_saved, rows, count, 3, live)
    i_before = saved_class(p_saved, rows, count, 4, live)
    i_last = saved_class(p_saved, rows, count, 5, live)
    up, _ = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, False)
    some = live & READ & (i_last < NOWHERE) & (i_before < NOWHERE)
    m = load_label(p_x, i_first.to(tl.int64), x_at, live & READ & (i_first < NOWHERE), ACC)
    before = load_label(p_x, i_before.to(tl.int64), x_at, some, ACC)
    last = load_label(p_x, i_last.to(tl.int64), x_at, some, ACC)
    inverse = 1.0 / (1.0 + rest)
    nan = rest - rest
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = load_block(p_x, o_c, x_at, live & READ, C, ACC)
        p = exp_below_zero(x - m[:, None], is_half(p_x)) * inverse[:, None]
        inside = behind(x, o_c, before, i_before) & (behind(x, o_c, last, i_last) == 0) & some[:, None]
        inside = inside & (x > -float("inf"))  # a masked class cannot be pushed further
        first = o_c[None, :] == i_first[:, None]
        g = up[:, None] * (ENTRY(k, p, own[:, None], rest[:, None], inside, first, OPTIONS) + nan[:, None])
        store_block(p_grad, o_c, grad_at, rows.exists, C, tl.where(live[:, None], g, 0.0))


def launch_forward(formula: Formula, call: Any, x: Tensor, loss: Tensor, statistics: Tensor | None) -> None:
    forward_pass(forward, formula, call, x, loss, statistics)


def launch_backward(formula: Formula, call: Any, x: Tensor, statistics: Tensor, up: Tensor, grad: Tensor) -> None:
    backward_pass(backward, formula, call, x, statistics, up, grad, ENTRY=formula.entry)
