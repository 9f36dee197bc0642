"""Does the CUDA backend behave around its kernels? The built module without a driver, arguments, devices, streams, errors."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import emulator
import pytest
import torch

import pylosses
from pylosses import cuda

NO_DRIVER = shutil.which("nvidia-smi") is None and not os.path.exists("/dev/nvidia0")
needs_module = pytest.mark.skipif(cuda._cuda is None, reason=f"pylosses._cuda is not built: {cuda._missing}")
needs_no_driver = pytest.mark.skipif(not NO_DRIVER, reason="a driver is here")
needs_compiler = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler on this machine")


@pytest.fixture
def emulated():
    with emulator.switched() as made:
        yield made


def problem(module, x, y=None, **changed):
    """Cross-entropy's `Problem`, with the mean of the rows."""
    arguments = {
        "loss": module.losses()["cross_entropy"][0],
        "dtype": 0,
        "x": x.data_ptr(),
        "shape": x.shape,
        "stride": x.stride(),
        "y": 0 if y is None else y.data_ptr(),
        "y_type": 3,
        "ignore_index": -100,
        "soft": 0,
        "soft_dtype": -1,
        "soft_stride": (),
        "weight": 0,
        "shift": 0,
        "factor": 0,
        "sample_weight": 0,
        "weight_sum": 0,
        "scalars": (0.0, 1.0, 0.0, 0.0),
        "reduction": 2,
        "normalizer": -1.0,
        "normalizer_at": 0,
    }
    return module.Problem(*(arguments | changed).values())


# The real module --------------------------------------------------------------------------------------------------------------


def test_it_is_built_where_nvcc_is():
    """Without this, a build that silently failed would skip the tests of the module."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on this machine")
    assert cuda._cuda is not None, cuda._missing


@needs_module
def test_it_knows_every_loss():
    kernels = {spec.kernel for spec in pylosses.spec.LOSSES.values() if spec.inputs != "own" and spec.why_not("cuda") is None}
    assert set(cuda._cuda.losses()) == kernels and not cuda._cuda.emulated


@needs_module
def test_cudart_is_inside():
    """No library of CUDA is asked of the machine."""
    needed = subprocess.run(["ldd", cuda._cuda.__file__], capture_output=True, text=True).stdout
    assert "libcudart" not in needed and "libcuda.so" not in needed and "libtorch" not in needed


@needs_module
@needs_no_driver
def test_without_a_driver():
    """Imports; every call says what is missing and what to do."""
    module = cuda._cuda
    with pytest.raises(RuntimeError, match="driver.*install|install.*driver"):
        module.devices()
    status = pylosses.backends()["cuda"]
    assert not status.available and "driver" in status.reason
    x, y = torch.randn(2, 3), torch.tensor([0, 1])
    with pytest.raises(pylosses.BackendError, match="cannot run cross_entropy.*driver"):
        pylosses.cross_entropy(x, y, backend="cuda")
    out = torch.zeros(1)
    with pytest.raises(RuntimeError, match="CUDA.*driver"):
        module.forward(problem(module, x, y), out.data_ptr(), 0, out.data_ptr(), 0, 0)
    assert pylosses.cross_entropy(x, y).isfinite()  # the other backends are none the worse


@needs_module
def test_import_does_not_touch_a_device():
    """A process may fork after the import, and set CUDA_VISIBLE_DEVICES before its first call."""
    code = "import torch, pylosses; print(torch.cuda.is_initialized())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_works_without_the_module():
    code = (
        "import sys; sys.modules['pylosses._cuda'] = None; import torch, pylosses; "
        "print(pylosses.backends()['cuda'].reason); "
        "print(float(pylosses.cross_entropy(torch.zeros(2, 4), torch.tensor([0, 1]))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    reason, loss = done.stdout.splitlines()
    assert ("could not be imported" in reason or "not built" in reason) and float(loss) == pytest.approx(1.3862944)


# Arguments and devices --------------------------------------------------------------------------------------------------------


@needs_compiler
def test_devices_that_do_not_fit(emulated):
    x, y = torch.randn(2, 3), torch.tensor([0, 1])
    elsewhere = torch.empty(2, 3, device="meta")
    with pytest.raises(ValueError, match="target must be on cpu.*meta"):
        pylosses.cross_entropy(x, y.to("meta"), backend="cuda")
    with pytest.raises(ValueError, match="weight must be on cpu.*meta"):
        pylosses.cross_entropy(x, y, weight=torch.ones(3, device="meta"), backend="cuda")
    with pytest.raises(pylosses.BackendError, match="input is on meta.*cuda backend"):
        pylosses.entropy_loss(elsewhere, backend="cuda")


@needs_module
@needs_compiler
def test_cpu_tensors_are_refused_without_the_emulator():
    assert "takes CUDA tensors" in (cuda.why_not(torch.device("cpu")) or "")
    assert cuda.why_not(torch.device("cuda", 1)) is None
    with emulator.switched():
        assert cuda.why_not(torch.device("cpu")) is None
        assert "takes CPU" in (cuda.why_not(torch.device("cuda", 0)) or "")


@needs_compiler
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": 99}, "no such loss"),
        ({"loss": -1}, "no such loss"),
        ({"stride": (1,)}, "do not fit"),
        ({"shape": (), "stride": ()}, "do not fit"),
        ({"scalars": (0.0,) * 17}, "cross_entropy has 4 own numbers, got 17"),
        ({"shape": (1, 1 << 31), "stride": (1 << 31, 1)}, "too many classes"),
        ({"shape": (2, 3, 2, 2, 2, 2, 2), "stride": (192, 64, 1, 32, 2, 16, 4)}, "four dimensions"),
    ],
)
def test_the_module_checks_what_it_is_told(emulated, changed, message):
    with pytest.raises(ValueError, match=message):
        problem(emulated.module, torch.randn(2, 3), **changed)


@needs_compiler
def test_no_workspace_is_an_error(emulated):
    x, y, out = torch.randn(2, 3), torch.tensor([0, 1]), torch.zeros(1)
    with pytest.raises(ValueError, match="workspace"):
        emulated.module.forward(problem(emulated.module, x, y), out.data_ptr(), 0, 0, 0, 0)


# Streams, devices and errors of the runtime -----------------------------------------------------------------------------------


@needs_compiler
def test_stream_and_device_reach_every_launch(emulated):
    module = emulated.module
    x, y, out, saved, workspace = torch.randn(4, 9), torch.arange(4), torch.zeros(1), torch.zeros(64), torch.zeros(4096)
    emulated.devices(3)
    described = problem(module, x, y)
    module.forward(described, out.data_ptr(), saved.data_ptr(), workspace.data_ptr(), 2, 0xBEEF0)
    gradient = torch.zeros_like(x)
    pointers = out.data_ptr(), saved.data_ptr(), gradient.data_ptr(), gradient.stride(), workspace.data_ptr()
    module.backward(described, *pointers, 2, 0xBEEF0)
    launches = emulated.launches()
    assert len(launches) >= 3 and {(launch.stream, launch.device) for launch in launches} == {(0xBEEF0, 2)}
    assert emulated.current_device() == 0, "the caller's device is not what it was"


@needs_compiler
def test_the_current_stream_is_asked_for(emulated, monkeypatch):
    """What a CUDA tensor would pass down: its device, and torch's current stream there."""
    asked = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: asked.append(device) or SimpleNamespace(cuda_stream=0x5EED0)
    )
    x, y, out = torch.randn(4, 9), torch.arange(4), torch.zeros(1)
    emulated.devices(2)
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda:1", get_device=lambda: 1, new_empty=x.new_empty)
    prepared = cuda._Prepared.__new__(cuda._Prepared)
    prepared.x, prepared.problem = on_gpu, problem(emulated.module, x, y)
    prepared.run(False, False, out.data_ptr(), 0)
    assert asked == ["cuda:1"]
    assert {(launch.stream, launch.device) for launch in emulated.launches()} == {(0x5EED0, 1)}
    assert float(out) == pytest.approx(float(torch.nn.functional.cross_entropy(x, y)))


@needs_compiler
@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("launch", 209, "not built for this GPU.*PYLOSSES_CUDA_ARCHS"),
        ("launch", 719, "a launch failed.*cudaErrorLaunchFailure"),
        ("cudaGetDevice", 35, "driver"),
        ("cudaGetDevice", 100, "driver or GPU"),
    ],
)
def test_errors_of_the_runtime_are_raised(emulated, function, error, message):
    x = torch.randn(3, 5, requires_grad=True)
    loss = pylosses.entropy_loss(x, backend="cuda")
    emulated.fail(function, error)
    with pytest.raises(RuntimeError, match=message):
        pylosses.entropy_loss(x, backend="cuda")
    with pytest.raises(RuntimeError, match=message):
        loss.backward()
    emulated.fail(function, 0)
    pylosses.entropy_loss(x, backend="cuda").backward()  # an error does not stick
    assert x.grad.isfinite().all()


@needs_compiler
def test_a_device_that_is_not_there(emulated):
    x, out = torch.randn(3, 5), torch.zeros(4096)
    with pytest.raises(RuntimeError, match="device 7.*cudaErrorInvalidDevice"):
        emulated.module.forward(problem(emulated.module, x, torch.arange(3)), out.data_ptr(), 0, out.data_ptr(), 7, 0)
    assert emulated.current_device() == 0


@needs_compiler
@pytest.mark.parametrize(("count", "error"), [(0, 0), (0, 35)])
def test_no_device_has_a_reason(count, error):
    made = emulator.plain()
    made.devices(count)
    made.fail("cudaGetDeviceCount", error)
    with emulator.switched(made):
        status = pylosses.backends()["cuda"]
        assert not status.available and "driver or GPU" in status.reason
        with pytest.raises(pylosses.BackendError, match="driver or GPU"):
            pylosses.entropy_loss(torch.randn(2, 3), backend="cuda")


def test_nothing_waits_and_nothing_is_allocated():
    """What a capture into a CUDA graph forbids is not in the sources at all; the workspace is torch's."""
    sources = "".join(p.read_text() for p in (emulator.ROOT / "csrc" / "cuda").iterdir())
    for word in ("Synchronize", "cudaMalloc", "cudaFree", "cudaMemcpy(", "cudaEventQuery", "<<<grid, block, shared>>>"):
        assert word not in sources, word
