"""Dice plus cross-entropy of the same logits: the formulas of dice.py and cross_entropy.py, in the kernels of ../region.py."""

from ..formula import Arguments, Formula
from . import cross_entropy, dice


def arguments(
    label_smoothing: float, temperature: float, softcap: float, z_loss: float, weight: float, side_weight: float,
    smooth: float, by_image: float, absent: float,
) -> Arguments:  # fmt: skip
    ce = cross_entropy.arguments(label_smoothing, temperature, softcap, z_loss)
    own = dice.region_features(by_image, absent, NO_WEIGHT=True)
    if side_weight > 0:  # 0 times the +inf of a masked target would be NaN
        own |= ce.features | {"CE_OPTIONS": ce.options}
    return Arguments((*ce.numbers, weight, side_weight, smooth), (smooth > 0, int(absent)), own)


FORMULA = Formula("region", cross_entropy.row, 4, arguments, dice.classes)
