"""The ranks of the tests of pylosses.parallel: each runs every case with its shard and writes down what it got.

The test process makes the same cases, and compares what all ranks got with one process that has all classes. Ranks are forked
from a process that has imported everything, which takes longer than the cases.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import IGNORE, KINDS, LABELLED, UNLABELLED, Case, case, upstream_for
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import pylosses
from pylosses import parallel
from pylosses.spec import LOSSES

SPECS = [spec for spec in LABELLED + UNLABELLED if spec.name in parallel.FORMULAS]
LINEAR = [spec for spec in SPECS if spec.family in ("softmax", "margin")]
REDUCTIONS = ("none", "sum", "mean", "above_zero", "normalizer")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
N, C, D = 40, 37, 5
TINY = 1  # bytes of workspace: blocks of sixteen rows


def sizes(classes: int, world: int) -> list[int]:
    """Uneven shards, one of which is empty if there are four."""
    cuts = [0, classes // 3 + 1, classes] if world == 2 else [0, classes // 5, classes // 5, classes // 2 + 1, classes]
    cuts = [min(c, classes) for c in cuts]
    return [b - a for a, b in zip(cuts, cuts[1:], strict=False)]


def shard(x: Tensor, rank: int, world: int, dim: int = 1) -> Tensor:
    dim = min(dim, x.dim() - 1)
    return x.split(sizes(x.shape[dim], world), dim)[rank]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Cases: name -> (Case of one process, upstream gradient). Both sides make them ------------------------------------------------


def row_cases() -> dict[str, Case]:
    """Every loss and sample of its arguments on every kind of row, with an upstream gradient for each row."""
    found = {}
    for spec in SPECS:
        for sample in range(len(spec.samples)):
            for kind in KINDS:
                if kind != "huge" and (sample == 0 or kind not in ("saturated", "offset", "one_class", "three_classes")):
                    found[f"{spec.name}{sample}-{kind}"] = case(spec, sample, kind, torch.float64).but(reduction="none")
    return found


def reduction_cases() -> dict[str, Case]:
    found = {}
    for spec in SPECS:
        for reduction in REDUCTIONS:
            for weighted in (False, True):
                c = case(spec, len(spec.samples) - 1, "ignored", torch.float64)
                c = c.but(reduction="mean", normalizer=7.5) if reduction == "normalizer" else c.but(reduction=reduction)
                rows = c.inputs[0].shape[0]
                if weighted:
                    c = c.but(sample_weight=torch.rand(rows, generator=generator(3)).double())
                    if spec.inputs == "labelled":
                        c = c.but(weight=torch.rand(c.classes, generator=generator(4)).double())
                elif spec.inputs == "unlabelled":
                    c = c.but(mask=torch.arange(rows) % 3 != 0)
                found[f"{spec.name}-{reduction}-{'weighted' if weighted else 'plain'}"] = c
    return found


def dtype_cases() -> dict[str, Case]:
    return {
        f"{spec.name}-{kind}-{dtype}": case(spec, 0, kind, dtype).but(reduction="none")
        for spec in SPECS
        for kind in ("plain", "peaked", "offset", "masked")
        for dtype in DTYPES
    }


def shape_cases() -> dict[str, Case]:
    """(C), (N, C, 4), (N, C, H, W) in three layouts; losses with one or more passes."""
    found = {}
    for name in ("cross_entropy", "hem", "logit_norm", "adr", "entropy"):
        c = case(LOSSES[name], 0, "masked", torch.float64).but(reduction="none")
        alone = c._replace(inputs=tuple(t[2] for t in c.inputs))
        found[f"{name}-one"] = alone
        found[f"{name}-three"] = c.shaped(3, 4)
        image = c.shaped(2, 3, 2)
        x, *rest = image.inputs
        found[f"{name}-image"] = image
        found[f"{name}-channels_last"] = image._replace(inputs=(x.contiguous(memory_format=torch.channels_last), *rest))
        found[f"{name}-swapped"] = image._replace(inputs=(x.transpose(2, 3).contiguous().transpose(2, 3), *rest))
    return found


def soft_cases() -> dict[str, Case]:
    found = {}
    for name in ("cross_entropy", "cross_entropy_adr"):
        for sample in range(len(LOSSES[name].samples)):
            for reduction in ("none", "mean", "above_zero"):
                c = case(LOSSES[name], sample, "plain", torch.float64).but(reduction=reduction)
                x = c.inputs[0]
                t = torch.softmax(3 * torch.randn(x.shape, generator=generator(4)), dim=1).double()
                t[0], t[1] = torch.nn.functional.one_hot(torch.tensor(1), x.shape[1]), 0
                found[f"{name}{sample}-{reduction}"] = c._replace(inputs=(x, t))
    return found


def selected_cases() -> dict[str, Case]:
    """Rows that keep 1, 2, ... of 7 classes, and losses that select more than a rank has."""
    selecting = {
        "sparse_cl": {},
        "knl": {"k": 4, "skip": 1},
        "tta": {"k": 3, "skip": 0},
        "adr": {"top": 5, "norm": "l1"},
        "cross_entropy_adr": {"top": 5, "norm": "l1", "gamma": 0.3},
    }
    g, classes = generator(6), 7
    x, y = torch.randn(2 * classes, classes, generator=g).double(), torch.randint(0, classes, (2 * classes,), generator=g)
    order = torch.rand(x.shape, generator=g).scatter(1, y[:, None], -1).argsort(dim=1)  # the label stays longest
    for row, classes_in_order in enumerate(order):
        x[row, classes_in_order[1 + row % classes :]] = -torch.inf
    found = {}
    for name, arguments in selecting.items():
        spec = LOSSES[name]
        inputs = (x, y) if spec.inputs == "labelled" else (x,)
        found[f"{name}-few"] = Case(spec, inputs, {**arguments, "reduction": "none"}, classes)
    return found


def logits_cases(world: int) -> dict[str, Case]:
    """All of them for two ranks. Four ranks on few cores take long, so they get one of each kind of trouble."""
    made = {"rows": row_cases, "reductions": reduction_cases, "dtypes": dtype_cases, "shapes": shape_cases, "soft": soft_cases}
    made["selected"] = selected_cases
    found = {f"{group}/{name}": c for group, make in made.items() for name, c in make().items()}
    if world == 2:
        return found
    few = ("-tied", "-special", "-masked", "-two_classes", "-mean-weighted", "-image", "-mean", "-few")
    return {name: c for name, c in found.items() if name.endswith(few)}


def linear_inputs(arguments: dict[str, Any] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features (5, 8, D) with NaN at ignored rows, head, bias, labels."""
    g = generator(1)
    h, w, b = (torch.randn(*shape, generator=g).double() for shape in ((N, D), (C, D), (C,)))
    y = torch.randint(0, C, (N,), generator=g)
    y[[3, 17]] = IGNORE
    ignored = [2, 16, *range(7, N, 8)] if (arguments or {}).get("shift") else [3, 17]
    h[ignored] = torch.nan
    x = h.nan_to_num(0.0) @ w.t() + b
    errors = (x - x.gather(1, y.clamp(min=0)[:, None]) + 1).clamp(min=0)
    assert ((errors - errors.mean(dim=1, keepdim=True)).abs() > 1e-9).all()
    return h.view(5, 8, D), w, b, y.view(5, 8)


def linear_cases(world: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Function and arguments for `linear_inputs`."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for spec in LINEAR:
        for sample in range(len(spec.samples)):
            for reduction in ("none", "mean", "above_zero") if world == 2 else ("mean",):
                arguments = {"loss": spec.name, **spec.sample(sample, C), "reduction": reduction}
                found[f"{spec.name}{sample}-{reduction}"] = ("linear_loss", arguments)
    weights = {
        "weight": torch.rand(C, generator=generator(2)).double(),
        "sample_weight": torch.rand(5, 8, generator=generator(3)),
    }
    found["shift"] = ("linear_cross_entropy", {"shift": True, "softcap": 3.0, "z_loss": 0.1, **weights})
    found["shift-hem"] = ("linear_hem_loss", {"shift": True, **weights})
    return found


#: dtypes of features, weight and bias
MIXED = {
    "all": (torch.bfloat16, torch.float32, torch.float16),
    "half": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "wide": (torch.float64, torch.float32, torch.float32),
}

#: which of features, weight and bias need a gradient
WANTED = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]


# What a rank does -------------------------------------------------------------------------------------------------------------


def run_logits(c: Case, rank: int, world: int, **more: Any) -> dict[str, Any]:
    x, *rest = c.inputs
    leaf = shard(x, rank, world).detach()
    leaf = leaf if x.dim() < 3 else leaf.clone(memory_format=torch.preserve_format)
    leaf.requires_grad_()
    before = leaf.detach().clone()
    rest = [shard(t, rank, world) if t.is_floating_point() else t for t in rest]
    loss = getattr(parallel, c.spec.function)(leaf, *rest, **c.arguments, **more)
    (grad,) = torch.autograd.grad(loss, leaf, upstream_for(c).to(loss.dtype))
    assert torch.equal(before.nan_to_num(1.25), leaf.detach().nan_to_num(1.25)), "the input was modified"
    return {"loss": loss.detach(), "grads": [grad], "strides": (leaf.stride(), grad.stride())}


def linear_upstream(loss: Tensor) -> Tensor:
    return torch.randn(loss.shape, generator=generator(5), dtype=torch.float64).to(loss.dtype)


def run_linear(
    function: str, arguments: dict[str, Any], rank: int, world: int, wanted=(True, True, True), dtypes=(torch.float64,) * 3
) -> dict[str, Any]:
    h, w, b, y = linear_inputs(arguments)
    leaves = [h, shard(w, rank, world, 0), shard(b, rank, world, 0)]
    leaves = [t.detach().to(kind).requires_grad_(need) for t, need, kind in zip(leaves, wanted, dtypes, strict=True)]
    h, w, b = leaves
    loss = getattr(parallel, function)(h, w, y, linear_bias=b, workspace=TINY, **arguments)
    needing = [t for t in leaves if t.requires_grad]
    if not needing:
        return {"loss": loss, "grads": []}
    grads = torch.autograd.grad(loss, needing, linear_upstream(loss), retain_graph=True)
    again = torch.autograd.grad(loss, needing, linear_upstream(loss))
    assert all(torch.equal(a.nan_to_num(1.0), e.nan_to_num(1.0)) for a, e in zip(grads, again, strict=True))
    return {"loss": loss.detach(), "grads": list(grads)}


def counted(rank: int, world: int) -> dict[str, Any]:
    """Every collective of torch.distributed that a step of each loss makes: (name, numbers)."""
    made: list[tuple[str, int]] = []

    def recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **more: Any) -> Any:
            tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)]
            made.append((name, max((t.numel() for t in tensors), default=0)))
            return original(*args, **more)

        return collective

    names = [
        n for n in dir(dist) if n.startswith(("all_", "reduce", "gather", "scatter", "broadcast", "send", "recv", "isend"))
    ]
    originals = {n: getattr(dist, n) for n in names if callable(getattr(dist, n))}
    found = {}
    try:
        for name, original in originals.items():
            setattr(dist, name, recording(name, original))
        for spec in SPECS:
            c = case(spec, 0, "wide", torch.float64)
            made.clear()
            run_logits(c, rank, world)
            found[spec.name] = (len(c.inputs[0]), list(made))
        made.clear()
        run_linear("linear_cross_entropy", {}, rank, world)
        found["linear"] = (N, list(made))
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return found


def data_parallel(rank: int, world: int) -> dict[str, Any]:
    """Each rank has rows of its own: sums of the ranks' losses and gradients, by global_count as the normalizer."""
    c = case(LOSSES["hem"], 0, "ignored", torch.float64)
    x, y = c.inputs
    weight = torch.rand(c.classes, generator=generator(4)).double() + 0.1
    s = torch.rand(len(y), generator=generator(5)).double()
    rows = slice(rank * len(y) // world, (rank + 1) * len(y) // world)
    found = {}
    for name, reduction in (("mean", "mean"), ("above", "above_zero"), ("averaged", "mean")):
        leaf = x[rows].detach().requires_grad_()
        arguments = {"weight": weight, "sample_weight": s[rows]}
        losses = pylosses.hem_loss(leaf, y[rows], reduction="none", **arguments).detach() if name == "above" else None
        count = parallel.global_count(y[rows], losses=losses, averaged=name == "averaged", **arguments)
        loss = pylosses.hem_loss(leaf, y[rows], reduction=reduction, normalizer=count, **arguments)
        loss.backward()
        found[name] = {"loss": loss.detach(), "grads": [leaf.grad], "count": count}
    found["mask"] = parallel.global_count(mask=y[rows] != IGNORE)
    found["nothing"] = parallel.global_count(torch.full((2,), IGNORE))
    return found


def refused(rank: int, world: int) -> dict[str, Any]:
    """What each rank raises when the ranks do not fit together."""
    x, y = torch.randn(6, 4, generator=generator(rank)), torch.arange(6) % (4 * world)
    odd = rank == world - 1
    ce = parallel.cross_entropy
    calls: dict[str, Callable[[], Any]] = {
        "rows": lambda: ce(x[:5] if odd else x, y[:5] if odd else y),
        "dtype": lambda: ce(x.double() if odd else x, y),
        "labels": lambda: ce(x, y.flip(0) if odd else y),
        "labels_turned": lambda: ce(x, torch.tensor([0, 3, 3, 0, 0, 0] if odd else [3, 0, 0, 3, 0, 0])),
        "arguments": lambda: ce(x, y, label_smoothing=0.1 if odd else 0.2),
        "class_weights": lambda: ce(x, y, weight=torch.full((4 * world,), 1.0 + odd)),
        "another_loss": lambda: (parallel.focal_loss if odd else ce)(x, y),
        "sum": lambda: ce(x[:, :3] if odd else x, y, classes=4 * world),
        "one_refuses": lambda: ce(x.long() if odd else x, y),
        "one_unknown": lambda: ce(x, y, **({"smoothing": 0.1} if odd else {})),
        "one_missing": lambda: ce(x, *(() if odd else (y,))),
        "one_too_many": lambda: ce(x, y, *((y,) * 20 if odd else ())),
        "one_empty": lambda: ce(*(() if odd else (x, y))),
        "one_linear": lambda: parallel.linear_cross_entropy(torch.ones(6, 3), torch.ones(4, 3), *(() if odd else (y,))),
        "bad_label": lambda: ce(x, y + 1 + 4 * (world - 1)),
        "local_weight": lambda: ce(x, y, weight=torch.ones(4)),
        "wrong_soft": lambda: ce(x, torch.rand(6, 4 * world)),
        "learned": lambda: ce(x, y, bias=torch.zeros(4 * world, requires_grad=True)),
        "backend": lambda: ce(x, y, backend="cpu"),
        "features": lambda: parallel.linear_cross_entropy(torch.randn(6, 3 + odd), torch.randn(4, 3 + odd), y),
        "head": lambda: parallel.linear_cross_entropy(torch.randn(6, 3), torch.randn(4, 2), y),
        "needs": lambda: parallel.linear_cross_entropy(torch.randn(6, 3, requires_grad=odd), torch.randn(4, 3), y),
        "top": lambda: parallel.adr_loss(x, top=4 * world + 1),
        "linear_name": lambda: parallel.linear_loss(torch.randn(6, 3), torch.randn(4, 3), y, loss="entropy"),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = ("nothing", "")
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
        found[f"{name}, then"] = float(ce(x, y, timeout=20))  # the group still works
    return found


def dtensors(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (world,))
    meshes = {"line": (mesh, [Shard(-1)])}
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "classes"))
        meshes["square"] = (square, [Replicate(), Shard(1)])
        meshes["named"] = (square["classes"], [Shard(1)])
    for name, (on, placements) in meshes.items():
        for loss in ("cross_entropy", "hem", "entropy"):
            c = case(LOSSES[loss], 1, "plain", torch.float64).but(reduction="mean")
            x, *rest = c.inputs
            leaf = distribute_tensor(x, on, placements).detach().requires_grad_()
            rest = [DTensor.from_local(t, on, [Replicate()] * on.ndim) for t in rest]
            value = getattr(parallel, c.spec.function)(leaf, *rest, **c.arguments)
            value.backward()
            assert leaf.grad.placements == leaf.placements
            found[f"{name}-{loss}"] = {"loss": value.detach(), "grads": [leaf.grad.full_tensor()]}
    h, w, b, y = linear_inputs()
    leaves = [h.requires_grad_(), *(distribute_tensor(t, mesh, [Shard(0)]).detach().requires_grad_() for t in (w, b))]
    value = parallel.linear_cross_entropy(*leaves[:2], y, linear_bias=leaves[2])
    value.backward()
    found["linear"] = {"loss": value.detach(), "grads": [h.grad, *(t.grad.full_tensor() for t in leaves[1:])]}
    wrong = {"rows": [Shard(0)], "whole": [Replicate()], "one_whole": [Replicate() if rank == world - 1 else Shard(1)]}
    for name, placements in wrong.items():
        try:
            parallel.cross_entropy(DTensor.from_local(torch.randn(8, 8), mesh, placements), torch.zeros(8, dtype=torch.long))
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found


def subgroup(rank: int, world: int) -> dict[str, Any]:
    """Two ranks of all, and a rank that is no member."""
    pair = dist.new_group([0, world - 1])
    c = case(LOSSES["cross_entropy"], 0, "plain", torch.float64)
    if rank in (0, world - 1):
        return run_logits(c, 0 if rank == 0 else 1, 2, group=pair)
    try:
        parallel.cross_entropy(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long), group=pair)
    except ValueError as error:
        return {"error": str(error)}
    return {}


def differentiated(rank: int, world: int) -> dict[str, Any]:
    """Twice with retain_graph, and twice in the other sense."""
    c = case(LOSSES["focal"], 0, "plain", torch.float64)
    x = shard(c.inputs[0], rank, world).detach().requires_grad_()
    loss = parallel.focal_loss(x, c.inputs[1])
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(2 * loss, x, retain_graph=True)
    assert torch.equal(2 * first, second)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    try:
        grad.square().sum().backward()
    except RuntimeError as error:
        return {"error": str(error)}
    return {}


def checkpointed(rank: int, world: int) -> dict[str, bool]:
    """Whether each loss has its gradient behind a checkpoint too: the forward that is run again has collectives."""
    h, w, b, y = linear_inputs()
    w, b = shard(w, rank, world, 0), shard(b, rank, world, 0)
    calls: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "linear": (lambda h: parallel.linear_cross_entropy(h, w, y, linear_bias=b), h)
    }
    for spec in SPECS:
        c = case(spec, 0, "plain", torch.float64)
        function, rest, arguments = getattr(parallel, spec.function), c.inputs[1:], c.arguments
        loss = lambda x, f=function, rest=rest, a=arguments: f(x, *rest, **a)  # noqa: E731
        calls[spec.name] = loss, shard(c.inputs[0], rank, world)
    found = {}
    for name, (loss, x) in calls.items():
        leaves = [x.detach().requires_grad_() for _ in range(2)]
        loss(leaves[0]).backward()
        checkpoint(loss, leaves[1], use_reentrant=False).backward()
        plain, again = (leaf.grad.nan_to_num(1.0) for leaf in leaves)
        found[name] = bool(plain.any()) == (plain.numel() > 0) and torch.equal(plain, again)
    return found


def late_and_dead(rank: int, world: int) -> dict[str, Any]:
    """The last rank is late for a call on a group of its own; then it ends."""
    found: dict[str, Any] = {}
    other = dist.new_group(timeout=timedelta(seconds=60))
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    parallel.cross_entropy(x, y, group=other)
    odd = rank == world - 1
    started = time.monotonic()
    if odd:
        time.sleep(3)
    else:
        try:
            parallel.cross_entropy(x, y, group=other, timeout=1.0)
        except RuntimeError as error:
            found["late"] = (str(error), time.monotonic() - started)
    dist.barrier()  # of the default group, which nothing has happened to
    if odd:
        return found
    time.sleep(1.0)
    started = time.monotonic()
    try:
        parallel.hem_loss(x, y)
    except RuntimeError as error:
        found["dead"] = (str(error), time.monotonic() - started)
    return found


OTHERS: dict[str, Callable[[int, int], Any]] = {
    "collectives": counted,
    "data_parallel": data_parallel,
    "refused": refused,
    "dtensors": dtensors,
    "subgroup": subgroup,
    "differentiated": differentiated,
    "checkpointed": checkpointed,
    "late_and_dead": late_and_dead,  # the end
}


def everything(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def attempt(key: str, action: Callable[[], Any]) -> None:
        try:
            found[key] = action()
        except Exception:
            found[key] = {"trace": traceback.format_exc()}

    for name, c in logits_cases(world).items():
        attempt(name, lambda c=c: run_logits(c, rank, world))
    blocks = parallel.WORKSPACE
    parallel.WORKSPACE = TINY
    attempt("blocks", lambda: run_logits(long_case(), rank, world))
    parallel.WORKSPACE = blocks
    for name, (function, arguments) in linear_cases(world).items():
        attempt(f"linear/{name}", lambda f=function, a=arguments: run_linear(f, a, rank, world))
    for wanted in WANTED if world == 2 else ():
        attempt(f"wanted/{wanted}", lambda w=wanted: run_linear("linear_hem_loss", {}, rank, world, w))
    for name, dtypes in MIXED.items():
        attempt(f"mixed/{name}", lambda d=dtypes: run_linear("linear_cross_entropy", {}, rank, world, dtypes=d))
    for name, action in OTHERS.items():
        attempt(name, lambda action=action: action(rank, world))
    return found


def long_case() -> Case:
    """More rows than a block has, of which some are ignored."""
    c = case(LOSSES["hem"], 1, "plain", torch.float64)
    g = generator(9)
    x, y = 3 * torch.randn(60, 11, generator=g).double(), torch.randint(0, 11, (60,), generator=g)
    y[::7] = IGNORE
    return c._replace(
        inputs=(x, y), arguments={"margin": torch.rand(11, generator=g).double(), "reduction": "mean"}, classes=11
    )


def be_rank(rank: int, world: int, out: Path) -> None:
    sys.stdout = sys.stderr = (out / f"{world}-{rank}.log").open("w", buffering=1)
    store = f"file://{out / f'store{world}'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    torch.save(everything(rank, world), out / f"{world}-{rank}.pt")


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills memory that nobody has written with NaN, so that reading it shows
    out = Path(sys.argv[1])
    for world in map(int, sys.argv[2:]):
        ranks = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                try:
                    be_rank(rank, world, out)
                except BaseException:
                    traceback.print_exc()
                os._exit(0)  # a group that lost a rank cannot be taken down in order
            ranks.append(pid)
        for pid in ranks:
            os.waitpid(pid, 0)
        (out / f"done{world}").touch()


if __name__ == "__main__":
    main()
