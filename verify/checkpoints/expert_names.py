"""Which part of which expert a parameter holds, by its name and shape.

The same experts are stored one by one (`experts.3.gate_proj.weight`, `experts.3.w1.weight`),
stacked (`experts.gate_proj` [E, I, H], or mok's `w_gate`), or stacked with gate and up in one
(`experts.gate_up_proj` [E, 2 I, H], vLLM's `w13_weight`): gate first, then up. It refuses to read
more into a name: other names, odd sizes and dense layers are no experts. No torch is needed here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from verify.checkpoints.parameters import Box, box_numel

_ROLES: dict[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate", "up"),
    "w13": ("gate", "up"),
    **dict.fromkeys(("gate_proj", "w_gate", "w1"), ("gate",)),
    **dict.fromkeys(("up_proj", "w_up", "w3"), ("up",)),
    **dict.fromkeys(("down_proj", "w_down", "w2"), ("down",)),
}
_OWN = ("w_gate", "w_up", "w_down")  # of a layer that has no module `experts`
_KIND = r"(?:[._](?P<kind>\w+))?"
_KNOWN = re.compile(rf"(?P<base>{'|'.join(_ROLES)}){_KIND}")
_OTHER = re.compile(r"(?P<base>[^.]+?)(?:\.(?P<kind>weight|bias))?")
_ONE = re.compile(r"(?P<stem>(?:.*\.)?)experts\.(?P<expert>[0-9]{1,9})\.(?P<rest>.+)")
_STACKED = re.compile(r"(?P<stem>(?:.*\.)?)experts\.(?P<rest>[^0-9].*)")
_MOST = 1 << 20  # parts that a parameter is taken for


@dataclass(frozen=True)
class Piece:
    """A part of one expert. stem: the layer's name, without `experts`, with its dot. role: gate,
    up, down, or the name's own word. kind: weight, bias, or what is stored beside them."""

    stem: str
    kind: str
    role: str
    expert: int


@dataclass(frozen=True)
class Holding:
    """What a parameter holds: pieces, each with its box, in the order in which they lie there.

    stacked: whether the first dimension counts experts.
    """

    pieces: tuple[tuple[Piece, Box], ...]
    stacked: bool


def holding(name: str, shape: Sequence[int]) -> Holding | None:
    """What this parameter holds of experts, or None where it is not one of theirs."""
    one = _ONE.fullmatch(name)
    found = one or _STACKED.fullmatch(name)
    stem, rest = (found["stem"], found["rest"]) if found else _own(name)
    match = _KNOWN.fullmatch(rest) or (_OTHER.fullmatch(rest) if found else None)
    if match is None:
        return None
    roles = _ROLES.get(match["base"], (match["base"],))
    kind = (match["kind"] or "weight").removeprefix("weight_")
    inner = tuple(shape) if one else tuple(shape[1:])
    if not inner or inner[0] % len(roles) or (not one and kind == "weight" and len(inner) < 2):
        return None
    rows = inner[0] // len(roles)
    rest_of_box = tuple((0, size) for size in inner[1:])
    experts = [int(one["expert"])] if one else range(shape[0])
    if len(experts) * len(roles) > _MOST:
        return None
    pieces = tuple(
        (
            Piece(stem, kind, role, expert),
            (
                *(() if one else ((expert, expert + 1),)),
                (number * rows, (number + 1) * rows),
                *rest_of_box,
            ),
        )
        for expert in experts
        for number, role in enumerate(roles)
    )
    return Holding(pieces, stacked=one is None)


def cuts(name: str, box: Box, shape: Sequence[int]) -> list[Box]:
    """The boxes into which the borders between pieces cut a box of a stacked parameter."""
    held = holding(name, shape)
    if held is None or not held.stacked or not box_numel(box):
        return [box]
    (first, stop), (low, high) = box[0], box[1]
    rows = len({piece.role for piece, _ in held.pieces})
    size = shape[1] // rows
    edges = [(max(low, at * size), min(high, (at + 1) * size)) for at in range(rows)]
    return [
        ((expert, expert + 1), edge, *box[2:])
        for expert in range(first, stop)
        for edge in edges
        if edge[0] < edge[1]
    ]


def _own(name: str) -> tuple[str, str]:
    """Layer and word of a stacked parameter that lies in its layer itself."""
    layer, dot, word = name.rpartition(".")
    return (layer + dot, word) if word in _OWN else ("", "")
