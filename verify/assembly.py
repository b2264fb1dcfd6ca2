"""Parts of tensors on several ranks: adding up their digests, and putting wholes together.

Digests of parts add up, so equality over ranks is decided without moving a tensor. Only when sums
differ are the parts of that one tensor gathered, to say where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verify.captures import Layout, as_integers
from verify.digests import Digest
from verify.hashing import digest_all

if TYPE_CHECKING:
    from verify.sessions import Session


@dataclass(frozen=True)
class Part:
    """A rank's part of a tensor.

    `count` is given when `tensor` is the whole filled with zeros where another rank holds the
    content (or where nothing is compared): the number of elements that really are covered.
    """

    tensor: Tensor
    layout: Layout | None
    replicated: bool = False
    count: int | None = None


def digest_parts(parts: Mapping[str, Part]) -> dict[str, Digest]:
    """The digest of every part, all of them together."""
    found = digest_all(
        {name: part.tensor for name, part in parts.items()},
        {name: part.layout for name, part in parts.items()},
    )
    counts = {name: part.count for name, part in parts.items() if part.count is not None}
    return found | {name: replace(found[name], count=count) for name, count in counts.items()}


def pick(tensor: Tensor, layout: Layout | None, dim: int, index: Tensor, keep: Tensor) -> Part:
    """The entries `index` of the whole along `dim`, as far as this rank holds them.

    index: int64 [n], which entry of the whole stands at each of the n new positions.
    keep: bool [n], the positions that are compared at all.
    """
    start = layout.start if layout is not None else 0
    held = (index >= start) & (index < start + tensor.shape[dim]) & keep
    shape = list(tensor.shape)
    shape[dim] = len(index)
    whole = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    positions = held.nonzero().flatten()
    sources = (index[positions] - start).to(tensor.device)
    # copied as integers: torch cannot index every dtype (float8, unsigned)
    chosen = as_integers(tensor).index_select(dim, sources)
    as_integers(whole).index_copy_(dim, positions.to(tensor.device), chosen)
    entry = tensor[(slice(None),) * dim + (0,)].numel() if tensor.shape[dim] else 0
    return Part(whole, None, count=int(held.sum()) * entry)


def differing_wholes(
    session: Session,
    expected: Mapping[str, Part],
    wanted: Mapping[str, Digest],
    actual: Mapping[str, Part],
    outputs: Mapping[str, Digest],
    group: Any,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Expected and actual wholes of the tensors whose digests do not add up to the same.

    All ranks take the same way through this function, since all decide from the same digests. A
    pair is returned on the lowest rank of each subgroup only: one explanation is enough.
    """
    world = session.stage.world
    if world == 1:
        names = [name for name in wanted if name in outputs and outputs[name] != wanted[name]]
        return {name: (expected[name].tensor, actual[name].tensor) for name in names}
    mine = [session.stage.rank] if group is None else dist.get_process_group_ranks(group)
    told: list[Any] = [None] * world
    dist.all_gather_object(
        told,
        ({n: str(d) for n, d in wanted.items()}, {n: str(d) for n, d in outputs.items()}, mine),
    )
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(set().union(*(set(entry[0]) & set(entry[1]) for entry in told))):
        one = next(p for p in (expected.get(name), actual.get(name)) if p is not None)
        total = _total([entry[0].get(name) for entry in told], one.replicated)
        wrong = any(
            _total([told[rank][1].get(name) for rank in entry[2]], one.replicated) != total
            for entry in told
        )
        if wrong:
            wholes: list[Any] = [None] * world
            dist.all_gather_object(wholes, (_sent(expected.get(name)), _sent(actual.get(name))))
            if session.stage.rank == mine[0]:
                pairs[name] = (
                    _whole([pair[0] for pair in wholes]),
                    _whole([wholes[rank][1] for rank in mine]),
                )
    return pairs


def _sent(part: Part | None) -> Part | None:
    """With its tensor on the CPU: what a peer unpickles must not reach for this rank's GPU."""
    return None if part is None else replace(part, tensor=part.tensor.detach().cpu())


def _total(texts: list[str | None], replicated: bool) -> str | None:
    """The sum of parts, or the common digest of replicas (None when they are not equal)."""
    known = [text for text in texts if text is not None]
    if not known:
        return None
    if replicated:
        return known[0] if len(set(known)) == 1 else None
    return add_up(known)


def add_up(texts: list[str]) -> str | None:
    """The digest of the whole from those of its parts; None when they do not fit together."""
    try:
        total = Digest.parse(texts[0])
        for text in texts[1:]:
            total = total + Digest.parse(text)
    except ValueError:
        return None
    return str(total)


def _whole(parts: list[Part | None]) -> Tensor:
    known = [part for part in parts if part is not None]
    first = known[0]
    if first.replicated or (first.layout is None and first.count is None):
        return first.tensor
    if first.layout is None:
        # zero-filled wholes with disjoint content
        bits = [part.tensor.contiguous().view(torch.uint8) for part in known]
        total = bits[0].clone()
        for other in bits[1:]:
            total |= other
        return total.view(first.tensor.dtype)
    whole = torch.zeros(first.layout.full_shape, dtype=first.tensor.dtype)
    for part in known:
        assert part.layout is not None
        size = part.tensor.shape[part.layout.dim]
        whole.narrow(part.layout.dim, part.layout.start, size).copy_(part.tensor)
    return whole
