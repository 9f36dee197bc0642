"""Is a gradient that is written past the caches (more than 32 MiB) the same as that of its parts, which are not?"""

import pytest
import torch
from cases import LABELLED, UNLABELLED, arguments_of, grid

import pylosses

SHAPES = {"rows": (280, 32768), "odd_rows": (280, 32001), "pixels": (2, 19, 512, 512), "odd_pixels": (2, 19, 511, 513)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("spec", "sample", "backend"), [p for p in grid(LABELLED + UNLABELLED, reference=False, rows=True) if p.values[1] == 0]
)
def test_a_gradient_past_the_caches_is_that_of_its_parts(spec, sample, backend, shape, dtype):
    n, classes, *rest = SHAPES[shape]
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, classes, *rest, generator=g).to(dtype)
    y = torch.randint(0, classes, (n, *rest), generator=g)
    y[0, ...] = -100
    x[-1, 3] = float("-inf")
    arguments = arguments_of(spec, sample, classes, torch.float32) | {"reduction": "sum", "backend": backend}

    def gradient(x, y):
        leaf = x.clone().requires_grad_()
        loss = getattr(pylosses, spec.function)(leaf, *([y] if spec.inputs == "labelled" else []), **arguments)
        return torch.autograd.grad(loss, leaf)[0]

    whole = gradient(x, y)
    step = max(1, n // 4)
    for i in range(0, n, step):
        assert torch.equal(whole[i : i + step], gradient(x[i : i + step], y[i : i + step]))
