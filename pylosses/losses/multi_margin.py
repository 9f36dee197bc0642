"""Multi-class margin loss: the mean of the margin errors over the classes.

    e_j = max(0, x_j - x_y + mu_j)^power (j != y)          L = w_y sum_j e_j / C

It is HEM without its threshold and without its count of positive errors.
"""

from __future__ import annotations

from torch import Tensor

from ..call import labelled
from ..module import LossModule, arguments_of
from ..spec import LossSpec, PerClass, register
from .hem import margin_arguments, pack, reference


def multi_margin_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    target: Tensor,  # (), (N) or (N, *)
    *,
    margin: float | Tensor = 1.0,  # or (C)
    power: float = 1.0,
    delta: float = 1e-4,
    margin_index: str = "logit",
    weight: Tensor | None = None,  # (C)
    sample_weight: Tensor | None = None,  # shaped like target
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    check_labels: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Multi-class margin loss: the mean over the classes of the margin errors.

    .. math:: e_j = \max(0, x_j - x_y + \mu_j)^{p}\ (j \ne y), \quad L = \frac{w_y}{C} \sum_j e_j

    Args:
        input: logits.
        target: class indices (uint8, int16, int32 or int64).
        margin: required distance between the label's logit and the others: one number or (C).
        power: exponent of each error.
        delta: below it, errors with `power` < 1 are linear, so that the slope stays finite; 0 is the exact power.
        margin_index: whose margin counts: "logit" takes it from the competing class, "label" from the label.
        weight, sample_weight, ignore_index, reduction, normalizer, check_labels, backend: as in `cross_entropy`.

    **Convention**

    - for `power` 1 and 2 and one margin it equals `torch.nn.functional.multi_margin_loss` with that `p`.
    - `mean` divides by the sum of `weight[target] * sample_weight` over counted rows, where torch divides by N.
    - the default margin of 1 is the paper's for this baseline, where HEM's own rule gives 0.1 to 0.5: see `hem_margins`. Its
      Table 1 takes `power` 0.5 and margin 0.5 for this loss as for HEM; equation (9) is `power` 1.
    - the divisor C counts the label and masked classes; the derivative at a zero error is 0.
    - ignored rows are never read, give 0 and gradient 0; nothing counted gives 0.
    - ``-inf`` logits are masked classes: error 0. A masked target gives ``+inf``; a row of ``-inf`` or with NaN gives NaN.
      A label outside [0, C) raises IndexError.

    Paper: equation (9) of "A Margin-Based Replacement for Cross-Entropy Loss".

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.5, -3.0, 0.25]])
    >>> multi_margin_loss(x, torch.tensor([0]))
    tensor(0.1875)
    """
    own = margin_arguments(margin, power, delta, margin_index)
    own["threshold"] = own["above_zero"] = False
    return labelled(
        SPEC, input, target, own, vectors={"margin": margin} if isinstance(margin, Tensor) else None, weight=weight,
        sample_weight=sample_weight, ignore_index=ignore_index, reduction=reduction, normalizer=normalizer,
        check_labels=check_labels, backend=backend,
    )  # fmt: skip


class MultiMarginLoss(LossModule):
    """Multi-class margin loss: the mean over the classes of the margin errors.

    Module form of `multi_margin_loss`, which documents the arguments.
    """

    @arguments_of(multi_margin_loss)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="multi_margin",
        function="multi_margin_loss",
        module="MultiMarginLoss",
        family="margin",
        inputs="labelled",
        reference=reference,
        kernel="hem",
        pack=pack,
        samples=(
            {},
            {"margin": PerClass(0.2, 2.0), "power": 0.5, "weight": PerClass(0.5, 2.0)},
            {"margin": PerClass(0.2, 2.0), "margin_index": "label", "power": 2.0},
        ),
        paper="A Margin-Based Replacement for Cross-Entropy Loss, eq. (9)",
    )
)
