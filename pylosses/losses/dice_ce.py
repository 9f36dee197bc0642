"""Dice and cross-entropy of the same logits, added.

    L = dice_weight Dice(x, y) + ce_weight CE(x, y)

The two terms are those of dice.py and cross_entropy.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import check
from ..call import Rows, labelled
from ..check import Problem
from ..module import LossModule, arguments_of
from ..reduce import reduce
from ..spec import LossSpec, Pack, PerClass, register
from .cross_entropy import cross_entropy_arguments
from .cross_entropy import pack as cross_entropy_pack
from .cross_entropy import reference as cross_entropy_rows
from .dice import reference as dice_reference
from .dice import region_arguments, region_scalars


def reference(
    rows: Rows,
    *,
    dice_weight: float,
    ce_weight: float,
    smooth: float,
    over: str,
    absent: str,
    sample_weight: Tensor | None,
    reduction: str,
    **ce: Any,
) -> Tensor:
    dice = dice_reference(
        rows._replace(weight=None),  # class weights are cross-entropy's
        smooth=smooth, over=over, absent=absent, sample_weight=sample_weight, reduction=reduction,
    )  # fmt: skip
    if ce_weight == 0:  # 0 times the +inf of a masked target would be NaN
        return dice_weight * dice
    x = rows.x
    s = None if sample_weight is None else sample_weight.to(x.dtype)
    problem = Problem(x, rows.y, None, rows.weight, s, None, -100, reduction, None, False, x.shape[1], rows.shape, x.dtype)
    return dice_weight * dice + ce_weight * reduce(cross_entropy_rows(rows, **ce), rows.live, problem)


def pack(
    problem: Problem,
    *,
    dice_weight: float,
    ce_weight: float,
    smooth: float,
    over: str,
    absent: str,
    sample_weight: Tensor | None,
    reduction: str,
    **cross_entropy: Any,
) -> Pack:
    ce = cross_entropy_pack(problem, **cross_entropy)
    return ce._replace(scalars=(*ce.scalars, dice_weight, ce_weight, *region_scalars(smooth=smooth, over=over, absent=absent)))


def dice_ce_loss(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    target: Tensor,  # (), (N) or (N, *)
    *,
    dice_weight: float = 1.0,
    ce_weight: float = 1.0,
    smooth: float = 0.0,
    over: str = "batch",
    absent: str = "literal",
    label_smoothing: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    bias: Tensor | None = None,  # (C)
    weight: Tensor | None = None,  # (C)
    sample_weight: Tensor | None = None,  # shaped like target
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    check_labels: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Soft Dice plus cross-entropy, the usual pair for segmentation.

    .. math:: L = \lambda_D\,\mathrm{Dice}(x, y) + \lambda_{CE}\,\mathrm{CE}(x, y)

    Args:
        input: logits.
        target: class indices (uint8, int16, int32 or int64).
        dice_weight, ce_weight: factors of the two terms, at least 0.
        smooth, over, absent: of the Dice term, as in `dice_loss`.
        label_smoothing, temperature, softcap, z_loss, bias: of the cross-entropy term, as in `cross_entropy`.
        weight: class weights of the cross-entropy term; Dice weighs its classes equally.
        sample_weight: weight of each position, in both terms.
        ignore_index: label of positions that do not count, in both terms.
        reduction: "mean" or "sum" of each term; the terms have no common "none".
        normalizer: must be None, as in `dice_loss`.
        check_labels, backend: as in `cross_entropy`.

    **Convention**

    - the value is ``dice_weight * dice_loss(x, y, ...) + ce_weight * cross_entropy(x, y, weight=weight, ...)``, each with its
      own arguments; in particular `temperature`, `softcap` and `bias` do not change the softmax that Dice sees.
    - ignored positions are never read and have gradient 0; nothing counted gives 0.
    - ``-inf`` logits are masked classes; a masked target gives ``+inf``. A label outside [0, C) raises IndexError.

    Paper: Dice as in "A Margin-Based Replacement for Cross-Entropy Loss", equation (7), cross-entropy as in its equation (3).

    >>> import torch
    >>> x = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    >>> dice_ce_loss(x, torch.tensor([0, 1]), ce_weight=0.5)
    tensor(0.5656)
    """
    own = region_arguments(smooth, over, absent, reduction, normalizer, ("mean", "sum"))
    own |= {
        "dice_weight": check.number("dice_weight", dice_weight, least=0.0),
        "ce_weight": check.number("ce_weight", ce_weight, least=0.0),
        "sample_weight": sample_weight,
        **cross_entropy_arguments(label_smoothing, temperature, softcap, z_loss),
    }
    return labelled(
        SPEC, input, target, own, vectors={"bias": bias}, weight=weight, sample_weight=sample_weight, ignore_index=ignore_index,
        reduction=reduction, normalizer=None, check_labels=check_labels, backend=backend,
    )  # fmt: skip


class DiceCELoss(LossModule):
    """Soft Dice plus cross-entropy, the usual pair for segmentation.

    Module form of `dice_ce_loss`, which documents the arguments.
    """

    @arguments_of(dice_ce_loss)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="dice_ce",
        function="dice_ce_loss",
        module="DiceCELoss",
        family="region",
        inputs="labelled",
        reference=reference,
        kernel="dice_ce",
        pack=pack,
        samples=(
            {},
            {"dice_weight": 0.7, "ce_weight": 0.3, "smooth": 1e-5, "over": "image", "label_smoothing": 0.1},
            {"absent": "exclude", "weight": PerClass(0.5, 2.0), "z_loss": 1e-2},
        ),
        paper="A Margin-Based Replacement for Cross-Entropy Loss, eq. (3), (7)",
    )
)
