"""Whether random-number generators were drawn from: one that nothing draws from explains nothing.

A program that seeds torch rarely seeds Python's generator and numpy's as well, so their states
differ between any two runs. That matters once something draws from them, which moves their state:
from one border to the next, or never in a whole recording. A step that was cut ends at no border:
whether it drew is not known. A generator that was drawn from and put back where it was cannot be
told from one that was not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verify.tracing.definitions import LANES_BYTES, Program, Recording, Step

Place = tuple[str, str, str]


class Generators:
    """The generators' states in one recording, step by step."""

    def __init__(self, recording: Recording) -> None:
        self._places: dict[int, tuple[tuple[int, Place], ...]] = {}
        self._now: dict[Place, bytes] = {}
        seen: dict[Place, set[bytes]] = {}
        count: dict[Place, int] = {}
        for step in recording.steps:
            for place, state in self._states(step):
                seen.setdefault(place, set()).add(state)
                count[place] = count.get(place, 0) + 1
        # A run that was cut off before a second border does not tell, so it is no evidence.
        least = 2 if recording.finished else 1
        self._still = {
            place for place, states in seen.items() if len(states) == 1 and count[place] >= least
        }

    def still(self, place: Place) -> bool:
        """Whether a generator had one state all along, seen more than once if the run ended."""
        return place in self._still

    def moved(self, step: Step) -> Mapping[Place, bool]:
        """Of each generator that a step recorded, whether it moved in it. Call it in order."""
        found = {}
        for place, state in self._states(step):
            found[place] = self._now.get(place) != state
            self._now[place] = state
        return found

    def _states(self, step: Step) -> Iterator[tuple[Place, bytes]]:
        key = id(step.program)
        if key not in self._places:
            self._places[key] = tuple(_places(step.program))
        for index, place in self._places[key]:
            yield place, step.lanes[index * LANES_BYTES : (index + 1) * LANES_BYTES]


def _places(program: Program) -> Iterator[tuple[int, Place]]:
    for index, one in enumerate(program.definitions):
        if one.kind == "rng":
            yield index, (one.name, one.kind, one.path)
