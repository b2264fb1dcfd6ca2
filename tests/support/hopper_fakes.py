"""Stands for the kernels and the driver, so that packing and launching run on a CPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mok import engine
from mok.dispatch import clean_topk, make_schedule
from mok.hopper.backward_layout import make_backward_layout
from mok.hopper.backward_memory import BackwardKernels, BackwardMemory, assemble_backward
from mok.hopper.layout import Segments, Sizes, make_layout
from mok.hopper.maps import MapCache, MapSpec
from mok.hopper.packing import Problem, Results, check_fits
from mok.hopper.saved import padded_rows
from mok.hopper.workspace import (
    HopperWorkspace,
    Kernels,
    Timeouts,
    arena,
    assemble,
    clear_symmetric,
)
from mok.reference import MoEInputs

CPU = torch.device("cpu")


@dataclass
class FakeKernel:
    """Notes its launches: (name, arguments, options)."""

    name: str
    log: list[tuple[str, tuple[object, ...], dict[str, Any]]]

    def launch(self, *args: object, **options: Any) -> None:
        self.log.append((self.name, args, options))


@dataclass
class Fakes:
    """Eight kernels with one log, and a cache whose maps are numbers of the specs asked for."""

    log: list[tuple[str, tuple[object, ...], dict[str, Any]]] = field(default_factory=list)
    specs: list[MapSpec] = field(default_factory=list)

    @property
    def kernels(self) -> Kernels:
        names = [one.name for one in dataclasses.fields(Kernels)]
        return Kernels(**{name: FakeKernel(name, self.log) for name in names})  # type: ignore[arg-type]

    @property
    def backward_kernels(self) -> BackwardKernels:
        names = [one.name for one in dataclasses.fields(BackwardKernels)]
        return BackwardKernels(**{name: FakeKernel(name, self.log) for name in names})  # type: ignore[arg-type]

    def encode(self, spec: MapSpec) -> bytes:
        self.specs.append(spec)
        return len(self.specs).to_bytes(8, "little") * 16

    def spec(self, encoded: Any) -> MapSpec | None:
        """The spec that a record's map was made from; None for a map that is not there."""
        number = int(encoded.opaque[0])
        return self.specs[number - 1] if number else None

    def workspace(self, sizes: Sizes, **options: Any) -> HopperWorkspace:
        layout = make_layout(sizes, options.get("segments"))
        symmetric = arena(layout.symmetric_bytes, CPU)
        clear_symmetric(symmetric, layout)
        bases = (symmetric.data_ptr(), *(0x10000 * (1 + n) for n in range(1, sizes.ranks)))
        return assemble(
            layout,
            CPU,
            0,
            symmetric,
            bases,
            self.kernels,
            Timeouts(5.0, 0.5),
            maps=MapCache(encoder=self.encode),
        )

    def backward(
        self, workspace: HopperWorkspace, *, segments: Segments | None = None
    ) -> BackwardMemory:
        layout = make_backward_layout(workspace.layout, segments)
        symmetric = arena(layout.symmetric_bytes, CPU)
        others = (0x9000000 * (1 + n) for n in range(1, workspace.sizes.ranks))
        bases = (symmetric.data_ptr(), *others)
        made = assemble_backward(workspace, layout, symmetric, bases, self.backward_kernels)
        workspace.keep_backward(made)
        return made


def problem_of(inputs: MoEInputs) -> Problem:
    """The inputs of a case as a call."""
    return Problem(
        inputs.x,
        inputs.topk_experts,
        inputs.router_weights,
        inputs.w_gate,
        inputs.w_up,
        inputs.w_down,
        inputs.shared,
        inputs.swiglu_limit,
    )


def small_problem(
    tokens: int = 70, shared_width: int | None = None, limit: float | None = None
) -> Problem:
    """T tokens, H = 128, I = 64, E = 4, K = 2; zeros, for what does not look at values."""
    bf16 = torch.bfloat16
    shared = None
    if shared_width is not None:
        gate, up = (torch.zeros(shared_width, 128, dtype=bf16) for _ in range(2))
        shared = (gate, up, torch.zeros(128, shared_width, dtype=bf16))
    return Problem(
        x=torch.zeros(tokens, 128, dtype=bf16),
        topk=torch.arange(2 * tokens, dtype=torch.int64).view(tokens, 2) % 4,
        router=torch.ones(tokens, 2),
        gate=torch.zeros(4, 64, 128, dtype=bf16),
        up=torch.zeros(4, 64, 128, dtype=bf16),
        down=torch.zeros(4, 128, 64, dtype=bf16),
        shared=shared,
        limit=limit,
    )


def simulated_launch(
    workspace: HopperWorkspace,
    problem: Problem,
    *,
    saved: int | None,
    num_sms: int = 0,
    count_bad: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Results:
    """A forward with the Hopper backend's results, computed by the portable one.

    Padding of saved rows is NaN, so that whoever reads it shows. Bad ids reach the host at once.
    """
    del num_sms
    workspace.raise_failed()
    before = workspace.counted_bad()
    if group is None:
        workspace.raise_bad(before)
    check_fits(workspace, problem)
    experts = problem.gate.shape[0]
    topk, bad = clean_topk(problem.topk, experts * workspace.sizes.ranks)
    if count_bad:
        workspace.bad[1].add_(bad.sum().to(torch.int32))
    schedule = make_schedule(topk, experts, group)
    own = problem.shared
    found = engine.forward_pass(
        problem.x,
        problem.router,
        schedule,
        engine.expert_weights(problem.gate, problem.up, problem.down),
        engine.shared_weights(*(own or (None, None, None))),
        engine.Settings(group, problem.limit, 4096),
    )
    if group is not None:
        workspace.raise_bad(before)
    if saved is None:
        return Results(found.out)
    rows = padded_rows(schedule.rows_E, problem.x.device)
    kept = []
    for part in (found.routed.gate, found.routed.up):
        whole = torch.full((saved, part.shape[1]), torch.nan, dtype=part.dtype)
        inside = rows < saved
        whole[rows[inside]] = part[inside]
        kept.append(whole)
    if found.shared is None:
        return Results(found.out, *kept)
    return Results(found.out, *kept, found.shared.gate, found.shared.up)


def sizes_of(problem: Problem, max_tokens: int, ranks: int = 1) -> Sizes:
    """What a workspace for a call has to be made for."""
    return Sizes(
        max_tokens,
        problem.topk.shape[1],
        problem.gate.shape[0],
        problem.x.shape[1],
        problem.gate.shape[1],
        0 if problem.shared is None else problem.shared[0].shape[0],
        ranks,
    )
