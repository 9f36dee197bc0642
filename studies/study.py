"""What all studies share: parts that resume, results with their origin, tables, and the command line.

A study is a list of variants (losses) and a function that measures one of them with one seed: a part. Parts are stored one by
one in <results>/<study>.json; what is there already is not measured again, so a study may be stopped and started at any time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .data import Data, DataMissing

HERE = Path(__file__).parent
Measures = dict[str, Any]  #: numbers by name; nested dictionaries and lists are welcome


@dataclass
class Part:
    """One variant with one seed."""

    variant: str
    seed: int
    settings: dict[str, Any]
    data: Data
    progress: Callable[[float], None]  #: hears the share that is done
    private: Path  #: for pictures that are looked at and not published; git ignores it


class Results:
    """Stored parts of one study."""

    def __init__(self, path: Path, study: str, question: str, settings: dict[str, Any]) -> None:
        self.path, self.study, self.question, self.settings = path, study, question, settings
        self.parts: list[dict[str, Any]] = []
        if path.exists():
            stored = json.loads(path.read_text())
            if stored["settings"] != json.loads(json.dumps(settings)):
                raise SystemExit(
                    f"{path} holds results of other settings: {stored['settings']}, asked are {settings}. "
                    "Give another folder with --results, or remove the file"
                )
            self.parts = stored["parts"]

    def has(self, variant: str, seed: int) -> bool:
        return any(part["variant"] == variant and part["seed"] == seed for part in self.parts)

    def add(self, part: dict[str, Any]) -> None:
        self.parts.append(part)
        self.store()

    def store(self) -> None:
        """As JSON, a part a line."""
        head = {"study": self.study, "question": self.question, "settings": self.settings}
        lines = ",\n".join(map(json.dumps, self.parts))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(f'{json.dumps(head)[:-1]}, "parts": [\n{lines}\n]}}\n')
        new.replace(self.path)  # whole, whenever the process ends

    def variants(self, order: Sequence[str]) -> list[str]:
        """Those that were measured, in the study's order."""
        return [name for name in order if any(part["variant"] == name for part in self.parts)]

    def values(self, variant: str, *path: str) -> list[float]:
        """A measure of all seeds: `values("CE", "auroc", "msp")`."""
        found = []
        for part in self.parts:
            if part["variant"] == variant:
                value = part["measures"]
                for key in path:
                    value = value[key]
                found.append(value)
        return found

    def of(self, name: str) -> bool:
        """Were all parts measured on this data set (among others)? Published numbers stand beside no other."""
        return all(name in part["data"] for part in self.parts)

    def cell(self, variant: str, *path: str, digits: int = 2) -> str:
        """Mean and standard deviation over the seeds, as a table prints it."""
        return mean_and_spread(self.values(variant, *path), digits)

    def origin(self) -> str:
        """Where the numbers come from, in one paragraph."""

        def of(key: str) -> str:
            return ", ".join(sorted({str(part[key]) for part in self.parts}))

        data = sorted({name for part in self.parts for name in part["data"]})
        seeds = sorted({part["seed"] for part in self.parts})
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return (
            f"Data: {', '.join(data)}. Seeds: {', '.join(map(str, seeds))}. Settings: {settings}. "
            f"Losses of commit {of('commit')}, torch {of('torch')}, {of('threads')} thread(s)."
        )


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def commit() -> str:
    """The last commit that changed the losses."""
    command = ["git", "-C", str(HERE), "log", "-1", "--format=%h", "--", ":/csrc", ":/pylosses/losses"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or "unknown"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass
class Study:
    """One question, and how it is answered."""

    name: str
    question: str
    variants: Sequence[str]
    settings: dict[str, Any]
    quick: dict[str, Any]  #: settings that differ with --quick
    measure: Callable[[Part], Measures]
    report: Callable[[Results], str]  #: the table and what is to be said of the protocol, as Markdown
    picture: Callable[[Results, Path], None]  #: draws to a PNG file
    seeds: int = 3

    def main(self, arguments: Sequence[str] | None = None) -> Results:
        options = self._options(arguments)
        settings = dict(self.settings, **(self.quick if options.quick else {}))
        for change in options.set:
            name, _, value = change.partition("=")
            if name not in settings:
                raise SystemExit(f"--set {change}: no setting {name}; there are {', '.join(settings)}")
            settings[name] = type(settings[name])(value)
        folder = options.results or HERE / "results" / ("quick" if options.quick else "")
        results = Results(folder / f"{self.name}.json", self.name, self.question, settings)
        if not options.report:
            self._run(results, options)
        self.write(results)
        return results

    def write(self, results: Results) -> None:
        """The table and the picture, next to the results."""
        if not results.parts:
            raise SystemExit(f"{results.path} has no results yet")
        results.store()
        markdown = results.path.with_suffix(".md")
        markdown.write_text(f"# {self.question}\n\n{self.report(results)}\n{results.origin()}\n")
        self.picture(results, results.path.with_suffix(".png"))
        print(markdown.read_text())

    def _run(self, results: Results, options: argparse.Namespace) -> None:
        chosen = options.only or list(self.variants)
        for name in chosen:
            if name not in self.variants:
                raise SystemExit(f"--only {name}: the variants are {', '.join(self.variants)}")
        open_parts = [(v, s) for s in range(options.seeds) for v in chosen if not results.has(v, s)]
        data = Data(options.data, quick=options.quick)
        origin = {"commit": commit(), "torch": torch.__version__, "threads": torch.get_num_threads()}
        began = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(self.name, total=len(open_parts))
            for index, (variant, seed) in enumerate(open_parts):
                if options.minutes and time.monotonic() - began > 60 * options.minutes:
                    bar.console.print(f"{len(open_parts) - index} parts are left: the same command goes on with them")
                    break
                bar.update(task, description=f"{variant}, seed {seed}")

                def progress(done: float, index: int = index) -> None:
                    bar.update(task, completed=index + done)

                start = time.monotonic()
                torch.manual_seed(seed)
                try:
                    measures = self.measure(
                        Part(variant, seed, results.settings, data, progress, results.path.parent / "private")
                    )
                except DataMissing as error:
                    raise SystemExit(str(error)) from None
                progress(1.0)
                took = round(time.monotonic() - start, 1)
                results.add(
                    {"variant": variant, "seed": seed, "seconds": took, "data": list(data.used), **origin, "measures": measures}
                )
                if not sys.stderr.isatty():
                    print(f"{variant}, seed {seed}: {took} s", file=sys.stderr, flush=True)

    def _options(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"python -m studies.{self.name}", description=self.question)
        parser.add_argument("--seeds", type=int, default=1 if "--quick" in (arguments or sys.argv) else self.seeds)
        parser.add_argument("--quick", action="store_true", help="scikit-learn's digits and small settings: seconds")
        parser.add_argument("--only", nargs="+", metavar="VARIANT", help=", ".join(self.variants))
        parser.add_argument("--data", type=Path, help="folder of the data sets; else PYLOSSES_DATA, else a download")
        parser.add_argument("--results", type=Path, help="folder of the results (studies/results)")
        parser.add_argument("--minutes", type=float, help="start no part after so many minutes")
        parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="another value of a setting")
        parser.add_argument("--report", action="store_true", help="only write table and picture of the stored results")
        return parser.parse_args(arguments)
