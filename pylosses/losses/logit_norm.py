"""LogitNorm: cross-entropy of the logits divided by their length.

u = x / (temperature (|x|_2 + eps))          L = w_y (lse(u) - u_y)
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


def reference(rows: Rows, *, temperature: float, eps: float) -> RowLoss:
    x = rows.x
    masked = x == -torch.inf
    unmasked = torch.where(masked, 0, x)
    scale = 1 / (temperature * (_norm(unmasked) + eps))
    # A masked class stays masked; its share of the norm's derivative would be 0 * inf.
    u = torch.where(masked, x * scale.detach(), unmasked * scale)
    value = -rows.label(torch.log_softmax(u, dim=1))
    w = rows.label_weight()
    return RowLoss(value if w is None else weighted(w, value), w)


def _norm(x: Tensor) -> Tensor:
    """(R, 1) Euclidean norms that neither overflow nor underflow, with derivative 0 at a zero row."""
    largest = x.detach().abs().amax(dim=1, keepdim=True)
    zero = largest == 0
    unit = torch.where(largest > 0, largest, 1)
    squares = (x / unit).square().sum(dim=1, keepdim=True)
    return torch.where(zero, 0, unit * torch.where(zero, 1, squares).sqrt())


def pack(problem: Problem, *, temperature: float, eps: float) -> Pack:
    return Pack((temperature, eps))


def logit_norm_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    target: Tensor,  # (), (N) or (N, *)
    *,
    temperature: float = 0.04,
    eps: float = 1e-7,
    weight: Tensor | None = None,  # (C)
    sample_weight: Tensor | None = None,  # shaped like target
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    check_labels: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""LogitNorm: cross-entropy of the normalised logits, which bounds the confidence.

    .. math:: u = \frac{x}{T\,(\lVert x \rVert_2 + \epsilon)}, \quad L = w_y\,(\mathrm{lse}(u) - u_y)

    Args:
        input: logits.
        target: class indices (uint8, int16, int32 or int64).
        temperature: divides the normalised logits.
        eps: added to the norm.
        weight, sample_weight, ignore_index, reduction, normalizer, check_labels, backend: as in `cross_entropy`.

    **Convention**

    - the norm runs over the classes, also for (N, C, *) input.
    - a row of zeros gives log C and the exact gradient of the formula, (p - onehot) / (temperature eps): about 1e8 with the
      defaults. Raise `eps` for a head that starts at zero.
    - ``-inf`` logits are masked classes: left out of the norm, probability and gradient 0. A masked target gives ``+inf`` with
      a finite gradient; a row of ``-inf``, or a row with ``+inf`` or NaN, gives NaN.
    - `mean` divides by the sum of `weight[target] * sample_weight` over counted rows.
    - ignored rows are never read, give 0 and gradient 0; nothing counted gives 0; a label outside [0, C) raises IndexError.

    Paper: Wei et al., "Mitigating Neural Network Overconfidence with Logit Normalization"; temperature 0.04 from
    "A Margin-Based Replacement for Cross-Entropy Loss", appendix A.2.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> logit_norm_loss(x, torch.tensor([0]), temperature=1.0)
    tensor(0.7981)
    """
    own = {
        "temperature": check.number("temperature", temperature, above=0.0),
        "eps": check.number("eps", eps, above=0.0),
    }
    return labelled(
        SPEC, input, target, own, weight=weight, sample_weight=sample_weight, ignore_index=ignore_index, reduction=reduction,
        normalizer=normalizer, check_labels=check_labels, backend=backend,
    )  # fmt: skip


class LogitNormLoss(LossModule):
    """LogitNorm: cross-entropy of the normalised logits, which bounds the confidence.

    Module form of `logit_norm_loss`, which documents the arguments.
    """

    @arguments_of(logit_norm_loss)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="logit_norm",
        function="logit_norm_loss",
        module="LogitNormLoss",
        family="softmax",
        inputs="labelled",
        reference=reference,
        kernel="logit_norm",
        pack=pack,
        samples=({}, {"temperature": 1.0, "eps": 1e-3, "weight": PerClass(0.5, 2.0)}),
        paper="Wei et al. 2022, Mitigating Neural Network Overconfidence with Logit Normalization",
    )
)
