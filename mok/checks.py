"""Host checks with one outcome on all ranks, and the record of bad routing values.

Why one outcome: a rank that raises while its peers wait in an exchange hangs the job. So every
entry point first gathers a small fixed-size vector (is something wrong here, and the numbers on
which ranks must agree), and if anything is wrong anywhere all ranks raise the same error, which
names the offending ranks. That is a collective and a wait, so the Hopper backend does it when ranks
agree on a new kind of call, and checks later ones of that kind on the rank alone (mok.workspaces).
Bad expert ids do not stop a step: they run as unused slots and leave a record that is raised at the
next call. Refuses to check values that cost a pass over the weights.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mok.errors import (
    ContextError,
    ExchangeError,
    InputError,
    MoKError,
    RoutingError,
    UnsupportedError,
)

CALLS = ("workspace", "schedule", "routing", "forward", "backward", "recompute", "check")
_KINDS: tuple[type[MoKError], ...] = (
    InputError,
    RoutingError,
    ContextError,
    UnsupportedError,
    ExchangeError,
)
_MAX_FACTS = 8


@dataclass(frozen=True)
class ErrorRecord:
    """Routing errors that were met and not raised yet; shared by a group's cached workspaces."""

    pending: deque[str] = field(default_factory=lambda: deque(maxlen=1))

    def set(self, message: str) -> None:
        """Remember one error; the first of several is kept."""
        if not self.pending:
            self.pending.append(message)

    def raise_pending(self) -> None:
        """Raise RoutingError if an earlier call left one, and forget it."""
        if self.pending:
            raise RoutingError(self.pending.popleft())


def validation_wanted(validate: bool) -> bool:
    """Whether routing values are checked at once: validate=True, or MOK_CHECK=1."""
    return validate or os.environ.get("MOK_CHECK", "") == "1"


def checked(
    call: str,
    check: Callable[[], Mapping[str, int] | None],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Run a local check and agree on its outcome. Collective over the group; raises on all ranks.

    check returns the numbers that must be equal on all ranks (at most 8), or None. The same error
    class is raised everywhere, with the message of each offending rank. group None: nobody to agree
    with. An ExchangeError is raised on this rank at once: a peer that did not come to a launch
    would not come to a collective either.
    """
    error: MoKError | None = None
    facts: Mapping[str, int] = {}
    try:
        facts = check() or {}
    except MoKError as caught:
        error = caught
    except (TypeError, ValueError, RuntimeError, AttributeError) as caught:
        error = InputError(f"an argument could not be read: {type(caught).__name__}: {caught}")
    if group is None or isinstance(error, ExchangeError):
        if error is not None:
            raise error
        return
    kind = 0 if error is None else 1 + _kind(error)
    mine = [kind, CALLS.index(call), *facts.values()]
    mine += [0] * (2 + _MAX_FACTS - len(mine))
    where = torch.device("cpu") if "gloo" in dist.get_backend(group) else device
    sent = torch.tensor(mine, dtype=torch.int64, device=where)
    gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, sent, group=group)
    rows = [row.tolist() for row in gathered]
    if any(row[0] for row in rows):
        messages: list[str | None] = [None] * len(rows)
        dist.all_gather_object(messages, None if error is None else str(error), group=group)
        worst = next(row[0] for row in rows if row[0])
        told = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None]
        raise _KINDS[worst - 1](f"{'; '.join(told)} (raised on all {len(rows)} ranks)") from error
    for place, name in enumerate(["call", *facts]):
        values = [row[1 + place] for row in rows]
        if len(set(values)) > 1:
            shown = [CALLS[value] for value in values] if name == "call" else values
            raise InputError(
                f"{name} differs between ranks: "
                + ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(shown))
                + ". All ranks of a group must make the same calls with the same "
                "hidden size, widths, top-k, experts per rank and swiglu_limit."
            )


def _kind(error: MoKError) -> int:
    """Its place in _KINDS; what is not there (no compiler, say) cannot be had: UnsupportedError."""
    found = [place for place, kind in enumerate(_KINDS) if isinstance(error, kind)]
    return found[0] if found else _KINDS.index(UnsupportedError)


def check_tensor(
    name: str,
    tensor: object,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device,
    legend: str,
    weights: bool = False,
) -> None:
    """Shape (None: any size), dtype, device and contiguity of one argument; raises InputError.

    weights: experts' matrices [E, ...] may lie apart, as halves of a fused tensor do.
    """
    if isinstance(tensor, tuple):
        raise UnsupportedError(
            f"{name} is a tuple, the form of MXFP8 weights (data, scales); the portable backend "
            f"takes bf16 tensors {legend}. Dequantise the weight first."
        )
    if not isinstance(tensor, torch.Tensor):
        raise InputError(
            f"{name} is {type(tensor).__name__}; allowed: a {dtype} tensor {legend}. Pass a tensor."
        )
    fits = tensor.dim() == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        want = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{name} has shape {list(tensor.shape)}; allowed: [{want}], {legend}.")
    if tensor.dtype != dtype:
        raise InputError(
            f"{name} has dtype {tensor.dtype}; allowed: {dtype}. Convert with .to({dtype})."
        )
    if tensor.device != device:
        raise InputError(
            f"{name} is on {tensor.device}; allowed: {device}, where the workspace is. Move it."
        )
    if not tensor.is_contiguous() and not (weights and _apart(tensor)):
        raise InputError(
            f"{name} has strides {list(tensor.stride())}; allowed: contiguous"
            f"{', or each expert by itself' if weights else ''}. Call .contiguous() first."
        )


def _apart(weights: torch.Tensor) -> bool:
    """Whether each expert's matrix is contiguous, and none reaches into the next one's."""
    return weights[:1].is_contiguous() and weights.stride(0) >= weights[:1].numel()


def check_limit(limit: float | None) -> None:
    """swiglu_limit is None or a positive number; raises InputError."""
    if limit is not None and not limit > 0.0:
        raise InputError(f"swiglu_limit = {limit}; allowed: None or a positive number.")


def check_routed(
    gate: object, up: object, down: object | None, hidden: int, device: torch.device
) -> int:
    """Check the routed weights (down None: not needed here); returns E_local."""
    any_size = (None, None, hidden)
    check_tensor("w_routed_gate", gate, torch.bfloat16, any_size, device, "[E, I, H]", True)
    assert isinstance(gate, torch.Tensor)
    experts, width = gate.shape[:2]
    for name, size in (("experts per rank", experts), ("width I", width)):
        if size < 1:
            raise InputError(f"w_routed_gate has {size} {name}; allowed: 1 or more.")
    shape = (experts, width, hidden)
    check_tensor("w_routed_up", up, torch.bfloat16, shape, device, "[E, I, H]", True)
    if down is not None:
        shape = (experts, hidden, width)
        check_tensor("w_routed_down", down, torch.bfloat16, shape, device, "[E, H, I]", True)
    return experts


def check_shared(
    gate: object, up: object, down: object, hidden: int, device: torch.device, with_down: bool
) -> bool:
    """Check the shared expert's weights: all given or all None; returns whether it is there."""
    given = [gate is not None, up is not None] + ([down is not None] if with_down else [])
    if not any(given):
        return False
    if not all(given):
        raise InputError(
            f"shared expert: gate, up{', down' if with_down else ''} given = {given}; "
            "allowed: all of them or none. Pass None for each to leave the shared expert out."
        )
    check_tensor("w_shared_gate", gate, torch.bfloat16, (None, hidden), device, "[I_shared, H]")
    assert isinstance(gate, torch.Tensor)
    width = gate.shape[0]
    check_tensor("w_shared_up", up, torch.bfloat16, (width, hidden), device, "[I_shared, H]")
    if with_down:
        check_tensor(
            "w_shared_down", down, torch.bfloat16, (hidden, width), device, "[H, I_shared]"
        )
    return True


def routing_message(bad_TK: torch.Tensor, topk_TK: torch.Tensor, num_experts: int) -> str:
    """The error text of a batch with bad ids: how many, and the first of them."""
    token, slot = (int(index) for index in torch.nonzero(bad_TK)[0])
    value = int(topk_TK[token, slot])
    kind = "out of range" if not -1 <= value < num_experts else "repeated inside the token"
    return (
        f"{int(bad_TK.sum())} bad expert id(s); the first, topk_experts[{token}, {slot}] = {value},"
        f" is {kind}; allowed: -1 (unused slot) or 0 .. {num_experts - 1}, each at most once per "
        "token. They were run as unused slots. Set MOK_CHECK=1 to raise at the call itself."
    )


def limit_bits(limit: float | None) -> int:
    """swiglu_limit as an integer that ranks can compare; 0 for None."""
    return 0 if limit is None else int(struct.unpack("<q", struct.pack("<d", limit))[0])
