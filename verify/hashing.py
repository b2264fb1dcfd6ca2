"""Computes digests on the CPU (scheme `lanes4x64-v1`; `verify.digests` states what equal digests
say).

A tensor's LOGICAL elements in row-major order are read as little-endian bytes, and `verify.lanes`
sums them at their global byte offset. Tensors on a CUDA device are digested there by a kernel that
computes the same sum, by test (`verify.device_digests`), or copied here where it cannot run.

Values are never converted, and strides never seen: a transposed view has the digest of its copy.
Refused, with what to do instead: values without plain strided memory (sparse, nested, quantized,
meta, fake) and tensor subclasses that hide other tensors. Needs a little-endian machine.
"""

import functools
import itertools
import math
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verify.device_parts import Range, Shard, ShardLike, check_range, check_shard
from verify.digests import Digest, StateDigest
from verify.errors import UnsupportedError
from verify.lanes import DEFAULT_SEED, LaneSum

_COPY_ELEMENTS = 1 << 20  # elements of a strided tensor that are copied at a time
_GAP_BYTES = 1 << 15  # between two runs of a shard; from here on filling with zeros costs more
_FILL_BYTES = 1 << 20  # zero-filled rows of a shard are built in buffers of this size
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def integer_view(t: torch.Tensor) -> torch.Tensor:
    """The bits of `t` as signed integers of its width, no value converted, strides as they are.

    Complex tensors get a last dimension of 2 (real, imaginary). A lazily conjugated or negated
    tensor is copied with the sign bits inverted, those of NaNs too; torch's own resolve_conj and
    resolve_neg may give a NaN other bits, on a GPU and for complex32. UnsupportedError for values
    without plain strided memory.
    """
    t = plain_tensor(t)
    conjugated, negated = t.is_conj(), t.is_neg()
    if negated and not (t.is_floating_point() or t.is_complex()):
        t, negated = t.resolve_neg(), False
    # each takes its own mark off, and touches no value
    t = t.conj() if conjugated else t
    t = torch._neg_view(t) if negated else t
    if t.dtype.is_complex:
        t = torch.view_as_real(t)
    bits = t.view(_SIGNED[t.element_size()])
    if not (conjugated or negated):
        return bits
    sign = torch.iinfo(bits.dtype).min
    if not conjugated:
        return bits ^ sign
    flipped = bits.clone()
    flipped.select(-1, 0 if negated else 1).bitwise_xor_(sign)  # twice inverted is as it was
    return flipped


def settled(t: torch.Tensor) -> torch.Tensor:
    """`t` without lazy conjugation and negation: itself, or a copy with the same values.

    Sign bits are inverted as integers, those of NaNs too (see `integer_view`). UnsupportedError as
    there.
    """
    if not (t.is_conj() or t.is_neg()):
        return t
    bits = integer_view(t)
    if not t.dtype.is_complex:
        return bits.view(t.dtype)
    return torch.view_as_complex(bits.view(t.dtype.to_real()))


def plain_tensor(t: torch.Tensor) -> torch.Tensor:
    """`t` itself, detached and without its subclass; UnsupportedError as `integer_view` raises."""
    if type(t) not in PLAIN:
        t = _plain(t)
    if t.layout is not torch.strided or t.is_quantized or t.is_meta or t.is_nested:
        raise UnsupportedError(_refusal(t))
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        raise UnsupportedError("no digest inside vmap, grad or jvp: take it of what they return")
    if (t._is_zerotensor() or _is_freed(t)) and t.numel():  # to read there ends the process
        raise UnsupportedError(_refusal_without_memory(t))
    return t.detach()


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
    nested = t.is_nested and t.layout is torch.strided  # such a one has no shape, and raises
    shape = "" if nested else f", shape {tuple(t.shape)}"
    return f"no digest of {what}{shape}, dtype {t.dtype}: {instead}"


def _is_freed(t: torch.Tensor) -> bool:
    """Whether there are no bytes, where torch keeps a tensor's bytes in its storage."""
    return (t.is_cpu or t.is_cuda) and not t.untyped_storage().nbytes()


def _refusal_without_memory(t: torch.Tensor) -> str:
    if t._is_zerotensor():
        return f"no digest of zeros that torch keeps no memory of, shape {tuple(t.shape)}: clone it"
    return (
        f"no digest of a tensor whose memory was freed, shape {tuple(t.shape)}, dtype {t.dtype}: "
        "its storage has 0 bytes; take it while they are there (FSDP frees gathered parameters)"
    )


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


def _add_range(total: LaneSum, array: npt.NDArray[Any], offset: int) -> None:
    """Add all elements of `array`, a contiguous range of the whole that starts at byte `offset`."""
    for piece in _pieces(array, _COPY_ELEMENTS):
        total.add(piece.reshape(-1).view(np.uint8), offset)
        offset += piece.nbytes


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without the prefix, as a digest's header has it."""
    return str(dtype).removeprefix("torch.")


def digest_tensor(
    t: torch.Tensor,
    *,
    seed: int = DEFAULT_SEED,
    offset: int = 0,
    full_shape: tuple[int, ...] | None = None,
) -> Digest:
    """The digest of a tensor of any dtype, shape, strides and device.

    With `full_shape`, `t` is a part of such a tensor: its elements are a contiguous range of the
    flattened whole that starts at element `offset`. ValueError when it does not fit in;
    UnsupportedError as above.
    """
    if offset == 0 and full_shape is None:
        return _digest_placed(t, None, seed)
    shape = tuple(plain_tensor(t).shape) if full_shape is None else tuple(full_shape)
    return _digest_placed(t, Range(offset, shape), seed)


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
    return _digest_placed(t, Shard(dim, start, tuple(full_shape)), seed)


def _digest_placed(t: torch.Tensor, place: Range | ShardLike | None, seed: int) -> Digest:
    """On the device where the tensor is, if there is a kernel for it."""
    if isinstance(t, torch.Tensor) and t.is_cuda:
        from verify.device_digests import digest_tensors

        return digest_tensors({"t": t}, seed=seed, layouts={"t": place})["t"]
    return digest_on_host(t, place, seed)


def digest_on_host(
    t: torch.Tensor, place: Range | ShardLike | None = None, seed: int = DEFAULT_SEED
) -> Digest:
    """The digest by numpy, of a copy if the tensor is on a device; errors as above."""
    array = _array(t)
    total = LaneSum(seed)
    item, count, shape = t.element_size(), t.numel(), tuple(t.shape)
    if place is None or isinstance(place, Range):
        whole = Range(0, shape) if place is None else place
        check_range(whole, count)
        if count:
            _add_range(total, array, whole.offset * item)
        return Digest(dtype_name(t.dtype), whole.full_shape, count, total.lanes())
    dim = check_shard(place, shape)
    full = tuple(place.full_shape)
    outer, inner = math.prod(full[:dim]), math.prod(full[dim + 1 :])
    run, row, first = (n * inner * item for n in (shape[dim], full[dim], place.start))
    if count and outer == 1:
        _add_range(total, array, first)
    elif count:
        _add_rows_of_shard(total, array, full[:dim], run, row, first)
    return Digest(dtype_name(t.dtype), full, count, total.lanes())


def _add_rows_of_shard(
    total: LaneSum, array: npt.NDArray[Any], outer: tuple[int, ...], run: int, row: int, first: int
) -> None:
    """Add runs of `run` bytes that lie `first` bytes behind every row of `row` bytes."""
    if row - run > _GAP_BYTES or row > _FILL_BYTES:
        for number, index in enumerate(np.ndindex(outer)):
            _add_range(total, array[index], number * row + first)
        return
    num_rows = max(1, _FILL_BYTES // row)
    filled = np.zeros((num_rows, row), np.uint8)
    at = 0
    for piece in _pieces(array, num_rows * run // array.itemsize):
        runs = piece.reshape(-1).view(np.uint8).reshape(-1, run)
        for some in (runs[i : i + num_rows] for i in range(0, len(runs), num_rows)):
            filled[: len(some), first : first + run] = some
            total.add(filled[: len(some)].reshape(-1), at)
            at += some.shape[0] * row


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
    found: dict[str, Digest | torch.Tensor] = {}
    for name, leaf in _leaves("", value):
        if name in found:
            raise UnsupportedError(f"two values are named {name!r}: rename one of them")
        found[name] = leaf
    tensors = digest_all({n: leaf for n, leaf in found.items() if isinstance(leaf, torch.Tensor)})
    return StateDigest(
        {n: leaf if isinstance(leaf, Digest) else tensors[n] for n, leaf in found.items()}
    )


def digest_all(
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, ShardLike | None] | None = None,
) -> dict[str, Digest]:
    """Digests of named tensors; those on a device take one launch and one wait together.

    layouts: by name, where a tensor lies in a whole; None and what is not named is whole.
    """
    if any(isinstance(t, torch.Tensor) and t.is_cuda for t in tensors.values()):
        from verify.device_digests import digest_tensors

        return digest_tensors(tensors, layouts=layouts)
    return {name: digest_on_host(t, (layouts or {}).get(name)) for name, t in tensors.items()}


def _leaves(name: str, value: object) -> Iterator[tuple[str, Digest | torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
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
    total = LaneSum(DEFAULT_SEED)
    total.add(array, 0)
    return Digest(f"py_{kind}", array.shape, array.size, total.lanes())
