"""Can the bench be trusted? Gate, rounds, memory, rows on disk, and every stated equality with another library."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pylosses import cli, cpu
from pylosses.checking import function_of
from pylosses.spec import LOSSES

against, eager, gate, parity, peers, providers, report, run, shapes, timing, worker = (
    cli.bench_module(name)
    for name in ("against", "eager", "gate", "parity", "peers", "providers", "report", "run", "shapes", "timing", "worker")
)

ROWS = shapes.Shape("rows", (12, 40), "rows")
SMALL_SHAPES = (
    ROWS,
    shapes.Shape("pixels", (2, 19, 6, 5), "pixels"),
    shapes.Shape("contrastive", (16, 8), "contrastive"),
    shapes.Shape("linear", (8, 30, 16), "linear"),
)


# What is measured


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("cifar", (128, 10)),
        ("imagenet", (256, 1000)),
        ("llama", (4096, 32000)),
        ("llama3", (2048, 128256)),
        ("gemma", (512, 256000)),
        ("cityscapes", (4, 19, 512, 1024)),
        ("ade20k", (8, 150, 256, 256)),
        ("camvid", (12, 12, 360, 480)),
        ("medical3d", (1, 4, 96, 96, 96)),
        ("contrastive", (4096, 512)),
    ],
)
def test_named_shapes(name, sizes):
    assert shapes.find(name)[0].sizes == sizes


def test_shapes_by_their_sizes_and_unknown_names():
    assert [(s.sizes, s.kind) for s in shapes.find("64x100")] == [((64, 100), "rows")]
    assert [(s.sizes, s.kind) for s in shapes.find("2x19x8x8")] == [((2, 19, 8, 8), "pixels")]
    assert len(shapes.find("sweep")) == len(shapes.SWEEP)
    with pytest.raises(ValueError, match="unknown shape 'moon'; the shapes are: cifar, imagenet"):
        shapes.find("moon")


@pytest.mark.parametrize("shape", shapes.SHAPES.values(), ids=lambda s: s.name)
def test_a_shape_with_fewer_rows_keeps_its_classes(shape):
    small = shape.fewer_rows(1 << 16)
    assert small.logits <= max(1 << 16, 4 * shape.classes, 16 * shape.classes)
    assert len(small.sizes) == len(shape.sizes)
    if shape.kind != "contrastive":
        assert small.classes == shape.classes


def test_every_loss_is_timed_or_has_a_reason():
    for spec in LOSSES.values():
        timed = any(shapes.fits(spec, shape) for shape in shapes.SHAPES.values())
        assert timed != (spec.family in shapes.NOT_TIMED or spec.name in shapes.NOT_TIMED), spec.name


@pytest.mark.parametrize("name", [name for name in eager.EAGER if name in LOSSES])
def test_the_eager_formula_is_the_loss(name):
    spec, entry = LOSSES[name], eager.EAGER[name]
    compared = 0
    for shape in SMALL_SHAPES:
        if not shapes.fits(spec, shape):
            continue
        given = shapes.inputs(spec, shape, torch.float64, "cpu")
        own = providers.concrete(entry.arguments, shape, "cpu")
        truth = gate.evaluate(lambda *t, own=own: function_of(spec)(*t, backend="reference", **own), given)
        assert gate.sharp(gate.evaluate(lambda *t, own=own: entry.function(*t, **own), given), truth, torch.float64) is None
        compared += 1
    assert compared


def test_every_timed_loss_has_an_eager_formula():
    for spec in LOSSES.values():
        timed = any(shapes.fits(spec, shape) for shape in shapes.SHAPES.values())
        assert (spec.name in eager.EAGER) == timed, spec.name


def test_a_peer_with_other_arguments_makes_a_variant():
    assert providers.variants(LOSSES["dice"], peers=False) == [{}]
    assert {"absent": "zero"} in providers.variants(LOSSES["dice"], peers=True)


# The gate


def measured(peers=False, exclude=None, **changes):
    """Rows of focal at a small shape, measured in this process."""
    request = {
        "loss": "focal",
        "variant": 0,
        "shape": "rows",
        "shape_kind": "rows",
        "sizes": (12, 40),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "backends": ["reference"],
        "compile": False,
        "peers": peers,
        "budget": 0.0,
        "least": 2,
        "steps": 2,
        "settle": False,
        "patience": 1.0,
        "earlier": None,
        "visit": 1,
        "seen": {"handover": None, "yardstick": None},
        "exclude": exclude or {},
        **changes,
    }
    return {row["provider"]: row for row in worker.Measurement(request, lambda **event: None).times()}


def test_rows_hold_times_ratios_and_copies():
    rows = measured()
    assert set(rows) == {"pylosses reference", "eager", "copy"}
    for name in ("pylosses reference", "eager"):
        row = rows[name]
        assert row["status"] == "ok" and row["rounds"] == 2
        assert set(row["ms"]) == {"forward", "backward", "both", "no_grad"}
        assert row["ms"]["both"]["low"] <= row["ms"]["both"]["median"] <= row["ms"]["both"]["high"]
        assert row["copies"]["median"] > 0 and row["gb_per_s"]["both"] > 0
    assert rows["pylosses reference"]["ratio"]["both"]["median"] == 1
    assert rows["eager"]["against"] == "pylosses reference"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda x, y: 1.01 * eager.focal(x, y), "error of the loss"),
        (lambda x, y: eager.focal(x, y).detach() + 0.9 * (f := eager.focal(x, y)) - 0.9 * f.detach(), "error of the gradient"),
        (lambda x, y: eager.focal(x, y) * torch.nan, "error of the loss"),
        (lambda x, y: eager.focal(x, y) + 0 * x.data.add_(1).sum(), "error of the loss|input was modified"),
    ],
    ids=["loss", "gradient", "nan", "input"],
)
def test_a_provider_that_disagrees_fails_and_gets_no_time(wrong, reason, monkeypatch):
    monkeypatch.setitem(eager.EAGER, "focal", eager.Eager(wrong))
    row = measured()["eager"]
    assert row["status"] == "FAILED"
    assert re.search(reason, row["reason"])
    assert "ms" not in row and "ratio" not in row


def test_a_provider_that_is_wrong_only_at_the_full_shape_fails(monkeypatch):
    monkeypatch.setattr(gate, "SMALL", 200)

    def wrong(x, y):
        return eager.focal(x, y) if len(x) < 12 else eager.focal(x[:6], y[:6])

    peer = peers.Peer("half", None, "focal", "half(x, y)", lambda torch: wrong)
    monkeypatch.setattr(providers, "PEERS", (peer,))
    rows = measured(peers=True)
    assert rows["half"]["status"] == "FAILED" and "mean error" in rows["half"]["reason"]
    assert rows["eager"]["status"] == "ok"


def test_a_provider_that_raises_is_a_row(monkeypatch):
    def broken(x, y):
        raise RuntimeError("out of order")

    monkeypatch.setitem(eager.EAGER, "focal", eager.Eager(broken))
    rows = measured()
    assert (rows["eager"]["status"], rows["eager"]["reason"]) == ("error", "RuntimeError: out of order")
    assert rows["pylosses reference"]["status"] == "ok"


def test_a_missing_peer_and_one_that_needs_cuda_are_rows(monkeypatch):
    missing = peers.Peer("no-such-library", "no_such_library.losses", "focal", "f(x, y)", lambda m: m.f)
    cuda = peers.Peer("needs-cuda", "torch", "focal", "f(x, y)", lambda m: m.f, device="cuda")
    monkeypatch.setattr(providers, "PEERS", (missing, cuda))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = measured(peers=True)
    assert (rows["no-such-library"]["status"], rows["no-such-library"]["reason"]) == (
        "missing",
        "not installed: pip install no-such-library",
    )
    assert (rows["needs-cuda"]["status"], rows["needs-cuda"]["reason"]) == ("missing", "needs CUDA")


def test_losses_of_a_package_that_does_not_import_are_imported_alone(tmp_path, monkeypatch):
    (tmp_path / "half_broken" / "losses").mkdir(parents=True)
    (tmp_path / "half_broken" / "__init__.py").write_text("import half_broken.losses, no_such_dependency")
    (tmp_path / "half_broken" / "losses" / "__init__.py").write_text("from .one import ONE")
    (tmp_path / "half_broken" / "losses" / "one.py").write_text("ONE = 1")
    (tmp_path / "half_broken" / "models.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    peer = peers.Peer("half-broken", "half_broken.losses", "focal", "", lambda losses: lambda x, y: losses.ONE)
    call, reason = peer.load()
    assert reason is None and call(None, None) == 1
    assert "half_broken" not in sys.modules  # to everybody else it is as broken as before
    models = dataclasses.replace(peer, module="half_broken.models")
    assert models.load() == (None, "cannot be imported: No module named 'no_such_dependency'")


def test_too_little_memory_is_a_row(monkeypatch):
    monkeypatch.setattr(timing, "available_memory", lambda device: 1024)
    assert {row["status"] for name, row in measured().items() if name != "copy"} == {"memory"}


def test_a_backend_without_a_kernel_gives_its_reason_and_the_reference_stands_in():
    rows = measured(loss="confidence_scores", backends=None)
    fused = rows["pylosses cpu"]
    assert (fused["status"] == "ok") == ("pylosses reference" not in rows)
    assert fused["status"] == "ok" or fused["reason"]
    assert set(rows["eager"]["ms"]) == {"no_grad"}  # scores have no backward


# Time, noise, memory


def test_rounds_interleave_and_rotate():
    order = []
    steps = {name: (lambda name=name: order.append(name) or {"both": 1.0}) for name in "abc"}
    samples = timing.rounds(steps, budget=0.0, least=3, most=10)
    assert "".join(order) == "abcbcacab"
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3, "c": 3}


def test_rounds_go_on_while_a_ratio_is_uncertain(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    #  settled; so many times the budget, a second a round; twice the least number of rounds
    for theirs, budget, expected in (([2.0], 2.0, 3), ([1.0, 3.0], 2.0, 2 * timing.LONGER), ([1.0, 3.0], 0.1, 6)):
        values, ours = iter(theirs * 40), iter(theirs[::-1] * 40)
        steps = {"ours": lambda its=ours: {"both": next(its)}, "theirs": lambda its=values: {"both": next(its)}}
        assert len(timing.rounds(steps, budget=budget, least=3, most=40, ours="ours")["ours"]) == expected


def placed(cores):
    """Samples of rounds with cores near (n) or apart (a), numbered."""
    return [{"both": 1.0, "round": float(i)} | ({timing.APART: 1.0} if core == "a" else {}) for i, core in enumerate(cores)]


def kept(*providers):
    """The rounds that count."""
    return [int(first["round"]) for first, *_ in timing.counted(*providers)]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [("nnn", "nnn", [0, 1, 2]), ("nann", "nnna", [0, 2]), ("naan", "nnna", [0, 1, 2, 3])],
    ids=["near", "two apart", "a single round is no median"],
)
def test_rounds_between_cores_apart_do_not_count(ours, theirs, expected):
    assert kept(placed(ours), placed(theirs)) == expected


def test_turns_beside_busy_neighbours_do_not_count(monkeypatch):
    """As the yardstick tells, by what is usual in the run, unless there are too few others."""
    monkeypatch.setattr(timing.YARDSTICK, "usual", 1.0)
    ours, theirs = placed("nnnnan"), placed("nnnnnn")
    ours[0][timing.PACE] = 1.01 * timing.SLOW
    ours[2][timing.PACE] = 0.99 * timing.SLOW
    theirs[5][timing.PACE] = 2.0
    assert kept(ours, theirs) == [1, 2, 3], "a pair of providers counts where both are calm"
    assert kept(ours) == [1, 2, 3, 5] and kept(theirs) == [0, 1, 2, 3, 4]
    assert kept(ours[:3], theirs[:3]) == [0, 1, 2], "two are no median"
    assert timing.uncertainty({"ours": ours, "theirs": theirs}, "ours") == 0.0
    assert timing.uncertainty({"ours": ours[:3], "theirs": theirs[:3]}, "ours") == math.inf
    monkeypatch.setattr(timing.YARDSTICK, "usual", 0.5)
    assert kept(ours[:4], theirs[:4]) == [0, 1, 2, 3]


@pytest.mark.parametrize("near", [True, False])
def test_the_yardstick_tells_the_slower_of_before_and_after(monkeypatch, near):
    """The fastest of three each time; between cores apart it tells nothing."""
    seconds = iter([0.3, 0.1, 0.2, 0.5, 0.6, 0.4, 0.2, 0.2, 0.2])
    monkeypatch.setattr(timing, "_seconds", lambda work: next(seconds))
    monkeypatch.setattr(timing.CORES, "near", lambda: near)
    yardstick = timing.Yardstick()
    assert [yardstick.pace() for _ in range(3)] == ([0.1, 0.4, 0.4] if near else [0.0] * 3)
    assert not yardstick.disturbed(0.4), "the first process of a run does not know what is usual"
    yardstick.usual = 0.2
    assert yardstick.disturbed(0.4) and not yardstick.disturbed(0.0)


def test_calls_without_gradient_may_be_missing_in_some_rounds():
    """Each mode has its median over the rounds that count among those that have it."""
    ours = [{"both": 1.0, "no_grad": 0.5}, {"both": 2.0}, {"both": 3.0, "no_grad": 0.7}]
    theirs = [{"both": 4.0, "no_grad": 1.0}, {"both": 8.0}, {"both": 12.0, "no_grad": 1.4}]
    assert {mode: values["median"] for mode, values in timing.summary(ours).items()} == {"both": 2000.0, "no_grad": 600.0}
    assert {mode: values["median"] for mode, values in timing.ratios(theirs, ours).items()} == {"both": 4.0, "no_grad": 2.0}


def test_nobody_waits_for_ratios_of_short_steps():
    ours, theirs = [{"both": 1e-4}] * 3, [{"both": t} for t in (1e-3, 2e-3, 3e-3)]
    assert timing.uncertainty({"ours": ours, "theirs": theirs}, "ours") == 0.0
    long = [{"both": 20 * timing.LEAST}] * 3
    assert timing.uncertainty({"ours": long, "theirs": [{"both": 20 * sample["both"]} for sample in theirs]}, "ours") > 0.1


def visited(*visits):
    """Samples of ours, a second each, and of theirs: three rounds a visit, around such a ratio."""
    theirs = [{"both": ratio * (1 + d), timing.VISIT: v + 1.0} for v, ratio in enumerate(visits) for d in (-0.005, 0.0, 0.005)]
    return theirs, [{"both": 1.0, timing.VISIT: sample[timing.VISIT]} for sample in theirs]


def test_a_ratio_settles_when_visits_agree():
    assert timing.certainty(*visited(10.0), repeated=False)["settled"], "a quick run has but one"
    assert timing.certainty(*visited(10.0), repeated=True) == {"uncertain": None, "by_visit": [10.0], "settled": False}
    close = timing.certainty(*visited(10.0, 10.5), repeated=True)
    assert close == {"uncertain": pytest.approx(0.627 * 0.5 / 10.25, abs=1e-4), "by_visit": [10.0, 10.5], "settled": True}
    far = timing.certainty(*visited(10.0, 11.0), repeated=True)
    assert far == {"uncertain": pytest.approx(0.627 * 1.0 / 10.5, abs=1e-4), "by_visit": [10.0, 11.0], "settled": False}
    assert timing.certainty(*visited(10.0, 11.0, 10.5), repeated=True)["settled"], "a third visit between them"
    assert not timing.certainty(*visited(10.0, 11.0, 9.0, 12.0, 8.0), repeated=True)["settled"]


def test_the_error_by_the_range_is_that_of_normal_values():
    generator = torch.Generator().manual_seed(0)
    for count, factor in timing.ERROR_BY_RANGE.items():
        values = torch.randn(100_000, count, generator=generator)
        expected_range = float((values.amax(1) - values.amin(1)).mean())
        assert factor * expected_range == pytest.approx(count**-0.5, rel=0.01)


def test_nobody_waits_for_visits_of_short_steps():
    short = [{"both": t} for t in (1e-4, 2e-4, 3e-4)]
    assert timing.certainty(short, short, repeated=True) == {"uncertain": 0.0, "by_visit": [], "settled": True}


def test_what_is_usual_is_no_lucky_moment():
    assert timing.usual([]) is None and timing.usual([0.0]) is None, "between cores apart it tells nothing"
    assert timing.usual([7.0]) == 7.0
    assert timing.usual([7.2, 5.7, 7.1, 0.0, 9.0]) == 7.1


def test_the_yardstick_is_real_work():
    yardstick = timing.Yardstick()
    assert 0 < timing._seconds(yardstick.work) < 10


def test_rounds_go_on_until_enough_are_between_near_cores(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    theirs = iter(placed("anann" + 40 * "a"))
    steps = {"ours": lambda: {"both": 1.0, "round": 0.0}, "theirs": lambda: next(theirs)}
    samples = timing.rounds(steps, budget=2.0, least=3, most=40, ours="ours")
    assert len(samples["ours"]) == 5
    assert kept(samples["theirs"], samples["ours"]) == [1, 3, 4]


def test_a_second_visit_adds_to_the_rounds_of_the_first():
    earlier = {"ours": placed("nn"), "theirs": placed("nn")}
    steps = {name: lambda: {"both": 2.0} for name in earlier}
    samples = timing.rounds(steps, budget=0.0, least=3, most=10, earlier=earlier)
    assert samples["ours"] == placed("nn") + 3 * [{"both": 2.0}] and earlier["ours"] == placed("nn")


@pytest.mark.parametrize(("threads", "expected"), [(2, [False, True, False, True, True]), (4, [True] * 5)])
def test_cores_are_near_or_apart_by_the_time_of_a_handover(monkeypatch, threads, expected):
    """Compared with the shortest so far, a few at first; looked at again after a while, and only for two threads."""
    first = [60.0, 30.0] + [170.0] * (timing.FIRST - 2)
    readings = iter([*first, 31.0, 170.0, 29.0, math.nan])
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "wake_each_other", lambda: None)
    monkeypatch.setattr(timing.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(timing.cpu, "handover_ns", lambda: next(readings))
    cores = timing.Cores()
    for near in expected:
        assert cores.near() is near
        now[0] += timing.FRESH / 2
        assert cores.near() is near, "not looked at"
        now[0] += timing.FRESH


def test_cores_apart_are_told_by_what_an_earlier_process_saw(monkeypatch):
    readings = iter([170.0, 60.0])
    monkeypatch.setattr(timing.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(timing.cpu, "handover_ns", lambda: next(readings))
    monkeypatch.setattr(timing, "FRESH", -1.0)  # looked at every time
    cores = timing.Cores()
    cores.nearest = 30.0
    assert not cores.near() and cores.near() and cores.nearest == 30.0


def test_cores_that_cannot_be_looked_at_are_near_and_not_pulled(monkeypatch):
    monkeypatch.setattr(timing.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(timing.cpu, "handover_ns", lambda: math.nan)
    monkeypatch.setattr(timing, "wake_each_other", lambda: pytest.fail("pulled"))
    assert timing.Cores().gather(8)


@pytest.mark.parametrize(("readings", "pulls"), [("n", 0), ("aan", 2), ("a" * 100, 8)])
def test_cores_apart_are_pulled_together(monkeypatch, readings, pulls):
    seen, pulled = iter(readings), []
    monkeypatch.setattr(timing, "wake_each_other", lambda: pulled.append(1))
    cores = timing.Cores()
    monkeypatch.setattr(cores, "near", lambda: next(seen) == "n")
    assert cores.gather(8) is (readings[-1] == "n") and len(pulled) == pulls


def test_threads_that_wake_each_other_end_and_leave_the_others_where_they_may_run():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("the system binds no threads")
    before, threads = os.sched_getaffinity(0), threading.active_count()
    timing.wake_each_other()
    assert os.sched_getaffinity(0) == before and threading.active_count() == threads


@pytest.mark.skipif(cpu._cpu is None, reason=f"no C++ kernels: {cpu.absent}")
def test_a_handover_takes_nanoseconds():
    found = [cpu.handover_ns() for _ in range(5)]
    if len(os.sched_getaffinity(0)) > 1:
        assert 1 < min(found) < 2000, found
    else:
        assert all(math.isnan(ns) or ns > 0 for ns in found)


@pytest.mark.skipif(cpu._cpu is None or not hasattr(os, "sched_setaffinity"), reason="needs C++ kernels and affinities")
def test_a_handover_on_a_single_core_ends():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from pylosses import cpu; cpu.handover_ns()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_round_has_its_inputs_elsewhere():
    for shape in ((3, 4), (3 << 10, 1024)):
        x = torch.randn(shape)
        place = worker.Place((x, torch.arange(4)))
        before = [place.inputs[0]]
        for _ in range(2):
            place.move()
            assert torch.equal(place.inputs[0], x) and torch.equal(place.inputs[1], torch.arange(4))
            assert place.copy.shape == shape
            assert place.inputs[0].data_ptr() not in [t.data_ptr() for t in (*before, place.copy)]
            before.append(place.inputs[0])


def test_more_rounds_make_a_median_more_certain():
    ours = [{"both": 1.0}] * 9
    theirs = [{"both": seconds} for seconds in (2.0, 2.15, 2.3) * 3]
    few, more = (timing.uncertainty({"ours": ours[:n], "theirs": theirs[:n]}, "ours") for n in (3, 9))
    assert few == pytest.approx(0.3 / 2.15 / 3**0.5) and more == pytest.approx(0.3 / 2.15 / 9**0.5)
    assert timing.uncertainty({"ours": ours[:3], "copy": theirs[:3]}, "ours") == 0.0, "a copy is a floor, not a contestant"
    assert timing.uncertainty({"ours": ours[:2], "theirs": theirs[:2]}, "ours") == math.inf


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        ((0.5, 0.51, 0.49, 0.4), 3),
        ((0.9, 0.5, 0.7, 0.51, 0.5, 0.4), 5),
        ((0.03, 0.03, 0.05, 0.05, 0.03, 0.05, 0.01), 6),
        (tuple(i / 100 for i in range(30, 8, -2)), 10),
        ((9.0, 2.0, 2.5, 0.8), 3),
        ((2.5, 6.0, 4.0), 2),
    ],
    ids=["three agree", "until three agree", "for a while", "ten at most", "not for long", "two at least"],
)
def test_a_turn_is_a_few_steps_and_the_fastest_counts(monkeypatch, seconds, steps):
    taken, left = turned(monkeypatch, seconds, "n" * len(seconds))
    assert taken == {"both": min(seconds[:steps]), "no_grad": 1.0, timing.PACE: 7.0}
    assert len(seconds) - left == steps


@pytest.mark.parametrize(
    ("seconds", "cores", "expected"),
    [
        ((0.4, 0.45, 0.5, 0.51, 0.52), "annnn", {"both": 0.5}),
        ((0.9, 0.5, 1.0, 1.8, 0.9), "aaaaa", {"both": 0.5, timing.APART: 1.0}),
    ],
    ids=["near ones count", "apart for too long"],
)
def test_steps_between_cores_apart_do_not_count(monkeypatch, seconds, cores, expected):
    taken, left = turned(monkeypatch, seconds, cores)
    assert taken == {**expected, "no_grad": 1.0, timing.PACE: 7.0} and left == 0


def test_long_steps_count_wherever_they_are(monkeypatch):
    taken, left = turned(monkeypatch, (0.5, 0.51, 0.49), "aaa", held=0.3)
    assert taken == {"both": 0.49, "no_grad": 1.0, timing.PACE: 7.0} and left == 0
    taken, left = turned(monkeypatch, (4.5, 4.0, 3.5), "aaa", held=0.3)
    assert taken["both"] == 4.0 and left == 1, "the first may pay for others"
    taken, _ = turned(monkeypatch, (0.79, 0.21) + (0.2,) * 20, "a" * 22, held=0.3)
    assert (taken["both"], taken[timing.APART]) == (0.2, 1.0), "a long one among short ones was disturbed"


def turned(monkeypatch, seconds, cores, held=math.inf):
    """A turn with steps that take so long between such cores, and how many steps are left."""
    monkeypatch.setattr(timing, "HELD", held)
    given, now = iter(zip(seconds, cores, strict=True)), [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    where = ["n"]
    monkeypatch.setattr(timing.CORES, "near", lambda: where[0] == "n")
    monkeypatch.setattr(timing, "wake_each_other", lambda: None)
    monkeypatch.setattr(timing.YARDSTICK, "pace", lambda: 7.0)

    def step():
        taken, where[0] = next(given)
        now[0] += taken
        return {"both": taken}

    def without_gradient():
        where[0] = "n"
        return {"no_grad": 1.0}

    return timing.turn((step, without_gradient), 10, 4.0), len(list(given))


def test_ratios_are_taken_round_by_round():
    slow, fast = [{"both": 2.0}, {"both": 40.0}, {"both": 6.0}], [{"both": 1.0}, {"both": 20.0}, {"both": 2.0}]
    assert timing.ratios(slow, fast)["both"]["median"] == 2.0


def test_noise_is_the_share_that_others_took(monkeypatch):
    before = timing.Load(busy=0, steal=0, total=0, own=0, frequency=2000)
    quiet = timing.Load(busy=100, steal=0, total=200, own=100, frequency=2000)
    near, apart = {"ours": placed("nn")}, {"ours": placed("nn"), "theirs": placed("na")}
    best = {"handover": None, "yardstick": None}
    calm = {"steal": 0, "others": 0, "clock": 1, "apart": 0, "slow": 0, "pace": 0, **best, "noisy": False}
    monkeypatch.setattr(timing.CORES, "nearest", math.inf)
    monkeypatch.setattr(timing.YARDSTICK, "usual", math.inf)
    assert timing.noise(before, quiet, near) == calm
    monkeypatch.setattr(timing.CORES, "nearest", 28.04)
    monkeypatch.setattr(timing.YARDSTICK, "usual", 0.0071)
    assert timing.noise(before, quiet, apart) == {
        **calm, "apart": 0.25, "slow": 0.25, "handover": 28.0, "yardstick": 7.1, "noisy": True
    }  # fmt: skip
    slow = {"ours": [{"both": 1.0, timing.PACE: 0.01}] * 3}
    assert timing.noise(before, quiet, slow) == {
        **calm, "slow": 1, "pace": 10, "handover": 28.0, "yardstick": 7.1, "noisy": True
    }  # fmt: skip
    for change in ({"busy": 150}, {"steal": 20}, {"frequency": 1500}):
        assert timing.noise(before, dataclasses.replace(quiet, **change), near)["noisy"] is True


def test_peak_memory_counts_what_was_freed_again():
    def step():
        for _ in range(2):
            torch.ones(48 << 20, dtype=torch.uint8)

    peak = timing.extra_memory(step, "cpu")
    if peak is None:
        pytest.skip("the peak cannot be reset here")
    assert 44 << 20 <= peak <= 100 << 20


# Rows on disk


def some_rows(**changes):
    about = {
        "loss": "focal", "arguments": "", "shape": "rows", "shape_kind": "rows", "sizes": (12, 40), "dtype": "float32",
        "device": "cpu", "threads": 1, "allocator": "default",
    }  # fmt: skip
    return [{**about, **row, **changes} for row in measured().values()]


def test_rows_are_on_disk_as_soon_as_they_are_added(tmp_path):
    record = report.Record.start({"device": "cpu", "threads": 1}, tmp_path / "a" / "run.json", tmp_path / "b" / "history.jsonl")
    for count in (1, 2):
        rows = some_rows(dtype=f"dtype {count}")
        record.add(rows)
        saved = json.loads((tmp_path / "a" / "run.json").read_text())
        assert len(saved["rows"]) == count * len(rows)
        assert saved["commit"] and saved["versions"]["torch"] == torch.__version__ and saved["cpu"]["model"]
        lines = (tmp_path / "b" / "history.jsonl").read_text().splitlines()
        assert [json.loads(line)["provider"] for line in lines] == count * [row["provider"] for row in rows]
    record.add([{**rows[0], "status": "measured again"}])
    again = report.Record.load(tmp_path / "a" / "run.json").rows
    assert [row["status"] for row in again] == ["ok"] * len(rows) + ["measured again"] + ["ok"] * (len(rows) - 1)


class FakeWorker(run.Worker):
    """Dies at the provider "bad" unless that one is left out."""

    SCRIPT = """
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    for name in ("good", "bad"):
        if name in request["exclude"]:
            continue
        print(json.dumps({"event": "provider", "name": name, "doing": "timing"}), flush=True)
        if name == "bad":
            os.kill(os.getpid(), 9)
    rows = [{"provider": "good", "status": "ok"}, {"provider": "bad", "status": "error", "reason": request["exclude"]["bad"]}]
    print(json.dumps({"event": "rows", "rows": rows}), flush=True)
"""

    def _start(self):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", self.SCRIPT], stdin=pipe, stdout=pipe, text=True, bufsize=1)
        return self._heard()


def test_a_provider_that_kills_its_process_costs_one_row():
    configuration = run.Configuration("focal", 0, "", ROWS, "float32", False, ("default",))
    fake = FakeWorker({})
    try:
        rows = run._times(configuration, "default", fake, {"device": "cpu", "threads": 1}, lambda event: None)
    finally:
        fake.stop()
    assert [(row["provider"], row["status"]) for row in rows] == [("good", "ok"), ("bad", "error")]
    assert "killed by signal 9: too little memory?" in rows[1]["reason"]


IN_A_CHILD = """
import os, sys, time
from pylosses.cli import bench_module
worker = bench_module("worker")
def work():
    print("busy", os.getppid(), flush=True)
    {work}
worker._in_a_child(work)
print("next", flush=True)
"""


def worker_that(work):
    """A process that does this in a child, which has begun; and the number that its child knows it by."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", IN_A_CHILD.format(work=work)], stdin=pipe, stdout=pipe, text=True)
    busy, parent = process.stdout.readline().split()
    assert busy == "busy"
    return process, int(parent)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_worker_ends_with_the_bench_that_started_it():
    """Killed half-way, the bench leaves nobody behind who is still measuring."""
    process, parent = worker_that("time.sleep(60)")
    try:
        assert process.poll() is None and parent == process.pid
        process.stdin.close()
        assert process.stdout.read() == "", "the child is gone too: nobody holds the pipe"
        assert process.wait(20) == 1
    finally:
        process.kill()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("work", "code"), [("pass", 0), ("os.kill(os.getpid(), 9)", -9), ("os._exit(3)", 3)])
def test_a_worker_ends_as_its_child_does(work, code):
    process, _ = worker_that(work)
    try:
        assert process.wait(20) == code
        assert process.stdout.read() == ("" if code else "next\n")
    finally:
        process.kill()


def test_a_worker_measures_each_configuration_in_a_process_of_its_own():
    """What a measurement imports stays for the next, what it computes does not."""
    shape = shapes.Shape("rows", (12, 40), "rows")
    configuration = run.Configuration("focal", 0, "", shape, "float32", False, ("default",))
    settings = {
        "device": "cpu", "threads": 2, "backends": None, "peers": False, **run.EFFORT["quick"], "earlier": None, "visit": 1,
        "seen": {"handover": None, "yardstick": None},
    }  # fmt: skip
    one = run.Worker({})
    try:
        first = run._times(configuration, "default", one, settings, lambda event: None)
        process = one.process
        second = run._times(configuration, "default", one, settings, lambda event: None)
        assert one.process is process and process.poll() is None
        request = {**settings, **configuration.request, "loss": "none", "exclude": {}, "task": "times"}
        broken = one.ask(request, lambda event: None)
        assert broken[0]["status"] == "error" and "KeyError" in broken[0]["reason"]
    finally:
        one.stop()
    for rows in (first, second):
        assert {row["status"] for row in rows if row["kind"] in ("eager", "copy")} == {"ok"}


@pytest.mark.parametrize("full", [True, False])
def test_a_full_run_comes_back_to_what_did_not_settle(monkeypatch, full):
    """To everything once, with the rounds it has, then to the settings that did not settle, the least certain first.

    What was measured beside busy neighbours has not settled, also if that is seen only later. Memory is not measured again.
    """
    losses = ("uncertain", "disturbed", "calm", "short")
    plan = [run.Configuration(loss, 0, "", ROWS, "float32", False, tuple(run.ALLOCATORS)) for loss in losses]
    asked = []

    def times(configuration, allocator, worker, settings, show):
        seen = {"handover": 30.0, "yardstick": 7.1} if asked else {"handover": None, "yardstick": None}
        assert settings["seen"] == seen, "what a process has seen, the next knows"
        loss, bad, visit = configuration.loss, allocator != "default", settings["visit"]
        asked.append((loss, allocator, visit))
        assert settings["earlier"] == (None if visit == 1 else {"ours": [1.0] * (visit - 1), "theirs": [2.0] * (visit - 1)})
        pace = 10.0 if bad and loss == "disturbed" and visit < 3 else 7.1
        uncertain = 0.2 if bad and loss == "uncertain" else 0.01
        uncertain = 0.0 if loss == "short" else None if visit == 1 else uncertain
        about = {"loss": loss, "allocator": allocator, "against": "ours", "noise": {"handover": 30.0, "pace": pace}}
        rows = [{**about, "provider": name, "samples": [t] * visit} for name, t in (("ours", 1.0), ("theirs", 2.0))]
        return [{**rows[0], "uncertain": 0.0}, {**rows[1], "uncertain": uncertain}, {"loss": loss, "provider": "absent"}]

    def add_memory(rows, *others):
        for row in rows:
            row["extra_bytes"] = 7

    monkeypatch.setattr(run, "_times", times)
    monkeypatch.setattr(run, "_add_memory", add_memory)
    measured = list(run._measured(plan, {"budget": 1.0, "settle": full}, Console(file=io.StringIO())))
    assert asked[:8] == [(loss, allocator, 1) for loss in losses for allocator in run.ALLOCATORS]
    assert [len(rows) for rows in measured[:4]] == [6] * 4 and not any("samples" in row for rows in measured for row in rows)
    second = [(loss, allocator, 2) for loss in losses[:3] for allocator in run.ALLOCATORS]
    more = [("disturbed", "huge pages", 3), ("uncertain", "huge pages", 3), ("uncertain", "huge pages", 4)]
    assert sorted(asked[8:14]) == (sorted(second) if full else []) and asked[14:] == (more if full else [])
    assert all(row["extra_bytes"] == 7 for rows in measured[4:] for row in rows)


def test_a_full_run_does_not_come_back_for_ever(monkeypatch):
    plan = [run.Configuration("loss", 0, "", ROWS, "float32", False, ("default",))]
    noise = {"handover": None, "yardstick": None, "pace": 0.0}
    row = {"provider": "theirs", "against": "ours", "allocator": "default", "status": "ok", "samples": [], "noise": noise}
    monkeypatch.setattr(run, "_times", lambda *asked: [{**row, "uncertain": None}])
    monkeypatch.setattr(run, "_add_memory", lambda *asked: None)
    settings = {"budget": 1.0, "settle": True}
    assert len(list(run._measured(plan, settings, Console(file=io.StringIO())))) == run.VISITS
    monkeypatch.setattr(run, "LONGEST", 0.0)
    assert len(list(run._measured(plan, settings, Console(file=io.StringIO())))) == 1


def test_the_command_measures_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--loss", "focal", "--shape", "16x12", "--backend", "reference", "--budget", "0.01", "--threads", "1"]
    code = cli.main(["bench", *options, "--no-compile", "--no-history", "--json", "out.json"])
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "focal, 16x12 float32" in shown and "pylosses reference" in shown
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["allocator"] for row in rows} == {"default", "huge pages"}
    assert {row["status"] for row in rows} == {"ok"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "moon"], "unknown shape 'moon'"),
        (["--dtype", "int8"], "unknown dtype 'int8'; the dtypes are: float32"),
        (["--loss", "auroc"], "nothing to measure: auroc does not take any shape"),
        (["--loss", "dice", "--shape", "cifar"], "nothing to measure: dice does not take cifar"),
        (["--against", "nowhere.json"], "--against nowhere.json is no record of a run"),
    ],
)
def test_options_that_make_no_sense_are_exit_code_2(options, message, capsys):
    assert cli.main(["bench", *options]) == 2
    assert message in capsys.readouterr().err


# Table and pictures


def test_the_table_shows_failures_and_reasons_instead_of_numbers():
    rows = some_rows()
    rows[1] = {**rows[1], "status": "FAILED", "reason": "largest error of the loss is 1e-02"}
    absent = {"provider": "absent", "kind": "peer", "status": "missing", "reason": "not installed: pip install absent"}
    rows.append({**rows[0], **absent})
    out = io.StringIO()
    report.table(rows, Console(file=out, width=170))
    lines = {line.split("  ")[1]: line for line in out.getvalue().splitlines() if line.startswith("  ")}
    assert "FAILED: largest error of the loss is 1e-02" in lines["eager"]
    assert "not installed: pip install absent" in lines["absent"]


def test_a_ratio_that_did_not_settle_is_a_range():
    row = {"ratio": {"both": {"median": 53.94, "low": 49.02, "high": 58.1}}, "settled": True}
    assert report.times_ours(row) == "53.9x"
    assert report.times_ours({**row, "settled": False}) == "49.0-58.1x"
    assert report.times_ours({**row, "settled": False, "by_visit": [53.0, 71.3]}) == "49.0-71.3x", "visits that disagree"
    assert report.times_ours({"status": "missing"}) == ""


def test_runs_are_compared_by_their_ratios(tmp_path):
    """Long times alone, and only ratios that moved by more than 15 % are named."""
    old = report.Record.start({"device": "cpu", "threads": 1}, tmp_path / "old.json", None)
    old.add(some_rows())
    rows = [row for row in old.rows if "both" in row.get("ratio", {}) and row["provider"] != row["against"]]
    assert rows, "no ratios to compare"
    for row in rows:
        row["ms"]["both"]["median"] = 100.0
        row["ratio"]["both"]["median"] = 10.0
    new = report.Record.start({"device": "cpu", "threads": 1}, None, None)
    new.rows = copy.deepcopy(old.rows)

    def said():
        out = io.StringIO()
        against.show(old, new, Console(file=out, width=170))
        return out.getvalue()

    moved = next(row for row in new.rows if row["provider"] == rows[0]["provider"])
    moved["ratio"]["both"]["median"] = 11.4
    assert f"{len(rows)} of {len(rows)} ratios above 1 ms that settled in both runs" in said()
    assert "0 of 0 ratios above 1 ms that did not settle" in said()
    moved["ratio"]["both"]["median"] = 11.6
    assert f"{len(rows) - 1} of {len(rows)} ratios" in said() and f"{moved['provider']} 10.00x -> 11.60x" in said()
    next(row for row in new.rows if row["kind"] == "copy")["ms"]["both"]["median"] *= 2
    assert ", a copy of the logits 2.00x as long" in said()
    moved["ms"]["both"]["median"] = 2.0  # ours takes 0.2 ms
    assert f"{len(rows) - 1} of {len(rows) - 1} ratios" in said()
    moved["ms"]["both"]["median"], moved["settled"] = 100.0, False
    assert "0 of 1 ratios above 1 ms that did not settle" in said()
    old.add([])  # written as they are now
    assert against.main([str(tmp_path / "old.json"), str(tmp_path / "old.json")]) == 0
    assert against.main([]) == 2


def test_pictures_are_drawn_from_a_record(tmp_path):
    pytest.importorskip("matplotlib")
    rows = []
    for shape in (ROWS, *shapes.SWEEP[:3]):
        for allocator in ("default", "huge pages"):
            for row in some_rows(shape=shape.name, sizes=shape.sizes, allocator=allocator, extra_bytes=1 << 20):
                fused = row["provider"] == "pylosses reference"
                rows.append({**row, "against": "pylosses cpu", "kind": "ours" if fused else row["kind"]})
    record = report.Record.start({"device": "cpu", "threads": 1}, None, None)
    record.rows = rows
    written = report.plots(record, tmp_path)
    assert [file.name for file in written] == ["speedup.png", "classes.png", "memory.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written)


def test_many_bars_are_split_by_shape():
    rows = [{"shape": shape} for shape in ("a", "b") for _ in range(report.BARS_MOST)]
    assert [(name, len(page)) for name, page in report._pages("speedup", rows)] == [
        ("speedup-a", report.BARS_MOST),
        ("speedup-b", report.BARS_MOST),
    ]


def test_every_provider_has_its_own_colour_in_every_picture():
    assert len(set(report.COLOURS.values())) == len(report.COLOURS)
    libraries = {peer.library for peer in peers.PEERS if peer.timed} - {"torch"}
    assert libraries <= report.COLOURS.keys()
    assert report.colour({"provider": "kornia", "kind": "peer"}) == report.COLOURS["kornia"]
    assert report.colour({"provider": "pylosses cuda", "kind": "ours"}) == report.COLOURS["ours"]


# Parity with other libraries


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda p: f"{p.library}-{p.loss}-{p.theirs}")
def test_a_peer_agrees_under_the_stated_arguments(peer):
    found = parity.difference(peer)
    if isinstance(found, str):
        assert peer.library != "torch"
        pytest.skip(f"{peer.library}: {found}")
    assert found.shapes > 0
    assert max(found.loss, found.gradient) <= parity.TOLERANCE[peer.single]


def test_parity_notices_a_difference():
    wrong = dataclasses.replace(peers.PEERS[0], arguments={"label_smoothing": 0.1})
    assert parity.difference(wrong).loss > 1e-3


def test_the_printed_parity_table_is_up_to_date():
    file = Path(__file__).parents[1] / "bench" / "results" / "parity.md"
    if not file.exists():
        pytest.skip("not in a source tree")
    text = file.read_text()
    for peer in peers.PEERS:
        assert f"| {peer.loss} | {peer.library}" in text and f"`{peer.theirs}`" in text and f"`{parity._ours(peer)}`" in text
    for library, theirs, loss, why in peers.DIFFERENT:
        assert f"| {loss} | {library} | `{theirs}` | {why} |" in text


def test_device_clock(monkeypatch):
    """On a GPU: an event before and after forward and after backward, nothing waited for between them, a cold cache before."""
    said = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            said.append("event")

        def elapsed_time(self, other):
            assert said[-1] == "synchronize"
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: said.append("synchronize"))
    monkeypatch.setattr(timing.DeviceClock, "FLUSH", 64)
    clock = timing.DeviceClock("cpu")
    clock.zeros.fill_(1)
    monkeypatch.setattr(timing, "clock_of", lambda device: clock)

    def call(x, y):
        said.append("call")
        assert not clock.zeros.any(), "the cache was not flushed"
        return torch.nn.functional.cross_entropy(x, y)

    x, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    before = x.clone()
    assert timing.step(call, (x, y), "cuda") == {"forward": 0.002, "backward": 0.002, "both": 0.004}
    assert timing.no_grad_step(call, (x, y), "cuda") == {"no_grad": 0.002}
    assert said[:6] == ["synchronize", "event", "call", "event", "event", "synchronize"]
    assert said[6:] == ["synchronize", "event", "call", "event", "synchronize"]
    assert torch.equal(x, before) and x.grad is None
    assert timing.copy_step(x, torch.empty(3, 4), "cuda") == {"both": 0.002}
