"""Which loss learns rare classes, and still knows what it has not learnt?

Classes with geometrically falling counts (n, n f, n f^2, ...), a balanced test set, class counts given to the losses that take
them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import pylosses

from . import outliers, pictures
from .data import Data
from .models import LeNet
from .study import Measures, Part, Results, Study, table
from .study import mean_and_spread as cell
from .training import Loss, accuracy, logits, train

LOSSES: dict[str, Callable[[Tensor], Loss]] = {
    "CE": lambda counts: pylosses.CrossEntropyLoss(),
    "LogitNorm": lambda counts: pylosses.LogitNormLoss(),
    "LA": lambda counts: pylosses.LogitAdjustedLoss(class_counts=counts),
    "Dice": lambda counts: pylosses.DiceLoss(),
    "MM": lambda counts: pylosses.MultiMarginLoss(margin=1.0),
    "HEM-": lambda counts: pylosses.HEMLoss.from_class_counts(counts, shared=True),
    "HEM": lambda counts: pylosses.HEMLoss.from_class_counts(counts),
    "HEM (label)": lambda counts: pylosses.HEMLoss.from_class_counts(counts, margin_index="label"),
}
SETS = {"MNIST": "mnist", "Fashion-MNIST": "fashion-mnist"}
RATIOS = (100, 10)

#: CIFAR10-LT, ratio 100, ResNet32: accuracy and AUROC
PUBLISHED = {"CE": (70.65, 80.89), "LA": (78.44, 83.25), "HEM-": (70.73, 84.95), "HEM": (73.19, 87.57)}

SETTINGS = {"largest": 1000, "epochs": 10, "batch": 64, "rate": 1e-3, "unknown": 1000}


def long_tailed(y: Tensor, largest: int, ratio: float, seed: int) -> Tensor:
    """Indices of a training set whose first class has `largest` images and whose last has `ratio` times fewer."""
    classes = int(y.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for c in range(classes):
        count = round(largest * ratio ** (-c / (classes - 1)))
        those = (y == c).nonzero()[:, 0]
        rows.append(those[torch.randperm(len(those), generator=generator)[:count]])
    return torch.cat(rows)


@cache
def unknown_sets(data: Data, name: str, count: int) -> dict[str, Tensor]:
    sets = outliers.synthetic(data.grey(name)[1].x[:count], seed=0)
    if not data.quick:
        other = "fashion-mnist" if name == "mnist" else "mnist"
        sets[other] = data.grey(other)[1].x[:count]
        sets["notmnist"] = data.grey("notmnist")[1].x[:count]
    return sets


def measure(part: Part) -> Measures:
    s = part.settings
    title, ratio, loss_name = part.variant.split(", ")
    learn, test = part.data.grey(SETS[title])
    rows = long_tailed(learn.y, s["largest"], float(ratio), part.seed)
    x, y = learn.x[rows], learn.y[rows]
    model = LeNet()
    loss = LOSSES[loss_name](y.bincount())
    train(model, loss, x, y, epochs=s["epochs"], batch=s["batch"], rate=s["rate"], seed=part.seed, progress=part.progress)
    found = logits(model, test.x)
    known = pylosses.confidence_scores(found).msp
    auroc = {
        name: 100 * pylosses.auroc(known, pylosses.confidence_scores(logits(model, others)).msp).item()
        for name, others in unknown_sets(part.data, SETS[title], s["unknown"]).items()
    }
    each = [accuracy(found[test.y == c], test.y[test.y == c]) for c in range(10)]
    return {"accuracy": accuracy(found, test.y), "classes": each, "auroc": auroc, "images": len(y)}


def thirds(results: Results, variant: str, first: int, last: int) -> list[float]:
    return [statistics.fmean(each[first:last]) for each in results.values(variant, "classes")]  # type: ignore[index]


def auroc(results: Results, variant: str) -> list[float]:
    return [statistics.fmean(sets.values()) for sets in results.values(variant, "auroc")]  # type: ignore[attr-defined]


def report(results: Results) -> str:
    text = ""
    for title in SETS:
        for ratio in RATIOS:
            names = [n for n in results.variants(STUDY.variants) if n.startswith(f"{title}, {ratio}, ")]
            rows = []
            for n in names:
                loss = n.split(", ")[2]
                there = PUBLISHED.get(loss) if ratio == 100 and results.of("MNIST") else None
                first, second = (f" ({p})" for p in there) if there else ("", "")
                groups = (cell(thirds(results, n, a, b), 1) for a, b in ((0, 3), (3, 7), (7, 10)))
                rows.append([loss, results.cell(n, "accuracy") + first, *groups, cell(auroc(results, n)) + second])
            if names:
                text += f"{title}, the commonest class {ratio} times as common as the rarest:\n\n"
                head = ["loss", "accuracy", "3 common classes", "4 middle", "3 rare", "AUROC of known against unknown (MSP)"]
                text += table(head, rows) + "\n"
    s = results.settings
    return text + (
        "Percent, mean ± standard deviation over the seeds. In brackets what the source publishes for CIFAR10-LT at ratio 100 "
        "with a ResNet32: another set and another network, for the order alone.\n\nHere a LeNet, "
        f"{s['largest']} images of the commonest class, {s['epochs']} epochs of Adam at 1e-3 for every loss. Unknown are four "
        "made sets and two real ones. HEM's margins belong to the competing class, as its equation has it; in the row (label) "
        "to the label's class.\n"
    )


def picture(results: Results, path: Path) -> None:
    groups = [(title, ratio) for title in SETS for ratio in RATIOS]
    figure, axes = pictures.panels(8, width=3.0, height=2.6, columns=4)
    for i, (title, ratio) in enumerate(groups):
        names = [n for n in results.variants(STUDY.variants) if n.startswith(f"{title}, {ratio}, ")]
        if not names:
            for axis in (axes[i], axes[4 + i]):
                axis.axis("off")
            continue
        labels = [n.split(", ")[2] for n in names]
        pictures.bars(axes[i], f"{title}, {ratio}: accuracy, %", labels, [results.values(n, "accuracy") for n in names])
        pictures.bars(axes[4 + i], f"{title}, {ratio}: AUROC, %", labels, [auroc(results, n) for n in names])
    pictures.save(figure, path)


STUDY = Study(
    name="long_tail",
    question="Long tails: rare classes and unknown ones",
    variants=[f"{title}, {ratio}, {loss}" for ratio in RATIOS for title in SETS for loss in LOSSES],
    settings=SETTINGS,
    quick={"largest": 100, "epochs": 5, "unknown": 50},
    measure=measure,
    report=report,
    picture=picture,
)

if __name__ == "__main__":
    STUDY.main()
