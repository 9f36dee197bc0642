"""Pictures of results: plain bars and lines, with nothing that needs a legend where a label does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110})

MEASURED, PUBLISHED = "#2b6cb0", "#c05621"


def panels(count: int, width: float = 3.4, height: float = 3.2, columns: int | None = None) -> tuple[Any, list[Any]]:
    columns = columns or count
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    flat = [axis for row in axes for axis in row]
    for axis in flat[count:]:
        axis.axis("off")
    return figure, flat[:count]


def bars(
    axis: Any, title: str, names: Sequence[str], values: Sequence[Sequence[float]], published: Sequence[float | None] = ()
) -> None:
    """One horizontal bar a name: the mean over the seeds, a dot for each seed, a diamond for the published number."""
    means = [sum(v) / len(v) for v in values]
    places = list(range(len(names)))[::-1]
    axis.barh(places, means, color=MEASURED, alpha=0.35, height=0.7)
    for place, seeds in zip(places, values, strict=True):
        axis.plot(seeds, [place] * len(seeds), "o", color=MEASURED, markersize=3)
    marked = [(value, place) for value, place in zip(published, places, strict=False) if value is not None]
    if marked:
        axis.plot(*zip(*marked, strict=True), "D", color=PUBLISHED, markersize=5, label="published")
        axis.legend(loc="upper right", bbox_to_anchor=(1, -0.06), frameon=False, fontsize=7)
    everything = [x for v in values for x in v] + [value for value, _ in marked]
    low, high = min(everything), max(everything)
    pad = 0.08 * (high - low) or 1.0
    axis.set_xlim(max(0, low - 2 * pad) if low >= 0 else low - 2 * pad, high + pad)
    axis.set_yticks(places, names)
    axis.set_title(title, fontsize=9)


def save(figure: Any, path: Path, caption: str = "") -> None:
    if caption:
        figure.text(0.01, -0.02, caption, fontsize=7, va="top")
    figure.tight_layout()
    figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
