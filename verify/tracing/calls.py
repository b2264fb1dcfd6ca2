"""Which events of a step belong together: the calls of modules, forward and backward.

A module's inputs are recorded when its call begins and its outputs when it ends, so events nest
like brackets; gradients do the same the other way round, from grad_output to grad_input. What lies
between the brackets is what the module did, and the innermost bracket around an event is the module
whose code made it. Built once for each program, from names and kinds alone.

A backward call is not over with its first grad_input: of an input that a module reads in several
places each has one. So it stays open for as long as no other call of its module begins.

It refuses to read anything into names but their dots: `a.b` is inside `a`, and everything inside
the root. Of an op, named `module/op`, the part before the slash is the module, and so it is of a
stage of mok's layer, `module/mok.stage`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verify.tracing.definitions import Definition, Program

_OPENS = {"input": "output", "grad_output": "grad_input"}
_CLOSES = {"output", "grad_input"}
ROOTS = ("", "(root)")  # what the model itself is called
STAGE = "/mok."
_STATE = ("parameter", "buffer", "optimizer", "rng", "grad")


@dataclass
class Call:
    """One call of a module, or its backward. Places are those of the program.

    start: where it begins. given: inputs, or grad_outputs. made: outputs, or grad_inputs.
    """

    name: str
    backward: bool
    start: int
    given: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    around: Call | None = None

    @property
    def end(self) -> int:
        """The place of the first thing that it made; of an unfinished call, its last input's."""
        return self.made[0] if self.made else self.given[-1] + 1


@dataclass(frozen=True)
class Calls:
    """All calls of a program.

    of: the call that an entry belongs to, None for what belongs to none. around: the innermost call
    whose code made the entry, None outside of the model. forward: the forward calls of a name.
    """

    of: tuple[Call | None, ...]
    around: tuple[Call | None, ...]
    forward: dict[str, list[Call]]
    backward: dict[str, list[Call]]


def calls_of(program: Program) -> Calls:
    """The calls of a program."""
    of: list[Call | None] = []
    around: list[Call | None] = []
    found: dict[bool, dict[str, list[Call]]] = {False: {}, True: {}}
    open_calls: dict[bool, list[Call]] = {False: [], True: []}
    probes: dict[str, Call | None] = {}
    for index, one in enumerate(program.definitions):
        previous = program.definitions[index - 1] if index else None
        last = of[-1] if of else None
        if is_op(one) or one.kind not in (*_OPENS, *_CLOSES):
            of.append(None)
            around.append(None if one.kind in _STATE else _innermost(open_calls, one, probes))
            continue
        backward = one.kind.startswith("grad")
        stack = open_calls[backward]
        if backward:
            last = _latest(stack, one.name)
        elif previous is None or (previous.name, previous.kind) != (one.name, one.kind):
            last = None
        together = last is not None and (
            one.kind == "grad_input"
            or all(program.definitions[at].path != one.path for at in _side(last, one.kind))
        )
        if together and last is not None:
            call = last
        elif one.kind in _OPENS:
            call = Call(one.name, backward, index, around=_enclosing(stack, one.name))
            stack.append(call)
            found[backward].setdefault(one.name, []).append(call)
        else:
            call = (None if backward else _closed(stack, one.name)) or Call(
                one.name,
                backward,
                _begin(program, index, one.name),
                around=_enclosing(stack, one.name),
            )
            if not call.given:
                found[backward].setdefault(one.name, []).append(call)
        _side(call, one.kind).append(index)
        of.append(call)
        around.append(call if one.kind in _CLOSES else call.around)
    return Calls(tuple(of), tuple(around), found[False], found[True])


def is_op(one: Definition) -> bool:
    """Whether a definition is of an op, not of a module."""
    return "/" in one.name and one.kind in ("input", "output")


def stage_of(name: str) -> tuple[str, str] | None:
    """Module and stage of a probe inside of mok's layer, `module/mok.stage`; None for others."""
    module, found, stage = name.rpartition(STAGE)
    return (module, stage) if found else None


def inside(name: str, module: str) -> bool:
    """Whether a dotted name is a module's or lies in it; everything lies in the root."""
    return module in ROOTS or name == module or name.startswith(module + ".")


def _side(call: Call, kind: str) -> list[int]:
    return call.given if kind in _OPENS else call.made


def _enclosing(stack: list[Call], name: str) -> Call | None:
    """The innermost open call of a module that holds `name`."""
    for call in reversed(stack):
        if call.name != name and inside(name, call.name):
            return call
    return None


def _innermost(
    open_calls: dict[bool, list[Call]], one: Definition, probes: dict[str, Call | None]
) -> Call | None:
    """The open call whose code made a probe or ran an op. probes: where those met so far were."""
    if is_op(one):
        return _latest(open_calls[False], one.name.rpartition("/")[0])
    if one.path == "grad" or one.path.endswith(".grad"):
        made, stage = probes.get(one.name), stage_of(one.name)
        module = made.name if made is not None else stage[0] if stage is not None else None
        return None if module is None else _latest(open_calls[True], module)
    forward = open_calls[False]
    probes[one.name] = forward[-1] if forward else None
    return probes[one.name]


def _latest(stack: list[Call], name: str) -> Call | None:
    """The innermost open call of a module."""
    return next((call for call in reversed(stack) if call.name == name), None)


def _closed(stack: list[Call], name: str) -> Call | None:
    """Takes the innermost open call of `name` off the stack, with what was left open in it."""
    for place in range(len(stack) - 1, -1, -1):
        if stack[place].name == name:
            call = stack[place]
            del stack[place:]
            return call
    return None


def _begin(program: Program, index: int, name: str) -> int:
    """Where a call that has no tensor among its inputs began: before what its parts recorded."""
    while index:
        before = program.definitions[index - 1]
        if before.name == name or before.kind in _STATE or not inside(before.name, name):
            break
        index -= 1
    return index
