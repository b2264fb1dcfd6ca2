"""Makes inputs that have the same bits on every machine, torch version and device.

`torch.randn` is no such source: its bits depend on the device, the version, the size and the number
of threads. Here element i of a tensor is a function of (name, seed, kind, precision of the dtype)
and i alone: Philox4x32-10 (Salmon et al. 2011) keyed by a hash of name and seed, with i as the
counter, mapped to values by integer arithmetic and scaled by a power of two. Every value is exactly
representable in its dtype, so no rounding mode, FMA or flush-to-zero setting can change it, and a
longer tensor begins with the shorter one.

Values are never -0.0, NaN or infinite. It refuses what it could not make exact: scales that are no
powers of two, bounds that the dtype cannot hold, and dtypes without zero or sign (float8_e8m0fnu,
packed float4).
"""

import dataclasses
import functools
import hashlib
import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from verify.errors import CaseError

Kind = Literal["normal", "uniform", "integers", "permutation"]
U64 = npt.NDArray[np.uint64]

_M32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_CHUNK = 1 << 14  # elements at a time: the buffers of a Philox call stay in the L2 cache
_FINE = 40  # random bits below the sum that makes "normal" bell-shaped
_UNSIGNED = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
_SIGNED = {torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}
_PARTS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def philox4x32(counter: npt.NDArray[Any], key: tuple[int, int], rounds: int = 10) -> U64:
    """Philox4x32: `counter` [n, 4] and two key words, all below 2**32, to uint64 [n, 4] of 32-bit
    words.

    Equal to Random123's known-answer vectors, by test.
    """
    c0, c1, c2, c3 = (counter[:, at].astype(np.uint64) for at in range(4))
    k0, k1 = key
    for _ in range(rounds):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (right >> _S32) ^ c1 ^ np.uint64(k0),
            right & _M32,
            (left >> _S32) ^ c3 ^ np.uint64(k1),
            left & _M32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=1)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A recipe for one tensor; what the bounds and the scale mean is said in `generate`."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    kind: Kind = "normal"
    low: int | None = None
    high: int | None = None
    scale: float = 1.0
    requires_grad: bool = False


def normal(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    requires_grad: bool = False,
) -> TensorSpec:
    """Bell-shaped values, standard deviation `scale` (a power of two) within 10 %."""
    return TensorSpec(shape, dtype, "normal", None, None, scale, requires_grad)


def uniform(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    low: int = -1,
    high: int = 1,
    scale: float = 1.0,
    requires_grad: bool = False,
) -> TensorSpec:
    """Values in [low, high) * scale, truncated to the significand of the dtype."""
    return TensorSpec(shape, dtype, "uniform", low, high, scale, requires_grad)


def integers(*shape: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> TensorSpec:
    """Integers low <= v < high, in an integer, bool or floating-point dtype."""
    return TensorSpec(shape, dtype, "integers", low, high)


def permutation(n: int, dtype: torch.dtype = torch.int64) -> TensorSpec:
    """The numbers 0 .. n - 1 in a random order (which is not prefix-stable)."""
    return TensorSpec((n,), dtype, "permutation")


def materialise(
    spec: TensorSpec, name: str, seed: int = 0, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """The tensor that a spec describes: a new leaf, contiguous."""
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    requires_grad = fields.pop("requires_grad")
    shape = fields.pop("shape")
    return generate(name, shape, seed=seed, device=device, **fields).requires_grad_(requires_grad)


def generate(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    kind: Kind = "normal",
    low: int | None = None,
    high: int | None = None,
    scale: float = 1.0,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """A tensor of `shape` whose bits depend on (name, seed, kind, bounds, scale, dtype) only.

    normal: the sum of eight 16-bit uniforms (Irwin-Hall, so |value| < 5.01 scale), centred, with
    finer bits below; standard deviation `scale` within 10 %. uniform: in [low, high) * scale,
    default [-1, 1). Of both the magnitude is truncated to the significand of the dtype, so bfloat16
    is the truncated float32 (and `high` can occur if it is not above 0). integers: low <= v < high
    by multiply-high of 64 bits (bias below (high - low) / 2**64), default [0, 2) for bool.
    permutation: of 0 .. n - 1, one dimension. Complex: real and imaginary parts are drawn
    separately. CaseError says which argument does not fit.
    """
    shape = tuple(shape)
    part = _PARTS.get(dtype, dtype)
    if kind not in ("normal", "uniform", "integers", "permutation"):
        raise CaseError(
            f"input {name!r}: kind {kind!r}; allowed: normal, uniform, integers, permutation"
        )
    if kind in ("normal", "uniform"):
        _check_scale(name, part, kind, low, high, scale)
    elif scale != 1.0:
        raise CaseError(f"input {name!r}: {kind} take no scale, {scale} was given")
    low, high = _bounds(name, shape, part, kind, low, high)
    key = _key(name, seed, kind)
    if kind == "permutation":
        order = np.argsort(_words64(key, 0, shape[0], 0), kind="stable")
        return torch.from_numpy(order.astype(np.int64)).to(dtype).to(device)
    count = math.prod(shape)
    columns = [torch.empty(count, dtype=part) for _ in range(2 if part is not dtype else 1)]
    for lane, column in enumerate(columns):
        for at in range(0, count, _CHUNK):
            num = min(_CHUNK, count - at)
            some = _chunk(key, at, num, lane, part, kind, low, high, scale)
            column[at : at + num] = some.to(part)
    flat = columns[0] if part is dtype else torch.view_as_complex(torch.stack(columns, dim=1))
    return flat.reshape(shape).to(device)


def _chunk(
    key: tuple[int, int],
    start: int,
    count: int,
    stream: int,
    dtype: torch.dtype,
    kind: Kind,
    low: int,
    high: int,
    scale: float,
) -> torch.Tensor:
    """Elements start .. start + count - 1 as float64, or as int64 bits for integer dtypes."""
    if kind == "normal":
        units, bits = _normal_units(_words(key, start, count, stream)), 19 + _FINE
    elif kind == "uniform":
        bits = 61 - max(abs(low), abs(high)).bit_length()
        draw = _mulhi(_words64(key, start, count, stream), (high - low) << bits)
        units = draw.astype(np.int64) + (low << bits)
    else:
        draw = _mulhi(_words64(key, start, count, stream), high - low)
        units, bits = (draw + np.uint64(low % 2**64)).view(np.int64), 0
        if dtype is torch.bool or not dtype.is_floating_point:
            return torch.from_numpy(units)
    units = _truncated(units, _precision(dtype))
    exponent = int(math.log2(scale)) - bits
    grid = math.frexp(torch.finfo(dtype).smallest_normal)[1] - _precision(dtype)
    if exponent < grid:  # the dtype's subnormal grid is coarser: truncate the magnitude to it
        mask = -1 << min(grid - exponent, 62)
        units = np.where(units < 0, -(-units & mask), units & mask)
    return torch.from_numpy(np.ldexp(units.astype(np.float64), exponent))


def _normal_units(words: U64) -> npt.NDArray[np.int64]:
    """Bell-shaped integers in units of 2**-59, int64 [n], from Philox words [n, 4]."""
    total = ((words & np.uint64(0xFFFF)) + (words >> np.uint64(16))).sum(axis=1, dtype=np.uint64)
    # 8 terms of variance 1/12 have a standard deviation of 0.8165; times 5/4 it is 1.0206
    units = 5 * (2 * total.astype(np.int64) - 8 * 0xFFFF)
    # The sum alone lies on a grid of 2**-19, where float32 adds exactly in any order: an unordered
    # reduction would not show. Bits that the sum has lost fill every significand.
    low = ((words[:, 0] << _S32) | words[:, 1]) * np.uint64(0x9E3779B97F4A7C15)
    low ^= ((words[:, 2] << _S32) | words[:, 3]) * np.uint64(0xD1342543DE82EF95)
    return (units << _FINE) + (low >> np.uint64(64 - _FINE)).astype(np.int64)


def _truncated(units: npt.NDArray[np.int64], precision: int) -> npt.NDArray[np.int64]:
    """The highest `precision` bits of each magnitude, the others cleared."""
    size = np.abs(units).view(np.uint64)
    smear = size.copy()
    for shift in (1, 2, 4, 8, 16, 32):
        smear |= smear >> np.uint64(shift)
    size &= ~(smear >> np.uint64(precision))
    return np.where(units < 0, -size.view(np.int64), size.view(np.int64))


def _key(name: str, seed: int, kind: str) -> tuple[int, int]:
    text = f"mok-verify inputs 1\0{kind}\0{seed}\0{name}".encode()
    hashed = hashlib.sha256(text).digest()
    return int.from_bytes(hashed[:4], "little"), int.from_bytes(hashed[4:8], "little")


def _words(key: tuple[int, int], start: int, count: int, stream: int) -> U64:
    index = np.arange(start, start + count, dtype=np.uint64)
    counter = np.zeros((count, 4), np.uint64)
    counter[:, 0], counter[:, 1], counter[:, 2] = index & _M32, index >> _S32, stream
    return philox4x32(counter, key)


def _words64(key: tuple[int, int], start: int, count: int, stream: int) -> U64:
    words = _words(key, start, count, stream)
    return (words[:, 0] << _S32) | words[:, 1]


def _mulhi(words: U64, n: int) -> U64:
    """floor(words * n / 2**64) for 1 <= n <= 2**64, in 32-bit limbs."""
    if n == 1 << 64:
        return words
    high, low = np.uint64(n >> 32), np.uint64(n & 0xFFFFFFFF)
    a, b = words >> _S32, words & _M32
    middle = a * low + (b * low >> _S32)
    other = b * high + (middle & _M32)
    return a * high + (middle >> _S32) + (other >> _S32)


@functools.cache
def _precision(dtype: torch.dtype) -> int:
    """Significand bits, the hidden one included: 24 for float32, 8 for bfloat16."""
    if dtype is torch.float8_e5m2fnuz:
        return 3  # torch.finfo gives an eps of 0.125, that of four bits
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _check_scale(
    name: str, dtype: torch.dtype, kind: str, low: int | None, high: int | None, scale: float
) -> None:
    no_zero = dtype in (torch.float8_e8m0fnu, getattr(torch, "float4_e2m1fn_x2", None))
    if not dtype.is_floating_point or no_zero:
        raise CaseError(
            f"input {name!r}: {kind} values in {dtype} are not made here; allowed: floating-point "
            "dtypes with zero and sign, complex ones, or kind='integers'"
        )
    if not scale > 0 or math.isinf(scale) or math.frexp(scale)[0] != 0.5:
        near = 2.0 ** round(math.log2(scale)) if 0 < scale < math.inf else 1.0
        raise CaseError(
            f"input {name!r}: scale {scale} is no power of two; take {near} for instance"
        )
    limits = torch.finfo(dtype)
    bound = (
        5.01
        if kind == "normal"
        else max(abs(-1 if low is None else low), 1 if high is None else abs(high))
    )
    if scale < limits.smallest_normal or bound * scale > limits.max:
        raise CaseError(
            f"input {name!r}: scale {scale} in {dtype}, with values to {bound} * scale: "
            f"the scale must be >= {limits.smallest_normal} and the values <= {limits.max}"
        )


def _bounds(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kind: str,
    low: int | None,
    high: int | None,
) -> tuple[int, int]:
    """The bounds in effect; CaseError unless the dtype holds every integer in them."""
    if kind == "permutation":
        if len(shape) != 1 or low is not None or high is not None:
            raise CaseError(
                f"input {name!r}: a permutation has one size and no bounds, got {shape}"
            )
        low, high = 0, shape[0]
        if high == 0:
            return 0, 0
    elif kind == "normal":
        if low is not None or high is not None:
            raise CaseError(f"input {name!r}: normal values take a scale, no bounds")
        return 0, 0
    elif kind == "uniform":
        low, high = -1 if low is None else low, 1 if high is None else high
    elif dtype is torch.bool:
        low, high = 0 if low is None else low, 2 if high is None else high
    if low is None or high is None or low >= high:
        raise CaseError(
            f"input {name!r}: {kind} need bounds low < high, got low={low}, high={high}"
        )
    if dtype is torch.bool:
        least, most = 0, 1
    elif dtype in _UNSIGNED:
        least, most = 0, 2 ** _UNSIGNED[dtype] - 1
    elif dtype in _SIGNED:
        least, most = -(2 ** (_SIGNED[dtype] - 1)), 2 ** (_SIGNED[dtype] - 1) - 1
    elif dtype.is_floating_point and dtype is not torch.float8_e8m0fnu:
        most = min(2 ** _precision(dtype), int(torch.finfo(dtype).max))
        least = -most
    else:
        raise CaseError(
            f"input {name!r}: {dtype} is not made here; allowed: bool, integers, floats"
        )
    if low < least or high - 1 > most:
        raise CaseError(
            f"input {name!r}: {kind} in [{low}, {high}) are not all exact in {dtype}, "
            f"which holds every integer in [{least}, {most}]"
        )
    return low, high
