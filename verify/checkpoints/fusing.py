"""Experts that one side stores stacked or fused and the other one by one, as pairs of one part.

Each part of each expert becomes a parameter of its own on both sides: a view of the tensor that
holds it, or those digests of a process that lie in it, at their place. Names and sizes decide. It
refuses to guess: what does not fit, or has digests only on both sides, stays as it was, and a hint
says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from verify.checkpoints.expert_names import Piece
from verify.checkpoints.expert_parts import Group, Owner, Owners, Side, put_together
from verify.checkpoints.matching import natural
from verify.checkpoints.parameters import Parameter


@dataclass(frozen=True)
class Fused:
    """Parameters by B's names, with parts in place of those that hold several.

    units: of which part a name is. covered: names that a hint already speaks of.
    """

    left: Mapping[str, Parameter]
    right: Mapping[str, Parameter]
    units: Mapping[str, Piece] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    covered: frozenset[str] = frozenset()


def fused(
    left: Mapping[str, Parameter],
    right: Mapping[str, Parameter],
    *,
    take: bool = True,
    ignored: Callable[[str], bool] = lambda name: False,
) -> Fused:
    """Both sides by parts of experts where they store them differently. left, right: by B's names.

    take: False only says what could be compared so. ignored: whether a part of this name, as the
    side that stores experts one by one calls it, is left out.
    """
    a, b = Side(left, right), Side(right, left)
    made = _Made(dict(left), dict(right))
    for group in sorted(set(a.groups) & set(b.groups), key=lambda one: natural(".".join(one))):
        one, two = a.groups[group], b.groups[group]
        shared = set(one) & set(two)
        used = {id(side[piece].parameter) for side in (one, two) for piece in shared}
        one, two = (
            {piece: owner for piece, owner in side.items() if id(owner.parameter) in used}
            for side in (one, two)
        )
        if all(owner.alone for side in (one, two) for owner in side.values()):
            continue  # other names, not other tensors
        reason = _refusal(a, b, group, one, two, shared, take)
        if reason:
            made.refuse(one, two, reason)
        else:
            made.add(a, b, one, two, ignored)
    rule = _word_rule(set(a.groups) - set(b.groups), set(b.groups) - set(a.groups))
    return made.done([rule] if rule else [])


class _Made:
    """What comes out, group by group."""

    def __init__(self, left: dict[str, Parameter], right: dict[str, Parameter]) -> None:
        self.left, self.right = left, right
        self.units: dict[str, Piece] = {}
        self.unsettled: list[str] = []
        self._counts: dict[str, tuple[set[str], set[str], str]] = {}
        self._refused: dict[str, str] = {}
        self._covered: set[str] = set()
        self._several: list[str] = []

    def refuse(self, one: Owners, two: Owners, reason: str) -> None:
        pair = min(set(one) & set(two), key=_order)
        names = one[pair].parameter.name, two[pair].parameter.name
        forms = _forms(one, two)
        self._refused.setdefault(
            reason, f"A holds experts {forms[0]} ({names[0]}), B {forms[1]} ({names[1]}): {reason}"
        )
        self._covered |= {owner.key for side in (one, two) for owner in side.values()}

    def add(
        self, a: Side, b: Side, one: Owners, two: Owners, ignored: Callable[[str], bool]
    ) -> None:
        for owner in one.values():
            self.left.pop(owner.key, None)
        for owner in two.values():
            self.right.pop(owner.key, None)
        names = _single_names([*one.items(), *two.items()])
        pieces = [
            piece
            for piece in sorted({*one, *two}, key=_order)
            if not ignored(_single(names, piece))
        ]
        done: set[Piece] = set()
        for own, other, sides in ((one, two, (a, b)), (two, one, (b, a))):
            for owner in {id(o.parameter): o for o in own.values()}.values():
                if sides[0].parts(owner) is None:
                    done |= self._together(owner, other, sides[1], first=sides[0] is a)
        for piece in pieces:
            mine, theirs = one.get(piece), two.get(piece)
            if piece in done:
                continue
            key = _key(mine, theirs, _single(names, piece))
            self.units[key] = piece
            if mine:
                self.left[key] = a.unit(mine)
            if theirs:
                self.right[key] = b.unit(theirs)
        self._count(one, two)

    def _together(self, owner: Owner, other: Owners, side: Side, *, first: bool) -> set[Piece]:
        """Digests of several parts at once become a pair with those parts put together. Returns
        the pieces that need no pair of their own: all, or if one does not fit, those that do."""
        whole = owner.parameter
        there = [piece for piece, _ in owner.held.pieces]
        fits = [
            piece
            for piece, box in owner.held.pieces
            if piece in other
            and other[piece].parameter.dtype == whole.dtype
            and other[piece].sizes == replace(owner, box=box).sizes
        ]
        if not whole.problem:
            self._several.append(whole.name)
        if len(fits) < len(there):
            self.unsettled.append(
                f"{whole.name} has digests of several experts together, and not all of them are "
                f"to be compared: {len(fits)} parts are open"
            )
            return set(fits)
        units = [(box, side.unit(other[piece])) for piece, box in owner.held.pieces]
        name = f"{units[0][1].name} and {len(units) - 1} more"
        load = functools.partial(put_together, whole.shape, units)
        made = Parameter(name, whole.dtype, whole.shape, load)
        self.left[owner.key] = whole if first else made
        self.right[owner.key] = made if first else whole
        return set(there)

    def _count(self, one: Owners, two: Owners) -> None:
        forms = _forms(one, two)
        pair = min(set(one) & set(two), key=_order)
        labels = [side[pair].label(side[pair].parameter.name) for side in (one, two)]
        text = f"experts are {forms[0]} in A and {forms[1]} in B"
        seen = self._counts.setdefault(text, (set(), set(), " = ".join(labels)))
        seen[0].update(owner.key for owner in one.values())
        seen[1].update(owner.key for owner in two.values())

    def done(self, rules: list[str]) -> Fused:
        notes = [
            f"{text}: {len(mine)} parameter{'s' * (len(mine) > 1)} of A and {len(theirs)} of B are "
            f"compared by expert and part, such as {such}"
            for text, (mine, theirs, such) in self._counts.items()
        ]
        if self._several:
            notes.append(
                f"digests of several experts together, such as {self._several[0]}: which of them "
                "differs is not known; save_weights_digests of this version takes them apart"
            )
        hints = (*rules, *self._refused.values())
        return Fused(
            self.left,
            self.right,
            self.units,
            tuple(notes),
            tuple(self.unsettled),
            hints,
            frozenset(self._covered),
        )


def _refusal(
    a: Side, b: Side, group: Group, one: Owners, two: Owners, shared: set[Piece], take: bool
) -> str:
    for side, word in ((a, "A"), (b, "B")):
        if group in side.twice:
            return f"{' and '.join(side.twice[group])} are one part in {word}: leave one out"
    if not any(one[piece].sizes == two[piece].sizes for piece in shared):
        piece = min(shared, key=_order)
        return (
            f"not compared, since an expert's {piece.role} would be {list(one[piece].sizes)} in A "
            f"and is {list(two[piece].sizes)} in B"
        )
    if all(any(o.parameter.load is None for o in side.values()) for side in (one, two)):
        return (
            "not compared, since digests of one place do not say what they would be at another: "
            "give the tensors of one side, or digests of both in one form"
        )
    return "" if take else "compared by name only; without --no-fuse, by expert and part"


def _key(mine: Owner | None, theirs: Owner | None, single: str) -> str:
    """B's name for a piece; where B lacks it, what B would call it, or A's."""
    if theirs is not None:
        return theirs.label(theirs.key)
    assert mine is not None
    return single or mine.label(mine.key)


def _single_names(owners: Iterable[tuple[Piece, Owner]]) -> dict[str, tuple[str, str]]:
    """By role, what stands before and after the number in the name of one expert's parameter."""
    found = {}
    for piece, owner in owners:
        if owner.alone:
            head, _, rest = owner.key.rpartition(f"experts.{piece.expert}.")
            found[piece.role] = f"{head}experts.", f".{rest}"
    return found


def _single(names: Mapping[str, tuple[str, str]], piece: Piece) -> str:
    """What the side that stores experts one by one calls this part, or ""."""
    if piece.role not in names:
        return ""
    head, tail = names[piece.role]
    return f"{head}{piece.expert}{tail}"


def _forms(one: Owners, two: Owners) -> tuple[str, str]:
    apart = [all(owner.alone for owner in side.values()) for side in (one, two)]
    words = ["one by one" if yes else "fused" for yes in apart]
    return words[0], "fused otherwise" if words == ["fused", "fused"] else words[1]


def _word_rule(alone_a: set[Group], alone_b: set[Group]) -> str:
    """The rename by one word that gives all layers of A with experts the names of B's, or ""."""
    stems = [sorted({stem for stem, _ in side}, key=natural) for side in (alone_a, alone_b)]
    if not stems[0] or len(stems[0]) != len(stems[1]):
        return ""
    found = set()
    for a, b in zip(*stems, strict=True):
        words = a.split("."), b.split(".")
        other = [pair for pair in zip(*words, strict=False) if pair[0] != pair[1]]
        if len(words[0]) != len(words[1]) or len(other) != 1:
            return ""
        found.add(other[0])
    if len(found) != 1:
        return ""
    old, new = found.pop()
    if f".{old}." not in stems[0][0]:
        return ""
    return f"layers of experts have another word in their names: --rename '*.{old}.*=*.{new}.*'"


def _order(piece: Piece) -> tuple[object, ...]:
    return (
        piece.stem,
        piece.kind,
        piece.expert,
        ("gate", "up", "down").index(piece.role) if piece.role in ("gate", "up", "down") else 3,
        piece.role,
    )
