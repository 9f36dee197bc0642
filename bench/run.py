"""``pylosses bench``: which configurations, measured within a budget of minutes, rows on disk as they finish."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from pylosses.spec import LOSSES, LossSpec

from . import report, shapes
from .providers import variants
from .shapes import SHAPES, Shape

#: Allocator settings by name: torch reads its own when it starts. Huge pages help torch's losses at large shapes.
ALLOCATORS = {"default": {}, "huge pages": {"THP_MEM_ALLOC_ENABLE": "1"}}
DTYPES = ("float32", "bfloat16", "float16", "float64")
Rows = list[dict[str, Any]]
Show = Callable[[str], None]  #: sees what a process does, as it does it

#: Minutes of a run, and for each configuration seconds of timing and the least number of rounds.
EFFORT = {"quick": {"budget": 3.0, "seconds": 0.6, "least": 3}, "full": {"budget": 20.0, "seconds": 3.0, "least": 3}}
ENDING = 8.0  #: seconds of a budget for the imports before it, the table and the pictures,
GRACE = 3.0  #: and before them for a last round to end, or to be ended


@dataclass(frozen=True)
class Configuration:
    """What is measured at once: all providers of one loss at one shape and dtype, with one allocator."""

    loss: str
    shape: Shape
    dtype: str = "float32"
    allocator: str = "default"
    compile: bool = False
    variant: int = 0  #: of the arguments, see `providers.variants`
    arguments: str = ""
    timed: bool = True
    weighed: bool = False

    @property
    def title(self) -> str:
        arguments, allocator = (
            f" {self.arguments}" if self.arguments else "",
            "" if self.allocator == "default" else ", huge pages",
        )
        return f"{self.loss}{arguments} {self.shape.name} {self.dtype}{allocator}"

    @property
    def about(self) -> dict[str, Any]:
        """What identifies it in a row."""
        return {
            "loss": self.loss,
            "arguments": self.arguments,
            "shape": self.shape.name,
            "sizes": list(self.shape.sizes),
            "kind": self.shape.kind,
            "dtype": self.dtype,
            "allocator": self.allocator,
        }

    @property
    def cost(self) -> float:
        """Seconds it takes on a small machine, roughly: for the budget, and for the time left."""
        each = 30e-9 * self.shape.logits  # a step of everybody
        if self.shape.kind == "linear":
            each += 3 * 6 * math.prod(self.shape.sizes) / 2e11
        compiling = 0 if not self.compile else 15 if self.allocator == "default" else 5
        return 2 + (7 if self.timed else 2) * each + compiling


def main(arguments: argparse.Namespace) -> int:
    """Run the bench; 0 when all is well, 1 when one of our backends fails its gate, 2 when the options make no sense."""
    try:
        plan = configurations(arguments)
        if arguments.plot and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'pylosses[bench]'")
        for folder in (arguments.plot, arguments.json and arguments.json.parent):
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"pylosses bench: error: {error}", file=sys.stderr)
        return 2
    effort = EFFORT["quick" if arguments.quick else "full"]
    budget = arguments.budget or effort["budget"]
    threads = arguments.threads or torch.get_num_threads()
    settings = {"threads": threads, "device": arguments.device, "peers": arguments.peers, **effort, "budget": budget}
    record = report.Record.start(settings, arguments.json)
    deadline = time.monotonic() + 60 * budget - ENDING
    console = report.console()
    console.print(f"{record.title}; {len(plan)} configurations within {budget:g} min", highlight=False, soft_wrap=True)
    if record.caution:
        console.print(record.caution, style="yellow", highlight=False, soft_wrap=True)
    stopped = False
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: nobody is left measuring
    try:
        if not (arguments.quick or arguments.loss or arguments.shape):
            record.header["import_ms"] = imports()
        for rows in _measured(plan, {**settings, "backends": arguments.backend}, deadline, console):
            record.add(rows)
    except KeyboardInterrupt:
        stopped = True
    report.table(record.rows, console)
    if arguments.plot:
        for file in report.plots(record, arguments.plot):
            console.print(f"wrote {file}", highlight=False)
    if arguments.json:
        record.write()
        console.print(f"wrote {arguments.json}", highlight=False)
    if stopped:
        console.print("stopped; what was finished is in the table", style="yellow")
        return 130
    ours = ("ours", "reference", "")  # "": the configuration as a whole
    return int(any(row["by"] in ours and row["status"] in ("FAILED", "error") for row in record.rows))


# What is measured

MAIN = ("hem", "cross_entropy", "entropy", "focal", "dice", "dice_ce")
ROW_LOSSES = ("logit_norm", "adr", "knl", "tta", "multi_margin")
QUICK = ("cross_entropy", "hem", "entropy", "dice", "linear_cross_entropy")


def configurations(arguments: argparse.Namespace) -> list[Configuration]:
    """The chosen configurations, the most important first, or ValueError with what is wrong with the choice."""
    for dtype in arguments.dtype or ():
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; the dtypes are: {', '.join(DTYPES)}")
    chosen = [shape for name in arguments.shape or () for shape in shapes.find(name)]
    if arguments.loss or chosen:
        found = list(_asked(arguments.loss, chosen, arguments.quick))
    else:
        found = list(_quick() if arguments.quick else _full())
    if not found:
        names = ", ".join(spec.name for spec in arguments.loss or ()) or "no loss"
        raise ValueError(f"nothing to measure: {names} does not take {', '.join(arguments.shape or ('any shape',))}")
    if arguments.device != "cpu":
        found = [one for one in found if one.allocator == "default"]
    if arguments.dtype:
        found = [replace(one, dtype=dtype) for one in found if one.dtype == "float32" for dtype in arguments.dtype]
    if arguments.no_compile:
        found = [replace(one, compile=False) for one in found]
    return [variant for one in found for variant in _variants(one, arguments.peers)]


def _asked(losses: list[LossSpec] | None, chosen: list[Shape], quick: bool) -> Iterator[Configuration]:
    """What was asked for, in all ways; a curve in one."""
    usual = [SHAPES[name] for name in (("imagenet", "llama-quick", "cityscapes-quick", "linear-quick", "contrastive"))]
    if not quick:
        usual = [shape for shape in SHAPES.values() if not shape.name.endswith("-quick")]
    for spec in losses or list(LOSSES.values()):
        for shape in chosen or usual:
            if shapes.fits(spec, shape):
                one = Configuration(spec.name, shape, compile=shape not in shapes.SWEEP, weighed=True)
                yield one
                if shape not in shapes.SWEEP:
                    yield replace(one, allocator="huge pages", weighed=False)


def _quick() -> Iterator[Configuration]:
    for loss in QUICK:
        for name in ("llama-quick", "cityscapes-quick", "linear-quick", "imagenet", "cifar"):
            if shapes.fits(LOSSES[loss], SHAPES[name]):
                large = name not in ("imagenet", "cifar")
                compile = loss in ("cross_entropy", "hem") and name == "llama-quick"
                yield Configuration(loss, SHAPES[name], compile=compile, weighed=large)
                if large and name != "linear-quick":
                    yield Configuration(loss, SHAPES[name], allocator="huge pages", compile=compile)
    yield from (Configuration("cross_entropy", shape) for shape in shapes.SWEEP[:-1])


def _full() -> Iterator[Configuration]:
    """Main losses at the central shapes in all ways, then whatever else has a promise (`bars`), curves and other shapes."""
    for name in ("llama", "cityscapes", "imagenet"):
        for loss in MAIN:
            if shapes.fits(LOSSES[loss], SHAPES[name]):
                yield Configuration(loss, SHAPES[name], compile=True, weighed=True)
                yield Configuration(loss, SHAPES[name], compile=True, allocator="huge pages")
    for loss, name in (("linear_cross_entropy", "linear"), ("linear_hem", "linear"), ("linear_hem", "linear-easy")):
        yield Configuration(loss, SHAPES[name], weighed=name == "linear")
    yield from (Configuration(loss, SHAPES["llama"], dtype="bfloat16") for loss in ("hem", "cross_entropy"))
    yield from (Configuration(loss, SHAPES["llama"], weighed=True) for loss in ROW_LOSSES)
    yield from (Configuration("linear_cross_entropy", shape, timed=False, weighed=True) for shape in shapes.VOCABULARIES)
    yield Configuration("linear_cross_entropy", SHAPES["linear-rows"], timed=False, weighed=True)
    yield from (Configuration(loss, shape) for loss in ("cross_entropy", "hem") for shape in shapes.SWEEP)
    yield from (Configuration(loss, SHAPES["cifar"]) for loss in ("cross_entropy", "hem"))
    for dtype in ("float32", "bfloat16"):
        for name in ("camvid", "ade20k"):
            yield from (Configuration(loss, SHAPES[name], dtype=dtype) for loss in ("hem", "cross_entropy", "dice"))
    yield Configuration("dice_ce", SHAPES["medical3d"], weighed=True)
    yield Configuration("info_nce", SHAPES["contrastive"], weighed=True)
    yield Configuration("linear_cross_entropy", SHAPES["linear"], allocator="huge pages")


def _variants(one: Configuration, peers: bool) -> Iterator[Configuration]:
    """The configuration, and where it is the full one those with the arguments under which a peer computes the same."""
    yield one
    if one.allocator == "default" and one.weighed:
        for i, own in enumerate(variants(LOSSES[one.loss], peers)[1:], 1):
            text = ", ".join(f"{name}={value!r}" for name, value in own.items())
            yield replace(one, variant=i, arguments=text, compile=False)


def imports(times: int = 3) -> list[float]:
    """Milliseconds of ``import pylosses`` after ``import torch``, each in a fresh process; the first may have to compile it."""
    code = "import time, torch; start = time.perf_counter(); import pylosses; print(time.perf_counter() - start)"
    taken = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(1 + times)]
    return [round(1e3 * float(one), 1) for one in taken[1:] if one]


# Measuring


def _measured(plan: list[Configuration], settings: dict[str, Any], deadline: float, console: Console) -> Iterator[Rows]:
    """Rows of each configuration as it finishes, with a progress bar. What does not fit into the budget is named."""
    servers = {name: Server(environment) for name, environment in ALLOCATORS.items()}
    left_out = []
    try:
        with Progress(console=console, transient=True, speed_estimate_period=600) as progress:
            task = progress.add_task("", total=sum(one.cost for one in plan))
            for i, one in enumerate(plan):
                where = f"{i + 1}/{len(plan)} {one.title}"
                if one.cost > deadline - time.monotonic() and i > 0:
                    left_out.append(one)
                else:
                    if not console.is_terminal:
                        console.print(f"{time.strftime('%X')} {where}", style="dim", highlight=False, soft_wrap=True)

                    def show(doing: str, where: str = where) -> None:
                        progress.update(task, description=f"{where}: {doing:<32.32}")

                    yield rows_of(one, servers[one.allocator], settings, deadline, show)
                progress.advance(task, one.cost)
    finally:
        for server in servers.values():
            server.stop()
    if left_out:
        names = ", ".join(dict.fromkeys(f"{one.loss} {one.shape.name}" for one in left_out))
        text = f"{len(left_out)} of {len(plan)} configurations did not fit into {settings['budget']:g} min (--budget): {names}"
        console.print(text, style="yellow", highlight=False)


def rows_of(one: Configuration, server: Server, settings: dict[str, Any], deadline: float, show: Show) -> Rows:
    """Rows of one configuration. A provider that takes its process down is left out of the next try."""
    request = {**settings, **one.about}
    request.update(compile=one.compile, variant=one.variant, timed=one.timed, weighed=one.weighed, deadline=deadline - GRACE)
    killers: dict[str, str] = {}
    while True:
        try:
            return [{**one.about, **row} for row in server.ask({**request, "exclude": killers}, deadline, show)]
        except ProcessDied as death:
            if not death.provider or death.provider in killers:
                failed = {"provider": death.provider, "by": death.by, "status": "error", "reason": death.why}
                return [{**one.about, **failed}]
            killers[death.provider] = death.why


class ProcessDied(Exception):
    """A process ended while it was busy with a provider, or was ended at the end of the budget."""

    def __init__(self, provider: str, why: str, by: str = "") -> None:
        super().__init__(why)
        self.provider, self.why, self.by = provider, why, by


class Server:
    """A process that measures, see `measure.serve`; started when first needed, and again after it ended."""

    COMMAND = (sys.executable, "-m", "pylosses", "bench", "--worker")

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()  # what it says; None when it has ended
        self.errors = tempfile.TemporaryFile("w+")

    def ask(self, request: dict[str, Any], deadline: float, show: Show) -> Rows:
        """Send a request and wait for its rows; `show` sees what happens on the way."""
        process = self.process or self._start()
        busy, rows = "", None
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            while True:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
                said: dict[str, Any] = {"ended": process.wait()} if line is None else json.loads(line)
                if "doing" in said:
                    busy = said["provider"]
                    show(f"{said['doing']} {busy}")
                rows = said.get("rows", rows)
                if "ended" in said:
                    if rows is None or said["ended"]:
                        raise ProcessDied(busy, self._last_words(said["ended"]))
                    return rows
        except queue.Empty:
            self.stop()
            raise ProcessDied("", "stopped at the end of the budget (--budget)", "budget") from None
        except BaseException as error:
            if not isinstance(error, ProcessDied) or process.poll() is not None:
                self.stop()
            raise

    def stop(self) -> None:
        """End the process and whatever it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, AttributeError):  # Windows has no groups
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"} | self.environment
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # processes that wait for more to compile disturb
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self.errors,
            "text": True,
            "bufsize": 1,
        }
        self.process = subprocess.Popen(self.COMMAND, env=environment, start_new_session=True, **pipes)
        self.lines = queue.Queue()
        threading.Thread(target=_listen, args=(self.process, self.lines), daemon=True).start()
        return self.process

    def _last_words(self, code: int) -> str:
        if code < 0:
            hint = ": too little memory?" if code == -9 else ""
            return f"the process was killed by signal {-code}{hint}"
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return f"the process ended with code {code}: {lines[-1] if lines else 'no message'}"


def _listen(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
