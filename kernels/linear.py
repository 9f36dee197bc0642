"""Losses of a linear layer's output, x = h W^T + b, whose logits are never in memory.

Forward: the logits of the labels; the statistics of the rows, tile by tile, over parts of the classes; and a kernel over the
rows that adds the parts, in order, and has the family's formula. Backward makes the tiles again, twice:
    G = dL/dx,    dh = G W  (a program has rows, and walks over the classes),    dW = G^T h, db = G^T 1  (the other way round).
A program adds to its own rows of dh or dW, in memory, since they are longer than its registers hold: no atomics, one order. A
tile of zeros, such as most of HEM's, costs no second product.
"""

from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .launch import NUMBERS, REDUCTIONS, compiled_for, is_turing, launch
from .linear_tile import label_logits, load_rows, logits_of, ordered_rows, part_of, split, their_labels, times
from .tile import numbers
from .tuning import LINEAR_BYTES, LINEAR_LABELS, LINEAR_PROGRAMS, ROWS_ALONE, LinearTile, linear_gradient_tile, linear_tile


@triton.jit
def d_hidden(
    p_h, p_w, p_b, p_y, p_order, p_count, p_slopes, p_weight, p_shift, p_grad, h_at, w_at, C, D, count, each,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64, GRADIENT: tl.constexpr, FEATURES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """p_grad (parts of the classes, rows, D), zeros before."""
    k = numbers(k0, k1, k2, k3, ACC)
    rows = ordered_rows(p_order, p_count, tl.program_id(0) * ROWS, ROWS)
    labels = their_labels(p_y, rows)
    some = tl.max(rows.exists.to(tl.int32), 0)
    first, last = part_of(tl.program_id(1), each, C * some)
    p_grad += tl.program_id(1).to(tl.int64) * count * D
    for start in range(first, last, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        x = logits_of(p_h, p_w, p_b, h_at, w_at, rows, o_c, C, D, ROWS, BLOCK, STEP, TYPE, PRECISION, ACC)
        g = GRADIENT(p_slopes, rows, count, labels, x, o_c, k, p_weight, p_shift, C, FEATURES, ACC)
        if tl.max((g != 0).to(tl.int32)) > 0:  # over both at once: Triton 3.7 fails with a maximum of maxima
            parts = split(g, TYPE)
            for d in range(0, D, STEP):
                w = load_rows(p_w, w_at, o_c, o_c < C, d, D, STEP, TYPE)
                o_d = d + tl.arange(0, STEP)
                p = p_grad + rows.number[:, None] * D + o_d[None, :]
                m = rows.exists[:, None] & (o_d < D)[None, :]
                tl.store(p, tl.load(p, m, other=0.0) + times(parts, w, PRECISION, ACC), m)
            tl.debug_barrier()  # what a lane wrote another may read


@triton.jit
def d_weight(
    p_h, p_w, p_b, p_y, p_order, p_count, p_slopes, p_weight, p_shift, p_grad, p_bias, h_at, w_at, C, D, count, each,
    k0: tl.float64, k1: tl.float64, k2: tl.float64, k3: tl.float64, GRADIENT: tl.constexpr, FEATURES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """p_grad (parts of the rows, C, D), zeros before, and p_bias (parts, C); either may be absent."""
    k = numbers(k0, k1, k2, k3, ACC)
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, last = part_of(tl.program_id(1), each, tl.load(p_count).to(tl.int32))
    bias = tl.zeros((BLOCK,), ACC)
    for start in range(first, last, ROWS):
        rows = ordered_rows(p_order, p_count, start, ROWS)
        labels = their_labels(p_y, rows)
        x = logits_of(p_h, p_w, p_b, h_at, w_at, rows, o_c, C, D, ROWS, BLOCK, STEP, TYPE, PRECISION, ACC)
        g = GRADIENT(p_slopes, rows, count, labels, x, o_c, k, p_weight, p_shift, C, FEATURES, ACC)
        if p_bias is not None:
            bias += tl.sum(g, 0)
        if p_grad is not None:
            if tl.max((g != 0).to(tl.int32)) > 0:
                parts = split(tl.trans(g), TYPE)
                for d in range(0, D, STEP):
                    h = load_rows(p_h, h_at, rows.number, rows.exists, d, D, STEP, TYPE)
                    o_d = d + tl.arange(0, STEP)
                    o = (tl.program_id(1).to(tl.int64) * C + o_c)[:, None] * D + o_d[None, :]
                    m = (o_c < C)[:, None] & (o_d < D)[None, :]
                    tl.store(p_grad + o, tl.load(p_grad + o, m, other=0.0) + times(parts, h, PRECISION, ACC), m)
                tl.debug_barrier()
    if p_bias is not None:
        tl.store(p_bias + tl.program_id(1) * C + o_c, bias, o_c < C)


class Layer(NamedTuple):
    """The features as rows, and the layer."""

    h: Tensor  # (N, D)
    w: Tensor  # (C, D)
    b: Tensor | None  # (C)


def known_of(formula: Formula, call: Any, layer: Layer, saved: Tensor) -> dict[str, Any]:
    """What the kernels may ask for, by the names of their parameters."""
    k, options, features = formula.arguments(*call.scalars)
    given = (*map(float, k), *[0.0] * NUMBERS)[:NUMBERS]
    h, w, b = layer
    double = saved.dtype == torch.float64
    kind = h.dtype if h.dtype == w.dtype else saved.dtype
    if kind == torch.bfloat16 and triton.knobs.runtime.interpret:  # whose products of bfloat16 are none
        kind = saved.dtype
    names = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
    exact = torch.get_float32_matmul_precision() == "highest" or double
    return {
        "p_h": h, "p_w": w, "p_b": b, "p_y": call.y.view(-1), "p_weight": call.weight, "p_shift": call.shift,
        "p_factor": call.factor, "p_sample": call.sample_weight, "h_at": h.stride(), "w_at": w.stride(), "C": len(w),
        "D": h.shape[1], "count": len(h), "ignore": call.ignore_index, "p_saved": saved,
        **{f"k{i}": number for i, number in enumerate(given)}, "FORMULA": formula.row, "OPTIONS": options, **features,
        "REDUCTION": REDUCTIONS[call.reduction], "TYPE": names[kind], "PRECISION": "ieee" if exact else "tf32",
        "ACC": tl.float64 if double else tl.float32, **tiled(linear_tile(kind.itemsize, is_crowded(call, features))),
    }  # fmt: skip


def is_crowded(call: Any, features: dict[str, Any]) -> bool:
    """Whether a loss does more to a logit than plain sums: a shift, softcap, smoothing, LogitNorm, powers of errors."""
    return call.shift is not None or any(features.get(name) for name in ("CAPPED", "SMOOTH", "NORM", "POWER"))


def tiled(tile: LinearTile) -> dict[str, int]:
    warps = tile.warps // 2 if compiled_for() == "hip" else tile.warps  # they have 64 lanes there
    block = {"ROWS": tile.rows, "BLOCK": tile.classes, "STEP": tile.features}
    return block | {"num_warps": warps, "num_stages": tile.stages, "crowded": True}


def parts_of(tiles: int, most: int, step: int, size: int = 0) -> tuple[int, int]:
    """(parts, what each has) of `most` rows or classes, in steps, so that `tiles` programs times parts fill a GPU; fewer where
    what each part leaves, `size` bytes, would take too much memory."""
    steps = triton.cdiv(most, step)
    parts = min(steps, triton.cdiv(LINEAR_PROGRAMS, tiles), max(LINEAR_BYTES // max(size, 1), 1))
    each = triton.cdiv(steps, parts)
    return triton.cdiv(steps, each), each * step


def over_classes(known: dict[str, Any], kernel: Any, K: int, dtype: torch.dtype, **more: Any) -> Tensor:
    """Launch a kernel of tiles; (parts, K, rows) of what it leaves of each part of the classes."""
    tiles = triton.cdiv(known["count"], known["ROWS"])
    parts, each = parts_of(tiles, known["C"], known["BLOCK"])
    left = known["p_saved"].new_empty((parts, K, known["count"]), dtype=dtype)
    launch(kernel, (tiles, parts), p_parts=left, each=each, **known | more)
    return left


def over_rows(known: dict[str, Any], kernel: Any, **more: Any) -> None:
    """Launch a kernel over the rows alone."""
    given = known | {"ROWS": ROWS_ALONE, "num_warps": 4, "num_stages": 1} | more
    launch(kernel, (triton.cdiv(known["count"], ROWS_ALONE),), **given)


def ordered(counts: Tensor) -> dict[str, Tensor]:
    """The rows that count before the others, and their number, on the device."""
    return {"p_order": counts.logical_not().to(torch.uint8).argsort(stable=True), "p_count": counts.sum()}


def family_of(formula: Formula) -> Any:
    return import_module(f".linear_{formula.family}", __package__)


def launch_forward(formula: Formula, call: Any, layer: Layer, loss: Tensor, saved: Tensor) -> None:
    known = known_of(formula, call, layer, saved)
    y, classes = known["p_y"], known["C"]
    known |= ordered((y != call.ignore_index) & (y >= 0) & (y < classes))
    count = known["count"]
    known["p_label"] = saved[2 + formula.saved * count :]
    launch(label_logits, (triton.cdiv(count, LINEAR_LABELS.rows),), **known | tiled(LINEAR_LABELS))
    family_of(formula).forward(formula, call, known, loss)


def launch_backward(
    formula: Formula, call: Any, layer: Layer, saved: Tensor, up: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of h, W and b that are wanted, in the dtype of the statistics."""
    known = known_of(formula, call, layer, saved)
    count, classes, features = known["count"], known["C"], known["D"]
    known["p_label"] = saved[2 + formula.saved * count :]
    family = family_of(formula)
    slopes = saved.new_empty((family.SLOPES, count))
    over_rows(known, family.slopes, p_up=up.reshape(-1), p_slopes=slopes, p_weight_sum=family.weight_sum(formula, call))
    known |= ordered(slopes.ne(0).any(0))
    known |= {"p_slopes": slopes, "GRADIENT": family.gradient, "FEATURES": family.constants(known)}
    h = w = b = None
    kind = known["TYPE"].primitive_bitwidth // 8, is_crowded(call, known) or is_turing()  # 80 KiB else
    if wanted[0]:
        known |= tiled(linear_gradient_tile(*kind, of_rows=True))
        rows = triton.cdiv(count, known["ROWS"])
        parts, each = parts_of(rows, classes, known["BLOCK"], count * features * saved.element_size())
        h = saved.new_zeros((parts, count, features))
        launch(d_hidden, (rows, parts), p_grad=h, each=each, **known)
    if wanted[1] or wanted[2]:
        known |= tiled(linear_gradient_tile(*kind, of_rows=False))
        blocks = triton.cdiv(classes, known["BLOCK"])
        parts, each = parts_of(blocks, count, known["ROWS"], classes * features * saved.element_size())
        w = saved.new_zeros((parts, classes, features)) if wanted[1] else None
        b = saved.new_empty((parts, classes)) if wanted[2] else None
        launch(d_weight, (blocks, parts), p_grad=w, p_bias=b, each=each, **known)
    return tuple(None if t is None else t[0] if len(t) == 1 else t.sum(0) for t in (h, w, b))  # type: ignore[return-value]
