"""Everything that one process does for one case: set up, first call, conditions, probe.

The order matters and is fixed: the first call comes first and counts, calls with other inputs come
last, so that they cannot disturb what is compared with the first.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from verify.conditions import CONDITIONS, goldens
from verify.conditions.history import probe
from verify.evidence import BASE, RETRY, Failure, Plan, Record, Trouble
from verify.execution import MAX_TRACEBACK, execute
from verify.sessions import Session, first, record
from verify.staging import Stage, prepare
from verify.targets import Found

RETRIES = 2


def set_up(
    found: Found, rank: int, world: int, group: object, agree: Callable[..., Failure | None]
) -> Stage | Failure:
    """The stage of a case, or why it could not be set up (on this rank, or on a peer)."""
    stage, failure = None, None
    try:
        stage = prepare(found.case, rank, world, group)
    except (Exception, SystemExit) as error:
        text = traceback.format_exc()[-MAX_TRACEBACK:]
        failure = Failure(type(error).__name__, str(error)[:MAX_TRACEBACK], text)
    failure = agree(failure)
    if failure is not None or stage is None:
        return failure or Failure("RuntimeError", "setup gave nothing", "")
    return stage


def report_setup_failure(
    emit: Callable[[Record], None], plan: Plan, rank: int, failure: Failure, process: int = 0
) -> None:
    """A case whose setup raised: nothing was executed."""
    if not failure.after_peer:
        detail = f"setup raised {failure.type}: {failure.message}"
        claim = "process" if process else None
        emit(Trouble(plan.case, "case-error", detail, claim, rank, process))


def conduct(session: Session) -> None:
    """Runs the base execution and every claim of the plan in this process.

    The claim `process` is not run here: it is what other processes are for.
    """
    base = first(session)
    if base.failure is not None:
        for index in range(RETRIES):
            capture = execute(session.stage, base.given, group=session.group)
            record(session, capture, claim=BASE, variant=RETRY, run=index + 1, compare="none")
        return
    for claim, condition in CONDITIONS.items():
        if claim in session.plan.claims:
            condition(session, session.plan.runs.get(claim, 1))
    if session.keep_golden is not None:
        _keep(session, session.keep_golden)
    probe(session)


def _keep(session: Session, path: Path) -> None:
    """What a golden would hold; where it cannot be had, the case is not VERIFIED, and says why.

    It is the claim `reference` that says so where the reference makes the golden.
    """
    case = session.stage.case
    try:
        goldens.keep(session, path)
    except Exception as error:
        detail = f"what its golden would hold: {type(error).__name__}: {error}"
        claim = "reference" if case.golden == "float64" else None
        session.emit(Trouble(session.plan.case, "case-error", detail, claim, session.stage.rank))
