"""One of two ranks with a GPU each, started by test_two_gpus.py: SCENARIO RANK PORT FOLDER.

Rank 0 survives; rank 1 is killed or stopped by the test where the scenario says so. Ranks and test
tell one another by empty files in FOLDER. Exits with a traceback when a check fails. Refuses to be
imported by pytest: it collects nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from sync_debug import synchronising_raises

import mok
from mok import functional
from mok.config import MoKConfig
from mok.endings import end_process
from mok.errors import ExchangeError, InputError, MoKError, RoutingError
from mok.exact import ExactCase, exact_case, same_bits
from mok.functional import Timeouts
from mok.hopper import forward

LIMITS = Timeouts(enter=4.0, inside=2.0)
GENEROUS = Timeouts(60.0, 30.0)
MARGIN = 6.0
"""Seconds that a launch may take beyond its time-out: other work of host and device."""
SPLIT = 37
Found = TypeVar("Found")


class Job:
    """What a scenario knows: rank, port, and the files that are its signals."""

    def __init__(self, rank: int, port: int, folder: Path) -> None:
        self.rank, self.port, self.folder = rank, port, folder

    def join(self, backend: str = "gloo", meeting: int = 0) -> None:
        """The group of both ranks; another `meeting` is at another port."""
        torch.cuda.set_device(self.rank)
        options: dict[str, Any] = {}
        if backend == "nccl":
            options["device_id"] = torch.device("cuda", self.rank)
        dist.init_process_group(
            backend,
            init_method=f"tcp://127.0.0.1:{self.port + meeting}",
            rank=self.rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=60),
            **options,
        )

    def tell(self, name: str) -> None:
        (self.folder / name).touch()

    def wait(self, name: str) -> None:
        until = time.monotonic() + 60.0
        while not (self.folder / name).exists():
            assert time.monotonic() < until, f"no {name}"
            time.sleep(0.01)


def part(case: ExactCase, rank: int, tokens: int | None = None) -> tuple[slice, list[torch.Tensor]]:
    """The rows of a rank and its arguments of mok.moe."""
    rows = slice(0, SPLIT) if rank == 0 else slice(SPLIT, case.inputs.x.shape[0])
    if tokens is not None:
        rows = slice(rows.start, rows.start + tokens)
    half = case.inputs.w_gate.shape[0] // 2
    experts, i = slice(half * rank, half * (rank + 1)), case.inputs
    given = [i.x[rows], i.topk_experts[rows], i.router_weights[rows]]
    given += [weight[experts] for weight in (i.w_gate, i.w_up, i.w_down)]
    return rows, [tensor.contiguous().cuda() for tensor in given]


def layer(given: list[torch.Tensor], **options: Any) -> torch.Tensor:
    return mok.moe(*given, **{"group": dist.group.WORLD, "backend": "hopper", **options})


def exact(case: ExactCase, rank: int, **options: Any) -> None:
    """One forward of both ranks with the exact bits."""
    rows, given = part(case, rank)
    assert same_bits(layer(given, **options), case.expected["out"][rows])


def room(case: ExactCase, rank: int, **options: Any) -> functional.Workspace:
    rows, given = part(case, rank)
    return functional.get_workspace(
        *(MoKConfig(), dist.group.WORLD),
        device=given[0].device,
        num_local_tokens=rows.stop - rows.start,
        hidden_size=given[0].shape[1],
        topk=given[1].shape[1],
        backend="hopper",
        **options,
    )


def raises(kind: type[MoKError], pattern: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=pattern):
        call()


def ends_in_time(
    rank: int,
    launch: Callable[[], object],
    refused: Iterable[Callable[[], object]],
    pattern: str,
    limit: float,
) -> None:
    """A launch whose peer does not come ends in time, and everything after it is refused."""
    began = time.monotonic()
    launch()
    torch.cuda.synchronize()
    took = time.monotonic() - began
    print(f"rank {rank} gave up after {took:.2f} s", flush=True)
    assert limit * 0.9 < took < limit + MARGIN
    for call in refused:
        began = time.monotonic()
        raises(ExchangeError, pattern, call)
        assert time.monotonic() - began < 1.0


def gives_up(case: ExactCase, rank: int, pattern: str, limit: float) -> None:
    """A forward whose peer does not come."""
    _, given = part(case, rank)
    place = room(case, rank)

    def call() -> torch.Tensor:
        return layer(given)

    ends_in_time(rank, call, (call, call, place.check), pattern, limit)


def alone_again(case: ExactCase, job: Job) -> None:
    """The survivor goes on: in a group of its own, with all experts, and without a group."""
    functional.clear_workspace_cache()
    dist.destroy_process_group()
    i = case.inputs
    tensors = (i.x, i.topk_experts, i.router_weights, i.w_gate, i.w_up, i.w_down)
    whole = [tensor.cuda() for tensor in tensors]
    assert same_bits(layer(whole, group=None), case.expected["out"])
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{job.port + 1}", rank=0, world_size=1
    )
    assert same_bits(layer(whole), case.expected["out"])
    dist.destroy_process_group()


def small() -> ExactCase:
    return exact_case(150, 128, 64, 8, 2, "balanced")


def killed_before(job: Job) -> None:
    """Rank 1 is killed between launches: rank 0 misses its expert ids."""
    job.join()
    case = small()
    room(case, job.rank, timeouts=LIMITS)
    for _ in range(3):
        exact(case, job.rank)
    torch.cuda.synchronize()
    if job.rank == 1:
        job.tell("ready")
        time.sleep(120)
    job.wait("done")
    gives_up(case, 0, "the expert ids of rank 1", LIMITS.enter)
    alone_again(case, job)


class Withheld:
    """Stands for a kernel that a rank never comes to."""

    def launch(self, *args: object, **options: object) -> None:
        del args, options


def killed_inside(job: Job) -> None:
    """Rank 1 enters a launch, has no results for rank 0, and is killed: rank 0 misses them."""
    job.join()
    case = small()
    room(case, job.rank, timeouts=LIMITS)
    for _ in range(3):
        exact(case, job.rank)
    torch.cuda.synchronize()
    dist.barrier()
    if job.rank == 1:
        plain = forward.launch_kernels

        def withholding(workspaces: Any, *rest: Any) -> None:
            used = workspaces[0]
            kernels = dataclasses.replace(used.kernels, forward=Withheld())
            plain([dataclasses.replace(used, kernels=kernels)], *rest)

        forward.launch_kernels = withholding
        layer(part(case, 1)[1])
        torch.cuda.synchronize()  # ids and x are there, and rank 0 was told
        job.tell("ready")
        time.sleep(120)
    gives_up(case, 0, "the results of rank 1", LIMITS.inside)
    job.tell("waited")
    job.wait("done")
    alone_again(case, job)


def large(rank: int) -> list[torch.Tensor]:
    """A call that takes about a millisecond; rank 0 has more tokens."""
    tokens, hidden, width, experts, slots = 4096 - 1024 * rank, 1024, 512, 8, 4
    torch.manual_seed(rank)
    keys = torch.rand(tokens, 2 * experts, device="cuda")
    shapes = ((experts, width, hidden), (experts, width, hidden), (experts, hidden, width))
    return [
        torch.randn(tokens, hidden, device="cuda").bfloat16(),
        keys.argsort(dim=1)[:, :slots].contiguous(),
        torch.rand(tokens, slots, device="cuda"),
        *(0.02 * torch.randn(shape, device="cuda").bfloat16() for shape in shapes),
    ]


def until_missed(job: Job, call: Callable[[], object]) -> None:
    """Rank 1 is killed while both call without pause; rank 0 says so soon after."""
    call()
    job.tell(f"ready-{job.rank}")
    until = time.monotonic() + 90.0
    killed, told = 0.0, ""
    while not told:
        assert time.monotonic() < until, "nobody noticed"
        try:
            call()
            torch.cuda.synchronize()
        except ExchangeError as error:
            told = str(error)
        if not killed and (job.folder / "killing").exists():
            killed = time.monotonic()
    took = time.monotonic() - killed
    print(f"rank {job.rank} gave up {took:.2f} s after the kill: {told}", flush=True)
    assert job.rank == 0
    assert took < max(LIMITS.enter, LIMITS.inside) + MARGIN
    assert "rank 1" in told


def killed_anywhere(job: Job) -> None:
    """Rank 1 is killed while both launch without pause."""
    job.join()
    case = small()
    room(case, job.rank, timeouts=LIMITS)
    exact(case, job.rank)
    given = large(job.rank)
    until_missed(job, lambda: layer(given))
    alone_again(case, job)


def stopped(job: Job) -> None:
    """Rank 1 is stopped and goes on too late: both give up, and both make the memory anew."""
    job.join()
    case = small()
    room(case, job.rank, timeouts=LIMITS)
    for _ in range(3):
        exact(case, job.rank)
    torch.cuda.synchronize()
    if job.rank == 1:
        job.tell("ready")
        job.wait("go on")  # stopped here until rank 0 has given up
        gives_up(case, 1, "rank 0", LIMITS.enter)
    else:
        job.wait("done")
        gives_up(case, 0, "the expert ids of rank 1", LIMITS.enter)
        job.tell("waited")
    functional.clear_workspace_cache()
    dist.barrier()
    for _ in range(3):  # the same group
        exact(case, job.rank)
    functional.clear_workspace_cache()
    dist.barrier()
    dist.destroy_process_group()
    job.join(meeting=1)  # a new one, which has the old one's name
    for _ in range(3):
        exact(case, job.rank)
    functional.clear_workspace_cache()
    dist.barrier()
    dist.destroy_process_group()


class Gather:
    """An all-gather of both ranks beside launches of the layer."""

    def __init__(self, rank: int) -> None:
        self.rank, self.side = rank, torch.cuda.Stream()
        self.mine = torch.full((1 << 22,), rank + 1.0, device="cuda")
        self.found = torch.empty(2, 1 << 22, device="cuda")
        self._on_side()

    def _start(self) -> None:
        dist.all_gather_into_tensor(self.found.view(-1), self.mine)

    def _on_side(self) -> None:
        with torch.cuda.stream(self.side):
            self._start()

    def beside(self, launch: Callable[[], Found], turn: int) -> Found:
        """It comes before the launch on one rank, and on another stream after it on the other."""
        self.found.zero_()
        torch.cuda.synchronize()
        began = time.monotonic()
        if turn % 2 == self.rank:
            # Nothing of this rank's launch starts before the other rank's all-gather has.
            self._start()
            given = launch()
        else:
            given = launch()
            time.sleep(0.01)  # it holds its multiprocessors by now
            self._on_side()
        torch.cuda.synchronize()
        assert time.monotonic() - began < 10.0, turn
        assert (self.found[0].eq(1.0).all() & self.found[1].eq(2.0).all()).item(), turn
        return given


def gather_order(job: Job) -> None:
    """All-gathers and the layer start in different orders on both ranks."""
    job.join("nccl")
    case = small()
    room(case, job.rank, timeouts=GENEROUS)
    rows, given = part(case, job.rank)
    gather = Gather(job.rank)
    layer(given)
    torch.cuda.synchronize()
    for turn in range(40):
        config = MoKConfig(num_sms=120 if turn % 4 < 2 else 0)
        dist.barrier()
        torch.cuda.synchronize()
        out = gather.beside(functools.partial(layer, given, config=config), turn)
        assert same_bits(out, case.expected["out"][rows]), turn
    room(case, job.rank).check()
    functional.clear_workspace_cache()
    dist.barrier()
    dist.destroy_process_group()


def without_waiting(job: Job) -> None:
    """No wait on the host, graphs, unequal and no tokens, streams and shapes in turn, growth."""
    job.join()
    rank, case = job.rank, small()
    other = exact_case(150, 192, 128, 8, 2, "skewed", shared_width=64)
    room(case, rank, timeouts=GENEROUS)
    rows, given = part(case, rank)
    more_rows, more = part(other, rank)
    shared = tuple(weight.cuda() for weight in other.inputs.shared)
    exact(case, rank)
    assert same_bits(layer(more, shared=shared), other.expected["out"][more_rows])
    torch.cuda.synchronize()
    with synchronising_raises():
        out = layer(given)
    assert same_bits(out, case.expected["out"][rows])
    for tokens in ((0, 113), (37, 0), (0, 0), (1, 64), (37, 113)):
        here, few = part(case, rank, tokens[rank])
        assert same_bits(layer(few), case.expected["out"][here]), tokens
    # Two shapes on three streams, in one order on both ranks.
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
    if rank == 1:
        bad[1][5, 0] = 99
    layer(bad)
    torch.cuda.synchronize()
    raises(RoutingError, "rank 1: 1 bad expert id", room(case, rank).check)
    if rank == 0:
        many = [*(tensor[:1].repeat(2000, 1) for tensor in given[:3]), *given[3:]]
        raises(InputError, "T = 2000; allowed: up to 1024", lambda: layer(many))
    room(case, rank, max_tokens=2000)
    exact(case, rank)
    graph.replay()  # its memory is kept
    assert same_bits(first, case.expected["out"][rows])
    room(case, rank).check()
    del graph
    functional.clear_workspace_cache()
    dist.barrier()
    dist.destroy_process_group()


SCENARIOS = (
    *(killed_before, killed_inside, killed_anywhere, stopped),
    *(gather_order, without_waiting),
)


def main(scenarios: Iterable[Callable[[Job], None]]) -> None:
    """The one that the command line names; the process ends with it."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    name, rank, port, folder = sys.argv[1:]
    {one.__name__: one for one in scenarios}[name](Job(int(rank), int(port), Path(folder)))
    print(f"rank {rank} checked everything", flush=True)
    end_process()


if __name__ == "__main__":
    main(SCENARIOS)
