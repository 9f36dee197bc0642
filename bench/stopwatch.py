"""Turns, rounds, ratios within a round, and peak memory.

In every round each provider has a turn, in rotating order, so that whatever the machine does meanwhile hits all alike, and
speed-ups are ratios within a round. A turn is a warm-up and a few steps, whose median counts. A step is what training does: a
fresh leaf, forward, backward, gradient released; for scores, which are read and not trained on, a call without a gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

TURN = 0.02  #: seconds of a turn at least, after its warm-up
MOST = 200  #: rounds

Call = Callable[..., Any]
Step = Callable[[], Any]


def step_of(call: Call, inputs: tuple[Tensor, ...], gradient: bool) -> Step:
    """A training step, or a call without a gradient."""

    def train() -> None:
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
        call(*leaves).backward()

    def read() -> None:
        with torch.no_grad():
            call(*inputs)

    return train if gradient else read


def turn(step: Step, device: str) -> float:
    """Seconds of a step. On a GPU by events in its stream, after a cold L2 cache each time."""
    if device == "cpu":
        timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=TURN).median
    from triton.testing import do_bench

    return 1e-3 * do_bench(step, warmup=5, rep=int(1e3 * TURN), return_mode="median")


def rounds(
    turns: Mapping[str, Callable[[], float]], seconds: float, least: int, deadline: float = math.inf
) -> dict[str, list[float]]:
    """What each turn took, by name, one a round: the least number of rounds, and more until so many seconds have passed.

    One alone where the deadline of the run (`time.monotonic`) has come.
    """
    taken: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    start = time.monotonic()
    for i in range(MOST):
        now = time.monotonic()
        if (i >= least and now - start > seconds) or (i > 0 and now > deadline):
            break
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            taken[name].append(turns[name]())
    return taken


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile, with four digits."""
    found = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    return [float(f"{value:.4g}") for value in found.tolist()]


def ratios(theirs: list[float], ours: list[float]) -> list[float]:
    """Quartiles of their time / ours, round by round."""
    return quartiles([a / b for a, b in zip(theirs, ours, strict=True)])


def limit_memory() -> None:
    """From here on what is more than there is raises in this process, which else is killed, or others with it."""
    try:
        import resource

        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        if limit.exists() and limit.read_text().strip() != "max":  # a container may have less
            free.append(int(limit.read_text()) - int(used.read_text()))
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + min(free), resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError):  # the system does not tell, or has a limit already
        pass


def extra_bytes(step: Step, gradients: list[int], device: str) -> int:
    """Peak of what torch's allocator hands out during a step, apart from gradients of these sizes."""
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return max(0, torch.cuda.max_memory_allocated() - before - sum(gradients))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]  # freed: negative
    for gradient in sorted(gradients, reverse=True):  # the last block of that size, or else the last that has room for it
        _, its = max((size == gradient, i) for i, size in enumerate(sizes) if size >= gradient)
        sizes[its] -= gradient
    return max(accumulate(sizes), default=0)
