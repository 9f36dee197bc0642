"""Interleaved rounds, their spread, the noise of the machine, and peak memory.

In every round each provider has a turn, in rotating order, so that whatever the machine does meanwhile hits all alike;
speed-ups are ratios within a round. A turn is a few steps in a row, until the three fastest agree, and the fastest counts: any
of them may pay for what others did to caches and memory, twice to five times the usual where a virtual machine hands free
memory back to its host. That charges whoever allocates much, which is not us: a first step alone made eager entropy at llama
74x and 90x ours, with a second it is 36x. A step is what training does: a fresh leaf, forward, backward, gradient released.
Every round has its inputs elsewhere in memory, on huge pages with both allocators: with 4 KiB pages a loss takes a tenth more
or less by where they lie.

The host of a virtual machine moves its cores together and apart, every few seconds or for an hour: two that share a cache share
a way to memory as well, and a copy of 512 MiB takes 31 ms there, 21 ms where they are apart. So before and after a step we look
how long a cache line takes from one thread to the other, and only steps between cores that are near count, if there are any.
Cores apart are made to wake each other, as hosts put near each other what does: they were together within 3 s, mostly within
1.5, 7 of 9 times; at rest once in 9. Near is the slower state, for ours more than for others: cross-entropy at llama
takes 34 ms near and 30 apart, eager 473 and 510, so that 13.8x becomes 17.2x. A host that moves cores apart does so within
half a second of work; longer steps cannot be kept near, feel it less (4 to 8 %) and count wherever they are.

malloc keeps what others freed or maps it anew, by what a process did before: compiled Dice with CE at one street scene is 2.7x
or 6.6x ours by that alone. So each configuration has a process of its own (`worker`).

What neighbours do lasts for seconds or many minutes, and slows those down most who use memory best: for half an hour
InfoNCE took 900 ms instead of 640, Dice 46 instead of 33, Dice's eager formula 1130 instead of 960. So after
every turn the same work is timed as in all processes of a run, and turns beside which it took longer than usual do not
count, if there are others.

Not everything that moves can be seen. A fresh page of 4 KiB costs 1.6 to 2.4 us here, by what the host does, more where two
threads ask at once, and eager HEM at llama spends about three quarters of its processor time on them: 2.6 s a step in one
minute, 3.5 or 5 s in another, ours 40 to 50 ms all the while. No number of rounds in one minute shows that. So `run` comes back
later, and a ratio is a number only if its visits agree; else it is a range.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pylosses
from pylosses import cpu

from .providers import scalar

MODES = ("forward", "backward", "both", "no_grad")
AGREE = 0.05  #: a turn goes on until its three fastest steps differ by less
SHORTEST = 0.2  #: and so many seconds have passed since the first
SETTLED = 0.04  #: rounds go on while the median of a ratio is less certain than this: two runs then differ by 15 % at worst,
LONGER = 3  #: for so many times the budget and twice the least number of rounds,
LONGEST = 12.0  #: but not beyond so many seconds
LEAST = 1e-3  #: seconds: ratios of shorter steps are mostly call overhead, and nobody waits for them to settle
FAR = 2.5  #: times the shortest handover of a cache line: cores that need longer are apart
HELD = 0.3  #: seconds of a step for which cores can be kept together
FRESH = 5e-3  #: seconds for which cores stay where they were seen
CALLS = 400  #: with which cores apart wake each other, a tenth of a second,
PULLS = 4  #: so many times before a step for each second of patience,
FIRST = 60  #: and before the first of a run, which has to see what near is
SLOW = 1.15  #: times the usual time of the yardstick: turns beside which it takes longer are disturbed
HUGE_PAGE = 1 << 21  #: bytes


class Clock:
    """Moments on the CPU."""

    def settle(self) -> None:
        """Before the first moment of a step."""

    def now(self) -> Any:
        return time.perf_counter()

    def seconds(self, *moments: Any) -> list[float]:
        """Between neighbouring moments."""
        return [end - start for start, end in pairwise(moments)]


class DeviceClock(Clock):
    """Moments in the stream of a GPU, by events: neither the host's time nor a wait between forward and backward is counted.

    A step begins with a cold L2 cache: it follows on zeros written over more than any such cache holds, which also gives the
    host the time to queue the step.
    """

    FLUSH = 512 << 20  # bytes

    def __init__(self, device: str) -> None:
        self.zeros = torch.empty(self.FLUSH, dtype=torch.int8, device=device)

    def settle(self) -> None:
        torch.cuda.synchronize(self.zeros.device)
        self.zeros.zero_()

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, *moments: Any) -> list[float]:
        torch.cuda.synchronize(self.zeros.device)
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(moments)]


@cache
def clock_of(device: str) -> Clock:
    return Clock() if device == "cpu" else DeviceClock(device)


def step(call: Callable[..., Any], inputs: tuple[Tensor, ...], device: str) -> dict[str, float]:
    """Seconds of one training step: forward, backward, both."""
    clock = clock_of(device)
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    clock.settle()
    start = clock.now()
    loss = call(*leaves)
    middle = clock.now()
    loss.backward()
    end = clock.now()
    forward, backward = clock.seconds(start, middle, end)
    return {"forward": forward, "backward": backward, "both": forward + backward}


def no_grad_step(call: Callable[..., Any], inputs: tuple[Tensor, ...], device: str) -> dict[str, float]:
    """Seconds of one call without gradient."""
    clock = clock_of(device)
    with torch.no_grad():
        clock.settle()
        start = clock.now()
        result = call(*inputs)
        end = clock.now()
        del result
    return {"no_grad": clock.seconds(start, end)[0]}


def copy_step(source: Tensor, buffer: Tensor, device: str) -> dict[str, float]:
    """Seconds of a copy of the logits into a warm buffer: one read and one write, the floor for a loss with a gradient."""
    clock = clock_of(device)
    clock.settle()
    start = clock.now()
    buffer.copy_(source)
    return {"both": clock.seconds(start, clock.now())[0]}


def moved(tensor: Tensor) -> Tensor:
    """The same numbers elsewhere in memory; on huge pages, if they are many and the system has any."""
    if tensor.device.type != "cpu" or tensor.nbytes < 4 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tensor.clone()
    pages = mmap.mmap(-1, tensor.nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones may have none
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class Cores:
    """Where two threads run: in cores that share a cache, or apart. More threads, or one, are always near."""

    def __init__(self) -> None:
        self.nearest = math.inf  # ns
        self.last = math.nan
        self.seen = -math.inf  # when

    def near(self) -> bool:
        """Whether they are about as near as they have ever been seen."""
        if torch.get_num_threads() != 2:
            return True
        if self.nearest == math.inf and self.seen == -math.inf:  # the first time: they may be apart now
            for _ in range(FIRST):
                self._look()
                if math.isnan(self.last):  # nobody can tell here
                    break
                wake_each_other()
        if time.perf_counter() - self.seen > FRESH:
            self._look()
        return not self.last > FAR * self.nearest

    def _look(self) -> None:
        self.last = cpu.handover_ns()
        self.seen = time.perf_counter()
        self.nearest = min(self.nearest, self.last)

    def gather(self, pulls: int) -> bool:
        """Whether they are near, perhaps after a pull."""
        for _ in range(pulls):
            if self.near():
                return True
            wake_each_other()
        return self.near()


def wake_each_other() -> None:
    """Two threads on two cores; one asks after a breath, in which both cores fall asleep, and the other answers."""
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()
    answered: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ask() -> None:
        os.sched_setaffinity(0, {cores[0]})  # of this thread alone
        for _ in range(CALLS):
            time.sleep(1e-4)
            asked.put(None)
            answered.get()

    def answer() -> None:
        os.sched_setaffinity(0, {cores[1]})
        for _ in range(CALLS):
            asked.get()
            answered.put(None)

    threads = [threading.Thread(target=one) for one in (ask, answer)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


CORES = Cores()


class Yardstick:
    """The same work in all processes of a run: where it takes longer than usual, neighbours are busy."""

    def __init__(self) -> None:
        self.usual = math.inf  # seconds; a run's first process cannot know
        self.last = 0.0

    @cached_property
    def work(self) -> Callable[[], Any]:
        source, square = moved(torch.ones(16 << 20)), torch.ones(640, 640)  # 64 MiB: more than caches hold
        target, product = moved(source), torch.ones_like(square)

        def work() -> None:
            target.copy_(source)
            torch.mm(square, square, out=product)

        work()
        return work

    def pace(self) -> float:
        """Seconds now or before, whichever is more, of which both are the fastest of three.

        0 where cores are apart, which makes copies faster and is no measure of neighbours.
        """
        before, self.last = self.last, 0.0
        if CORES.near():
            self.last = min(_seconds(self.work) for _ in range(3))
        return max(before, self.last)

    def disturbed(self, pace: float) -> bool:
        return pace > SLOW * self.usual


def usual(paces: list[float]) -> float | None:
    """The yardstick's time in the calmer visits of a run: the lower quartile, as one lucky moment moves the shortest for good.

    By 1.2 times the shortest, 90 of 107 visits of a run were to be repeated.
    """
    known = sorted(pace for pace in paces if pace > 0)
    return known[len(known) // 4] if known else None


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


YARDSTICK = Yardstick()
Sample = dict[str, float]
Step = Callable[[], Sample]
Samples = dict[str, list[Sample]]
APART = "apart"  #: in a sample of cores that were not near
PACE = "pace"  #: in every sample: seconds of the yardstick before or after it
VISIT = "visit"  #: in every sample: its number, from 1
MARKS = (APART, PACE, VISIT)
AGREEING = 3  #: steps of a turn


def turn(steps: Iterable[Step], most: int, patience: float) -> Sample:
    """What each of these steps takes when nothing disturbs it; each is repeated up to `most` times.

    The first is the one whose ratios matter and has `patience` seconds, the others have a fifth of them.
    """
    first, *others = (_undisturbed(step, most, patience if i == 0 else patience / 5) for i, step in enumerate(steps))
    every = [(mode, seconds) for taken in others for mode, seconds in taken.items() if mode not in MARKS]
    return dict(every) | first | {PACE: YARDSTICK.pace()}


def _undisturbed(step: Step, most: int, patience: float) -> Sample:
    """The fastest of a few between near cores, or long ones, as disturbances only add; two at least.

    A first one alone cannot be told from a long one: with huge pages, 2 MiB that the host took cost 5 ms instead of 0.2, and
    eager entropy at llama was 109x ours instead of 13x.
    """
    near: list[Sample] = []
    apart: list[Sample] = []
    start, long = math.inf, False
    while True:
        together = long or CORES.gather(int(PULLS * patience))
        taken = step()
        long = _whole(taken) > HELD
        (near if long or (together and CORES.near()) else apart).append(taken)
        now = time.perf_counter()
        start = min(start, now)  # the first may bring back what the host took
        seconds = now - start
        enough = len(near) >= most or seconds >= (SHORTEST if _agree(near) else patience)
        if enough and len(near) + len(apart) > 1:
            break
    if apart:  # which are short, so that a long one among them, a compiler's first or one that waited for memory, was disturbed
        near = [sample for sample in near if _whole(sample) <= HELD]
    fastest = {mode: min(sample[mode] for sample in near or apart) for mode in taken}
    return fastest if near else fastest | {APART: 1.0}


def _agree(taken: list[Sample]) -> bool:
    if len(taken) < AGREEING:
        return False
    first, _, third, *_ = sorted(sum(sample.values()) for sample in taken)
    return third < (1 + AGREE) * first


def rounds(
    steps: Mapping[str, Step],
    budget: float,
    least: int,
    most: int,
    ours: str | None = None,
    begin: Callable[[], None] = lambda: None,
    earlier: Samples | None = None,
) -> Samples:
    """Samples of every step by name, one a round, for about `budget` seconds; longer while ratios to `ours` are uncertain.

    Every round starts with `begin`. Samples of an `earlier` visit come first.
    """

    def enough(rounds: int, seconds: float) -> bool:
        if rounds < least or seconds <= budget:
            return False
        tried = (rounds >= 2 * least and seconds > LONGER * budget) or seconds > LONGEST
        return tried or ours is None or uncertainty(samples, ours) <= SETTLED

    samples: Samples = {name: list(earlier[name]) if earlier else [] for name in steps}
    names = list(steps)
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for i in range(most):
            if enough(i, time.perf_counter() - start):
                break
            begin()
            shift = i % len(names)
            for name in names[shift:] + names[:shift]:
                samples[name].append(steps[name]())
    finally:
        gc.enable()
    return samples


def counted(*providers: list[Sample]) -> list[tuple[Sample, ...]]:
    """The rounds in which turns of these providers were between near cores and beside calm neighbours, if there are three.

    Else those between near cores, if there are two; else all.
    """
    every = list(zip(*providers, strict=True))
    near = [turns for turns in every if not any(APART in taken for taken in turns)]
    calm = [turns for turns in near if not any(map(_disturbed, turns))]
    return calm if len(calm) > 2 else near if len(near) > 1 else every


def _disturbed(sample: Sample) -> bool:
    return APART in sample or YARDSTICK.disturbed(sample.get(PACE, 0.0))


def _whole(sample: Sample) -> float:
    """Seconds of a step with its gradient, or of a call where there is none."""
    return sample["both"] if "both" in sample else sample["no_grad"]


def uncertainty(samples: Samples, ours: str) -> float:
    """By how much more rounds would move the medians of ratios of whole steps to ours; infinite where turns were disturbed.

    Steps below `LEAST` have no say.
    """
    found = [0.0]
    for name, taken in samples.items():
        if name in (ours, "copy"):  # a floor is no contestant
            continue
        pairs = counted(taken, samples[ours])
        if _short(pairs):
            continue
        if len(pairs) < 3 or any(_disturbed(sample) for pair in pairs for sample in pair):
            return math.inf
        found.append(_error_of_rounds(_whole_ratios(pairs)))
    return max(found)


#: Standard error of a mean by the range of so many values: 1 / (expected range of normal ones * root of their number).
ERROR_BY_RANGE = {2: 0.627, 3: 0.341, 4: 0.243}


def certainty(taken: list[Sample], ours: list[Sample], repeated: bool) -> dict[str, Any]:
    """Of the ratio of whole steps: standard error by rounds and by visits, its median by visit, and whether it has settled.

    What a machine does between visits moves a ratio more than what it does between rounds. Where visits are `repeated`, a
    single one tells nothing: None. Steps below `LEAST` settle at once.
    """
    pairs = counted(taken, ours)
    if _short(pairs):
        return {"uncertain": 0.0, "by_visit": [], "settled": True}
    visits: dict[float, list[tuple[Sample, ...]]] = {}
    for pair in pairs:
        visits.setdefault(pair[0].get(VISIT, 1.0), []).append(pair)
    medians = [statistics.median(_whole_ratios(its)) for its in visits.values()]
    by_visit, count = [round(median, 4) for median in medians], len(medians)
    if len(pairs) < 3 or (repeated and count < 2):
        return {"uncertain": None, "by_visit": by_visit, "settled": False}
    error = _error_of_rounds(_whole_ratios(pairs))
    if count > 1:
        error = max(error, ERROR_BY_RANGE[min(count, 4)] * (max(medians) - min(medians)) / statistics.median(medians))
    return {"uncertain": round(error, 4), "by_visit": by_visit, "settled": error <= SETTLED}


def _short(pairs: list[tuple[Sample, ...]]) -> bool:
    return statistics.median(min(map(_whole, pair)) for pair in pairs) < LEAST


def _whole_ratios(pairs: list[tuple[Sample, ...]]) -> list[float]:
    return [_whole(a) / _whole(b) for a, b in pairs]


def _error_of_rounds(ratios: list[float]) -> float:
    low, median, high = statistics.quantiles(ratios, n=4)
    return (high - low) / median / math.sqrt(len(ratios))


def summary(samples: list[Sample]) -> dict[str, dict[str, float]]:
    """Median and quartiles of each mode, in milliseconds."""
    return {mode: spread([1e3 * sample[mode] for (sample,) in turns]) for mode, turns in _by_mode(samples)}


def ratios(samples: list[Sample], ours: list[Sample]) -> dict[str, dict[str, float]]:
    """How many times longer than ours, round by round: median and quartiles for each mode."""
    return {mode: spread([a[mode] / b[mode] for a, b in pairs]) for mode, pairs in _by_mode(samples, ours)}


def _by_mode(*providers: list[Sample]) -> Iterator[tuple[str, list[tuple[Sample, ...]]]]:
    """The rounds that count among those that have a mode, for each: not every round has all of them."""
    every = list(zip(*providers, strict=True))
    for mode in MODES:
        those = [turns for turns in every if all(mode in taken for taken in turns)]
        if those:
            yield mode, counted(*map(list, zip(*those, strict=True)))


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    ordered = sorted(values)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else (ordered[0],) * 3
    return {"median": statistics.median(ordered), "low": low, "high": high}


# Noise


@dataclass
class Load:
    """Counters of the processor at one moment."""

    busy: float
    steal: float
    total: float
    own: float
    frequency: float | None

    @staticmethod
    def now() -> Load:
        try:
            fields = [float(v) for v in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        except (OSError, IndexError, ValueError):
            fields = [0.0] * 8
        ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
        user, nice, system, idle, wait, irq, soft, steal = fields[:8]
        times = os.times()
        busy = user + nice + system + irq + soft
        return Load(busy, steal, busy + steal + idle + wait, (times.user + times.system) * ticks, _frequency())


def _frequency() -> float | None:
    """Mean clock in MHz, or None where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        values = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return None
    return sum(values) / len(values) if values else None


def noise(before: Load, after: Load, samples: Samples) -> dict[str, Any]:
    """Shares of processor time that others took, and whether the times deserve suspicion.

    Beside them the shares of turns between cores apart and of disturbed ones, the yardstick's median time in ms and
    its usual one, and the shortest handover between two cores in ns.
    """
    turns = [taken for its in samples.values() for (taken,) in counted(its)]
    apart, slow = sum(APART in taken for taken in turns), sum(map(_disturbed, turns))
    paces = [taken.get(PACE, 0.0) for taken in turns]
    cores = {
        "apart": round(apart / max(1, len(turns)), 4),
        "slow": round(slow / max(1, len(turns)), 4),
        "pace": round(1e3 * statistics.median(paces), 3) if paces else 0.0,
        "handover": round(CORES.nearest, 1) if math.isfinite(CORES.nearest) else None,
        "yardstick": round(1e3 * YARDSTICK.usual, 3) if math.isfinite(YARDSTICK.usual) else None,
    }
    total = after.total - before.total
    if total <= 0:
        return {"steal": None, "others": None, "clock": None, **cores, "noisy": None}
    steal = (after.steal - before.steal) / total
    others = max(0.0, (after.busy - before.busy) - (after.own - before.own)) / total
    clock = after.frequency / before.frequency if before.frequency and after.frequency else None
    noisy = steal > 0.02 or others > 0.10 or slow > 0 or (clock is not None and abs(clock - 1) > 0.05)
    shares = {"steal": round(steal, 4), "others": round(others, 4), "clock": clock and round(clock, 4)}
    return {**shares, **cores, "noisy": noisy}


# Memory


def available_memory(device: str = "cpu") -> int | None:
    """Bytes that can be had without swapping, or None where the system does not tell."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    try:  # a container may have less
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            found.append(int(limit) - used)
    except (OSError, ValueError):
        pass
    return min(found) if found else None


def extra_memory(run: Callable[[], Any], device: str) -> int | None:
    """Peak bytes of one step beyond what lay there before, everything counted: torch's tensors and everybody's malloc.

    On the CPU this is the high-water mark of the resident memory, which the kernel resets on request; None where it cannot.
    It is exact when malloc gives freed blocks back at once: see `EXACT_MALLOC`.
    """
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    if hasattr(pylosses, "clear_pool"):
        pylosses.clear_pool()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        run()
        return max(0, _status("VmHWM") - before)
    except (OSError, AttributeError, KeyError):
        return None


#: glibc's settings under which every block of some size is mapped on its own and given back when it is freed. Read at start.
EXACT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def memory_step(call: Callable[..., Any], inputs: tuple[Tensor, ...], gradient: bool) -> None:
    """The step whose memory is measured; its gradients live until it ends."""
    if not gradient:
        with torch.no_grad():
            call(*inputs)
        return
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    scalar(call(*leaves)).backward()
