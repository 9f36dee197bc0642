"""Which loss adapts a network to corrupted images, by which loop, and which rate does it bear?

A BatchNorm and a GroupNorm network trained on clean images of Fashion-MNIST meet the 13 corruptions, each from the source's
weights: in batches of 64; one by one; as an imbalanced stream; and at rates over four decades.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pylosses import adapt

from . import corruptions, pictures
from .data import Data
from .models import NormNet
from .study import Measures, Part, Results, Study, table
from .study import mean_and_spread as cell
from .training import accuracy, logits, train

NETWORKS = {"BatchNorm": "batch", "GroupNorm": "group"}

#: of the source for CIFAR: SGD with momentum 0.9; under SAM the outer rate
RATE, SAM_RATE = 0.01, 0.1


def sgd(rate: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)


#: name -> from a model and clean images to the model that is asked
METHODS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "none": lambda model, clean: model.eval(),
    "batch statistics": lambda model, clean: adapt.configure(model),
    "TENT": lambda model, clean: adapt.tent(model, optimizer=sgd(RATE)),
    "EATA": lambda model, clean: adapt.eata(model, optimizer=sgd(RATE), clean=clean.split(64)),
    "SAR": lambda model, clean: adapt.sar(model, optimizer=sgd(SAM_RATE)),
    "sparse-CL": lambda model, clean: adapt.tent(model, loss="sparse_cl", optimizer=sgd(RATE)),
    "L_final": lambda model, clean: adapt.tent(model, loss="tta", optimizer=sgd(RATE)),
    "SAR + L_final": lambda model, clean: adapt.sar(model, loss="tta", optimizer=sgd(SAM_RATE)),
}
RATES = (0.001, 0.01, 0.1, 1.0, 5.0)

#: CIFAR-10-C, severity 5, batch 200, a larger network
PUBLISHED = {"TENT": 79.8, "SAR": 81.0, "L_final": 82.8, "SAR + L_final": 82.5}

#: of the 13, for the streams that cost more
FOUR = ("gaussian noise", "defocus blur", "fog", "contrast")

SETTINGS = {
    "train_images": 20000, "epochs": 5, "rate": 1e-3, "images": 1000, "batch": 64, "single_images": 150, "ratio": 50,
}  # fmt: skip


@cache
def trained(data: Data, norm: str, seed: int, images: int, epochs: int, rate: float) -> nn.Module:
    learn, _ = data.grey("fashion-mnist")
    torch.manual_seed(seed)
    model = NormNet(norm)
    train(model, nn.CrossEntropyLoss(), learn.x[:images], learn.y[:images], epochs=epochs, batch=128, rate=rate, seed=seed)
    # torch 2.13 crashes in GroupNorm's backward for channels_last inputs that need no gradient
    return model.eval().to(memory_format=torch.contiguous_format)


@cache
def corrupted(data: Data, images: int) -> dict[str, Tensor]:
    _, test = data.grey("fashion-mnist")
    scaled = dict(corruptions.CIFAR_C, elastic=(28 * 0.1, 28 * 0.03, 28 * 0.03))  # lengths in pixels of the side
    return corruptions.corrupted(test.x[:images], seed=0, strengths=scaled)


def online(model: nn.Module, x: Tensor, y: Tensor, batch: int) -> float:
    """Accuracy of the predictions that are made on the way."""
    with torch.no_grad():
        return accuracy(torch.cat([model(part) for part in x.split(batch)]), y)


def imbalanced(y: Tensor, ratio: float, seed: int) -> Tensor:
    """Order of a stream in which one class after the other is `ratio` times likelier than each other one."""
    generator = torch.Generator().manual_seed(seed)
    classes = int(y.max()) + 1
    rows = []
    for favoured in torch.randperm(classes, generator=generator):
        likely = torch.ones(classes)
        likely[favoured] = ratio
        likely = likely[y] / y.bincount(minlength=classes)[y]
        rows.append(torch.multinomial(likely, len(y) // classes, replacement=True, generator=generator))
    return torch.cat(rows)


def measure(part: Part) -> Measures:
    s = part.settings
    network, _, method = part.variant.partition(": ")
    learn, test = part.data.grey("fashion-mnist")
    source = trained(part.data, NETWORKS[network], part.seed, s["train_images"], s["epochs"], s["rate"])
    sets = corrupted(part.data, s["images"])
    y = test.y[: s["images"]]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(part.seed))
    clean = learn.x[-500:]
    if method == "rates":
        return {"rates": rates(source, sets, y, order, s, part)}

    def fresh() -> nn.Module:
        return METHODS[method](copy.deepcopy(source), clean)

    single = order[: s["single_images"]]
    stream = imbalanced(y, s["ratio"], part.seed)
    result: dict[str, Any] = {"clean": accuracy(logits(source, test.x[: s["images"]]), y)}
    result["batches"] = {kind: online(fresh(), x[order], y[order], s["batch"]) for kind, x in sets.items()}
    part.progress(0.5)
    result["one by one"] = {kind: online(fresh(), sets[kind][single], y[single], 1) for kind in FOUR}
    part.progress(0.8)
    result["imbalanced"] = {kind: online(fresh(), sets[kind][stream], y[stream], s["batch"]) for kind in FOUR}
    return result


def rates(source: nn.Module, sets: dict[str, Tensor], y: Tensor, order: Tensor, s: dict[str, Any], part: Part) -> Measures:
    """Mean accuracy over four corruptions: the rates of L_final without a skip and with the source's, and of TENT."""
    losses: dict[str, dict[str, Any]] = {"TENT": {}, "L_final, skip 0": {"loss": "tta", "skip": 0}}
    losses["L_final, skip 5"] = {"loss": "tta", "skip": 5}
    found: Measures = {}
    for i, (name, arguments) in enumerate(losses.items()):
        found[name] = {}
        for rate in RATES:
            values = []
            for kind in FOUR:
                model = adapt.tent(copy.deepcopy(source), optimizer=sgd(rate), **arguments)
                values.append(online(model, sets[kind][order], y[order], s["batch"]))
            found[name][str(rate)] = statistics.fmean(values)
        part.progress((i + 1) / len(losses))
    return found


def _mean(results: Results, variant: str, stream: str) -> list[float]:
    return [statistics.fmean(value.values()) for value in results.values(variant, stream)]  # type: ignore[attr-defined]


def _methods(results: Results) -> list[str]:
    return [n for n in results.variants(STUDY.variants) if not n.endswith(": rates")]


def report(results: Results) -> str:
    names, s = _methods(results), results.settings
    published = PUBLISHED if results.of("Fashion-MNIST") else {}
    rows = []
    for n in names:
        there = published.get(n.partition(": ")[2])
        first = cell(_mean(results, n, "batches")) + (f" ({there})" if there and n.startswith("BatchNorm") else "")
        rows.append([n, first, cell(_mean(results, n, "one by one")), cell(_mean(results, n, "imbalanced"))])
    head = ["network: method", f"13 corruptions, batches of {s['batch']}", "4 corruptions, one by one", "4, imbalanced stream"]
    text = table(head, rows) + "\n"
    kinds = list(results.values(names[0], "batches")[0])  # type: ignore[call-overload]
    text += table(["batches", *kinds], [[n, *(results.cell(n, "batches", k, digits=1) for k in kinds)] for n in names]) + "\n"
    for n in results.variants(STUDY.variants):
        if n.endswith(": rates"):
            losses = list(results.values(n, "rates")[0])  # type: ignore[call-overload]
            rows = [[loss, *(results.cell(n, "rates", loss, str(r), digits=1) for r in RATES)] for loss in losses]
            text += table([n.replace("rates", "rate of SGD"), *map(str, RATES)], rows) + "\n"
    clean = "; ".join(
        f"{network} {results.cell(f'{network}: none', 'clean')}" for network in NETWORKS if f"{network}: none" in names
    )
    return text + (
        f"Accuracy in percent, mean ± standard deviation over the seeds. Clean images: {clean}. In brackets the source's "
        "numbers for CIFAR-10-C in batches of 200.\n\nHere Fashion-MNIST and a network of four convolutions, "
        f"{s['images']} test images of each corruption at CIFAR-10-C's severity 5 (elastic scaled to 28 pixels); snow and "
        "frost, the source's failure cases, need photographs and are left out. Rates are the source's for CIFAR, 0.01, and "
        f"0.1 under SAM (its radius is 0.05); nothing is tuned. One by one: {s['single_images']} images. Imbalanced: one class "
        f"after the other, each {s['ratio']} times likelier than any other while its turn lasts. With ten classes skip 5 "
        "leaves four of the five negatives.\n"
    )


def picture(results: Results, path: Path) -> None:
    names = _methods(results)
    figure, axes = pictures.panels(5, width=3.2, height=3.6, columns=5)
    for i, stream in enumerate(("batches", "one by one", "imbalanced")):
        pictures.bars(
            axes[i],
            f"{stream}: accuracy, %",
            names if i == 0 else [""] * len(names),
            [_mean(results, n, stream) for n in names],
        )
    for axis, network in zip(axes[3:], NETWORKS, strict=True):
        name = f"{network}: rates"
        if name not in results.variants(STUDY.variants):
            axis.axis("off")
            continue
        for loss, style in zip(results.values(name, "rates")[0], ("o-", "s--", "D-"), strict=True):  # type: ignore[call-overload]
            means = [statistics.fmean(results.values(name, "rates", loss, str(rate))) for rate in RATES]
            axis.semilogx(RATES, means, style, label=loss, markersize=4)
        none = f"{network}: none"
        if none in names:
            floor = [statistics.fmean(v[k] for k in FOUR) for v in results.values(none, "batches")]  # type: ignore[index]
            axis.axhline(statistics.fmean(floor), color="grey", linewidth=0.8)
        axis.set_title(f"{network}: accuracy by rate", fontsize=9)
        axis.legend(fontsize=7)
    pictures.save(
        figure,
        path,
        "Dots are seeds. By rate: mean over 4 corruptions in batches; the grey line is the network without adaptation.",
    )


STUDY = Study(
    name="adaptation",
    question="Adaptation to corrupted images: loops, losses, rates",
    variants=[
        f"{network}: {method}"
        for network in NETWORKS
        for method in [*METHODS, "rates"]
        if (network, method) != ("GroupNorm", "batch statistics")
    ],
    settings=SETTINGS,
    quick={"epochs": 8, "images": 80, "single_images": 4, "batch": 32},
    measure=measure,
    report=report,
    picture=picture,
)

if __name__ == "__main__":
    STUDY.main()
