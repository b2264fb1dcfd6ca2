"""Whether a condition can be made here, decided by all ranks together.

A rank that left a condition alone would meet its peers' collectives with those of its next claim.
So what one rank cannot do is UNVERIFIED(unsupported) on every rank, and all of them leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from verify.evidence import Failure, Trouble
from verify.sessions import Effect, Session

Made = TypeVar("Made")


class Unavailable(RuntimeError):
    """A condition cannot be made for this case; the message says why."""


def unsupported(session: Session, claim: str, detail: str) -> None:
    """Says that the claim cannot be checked here, and why."""
    trouble = Trouble(session.plan.case, "unsupported", detail, claim, session.stage.rank)
    session.emit(trouble)


def available(
    session: Session,
    claim: str,
    make: Callable[[], Made],
    refusals: tuple[type[Exception], ...] = (Unavailable,),
) -> Made | None:
    """What `make` gives, once every rank has made its own; None where one of them could not.

    `make` raises one of `refusals` for that, and the claim is then unsupported on every rank.
    Collective: all ranks call it at the same place. `make` must not return None.
    """
    made, refused = None, ""
    try:
        made = make()
    except refusals as error:
        refused = str(error) if isinstance(error, Unavailable) else f"{_kind(error)}: {error}"
    detail = refused_anywhere(session, refused)
    if not detail:
        return made
    unsupported(session, claim, detail)
    return None


def refused_anywhere(session: Session, refused: str) -> str:
    """This rank's reason, "" for none; of a rank that has none, that another one refused."""
    agreed = _agreed(session, refused)
    if agreed is None or refused:
        return refused
    return f"not every rank can have this condition: {agreed.message}"


def on_any_rank(session: Session, here: bool) -> bool:
    """Whether it holds on any rank. Collective, as `available`."""
    return _agreed(session, "here" if here else "") is not None


def unless_own_streams(session: Session, effect: Effect) -> Effect:
    """Not in effect for a case that got memory for streams of its own: this one reaches only
    torch's current stream."""
    own = session.base.own_streams if session.base is not None else 0
    return ({**effect[0], "own_streams": own}, False) if own else effect


def _agreed(session: Session, text: str) -> Failure | None:
    # a rank that failed waits for its peers only briefly, and they may still be trying
    own = Failure("Unavailable", text, "") if text else None
    return session.agree(None) or session.agree(own)


def _kind(error: Exception) -> str:
    return type(error).__name__
