"""Do the commands say what is true, and do their exit codes follow?"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

import pylosses
from pylosses import checking, cli
from pylosses.choice import BackendList, BackendStatus
from pylosses.reduce import RowLoss
from pylosses.spec import BACKENDS, LOSSES, LossSpec, register


def test_info_names_every_backend_with_a_reason(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    for status in pylosses.backends():
        assert f"{'available' if status.available else 'not available'}: {status.reason}" in text
    assert torch.__version__ in text and pylosses.__version__ in text


def test_info_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["backends"]) == set(BACKENDS)
    assert facts["backends"]["reference"]["available"] is True
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cpu"]["model"]


def test_python_m_pylosses_is_the_command():
    done = subprocess.run([sys.executable, "-m", "pylosses", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"pylosses {pylosses.__version__}")


@pytest.mark.parametrize("name", ["focal", "focal_loss", "FocalLoss"])
def test_check_is_green_by_any_name_of_a_loss(name, capsys):
    assert cli.main(["check", "--loss", name, "--backend", "reference"]) == 0
    assert "all 1 checks passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--loss", "hinge"], "unknown loss 'hinge'; the losses are: "),
        (["check", "--backend", "tpu"], "unknown backend 'tpu'; the backends are: reference, cpu, cuda, triton"),
        (["check", "--device", "nowhere"], "unknown device 'nowhere'"),
        (["bench", "--threads", "0"], "expected a whole number of at least 1, got '0'"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    if "hinge" in arguments:
        assert all(name in error for name in LOSSES)


def test_asking_for_a_backend_that_is_not_there_fails_with_its_reason(monkeypatch, capsys):
    absent = BackendList([BackendStatus("reference", True, ""), BackendStatus("cpu", False, "no compiler was found")])
    monkeypatch.setattr(cli, "backends", lambda: absent)
    assert cli.main(["check", "--backend", "cpu"]) == 1
    assert "no compiler was found" in capsys.readouterr().out


@pytest.mark.parametrize("reason", ["pip install 'pylosses[triton]'", "[red]no[/red]", "see [/usr/lib]"])
def test_brackets_in_a_reason_are_text(reason, monkeypatch, capsys):
    """Also in the table, in the error of a check and in the line of a backend that was not asked for."""
    absent = BackendList([BackendStatus("reference", True, ""), BackendStatus("triton", False, reason)])
    monkeypatch.setattr(cli, "backends", lambda: absent)
    assert cli.main(["check", "--backend", "triton"]) == 1
    assert f"backend triton cannot be checked: {reason}" in capsys.readouterr().out
    ours = checking.Check(LOSSES["focal"], "reference", "cpu", None)
    monkeypatch.setattr(checking, "plan", lambda *_: [ours, ours._replace(skipped=reason)])
    monkeypatch.setattr(checking, "perform", lambda check: checking.Outcome(check, 1, 0.0, 0.0, 0.0, "", reason))
    assert cli.main(["check"]) == 1
    text = capsys.readouterr().out
    assert text.count(reason) == 3 and f"backend triton was not checked: {reason}" in text


def test_a_green_check_of_nothing_is_not_green(monkeypatch, capsys):
    monkeypatch.setattr(checking, "plan", lambda *_: [checking.Check(LOSSES["dice"], "cpu", "cpu", "no kernel yet")])
    assert cli.main(["check"]) == 1
    assert "nothing was checked" in capsys.readouterr().out


# A toy loss whose "cpu" backend can be made to misbehave.


def spread_loss(input, target, *, ignore_index=-100, reduction="mean", backend=None):
    """Square of the label's distance to the mean logit, over live rows."""
    from pylosses.call import labelled

    loss = labelled(
        LOSSES["spread"], input, target, {}, weight=None, sample_weight=None, ignore_index=ignore_index, reduction=reduction,
        normalizer=None, check_labels=False, backend="reference",
    )  # fmt: skip
    return loss if backend == "reference" else FAULTS[_fault](loss, input)


def _spread_rows(rows):
    masked = rows.x == -torch.inf
    mean = torch.where(masked, 0, rows.x).sum(1) / (~masked).sum(1)
    return RowLoss((rows.label(rows.x) - mean).square())


def _touch_input(loss, input):
    with torch.no_grad():
        input[input == input.max()] += 1
    return loss


def _raise(loss, input):
    raise RuntimeError("the kernel is broken")


FAULTS = {
    "none": lambda loss, input: loss,
    "loss": lambda loss, input: loss * 1.001,
    "gradient": lambda loss, input: loss + 0.001 * (input.nan_to_num(0, 0, 0) - input.nan_to_num(0, 0, 0).detach()).sum(),
    "nan": lambda loss, input: loss * torch.nan,
    "dtype": lambda loss, input: loss.to(torch.bfloat16),
    "input": _touch_input,
    "raise": _raise,
}
_fault = "none"


@pytest.fixture
def toy(monkeypatch):
    """The toy loss in the table, with a "cpu" backend that counts as available."""
    spec = register(
        LossSpec("spread", "spread_loss", "SpreadLoss", "toy", "labelled", reference=_spread_rows, paper="none", samples=({},))
    )
    here = BackendList([BackendStatus("reference", True, ""), BackendStatus("cpu", True, "")])
    monkeypatch.setattr(checking, "backends", lambda: here)
    monkeypatch.setattr(cli, "backends", lambda: here)
    monkeypatch.setattr(checking, "BACKENDS", ("reference", "cpu"))
    yield spec
    del LOSSES["spread"]


def test_a_loss_registered_at_run_time_is_checked(toy, capsys):
    assert cli.main(["check", "--loss", "spread"]) == 0
    assert "all 2 checks passed" in capsys.readouterr().out


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_every_fault_of_a_backend_is_found(toy, fault, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules[__name__], "_fault", fault)
    assert cli.main(["check", "--loss", "spread"]) == 1
    assert "1 of 2 checks failed: spread on cpu" in capsys.readouterr().out


def test_a_reference_that_is_not_accurate_is_found(toy, monkeypatch, capsys):
    def coarse(rows):
        return RowLoss(_spread_rows(rows).value * (1 if rows.x.dtype == torch.float64 else 1.001))

    LOSSES["spread"] = dataclasses.replace(toy, reference=coarse)
    monkeypatch.setattr(checking, "function_of", lambda spec: spread_loss)
    assert cli.main(["check", "--loss", "spread", "--backend", "reference"]) == 1
    assert "spread on reference" in capsys.readouterr().out


def test_kinds_of_rows_are_judged_apart():
    """Confident rows with a tiny loss are not hidden by the large losses of the others."""
    case = checking.Case("", (torch.zeros(2, 3),), {}, ("ordinary", "confident"))
    groups = dict(checking._groups(case, "loss", torch.tensor([5.0, 1e-9])))
    assert {kind: int(rows.sum()) for kind, rows in groups.items()} == {"ordinary": 1, "confident": 1}


@pytest.mark.parametrize("name", ["adr", "entropy", "cross_entropy_adr"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_is_shown_is_an_error_of_something(name, backend):
    """No line says "100 % off, ok": float16 has no digits for a gradient of 1e-8, and plain PyTorch has none for some."""
    if LOSSES[name].why_not(backend) or not pylosses.backends()[backend].available:
        pytest.skip(f"no {backend}")
    outcome = checking.perform(checking.Check(LOSSES[name], backend, "cpu", None))
    assert outcome.passed and 0 < outcome.plain < 0.01 and outcome.allowed < 0.02, outcome


def test_a_wrong_gradient_shows_where_plain_pytorch_has_no_digit(toy, monkeypatch):
    """A float16 gradient that is two steps off where the truth is half a step, and plain PyTorch's is half a step off."""
    step = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    given = {torch.float64: 0.5 * step, torch.float16: step}

    def evaluate(function, inputs, arguments, backend, gradient=True):
        value = 2 * step if backend == "cpu" else given[inputs[0].dtype]
        return {"gradient": torch.full((2, 3), value, dtype=inputs[0].dtype)}

    monkeypatch.setattr(checking, "evaluate", evaluate)
    case = checking.Case("", (torch.zeros(2, 3, dtype=torch.float16),), {}, ("ordinary", "ordinary"))
    assert not checking._compare(checking.Check(toy, "cpu", "cpu", None), case, torch.float16).passed


def test_infinities_must_be_where_they_belong():
    inf, nan = float("inf"), float("nan")
    truth = torch.tensor([1.0, inf, nan])
    assert checking._difference(torch.tensor([1.5, inf, nan]), truth) == 0.5
    for wrong in ([1.0, 3.0, nan], [1.0, -inf, nan], [1.0, inf, 0.0], [nan, inf, nan], [1.0, nan, nan], [1.0, inf, inf]):
        assert checking._difference(torch.tensor(wrong), truth) == inf
