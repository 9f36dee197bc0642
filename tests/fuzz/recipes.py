"""A random call as plain data: how it is drawn, made, run and judged. Its repr makes it again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import oracle
import torch
from hypothesis import strategies as st
from torch import Tensor

import pylosses

FUNCTIONS = {
    "cross_entropy": "cross_entropy", "focal": "focal_loss", "target": "target_loss", "logit_norm": "logit_norm_loss",
    "logit_adjusted": "logit_adjusted_loss", "multi_margin": "multi_margin_loss", "hem": "hem_loss", "dice": "dice_loss",
    "dice_ce": "dice_ce_loss", "entropy": "entropy_loss", "sparse_cl": "sparse_cl_loss", "knl": "knl_loss", "tta": "tta_loss",
    "adr": "adr_loss", "cross_entropy_adr": "cross_entropy_adr",
}  # fmt: skip
UNLABELLED = ("entropy", "sparse_cl", "knl", "tta", "adr")
REGIONS = ("dice", "dice_ce")
MARGINS = ("multi_margin", "hem")
SOFT = ("cross_entropy", "cross_entropy_adr")
LINEAR = ("cross_entropy", "focal", "target", "logit_norm", "logit_adjusted", "multi_margin", "hem")

KINDS = ("plain", "peaked", "tied", "masked", "offset", "equal")
LAYOUTS = ("contiguous", "last", "transposed", "sliced", "strided", "expanded")
LAZY = ("", "", "", "neg", "conj")
TRANSFORMS = ("eager", "eager", "no_grad", "inference", "twice", "checkpoint", "batched", "make_fx", "trace", "func", "vmap")
#: slower by a second or more
COMPILED = ("compile",)


class Recipe(NamedTuple):
    """Numbers and names alone: tensors are made from them and the seed."""

    loss: str
    own: dict[str, Any] = {}  # noqa: RUF012 - never written to
    shape: tuple[int, ...] = (4, 5)
    seed: int = 0
    dtype: str = "float32"
    kind: str = "plain"
    layout: str = "contiguous"
    lazy: str = ""
    target: str = "int64"  #: the labels' dtype, or "soft"
    ignored: str = "none"  #: "some" or "all"
    weight: str = ""  #: "positive", "zeros" or "negative"
    sample_weight: str = ""
    reduction: str = "mean"
    normalizer: float | None = None
    device: str = ""  #: torch's default device during the call
    threads: int = 1
    transform: str = "eager"
    features: int = 0  #: of a linear layer that makes the logits; 0 is none


# Drawing ----------------------------------------------------------------------------------------------------------------------


def _own(draw: Callable[..., Any], loss: str, classes: int) -> dict[str, Any]:
    """Some of a loss's own arguments; PerClass ones are named by their kind and made with the tensors."""
    some: dict[str, st.SearchStrategy[Any]] = {}
    if loss in ("cross_entropy", "cross_entropy_adr", "dice_ce"):
        some |= {
            "label_smoothing": st.sampled_from([0.0, 0.1, 0.5]),
            "temperature": st.sampled_from([1.0, 0.5, 3.0]),
            "softcap": st.sampled_from([None, 5.0]),
            "z_loss": st.sampled_from([0.0, 1e-2]),
            "bias": st.just("vector"),
        }
    if loss == "focal":
        some |= {"gamma": st.sampled_from([0.5, 1.0, 2.0, 3.5]), "alpha": st.just("positive")}
    if loss == "logit_norm":
        some |= {"temperature": st.sampled_from([0.04, 1.0])}
    if loss in MARGINS:
        some |= {
            "margin": st.sampled_from([0.0, 0.5, 1.0, "eighths"]),
            "power": st.sampled_from([1.0, 2.0]),
            "margin_index": st.sampled_from(["logit", "label"]),
        }
    if loss == "hem":
        some |= {"threshold": st.booleans(), "above_zero": st.booleans()}
    if loss in REGIONS:
        some |= {
            "smooth": st.sampled_from([1.0, 1e-2]),
            "over": st.sampled_from(["batch", "image"]),
            "absent": st.sampled_from(["literal", "zero", "exclude"]),
        }
    if loss == "dice_ce":
        some |= {"dice_weight": st.sampled_from([0.0, 0.7]), "ce_weight": st.sampled_from([0.0, 0.3])}
    if loss in ("entropy", "sparse_cl", "knl", "tta"):
        some |= {"max_entropy": st.sampled_from([0.3, 0.9])}
    if loss == "sparse_cl":
        some |= {"weight": st.sampled_from(["one", "prob"])}
    if loss == "tta":
        some |= {"lam": st.sampled_from([0.0, 0.3])}
    if loss in ("adr", "cross_entropy_adr"):
        some |= {
            "phi": st.sampled_from(["entropy", "variance"]),
            "scope": st.sampled_from(["sample", "batch"]),
            "norm": st.sampled_from(["l1", "l2"]),
            "detach_phi": st.booleans(),
        }
    own = {name: draw(values) for name, values in some.items() if draw(st.integers(0, 3)) == 0}
    if loss in ("knl", "tta"):
        skip = draw(st.integers(0, max(0, classes - 2)))
        own |= {"skip": skip, "k": draw(st.integers(1, 6)), "form": draw(st.sampled_from(["nl", "logit"]))}
    if loss in ("adr", "cross_entropy_adr"):
        own["top"] = draw(st.integers(1, min(classes, 4)))
    if loss == "logit_adjusted":
        own["class_counts"] = draw(st.sampled_from(["counts", "zero_counts"]))
    if loss == "target":
        kinds = {"ce": {}, "focal": {"gamma": 2.0}, "gce": {"q": 0.7}, "mae": {}, "compsum": {"tau": 1.5}, "sce": {"b": 0.5}}
        kind = draw(st.sampled_from(sorted(kinds)))
        own |= {"kind": kind, **kinds[kind]}
    return own


@st.composite
def recipes(draw: Callable[..., Any], *, compiled: bool = False, losses: tuple[str, ...] = tuple(FUNCTIONS)) -> Recipe:
    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    loss = one(*losses)
    least = 3 if loss in ("knl", "tta") else 1
    classes = max(least, one(2, 3, 5, 7, 16, 33, 64, 100, 257, 1))
    shape = (one(3, 1, 2, 8, 0, 17), classes, *one((), (), (), (2,), (3, 4), (1, 2, 3)))
    labelled = loss not in UNLABELLED
    target = one("int64", "int32", "int16", "uint8", *(["soft"] if loss in SOFT else [])) if labelled else "int64"
    features = one(0, 0, 0, 6) if loss in LINEAR and target != "soft" and len(shape) == 2 else 0
    reductions = ("mean", "sum") if loss in REGIONS else ("mean", "none", "sum", "above_zero")
    if loss == "adr":  # of a certain row it is 1e-50 in float64 and 0 in float32: both are right, but it is above zero in one
        reductions = reductions[:3]
    reduction = one(*reductions)
    plain = not features
    return Recipe(
        loss=loss,
        own=_own(draw, loss, classes),
        shape=shape,
        seed=draw(st.integers(0, 999)),
        dtype=one("float32", "float64", "bfloat16", "float16") if plain else one("float32", "float64"),
        kind=one(*KINDS) if plain else "plain",
        layout=one(*LAYOUTS) if plain else "contiguous",
        lazy=one(*LAZY),
        target=target,
        ignored=one("none", "some", "all") if target != "soft" and labelled or loss in ("entropy", "adr") else "none",
        weight=one("", "positive", "zeros", *(["negative"] if loss != "dice" else [])) if labelled else "",
        sample_weight=one("", "", "positive", "zeros", *(["negative"] if loss not in REGIONS else [])),
        reduction=reduction,
        normalizer=one(None, 3.0) if reduction == "mean" and loss not in REGIONS else None,
        device=one("", "", "meta"),
        threads=one(1, 2, 3),
        transform=one(*TRANSFORMS, *(COMPILED if compiled else ())) if plain else one("eager", "twice", "no_grad"),
        features=features,
    )


# Making -----------------------------------------------------------------------------------------------------------------------


class Made(NamedTuple):
    x: Tensor  #: logits, or a layer's features
    head: Tensor | None
    y: Tensor | None
    live: Tensor
    arguments: dict[str, Any]
    upstream: Tensor


def make(r: Recipe) -> Made:
    g = torch.Generator().manual_seed(r.seed)
    n, classes, *rest = r.shape
    places = (n, *rest)
    x = _logits(r.kind, math.prod(places), classes, g)
    if r.loss in MARGINS:
        x = (8 * x).round() / 8  # errors are exact, so that rounding decides nothing
    x = x.to(getattr(torch, r.dtype)).reshape(*places, classes).movedim(-1, 1).contiguous()
    live = torch.ones(places, dtype=torch.bool)
    if r.ignored == "some":
        live = torch.rand(places, generator=g) < 0.6
    if r.ignored == "all":
        live = torch.zeros(places, dtype=torch.bool)
    if r.layout != "expanded":  # where rows share their memory
        x = torch.where(live.unsqueeze(1), x, torch.nan)  # never read
    statistics = torch.float64 if r.dtype == "float64" else torch.float32
    arguments: dict[str, Any] = {k: _vector(v, classes, g).to(statistics) if k in VECTORS and isinstance(v, str) else v
                                 for k, v in r.own.items()}  # fmt: skip
    if r.weight:
        arguments["weight"] = _vector(r.weight, classes, g).to(statistics)
    if r.sample_weight:
        arguments["sample_weight"] = _vector(r.sample_weight, math.prod(places), g).reshape(places).to(statistics)
    arguments["reduction"] = r.reduction
    if r.normalizer is not None:
        arguments["normalizer"] = r.normalizer
    y = None
    if r.target == "soft":
        soft = torch.softmax(torch.randn(*places, classes, generator=g, dtype=torch.float64), -1)
        y = soft.movedim(-1, 1).contiguous().to(statistics)
    elif r.loss not in UNLABELLED:
        kind = getattr(torch, r.target)
        ignore = 255 if kind == torch.uint8 else -100
        most = classes if kind != torch.uint8 else min(classes, 200)
        y = torch.where(live, torch.randint(0, most, places, generator=g), ignore).to(kind)
        if kind == torch.uint8:
            arguments["ignore_index"] = 255
    elif r.ignored != "none":
        arguments["mask"] = live
    head = None
    if r.features:
        x = torch.randn(n, r.features, generator=g, dtype=torch.float64).to(x.dtype)
        head = torch.randn(classes, r.features, generator=g, dtype=torch.float64).to(x.dtype)
        if r.loss in MARGINS:
            x, head = ((4 * t).round() / 4 for t in (x, head))
    shape = places if r.reduction == "none" else ()
    upstream = torch.randn(shape, generator=g, dtype=torch.float64).to(statistics)
    return Made(x, head, y, live, arguments, upstream)


VECTORS = ("bias", "alpha", "margin", "class_counts")


def _vector(kind: str, size: int, g: torch.Generator) -> Tensor:
    values = torch.rand(size, generator=g, dtype=torch.float64) + 0.1
    if kind == "eighths":
        return (8 * values).round() / 8
    if kind in ("counts", "zero_counts"):
        counts = (1000 * values).round()
        return counts if kind == "counts" or size < 3 else counts.index_fill(0, torch.tensor([size // 2]), 0)
    if kind == "zeros":
        return values * (torch.rand(size, generator=g) < 0.6)
    if kind == "negative":
        return values - 0.7
    return values - 0.5 if kind == "vector" else values


def _logits(kind: str, rows: int, classes: int, g: torch.Generator) -> Tensor:
    x = 2 * torch.randn(rows, classes, generator=g, dtype=torch.float64)
    if kind == "peaked":
        x[:, 0] += 20
    if kind == "tied":
        x = x.round()
    if kind == "equal":
        x = torch.zeros_like(x)
    if kind == "offset":
        x = x + 300
    if kind == "masked" and classes > 2:  # the first and the last class stay
        hidden = torch.rand(rows, classes, generator=g) < 0.4
        hidden[:, 0] = hidden[:, -1] = False
        x = x.masked_fill(hidden, -torch.inf)
    return x


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values elsewhere in memory."""
    if layout == "last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced":
        padded = torch.full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), torch.nan, dtype=x.dtype)
        padded[:, 1 : 1 + x.shape[1]] = x
        return padded[:, 1 : 1 + x.shape[1]]
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if layout == "expanded" and x.shape[0] > 1:
        return x[:1].expand_as(x)
    return x


def lazy(x: Tensor, kind: str) -> Tensor:
    """The same values behind a bit that says how memory is to be read."""
    if kind == "neg":
        return torch._neg_view(-x)
    if kind == "conj" and x.dtype in (torch.float32, torch.float64):
        return torch.complex(torch.zeros_like(x), -x).conj().imag
    return x


# Running ----------------------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    loss: Tensor
    gradients: tuple[Tensor, ...]  #: none without a gradient


def call(r: Recipe, made: Made) -> Found:
    """By the package, with everything that stands between a call and plain memory."""
    x = lazy(laid_out(made.x, r.layout), r.lazy)
    more: dict[str, Any] = dict(made.arguments)
    if r.features:
        more |= {"loss": r.loss}
        positional: tuple[Any, ...] = (made.y,)
        function = pylosses.linear_loss
    else:
        positional = () if made.y is None else (lazy(made.y, r.lazy) if made.y.is_floating_point() else made.y,)
        function = getattr(pylosses, FUNCTIONS[r.loss])
    leaves = [x.detach().requires_grad_()] + ([made.head.detach().requires_grad_()] if made.head is not None else [])

    def loss(*given: Tensor) -> Tensor:
        return function(*given, *positional, **more)

    def steps() -> Found:
        if r.transform in ("no_grad", "inference"):
            with torch.no_grad() if r.transform == "no_grad" else torch.inference_mode():
                return Found(loss(*leaves).clone(), ())
        if r.transform == "func":
            value, back = torch.func.vjp(loss, *(t.detach() for t in leaves))
            return Found(value, back(made.upstream))
        if r.transform == "vmap":  # of one sample: the same numbers, another path
            value, back = torch.func.vjp(lambda t: torch.func.vmap(loss)(t[None])[0], leaves[0].detach())
            return Found(value, back(made.upstream))
        if r.transform == "batched":
            value = loss(*leaves)
            ups = torch.stack([made.upstream, 2 * made.upstream])
            found = torch.autograd.grad(value, leaves, ups, is_grads_batched=True, retain_graph=True)
            return Found(value.detach(), tuple(t[0] for t in found))
        run = loss
        if r.transform == "checkpoint":
            run = lambda *t: torch.utils.checkpoint.checkpoint(loss, *t, use_reentrant=False)
        if r.transform in ("trace", "make_fx"):
            with torch.no_grad():
                other = [torch.randn_like(t) for t in leaves]
                if r.transform == "trace":
                    run = torch.jit.trace(loss, tuple(other), check_trace=False)
                else:
                    run = torch.fx.experimental.proxy_tensor.make_fx(loss)(*other)
                return Found(run(*(t.detach() for t in leaves)), ())
        if r.transform == "compile":
            torch._dynamo.reset()
            run = torch.compile(loss, fullgraph=True, backend="aot_eager")
        value = run(*leaves)
        gradients = torch.autograd.grad(value, leaves, made.upstream, retain_graph=r.transform == "twice")
        if r.transform == "twice":
            gradients = torch.autograd.grad(value, leaves, made.upstream)
        return Found(value.detach(), gradients)

    before = torch.get_num_threads()
    torch.set_num_threads(r.threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if r.device and r.transform in ("eager", "no_grad", "twice"):
                with torch.device(r.device):
                    return steps()
            return steps()
    finally:
        torch.set_num_threads(before)


def truth(r: Recipe, made: Made, dtype: torch.dtype) -> Found:
    """By the oracle: float64 for what is right, float32 for what plain PyTorch makes of it."""
    x = laid_out(made.x, r.layout)
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, made.head) if t is not None]
    given = leaves[0] if made.head is None else leaves[0] @ leaves[1].T
    arguments = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in made.arguments.items()}
    for name in ("mask", "ignore_index"):
        arguments.pop(name, None)
    soft, y = (made.y.to(dtype), None) if r.target == "soft" else (None, made.y)
    live = made.live if given.shape[:1] + given.shape[2:] == made.live.shape else made.live.reshape(-1)
    loss = oracle.loss(r.loss, given, y, soft=soft, live=live, **arguments)
    gradients = torch.autograd.grad(loss, leaves, made.upstream.to(dtype), allow_unused=True)
    return Found(loss.detach(), tuple(torch.zeros_like(t) if g is None else g for g, t in zip(gradients, leaves, strict=True)))


# Judging ----------------------------------------------------------------------------------------------------------------------

ULPS = 32


def judge(r: Recipe) -> str | None:
    """What is wrong with this call, or None: error(kernel) <= 2 error(plain) + a few roundings of the numbers on the way."""
    made = make(r)
    right = truth(r, made, torch.float64)
    statistics = torch.float64 if r.dtype == "float64" else torch.float32
    plain = truth(r, made, statistics)
    found = call(r, made)
    return compare(r, made, found, plain, right)


def compare(r: Recipe, made: Made, found: Found, plain: Found, right: Found) -> str | None:
    statistics = torch.float64 if r.dtype == "float64" else torch.float32
    if found.loss.dtype != statistics:
        return f"the loss is {found.loss.dtype}, expected {statistics}"
    live = torch.where(made.x.isfinite(), made.x.double(), 0)
    reach = 1 + float(live.abs().max() if live.numel() else 0) / (
        0.04 if r.loss == "logit_norm" else r.own.get("temperature", 1)
    )
    wrong = _differs("loss", found.loss, plain.loss, right.loss, statistics, reach)
    names = ("gradient", "gradient of the head")
    for name, ours, theirs, true in zip(names, found.gradients, plain.gradients, right.gradients, strict=False):
        if ours.dtype != made.x.dtype:
            return f"the {name} is {ours.dtype}, expected {made.x.dtype}"
        if not right.loss.isnan().any():  # a product of autograd's own 0 and inf, at a masked label
            ours = torch.where(true.isnan(), 0, ours)
            theirs, true = torch.where(true.isnan(), 0, theirs), true.nan_to_num(0.0, torch.inf, -torch.inf)
        wrong = wrong or _differs(name, ours, theirs.to(made.x.dtype), true, made.x.dtype, reach)
    return wrong


def _differs(what: str, found: Tensor, plain: Tensor, right: Tensor, dtype: torch.dtype, reach: float) -> str | None:
    if found.shape != right.shape:
        return f"the {what} has shape {tuple(found.shape)}, expected {tuple(right.shape)}"
    found, plain = found.double(), plain.double()
    special = ~right.isfinite()
    if bool((special & ~((found == right) | (found.isnan() & right.isnan()))).any()):
        return f"the {what} is {_shown(found)}, expected {_shown(right)}"
    size = torch.where(special, 0, right).abs()
    plain_error = torch.where(special, 0, plain - right).abs().nan_to_num(torch.inf)
    statistics = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    most = size.max() if size.numel() else 0
    allowed = 2 * (plain_error.max() if plain_error.numel() else 0) + torch.finfo(dtype).eps * size
    allowed = allowed + ULPS * statistics.eps * reach * (most if "gradient" in what else most + 1) + torch.finfo(dtype).tiny
    if "gradient" in what and most == 0:  # where it is 0 by cancellation, the terms are the upstream gradient's size
        allowed = allowed + 4 * statistics.eps
    if dtype == torch.float64:  # the truth is no finer than what it judges
        allowed = allowed + ULPS * statistics.eps * max(1.0, float(most))
    error = torch.where(special, 0, found - right).abs()
    if bool((~(error <= allowed)).any()):
        return f"the {what} is {_shown(found)}, expected {_shown(right)}: off by {float(error.nan_to_num(torch.inf).max()):.3g}"
    return None


def _shown(t: Tensor) -> str:
    values = [f"{v:.6g}" for v in t.flatten()[:12].tolist()]
    return f"[{', '.join(values)}{', ...' if t.numel() > 12 else ''}]" if t.dim() else values[0]
