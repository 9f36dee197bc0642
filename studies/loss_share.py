"""How much of a training step is the loss, written in plain PyTorch and fused: where does it matter?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import pylosses

from . import pictures
from .models import AlexNet, LeNet, UNet
from .study import Measures, Part, Results, Study, table

Step = Callable[[], object]
LossStep = Callable[[str], Step]  #: from a backend to forward and backward of the loss


def _network(model: nn.Module, x: Tensor) -> tuple[Step, Tensor]:
    """A step without its loss, and the logits."""
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    gradient = torch.randn_like(model(x)) * 1e-3

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward(gradient)
        optimizer.step()

    return step, model(x).detach().requires_grad_()


def _grey(model: nn.Module, name: str, **arguments: object) -> tuple[Step, LossStep]:
    step, x = _network(model.to(memory_format=torch.channels_last), torch.rand(128, 1, 28, 28))
    y = torch.arange(128) % 10
    function = getattr(pylosses, name)
    return step, lambda backend: lambda: torch.autograd.grad(function(x, y, backend=backend, **arguments), x)


def _scenes(name: str) -> tuple[Step, LossStep]:
    step, x = _network(UNet(11).to(memory_format=torch.channels_last), torch.rand(8, 3, 88, 120))
    y = torch.randint(0, 11, (8, 88, 120))
    function = getattr(pylosses, name)
    return step, lambda backend: lambda: torch.autograd.grad(function(x, y, backend=backend), x)


def _words(words: int) -> tuple[Step, LossStep]:
    """The body of a small Llama; its loss begins at the hidden states, because the fused one does."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=words, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    model = LlamaModel(config)
    ids = torch.randint(0, words, (8, 64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    gradient = torch.randn(8, 64, 64) * 1e-3

    def step() -> None:
        optimizer.zero_grad()
        model(ids).last_hidden_state.backward(gradient)
        optimizer.step()

    hidden = model(ids).last_hidden_state.detach().reshape(-1, 64).requires_grad_()
    weight = nn.Parameter(torch.randn(words, 64) / 8)
    y = ids.reshape(-1)

    def loss(backend: str) -> Step:
        if backend == "reference":
            return lambda: torch.autograd.grad(nn.functional.cross_entropy(hidden @ weight.T, y), (hidden, weight))
        return lambda: torch.autograd.grad(pylosses.linear_cross_entropy(hidden, weight, y), (hidden, weight))

    return step, loss


WORKLOADS: dict[str, Callable[[], tuple[Step, LossStep]]] = {
    "LeNet, CE": lambda: _grey(LeNet(), "cross_entropy"),
    "LeNet, HEM": lambda: _grey(LeNet(), "hem_loss"),
    "AlexNet, CE + ADR": lambda: _grey(AlexNet(), "cross_entropy_adr", top=3),
    "U-Net, CE": lambda: _scenes("cross_entropy"),
    "U-Net, HEM": lambda: _scenes("hem_loss"),
    "U-Net, Dice + CE": lambda: _scenes("dice_ce_loss"),
    "Llama, CE over 8,000 words": lambda: _words(8000),
    "Llama, CE over 32,000 words": lambda: _words(32000),
}
SETTINGS = {"repeats": 15}


def measure(part: Part) -> Measures:
    """Milliseconds of processor time, medians of turns."""
    part.data.used[:] = ["random numbers"]
    step, loss = WORKLOADS[part.variant]()
    parts = {"step without its loss": step, "eager": loss("reference"), "pylosses": loss("cpu")}
    times: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(part.settings["repeats"] + 2):
        for name, action in parts.items():
            began = time.process_time()
            action()
            if turn >= 2:
                times[name].append(1000 * (time.process_time() - began))
        part.progress((turn + 1) / (part.settings["repeats"] + 2))
    return {name: statistics.median(values) for name, values in times.items()}


def _shares(results: Results, variant: str) -> list[float]:
    rest = statistics.fmean(results.values(variant, "step without its loss"))
    return [100 * (t := statistics.fmean(results.values(variant, how))) / (t + rest) for how in ("eager", "pylosses")]


def report(results: Results) -> str:
    rows = []
    for n in results.variants(list(WORKLOADS)):
        times = [results.cell(n, m, digits=2) for m in ("step without its loss", "eager", "pylosses")]
        eager, fused = _shares(results, n)
        rows.append([n, *times, f"{eager:.1f} %", f"{fused:.1f} %"])
    head = ["network, loss", "step without its loss", "loss, eager", "loss, pylosses", "share, eager", "share, pylosses"]
    return table(head, rows) + (
        "\nMilliseconds of processor time on one thread, forward and backward; the machine was shared, so that only "
        "differences by a factor mean something. Batches: 128 images of 28x28; 8 scenes of 120x88; 8 sequences of 64 words. "
        "The Llama's loss begins at the hidden states and has the output layer in it, both ways.\n"
    )


def picture(results: Results, path: Path) -> None:
    names = results.variants(list(WORKLOADS))
    figure, (axis,) = pictures.panels(1, width=6.5, height=3.2)
    for i, (how, colour) in enumerate((("eager", pictures.PUBLISHED), ("pylosses", pictures.MEASURED))):
        places = [len(names) - 1 - n - 0.35 * i for n in range(len(names))]
        axis.barh(places, [_shares(results, n)[i] for n in names], height=0.33, color=colour, label=how)
    axis.set_yticks([len(names) - 1 - n - 0.17 for n in range(len(names))], names)
    axis.set_title("share of the loss in a training step, %", fontsize=9)
    axis.legend(fontsize=8)
    pictures.save(figure, path)


STUDY = Study(
    name="loss_share",
    question="How much of a training step is the loss?",
    variants=list(WORKLOADS),
    settings=SETTINGS,
    quick={"repeats": 1},
    measure=measure,
    report=report,
    picture=picture,
    seeds=1,
)

if __name__ == "__main__":
    STUDY.main()
