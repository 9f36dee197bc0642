"""Golden cases: values from closed forms in float64, and how each is asked of the public functions.

A golden case names the atlas's loss, parameters and inputs; `calls` translates it into one or more calls of the API.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FILE = Path(__file__).parents[1] / "golden" / "golden_public.json"

#: losses of the atlas's second tier that the API does not offer
NOT_IN_API = {
    "ldr_kl": "atlas section 13, no such function in the API",
    "aldr_kl": "atlas section 13, no such function in the API",
    "ldr_k": "atlas section 13, no such function in the API",
    "sce_soft": "atlas section 14 (teacher probabilities); hard labels are target_loss(kind='sce')",
    "tsallis": "atlas section 15, no such function in the API",
    "pld": "atlas section 16, no such function in the API",
    "dice_nlp": "atlas section 18, no such function in the API",
    "harmonic": "atlas section 19, no such function in the API",
    "tcm": "atlas section 20, no such function in the API",
    "mw": "atlas section 21, no such function in the API",
    "opl": "atlas section 23, no such function in the API",
    "emo": "atlas section 24, no such function in the API",
    "unpg": "atlas section 25, no such function in the API",
    "binary_kl_norm": "atlas section 26, no such function in the API",
}


class GoldenCase(NamedTuple):
    id: str
    loss: str
    tier: int
    params: dict[str, Any]
    inputs: dict[str, Tensor]
    expected: dict[str, Any]


class GoldenCall(NamedTuple):
    """One call that must give the golden values."""

    function: str
    inputs: dict[str, Tensor]  #: positional arguments in order, named as the API names them
    arguments: dict[str, Any]
    grads: dict[str, str]  #: positional or keyword argument -> name of its golden gradient
    spatial: bool = False  #: (N, C) logits with labels or alone: may be arranged as (N, C, H, W)


def load() -> list[GoldenCase]:
    cases = json.loads(FILE.read_text())["cases"]
    return [
        GoldenCase(c["id"], c["loss"], c["tier"], *(_decoded(c[k]) for k in ("params", "inputs", "expected"))) for c in cases
    ]


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and {"data", "shape", "dtype"} <= set(value):
        data = [float(v) if isinstance(v, str) else v for v in value["data"]]
        return torch.tensor(data, dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
    if isinstance(value, dict):
        return {k: _decoded(v) for k, v in value.items()}
    return float(value) if value in ("inf", "-inf", "nan") else value


def calls(case: GoldenCase) -> list[GoldenCall]:
    """The calls whose loss, row losses and gradients the case gives; values and scores have tests of their own."""
    p, t = dict(case.params), case.inputs
    rows = {"input": t["logits"]} if "logits" in t else {}
    labelled = {**rows, "target": t["labels"]} if "labels" in t else rows
    logits = {"input": "logits"}
    kind = case.loss
    if kind == "ce":
        inputs = {**rows, "target": t["target"]} if "target" in t else labelled
        return [GoldenCall("cross_entropy", inputs, p | _only(t, "weight", "bias"), logits, "target" not in t)]
    if kind == "logit_adjusted":
        return [GoldenCall("logit_adjusted_loss", labelled, p | {"class_counts": t["counts"]}, logits, True)]
    if kind == "logit_norm":
        return [GoldenCall("logit_norm_loss", labelled, _renamed(p, tau="temperature"), logits, True)]
    if kind == "target_family":
        return _target_family(p, labelled, logits, _only(t, "alpha"))
    if kind == "dice":
        return [GoldenCall("dice_loss", labelled, p, logits, True)]
    if kind == "margin_loss":
        return _margin(p, labelled, logits, _only(t, "margin"))
    if kind == "adr":
        return [GoldenCall("adr_loss", rows, _renamed(p, tau="top"), logits, True)]
    if kind == "ce_adr":
        return [GoldenCall("cross_entropy_adr", labelled, _renamed(p, tau="top"), logits, True)]
    if kind == "entropy":
        return [GoldenCall("entropy_loss", rows, _renamed(p, margin="max_entropy"), logits, True)]
    if kind == "sparse_cl":
        return [GoldenCall("sparse_cl_loss", rows, p, logits, True)]
    if kind == "k_nl":
        return [GoldenCall("knl_loss", rows, _renamed(p, s="skip"), logits, True)]
    if kind == "tta_final":
        return [GoldenCall("tta_loss", rows, _renamed(p, s="skip", margin="max_entropy"), logits, True)]
    if kind in ("fcl", "fcl_margin"):
        names = ("anchor", "positive", "negative")
        arguments = _renamed(p, tau="temperature") | ({"negative_valid": t["neg_valid"]} if "neg_valid" in t else {})
        function = "feature_contrastive_loss" if kind == "fcl" else "contrastive_margin_loss"
        return [GoldenCall(function, _only(t, *names), arguments, {n: n for n in names})]
    if kind == "info_nce":  # the gradient of the scale has no counterpart: the API's temperature is a number
        p["temperature"] = 1 / p.pop("scale")
        return [GoldenCall("info_nce_loss", _only(t, "a", "b"), p, {"a": "a", "b": "b"})]
    if kind in ("linear_ce", "linear_hem"):
        inputs = {"input": t["hidden"], "linear_weight": t["weight_matrix"], "target": t["labels"]}
        grads = {"input": "hidden", "linear_weight": "weight"}
        if "bias_vec" in t:
            p["linear_bias"] = t["bias_vec"]
            grads["linear_bias"] = "bias"
        if kind == "linear_hem":
            p = {"delta": 0.0, **p, **_only(t, "margin")}
        return [GoldenCall("linear_cross_entropy" if kind == "linear_ce" else "linear_hem_loss", inputs, p, grads)]
    return []


def _target_family(p: dict, labelled: dict, logits: dict, alpha: dict) -> list[GoldenCall]:
    arguments = _renamed(p, N="n", A="floor") | alpha
    found = [GoldenCall("target_loss", labelled, arguments, logits, True)]
    own = {k: v for k, v in arguments.items() if k != "kind"}
    if p["kind"] == "focal":
        found.append(GoldenCall("focal_loss", labelled, own, logits, True))
    if p["kind"] == "ce":
        found.append(GoldenCall("cross_entropy", labelled, own, logits, True))
        found.append(GoldenCall("focal_loss", labelled, own | {"gamma": 0.0}, logits, True))
    return found


def _margin(p: dict, labelled: dict, logits: dict, margin: dict) -> list[GoldenCall]:
    """Variants are flags of hem_loss; without `delta` the golden power is exact; mm and thres are averaged over all rows."""
    variant = p.pop("variant")
    p["reduction"] = {"maz": "above_zero"}.get(p.get("reduction"), p.get("reduction"))
    if p["reduction"] is None:
        p["reduction"] = "above_zero" if variant in ("hem", "maz") else "mean"
    p = {"delta": 0.0, **p, **margin}
    flags = {"threshold": variant in ("hem", "thres"), "above_zero": variant in ("hem", "maz")}
    found = [GoldenCall("hem_loss", labelled, p | flags, logits, True)]
    if variant == "mm":
        found.append(GoldenCall("multi_margin_loss", labelled, p, logits, True))
    return found


def _only(values: dict, *names: str) -> dict:
    return {k: values[k] for k in names if k in values}


def _renamed(values: dict, **names: str) -> dict:
    return {names.get(k, k): v for k, v in values.items()}
