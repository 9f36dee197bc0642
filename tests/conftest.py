"""Set-up shared by all tests: helper modules importable under any import mode, one thread a worker, fixed hypothesis draws."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / name) for name in (".", "helpers", "fuzz", "gpu", "cuda_on_cpu")]  # importlib mode adds none

os.environ.pop("PYLOSSES_BACKEND", None)  # read when pylosses is imported: it must not change what a test tests
# Read when a process starts, so it is for the workers of pytest-xdist: threads that wait by spinning starve each other's work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

torch.set_num_threads(1)  # workers of pytest-xdist share the cores; tests about threads set their own number

if os.environ.get("PYLOSSES_CUDA_ON_CPU"):  # `make proofs`: backend "cuda" is here, emulated, for every test that asks
    import emulator

    from pylosses import cuda

    cuda.emulate(emulator.plain().module)

# Triton reads the switch when it is imported, so interpreted and compiled kernels cannot share a process.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]

settings.register_profile(
    "pylosses", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pylosses")


def pytest_report_header() -> str:
    from pylosses import cpu  # not before PYLOSSES_BACKEND is gone

    interpreted = "interpreted" if not collect_ignore else "not in this run (TRITON_INTERPRET=1 pytest tests/interpreted)"
    return f"pylosses: CPU kernels for {cpu.isa()}; Triton {interpreted}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of minutes first, the longest first: at the end one of them would leave the other workers idle."""
    long = ["triton_ptx", "cuda", "torch_integration", "backends_agree", "packaging", "cuda_ptx", "parallel", "isa"]
    items.sort(key=lambda item: long.index(name) if (name := item.path.stem[5:]) in long else len(long))


@pytest.fixture
def threads():
    """Sets the number of threads for one test: threads(4)."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
