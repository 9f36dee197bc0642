"""Losses of a linear layer's output: input and weight go in, the logits are an inner matter.

    x = h W^T + b          L = loss(x, y)

On the CPU the logits are made, used and forgotten a block of rows at a time (linear_fused.py), by Triton a tile at a time, in
registers (linear_triton.py). Logits that fit the workspace with their gradient are stored there, because blocks would only cost
time: torch's product and the row loss, as a user would write it. The reference, torch.compile and torch.func store them all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import check, losses
from .check import ACCUMULATE
from .linear_fused import WORKSPACE, fits, made, product
from .losses.cross_entropy import cross_entropy
from .losses.hem import hem_loss
from .module import LossModule, arguments_of
from .plain import is_eager, plain
from .spec import LOSSES, LossSpec, PerClass, register


def reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    loss: Callable[..., Tensor],
    linear_bias: Tensor | None = None,
    shift: bool = False,
    workspace: int = WORKSPACE,
    backend: str | None = "reference",
    **arguments: Any,
) -> Tensor:
    """`loss` of the layer's output; all losses of this file are this with one of the row losses."""
    tensors = _check(input, linear_weight, target, linear_bias, arguments.get("sample_weight"))
    input, linear_weight, target, linear_bias, arguments["sample_weight"] = tensors
    ignored = check.label("ignore_index", arguments.get("ignore_index", -100))
    workspace = check.integer("workspace", workspace, least=0)
    if shift:
        target, arguments["sample_weight"] = _shifted(target, arguments["sample_weight"], ignored)
    eager = is_eager()
    labels = not target.is_floating_point() and target.shape == input.shape[:-1]
    masked = labels and not (eager and _all_count(target, ignored))
    sparing = masked or loss.__name__ in _SPARING
    stored = eager and backend in (None, "cpu") and fits(input, linear_weight, linear_bias, workspace, sparing)
    if masked and (stored or not eager):  # a NaN of ignored rows must not reach the gradient of the weight
        input = input.masked_fill((target.long() == ignored).unsqueeze(-1), 0)
    if stored:
        logits = made(input, linear_weight, linear_bias)
    else:
        logits = product(input, linear_weight, linear_bias, workspace)
    if input.dim() > 2 and target.is_floating_point():  # the row losses have the classes second
        target = target.movedim(-1, 1)
    return loss(logits, target, backend=backend, **arguments)


def _check(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, sample_weight: Tensor | None
) -> tuple[Any, ...]:
    """The tensors, lazy ones made, after the checks that the row loss could only express in terms of logits."""
    eager = is_eager()
    tensors: dict[str, Any] = {"input": input, "linear_weight": linear_weight, "target": target}
    tensors |= {k: v for k, v in (("linear_bias", linear_bias), ("sample_weight", sample_weight)) if v is not None}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
        if eager:
            tensors[name] = plain(name, value)
        if value is not input and value.device != input.device:
            raise ValueError(f"{name} must be on {input.device} like input, got {value.device}")
        if value.dtype not in ACCUMULATE and name in ("input", "linear_weight", "linear_bias"):
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {value.dtype}")
    if input.dim() == 0:
        raise ValueError("input must have shape (D), (N, D) or (..., D), got a 0-d tensor")
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1] or linear_weight.shape[0] == 0:
        raise ValueError(
            f"linear_weight must have shape (C, {input.shape[-1]}) for input of shape {tuple(input.shape)}, "
            f"got {tuple(linear_weight.shape)}"
        )
    classes = linear_weight.shape[0]
    if linear_bias is not None and linear_bias.shape != (classes,):
        raise ValueError(
            f"linear_bias must have shape ({classes},) for linear_weight of shape {tuple(linear_weight.shape)}, "
            f"got {tuple(linear_bias.shape)}"
        )
    rows = input.shape[:-1]
    soft = target.is_floating_point() and target.shape != rows  # a label of the wrong dtype is for the row loss to refuse
    wanted = {"target": (*rows, classes) if soft else rows, "sample_weight": rows}
    for name, shape in wanted.items():
        given = tensors.get(name)
        if given is not None and given.shape != shape:
            raise ValueError(
                f"{name} must have shape {tuple(shape)} for input of shape {tuple(input.shape)} and linear_weight of shape "
                f"{tuple(linear_weight.shape)}, got {tuple(given.shape)}"
            )
    return tuple(map(tensors.get, ("input", "linear_weight", "target", "linear_bias", "sample_weight")))


def _all_count(target: Tensor, ignored: int) -> bool:
    """Whether no label is `ignored`, at a glance."""
    least, most = target.aminmax() if target.numel() else (0, 0)
    return ignored < int(least) or ignored > int(most)


def _shifted(target: Tensor, sample_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """The labels one position earlier, each with its weight: the last position has none. The features stay where they are."""
    if target.is_floating_point():
        raise ValueError(f"shift needs class indices as target, got {target.dtype} probabilities")
    if target.dim() == 0 or target.shape[-1] == 0:
        raise ValueError(f"shift needs a sequence: target of shape (..., T) with T at least 1, got {tuple(target.shape)}")
    kind = torch.iinfo(target.dtype)
    if not kind.min <= ignore_index <= kind.max:
        target = target.long()
    last = target.new_full((*target.shape[:-1], 1), ignore_index)
    if sample_weight is not None:
        sample_weight = torch.cat([sample_weight[..., 1:], torch.zeros_like(sample_weight[..., :1])], dim=-1)
    return torch.cat([target[..., 1:], last], dim=-1), sample_weight


def linear_cross_entropy(
    input: Tensor,  # (D), (N, D) or (..., D)
    linear_weight: Tensor,  # (C, D)
    target: Tensor,  # (), (N) or (...), or probabilities (..., C)
    *,
    linear_bias: Tensor | None = None,  # (C)
    weight: Tensor | None = None,  # (C)
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    options: object = None,
    sample_weight: Tensor | None = None,  # shaped like the labels
    temperature: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    bias: Tensor | None = None,  # (C)
    normalizer: float | Tensor | None = None,
    check_labels: bool = False,
    shift: bool = False,
    workspace: int = WORKSPACE,
    backend: str | None = None,
) -> Tensor:
    r"""Cross-entropy of a linear layer's output; a drop-in for `torch.nn.functional.linear_cross_entropy`.

    .. math:: L = \mathrm{CE}(h W^\top + b,\ y)

    The logits are **never stored** on the CPU, but where they and their gradient fit in `workspace`: a block of rows at a time,
    its logits become its loss and at once its share of the gradients. Besides those, working memory is `workspace`, however
    many rows there are.

    Args:
        input: features :math:`h`.
        linear_weight: weight :math:`W` of the layer, a row for each class.
        target: class indices (uint8, int16, int32 or int64) shaped like `input` without its last dimension, or class
            probabilities with the classes in the last one.
        linear_bias: bias :math:`b` of the layer.
        weight: class weights, torch's meaning.
        reduction: "mean", "sum", "none" or "above_zero".
        ignore_index: label of rows that do not count; None is -100.
        label_smoothing: mass spread uniformly over all C classes.
        options: tunes torch's chunking; accepted so that calls of torch's function work unchanged, and without effect.
        sample_weight, temperature, softcap, z_loss, bias, normalizer, check_labels: as in `cross_entropy`.
        shift: the features at a position predict the label at the next one, as in a causal language model: `input` (..., T, D)
            and `target` (..., T) as they come from the model. Nothing is copied but the labels.
        workspace: bytes of memory for logits on the CPU: all of them where they fit with their gradient, which backward then
            frees, else a block of rows. A block has at least 16 rows, whatever they take: with very many classes that may be
            more than `workspace`. 0 never stores the logits.
        backend: "cpu" makes the logits at once or block by block, "triton" tile by tile, "reference" stores them; None picks.

    **Convention**

    - the value and everything unsaid is `cross_entropy` of ``torch.nn.functional.linear(input, linear_weight, linear_bias)``.
    - logits are float32 for half precision too, also under autocast, or float64 if `input` or `linear_weight` is; so is the
      loss. Their dtypes may differ; each gradient has the dtype of its tensor.
    - of blocks, gradients are computed in forward, those that are needed alone, and summed over the rows in the dtype of the
      logits. With ``reduction="none"``, and for a second backward, the logits are made again. Under autocast there are blocks;
      a backward alone under autocast rounds the products of stored logits as it does any layer's.
    - the features of ignored rows count nowhere, be they NaN. torch.compile, torch.func, and Triton with class
      probabilities as targets, store the logits; so does the CUDA backend, which None passes over where Triton does not.
    - Triton makes the logits in forward and twice in backward; float32 products are exact unless
      `torch.set_float32_matmul_precision` allows less.
    - with `shift` the first label counts nowhere and the last position is ignored: ``reduction="none"`` gives 0 there, and has
      the loss of a label at the position that predicts it. `sample_weight` belongs to the labels and moves with them.
    - `linear_weight` is (C, D) alone; torch's (C, d1, ..., D) form is not taken.
    - the module takes `linear_weight` in each call; torch's module owns one.

    Paper: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", for the form of the call.

    >>> h, w = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    >>> linear_cross_entropy(h, w, torch.tensor([0, 1]))
    tensor(0.2395)
    """
    return reference(
        input, linear_weight, target, loss=cross_entropy, linear_bias=linear_bias, weight=weight, reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index, label_smoothing=label_smoothing,
        sample_weight=sample_weight, temperature=temperature, softcap=softcap, z_loss=z_loss, bias=bias, normalizer=normalizer,
        check_labels=check_labels, shift=shift, workspace=workspace, backend=backend,
    )  # fmt: skip


def linear_hem_loss(
    input: Tensor,  # (D), (N, D) or (..., D)
    linear_weight: Tensor,  # (C, D)
    target: Tensor,  # (), (N) or (...)
    *,
    linear_bias: Tensor | None = None,  # (C)
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
    shift: bool = False,
    workspace: int = WORKSPACE,
    backend: str | None = None,
) -> Tensor:
    r"""High error margin loss of a linear layer's output.

    .. math:: L = \mathrm{HEM}(h W^\top + b,\ y)

    On the CPU logits beyond `workspace` are **never stored**, and rows without a loss cost no gradient: see
    `linear_cross_entropy`.

    Args:
        input: features :math:`h`.
        linear_weight: weight :math:`W` of the layer, a row for each class.
        target: class indices (uint8, int16, int32 or int64) shaped like `input` without its last dimension.
        linear_bias: bias :math:`b` of the layer.
        margin, power, delta, margin_index, threshold, above_zero: as in `hem_loss`.
        weight, sample_weight, ignore_index, reduction, normalizer, check_labels: as in `cross_entropy`.
        shift, workspace, backend: as in `linear_cross_entropy`.

    **Convention**: as `linear_cross_entropy`, with `hem_loss` in place of `cross_entropy`.

    Paper: "A Margin-Based Replacement for Cross-Entropy Loss", equations (1), (2).

    >>> h, w = torch.tensor([[1.0, 0.5]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-3.0, 0.0], [0.0, 0.5]])
    >>> linear_hem_loss(h, w, torch.tensor([0]))
    tensor(0.3750)
    """
    return reference(
        input, linear_weight, target, loss=hem_loss, linear_bias=linear_bias, margin=margin, power=power, delta=delta,
        margin_index=margin_index, threshold=threshold, above_zero=above_zero, weight=weight, sample_weight=sample_weight,
        ignore_index=ignore_index, reduction=reduction, normalizer=normalizer, check_labels=check_labels,
        shift=shift, workspace=workspace, backend=backend,
    )  # fmt: skip


def linear_loss(
    input: Tensor,  # (D), (N, D) or (..., D)
    linear_weight: Tensor,  # (C, D)
    target: Tensor,  # (), (N) or (...)
    *,
    loss: str = "focal",
    linear_bias: Tensor | None = None,  # (C)
    shift: bool = False,
    workspace: int = WORKSPACE,
    backend: str | None = None,
    **loss_arguments: Any,
) -> Tensor:
    r"""Any softmax- or margin-family loss of a linear layer's output, by name.

    .. math:: L = \mathrm{loss}(h W^\top + b,\ y)

    On the CPU logits beyond `workspace` are **never stored**: see `linear_cross_entropy`.

    Args:
        input: features :math:`h`.
        linear_weight: weight :math:`W` of the layer, a row for each class.
        target: class indices shaped like `input` without its last dimension, or what else the loss takes.
        loss: name of a loss with labels in `pylosses.LOSSES`, of family "softmax" or "margin".
        linear_bias: bias :math:`b` of the layer.
        shift, workspace, backend: as in `linear_cross_entropy`.
        loss_arguments: the keyword arguments of that loss; `weight` are class weights.

    **Convention**: as `linear_cross_entropy`, with the named loss in place of `cross_entropy`.

    Paper: of the named loss.

    >>> h, w = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    >>> linear_loss(h, w, torch.tensor([0, 1]), loss="focal", gamma=2.0)
    tensor(0.0109)
    """
    return reference(
        input, linear_weight, target, loss=_row_loss(loss), linear_bias=linear_bias, shift=shift, workspace=workspace,
        backend=backend, **loss_arguments,
    )  # fmt: skip


def _row_loss(name: str) -> Callable[..., Tensor]:
    """The public function of a loss in the table."""
    known = {s.name: s for s in LOSSES.values() if s.family in ("softmax", "margin") and s.inputs == "labelled"}
    spec = known.get(name)
    if spec is None:
        raise ValueError(f"loss must be one of {', '.join(map(repr, known))}, got {name!r}")
    # A loss that a user registered is not among ours; it lives beside its reference.
    return getattr(losses, spec.function, None) or getattr(sys.modules[spec.reference.__module__], spec.function)


class LinearCrossEntropyLoss(LossModule):
    """Cross-entropy of a linear layer's output; a drop-in for `torch.nn.functional.linear_cross_entropy`.

    Module form of `linear_cross_entropy`, which documents the arguments.
    """

    @arguments_of(linear_cross_entropy, after=3)
    def __init__(self) -> None: ...


class LinearHEMLoss(LossModule):
    """High error margin loss of a linear layer's output.

    Module form of `linear_hem_loss`, which documents the arguments.
    """

    @arguments_of(linear_hem_loss, after=3)
    def __init__(self) -> None: ...


register(
    LossSpec(
        name="linear_cross_entropy",
        function="linear_cross_entropy",
        module="LinearCrossEntropyLoss",
        family="linear",
        inputs="own",
        reference=reference,
        kernel=LOSSES["cross_entropy"].kernel,
        pack=LOSSES["cross_entropy"].pack,
        samples=({}, {"label_smoothing": 0.1, "z_loss": 1e-3, "weight": PerClass(0.2, 2.0)}),
        paper="Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models",
    )
)
register(
    LossSpec(
        name="linear_hem",
        function="linear_hem_loss",
        module="LinearHEMLoss",
        family="linear",
        inputs="own",
        reference=reference,
        kernel=LOSSES["hem"].kernel,
        pack=LOSSES["hem"].pack,
        samples=({}, {"margin": PerClass(0.2, 2.0), "power": 0.5}),
        paper="A Margin-Based Replacement for Cross-Entropy Loss, eq. (1)-(2)",
        default_reduction="above_zero",
    )
)
register(
    LossSpec(
        name="linear",
        function="linear_loss",
        module=None,
        family="linear",
        inputs="own",
        reference=reference,
        kernel=LOSSES["focal"].kernel,  # of the default; others use their own
        pack=LOSSES["focal"].pack,
        samples=({"loss": "focal", "gamma": 2.0}, {"loss": "hem", "margin": 0.5}),
        paper="of the named loss",
    )
)

#: functions of losses that confident rows have none of: blocks leave out their products
_SPARING = {spec.function for spec in LOSSES.values() if spec.family == "margin"}
