"""Contrastive loss with a margin.

L_i = |a_i - p_i|^2 + max(0, gamma - |a_i - n_i|)^2
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import check
from ..module import LossModule, arguments_of
from ..spec import LossSpec, register
from ._own import REDUCTIONS, norms, only_reference, reduced, vectors


def reference(anchor: Tensor, positive: Tensor, negative: Tensor, *, gamma: float) -> Tensor:
    """(B) losses."""
    near = (anchor - positive).square().sum(dim=1)
    distance = norms(anchor - negative)[:, 0]
    return near + torch.relu(gamma - distance).square()


def contrastive_margin_loss(
    anchor: Tensor,  # (B, D)
    positive: Tensor,  # (B, D)
    negative: Tensor,  # (B, D)
    *,
    gamma: float = 1.0,
    reduction: str = "sum",
    backend: str | None = None,
) -> Tensor:
    r"""Contrastive margin loss: pull the positive in, push the negative out to a distance of gamma.

    .. math:: L_i = \lVert a_i - p_i \rVert^2 + \max(0, \gamma - \lVert a_i - n_i \rVert)^2

    Args:
        anchor: features of the samples.
        positive: features of the samples with a low-utility perturbation, see `utility_perturbation`.
        negative: features of the samples with a high-utility perturbation.
        gamma: margin, at least 0.
        reduction: "sum" (the paper's), "mean" or "none".
        backend: "reference" or None; others raise with the reason.

    **Convention**

    - distances are Euclidean and the vectors are not normalised; the paper names neither the distance nor gamma's value.
    - a negative on its anchor gives gamma^2 with gradient 0; one at gamma or farther gives 0. No rows give 0.
    - half precision is computed in float32; the loss is float32, or float64 if an input is.

    Paper: "Balancing Robustness and Sensitivity using Feature Contrastive Learning", equation (9).

    >>> z = torch.tensor([[0.0, 0.0]])
    >>> contrastive_margin_loss(z, z + 0.5, z + 0.25, gamma=1.0)
    tensor(0.9179)
    """
    anchor, positive, negative = vectors(anchor=anchor, positive=positive, negative=negative)
    gamma = check.number("gamma", gamma, least=0.0)
    check.choice("reduction", reduction, REDUCTIONS)
    only_reference(SPEC, backend)
    return reduced(reference(anchor, positive, negative, gamma=gamma), reduction)


class ContrastiveMarginLoss(LossModule):
    """Contrastive margin loss: pull the positive in, push the negative out to a distance of gamma.

    Module form of `contrastive_margin_loss`, which documents the arguments.
    """

    @arguments_of(contrastive_margin_loss, after=3)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="contrastive_margin",
        function="contrastive_margin_loss",
        module="ContrastiveMarginLoss",
        family="contrastive",
        inputs="own",
        reference=reference,
        missing={"cpu": "it has no matrix of similarities: a few passes over the vectors, in plain PyTorch"},
        samples=({}, {"gamma": 3.0, "reduction": "mean"}),
        default_reduction="sum",
        paper="Balancing Robustness and Sensitivity using Feature Contrastive Learning, eq. (9)",
    )
)
