"""The same recipes with the classes of the logits split over two processes (gloo)."""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any

import recipes
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from recipes import Found, Made, Recipe

import pylosses.parallel

LOSSES = tuple(name for name in recipes.FUNCTIONS if name in pylosses.parallel.FORMULAS)
WORLD = 2


def _split(classes: int, seed: int) -> list[slice]:
    """Shards need not be equal, and the first one or the last may be empty."""
    cut = (0, classes // 2, classes // 3, classes)[seed % 4]
    return [slice(0, cut), slice(cut, classes)]


def _rank(rank: int, port: int, questions: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=20)
    )
    while (recipe := questions.get()) is not None:
        try:
            answers.put((rank, _call(recipe, rank)))
        except Exception as error:
            answers.put((rank, f"{type(error).__name__}: {error}"))


def _call(r: Recipe, rank: int) -> tuple[Any, Any]:
    made = recipes.make(r)
    part = _split(r.shape[1], r.seed)[rank]
    x = recipes.laid_out(made.x, r.layout)[:, part].detach().requires_grad_()
    given: tuple[Any, ...] = () if made.y is None else (made.y[:, part] if r.target == "soft" else made.y,)
    function = getattr(pylosses.parallel, recipes.FUNCTIONS[r.loss])
    if r.transform == "checkpoint":
        loss = torch.utils.checkpoint.checkpoint(lambda t: function(t, *given, **made.arguments), x, use_reentrant=False)
    else:
        loss = function(x, *given, **made.arguments)
    (gradient,) = torch.autograd.grad(loss, x, made.upstream)
    return loss.detach(), gradient


class Pair:
    """Two processes that wait for recipes; started by the first question, and again after one that did not answer."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for queue in self.questions if self.processes else ():
            queue.put(None)
        for process in self.processes:
            process.join(5)
            process.kill()
        self.processes = []

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        self.questions, self.answers = [context.SimpleQueue() for _ in range(WORLD)], context.Queue()
        self.processes = [context.Process(target=_rank, args=(i, port, q, self.answers)) for i, q in enumerate(self.questions)]
        for process in self.processes:
            process.start()

    def judge(self, r: Recipe) -> str | None:
        r = r._replace(features=0, lazy="", device="")
        made: Made = recipes.make(r)
        if not self.processes:
            self._start()
        for queue in self.questions:
            queue.put(r)
        found: dict[int, Any] = {}
        try:
            for _ in range(WORLD):
                rank, answer = self.answers.get(timeout=60)
                found[rank] = answer
        except Exception:
            with contextlib.suppress(Exception):
                self.__exit__()
            return f"ranks {sorted(set(range(WORLD)) - set(found))} gave no answer in a minute"
        failed = [answer for answer in found.values() if isinstance(answer, str)]
        if failed:
            return failed[0]
        loss = found[0][0]
        if not torch.equal(loss.nan_to_num(7.0), found[1][0].nan_to_num(7.0)):
            return "the ranks have two losses"
        whole = Found(loss, (torch.cat([found[i][1] for i in range(WORLD)], 1),))
        statistics = torch.float64 if r.dtype == "float64" else torch.float32
        return recipes.compare(r, made, whole, recipes.truth(r, made, statistics), recipes.truth(r, made, torch.float64))
