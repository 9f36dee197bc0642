"""Sparse cross-logit, without labels: raise the largest logit.

    m = argmax_j x_j          L = -v x_m,  v = 1 or p_m (a constant for the gradient)

Inferred: the paper's equation was not available; this is the reading that its appendix describes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import check
from ..call import Rows, unlabelled
from ..check import Problem
from ..module import LossModule, arguments_of
from ..reduce import RowLoss
from ..spec import LossSpec, Pack, register
from .entropy import filter_argument, reliable


def reference(rows: Rows, *, weight: str, max_entropy: float | None) -> RowLoss:
    return reliable(lambda x: sparse_cl_rows(x, weight), rows.x, max_entropy)


def sparse_cl_rows(x: Tensor, weight: str) -> Tensor:
    logp = torch.log_softmax(x, dim=1)
    top = ranking(x)[:, :1]
    value = -x.gather(1, top)[:, 0]
    if weight == "prob":
        value = value * logp.detach().gather(1, top)[:, 0].exp()
    return or_nan(value, logp)


def ranking(x: Tensor) -> Tensor:
    """(R, C) class indices by descending logit, the lowest index first among equals."""
    return x.detach().sort(dim=1, descending=True, stable=True).indices


def or_nan(value: Tensor, logp: Tensor) -> Tensor:
    """(R) `value`, but NaN with a NaN gradient in rows that have no softmax: a NaN, +inf, or nothing but -inf."""
    return torch.where(logp.isnan().any(dim=1), logp.sum(dim=1), value)


def pack(problem: Problem, *, weight: str, max_entropy: float | None) -> Pack:
    from .knl import selection_pack  # which stands on this file

    return selection_pack(weight, 0.0, 0, 0, "nl", max_entropy)


def sparse_cl_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    *,
    weight: str = "one",
    max_entropy: float | None = None,
    mask: Tensor | None = None,  # bool, input's shape without the class dimension
    sample_weight: Tensor | None = None,  # shaped like mask
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Sparse cross-logit loss: raises the largest logit and touches no other (inferred formula).

    .. math:: m = \arg\max_j x_j, \quad L = -v\,x_m, \quad v = 1 \text{ or } p_m

    Args:
        input: logits.
        weight: "one", or "prob" for the probability of the largest class, a constant for the gradient.
        max_entropy: only rows with an entropy below it count. None keeps all.
        mask, sample_weight, reduction, normalizer, backend: as in `entropy_loss`.

    **Convention**

    - unbounded below; the lowest index wins among equal logits; one class gives -x_0.
    - `mean` divides by the sum of `sample_weight` over the rows that are in `mask` and pass the filter; the others give 0 and
      gradient 0. Nothing kept gives 0.
    - a row with NaN or ``+inf``, or with nothing but ``-inf``, gives NaN; the filter drops it.

    Paper: a test-time-adaptation paper (ICLR 2025 submission "Update larger, train faster"). Inferred: no equation of it was
    available; the formula follows the description in its appendix.

    >>> x = torch.tensor([[2.0, 0.5, 2.0]], requires_grad=True)
    >>> loss = sparse_cl_loss(x)
    >>> loss.backward()
    >>> loss.item(), x.grad.tolist()
    (-2.0, [[-1.0, 0.0, 0.0]])
    """
    own = {"weight": check.choice("weight", weight, ("one", "prob")), "max_entropy": filter_argument(max_entropy)}
    return unlabelled(
        SPEC, input, own, mask=mask, sample_weight=sample_weight, reduction=reduction, normalizer=normalizer, backend=backend
    )


class SparseCLLoss(LossModule):
    """Sparse cross-logit loss: raises the largest logit and touches no other (inferred formula).

    Module form of `sparse_cl_loss`, which documents the arguments.
    """

    @arguments_of(sparse_cl_loss, after=1)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="sparse_cl",
        function="sparse_cl_loss",
        module="SparseCLLoss",
        family="select",
        inputs="unlabelled",
        reference=reference,
        kernel="tta",
        pack=pack,
        samples=({}, {"weight": "prob"}, {"weight": "prob", "max_entropy": 1.5}),
        inferred=True,
        paper='ICLR 2025 submission "Update larger, train faster", from its description',
    )
)
