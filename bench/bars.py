"""Which promises about speed and memory does a record keep? ``make bars``, or ``python -m pylosses.bench.bars [RECORD.json]``.

Nothing is measured here: `PROMISES` is data, a record is data, and a promise holds, is missed, or was not measured. The median
decides, the range beside it says how clearly. Who failed the gate has no number and keeps no promise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from . import report
from .report import Record, Row
from .shapes import SHAPES, VOCABULARIES, Shape

# The promises

ROW, LOGITS, MS = "extra bytes a row", "extra bytes a byte of logits", "ms"  #: units where a promise is no ratio of times


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

    @property
    def text(self) -> str:
        what = " " if self.against in (ROW, LOGITS, MS) else {">=": "x faster than ", "<=": "x the time of "}[self.relation]
        return f"{self.relation} {self.limit:g}{what}{self.against}" + (
            "" if self.allocator == "default" else f" ({self.allocator})"
        )


def _promises(loss: str, shape: str, dtype: str, *its: tuple[Any, ...]) -> list[Promise]:
    return [Promise(loss, shape, dtype, *one) for one in its]


def _memory(shape: Shape, *losses: str, bits: bool = False) -> list[Promise]:
    """16 bytes a row; for margins a bit a logit beside them."""
    limit = 16 + (shape.classes / 8 if bits else 0)
    return [Promise(loss, shape.name, "float32", "<=", limit, ROW) for loss in losses]


CE, MARGIN, CHUNKED = "F.cross_entropy", "F.multi_margin_loss", "F.linear_cross_entropy (chunked)"
F32, BF16, HUGE = "float32", "bfloat16", "huge pages"
OTHERS = ("logit_norm", "focal", "adr", "knl", "tta")

PROMISES: tuple[Promise, ...] = (
    *_promises("hem", "llama", F32, (">=", 40, "eager"), (">=", 18, "eager", HUGE), (">=", 25, "torch.compile")),
    *_promises("hem", "llama", F32, ("<=", 1.3, "copy")),
    *_promises("hem", "llama", BF16, (">=", 60, "eager")),
    *_promises("cross_entropy", "llama", F32, (">=", 9, CE), (">=", 7, CE, HUGE), (">=", 6, "torch.compile")),
    *_promises("cross_entropy", "llama", F32, ("<=", 1.2, "copy")),
    *_promises("cross_entropy", "llama", BF16, (">=", 10, CE)),
    *_promises("entropy", "llama", F32, (">=", 18, "eager"), ("<=", 1.8, "copy")),
    *_promises("multi_margin", "llama", F32, (">=", 18, MARGIN)),
    *(one for loss in OTHERS for one in _promises(loss, "llama", F32, ("<=", 1.6, "our cross_entropy"))),
    *_promises("cross_entropy", "cifar", F32, ("<=", 1.6, CE)),
    *_promises("hem", "cityscapes", F32, (">=", 20, "eager"), ("<=", 1.6, "copy")),
    *_promises("cross_entropy", "cityscapes", F32, (">=", 6.5, CE), ("<=", 1.6, "copy")),
    *_promises("dice", "cityscapes", F32, (">=", 16, "eager"), (">=", 6, "torch.compile")),
    *_promises("dice_ce", "cityscapes", F32, ("<=", 1.25, "our dice"), (">=", 12, "monai")),
    *(
        one
        for shape in ("ade20k", "camvid")
        for dtype in (F32, BF16)
        for loss, limit, against in (("hem", 18, "eager"), ("cross_entropy", 5.5, CE), ("dice", 14, "eager"))
        for one in _promises(loss, shape, dtype, (">=", limit, against))
    ),
    *_memory(SHAPES["llama"], "hem", "multi_margin", bits=True),
    *_memory(SHAPES["llama"], "cross_entropy", "entropy", *OTHERS),
    *_memory(SHAPES["cityscapes"], "hem", bits=True),
    *_memory(SHAPES["cityscapes"], "cross_entropy", "entropy", "dice", "dice_ce"),
    *_promises("linear_cross_entropy", "linear", F32, ("<=", 0.92, "eager"), ("<=", 0.5, CHUNKED), ("<=", 1 / 4, LOGITS)),
    # bounded: with twice the rows or classes, the same bytes are half the share
    *_promises("linear_cross_entropy", "linear-rows", F32, ("<=", 1 / 8, LOGITS)),
    *_promises("linear_cross_entropy", VOCABULARIES[-1].name, F32, ("<=", 1 / 8, LOGITS)),
    *_promises("linear_hem", "linear", F32, (">=", 1.5, "eager")),
    *_promises("linear_hem", "linear-easy", F32, (">=", 3, "eager")),
    *_promises("import pylosses", "", "", ("<=", 60, MS)),
)

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
    if promise.against == MS:
        found = record.header.get("import_ms")
        return (
            _decided(promise, statistics.median(found), f"{min(found):g}-{max(found):g}") if found else _not_measured(promise)
        )
    rows = _rows(record, promise.loss, promise)
    ours = _ours(rows)
    its = [ours, rows.get(promise.against, {})] if promise.against in rows else [ours]
    if promise.against.startswith("our "):
        its.append(_ours(_rows(record, promise.against.removeprefix("our "), promise)))
    for row in its:
        if row.get("status") in ("FAILED", "error") and row.get("by") != "budget":
            return Verdict(promise, row["status"], f"{row['provider']}: {row['reason']}")
    values = _values(promise, its)
    if values is None:
        return _not_measured(promise)
    time = f"{report.short(ours['ms'][1])} ms" if "ms" in ours and promise.against not in (ROW, LOGITS) else ""
    inexact = its[-1].get("inexact", "")
    return _decided(promise, values[1], report.range_of(values), time, inexact and f"{promise.against}: {inexact}")


def _values(promise: Promise, its: list[Row]) -> list[float] | None:
    """Quartiles of what a promise is about; None where it was not measured."""
    ours, other = its[0], its[-1]
    if promise.against in (ROW, LOGITS):
        if "extra_bytes" not in ours:
            return None
        shape = Shape("", tuple(ours["sizes"]), ours["kind"])
        size = 4 if ours["dtype"] == "float32" else 2
        # whole bits a row: the loss and its divisor are no rows
        each = (
            8 * ours["extra_bytes"] // shape.rows / 8 if promise.against == ROW else ours["extra_bytes"] / shape.logits / size
        )
        return [each] * 3
    if promise.against == "copy":
        return ours.get("copies")
    if promise.against.startswith("our "):  # measured in another process: both in copies of the logits
        if "copies" not in ours or "copies" not in other:
            return None
        (low, median, high), theirs = ours["copies"], other["copies"]
        return [low / theirs[2], median / theirs[1], high / theirs[0]]
    if len(its) < 2 or "ratio" not in other or other.get("against") != ours.get("provider"):
        return None
    low, median, high = other["ratio"]
    return [low, median, high] if promise.relation == ">=" else [1 / high, 1 / median, 1 / low]


def _rows(record: Record, loss: str, promise: Promise) -> dict[str, Row]:
    """Provider -> row of a configuration without arguments."""
    wanted = (loss, "", promise.shape, promise.dtype, promise.allocator)
    names = ("loss", "arguments", "shape", "dtype", "allocator")
    return {row["provider"]: row for row in record.rows if tuple(row[name] for name in names) == wanted}


def _ours(rows: dict[str, Row]) -> Row:
    return next((row for row in rows.values() if row["by"] == "ours"), rows.get("", {}))


def _decided(promise: Promise, value: float, spread: str, ours: str = "", note: str = "") -> Verdict:
    holds = value >= promise.limit if promise.relation == ">=" else value <= promise.limit
    text = report.short(value)
    return Verdict(promise, "holds" if holds else "missed", text if spread == text else f"{text} ({spread})", ours, note)


def _not_measured(promise: Promise) -> Verdict:
    return Verdict(promise, "not measured", "")


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
    console.print(f"{record.title}, {record.header['run']}", highlight=False, soft_wrap=True)
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
