"""ADR's kernels over the rows alone, beside those of adr.py over the logits: row losses, and the slopes of backward."""

import triton
import triton.language as tl

from .tile import counted, emit, labels_of, rows_of, save, saved, upstream, weights_of

ALONE, HARD, SOFT = (tl.constexpr(i) for i in range(3))  # without cross-entropy, beside it with labels, with probabilities


@triton.jit
def own_phi(p_saved, p_mean, rows, count, live, BATCH: tl.constexpr):
    if BATCH:
        return tl.where(live, tl.load(p_mean), 0.0)
    else:
        return saved(p_saved, rows, count, 6, live)


@triton.jit
def concentration(p_saved, rows, count, live, L1: tl.constexpr):
    """T: the first class and the others."""
    d = 1.0 + saved(p_saved, rows, count, 1, live)
    others = saved(p_saved, rows, count, 3, live)
    if L1:
        return (1.0 + others) / d
    else:
        return (1.0 + others) / d / d


@triton.jit
def losses(
    p_y, p_weight, p_sample, p_ce, p_mean, p_loss, p_saved, p_partial, C, count, ignore, gamma: tl.float64,
    DENSITY: tl.constexpr, OPTIONS: tl.constexpr, CE: tl.constexpr, BATCH: tl.constexpr, L1: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Row losses from the statistics, and how each row counts."""
    rows = rows_of(count, ROWS)
    labels = labels_of(p_y, rows, ignore, C, CE == HARD)
    live = labels.live
    weights = weights_of(p_weight if CE == HARD else None, None, p_sample, rows, labels, ACC)
    t = concentration(p_saved, rows, count, live, L1)
    f, _, _ = DENSITY(t, own_phi(p_saved, p_mean, rows, count, live, BATCH), OPTIONS)
    if CE == ALONE:
        loss = f
        extra = tl.zeros((ROWS,), ACC)
    else:
        loss = tl.load(p_ce + rows.number, live, other=0.0)
        extra = tl.load(p_ce + count + rows.number, live, other=0.0) + tl.full((), gamma, ACC) * f
    emit(p_loss, p_partial, p_saved, rows, labels, weights, loss, extra, REDUCTION)
    left_in = counted(labels, weights, loss + extra, REDUCTION)
    save(p_saved, rows, count, 0, tl.where(left_in, 1.0, 2.0), live)


@triton.jit
def slopes(
    p_y, p_sample, p_mean, p_saved, p_up, p_slopes, C, count, ignore, gamma: tl.float64,
    DENSITY: tl.constexpr, OPTIONS: tl.constexpr, CE: tl.constexpr, BATCH: tl.constexpr, L1: tl.constexpr,
    REDUCTION: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(2, rows) dL/dphi and dL/dT, upstream gradient included."""
    rows = rows_of(count, ROWS)
    labels = labels_of(p_y, rows, ignore, C, CE == HARD)
    live = labels.live & (saved(p_saved, rows, count, 0, labels.live) == 1)
    weights = weights_of(None, None, p_sample, rows, labels, ACC)
    up, _ = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, CE != ALONE)
    if CE != ALONE:
        up = up * tl.full((), gamma, ACC)
    t = concentration(p_saved, rows, count, live, L1)
    _, by_phi, by_t = DENSITY(t, own_phi(p_saved, p_mean, rows, count, live, BATCH), OPTIONS)
    tl.store(p_slopes + rows.number, tl.where(live, up * by_phi, 0.0), rows.exists)
    tl.store(p_slopes + count + rows.number, tl.where(live, up * by_t, 0.0), rows.exists)
