"""The names that a pickle of torch.save may use, and what each may be given.

Tensors, numpy arrays of numbers and plain containers; anything else is code, and refused by name.
It refuses tensors that reach beyond their storage, too: all is told from stand-ins for the
arguments, before anything is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from verify.rendering.escaping import clipped

STORAGES: Mapping[str, int] = MappingProxyType(  # bytes of an element
    {
        "torch.DoubleStorage": 8,
        "torch.FloatStorage": 4,
        "torch.HalfStorage": 2,
        "torch.BFloat16Storage": 2,
        "torch.LongStorage": 8,
        "torch.IntStorage": 4,
        "torch.ShortStorage": 2,
        "torch.CharStorage": 1,
        "torch.ByteStorage": 1,
        "torch.BoolStorage": 1,
        "torch.storage.UntypedStorage": 1,
    }
)
_WIDE = {  # dtypes that torch.save names beside an untyped storage; bytes of an element
    "torch.float64": 8,
    "torch.float32": 4,
    "torch.float16": 2,
    "torch.bfloat16": 2,
    "torch.int64": 8,
    "torch.int32": 4,
    "torch.int16": 2,
    "torch.int8": 1,
    "torch.uint64": 8,
    "torch.uint32": 4,
    "torch.uint16": 2,
    "torch.uint8": 1,
    "torch.bool": 1,
    "torch.float8_e4m3fn": 1,
    "torch.float8_e5m2": 1,
}
NO_BYTES = "builtins.bytes"  # of an empty array; other bytes are encoded text
ARRAY, DTYPE = "numpy.ndarray", "numpy.dtype"
RECONSTRUCT = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
SCALAR = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")


class Refused(ValueError):
    """The file is not read. The message says what it holds, what is allowed and what to do."""


@dataclass(frozen=True)
class Global:
    name: str


@dataclass(frozen=True)
class Storage:
    key: str
    size: int  # bytes
    width: int  # bytes of an element


class Kind:
    """What stands for a value of which only the kind matters."""

    def __init__(self, name: str) -> None:
        self.name = name


VALUE, LIST, DICT, NDARRAY, TENSOR = map(
    Kind, ("a number or text", "a list", "a dict", "a numpy array", "a tensor")
)
NUMPY_DTYPE, BYTES = Kind("a numpy dtype"), Kind("bytes")


def allowed(name: str) -> Global:
    """The name as a stand-in. Raises Refused unless it is on the lists here."""
    if name in CALLS or name in STORAGES or name in _WIDE or name == ARRAY:
        return Global(name)
    raise foreign(name, "it holds")


def foreign(name: str, does: str) -> Refused:
    """Why a name is not read, and what to do."""
    return Refused(
        f"{does} {clipped(name, 120)}, and only tensors, numpy arrays of numbers, numbers, texts, "
        "lists and dicts are read, since anything else is code; where it was written, make plain "
        "values of it or leave it out, and save again"
    )


def _tensor(name: str, given: tuple[Any, ...]) -> Kind:
    typed = name.endswith("_v3")
    if len(given) not in ((7, 8) if typed else (6, 7)) or not isinstance(given[0], Storage):
        raise Refused("its pickle makes a tensor in another way than torch.save does")
    storage, offset, shape, strides = given[:4]
    width = storage.width
    if typed:
        if not isinstance(given[6], Global) or given[6].name not in _WIDE:
            raise Refused("its pickle makes a tensor of a dtype that is not read")
        width = _WIDE[given[6].name]
    numbers = (offset, *shape, *strides) if _pair(shape, strides) else (None,)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise Refused("its pickle makes a tensor whose shape or strides are no sizes")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last + 1) * width > storage.size:
        raise Refused(
            f"a tensor of shape {clipped(list(shape), 80)} reaches {clipped(last + 1, 30)} elements"
            f" into the storage {clipped(storage.key, 40)!r}, which has {storage.size // width}"
        )
    return TENSOR


def _pair(shape: Any, strides: Any) -> bool:
    both = isinstance(shape, tuple) and isinstance(strides, tuple)
    return both and len(shape) == len(strides) and len(shape) <= 64


def _parameter(name: str, given: tuple[Any, ...]) -> Kind:
    if len(given) != 3 or given[0] is not TENSOR:
        raise Refused("its pickle makes a parameter of something that is no tensor")
    return TENSOR


def _encode(name: str, given: tuple[Any, ...]) -> Kind:
    if len(given) != 2 or not isinstance(given[0], str) or given[1] != "latin1":
        raise Refused("its pickle calls _codecs.encode for another purpose than bytes")
    return BYTES


def _no_bytes(name: str, given: tuple[Any, ...]) -> Kind:
    if given:
        raise Refused("its pickle makes bytes in another way than pickle does")
    return BYTES


def _ordered(name: str, given: tuple[Any, ...]) -> Kind:
    if given:
        raise Refused("its pickle makes an OrderedDict in another way than pickle does")
    return DICT


def _set(name: str, given: tuple[Any, ...]) -> Kind:
    if len(given) != 1 or given[0] is not LIST:
        raise Refused("its pickle makes a set in another way than pickle does")
    return VALUE


def _size(name: str, given: tuple[Any, ...]) -> Kind:
    if len(given) != 1 or not isinstance(given[0], tuple):
        raise Refused("its pickle makes a torch.Size in another way than torch does")
    return VALUE


def _array(name: str, given: tuple[Any, ...]) -> Kind:
    if len(given) != 3 or given[0] != Global(ARRAY) or given[1] != (0,):
        raise Refused("its pickle makes a numpy array in another way than numpy does")
    return NDARRAY


def _dtype(name: str, given: tuple[Any, ...]) -> Kind:
    if len(given) != 3 or not isinstance(given[0], str):
        raise Refused("its pickle makes a numpy dtype in another way than numpy does")
    return NUMPY_DTYPE


def _scalar(name: str, given: tuple[Any, ...]) -> Kind:
    if len(given) != 2 or given[0] is not NUMPY_DTYPE or given[1] is not BYTES:
        raise Refused("its pickle makes a numpy scalar that is no number")
    return VALUE


CALLS: Mapping[str, Callable[[str, tuple[Any, ...]], Kind]] = MappingProxyType(
    {
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "torch.Size": _size,
        "collections.OrderedDict": _ordered,
        "builtins.set": _set,
        "_codecs.encode": _encode,
        NO_BYTES: _no_bytes,
        DTYPE: _dtype,
        **dict.fromkeys(RECONSTRUCT, _array),
        **dict.fromkeys(SCALAR, _scalar),
    }
)
