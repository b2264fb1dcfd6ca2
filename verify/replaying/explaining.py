"""`verify trace explain`: both recorded runs once more, with the tensors at the culprit kept.

A comparison of recordings names the event at which two runs part, from digests. Running both again
up to that step, with the tensors of that event and of its inputs kept, gives what digests cannot:
index, bit patterns, distances, where in the tensor, and what such a pattern suggests. A rare
difference may not come again; then nothing is explained, and that is said, with how many tries.

Where the difference came in with steps that were left out of the recordings by choice, both are
recorded again with these steps in full first, which names the event.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verify.comparison import compare
from verify.errors import InputFileError, UnsupportedError
from verify.explanation.telling import explain
from verify.reasons import Verdict
from verify.replaying.orders import BEFORE, Orders, Wanted
from verify.replaying.processes import Script, recorded
from verify.tracing.calls import ROOTS, Call, calls_of, inside
from verify.tracing.causes import Cause
from verify.tracing.definitions import START, Key, Recording, Step
from verify.tracing.divergence import diff
from verify.tracing.files import read_folder
from verify.tracing.findings import Place, TraceDiff, label
from verify.tracing.keeping import kept_tensors
from verify.tracing.sentences import event, step

Progress = Callable[[str], None]
_MOST = 64  # events of the culprit's, or of its inputs, whose tensors are kept
_SAME = "parted at the same place"


@dataclass(frozen=True)
class Chosen:
    """What is kept of two runs. at: events that differed, the culprit's first. given: what those
    were made of, as far as it was recorded."""

    rank: int
    at: tuple[tuple[int, Key], ...]
    given: tuple[tuple[int, Key], ...]

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        return tuple((self.rank, number, *key) for number, key in (*self.at, *self.given))


@dataclass(frozen=True)
class Told:
    """One event's tensors in both runs. difference: as findings carry it, None when they are equal
    or not there. problem: why there is none to compare."""

    step: int
    key: Key
    difference: dict[str, Any] | None
    problem: str = ""


@dataclass(frozen=True)
class Try:
    """Both runs once more. parted: whether the culprit's event differs again. clean: whether
    nothing that it was made of, as far as it could be compared, differs. said: in words."""

    parted: bool
    clean: bool
    said: str
    at: tuple[Told, ...]
    given: tuple[Told, ...]

    @property
    def inputs_equal(self) -> bool | None:
        """Whether all that the culprit was made of is equal; None when that was not compared, or
        not all of it."""
        if not self.clean:
            return False
        known = bool(self.given) and not any(one.problem for one in self.given)
        return True if known else None


@dataclass(frozen=True)
class Explanation:
    """What running again has shown. found: the comparison that named the culprit. tries: all of
    them, the last one explains if any does. first: the comparison of the recordings that were
    given, where steps that those left out had to be recorded first; else None."""

    found: TraceDiff
    verdict: Verdict
    tries: tuple[Try, ...]
    first: TraceDiff | None = None

    @property
    def explained(self) -> Try | None:
        last = self.tries[-1] if self.tries else None
        return last if last is not None and last.parted and last.clean else None


def explain_runs(
    a: Path,
    b: Path,
    scripts: tuple[Script, Script],
    folder: Path,
    *,
    tries: int = 3,
    progress: Progress = lambda text: None,
) -> Explanation:
    """Compares two recordings, and runs their scripts again until they part at the same place.

    Recordings and tensors of every try are left in `folder`. MISMATCH when it was explained;
    UNVERIFIED when the runs did not part there again; the comparison's own verdict when it has no
    culprit. UnsupportedError for a culprit that no single rank has. Raises as `processes.recorded`.
    """
    found, first = diff(a, b), None
    if found.culprit is not None and found.culprit.cause is Cause.UNRECORDED:
        first, again = found, _recorded_in_full(found, scripts, folder / "in-full", tries, progress)
        if isinstance(again, tuple):
            return Explanation(found, Verdict.UNVERIFIED, again)
        a, found = Path(again.a), again
    if found.culprit is None:
        return Explanation(found, found.verdict, ())
    place = found.culprit.place
    if place.rank is None:
        raise UnsupportedError(
            "the culprit is a sum over ranks, which no rank has in memory; record both runs on the "
            "same number of ranks"
        )
    chosen = choose(read_folder(a)[place.rank], found)
    opens = any(key[2].endswith(BEFORE) for _, key in (*chosen.at, *chosen.given))
    end = max(place.step, START) + 1
    full = None
    if first is not None:
        full = max(0, min(_recorded_from(a), place.step)), max(1, end)
    orders = Orders("", end, chosen.wanted, states=opens, steps=full)
    made: list[Try] = []
    for number in range(1, tries + 1):
        folders = [folder / f"try-{number}" / name for name in "ab"]
        for script, where in zip(scripts, folders, strict=True):
            recorded(script, where, orders, progress=progress)
        made.append(_try(chosen, found, folders))
        if made[-1].parted and made[-1].clean:
            break
    explained = made[-1].parted and made[-1].clean
    verdict = Verdict.MISMATCH if explained else Verdict.UNVERIFIED
    return Explanation(found, verdict, tuple(made), first)


def _recorded_from(path: Path) -> int:
    """The first step that a recording of chosen steps has in full."""
    steps = next(iter(read_folder(path).values())).header.steps
    return 0 if steps is None else steps.start


def _recorded_in_full(
    found: TraceDiff,
    scripts: tuple[Script, Script],
    folder: Path,
    tries: int,
    progress: Progress,
) -> TraceDiff | tuple[Try, ...]:
    """A comparison of both runs once more, with the steps in full that the culprit came in with;
    after `tries` runs that did not part in such steps, what each has shown."""
    made: list[Try] = []
    culprit = found.culprit
    for number in range(1, tries + 1):
        assert culprit is not None
        assert culprit.unrecorded is not None
        low, high = culprit.unrecorded
        folders = [folder / f"try-{number}" / name for name in "ab"]
        orders = Orders("", high + 1, steps=(low, high + 1))
        for script, where in zip(scripts, folders, strict=True):
            recorded(script, where, orders, progress=progress)
        now = diff(folders[0], folders[1])
        if now.culprit is not None and now.culprit.cause is not Cause.UNRECORDED:
            return now
        steps = f"step {low}" if low == high else f"steps {low} to {high}"
        parted = "equal" if now.culprit is None else f"before them{_elsewhere(now)}"
        made.append(Try(False, True, f"with {steps} in full: {parted}", (), ()))
        culprit = now.culprit or culprit
    return tuple(made)


def choose(recording: Recording, found: TraceDiff) -> Chosen:
    """Which events of a recording tell most about a culprit. InputFileError when it lacks the
    culprit's step."""
    assert found.culprit is not None
    culprit, place = found.culprit, found.culprit.place
    steps = {one.number: one for one in recording.steps}
    if place.step not in steps:
        raise InputFileError(f"{found.a}: has no step {place.step}")
    here = steps[place.step]
    keys = here.program.keys
    at = [(place.step, keys[place.index])]
    if place.kind in ("parameter", "buffer", "grad", "optimizer"):  # several at once are one cause
        at += [
            (place.step, key)
            for key in keys
            if key[0] in culprit.names and key[1:3] == (place.kind, place.path)
        ]
    at = list(dict.fromkeys(at))[:_MOST]
    rank = 0 if place.rank is None else place.rank
    given = [
        one for one in dict.fromkeys(_given(here, steps, culprit.cause, place)) if one not in at
    ]
    return Chosen(rank, tuple(at), tuple(given[:_MOST]))


def _given(
    here: Step, steps: dict[int, Step], cause: Cause, place: Place
) -> Iterable[tuple[int, Key]]:
    """The events that the culprit's was made of."""
    keys = here.program.keys
    if cause is Cause.OPTIMIZER:
        yield from ((here.number, key) for key in keys if key[:2] == (place.name, "grad"))
        yield from _state(steps, here.number - 1, lambda key: key[0] == place.name)
        return
    if cause not in (Cause.FORWARD, Cause.BACKWARD, Cause.BETWEEN, Cause.OP):
        return
    calls = calls_of(here.program)
    call = calls.of[place.index] or calls.around[place.index]
    if call is None:
        return
    yield from ((here.number, keys[index]) for index in call.given)
    if call.backward:
        for forward in _forward(calls.forward.get(call.name, []), place.occurrence):
            yield from ((here.number, keys[index]) for index in forward.given)
    name = call.name
    own = ("parameter", "buffer")
    yield from _state(
        steps,
        here.number - 1,
        lambda key: key[1] in own and (name in ROOTS or inside(key[0], name)),
    )


def _forward(calls: list[Call], occurrence: int) -> list[Call]:
    """The forward call of a backward one, if there is one of that number."""
    return calls[occurrence : occurrence + 1]


def _state(
    steps: dict[int, Step], number: int, wanted: Callable[[Key], bool]
) -> Iterable[tuple[int, Key]]:
    """The state at the border before a step."""
    step = steps.get(number)
    if step is not None:
        kinds = ("parameter", "buffer", "optimizer")
        yield from ((number, key) for key in step.program.keys if key[1] in kinds and wanted(key))


def _try(chosen: Chosen, found: TraceDiff, folders: Sequence[Path]) -> Try:
    assert found.culprit is not None
    place = found.culprit.place
    kept: list[dict[tuple[int, Key], Tensor]] = []
    left: dict[tuple[int, Key], str] = {}
    for folder in folders:
        tensors: dict[tuple[int, Key], Tensor] = {}
        for number in {number for number, _ in (*chosen.at, *chosen.given)}:
            held, why = kept_tensors(folder, chosen.rank, number)
            tensors.update({(number, key): tensor for key, tensor in held.items()})
            left.update({(number, key): text for key, text in why.items()})
        kept.append(tensors)
    python = _python_values(folders[0], chosen)
    at = tuple(_told(one, kept, left, python.get(one)) for one in chosen.at)
    given = tuple(_told(one, kept, left, python.get(one)) for one in chosen.given)
    parted = any(one.difference is not None for one in at)
    clean = all(one.difference is None for one in given)
    now = diff(folders[0], folders[1], (None, place.step + 1))
    if parted and clean:
        said = _SAME
    elif parted:
        said = f"parted again at {event(place)}, and so did what it was made of{_elsewhere(now)}"
    elif at[0].problem:
        said = f"nothing to compare at {event(place)}: {at[0].problem}"
    else:
        said = f"equal at {event(place)}{_elsewhere(now)}"
    return Try(parted, clean, said, at, given)


def _elsewhere(now: TraceDiff) -> str:
    if now.culprit is None:
        return ", and as far as that step" if not now.differing else ""
    place = now.culprit.place
    return f"; this time they part at {step(place.step)}, {event(place)}"


def _told(
    one: tuple[int, Key],
    kept: Sequence[dict[tuple[int, Key], Tensor]],
    left: dict[tuple[int, Key], str],
    python: str | None,
) -> Told:
    """What is said of one event. python: the type of a value of Python, None for tensors."""
    number, key = one
    if any(one not in side for side in kept):
        missing = [name for name, side in zip("AB", kept, strict=True) if one not in side]
        why = left.get(one, f"{' and '.join(missing)} did not come to it this time")
        return Told(number, key, None, why)
    a, b = (side[one] for side in kept)
    if compare(a, b).equal:
        return Told(number, key, None)
    if python is not None:
        values = " in A, ".join(repr(python_value(side, python)) for side in (a, b))
        return Told(number, key, {"lines": [f"{label(*key)}: {values} in B"], "suggests": []})
    difference = explain(a, b, label(*key), "trace")
    narrow = _narrowed(a, b)
    if narrow:
        difference["suggests"] = [narrow, *difference["suggests"]]
    return Told(number, key, difference)


def _python_values(folder: Path, chosen: Chosen) -> dict[tuple[int, Key], str]:
    """The events that hold values of Python as bytes, such as settings of an optimizer: types."""
    found = {}
    wanted = {*chosen.at, *chosen.given}
    for one in read_folder(folder)[chosen.rank].steps:
        for key, definition in zip(one.program.keys, one.program.definitions, strict=True):
            if definition.dtype.startswith("py_") and (one.number, key) in wanted:
                found[one.number, key] = definition.dtype.removeprefix("py_")
    return found


def python_value(stored: Tensor, kind: str) -> Any:
    """A value of Python from the bytes by which a recording holds it."""
    data = bytes(stored.tolist())
    if kind == "float":
        return struct.unpack("<d", data)[0]
    if kind in ("int", "bool"):
        value = int.from_bytes(data, "little", signed=True)
        return bool(value) if kind == "bool" else value
    return data.decode("utf-8", "surrogatepass") if kind == "str" else None


def _narrowed(a: Tensor, b: Tensor) -> str | None:
    """Whether one is the other, rounded to a narrower dtype."""
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype not in (torch.float32, torch.float64):
        return None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for one, other, said in ((a, b, "B is A"), (b, a, "A is B")):
            if compare(one.to(dtype).to(a.dtype), other).equal:
                name = str(dtype).removeprefix("torch.")
                return f"{said} rounded to {name}: cast on the way"
    return None
