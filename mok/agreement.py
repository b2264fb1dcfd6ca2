"""How the check of a call ends: all ranks agree on it, and on which backend runs it.

Both doors to the layer (mok.functional, mok.operators) check their own arguments; what follows from
them is the same. Refuses nothing by itself: errors are those of the check, of the workspace, and of
ranks that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from mok import checks
from mok.errors import InputError
from mok.hopper.support import BACKWARD_VARIABLE, backward_wanted
from mok.workspaces import Workspace


@dataclass(frozen=True)
class Checked:
    """What a check of arguments found. experts: of one rank. shared_width: None without one.

    also: further numbers that ranks must agree on. deferred: whether the schedule is one that the
    Hopper backend can take.
    """

    experts: int
    width: int
    shared_width: int | None
    also: Mapping[str, int] = field(default_factory=dict)
    deferred: bool = True


def agree_on_backend(
    call: str,
    workspace: Workspace,
    check: Callable[[], Checked],
    weights: tuple[object, object],
    limit: float | None,
    minibatch: int,
) -> bool:
    """Whether the Hopper backend runs the call.

    check: of the arguments, raises for wrong ones. weights: gate and shared gate, unchecked.
    Raises on all ranks together; a call of a kind that all have agreed on, on this rank alone,
    unless it is a backward that runs on the portable backend.
    """
    chosen: list[bool] = []
    setting = _backward_setting(workspace.num_ranks)

    def whole() -> dict[str, int]:
        workspace.raise_pending()
        checks.check_limit(limit)
        kernels = backward_wanted(workspace.num_ranks)  # refused here, where all ranks hear of it
        found = check()
        sizes = (found.experts, found.width, found.shared_width or 0)
        chosen.append(workspace.runs_hopper(*sizes) and found.deferred)
        if chosen[0]:
            workspace.check_room(*sizes, minibatch)
        return {
            **found.also,
            "width I": found.width,
            "shared expert": int(found.shared_width is not None),
            "swiglu_limit (bits)": checks.limit_bits(limit),
            "backend (1: Hopper)": int(chosen[0]),
            BACKWARD_VARIABLE: int(kernels),
            # Only there it decides what memory is made, together.
            "minibatch_size (Hopper)": minibatch if chosen[0] else 0,
        }

    if call == "backward" and setting is False:  # exchanges rows by collectives of its own
        checks.checked(call, whole, workspace.group, workspace.device)
    else:
        kind = (*map(_shape, weights), limit, minibatch, setting)
        workspace.agree(call, kind, whole, lambda: chosen[0])
    return chosen[0]


def _backward_setting(ranks: int) -> bool | str:
    """As backward_wanted; the reason where that is refused, since one rank must not raise alone."""
    try:
        return backward_wanted(ranks)
    except InputError as error:
        return str(error)


def _shape(tensor: object) -> object:
    """What of a weight has to be equal on all ranks, unchecked."""
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
