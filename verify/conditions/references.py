"""reference and exact: the base result against float64, and against an exactly known one.

The case gives both as functions of the whole problem's inputs and upstream gradients; `view` says
which part of it this rank has. One execution per claim is enough: nothing is repeated here, so
nothing is said about repeatability. A result that does not fit is explained while its tensors live;
a reference that is no float64 computation judges nothing.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from verify.budgets import Reference, judge, measure
from verify.captures import Layout, digest_at, same_bits
from verify.comparison import differing
from verify.conditions import diagnosis
from verify.errors import CaseError
from verify.evidence import Failure, Trouble
from verify.execution import MAX_TRACEBACK, Capture, execute
from verify.explanation import hypotheses, reference_errors, self_checks
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
    differences: dict[str, Any] = {}
    if capture.failure is None:
        try:
            _measure(session, capture, measurements, skipped, differences)
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
        outputs={name: _digest(session, capture, name) for name in measurements},
        measurements=measurements,
        differences=differences,
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
    wrong: dict[str, Tensor] = {}
    function = session.stage.case.exact
    try:
        started = time.monotonic()
        expected = expected_of(session, function)
        seconds = time.monotonic() - started
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
                if tensor.shape == value.shape and tensor.dtype == value.dtype:
                    wrong[name] = differing(value, tensor)
                    diagnosis.add(differences[name], wrong[name], value, tensor)

        def fits(inputs: Mapping[str, Tensor]) -> dict[str, str]:
            other = expected_of(session, function, inputs)
            parts = {n: _part(other[n], capture.outputs[n], capture.layouts[n]) for n in wrong}
            return {n: "every bit" for n in wrong if same_bits(parts[n], capture.outputs[n])}

        with suppress(Exception):  # what could not be explained is no less wrong
            said = diagnosis.causes(session.stage, wrong, fits, "is what is expected with", seconds)
            for name in wrong:
                differences[name]["suggests"] = [*said[name], *differences[name]["suggests"]]
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


def _digest(session: Session, capture: Capture, name: str) -> str:
    """Of what was measured; equal bits have the base's digest."""
    base, tensor = session.base, capture.outputs[name]
    assert base is not None
    kept = base.kept.get(name)
    if kept is not None and same_bits(tensor, kept) and name in base.digests:
        return base.digests[name]
    return str(digest_at(tensor, capture.layouts[name]))


def _measure(
    session: Session,
    capture: Capture,
    measurements: dict[str, Any],
    skipped: dict[str, str],
    differences: dict[str, Any],
) -> None:
    """Every output that the reference gives, this rank's part of it; and why it does not fit."""
    function = session.stage.case.reference
    started = time.monotonic()
    expected = expected_of(session, function)
    seconds = time.monotonic() - started
    lost = sorted(set(expected) - set(capture.outputs))
    if lost:
        raise CaseError(f"the reference gives {', '.join(lost)}, but the case does not return it")
    judged = {}
    for name, tensor in capture.outputs.items():
        if name not in expected:
            skipped[name] = "the reference does not give it"
            continue
        reference = _local(expected[name], tensor, capture.layouts[name])
        found = judge(name, tensor, reference)
        measurements[name] = measure(found, reference.plain)
        if bool(found.wrong.any()):  # eight tensors of this size: kept where they are needed
            judged[name] = found
    again: Mapping[str, Any] = {}
    if seconds <= hypotheses.SECONDS:  # and no objection when it cannot take such inputs
        with suppress(Exception):
            again = expected_of(session, function, change=self_checks.widened)
    dtypes = {name: tensor.dtype for name, tensor in capture.outputs.items()}
    for name, why in diagnosis.weak(session.stage, expected, again, dtypes).items():
        _trouble(session, "weak-reference", "reference", f"reference of {name}: {why}")
        measurements.pop(name, None)
        skipped[name] = "its reference is weak"
    wrong = {name: found.wrong for name, found in judged.items() if name in measurements}

    def fits(inputs: Mapping[str, Tensor]) -> dict[str, str]:
        other, fitting = expected_of(session, function, inputs), {}
        for name in wrong:
            tensor = capture.outputs[name]
            tried = judge(name, tensor, _local(other[name], tensor, capture.layouts[name]))
            if not bool(tried.wrong.any()):
                fitting[name] = f"worst error / budget {float(tried.ratio.max()):.2g}"
        return fitting

    try:
        causes = diagnosis.causes(session.stage, wrong, fits, "fits the reference with", seconds)
        for name in wrong:
            differences[name] = reference_errors.explain_errors(
                name, capture.outputs[name], judged[name], causes[name]
            )
    except Exception as error:  # what could not be explained is no less wrong
        why = f"not explained: {type(error).__name__}: {error}"
        for name in wrong:
            differences.setdefault(name, {"lines": [why], "suggests": []})


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


def expected_of(
    session: Session,
    function: Any,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
) -> Mapping[str, Any]:
    """What the case's function says of the whole problem, or of other inputs than its own.

    change: made of inputs and upstream gradients before.
    """
    stage, base = session.stage, session.base
    assert base is not None
    given = stage.tensors if tensors is None else tensors
    inputs = {name: tensor.detach().clone() for name, tensor in given.items()}
    upstream = _whole_upstream(session)
    return dict(function(change(inputs), change(upstream), view_of(stage, base.given.layouts)))


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


def _local(reference: Reference, actual: Tensor, layout: Layout | None) -> Reference:
    """This rank's part of a reference."""
    parts = {
        part.name: _part(value, actual, layout)
        for part in fields(Reference)
        if (value := getattr(reference, part.name)) is not None
    }
    return replace(reference, **parts)


def _part(value: Tensor, actual: Tensor, layout: Layout | None) -> Tensor:
    """This rank's part of a whole value; a value without a layout is this rank's already."""
    if layout is None or tuple(value.shape) != layout.full_shape:
        return value
    return value.narrow(layout.dim, layout.start, actual.shape[layout.dim])
