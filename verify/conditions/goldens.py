"""golden: the base's inputs once more, and the result against what is stored of the whole problem.

A golden is made on one rank and holds the whole; every rank compares its part of it, and none
executes unless all have found what to compare with. Bits are compared with the thread count that
they were made with. On a difference the stored tensor and the live one are both there, so the place
and both bit patterns are said at once. A missing golden, one of another environment or of other
inputs leaves the claim UNVERIFIED; it never makes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verify.budgets import Judged, Reference, judge, measure
from verify.captures import Layout, digest_at
from verify.conditions import golden_changes, references
from verify.conditions.golden_entries import Found, inputs_digest, look_up, rank_local, trouble
from verify.decision.agreement import NO_PLACEMENT
from verify.digests import Digest
from verify.environment import environment
from verify.errors import VerifyError
from verify.evidence import Failure
from verify.execution import Capture, execute
from verify.explanation import reference_errors
from verify.explanation.telling import explain, explained
from verify.goldens import keys, packing
from verify.goldens.store import Entry
from verify.placements import placement_of
from verify.sessions import Session, record

_OWN_PART = "a rank's own part; the golden holds the whole"
_OWN_INPUT = "a rank-local input; the golden was made with the whole"


def run(session: Session, runs: int) -> None:
    """One execution, compared with the stored golden of the case."""
    case, base = session.stage.case, session.base
    assert base is not None
    if not case.golden:
        trouble(session, "no-golden", f"case {case.name!r} declares no golden=...")
        return
    found = _in_step(session)
    if found is None:
        return
    entry, stored = found
    threads = golden_changes.threads_of(entry) if case.golden == "bits" else None
    with golden_changes.threads_set(threads):
        capture = execute(session.stage, base.given, group=session.group)
        used = torch.get_num_threads()
    failure = session.agree(capture.failure)
    fields: dict[str, Any] = {"compare": "exact"}
    if threads is not None:
        fields |= {"requested": {"num_threads": threads}, "effective": {"num_threads": used}}
    raised = None
    if failure is None:
        _unknown(session, capture, entry)
        since = golden_changes.since_of(session, entry, threads)
        judging = _measure if case.golden == "float64" else _compare
        own = rank_local(session.stage) if session.stage.world > 1 else []
        try:
            fields |= judging(session, capture, stored, since)
            fields["not_compared"] |= {f"input {name}": _OWN_INPUT for name in own}
        except Exception as error:
            raised = error
    session.agree(None)  # the next execution begins on all ranks, however long each has judged
    if raised is not None:
        trouble(session, "case-error", f"golden raised {type(raised).__name__}: {raised}")
        return
    record(session, capture, claim="golden", variant=case.golden, run=0, failure=failure, **fields)


def keep(session: Session, path: Path) -> None:
    """Stores what a golden of this case would hold, for `recording` to judge and to write.

    The file is a mapping: tensors, outputs (dtypes), inputs, key, made.
    """
    base, case = session.base, session.stage.case
    assert base is not None
    if case.golden == "float64":
        tensors = packing.pack_reference(references.expected_of(session, case.reference))
    else:
        tensors = {name: tensor.cpu() for name, tensor in base.kept.items()}
    record_ = environment()
    devices = tuple(sorted({tensor.device.type for tensor in base.kept.values()}))
    kept = {
        "tensors": tensors,
        "outputs": {n: str(t.dtype).removeprefix("torch.") for n, t in base.kept.items()},
        "inputs": inputs_digest(session.stage),
        "key": keys.key_of(record_, devices) if case.golden == "bits" else None,
        "made": keys.provenance(record_),
    }
    unfinished = path.with_suffix(".partial")
    torch.save(kept, unfinished)
    unfinished.replace(path)


def _in_step(session: Session) -> Found | None:
    """What to compare with, if every rank has it: an execution needs all of them."""
    found, error = None, None
    try:
        found = look_up(session)
    except VerifyError as raised:
        error = raised
    missing = None if found else Failure("NoGolden", "nothing to compare with", "")
    # looking may take long, and who failed waits for the others but briefly: first be there
    failure = session.agree(None) or session.agree(missing)
    if error is not None:
        if session.stage.world == 1:
            raise error
        trouble(session, "case-error", str(error))
    elif failure is not None and failure.type == "PeerLost":
        trouble(session, "missing-rank", failure.message)
    return found if failure is None else None


def _unknown(session: Session, capture: Capture, entry: Entry) -> None:
    """Outputs that were not there when the golden was made.

    A float64 golden knows by name those that its reference does not give.
    """
    extra = sorted(set(capture.outputs) - set(entry.outputs))
    if extra:
        trouble(session, "no-golden", f"not in the golden: {', '.join(extra)}; make it again")


def _compare(
    session: Session,
    capture: Capture,
    stored: Mapping[str, Tensor],
    since: golden_changes.Since,
) -> dict[str, Any]:
    outputs: dict[str, str] = {}
    wanted = {n: since.entry.tensors[n] for n in stored if n not in capture.outputs}
    skipped: dict[str, str] = {}
    differences: dict[str, Any] = {}
    for name, tensor in capture.outputs.items():
        if name not in stored:
            continue
        layout = capture.layouts[name]
        apart = _apart(session, name, layout)
        if apart is not None:
            skipped[name] = apart
            continue
        whole = stored[name].to(tensor.device)
        fits = layout is not None and tuple(whole.shape) == layout.full_shape
        part = _part(whole, tensor, layout)
        outputs[name] = str(digest_at(tensor, layout))
        wanted[name] = str(digest_at(part, layout if fits else None))
        if outputs[name] != wanted[name]:
            found = explain(part, tensor, name, "golden")
            about = explained(partial(_told, since, name, part, tensor))
            differences[name] = {**found, "lines": [*found["lines"], *about["lines"]]}
    return {
        "outputs": outputs,
        "expected": wanted,
        "differences": differences,
        "not_compared": skipped,
    }


def _told(since: golden_changes.Since, name: str, golden: Tensor, actual: Tensor) -> dict[str, Any]:
    return {"lines": golden_changes.told(since, name, golden, actual)}


def _measure(
    session: Session,
    capture: Capture,
    stored: Mapping[str, Tensor],
    since: golden_changes.Since,
) -> dict[str, Any]:
    """Judges by budget what has the dtype and shape that the golden knows; other dtypes or shapes
    and outputs that are gone are differences by themselves, which no budget excuses."""
    known, dtypes = packing.unpack_reference(stored), since.entry.outputs
    measurements: dict[str, Any] = {}
    differences: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    outputs: dict[str, str] = {}
    wanted: dict[str, str] = {}
    for name in sorted({*known, *dtypes} - set(capture.outputs)):
        shape = tuple(known[name].exact.shape) if name in known else ()
        wanted[name] = str(Digest.zero(dtypes.get(name, "float64"), shape))
    for name, tensor in capture.outputs.items():
        layout = capture.layouts[name]
        apart = _apart(session, name, layout)
        if name not in known or apart is not None:
            skipped[name] = apart or "the golden does not hold it"
            continue
        digest = digest_at(tensor, layout)
        outputs[name] = str(digest)
        dtype, shape = dtypes.get(name, digest.dtype), tuple(known[name].exact.shape)
        if (digest.dtype, digest.shape) != (dtype, shape):
            wanted[name] = str(Digest.zero(dtype, shape))
            continue
        judged = _judged(name, known[name], tensor, layout)
        measurements[name] = measure(judged)
        if bool(judged.wrong.any()):
            found = explained(partial(reference_errors.explain_errors, name, tensor, judged))
            about = explained(lambda: {"lines": [*since.changed()]})
            differences[name] = {**found, "lines": [*found["lines"], *about["lines"]]}
    return {
        "compare": "exact" if wanted else "measured",
        "outputs": outputs,
        "expected": wanted if wanted else None,
        "measurements": measurements,
        "differences": differences,
        "not_compared": skipped,
    }


def _judged(name: str, stored: Reference, tensor: Tensor, layout: Layout | None) -> Judged:
    parts = {
        part: _part(getattr(stored, part).to(tensor.device), tensor, layout)
        for part in packing.PARTS
    }
    return judge(name, tensor, Reference(**parts))


def _apart(session: Session, name: str, layout: Layout | None) -> str | None:
    """Why a rank cannot compare an output with the whole, or None when it can."""
    if session.stage.world == 1:
        return None
    placement = placement_of(session.stage.case.placement, name)
    if placement is None:
        return NO_PLACEMENT
    unplaced = placement.kind == "sharded" and layout is None  # of a module: nobody knows where
    return _OWN_PART if placement.kind == "local" or unplaced else None


def _part(whole: Tensor, actual: Tensor, layout: Layout | None) -> Tensor:
    """This rank's part of a stored tensor; the whole when it has another shape than today's."""
    if layout is not None and tuple(whole.shape) == layout.full_shape:
        return whole.narrow(layout.dim, layout.start, actual.shape[layout.dim])
    return whole
