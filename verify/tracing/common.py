"""What two recordings can both have, where one of them left out steps by choice.

A run that was recorded every 10th step is compared with one that was recorded in full as if both
had been recorded every 10th step. So nothing counts as missing that nobody meant to record; what a
recording should have and lacks still does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from verify.tracing.choices import STATE, Choice, counted, has_border, in_full, in_words
from verify.tracing.definitions import LANES_BYTES, Program, Recording, Step

Run = Mapping[int, Recording]


def common_runs(a: Run, b: Run) -> tuple[Run, Run]:
    """Both runs without what the other one left out by choice."""
    return _reduced_run(a, b), _reduced_run(b, a)


def common(a: Recording, b: Recording) -> tuple[Recording, Recording]:
    """Both recordings without what the other one left out by choice."""
    return _reduced(a, b), _reduced(b, a)


def left_out(a: Run, b: Run) -> Iterator[str]:
    """Notes on what the runs left out by choice."""
    choices = [_choice(run) for run in (a, b)]
    if choices == [None, None]:
        return
    last = max(one.steps[-1].number for run in (a, b) for one in run.values() if one.steps)
    full = counted(choices, last)
    said = in_words(choices[0])
    if choices[0] != choices[1]:
        said = f"{said} in A, {in_words(choices[1])} in B"
    yield (
        f"recorded by choice: {said}; {full} of {last + 1} steps were compared in full, the others "
        "by the state behind them, where it was recorded"
    )


def _choice(run: Run) -> Choice:
    """Of a run's first rank: a script gives all ranks the same one."""
    return run[min(run)].header.steps


def _reduced_run(run: Run, other: Run) -> Run:
    if all(one.header.steps is None for one in other.values()):
        return run
    first = other[min(other)]
    return {rank: _reduced(one, other.get(rank, first)) for rank, one in run.items()}


def _reduced(one: Recording, other: Recording) -> Recording:
    choice = other.header.steps
    if choice is None:
        return one
    there = {step.number for step in other.steps}
    programs: dict[int, tuple[Program, tuple[int, ...]]] = {}
    steps = []
    for step in one.steps:
        if in_full(choice, step.number):
            steps.append(step)
        elif step.number in there or has_border(choice, step.number):
            key = id(step.program)
            if key not in programs:
                programs[key] = _state_of(step.program)
            steps.append(_only(step, *programs[key]))
    return replace(one, steps=tuple(steps))


def _state_of(program: Program) -> tuple[Program, tuple[int, ...]]:
    """The program of the state alone, and the places that its entries had."""
    places = tuple(at for at, one in enumerate(program.definitions) if one.kind in STATE)
    if len(places) == len(program.definitions):
        return program, places
    return Program(tuple(program.definitions[at] for at in places)), places


def _only(step: Step, program: Program, places: tuple[int, ...]) -> Step:
    if program is step.program:
        return step
    lanes = b"".join(step.lanes[LANES_BYTES * at : LANES_BYTES * (at + 1)] for at in places)
    return Step(step.number, program, lanes, step.failed)
