"""The one rule of numerical agreement.

    truth   the reference in float64 on the same, already rounded, inputs
    plain   the reference at the dtype that is tested
    rule    error(kernel) <= 2 * error(plain) + floor, both errors against truth

Errors are taken row by row, so that a confident row with a tiny gradient is not hidden by the other rows. The floor is what a
correct kernel cannot avoid: one rounding of the result, `ULPS` units in the last place of the statistics at the row's
magnitude, and the error of truth itself, which is only float64.
NaN and infinity must be where truth, rounded to the dtype, has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

ULPS = 8
WITNESS = 32 * torch.finfo(torch.float64).eps


def disagreement(what: str, got: Tensor, plain: Tensor, truth: Tensor, *, row: int | None = None) -> str | None:
    """Why `got` breaks the rule, or None. `row` is the class dimension of a gradient; None for losses, one number a row."""
    if got.shape != truth.shape:
        return f"{what}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    if got.dtype != plain.dtype:
        return f"{what}: dtype {got.dtype}, expected {plain.dtype}"
    if got.numel() == 0:
        return None
    dtype = got.dtype
    got, plain, truth = got.detach().double(), plain.detach().double(), truth.detach().double()
    if truth.isnan().float().mean() > 0.25:
        return f"{what}: truth is NaN in {int(truth.isnan().sum())} of {truth.numel()} places, there is nothing to compare with"
    rounded = truth.to(dtype).double()
    special = ~rounded.isfinite()
    wrong = special & ~((got == rounded) | (got.isnan() & rounded.isnan()))
    if bool(wrong.any()):
        return _message(what, f"must be that, {int(wrong.sum())} of {wrong.numel()} wrong", wrong, got, plain, truth)

    finite = torch.where(special, 0, truth)
    magnitude, plain_error = finite.abs(), torch.where(special, 0, (plain - truth).abs())
    plain_error = torch.where(plain_error.isfinite(), plain_error, torch.inf)
    if row is not None and truth.dim() > 0:
        magnitude, plain_error = magnitude.amax(dim=row, keepdim=True), plain_error.amax(dim=row, keepdim=True)
    allowed = 2 * plain_error + floor(dtype, finite.abs(), magnitude)
    error = torch.where(special, 0, (got - truth).abs())
    error = torch.where(error.isnan(), torch.inf, error)
    wrong = ~(error <= allowed)
    if bool(wrong.any()):
        allowed = allowed.expand_as(error)
        worst = torch.where(wrong, error / allowed, 0)
        worst = wrong & (worst == worst.max())
        rule = f"error {error[worst][0]:.3g} > allowed {allowed[worst][0]:.3g}, {int(wrong.sum())} of {wrong.numel()} wrong"
        return _message(what, rule, worst, got, plain, truth)
    return None


def floor(dtype: torch.dtype, value: Tensor, magnitude: Tensor) -> Tensor:
    """The error no kernel is blamed for, at results of size `value` in rows of size `magnitude`."""
    kind = torch.finfo(dtype)
    statistics = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    tiny = kind.tiny * (kind.eps if dtype == torch.float16 else 1)  # float32 kernels may flush subnormal numbers
    return kind.eps * value + ULPS * statistics.eps * magnitude + WITNESS * magnitude.clamp(min=1) + tiny


def agree(what: str, got: Tensor, plain: Tensor, truth: Tensor, *, row: int | None = None) -> None:
    """Fail with a readable message when `got` breaks the rule."""
    __tracebackhide__ = True
    message = disagreement(what, got, plain, truth, row=row)
    if message is not None:
        raise AssertionError(message)


def close(what: str, got: Tensor, expected: Tensor, *, rtol: float, atol: float = 0.0) -> None:
    """Fail unless got equals expected within rtol of the largest expected magnitude; NaN equals NaN, infinities themselves."""
    __tracebackhide__ = True
    got, expected = got.detach().double(), expected.detach().double()
    if got.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if got.numel() == 0:
        return
    special = ~expected.isfinite()
    same = (got == expected) | (got.isnan() & expected.isnan())
    bound = atol + rtol * torch.where(special, 0, expected).abs().max()
    wrong = torch.where(special, ~same, ~((got - expected).abs() <= bound))
    if bool(wrong.any()):
        rule = f"allowed error {float(bound):.3g}, {int(wrong.sum())} of {wrong.numel()} wrong"
        raise AssertionError(_message(what, rule, wrong, got, None, expected))


def _message(what: str, rule: str, wrong: Tensor, got: Tensor, plain: Tensor | None, truth: Tensor) -> str:
    place = tuple(int(i) for i in wrong.nonzero()[0]) if wrong.dim() else ()
    values = f"got {float(got[place])!r}, expected {float(truth[place])!r}"
    if plain is not None:
        values += f", plain PyTorch {float(plain[place])!r}"
    return f"{what} at {list(place)}: {values} ({rule})"
