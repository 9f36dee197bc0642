"""Cross-entropy plus gamma times ADR: the formulas of cross_entropy.py and adr.py, in the kernels of ../adr.py."""

from ..adr import regularizer_features
from ..formula import Arguments, Formula
from . import adr, cross_entropy


def arguments(
    eps: float, temperature: float, cap: float, z: float, gamma: float, side_weight: float, *regularizer: float
) -> Arguments:
    ce = cross_entropy.arguments(eps, temperature, cap, z)
    own = regularizer_features(*regularizer[:4], CE_OPTIONS=ce.options) | {
        name: ce.features[name] for name in ("SCALED", "CAPPED", "SMOOTH")
    }
    return Arguments((*ce.numbers, gamma), adr.arguments(*regularizer).options, own)


FORMULA = Formula("adr", cross_entropy.row, 10, arguments, adr.density)
