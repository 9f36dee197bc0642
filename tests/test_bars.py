"""Are the speed bars judged rightly? The table, the gate, turns, memory, verdicts and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest
import torch

import pylosses
from pylosses import cli
from pylosses.spec import LOSSES

bars, contest, eager, peers, providers, report, shapes = (
    cli.bench_module(name) for name in ("bars", "contest", "eager", "peers", "providers", "report", "shapes")
)

ROWS = shapes.Shape("rows", (12, 40), "rows")
LINEAR = shapes.Shape("linear-easy", (40, 30, 64), "linear")
SETTINGS = {"device": "cpu", "threads": 1, "backends": ["reference"], "peers": True, "budget": 0.0, "least": 2, "exclude": {}}


def workload(loss, *its, shape=ROWS):
    return bars.Workload(loss, shape, "float32", its)


def measured(work):
    """Rows of a workload, measured in this process."""
    return contest.Contest({**SETTINGS, **work.request}, lambda **event: None).times()


def replace_ours(monkeypatch, name, function):
    """What a user calls is `function`; the reference, which is the truth of the gate, stays."""
    public = getattr(pylosses.functional, name)

    def call(*inputs, backend=None, **own):
        return public(*inputs, backend=backend, **own) if backend else function(*inputs, **own)

    monkeypatch.setattr(pylosses.functional, name, call)


def verdicts(work):
    rows = measured(work)
    return [bars.judge(work, bar, rows) for bar in work.bars]


# The table


def test_the_table_holds_every_stated_bar():
    lines = {(w.loss, w.shape.text, w.dtype, b.text, b.goal) for w in bars.workloads(full=True) for b in w.bars}
    f32 = "float32"
    for line in (
        ("hem", "(4096,32000)", f32, ">= 40x faster than eager", False),
        ("hem", "(4096,32000)", f32, ">= 25x faster than torch.compile", False),
        ("hem", "(4096,32000)", f32, ">= 18x faster than eager (huge pages)", False),
        ("hem", "(4096,32000)", f32, "<= 1.3x the time of copy (pool)", True),
        ("cross_entropy", "(4096,32000)", f32, ">= 7x faster than F.cross_entropy (huge pages)", False),
        ("cross_entropy", "(128,10)", f32, "<= 1.1x the time of F.cross_entropy", True),
        ("dice", "(12,12,360,480)", "bfloat16", ">= 14x faster than eager", False),
        ("dice_ce", "(4,19,512,1024)", f32, "<= 1.25x the time of our dice", False),
        ("tta", "(2048,32000)", f32, "<= 1.6x the time of our cross_entropy", False),
        ("linear_cross_entropy", "(2048,32000,1024)", f32, "<= 0.25 extra bytes a byte of logits", False),
        ("hem", "(1,19,512,1024)", f32, "<= 18.375 extra bytes a row", False),
    ):
        assert line in lines
    assert len(lines) == sum(len(w.bars) for w in bars.workloads(full=True)), "a bar is stated twice"
    assert {w.shape.sizes[0] for w in bars.workloads(full=False) if w.shape.name == "llama"} == {2048}


def test_every_side_of_the_table_exists():
    """A name nobody has would be an error in the report, after minutes."""
    for work in bars.workloads(full=False):
        if work.setting not in ("default", "huge pages"):
            continue
        request = {**SETTINGS, **work.request, "compile": False}
        known = {p.name for p in contest.Contest(request, lambda **event: None).candidates}
        known |= {"copy", "torch.compile"} | {f"our {name}" for name in LOSSES}
        assert {bar.against for bar in work.bars} <= known, work.title


# Measuring


def test_a_workload_is_measured_and_judged():
    work = workload("focal", bars.faster(1e-9, "eager"), bars.within(1e9, "copy"), bars.within(1e-9, "our cross_entropy"))
    lines = verdicts(work)
    assert [line.verdict for line in lines] == ["reached", "reached", "missed"]
    assert all(float(line.measured) > 0 and ".." in line.spread and line.first and line.ours.endswith(" ms") for line in lines)


@pytest.mark.parametrize("broken", ["ours", "eager", "our cross_entropy"])
def test_a_failed_gate_has_no_number(broken, monkeypatch):
    if broken == "ours":
        replace_ours(monkeypatch, "focal_loss", lambda x, y: 1.01 * eager.focal(x, y))
    elif broken == "eager":
        monkeypatch.setitem(eager.EAGER, "focal", eager.Eager(lambda x, y: 1.01 * eager.focal(x, y)))
    else:
        replace_ours(monkeypatch, "cross_entropy", lambda x, y: 1.01 * eager.cross_entropy(x, y))
    work = workload("focal", bars.faster(1e-9, "eager"), bars.within(1e9, "our cross_entropy"))
    rows = measured(work)
    for bar in work.bars:
        line = bars.judge(work, bar, rows)
        failed = broken in ("ours", bar.against)
        assert line.verdict == ("FAILED" if failed else "reached")
        assert not failed or ("error of the loss" in line.measured and not line.spread + line.first + line.ours)


@pytest.mark.parametrize("same", [True, False])
def test_a_loss_of_torch_may_round_but_must_be_the_same(same, monkeypatch):
    def rounds(x, y):
        return eager.focal(x, y) * (1 if same and x.dtype == torch.float64 else 1.01)

    peer = peers.Peer("torch", "torch", "focal", "F.focal(x, y)", lambda torch: rounds)
    monkeypatch.setattr(providers, "PEERS", (peer,))
    (line,) = verdicts(workload("focal", bars.faster(1e-9, "F.focal")))
    assert line.verdict == ("reached" if same else "FAILED")
    assert "error of the loss is 1.0e-02" in (line.note if same else line.measured)


def test_a_turn_is_a_few_steps_and_a_slow_side_makes_one():
    def side(*seconds):
        taken = iter(itertools.chain(seconds, itertools.repeat(seconds[-1])))
        calls = []
        return calls, lambda: calls.append(0) or {"both": next(taken)}

    calls, step = side(0.9, 0.1)
    assert contest.turn(step) == {"both": 0.1, "first": 0.9} and len(calls) == contest.STEPS
    calls, step = side(5.0)
    assert contest.turn(step) == {"both": 5.0, "first": 5.0} and len(calls) == 1


def test_extra_bytes_are_the_peak_without_the_gradient():
    x = torch.zeros(1000, requires_grad=True)

    def action():
        temporary = torch.empty(300, dtype=torch.uint8)
        del temporary
        kept = torch.empty(200, dtype=torch.uint8)
        x.grad = torch.empty(1000)
        return kept

    assert contest.extra_bytes(action, [4000]) == 300


def test_extra_memory_sees_the_temporaries_of_a_formula(monkeypatch):
    replace_ours(monkeypatch, "focal_loss", eager.focal)
    (line,) = verdicts(workload("focal", bars.memory(16, contest.ROW)))
    assert line.verdict == "missed" and float(line.measured) > 4 * 40  # a copy of the row at least


def test_nine_rows_of_ten_are_easy():
    work = workload("linear_hem", bars.faster(1e-9, "eager"), shape=LINEAR)
    h, w, y = contest.Contest({**SETTINGS, **work.request}, lambda **event: None)._inputs(LINEAR)
    losses = pylosses.linear_hem_loss(h, w, y, reduction="none", backend="reference")
    assert (losses > 0).sum() == 4
    assert verdicts(work)[0].verdict == "reached"


@pytest.mark.parametrize("pooled", [False, True])
def test_pool_lines_need_a_pool(pooled, monkeypatch):
    entered = []

    @contextlib.contextmanager
    def use_pool(size):
        entered.append(size)
        yield

    if pooled:
        monkeypatch.setattr(pylosses, "use_pool", use_pool, raising=False)
    else:
        monkeypatch.delattr(pylosses, "use_pool", raising=False)
    (line,) = verdicts(workload("focal", bars.near_pool(1e9, "copy")))
    assert (line.verdict, bool(entered)) == (("reached", True) if pooled else ("absent", False))
    assert pooled or line.measured == "ours: no pool"


# Judging


def rows_of(**seconds):
    made = [{"provider": name, "status": "ok", "seconds": taken, "first": taken} for name, taken in seconds.items()]
    return [{**row, "noisy": False} for row in made]


def test_the_ratio_of_medians_is_judged_and_the_spread_is_by_round():
    rows = rows_of(ours=[1.0, 2.0, 10.0], eager=[4.0, 20.0, 10.0])
    work = workload(
        "focal", bars.faster(5, "eager"), bars.faster(5.1, "eager"), bars.within(0.2, "eager"), bars.near(0.1, "eager")
    )
    lines = [bars.judge(work, bar, rows) for bar in work.bars]
    assert [line.verdict for line in lines] == ["reached", "missed", "reached", "missed"]
    assert (lines[0].measured, lines[0].spread) == ("5", "1..10")
    assert (lines[2].measured, lines[2].spread) == ("0.2", "0.1..1")


def test_who_is_not_here_or_was_not_measured_is_no_missed_bar():
    absent = {"provider": "monai", "status": "missing", "reason": "not installed: pip install monai"}
    work = workload("dice_ce", bars.faster(12, "monai"), bars.faster(1, "nobody"))
    monai, nobody = (bars.judge(work, bar, [*rows_of(ours=[1.0]), absent]) for bar in work.bars)
    assert (monai.verdict, monai.measured) == ("absent", "monai: not installed: pip install monai")
    assert nobody.verdict == "error"
    crashed = [{"provider": "", "status": "error", "reason": "killed by signal 9"}]
    assert bars.judge(work, work.bars[0], crashed).verdict == "error"


# The command


class InProcess:
    """A worker without a process."""

    def __init__(self, environment, command):
        pass

    def ask(self, request, show):
        show({"doing": "timing", "name": "ours"})
        return contest.Contest({**request, "least": 2, "budget": 0.0}, lambda **event: None).times()

    def stop(self):
        pass


@pytest.mark.parametrize("right", [True, False])
def test_the_command_prints_writes_and_exits_by_the_gates(right, tmp_path, monkeypatch, capsys):
    table = [
        workload("focal", bars.faster(1e9, "eager"), bars.near(1e9, "eager")),
        bars.Workload("import pylosses", shapes.Shape("", (), ""), "", (bars.within(60, bars.MS, "import"),)),
    ]
    monkeypatch.setattr(bars, "workloads", lambda full: iter(table))
    monkeypatch.setattr(bars, "Worker", InProcess)
    monkeypatch.setattr(bars, "imports", lambda: [{"provider": "ours", "status": "ok", bars.MS: [61.0, 50.0, 55.0]}])
    if not right:
        monkeypatch.setitem(eager.EAGER, "focal", dataclasses.replace(eager.EAGER["focal"], function=lambda x, y: x.sum()))
    file = tmp_path / "results" / "bars.md"
    assert bars.main(["--out", str(file)]) == int(not right)
    shown, text = capsys.readouterr().out, file.read_text()
    assert ("1 reached, 1 missed; goals: 1 reached" if right else "1 reached, 1 FAILED; goals: 1 FAILED") in shown
    assert "| import pylosses | <= 60 ms | 55 | 50..61 |  |  | reached |" in text
    assert report.commit() in text and torch.__version__ in text and "2 threads" in text
    assert bars.main(["--only", "no such line"]) == 2


def test_imports_are_timed_in_fresh_processes():
    (row,) = bars.imports(times=1)
    assert row["status"] == "ok" and 0 < row[bars.MS][0] < 60_000
