"""Metrics of confidence: how well it separates, rejects and is calibrated.

auroc = P(in > out) + P(in = out) / 2
dar   = share of adversarial samples on which accepting (conf >= t) or rejecting was right, t from the clean samples
ece   = sum_b (n_b / n) |accuracy_b - confidence_b|          over bins (lo, hi] of the confidence
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import check
from .check import ACCUMULATE
from .spec import LossSpec, register


def auroc(
    score_in: Tensor,  # any shape
    score_out: Tensor,  # any shape
) -> Tensor:
    r"""Area under the ROC curve: how likely a score of the first set exceeds one of the second.

    .. math:: P(s_{in} > s_{out}) + \tfrac12 P(s_{in} = s_{out})

    Args:
        score_in: scores of the set that should score higher (in-distribution).
        score_out: scores of the other set.

    **Convention**: ties count half; by sorting, in O(n log n). Infinite scores are ordered as numbers are; a NaN score makes
    the result NaN. An empty set raises ValueError. The result is 0-d, float32, or float64 if an input is.

    Paper: "A Margin-Based Replacement for Cross-Entropy Loss", section 4.

    >>> auroc(torch.tensor([0.9, 0.8, 0.3]), torch.tensor([0.3, 0.1]))
    tensor(0.9167)
    """
    score_in, score_out = _scores(score_in=score_in), _scores(score_out=score_out)
    _same_device("score_out", score_out, "score_in", score_in)
    dtype = torch.promote_types(score_in.dtype, score_out.dtype)
    score_in, score_out = score_in.to(dtype), score_out.to(dtype).sort().values
    below = torch.searchsorted(score_out, score_in)
    below_or_equal = torch.searchsorted(score_out, score_in, right=True)
    area = (below + below_or_equal).sum().double() / (2 * len(score_in) * len(score_out))
    return _unless_nan(area, score_in, score_out)


def dar(
    clean_conf: Tensor,  # any shape
    clean_correct: Tensor,  # bool, shaped like clean_conf
    adv_conf: Tensor,  # any shape
    adv_correct: Tensor,  # bool, shaped like adv_conf
    *,
    accept: float = 0.95,
    count_rejected_correct: bool = False,
) -> Tensor:
    r"""Detection accuracy rate: the share of adversarial samples that were rightly accepted or rightly rejected.

    The threshold :math:`t` is entry :math:`\lfloor (1 - accept)\,n \rfloor` of the sorted confidences of the n correctly
    classified clean samples; a sample is accepted when its confidence is at least :math:`t`.

    Args:
        clean_conf, clean_correct: confidence of each clean sample, and whether it is classified correctly.
        adv_conf, adv_correct: the same of each adversarial sample.
        accept: share of correct clean samples that must be accepted, above 0 and at most 1.
        count_rejected_correct: also count a rejected sample whose class was correct.

    **Convention**: right is "accepted and correct" or "rejected and wrong" (the paper's appendix); `count_rejected_correct`
    makes every rejection right (its main text). A NaN confidence makes the result NaN. No correct clean sample, or no
    adversarial sample, raises ValueError. The result is 0-d, float32, or float64 if an input is.

    Paper: "A Margin-Based Replacement for Cross-Entropy Loss", appendix B.1.2 and section 4.1.3.

    >>> clean, adversarial = torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0.2, 0.75, 0.95])
    >>> dar(clean, torch.tensor([True, True, True]), adversarial, torch.tensor([False, True, False]))
    tensor(0.6667)
    """
    clean_conf, adv_conf = _scores(clean_conf=clean_conf), _scores(adv_conf=adv_conf)
    clean_correct = _flags("clean_correct", clean_correct, "clean_conf", clean_conf)
    adv_correct = _flags("adv_correct", adv_correct, "adv_conf", adv_conf)
    _same_device("adv_conf", adv_conf, "clean_conf", clean_conf)
    accept = check.number("accept", accept, above=0.0, most=1.0)
    dtype = torch.promote_types(clean_conf.dtype, adv_conf.dtype)
    kept = clean_conf[clean_correct].to(dtype).sort().values
    if len(kept) == 0:
        raise ValueError("clean_correct must have at least one True: the threshold comes from correct clean samples")
    position = math.floor(round((1 - accept) * len(kept), 6))  # 1 - 0.9 is not a tenth: round before the floor
    accepted = adv_conf.to(dtype) >= kept[min(position, len(kept) - 1)]
    right = (accepted & adv_correct) | (~accepted if count_rejected_correct else ~accepted & ~adv_correct)
    return _unless_nan(right.double().mean(), clean_conf, adv_conf)


def ece(
    confidence: Tensor,  # any shape, in [0, 1]
    correct: Tensor,  # bool, shaped like confidence
    *,
    bins: int = 15,
) -> Tensor:
    r"""Expected calibration error: the mean gap between confidence and accuracy over bins of the confidence.

    .. math:: \sum_b \frac{n_b}{n} \left| \mathrm{accuracy}_b - \mathrm{confidence}_b \right|

    Args:
        confidence: probability of the predicted class, such as `confidence_scores(...).msp`.
        correct: whether that class is the label.
        bins: number of equal bins of [0, 1], at least 1.

    **Convention**: bins are (lo, hi], with 0 in the first one. A confidence outside [0, 1] raises ValueError, a NaN makes the
    result NaN, an empty set raises ValueError. The result is 0-d, float32, or float64 for float64 input.

    Paper: Guo et al., "On Calibration of Modern Neural Networks".

    >>> ece(torch.tensor([0.9, 0.9, 0.6, 0.6]), torch.tensor([True, True, True, False]))
    tensor(0.1000)
    """
    confidence = _scores(confidence=confidence)
    correct = _flags("correct", correct, "confidence", confidence)
    bins = check.integer("bins", bins, least=1)
    outside = (confidence < 0) | (confidence > 1)
    if bool(outside.any()):
        raise ValueError(f"confidence must be in [0, 1], got {float(confidence[outside][0])}")
    # Edges in confidence's dtype: a float32 0.2 is on the edge 0.2.
    edges = (torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins).to(confidence.dtype)
    index = torch.bucketize(confidence, edges)
    gaps = torch.zeros(bins, dtype=torch.float64, device=confidence.device)
    gaps = gaps.index_add(0, index, correct.double() - confidence.double())
    return _unless_nan(gaps.abs().sum() / len(confidence), confidence)


def _scores(**named: Tensor) -> Tensor:
    """One named tensor of numbers, checked and flattened, in float32 or float64."""
    ((name, value),) = named.items()
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    if value.dtype not in ACCUMULATE:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {value.dtype}")
    if value.numel() == 0:
        raise ValueError(f"{name} must have at least one element, got shape {tuple(value.shape)}")
    return value.detach().reshape(-1).to(ACCUMULATE[value.dtype])


def _flags(name: str, value: Tensor, like_name: str, like: Tensor) -> Tensor:
    """A bool tensor with an element for each one of `like`, flattened."""
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        what = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a bool tensor, got {what}")
    if value.numel() != like.numel():
        raise ValueError(f"{name} must have as many elements as {like_name}, {like.numel()}, got shape {tuple(value.shape)}")
    _same_device(name, value, like_name, like)
    return value.reshape(-1)


def _same_device(name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    if value.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like {like_name}, got {value.device}")


def _unless_nan(result: Tensor, *scores: Tensor) -> Tensor:
    """`result` in the scores' dtype, or NaN when one of them is NaN: comparisons would lose it."""
    bad = torch.stack([score.isnan().any() for score in scores]).any()
    dtype = torch.float64 if any(score.dtype == torch.float64 for score in scores) else torch.float32
    return torch.where(bad, torch.nan, result).to(dtype)


for _metric, _paper in (
    (auroc, "A Margin-Based Replacement for Cross-Entropy Loss, section 4"),
    (dar, "A Margin-Based Replacement for Cross-Entropy Loss, app. B.1.2, section 4.1.3"),
    (ece, "Guo et al. 2017, On Calibration of Modern Neural Networks"),
):
    _name = _metric.__name__
    register(LossSpec(name=_name, function=_name, module=None, family="metric", inputs="own", reference=_metric, paper=_paper))
