"""Who is to blame for a difference, and who only inherits it.

An event that differs is an origin when all that it was made of, as far as it was recorded, is equal
in both runs: a module's outputs are made of its inputs, of the parameters and buffers in it as they
were at the last border, of the generators' state there and of what its parts recorded meanwhile; a
gradient of its grad_outputs and of the forward's values; a parameter after the optimizer of its
gradient, itself and its optimizer's state before. All others inherit.

What steps that nobody recorded have changed is blamed on them, and on none of their modules.

It refuses to blame a module of which something recorded differs already, even where that may not
matter, or of which a parameter was written by hand within the step (when, is not recorded), and to
separate the parameter gradients of one step: clipping by a common norm and sums over
ranks mix them before they are recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

from verify.tracing.calls import ROOTS, Call, Calls, is_op
from verify.tracing.choices import STATE
from verify.tracing.definitions import START, Definition, Program

Mark = str | None
"""What comparing said about an entry: "" equal, None not compared, else how it differs."""


class Cause(StrEnum):
    """Where a difference came in. A closed list: it is part of the JSON document."""

    START = "start"  # the state before the first step
    DATA = "data"  # what enters the model
    FORWARD = "forward"  # a module, in its forward pass
    BETWEEN = "between"  # a module's own code, or code outside of modules, between two events
    OP = "op"  # one operation
    LOSS = "loss"  # the gradient that enters the model
    BACKWARD = "backward"  # a module, in its backward pass, or the gradients of parameters
    OPTIMIZER = "optimizer"  # parameters or its own state, after its step
    RNG = "rng"  # a generator's state alone
    SET = "set"  # parameters that other code than an optimizer wrote in a step without a backward
    UNRECORDED = "unrecorded"  # steps that were left out of a recording by choice


@dataclass(frozen=True)
class Origin:
    """A cause in one step. places: of the program's entries that differ because of it."""

    cause: Cause
    places: tuple[int, ...]


@dataclass
class Known:
    """What differs as of the last border of a rank, carried from step to step."""

    state: dict[tuple[str, str, str], bool] = field(default_factory=dict)
    modules: Counter[str] = field(default_factory=Counter)  # differing values at or below a name
    optimizer: Counter[str] = field(default_factory=Counter)  # differing state of a parameter
    left: frozenset[str] = frozenset()  # whose gradients differ since steps that were left out
    rng: int = 0  # differing generators
    events: int = 0  # that differ in the steps before

    def border(self, program: Program, marks: Sequence[Mark], *, hidden: bool = False) -> None:
        """Takes note of the state that a step recorded, and counts what differs in it. hidden:
        whether the step was left out but for that, and steps before it."""
        self.events += sum(map(bool, marks))
        gradients = frozenset(
            one.name
            for one, mark in zip(program.definitions, marks, strict=True)
            if mark and one.kind == "grad"
        )
        self.left = gradients if hidden else self.left & gradients
        for one, mark in zip(program.definitions, marks, strict=True):
            if one.kind not in STATE or mark is None:
                continue
            key = (one.name, one.kind, one.path)
            change = int(bool(mark)) - int(self.state.get(key, False))
            self.state[key] = bool(mark)
            if change and one.kind == "rng":
                self.rng += change
            elif one.kind == "optimizer":
                self.optimizer[one.name] += change
            elif change:
                for module in _prefixes(one.name):
                    self.modules[module] += change

    @property
    def clean(self) -> bool:
        """Whether all state that was compared is equal."""
        differing = self.rng or self.modules[""] or any(self.optimizer.values()) or self.left
        return not differing

    def differs(self, name: str) -> bool:
        """Whether a parameter or buffer of this name, or below it, differs."""
        return self.modules["" if name in ROOTS else name] > 0

    def drawn(self, moved: Mapping[tuple[str, str, str], bool]) -> bool:
        """Whether a differing generator may have been drawn from. moved: of each generator that
        the step recorded, whether its state changed in it."""
        return self.rng > 0 and any(
            differs and moved.get(key, True)
            for key, differs in self.state.items()
            if key[1] == "rng"
        )


def origins(
    number: int,
    program: Program,
    calls: Calls,
    marks: Sequence[Mark],
    known: Known,
    drawn: bool,
    hidden: bool = False,
) -> list[Origin]:
    """The origins among a step's differing entries, in the order of execution.

    marks: one for each entry of the program. known: as of the border before; not changed. drawn:
    whether the step may have drawn from a generator that differs. hidden: whether steps that were
    not recorded led to it, or it was not itself but for the state behind it.
    """
    if hidden and number != START:
        differing = tuple(place for place, mark in enumerate(marks) if mark)
        first = differing and known.clean
        return [Origin(Cause.UNRECORDED, differing)] if first else []
    step = _Step(number, program, calls, marks, known, drawn)
    found: dict[tuple[Cause, object], list[int]] = {}
    for place, mark in enumerate(marks):
        cause = step.cause(place) if mark else None
        if cause is not None:
            found.setdefault((cause, step.group(cause, place)), []).append(place)
    return [Origin(cause, tuple(places)) for (cause, _), places in found.items()]


class _Step:
    """One step's marks, with counts that make every question about a range cheap."""

    def __init__(
        self,
        number: int,
        program: Program,
        calls: Calls,
        marks: Sequence[Mark],
        known: Known,
        drawn: bool,
    ) -> None:
        self._number, self._definitions, self._calls = number, program.definitions, calls
        self._known, self._drawn = known, drawn
        self._before = list(accumulate(map(int, map(bool, marks)), initial=0))
        self._gradients = {
            one.name
            for one, mark in zip(program.definitions, marks, strict=True)
            if mark and one.kind == "grad"
        }
        self._set = set[str]()  # parameters that were written by hand, and the modules above them
        kinds = {one.kind for one in program.definitions}
        # Gradients that no backward made and no optimizer read were left from a step before.
        stepped = {"grad", "optimizer"} <= kinds
        if not stepped and not kinds & {"grad_output", "grad_input"}:
            for one, mark in zip(program.definitions, marks, strict=True):
                inherits = known.differs(one.name) or one.name in self._gradients
                if mark and one.kind == "parameter" and not inherits:
                    self._set.update(_prefixes(one.name))
        others = [
            bool(mark) and one.kind not in ("grad", *STATE)
            for one, mark in zip(program.definitions, marks, strict=True)
        ]
        self._computed = list(accumulate(map(int, others), initial=0))

    def cause(self, place: int) -> Cause | None:
        """Why an entry that differs does, or None when it inherits."""
        one = self._definitions[place]
        if self._number == START:
            return Cause.START
        if one.kind == "rng":
            return None if self._any_before(place) else Cause.RNG
        if one.kind == "parameter" and one.name in self._set:
            return Cause.SET
        if one.kind in ("parameter", "optimizer"):
            before = self._known.differs(one.name) or self._known.optimizer[one.name] > 0
            return None if before or one.name in self._gradients else Cause.OPTIMIZER
        if one.kind == "buffer":
            return self._of_buffer(one, place)
        if one.kind == "grad":
            inherits = self._computed[place] > 0 or self._known.differs("")
            inherits |= one.name in self._known.left
            return None if inherits else Cause.BACKWARD
        call = self._calls.of[place]
        if call is not None and place in call.made:
            if not call.given and (self._before[call.start] or self._known.events):
                return None  # nothing says what it was called with
            if not self._clean(call, place if call.backward else call.made[0]):
                return None
            return Cause.BACKWARD if call.backward else Cause.FORWARD
        return self._of_code(one, place, call)

    def group(self, cause: Cause, place: int) -> object:
        """What several entries must share to be told as one: calls of one module are."""
        if self._definitions[place].kind in ("grad", *STATE):
            return "state"
        return (self._definitions[place].name, self._calls.of[place] is not None)

    def _of_buffer(self, one: Definition, place: int) -> Cause | None:
        module = one.name.rpartition(".")[0]
        calls = self._calls.forward.get(module, ())
        if self._known.differs(one.name) or any(self._touched(call) for call in calls):
            return None
        if not calls and self._any_before(place):
            return None
        return Cause.FORWARD

    def _of_code(self, one: Definition, place: int, call: Call | None) -> Cause | None:
        """Of an input, a grad_output, a probe or an op: made by the code around it."""
        around = self._calls.around[place]
        first = call.given[0] if call is not None else place
        if around is None and self._any_before(first):
            return None
        if around is not None and not self._clean(around, first):
            return None
        if is_op(one):
            return Cause.OP
        if around is None and one.kind != "probe":
            return Cause.DATA if one.kind == "input" else Cause.LOSS
        return Cause.BETWEEN

    def _clean(self, call: Call, until: int) -> bool:
        """Whether all that a call could use before a place is equal."""
        if self._before[until] > self._before[call.start] or self._drawn:
            return False
        if self._known.differs(call.name) or ("" if call.name in ROOTS else call.name) in self._set:
            return False
        forward = self._calls.forward.get(call.name, ()) if call.backward else ()
        return not any(self._touched(one) for one in forward)

    def _touched(self, call: Call) -> bool:
        """Whether anything of a forward call differs, its outputs too."""
        end = call.made[-1] + 1 if call.made else call.end
        return self._before[end] > self._before[call.start]

    def _any_before(self, place: int) -> bool:
        return self._before[place] > 0 or self._known.events > 0


def _prefixes(name: str) -> list[str]:
    """`a.b.c` -> "", `a`, `a.b`, `a.b.c`."""
    parts = name.split(".")
    return list(dict.fromkeys(["", *(".".join(parts[:end]) for end in range(1, len(parts) + 1))]))


def hints(
    cause: Cause,
    program: Program,
    marks: Sequence[Mark],
    modules: Mapping[int, str],
    after_hidden: bool = False,
) -> list[str]:
    """What else of the step speaks about a cause. modules: classes of the entries at fault.
    after_hidden: whether the step before was not recorded in full."""
    found = []
    if after_hidden and cause in (Cause.DATA, Cause.LOSS, Cause.BETWEEN):
        found.append(
            "the step before was not recorded in full: what it left outside of the model and its "
            "optimizers, such as a hidden state that is carried on, may have brought this"
        )
    rng = any(
        mark and one.kind == "rng" for one, mark in zip(program.definitions, marks, strict=True)
    )
    if cause in (Cause.FORWARD, Cause.BETWEEN, Cause.OP, Cause.BACKWARD) and rng:
        found.append(
            "the state of a generator differs after this step too: it drew other random numbers, "
            "or another number of them (dropout on in one run, or a forward run again with others)"
        )
    if cause is Cause.OPTIMIZER:
        settings = [
            f"{one.path} of {one.name}"
            for one, mark in zip(program.definitions, marks, strict=True)
            if mark and one.kind == "optimizer" and one.name.startswith("(group ")
        ]
        if settings:
            found.append(f"settings of the optimizer differ: {', '.join(settings[:8])}")
    if any("dropout" in name.lower() for name in modules.values()) and not rng:
        found.append("a dropout module whose generators agree: another mode, rate or generator")
    return found
