"""Rules on the values and bits of differing elements, and what is left when none of them fires.

Each stays silent unless it holds for practically all of them: a wrong hint costs more than none.
"""

from collections import Counter
from collections.abc import Callable
from math import log2

import numpy as np
import torch

from verify.explanation.difference import Array, Pattern

Rule = Callable[[Pattern], str | None]
_MANY_ROWS = 1 << 17  # beyond which the order of rows is not looked at
_MANY_ELEMENTS = 1 << 27  # the same, in all rows together
_BLOCK = 1 << 22  # elements of rows that are widened to int64 at once
_LOSS_SCALE = 256  # the least power of two that is a scale, not a count of steps
_LEAST_RATIO = 1e-300  # of b / a and of a / b: beyond it one of them is no number
_SIGNIFICAND_BITS = {torch.float32: 23, torch.float64: 52, torch.bfloat16: 7}
_MOSTLY = 0.95  # of the elements that a rule speaks of


def _sign_only(p: Pattern) -> str | None:
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


def _one_bit(p: Pattern) -> str | None:
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


def _zeros(p: Pattern) -> str | None:
    if p.values is None or p.comparison.num_differing < 2 or _flushed(p):
        return None
    sides = ((p.names[1], 1, 0), (p.names[0], 0, 1))
    # a reference of zeros has nothing that could be missing
    for side, mine, theirs in sides[: 1 if p.context.get("condition") == "reference" else 2]:
        if np.all((p.values[mine] == 0) & (p.values[theirs] != 0)):
            return (
                f"the {side} has exact zeros in all {p.comparison.num_differing} places: "
                "not written, dropped or masked out there"
            )
    return None


def _flushed(p: Pattern) -> str | None:
    """Looks at bits only: in that mode subnormal operands count as zero here, too."""
    if p.dtype not in _SIGNIFICAND_BITS:
        return None
    magnitude = np.uint64((1 << (8 * p.width - 1)) - 1)
    smallest = np.uint64(1 << _SIGNIFICAND_BITS[p.dtype])  # bits of the smallest normal number
    for side, mine, theirs in ((p.names[1], 1, 0), (p.names[0], 0, 1)):
        zero, other = p.sampled[mine] & magnitude, p.sampled[theirs] & magnitude
        if np.all((zero == 0) & (other > 0) & (other < smallest)):
            return (
                f"the {side} has zeros for subnormal numbers in all {p.comparison.num_differing} "
                "places: flush-to-zero is on there (a library built with fast-math sets it for the "
                "thread when it is imported; torch.set_flush_denormal)"
            )
    return None


def _uninitialised(p: Pattern) -> str | None:
    fills = {int(byte) & 0xFF for byte in p.context.get("fill_bytes", ())}
    fills |= {byte ^ 0xFF for byte in fills}  # M_PERTURB fills new memory with the complement
    fills.discard(0)  # zeros are a rule of their own
    known = p.dtype.is_floating_point and p.width > 1
    for side, at in ((p.names[1], 1), (p.names[0], 0)):
        for byte in sorted(fills | ({0xFF} if known else set())):
            word = np.uint64(int.from_bytes(bytes([byte]) * p.width, "little"))
            share = float(np.mean(p.sampled[at] == word))
            if share >= 0.5:
                return (
                    f"the {side} holds the byte 0x{byte:02x} throughout in {100 * share:.3g} % "
                    "of the places: fill pattern, memory read or returned before it was written"
                )
    return _nans(p, least=0.5)


def _few_nans(p: Pattern) -> str | None:
    """Some NaN among other differences are told, but they explain only themselves."""
    told = _nans(p, least=0.0)
    return told if told is not None and _nans(p, least=0.5) is None else None


def _nans(p: Pattern, least: float) -> str | None:
    nans = p.comparison.classes.get("nan_vs_value", 0)
    if not nans or p.values is None or nans < least * p.comparison.num_differing:
        return None
    side = p.names[int(np.isnan(p.values[1]).sum() < np.isnan(p.values[0]).sum())]
    if p.context.get("condition") == "memory":
        return (
            f"{nans} NaN where the {side} has a number, as soon as new memory is not zero: memory "
            "read before it was written"
        )
    return (
        f"{nans} NaN where the {side} has a number: uninitialised "
        "memory, or 0/0 and inf-inf upstream; the memory condition tells them apart"
    )


def _ratio(p: Pattern) -> str | None:
    if p.values is None or p.comparison.num_differing < 4:
        return None
    x, y = p.values
    usable = np.isfinite(x) & np.isfinite(y) & (x != 0) & (y != 0)
    if not usable.all() or len(np.unique(np.abs(x))) < 4:
        return None
    eps = torch.finfo(p.dtype).eps if p.dtype.is_floating_point else 0.0
    slack = 4 * eps if eps < 0.01 else 0.0  # rounding hides any ratio in eight bits
    if "ratio" in p.context:
        known, slack = p.context["ratio"], 1e-3
        if known is None:
            return None
        ratio = float(known)
    else:
        with np.errstate(all="ignore"):  # garbage may be subnormal: no ratio then
            ratios = y / x
        if not (np.isfinite(ratios) & (ratios != 0)).all():
            return None
        ratio = float(np.median(ratios))
        if np.abs(ratios / ratio - 1).max() > slack + 1e-12 or abs(ratio - 1) <= 16 * eps:
            return None
    if not abs(ratio) > _LEAST_RATIO or not abs(1 / ratio) > _LEAST_RATIO:
        return None  # NaN as well
    if abs(ratio + 1) < 1e-12 + slack:  # signs: a rule of their own
        return None
    for side, factor in ((p.names[1], ratio), (p.names[0], 1 / ratio)):
        times = round(factor)
        if times >= 2 and abs(factor / times - 1) <= slack + 1e-9:
            if times >= _LOSS_SCALE and abs(log2(times) - round(log2(times))) <= 1e-6:
                return (
                    f"the {side} is 2^{round(log2(times))} times as large in all places: a loss "
                    "scale that was not divided out (a second moment holds its square)"
                )
            return (
                f"the {side} is {times}x in all places: accumulated {times} times instead of once "
                "(buffer not reset, warm-up or tuning run), or a scale left out on one side"
            )
    digits = 4 if "ratio" in p.context else 6
    inverse = f", 1 / {1 / ratio:.{digits}g}" if abs(ratio) < 1 else ""
    return (
        f"constant ratio {ratio:.{digits}g} ({p.names[1]} / {p.names[0]}{inverse}): a scale "
        "applied on one side only, or twice"
    )


def _row_order(p: Pattern) -> str | None:
    shape = p.mask.shape
    counts = [shape[0]] if len(shape) < 3 else [shape[0], int(np.prod(shape[:-1]))]
    for rows in counts:
        if rows > _MANY_ROWS or p.mask.size > _MANY_ELEMENTS:
            continue
        flat = [bits.reshape(rows, -1) for bits in p.bits]
        changed = np.flatnonzero(p.mask.reshape(rows, -1).any(axis=1))
        if len(changed) < (2 if flat[0].shape[1] > 1 else 4):
            continue
        base, other = (_row_keys(side, changed).tolist() for side in flat)
        # rows of one small number are in another order by chance
        if len(set(base)) < (2 if flat[0].shape[1] > 1 else 4):
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
        if flat[0].shape[1] < 2:
            continue
        known = {key: row for row, key in enumerate(_row_keys(flat[0], np.arange(rows)).tolist())}
        zero = int(_row_keys(np.zeros_like(flat[0][:1]), np.zeros(1, np.int64))[0])
        if all(key in known and key != zero for key in other):
            row = int(changed[0])
            return (
                f"every row that differs is a row of the {p.names[0]} from elsewhere (row {row} "
                f"holds row {known[other[0]]}), some twice and some missing: an index that is no "
                "bijection"
            )
    return None


def _row_keys(rows: Array, chosen: Array) -> Array:
    """One int64 for the content of each chosen row; in blocks, since that needs int64 copies."""
    weights = np.random.default_rng(1).integers(-(2**63), 2**63, rows.shape[1], np.int64) | 1
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    blocks = [chosen[start : start + step] for start in range(0, len(chosen), step)]
    return np.concatenate(
        [((rows[block].astype(np.int64) + 1) * weights).sum(axis=1) for block in blocks]
    )


_VARIED = {"threads": "number of threads", "vary": "setting", "sms": "number of multiprocessors"}


def _accumulation(p: Pattern) -> str | None:
    if p.values is None or p.ulps is None or p.comparison.num_differing < 4:
        return None
    finite = p.ulps >= 0
    if finite.mean() < _MOSTLY or np.median(p.ulps[finite]) > 16 or _steady(p) is not None:
        return None
    x, y = (values[finite] for values in p.values)
    if np.abs(x - y).max() > 64 * torch.finfo(p.dtype).eps * np.abs(x).max():
        return None
    for axis in (0, 1):
        hit = np.any(p.plane, axis=axis)
        if hit.sum() < 0.4 * min(len(hit), p.comparison.num_differing):
            return None
    cause = "unordered floating-point accumulation (atomics, index_add, scatter_add, split-K)"
    condition = p.context.get("condition")
    if condition == "golden":
        cause = "terms added in another order, or rounded at another place, than in the golden"
    if condition == "reference":
        cause = "rounded at another place, or accumulated in lower precision"
    if condition in ("batch", "threads", "schedule", "vary", "ep", "process", "sms"):
        varied = _VARIED.get(condition, condition)
        cause = f"another order of accumulation for another {varied} (tile, split or kernel)"
    median = int(np.median(p.ulps[finite]))
    return f"few ulp (median {median}), scattered over rows and columns: {cause}"


def _steady(p: Pattern) -> str | None:
    """Roundings differ in size and sign; a formula that differs is off by the same share."""
    if p.values is None or p.ulps is None or p.comparison.num_differing < 16:
        return None
    usable = (p.ulps >= 0) & (p.values[0] != 0)
    if usable.mean() < _MOSTLY:
        return None
    x, y = (values[usable] for values in p.values)
    with np.errstate(over="ignore", invalid="ignore"):
        share = (y - x) / x
    if not np.isfinite(share).all():
        return None
    middle = float(np.median(share))
    low, high = np.quantile(np.abs(share), (0.1, 0.9))
    one_sided = float(np.mean(np.sign(share) == np.sign(middle)))
    if one_sided < _MOSTLY or high > 2 * low or np.median(p.ulps[usable]) < 4:
        return None
    return (
        f"nearly the same share everywhere ({middle:.2g} of the value): an epsilon, a scale or"
        " another formula, not another order of additions"
    )


def _other_values(p: Pattern) -> str | None:
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


VALUE_RULES: tuple[Rule, ...] = (
    _sign_only,
    _one_bit,
    _flushed,
    _zeros,
    _uninitialised,
    _ratio,
    _row_order,
)
REST_RULES: tuple[Rule, ...] = (_accumulation, _steady, _other_values)
ASIDE_RULES: tuple[Rule, ...] = (_few_nans,)
