"""Digests of tensors on a CUDA device, where they are: many in one launch, at the speed of reading.

    plan = DigestPlan({"w": w, "x": x})
    plan.launch()                  # on the current stream, without waiting
    plan.digests()                 # waits; {"w": Digest(...), "x": Digest(...)}

The values are those of `verify.hashing` on a CPU, bit for bit. Memory: 240 bytes for each part of
a tensor and 32 for each digest, nothing in proportion to the data. Work goes to torch's current
stream of the tensors' device. A prepared plan replays as a CUDA graph.

Where the kernel cannot run, `digest_tensors` copies to the host and computes there;
`verify.device_kernel.digest_backend` says which it is, and why. Refuses a plan on tensors of
several devices, and to launch when a tensor has moved since the plan was made.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mok.launching import raw_stream
from verify.device_kernel import DEFAULT_TUNING, Tuning, loaded
from verify.device_parts import ITEM_BYTES, PartTable, Range, ShardLike, parts_of
from verify.digests import Digest
from verify.errors import UnsupportedError
from verify.hashing import PLAIN, dtype_name, plain_tensor
from verify.lanes import DEFAULT_SEED, key_seeds

_FACTS = operator.attrgetter("dtype", "is_nested", "is_cuda", "nbytes", "shape")
_PLAIN, _REAL = frozenset(PLAIN), frozenset(ITEM_BYTES)
_NOTHING: AbstractContextManager[object] = nullcontext()

Place = Range | ShardLike


class DigestPlan:
    """Digests of given tensors, prepared once and launched as often as wanted.

    tensors: by name, or in a sequence (named "0", "1" ...); dense, of any dtype, shape and strides,
    all on one CUDA device. seed: of the keys. layouts: by name, where a tensor lies in a whole;
    what is not named is whole. tuning: the variant of the kernel.

    Contents may change in place between launches; the digests are those at the launch. The tensors
    are kept alive, and read where they were when the plan was made. Make it outside of a capture.
    ValueError for layouts that do not fit, UnsupportedError for tensors that cannot be read there.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | Sequence[Tensor],
        *,
        seed: int = DEFAULT_SEED,
        layouts: Mapping[str, Place | None] | None = None,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        self.names, self._tensors = _named(tensors)
        self._places = [layouts.get(name) for name in self.names] if layouts else None
        table = PartTable()
        dense = None if layouts else dense_memory(self._tensors)
        if dense is not None:
            self._index, self._addresses = dense.index, dense.addresses
            self._shapes: Sequence[torch.Size] = dense.shapes
            table.add_wholes(dense.addresses, dense.sizes)
        else:
            self._index = _device_of(self._tensors)
            self._addresses = _fill(table, self._tensors, self._places, self._index)
            self._shapes = [t.shape for t in self._tensors]
        self._prepare(table, len(self._tensors), seed, tuning)

    @classmethod
    def of_table(
        cls, tensor: Tensor, table: PartTable, outputs: int, seed: int, tuning: Tuning
    ) -> DigestPlan:
        """A plan for parts that somebody else described, all of them in `tensor`."""
        plan = cls.__new__(cls)
        plan.names, plan._tensors, plan._places = (), (tensor,), None
        plan._index = _device_of(plan._tensors)
        plan._shapes, plan._addresses = [tensor.shape], [tensor.data_ptr()]
        plan._prepare(table, outputs, seed, tuning)
        return plan

    def _prepare(self, table: PartTable, outputs: int, seed: int, tuning: Tuning) -> None:
        index = self._index
        found = loaded(index, tuning)
        if found.kernel is None:
            raise UnsupportedError(
                f"no digest on the device: {found.reason}. digest_tensors copies to the host"
            )
        packed, num_tiles = table.pack(tuning.geometry)
        with _current(index):
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError("make a DigestPlan before the capture; launch it inside")
            self._stream = torch.cuda.current_stream()
            device = self._stream.device
            self.lanes = torch.empty((outputs, 4), dtype=torch.int64, device=device)
            self._parts = torch.empty(packed.size, dtype=torch.int64, device=device)
            if packed.size:
                # The copy is asynchronous, and torch keeps the pinned memory until it is done; it
                # also keeps it for the next plan.
                staged = torch.empty(packed.size, dtype=torch.int64, device="cpu", pin_memory=True)
                staged.numpy()[:] = packed.reshape(-1).view(np.int64)
                self._parts.copy_(staged, non_blocking=True)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._launched = False
        self._launch = None
        if num_tiles:
            self._launch = found.kernel.prepare(
                self._parts,
                ctypes.c_uint32(len(table)),
                ctypes.c_uint64(num_tiles),
                *map(ctypes.c_uint64, key_seeds(seed)),
                self.lanes,
                grid=min(found.blocks, num_tiles),
                block=tuning.threads,
                shared=tuning.shared_bytes,
            )

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        """Zeroes the lanes and adds up the digests, on `stream` or torch's current one.

        Does not wait, and may be captured. UnsupportedError if a tensor's memory is not where it
        was when the plan was made.
        """
        self._enter(stream)
        with _current(self._index), _on(stream):
            self._record()

    def capture(self) -> None:
        """Captures the launch as a CUDA graph for `replay`. Does not wait."""
        if self._graph is not None:
            return
        with torch.cuda.device(self._index):
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.stream(side):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._record()
                finally:
                    graph.capture_end()
        self._graph = graph

    def replay(self, stream: torch.cuda.Stream | None = None) -> None:
        """The same as `launch`, in one call of the driver; `capture` is called if it was not."""
        if self._graph is None:
            self.capture()
        assert self._graph is not None
        self._enter(stream)
        with _current(self._index), _on(stream):
            self._graph.replay()

    def digests(self) -> dict[str, Digest]:
        """By name, as of the last launch; waits for it. UnsupportedError when there was none.

        A launch that was captured into a graph of yours runs when you replay that: synchronise with
        the stream where you did before you call this.
        """
        if not self._launched:
            raise UnsupportedError(
                "a DigestPlan has digests after launch() or replay(), not before"
            )
        current = torch.cuda.current_stream(self._index)
        if current != self._stream:
            current.wait_stream(self._stream)
        rows = self.lanes.cpu().numpy().view(np.uint64).tolist()
        places = self._places or itertools.repeat(None)
        found = {}
        for name, t, size, place, row in zip(
            self.names, self._tensors, self._shapes, places, rows, strict=False
        ):
            shape = tuple(size)
            whole = shape if place is None else tuple(place.full_shape)
            found[name] = Digest(dtype_name(t.dtype), whole, math.prod(shape), tuple(row))
        return found

    def _record(self) -> None:
        self.lanes.zero_()
        if self._launch is not None:
            self._launch()

    def _enter(self, stream: torch.cuda.Stream | None) -> None:
        """Checks addresses, and puts a launch on another stream behind the last one."""
        if [*map(Tensor.data_ptr, self._tensors)] != self._addresses:
            raise UnsupportedError(
                "a tensor's memory is not where it was when the plan was made (assigned to .data, "
                "resized or freed?): make a new DigestPlan"
            )
        self._launched = True
        handle = raw_stream(self._index) if stream is None else stream.cuda_stream
        if handle == self._stream.cuda_stream:
            return
        with torch.cuda.device(self._index):
            if torch.cuda.is_current_stream_capturing():
                return  # whoever captures orders the replays
            new = torch.cuda.current_stream() if stream is None else stream
            new.wait_stream(self._stream)
            for t in (self.lanes, self._parts, *self._tensors):
                t.record_stream(new)
        self._stream = new


def digest_tensors(
    tensors: Mapping[str, Tensor] | Sequence[Tensor],
    *,
    seed: int = DEFAULT_SEED,
    layouts: Mapping[str, Place | None] | None = None,
) -> dict[str, Digest]:
    """Digests by name: one launch and one wait a device; on the host for tensors that are there.

    tensors, layouts: as for DigestPlan, on any devices. Any order of devices gives the order of
    `tensors`. Errors are those of `verify.hashing.digest_tensor`.
    """
    from verify import hashing

    names, values = _named(tensors)
    dense = None if layouts else dense_memory(values)
    if dense is not None and loaded(dense.index).kernel is not None:
        plan = DigestPlan(tensors, seed=seed)
        plan.launch()
        return plan.digests()
    places = layouts or {}
    found: dict[str, Digest] = {}
    on_devices: dict[int, dict[str, Tensor]] = {}
    for name, t in zip(names, values, strict=True):
        plain = plain_tensor(t)
        if plain.is_cuda and loaded(plain.get_device()).kernel is not None:
            if plain.is_neg() and not (plain.is_floating_point() or plain.is_complex()):
                plain = plain.resolve_neg()
            on_devices.setdefault(plain.get_device(), {})[name] = plain
        else:
            found[name] = hashing.digest_on_host(t, places.get(name), seed)
    plans = []
    for some in on_devices.values():
        plans.append(DigestPlan(some, seed=seed, layouts=layouts))
        plans[-1].launch()
    for plan in plans:
        found |= plan.digests()
    return {name: found[name] for name in names}


@dataclass(frozen=True)
class DenseMemory:
    """Where tensors lie on one device: addresses, bytes and shapes, in their order."""

    index: int
    addresses: list[int]
    sizes: tuple[int, ...]
    shapes: tuple[torch.Size, ...]


def dense_memory(tensors: Sequence[Tensor]) -> DenseMemory | None:
    """If all are on one CUDA device and the bytes of each lie together as a digest reads them.

    The usual case in a few passes without bytecode: half a microsecond a tensor. None for all
    others, with empty tensors and those that a digest refuses among them.
    """
    if not tensors or not _PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        dtypes, nested, on_cuda, sizes, shapes = zip(*map(_FACTS, tensors), strict=True)
        devices = {*map(Tensor.get_device, tensors)}
        if any(nested) or not all(on_cuda) or len(devices) != 1 or 0 in sizes:
            return None
        if not _REAL.issuperset(dtypes) or not all(map(Tensor.is_contiguous, tensors)):
            return None
        if any(map(Tensor.is_neg, tensors)):
            return None
        return DenseMemory(devices.pop(), [*map(Tensor.data_ptr, tensors)], sizes, shapes)
    except RuntimeError:  # sparse, or inside a transform: plain_tensor says what to do about it
        return None


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """The stream as the current one; None leaves it."""
    return _NOTHING if stream is None else torch.cuda.stream(stream)


def _current(index: int) -> AbstractContextManager[object]:
    """Makes a device the current one, at no cost if it is."""
    return _NOTHING if torch.cuda.current_device() == index else torch.cuda.device(index)


def _named(
    tensors: Mapping[str, Tensor] | Sequence[Tensor],
) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    if isinstance(tensors, Tensor):
        raise UnsupportedError('give tensors by name or in a list, such as {"x": x} or [x]')
    if isinstance(tensors, Mapping):
        return tuple(tensors), tuple(tensors.values())
    return tuple(map(str, range(len(tensors)))), tuple(tensors)


def _device_of(tensors: Sequence[Tensor]) -> int:
    if not tensors:
        raise UnsupportedError("a DigestPlan of no tensors has no device: give at least one")
    first = tensors[0]
    index = first.get_device() if isinstance(first, Tensor) else -1
    if index < 0 or not first.is_cuda:
        raise UnsupportedError(
            f"a DigestPlan takes tensors on one CUDA device, not {_where(first)}; digest_tensors "
            "takes any"
        )
    return index


def _fill(
    table: PartTable, tensors: Sequence[Tensor], places: Sequence[Place | None] | None, index: int
) -> list[int]:
    """Adds the parts of all tensors, whatever they are; their addresses."""
    addresses = []
    for slot, given in enumerate(tensors):
        t = plain_tensor(given)
        if t.get_device() != index or not t.is_cuda:
            raise UnsupportedError(
                f"a DigestPlan takes tensors on one device, cuda:{index}, and tensor {slot} is "
                f"{_where(t)}; digest_tensors takes any"
            )
        for part in parts_of(t, places[slot] if places is not None else None):
            table.add(part, slot)
        addresses.append(given.data_ptr())
    return addresses


def _where(t: object) -> str:
    return f"on {t.device}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
