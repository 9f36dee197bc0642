"""What the kernels save for backward, by its definition, in float64: a wrong maximum still gives a right softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pylosses.autograd import Call
from pylosses.spec import LossSpec


def statistics(spec: LossSpec, own: dict[str, Any], call: Call, x: Tensor) -> dict[int, Tensor]:
    """number of the statistic -> its value for the rows (R); `own` are the arguments of the loss."""
    x = x.movedim(1, -1).reshape(-1, x.shape[1]).double()
    y = None if call.y is None else call.y.reshape(-1)
    if y is not None:
        keep = y != call.ignore_index
        x, y = torch.where(keep[:, None], x, 0), torch.where(keep, y, 0)
    if spec.family in ("region", "entropy"):
        m, d = x.amax(1), torch.exp(x - x.amax(1, keepdim=True)).sum(1)
        mu = (torch.softmax(x, 1) * (x - m[:, None])).sum(1)
        return {0: m, 1: d} if spec.family == "region" else {0: m, 1: d, 2: mu}
    if spec.name in ("adr", "cross_entropy_adr"):
        return _adr(x, **own)
    if spec.family == "select":
        return _select(x, own.get("k", 0 if spec.name == "sparse_cl" else 5), own.get("skip", 5))
    if call.soft is not None:
        u = _mapped(x, call, **own)
        return {0: u.amax(1), 1: torch.exp(u - u.amax(1, keepdim=True)).sum(1)}
    if spec.family == "margin":
        return _margin(x, y, call, **{"threshold": spec.name == "hem", "above_zero": spec.name == "hem"} | own)
    if spec.name == "logit_norm":
        return _logit_norm(x, y, own.get("temperature", 0.04), own.get("eps", 1e-7))
    u = _mapped(x, call, **own).scatter(1, y[:, None], -torch.inf)
    m = u.amax(1)
    return {0: m, 1: torch.exp(u - m.where(m.isfinite(), 0)[:, None]).sum(1)}


def _mapped(x: Tensor, call: Call, temperature: float = 1.0, softcap: float | None = None, **_: Any) -> Tensor:
    u = x if softcap is None else softcap * torch.tanh(x / softcap)
    return u / temperature + (0 if call.shift is None else call.shift.double())


def _logit_norm(x: Tensor, y: Tensor, temperature: float, eps: float) -> dict[int, Tensor]:
    late = 1 / (temperature * (x.norm(dim=1) + eps))
    others = x.scatter(1, y[:, None], -torch.inf)
    m = others.amax(1)
    e = torch.exp((others - m.where(m.isfinite(), 0)[:, None]) * late[:, None])
    rest = x.scatter(1, y[:, None], 0)
    return {0: m, 1: e.sum(1), 2: rest.norm(dim=1), 3: (e * rest).sum(1) / e.sum(1).clamp(min=1e-300)}


def _margin(
    x: Tensor, y: Tensor, call: Call, threshold: bool, above_zero: bool, margin: Any = 1.0, power: float = 1.0,
    delta: float = 1e-4, margin_index: str = "logit", **_: Any,
) -> dict[int, Tensor]:  # fmt: skip
    mu = margin if call.shift is None else call.shift.double()
    if call.shift is not None and margin_index == "label":
        mu = mu[y][:, None]
    raw = (x - x.gather(1, y[:, None]) + mu).scatter(1, y[:, None], -torch.inf)
    base = raw.clamp(min=0)
    errors, slopes = base**power, power * raw.clamp(min=1e-300) ** (power - 1)
    if power < 1 and delta > 0:
        errors = torch.where(raw < delta, delta ** (power - 1) * base, errors)
        slopes = torch.where(raw < delta, delta ** (power - 1), slopes)
    t = errors.mean(1) if threshold else torch.zeros(len(x), dtype=torch.float64)
    kept = (errors >= t[:, None]) & (raw > 0)
    divisor = kept.sum(1).clamp(min=1).double() if above_zero else torch.full((len(x),), float(x.shape[1])).double()
    return {0: t, 1: torch.where(kept.any(1), 1 / divisor, 0), 2: torch.where(kept, slopes, 0).sum(1)}


def _ranked(x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in descending order, the lowest class first among equals, less the largest; and their classes."""
    value, at = x.sort(dim=1, descending=True, stable=True)
    return value - value[:, :1], at.double()


def _select(x: Tensor, k: int, skip: int) -> dict[int, Tensor]:
    value, at = _ranked(x)
    last = min(1 + skip + k if k else 1, x.shape[1]) - 1
    found = {0: torch.ones(len(x), dtype=torch.float64), 1: torch.exp(value[:, 1:]).sum(1), 3: at[:, 0]}
    return found | ({5: at[:, last]} if k else {})


def _adr(
    x: Tensor, top: int, phi: str = "entropy", scope: str = "sample", norm: str = "l2", **_: Any
) -> dict[int, Tensor]:  # fmt: skip
    value, at = _ranked(x)
    e = torch.exp(value[:, 1:])
    rest = e.sum(1)
    p, n = torch.softmax(x, 1), x.shape[1]
    mu = (p * value.gather(1, at.long().argsort(1))).sum(1)
    second = mu if phi == "entropy" else (e * e).sum(1)
    chosen = e[:, : top - 1].sum(1) if norm == "l1" else (e[:, : top - 1] ** 2).sum(1)
    found = {0: torch.ones(len(x), dtype=torch.float64), 1: rest, 2: second, 3: chosen, 4: at[:, 0]}
    return found | {5: at[:, min(top, n) - 1]}
