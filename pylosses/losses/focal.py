"""Softmax focal loss.

L = -w_y alpha_y (1 - p_y)^gamma log p_y
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import check
from ..call import Rows, labelled
from ..check import Problem
from ..module import LossModule, arguments_of
from ..reduce import RowLoss, weighted
from ..spec import LossSpec, Pack, PerClass, register


def reference(rows: Rows, *, gamma: float, alpha: Tensor | None) -> RowLoss:
    value = focal_rows(rows.label(torch.log_softmax(rows.x, dim=1)), gamma)
    if alpha is not None:
        value = value * rows.label(alpha)
    w = rows.label_weight()
    return RowLoss(value if w is None else weighted(w, value), w)


def focal_rows(logp: Tensor, gamma: float) -> Tensor:
    """-(1 - p)^gamma log p of (R) log-probabilities; finite derivative at p = 0 and at p = 1."""
    if gamma == 0:
        return -logp
    masked = logp == -torch.inf
    rest = -torch.expm1(torch.where(masked, 0, logp))  # 1 - p
    sure = (rest == 0) & ~masked
    factor = torch.where(sure, 0, torch.where(masked | sure, 1, rest) ** gamma)
    return -factor * logp


def pack(problem: Problem, *, gamma: float, alpha: Tensor | None) -> Pack:
    return Pack((gamma,), factor=alpha)


def focal_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    target: Tensor,  # (), (N) or (N, *)
    *,
    gamma: float = 2.0,
    alpha: Tensor | None = None,  # (C)
    weight: Tensor | None = None,  # (C)
    sample_weight: Tensor | None = None,  # shaped like target
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    check_labels: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Softmax focal loss: cross-entropy that counts confident rows less.

    .. math:: L = -w_y\,\alpha_y\,(1 - p_y)^\gamma \log p_y

    Args:
        input: logits.
        target: class indices (uint8, int16, int32 or int64).
        gamma: focusing exponent, at least 0; 0 is cross-entropy.
        alpha: class factors that do not enter the mean's divisor.
        weight: class weights that do.
        sample_weight, ignore_index, reduction, normalizer, check_labels, backend: as in `cross_entropy`.

    **Convention**

    - one softmax over the classes, not C sigmoids; nothing is divided by C.
    - `mean` divides by the sum of `weight[target] * sample_weight` over counted rows; `alpha` does not enter.
    - ignored rows are never read, give 0 and gradient 0; nothing counted gives 0.
    - on the fused backends confident rows keep their relative precision: 1 - p_y is not computed by subtraction.
    - ``-inf`` logits are masked classes; a masked target gives ``+inf``; a label outside [0, C) raises IndexError.

    Paper: Lin et al., "Focal Loss for Dense Object Detection", in its softmax form.

    >>> x = torch.tensor([[2.0, 0.0, 0.0]])
    >>> focal_loss(x, torch.tensor([0]), gamma=2.0)
    tensor(0.0109)
    """
    own = {"gamma": check.number("gamma", gamma, least=0.0)}
    return labelled(
        SPEC, input, target, own, vectors={"alpha": alpha}, weight=weight, sample_weight=sample_weight,
        ignore_index=ignore_index, reduction=reduction, normalizer=normalizer, check_labels=check_labels, backend=backend,
    )  # fmt: skip


class FocalLoss(LossModule):
    """Softmax focal loss: cross-entropy that counts confident rows less.

    Module form of `focal_loss`, which documents the arguments.
    """

    @arguments_of(focal_loss)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="focal",
        function="focal_loss",
        module="FocalLoss",
        family="softmax",
        inputs="labelled",
        reference=reference,
        kernel="focal",
        pack=pack,
        samples=({}, {"gamma": 0.5, "alpha": PerClass(0.2, 1.0), "weight": PerClass(0.5, 2.0)}),
        paper="Lin et al. 2017, Focal Loss for Dense Object Detection",
    )
)
