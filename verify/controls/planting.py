"""What a control is: a planted fault to be caught by name, and a clean twin that must pass.

The verifier is worth what it catches. Each control therefore says which claim has to fail for which
reason of the closed list, and nothing less counts as caught. The twin is the same code without the
fault, so that a check which alarms at everything fails as well. Faults that need chance draw it
from the operating system: the harness restores seeds, and a fault that it restored would be none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verify.cases import Case, case_of
from verify.inputs import normal
from verify.reasons import REASONS, Verdict

ROWS, COLUMNS = 64, 16
X = {"x": normal(ROWS, COLUMNS)}


@dataclass(frozen=True)
class Control:
    """One planted fault and its twin.

    claim, reason: where and as what the fault must be found.
    alone: no other reason may be found in that claim. isolated: every other claim that the fault
    promises must be VERIFIED, so that only this condition can have caught it.
    apart: the fault is started in processes of its own, since it does not leave them alive.
    runs: what the plan of the fault asks for beyond its case. timeout: seconds for a fault apart.
    needs: what a machine must have to run it, such as "cuda"; empty runs everywhere.
    """

    name: str
    fault: Case
    twin: Case
    claim: str
    reason: str
    alone: bool = False
    isolated: bool = False
    apart: bool = False
    runs: Mapping[str, int] = field(default_factory=dict)
    timeout: float = 120.0
    needs: str = ""

    @property
    def detectors(self) -> frozenset[str]:
        """What must work for the fault to be caught: switching off one of these loses it."""
        return frozenset({self.claim, self.reason})

    @property
    def verdict(self) -> Verdict:
        """The verdict that the claim must get."""
        return REASONS[self.reason].verdict

    @property
    def ranks(self) -> int:
        """Processes that the fault needs at the same time."""
        return self.fault.ranks


def plant(
    name: str,
    faulty: Callable[..., Any],
    clean: Callable[..., Any],
    *,
    claim: str,
    reason: str,
    also: Sequence[str] = (),
    fault: Mapping[str, Any] | None = None,
    twin: Mapping[str, Any] | None = None,
    alone: bool = False,
    apart: bool = False,
    runs: Mapping[str, int] | None = None,
    timeout: float = 120.0,
    needs: str = "",
    **options: Any,
) -> Control:
    """A control of two functions. `options` are for both cases, `fault` and `twin` for one.

    also: further claims that both promise and that must be VERIFIED in the fault, too.
    """
    options = {"inputs": X, "claims": (*also, claim), **options}
    return Control(
        name,
        case_of(faulty, **{**options, "name": f"{name}/fault", **(fault or {})}),
        case_of(clean, **{**options, "name": f"{name}/twin", **(twin or {})}),
        claim,
        reason,
        alone,
        bool(also),
        apart,
        runs or {},
        timeout,
        needs,
    )


def cases_of(controls: Sequence[Control]) -> tuple[Case, ...]:
    """All cases, for a module to hold, so that workers find them by its name."""
    return tuple(case for control in controls for case in (control.fault, control.twin))


def fold(x: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """The sum of the columns, one after the other: it depends on their order and nothing else."""
    columns = list(range(x.shape[1]) if order is None else order)
    total = x[:, columns[0]].clone()
    for column in columns[1:]:
        total = total + x[:, column]
    return total


def backwards(x: Tensor) -> Tensor:
    """The same sum in the opposite order: the same value, other bits."""
    return fold(x, range(x.shape[1] - 1, -1, -1))


def drawn(below: int) -> int:
    """A number in [0, below) that nobody can restore."""
    return int.from_bytes(os.urandom(8), "little") % below


def drawn_order(count: int) -> list[int]:
    """An order that nobody can restore."""
    keys = {index: os.urandom(8) for index in range(count)}
    return sorted(keys, key=keys.__getitem__)


def flip_lowest_bit(values: Tensor, index: int) -> Tensor:
    """The same float32 values with one bit of one element turned over."""
    bits = values.clone().view(torch.int32)
    bits[index] ^= 1
    return bits.view(values.dtype)
