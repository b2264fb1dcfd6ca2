"""Which steps of a run are recorded in full: all of them, or those that somebody chose.

Of the others nothing is recorded but the state, with gradients that are there, behind the last one
before a chosen step, so that a chosen step begins with state that is known; and the state at the
end of the recording, since nobody knows before which step is the last. What a step in between has
changed is seen in that state; which of its events did it is not. No torch here.
"""

from __future__ import annotations

from verify.errors import UnsupportedError
from verify.tracing.definitions import START

Choice = range | None
"""The numbers of the steps that are recorded in full; None is all of them."""
STATE = ("parameter", "buffer", "optimizer", "rng")
"""Kinds of what a border records; that of a step that was not chosen records gradients that are
there, too, since a chosen step may add to them."""
_MOST = 2**63 - 1  # a number of a step is at most that, and a choice without an end ends there


def chosen(every: int, steps: Choice) -> Choice:
    """What `every` and `steps` of `verify.record` mean. UnsupportedError for what means nothing."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UnsupportedError(
            f"every is {every!r}; allowed is a whole number from 1: with every=10 steps 0, 10, 20 "
            "and so on are recorded in full"
        )
    if steps is None:
        return None if every == 1 else range(0, _MOST, every)
    if every != 1:
        raise UnsupportedError(
            f"every={every} and steps={steps} are two choices of the same; give one of them, such "
            "as steps=range(1000, 2000, 10)"
        )
    wrong = not isinstance(steps, range) or steps.step < 1 or steps.start < 0 or not steps
    if wrong or steps.start >= _MOST:
        raise UnsupportedError(
            f"steps is {steps!r}; allowed is a range of numbers of steps, upwards from 0 or more, "
            "such as range(1000, 1010)"
        )
    return steps


def in_full(choice: Choice, number: int) -> bool:
    """Whether everything that a step does is recorded. Of the start that is its state."""
    return choice is None or number == START or number in choice


def has_border(choice: Choice, number: int) -> bool:
    """Whether the state behind a step is recorded, apart from that behind the last of all."""
    return in_full(choice, number) or in_full(choice, number + 1)


def in_words(choice: Choice) -> str:
    """`every step`, `every 10th step`, `steps 100 to 199`, `steps 100 to 190, each 10th`."""
    if choice is None:
        return "every step"
    by = f"each {_ordinal(choice.step)}" if choice.step > 1 else ""
    if choice.stop >= _MOST:
        if not by:
            return f"every step from {choice.start} on"
        begins = f" from {choice.start} on" if choice.start else ""
        return f"every {_ordinal(choice.step)} step{begins}"
    if len(choice) == 1:
        return f"step {choice.start}"
    return f"steps {choice.start} to {choice[-1]}{', ' * bool(by)}{by}"


class Gaps:
    """Finds steps that only the state behind them tells of. Ask in order of the steps that both
    recordings have."""

    def __init__(self, *choices: Choice) -> None:
        self._choices = choices
        self._before = START

    def before(self, number: int) -> range:
        """The steps that led to what this one recorded, itself included, and were not recorded in
        full on all sides; empty when there is none."""
        first, self._before = self._before + 1, number
        if number == START or all(one is None for one in self._choices):
            return range(0)
        full = all(in_full(one, number) for one in self._choices)
        return range(first, number if full else number + 1)

    def follows(self, number: int) -> bool:
        """Whether the step before was not recorded in full on all sides."""
        return not all(in_full(one, number - 1) for one in self._choices)

    def saw_alone(self, number: int) -> str:
        """The side, "a" or "b", that alone has the step before in full; "" if there is none."""
        full = [in_full(one, number - 1) for one in self._choices]
        return "" if len(set(full)) < 2 else "ab"[full.index(True)]


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
