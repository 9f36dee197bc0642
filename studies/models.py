"""The small networks that are trained. `embed` gives the penultimate layer where a study needs it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LeNet(nn.Module):
    """Two convolutions of 5x5, a hidden layer, a linear head; for grey images of 28x28."""

    def __init__(self, classes: int = 10, channels: tuple[int, int] = (16, 16), hidden: int = 50) -> None:
        super().__init__()
        first, second = channels
        self.body = nn.Sequential(
            nn.Conv2d(1, first, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(second * 16, hidden), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(hidden, classes)

    def embed(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class AlexNet(nn.Module):
    """AlexNet's shape for grey images of 28x28: three convolutions, each halving the image, two hidden layers with dropout."""

    def __init__(self, classes: int = 10, channels: tuple[int, int, int] = (12, 24, 24), hidden: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for after in channels:
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            before = after
        self.body = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(9 * before, hidden), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.2),
        )  # fmt: skip
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class NormNet(nn.Module):
    """Four convolutions with a norm layer each ("batch" or "group"), averaged over the image."""

    def __init__(self, norm: str, classes: int = 10, channels: tuple[int, ...] = (8, 16, 32, 32)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for i, after in enumerate(channels):
            layers.append(nn.Conv2d(before, after, 3, padding=1, bias=False))
            layers.append(nn.BatchNorm2d(after) if norm == "batch" else nn.GroupNorm(4, after))
            layers += [nn.ReLU(), nn.MaxPool2d(2)] if i < 2 else [nn.ReLU()]
            before = after
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class UNet(nn.Module):
    """Three levels, two convolutions each, joined across; sides that are multiples of four."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([_double(3, width), _double(width, 2 * width), _double(2 * width, 4 * width)])
        self.up = nn.ModuleList([_double(6 * width, 2 * width), _double(3 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = self.down[2](nn.functional.max_pool2d(second, 2))
        for level, across in zip(self.up, (second, first), strict=True):
            x = level(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), across], dim=1))
        return self.head(x)


def _double(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
    )  # fmt: skip
