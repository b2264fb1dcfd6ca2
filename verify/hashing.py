"""Computes digests on the CPU (scheme `lanes4x64-v1`; `verify.digests` states what equal digests
say).

A tensor's LOGICAL elements in row-major order are read as little-endian bytes at their global byte
offset and cut into 32-bit words m_i; a word cut by a border counts as two zero-filled parts. With i
= 4096 * b + j

    K_l(b, j) = (T[j + l] * B[b] mod 2**64) >> 32         l = 0..3
    lane_l    = sum_i K_l(i) * m_i mod 2**64

where T[0..4098] and B[b] are outputs of splitmix64 (Steele, Lea, Flood 2014) from two seeds, B[b]
made odd. One numpy multiplication makes the keys of 32 blocks, which four shifted windows share;
the work runs in buffers of 2 MB that each thread keeps. The CUDA kernel computes the same sum, by
test.

Values are never converted, and strides never seen: a transposed view has the digest of its copy.
Refused, with what to do instead: values without plain strided memory (sparse, nested, quantized,
meta, fake) and tensor subclasses that hide other tensors. Needs a little-endian machine.
"""

import functools
import itertools
import math
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verify.digests import Digest, StateDigest
from verify.errors import UnsupportedError

Words = npt.NDArray[np.uint64]

DEFAULT_SEED = 0x6D6F6B2D76657231
BLOCK = 4096
_ROWS = 32
_STRETCH = 4096  # blocks whose keys are made and kept together: 32 KB
_MASK = (1 << 64) - 1
_COPY_ELEMENTS = 1 << 20  # elements of a strided tensor that are copied at a time
_GAP_BYTES = 1 << 15  # between two runs of a shard; from here on filling with zeros costs more
_FILL_BYTES = 1 << 20  # zero-filled rows of a shard are built in buffers of this size
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def splitmix64(seed: int, start: int, count: int) -> Words:
    """Outputs `start .. start + count - 1` of splitmix64 from `seed`, uint64 [count]."""
    n = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    z = n * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & _MASK)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@functools.lru_cache(maxsize=16)
def key_seeds(seed: int) -> tuple[int, int]:
    """The seeds of the tables T and B: the first two outputs of splitmix64 from `seed`."""
    first, second = splitmix64(seed, 0, 2).tolist()
    return first, second


@functools.lru_cache(maxsize=16)
def _table(seed: int) -> Words:
    """T, uint64 [4099]."""
    return splitmix64(key_seeds(seed)[0], 0, BLOCK + 3)


def block_keys(seed: int, start: int, count: int) -> Words:
    """B[start .. start + count - 1], uint64 [count], all odd."""
    return splitmix64(key_seeds(seed)[1], start, count) | np.uint64(1)


@functools.lru_cache(maxsize=64)
def _stretch(seed: int, index: int) -> Words:
    """B from block 4096 * index on, 32 more than the stretch has, so that no chunk crosses it."""
    return block_keys(seed, index * _STRETCH, _STRETCH + _ROWS)


@dataclass(frozen=True)
class _Scratch:
    """Buffers of one running sum: keys [32, 4099], their four windows [4, 32, 4096], and words."""

    keys: Words
    windows: Words
    words: Words


_idle = threading.local()


def _scratch() -> _Scratch:
    """The thread's idle buffers; new ones inside a signal handler that interrupts a sum."""
    found: _Scratch | None = _idle.__dict__.pop("scratch", None)
    if found is not None:
        return found
    keys = np.empty((_ROWS, BLOCK + 3), np.uint64)
    windows = as_strided(keys, (4, _ROWS, BLOCK), (8, *keys.strides))
    return _Scratch(keys, windows, np.empty((_ROWS, BLOCK), np.uint64))


class _Sum:
    """Four lanes that grow by ranges of bytes, each at its global offset."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._table = _table(seed)
        self._lanes = np.zeros(4, np.uint64)
        self._scratch = _scratch()

    def lanes(self) -> tuple[int, int, int, int]:
        """The lanes so far; the buffers go back to the thread, so this is the last call."""
        _idle.scratch = self._scratch
        a, b, c, d = self._lanes.tolist()
        return a, b, c, d

    def add(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        """Add contiguous bytes (uint8 [n]) that lie at byte `offset` of the whole tensor."""
        if head := min(-offset % 4, data.size):
            self._add_cut_word(data[:head], offset)
            data, offset = data[head:], offset + head
        whole = data.size // 4 * 4
        if whole < data.size:
            self._add_cut_word(data[whole:], offset + whole)
        words = data[:whole].view("<u4")
        block, column = divmod(offset // 4, BLOCK)
        if column and words.size:
            cut = min(BLOCK - column, words.size)
            self._add_rows(words[:cut].reshape(1, -1), block, column)
            words, block = words[cut:], block + 1
        rows = words.size // BLOCK
        for row in range(0, rows, _ROWS):
            some = words[row * BLOCK : min(row + _ROWS, rows) * BLOCK]
            self._add_rows(some.reshape(-1, BLOCK), block + row, 0)
        if rows * BLOCK < words.size:
            self._add_rows(words[rows * BLOCK :].reshape(1, -1), block + rows, 0)

    def _add_cut_word(self, data: npt.NDArray[np.uint8], offset: int) -> None:
        word = np.zeros((1, 4), np.uint8)
        word[0, offset % 4 : offset % 4 + data.size] = data
        self._add_rows(word.view("<u4"), *divmod(offset // 4, BLOCK))

    def _add_rows(self, words: npt.NDArray[Any], block: int, column: int) -> None:
        """Add words [rows <= 32, columns] from `column` on, one row a block from `block` on."""
        rows, columns = words.shape
        stretch, first = divmod(block, _STRETCH)
        multipliers = _stretch(self._seed, stretch)[first : first + rows]
        buffers = self._scratch
        keys = buffers.keys[:rows, : columns + 3]
        table = self._table[column : column + columns + 3]
        np.multiply(table[None, :], multipliers[:, None], out=keys)
        np.right_shift(keys, np.uint64(32), out=keys)
        wide = buffers.words[:rows, :columns]
        wide[...] = words
        # einsum adds products in registers: 0.36 ns each, 0.55 through a buffer
        self._lanes += np.einsum("lrc,rc->l", buffers.windows[:, :rows, :columns], wide)


def integer_view(t: torch.Tensor) -> torch.Tensor:
    """The bits of `t` as signed integers of its width, no value converted, strides as they are.

    Complex tensors get a last dimension of 2 (real, imaginary); lazily conjugated or negated ones
    are resolved first, which copies. UnsupportedError for values without plain strided memory.
    """
    if type(t) not in _PLAIN:
        t = _plain(t)
    if t.layout is not torch.strided or t.is_quantized or t.is_meta or t.is_nested:
        raise UnsupportedError(_refusal(t))
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        raise UnsupportedError("no digest inside vmap, grad or jvp: take it of what they return")
    t = t.detach()
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    if t.dtype.is_complex:
        t = torch.view_as_real(t)
    return t.view(_SIGNED[t.element_size()])


def _plain(t: torch.Tensor) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise UnsupportedError(f"a digest is taken of a tensor, not of {type(t).__name__}")
    if torch.nn.parameter.is_lazy(t):
        raise UnsupportedError("no digest of an uninitialised parameter: call forward once first")
    if is_traceable_wrapper_subclass(t) or type(t).__name__ in ("FakeTensor", "FunctionalTensor"):
        raise UnsupportedError(_refusal(t))
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(torch.Tensor)


def _refusal(t: torch.Tensor) -> str:
    kind = type(t).__name__
    if t.is_nested:
        what, instead = "a nested tensor", "take the digest of each tensor of t.unbind()"
    elif kind == "DTensor":
        what = "a DTensor"
        instead = "use digest_shard(t.to_local(), dim, start, full_shape) and add over the ranks"
    elif kind in ("FakeTensor", "FunctionalTensor") or t.is_meta:
        what = f"a tensor without data ({kind} on {t.device})"
        instead = "run the case on real tensors, outside FakeTensorMode and torch.device('meta')"
    elif kind not in ("Tensor", "Parameter", "Buffer"):
        what, instead = f"a {kind}", "take the digests of the tensors it is made of"
    elif t.is_quantized:
        what, instead = "a quantized tensor", "use t.int_repr() and the scales and zero points"
    else:
        what = f"a tensor of layout {t.layout}"
        instead = "use its parts (t.coalesce().indices(), .values() ...) or t.to_dense()"
    return f"no digest of {what}, shape {tuple(t.shape)}, dtype {t.dtype}: {instead}"


def _array(t: torch.Tensor) -> npt.NDArray[Any]:
    if sys.byteorder != "little":
        raise UnsupportedError("digests are taken on little-endian machines only")
    view = integer_view(t)
    return (view if view.device.type == "cpu" else view.cpu()).numpy()


def _pieces(array: npt.NDArray[Any], limit: int) -> Iterator[npt.NDArray[Any]]:
    """Contiguous copies (or views) of the elements in row-major order, at most `limit` at a time.

    A piece never cuts a sub-array of at most `limit` elements in two.
    """
    if array.size <= limit or array.flags.c_contiguous:
        yield np.ascontiguousarray(array)
    elif (inner := array.size // len(array)) > limit:
        yield from itertools.chain.from_iterable(_pieces(part, limit) for part in array)
    else:
        step = limit // inner
        for at in range(0, len(array), step):
            yield np.ascontiguousarray(array[at : at + step])


def _add_range(total: _Sum, array: npt.NDArray[Any], offset: int) -> None:
    """Add all elements of `array`, a contiguous range of the whole that starts at byte `offset`."""
    for piece in _pieces(array, _COPY_ELEMENTS):
        total.add(piece.reshape(-1).view(np.uint8), offset)
        offset += piece.nbytes


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def digest_tensor(
    t: torch.Tensor,
    *,
    seed: int = DEFAULT_SEED,
    offset: int = 0,
    full_shape: tuple[int, ...] | None = None,
) -> Digest:
    """The digest of a tensor of any dtype, shape and strides.

    With `full_shape`, `t` is a part of such a tensor: its elements are a contiguous range of the
    flattened whole that starts at element `offset`. ValueError when it does not fit in;
    UnsupportedError as above.
    """
    array = _array(t)
    shape = tuple(t.shape) if full_shape is None else tuple(full_shape)
    count = t.numel()
    if offset < 0 or offset + count > math.prod(shape):
        raise ValueError(
            f"elements {offset} .. {offset + count - 1} are not all in a tensor of shape {shape}; "
            "give the offset in elements of the flattened whole, and its shape as full_shape"
        )
    total = _Sum(seed)
    if count:
        _add_range(total, array, offset * t.element_size())
    return Digest(_dtype_name(t.dtype), shape, count, total.lanes())


def digest_shard(
    t: torch.Tensor,
    dim: int,
    start: int,
    full_shape: tuple[int, ...],
    *,
    seed: int = DEFAULT_SEED,
) -> Digest:
    """The digest of the part [start, start + t.shape[dim]) along `dim` of a tensor of `full_shape`.

    Shards that cut the whole along any one dimension add up to `digest_tensor` of the whole.
    ValueError when the shapes differ in another dimension or the range does not fit.
    """
    full = tuple(full_shape)
    if not -len(full) <= dim < len(full):
        raise ValueError(f"dim {dim} is not a dimension of a tensor of shape {full}")
    dim %= len(full)
    size = t.shape[dim] if t.dim() == len(full) else -1
    if (*full[:dim], size, *full[dim + 1 :]) != tuple(t.shape) or not 0 <= start <= full[
        dim
    ] - size:
        raise ValueError(
            f"a shard {tuple(t.shape)} from {start} on does not lie in {full} along dim {dim}"
        )
    outer, inner = math.prod(full[:dim]), math.prod(full[dim + 1 :])
    if outer == 1 or t.numel() == 0:
        at = start * inner if t.numel() else 0
        return digest_tensor(t, seed=seed, offset=at, full_shape=full)
    array = _array(t)
    total = _Sum(seed)
    item = t.element_size()
    run, row, first = (n * inner * item for n in (size, full[dim], start))
    if row - run > _GAP_BYTES or row > _FILL_BYTES:
        for at, index in enumerate(np.ndindex(full[:dim])):
            _add_range(total, array[index], at * row + first)
    else:
        num_rows = max(1, _FILL_BYTES // row)
        filled = np.zeros((num_rows, row), np.uint8)
        at = 0
        for piece in _pieces(array, num_rows * run // array.itemsize):
            runs = piece.reshape(-1).view(np.uint8).reshape(-1, run)
            for some in (runs[i : i + num_rows] for i in range(0, len(runs), num_rows)):
                filled[: len(some), first : first + run] = some
                total.add(filled[: len(some)].reshape(-1), at)
                at += some.shape[0] * row
    return Digest(_dtype_name(t.dtype), full, t.numel(), total.lanes())


def digest(value: object) -> Digest | StateDigest:
    """The digest of a tensor, or of every tensor of a state_dict, a nested container or a module.

    Names are joined by dots and each is kept, so tied weights appear under both. A module gives its
    full state_dict and its non-persistent buffers. Python numbers, strings, bytes and None, as
    optimizers keep them, count with a header of their own (`py_int` ...). UnsupportedError for any
    other value, and when two values get the same name.
    """
    if isinstance(value, torch.Tensor):
        return digest_tensor(value)
    if isinstance(value, torch.nn.Module):
        value = {**dict(value.named_buffers(remove_duplicate=False)), **value.state_dict()}
    if not isinstance(value, Mapping):
        raise UnsupportedError(
            f"no digest of a {type(value).__name__}: give a tensor, a mapping of names to tensors "
            "(nested as you like) or a module"
        )
    found: dict[str, Digest] = {}
    for name, leaf in _leaves("", value):
        if name in found:
            raise UnsupportedError(f"two values are named {name!r}: rename one of them")
        found[name] = leaf
    return StateDigest(found)


def _leaves(name: str, value: object) -> Iterator[tuple[str, Digest]]:
    if isinstance(value, torch.Tensor):
        yield name, digest_tensor(value)
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    else:
        yield name, _python_value(name, value)


def _python_value(name: str, value: object) -> Digest:
    kind = type(value).__name__
    if value is None or isinstance(value, bool):
        data = b"" if value is None else bytes([value])
    elif isinstance(value, int):
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    elif isinstance(value, float):
        data = struct.pack("<d", value)
    elif isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
    else:
        raise UnsupportedError(
            f"no digest of {name!r}, a {kind}: leave it out, or turn it into a tensor first"
        )
    array = np.frombuffer(data, np.uint8)
    total = _Sum(DEFAULT_SEED)
    total.add(array, 0)
    return Digest(f"py_{kind}", array.shape, array.size, total.lanes())
