"""Can the bench be trusted? Gate, rounds, memory, budget, record, promises, and every stated equality with another library."""

from __future__ import annotations

import argparse
import dataclasses
import io
import math
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pylosses import cli
from pylosses.checking import function_of
from pylosses.spec import LOSSES

NAMES = "bars", "eager", "gate", "measure", "parity", "peers", "providers", "report", "run", "shapes", "stopwatch"
bars, eager, gate, measure, parity, peers, providers, report, run, shapes, stopwatch = map(cli.bench_module, NAMES)

ROOT = Path(__file__).parents[1]
RECORD, PAGE, LIBRARIES = (
    ROOT / "bench" / "results" / "cpu.json",
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "libraries.md",
)
ROWS = shapes.Shape("rows", (12, 40), "rows")
SMALL_SHAPES = (ROWS, shapes.Shape("pixels", (2, 19, 6, 5), "pixels"), shapes.Shape("linear", (8, 30, 16), "linear"))
SETTINGS = {"device": "cpu", "threads": 1, "backends": ["reference"], "peers": False, "seconds": 0.0, "least": 2}


# What is measured


def test_shapes_by_name_by_their_sizes_and_unknown_names():
    assert shapes.find("imagenet")[0].sizes == (256, 1000)
    assert [(s.sizes, s.kind) for s in shapes.find("64x100")] == [((64, 100), "rows")]
    assert [(s.sizes, s.kind) for s in shapes.find("2x19x8x8")] == [((2, 19, 8, 8), "pixels")]
    with pytest.raises(ValueError, match="unknown shape 'moon'; the shapes are: cifar, imagenet"):
        shapes.find("moon")


@pytest.mark.parametrize("shape", shapes.SHAPES.values(), ids=lambda s: s.name)
def test_a_shape_with_fewer_rows_keeps_its_classes(shape):
    small = shape.fewer_rows(1 << 16)
    assert small.logits <= max(1 << 16, 16 * shape.classes) and len(small.sizes) == len(shape.sizes)
    assert shape.kind == "contrastive" or small.classes == shape.classes


def test_every_loss_is_timed_or_has_a_reason():
    for spec in LOSSES.values():
        timed = any(shapes.fits(spec, shape) for shape in shapes.SHAPES.values())
        assert timed != (spec.family in shapes.NOT_TIMED or spec.name in shapes.NOT_TIMED), spec.name


@pytest.mark.parametrize("name", eager.EAGER)
def test_the_eager_formula_is_the_loss(name):
    spec = LOSSES[name]
    fitting = [shape for shape in SMALL_SHAPES if shapes.fits(spec, shape)]
    assert fitting
    for shape in fitting:
        given = shapes.inputs(spec, shape, torch.float64, "cpu")
        truth = gate.evaluate(lambda *t: function_of(spec)(*t, backend="reference"), given)
        assert gate.sharp(gate.evaluate(eager.EAGER[name], given), truth, torch.float64) is None


def test_nine_tokens_of_ten_are_easy():
    given = shapes.inputs(LOSSES["linear_hem"], shapes.Shape("linear-easy", (40, 30, 64), "linear"), torch.float32, "cpu")
    losses = function_of(LOSSES["linear_hem"])(*given, reduction="none", backend="reference")
    assert (losses > 0).sum() == 4


# The gate


def measured(loss="focal", shape=ROWS, exclude=None, **changes):
    """Rows of a loss at a small shape, measured in this process."""
    one = run.Configuration(loss, shape)
    about = {"compile": False, "variant": 0, "timed": True, "weighed": False, "deadline": math.inf, "exclude": exclude or {}}
    rows = measure.Measurement({**SETTINGS, **one.about, **about, **changes}, lambda **event: None).rows()
    return {row["provider"]: row for row in rows}


def test_rows_hold_times_ratios_and_copies():
    rows = measured()
    assert set(rows) == {"pylosses reference", "eager", "copy"}
    for row in rows.values():
        low, median, high = row["ms"]
        assert row["status"] == "ok" and row["rounds"] == 2 and 0 < low <= median <= high
    assert rows["pylosses reference"]["ratio"] == [1.0, 1.0, 1.0]
    assert rows["eager"]["against"] == "pylosses reference" and rows["eager"]["copies"][1] > 0


WRONG = {
    "loss": (lambda x, y: 1.01 * eager.focal(x, y), "error of the loss"),
    "gradient": (lambda x, y: 0.9 * (f := eager.focal(x, y)) + 0.1 * f.detach(), "error of the gradient"),
    "nan": (lambda x, y: eager.focal(x, y) * torch.nan, "error of the loss"),
    "input": (lambda x, y: eager.focal(x, y) + 0 * x.data.add_(1).sum(), "error of the loss|input was modified"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_provider_that_disagrees_fails_and_gets_no_time(what, monkeypatch):
    wrong, reason = WRONG[what]
    monkeypatch.setitem(eager.EAGER, "focal", wrong)
    row = measured(weighed=True)["eager"]
    assert row["status"] == "FAILED" and re.search(reason, row["reason"])
    assert not {"ms", "ratio", "extra_bytes"} & row.keys()


def test_a_provider_that_is_wrong_only_at_the_full_shape_fails(monkeypatch):
    monkeypatch.setattr(gate, "SMALL", 200)
    monkeypatch.setitem(eager.EAGER, "focal", good := eager.focal)
    half = peers.Peer("half", "torch", "focal", "none")
    monkeypatch.setattr(peers.Peer, "load", lambda self: (lambda x, y: good(x, y) if len(x) < 12 else good(x[:6], y[:6]), None))
    monkeypatch.setattr(providers, "PEERS", (half,))
    rows = measured(peers=True)
    assert rows["half"]["status"] == "FAILED" and "mean error" in rows["half"]["reason"]
    assert rows["eager"]["status"] == "ok"


@pytest.mark.parametrize("same", [True, False])
def test_a_loss_of_torch_may_round_but_must_be_the_same(same, monkeypatch):
    def rounds(x, y):
        return eager.focal(x, y) * (1 if same and x.dtype == torch.float64 else 1.01)

    monkeypatch.setattr(peers.Peer, "load", lambda self: (rounds, None))
    monkeypatch.setattr(providers, "PEERS", (peers.Peer("torch", "torch", "focal", "focal"),))
    row = measured()["F.focal"]
    assert row["status"] == ("ok" if same else "FAILED")
    assert "error of the loss is 1.0e-02" in row["inexact" if same else "reason"]


def test_whoever_cannot_be_measured_is_a_row_with_its_reason(monkeypatch):
    def broken(x, y):
        raise RuntimeError("out of order")

    missing = peers.Peer("no-such-library", "no_such_library.losses", "focal", "f")
    cuda = peers.Peer("needs-cuda", "torch", "focal", "f", device="cuda")
    monkeypatch.setattr(providers, "PEERS", (missing, cuda))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(eager.EAGER, "focal", broken)
    rows = measured(peers=True, exclude={"pylosses reference": "killed by signal 9"})
    assert {name: (row["status"], row["reason"]) for name, row in rows.items() if name != "copy"} == {
        "pylosses reference": ("error", "killed by signal 9"),
        "eager": ("error", "RuntimeError: out of order"),
        "no-such-library": ("missing", "not installed: pip install no-such-library"),
        "needs-cuda": ("missing", "needs CUDA"),
    }


def test_losses_of_a_package_that_does_not_import_are_imported_alone(tmp_path, monkeypatch):
    (tmp_path / "half_broken" / "losses").mkdir(parents=True)
    (tmp_path / "half_broken" / "__init__.py").write_text("import half_broken.losses, no_such_dependency")
    (tmp_path / "half_broken" / "losses" / "__init__.py").write_text("from .one import one")
    (tmp_path / "half_broken" / "losses" / "one.py").write_text("def one(x, y): return 1")
    (tmp_path / "half_broken" / "models.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    peer = peers.Peer("half-broken", "half_broken.losses", "focal", "one")
    call, reason = peer.load()
    assert reason is None and call(None, None) == 1
    assert "half_broken" not in sys.modules  # to everybody else it is as broken as before
    models = dataclasses.replace(peer, module="half_broken.models")
    assert models.load() == (None, "cannot be imported: No module named 'no_such_dependency'")


def test_the_reference_stands_in_for_a_missing_kernel_and_is_no_rival_to_one(monkeypatch):
    """Without a formula it is what ours is compared with, but it has every guard, so nobody is faster than it."""
    rows = measured("adr", backends=None)
    fused = rows["pylosses cpu"]["status"] == "ok"
    assert ("ms" in rows["pylosses reference"]) != fused
    assert rows["pylosses reference"]["status"] == "ok"
    monkeypatch.setattr(providers, "_fused_for", lambda device: ["triton"])
    monkeypatch.setattr(type(LOSSES["adr"]), "why_not", lambda self, name: "no kernel" if name == "triton" else None)
    assert "ms" in measured("adr", backends=None)["pylosses reference"]


# Time and memory


def test_rounds_interleave_and_rotate_until_time_or_the_run_is_over():
    order = []
    turns = {name: (lambda name=name: order.append(name) or 1.0) for name in "abc"}
    assert stopwatch.rounds(turns, 0.0, 3) == {name: [1.0] * 3 for name in "abc"}
    assert "".join(order) == "abcbcacab"
    slow = {"a": lambda: time.sleep(0.01) or 1.0}
    assert 3 < len(stopwatch.rounds(slow, 0.1, 1)["a"]) <= 11
    assert len(stopwatch.rounds(slow, 9.0, 3, time.monotonic())["a"]) == 1


def test_ratios_are_taken_round_by_round():
    assert stopwatch.ratios([2.0, 40.0, 6.0], [1.0, 20.0, 2.0]) == [2.0, 2.0, 2.5]
    assert stopwatch.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 3.0, 4.0]


def test_a_turn_is_the_median_of_steps_after_a_warm_up():
    taken = iter([0.1] + [0.02] * 9)
    assert 0.02 <= stopwatch.turn(lambda: time.sleep(next(taken)), "cpu") < 0.08
    assert stopwatch.turn(lambda: None, "cpu") < 1e-4, "many short steps at once"


def test_on_a_gpu_a_turn_is_that_of_triton_testing(monkeypatch):
    asked = {}
    fake = types.SimpleNamespace(do_bench=lambda step, **options: asked.update(options) or 7.0)
    monkeypatch.setitem(sys.modules, "triton.testing", fake)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(testing=fake))
    assert stopwatch.turn(lambda: None, "cuda") == 0.007 and asked["return_mode"] == "median"


def test_a_step_has_a_fresh_leaf_and_a_reading_no_gradient():
    x, seen = torch.randn(3, 4, requires_grad=True), []
    call = lambda x, y: seen.append((x, torch.is_grad_enabled())) or x.sum()
    for gradient in (True, False):
        stopwatch.step_of(call, (x, torch.arange(3)), gradient)()
    (leaf, trained), (_, read) = seen
    assert leaf is not x and leaf.grad is not None and x.grad is None and (trained, read) == (True, False)


def test_extra_bytes_are_the_peak_without_the_gradient():
    x = torch.zeros(1000, requires_grad=True)

    def step():
        temporary = torch.empty(300, dtype=torch.uint8)
        del temporary
        kept = torch.empty(200, dtype=torch.uint8)
        x.grad = torch.empty(1000)
        return kept

    assert stopwatch.extra_bytes(step, [4000], "cpu") == 300


def test_extra_memory_sees_the_temporaries_of_a_formula():
    big = shapes.Shape("rows", (64, 4096), "rows")
    row = measured(shape=big, weighed=True)["eager"]
    assert row["extra_bytes"] >= 4 * big.logits


# Processes and budget


@pytest.fixture
def server():
    one = run.Server({})
    yield one
    one.stop()


def asked(one, server, deadline=120.0, **changes):
    return run.rows_of(one, server, {**SETTINGS, **changes}, time.monotonic() + deadline, lambda doing: None)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="the system does not tell what memory there is")
def test_more_memory_than_there_is_raises():
    greedy = "kept = [torch.empty(1 << 30, dtype=torch.uint8) for _ in range(4096)]"  # nobody touches it
    limited = f"import torch; from pylosses.cli import bench_module as b; b('stopwatch').limit_memory(); {greedy}"
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True)
    assert "RuntimeError" in done.stderr and "memory" in done.stderr


KILLER = """
import os, sys
sys.argv = ["pylosses", "bench", "--worker"]
from pylosses.cli import bench_module
eager = bench_module("eager")
eager.EAGER["focal"] = lambda x, y: os.kill(os.getpid(), 9)
bench_module("measure").serve()
"""


def test_a_server_measures_and_outlives_a_provider_that_kills_its_process(server, monkeypatch):
    monkeypatch.setattr(run.Server, "COMMAND", (sys.executable, "-c", KILLER))
    rows = {row["provider"]: row for row in asked(run.Configuration("focal", ROWS), server)}
    process = server.process
    assert rows["eager"]["status"] == "error" and "killed by signal 9: too little memory?" in rows["eager"]["reason"]
    assert rows["pylosses reference"]["status"] == "ok" and rows["pylosses reference"]["sizes"] == [12, 40]
    (broken,) = asked(run.Configuration("none", ROWS), server)
    assert broken["status"] == "error" and "KeyError" in broken["reason"]
    assert server.process is process and process.poll() is None, "a child each, the server stays"
    (late,) = asked(run.Configuration("focal", ROWS), server, deadline=0.0)
    assert (late["by"], late["reason"]) == ("budget", "stopped at the end of the budget (--budget)")
    assert server.process is None and process.poll() is not None


def test_what_does_not_fit_into_the_budget_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr(run, "rows_of", lambda one, *others: [one.shape.name])
    small, large = run.Configuration("hem", ROWS), run.Configuration("hem", shapes.SHAPES["llama"])
    out = io.StringIO()
    deadline = time.monotonic() + 2 * small.cost
    found = list(run._measured([small, large, small], {"budget": 1.0}, deadline, Console(file=out, width=170)))
    assert found == [["rows"], ["rows"]]
    assert "1 of 3 configurations did not fit into 1 min (--budget): hem llama" in out.getvalue()


def arguments(**changes):
    usual = {"loss": None, "shape": None, "dtype": None, "quick": False, "device": "cpu", "no_compile": False, "peers": True}
    return argparse.Namespace(**usual | changes)


def test_plans_have_each_configuration_once_and_fit_into_their_budgets():
    for quick in (True, False):
        plan = run.configurations(arguments(quick=quick))
        assert len(plan) == len(set(plan)) and any(one.arguments == "absent='zero'" for one in plan), "a peer's, too"
        assert sum(one.cost for one in plan) < 60 * run.EFFORT["quick" if quick else "full"]["budget"]
    asked = run.configurations(arguments(loss=[LOSSES["hem"]], shape=["256x1000"], dtype=["bfloat16"], no_compile=True))
    assert [(one.dtype, one.allocator, one.compile) for one in asked] == [
        ("bfloat16", "default", False),
        ("bfloat16", "huge pages", False),
    ]


def test_the_command_measures_writes_and_draws(tmp_path, capsys):
    options = ["--loss", "focal", "--shape", "64x2500", "--backend", "reference", "--budget", "2", "--threads", "1"]
    code = cli.main(["bench", *options, "--no-compile", "--json", str(tmp_path / "a" / "out.json")])
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "focal, (64, 2500) float32" in shown and "pylosses reference" in shown
    rows = report.Record.load(tmp_path / "a" / "out.json").rows
    assert {row["allocator"] for row in rows} == {"default", "huge pages"} and {row["status"] for row in rows} == {"ok"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "moon"], "unknown shape 'moon'"),
        (["--dtype", "int8"], "unknown dtype 'int8'; the dtypes are: float32"),
        (["--loss", "auroc"], "nothing to measure: auroc does not take any shape"),
        (["--loss", "dice", "--shape", "cifar"], "nothing to measure: dice does not take cifar"),
        (["--budget", "soon"], "expected minutes above 0, got 'soon'"),
        (["--budget", "-1"], "expected minutes above 0, got '-1'"),
        (["--loss", "hem", "--json", "/dev/null/x.json"], "/dev/null"),
    ],
)
def test_options_that_make_no_sense_are_exit_code_2(options, message, capsys):
    assert cli.main(["bench", *options]) == 2
    assert message in capsys.readouterr().err


# Record, table and pictures


def some_rows(**changes):
    """Ours takes 2 ms, eager 20 to 40, torch's own 4; of the copy 1.9."""
    about = {**run.Configuration("hem", shapes.SHAPES["llama"]).about, "status": "ok", "rounds": 3, "against": "pylosses cpu"}
    times = {"pylosses cpu": ("ours", 2.0), "eager": ("eager", 30.0), "F.hem": ("torch", 4.0), "copy": ("copy", 1.9)}
    rows = []
    for name, (by, ms) in times.items():
        row = {**about, "provider": name, "by": by, "ms": [0.9 * ms, ms, 1.1 * ms], "extra_bytes": int(1e6 * ms)}
        rows.append({**row, "ratio": [ms / 3, ms / 2, ms / 1.5], "copies": [ms / 2, ms / 1.9, ms / 1.8], **changes})
    return rows


def a_record(*rows, file=None):
    record = report.Record.start({"device": "cpu", "threads": 1}, file)
    record.add(list(rows))
    return record


def test_rows_are_on_disk_as_soon_as_they_are_added(tmp_path):
    record = a_record(file=tmp_path / "run.json")
    for count in (1, 2):
        record.add(some_rows(dtype=f"dtype {count}"))
        again = report.Record.load(tmp_path / "run.json")
        assert again.rows == record.rows and len(again.rows) == 4 * count
    assert again.header["commit"] and again.header["versions"]["torch"] == torch.__version__ and again.header["cpu"]["model"]


def test_the_table_shows_ranges_and_reasons_instead_of_numbers():
    rows = some_rows()
    rows[2] = {**rows[2], "status": "FAILED", "reason": "largest error of the loss is 1e-02"}
    rows.append({**rows[0], "provider": "absent", "by": "peer", "status": "missing", "reason": "not installed: pip install it"})
    rows += [{**rows[1], "allocator": "huge pages", "ms": [6.0, 6.0, 6.0], "rounds": 1, "ratio": [3.0] * 3}]
    out = io.StringIO()
    report.table(rows, Console(file=out, width=170))
    lines = {line.split("  ")[1]: line for line in out.getvalue().splitlines() if line.startswith("  ")}
    assert lines["eager"].split() == "eager 30 (27-33) 10-20x 6 (one round) 3x 15-17 29 MiB".split()
    assert "FAILED: largest error of the loss is 1e-02" in lines["F.hem"]
    assert "not installed: pip install it" in lines["absent"]
    line = report.headline(a_record(*rows)).splitlines()[-1]
    assert line == "| `hem_loss` | llama (2048, 32000) | 2 ms | 1-1.1 | 10-20x (3x) |  |  | 2 MiB | 29 MiB |"
    peer = {**rows[1], "provider": "kornia", "by": "peer"}
    assert (
        report.peers(a_record(rows[0], peer))
        .splitlines()[-1]
        .startswith("| kornia | `hem_loss` | llama (2048, 32000) | 2 ms |")
    )


def test_pictures_are_drawn_from_a_record(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row for allocator in run.ALLOCATORS for row in some_rows(allocator=allocator)]
    for curve in (*shapes.SWEEP[:3], *shapes.VOCABULARIES[:3]):
        rows += some_rows(shape=curve.name, sizes=list(curve.sizes), kind=curve.kind)
    written = report.plots(a_record(*rows), tmp_path)
    assert [file.name for file in written] == ["speedup.png", "memory.png", "classes.png", "linear.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written)
    assert report.plots(a_record(), tmp_path) == []


# Promises


def verdict(relation, limit, against, *rows, **changes):
    found = bars.judge(bars.Promise("hem", "llama", "float32", relation, limit, against, **changes), a_record(*rows))
    return found.word, found.measured


def test_promises_are_judged_by_medians_within_rounds():
    rows = some_rows()
    other = some_rows(loss="dice")
    assert verdict(">=", 15, "eager", *rows) == ("holds", "15 (10-20)")
    assert verdict(">=", 15.1, "eager", *rows) == ("missed", "15 (10-20)")
    assert verdict("<=", 0.4, "F.hem", *rows) == ("missed", "0.5 (0.38-0.75)")
    assert verdict("<=", 1.06, "copy", *rows) == ("holds", "1.05 (1-1.1)")
    assert verdict("<=", 1, "our dice", *rows, *other)[0] == "holds"
    assert verdict("<=", 0.5, "our dice", *rows, *other)[0] == "missed"
    assert verdict("<=", 1000, bars.ROW, *rows) == ("holds", "976")
    assert verdict("<=", 0.007, bars.LOGITS, *rows) == ("missed", "0.00763")
    assert verdict("<=", 60, bars.MS) == ("not measured", "")
    assert bars.Promise("hem", "llama", "float32", "<=", 1.3, "copy", goal=True).text == "<= 1.3x the time of copy (goal)"


def test_who_failed_or_was_not_measured_keeps_no_promise():
    rows = some_rows()
    failed = {"status": "FAILED", "reason": "largest error"}
    assert verdict(">=", 1, "eager", rows[0], {**rows[1], **failed}) == ("FAILED", "eager: largest error")
    assert verdict("<=", 9, "copy", {**rows[0], **failed}) == ("FAILED", "pylosses cpu: largest error")
    absent = {**rows[0], "provider": "monai", "by": "peer", "status": "missing", "reason": "not installed"}
    for its in ((), rows[:1], [rows[0], {key: value for key, value in absent.items() if key != "ratio"}]):
        assert verdict(">=", 1, "monai", *its) == ("not measured", "")
    assert verdict(">=", 1, "eager", *rows, allocator="huge pages") == ("not measured", "")
    assert verdict(">=", 1, "eager", *some_rows(against="pylosses reference")) == ("not measured", ""), "no kernel of ours"


def test_every_promise_is_about_something_that_a_full_run_measures():
    plan = {(one.loss, one.shape.name, one.dtype, one.allocator): one for one in run.configurations(arguments(peers=False))}
    for promise in bars.PROMISES:
        if promise.against == bars.MS:
            continue
        one = plan[promise.loss, promise.shape, promise.dtype, promise.allocator]
        if promise.against in (bars.ROW, bars.LOGITS):
            assert one.weighed, promise
            continue
        own, shape = providers.variants(LOSSES[one.loss], False)[0], one.shape
        how = {"asked": None, "compile": one.compile, "peers": True}
        names = {p.name for p in providers.providers(LOSSES[one.loss], own, shape, torch.float32, "cpu", **how)}
        names |= {"copy"} | {f"our {loss}" for loss, name, *_ in plan if name == promise.shape}
        assert one.timed and promise.against in names, promise
    assert len(set(bars.PROMISES)) == len(bars.PROMISES)


def test_the_filter_prints_verdicts_and_exits_by_the_gates(tmp_path, capsys):
    rows = [{**row, "provider": "torch.compile", "by": "compile"} if row["by"] == "torch" else row for row in some_rows()]
    file = tmp_path / "run.json"
    a_record(*rows, file=file)
    assert bars.main([str(file)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"missed +hem llama float32 +>= 25x faster than torch.compile +2 \(1.3-2.7\), ours 2 ms", shown)
    assert re.search(r"\d+ holds, \d+ missed, \d+ not measured", shown)
    a_record({**rows[0], "status": "FAILED", "reason": "wrong"}, file=file)
    assert bars.main([str(file)]) == 1
    file.write_text("{}")
    assert bars.main([str(file)]) == 2 and "is no record" in capsys.readouterr().err


# What is committed


@pytest.mark.skipif(not RECORD.exists(), reason="no record: not in a source tree")
def test_the_committed_record_is_small_right_and_on_the_page():
    assert sum(file.stat().st_size for file in RECORD.parent.glob("*.*")) < 300_000
    record = report.Record.load(RECORD)
    assert not [row for row in record.rows if row["status"] == "FAILED" and row["by"] in ("ours", "reference")]
    page = PAGE.read_text()
    for part in (record.title, report.headline(record), report.peers(record), bars.markdown(bars.judged(record))):
        assert part in page, "python tools/readme.py"


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda p: f"{p.library}-{p.loss}-{p.theirs}")
def test_a_peer_agrees_under_the_stated_arguments(peer):
    found = parity.difference(peer)
    if isinstance(found, str):
        assert peer.library != "torch"
        pytest.skip(f"{peer.library}: {found}")
    assert found <= parity.TOLERANCE[peer.single]


def test_every_stated_equality_is_on_its_page():
    if not LIBRARIES.exists():
        pytest.skip("not in a source tree")
    text = LIBRARIES.read_text()
    for peer in peers.PEERS:
        assert parity.row_of(peer, "").removesuffix(" |") in text, "python tools/readme.py"
    for library, theirs, loss, why in peers.DIFFERENT:
        assert f"| {loss} | {library} | `{theirs}` | {why} |" in text
