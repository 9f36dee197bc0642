"""Table, JSON and pictures of measured rows."""

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

from .shapes import Shape

Row = dict[str, Any]


# Record: rows on disk as they finish


@dataclass
class Record:
    """One run: where and when it was measured, and its rows."""

    header: dict[str, Any]
    json_file: Path | None
    history: Path | None
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def start(cls, settings: dict[str, Any], json_file: Path | None, history: Path | None) -> Record:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls({"run": now, "commit": commit(), "settings": settings, **info.facts()}, json_file, history)

    @property
    def machine(self) -> str:
        cpu, versions = self.header["cpu"], self.header["versions"]
        device = self.header["settings"]["device"]
        if device != "cpu":
            return f"{device}, torch {versions['torch']}"
        threads = self.header["settings"]["threads"]
        plural = "thread" if threads == 1 else "threads"
        return f"{cpu['model']}, {threads} {plural}, torch {versions['torch']} ({cpu['torch_instruction_set']})"

    @property
    def title(self) -> str:
        return f"pylosses {self.header['versions']['pylosses']} ({self.header['commit']}) on {self.machine}"

    @property
    def files(self) -> list[Path]:
        return [file for file in (self.json_file, self.history) if file is not None]

    def add(self, rows: list[Row]) -> None:
        """Keep the rows of a finished configuration, in memory and on disk: a run that is killed loses nothing before.

        Rows that were measured again take the place of the old ones.
        """
        self.rows = list({key(row): row for row in self.rows + rows}.values())
        if self.json_file is not None:
            self.json_file.parent.mkdir(parents=True, exist_ok=True)
            partial = self.json_file.with_name(self.json_file.name + ".part")
            partial.write_text(json.dumps({**self.header, "rows": self.rows}, indent=1))
            os.replace(partial, self.json_file)
        if self.history is not None:
            self.history.parent.mkdir(parents=True, exist_ok=True)
            about = {"run": self.header["run"], "commit": self.header["commit"], "machine": self.machine}
            with self.history.open("a") as lines:
                lines.writelines(json.dumps({**about, **row}) + "\n" for row in rows)

    @classmethod
    def load(cls, file: Path) -> Record:
        """A record from its JSON file."""
        header = json.loads(file.read_text())
        rows = header.pop("rows")
        return cls(header, None, None, rows)


def key(row: Row) -> tuple[object, ...]:
    """What tells a row from all others of a run."""
    names = ("loss", "arguments", "shape", "dtype", "device", "threads", "allocator", "provider")
    return tuple(row["sizes"]), *(row[name] for name in names)


def console() -> Console:
    """As wide as the terminal, or wide enough for the table."""
    return Console() if sys.stdout.isatty() else Console(width=170)


def source_tree() -> Path | None:
    """The source tree that the command runs in, or None."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[1]):
        if (folder / "bench" / "shapes.py").exists() and (folder / "pyproject.toml").exists():
            return folder
    return None


def history_file() -> Path | None:
    """bench/results/history.jsonl of the source tree, or None outside of one."""
    tree = source_tree()
    return None if tree is None else tree / "bench" / "results" / "history.jsonl"


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
    found: dict[tuple[Any, ...], dict[str, dict[str, Row]]] = {}
    first: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["loss"], row["arguments"], row["shape"], row["dtype"], row["device"], row["threads"])
        first.setdefault(key, row)
        found.setdefault(key, {}).setdefault(row["provider"], {})[row["allocator"]] = row
    for key, providers in found.items():
        yield first[key], providers


def title_of(row: Row) -> str:
    sizes = "x".join(map(str, row["sizes"]))
    shape = sizes if row["shape"] == sizes else f"{row['shape']} {sizes}"
    arguments = f" {row['arguments']}" if row["arguments"] else ""
    return f"{row['loss']}{arguments}, {shape} {row['dtype']}"


#: Header and width of the columns after the provider's name.
COLUMNS = (
    ("fwd", 7),
    ("bwd", 7),
    ("fwd+bwd", 12),
    ("no grad", 8),
    ("ours faster", 12),
    ("huge pages", 12),
    ("ours faster", 12),
    ("copies", 7),
    ("GB/s", 6),
    ("extra", 9),
)
NAME_WIDTH = 36
LEGEND = """fwd, bwd, fwd+bwd, no grad: ms of a turn's fastest step, median of the calm rounds, ± half the quartiles' range
ours faster: their time / our time, forward + backward, median of the ratios of each round, or a range if it did not settle
huge pages: forward + backward with THP_MEM_ALLOC_ENABLE=1, which helps torch's own allocations
copies: time of forward + backward in copies of the logits into a warm buffer; GB/s: by the bytes a fused loss must move
extra: peak memory of a step beyond input and gradient (large shapes only)"""


def table(rows: list[Row], console: Console) -> None:
    """Print the rows, both allocator settings side by side."""
    console.print(_line(" " * NAME_WIDTH, [name for name, _ in COLUMNS]), style="bold", highlight=False)
    disturbed = 0
    for first, providers in groups(rows):
        disturbance = _disturbance(providers)
        disturbed += bool(disturbance)
        console.print(f"[bold]{title_of(first)}[/][yellow]{disturbance}[/]", highlight=False)
        for name, settings in providers.items():
            console.print(_cells(name, settings), highlight=False, soft_wrap=True)
    console.print(LEGEND, style="dim", highlight=False)
    if disturbed:
        many = f"{disturbed} configurations were" if disturbed > 1 else "1 configuration was"
        text = f"{many} disturbed (*) by others, steal time, the clock, cores that moved or busy neighbours: measure again"
        console.print(text, style="yellow", highlight=False)


def _line(name: str, cells: list[str]) -> str:
    return name + "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))


def _cells(name: str, settings: dict[str, Row]) -> str:
    plain = settings.get("default", next(iter(settings.values())))
    huge = settings.get("huge pages")
    ours = plain["kind"] in ("ours", "reference")
    shown = f"  {name:<{NAME_WIDTH - 2}.{NAME_WIDTH - 3}}"
    shown = f"[cyan]{shown}[/]" if ours else shown
    if plain["status"] != "ok":
        word, style = {
            "missing": ("", "dim"),
            "memory": ("too large: ", "dim"),
            "error": ("error: ", "bold red"),
            "FAILED": ("FAILED: ", "bold red"),
        }[plain["status"]]
        return f"{shown}[{style}]{escape(word + plain['reason'])}[/]"
    cells = [_ms(plain["ms"].get(mode), spread=mode == "both") for mode in ("forward", "backward", "both", "no_grad")]
    cells.append("" if ours else times_ours(plain))
    if huge is None:
        cells += ["", ""]
    elif huge["status"] != "ok":
        cells += [huge["status"], ""]
    else:
        cells += [_ms(huge["ms"].get("both") or huge["ms"]["no_grad"], spread=True), "" if ours else times_ours(huge)]
    copies, speed = plain.get("copies"), plain.get("gb_per_s", {})
    cells.append(f"{copies['median']:.1f}" if copies else "")
    cells.append(f"{speed.get('both') or speed['no_grad']:.1f}" if speed else "")
    cells.append(in_bytes(plain.get("extra_bytes")))
    return _line(shown, cells)


def _disturbance(providers: dict[str, dict[str, Row]]) -> str:
    for settings in providers.values():
        for row in settings.values():
            noise = row.get("noise") or {}
            if noise.get("noisy"):
                shares = {"others": "others", "steal": "steal", "cores apart": "apart", "disturbed": "slow"}
                return "  * " + ", ".join(f"{name} {noise.get(key, 0.0):.0%}" for name, key in shares.items())
    return ""


def _ms(value: dict[str, float] | None, spread: bool = False) -> str:
    if value is None:
        return ""
    text = three_digits(value["median"])
    percent = 50 * (value["high"] - value["low"]) / value["median"]
    return f"{text} ±{min(percent, 999):.0f}%" if spread else text


def times_ours(row: Row) -> str:
    """Their time / ours, forward + backward where there is one: a number if it settled, else a range.

    The range has the quartiles of the rounds and the medians of all visits in it. Nothing if it was not measured.
    """
    ratio = row.get("ratio", {})
    value = ratio.get("both") or ratio.get("no_grad")
    if not value:
        return ""
    by_visit = row.get("by_visit", [])
    low, high = three_digits(min([value["low"], *by_visit])), three_digits(max([value["high"], *by_visit]))
    return f"{three_digits(value['median'])}x" if row["settled"] or low == high else f"{low}-{high}x"


def three_digits(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{digits}f}"


def in_bytes(value: float | None) -> str:
    if value is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


# Pictures

#: One colour for each provider or kind of provider, the same in every picture; readable for colour-blind people and in print.
COLOURS = {
    "ours": "#0072B2",
    "reference": "#56B4E9",
    "eager": "#D55E00",
    "compile": "#E69F00",
    "torch": "#009E73",
    "copy": "#555555",
    "F.linear_cross_entropy (chunked)": "#00573F",
    "kornia": "#8C564B",
    "monai": "#CC79A7",
    "pytorch-metric-learning": "#7F7F00",
    "segmentation-models-pytorch": "#9467BD",
    "timm": "#17A2B8",
    "liger-kernel": "#000000",
    "cut-cross-entropy": "#882255",
    "quack-kernels": "#999933",
    "peer": "#BBBBBB",
}


#: More bars than this are split into one picture for each shape.
BARS_MOST = 60


def plots(record: Record, folder: Path) -> list[Path]:
    """Write the pictures that the rows allow and return their files."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in _figures(record):
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=150)
        matplotlib.pyplot.close(figure)
    return written


def _figures(record: Record) -> Iterator[tuple[str, Any]]:
    usable = [row for row in record.rows if row["status"] == "ok"]
    sweep = [row for row in usable if row["shape"].startswith("classes-")]
    usable = [row for row in usable if not row["shape"].startswith("classes-")]
    faster = [row for row in usable if _against_ours(row)]
    memory = [
        row for row in usable if row.get("extra_bytes") is not None and row["allocator"] == "default" and row["kind"] != "copy"
    ]
    linear = [row for row in memory if row["shape"].startswith("linear")]
    memory = [row for row in memory if not row["shape"].startswith("linear")]
    for name, rows in _pages("speedup", faster):
        yield name, _speed_ups(record, rows)
    if sweep:
        yield "classes", _classes(record, sweep)
    for name, rows in _pages("memory", memory):
        yield name, _memory(record, rows, "Peak memory of a training step beyond input and gradient")
    for name, rows in _pages("linear", linear):
        yield name, _memory(record, rows, "Linear layer and loss: peak memory of a training step beyond inputs and gradients")


def _against_ours(row: Row) -> bool:
    """Whether the row says how much faster a fused backend is."""
    fused = row.get("against", "pylosses reference") != "pylosses reference"
    return fused and row["kind"] not in ("ours", "reference", "copy") and "both" in row.get("ratio", {})


def _pages(name: str, rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """All rows in one picture, or one for each shape when there are too many."""
    if len(rows) <= BARS_MOST:
        if rows:
            yield name, rows
        return
    for shape in dict.fromkeys(row["shape"] for row in rows):
        yield f"{name}-{shape}", [row for row in rows if row["shape"] == shape]


def colour(row: Row) -> str:
    """The colour of a provider: its own, or that of its kind."""
    return COLOURS.get(row["provider"], COLOURS[row["kind"]])


def label(row: Row) -> str:
    """Name of a provider in a legend."""
    if row["kind"] == "torch" and "chunked" not in row["provider"]:
        return "torch's own"
    return str(row["provider"])


def _bars(bars: list[tuple[Row, str]]) -> tuple[list[float], list[float], list[str]]:
    """Places of bars one below the other with a gap between configurations, and the ticks with their names."""
    places: list[float] = []
    groups: dict[str, list[float]] = {}
    for row, _ in bars:
        name = "\n".join(title_of(row).rsplit(", ", 1))
        if places:
            places.append(places[-1] + (1 if name in groups else 2))
        else:
            places.append(0)
        groups.setdefault(name, []).append(places[-1])
    return places, [sum(group) / len(group) for group in groups.values()], list(groups)


def _bar_axes(bars: list[tuple[Row, str]]) -> tuple[Any, Any, list[float]]:
    import matplotlib.pyplot as plt

    places, ticks, names = _bars(bars)
    figure, axes = plt.subplots(figsize=(10, max(3.0, 0.26 * places[-1] + 2.2)), layout="constrained")
    axes.set_yticks(ticks, names, fontsize=8)
    axes.set_ylim(places[-1] + 1, -1)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes, places


def _ordered(rows: list[Row]) -> list[tuple[Row, str]]:
    """(row, name in the legend): providers of a configuration together, both allocator settings next to each other."""
    found = []
    for _, providers in groups(rows):
        for settings in providers.values():
            for allocator, row in settings.items():
                found.append((row, label(row) + (", huge pages" if allocator == "huge pages" else "")))
    return found


def _finish(figure: Any, record: Record, title: str) -> Any:
    figure.suptitle(f"{title}\n{record.machine}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _speed_ups(record: Record, rows: list[Row]) -> Any:
    """Bars: how many times faster ours is, for each loss and shape, in both allocator settings."""
    from matplotlib.ticker import LogLocator, NullFormatter

    bars = _ordered(rows)
    figure, axes, places = _bar_axes(bars)
    seen = set()
    for place, (row, name) in zip(places, bars, strict=True):
        ratio = row["ratio"]["both"]
        median, low, high = ratio["median"], ratio["low"], ratio["high"]
        axes.barh(
            place,
            median - 1,
            left=1,
            height=0.85,
            color=colour(row),
            alpha=1.0 if row["allocator"] == "default" else 0.55,
            label=None if name in seen else name,
        )
        axes.plot([low, high], [place, place], color="#333333", linewidth=0.8)
        seen.add(name)
        axes.annotate(times_ours(row), (max(high, 1), place), (4, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(
        0.8 * min(1.0, *(row["ratio"]["both"]["low"] for row in rows)), 1.6 * max(row["ratio"]["both"]["high"] for row in rows)
    )
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("their time / ours, forward + backward (log scale; lines: quartiles of the rounds)")
    return _finish(figure, record, "How many times faster pylosses is")


def _classes(record: Record, rows: list[Row]) -> Any:
    """Curves: time against the number of classes, with the copy of the logits as the floor."""
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "both" in row["ms"] and row["allocator"] == "default" and not row["arguments"]]
    panels = list(dict.fromkeys((row["loss"], row["dtype"]) for row in rows))
    size = (5.6 * len(panels), 4.6)
    figure, grid = plt.subplots(1, len(panels), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for axes, (loss, dtype) in zip(grid[0], panels, strict=True):
        curves: dict[str, list[Row]] = {}
        for row in rows:
            if (row["loss"], row["dtype"]) == (loss, dtype):
                curves.setdefault("copy of the logits" if row["kind"] == "copy" else label(row), []).append(row)
        for name, points in curves.items():
            points.sort(key=lambda row: row["sizes"][1])
            x = [row["sizes"][1] for row in points]
            median, low, high = ([row["ms"]["both"][part] for row in points] for part in ("median", "low", "high"))
            style = "--" if points[0]["kind"] == "copy" else "o-"
            axes.plot(x, median, style, color=colour(points[0]), markersize=4, label=name)
            axes.fill_between(x, low, high, color=colour(points[0]), alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title(loss, fontsize=11)
        axes.set_xlabel(f"number of classes ({rows[0]['sizes'][0]} rows, {dtype})")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left")
    grid[0][0].set_ylabel("forward + backward, milliseconds")
    figure.suptitle(f"Time against the number of classes\n{record.machine}", fontsize=11)
    return figure


def _memory(record: Record, rows: list[Row], title: str) -> Any:
    """Bars: peak memory beyond inputs and gradients, in sizes of the logits."""
    bars = _ordered(rows)
    figure, axes, places = _bar_axes(bars)
    seen = set()
    largest = 1.0
    for place, (row, name) in zip(places, bars, strict=True):
        share = row["extra_bytes"] / _logit_bytes(row)
        largest = max(largest, share)
        axes.barh(place, share, height=0.85, color=colour(row), label=None if name in seen else name)
        seen.add(name)
        text = f"{share:.2f} ({in_bytes(row['extra_bytes'])})"
        axes.annotate(text, (share, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_xlim(0, 1.18 * largest)
    axes.set_xlabel("in sizes of the logits tensor")
    return _finish(figure, record, title)


def _logit_bytes(row: Row) -> float:
    shape = Shape(row["shape"], tuple(row["sizes"]), row["shape_kind"])
    return shape.logits * {"float64": 8, "float32": 4}.get(row["dtype"], 2)
