"""Feature contrastive loss.

    U_ii = a_i . p_i / T      U_ij = a_i . a_j / T (j != i)      U_iB = a_i . n_i / T      L_i = CE(U_i, i)

with unit vectors a (anchor), p (positive) and n (negative): the negatives of a row are the other anchors and its own n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import check
from ..linear_fused import product
from ..module import LossModule, arguments_of
from ..spec import LossSpec, register
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
    """The reduced loss, by that of a linear layer whose weight is the anchors; a row's own two pairs are given to it."""
    if negative_valid is not None:
        negative = torch.where(negative_valid[:, None], negative, 0)
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
        backend: "cpu" makes the similarities block by block, "reference" stores them; None picks.

    **Convention**

    - the (B, B) similarity matrix is **never stored** on the CPU, see `info_nce_loss`.
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
