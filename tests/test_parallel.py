"""Classes split over 2 and 4 real processes: the loss and gradient of one process, small collectives, clear errors."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import parallel_worker as worker
import pytest
import torch
from cases import IGNORE, case, run, upstream_for
from resident import allocations
from tolerance import agree, close

import pylosses
from pylosses import parallel
from pylosses.parallel_group import fingerprint
from pylosses.spec import LOSSES

HELPERS = Path(__file__).parent / "helpers"
WORLDS = (2, 4)
LIMIT = 240  # seconds for all cases of a world, on a machine with other work


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """world -> what each rank got. Workers of pytest-xdist share one run."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "parallel"
    started = None
    try:
        out.mkdir()
        environment = os.environ | {"PYTHONPATH": str(HELPERS), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HELPERS / "parallel_worker.py"), str(out), *map(str, WORLDS)]
        log = (out / "log").open("w")
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    except FileExistsError:
        pass
    made = {}

    def of(world: int) -> list[dict]:
        if world not in made:
            end = time.monotonic() + LIMIT
            while (
                not (out / f"done{world}").exists() and time.monotonic() < end and (started is None or started.poll() is None)
            ):
                time.sleep(0.1)
            files = [out / f"{world}-{rank}.pt" for rank in range(world)]
            logs = "\n".join(f"{log.name}:\n{log.read_text()}" for log in sorted(out.glob("*log")))
            assert all(f.exists() for f in files), f"a rank gave no results\n{logs}"
            made[world] = [torch.load(f, weights_only=False) for f in files]
        return made[world]

    yield of
    if started is not None:
        try:
            started.wait(timeout=LIMIT)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)


def of_all(found, world: int, key: str) -> list[dict]:
    """The results of all ranks, none of which failed, with the same loss."""
    ranks = [ranks[key] for ranks in found(world)]
    for rank, result in enumerate(ranks):
        assert "trace" not in result, f"rank {rank}:\n{result['trace']}"
    return ranks


def joined(ranks: list[dict], number: int, dim: int) -> torch.Tensor:
    parts = [r["grads"][number] for r in ranks]
    return torch.cat(parts, dim=min(dim, parts[0].dim() - 1))


def same_loss(ranks: list[dict]) -> torch.Tensor:
    for r in ranks[1:]:
        assert torch.equal(r["loss"].nan_to_num(1.5), ranks[0]["loss"].nan_to_num(1.5)), "the ranks have different losses"
    return ranks[0]["loss"]


def one_process(c):
    """Loss and gradient of the logits by the reference."""
    x, *rest = c.inputs
    leaf = x.detach().requires_grad_()
    loss = getattr(pylosses, c.spec.function)(leaf, *rest, backend="reference", **c.arguments)
    return loss.detach(), torch.autograd.grad(loss, leaf, upstream_for(c).to(loss.dtype))[0]


CASES = [(world, name) for world in WORLDS for name in worker.logits_cases(world)]
MADE = worker.logits_cases(2)


def compare(found, world: int, key: str, c) -> None:
    ranks = of_all(found, world, key)
    loss, grad = one_process(c)
    close("loss", same_loss(ranks), loss, rtol=1e-10)
    got = joined(ranks, 0, 1)
    if c.arguments.get("kind") == "sumexp":  # where 1/p - 1 overflows, so does its derivative
        got, grad = (g.masked_fill(loss.isinf()[:, None], 0) for g in (got, grad))
    close("gradient", got, grad, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize(("world", "name"), [(w, n) for w, n in CASES if not n.startswith("dtypes")])
def test_float64(found, world, name):
    """Every loss, every sample of its arguments, every kind of row (-inf, NaN, ties across shards, ignored, one class), all
    reductions with weights, shapes, class probabilities."""
    compare(found, world, name, MADE[name])


@pytest.mark.parametrize("name", [name for name in MADE if name.startswith("shapes")])
def test_strides_are_kept(found, name):
    for result in of_all(found, 2, name):
        given, got = result["strides"]
        assert given == got


@pytest.mark.parametrize(("world", "name"), [(w, n) for w, n in CASES if n.startswith("dtypes")])
def test_precision(found, world, name):
    """The project's rule: at most twice the error of plain PyTorch. Confident rows keep their digits."""
    c = MADE[name]
    ranks = of_all(found, world, name)
    up = upstream_for(c)
    plain, truth = run(c, "reference", up), run(c.double(), "reference", up)
    agree("loss", same_loss(ranks), plain.loss, truth.loss)
    agree("gradient", joined(ranks, 0, 1), plain.grads[0], truth.grads[0], row=1)


@pytest.mark.parametrize("world", WORLDS)
def test_blocks(found, world):
    """More rows than a block has."""
    compare(found, world, "blocks", worker.long_case())


# Linear layers ----------------------------------------------------------------------------------------------------------------


def linear_process(function, arguments, wanted=(True, True, True), dtypes=(torch.float64,) * 3, widen=False):
    h, w, b, y = worker.linear_inputs(arguments)
    leaves = [t.to(kind) for t, kind in zip((h, w, b), dtypes, strict=True)]
    leaves = [(t.double() if widen else t).requires_grad_(need) for t, need in zip(leaves, wanted, strict=True)]
    clean = torch.where(leaves[0].isnan(), 0, leaves[0])  # the reference multiplies ignored rows too
    loss = getattr(pylosses, function)(clean, leaves[1], y, linear_bias=leaves[2], backend="reference", **arguments)
    needing = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(loss, needing, worker.linear_upstream(loss)) if needing else ()
    return loss.detach(), grads


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in WORLDS for name in worker.linear_cases(world)])
def test_linear(found, world, name):
    """Every softmax and margin loss of a split head, in blocks of sixteen rows, some of them ignored: three gradients."""
    ranks = of_all(found, world, f"linear/{name}")
    loss, (dh, dw, db) = linear_process(*worker.linear_cases(2)[name])
    close("loss", same_loss(ranks), loss, rtol=1e-10)
    for r in ranks:
        close("input", r["grads"][0], dh, rtol=1e-10)
    close("linear_weight", joined(ranks, 1, 0), dw, rtol=1e-10)
    close("linear_bias", joined(ranks, 2, 0), db, rtol=1e-10)


@pytest.mark.parametrize("wanted", worker.WANTED, ids=str)
def test_only_what_needs_a_gradient(found, wanted):
    ranks = of_all(found, 2, f"wanted/{wanted}")
    loss, grads = linear_process("linear_hem_loss", {}, wanted)
    close("loss", same_loss(ranks), loss, rtol=1e-10)
    assert all(len(r["grads"]) == sum(wanted) for r in ranks)
    for i, grad in enumerate(grads):  # that of the features is whole on each rank
        close(f"gradient {i}", ranks[1]["grads"][0] if wanted[0] and i == 0 else joined(ranks, i, 0), grad, rtol=1e-10)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", worker.MIXED)
def test_mixed_dtypes(found, world, name):
    """Each gradient has the dtype of its tensor; that of the features is rounded once, after the sum over the ranks."""
    dtypes = worker.MIXED[name]
    ranks = of_all(found, world, f"mixed/{name}")
    plain, truth = (linear_process("linear_cross_entropy", {}, dtypes=dtypes, widen=w) for w in (False, True))
    agree("loss", same_loss(ranks), plain[0], truth[0])
    agree("input", ranks[-1]["grads"][0], plain[1][0], truth[1][0], row=2)
    for i, name in ((1, "linear_weight"), (2, "linear_bias")):
        agree(name, joined(ranks, i, 0), plain[1][i], truth[1][i], row=truth[1][i].dim() - 1)


# What is sent -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_only_numbers_of_rows_are_sent(found, world):
    """No collective is larger than three numbers a row, or k candidates; the wide rows have 4099 classes."""
    most = {"knl": 11, "tta": 11}  # 1 + skip + k
    for ranks in found(world):
        for name, (rows, made) in ranks["collectives"].items():
            assert made, name
            kinds = {kind for kind, _ in made}
            assert kinds <= {"all_reduce", "all_gather"}, (name, kinds)
            facts, *rest = made
            assert facts[0] == "all_gather" and facts[1] == 17, (name, facts)
            if name == "linear":  # two backwards, each with the sum of the features' gradient
                assert [rest.pop(), rest.pop()] == 2 * [("all_reduce", worker.N * worker.D)]
            largest = max(count for _, count in rest)
            assert largest <= rows * max(most.get(name, 1), 4), (name, made)
            assert len(rest) <= 7, (name, made)


def test_the_count_sees_a_gather_of_logits():
    """4099 classes of 3 rows: a gather of them would be far above the bound."""
    x = case(LOSSES["cross_entropy"], 0, "wide", torch.float64).inputs[0]
    assert x.numel() // 4 > 20 * len(x) * 11


# Data parallel ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["mean", "above", "averaged"])
def test_global_count(found, world, name):
    """Rows split over processes: gradients as in one process with all rows, for a mean and for the mean above zero."""
    ranks = [r[name] for r in of_all(found, world, "data_parallel")]
    c = case(LOSSES["hem"], 0, "ignored", torch.float64)
    x, y = c.inputs
    weight = torch.rand(c.classes, generator=worker.generator(4)).double() + 0.1
    s = torch.rand(len(y), generator=worker.generator(5)).double()
    leaf = x.detach().requires_grad_()
    reduction = "above_zero" if name == "above" else "mean"
    loss = pylosses.hem_loss(leaf, y, reduction=reduction, weight=weight, sample_weight=s, backend="reference")
    loss.backward()
    times = 1 / world if name == "averaged" else 1
    close("loss", times * sum(r["loss"] for r in ranks), loss, rtol=1e-13)
    close("gradient", times * torch.cat([r["grads"][0] for r in ranks]), leaf.grad, rtol=1e-12)
    assert len({float(r["count"]) for r in ranks}) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_global_count_of_masks_and_of_nothing(found, world):
    y = case(LOSSES["hem"], 0, "ignored", torch.float64).inputs[1]
    for r in of_all(found, world, "data_parallel"):
        assert float(r["mask"]) == int((y != IGNORE).sum()) and float(r["nothing"]) == 0


TWO_PROCESSES = """
import copy, os, sys, torch, pylosses
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
parent = os.fork()
rank = int(parent == 0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Linear(6, 5)
x, y = torch.randn(11, 6), torch.randint(0, 5, (11,))
y[[0, 8, 9]] = -100
mine = slice(0, 3) if rank == 0 else slice(3, 11)  # 2 labels here, 6 there

def gradient(model, rows, **normalizer):
    model.zero_grad()
    loss = pylosses.cross_entropy(model(x[rows]), y[rows], **normalizer)
    loss.backward()
    return next(model.parameters()).grad

whole = gradient(model, slice(None))
count = pylosses.parallel.global_count

summed = gradient(copy.deepcopy(model), mine, normalizer=count(y[mine]))
dist.all_reduce(summed)
torch.testing.assert_close(summed, whole)

averaging = DistributedDataParallel(copy.deepcopy(model))
averaged = gradient(averaging, mine, normalizer=count(y[mine], averaged=True))
torch.testing.assert_close(averaged, whole)

halved = gradient(averaging, mine, normalizer=count(y[mine]))
torch.testing.assert_close(2 * halved, whole)  # what the documentation warns of
if not rank:
    os.waitpid(parent, 0)
    print("the gradients of one process", flush=True)
os._exit(0)  # taking a gloo group down may block
"""


def test_the_two_forms_of_data_parallel(tmp_path):
    """Gradients that are summed and those that DistributedDataParallel averages: both are those of one process."""
    command = [sys.executable, "-c", TWO_PROCESSES, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "the gradients of one process" in done.stdout and not done.stderr.count("Error"), done.stderr


def test_global_count_of_one_process():
    x, y = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 1, IGNORE, 2, 1])
    for losses in (None, pylosses.hem_loss(x, y, reduction="none")):
        count = parallel.global_count(y, losses=losses)
        assert count.dim() == 0 and not count.requires_grad
        reduction = "mean" if losses is None else "above_zero"
        got = pylosses.hem_loss(x, y, reduction=reduction, normalizer=count)
        close("loss", got, pylosses.hem_loss(x, y, reduction=reduction), rtol=1e-6)


def test_global_count_refuses():
    y = torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="needs target, losses or mask"):
        parallel.global_count()
    with pytest.raises(ValueError, match=r"losses must have shape \(3,\) like target, got \(2,\)"):
        parallel.global_count(y, losses=torch.zeros(2))
    with pytest.raises(ValueError, match="weight needs target"):
        parallel.global_count(mask=y == 0, weight=torch.ones(3))
    with pytest.raises(TypeError, match="target must be a Tensor"):
        parallel.global_count([1, 2])


# Layouts that cannot work, and ranks that do not come -------------------------------------------------------------------------


ANOTHER = ("RuntimeError", "refused its arguments of this call", "TypeError")

#: what is wrong -> (error, part of its message) on every rank, and on the last rank if that is another
REFUSED = {
    "rows": ("ValueError", "the shape of the rows must be the same on all ranks, got (6,) on rank 0 and (5,)"),
    "dtype": ("ValueError", "the dtype of input must be the same on all ranks, got torch.float32 on rank 0 and torch.float64"),
    "labels": ("ValueError", "target must be the same on all ranks"),
    "labels_turned": ("ValueError", "target must be the same on all ranks"),
    "arguments": ("ValueError", "the loss and its arguments must be the same on all ranks"),
    "class_weights": ("ValueError", "the loss and its arguments must be the same on all ranks"),
    "another_loss": ("ValueError", "the loss and its arguments must be the same on all ranks"),
    "sum": ("ValueError", "classes together, got 4 + "),
    "one_refuses": (*ANOTHER, "input must be float32"),
    "one_unknown": (*ANOTHER, "unexpected keyword argument 'smoothing'"),
    "one_missing": (*ANOTHER, "missing a required argument: 'target'"),
    "one_too_many": (*ANOTHER, "too many positional arguments"),
    "one_empty": (*ANOTHER, "missing a required argument: 'input'"),
    "one_linear": (*ANOTHER, "missing a required argument: 'target'"),
    "bad_label": ("IndexError", "outside [0, "),
    "local_weight": ("ValueError", "weight must have shape ("),
    "wrong_soft": ("ValueError", "target must hold the probabilities of this rank's classes"),
    "learned": ("BackendError", "bias requires a gradient"),
    "backend": ("BackendError", "backend 'cpu' cannot run cross_entropy on split classes"),
    "features": ("ValueError", "the number of features must be the same on all ranks, got 3 on rank 0 and 4"),
    "head": ("ValueError", "linear_weight must have shape (c, 3) on each rank, got (4, 2)"),
    "needs": ("ValueError", "whether input needs a gradient must be the same on all ranks"),
    "top": ("ValueError", "top must be at least 1 and at most"),
    "linear_name": ("ValueError", "loss must be one of"),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(found, world, wrong):
    """Every rank raises, at once, and the next call of the group works."""
    kind, message, *other = REFUSED[wrong]
    after = []
    for rank, result in enumerate(of_all(found, world, "refused")):
        got = result[wrong]
        wanted = tuple(other) if other and rank == world - 1 else (kind, message)
        assert got[0] == wanted[0] and wanted[1] in got[1], (rank, got)
        after.append(result[f"{wrong}, then"])
    assert len(set(after)) == 1


def test_fingerprints_of_labels():
    """All labels of six rows, and shifts that a sum of places and values may not see."""
    rows = torch.cartesian_prod(*[torch.tensor([0, 1, 2, 5])] * 6)
    assert len({fingerprint({"target": y}) for y in rows}) == 4**6
    for i in range(50):
        a, b = torch.zeros(2, 50, dtype=torch.long)
        a[i], b[i] = 99 - 2 * i, IGNORE
        assert fingerprint({"target": a}) != fingerprint({"target": b})


def test_fingerprints_are_of_numbers():
    """Not of the dtype of labels; of every bit of a weight and of every place."""
    y, w = torch.tensor([3, 0, 2, IGNORE]), torch.tensor([0.5, 1.0, 0.5, 2.0, 0.0])
    assert fingerprint({"target": y}) == fingerprint({"target": y.int()})
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        near = w.to(dtype).clone()
        near[1] = torch.nextafter(near[1], near[3]) if dtype in (torch.float32, torch.float64) else 1 + torch.finfo(dtype).eps
        known = {fingerprint({"weight": t}) for t in (w.to(dtype), near, w.to(dtype).flip(0), w.to(dtype).roll(1))}
        assert len(known) == 4


@pytest.mark.parametrize("world", WORLDS)
def test_a_late_and_a_dead_rank(found, world):
    """A rank that waits for one which does not come, or has ended, says so soon."""
    for rank, result in enumerate(of_all(found, world, "late_and_dead")[:-1]):
        for what, limit in (("late", 10), ("dead", 30)):
            message, seconds = result[what]
            assert f"failed on rank {rank} of {world}: another rank has ended, or did not make the same call" in message, what
            assert seconds < limit, (what, seconds)


@pytest.mark.parametrize("world", WORLDS)
def test_a_group_of_some_ranks(found, world):
    ranks = of_all(found, world, "subgroup")
    for result in ranks[1:-1]:
        assert "no member" in result["error"]
    c = case(LOSSES["cross_entropy"], 0, "plain", torch.float64)
    loss, grad = one_process(c)
    pair = [ranks[0], ranks[-1]]
    close("loss", same_loss(pair), loss, rtol=1e-12)
    close("gradient", joined(pair, 0, 1), grad, rtol=1e-12)


@pytest.mark.parametrize("world", WORLDS)
def test_differentiable_once(found, world):
    for result in of_all(found, world, "differentiated"):
        assert "differentiate twice" in result["error"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["linear", *(spec.name for spec in worker.SPECS)])
def test_checkpoint(found, world, name):
    assert all(result[name] for result in of_all(found, world, "checkpointed"))


# DTensor ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("loss", ["cross_entropy", "hem", "entropy"])
@pytest.mark.parametrize("mesh", ["line", "square", "named"])
def test_dtensor(found, world, mesh, loss):
    if world == 2 and mesh != "line":
        pytest.skip("a mesh of two dimensions needs four ranks")
    ranks = [r[f"{mesh}-{loss}"] for r in of_all(found, world, "dtensors")]
    value, grad = one_process(case(LOSSES[loss], 1, "plain", torch.float64).but(reduction="mean"))
    factor = upstream_for(case(LOSSES[loss], 1, "plain", torch.float64).but(reduction="mean"))
    for r in ranks:
        close("loss", r["loss"], value, rtol=1e-10)
        close("gradient", factor * r["grads"][0], grad, rtol=1e-10)


@pytest.mark.parametrize("world", WORLDS)
def test_dtensor_head(found, world):
    h, w, b, y = worker.linear_inputs()
    leaves = [t.requires_grad_() for t in (h, w, b)]
    loss = pylosses.linear_cross_entropy(h, w, y, linear_bias=b)
    grads = torch.autograd.grad(loss, leaves)
    for result in of_all(found, world, "dtensors"):
        close("loss", result["linear"]["loss"], loss, rtol=1e-10)
        for a, e in zip(result["linear"]["grads"], grads, strict=True):
            close("gradient", a, e, rtol=1e-10)


@pytest.mark.parametrize("world", WORLDS)
def test_dtensor_of_another_kind(found, world):
    for result in of_all(found, world, "dtensors"):
        for kind in ("rows", "whole"):
            assert "input must be split along its classes, Shard(1)" in result[kind]


@pytest.mark.parametrize("world", WORLDS)
def test_dtensor_of_another_kind_on_one_rank(found, world):
    *others, odd = (result["one_whole"] for result in of_all(found, world, "dtensors"))
    assert "input must be split along its classes, Shard(1)" in odd
    assert all(f"rank {world - 1} of {world} refused its arguments" in other for other in others)


# One process ------------------------------------------------------------------------------------------------------------------


def test_one_process_needs_no_group():
    x, y = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 4, IGNORE, 2])
    got, wanted = parallel.hem_loss(x, target=y, margin=0.5), pylosses.hem_loss(x, y, margin=0.5)
    close("loss", got, wanted, rtol=1e-6)
    close("gradient", torch.autograd.grad(got, x)[0], torch.autograd.grad(wanted, x)[0], rtol=1e-6)


@pytest.mark.parametrize("function", parallel.__all__)
def test_functions_are_those_of_pylosses(function):
    """The same arguments and three more."""
    import inspect

    if function == "global_count":
        return
    mine, theirs = (inspect.signature(getattr(m, function)).parameters for m in (parallel, pylosses))
    assert set(mine) == set(theirs) | {"group", "classes", "timeout"}
    assert {n: p.default for n, p in theirs.items()}.items() <= {n: p.default for n, p in mine.items()}.items()
    assert f"pylosses.{function}" in inspect.getdoc(getattr(parallel, function))


def test_every_loss_of_rows_is_there():
    """All of the softmax, margin, entropy and select families, but for those that say why not."""
    families = ("softmax", "margin", "entropy", "select")
    wanted = {s.name for s in LOSSES.values() if s.family in families and len(s.missing.get("parallel", "")) < 16}
    assert wanted == set(parallel.FORMULAS)
    assert {LOSSES[name].function for name in wanted} < set(parallel.__all__)


MEBIBYTE = 2**20


@pytest.mark.parametrize("spec", worker.SPECS, ids=lambda s: s.name)
def test_memory_is_bounded(spec, monkeypatch):
    """torch's allocator: one tensor of the logits' size, the gradient; whatever else lives at a time fits in the workspace."""
    monkeypatch.setattr(parallel, "WORKSPACE", 4 * MEBIBYTE)
    x = torch.randn(512, 8192, requires_grad=True)
    y = (torch.arange(512),) if spec.inputs == "labelled" else ()
    more = {"top": 5} if "adr" in spec.name else {"class_counts": torch.ones(8192)} if spec.name == "logit_adjusted" else {}
    more |= {"kind": "gce"} if spec.name == "target" else {}

    def step():
        loss = getattr(parallel, spec.function)(x, *y, **more)
        return torch.autograd.grad(loss, x)

    sizes, _ = allocations(step)
    assert sum(size >= x.nbytes / 4 for size in sizes) == 1, sorted(sizes)[-4:]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held, most = 0, 0
    for event in sorted(
        (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        held += event.nbytes()
        most = max(most, held)
    assert most < x.nbytes + 6 * MEBIBYTE, f"{most / MEBIBYTE:.1f} MiB, the gradient has {x.nbytes / MEBIBYTE:.0f}"


def test_memory_of_a_linear_layer():
    """Nothing of the logits' size, as in one process."""
    h, w = torch.randn(512, 16, requires_grad=True), torch.randn(8000, 16, requires_grad=True)
    y = torch.arange(512)
    for function in ("linear_cross_entropy", "linear_hem_loss"):
        sizes, _ = allocations(
            lambda f=function: torch.autograd.grad(getattr(parallel, f)(h, w, y, workspace=2 * MEBIBYTE), (h, w))
        )
        assert max(sizes) <= 2 * MEBIBYTE < 512 * 8000 * 4 / 4
