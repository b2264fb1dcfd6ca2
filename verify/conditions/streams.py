"""stream: the case on another CUDA stream than torch's default one.

Kernels that are launched on the default stream although torch's current one is another are not
ordered with what surrounds them. On a quiet device they mostly come in time. So one variant makes
the inputs late: right before the call they hold NaNs (integers 0), and their values come only after
a pause of the side stream. A kernel that does not wait for that stream computes with NaNs. The same
is done to the gradients that arrive at the results: by the time that backward begins, the inputs
have come, and a kernel of backward on another stream would be in time. Only one device can be late,
so a case on several is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mok import jit
from verify.allocations import leave
from verify.captures import as_integers, flatten
from verify.conditions.availability import Unavailable, available
from verify.conditions.cuda_probes import delay_stream
from verify.conditions.watching import cuda_devices, watched
from verify.sessions import Effect, Session, perform

DELAY = 0.02  # seconds
VARIANTS = (("side stream", 0, 0.0), ("high priority", -1, 0.0), ("late side stream", 0, DELAY))


def run(session: Session, runs: int) -> None:
    """At least `runs` executions, over a side stream, one of high priority, and a late one."""
    refusals = (Unavailable, jit.JitError)
    device = available(session, "stream", lambda: _prepared(cuda_devices(session)), refusals)
    if device is None:
        return
    for index in range(max(runs, len(VARIANTS))):
        name, priority, late = VARIANTS[index % len(VARIANTS)]
        _on(session, name, device, priority, late, index)


def _prepared(devices: Sequence[torch.device]) -> torch.device:
    if not devices:
        raise Unavailable("it uses no CUDA device")
    if len(devices) > 1:
        places = ", ".join(map(str, devices))
        raise Unavailable(f"it uses {places}; inputs are made late on one device")
    jit.load("conditions/probe.cu", "delay", device=devices[0])  # not for the first time in a case
    return devices[0]


@dataclass
class Late:
    """What was made late in one execution: inputs, and `gradients` of those that were `awaited`.

    hooks: removed afterwards, since a result may be a parameter that lives on. refused: why no
    input could be made late, "" where it could.
    """

    inputs: int = 0
    awaited: int = 0
    gradients: int = 0
    hooks: list[Any] = field(default_factory=list)
    refused: str = ""

    @property
    def held(self) -> bool:
        """Whether there was something to be late for, in the forward and wherever a backward began
        at results on the device."""
        some = self.inputs + self.gradients > 0
        return some and self.gradients == self.awaited and not self.refused


def _on(
    session: Session, name: str, device: torch.device, priority: int, late: float, index: int
) -> None:
    stream = torch.cuda.Stream(device, priority=priority)
    usual = torch.cuda.current_stream(device).cuda_stream
    seen: list[int] = []
    made = Late() if late else None

    def began(arguments: dict[str, Any]) -> None:
        if made is not None:
            try:
                made.inputs = _make_late(device, arguments, late)
            except RuntimeError as error:  # not the case's fault, but it has to be told
                made.refused = f"{type(error).__name__}: {error}"
        seen.append(torch.cuda.current_stream(device).cuda_stream)

    def ended(returned: Any) -> None:
        if made is not None and session.stage.case.gradients:
            _await_gradients(device, returned, late, made)
        seen.append(torch.cuda.current_stream(device).cuda_stream)

    torch.cuda.synchronize(device)
    try:
        with torch.cuda.stream(stream):
            perform(
                watched(session, before=began, after=ended),
                "stream",
                name,
                run=index,
                requested={"stream": name, "priority": priority, "late_ms": round(1000 * late)},
                effective=partial(effect, seen, usual, made),
            )
    finally:
        for hook in made.hooks if made is not None else ():
            hook.remove()
        leave(device, stream)
    torch.cuda.synchronize(device)


def _make_late(device: torch.device, arguments: dict[str, Any], seconds: float) -> int:
    """The inputs on this device get their values only after a pause of the current stream; how many
    they are. Whatever happens, they get them. Raises Unavailable, with all of them as they were,
    where one cannot be written to."""
    leaves = [
        leaf.detach()
        for leaf in pytree.tree_leaves(arguments)
        if isinstance(leaf, torch.Tensor) and leaf.device == device
    ]
    if any(_shares_elements(leaf) for leaf in leaves):
        raise Unavailable(
            "an input has elements that share memory (stride 0, as torch.expand gives), so that it"
            " cannot be overwritten; make it contiguous in the setup"
        )
    values = [leaf.clone() for leaf in leaves]
    try:
        for leaf in leaves:
            _poison(leaf)
        torch.cuda.current_stream(device).synchronize()
        delay_stream(device, seconds)
    finally:
        for leaf, value in zip(leaves, values, strict=True):
            as_integers(leaf).copy_(as_integers(value))
    return len(leaves)


def _shares_elements(tensor: torch.Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _poison(tensor: torch.Tensor) -> None:
    """NaN in every element; 0 in integers, since an index that is not there would end the process,
    and with it the evidence."""
    if tensor.is_complex():
        tensor.fill_(complex("nan"))
    else:
        as_integers(tensor).fill_(-1 if tensor.is_floating_point() else 0)


def _await_gradients(device: torch.device, returned: Any, seconds: float, late: Late) -> None:
    """The gradients of results on this device will be late as well."""
    outputs = flatten(returned)[0].values()
    heads = {id(one): one for one in outputs if one.requires_grad and one.device == device}
    late.awaited = len(heads)
    late.hooks += [one.register_hook(_lateness(device, seconds, late)) for one in heads.values()]


def _lateness(
    device: torch.device, seconds: float, late: Late
) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """A hook for one result: what it gives is its gradient, on the stream that backward is on."""
    marked = False

    def hook(gradient: torch.Tensor) -> torch.Tensor | None:
        nonlocal marked
        try:
            value = late_copy(device, gradient, seconds)
        except RuntimeError:  # not the case's fault; without its mark nothing was in effect
            return None
        late.gradients += not marked
        marked = True
        return value

    return hook


def late_copy(device: torch.device, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
    """A copy that gets its values only after a pause of the device's current stream."""
    value = tensor.detach().clone()
    _make_late(device, {"gradient": value}, seconds)
    return value


def effect(seen: Sequence[int], usual: int, late: Late | None = None) -> Effect:
    """In effect where the current stream was another both when the case began and when it ended,
    and what had to be late was."""
    others = sum(one != usual for one in seen)
    told: dict[str, Any] = {"looks": len(seen), "on_another_stream": others}
    if late is not None:
        told |= {"late_inputs": late.inputs, "late_gradients": late.gradients}
        told |= {"awaited": late.awaited} if late.awaited != late.gradients else {}
        told |= {"not_late": late.refused} if late.refused else {}
    return told, others == len(seen) == 2 and (late is None or late.held)
