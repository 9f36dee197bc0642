"""The bench as pytest-benchmark knows it, which keeps a history and compares: ``pytest bench --benchmark-autosave``,
later ``pytest bench --benchmark-compare``. A provider that does not agree with the float64 reference fails and gets no time.
"""

from functools import partial

import pytest
import torch

from pylosses.checking import function_of
from pylosses.cli import bench_module
from pylosses.spec import LOSSES

gate, providers, shapes, stopwatch = (bench_module(name) for name in ("gate", "providers", "shapes", "stopwatch"))

SHAPES = [shapes.SHAPES[name] for name in ("cifar", "imagenet", "llama-quick", "cityscapes-quick", "linear-quick")]


def _providers(spec, shape):
    return providers.providers(
        spec, providers.variants(spec, False)[0], shape, torch.float32, "cpu", asked=None, compile=False, peers=False
    )


CASES = [
    pytest.param(spec, shape, one.name, id=f"{spec.name}-{shape.name}-{one.name.replace(' ', '-')}")
    for spec in LOSSES.values()
    for shape in SHAPES
    if shapes.fits(spec, shape)
    for one in _providers(spec, shape)
    if one.reason is None
]


@pytest.mark.parametrize(("spec", "shape", "name"), CASES)
def test_step(spec, shape, name, benchmark):
    benchmark.group = f"{spec.name} {shape.name} {shape.text}"
    small, gradient = shape.fewer_rows(gate.SMALL), spec.family != "score"
    few = shapes.inputs(spec, small, torch.float32, "cpu")
    exact = tuple(t.double() if t.is_floating_point() else t for t in few)
    own = providers.concrete(providers.variants(spec, False)[0], small, "cpu")
    truth = gate.evaluate(partial(function_of(spec), backend="reference", **own), exact, gradient)
    call = {one.name: one.call for one in _providers(spec, small)}[name]
    assert gate.sharp(gate.evaluate(call, few, gradient), truth, torch.float32) is None
    call = {one.name: one.call for one in _providers(spec, shape)}[name]
    benchmark(stopwatch.step_of(call, shapes.inputs(spec, shape, torch.float32, "cpu"), gradient))
