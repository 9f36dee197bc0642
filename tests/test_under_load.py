"""Are the results the same under load? Python threads, DataLoader workers, fork, thread counts, inference mode, batches."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import load
import pytest
import torch
from cases import LABELLED, UNLABELLED, Result, grid, row_by_row, run, upstream_for
from tolerance import agree

import pylosses

pytestmark = pytest.mark.skipif(not pylosses.backends()["cpu"].available, reason=pylosses.backends()["cpu"].reason)
LOAD = Path(__file__).parent / "helpers" / "load.py"
PROBLEMS = list(load.problems()) if pylosses.backends()["cpu"].available else []


def elsewhere(*arguments: str, **environment: str) -> dict:
    """What load.py prints in a process of its own. A hang there is a failure here, and its children go with it."""
    command = [sys.executable, str(LOAD), *arguments]
    process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, _ = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        pytest.fail(f"load.py {' '.join(arguments)} hangs", pytrace=False)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"load.py {' '.join(arguments)} ended with {process.returncode}"
    return json.loads(printed)


@pytest.mark.parametrize("name", PROBLEMS)
def test_several_threads_agree_with_the_reference(name, threads):
    """What the other tests compare bits of is right, and a second run gives the same bits."""
    c = load.problems()[name].but(reduction="none")
    if not row_by_row(c.spec):
        c = load.problems()[name]
    up = upstream_for(c)
    plain, truth = run(c, "reference", up), run(c.double(), "reference", up)
    for count in (1, 2, 4):
        threads(count)
        got = run(c, "cpu", up)
        agree(f"{name} loss", got.loss, plain.loss, truth.loss)
        agree(f"{name} gradient", got.grads[0], plain.grads[0], truth.grads[0], row=1)
        for _ in range(3):
            assert load.bits(run(c, "cpu", up)) == load.bits(got)


def test_the_bits_tell(threads):
    """A fingerprint changes with the last bit of one gradient."""
    got = run(load.problems()[PROBLEMS[0]], "cpu")
    grad = got.grads[0].clone()
    grad.view(torch.int32)[-1, -1] ^= 1
    assert load.bits(got) != load.bits(Result(got.loss, (grad,)))
    assert len(set(load.all_bits().values())) == len(PROBLEMS)


@pytest.mark.parametrize("count", [1, 2])
def test_python_threads_at_once(count, threads):
    """Eight Python threads, each forward and backward of all losses in an order of its own, each kernel on `count` threads."""
    threads(count)
    alone = load.all_bits()

    def job(i: int) -> dict[str, str]:
        names = PROBLEMS[i * 3 % len(PROBLEMS) :] + PROBLEMS[: i * 3 % len(PROBLEMS)]
        torch.set_num_threads(count)  # OpenMP's number is each thread's own
        return {name: load.bits(run(load.problems()[name], "cpu")) for name in names}

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(job, range(8)):
            assert found == alone


def test_threads_on_the_same_logits(threads):
    """Eight threads read the same logits; then all of them walk one graph backward, and each gets a gradient of its own.

    One of them may get the gradient that forward wrote, the others compute theirs: two roundings, but no third.
    """
    threads(2)
    for name in PROBLEMS:
        c = load.problems()[name]
        alone = load.bits(run(c, "cpu"))
        with ThreadPoolExecutor(8) as pool:
            assert {load.bits(r) for r in pool.map(lambda _, c=c: run(c, "cpu"), range(8))} == {alone}

        def graph(c=c) -> tuple[torch.Tensor, torch.Tensor]:
            x = c.inputs[0].clone().requires_grad_()
            return getattr(pylosses, c.spec.function)(x, *c.inputs[1:], backend="cpu", **c.arguments), x

        def grad(of: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return torch.autograd.grad(*of, retain_graph=True)[0]

        once = graph()
        in_turn = {load.bits(Result(once[0].detach(), (grad(once),))) for _ in range(3)}
        assert alone in in_turn and len(in_turn) <= 2, name
        shared = graph()
        with ThreadPoolExecutor(8) as pool:
            grads = list(pool.map(lambda _, of=shared, grad=grad: grad(of), range(8)))
        assert {load.bits(Result(shared[0].detach(), (g,))) for g in grads} <= in_turn, name
        assert len({g.data_ptr() for g in grads}) == 8, f"{name}: two threads were given one gradient"


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_dataloader_workers(context, threads):
    threads(1)  # a worker's number
    assert elsewhere("workers", context) == load.all_bits()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_after_fork(threads):
    """Children of a parent whose OpenMP threads are not in them: nothing waits for those, and the bits are the same."""
    threads(2)
    wanted = load.all_bits()
    found = elsewhere("forked")
    assert len(found) == 8
    for when, bits in found.items():
        assert bits == wanted, when


def test_any_number_of_threads_gives_the_same_bits(threads):
    threads(1)
    alone = load.all_bits()
    for count in (2, 3, 4, 16):
        threads(count)
        assert load.all_bits() == alone


@pytest.mark.parametrize(("variable", "value"), [("OMP_NUM_THREADS", "1"), ("OMP_NUM_THREADS", "4"), ("OMP_THREAD_LIMIT", "2")])
def test_openmp_settings(variable, value, threads):
    """torch's own number of threads follows the setting; asked for four, OpenMP may start fewer."""
    found = elsewhere("here", **{variable: value})
    if variable == "OMP_NUM_THREADS":
        assert found["threads"] == min(int(value), os.cpu_count())
    threads(4)
    assert found["bits"] == found["bits on four"] == load.all_bits()


def test_inference_mode(threads):
    """The loss without a graph has the same bits; tensors made in inference mode are fine outside it too."""
    for count in (1, 2):
        threads(count)
        for name in PROBLEMS:
            c = load.problems()[name]
            wanted = run(c, "cpu").loss
            function = getattr(pylosses, c.spec.function)
            with torch.inference_mode():
                inside = function(*c.inputs, backend="cpu", **c.arguments)
                logits = c.inputs[0].clone()
            with torch.no_grad():
                outside = function(logits, *c.inputs[1:], backend="cpu", **c.arguments)
            assert inside.is_inference() and torch.equal(inside, wanted) and torch.equal(outside, wanted)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    ("spec", "sample", "backend"), [p for p in grid(LABELLED + UNLABELLED, rows=True) if p.values[2] == "cpu"]
)
def test_a_row_does_not_see_its_batch(spec, sample, backend, count, threads):
    """Rows keep their bits in a part of the batch, in another order, and at another place of a tile."""
    threads(count)
    c = load.problem(spec, "rows", sample).but(reduction="none")
    up = upstream_for(c)
    whole = run(c, "cpu", up)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    for rows in (order, order[:40], torch.arange(7, 300), torch.arange(291, 300), torch.arange(299, 300)):
        part = c._replace(inputs=tuple(t[rows] for t in c.inputs))
        got = run(part, "cpu", up[rows])
        assert torch.equal(got.loss, whole.loss[rows]) and torch.equal(got.grads[0], whole.grads[0][rows]), rows[:4]

    c = load.problem(spec, "pixels", sample).but(reduction="none")
    up = upstream_for(c)
    whole = run(c, "cpu", up)
    for image, top, left in ((slice(1, 2), 0, 0), (slice(None), 5, 0), (slice(None), 0, 3), (slice(0, 1), 47, 61)):
        crop = (image, slice(top, None), slice(left, None))
        x, *rest = c.inputs
        x = x[crop[0], :, crop[1], crop[2]].contiguous()
        got = run(c._replace(inputs=(x, *(t[crop] for t in rest))), "cpu", up[crop])
        assert torch.equal(got.loss, whole.loss[crop]), (image, top, left)
        assert torch.equal(got.grads[0], whole.grads[0][crop[0], :, crop[1], crop[2]]), (image, top, left)
