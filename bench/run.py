"""``pylosses bench``: which configurations, workers for both allocator settings and for memory, rows on disk as they finish."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pylosses.spec import LOSSES, LossSpec

from . import against, report, shapes, timing
from .providers import variants
from .shapes import Shape
from .worker import serve

#: Allocator settings by name: torch reads its own when it starts. Huge pages help torch's losses at large shapes.
ALLOCATORS = {"default": {}, "huge pages": {"THP_MEM_ALLOC_ENABLE": "1"}}
DTYPES = ("float32", "bfloat16", "float16", "float64")

QUICK_LOSSES = ("cross_entropy", "hem", "entropy", "dice", "linear_cross_entropy")
#: torch.compile takes many seconds a graph: a quick run compiles these alone.
QUICK_COMPILED = {("cross_entropy", "llama-quick"), ("hem", "llama-quick")}

#: For each configuration and allocator: seconds of timing, least rounds, most steps of a turn and seconds for which they may
#: disagree, and whether rounds go on until ratios settle.
EFFORT = {
    "quick": {"budget": 0.4, "least": 3, "steps": 4, "patience": 0.2, "settle": False},
    "full": {"budget": 2.0, "least": 3, "steps": 15, "patience": 0.6, "settle": True},
}
Rows = list[dict[str, Any]]
Show = Callable[[dict[str, Any]], None]  #: sees what a worker does, as it does it
PATIENCE = 900.0  #: seconds without a sign of life after which a worker is given up
VISITS = 4  #: to a configuration whose ratios stay uncertain, two at least: what disturbs them may last for minutes
LONGEST = 3000.0  #: seconds of a run after which no second or later visit begins


@dataclass(frozen=True)
class Configuration:
    """What is measured at once: all providers of one loss at one shape and dtype."""

    loss: str
    variant: int
    arguments: str
    shape: Shape
    dtype: str
    compile: bool
    allocators: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.loss}{f' {self.arguments}' if self.arguments else ''} {self.shape.name} {self.dtype}"

    @property
    def about(self) -> dict[str, Any]:
        """What identifies it in a row."""
        shape = self.shape
        return {
            "loss": self.loss,
            "arguments": self.arguments,
            "shape": shape.name,
            "shape_kind": shape.kind,
            "sizes": shape.sizes,
            "dtype": self.dtype,
        }

    @property
    def request(self) -> dict[str, Any]:
        """What a worker needs to know of it."""
        return {**self.about, "variant": self.variant, "compile": self.compile}

    def cost(self, budget: float) -> float:
        """Seconds it may take, roughly, for the time left."""
        rounds = self.shape.logits * 120e-9 * 3
        return len(self.allocators) * (2 + max(budget, rounds)) + (20 if self.compile else 0)


def worker() -> NoReturn:
    """The hidden command that `main` starts its workers with."""
    serve()


def main(arguments: argparse.Namespace) -> int:
    """Run the bench; 0 when all is well, 1 when one of our backends fails its gate, 2 when the options make no sense."""
    console = report.console()
    try:
        plan = configurations(arguments)
    except ValueError as error:
        print(f"pylosses bench: error: {error}", file=sys.stderr)
        return 2
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        print("pylosses bench: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    try:
        earlier = report.Record.load(arguments.against) if arguments.against else None
    except (OSError, ValueError, KeyError) as error:
        print(f"pylosses bench: error: --against {arguments.against} is no record of a run: {error}", file=sys.stderr)
        return 2
    effort = EFFORT["quick" if arguments.quick else "full"]
    settings = {
        "threads": arguments.threads or torch.get_num_threads(),
        "device": arguments.device,
        "backends": arguments.backend,
        "peers": arguments.peers,
        **effort,
        "budget": arguments.budget or effort["budget"],
    }
    record = report.Record.start(settings, arguments.json, None if arguments.no_history else report.history_file())
    console.print(record.title, highlight=False)
    stopped = False
    try:
        for rows in _measured(plan, settings, console):
            record.add(rows)
    except KeyboardInterrupt:
        stopped = True
    report.table(record.rows, console)
    if earlier is not None:
        against.show(earlier, record, console)
    if arguments.plot:
        for file in report.plots(record, arguments.plot):
            console.print(f"wrote {file}", highlight=False)
    for file in record.files:
        console.print(f"wrote {file}", highlight=False)
    if stopped:
        console.print("stopped; what was finished is in the table and on disk", style="yellow")
        return 130
    ours = ("ours", "reference", "")  # "": the configuration as a whole
    return int(any(row["kind"] in ours and row["status"] in ("FAILED", "error") for row in record.rows))


def configurations(arguments: argparse.Namespace) -> list[Configuration]:
    """The chosen configurations, or ValueError with what is wrong with the choice."""
    for dtype in arguments.dtype or ():
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; the dtypes are: {', '.join(DTYPES)}")
    chosen = [shape for name in arguments.shape or () for shape in shapes.find(name)]
    found = []
    asked = bool(arguments.loss or chosen)
    for spec, shape in _pairs(arguments.loss, chosen, arguments.quick):
        compile = not arguments.no_compile and not shape.name.startswith("classes-")
        both = arguments.device == "cpu" and not shape.name.startswith("classes-")
        dtypes = arguments.dtype or ("float32",)
        if arguments.quick and not asked:
            compile = compile and (spec.name, shape.name) in QUICK_COMPILED
        elif not asked:
            compile = compile and shapes.compiled_in_full_run(spec.name, shape.name)
            both = both and shapes.is_central(spec.name, shape.name)
            dtypes = dtypes if spec.name in shapes.SWEEP_LOSSES and shape.name in shapes.CENTRAL else dtypes[:1]
        for dtype in dtypes:
            for i, own in enumerate(variants(spec, arguments.peers)):
                text = "" if i == 0 else ", ".join(f"{k}={v!r}" for k, v in own.items())
                brief = not asked and (i > 0 or dtype != dtypes[0])  # i > 0: arguments of a peer, to compare with it
                if brief and i > 0 and (dtype != dtypes[0] or shape.name not in shapes.CENTRAL):
                    continue
                allocators = tuple(ALLOCATORS) if both and not brief else ("default",)
                found.append(Configuration(spec.name, i, text, shape, dtype, compile and (asked or i == 0), allocators))
    if not found:
        names = ", ".join(spec.name for spec in arguments.loss or ()) or "no loss"
        raise ValueError(f"nothing to measure: {names} does not take {', '.join(arguments.shape or ('any shape',))}")
    return found


def _pairs(losses: list[LossSpec] | None, chosen: list[Shape], quick: bool) -> Iterator[tuple[LossSpec, Shape]]:
    """Losses with the shapes they run at: what was asked for, else the quick or the full set."""
    if losses or chosen:
        usual = [shapes.SHAPES[name] for name in (shapes.QUICK_SHAPES if quick else shapes.FULL_SHAPES)]
        for spec in losses or list(LOSSES.values()):
            yield from ((spec, shape) for shape in chosen or usual if shapes.fits(spec, shape))
        return
    for name, spec in LOSSES.items():
        if quick and name not in QUICK_LOSSES:
            continue
        for shape in shapes.SHAPES.values():
            wanted = shape.name in shapes.QUICK_SHAPES if quick else shapes.in_full_run(name, shape.name)
            if wanted and shapes.fits(spec, shape):
                yield spec, shape
    for name in shapes.SWEEP_LOSSES[: 1 if quick else None]:
        yield from ((LOSSES[name], shape) for shape in shapes.SWEEP)


def _measured(plan: list[Configuration], settings: dict[str, Any], console: Console) -> Iterator[Rows]:
    """Rows of each configuration as it finishes, with a progress bar.

    A full run comes back at its end to everything that takes a while, then to what did not settle, the least certain first, and
    adds rounds to those it has: the machine may be another then.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    start = time.monotonic()
    costs = {configuration: configuration.cost(settings["budget"]) for configuration in plan}
    workers = {name: Worker(environment) for name, environment in {**ALLOCATORS, "memory": timing.EXACT_MALLOC}.items()}
    try:
        with Progress(*columns, console=console, transient=True, speed_estimate_period=600) as progress:
            task = progress.add_task("", total=sum(costs.values()))

            def begin(place: str, configuration: Configuration) -> Show:
                """Tells where the run is; what it returns tells what a worker does."""
                what = f"{place} {configuration.title}"
                if not console.is_terminal:
                    console.print(f"{time.strftime('%X')} {what}", style="dim", highlight=False)
                return lambda event: progress.update(task, description=f"{what}: {event['doing'] + ' ' + event['name']:<32.32}")

            seen: dict[str, float | None] = {"handover": None, "yardstick": None}  # by all workers: at best, and usually
            paces: list[float] = []

            def measure(configuration: Configuration, allocator: str, show: Show, before: Visit | None = None) -> Visit:
                known = {"earlier": before and before.samples, "visit": before.number + 1 if before else 1, "seen": seen}
                rows = _times(configuration, allocator, workers[allocator], {**settings, **known}, show)
                noise = next((row["noise"] for row in rows if "noise" in row), None)
                if noise is not None:
                    paces.append(noise["pace"])
                    seen.update(handover=noise["handover"], yardstick=timing.usual(paces))
                progress.advance(task, costs[configuration] / len(configuration.allocators))
                samples = {row["provider"]: row.pop("samples") for row in rows if "samples" in row}
                return Visit(configuration, allocator, known["visit"], rows, samples)

            visits = []
            for i, configuration in enumerate(plan):
                show = begin(f"{i + 1}/{len(plan)}", configuration)
                those = [measure(configuration, allocator, show) for allocator in configuration.allocators]
                rows = [row for visit in those for row in visit.rows]
                _add_memory(rows, configuration, workers["memory"], settings, show)
                yield rows
                visits += those

            while settings["settle"] and time.monotonic() < start + LONGEST:
                due = [visit for visit in visits if visit.number < VISITS and visit.uncertainty(seen) > timing.SETTLED]
                progress.update(task, total=progress.tasks[0].completed + sum(visit.cost(costs) for visit in due))
                if not due:
                    break
                before = min(due, key=lambda visit: (visit.number, -visit.uncertainty(seen)))
                show = begin(f"visit {before.number + 1}, {len(due)} due,", before.configuration)
                visit = measure(before.configuration, before.allocator, show, before)
                memory = {row["provider"]: row["extra_bytes"] for row in before.rows if "extra_bytes" in row}
                for row in visit.rows:
                    if row["provider"] in memory:
                        row["extra_bytes"] = memory[row["provider"]]
                yield visit.rows
                visits[visits.index(before)] = visit
    finally:
        for one in workers.values():
            one.stop()


@dataclass(eq=False)
class Visit:
    """What a worker found of a configuration with one allocator, and the samples of all rounds so far."""

    configuration: Configuration
    allocator: str
    number: int
    rows: Rows
    samples: dict[str, Any]

    def uncertainty(self, seen: dict[str, float | None]) -> float:
        """Of its ratios; infinite where there was one visit alone or, as is seen by now, neighbours slowed the machine down."""
        found = [row["uncertain"] for row in self.rows if row["provider"] != row.get("against", row["provider"])]
        if not any(value is None or value > 0 for value in found):  # nothing to measure, or steps too short to wait for
            return 0.0
        noise = next(row["noise"] for row in self.rows if "noise" in row)
        slow = noise["pace"] > timing.SLOW * (seen["yardstick"] or math.inf)
        return math.inf if slow or None in found else max(found)

    def cost(self, costs: dict[Configuration, float]) -> float:
        return costs[self.configuration] / len(self.configuration.allocators)


def _times(
    configuration: Configuration,
    allocator: str,
    worker: Worker,
    settings: dict[str, Any],
    show: Show,
) -> Rows:
    """Rows of one configuration with one allocator. A provider that kills the worker is left out of the next try."""
    about = {**configuration.about, "device": settings["device"], "threads": settings["threads"], "allocator": allocator}
    killers: dict[str, str] = {}
    while True:
        try:
            request = {**settings, **configuration.request, "task": "times", "exclude": killers}
            return [{**about, **row} for row in worker.ask(request, show)]
        except WorkerDied as death:
            if not death.provider or death.provider in killers:
                return [{**about, "provider": death.provider, "kind": "", "status": "error", "reason": death.why}]
            killers[death.provider] = death.why


def _add_memory(
    rows: Rows,
    configuration: Configuration,
    worker: Worker,
    settings: dict[str, Any],
    show: Show,
) -> None:
    """Peak memory of everybody who passed the gate, into the rows of the default allocator."""
    passed = {row["provider"]: row for row in rows if row["allocator"] == "default" and row["status"] == "ok"}
    try:
        found = worker.ask({**settings, **configuration.request, "task": "memory", "only": list(passed)}, show)
    except WorkerDied:
        return  # the times stand; a cell of the table stays empty
    for row in found:
        if row.get("status") != "error":
            passed[row["provider"]]["extra_bytes"] = row["extra_bytes"]


class WorkerDied(Exception):
    """A worker ended, or went silent, while it was busy with a provider."""

    def __init__(self, provider: str, why: str) -> None:
        super().__init__(why)
        self.provider = provider
        self.why = why


class Worker:
    """A process with an environment of its own; started when first needed, and again after it died."""

    def __init__(self, environment: dict[str, str], command: tuple[str, ...] = ("pylosses", "bench", "--worker")) -> None:
        self.environment = environment
        self.command = command  #: what python -m runs
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()  # what it says; None when it has ended
        self.errors = tempfile.TemporaryFile("w+")

    def ask(self, request: dict[str, Any], show: Show) -> Rows:
        """Send a request and wait for its rows; `show` sees every event on the way."""
        process = self.process or self._start()
        busy = ""
        try:
            _to(process, json.dumps(request))
            while True:
                line = self.lines.get(timeout=PATIENCE)
                if line is None:
                    raise WorkerDied(busy, self._last_words(process))
                event = json.loads(line)
                if event["event"] == "rows":
                    return event["rows"]
                busy = event["name"]
                show(event)
        except BaseException as error:
            self.stop()
            if isinstance(error, BrokenPipeError):
                raise WorkerDied(busy, self._last_words(process)) from None
            if isinstance(error, queue.Empty):
                raise WorkerDied(busy, f"no sign of life for {PATIENCE:.0f} s") from None
            raise

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()  # its child sees that
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"} | self.environment
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # processes that wait for more to compile disturb
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            bufsize=1,
            env=environment,
        )
        return self._heard()

    def _heard(self) -> subprocess.Popen[str]:
        """The process that was started, with a thread that listens to it."""
        assert self.process is not None
        self.lines = queue.Queue()
        threading.Thread(target=_listen, args=(self.process, self.lines), daemon=True).start()
        return self.process

    def _last_words(self, process: subprocess.Popen[str]) -> str:
        code = process.wait()
        if code < 0:
            hint = ": too little memory?" if code == -9 else ""
            return f"the process was killed by signal {-code}{hint}"
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return f"the process ended with code {code}: {lines[-1] if lines else 'no message'}"


def _to(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _listen(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
