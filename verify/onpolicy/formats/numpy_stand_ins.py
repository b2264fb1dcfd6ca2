"""What takes numpy's place while a file of torch.save is read: arrays of numbers, and no more.

numpy's own functions accept whatever a file gives them: any size, any dtype, any state. These stand
under their names for torch.load, check what they are given, and keep why it is no array.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.onpolicy.formats import torch_globals
from verify.rendering.escaping import clipped

_NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")


class DType:
    """Stands in numpy.dtype's place: the name of a dtype of numbers, or why it is none."""

    def __init__(self, code: str, align: object = False, copy: object = True) -> None:
        self.code, self.order = code, "<"

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = "<" if state[1] == "=" else state[1]

    def made(self) -> np.dtype[Any] | None:
        if not _NUMBERS.fullmatch(self.code):
            return None
        return np.dtype(self.code.lstrip("<>|=")).newbyteorder(self.order)  # type: ignore[arg-type]


class Array:
    """Stands in numpy.ndarray's place. value: the numbers, or None and `why` there are none."""

    def __init__(self) -> None:
        self.value: NDArray[Any] | None = None
        self.why = "a numpy array without content"

    def __setstate__(self, state: Any) -> None:
        try:
            _, shape, dtype, fortran, content = state
            kind = dtype.made()
            if kind is None:
                self.why = f"a numpy array of dtype {clipped(dtype.code, 40)!r}, not of numbers"
                return
            if math.prod(shape) * kind.itemsize != len(content):
                self.why = f"a numpy array whose content is not of its shape: {len(content)} bytes"
                return
            flat: NDArray[Any] = np.frombuffer(content, dtype=kind)
            self.value = flat.reshape(shape, order="F" if fortran else "C")
        except (TypeError, ValueError, AttributeError):
            self.why = "a numpy array in no form that numpy writes"


def _reconstruct(kind: object, shape: object, code: object) -> Array:
    return Array()


def _scalar(dtype: DType, content: bytes) -> int | float | bool | None:
    kind = dtype.made()
    if kind is None or len(content) != kind.itemsize:
        return None
    number: int | float | bool = np.frombuffer(content, dtype=kind)[0].item()
    return number


def _no_bytes() -> bytes:
    return b""


SAFE_GLOBALS: list[Any] = [
    (_no_bytes, torch_globals.NO_BYTES),
    (Array, torch_globals.ARRAY),
    (DType, torch_globals.DTYPE),
    *((_reconstruct, name) for name in torch_globals.RECONSTRUCT),
    *((_scalar, name) for name in torch_globals.SCALAR),
]
