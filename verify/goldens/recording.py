"""`verify golden update`: runs the cases, judges what a golden would hold, and writes it.

A golden says that somebody looked and found it right, so this refuses more than it allows: cases
that are not VERIFIED on repeat and on their reference or exact expectation, values that are not
finite, a golden that is too large to commit, a dirty tree or a changed golden without a reason, and
CI. Either everything that was asked for is written or nothing is. What has not changed keeps its
entry, provenance included.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verify.captures import facts_of
from verify.environment import source_state
from verify.errors import CaseError, VerifyError
from verify.goldens import changes, packing, store
from verify.goldens.status import elsewhere, lasting
from verify.goldens.store import Entry, Index
from verify.plans import RunOptions, source_digest
from verify.reasons import Verdict
from verify.running import joined_by_torchrun, run_here
from verify.targets import Found, find, twice
from verify.verdicts import CaseVerdict
from verify.workers import golden_path

Progress = Callable[[str], None]


class RefusedError(VerifyError):
    """A golden was not written, and why."""


@dataclass(frozen=True)
class Candidate:
    """A new entry, its tensors, and the ones it would replace (None when it is new)."""

    entry: Entry
    tensors: Mapping[str, Tensor]
    old: Entry | None
    old_tensors: Mapping[str, Tensor] | None


@dataclass(frozen=True)
class Change:
    """What an update writes: entries that are new or not the same any more, files, and the rows."""

    entries: list[Entry] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


def update(
    targets: Sequence[str | Found],
    folder: Path,
    *,
    reason: str = "",
    allow_nonfinite: bool = False,
    progress: Progress = lambda text: None,
) -> list[dict[str, Any]]:
    """Makes goldens of all cases of the targets that declare one; returns the rows of the change.

    Raises RefusedError, and CaseError when no case of a target declares a golden.
    """
    refuse_surroundings(reason)
    found = declaring(targets)
    index = store.read(folder)  # an unreadable folder is an error before anything runs
    with tempfile.TemporaryDirectory(prefix="verify-golden-") as place:
        kept = _execute(found, Path(place), progress)
        reason = " ".join(reason.split())
        change = None
        if not folder.exists():  # a refusal leaves no folder behind
            change = _change(found, _opened(kept), index, reason, allow_nonfinite)
        with store.locked(folder):
            now = store.read(folder)
            if change is None or now != index:
                change = _change(found, _opened(kept), now, reason, allow_nonfinite)
            if change.entries:
                replaced = {one.identity for one in change.entries}
                others = [one for one in now.entries if one.identity not in replaced]
                store.write(folder, [*others, *change.entries], change.files)
    return change.rows


def declaring(targets: Sequence[str | Found]) -> list[Found]:
    """The cases of the targets that declare a golden, each once."""
    given = [one for t in targets for one in (find(t) if isinstance(t, str) else [t])]
    found = [one for one in {one.target: one for one in given}.values() if one.case.golden]
    if not found:
        asked = ", ".join(one if isinstance(one, str) else one.target for one in targets)
        raise CaseError(
            f"no case of {asked} declares a golden; add golden='exact', 'float64' or 'bits' to"
            " @verify.case"
        )
    double = twice([one.case.name for one in found])
    if double is not None:
        raise CaseError(f"two cases called {double!r} declare goldens; rename one")
    return found


def refuse_surroundings(reason: str) -> None:
    """CI, a launcher, and a dirty tree without a reason."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        raise RefusedError(
            "goldens are not written in CI (the variable CI is set): make them where somebody looks"
            " at them, and commit them"
        )
    if joined_by_torchrun():
        raise RefusedError("goldens are made on one rank; start without torchrun")
    if not reason.strip() and source_state(Path.cwd())["dirty"]:
        raise RefusedError(
            "the working tree has uncommitted changes, so no commit says what made these goldens;"
            " commit them first, or say why: --reason TEXT"
        )


def _execute(found: Sequence[Found], place: Path, progress: Progress) -> list[Path]:
    """The files of what every case would store. All of them have to be VERIFIED."""
    cases = []
    for one in found:
        claims = ["repeat"]
        claims += [c for c in ("exact", "reference") if getattr(one.case, c) is not None]
        cases.append(replace(one, case=replace(one.case, claims=tuple(claims), ranks=1)))
    options = RunOptions(ranks=1, keep=place, keep_goldens=True)
    _, verdicts, _ = run_here(cases, options, progress)
    for verdict in verdicts:
        if verdict.verdict is not Verdict.VERIFIED:
            raise RefusedError(_not_verified(verdict))
    return [golden_path(place / "ranks1", index) for index in range(len(cases))]


def _opened(kept: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Their content, one after the other: all of it at once may not fit into memory."""
    for path in kept:
        yield torch.load(path, weights_only=True, mmap=True)


def _not_verified(verdict: CaseVerdict) -> str:
    claims = [claim for claim in verdict.claims if claim.verdict is not Verdict.VERIFIED]
    told = [
        f"{claim.claim}: verdict={claim.verdict} ({finding.reason}) {finding.detail}"
        for claim in claims
        for finding in claim.findings[:1]
    ]
    return (
        f"no golden was written: {verdict.case} is not VERIFIED: {'; '.join(told)}."
        f" See: verify run {verdict.target} --claims {','.join(c.claim for c in claims)}"
    )


def _change(
    found: Sequence[Found],
    kept: Iterator[Mapping[str, Any]],
    index: Index,
    reason: str,
    allow_nonfinite: bool,
) -> Change:
    """What has to be written, if anything. Raises RefusedError for the first case it refuses."""
    change = Change()
    for case, content in zip(found, kept, strict=True):
        _refuse_size(case, content["tensors"])
        one = _candidate(case, content, index, reason)
        _refuse_owner(one, case, index.folder)
        entry = one.entry
        if _unchanged(one):
            assert one.old is not None
            entry = replace(one.old, target=entry.target)  # where the case is now
            if one.old_tensors is None:
                entry = replace(entry, file=one.entry.file)
                change.rows.append(changes.restored(entry))
            elif entry == one.old:
                continue
        else:
            _refuse_content(one, reason, allow_nonfinite=allow_nonfinite)
            change.rows.extend(changes.rows(one.old, one.old_tensors, entry, one.tensors))
        change.entries.append(entry)
        if entry is one.entry or one.old_tensors is None:
            change.files[entry.file] = packing.to_bytes(one.tensors, entry.case, entry.kind)
    return change


def _candidate(found: Found, kept: Mapping[str, Any], index: Index, reason: str) -> Candidate:
    case = found.case
    tensors: dict[str, Tensor] = dict(kept["tensors"])
    digests = packing.digests_of(tensors)
    entry = Entry(
        case=case.name,
        kind=case.golden,
        key=kept["key"],
        reason=reason,
        target=lasting(found.target, index.folder),
        file=packing.file_name(case.name, case.golden, digests),
        inputs=kept["inputs"],
        source_digest=source_digest(case),
        made=kept["made"],
        outputs=dict(sorted(kept["outputs"].items())),
        tensors=digests,
        nonfinite=sum(facts_of(tensor).nonfinite for tensor in tensors.values()),
    )
    old = next((one for one in index.entries if one.identity == entry.identity), None)
    old_tensors = None
    if old is not None:
        try:
            old_tensors = packing.load(index.folder, old)
        except VerifyError:
            old_tensors = None  # an unreadable one is what this may be called to replace
    return Candidate(entry, tensors, old, old_tensors)


def _unchanged(one: Candidate) -> bool:
    """The same content for the same inputs; float64 values may differ by their own noise.

    A tensor file that is gone is no change, as long as the index says what was in it.
    """
    old = one.old
    if old is None or old.inputs != one.entry.inputs or old.outputs != one.entry.outputs:
        return False
    if dict(old.tensors) == dict(one.entry.tensors):
        return True
    if one.entry.kind != "float64" or one.old_tensors is None:
        return False
    return changes.same_reference(one.old_tensors, one.tensors)


def _refuse_owner(one: Candidate, found: Found, folder: Path) -> None:
    """A golden of the same name that another case may still declare: it would lose it silently."""
    problem = elsewhere(one.old, found, folder) if one.old is not None else ""
    if problem:
        raise RefusedError(f"no golden was written: that of {one.entry.case!r} {problem}")


def _refuse_size(found: Found, tensors: Mapping[str, Tensor]) -> None:
    size = packing.size_of(tensors)
    if size > packing.LARGEST:
        largest = max(tensors, key=lambda name: packing.size_of({name: tensors[name]}))
        raise RefusedError(
            f"no golden was written: that of {found.case.name!r} would have {size:,} bytes, most of"
            f" them in {largest}; at most {packing.LARGEST:,} are allowed. Make a case of the same"
            " code with smaller inputs, or return fewer tensors"
        )


def _refuse_content(one: Candidate, reason: str, *, allow_nonfinite: bool) -> None:
    entry = one.entry
    if entry.nonfinite and not allow_nonfinite:
        name = next(name for name, tensor in one.tensors.items() if facts_of(tensor).nonfinite)
        raise RefusedError(
            f"no golden was written: {entry.case} holds {entry.nonfinite} NaN or infinity, first in"
            f" {name}; a broken run must not become a golden. If they are meant: --allow-nonfinite"
        )
    if one.old is not None and not reason:
        raise RefusedError(
            f"no golden was written: that of {entry.case} would change; say why: --reason TEXT"
        )
