"""Parts of experts as parameters of their own: views of tensors, or digests at their place.

A fused tensor is read once for all of its parts, and those of one layer stay in memory. Of digests
those count that lie in one part; where one covers several, `Side.parts` says None.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verify.checkpoints.expert_names import Holding, Piece, holding
from verify.checkpoints.parameters import Box, Parameter, Part, Place

if TYPE_CHECKING:
    from torch import Tensor

_KEPT = 3  # fused tensors of a side that stay in memory: those of one layer
Group = tuple[str, str]
"""A layer's name, and what of its experts: Piece.stem and Piece.kind."""


@dataclass(frozen=True)
class Owner:
    """A parameter that holds a piece: its key in the pairing, and the piece's box in it."""

    key: str
    parameter: Parameter
    held: Holding
    box: Box

    @property
    def alone(self) -> bool:
        return not self.held.stacked and len(self.held.pieces) == 1

    @property
    def sizes(self) -> tuple[int, ...]:
        sizes = tuple(stop - start for start, stop in self.box)
        return sizes[1:] if self.held.stacked else sizes

    def label(self, name: str) -> str:
        """Such as experts.gate_up_proj[3,0:48]."""
        if self.alone:
            return name
        words = [str(self.box[0][0])] if self.held.stacked else []
        start, stop = self.box[len(words)]
        if len({piece.role for piece, _ in self.held.pieces}) > 1:
            words.append(f"{start}:{stop}")
        return f"{name}[{','.join(words)}]"


Owners = dict[Piece, Owner]


class Side:
    """One side's parameters that the other lacks, by what they hold of experts."""

    def __init__(self, parameters: Mapping[str, Parameter], other: Mapping[str, Parameter]) -> None:
        self.groups: dict[Group, Owners] = {}
        self.twice: dict[Group, tuple[str, str]] = {}
        self._kept: dict[int, Tensor] = {}
        self._parts: dict[int, dict[Box, list[Part]] | None] = {}
        for key, parameter in parameters.items():
            held = None if key in other else holding(key, parameter.shape)
            for piece, box in held.pieces if held else ():
                assert held is not None
                group = (piece.stem, piece.kind)
                owners = self.groups.setdefault(group, {})
                if piece in owners:
                    self.twice.setdefault(group, (owners[piece].key, key))
                owners[piece] = Owner(key, parameter, held, box)

    def unit(self, owner: Owner) -> Parameter:
        """The piece as a parameter of its own."""
        whole = owner.parameter
        if owner.alone:
            return whole
        label = owner.label(whole.name)
        if whole.load is None:
            parts = self.parts(owner) or {}
            place = Place(owner.box, whole.shape)
            mine = tuple(parts.get(owner.box, ()))
            return Parameter(label, whole.dtype, owner.sizes, None, mine, place=place)
        load = functools.partial(self._cut, whole, owner.box, owner.sizes)
        return Parameter(label, whole.dtype, owner.sizes, load)

    def parts(self, owner: Owner) -> dict[Box, list[Part]] | None:
        """`_parts_by_piece`, once for each parameter."""
        key = id(owner.parameter)
        if key not in self._parts:
            self._parts[key] = _parts_by_piece(owner.parameter, owner.held)
        return self._parts[key]

    def _cut(self, whole: Parameter, box: Box, sizes: tuple[int, ...]) -> Tensor:
        assert whole.load is not None
        tensor = self._kept.pop(id(whole), None)
        if tensor is None:
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            tensor = whole.load()
        self._kept[id(whole)] = tensor
        return tensor[tuple(slice(*edge) for edge in box)].reshape(sizes)


def _parts_by_piece(whole: Parameter, held: Holding) -> dict[Box, list[Part]] | None:
    """The digests of a parameter by the box of the piece in which they lie; None where one covers
    several pieces, or replicas differ. A tensor, and what is one piece only, has none to sort."""
    if whole.load is not None or (not held.stacked and len(held.pieces) == 1):
        return {}
    if whole.problem:
        return None
    found: dict[Box, list[Part]] = {}
    dim = 1 if held.stacked else 0
    (start, stop) = held.pieces[0][1][dim]
    roles = whole.shape[dim] // max(1, stop - start)
    for part in whole.parts:
        if not part.digest.count:
            continue
        row = part.box[dim][0] // (stop - start)
        box = held.pieces[(part.box[0][0] * roles if held.stacked else 0) + row][1]
        if any(
            edge[0] < own[0] or edge[1] > own[1] for edge, own in zip(part.box, box, strict=True)
        ):
            return None
        found.setdefault(box, []).append(part)
    return found


def put_together(shape: tuple[int, ...], units: Sequence[tuple[Box, Parameter]]) -> Tensor:
    import torch

    whole: Tensor | None = None
    for box, unit in units:
        assert unit.load is not None
        piece = unit.load().detach()
        if whole is None:
            whole = torch.empty(shape, dtype=piece.dtype)
        whole[tuple(slice(*edge) for edge in box)] = piece.reshape([end - at for at, end in box])
    assert whole is not None
    return whole
