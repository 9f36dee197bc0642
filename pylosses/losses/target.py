"""The target-probability family: every loss that sees a row only through p = p_y.

ce       -log p                                    mae      1 - p
focal    -(1 - p)^gamma log p                      sumexp   1 / p - 1
gce      (1 - p^q) / q                             compsum  (p^(tau - 1) - 1) / (1 - tau), -log p at tau = 1
dco      -log(1 - (1 - p)^n)                       sce      -a log p - b floor (1 - p)

L = w_y alpha_y f(p)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import check
from ..call import Rows, labelled
from ..check import Problem
from ..module import LossModule, arguments_of
from ..reduce import RowLoss, weighted
from ..spec import LossSpec, Pack, PerClass, register
from .focal import focal_rows

#: In the order of the kernels.
KINDS = ("ce", "focal", "gce", "mae", "sumexp", "compsum", "dco", "sce")


def reference(rows: Rows, *, alpha: Tensor | None, **own: Any) -> RowLoss:
    value = target_rows(rows.label(torch.log_softmax(rows.x, dim=1)), **own)
    if alpha is not None:
        value = value * rows.label(alpha)
    w = rows.label_weight()
    return RowLoss(value if w is None else weighted(w, value), w)


def target_rows(
    logp: Tensor, *, kind: str, gamma: float, q: float, tau: float, n: float, a: float, b: float, floor: float
) -> Tensor:
    """f of (R) log-probabilities of the labels."""
    if kind == "ce":
        return -logp
    if kind == "focal":
        return focal_rows(logp, gamma)
    if kind == "gce":
        return -_expm1(q * logp) / q
    if kind == "mae":
        return -_expm1(logp)
    if kind == "sumexp":
        return torch.expm1(-logp)
    if kind == "compsum":
        return -logp if tau == 1 else _expm1((tau - 1) * logp) / (1 - tau)
    if kind == "dco":
        return _dco_rows(logp, n)
    value = -b * floor * -_expm1(logp)
    return value - a * logp if a > 0 else value  # 0 * inf at a masked target


def _expm1(x: Tensor) -> Tensor:
    """e^x - 1, and a derivative with all its digits where e^x is small: autograd would take (e^x - 1) + 1 for it."""
    return torch.where(x < -math.log(2), torch.exp(x) - 1, torch.expm1(x))


def _dco_rows(logp: Tensor, n: float) -> Tensor:
    """-log(1 - (1 - p)^n) of (R) log-probabilities; finite derivative at p = 0 and at p = 1."""
    if n == 1:
        return -logp
    rare = logp + math.log(n) < math.log(torch.finfo(logp.dtype).eps)  # 1 - (1 - p)^n is n p to rounding
    sure = logp == 0
    inside = torch.where(rare | sure, -1, logp)
    value = torch.where(rare, -logp - math.log(n), -_log1mexp(n * _log1mexp(inside)))
    return torch.where(sure, 0, value)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0; each branch sees only arguments at which it is accurate."""
    far = x < -math.log(2)
    return torch.where(
        far, torch.log1p(-torch.exp(torch.where(far, x, -1))), torch.log(-torch.expm1(torch.where(far, -0.5, x)))
    )


def pack(
    problem: Problem,
    *,
    kind: str,
    gamma: float,
    q: float,
    tau: float,
    n: float,
    a: float,
    b: float,
    floor: float,
    alpha: Tensor | None,
) -> Pack:
    return Pack((float(KINDS.index(kind)), gamma, q, tau, n, a, b, floor), factor=alpha)


def target_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    target: Tensor,  # (), (N) or (N, *)
    *,
    kind: str,
    gamma: float = 2.0,
    q: float = 0.7,
    tau: float = 1.0,
    n: float = 1,
    a: float = 1.0,
    b: float = 1.0,
    floor: float = -4.0,
    alpha: Tensor | None = None,  # (C)
    weight: Tensor | None = None,  # (C)
    sample_weight: Tensor | None = None,  # shaped like target
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    check_labels: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""The losses of the label's probability alone, by name.

    .. math:: L = w_y\,\alpha_y\,f(p_y)

    ============  ===========================================================================  ==============
    `kind`        :math:`f(p)`                                                                 arguments
    ============  ===========================================================================  ==============
    ``ce``        :math:`-\log p`
    ``focal``     :math:`-(1-p)^\gamma\log p`                                                  `gamma`
    ``gce``       :math:`(1-p^q)/q`, generalized cross-entropy                                 `q`
    ``mae``       :math:`1-p`, half the L1 distance to the one-hot label
    ``sumexp``    :math:`1/p-1 = \sum_{j\ne y} e^{x_j-x_y}`
    ``compsum``   :math:`(p^{\tau-1}-1)/(1-\tau)`, :math:`-\log p` at :math:`\tau=1`           `tau`
    ``dco``       :math:`-\log(1-(1-p)^n)`, the chance that one of n draws is right            `n`
    ``sce``       :math:`-a\log p-b\,\mathrm{floor}\,(1-p)`, symmetric cross-entropy           `a`, `b`, `floor`
    ============  ===========================================================================  ==============

    Args:
        input: logits.
        target: class indices (uint8, int16, int32 or int64).
        kind: one of the names above.
        gamma: focusing exponent of "focal", at least 0.
        q: exponent of "gce", above 0; 1 is "mae", towards 0 it becomes "ce".
        tau: exponent of "compsum", at least 0; 0 is "sumexp", 1 "ce", 1 + q "gce", 2 "mae".
        n: number of draws of "dco", at least 1; 1 is "ce".
        a, b: factors of the two terms of "sce", at least 0.
        floor: what "sce" takes for log 0, at most 0.
        alpha: class factors, for every kind, that do not enter the mean's divisor.
        weight: class weights that do.
        sample_weight, ignore_index, reduction, normalizer, check_labels, backend: as in `cross_entropy`.

    **Convention**

    - `mean` divides by the sum of `weight[target] * sample_weight` over counted rows; `alpha` does not enter.
    - ignored rows are never read, give 0 and gradient 0; nothing counted gives 0.
    - ``-inf`` logits are masked classes. A masked target gives the limit at p = 0: 1/q for "gce", 1 for "mae", 1/(tau - 1) for
      "compsum" with tau > 1, -b floor for "sce" with a = 0, else ``+inf``. Its gradient is finite, except for "sumexp" and
      "compsum" with tau < 1, which grow like powers of 1/p and overflow, loss and gradient, when p is small enough.
    - "dco": the paper's p is the probability of a whole sequence. Here it is that of each label, which for a language model is
      another loss: that of n draws at every step.
    - a label outside [0, C) raises IndexError.

    Paper: Lin et al. 2017 (focal), Zhang and Sabuncu 2018 (gce), Wang et al. 2019 (sce), Mao et al. 2023 (compsum, recalled);
    dco is the pass-at-n objective.

    >>> x = torch.tensor([[2.0, 0.0, 0.0]])
    >>> target_loss(x, torch.tensor([0]), kind="mae")
    tensor(0.2130)
    >>> target_loss(x, torch.tensor([1]), kind="sumexp")
    tensor(8.3891)
    """
    own = {
        "kind": check.choice("kind", kind, KINDS),
        "gamma": check.number("gamma", gamma, least=0.0),
        "q": check.number("q", q, above=0.0),
        "tau": check.number("tau", tau, least=0.0),
        "n": check.number("n", n, least=1.0),
        "a": check.number("a", a, least=0.0),
        "b": check.number("b", b, least=0.0),
        "floor": check.number("floor", floor, most=0.0),
    }
    return labelled(
        SPEC, input, target, own, vectors={"alpha": alpha}, weight=weight, sample_weight=sample_weight,
        ignore_index=ignore_index, reduction=reduction, normalizer=normalizer, check_labels=check_labels, backend=backend,
    )  # fmt: skip


class TargetLoss(LossModule):
    """The losses of the label's probability alone, by name.

    Module form of `target_loss`, which documents the arguments.
    """

    @arguments_of(target_loss)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="target",
        function="target_loss",
        module="TargetLoss",
        family="softmax",
        inputs="labelled",
        reference=reference,
        kernel="target",
        pack=pack,
        samples=(
            {"kind": "ce", "weight": PerClass(0.5, 2.0)},
            {"kind": "focal", "gamma": 0.5, "alpha": PerClass(0.2, 1.0)},
            {"kind": "gce"},
            {"kind": "mae"},
            {"kind": "sumexp"},
            {"kind": "compsum", "tau": 1.5},
            {"kind": "dco", "n": 4},
            {"kind": "sce", "a": 0.1, "alpha": PerClass(0.2, 1.0), "weight": PerClass(0.5, 2.0)},
        ),
        paper="Mao et al. 2023, Cross-Entropy Loss Functions (comp-sum), and the papers of its members",
    )
)
