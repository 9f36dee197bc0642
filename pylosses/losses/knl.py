"""k-hard negative learning, without labels: push down the strongest wrong classes.

    order the classes by descending logit, rank 0 the prediction          K = ranks skip + 1 ... skip + k, as far as they exist
    nl     L = -sum_{j in K} log(1 - p_j)
    logit  L = sum_{j in K} x_j

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
from ..spec import MOST_SELECTED, LossSpec, Pack, register
from .entropy import filter_argument, reliable
from .sparse_cl import or_nan, ranking


def reference(rows: Rows, *, k: int, skip: int, form: str, max_entropy: float | None) -> RowLoss:
    return reliable(lambda x: knl_rows(x, k, skip, form), rows.x, max_entropy)


def knl_rows(x: Tensor, k: int, skip: int, form: str) -> Tensor:
    need_negatives(x.shape[1], skip)
    logp = torch.log_softmax(x, dim=1)
    negatives = ranking(x)[:, skip + 1 : skip + 1 + k]
    if form == "nl":
        terms = -torch.log1p(-logp.gather(1, negatives).exp())  # p <= 1/2 below rank 0
    else:
        terms = x.gather(1, negatives)
        terms = torch.where(terms == -torch.inf, 0, terms)  # a masked class cannot be pushed further
    return or_nan(terms.sum(dim=1), logp)


def negative_arguments(k: int, skip: int, form: str) -> dict[str, int | str]:
    """The checked arguments that choose the negatives."""
    return {
        "k": check.integer("k", k, least=1),
        "skip": check.integer("skip", skip, least=0),
        "form": check.choice("form", form, ("nl", "logit")),
    }


def need_negatives(classes: int, skip: int) -> None:
    """Refuse logits without a class to push down: the loss would be 0 forever. One class has nothing to learn in any loss."""
    if 1 < classes < skip + 2:
        raise ValueError(
            f"input must have at least skip + 2 = {skip + 2} classes, the prediction, {skip} that are left alone and one to "
            f"push down, got {classes}; skip=0 leaves none alone"
        )


def pack(problem: Problem, *, k: int, skip: int, form: str, max_entropy: float | None) -> Pack:
    need_negatives(problem.classes, skip)
    return selection_pack("none", 1.0, k, skip, form, max_entropy)


def selection_pack(positive: str, negative: float, k: int, skip: int, form: str, max_entropy: float | None) -> Pack:
    """One kernel runs sparse-CL, k-NL and their sum: `positive` is the weight of the largest logit, `negative` that of k-NL."""
    limit, filtered = (0.0, 0.0) if max_entropy is None else (max_entropy, 1.0)
    scalars = ("none", "one", "prob").index(positive), negative, k, skip, form == "logit", limit, filtered
    return Pack(tuple(map(float, scalars)))


def too_many(*, k: int, skip: int, **_: object) -> str | None:
    """Why no kernel keeps so many classes of a row."""
    most = f"fused kernels keep the {MOST_SELECTED} largest classes of a row, 1 + skip + k = {1 + skip + k}"
    return most if 1 + skip + k > MOST_SELECTED else None


def knl_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    *,
    k: int = 5,
    skip: int = 5,
    form: str = "nl",
    max_entropy: float | None = None,
    mask: Tensor | None = None,  # bool, input's shape without the class dimension
    sample_weight: Tensor | None = None,  # shaped like mask
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""k-hard negative learning: lowers the k strongest classes after the prediction and `skip` others (inferred formula).

    .. math:: L = -\sum_{j \in K} \log(1 - p_j) \quad\text{or}\quad L = \sum_{j \in K} x_j

    with K the classes of rank `skip` + 1 to `skip` + `k` by descending logit, the prediction having rank 0.

    Args:
        input: logits.
        k: number of negatives, at least 1.
        skip: how many classes after the prediction are left alone, because one of them may be right.
        form: "nl", negative learning, or "logit", the plain sum of the logits.
        max_entropy: only rows with an entropy below it count. None keeps all.
        mask, sample_weight, reduction, normalizer, backend: as in `entropy_loss`.

    **Convention**

    - a sum over the negatives, not a mean. With fewer than `skip` + `k` + 1 classes there are fewer negatives (CIFAR-10 with
      the defaults has 4). Fewer than `skip` + 2 have none and raise ValueError, but a single class, which gives 0.
    - the lowest index comes first among equal logits; the choice carries no gradient.
    - ``-inf`` logits are masked classes: they rank last and add nothing, in either form.
    - `mean` divides by the sum of `sample_weight` over the rows that are in `mask` and pass the filter; the others give 0 and
      gradient 0. Nothing kept gives 0.
    - a row with NaN or ``+inf``, or with nothing but ``-inf``, gives NaN; the filter drops it.

    Paper: a test-time-adaptation paper (ICLR 2025 submission "Update larger, train faster"). Inferred: no equation of it was
    available; the formula follows the description in its appendix.

    >>> x = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    >>> knl_loss(x, k=2, skip=1, form="logit")
    tensor(1.)
    >>> knl_loss(x, k=2, skip=1)
    tensor(0.1238)
    """
    own = {**negative_arguments(k, skip, form), "max_entropy": filter_argument(max_entropy)}
    return unlabelled(
        SPEC, input, own, mask=mask, sample_weight=sample_weight, reduction=reduction, normalizer=normalizer, backend=backend
    )


class KNLLoss(LossModule):
    """k-hard negative learning: lowers the k strongest classes after the prediction and `skip` others (inferred formula).

    Module form of `knl_loss`, which documents the arguments.
    """

    @arguments_of(knl_loss, after=1)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="knl",
        function="knl_loss",
        module="KNLLoss",
        family="select",
        inputs="unlabelled",
        reference=reference,
        kernel="tta",
        pack=pack,
        beyond=too_many,
        samples=({}, {"k": 2, "skip": 0}, {"k": 3, "skip": 1, "form": "logit", "max_entropy": 1.5}),
        inferred=True,
        paper='ICLR 2025 submission "Update larger, train faster", from its description',
    )
)
