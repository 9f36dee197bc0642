"""The record of a run, its table and pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from pylosses import info
from pylosses.spec import LOSSES

from .shapes import Shape

Row = dict[str, Any]
KEY = ("loss", "arguments", "shape", "sizes", "dtype")  #: what tells a configuration from others, whatever its allocator

# Record


@dataclass
class Record:
    """One run: where and when it was measured, and its rows."""

    header: dict[str, Any]
    file: Path | None = None
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def start(cls, settings: dict[str, Any], file: Path | None = None) -> Record:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
        return cls({"run": now, "commit": commit(), "load": load, "settings": settings, **info.facts()}, file)

    @property
    def machine(self) -> str:
        cpu, versions, settings = (self.header[name] for name in ("cpu", "versions", "settings"))
        if settings["device"] != "cpu":
            return f"{settings['device']}, torch {versions['torch']}"
        plural = "thread" if settings["threads"] == 1 else "threads"
        return f"{cpu['model']}, {settings['threads']} {plural}, torch {versions['torch']} ({cpu['torch_instruction_set']})"

    @property
    def title(self) -> str:
        return f"pylosses {self.header['versions']['pylosses']} ({self.header['commit']}) on {self.machine}"

    @property
    def caution(self) -> str:
        """That others were at work on this machine when the run began; empty where nothing speaks for it."""
        load, cores = self.header.get("load"), self.header["cpu"]["usable_cores"]
        if not load or load <= cores / 2:
            return ""
        return f"Others were at work on this machine (load {load:g} on {cores} cores): these numbers have a shape, not a size."

    def add(self, rows: list[Row]) -> None:
        """Keep the rows of a finished configuration, in memory and on disk: a run that is killed loses nothing before."""
        self.rows += rows
        self.write()

    def write(self) -> None:
        """A line for each row."""
        if self.file is not None:
            partial = self.file.with_name(self.file.name + ".part")
            lines = ",\n".join(json.dumps(row) for row in self.rows)
            partial.write_text(f'{json.dumps(self.header, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}\n')
            os.replace(partial, self.file)

    @classmethod
    def load(cls, file: Path) -> Record:
        header = json.loads(file.read_text())
        rows = header.pop("rows")
        return cls(header, None, rows)


def console() -> Console:
    """As wide as the terminal, or wide enough for the table."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def source_tree() -> Path | None:
    """The source tree that the command runs in, or None."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[1]):
        if (folder / "bench" / "shapes.py").exists() and (folder / "pyproject.toml").exists():
            return folder
    return None


def commit() -> str:
    """The commit of the source tree, marked when it was changed since."""
    tree = source_tree()
    if tree is None:
        return "installed"
    try:
        command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


# Table


def groups(rows: list[Row]) -> Iterator[tuple[Row, dict[str, dict[str, Row]]]]:
    """(a row of the configuration, provider -> allocator -> row), in order."""
    found: dict[str, dict[str, dict[str, Row]]] = {}
    first: dict[str, Row] = {}
    for row in rows:
        key = str([row[name] for name in KEY])
        first.setdefault(key, row)
        found.setdefault(key, {}).setdefault(row["provider"], {})[row["allocator"]] = row
    for key, providers in found.items():
        yield first[key], providers


def title_of(row: Row) -> str:
    arguments = f" {row['arguments']}" if row["arguments"] else ""
    return f"{row['loss']}{arguments}, {shape_of(row)} {row['dtype']}"


def shape_of(row: Row) -> str:
    sizes = f"({', '.join(map(str, row['sizes']))})"
    return sizes if row["shape"][0].isdecimal() else f"{row['shape']} {sizes}"


#: Header and width of the columns after the provider's name.
COLUMNS = (("ms", 22), ("ours faster", 12), ("huge pages: ms", 22), ("ours faster", 12), ("copies", 10), ("extra", 9))
NAME_WIDTH = 36
LEGEND = """ms: median of the rounds and (quartiles); a training step is a fresh leaf, forward, backward, gradient released
ours faster: their time / our time within a round, quartiles of the rounds
huge pages: with THP_MEM_ALLOC_ENABLE=1, which helps torch's own allocations
copies: time in copies of the logits into a warm buffer; extra: peak memory of torch's allocator beyond input and gradient"""


def table(rows: list[Row], console: Console) -> None:
    """Print the rows, both allocator settings side by side."""
    head = "".join(f"{name:>{width}}" for name, width in COLUMNS)
    console.print(" " * NAME_WIDTH + head, style="bold", highlight=False, soft_wrap=True)
    for first, providers in groups(rows):
        console.print(f"[bold]{escape(title_of(first))}[/]", highlight=False, soft_wrap=True)
        for name, settings in providers.items():
            console.print(_cells(name, settings), highlight=False, soft_wrap=True)
    console.print(LEGEND, style="dim", highlight=False)


def _cells(name: str, settings: dict[str, Row]) -> str:
    plain = settings.get("default", next(iter(settings.values())))
    shown = f"  {name:<{NAME_WIDTH - 2}.{NAME_WIDTH - 3}}"
    shown = f"[cyan]{shown}[/]" if plain["by"] in ("ours", "reference") else shown
    if plain["status"] != "ok":
        words = {"error": "error: ", "FAILED": "FAILED: "}
        style = "bold red" if plain["status"] in ("error", "FAILED") and plain["by"] != "budget" else "dim"
        return f"{shown}[{style}]{escape(words.get(plain['status'], '') + plain['reason'])}[/]"
    cells = []
    for row in (settings.get("default", {}), settings.get("huge pages", {})):
        untimed = "not timed" if row.get("status") == "ok" else row.get("status", "")
        cells += [_spread(row) if "ms" in row else untimed, ratio_of(row)]
    cells += [range_of(plain.get("copies")), in_bytes(plain.get("extra_bytes"))]
    return shown + "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def _spread(row: Row) -> str:
    low, median, high = map(short, row["ms"])
    return f"{median} ({low}-{high})" if row["rounds"] > 1 else f"{median} (one round)"


def ratio_of(row: Row) -> str:
    """Their time / ours as a range; nothing if it was not measured, or if the row is ours."""
    return range_of(row.get("ratio"), "x") if row.get("provider") != row.get("against") else ""


def range_of(quartiles: list[float] | None, unit: str = "") -> str:
    """From the lower to the upper quartile; one number where both look alike."""
    if not quartiles:
        return ""
    low, high = short(quartiles[0], 2), short(quartiles[2], 2)
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def short(value: float, digits: int = 3) -> str:
    """So many digits, without an exponent."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:.0f}" if rounded >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def in_bytes(value: float | None) -> str:
    if value is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


# Markdown

HEADLINE = ("loss", "shape", "ours", "copies", "eager", "compiled", "torch's own", "extra memory", "of eager")


def headline(record: Record, shown: tuple[tuple[str, str], ...] = (), columns: tuple[str, ...] = HEADLINE) -> str:
    """Losses in float32 that have an eager formula, all or the (loss, shape) pairs of `shown`; with huge pages in brackets."""
    found: dict[tuple[str, str], str] = {}
    for first, providers in groups(record.rows):
        kinds: dict[str, dict[str, Row]] = {}
        for settings in providers.values():
            row = settings.get("default", {})
            if row.get("status") == "ok" and "ms" in row:
                kinds.setdefault(row["by"], settings)
        if not {"eager", "ours"} <= kinds.keys() or first["dtype"] != "float32" or first["shape"].startswith("classes-"):
            continue
        ours = kinds["ours"]["default"]
        cells = [f"`{LOSSES[first['loss']].function}`", shape_of(first), f"{short(ours['ms'][1])} ms"]
        cells += [range_of(ours.get("copies")), *(both_ratios(kinds.get(kind, {})) for kind in ("eager", "compile", "torch"))]
        cells += [in_bytes(kinds[kind]["default"].get("extra_bytes")) for kind in ("ours", "eager")]
        named = dict(zip(HEADLINE, cells, strict=True))
        found[first["loss"], first["shape"]] = f"| {' | '.join(named[column] for column in columns)} |"
    lines = [found[pair] for pair in shown or found if pair in found]
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines])


def peers(record: Record) -> str:
    """Other libraries: how many times longer they take than ours with the same arguments."""
    lines = ["| library | loss and arguments | shape | ours | their time / ours | extra memory | theirs |", "|---" * 7 + "|"]
    for first, providers in groups(record.rows):
        ours = next((s["default"] for s in providers.values() if s.get("default", {}).get("by") == "ours"), {})
        for name, settings in providers.items():
            row = settings.get("default", {})
            if row.get("by") == "peer" and row["status"] == "ok":
                loss = f"`{LOSSES[first['loss']].function}`" + (f" {first['arguments']}" if first["arguments"] else "")
                cells = [name, loss, shape_of(first), f"{short(ours['ms'][1])} ms", both_ratios(settings)]
                cells += [in_bytes(one.get("extra_bytes")) for one in (ours, row)]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def both_ratios(settings: dict[str, Row]) -> str:
    """A provider's time / ours, with huge pages in brackets."""
    default, huge = (ratio_of(settings.get(allocator, {})) for allocator in ("default", "huge pages"))
    return f"{default} ({huge})" if huge else default


# Pictures

#: Of each kind of provider, the same in every picture; readable for colour-blind people and in print.
COLOURS = {"ours": "#0072B2", "eager": "#D55E00", "compile": "#E69F00", "torch": "#009E73", "copy": "#555555"}
NAMES = {"ours": "pylosses", "eager": "eager PyTorch", "compile": "torch.compile of it", "copy": "copy of the logits"}
CHUNKED = "#00573F"


def plots(record: Record, folder: Path) -> list[Path]:
    """Write the pictures that the rows allow and return their files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image  # matplotlib needs it, too

    rows = [row for row in record.rows if row["status"] == "ok" and not row["arguments"] and row["dtype"] == "float32"]
    huge = {(row["loss"], row["shape"], row["provider"]): row for row in rows if row["allocator"] != "default"}
    rows = [row for row in rows if row["allocator"] == "default" and row["by"] in COLOURS]

    def speed_up(row: Row) -> Point:
        other = ratio_of(huge.get((row["loss"], row["shape"], row["provider"]), {}))
        return row["ratio"][1], ratio_of(row) + (f" ({other})" if other else "")

    def memory(row: Row) -> Point:
        return row["extra_bytes"] / logit_bytes(row), in_bytes(row["extra_bytes"])

    central = [row for row in rows if row["kind"] in ("rows", "pixels") and not row["shape"].startswith("classes-")]
    sweep = [(row, row["ms"][1]) for row in rows if row["shape"].startswith("classes-") and "ms" in row]
    linear = [row for row in rows if row["shape"].startswith("vocabulary-") and "extra_bytes" in row]
    pictures = {
        "speedup": _bars([(row, *speed_up(row)) for row in central if ratio_of(row)], "their time / ours, a training step", 1),
        "memory": _bars([(row, *memory(row)) for row in central if "extra_bytes" in row], "in sizes of the logits", 0),
        "classes": _curves(sweep, "classes (64 rows)", "milliseconds"),
        "linear": _curves(
            [(row, row["extra_bytes"] / 2**20) for row in linear], "vocabulary (1024 tokens x 64 features)", "MiB"
        ),
    }
    written = []
    for name, panels in pictures.items():
        if panels is not None:
            figure = panels[0].figure
            legend = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
            figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
            figure.suptitle(f"{TITLES[name]}\n{record.machine}", fontsize=10)
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=100)
            Image.open(written[-1]).quantize(64).save(written[-1], optimize=True)  # a third of the bytes
            plt.close(figure)
    return written


TITLES = {
    "speedup": "How many times longer a training step takes than with pylosses\n(in brackets: with huge pages for torch)",
    "memory": "Peak memory of a training step beyond input and gradient",
    "classes": "Time of a training step against the number of classes, float32",
    "linear": "Linear layer and cross-entropy: peak memory beyond inputs and gradients, float32",
}
Point = tuple[float, str]


def _bars(rows: list[tuple[Row, float, str]], label: str, start: int) -> Any:
    """A panel for each of the three shapes with most bars; a group of bars for each loss, from `start`."""
    import matplotlib.pyplot as plt

    shapes = [shape_of(row) for row, *_ in rows]
    shapes = [name for name in dict.fromkeys(shapes) if name in sorted(set(shapes), key=shapes.count)[-3:]]
    if not shapes:
        return None
    many = max(sum(shape_of(row) == name for row, *_ in rows) for name in shapes)
    size = (max(7, 4.2 * len(shapes)), max(3.4, 1.8 + 0.2 * many))
    figure, grid = plt.subplots(1, len(shapes), figsize=size, layout="constrained", squeeze=False)
    for axes, name in zip(grid[0], shapes, strict=True):
        place, ticks = 0.0, {}
        its = [one for one in rows if shape_of(one[0]) == name]
        for loss in dict.fromkeys(row["loss"] for row, *_ in its):
            ticks[loss] = place
            for row, length, text in its:
                if row["loss"] == loss:
                    axes.barh(place, length - start, left=start, height=0.85, color=_colour(row), label=_label(row))
                    axes.annotate(text, (length, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
                    place += 1
            place += 0.8
        axes.set(title=name, xlabel=label, ylim=(place, -1))
        if start:
            axes.set_xscale("log")
        longest = max(length for _, length, _ in its)
        axes.set_xlim(0.8 * start, 6 * longest if start else 1.3 * longest)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_yticks(list(ticks.values()), list(ticks), fontsize=8)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    return grid[0]


def _curves(points: list[tuple[Row, float]], x: str, y: str) -> Any:
    """A panel for each loss, a curve for each provider against the number of classes."""
    import matplotlib.pyplot as plt

    losses = list(dict.fromkeys(row["loss"] for row, _ in points))
    if not losses:
        return None
    size = (max(7, 4.6 * len(losses)), 4.4)
    figure, grid = plt.subplots(1, len(losses), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for axes, loss in zip(grid[0], losses, strict=True):
        curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for row, value in points:
            if row["loss"] == loss:
                curves.setdefault((_label(row), _colour(row)), []).append((row["sizes"][1], value))
        for (name, colour), its in curves.items():
            axes.plot(*zip(*sorted(its), strict=True), "o-", color=colour, markersize=4, label=name)
        axes.set(title=loss, xlabel=x, xscale="log", yscale="log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.grid(alpha=0.3)
    grid[0][0].set_ylabel(y)
    return grid[0]


def _colour(row: Row) -> str:
    return CHUNKED if "chunked" in row["provider"] else COLOURS[row["by"]]


def _label(row: Row) -> str:
    return NAMES.get(row["by"], "torch's own, chunked" if "chunked" in row["provider"] else "torch's own")


def logit_bytes(row: Row) -> int:
    return Shape("", tuple(row["sizes"]), row["kind"]).logits * {"float64": 8, "float32": 4}.get(row["dtype"], 2)
