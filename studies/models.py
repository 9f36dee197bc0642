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
