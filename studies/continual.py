"""Does the loss matter for what a network forgets, beside the strategy that keeps it?

Five tasks one after the other: two digits each with a head of their own (split), or all digits under a fixed permutation of
the pixels (permuted). Strategies: replay, synaptic intelligence (SI), elastic weight consolidation (EWC), learning without
forgetting (LwF, split) or less-forgetful learning (LFL, permuted).
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pylosses

from . import pictures
from .study import Measures, Part, Results, Study, table
from .training import Loss, accuracy, batches

LOSSES: dict[str, Callable[[Tensor], Loss]] = {
    "CE": lambda counts: pylosses.CrossEntropyLoss(),
    "HEM-": lambda counts: pylosses.HEMLoss.from_class_counts(counts, shared=True),
}
STRATEGIES = {"split": ("none", "replay", "SI", "EWC", "LwF"), "permuted": ("none", "replay", "SI", "EWC", "LFL")}
TASKS = 5

#: accuracy over all tasks at the end
PUBLISHED = {
    "split, replay, CE": 97.56, "split, replay, HEM-": 98.59, "split, SI, CE": 98.68, "split, SI, HEM-": 96.36,
    "split, EWC, CE": 93.27, "split, EWC, HEM-": 98.10, "split, LwF, CE": 98.05, "split, LwF, HEM-": 99.42,
    "permuted, replay, CE": 89.23, "permuted, replay, HEM-": 93.30,
}  # fmt: skip

SETTINGS = {
    "images": 2000, "epochs": 4, "batch": 64, "rate": 1e-3, "memory": 100, "ewc": 100.0, "si": 0.1, "lwf": 1.0, "lfl": 0.01,
}  # fmt: skip


class Network(nn.Module):
    """A perceptron of three layers of 200 with a head for each task, or one for all."""

    def __init__(self, heads: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()
        )
        self.heads = nn.ModuleList(nn.Linear(200, classes) for _ in range(heads))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[min(task, len(self.heads) - 1)](self.body(x))


class Keeper:
    """What a strategy remembers of the tasks that are over, and what it adds to the loss of the one that runs."""

    def __init__(self, strategy: str, model: Network, loss: Loss, s: dict[str, Any], generator: torch.Generator) -> None:
        self.strategy, self.model, self.loss, self.s, self.generator = strategy, model, loss, s, generator
        self.memory: list[tuple[Tensor, Tensor]] = []
        self.importance: list[Tensor] | None = None
        self.anchor: list[Tensor] = []
        self.old: Network | None = None
        self._begin()

    def _begin(self) -> None:
        self.start = [p.detach().clone() for p in self.model.parameters()]
        self.path = [torch.zeros_like(p) for p in self.start]

    def extra(self, x: Tensor, task: int) -> Tensor | float:
        if self.strategy == "replay" and self.memory:
            return sum(self._replayed(past, size=self.s["batch"] // len(self.memory)) for past in range(task)) / task
        if self.importance is not None:
            moved = zip(self.importance, self.model.parameters(), self.anchor, strict=True)
            strength = self.s["ewc"] / 2 if self.strategy == "EWC" else self.s["si"]
            return strength * sum((f * (p - old) ** 2).sum() for f, p, old in moved)
        if self.strategy == "LwF" and self.old is not None:
            return self.s["lwf"] * sum(self._distilled(x, past) for past in range(task)) / task
        if self.strategy == "LFL" and self.old is not None:
            with torch.no_grad():
                before = self.old.body(x)
            return self.s["lfl"] * (self.model.body(x) - before).square().sum(dim=1).mean()
        return 0.0

    def _replayed(self, past: int, size: int) -> Tensor:
        x, y = self.memory[past]
        rows = torch.randint(0, len(y), (max(size, 1),), generator=self.generator)
        return self.loss(self.model(x[rows], past), y[rows])

    def _distilled(self, x: Tensor, past: int) -> Tensor:
        assert self.old is not None
        with torch.no_grad():
            teacher = torch.softmax(self.old(x, past) / 2, dim=1)
        return 4 * pylosses.cross_entropy(self.model(x, past), teacher, temperature=2.0)

    def after_step(self, before: list[Tensor], gradient: list[Tensor | None]) -> None:
        """SI: the share of each weight in the fall of the loss."""
        for path, p, old, g in zip(self.path, self.model.parameters(), before, gradient, strict=True):
            if g is not None:
                path -= g * (p.detach() - old)

    def task_is_over(self, x: Tensor, y: Tensor, task: int) -> None:
        if self.strategy == "replay":
            rows = torch.randperm(len(y), generator=self.generator)[: self.s["memory"]]
            self.memory.append((x[rows], y[rows]))
        if self.strategy in ("EWC", "SI"):
            new = self._fisher(x, y, task) if self.strategy == "EWC" else self._integrated()
            self.importance = new if self.importance is None else [a + b for a, b in zip(self.importance, new, strict=True)]
            self.anchor = [p.detach().clone() for p in self.model.parameters()]
        if self.strategy in ("LwF", "LFL"):
            self.old = copy.deepcopy(self.model).requires_grad_(False)
        if self.strategy == "LFL":  # the head that has learnt stays
            self.model.heads.requires_grad_(False)
        self._begin()

    def _fisher(self, x: Tensor, y: Tensor, task: int) -> list[Tensor]:
        """Mean squared gradient of single images."""
        found = [torch.zeros_like(p) for p in self.model.parameters()]
        for i in range(min(100, len(y))):
            value = self.loss(self.model(x[i : i + 1], task), y[i : i + 1])
            gradient = torch.autograd.grad(value, list(self.model.parameters()), allow_unused=True)
            for f, g in zip(found, gradient, strict=True):
                if g is not None:
                    f += g**2 / min(100, len(y))
        return found

    def _integrated(self) -> list[Tensor]:
        moved = (p.detach() - start for p, start in zip(self.model.parameters(), self.start, strict=True))
        return [path.clamp(min=0) / (d**2 + 0.1) for path, d in zip(self.path, moved, strict=True)]


def tasks(x: Tensor, y: Tensor, kind: str, images: int | None) -> list[tuple[Tensor, Tensor]]:
    found = []
    for task in range(TASKS):
        if kind == "split":
            mine = (y // 2 == task).nonzero()[:, 0][:images]
            found.append((x[mine], y[mine] % 2))
        else:
            order = torch.randperm(784, generator=torch.Generator().manual_seed(task))
            some = x[: images or 2000]
            found.append((some.flatten(1)[:, order].reshape(some.shape), y[: len(some)]))
    return found


def measure(part: Part) -> Measures:
    s = part.settings
    kind, strategy, loss_name = part.variant.split(", ")
    learn, test = part.data.grey("mnist")
    model = Network(TASKS if kind == "split" else 1, 2 if kind == "split" else 10)
    generator = torch.Generator().manual_seed(part.seed)
    training, testing = tasks(learn.x, learn.y, kind, s["images"]), tasks(test.x, test.y, kind, None)
    loss = LOSSES[loss_name](training[0][1].bincount())
    keeper = Keeper(strategy, model, loss, s, generator)
    history = []
    for task, (x, y) in enumerate(training):
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=s["rate"], fused=True)
        for _ in range(s["epochs"]):
            for rows in batches(len(y), s["batch"], generator):
                optimizer.zero_grad()
                value = loss(model(x[rows], task), y[rows])
                (value + keeper.extra(x[rows], task)).backward()
                if strategy == "SI":
                    before = [p.detach().clone() for p in model.parameters()]
                    gradient = [p.grad for p in model.parameters()]
                optimizer.step()
                if strategy == "SI":
                    keeper.after_step(before, gradient)
        keeper.task_is_over(x, y, task)
        with torch.no_grad():
            history.append([accuracy(model(tx, past), ty) for past, (tx, ty) in enumerate(testing[: task + 1])])
        part.progress((task + 1) / TASKS)
    forgotten = [history[past][past] - history[-1][past] for past in range(TASKS - 1)]
    return {"accuracy": statistics.fmean(history[-1]), "forgotten": statistics.fmean(forgotten), "history": history}


def report(results: Results) -> str:
    rows = []
    published = PUBLISHED if results.of("MNIST") else {}
    for n in results.variants(STUDY.variants):
        there = f" ({published[n]})" if n in published else ""
        rows.append([n, results.cell(n, "accuracy") + there, results.cell(n, "forgotten")])
    s = results.settings
    return table(["tasks, strategy, loss", "accuracy over all tasks at the end", "forgotten"], rows) + (
        "\nPercent, mean ± standard deviation over the seeds; in brackets the source's. Forgotten: how much less the network "
        f"knows of a task at the end than right after it, mean over the first four.\n\nHere {s['images']} images of a task "
        f"and {s['epochs']} epochs, a perceptron of three hidden layers of 200. Strengths are the same for both losses and not "
        f"tuned: EWC {s['ewc']:g} (Fisher information of 100 images), SI {s['si']:g}, LwF {s['lwf']:g} at temperature 2, LFL "
        f"{s['lfl']:g}, replay of {s['memory']} images of each task. EWC and SI take their importances from the gradients of "
        "the loss itself; HEM's are zero for images without an error.\n"
    )


def picture(results: Results, path: Path) -> None:
    figure, axes = pictures.panels(2, width=4.4, height=3.2)
    for axis, kind in zip(axes, STRATEGIES, strict=True):
        names = [n for n in results.variants(STUDY.variants) if n.startswith(kind)]
        if not names:
            axis.axis("off")
            continue
        marks = [PUBLISHED.get(n) if results.of("MNIST") else None for n in names]
        labels = [n.partition(", ")[2] for n in names]
        pictures.bars(
            axis, f"{kind}: accuracy over all tasks, %", labels, [results.values(n, "accuracy") for n in names], marks
        )
    pictures.save(figure, path)


STUDY = Study(
    name="continual",
    question="Continual learning: what a loss lets a network keep",
    variants=[f"{kind}, {strategy}, {loss}" for kind, found in STRATEGIES.items() for strategy in found for loss in LOSSES],
    settings=SETTINGS,
    quick={"images": 100, "epochs": 2, "memory": 20},
    measure=measure,
    report=report,
    picture=picture,
)

if __name__ == "__main__":
    STUDY.main()
