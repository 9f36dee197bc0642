"""Is the answer right, or a clear refusal, where something stands between the call and plain strided memory on one device?

Another default device, a tracer, a lazy sign, a layout that is not strided, a wrapper, a batch of gradients, a forward-mode
derivative: kernels get pointers and see nothing of these.
"""

import shutil

import pytest
import torch
import torch.autograd.forward_ad as fwd
from cases import LABELLED, UNLABELLED, backends_of, case, finest, grid, name_of, own_case, run
from tolerance import close
from torch._vmap_internals import _vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import pylosses
from pylosses.spec import LOSSES

ALL = grid(LABELLED + UNLABELLED)
FIRST = [p for p in ALL if p.values[1] == 0]
OWN = [
    pytest.param(s, i, *b.values, id=f"{s.name}{i}-{b.id}", marks=b.marks)
    for s in LOSSES.values()
    if s.family in ("linear", "contrastive") and s.module is not None and s.name != "utility_perturbation"
    for i in range(len(s.samples))
    for b in backends_of(s)
]
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a compiler")
FUSED = [p for p in FIRST + OWN if p.values[1] == 0 and p.values[2] != "reference"]
CE, SCORES = backends_of(LOSSES["cross_entropy"]), backends_of(LOSSES["confidence_scores"])


def same(found, wanted):
    """The same bits, loss and gradients."""
    assert torch.equal(found.loss, wanted.loss)
    assert all(torch.equal(a, b) for a, b in zip(found.grads, wanted.grads, strict=True))


# Another default device ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
def test_default_device(spec, sample, backend):
    """CPU logits stay on the CPU, whatever torch's default device is."""
    rows = case(spec, sample, "plain")
    for c in (rows, finest(rows), rows.shaped(13, 1)):
        wanted = run(c, backend)
        with torch.device("meta"):
            same(run(c, backend), wanted)


@pytest.mark.parametrize(("spec", "sample", "backend"), OWN)
def test_default_device_of_losses_with_own_inputs(spec, sample, backend):
    own = own_case(spec, sample, torch.float32)
    for c in (own, own.but(reduction="none")):
        wanted = run(c, backend)
        with torch.device("meta"):
            same(run(c, backend), wanted)


@pytest.mark.parametrize("reduction", ["mean", "above_zero", "none"])
@pytest.mark.parametrize("arguments", [{}, {"linear_bias": torch.ones(40), "sample_weight": torch.rand(200)}])
@pytest.mark.parametrize("loss", ["linear_cross_entropy", "linear_hem_loss"])
def test_default_device_of_blocks(loss, arguments, reduction):
    """Several blocks, rows that are ignored and rows without a loss between others."""
    g = torch.Generator().manual_seed(0)
    h, w = torch.randn(200, 8, generator=g), 4 * torch.randn(40, 8, generator=g)
    y = torch.where(torch.arange(200) % 3 == 0, (h @ w.T).argmax(dim=1), torch.arange(200) % 40)
    y[::7] = -100

    def found():
        leaves = h.clone().requires_grad_(), w.clone().requires_grad_()
        value = getattr(pylosses, loss)(*leaves, y, reduction=reduction, workspace=0, **arguments)
        return value, *torch.autograd.grad(value.sum(), leaves)

    wanted = found()
    with torch.device("meta"):
        assert all(torch.equal(a, b) for a, b in zip(found(), wanted, strict=True))


@pytest.mark.parametrize("backend", SCORES)
def test_default_device_of_scores(backend):
    x = torch.randn(6, 5)
    wanted = pylosses.confidence_scores(x, backend=backend)
    torch.set_default_device("meta")
    try:
        found = pylosses.confidence_scores(x, backend=backend)
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# Tracers ---------------------------------------------------------------------------------------------------------------------


def another(c):
    """The same call with other rows, some of them ignored where there are labels."""
    x, *y = c.inputs
    return c._replace(inputs=(x.flip(0) / 2, *(torch.where(torch.arange(len(t)) % 3 == 0, -100, t.flip(0)) for t in y)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("reduction", ["default", "none"])
@pytest.mark.parametrize(("spec", "sample"), [p.values[:2] for p in ALL if p.values[2] == "reference"], ids=name_of)
def test_jit_trace(spec, sample, reduction):
    """What is recorded computes the loss and the gradient of other inputs too."""
    first = case(spec, sample, "plain", torch.float64)
    first = finest(first) if reduction == "none" else first
    loss_of = getattr(pylosses, spec.function)
    traced = torch.jit.trace(lambda *a: loss_of(*a, **first.arguments), first.inputs, check_trace=False)
    for c in (first, another(first)):
        wanted = run(c)
        x = c.inputs[0].clone().requires_grad_()
        loss = traced(x, *c.inputs[1:])
        close("loss", loss.detach(), wanted.loss, rtol=1e-12)
        close("gradient", torch.autograd.grad(loss.sum(), x)[0], wanted.grads[0], rtol=1e-12)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_jit_trace_of_scores_and_modules(tmp_path):
    """A confidence head for deployment, saved and loaded."""

    class Head(torch.nn.Module):
        def forward(self, x):
            return tuple(pylosses.confidence_scores(x))

    x, other = torch.randn(3, 7), torch.randn(3, 7)
    torch.jit.trace(Head(), x).save(tmp_path / "head.pt")
    for a, b in zip(torch.jit.load(tmp_path / "head.pt")(other), pylosses.confidence_scores(other), strict=True):
        close("score", a, b, rtol=1e-5)
    y = torch.tensor([0, 1, 2])
    traced = torch.jit.trace(pylosses.HEMLoss(), (x, y), check_trace=False)
    close("loss", traced(other, y), pylosses.hem_loss(other, y), rtol=1e-6)
    with pytest.raises(pylosses.BackendError, match="jit.trace.*reference"):
        torch.jit.trace(lambda a: pylosses.hem_loss(a, y, backend="cpu"), x)


@pytest.mark.parametrize("how", [{}, {"tracing_mode": "fake", "_allow_non_fake_inputs": True}], ids=["real", "fake"])
@pytest.mark.parametrize(("spec", "sample", "backend"), FIRST)
def test_make_fx(spec, sample, backend, how):
    """The graph computes the loss and the gradient of other inputs too."""
    first = case(spec, sample, "plain")

    def both(x, *y):
        x = x.detach().requires_grad_()
        loss = getattr(pylosses, spec.function)(x, *y, backend=backend, **first.arguments)
        return loss, *torch.autograd.grad(loss, x)

    graph = make_fx(both, **how)(*first.inputs)
    for c in (first, another(first)):
        loss, gradient = graph(*c.inputs)
        wanted = run(c, backend)
        close("loss", loss.detach(), wanted.loss, rtol=1e-6)
        close("gradient", gradient, wanted.grads[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("backend", CE)
def test_make_fx_before_dispatch(backend):
    """Only the loss: of a gradient, torch records there what plain PyTorch saves as constants."""
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 4])
    graph = make_fx(lambda a, b: pylosses.cross_entropy(a, b, backend=backend), pre_dispatch=True)(x, y)
    y[1] = -100
    close("loss", graph(2 * x, y), pylosses.cross_entropy(2 * x, y, backend=backend), rtol=1e-6)


@pytest.mark.parametrize(("spec", "sample", "backend"), [p for p in OWN if p.values[1] == 0])
def test_make_fx_of_losses_with_own_inputs(spec, sample, backend):
    c = own_case(spec, sample, torch.float32)
    if backend != "reference" and spec.family == "contrastive":
        backend = None  # which is the reference while something traces
    graph = make_fx(lambda *a: getattr(pylosses, spec.function)(*a, backend=backend, **c.arguments))(*c.inputs)
    changed = c._replace(inputs=tuple(t.flip(0) if t.is_floating_point() else t for t in c.inputs))
    close("loss", graph(*changed.inputs), run(changed, backend).loss, rtol=1e-5)


@pytest.mark.parametrize("backend", SCORES)
def test_make_fx_of_scores(backend):
    graph = make_fx(lambda x: tuple(pylosses.confidence_scores(x)))(torch.randn(3, 7))
    x = torch.randn(3, 7)
    for a, b in zip(graph(x), pylosses.confidence_scores(x, backend=backend), strict=True):
        close("score", a, b, rtol=1e-5)


@pytest.mark.parametrize("backend", CE)
def test_modes_see_the_loss(backend):
    """What counts, checks or keeps operations sees an operation where the loss is, forward and backward."""
    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x, y = torch.randn(4, 5, requires_grad=True), torch.arange(4)
    with Look():
        loss = pylosses.cross_entropy(x, y, backend=backend)
    names = " ".join(seen)
    assert "pylosses.forward" in names if backend != "reference" else "log_softmax" in names
    close("loss", loss.detach(), pylosses.cross_entropy(x, y, backend=backend).detach(), rtol=1e-6)


# Tensors that are not plain strided memory ------------------------------------------------------------------------------------


def negated(value):
    """The same numbers, their sign only noted."""
    lazy = torch._neg_view(-value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    assert lazy is value or lazy.is_neg()
    return lazy


@pytest.mark.parametrize(("spec", "sample", "backend"), ALL)
def test_negative_bit(spec, sample, backend):
    """Of logits, per-class arguments, sample weights and the upstream gradient: the numbers count, not what lies in memory."""
    rows = case(spec, sample, "plain")
    weights = torch.rand(13, generator=torch.Generator().manual_seed(0))
    for c in (rows, finest(rows).but(sample_weight=weights), finest(rows.shaped(13, 1))):
        wanted = run(c, backend)
        up = torch.ones_like(wanted.loss)
        lazy = c._replace(arguments={k: negated(v) for k, v in c.arguments.items()})
        x = negated(c.inputs[0]).requires_grad_()
        loss = getattr(pylosses, spec.function)(x, *c.inputs[1:], backend=backend, **lazy.arguments)
        assert torch.equal(loss.detach(), wanted.loss)
        gradient = torch.autograd.grad(loss, x, negated(up))[0]
        close("gradient", gradient, wanted.grads[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("spec", "sample", "backend"), OWN)
def test_negative_bit_of_own_inputs(spec, sample, backend):
    c = own_case(spec, sample, torch.float32)
    wanted = run(c, backend)
    x = [negated(t).requires_grad_() if t.is_floating_point() else t for t in c.inputs]
    loss = getattr(pylosses, spec.function)(*x, backend=backend, **{k: negated(v) for k, v in c.arguments.items()})
    assert torch.equal(loss.detach(), wanted.loss)
    leaves = [t for t in x if t.requires_grad]
    for a, b in zip(torch.autograd.grad(loss, leaves, negated(torch.ones(()))), wanted.grads, strict=True):
        close("gradient", a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", CE)
def test_lazy_tensors_of_every_argument(backend):
    """The imaginary part of a conjugate, zeros without memory, what torch.func left; labels, soft targets, normalizer."""
    z = torch.randn(6, 10, dtype=torch.complex64).conj().imag
    y = torch.arange(6)
    assert z.is_neg()
    soft = torch.softmax(torch.randn(6, 10), dim=1)
    left = []
    torch.func.grad(lambda a: left.append(a) or a.sum())(soft)
    zeros = torch._efficientzerotensor(6, 10)
    labels, count = torch._neg_view(-y), torch._neg_view(torch.tensor(-5.0))
    lazy = {
        "z": ((z, y), {}),
        "soft": ((z, negated(soft)), {}),
        "labels": ((z, labels), {}),
        "normalizer": ((z, y), {"normalizer": count}),
        "zeros": ((zeros, y), {}),
        "left": ((left[0], y), {}),
        "weight": ((z, y), {"weight": torch._efficientzerotensor(10), "reduction": "sum"}),
    }
    for name, (inputs, arguments) in lazy.items():
        made = [t.clone() for t in inputs]
        assert all(torch._C._dispatch_keys(t) == torch._C._dispatch_keys(soft) for t in made), name
        wanted = pylosses.cross_entropy(*made, backend="reference", **{k: copied(v) for k, v in arguments.items()})
        close(name, pylosses.cross_entropy(*inputs, backend=backend, **arguments), wanted, rtol=1e-6)
    mask = torch.rand(6) > 0.5
    close("mask", pylosses.entropy_loss(z, mask=mask, backend=backend), pylosses.entropy_loss(z.clone(), mask=mask), rtol=1e-6)


def copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("backend", SCORES)
def test_lazy_tensors_of_scores(backend):
    x = torch.randn(3, 7)
    for lazy in (negated(x), torch._efficientzerotensor(3, 7)):
        wanted = pylosses.confidence_scores(lazy.clone(), backend=backend)
        for a, b in zip(pylosses.confidence_scores(lazy, backend=backend), wanted, strict=True):
            assert torch.equal(a, b)


@needs_compiler
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("backend", [b for b in CE if b.id != "reference"])  # inductor on plain PyTorch is not ours to test
def test_negative_bit_compiled(backend, gradient):
    """Inductor reads the memory of a graph's inputs as it is; the op gets the tensors themselves."""
    x, y, weight = torch.randn(6, 10), torch.arange(6), torch.rand(10)
    torch._dynamo.reset()
    traced = torch.compile(lambda a, w: pylosses.cross_entropy(a, y, weight=w, backend=backend), fullgraph=True)
    for a, w in ((x, weight), (negated(x), negated(weight))):
        a = a.detach().requires_grad_(gradient)
        twin = x.clone().requires_grad_(gradient)
        loss, wanted = traced(a, w), pylosses.cross_entropy(twin, y, weight=weight, backend=backend)
        close("loss", loss.detach(), wanted.detach(), rtol=1e-6)
        if gradient:
            close("gradient", torch.autograd.grad(loss, a)[0], torch.autograd.grad(wanted, twin)[0], rtol=1e-6)


def _left_by_vmap(x):
    left = []
    _vmap(lambda a: left.append(a) or a.sum())(x)
    return left[0]


#: name -> (the tensor in that form, what the error says of it)
NOT_PLAIN = {
    "sparse_coo": (torch.Tensor.to_sparse, "sparse"),
    "sparse_csr": (torch.Tensor.to_sparse_csr, "sparse"),
    "sparse_csc": (torch.Tensor.to_sparse_csc, "sparse"),
    "sparse_bsr": (lambda x: x.to_sparse_bsr((1, 1)), "sparse"),
    "mkldnn": (torch.Tensor.to_mkldnn, "mkldnn"),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantized"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "nested"),
    "jagged": (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "nested"),
    "functional": (torch._to_functional_tensor, "wrapper"),
    "left by vmap": (_left_by_vmap, "wrapper"),
}


@pytest.mark.filterwarnings("ignore")  # prototypes
@pytest.mark.parametrize("form", NOT_PLAIN)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_not_plain(form, backend):
    """Refused by name, as any argument."""
    make, word = NOT_PLAIN[form]
    x, y, rows = torch.randn(4, 5), torch.tensor([0, 1, 2, 4]), torch.rand(4, 5)

    def refuses(name, function, *inputs, **arguments):
        with pytest.raises(TypeError, match=rf"^{name} must be a .*plain|^{name} must be a dense strided tensor.*{word}"):
            function(*inputs, backend=backend, **arguments)

    for spec in LABELLED + UNLABELLED:
        more = {k: v for k, v in case(spec).arguments.items() if not isinstance(v, torch.Tensor)}
        if spec.name == "logit_adjusted":
            more["class_counts"] = torch.ones(5)
        refuses("input", getattr(pylosses, spec.function), make(x), *((y,) if spec in LABELLED else ()), **more)
    refuses("input", pylosses.confidence_scores, make(x))
    refuses("target", pylosses.cross_entropy, x, make(rows))
    for function in (pylosses.linear_cross_entropy, pylosses.linear_hem_loss):
        refuses("input", function, make(x), torch.randn(6, 5), y)
        refuses("linear_weight", function, x, make(torch.randn(6, 5)), y)
    refuses("a", pylosses.info_nce_loss, make(x), x)
    refuses("negative", pylosses.feature_contrastive_loss, x, x, make(x))
    if form in ("sparse_coo", "mkldnn", "quantized", "functional"):  # the other forms are matrices
        for name in ("weight", "bias"):
            refuses(name, pylosses.cross_entropy, x, y, **{name: make(torch.rand(5))})
        refuses("margin", pylosses.hem_loss, x, y, margin=make(torch.rand(5)))
        refuses("class_counts", pylosses.logit_adjusted_loss, x, y, class_counts=make(torch.rand(5)))
        refuses("sample_weight", pylosses.cross_entropy, x, y, sample_weight=make(torch.rand(4)))


class Wrapped(torch.Tensor):
    """A tensor that has another, and no memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        bare = torch.utils._pytree.tree_map(lambda v: v.inner if isinstance(v, cls) else v, (args, kwargs or {}))
        return function(*bare[0], **bare[1])


@pytest.mark.parametrize("backend", CE)
@pytest.mark.parametrize("which", ["input", "target", "soft", "weight", "sample_weight", "bias"])
def test_wrapped_argument(which, backend):
    """A subclass without memory of its own, in the place of any argument."""
    given = {
        "input": torch.randn(4, 5),
        "target": torch.rand(4, 5) if which == "soft" else torch.tensor([0, 1, 2, 4]),
        "weight": torch.rand(5),
        "sample_weight": torch.rand(4),
        "bias": torch.rand(5),
    }
    name = "target" if which == "soft" else which
    wanted = pylosses.cross_entropy(**given, backend=backend)
    found = pylosses.cross_entropy(**(given | {name: Wrapped(given[name])}), backend=backend)
    close("loss", found, wanted, rtol=1e-6)


@pytest.mark.parametrize("spec", [LOSSES["cross_entropy"], LOSSES["hem"]], ids=name_of)
def test_freed_memory(spec):
    """A storage that was resized to nothing, as sharded training does."""
    x = torch.randn(4, 5)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="input has no memory"):
        getattr(pylosses, spec.function)(x, torch.arange(4), backend="cpu")


# Batches of gradients, and derivatives forward --------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["default", "none"])
@pytest.mark.parametrize(("spec", "sample", "backend"), FIRST)
def test_batched_gradients(spec, sample, backend, reduction):
    """is_grads_batched, jacobian(vectorize=True) and vmap over torch.autograd.grad: each gradient as by itself."""
    c = case(spec, sample, "ignored")
    c = finest(c) if reduction == "none" else c
    x = c.inputs[0].clone().requires_grad_()

    def loss_of(a):
        return getattr(pylosses, spec.function)(a, *c.inputs[1:], backend=backend, **c.arguments)

    loss = loss_of(x)
    ups = torch.randn(3, *loss.shape)
    wanted = [torch.autograd.grad(loss_of(x), x, up)[0] for up in ups]
    for found in (
        torch.autograd.grad(loss, x, ups, is_grads_batched=True, retain_graph=True)[0],
        torch.func.vmap(lambda up: torch.autograd.grad(loss, x, up, retain_graph=True)[0])(ups),
    ):
        close("gradients", found, torch.stack(wanted), rtol=1e-5, atol=1e-7)
    jacobian = torch.autograd.functional.jacobian
    close("jacobian", jacobian(loss_of, x, vectorize=True), jacobian(loss_of, x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["default", "none"])
@pytest.mark.parametrize(("spec", "sample", "backend"), OWN)
def test_batched_gradients_of_own_inputs(spec, sample, backend, reduction):
    c = own_case(spec, sample, torch.float64)
    c = c.but(reduction="none") if reduction == "none" else c
    x = [t.clone().requires_grad_() if t.is_floating_point() else t for t in c.inputs]
    leaves = [t for t in x if t.requires_grad]

    def loss():
        return getattr(pylosses, spec.function)(*x, backend=backend, **c.arguments)

    ups = torch.randn(3, *loss().shape, dtype=torch.float64)
    wanted = [torch.autograd.grad(loss(), leaves, up) for up in ups]
    found = torch.autograd.grad(loss(), leaves, ups, is_grads_batched=True)
    for a, *b in zip(found, *wanted, strict=True):
        close("gradients", a, torch.stack(b), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", [b for b in CE if b.id != "reference"])
def test_batched_gradients_are_not_differentiated_again(backend):
    """They say so, like a single one, instead of being constants."""
    y = torch.arange(4)
    h, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    for loss in (pylosses.cross_entropy(h, y % 3, backend=backend), pylosses.linear_cross_entropy(h, w, y, backend=backend)):
        (gradient,) = torch.autograd.grad(loss, h, torch.ones(2), is_grads_batched=True, create_graph=True)
        with pytest.raises(RuntimeError, match='double backward.*backend="reference"'):
            gradient.sum().backward()


@pytest.mark.parametrize("how", ["jvp", "jacfwd", "hessian", "forward_ad", "jacobian"])
@pytest.mark.parametrize(
    ("spec", "sample", "backend"), [p for p in FIRST + OWN if p.values[1] == 0 and p.values[2] != "reference"]
)
def test_forward_mode_says_who_can(spec, sample, backend, how):
    """And the reference, chosen as the error says, gives the derivative."""
    own = spec.inputs == "own"
    c = own_case(spec, sample, torch.float64) if own else case(spec, sample, "plain", torch.float64)
    x, *rest = c.inputs
    t = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if spec.family == "contrastive":
        pytest.skip("it is the reference under torch.func")

    def forward_ad(f):
        with fwd.dual_level():
            return fwd.unpack_dual(f(fwd.make_dual(x, t))).tangent

    derivatives = {
        "jvp": lambda f: torch.func.jvp(f, (x,), (t,))[1],
        "jacfwd": lambda f: (torch.func.jacfwd(f)(x) * t).sum(),
        "hessian": lambda f: torch.func.hessian(f)(x),
        "forward_ad": forward_ad,
        "jacobian": lambda f: torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    }

    def loss(a, **chosen):
        return getattr(pylosses, spec.function)(a, *rest, **c.arguments, **chosen)

    with pytest.raises(RuntimeError, match='forward-mode.*backend="reference".*use_backend'):
        derivatives[how](lambda a: loss(a, backend=backend))
    if how == "forward_ad":
        found = forward_ad(lambda a: loss(a, backend="reference"))
        with pylosses.use_backend("reference"):
            assert torch.equal(forward_ad(loss), found)
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf, backend="reference"), leaf)
        close("derivative", found, (gradient * t).sum(), rtol=1e-9)
