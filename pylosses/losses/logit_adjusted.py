"""Logit-adjusted cross-entropy: cross-entropy after adding the log prior of each class.

u_j = x_j + tau log(s_j / sum_k s_k)          L = w_y (lse(u) - u_y)
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .. import check
from ..call import Rows, labelled
from ..check import Problem
from ..module import LossModule, arguments_of
from ..plain import is_eager, plain
from ..reduce import RowLoss, weighted
from ..spec import LossSpec, Pack, PerClass, register


def reference(rows: Rows, *, class_counts: Tensor, tau: float) -> RowLoss:
    value = -rows.label(torch.log_softmax(rows.x + _log_prior(class_counts, tau), dim=1))
    w = rows.label_weight()
    return RowLoss(value if w is None else weighted(w, value), w)


def _log_prior(class_counts: Tensor, tau: float) -> Tensor:
    """(C) tau log(s_j / sum s) in the dtype of the counts; -inf without samples, whatever tau is."""
    counts = class_counts.double()
    none = counts == 0
    prior = tau * (torch.where(none, 1, counts) / counts.sum()).log()
    return torch.where(none, -torch.inf, prior).to(class_counts.dtype)


def pack(problem: Problem, *, class_counts: Tensor, tau: float) -> Pack:
    return Pack((0.0, 1.0, 0.0, 0.0), shift=_log_prior(class_counts, tau))


def logit_adjusted_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    target: Tensor,  # (), (N) or (N, *)
    *,
    class_counts: Tensor,  # (C)
    tau: float = 1.0,
    weight: Tensor | None = None,  # (C)
    sample_weight: Tensor | None = None,  # shaped like target
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    check_labels: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Logit-adjusted cross-entropy, for classes of unequal frequency.

    .. math:: u_j = x_j + \tau \log\frac{s_j}{\sum_k s_k}, \quad L = w_y\,(\mathrm{lse}(u) - u_y)

    Args:
        input: logits.
        target: class indices (uint8, int16, int32 or int64).
        class_counts: number of training samples of each class, any real dtype.
        tau: strength of the adjustment, at least 0.
        weight, sample_weight, ignore_index, reduction, normalizer, check_labels, backend: as in `cross_entropy`.

    **Convention**

    - the same as `cross_entropy` with `bias` = tau log prior; balanced counts give plain cross-entropy.
    - a class without samples is masked (bias ``-inf``, also with `tau` 0): gradient 0; a row labelled with it gives ``+inf``.
      Pass ``class_counts.clamp(min=1)`` to keep it; `LogitAdjustedLoss` warns.
    - `mean` divides by the sum of `weight[target] * sample_weight` over counted rows.
    - ignored rows are never read, give 0 and gradient 0; nothing counted gives 0; a label outside [0, C) raises IndexError.

    Paper: Menon et al., "Long-Tail Learning via Logit Adjustment".

    >>> x = torch.zeros(1, 2)
    >>> logit_adjusted_loss(x, torch.tensor([1]), class_counts=torch.tensor([90, 10]))
    tensor(2.3026)
    """
    _check_counts(class_counts)
    own = {"tau": check.number("tau", tau, least=0.0)}
    return labelled(
        SPEC, input, target, own, vectors={"class_counts": class_counts}, weight=weight, sample_weight=sample_weight,
        ignore_index=ignore_index, reduction=reduction, normalizer=normalizer, check_labels=check_labels, backend=backend,
    )  # fmt: skip


def _check_counts(class_counts: Tensor) -> None:
    if not isinstance(class_counts, Tensor):
        raise TypeError(f"class_counts must be a Tensor of shape (C,), got {type(class_counts).__name__}")
    if class_counts.device.type != "cpu" or not is_eager():  # reading the values would wait for the device
        return
    class_counts = plain("class_counts", class_counts)
    if not bool(((class_counts >= 0) & (class_counts < torch.inf)).all()):
        raise ValueError("class_counts must be finite and not negative")
    if not bool((class_counts > 0).any()):
        raise ValueError("class_counts must have at least one class with samples, got none")


class LogitAdjustedLoss(LossModule):
    """Logit-adjusted cross-entropy; module form of `logit_adjusted_loss`, which documents the arguments."""

    class_counts: Tensor

    @arguments_of(logit_adjusted_loss)
    def __init__(self) -> None:
        _check_counts(self.class_counts)
        empty = int((self.class_counts == 0).sum())
        if empty:
            warnings.warn(
                f"class_counts has {empty} classes without samples: they are masked, and a row labelled with one gives +inf; "
                "class_counts.clamp(min=1) keeps them",
                stacklevel=2,
            )


SPEC = register(
    LossSpec(
        name="logit_adjusted",
        function="logit_adjusted_loss",
        module="LogitAdjustedLoss",
        family="softmax",
        inputs="labelled",
        reference=reference,
        kernel="cross_entropy",
        pack=pack,
        samples=(
            {"class_counts": PerClass(1.0, 1000.0)},
            {"class_counts": PerClass(1.0, 1000.0), "tau": 1.5, "weight": PerClass(0.5, 2.0)},
        ),
        paper="Menon et al. 2021, Long-Tail Learning via Logit Adjustment",
    )
)
