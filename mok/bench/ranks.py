"""Ranks of a benchmark: how they are started, and the little that they must agree on.

A call's time is that of its slowest rank, and whether a step is taken is decided by all, so that no
rank waits in a collective that the others never enter. Agreement goes through a gloo group of its
own; contenders get the group of the device. Refuses more ranks than devices.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mok.endings import end_process
from mok.errors import InputError
from mok.variables import variables_set

TIMEOUT = timedelta(seconds=120)
"""Longest wait in a collective; a rank that died alone ends the others after it."""


@dataclass(frozen=True)
class Together:
    """This rank among all. largest(values) -> elementwise maximum over ranks, on every rank."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    largest: Callable[[Sequence[float]], list[float]] = list

    def all_true(self, here: bool) -> bool:
        """Whether it is true on every rank."""
        return self.largest([0.0 if here else 1.0])[0] == 0.0

    def largest_known(self, here: float | None) -> float | None:
        """The largest over ranks; None on all of them as soon as one does not know its own."""
        given = -math.inf if here is None else here
        most, unknown = self.largest([given, 1.0 if here is None else 0.0])
        return None if unknown > 0.0 else most


def join(rank: int, ranks: int, device: torch.device) -> Together:
    """Joins the process group of MASTER_ADDR and MASTER_PORT; one rank needs none."""
    if ranks == 1:
        return Together()
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=TIMEOUT, device_id=bound)
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def largest(values: Sequence[float]) -> list[float]:
        shared = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=control)
        return [float(value) for value in shared]

    return Together(rank, ranks, dist.group.WORLD, largest)


def leave() -> None:
    """Ends the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_ranks(ranks: int, device: str) -> None:
    """Raises InputError for fewer than one rank, more than CUDA devices, or a device by number."""
    if ranks < 1:
        raise InputError(f"{ranks} ranks; allowed: 1 or more. Leave --ranks out for one.")
    if ranks == 1 or not device.startswith("cuda"):
        return
    if device != "cuda":
        raise InputError(
            f"device {device!r} with {ranks} ranks; allowed: cuda, since rank r uses cuda:r. "
            "Choose devices with CUDA_VISIBLE_DEVICES."
        )
    count = torch.cuda.device_count()
    if ranks > count:
        raise InputError(
            f"{ranks} ranks on {count} CUDA device(s); allowed: one rank a device. Lower --ranks."
        )


def spawn(work: Callable[..., None], ranks: int, *arguments: object) -> None:
    """Runs work(rank, *arguments) in `ranks` fresh processes with a rendezvous in the environment.

    `work` must be importable. Raises torch.multiprocessing's exception when a rank fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with variables_set({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}):
        torch.multiprocessing.spawn(_rank, args=(work, *arguments), nprocs=ranks)


def _rank(rank: int, work: Callable[..., None], *arguments: object) -> None:
    work(rank, *arguments)
    end_process()
