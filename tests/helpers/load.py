"""Problems large enough for several threads, the bits of their results, and processes of their own to compute them in.

As a program, ``load.py SCENE`` prints what `bits` gives in a DataLoader's workers, in forked children, or just here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from cases import IGNORE, LABELLED, UNLABELLED, Case, Result, arguments_of, run, undecided

#: (N, C) in float32 and (N, C, H, W) in bfloat16: both have work for four threads
SHAPES = {"rows": (300, 257), "pixels": (2, 19, 48, 64)}
DTYPES = {"rows": torch.float32, "pixels": torch.bfloat16}


@functools.cache
def problems() -> dict[str, Case]:
    """Every loss with C++ kernels, as rows and as pixels."""
    specs = [spec for spec in LABELLED + UNLABELLED if spec.why_not("cpu") is None]
    return {f"{spec.name}-{kind}": problem(spec, kind) for spec in specs for kind in SHAPES}


def problem(spec, kind: str, sample: int = 0) -> Case:
    """Logits are multiples of 1/8, so that rounding decides few margin errors, and those rows are ignored."""
    shape, dtype = SHAPES[kind], DTYPES[kind]
    g = torch.Generator().manual_seed(sum(map(ord, spec.name)))
    x = ((16 * torch.randn(shape, generator=g)).round() / 8).to(dtype)
    y = torch.randint(0, shape[1], shape[:1] + shape[2:], generator=g)
    arguments = arguments_of(spec, sample, shape[1], dtype)
    if spec.inputs == "unlabelled":
        return Case(spec, (x,), arguments, shape[1])
    y[torch.rand(y.shape, generator=g) < 0.1] = IGNORE
    if spec.family == "margin":
        rows = x.double().movedim(1, -1).reshape(-1, shape[1])
        y = torch.where(undecided(rows, y.reshape(-1), arguments).reshape(y.shape), IGNORE, y)
    return Case(spec, (x, y), arguments, shape[1])


def bits(result: Result) -> str:
    """A fingerprint of the loss and its gradient."""
    digest = hashlib.sha256()
    for tensor in (result.loss, *result.grads):
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def all_bits() -> dict[str, str]:
    return {name: bits(run(c, "cpu")) for name, c in problems().items()}


def use_torch_threads() -> None:
    """An operation of torch that runs on several threads, so that the OpenMP pool is there."""
    torch.ones(2048, 1024).mul_(2).sum()


class Losses(torch.utils.data.Dataset):
    """Item i: the bits of problem i, and how many threads they were computed on."""

    def __len__(self) -> int:
        return len(problems())

    def __getitem__(self, i: int) -> tuple[str, str, int]:
        name = list(problems())[i]
        return name, bits(run(problems()[name], "cpu")), torch.get_num_threads()


def in_workers(context: str) -> dict[str, str]:
    """By the workers of a DataLoader, after this process has used its own threads."""
    torch.set_num_threads(2)
    all_bits()
    loader = torch.utils.data.DataLoader(Losses(), batch_size=None, num_workers=2, multiprocessing_context=context)
    return {name: found for name, found, _ in loader}


def in_child(work: Callable[[], dict[str, str]] = all_bits) -> dict[str, str]:
    """By a child that os.fork() makes here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(write, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def forked() -> dict[str, dict[str, str]]:
    """By children of os.fork() on two threads, made when this process has used OpenMP's threads or not."""
    torch.set_num_threads(2)
    found = {}

    def record(when: str, bits_in_child: dict[str, str]) -> None:
        print(f"forked {when}", file=sys.stderr, flush=True)  # the last line names what hangs
        found[when] = bits_in_child

    record("before any work", in_child())
    use_torch_threads()
    record("after torch's work", in_child())
    found["parent"] = all_bits()
    record("after kernels", in_child())
    with ThreadPoolExecutor(1) as pool:  # whose thread has a pool of its own
        pool.submit(all_bits).result()
        record("in a thread", pool.submit(in_child).result())
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(lambda: [all_bits() for _ in iter(stop.is_set, True)])
        record("while others work", in_child())
        stop.set()
    record("from a child", in_child(lambda: all_bits() and in_child()))
    found["parent, afterwards"] = all_bits()
    return found


def here() -> dict[str, object]:
    """With the number of threads that torch starts with, and with four."""
    found = {"threads": torch.get_num_threads(), "bits": all_bits()}
    torch.set_num_threads(4)
    return found | {"bits on four": all_bits()}


SCENES = {
    "here": here,
    "workers": lambda: in_workers(sys.argv[2]),
    "forked": forked,
}

if __name__ == "__main__":
    print(json.dumps(SCENES[sys.argv[1]]()), flush=True)
    os._exit(0)  # the result is out: whatever cannot end in peace need not
