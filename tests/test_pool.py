"""Does the pool of buffers reuse memory, and never that of a live tensor?"""

import gc
import subprocess
import sys

import pytest
import torch

import pylosses
from pylosses import cpu

pytestmark = pytest.mark.skipif(cpu.absent is not None, reason=f"no C++ kernels: {cpu.absent}")

SHAPE = (1024, 4096)  # 16 MiB
LABELS = torch.arange(1024) % 4096


def gradient(loss=pylosses.cross_entropy, seed=0, memory_format=None):
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    if memory_format is not None:
        x = x.reshape(16, 64, 64, 64).to(memory_format=memory_format)
        labels = torch.arange(16 * 64 * 64).reshape(16, 64, 64) % 64
    else:
        labels = LABELS
    x.requires_grad_()
    loss(x, labels).backward()
    return x.grad


@pytest.fixture(autouse=True)
def fresh_pool():
    gc.collect()
    with pylosses.use_pool(0):
        assert cpu._cpu.pool_held() == 0, "a pool that is off holds nothing"
        yield
        gc.collect()
        assert cpu._cpu.pool_held() == 0


def test_a_released_gradient_is_used_again():
    with pylosses.use_pool(1 << 30):
        first = gradient().data_ptr()
        assert cpu._cpu.pool_held() >= 16 << 20
        assert gradient(seed=1).data_ptr() == first


def test_what_backward_needs_comes_from_the_pool_and_is_its_own():
    """16 bytes a pixel, and two losses wait for their backward at once."""
    x = [torch.randn(1, 2, 1024, 1024, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(2)]

    def gradients():
        losses = [pylosses.entropy_loss(one, reduction="none") for one in x]
        return [torch.autograd.grad(loss.sum(), one)[0] for loss, one in zip(losses, x, strict=True)]

    expected = gradients()
    with pylosses.use_pool(1 << 30):
        loss = pylosses.entropy_loss(x[0], reduction="none")
        assert cpu._cpu.pool_held() == 0
        del loss
        assert 16 << 20 < cpu._cpu.pool_held() <= 18 << 20  # whole huge pages
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


@pytest.mark.parametrize("loss", [pylosses.cross_entropy, pylosses.hem_loss], ids=["ahead", "backward"])
def test_live_gradients_share_nothing(loss):
    """Many gradients alive at once, views of them too, and each keeps its numbers."""
    expected = [gradient(loss, seed) for seed in range(4)]
    with pylosses.use_pool(1 << 30):
        held = []
        for seed in range(4):
            whole = gradient(loss, seed)
            gradient(loss, seed + 10)  # dies at once
            held.append(whole[3:] if seed % 2 else whole)  # a view keeps the memory alive
            del whole
        spans = sorted((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in held)
        assert all(a + n <= b for (a, n), (b, _) in zip(spans, spans[1:], strict=False))
        for seed, t in enumerate(held):
            assert torch.equal(t, expected[seed][3:] if seed % 2 else expected[seed])


def test_gradients_outlive_the_pool():
    with pylosses.use_pool(1 << 30):
        kept = gradient()
    pylosses.clear_pool()
    assert torch.equal(kept, gradient())


def test_memory_format_is_kept():
    with pylosses.use_pool(1 << 30):
        grad = gradient(memory_format=torch.channels_last)
        assert grad.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(grad, gradient(memory_format=torch.channels_last))


def test_the_limit_holds():
    with pylosses.use_pool(20 << 20):  # room for one
        a, b = gradient(), gradient(seed=1)
        assert a.data_ptr() != b.data_ptr()
        del a, b
        assert cpu._cpu.pool_held() <= 20 << 20
        pylosses.clear_pool()
        assert cpu._cpu.pool_held() == 0


def test_a_new_size_takes_the_place_of_an_old_one():
    """When the sizes of a program change, what was held for the old ones makes room."""
    large = torch.randn(3 << 10, 4096, requires_grad=True)
    with pylosses.use_pool(50 << 20):
        pylosses.entropy_loss(large).backward()
        large.grad = None
        assert cpu._cpu.pool_held() == 48 << 20
        first = gradient().data_ptr()
        assert cpu._cpu.pool_held() == 16 << 20
        assert gradient(seed=1).data_ptr() == first


def test_second_backward_has_memory_of_its_own():
    with pylosses.use_pool(1 << 30):
        x = torch.randn(SHAPE, requires_grad=True)
        loss = pylosses.cross_entropy(x, LABELS)
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        kept = first.clone()
        first.zero_()
        (second,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(second, kept, rtol=1e-5, atol=1e-9)
        assert second.data_ptr() != first.data_ptr()


@pytest.mark.parametrize(("value", "ok"), [("50000000", True), ("0", True), ("lots", False)])
def test_environment(value, ok):
    code = "import pylosses; from pylosses import pool; print(pool._limit)"
    run = subprocess.run([sys.executable, "-c", code], env={"PYLOSSES_POOL": value}, capture_output=True, text=True)
    assert (run.returncode == 0) is ok
    assert run.stdout.strip() == value if ok else "PYLOSSES_POOL must be a number of bytes, got 'lots'" in run.stderr


def test_default():
    code = "import pylosses; from pylosses import pool; print(pool._limit)"
    run = subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True)
    assert int(run.stdout) == 1 << 30, run.stderr


def test_bad_limit():
    with pytest.raises(ValueError, match="limit must be at least 0"), pylosses.use_pool(-1):
        pass
