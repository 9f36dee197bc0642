"""Is the Triton backend right without a GPU? Interpreted, compiled ahead of time, and its PTX executed (see tests/gpu)."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pylosses
from pylosses import triton as backend
from pylosses.spec import LOSSES

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "gpu"))
INSTALLED = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not INSTALLED, reason="Triton is not installed: pip install 'pylosses[triton]'")


def python(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


# Choice of the backend --------------------------------------------------------------------------------------------------------


def test_import_does_not_import_triton():
    assert python("import sys, pylosses; pylosses.backends(); print('triton' in sys.modules)") == "False"


def test_absence_has_a_reason():
    if backend.absent() is None:
        pytest.skip("a GPU is here")
    with pytest.raises(pylosses.BackendError, match="TRITON_INTERPRET=1|not installed"):
        pylosses.cross_entropy(torch.randn(2, 3), torch.tensor([0, 1]), backend="triton")


@needs_triton
def test_interpreter_makes_it_available():
    code = "import torch, pylosses; x = torch.zeros(2, 4); print(float(pylosses.entropy_loss(x, backend='triton')))"
    assert float(python(code, TRITON_INTERPRET="1")) == pytest.approx(1.3862944)


# Interpreted ------------------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", ["test_rows", "not test_rows"])
def test_interpreted(part):
    """The switch is read when Triton is imported: a process of its own. Halves, so that two workers share them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "gpu" / "interpreted.py", "-k", part]
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=HERE.parent
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 30


# Compiled ahead of time -------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", ["cross_entropy", "hem", "entropy", "dice_ce"])
def test_compiles_without_spills(name, target):
    """A representative kernel of each family for every target; `make gpu-report` has them all."""
    from ahead import call_of, compiling, resources

    x = torch.randn((2, 19, 16, 16) if name == "dice_ce" else (8, 32000)).bfloat16()
    call = call_of(name, x)
    with compiling(target) as launches:
        loss, saved = backend.forward(call, x, True)
        backend.backward(call, x, saved, loss)
    assert len(launches) >= 3
    for launch in launches:
        found = resources(launch)
        assert found.spilled == 0, f"{launch.name} on {target}: {found}"
        assert 0 < found.registers <= 255
    if name == "cross_entropy" and target != "gfx942":  # per lane 32 logits: 4 loads of 16 bytes, 4 stores
        wide = {launch.name: resources(launch).wide for launch in launches}
        assert wide["softmax.forward"] >= 4 and wide["softmax.backward"] >= 8, wide


# Executed ---------------------------------------------------------------------------------------------------------------------

NVIDIA = ("sm_80", "sm_90", "sm_100")
#: how many single logits of a row a kernel reads beside the row: the label's, and those that bound the selected classes
BESIDE = {"softmax": (1, 1), "margin": (1, 1), "entropy": (0, 0), "region": (0, 0)}


def nasty(shape, dtype):
    """Large logits."""
    return (30 * torch.randn(shape, generator=torch.Generator().manual_seed(2))).to(dtype)


def truth(name, sample, call, x, up):
    spec = LOSSES[name]
    arguments = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in spec.sample(sample, x.shape[1]).items()}
    leaf = torch.where(x.isnan(), 0, x).double().requires_grad_()
    inputs = [leaf] if call.y is None else [leaf, call.y]
    loss = getattr(pylosses, spec.function)(*inputs, backend="reference", **arguments, reduction=call.reduction)
    return loss.detach(), torch.autograd.grad(loss, leaf, up.double())[0]


EXECUTED = [
    (spec.name, sample)
    for spec in LOSSES.values()
    if spec.why_not("triton") is None
    for sample in range(len(spec.samples))
    if sample == 0 or spec.family == "select"
]


@needs_triton
@pytest.mark.parametrize(("name", "sample"), EXECUTED)
def test_ptx_computes_the_loss(name, sample):
    """The compiled code, on odd sizes, an ignored row of NaN: right, within its buffers, without races, no byte too many."""
    from ahead import call_of
    from emulated import run

    family = LOSSES[name].family
    turn = EXECUTED.index((name, sample))
    dtype = (torch.float32, torch.bfloat16, torch.float16, torch.float64)[turn % 4]
    x = nasty((2, 7, 3, 5) if family == "region" or turn % 3 == 0 else (7, 37), dtype)
    call = call_of(name, x, sample)
    rows = x.numel() // x.shape[1]
    live = rows
    if call.y is not None:
        call.y.view(-1)[3] = -100
        x[(0, slice(None), 0, 3) if x.dim() == 4 else 3] = torch.nan
        live -= 1
    up = torch.randn(())
    got = run(NVIDIA[turn % 3], call, x, up)
    loss, gradient = truth(name, sample, call, x, up)
    half = 2 * torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0
    bound = (1e-12 if dtype == torch.float64 else 4e-6) + half
    assert float((got.loss - loss).abs()) <= bound * max(float(loss.abs()), 1e-3)
    assert float((got.gradient.double() - gradient).abs().max()) <= bound * float(gradient.abs().max())
    if family in BESIDE:
        size = x.element_size()
        forward, backward = ([t["p_x"][0] for n, t in got.traffic if n.endswith(w)][0] for w in ("forward", "backward"))
        written = [t["p_grad"][1] for n, t in got.traffic if n.endswith("backward")][0]
        once = live * x.shape[1] * size
        beside = [b + (name == "dice_ce") for b in BESIDE[family]]
        assert forward == once + beside[0] * live * size, "forward reads each logit of a counted row once"
        assert written == x.numel() * size, "backward writes each gradient once"
        assert backward <= once + beside[1] * live * size, "backward reads each logit once"
        if family != "margin":  # which skips rows without an error
            assert backward == once + beside[1] * live * size


@needs_triton
def test_long_rows_are_streamed():
    """A row of several blocks: cross-entropy reads it once, the margin loss twice."""
    from ahead import call_of
    from emulated import run

    for name, times in (("cross_entropy", 1), ("hem", 2)):
        x = nasty((2, 8200), torch.float32)
        got = run("sm_90", call_of(name, x), x)
        assert [t["p_x"][0] for n, t in got.traffic if n.endswith("forward")] == [times * x.numel() * 4 + 2 * 4]


@needs_triton
def test_a_removed_barrier_is_found():
    import ptx
    from ahead import call_of
    from emulated import run

    x = nasty((2, 8200), torch.float32)
    call = call_of("cross_entropy", x)
    barriers = []
    run("sm_80", call, x, edit=lambda text: barriers.append(len(re.findall(r"bar\.sync[^;]*;", text))) or text)
    assert barriers[0] > 0
    for which in range(barriers[0]):

        def spoil(text, which=which):
            found = list(re.finditer(r"bar\.sync[^;]*;", text))
            return text if len(found) <= which else text[: found[which].start()] + text[found[which].end() :]

        with pytest.raises(ptx.PtxError, match="race|uninitialised"):
            run("sm_80", call, x, edit=spoil)


@needs_triton
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
