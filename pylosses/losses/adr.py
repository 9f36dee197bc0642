"""Adaptive discriminative regularizer (ADR), without labels.

T = sum of p_j^2 (l2) or p_j (l1) over the `top` largest classes
phi = H / log C (entropy) or C / (C - 1) sum_j p_j (1 - p_j) (variance), of the row or its mean over the batch
L = (2 pi phi)^(-top / 2) exp(-T / (2 phi)) (gauss) or (sqrt(2 pi) phi)^(-top) exp(-T / (2 phi)) (literal)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import check
from ..call import Rows, unlabelled
from ..check import Problem
from ..module import LossModule, arguments_of
from ..reduce import RowLoss
from ..spec import MOST_SELECTED, LossSpec, Pack, register
from .entropy import entropy_rows
from .sparse_cl import ranking


def reference(rows: Rows, **own: Any) -> RowLoss:
    return RowLoss(adr_rows(rows, **own))


def adr_rows(rows: Rows, *, top: int, phi: str, scope: str, norm: str, form: str, detach_phi: bool) -> Tensor:
    x = rows.x
    check.integer("top", top, least=1, most=x.shape[1])  # the number of classes is known here
    p = torch.softmax(x, dim=1)
    selected = p.gather(1, ranking(x)[:, :top])
    concentration = (selected if norm == "l1" else selected.square()).sum(dim=1)
    uncertainty = _uncertainty(x, phi)
    if scope == "batch":
        uncertainty = _mean(uncertainty, rows.live).expand_as(concentration)
    if detach_phi:
        uncertainty = uncertainty.detach()
    return _density(concentration, uncertainty, top, top / 2 if form == "gauss" else top)


def _uncertainty(x: Tensor, phi: str) -> Tensor:
    """(R) from 0 for a certain row to 1 for a uniform one; 0 for a single class."""
    classes = x.shape[1]
    if phi == "entropy":
        return entropy_rows(x) / (math.log(classes) if classes > 1 else 1)
    logp = torch.log_softmax(x, dim=1)
    return (logp.exp() * -torch.expm1(logp)).sum(dim=1) * classes / max(classes - 1, 1)


def _mean(values: Tensor, live: Tensor | None) -> Tensor:
    if live is None:
        return values.sum() / max(len(values), 1)
    return torch.where(live, values, 0).sum() / live.sum().clamp(min=1)


def _density(concentration: Tensor, phi: Tensor, top: int, power: float) -> Tensor:
    """(2 pi)^(-top / 2) phi^-power exp(-concentration / (2 phi)), by its logarithm; 0 with derivative 0 at phi = 0."""

    def logarithm(concentration: Tensor, phi: Tensor) -> Tensor:
        return -top / 2 * math.log(2 * math.pi) - power * phi.log() - concentration / (2 * phi)

    # Derivatives carry up to four more powers of 1 / phi. Where even those vanish, powers of 1 / phi may already overflow.
    bare = phi.detach()
    vanishes = logarithm(concentration.detach(), bare) - 4 * bare.log() < math.log(torch.finfo(phi.dtype).tiny)
    vanishes = vanishes | (bare <= 0)
    return torch.where(vanishes, 0, logarithm(concentration, torch.where(vanishes, 1, phi)).exp())


def pack(problem: Problem, **own: Any) -> Pack:
    return Pack(regularizer_scalars(problem, **own))


def regularizer_scalars(
    problem: Problem, *, top: int, phi: str, scope: str, norm: str, form: str, detach_phi: bool
) -> tuple[float, ...]:
    check.integer("top", top, least=1, most=problem.classes)
    scalars = top, phi == "variance", scope == "batch", norm == "l1", form == "literal", detach_phi
    return tuple(map(float, scalars))


def too_many(*, top: int, **_: object) -> str | None:
    """Why no kernel keeps so many classes of a row."""
    most = f"fused kernels keep the {MOST_SELECTED} largest classes of a row, top = {top}"
    return most if top > MOST_SELECTED else None


def regularizer_arguments(top: int, phi: str, scope: str, norm: str, form: str, detach_phi: bool) -> dict[str, Any]:
    """The checked arguments of ADR."""
    return {
        "top": check.integer("top", top, least=1),
        "phi": check.choice("phi", phi, ("entropy", "variance")),
        "scope": check.choice("scope", scope, ("sample", "batch")),
        "norm": check.choice("norm", norm, ("l2", "l1")),
        "form": check.choice("form", form, ("gauss", "literal")),
        "detach_phi": bool(detach_phi),
    }


def adr_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    *,
    top: int,
    phi: str = "entropy",
    scope: str = "sample",
    norm: str = "l2",
    form: str = "gauss",
    detach_phi: bool = False,
    mask: Tensor | None = None,  # bool, input's shape without the class dimension
    sample_weight: Tensor | None = None,  # shaped like mask
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    r"""Adaptive discriminative regularizer: small for rows that concentrate on few classes, on the scale of their uncertainty.

    .. math:: L = (2\pi\varphi)^{-\tau/2} \exp\!\Big(-\frac{T}{2\varphi}\Big), \quad T = \sum_{j \in \text{top-}\tau} p_j^2

    Args:
        input: logits.
        top: number :math:`\tau` of the largest classes in T, between 1 and C.
        phi: the uncertainty :math:`\varphi`: "entropy", H / log C, or "variance", C / (C - 1) times the sum of p (1 - p).
        scope: "sample", each row's own uncertainty, or "batch", its mean over the counted rows.
        norm: "l2", or "l1" for T the sum of the probabilities themselves.
        form: "gauss", or "literal" for the factor :math:`(\sqrt{2\pi}\,\varphi)^{-\tau}`, as equation (4) is printed.
        detach_phi: treat the uncertainty as a constant for the gradient; descent then always concentrates the row.
        mask: rows that count; the others are never read.
        sample_weight: factor of each row; enters the mean's divisor, not the uncertainty of the batch.
        reduction, normalizer, backend: as in `cross_entropy`.

    **Convention**

    - the lowest index wins among equal logits; the choice of the largest classes carries no gradient.
    - a row without uncertainty (one-hot, or a single class) gives 0 and gradient 0. The "variance" formula is inferred: the
      paper gives none.
    - `mean` divides by the sum of `sample_weight` over the rows in `mask`; nothing counted gives 0.
    - it is **not monotone in confidence**, though the paper wants decisive predictions: with the defaults and one logit above
      equal others, descent lowers that logit until p_max is 0.71 (C = 10, `top` 2), 0.84 (C = 10, `top` 3) or 0.63 (C = 1000,
      `top` 2), but for nearly uniform rows of few classes, and raises it beyond. `detach_phi` always raises it.
    - scope "sample" is the paper's equations (7) to (17) and its text; its equation (4) averages over the batch: scope "batch".
    - ``-inf`` logits are masked classes, which count in C; a row with NaN or ``+inf``, or with nothing but ``-inf``, gives NaN,
      and through the shared uncertainty every row of its batch with scope "batch".

    Paper: "Adaptive Discriminative Regularization for Visual Classification", equations (3), (4), (7), (8).

    >>> x = torch.tensor([[2.0, 0.0, 0.0], [90.0, 0.0, 0.0]])
    >>> adr_loss(x, top=1, reduction="none")
    tensor([0.3074, 0.0000])
    """
    own = regularizer_arguments(top, phi, scope, norm, form, detach_phi)
    return unlabelled(
        SPEC, input, own, mask=mask, sample_weight=sample_weight, reduction=reduction, normalizer=normalizer, backend=backend
    )


class ADRLoss(LossModule):
    """Adaptive discriminative regularizer: small for rows that concentrate on few classes, on the scale of their uncertainty.

    Module form of `adr_loss`, which documents the arguments.
    """

    @arguments_of(adr_loss, after=1)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="adr",
        function="adr_loss",
        module="ADRLoss",
        family="select",
        inputs="unlabelled",
        reference=reference,
        kernel="adr",
        pack=pack,
        beyond=too_many,
        samples=(
            {"top": 1},
            {"top": 2, "phi": "variance", "norm": "l1", "scope": "batch"},
            {"top": 2, "form": "literal", "detach_phi": True},
        ),
        paper="Adaptive Discriminative Regularization for Visual Classification, eq. (3)-(8)",
    )
)
