"""The memory of the Hopper backend on one rank, and the order of the launches that use it.

It exists because rings, flags and counters outlive a launch: flags are epochs that only grow, so
they are zeroed once, here, and never between launches. A workspace is made for a largest number of
tokens and shared by layers of one shape; tokens may change at every call. Launches that use it are
chained across streams in the order in which the host makes them (mok/hopper/chains.py). Refuses to
go on after a failed wait: what the rings hold then is unknown.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mok.errors import ExchangeError, InputError, RoutingError
from mok.hopper import records
from mok.hopper.chains import Chain
from mok.hopper.layout import Layout, Region, Segments, Sizes, make_layout
from mok.hopper.maps import MapCache
from mok.hopper.support import capturing, refuse_capture
from mok.hopper.timeouts import Timeouts, wanted_timeouts
from mok.launching import Kernel
from mok.loading import load

if TYPE_CHECKING:
    from mok.hopper.backward_memory import BackwardMemory

SCHEDULE = "moe/schedule.cu"
ENTER = "moe/enter.cu"
FORWARD = "moe/forward.cu"


@dataclass(frozen=True)
class Kernels:
    """The kernels of one forward, in the order in which they run."""

    publish: Kernel
    count: Kernel
    scan: Kernel
    place: Kernel
    enter: Kernel
    forward: Kernel


def load_kernels(device: torch.device, *, shared: bool = False) -> Kernels:
    """Compiled and loaded on a device of capability 9.0; memoised. Raises what `load` does.

    shared: for several ranks that share a launch.
    """
    return Kernels(
        publish=load(SCHEDULE, "publish", device=device),
        count=load(SCHEDULE, "count", device=device),
        scan=load(SCHEDULE, "scan", device=device),
        place=load(SCHEDULE, "place", device=device),
        enter=load(ENTER, "enter", device=device),
        forward=load(FORWARD, "forward", macros={"GROUP": int(shared)}, device=device),
    )


@dataclass
class _Use:
    """What changes while a workspace is used."""

    closed: bool = False
    broken: str = ""
    captured: bool = False
    reported: int = 0
    late: str | None = None
    seen: set[int] = field(default_factory=set)
    backward: BackwardMemory | None = None


@dataclass(frozen=True, eq=False)
class HopperWorkspace:
    """One rank's memory. Made by open_workspace, open_symmetric or open_local_group.

    local, symmetric: uint8 arenas with the layout's regions. bases: address of every rank's
    symmetric arena. failure: int32 [8] in host memory that the device writes. bad: int32 [2], ids
    that were bad so far, on the device and in host memory.
    """

    layout: Layout
    device: torch.device
    rank: int
    local: torch.Tensor
    symmetric: torch.Tensor
    bases: tuple[int, ...]
    failure: torch.Tensor
    bad: tuple[torch.Tensor, torch.Tensor]
    kernels: Kernels
    num_sms: int
    maps: MapCache = field(default_factory=MapCache)
    timeouts: Timeouts = field(default_factory=Timeouts)
    keep: object = None  # what holds memory of peers
    chain: Chain = field(default_factory=Chain)
    _use: _Use = field(default_factory=_Use)

    @property
    def sizes(self) -> Sizes:
        """What it was made for."""
        return self.layout.sizes

    @property
    def nbytes(self) -> int:
        """Device bytes; known before from layout.make_layout(sizes).nbytes.

        After the first backward that of the backward too: backward_layout.make_backward_layout.
        """
        return self.layout.nbytes + (0 if self.backward is None else self.backward.nbytes)

    @property
    def backward(self) -> BackwardMemory | None:
        """Memory of the backward; None before the first one."""
        return self._use.backward

    def keep_backward(self, memory: BackwardMemory) -> None:
        """Makes it the memory of backwards to come."""
        self._use.backward = memory

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._use.closed

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph recorded a launch: the graph holds its addresses."""
        return self._use.captured

    def address(self, name: str) -> int:
        """Of a local region."""
        return self.local.data_ptr() + self.layout.local[name].offset

    def words(self, name: str) -> torch.Tensor:
        """A local region of 4-byte words, as int32."""
        return region_of(self.local, self.layout.local[name]).view(torch.int32)

    def peers(self) -> tuple[records.Peer, ...]:
        """The symmetric memory of all ranks, as this device sees it."""
        return peers_at(self.layout, self.bases)

    def raise_failed(self) -> None:
        """Raises ExchangeError after a failed wait or a launch that broke off, or when closed.

        Does not wait for launches that still run, but for its error, which names ranks that are
        behind, until they have drained.
        """
        if self._use.closed:
            raise ExchangeError(
                "this workspace is closed; allowed: one that is open. Get a new one from "
                "get_workspace or create_workspace."
            )
        if self._use.broken:
            raise ExchangeError(
                f"a launch broke off after it had begun ({self._use.broken}), and its peers wait "
                "for it. Call mok.functional.clear_workspace_cache() on all ranks, or create the "
                "workspace anew."
            )
        failed = records.failed_wait(ctypes.string_at(self.failure.data_ptr(), 32))
        if failed is not None:
            if self._use.late is None:
                self._use.late = late_ranks(self)
            raise ExchangeError(
                f"a launch gave up: {failed}.{self._use.late} Its results, and those of later "
                "launches, are not to be used. See that every rank makes the same calls and is "
                "alive, then call mok.functional.clear_workspace_cache() on all, or create the "
                "workspace anew."
            )

    def break_off(self, error: BaseException) -> None:
        """Refuses the workspace: some kernels of a launch have gone to the device, others not."""
        self._use.broken = f"{type(error).__name__}: {error}"

    def raise_pending(self) -> None:
        """raise_failed, then RoutingError once for bad expert ids of launches that have ended."""
        self.raise_failed()
        self.raise_bad(self.counted_bad())

    def counted_bad(self) -> int:
        """Bad ids of all launches that have ended, as far as the host knows."""
        return int(self.bad[1][0])

    def raise_bad(self, count: int) -> None:
        """RoutingError if `count`, from counted_bad, is more than what was raised before."""
        if count > self._use.reported:
            new, self._use.reported = count - self._use.reported, count
            raise RoutingError(
                f"{new} bad expert id(s) in earlier calls, out of range or repeated inside a token;"
                f" allowed: -1 (unused slot) or 0 .. "
                f"{self.sizes.experts * self.sizes.ranks - 1}, each at most once per token. They "
                "were run as unused slots. Set MOK_CHECK=1 to raise at the call itself, with the "
                "first of them."
            )

    def check(self) -> None:
        """As raise_pending, after all that was launched on the device."""
        if not self._use.closed and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.raise_pending()

    def begin(self) -> None:
        """Called before a launch's kernels, with the stream they go to as torch's current one."""
        self.raise_failed()
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        self.chain.before(stream)
        if capturing(self.device):
            self._use.captured = True
        elif stream.cuda_stream not in self._use.seen:
            self._use.seen.add(stream.cuda_stream)
            for tensor in (self.local, self.symmetric, self.bad[0]):
                tensor.record_stream(stream)

    def end(self) -> None:
        """Called after a launch's kernels, on the same stream as begin."""
        if self.device.type == "cuda":
            self.chain.after(torch.cuda.current_stream(self.device))

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Around the kernels of one launch: in order with others, from `begin` to `end`.

        With peers, a launch of which only some kernels have gone out breaks the workspace off.
        """
        with self.chain.lock:
            self.begin()
            try:
                yield
            except BaseException as error:
                if self.sizes.ranks > 1:
                    self.break_off(error)
                raise
            finally:
                self.end()

    def close(self) -> None:
        """Refuses further launches. Memory goes when the object does, and no graph may need it.

        Waits for what was launched: until then the device may write into host memory that torch
        would give to somebody else. That ends, since every wait of a launch does.
        """
        used = self.device.type == "cuda" and (self._use.captured or self._use.seen)
        if used and not self._use.closed and not capturing(self.device):
            torch.cuda.synchronize(self.device)
        self._use.closed = True
        self.maps.clear()


def region_of(arena: torch.Tensor, region: Region) -> torch.Tensor:
    """The bytes of a region."""
    return arena[region.offset : region.offset + region.nbytes]


def peers_at(layout: Layout, bases: Sequence[int]) -> tuple[records.Peer, ...]:
    """One Peer per rank from the addresses of their symmetric arenas."""
    where = layout.symmetric
    x = where.get("x")
    return tuple(
        records.Peer(
            x=None if x is None else base + x.offset,
            ids=base + where["ids"].offset,
            y=base + where["y"].offset,
            flags=base + where["flags"].offset,
        )
        for base in bases
    )


def late_ranks(workspace: HopperWorkspace) -> str:
    """Which peers had not come as far as this rank, in words, for the error of a failed wait.

    The wait that failed first may be one for this rank's own rows, though a peer is the reason.
    """
    if workspace.sizes.ranks == 1 or capturing(workspace.device):
        return ""
    counters = workspace.words("counters")[: records.COUNTER_HEAD].tolist()
    flags = region_of(workspace.symmetric, workspace.layout.symmetric["flags"])
    by_kind = flags.view(torch.int32).view(records.FLAGS, records.MAX_RANKS).tolist()
    epochs = (records.COUNT_SCHEDULE, records.COUNT_EPOCH, records.COUNT_EPOCH)
    told: list[str] = []
    named: set[int] = set()
    for kind, (what, epoch) in enumerate(zip(_NOT_YET, epochs, strict=True)):
        for rank in range(workspace.sizes.ranks):
            # Epochs wrap around, as in csrc/moe/waits.cuh.
            behind = (by_kind[kind][rank] - counters[epoch]) % 2**32 >= 2**31
            if behind and rank not in {workspace.rank, *named}:
                named.add(rank)
                told.append(f" rank {rank} {what}.")
    return "".join(told)


_NOT_YET = (
    "has not given its expert ids",
    "has not entered the launch",
    "has not given all its results",
)
"""What a flag that is behind means, by its kind (csrc/moe/rank.cuh)."""


def clear_symmetric(symmetric: torch.Tensor, layout: Layout) -> None:
    """Zeroes what has to be zero before any peer's first launch."""
    for name in ("flags", "ids"):
        region_of(symmetric, layout.symmetric[name]).zero_()


def arena(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised bytes on a device."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def assemble(
    layout: Layout,
    device: torch.device,
    rank: int,
    symmetric: torch.Tensor,
    bases: tuple[int, ...],
    kernels: Kernels,
    timeouts: Timeouts,
    keep: object = None,
    maps: MapCache | None = None,
    chain: Chain | None = None,
) -> HopperWorkspace:
    """A workspace on symmetric memory that is there and cleared; allocates the local part."""
    on_gpu = device.type == "cuda"
    local = arena(layout.local_bytes, device)
    local[: layout.control].zero_()
    table = bytearray(records.table(peers_at(layout, bases)))
    region_of(local, layout.local["peers"]).copy_(torch.frombuffer(table, dtype=torch.uint8))
    sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
    order = chain or Chain()
    if on_gpu:  # the first launch may be on another stream than what was zeroed and copied here
        order.after(torch.cuda.current_stream(device))
    return HopperWorkspace(
        layout,
        device,
        rank,
        local,
        symmetric,
        bases,
        torch.zeros(8, dtype=torch.int32, device="cpu", pin_memory=on_gpu),
        (
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu),
        ),
        kernels,
        sms,
        MapCache() if maps is None else maps,
        timeouts,
        keep,
        order,
    )


def open_workspace(
    sizes: Sizes,
    device: torch.device,
    *,
    segments: Segments | None = None,
    timeouts: Timeouts | None = None,
) -> HopperWorkspace:
    """The workspace of one rank alone. Loads the kernels; raises what that raises."""
    if sizes.ranks != 1:
        raise InputError(
            f"sizes for {sizes.ranks} ranks; allowed: 1. Use open_symmetric or open_local_group."
        )
    refuse_capture(device)
    layout = make_layout(sizes, segments)
    with torch.inference_mode(False), torch.no_grad():
        symmetric = arena(layout.symmetric_bytes, device)
        clear_symmetric(symmetric, layout)
        bases = (symmetric.data_ptr(),)
        kernels = load_kernels(device)
        limits = wanted_timeouts(timeouts)
        return assemble(layout, device, 0, symmetric, bases, kernels, limits)
