"""Sparse cross-logit plus k-hard negative learning, without labels.

    L = -max_j x_j + lam L_knl

Inferred: the paper's equation was not available; this is the reading that its appendix describes.
"""

from __future__ import annotations

from torch import Tensor

from .. import check
from ..call import Rows, unlabelled
from ..check import Problem
from ..module import LossModule, arguments_of
from ..reduce import RowLoss
from ..spec import LossSpec, Pack, register
from .entropy import filter_argument, reliable
from .knl import knl_rows, need_negatives, negative_arguments, selection_pack, too_many
from .sparse_cl import sparse_cl_rows


def reference(rows: Rows, *, k: int, skip: int, lam: float, form: str, max_entropy: float | None) -> RowLoss:
    def row_loss(x: Tensor) -> Tensor:
        return sparse_cl_rows(x, "one") + lam * knl_rows(x, k, skip, form)

    return reliable(row_loss, rows.x, max_entropy)


def pack(problem: Problem, *, k: int, skip: int, lam: float, form: str, max_entropy: float | None) -> Pack:
    need_negatives(problem.classes, skip)
    return selection_pack("one", lam, k, skip, form, max_entropy)


def tta_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    *,
    k: int = 5,
    skip: int = 5,
    lam: float = 1.0,
    form: str = "nl",
    max_entropy: float | None = None,
    mask: Tensor | None = None,  # bool, input's shape without the class dimension
    sample_weight: Tensor | None = None,  # shaped like mask
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Sparse cross-logit plus k-hard negative learning in one pass (inferred formula).

    .. math:: L = -\max_j x_j + \lambda\, L_{\mathrm{kNL}}

    Args:
        input: logits.
        k, skip, form: the negatives, as in `knl_loss`.
        lam: factor of the negative learning, at least 0.
        max_entropy: only rows with an entropy below it count; SAR uses 0.4 log C. None keeps all.
        mask, sample_weight, reduction, normalizer, backend: as in `entropy_loss`.

    **Convention**

    - the sum of `sparse_cl_loss` with weight "one" and `lam` times `knl_loss`, with their conventions; unbounded below.
    - fewer than `skip` + 2 classes raise ValueError, but a single class.
    - `mean` divides by the sum of `sample_weight` over the rows that are in `mask` and pass the filter; the others give 0 and
      gradient 0. Nothing kept gives 0.
    - a row with NaN or ``+inf``, or with nothing but ``-inf``, gives NaN; the filter drops it.

    Paper: a test-time-adaptation paper (ICLR 2025 submission "Update larger, train faster"). Inferred: no equation of it was
    available; the formula follows the description in its appendix, and the default of `lam` is a choice.

    >>> import torch
    >>> x = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    >>> tta_loss(x, k=2, skip=1, lam=0.5, form="logit")
    tensor(-2.5000)
    """
    own = {
        **negative_arguments(k, skip, form),
        "lam": check.number("lam", lam, least=0.0),
        "max_entropy": filter_argument(max_entropy),
    }
    return unlabelled(
        SPEC, input, own, mask=mask, sample_weight=sample_weight, reduction=reduction, normalizer=normalizer, backend=backend
    )


class TTALoss(LossModule):
    """Sparse cross-logit plus k-hard negative learning in one pass (inferred formula).

    Module form of `tta_loss`, which documents the arguments.
    """

    @arguments_of(tta_loss, after=1)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="tta",
        function="tta_loss",
        module="TTALoss",
        family="select",
        inputs="unlabelled",
        reference=reference,
        kernel="tta",
        pack=pack,
        beyond=too_many,
        samples=({}, {"k": 2, "skip": 1, "lam": 0.5, "max_entropy": 1.5}, {"k": 2, "skip": 0, "form": "logit"}),
        inferred=True,
        paper='ICLR 2025 submission "Update larger, train faster", from its description',
    )
)
