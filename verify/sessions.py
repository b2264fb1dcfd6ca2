"""The run of one case in one process: the base execution, and every later one settled against it.

While an execution's tensors are alive they are compared with the base, digested, and on a
difference explained then and there: a rare fault must not have to happen twice. What leaves this
process are `Execution` records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from verify.allocations import devices_used, free_unused, look, other_streams
from verify.assembly import Part, differing_wholes, digest_parts
from verify.captures import Layout, facts_of, same_bits
from verify.evidence import BASE, FIRST, Execution, Facts, Failure, Plan, Record
from verify.execution import Capture, execute
from verify.explanation.telling import explain
from verify.hashing import digest_all
from verify.staging import Given, Stage, give

Effect = tuple[Mapping[str, Any], bool]
MAX_EXPLAINED = 4  # differing executions per claim that are explained in full


@dataclass
class Base:
    """The first execution: kept tensors, their digests, and what it was given.

    devices: CUDA devices on which it took memory. own_streams: how many streams other than torch's
    current ones had memory after it.
    """

    given: Given
    kept: dict[str, Tensor]
    layouts: dict[str, Layout | None]
    upstream: dict[str, Tensor]
    digests: dict[str, str]
    facts: dict[str, Facts]
    failure: Failure | None
    devices: tuple[int, ...] = ()
    own_streams: int = 0


@dataclass
class Session:
    """One case on one rank of one process. `agree` makes the ranks wait for each other and raises
    when another rank failed alone; `groups` maps a degree to this rank's subgroup."""

    stage: Stage
    plan: Plan
    emit: Callable[[Record], None]
    process: int = 0
    group: Any = None
    groups: Mapping[int, Any] = field(default_factory=dict)
    agree: Callable[[Failure | None], Failure | None] = lambda failure: failure
    trusted: Mapping[str, str] | None = None  # base digests of another process, to compare with
    load_trusted: Callable[[str], Tensor | None] = lambda name: None
    golden: Path | None = None  # the folder of goldens
    keep_golden: Path | None = None  # where to put what a golden of this case would hold
    base: Base | None = None
    explained: dict[str, int] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        return list(range(self.stage.world))


def first(session: Session) -> Base:
    """The base execution. In a fresh process it is settled against the main process's digests."""
    stage = session.stage
    given = give(stage, stage.world, stage.rank)
    free_unused()  # with what the setup left free a stream of the case's own would not show
    before = look()
    capture = execute(stage, given, group=session.group)
    started, after = time.perf_counter(), look()
    failure = session.agree(capture.failure)
    digests = _digests(capture)
    base = Base(
        given,
        {name: tensor.clone() for name, tensor in capture.outputs.items()},
        capture.layouts,
        capture.upstream,
        digests,
        {name: facts_of(tensor) for name, tensor in capture.outputs.items()},
        failure,
        devices_used(before, after),
        other_streams(before, after),
    )
    session.base = base
    differences = {}
    if session.trusted is not None:
        for name, text in digests.items():
            kept = session.load_trusted(name) if session.trusted.get(name) != text else None
            if kept is not None:
                differences[name] = explain(kept, base.kept[name], name, "process")
    session.emit(
        Execution(
            case=session.plan.case,
            claim=BASE if session.trusted is None else "process",
            variant=FIRST if session.trusted is None else f"process {session.process}",
            rank=stage.rank,
            run=0,
            process=session.process,
            group=session.ranks,
            inputs=given.digests(),
            mutated=capture.mutated,
            outputs=digests,
            facts=base.facts,
            differences=differences,
            effective={"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "random")},
            not_compared=dict.fromkeys(capture.ignored, "no tensor"),
            generator=capture.after,
            consumed=_consumed(capture),
            failure=failure,
            seconds=capture.seconds,
            overhead=capture.overhead + time.perf_counter() - started,
        )
    )
    return base


def perform(
    session: Session,
    claim: str,
    variant: str,
    *,
    run: int = 0,
    arm: str = "restored",
    kwargs: Mapping[str, Any] | None = None,
    requested: Mapping[str, Any] | None = None,
    effective: Effect | Callable[[], Effect] | None = None,
) -> Capture:
    """One more execution with the base's inputs, settled against this rank's own base.

    effective: what was in effect and whether it was what was requested; a function is called right
    after the execution. After an execution that failed what it raises is passed over.
    """
    base = session.base
    assert base is not None
    capture = execute(
        session.stage,
        base.given,
        group=session.group,
        arm=arm,
        kwargs=kwargs,
        upstream=base.upstream,
    )
    in_effect, held = _told(effective, capture)
    settle_own(
        session,
        capture,
        claim=claim,
        variant=variant,
        run=run,
        arm=arm,
        requested=requested or {},
        effective=in_effect,
        in_effect=held,
    )
    return capture


def _told(effective: Effect | Callable[[], Effect] | None, capture: Capture) -> Effect:
    """What was in effect. After a CUDA error the device answers nothing any more; the failure of
    the case is then what has to be told."""
    if not callable(effective):
        return effective or ({}, True)
    try:
        return effective()
    except Exception:
        if capture.failure is None:
            raise
        return {}, False


def settle_own(session: Session, capture: Capture, *, claim: str, **fields: Any) -> None:
    """Compares with this rank's base while the tensors live, and emits the record."""
    base = session.base
    assert base is not None
    started = time.perf_counter()
    failure = session.agree(capture.failure)
    outputs: dict[str, str] = {}
    differing: list[str] = []
    unknown: list[str] = []
    for name, tensor in capture.outputs.items():
        kept = base.kept.get(name)
        if kept is not None and capture.layouts[name] == base.layouts[name]:
            if same_bits(tensor, kept):
                outputs[name] = base.digests[name]  # the same bits have the same digest
                continue
            differing.append(name)
        unknown.append(name)
    outputs |= _digests(capture, unknown)
    outputs = {name: outputs[name] for name in capture.outputs}
    differences = {}
    if differing and session.explained.get(claim, 0) < MAX_EXPLAINED:
        session.explained[claim] = session.explained.get(claim, 0) + 1
        differences = {
            name: explain(base.kept[name], capture.outputs[name], name, claim) for name in differing
        }
    _emit(session, capture, claim, outputs, failure, started, differences=differences, **fields)


def settle_sum(
    session: Session,
    capture: Capture,
    *,
    claim: str,
    expected: Mapping[str, Part],
    actual: Mapping[str, Part],
    group: Any,
    **fields: Any,
) -> None:
    """Records this rank's parts of what came out and of what the base says it should be.

    The parts' digests add up over ranks; tensors are gathered only to explain sums that differ.
    """
    started = time.perf_counter()
    failure = session.agree(capture.failure)
    outputs, wanted = digest_parts(actual), digest_parts(expected)
    differences: dict[str, Any] = {}
    if failure is None:
        pairs = differing_wholes(session, expected, wanted, actual, outputs, group)
        differences = {name: explain(*pair, name, claim) for name, pair in pairs.items()}
    _emit(
        session,
        capture,
        claim,
        {name: str(digest) for name, digest in outputs.items()},
        failure,
        started,
        compare="sum",
        expected={name: str(digest) for name, digest in wanted.items()},
        group=dist.get_process_group_ranks(group) if group is not None else [session.stage.rank],
        same_inputs=False,
        differences=differences,
        **fields,
    )


def record(session: Session, capture: Capture, *, claim: str, **fields: Any) -> None:
    """Emits an execution whose outputs are judged by `measurements` or `expected`, or not at all.

    failure: what the ranks agreed on right after the execution, where judging takes its time; they
    agree here otherwise.
    """
    started = time.perf_counter()
    failure = fields.pop("failure") if "failure" in fields else session.agree(capture.failure)
    _emit(session, capture, claim, fields.pop("outputs", {}), failure, started, **fields)


def _digests(capture: Capture, names: Iterable[str] | None = None) -> dict[str, str]:
    """Digests of a capture's outputs, or of those named, all of them together."""
    chosen = {name: capture.outputs[name] for name in (capture.outputs if names is None else names)}
    return {name: str(digest) for name, digest in digest_all(chosen, capture.layouts).items()}


def _consumed(capture: Capture) -> list[str]:
    return sorted(n for n, state in capture.after.items() if capture.before.get(n) != state)


def _emit(
    session: Session,
    capture: Capture,
    claim: str,
    outputs: Mapping[str, str],
    failure: Failure | None,
    started: float,
    **fields: Any,
) -> None:
    base = session.base
    assert base is not None
    fields.setdefault("inputs", base.given.digests() if fields.get("same_inputs", True) else {})
    fields.setdefault("group", session.ranks)
    session.emit(
        Execution(
            case=session.plan.case,
            claim=claim,
            rank=session.stage.rank,
            process=session.process,
            mutated=capture.mutated,
            outputs=outputs,
            generator=capture.after,
            consumed=_consumed(capture),
            failure=failure,
            seconds=capture.seconds,
            overhead=capture.overhead + time.perf_counter() - started,
            **fields,
        )
    )


def group_size(group: Any) -> int:
    """Ranks in a torch.distributed group; None is one rank."""
    return dist.get_world_size(group) if group is not None else 1
