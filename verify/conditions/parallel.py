"""rank and ep: the same bits on every rank, and at every degree of expert parallelism.

rank: replicated tensors are equal on all ranks, and each rank's own tensors equal run to run.
ep: at every degree the digests of the shards add up to those of the base. Degrees below the number
of ranks run as subgroups of the same ranks, so that nothing else changes. Tensors that are a rank's
own (partial sums over its tokens) are compared with one rank that gets these tokens alone.
"""

from __future__ import annotations

import torch.distributed as dist

from verify.assembly import Part
from verify.evidence import Trouble
from verify.execution import execute
from verify.placements import batch_dim_of, placement_of
from verify.sessions import Session, perform, settle_own, settle_sum
from verify.staging import give

NO_PLACEMENT = "no placement declared"


def run_rank(session: Session, runs: int) -> None:
    """`runs` executions of all ranks together; `decision` compares the ranks' digests."""
    if session.stage.world == 1:
        _needs_ranks(session, "rank")
        return
    for index in range(runs):
        perform(session, "rank", "together", run=index, requested={"ranks": session.stage.world})


def run_ep(session: Session, runs: int) -> None:
    """Each degree that divides the ranks, and each rank's own tokens alone."""
    stage = session.stage
    degrees = [d for d in stage.case.ep if d in session.groups and d != stage.world]
    if stage.world == 1 or not degrees:
        _needs_ranks(session, "ep")
        return
    rounds = -(-runs // len(degrees))
    for index in range(rounds):
        for degree in degrees:
            _run_degree(session, degree, index)
    assert session.base is not None
    if any(_kind(session, name) == "local" for name in session.base.kept):
        _run_own_tokens(session, rounds)


def _run_degree(session: Session, degree: int, index: int) -> None:
    stage, base = session.stage, session.base
    assert base is not None
    group = session.groups[degree]
    given = give(stage, degree, stage.rank % degree)
    capture = execute(stage, given, group=group)
    expected, actual, skipped = {}, {}, {}
    for name, kept in base.kept.items():
        kind = _kind(session, name)
        if kind in (None, "local"):
            skipped[name] = NO_PLACEMENT if kind is None else "a rank's own, see own tokens"
        else:
            expected[name] = Part(kept, base.layouts[name], replicated=kind == "replicated")
    for name, tensor in capture.outputs.items():
        if name not in skipped:
            same = _kind(session, name) == "replicated"
            actual[name] = Part(tensor, capture.layouts[name], replicated=same)
    settle_sum(
        session,
        capture,
        claim="ep",
        variant=f"ep={degree}",
        run=index,
        expected=expected,
        actual=actual,
        group=group,
        not_compared=skipped,
        requested={"ep": degree},
        effective={"ep": dist.get_world_size(group) if group is not None else 1},
    )


def _run_own_tokens(session: Session, index: int) -> None:
    """This rank alone, degree 1, with the batch entries that it has in the base."""
    stage, base = session.stage, session.base
    assert base is not None
    given = give(stage, 1, 0, own_rows_of=base.given)
    capture = execute(stage, given, group=None, upstream=base.upstream)
    skipped: dict[str, str] = {}
    for name in list(capture.outputs):
        kept = base.kept.get(name)
        if kept is None or kept.shape != capture.outputs[name].shape or _whole_only(session, name):
            skipped[name] = "covers other tokens"
            capture.outputs.pop(name)
        else:
            capture.layouts[name] = base.layouts[name]
    settle_own(
        session,
        capture,
        claim="ep",
        variant="own tokens, ep=1",
        run=index,
        not_compared=skipped,
        same_inputs=False,
        requested={"ep": 1, "tokens": "this rank's"},
        effective={"ep": 1},
    )


def _kind(session: Session, name: str) -> str | None:
    placement = placement_of(session.stage.case.placement, name)
    return placement.kind if placement is not None else None


def _whole_only(session: Session, name: str) -> bool:
    """Sums over all tokens: replicated results, and shards along something else than tokens."""
    if _kind(session, name) == "local":
        return False
    return batch_dim_of(session.stage.case.batch, name) is None


def _needs_ranks(session: Session, claim: str) -> None:
    session.emit(
        Trouble(
            session.plan.case,
            "unsupported",
            "needs at least two ranks: --ranks 2"
            if claim == "rank"
            else f"needs a degree below the number of ranks that divides it: --ranks N (ranks"
            f" {session.stage.world}, degrees {list(session.stage.case.ep)})",
            claim=claim,
            rank=session.stage.rank,
        )
    )
