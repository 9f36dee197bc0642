"""The bench as pytest-benchmark knows it: ``pytest bench --benchmark-only --benchmark-compare``.

The same registry, shapes and providers as ``pylosses bench``; one test for each loss, short shape and provider, grouped by
loss and shape. A provider that does not agree with the float64 reference fails and gets no time.
"""

from functools import partial

import pytest
import torch

from pylosses.checking import function_of
from pylosses.cli import bench_module
from pylosses.spec import LOSSES

gate, providers, shapes = (bench_module(name) for name in ("gate", "providers", "shapes"))

DTYPE, DEVICE = torch.float32, "cpu"


def _cases():
    for spec in LOSSES.values():
        for name in shapes.QUICK_SHAPES:
            shape = shapes.SHAPES[name]
            if shapes.fits(spec, shape):
                for provider in _providers(spec, shape):
                    yield pytest.param(spec, shape, provider.name, id=f"{spec.name}-{name}-{provider.name.replace(' ', '-')}")


def _providers(spec, shape):
    arguments = providers.variants(spec, peers=False)[0]
    return providers.providers(spec, arguments, shape, DTYPE, DEVICE, asked=None, compile=False, peers=False)


@pytest.mark.parametrize(("spec", "shape", "name"), list(_cases()))
def test_forward_and_backward(spec, shape, name, benchmark):
    benchmark.group = f"{spec.name} {shape.name} {shape.text}"
    provider = next(p for p in _providers(spec, shape) if p.name == name)
    if provider.reason is not None:
        pytest.skip(provider.reason)

    small = shape.fewer_rows(gate.SMALL)
    few = shapes.inputs(spec, small, DTYPE, DEVICE)
    exact = tuple(t.double() if t.is_floating_point() else t for t in few)
    own = providers.concrete(providers.variants(spec, peers=False)[0], small, DEVICE)
    truth = gate.evaluate(partial(function_of(spec), backend="reference", **own), exact)
    call = next(p for p in _providers(spec, small) if p.name == name).call
    disagreement = gate.sharp(gate.evaluate(call, few), truth, DTYPE)
    if disagreement is not None:
        pytest.fail(f"{name} disagrees with the reference: {disagreement}")

    full = shapes.inputs(spec, shape, DTYPE, DEVICE)
    benchmark(gate.evaluate, provider.call, full)
