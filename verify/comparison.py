"""Compares two tensors bit by bit and says what differs: where, both values, both bit patterns, how
far.

The comparison is on integer views, never on values: `torch.equal` takes -0.0 for +0.0, NaN for
unequal to itself and a bfloat16 tensor for equal to its float32 copy. ULP distances are for pairs
of finite numbers only; pairs with NaN, infinities or two zeros are classified by one table
(`_PAIRS`). Strides are no difference: the logical elements count.

It refuses tolerances: a difference is a difference, however small, and is counted. Nothing compared
(zero elements) is `equal`, with `numel` 0 for the caller to judge. First argument: the base;
second: the other.
"""

import math
from dataclasses import asdict, dataclass, field

import torch

from verify.errors import UnsupportedError
from verify.hashing import integer_view

Scalar = bool | int | float | complex


@dataclass(frozen=True)
class _Format:
    """Magnitudes (bits without sign) of a float format; `lone_nan`: the bits of -0 are its NaN."""

    largest: int
    infinity: int = -1
    lone_nan: bool = False
    signed: bool = True


_FORMATS = {
    torch.float16: _Format(0x7BFF, 0x7C00),
    torch.bfloat16: _Format(0x7F7F, 0x7F80),
    torch.float32: _Format(0x7F7FFFFF, 0x7F800000),
    torch.float64: _Format(0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000),
    torch.float8_e5m2: _Format(0x7B, 0x7C),
    torch.float8_e4m3fn: _Format(0x7E),
    torch.float8_e5m2fnuz: _Format(0x7F, lone_nan=True),
    torch.float8_e4m3fnuz: _Format(0x7F, lone_nan=True),
    torch.float8_e8m0fnu: _Format(0xFE, signed=False),
}
_FORMATS[torch.complex32] = _FORMATS[torch.float16]
_FORMATS[torch.complex64] = _FORMATS[torch.float32]
_FORMATS[torch.complex128] = _FORMATS[torch.float64]

_ZERO, _FINITE, _INF, _NAN = range(4)
# What a pair with different bits is, by the classes of its two sides (in either order).
_PAIRS = {
    (_ZERO, _ZERO): "signed_zero",
    (_ZERO, _FINITE): "finite",
    (_FINITE, _FINITE): "finite",
    (_ZERO, _INF): "inf_vs_finite",
    (_FINITE, _INF): "inf_vs_finite",
    (_INF, _INF): "inf_sign",
    (_ZERO, _NAN): "nan_vs_value",
    (_FINITE, _NAN): "nan_vs_value",
    (_INF, _NAN): "nan_vs_value",
    (_NAN, _NAN): "nan_payload",
}
# Upper ends of the ULP distances that are counted together; the last bucket has no end.
_LIMITS = (-1, 0, *(1 << k for k in range(63)))
_LABELS = (
    "not finite",
    *("0", "1", "2"),
    *(f"{(1 << k) + 1}-{1 << (k + 1)}" for k in range(1, 63)),
)
_BLOCK = 1 << 22  # elements whose ULP distances are held at once, in int64
_CLASS_TEXT = {
    "signed_zero": "-0.0 vs 0.0 (value-equal, sign bit)",
    "inf_vs_finite": "infinity vs finite",
    "inf_sign": "infinities of opposite sign",
    "nan_vs_value": "NaN vs number",
    "nan_payload": "NaN payload (both NaN)",
}


@dataclass(frozen=True)
class TileMap:
    """Differing elements counted per tile of the last two dimensions, summed over all others.

    shape: (rows, columns) of those dimensions, (1, n) for a vector. tile: rows and columns of a
    tile, powers of two. counts: one tuple for each row of tiles.
    """

    shape: tuple[int, int]
    tile: tuple[int, int]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Comparison:
    """What comparing two tensors found. Pairs are (base, other); all numbers are of elements.

    problem: why the elements could not be compared (dtype, shape, layout), else "". first: index of
    the first differing element, with its two values and bit patterns. max_ulp: over pairs of finite
    floats, else None. classes: differing elements by kind of pair, for complex tensors differing
    parts. num_nan_equal: NaN with the same bits in both. value_equal: only bits differ (signs of
    zeros), or only the dtype.
    """

    name: str
    equal: bool
    problem: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    numel: int
    num_differing: int = 0
    first: tuple[int, ...] | None = None
    values: tuple[Scalar | None, Scalar | None] | None = None
    bits: tuple[str, str] | None = None
    first_ulp: int | None = None
    max_ulp: int | None = None
    classes: dict[str, int] = field(default_factory=dict)
    num_nan_equal: int = 0
    value_equal: bool = False
    tiles: TileMap | None = None

    def to_json(self) -> dict[str, object]:
        """Ready for `json.dumps`; non-finite and complex values as strings."""
        plain = asdict(self)
        if self.values is not None:
            plain["values"] = [_json_scalar(value) for value in self.values]
        return plain

    def describe(self) -> list[str]:
        """Lines for a person: what differs, the first place, and the special pairs."""
        name = self.name or "tensor"
        if self.problem:
            return [f"{name}: {self.problem}"]
        nans = f", {self.num_nan_equal} NaN in both (same bits)" if self.num_nan_equal else ""
        if self.numel == 0:
            return [f"{name}: 0 elements compared"]
        if self.equal:
            return [f"{name}: equal bits, {self.numel} elements{nans}"]
        share = 100 * self.num_differing / self.numel
        ulp = "" if self.max_ulp is None else f", at most {self.max_ulp} ulp"
        count = f"{self.num_differing} of {self.numel} elements differ ({share:.3g} %)"
        lines = [f"{name}: {count}{ulp}{nans}"]
        if self.first is not None and self.values is not None and self.bits is not None:
            at = ",".join(map(str, self.first))
            left, right = (
                bits if value is None else f"{value!r} ({bits})"
                for value, bits in zip(self.values, self.bits, strict=True)
            )
            far = "" if self.first_ulp is None else f", {self.first_ulp} ulp"
            lines.append(f"first: {name}[{at}] {left} vs {right}{far}")
        lines += [
            f"{count} x {_CLASS_TEXT[kind]}"
            for kind, count in self.classes.items()
            if kind in _CLASS_TEXT
        ]
        if self.value_equal:
            lines.append("equal as values: only the signs of zeros differ")
        return lines


def compare(a: torch.Tensor, b: torch.Tensor, name: str = "") -> Comparison:
    """Compare base `a` and other `b` bit by bit, on whatever devices they are.

    Different dtype, shape or layout is a finding, not an error. UnsupportedError for values without
    plain strided memory (`verify.hashing.integer_view` says what to do instead).
    """
    for t in (a, b):
        if not isinstance(t, torch.Tensor):
            raise UnsupportedError(
                f"{name or 'a value'}: compare takes tensors, not {type(t).__name__}"
            )
    dtypes = (str(a.dtype).removeprefix("torch."), str(b.dtype).removeprefix("torch."))
    shapes = (tuple(a.shape), tuple(b.shape))
    if problems := _problems(a, b):
        same = a.dtype != b.dtype and shapes[0] == shapes[1] and _equal_after_cast(a, b)
        text = "; ".join(problems) + (" (values equal after cast)" if same else "")
        return Comparison(name, False, text, dtypes, shapes, a.numel(), value_equal=same)
    left, right = _integer_views(a, b)
    if torch.equal(left, right):
        nans = _count_nan(a, left)
        return Comparison(
            name, True, "", dtypes, shapes, a.numel(), num_nan_equal=nans, value_equal=True
        )
    parts = left != right
    mask = parts.any(dim=-1) if a.is_complex() else parts
    first = _unravel(int(mask.reshape(-1).view(torch.uint8).argmax()), shapes[0])
    classes, max_ulp, first_ulp = _classify(left, right, parts, a.dtype, first)
    return Comparison(
        name,
        False,
        "",
        dtypes,
        shapes,
        a.numel(),
        num_differing=int(mask.sum()),
        first=first,
        values=(_value(a[first]), _value(b[first])),
        bits=(_hex(left[first]), _hex(right[first])),
        first_ulp=first_ulp,
        max_ulp=max_ulp,
        classes=classes,
        num_nan_equal=_count_nan(a, torch.where(parts, torch.zeros_like(left), left)),
        value_equal=set(classes) == {"signed_zero"},
        tiles=tile_map(mask),
    )


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where elements differ in bits: bool, the shape of `a`; ValueError as for `ulp_distance`."""
    if problems := _problems(a, b):
        raise ValueError("not comparable element by element: " + "; ".join(problems))
    left, right = _integer_views(a, b)
    return (left != right).any(dim=-1) if a.is_complex() else left != right


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Representable numbers between a and b: int64 of a's shape (complex: a last dimension of 2).

    -1 unless both are finite; +0 and -0 are 0 apart; at most 2**63 - 1. ValueError unless both have
    the same shape and floating-point dtype. From the ordered-integer map (Dawson 2012).
    """
    if (problems := _problems(a, b)) or a.dtype not in _FORMATS:
        raise ValueError("no ulp distance: " + ("; ".join(problems) or f"{a.dtype} is no float"))
    left, right = _integer_views(a, b)
    return _ulps(left, right, _FORMATS[a.dtype])


def ulp_histogram(
    a: torch.Tensor, b: torch.Tensor, *, differing_only: bool = False
) -> dict[str, int]:
    """Elements by ULP distance: "0", "1", "2", "3-4", "5-8" ..., "not finite"; no empty ones.

    differing_only: leaves out elements whose bits are equal; what is left at "0" are zeros of
    opposite sign. Complex elements count as two. ValueError as for `ulp_distance`.
    """
    if (problems := _problems(a, b)) or a.dtype not in _FORMATS:
        raise ValueError("no ulp distance: " + ("; ".join(problems) or f"{a.dtype} is no float"))
    width = 2 if a.is_complex() else 1
    left, right = (bits.reshape(-1, width) for bits in _integer_views(a, b))
    limits = torch.tensor(_LIMITS, device=left.device)
    counts = torch.zeros(len(_LIMITS) + 1, dtype=torch.int64, device=left.device)
    for start in range(0, len(left), _BLOCK):
        x, y = left[start : start + _BLOCK], right[start : start + _BLOCK]
        if differing_only:
            apart = (x != y).any(dim=1)
            x, y = x[apart], y[apart]
        far = _ulps(x, y, _FORMATS[a.dtype]).reshape(-1)
        counts += torch.bincount(torch.bucketize(far, limits), minlength=len(counts))
    return {label: count for label, count in zip(_LABELS, counts.tolist(), strict=True) if count}


def tile_map(mask: torch.Tensor, max_side: int = 16) -> TileMap:
    """Counts of True per tile of the last two dimensions, at most `max_side` tiles each way.

    `mask` is bool of any shape. The tile is the smallest power of two that keeps to the limit.
    """
    rows = mask.shape[-2] if mask.dim() > 1 else 1
    columns = mask.shape[-1] if mask.dim() > 0 else 1
    if mask.numel() == 0:
        return TileMap((rows, columns), (1, 1), ())
    flat = mask.reshape(-1, rows, columns).sum(dim=0)
    high, wide = (1 << (-(-size // max_side) - 1).bit_length() for size in (rows, columns))
    padded = torch.nn.functional.pad(flat, (0, -columns % wide, 0, -rows % high))
    tiles = padded.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).sum(dim=(1, 3))
    return TileMap((rows, columns), (high, wide), tuple(map(tuple, tiles.tolist())))


def _problems(a: torch.Tensor, b: torch.Tensor) -> list[str]:
    pairs = (
        ("layout", a.layout, b.layout),
        ("dtype", a.dtype, b.dtype),
        ("shape", tuple(a.shape), tuple(b.shape)),
    )
    return [
        f"{what} {str(x).removeprefix('torch.')} vs {str(y).removeprefix('torch.')}"
        for what, x, y in pairs
        if x != y
    ]


def _integer_views(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = integer_view(a), integer_view(b)
    return (left, right) if left.device == right.device else (left.cpu(), right.cpu())


def _equal_after_cast(a: torch.Tensor, b: torch.Tensor) -> bool:
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    try:
        x, y = a.detach().cpu().to(wide), b.detach().cpu().to(wide)
    except (RuntimeError, NotImplementedError):  # packed and bits dtypes have no values
        return False
    return bool(((x == y) | ((x != x) & (y != y))).all())


def _magnitude(bits: torch.Tensor, form: _Format) -> torch.Tensor:
    if not form.signed:
        return bits.to(torch.int64) & 0xFF
    return bits & torch.iinfo(bits.dtype).max


def _is_nan(bits: torch.Tensor, form: _Format) -> torch.Tensor:
    if form.lone_nan:
        return bits == torch.iinfo(bits.dtype).min
    return _magnitude(bits, form) > max(form.largest, form.infinity)


def _is_finite(bits: torch.Tensor, form: _Format) -> torch.Tensor:
    finite = _magnitude(bits, form) <= form.largest
    return finite & ~_is_nan(bits, form) if form.lone_nan else finite


def _classes(bits: torch.Tensor, form: _Format) -> torch.Tensor:
    size = _magnitude(bits, form)
    found = torch.full(bits.shape, _FINITE, device=bits.device)
    if form.signed:
        found[size == 0] = _ZERO
    if form.infinity >= 0:
        found[size == form.infinity] = _INF
    found[_is_nan(bits, form)] = _NAN
    return found


def _ulps(left: torch.Tensor, right: torch.Tensor, form: _Format) -> torch.Tensor:
    finite = _is_finite(left, form) & _is_finite(right, form)
    sizes = [_magnitude(bits, form).to(torch.int64) for bits in (left, right)]
    same_sign = (left < 0) == (right < 0) if form.signed else torch.ones_like(finite)
    across = sizes[0] + sizes[1]  # wraps for two large float64 of opposite sign
    across = torch.where(across < 0, torch.iinfo(torch.int64).max, across)
    return torch.where(finite, torch.where(same_sign, (sizes[0] - sizes[1]).abs(), across), -1)


def _classify(
    left: torch.Tensor,
    right: torch.Tensor,
    parts: torch.Tensor,
    dtype: torch.dtype,
    first: tuple[int, ...],
) -> tuple[dict[str, int], int | None, int | None]:
    """Counts of differing pairs by class, the largest ULP distance, and the first element's."""
    form = _FORMATS.get(dtype)
    if form is None:
        return {"finite": int(parts.sum())}, None, None
    x, y = left[parts], right[parts]
    codes = _classes(x, form), _classes(y, form)
    pairs = torch.minimum(*codes) * 4 + torch.maximum(*codes)
    counts = torch.bincount(pairs, minlength=16).tolist()
    found: dict[str, int] = {}
    for (low, high), kind in _PAIRS.items():
        if counts[low * 4 + high]:
            found[kind] = found.get(kind, 0) + counts[low * 4 + high]
    far, here = int(_ulps(x, y, form).max()), int(_ulps(left[first], right[first], form).max())
    return found, far if far >= 0 else None, here if here >= 0 else None


def _count_nan(values: torch.Tensor, bits: torch.Tensor) -> int:
    form = _FORMATS.get(values.dtype)
    if form is None or bits.numel() == 0:
        return 0
    if values.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        top = bits.view(values.dtype).amax()  # NaN if any is; needs no memory, so it goes first
        if not bool(top.isnan()):
            return 0
    nans = _is_nan(bits, form)
    return int((nans.any(dim=-1) if values.is_complex() else nans).sum())


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


def _value(element: torch.Tensor) -> Scalar | None:
    try:
        value = element.detach().item()
    except (RuntimeError, NotImplementedError):  # packed and bits dtypes have no values
        return None
    return value if isinstance(value, bool | int | float | complex) else None


def _hex(bits: torch.Tensor) -> str:
    size = bits.element_size()
    parts = bits.reshape(-1).tolist()
    return ",".join(f"0x{part & ((1 << 8 * size) - 1):0{2 * size}x}" for part in parts)


def _json_scalar(value: Scalar | None) -> Scalar | str | None:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
