"""The processes that share the classes: their collectives, and the agreement that starts every call.

A call begins with one gather of a few numbers a rank. From it each rank knows where its classes lie among all of them, and a
layout that cannot work is refused on every rank, before anything else is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .check import ACCUMULATE

_DTYPES = tuple(ACCUMULATE)
_MOST_DIMENSIONS = 8


class Layout(NamedTuple):
    """Where this rank's classes lie."""

    start: int
    stop: int
    total: int
    largest: int  # number of classes that a rank has

    def part(self, values: Tensor | None) -> Tensor | None:
        """This rank's part of a (C) tensor."""
        return None if values is None else values[self.start : self.stop]


class Facts(NamedTuple):
    """What a rank tells the others about its call."""

    position: int  # of its shard among the shards
    classes: int
    dtype: torch.dtype
    rows: tuple[int, ...]
    features: int  # of a linear layer; 0 for logits
    summed: bool  # the gradient of the layer's input takes a collective
    labels: int  # fingerprint
    call: int  # fingerprint

    def numbers(self) -> list[int]:
        rows = (*self.rows, *(0,) * _MOST_DIMENSIONS)[:_MOST_DIMENSIONS]
        rest = (self.features, int(self.summed), self.labels, self.call)
        return [1, self.position, self.classes, _DTYPES.index(self.dtype), *rest, len(self.rows), *rows]

    @staticmethod
    def of(numbers: list[int]) -> Facts:
        _, position, classes, dtype, features, summed, labels, call, dimensions, *rows = numbers
        return Facts(position, classes, _DTYPES[dtype], tuple(rows[:dimensions]), features, bool(summed), labels, call)


_NUMBERS = 9 + _MOST_DIMENSIONS

#: What must be the same everywhere: field -> (its name, what every rank must be given, whether its value says something)
_SAME = {
    "call": ("the loss and its arguments", "every rank makes the same call, and (C) arguments are whole", False),
    "dtype": ("the dtype of input", "every rank is given the same", True),
    "rows": ("the shape of the rows", "every rank has all rows and its part of the classes", True),
    "features": ("the number of features", "every rank has all features of its classes", True),
    "summed": ("whether input needs a gradient", "that gradient is summed over the ranks", True),
    "labels": ("target", "every rank is given the same labels, from 0 to the number of all classes", False),
}


class Group:
    """The ranks of a torch.distributed process group; without one, this process alone."""

    def __init__(self, group: Any, timeout: float | None) -> None:
        self.group, self.timeout = group, timeout
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        if self.rank < 0:
            raise ValueError("group must contain this process, which is no member of it")

    def sum(self, *parts: Tensor) -> list[Tensor]:
        """Sums over the ranks of (r) tensors, by one collective."""
        together = torch.stack(parts)
        self.add_up(together)
        return list(together.unbind())

    def add_up(self, values: Tensor) -> None:
        """The sum over the ranks, in place."""
        if values.numel():
            self._run(lambda: dist.all_reduce(values, group=self.group, async_op=True))

    def max(self, *parts: Tensor) -> list[Tensor]:
        """Maxima over the ranks of (r) tensors; what becomes of NaN depends on the ranks' order."""
        together = torch.stack(parts)
        if together.numel():
            self._run(lambda: dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        return list(together.unbind())

    def gather(self, values: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have the same shape, in the order of the ranks."""
        if self.size == 1 or values.numel() == 0:
            return [values] * self.size
        values = values.contiguous()
        found = [torch.empty_like(values) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(found, values, group=self.group, async_op=True))
        return found

    def _run(self, collective: Callable[[], Any]) -> None:
        if self.size == 1:
            return
        try:
            work = collective()
            # NCCL has a watchdog with the group's own limit; to wait here would stop the host.
            if self.timeout is not None and "gloo" in str(dist.get_backend(self.group)):
                work.wait(timedelta(seconds=self.timeout))
            else:
                work.wait()
        except RuntimeError as error:
            limit = "the time limit of its process group" if self.timeout is None else f"{self.timeout:g} seconds"
            raise RuntimeError(
                f"a collective of a class-parallel loss failed on rank {self.rank} of {self.size}: another rank has ended, or "
                f"did not make the same call within {limit}. The process group cannot be used any more. torch says: {error}"
            ) from error

    def refuse(self, device: torch.device) -> None:
        """Tell the others, who wait for this rank's facts, that there are none."""
        self.gather(torch.zeros(_NUMBERS, dtype=torch.int64, device=device))

    def agree(self, facts: Facts, classes: int | None, device: torch.device) -> Layout:
        """The layout, once every rank has told its facts; an error on every rank when they do not fit."""
        told = [t.tolist() for t in self.gather(torch.tensor(facts.numbers(), dtype=torch.int64, device=device))]
        for rank, numbers in enumerate(told):
            if numbers[0] == 0:
                raise RuntimeError(f"rank {rank} of {self.size} refused its arguments of this call; see the error it raised")
        every = [Facts.of(numbers) for numbers in told]
        for field, (name, advice, shown) in _SAME.items():
            first, *others = (getattr(f, field) for f in every)
            for rank, other in enumerate(others, 1):
                if other != first:
                    what = (
                        f", got {first} on rank 0 and {other} on rank {rank}"
                        if shown
                        else f"; rank {rank} has others than rank 0"
                    )
                    raise ValueError(f"{name} must be the same on all ranks{what}: {advice}")
        sizes = [f.classes for f in sorted(every, key=lambda f: f.position)]
        if sorted(f.position for f in every) != list(range(self.size)):
            raise ValueError(f"every shard must be on one rank of the group, got shards {[f.position for f in every]}")
        if classes is not None and sum(sizes) != classes:
            raise ValueError(
                f"the shards must have {classes} classes together, got {' + '.join(map(str, sizes))} = {sum(sizes)}"
            )
        start = sum(sizes[: facts.position])
        return Layout(start, start + facts.classes, sum(sizes), max(sizes))


def fingerprint(arguments: Mapping[str, Any]) -> int:
    """A number that is the same for the same numbers, strings and tensors."""
    parts = []
    for name, value in sorted(arguments.items()):
        if isinstance(value, Tensor):
            # Numbers of rows may come from a computation that is not the same to the last bit.
            bits = "" if name in ("sample_weight", "normalizer") else _bits(value.detach())
            parts.append(f"{name} {tuple(value.shape)} {bits}")
        elif value is None or isinstance(value, (bool, int, float, str)):
            parts.append(f"{name} {value!r}")
    return int.from_bytes(hashlib.blake2b(" ".join(parts).encode(), digest_size=8).digest(), "big", signed=True)


_ODD = 0x5D2C8E4B9A31F687  # and without a pattern: a product with it loses no bit and spreads each upwards


def _bits(values: Tensor) -> int:
    """A hash: each number with its place is scrambled, and these are added, which gives the same in any order."""
    if values.is_floating_point() or values.dtype == torch.bool:
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
        values = values.contiguous().view(whole)
    mixed = torch.arange(values.numel(), device=values.device).mul_(_ODD).add_(values.reshape(-1))
    for _ in range(2):
        mixed.mul_(_ODD)
        mixed ^= (mixed >> 32).bitwise_and_(0xFFFFFFFF)
    return int(mixed.sum())


class Sharded(Tensor):
    """The logits of all classes while this rank has only its part: shape and dtype, and no memory of their own."""

    loss: Callable[..., Tensor]  # (spec, problem, own arguments, backend) -> the reduced loss

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class ShardedHead(Tensor):
    """The weight of a linear layer for all classes, likewise."""

    logits: Callable[[Tensor], Tensor]  # the layer's input -> Sharded

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def stand_in(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of that shape without memory."""
    return torch.empty((), dtype=dtype or like.dtype, device=like.device).expand(shape)
