"""A case looked at while it runs: a hook right before its function and one right after.

Conditions on a GPU need both. Inputs are copied before the function is called, so only there is a
cache cold or a stream what it was set to; and where results lie is known only as they are returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from verify.sessions import Session


def watched(
    session: Session,
    *,
    before: Callable[[dict[str, Any]], None] = lambda arguments: None,
    after: Callable[[Any], None] = lambda returned: None,
) -> Session:
    """The same session, whose case calls `before(arguments)` and `after(what it returned)`.

    What a hook raises is not the case's fault and must not look like it: it is passed over, and the
    condition, which then lacks the hook's marks, was not in effect. A hook leaves the arguments as
    they were, whatever happens.
    """
    execute = session.stage.case.execute

    @functools.wraps(execute)
    def seen(**arguments: Any) -> Any:
        with suppress(Exception):
            before(arguments)
        returned = execute(**arguments)
        with suppress(Exception):
            after(returned)
        return returned

    return instead(session, seen)


def instead(session: Session, execute: Callable[..., Any], **fields: Any) -> Session:
    """The same session, whose case calls another function, and has other `fields`."""
    case = replace(session.stage.case, execute=execute, **fields)
    return replace(session, stage=replace(session.stage, case=case))


def tensors_of(session: Session) -> list[torch.Tensor]:
    """Every tensor of the base execution: given, of modules, and what it returned."""
    base = session.base
    assert base is not None
    states = session.stage.module_state.values()
    owned = [kept.live for state in states for kept in state.values()]
    return [*base.given.tensors.values(), *owned, *base.kept.values()]


def cuda_devices(session: Session) -> list[torch.device]:
    """The CUDA devices on which the case has tensors or took memory, in order; none for a case
    that works on the CPU alone. One that moves its inputs to a GPU and its results back has both.
    """
    base = session.base
    assert base is not None
    found = {tensor.device for tensor in tensors_of(session) if tensor.device.type == "cuda"}
    found |= {torch.device("cuda", index) for index in base.devices}
    return sorted(found, key=lambda device: device.index or 0)


def uses_cpu(session: Session) -> bool:
    """Whether some tensor is on the CPU, or none is anywhere."""
    tensors = tensors_of(session)
    return not tensors or any(tensor.device.type == "cpu" for tensor in tensors)
