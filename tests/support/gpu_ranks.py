"""What ranks with a GPU each have in common, whichever direction they run.

The workers beside tests/mok/hopper/test_several_gpus.py and test_backward_several_gpus.py import
it; tests/support/several_gpus.py starts them and kills or stops the last of them.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

import mok
from mok import functional
from mok.config import MoKConfig
from mok.endings import end_process
from mok.errors import ExchangeError, MoKError
from mok.exact import ExactCase, exact_case, same_bits
from mok.functional import Timeouts

LIMITS = Timeouts(enter=4.0, inside=2.0)
GENEROUS = Timeouts(60.0, 30.0)
MARGIN = 6.0
"""Seconds that a launch may take beyond its time-out: other work of host and device."""
FIRST = 37
"""Tokens of rank 0, unless told otherwise."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Job:
    """What a scenario knows: rank, ranks, port, and the folder of the files that are its signals.

    The last rank is the one that the test kills or stops.
    """

    rank: int
    ranks: int
    port: int
    folder: Path

    @property
    def last(self) -> int:
        """Who is killed or stopped."""
        return self.ranks - 1

    def join(self, backend: str = "gloo", meeting: int = 0) -> None:
        """The group of all ranks; another `meeting` is at another port."""
        torch.cuda.set_device(self.rank)
        options: dict[str, Any] = {}
        if backend == "nccl":
            options["device_id"] = torch.device("cuda", self.rank)
        dist.init_process_group(
            backend,
            init_method=f"tcp://127.0.0.1:{self.port + meeting}",
            rank=self.rank,
            world_size=self.ranks,
            timeout=datetime.timedelta(seconds=60),
            **options,
        )

    def tell(self, name: str) -> None:
        """The test and other ranks see it."""
        (self.folder / name).touch()

    def wait(self, name: str) -> None:
        """Until somebody has told so; AssertionError after a minute."""
        until = time.monotonic() + 60.0
        while not (self.folder / name).exists():
            assert time.monotonic() < until, f"no {name}"
            time.sleep(0.01)

    def blamed(self, words: str) -> str:
        """A pattern for errors: these words, and of no survivor that it had not come."""
        there = "|".join(str(rank) for rank in range(self.last))
        return rf"(?s)\A(?!.*rank ({there}) has not ).*{words}"

    def all_blamed(self) -> str:
        """A pattern for the last rank's errors, to which all others have not come."""
        return r"(?s)\A" + "".join(rf"(?=.*rank {rank}\b)" for rank in range(self.last))


# ---- shares --------------------------------------------------------------------------------------


def borders(tokens: int, ranks: int, first: int = FIRST) -> list[int]:
    """Where the tokens of each rank begin, and the end. first: so many are rank 0's.

    The others have unequal shares, each more than the one before; of few tokens some have none.
    """
    if ranks == 1:
        return [0, tokens]
    rest, parts = tokens - first, ranks * (ranks - 1)
    return [0, *(first + rest * rank * (rank + 1) // parts for rank in range(ranks))]


def rows_of(job: Job, tokens: int, first: int = FIRST) -> slice:
    """This rank's tokens of so many."""
    found = borders(tokens, job.ranks, first)
    return slice(found[job.rank], found[job.rank + 1])


def experts_of(job: Job, experts: int) -> slice:
    """This rank's experts of so many."""
    own, rest = divmod(experts, job.ranks)
    assert rest == 0, f"{experts} experts on {job.ranks} ranks"
    return slice(own * job.rank, own * (job.rank + 1))


def counts(tokens: int, ranks: int) -> list[list[int]]:
    """Tokens of all ranks in turn: none on one, on all but one, on all; few; all that they have."""
    whole = [end - start for start, end in pairwise(borders(tokens, ranks))]
    none = [0] * ranks
    found = [[0, *whole[1:]], [whole[0], *none[1:]], none, [1, *(min(64, n) for n in whole[1:])]]
    if ranks > 2:
        found += [[*none[1:], whole[-1]], [n * (r % 2) for r, n in enumerate(whole)]]
    return [*found, whole]


def part(
    case: ExactCase, job: Job, tokens: int | None = None, first: int = FIRST
) -> tuple[slice, list[torch.Tensor]]:
    """The rows of a rank, at most so many, and its arguments of mok.moe."""
    rows = rows_of(job, case.inputs.x.shape[0], first)
    if tokens is not None:
        rows = slice(rows.start, rows.start + tokens)
    i = case.inputs
    experts = experts_of(job, i.w_gate.shape[0])
    given = [i.x[rows], i.topk_experts[rows], i.router_weights[rows]]
    given += [weight[experts] for weight in (i.w_gate, i.w_up, i.w_down)]
    return rows, [tensor.contiguous().cuda() for tensor in given]


def small(ranks: int) -> ExactCase:
    """Eight experts, or two for each rank if those are more."""
    return exact_case(150, 128, 64, max(8, 2 * ranks), 2, "balanced")


def large(job: Job) -> list[torch.Tensor]:
    """A call that takes about a millisecond; each rank has fewer tokens than the one before."""
    tokens, hidden, width, experts, slots = 4096, 1024, 512, 8, 4
    tokens -= 2048 * job.rank // job.ranks
    torch.manual_seed(job.rank)
    keys = torch.rand(tokens, job.ranks * experts, device="cuda")
    shapes = ((experts, width, hidden), (experts, width, hidden), (experts, hidden, width))
    return [
        torch.randn(tokens, hidden, device="cuda").bfloat16(),
        keys.argsort(dim=1)[:, :slots].contiguous(),
        torch.rand(tokens, slots, device="cuda"),
        *(0.02 * torch.randn(shape, device="cuda").bfloat16() for shape in shapes),
    ]


# ---- calls ---------------------------------------------------------------------------------------


def layer(given: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """The output, by the kernels, with all ranks unless told otherwise."""
    return mok.moe(*given, **{"group": dist.group.WORLD, "backend": "hopper", **options})


def exact(case: ExactCase, job: Job, **options: Any) -> None:
    """One forward of all ranks with the exact bits."""
    rows, given = part(case, job)
    assert same_bits(layer(given, **options), case.expected["out"][rows])


def room(case: ExactCase, job: Job, **options: Any) -> functional.Workspace:
    """The workspace of a rank's part of a case."""
    rows, given = part(case, job)
    return functional.get_workspace(
        *(MoKConfig(), dist.group.WORLD),
        device=given[0].device,
        num_local_tokens=rows.stop - rows.start,
        hidden_size=given[0].shape[1],
        topk=given[1].shape[1],
        backend="hopper",
        **options,
    )


def leave() -> None:
    """The end of a group of which nobody is missing."""
    functional.clear_workspace_cache()
    dist.barrier()
    dist.destroy_process_group()


class Gather:
    """An all-gather of all ranks beside launches of the layer."""

    def __init__(self, job: Job) -> None:
        self.job, self.side = job, torch.cuda.Stream()
        self.mine = torch.full((1 << 22,), job.rank + 1.0, device="cuda")
        self.found = torch.empty(job.ranks, 1 << 22, device="cuda")
        self._on_side()

    def _start(self) -> None:
        dist.all_gather_into_tensor(self.found.view(-1), self.mine)

    def _on_side(self) -> None:
        with torch.cuda.stream(self.side):
            self._start()

    def beside(self, launch: Callable[[], Found], turn: int) -> Found:
        """It comes before the launch on some ranks, on another stream after it on the others."""
        self.found.zero_()
        torch.cuda.synchronize()
        began = time.monotonic()
        if gathers_first(self.job, turn):
            # Nothing of this rank's launch starts before the others' all-gathers have.
            self._start()
            given = launch()
        else:
            given = launch()
            time.sleep(0.01)  # it holds its multiprocessors by now
            self._on_side()
        torch.cuda.synchronize()
        assert time.monotonic() - began < 10.0, turn
        for rank in range(self.job.ranks):
            assert self.found[rank].eq(rank + 1.0).all().item(), (turn, rank)
        return given


def gathers_first(job: Job, turn: int) -> bool:
    """Every second rank in turn; of more than two also one alone, and all but one."""
    if job.ranks > 2 and turn % 8 >= 4:
        alone = (turn // 8 * 2 + turn % 4 // 2) % job.ranks
        return (job.rank == alone) == (turn % 2 == 0)
    return (turn + job.rank) % 2 == 0


# ---- ranks that are missing ----------------------------------------------------------------------


class Withheld:
    """Stands for a kernel that a rank never comes to."""

    def launch(self, *args: object, **options: object) -> None:
        """Launches nothing."""
        del args, options


def raises(kind: type[MoKError], pattern: str, call: Callable[[], object]) -> None:
    """AssertionError, or pytest's, unless the call raises that."""
    with pytest.raises(kind, match=pattern):
        call()


def ends_in_time(
    job: Job,
    launch: Callable[[], object],
    refused: Iterable[Callable[[], object]],
    pattern: str,
    limit: float,
) -> None:
    """A launch to which a peer does not come ends in time, and everything after it is refused."""
    began = time.monotonic()
    launch()
    torch.cuda.synchronize()
    took = time.monotonic() - began
    print(f"rank {job.rank} gave up after {took:.2f} s", flush=True)
    assert limit * 0.9 < took < limit + MARGIN
    for call in refused:
        began = time.monotonic()
        raises(ExchangeError, pattern, call)
        assert time.monotonic() - began < 1.0


def until_missed(job: Job, call: Callable[[], object]) -> None:
    """The last rank is killed while all call without pause; the others say so soon after."""
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
    assert job.rank != job.last
    assert took < max(LIMITS.enter, LIMITS.inside) + MARGIN
    # Who had done with a launch in which another survivor gave up may wait for that one first.
    assert f"rank {job.last}" in told


def alone_again(case: ExactCase, job: Job) -> None:
    """A survivor goes on: with all experts and no group, and in a group of those that are left."""
    functional.clear_workspace_cache()
    dist.destroy_process_group()
    i = case.inputs
    tensors = (i.x, i.topk_experts, i.router_weights, i.w_gate, i.w_up, i.w_down)
    whole = [tensor.cuda() for tensor in tensors]
    assert same_bits(layer(whole, group=None), case.expected["out"])
    left = dataclasses.replace(job, ranks=job.ranks - 1)
    left.join(meeting=1)
    again = exact_case(150, 128, 64, 8 * left.ranks, 2, "balanced")
    room(again, left, timeouts=GENEROUS)
    for _ in range(3):
        exact(again, left)
    leave()


def main(scenarios: Iterable[Callable[[Job], None]]) -> None:
    """The one that the command line names; the process ends with it."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    name, rank, ranks, port, folder = sys.argv[1:]
    job = Job(int(rank), int(ranks), int(port), Path(folder))
    {one.__name__: one for one in scenarios}[name](job)
    print(f"rank {rank} checked everything", flush=True)
    end_process()
