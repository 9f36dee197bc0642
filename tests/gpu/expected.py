"""What compiled code must have computed: loss, gradient and what it saved for backward, by their definitions, in float64.

A wrong maximum still gives a right softmax, so each saved number is compared too. `PLACES` says which number is where.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpu_calls import arguments_of, truth
from torch import Tensor

from pylosses.autograd import Call
from pylosses.spec import LOSSES, LossSpec

#: (backend, kind of row) -> names of the numbers that a row saves; a class is named "class ..."
PLACES = {
    ("triton", "softmax"): ("m", "d"),
    ("triton", "soft"): ("m", "d", "mass"),
    ("triton", "norm"): ("m", "d", "norm", "mean"),
    ("triton", "margin"): ("threshold", "factor", "slopes"),
    ("triton", "entropy"): ("m", "d", "mu", "slope"),
    ("triton", "select"): ("mark", "rest", "own", "class first", "class before", "class last"),
    ("triton", "adr"): ("mark", "rest", "second", "chosen", "class first", "class last", "phi", "ce m", "ce d", "ce mass"),
    ("triton", "region"): ("m", "d", "ce m", "ce d"),
}
PLACES |= {("cuda", kind): names for (_, kind), names in PLACES.items()} | {
    ("cuda", "select"): ("mark", "m", "rest", "own", "class before", "class first", "class last"),
    ("cuda", "adr"): ("mark", "m", "rest", "second", "share", "class first", "class last", "ce m", "ce d", "ce mass"),
    ("cuda", "region"): ("others m", "others d", "class leader", "ce m", "ce d"),
}


def check(backend: str, name: str, sample: int, call: Call, x: Tensor, up: Tensor, got: Any) -> None:
    """`got` has loss, gradient and saved, of float64 or of float32 statistics."""
    loss, gradient = truth(name, sample, call, x, up)
    single = 1e-12 if x.dtype == torch.float64 else 4e-6
    assert float((got.loss - loss).abs()) <= single * max(float(loss.abs()), 1e-3)
    # Autograd through p^q, say, is off by 2.3e-12 itself, where the kernels, by long double, are right to 2e-15.
    rounding = {2: torch.finfo(x.dtype).eps, 4: 0, 8: 1e-11}[x.element_size()]
    tiny = torch.finfo(x.dtype).tiny
    assert float((got.gradient.double() - gradient).abs().max()) <= (single + rounding) * float(gradient.abs().max()) + tiny
    check_saved(backend, name, arguments_of(name, sample, x), call, x, got.saved, single)
    if LOSSES[name].family == "region":
        check_classes(backend, name, arguments_of(name, sample, x), call, x, got.saved, single)


def check_saved(
    backend: str, name: str, own: dict[str, Any], call: Call, x: Tensor, saved: Tensor, single: float, more: Any = (),
    terms: Tensor | None = None,
) -> None:  # fmt: skip
    """The numbers of the rows; `own` are the arguments of the loss, `single` the error of one, `more` the names of further
    numbers behind them, `terms` the size of what the logits of a row are sums of: their rounding is relative to it."""
    spec = LOSSES[name]
    rows = x.numel() // x.shape[1]
    counted = torch.ones(rows, dtype=torch.bool) if call.y is None else call.y.reshape(-1) != call.ignore_index
    found = statistics(spec, own, call, x)
    if terms is not None and "m" in found:
        found["m of"] = terms
    kind = "soft" if call.soft is not None and spec.family == "softmax" else kind_of(spec)
    kept = found.get("mark", counted) != 0  # a row that a filter leaves out needs no other number
    compared = 0
    for number, what in enumerate((*PLACES[backend, kind], *more)):
        if what not in found:
            continue
        row, wanted = saved[2 + number * rows : 2 + (number + 1) * rows], found[what]
        if what.startswith("class") and row.dtype == torch.float32:
            row = row.view(torch.int32)  # a class that is not a float32 would be another one
        size = found.get(f"{what} of", wanted).abs()
        difference = torch.where(row.double() == wanted, 0, (row.double() - wanted).abs())  # the largest of no logits is -inf
        # e^(x - m) of float32 logits: the difference is rounded, at up to 200; what is subnormal has fewer digits
        allowed = 8 * single * size + torch.finfo(row.dtype if row.is_floating_point() else x.dtype).tiny
        asked = counted if what in ("mark", "slope") else counted & kept
        assert (difference <= allowed)[asked].all(), f"{what} of rows: {row} is not {wanted}"
        compared += 1
    assert compared >= 2


def kind_of(spec: LossSpec) -> str:
    return "adr" if spec.name in ("adr", "cross_entropy_adr") else "norm" if spec.name == "logit_norm" else spec.family


def statistics(spec: LossSpec, own: dict[str, Any], call: Call, x: Tensor) -> dict[str, Tensor]:
    """name of a number -> its value for the rows (R); "... of": what its error is relative to, if not itself."""
    x = x.movedim(1, -1).reshape(-1, x.shape[1]).double()
    y = None if call.y is None else call.y.reshape(-1)
    if y is not None:
        keep = y != call.ignore_index
        x, y = torch.where(keep[:, None], x, 0), torch.where(keep, y, 0)
    kind = kind_of(spec)
    if kind == "margin":
        return _margin(x, y, call, **{"threshold": spec.name == "hem", "above_zero": spec.name == "hem"} | own)
    if kind == "norm":
        return _logit_norm(x, y, own.get("temperature", 0.04), own.get("eps", 1e-7))
    if kind == "softmax":
        return _softmax(x, y, call, **own)
    found = _moments(x)
    if kind in ("entropy", "select"):
        if kind == "select":
            found |= _select(x, own.get("k", 0 if spec.name == "sparse_cl" else 5), own.get("skip", 5), own.get("form", "nl"))
        kept = found["entropy"] < own["max_entropy"] if own.get("max_entropy") is not None else torch.ones(len(x)).bool()
        return found | {"mark": kept.double(), "slope": kept.double()}
    if kind == "adr":
        found |= _adr(x, **own)
    if kind == "region":
        found |= {f"others {name}": value for name, value in _sums(x.scatter(1, y[:, None], -torch.inf)).items()}
        if x.shape[1] > 1:
            found["class leader"] = x.scatter(1, y[:, None], -torch.inf).argmax(1).double()
    if spec.name in ("cross_entropy_adr", "dice_ce"):
        found |= {f"ce {name}": value for name, value in _softmax(x, y, call, **own).items()}
    return found


def _sums(u: Tensor) -> dict[str, Tensor]:
    """The largest, and the sum of exponentials relative to it."""
    m = u.amax(1)
    return {"m": m, "d": torch.exp(u - m.where(m.isfinite(), 0)[:, None]).sum(1)}


def _softmax(
    x: Tensor, y: Tensor | None, call: Call, temperature: float = 1.0, softcap: float | None = None,
    label_smoothing: float = 0.0, **_: Any,
) -> dict[str, Tensor]:  # fmt: skip
    u = x if softcap is None else softcap * torch.tanh(x / softcap)
    u = u / temperature + (0 if call.shift is None else call.shift.double())
    if call.soft is None:
        assert y is not None
        return _sums(u.scatter(1, y[:, None], -torch.inf))
    t = call.soft.movedim(1, -1).reshape(x.shape).double()
    w = 1.0 if call.weight is None else call.weight.double()
    q = w * ((1 - label_smoothing) * t + label_smoothing / x.shape[1])
    return _sums(u) | {"mass": q.sum(1)}


def _logit_norm(x: Tensor, y: Tensor, temperature: float, eps: float) -> dict[str, Tensor]:
    late = 1 / (temperature * (x.norm(dim=1) + eps))
    others = x.scatter(1, y[:, None], -torch.inf)
    m = others.amax(1)
    e = torch.exp((others - m.where(m.isfinite(), 0)[:, None]) * late[:, None])
    rest = x.scatter(1, y[:, None], 0)
    size = (e * rest.abs()).sum(1) / e.sum(1).clamp(min=1e-300)
    mean = (e * rest).sum(1) / e.sum(1).clamp(min=1e-300)
    return {"m": m, "d": e.sum(1), "norm": rest.norm(dim=1), "mean": mean, "mean of": size}


def _margin(
    x: Tensor, y: Tensor, call: Call, threshold: bool, above_zero: bool, margin: Any = 1.0, power: float = 1.0,
    delta: float = 1e-4, margin_index: str = "logit", **_: Any,
) -> dict[str, Tensor]:  # fmt: skip
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
    weight = 1.0 if call.weight is None else call.weight.double()[y]
    factor = torch.where(kept.any(1), weight / divisor, 0)
    return {"threshold": t, "factor": factor, "slopes": torch.where(kept, slopes, 0).sum(1)}


def _moments(x: Tensor) -> dict[str, Tensor]:
    """Of a row's softmax; "rest" and "second" leave one of its largest classes out."""
    value, _ = _ranked(x)
    p, e = torch.softmax(value, 1), torch.exp(value[:, 1:])
    mu = (p * value).sum(1)
    entropy = torch.log1p(e.sum(1)) - mu
    return {"m": x.amax(1), "d": 1 + e.sum(1), "rest": e.sum(1), "mu": mu, "entropy": entropy}


def _ranked(x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in descending order, the lowest class first among equals, less the largest; and their classes."""
    value, at = x.sort(dim=1, descending=True, stable=True)
    return value - value[:, :1], at.double()


def _select(x: Tensor, k: int, skip: int, form: str) -> dict[str, Tensor]:
    value, at = _ranked(x)
    found = {"class first": at[:, 0]}
    if k and x.shape[1] > 1 + skip:
        p = torch.softmax(value, 1)[:, 1 + skip : 1 + skip + k]
        found |= {"class before": at[:, skip], "class last": at[:, : 1 + skip + k][:, -1]}
        found |= {"own": (p / (1 - p)).sum(1)} if form == "nl" else {}
    return found


def _adr(x: Tensor, top: int, phi: str = "entropy", norm: str = "l2", **_: Any) -> dict[str, Tensor]:
    value, at = _ranked(x)
    n = x.shape[1]
    moments = _moments(x)
    e, rest, d = torch.exp(value[:, 1:]), moments["rest"], moments["d"]
    l1 = norm == "l1"
    chosen = e[:, : top - 1].sum(1) if l1 else (e[:, : top - 1] ** 2).sum(1)
    found = {"mark": torch.ones(len(x), dtype=torch.float64), "chosen": chosen}
    found |= {"share": (rest - chosen) / d if l1 else chosen / d**2, "share of": rest / d if l1 else chosen / d**2}
    found |= {"class first": at[:, 0], "class last": at[:, min(top, n) - 1]}
    if phi == "entropy":
        return found | {"second": moments["mu"], "phi": moments["entropy"] / math.log(max(n, 2))}
    p = e / d[:, None]
    variance = rest / d**2 + (p * (1 - p)).sum(1)  # the largest has 1 - p = rest / d
    return found | {"second": (e * e).sum(1), "phi": n / max(n - 1, 1) * variance}


def check_classes(
    backend: str, name: str, own: dict[str, Any], call: Call, x: Tensor, saved: Tensor, single: float
) -> None:  # fmt: skip
    """The region family's two derivatives of each area's classes, and how many areas count; reduction "mean"."""
    assert call.reduction == "mean"
    wanted, counted = class_slopes(own, call, x, None if name == "dice_ce" else call.weight)
    if backend == "triton":  # pull, push; at the end
        got, count = saved[-wanted.numel() - 1 : -1].view(wanted.shape).flip(1), saved[-1]
    else:  # push, pull beside each other, in float64
        behind = saved.view(torch.float64)[-wanted.numel() - 1 :]
        got, count = behind[1:].view(len(wanted), -1, 2).transpose(1, 2), behind[0]
    assert int(count) == counted
    allowed = 8 * single * wanted.abs() + torch.finfo(got.dtype).tiny
    assert ((got.double() - wanted).abs() <= allowed).all(), f"slopes of classes: {got} are not {wanted}"


def class_slopes(own: dict[str, Any], call: Call, x: Tensor, weight: Tensor | None) -> tuple[Tensor, int]:
    """(areas, 2, C) push B / Z^2 and pull 2 / Z, with the share of each class in the mean; see kernels/losses/dice.py."""
    areas, classes = x.shape[0] if own.get("over") == "image" else 1, x.shape[1]
    y = call.y.reshape(areas, -1)
    live = y != call.ignore_index
    p = torch.softmax(x.double(), 1).movedim(1, -1).reshape(areas, -1, classes)
    p = torch.where(live[..., None], p, 0)
    t = torch.nn.functional.one_hot(torch.where(live, y, 0), classes) * live[..., None]
    hit, size = (t * p).sum(1), (t + p).sum(1)  # (areas, C)
    smooth, absent, present = own.get("smooth", 0.0), own.get("absent", "literal"), t.sum(1) > 0
    w = torch.ones(areas, classes).double() if weight is None else weight.double().expand(areas, -1)
    w = torch.where(present if absent == "exclude" else present.any(1, keepdim=True), w, 0)
    push, pull = (2 * hit + smooth) / (size + smooth) ** 2, 2 / (size + smooth)
    moves = present if absent == "zero" or smooth == 0 else torch.ones_like(present)
    share = torch.where(moves, w, 0) / w.sum(1, keepdim=True).clamp(min=1e-300)
    return torch.stack((push * share, pull * share), 1), int((w.sum(1) > 0).sum())
