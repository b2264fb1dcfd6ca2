"""The layer's real kernels on a CPU: tests/emulation compiled with g++, behind the host's own code.

It exists so that the protocol between warps, CTAs and ranks, and the index arithmetic of tiles, are
executed where no GPU is. The sources of csrc are compiled unchanged against headers that stand for
CUDA's; every thread is a fiber, chosen by a seeded random scheduler; copies and products happen
late. It sees deadlocks, wrong values, accesses outside of a tensor, shared memory that is written
while something still reads it, and missing proxy fences of writers. Memory is sequentially
consistent, so a missing acquire or release is NOT seen, and neither is speed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mok.hopper import packing, records
from mok.hopper.forward import launch_kernels
from mok.hopper.layout import Segments, Sizes, make_layout, saved_rows
from mok.hopper.maps import MapCache, MapSpec
from mok.hopper.packing import Problem, Results
from mok.hopper.workspace import HopperWorkspace, Kernels, Timeouts, assemble, clear_symmetric

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "emulation"
CSRC = ROOT / "csrc"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w")
_MAGIC = 0x6D61702E656D7531
_EVERY_CTA = 0xFFFFFFFF
_REPORT = 16384
# Static shared memory of the kernels of one library is exchanged as a whole: small ones apart.
_PARTS = {
    "forward": (("forward",), ("forward",)),
    "forward_group": (("forward_group",), ("forward_group",)),
    "schedule": (("schedule", "enter"), ("publish", "count", "scan", "place", "enter")),
    "enter_backward": (("enter_backward",), ("enter_backward",)),
    "backward": (("backward",), ("backward",)),
    "backward_group": (("backward_group",), ("backward_group",)),
    "transposed": (("transposed",), ("transposed",)),
}
FORWARD_PARTS = ("forward", "forward_group", "schedule")


def compiler() -> str | None:
    """The path of g++, or None."""
    return shutil.which("g++")


class Launch(ctypes.Structure):
    """`Launch` of tests/emulation/include/emulator.hpp."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("stream", "kernel", "grid_x", "grid_y", "block")),
        *((name, ctypes.c_uint32) for name in ("shared", "resident", "ranks_here")),
        *((name, ctypes.c_void_p) for name in ("one", "many", "ids", "ids_many", "grad", "grads")),
    )


def _compile(output: Path, sources: Sequence[Path], csrc: Path, *more: str) -> None:
    path = compiler()
    assert path is not None
    include = [f"-I{folder}" for folder in (SOURCES, SOURCES / "include", csrc)]
    command = [path, *FLAGS, *more, *include, "-o", str(output), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


@dataclass(frozen=True)
class Emulator:
    """The emulated machine and one set of kernels."""

    library: ctypes.CDLL
    kernels: dict[str, int]


@functools.cache
def _machine() -> ctypes.CDLL:
    """The machine of this process: a second one would be mixed up with the first."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "machine.so"
        _compile(output, sorted(SOURCES.glob("*.cpp")), CSRC)
        return ctypes.CDLL(str(output), mode=ctypes.RTLD_GLOBAL)


def build(folder: Path, csrc: Path = CSRC, parts: Sequence[str] = FORWARD_PARTS) -> Emulator:
    """The machine with kernels of these parts, compiled into an empty folder."""
    return add_kernels(Emulator(_machine(), {}), folder, csrc, parts)


def add_kernels(
    emulator: Emulator, folder: Path, csrc: Path, parts: Sequence[str], *flags: str
) -> Emulator:
    """The same machine with kernels of other sources; parts that are not named stay.

    folder: another one each time, since a loaded library's file must not change. flags: beside
    FLAGS.
    """
    kernels = dict(emulator.kernels)
    for part in parts:
        units, names = _PARTS[part]
        output = folder / f"{part}.so"
        _compile(output, [SOURCES / "kernels" / f"{unit}.cpp" for unit in units], csrc, *flags)
        ctypes.CDLL(str(output))  # it announces its kernels to the machine
        for name in names:
            kernels[name] = int(emulator.library.emulator_kernel(name.encode()))
            assert kernels[name] >= 0, name
    return Emulator(emulator.library, kernels)


def encode(spec: MapSpec) -> bytes:
    """A tensor map as the emulator reads it: `Map` of tests/emulation/machine.hpp."""
    rank = len(spec.sizes)
    sizes = (*spec.sizes, 1)[:3]
    strides = (*spec.strides, 0)[:2]
    box = (*spec.box, 1)[:3]
    return struct.pack("<Q Q 3Q 2Q 3I I 56x", _MAGIC, spec.pointer, *sizes, *strides, *box, rank)


@dataclass
class Recorder:
    """Launches in order, to be run together; stands for a stream of each rank."""

    emulator: Emulator
    launches: list[Launch] = field(default_factory=list)
    keep: list[object] = field(default_factory=list)
    stream: int = 0
    resident: int = _EVERY_CTA
    skip: frozenset[tuple[int, str]] = frozenset()


def aligned_copy(record: ctypes.Structure) -> tuple[object, int]:
    """Memory that holds a copy of a record, and its address, a multiple of 64 (alignas)."""
    nbytes = ctypes.sizeof(record)
    memory = (ctypes.c_uint8 * (nbytes + 64))()
    start = -(-ctypes.addressof(memory) // 64) * 64
    ctypes.memmove(start, ctypes.byref(record), nbytes)
    return memory, start


@dataclass(frozen=True)
class EmulatedKernel:
    """Looks like mok.jit.Kernel; a launch is recorded.

    Arguments as on the device: records by value, then tables of them or None, as each kernel's
    signature has it.
    """

    name: str
    recorder: Recorder

    def launch(
        self, *args: object, grid: int | tuple[int, ...], block: int, shared: int = 0
    ) -> None:
        recorder, name = self.recorder, self.name
        if (recorder.stream, name) in recorder.skip:
            return
        made = Launch(stream=recorder.stream, block=block, shared=shared, ranks_here=1)
        made.grid_x, made.grid_y = (grid, 1) if isinstance(grid, int) else grid
        by_value, tables, rest = _PARAMETERS.get(name, (("one",), ("many",), ()))
        values = [a for a in args if isinstance(a, ctypes.Structure)]
        others = [a for a in args if not isinstance(a, ctypes.Structure)]
        for field_name, record in zip(by_value, values, strict=True):
            memory, start = aligned_copy(record)
            setattr(made, field_name, start)
            recorder.keep.append(memory)
        for field_name, other in zip((*tables, *rest), others, strict=True):
            if field_name == "ranks_here":
                assert isinstance(other, ctypes.c_uint32)
                made.ranks_here = other.value
            else:
                setattr(made, field_name, None if other is None else other.data_ptr())  # type: ignore[attr-defined]
        recorder.keep += others
        large = name in ("forward", "backward")
        made.resident = recorder.resident if large else _EVERY_CTA
        together = large and made.many is not None
        made.kernel = recorder.emulator.kernels[f"{name}_group" if together else name]
        recorder.launches.append(made)


_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "publish": (("one",), ("many",), ("ids", "ids_many")),
    "forward": (("one",), ("many",), ("ranks_here",)),
    "enter_backward": (("one", "grad"), ("many", "grads"), ()),
    "backward": (("one", "grad"), ("many", "grads"), ("ranks_here",)),
}
"""Fields of Launch by kernel: records by value, tables, others; in the order of its arguments."""


@dataclass(frozen=True)
class Outcome:
    """What a run gave: per launch and rank the results; why it did not end well, or ""."""

    results: list[list[Results]]
    failure: str
    workspaces: tuple[HopperWorkspace, ...]


@dataclass(frozen=True)
class Knobs:
    """How a run is made. segments, ring_x, ring_h in blocks; None: what the layout says.

    tight: rings as small as they may be, one and two segments.

    together: all ranks in one launch (LocalGroup); else each has launches and a stream of its own,
    and `skip` names kernels (rank, name) that are not launched. ctas: of a rank, of `forward`;
    resident: how many of a launch run at a time. let_time_pass: waits end by time-out instead of
    being reported as a deadlock.
    """

    ctas: int = 1
    seed: int = 0
    segments: Segments | None = None
    ring_x: int | None = None
    ring_h: int | None = None
    tight: bool = False
    together: bool = True
    resident: int = _EVERY_CTA
    save: bool = True
    let_time_pass: bool = False
    skip: frozenset[tuple[int, str]] = frozenset()
    most_steps: int = 200_000_000


def align64(data: bytes) -> torch.Tensor:
    """Bytes at an address that is a multiple of 64."""
    room = torch.zeros(len(data) + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    room[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return room[start : start + len(data)]


def poisoned(nbytes: int) -> torch.Tensor:
    """Bytes that are NaN as bf16, 256-byte aligned as on a device."""
    room = torch.full((nbytes + 256,), 0xFF, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    return room[start : start + nbytes]


def open_workspaces(
    emulator: Emulator, sizes: Sizes, knobs: Knobs
) -> tuple[tuple[HopperWorkspace, ...], Recorder]:
    """One poisoned workspace for each of sizes.ranks."""
    layout = make_layout(sizes, knobs.segments)
    most = layout.segments.most
    if knobs.tight:
        ring_x, ring_h = min(most, layout.ring_x), min(2 * most, layout.ring_h)
        layout = dataclasses.replace(layout, ring_x=ring_x, ring_h=ring_h)
    ring_x, ring_h = knobs.ring_x or layout.ring_x, knobs.ring_h or layout.ring_h
    assert ring_x <= layout.ring_x, "more blocks than the layout has memory for"
    assert ring_h <= layout.ring_h, "more blocks than the layout has memory for"
    layout = dataclasses.replace(layout, ring_x=ring_x, ring_h=ring_h)
    sms = knobs.ctas * (sizes.ranks if knobs.together else 1)
    recorder = Recorder(emulator)
    names = ("publish", "count", "scan", "place", "enter", "forward")
    kernels = Kernels(*(EmulatedKernel(name, recorder) for name in names))  # type: ignore[arg-type]
    arenas = [poisoned(layout.symmetric_bytes) for _ in range(sizes.ranks)]
    for arena in arenas:
        clear_symmetric(arena, layout)
    bases = tuple(arena.data_ptr() for arena in arenas)
    device = torch.device("cpu")
    workspaces = []
    for rank in range(sizes.ranks):
        made = assemble(*(layout, device, rank, arenas[rank], bases, kernels, Timeouts(), arenas))
        cache = MapCache(encoder=encode)
        local = poisoned(layout.local_bytes)
        local[: layout.control] = 0
        for name in ("blocks", "groups", "counts", "routes", "expert_rows"):
            region = layout.local[name]
            local[region.offset : region.offset + region.nbytes] = 0xFF
        peers = layout.local["peers"]
        where = slice(peers.offset, peers.offset + peers.nbytes)
        local[where] = made.local[where]
        workspaces.append(dataclasses.replace(made, local=local, maps=cache, num_sms=sms))
    return tuple(workspaces), recorder


def run(
    emulator: Emulator,
    problems: Sequence[Sequence[Problem]],
    sizes: Sizes,
    knobs: Knobs = Knobs(),
) -> Outcome:
    """Launches in order under one workspace; problems[launch][rank]. Results are NaN at first."""
    workspaces, recorder = open_workspaces(emulator, sizes, knobs)
    recorder.resident, recorder.skip = knobs.resident, knobs.skip
    regions = workspace_regions(workspaces)
    results: list[list[Results]] = []
    for given in problems:
        made, packed = [], []
        for workspace, problem in zip(workspaces, given, strict=True):
            packing.check_fits(workspace, problem)
            rows = saved_rows(problem.x.shape[0], sizes) if knobs.save else None
            result = packing.make_results(problem, rows)
            for tensor in tensors_of(result):
                tensor.fill_(torch.nan)
            made.append(result)
            packed.append(packing.pack(workspace, problem, result))
            regions += call_regions(workspace.rank, problem, result)
        results.append(made)
        launch_ranks(recorder, workspaces, given, packed, knobs)
    failure = run_launches(recorder, regions, knobs)
    return Outcome(results, failure, workspaces)


def launch_ranks(
    recorder: Recorder,
    workspaces: Sequence[HopperWorkspace],
    given: Sequence[Problem],
    packed: Sequence[records.Rank],
    knobs: Knobs,
) -> None:
    """Records a forward of every rank: one launch, or one each in a stream of its own."""
    if knobs.together and len(workspaces) > 1:
        many = align64(records.table(packed))
        ids = torch.tensor([p.topk.data_ptr() for p in given], dtype=torch.int64)
        recorder.keep.append(ids)
        ctas = knobs.ctas * len(workspaces)
        launch_kernels(workspaces, packed[0], many, (None, ids), ctas)
        return
    for rank, workspace in enumerate(workspaces):
        recorder.stream = rank
        launch_kernels([workspace], packed[rank], None, (given[rank].topk, None), knobs.ctas)


def run_launches(recorder: Recorder, regions: list[tuple[str, torch.Tensor]], knobs: Knobs) -> str:
    """Runs what was recorded; what went wrong, or "". regions: all memory that may be used."""
    known: dict[int, tuple[str, int]] = {}
    for name, tensor in regions:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            known[tensor.data_ptr()] = (name, nbytes)
    names = (ctypes.c_char_p * len(known))(*(name.encode() for name, _ in known.values()))
    flat = [number for address, (_, nbytes) in known.items() for number in (address, nbytes)]
    extents = (ctypes.c_uint64 * len(flat))(*flat)
    launches = (Launch * len(recorder.launches))(*recorder.launches)
    report = ctypes.create_string_buffer(_REPORT)
    recorder.emulator.library.emulator_run(
        *(launches, ctypes.c_uint32(len(launches)), names, extents, ctypes.c_uint32(len(known))),
        *(ctypes.c_uint64(knobs.seed + 1), ctypes.c_int(knobs.let_time_pass)),
        *(ctypes.c_uint64(knobs.most_steps), report, ctypes.c_uint32(_REPORT)),
    )
    return report.value.decode()


def tensors_of(result: Results) -> list[torch.Tensor]:
    """Those that there are."""
    every = (result.out, result.gate, result.up, result.shared_gate, result.shared_up)
    return [tensor for tensor in every if tensor is not None]


def workspace_regions(workspaces: Sequence[HopperWorkspace]) -> list[tuple[str, torch.Tensor]]:
    """All that lies in the arenas, by name."""
    found = []
    for w in workspaces:
        for arena, table in ((w.local, w.layout.local), (w.symmetric, w.layout.symmetric)):
            for name, region in table.items():
                part = arena[region.offset : region.offset + region.nbytes]
                found.append((f"rank {w.rank} {name}", part))
    return found


def call_regions(rank: int, problem: Problem, result: Results) -> list[tuple[str, torch.Tensor]]:
    """A call's own tensors, by name."""
    named = {"x": problem.x, "router": problem.router, "topk": problem.topk}
    named |= {"w_gate": problem.gate, "w_up": problem.up, "w_down": problem.down}
    shared = problem.shared or ()
    named |= dict(zip(("shared w_gate", "shared w_up", "shared w_down"), shared, strict=False))
    named |= {"out": result.out}
    kept = (result.gate, result.up, result.shared_gate, result.shared_up)
    for name, tensor in zip(("g", "u", "shared g", "shared u"), kept, strict=True):
        if tensor is not None:
            named[name] = tensor
    return [(f"rank {rank} {name}", tensor) for name, tensor in named.items()]
