"""How much work the reader of the missing barrier needs, measured on the device that is there.

The planted fault must never show on a quiet device and about once in thirty runs under contention.
The time until a tile is filled is measured quiet (inputs in the L2 cache, and out of it) and under
each load; the reader's short work is put between the longest quiet time and the usual loaded one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.controls import gpu_kernels

Load = Callable[[], AbstractContextManager[object]]

APART = 1.15  # the usual loaded time over the longest quiet one, at least
TARGET = 1 / 30  # share of runs under contention that should go wrong
MEASURED = 200  # runs per setting
FLUSH = 256 * 2**20  # bytes written to push everything else out of the L2 cache


@dataclass(frozen=True)
class Filling:
    """Cycles until a tile is filled, over all tiles of all runs of one setting, ascending."""

    setting: str
    cycles: tuple[int, ...]

    def quantile(self, share: float) -> int:
        """The cycles that `share` of the tiles (0 to 1) did not exceed."""
        return self.cycles[min(len(self.cycles) - 1, int(share * len(self.cycles)))]


@dataclass(frozen=True)
class Choice:
    """What the reader should do: `work` steps when it is quick, once in `odds` draws."""

    work: int
    odds: int
    longest_quiet: int
    usual_loaded: int

    @property
    def apart(self) -> bool:
        """Whether load and quiet can be told apart by a fixed amount of work at all."""
        return self.usual_loaded >= APART * self.longest_quiet


def choose(
    quiet: Sequence[Filling],
    loaded: Sequence[Filling],
    cycles_per_step: float,
    tiles: int = gpu_kernels.HANDOVERS,
) -> Choice:
    """The work halfway, as a ratio, between the longest quiet time and the usual time under the
    load that slows filling most; the odds that then give TARGET.

    quiet, loaded: at least one of each. cycles_per_step: of the reader. tiles: in one run.
    """
    longest = max(filling.cycles[-1] for filling in quiet)
    usual = max(filling.quantile(0.5) for filling in loaded)
    cycles = math.sqrt(longest * usual) if usual > longest else 1.05 * longest
    late = max(_share_above(filling, cycles) for filling in loaded)
    # a run goes wrong with 1 - (1 - late / odds)^tiles, about tiles * late / odds
    odds = max(2, round(tiles * late / TARGET))
    return Choice(max(1, round(cycles / cycles_per_step)), odds, longest, usual)


def _share_above(filling: Filling, cycles: float) -> float:
    return sum(one > cycles for one in filling.cycles) / len(filling.cycles)


def fill_times(setting: str, links: Tensor, values: Tensor, *, cold: bool = False) -> Filling:
    """Measures MEASURED runs; `cold` pushes links and values out of the L2 cache before each."""
    flush = torch.empty(FLUSH if cold else 1, dtype=torch.uint8, device=values.device)
    kept = []
    for number in range(MEASURED):
        if cold:
            flush.fill_(number % 251)
        kept.append(_times(links, values, work=1))
    found = torch.stack(kept)[:, :, 0].flatten().tolist()
    return Filling(setting, tuple(sorted(found)))


def cycles_per_step(links: Tensor, values: Tensor) -> float:
    """Cycles of one step of the reader's work, from the difference of two amounts of it."""
    short, long = (
        min(int(_times(links, values, work=work)[:, 1].min()) for _ in range(5))
        for work in (10_000, 110_000)
    )
    return (long - short) / 100_000


def _times(links: Tensor, values: Tensor, *, work: int) -> Tensor:
    times = torch.zeros(gpu_kernels.HANDOVERS, 2, dtype=torch.int64, device=values.device)
    gpu_kernels.hand_over(links, values, fault=True, work=work, odds=0, times=times)
    return times


def wrong_runs(
    links: Tensor, values: Tensor, choice: Choice, runs: int, *, cold: bool = False
) -> int:
    """In how many of `runs` runs the fault showed."""
    right = gpu_kernels.handed_over(links, values)
    flush = torch.empty(FLUSH if cold else 1, dtype=torch.uint8, device=values.device)
    wrong = []
    for number in range(runs):
        if cold:
            flush.fill_(number % 251)
        out = gpu_kernels.hand_over(links, values, fault=True, work=choice.work, odds=choice.odds)
        wrong.append((out.view(torch.int32) != right.view(torch.int32)).any())
    return int(torch.stack(wrong).sum())


def calibrate(
    links: Tensor, values: Tensor, loads: Mapping[str, Load]
) -> tuple[Choice, list[Filling], float]:
    """Measures quiet, cold and under every load, and chooses. Returns the choice, what was
    measured, and the cycles of a step."""
    step = cycles_per_step(links, values)
    quiet = [
        fill_times("quiet", links, values),
        fill_times("quiet, cold", links, values, cold=True),
    ]
    loaded = []
    for name, load in loads.items():
        with load():
            loaded.append(fill_times(name, links, values))
    return choose(quiet, loaded, step), [*quiet, *loaded], step
