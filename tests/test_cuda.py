"""Is the CUDA backend right without a GPU? Its sources emulated on the CPU, through the public API (see tests/cuda_on_cpu)."""

import ctypes
import os
import re
import shutil
import zlib
from pathlib import Path

import emulator
import pytest
import torch
from cases import (
    DTYPES,
    INF,
    KINDS,
    LABELLED,
    NAN,
    TARGET_DTYPES,
    UNLABELLED,
    case,
    finest,
    layouts,
    name_of,
    row_by_row,
    run,
    upstream_for,
)
from golden import calls, load
from sanitized import checked
from test_backends_agree import compare, compare_soft, same_results, soft_case
from test_golden import check as check_golden
from tolerance import close

import pylosses
from pylosses import cuda
from pylosses.autograd import Call
from pylosses.cli import main
from pylosses.spec import LOSSES

pytestmark = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler on this machine")
HERE = Path(__file__).parent
#: `make proofs` runs every dtype; otherwise they take turns.
EVERYTHING = os.environ.get("PYLOSSES_GPU_TESTS") == "all"
LOSSES_HERE = [spec for spec in LABELLED + UNLABELLED if spec.why_not("cuda") is None]
SAMPLES = [pytest.param(spec, i, id=f"{spec.name}{i}") for spec in LOSSES_HERE for i in range(len(spec.samples))]
FIRST = [pytest.param(spec, id=spec.name) for spec in LOSSES_HERE]


@pytest.fixture(autouse=True)
def emulated():
    with emulator.switched() as made:
        yield made


def dtypes_of(*case):
    """All of them, or one that turns with the case."""
    return DTYPES if EVERYTHING else DTYPES[zlib.crc32(repr(case).encode()) % len(DTYPES) :][:1]


def test_the_emulator_runs(emulated):
    status = pylosses.backends()["cuda"]
    assert status.available and "emulated" in status.reason
    assert set(cuda.kernels()) == {spec.kernel for spec in LOSSES_HERE}
    assert float(pylosses.cross_entropy(torch.zeros(2, 4), torch.tensor([0, 1]), backend="cuda")) == pytest.approx(1.3862944)
    assert len(emulated.launches()) == 2


# Agreement --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "sample"), SAMPLES)
def test_rows(spec, sample):
    """Every kind of row, each row with its own upstream gradient."""
    for kind in KINDS:
        if kind in ("special", "masked") and spec.family == "region" or kind == "special" and not row_by_row(spec, sample):
            continue  # with sums over the batch one NaN or infinity is everywhere
        if not EVERYTHING and (kind == "wide" and sample > 0 or kind == "huge" and (sample > 0 or spec.family == "region")):
            continue
        for dtype in dtypes_of(spec.name, sample, kind):
            c = finest(case(spec, sample, kind, dtype))
            inexact = spec.family == "region" or c.arguments.get("kind") == "sumexp"
            if kind == "huge" and dtype == torch.float64 and inexact:
                continue  # the truth itself is 50 ulps off; test_regions.py and test_backends_agree.py have long double
            compare(c, "cuda", f"{spec.function}[{kind} {name_of(dtype)}]")


@pytest.mark.parametrize("spec", FIRST)
def test_split_rows(spec, emulated):
    """Rows so long and few that several blocks share one."""
    if spec.family == "region":
        pytest.skip("Dice splits the batch, not a row")
    for dtype in dtypes_of(spec.name):
        emulated.reset()
        c = finest(case(spec, 0, "split", dtype))
        what = f"{spec.function}[split {name_of(dtype)}]"
        if spec.family == "entropy" and dtype == torch.float64:  # by long double the truth is off by 1e-13, we by 1e-16
            up = upstream_for(c)
            got, truth = run(c, "cuda", up), run(c, "reference", up)
            close(what, got.loss, truth.loss, rtol=1e-12)
            close(what, got.grads[0], truth.grads[0], rtol=1e-12)
        else:
            compare(c, "cuda", what)
        assert max(launch.grid[0] for launch in emulated.launches()) >= 2 * 5, "the rows were not split"


@pytest.mark.parametrize("classes", [1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 65, 127, 128, 129, 1024, 1025])
@pytest.mark.parametrize("name", ["cross_entropy", "hem", "entropy", "tta"])
def test_numbers_of_classes(name, classes):
    """Where a wider group takes over, and where vectors begin: rows at every distance from an aligned address."""
    spec = LOSSES[name]
    for dtype in dtypes_of(name, classes):
        c = case(spec, 0, "wide", dtype)
        x = c.inputs[0].repeat(6, 1)[:17, : classes + 1].clone()
        rest = tuple((t.clamp(min=0).repeat(6) + torch.arange(18))[:17] % classes for t in c.inputs[1:])
        for offset in (0, 1):
            chosen = c._replace(inputs=(x.view(-1)[offset:][: 17 * classes].view(17, classes), *rest), classes=classes)
            if name == "tta":
                chosen = chosen.but(skip=min(1, max(classes - 2, 0)), k=2)
            compare(finest(chosen), "cuda", f"{spec.function}[{classes} classes at offset {offset}]")


@pytest.mark.parametrize(("spec", "sample"), SAMPLES)
def test_pixels_and_layouts(spec, sample):
    for kind in ("plain", "ignored", "wide"):
        for dtype in dtypes_of(spec.name, sample, kind):
            c = finest(case(spec, sample, kind, dtype))
            compare(c.shaped(1, c.inputs[0].shape[0], 1), "cuda", f"{spec.function}[{kind} {name_of(dtype)} pixels]")
    if sample > 0:
        return
    c = case(spec, sample, "tied", torch.float32).shaped(2, 3, 2)
    up = upstream_for(c)
    plain, truth = run(c, "reference", up), run(c.double(), "reference", up)
    for layout, x in layouts(c.inputs[0]):
        got = run(c._replace(inputs=(x, *c.inputs[1:])), "cuda", up)
        same_results(c, f"{spec.function}[{layout}]", got, plain, truth)
        if torch.empty_like(x).stride() == x.stride():
            assert got.grads[0].stride() == x.stride()


@pytest.mark.parametrize("spec", FIRST)
def test_many_dimensions(spec):
    """More dimensions than the kernels walk are copied, and the gradient is where the logits are."""
    c = case(spec, 0, "masked", torch.float32).shaped(1, 2, 3, 2, 1)
    x = c.inputs[0]
    order = (0, 5, 2, 4, 1, 3)
    mixed = x.permute(order).contiguous().permute([order.index(d) for d in range(6)])
    up = upstream_for(c)
    same_results(
        c, spec.function, run(c._replace(inputs=(mixed, *c.inputs[1:])), "cuda", up), run(c, "reference", up),
        run(c.double(), "reference", up),
    )  # fmt: skip


@pytest.mark.parametrize("reduction", ["sum", "mean", "above_zero", "normalizer", "normalizer_tensor"])
@pytest.mark.parametrize("spec", FIRST)
def test_reductions(spec, reduction):
    if spec.family == "region" and reduction not in ("sum", "mean"):
        pytest.skip("Dice is a ratio of sums: it has no number of rows to divide by")
    for dtype in dtypes_of(spec.name, reduction):
        c = case(spec, 0, "ignored", dtype)
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        c = c.but(sample_weight=torch.rand(14, generator=torch.Generator().manual_seed(3)).to(statistics))
        if spec.inputs == "labelled":
            c = c.but(weight=torch.rand(11, generator=torch.Generator().manual_seed(4)).to(statistics))
        if reduction.startswith("normalizer"):
            c = c.but(reduction="mean", normalizer=7.5 if reduction == "normalizer" else torch.tensor(0.375))
        else:
            c = c.but(reduction=reduction)
        compare(c, "cuda", f"{spec.function}[{reduction}]")


def test_more_tiles_than_blocks():
    """So many rows that every block takes several."""
    spec = LOSSES["cross_entropy"]
    c = case(spec, 0, "three_classes", torch.float32)
    x, y = (t.repeat(20000, *(1,) * (t.dim() - 1)) for t in c.inputs)
    for reduction in ("none", "mean"):
        compare(c._replace(inputs=(x, y)).but(reduction=reduction), "cuda", f"many rows[{reduction}]")


def test_soft_targets():
    for sample in range(len(LOSSES["cross_entropy"].samples)):
        for kind in ("plain", "peaked", "offset"):
            for dtype in dtypes_of(sample, kind):
                for soft in (dtype, torch.float32, torch.float64):
                    c = soft_case(sample, kind, dtype, soft).but(reduction="none")
                    compare_soft(c, "cuda", f"soft[{kind} {name_of(dtype)} {name_of(soft)}]")
    x, soft = (t.reshape(1, 13, 1, -1).movedim(-1, 1) for t in soft_case(0, "plain", torch.bfloat16, torch.float32).inputs)
    for layout in (torch.contiguous_format, torch.channels_last):
        pixels = soft_case(0, "plain", torch.bfloat16, torch.float32).but(reduction="none")
        compare_soft(pixels._replace(inputs=(x, soft.contiguous(memory_format=layout))), "cuda", "soft pixels")


@pytest.mark.parametrize("golden", load(), ids=lambda c: c.id)
def test_golden(golden):
    for call in calls(golden):
        spec = next((s for s in LOSSES.values() if s.function == call.function), None)
        if spec in LOSSES_HERE:
            for dtype in DTYPES if EVERYTHING else (torch.float64, *dtypes_of(golden.id)):
                check_golden(golden, call, "cuda", dtype, None)
                if call.spatial:
                    check_golden(golden, call, "cuda", dtype, (2, 1, 3))


# Rows of a special kind -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", TARGET_DTYPES, ids=name_of)
def test_target_dtypes(index):
    x, y = torch.randn(6, 5), torch.tensor([0, 4, 255, 2, 255, 1])
    wanted = pylosses.cross_entropy(x, y, ignore_index=255, reduction="none", backend="cuda")
    narrow = y.to(index)
    ignore = int(narrow[2])
    assert torch.equal(pylosses.cross_entropy(x, narrow, ignore_index=ignore, reduction="none", backend="cuda"), wanted)
    assert wanted[2] == wanted[4] == 0 and wanted[0] > 0


def test_bad_labels():
    """On the CPU an error; on an accelerator, which the kernels cannot tell from here, NaN for the row and no gradient."""
    x, y = torch.randn(4, 5), torch.tensor([1, 7, -100, 2])
    with pytest.raises(IndexError, match="is 7"):
        pylosses.cross_entropy(x, y, backend="cuda")
    for name, scalars in (("cross_entropy", (0.0, 1.0, 0.0, 0.0)), ("hem", (1.0, 1.0, 0.0, 0.0, 1.0, 1.0))):
        call = Call("cuda", name, y, None, None, None, None, None, scalars, -100, "none", None)
        loss, saved = cuda.forward(call, x, True)
        assert loss.isnan().tolist() == [False, True, False, False] and loss[2] == 0
        gradient = cuda.backward(call, x, saved, torch.ones(4))
        assert (gradient[1:3] == 0).all() and gradient.isfinite().all()
        assert bool(cuda.forward(call._replace(reduction="mean"), x, True)[0].isnan())


def test_nan_and_inf_stay_in_their_rows():
    x = torch.randn(4, 6)
    x[1, 2], x[2, 3] = NAN, -INF
    loss = pylosses.cross_entropy(x, torch.tensor([0, 1, 3, 4]), reduction="none", backend="cuda")
    assert loss.isnan().tolist() == [False, True, False, False] and loss[2] == INF


@pytest.mark.parametrize("spec", FIRST)
def test_nothing_counts(spec):
    """An empty batch, and nothing but ignored rows: 0, with zeros for a gradient."""
    for shape in ((0, 7), (0, 7, 2, 3), (2, 7, 0), (3, 7)):
        x = torch.full(shape, NAN, requires_grad=True) if spec.inputs == "labelled" else torch.zeros(shape, requires_grad=True)
        arguments = spec.sample(0, 7)
        inputs = [x]
        if spec.inputs == "labelled":
            inputs.append(torch.full(shape[:1] + shape[2:], -100))
        elif x.numel() and spec.name in ("entropy", "adr"):
            arguments["mask"] = torch.zeros(shape[:1], dtype=torch.bool)
        elif x.numel():
            continue
        loss = getattr(pylosses, spec.function)(*inputs, **arguments, backend="cuda")
        (gradient,) = torch.autograd.grad(loss, x)
        assert float(loss.detach()) == 0 and not gradient.any(), (spec.name, shape)


def test_many_kept_classes():
    """The longest list, ties, and fewer classes than ranks."""
    x = torch.randint(0, 9, (3, 300), generator=torch.Generator().manual_seed(0)).float()
    for wide in (x, x[:, :40], x.repeat(1, 5)):
        leaf, other = wide.clone().requires_grad_(), wide.double().requires_grad_()
        got = pylosses.knl_loss(leaf, k=33, skip=30, backend="cuda")
        truth = pylosses.knl_loss(other, k=33, skip=30, backend="reference")
        (g,), (t,) = torch.autograd.grad(got, leaf), torch.autograd.grad(truth, other)
        assert torch.allclose(got.double(), truth, rtol=1e-5) and torch.allclose(g.double(), t, atol=1e-7)


# Threads ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "pixels", "wide", "split"])
@pytest.mark.parametrize("spec", FIRST)
def test_order_of_threads_does_not_matter(spec, kind, emulated):
    """The same bits in whatever order threads and blocks run: nothing is added up as it comes, no barrier is missing."""
    if kind == "split" and spec.name not in ("cross_entropy", "logit_norm", "hem", "entropy", "tta", "adr"):
        pytest.skip("other losses share the kernels of these; Dice does not split rows")
    if kind == "wide" and spec.family == "region" and not EVERYTHING:
        pytest.skip("4099 classes of Dice take long")
    c = case(spec, 0, "plain" if kind == "pixels" else kind, dtypes_of(spec.name, kind)[0]).but(
        reduction=spec.default_reduction
    )
    c = c.shaped(1, 13, 1) if kind == "pixels" else c
    wanted = run(c, "cuda")
    for seed, order in enumerate(emulator.ORDERS[1:]):
        emulated.order(order, seed)
        got = run(c, "cuda")
        assert torch.equal(got.loss, wanted.loss) or got.loss.isnan() and wanted.loss.isnan(), order
        assert torch.equal(got.grads[0].nan_to_num(7.0), wanted.grads[0].nan_to_num(7.0)), order


# Beside the other backends ----------------------------------------------------------------------------------------------------


def test_check_command(capsys):
    """`pylosses check` takes the backend like any other."""
    assert main(["check", "--backend", "cuda", "--loss", "hem"]) == 0
    assert "cuda" in capsys.readouterr().out


# Faults -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """An emulator of the entropy family whose reduction has faults to choose from: (emulator, choose(number))."""

    def edit(name, text):
        if name == "entropy.cu":
            return text + '\nextern "C" __attribute__((visibility("default"))) int on_cpu_fault;\nint on_cpu_fault = 0;\n'
        if name != "rowwise.cuh":
            return text
        text, barriers = re.subn(r"__syncthreads\(\);", "if (on_cpu_fault != 1) __syncthreads();", text, count=1)
        text, lanes = re.subn(
            r"(struct Lanes .*?void fold\(.*?\{)", r"\1 if (on_cpu_fault == 2 && threadIdx.x == 5) return;", text, flags=re.S
        )
        assert barriers == lanes == 1, "the sources have changed: this test spoils nothing"
        return text.replace("#pragma once", '#pragma once\nextern "C" int on_cpu_fault;', 1)

    sources = [p for p in emulator.kernel_sources() if p.stem in ("entropy", "finish", "bindings")]
    folder = tmp_path_factory.mktemp("spoiled")
    made = emulator.Emulator(emulator.build("spoiled", ("-O0",), sources=sources, edit=edit, folder=folder))
    return made, lambda fault: setattr(ctypes.c_int.in_dll(made.control, "on_cpu_fault"), "value", fault)


def test_a_removed_barrier_changes_results(spoiled):
    """The reduction of a block without the barrier before it reads what its warps wrote. The one after it matters only when the
    same reduction follows at once; test_cuda_harness.py removes such a one."""
    made, choose = spoiled
    c = case(LOSSES["entropy"], 0, "wide", torch.float32)
    with emulator.switched(made):
        wanted = run(c, "cuda")
        choose(1)
        for order in ("greedy", "greedy_reverse", "random"):
            made.order(order, 1)
            got = run(c, "cuda")
            assert not (torch.equal(got.loss, wanted.loss) and torch.equal(got.grads[0], wanted.grads[0])), order
        choose(0)


def test_a_missing_lane_is_an_error(spoiled):
    """A row's lanes reduce together: one that stays away would leave the others waiting."""
    made, choose = spoiled
    with emulator.switched(made):
        choose(2)
        with pytest.raises(RuntimeError, match="CUDA on the CPU: .*(shuffle|deadlock)"):
            pylosses.entropy_loss(torch.randn(13, 37), backend="cuda")
        choose(0)
        assert pylosses.entropy_loss(torch.randn(13, 37), backend="cuda").isfinite()


@pytest.mark.timeout(900)
@pytest.mark.skipif(not EVERYTHING, reason="another build of all sources: make proofs")
def test_sanitizers_find_nothing():
    """Memory that ends where the rows end, under AddressSanitizer and UndefinedBehaviorSanitizer; and that they are awake."""
    library = str(emulator.build("sanitized", emulator.SANITIZED))
    done = checked(emulator.HERE / "sanitized.py", library)
    assert done.returncode == 0 and "cases are clean" in done.stdout, done.stderr[-4000:]
    done = checked(emulator.HERE / "sanitized.py", library, "wrong")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr[-4000:]
