"""Says what a pattern of differing elements suggests: the likely cause, with the evidence for it.

Each rule below looks at one property of the elements that differ (their bits, their values, or
where they are) and stays silent unless it holds for practically all of them, since a wrong hint
costs more than none. Rules on values come first, rules on places second; unordered accumulation and
"other values" are what is left when nothing about the values is special. It refuses to decide
anything: hints never change a verdict.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verify.comparison import Comparison, differing, ulp_distance
from verify.hashing import integer_view

Array = npt.NDArray[Any]

_SAMPLE = 1 << 18  # differing numbers that rules on values look at, evenly spread
_TILES = tuple(1 << k for k in range(10, 2, -1))
_MANY_ROWS = 1 << 17  # rows that differ, beyond which their order is not looked at
_LONG_PERIOD = 4096
_OFFSET_BITS = (15, 16, 31, 32)


@dataclass(frozen=True)
class _Pattern:
    """The differing elements. Sampled arrays are 1-D; complex numbers count as two."""

    comparison: Comparison
    context: Mapping[str, Any]
    dtype: torch.dtype
    mask: Array  # bool, the tensor's shape (at least 1-D)
    bits: tuple[Array, Array]  # integer views of the whole tensors
    sampled: tuple[Array, Array]  # uint64 bits of the sample, without sign extension
    values: tuple[Array, Array] | None  # float64 of the sample
    ulps: Array | None  # int64 of the sample, -1 where not finite

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return int(self.bits[0].dtype.itemsize)

    @property
    def plane(self) -> Array:
        """The mask as rows (all leading dimensions) by columns (the last one)."""
        return self.mask.reshape(-1, self.mask.shape[-1])


def suggest(
    comparison: Comparison,
    a: torch.Tensor,
    b: torch.Tensor,
    context: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """What the difference between base `a` and other `b` suggests; () when equal or not comparable.

    context (all optional): `condition`, what was varied (`batch`, `threads`, `schedule` ...);
    `fill_bytes`, the bytes that memory was poisoned with; `dim0`, what the first dimension counts
    ("expert", "row").
    """
    if comparison.problem or comparison.num_differing == 0:
        return ()
    pattern = _pattern(comparison, a, b, context or {})
    by_value = [text for rule in _VALUE_RULES if (text := rule(pattern))]
    by_place = [text for rule in _PLACE_RULES if (text := rule(pattern))]
    rest = [] if by_value else [text for rule in _REST_RULES if (text := rule(pattern))]
    return (*by_value, *by_place, *rest)


def _pattern(
    comparison: Comparison, a: torch.Tensor, b: torch.Tensor, context: Mapping[str, Any]
) -> _Pattern:
    mask = differing(a, b).cpu()
    left, right = integer_view(a).cpu(), integer_view(b).cpu()
    flat = torch.nonzero((left != right).reshape(-1)).reshape(-1)
    flat = flat[:: max(1, len(flat) // _SAMPLE)]
    x, y = left.reshape(-1)[flat], right.reshape(-1)[flat]
    part = torch.view_as_real(a.detach().resolve_conj()).dtype if a.is_complex() else a.dtype
    values = None
    if part.is_floating_point or part in _INTEGERS:
        try:
            values = x.view(part).double().numpy(), y.view(part).double().numpy()
        except (RuntimeError, NotImplementedError):  # packed dtypes have no values
            values = None
    floats = values is not None and part.is_floating_point
    unsigned = np.dtype(f"u{left.element_size()}")
    return _Pattern(
        comparison,
        context,
        part,
        np.atleast_1d(mask.numpy()),
        (np.atleast_1d(left.numpy()), np.atleast_1d(right.numpy())),
        (x.numpy().view(unsigned).astype(np.uint64), y.numpy().view(unsigned).astype(np.uint64)),
        values,
        ulp_distance(x.view(part), y.view(part)).numpy() if floats else None,
    )


_INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
)


def _sign_only(p: _Pattern) -> str | None:
    if p.values is None or p.comparison.value_equal:
        return None
    if p.dtype.is_floating_point:
        sign = np.uint64(1 << (8 * p.width - 1))
        flipped = bool(np.all((p.sampled[0] ^ p.sampled[1]) == sign))
    else:
        flipped = p.comparison.num_differing > 3 and bool(np.all(p.values[0] == -p.values[1]))
    if not flipped:
        return None
    return "same magnitude, opposite sign: a negation, abs() or sign bit, not rounding"


def _one_bit(p: _Pattern) -> str | None:
    xor = np.unique(p.sampled[0] ^ p.sampled[1])
    bit = int(xor[0])
    if len(xor) != 1 or bit & (bit - 1) or p.dtype is torch.bool:
        return None
    top = 8 * p.width - 1
    if p.dtype.is_floating_point and bit == 1 << top:
        return None  # signs: a rule of their own
    # a difference of one in the last place is one bit, too: that is rounding
    num = p.comparison.num_differing
    if bit == 1 or (num < 8 and (bit < 16 or not p.dtype.is_floating_point)):
        return None
    x, y = p.sampled
    if (num > 1 and len(np.unique(x)) == 1) or not (x.any() and y.any()):
        return None  # one value replaced by another one
    return (
        f"one bit flipped, the same in all {num} (xor 0x{bit:0{2 * p.width}x}, bit "
        f"{bit.bit_length() - 1}): a fault of memory or device, not of the algorithm"
    )


def _zeros(p: _Pattern) -> str | None:
    if p.values is None or p.comparison.num_differing < 2:
        return None
    for side, mine, theirs in (("other", 1, 0), ("base", 0, 1)):
        if np.all((p.values[mine] == 0) & (p.values[theirs] != 0)):
            return (
                f"the {side} has exact zeros in all {p.comparison.num_differing} places: "
                "not written, dropped or masked out there"
            )
    return None


def _uninitialised(p: _Pattern) -> str | None:
    fills = {int(byte) & 0xFF for byte in p.context.get("fill_bytes", ())}
    fills |= {byte ^ 0xFF for byte in fills}  # M_PERTURB fills new memory with the complement
    fills.discard(0)  # zeros are a rule of their own
    known = p.dtype.is_floating_point and p.width > 1
    for side, at in (("other", 1), ("base", 0)):
        for byte in sorted(fills | ({0xFF} if known else set())):
            word = np.uint64(int.from_bytes(bytes([byte]) * p.width, "little"))
            share = float(np.mean(p.sampled[at] == word))
            if share >= 0.5:
                return (
                    f"the {side} holds the byte 0x{byte:02x} throughout in {100 * share:.3g} % "
                    "of the places: fill pattern, memory read or returned before it was written"
                )
    nans = p.comparison.classes.get("nan_vs_value", 0)
    if not nans or p.values is None:
        return None
    side = "base" if np.isnan(p.values[1]).sum() >= np.isnan(p.values[0]).sum() else "other"
    return (
        f"{nans} NaN where the {side} has a number: uninitialised "
        "memory, or 0/0 and inf-inf upstream; the memory condition tells them apart"
    )


def _ratio(p: _Pattern) -> str | None:
    if p.values is None or p.comparison.num_differing < 4:
        return None
    x, y = p.values
    usable = np.isfinite(x) & np.isfinite(y) & (x != 0) & (y != 0)
    if not usable.all() or len(np.unique(np.abs(x))) < 4:
        return None
    ratios = y / x
    ratio = float(np.median(ratios))
    eps = torch.finfo(p.dtype).eps if p.dtype.is_floating_point else 0.0
    slack = 4 * eps if eps < 0.01 else 0.0  # rounding hides any ratio in eight bits
    if np.abs(ratios / ratio - 1).max() > slack + 1e-12 or abs(ratio - 1) <= 16 * eps:
        return None
    if abs(ratio + 1) < 1e-12:  # signs: a rule of their own
        return None
    for side, factor in (("other", ratio), ("base", 1 / ratio)):
        times = round(factor)
        if times >= 2 and abs(factor / times - 1) <= slack + 1e-9:
            return (
                f"the {side} is {times}x in all places: accumulated {times} times instead of once "
                "(buffer not reset, warm-up or tuning run), or a scale left out on one side"
            )
    return f"constant ratio {ratio:.6g} (other / base): a scale applied on one side only, or twice"


def _row_order(p: _Pattern) -> str | None:
    shape = p.mask.shape
    counts = [shape[0]] if len(shape) < 3 else [shape[0], int(np.prod(shape[:-1]))]
    for rows in counts:
        flat = [bits.reshape(rows, -1) for bits in p.bits]
        changed = np.flatnonzero(np.any(flat[0] != flat[1], axis=1))
        if not 2 <= len(changed) <= _MANY_ROWS or (len(changed) < 4 and flat[0].shape[1] < 2):
            continue
        keys = [_row_keys(side) for side in flat]
        base, other = (key[changed].tolist() for key in keys)
        if len(set(base)) < 2:
            continue
        if Counter(base) == Counter(other):
            where = dict(zip(base, changed.tolist(), strict=True))
            placed = zip(changed.tolist(), other, strict=True)
            moves = {(row - where[key]) % rows for row, key in placed}
            single = len(moves) == 1 and len(where) == len(base)
            how = f", all moved by {moves.pop()}" if single else ""
            return (
                f"the {len(changed)} rows that differ are the same rows in another order{how}: "
                "order or mapping of rows, not their values"
            )
        known = {key: row for row, key in enumerate(keys[0].tolist())}
        zero = int(_row_keys(np.zeros_like(flat[0][:1]))[0])
        if flat[0].shape[1] > 1 and all(key in known and key != zero for key in other):
            row = int(changed[0])
            return (
                f"every row that differs is a row of the base from elsewhere (row {row} holds row "
                f"{known[other[0]]}), some twice and some missing: an index that is no bijection"
            )
    return None


def _row_keys(rows: Array) -> Array:
    weights = np.random.default_rng(1).integers(-(2**63), 2**63, rows.shape[1], np.int64)
    return ((rows.astype(np.int64) + 1) * (weights | 1)).sum(axis=1)


def _tail(p: _Pattern) -> str | None:
    for name, axis in (("columns" if p.mask.ndim > 1 else "elements", 1), ("rows", 0)):
        hit = np.any(p.plane, axis=1 - axis)
        size, first = len(hit), int(np.argmax(hit))
        dense = np.mean(p.plane[:, first:] if axis else p.plane[first:])
        if first == 0 or dense < 0.5 or not hit[first:].all():
            continue
        fitting = [t for t in _TILES if first % t == 0 and size - first < t]
        if fitting:
            return (
                f"only {name} {first}..{size - 1} of {size} differ, and {first} is the last "
                f"multiple of {fitting[0]}: a tail tile not launched, not written or not masked"
            )
    return None


def _from_row_on(p: _Pattern) -> str | None:
    what, plane = ("row", p.plane) if p.mask.ndim > 1 else ("element", p.mask.reshape(-1, 1))
    hit = np.any(plane, axis=1)
    rows, columns = plane.shape
    first = int(np.argmax(hit))
    if first == 0 or rows - first < 2 or not hit[first:].all() or np.mean(plane[first:]) < 0.5:
        return None
    text = f"every {what} from {first} on differs (of {rows}), those before are equal"
    for bits in _OFFSET_BITS:
        if (first - 1) * columns < 1 << bits <= (first + 1) * columns:
            return f"{text}; offset {first} * {columns} passes 2**{bits}: overflow of an offset"
    if first & (first - 1) == 0:
        return f"{text}; {first} is a power of two: only the first tile was processed"
    return f"{text}: a bound or an offset goes wrong there"


def _periodic(p: _Pattern) -> str | None:
    hit = np.any(p.plane, axis=0)
    size = len(hit)
    if hit.all() or hit.sum() < 3 or size < 12:
        return None
    start = hit[: 4 * _LONG_PERIOD]  # most periods fail here, whatever the size
    for period in range(2, min(_LONG_PERIOD, size // 3) + 1):
        if not np.array_equal(start[period:], start[:-period]):
            continue
        if np.array_equal(hit[period:], hit[:-period]):
            phases = np.flatnonzero(hit[:period]).tolist()
            what = "columns" if p.mask.ndim > 1 else "elements"
            shown = ", ".join(map(str, phases[:8])) + (" ..." if len(phases) > 8 else "")
            return (
                f"only {what} c with c mod {period} in {{{shown}}} differ: period {period}, "
                "a lane, vector width or interleaving"
            )
    return None


def _one_index(p: _Pattern) -> str | None:
    if p.mask.ndim < 2 or p.mask.shape[0] ** min(p.comparison.num_differing - 1, 9) < 100:
        return None  # one index only, or a coincidence of more than 1 %
    hit = np.flatnonzero(np.any(p.mask.reshape(p.mask.shape[0], -1), axis=1))
    if len(hit) != 1:
        return None
    what = p.context.get("dim0", "index of dim 0")
    return (
        f"all {p.comparison.num_differing} lie in {what} {int(hit[0])} of {p.mask.shape[0]}: "
        "look at what is special about it (its size, its rank, its inputs)"
    )


def _accumulation(p: _Pattern) -> str | None:
    if p.values is None or p.ulps is None or p.comparison.num_differing < 4:
        return None
    x, y = p.values
    if np.any(p.ulps < 0) or np.median(p.ulps) > 16:
        return None
    if np.abs(x - y).max() > 64 * torch.finfo(p.dtype).eps * np.abs(x).max():
        return None
    for axis in (0, 1):
        hit = np.any(p.plane, axis=axis)
        if hit.sum() < 0.4 * min(len(hit), p.comparison.num_differing):
            return None
    cause = "unordered floating-point accumulation (atomics, index_add, scatter_add, split-K)"
    condition = p.context.get("condition")
    if condition in ("batch", "threads", "schedule", "vary", "ep"):
        cause = f"another order of accumulation for another {condition} (tile, split or kernel)"
    return f"few ulp (median {int(np.median(p.ulps))}), scattered over rows and columns: {cause}"


def _other_values(p: _Pattern) -> str | None:
    if p.values is None or p.comparison.num_differing < max(4, 0.9 * p.comparison.numel):
        return None
    x, y = p.values
    finite = np.isfinite(x) & np.isfinite(y)
    size = np.maximum(np.abs(x), np.abs(y))[finite]
    if len(size) < 4 or np.median(np.abs(x - y)[finite] / np.maximum(size, 1e-300)) < 0.3:
        return None
    cause = "other values altogether (seed, inputs, weights or mapping), not rounding"
    if p.context.get("condition") == "memory":
        cause = "memory read or returned before it was written; the base may hold such bytes too"
    if p.context.get("condition") == "history":
        cause = "state that earlier calls left behind (a counter, a cache, a buffer)"
    return f"practically everything differs, by about the size of the values: {cause}"


_Rule = Callable[[_Pattern], str | None]
_VALUE_RULES: Iterable[_Rule] = (_sign_only, _one_bit, _zeros, _uninitialised, _ratio, _row_order)
_PLACE_RULES: Iterable[_Rule] = (_tail, _from_row_on, _periodic, _one_index)
_REST_RULES: Iterable[_Rule] = (_accumulation, _other_values)
