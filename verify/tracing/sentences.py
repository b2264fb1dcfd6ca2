"""What a culprit says, in one sentence: for the terminal and for the JSON document alike.

It says what was equal and what was not, and where to look; of what was not recorded it says
nothing. Every name in it is printable.
"""

from __future__ import annotations

from verify.rendering.escaping import clipped, printable
from verify.tracing.calls import ROOTS, stage_of
from verify.tracing.causes import Cause
from verify.tracing.findings import Culprit, Place, TraceDiff, label

_LONGEST = 160  # characters of a name


def sentence(one: Culprit, found: TraceDiff) -> str:
    """The sentence of a culprit of a comparison."""
    where = at(one.place)
    others = len(one.names) - 1
    first = event(one.place)
    many = f"{first} and {others} more" if others else first
    if one.cause is Cause.START:
        if one.place.kind == "rng" and not others:
            return (
                f"before the first step {first} differs already: another seed, or a resume that "
                f"did not restore it{_user(one, found)}"
            )
        return f"before the first step state differs already, {many}: other weights, seed or resume"
    if one.cause is Cause.UNRECORDED and one.unrecorded is not None:
        return _unrecorded(one, where, many)
    if one.cause is Cause.DATA:
        return (
            f"{where}: what enters the model differs, {many}, and nothing recorded before does: "
            "the data, its order, or what prepares it"
        )
    if one.cause is Cause.FORWARD:
        state = "its state" if one.place.kind == "buffer" else "its output"
        name = one.place.name.rpartition(".")[0] if one.place.kind == "buffer" else one.place.name
        return (
            f"{where}, forward: {module(name, one.place)} has equal inputs, parameters and "
            f"buffers, and {state} differs ({first})"
        )
    if one.cause is Cause.BACKWARD and one.place.kind == "grad":
        return _gradients(one, where, many)
    if one.cause is Cause.BACKWARD:
        return (
            f"{where}, backward: {module(one.place.name, one.place)} has equal gradients of its "
            f"outputs, inputs and parameters, and the gradient of its input differs ({first})"
        )
    if one.cause is Cause.OP:
        owner, _, op = one.place.name.rpartition("/")
        return (
            f"{where}: op {_name(op)} in {_place_of(owner)}: nothing recorded there before it "
            "differs, its output does"
        )
    if one.cause is Cause.LOSS:
        return (
            f"{where}, backward: the gradient that enters the model differs ({first}), and nothing "
            "recorded before does: the loss, or code between the model and it"
        )
    if one.cause is Cause.OPTIMIZER:
        return (
            f"{where}, optimizer: {many} {_differ(one)} after it, while gradient, value and state "
            "before are equal: its arithmetic, learning rate or other settings"
        )
    if one.cause is Cause.SET:
        return (
            f"{where}: {many} {_differ(one)} after it, and no backward was recorded in it: other "
            "code than an optimizer wrote there, such as weights that were loaded or synchronised"
        )
    if one.cause is Cause.RNG:
        return _generator(one, found, where, first)
    told = one.place.kind == "probe" and one.place.module == "mok"  # not a user's of such a name
    stage = stage_of(one.place.name) if told else None
    if stage is not None:
        return _stage(one, where, stage)
    code = "code outside of modules" if one.around is None else f"code of {_around(one.around)}"
    after = f" after {clipped(one.after, _LONGEST)}" if one.after else ""
    return f"{where}: {code},{after} and before {first}: all that it was given is equal"


def _unrecorded(one: Culprit, where: str, many: str) -> str:
    assert one.unrecorded is not None
    low, high = one.unrecorded
    steps = f"step {low} was" if low == high else f"steps {low} to {high} were"
    return (
        f"{where}: {many} {_differ(one)} here, all that was recorded before is equal, and {steps} "
        f"not recorded in full: record both with steps=range({low}, {high + 1}), or let `verify "
        "trace explain` do that"
    )


def _stage(one: Culprit, where: str, stage: tuple[str, str]) -> str:
    """Of a stage inside of mok's layer."""
    gradient = one.place.path == "grad" or one.place.path.endswith(".grad")
    again = stage[1].startswith("again_") or stage[1].endswith("weighted_hidden")  # mok.stages
    what = f"{'the gradient at ' if gradient and not again else ''}stage {_name(stage[1])}"
    after = f", the last of them {clipped(one.after, _LONGEST)}" if one.after else ""
    direction = "backward" if gradient else "forward"
    return (
        f"{where}, {direction}: {what} of mok's layer in {_around(one.around or stage[0])} differs "
        f"({event(one.place)}), and all recorded before it in that call is equal{after}"
    )


def at(place: Place) -> str:
    """`rank 0, step 3`."""
    rank = "sum over ranks" if place.rank is None else f"rank {place.rank}"
    return f"{rank}, {step(place.step)}"


def step(number: int) -> str:
    """`step 3`, or `start`."""
    return "start" if number < 0 else f"step {number}"


def event(place: Place) -> str:
    """An event in printable words."""
    return clipped(label(place.name, place.kind, place.path, place.occurrence), _LONGEST)


def module(name: str, place: Place | None) -> str:
    """`module layers.1 (Block)`; the root is `the model`."""
    kind = f" ({printable(place.module)})" if place is not None and place.module else ""
    return f"the model{kind}" if name in ROOTS else f"module {_name(name)}{kind}"


def _around(shown: str) -> str:
    name, space, kind = shown.partition(" (")
    if name in (*ROOTS, "(model)"):
        return f"the model{_name(space + kind)}" if space else "the model"
    return f"module {_name(shown)}"


def _place_of(owner: str) -> str:
    """Where an op ran: a module's forward, or an operation of the backward pass."""
    if not owner.startswith("(backward "):
        return module(owner, None)
    node = owner.removeprefix("(backward ").removesuffix(")")
    return f"backward operation {_name(node)}"


def _name(name: str) -> str:
    return clipped(name, _LONGEST)


def _differ(one: Culprit) -> str:
    return "differs" if len(one.names) == 1 else "differ"


def _gradients(one: Culprit, where: str, many: str) -> str:
    if one.place.rank is None:
        return (
            f"{where}, backward: {many} {_differ(one)}, while "
            "parameters and buffers before are equal; activations were not compared"
        )
    return (
        f"{where}, backward: {many} {_differ(one)}, while activations "
        "and their gradients are equal as far as recorded: the kernel of a parameter's gradient, "
        "a sum over ranks, clipping by a common norm, or what they were added to (zero_grad)"
    )


def _generator(one: Culprit, found: TraceDiff, where: str, first: str) -> str:
    return (
        f"{where}: {first} differs alone: something in this step drew other random numbers, or "
        f"another number of them{_user(one, found)}"
    )


def _user(one: Culprit, found: TraceDiff) -> str:
    """What differs first after a generator, and so has probably drawn from it."""
    here = one.place
    later = [
        place
        for place in found.inherits
        if place.rank == here.rank
        and place.kind != "rng"
        and (place.step, place.index) > (here.step, here.index)
    ]
    if not later:
        return ""
    return f"; the first to differ after it: {event(later[0])}, {step(later[0].step)}"
