"""exp, log, log1p, expm1, tanh and powers that are accurate to a few units in the last place, compiled and interpreted.

Triton's float32 `exp` and `log` round their argument in base 2 and `log` has an absolute error near 1; confident rows need
relative precision. float64 is the libraries' own. Everything passes NaN on.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471824645996)  # in float32, and what that leaves of it
LN2_REST = tl.constexpr(-1.904654299957768e-09)
LN2_HIGH = tl.constexpr(0.693359375)  # few digits: its products with exponents are exact
LN2_LOW = tl.constexpr(-2.12194440e-4)
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)


@triton.jit
def exp(x):
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        # x = n log 2 + r with |r| <= log(2) / 2: the base-2 argument of r has no digits to lose
        n = tl.floor(x * LOG2E + 0.5)
        r = (x - n * LN2_HIGH) - n * LN2_LOW
        power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
        y = tl.exp2(r * LOG2E) * power
        return tl.where(x < -87.0, 0.0, tl.where(x > 88.0, _large_exp(x), y))


@triton.jit
def _large_exp(x):
    """e^x where 2^n is no float32, by two halves."""
    half = tl.exp2(x * (0.5 * LOG2E))
    return half * half


@triton.jit
def exp_below_zero(x, ROUGH: tl.constexpr):
    """e^x for x <= 0. ROUGH, for logits of half precision: one exponential in base 2, whose argument is rounded, so that e^x is
    wrong by up to 6e-8 |x| of itself."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    elif ROUGH:
        return tl.exp2(x * LOG2E)
    else:
        x = tl.maximum(x, -150.0, propagate_nan=tl.PropagateNan.ALL)  # where e^x is 0: -inf would become NaN
        t = x * LOG2E
        y = tl.exp2(t)
        return tl.fma(y, tl.fma(t, -LN2_REST, tl.fma(t, -LN2, x)), y)  # the argument's rounding error is exact


@triton.jit
def log(x):
    """Natural logarithm of x >= 0."""
    if x.dtype == tl.float64:
        return tl.log(x)
    else:
        bits = x.to(tl.int32, bitcast=True)
        n = (bits - SQRT_HALF_BITS) >> 23
        f = (bits - (n << 23)).to(tl.float32, bitcast=True) - 1.0  # x = 2^n (1 + f) with 1 + f near 1
        e = n.to(tl.float32)
        y = e * LN2_HIGH + (e * LN2_LOW + _log_near_one(f, 5))
        return tl.where((x > 0) & (x < float("inf")), y, tl.where(x == 0, -float("inf"), x))


@triton.jit
def _log_near_one(f, TERMS: tl.constexpr):
    """log(1 + f) = 2 atanh(z), z = f / (2 + f)."""
    z = f / (2.0 + f)
    zz = z * z
    s = zz * 0.0
    for i in tl.static_range(TERMS):
        s = (s + 1.0 / (2 * (TERMS - i) + 1)) * zz
    return 2.0 * (z + z * s)


@triton.jit
def log1p(x):
    """log(1 + x) for x > -1/2."""
    if x.dtype == tl.float64:
        y = 1.0 + x
        exact = (y == 1.0) | (x == float("inf"))
        return tl.where(exact, x, tl.log(y) * (x / tl.where(exact, 1.0, y - 1.0)))
    else:
        return tl.where(x < 1.0, _log_near_one(x, 9), log(1.0 + x))


@triton.jit
def expm1(x):
    return _expm1(x, exp(x))


@triton.jit
def _expm1(x, e):
    """e^x - 1, from e = e^x where nothing cancels."""
    TERMS: tl.constexpr = 14 if x.dtype == tl.float64 else 8
    s = x * 0.0 + 1.0
    for i in tl.static_range(TERMS):
        s = 1.0 + s * x * (1.0 / (TERMS - i + 1))
    return tl.where(tl.abs(x) < 0.35, x * s, e - 1.0)


@triton.jit
def tanh(x):
    """tanh(x) and its derivative."""
    z = -2.0 * tl.abs(x)
    e = exp_below_zero(z, False)
    inverse = 1.0 / (1.0 + e)
    y = -_expm1(z, e) * inverse
    return tl.where(x < 0, -y, y), 4.0 * e * inverse * inverse


@triton.jit
def power(x, p):
    """x^p for x > 0; in float64, since p log x has more digits before the point than float32 can spare."""
    return tl.exp(p.to(tl.float64) * tl.log(x.to(tl.float64))).to(x.dtype)


@triton.jit
def weighted(w, value):
    """w value; 0 where w is 0, be the value infinite. NaN shows."""
    value = value + tl.zeros(w.shape, w.dtype)
    return tl.where((w == 0) & (value == value), 0.0, w * value)


@triton.jit
def above(t, exact):
    """The smallest number of t's type that is not below `exact`, where t is `exact` rounded to that type and positive."""
    if t.dtype == tl.float64:
        return t
    else:
        next = (t.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
        return tl.where(t.to(tl.float64) < exact, next, t)
