"""schedule and vary: arguments of the function that must not change a bit."""

from __future__ import annotations

from verify.sessions import Session, perform


def run_schedule(session: Session, runs: int) -> None:
    """Every alternative of the case's `schedule` (sets of arguments), at least `runs` in all."""
    alternatives = list(session.stage.case.schedule)
    for index in range(max(runs, len(alternatives))):
        kwargs = dict(alternatives[index % len(alternatives)])
        shown = {name: str(value) for name, value in kwargs.items()}
        variant = ", ".join(f"{name}={value}" for name, value in shown.items())
        perform(session, "schedule", variant, run=index, kwargs=kwargs, requested=shown)


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
        )
