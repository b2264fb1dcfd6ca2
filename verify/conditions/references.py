"""reference and exact: the base result against float64, and against an exactly known one.

The case gives both as functions of the whole problem's inputs and upstream gradients; `view` says
which part of it this rank has. One execution per claim is enough: nothing is repeated here, so
nothing is said about repeatability. A result that does not fit is explained while its tensors live;
a reference that is no float64 computation judges nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from torch import Tensor

from verify.budgets import Judged, Reference, judge, measure
from verify.captures import Layout, digest_at, same_bits
from verify.comparison import differing
from verify.conditions import diagnosis
from verify.errors import CaseError
from verify.evidence import Trouble
from verify.execution import Capture, execute
from verify.explanation import hypotheses, reference_errors, self_checks
from verify.explanation.telling import explain, explained
from verify.inputs import generate
from verify.placements import lookup, placement_of, split
from verify.sessions import Session, record
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
    function = session.stage.case.reference
    _run(session, "reference", function, _measure, variant="float64", compare="measured")


def run_exact(session: Session, runs: int) -> None:
    """One execution, compared bit for bit with what the case says it must be."""
    function = session.stage.case.exact
    _run(session, "exact", function, _compare, variant="exact", compare="exact")


def _run(
    session: Session,
    claim: str,
    function: Any,
    judging: Callable[[Session, Capture], dict[str, Any]],
    **fields: Any,
) -> None:
    """Executes and judges once. Whether the execution went well is agreed on right after it, not
    after the reference, for which a rank that failed would wait in vain."""
    if function is None:
        _trouble(session, "no-reference", claim, f"the case gives no {claim}=...")
        return
    base, raised = session.base, None
    assert base is not None
    capture = execute(session.stage, base.given, group=session.group)
    failure = session.agree(capture.failure)
    if failure is None:
        try:
            fields |= judging(session, capture)
        except Exception as error:
            raised = error
    session.agree(None)  # the next execution begins on all ranks, however long each has judged
    if raised is not None:
        detail = f"{claim} raised {type(raised).__name__}: {raised}"
        _trouble(session, "case-error", claim, detail)
        return
    record(session, capture, claim=claim, run=0, failure=failure, **fields)


def _compare(session: Session, capture: Capture) -> dict[str, Any]:
    """The digests of every output that is expected, and of what it must be."""
    outputs: dict[str, str] = {}
    wanted: dict[str, str] = {}
    skipped: dict[str, str] = {}
    differing_: dict[str, Tensor] = {}
    function = session.stage.case.exact
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
            differing_[name] = value
    for name in set(expected) - set(capture.outputs):
        wanted[name] = str(digest_at(expected[name], None))  # a lost output is a difference
    return {
        "outputs": outputs,
        "expected": wanted,
        "not_compared": skipped,
        "differences": _explain_exact(session, capture, differing_, seconds),
    }


def _explain_exact(
    session: Session, capture: Capture, values: Mapping[str, Tensor], seconds: float
) -> dict[str, Any]:
    """By output that differs from its value, what `explain` says, where it is, and likely causes.

    seconds: what one call of the exact case takes.
    """
    function = session.stage.case.exact
    wrong: dict[str, Tensor] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        tensor = capture.outputs[name]
        found[name] = explain(value, tensor, name, "exact")
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            continue
        try:
            wrong[name] = differing(value, tensor)
            diagnosis.add_places(found[name], wrong[name], value, tensor)
        except Exception as error:
            found[name]["lines"] = [*found[name]["lines"], f"its places are not told: {error}"]

    def fits(inputs: Mapping[str, Tensor]) -> dict[str, str]:
        other = expected_of(session, function, inputs)
        parts = {n: _part(other[n], capture.outputs[n], capture.layouts[n]) for n in wrong}
        return {n: "every bit" for n in wrong if same_bits(parts[n], capture.outputs[n])}

    prefix = "is what is expected with"
    causes, untold = diagnosis.causes(session.stage, wrong, fits, prefix, seconds)
    for name in wrong:
        found[name]["suggests"] = [*causes.get(name, ()), *found[name]["suggests"]]
        found[name]["lines"] = [*found[name]["lines"], *untold]
    return found


def _digest(session: Session, capture: Capture, name: str) -> str:
    """Of what was measured; equal bits have the base's digest."""
    base, tensor = session.base, capture.outputs[name]
    assert base is not None
    kept = base.kept.get(name)
    if kept is not None and same_bits(tensor, kept) and name in base.digests:
        return base.digests[name]
    return str(digest_at(tensor, capture.layouts[name]))


def _measure(session: Session, capture: Capture) -> dict[str, Any]:
    """Every output that the reference gives, this rank's part of it; and why it does not fit.

    A reference that is called in little time is called twice, also where all outputs fit it: what a
    weak one lets pass is no pass. That is the cost of this claim, and it is not spared.
    """
    function = session.stage.case.reference
    measurements: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    judged: dict[str, Judged] = {}
    started = time.monotonic()
    expected = expected_of(session, function)
    seconds = time.monotonic() - started
    lost = sorted(set(expected) - set(capture.outputs))
    if lost:
        raise CaseError(f"the reference gives {', '.join(lost)}, but the case does not return it")
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
    weak = diagnosis.weak_references(session.stage, expected, again, dtypes)
    for name, why in weak.items():
        _trouble(session, "weak-reference", "reference", f"reference of {name}: {why}")
        measurements.pop(name, None)
        judged.pop(name, None)
        skipped[name] = "its reference is weak"
    return {
        "outputs": {name: _digest(session, capture, name) for name in measurements},
        "measurements": measurements,
        "not_compared": skipped,
        "differences": _explain_errors(session, capture, judged, seconds),
    }


def _explain_errors(
    session: Session, capture: Capture, judged: Mapping[str, Judged], seconds: float
) -> dict[str, Any]:
    """By output that does not fit its reference, where and how, and likely causes."""
    function = session.stage.case.reference
    wrong = {name: found.wrong for name, found in judged.items()}

    def fits(inputs: Mapping[str, Tensor]) -> dict[str, str]:
        other, fitting = expected_of(session, function, inputs), {}
        for name in wrong:
            tensor = capture.outputs[name]
            tried = judge(name, tensor, _local(other[name], tensor, capture.layouts[name]))
            if not bool(tried.wrong.any()):
                fitting[name] = f"worst error / budget {float(tried.ratio.max()):.2g}"
        return fitting

    prefix = "fits the reference with"
    causes, untold = diagnosis.causes(session.stage, wrong, fits, prefix, seconds)
    found = {}
    for name, one in judged.items():
        known, tensor = causes.get(name, ()), capture.outputs[name]
        said = explained(partial(reference_errors.explain_errors, name, tensor, one, known))
        found[name] = {**said, "lines": [*said["lines"], *untold]}
    return found


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
            device=tensor.device,
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
    """This rank's part of a whole value, on the device of `actual`; a value without a layout is
    this rank's already."""
    value = value.to(actual.device)
    if layout is None or tuple(value.shape) != layout.full_shape:
        return value
    return value.narrow(layout.dim, layout.start, actual.shape[layout.dim])
