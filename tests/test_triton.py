"""Is the Triton backend chosen when it should be? tests/interpreted has its numbers, test_triton_ptx.py what it compiles to."""

import importlib
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import pylosses
from pylosses import triton as backend

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


def test_works_without_triton():
    code = "import sys; sys.modules['triton'] = None; import torch, pylosses; print(pylosses.backends()['triton'].reason); "
    code += "print(float(pylosses.cross_entropy(torch.zeros(2, 4), torch.tensor([0, 1]))))"
    reason, loss = python(code, TRITON_INTERPRET="1").splitlines()
    assert "not installed" in reason and float(loss) == pytest.approx(1.3862944)


@needs_triton
def test_interpreter_makes_it_available():
    code = "import torch, pylosses; x = torch.zeros(2, 4); print(float(pylosses.entropy_loss(x, backend='triton')))"
    assert float(python(code, TRITON_INTERPRET="1")) == pytest.approx(1.3862944)


@needs_triton
def test_a_normalizer_goes_to_the_device_of_the_loss(monkeypatch):
    """A kernel cannot read host memory: every tensor that the last launch is given is where the sums are."""
    launch, given = importlib.import_module("pylosses.kernels.launch"), []
    monkeypatch.setattr(launch, "finish", {(1,): lambda *arguments, **options: given.extend(arguments)})
    partial, loss, saved = (torch.empty(shape, device="meta") for shape in ((4, 3), (), 2))
    call = SimpleNamespace(normalizer=torch.tensor(5.0), reduction="mean")
    launch.reduced(call, partial, loss, saved)
    tensors = [a for a in given if isinstance(a, torch.Tensor)]
    assert len(tensors) == 4 and {t.device.type for t in tensors} == {"meta"}
