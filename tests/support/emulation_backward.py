"""The layer's forward and backward on emulated threads, behind the host's own code.

It exists beside `emulation`, whose machine and workspaces it uses, so that passes can follow each
other under one workspace as in training. Everything that kernels write is poisoned before and
fenced: main gradients and results lie between words that nobody may change, because plain loads and
stores are not looked at by the machine. Refuses rings below what the host guarantees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import emulation
import torch
from emulation import EmulatedKernel, Emulator, Knobs, Recorder
from torch import Tensor

from mok.hopper import backward_packing, backward_problem, gradient_records, packing, records
from mok.hopper.backward import launch_backward_kernels
from mok.hopper.backward_layout import BackwardLayout, make_backward_layout, weight_tiles
from mok.hopper.backward_memory import BackwardKernels, assemble_backward
from mok.hopper.backward_problem import WEIGHTS, BackwardProblem, Gradients, MainGradients
from mok.hopper.layout import BLOCK, Layout, Region, Segments, Sizes
from mok.hopper.packing import Problem, Results
from mok.hopper.workspace import HopperWorkspace

PARTS = (*emulation.FORWARD_PARTS, "enter_backward", "backward", "backward_group")
EVERYTHING = (1 << len(WEIGHTS)) - 1
_FENCE = 256  # words before and behind what a kernel may write
_FENCED = 0x7FA5A5A5  # a signalling NaN in fp32, and two of them in bf16
_TILE_SUMS = 128 * 256 * 4


@dataclass(frozen=True)
class BackKnobs:
    """How a run is made. run: of both directions; its segments and rings are the forward's.

    segments: of the backward, in blocks. uncut: experts with more blocks go in parts, through
    scratch memory; None: what the layout says. tight: the ring as small as the host allows. ring:
    blocks, whatever the host allows.
    """

    run: Knobs = field(default_factory=Knobs)
    segments: Segments = field(default_factory=lambda: Segments(1, 2))
    uncut: int | None = None
    tight: bool = False
    ring: int | None = None


@dataclass(frozen=True)
class Asked:
    """One rank's part of a pass. d_out: bf16 [T, H].

    kept_blocks: of g and u that the forward keeps; None: there is no forward before, and the
    backward computes all again, or reads what is given as `kept`. main: fp32 gradients to add to,
    by the names of WEIGHTS; copies of them are changed. dtype: of the other gradients.
    """

    problem: Problem
    d_out: Tensor
    kept_blocks: int | None = 0
    wants: int = EVERYTHING
    main: dict[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    kept: Results | None = None


@dataclass(frozen=True)
class Passed:
    """What one pass gave one rank."""

    results: Results | None
    gradients: Gradients
    main: MainGradients


@dataclass
class Fences:
    """Tensors between words that nobody may change: NaN that any addition would change."""

    rooms: list[tuple[str, Tensor]] = field(default_factory=list)

    def make(self, name: str, like: Tensor, beside: int = 0) -> Tensor:
        """A copy of a tensor, aligned to 256 bytes, or so many bytes beside that."""
        nbytes = like.numel() * like.element_size()
        words = torch.full((nbytes // 4 + 2 * _FENCE + 128,), _FENCED, dtype=torch.int32)
        start = _FENCE + -(words.data_ptr() + 4 * _FENCE) % 256 // 4 + beside // 4
        end = start + -(-nbytes // 4)
        self.rooms += [(name, words[:start]), (name, words[end:])]
        made = words[start:end].view(torch.uint8)[:nbytes].view(like.dtype).view(like.shape)
        made.copy_(like)
        return made

    def broken(self) -> list[str]:
        """What was written beyond its end."""
        return [
            f"somebody wrote beside {name}"
            for name, room in self.rooms
            if bool((room != _FENCED).any())
        ]


@dataclass(frozen=True)
class BackOutcome:
    """passes[pass][rank]; failure: why it did not end well, or ""."""

    passes: list[list[Passed]]
    failure: str
    workspaces: tuple[HopperWorkspace, ...]
    fences: Fences


def layout_of(layout: Layout, knobs: BackKnobs) -> BackwardLayout:
    """The host's layout, with what the knobs ask for."""
    found = make_backward_layout(layout, knobs.segments)
    most, sizes = knobs.segments.most, layout.sizes
    if knobs.uncut is not None:
        assert knobs.uncut >= most, "an expert that may be whole is a segment"
        parts = layout.max_blocks // most
        groups = 4 * (sizes.experts + parts) + 6
        scratch = _TILE_SUMS * weight_tiles(sizes.hidden, sizes.width)
        begin = -(-found.local_bytes // 256) * 256
        more = {"scratch": Region(begin, scratch)}
        more["groups"] = Region(begin + -(-scratch // 256) * 256, 32 * groups)
        found = dataclasses.replace(
            found,
            uncut=knobs.uncut,
            max_groups=groups,
            local={**found.local, **more},
            local_bytes=more["groups"].offset + more["groups"].nbytes,
        )
    least = 2 * max(found.uncut, most)
    if knobs.tight:
        found = dataclasses.replace(found, ring=min(least, found.ring))
    assert found.ring == layout.max_blocks or found.ring >= least, "the ring is too small"
    return found if knobs.ring is None else dataclasses.replace(found, ring=knobs.ring)


def open_memory(
    emulator: Emulator, sizes: Sizes, knobs: BackKnobs
) -> tuple[tuple[HopperWorkspace, ...], Recorder]:
    """Poisoned workspaces with poisoned memory for backwards."""
    workspaces, recorder = emulation.open_workspaces(emulator, sizes, knobs.run)
    layout = layout_of(workspaces[0].layout, knobs)
    kernels = BackwardKernels(
        *(EmulatedKernel(name, recorder) for name in ("enter_backward", "backward"))  # type: ignore[arg-type]
    )
    arenas = [emulation.poisoned(layout.symmetric_bytes) for _ in workspaces]
    bases = tuple(arena.data_ptr() for arena in arenas)
    for workspace, arena in zip(workspaces, arenas, strict=True):
        made = assemble_backward(workspace, layout, arena, bases, kernels, arenas)
        local = emulation.poisoned(layout.local_bytes)
        peers = layout.local["peers"]
        where = slice(peers.offset, peers.offset + peers.nbytes)
        local[where] = made.local[where]
        workspace.keep_backward(dataclasses.replace(made, local=local))
    return workspaces, recorder


def run_passes(
    emulator: Emulator, passes: Sequence[Sequence[Asked]], sizes: Sizes, knobs: BackKnobs
) -> BackOutcome:
    """A forward, if something is kept, and a backward for each pass; passes[pass][rank]."""
    workspaces, recorder = open_memory(emulator, sizes, knobs)
    recorder.resident, recorder.skip = knobs.run.resident, knobs.run.skip
    regions = emulation.workspace_regions(workspaces)
    regions += [region for w in workspaces for region in _memory_regions(w)]
    fences, done = Fences(), []
    for number, asked in enumerate(passes):
        kept = _forward(recorder, workspaces, asked, knobs, regions)
        made = []
        for rank, (own, before) in enumerate(zip(asked, kept, strict=True)):
            made.append(_results(fences, f"pass {number} rank {rank}", own, before))
        _backward(recorder, workspaces, asked, made, knobs, regions)
        done.append(made)
    failure = emulation.run_launches(recorder, regions, knobs.run)
    return BackOutcome(done, failure, workspaces, fences)


def _forward(
    recorder: Recorder,
    workspaces: Sequence[HopperWorkspace],
    asked: Sequence[Asked],
    knobs: BackKnobs,
    regions: list[tuple[str, Tensor]],
) -> list[Results | None]:
    if all(own.kept_blocks is None for own in asked):
        return [own.kept for own in asked]
    kept: list[Results | None] = []
    packed = []
    for workspace, own in zip(workspaces, asked, strict=True):
        packing.check_fits(workspace, own.problem)
        rows = own.kept_blocks * BLOCK if own.kept_blocks else None
        results = packing.make_results(own.problem, rows)
        for tensor in emulation.tensors_of(results):
            tensor.fill_(torch.nan)
        kept.append(results)
        packed.append(packing.pack(workspace, own.problem, results))
        regions += emulation.call_regions(workspace.rank, own.problem, results)
    emulation.launch_ranks(recorder, workspaces, [a.problem for a in asked], packed, knobs.run)
    return kept


def _results(fences: Fences, name: str, asked: Asked, kept: Results | None) -> Passed:
    main = MainGradients(  # fp32 that is added to may begin at any word
        **{
            key: fences.make(f"{name} main {key}", tensor, beside=4 * (number % 2))
            for number, (key, tensor) in enumerate(asked.main.items())
        }
    )
    backward = BackwardProblem(asked.d_out, kept, asked.wants, main, asked.dtype)
    fresh = backward_problem.make_gradients(asked.problem, backward)
    fenced = {}
    for item in dataclasses.fields(fresh):
        tensor = getattr(fresh, item.name)
        if tensor is None:
            continue
        tensor.fill_(torch.nan)
        fenced[item.name] = fences.make(f"{name} {item.name}", tensor)
    return Passed(kept, Gradients(**fenced), main)


def _backward(
    recorder: Recorder,
    workspaces: Sequence[HopperWorkspace],
    asked: Sequence[Asked],
    made: Sequence[Passed],
    knobs: BackKnobs,
    regions: list[tuple[str, Tensor]],
) -> None:
    packed = []
    for workspace, own, passed in zip(workspaces, asked, made, strict=True):
        memory, main = workspace.backward, passed.main
        assert memory is not None
        backward = BackwardProblem(own.d_out, passed.results, own.wants, main, own.dtype)
        backward_problem.check_backward(own.problem, backward)
        given = (memory, own.problem, backward, passed.gradients)
        packed.append(backward_packing.pack_backward(workspace, *given))
        results = passed.results or Results(own.problem.x)
        regions += emulation.call_regions(workspace.rank, own.problem, results)
        regions.append((f"rank {workspace.rank} d_out", own.d_out))
        for kind, values in (("", passed.gradients), ("main ", main)):
            for item in dataclasses.fields(values):
                tensor = getattr(values, item.name)
                if tensor is not None:
                    regions.append((f"rank {workspace.rank} {kind}{item.name}", tensor))
    _launch(recorder, workspaces, asked, packed, knobs.run)


def _launch(
    recorder: Recorder,
    workspaces: Sequence[HopperWorkspace],
    asked: Sequence[Asked],
    packed: Sequence[tuple[records.Rank, gradient_records.Gradient]],
    knobs: Knobs,
) -> None:
    if knobs.together and len(workspaces) > 1:
        many = emulation.align64(records.table([rank for rank, _ in packed]))
        grads = emulation.align64(records.table([grad for _, grad in packed]))
        addresses = [own.problem.topk.data_ptr() for own in asked]
        ids = torch.tensor(addresses, dtype=torch.int64)
        recorder.keep.append(ids)
        ctas = knobs.ctas * len(workspaces)
        launch_backward_kernels(workspaces, *packed[0], many, grads, (None, ids), ctas)
        return
    for number, workspace in enumerate(workspaces):
        recorder.stream = number
        ids = (asked[number].problem.topk, None)
        launch_backward_kernels([workspace], *packed[number], None, None, ids, knobs.ctas)


def _memory_regions(workspace: HopperWorkspace) -> list[tuple[str, Tensor]]:
    memory = workspace.backward
    assert memory is not None
    found = []
    for arena, table in (
        (memory.local, memory.layout.local),
        (memory.symmetric, memory.layout.symmetric),
    ):
        for name, region in table.items():
            part = arena[region.offset : region.offset + region.nbytes]
            found.append((f"rank {workspace.rank} backward {name}", part))
    return found
