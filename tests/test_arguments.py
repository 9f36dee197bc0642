"""Does bad input raise an error that helps? Its type, and a text that names the argument, what came and what was expected."""

import functools
import inspect
import os
import re
import subprocess
import sys

import numpy
import pytest
import torch
from cases import IGNORE, LABELLED, UNLABELLED, arguments_of, backends_of, grid

import pylosses
from pylosses import choice, cpu
from pylosses.spec import BACKENDS, LOSSES

ALL = LABELLED + UNLABELLED


def keywords(spec):
    return inspect.signature(getattr(pylosses, spec.function)).parameters


def absent_backend() -> str:
    """A backend that cannot run here."""
    for status in pylosses.backends():
        if not status.available:
            return status.name
    pytest.skip("every backend is available here")


def call(spec, x, y=None, **arguments):
    classes = x.shape[1] if isinstance(x, torch.Tensor) and x.dim() > 1 else 5
    inputs = (x,) if spec.inputs == "unlabelled" else (x, y if y is not None else torch.zeros(x.shape[:1] + x.shape[2:]).long())
    return getattr(pylosses, spec.function)(*inputs, **(arguments_of(spec, 0, classes, torch.float32) | arguments))


def raises(kind, *words):
    """pytest.raises for an error whose text holds all of `words`."""
    return pytest.raises(kind, match="".join(f"(?=.*{re.escape(w)})" for w in words) if words else None)


X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 4])
by_name = pytest.mark.parametrize("spec", ALL, ids=lambda s: s.name)
labelled = pytest.mark.parametrize("spec", LABELLED, ids=lambda s: s.name)


# Tensors ---------------------------------------------------------------------------------------------------------------------


@by_name
def test_input_must_be_a_float_tensor(spec):
    with raises(TypeError, "input", "Tensor", "list"):
        getattr(pylosses, spec.function)(
            [[1.0, 2.0]], *([Y[:1]] if spec.inputs == "labelled" else []), **arguments_of(spec, 0, 2, torch.float32)
        )
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with raises(TypeError, "input", str(dtype), "float32"):
            call(spec, X.to(dtype), Y)


@by_name
def test_input_must_have_classes(spec):
    with raises(ValueError, "input", "0-d"):
        arguments = arguments_of(spec, 0, 5, torch.float32)
        inputs = (torch.tensor(1.0), torch.tensor(0)) if spec.inputs == "labelled" else (torch.tensor(1.0),)
        getattr(pylosses, spec.function)(*inputs, **arguments)
    with raises(ValueError, "input", "(4, 0)"):
        getattr(pylosses, spec.function)(
            torch.zeros(4, 0), *([Y] if spec.inputs == "labelled" else []), **arguments_of(spec, 0, 5, torch.float32)
        )


@labelled
@pytest.mark.parametrize("shape", [(3,), (4, 1), (), (4, 5, 2)])
def test_target_shape(spec, shape):
    """Both shapes are printed, and the one that was expected."""
    with raises(ValueError, "target", str(tuple(X.shape)), str(shape), "(4,)"):
        call(spec, X, torch.zeros(shape, dtype=torch.int64))


@labelled
def test_target_shape_of_pixels(spec):
    with raises(ValueError, "target", "(2, 5, 3, 4)", "(2, 4, 3)", "(2, 3, 4)"):
        call(spec, torch.zeros(2, 5, 3, 4), torch.zeros(2, 4, 3, dtype=torch.int64))


@labelled
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32, torch.complex64], ids=str)
def test_target_dtype(spec, dtype):
    if dtype.is_floating_point and spec.name in ("cross_entropy", "cross_entropy_adr"):
        with raises(ValueError, "target", "(4, 5)", "(4,)"):  # probabilities must be shaped like input
            call(spec, X, Y.to(dtype))
        return
    with raises(TypeError, "target", str(dtype), "uint8", "int64"):
        call(spec, X, Y.to(dtype))


@labelled
def test_target_must_be_a_tensor(spec):
    with raises(TypeError, "target", "Tensor", "list"):
        call(spec, X, [0, 1, 2, 3])


@labelled
def test_devices_must_match(spec):
    with raises(ValueError, "target", "meta", "cpu"):
        call(spec, X, Y.to("meta"))
    with raises(ValueError, "weight", "meta", "cpu"):
        call(spec, X, Y, weight=torch.ones(5, device="meta"))


@labelled
def test_weight(spec):
    with raises(ValueError, "weight", "(5,)", "(4,)", "(4, 5)"):
        call(spec, X, Y, weight=torch.ones(4))
    with raises(TypeError, "weight", "list"):
        call(spec, X, Y, weight=[1.0] * 5)
    with raises(TypeError, "weight", "bool"):
        call(spec, X, Y, weight=torch.ones(5, dtype=torch.bool))


@by_name
def test_sample_weight(spec):
    if "sample_weight" not in keywords(spec):
        pytest.skip("it has no sample_weight")
    with raises(ValueError, "sample_weight", "(4,)", "(4, 5)"):
        call(spec, X, Y, sample_weight=torch.ones(4, 5))
    with raises(TypeError, "sample_weight", "float"):
        call(spec, X, Y, sample_weight=0.5)


@pytest.mark.parametrize("spec", UNLABELLED, ids=lambda s: s.name)
def test_mask(spec):
    if "mask" not in keywords(spec):
        pytest.skip("it has no mask")
    with raises(ValueError, "mask", "(4,)", "(3,)"):
        call(spec, X, mask=torch.ones(3, dtype=torch.bool))
    with raises(TypeError, "mask", "bool", "float32"):
        call(spec, X, mask=torch.ones(4))


# Labels ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [5, 6, -1, -99, -101, 2**31, 2**40, -(2**62)])
@pytest.mark.parametrize(("spec", "sample", "backend"), [p for p in grid(LABELLED) if p.values[1] == 0])
def test_label_outside(spec, sample, backend, value):
    """IndexError with the first bad value, its position and C; also where a narrowing cast would make a good label of it."""
    y = Y.clone()
    y[2] = y[3] = value
    with raises(IndexError, f"target[2] is {value}", "[0, 5)", "C=5", f"ignore_index={IGNORE}"):
        call(spec, X, y, backend=backend)
    with raises(IndexError, f"target[2] is {value}"):
        call(spec, X.clone().requires_grad_(), y, backend=backend)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("spec", "sample", "backend"), [p for p in grid(LABELLED) if p.values[1] == 0])
def test_label_outside_in_pixels(spec, sample, backend, dtype):
    """The position has one index a dimension; a 0-d target has none."""
    y = torch.zeros(2, 3, 4, dtype=dtype)
    y[1, 2, 1] = 7
    with raises(IndexError, "target[1, 2, 1] is 7", "C=5"):
        call(spec, torch.zeros(2, 5, 3, 4), y, backend=backend)
    with raises(IndexError, "target is 7"):
        call(spec, X[0], torch.tensor(7, dtype=dtype), backend=backend)
    strided = torch.zeros(2, 4, 3, dtype=dtype).transpose(1, 2)
    strided[0, 1, 3] = 9
    with raises(IndexError, "target[0, 1, 3] is 9"):
        call(spec, torch.zeros(2, 5, 3, 4), strided, backend=backend)


@pytest.mark.parametrize(("spec", "sample", "backend"), [p for p in grid(LABELLED) if p.values[1] == 0])
def test_bad_label_leaves_everything_usable(spec, sample, backend):
    """After the error the next call is right: no half-written state, and nothing was read out of bounds."""
    before = call(spec, X, Y, backend=backend)
    for _ in range(3):
        with pytest.raises(IndexError):
            call(spec, X, torch.tensor([0, 10**9, 2, 4]), backend=backend)
    assert torch.equal(call(spec, X, Y, backend=backend), before)


# Reductions and numbers ------------------------------------------------------------------------------------------------------


@by_name
def test_reduction(spec):
    for wrong in ("batchmean", None, "", "MEAN"):
        with raises(ValueError, "reduction", "'mean'", "'sum'", repr(wrong)):
            call(spec, X, Y, reduction=wrong)


@by_name
def test_normalizer(spec):
    if spec.family == "region":
        pytest.skip("Dice has no number of rows to replace; it says so")
    for reduction in ("sum", "none"):
        with raises(ValueError, "normalizer", reduction):
            call(spec, X, Y, reduction=reduction, normalizer=2.0)
    for wrong in (0, -1.0, float("nan")):
        with raises(ValueError, "normalizer", str(wrong)):
            call(spec, X, Y, reduction="mean", normalizer=wrong)
    with raises(ValueError, "normalizer", "(2,)"):
        call(spec, X, Y, reduction="mean", normalizer=torch.ones(2))
    with raises(TypeError, "normalizer", "str"):
        call(spec, X, Y, reduction="mean", normalizer="batch")
    total = call(spec, X, Y, reduction="sum").double()
    for three in (3, 3.0, torch.tensor(3.0), torch.tensor(3)):
        mean = call(spec, X, Y, reduction="mean", normalizer=three).double()
        assert float(mean) == pytest.approx(float(total) / 3, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("cross_entropy", {"label_smoothing": 1.5}, ("label_smoothing", "1.5", "at most 1")),
        ("cross_entropy", {"label_smoothing": -0.1}, ("label_smoothing", "-0.1", "at least 0")),
        ("cross_entropy", {"temperature": 0.0}, ("temperature", "0.0", "greater than 0")),
        ("cross_entropy", {"temperature": -1}, ("temperature", "-1", "greater than 0")),
        ("cross_entropy", {"temperature": float("nan")}, ("temperature", "nan")),
        ("cross_entropy", {"softcap": 0.0}, ("softcap", "0.0")),
        ("cross_entropy", {"z_loss": -1.0}, ("z_loss", "-1.0")),
        ("cross_entropy", {"bias": torch.ones(4)}, ("bias", "(5,)", "(4,)")),
        ("focal_loss", {"gamma": -1.0}, ("gamma", "-1.0")),
        ("focal_loss", {"alpha": torch.ones(4)}, ("alpha", "(5,)", "(4,)")),
        ("target_loss", {"kind": "hinge"}, ("kind", "'hinge'", "'gce'")),
        ("target_loss", {"kind": "gce", "q": 0.0}, ("q", "0.0")),
        ("target_loss", {"kind": "dco", "n": 0}, ("n", "0")),
        ("logit_norm_loss", {"temperature": 0.0}, ("temperature",)),
        ("logit_norm_loss", {"eps": -1.0}, ("eps", "-1.0")),
        ("logit_adjusted_loss", {"class_counts": torch.ones(4)}, ("class_counts", "(5,)", "(4,)")),
        ("logit_adjusted_loss", {"class_counts": torch.tensor([1.0, -1, 1, 1, 1])}, ("class_counts", "negative")),
        ("multi_margin_loss", {"margin": -0.5}, ("margin", "-0.5")),
        ("hem_loss", {"margin": -0.5}, ("margin", "-0.5")),
        ("hem_loss", {"margin": torch.tensor([1.0, -1, 1, 1, 1])}, ("margin", "negative", "-1.0")),
        ("hem_loss", {"margin": torch.ones(4)}, ("margin", "(5,)", "(4,)")),
        ("hem_loss", {"power": 0.0}, ("power", "0.0")),
        ("hem_loss", {"delta": -1.0}, ("delta", "-1.0")),
        ("hem_loss", {"margin_index": "rare"}, ("margin_index", "'rare'", "'label'")),
        ("dice_loss", {"smooth": -1.0}, ("smooth", "-1.0")),
        ("dice_loss", {"over": "pixel"}, ("over", "'pixel'", "'image'")),
        ("dice_loss", {"absent": "skip"}, ("absent", "'skip'", "'exclude'")),
        ("dice_loss", {"normalizer": 3.0}, ("normalizer", "3.0")),
        ("cross_entropy_adr", {"top": 6}, ("top", "6", "5")),
        ("cross_entropy_adr", {"top": 0}, ("top", "0", "at least 1")),
    ],
)
def test_own_arguments(function, arguments, words):
    with raises(ValueError, *words):
        getattr(pylosses, function)(X, Y, **arguments)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("adr_loss", {"top": 0}, ("top", "0", "at least 1")),
        ("adr_loss", {"top": 6}, ("top", "6", "5")),
        ("adr_loss", {"top": 2, "phi": "gini"}, ("phi", "'gini'", "'variance'")),
        ("adr_loss", {"top": 2, "scope": "epoch"}, ("scope", "'epoch'", "'batch'")),
        ("adr_loss", {"top": 2, "norm": "l0"}, ("norm", "'l0'", "'l1'")),
        ("adr_loss", {"top": 2, "form": "plain"}, ("form", "'plain'", "'literal'")),
        ("sparse_cl_loss", {"weight": "two"}, ("weight", "'two'", "'prob'")),
        ("knl_loss", {"k": 0}, ("k", "0")),
        ("knl_loss", {"skip": -1}, ("skip", "-1")),
        ("knl_loss", {"form": "log"}, ("form", "'log'", "'logit'")),
        ("tta_loss", {"k": -3}, ("k", "-3")),
        ("confidence_scores", {"temperature": 0.0}, ("temperature", "0.0")),
        ("confidence_scores", {"gen_m": 0}, ("gen_m", "0")),
        ("confidence_scores", {"scores": ("msp", "max")}, ("scores", "'max'", "'msp'", "'prediction'")),
        ("confidence_scores", {"scores": ()}, ("scores", "none", "'msp'", "'prediction'")),
    ],
)
def test_own_arguments_without_labels(function, arguments, words):
    with raises(ValueError, *words):
        getattr(pylosses, function)(X, **arguments)


def test_scores_are_names():
    with raises(TypeError, "scores", "'msp'", "int"):
        pylosses.confidence_scores(X, scores=3)


@pytest.mark.parametrize("function", ["knl_loss", "tta_loss"])
@pytest.mark.parametrize("loss", [lambda f: getattr(pylosses, f), lambda f: getattr(pylosses.parallel, f)])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_too_few_classes_for_a_negative(function, loss, backend):
    """A loss of 0 would train nothing and say nothing."""
    loss = functools.partial(loss(function), backend=backend)
    for classes, skip in ((6, 5), (2, 1), (2, 5)):
        with raises(ValueError, "input", f"skip + 2 = {skip + 2} classes", f"got {classes}", "skip=0"):
            loss(torch.randn(3, classes), skip=skip)
    for classes, skip in ((7, 5), (2, 0)):
        x = torch.randn(3, classes, requires_grad=True)
        loss(x, skip=skip).backward()
        assert bool((x.grad != 0).any())
    assert bool(loss(torch.zeros(3, 1)) == 0), "one class has nothing to learn"


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("cross_entropy", {"temperature": "1"}, ("temperature", "str")),
        ("cross_entropy", {"label_smoothing": True}, ("label_smoothing", "bool")),
        ("cross_entropy", {"bias": 1.0}, ("bias", "float")),
        ("focal_loss", {"alpha": 0.25}, ("alpha", "float")),
        ("focal_loss", {"gamma": torch.tensor(2.0)}, ("gamma", "Tensor")),
        ("hem_loss", {"margin": "1"}, ("margin", "str")),
        ("logit_adjusted_loss", {"class_counts": [1, 2, 3, 4, 5]}, ("class_counts", "list")),
        ("cross_entropy_adr", {"top": 2.5}, ("top", "float")),
    ],
)
def test_own_argument_types(function, arguments, words):
    with raises(TypeError, *words):
        getattr(pylosses, function)(X, Y, **arguments)


@labelled
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("value", "kind", "got"),
    [(None, TypeError, "None"), (255.0, TypeError, "float"), ([254, 255], TypeError, "list"), (True, TypeError, "bool")]
    + [(2**63, ValueError, str(2**63)), (-(2**63) - 1, ValueError, str(-(2**63) - 1))],
)
def test_ignore_index(spec, backend, value, kind, got):
    with raises(kind, "ignore_index", "int", got):
        call(spec, X, Y, ignore_index=value, backend=backend)


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, numpy.int64(1)])
def test_ignore_index_of_every_int64(value):
    wanted = torch.nn.functional.cross_entropy(X, Y, ignore_index=int(value))
    assert torch.allclose(pylosses.cross_entropy(X, Y, ignore_index=value), wanted)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("function", [pylosses.linear_hem_loss, pylosses.linear_loss])
def test_ignore_index_of_linear_losses(function, shift):
    h, w = torch.randn(4, 3), torch.randn(5, 3)
    for value in (None, 2**63):
        with raises((TypeError, ValueError), "ignore_index", "int", str(value)):
            function(h, w, Y, ignore_index=value, shift=shift)


def test_unknown_keyword_is_an_error():
    for spec in ALL:
        with pytest.raises(TypeError, match="size_average"):
            call(spec, X, Y, size_average=True)


# Losses with inputs of their own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_hem_loss", "linear_loss"])
def test_linear_inputs(function):
    loss = getattr(pylosses, function)
    h, w, y = torch.randn(4, 3), torch.randn(5, 3), Y
    with raises(ValueError, "linear_weight", "(5, 2)", "(4, 3)"):
        loss(h, w[:, :2], y)
    with raises(ValueError, "target", "(3,)", "(4,)"):
        loss(h, w, y[:3])
    with raises(ValueError, "linear_bias", "(4,)", "(5,)"):
        loss(h, w, y, linear_bias=torch.zeros(4))
    with raises(TypeError, "input", "torch.int64"):
        loss(h.long(), w, y)
    with raises(IndexError, "target[1] is 9", "C=5"):
        loss(h, w, torch.tensor([0, 9, 0, 0]))


def test_linear_loss_names():
    with raises(ValueError, "loss", "'dice'", "'focal'", "'hem'"):
        pylosses.linear_loss(torch.randn(4, 3), torch.randn(5, 3), Y, loss="dice")


@pytest.mark.parametrize(
    ("function", "count"), [("info_nce_loss", 2), ("feature_contrastive_loss", 3), ("contrastive_margin_loss", 3)]
)
def test_vector_inputs(function, count):
    loss = getattr(pylosses, function)
    good = [torch.randn(4, 3) for _ in range(count)]
    names = ("a", "b") if count == 2 else ("anchor", "positive", "negative")
    for i, name in enumerate(names[1:], start=1):
        bad = list(good)
        bad[i] = torch.randn(4, 2)
        with raises(ValueError, name, "(4, 2)", "(4, 3)"):
            loss(*bad)
    with raises(TypeError, names[0], "torch.int64"):
        loss(good[0].long(), *good[1:])
    with raises(ValueError, "reduction", "'total'"):
        loss(*good, reduction="total")


def test_metrics():
    with pytest.raises((TypeError, ValueError), match="score_in"):
        pylosses.auroc([0.1], torch.rand(3))
    with raises(ValueError, "bins", "0"):
        pylosses.ece(torch.rand(3), torch.ones(3, dtype=torch.bool), bins=0)
    with raises(ValueError, "accept"):
        pylosses.dar(*(torch.rand(3), torch.ones(3, dtype=torch.bool)) * 2, accept=1.5)
    with raises(ValueError, "class_counts", "(2, 2)"):
        pylosses.hem_margins(torch.ones(2, 2))


# Backends --------------------------------------------------------------------------------------------------------------------


def test_backends_lists_each_with_a_reason():
    found = pylosses.backends()
    assert [status.name for status in found] == list(BACKENDS)
    assert found["reference"].available
    for status in found:
        assert isinstance(status.available, bool) and status.reason
    with pytest.raises(KeyError):
        found["gpu"]


@by_name
def test_backend_that_does_not_exist(spec):
    with raises(ValueError, "backend", "'gpu'", "'reference'", "'cpu'"):
        call(spec, X, Y, backend="gpu")
    with raises(ValueError, "backend", "'gpu'"), pylosses.use_backend("gpu"):
        pass


@by_name
def test_backend_that_cannot_run_says_why(spec):
    """For each backend without this loss the error names the backend, the function and the stated reason."""
    for backend in BACKENDS:
        reason = spec.why_not(backend)
        if reason is None:
            continue
        with raises(pylosses.BackendError, repr(backend), spec.function):
            call(spec, X, Y, backend=backend)
        with raises(pylosses.BackendError, repr(backend)), pylosses.use_backend(backend):
            call(spec, X, Y)


def test_use_backend_nests_and_ends():
    """The inner request wins, an argument wins over both, and afterwards nothing is asked for."""
    absent = absent_backend()
    with pylosses.use_backend(absent):
        with pytest.raises(pylosses.BackendError):
            pylosses.hem_loss(X, Y)
        with pylosses.use_backend("reference"):
            pylosses.hem_loss(X, Y)
        pylosses.hem_loss(X, Y, backend="reference")
        with pytest.raises(pylosses.BackendError):
            pylosses.hem_loss(X, Y)
    pylosses.hem_loss(X, Y)
    with pytest.raises(RuntimeError, match="inside"), pylosses.use_backend(absent):
        raise RuntimeError("inside")
    pylosses.hem_loss(X, Y)


@pytest.fixture
def nothing_compiled(monkeypatch):
    """As in an installation without a compiler, of which nobody has been told yet."""
    monkeypatch.setattr(cpu, "absent", "no C++ compiler was found")
    monkeypatch.setattr(choice, "_said", set())


def test_the_reference_says_once_that_it_stands_in(nothing_compiled):
    with pytest.warns(UserWarning) as said:
        pylosses.hem_loss(X, Y)
        pylosses.hem_loss(X, Y)
        pylosses.linear_cross_entropy(X, X, Y % 4)
    (warning,) = said
    for word in ("hem_loss", "'cpu'", "no C++ compiler was found", 'backend="reference"', "PYLOSSES_BACKEND=reference"):
        assert word in str(warning.message)


def test_the_reference_is_silent_where_it_is_wanted(nothing_compiled, recwarn):
    pylosses.hem_loss(X, Y, backend="reference")
    with pylosses.use_backend("reference"):
        pylosses.hem_loss(X, Y)
    pylosses.hem_loss(X, Y, margin=torch.ones(5, requires_grad=True))  # no kernel has that gradient
    pylosses.contrastive_margin_loss(X, X, X)  # nor this loss
    pylosses.hem_loss(X.to("meta"), Y.to("meta"))  # nor one for this device
    assert not list(recwarn)


@pytest.mark.parametrize("backend", backends_of(LOSSES["hem"], reference=False))
def test_gradients_of_other_arguments_go_to_the_reference(backend):
    """A fused backend computes the gradient of the logits alone: asked for, it says so; not asked for, reference runs."""
    margin = torch.ones(5, requires_grad=True)
    with raises(pylosses.BackendError, "margin", "gradient", "reference"):
        pylosses.hem_loss(X, Y, margin=margin, backend=backend)
    pylosses.hem_loss(X, Y, margin=margin).backward()
    assert margin.grad is not None and bool((margin.grad != 0).any())
    with torch.no_grad():
        pylosses.hem_loss(X, Y, margin=margin, backend=backend)
    weight = torch.ones(5, requires_grad=True)
    pylosses.cross_entropy(X, Y, weight=weight, reduction="sum").backward()
    assert weight.grad is not None
    soft = torch.full((4, 5), 0.2, requires_grad=True)
    pylosses.cross_entropy(X, soft).backward()
    assert soft.grad is not None
    sample = torch.ones(4, requires_grad=True)
    pylosses.focal_loss(X, Y, sample_weight=sample, reduction="sum").backward()
    assert sample.grad is not None


def test_environment_variable():
    """PYLOSSES_BACKEND, set before pylosses is imported, is used, or the error gives the reason, or the names."""
    program = (
        "import torch, pylosses\n"
        "x, y = torch.zeros(2, 3), torch.tensor([0, 1])\n"
        "pylosses.hem_loss(x, y, backend='reference')\n"
        "with pylosses.use_backend('reference'): pylosses.hem_loss(x, y)\n"
        "print('an argument and use_backend win')\n"
        "print(float(pylosses.hem_loss(x, y)))\n"
    )
    running = {}
    for backend in ("reference", absent_backend(), "gpu"):
        environment = {**os.environ, "PYLOSSES_BACKEND": backend, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        running[backend] = subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    results = {backend: (*process.communicate(timeout=240), process.returncode) for backend, process in running.items()}
    for out, error, _ in results.values():
        assert out.startswith("an argument and use_backend win"), error
    out, _, code = results["reference"]
    assert code == 0 and out.endswith("1.0\n")
    _, error, code = results[absent_backend()]
    assert code == 1 and f"BackendError: backend {absent_backend()!r} cannot run hem_loss: " in error
    _, error, code = results["gpu"]
    assert code == 1 and "ValueError: backend must be one of 'reference'" in error
