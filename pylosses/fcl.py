"""Feature contrastive learning: a training step that keeps a model sensitive to what matters and steady against the rest.

u  = |d loss / d x|                                                    how useful each input is (Eq. 1)
z  = embed(x), z+ = embed(x + noise on the k least useful inputs), z- = embed(x + noise on the k most useful)
L  = loss + weight * contrastive(z, z+, z-)                            Eq. (6), or the margin form Eq. (9)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import check
from .functional import contrastive_margin_loss, cross_entropy, feature_contrastive_loss, utility_perturbation

#: A sample whose largest utility is below this has no useful input to perturb.
NO_UTILITY = 1e-12


class Parts(NamedTuple):
    """What a step's loss is made of, without gradient."""

    classification: Tensor  #: the loss of the logits
    contrastive: Tensor  #: before its weight; 0 while the warm-up has not begun
    weight: float  #: of the contrastive part in this step
    utility: Tensor | None  #: shaped like the input; None while the warm-up has not begun


class FeatureContrastive(nn.Module):
    r"""Algorithm 1 as a training step: ``loss, parts = fcl.step(input, target)``, then ``loss.backward()``.

    Args:
        model: from the input to logits (N, C).
        embed: from the input to features (N, D), most often the model without its last layer.
        k: how many inputs of a sample are perturbed, each way.
        sigma: size of the noise.
        temperature: of the "softmax" form.
        weight: :math:`\lambda`, factor of the contrastive part.
        warmup: (first, length) in steps: the weight is 0 before step `first` and grows linearly to `weight` over `length`
            steps; one number is the length, from the first step on.
        loss: of logits and target; called with `reduction`.
        reduction: of the loss, "mean" or "sum"; the contrastive part is a sum over the batch, as in Algorithm 1. The source
            does not say which of the two its weights stand beside.
        form: "softmax", Eq. (6), or "margin", Eq. (9).
        gamma: margin of the "margin" form.
        utility: utilities for every step, shaped like the input or one sample of it; None takes the loss's gradient.
        generator: of the noise.

    **Convention**

    - utilities and the choice of inputs are constants for the gradient, which flows through z, z+ and z-. z+ and z- come from
      one forward of both; z from a forward of its own, so that with BatchNorm it is the clean batch's.
    - the utility is of each sample's own loss, whatever the reduction. A sample whose largest utility is below 1e-12 keeps its
      z+ and loses its z-.
    - `step` counts its calls for the warm-up; the count is in `state_dict()`.

    Paper: "Balancing Robustness and Sensitivity using Feature Contrastive Learning", Algorithm 1.

    >>> embed = torch.nn.Linear(6, 4)
    >>> fcl = pylosses.fcl.FeatureContrastive(torch.nn.Sequential(embed, torch.nn.Linear(4, 3)), embed, k=2, sigma=0.5)
    >>> loss, parts = fcl.step(torch.ones(5, 6), torch.tensor([0, 1, 2, 0, 1]))
    >>> loss.backward()
    """

    steps: Tensor
    model: Callable[[Tensor], Tensor]
    embed: Callable[[Tensor], Tensor]
    utility: Tensor | None

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        embed: Callable[[Tensor], Tensor],
        *,
        k: int = 256,
        sigma: float = 0.5,
        temperature: float = 0.1,
        weight: float = 0.001,
        warmup: int | tuple[int, int] = 0,
        loss: Callable[..., Tensor] = cross_entropy,
        reduction: str = "mean",
        form: str = "softmax",
        gamma: float = 1.0,
        utility: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.model, self.embed, self.loss = model, embed, loss
        self.k = check.integer("k", k, least=0)
        self.sigma = check.number("sigma", sigma, least=0.0)
        self.temperature = check.number("temperature", temperature, above=0.0)
        self.weight = check.number("weight", weight, least=0.0)
        first, length = warmup if isinstance(warmup, tuple) else (0, warmup)
        self.warmup = check.integer("warmup", first, least=0), check.integer("warmup", length, least=0)
        self.reduction = check.choice("reduction", reduction, ("mean", "sum"))
        self.form = check.choice("form", form, ("softmax", "margin"))
        self.gamma = check.number("gamma", gamma, least=0.0)
        self.generator = generator
        self.register_buffer("utility", utility)
        self.register_buffer("steps", torch.tensor(0))

    def weight_now(self) -> float:
        """The contrastive part's weight in the next step."""
        first, length = self.warmup
        done = int(self.steps) - first
        if done < 0:
            return 0.0
        return self.weight * min(1.0, done / length if length else 1.0)

    def step(
        self,
        input: Tensor,  # (N, *), floating
        target: Tensor,
        *,
        utility: Tensor | None = None,  # shaped like input
        noise: Tensor | None = None,  # shaped like input
    ) -> tuple[Tensor, Parts]:
        """The loss of a batch, to call `backward` on, and its parts."""
        if not isinstance(input, Tensor) or not input.is_floating_point():
            what = input.dtype if isinstance(input, Tensor) else type(input).__name__
            raise TypeError(f"input must be a floating Tensor, to have a derivative and take noise, got {what}")
        weight = self.weight_now()
        self.steps += 1
        given = utility if utility is not None else self.utility
        input = input.detach().requires_grad_(weight > 0 and given is None)
        classification = self.loss(self.model(input), target, reduction=self.reduction)
        if weight == 0:
            return classification, Parts(classification.detach(), classification.new_zeros(()), 0.0, None)
        if given is None:
            (gradient,) = torch.autograd.grad(classification, input, retain_graph=True)
            given = gradient.abs() * (len(input) if self.reduction == "mean" else 1)
        given = given.detach().to(input).expand(input.shape)
        contrastive = self._contrastive(input.detach(), given, noise)
        loss = classification + weight * contrastive
        return loss, Parts(classification.detach(), contrastive.detach(), weight, given)

    def _contrastive(self, input: Tensor, utility: Tensor, noise: Tensor | None) -> Tensor:
        high, low = utility_perturbation(utility, self.k, self.sigma, noise=noise, generator=self.generator)
        z = self.embed(input)
        positive, negative = self.embed(torch.cat([input + low, input + high])).chunk(2)
        useful = utility.flatten(1).amax(dim=1) >= NO_UTILITY
        if self.form == "softmax":
            return feature_contrastive_loss(
                z, positive, negative, temperature=self.temperature, negative_valid=useful, reduction="sum"
            )
        both = contrastive_margin_loss(z, positive, negative, gamma=self.gamma, reduction="none")
        near = contrastive_margin_loss(z, positive, negative, gamma=0.0, reduction="none")  # no margin, no negative
        return torch.where(useful, both, near).sum()

    def extra_repr(self) -> str:
        shown = ("k", "sigma", "temperature", "weight", "warmup", "reduction", "form")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)


def sensitivity(
    embed: Callable[[Tensor], Tensor],
    input: Tensor,  # (N, *)
    perturbation: Tensor | None = None,  # shaped like input
) -> Tensor:
    r"""How much the features of each sample move with its inputs.

    .. math:: s_i = \Big\| \frac{\partial \varphi(x)}{\partial x_i} \Big\|_2 \qquad \text{or} \qquad
        s = \| \varphi(x + \varepsilon) - \varphi(x) \|_2

    Args:
        embed: from the input to features (N, D), each row from its own sample.
        input: the samples.
        perturbation: :math:`\varepsilon`, for instance one of `utility_perturbation`; None takes the derivative.

    Returns:
        Without a perturbation shaped like `input`, the sensitivity to each input; with one (N).

    **Convention**: Euclidean norms over the features; no gradient. The derivative takes a backward for each feature. Inferred:
    the source's equations (3) and (4) name the derivative and the change under noise, their norm is a choice.

    >>> sensitivity(lambda x: x * torch.tensor([3.0, 4.0]), torch.zeros(1, 2))
    tensor([[3., 4.]])
    >>> sensitivity(lambda x: x * torch.tensor([3.0, 4.0]), torch.zeros(1, 2), torch.ones(1, 2))
    tensor([5.])
    """
    if perturbation is not None:
        if perturbation.shape != input.shape:
            raise ValueError(f"perturbation must have input's shape {tuple(input.shape)}, got {tuple(perturbation.shape)}")
        with torch.no_grad():
            return (embed(input + perturbation) - embed(input)).flatten(1).norm(dim=1)
    with torch.enable_grad():
        input = input.detach().requires_grad_()
        total = embed(input).flatten(1).sum(dim=0)  # of each feature over the samples, which do not touch
        squares = torch.zeros_like(input)
        for feature in total.unbind():
            (gradient,) = torch.autograd.grad(feature, input, retain_graph=True)
            squares += gradient**2
    return squares.sqrt().detach()


@torch.no_grad()
def discrete_utility(
    model: Callable[[Tensor], Tensor],
    tokens: Tensor,  # (N, L)
    target: Tensor,  # (N)
    *,
    loss: Callable[..., Tensor] = cross_entropy,
    blank: int | None = None,
) -> Tensor:  # (N, L)
    r"""Utility of each token: how much the loss changes when it is taken away.

    .. math:: u_i = |\ell(x_{\setminus i}, y) - \ell(x, y)|

    Args:
        model: from tokens (N, L) to logits (N, C).
        tokens: the samples.
        target: their classes.
        loss: of logits and target; called with ``reduction="none"``.
        blank: token that stands in for the one that is taken away; None makes the sequence shorter by one.

    **Convention**: no gradient; L + 1 forwards of the batch. Inferred: the absolute value is that of equation (1).

    Paper: "Balancing Robustness and Sensitivity using Feature Contrastive Learning", equation (2).

    >>> logits = lambda tokens: torch.stack([tokens.sum(dim=1), torch.zeros(len(tokens))], dim=1)
    >>> discrete_utility(logits, torch.tensor([[0, 3]]), torch.tensor([0]))
    tensor([[0.0000, 0.6446]])
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens must have shape (N, L), got {tuple(tokens.shape)}")
    whole = loss(model(tokens), target, reduction="none")
    changes = []
    for i in range(tokens.shape[1]):
        if blank is None:
            without = torch.cat([tokens[:, :i], tokens[:, i + 1 :]], dim=1)
        else:
            without = tokens.clone()
            without[:, i] = blank
        changes.append((loss(model(without), target, reduction="none") - whole).abs())
    return torch.stack(changes, dim=1) if changes else whole.new_zeros(tokens.shape)
