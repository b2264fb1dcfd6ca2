"""Strict parsing of which experts were chosen: nested lists, packed arrays, npy bytes.

All give integers [rows, layers, k], checked for shape and range before memory is taken for them.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.formats.values import LARGEST_ID, Spot, described, integers, is_list
from verify.onpolicy.samples import Routing

_PACKED = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float32", "float64")


_MOST_NUMBERS = 2**26  # of nested lists; null in place of a row would multiply without end
_WIDEST = 4096  # layers of a model, experts of a token
_ENVELOPE = "nrlre1:"  # NeMo-RL's: nrlre1:<dtype>:<rows>x<layers>x<k>:<base64>
_LONGEST_NPY_HEADER = 10_000


def array(value: Any, spot: Spot, field: str) -> NDArray[Any] | None:
    """Numbers from what formats write for them, or None with a problem.

    Nested lists of three levels; {"data": base64, "dtype", "shape"}; NeMo-RL's envelope
    "nrlre1:<dtype>:<rows>x<layers>x<k>:<base64>"; the bytes of a .npy file in base64, as vLLM's
    server gives them; an ndarray, which is returned as it is.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, Mapping):
        return packed(value.get("data"), value.get("dtype"), value.get("shape"), spot, field)
    if isinstance(value, str):
        if value.startswith(_ENVELOPE):
            return _unwrapped(value, spot, field)
        content = raw(value, spot, field)
        return None if content is None else npy(content, spot, field)
    found = _nested(value)
    if isinstance(found, str):
        spot.bad(field, f"{found}; it is a list of rows, each a list of layers, each a list of k")
        return None
    return found


def shaped(
    data: Any, sizes: tuple[int, int] | None, rows: int, spot: Spot, field: str
) -> NDArray[Any] | None:
    """SGLang's experts: base64 of int32 without a shape.

    sizes: (layers, k) where the file says them; rows: how many there should be, for the message.
    """
    content = raw(data, spot, field)
    if content is None:
        return None
    if sizes is None or min(sizes) < 1 or len(content) % (4 * sizes[0] * sizes[1]):
        count = len(content) // 4
        each = f", {rows} rows of {count // rows}" if rows > 0 and count % rows == 0 else ""
        given = "" if sizes is None else f", no multiple of {sizes[0]} times {sizes[1]}"
        what = 'add "routed_experts_shape": [layers, experts a token]'
        spot.bad(field, f"holds {count} numbers{each}{given}; it does not say its shape: {what}")
        return None
    found = np.frombuffer(content, dtype="<i4").reshape(-1, *sizes)
    return found.astype(np.int32)


def packed(data: Any, dtype: Any, shape: Any, spot: Spot, field: str) -> NDArray[Any] | None:
    """An array from base64 text (or bytes) in little-endian order, of a dtype and a shape."""
    if not isinstance(dtype, str) or dtype not in _PACKED:
        spot.bad(field, f"its dtype is {described(dtype)}; allowed are {', '.join(_PACKED)}")
        return None
    sizes = list(shape) if isinstance(shape, list | tuple) else None
    if sizes is None or len(sizes) > 4 or not all(_is_size(size) for size in sizes):
        spot.bad(field, f"its shape is {described(shape)}; it is a list of at most four sizes")
        return None
    content = raw(data, spot, field)
    if content is None:
        return None
    kind = np.dtype(dtype).newbyteorder("<")
    if math.prod(sizes) * kind.itemsize != len(content):
        spot.bad(field, f"holds {len(content)} bytes; {dtype} {sizes} has another number of them")
        return None
    return np.frombuffer(content, dtype=kind).reshape(sizes).astype(np.dtype(dtype))


def raw(data: Any, spot: Spot, field: str) -> bytes | None:
    """The bytes of base64 text."""
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    if not isinstance(data, str):
        spot.bad(field, f"its data is {described(data)}; it is base64 text")
        return None
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        spot.bad(field, f"its data is no base64 text: {error}")
        return None


def npy(content: bytes, spot: Spot, field: str) -> NDArray[Any] | None:
    """The array of a .npy file's bytes; objects, and shapes beyond the bytes, are refused."""
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, by_column, kind = np.lib.format.read_array_header_1_0(
                file, max_header_size=_LONGEST_NPY_HEADER
            )
        else:
            shape, by_column, kind = np.lib.format.read_array_header_2_0(
                file, max_header_size=_LONGEST_NPY_HEADER
            )
    except (ValueError, TypeError, SyntaxError, KeyError, RecursionError, MemoryError):
        what = "base64 of a .npy file, or an object with data, dtype and shape"
        spot.bad(field, f"holds {len(content)} bytes with no shape; it is {what}")
        return None
    rest = content[file.tell() :]
    if kind.kind not in "iuf" or math.prod(shape) * kind.itemsize != len(rest):
        given = f"{kind} {list(shape)[:4]} in {len(rest)} bytes"
        spot.bad(field, f"its .npy says {given}; they are integers, as many as its shape")
        return None
    order: Any = "F" if by_column else "C"
    found = np.frombuffer(rest, dtype=kind).reshape(shape, order=order)
    return found.astype(kind.newbyteorder("="))


def routing(
    value: Any,
    spot: Spot,
    field: str,
    *,
    start: int = -1,
    weights: Any = None,
    margins: Any = None,
    layers: Any = None,
) -> Routing | None:
    """Experts [rows, layers, k] from nested lists, a packed array or an ndarray of integers.

    weights likewise; margins [rows, layers]; those that do not fit the experts are left out.
    """
    if value is None:
        return None
    found = array(value, spot, field)
    if found is None:
        return None
    wrong = found.dtype.kind not in "iu" and found.size
    if wrong or found.ndim != 3 or max(found.shape[1:]) > _WIDEST:
        what = f"experts are integers [rows, layers, k], at most {_WIDEST} layers and k"
        spot.bad(field, f"is {described(found)}; {what}")
        return None
    if found.size and (int(found.min()) < -1 or int(found.max()) > LARGEST_ID):
        what = f"an expert is a number from 0 to {LARGEST_ID}, or -1 for none"
        spot.bad(field, f"holds {int(found.min())} to {int(found.max())}; {what}")
        return None
    experts: NDArray[np.integer[Any]]
    if not found.size or int(found.max()) < 2**15:
        experts = found.astype(np.int16)
    else:
        experts = found.astype(np.int32)
    return Routing(
        experts,
        start,
        _beside(weights, experts.shape, spot, f"{field}.weights"),
        _beside(margins, experts.shape[:2], spot, f"{field}.margins"),
        _layers(layers, experts.shape[1], spot, f"{field}.layers"),
    )


def _unwrapped(value: str, spot: Spot, field: str) -> NDArray[Any] | None:
    form = re.match(r"nrlre1:([a-z0-9]{1,10}):(\d{1,12})x(\d{1,6})x(\d{1,6}):", value)
    if form is None:
        allowed = "nrlre1:<dtype>:<rows>x<layers>x<k>:<base64>"
        spot.bad(field, f"begins with {value[:40]!r}; it is {allowed}")
        return None
    shape = [int(size) for size in form.groups()[1:]]
    return packed(value[form.end() :], form.group(1), shape, spot, field)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**40


def _nested(value: Any) -> NDArray[np.int64] | str:
    """int64 [rows, layers, k] of nested lists. null in place of a row or of a layer is -1."""
    if not is_list(value):
        return f"is {described(value)}"
    shape = next(
        ((len(row), len(row[0])) for row in value if is_list(row) and row and is_list(row[0])),
        None,
    )
    if shape is None:
        if value:
            return f"is {described(value)}, of which no row is a list of lists"
        return np.zeros((0, 0, 0), dtype=np.int64)
    layers, k = shape
    if len(value) * layers * k > _MOST_NUMBERS:
        most = f"at most {_MOST_NUMBERS} numbers are read from lists, pack them"
        return f"holds {len(value)} rows of {layers} times {k}, {most}"
    nothing = [-1] * k
    no_layers = [nothing] * layers
    rows = [no_layers if row is None else row for row in value]
    for at, row in enumerate(rows):
        if not is_list(row) or len(row) != layers:
            return f"row {at} is {described(row)}, others are lists of {layers}"
    flat = [nothing if layer is None else layer for layer in chain.from_iterable(rows)]
    for at, layer in enumerate(flat):
        if not is_list(layer) or len(layer) != k:
            return f"row {at // layers} holds {described(layer)}, others hold lists of {k}"
    kinds = set(map(type, chain.from_iterable(flat)))
    try:
        if not kinds - {int}:
            numbers = np.fromiter(chain.from_iterable(flat), np.int64, len(flat) * k)
            return numbers.reshape(len(value), layers, k)
    except OverflowError:
        return "holds a number beyond 64 bits"
    other = next(item for item in chain.from_iterable(flat) if type(item) is not int)
    return f"holds {described(other)}"


def _beside(
    value: Any, shape: tuple[int, ...], spot: Spot, field: str
) -> NDArray[np.float32] | None:
    """float32 numbers of the experts' shape, or None with a problem."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        found = packed(value.get("data"), value.get("dtype"), value.get("shape"), spot, field)
        if found is None:
            return None
    elif isinstance(value, np.ndarray):
        found = value
    else:
        found = _floats(value, shape)
    if found is None or found.shape != shape or found.dtype.kind not in "fiu":
        given = described(value if found is None else found)
        spot.bad(field, f"is {given}; it has numbers of the shape {list(shape)}")
        return None
    with np.errstate(over="ignore"):
        return found.astype(np.float32)


def _floats(value: Any, shape: tuple[int, ...]) -> NDArray[np.float64] | None:
    """Nested lists of exactly this shape, or None."""
    level: list[Any] = [value]
    for size in shape:
        if any(not is_list(item) or len(item) != size for item in level):
            return None
        level = list(chain.from_iterable(level))
    if set(map(type, level)) - {int, float}:
        return None
    try:
        return np.array(level, dtype=np.float64).reshape(shape)
    except OverflowError:
        return None


def _layers(value: Any, count: int, spot: Spot, field: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    found = integers(value)
    if isinstance(found, str) or len(found) != count:
        given = found if isinstance(found, str) else f"has {len(found)} entries"
        spot.bad(field, f"{given}; it is a list of {count} integers, the number of each layer")
        return None
    return tuple(int(layer) for layer in found)
