"""Does feature contrastive learning keep accuracy under noise without losing a rare pattern that matters?

Synthetic digits: a small digit in a corner means nothing beside a centre of 5 to 9, and makes a centre of 0 to 4 one of five
rare classes. A model that is robust to everything misses the corner.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import pylosses

from . import pictures
from .data import Data
from .models import LeNet
from .study import Measures, Part, Results, Study, table
from .study import mean_and_spread as cell
from .training import accuracy, batches, logits

#: name -> size of the noise that is added to the images, reduction of the loss, weight of the contrastive part
VARIANTS: dict[str, tuple[float, str, float]] = {
    "CE": (0.0, "mean", 0.0),
    "CE, noise added": (0.5, "mean", 0.0),
    "FCL, mean, 0.001": (0.0, "mean", 1e-3),
    "FCL, sum, 0.001": (0.0, "sum", 1e-3),
}
PUBLISHED = {"CE": (92.50, 41.23, 54.73), "FCL": (92.07, 63.84, 68.96)}
TESTS = ("BAL", "BAL+UN", "BAL+NUN")
CLASSES, CORNER = 15, 10

SETTINGS = {
    "common": 800, "rare": 50, "tests": 100, "epochs": 8, "batch": 128, "rate": 0.01, "decay": 0.89,
    "k": 256, "sigma": 0.5, "temperature": 0.1,
}  # fmt: skip


class Split(NamedTuple):
    x: Tensor
    y: Tensor


def with_corner(x: Tensor, small: Tensor, generator: torch.Generator) -> Tensor:
    """Images with a small digit each, in a corner of its own."""
    small = torch.nn.functional.interpolate(small, size=CORNER, mode="bilinear", antialias=True)
    where = torch.randint(0, 4, (len(x),), generator=generator)
    x = x.clone()
    for corner in range(4):
        here = where == corner
        h = slice(0, CORNER) if corner < 2 else slice(-CORNER, None)
        w = slice(0, CORNER) if corner % 2 == 0 else slice(-CORNER, None)
        x[here, :, h, w] = torch.maximum(x[here][:, :, h, w], small[here])
    return x


def synthetic(x: Tensor, y: Tensor, counts: list[int], seed: int) -> Split:
    """`counts[c]` images of each of the 15 classes, drawn with replacement where there are too few."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = [], []
    for c, count in enumerate(counts):
        those = x[y == (c if c < 10 else c - 10)]
        chosen = those[torch.randint(0, len(those), (count,), generator=generator)]
        corner = x[torch.randint(0, len(x), (count,), generator=generator)]
        marked = torch.rand(count, generator=generator) < (1.0 if c >= 10 else 0.5 if c >= 5 else 0.0)
        images.append(torch.where(marked[:, None, None, None], with_corner(chosen, corner, generator), chosen))
        labels.append(torch.full((count,), c))
    return Split(torch.cat(images), torch.cat(labels))


def noisy(x: Tensor, likely: Tensor, seed: int) -> Tensor:
    """15 % of the pixels replaced by a grey level, at places drawn by `likely` (pixels)."""
    generator = torch.Generator().manual_seed(seed)
    pixels = likely.numel()
    # the largest keys of -log(u) / weight, smallest first, are a draw without replacement
    keys = -torch.rand(len(x), pixels, generator=generator).log() / likely.flatten()
    hit = torch.zeros(len(x), pixels, dtype=torch.bool)
    hit.scatter_(1, keys.argsort(dim=1)[:, : round(0.15 * pixels)], True)
    grey = torch.rand(len(x), pixels, generator=generator)
    return torch.where(hit, grey, x.flatten(1)).reshape(x.shape)


@cache
def splits(data: Data, common: int, rare: int, tests: int) -> tuple[Split, Split, dict[str, Split]]:
    """Training, validation and the three tests; validation images are not among the training ones, nor test digits."""
    learn, test = data.grey("mnist")
    held_out = len(learn.x) // 6
    training = synthetic(learn.x[:-held_out], learn.y[:-held_out], [common] * 10 + [rare] * 5, seed=1)
    validation = synthetic(learn.x[-held_out:], learn.y[-held_out:], [tests] * CLASSES, seed=2)
    balanced = synthetic(test.x, test.y, [tests] * CLASSES, seed=3)
    spread = training.x.std(dim=0).clamp(min=0.01)
    found = {"BAL": balanced}
    found["BAL+UN"] = Split(noisy(balanced.x, torch.ones_like(spread), 4), balanced.y)
    found["BAL+NUN"] = Split(noisy(balanced.x, 1 / spread, 5), balanced.y)
    return training, validation, found


def measure(part: Part) -> Measures:
    s = part.settings
    noise, reduction, weight = VARIANTS[part.variant]
    training, validation, tests = splits(part.data, s["common"], s["rare"], s["tests"])
    model = LeNet(CLASSES, channels=(16, 32), hidden=64)
    steps = -(-len(training.x) // s["batch"])
    generator = torch.Generator().manual_seed(part.seed)
    fcl = pylosses.fcl.FeatureContrastive(
        model, model.embed, k=s["k"], sigma=s["sigma"], temperature=s["temperature"], weight=weight,
        warmup=(2 * steps, 2 * steps), reduction=reduction, generator=generator,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=s["rate"], fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, s["decay"])
    for epoch in range(s["epochs"]):
        for rows in batches(len(training.x), s["batch"], generator):
            x = training.x[rows]
            if noise:
                x = x + noise * torch.randn(x.shape, generator=generator)
            optimizer.zero_grad()
            fcl.step(x, training.y[rows])[0].backward()
            optimizer.step()
        schedule.step()
        part.progress((epoch + 1) / s["epochs"])
    rare = validation.y >= 10
    found: Measures = {"validation": accuracy(logits(model, validation.x), validation.y)}
    found["validation, rare"] = accuracy(logits(model, validation.x[rare]), validation.y[rare])
    found["tests"] = {name: accuracy(logits(model, split.x), split.y) for name, split in tests.items()}
    found["sensitivity"], utility = sensitivity(model, tests["BAL"], s)
    if part.seed == 0:  # one is enough for the picture
        found["maps"] = maps(utility, tests["BAL"].y)
    return found


def sensitivity(model: LeNet, split: Split, s: dict) -> tuple[dict[str, float], Tensor]:
    """How far the features move, in units of their own length, by noise on the most and the least useful pixels."""
    model.eval()
    x = split.x.clone().requires_grad_()
    loss = pylosses.cross_entropy(model(x), split.y, reduction="sum")
    utility = torch.autograd.grad(loss, x)[0].abs()
    high, low = pylosses.utility_perturbation(utility, s["k"], s["sigma"], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        length = model.embed(split.x).norm(dim=1).clamp(min=1e-6)
    move = {
        name: (pylosses.fcl.sensitivity(model.embed, split.x, noise) / length).mean().item()
        for name, noise in (("useful", high), ("useless", low))
    }
    return move, utility


def maps(utility: Tensor, y: Tensor) -> list[str]:
    """Mean utility of the pixels for each class, each map's largest at 255, as hexadecimal bytes."""
    means = torch.stack([utility[y == c].mean(dim=0).flatten() for c in range(CLASSES)])
    return [bytes((255 * m / m.max().clamp(min=1e-30)).byte().tolist()).hex() for m in means]


def chosen(results: Results) -> str | None:
    """The FCL variant that the validation set prefers."""
    names = [n for n in results.variants(list(VARIANTS)) if n.startswith("FCL")]
    return max(names, key=lambda n: sum(results.values(n, "validation"))) if names else None


def report(results: Results) -> str:
    best, rows = chosen(results), []
    for n in results.variants(list(VARIANTS)):
        published = PUBLISHED.get("FCL" if n == best else n) if results.of("MNIST") else None
        tests = [results.cell(n, "tests", t) + (f" ({published[i]})" if published else "") for i, t in enumerate(TESTS)]
        useful, useless = (results.values(n, "sensitivity", which) for which in ("useful", "useless"))
        ratio = [a / b for a, b in zip(useful, useless, strict=True)]
        rows.append([n, results.cell(n, "validation"), *tests, cell(useful), cell(useless), cell(ratio)])
    head = ["loss, its reduction, weight", "validation", *TESTS, "moved by useful pixels", "by useless ones", "ratio"]
    s = results.settings
    return table(head, rows) + (
        f"\nAccuracy in percent, mean ± standard deviation over the seeds; in brackets the source's (ten runs). The validation "
        f"set, clean and balanced, prefers **{best}**; the source does not say whether its loss is a mean or a sum, which "
        "decides what its weight of 0.001 means. Moved: mean length of the change of the features by noise on the "
        f"{s['k']} most or least useful pixels, in units of the features' length.\n\nThe source has about 5000 images of each "
        f"common class and 50 of each rare one, and 20 epochs; here {s['common']}, {s['rare']} and {s['epochs']} epochs, "
        f"{s['tests']} test images a class. Corner digits are {CORNER} pixels wide; half of the centres 5 to 9 have one.\n"
    )


def picture(results: Results, path: Path) -> None:
    names, best = results.variants(list(VARIANTS)), chosen(results)
    figure, axes = pictures.panels(5 + 10, width=2.0, height=2.1, columns=5)
    for axis in axes[3:5]:
        axis.axis("off")
    for i, test in enumerate(TESTS):
        marks = []
        for n in names:
            row = PUBLISHED.get("FCL" if n == best else n) if results.of("MNIST") else None
            marks.append(row[i] if row else None)
        values = [results.values(n, "tests", test) for n in names]
        pictures.bars(axes[i], f"{test}, %", names if i == 0 else [""] * len(names), values, marks)
    stored = {p["variant"]: p["measures"]["maps"] for p in results.parts if "maps" in p["measures"]}
    place = iter(axes[5:])
    for n in ("CE", best):
        for c in (0, 3, 7, 10, 13):
            axis = next(place)
            axis.axis("off")
            if n in stored:
                side = torch.frombuffer(bytearray.fromhex(stored[n][c]), dtype=torch.uint8).reshape(28, 28)
                axis.imshow(side.numpy(), cmap="magma")
                axis.set_title(f"{n.partition(',')[0]}, class {c}", fontsize=8)
    pictures.save(figure, path, "Maps: mean utility of the pixels over the test images of a class (10 and 13 need the corner).")


STUDY = Study(
    name="feature_contrastive",
    question="Feature contrastive learning on synthetic digits: noise against a rare pattern",
    variants=list(VARIANTS),
    settings=SETTINGS,
    quick={"common": 60, "rare": 20, "tests": 10, "epochs": 5},
    measure=measure,
    report=report,
    picture=picture,
)

if __name__ == "__main__":
    STUDY.main()
