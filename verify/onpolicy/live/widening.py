"""Is it rounding? The same layouts again, by a copy of the model in float64.

What rounding makes of a difference of layouts shrinks with the dtype; what another computation
makes of it (padding that is not masked, positions that are counted otherwise, a branch for single
tokens) stays. Rows count as equal here up to TOLERANCE of their largest value: far beyond float32,
in which parts of a model may compute on purpose, and far below what a structural fault does.
A module computes something else only where what it gives differs by that much, too: its parts may
be given rows in another order and none the less give the same sum.

A mask of the most negative float64, which a softmax in float32 takes for infinite, makes NaN of
padding that sees no token, and then of all: such rows of padding are set to zero in the copy.

Judges nothing where a module of the copy still rounds to bfloat16 or float16, and where a router's
choice is the first difference: a choice between equals turns on the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from verify.errors import UnsupportedError
from verify.onpolicy.live.capturing import INPUT, OUTPUT, Event, Seen
from verify.onpolicy.live.locating import Parted, differences, gives_other
from verify.onpolicy.live.scoring import Scored
from verify.targets import told

TOLERANCE = 2.0**-12
LEAST = 2.0**-16  # of |d| of log-probabilities, which are float32 and of a size up to 64
FAR = 2.0**-5  # more than logits of a size of 64 make of TOLERANCE
LARGEST = 8 << 30  # bytes of a copy
NARROW = 4  # bytes of a number, less than which are rounded


@dataclass(frozen=True)
class Wide:
    """What float64 says of one layout. largest: of |d| of log-probabilities. parted: the first
    module beyond TOLERANCE. changed: whether what it gives is, too; None where no output of it
    could be compared. problem: why nothing is said, or ""."""

    largest: float | None
    parted: Parted | None
    problem: str = ""
    changed: bool | None = True

    @property
    def structural(self) -> bool:
        """Whether the two layouts do not compute the same quantity."""
        if self.problem or self.parted is None or self.parted.choice:
            return False
        return self.moves if self.changed is None else self.changed

    @property
    def moves(self) -> bool:
        """Whether log-probabilities differ by more than their own rounding to float32."""
        return self.largest is not None and not self.largest <= LEAST

    def to_json(self) -> dict[str, Any]:
        """As it stands in the document."""
        return {
            "largest": self.largest,
            "structural": self.structural,
            "first": None if self.parted is None else self.parted.to_json(),
            "problem": self.problem,
        }


def widened(model: nn.Module) -> nn.Module:
    """A copy with parameters and buffers in float64. UnsupportedError where there can be none."""
    size = sum(8 * one.numel() for one in model.parameters())
    if size > LARGEST:
        raise UnsupportedError(
            f"a copy in float64 would take {size >> 30} GiB, more than {LARGEST >> 30}"
        )
    try:
        made = copy.deepcopy(model).to(torch.float64)
    except Exception as error:  # whatever somebody's model raises
        raise UnsupportedError(
            f"there is no copy in float64: {type(error).__name__}: {told(error)}"
        ) from error
    return made.eval()


def compared(
    a: Scored, b: Scored, chosen: Collection[Event], finite: bool, tolerance: float = TOLERANCE
) -> Wide:
    """What two layouts in float64 say. a: the reference. finite: whether the model itself gave
    numbers in both."""
    assert a.seen is not None
    assert b.seen is not None
    pairs = list(zip(a.values, b.values, strict=True))
    if finite and not all(np.isfinite(one).all() for both in pairs for one in both):
        return Wide(None, None, "the copy in float64 gives NaN or infinities, the model does not")
    largest = max(float(np.abs(one - other).max()) for one, other in pairs)
    return _located(a.seen, b.seen, largest, chosen, tolerance)


def _located(a: Seen, b: Seen, largest: float, chosen: Collection[Event], tolerance: float) -> Wide:
    parts = None  # the first of which alone differs
    for parted in differences(a, b, tolerance, chosen):
        wide = Wide(largest, parted, changed=gives_other(parted.module, a, b, tolerance))
        if parted.choice or wide.structural:
            return replace(wide, problem=narrow_module(a, parted))
        parts = parts or parted
    if largest <= FAR:
        return Wide(largest, None, narrow_module(a, None))
    if parts is not None:
        return Wide(largest, parts, narrow_module(a, parts), changed=None)
    what = f"log-probabilities differ by up to {largest:.4g}, what modules give does not"
    return Wide(largest, None, what)


def plain_experts(model: nn.Module) -> str:
    """Makes a model compute its experts as transformers does, and says what it computed them by;
    "" where there is nothing to change. For a copy in float64, which not every one takes."""
    config = getattr(model, "config", None)
    name = getattr(config, "_experts_implementation", None)
    setter = getattr(model, "set_experts_implementation", None)
    if not isinstance(name, str) or name == "eager" or setter is None:
        return ""
    setter("eager")
    return name


def narrow_module(seen: Seen, parted: Parted | None) -> str:
    """Why a copy in float64 rounds all the same, or "".

    A module whose output is narrower than float32; or values of the first module that differs,
    all of which a narrow dtype holds exactly, as none would by chance.
    """
    for event, rows in seen.rows.items():
        kind = rows.values.dtype
        if event.kind == OUTPUT and kind.is_floating_point and rows.values.element_size() < NARROW:
            return f"{event.module} computes in {_name(kind)} there, too"
    for event, rows in seen.rows.items():
        if parted is None or not rows.values.is_floating_point() or event.path != parted.path:
            continue
        border = (event.module, event.kind)
        if border == (parted.before or parted.module, INPUT if parted.before else OUTPUT):
            for kind in (torch.bfloat16, torch.float16):
                if torch.equal(rows.values.to(kind).to(rows.values.dtype), rows.values):
                    return f"{parted.module} rounds to {_name(kind)} there, too"
    return ""


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
