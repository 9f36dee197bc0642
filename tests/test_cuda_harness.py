"""Does the emulator of tests/cuda_on_cpu run CUDA C++ as a GPU would, and find the faults it is there to find?"""

import ctypes
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "cuda_on_cpu"))  # this file is a script too

import emulator  # noqa: E402
from emulator import HERE, ORDERS, SANITIZED, Emulator  # noqa: E402
from sanitized import checked  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler on this machine")
FAULTS = (
    "none",
    "no_barrier_before_read",
    "no_barrier_before_next_write",
    "divergent_barrier",
    "missing_lane",
    "lane_has_returned",
    "different_shuffles",
    "source_outside_mask",
    "reads_one_more",
    "shared_one_more",
    "misaligned_vector",
)


def library(flags=(), name="sample"):
    return emulator.build(name, flags, sources=[HERE / "sample.cu"])


def sums(control, x, threads, fault="none"):
    """(error of the runtime, text of the emulator, sums and sums of squares, positive numbers) of the rows of x."""
    rows, n = x.shape
    result, positive, text = np.zeros((rows, 2), np.float32), np.zeros(rows, np.int32), ctypes.c_char_p()
    ctypes.c_int.in_dll(control, "sample_fault").value = FAULTS.index(fault)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, result, positive)]
    error = control.sample_sums(pointers[0], rows, n, threads, *pointers[1:], ctypes.byref(text))
    ctypes.c_int.in_dll(control, "sample_fault").value = 0
    return error, (text.value or b"").decode(), result, positive


def numbers(rows, n):
    return np.random.default_rng(3).normal(size=(rows, n)).astype(np.float32)


@pytest.fixture
def sample():
    made = Emulator(library())
    yield made
    made.reset()


@pytest.mark.parametrize("threads", [32, 128, 1024])
def test_orders_give_the_same_bits(sample, threads):
    x = numbers(3, 1000)
    found = []
    for order in (*ORDERS, "random", "random"):
        sample.order(order, len(found))
        error, text, result, positive = sums(sample.control, x, threads)
        assert error == 0 and not text
        found.append((result, positive))
    assert np.allclose(found[0][0], np.stack([x.sum(1), (x * x).sum(1)], 1), rtol=1e-5, atol=1e-4)
    assert np.array_equal(found[0][1], (x > 0).sum(1))
    assert all(np.array_equal(r, found[0][0]) and np.array_equal(p, found[0][1]) for r, p in found)


@pytest.mark.parametrize("fault", ["no_barrier_before_read", "no_barrier_before_next_write"])
def test_a_missing_barrier_shows(sample, fault):
    """Some order of the threads gives other numbers: NaN where nothing is written yet, or what is written too early."""
    x = numbers(3, 1000)
    right = sums(sample.control, x, 128)[2]
    different = []
    for order in ORDERS:
        sample.order(order)
        if not np.array_equal(sums(sample.control, x, 128, fault)[2], right):
            different.append(order)
    assert "greedy" in different


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("divergent_barrier", "wait at different __syncthreads"),
        ("missing_lane", "deadlock|returns, and lanes of its warp wait|meet at different"),
        ("lane_has_returned", "has returned|returns, and lanes"),
        ("different_shuffles", "meet at different shuffles"),
        ("source_outside_mask", "outside of its mask"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_misuse_is_an_error(sample, fault, message, order):
    sample.order(order)
    error, text, _, _ = sums(sample.control, numbers(2, 300), 128, fault)
    assert error == -1 and any(part in text for part in message.split("|")), text
    assert sums(sample.control, numbers(2, 300), 128)[0] == 0  # the next launch is not harmed


def test_lanes_that_a_block_does_not_have(sample):
    assert "does not have" in sums(sample.control, numbers(1, 40), 40)[1]


def test_launches_are_recorded_and_can_fail(sample):
    x = numbers(5, 64)
    sums(sample.control, x, 64)
    (launch,) = sample.launches()
    assert (launch.grid, launch.block, launch.stream, launch.device) == ((5, 1, 1), (64, 1, 1), 0, 0)
    assert "sums" in launch.kernel
    sample.fail("launch", 719)
    assert sums(sample.control, x, 64)[0] == 719
    sample.fail("launch", 0)
    assert sums(sample.control, x, 64)[0] == 0
    assert sums(sample.control, x, 2048)[0] == 9  # cudaErrorInvalidConfiguration, as on a device


def test_a_hook_gets_the_parameters(sample):
    x = numbers(2, 64)
    found = []
    with sample.handing(found.append):
        result = sums(sample.control, x, 64)[2]
    assert not result.any() and found[0].parameters[1] == (64).to_bytes(4, "little")
    assert found[0].parameters[0] == x.ctypes.data.to_bytes(8, "little")
    with pytest.raises(ZeroDivisionError), sample.handing(lambda launch: 1 // 0):
        sums(sample.control, x, 64)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", ""),
        ("reads_one_more", "heap-buffer-overflow"),
        ("shared_one_more", "index 32 out of bounds"),
        ("misaligned_vector", "misaligned address"),
    ],
)
def test_sanitizers_see_threads_and_shared_memory(fault, message):
    done = checked(Path(__file__), str(library(SANITIZED, "sample_sanitized")), fault)
    if fault == "none":
        assert done.returncode == 0 and "sum is right" in done.stdout, done.stderr[-3000:]
    else:
        assert done.returncode != 0 and message in done.stderr, done.stderr[-3000:]


if __name__ == "__main__":
    control = ctypes.CDLL(sys.argv[1])
    control.on_cpu_reset()
    for chosen in range(len(ORDERS)):
        control.on_cpu_order(chosen, 0)
        x = numbers(3, 1000)
        error, text, result, _ = sums(control, x, 128, sys.argv[2])
        assert not error and not text and np.allclose(result[:, 0], x.sum(1), rtol=1e-4, atol=1e-4)
    print("sum is right")
