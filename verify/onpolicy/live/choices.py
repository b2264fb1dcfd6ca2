"""Which experts the routers of a model chose, found in what its modules give to each other.

A choice is a tensor of integers [tokens, K] beside one of floating-point numbers of the same shape:
what transformers gives an experts module, or what its router returns. Refuses to guess margins
where no module around shows logits whose K largest are the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verify.onpolicy.live.capturing import INPUT, OUTPUT, Event, Rows, Seen
from verify.onpolicy.live.sequences import Sampled, lengths, places
from verify.onpolicy.samples import Routing


@dataclass(frozen=True, eq=False)
class Choice:
    """One layer's. module: who was given the choice, or made it."""

    layer: int
    module: str
    experts: Rows
    margins: Tensor | None


def choices(seen: Seen) -> tuple[Choice, ...]:
    """One for each layer with a router, in order; an experts module's rather than its router's."""
    found: dict[int, Choice] = {}
    for kind in (INPUT, OUTPUT):
        for event, rows in _pairs(seen, kind):
            layer = _layer(event.module, len(found))
            if layer not in found:
                found[layer] = Choice(layer, event.module, rows, _margins(seen, event, rows))
    return tuple(found[layer] for layer in sorted(found))


def events(seen: Seen) -> set[Event]:
    """The tensors that are choices, wherever they pass a border."""
    return {event for kind in (INPUT, OUTPUT) for event, _ in _pairs(seen, kind)}


def routing(seen: Seen, samples: Sequence[Sampled]) -> list[Routing] | None:
    """One record a sample, or None where not every layer has a choice for every token."""
    chosen = choices(seen)
    if not chosen or len({one.experts.values.shape[1] for one in chosen}) > 1:
        return None
    records = []
    for number, count in enumerate(lengths(samples)):
        wanted = places(number, 0, count)
        experts, margins = [], []
        for one in chosen:
            at = torch.searchsorted(one.experts.places, wanted)
            known = at < len(one.experts.places)
            if not bool(known.all()) or not torch.equal(one.experts.places[at], wanted):
                return None
            experts.append(one.experts.values[at].numpy())
            if one.margins is not None:
                margins.append(one.margins[at].numpy())
        records.append(
            Routing(
                np.stack(experts, axis=1).astype(np.int32),
                start=0,
                margins=np.stack(margins, axis=1) if len(margins) == len(chosen) else None,
                layers=tuple(one.layer for one in chosen),
            )
        )
    return records


def _pairs(seen: Seen, kind: str) -> Iterator[tuple[Event, Rows]]:
    """Integers beside floating-point numbers of the same shape, at the same border."""
    beside: dict[tuple[str, int], list[tuple[Event, Rows]]] = {}
    for event, rows in seen.rows.items():
        if event.kind == kind and event.around is not None:
            beside.setdefault((event.module, event.turn), []).append((event, rows))
    for (_, turn), held in beside.items():
        for event, rows in held if turn == 0 else ():
            whole = not rows.values.is_floating_point() and rows.values.dtype != torch.bool
            if whole and any(
                other.values.is_floating_point() and other.values.shape == rows.values.shape
                for _, other in held
            ):
                yield event, rows
                break


def _margins(seen: Seen, chosen: Event, rows: Rows) -> Tensor | None:
    """float32 [n]: how far the last chosen probability lies above the first that was not."""
    k = rows.values.shape[1]
    block = chosen.module.rpartition(".")[0]
    for event, other in seen.rows.items():
        near = event.module == chosen.module or event.module.rpartition(".")[0] == block
        wide = other.values.is_floating_point() and other.values.shape[1] > k
        if not (near and wide and event.kind == OUTPUT and torch.equal(other.places, rows.places)):
            continue
        ranked = torch.softmax(other.values.float(), dim=1).sort(
            dim=1, descending=True, stable=True
        )
        if torch.equal(ranked.indices[:, :k].sort(dim=1).values, rows.values.sort(dim=1).values):
            return ranked.values[:, k - 1] - ranked.values[:, k]
    return None


def _layer(name: str, otherwise: int) -> int:
    """The first number in a module's name, as in `model.layers.3.mlp.experts`."""
    return next((int(part) for part in name.split(".") if part.isdigit()), otherwise)
