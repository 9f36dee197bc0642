"""The small networks that are trained. `embed` gives the penultimate layer where a study needs it."""

from __future__ import annotations

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
