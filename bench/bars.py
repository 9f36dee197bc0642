"""Does every loss reach its speed bar? ``make bars``, or ``python -m pylosses.bench.bars [--full] [--only TEXT]``.

`workloads` is the table: a loss at a shape, and what its training step (fresh leaf, forward, backward, gradient released) is
held against. Everybody passes the gate first; the sides of a bar then take turns in one process, and the ratio of their
medians is judged. A bar that is missed is information; a gate that fails is exit code 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from . import report
from .contest import LOGITS, ROW, Contest
from .run import ALLOCATORS, Worker, WorkerDied
from .shapes import SHAPES, Shape
from .worker import serve

# The table


@dataclass(frozen=True)
class Bar:
    """What a workload is held against."""

    relation: str  #: ">=": our step is at least so many times faster; "<=": it takes at most so many times as long
    limit: float
    against: str  #: "copy", a provider's name, "our <loss>"; or a unit where the bar is no ratio of times
    setting: str = "default"  #: or "huge pages", "pool", "memory", "import"
    goal: bool = False  #: near the limit of the machine: shown, not binding

    @property
    def text(self) -> str:
        what = " " if self.against in UNITS else {">=": "x faster than ", "<=": "x the time of "}[self.relation]
        allocator = f" ({self.setting})" if self.setting in ("huge pages", "pool") else ""
        return f"{self.relation} {self.limit:g}{what}{self.against}{allocator}"


@dataclass(frozen=True)
class Workload:
    """A loss at a shape with bars of one setting."""

    loss: str
    shape: Shape
    dtype: str
    bars: tuple[Bar, ...]

    @property
    def setting(self) -> str:
        return self.bars[0].setting

    @property
    def title(self) -> str:
        return f"{self.loss} {self.shape.name} {self.shape.text} {self.dtype}" if self.shape.sizes else self.loss

    @property
    def request(self) -> dict[str, Any]:
        """What a worker needs to know of it."""
        sides = list(dict.fromkeys(bar.against for bar in self.bars))
        shape = {"shape": self.shape.name, "sizes": self.shape.sizes, "shape_kind": self.shape.kind}
        wanted = {"sides": sides, "compile": "torch.compile" in sides, "setting": self.setting}
        return {"loss": self.loss, "variant": 0, "dtype": self.dtype, **shape, **wanted}


CE, MARGIN, LINEAR_CE = "F.cross_entropy", "F.multi_margin_loss", "F.linear_cross_entropy (chunked)"
MS = "ms"
UNITS = (ROW, LOGITS, MS)  #: of bars that are no ratios of times
EFFORT = {"budget": 1.0, "least": 3}  #: after so many seconds the least rounds are enough

faster, within = partial(Bar, ">="), partial(Bar, "<=")
near, near_pool = partial(within, goal=True), partial(within, setting="pool", goal=True)
memory = partial(within, setting="memory")


def workloads(full: bool) -> Iterator[Workload]:
    """Every bar, by workload and setting."""
    f32, bf16 = "float32", "bfloat16"
    short = replace(SHAPES["llama"], sizes=(2048, 32000))
    tokens = SHAPES["llama"] if full else short
    imagenet, cifar, street, linear = (SHAPES[name] for name in ("imagenet", "cifar", "cityscapes", "linear"))
    rows, pixels = Shape("rows", (2048, 8192), "rows"), SHAPES["cityscapes-quick"]
    huge = Shape("linear-huge", (8192, 128256, 512), "linear")
    own = ("logit_norm", "focal", "adr", "knl", "tta")
    table: tuple[Any, ...] = (
        ("hem", tokens, f32, faster(40, "eager"), faster(25, "torch.compile"), within(2.2, "copy"), near_pool(1.3, "copy"),
         faster(18, "eager", "huge pages")),
        ("hem", tokens, bf16, faster(60, "eager"), near_pool(1.6, "copy")),
        ("cross_entropy", tokens, f32, faster(9, CE), faster(6, "torch.compile"), within(2, "copy"), near_pool(1.2, "copy"),
         faster(7, CE, "huge pages")),
        ("cross_entropy", tokens, bf16, faster(10, CE)),
        ("entropy", tokens, f32, faster(18, "eager"), near_pool(1.8, "copy")),
        ("multi_margin", tokens, f32, faster(18, MARGIN)),
        ("hem", imagenet, f32, faster(12, "eager")),
        ("cross_entropy", imagenet, f32, faster(2.2, CE)),
        ("entropy", imagenet, f32, faster(5, "eager")),
        ("hem", cifar, f32, faster(3, "eager")),
        ("cross_entropy", cifar, f32, within(1.6, CE), near(1.1, CE)),
        ("hem", street, f32, faster(20, "eager"), near_pool(1.6, "copy")),
        ("cross_entropy", street, f32, faster(6.5, CE), within(2.5, "copy"), near_pool(1.6, "copy")),
        ("dice", street, f32, faster(16, "eager"), faster(6, "torch.compile")),
        *((loss, SHAPES[shape], dtype, faster(limit, against)) for shape in ("ade20k", "camvid") for dtype in (f32, bf16)
          for loss, limit, against in (("hem", 18, "eager"), ("cross_entropy", 5.5, CE), ("dice", 14, "eager"))),
        ("dice_ce", street, f32, within(1.25, "our dice"), faster(12, "monai")),
        *((loss, short, f32, within(1.6, "our cross_entropy")) for loss in own),
        *((loss, rows, f32, memory(16 + rows.classes / 8, ROW)) for loss in ("hem", "multi_margin")),  # a bit a logit
        *((loss, rows, f32, memory(16, ROW)) for loss in ("cross_entropy", "entropy", *own)),
        ("hem", pixels, f32, memory(16 + pixels.classes / 8, ROW)),
        *((loss, pixels, f32, memory(16, ROW)) for loss in ("cross_entropy", "entropy", "dice", "dice_ce")),
        ("linear_cross_entropy", linear, f32, within(0.92, "eager"), within(0.5, LINEAR_CE), near(0.82, "eager"),
         memory(1 / 4, LOGITS)),
        # bounded: with twice the rows or classes, the same bytes are half the share
        ("linear_cross_entropy", Shape("linear-rows", (4096, 32000, 64), "linear"), f32, memory(1 / 8, LOGITS)),
        ("linear_cross_entropy", Shape("linear-classes", (2048, 64000, 64), "linear"), f32, memory(1 / 8, LOGITS)),
        ("linear_cross_entropy", huge, f32, memory(128 * 2**20 / (4 * huge.logits), LOGITS)),  # 128 MiB, where they are 4 GB
        ("linear_hem", linear, f32, faster(1.5, "eager")),
        ("linear_hem", replace(linear, name="linear-easy"), f32, faster(3, "eager")),
        ("import pylosses, after torch", Shape("", (), ""), "", within(60, MS, "import")),
    )  # fmt: skip
    for loss, shape, dtype, *bars in table:
        for setting in dict.fromkeys(bar.setting for bar in bars):
            yield Workload(loss, shape, dtype, tuple(bar for bar in bars if bar.setting == setting))


def imports(times: int = 7) -> list[dict[str, Any]]:
    """Milliseconds of `import pylosses` after `import torch`, each in a fresh process; the first one may have to compile it."""
    code = "import time, torch; start = time.perf_counter(); import pylosses; print(time.perf_counter() - start)"
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = partial(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=usual)
    taken = [run() for _ in range(1 + times)][1:]
    return [{"provider": "ours", "status": "ok", MS: [1e3 * float(one.stdout) for one in taken]}]


# Judging


class Line(NamedTuple):
    """One bar and what became of it."""

    work: Workload
    bar: Bar
    verdict: str  #: "reached", "missed", "FAILED" (a gate), "error", or "absent" (a side is not here)
    measured: str
    spread: str = ""
    first: str = ""  #: the ratio by the first steps of all turns
    ours: str = ""  #: the time of our step
    note: str = ""  #: that the other side is inexact


def judge(work: Workload, bar: Bar, rows: list[dict[str, Any]]) -> Line:
    """The ratio of medians against the limit; its spread is the smallest and the largest ratio of a round."""
    found = {row["provider"]: row for row in rows}
    for name in ("ours",) if bar.against in UNITS else ("ours", bar.against):
        row = found.get(name) or found.get("") or {"status": "error", "reason": "was not measured"}
        if row["status"] != "ok":
            verdict = {"missing": "absent", "memory": "absent"}.get(row["status"], row["status"])
            return Line(work, bar, verdict, f"{name}: {row['reason']}")
    ours, noisy = found["ours"], " noisy" if found["ours"].get("noisy") else ""
    if bar.against in UNITS:
        values = ours[bar.against]
        value = statistics.median(values)
        more: tuple[str, ...] = ()
    else:
        above, below = (found[bar.against], ours) if bar.relation == ">=" else (ours, found[bar.against])
        values = [a / b for a, b in zip(above["seconds"], below["seconds"], strict=True)]
        value, first = (statistics.median(above[key]) / statistics.median(below[key]) for key in ("seconds", "first"))
        inexact = found[bar.against].get("inexact", "")
        more = (f"{first:.3g}", f"{1e3 * statistics.median(ours['seconds']):.3g} ms", inexact and f"{bar.against}: {inexact}")
    reached = value >= bar.limit if bar.relation == ">=" else value <= bar.limit
    spread = f"{min(values):.3g}..{max(values):.3g}{noisy}" if len(values) > 1 else ""
    return Line(work, bar, "reached" if reached else "missed", f"{value:.4g}", spread, *more)


# Report

STYLES = {"reached": "green", "missed": "yellow", "FAILED": "red", "error": "red", "absent": "dim"}
LEGEND = """\
A step is a fresh leaf, forward, backward and the release of the gradient, through `pylosses.functional` with default settings.
The sides of a bar take turns of a few steps in one process. "measured" is the ratio of medians, and what is judged; "spread" is
the smallest and the largest ratio of one round; "first" is the ratio by the first step of each turn alone (see
`bench/contest.py`). "eager" is the loss in plain PyTorch (`bench/eager.py`), after `F.linear` for the linear losses; "copy" is
`out.copy_(logits)` into a warm buffer; "huge pages" is `THP_MEM_ALLOC_ENABLE=1` for everybody; "linear-easy" has a loss in one
row of ten; "extra" is what torch's allocator hands out at peak beyond input, target and gradients. Everybody passed the gate of
the bench first, or the line says FAILED and has no number; where one of torch's own losses passes it in float64 alone, its line
tells its error.
"""


def markdown(lines: list[Line], record: report.Record, seconds: float) -> str:
    """The whole report."""
    about = record.header
    machine = f"{about['cpu']['usable_cores']} cores, {about['system']}, Python {about['versions']['python']}"
    text = ["# Speed bars on the CPU", "", "Generated by `make bars`; do not edit.", ""]
    text += [f"{record.title}, {machine}; {about['run']}, took {seconds / 60:.1f} minutes.", "", LEGEND]
    for goal, title in ((False, "Bars"), (True, "Near the limit: goals, not bars")):
        text += [f"## {title}: {summary(lines, goal)}", "", "| workload | bar | measured | spread | first | ours | |"]
        text += ["|---|---|---|---|---|---|---|"]
        for work, bar, verdict, *cells, note in (line for line in lines if line.bar.goal == goal):
            told = (work.title, bar.text, *cells, f"{verdict} ({note})" if note else verdict)
            text.append(f"| {' | '.join(cell.replace('|', '/') for cell in told)} |")
        text.append("")
    return "\n".join(text)


def summary(lines: list[Line], goal: bool) -> str:
    """How many bars, or goals, have which verdict."""
    verdicts = [line.verdict for line in lines if line.bar.goal == goal]
    return ", ".join(f"{verdicts.count(word)} {word}" for word in STYLES if word in verdicts) or "none"


def main(argv: list[str] | None = None) -> int:
    """0 when every gate passed, 1 when one failed, 2 when there is nothing to measure."""
    parser = argparse.ArgumentParser(prog="python -m pylosses.bench.bars", description="Which speed bars are reached?")
    parser.add_argument("--full", action="store_true", help="4096 rows instead of 2048 where a bar has a range")
    parser.add_argument("--only", default="", metavar="TEXT", help="only lines with TEXT in them, such as 'hem llama' or copy")
    parser.add_argument("--threads", type=int, default=2, metavar="T", help="threads of torch and the kernels (default: 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: bench/results/cpu_bars.md, unless --only is given")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        return serve(Contest)
    chosen = []
    for work in workloads(options.full):
        bars = tuple(bar for bar in work.bars if options.only.lower() in f"{work.title} {bar.text}".lower())
        chosen += [replace(work, bars=bars)] if bars else []
    if not chosen:
        print(f"no line has {options.only!r} in it", file=sys.stderr)
        return 2
    for name in ("PYLOSSES_BACKEND", "PYLOSSES_POOL"):
        os.environ.pop(name, None)  # bars are about default settings
    settings = {"threads": options.threads, "device": "cpu", "backends": ["reference"], "peers": True, **EFFORT}
    record = report.Record.start(settings, None, None)
    console = report.console()
    console.print(record.title, highlight=False)
    start = time.perf_counter()
    try:
        lines = list(_judged(chosen, settings, console))
    except KeyboardInterrupt:
        console.print("stopped; nothing was written", style="yellow")
        return 130
    console.print(f"bars: {summary(lines, False)}; goals: {summary(lines, True)}", highlight=False)
    tree = report.source_tree()
    file = options.out or (tree / "bench" / "results" / "cpu_bars.md" if tree and not options.only else None)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(markdown(lines, record, time.perf_counter() - start))
        console.print(f"wrote {file}", highlight=False)
    return int(any(STYLES[line.verdict] == "red" for line in lines))


def _judged(chosen: list[Workload], settings: dict[str, Any], console: Console) -> Iterator[Line]:
    """Every line, printed as it is judged, above a progress bar."""
    names = ("default", "huge pages", "memory")
    workers = {name: Worker(ALLOCATORS.get(name, {}), ("pylosses.bench.bars", "--worker")) for name in names}
    workers["pool"] = workers["default"]
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("", total=len(chosen))
            for work in chosen:

                def show(event: dict[str, Any], title: str = work.title) -> None:
                    progress.update(task, description=f"{title}: {event['doing']} {event['name']}"[:80])

                try:
                    request = {**settings, **work.request, "task": "times", "exclude": {}}
                    rows = imports() if work.setting == "import" else workers[work.setting].ask(request, show)
                except WorkerDied as death:
                    rows = [{"provider": "", "status": "error", "reason": f"{death.provider}: {death.why}"}]
                for bar in work.bars:
                    line = judge(work, bar, rows)
                    shown = escape(f"{work.title:<46} {bar.text:<46} {line.measured}{_aside(line)}")
                    console.print(f"[{STYLES[line.verdict]}]{line.verdict:<8}[/] {shown}", highlight=False, soft_wrap=True)
                    yield line
                progress.advance(task)
    finally:
        for worker in workers.values():
            worker.stop()


def _aside(line: Line) -> str:
    told = (line.spread, line.first and f"first {line.first}", line.ours and f"ours {line.ours}", line.note)
    return f"  ({', '.join(filter(None, told))})" if any(told) else ""


if __name__ == "__main__":
    sys.exit(main())
