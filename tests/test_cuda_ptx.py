"""Is what nvcc makes of the CUDA kernels right? Its PTX is executed on the CPU: bounds, alignment, races, barriers, numbers."""

import os
import re
import zlib
from itertools import product

import emulator
import nvcc
import ptx
import pytest
import torch
from calls import call_of, nasty, truth

from pylosses import cuda
from pylosses.spec import LOSSES

pytestmark = pytest.mark.skipif(nvcc.NVCC is None, reason="no nvcc on this machine")
#: `make gpu-check` executes everything for both architectures; otherwise a part, in turns.
EVERYTHING = os.environ.get("PYLOSSES_GPU_TESTS") == "all"
ARCHS = ("sm_80", "sm_90")
#: a loss of each family, and of each kind of pass over the logits
ONE_OF_EACH = ("cross_entropy", "logit_norm", "hem", "entropy", "tta", "adr", "dice_ce")
FORMS = {"rows": (7, 37), "pixels": (2, 7, 3, 5), "long": (2, 2060), "split": (1, 65600)}
#: forward and backward of every family, every way to walk a row
PART = set(product(ONE_OF_EACH, ("rows",))) | {
    ("cross_entropy", "pixels"), ("dice_ce", "pixels"), ("tta", "pixels"), ("entropy", "long"), ("adr", "long"),
    ("logit_norm", "long"), ("hem", "split"), ("cross_entropy", "split"),
}  # fmt: skip
SINGLES = 40  #: logits that a kernel may read once more in a row: the label's, the bounds of a selection
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def executed():
    for spec in LOSSES.values():
        if spec.inputs == "own" or spec.why_not("cuda") is not None:
            continue
        softs = (False, True) if spec.name in ("cross_entropy", "cross_entropy_adr") else (False,)
        for sample, soft, form, arch in product(range(len(spec.samples)), softs, FORMS, ARCHS):
            if spec.family == "region" and form in ("long", "split"):
                continue
            if not EVERYTHING and (sample > 0 or soft or arch != "sm_80" or (spec.name, form) not in PART):
                continue
            turn = DTYPES[: 2 if form == "rows" else 4]
            dtypes = DTYPES if EVERYTHING else (turn[zlib.crc32(f"{spec.name}{form}".encode()) % len(turn)],)
            for dtype in dtypes:
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
    loss, gradient = truth(name, sample, call, x, up)
    single = 1e-12 if dtype == torch.float64 else 4e-6
    assert float((got.loss - loss).abs()) <= single * max(float(loss.abs()), 1e-3)
    rounding = torch.finfo(dtype).eps if x.element_size() == 2 else 0
    tiny = torch.finfo(dtype).tiny
    assert float((got.gradient.double() - gradient).abs().max()) <= (single + rounding) * float(gradient.abs().max()) + tiny
    return call, x, live, got


@pytest.mark.parametrize(("name", "sample", "soft", "form", "dtype", "arch"), list(executed()))
def test_ptx_computes_the_loss(name, sample, soft, form, dtype, arch):
    """Loss and gradient right, within the tensors, without races; the gradient is written once."""
    call, x, live, got = check_executed(name, sample, soft, form, dtype, arch)
    logits, gradient, spec = nvcc.place(x), nvcc.place(got.gradient), LOSSES[name]
    assert sum(traffic.get(gradient, (0, 0))[1] for _, traffic in got.launches) == x.numel() * x.element_size()
    once = live * x.shape[1] * x.element_size()
    for launch, traffic in got.launches:
        kernel = nvcc.short(launch.kernel)
        least, most = nvcc.reads(kernel, name)
        if spec.family == "select" and form == "pixels":
            most *= 4  # a pass for every few ranks of the selection: seen are 8 for tta, 2 for ADR
        read = traffic[logits][0]
        assert least * once <= read <= most * once + (SINGLES * live * x.element_size() if most else 0), (kernel, read / once)


def without(pattern, kernel, which, instead=""):
    """An edit that replaces one place of a kernel's PTX."""

    def edit(text):
        found = list(re.finditer(pattern, text))
        if not re.search(rf"\.entry\s+\w*{kernel}", text) or len(found) <= which:
            return text
        return text[: found[which].start()] + instead + text[found[which].end() :]

    return edit


@pytest.mark.parametrize("name", ONE_OF_EACH if EVERYTHING else ("entropy",))
def test_ptx_of_another_architecture(name):
    """In short: one family for sm_90 too."""
    for dtype in (torch.float32, torch.bfloat16):
        check_executed(name, 0, False, "rows", dtype, "sm_90")


def test_a_removed_barrier_is_found():
    """Barriers before what other warps wrote is read; those after it only matter when the same memory is written again."""
    call, x, _ = problem("cross_entropy", 0, False, "long", torch.float32)
    pattern = r"bar\.sync[^;]*;"
    passed, found = 0, 0
    for kernel, count in (("softmax_rows", 9), ("divide_sums", 2)):
        for which in range(count):
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
            nvcc.execute("sm_80", launch._replace(parameters=(bytes(parameters), *launch.parameters[1:])), memory)

        with made.handing(spoil):
            cuda.forward(call, x, True)


def test_a_wrong_number_is_found():
    with pytest.raises(AssertionError):
        check_executed("entropy", 0, False, "rows", torch.float32, "sm_80", lambda text: text.replace("add.f32", "sub.f32", 40))
    check_executed("entropy", 0, False, "rows", torch.float32, "sm_80")
