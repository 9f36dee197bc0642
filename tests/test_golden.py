"""Do the losses equal the golden values? Closed forms in float64, on every backend, dtype, and as rows and pixels."""

import pytest
import torch
from cases import DTYPES, backends_of, name_of
from golden import NOT_IN_API, GoldenCall, GoldenCase, calls, load
from tolerance import close

import pylosses
from pylosses.spec import LOSSES, LossSpec

CASES = load()
#: golden losses that are values, not losses with a gradient: each has a test below
VALUES = {"table1", "scores", "auroc", "dar", "ece", "utility_perturb"}


def spec_of(function: str) -> LossSpec | None:
    return next((spec for spec in LOSSES.values() if spec.function == function), None)


def parameters() -> list:
    found = []
    for case in CASES:
        for call in calls(case):
            spec = spec_of(call.function)
            backends = [pytest.param("reference", id="reference")] if spec is None else backends_of(spec)
            for backend in backends:
                for dtype in DTYPES:
                    name = f"{case.id}-{call.function}-{backend.id}-{name_of(dtype)}"
                    found.append(pytest.param(case, call, *backend.values, dtype, marks=backend.marks, id=name))
    return found


def find(loss: str) -> list[GoldenCase]:
    return [case for case in CASES if case.loss == loss]


def test_every_case_is_tested_or_listed():
    lost = [case.id for case in CASES if not calls(case) and case.loss not in VALUES and case.loss not in NOT_IN_API]
    assert not lost, f"golden cases that no test asks for: {lost}"
    first = [case.id for case in CASES if case.tier == 1 and case.loss in NOT_IN_API]
    assert not first, f"tier 1 must be in the API: {first}"
    called = {call.function for case in CASES for call in calls(case)}
    assert all(hasattr(pylosses, f) for f in called), f"not in pylosses: {[f for f in called if not hasattr(pylosses, f)]}"


@pytest.mark.parametrize(("case", "call", "backend", "dtype"), parameters())
def test_golden(case: GoldenCase, call: GoldenCall, backend: str, dtype: torch.dtype):
    check(case, call, backend, dtype, None)
    if call.spatial:
        for rows in ((2, 1, 3), (1, 3, 2), (3, 2)):
            check(case, call, backend, dtype, rows)


def check(case: GoldenCase, call: GoldenCall, backend: str, dtype: torch.dtype, rows: tuple[int, ...] | None) -> None:
    """Loss, row losses and gradients at `dtype`, of (N, C) rows or of the rows arranged as (n, d1, ...) positions."""
    inputs = {k: _spatial(v, rows) for k, v in call.inputs.items()}
    reduction = call.arguments.get("reduction", "")
    leaves = {k: v.to(dtype).requires_grad_() if v.is_floating_point() and k in call.grads else v for k, v in inputs.items()}
    arguments = dict(call.arguments)
    for name in call.grads.keys() - inputs.keys():
        arguments[name] = arguments[name].to(dtype).requires_grad_()
    function = getattr(pylosses, call.function)
    loss = function(*leaves.values(), backend=backend, **arguments)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert loss.dtype == wanted, f"loss of {dtype} input is {loss.dtype}"

    # What rounding the inputs does to the result is not the loss's error: most golden inputs are exact in every dtype, for the
    # others the truth is the float64 reference, itself held to the golden values at float64, on the rounded inputs.
    exact = all(torch.equal(inputs[k].to(dtype).double(), inputs[k].double()) for k in call.grads if k in inputs)
    exact = exact and all(torch.equal(arguments[k].double(), call.arguments[k]) for k in call.grads if k not in inputs)
    golden_grads = {name: _spatial(case.expected["grad"][key], rows) for name, key in call.grads.items()}
    if reduction == "none":
        golden_loss = _spatial(case.expected["per_sample"], rows)
    else:
        golden_loss = torch.tensor(case.expected["loss"], dtype=torch.float64)
    up = _spatial(case.inputs["upstream"], rows) if reduction == "none" else torch.tensor(1.0)
    if not exact:
        golden_loss, golden_grads = _truth(function, leaves, arguments, call.grads, up)
    grads = torch.autograd.grad(loss, [(leaves | arguments)[k] for k in call.grads], up.to(loss.dtype))

    rtol = 1e-10 if dtype == torch.float64 else 2e-5
    atol = 1e-12 if dtype == torch.float64 else 1e-7
    close(f"{case.id} loss", loss, golden_loss, rtol=rtol, atol=atol)
    for (name, golden_grad), grad in zip(golden_grads.items(), grads, strict=True):
        assert grad.dtype == dtype
        rounding = torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
        close(f"{case.id} gradient of {name}", grad, golden_grad, rtol=rtol + rounding, atol=atol)
    if exact and case.expected["per_sample"].shape == case.inputs.get("labels", case.expected["per_sample"]).shape:
        _check_rows(case, call, function, leaves, arguments, backend, rows, rtol, atol)


def _check_rows(case, call, function, leaves, arguments, backend, rows, rtol, atol) -> None:
    """The golden row losses are those of reduction="none"; Dice, symmetric and batch-wide losses have no rows of that kind."""
    if call.function in ("dice_loss", "info_nce_loss") or case.expected["per_sample"].numel() == 0:
        return
    got = function(*leaves.values(), backend=backend, **(arguments | {"reduction": "none"}))
    close(f"{case.id} rows", got, _spatial(case.expected["per_sample"], rows), rtol=rtol, atol=atol)


def _truth(function, leaves, arguments, grads, up):
    double = {k: v.detach().double().requires_grad_() if k in grads else v for k, v in leaves.items()}
    extra = {k: v.detach().double().requires_grad_() for k, v in arguments.items() if k in grads}
    loss = function(*double.values(), backend="reference", **(arguments | extra))
    values = torch.autograd.grad(loss, [(double | extra)[k] for k in grads], up.double())
    return loss, dict(zip(grads, values, strict=True))


def _spatial(value: torch.Tensor, rows: tuple[int, ...] | None) -> torch.Tensor:
    """(R, C) -> (n, C, d1, ...) and (R) -> (n, d1, ...)."""
    if rows is None:
        return value
    if value.shape[0] != 6:  # cases of 0 or 3 rows
        rows = (value.shape[0], *(1 for _ in rows[1:]))
    if value.dim() == 1:
        return value.reshape(rows)
    return value.reshape(*rows, value.shape[1]).movedim(-1, 1)


MARGIN_BACKENDS = backends_of(LOSSES["hem"])


@pytest.mark.parametrize("backend", MARGIN_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
def test_table_1(dtype, backend):
    """All 24 entries of the paper's Table 1, to two decimals and exactly."""
    (case,) = find("table1")
    x, y, p = case.inputs["logits"].to(dtype), case.inputs["labels"], case.params
    options = {"reduction": "none", "backend": backend}
    exact = {"margin": p["mu"], "power": p["power"], "delta": 0.0}
    found = {
        "CE": pylosses.cross_entropy(x, y, temperature=p["ce_tau"], **options),
        "LN": pylosses.logit_norm_loss(x, y, temperature=p["ln_tau"], **options),
        "MM": pylosses.multi_margin_loss(x, y, **exact, **options),
        "HEM": pylosses.hem_loss(x, y, **exact, **options),
    }
    for column, values in found.items():
        close(column, values, case.expected[f"{column}_exact"], rtol=1e-10 if dtype == torch.float64 else 2e-6)
        assert [round(v, 2) for v in values.tolist()] == case.expected[f"{column}_2dp"].tolist(), column
    close("MM, power 1", pylosses.multi_margin_loss(x, y, margin=p["mu"], **options), case.expected["MM_power1"], rtol=1e-6)
    close("HEM, power 1", pylosses.hem_loss(x, y, margin=p["mu"], **options), case.expected["HEM_power1"], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name_of)
@pytest.mark.parametrize("case", find("scores"), ids=lambda c: c.id)
@pytest.mark.parametrize("backend", backends_of(LOSSES["confidence_scores"]))
def test_scores(backend, case, dtype):
    x, p = case.inputs["logits"].to(dtype), case.params
    options = {"temperature": p["T"], "gen_gamma": p["gen_gamma"], "gen_m": p["gen_M"], "backend": backend}
    scores = pylosses.confidence_scores(x, **options)
    pixels = pylosses.confidence_scores(x.reshape(2, 3, 1, -1).movedim(-1, 1), **options)
    rtol = 1e-10 if dtype == torch.float64 else 2e-5
    for name, expected in case.expected.items():
        close(name, getattr(scores, name), expected, rtol=rtol)
        close(f"{name} of pixels", getattr(pixels, name), expected.reshape(2, 3, 1), rtol=rtol)
    assert torch.equal(scores.prediction, x.argmax(dim=1))


def test_auroc():
    (case,) = find("auroc")
    value = pylosses.auroc(case.inputs["s_in"], case.inputs["s_out"])
    assert float(value) == pytest.approx(case.expected["auroc"], abs=1e-12)


def test_dar():
    (case,) = find("dar")
    inputs = [case.inputs[k] for k in ("clean_conf", "clean_correct", "adv_conf", "adv_correct")]
    appendix = pylosses.dar(*inputs, accept=case.params["accept"])
    main = pylosses.dar(*inputs, accept=case.params["accept"], count_rejected_correct=True)
    assert float(appendix) == pytest.approx(case.expected["dar_appendix"], abs=1e-12)
    assert float(main) == pytest.approx(case.expected["dar_main_text"], abs=1e-12)


def test_ece():
    (case,) = find("ece")
    value = pylosses.ece(case.inputs["conf"], case.inputs["correct"], bins=case.params["bins"])
    assert float(value) == pytest.approx(case.expected["ece"], abs=1e-12)


def test_utility_perturbation():
    (case,) = find("utility_perturb")
    high, low = pylosses.utility_perturbation(
        case.inputs["utility"], case.params["k"], case.params["sigma"], noise=case.inputs["noise"]
    )
    close("high", high, case.expected["high"], rtol=1e-12)
    close("low", low, case.expected["low"], rtol=1e-12)
