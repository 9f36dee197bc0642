"""Confidence of a prediction, from its logits: all scores at once, higher = more confident.

msp = max p      mls = max x      energy = T lse(x / T)      neg_entropy = sum p ln p
gen = -sum over the m largest p of p^gamma (1 - p)^gamma
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import check, cpu
from .check import Problem
from .choice import choose
from .plain import TYPES
from .spec import LossSpec, register


class ConfidenceScores(NamedTuple):
    """Scores shaped like the labels, higher = more confident; None in the place of those that were not asked for."""

    msp: Tensor  #: largest probability
    mls: Tensor  #: largest logit
    energy: Tensor  #: temperature times log-sum-exp (the negative of what physics calls energy)
    gen: Tensor  #: negative generalized entropy
    neg_entropy: Tensor  #: negative Shannon entropy in nats
    prediction: Tensor  #: int64 index of the largest logit


NAMES = ConfidenceScores._fields


def reference(
    x: Tensor, *, temperature: float, gen_gamma: float, gen_m: int, scores: Sequence[str] = NAMES
) -> ConfidenceScores:
    """Those scores of (R, C)."""
    found: dict[str, Any] = dict.fromkeys(NAMES)
    top = x.argmax(dim=1, keepdim=True)  # the first of equals
    x_top = x.gather(1, top)
    if "mls" in scores:
        found["mls"] = x_top[:, 0]
    if "prediction" in scores:
        found["prediction"] = top[:, 0]
    if "energy" in scores:
        found["energy"] = temperature * torch.logsumexp(x / temperature, dim=1)
    if not {"msp", "gen", "neg_entropy"}.isdisjoint(scores):
        # ln p and ln(1 - p) of the top class from its log odds: where p rounds to 1, neither rounds to a wrong number.
        # Elsewhere p is at most 1/2 and the plain forms are exact.
        odds = torch.where(x_top == torch.inf, torch.nan, _lse(x.scatter(1, top, -torch.inf)) - x_top)
        logp_top, log_rest_top = torch.nn.functional.logsigmoid(-odds), torch.nn.functional.logsigmoid(odds)
    if "msp" in scores:
        found["msp"] = logp_top.exp()[:, 0]
    if not {"gen", "neg_entropy"}.isdisjoint(scores):
        logp = torch.log_softmax(x, dim=1).scatter(1, top, logp_top)
    if "neg_entropy" in scores:
        found["neg_entropy"] = (logp.exp() * torch.where(logp == -torch.inf, 0, logp)).sum(dim=1)
    if "gen" in scores:
        log_rest = torch.log1p(-logp.scatter(1, top, -torch.inf).exp()).scatter(1, top, log_rest_top)
        # A log-space power: gamma magnifies what exp would flush to zero.
        terms = torch.exp(gen_gamma * (logp + log_rest))
        if gen_m < x.shape[1]:
            terms = terms.gather(1, logp.topk(gen_m, dim=1).indices)
        found["gen"] = 0 - terms.sum(dim=1)
    return ConfidenceScores(**found)


def _lse(x: Tensor) -> Tensor:
    """(R, 1) log-sum-exp of (R, C), -inf with gradient 0 where every entry is -inf."""
    nothing = (x == -torch.inf).all(dim=1, keepdim=True)
    return torch.where(nothing, -torch.inf, torch.logsumexp(torch.where(nothing, 0, x), dim=1, keepdim=True))


def confidence_scores(
    input: Tensor,  # (C), (N, C) or (N, C, *)
    *,
    temperature: float = 1.0,
    gen_gamma: float = 0.1,
    gen_m: int = 100,
    scores: Iterable[str] | None = None,
    backend: str | None = None,
) -> ConfidenceScores:
    r"""Every confidence score of a row of logits, for out-of-distribution detection and rejection: higher = more confident.

    .. math::
        \mathrm{msp} = \max_j p_j, \quad \mathrm{mls} = \max_j x_j, \quad
        \mathrm{energy} = T\,\mathrm{lse}(x / T), \quad
        \mathrm{gen} = -\sum_{j \in \mathrm{top}\,m} p_j^\gamma (1 - p_j)^\gamma, \quad
        \mathrm{neg\_entropy} = \sum_j p_j \ln p_j

    Args:
        input: logits.
        temperature: :math:`T` of the energy, above 0; the other scores have none.
        gen_gamma: exponent of the generalized entropy, above 0.
        gen_m: how many of the largest probabilities it takes, at least 1; all when it exceeds C.
        scores: names of the fields wanted, such as ``("msp", "energy")``; the others are not computed, and None. None: all.
        backend: "cpu", "reference" or None; others raise with the reason. Where a gradient is wanted, or the call is traced,
            None is "reference".

    Returns:
        `ConfidenceScores` with `msp`, `mls`, `energy`, `gen`, `neg_entropy` and `prediction`, each shaped like labels of
        `input`: (), (N) or (N, \*). Scores are float32, or float64 for float64 input; `prediction` is int64.

    **Convention**

    - all scores are confidences: entropies are negated, and `energy` is :math:`+T\,\mathrm{lse}`, **minus** the energy of the
      literature, which is low for familiar inputs.
    - gen keeps its precision on confident rows, where powers of rounded probabilities are far off: (20, 0, 0, 0, 0) gives
      -0.697 also in float32.
    - of equal logits, the lowest index is the prediction. One class: msp 1, gen and entropy 0.
    - ``-inf`` logits are masked classes. A row with NaN has NaN scores; one with ``+inf``, or with ``-inf`` alone, has NaN
      where probabilities enter.

    Paper: "A Margin-Based Replacement for Cross-Entropy Loss", appendices A and E.3; gen from Liu et al., "GEN: Pushing the
    Limits of Softmax-Based Out-of-Distribution Detection".

    >>> scores = confidence_scores(torch.tensor([[20.0, 0.0, 0.0, 0.0, 0.0]]))
    >>> scores.gen, scores.prediction
    (tensor([-0.6968]), tensor([0]))
    >>> confidence_scores(torch.tensor([[2.0, 2.0]]), scores=("msp",))
    ConfidenceScores(msp=tensor([0.5000]), mls=None, energy=None, gen=None, neg_entropy=None, prediction=None)
    """
    problem = check.unlabelled(input, None, None, "none", None)
    temperature = check.number("temperature", temperature, above=0.0)
    gen_gamma = check.number("gen_gamma", gen_gamma, above=0.0)
    gen_m = check.integer("gen_m", gen_m, least=1)
    wanted = _names(scores)
    input = problem.x
    if choose(SPEC, problem, backend, _obstacle(problem)) == "cpu":
        return ConfidenceScores(*cpu.scores(input, temperature, gen_gamma, gen_m, tuple(name in wanted for name in NAMES)))
    x = (input.movedim(1, -1) if input.dim() > 2 else input).reshape(-1, problem.classes).to(problem.dtype)
    found = reference(x, temperature=temperature, gen_gamma=gen_gamma, gen_m=gen_m, scores=wanted)
    return ConfidenceScores(*(None if score is None else score.reshape(problem.shape) for score in found))


def _names(scores: Iterable[str] | None) -> tuple[str, ...]:
    """The fields asked for, by name."""
    if scores is None:
        return NAMES
    if not isinstance(scores, Iterable):
        raise TypeError(f"scores must be names out of {', '.join(map(repr, NAMES))}, got {type(scores).__name__}")
    names = (scores,) if isinstance(scores, str) else tuple(scores)
    if not names:
        raise ValueError(f"scores must name at least one of {', '.join(map(repr, NAMES))}, got none")
    return tuple(check.choice("scores", name, NAMES) for name in names)


def _obstacle(problem: Problem) -> str | None:
    """Why the scores of this input are none for a fused kernel, or None."""
    input = problem.x
    if not (problem.eager and type(input) in TYPES):
        return "the scores of a traced tensor, or of a tensor subclass, are computed by the reference backend"
    if input.requires_grad and torch.is_grad_enabled():
        return "input requires a gradient, which only the reference backend computes for scores"
    return None


SPEC = register(
    LossSpec(
        name="confidence_scores",
        function="confidence_scores",
        module=None,
        family="score",
        inputs="own",
        reference=reference,
        samples=({}, {"gen_m": 3}, {"temperature": 2.0, "gen_gamma": 0.5}),
        paper="A Margin-Based Replacement for Cross-Entropy Loss, app. A, E.3; Liu et al. 2023, GEN",
    )
)
