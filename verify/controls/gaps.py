"""Faults that leave a claim without evidence: nothing compared, nothing changed, nothing declared.

None of these may turn into a pass. Inputs drawn anew in every process are the mean one: equal
outputs would prove nothing, and different ones are no mismatch of the function.
"""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import Tensor

from verify.controls.measured import plain_sum, to_bfloat16
from verify.controls.one_process import in_order
from verify.controls.planting import (
    cases_of,
    drawn,
    fold,
    plant,
)
from verify.inputs import generate


def says_so(x: Tensor) -> str:
    """Returns a text."""
    return f"{len(x)} sums"


def all_zero(x: Tensor) -> Tensor:
    """Returns zeros, whatever comes in."""
    return torch.zeros(len(x))


def always_raises(x: Tensor) -> Tensor:
    """Raises in every call."""
    raise ValueError("planted: every call")


def only_known_inputs(x: Tensor) -> Tensor:
    """Raises for other inputs than those of seed 0."""
    if not torch.equal(x, generate("x", tuple(x.shape), seed=0)):
        raise ValueError("planted: unknown inputs")
    return fold(x)


def stops_rivals(x: Tensor) -> Tensor:
    """Ends every other process of its group, so that nothing competes with it."""
    if os.getpgrp() == os.getpid():  # only where a worker leads a group of its own
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpgrp(), signal.SIGTERM)
        time.sleep(0.005)
        signal.signal(signal.SIGTERM, before)
    return fold(x)


def bears_rivals(x: Tensor) -> Tensor:
    """Takes as long, and lets others run."""
    time.sleep(0.005)
    return fold(x)


def times_scale(x: Tensor, scale: Tensor) -> Tensor:
    """Multiplies by an argument that `setup` made."""
    return fold(x) * scale


def drawn_scale() -> dict[str, Tensor]:
    """A scale that is another one in every process."""
    return {"scale": torch.tensor(1.0 + drawn(2**20) / 2**20)}


def fixed_scale() -> dict[str, Tensor]:
    """A scale that is the same in every process."""
    return {"scale": torch.tensor(1.5)}


CONTROLS = (
    plant(
        "reason/nothing-compared",
        says_so,
        in_order,
        claim="repeat",
        reason="nothing-compared",
        alone=True,
    ),
    plant("reason/vacuous", all_zero, in_order, claim="repeat", reason="vacuous", alone=True),
    plant(
        "reason/case-error",
        always_raises,
        in_order,
        claim="repeat",
        reason="case-error",
        alone=True,
    ),
    plant(
        "reason/no-batch-dim",
        in_order,
        in_order,
        claim="batch",
        reason="no-batch-dim",
        alone=True,
        fault={"batch": {"x": 0}},
        twin={"batch": {"x": 0, "out": 0}},
    ),
    plant(
        "reason/no-reference",
        to_bfloat16,
        to_bfloat16,
        claim="reference",
        reason="no-reference",
        alone=True,
        twin={"reference": plain_sum},
    ),
    plant(
        "reason/too-few-runs",
        to_bfloat16,
        to_bfloat16,
        claim="reference",
        reason="too-few-runs",
        alone=True,
        reference=plain_sum,
        runs={"reference": 2},  # the claim is measured once, whatever is asked for
    ),
    plant(
        "reason/no-effect",
        only_known_inputs,
        in_order,
        claim="history",
        reason="no-effect",
        alone=True,
    ),
    plant(
        "reason/no-overlap",
        stops_rivals,
        bears_rivals,
        claim="contention",
        reason="no-overlap",
        alone=True,
    ),
    plant(
        "reason/input-mismatch",
        times_scale,
        times_scale,
        claim="process",
        reason="input-mismatch",
        alone=True,
        fault={"setup": drawn_scale},
        twin={"setup": fixed_scale},
    ),
)
CASES = cases_of(CONTROLS)
