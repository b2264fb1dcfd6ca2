"""One of several ranks with a GPU each: SCENARIO RANK RANKS PORT FOLDER.

Started by test_several_gpus.py. All but the last rank survive; the last one is killed or stopped by
the test where the scenario says so. Ranks and test tell one another by empty files in FOLDER. Exits
with a traceback when a check fails. Refuses to be imported by pytest: it collects nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import (
    GENEROUS,
    LIMITS,
    Gather,
    Job,
    Withheld,
    alone_again,
    counts,
    ends_in_time,
    exact,
    experts_of,
    large,
    layer,
    leave,
    main,
    part,
    raises,
    room,
    small,
    until_missed,
)
from sync_debug import synchronising_raises

from mok import functional
from mok.config import MoKConfig
from mok.errors import InputError, RoutingError
from mok.exact import ExactCase, exact_case, same_bits
from mok.hopper import forward
from mok.hopper.support import BACKWARD_VARIABLE

NAMES = ("x", "router_weights", "w_gate", "w_up", "w_down")


def gives_up(case: ExactCase, job: Job, pattern: str, limit: float) -> None:
    """A forward to which a peer does not come."""
    _, given = part(case, job)
    place = room(case, job)

    def call() -> torch.Tensor:
        return layer(given)

    ends_in_time(job, call, (call, call, place.check), pattern, limit)


def prepared(job: Job) -> ExactCase:
    """All ranks have run forwards, with short time-outs."""
    job.join()
    case = small(job.ranks)
    room(case, job, timeouts=LIMITS)
    for _ in range(3):
        exact(case, job)
    torch.cuda.synchronize()
    return case


def killed_before(job: Job) -> None:
    """The last rank is killed between launches: all others miss its expert ids."""
    case = prepared(job)
    if job.rank == job.last:
        job.tell("ready")
        time.sleep(120)
    job.wait("done")
    gives_up(case, job, job.blamed(f"the expert ids of rank {job.last}"), LIMITS.enter)
    alone_again(case, job)


def killed_inside(job: Job) -> None:
    """The last rank enters a launch, has no results for others, and is killed: all miss them."""
    case = prepared(job)
    dist.barrier()
    if job.rank == job.last:
        plain = forward.launch_kernels

        def withholding(workspaces: Any, *rest: Any) -> None:
            used = workspaces[0]
            kernels = dataclasses.replace(used.kernels, forward=Withheld())
            plain([dataclasses.replace(used, kernels=kernels)], *rest)

        forward.launch_kernels = withholding
        layer(part(case, job)[1])
        torch.cuda.synchronize()  # ids and x are there, and the others were told
        job.tell("ready")
        time.sleep(120)
    gives_up(case, job, job.blamed(f"the results of rank {job.last}"), LIMITS.inside)
    job.wait("done")
    alone_again(case, job)


def killed_anywhere(job: Job) -> None:
    """The last rank is killed while all launch without pause."""
    job.join()
    case = small(job.ranks)
    room(case, job, timeouts=LIMITS)
    exact(case, job)
    given = large(job)
    until_missed(job, lambda: layer(given))
    alone_again(case, job)


def stopped(job: Job) -> None:
    """The last rank is stopped and goes on too late: all give up, and make the memory anew."""
    case = prepared(job)
    if job.rank == job.last:
        job.tell("ready")
        job.wait("go on")  # stopped here until all others have given up
        gives_up(case, job, job.all_blamed(), LIMITS.enter)
    else:
        job.wait("done")
        gives_up(case, job, job.blamed(f"the expert ids of rank {job.last}"), LIMITS.enter)
        job.tell(f"waited-{job.rank}")
    functional.clear_workspace_cache()
    dist.barrier()
    for _ in range(3):  # the same group
        exact(case, job)
    leave()
    job.join(meeting=1)  # a new one, which has the old one's name
    for _ in range(3):
        exact(case, job)
    leave()


def gather_order(job: Job) -> None:
    """All-gathers and the layer start in different orders on the ranks."""
    job.join("nccl")
    case = small(job.ranks)
    room(case, job, timeouts=GENEROUS)
    rows, given = part(case, job)
    gather = Gather(job)
    layer(given)
    torch.cuda.synchronize()
    for turn in range(40):
        config = MoKConfig(num_sms=120 if turn % 4 < 2 else 0)
        dist.barrier()
        torch.cuda.synchronize()
        out = gather.beside(functools.partial(layer, given, config=config), turn)
        assert same_bits(out, case.expected["out"][rows]), turn
    room(case, job).check()
    leave()


def without_waiting(job: Job) -> None:
    """No wait on the host, graphs, unequal and no tokens, streams and shapes in turn, growth."""
    job.join()
    rank, case = job.rank, small(job.ranks)
    other = exact_case(150, 192, 128, max(8, 2 * job.ranks), 2, "skewed", shared_width=64)
    room(case, job, timeouts=GENEROUS)
    rows, given = part(case, job)
    more_rows, more = part(other, job)
    shared = tuple(weight.cuda() for weight in other.inputs.shared)
    exact(case, job)
    assert same_bits(layer(more, shared=shared), other.expected["out"][more_rows])
    torch.cuda.synchronize()
    with synchronising_raises():
        out = layer(given)
    assert same_bits(out, case.expected["out"][rows])
    for tokens in counts(150, job.ranks):
        here, few = part(case, job, tokens[rank])
        assert same_bits(layer(few), case.expected["out"][here]), tokens
    # Two shapes on three streams, in one order on all ranks.
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for turn in range(60):
        with torch.cuda.stream(streams[(turn * (1 + rank)) % 3]):
            outs.append(layer(more, shared=shared) if turn % 3 == 1 else layer(given))
    torch.cuda.synchronize()
    for turn, out in enumerate(outs):
        wanted = other.expected["out"][more_rows] if turn % 3 == 1 else case.expected["out"][rows]
        assert same_bits(out, wanted), turn
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        first = layer(given)
        second = layer(more, shared=shared)
    for _ in range(20):
        first.zero_()
        second.zero_()
        graph.replay()
        assert same_bits(first, case.expected["out"][rows])
        assert same_bits(second, other.expected["out"][more_rows])
    bad = [given[0], given[1].clone(), *given[2:]]
    if rank == job.last:
        bad[1][5, 0] = 99
    layer(bad)
    torch.cuda.synchronize()
    raises(RoutingError, f"rank {job.last}: 1 bad expert id", room(case, job).check)
    if rank == 0:
        many = [*(tensor[:1].repeat(2000, 1) for tensor in given[:3]), *given[3:]]
        raises(InputError, "T = 2000; allowed: up to 1024", lambda: layer(many))
    room(case, job, max_tokens=2000)
    exact(case, job)
    graph.replay()  # its memory is kept
    assert same_bits(first, case.expected["out"][rows])
    room(case, job).check()
    del graph
    leave()


def exact_bits(job: Job) -> None:
    """Output and gradients, those by the portable backend, in several routings."""
    os.environ[BACKWARD_VARIABLE] = "0"
    job.join("nccl")
    for routing in ("balanced", "skewed", "unused-slots", "one-expert"):
        case = exact_case(150, 128, 64, 8, 2, routing)
        rows, (x, topk, *rest) = part(case, job)
        experts = experts_of(job, 8)
        leaves = [tensor.requires_grad_() for tensor in (x, *rest)]
        for _ in range(3):
            out = layer([leaves[0], topk, *leaves[1:]])
            assert same_bits(out, case.expected["out"][rows]), routing
        grads = torch.autograd.grad(out, leaves, case.d_out[rows].cuda())
        for name, grad in zip(NAMES, grads, strict=True):
            where = experts if name.startswith("w_") else rows
            wanted = case.expected[f"d_{name}"][where].to(grad.dtype)
            assert same_bits(grad, wanted), (routing, name)
    leave()


SCENARIOS = (
    *(killed_before, killed_inside, killed_anywhere, stopped),
    *(gather_order, without_waiting, exact_bits),
)

if __name__ == "__main__":
    main(SCENARIOS)
