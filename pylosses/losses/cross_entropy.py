"""Cross-entropy with every option: smoothing, class and sample weights, soft targets, temperature, softcap, z-loss, bias.

u_j = softcap(x_j) / temperature + bias_j          softcap(x) = k tanh(x / k)
q_j = w_j ((1 - eps) t_j + eps / C)                t = onehot(y) or the given probabilities
L   = sum_j q_j (lse(u) - u_j) + z_loss lse(u)^2
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


def reference(
    rows: Rows, *, label_smoothing: float, temperature: float, softcap: float | None, z_loss: float, bias: Tensor | None
) -> RowLoss:
    u = rows.x
    if softcap is not None:
        u = torch.where(u == -torch.inf, u, softcap * torch.tanh(u / softcap))  # a masked class stays masked
    u = u / temperature
    if bias is not None:
        u = u + bias
    logp = torch.log_softmax(u, dim=1)
    w = rows.weight
    extra = None if z_loss == 0 else z_loss * _logsumexp(u).square()
    if rows.soft is not None:
        q = (1 - label_smoothing) * rows.soft + torch.full_like(rows.soft, label_smoothing) / u.shape[1]
        return RowLoss(_weighted_nll(q if w is None else q * w, logp), None, extra)
    w_label = rows.label_weight()
    value = -rows.label(logp)
    if w_label is not None:
        value = weighted(w_label, value)
    if label_smoothing > 0:
        uniform = (torch.ones_like(logp) if w is None else w.expand_as(logp)) / u.shape[1]
        value = weighted(1 - label_smoothing, value) + label_smoothing * _weighted_nll(uniform, logp)
    return RowLoss(value, w_label, extra)


def _logsumexp(u: Tensor) -> Tensor:
    """(R) log sum e^u, relative to the largest: the derivative of torch.logsumexp loses digits to an offset of the logits."""
    top = u.detach().amax(dim=1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    return torch.logsumexp(u - top, dim=1) + top[:, 0]


def _weighted_nll(q: Tensor, logp: Tensor) -> Tensor:
    """-sum_j q_j log p_j with 0 * -inf = 0."""
    return -(q * torch.where(q == 0, 0, logp)).sum(dim=1)


def pack(
    problem: Problem, *, label_smoothing: float, temperature: float, softcap: float | None, z_loss: float, bias: Tensor | None
) -> Pack:
    return Pack((label_smoothing, temperature, softcap or 0.0, z_loss), shift=bias)


def cross_entropy_arguments(
    label_smoothing: float, temperature: float, softcap: float | None, z_loss: float
) -> dict[str, float | None]:
    """The checked arguments that all losses with a cross-entropy term share."""
    return {
        "label_smoothing": check.number("label_smoothing", label_smoothing, least=0.0, most=1.0),
        "temperature": check.number("temperature", temperature, above=0.0),
        "softcap": softcap if softcap is None else check.number("softcap", softcap, above=0.0),
        "z_loss": check.number("z_loss", z_loss, least=0.0),
    }


def cross_entropy(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    target: Tensor,  # (), (N) or (N, *), or probabilities shaped like input
    weight: Tensor | None = None,  # (C)
    *,
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
    r"""Cross-entropy with every option; a drop-in for `torch.nn.functional.cross_entropy`.

    .. math::
        u_j = \mathrm{softcap}(x_j)/T + b_j, \quad q_j = w_j((1-\epsilon)\,t_j + \epsilon/C), \quad
        L = \sum_j q_j\,(\mathrm{lse}(u) - u_j) + z\,\mathrm{lse}(u)^2

    with :math:`t` the one-hot label or the given class probabilities and
    :math:`\mathrm{softcap}(x) = \kappa\tanh(x/\kappa)`.

    Args:
        input: logits.
        target: class indices (uint8, int16, int32 or int64), or class probabilities shaped like `input`.
        weight: class weights, torch's meaning.
        sample_weight: factor of each row; enters the mean's divisor.
        ignore_index: label of rows that do not count.
        reduction: "mean", "sum", "none" or "above_zero".
        label_smoothing: mass spread uniformly over all C classes.
        temperature: divides the (capped) logits.
        softcap: bound of the logits, as in Gemma 2.
        z_loss: factor of the squared log-partition, as in PaLM (1e-4 is usual).
        bias: added to the logits of each class, after the temperature.
        normalizer: replaces the mean's divisor.
        check_labels: on an accelerator, synchronise and raise for a bad label.
        backend: "cpu", "cuda", "triton" or "reference"; None picks.

    **Convention**

    - `mean` divides by the sum of `weight[target] * sample_weight` over counted rows; with probabilities by the sum of
      `sample_weight` (the number of rows). The z-term is averaged without class weights.
    - ignored rows are never read, give 0 and gradient 0; nothing counted, or weights that sum to exactly 0, gives 0, where
      torch gives NaN. A sum below 0 divides, as in torch.
    - on the fused backends a confident row keeps its relative precision (float32 loss 1e-13, not 0, at a margin of 30).
    - ``-inf`` logits are masked classes: probability and gradient 0, also under `softcap`; a masked target gives ``+inf`` with
      a finite gradient; a masked class with smoothing mass gives ``+inf``; zero mass times ``-inf`` is 0.
    - a label outside [0, C) raises IndexError (on an accelerator: NaN for that row unless `check_labels`).

    Paper: equations (3), (4) of "A Margin-Based Replacement for Cross-Entropy Loss"; options as in torch, PaLM and Gemma 2.

    >>> x = torch.tensor([[2.0, 0.0, 0.0], [0.0, 30.0, 0.0]])
    >>> cross_entropy(x, torch.tensor([0, -100]))
    tensor(0.2395)
    """
    own = cross_entropy_arguments(label_smoothing, temperature, softcap, z_loss)
    return labelled(
        SPEC, input, target, own, vectors={"bias": bias}, weight=weight, sample_weight=sample_weight, ignore_index=ignore_index,
        reduction=reduction, normalizer=normalizer, check_labels=check_labels, backend=backend, soft_targets=True,
    )  # fmt: skip


class CrossEntropyLoss(LossModule):
    """Cross-entropy with every option; a drop-in for `torch.nn.functional.cross_entropy`.

    Module form of `cross_entropy`, which documents the arguments.
    """

    @arguments_of(cross_entropy)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="cross_entropy",
        function="cross_entropy",
        module="CrossEntropyLoss",
        family="softmax",
        inputs="labelled",
        reference=reference,
        kernel="cross_entropy",
        pack=pack,
        samples=(
            {},
            {"label_smoothing": 0.1, "weight": PerClass(0.2, 2.0)},
            {"temperature": 0.7, "softcap": 5.0, "z_loss": 1e-2, "bias": PerClass(-1.0, 1.0), "label_smoothing": 0.2},
        ),
        paper="A Margin-Based Replacement for Cross-Entropy Loss, eq. (3)-(4)",
    )
)
