"""Do the losses live well with the rest of torch? compile, export, func, checkpoint, autocast, DDP, modules, threads."""

import copy
import io
import pickle
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo.testing
from cases import LABELLED, OWN_INPUTS, UNLABELLED, Case, arguments_of, backends_of, case, finest, grid, own_case, run
from tolerance import close
from torch.utils.checkpoint import checkpoint

import pylosses
from pylosses import autograd, cpu, linear_fused
from pylosses.spec import LOSSES

ALL = grid(LABELLED + UNLABELLED)
FUSED = grid(LABELLED + UNLABELLED, reference=False)
FIRST = [p for p in ALL if p.values[1] == 0]
OWN = [pytest.param(s, i, id=f"{s.name}{i}") for s in LOSSES.values() if s.inputs == "own" for i in range(len(s.samples))]
OWN_WITH_GRADIENT = [p for p in OWN if p.values[0].family in ("linear", "contrastive") and p.values[0].module is not None]
CE, HEM = backends_of(LOSSES["cross_entropy"]), backends_of(LOSSES["hem"])
compilers = shutil.which("g++"), shutil.which("clang++")
needs_compiler = pytest.mark.skipif(not any(compilers), reason="inductor needs a compiler")


def loss_of(c: Case, backend: str, **more):
    """The loss as a function of its floating point inputs, which the case holds already."""
    rest = [t for t in c.inputs if not t.is_floating_point()]
    return lambda *x: getattr(pylosses, c.spec.function)(*x, *rest, backend=backend, **(c.arguments | more))


def small(spec, sample) -> Case:
    """A few rows in float64 away from kinks and ties, one of them ignored."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(4, 6, generator=g, dtype=torch.float64)
    y = torch.tensor([0, 5, -100, 2])
    return Case(spec, (x, y) if spec.inputs == "labelled" else (x,), arguments_of(spec, sample, 6, torch.float64), 6)


def detached(c: Case) -> bool:
    """Whether a quantity that depends on the logits is a constant for the gradient: then differences see what it does not."""
    return bool(c.arguments.get("detach_phi")) or c.arguments.get("weight") == "prob"


# torch's own samples ----------------------------------------------------------------------------------------------------------


def torch_samples(name, module):
    """What torch tests a loss with: input, target and keyword arguments, weights below zero among them."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds
    from torch.testing._internal.common_modules import module_db

    for op in op_db:
        if op.name == f"nn.functional.{name}":
            for s in op.sample_inputs("cpu", torch.float64, requires_grad=False):
                yield s.input, *s.args, s.kwargs
    for info in module_db:
        if info.module_cls is module:
            options = {"device": "cpu", "dtype": torch.float64, "requires_grad": False, "training": True}
            for s in info.module_inputs_func(info, **options):
                assert not s.constructor_input.args and not s.forward_input.kwargs
                yield *s.forward_input.args, s.constructor_input.kwargs


@pytest.mark.parametrize("shift", [0.0, -3.0], ids=["as they are", "weights below zero"])
@pytest.mark.parametrize(
    ("name", "module"), [("cross_entropy", torch.nn.CrossEntropyLoss), ("multi_margin_loss", torch.nn.MultiMarginLoss)]
)
@pytest.mark.parametrize("backend", CE)
def test_samples_of_torch(backend, name, module, shift):
    torch.manual_seed(0)
    negative = seen = 0
    for x, y, options in torch_samples(name, module):
        if x.dim() == 0 or options.get("margin", 1.0) < 0:
            continue  # a number is no vector of classes; a margin is a distance
        x, options = x.detach().requires_grad_(), dict(options)
        if options.get("weight") is not None:
            options["weight"] = options["weight"] + shift
            negative += bool(options["weight"].sum() < 0)
        wanted = getattr(torch.nn.functional, name)(x, y, **options)
        if name == "multi_margin_loss":
            y = y.reshape(x.shape[:-1])
            if "p" in options:
                options["power"] = float(options.pop("p"))
            if options.get("reduction", "mean") == "mean":
                options["normalizer"] = float(y.numel())  # torch divides by the number of rows
        loss = getattr(pylosses, name)(x, y, backend=backend, **options)
        up = torch.randn(wanted.shape, dtype=torch.float64)
        close(f"{name} {tuple(x.shape)} {options}", loss, wanted, rtol=1e-12)
        close(f"{name} gradient", *(torch.autograd.grad(v, x, up)[0] for v in (loss, wanted)), rtol=1e-11, atol=1e-15)
        seen += 1
    assert seen >= 15 and negative >= 1


# Derivatives ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["default", "none"])
@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
def test_gradcheck(spec, sample, backend, reduction):
    c = small(spec, sample)
    if detached(c):
        pytest.skip("a factor is detached: the gradient is not that of the value")
    if reduction == "none":
        if spec.name == "dice_ce":
            pytest.skip("Dice has a loss for each class, cross-entropy for each row: their sum has neither")
        c = c.but(reduction="none")
    near = {"eps": 1e-6, "atol": 1e-7, "rtol": 1e-5, "nondet_tol": 1e-15}  # forward's gradient, then backward's
    assert torch.autograd.gradcheck(loss_of(c, backend), c.inputs[0].clone().requires_grad_(), **near)
    pixels = c.shaped(2, 2, 1)
    assert torch.autograd.gradcheck(loss_of(pixels, backend), pixels.inputs[0].requires_grad_(), **near)


@pytest.mark.parametrize(("spec", "sample"), OWN_WITH_GRADIENT)
def test_gradcheck_of_losses_with_own_inputs(spec, sample):
    c = own_case(spec, sample, torch.float64)
    x = [t.clone().requires_grad_() for t in c.inputs if t.is_floating_point()]
    assert torch.autograd.gradcheck(loss_of(c, "reference"), x, eps=1e-6, atol=1e-6, rtol=1e-4)


def test_own_inputs_are_known():
    """A new loss with positional arguments of its own needs a line in cases.OWN_INPUTS, or no test calls it."""
    values = {"auroc", "dar", "ece", "utility_perturbation"}
    unknown = [s.function for s in LOSSES.values() if s.inputs == "own" and s.function not in OWN_INPUTS.keys() | values]
    assert not unknown


@pytest.mark.parametrize(("spec", "sample", "backend"), [p for p in ALL if p.values[2] == "reference"])
def test_reference_is_differentiable_twice(spec, sample, backend):
    c = small(spec, sample)
    if detached(c):
        pytest.skip("a factor is detached: the gradient is not that of the value")
    x = c.inputs[0].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(loss_of(c, backend), x, eps=1e-6, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("spec", "sample", "backend"), FUSED)
def test_fused_double_backward_says_so(spec, sample, backend):
    """create_graph=True gives the gradient; only differentiating it is refused, with the way out."""
    c = small(spec, sample)
    x = c.inputs[0].clone().requires_grad_()
    loss = loss_of(c, backend)(x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    # That of forward and that of backward are one formula, compiled twice: a compiler joins products and sums as it likes.
    close("gradient", grad, run(c, backend).grads[0], rtol=1e-15)
    with pytest.raises(RuntimeError, match=f'double backward.*{backend}.*backend="reference"'):
        grad.square().sum().backward()


@pytest.mark.parametrize(("spec", "sample", "backend"), FIRST)
def test_graph_of_the_input(spec, sample, backend):
    """A non-leaf input, a hook on it, a shared leaf used by two losses, and accumulation into .grad."""
    c = small(spec, sample)
    seen = []
    leaf = c.inputs[0].clone().requires_grad_()
    x = leaf * 2
    x.register_hook(seen.append)
    (loss_of(c, backend)(x) + loss_of(c, backend)(leaf)).backward()
    inner = run(c._replace(inputs=(c.inputs[0] * 2, *c.inputs[1:])), backend).grads[0]
    assert torch.equal(seen[0], inner)
    close("sum", leaf.grad, 2 * inner + run(c, backend).grads[0], rtol=1e-14)


@pytest.mark.parametrize(("spec", "sample", "backend"), FIRST)
def test_no_gradient_wanted(spec, sample, backend):
    """no_grad, inference_mode and an input without requires_grad: the same value, no graph."""
    c = small(spec, sample)
    wanted = run(c, backend).loss
    function = loss_of(c, backend)
    plain = function(c.inputs[0])
    with torch.no_grad():
        quiet = function(c.inputs[0].clone().requires_grad_())
    with torch.inference_mode():
        inferred = function(c.inputs[0].clone())
    for loss in (plain, quiet, inferred):
        assert not loss.requires_grad and torch.equal(loss, wanted)


@pytest.mark.parametrize("backend", CE)
def test_leaf_gradient_is_channels_last(backend):
    x = torch.randn(2, 5, 3, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    pylosses.cross_entropy(x, torch.zeros(2, 3, 4, dtype=torch.uint8), backend=backend).backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("changed", ["input", "target", "weight", "sample_weight"])
@pytest.mark.parametrize("backend", CE)
def test_changing_an_argument_before_backward_is_an_error(backend, changed):
    """What backward reads again must be what forward read: an in-place change raises, it does not give a wrong gradient."""
    leaf = torch.randn(4, 5, requires_grad=True)
    arguments = {
        "input": leaf * 1.0,
        "target": torch.tensor([0, 1, 2, 3]),
        "weight": torch.rand(5),
        "sample_weight": torch.rand(4),
    }
    x = arguments["input"]
    loss = pylosses.cross_entropy(**arguments, backend=backend)
    if backend == "reference" and changed != "input":
        before = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    with torch.no_grad():
        arguments[changed].mul_(0)
    if backend == "reference" and changed != "input":  # autograd may have copied what it needs; then the gradient is right
        try:
            assert torch.equal(torch.autograd.grad(loss, leaf)[0], before)
        except RuntimeError as error:
            assert "inplace" in str(error)
        return
    if backend == "reference":
        return  # log_softmax saves its result, not its input
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


# Tracing ----------------------------------------------------------------------------------------------------------------------


def compiled(function, compiler: str = "aot_eager", **options):
    """`function` traced whole. aot_eager runs the traced graph as it is, without generating code."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=compiler, **options)


def compiled_agrees(c: Case, backend: str, compiler: str = "aot_eager") -> None:
    """torch.compile(fullgraph=True), forward and backward, against eager."""
    function = getattr(pylosses, c.spec.function)
    traced = compiled(lambda x, *y: function(x * 1.0, *y, backend=backend, **c.arguments), compiler)
    x = c.inputs[0].clone().requires_grad_()
    loss = traced(x, *c.inputs[1:])
    wanted = run(c, backend)
    close("loss", loss, wanted.loss, rtol=1e-6)
    close("gradient", torch.autograd.grad(loss, x, torch.ones_like(loss))[0], wanted.grads[0], rtol=1e-6)


@pytest.mark.parametrize(("spec", "sample", "backend"), FIRST)
def test_compile_without_graph_breaks(spec, sample, backend):
    """Every loss traces whole, forward and backward; dynamo alone is enough to see plain PyTorch's graph."""
    compiled_agrees(case(spec, sample, "ignored"), backend, "eager" if backend == "reference" else "aot_eager")


@pytest.mark.parametrize(("spec", "sample", "backend"), [p for p in FUSED if p.values[1] == 1])
def test_compile_with_tensor_arguments(spec, sample, backend):
    c = finest(case(spec, sample, "ignored")).shaped(2, 7, 1).but(sample_weight=torch.rand(2, 7, 1))
    compiled_agrees(c, backend)


@needs_compiler
@pytest.mark.parametrize("backend", [b for b in CE if b != "reference"])  # inductor on plain PyTorch is not ours to test
def test_compile_with_inductor(backend):
    compiled_agrees(case(LOSSES["cross_entropy"], 1, "ignored"), backend, "inductor")


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "no requires_grad"])
@pytest.mark.parametrize("backend", CE)
def test_compile_without_gradient(backend, mode):
    """Evaluation: the same loss from a graph that needs no backward."""
    x, y = torch.randn(4, 6, requires_grad=mode == "no_grad"), torch.tensor([0, 5, -100, 2])
    traced = compiled(lambda a, b: pylosses.cross_entropy(a, b, backend=backend))
    if mode == "inference_mode":
        with torch.inference_mode():
            loss = traced(x, y)
    else:
        with torch.set_grad_enabled(mode != "no_grad"):
            loss = traced(x, y)
    close("loss", loss, pylosses.cross_entropy(x, y, backend=backend), rtol=1e-6)


@pytest.mark.parametrize("function", ["cross_entropy", "hem_loss"])
@pytest.mark.parametrize("backend", CE)
def test_compile_with_dynamic_shapes(backend, function):
    """One graph for every batch size and image size."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    traced = compiled(lambda x, y: getattr(pylosses, function)(x, y, backend=backend), counter, dynamic=True)
    for n, h in ((3, 4), (5, 6), (7, 3)):
        x = torch.randn(n, 9, h, 5, requires_grad=True)
        y = torch.randint(0, 9, (n, h, 5))
        loss = traced(x, y)
        wanted = getattr(pylosses, function)(x, y, backend=backend)
        close("loss", loss, wanted, rtol=1e-6)
        close("gradient", torch.autograd.grad(loss, x)[0], torch.autograd.grad(wanted, x)[0], rtol=1e-6)
        if n == 3:
            graphs = counter.frame_count
    assert counter.frame_count == graphs, f"compiled again for another size: {counter.frame_count} graphs, not {graphs}"


@pytest.mark.parametrize("backend", CE)
def test_compiled_bad_label(backend):
    """Traced code cannot raise before it runs: a bad label raises then, or makes its row NaN; it is never a number."""
    traced = compiled(lambda x, y: pylosses.cross_entropy(x, y, reduction="none", backend=backend))
    x, y = torch.randn(3, 5, requires_grad=True), torch.tensor([0, 7, 2])
    try:
        loss = traced(x, y)
    except Exception as error:
        assert "target[1] is 7" in str(error)
        return
    assert loss[1].isnan() and loss[[0, 2]].isfinite().all()


@pytest.mark.parametrize("module", [pylosses.CrossEntropyLoss, pylosses.HEMLoss, pylosses.FocalLoss])
@pytest.mark.parametrize("backend", CE)
def test_export(backend, module):
    x, y = torch.randn(4, 6), torch.tensor([0, 5, -100, 2])
    program = torch.export.export(module(backend=backend, weight=torch.rand(6)), (x, y))
    for a in (x, torch.randn(4, 6)):
        close("exported", program.module()(a, y), module(backend=backend, weight=program.state_dict["weight"])(a, y), rtol=1e-6)


@pytest.mark.parametrize(("spec", "sample", "backend"), FUSED)
def test_opcheck(spec, sample, backend, monkeypatch):
    """The registered ops keep their schema, and their fakes agree with them, for every kernel and its arguments."""
    from pylosses import call, compile

    finite = case(spec, sample, "ignored")
    finite.inputs[0].nan_to_num_(0.0, 0.0, 0.0)  # opcheck compares all results, and NaN is not equal to itself
    for c in (finite, finest(case(spec, sample, "plain", torch.bfloat16)).shaped(1, 13, 1))[: 2 - sample % 2]:
        recorded = []  # what the loss would hand to the op while it is traced
        with monkeypatch.context() as patch:
            patch.setattr(call, "fused", lambda made, problem: compile.traced(made, problem.x))
            patch.setattr(compile.Transformed, "apply", lambda *a, r=recorded: r.append(a) or torch.ops.pylosses.forward(*a))
            loss_of(c, backend)(c.inputs[0])
        torch.library.opcheck(torch.ops.pylosses.forward.default, recorded[0])
        loss, saved = torch.ops.pylosses.forward(*recorded[0])
        torch.library.opcheck(torch.ops.pylosses.backward.default, (torch.randn_like(loss), saved, *recorded[0]))


# torch.func -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "sample", "backend"), FIRST)
def test_func_grad(spec, sample, backend):
    c = small(spec, sample)
    wanted = run(c, backend)
    grad, loss = torch.func.grad_and_value(loss_of(c, backend))(c.inputs[0])
    close("loss", loss, wanted.loss, rtol=1e-12)
    close("gradient", grad, wanted.grads[0], rtol=1e-12)


@pytest.mark.parametrize(("spec", "sample", "backend"), FIRST)
def test_vmap(spec, sample, backend):
    """Per-batch losses and gradients, the labels mapped too: the same as a loop."""
    c = small(spec, sample)
    xs = torch.stack([c.inputs[0], c.inputs[0].flip(0), c.inputs[0] * 0.5])
    rest = [torch.stack([y, y.flip(0), y]) for y in c.inputs[1:]]

    def loss(x, *y):
        return getattr(pylosses, spec.function)(x, *y, backend=backend, **c.arguments)

    losses = torch.func.vmap(loss)(xs, *rest)
    grads = torch.func.vmap(torch.func.grad(loss))(xs, *rest)
    for i in range(3):
        wanted = run(c._replace(inputs=(xs[i], *(y[i] for y in rest))), backend)
        close("loss", losses[i], wanted.loss, rtol=1e-12)
        close("gradient", grads[i], wanted.grads[0], rtol=1e-12)


@pytest.mark.parametrize("backend", CE)
def test_per_sample_gradients_of_a_model(backend):
    """vmap(grad) over functional_call: the per-sample gradients of a small model."""
    model = torch.nn.Linear(4, 5)
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 4, 0])

    def loss(p, a, b):
        return pylosses.hem_loss(torch.func.functional_call(model, p, a[None]), b[None], backend=backend)

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    for i in range(6):
        model.zero_grad()
        pylosses.hem_loss(model(x[i : i + 1]), y[i : i + 1], backend=backend).backward()
        close("weight", grads["weight"][i], model.weight.grad, rtol=1e-5, atol=1e-7)


# Training machinery -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backend", HEM)
def test_checkpoint(backend, reentrant):
    x, y = torch.randn(4, 6, requires_grad=True), torch.tensor([0, 5, -100, 2])

    def block(a):
        return pylosses.hem_loss(a * 2, y, backend=backend)

    loss = checkpoint(block, x, use_reentrant=reentrant)
    loss.backward()
    twin = x.detach().clone().requires_grad_()
    wanted = block(twin)
    wanted.backward()
    assert torch.equal(loss.detach(), wanted.detach()) and torch.equal(x.grad, twin.grad)


@pytest.mark.parametrize(("spec", "sample", "backend"), FIRST)
def test_autocast(spec, sample, backend):
    """Half logits of an autocast layer give a float32 loss of those logits; float32 logits are not cast down."""
    c = case(spec, sample, "plain")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(c, backend)
        layer = torch.nn.Linear(37, 37)
        out = layer(c.inputs[0])
        assert out.dtype == torch.bfloat16
        loss = getattr(pylosses, spec.function)(out, *c.inputs[1:], backend=backend, **c.arguments)
    outside = run(c, backend)
    assert inside.loss.dtype == torch.float32 and torch.equal(inside.loss, outside.loss)
    assert torch.equal(inside.grads[0], outside.grads[0])
    assert loss.dtype == torch.float32
    plain = run(c._replace(inputs=(out.detach(), *c.inputs[1:])), backend)
    assert torch.equal(loss.detach(), plain.loss)
    loss.backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("backend", CE)
def test_grad_scaler(backend):
    """A float16 loss scaled by 65536 keeps a finite gradient: the upstream gradient multiplies in float32."""
    x = torch.randn(64, 10).half().requires_grad_()
    loss = pylosses.cross_entropy(x, torch.arange(64) % 10, backend=backend)
    (grad,) = torch.autograd.grad(loss * 65536.0, x)
    plain = torch.autograd.grad(torch.nn.functional.cross_entropy(x.double(), torch.arange(64) % 10) * 65536.0, x)[0]
    close("gradient", grad, plain.double(), rtol=2e-3)


DDP = """
import copy, os, sys, torch, pylosses
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
bare = torch.nn.Linear(6, 5)
wrapped = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(bare))
loss = pylosses.HEMLoss(margin=torch.rand(5), backend=sys.argv[2])
x, y = torch.randn(8, 6), torch.arange(8) % 5
loss(bare(x), y).backward()
loss(wrapped(x), y).backward()
torch.testing.assert_close(wrapped.module.weight.grad, bare.weight.grad)
assert bool((bare.weight.grad != 0).any())
print("same gradient", flush=True)
os._exit(0)  # taking a gloo group down may block
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("backend", HEM)
def test_ddp(backend, tmp_path):
    """In a process of its own: a process group does not always go down in peace."""
    done = subprocess.run(
        [sys.executable, "-c", DDP, str(tmp_path / "store"), backend], capture_output=True, text=True, timeout=120
    )
    assert "same gradient" in done.stdout, done.stderr


def test_training_step_lowers_every_loss():
    """Ten steps of gradient descent on the logits lower each supervised loss."""
    for spec in LABELLED:
        for backend in ("reference", None):
            c = small(spec, 0).but(reduction="mean")
            x = c.inputs[0].clone().requires_grad_()
            optimizer = torch.optim.SGD([x], lr=0.05)
            losses = []
            for _ in range(10):
                optimizer.zero_grad()
                loss = loss_of(c, backend)(x)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            assert losses[-1] < losses[0], (spec.name, losses)


# Modules ----------------------------------------------------------------------------------------------------------------------

MODULES = [
    pytest.param(s, i, id=f"{s.module}{i}") for s in LOSSES.values() if s.module is not None for i in range(len(s.samples))
]


@pytest.mark.parametrize(("spec", "sample"), MODULES)
def test_module(spec, sample):
    """The module gives the function's value, and so do its copies: deepcopy, pickle, torch.save, state dict, .to()."""
    c = own_case(spec, sample, torch.float32) if spec.inputs == "own" else case(spec, sample, "ignored")
    function, kind = getattr(pylosses, spec.function), getattr(pylosses, spec.module)
    wanted = function(*c.inputs, **c.arguments)
    module = kind(**c.arguments)
    copies = [module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    fresh = kind(**{k: torch.zeros_like(v) + 1 if isinstance(v, torch.Tensor) else v for k, v in c.arguments.items()})
    fresh.load_state_dict(module.state_dict())
    copies.append(fresh)
    for twin in copies:
        assert torch.equal(twin(*c.inputs), wanted)
        assert spec.module in repr(twin)
    tensors = {k for k, v in c.arguments.items() if isinstance(v, torch.Tensor)}
    assert set(module.state_dict()) == tensors == {name for name, _ in module.named_buffers()}
    assert not list(module.parameters())
    assert all(b.dtype == torch.float64 for b in module.double().buffers() if b.is_floating_point())


def test_module_takes_batch_arguments_in_the_call():
    x, y, s = torch.randn(4, 5), torch.tensor([0, 1, 2, 3]), torch.rand(4)
    wanted = pylosses.cross_entropy(x, y, sample_weight=s, label_smoothing=0.1)
    assert torch.equal(pylosses.CrossEntropyLoss(label_smoothing=0.1)(x, y, sample_weight=s), wanted)
    with pytest.raises(TypeError, match="gama"):
        pylosses.FocalLoss(gama=2.0)


def test_hem_from_class_counts():
    counts = torch.tensor([50, 500, 5000])
    module = pylosses.HEMLoss.from_class_counts(counts, M=1000.0)
    assert torch.equal(module.margin, pylosses.hem_margins(counts, M=1000.0))
    shared = pylosses.HEMLoss.from_class_counts(counts, shared=True)
    assert torch.equal(shared.margin, pylosses.hem_margins(counts, shared=True)) and shared.margin.unique().numel() == 1


# Other tensors and threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "sample", "backend"), FIRST)
def test_parameters_and_subclasses(spec, sample, backend):
    class Mine(torch.Tensor):
        pass

    c = small(spec, sample)
    wanted = run(c, backend).loss
    assert torch.equal(loss_of(c, backend)(torch.nn.Parameter(c.inputs[0].clone())).detach(), wanted)
    close("subclass", torch.Tensor(loss_of(c, backend)(c.inputs[0].as_subclass(Mine))), wanted, rtol=1e-12)


@pytest.mark.parametrize("backend", CE)
def test_python_threads(backend):
    """Many Python threads at once, the GIL released inside: every one gets the bits of a lone call."""
    cases_ = [case(spec, 0, "plain", seed=i) for i, spec in enumerate(LABELLED) if spec.why_not(backend) is None] * 8
    wanted = [run(c, backend) for c in cases_]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda c: run(c, backend), cases_))
    for got, expected in zip(found, wanted, strict=True):
        assert torch.equal(got.loss, expected.loss) and torch.equal(got.grads[0], expected.grads[0])


@pytest.mark.parametrize("backend", CE)
def test_backward_in_another_thread(backend):
    x = torch.randn(5, 7, requires_grad=True)
    loss = pylosses.cross_entropy(x, torch.arange(5), backend=backend)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    assert torch.equal(x.grad, torch.autograd.grad(pylosses.cross_entropy(x, torch.arange(5), backend=backend), x)[0])


def in_step(code, steps: threading.Barrier):
    """A trace function: threads that run `code` wait for each other before every one of its instructions."""

    def wait(frame, event, argument):
        frame.f_trace_opcodes = True
        try:
            steps.wait(timeout=5)
        except threading.BrokenBarrierError:
            pass  # the other thread took a shorter way
        return wait

    return lambda frame, event, argument: wait(frame, event, argument) if frame.f_code is code else None


@pytest.mark.skipif(cpu.absent is not None, reason=str(cpu.absent))
@pytest.mark.parametrize("made_by", [autograd.Fused, linear_fused.FusedProduct])
def test_two_backwards_of_one_graph_at_once(made_by):
    """Gradients that forward has made belong to one caller: of two threads in lockstep, the other computes its own."""
    x, w, y = torch.randn(6, 7, requires_grad=True), torch.randn(7, 7, requires_grad=True), torch.arange(6)
    linear = made_by is linear_fused.FusedProduct
    leaves = (x, w) if linear else (x,)
    loss = pylosses.linear_cross_entropy(x, w, y) if linear else pylosses.cross_entropy(x, y)
    reference = torch.nn.functional.cross_entropy(x @ w.T if linear else x, y)
    wanted = torch.autograd.grad(reference, leaves, torch.tensor(3.0))
    steps = threading.Barrier(2)

    def backward(_):
        sys.settrace(in_step(made_by.backward.__code__, steps))
        try:
            return torch.autograd.grad(loss, leaves, torch.tensor(3.0), retain_graph=True)
        finally:
            sys.settrace(None)
            steps.abort()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(backward, range(2))
    for a, b, expected in zip(first, second, wanted, strict=True):
        assert a.data_ptr() != b.data_ptr()
        close("first", a, expected, rtol=1e-5)
        close("second", b, expected, rtol=1e-5)
