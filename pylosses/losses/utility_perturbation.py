"""Perturbations of the most and of the least useful inputs, for the feature contrastive losses.

high = sigma noise on the k largest utilities, 0 elsewhere      low = the same on the k smallest
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import check
from ..check import ACCUMULATE
from ..spec import LossSpec, register
from ._own import only_reference


def reference(utility: Tensor, noise: Tensor, *, k: int, sigma: float) -> tuple[Tensor, Tensor]:
    """High and low perturbation of (N, D)."""
    high = utility.argsort(dim=1, descending=True, stable=True)[:, :k]  # stable: the lowest index wins a tie
    low = utility.argsort(dim=1, stable=True)[:, :k]
    chosen = torch.zeros_like(utility, dtype=torch.bool)
    sized = sigma * noise
    return torch.where(chosen.scatter(1, high, True), sized, 0), torch.where(chosen.scatter(1, low, True), sized, 0)


def utility_perturbation(
    utility: Tensor,  # (D), (N, D) or (N, d1, ..., dK)
    k: int,
    sigma: float,
    *,
    noise: Tensor | None = None,  # shaped like utility
    generator: torch.Generator | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Noise on the k most useful and on the k least useful inputs of each sample: ``(high, low)``.

    The utility of an input is the size of the loss's derivative, :math:`u = |\partial \ell / \partial x|`.

    Args:
        utility: utilities of one sample, or of N samples along the first dimension.
        k: how many inputs of each sample are perturbed, at least 0; all of them when it exceeds their number.
        sigma: factor of the noise, at least 0.
        noise: the noise; None draws standard normal numbers.
        generator: random generator for that draw.
        backend: "reference" or None; others raise with the reason.

    **Convention**

    - the utilities are ranked as given: pass ``grad.abs()``. The lowest index wins a tie; NaN ranks above every number.
    - both results have utility's shape and dtype, share one noise, and overlap when 2 k exceeds the number of inputs.
    - the selection carries no gradient; the noise may.

    Paper: "Balancing Robustness and Sensitivity using Feature Contrastive Learning", definition 3.

    >>> high, low = utility_perturbation(torch.tensor([0.1, 0.9, 0.5]), 1, 0.5, noise=torch.ones(3))
    >>> high, low
    (tensor([0.0000, 0.5000, 0.0000]), tensor([0.5000, 0.0000, 0.0000]))
    """
    if not isinstance(utility, Tensor):
        raise TypeError(f"utility must be a Tensor, got {type(utility).__name__}")
    if utility.dtype not in ACCUMULATE:
        raise TypeError(f"utility must be float32, bfloat16, float16 or float64, got {utility.dtype}")
    if utility.dim() == 0:
        raise ValueError("utility must have shape (D), (N, D) or (N, d1, ...), got a 0-d tensor")
    k = check.integer("k", k, least=0)
    sigma = check.number("sigma", sigma, least=0.0)
    if noise is None:
        noise = torch.randn(utility.shape, generator=generator, dtype=utility.dtype, device=utility.device)
    elif generator is not None:
        raise ValueError("generator must be None when noise is given")
    elif not isinstance(noise, Tensor):
        raise TypeError(f"noise must be a Tensor, got {type(noise).__name__}")
    elif noise.shape != utility.shape:
        raise ValueError(f"noise must have shape {tuple(utility.shape)} like utility, got {tuple(noise.shape)}")
    elif noise.device != utility.device:
        raise ValueError(f"noise must be on {utility.device} like utility, got {noise.device}")
    only_reference(SPEC, backend)
    samples = (1 if utility.dim() == 1 else len(utility), -1)
    flat = utility.detach().reshape(samples) if utility.numel() else utility.detach().reshape(0, 1)
    high, low = reference(flat, noise.to(utility.dtype).reshape(flat.shape), k=k, sigma=sigma)
    return high.reshape(utility.shape), low.reshape(utility.shape)


SPEC = register(
    LossSpec(
        name="utility_perturbation",
        function="utility_perturbation",
        module=None,
        family="contrastive",
        inputs="own",
        reference=reference,
        missing={"cpu": "it makes noise, in plain PyTorch, and is no loss"},
        samples=({"k": 2, "sigma": 0.5},),
        paper="Balancing Robustness and Sensitivity using Feature Contrastive Learning, def. 3",
    )
)
