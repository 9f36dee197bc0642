"""How far two runs of the bench agree: the ratios of one against those of another.

``pylosses bench --against OLD.json`` ends with it; ``python -m pylosses.bench.against OLD.json NEW.json`` compares two records.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from .report import Record, Row, console, key, title_of
from .timing import LEAST

SAME = 1.15  #: ratios closer than this are the same on a machine with neighbours
LEAST_MS = 1e3 * LEAST


class Change(NamedTuple):
    """A provider's time / our time in both runs."""

    title: str
    provider: str
    old: float
    new: float
    settled: bool  #: in both runs; else at least one of them gives no number
    noisy: bool  #: one of the runs was disturbed
    memory: float  #: how many times longer a copy of the logits took; 1 where there is none

    @property
    def factor(self) -> float:
        return max(self.new / self.old, self.old / self.new)


def changes(old: list[Row], new: list[Row]) -> list[Change]:
    """Of every ratio that both runs have, above a millisecond."""
    before = {key(row): row for row in old}
    copies = [{key(row): row["ms"]["both"]["median"] for row in rows if row["kind"] == "copy"} for rows in (old, new)]
    found = []
    for row in new:
        other = before.get(key(row))
        if other is None or not (_is_long(row) and _is_long(other)):
            continue
        title = title_of(row) + ("" if row["allocator"] == "default" else f", {row['allocator']}")
        noisy = any((r.get("noise") or {}).get("noisy") for r in (row, other))
        ratios = [r["ratio"]["both"]["median"] for r in (other, row)]
        was, now = (times.get(key({**row, "provider": "copy"}), 1.0) for times in copies)
        found.append(Change(title, row["provider"], *ratios, row["settled"] and other["settled"], bool(noisy), now / was))
    return found


def _is_long(row: Row) -> bool:
    """Has it a ratio of times that are worth one? Ours to ours is none."""
    ratio = row.get("ratio", {}).get("both")
    return (
        ratio is not None
        and row["provider"] != row["against"]
        and row["ms"]["both"]["median"] / max(ratio["median"], 1.0) >= LEAST_MS
    )


def show(old: Record, new: Record, out: Console) -> None:
    """How many ratios are the same, and those that are not, the farthest first."""
    found = sorted(changes(old.rows, new.rows), key=lambda change: -change.factor)
    for settled, what in ((True, "that settled in both runs"), (False, "that did not settle in one or both")):
        those = [change for change in found if change.settled == settled]
        other = [change for change in those if change.factor > SAME]
        same = f"{len(those) - len(other)} of {len(those)} ratios above {LEAST_MS:g} ms {what} are within {SAME - 1:.0%}"
        out.print(f"{same} of those of {old.header['run']} ({old.header['commit']})", highlight=False)
        for change in other:
            noise = ", noisy" if change.noisy else ""
            if not 1 / SAME < change.memory < SAME:
                noise += f", a copy of the logits {change.memory:.2f}x as long"
            moved = f"{change.old:.2f}x -> {change.new:.2f}x"
            out.print(f"  {change.title}: {change.provider} {moved}{noise}", highlight=False, markup=False)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m pylosses.bench.against OLD.json NEW.json", file=sys.stderr)
        return 2
    old, new = (Record.load(Path(file)) for file in arguments)
    show(old, new, console())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
