"""Set-up shared by all tests: helper modules importable under any import mode, one thread a worker, fixed hypothesis draws."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # cases, tolerance, golden: --import-mode=importlib does not add it

torch.set_num_threads(1)  # workers of pytest-xdist share the cores; tests about threads set their own number

settings.register_profile(
    "pylosses", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pylosses")


@pytest.fixture(autouse=True)
def no_backend_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PYLOSSES_BACKEND of the caller must not change what a test tests."""
    monkeypatch.delenv("PYLOSSES_BACKEND", raising=False)


@pytest.fixture
def threads():
    """Sets the number of threads for one test: threads(4)."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
