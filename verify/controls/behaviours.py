"""Faults in how a function treats its caller: what it writes, keeps, returns and draws.

Each is a MISMATCH of the closed list that one living process can provoke, in `repeat`: an output
with other bits or of another kind, a first call unlike the others, an exception now and then, an
input written to, memory handed out twice, a result kept for ever, and each global generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verify.controls.one_process import in_order
from verify.controls.planting import (
    ROWS,
    cases_of,
    drawn,
    flip_lowest_bit,
    fold,
    plant,
)


def flips_a_bit(x: Tensor) -> Tensor:
    """Turns over the lowest bit of one element, each time another one."""
    return flip_lowest_bit(fold(x), drawn(ROWS))


def flips_a_bit_back(x: Tensor) -> Tensor:
    """Turns it over twice."""
    where = drawn(ROWS)
    return flip_lowest_bit(flip_lowest_bit(fold(x), where), where)


def counting(function: Callable[[int, Tensor], Any]) -> Callable[[Tensor], Any]:
    """A function of the number of calls before this one and of x."""
    calls: list[None] = []

    def execute(x: Tensor) -> Any:
        calls.append(None)
        return function(len(calls) - 1, x)

    execute.__doc__ = function.__doc__
    return execute


def more_outputs_later(calls: int, x: Tensor) -> dict[str, Tensor]:
    """Returns another tensor from the second call on."""
    return {"out": fold(x), **({"more": x + 1} if calls else {})}


def more_outputs(calls: int, x: Tensor) -> dict[str, Tensor]:
    """Returns both tensors every time."""
    return {"out": fold(x), "more": x + 1}


def wider_later(calls: int, x: Tensor) -> Tensor:
    """Returns the same values in a wider type from the second call on."""
    return fold(x).double() if calls else fold(x)


def raises_once(calls: int, x: Tensor) -> Tensor:
    """Raises in the fourth call."""
    if calls == 3:
        raise RuntimeError("planted: the fourth call")
    return fold(x)


def catches_once(calls: int, x: Tensor) -> Tensor:
    """Raises in the fourth call, and handles it."""
    try:
        return raises_once(calls, x)
    except RuntimeError:
        return fold(x)


def accumulates_at_first(calls: int, x: Tensor) -> Tensor:
    """Adds the result twice into its workspace in the first call, as autotuners do."""
    total = torch.zeros(len(x))
    for _ in range(2 if calls == 0 else 1):
        total += fold(x)
    return total


def clears_at_first(calls: int, x: Tensor) -> Tensor:
    """Works twice in the first call, with a cleared workspace."""
    total = torch.zeros(len(x))
    for _ in range(2 if calls == 0 else 1):
        total.zero_().add_(fold(x))
    return total


def writes_to_input(x: Tensor) -> Tensor:
    """Leaves other values in its input."""
    return fold(x.mul_(2))


def writes_to_copy(x: Tensor) -> Tensor:
    """Leaves its input as it is."""
    return fold(x.clone().mul_(2))


def in_workspace(*, own: bool) -> Callable[[Tensor], Tensor]:
    """Returns a workspace that all calls share, or a copy of it."""
    workspace = torch.empty(ROWS)

    def execute(x: Tensor) -> Tensor:
        """Computes in a workspace that all calls share."""
        workspace.copy_(fold(x))
        return workspace.clone() if own else workspace

    return execute


def remembered(*, key: bool) -> Callable[[Tensor], Tensor]:
    """Keeps results, by input when `key`, and otherwise for ever."""
    results: dict[bytes, Tensor] = {}

    def execute(x: Tensor) -> Tensor:
        """Computes once, and returns that ever after."""
        name = x.numpy().tobytes() if key else b""
        if name not in results:
            results[name] = fold(x)
        return results[name].clone()

    return execute


def draws_from_torch(x: Tensor) -> Tensor:
    """Adds noise of the global generator."""
    return fold(x) + torch.rand(len(x))


def draws_own(x: Tensor) -> Tensor:
    """Adds noise of its own generator."""
    return fold(x) + torch.rand(len(x), generator=torch.Generator().manual_seed(7))


def draws_from_numpy(x: Tensor) -> Tensor:
    """Adds noise of numpy's global generator."""
    return fold(x) + float(np.random.random())


def draws_own_numpy(x: Tensor) -> Tensor:
    """Adds noise of a numpy generator of its own."""
    return fold(x) + float(np.random.default_rng(7).random())


def draws_from_python(x: Tensor) -> Tensor:
    """Adds noise of Python's global generator."""
    return fold(x) + random.random()


def draws_own_python(x: Tensor) -> Tensor:
    """Adds noise of a Python generator of its own."""
    return fold(x) + random.Random(7).random()


CONTROLS = (
    plant(
        "reason/bits-differ", flips_a_bit, flips_a_bit_back, claim="repeat", reason="bits-differ"
    ),
    plant(
        "reason/outputs-differ",
        counting(more_outputs_later),
        counting(more_outputs),
        claim="repeat",
        reason="outputs-differ",
        alone=True,
    ),
    plant(
        "detector/output-dtype",
        counting(wider_later),
        in_order,
        claim="repeat",
        reason="outputs-differ",
        alone=True,
    ),
    plant(
        "reason/raises-sometimes",
        counting(raises_once),
        counting(catches_once),
        claim="repeat",
        reason="raises-sometimes",
        alone=True,
    ),
    plant(
        "detector/first-call",
        counting(accumulates_at_first),
        counting(clears_at_first),
        claim="repeat",
        reason="bits-differ",
        alone=True,
    ),
    plant(
        "reason/input-mutated",
        writes_to_input,
        writes_to_copy,
        claim="repeat",
        reason="input-mutated",
        alone=True,
    ),
    plant(
        "reason/aliased-output",
        in_workspace(own=False),
        in_workspace(own=True),
        claim="repeat",
        reason="aliased-output",
        alone=True,
    ),
    plant(
        "reason/cached-output",
        remembered(key=False),
        remembered(key=True),
        claim="repeat",
        reason="cached-output",
        alone=True,
    ),
    plant(
        "reason/consumes-global-rng",
        draws_from_torch,
        draws_own,
        claim="repeat",
        reason="consumes-global-rng",
        alone=True,
    ),
    plant(
        "detector/free-arm-numpy",
        draws_from_numpy,
        draws_own_numpy,
        claim="repeat",
        reason="consumes-global-rng",
        alone=True,
    ),
    plant(
        "detector/free-arm-python",
        draws_from_python,
        draws_own_python,
        claim="repeat",
        reason="consumes-global-rng",
        alone=True,
    ),
)
CASES = cases_of(CONTROLS)
