"""reference and exact: the base result against float64, and against an exactly known one.

The case gives both as functions of the whole problem's inputs and upstream gradients; `view` says
which part of it this rank has. One execution per claim is enough: nothing is repeated here, so
nothing is said about repeatability.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from verify.budgets import Reference, check
from verify.captures import Layout, digest_at
from verify.errors import CaseError
from verify.evidence import Failure, Trouble
from verify.execution import MAX_TRACEBACK, Capture, execute
from verify.inputs import generate
from verify.placements import lookup, placement_of, split
from verify.sessions import Session, explain, record
from verify.staging import Stage, batch_size


@dataclass(frozen=True)
class View:
    """What a reference may need to know of the rank that it is computed for.

    `rows` are the batch entries of the whole problem that this rank has.
    """

    rank: int
    ranks: int
    rows: slice


def run_reference(session: Session, runs: int) -> None:
    """One execution, measured against the case's float64 reference."""
    if not _given(session, "reference", session.stage.case.reference):
        return
    base = session.base
    assert base is not None
    capture = execute(session.stage, base.given, group=session.group)
    measurements: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    if capture.failure is None:
        try:
            _measure(session, capture, measurements, skipped)
        except Exception as error:
            _raised(session, "reference", error)
            return
    record(
        session,
        capture,
        claim="reference",
        variant="float64",
        run=0,
        compare="measured",
        outputs={name: base.digests[name] for name in measurements if name in base.digests},
        measurements=measurements,
        not_compared=skipped,
    )


def run_exact(session: Session, runs: int) -> None:
    """One execution, compared bit for bit with what the case says it must be."""
    if not _given(session, "exact", session.stage.case.exact):
        return
    base = session.base
    assert base is not None
    capture = execute(session.stage, base.given, group=session.group)
    wanted: dict[str, str] = {}
    outputs: dict[str, str] = {}
    skipped: dict[str, str] = {}
    differences: dict[str, Any] = {}
    try:
        expected = _expected(session, session.stage.case.exact)
        for name, tensor in capture.outputs.items():
            if name not in expected:
                skipped[name] = "the exact case does not give it"
                continue
            layout = capture.layouts[name]
            value = _part(expected[name], tensor, layout)
            outputs[name] = str(digest_at(tensor, layout))
            wanted[name] = str(digest_at(value, layout))
            if outputs[name] != wanted[name]:
                differences[name] = explain(value, tensor, name, "exact")
        for name in set(expected) - set(capture.outputs):
            wanted[name] = str(digest_at(expected[name], None))  # a lost output is a difference
    except Exception as error:
        _raised(session, "exact", error)
        return
    record(
        session,
        capture,
        claim="exact",
        variant="exact",
        run=0,
        compare="exact",
        outputs=outputs,
        expected=wanted,
        differences=differences,
        not_compared=skipped,
    )


def _measure(
    session: Session, capture: Capture, measurements: dict[str, Any], skipped: dict[str, str]
) -> None:
    """Every output that the reference gives, this rank's part of it."""
    expected = _expected(session, session.stage.case.reference)
    lost = sorted(set(expected) - set(capture.outputs))
    if lost:
        raise CaseError(f"the reference gives {', '.join(lost)}, but the case does not return it")
    for name, tensor in capture.outputs.items():
        if name not in expected:
            skipped[name] = "the reference does not give it"
            continue
        reference = expected[name]
        local = {
            part.name: _part(value, tensor, capture.layouts[name])
            for part in fields(Reference)
            if (value := getattr(reference, part.name)) is not None
        }
        measurements[name] = check(name, tensor, replace(reference, **local))


def _given(session: Session, claim: str, function: Any) -> bool:
    if function is None:
        _trouble(session, "no-reference", claim, f"the case gives no {claim}=...")
    return function is not None


def _raised(session: Session, claim: str, error: Exception) -> None:
    """The reference itself failed; the ranks stay in step."""
    text = traceback.format_exc()[-MAX_TRACEBACK:]
    session.agree(Failure(type(error).__name__, str(error), text))
    _trouble(session, "case-error", claim, f"{claim} raised {type(error).__name__}: {error}")


def _trouble(session: Session, reason: str, claim: str, detail: str) -> None:
    session.emit(Trouble(session.plan.case, reason, detail, claim=claim, rank=session.stage.rank))


def _expected(session: Session, function: Any) -> Mapping[str, Any]:
    stage, base = session.stage, session.base
    assert base is not None
    inputs = {name: tensor.detach().clone() for name, tensor in stage.tensors.items()}
    return dict(function(inputs, _whole_upstream(session), view_of(stage, base.given.layouts)))


def view_of(stage: Stage, layouts: Mapping[str, Layout | None]) -> View:
    """This rank's view of the whole problem."""
    entries = batch_size(stage)
    rows = slice(None) if entries is None else slice(0, entries)
    for name, layout in layouts.items():
        dim = lookup(stage.case.batch, name)
        if layout is not None and dim == layout.dim:
            placement = placement_of(stage.case.placement, name)
            assert placement is not None
            size = split(placement, layout.full_shape[dim], stage.world)[stage.rank]
            rows = slice(layout.start, layout.start + size)
    return View(stage.rank, stage.world, rows)


def _whole_upstream(session: Session) -> dict[str, Tensor]:
    """The upstream gradient of every differentiable output, for the whole problem."""
    base, case = session.base, session.stage.case
    assert base is not None
    return {
        name: generate(
            f"upstream.{name}",
            layout.full_shape if (layout := base.layouts[name]) is not None else tensor.shape,
            tensor.dtype,
            seed=case.seed,
        )
        for name, tensor in base.upstream.items()
    }


def _part(value: Tensor, actual: Tensor, layout: Layout | None) -> Tensor:
    """This rank's part of a whole value; a value without a layout is this rank's already."""
    if layout is None or tuple(value.shape) != layout.full_shape:
        return value
    return value.narrow(layout.dim, layout.start, actual.shape[layout.dim])
