"""One configuration, in a process of its own: JSON in on stdin, JSON out on stdout.

torch reads its settings when it starts, so each allocator setting has a server that has imported everything and forks for each
configuration: what malloc and torch.compile keep of one cannot reach the next, and a provider that takes its process down costs
one row.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

import pylosses
from pylosses.checking import function_of
from pylosses.spec import LOSSES

from . import gate, stopwatch
from .providers import Provider, concrete, providers, variants
from .shapes import Shape, inputs

Rows = list[dict[str, Any]]
MEMORY_LEAST = 1 << 19  #: bytes of logits below which the memory of a step is noise


def serve() -> NoReturn:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no answer
    torch.set_num_threads(1)  # a child cannot use the threads of its parent, so there are none

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")

    for line in sys.stdin:
        request = json.loads(line)
        if request["compile"]:  # takes seconds: once for all children
            importlib.import_module("torch._inductor.compile_fx")
        if request["device"] == "cpu" and hasattr(os, "fork"):
            child = os.fork()
            if child == 0:
                stopwatch.limit_memory()
                say(rows=answer(request, say))
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:  # a GPU's driver does not survive a fork
            say(rows=answer(request, say))
            code = 0
        say(ended=code)
    os._exit(0)


def answer(request: dict[str, Any], say: Callable[..., None]) -> Rows:
    """The rows of a configuration; what is wrong with it as a whole is a row, too."""
    torch.set_num_threads(request["threads"])
    try:
        return Measurement(request, say).rows()
    except Exception as error:
        return [{"provider": "", "by": "", "status": "error", "reason": _first_line(error)}]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


class Measurement:
    """Gate, then time and memory of whoever passed."""

    def __init__(self, request: dict[str, Any], say: Callable[..., None]) -> None:
        self.request = request
        self.say = say
        self.spec = LOSSES[request["loss"]]
        self.arguments = variants(self.spec, request["peers"])[request["variant"]]
        self.shape = Shape(request["shape"], tuple(request["sizes"]), request["kind"])
        self.dtype = getattr(torch, request["dtype"])
        self.device = request["device"]
        self.gradient = self.spec.family != "score"  # scores are read, not trained on
        self.candidates = self._providers(self.shape, request["compile"])
        self.found: dict[str, dict[str, Any]] = {
            p.name: {"provider": p.name, "by": p.kind, "status": "ok"} for p in self.candidates
        }
        self.same: dict[str, bool] = {}  #: whether a loss of torch is the same in float64

    def rows(self) -> Rows:
        """One row for each provider, whatever became of it, and one for the copy of the logits."""
        torch._dynamo.reset()
        self._leave_out()
        self._gate_on_few_rows()
        full = self._inputs(self.shape)
        self._gate_at_full_shape(full)
        if self.request["timed"]:
            self._time(full)
        if self.request["weighed"] and self.shape.logits * self.dtype.itemsize >= MEMORY_LEAST:
            self._weigh(full)
        return list(self.found.values())

    def _providers(self, shape: Shape, compile: bool) -> list[Provider]:
        asked, peers = self.request["backends"], self.request["peers"]
        return providers(self.spec, self.arguments, shape, self.dtype, self.device, asked=asked, compile=compile, peers=peers)

    def _inputs(self, shape: Shape) -> tuple[Tensor, ...]:
        return inputs(self.spec, shape, self.dtype, self.device)

    def _running(self) -> list[Provider]:
        return [p for p in self.candidates if self.found[p.name]["status"] == "ok"]

    def _drop(self, provider: Provider, status: str, reason: str) -> None:
        self.found[provider.name].update(status=status, reason=reason)

    def _leave_out(self) -> None:
        """Drop providers that cannot run here, or took a process down."""
        for provider in self.candidates:
            if provider.name in self.request["exclude"]:
                self._drop(provider, "error", self.request["exclude"][provider.name])
            elif provider.reason is not None:
                self._drop(provider, "missing", provider.reason)

    def _gate_on_few_rows(self) -> None:
        """Against float64, by the largest error. What torch.compile makes of the formula is compared at the full shape."""
        small = self.shape.fewer_rows(gate.SMALL)
        given = self._inputs(small)
        exact = tuple(t.double() if t.is_floating_point() else t for t in given)
        own = concrete(self.arguments, small, self.device)
        truth = gate.evaluate(partial(function_of(self.spec), backend="reference", **own), exact, self.gradient)
        calls = {p.name: p.call for p in self._providers(small, compile=False)}

        def compare(provider: Provider) -> str | None:
            if provider.kind == "torch":
                result = gate.evaluate(calls[provider.name], exact, self.gradient)
                self.same[provider.name] = gate.sharp(result, truth, torch.float64) is None
            return gate.sharp(gate.evaluate(calls[provider.name], given, self.gradient), truth, self.dtype)

        for provider in self._running():
            if provider.kind != "compile":
                self._gate(provider, "gate", compare)

    def _gate_at_full_shape(self, full: tuple[Tensor, ...]) -> None:
        """Against the eager formula, or else the first that is left, by the mean error. Also the warm-up."""
        before = gate.fingerprint(full)
        expected: list[gate.Outcome] = []

        def compare(provider: Provider) -> str | None:
            result = gate.evaluate(provider.call, full, self.gradient)
            if gate.fingerprint(full) != before:
                self.same.clear()
                return "its input was modified"
            if not expected:
                expected.append(result)
                return None if bool(result.loss.isfinite()) else f"loss is {float(result.loss)}"
            return gate.broad(result, expected[0], self.dtype)

        for provider in sorted(self._running(), key=lambda p: p.kind not in ("eager", "reference")):
            self._gate(provider, "comparison", compare)

    def _gate(self, provider: Provider, doing: str, compare: Callable[[Provider], str | None]) -> None:
        """A difference is FAILED; whatever a library raises is its own row, not the end of the bench.

        One of torch's own losses that is the same in float64 may round more than the gate allows; its row says by how much.
        """
        self.say(doing=doing, provider=provider.name)
        try:
            reason = compare(provider)
        except Exception as error:
            self._drop(provider, "error", _first_line(error))
            return
        if reason is not None and self.same.get(provider.name):
            self.found[provider.name]["inexact"] = reason
        elif reason is not None:
            self._drop(provider, "FAILED", reason)

    def _sides(self) -> tuple[list[Provider], str | None]:
        """Who is measured, and the name of ours; the reference only as ours: a rival with every guard would flatter us."""
        running = self._running()
        ours = next((p.name for kind in ("ours", "reference") for p in running if p.kind == kind), None)
        return [p for p in running if p.kind != "reference" or p.name == ours], ours

    def _time(self, full: tuple[Tensor, ...]) -> None:
        """Rounds of everybody who passed."""
        sides, ours = self._sides()
        steps = {p.name: stopwatch.step_of(p.call, full, self.gradient) for p in sides}
        if self.shape.kind in ("rows", "pixels"):
            warm = full[0].clone()
            steps["copy"] = lambda: warm.copy_(full[0])
            self.found["copy"] = {"provider": "copy", "by": "copy", "status": "ok"}

        def turn(name: str) -> float:
            self.say(doing="timing", provider=name)
            return stopwatch.turn(steps[name], self.device)

        turns = {name: partial(turn, name) for name in steps}
        taken = stopwatch.rounds(turns, *(self.request[name] for name in ("seconds", "least", "deadline")))
        for name, seconds in taken.items():
            row = self.found[name]
            row.update(rounds=len(seconds), ms=stopwatch.quartiles([1e3 * one for one in seconds]))
            if name != "copy" and ours is not None:
                row.update(against=ours, ratio=stopwatch.ratios(seconds, taken[ours]))
            if name != "copy" and "copy" in taken:
                row.update(copies=stopwatch.ratios(seconds, taken["copy"]))

    def _weigh(self, full: tuple[Tensor, ...]) -> None:
        """Peak memory of a step beyond inputs and gradients. The pool is off: what it hands out would not be seen."""
        gradients = [t.numel() * t.element_size() for t in full if t.is_floating_point()] if self.gradient else []
        with pylosses.use_pool(0):
            for provider in self._sides()[0]:
                self.say(doing="memory", provider=provider.name)
                step = stopwatch.step_of(provider.call, full, self.gradient)
                self.found[provider.name]["extra_bytes"] = stopwatch.extra_bytes(step, gradients, self.device)
