"""The sides of a bar take turns: what a worker of `bars` measures for one workload.

Ours is called as a user does. Everybody passes the gate of the bench first; then come interleaved rounds of whole training
steps, or the extra memory of one step.

In a round each side makes a few steps in a row, a slow one a single step. The first may cost far more than the others: on a
virtual machine that hands free memory back to its host, a large buffer that was released seconds ago is fetched from there page
by page. So both are kept, the median of a turn and its first step, which is what turns of a single step would give.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import pylosses

from . import gate, timing
from .providers import Provider, concrete
from .shapes import Shape
from .worker import Measurement

ROW, LOGITS = "extra bytes a row", "extra bytes a byte of logits"  #: units of extra memory
MOST = 500  #: rounds
STEPS = 10  #: of a turn at most;
TURN = 1.2  #: seconds of a turn at the speed of its fastest step,
SLOW = 4.0  #: and of its first three steps

Steps = dict[str, Callable[[], dict[str, float]]]


def step(call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Seconds of a whole step, with the release of its gradient: a fresh buffer costs when it comes and when it goes."""
    start = time.perf_counter()
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    call(*leaves).backward()
    del leaves
    return {"both": time.perf_counter() - start}


def turn(step: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Seconds of a few steps in a row: their median, and the first."""
    taken = [step()["both"]]
    while len(taken) < STEPS and len(taken) * min(taken) < (SLOW if len(taken) < 3 else TURN):
        taken.append(step()["both"])
    return {"both": statistics.median(taken), "first": taken[0]}


class Contest(Measurement):
    """One workload: the gate of the bench, then the sides of its bars take turns."""

    def times(self) -> list[dict[str, Any]]:
        """A row for each side, with its seconds by round."""
        pooled = self.request["setting"] == "pool"
        pool = with_pool(2 * self.shape.logits * self.dtype.itemsize) if pooled else nullcontext()
        if pool is None:
            return [{"provider": "ours", "status": "missing", "reason": "no pool"}]
        with pool:
            return super().times()

    def _time(self, full: tuple[Tensor, ...]) -> None:
        if self.found["ours"]["status"] != "ok":
            return
        if self.request["setting"] == "memory":
            self._weigh(full)
            return
        steps = {name: partial(turn, step) for name, step in self._steps(full).items()}
        self.say(event="provider", name="", doing="timing")
        before = timing.Load.now()
        samples = timing.rounds(steps, self.request["budget"], self.request["least"], MOST)
        noisy = timing.noise(before, timing.Load.now(), samples)["noisy"]
        for name, taken in samples.items():
            kept = {"seconds": [sample["both"] for sample in taken], "first": [sample["first"] for sample in taken]}
            self.found[name].update(kept, noisy=noisy)

    def _steps(self, full: tuple[Tensor, ...]) -> Steps:
        """A step of every side that passed its gate."""
        sides = ("ours", *self.request["sides"])
        steps: Steps = {p.name: partial(step, p.call, full) for p in self._running() if p.name in sides}
        for name in sides:
            if name == "copy":
                self.found[name] = {"provider": name, "status": "ok"}
                steps[name] = partial(timing.copy_step, full[0], full[0].clone(), self.device)
            elif name.startswith("our "):
                other = type(self)({**self.request, "loss": name.removeprefix("our "), "sides": []}, self.say)
                if theirs := other._steps(other._gated()):
                    steps[name] = theirs["ours"]
                self.found[name] = {**other.found["ours"], "provider": name}
        return steps

    def _weigh(self, full: tuple[Tensor, ...]) -> None:
        gradients = [t.numel() * t.element_size() for t in full if t.is_floating_point()]
        ours = self.candidates[0].call
        with pylosses.use_pool(0):  # a pooled gradient would not be seen
            extra = extra_bytes(partial(timing.memory_step, ours, full, gradient=True), gradients)
        bits = 8 * extra * self.shape.classes // self.shape.logits  # whole bits a row: the loss and its divisor are no rows
        self.found["ours"] |= {ROW: [bits / 8], LOGITS: [extra / self.shape.logits / self.dtype.itemsize]}

    def _providers(self, shape: Shape, compile: bool) -> list[Provider]:
        """Ours as a user calls it, the eager formula as a witness for the gate, and whoever a bar names."""
        function, own = getattr(pylosses.functional, self.spec.function), concrete(self.arguments, shape, self.device)
        named = [p for p in super()._providers(shape, compile) if p.name in ("eager", *self.request["sides"])]
        return [Provider("ours", "ours", partial(function, **own) if own else function), *named]

    def _gate(self, provider: Provider, doing: str, compare: Callable[[Provider], str | None]) -> None:
        """torch's own losses may round more than the gate allows, if float64 shows that they are the same loss."""
        super()._gate(provider, doing, compare)
        row = self.found[provider.name]
        if row["status"] == "FAILED" and provider.kind == "torch" and self._is_the_same_loss(provider.name):
            row.update(status="ok", inexact=row.pop("reason"))

    def _is_the_same_loss(self, name: str) -> bool:
        small = self.shape.fewer_rows(gate.SMALL)
        exact = tuple(t.double() if t.is_floating_point() else t for t in self._inputs(small))
        calls = {p.name: p.call for p in self._providers(small, compile=False)}
        result, truth = (gate.evaluate(calls[who], exact) for who in (name, "eager"))
        return gate.sharp(result, truth, torch.float64) is None

    def _inputs(self, shape: Shape) -> tuple[Tensor, ...]:
        given = super()._inputs(shape)
        if shape.name == "linear-easy":  # nine rows of ten are so far on the right side that they have no margin loss
            h, w, y = given
            easy = torch.arange(len(h)) % 10 > 0
            h[easy] = 4 * w[y[easy]]  # logits of about 4 at the label, below 1 elsewhere
        return given


def with_pool(size: int) -> AbstractContextManager[Any] | None:
    """Inside, released gradient buffers of up to `size` bytes are used again; None where pylosses has no pool."""
    use_pool = getattr(pylosses, "use_pool", None)
    return None if use_pool is None else use_pool(size)


def extra_bytes(action: Callable[[], Any], gradients: list[int]) -> int:
    """Peak of what torch's allocator hands out during `action`, apart from gradients of these sizes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]  # freed: negative
    for gradient in sorted(gradients, reverse=True):
        _, its = max((size == gradient, i) for i, size in enumerate(sizes) if size >= gradient)
        sizes[its] -= gradient
    return max(accumulate(sizes), default=0)
