"""Losses of logits whose classes are split over processes, and of linear layers whose weight is.

    rank r of the group holds x[:, start_r : stop_r]          L = loss(x, y) on every rank, its own part of the gradient on each

Logits are never gathered: a row costs a few numbers in each direction. The functions are those of `pylosses`, with the same
arguments and conventions, and three more:

group     the torch.distributed process group whose ranks hold the shards in order; None is the default group
classes   C, if the shards are to be checked against it
timeout   seconds after which a rank that waits for the others gives up (gloo; NCCL has a limit of its own); None is the group's

Every rank calls the function with the same labels and arguments, its own shard as `input` (or as `linear_weight` and
`linear_bias`), and gets the same loss; shards need not be equal and may be empty. Tensors of all classes (`weight`, `bias`,
`margin`, `class_counts`, `alpha`) are whole on every rank; probabilities as `target` are split like the logits. A DTensor
brings its own group: logits with `Shard` of the class dimension, or a weight with `Shard(0)`; its gradient is a DTensor again.

- a call starts with a gather of 17 numbers a rank, in which ranks that disagree about shapes, dtypes, labels or arguments find
  out; every rank then raises. The host waits for the answer, also on an accelerator.
- the collectives are all-reduces of (rows) numbers, 2 to 4 of 1 to 3 of them for each row, and for losses of the k largest
  classes a gather of k candidates. Backward has none, but the sum of the gradient of a layer's `input` (rows x D).
- it is plain PyTorch, in blocks of rows. Besides the gradient it allocates at most 48 MiB (`workspace` of the linear losses),
  or 16 rows where these are larger, and some ten numbers a row. Linear losses make the logits of a block again in backward.
- eager mode only: no torch.compile, no torch.func. Differentiable once, with respect to the logits or the layer.

`global_count` is for the other split, that of the rows: the divisor of a mean over all processes of data-parallel training,
with ``averaged=True`` under DistributedDataParallel and FSDP.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import check, linear, losses
from .call import learned
from .check import ACCUMULATE, Problem, bad_label
from .choice import BackendError
from .linear_fused import WORKSPACE, _dtype
from .losses.adr import _density, _mean
from .losses.focal import focal_rows
from .losses.knl import need_negatives
from .losses.logit_adjusted import _log_prior
from .losses.target import target_rows
from .parallel_group import Facts, Group, Layout, Sharded, ShardedHead, fingerprint, stand_in
from .parallel_rows import Head, Logits, Margin, Pass, Run, Softmax
from .reduce import RowLoss, reduce, weighted
from .spec import LOSSES, LossSpec

# Formulas: from the statistics of rows to their losses ------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of a call that count, as a formula sees them."""

    run: Run  # without passes
    tensors: tuple[Tensor | None, ...]
    weight: Tensor | None  # (C)

    def measure(self, *passes: Pass) -> list[SimpleNamespace]:
        return self.run._replace(passes=passes).statistics(*self.tensors)

    def mine(self, values: Tensor | None) -> Tensor | None:
        """This rank's part of a (C) tensor."""
        return self.run.layout.part(values)

    def label(self, values: Tensor) -> Tensor:
        """(K) values of a (C) tensor at the labels."""
        assert self.run.y is not None
        return values[self.run.y]

    def weighted(self, value: Tensor, factor: Tensor | None = None) -> RowLoss:
        """Row losses with the weight of the labels, which enters the mean, and a factor, which does not."""
        if factor is not None:
            value = value * self.label(factor)
        w = None if self.weight is None else self.label(self.weight)
        return RowLoss(value if w is None else weighted(w, value), w)


def _cross_entropy(rows: Rows, **own: Any) -> RowLoss:
    (s,) = rows.measure(_cross_entropy_pass(rows, **own))
    return _cross_entropy_rows(rows, s, **own)


def _cross_entropy_pass(
    rows: Rows, *, label_smoothing: float, temperature: float, softcap: float | None, z_loss: float, bias: Tensor | None
) -> Softmax:
    classes = rows.run.layout.total
    mass = rows.mine(rows.weight)
    soft = rows.run.soft
    if mass is None and (soft is not None or label_smoothing > 0):
        size = rows.run.layout.stop - rows.run.layout.start
        mass = torch.ones(size, dtype=rows.run.dtype, device=_device(rows))
    if soft is None:
        mass = None if mass is None or label_smoothing == 0 else mass / classes
    return Softmax(
        labelled=soft is None,
        partition=z_loss > 0,
        temperature=temperature,
        softcap=softcap,
        shift=rows.mine(bias),
        mass=mass,
        soft=None if soft is None else (1 - label_smoothing, label_smoothing / classes),
    )


def _device(rows: Rows) -> torch.device:
    assert rows.tensors[0] is not None
    return rows.tensors[0].device


def _cross_entropy_rows(rows: Rows, s: SimpleNamespace, *, label_smoothing: float, z_loss: float, **_: Any) -> RowLoss:
    extra = z_loss * (s.peak + s.lse).square() if z_loss > 0 else None
    if rows.run.soft is not None:
        return RowLoss(s.nll, None, extra)
    loss = rows.weighted(-_log_probability(s))
    value = loss.value if label_smoothing == 0 else weighted(1 - label_smoothing, loss.value) + label_smoothing * s.nll
    return RowLoss(value, loss.mass, extra)


def _log_probability(s: SimpleNamespace) -> Tensor:
    """(K) of the label; a confident row keeps its digits."""
    return torch.nn.functional.logsigmoid(-s.odds)


def _logit_adjusted(rows: Rows, *, class_counts: Tensor, tau: float) -> RowLoss:
    (s,) = rows.measure(Softmax(labelled=True, shift=rows.mine(_log_prior(class_counts, tau))))
    return rows.weighted(-_log_probability(s))


def _logit_norm(rows: Rows, *, temperature: float, eps: float) -> RowLoss:
    (s,) = rows.measure(Softmax(labelled=True, temperature=temperature, eps=eps))
    return rows.weighted(-_log_probability(s))


def _focal(rows: Rows, *, gamma: float, alpha: Tensor | None) -> RowLoss:
    (s,) = rows.measure(Softmax(labelled=True))
    return rows.weighted(focal_rows(_log_probability(s), gamma), alpha)


def _target(rows: Rows, *, alpha: Tensor | None, **own: Any) -> RowLoss:
    (s,) = rows.measure(Softmax(labelled=True))
    return rows.weighted(target_rows(_log_probability(s), **own), alpha)


def _margin(
    rows: Rows, *, margin: float | Tensor, power: float, delta: float, margin_index: str, threshold: bool, above_zero: bool
) -> RowLoss:
    by_label = isinstance(margin, Tensor) and margin_index == "label"
    mine = rows.mine(margin) if isinstance(margin, Tensor) and not by_label else margin
    assert mine is not None
    (s,) = rows.measure(Margin(mine, by_label, power, delta, threshold))
    divisor = s.count.clamp(min=1) if above_zero else rows.run.layout.total
    return rows.weighted(torch.where(s.bad, torch.nan, 1) * s.kept / divisor)


def _entropy(rows: Rows, *, max_entropy: float | None) -> RowLoss:
    return _reliable(rows, Softmax(entropy=True), max_entropy, lambda s: s.entropy)


def _sparse_cl(rows: Rows, *, weight: str, max_entropy: float | None) -> RowLoss:
    return _selected(rows, 1, max_entropy, lambda s: _sparse_cl_rows(s, weight))


def _sparse_cl_rows(s: SimpleNamespace, weight: str) -> Tensor:
    return -s.top[:, 0] * (s.chances[:, 0].detach() if weight == "prob" else 1)


def _knl(rows: Rows, *, k: int, skip: int, form: str, max_entropy: float | None) -> RowLoss:
    need_negatives(rows.run.layout.total, skip)
    return _selected(rows, 1 + skip + k, max_entropy, lambda s: _knl_rows(s, skip, form))


def _knl_rows(s: SimpleNamespace, skip: int, form: str) -> Tensor:
    if form == "nl":
        return -torch.log1p(-s.chances[:, skip + 1 :]).sum(dim=1)
    negatives = s.top[:, skip + 1 :]
    return torch.where(negatives == -torch.inf, 0, negatives).sum(dim=1)


def _tta(rows: Rows, *, k: int, skip: int, lam: float, form: str, max_entropy: float | None) -> RowLoss:
    need_negatives(rows.run.layout.total, skip)

    def formula(s: SimpleNamespace) -> Tensor:
        return _sparse_cl_rows(s, "one") + lam * _knl_rows(s, skip, form)

    return _selected(rows, 1 + skip + k, max_entropy, formula)


def _selected(rows: Rows, count: int, max_entropy: float | None, formula: Callable[[SimpleNamespace], Tensor]) -> RowLoss:
    """A formula of the largest classes; NaN with a NaN gradient in rows that have no softmax."""
    one = Softmax(partition=True, top=min(count, rows.run.layout.total), entropy=max_entropy is not None)
    return _reliable(rows, one, max_entropy, lambda s: torch.where(s.lse.isnan(), s.lse, formula(s)))


def _reliable(rows: Rows, one: Softmax, max_entropy: float | None, formula: Callable[[SimpleNamespace], Tensor]) -> RowLoss:
    """The formula of the rows with an entropy below `max_entropy`; the others are out: value, mass and gradient 0."""
    (s,) = rows.measure(one)
    if max_entropy is None:
        return RowLoss(formula(s))
    kept = s.entropy.detach() < max_entropy  # not a NaN row
    clean = {name: torch.where(kept if t.dim() == 1 else kept[:, None], t, 0) for name, t in vars(s).items()}
    return RowLoss(torch.where(kept, formula(SimpleNamespace(**clean)), 0), kept.to(s.entropy.dtype))


def _adr_pass(rows: Rows, top: int, phi: str) -> Softmax:
    check.integer("top", top, least=1, most=rows.run.layout.total)
    return Softmax(top=top, entropy=phi == "entropy", variance=phi == "variance")


def _adr_rows(
    rows: Rows, s: SimpleNamespace, *, top: int, phi: str, scope: str, norm: str, form: str, detach_phi: bool
) -> Tensor:
    classes = rows.run.layout.total
    concentration = (s.chances if norm == "l1" else s.chances.square()).sum(dim=1)
    if phi == "entropy":
        uncertainty = s.entropy / (math.log(classes) if classes > 1 else 1)
    else:
        uncertainty = classes / max(classes - 1, 1) * s.variance
    if scope == "batch":
        uncertainty = _mean(uncertainty, None).expand_as(concentration)
    if detach_phi:
        uncertainty = uncertainty.detach()
    # In float64, as in the kernels: a density with a large exponent magnifies the rounding of its logarithm.
    density = _density(concentration.double(), uncertainty.double(), top, top / 2 if form == "gauss" else top)
    return density.to(concentration.dtype)


def _adr(rows: Rows, *, top: int, phi: str, **own: Any) -> RowLoss:
    (s,) = rows.measure(_adr_pass(rows, top, phi))
    return RowLoss(_adr_rows(rows, s, top=top, phi=phi, **own))


def _cross_entropy_adr(rows: Rows, *, gamma: float, **own: Any) -> RowLoss:
    adr = {name: own.pop(name) for name in ("top", "phi", "scope", "norm", "form", "detach_phi")}
    ce, regularizer = rows.measure(_cross_entropy_pass(rows, **own), _adr_pass(rows, adr["top"], adr["phi"]))
    loss = _cross_entropy_rows(rows, ce, **own)
    extra = gamma * _adr_rows(rows, regularizer, **adr)
    return loss._replace(extra=extra if loss.extra is None else loss.extra + extra)


#: name in the table of losses -> its formula
FORMULAS: dict[str, Callable[..., RowLoss]] = {
    "cross_entropy": _cross_entropy,
    "logit_adjusted": _logit_adjusted,
    "logit_norm": _logit_norm,
    "focal": _focal,
    "target": _target,
    "hem": _margin,
    "multi_margin": _margin,
    "entropy": _entropy,
    "sparse_cl": _sparse_cl,
    "knl": _knl,
    "tta": _tta,
    "adr": _adr,
    "cross_entropy_adr": _cross_entropy_adr,
}


# A call: shards in, agreement, the public function on a stand-in of all classes, formula, reduction ---------------------------


def _loss_of(
    source: Logits | Head, tensors: tuple[Tensor | None, ...], soft: Tensor | None, layout: Layout, group: Group, workspace: int
) -> Callable[..., Tensor]:
    """What runs once the public function has checked its arguments."""

    def loss(spec: LossSpec, problem: Problem, own: dict[str, Any], backend: str | None) -> Tensor:
        if backend not in (None, "reference"):
            raise BackendError(f"backend {backend!r} cannot run {spec.function} on split classes: it is plain PyTorch there")
        formula = FORMULAS.get(spec.name)
        if formula is None:
            why = spec.missing.get("parallel", f"{', '.join(FORMULAS)} do")
            raise BackendError(f"{spec.function} does not run on split classes: {why}")
        obstacle = learned(problem, own)
        if obstacle is not None:
            raise BackendError(f"{spec.function} does not run on split classes: {obstacle}, on logits in one piece")
        live, y = _live(problem)
        run = Run(source, (), live, y, soft, layout, group, problem.dtype, workspace)
        with torch.autocast(problem.x.device.type, enabled=False):
            return _reduced(formula(Rows(run, tensors, problem.weight), **own), live, source.rows, problem)

    return loss


def _live(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """The numbers of the rows that count (None: all of them) and their labels."""
    if problem.y is None:
        mask = problem.mask
        return (None if mask is None or bool(mask.all()) else mask.reshape(-1).nonzero()[:, 0]), None
    y = problem.y.reshape(-1).long()
    ignored = y == problem.ignore_index
    outside = ((y < 0) | (y >= problem.classes)) & ~ignored
    if bool(outside.any()):
        raise bad_label(problem.y, int(outside.nonzero()[0]), problem.classes, problem.ignore_index)
    if not bool(ignored.any()):
        return None, y
    live = (~ignored).nonzero()[:, 0]
    return live, y[live]


def _reduced(loss: RowLoss, live: Tensor | None, count: int, problem: Problem) -> Tensor:
    if live is None:
        return reduce(loss, None, problem)
    full = [t if t is None else t.new_zeros(count).index_copy(0, live, t) for t in loss]
    mask = torch.zeros(count, dtype=torch.bool, device=live.device).index_fill(0, live, True)
    assert full[0] is not None
    return reduce(RowLoss(full[0], *full[1:]), mask, problem)


def _parallel(local: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`local` on logits whose classes are split."""
    signature = inspect.signature(local)

    def function(
        *inputs: Any, group: Any = None, classes: int | None = None, timeout: float | None = None, **more: Any
    ) -> Tensor:
        x = inputs[0] if inputs else more.get("input")
        members = Group(_group_of("input", x, 1, group), timeout)
        with _refusing(members, x):
            arguments = signature.bind(*inputs, **more).arguments
            x, position, whole = _shard("input", arguments.pop("input"), 1, group)
            _check_logits(x)
            arguments = {name: _whole(name, value, x, members) for name, value in arguments.items()}
            target = arguments.get("target")
            soft = _soft(target, x)
            rows = check.label_shape(x.shape)
            facts = _facts(local, x, rows, members, position, 0, False, arguments, soft)
            size = x.shape[1 if x.dim() > 1 else 0]
        layout = members.agree(facts._replace(classes=size), classes or whole, x.device)
        shape = (*x.shape[:1], layout.total, *x.shape[2:]) if x.dim() > 1 else (layout.total,)
        if soft is not None:
            arguments["target"] = stand_in(x, *shape, dtype=soft.dtype)
        logits = stand_in(x, *shape).as_subclass(Sharded)
        logits.loss = _loss_of(Logits(x.shape), (x,), soft, layout, members, WORKSPACE)
        return local(logits, **arguments)

    return _described(function, local, "on logits whose classes are split over the ranks of a process group")


def _linear_parallel(local: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`local` on a linear layer whose weight is split by classes."""
    signature = inspect.signature(local)

    def function(
        *inputs: Any, group: Any = None, classes: int | None = None, timeout: float | None = None, **more: Any
    ) -> Tensor:
        w = inputs[1] if len(inputs) > 1 else more.get("linear_weight")
        members = Group(_group_of("linear_weight", w, 0, group), timeout)
        with _refusing(members, w):
            arguments = signature.bind(*inputs, **more).arguments
            arguments |= arguments.pop("loss_arguments", {})
            w, position, whole = _shard("linear_weight", arguments.pop("linear_weight"), 0, group)
            b = arguments.pop("linear_bias", None)
            b = b if b is None else _shard("linear_bias", b, 0, members.group)[0]
            arguments = {name: _whole(name, value, w, members) for name, value in arguments.items()}
            h, target = arguments.pop("input"), arguments["target"]
            _check_head(h, w, b)
            soft = _soft(target, stand_in(h, *h.shape[:-1], len(w)))
            workspace = check.integer("workspace", arguments.get("workspace", WORKSPACE), least=0)
            summed = torch.is_grad_enabled() and h.requires_grad
            facts = _facts(local, h, h.shape[:-1], members, position, h.shape[-1], summed, arguments, soft)
        layout = members.agree(facts._replace(classes=len(w)), classes or whole, h.device)
        if soft is not None:
            arguments["target"] = stand_in(h, *h.shape[:-1], layout.total, dtype=soft.dtype)
            soft = soft.movedim(-1, 1) if soft.dim() > 1 else soft
        head = stand_in(w, layout.total, w.shape[1]).as_subclass(ShardedHead)

        def logits(h: Tensor) -> Tensor:
            x = stand_in(h, *h.shape[:-1], layout.total, dtype=_dtype(h, w))
            made = (x.movedim(-1, 1) if x.dim() > 2 else x).as_subclass(Sharded)
            made.loss = _loss_of(Head(h.shape), (h, w, b), soft, layout, members, workspace)
            return made

        head.logits = logits
        bias = None if b is None else stand_in(b, layout.total)
        return local(h, head, linear_bias=bias, **arguments)

    return _described(function, local, "on a linear layer whose weight and bias are split over the ranks of a process group")


def _described(function: Callable[..., Tensor], local: Callable[..., Tensor], what: str) -> Callable[..., Tensor]:
    """`function` with the name, the signature and a docstring that points to `local`."""
    parameters = list(inspect.signature(local).parameters.values())
    free = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, keyword, default=None) for name in ("group", "classes", "timeout")]
    function.__name__ = function.__qualname__ = local.__name__
    function.__module__ = __name__
    function.__doc__ = f"`pylosses.{local.__name__}` {what}; see `pylosses.parallel` for `group`, `classes` and `timeout`."
    function.__signature__ = inspect.Signature([p for p in parameters if p not in free] + added + free)  # type: ignore[attr-defined]
    return function


class _refusing:
    """When this rank cannot even tell its facts, the others must not wait for them."""

    def __init__(self, members: Group, like: Any) -> None:
        self.members, self.device = members, like.device if isinstance(like, Tensor) else torch.device("cpu")

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            self.members.refuse(self.device)


def _facts(
    local: Callable[..., Tensor],
    x: Tensor,
    rows: torch.Size,
    members: Group,
    position: int | None,
    features: int,
    summed: bool,
    arguments: dict[str, Any],
    soft: Tensor | None,
) -> Facts:
    labels = fingerprint({"target": arguments.get("target")}) if soft is None else 0
    call = fingerprint({k: v for k, v in arguments.items() if k not in ("target", "backend")} | {"": local.__name__})
    place = members.rank if position is None else position
    return Facts(place, 0, x.dtype, tuple(rows), features, summed, labels, call)


def _check_logits(x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"input must be a Tensor of logits, got {type(x).__name__}")
    if x.dtype not in ACCUMULATE:
        raise TypeError(f"input must be float32, bfloat16, float16 or float64, got {x.dtype}")
    if not 1 <= x.dim() <= 8:
        raise ValueError(f"input must have shape (C), (N, C) or (N, C, d1, ...) of at most 8 dimensions, got {tuple(x.shape)}")


def _check_head(h: Any, w: Any, b: Any) -> None:
    for name, value in (("input", h), ("linear_weight", w), ("linear_bias", b)):
        if value is None and name == "linear_bias":
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
        if value.dtype not in ACCUMULATE:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {value.dtype}")
    if not 1 <= h.dim() <= 8:
        raise ValueError(f"input must have shape (D), (N, D) or (..., D) of at most 8 dimensions, got {tuple(h.shape)}")
    if w.dim() != 2 or w.shape[1] != h.shape[-1]:
        raise ValueError(f"linear_weight must have shape (c, {h.shape[-1]}) on each rank, got {tuple(w.shape)}")
    if b is not None and b.shape != w.shape[:1]:
        raise ValueError(f"linear_bias must have shape ({len(w)},), the classes of this rank's weight, got {tuple(b.shape)}")


def _soft(target: Any, x: Tensor) -> Tensor | None:
    """Probabilities, which are split like the logits; None for labels."""
    if not isinstance(target, Tensor) or not target.is_floating_point():
        return None
    if target.shape != x.shape:
        raise ValueError(
            f"target must hold the probabilities of this rank's classes, shape {tuple(x.shape)}, got {tuple(target.shape)}"
        )
    if target.requires_grad and torch.is_grad_enabled():
        raise BackendError("target requires a gradient, which only the reference backend computes, on logits in one piece")
    return target


# DTensor ----------------------------------------------------------------------------------------------------------------------


def _is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has imported it, which takes a second
    return module is not None and isinstance(value, module.DTensor)


def _group_of(name: str, value: Any, dim: int, group: Any) -> Any:
    """The group of the ranks that make this call, whatever else is wrong with it."""
    if not _is_dtensor(value):
        return group
    mesh = value.device_mesh  # of several dimensions, only good placements say which
    return mesh.get_group(0 if mesh.ndim == 1 else _split(name, value, dim))


def _split(name: str, value: Any, dim: int) -> int:
    """Which dimension of its mesh splits the classes of a DTensor."""
    dim = min(dim, value.dim() - 1)
    split = [i for i, p in enumerate(value.placements) if not p.is_replicate()]
    if len(split) != 1 or not value.placements[split[0]].is_shard(dim):
        raise ValueError(
            f"{name} must be split along its classes, Shard({dim}), on one dimension of its mesh and replicated on the others, "
            f"got {value.placements}"
        )
    return split[0]


def _shard(name: str, value: Any, dim: int, group: Any) -> tuple[Any, int | None, int | None]:
    """The shard, its place among the shards and the number of all classes; None where the group tells."""
    if not _is_dtensor(value):
        return value, None, None
    split, mesh = _split(name, value, dim), value.device_mesh
    if group is not None and group is not mesh.get_group(split):
        raise ValueError(f"group must be None or that of {name}'s mesh, got another one")
    return value.to_local(), mesh.get_local_rank(split), value.shape[min(dim, value.dim() - 1)]


def _whole(name: str, value: Any, like: Any, members: Group) -> Any:
    """An argument that every rank has: a replicated DTensor becomes a tensor, and split probabilities this rank's part."""
    if not _is_dtensor(value):
        return value
    if not all(p.is_replicate() for p in value.placements):
        if name == "target" and value.is_floating_point():
            return value.to_local()
        raise ValueError(f"{name} must be replicated, got {value.placements}")
    return value.to_local()


# Data parallel ----------------------------------------------------------------------------------------------------------------


def global_count(
    target: Tensor | None = None,
    *,
    losses: Tensor | None = None,
    mask: Tensor | None = None,
    weight: Tensor | None = None,  # (C)
    sample_weight: Tensor | None = None,
    ignore_index: int = -100,
    averaged: bool = False,
    group: Any = None,
    timeout: float | None = None,
) -> Tensor:
    """What a mean over the rows of all processes divides by: the `normalizer` of data-parallel training.

    Each process has rows of its own, and the step is to be that of one process with all rows. Which count that takes depends
    on what becomes of the processes' gradients::

        n = global_count(target, averaged=True)     # DistributedDataParallel and FSDP average them
        n = global_count(target)                    # they are summed, by an all-reduce of your own
        loss(input, target, normalizer=n).backward()

    The average (or sum) of the processes' losses is then the loss of all rows, and that of their gradients its gradient.
    Without `averaged` under DistributedDataParallel, the gradient is that gradient divided by the number of processes.

    Args:
        target: labels of this process's rows.
        losses: row losses (``reduction="none"``): only rows with a loss above zero count, as in ``reduction="above_zero"``.
        mask: rows that count, of a loss without labels.
        weight, sample_weight, ignore_index: as in the loss.
        averaged: divide the count by the number of processes, for gradients that will be averaged over them.
        group: the process group over which the rows are spread; None is the default group, or this process alone.
        timeout: seconds to wait for the others, with gloo.

    **Convention**

    - one collective of one number; the result is a 0-d float64 tensor on the rows' device, without a gradient.
    - a z-loss with class weights has two divisors in one process; a normalizer replaces both.

    >>> import torch, pylosses
    >>> y = torch.tensor([1, 2, -100])
    >>> n = pylosses.parallel.global_count(y)
    >>> pylosses.cross_entropy(torch.zeros(3, 4), y, normalizer=n)
    tensor(1.3863)
    """
    given = {"target": target, "losses": losses, "mask": mask}
    tensors = {name: t for name, t in given.items() if t is not None}
    if not tensors:
        raise ValueError("global_count needs target, losses or mask: something that has the rows")
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(t).__name__}")
    first, like = next(iter(tensors.items()))
    if sample_weight is not None:
        tensors["sample_weight"] = sample_weight
    for name, t in tensors.items():
        if t.shape != like.shape:
            raise ValueError(f"{name} must have shape {tuple(like.shape)} like {first}, got {tuple(t.shape)}")
    if weight is not None and target is None:
        raise ValueError("weight needs target: it is the weight of the labels")
    mass = torch.ones(like.shape, dtype=torch.float64, device=like.device)
    if sample_weight is not None:
        mass = mass * sample_weight.detach()
    if target is not None:
        counted = target != ignore_index
        if weight is not None:
            mass = mass * weight.detach().double()[torch.where(counted, target, 0).long()]
        mass = torch.where(counted, mass, 0)
    if mask is not None:
        mass = torch.where(mask, mass, 0)
    if losses is not None:
        mass = torch.where(losses.detach() <= 0, 0, mass)  # NaN counts, so that it shows
    members = Group(group, timeout)
    (count,) = members.sum(mass.sum())
    return count / members.size if averaged else count


# The functions ----------------------------------------------------------------------------------------------------------------

cross_entropy = _parallel(losses.cross_entropy)
focal_loss = _parallel(losses.focal_loss)
target_loss = _parallel(losses.target_loss)
logit_norm_loss = _parallel(losses.logit_norm_loss)
logit_adjusted_loss = _parallel(losses.logit_adjusted_loss)
multi_margin_loss = _parallel(losses.multi_margin_loss)
hem_loss = _parallel(losses.hem_loss)
entropy_loss = _parallel(losses.entropy_loss)
sparse_cl_loss = _parallel(losses.sparse_cl_loss)
knl_loss = _parallel(losses.knl_loss)
tta_loss = _parallel(losses.tta_loss)
adr_loss = _parallel(losses.adr_loss)
cross_entropy_adr = _parallel(losses.cross_entropy_adr)
linear_cross_entropy = _linear_parallel(linear.linear_cross_entropy)
linear_hem_loss = _linear_parallel(linear.linear_hem_loss)
linear_loss = _linear_parallel(linear.linear_loss)

__all__ = [
    "global_count",
    *(spec.function for spec in LOSSES.values() if spec.name in FORMULAS),
    "linear_cross_entropy",
    "linear_hem_loss",
    "linear_loss",
]
