"""Which lane of a picture an event belongs to: a phase of the step, and a module or several.

A step runs forward, backward, and then its state is read, so a module has a lane in each phase.
Lanes stand in the order in which their last event came, a module below its parts: so what is above
the one at fault ended before it. Real models have more modules than a picture has room for: they
are folded into what holds them, to the depth that fits, and each kind of state into one lane. Along
the way to the module at fault nothing is folded, so that what it is made of and what stands next to
it can be told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from verify.tracing.calls import ROOTS, is_op
from verify.tracing.definitions import Definition, Program

LIMIT = 64  # lanes of one picture
PHASES = ("forward", "backward", "gradients", "parameters", "buffers", "optimizer", "generators")
COMPUTED = ("forward", "backward")
REST = "..."  # the name of a lane that holds what is far from the focus
_OF_KIND = {
    "input": "forward",
    "output": "forward",
    "grad_output": "backward",
    "grad_input": "backward",
    "grad": "gradients",
    "parameter": "parameters",
    "buffer": "buffers",
    "optimizer": "optimizer",
    "rng": "generators",
}
_BACKWARD_OP = "(backward "
Spot = tuple[str, tuple[str, ...]]
"""A phase, and the parts of a module's name."""


@dataclass(frozen=True)
class Lane:
    """phase: one of PHASES. name: what its modules have in common, "" for the model as a whole.
    modules: how many of them are folded into it."""

    phase: str
    name: str
    modules: int


@dataclass(frozen=True)
class Lanes:
    """The lanes of a picture, in order. of: for each spot, which. folded: how many modules share a
    lane with others; 0 says that every module has its own."""

    shown: tuple[Lane, ...]
    of: Mapping[Spot, int]
    folded: int


def spot(one: Definition) -> Spot:
    """Where an entry belongs."""
    if is_op(one):
        owner = one.name.rpartition("/")[0]
        if owner.startswith(_BACKWARD_OP):
            return "backward", (owner,)
        return "forward", _parts(owner)
    if one.kind == "probe":
        gradient = one.path == "grad" or one.path.endswith(".grad")
        return "backward" if gradient else "forward", _parts(one.name)
    phase = _OF_KIND[one.kind]
    if phase in COMPUTED:
        return phase, _parts(one.name)
    if phase == "generators":
        return phase, (one.name,)
    return phase, _parts(one.name)[:-1]  # a parameter belongs to the module that holds it


def lanes(programs: Iterable[Program], focus: Spot | None, limit: int = LIMIT) -> Lanes:
    """The lanes of these programs, in the order of the first. focus: what is not folded away."""
    spots: dict[Spot, None] = {}
    for program in programs:
        spots.update(dict.fromkeys(_by_end(map(spot, program.definitions))))
    by_phase = {phase: [one for one in spots if one[0] == phase] for phase in PHASES}
    folded, order = _fitting(by_phase, focus, limit)
    kept, rest = _cut(order, None if focus is None else folded.get(focus), limit)
    shown = [*kept, *((phase, (REST,)) for phase in rest)]
    places = {one: index for index, one in enumerate(shown)}
    of = {
        one: places[lane if lane in places else (one[0], (REST,))] for one, lane in folded.items()
    }
    counts = Counter(of.values())
    made = [
        Lane(phase, ".".join(parts), counts[index]) for index, (phase, parts) in enumerate(shown)
    ]
    return Lanes(tuple(made), of, sum(one.modules for one in made if one.modules > 1))


def _fitting(
    by_phase: Mapping[str, Sequence[Spot]], focus: Spot | None, limit: int
) -> tuple[dict[Spot, Spot], list[Spot]]:
    """Each spot's lane, and all lanes in order: the least folded that fits, or the most folded."""
    depth = max((len(one[1]) for spots in by_phase.values() for one in spots), default=0)
    while True:
        for everywhere in (True, False):  # whether the other pass is unfolded around the focus too
            folded = _folded(by_phase, focus, depth, everywhere)
            order = _by_end(folded[one] for phase in PHASES for one in by_phase[phase])
            if len(order) <= limit or (depth == 0 and not everywhere):
                return folded, order
        depth -= 1


def _by_end(ones: Iterable[Spot]) -> list[Spot]:
    """Each once, in the order of its last place."""
    return list(dict.fromkeys(reversed(list(ones))))[::-1]


def _folded(
    by_phase: Mapping[str, Sequence[Spot]], focus: Spot | None, depth: int, everywhere: bool
) -> dict[Spot, Spot]:
    """Each spot's lane: the module that holds it at `depth`, deeper beside the focus."""
    found: dict[Spot, Spot] = {}
    for phase, spots in by_phase.items():
        computed = phase in COMPUTED
        close = focus is not None and (phase == focus[0] or (computed and everywhere))
        near = focus[1] if focus is not None and close else None
        deep = depth if computed or phase == "generators" else 0
        for one in spots:
            found[one] = (phase, _prefix(one[1], deep, near))
    return found


def _prefix(parts: tuple[str, ...], depth: int, near: tuple[str, ...] | None) -> tuple[str, ...]:
    end = min(depth, len(parts))
    while near is not None and end < len(parts) and parts[:end] == near[:end]:
        end += 1
    return parts[:end]


def _cut(order: list[Spot], focus: Spot | None, limit: int) -> tuple[list[Spot], list[str]]:
    """What of too many lanes is kept: those around the focus, and of phases that have one only; and
    the phases of the others, each of which becomes one lane more."""
    if len(order) <= limit:
        return order, []
    phases = Counter(phase for phase, _ in order)
    many = [one for one in order if phases[one[0]] > 1]
    room = max(limit - len(PHASES), 1)
    middle = many.index(focus) if focus in many else 0
    start = min(max(middle - room // 2, 0), max(len(many) - room, 0))
    gone = {*many[:start], *many[start + room :]}
    return [one for one in order if one not in gone], [
        phase for phase in PHASES if any(one[0] == phase for one in gone)
    ]


def _parts(name: str) -> tuple[str, ...]:
    return () if name in ROOTS else tuple(name.split("."))
