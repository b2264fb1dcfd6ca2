"""What each module is given and returns, token by token, whatever the layout of a batch was.

`verify.record` digests whole tensors; here a token has to be found again beside other tokens, so
rows are kept by place. A tensor is taken where its first dimensions are those of the batch, [B, S]
or [B * S] (or [1, S], the same for all): attention masks, caches and rows that are grouped by
expert are not. Modules have the names that a recording gives them.

Shapes alone do not tell: an expert that happens to get every token has as many rows as there are
tokens, and so has each of the experts of a single one. So nothing inside an experts module is
taken; nothing of a module that is called more often in one pass than in another; and nothing of a
tensor that has another shape in any pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from verify.errors import UnsupportedError
from verify.onpolicy.live.sequences import NOWHERE
from verify.tracing.hooks import named_modules
from verify.tracing.tensors import only_tensors, tensors_in, tensors_of_call

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
    """All rows of a layout, by event, in the order of the first pass. calls: of each module in a
    pass, the same in all."""

    rows: dict[Event, Rows]
    calls: Mapping[str, int] = field(default_factory=dict)


class Capture:
    """Collects rows between `listening`'s begin and end; `begin` says which tokens a pass holds.

    mend: put zeros where modules give NaN or infinities for padding, which no token may depend on.
    """

    def __init__(self, model: nn.Module, largest: int = LARGEST, *, mend: bool = False) -> None:
        self._modules = list(named_modules(model))
        self._names = {id(module): name for name, module in self._modules}
        self._parts: dict[Event, list[tuple[Tensor, Tensor]]] = {}
        self._misfits: set[Event] = set()
        self._open: list[nn.Module] = []
        self._experts: set[str] = set()  # which were given choices
        self._inside = {name for name, _ in self._modules if _of_experts(name)}
        self._turns: Counter[str] = Counter()
        self._calls: dict[str, set[int]] = {}
        self._places = torch.empty((0, 0), dtype=torch.int64)
        self._left = self._largest = largest
        self._mend = mend

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hooks on all modules; they change nothing, but padding where that was asked."""
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
        self._end()
        self._places = places
        self._open.clear()

    def taken(self) -> Seen:
        """What was collected, each event's rows by place. An event whose rows have different widths
        (they belong to other tokens, too) or no rows is left out, and one of a module that is
        called a number of times that depends on the pass."""
        self._end()
        calls = {name: min(seen) for name, seen in self._calls.items() if len(seen) == 1}
        found = {}
        for event, parts in self._parts.items():
            if len({(values.shape[1], values.dtype) for _, values in parts}) > 1:
                continue
            if event.module not in calls:
                continue
            whole = torch.cat([where for where, _ in parts])
            order = torch.argsort(whole)
            ordered = whole[order]
            if len(ordered) and not bool((ordered[1:] == ordered[:-1]).any()):
                found[event] = Rows(ordered, torch.cat([values for _, values in parts])[order])
        return Seen(found, calls)

    def _end(self) -> None:
        """Of a pass, if there was one."""
        if self._turns:
            for name, _ in self._modules:
                self._calls.setdefault(name, set()).add(self._turns[name])
        self._turns.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self._names[id(module)]
        around = self._names[id(self._open[-1])] if self._open else None
        turn = self._turns[name]
        self._turns[name] += 1
        given = only_tensors(tensors_of_call(args, kwargs))
        if around is not None and _given_choices([t for _, t in given], self._places.numel()):
            self._experts.add(name)
        for path, t in given:
            self._take(Event(name, turn, INPUT, path, type(module).__name__, around), t)
        self._open.append(module)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not any(one is module for one in self._open):
            return
        while self._open.pop() is not module:  # an exception left some
            pass
        name = self._names[id(module)]
        around = self._names[id(self._open[-1])] if self._open else None
        inside = sum(one is module for one in self._open)  # a module that calls itself
        turn = self._turns[name] - 1 - inside
        for path, t in only_tensors(tensors_in(output)):
            if self._mend:
                mend_padding(t, self._places)
            self._take(Event(name, turn, OUTPUT, path, type(module).__name__, around), t)

    def _take(self, event: Event, t: Tensor) -> None:
        if event in self._misfits or event.module in self._inside:
            return
        if any(self._names[id(one)] in self._experts for one in self._open):
            return  # the modules around this one
        aligned = by_token(t, *self._places.shape)
        if aligned is None:
            self._misfits.add(event)
            for _, values in self._parts.pop(event, []):
                self._left += values.numel() * values.element_size()
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


def _of_experts(name: str) -> bool:
    """Whether a module lies in one called experts; shared ones see every token."""
    around = name.split(".")[:-1]
    return any(part.endswith("experts") and not part.startswith("shared") for part in around)


def _given_choices(given: Sequence[Tensor], tokens: int) -> bool:
    """Whether there are integers [tokens, K] beside floating-point numbers of the same shape."""
    shapes = {
        tuple(one.shape)
        for one in given
        if one.dim() == 2 and one.shape[0] == tokens and not one.is_floating_point()
        if one.dtype != torch.bool and one.numel() > 1  # [1, 1] may be a position and a mask
    }
    return any(one.is_floating_point() and tuple(one.shape) in shapes for one in given)


def mend_padding(t: Tensor, places: Tensor) -> None:
    """Zeros, in place, in rows [B, S, ...] or [B * S, ...] of padding that are not finite."""
    padding = places == NOWHERE
    if t.shape[:1] == (places.numel(),):
        padding = padding.flatten()
    elif t.shape[:2] != places.shape:
        return
    if t.is_floating_point() and bool(padding.any()):
        rest = (1,) * (t.dim() - padding.dim())
        bad = padding.to(t.device).reshape(*padding.shape, *rest) & ~torch.isfinite(t)
        if bool(bad.any()):
            t.masked_fill_(bad, 0)


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
