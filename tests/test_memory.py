"""Do the CPU kernels hold nothing of the logits' size but the gradient? malloc_counter.c counts, memory_meter.py asks."""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from cases import LABELLED, UNLABELLED, grid, name_of
from memory_meter import made

import pylosses
from pylosses.spec import LOSSES

HELPERS = Path(__file__).parent / "helpers"
SCORES = [s for s in LOSSES.values() if s.family == "score"]
CPU = [p for p in grid(LABELLED + UNLABELLED, reference=False) if p.values[2] == "cpu"]
LAYOUTS = {
    "rows": ((512, 512), "contiguous"),
    "strided_rows": ((512, 512), "every_second"),
    "pixels": ((4, 64, 32, 32), "contiguous"),
    "channels_last": ((4, 64, 32, 32), "channels_last"),
    "strided_pixels": ((4, 64, 32, 32), "every_second"),
}
ROW = defaultdict(lambda: 16, select=32)  #: family -> bytes that may be kept for a row
SLACK = 16 * 1024  #: bytes that malloc and Python may vary by


class Meter:
    """A process in which memory is counted."""

    def __init__(self, counter: Path):
        # Without the pool: memory that it keeps from the call before would not be counted.
        environment = os.environ | {"LD_PRELOAD": str(counter), "PYTHONMALLOC": "malloc", "PYTHONPATH": str(HELPERS)}
        environment["PYLOSSES_POOL"] = "0"
        command = [sys.executable, str(HELPERS / "memory_meter.py"), str(counter)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def ask(self, **asked) -> dict[str, int]:
        self.process.stdin.write(json.dumps(asked) + "\n")
        line = self.process.stdout.readline()
        assert line, "the measuring process has ended, see its error output"
        return json.loads(line)

    def per_batch(self, loss: str, sample: int, dtype: torch.dtype, layout: str, backend: str) -> dict[str, int]:
        """Bytes that twice the batch holds more than the batch: what a call takes whatever its size is, is not in it."""
        shape, form = LAYOUTS[layout]
        asked = {"loss": loss, "sample": sample, "dtype": name_of(dtype), "layout": form, "backend": backend, "threads": 1}
        one = self.ask(shape=shape, **asked)
        two = self.ask(shape=(2 * shape[0], *shape[1:]), **asked)
        return {part: two[part] - one[part] for part in one}


@pytest.fixture(scope="module")
def meter(tmp_path_factory):
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if sys.platform != "linux" or compiler is None:
        pytest.skip("counting memory needs glibc and a C compiler")
    counter = tmp_path_factory.mktemp("meter") / "malloc_counter.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", counter, HELPERS / "malloc_counter.c"], check=True)
    meter = Meter(counter)
    yield meter
    meter.process.stdin.close()
    meter.process.wait(timeout=30)


def allowed(spec, layout: str, dtype: torch.dtype) -> dict[str, int]:
    """Bytes that a batch may hold: the value 16 a row, training one bit a logit more for a margin loss, and the gradient."""
    shape, _ = LAYOUTS[layout]
    logits = torch.Size(shape).numel()
    rows = ROW[spec.family] * logits // shape[1] + SLACK
    bits = logits // 8 if spec.family == "margin" else 0
    return {"value": rows, "training": rows + bits + logits * dtype.itemsize}


@pytest.mark.parametrize("how", ["torch", "malloc", "mmap"])
def test_memory_is_seen_wherever_it_comes_from(meter, how):
    assert meter.ask(control="nothing")["bytes"] < SLACK
    assert 2**20 <= meter.ask(control=how)["bytes"] < 2**20 + SLACK


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plain_reference_breaks_the_rule(meter, layout):
    """The rule can be broken: plain PyTorch keeps several tensors of the logits' size."""
    bytes_ = meter.per_batch("cross_entropy", 0, torch.float32, layout, "reference")
    limit = allowed(LOSSES["cross_entropy"], layout, torch.float32)
    logits = torch.Size(LAYOUTS[layout][0]).numel() * 4
    assert bytes_["value"] > limit["value"] + logits / 2 and bytes_["training"] > limit["training"] + logits / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("spec", "sample", "backend"), CPU)
def test_only_the_gradient_is_as_large_as_the_logits(meter, spec, sample, backend, layout, dtype):
    bytes_ = meter.per_batch(spec.name, sample, dtype, layout, backend)
    limit = allowed(spec, layout, dtype)
    for part in limit:
        rows = torch.Size(LAYOUTS[layout][0]).numel() // LAYOUTS[layout][0][1]
        assert bytes_[part] <= limit[part], f"{part}: {bytes_[part]} bytes for {rows} rows, {limit[part]} are allowed"


@pytest.mark.parametrize("shape", [(2048, 1024), (8, 64, 64, 64)], ids=["rows", "pixels"])
@pytest.mark.parametrize(("spec", "sample", "backend"), [p for p in CPU if p.values[1] == 0])
def test_threads_have_small_tiles(meter, spec, sample, backend, shape):
    """All that a call takes besides, on four threads: 2 MiB."""
    bytes_ = meter.ask(
        loss=spec.name, sample=sample, dtype="float32", layout="contiguous", backend=backend, threads=4, shape=shape
    )
    logits = torch.Size(shape).numel()
    kept = ROW[spec.family] * logits // shape[1] + (logits // 8 if spec.family == "margin" else 0)
    assert bytes_["value"] <= kept + 2 * 2**20 and bytes_["training"] <= kept + 4 * logits + 2 * 2**20, bytes_


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("spec", "sample", "backend"), [p for p in grid(SCORES, reference=False) if p.values[2] == "cpu"])
def test_scores_are_all_that_is_made(meter, spec, sample, backend, layout):
    """Five float32 scores and an int64 prediction a row."""
    shape, _ = LAYOUTS[layout]
    bytes_ = meter.per_batch(spec.name, sample, torch.float32, layout, backend)
    assert bytes_["value"] <= 28 * torch.Size(shape).numel() // shape[1] + SLACK


@pytest.mark.parametrize("shape", [(256, 1024), (2, 64, 32, 64)], ids=["rows", "pixels"])
@pytest.mark.parametrize(("spec", "sample", "backend"), grid(LABELLED + UNLABELLED, reference=False))
def test_only_rows_are_saved(spec, sample, backend, shape):
    """Backward keeps the logits themselves, not a copy, and 16 bytes a row."""
    c = made(spec.name, sample, shape, torch.float32)
    x = c.inputs[0].requires_grad_()
    rows = x.numel() // c.classes
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        getattr(pylosses, spec.function)(x, *c.inputs[1:], backend=backend, **c.arguments)
    given = {t.data_ptr() for t in (*c.inputs, *c.arguments.values()) if isinstance(t, torch.Tensor)}
    own = [t for t in saved if t.data_ptr() not in given]
    assert len(own) < len(saved), "the logits are not among the saved tensors"
    bits = x.numel() // 8 if spec.family == "margin" else 0
    assert sum(t.nbytes for t in own) <= ROW[spec.family] * rows + bits + 16 * c.classes + 64, [tuple(t.shape) for t in own]
