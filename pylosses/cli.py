"""The command ``pylosses``: info, check, bench.

Exit codes: 0 all is well, 1 something failed, 2 the command line was wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from . import __version__, info
from .choice import backends
from .spec import BACKENDS, LOSSES, LossSpec


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        arguments = _parser().parse_args(argv)
        return arguments.run(arguments)
    except SystemExit as stop:  # argparse: --help, --version or a wrong command line
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pylosses", description="Fused classification losses for PyTorch.")
    parser.add_argument("--version", action="version", version=f"pylosses {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    command = commands.add_parser("info", help="versions, devices and backends, with the reason why one is not available")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_info)

    command = commands.add_parser("check", help="every loss on every backend against the float64 reference")
    command.add_argument("--backend", action="append", type=_backend, metavar="B", help=f"one of {', '.join(BACKENDS)}")
    command.add_argument("--loss", action="append", type=_loss, metavar="L", help="name of a loss, such as hem or hem_loss")
    command.add_argument("--device", action="append", type=_device, metavar="D", help="cpu, cuda or cuda:1")
    command.set_defaults(run=_check)

    command = commands.add_parser("bench", help="correctness gate, then timings against eager, torch.compile and others")
    command.add_argument("--loss", action="append", type=_loss, metavar="L", help="name of a loss; may be repeated")
    command.add_argument("--shape", action="append", metavar="NAME", help="name, or sizes such as 256x1000; may be repeated")
    command.add_argument("--dtype", action="append", metavar="T", help="float32 (default), bfloat16, float16 or float64")
    command.add_argument("--backend", action="append", type=_backend, metavar="B", help=f"one of {', '.join(BACKENDS)}")
    command.add_argument("--threads", type=_positive, metavar="T", help="threads of torch and the kernels (default: torch's)")
    command.add_argument("--device", type=_device, default="cpu", metavar="D", help="cpu (default), cuda or cuda:1")
    command.add_argument("--peers", action="store_true", help="other libraries too, as far as they are installed")
    command.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and all rows to FILE")
    command.add_argument("--plot", type=Path, metavar="DIR", help="write PNG plots to DIR")
    command.add_argument("--quick", action="store_true", help="the short set: main losses at reduced shapes")
    command.add_argument("--budget", type=_minutes, metavar="M", help="minutes of the whole run (default: 20, with --quick 3)")
    command.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it takes time to compile")
    command.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    command.set_defaults(run=_bench)
    return parser


def _loss(name: str) -> LossSpec:
    for spec in LOSSES.values():
        if name in (spec.name, spec.function, spec.module):
            return spec
    raise argparse.ArgumentTypeError(f"unknown loss {name!r}; the losses are: {', '.join(LOSSES)}")


def _backend(name: str) -> str:
    if name not in BACKENDS:
        raise argparse.ArgumentTypeError(f"unknown backend {name!r}; the backends are: {', '.join(BACKENDS)}")
    return name


def _device(name: str) -> str:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"unknown device {name!r}; try cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"device {name!r} is not here: torch {torch.__version__} finds no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"device must be cpu or cuda, got {name!r}")
    return name


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected minutes above 0, got {text!r}")
    return value


def _info(arguments: argparse.Namespace) -> int:
    facts = info.facts()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, version in facts["versions"].items():
        print(f"{name:<12} {version or 'not installed'}")
    for device in facts["devices"]:
        print(f"{'device':<12} {device}")
    cpu = facts["cpu"]
    print(f"{'cores':<12} {cpu['usable_cores']} usable of {cpu['cores']}, {facts['threads']} threads")
    print(f"{'instructions':<12} {cpu['instruction_set']} (torch: {cpu['torch_instruction_set']})")
    print(f"{'system':<12} {facts['system']}")
    print(f"{'built':<12} {facts['built']}")
    print("backends")
    for name, status in facts["backends"].items():
        print(f"  {name:<10} {'available' if status['available'] else 'not available'}: {status['reason']}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
    from rich.text import Text

    from . import checking

    # Reasons and errors hold brackets of their own, so nothing is read as markup; what has a style is a Text.
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    for name in arguments.backend or ():
        status = backends()[name]
        if not status.available:
            console.print(Text.assemble((f"backend {name} cannot be checked", "bold red"), f": {status.reason}"))
            return 1
    plan = checking.plan(arguments.loss, arguments.backend, arguments.device)
    columns = TextColumn("{task.description:<32}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    outcomes = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(plan))
        for check in plan:
            progress.update(task, description=f"{check.spec.name} on {check.backend}")
            outcomes.append(checking.perform(check))
            progress.advance(task)

    table = Table(title="Largest error against the float64 reference (relative)", title_justify="left")
    for name in ("loss", "backend", "cases", "our error", "plain PyTorch", "allowed"):
        table.add_column(name, justify="left" if name in ("loss", "backend") else "right")
    table.add_column("verdict")
    table.add_column("where it is closest to its bound")
    for outcome in outcomes:
        check = outcome.check
        backend = check.backend if check.device == "cpu" else f"{check.backend} ({check.device})"
        if check.skipped is not None:
            table.add_row(check.spec.name, backend, "", "", "", "", "no kernel", check.skipped, style="dim")
            continue
        verdict = Text("ok", "green") if outcome.passed else Text("FAILED", "bold red")
        numbers = [f"{value:.1e}" for value in (outcome.error, outcome.plain, outcome.allowed)]
        where = outcome.where
        if outcome.problem:
            numbers, where = [""] * 3, f"{outcome.problem} ({outcome.where})"
        table.add_row(check.spec.name, backend, str(outcome.cases), *numbers, verdict, where)
    console.print(table)
    if any(check.interpreted for check in plan):
        console.print(f"backend triton is interpreted on the CPU: {checking.INTERPRETED}", style="dim")
    for status in backends():
        if not status.available:
            console.print(f"backend {status.name} was not checked: {status.reason}", style="dim")

    done = [outcome for outcome in outcomes if outcome.check.skipped is None]
    failed = [outcome for outcome in done if not outcome.passed]
    if not done:
        console.print(
            Text.assemble(("nothing was checked", "bold red"), ": no chosen loss has a kernel on the chosen backends")
        )
        return 1
    if failed:
        names = ", ".join(f"{outcome.check.spec.name} on {outcome.check.backend}" for outcome in failed)
        console.print(Text.assemble((f"{len(failed)} of {len(done)} checks failed", "bold red"), f": {names}"))
        return 1
    cases = sum(outcome.cases for outcome in done)
    console.print(Text.assemble((f"all {len(done)} checks passed", "green"), f" ({cases} cases)"))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    return bench_module("measure").serve() if arguments.worker else bench_module("run").main(arguments)


def bench_module(name: str) -> ModuleType:
    """A module of `pylosses.bench`. In a source tree the folder ``bench`` lies next to the package, not inside it."""
    package = importlib.import_module("pylosses")
    here = Path(__file__).parent
    if not (here / "bench").exists() and (here.parent / "bench" / "shapes.py").exists():
        beside = str(here.parent)
        if beside not in package.__path__:
            package.__path__.append(beside)
    return importlib.import_module(f"pylosses.bench.{name}")
