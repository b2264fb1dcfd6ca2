"""What parameters that only one side has, or that differ, probably are: renamed, tied, exchanged,
fused, under a prefix. Hints, never verdicts.

Bits are looked up by digest. Where those have to be taken from tensors, at most a few dozen are, so
that the hint does not cost another reading of both checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from verify.checkpoints.matching import natural, prefix_rule
from verify.checkpoints.parameters import Parameter, equal_digests
from verify.errors import VerifyError

if TYPE_CHECKING:
    from verify.checkpoints.comparing import Finding
    from verify.checkpoints.fusing import Fused

_MOST = 48  # tensors that are digested for hints
_SHOWN = 8
_LOOKED_UP = 4  # parts of experts that are looked up among all of their layer
_EXCHANGED = 16  # of more parameters that differ each is probably another
_FUSED = 512  # parts that may make up one fused parameter (experts)
Parameters = Mapping[str, Parameter]
Groups = dict[tuple[str, ...], list[list[str]]]
Bits = tuple[str, int, tuple[int, ...]]


class _Digests:
    """Bits of parameters, each taken once, and not of more than _MOST tensors."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._known: dict[int, Bits | None] = {}
        self._left = _MOST
        self._progress = progress

    def __call__(self, parameter: Parameter) -> Bits | None:
        key = id(parameter)
        if key not in self._known:
            self._known[key] = self._taken(parameter)
        return self._known[key]

    def _taken(self, parameter: Parameter) -> Bits | None:
        if not parameter.numel or parameter.covered < parameter.numel or parameter.problem:
            return None
        if parameter.load is not None:
            if not self._left:
                return None
            self._left -= 1
            self._progress(f"looking for a parameter with the bits of {parameter.name}")
        try:
            return parameter.dtype, parameter.numel, parameter.digest().lanes
        except VerifyError:  # the comparison says so where it matters
            return None


def hints(
    pairing: Fused,
    findings: Sequence[Finding],
    progress: Callable[[str], None] = lambda message: None,
) -> tuple[str, ...]:
    """Lines for a person, () where nothing is recognised."""
    left, right = pairing.left, pairing.right
    alone_a = [one.name for one in findings if one.kind == "only in A"]
    alone_b = [one.name for one in findings if one.kind == "only in B"]
    bits = [one.name for one in findings if one.kind == "bits"]
    found: list[str] = []
    rule = prefix_rule(alone_a, alone_b)
    if rule:
        found.append(f"names differ by a prefix: --rename '{rule}'")
    else:
        digests = _Digests(progress)
        found += _shown(_moved(left, right, alone_a, alone_b, digests))
        others = [name for name in bits if name not in pairing.units]
        if len(others) <= _EXCHANGED:
            same = functools.partial(_same, digests=digests)
            found += _shown(_exchanged(left, right, others, others, same))
        found += _shown(_exchanged_experts(pairing, bits))
        found += _shown(_tied(left, right, alone_a, "A", digests))
        found += _shown(_tied(right, left, alone_b, "B", digests))
    found += pairing.hints
    alone_a = [name for name in alone_a if name not in pairing.covered]
    alone_b = [name for name in alone_b if name not in pairing.covered]
    found += _shown(_fused(left, right, alone_a, alone_b, "A", "B"))
    found += _shown(_fused(right, left, alone_b, alone_a, "B", "A"))
    return tuple(found)


def _shown(lines: Iterator[str]) -> list[str]:
    some = list(lines)
    more = [f"and {len(some) - _SHOWN} more like it"] if len(some) > _SHOWN else []
    return [*some[:_SHOWN], *more]


def _moved(
    left: Parameters, right: Parameters, alone_a: list[str], alone_b: list[str], digests: _Digests
) -> Iterator[str]:
    """Parameters that only A has with the bits of one that only B has."""
    alike = _by_form(right, alone_b)
    for name in alone_a:
        others = alike.get(left[name].form(), ())
        bits = digests(left[name]) if others else None
        if bits is None:
            continue
        same = [other for other in others if digests(right[other]) == bits]
        if len(same) == 1:
            old = left[name].name
            yield f"{same[0]} in B has the bits of {old} in A: --rename '{old}={same[0]}'"


def _exchanged(
    left: Parameters,
    right: Parameters,
    names: Sequence[str],
    others: Sequence[str],
    same: Callable[[Parameter, Parameter], bool],
) -> Iterator[str]:
    """Parameters of B that hold the bits of another one of A that differs too."""
    alike = _by_form(left, others)
    for name in names:
        for other in alike.get(right[name].form(), ()):
            if other != name and same(left[other], right[name]):
                yield f"{name} in B has the bits of {left[other].name} in A: exchanged?"
                break


def _exchanged_experts(pairing: Fused, bits: Sequence[str]) -> Iterator[str]:
    """The same for some parts of experts, of the first layer where one differs: gate and up
    exchanged, or experts in another order."""
    parts = [name for name in bits if name in pairing.units]
    if not parts:
        return
    stem = pairing.units[parts[0]].stem
    layer = [name for name in parts if pairing.units[name].stem == stem]
    some = layer if len(layer) <= _EXCHANGED else layer[:_LOOKED_UP]
    yield from _exchanged(pairing.left, pairing.right, some, layer, _same_part)


def _tied(
    own: Parameters, other: Parameters, alone: list[str], side: str, digests: _Digests
) -> Iterator[str]:
    """Parameters of one side alone with the bits of one that both have."""
    alike = _by_form(own, [name for name in own if name in other])
    for name in alone:
        twins = alike.get(own[name].form(), ())
        bits = digests(own[name]) if twins else None
        for twin in twins if bits is not None else ():
            if digests(own[twin]) == bits:
                old = own[name].name
                yield (
                    f"{old} has the bits of {own[twin].name} in {side}: tied, and stored once on "
                    f"the other side? --ignore '{old}'"
                )
                break


def _by_form(parameters: Parameters, names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(parameters[name].form(), []).append(name)
    return found


def _same(a: Parameter, b: Parameter, digests: _Digests) -> bool:
    mine = digests(a)
    return mine is not None and mine == digests(b)


def _same_part(a: Parameter, b: Parameter) -> bool:
    """As `_same`, of parts of experts: small, views of tensors in memory, or digests at a place."""
    if any(one.problem or not one.numel or one.covered < one.numel for one in (a, b)):
        return False
    if a.load is None or b.load is None:
        return equal_digests(a, b)
    from verify.checkpoints import tensor_pairs

    return tensor_pairs.equal_bits(a.load(), b.load())


def _fused(
    whole: Parameters, parts: Parameters, alone: list[str], pieces: list[str], one: str, other: str
) -> Iterator[str]:
    """Parameters of one side whose size is that of several neighbours of the other together."""
    groups = _groups(pieces)
    for name in alone:
        shape, dtype = whole[name].shape, whole[name].dtype
        for group in _neighbours(name, groups):
            shapes = [parts[piece].shape for piece in group]
            if any(parts[piece].dtype != dtype for piece in group):
                continue
            rows = all(len(s) == len(shape) and s[1:] == shape[1:] for s in shapes)
            joined = rows and shape and sum(s[0] for s in shapes) == shape[0]
            stacked = shape and all(s == shape[1:] for s in shapes) and len(group) == shape[0]
            if joined or stacked:
                listed = ", ".join(group[:4]) + (" ..." if len(group) > 4 else "")
                yield (
                    f"{name} {whole[name].form()} in {one} may be {len(group)} parameters of "
                    f"{other}, fused: {listed}. Fused parameters are not compared: save them fused "
                    "or apart on both sides"
                )
                break


def _groups(names: Sequence[str]) -> Groups:
    """By the words that names begin with: all names that do, then those with one last word; groups
    of a size that can be fused. Once for all names, since checkpoints have thousands."""
    near: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(names, key=natural):
        words = name.split(".")
        for end in range(len(words) + 1):
            near.setdefault(tuple(words[:end]), []).append(name)
    found = {}
    for stem, some in near.items():
        lasts: dict[str, list[str]] = {}
        for name in some:
            lasts.setdefault(name.rpartition(".")[2], []).append(name)
        groups = [some, *(lasts[last] for last in sorted(lasts))]
        found[stem] = [group for group in groups if 2 <= len(group) <= _FUSED]
    return found


def _neighbours(name: str, groups: Groups) -> Iterator[list[str]]:
    """Groups that share all of `name` but one to three words."""
    words = name.split(".")
    for levels in (1, 2, 3):
        stem = words[: len(words) - levels]
        if len(words) < levels or (not stem and levels > 1):
            return
        yield from groups.get(tuple(stem), ())
