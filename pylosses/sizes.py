"""What a call saves for backward and gives: the kernels answer once a loss and its options, shapes come in here."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .check import label_shape


class Facts(NamedTuple):
    """What is known of a formula, see csrc/losses/facts.h."""

    number: int
    family: str
    labels: bool
    soft_targets: bool
    own: list[str]  #: names of its own numbers


class Sizes(NamedTuple):
    """As `Sizes` in csrc/losses/facts.h."""

    fixed: int
    a_row: int
    a_class: int
    a_logit: int
    area_rows: int
    shape: str
    ahead: bool  #: may forward write the gradient of a sum or a mean?
    weight_sum: bool  #: is the sum of the class weights needed?
    second_divisor: bool  #: does a mean divide a part of the loss by the rows, whatever the classes weigh?

    def of_loss(self, kernel: str) -> Sizes:
        """Itself, if there is a driver for what the loss asks for."""
        if self.fixed < 0:
            raise NotImplementedError(f"{kernel} asks for what no driver does: see `possible` in csrc/losses/families.h")
        return self

    def saved_bytes(self, x: Tensor) -> int:
        """What backward needs. No branch looks at the number of rows but for many small images: it may be symbolic."""
        classes = x.shape[1 if x.dim() > 1 else 0]
        rows = x.numel() // classes
        size = self.fixed + self.a_row * rows + self.a_class * classes * self._areas(x, rows)
        return size + rows * classes * self.a_logit // 8 if self.a_logit else size

    def _areas(self, x: Tensor, rows: int) -> int:
        many = self.shape == "classes_of_images" and x.dim() > 1 and rows >= self.area_rows * x.shape[0]
        return x.shape[0] if many else 1

    def loss_shape(self, x: Tensor) -> torch.Size:
        """The shape of the loss with reduction "none": that of the labels, or one number a class for a region loss."""
        if self.shape == "rows":
            return label_shape(x.shape)
        classes = x.shape[1:2] if x.dim() > 1 else x.shape
        return torch.Size((x.shape[0] if x.dim() > 1 else 1, *classes)) if self.shape == "classes_of_images" else classes
