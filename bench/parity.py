"""The arguments under which other libraries agree with ours, as a table: ``python -m pylosses.bench.parity``.

Each row is an equality of `peers.PEERS`. Where the library can be imported the difference is measured; where it cannot, the
row says so.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import torch
from torch import Tensor

from pylosses.checking import function_of
from pylosses.spec import LOSSES

from .gate import evaluate
from .peers import DIFFERENT, INPUTS, PEERS, Peer
from .shapes import Shape, fits, inputs

#: Small shapes of every kind. Not all classes are in every image, so that "absent" shows.
SHAPES = (
    Shape("rows", (24, 40), "rows"),
    Shape("pixels", (3, 19, 6, 5), "pixels"),
    Shape("volume", (2, 5, 4, 3, 3), "pixels"),
    Shape("contrastive", (16, 8), "contrastive"),
    Shape("linear", (64, 80, 16), "linear"),
)
#: Two float64 implementations of one formula, or one of them in float32 inside.
TOLERANCE = {False: 1e-10, True: 1e-5}


def difference(peer: Peer) -> float | str:
    """Largest difference of loss and gradients, relative to their size, in float64; or why it cannot be called here."""
    call, reason = peer.load()
    if call is None:
        return reason or "cannot be called"
    found = []
    for given in _inputs(peer):
        ours = evaluate(lambda *t: function_of(LOSSES[peer.loss])(*t, backend="reference", **peer.arguments), given)
        theirs = evaluate(call, given)
        pairs = [(ours.loss, theirs.loss), *zip(ours.gradients, theirs.gradients, strict=True)]
        found += [float((a - b).abs().max() / a.abs().max()) for a, b in pairs]
    return max(found)


def _inputs(peer: Peer) -> Iterator[tuple[Tensor, ...]]:
    spec = LOSSES[peer.loss]
    for shape in SHAPES:
        if fits(spec, shape) and peer.why_not(shape.kind, len(shape.sizes), torch.float64) is None:
            x, *rest = inputs(spec, shape, torch.float64, "cpu")
            yield 3 * x, *rest  # some rows confident, some not


def row_of(peer: Peer, result: str) -> str:
    """A line of the table with this result."""
    given = "".join(f", {k}={v:.6g}" if isinstance(v, float) else f", {k}={v!r}" for k, v in peer.arguments.items())
    ours = f"{LOSSES[peer.loss].function}({INPUTS.get(peer.loss, 'x, y')}{given})"
    note = f" ({peer.note})" if peer.note else ""
    return f"| {peer.loss} | {peer.library} | `{peer.theirs}`{note} | `{ours}` | {result} |"


def markdown() -> str:
    """Both tables, with what was measured here."""
    versions = []
    for library in dict.fromkeys(peer.library for peer in PEERS):
        try:
            versions.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    lines = [
        f"Measured with {', '.join(versions)}.",
        "",
        "| loss | library | their call | ours | difference |",
        "|---" * 5 + "|",
    ]
    for peer in sorted(PEERS, key=lambda peer: list(LOSSES).index(peer.loss)):
        found = difference(peer)
        result = found if isinstance(found, str) else f"{found:.0e}" + (" (it computes in float32)" if peer.single else "")
        lines.append(row_of(peer, result))
    lines += ["", "No arguments make these agree:", "", "| loss | library | their call | why |", "|---|---|---|---|"]
    lines += [f"| {loss} | {library} | `{theirs}` | {why} |" for library, theirs, loss, why in DIFFERENT]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
