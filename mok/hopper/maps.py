"""Tensor maps: how the copy engine finds the tiles of a bf16 tensor.

They exist because TMA loads and stores name a map, not an address. Encoding is a host function of
the driver library; it needs no context and reads no memory, so a map is good for as long as pointer
and shape are. The cache belongs to a workspace and is bounded, so that nothing grows with the
number of activations that an allocator hands out. Refuses what the hardware does: bases that are
not 16-byte aligned, strides that are no multiple of 16 bytes, boxes wider than the swizzle.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mok.errors import InputError
from mok.hopper.records import TensorMap, tensor_map
from mok.launching import describe_status
from mok.toolchain import LoadFailed, cuda_module

ALIGNMENT = 16
"""Bytes: of base addresses and of strides."""
_BYTES = 2  # of a bf16
_INNER_BYTES = 128  # of a box; what the swizzle spans
_MOST_BOX = 256


class MapSpec(NamedTuple):
    """A bf16 tensor for the copy engine, innermost dimension first.

    pointer: address. sizes: elements. strides: bytes, of all dimensions but the innermost, which is
    contiguous. box: elements of what one load or store moves; it may reach over the borders.
    A call makes some twenty of them to look up maps, so nothing is checked before one is encoded.
    """

    pointer: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def check_map(spec: MapSpec) -> None:
    """Raises InputError for what the hardware cannot address."""
    if spec.pointer == 0 or spec.pointer % ALIGNMENT:
        raise InputError(
            f"a tensor for TMA begins at address {spec.pointer:#x}; allowed: a multiple of "
            f"{ALIGNMENT} bytes. Clone the tensor."
        )
    rank = len(spec.sizes)
    if rank not in (2, 3) or len(spec.strides) != rank - 1 or len(spec.box) != rank:
        raise InputError(
            f"a tensor map has sizes {spec.sizes}, strides {spec.strides} and box {spec.box}; "
            "allowed: two or three sizes, as many box sizes, one stride fewer."
        )
    if min(spec.sizes) < 1 or max(spec.sizes) > 2**32:
        raise InputError(
            f"a tensor map has sizes {spec.sizes}; allowed: 1 to 2^32 each. Give a tensor that "
            "is not empty."
        )
    if any(stride % ALIGNMENT or not 0 < stride < 2**40 for stride in spec.strides):
        raise InputError(
            f"a tensor map has strides of {spec.strides} bytes; allowed: multiples of "
            f"{ALIGNMENT} below 2^40. Make the innermost size a multiple of "
            f"{ALIGNMENT // _BYTES} elements."
        )
    if not all(1 <= size <= _MOST_BOX for size in spec.box):
        raise InputError(f"a tensor map has box {spec.box}; allowed: 1 to {_MOST_BOX} each.")
    if spec.box[0] * _BYTES > _INNER_BYTES:
        raise InputError(
            f"a tensor map has {spec.box[0]} elements along the innermost side of its box; "
            f"allowed: at most {_INNER_BYTES // _BYTES}, what the swizzle spans."
        )


def rows_spec(pointer: int, rows: int, columns: int, box_rows: int) -> MapSpec:
    """Contiguous rows [rows, columns], in boxes of box_rows x 64."""
    return MapSpec(pointer, (columns, rows), (columns * _BYTES,), (64, box_rows))


def weight_spec(weight_EOI: torch.Tensor, box_rows: int) -> MapSpec:
    """A weight [E, out, in] with contiguous rows, in boxes of 1 x box_rows x 64.

    A box never reaches into the next expert: it is clipped at `out`.
    """
    if weight_EOI.dim() != 3 or weight_EOI.dtype != torch.bfloat16 or weight_EOI.stride(2) != 1:
        raise InputError(
            f"a weight is {weight_EOI.dtype} {list(weight_EOI.shape)} with strides "
            f"{list(weight_EOI.stride())}; allowed: bfloat16 [E, out, in], contiguous along in."
        )
    experts, outputs, inputs = weight_EOI.shape
    row, expert = weight_EOI.stride(1), weight_EOI.stride(0)
    if experts == 1:
        expert = outputs * row  # torch may say anything of a dimension of size 1
    strides = (row * _BYTES, expert * _BYTES)
    return MapSpec(weight_EOI.data_ptr(), (inputs, outputs, experts), strides, (64, box_rows, 1))


def encode(spec: MapSpec) -> bytes:
    """The 128 bytes of a map. Raises LoadFailed when the driver refuses, or is not there."""
    driver = cuda_module("cuda.bindings.driver")
    rank = len(spec.sizes)
    try:
        status, made = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            rank,
            spec.pointer,
            [driver.cuuint64_t(size) for size in spec.sizes],
            [driver.cuuint64_t(stride) for stride in spec.strides],
            [driver.cuuint32_t(size) for size in spec.box],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    except RuntimeError as error:  # no driver library
        raise LoadFailed(f"a tensor map needs the CUDA driver library: {error}") from error
    if int(status) != 0:
        raise LoadFailed(f"the driver refused {spec}: {describe_status(int(status))}")
    return ctypes.string_at(made.getPtr(), ctypes.sizeof(TensorMap))


@dataclass
class MapCache:
    """Encoded maps by what they describe; the least recently used of more than `most` goes.

    most: training asks for some 35 maps a layer in turn, and a cache with room for fewer than all
    layers' would never find one; 8192, at most 8 MB, are enough for 200 layers. Threads may share a
    cache, since autograd runs backwards in threads of its own.
    """

    most: int = 8192
    encoder: Callable[[MapSpec], bytes] = encode
    _made: OrderedDict[MapSpec, TensorMap] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def get(self, spec: MapSpec) -> TensorMap:
        """The map of a spec; not to be changed, others get the same. May raise."""
        with self._lock:
            found = self._made.get(spec)
            if found is not None:
                self._made.move_to_end(spec)
                return found
            check_map(spec)
            made = tensor_map(self.encoder(spec))
            self._made[spec] = made
            if len(self._made) > self.most:
                self._made.popitem(last=False)
            return made

    def __len__(self) -> int:
        return len(self._made)

    def clear(self) -> None:
        """Forgets all maps."""
        with self._lock:
            self._made.clear()
