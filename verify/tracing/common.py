"""What two recordings can both have, where one of them left out steps by choice.

A run that was recorded every 10th step is compared with one that was recorded in full as if both
had been recorded every 10th step. So nothing counts as missing that nobody meant to record; what a
recording should have and lacks still does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from verify.tracing.choices import STATE, Choice, has_border, in_full, in_words
from verify.tracing.definitions import LANES_BYTES, START, Program, Recording, Step

Run = Mapping[int, Recording]


def common_runs(a: Run, b: Run) -> tuple[Run, Run]:
    """Both runs without what the other one left out by choice."""
    return _reduced_run(a, b), _reduced_run(b, a)


def common(a: Recording, b: Recording) -> tuple[Recording, Recording]:
    """Both recordings without what the other one left out by choice."""
    return _reduced(a, b), _reduced(b, a)


def left_out(a: Run, b: Run, full: int) -> Iterator[str]:
    """Notes on what the runs left out by choice. full: how many steps were compared in full."""
    choices = [_choice(run) for run in (a, b)]
    if choices == [None, None]:
        return
    said = in_words(choices[0])
    if choices[0] != choices[1]:
        said = f"{said} in A, {in_words(choices[1])} in B"
    steps = "1 step was" if full == 1 else f"{full:,} steps were"
    yield (
        f"recorded by choice: {said}; {steps} compared in full, the others by the state behind "
        "them, where it was recorded"
    )


def by_choice(run: Run) -> bool:
    """Whether steps were left out of a run."""
    return any(one.header.steps is not None for one in run.values())


def choices_differ(run: Run) -> bool:
    """Whether the ranks of a run recorded other steps: then no sum over them can be trusted."""
    return len({one.header.steps for one in run.values()}) > 1


def _choice(run: Run) -> Choice:
    """Of a run's first rank: a script gives all ranks the same one."""
    return run[min(run)].header.steps


def _reduced_run(run: Run, other: Run) -> Run:
    first = other[min(other)]
    return {rank: _reduced(one, other.get(rank, first)) for rank, one in run.items()}


def _reduced(one: Recording, other: Recording) -> Recording:
    choices = one.header.steps, other.header.steps
    if choices[0] == choices[1]:  # nothing is left out that the other has
        return one
    others = {step.number: step for step in other.steps}
    end = other.steps[-1].number if other.steps else START
    programs: dict[tuple[int, int, bool], tuple[Program, tuple[int, ...]]] = {}
    steps = []
    for step in one.steps:
        partner = others.get(step.number)
        if partner is None and step.number < end and not has_border(choices[1], step.number):
            continue
        full = [in_full(choice, step.number) for choice in choices]
        if not all(full):
            key = (id(step.program), id(partner and partner.program), any(full))
            if key not in programs:
                programs[key] = _border_of(step, partner, any(full))
            step = _only(step, *programs[key])
        steps.append(step)
    return replace(one, steps=tuple(steps))


def _border_of(
    step: Step, partner: Step | None, one_in_full: bool
) -> tuple[Program, tuple[int, ...]]:
    """The program of a step's state alone, and the places that its entries had.

    State of an optimizer is compared where both have it: a step in full has that of those that
    stepped in it, a border behind steps that were left out that of all which stepped in them.
    Gradients only between two such borders: a step in full has them as its optimizer found them.
    """
    known = None if partner is None else set(partner.program.keys)
    kinds = STATE if one_in_full else (*STATE, "grad")
    keys = step.program.keys
    places = tuple(
        at
        for at, one in enumerate(step.program.definitions)
        if one.kind in kinds
        and (known is None or one.kind not in ("optimizer", "grad") or keys[at] in known)
    )
    if len(places) == len(keys):
        return step.program, places
    return Program(tuple(step.program.definitions[at] for at in places)), places


def _only(step: Step, program: Program, places: tuple[int, ...]) -> Step:
    if program is step.program:
        return step
    lanes = b"".join(step.lanes[LANES_BYTES * at : LANES_BYTES * (at + 1)] for at in places)
    return replace(step, program=program, lanes=lanes)
