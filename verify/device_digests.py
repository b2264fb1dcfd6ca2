"""Digests of tensors on a CUDA device, where they are: many in one launch, at the speed of reading.

    plan = DigestPlan({"w": w, "x": x})
    plan.launch()                  # on the current stream, without waiting
    plan.digests()                 # waits; {"w": Digest(...), "x": Digest(...)}

The values are those of `verify.hashing` on a CPU, bit for bit. Memory: 216 bytes for each part of
a tensor and 32 for each digest, nothing in proportion to the data. Work goes to torch's current
stream of the tensors' device. A prepared plan replays as a CUDA graph.

Where the kernel cannot run, `digest_tensors` copies to the host and computes there;
`verify.device_kernel.digest_backend` says which it is, and why. Refuses a plan on tensors of
several devices, and to launch when a tensor has moved since the plan was made.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from verify.device_kernel import DEFAULT_TUNING, Tuning, loaded
from verify.device_parts import ITEM_BYTES, PartTable, Range, ShardLike, parts_of
from verify.digests import Digest
from verify.errors import UnsupportedError
from verify.hashing import PLAIN, dtype_name, plain_tensor
from verify.lanes import DEFAULT_SEED, key_seeds

_MASK = (1 << 64) - 1

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
        places = [layouts.get(name) for name in self.names] if layouts else None
        self._index = _device_of(self._tensors)
        table = PartTable()
        self._shapes, self._addresses = _fill(table, self._tensors, places, self._index)
        self._places = places
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
        device = torch.device("cuda", index)
        with torch.cuda.device(index):
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError("make a DigestPlan before the capture; launch it inside")
            self._stream = torch.cuda.current_stream()
            self.lanes = torch.empty((outputs, 4), dtype=torch.int64, device=device)
            self._parts = torch.empty(packed.size, dtype=torch.int64, device=device)
            if packed.size:
                # The copy is asynchronous, and torch keeps the pinned memory until it is done.
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
                ctypes.c_uint32(0),
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
        with torch.cuda.device(self._index), torch.cuda.stream(stream):
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
        if stream is None and torch.cuda.current_device() == self._index:
            self._graph.replay()
            return
        with torch.cuda.device(self._index), torch.cuda.stream(stream):
            self._graph.replay()

    def digests(self) -> dict[str, Digest]:
        """By name, as of the last launch; waits for it. UnsupportedError when there was none."""
        if not self._launched:
            raise UnsupportedError(
                "a DigestPlan has digests after launch() or replay(), not before"
            )
        current = torch.cuda.current_stream(self._index)
        if current != self._stream:
            current.wait_stream(self._stream)
        rows = self.lanes.tolist()
        found = {}
        for at, name in enumerate(self.names):
            a, b, c, d = (lane & _MASK for lane in rows[at])
            shape = tuple(self._shapes[at])
            place = self._places[at] if self._places is not None else None
            whole = shape if place is None else tuple(place.full_shape)
            dtype = dtype_name(self._tensors[at].dtype)
            found[name] = Digest(dtype, whole, math.prod(shape), (a, b, c, d))
        return found

    def _record(self) -> None:
        self.lanes.zero_()
        if self._launch is not None:
            self._launch()

    def _enter(self, stream: torch.cuda.Stream | None) -> None:
        """Checks addresses, and puts a launch on another stream behind the last one."""
        if [t.data_ptr() for t in self._tensors] != self._addresses:
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


@functools.cache
def _raw_stream_reader() -> object:
    return getattr(torch._C, "_cuda_getCurrentRawStream", None)


def raw_stream(index: int) -> int:
    """Torch's current stream of a device as a number, which is cheaper than as an object."""
    reader = _raw_stream_reader()
    if callable(reader):
        return int(reader(index))
    return int(torch.cuda.current_stream(index).cuda_stream)


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
) -> tuple[list[torch.Size], list[int]]:
    """Adds the parts of all tensors; their shapes and addresses. Short for the usual tensor."""
    shapes, addresses = [], []
    for slot, t in enumerate(tensors):
        place = places[slot] if places is not None else None
        address = _dense_address(t) if place is None else None
        if address is None:
            t = plain_tensor(t)
        if t.get_device() != index or not t.is_cuda:
            raise UnsupportedError(
                f"a DigestPlan takes tensors on one device, cuda:{index}, and tensor {slot} is "
                f"{_where(t)}; digest_tensors takes any"
            )
        if address is None:
            address = t.data_ptr()
            for part in parts_of(t, place):
                table.add(part, slot)
        elif size := t.nbytes:
            table.add_contiguous(address, size, slot)
        shapes.append(t.shape)
        addresses.append(address)
    return shapes, addresses


def _dense_address(t: Tensor) -> int | None:
    """The address of a tensor whose bytes lie together as a digest reads them, else None."""
    try:
        if type(t) in PLAIN and t.dtype in ITEM_BYTES and t.is_contiguous() and not t.is_neg():
            return None if t.is_nested else t.data_ptr()
    except RuntimeError:  # sparse, or inside a transform: plain_tensor says what to do about it
        pass
    return None


def _where(t: object) -> str:
    return f"on {t.device}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
