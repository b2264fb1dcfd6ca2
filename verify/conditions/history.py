"""history: after other calls. And two probes of what such calls reveal about the case itself.

A result must not depend on what was called before: other inputs, a smaller batch, inference. The
call with other inputs also shows whether outputs respond to inputs at all (a cached result does
not), and whether a result that the caller still holds is overwritten (a shared workspace).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from verify.captures import same_bits
from verify.evidence import BASE, PROBE
from verify.execution import Capture, execute
from verify.sessions import Session, perform, record
from verify.staging import batch_size, give

LATER_CALLS = 3


def probe(session: Session) -> None:
    """One call with other inputs while an earlier result is held; always run, for every case."""
    stage, base = session.stage, session.base
    assert base is not None
    held = execute(stage, base.given, group=session.group)
    session.agree(held.failure)
    kept = {name: tensor.clone() for name, tensor in held.outputs.items()}
    other = _other_inputs(session, other_modules=True)
    unchanged = []
    varied = stage.case.inputs or any(t.is_floating_point() for t in stage.tensors.values())
    if varied and other.failure is None:
        unchanged = [
            name
            for name, tensor in other.outputs.items()
            if name in kept and tensor.numel() > 0 and same_bits(tensor, kept[name])
        ]
    elif other.failure is None:
        # nothing to vary: the same memory handed out twice is the only sign, except a module's
        owned = [kept.live for state in stage.module_state.values() for kept in state.values()]
        unchanged = [
            name
            for name, tensor in other.outputs.items()
            if name in held.outputs
            and _same_memory(tensor, held.outputs[name])
            and not any(_same_memory(tensor, one) for one in owned)
        ]
    for _ in range(LATER_CALLS):
        # a workspace that is used in turn overwrites the result some calls later
        session.agree(_other_inputs(session).failure)
    overwritten = [
        name for name, tensor in held.outputs.items() if not same_bits(tensor, kept[name])
    ]
    record(
        session,
        other,
        claim=BASE,
        variant=PROBE,
        run=1,
        compare="none",
        same_inputs=False,
        overwritten=overwritten,
        unchanged=unchanged,
        requested={"inputs": f"seed {stage.case.seed + 1}" if varied else "the same"},
    )


def run(session: Session, runs: int) -> None:
    """At least `runs` executions, each right after another kind of call."""
    kinds = ["other inputs"]
    if batch_size(session.stage):
        kinds.append("smaller batch")
    kinds.append("inference")
    for index in range(max(runs, len(kinds))):
        kind = kinds[index % len(kinds)]
        before = {
            "other inputs": _other_inputs,
            "smaller batch": _smaller_batch,
            "inference": _inference,
        }[kind](session)
        failed = session.agree(before.failure) is not None
        if failed and kind == "other inputs" and not session.stage.case.inputs:
            # arguments of unknown meaning may not bear other content
            kind, before = "the same inputs", _same_inputs(session)
            failed = session.agree(before.failure) is not None
        if failed and kind == "inference":
            # a case that takes its own gradients has no inference; ranks decide alike
            kind, before = "other inputs", _other_inputs(session)
            failed = session.agree(before.failure) is not None
        perform(
            session,
            "history",
            f"after {kind}",
            run=index,
            requested={"before": kind},
            effective=partial(_in_effect, failed),
        )


def _other_inputs(session: Session, *, other_modules: bool = False) -> Capture:
    stage = session.stage
    seed = stage.case.seed + 1
    given = give(stage, stage.world, stage.rank, seed=seed)
    return execute(stage, given, group=session.group, seed=seed, other_modules=other_modules)


def _same_inputs(session: Session) -> Capture:
    assert session.base is not None
    return execute(session.stage, session.base.given, group=session.group)


def _smaller_batch(session: Session) -> Capture:
    stage = session.stage
    rows = torch.arange((batch_size(stage) or 1) // 2)
    return execute(stage, give(stage, stage.world, stage.rank, rows=rows), group=session.group)


def _inference(session: Session) -> Capture:
    assert session.base is not None
    with torch.no_grad():
        return execute(session.stage, session.base.given, group=session.group)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _in_effect(failed: bool) -> tuple[dict[str, Any], bool]:
    return {"before": "raised" if failed else "ran"}, not failed
