"""Are offsets 64-bit? Small tensors over a huge address range: strides beyond 2^31 elements, hardly any memory."""

import mmap

import pytest
import torch
from cases import LABELLED, UNLABELLED, Case, arguments_of, backends_of, finest, grid, run
from tolerance import close

import pylosses
from pylosses.spec import LOSSES

FAR = 2**31 + 64  # elements: an int32 offset wraps to a negative number
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's number; newer Pythons name it
FUSED = grid(LABELLED + UNLABELLED, reference=False)


@pytest.fixture(scope="module")
def space():
    """float32 numbers at 2^33 + 2^20 addresses, of which the kernel hands out only the pages that are written."""
    count = 2**33 + 2**20
    try:
        pages = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except (OSError, OverflowError, ValueError) as error:
        pytest.skip(f"no address space of 32 GiB: {error}")
    yield torch.frombuffer(pages, dtype=torch.float32)


def spread(space: torch.Tensor, x: torch.Tensor, stride: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    """The values of x at addresses `stride` apart."""
    return space.as_strided(x.shape, stride, offset).copy_(x)


LAYOUTS = [
    pytest.param((3, 5), (FAR, 1), id="rows_far_apart"),
    pytest.param((5, 3), (1, FAR), id="classes_far_apart"),
    pytest.param((3, 21), (FAR, 3), id="rows_far_apart_strided_classes"),
    pytest.param((2, 3, 4, 5), (20, FAR, 5, 1), id="class_planes_far_apart"),
    pytest.param((3, 4, 2, 5), (FAR, 10, 5, 1), id="images_far_apart"),
    pytest.param((2, 4, 3, 5), (32, 5, FAR, 1), id="lines_far_apart"),
    pytest.param((2, 4, 5, 3), (32, 8, 1, FAR), id="columns_far_apart"),
    pytest.param((2, 3, 2, 2), (16, FAR, 2**32 + 4096, 1), id="classes_and_lines_far_apart"),
]


@pytest.mark.parametrize(("shape", "stride"), LAYOUTS)
@pytest.mark.parametrize(("spec", "sample", "backend"), FUSED)
def test_far_strides(space, spec, sample, backend, shape, stride):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=g)
    y = torch.randint(0, shape[1], shape[:1] + shape[2:], generator=g)
    arguments = arguments_of(spec, sample, shape[1], torch.float32)
    c = finest(Case(spec, (x, y) if spec.inputs == "labelled" else (x,), arguments, shape[1]))
    wanted = run(c, backend)
    for offset in (0, 2**32 + 16):
        if offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) >= len(space):
            continue
        far = spread(space, x, stride, offset)
        got = run(c._replace(inputs=(far, *c.inputs[1:])), backend)
        close("loss", got.loss, wanted.loss, rtol=1e-6)
        close("gradient", got.grads[0], wanted.grads[0], rtol=1e-6)
        assert torch.equal(far, x), "the logits were written to"


@pytest.mark.parametrize("backend", backends_of(LOSSES["cross_entropy"], reference=False))
def test_far_soft_targets(space, backend):
    """Class probabilities are read through their own strides."""
    x, soft = torch.randn(3, 4), torch.softmax(torch.randn(3, 4), dim=1)
    wanted = pylosses.cross_entropy(x, soft, backend=backend)
    for stride in ((FAR, 1), (1, FAR)):
        got = pylosses.cross_entropy(x, spread(space, soft, stride), backend=backend)
        close("loss", got, wanted, rtol=1e-6)


@pytest.mark.parametrize(("spec", "sample", "backend"), grid(LABELLED, reference=False))
def test_far_labels_and_weights(space, spec, sample, backend):
    """Labels and sample weights may be strided as far as the logits."""
    x, y, s = torch.randn(3, 5), torch.tensor([0, 4, 2]), torch.rand(3)
    arguments = arguments_of(spec, sample, 5, torch.float32) | {"backend": backend}
    function = getattr(pylosses, spec.function)
    wanted = function(x, y, sample_weight=s, **arguments)
    labels = space.view(torch.int32).as_strided((3,), (FAR,), 2**20).copy_(y)
    got = function(x, labels, sample_weight=spread(space, s, (FAR,)), **arguments)
    assert torch.equal(got, wanted)
