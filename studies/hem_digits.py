"""Does the high error margin loss reject unknown classes and survive attacks, and what does it pay in accuracy?

MNIST and a LeNet as the source has them (16 channels twice, 50 hidden units, Adam at 1e-3, batch 128, the same settings for
every loss); fewer epochs and images, see SETTINGS and `report`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import pylosses

from . import attacks, corruptions, outliers, pictures
from .data import Data, Images
from .models import LeNet
from .study import Measures, Part, Results, Study, table
from .study import mean_and_spread as cell
from .training import Loss, accuracy, logits, train

#: name -> from class counts to the loss; HEM- has one margin for all classes, HEM one for each
LOSSES: dict[str, Callable[[Tensor], Loss]] = {
    "CE": lambda counts: pylosses.CrossEntropyLoss(),
    "LogitNorm": lambda counts: pylosses.LogitNormLoss(),
    "Dice": lambda counts: pylosses.DiceLoss(),
    "MM": lambda counts: pylosses.MultiMarginLoss(margin=1.0),
    "MM, HEM's margin": lambda counts: pylosses.MultiMarginLoss(margin=pylosses.hem_margins(counts, shared=True)),
    "HEM-": lambda counts: pylosses.HEMLoss.from_class_counts(counts, shared=True),
    "HEM": lambda counts: pylosses.HEMLoss.from_class_counts(counts),
    "MM +maz": lambda counts: pylosses.HEMLoss.from_class_counts(counts, shared=True, threshold=False),
    "MM +thres": lambda counts: pylosses.HEMLoss.from_class_counts(counts, shared=True, above_zero=False, reduction="mean"),
    "HEM-, power 1/2": lambda counts: pylosses.HEMLoss.from_class_counts(counts, shared=True, power=0.5),
    "Focal": lambda counts: pylosses.FocalLoss(),
}

#: accuracy, on corruptions, AUROC (MSP), DAR, of MNIST with LeNet
PUBLISHED = {
    "CE": (99.02, 88.33, 97.69, 40.04),
    "LogitNorm": (98.88, 81.85, 97.56, 72.33),
    "Dice": (98.83, 88.15, 95.70, 53.61),
    "MM": (99.07, 87.93, 97.91, 41.14),
    "HEM-": (99.03, 84.57, 98.67, 75.66),
}

SCORES = ("msp", "mls", "energy", "gen")

SETTINGS = {
    "epochs": 5, "batch": 128, "rate": 1e-3, "corrupted": 2000, "unknown": 2000,
    "attacked": 300, "attack_steps": 40, "linf": 0.3, "l2": 2.0,
}  # fmt: skip


@cache
def tests(data: Data, corrupted: int, unknown: int) -> tuple[Images, dict[str, Tensor], dict[str, Tensor]]:
    """Test images, their corruptions, and the unknown sets: the same for every part."""
    _, test = data.grey("mnist")
    unknown_sets = outliers.synthetic(test.x[:unknown], seed=0)
    if not data.quick:
        unknown_sets["Fashion-MNIST"] = data.grey("fashion-mnist")[1].x[:unknown]
        unknown_sets["notMNIST"] = data.grey("notmnist")[1].x[:unknown]
        colour = data.colour()[1].x[:unknown].mean(dim=1, keepdim=True)
        unknown_sets[f"{data.used[-1]}, grey"] = torch.nn.functional.interpolate(colour, size=28, mode="bilinear")
    return test, corruptions.corrupted(test.x[:corrupted], seed=0), unknown_sets


def measure(part: Part) -> Measures:
    s = part.settings
    learn, _ = part.data.grey("mnist")
    test, corrupted, unknown = tests(part.data, s["corrupted"], s["unknown"])
    model = LeNet()
    loss = LOSSES[part.variant](learn.y.bincount())
    train(
        model, loss, learn.x, learn.y, epochs=s["epochs"], batch=s["batch"], rate=s["rate"], seed=part.seed,
        progress=lambda done: part.progress(0.7 * done),
    )  # fmt: skip
    clean = logits(model, test.x)
    known = pylosses.confidence_scores(clean)
    auroc: dict[str, dict[str, float]] = {score: {} for score in SCORES}
    fpr95: dict[str, dict[str, float]] = {score: {} for score in SCORES}
    for name, x in unknown.items():
        others = pylosses.confidence_scores(logits(model, x))
        for score in SCORES:
            inside, outside = getattr(known, score), getattr(others, score)
            auroc[score][name] = 100 * pylosses.auroc(inside, outside).item()
            fpr95[score][name] = 100 * (outside >= inside.quantile(0.05)).double().mean().item()
    right = known.prediction == test.y
    attacked = test.first(s["attacked"])
    dar: dict[str, dict[str, float]] = {score: {} for score in SCORES}
    robust = {}
    for i, norm in enumerate(("linf", "l2")):
        x = attacks.pgd(model, attacked.x, attacked.y, norm=norm, radius=s[norm], steps=s["attack_steps"], seed=part.seed)
        result = pylosses.confidence_scores(logits(model, x))
        still = result.prediction == attacked.y
        robust[norm] = 100 * still.double().mean().item()
        for score in SCORES:
            value = pylosses.dar(getattr(known, score), right, getattr(result, score), still)
            dar[score][norm] = 100 * value.item()
        part.progress(0.7 + 0.15 * (i + 1))
    return {
        "accuracy": accuracy(clean, test.y),
        "corrupted": {kind: accuracy(logits(model, x), test.y[: len(x)]) for kind, x in corrupted.items()},
        "auroc": auroc,
        "fpr95": fpr95,
        "dar": dar,
        "accuracy under attack": robust,
    }


def _mean(results: Results, variant: str, *path: str) -> list[float]:
    """Of each seed: the mean over sets, corruptions or attacks."""
    return [statistics.fmean(value.values()) for value in results.values(variant, *path)]  # type: ignore[attr-defined]


def _published(results: Results) -> dict[str, tuple[float, ...]]:
    return PUBLISHED if results.of("MNIST") else {}


def report(results: Results) -> str:
    names = results.variants(list(LOSSES))
    rows = []
    for name in names:
        published = _published(results).get(name, (None,) * 4)
        ours = (
            results.values(name, "accuracy"),
            _mean(results, name, "corrupted"),
            _mean(results, name, "auroc", "msp"),
            _mean(results, name, "dar", "msp"),
        )
        rows.append([name] + [f"{cell(v)} ({p})" if p else cell(v) for v, p in zip(ours, published, strict=True)])
    text = table(["loss", "accuracy", "corrupted", "AUROC of known against unknown (MSP)", "DAR (MSP)"], rows)
    text += "\nPercent, mean ± standard deviation over the seeds; in brackets what the source publishes.\n\n"
    rows = [
        [n] + [cell(_mean(results, n, "auroc", s)) + " / " + cell(_mean(results, n, "fpr95", s)) for s in SCORES] for n in names
    ]
    text += table(["AUROC / FPR at 95 % TPR", *SCORES], rows) + "\n"
    sets = list(results.values(names[0], "auroc", "msp")[0])  # type: ignore[call-overload]
    text += table(["AUROC (MSP)", *sets], [[n] + [results.cell(n, "auroc", "msp", s) for s in sets] for n in names]) + "\n"
    rows = []
    for n in names:
        dar = [results.cell(n, "dar", score, norm) for norm in ("linf", "l2") for score in ("msp", "mls")]
        rows.append([n, *dar, *(results.cell(n, "accuracy under attack", norm) for norm in ("linf", "l2"))])
    text += table(["DAR", "l_inf, MSP", "l_inf, MLS", "l_2, MSP", "l_2, MLS", "right under l_inf", "right under l_2"], rows)
    s = results.settings
    return text + (
        f"\nThe source trains 20 epochs and measures five repeats; here {s['epochs']} epochs. Its corruptions are 15 kinds, "
        f"here 13 (MNIST-C's severities, {s['corrupted']} images each). Its unknown sets are 10,000 images each, here "
        f"{s['unknown']}, and not the same real ones. Its attack is AutoAttack, here PGD of {s['attack_steps']} steps on "
        f"{s['attacked']} images, which is weaker: DAR is the mean over l_inf and l_2. MM has margin 1 as in the source; the "
        "margin of HEM- follows from the class counts (0.183).\n"
    )


def picture(results: Results, path: Path) -> None:
    names = results.variants(list(LOSSES))
    shown = (
        ("accuracy, %", lambda n: results.values(n, "accuracy")),
        ("accuracy on corruptions, %", lambda n: _mean(results, n, "corrupted")),
        ("AUROC, known against unknown (MSP), %", lambda n: _mean(results, n, "auroc", "msp")),
        ("DAR under PGD (MSP), %", lambda n: _mean(results, n, "dar", "msp")),
    )
    figure, axes = pictures.panels(4, width=3.6)
    for i, (axis, (title, values)) in enumerate(zip(axes, shown, strict=True)):
        published = [_published(results).get(n, (None,) * 4)[i] for n in names]
        pictures.bars(axis, title, names if i == 0 else [""] * len(names), [values(n) for n in names], published)
    pictures.save(figure, path)


STUDY = Study(
    name="hem_digits",
    question="HEM on digits: accuracy, corruption, unknown classes, attacks",
    variants=list(LOSSES),
    settings=SETTINGS,
    quick={"epochs": 6, "corrupted": 100, "unknown": 100, "attacked": 20, "attack_steps": 5},
    measure=measure,
    report=report,
    picture=picture,
    seeds=5,
)

if __name__ == "__main__":
    STUDY.main()
