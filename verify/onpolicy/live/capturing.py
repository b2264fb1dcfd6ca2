"""What each module is given and returns, token by token, whatever the layout of a batch was.

`verify.record` digests whole tensors; here a token has to be found again beside other tokens, so
rows are kept by place. A tensor is taken where its first dimensions are those of the batch, [B, S]
or [B * S] (or [1, S], the same for all): attention masks, caches and rows that are grouped by
expert are not. Modules have the names that a recording gives them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verify.errors import UnsupportedError
from verify.onpolicy.live.sequences import NOWHERE
from verify.tracing.hooks import named_modules
from verify.tracing.tensors import tensors_in, tensors_of_call

INPUT, OUTPUT = "input", "output"
LARGEST = 2 << 30  # bytes of all rows of a layout; two layouts are held at a time


@dataclass(frozen=True)
class Event:
    """One tensor at a module's border. turn: which call of the module in a pass. around: the module
    whose code was running, None for the model's own inputs."""

    module: str
    turn: int
    kind: str
    path: str
    type: str
    around: str | None


@dataclass(frozen=True, eq=False)
class Rows:
    """places: int64 [n], ascending. values: [n, width], on the CPU, of the tensor's dtype."""

    places: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Seen:
    """All rows of a layout, by event, in the order of the first pass."""

    rows: dict[Event, Rows]


class Capture:
    """Collects rows between `listening`'s begin and end; `begin` says which tokens a pass holds."""

    def __init__(self, model: nn.Module, largest: int = LARGEST) -> None:
        self._modules = list(named_modules(model))
        self._names = {id(module): name for name, module in self._modules}
        self._parts: dict[Event, list[tuple[Tensor, Tensor]]] = {}
        self._open: list[nn.Module] = []
        self._turns: Counter[str] = Counter()
        self._places = torch.empty((0, 0), dtype=torch.int64)
        self._left = self._largest = largest

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hooks on all modules; they change nothing."""
        handles = []
        try:
            for _, module in self._modules:
                handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                handles.append(module.register_forward_hook(self._after, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, places: Tensor) -> None:
        """A pass with tokens at these places [B, S] follows."""
        self._places = places
        self._turns.clear()
        self._open.clear()

    def taken(self) -> Seen:
        """What was collected, each event's rows by place. An event whose rows have different widths
        (they belong to other tokens, too) or no rows is left out."""
        found = {}
        for event, parts in self._parts.items():
            if len({(values.shape[1], values.dtype) for _, values in parts}) > 1:
                continue
            whole = torch.cat([where for where, _ in parts])
            order = torch.argsort(whole)
            ordered = whole[order]
            if len(ordered) and not bool((ordered[1:] == ordered[:-1]).any()):
                found[event] = Rows(ordered, torch.cat([values for _, values in parts])[order])
        return Seen(found)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self._names[id(module)]
        around = self._names[id(self._open[-1])] if self._open else None
        turn = self._turns[name]
        self._turns[name] += 1
        self._open.append(module)
        for path, t in tensors_of_call(args, kwargs):
            self._take(Event(name, turn, INPUT, path, type(module).__name__, around), t)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not any(one is module for one in self._open):
            return
        while self._open.pop() is not module:  # an exception left some
            pass
        name = self._names[id(module)]
        around = self._names[id(self._open[-1])] if self._open else None
        inside = sum(one is module for one in self._open)  # a module that calls itself
        turn = self._turns[name] - 1 - inside
        for path, t in tensors_in(output):
            self._take(Event(name, turn, OUTPUT, path, type(module).__name__, around), t)

    def _take(self, event: Event, t: Tensor) -> None:
        aligned = by_token(t, *self._places.shape)
        if aligned is None:
            return
        real = self._places.flatten() != NOWHERE
        values = aligned.detach()[real.to(aligned.device)].to("cpu", copy=True)
        self._left -= values.numel() * values.element_size()
        if self._left < 0:
            raise UnsupportedError(
                f"what modules give to each other is more than {self._largest >> 20} MiB; give "
                "fewer or shorter samples: --samples 2 --tokens 8"
            )
        where = self._places.flatten()[real]
        self._parts.setdefault(event, []).append((where, values))


def by_token(t: Tensor, batch: int, tokens: int) -> Tensor | None:
    """[batch * tokens, width] of a tensor that has one row a token, or None."""
    count = batch * tokens
    if t.is_sparse or t.is_quantized or t.dim() == 0 or count == 0 or t.numel() == 0:
        return None
    if t.dim() >= 2 and tuple(t.shape[:2]) == (batch, tokens):
        return t.reshape(count, -1)
    if t.shape[0] == count:
        return t.reshape(count, -1)
    if t.dim() >= 2 and tuple(t.shape[:2]) == (1, tokens):
        return t.expand(batch, *t.shape[1:]).reshape(count, -1)
    return None
