"""golden: the base's inputs once more, and the result against what is stored of the whole problem.

A golden is made on one rank and holds the whole; every rank compares its part of it. On a
difference the stored tensor and the live one are both there, so the place, both bit patterns and
what has changed since (code, versions, threads) are said at once. A missing golden, one of another
environment or of other inputs leaves the claim UNVERIFIED; it never makes one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verify import plans
from verify.budgets import Judged, Reference, judge, measure
from verify.captures import Layout, digest_at
from verify.conditions import references
from verify.decision.agreement import NO_PLACEMENT
from verify.digests import Digest
from verify.environment import environment
from verify.evidence import Trouble
from verify.execution import Capture, execute
from verify.explanation import reference_errors
from verify.goldens import keys, likely, packing, store
from verify.hashing import digest_tensor
from verify.placements import placement_of
from verify.sessions import Session, explain, record
from verify.staging import Stage

_MOST_THREADS = 1024
_OWN_PART = "a rank's own part; the golden holds the whole"


def run(session: Session, runs: int) -> None:
    """One execution, compared with the stored golden of the case."""
    case = session.stage.case
    if not case.golden:
        _trouble(session, "no-golden", f"case {case.name!r} declares no golden=...")
        return
    entry = _entry(session)
    if entry is None:
        return
    assert session.golden is not None
    assert session.base is not None
    stored = packing.load(session.golden, entry)
    capture = execute(session.stage, session.base.given, group=session.group)
    _unknown(session, capture, entry)
    if case.golden == "float64":
        _measure(session, capture, packing.unpack_reference(stored), entry)
    else:
        _compare(session, capture, stored, entry)


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
    partial = path.with_suffix(".partial")
    torch.save(kept, partial)
    partial.replace(path)


def inputs_digest(stage: Stage) -> str:
    """One digest of everything that the whole problem is given: tensors, modules, seed."""
    given = {name: str(digest_tensor(tensor)) for name, tensor in stage.tensors.items()}
    for module, state in stage.module_state.items():
        given |= {f"{module}.{name}": str(digest_tensor(k.content)) for name, k in state.items()}
    text = json.dumps([stage.case.seed, sorted(given.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def _entry(session: Session) -> store.Entry | None:
    """The entry to compare with, or None after saying why there is none."""
    case = session.stage.case
    if session.golden is None:
        _trouble(session, "no-golden", "no folder of goldens was given: --golden DIR")
        return None
    entries = store.read(session.golden).of(case.name, case.golden)
    if not entries:
        where = os.path.relpath(session.golden)
        detail = f"{where} holds no golden of kind {case.golden} for {case.name!r}"
        _trouble(session, "no-golden", detail)
        return None
    entry: store.Entry | None = entries[0]
    if case.golden == "bits":
        devices = tuple(sorted({t.device.type for t in session.base.kept.values()}))  # type: ignore[union-attr]
        key = keys.key_of(environment(), devices)
        entry = next((one for one in entries if dict(one.key or {}) == key), None)
        if entry is None:
            known = [one.key or {} for one in entries]
            detail = f"no golden for this environment; nearest: {', '.join(_nearest(key, known))}"
            _trouble(session, "env-unknown", detail)
            return None
    assert entry is not None
    if entry.inputs != inputs_digest(session.stage):
        detail = "the golden was made from other inputs (seed, shapes, weights): make it again"
        _trouble(session, "input-mismatch", detail)
        return None
    return entry


def _nearest(key: Mapping[str, str], known: list[Mapping[str, str]]) -> list[str]:
    return keys.nearest(key, known)


def _unknown(session: Session, capture: Capture, entry: store.Entry) -> None:
    """Outputs that were not there when the golden was made.

    A float64 golden knows by name those that its reference does not give.
    """
    extra = sorted(set(capture.outputs) - set(entry.outputs))
    if extra:
        _trouble(session, "no-golden", f"not in the golden: {', '.join(extra)}; make it again")


def _compare(
    session: Session, capture: Capture, stored: Mapping[str, Tensor], entry: store.Entry
) -> None:
    outputs: dict[str, str] = {}
    wanted: dict[str, str] = {}
    skipped: dict[str, str] = {}
    differences: dict[str, Any] = {}
    then = functools.cache(lambda: _with_its_threads(session, entry))
    if capture.failure is None:
        lost = sorted(set(stored) - set(capture.outputs))
        for name, tensor in capture.outputs.items():
            if name not in stored:
                continue
            layout = capture.layouts[name]
            apart = _apart(session, name)
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
                since = _since(session, entry, name, part, tensor, then)
                found["lines"] = [*found["lines"], *since]
                differences[name] = found
        wanted |= {name: entry.tensors[name] for name in lost}
    record(
        session,
        capture,
        claim="golden",
        variant=session.stage.case.golden,
        run=0,
        compare="exact",
        outputs=outputs,
        expected=wanted,
        differences=differences,
        not_compared=skipped,
    )


def _measure(
    session: Session, capture: Capture, stored: Mapping[str, Reference], entry: store.Entry
) -> None:
    """Judges by budget what has the dtype and shape that the golden knows; other dtypes or shapes
    and outputs that are gone are differences by themselves, which no budget excuses."""
    measurements: dict[str, Any] = {}
    differences: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    outputs: dict[str, str] = {}
    wanted: dict[str, str] = {}
    if capture.failure is None:
        for name in sorted(set(stored) - set(capture.outputs)):
            shape = tuple(stored[name].exact.shape)
            wanted[name] = str(Digest.zero(entry.outputs.get(name, "float64"), shape))
        for name, tensor in capture.outputs.items():
            apart = _apart(session, name)
            if name not in stored or apart is not None:
                skipped[name] = apart or "the golden does not hold it"
                continue
            layout = capture.layouts[name]
            digest = digest_at(tensor, layout)
            outputs[name] = str(digest)
            shape = tuple(stored[name].exact.shape)
            if (digest.dtype, digest.shape) != (entry.outputs.get(name, digest.dtype), shape):
                dtype = entry.outputs.get(name, digest.dtype)
                wanted[name] = str(Digest.zero(dtype, shape))
                continue
            judged = _judged(name, stored[name], tensor, layout)
            measurements[name] = measure(judged)
            if bool(judged.wrong.any()):
                found = reference_errors.explain_errors(name, tensor, judged)
                lines = [*found["lines"], *_changed(session, entry)]
                differences[name] = {**found, "lines": lines}
    record(
        session,
        capture,
        claim="golden",
        variant="float64",
        run=0,
        compare="exact" if wanted else "measured",
        outputs=outputs,
        expected=wanted if wanted else None,
        measurements=measurements,
        differences=differences,
        not_compared=skipped,
    )


def _judged(name: str, stored: Reference, tensor: Tensor, layout: Layout | None) -> Judged:
    parts = {
        part: _part(getattr(stored, part).to(tensor.device), tensor, layout)
        for part in packing.PARTS
    }
    return judge(name, tensor, Reference(**parts))


def _apart(session: Session, name: str) -> str | None:
    """Why a rank cannot compare an output with the whole, or None when it can."""
    if session.stage.world == 1:
        return None
    placement = placement_of(session.stage.case.placement, name)
    if placement is None:
        return NO_PLACEMENT
    return _OWN_PART if placement.kind == "local" else None


def _part(whole: Tensor, actual: Tensor, layout: Layout | None) -> Tensor:
    """This rank's part of a stored tensor; the whole when it has another shape than today's."""
    if layout is not None and tuple(whole.shape) == layout.full_shape:
        return whole.narrow(layout.dim, layout.start, actual.shape[layout.dim])
    return whole


def _since(
    session: Session,
    entry: store.Entry,
    name: str,
    golden: Tensor,
    actual: Tensor,
    then: Callable[[], Capture | None],
) -> list[str]:
    """What has changed since the golden was made, and which of the two is nearer to float64."""
    assert session.base is not None
    first = session.base.kept.get(name)
    stable = first is not None and str(digest_tensor(first)) == str(digest_tensor(actual))
    about = likely.told(golden, actual, _exact(session, name), stable=stable)
    told = [*_changed(session, entry), *about]
    again = then()
    if again is None:
        return told
    found = again.outputs.get(name)
    same = found is not None and str(digest_tensor(found)) == str(digest_tensor(golden))
    what = "gives the golden's bits: the result depends on the thread count"
    threads = entry.made["num_threads"]
    said = what if same else "differs too"
    return [*told, f"executed again with {threads} threads, as then: {said}"]


def _changed(session: Session, entry: store.Entry) -> list[str]:
    """What is known to be another than when the golden was made."""
    ours = keys.provenance(environment())
    skipped = ("commit", "dirty")
    changed = [
        text for text in keys.differing(ours, entry.made) if text.partition(" ")[0] not in skipped
    ]
    same = plans.source_digest(session.stage.case) == entry.source_digest
    lines = [
        "the code is the one that the golden was made with"
        if same
        else "the code has changed since the golden was made"
    ]
    return lines + ([f"changed since: {', '.join(changed)}"] if changed else [])


def _exact(session: Session, name: str) -> Tensor | None:
    """The case's float64 reference of an output, if it has one."""
    if session.stage.case.reference is None:
        return None
    try:
        return references.expected_of(session, session.stage.case.reference)[name].exact
    except Exception:  # a reference that fails is the claim `reference`'s business
        return None


def _with_its_threads(session: Session, entry: store.Entry) -> Capture | None:
    """What the thread count of the golden gives; None if it is today's, and on several ranks."""
    threads, now = entry.made.get("num_threads"), torch.get_num_threads()
    if type(threads) is not int or not 0 < threads <= _MOST_THREADS or threads == now:
        return None
    if session.stage.world > 1:
        return None
    assert session.base is not None
    try:
        torch.set_num_threads(threads)
        return execute(session.stage, session.base.given, group=session.group)
    finally:
        torch.set_num_threads(now)


def _trouble(session: Session, reason: str, detail: str) -> None:
    session.emit(
        Trouble(session.plan.case, reason, detail, claim="golden", rank=session.stage.rank)
    )
