"""Images of no class: what a classifier should not be sure of."""

from __future__ import annotations

import torch
from torch import Tensor


def synthetic(x: Tensor, seed: int) -> dict[str, Tensor]:
    """Four sets shaped like the test images `x` (N, channels, height, width)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "blobs": blobs(x.shape, generator),
        "noise": torch.rand(x.shape, generator=generator),
        "permuted pixels": permuted(x, generator),
        "random phase": random_phase(x, generator),
    }


def blobs(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Smooth spots: Gaussian noise, blurred by the width of a stroke, with the highest part made white."""
    side = shape[-1]
    noise = torch.randn(shape, generator=generator)
    distance = torch.arange(side) - side // 2
    frequency = torch.fft.fft2(torch.fft.ifftshift(torch.exp(-(distance[:, None] ** 2 + distance[None] ** 2) / (2 * 1.5**2))))
    smooth = torch.fft.ifft2(torch.fft.fft2(noise) * frequency).real
    smooth = smooth / smooth.flatten(1).std(dim=1)[:, None, None, None]
    return ((smooth - 0.75) * 2).clamp(0, 1)


def permuted(x: Tensor, generator: torch.Generator) -> Tensor:
    """Every image with its pixels in an order of its own; the colours of a pixel stay together."""
    pixels = x.shape[-2] * x.shape[-1]
    order = torch.rand(len(x), pixels, generator=generator).argsort(dim=1)
    return x.flatten(2).gather(2, order[:, None].expand(-1, x.shape[1], -1)).reshape(x.shape)


def random_phase(x: Tensor, generator: torch.Generator) -> Tensor:
    """The amplitudes of an image's spectrum, and its mean, with the phases of noise: so the image stays real."""
    phase = torch.fft.fft2(torch.randn((len(x), 1, *x.shape[-2:]), generator=generator)).angle()
    phase[..., 0, 0] = 0
    amplitude = torch.fft.fft2(x).abs()
    return torch.fft.ifft2(torch.polar(amplitude, phase.expand_as(amplitude))).real.clamp(0, 1)
