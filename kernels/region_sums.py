"""The sums of the region family: what a position adds to each class, and the kernels over the classes alone, which turn sums
into losses and slopes. region.py has the passes over the logits."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .maths import exp, exp_below_zero, log
from .tile import MEAN, NONE, Rows


class Parts(NamedTuple):
    """What positions add to each class, [ROWS, BLOCK]."""

    hit: Any
    missed: Any
    stray: Any
    largest: Any  # log p, of which the largest counts


class ClassResult(NamedTuple):
    """Of each class, all [BLOCK]."""

    loss: Any
    pull: Any  # taken from q at positions whose label it is
    push: Any  # q at every position
    present: Any  # does a target have this class?


@triton.jit
def online(m, d, others, x, o_c, labels, ROUGH: tl.constexpr):
    """m, d and the part of d that is not the label's, with one block more."""
    top = tl.maximum(m, tl.max(x, 1))
    base = tl.where(top == -float("inf"), 0.0, top)
    e = exp_below_zero(x - base[:, None], ROUGH)
    shrink = exp(m - base)
    beside = tl.where(o_c[None, :] == labels.y[:, None], 0.0, e)
    return top, d * shrink + tl.sum(e, 1), others * shrink + tl.sum(beside, 1)


@triton.jit
def parts_of(x, m, d, others, o_c, labels, s, ROUGH: tl.constexpr):
    is_label = labels.live[:, None] & (o_c[None, :] == labels.y[:, None])
    z = x - m[:, None]
    p = tl.where(labels.live[:, None], exp_below_zero(z, ROUGH) * (s / d)[:, None], 0.0)
    largest = tl.where(labels.live[:, None], z - log(d)[:, None], -float("inf"))
    missed = others / d * s
    return Parts(tl.where(is_label, p, 0.0), tl.where(is_label, missed[:, None], 0.0), tl.where(is_label, 0.0, p), largest)


@triton.jit
def parts_add(a, b):
    return Parts(a.hit + b.hit, a.missed + b.missed, a.stray + b.stray, tl.maximum(a.largest, b.largest))


@triton.jit
def store_parts(p, o_c, C, parts):
    """Over the positions, (4, C) at p."""
    tl.store(p + o_c, tl.sum(parts.hit, 0), o_c < C)
    tl.store(p + C + o_c, tl.sum(parts.missed, 0), o_c < C)
    tl.store(p + 2 * C + o_c, tl.sum(parts.stray, 0), o_c < C)
    tl.store(p + 3 * C + o_c, tl.max(parts.largest, 0), o_c < C)


@triton.jit
def image_rows(i_image, i_tile, per_image, S, ROWS: tl.constexpr):
    """Rows of tile i_tile of an image, which has `per_image` outer indices."""
    across = (S + ROWS - 1) // ROWS
    i_outer = i_image * per_image + i_tile // across
    o_s = (i_tile % across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return Rows(i_outer, o_s, o_s < S, i_outer * S + o_s)


@triton.jit
def class_sums(p_sums, p_totals, C, chunks, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """(images, 4, C) float64 totals of the programs of each image, for BLOCK classes."""
    blocks = (C + BLOCK - 1) // BLOCK
    i_image = (tl.program_id(0) // blocks).to(tl.int64)
    o_c = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    o_p = tl.arange(0, PARTS)
    for quantity in tl.static_range(4):
        total = tl.zeros((PARTS, BLOCK), tl.float64)
        if quantity == 3:
            total = total - float("inf")
        for start in range(0, chunks, PARTS):
            m = ((start + o_p) < chunks)[:, None] & (o_c < C)[None, :]
            p = p_sums + ((i_image * chunks + start + o_p)[:, None] * 4 + quantity) * C + o_c[None, :]
            if quantity == 3:
                total = tl.maximum(total, tl.load(p, m, other=-float("inf")).to(tl.float64))
            else:
                total += tl.load(p, m, other=0.0).to(tl.float64)
        if quantity == 3:
            tl.store(p_totals + (i_image * 4 + quantity) * C + o_c, tl.max(total, 0), o_c < C)
        else:
            tl.store(p_totals + (i_image * 4 + quantity) * C + o_c, tl.sum(total, 0), o_c < C)


@triton.jit
def class_of(p_totals, i_image, o_c, C, quantity):
    other = 0.0 if quantity < 3 else -float("inf")
    return tl.load(p_totals + (i_image * 4 + quantity) * C + o_c, o_c < C, other=other)


@triton.jit
def class_result(p_totals, i_image, o_c, C, smooth, CLASS: tl.constexpr, OPTIONS: tl.constexpr):
    """What the formula makes of the sums of BLOCK classes."""
    hit = class_of(p_totals, i_image, o_c, C, 0)
    missed = class_of(p_totals, i_image, o_c, C, 1)
    stray = class_of(p_totals, i_image, o_c, C, 2)
    return CLASS(smooth, hit, missed, stray, class_of(p_totals, i_image, o_c, C, 3), OPTIONS)


@triton.jit
def class_losses(
    p_totals, p_weight, p_loss, p_images, p_slopes, C, smooth: tl.float64,
    CLASS: tl.constexpr, OPTIONS: tl.constexpr, EXCLUDE: tl.constexpr, REDUCTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of an image: class losses and their derivatives p_slopes (images, 2, C), the image's loss and whether it counts."""
    i_image = tl.program_id(0).to(tl.int64)
    s = tl.full((), smooth, tl.float64)
    some = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        some += class_of(p_totals, i_image, o_c, C, 0) + class_of(p_totals, i_image, o_c, C, 1)
    some = tl.max(((some <= 0) == 0).to(tl.int32), 0) > 0  # an image without counted positions has no loss; NaN counts
    mass = tl.zeros((BLOCK,), tl.float64)
    total = mass
    for start in range(0, C, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        r = class_result(p_totals, i_image, o_c, C, s, CLASS, OPTIONS)
        loss = tl.where(some, r.loss, 0.0)
        w = tl.load(p_weight + o_c, o_c < C, other=0.0).to(tl.float64) if p_weight is not None else (o_c < C).to(tl.float64)
        w = tl.where(some & (r.present if EXCLUDE else o_c < C), w, 0.0)
        mass += w
        total += tl.where(w == 0, 0.0, w * loss)
        if REDUCTION == NONE:
            tl.store(p_loss + i_image * C + o_c, loss.to(p_loss.dtype.element_ty), o_c < C)
    mass = tl.sum(mass, 0)
    total = tl.sum(total, 0)
    if REDUCTION == MEAN:
        total = tl.where(mass != 0, total / tl.where(mass != 0, mass, 1.0), 0.0)
    n = tl.num_programs(0)
    tl.store(p_images + i_image, total)
    tl.store(p_images + n + i_image, tl.where(mass != 0, 1.0, 0.0))
    if p_slopes is not None:
        for start in range(0, C, BLOCK):
            o_c = start + tl.arange(0, BLOCK)
            r = class_result(p_totals, i_image, o_c, C, s, CLASS, OPTIONS)
            factor = tl.where(some, tl.full((BLOCK,), 1.0, tl.float64), 0.0)
            if REDUCTION != NONE:
                w = tl.load(p_weight + o_c, o_c < C, other=0.0).to(tl.float64) if p_weight is not None else factor
                factor = tl.where(r.present, w, 0.0) if EXCLUDE else factor * w
                if REDUCTION == MEAN:
                    factor = tl.where(mass != 0, factor / tl.where(mass != 0, mass, 1.0), 0.0)
            at = p_slopes + i_image * 2 * C + o_c
            tl.store(at, tl.where(factor == 0, 0.0, factor * r.pull).to(p_slopes.dtype.element_ty), o_c < C)
            tl.store(at + C, tl.where(factor == 0, 0.0, factor * r.push).to(p_slopes.dtype.element_ty), o_c < C)


@triton.jit
def class_slopes(p_slopes, p_up, image, o_c, is_label, C, REDUCTION: tl.constexpr):
    """q [ROWS, BLOCK], without the factor that all classes share: their differences are exact then."""
    at = image[:, None] * C + o_c[None, :]
    inside = (image >= 0)[:, None] & (o_c < C)[None, :]
    push = tl.load(p_slopes + image[:, None] * 2 * C + (C + o_c)[None, :], inside, other=0.0)
    pull = tl.load(p_slopes + image[:, None] * 2 * C + o_c[None, :], inside & is_label, other=0.0)
    q = push - pull
    if REDUCTION == NONE:
        q = q * tl.load(p_up + at, inside, other=0.0)
        return tl.where(inside, q, 0.0)
    else:
        return q
