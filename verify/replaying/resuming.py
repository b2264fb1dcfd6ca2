"""What is wrong with a resumed run: what of the state it lacks, and what it does otherwise although
its state is right.

Each finding is named from digests alone; of data that differ it is said of which other step of the
whole run they are. It refuses to speak of data where the generators that may have drawn them differ
already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verify.rendering.phrases import number as number_of
from verify.replaying.borders import Border, Value, found_state, places_of, value_at
from verify.replaying.findings import SHOWN, Finding, Kind
from verify.replaying.lost_state import Difference, Narrow, differences, findings_of_state
from verify.tracing.calls import ROOTS
from verify.tracing.definitions import START, Key, Program, Recording, Step
from verify.tracing.findings import label


def findings(
    whole: Mapping[int, Recording],
    resumed: Mapping[int, Recording],
    border: Border,
    narrow: Mapping[int, Narrow],
) -> list[Finding]:
    """What is wrong, of the first rank on which anything is. resumed: numbered as it was recorded.

    narrow: by rank, values of the resumed start that a narrower dtype holds.
    """
    for rank in sorted(set(whole) & set(resumed)):
        one, other = whole[rank], resumed[rank]
        state = differences(one, other, border)
        found = [
            *findings_of_state(rank, whole, state, border, narrow.get(rank, {})),
            *_of_steps(rank, one, other, border, state),
        ]
        if found:
            return found
    return []


def _of_steps(
    rank: int, one: Recording, other: Recording, border: Border, state: list[Difference]
) -> Iterator[Finding]:
    """What the resumed run does otherwise, and would even with the right state."""
    steps = {step.number: step for step in one.steps}
    made = [step for step in other.steps if step.number > START]
    number = border.step + 1
    if made and number in steps:
        drawn = tuple(label(*difference.key) for difference in state if difference.drawn)
        lost = any(difference.key[1] == "rng" and not difference.drawn for difference in state)
        changed = _data(steps[number], made[0])
        if drawn:
            what = (
                "restored, and then drawn from before the first event of the step, otherwise than "
                f"in the whole run; {'data differ, too' if changed else 'data are equal'}"
            )
            yield Finding(Kind.DRAWS, rank, number, drawn, len(drawn), what)
        at = _having(one, changed) if changed else []
        if changed and (at or not (drawn or lost)):
            names = tuple(label(*key) for key in list(changed)[:SHOWN])
            yield Finding(Kind.DATA, rank, number, names, len(changed), _order(at, number))
    if not state:
        yield from _settings(rank, steps, made, border)
    expected = sum(number > border.step for number in steps)
    if other.reason == one.reason == "finished" and len(made) != expected:
        more = len(made) - expected
        what = f"{abs(more)} {'more' if more > 0 else 'fewer'} than the whole run makes from there"
        first = border.step + 1 + min(len(made), expected)
        names = (f"{number_of(len(made), 'step')} from step {border.step + 1} on",)
        yield Finding(Kind.STEPS, rank, first, names, 1, what)


def _data(mine: Step, theirs: Step) -> dict[Key, Value]:
    """What enters the model otherwise than in the whole run, with the values of the resumed one."""
    partners = places_of(theirs.program)
    found = {}
    for index in entering(mine.program):
        key = mine.program.keys[index]
        if key in partners and value_at(mine, index) != value_at(theirs, partners[key]):
            found[key] = value_at(theirs, partners[key])
    return found


def _having(one: Recording, values: Mapping[Key, Value]) -> list[int]:
    """The steps in which all of these events had these values."""
    known: dict[int, dict[Key, int]] = {}
    found = []
    for step in one.steps:
        if id(step.program) not in known:
            known[id(step.program)] = places_of(step.program)
        places = known[id(step.program)]
        if all(key in places and value_at(step, places[key]) == v for key, v in values.items()):
            found.append(step.number)
    return found


def _order(at: list[int], number: int) -> str:
    if not at:
        return "data that the whole run never read: another shuffle, seed or preparation"
    nearest = min(at, key=lambda step: abs(step - number))
    if 0 in at:
        return "the data of step 0: their order started again"
    far = abs(nearest - number)
    batches = f"{far} batch{'es' if far > 1 else ''}"
    if nearest < number:
        return f"the data of step {nearest}: {batches} read again, as by a step counter that is off"
    return f"the data of step {nearest}: {batches} left out, as by a step counter that is off"


def entering(program: Program) -> Iterator[int]:
    """Places of what enters the model first: probes before it, and its inputs."""
    called = False
    for index, one in enumerate(program.definitions):
        if one.kind == "input" and (not called or one.name in ROOTS):
            called = True
            yield index
        elif found_state(one) is None:
            if one.kind != "probe" or called:
                return
            yield index


def _settings(
    rank: int, steps: Mapping[int, Step], made: list[Step], border: Border
) -> Iterator[Finding]:
    """The first step after which settings of the optimizer differ though gradients do not."""
    for step in made:
        number = step.number + border.step + 1
        partner = steps.get(number)
        if partner is None:
            return
        theirs = places_of(step.program)
        found: list[Key] = []
        for index, key in enumerate(partner.program.keys):
            if key not in theirs or value_at(partner, index) == value_at(step, theirs[key]):
                continue
            if key[1] == "optimizer" and key[0].startswith("(group "):
                found.append(key)
            elif key[1] == "grad":
                return
        if found:
            names = tuple(label(*key) for key in found[:SHOWN])
            what = (
                "other than in the whole run, though equal at the start: the scheduler that sets "
                "them was not restored, or counts otherwise"
            )
            yield Finding(Kind.SETTINGS, rank, number, names, len(found), what)
            return
