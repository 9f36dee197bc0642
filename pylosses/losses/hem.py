"""High error margin (HEM) and its ablations.

    x_j = z_j - z_y + mu_j (j != y)      e_j = h(x_j), h(x) = x^power above 0, 0 below      t = mean_j e_j, detached
    L   = sum_{e_j >= t} e_j / #{e_j >= t}

Without `threshold` every positive error counts; without `above_zero` the divisor is C.
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
from ..plain import is_eager, plain
from ..reduce import RowLoss, weighted
from ..spec import LossSpec, Pack, PerClass, register


def reference(
    rows: Rows, *, margin: float | Tensor, power: float, delta: float, margin_index: str, threshold: bool, above_zero: bool
) -> RowLoss:
    x = rows.x
    assert rows.y is not None
    x_label = rows.label(x)[:, None]
    if isinstance(margin, Tensor) and margin_index == "label":
        margin = rows.label(margin)[:, None]
    raw = torch.where(x == -torch.inf, -torch.inf, x - x_label + margin)  # a masked class is never an error
    raw = raw.scatter(1, rows.y[:, None], -torch.inf)  # nor is the label
    errors = _power(raw, power, delta)
    classes = x.shape[1]
    kept = errors > 0
    if threshold:
        mean = errors.detach().sum(dim=1, keepdim=True) / classes
        kept = errors >= torch.minimum(mean, errors.detach().amax(dim=1, keepdim=True))  # rounding may lift the mean over all
    total = torch.where(kept, errors, 0).sum(dim=1)
    value = total / kept.sum(dim=1).clamp(min=1) if above_zero else total / classes
    w = rows.label_weight()
    if w is not None:
        value = weighted(w, value)
    # Comparisons drop NaN; a row with one, or with every class masked, has no margin to speak of.
    bad = raw.isnan().any(dim=1) | x_label[:, 0].isnan() | (x == -torch.inf).all(dim=1)
    value = value + torch.where(bad[:, None], x, 0).sum(dim=1) * torch.where(bad, torch.nan, 0.0)
    return RowLoss(value, w)


def _power(raw: Tensor, power: float, delta: float) -> Tensor:
    """h: relu(raw)^power, linear below `delta` when power < 1 so that its slope stays finite."""
    if power == 1:
        return torch.relu(raw)
    positive = raw > 0
    base = torch.where(positive, raw, 1)
    errors = base**power
    if power < 1 and delta > 0:
        errors = torch.where(base < delta, delta ** (power - 1) * base, errors)
    return torch.where(positive, errors, 0)


def pack(
    problem: Problem,
    *,
    margin: float | Tensor,
    power: float,
    delta: float,
    margin_index: str,
    threshold: bool,
    above_zero: bool,
) -> Pack:
    mu, shift = (0.0, margin) if isinstance(margin, Tensor) else (margin, None)
    return Pack((mu, power, delta, float(margin_index == "label"), float(threshold), float(above_zero)), shift=shift)


def margin_arguments(margin: float | Tensor, power: float, delta: float, margin_index: str) -> dict[str, object]:
    """The checked arguments that all margin losses share."""
    if isinstance(margin, Tensor):
        if margin.device.type == "cpu" and is_eager() and bool((plain("margin", margin) < 0).any()):
            raise ValueError(f"margin must not be negative, got a tensor with minimum {float(margin.min())}")
    else:
        margin = check.number("margin", margin, least=0.0)
    return {
        "margin": margin,
        "power": check.number("power", power, above=0.0),
        "delta": check.number("delta", delta, least=0.0),
        "margin_index": check.choice("margin_index", margin_index, ("logit", "label")),
    }


def hem_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    target: Tensor,  # (), (N) or (N, *)
    *,
    margin: float | Tensor = 1.0,  # or (C)
    power: float = 1.0,
    delta: float = 1e-4,
    margin_index: str = "logit",
    threshold: bool = True,
    above_zero: bool = True,
    weight: Tensor | None = None,  # (C)
    sample_weight: Tensor | None = None,  # shaped like target
    ignore_index: int = -100,
    reduction: str = "above_zero",
    normalizer: float | Tensor | None = None,
    check_labels: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""High error margin loss: the mean of the margin errors that reach their own mean.

    .. math::
        e_j = \max(0, x_j - x_y + \mu_j)^{p}\ (j \ne y), \quad t = \frac1C \sum_j e_j, \quad
        L = \frac{\sum_{e_j \ge t} e_j}{\#\{j : e_j \ge t\}}

    The threshold :math:`t` and the counts are constants for the gradient.

    Args:
        input: logits.
        target: class indices (uint8, int16, int32 or int64).
        margin: required distance between the label's logit and the others: one number or (C); see `hem_margins`.
        power: exponent of each error, applied before the threshold. 1 is the paper's equation, 0.5 reproduces its Table 1.
        delta: below it, errors with `power` < 1 are linear, so that the slope stays finite; 0 is the exact power.
        margin_index: whose margin counts: "logit" takes it from the competing class (the equation), "label" from the label.
        threshold: keep errors at or above their mean; False keeps all positive ones ("+maz").
        above_zero: divide by the number of kept errors; False divides by C ("+thres"; both off is `multi_margin_loss`).
        weight, sample_weight, ignore_index, reduction, normalizer, check_labels, backend: as in `cross_entropy`.

    **Convention**

    - `above_zero`, the default and the paper's rule, divides by the sum of `weight[target] * sample_weight` over rows with a
      loss above zero; `mean` over all counted rows.
    - the ablations have the paper's value for each row, both off that of `multi_margin_loss`. Its batch rule for "+thres" and
      for both off is the mean over the rows, which is ``reduction="mean"`` here: the default stays "above_zero".
    - with margins (C), as the equation has it, the margin is that of the competing class: rare *competitors* must keep the
      largest distance. Margins that grow with the rarity of the label, as class-balanced losses have them, are
      ``margin_index="label"``.
    - an error equal to the threshold is kept; the derivative at a zero error is 0.
    - ignored rows are never read, give 0 and gradient 0; no row above zero gives 0.
    - ``-inf`` logits are masked classes: error 0, but they count in C. A masked target gives ``+inf``, a row of ``-inf`` or a
      row with NaN gives NaN. A label outside [0, C) raises IndexError.

    Paper: "A Margin-Based Replacement for Cross-Entropy Loss", equations (1), (2).

    >>> x = torch.tensor([[1.0, 0.5, -3.0, 0.25]])
    >>> hem_loss(x, torch.tensor([0]), margin=1.0)
    tensor(0.3750)
    """
    own = margin_arguments(margin, power, delta, margin_index)
    own["threshold"], own["above_zero"] = bool(threshold), bool(above_zero)
    return labelled(
        SPEC, input, target, own, vectors={"margin": margin} if isinstance(margin, Tensor) else None, weight=weight,
        sample_weight=sample_weight, ignore_index=ignore_index, reduction=reduction, normalizer=normalizer,
        check_labels=check_labels, backend=backend,
    )  # fmt: skip


class HEMLoss(LossModule):
    """High error margin loss; module form of `hem_loss`, which documents the arguments."""

    @arguments_of(hem_loss)
    def __init__(self) -> None: ...

    @classmethod
    def from_class_counts(cls, counts: Tensor, M: float = 2000.0, shared: bool = False, **arguments: Any) -> HEMLoss:
        """With the margins that the paper derives from class counts, see `hem_margins`."""
        return cls(margin=hem_margins(counts, M=M, shared=shared), **arguments)


def hem_margins(class_counts: Tensor, *, M: float = 2000.0, shared: bool = False) -> Tensor:
    r"""Margins for `hem_loss` from the number of samples of each class.

    .. math:: \mu_j = \sqrt{M / (C s_j)}, \qquad \text{shared: } \mu = \sqrt{M / \textstyle\sum_j s_j}

    **Convention**: a class without samples counts as one sample (HEM); `shared=True` (HEM-) uses the plain sum, and gives (C)
    equal margins. Balanced counts give the same margins either way, sqrt(M / samples): 0.5 for 8,000 samples, 0.2 for 50,000,
    0.1 for 200,000, where the paper's baseline, `multi_margin_loss`, has 1. M is for numbers of images: counts of pixels give
    tiny margins. The result is float32, or float64 for float64 counts.

    Paper: "A Margin-Based Replacement for Cross-Entropy Loss", section 3; M = 2000 from its appendix.

    >>> hem_margins(torch.tensor([5000, 5000]))
    tensor([0.4472, 0.4472])
    """
    if not isinstance(class_counts, Tensor) or class_counts.dim() != 1 or class_counts.numel() == 0:
        what = tuple(class_counts.shape) if isinstance(class_counts, Tensor) else type(class_counts).__name__
        raise ValueError(f"class_counts must be a Tensor of shape (C,), got {what}")
    M = check.number("M", M, above=0.0)
    counts = class_counts.double()
    if bool((counts < 0).any()) or not bool(counts.isfinite().all()):
        raise ValueError("class_counts must be finite and not negative")
    if shared:
        margins = torch.full_like(counts, math.sqrt(M / max(float(counts.sum()), 1.0)))
    else:
        margins = (M / (len(counts) * counts.clamp(min=1))).sqrt()
    return margins if class_counts.dtype == torch.float64 else margins.float()


SPEC = register(
    LossSpec(
        name="hem",
        function="hem_loss",
        module="HEMLoss",
        family="margin",
        inputs="labelled",
        reference=reference,
        kernel="hem",
        pack=pack,
        samples=(
            {},
            {"margin": PerClass(0.2, 2.0), "power": 0.5},
            {"margin": PerClass(0.2, 2.0), "margin_index": "label", "threshold": False, "weight": PerClass(0.5, 2.0)},
            {"margin": 0.5, "power": 2.0, "above_zero": False},
        ),
        paper="A Margin-Based Replacement for Cross-Entropy Loss, eq. (1)-(2)",
        default_reduction="above_zero",
    )
)
