"""Multi-class soft Dice.

    I_c = sum_n t_nc p_nc      D_c = sum_n (t_nc + p_nc)      L_c = 1 - (2 I_c + s) / (D_c + s)      L = mean_c L_c

with t the one-hot labels, p the softmax and s = `smooth`; the sums run over the whole batch or over each image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import check
from ..call import Rows, labelled
from ..check import Problem
from ..module import LossModule, arguments_of
from ..spec import LossSpec, Pack, PerClass, register


def reference(rows: Rows, *, smooth: float, over: str, absent: str, sample_weight: Tensor | None, reduction: str) -> Tensor:
    intersection, target, predicted = class_sums(rows, sample_weight, over)
    size = target + predicted + smooth
    empty = size == 0
    present = target > 0
    if smooth == 0:  # an absent class has loss 1 whatever its mass: a constant, and no division by almost nothing
        empty = ~present
        losses = torch.where(_has_mass(rows, over), 1.0, 0.0).to(size)
    else:
        losses = torch.zeros_like(size)
    losses = torch.where(empty, losses, 1 - (2 * intersection + smooth) / torch.where(empty, 1, size))  # (images, C)
    some = present.any(dim=1, keepdim=True)  # an image without counted positions has no loss
    if absent == "zero":
        losses = torch.where(present, losses, 0)
    losses = torch.where(some, losses, 0)
    if reduction == "none":
        return (losses[0] if over == "batch" else losses).to(rows.x.dtype)
    w = torch.ones_like(losses) if rows.weight is None else rows.weight.double().expand_as(losses)
    w = torch.where(present if absent == "exclude" else some, w, 0)
    totals = torch.where(w == 0, 0, w * losses).sum(dim=1)  # (images)
    if reduction == "sum":
        return totals.sum().to(rows.x.dtype)
    mass = w.sum(dim=1)
    counted = mass != 0
    means = torch.where(counted, totals, 0) / torch.where(counted, mass, 1)
    return (means.sum() / counted.sum().clamp(min=1)).to(rows.x.dtype)


def _images(rows: Rows, over: str) -> int:
    return 1 if over == "batch" or not rows.shape else rows.shape[0]


def _has_mass(rows: Rows, over: str) -> Tensor:
    """(images, C): does a counted position give the class a probability that float64 can tell from 0?"""
    images, (count, classes) = _images(rows, over), rows.x.shape
    some = torch.log_softmax(rows.x.detach(), dim=1) > -745.0
    if rows.live is not None:
        some = some & rows.live[:, None]
    return some.reshape(images, count // max(images, 1), classes).any(dim=1)


def class_sums(rows: Rows, sample_weight: Tensor | None, over: str) -> tuple[Tensor, Tensor, Tensor]:
    """(images, C) sums of t p, t and p over counted positions, in float64: an image has more pixels than float32 has digits."""
    assert rows.y is not None
    count, classes = rows.x.shape
    p = torch.softmax(rows.x, dim=1)
    t = (rows.y[:, None] == torch.arange(classes, device=p.device)).to(p.dtype)
    if sample_weight is None:
        s = torch.ones_like(p[:, :1])
    else:
        s = sample_weight.reshape(-1, 1).to(p.dtype)
    if rows.live is not None:
        s = torch.where(rows.live[:, None], s, 0)
    images = _images(rows, over)
    tp, t, p = ((s * v).reshape(images, count // max(images, 1), classes).sum(1, dtype=torch.float64) for v in (t * p, t, p))
    return tp, t, p


def pack(problem: Problem, **own: Any) -> Pack:
    return Pack(region_scalars(**own))


def region_scalars(*, smooth: float, over: str, absent: str, **_: object) -> tuple[float, ...]:
    return smooth, float(over == "image"), float(("literal", "zero", "exclude").index(absent))


def region_arguments(
    smooth: float, over: str, absent: str, reduction: str, normalizer: object, reductions: tuple[str, ...]
) -> dict[str, Any]:
    """The checked arguments that the Dice losses share."""
    if reduction not in reductions:
        allowed = ", ".join(map(repr, reductions))
        raise ValueError(
            f"reduction must be one of {allowed}: Dice has a loss for each class, not for each row; got {reduction!r}"
        )
    if normalizer is not None:
        raise ValueError(
            f"normalizer must be None: Dice is a ratio of sums with no number of rows to replace; got {normalizer!r}"
        )
    return {
        "smooth": check.number("smooth", smooth, least=0.0),
        "over": check.choice("over", over, ("batch", "image")),
        "absent": check.choice("absent", absent, ("literal", "zero", "exclude")),
        "reduction": reduction,
    }


def dice_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    target: Tensor,  # (), (N) or (N, *)
    *,
    smooth: float = 0.0,
    over: str = "batch",
    absent: str = "literal",
    weight: Tensor | None = None,  # (C)
    sample_weight: Tensor | None = None,  # shaped like target
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    check_labels: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Multi-class soft Dice loss: one minus the overlap of each class, averaged over the classes.

    .. math::
        L_c = 1 - \frac{2 \sum_n t_{nc}\,p_{nc} + s}{\sum_n (t_{nc} + p_{nc}) + s}, \qquad L = \frac1C \sum_c L_c

    Args:
        input: logits.
        target: class indices (uint8, int16, int32 or int64).
        smooth: :math:`s`, at least 0.
        over: "batch" sums over all positions of the batch; "image" over those of each image, then averages the images.
        absent: a class without a target in the sums: "literal" keeps the formula (a loss of 1 without `smooth`), "zero"
            counts it as 0, "exclude" leaves it out of the mean.
        weight: weights of the mean over classes.
        sample_weight: weight of each position in the sums: 0 is ignored, 2 is the same position twice.
        ignore_index: label of positions that do not count.
        reduction: "mean", "sum" or "none".
        normalizer: must be None; Dice has no number of rows to replace.
        check_labels, backend: as in `cross_entropy`.

    **Convention**

    - `mean` is :math:`\sum_c w_c L_c / \sum_c w_c`, over present classes with "exclude"; with `over="image"` that of each
      image, then the mean over images with a counted position. `sum` adds :math:`w_c L_c` over the same classes and images.
      `none` gives the class losses themselves, (C), or (N, C) with `over="image"`, before `weight` and "exclude".
    - for (N, C) input, `over="image"` takes each row as an image.
    - sums are float64 for every input dtype, so large half precision images are right.
    - ignored positions are never read and have gradient 0; nothing counted gives 0; a class with D_c + s = 0 gives 0.
    - ``-inf`` logits are masked classes (probability 0); one NaN makes every class loss NaN. A label outside [0, C) raises
      IndexError.
    - other libraries, as far as read in their source: segmentation_models.pytorch ``DiceLoss("multiclass")`` is
      ``absent="zero"``; MONAI ``DiceLoss(softmax=True, to_onehot_y=True)`` is ``over="image", smooth=1e-5``, with
      ``batch=True`` ``over="batch", smooth=1e-5``; kornia ``average="macro"`` is ``over="image"`` (its 1e-8 stands in the
      denominator alone); kornia's default "micro" pools the classes, which is the mean of 1 - p_y and no class Dice. kornia
      was read at 0.7, later versions are not verified.

    Paper: "A Margin-Based Replacement for Cross-Entropy Loss", equation (7), which leaves the absent classes open.

    >>> x = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    >>> y = torch.tensor([0, 1])
    >>> dice_loss(x, y)
    tensor(0.4458)
    >>> dice_loss(x, y, reduction="none")
    tensor([0.1687, 0.1687, 1.0000])
    >>> dice_loss(x, y, absent="exclude")
    tensor(0.1687)
    """
    own = region_arguments(smooth, over, absent, reduction, normalizer, ("none", "sum", "mean"))
    own["sample_weight"] = sample_weight
    return labelled(
        SPEC, input, target, own, weight=weight, sample_weight=sample_weight, ignore_index=ignore_index, reduction=reduction,
        normalizer=None, check_labels=check_labels, backend=backend,
    )  # fmt: skip


class DiceLoss(LossModule):
    """Multi-class soft Dice loss: one minus the overlap of each class, averaged over the classes.

    Module form of `dice_loss`, which documents the arguments.
    """

    @arguments_of(dice_loss)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="dice",
        function="dice_loss",
        module="DiceLoss",
        family="region",
        inputs="labelled",
        reference=reference,
        kernel="dice",
        pack=pack,
        samples=(
            {},
            {"absent": "zero", "smooth": 1.0},
            {"absent": "exclude", "weight": PerClass(0.5, 2.0)},
            {"over": "image", "smooth": 1e-5},
        ),
        paper="A Margin-Based Replacement for Cross-Entropy Loss, eq. (7)",
    )
)
