"""Which promises about speed and memory does a record keep? ``make bars``, or ``python -m pylosses.bench.bars [RECORD.json]``.

Nothing is measured here: `PROMISES` is data, a record is data, and a promise holds, is missed, or was not measured. The median
decides, the range beside it says how clearly. Who failed the gate has no number and keeps no promise.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from . import report
from .report import Record, Row
from .shapes import SHAPES, VOCABULARIES, Shape
from .stopwatch import quartiles

# The promises

UNITS = ROW, LOGITS, MS = "extra bytes a row", "extra bytes a byte of logits", "ms"  #: of promises that are no ratios of times


@dataclass(frozen=True)
class Promise:
    """A loss at a shape, and what its training step is held against."""

    loss: str
    shape: str
    dtype: str
    relation: str  #: ">=": it is at least so many times faster; "<=": it takes at most so many times as long, or so much
    limit: float
    against: str  #: "copy", a provider's name, "our <loss>", or a unit
    allocator: str = "default"
    goal: bool = False  #: near the limit of the machine: hoped for, not promised

    @property
    def text(self) -> str:
        what = " " if self.against in UNITS else {">=": "x faster than ", "<=": "x the time of "}[self.relation]
        setting = " (goal)" if self.goal else "" if self.allocator == "default" else f" ({self.allocator})"
        return f"{self.relation} {self.limit:g}{what}{self.against}{setting}"


CE, MARGIN, CHUNKED = "F.cross_entropy", "F.multi_margin_loss", "F.linear_cross_entropy (chunked)"
F32, BF16, HUGE = "float32", "bfloat16", "huge pages"
OTHERS = ("logit_norm", "focal", "adr", "knl", "tta")
SEGMENTATION = (("hem", 18, "eager"), ("cross_entropy", 5.5, CE), ("dice", 14, "eager"))
GOAL = ("default", True)
LLAMA, CITYSCAPES = SHAPES["llama"], SHAPES["cityscapes"]

_TABLE: tuple[Any, ...] = (
    ("hem", "llama", F32, (">=", 40, "eager"), (">=", 18, "eager", HUGE), (">=", 25, "torch.compile")),
    ("hem", "llama", F32, ("<=", 2.2, "copy"), ("<=", 1.3, "copy", *GOAL)),
    ("hem", "llama", BF16, (">=", 60, "eager")),
    ("cross_entropy", "llama", F32, (">=", 9, CE), (">=", 7, CE, HUGE), (">=", 6, "torch.compile")),
    ("cross_entropy", "llama", F32, ("<=", 2, "copy"), ("<=", 1.2, "copy", *GOAL)),
    ("cross_entropy", "llama", BF16, (">=", 10, CE)),
    ("entropy", "llama", F32, (">=", 18, "eager"), ("<=", 1.8, "copy", *GOAL)),
    ("multi_margin", "llama", F32, (">=", 18, MARGIN)),
    *((loss, "llama", F32, ("<=", 1.6, "our cross_entropy")) for loss in OTHERS),
    ("cross_entropy", "cifar", F32, ("<=", 1.6, CE), ("<=", 1.1, CE, *GOAL)),
    ("hem", "cityscapes", F32, (">=", 20, "eager"), ("<=", 1.6, "copy", *GOAL)),
    ("cross_entropy", "cityscapes", F32, (">=", 6.5, CE), ("<=", 2.5, "copy"), ("<=", 1.6, "copy", *GOAL)),
    ("dice", "cityscapes", F32, (">=", 16, "eager"), (">=", 6, "torch.compile")),
    ("dice_ce", "cityscapes", F32, ("<=", 1.25, "our dice"), (">=", 12, "monai")),
    *((loss, shape, dtype, (">=", limit, against))
      for shape in ("ade20k", "camvid") for dtype in (F32, BF16) for loss, limit, against in SEGMENTATION),
    # memory: 16 bytes a row, for margins a bit a logit beside them
    *((loss, "llama", F32, ("<=", 16 + LLAMA.classes / 8, ROW)) for loss in ("hem", "multi_margin")),
    *((loss, "llama", F32, ("<=", 16, ROW)) for loss in ("cross_entropy", "entropy", *OTHERS)),
    ("hem", "cityscapes", F32, ("<=", 16 + CITYSCAPES.classes / 8, ROW)),
    *((loss, "cityscapes", F32, ("<=", 16, ROW)) for loss in ("cross_entropy", "entropy", "dice", "dice_ce")),
    ("linear_cross_entropy", "linear", F32, ("<=", 0.92, "eager"), ("<=", 0.82, "eager", *GOAL), ("<=", 0.5, CHUNKED)),
    ("linear_cross_entropy", "linear", F32, ("<=", 1 / 4, LOGITS)),
    # bounded: with more rows or classes, the same bytes are a smaller share
    *(("linear_cross_entropy", shape, F32, ("<=", 1 / 8, LOGITS)) for shape in ("linear-rows", VOCABULARIES[-1].name)),
    ("linear_hem", "linear", F32, (">=", 1.5, "eager")),
    ("linear_hem", "linear-easy", F32, (">=", 3, "eager")),
    ("import pylosses", "", "", ("<=", 60, MS)),
)  # fmt: skip
PROMISES = tuple(Promise(*where, *one) for *where, its in ((*row[:3], row[3:]) for row in _TABLE) for one in its)

# Judging


class Verdict(NamedTuple):
    """A promise and what became of it."""

    promise: Promise
    word: str  #: "holds", "missed", "FAILED" (a gate), "error", or "not measured"
    measured: str
    ours: str = ""  #: the time of our step
    note: str = ""  #: that the other side is inexact


def judge(promise: Promise, record: Record) -> Verdict:
    """A promise against the rows of a record."""
    rows = _rows(record, promise.loss, promise)
    ours, other = _ours(rows), rows.get(promise.against, {})
    if promise.against.startswith("our "):
        other = _ours(_rows(record, promise.against.removeprefix("our "), promise))
    for row in (ours, other):
        if row.get("status") in ("FAILED", "error") and row.get("by") != "budget":
            return Verdict(promise, row["status"], f"{row['provider']}: {row['reason']}")
    values = _values(promise, record, ours, other)
    if not values:
        return Verdict(promise, "not measured", "")
    median = values[1]
    holds = median >= promise.limit if promise.relation == ">=" else median <= promise.limit
    spread = report.range_of(values)
    measured = f"{report.short(median)} ({spread})" if "-" in spread else report.short(median)
    time = f"{report.short(ours['ms'][1])} ms" if "ms" in ours and promise.against not in UNITS else ""
    note = f"{promise.against}: {other['inexact']}" if "inexact" in other else ""
    return Verdict(promise, "holds" if holds else "missed", measured, time, note)


def _values(promise: Promise, record: Record, ours: Row, other: Row) -> list[float] | None:
    """Quartiles of what a promise is about; None where it was not measured."""
    if promise.against == MS:
        return quartiles(record.header["import_ms"]) if record.header.get("import_ms") else None
    if promise.against in UNITS:
        if "extra_bytes" not in ours:
            return None
        shape, extra = Shape("", tuple(ours["sizes"]), ours["kind"]), ours["extra_bytes"]
        # whole bits a row: the loss and its divisor are no rows
        return 3 * [8 * extra // shape.rows / 8 if promise.against == ROW else extra / report.logit_bytes(ours)]
    if promise.against == "copy":
        return ours.get("copies")
    if promise.against.startswith("our "):  # measured in another process: both in copies of the logits
        if "copies" not in ours or "copies" not in other:
            return None
        return [mine / theirs for mine, theirs in zip(ours["copies"], reversed(other["copies"]), strict=True)]
    if "ratio" not in other or other["against"] != ours.get("provider"):
        return None
    return other["ratio"] if promise.relation == ">=" else [1 / ratio for ratio in reversed(other["ratio"])]


def _rows(record: Record, loss: str, promise: Promise) -> dict[str, Row]:
    """Provider -> row of a configuration without arguments."""
    wanted = (loss, "", promise.shape, promise.dtype, promise.allocator)
    names = ("loss", "arguments", "shape", "dtype", "allocator")
    return {row["provider"]: row for row in record.rows if tuple(row[name] for name in names) == wanted}


def _ours(rows: dict[str, Row]) -> Row:
    return next((row for row in rows.values() if row["by"] == "ours"), rows.get("", {}))


# Report

STYLES = {"holds": "green", "missed": "yellow", "FAILED": "red", "error": "red", "not measured": "dim"}


def judged(record: Record) -> list[Verdict]:
    return [judge(promise, record) for promise in PROMISES]


def summary(verdicts: list[Verdict]) -> str:
    words = [verdict.word for verdict in verdicts]
    return ", ".join(f"{words.count(word)} {word}" for word in STYLES if word in words)


def markdown(verdicts: list[Verdict]) -> str:
    """The table of all promises."""
    lines = [f"{summary(verdicts)}.", "", "| loss | shape | promise | measured | ours | |", "|---" * 6 + "|"]
    for promise, word, measured, ours, note in verdicts:
        where = f"{promise.shape} {promise.dtype}".strip()
        told = (promise.loss, where, promise.text, measured, ours, f"{word} ({note})" if note else word)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in told)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """0 when no gate failed, 1 when one did, 2 when there is no record; a missed promise is information."""
    parser = argparse.ArgumentParser(prog="python -m pylosses.bench.bars", description="Which promises does a record keep?")
    tree = report.source_tree()
    usual = tree / "bench" / "results" / "cpu.json" if tree else None
    parser.add_argument("record", nargs="?", type=Path, default=usual, help="written by `pylosses bench --json`")
    file = parser.parse_args(argv).record
    try:
        record = Record.load(file)
        verdicts = judged(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"bars: error: {file} is no record of `pylosses bench --json`: {error}", file=sys.stderr)
        return 2
    console = report.console()
    console.print(f"{record.title}, {record.header['run']}. {record.caution}", highlight=False, soft_wrap=True)
    _show(verdicts, console)
    return int(any(STYLES[verdict.word] == "red" for verdict in verdicts))


def _show(verdicts: list[Verdict], console: Console) -> None:
    for promise, word, measured, ours, note in verdicts:
        where = f"{promise.loss} {promise.shape} {promise.dtype}".strip()
        told = ", ".join(filter(None, (measured, ours and f"ours {ours}", note)))
        line = f"{where:<46} {promise.text:<50} {told}"
        console.print(f"{word:<13}{line}", style=STYLES[word], highlight=False, markup=False, soft_wrap=True)
    console.print(summary(verdicts), highlight=False)


if __name__ == "__main__":
    sys.exit(main())
