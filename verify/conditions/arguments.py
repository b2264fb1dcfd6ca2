"""schedule and vary: arguments of the function that must not change a bit."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from verify.sessions import Effect, Session, perform


def run_schedule(session: Session, runs: int) -> None:
    """Every alternative of the case's `schedule` (sets of arguments), at least `runs` in all."""
    alternatives = list(session.stage.case.schedule)
    for index in range(max(runs, len(alternatives))):
        kwargs = dict(alternatives[index % len(alternatives)])
        shown = {name: str(value) for name, value in kwargs.items()}
        variant = ", ".join(f"{name}={value}" for name, value in shown.items())
        perform(
            session,
            "schedule",
            variant,
            run=index,
            kwargs=kwargs,
            requested=shown,
            effective=_in_effect(session, kwargs),
        )


def run_vary(session: Session, runs: int) -> None:
    """Every value of every argument in the case's `vary`, one at a time."""
    settings = [
        (name, value) for name, values in session.stage.case.vary.items() for value in values
    ]
    for index in range(max(runs, len(settings))):
        name, value = settings[index % len(settings)]
        perform(
            session,
            "vary",
            f"{name}={value}",
            run=index,
            kwargs={name: value},
            requested={name: str(value)},
            effective=_in_effect(session, {name: value}),
        )


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
