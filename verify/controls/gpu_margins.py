"""Does the missing barrier hide on a quiet device and show under every load? Measured, in cycles.

The planted fault rests on two margins: quiet, the tile is filled before its reader looks, with
whatever the caches hold; and under a load it comes later than that. Both are measured on the device
that is there, and stand in the table of faults beside what they explain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verify.controls import gpu_kernels

Load = Callable[[], AbstractContextManager[object]]

NEVER = 2**31  # odds of a reader that practically never looks ahead of the barrier
FLUSH = 256 * 2**20  # bytes written to push everything else out of the L2 cache


@dataclass(frozen=True)
class Filling:
    """Cycles until the tile was filled, over the runs of one setting, ascending; and in how many
    of `runs` more the fault showed when its reader always looked ahead of the barrier."""

    setting: str
    cycles: tuple[int, ...]
    wrong: int
    runs: int

    def quantile(self, share: float) -> int:
        """The cycles that `share` of the runs (0 to 1) did not exceed."""
        return self.cycles[min(len(self.cycles) - 1, int(share * len(self.cycles)))]

    def to_json(self) -> dict[str, Any]:
        """Least, median and most cycles, and how often the fault showed."""
        return {
            "setting": self.setting,
            "cycles": [self.quantile(share) for share in (0.0, 0.5, 1.0)],
            "wrong": self.wrong,
            "runs": self.runs,
        }


@dataclass(frozen=True)
class Margins:
    """What was measured without a load and under each, against the reader's `work` in cycles."""

    work: int
    quiet: Sequence[Filling]
    loaded: Sequence[Filling]

    @property
    def hides(self) -> bool:
        """Whether no quiet run filled the tile too late, or went wrong."""
        return all(one.cycles[-1] < self.work and one.wrong == 0 for one in self.quiet)

    @property
    def shows(self) -> list[str]:
        """The loads under which the usual tile comes too late, and the fault was seen."""
        return [one.setting for one in self.loaded if one.quantile(0.5) > self.work and one.wrong]

    def to_json(self) -> dict[str, Any]:
        """For the document of the table of faults."""
        return {
            "work": self.work,
            "pause": gpu_kernels.PAUSE,
            "odds": gpu_kernels.ODDS,
            "hides_when_quiet": self.hides,
            "shows_under": self.shows,
            "settings": [one.to_json() for one in (*self.quiet, *self.loaded)],
        }


def measure(values: Tensor, loads: Mapping[str, Load], runs: int = 100) -> Margins:
    """Fills `runs` tiles quiet, with a cold L2 cache and under each load, and as often looks ahead
    of the barrier. values: as for `gpu_kernels.hand_over`."""
    right = gpu_kernels.hand_over(values, fault=False)
    quiet = [
        filling("quiet", values, right, runs),
        filling("quiet, cold L2", values, right, runs, cold=True),
    ]
    loaded = []
    for name, load in loads.items():
        with load():
            loaded.append(filling(name, values, right, runs))
    return Margins(gpu_kernels.WORK, quiet, loaded)


def filling(
    setting: str, values: Tensor, right: Tensor, runs: int, *, cold: bool = False
) -> Filling:
    """One setting; `cold` pushes everything out of the L2 cache before each run."""
    flush = torch.empty(FLUSH if cold else 1, dtype=torch.uint8, device=values.device)
    stamps, outs = [], []
    for number in range(runs):
        if cold:
            flush.fill_(number % 251)
        times = torch.zeros(2, dtype=torch.int64, device=values.device)
        gpu_kernels.hand_over(values, fault=True, odds=NEVER, times=times)
        stamps.append(times[0])
        if cold:
            flush.fill_((number + 1) % 251)
        outs.append(gpu_kernels.hand_over(values, fault=True, odds=0))
    cycles = tuple(sorted(int(one) for one in torch.stack(stamps).tolist()))
    return Filling(setting, cycles, differing(outs, right), runs)


def differing(outs: Iterable[Tensor], right: Tensor) -> int:
    """How many of these have other bits than `right`, all fp32 of its shape."""
    bits = torch.stack(list(outs)).view(torch.int32)
    return int((bits != right.view(torch.int32)).any(dim=1).sum())


def drawn(margins: Mapping[str, Any]) -> str:
    """`Margins.to_json()` as text, a line per setting."""
    lines = [f"missing barrier: the reader looks after {margins['work']} cycles; the tile is there"]
    for one in margins["settings"]:
        least, median, most = one["cycles"]
        lines.append(
            f"  {one['setting']}: after {least} to {most}, median {median};"
            f" read ahead of the barrier it was wrong in {one['wrong']} of {one['runs']}"
        )
    return "\n".join(lines)
