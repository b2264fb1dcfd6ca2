"""Where two recorded runs part: the earliest difference, who is to blame, and who inherits.

Runs on the same number of ranks are compared rank by rank; ranks go by step, then by the place in
the order of execution. Runs on other numbers of ranks are compared by sums over the ranks, of what
has a place in a whole or is held by all: parameters, their gradients, buffers, optimizer state.

It refuses to call a comparison VERIFIED of which something is missing: the end of a run that was
killed or that an exception ended, a rank, steps or events that only one side has. Equal digests
stand for equal bits as `verify.digests` states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from verify.errors import InputFileError
from verify.reasons import Verdict
from verify.rendering.escaping import clipped
from verify.tracing.alignment import align
from verify.tracing.common import by_choice, choices_differ, common_runs, left_out
from verify.tracing.definitions import START, Key, Recording
from verify.tracing.files import read_folder
from verify.tracing.findings import SHOWN, Culprit, Left, TraceDiff, label
from verify.tracing.outcomes import Outcome
from verify.tracing.rank_diffs import Range, compare_rank, within
from verify.tracing.shards import merged, placed, shapes

Run = Mapping[int, Recording]
_SHOWN_NOTES = 10
_OF_ONE_RUN = ".TORCHELASTIC_"  # variables that say which run it is, not how it computes
_SHOWN_STEPS = 6


def diff(a: Path, b: Path, steps: Range = (None, None)) -> TraceDiff:
    """Compares two recordings: folders, or files of one rank.

    steps: from, up to but not including; None is open. The start is step -1. Raises InputFileError.
    """
    runs: tuple[Run, Run] = (read_folder(a), read_folder(b))
    worlds = tuple(_world(path, run) for path, run in zip((a, b), runs, strict=True))
    schemes = [sorted({one.header.scheme for one in run.values()}) for run in runs]
    if schemes[0] != schemes[1] or len(schemes[0]) > 1:
        told = " and ".join(", ".join(names) for names in schemes)
        return _told(
            a, b, steps, (worlds[0], worlds[1]), [], [], [f"digests differ in kind: {told}"], []
        )
    reasons, notes = _about(runs, steps)
    whole, runs = runs, common_runs(*runs)
    reasons += _lone_steps(runs, steps)
    outcomes: list[Outcome] = []
    left: list[Left] = []
    if worlds[0] == worlds[1]:
        pairs, missing = _ranks(a, b, runs)
        reasons += missing
        files = {
            id(cut): one
            for run, cuts in zip(whole, runs, strict=True)
            for cut, one in ((cuts[rank], run[rank]) for rank in run)
        }
        outcomes = [
            compare_rank(rank, one, other, steps, {}, (files[id(one)], files[id(other)]))
            for rank, one, other in pairs
        ]
        elsewhere = {key for one in outcomes for key in one.elsewhere}
        if elsewhere:
            reasons += _mixed(runs)
            outcomes.append(_sums(runs, steps, lambda _, key: key in elsewhere, left))
    else:
        reasons += [*_absent(a, runs[0]), *_absent(b, runs[1]), *_mixed(runs)]
        outcomes.append(_sums(runs, steps, placed, left))
        left += _unplaced(runs, steps, (worlds[0], worlds[1]))
    if len({one.header.level for run in runs for one in run.values()}) > 1:
        left += _ops(outcomes)
    left += [*_still(outcomes, runs), *_cut(outcomes), *_by_choice(outcomes)]
    full = max((one.steps for one in outcomes), default=0)
    notes = [*left_out(*runs, full), *notes]
    if not full and any(map(by_choice, runs)):
        reasons.append("no step was compared in full: no chosen one is in both runs, or in --steps")
    return _told(a, b, steps, (worlds[0], worlds[1]), outcomes, left, reasons, notes)


def _told(
    a: Path,
    b: Path,
    steps: Range,
    worlds: tuple[int, int],
    outcomes: list[Outcome],
    left: list[Left],
    reasons: list[str],
    notes: list[str],
) -> TraceDiff:
    compared = sum(one.compared for one in outcomes)
    differing = sum(one.differing for one in outcomes)
    culprits = sorted((one for each in outcomes for one in each.culprits), key=_order)
    blamed = [_collective(one, culprits[0]) for one in culprits]
    count = sum(one.culprits_count for one in outcomes)
    unmatched = [one for each in outcomes for one in each.told_unmatched()]
    forms = [one for each in outcomes for one in each.told_forms()]
    inherits = sorted((one for each in outcomes for one in each.inherits), key=_place_order)
    if unmatched:
        events = sum(one.steps for one in unmatched)
        reasons = [*reasons, f"{events} events have no partner: only one run has them"]
    reasons = [*reasons, *(f"not compared: {one.reason}" for one in left if one.open)]
    if not compared and not differing:
        reasons = [*reasons, "nothing was compared"]
    verdict = Verdict.UNVERIFIED if reasons else Verdict.VERIFIED
    return TraceDiff(
        str(a),
        str(b),
        Verdict.MISMATCH if differing else verdict,
        tuple(reasons),
        steps,
        worlds,
        compared,
        differing,
        blamed[0] if blamed else None,
        tuple(blamed[1 : 1 + SHOWN]),
        max(0, count - 1),
        tuple(inherits[:SHOWN]),
        sum(one.inherits_count for one in outcomes),
        tuple(one.told() for one in outcomes),
        tuple(forms[:SHOWN]),
        len(forms),
        tuple(unmatched[:SHOWN]),
        len(unmatched),
        tuple(left),
        tuple(notes),
    )


def _order(one: Culprit) -> tuple[int, int, int]:
    return _place_order(one.place)


def _place_order(place: Any) -> tuple[int, int, int]:
    return (place.step, place.index, -1 if place.rank is None else place.rank)


def _collective(one: Culprit, first: Culprit) -> Culprit:
    if one.place.rank == first.place.rank:
        return one
    return replace(one, collective=True)


def _sums(runs: tuple[Run, Run], steps: Range, wanted: Any, left: list[Left]) -> Outcome:
    """Compares sums over the ranks; adds to `left` what could not be added up."""
    known = [shapes(run.values()) for run in runs]
    one = merged(runs[0], wanted, known[1], steps)
    two = merged(runs[1], wanted, known[0], steps)
    conflicts = dict(one.conflicts)
    if two.conflicts:  # told by the places of A
        programs = {step.number: step.program for step in one.recording.steps}
        for step in two.recording.steps:
            if step.number in programs:
                for i, j in align(programs[step.number], step.program).pairs:
                    if (step.number, j) in two.conflicts:
                        conflicts[step.number, i] = two.conflicts[step.number, j]
    found = compare_rank(None, one.recording, two.recording, steps, conflicts)
    for side in (one, two):
        for reason, counts in side.left.items():
            examples = tuple(label(*key) for key in list(counts)[:3])
            left.append(Left(reason, True, sum(counts.values()), examples))
            for key in counts:  # the other side's whole has no partner then, which this tells
                for name in ("a", "b"):
                    found.unmatched.pop((name, *key), None)
    return found


def _unplaced(runs: tuple[Run, Run], steps: Range, worlds: tuple[int, int]) -> Iterator[Left]:
    """What only a run on the same number of ranks could be compared with."""
    events, examples = 0, dict[str, None]()
    for run in runs:
        for recording in run.values():
            for step in recording.steps:
                if not within(step.number, steps):
                    continue
                for key, one in zip(step.program.keys, step.program.definitions, strict=True):
                    if not placed(one, key):
                        events += 1
                        if len(examples) < 3:
                            examples[label(*key)] = None
    if events:
        reason = f"{worlds[0]} and {worlds[1]} ranks: what a single rank computed has no partner"
        yield Left(reason, False, events, tuple(examples))


def _still(outcomes: list[Outcome], runs: tuple[Run, Run]) -> Iterator[Left]:
    """Generators that differ and explain nothing, since neither run drew from them."""
    keys = list(dict.fromkeys(key for one in outcomes for key in one.still))
    if keys:
        events = sum(count for one in outcomes for count in one.still.values())
        reason = "they differ, but no step of either run drew from them"
        unfinished = not all(one.finished for run in runs for one in run.values())
        if unfinished or any(map(by_choice, runs)):
            reason += ", as far as was recorded"
        yield Left(reason, False, events, tuple(label(*key) for key in keys[:3]))


def _cut(outcomes: list[Outcome]) -> Iterator[Left]:
    """What came behind the place where an exception ended the other run's step."""
    keys = list(dict.fromkeys(key for one in outcomes for key in one.cut))
    if keys:
        events = sum(count for one in outcomes for count in one.cut.values())
        reason = "an exception ended the other run's step before"
        yield Left(reason, False, events, tuple(label(*key) for key in keys[:3]))


def _mixed(runs: tuple[Run, Run]) -> Iterator[str]:
    """Reasons: ranks whose parts of a step cannot be added up."""
    for side, run in zip("AB", runs, strict=True):
        if choices_differ(run):
            yield (
                f"the ranks of {side} recorded other steps in full, so sums over them lack parts: "
                "give all ranks the same every= and steps="
            )


def _by_choice(outcomes: list[Outcome]) -> Iterator[Left]:
    """What choices of steps leave without a partner, or with one of another moment."""
    for field, is_open, reason in (
        (
            "crossing",
            False,
            "forward and backward lie in two steps, and not both runs recorded both in full",
        ),
        (
            "moments",
            True,
            "they differ, but one run has the state behind the last step, and the other one that "
            "at the end of the recording, behind whatever came after: give both the same choice",
        ),
    ):
        counts: dict[Key, int] = {}
        for one in outcomes:
            for key, count in getattr(one, field).items():
                counts[key] = counts.get(key, 0) + count
        if counts:
            examples = tuple(label(*key) for key in list(counts)[:3])
            yield Left(reason, is_open, sum(counts.values()), examples)


def _ops(outcomes: list[Outcome]) -> Iterator[Left]:
    """Takes ops out of what has no partner, where only one run was recorded at op level."""
    events, examples = 0, list[str]()
    for outcome in outcomes:
        for key in [key for key in outcome.unmatched if "/" in str(key[1])]:
            events += outcome.unmatched.pop(key)[1]
            examples.append(str(key[1]))
    if events:
        yield Left("ops, which one run recorded only", False, events, tuple(examples[:3]))


def _ranks(
    a: Path, b: Path, runs: tuple[Run, Run]
) -> tuple[list[tuple[int, Recording, Recording]], list[str]]:
    """The ranks to compare, and which are missing. A file stands for its rank alone, and two files
    are compared whatever their ranks are."""
    one, two = runs
    if a.is_file() and b.is_file():
        (rank, recording), (_, other) = next(iter(one.items())), next(iter(two.items()))
        return [(rank, recording, other)], []
    missing = []
    for path, run, other_path, wanted in ((a, one, b, set(two)), (b, two, a, set(one))):
        if other_path.is_file():
            missing += [f"{path} has no rank {rank}" for rank in sorted(wanted - set(run))]
        elif not path.is_file():
            missing += _absent(path, run)
    return [(rank, one[rank], two[rank]) for rank in sorted(set(one) & set(two))], missing


def _absent(path: Path, run: Run) -> list[str]:
    world = next(iter(run.values())).header.world
    absent = sorted(set(range(world)) - set(run))
    if not absent:
        return []
    return [f"{path} lacks {len(absent)} of {world} ranks: {_listed(absent)}"]


def _world(path: Path, run: Run) -> int:
    worlds = sorted({one.header.world for one in run.values()})
    if len(worlds) > 1:
        told = " and ".join(map(str, worlds))
        raise InputFileError(
            f"{path}: its files are of several runs, on {told} ranks; give each run its own folder"
        )
    return worlds[0]


def _about(runs: tuple[Run, Run], steps: Range) -> tuple[list[str], list[str]]:
    """What is missing, and what else should be known: reasons and notes."""
    reasons, notes = [], []
    for side, run in zip("AB", runs, strict=True):
        for rank, one in sorted(run.items()):
            if not one.complete:
                reasons.append(f"{side}, rank {rank} is incomplete: {one.problem}")
            if one.skipped:
                what, why = next(iter(one.skipped.items()))
                count = len(one.skipped)
                reasons.append(
                    f"{side}, rank {rank}: {count} value{'s have' if count > 1 else ' has'} no "
                    f"digest, such as {what}: {why}"
                )
            at = one.cut_at
            if at is not None and (steps[1] is None or at < steps[1]):
                reasons.append(
                    f"{side}, rank {rank} is incomplete: an exception ended it in step {at}: "
                    f"{one.reason}"
                )
            elif at is not None:
                notes.append(f"{side}, rank {rank} ended early: {one.reason}")
    return reasons, [*notes[:_SHOWN_NOTES], *_environments(runs)]


def _lone_steps(runs: tuple[Run, Run], steps: Range) -> Iterator[str]:
    """Reasons: steps that only one run has."""
    numbers = [
        {step.number for one in run.values() for step in one.steps if within(step.number, steps)}
        for run in runs
    ]
    for side, only in (("A", numbers[0] - numbers[1]), ("B", numbers[1] - numbers[0])):
        if only:
            yield f"only {side} has {_steps(sorted(only))}"


def _environments(runs: tuple[Run, Run]) -> list[str]:
    """Notes on where the environments of the first ranks differ."""
    flat = [dict(_flat(run[min(run)].header.environment)) for run in runs]
    different = [
        f"{name}: {clipped(flat[0].get(name), 60)} in A, {clipped(flat[1].get(name), 60)} in B"
        for name in sorted(flat[0].keys() | flat[1].keys())
        if flat[0].get(name) != flat[1].get(name) and _OF_ONE_RUN not in name
    ]
    more = len(different) - _SHOWN_NOTES
    return different[:_SHOWN_NOTES] + (
        [f"{more} more environment facts differ"] if more > 0 else []
    )


def _flat(value: Any, name: str = "environment") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}")
    else:
        yield name, value


def _steps(numbers: list[int]) -> str:
    start = ["the start"] if numbers[0] == START else []
    rest = numbers[len(start) :]
    if not rest:
        return start[0]
    return " and ".join([*start, f"step{'s' * (len(rest) > 1)} {_listed(rest)}"])


def _listed(numbers: list[int]) -> str:
    more = "" if len(numbers) <= _SHOWN_STEPS else f" ... {numbers[-1]}"
    return ", ".join(map(str, numbers[:_SHOWN_STEPS])) + more
