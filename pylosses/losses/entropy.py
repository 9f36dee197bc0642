"""Entropy of the prediction, without labels: TENT, with SAR's filter of unreliable rows.

L = H = -sum_j p_j log p_j = lse(x) - sum_j p_j x_j
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import check
from ..call import Rows, unlabelled
from ..check import Problem
from ..module import LossModule, arguments_of
from ..reduce import RowLoss
from ..spec import LossSpec, Pack, register


def reference(rows: Rows, *, max_entropy: float | None) -> RowLoss:
    return reliable(entropy_rows, rows.x, max_entropy)


def entropy_rows(x: Tensor) -> Tensor:
    """(R) entropies of softmax(x), with 0 log 0 = 0."""
    x = x - x.detach().amax(dim=1, keepdim=True)  # both terms are then positive: nothing cancels
    finite = torch.where(x == -torch.inf, 0, x)
    return torch.logsumexp(x, dim=1) - (torch.softmax(x, dim=1) * finite).sum(dim=1)


def reliable(row_loss: Callable[[Tensor], Tensor], x: Tensor, max_entropy: float | None) -> RowLoss:
    """`row_loss` of the rows with an entropy below `max_entropy`; the others are out: value, mass and gradient 0."""
    if max_entropy is None:
        return RowLoss(row_loss(x))
    kept = entropy_rows(x.detach()) < max_entropy  # not a NaN row
    value = row_loss(torch.where(kept[:, None], x, 0))
    return RowLoss(torch.where(kept, value, 0), kept.to(x.dtype))


def pack(problem: Problem, *, max_entropy: float | None) -> Pack:
    return Pack((0.0, 0.0) if max_entropy is None else (max_entropy, 1.0))


def filter_argument(max_entropy: float | None) -> float | None:
    return max_entropy if max_entropy is None else check.number("max_entropy", max_entropy, least=-torch.inf)


def entropy_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    *,
    max_entropy: float | None = None,
    mask: Tensor | None = None,  # bool, input's shape without the class dimension
    sample_weight: Tensor | None = None,  # shaped like mask
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Entropy of the softmax, for adaptation without labels.

    .. math:: L = -\sum_j p_j \log p_j

    Args:
        input: logits.
        max_entropy: only rows with an entropy below it count. None keeps all. SAR's value is ``0.4 * math.log(C)``, which is
            for the caller to give.
        mask: rows that count; the others are never read.
        sample_weight: factor of each row; enters the mean's divisor.
        reduction, normalizer, backend: as in `cross_entropy`.

    **Convention**

    - in nats. `mean` divides by the sum of `sample_weight` over the rows that are in `mask` and pass the filter; the others
      give 0 and gradient 0. Nothing kept gives 0.
    - a row with an entropy equal to `max_entropy` is dropped, and so is a row with NaN. Without the filter, NaN shows.
    - ``-inf`` logits are masked classes: 0 log 0 is 0. One class, or one class left, gives 0; a row of ``-inf`` is a NaN row.

    Paper: Wang et al., "Tent: Fully Test-Time Adaptation by Entropy Minimization"; Niu et al., "Towards Stable Test-Time
    Adaptation in Dynamic Wild World" (SAR) for the filter.

    >>> x = torch.tensor([[0.0, 0.0], [9.0, 0.0]])
    >>> entropy_loss(x, reduction="none")
    tensor([0.6931, 0.0012])
    >>> entropy_loss(x, max_entropy=0.5)
    tensor(0.0012)
    """
    own = {"max_entropy": filter_argument(max_entropy)}
    return unlabelled(
        SPEC, input, own, mask=mask, sample_weight=sample_weight, reduction=reduction, normalizer=normalizer, backend=backend
    )


class EntropyLoss(LossModule):
    """Entropy of the softmax, for adaptation without labels.

    Module form of `entropy_loss`, which documents the arguments.
    """

    @arguments_of(entropy_loss, after=1)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="entropy",
        function="entropy_loss",
        module="EntropyLoss",
        family="entropy",
        inputs="unlabelled",
        reference=reference,
        kernel="entropy",
        pack=pack,
        samples=({}, {"max_entropy": 1.5}),
        paper="Wang et al. 2021, Tent; Niu et al. 2023, SAR",
    )
)
