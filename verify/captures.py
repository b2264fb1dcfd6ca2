"""From what a case returned to named tensors, and from those to digests that add up over ranks.

Names are stable: a single tensor is `out`, entries of mappings have their keys, entries of
sequences their index, nested ones are joined by dots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verify.digests import Digest
from verify.errors import CaseError
from verify.evidence import UNSUPPORTED, Facts
from verify.hashing import digest_shard, digest_tensor, settled

_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WITHOUT_MINIMUM = (torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True)
class Layout:
    """Where a rank's tensor lies in the whole: entries `start ...` of dimension `dim`."""

    dim: int
    start: int
    full_shape: tuple[int, ...]


def flatten(value: Any, name: str = "out") -> tuple[dict[str, Tensor], list[str]]:
    """The tensors in `value` by name, and the names of entries that are no tensors.

    Python numbers count as 0-dim tensors of float64, int64 or bool; None is left out silently.
    """
    tensors: dict[str, Tensor] = {}
    ignored: list[str] = []
    _collect(value, name, tensors, ignored, top=True)
    return tensors, ignored


def _collect(
    value: Any, name: str, tensors: dict[str, Tensor], ignored: list[str], *, top: bool
) -> None:
    def inner(key: str) -> str:
        return key if top else f"{name}.{key}"

    if name in tensors:
        raise CaseError(f"two outputs are called {name!r}; rename one")
    if isinstance(value, Tensor) and (kind := uncomparable(value)):
        if value.layout == torch.sparse_coo and not value.is_meta:
            parts = value.detach().coalesce()
            tensors[f"{name}.indices"], tensors[f"{name}.values"] = parts.indices(), parts.values()
        else:
            ignored.append(f"{name} ({kind} {UNSUPPORTED}; return its parts)")
    elif isinstance(value, Tensor):
        tensors[name] = value
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        tensors[name] = torch.from_numpy(np.array(value))
    elif isinstance(value, bool | int | float | complex):
        kinds = {bool: torch.bool, int: torch.int64, float: torch.float64}
        dtype = next((d for kind, d in kinds.items() if isinstance(value, kind)), torch.complex128)
        tensors[name] = torch.tensor(value, dtype=dtype)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _collect(entry, inner(str(key)), tensors, ignored, top=False)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            _collect(getattr(value, one.name), inner(one.name), tensors, ignored, top=False)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, entry in enumerate(value):
            _collect(entry, f"{name}.{index}", tensors, ignored, top=False)
    elif value is not None:
        ignored.append(f"{name} ({type(value).__name__})")


def uncomparable(tensor: Tensor) -> str | None:
    """What keeps a tensor from being compared bit by bit, or None."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    return "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else None


def digest_at(tensor: Tensor, layout: Layout | None) -> Digest:
    """The digest of a tensor, as a part of the whole when a layout is given."""
    if layout is None:
        return digest_tensor(tensor)
    return digest_shard(tensor, layout.dim, layout.start, layout.full_shape)


def facts_of(tensor: Tensor) -> Facts:
    """Element count, whether all elements have the same bits, and the count of NaN and infinity."""
    values = tensor.detach()
    if values.numel() == 0:
        return Facts(0, True, 0)
    if values.is_complex():
        pairs = torch.view_as_real(settled(values))
        constant = all(facts_of(part).constant for part in pairs.unbind(-1))
        return Facts(values.numel(), constant, int((~torch.isfinite(pairs)).any(-1).sum()))
    if values.dtype == torch.bool or values.dtype in _WITHOUT_MINIMUM:
        values = values.view(_VIEWS[values.element_size()])
    elif values.is_floating_point() and values.element_size() == 1:
        values = values.float()
    low, high = values.aminmax()
    nonfinite = 0
    if values.is_floating_point() and not bool(torch.isfinite(low) & torch.isfinite(high)):
        nonfinite = int((~torch.isfinite(values)).sum())
    constant = bool(low == high) or nonfinite == values.numel()
    return Facts(tensor.numel(), constant and tensor.numel() > 1, nonfinite)


def fresh_copy(tensor: Tensor) -> Tensor:
    """A copy with the same bits and the same strides, in memory of its own.

    Strides are part of an input (a kernel may ignore them): a view keeps its storage's layout,
    unless that storage is far larger than the view.
    """
    source = settled(tensor.detach())
    if source.is_contiguous() or source.layout != torch.strided:
        return source.clone()
    storage = source.untyped_storage()
    if storage.nbytes() > 4 * source.numel() * source.element_size() + 2**20:
        return source.clone()
    copied = torch.empty(0, dtype=source.dtype, device=source.device)
    return copied.set_(storage.clone(), source.storage_offset(), source.size(), source.stride())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    return torch.equal(_integers(a), _integers(b))


def as_integers(tensor: Tensor) -> Tensor:
    """A view of the same shape on signed integers; complex numbers stay as they are."""
    if tensor.is_complex():
        return settled(tensor)
    size = tensor.element_size()
    return tensor.view(torch.int8 if size == 1 else _VIEWS[size])


def _integers(tensor: Tensor) -> Tensor:
    bits = settled(tensor.detach())
    if bits.is_complex():
        bits = torch.view_as_real(bits)
    return bits.view(_VIEWS[bits.element_size()])
