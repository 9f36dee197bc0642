"""Symmetric InfoNCE of two batches of vectors whose equal rows belong together.

U = norm(a) norm(b)^T / temperature          L_i = (CE(U_i, i) + CE(U^T_i, i)) / 2
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .. import check
from ..linear_fused import product
from ..module import LossModule, arguments_of
from ..spec import LossSpec, register
from . import _stored
from ._own import REDUCTIONS, full_precision, fused_or_reference, reduced, temperature_of, unit, vectors
from .cross_entropy import SPEC as CROSS_ENTROPY
from .cross_entropy import cross_entropy


def reference(a: Tensor, b: Tensor, *, temperature: float | Tensor, symmetric: bool, label_smoothing: float) -> Tensor:
    """(N) losses."""
    with full_precision(a):
        similarity = unit(a) @ unit(b).T / temperature
    value = _smoothed_nll(similarity, label_smoothing)
    return (value + _smoothed_nll(similarity.T, label_smoothing)) / 2 if symmetric else value


def _smoothed_nll(logits: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy of each row of (N, N) with its own index."""
    logp = torch.log_softmax(logits, dim=1)
    value = -logp.diagonal()
    if label_smoothing > 0:
        value = (1 - label_smoothing) * value - label_smoothing / max(len(logp), 1) * logp.sum(dim=1)
    return value


def fused(
    a: Tensor, b: Tensor, *, temperature: float | Tensor, symmetric: bool, label_smoothing: float, reduction: str
) -> Tensor:
    """The reduced loss: of stored similarities, or by two losses of a linear layer whose weight is the other batch."""
    if reduction != "none" and _stored.fits(a, matrices=3):
        compute = partial(_both_ways, _stored.units(a, b), temperature, symmetric, label_smoothing, reduction)
        return _stored.ahead(compute, a, b, temperature)
    a, b = unit(a), unit(b)

    def one_way(h: Tensor, w: Tensor) -> Tensor:
        rows, own = product(h / temperature, w, None), torch.arange(len(h), device=h.device)
        return cross_entropy(rows, own, label_smoothing=label_smoothing, reduction=reduction, backend="cpu")

    return (one_way(a, b) + one_way(b, a)) / 2 if symmetric else one_way(a, b)


def _both_ways(
    vectors: _stored.Units,  # of a and b
    temperature: float | Tensor,
    symmetric: bool,
    label_smoothing: float,
    reduction: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss of stored similarities and the gradients that are wanted: of a, b and the temperature."""
    a, b = vectors.batches(vectors.unit)
    divisor = (len(a) if reduction == "mean" else 1) * (2 if symmetric else 1)
    call = _stored.own_class(len(a), divisor, label_smoothing)
    similarity = (a / temperature) @ b.T
    loss, grad = _stored.row_loss(call, similarity, any(wanted))
    if symmetric:
        other, across = _stored.row_loss(call, similarity.T, any(wanted))
        loss += other
        if grad is not None and across is not None:
            grad += across.T
    if grad is None:
        return loss, (None, None, None)
    of_units = torch.empty_like(vectors.unit)
    of_a, of_b = vectors.batches(of_units)
    if wanted[0] or wanted[2]:
        torch.mm(grad, b, out=of_a)
    if wanted[1] or wanted[2]:
        torch.mm(grad.T, a, out=of_b)
    return loss, vectors.gradients(of_units, temperature, wanted)


def info_nce_loss(
    a: Tensor,  # (N, D)
    b: Tensor,  # (N, D)
    *,
    temperature: float | Tensor = 0.07,  # or 0-d
    symmetric: bool = True,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    r"""Symmetric InfoNCE: each vector must find its partner among all vectors of the other batch.

    .. math::
        U_{ij} = \frac{\hat a_i \cdot \hat b_j}{T}, \qquad
        L_i = \tfrac12\left(\mathrm{CE}(U_{i\cdot}, i) + \mathrm{CE}(U_{\cdot i}, i)\right)

    Args:
        a, b: vectors; row i of one belongs to row i of the other. They are normalised inside.
        temperature: :math:`T`, above 0: a number, or a 0-d tensor that may require a gradient (T = 1 / scale).
        symmetric: average both directions; False looks up a in b alone.
        label_smoothing: mass spread uniformly over all N candidates.
        reduction: "mean", "sum" or "none" over the N pairs.
        backend: "cpu" is the kernels, "reference" plain PyTorch; None picks.

    **Convention**

    - the (N, N) similarity matrix is stored on the CPU where it and its gradients take at most 48 MiB, 2048 pairs in float32.
      Of more pairs, and with ``reduction="none"``, it is **never stored**: a block of rows at a time, its similarities become
      its loss and at once its share of the gradients, as in `linear_cross_entropy`. It is under torch.compile and torch.func,
      and on other devices.
    - a zero vector has similarity 0 to all others and gradient 0. No pairs give 0.
    - half precision is computed in float32, also under autocast; the loss is float32, or float64 if an input is.

    Paper: the loss of CLIP, with label smoothing as in Deuser et al., "Sample4Geo".

    >>> a = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> info_nce_loss(a, a, temperature=0.5)
    tensor(0.1269)
    """
    a, b = vectors(a=a, b=b)
    label_smoothing = check.number("label_smoothing", label_smoothing, least=0.0, most=1.0)
    check.choice("reduction", reduction, REDUCTIONS)
    chosen = fused_or_reference(SPEC, a, backend)
    scale, symmetric = temperature_of(temperature, a), bool(symmetric)
    if chosen == "cpu":
        return fused(a, b, temperature=scale, symmetric=symmetric, label_smoothing=label_smoothing, reduction=reduction)
    return reduced(reference(a, b, temperature=scale, symmetric=symmetric, label_smoothing=label_smoothing), reduction)


class InfoNCELoss(LossModule):
    """Symmetric InfoNCE: each vector must find its partner among all vectors of the other batch.

    Module form of `info_nce_loss`, which documents the arguments.
    """

    @arguments_of(info_nce_loss)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="info_nce",
        function="info_nce_loss",
        module="InfoNCELoss",
        family="contrastive",
        inputs="own",
        reference=reference,
        kernel=CROSS_ENTROPY.kernel,
        pack=CROSS_ENTROPY.pack,
        samples=({}, {"temperature": 0.5, "label_smoothing": 0.1}, {"symmetric": False}),
        paper="Radford et al. 2021, CLIP; Deuser et al. 2023, Sample4Geo",
    )
)
