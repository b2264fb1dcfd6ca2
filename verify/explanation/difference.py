"""What the rules of `explanation` look at: the elements in which two tensors differ.

Bits as integers, values as float64, a mask with the tensor's shape. Large tensors are sampled where
a rule looks at values, never where it looks at places.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verify.comparison import Comparison, ulp_distance
from verify.hashing import integer_view

Array = npt.NDArray[Any]

_SAMPLE = 1 << 18  # differing numbers that rules on values look at, evenly spread
_BLOCK = 1 << 24  # numbers whose indices are listed at once: eight bytes each
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


@dataclass(frozen=True)
class Pattern:
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

    @property
    def names(self) -> tuple[str, str]:
        """What the two sides are called."""
        base, other = self.context.get("names", ("base", "other"))
        return base, other


def pattern_of(
    comparison: Comparison, a: torch.Tensor, b: torch.Tensor, context: Mapping[str, Any]
) -> Pattern:
    """The differing elements of base `a` and other `b`, which `comparison` found to differ."""
    left, right = integer_view(a).cpu(), integer_view(b).cpu()
    parts = left != right
    mask = parts.any(dim=-1) if a.is_complex() else parts
    flat = _sample(parts.reshape(-1), comparison.num_differing)
    x, y = left.reshape(-1)[flat], right.reshape(-1)[flat]
    part = a.dtype.to_real() if a.is_complex() else a.dtype
    values = None
    if part.is_floating_point or part in _INTEGERS:
        try:
            values = x.view(part).double().numpy(), y.view(part).double().numpy()
        except (RuntimeError, NotImplementedError):  # packed dtypes have no values
            values = None
    floats = values is not None and part.is_floating_point
    unsigned = np.dtype(f"u{left.element_size()}")
    return Pattern(
        comparison,
        context,
        part,
        np.atleast_1d(mask.numpy()),
        (np.atleast_1d(left.numpy()), np.atleast_1d(right.numpy())),
        (x.numpy().view(unsigned).astype(np.uint64), y.numpy().view(unsigned).astype(np.uint64)),
        values,
        ulp_distance(x.view(part), y.view(part)).numpy() if floats else None,
    )


def _sample(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Evenly spread indices at which a 1-D mask is set; all of them when `count` is small."""
    step = max(1, count // _SAMPLE)
    found, seen = [], 0
    for start in range(0, len(mask), _BLOCK):
        indices = mask[start : start + _BLOCK].nonzero().reshape(-1)
        found.append(indices[-seen % step :: step] + start)
        seen += len(indices)
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
