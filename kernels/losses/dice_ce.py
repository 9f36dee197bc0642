"""Dice plus cross-entropy of the same logits: the formulas of dice.py and cross_entropy.py, in the kernels of ../region.py."""

from ..formula import Arguments, Formula
from . import cross_entropy, dice


def arguments(
    eps: float, temperature: float, cap: float, z: float, dice_weight: float, ce_weight: float,
    smooth: float, over_image: float, absent: float,
) -> Arguments:  # fmt: skip
    ce = cross_entropy.arguments(eps, temperature, cap, z)
    own = dice.region_features(over_image, absent, NO_WEIGHT=True)
    if ce_weight > 0:  # 0 times the +inf of a masked target would be NaN
        own |= ce.features | {"CE_OPTIONS": ce.options}
    return Arguments((*ce.numbers, dice_weight, ce_weight, smooth), (smooth > 0, int(absent)), own)


FORMULA = Formula("region", cross_entropy.row, 4, arguments, dice.classes)
