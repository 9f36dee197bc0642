"""Do the fused backends allocate nothing of the logits' size but the gradient?"""

from pathlib import Path

import pytest
import torch
from cases import LABELLED, UNLABELLED, Case, arguments_of, grid, layouts, run

import pylosses

FUSED = grid(LABELLED + UNLABELLED, reference=False)
SHAPES = [pytest.param((256, 1024), id="rows"), pytest.param((2, 64, 32, 64), id="pixels")]


def made(spec, sample: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Case:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g).to(dtype)
    y = torch.randint(0, shape[1], shape[:1] + shape[2:], generator=g, dtype=torch.int16)
    inputs = (x, y) if spec.inputs == "labelled" else (x,)
    return Case(spec, inputs, arguments_of(spec, sample, shape[1], dtype), shape[1])


def forward(c: Case, backend: str, x: torch.Tensor) -> torch.Tensor:
    return getattr(pylosses, c.spec.function)(x, *c.inputs[1:], backend=backend, **c.arguments)


def allocations(action) -> tuple[list[int], object]:
    """Sizes in bytes of what torch's allocator handed out during `action`, and its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = action()
    events = profile.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0], result


def test_allocations_are_seen():
    """The measure works: a copy of 1 MiB shows, and so do the copies of the plain reference."""
    x = torch.randn(256, 1024)
    sizes, _ = allocations(lambda: x.clone())
    assert x.nbytes in sizes
    c = made(LABELLED[0], 0, (256, 1024))
    sizes, _ = allocations(lambda: run(c, "reference"))
    assert sum(size >= x.nbytes for size in sizes) >= 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("spec", "sample", "backend"), FUSED)
def test_only_the_gradient_is_as_large_as_the_logits(spec, sample, backend, dtype, shape):
    """Forward allocates nothing of a quarter of that size; backward one tensor, the gradient; in any dense layout."""
    c = made(spec, sample, shape, dtype)
    for layout, x in layouts(c.inputs[0]):
        x = x.detach().requires_grad_()
        forward(c, backend, x.detach())  # whatever is made once is made here
        sizes, loss = allocations(lambda x=x: forward(c, backend, x))
        large = [size for size in sizes if size > x.numel() * x.element_size() / 4]
        assert not large, f"{layout}: forward allocated {large} bytes for logits of {x.numel() * x.element_size()}"
        sizes, (grad,) = allocations(lambda x=x, loss=loss: torch.autograd.grad(loss, x))
        large = [size for size in sizes if size > x.numel() * x.element_size() / 4]
        assert large == [grad.numel() * grad.element_size()], f"{layout}: backward allocated {large} bytes"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("spec", "sample", "backend"), FUSED)
def test_only_rows_are_saved(spec, sample, backend, shape):
    """Backward keeps the logits themselves, not a copy, and a few numbers a row."""
    c = made(spec, sample, shape)
    x = c.inputs[0].requires_grad_()
    rows = x.numel() // c.classes
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        forward(c, backend, x)
    own = [t for t in saved if t.data_ptr() != x.data_ptr()]
    assert len(own) < len(saved), "the logits are not among the saved tensors"
    assert sum(t.numel() for t in own) <= 6 * rows + 4 * c.classes + 2, [tuple(t.shape) for t in own]


def peak() -> int:
    """Largest resident size of this process in bytes since the last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak of this process cannot be measured here: {error}")


@pytest.mark.parametrize("shape", [pytest.param((4096, 4096), id="rows"), pytest.param((4, 64, 256, 256), id="pixels")])
@pytest.mark.parametrize(("spec", "sample", "backend"), [p for p in FUSED if p.values[1] == 0])
def test_peak_of_the_process(spec, sample, backend, shape):
    """Memory that a kernel would take past torch's allocator shows here: 64 MiB of logits, forward 8 MiB, backward 72."""
    c = made(spec, sample, shape)
    x = c.inputs[0].requires_grad_()
    mebibyte = 2**20
    assert x.numel() * 4 == 64 * mebibyte
    reset_peak()
    before = resident()
    loss = forward(c, backend, x)
    assert peak() - before < 8 * mebibyte, f"forward took {(peak() - before) / mebibyte:.0f} MiB"
    reset_peak()
    before = resident()
    (grad,) = torch.autograd.grad(loss, x)
    assert grad.shape == x.shape
    assert peak() - before < 72 * mebibyte, f"backward took {(peak() - before) / mebibyte:.0f} MiB"
