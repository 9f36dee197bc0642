"""Writes the files of a new loss, with the simplest formula of its family, and registers it:

    python tools/new_loss.py NAME --family softmax|margin|entropy|select|region

The loss builds, runs on every backend and is tested by the grids of the registry at once. Then its formula is changed in
three places: the plain reference, the C++ header, which CUDA shares, and the Triton file. docs/add_a_loss.md walks through it.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Family(NamedTuple):
    """What the files of a loss of this family say; $name, $function, $module and $own are filled in."""

    labels: bool
    own: str  #: the one argument of the formula, a number
    least: str  #: how it is checked
    meaning: str
    maths: str  #: of a row or class, in plain text
    convention: str  #: what the family leaves to the loss to say
    imports: str  #: of the plain reference
    reference: str
    header: str  #: body of the C++ struct
    triton: str  #: without its docstring
    example: str
    samples: str = '({}, {"$own": 0.5})'
    result: str = "RowLoss"


LABEL_CONVENTION = """\
- `mean` divides by the sum of `weight[target] * sample_weight` over counted rows.
- ignored rows are never read, give 0 and gradient 0; nothing counted gives 0.
"""
MASK_CONVENTION = """\
- `mean` divides by the sum of `sample_weight` over the rows in `mask`; the others give 0 and gradient 0.
- nothing counted gives 0; NaN shows.
"""

SOFTMAX = Family(
    labels=True,
    own="scale",
    least="above=0.0",
    meaning="factor of the loss, above 0.",
    maths="L = -w_y scale log p_y",
    convention=LABEL_CONVENTION + "- ``-inf`` logits are masked classes; a masked target gives ``+inf``.\n",
    imports="from ..reduce import RowLoss, weighted",
    reference="""\
value = -scale * rows.label(torch.log_softmax(rows.x, dim=1))
w = rows.label_weight()
return RowLoss(value if w is None else weighted(w, value), w)
""",
    header="""\
  // a are the log odds against the label: f(a) = -scale log p, f'(a) = scale (1 - p).
  template <class T, class V>
  static PYL_INLINE SoftmaxResult<V> row(const Own<T>& own, const Batch<T>&, const SoftmaxRow<V>& r) {
    return through_a(r, own.scale * r.nll(), own.scale * r.miss());
  }
""",
    triton='''\
import triton
import triton.language as tl

from ..formula import Arguments, Formula
from ..softmax_row import features, through_a


@triton.jit
def row(k, r, OPTIONS: tl.constexpr):
    """k = (scale,)."""
    return through_a(r, k[0] * r.nll, k[0] * r.miss)


FORMULA = Formula("softmax", row, 2, lambda scale: Arguments((scale,), (), features()))
''',
    example="0.2395",
)

MARGIN = Family(
    labels=True,
    own="margin",
    least="least=0.0",
    meaning="how far the label's logit must be above the others, at least 0.",
    maths="L = w_y / C sum_{j != y} max(0, x_j - x_y + margin)",
    convention=LABEL_CONVENTION + "- ``-inf`` logits are masked classes, never an error; a row of ``-inf`` is NaN.\n",
    imports="from ..reduce import RowLoss, weighted",
    reference="""\
x = rows.x
assert rows.y is not None
x_label = rows.label(x)[:, None]
raw = torch.where(x == -torch.inf, -torch.inf, x - x_label + margin)  # a masked class is never an error
raw = raw.scatter(1, rows.y[:, None], -torch.inf)  # nor is the label
value = torch.relu(raw).sum(dim=1) / x.shape[1]
w = rows.label_weight()
if w is not None:
    value = weighted(w, value)
# A row with a NaN, or with every class masked, has no margin to speak of.
bad = raw.isnan().any(dim=1) | x_label[:, 0].isnan() | (x == -torch.inf).all(dim=1)
return RowLoss(value + torch.where(bad[:, None], x, 0).sum(dim=1) * torch.where(bad, torch.nan, 0.0), w)
""",
    header="""\
  template <class T>
  static MarginView<T> view(const Own<T>& own) {
    bool of_label = false, threshold = false;
    return {own.margin, of_label, threshold, Errors<T>::flat};
  }

  template <class T>
  struct Errors {
    static constexpr bool flat = true;  // is every slope 1?
    explicit Errors(const Own<T>&) {}
    template <class V>
    PYL_INLINE V value(V raw) const {
      return where(raw > 0, raw, splat<V>(0));
    }
    template <class V>
    PYL_INLINE V slope(V) const {  // raw > 0
      return splat<V>(1);
    }
  };
  template <class T, class F>
  static PYL_INLINE void with_errors(const Own<T>& own, F f) {
    f(Errors<T>(own));
  }

  template <class T, class V>
  static PYL_INLINE MarginResult<V> row(const Own<T>&, const Batch<T>& k, const MarginRow<V>& r) {
    return {weighted(r.w, r.kept_sum) / k.classes, r.w / k.classes};
  }
""",
    triton="""\
import triton
import triton.language as tl

from ..formula import Arguments, Formula
from ..margin import LINEAR, MarginResult
from ..maths import weighted


@triton.jit
def row(r, OPTIONS: tl.constexpr):
    classes = r.kept_count * 0.0 + r.classes
    return MarginResult(weighted(r.w, r.kept_sum) / classes, r.w / classes)


def arguments(margin: float) -> Arguments:
    features = {"POWER": LINEAR.value, "OF_LABEL": False, "THRESHOLD": False}
    return Arguments((margin, 1.0, 0.0, 0.0), (), features)  # power, delta and slope below delta are of other powers


FORMULA = Formula("margin", row, 3, arguments)
""",
    example="0.0000",
)

ENTROPY = Family(
    labels=False,
    own="scale",
    least="above=0.0",
    meaning="factor of the loss, above 0.",
    maths="L = -scale sum_j p_j log p_j",
    convention=MASK_CONVENTION + "- ``-inf`` logits are masked classes: 0 log 0 is 0; a row of ``-inf`` is a NaN row.\n",
    imports="from ..reduce import RowLoss",
    reference="""\
x = rows.x - rows.x.detach().amax(dim=1, keepdim=True)  # both terms are then positive: nothing cancels
finite = torch.where(x == -torch.inf, 0, x)
return RowLoss(scale * (torch.logsumexp(x, dim=1) - (torch.softmax(x, dim=1) * finite).sum(dim=1)))
""",
    header="""\
  template <class T>
  static EntropyView view(const Own<T>&) {
    bool filters = false;
    return {filters};
  }
  template <class T, class V>
  static PYL_INLINE EntropyResult<V> row(const Own<T>& own, const Batch<T>&, const EntropyRow<V>& r) {
    return {own.scale * r.entropy, splat<V>(1), splat<V>(own.scale)};
  }
""",
    triton='''\
import triton
import triton.language as tl

from ..entropy import EntropyResult
from ..formula import Arguments, Formula


@triton.jit
def row(k, entropy, OPTIONS: tl.constexpr):
    """k = (scale,)."""
    one = tl.full(entropy.shape, 1.0, entropy.dtype)
    return EntropyResult(k[0] * entropy, one, k[0] * one)


FORMULA = Formula("entropy", row, 4, lambda scale: Arguments((scale,)))
''',
    example="0.6656",
)

SELECT = Family(
    labels=False,
    own="scale",
    least="above=0.0",
    meaning="factor of the loss, above 0.",
    maths="L = scale p_j of the second largest class j",
    convention=MASK_CONVENTION
    + "- the lowest class is the larger of equal ones; one class, or one that is not ``-inf``, gives 0.\n",
    imports="from ..reduce import RowLoss\nfrom .sparse_cl import ranking",
    reference="""\
p = torch.softmax(rows.x, dim=1)
return RowLoss(scale * p.gather(1, ranking(rows.x)[:, 1:2]).sum(dim=1) + 0 * p.sum(dim=1))  # NaN shows
""",
    header="""\
  template <class T>
  static Selection selection(const Own<T>&, T) {
    Selection s;
    s.first = s.last = 1;  // the rank behind the largest alone; its share is its probability
    return s;
  }
  template <class T, class V>
  static PYL_INLINE SelectedClass<V> selected(const Own<T>&, V p, V) {
    return {p, p};
  }
  template <class T, class V>
  static PYL_INLINE SelectResult<V> row(const Own<T>& own, const Batch<T>&, const SelectRow<V>& r) {
    V zero = splat<V>(0), scale = splat<V>(own.scale);
    return {scale * r.total + 0 * r.p_top, splat<V>(1), zero, scale, -scale * r.own, zero};  // NaN shows
  }
""",
    triton='''\
import triton
import triton.language as tl

from ..formula import Arguments, Formula
from ..select import SelectResult


@triton.jit
def row(k, r, OPTIONS: tl.constexpr):
    """k = (scale,)."""
    p = tl.sum(tl.where((r.rank == 1) & (r.value > -float("inf")), r.p, 0.0), 1)
    return SelectResult(k[0] * p, tl.full(p.shape, 1.0, p.dtype), p)


@triton.jit
def entry(k, p, own, rest, inside, first, OPTIONS: tl.constexpr):
    """own is p of the rank inside."""
    return k[0] * (tl.where(inside, p, 0.0) - p * own)


def arguments(scale: float) -> Arguments:
    return Arguments((scale, 0.0), (), {"BEFORE": 0, "COUNT": 2, "KEEP": 2, "READ": True})


FORMULA = Formula("select", row, 6, arguments, entry)
''',
    example="0.1065",
)

REGION = Family(
    labels=True,
    own="smooth",
    least="above=0.0",
    meaning="s, above 0.",
    maths="L_c = 1 - (I_c + s) / (U_c + s),  I_c = sum_n t_nc p_nc,  U_c = sum_n (t_nc + p_nc - t_nc p_nc),  s = smooth",
    convention="""\
- `mean` is sum_c w_c L_c / sum_c w_c, `sum` adds w_c L_c, `none` gives the (C) class losses before `weight`.
- sums run over the batch and are float64; `sample_weight` weighs positions in them. `normalizer` must be None.
- ignored positions are never read and have gradient 0; nothing counted gives 0.
""",
    imports="from .dice import class_sums",
    reference="""\
intersection, target, predicted = (v[0] for v in class_sums(rows, sample_weight, "batch"))
losses = 1 - (intersection + smooth) / (target + predicted - intersection + smooth)
some = (target > 0).any()
losses = torch.where(some, losses, 0)
if reduction == "none":
    return losses.to(rows.x.dtype)
w = torch.ones_like(losses) if rows.weight is None else rows.weight.double()
total = torch.where(w == 0, 0, w * losses).sum()
if reduction == "mean":
    total = total / torch.where(w.sum() == 0, 1, w.sum())
return total.to(rows.x.dtype)
""",
    header="""\
  template <class T>
  static RegionView view(const Own<T>& own) {
    bool by_image = false;
    return {own.smooth, by_image, Absent::literal};
  }
  template <class T>
  static PYL_INLINE RegionResult of_class(const Own<T>& own, const RegionClass& c) {
    double both = c.hit + own.smooth, size = both + c.missed + c.stray, push = both / (size * size);
    return {(c.missed + c.stray) / size, push, push + 1 / size};
  }
""",
    triton="""\
import triton
import triton.language as tl

from ..formula import Arguments, Formula
from ..region_sums import ClassResult
from .dice import region_features


@triton.jit
def classes(s, hit, missed, stray, largest, OPTIONS: tl.constexpr):
    both = hit + s
    size = both + missed + stray
    push = both / size / size
    present = (hit + missed <= 0) == 0  # also when a position is NaN
    return ClassResult((missed + stray) / size, push + 1.0 / size, push, present)


def arguments(smooth: float) -> Arguments:
    return Arguments((0.0, 1.0, 0.0, 0.0, 1.0, 0.0, smooth), (), region_features(0.0, 0.0))


FORMULA = Formula("region", None, 2, arguments, classes)
""",
    example="0.0885",
    result="Tensor",
)

FAMILIES = {"softmax": SOFTMAX, "margin": MARGIN, "entropy": ENTROPY, "select": SELECT, "region": REGION}

HEADER = """\
// $maths.
#pragma once

namespace PYL_ISA {

struct $name : $FamilyFormula {
  PYL_OWN($own)

$header}  // namespace PYL_ISA
"""

MODULE = '''\
"""$Title.

$maths
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import check
from ..call import Rows, $call
from ..check import Problem
from ..module import LossModule, arguments_of
$imports
from ..spec import LossSpec, Pack, $per_class


def reference(rows: Rows, *, $own: float$more_reference) -> $result:
$reference

def pack(problem: Problem, *, $own: float$more_pack) -> Pack:
    return Pack(($own,))


def $function(
$signature) -> Tensor:
    """$Title.

    $maths

    Args:
        input: logits.
$args
    **Convention**

$convention
    Source: a made-up example, to be replaced.

    >>> $given
    >>> $function($positional)
    tensor($example)
    """
$body

class $module(LossModule):
    """$Title.

    Module form of `$function`, which documents the arguments.
    """

    @arguments_of($function$after)
    def __init__(self) -> None: ...


SPEC = register(
    LossSpec(
        name="$name",
        function="$function",
        module="$module",
        family="$family",
        inputs="$call",
        reference=reference,
        kernel="$name",
        pack=pack,
        samples=$samples,
        paper="a made-up example, to be replaced",$missing
    )
)
'''

LABELLED = {
    "signature": """\
    input: Tensor,  # (C), (N, C) or (N, C, *)
    target: Tensor,  # (), (N) or (N, *)
    *,
    $own: float = 1.0,
    weight: Tensor | None = None,  # (C)
    sample_weight: Tensor | None = None,  # shaped like target
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    check_labels: bool = False,
    backend: str | None = None,
""",
    "args": """\
        target: class indices (uint8, int16, int32 or int64).
        $own: $meaning
        weight, sample_weight, ignore_index, reduction, normalizer, check_labels, backend: as in `cross_entropy`.
""",
    "body": """\
    own$own_type = {"$own": check.number("$own", $own, $least)}
$more_own    return labelled(
        SPEC, input, target, own, weight=weight, sample_weight=sample_weight, ignore_index=ignore_index,
        reduction=reduction, normalizer=normalizer, check_labels=check_labels, backend=backend,
    )  # fmt: skip
""",
    "given": "x = torch.tensor([[2.0, 0.0, 0.0]])",
    "positional": "x, torch.tensor([0])",
    "per_class": "PerClass, register",
    "call": "labelled",
    "after": "",
}
UNLABELLED = {
    "signature": """\
    input: Tensor,  # (C), (N, C) or (N, C, *)
    *,
    $own: float = 1.0,
    mask: Tensor | None = None,  # bool, input's shape without the class dimension
    sample_weight: Tensor | None = None,  # shaped like mask
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    backend: str | None = None,
""",
    "args": """\
        $own: $meaning
        mask: rows that count; the others are never read.
        sample_weight: factor of each row; enters the mean's divisor.
        reduction, normalizer, backend: as in `cross_entropy`.
""",
    "body": """\
    own = {"$own": check.number("$own", $own, $least)}
    return unlabelled(
        SPEC, input, own, mask=mask, sample_weight=sample_weight, reduction=reduction, normalizer=normalizer, backend=backend
    )
""",
    "given": "x = torch.tensor([[2.0, 0.0, 0.0]])",
    "positional": "x",
    "per_class": "register",
    "call": "unlabelled",
    "after": ", after=1",
}

REGION_BODY = """\
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be one of 'none', 'sum', 'mean': the losses are of classes; got {reduction!r}")
    if normalizer is not None:
        raise ValueError(f"normalizer must be None: the loss is a ratio of sums with no number of rows; got {normalizer!r}")
"""


def filled(text: str, values: dict[str, str]) -> str:
    """`text` with every $key replaced, also inside of what was filled in."""
    while (more := re.sub(r"\$(\w+)", lambda key: values.get(key[1], key[0]), text)) != text:
        text = more
    return text


def files(name: str, family: str) -> dict[str, str]:
    """path -> text of the files that the loss adds."""
    own = FAMILIES[family]
    camel = "".join(part.capitalize() for part in name.split("_"))
    values = {field: getattr(own, field) for field in own._fields if field != "labels"}
    values |= (LABELLED if own.labels else UNLABELLED) | {
        "name": name,
        "family": family,
        "function": f"{name}_loss",
        "module": f"{camel}Loss",
        "Title": f"The {name} loss, of the {family} family",
        "FamilyFormula": f"{family.capitalize()}Formula",
        "header": own.header + "};\n\n",
        "reference": textwrap.indent(own.reference, "    "),
        "convention": textwrap.indent(own.convention, "    "),
        "own_type": "",
        "more_own": "",
        "more_reference": "",
        "more_pack": "",
        "missing": "",
    }
    if own.labels:
        values["samples"] = '({}, {"$own": 0.5, "weight": PerClass(0.5, 2.0)})'
    if family == "region":
        values["body"] = REGION_BODY + str(values["body"])
        values["imports"] = own.imports
        values["own_type"] = ": dict[str, Any]"
        values["more_own"] = '    own |= {"sample_weight": sample_weight, "reduction": reduction}\n'
        values["more_reference"] = ", sample_weight: Tensor | None, reduction: str"
        values["more_pack"] = ", **_: object"
    else:
        values["missing"] = '\n        missing={"parallel": "its statistics of split classes are not written yet"},'
    module = filled(MODULE, values)
    if family == "region":
        module = module.replace("annotations\n\nimport", "annotations\n\nfrom typing import Any\n\nimport")
        spec = "from ..spec import LossSpec, Pack, PerClass, register\n"
        module = module.replace(own.imports + "\n", "").replace(spec, spec + own.imports + "\n")
    elif "\n" in own.imports:  # a file beside comes after the folder above
        _, beside = own.imports.split("\n")
        spec = re.search(r"from \.\.spec.*\n", module)[0]  # type: ignore[index]
        module = module.replace(beside + "\n", "").replace(spec, spec + beside + "\n")
    return {
        f"csrc/losses/{name}.h": filled(HEADER, values),
        f"kernels/losses/{name}.py": f'"""{own.maths}."""\n\n{own.triton}',
        f"pylosses/losses/{name}.py": module,
    }


def registered(name: str, family: str) -> dict[str, str]:
    """path -> text of the files that list the loss: its number and include in C++, its import in Python."""
    listed, included, exported = ROOT / "csrc/losses/list.h", ROOT / "csrc/losses/all.h", ROOT / "pylosses/losses/__init__.py"
    line = f"#define PYL_{family.upper()}_LOSSES(X)"
    lists = re.sub(rf"^({re.escape(line)}.*)$", rf"\1 X({name})", listed.read_text(), count=1, flags=re.M)
    plus = '#include "losses/plus.h"\n'
    includes = included.read_text().replace(plus, f'#include "losses/{name}.h"\n{plus}')
    camel = "".join(part.capitalize() for part in name.split("_"))
    return {
        "csrc/losses/list.h": lists,
        "csrc/losses/all.h": includes,
        "pylosses/losses/__init__.py": with_names(exported.read_text(), name, [f"{camel}Loss", f"{name}_loss"]),
    }


def with_names(text: str, module: str, names: list[str]) -> str:
    """`pylosses/losses/__init__.py` with `names` of `module`, in its order."""
    head, imports, exports = re.match(r"(.*?\n)((?:from .*\n)+)\n__all__ = \[(.*)\]", text, re.S).groups()  # type: ignore[union-attr]
    lines = imports.splitlines() + [f"from .{module} import {', '.join(names)}"] * bool(names)
    everything = sorted([*re.findall(r'"(\w+)"', exports), *names], key=str.lower)
    listed = textwrap.fill(", ".join(f'"{one}"' for one in everything) + ",", 120, break_on_hyphens=False)
    lines.sort(key=lambda line: line.split()[1])
    return f"{head}{chr(10).join(lines)}\n\n__all__ = [\n{textwrap.indent(listed, '    ')}\n]  # fmt: skip\n"


def refusal(name: str) -> str | None:
    """Why there can be no new loss of this name, or None."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or name.endswith("_loss"):
        return f"NAME must be lower case words joined by underscores, without _loss at its end, got {name!r}"
    taken = [path for path in files(name, "softmax") if (ROOT / path).exists()]
    if taken or f"X({name})" in (ROOT / "csrc/losses/list.h").read_text():
        return f"NAME must be new, got {name!r}, which {', '.join(taken) or 'csrc/losses/list.h'} has"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="lower case words joined by underscores; the function is NAME_loss")
    parser.add_argument("--family", required=True, choices=FAMILIES)
    given = parser.parse_args()
    why = refusal(given.name)
    if why is not None:
        print(f"new_loss: {why}", file=sys.stderr)
        return 1
    written = files(given.name, given.family) | registered(given.name, given.family)
    for path, text in written.items():
        (ROOT / path).write_text(text)
        print(f"-- {path}")
    print("Next: put your formula in, `sh tools/setup.sh`, `python tools/readme.py`, "
          f".venv/bin/pytest -k {given.name}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
