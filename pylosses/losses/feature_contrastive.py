"""Feature contrastive loss.

    U_ii = a_i . p_i / T      U_ij = a_i . a_j / T (j != i)      U_iB = a_i . n_i / T      L_i = CE(U_i, i)

with unit vectors a (anchor), p (positive) and n (negative): the negatives of a row are the other anchors and its own n.
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


def reference(
    anchor: Tensor, positive: Tensor, negative: Tensor, *, temperature: float | Tensor, negative_valid: Tensor | None
) -> Tensor:
    """(B) losses."""
    if negative_valid is not None:
        negative = torch.where(negative_valid[:, None], negative, 0)  # a dropped negative is never read
    anchor, positive, negative = unit(anchor), unit(positive), unit(negative)
    with full_precision(anchor):
        others = anchor @ anchor.T / temperature
    itself = torch.eye(len(anchor), dtype=torch.bool, device=anchor.device)
    similarity = torch.where(itself, (anchor * positive).sum(dim=1, keepdim=True) / temperature, others)
    hard = (anchor * negative).sum(dim=1) / temperature
    if negative_valid is not None:
        hard = torch.where(negative_valid, hard, -torch.inf)
    return -torch.log_softmax(torch.cat([similarity, hard[:, None]], dim=1), dim=1).diagonal()


def fused(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    temperature: float | Tensor,
    negative_valid: Tensor | None,
    reduction: str,
) -> Tensor:
    """The reduced loss: of stored similarities, or by that of a linear layer whose weight is the anchors.

    A row's own two pairs are given to the layer.
    """
    if negative_valid is not None:
        negative = torch.where(negative_valid[:, None], negative, 0)
    if reduction != "none" and _stored.fits(anchor, matrices=2):
        compute = partial(_of_stored, _stored.units(anchor, positive, negative), temperature, negative_valid, reduction)
        return _stored.ahead(compute, anchor, positive, negative, temperature)
    anchor, positive, negative = unit(anchor), unit(positive), unit(negative)
    hard = (anchor * negative).sum(dim=1) / temperature
    if negative_valid is not None:
        hard = torch.where(negative_valid, hard, -torch.inf)
    values = torch.stack([(anchor * positive).sum(dim=1) / temperature, hard], dim=1)
    own = torch.arange(len(anchor), device=anchor.device)
    weight = torch.cat([anchor, anchor.new_zeros(1, anchor.shape[1])])  # the last class is the row's own negative
    rows = product(
        anchor / temperature, weight, None, given=(torch.stack([own, torch.full_like(own, len(own))], dim=1), values)
    )
    return cross_entropy(rows, own, reduction=reduction, backend="cpu")


def _of_stored(
    vectors: _stored.Units,  # of anchors, positives and negatives
    temperature: float | Tensor,
    negative_valid: Tensor | None,
    reduction: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss of stored similarities and the gradients that are wanted: of the vectors and the temperature."""
    a, p, n = vectors.batches(vectors.unit)
    rows = len(a)
    similarity = a.new_empty(rows, rows + 1)
    others = similarity[:, :rows]  # and, as the last class, the row's own negative
    torch.mm(a / temperature, a.T, out=others)
    others.diagonal().copy_((a * p).sum(dim=1) / temperature)
    similarity[:, rows] = (a * n).sum(dim=1) / temperature
    if negative_valid is not None:
        similarity[:, rows].masked_fill_(~negative_valid, -torch.inf)
    loss, grad = _stored.row_loss(_stored.own_class(rows, rows if reduction == "mean" else 1), similarity, any(wanted))
    if grad is None:
        return loss, (None, None, None, None)
    of_others, of_near, of_hard = grad[:, :rows], grad.diagonal()[:, None].clone(), grad[:, rows:]
    of_units = torch.empty_like(vectors.unit)
    of_a, of_p, of_n = vectors.batches(of_units)
    if wanted[0] or wanted[3]:
        of_others.diagonal().zero_()
        # An anchor has its own row and, as a negative, is in all others: one product for both.
        torch.mm(torch.add(of_others, of_others.T, out=others), a, out=of_a)
        of_a.addcmul_(of_near, p).addcmul_(of_hard, n)
    torch.mul(of_near, a, out=of_p)
    torch.mul(of_hard, a, out=of_n)
    return loss, vectors.gradients(of_units, temperature, wanted)


def feature_contrastive_loss(
    anchor: Tensor,  # (B, D)
    positive: Tensor,  # (B, D)
    negative: Tensor,  # (B, D)
    *,
    temperature: float | Tensor = 0.1,  # or 0-d
    negative_valid: Tensor | None = None,  # (B) bool
    reduction: str = "sum",
    backend: str | None = None,
) -> Tensor:
    r"""Feature contrastive loss: near a low-utility perturbation, far from a high-utility one and from the other samples.

    .. math::
        L_i = -\log \frac{e^{a_i \cdot p_i / T}}
        {e^{a_i \cdot p_i / T} + \sum_{j \ne i} e^{a_i \cdot a_j / T} + e^{a_i \cdot n_i / T}}

    with unit vectors :math:`a, p, n`. Gradients flow through the anchors that serve as negatives.

    Args:
        anchor: features of the samples.
        positive: features of the samples with a low-utility perturbation, see `utility_perturbation`.
        negative: features of the samples with a high-utility perturbation.
        temperature: :math:`T`, above 0: a number, or a 0-d tensor that may require a gradient.
        negative_valid: which negatives count; the paper drops one whose largest utility is below 1e-12.
        reduction: "sum" (the paper's), "mean" or "none".
        backend: "cpu" is the kernels, "reference" plain PyTorch; None picks.

    **Convention**

    - on the CPU the (B, B) similarity matrix is stored where it is small and **never stored** else, see `info_nce_loss`.
    - `mean` divides by B, with or without dropped negatives. A single row with a dropped negative gives 0, as do no rows.
    - a dropped negative is never read. A zero vector has similarity 0 and gradient 0.
    - half precision is computed in float32, also under autocast; the loss is float32, or float64 if an input is.

    Paper: "Balancing Robustness and Sensitivity using Feature Contrastive Learning", equation (6).

    >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> feature_contrastive_loss(z, z, -z, temperature=1.0)
    tensor(0.8152)
    """
    anchor, positive, negative = vectors(anchor=anchor, positive=positive, negative=negative)
    if negative_valid is not None:
        if not isinstance(negative_valid, Tensor) or negative_valid.dtype != torch.bool:
            what = negative_valid.dtype if isinstance(negative_valid, Tensor) else type(negative_valid).__name__
            raise TypeError(f"negative_valid must be a bool tensor, got {what}")
        if negative_valid.shape != anchor.shape[:1]:
            raise ValueError(
                f"negative_valid must have shape ({len(anchor)},) for anchor of shape {tuple(anchor.shape)}, "
                f"got {tuple(negative_valid.shape)}"
            )
        check.same_device("negative_valid", negative_valid, anchor)
    check.choice("reduction", reduction, REDUCTIONS)
    chosen = fused_or_reference(SPEC, anchor, backend)
    scale = temperature_of(temperature, anchor)
    if chosen == "cpu":
        return fused(anchor, positive, negative, temperature=scale, negative_valid=negative_valid, reduction=reduction)
    return reduced(reference(anchor, positive, negative, temperature=scale, negative_valid=negative_valid), reduction)


class FeatureContrastiveLoss(LossModule):
    """Feature contrastive loss: near a low-utility perturbation, far from a high-utility one and from the other samples.

    Module form of `feature_contrastive_loss`, which documents the arguments.
    """

    @arguments_of(feature_contrastive_loss, after=3)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="feature_contrastive",
        function="feature_contrastive_loss",
        module="FeatureContrastiveLoss",
        family="contrastive",
        inputs="own",
        reference=reference,
        kernel=CROSS_ENTROPY.kernel,
        pack=CROSS_ENTROPY.pack,
        samples=({}, {"temperature": 0.5, "reduction": "mean"}),
        default_reduction="sum",
        paper="Balancing Robustness and Sensitivity using Feature Contrastive Learning, eq. (6)",
    )
)
