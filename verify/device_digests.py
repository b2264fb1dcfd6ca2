"""Digests of tensors on a CUDA device, where they are: many in one launch, at the speed of reading.

    plan = DigestPlan({"w": w, "x": x})
    plan.launch()                  # on the current stream, without waiting
    plan.digests()                 # waits; {"w": Digest(...), "x": Digest(...)}

The values are those of `verify.hashing` on a CPU, bit for bit. Memory: 240 bytes for each part of
a tensor and 32 for each digest, nothing in proportion to the data. Work goes to torch's current
stream of the tensors' device. A prepared plan replays as a CUDA graph.

Where the kernel cannot run, `digest_tensors` copies to the host and computes there;
`verify.device_kernel.digest_backend` says which it is, and why. So it does with a tensor that would
take too many parts. Refuses a plan on tensors of several devices, to launch when a tensor has moved
since the plan was made, and digests of tensors whose shape has changed since.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mok.launching import raw_stream
from verify.device_dense import DenseMemory, dense_memory, pack_wholes, unchanged
from verify.device_inputs import (
    Header,
    Place,
    device_of,
    fill,
    form_of,
    header_of,
    in_few_parts,
    named,
)
from verify.device_kernel import DEFAULT_TUNING, Tuning, loaded
from verify.device_parts import FIELDS, PartTable
from verify.digests import Digest
from verify.errors import UnsupportedError
from verify.hashing import plain_tensor
from verify.lanes import DEFAULT_SEED, key_seeds

_NOTHING: AbstractContextManager[object] = nullcontext()

Rows = npt.NDArray[np.uint64]
LANES_BYTES = 32  # of a digest
NOT_RUN = -1  # in all lanes until a launch has run; no digest has that, but by a chance of 2**-256
STRIPED_FROM = 16  # tiles of a CTA and part from which on striping pays for its flushes


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
        names, values = named(tensors)
        placed = _placed(layouts)
        dense = None if placed else dense_memory(values)
        if dense is not None:
            self._read_dense(names, values, dense, seed, tuning)
        else:
            places = [placed.get(name) for name in names]
            self._index, table = device_of(values), PartTable()
            self._addresses = fill(table, values, places, self._index)
            headers = [header_of(t, place) for t, place in zip(values, places, strict=True)]
            self._describe(names, values, headers)
            self._prepare_table(table, len(values), seed, tuning)

    @classmethod
    def of_table(
        cls, tensor: Tensor, table: PartTable, outputs: int, seed: int, tuning: Tuning
    ) -> DigestPlan:
        """A plan for parts that somebody else described, all of them in `tensor`.

        For `lanes`, and to be launched at once, outside of a capture.
        """
        plan = cls.__new__(cls)
        plan._index, plan._addresses = device_of((tensor,)), [tensor.data_ptr()]
        plan._describe((), (tensor,), [])
        plan._prepare_table(table, outputs, seed, tuning, mark=False)
        return plan

    @classmethod
    def of_dense(
        cls, names: tuple[str, ...], tensors: tuple[Tensor, ...], dense: DenseMemory, seed: int
    ) -> DigestPlan:
        """A plan for tensors that `dense_memory` has read already.

        To be launched at once, outside of a capture.
        """
        plan = cls.__new__(cls)
        plan._read_dense(names, tensors, dense, seed, DEFAULT_TUNING)
        return plan

    def _read_dense(
        self,
        names: tuple[str, ...],
        tensors: tuple[Tensor, ...],
        dense: DenseMemory,
        seed: int,
        tuning: Tuning,
    ) -> None:
        self._index, self._addresses = dense.index, dense.addresses
        self._describe(names, tensors, None)
        self._sizes: Sequence[int] = dense.sizes

        def write(rows: Rows) -> int:
            return pack_wholes(dense.addresses, dense.sizes, tuning.geometry, rows)[1]

        self._prepare(len(tensors), write, True, len(tensors), seed, tuning)

    def _describe(
        self, names: tuple[str, ...], tensors: tuple[Tensor, ...], headers: list[Header] | None
    ) -> None:
        """headers: None for dense tensors, whose headers are read when they are needed."""
        self.names, self._tensors, self._headers = names, tensors, headers
        self._forms = None if headers is None else [*map(form_of, tensors)]

    def _prepare_table(
        self, table: PartTable, outputs: int, seed: int, tuning: Tuning, mark: bool = True
    ) -> None:
        def write(rows: Rows) -> int:
            return table.pack(tuning.geometry, rows)[1]

        self._prepare(len(table), write, table.plain, outputs, seed, tuning, mark)

    def _prepare(
        self,
        count: int,
        write: Callable[[Rows], int],
        plain: bool,
        outputs: int,
        seed: int,
        tuning: Tuning,
        mark: bool = True,
    ) -> None:
        """count: of parts. write: puts them into [count, 30] and gives the number of tiles. mark:
        fills the lanes with NOT_RUN, since a first launch that is captured runs only when that is
        replayed; by the copy that brings the parts, which is cheaper than a launch."""
        index = self._index
        # by the number alone it is found without hashing a tuning
        found = loaded(index) if tuning is DEFAULT_TUNING else loaded(index, tuning)
        if found.kernel is None:
            raise UnsupportedError(
                f"no digest on the device: {found.reason}. digest_tensors copies to the host"
            )
        with _current(index), _not_of_inference():
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError("make a DigestPlan before the capture; launch it inside")
            self._stream = raw_stream(index)
            first, device = 0 if mark else outputs, torch.device("cuda", index)
            # One block for the lanes and the parts behind them. The copy is asynchronous, and torch
            # keeps the pinned memory until it is done; it also keeps it for the next plan.
            size, lanes = count * FIELDS, 4 * (outputs - first)
            self._block = torch.empty(
                (outputs + -(-size // 4), 4), dtype=torch.int64, device=device
            )
            self.lanes = self._block[:outputs]
            target = self._block[first:] if first else self._block
            staged = torch.empty(target.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            words = staged.numpy().reshape(-1)
            words[:lanes] = NOT_RUN
            rows = words[lanes : lanes + size].reshape(count, FIELDS).view(np.uint64)
            num_tiles = write(rows) if count else 0
            target.copy_(staged, non_blocking=True)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._launched = False
        self._launch = None
        if num_tiles:
            grid, tuning = min(found.blocks, num_tiles), found.tuning
            long = num_tiles >= STRIPED_FROM * grid * count
            address = self._block.data_ptr()
            self._launch = found.kernel.prepare(
                ctypes.c_void_p(address + LANES_BYTES * outputs),
                ctypes.c_uint32(count),
                ctypes.c_uint64(num_tiles),
                *map(ctypes.c_uint64, key_seeds(seed)),
                ctypes.c_void_p(address),
                ctypes.c_uint32(grid if tuning.striped and plain and long else 1),
                grid=grid,
                block=tuning.threads,
                shared=tuning.shared_bytes,
            )

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        """Zeroes the lanes and adds up the digests, on `stream` or torch's current one.

        Does not wait, and may be captured: keep the plan as long as the graph. `torch.cuda.graph`
        waits for what the plan copied to the device when it was made. After a `capture_begin` of
        your own on another stream, make the stream on which you replay wait for the one on which
        the plan was made or launched last, or synchronise before the first replay.
        UnsupportedError if a tensor's memory is not where it was when the plan was made, or the
        stream is another device's.
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
        """By name, as of the last launch; waits for it. UnsupportedError when there was none, or
        none has run, and when a tensor's shape or strides were changed in place.

        A launch that was captured into a graph of yours runs when you replay that: synchronise with
        the stream where you did before you call this.
        """
        if not self._launched:
            raise UnsupportedError(
                "a DigestPlan has digests after launch() or replay(), not before"
            )
        if raw_stream(self._index) != self._stream:
            torch.cuda.current_stream(self._index).wait_stream(
                _stream_of(self._stream, self._index)
            )
        rows = self.lanes.cpu().numpy().view(np.uint64).tolist()
        if rows[0] == [NOT_RUN % 2**64] * 4:
            raise UnsupportedError(
                "the launch of this DigestPlan was captured and has not run: replay the graph first"
            )
        return {
            name: Digest(dtype, shape, count, tuple(row))
            for name, (dtype, shape, count), row in zip(
                self.names, self._checked_headers(), rows, strict=True
            )
        }

    def _checked_headers(self) -> list[Header]:
        """Of tensors that are as they were read. UnsupportedError when the shape of one is not.

        Of dense tensors the bytes count, and the shape is that of now.
        """
        if self._headers is None:
            same = unchanged(self._tensors, self._sizes)
        else:
            same = [*map(form_of, self._tensors)] == self._forms
        if not same:
            raise UnsupportedError(
                "a tensor's shape or strides were changed in place since the DigestPlan was made: "
                "make a new one"
            )
        if self._headers is None:
            return [header_of(t, None) for t in self._tensors]
        return self._headers

    def _record(self) -> None:
        self.lanes.zero_()
        if self._launch is not None:
            self._launch()

    def _enter(self, stream: torch.cuda.Stream | None) -> None:
        """Checks addresses, and puts a launch on another stream behind the last one."""
        if stream is not None and stream.device_index != self._index:  # handles may be the same
            raise UnsupportedError(
                f"a DigestPlan on cuda:{self._index} is launched on a stream of that device, not "
                f"on one of cuda:{stream.device_index}"
            )
        if [*map(Tensor.data_ptr, self._tensors)] != self._addresses:
            raise UnsupportedError(
                "a tensor's memory is not where it was when the plan was made (assigned to .data, "
                "resized or freed?): make a new DigestPlan"
            )
        self._launched = True
        handle = raw_stream(self._index) if stream is None else stream.cuda_stream
        if handle == self._stream:
            return
        with torch.cuda.device(self._index):
            if torch.cuda.is_current_stream_capturing():
                return  # whoever captures orders the replays
            new = torch.cuda.current_stream() if stream is None else stream
            new.wait_stream(_stream_of(self._stream, self._index))
            for t in (self._block, *self._tensors):
                t.record_stream(new)
        self._stream = handle


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

    names, values = named(tensors)
    places = _placed(layouts)
    dense = None if places else dense_memory(values)
    if dense is not None and loaded(dense.index).kernel is not None:
        plan = DigestPlan.of_dense(names, values, dense, seed)
        plan.launch()
        return plan.digests()
    found: dict[str, Digest] = {}
    on_devices: dict[int, dict[str, Tensor]] = {}
    for name, t in zip(names, values, strict=True):
        plain = plain_tensor(t)
        if plain.is_cuda and loaded(plain.get_device()).kernel is not None:
            if plain.is_neg() and not (plain.is_floating_point() or plain.is_complex()):
                plain = plain.resolve_neg()
            if in_few_parts(plain, places.get(name)):
                on_devices.setdefault(plain.get_device(), {})[name] = plain
                continue
        found[name] = hashing.digest_on_host(t, places.get(name), seed)
    plans = []
    for some in on_devices.values():
        plans.append(DigestPlan(some, seed=seed, layouts=places))
        plans[-1].launch()
    for plan in plans:
        found |= plan.digests()
    return {name: found[name] for name in names}


def _placed(layouts: Mapping[str, Place | None] | None) -> dict[str, Place]:
    """Without the names of tensors that are whole."""
    return {name: place for name, place in (layouts or {}).items() if place is not None}


def _not_of_inference() -> AbstractContextManager[object]:
    """Tensors made here may be changed outside of torch.inference_mode, too."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


def _stream_of(handle: int, index: int) -> torch.cuda.Stream:
    """The stream of a number that `raw_stream` gave; objects cost more than a plan can wait for."""
    if handle == 0:  # as an external stream torch would take it for none
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(handle, device=index)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """The stream as the current one; None leaves it."""
    return _NOTHING if stream is None else torch.cuda.stream(stream)


def _current(index: int) -> AbstractContextManager[object]:
    """Makes a device the current one, at no cost if it is."""
    return _NOTHING if torch.cuda.current_device() == index else torch.cuda.device(index)
