"""repeat: the same call again in the same process, in two arms.

In the restored arm every global generator is put back before each execution, so only the function
itself can differ. In the free arm the generators start from a state drawn from the operating
system; a result that differs there alone consumes global randomness.
"""

from __future__ import annotations

from verify.sessions import Session, perform

FREE_RUNS = 2


def run(session: Session, runs: int) -> None:
    """`runs` executions in the restored arm, then two in the free arm."""
    for index in range(runs):
        perform(session, "repeat", "restored", run=index)
    for index in range(FREE_RUNS):
        perform(session, "repeat", "free", run=runs + index, arm="free")
