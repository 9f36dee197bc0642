"""A process that forks a child for each configuration it is asked for: JSON in on stdin, JSON out on stdout.

torch and malloc read their settings when they start, so each setting has a worker of its own: two for times, one for peak
memory. What a configuration needs is imported before the fork, once for all: a process that starts anew takes 4 to 8 s for it.
What malloc keeps of a configuration ends with its child: compiled Dice with CE at one street scene was 2.7x or 6.6x ours by
what the process had done before. A provider that takes the child down with it (a crash, too little memory) costs one row: the
worker ends the same way, the parent sees which provider it was and starts another worker.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import select
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TextIO

import torch
from torch import Tensor

import pylosses
from pylosses.checking import function_of
from pylosses.spec import LOSSES

from . import gate, timing
from .providers import Provider, concrete, providers, variants
from .shapes import Shape, inputs

#: Below this many bytes of logits the memory of a step is noise.
MEMORY_LEAST = 1 << 19
ROUNDS_MOST = 400


def serve(kind: type[Measurement] | None = None) -> NoReturn:
    """Answer requests until stdin ends, each by a measurement of this kind."""
    kind = kind or Measurement
    # Whatever libraries print belongs to stderr: stdout speaks the protocol.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)  # a child cannot use the threads of its parent, so there are none
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["compile"]:
                importlib.import_module("torch._inductor.compile_fx")
            measurement = kind(request, partial(_say, answers))
        except Exception as error:
            _say(answers, event="rows", rows=_broken(error))
            continue
        answer = partial(_answer, measurement, request, answers)
        if request["device"] == "cpu" and hasattr(os, "fork"):
            _in_a_child(answer)
        else:  # a GPU's driver does not survive a fork
            answer()
    os._exit(0)


def _answer(measurement: Measurement, request: dict[str, Any], answers: TextIO) -> None:
    torch.set_num_threads(request["threads"])
    try:
        rows = measurement.memory() if request["task"] == "memory" else measurement.times()
    except Exception as error:  # the parent shows it in the table
        rows = _broken(error)
    _say(answers, event="rows", rows=rows)


def _broken(error: Exception) -> list[dict[str, Any]]:
    return [{"provider": "", "kind": "", "status": "error", "reason": f"{type(error).__name__}: {error}"}]


def _in_a_child(work: Callable[[], None]) -> None:
    """Do it in a copy of this process, and end as that one ends unless all is well."""
    child = os.fork()
    if child == 0:
        end_with_parent()
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    elif status:
        os._exit(os.WEXITSTATUS(status))


def end_with_parent() -> None:
    """End as soon as nobody is left to write to stdin: who measures on would disturb whatever is measured next."""

    def watch() -> None:
        poll = select.poll()
        poll.register(0, 0)  # hanging up is told without being asked for
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _say(answers: TextIO, **message: Any) -> None:
    answers.write(json.dumps(message) + "\n")


class Place:
    """Where the inputs and a copy of the logits lie in memory."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = inputs
        self.copy = inputs[0]
        self.moves = 0

    def move(self) -> None:
        """They lie elsewhere, and so will our next gradient."""
        self.copy = timing.moved(self.inputs[0])
        self.inputs = tuple(map(timing.moved, self.inputs))
        pylosses.clear_pool()
        self.moves += 1


class Measurement:
    """One configuration: gate, then time and memory of whoever passed."""

    def __init__(self, request: dict[str, Any], say: Callable[..., None]) -> None:
        self.request = request
        self.say = say
        self.spec = LOSSES[request["loss"]]
        self.arguments = variants(self.spec, request["peers"])[request["variant"]]
        self.shape = Shape(request["shape"], tuple(request["sizes"]), request["shape_kind"])
        self.dtype = getattr(torch, request["dtype"])
        self.device = request["device"]
        self.gradient = self.spec.family != "score"  # scores are read, not trained on
        self.candidates = self._providers(self.shape, request["compile"])
        self.found: dict[str, dict[str, Any]] = {
            p.name: {"provider": p.name, "kind": p.kind, "call": p.note, "status": "ok"} for p in self.candidates
        }

    def times(self) -> list[dict[str, Any]]:
        """One row for each provider, whatever became of it, and one for the copy of the logits."""
        torch._dynamo.reset()
        pylosses.clear_pool()  # as if no other configuration had been before
        self._time(self._gated())
        return list(self.found.values())

    def memory(self) -> list[dict[str, Any]]:
        """Peak memory of one step, beyond inputs and gradients, of the providers that were asked for: they passed the gate."""
        if self.shape.logits * self.dtype.itemsize < MEMORY_LEAST:
            return []
        torch._dynamo.reset()
        full = self._inputs(self.shape)
        gradients = sum(t.numel() * t.element_size() for t in full if t.is_floating_point()) if self.gradient else 0
        rows = []
        for provider in self.candidates:
            if provider.name in self.request["only"]:
                self.say(event="provider", name=provider.name, doing="memory")
                step = partial(timing.memory_step, provider.call, full, self.gradient)
                step()  # what the first call alone needs is not the loss's
                peak = timing.extra_memory(step, self.device)
                rows.append({"provider": provider.name, "extra_bytes": None if peak is None else max(0, peak - gradients)})
        return rows

    def _providers(self, shape: Shape, compile: bool) -> list[Provider]:
        asked, peers = self.request["backends"], self.request["peers"]
        return providers(self.spec, self.arguments, shape, self.dtype, self.device, asked=asked, compile=compile, peers=peers)

    def _inputs(self, shape: Shape) -> tuple[Tensor, ...]:
        return inputs(self.spec, shape, self.dtype, self.device)

    def _running(self) -> list[Provider]:
        return [p for p in self.candidates if self.found[p.name]["status"] == "ok"]

    def _drop(self, provider: Provider, status: str, reason: str) -> None:
        self.found[provider.name].update(status=status, reason=reason)

    def _gated(self) -> tuple[Tensor, ...]:
        """Inputs of the full shape, after whoever cannot run or disagrees was dropped."""
        self._leave_out()
        self._gate_on_few_rows()
        full = self._inputs(self.shape)
        self._gate_at_full_shape(full)
        return full

    def _leave_out(self) -> None:
        """Drop providers that cannot run here or killed an earlier worker, and those that need more memory than there is."""
        memory = timing.available_memory(self.device)
        for provider in self.candidates:
            need = provider.need(self.shape)
            if provider.name in self.request["exclude"]:
                self._drop(provider, "error", self.request["exclude"][provider.name])
            elif provider.reason is not None:
                self._drop(provider, "missing", provider.reason)
            elif memory is not None and need > memory:
                self._drop(provider, "memory", f"needs about {need / 2**30:.1f} GiB, {memory / 2**30:.1f} GiB are available")

    def _gate_on_few_rows(self) -> None:
        """Against float64, by the largest error. What torch.compile makes of the formula is compared at the full shape."""
        small = self.shape.fewer_rows(gate.SMALL)
        given = self._inputs(small)
        exact = tuple(t.double() if t.is_floating_point() else t for t in given)
        own = concrete(self.arguments, small, self.device)
        truth = gate.evaluate(partial(function_of(self.spec), backend="reference", **own), exact, self.gradient)
        calls = {p.name: p.call for p in self._providers(small, compile=False)}

        def compare(provider: Provider) -> str | None:
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
                return "its input was modified"
            if not expected:
                expected.append(result)
                return None if bool(result.loss.isfinite()) else f"loss is {float(result.loss)}"
            return gate.broad(result, expected[0], self.dtype)

        for provider in sorted(self._running(), key=lambda p: p.kind not in ("eager", "reference")):
            self._gate(provider, "full gate", compare)

    def _gate(self, provider: Provider, doing: str, compare: Callable[[Provider], str | None]) -> None:
        """A difference is FAILED; whatever a library raises is its own row, not the end of the bench."""
        self.say(event="provider", name=provider.name, doing=doing)
        try:
            reason = compare(provider)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self._drop(provider, "error", f"{type(error).__name__}: {lines[0]}"[:300])
            return
        if reason is not None:
            self._drop(provider, "FAILED", reason)

    def _time(self, full: tuple[Tensor, ...]) -> None:
        kinds = (timing.step, timing.no_grad_step) if self.gradient else (timing.no_grad_step,)
        place = Place(full)

        def step(kind: Callable[..., dict[str, float]], call: Callable[..., Any]) -> dict[str, float]:
            return kind(call, place.inputs, self.device)

        steps: dict[str, list[timing.Step]] = {p.name: [partial(step, kind, p.call) for kind in kinds] for p in self._running()}
        copied = self.shape.kind in ("rows", "pixels")
        if copied:
            steps["copy"] = [lambda: timing.copy_step(place.inputs[0], place.copy, self.device)]
            self.found["copy"] = {"provider": "copy", "kind": "copy", "status": "ok"}
        self.say(event="provider", name="", doing="timing")  # the gate at the full shape has warmed everybody up
        ours = next((p.name for kind in ("ours", "reference") for p in self._running() if p.kind == kind), None)
        seen = self.request["seen"]  # by other processes of the run
        timing.CORES.nearest = min(timing.CORES.nearest, seen["handover"] or math.inf)
        timing.YARDSTICK.usual = 1e-3 * (seen["yardstick"] or math.inf)
        before = timing.Load.now()

        def turn(its: list[timing.Step]) -> timing.Sample:
            """Calls without a gradient in every fourth round, from the first on: nobody's speed-up depends on them."""
            taken = timing.turn(its if place.moves % 4 == 1 else its[:1], self.request["steps"], self.request["patience"])
            return taken | {timing.VISIT: float(self.request["visit"])}

        turns = {name: partial(turn, its) for name, its in steps.items()}
        settling = ours if self.request["settle"] else None
        effort = self.request["budget"], self.request["least"], ROUNDS_MOST
        earlier = self.request["earlier"]
        if earlier is not None and earlier.keys() != turns.keys():
            earlier = None  # somebody has failed once
        samples = timing.rounds(turns, *effort, settling, place.move, earlier)
        noise = timing.noise(before, timing.Load.now(), samples)
        for name, taken in samples.items():
            row = self.found[name]
            counted = timing.counted(taken, samples[ours or name])
            row.update(rounds=len(counted), of=len(taken), ms=timing.summary(taken), noise=noise)
            row.update(samples=taken)  # for the next visit; the parent takes them out
            if name != "copy" and ours is not None:
                row.update(against=ours, ratio=timing.ratios(taken, samples[ours]))
                row.update(timing.certainty(taken, samples[ours], self.request["settle"]))
            if name != "copy" and copied:
                row.update(copies=timing.ratios(taken, samples["copy"]).get("both"), gb_per_s=self._speed(row["ms"], full))

    def _speed(self, ms: dict[str, dict[str, float]], full: tuple[Tensor, ...]) -> dict[str, float]:
        """GB/s by the bytes that the loss must move: logits read (twice for sums over the batch), gradient written."""
        size = self.shape.logits * self.dtype.itemsize
        labels = sum(t.numel() * t.element_size() for t in full if not t.is_floating_point())
        passes = {"both": 3 if self.spec.family == "region" else 2, "no_grad": 1}
        return {mode: (n * size + labels) / ms[mode]["median"] / 1e6 for mode, n in passes.items() if mode in ms}
