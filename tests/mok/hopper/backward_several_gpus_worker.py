"""One of several ranks that run the backward's kernels: SCENARIO RANK RANKS PORT FOLDER.

Started by test_backward_several_gpus.py. All but the last rank survive; the last one is killed or
stopped by the test where the scenario says so. Exits with a traceback when a check fails. Refuses
to be imported by pytest: it collects nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import (
    FIRST,
    GENEROUS,
    LIMITS,
    Gather,
    Job,
    Withheld,
    alone_again,
    counts,
    ends_in_time,
    experts_of,
    large,
    leave,
    main,
    part,
    room,
    rows_of,
    small,
    until_missed,
)
from hopper_runs import random_inputs, random_upstream
from sync_debug import synchronising_raises
from torch import Tensor

import mok
from mok import functional, reference
from mok.config import MoKConfig
from mok.exact import ExactCase, exact_case, same_bits
from mok.hopper import passes
from mok.hopper.support import BACKWARD_VARIABLE
from mok.reference import MoEInputs

NAMES = ("x", "router_weights", "w_gate", "w_up", "w_down")
SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down")
Step = Callable[[], dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Call:
    """A rank's part of a problem, whose leaves want gradients; limit: swiglu_limit."""

    leaves: Mapping[str, Tensor]
    topk: Tensor
    d_out: Tensor
    limit: float | None

    def forward(self, **options: Any) -> Tensor:
        """out, with its graph."""
        shared = tuple(self.leaves[name] for name in SHARED if name in self.leaves)
        x, router, *weights = (self.leaves[name] for name in NAMES)
        return mok.moe(
            *(x, self.topk, router, *weights),
            shared=shared or None,  # type: ignore[arg-type]
            swiglu_limit=self.limit,
            **{"group": dist.group.WORLD, "backend": "hopper", **options},
        )

    def backward(self, out: Tensor) -> dict[str, Tensor]:
        """out and its gradients, by names as mok.exact has them."""
        grads = torch.autograd.grad(out, list(self.leaves.values()), self.d_out)
        found = {f"d_{name}": grad for name, grad in zip(self.leaves, grads, strict=True)}
        return {"out": out.detach(), **found}

    def both(self, **options: Any) -> dict[str, Tensor]:
        """One forward and one backward."""
        return self.backward(self.forward(**options))


def call_of(inputs: MoEInputs, d_out: Tensor, rows: slice, experts: slice = slice(None)) -> Call:
    """A call of some tokens and experts, on this rank's GPU."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.contiguous().cuda().requires_grad_()

    leaves = {name: leaf(getattr(inputs, name)[rows]) for name in NAMES[:2]}
    leaves |= {name: leaf(getattr(inputs, name)[experts]) for name in NAMES[2:]}
    leaves |= dict(zip(SHARED, map(leaf, inputs.shared or ()), strict=False))
    topk = inputs.topk_experts[rows].contiguous().cuda()
    return Call(leaves, topk, d_out[rows].contiguous().cuda(), inputs.swiglu_limit)


def own_call(
    case: ExactCase, job: Job, tokens: int | None = None, first: int = FIRST
) -> tuple[Call, slice]:
    """A rank's part of an exact case, and its rows."""
    rows, _ = part(case, job, tokens, first)
    experts = experts_of(job, case.inputs.w_gate.shape[0])
    return call_of(case.inputs, case.d_out, rows, experts), rows


def wanted_of(case: ExactCase, job: Job, first: int = FIRST) -> dict[str, Tensor]:
    """What a rank must get: its rows, its experts, its own sums of the shared expert."""
    rows = rows_of(job, case.inputs.x.shape[0], first)
    experts, exact = experts_of(job, case.inputs.w_gate.shape[0]), case.expected
    found = {name: exact[name][rows] for name in ("out", "d_x", "d_router_weights")}
    found |= {f"d_{name}": exact[f"d_{name}"][experts] for name in NAMES[2:]}
    if case.inputs.shared is not None:
        own = reference.moe(case.inputs, case.d_out, "rounded", shared_rows=rows)
        found |= {f"d_{name}": own[f"d_{name}"].v.float() for name in SHARED}
    return found


def expect(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], when: object = "") -> None:
    """The same bits, weights' gradients in the dtype that was found."""
    assert found.keys() == wanted.keys(), when
    for name, value in found.items():
        assert same_bits(value, wanted[name].to(value.dtype)), (name, when)


def exact_gradients(job: Job) -> None:
    """All gradients of exact cases, in every routing, three times each.

    More than two ranks have a routing to one rank alone as well, and ranks without tokens; eight
    have one expert each, and half of them nothing to do where every second expert is empty.
    """
    job.join("nccl")
    routings = ["balanced", "skewed", "empty-experts", "unused-slots"]
    splits = [FIRST]
    if job.ranks > 2:
        routings.append("one-expert")
        splits += [0, 149]
    for routing in routings:
        for shared, clamped in ((None, False), (64, True)):
            case = exact_case(*(150, 192, 192, 8, 2, routing), shared_width=shared, clamped=clamped)
            for first in splits:
                call, _ = own_call(case, job, first=first)
                wanted = wanted_of(case, job, first)
                for turn in range(3):
                    expect(call.both(), wanted, (routing, shared, first, turn))
    leave()


def bits_of_one_rank(job: Job) -> None:
    """Random values: the bits of one rank alone, whatever the share of tokens, grid or segments.

    The shared expert's are those of one rank with this rank's tokens. More than two ranks have the
    same bits in pairs as well.
    """
    job.join()
    inputs, d_out = random_inputs(), random_upstream()
    tokens = inputs.x.shape[0]
    whole = call_of(inputs, d_out, slice(None)).both(group=None)

    def of_one(mine: Job, first: int) -> tuple[Call, dict[str, Tensor]]:
        """This rank's call, and what one rank alone has of it."""
        rows, experts = rows_of(mine, tokens, first), experts_of(mine, inputs.w_gate.shape[0])
        own = call_of(inputs, d_out, rows).both(group=None)
        wanted = {name: whole[name][rows] for name in ("out", "d_x", "d_router_weights")}
        wanted |= {f"d_{name}": whole[f"d_{name}"][experts] for name in NAMES[2:]}
        wanted |= {f"d_{name}": own[f"d_{name}"] for name in SHARED}
        return call_of(inputs, d_out, rows, experts), wanted

    for first in (230, 0, tokens, 699):
        call, wanted = of_one(job, first)
        for config in (MoKConfig(), MoKConfig(num_sms=1), MoKConfig(num_sms=7), MoKConfig()):
            expect(call.both(config=config), wanted, (first, config))
        functional.clear_workspace_cache()
        dist.barrier()
        small_segments = MoKConfig(minibatch_size=1024)
        expect(call.both(config=small_segments), wanted, (first, "small segments"))
        functional.clear_workspace_cache()
        dist.barrier()
    if job.ranks > 2:
        minute = datetime.timedelta(seconds=60)
        pairs = [
            dist.new_group([one, one + 1], timeout=minute) for one in range(0, job.ranks, 2)
        ]  # all ranks make all of them
        call, wanted = of_one(dataclasses.replace(job, rank=job.rank % 2, ranks=2), 230)
        for turn in range(3):
            expect(call.both(group=pairs[job.rank // 2]), wanted, ("pairs", turn))
        functional.clear_workspace_cache()
        dist.barrier()
    dist.destroy_process_group()


def without_waiting(job: Job) -> None:
    """No wait on the host, unequal and no tokens, streams in turn, a graph of both directions."""
    job.join()
    case = small(job.ranks)
    room(case, job, timeouts=GENEROUS)
    call, _ = own_call(case, job)
    wanted = wanted_of(case, job)
    expect(call.both(), wanted)
    torch.cuda.synchronize()
    with synchronising_raises():
        found = call.both()
    expect(found, wanted, "without waiting")
    for tokens in counts(150, job.ranks):
        few, here = own_call(case, job, tokens[job.rank])
        found = few.both()
        for name in ("out", "d_x", "d_router_weights"):
            assert same_bits(found[name], case.expected[name][here]), (name, tokens)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    several = []
    for turn in range(24):
        with torch.cuda.stream(streams[(turn * (1 + job.rank)) % 3]):
            several.append(call.both())
    torch.cuda.synchronize()
    for turn, found in enumerate(several):
        expect(found, wanted, turn)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = call.both()
    for turn in range(20):
        for value in found.values():
            value.fill_(-1.0)
        graph.replay()
        expect(found, wanted, turn)
    room(case, job).check()
    del graph
    leave()


def gather_order(job: Job) -> None:
    """All-gathers and the backward start in different orders on the ranks."""
    job.join("nccl")
    case = small(job.ranks)
    room(case, job, timeouts=GENEROUS)
    call, _ = own_call(case, job)
    wanted = wanted_of(case, job)
    gather = Gather(job)
    expect(call.both(), wanted)
    for turn in range(40):
        dist.barrier()
        out = call.forward()
        expect(gather.beside(functools.partial(call.backward, out), turn), wanted, turn)
    room(case, job).check()
    leave()


def prepared(job: Job) -> tuple[ExactCase, Step]:
    """All ranks have run both directions, with short time-outs, and one forward; its backward."""
    job.join()
    case = small(job.ranks)
    room(case, job, timeouts=LIMITS)
    call, _ = own_call(case, job)
    wanted = wanted_of(case, job)
    for _ in range(3):
        expect(call.both(), wanted)
    out = call.forward()
    torch.cuda.synchronize()
    return case, lambda: call.backward(out)


def gives_up(job: Job, case: ExactCase, backward: Step, pattern: str, limit: float) -> None:
    """A backward to which a peer does not come."""
    place = room(case, job)
    call, _ = own_call(case, job)
    refused = (call.forward, call.forward, place.check)
    ends_in_time(job, backward, refused, pattern, limit)


def killed_before(job: Job) -> None:
    """The last rank is killed between the directions: the others miss its ids in the backward."""
    case, backward = prepared(job)
    if job.rank == job.last:
        job.tell("ready")
        time.sleep(120)
    job.wait("done")
    blamed = job.blamed(f"the expert ids of rank {job.last}")
    gives_up(job, case, backward, blamed, LIMITS.enter)
    alone_again(case, job)


def killed_inside(job: Job) -> None:
    """The last rank enters a backward, has no results for others, and is killed: all miss them."""
    case, backward = prepared(job)
    dist.barrier()
    if job.rank == job.last:
        launch = passes.launch_backward

        def withholding(workspace: Any, memory: Any, *rest: Any, **options: Any) -> Any:
            kernels = dataclasses.replace(memory.kernels, backward=Withheld())
            workspace.keep_backward(dataclasses.replace(memory, kernels=kernels))
            return launch(workspace, workspace.backward, *rest, **options)

        passes.launch_backward = withholding
        backward()
        torch.cuda.synchronize()  # ids, x and d_out are there, and the others were told
        job.tell("ready")
        time.sleep(120)
    gives_up(job, case, backward, job.blamed(f"the results of rank {job.last}"), LIMITS.inside)
    job.wait("done")
    alone_again(case, job)


def killed_anywhere(job: Job) -> None:
    """The last rank is killed while all train without pause."""
    case, _ = prepared(job)
    x, topk, router, *weights = large(job)
    leaves = dict(zip(NAMES, (x, router, *weights), strict=True))
    for leaf in leaves.values():
        leaf.requires_grad_()
    call = Call(leaves, topk, torch.randn_like(x), None)
    until_missed(job, call.both)
    alone_again(case, job)


def stopped(job: Job) -> None:
    """The last rank is stopped between the directions and goes on too late: all give up, go on."""
    case, backward = prepared(job)
    if job.rank == job.last:
        job.tell("ready")
        job.wait("go on")  # stopped here until all others have given up
        gives_up(job, case, backward, job.all_blamed(), LIMITS.enter)
    else:
        job.wait("done")
        blamed = job.blamed(f"the expert ids of rank {job.last}")
        gives_up(job, case, backward, blamed, LIMITS.enter)
        job.tell(f"waited-{job.rank}")
    functional.clear_workspace_cache()
    dist.barrier()
    again, _ = own_call(case, job)
    wanted = wanted_of(case, job)
    for _ in range(3):
        expect(again.both(), wanted)
    leave()


SCENARIOS = (
    *(exact_gradients, bits_of_one_rank, without_waiting, gather_order),
    *(killed_before, killed_inside, killed_anywhere, stopped),
)

if __name__ == "__main__":
    os.environ[BACKWARD_VARIABLE] = "1"
    main(SCENARIOS)
