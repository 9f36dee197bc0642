"""The traffic model: how often a kernel reads and writes each logit. Static code and executed code are held to it."""

from __future__ import annotations

from typing import NamedTuple

from ahead import Launch


class Traffic(NamedTuple):
    reads: int  #: of each logit of a row that counts
    writes: int  #: of each place of the gradient
    singles: int  #: at most so many single logits of a row beside that: the label's, those that bound the selected classes


def traffic(launch: Launch) -> Traffic:
    """Of a kernel over the logits."""
    family, _, kernel = launch.name.partition(".")
    given = launch.arguments
    backward = kernel == "backward"
    twice = {
        "margin": not backward and given.get("THRESHOLD", False),  # the threshold first, then what is kept
        "softmax": not backward and given.get("NORM", False),
        "region": True,  # the softmax first, then its sums over the positions
    }.get(family, False)
    reads = 2 if twice and not given["WHOLE"] else 1
    labelled = family in ("softmax", "margin") or given.get("CE_OPTIONS") is not None and given.get("p_soft") is None
    singles = int(labelled)
    if family == "select" and backward:
        reads, singles = (1, 3) if given["READ"] else (0, 0)
    if family == "adr" and backward:
        singles += 2
    return Traffic(reads, int(backward), singles)
