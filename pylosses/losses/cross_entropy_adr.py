"""Cross-entropy with the adaptive discriminative regularizer (ADR).

L = L_ce + gamma L_adr
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import check
from ..call import Rows, labelled
from ..check import Problem
from ..module import LossModule, arguments_of
from ..reduce import RowLoss
from ..spec import LossSpec, Pack, PerClass, register
from .adr import adr_rows, regularizer_arguments, regularizer_scalars, too_many
from .cross_entropy import cross_entropy_arguments
from .cross_entropy import pack as cross_entropy_pack
from .cross_entropy import reference as cross_entropy_reference


def reference(
    rows: Rows, *, top: int, gamma: float, phi: str, scope: str, norm: str, form: str, detach_phi: bool, **cross_entropy: Any
) -> RowLoss:
    value, mass, z_term = cross_entropy_reference(rows, **cross_entropy)
    adr = gamma * adr_rows(rows, top=top, phi=phi, scope=scope, norm=norm, form=form, detach_phi=detach_phi)
    return RowLoss(value, mass, adr if z_term is None else z_term + adr)


def pack(
    problem: Problem,
    *,
    top: int,
    gamma: float,
    phi: str,
    scope: str,
    norm: str,
    form: str,
    detach_phi: bool,
    **cross_entropy: Any,
) -> Pack:
    ce = cross_entropy_pack(problem, **cross_entropy)
    adr = regularizer_scalars(problem, top=top, phi=phi, scope=scope, norm=norm, form=form, detach_phi=detach_phi)
    return ce._replace(scalars=(*ce.scalars, gamma, 1.0, *adr))


def cross_entropy_adr(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    target: Tensor,  # (), (N) or (N, *), or probabilities shaped like input
    *,
    top: int,
    gamma: float = 0.05,
    phi: str = "entropy",
    scope: str = "sample",
    norm: str = "l2",
    form: str = "gauss",
    detach_phi: bool = False,
    weight: Tensor | None = None,  # (C)
    sample_weight: Tensor | None = None,  # shaped like the labels
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    bias: Tensor | None = None,  # (C)
    normalizer: float | Tensor | None = None,
    check_labels: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Cross-entropy plus `gamma` times the adaptive discriminative regularizer, in one pass.

    .. math:: L = L_{\mathrm{CE}} + \gamma\,(2\pi\varphi)^{-\tau/2} \exp\!\Big(-\frac{T}{2\varphi}\Big)

    Args:
        input: logits.
        target: class indices (uint8, int16, int32 or int64), or class probabilities shaped like `input`.
        top: number of the largest classes that the regularizer looks at, between 1 and C.
        gamma: factor of the regularizer, at least 0; the paper uses 0.01 to 0.1, and 0.1 to 0.5 for segmentation.
        phi, scope, norm, form, detach_phi: the regularizer, as in `adr_loss`.
        label_smoothing, temperature, softcap, z_loss, bias: the cross-entropy, as in `cross_entropy`.
        weight, sample_weight, ignore_index, reduction, normalizer, check_labels, backend: as in `cross_entropy`.

    **Convention**

    - the regularizer sees the softmax of `input` itself: without smoothing, temperature, softcap or bias.
    - class weights do not scale it: `mean` divides the cross-entropy by the sum of `weight[target] * sample_weight` and the
      regularizer by the sum of `sample_weight` over counted rows.
    - with scope "batch" the uncertainty is the mean over the rows that are not ignored.
    - otherwise the conventions of `cross_entropy` and `adr_loss` hold: ignored rows are never read, nothing counted gives 0, a
      masked target gives ``+inf`` with a finite gradient, NaN shows, a label outside [0, C) raises IndexError.

    Paper: "Adaptive Discriminative Regularization for Visual Classification", equation (5).

    >>> import torch
    >>> x = torch.tensor([[2.0, 0.0, 0.0]])
    >>> cross_entropy_adr(x, torch.tensor([0]), top=1, gamma=0.1)
    tensor(0.2703)
    """
    own = {
        **regularizer_arguments(top, phi, scope, norm, form, detach_phi),
        "gamma": check.number("gamma", gamma, least=0.0),
        **cross_entropy_arguments(label_smoothing, temperature, softcap, z_loss),
    }
    return labelled(
        SPEC, input, target, own, vectors={"bias": bias}, weight=weight, sample_weight=sample_weight, ignore_index=ignore_index,
        reduction=reduction, normalizer=normalizer, check_labels=check_labels, backend=backend, soft_targets=True,
    )  # fmt: skip


class CrossEntropyADRLoss(LossModule):
    """Cross-entropy plus `gamma` times the adaptive discriminative regularizer, in one pass.

    Module form of `cross_entropy_adr`, which documents the arguments.
    """

    @arguments_of(cross_entropy_adr)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="cross_entropy_adr",
        function="cross_entropy_adr",
        module="CrossEntropyADRLoss",
        family="select",
        inputs="labelled",
        reference=reference,
        kernel="cross_entropy_adr",
        pack=pack,
        beyond=too_many,
        samples=(
            {"top": 1},
            {"top": 2, "gamma": 0.3, "scope": "batch", "label_smoothing": 0.1, "weight": PerClass(0.2, 2.0)},
            {"top": 2, "phi": "variance", "norm": "l1", "z_loss": 1e-2, "bias": PerClass(-1.0, 1.0)},
        ),
        paper="Adaptive Discriminative Regularization for Visual Classification, eq. (5)",
    )
)
