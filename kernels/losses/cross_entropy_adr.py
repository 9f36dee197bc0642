"""Cross-entropy plus gamma times ADR: the formulas of cross_entropy.py and adr.py, in the kernels of ../adr.py."""

from ..adr import regularizer_features
from ..formula import Arguments, Formula
from . import adr, cross_entropy


def arguments(
    label_smoothing: float, temperature: float, softcap: float, z_loss: float, weight: float, side_weight: float,
    top: float, variance: float, batch: float, l1: float, literal: float, detach_phi: float,
) -> Arguments:  # fmt: skip
    assert side_weight == 1  # the kernels have no factor for it
    ce = cross_entropy.arguments(label_smoothing, temperature, softcap, z_loss)
    options = adr.arguments(top, variance, batch, l1, literal, detach_phi).options
    own = regularizer_features(top, variance, batch, l1, CE_OPTIONS=ce.options) | {
        name: ce.features[name] for name in ("SCALED", "CAPPED", "SMOOTH")
    }
    return Arguments((*ce.numbers, weight), options, own)


FORMULA = Formula("adr", cross_entropy.row, 10, arguments, adr.density)
