"""Everybody who computes a loss: our backends, the eager formula, torch.compile of it, torch's own, other libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pylosses.checking import function_of
from pylosses.choice import backends
from pylosses.spec import BACKENDS, LossSpec, PerClass

from .eager import EAGER
from .peers import PEERS, Peer
from .shapes import Shape


@dataclass
class Provider:
    """One way to compute a loss."""

    name: str
    kind: str  #: "ours", "reference", "eager", "compile", "torch" or "peer"
    call: Callable[..., Any]  #: positional tensors -> loss
    reason: str | None = None  #: why it cannot run here


def variants(spec: LossSpec, peers: bool) -> list[dict[str, Any]]:
    """The argument sets under which a loss is timed: the usual ones, then those that only a peer needs."""
    found = [{} if spec.name in EAGER else dict(spec.samples[0])]
    for peer in PEERS if peers else ():
        if peer.loss == spec.name and peer.timed and peer.arguments and dict(peer.arguments) not in found:
            found.append(dict(peer.arguments))
    return found


def concrete(arguments: Mapping[str, Any], shape: Shape, device: str) -> dict[str, Any]:
    """Arguments with their per-class tensors made for the shape."""
    made = {}
    for name, value in arguments.items():
        made[name] = value.tensor(shape.classes).float().to(device) if isinstance(value, PerClass) else value
    return made


def providers(
    spec: LossSpec,
    arguments: dict[str, Any],
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    *,
    asked: list[str] | None,
    compile: bool,
    peers: bool,
) -> list[Provider]:
    """All providers of one configuration; those that cannot run have a reason."""
    own = concrete(arguments, shape, device)
    formula = None if arguments else EAGER.get(spec.name)
    found = [_ours(spec, name, own) for name in asked or _fused_for(device)]
    if not asked and (formula is None or all(provider.reason for provider in found)):
        found.append(_ours(spec, "reference", own))
    if formula is not None:
        found.append(Provider("eager", "eager", formula))
        if compile:
            found.append(Provider("torch.compile", "compile", torch.compile(formula, dynamic=False)))
    for peer in PEERS:
        if peer.loss == spec.name and peer.timed and peer.arguments == arguments and (peers or peer.library == "torch"):
            found.append(_peer(peer, shape, dtype))
    return found


def _fused_for(device: str) -> list[str]:
    kind = torch.device(device).type
    return [name for name in BACKENDS[1:] if name == kind or (name == "triton" and kind == "cuda")]


def _ours(spec: LossSpec, name: str, own: dict[str, Any]) -> Provider:
    kind = "reference" if name == "reference" else "ours"
    status = backends()[name]
    reason = status.reason if not status.available else spec.why_not(name)
    return Provider(f"pylosses {name}", kind, partial(function_of(spec), backend=name, **own), reason)


def _peer(peer: Peer, shape: Shape, dtype: torch.dtype) -> Provider:
    kind = "torch" if peer.library == "torch" else "peer"
    name = peer.theirs.partition("(")[0] if kind == "torch" else peer.library
    if kind == "torch" and peer.note:
        name += f" ({peer.note})"
    call, reason = None, peer.why_not(shape.kind, len(shape.sizes), dtype)
    if reason is None:
        call, reason = peer.load()
    return Provider(name, kind, call or _absent, reason)


def _absent(*inputs: Tensor) -> Tensor:
    raise RuntimeError("a provider with a reason against it was called")


def scalar(result: Any) -> Tensor:
    """One number that depends on every output, to compare and to differentiate."""
    if isinstance(result, Tensor):
        return result.sum()
    return torch.stack([value.double().sum() for value in result if value.is_floating_point()]).sum()
