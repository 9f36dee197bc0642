"""What do the Triton kernels become? Compiled ahead of time for four GPUs, and the PTX executed on the CPU (see tests/gpu).

`make test` takes a part in turns that meets every loss and every target; PYLOSSES_GPU_TESTS=all (`make proofs`) everything,
PYLOSSES_GPU_TESTS=families a loss of each family.
"""

import importlib.util
import os
import re
import zlib
from itertools import product

import pytest
import torch
from expected import check, check_saved
from gpu_calls import arguments_of, nasty, truth
from tolerance import agree

import pylosses
from pylosses import triton as backend
from pylosses.spec import LOSSES

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: pip install 'pylosses[triton]'", allow_module_level=True)

CHOSEN = os.environ.get("PYLOSSES_GPU_TESTS", "")
EVERYTHING = CHOSEN == "all"
#: a loss of each family, and of each kind of pass over the logits
ONE_OF_EACH = ("cross_entropy", "logit_norm", "hem", "entropy", "tta", "adr", "dice_ce")


# Compiled ahead of time -------------------------------------------------------------------------------------------------------

NVIDIA = ("sm_80", "sm_90", "sm_100")
LONG, SHORT, PIXELS = (8, 32000), (64, 1000), (2, 19, 16, 16)
COMPILED = [
    pytest.param(name, shape, target, id=f"{name}-{'x'.join(map(str, shape))}-{target}")
    for i, name in enumerate(ONE_OF_EACH)
    for j, shape in enumerate([(2, 300, 16, 16), PIXELS] if LOSSES[name].family == "region" else [LONG, SHORT, PIXELS])
    for k, target in enumerate((*NVIDIA, "gfx942"))
    if EVERYTHING or (i % 4 == k and (i + j) % 2 == 0)
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_linear_kernels_fit_turing(dtype):
    """The compiler's number for sm_75, whose multiprocessors have 64 KiB of shared memory."""
    from ahead import compiling, layer_of

    call, h, w, b = layer_of("cross_entropy", dtype, 256, 512, 128)
    with compiling("sm_75") as launches:
        loss, saved = backend.product_forward(call, h, w, b)
        backend.product_backward(call, h, w, b, saved, loss, (True, True, True))
    sizes = {launch.name: launch.compiled.metadata.shared for launch in launches}
    assert "linear.d_hidden" in sizes and max(sizes.values()) <= 64 * 2**10, sizes


@pytest.mark.parametrize(("name", "shape", "target"), COMPILED)
def test_compiles_to_what_the_model_says(name, shape, target):
    """No spills, whole vectors, and in the innermost loop no load or store more than the traffic model has."""
    from ahead import call_of, compiling, resources
    from loops import accesses
    from model import traffic

    x = torch.randn(shape).bfloat16()
    call = call_of(name, x)
    with compiling(target) as launches:
        loss, saved = backend.forward(call, x, True)
        backend.backward(call, x, saved, loss)
    assert len(launches) >= 3
    for launch in launches:
        found = resources(launch)
        assert found.spilled == 0, f"{launch.name} on {target}: {found}"
        assert 0 < found.registers <= (512 if target == "gfx942" else 255)
        if "p_x" not in launch.arguments or target == "gfx942":
            continue
        model, loops = traffic(launch), accesses(launch)
        assert sum(a.stores for a in loops) == model.writes, (launch.name, loops)
        if launch.arguments["WHOLE"]:  # no loop over the classes: single logits count with the block
            most = model.reads + 2 * max(model.singles, 1)  # which may be loaded in two layouts
            assert model.reads <= sum(a.loads for a in loops) <= most, (launch.name, loops)
        else:
            assert sum(a.loads for a in loops) == model.reads, (launch.name, loops)
        if shape in (LONG, SHORT):  # 16 bytes a lane
            numbers = launch.arguments["ROWS"] * launch.arguments["BLOCK"] / (32 * launch.warps)
            assert found.wide >= (model.reads + model.writes) * numbers * x.element_size() / 16, (launch.name, found)


#: machine instructions for each logit in the loops of forward and backward, 128256 classes on sm_90: they may only fall
INSTRUCTIONS = {
    ("cross_entropy", torch.bfloat16): (13, 10.5),
    ("cross_entropy", torch.float32): (16.5, 13.5),
    ("entropy", torch.bfloat16): (22, 11),
    ("hem", torch.bfloat16): (33.5, 12),
}
if EVERYTHING:
    INSTRUCTIONS |= {
        ("focal", torch.bfloat16): (13, 10.5),
        ("target", torch.bfloat16): (13, 10.5),
        ("logit_adjusted", torch.bfloat16): (16, 13.5),
        ("logit_norm", torch.bfloat16): (36, 17),
        ("multi_margin", torch.bfloat16): (18.5, 12),
        ("sparse_cl", torch.bfloat16): (26.5, 9.5),
        ("tta", torch.bfloat16): (28, 41),
        ("knl", torch.bfloat16): (28, 37),
        ("adr", torch.bfloat16): (26.5, 24),
        ("cross_entropy_adr", torch.bfloat16): (36, 33),
        ("entropy", torch.float32): (23.5, 13),
        ("hem", torch.float32): (33.5, 12.5),
        ("cross_entropy_adr", torch.float32): (42, 40),
    }


@pytest.mark.parametrize(("name", "dtype"), INSTRUCTIONS, ids=lambda value: str(value).removeprefix("torch."))
def test_loops_have_few_instructions(name, dtype):
    """In the machine code of long rows, where issue slots bind before memory does."""
    from ahead import resources
    from sass import launches_of, per_logit

    kernels = launches_of(name, dtype, "sm_90", 128256)
    for launch, most in zip(kernels, INSTRUCTIONS[name, dtype], strict=True):
        found = sum(sum(loop.values()) for loop in per_logit(launch))
        assert 5 < found <= most, f"{launch.name}: {found:.1f} instructions a logit"
        assert resources(launch).spilled == 0


# Executed ---------------------------------------------------------------------------------------------------------------------

FORMS = {"rows": (7, 37), "pixels": (2, 7, 3, 5), "one": (1, 1), "long": (2, 8200)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def executed():
    """(name, sample, soft targets?, form, target): a part of them, or everything; targets take turns where all would only be
    the same again: beyond the first arguments."""
    turn = 0
    for spec in LOSSES.values():
        if spec.why_not("triton") is not None or spec.family == "linear":
            continue
        softs = (False, True) if spec.name in ("cross_entropy", "cross_entropy_adr") else (False,)
        for sample, soft, form in product(range(len(spec.samples)), softs, FORMS):
            if form == "one" and sample > 0:
                continue
            if not EVERYTHING and (sample > 0 or form == "one" or form != "rows" and spec.name not in ONE_OF_EACH):
                continue
            if CHOSEN == "families" and (form != "rows" or spec.name not in ONE_OF_EACH):
                continue
            turn += 1
            for target in NVIDIA if EVERYTHING and sample == 0 else NVIDIA[turn % 3 : turn % 3 + 1]:
                name = f"{spec.name}{sample}-{'soft-' if soft else ''}{form}-{target}"
                yield pytest.param(spec.name, sample, soft, form, target, id=name)


def problem(name, sample, soft, form):
    """(call, x, rows that count): an ignored row of NaN where there are labels and several rows; the dtype turns."""
    from ahead import call_of

    dtype = DTYPES[zlib.crc32(f"{name}{sample}{form}".encode()) % 4]
    shape = FORMS[form]
    if form == "long":
        shape = (2, 300, 1, 5) if LOSSES[name].family == "region" else (2, 4100) if dtype == torch.float64 else shape
    x = nasty(shape, dtype)
    call = call_of(name, x, sample, soft=soft)
    rows = x.numel() // x.shape[1]
    if call.y is None or rows == 1:
        return call, x, rows
    call.y.view(-1)[1] = -100
    x[(0, slice(None), 0, 1) if x.dim() == 4 else 1] = torch.nan
    return call, x, rows - 1


def check_executed(name, sample, soft, form, target, edit=lambda text: text):
    from emulated import run
    from model import traffic

    spec = LOSSES[name]
    call, x, live = problem(name, sample, soft, form)
    up = torch.tensor(0.75)
    got = run(target, call, x, up, edit)
    check("triton", name, sample, call, x, up, got)
    for launch, bytes_of in got.traffic:
        if "p_x" not in bytes_of:
            continue
        model, size = traffic(launch), x.element_size()
        read, once = bytes_of["p_x"][0], live * x.shape[1] * size
        most = model.reads * once + 2 * model.singles * live * size  # a compiler may load single logits in two layouts
        assert read <= most, f"{launch.name} reads {read} bytes of logits, the model {most}"
        filtered = spec.family == "margin" or "max_entropy" in spec.samples[sample]  # rows that backward may skip
        if not filtered:
            assert read >= model.reads * once
        if "p_soft" in bytes_of:
            assert bytes_of["p_soft"][0] == call.soft.numel() * call.soft.element_size()
        if model.writes:
            assert bytes_of["p_grad"][1] == x.numel() * size, "backward writes each place of the gradient once"


@pytest.mark.parametrize(("name", "sample", "soft", "form", "target"), list(executed()))
def test_ptx_computes_the_loss(name, sample, soft, form, target):
    """The compiled code: loss, statistics and gradient right, within its buffers, without races, no byte too many."""
    check_executed(name, sample, soft, form, target)


@pytest.mark.parametrize("classes", [40, 36, 34, 33] if EVERYTHING else [36, 33])
def test_vectors_are_aligned(classes):
    """Rows whose length 8, 4, 2 or 1 divides, at an aligned address and at one that is not; misaligned accesses raise."""
    from ahead import call_of
    from emulated import run

    for offset in (0, 1):
        x = nasty((3 * classes + offset, 1), torch.bfloat16).view(-1)[offset:].view(3, classes)
        call = call_of("cross_entropy", x)
        got = run("sm_90", call, x)
        loss, gradient = truth("cross_entropy", 0, call, x, torch.ones(()))
        assert float((got.loss - loss).abs()) <= 4e-6 * float(loss)
        assert float((got.gradient.double() - gradient).abs().max()) <= 0.01 * float(gradient.abs().max())


def test_other_strides_are_other_kernels():
    """What divides the strides is compiled in, so the launcher must tell them apart."""
    from ahead import call_of, compiling

    with compiling("sm_80", forget=False) as launches:
        for classes in (1000, 1004, 1001, 1000):
            x = torch.randn(4, classes).bfloat16()
            backend.forward(call_of("cross_entropy", x, reduction="none"), x, True)
    a, b, c, again = (launch.compiled for launch in launches)
    assert a is again and len({a, b, c}) == 3


def test_a_removed_barrier_is_found():
    import ptx
    from emulated import run

    call, x, _ = problem("cross_entropy", 0, False, "long")
    barriers = []
    run("sm_80", call, x, edit=lambda text: barriers.append(len(re.findall(r"bar\.sync[^;]*;", text))) or text)
    assert barriers[0] > 0
    for which in range(barriers[0]):

        def spoil(text, which=which):
            found = list(re.finditer(r"bar\.sync[^;]*;", text))
            return text if len(found) <= which else text[: found[which].start()] + text[found[which].end() :]

        with pytest.raises(ptx.PtxError, match="race|uninitialised"):
            run("sm_80", call, x, edit=spoil)


def test_a_wrong_mask_is_found():
    """Kernels that believe in one class more read and write past the end."""
    import ptx
    from ahead import call_of, compiling
    from emulated import execute

    x = nasty((3, 37), torch.float32)
    call = call_of("cross_entropy", x)

    def spoil(launch):
        launch.arguments["C"] = launch.arguments.get("C", 0) + 1
        execute(launch)

    with pytest.raises(ptx.PtxError, match="out of bounds"), compiling("sm_90", spoil):
        backend.forward(call, x, True)


def test_a_wrong_statistic_is_found():
    """A row whose maximum is taken over something else."""
    with pytest.raises(AssertionError):
        check_executed("entropy", 0, False, "rows", "sm_90", lambda text: text.replace("max.f", "min.f", 3))
    check_executed("entropy", 0, False, "rows", "sm_90")


# Losses of a linear layer -----------------------------------------------------------------------------------------------------

#: (loss, dtype, target); products of halves are wgmma on sm_90 and tcgen05 on sm_100, which are compiled but not executed
LAYERS = [
    ("cross_entropy", torch.bfloat16, "sm_80"),
    ("hem", torch.float16, "sm_80"),
    ("logit_norm", torch.float32, "sm_90"),
    ("hem", torch.float32, "sm_100"),
    ("focal", torch.float64, "sm_80"),
]
LINEAR = [spec.name for spec in LOSSES.values() if spec.family in ("softmax", "margin") and spec.inputs == "labelled"]
if EVERYTHING:
    kinds = [
        (torch.bfloat16, "sm_80"),
        (torch.float16, "sm_80"),
        (torch.float64, "sm_80"),
        *((torch.float32, t) for t in NVIDIA),
    ]
    LAYERS += [(name, *kind) for name in LINEAR for kind in kinds]
elif CHOSEN == "families":
    LAYERS = LAYERS[:3]
#: shared memory of a block
SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
TENSOR_CORES = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}


def case_id(value):
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(
    ("name", "dtype", "target"),
    [
        (name, dtype, target)
        for i, (name, dtype) in enumerate(product(("cross_entropy", "hem", "logit_norm"), DTYPES))
        for j, target in enumerate((*NVIDIA, "gfx942"))
        if EVERYTHING or (i, j) in ((1, 1), (5, 3))
    ],
    ids=case_id,
)
def test_a_layer_compiles(name, dtype, target):
    """No spills, tensor cores for halves, nothing in memory that is as large as the logits."""
    from ahead import compiling, layer_of, resources

    rows, classes = 256, 1000
    call, h, w, b = layer_of(name, dtype, rows, classes, 512)
    with compiling(target) as launches:
        loss, saved = backend.product_forward(call, h, w, b)
        backend.product_backward(call, h, w, b, saved, torch.ones_like(loss), (True, True, True))
    names = [launch.name for launch in launches]
    assert names[-2:] == ["linear.d_hidden", "linear.d_weight"]
    for launch in launches:
        found = resources(launch)
        assert found.spilled == 0 and found.shared <= SHARED[target], f"{launch.name} on {target}: {found}"
        if (
            dtype.itemsize == 2
            and "STEP" in launch.arguments
            and launch.name != "linear_tile.label_logits"
            and target != "gfx942"
        ):
            assert TENSOR_CORES[target] in launch.compiled.asm["ptx"]
        for argument, value in launch.arguments.items():
            assert not isinstance(value, torch.Tensor) or value.numel() != rows * classes, f"{launch.name}: {argument}"


def check_layer(name, dtype, target, edit=lambda text: text):
    from ahead import layer_of
    from emulated import run_layer

    rows, classes = 40, 150
    call, h, w, b = layer_of(name, dtype, rows, classes, 48)
    h = h / 4
    call.y[1], h[1] = -100, torch.nan
    saved, *got = run_layer(target, call, h, w, b, torch.tensor(0.75), edit)
    x = (h.nan_to_num().double() @ w.double().t() + b.double()).masked_fill((call.y == -100)[:, None], torch.nan)
    terms = (h.nan_to_num().double().abs() @ w.double().abs().t() + b.double().abs()).amax(1)
    own = arguments_of(name, 0, h.new_empty(rows, classes))
    check_saved("triton", name, own, call, x, saved, 1e-12 if dtype == torch.float64 else 4e-6, terms=terms)
    results = []
    for kind in (dtype, torch.float64):
        given = [t.nan_to_num().to(kind).requires_grad_() for t in (h, w, b)]
        arguments = own | {"reduction": call.reduction, "backend": "reference"}
        loss = pylosses.linear_loss(given[0], given[1], call.y, loss=name, linear_bias=given[2], **arguments)
        results.append((loss.detach(), *torch.autograd.grad(loss, given, torch.tensor(0.75).to(loss.dtype))))
    for what, mine, plain, exact in zip(("loss", "input", "weight", "bias"), got, *results, strict=True):
        if dtype == torch.float64:
            assert float((mine - exact).abs().max()) <= 1e-12 * float(exact.abs().max())
        else:
            agree(what, mine.reshape(1, -1), plain.reshape(1, -1), exact.reshape(1, -1), row=1)


@pytest.mark.parametrize(("name", "dtype", "target"), LAYERS, ids=case_id)
def test_ptx_computes_the_loss_of_a_layer(name, dtype, target):
    check_layer(name, dtype, target)


def test_no_kernel_is_left_out():
    """The cases above launch every kernel of the package."""
    from ahead import kernels, layer_of, recording

    with recording() as launched:
        for case in executed():
            call, x, _ = problem(*case.values[:4])
            loss, saved = backend.forward(call, x, True)
            backend.backward(call, x, saved, torch.ones_like(loss))
        for name, dtype, _ in LAYERS:
            call, *layer = layer_of(name, dtype, 40, 150, 48)
            loss, saved = backend.product_forward(call, *layer)
            backend.product_backward(call, *layer, saved, torch.ones_like(loss), (True, True, True))
    assert len(launched) >= 20 and launched == kernels()


def test_a_copy_that_is_not_waited_for_is_found():
    import ptx

    with pytest.raises(ptx.PtxError, match="uninitialised"):
        check_layer("cross_entropy", torch.bfloat16, "sm_80", lambda text: re.sub(r"cp\.async\.wait_group[^;]*;", "", text))
