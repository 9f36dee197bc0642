"""The region family: losses of sums over all positions of the batch or of each image, alone or beside cross-entropy.

    hit_c = sum_n s_n t_nc p_nc,   missed_c = sum_n s_n t_nc (1 - p_nc),   stray_c = sum_n s_n (1 - t_nc) p_nc
                                                                            t one-hot labels, p = softmax(x), s weights
Nothing cancels in them, be the positions right or wrong. A formula turns the sums of a class into its loss and two
coefficients (`ClassResult`); the driver writes
    dL/dx_nj = s_n p_nj (q_nj - sum_c p_nc q_nc),   q_nc = push_c - t_nc pull_c.
Three kernels forward, of which the first alone sees the logits: it writes the sums of each program, so that the order of
addition is fixed. One read each way when a block holds all classes, else two. Saved: the divisors of cross-entropy; m and d of
each row (and cross-entropy's); two derivatives of each class and image; the number of images that count.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .launch import block_of, geometry, grid, launch, reduced, shared
from .maths import exp_below_zero, weighted
from .region_sums import Parts, class_losses, class_slopes, class_sums, image_rows, online, parts_add, parts_of, store_parts
from .softmax_row import Sums, backward_result, forward_result, gradient_of, slopes_of, sums_add, weight_sum
from .tile import (
    MEAN,
    NONE,
    is_half,
    labels_of,
    load_block,
    load_label,
    numbers,
    row_pointers,
    rows_of,
    save,
    saved,
    store_block,
    store_sum,
    upstream,
    weights_of,
)
from .tuning import REGION_CLASSES, REGION_PARTS, REGION_TILES


@triton.jit
def forward(
    p_x, p_y, p_weight, p_shift, p_sample, p_weight_sum, p_saved, p_sums, p_partial,
    outer, S, C, count, x_at, ignore, per_image, tiles, chunks,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    FORMULA: tl.constexpr, CE_OPTIONS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sums over TILES tiles: p_sums (programs, 4, C); cross-entropy's and the bad labels: p_partial (5, programs)."""
    k = numbers(k0, k1, k2, k3, ACC)
    pid = tl.program_id(0)
    i_image = (pid // chunks).to(tl.int64)
    first = (pid % chunks) * TILES
    zero = tl.zeros((ROWS,), ACC)
    ce_loss, ce_mass, ce_extra, ce_rows, bad = zero, zero, zero, zero, zero
    o_c = tl.arange(0, BLOCK)
    p_mine = p_sums + pid.to(tl.int64) * 4 * C
    if WHOLE:
        none = tl.zeros((ROWS, BLOCK), ACC)
        parts = Parts(none, none, none, none - float("inf"))
    for i_tile in range(first, tl.minimum(first + TILES, tiles)):
        rows = image_rows(i_image, i_tile, per_image, S, ROWS)
        labels = labels_of(p_y, rows, ignore, C, True)
        live = labels.live
        weights = weights_of(p_weight, None, p_sample, rows, labels, ACC)
        s = weights.s
        p_row = row_pointers(p_x, x_at, outer, rows)
        sums = Sums(zero - float("inf"), zero, zero, zero, zero)
        m, d, others = zero - float("inf"), zero, zero
        if WHOLE:
            x = load_block(p_row, o_c, x_at, live, C, ACC)
        for start in range(0, BLOCK if WHOLE else C, BLOCK):
            o = start + o_c
            if not WHOLE:
                x = load_block(p_row, o, x_at, live, C, ACC)
            m, d, others = online(m, d, others, x, o, labels, is_half(p_x))
            if CE_OPTIONS is not None:
                sums = sums_add(
                    sums, x, o, labels, zero + 1.0, k, p_weight, p_shift, C, SCALED, CAPPED, SMOOTH, False, is_half(p_x), ACC
                )
        d = tl.where(m == -float("inf"), float("nan"), d)
        if WHOLE:
            parts = parts_add(parts, parts_of(x, m, d, others, o_c, labels, s, is_half(p_x)))
        else:
            for start in range(0, C, BLOCK):
                x = load_block(p_row, start + o_c, x_at, live, C, ACC)
                store_parts(p_mine, start + o_c, C, parts_of(x, m, d, others, start + o_c, labels, s, is_half(p_x)))
        save(p_saved, rows, count, 0, m, live)
        save(p_saved, rows, count, 1, d, live)
        bad += tl.where(labels.bad, 1.0, 0.0)
        if CE_OPTIONS is not None:
            x_label = load_label(p_row, labels.y, x_at, live, ACC)
            result = forward_result(
                sums, x_label, labels, weights, 1.0, k, p_shift, p_weight_sum, C,
                FORMULA, CE_OPTIONS, SCALED, CAPPED, SMOOTH, ACC,
            )  # fmt: skip
            ce_loss += tl.where(live, weighted(s, result.loss), 0.0)
            ce_mass += tl.where(live, s * weights.mass, 0.0)
            ce_extra += tl.where(live, weighted(s, result.extra), 0.0)
            ce_rows += tl.where(live, s, 0.0)
            save(p_saved, rows, count, 2, sums.m, live)
            save(p_saved, rows, count, 3, sums.d, live)
    if WHOLE:
        store_parts(p_mine, o_c, C, parts)
    store_sum(p_partial, 0, ce_loss)
    store_sum(p_partial, 1, ce_mass)
    store_sum(p_partial, 2, ce_extra)
    store_sum(p_partial, 3, ce_rows)
    store_sum(p_partial, 4, bad)


@triton.jit
def backward(
    p_x, p_y, p_weight, p_shift, p_sample, p_weight_sum, p_saved, p_slopes, p_counted, p_up, p_grad,
    outer, S, C, count, x_at, grad_at, ignore, rows_per_image, dice_weight: tl.float64, ce_weight: tl.float64,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64,
    FORMULA: tl.constexpr, CE_OPTIONS: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTH: tl.constexpr,
    EXTRA: tl.constexpr, REDUCTION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = numbers(k0, k1, k2, k3, ACC)
    rows = rows_of(S, ROWS)
    labels = labels_of(p_y, rows, ignore, C, True)
    live = labels.live
    weights = weights_of(p_weight, None, p_sample, rows, labels, ACC)
    p_x = row_pointers(p_x, x_at, outer, rows)
    p_grad = row_pointers(p_grad, grad_at, outer, rows)
    m = saved(p_saved, rows, count, 0, live)
    d = saved(p_saved, rows, count, 1, live)
    inverse = 1.0 / tl.where(live, d, 1.0)
    image = tl.where(live, rows.number // rows_per_image, -1)
    scale = tl.full((), dice_weight, ACC)
    if REDUCTION != NONE:
        scale = scale * tl.load(p_up)
    if REDUCTION == MEAN:
        scale = scale / tl.maximum(tl.load(p_counted), 1.0)
    if CE_OPTIONS is not None:
        x_label = load_label(p_x, labels.y, x_at, live, ACC)
        ce_m = saved(p_saved, rows, count, 2, live)
        ce_d = saved(p_saved, rows, count, 3, live)
        up, main = upstream(p_up, p_saved, rows, labels, weights, REDUCTION, EXTRA)
        up = up * tl.full((), ce_weight, ACC)
        result = backward_result(
            ce_m, ce_d, x_label, labels, weights, main, 1.0, k, p_shift, p_weight_sum, C,
            FORMULA, CE_OPTIONS, SCALED, CAPPED, ACC,
        )  # fmt: skip
        s = slopes_of(result, ce_m, ce_d, up)
    o_c = tl.arange(0, BLOCK)
    # q - sum p q cancels where one class has all but all of p: all q are taken relative to that class's.
    zero = tl.zeros((ROWS,), ACC)
    inner, others, leading, leaders = zero, zero, zero, zero  # sums of p q and p over the others, of q and 1 over the leaders
    if WHOLE:
        x = load_block(p_x, o_c, x_at, live, C, ACC)
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o = start + o_c
        if not WHOLE:
            x = load_block(p_x, o, x_at, live, C, ACC)
        q = class_slopes(p_slopes, p_up, image, o, o[None, :] == labels.y[:, None], C, REDUCTION)
        leads = live[:, None] & (x == m[:, None])
        p = tl.where(leads | (live == 0)[:, None], 0.0, exp_below_zero(x - m[:, None], is_half(p_x)) * inverse[:, None])
        inner += tl.sum(p * q, 1)
        others += tl.sum(p, 1)
        leading += tl.sum(tl.where(leads, q, 0.0), 1)
        leaders += tl.sum(leads.to(ACC), 1)
    leading = leading / tl.where(leaders > 0, leaders, 1.0)
    inner = inner - leading * others
    for start in range(0, BLOCK if WHOLE else C, BLOCK):
        o = start + o_c
        if not WHOLE:
            x = load_block(p_x, o, x_at, live, C, ACC)
        q = class_slopes(p_slopes, p_up, image, o, o[None, :] == labels.y[:, None], C, REDUCTION)
        p = exp_below_zero(x - m[:, None], is_half(p_x)) * inverse[:, None]
        g = (scale * weights.s)[:, None] * p * ((q - leading[:, None]) - inner[:, None])
        if CE_OPTIONS is not None:
            g += gradient_of(s, x, o, labels, zero + 1.0, k, p_weight, p_shift, C, SCALED, CAPPED, SMOOTH, is_half(p_x), ACC)
        store_block(p_grad, o, grad_at, rows.exists, C, tl.where(live[:, None], g, 0.0))


def images_of(formula: Formula, call: Any, shape: torch.Size) -> int:
    """Over how many images the sums run."""
    return shape[0] if formula.arguments(*call.scalars).features["IMAGES"] and len(shape) > 1 else 1


def saved_more(formula: Formula, call: Any, shape: torch.Size) -> int:
    """Numbers saved beside those of the rows."""
    return images_of(formula, call, shape) * 2 * (shape[1] if len(shape) > 1 else shape[0]) + 1


def loss_shape(formula: Formula, call: Any, shape: torch.Size) -> tuple[int, ...]:
    """Of class losses, with reduction "none"."""
    classes = shape[1] if len(shape) > 1 else shape[0]
    per_image = formula.arguments(*call.scalars).features["IMAGES"]
    return (images_of(formula, call, shape), classes) if per_image else (classes,)


def launch_forward(formula: Formula, call: Any, x: Tensor, loss: Tensor, statistics: Tensor | None) -> None:
    images = images_of(formula, call, x.shape)
    g = geometry(x, split=images > 1)
    block = block_of(g, x, region=True)
    known = shared(formula, call, x, g, block)
    per_image = g.programs // images
    tiles = per_image * triton.cdiv(g.positions, block.rows)
    each = REGION_TILES if known["WHOLE"] else 1
    chunks = triton.cdiv(tiles, each)
    parts = images * chunks
    sums = loss.new_empty((parts, 4, g.classes))
    partial = x.new_empty((5, parts), dtype=torch.float64)
    totals = x.new_empty((images, 4, g.classes), dtype=torch.float64)
    per = x.new_empty((2, images), dtype=torch.float64)
    slopes = None if statistics is None else statistics[-saved_more(formula, call, x.shape) :]
    known |= {"per_image": per_image, "tiles": tiles, "chunks": chunks, "TILES": each}
    own = {"p_saved": statistics, "p_sums": sums, "p_partial": partial, "p_weight_sum": weight_sum(formula, call)}
    launch(forward, (parts,), **known | own)
    blocks = triton.cdiv(g.classes, REGION_CLASSES)
    own = {"C": g.classes, "chunks": chunks, "PARTS": REGION_PARTS, "BLOCK": REGION_CLASSES}
    launch(class_sums, (images * blocks,), 4, p_sums=sums, p_totals=totals, **own)
    beside = known["CE_OPTIONS"] is not None or known["NO_WEIGHT"]  # class weights are cross-entropy's then
    launch(
        class_losses, (images,), 4, p_totals=totals, p_weight=None if beside else call.weight, p_images=per, p_slopes=slopes,
        p_loss=loss, smooth=known["k6"], CLASS=formula.entry, OPTIONS=known["OPTIONS"], EXCLUDE=known["EXCLUDE"],
        REDUCTION=known["REDUCTION"], **own,
    )  # fmt: skip
    bad = torch.where(partial[4].sum() > 0, torch.nan, 0.0)
    counted = per[1].sum()
    if slopes is not None:
        slopes[-1:].copy_(counted)
    if call.reduction == "none":
        loss.add_(bad)
        if statistics is not None:
            statistics[:2].fill_(1.0)
        return
    dice = per[0].sum() if call.reduction == "sum" else per[0].sum() / counted.clamp(min=1)
    reduced(call, partial[:4], loss, statistics)  # cross-entropy alone so far
    loss.copy_(known["k4"] * dice + bad + (known["k5"] * loss if known["CE_OPTIONS"] is not None else 0.0))


def launch_backward(formula: Formula, call: Any, x: Tensor, statistics: Tensor, up: Tensor, grad: Tensor) -> None:
    g = geometry(x, grad)
    block = block_of(g, x, region=True)
    known = shared(formula, call, x, g, block)
    slopes = statistics[-saved_more(formula, call, x.shape) :]
    known |= {
        "p_saved": statistics, "p_slopes": slopes, "p_counted": slopes[-1:], "p_up": up, "p_grad": grad, "grad_at": g.at[1],
        "p_weight_sum": weight_sum(formula, call), "rows_per_image": g.rows // images_of(formula, call, x.shape),
        "dice_weight": known["k4"], "ce_weight": known["k5"],
    }  # fmt: skip
    launch(backward, grid(g, block), **known)
