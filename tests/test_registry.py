"""Is the table of losses true? Names, signatures, docstrings, kernels on each backend, and a loss added at run time."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import pylosses
from pylosses import cli, cpu
from pylosses.autograd import Call
from pylosses.call import labelled
from pylosses.reduce import RowLoss
from pylosses.spec import BACKENDS, LOSSES, LossSpec, PerClass, register

ROOT = Path(__file__).parent.parent
REQUIRED = inspect.Parameter.empty

CE = {"label_smoothing": 0.0, "temperature": 1.0, "softcap": None, "z_loss": 0.0, "bias": None}
MARGIN = {"margin": 1.0, "power": 1.0, "delta": 1e-4, "margin_index": "logit"}
HEM = {**MARGIN, "threshold": True, "above_zero": True, "reduction": "above_zero"}
DICE = {"smooth": 0.0, "over": "batch", "absent": "literal"}
ADR = {"top": REQUIRED, "phi": "entropy", "scope": "sample", "norm": "l2", "form": "gauss", "detach_phi": False}
KINDS = {k: REQUIRED if k == "kind" else ... for k in ("kind", "gamma", "q", "tau", "n", "a", "b", "floor", "alpha")}

#: What is promised: function -> (module, positional arguments, own keyword arguments with defaults; ... is any default).
API = {
    "cross_entropy": ("CrossEntropyLoss", "input target weight", CE),  # class weights by position, as torch has them
    "focal_loss": ("FocalLoss", "input target", {"gamma": 2.0, "alpha": None}),
    "target_loss": ("TargetLoss", "input target", KINDS),
    "logit_norm_loss": ("LogitNormLoss", "input target", {"temperature": 0.04, "eps": 1e-7}),
    "logit_adjusted_loss": ("LogitAdjustedLoss", "input target", {"class_counts": REQUIRED, "tau": 1.0}),
    "multi_margin_loss": ("MultiMarginLoss", "input target", MARGIN),
    "hem_loss": ("HEMLoss", "input target", HEM),
    "hem_margins": (None, "class_counts", {"M": 2000.0, "shared": False}),
    "dice_loss": ("DiceLoss", "input target", DICE),
    "dice_ce_loss": ("DiceCELoss", "input target", {"dice_weight": 1.0, "ce_weight": 1.0, **DICE, **CE}),
    "entropy_loss": ("EntropyLoss", "input", {"max_entropy": None, "mask": None}),
    "sparse_cl_loss": ("SparseCLLoss", "input", {"weight": "one", "max_entropy": None}),
    "knl_loss": ("KNLLoss", "input", {"k": 5, "skip": 5, "form": "nl", "max_entropy": None}),
    "tta_loss": ("TTALoss", "input", {"k": 5, "skip": 5, "lam": 1.0, "form": "nl", "max_entropy": None}),
    "adr_loss": ("ADRLoss", "input", {**ADR, "mask": None}),
    "cross_entropy_adr": ("CrossEntropyADRLoss", "input target", {"gamma": 0.05, **ADR, **CE}),
    "info_nce_loss": ("InfoNCELoss", "a b", {"temperature": 0.07, "symmetric": True, "label_smoothing": 0.0}),
    "feature_contrastive_loss": (
        "FeatureContrastiveLoss",
        "anchor positive negative",
        {"temperature": 0.1, "negative_valid": None, "reduction": "sum"},
    ),
    "contrastive_margin_loss": ("ContrastiveMarginLoss", "anchor positive negative", {"gamma": 1.0, "reduction": "sum"}),
    "utility_perturbation": (None, "utility k sigma", {"noise": None, "generator": None}),
    "linear_cross_entropy": (
        "LinearCrossEntropyLoss",
        "input linear_weight target",
        {"linear_bias": None, **CE},
    ),
    "linear_hem_loss": ("LinearHEMLoss", "input linear_weight target", {"linear_bias": None, **HEM}),
    "linear_loss": (None, "input linear_weight target", {"loss": "focal", "linear_bias": None}),
    "confidence_scores": (None, "input", {"temperature": 1.0, "gen_gamma": 0.1, "gen_m": 100, "scores": None}),
    "auroc": (None, "score_in score_out", {}),
    "dar": (None, "clean_conf clean_correct adv_conf adv_correct", {"accept": 0.95, "count_rejected_correct": False}),
    "ece": (None, "confidence correct", {"bins": 15}),
}
#: What a loss promises by its kind of inputs alone, until it has a line above.
POSITIONAL = {"labelled": "input target", "unlabelled": "input"}
NEW = [s for s in LOSSES.values() if s.function not in API and s.inputs in POSITIONAL]
API |= {s.function: (s.module, POSITIONAL[s.inputs], {}) for s in NEW}
COMMON = {"weight": None, "sample_weight": None, "ignore_index": -100, "normalizer": None, "backend": None}


# The promise ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", API)
def test_function_and_module_exist(function):
    module = API[function][0]
    assert getattr(pylosses, function) is getattr(pylosses.functional, function)
    if module is not None:
        kind = getattr(pylosses, module)
        assert issubclass(kind, torch.nn.Module) and kind.__name__ == module


@pytest.mark.parametrize("function", API)
def test_signature(function):
    """Positional arguments in order, own arguments as keywords with the promised defaults."""
    _, positional, own = API[function]
    parameters = inspect.signature(getattr(pylosses, function)).parameters
    found = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert found == positional.split()
    for name, default in own.items():
        parameter = parameters[name]
        assert parameter.kind is parameter.KEYWORD_ONLY, name
        if default is not ...:
            assert parameter.default == default, f"{name}={parameter.default!r}, promised {default!r}"


@pytest.mark.parametrize("spec", [s for s in LOSSES.values() if s.inputs == "labelled"], ids=lambda s: s.name)
def test_common_arguments(spec):
    """Every supervised loss has the common keywords, with torch's names and defaults."""
    parameters = inspect.signature(getattr(pylosses, spec.function)).parameters
    for name, default in COMMON.items():
        assert parameters[name].default == default, name
    assert parameters["reduction"].default == spec.default_reduction
    assert "check_labels" in parameters


@pytest.mark.parametrize("spec", [s for s in LOSSES.values() if s.inputs == "unlabelled"], ids=lambda s: s.name)
def test_common_arguments_without_labels(spec):
    parameters = inspect.signature(getattr(pylosses, spec.function)).parameters
    assert {"sample_weight", "reduction", "normalizer", "backend"} <= set(parameters)
    assert parameters["reduction"].default == spec.default_reduction


@pytest.mark.parametrize("spec", [s for s in LOSSES.values() if s.module], ids=lambda s: s.name)
def test_module_has_the_functions_keywords(spec):
    """The module is built with exactly what comes after the function's tensors, in its order and with its defaults."""
    function = inspect.signature(getattr(pylosses, spec.function)).parameters.values()
    module = inspect.signature(getattr(pylosses, spec.module)).parameters.values()
    tensors = [name for name in API[spec.function][1].split() if name != "weight"]
    assert list(module) == [p for p in function if p.name not in tensors]


def test_weight_by_position_as_torch_takes_it():
    x, y, w = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.tensor([1.0, 2.0, 0.5])
    expected = torch.nn.functional.cross_entropy(x, y, w)
    for cross_entropy in (pylosses.cross_entropy, pylosses.parallel.cross_entropy):
        torch.testing.assert_close(cross_entropy(x, y, w), expected)
    torch.testing.assert_close(pylosses.CrossEntropyLoss(w)(x, y), expected)
    with pytest.raises(TypeError, match="FocalLoss: too many positional arguments; its arguments are gamma, alpha, weight"):
        pylosses.FocalLoss(w)
    with pytest.raises(TypeError, match="HEMLoss: got an unexpected keyword argument 'margn'"):
        pylosses.HEMLoss(margn=0.5)


def test_the_table_and_the_promise_agree():
    """Every promised loss is in the table under its names, and the table has no loss that nobody promised."""
    helpers = {"hem_margins", "auroc", "dar", "ece", "utility_perturbation"}  # values and margins; they may be in the table
    table = {spec.function: spec.module for spec in LOSSES.values()}
    promised = {function: module for function, (module, _, _) in API.items()}
    assert {f: m for f, m in promised.items() if f not in helpers}.items() <= table.items()
    assert table.items() <= promised.items()
    assert all(spec.name == name for name, spec in LOSSES.items())


def test_public_names_are_the_promise():
    """pylosses exports the promised names, the backends' functions and the table; no helper and no file slipped out."""
    promised = set(API) | {m for m, _, _ in API.values() if m} | {"ConfidenceScores"}
    tools = {"adapt", "fcl", "functional", "parallel", "backends", "use_backend", "BackendError", "use_pool", "clear_pool"}
    table = {"LOSSES", "LossSpec"}
    assert set(pylosses.__all__) == promised | tools | table
    assert {n for n in dir(pylosses) if not n.startswith("__")} == set(pylosses.__all__)
    assert all(getattr(pylosses, name) is not None for name in pylosses.__all__)
    files = {path.stem for path in (ROOT / "pylosses" / "losses").glob("[!_]*.py")} - set(API)
    assert not [name for name in files if hasattr(pylosses, name) or hasattr(pylosses.functional, name)]


# Docstrings -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", API)
def test_docstring(function):
    """What it does in one line, the convention, where it is from, and an example that runs."""
    text = inspect.getdoc(getattr(pylosses, function)) or ""
    first = text.partition("\n")[0]
    assert first.endswith(".") and len(first) > 20, first
    assert "**Convention**" in text
    assert re.search(r"^(Paper|Source)s?:", text, re.MULTILINE), "no Paper: or Source: line"
    assert ">>>" in text, "no example"
    if API[function][2]:
        assert "Args:" in text or function == "hem_margins"


@pytest.mark.parametrize("spec", LOSSES.values(), ids=lambda s: s.name)
def test_docstring_names_every_argument(spec):
    function = getattr(pylosses, spec.function)
    text = inspect.getdoc(function)
    for name in inspect.signature(function).parameters:
        assert re.search(rf"\b{name}\b", text), f"{spec.function} does not document {name}"


@pytest.mark.parametrize("spec", [s for s in LOSSES.values() if s.module], ids=lambda s: s.name)
def test_module_docstring_points_to_the_function(spec):
    assert f"`{spec.function}`" in inspect.getdoc(getattr(pylosses, spec.module))


def test_inferred_formulas_say_so():
    """Losses without a printed equation are marked in the table and in their docstrings."""
    assert {s.name for s in LOSSES.values() if s.inferred} >= {"sparse_cl", "knl", "tta"}
    for spec in LOSSES.values():
        if spec.inferred:
            assert "inferred" in inspect.getdoc(getattr(pylosses, spec.function)).lower(), spec.name


# Kernels ----------------------------------------------------------------------------------------------------------------------


def listed_kernels() -> set[str]:
    """Names in csrc/losses/list.h."""
    losses = (ROOT / "csrc" / "losses" / "list.h").read_text().partition("#define PYL_FAMILIES")[0]
    return set(re.findall(r"\bX\((\w+)\)", losses)) - {"name"}


def wanted_kernels(backend: str) -> set[str]:
    """Kernels that the table says `backend` has."""
    return {spec.kernel for spec in LOSSES.values() if spec.kernel is not None and spec.why_not(backend) is None}


def test_cpp_list_agrees_with_the_table():
    assert listed_kernels() == wanted_kernels("cpu")
    formulas = ROOT / "csrc" / "losses"
    composed = set(re.findall(r"typedef plus<\w+, \w+> (\w+);", (formulas / "all.h").read_text()))
    for name in listed_kernels() - composed:
        assert (formulas / f"{name}.h").is_file(), f"no csrc/losses/{name}.h"


def test_built_kernels_agree_with_the_list():
    status = pylosses.backends()["cpu"]
    if not status.available:
        pytest.skip(f"cpu: {status.reason}")
    assert set(cpu.kernels()) == listed_kernels(), "the built module is older than csrc/losses/list.h"
    call = Call("cpu", "", *(None,) * 6, (), -100, "mean", None)
    for name in cpu.kernels():
        own = cpu.facts(name).own
        assert len(set(own)) == len(own)
        assert cpu.new_saved(call._replace(kernel=name, scalars=(1.0,) * len(own)), torch.ones(4, 3)).numel() >= 8
        with pytest.raises(ValueError, match=f"{name} has {len(own)} own numbers, got {len(own) + 1}"):
            cpu.new_saved(call._replace(kernel=name, scalars=(1.0,) * (len(own) + 1)), torch.ones(4, 3))


@pytest.mark.skipif(cpu.absent is not None, reason=f"cpu: {cpu.absent}")
@pytest.mark.parametrize("spec", [s for s in LOSSES.values() if s.kernel and s.inputs != "own"], ids=lambda s: s.name)
def test_formulas_and_the_table_agree(spec):
    """Of a loss's family and of what it takes."""
    facts = cpu.facts(spec.kernel)
    assert facts.family == spec.family and facts.labels == (spec.inputs == "labelled")


@pytest.mark.skipif(cpu.absent is not None, reason=f"cpu: {cpu.absent}")
@pytest.mark.parametrize("name", sorted(wanted_kernels("triton") & wanted_kernels("cpu")))
def test_numbers_have_one_order(name):
    """Triton's formulas name a loss's numbers as those of C++, in their order."""
    pytest.importorskip("triton", reason="the formulas import it")
    formula = importlib.import_module(f"pylosses.kernels.losses.{name}").FORMULA
    found = [p.rstrip("_") for p in inspect.signature(formula.arguments).parameters]  # lambda is Python's own word
    assert found == cpu.facts(name).own


@pytest.mark.skipif(cpu.absent is not None, reason=f"cpu: {cpu.absent}")
def test_what_no_driver_does_is_refused(monkeypatch):
    """A formula whose view asks for it has no gradient, and a buffer of no size."""
    told = cpu._cpu.sizes(cpu.facts("tta").number, 0, (1.0,) * len(cpu.facts("tta").own), False, False)
    monkeypatch.setattr(cpu._cpu, "sizes", lambda *_: (-1, *told[1:]))
    with pytest.raises(NotImplementedError, match="tta asks for what no driver does"):
        cpu._sizes.__wrapped__("tta", 0, (1.0,), False, False)


def test_no_driver_names_a_loss():
    """Drivers and launchers know facts and views of a loss; its numbers have names, which its formula alone knows."""
    losses = "|".join(listed_kernels())
    for path in [p for folder in ("cpu", "cuda") for p in (ROOT / "csrc" / folder).iterdir()]:
        code = re.sub(r"//.*", "", path.read_text())
        named = rf'\bid_\w+|(?<![.\w])own\[|\bnumbers\[\d|(?<!::)\b(?:{losses})::|"(?:{losses})"'
        assert not re.findall(named, code), path.name
    for path in (ROOT / "pylosses").glob("*.py"):
        named = r'\bscalars\[|\b(?:kernel|spec\.name) (?:==|!=|in|not in) [("]'
        assert not re.findall(named, path.read_text()), path.name


def test_triton_files_agree_with_the_table():
    files = {p.stem for p in (ROOT / "kernels" / "losses").glob("*.py")} - {"__init__"}
    assert files == wanted_kernels("triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", LOSSES.values(), ids=lambda s: s.name)
def test_each_loss_has_a_kernel_or_a_reason(spec, backend):
    reason = spec.why_not(backend)
    if backend == "reference":
        assert reason is None
    elif reason is None:
        own_way = spec.family == "score"  # no formula: values, by a binding of their own
        assert own_way or spec.kernel is not None and spec.pack is not None, (
            f"neither a kernel on {backend} nor a reason why not"
        )
    else:
        assert len(reason) > 15, f"{reason!r} explains nothing"


@pytest.mark.parametrize("spec", LOSSES.values(), ids=lambda s: s.name)
def test_samples_are_arguments(spec):
    """Sample arguments exist, and per-class ones are tensors of the asked size, the same each time."""
    parameters = inspect.signature(getattr(pylosses, spec.function)).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for index, sample in enumerate(spec.samples):
        for name, value in spec.sample(index, 7).items():
            assert free or name in parameters, name
            if isinstance(sample[name], PerClass):
                assert value.shape == (7,) and torch.equal(value, spec.sample(index, 7)[name])
    assert spec.samples and spec.paper


# A loss added at run time -----------------------------------------------------------------------------------------------------


def toy_reference(rows, *, slope: float) -> RowLoss:
    """slope * (largest logit - label's logit)."""
    return RowLoss(slope * (rows.x.amax(dim=1) - rows.label(rows.x)))


def toy_loss(
    input, target, *, slope=1.0, weight=None, sample_weight=None, ignore_index=-100, reduction="mean", normalizer=None,
    check_labels=False, backend=None,
):  # fmt: skip
    """The perceptron's loss."""
    return labelled(
        LOSSES["toy"], input, target, {"slope": slope}, weight=weight, sample_weight=sample_weight, ignore_index=ignore_index,
        reduction=reduction, normalizer=normalizer, check_labels=check_labels, backend=backend,
    )  # fmt: skip


def rough_reference(rows, *, slope: float) -> RowLoss:
    """The same with an error that only float64 does not have."""
    loss = toy_reference(rows, slope=slope)
    return loss if rows.x.dtype == torch.float64 else loss._replace(value=loss.value * 1.01)


@pytest.fixture
def toy():
    """Registers a toy loss with the given reference, and takes it out of the table again."""

    def add(reference) -> LossSpec:
        return register(
            LossSpec(
                name="toy",
                function="toy_loss",
                module=None,
                family="margin",
                inputs="labelled",
                reference=reference,
                paper="none",
                samples=({}, {"slope": 0.5}),
                missing=dict.fromkeys(BACKENDS[1:], "it is a toy of the tests"),
            )  # fmt: skip
        )

    yield add
    LOSSES.pop("toy", None)


def test_a_new_loss_is_checked(toy, capsys):
    """One spec in the table, and `pylosses check` knows the loss: by name, and in the list of all."""
    toy(toy_reference)
    x, y = torch.tensor([[1.0, 3.0]], requires_grad=True), torch.tensor([0])
    loss = toy_loss(x, y)
    loss.backward()
    assert float(loss.detach()) == 2.0 and x.grad.tolist() == [[-1.0, 1.0]]
    with pytest.raises(pylosses.BackendError, match="it is a toy of the tests|was not built"):
        toy_loss(x, y, backend="cpu")
    assert cli.main(["check", "--loss", "toy"]) == 0
    printed = capsys.readouterr().out
    assert "toy" in printed and "reference" in printed


def test_a_wrong_loss_fails_the_check(toy, capsys):
    """The check of the new loss can fail: one percent off in float32 is found."""
    toy(rough_reference)
    assert cli.main(["check", "--loss", "toy"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_name_is_registered_once(toy):
    toy(toy_reference)
    with pytest.raises(ValueError, match="'toy' is already registered"):
        toy(toy_reference)
