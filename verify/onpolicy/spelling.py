"""Which numbers are one float32 that was written in two ways: -0.1 and -0.10000000149011612.

Samplers and trainers compute log-probabilities in float32; one writer prints the shortest decimal
that reads back as that float32, the next converts to float64 first. As float64 they differ in the
eighth digit and nothing happened. Two values count as equal when they are the same float32 and each
is spelled as one: exactly, or as a decimal of at most nine digits, which is what it takes. Values
with a float64's digits are compared as float64. It refuses to round bfloat16 or float16 away: a
value that was stored so differs from one that was not, and training uses it.
"""

from __future__ import annotations

from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

_POWERS = np.array([10.0**power for power in range(23)])  # all that are exactly a float64
_DIGITS = 9
_COARSE = 6  # digits or decimals; a float32 needs up to nine
_FEWEST = 50
NARROWEST_FIRST = ("bfloat16", "float16", "float32", "float64")
"""Dtypes that log-probabilities are stored in, by the digits they keep."""


def same_float32(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.bool_]:
    """bool [N]: a and b, float64 [N], differ and are two spellings of one float32."""
    same = np.zeros(len(a), bool)
    with np.errstate(invalid="ignore", over="ignore"):
        narrow = a.astype(np.float32)  # what is 0 there, or infinite, was no float32
        at = np.flatnonzero((a != b) & (narrow == b.astype(np.float32)) & (narrow != 0))
    if at.size:
        at = at[np.isfinite(a[at]) & np.isfinite(b[at])]
        same[at] = _spelled_as_float32(a[at]) & _spelled_as_float32(b[at])
    return same


def _spelled_as_float32(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    with np.errstate(over="ignore"):
        exact = values.astype(np.float32).astype(np.float64) == values
    rest = np.flatnonzero(~exact)
    exact[rest] = _short_decimal(values[rest])
    return exact


def _short_decimal(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether the float64 is the one that some decimal of at most nine digits reads as."""
    size = np.abs(values)
    exponent = np.floor(np.log10(size, where=size > 0, out=np.zeros_like(size))).astype(np.int64)
    found = np.zeros(len(values), bool)
    for shift in (_DIGITS - 1, _DIGITS - 2):  # log10 may err by one next to a power of ten
        power = shift - exponent
        # whole / 10**power is correctly rounded, as reading the decimal is, while both are exact
        usable = (power >= 0) & (power < len(_POWERS))
        scale = _POWERS[np.where(usable, power, 0)]
        whole = np.rint(size * scale)
        found |= usable & (whole < 10**_DIGITS) & (whole / scale == size)
    for index in np.flatnonzero(~found & (size > 0) & (size < 10.0 ** (_DIGITS - 22))):
        found[index] = float(f"{values[index]:.{_DIGITS - 1}e}") == values[index]
    return found


def coarseness(values: NDArray[np.float64]) -> str:
    """ "6 digits" or "6 decimals" where values were cut to so few, as by a printf; else "".

    Told from at most 1000 of them. Fewer than 50 that are not equal to each other say nothing.
    """
    looked_at = values[:: max(1, len(values) // 1000)]
    looked_at = np.unique(looked_at[np.isfinite(looked_at) & (looked_at != 0)])
    if len(looked_at) < _FEWEST:
        return ""
    written = [Decimal(repr(value)).normalize().as_tuple() for value in looked_at.tolist()]
    digits = max(len(one.digits) for one in written)
    decimals = max(-int(one.exponent) for one in written)
    if decimals <= _COARSE:
        return f"{decimals} decimals"
    return f"{digits} digits" if digits <= _COARSE else ""


def rounded(values: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """The values as `dtype`, one of NARROWEST_FIRST, holds them, to nearest even."""
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return values.astype(dtype).astype(np.float64)
        bits = values.astype(np.float32).view(np.uint32)
    up = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    kept = np.where(np.isnan(values), bits, up).astype(np.uint32)
    return kept.view(np.float32).astype(np.float64)
