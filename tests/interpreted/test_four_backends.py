"""Do the reference, the C++ kernels, Triton's and CUDA's agree on the same inputs, under the same rule?

Triton is interpreted, CUDA emulated.
"""

import os
import zlib

import emulator
import faster  # noqa: F401
import pytest
from cases import DTYPES, LABELLED, UNLABELLED, case, finest, run, upstream_for
from test_backends_agree import same_results

import pylosses

EVERYTHING = os.environ.get("PYLOSSES_GPU_TESTS") == "all"
BACKENDS = ("reference", "cpu", "triton", "cuda")
SPECS = [s for s in LABELLED + UNLABELLED if all(s.why_not(backend) is None for backend in BACKENDS[1:])]
CASES = [
    pytest.param(spec, sample, kind, layout, id=f"{spec.name}{sample}-{kind}-{layout}")
    for spec in SPECS
    for sample in range(len(spec.samples) if EVERYTHING else 1)
    for kind, layout in (("plain", "rows"), ("peaked", "pixels"), ("ignored", "pixels"))
    if EVERYTHING or kind != "ignored"
]


@pytest.fixture(autouse=True)
def emulated():
    with emulator.switched():
        yield


def test_all_four_run():
    found = {status.name: status.available for status in pylosses.backends()}
    assert all(found[backend] for backend in BACKENDS) and len(SPECS) >= 15


@pytest.mark.parametrize(("spec", "sample", "kind", "layout"), CASES)
def test_they_agree(spec, sample, kind, layout):
    dtype = DTYPES[zlib.crc32(f"{spec.name}{sample}{kind}".encode()) % len(DTYPES)]
    c = finest(case(spec, sample, kind, dtype))
    if layout == "pixels":
        c = c.shaped(2, 1, c.inputs[0].shape[0] // 2)
    up = upstream_for(c)
    plain, truth = run(c, "reference", up), run(c.double(), "reference", up)
    for backend in BACKENDS:
        same_results(c, f"{spec.function} by {backend}", run(c, backend, up), plain, truth)
