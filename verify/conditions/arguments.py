"""schedule and vary: arguments of the function that must not change a bit.

A setting that differs is executed again: the same other bits each time are another order or
algorithm, other ones each time a race that the setting brings about.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from verify.captures import same_bits
from verify.sessions import Effect, Session, perform

AGAIN = 2  # further executions of a setting that differed


def run_schedule(session: Session, runs: int) -> None:
    """Every alternative of the case's `schedule` (sets of arguments), at least `runs` in all."""
    alternatives = list(session.stage.case.schedule)
    _perform_all(session, "schedule", [dict(one) for one in alternatives], runs)


def run_vary(session: Session, runs: int) -> None:
    """Every value of every argument in the case's `vary`, one at a time."""
    varied = session.stage.case.vary
    settings = [{name: value} for name, values in varied.items() for value in values]
    _perform_all(session, "vary", settings, runs)


def _perform_all(
    session: Session, claim: str, settings: Sequence[Mapping[str, Any]], runs: int
) -> None:
    """Every setting once, again until there are `runs` executions, then those that differed."""
    todo = [index % len(settings) for index in range(max(runs, len(settings)))]
    wrong: list[int] = []
    for run, index in enumerate(todo):
        if _performed(session, claim, settings[index], run) and index not in wrong:
            wrong.append(index)
    again = [index for index in wrong for _ in range(AGAIN)]
    for run, index in enumerate(again, start=len(todo)):
        _performed(session, claim, settings[index], run)


def _performed(session: Session, claim: str, kwargs: Mapping[str, Any], run: int) -> bool:
    """One execution with these arguments; whether it gave other bits on any rank."""
    shown = {name: str(value) for name, value in kwargs.items()}
    capture = perform(
        session,
        claim,
        ", ".join(f"{name}={value}" for name, value in shown.items()),
        run=run,
        kwargs=kwargs,
        requested=shown,
        effective=_in_effect(session, kwargs),
    )
    kept = session.base.kept if session.base is not None else {}
    differs = capture.failure is None and not (
        capture.outputs.keys() == kept.keys()
        and all(same_bits(tensor, kept[name]) for name, tensor in capture.outputs.items())
    )
    if session.stage.world == 1:
        return differs
    told: list[Any] = [None] * session.stage.world
    dist.all_gather_object(told, differs)  # the ranks execute together, so all do it again
    return any(told)


def _in_effect(session: Session, kwargs: Mapping[str, Any]) -> Effect:
    """An argument that equals the function's default changes nothing."""
    try:
        parameters = inspect.signature(session.stage.case.execute).parameters
    except (TypeError, ValueError):
        return {}, True
    same = [n for n, v in kwargs.items() if n in parameters and _equal(parameters[n].default, v)]
    told = {n: "the default" if n in same else "changed" for n in kwargs}
    return told, len(same) < len(kwargs)


def _equal(default: Any, value: Any) -> bool:
    try:
        return bool(default == value)
    except (RuntimeError, ValueError, TypeError):
        return False
