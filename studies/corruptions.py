"""Thirteen common corruptions that need no picture of their own, after Hendrycks and Dietterich (ImageNet-C, CIFAR-10-C) and Mu
and Gilmer (MNIST-C). Snow, frost and spatter are left out: the first two need photographs.

The strengths are the published ones; the noise is drawn here, images are processed as one batch, and rounding to 8 bits is done
once at the end. Motion blur is a one-sided Gaussian along a line (the published sets call ImageMagick); fog is made on the next
power of two of the image's side.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

#: grey images of 28x28: ImageNet-C's numbers at the severity that MNIST-C takes for each kind
MNIST_C = {
    "gaussian noise": 0.38,
    "shot noise": 3,
    "impulse noise": 0.17,
    "defocus blur": (3, 0.1),
    "glass blur": (0.7, 1, 2),
    "motion blur": (10, 3),
    "zoom blur": (1.31, 0.03),
    "fog": (3, 1.4),
    "brightness": 0.5,
    "contrast": 0.1,
    "elastic": (28 * 2, 28 * 0.7, 28 * 0.1),
    "pixelate": 0.4,
    "jpeg": 7,
}

#: colour images of 32x32: CIFAR-10-C at its highest severity, 5
CIFAR_C = {
    "gaussian noise": 0.10,
    "shot noise": 50,
    "impulse noise": 0.07,
    "defocus blur": (1.5, 0.1),
    "glass blur": (0.4, 1, 2),
    "motion blur": (9, 2.5),
    "zoom blur": (1.26, 0.01),
    "fog": (1.5, 1.75),
    "brightness": 0.3,
    "contrast": 0.15,
    "elastic": (32 * 0.1, 32 * 0.03, 32 * 0.03),
    "pixelate": 0.65,
    "jpeg": 40,
}


def corrupted(x: Tensor, seed: int, strengths: dict[str, object] | None = None) -> dict[str, Tensor]:
    """Every corruption of images (N, channels, side, side) in [0, 1], rounded to 8 bits as files are."""
    if strengths is None:
        strengths = MNIST_C if x.shape[1] == 1 else CIFAR_C
    result = {}
    for kind, strength in strengths.items():
        generator = torch.Generator().manual_seed(seed)
        image = KINDS[kind](x, strength, generator)
        result[kind] = (image.clamp(0, 1) * 255).floor() / 255
    return result


def gaussian_noise(x: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    return x + sigma * torch.randn(x.shape, generator=generator)


def shot_noise(x: Tensor, photons: float, generator: torch.Generator) -> Tensor:
    return torch.poisson(photons * x, generator=generator) / photons


def impulse_noise(x: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    hit = torch.rand(x.shape, generator=generator) < amount
    white = torch.rand(x.shape, generator=generator) < 0.5
    return torch.where(hit, white.to(x.dtype), x)


def defocus_blur(x: Tensor, strength: tuple[float, float], generator: torch.Generator) -> Tensor:
    radius, sigma = strength
    reach = max(8, int(radius))
    grid = torch.arange(-reach, reach + 1)
    disk = ((grid[:, None] ** 2 + grid[None] ** 2) <= radius**2).float()
    disk = disk / disk.sum()
    smooth = _gaussian(sigma, 1 if radius <= 8 else 2)
    kernel = functional.conv2d(disk[None, None], (smooth[:, None] * smooth[None])[None, None], padding="same")[0, 0]
    return _filtered(x, kernel)


def glass_blur(x: Tensor, strength: tuple[float, int, int], generator: torch.Generator) -> Tensor:
    """Blur, pixels swapped with a near one, blur. As in the published code the swap of a colour pixel copies it instead
    (numpy views), and for grey images half of the pixels take part (MNIST-C)."""
    sigma, reach, rounds = strength
    count, channels, side, _ = x.shape
    blur = _reflecting_blur(side, sigma)
    flat = ((blur @ x @ blur.T) * 255).floor().div(255).flatten(2).clone()
    rows = torch.arange(count)
    for _ in range(rounds):
        for h in range(side - reach, reach, -1):
            for w in range(side - reach, reach, -1):
                shift = torch.randint(-reach, reach, (2, count), generator=generator)
                here = torch.full((count,), h * side + w)
                there = here + shift[0] * side + shift[1]
                if channels == 1:
                    there = torch.where(torch.rand(count, generator=generator) < 0.5, there, here)
                    flat[rows, 0, here], flat[rows, 0, there] = flat[rows, 0, there], flat[rows, 0, here]
                else:
                    flat[rows, :, here] = flat[rows, :, there]
    return blur @ flat.reshape(x.shape).clamp(0, 1) @ blur.T


def motion_blur(x: Tensor, strength: tuple[int, float], generator: torch.Generator) -> Tensor:
    radius, sigma = strength
    count, _, side, _ = x.shape
    angle = math.pi / 4 * (2 * torch.rand(count, generator=generator) - 1)
    weights = torch.exp(-(torch.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    weights = weights / weights.sum()
    pixel, result = torch.arange(side), torch.zeros_like(x)
    images = torch.arange(count)[:, None, None]
    for i, weight in enumerate(weights.tolist()):
        down, right = (i * angle.sin()).round().long(), (i * angle.cos()).round().long()
        h = (pixel[None] - down[:, None]).clamp(0, side - 1)
        w = (pixel[None] - right[:, None]).clamp(0, side - 1)
        result += weight * x.transpose(0, 1)[:, images, h[:, :, None], w[:, None, :]].transpose(0, 1)
    return result


def zoom_blur(x: Tensor, strength: tuple[float, float], generator: torch.Generator) -> Tensor:
    end, step = strength
    factors = torch.arange(1, end, step, dtype=torch.float64).tolist()
    result = x.clone()
    for factor in factors:
        scale = torch.tensor([[1 / factor, 0, 0], [0, 1 / factor, 0]], dtype=x.dtype).expand(len(x), 2, 3)
        grid = functional.affine_grid(scale, list(x.shape), align_corners=True)
        result += functional.grid_sample(x, grid, padding_mode="border", align_corners=True)
    return result / (len(factors) + 1)


def fog(x: Tensor, strength: tuple[float, float], generator: torch.Generator) -> Tensor:
    amount, decay = strength
    side = x.shape[-1]
    cloud = _plasma(len(x), 1 << (side - 1).bit_length(), decay, generator)[:, None, :side, :side]
    brightest = x.amax(dim=(1, 2, 3), keepdim=True)
    return (x + amount * cloud) * brightest / (brightest + amount)


def brightness(x: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    value = x.amax(dim=1, keepdim=True)  # of HSV: hue and saturation stay
    return torch.where(value > 0, x / value.clamp(min=1e-12), 1) * (value + amount).clamp(0, 1)


def contrast(x: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    mean = x.mean(dim=(2, 3), keepdim=True)
    return (x - mean) * amount + mean


def elastic(x: Tensor, strength: tuple[float, float, float], generator: torch.Generator) -> Tensor:
    """Three points moved (affine), then every pixel by a smooth field."""
    alpha, sigma, jitter = strength
    count, _, side, _ = x.shape
    centre, third = side / 2, side // 3
    points = torch.tensor(
        [[centre + third, centre + third], [centre + third, centre - third], [centre - third, centre - third]]
    )
    moved = points + jitter * (2 * torch.rand(count, 3, 2, generator=generator) - 1)
    # positions in the source of each pixel of the result: the affine map that takes the moved points back
    homogeneous = torch.cat([moved, torch.ones(count, 3, 1)], dim=2)
    back = torch.linalg.solve(homogeneous, points.expand(count, 3, 2))
    pixel = torch.arange(side, dtype=x.dtype)
    place = torch.stack([pixel[None].expand(side, side), pixel[:, None].expand(side, side), torch.ones(side, side)], dim=-1)
    x = _sampled(x, place.reshape(1, -1, 3).expand(count, -1, -1) @ back)
    blur = _reflecting_blur(side, sigma)
    field = blur @ (2 * torch.rand(count, 2, side, side, generator=generator) - 1) @ blur.T * alpha
    return _sampled(x, place[None, :, :, :2].reshape(1, -1, 2) + field.flatten(2).transpose(1, 2))


def pixelate(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    from PIL import Image

    side = x.shape[-1]
    small = int(side * share)
    return _per_image(
        x, lambda image: image.resize((small, small), Image.Resampling.BOX).resize((side, side), Image.Resampling.BOX)
    )


def jpeg(x: Tensor, quality: int, generator: torch.Generator) -> Tensor:
    from PIL import Image

    def packed(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _per_image(x, packed)


KINDS: dict[str, Callable[..., Tensor]] = {
    "gaussian noise": gaussian_noise,
    "shot noise": shot_noise,
    "impulse noise": impulse_noise,
    "defocus blur": defocus_blur,
    "glass blur": glass_blur,
    "motion blur": motion_blur,
    "zoom blur": zoom_blur,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic": elastic,
    "pixelate": pixelate,
    "jpeg": jpeg,
}


def _gaussian(sigma: float, reach: int) -> Tensor:
    weights = torch.exp(-(torch.arange(-reach, reach + 1).double() ** 2) / (2 * sigma**2))
    return (weights / weights.sum()).float()


def _reflecting_blur(side: int, sigma: float) -> Tensor:
    """(side, side) matrix of a Gaussian blur along one axis, with the image mirrored beyond its edges."""
    reach = int(3 * sigma + 0.5)
    matrix = torch.zeros(side, side)
    place = torch.arange(side)[:, None] + torch.arange(-reach, reach + 1)[None]
    place = place % (2 * side)
    place = torch.where(place < side, place, 2 * side - 1 - place)
    return matrix.scatter_add(1, place, _gaussian(sigma, reach).expand(side, -1).contiguous())


def _filtered(x: Tensor, kernel: Tensor) -> Tensor:
    reach = kernel.shape[-1] // 2
    padded = functional.pad(x, (reach,) * 4, mode="reflect")
    channels = x.shape[1]
    return functional.conv2d(padded, kernel.expand(channels, 1, -1, -1), groups=channels)


def _sampled(x: Tensor, place: Tensor) -> Tensor:
    """Pixels of `x` at places (N, side * side, 2) given as column and row, linear between pixels, mirrored at the edges."""
    count, _, side, _ = x.shape
    grid = place.reshape(count, side, side, 2) * (2 / (side - 1)) - 1
    return functional.grid_sample(x, grid, padding_mode="reflection", align_corners=True)


def _plasma(count: int, side: int, decay: float, generator: torch.Generator) -> Tensor:
    """(count, side, side) clouds in [0, 1] by the diamond-square rule on a torus."""
    cloud = torch.zeros(count, side, side)
    wibble, step = 100.0, side

    def wobbled(corners: Tensor) -> Tensor:
        return corners / 4 + wibble**2 * (2 * torch.rand(corners.shape, generator=generator) - 1)

    while step >= 2:
        half = step // 2
        corner = cloud[:, ::step, ::step]
        sums = corner + corner.roll(-1, dims=1)
        cloud[:, half::step, half::step] = wobbled(sums + sums.roll(-1, dims=2))
        middle = cloud[:, half::step, half::step]
        cloud[:, ::step, half::step] = wobbled(middle + middle.roll(1, dims=1) + corner + corner.roll(-1, dims=2))
        cloud[:, half::step, ::step] = wobbled(middle + middle.roll(1, dims=2) + corner + corner.roll(-1, dims=1))
        step, wibble = half, wibble / decay
    low, high = cloud.amin(dim=(1, 2), keepdim=True), cloud.amax(dim=(1, 2), keepdim=True)
    return (cloud - low) / (high - low)


def _per_image(x: Tensor, change) -> Tensor:  # noqa: ANN001
    from PIL import Image

    results = []
    for image in (x * 255).round().byte().permute(0, 2, 3, 1).numpy():
        results.append(np.asarray(change(Image.fromarray(image[:, :, 0] if x.shape[1] == 1 else image))))
    result = torch.from_numpy(np.stack(results)).float() / 255
    return result[:, None] if x.shape[1] == 1 else result.permute(0, 3, 1, 2)
