"""Is what nvcc makes of the CUDA kernels right? Its PTX is executed on the CPU: bounds, alignment, races, barriers, numbers."""

import os
import re
from collections import defaultdict
from itertools import count, product

import emulator
import nvcc
import ptx
import pytest
import torch
from expected import check
from gpu_calls import call_of, nasty

from pylosses import cuda
from pylosses.spec import LOSSES

pytestmark = pytest.mark.skipif(nvcc.NVCC is None, reason="no nvcc on this machine")
#: `make proofs` executes every loss, argument sample and form for both architectures; otherwise a part.
EVERYTHING = os.environ.get("PYLOSSES_GPU_TESTS") == "all"
ARCHS = ("sm_80", "sm_90")
#: (7, 37) and pixels are walked by lanes, the others by blocks, the last by several for each row
FORMS = {"rows": (7, 37), "pixels": (2, 7, 3, 5), "long": (2, 2060), "split": (1, 65600)}
#: every family on both architectures, a loss of each kind of pass over the logits, every way to walk a row. `make test` has the
#: PTX for sm_80 in the module that it built; what is executed for sm_90 is compiled, so there a family has one dtype.
PART = {
    "sm_80": {
        ("cross_entropy", "pixels"), ("dice_ce", "pixels"), ("tta", "pixels"), ("entropy", "long"), ("adr", "long"),
        ("logit_norm", "long"), ("hem", "split"), ("cross_entropy", "split"),
    },
    "sm_90": {(name, "rows") for name in ("cross_entropy", "logit_norm", "hem", "entropy", "tta", "adr", "dice_ce")},
}  # fmt: skip
SM_90 = {"softmax": 1, "margin": 0, "entropy": 2, "select": 1, "region": 0}
SINGLES = 40  #: logits that a kernel may read once more in a row: the label's, the bounds of a selection
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def executed():
    """(name, sample, soft targets?, form, dtype, arch). Dtypes take turns within a family and a way to walk, so that each of
    its kernels, which are compiled for all losses at once, comes up on either architecture: test_no_kernel_is_left_out. Where
    too few cases launch a kernel, each comes with every dtype."""
    turns = defaultdict(count)
    for spec in LOSSES.values():
        if spec.inputs == "own" or spec.why_not("cuda") is not None:
            continue
        softs = (False, True) if spec.name in ("cross_entropy", "cross_entropy_adr") else (False,)
        for sample, soft, form in product(range(len(spec.samples)), softs, FORMS):
            if spec.family == "region" and form == "split":  # Dice splits the batch, not a row
                continue
            turn = next(turns[spec.family, form])
            for arch in ARCHS:
                if not EVERYTHING and (sample > 0 or soft or (spec.name, form) not in PART[arch]):
                    continue
                few = spec.family == "entropy" or spec.samples[sample].get("scope") == "batch"
                own_turn = SM_90[spec.family] if arch == "sm_90" and not EVERYTHING else turn + ARCHS.index(arch)
                for dtype in DTYPES if EVERYTHING and few else (DTYPES[own_turn % 4],):
                    name = f"{spec.name}{sample}-{'soft-' if soft else ''}{form}-{str(dtype)[6:]}-{arch}"
                    yield pytest.param(spec.name, sample, soft, form, dtype, arch, id=name)


def problem(name, sample, soft, form, dtype):
    """(call, x, rows that count): an ignored row of NaN where there are labels and several rows."""
    x = nasty(FORMS[form], dtype)
    with emulator.switched():
        call = call_of(name, x, sample, backend="cuda", soft=soft)
    rows = x.numel() // x.shape[1]
    if call.y is None or rows == 1:
        return call, x, rows
    call.y.view(-1)[1] = -100
    x[(0, slice(None), 0, 1) if x.dim() == 4 else 1] = torch.nan
    return call, x, rows - 1


def check_executed(name, sample, soft, form, dtype, arch, edit=lambda text: text):
    call, x, live = problem(name, sample, soft, form, dtype)
    up = torch.tensor(0.75)
    got = nvcc.run(arch, call, x, up, edit)
    check("cuda", name, sample, call, x, up, got)
    return call, x, live, got


@pytest.mark.parametrize(("name", "sample", "soft", "form", "dtype", "arch"), list(executed()))
def test_ptx_computes_the_loss(name, sample, soft, form, dtype, arch):
    """Loss and gradient right, within the tensors, without races; the gradient is written once."""
    call, x, live, got = check_executed(name, sample, soft, form, dtype, arch)
    logits, gradient = nvcc.place(x), nvcc.place(got.gradient)
    assert sum(traffic.get(gradient, (0, 0))[1] for _, traffic in got.launches) == x.numel() * x.element_size()
    once = live * x.shape[1] * x.element_size()
    for launch, traffic in got.launches:
        least, most = nvcc.reads(launch, call, x)
        kernel, read, single = nvcc.short(launch.kernel), traffic[logits][0], live * x.element_size()
        fewer = single if kernel.endswith("_sums") else 0  # the label's, whose probability is known by then
        more = SINGLES * single if most else 0
        assert least * once - fewer <= read <= most * once + more, (kernel, read / once)


def without(pattern, kernel, which, instead=""):
    """An edit that replaces one place of a kernel's PTX."""

    def edit(text):
        found = list(re.finditer(pattern, text))
        if not re.search(rf"\.entry\s+\w*{kernel}", text) or len(found) <= which:
            return text
        return text[: found[which].start()] + instead + text[found[which].end() :]

    return edit


@pytest.mark.skipif(not EVERYTHING, reason="make test executes a part of the kernels")
@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_is_left_out(arch):
    """The cases above launch every kernel that nvcc makes."""
    launched = set()
    for name, sample, soft, form, dtype, its_arch in (case.values for case in executed()):
        if its_arch == arch:
            call, x, _ = problem(name, sample, soft, form, dtype)
            with emulator.switched() as made, made.handing(lambda launch: launched.add(launch.kernel)):
                loss, saved = cuda.forward(call, x, True)
                cuda.backward(call, x, saved, torch.ones_like(loss))
    known = {kernel for family in nvcc.families() for kernel in ptx.entries(nvcc.ptx_file(family, arch).read_text())}
    assert known and launched == known, sorted(known ^ launched)


def test_a_removed_barrier_is_found():
    """Barriers before what other warps wrote is read; those after it only matter when the same memory is written again."""
    call, x, _ = problem("cross_entropy", 0, False, "long", torch.float32)
    pattern = r"bar\.sync[^;]*;"
    passed, found = 0, 0
    for kernel, barriers in (("softmax_rows", 9), ("divide_sums", 2)):
        for which in range(barriers):
            try:
                nvcc.run("sm_80", call, x, edit=without(pattern, kernel, which, "trap;"))
                continue  # a way that this loss does not take
            except NotImplementedError:
                passed += 1
            try:
                nvcc.run("sm_80", call, x, edit=without(pattern, kernel, which))
            except ptx.PtxError as error:
                assert "race" in str(error) or "uninitialised" in str(error)
                found += 1
    assert passed >= 5 and found >= passed // 2 + 1, (passed, found)


def test_a_wrong_bound_is_found():
    """Kernels that believe in one class more read past the end."""
    call, x, _ = problem("cross_entropy", 0, False, "rows", torch.float32)
    with emulator.switched() as made, nvcc.Memory(x, *call.tensors()) as memory, pytest.raises(ptx.PtxError, match="of bounds"):

        def spoil(launch):
            parameters = bytearray(launch.parameters[0])
            assert int.from_bytes(parameters[4:8], "little") == x.shape[1]  # Call::classes
            parameters[4:8] = (x.shape[1] + 1).to_bytes(4, "little")
            nvcc.execute("sm_80", launch._replace(parameters=(bytes(parameters), *launch.parameters[1:])), memory, x.dtype)

        with made.handing(spoil):
            cuda.forward(call, x, True)


def test_a_wrong_number_is_found():
    with pytest.raises(AssertionError):
        check_executed("entropy", 0, False, "rows", torch.float32, "sm_80", lambda text: text.replace("add.f32", "sub.f32", 40))
    call, x, _, got = check_executed("entropy", 0, False, "rows", torch.float32, "sm_80")
    got.saved[2] += 1  # the maximum of the first row
    with pytest.raises(AssertionError, match="m of rows"):
        check("cuda", "entropy", 0, call, x, torch.tensor(0.75), got)
